"""A part of torchvision's v2, for when torchvision cannot be imported: each build of it needs one build of torch.

The transforms draw the same random numbers in the same way, from torch's global generator, and know its tensor types.
"""

import types

import torch


class Image(torch.Tensor):
    """An image, (3, height, width)."""


class Mask(torch.Tensor):
    """A mask, (height, width)."""

    def __new__(cls, data):
        """Return a mask from a tensor or an array."""
        return torch.as_tensor(data).as_subclass(cls)


def _image(data):
    return data.as_subclass(Image)


tv_tensors = types.SimpleNamespace(Image=_image, Mask=Mask)


class _Transform(torch.nn.Module):
    def forward(self, inputs):
        values = inputs if isinstance(inputs, dict) else {"image": inputs}
        shapes = [value.shape for value in values.values() if isinstance(value, torch.Tensor)]
        if not shapes:
            raise TypeError("there is no image")
        parameters = self.draw(*shapes[0][-2:])
        made = {
            name: self.change(value, *parameters) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
        return made if isinstance(inputs, dict) else made["image"]


class RandomCrop(_Transform):
    """Cuts out a part of a given size."""

    def __init__(self, size):
        """Take the height and the width."""
        super().__init__()
        self.size = size

    def draw(self, height, width):
        """Return the position of the part."""
        top = torch.randint(0, height - self.size[0] + 1, size=(1,)).item()
        return top, torch.randint(0, width - self.size[1] + 1, size=(1,)).item()

    def change(self, value, top, left):
        """Return the part."""
        return value[..., top : top + self.size[0], left : left + self.size[1]]


class RandomHorizontalFlip(_Transform):
    """Mirrors half of the time."""

    def draw(self, _height, _width):
        """Return whether to mirror."""
        return (torch.rand(1) < 0.5,)

    def change(self, value, mirrored):
        """Return the image, mirrored or not."""
        return value.flip(-1) if mirrored else value


class RandomErasing(_Transform):
    """Blackens a part."""

    def draw(self, height, width):
        """Return the part to blacken."""
        scale = torch.empty(1).uniform_(0.2, 0.8).item()
        return (*(torch.randint(0, side, size=(1,)).item() for side in (height, width)), scale)

    def change(self, value, top, left, scale):
        """Return the image with a hole."""
        value = value.clone()
        value[..., top : top + int(20 * scale), left : left + int(20 * scale)] = 0
        return value


class ToDtype(_Transform):
    """Converts bytes to numbers from 0 to 1."""

    def __init__(self, dtype, *, scale):
        """Take the type."""
        super().__init__()
        self.dtype, self.scale = dtype, scale

    def draw(self, _height, _width):
        """Draw nothing."""
        return ()

    def change(self, value):
        """Return the numbers."""
        return value.to(self.dtype) / 255


class Compose(torch.nn.Module):
    """Calls transforms one after the other."""

    def __init__(self, transforms):
        """Take the transforms."""
        super().__init__()
        self.transforms = transforms

    def forward(self, inputs):
        """Call the transforms."""
        for transform in self.transforms:
            inputs = transform(inputs)
        return inputs
