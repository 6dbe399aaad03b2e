"""Decoded fields -> what a training loop needs: crops, resizing, other libraries' transforms, random numbers.

The modules, in the order in which a sample passes through them::

    rng            random numbers for one sample
    resize         a box of pixels -> an image of another size
    image_source   an image file -> the pixels of a box of it
    crops          images -> images of one size, for batches
    adapters       transforms of albumentations and torchvision -> repeatable ones
    apply          the fields of a sample -> what a training loop gets
"""
