"""A box of pixels -> an image of another size, in memory that is there already.

The kernels are those of torch that F.interpolate uses for uint8, the same to a grey level as Pillow's, at several times
their speed and without the GIL. They use one thread; what is done besides (a mirrored copy) uses as many as torch may,
see ``use_one_thread``.
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
    """Write an image into another of another size, with linear interpolation.

    Args:
        pixels: uint8, (height, width, 3); any strides.
        out: uint8, (height, width, 3), contiguous.
        mirrored: Whether left becomes right.
        antialias: Whether all pixels count where the result is smaller, as in Pillow; else at most four for each.
    """
    import torch

    if not (pixels.flags.c_contiguous and pixels.flags.writeable):  # torch copies too, and warns of what is read-only
        pixels = pixels.copy()
    source, target = _as_tensor(pixels), _as_tensor(out)
    kernel = _kernel(antialias)
    if not mirrored:
        kernel(source, target)
        return
    made = torch.empty_like(target)  # channels last, like it
    kernel(source, made)
    target.copy_(made.flip(3))


def resize_nearest(pixels: Pixels, out: Pixels, *, mirrored: bool) -> None:
    """Write an image into another of another size: each pixel is the nearest one of the image, never a mixture.

    Args:
        pixels: (height, width, ...), of any type.
        out: (height, width, ...), of the same type.
        mirrored: Whether left becomes right.
    """
    rows, columns = (_nearest(*lengths) for lengths in zip(pixels.shape[:2], out.shape[:2], strict=True))
    np.take(pixels[rows], columns[::-1] if mirrored else columns, axis=1, out=out, mode="clip")


def use_one_thread() -> None:
    """Let torch compute with one thread where this thread calls it, and change nothing for others.

    For threads that are one of many: where each of them had torch's threads, they would fight for the processors, and
    tens of microseconds become milliseconds. ``torch.set_num_threads`` is not for that: it also sets what threads that
    are started later get.
    """
    import torch

    torch.get_num_threads()  # a thread's first question sets its number to the process's
    try:
        openmp = ctypes.PyDLL(sys.modules["torch._C"].__file__)  # finds the OpenMP that torch is linked with
        openmp.omp_set_num_threads(1)
    except (AttributeError, OSError):  # torch was built without OpenMP
        return


def _nearest(length: int, out_length: int) -> npt.NDArray[np.int64]:
    """Return for each pixel of the result the nearest of the source: floor((i + 1/2) * length / out_length)."""
    return (2 * np.arange(out_length) + 1) * length // (2 * out_length)


def _as_tensor(pixels: Pixels) -> "Tensor":
    """Return a view of shape (1, 3, height, width), channels last."""
    import torch

    return torch.from_numpy(pixels[None]).permute(0, 3, 1, 2)


@cache
def _kernel(antialias: bool) -> "Callable[[Tensor, Tensor], None]":  # noqa: FBT001 - the cache's key
    """Return what writes one image into another: torch's operator that does it in place, if this torch has it."""
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
