"""Shards -> samples: forward, by block, by number.

The modules, in the order of a sample's way::

    missing             shards and indexes that are not there
    forward             shards -> samples
    class_lists         the class lists of the datasets that shards are of, joined into one
    block               one block's bytes -> its samples
    index_cache         what the indexes of a dataset's shards say, within bounds
    extents             which bytes of a block are fetched where little of it is wanted
    page_cache          blocks that the system holds in memory, read sample by sample
    access              blocks and samples of shards, each read on its own
    memory              memory for blocks and batches, used again
    lru                 what was read last, kept in memory within bounds
    disk_cache          blocks, kept on this machine's disk
    disk_cache_folder   a folder that is a cache: whose it is, and what is in it
    filters             a condition, numbers or a mask -> the samples they select
    dataset             a dataset's samples by their numbers
"""
