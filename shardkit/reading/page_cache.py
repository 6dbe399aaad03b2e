"""Blocks that are in the page cache of the system: their samples are read one by one, when they are asked for.

A block on a disk or a server is read long before it is needed, and held. For one in the page cache that would mean
a second copy, of data that is in no processor's cache. Instead, each large sample is copied once, where and when
it is needed, and compared with its own checksum.
"""

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from isal.isal_zlib import crc32

from shardkit.order.plan import IntArray
from shardkit.reading.extents import FieldPlace
from shardkit.sample import COLUMNS, KEY, URL, Sample
from shardkit.storage.local import local_path
from shardkit.storage.os_errors import open_file

_PROBES = 4  # places in a block that are checked


class OpenFile:
    """A local file, open for reading until nothing refers to this object any more.

    Args:
        url: The file.

    Raises:
        StorageError: It cannot be opened.

    Attributes:
        descriptor: Its descriptor.
    """

    __slots__ = ("descriptor",)

    def __init__(self, url: str) -> None:
        self.descriptor = -1
        self.descriptor = open_file(local_path(url), url)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def is_resident(self, start: int, size: int) -> bool:
        """Return whether a part of the file seems to be in the page cache; False if the system cannot tell."""
        try:
            for i in range(_PROBES):
                at = start + i * (size - 1) // (_PROBES - 1)
                if not os.preadv(self.descriptor, [bytearray(1)], at, os.RWF_NOWAIT):
                    return False
        except (AttributeError, OSError):  # macOS has no such flag, and some file systems no such operation
            return False
        return True


class ResidentBlock:
    """The samples of a block, read when they are asked for. Threads may share it.

    Args:
        open_file: Returns the open shard. It is called for each sample, so that it can limit how many files are open.
        read: Reads the data of a field again if it was wrong, and raises if it still is.
        keys: The samples' keys.
        members: For each field, offset, size and CRC-32 of its data: int64, (samples,); -1 where it is missing.
        url: The shard.
        columns: Values of index columns that go into the samples: for each name, a list with one value per sample.
    """

    __slots__ = ("_columns", "_fields", "_keys", "_open_file", "_orders", "_read", "_url")

    def __init__(
        self,
        open_file: Callable[[], OpenFile],
        read: Callable[[FieldPlace], bytes],
        keys: Sequence[str],
        members: Mapping[str, tuple[IntArray, ...]],
        *,
        url: str,
        columns: dict[str, list[object]] | None,
    ) -> None:
        self._open_file = open_file
        self._read = read
        self._keys = keys
        self._fields = [(field, *(array.tolist() for array in arrays)) for field, arrays in members.items()]
        offsets = np.reshape([arrays[0] for arrays in members.values()], (len(members), len(keys)))
        self._orders = np.argsort(offsets, axis=0).T.tolist()  # the order of each sample's fields in the shard
        self._url = url
        self._columns = columns or {}

    def sample(self, row: int) -> Sample:
        """Return one sample: ``__key__``, ``__url__``, ``__columns__`` if there are any, and its fields' bytes.

        Raises:
            ShardError: A field is damaged, or the shard was cut or replaced.
        """
        sample: Sample = {KEY: self._keys[row], URL: self._url}
        file = self._open_file()
        for number in self._orders[row]:
            field, offsets, sizes, checksums = self._fields[number]
            offset = offsets[row]
            if offset < 0:
                continue
            try:
                data = os.pread(file.descriptor, sizes[row], offset)
            except OSError:
                data = b""  # it is read again below, which raises the right error
            if crc32(data) != checksums[row] or len(data) != sizes[row]:  # a CRC-32 of 0 is also that of no bytes
                data = self._read(FieldPlace(row, self._keys[row], field, offset, sizes[row], checksums[row]))
            sample[field] = data
        if self._columns:
            sample[COLUMNS] = {name: values[row] for name, values in self._columns.items()}
        return sample
