"""Existing files and shards -> samples to pack.

The modules::

    folders     files -> samples
    filenames   names of files -> keys and fields
    layout      refuses folders whose names do not mean what they seem to mean
    labels      tables of labels -> a label for each file
    shards      shards -> samples, to be packed again
"""
