"""The format of a dataset on disk: tar members, shards, their indexes, the manifest.

The modules, in the order of a sample's way::

    tar_header     what a tar header says <-> its 512 bytes
    tar            members <-> bytes
    parquet        Parquet files of which nothing is parsed before it is compared
    manifest       the list of a dataset's shards
    index          where each sample of a shard lies
    columns        fields -> values in the index
    side_files     the block tables and the columns of all shards, each in one file
    classes        what class numbers mean, and what becomes of them where datasets meet
    scan           a shard -> all that an index says of it
    shard_writer   samples -> one shard
"""
