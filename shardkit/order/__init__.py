"""The order of an epoch: arithmetic only, without I/O.

The modules, in the order of a sample's way::

    plan       which sample comes at which position of an epoch
    schedule   the order of an epoch -> which blocks each batch needs
    ranks      which of how many processes this one is
"""
