"""Samples -> batches for a training loop.

The modules, in the order in which a sample passes through them::

    loader         batches for a training loop, which resumes after any of them
    sampler        the order of an epoch for a stock DataLoader
    stream         shards -> samples for training, forward only
    epochs         the number of each pass over a stream, shared by worker processes
    collate        samples -> one batch
    columnar       blocks of small samples -> batches, without a loop over samples
    batch_memory   the memory of a batch, which is filled row by row
    rows           the bytes of a sample -> a row of a batch, in threads or processes
    threads        threads for small tasks, which end with the program
    fetch          blocks, read ahead in the order of the epoch
    engine         the blocks of an epoch, read ahead -> its batches, in order
"""
