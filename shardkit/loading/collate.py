"""Samples -> one batch: a dict of fields. A field is a tensor if its values have one shape and type, or else a list."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardkit.codecs.registry import names_image
from shardkit.errors import ArgumentError, SampleError
from shardkit.sample import KEY, RESERVED, FieldSelection, Sample

if TYPE_CHECKING:
    import torch

Batch: TypeAlias = dict[str, Any]
"""The fields of a batch, and the samples' keys under ``__key__``."""


def collate(samples: Sequence[Sample], *, selection: FieldSelection, made: Mapping[str, Any] | None = None) -> Batch:
    """Return samples as one batch.

    Arrays and tensors of one shape and type become a tensor with a new first dimension; so do whole numbers (int64),
    floats (float64) and bools. Images in an image field, which are uint8 or uint16, (height, width, channels), become
    (batch, channels, height, width), with the channels last in memory. Everything else (text, bytes, values of
    different shapes, None) becomes a list.

    Args:
        samples: The samples of the batch, at least one.
        selection: Which fields were picked; it determines which are images.
        made: Fields of the batch that are already made. The samples must have these fields, with any value.

    Raises:
        SampleError: Not all samples have the same fields.
        ArgumentError: A sample is not a mapping.

    Example:
        >>> everything = FieldSelection.parse(None)
        >>> collate([{"__key__": "a", "cls": 3}, {"__key__": "b", "cls": 4}], selection=everything)
        {'cls': tensor([3, 4]), '__key__': ['a', 'b']}
    """
    for sample in samples:
        if not isinstance(sample, Mapping):
            raise ArgumentError(
                f"transform= returned a {type(sample).__name__}, expected a dict of fields; return one, or pass a "
                "collate_fn for what it returns, as torch.utils.data.default_collate"
            )
    names = [name for name in samples[0] if name not in RESERVED]
    fields = set(names)
    for sample in samples:
        if sample.keys() - RESERVED != fields:
            raise _differs(sample, names)
    batch: Batch = {}
    for name in names:
        if made and name in made:
            batch[name] = made[name]
        else:
            batch[name] = stack([sample[name] for sample in samples], images=holds_images(selection, name))
    batch[KEY] = [sample.get(KEY) for sample in samples]
    return batch


def stack(values: list[Any], *, images: bool = False) -> Any:
    """Return values as one tensor if they have one shape and type, otherwise unchanged. See ``collate``."""
    import torch

    kinds = {type(value) for value in values}
    if len(kinds) != 1:
        return values
    kind = kinds.pop()
    if kind in (int, float, bool):
        try:
            return torch.tensor(values, dtype={int: torch.int64, float: torch.float64, bool: torch.bool}[kind])
        except (OverflowError, RuntimeError, ValueError):  # more than 64 bits
            return values
    if issubclass(kind, torch.Tensor):
        is_regular = len({(value.shape, value.dtype, value.device) for value in values}) == 1
        return torch.stack(values) if is_regular else values
    if not issubclass(kind, np.ndarray | np.generic):
        return values
    shape, dtype = values[0].shape, values[0].dtype
    if any(value.shape != shape or value.dtype != dtype for value in values):
        return values
    rows = np.empty((len(values), *shape), dtype=dtype)
    if shape:
        for row, value in zip(rows, values, strict=True):
            row[...] = value
    else:
        rows[...] = values
    try:
        tensor = torch.from_numpy(rows)
    except (TypeError, ValueError):  # text, objects, records; other byte orders
        return values
    return channels_first(tensor) if images else tensor


def without_rows(batch: Batch) -> Batch:
    """Return a batch with the fields of another, but without rows: its tensors and lists have length 0."""
    import torch

    return {name: torch.empty_like(v[:0]) if isinstance(v, torch.Tensor) else [] for name, v in batch.items()}


def channels_first(images: "torch.Tensor") -> "torch.Tensor":
    """Return images, (batch, height, width, channels), as (batch, channels, height, width); other tensors unchanged.

    Images are uint8 or uint16 and have 2, 3 or 4 channels: grey and alpha, RGB, or RGB and alpha.
    """
    import torch

    are_images = images.dtype in (torch.uint8, torch.uint16) and images.ndim == 4 and images.shape[3] in (2, 3, 4)
    return images.permute(0, 3, 1, 2) if are_images else images


def holds_images(selection: FieldSelection, name: str) -> bool:
    """Return whether a name refers only to image fields.

    Example:
        >>> holds_images(FieldSelection.parse({"image": "jpg;png"}), "image")
        True
    """
    fields: Collection[str] = selection.wanted.get(name, (name,))
    return all(map(names_image, fields))


def _differs(sample: Sample, names: list[str]) -> SampleError:
    here = sorted(sample.keys() - RESERVED)
    key = str(sample.get(KEY, ""))
    return SampleError(
        f"sample {key!r}: has the fields {', '.join(here)}, the first sample of its batch has "
        f"{', '.join(sorted(names))}; choose with fields=, where 'name?' gives None for what is missing, let "
        "transform= return the same fields for all samples, or pass a collate_fn",
        key=key,
    )
