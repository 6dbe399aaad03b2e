"""One block's bytes -> its samples, found by their tar headers. A block is what training reads at a time."""

from typing import TypeAlias
from zlib import adler32

from shardkit.errors import ShardError
from shardkit.format.scan import group_members
from shardkit.format.tar import read_members
from shardkit.format.tar_header import BLOCK_BYTES, COMMON_FIELDS, END_OF_ARCHIVE, expected_adler32, padding
from shardkit.sample import COLUMNS, KEY, RESERVED, URL, FieldSelection, Sample, split_new_name

# For each sample its key, and where the data of each field begins and ends, both in one number: Python's garbage
# collector skips dicts of numbers. With tuples for all blocks in memory, it would take as long as reading.
_Layout: TypeAlias = list[tuple[str, dict[str, int]]]
_END_BITS = 48
_END = (1 << _END_BITS) - 1

BlockLayout: TypeAlias = list[tuple[str, dict[str, tuple[int, int]]]]
"""For each sample its key, and where in the block the data of each of its fields begins and ends."""


class Block:
    """The samples of one block, found when the first of them is asked for. Threads may share it, and it can be pickled.

    The caller has already compared the checksum of its bytes with the index. The tar headers are nevertheless
    checked strictly: bytes that are not exactly a block with this number of samples are an error.

    Args:
        data: The block, uncompressed.
        url: Its shard.
        shard: The shard's number in the dataset.
        number: Its number in the shard.
        offset: Where it begins in the uncompressed shard, in bytes.
        samples: How many samples it has.
        columns: Values of index columns that go into the samples: for each name, a list with one value per sample.
        layout: Where in the data the fields are, if the data is only a part of the block.

    Example:
        >>> from shardkit.format.tar import member_header
        >>> data = member_header("a/1.cls", 1) + b"7" + bytes(511) + member_header("a/2.cls", 2) + b"12" + bytes(510)
        >>> block = Block(data, url="x.tar", shard=0, number=0, offset=0, samples=2)
        >>> {name: bytes(v) if name == "cls" else v for name, v in block.sample(1).items()}
        {'__key__': 'a/2', '__url__': 'x.tar', 'cls': b'12'}
    """

    __slots__ = ("_columns", "_layout", "data", "is_whole", "number", "offset", "samples", "shard", "url")

    def __init__(
        self,
        data: bytes | memoryview,
        *,
        url: str,
        shard: int,
        number: int,
        offset: int,
        samples: int,
        columns: dict[str, list[object]] | None = None,
        layout: BlockLayout | None = None,
    ) -> None:
        self.data = data
        self.url = url
        self.shard = shard
        self.number = number
        self.offset = offset
        self.samples = samples
        self._columns = columns or {}
        self.is_whole = layout is None
        self._layout: _Layout | None = None
        if layout is not None:
            pairs = ((key, fields.items()) for key, fields in layout)
            self._layout = [(key, {f: begin << _END_BITS | end for f, (begin, end) in items}) for key, items in pairs]

    @property
    def nbytes(self) -> int:
        """The size of the block in bytes."""
        return len(self.data)

    def __len__(self) -> int:
        return self.samples

    def spans(self) -> dict[str, tuple[list[int], list[int]]] | None:
        """Return for each field where its data begins and ends in each sample.

        None if not all samples have the same fields in the same order. Raises as ``sample`` does.
        """
        layout = self._layout or self._walk()
        names = [*layout[0][1]] if layout else []
        if any([*fields] != names for _, fields in layout):
            return None
        found = {name: [fields[name] for _, fields in layout] for name in names}
        return {name: ([at >> _END_BITS for at in ats], [at & _END for at in ats]) for name, ats in found.items()}

    def keys(self) -> list[str]:
        """Return the samples' keys, in order. Raises as ``sample`` does."""
        return [key for key, _ in self._layout or self._walk()]

    def sample(self, row: int, selection: FieldSelection | None = None) -> Sample:
        """Return one sample: ``__key__``, ``__url__``, and its fields as views of the block's bytes.

        Index columns, if there are any, are together in ``__columns__``, because one may have the name of a field;
        ``decode_fields`` takes them out. Nothing is copied. A view keeps the whole block in memory: ``bytes(view)``
        makes an independent copy.

        Args:
            row: Its number in the block, from 0.
            selection: The wanted fields, by default all. Fields are not renamed, and a missing one is not an error.

        Raises:
            ShardError: The block is not a valid part of a tar, or does not have the samples that its index lists.
        """
        key, fields = (self._layout or self._walk())[row]
        view = memoryview(self.data)
        sample: Sample = {KEY: key, URL: self.url}
        for field, at in fields.items():
            if selection is None or selection.wants(field):
                sample[field] = view[at >> _END_BITS : at & _END]
        if self._columns:
            sample[COLUMNS] = {name: values[row] for name, values in self._columns.items()}
        return sample

    def _walk(self) -> _Layout:
        """Find the samples. Concurrent threads find the same samples; the last result is kept."""
        layout = self._walk_plain() or self._walk_strictly()
        end = next(reversed(layout[-1][1].values())) & _END if layout else 0
        end += padding(end)
        if len(layout) != self.samples or end != len(self.data):
            raise ShardError(
                f"shard {self.url}: block {self.number:,} at byte {self.offset:,} has {len(layout):,} samples in "
                f"{end:,} bytes, its index says {self.samples:,} in {len(self.data):,}; index the shard again",
                url=self.url,
                offset=self.offset,
            )
        self._layout = layout
        return layout

    def _walk_plain(self) -> _Layout | None:
        """Find the samples of a block with plain headers, in a microsecond each; None if any header is unusual."""
        data = self.data
        common_fields = COMMON_FIELDS.unpack_from
        layout: _Layout = []
        fields: dict[str, int] = {}
        current = None
        known: dict[str, str] = {}  # field names by the text after the key, which is the same for most samples
        at, last_header = 0, len(data) - BLOCK_BYTES
        while at <= last_header:
            digits, terminator, stored, kind, prefix = common_fields(data, at)
            begin = at + BLOCK_BYTES
            header = bytes(data[at:begin])
            name_end = header.find(0)
            try:
                end = begin + int(digits, 8)
                name = header[:name_end].decode()
                is_intact = adler32(header) & 0xFFFF == expected_adler32(stored)
            except ValueError:
                return None
            if (
                not is_intact
                or kind != 0x30  # "0", a regular file
                or prefix
                or not digits.isdigit()  # int() also takes signs, spaces and underscores
                or terminator & ~0x20  # neither a NUL nor a space
                or not 0 < name_end <= 100
            ):
                return None
            key, _, rest = name.partition(".")
            field = known.get(rest)
            if field is None or not key or key[-1] == "/" or "__" in key:
                split = split_new_name(name, key, rest, known)
                if split is None or split[1] in RESERVED:
                    return None
                key, field = split
            if key != current:
                fields = {}
                current = key
                layout.append((key, fields))
            elif field in fields:
                return None
            fields[field] = begin << _END_BITS | end
            at = end + -end % BLOCK_BYTES
        return layout if at == len(data) else None

    def _walk_strictly(self) -> _Layout:
        """Find the samples of any block, with the code that reports what is wrong."""
        stream = _BlockStream(self.data, f"{self.url}, block {self.number:,} at byte {self.offset:,}")
        try:
            return [
                (key, {f: m.data_offset << _END_BITS | m.data_offset + m.size for f, m in sample.items()})
                for key, sample in group_members(read_members(stream, wanted=lambda _: False), stream.url)
            ]
        except ShardError as error:
            offset = self.offset + (error.offset or 0)
            raise ShardError(str(error), url=self.url, offset=offset, key=error.key, field=error.field) from error


class _BlockStream:
    """A block as a whole archive: its bytes, and then an end-of-archive mark."""

    def __init__(self, data: bytes | memoryview, url: str) -> None:
        self.url = url
        self.size: int | None = len(data) + len(END_OF_ARCHIVE)
        self._data = data
        self._at = 0

    def read(self, n: int, /) -> bytes:
        piece = bytes(self._data[self._at : self._at + n])
        if len(piece) < n:
            piece += END_OF_ARCHIVE[max(0, self._at - len(self._data)) :][: n - len(piece)]
        self._at += len(piece)
        return piece

    def skip(self, n: int, /) -> None:
        self._at += n

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
