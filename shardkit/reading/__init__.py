"""Shards -> samples: forward, by block, by number.

The modules, in the order in which a sample passes through them::

    missing             whether all shards and indexes are there
    forward             shards -> samples
    class_lists         the class lists of several datasets, joined into one
    block               one block's bytes -> its samples
    index_cache         the indexes of a dataset's shards, read once and kept within a memory bound
    extents             which byte ranges of a block to fetch if only some of its fields are wanted
    page_cache          blocks in the page cache of the system, read sample by sample
    access              single blocks and samples of shards
    memory              memory for blocks and batches, which is reused
    lru                 the most recently used values, kept within a memory bound
    disk_cache          blocks kept on this machine's disk
    disk_cache_folder   the folder of a disk cache: its files, its owner, its lock
    filters             a condition, numbers or a mask -> the samples they select
    dataset             a dataset's samples, by number
"""
