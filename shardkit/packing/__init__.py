"""Samples -> plan -> shards -> dataset.

The modules, in the order of a sample's way::

    plan       the samples of each shard, and their order
    records    samples of a source, encoded when needed
    checks     samples -> the fields that cannot be decoded
    workers    tasks in threads, processes, executors
    spill      samples of unknown size, held in plain shards until they are packed
    tasks      the task of a worker: one shard
    lock       one pack at a time in a folder
    target     a dataset's folder, and the files of earlier packs in it
    writer     samples -> shards, in the order given
    job        a source -> a dataset: shuffled, levelled, split
    indexing   shards -> a dataset
"""
