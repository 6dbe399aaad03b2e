"""The memory of a batch: each row is written to its place, so that the batch is complete when its last row is written.

The fields, shapes and types are expected to be those of the previous batch. Values that differ are collated when all
rows are made.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.errors import ArgumentError
from shardkit.loading.collate import channels_first, collate, holds_images
from shardkit.reading.memory import Buffers, SharedBuffers, SharedMemory, shared_memory, take_tensor
from shardkit.sample import FieldSelection

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64  # bytes, for each column: a cache line, for vector instructions
_LEAST_BYTES = 256  # the least size of a value in the batch's memory: collating smaller ones takes hardly any time


class Placed(Enum):
    """The placeholder for a value that is in its batch's memory."""

    IN_SLAB = 0


class Column(NamedTuple):
    """The shape and type that a field has in all rows of a batch.

    Attributes:
        shape: The shape of a value.
        dtype: Its type, as a NumPy type string.
        is_tensor: Whether it is a tensor, and not an array.
    """

    shape: tuple[int, ...]
    dtype: str
    is_tensor: bool

    @property
    def nbytes(self) -> int:
        """The size of a value in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class Slab:
    """The memory of a batch: one column for each field.

    Args:
        columns: The shape and type of each field.
        rows: The number of rows for which there is room.
        memory: uint8, (``nbytes``,) or more, with any content.
        shared: The same memory, for other processes to map; None if they cannot.

    Attributes:
        columns: As given.
        rows: As given.
        shared: As given.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        rows: int,
        memory: "torch.Tensor",
        shared: SharedMemory | None = None,
    ) -> None:
        self.columns = columns
        self.rows = rows
        self.shared = shared
        self._memory = memory
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._starts: dict[str, int] = {}
        array, start = memory.numpy(), 0
        for name, column in columns.items():
            stop = start + rows * column.nbytes
            self._arrays[name] = array[start:stop].view(column.dtype).reshape(rows, *column.shape)
            self._starts[name] = start
            start = stop + -stop % _ALIGNMENT

    @staticmethod
    def nbytes(columns: Mapping[str, Column], rows: int) -> int:
        """Return how many bytes a slab needs."""
        return sum(size + -size % _ALIGNMENT for size in (rows * column.nbytes for column in columns.values()))

    def row(self, i: int) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays into which a row's values are written."""
        return {name: array[i] for name, array in self._arrays.items()}

    def put(self, value: Any, row: Mapping[str, npt.NDArray[Any]]) -> Any:
        """Write a transform's values to a row, and return the value with placeholders for those that fit there."""
        if not isinstance(value, Mapping):
            return value
        placed: dict[str, Any] = {}
        for name, column in self.columns.items():
            found: Any = value.get(name)
            out = row[name]
            if found is not out:
                if _column(found) != column:
                    continue
                out[...] = found.numpy() if column.is_tensor else found
            placed[name] = Placed.IN_SLAB
        return {**value, **placed} if placed else value

    def value(self, name: str, i: int) -> Any:
        """Return a value that is in a row."""
        import torch

        array = self._arrays[name][i]
        return torch.from_numpy(array) if self.columns[name].is_tensor else array

    def tensor(self, name: str, rows: Sequence[int]) -> "torch.Tensor":
        """Return the values of a field in some rows: a view of the slab if these are all rows, otherwise a copy."""
        import torch

        array, start = self._arrays[name], self._starts[name]
        if len(rows) < self.rows:
            return torch.from_numpy(array[list(rows)])
        # A view of torch's own tensor, so that torch does not reuse pinned memory until copies to a GPU have ended.
        dtype = torch.from_numpy(array[:0]).dtype
        return self._memory[start : start + array.nbytes].view(dtype).view(array.shape)


class BatchMaker:
    """Makes batches from rows.

    Args:
        selection: Which fields were picked.
        collate_fn: Makes the batches instead of ``collate``; then they have no slabs.
        buffers: The memory for slabs, unless they are in memory pinned for a GPU.
    """

    def __init__(
        self,
        selection: FieldSelection,
        collate_fn: Callable[[list[Any]], Any] | None,
        buffers: Buffers,
    ) -> None:
        self._selection = selection
        self._collate_fn = collate_fn
        self._buffers = buffers
        self._columns: dict[str, Column] = {}
        self._rows = 1

    @property
    def nbytes(self) -> int:
        """The approximate size in bytes of the last requested slab; at least 1."""
        return max(1, Slab.nbytes(self._columns, self._rows))

    def slab(self, rows: int) -> Slab | None:
        """Return the memory for a batch; None if the fields of a batch are not known yet, or none is placed there."""
        import torch

        columns, self._rows = self._columns, rows
        if not columns or not rows:
            return None
        nbytes = Slab.nbytes(columns, rows)
        if isinstance(self._buffers, SharedBuffers):
            memory = self._buffers.take(nbytes)
            return Slab(columns, rows, torch.from_numpy(memory), shared_memory(memory))
        return Slab(columns, rows, take_tensor(self._buffers, nbytes))

    def batch(self, values: list[Any], slab: Slab | None, kept: Sequence[int]) -> Any:
        """Return a batch; None if it has no rows and there is no ``collate_fn``.

        Args:
            values: The values that the transforms returned.
            slab: The memory where some of them are.
            kept: The row of each value in the slab.

        Raises:
            ArgumentError: ``collate_fn`` raised StopIteration. Its other errors are raised unchanged.
        """
        if self._collate_fn is not None:
            try:
                return self._collate_fn(values)
            except StopIteration as error:  # a loop over batches would end there, and the rest would be silently lost
                raise ArgumentError(
                    "collate_fn= raised StopIteration, which would be taken for the end of the epoch; give next() a "
                    "default, or raise another error"
                ) from error
            except Exception as error:
                if not values:
                    error.add_note("collate_fn= got an empty list: all samples of the batch were skipped")
                raise
        if not values:
            return None
        if slab is None:
            batch = collate(values, selection=self._selection)
            self._columns = _columns(batch, values)
            return batch
        made: dict[str, Any] = {}
        for name, column in slab.columns.items():
            if all(isinstance(value, Mapping) and value.get(name) is Placed.IN_SLAB for value in values):
                is_image = not column.is_tensor and holds_images(self._selection, name)
                made[name] = channels_first(slab.tensor(name, kept)) if is_image else slab.tensor(name, kept)
        values = [_taken_out(value, slab, i, made) for value, i in zip(values, kept, strict=True)]
        batch = collate(values, selection=self._selection, made=made)
        if len(made) < len(slab.columns):
            others = _columns({name: value for name, value in batch.items() if name not in made}, values)
            self._columns = {name: slab.columns[name] for name in made} | others
        return batch


def _taken_out(value: Any, slab: Slab, i: int, made: Collection[str]) -> Any:
    """Return a transform's value with its placeholders replaced, except for fields that the batch already has."""
    if not isinstance(value, Mapping):
        return value
    names = [name for name in slab.columns if name not in made and value.get(name) is Placed.IN_SLAB]
    return {**value, **{name: slab.value(name, i) for name in names}} if names else value


def _columns(batch: Mapping[str, Any], values: Sequence[Any]) -> dict[str, Column]:
    """Return the shapes and types of those large fields that are tensors in a batch."""
    import torch

    found = {name: _column(values[0].get(name)) for name, made in batch.items() if isinstance(made, torch.Tensor)}
    return {name: column for name, column in found.items() if column and column.nbytes >= _LEAST_BYTES}


def _column(value: Any) -> Column | None:
    """Return a value's shape and type; None if it is neither an array nor a tensor that NumPy can view."""
    import torch

    if type(value) is np.ndarray:
        return Column(value.shape, value.dtype.str, is_tensor=False)
    if (
        type(value) is not torch.Tensor
        or value.device.type != "cpu"
        or value.layout != torch.strided
        or value.requires_grad
        or value.is_conj()
        or value.is_neg()
    ):
        return None
    try:
        return Column(tuple(value.shape), value.numpy().dtype.str, is_tensor=True)
    except TypeError:  # NumPy does not have the type, for example bfloat16
        return None
