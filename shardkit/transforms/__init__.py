"""Decoded fields -> what a training loop wants: crops, resizing, other libraries' transforms, random numbers.

The modules, in the order of a sample's way::

    rng            random numbers for one sample
    resize         a box of pixels -> an image of another size
    image_source   an image file -> the pixels of a box of it
    crops          images -> images of one size, for batches
    adapters       transforms of albumentations and torchvision -> repeatable ones
    apply          what was read -> what a training loop gets
"""
