"""Blocks of small samples -> columns, whole blocks at a time; columns -> batches, gathered without a loop over samples.

If all fields are light (arrays of one shape, numbers, text, bytes) and there is no transform of single samples, a block
is decoded as a whole as soon as it has been read, and its bytes are freed. A batch is then one gather for each field.
The rows of irregular blocks (other fields, other shapes, a value that cannot be decoded) are made one by one, with the
same result, and with errors in their place in the order.
"""

import threading
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardkit.codecs.registry import Decoder, LightKind, light_kind
from shardkit.errors import ShardkitError
from shardkit.format.tar_header import BLOCK_BYTES, padding
from shardkit.loading.collate import Batch
from shardkit.order.plan import IntArray
from shardkit.reading.block import Block
from shardkit.reading.memory import Buffers, take_tensor
from shardkit.sample import KEY, FieldSelection, Sample

Spans: TypeAlias = dict[str, tuple[IntArray, IntArray]]
"""Where the data of each field begins and ends in a block: int64, (samples,)."""

_NAME = slice(0, 100)  # of a tar header
_SIZE = slice(124, 135)  # its digits
_SIZE_END, _KIND, _PREFIX = 135, 156, 345
_OCTAL = 8 ** np.arange(10, -1, -1, dtype=np.int64)
_LEAST_REGULAR = 64  # samples in a block; with fewer, reading all headers at once saves no time
_LARGE = 4096  # bytes; larger values stay in their block until they are needed, so that they are copied only once
_MAX_DIGITS = 18  # a number of 18 digits always fits into 64 bits


class Values(NamedTuple):
    """The values of a field in a block.

    Attributes:
        array: Numbers, (samples, ...), of a type that torch has, or objects, (samples,). It may be a view of the block.
        are_ints: Whether each value is an int, and not an array without dimensions.
    """

    array: npt.NDArray[Any]
    are_ints: bool = False

    @property
    def kind(self) -> tuple[bool, "np.dtype[Any]", tuple[int, ...]]:
        """The type and shape of one value."""
        return self.are_ints, self.array.dtype, self.array.shape[1:]


class ColumnReader:
    """Decodes whole blocks.

    Args:
        selection: Which fields are picked.
        decoder: How they are decoded; None keeps bytes.
    """

    def __init__(self, selection: FieldSelection, decoder: Decoder | None) -> None:
        self._selection = selection
        self._decoder = decoder

    def supports(self, fields: tuple[str, ...]) -> bool:
        """Return whether all picked fields of a dataset are light."""
        wanted = self._selection.wanted or {field: (field,) for field in fields}
        asked = {
            self._selection.with_decoding(name, field)
            for name, alternatives in wanted.items()
            for field in alternatives
            if field in fields
        }
        return all(light_kind(field, self._decoder) for field in asked)

    def read(self, block: Block) -> tuple[list[str], dict[str, Values]] | None:
        """Return a block's keys and the values of each picked name; None if values differ in kind or are damaged."""
        try:
            is_tar = block.is_whole and block.samples >= _LEAST_REGULAR
            found = regular_spans(block.data, block.samples) if is_tar else None
            found = found or _spans(block)
            if found is None:
                return None
            keys, spans = found
            chosen = self._selection.choose({KEY: "", **spans}) if self._selection.wanted else {f: f for f in spans}
            columns = {name: self._column(block, name, field, spans) for name, field in chosen.items()}
        except (ShardkitError, ValueError):  # raised again in the row's place, when the row is made
            return None
        return keys, columns

    def _column(self, block: Block, name: str, field: str | None, spans: Spans) -> Values:
        if field is None:
            return Values(np.full(block.samples, None))
        begins, ends = spans[field]
        kind = light_kind(self._selection.with_decoding(name, field), self._decoder)
        if kind is LightKind.NPY and self._decoder:
            return Values(self._arrays(self._decoder, block.data, field, begins, ends))
        if kind is LightKind.INT and (numbers := parse_digits(block.data, begins, ends)) is not None:
            return Values(numbers, are_ints=True)
        data, places = block.data, zip(begins.tolist(), ends.tolist(), strict=True)
        column = np.empty(block.samples, dtype=object)
        if kind is LightKind.TEXT:
            column[:] = [str(data[begin:end], "utf-8") for begin, end in places]
        elif kind is LightKind.INT and self._decoder:
            ints = [self._decoder.decode(field, bytes(data[begin:end])) for begin, end in places]
            return Values(np.array(ints, dtype=np.int64), are_ints=True)
        elif int((ends - begins).sum()) < _LARGE * block.samples:
            column[:] = [bytes(data[begin:end]) for begin, end in places]
        else:
            view = memoryview(data)
            column[:] = [view[begin:end] for begin, end in places]
        return Values(column)

    @staticmethod
    def _arrays(
        decoder: Decoder, data: bytes | memoryview, field: str, begins: IntArray, ends: IntArray
    ) -> npt.NDArray[Any]:
        """Return the arrays of a field as one array. Raises ValueError if their headers or their spacing differ."""
        size, step = int(ends[0] - begins[0]), int(begins[1] - begins[0]) if len(begins) > 1 else 0
        first = decoder.decode(field, bytes(data[int(begins[0]) : int(ends[0])]))
        start = size - first.nbytes
        if (
            not first.nbytes
            or not first.flags.c_contiguous
            or (ends - begins != size).any()
            or (np.diff(begins) != step).any()
            or not _torch_takes(first.dtype)
        ):
            raise ValueError("not alike")
        bytes_of = np.frombuffer(data, dtype=np.uint8)[int(begins[0]) :]
        rows = np.lib.stride_tricks.as_strided(bytes_of, (len(begins), size), (step, 1), writeable=False)
        if (rows[:, :start] != rows[0, :start]).any():
            raise ValueError("not alike")
        values: npt.NDArray[Any] = rows[:, start:].view(first.dtype)
        return values.reshape(len(begins), *first.shape)


class Arena:
    """The columns of the blocks that are held, from which batches are gathered. Threads may use it at the same time.

    Args:
        reader: Decodes the blocks.
        buffers: The memory for batches.
        places: The number of blocks for which there is room. The system allocates memory only to places that are used.
        block_samples: How many samples a block has at most.
    """

    def __init__(self, reader: ColumnReader, buffers: Buffers, places: int, block_samples: int) -> None:
        self._reader = reader
        self._buffers = buffers
        self.block_samples = block_samples
        self._rows = places * block_samples
        self._columns: dict[str, Values] | None = None  # as in the first block; others must have the same, in order
        self._lock = threading.Lock()

    def put(self, place: int, block: Block) -> bool:
        """Decode a block into a place; return False if its rows must be made one by one."""
        found = self._reader.read(block)
        if found is None:
            return False
        keys, columns = found
        columns[KEY] = Values(np.array(keys, dtype=object))
        with self._lock:
            if self._columns is None:
                self._columns = {
                    name: values._replace(array=np.empty((self._rows, *values.array.shape[1:]), values.array.dtype))
                    for name, values in columns.items()
                }
            own = self._columns
        if [(name, values.kind) for name, values in own.items()] != [(n, v.kind) for n, v in columns.items()]:
            return False
        start = place * self.block_samples
        for name, values in columns.items():
            own[name].array[start : start + len(values.array)] = values.array
        return True

    def clear(self, place: int) -> None:
        """Free the Python objects of a block."""
        start = place * self.block_samples
        for column, *_ in (self._columns or {}).values():
            if column.dtype == object:
                column[start : start + self.block_samples] = None

    def batch(self, rows: IntArray) -> Batch:
        """Return a batch of rows, numbered over all places; it equals what ``collate`` makes of the samples."""
        import torch

        batch: Batch = {}
        for name, (column, _) in (self._columns or {}).items():
            if column.dtype == object:
                batch[name] = _own(column.take(rows).tolist())
                continue
            dtype = torch.from_numpy(column[:0]).dtype
            memory = take_tensor(self._buffers, len(rows) * column[0].nbytes)
            batch[name] = taken = memory.view(dtype).view(len(rows), *column.shape[1:])
            column.take(rows, axis=0, out=taken.numpy(), mode="clip")  # "raise" would make a copy first
        return batch

    def sample(self, row: int) -> Sample:
        """Return one sample, equal to a row that is made on its own."""
        sample: Sample = {}
        for name, (column, are_ints) in (self._columns or {}).items():
            value = column[row]
            if column.dtype == object:
                (sample[name],) = _own([value])
            else:
                sample[name] = int(value) if are_ints else np.array(value)
        return sample


def _own(values: list[Any]) -> list[Any]:
    """Return values, with views of blocks replaced by copies."""
    if memoryview in set(map(type, values)):
        return [bytes(value) if type(value) is memoryview else value for value in values]
    return values


def regular_spans(data: bytes | memoryview, samples: int) -> tuple[list[str], Spans] | None:
    """Return the keys and spans of a block whose samples all have the same members with the same spacing.

    The headers' checksums are not computed, because the block's checksum was already compared. Return None if anything
    differs from the common case: plain headers, and names of one length that differ only in their keys.
    """
    if len(data) % (samples * BLOCK_BYTES):
        return None
    table = np.frombuffer(data, dtype=np.uint8).reshape(samples, -1)
    step = table.shape[1]
    firsts = np.arange(samples, dtype=np.int64) * step
    key_length, keys, spans, at = 0, None, Spans(), 0
    while at < step:
        header = table[:, at : at + BLOCK_BYTES]
        first = bytes(header[0, _NAME]).partition(b"\0")[0]
        key, dot, rest = first.partition(b".")
        if keys is None:
            key_length = len(key)
            keys = header[:, :key_length]
            if not _are_plain_keys(keys):
                return None
        sizes = _octal(header[:, _SIZE])
        if (
            not dot
            or not rest
            or not rest.isascii()
            or b"__" in rest
            or b"/" in rest
            or len(key) != key_length
            or rest.lower().decode() in spans
            or sizes is None
            or (header[:, :key_length] != keys).any()
            or (header[:, key_length : len(first) + 1] != header[0, key_length : len(first) + 1]).any()
            or (header[:, _SIZE_END] & 0xDF).any()  # neither a NUL nor a space
            or (header[:, _KIND] != ord("0")).any()
            or header[:, _PREFIX].any()
        ):
            return None
        size = int(sizes[0])
        if (sizes + -sizes % BLOCK_BYTES != size + padding(size)).any():
            return None
        begin = at + BLOCK_BYTES
        spans[rest.lower().decode()] = (firsts + begin, firsts + begin + sizes)
        at = begin + size + padding(size)
    if keys is None or at != step:
        return None
    text = np.ascontiguousarray(keys).view(f"S{key_length}").ravel().tolist()
    try:
        return [key.decode() for key in text], spans
    except UnicodeDecodeError:
        return None


def parse_digits(data: bytes | memoryview, begins: IntArray, ends: IntArray) -> IntArray | None:
    """Return the whole numbers that are written at some places; None if one does not consist of 1 to 18 digits.

    Example:
        >>> parse_digits(b"7,42", np.array([0, 2]), np.array([1, 4]))
        array([ 7, 42])
    """
    sizes = ends - begins
    longest = int(sizes.max(initial=0))
    if not 0 < sizes.min(initial=1) <= longest <= _MAX_DIGITS:
        return None
    text = np.frombuffer(data, dtype=np.uint8)
    numbers = np.zeros(len(sizes), dtype=np.int64)
    for i in range(longest):
        is_there = i < sizes
        digits = text[np.where(is_there, begins + i, begins)].astype(np.int64) - ord("0")
        if ((digits < 0) | (digits > 9)).any():
            return None
        numbers = np.where(is_there, 10 * numbers + digits, numbers)
    return numbers


def _spans(block: Block) -> tuple[list[str], Spans] | None:
    """Return the keys and spans of any block whose samples have the same fields."""
    spans = block.spans()
    return None if spans is None else (block.keys(), {n: (np.array(b), np.array(e)) for n, (b, e) in spans.items()})


def _are_plain_keys(keys: npt.NDArray[np.uint8]) -> bool:
    """Return whether ``sample.split_name`` would split these names at their first dot, too."""
    if not keys.shape[1] or (keys[:, -1] == ord("/")).any() or (keys[:, 0] == ord("/")).any():
        return False
    if (keys == ord(".")).any() or (keys == 0).any():
        return False
    if (keys[1:] == keys[:-1]).all(axis=1).any():  # adjacent samples with the same key, which are one sample
        return False
    underscores = keys == ord("_")
    return not (underscores[:, 1:] & underscores[:, :-1]).any()


def _octal(digits: npt.NDArray[np.uint8]) -> IntArray | None:
    """Return the numbers that rows of eleven octal digits represent; None if there is another character."""
    values = digits - np.uint8(ord("0"))  # smaller characters wrap around to large values
    return None if (values > 7).any() else values.astype(np.int64) @ _OCTAL


def _torch_takes(dtype: "np.dtype[Any]") -> bool:
    import torch

    try:
        torch.from_numpy(np.empty(0, dtype=dtype))
    except (TypeError, ValueError):
        return False
    return True
