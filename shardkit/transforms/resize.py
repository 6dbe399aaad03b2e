"""A box of pixels -> an image of another size, in memory that the caller provides.

The kernels are those that torch's F.interpolate uses for uint8. Their results are within one grey level of Pillow's, at
several times the speed and without the GIL. They use one thread; additional work (a mirrored copy) uses as many threads
as torch may use, see ``use_one_thread``.
"""

import ctypes
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

Pixels = npt.NDArray[Any]


def resize_linear(pixels: Pixels, out: Pixels, *, mirrored: bool, antialias: bool) -> None:
    """Resize an image into another array, with linear interpolation.

    Args:
        pixels: uint8, (height, width, 3); any strides.
        out: uint8, (height, width, 3), contiguous.
        mirrored: Whether the image is mirrored, left to right.
        antialias: Whether all pixels contribute if the result is smaller, as in Pillow; if not, at most four for each
            pixel of the result.
    """
    import torch

    if not (pixels.flags.c_contiguous and pixels.flags.writeable):  # torch also copies, and warns about read-only ones
        pixels = pixels.copy()
    source, target = _as_tensor(pixels), _as_tensor(out)
    kernel = _kernel(antialias)
    if not mirrored:
        kernel(source, target)
        return
    made = torch.empty_like(target)  # channels last, like the target
    kernel(source, made)
    target.copy_(made.flip(3))


def resize_nearest(pixels: Pixels, out: Pixels, *, mirrored: bool) -> None:
    """Resize an image into another array: each pixel is the nearest pixel of the image, never a mixture.

    Args:
        pixels: (height, width, ...), of any type.
        out: (height, width, ...), of the same type.
        mirrored: Whether the image is mirrored, left to right.
    """
    rows, columns = (_nearest(*lengths) for lengths in zip(pixels.shape[:2], out.shape[:2], strict=True))
    np.take(pixels[rows], columns[::-1] if mirrored else columns, axis=1, out=out, mode="clip")


def use_one_thread() -> None:
    """Make torch use one thread for calls from this thread, and change nothing for other threads.

    It is meant for worker threads: if each of them used torch's threads, they would compete for the processors, and
    tens of microseconds would become milliseconds. ``torch.set_num_threads`` is not suitable: it also changes the
    number for threads that are started later.
    """
    import torch

    torch.get_num_threads()  # the first call in a thread sets its number to the process's
    try:
        openmp = ctypes.PyDLL(sys.modules["torch._C"].__file__)  # finds the OpenMP that torch is linked with
        openmp.omp_set_num_threads(1)
    except (AttributeError, OSError):  # torch was built without OpenMP
        return


def _nearest(length: int, out_length: int) -> npt.NDArray[np.int64]:
    """Return the nearest source pixel for each pixel of the result: floor((i + 1/2) * length / out_length)."""
    return (2 * np.arange(out_length) + 1) * length // (2 * out_length)


def _as_tensor(pixels: Pixels) -> "Tensor":
    """Return a view of shape (1, 3, height, width), channels last."""
    import torch

    return torch.from_numpy(pixels[None]).permute(0, 3, 1, 2)


@cache
def _kernel(antialias: bool) -> "Callable[[Tensor, Tensor], None]":  # noqa: FBT001 - the cache's key
    """Return a function that resizes one image into another: torch's in-place operator, if this torch has it."""
    import torch

    pixels = torch.arange(48, dtype=torch.uint8).view(1, 4, 4, 3).permute(0, 3, 1, 2)
    expected, found = torch.empty_like(pixels[:, :, :2, :2]), torch.empty_like(pixels[:, :, :2, :2])

    def interpolate(source: "Tensor", target: "Tensor") -> None:
        size = target.shape[2:]
        target.copy_(torch.nn.functional.interpolate(source, size, mode="bilinear", antialias=antialias))

    try:
        operator = getattr(torch.ops.aten, "_upsample_bilinear2d_aa" if antialias else "upsample_bilinear2d").out

        def write(source: "Tensor", target: "Tensor") -> None:
            operator(source, target.shape[2:], False, None, None, out=target)  # noqa: FBT003 - align_corners

        write(pixels, found)
    except (AttributeError, RuntimeError, TypeError):  # it is not part of torch's public interface
        return interpolate
    interpolate(pixels, expected)
    return write if torch.equal(found, expected) else interpolate
