"""The format of a dataset on disk: tar members, shards, their indexes, the manifest.

The modules, in the order of a sample's way::

    tar_header     what a tar header says <-> its 512 bytes
    tar            members <-> bytes
    index          where each sample of a shard lies
    columns        fields -> values in the index
    classes        what class numbers mean, and what becomes of them where datasets meet
    manifest       the list of a dataset's shards
    scan           a shard -> all that an index says of it
    shard_writer   samples -> one shard
"""
