"""Samples -> plan -> shards -> dataset.

The modules, in the order of a sample's way::

    plan       which sample goes into which shard
    records    samples of a source, encoded when needed
    checks     samples -> which of their fields cannot be decoded
    workers    tasks in threads, processes, executors
    spill      samples of unknown size, in plain shards meanwhile
    tasks      a shard: what workers do
    lock       one pack at a time in a folder
    target     what an earlier pack left
    writer     samples -> shards, in the order given
    job        a source -> a dataset: shuffled, levelled, split
    indexing   shards -> a dataset
"""
