"""A field's value <-> bytes: images, arrays, text, numbers; and the compressed formats of shards.

The modules, in the order in which a sample passes through them::

    decompress   one member or frame of a compressed format -> bytes
    compress     frames and compressed streams <-> bytes
    arrays       arrays and tensors <-> bytes
    images       arrays of pixels <-> image files
    registry     a field's value <-> bytes
"""
