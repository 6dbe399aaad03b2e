"""Existing shards -> samples to be packed again: with other sizes, order or compression, filtered, or merged."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import repeat
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from shardkit.codecs.registry import Decoder
from shardkit.errors import ShardError
from shardkit.format.classes import holds_classes
from shardkit.format.columns import DecodedView
from shardkit.format.index import OFFSET, PARTS, SIZE, open_index
from shardkit.reading.class_lists import join_class_lists, with_class_lists
from shardkit.reading.forward import EVERY_FIELD, ShardLocation, find_shards, read_shard
from shardkit.sample import KEY, RESERVED, SOURCE, FieldSelection, Sample, stored_field
from shardkit.storage.base import STDIN, is_remote, split_url
from shardkit.storage.local import LocalStorage, absolute_url, canonical_url
from shardkit.storage.registry import storage_for

if TYPE_CHECKING:
    import pyarrow as pa

_SHARD = "__shard__"


class ShardSource:
    """The unchanged samples of the existing shards of one or several datasets, with the files they were made from.

    Shards of datasets are compared with their indexes while they are read; a bare tar can only be checked as a tar.
    Samples are read by position if all shards are local, uncompressed and have an index, nothing is filtered and no
    class gets another number; otherwise the shards are read once, in order.

    If datasets have different class lists, the lists are merged into one with all of their names, and in fields whose
    name ends in ``cls`` class numbers become those of the merged list, so that a cat stays a cat. A filter sees these
    numbers.

    Args:
        urls: A dataset's folder, a tar, a pattern, or a list of them.
        filter: Called with each sample, a read-only mapping of all of its fields, which are decoded on first access;
            False leaves the sample out.
        fields: The fields to keep, and their new names, as for ``ShardStream``; None for all. Their stored bytes are
            kept: nothing is decoded.
        allow_any_url: Let a manifest name shards outside its folder. Only for manifests whose author you trust.
        storage_options: Passed to the storage.

    Attributes:
        classes: The names of the classes, by number; empty if they are not known.

    Raises:
        DatasetError: Nothing is found, or a manifest is unusable. Or some datasets name their classes and another has
            class numbers without names, so that their meaning is unknown.
        SampleError: Raised during iteration: a class number that has to be changed has no name.

    Example:
        >>> import tempfile
        >>> from shardkit.packing.writer import ShardWriter
        >>> with ShardWriter(f"{tempfile.mkdtemp()}/words") as writer:
        ...     writer.write({"__key__": "0001", "txt": "hello"})
        ...     writer.write({"__key__": "0002", "txt": "bye"})
        >>> [sample["txt"] for sample in ShardSource(writer.manifest.url, filter=lambda sample: sample["txt"] != "bye")]
        [b'hello']
    """

    def __init__(
        self,
        urls: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        filter: Callable[[Mapping[str, Any]], bool] | None = None,  # noqa: A002 - what it does, as everywhere in Python
        fields: Sequence[str] | Mapping[str, str] | None = None,
        allow_any_url: bool = False,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        locations = find_shards(urls, storage_options, allow_any_url=allow_any_url)
        self._locations = with_class_lists(locations, storage_options)
        self._filter = filter
        self._selection = FieldSelection.parse(fields)
        for name, field in self._selection.decodings:
            stored_field(self._selection.with_decoding(name, field))
        self._read = self._selection if filter is None else EVERY_FIELD
        renamed = {field for name, taken in self._selection.wanted.items() if holds_classes(name) for field in taken}
        self.classes, self._class_maps = join_class_lists(self._locations, self._read, renamed)
        self._storage_options = storage_options

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples, shard by shard; the fields are bytes."""
        decoder = Decoder()
        for location in self._locations:
            samples: Iterable[Sample]
            samples = read_shard(location, selection=self._read, storage_options=self._storage_options)
            if location.classes in self._class_maps:
                samples = map(self._class_maps[location.classes].apply, samples)
            for sample, made_of in zip(samples, self._sources(location), strict=False):
                if self._filter is not None:
                    fields = {name: data for name, data in sample.items() if name not in RESERVED}
                    if not self._filter(DecodedView(sample[KEY], fields, decoder)):
                        continue
                picked = self._selection.pick(sample) | {SOURCE: made_of}
                yield {name: value for name, value in picked.items() if value is not None}

    def _sources(self, location: ShardLocation) -> Iterator[str | None]:
        """Yield the file that each sample was made from, or None if it is unknown; after the last one, None forever."""
        if location.shard:
            storage = storage_for(location.url, self._storage_options)
            index = open_index(storage, location.folder, location.shard)
            if index.has_source:
                yield from index.rows([SOURCE]).column(SOURCE).to_pylist()
        yield from repeat(None)

    def overlaps(self, folder: str) -> bool:
        """Return whether some of the shards lie in a folder."""
        return _lie_in(self._locations, folder)

    def listed(self) -> "ListedShards | None":
        """Return the same samples as a source that reads by position, or None if that is impossible or too slow."""
        random_access = all(
            location.shard and location.shard.compression == "none" and not is_remote(location.url)
            for location in self._locations
        )  # remote shards are read forward, once: that is faster than a request for each sample
        if self._filter is not None or self._class_maps or not random_access or not self._locations:
            return None
        locations = [replace(at, url=absolute_url(at.url)) for at in self._locations]  # it may be pickled
        return ListedShards(locations, self._rows(), self._selection, self.classes)

    def _rows(self) -> "pa.Table":
        import pyarrow as pa

        tables = []
        for number, location in enumerate(self._locations):
            if location.shard is None:
                continue  # never happens: listed() has made sure that every shard has an entry
            storage = storage_for(location.url, self._storage_options)
            index = open_index(storage, location.folder, location.shard)
            fields = [
                f"{field}:{part}" for field in index.facts.fields for part in PARTS if self._selection.wants(field)
            ]
            rows = index.rows([KEY, OFFSET, SIZE, *fields, SOURCE])
            tables.append(rows.append_column(_SHARD, pa.array(np.full(len(rows), number, dtype=np.int32))))
        return pa.concat_tables(tables, promote_options="default")


class ListedShards:
    """Samples of uncompressed local shards, read by position through their indexes; see ``ListedSource``."""

    ignored: tuple[str, ...] = ()

    def __init__(
        self, locations: Sequence[ShardLocation], rows: "pa.Table", selection: FieldSelection, classes: tuple[str, ...]
    ) -> None:
        self.classes = classes
        self._locations = locations
        self._rows = rows
        self._selection = selection
        self._fields = sorted({name.rpartition(":")[0] for name in rows.column_names if ":" in name})

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def _keys(self) -> list[str]:
        keys: list[str] = self._rows.column(KEY).to_pylist()
        return keys

    @cached_property
    def _numbers(self) -> dict[str, npt.NDArray[np.int64]]:
        """The index's numbers by column; -1 if a sample does not have the field."""
        import pyarrow.compute as pc

        names = [OFFSET, SIZE, _SHARD, *(f"{f}:{part}" for f in self._fields for part in PARTS)]
        columns = {name: self._rows.column(name).cast("int64") for name in names}
        return {name: pc.fill_null(column, -1).to_numpy() for name, column in columns.items()}

    def key(self, position: int, /) -> str:
        """Return a sample's key."""
        return self._keys[position]

    def sizes(self, position: int, /) -> list[tuple[str, int]]:
        """Return a sample's fields, sorted, and their sizes in bytes."""
        sizes = {f: int(self._numbers[f"{f}:size"][position]) for f in self._fields}
        present = self._selection.pick(
            {name: size for name, size in sizes.items() if size >= 0} | {KEY: self.key(position)}
        )
        return sorted((name, size) for name, size in present.items() if name != KEY and size is not None)

    def read(self, position: int, /) -> Sample:
        """Return a sample; the fields are bytes.

        Raises:
            ShardError: Its bytes do not match the index.
        """
        numbers = {name: int(values[position]) for name, values in self._numbers.items()}
        url = self._locations[numbers[_SHARD]].url
        start = numbers[OFFSET]
        data = LocalStorage().read_range(url, start, numbers[SIZE])
        sample: Sample = {KEY: self.key(position)}
        if SOURCE in self._rows.column_names:
            sample[SOURCE] = self._rows.column(SOURCE)[position].as_py()
        for name in self._fields:
            if numbers[f"{name}:size"] < 0:
                continue
            begin = numbers[f"{name}:offset"] - start
            value = data[begin : begin + numbers[f"{name}:size"]]
            if crc32(value) != numbers[f"{name}:crc32"]:
                raise ShardError(
                    f"{url}: sample {self.key(position)!r}: field {name!r} at byte {start + begin:,} does not have the "
                    "CRC-32 that the index says; fetch the shard again, or write it again",
                    url=url,
                    offset=start + begin,
                    key=self.key(position),
                    field=name,
                )
            sample[name] = value
        return {name: value for name, value in self._selection.pick(sample).items() if value is not None}

    def take(self, positions: Sequence[int], /) -> "ListedShards":
        """Return a source of the samples at some positions, in the order given."""
        return ListedShards(self._locations, self._rows.take(list(positions)), self._selection, self.classes)

    def overlaps(self, folder: str) -> bool:
        """Return whether some of the shards lie in a folder."""
        return _lie_in(self._locations, folder)

    def fingerprint(self) -> str:
        """Return a hash of the shards' names and checksums, the selected fields and the classes."""
        shards = [(split_url(at.url)[1], at.shard.sha256 if at.shard else "") for at in self._locations]
        described = repr((shards, self._selection, *self.classes))
        return hashlib.sha256(described.encode("utf-8", "surrogateescape")).hexdigest()


def _lie_in(locations: Sequence[ShardLocation], folder: str) -> bool:
    written = canonical_url(folder)
    return any(canonical_url(split_url(at.url)[0]) == written for at in locations if at.url != STDIN)
