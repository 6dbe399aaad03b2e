"""Samples -> batches for a training loop.

The modules, in the order of a sample's way::

    loader         batches for a training loop, resumable between any two
    sampler        the order of an epoch for a stock DataLoader
    stream         shards -> samples for training, forward only
    epochs         which epoch a pass over a stream is
    collate        samples -> one batch
    columnar       blocks of small samples -> batches, without a loop over samples
    batch_memory   the memory of a batch, written to row by row
    rows           the bytes of a sample -> a row of a batch, in threads or processes
    threads        small tasks, done in threads that end
    fetch          blocks, ahead of time and in order
    engine         the blocks of an epoch, fetched ahead -> its batches, in order
"""
