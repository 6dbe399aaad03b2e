"""Other people's data -> samples to pack.

The modules, in the order of a sample's way::

    folders     files -> samples
    filenames   names of files -> keys and fields
    layout      which folders mean something else than their names would say
    labels      tables of labels -> a label for each file
    shards      shards -> samples, to be packed again
"""
