"""Existing shards -> samples, to be packed again: in other sizes or orders, compressed anew, filtered, merged."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from shardkit.format.columns import DecodedView
from shardkit.format.index import OFFSET, SIZE, read_index
from shardkit.format.manifest import read_manifest
from shardkit.reading.forward import EVERY_FIELD, ShardLocation, find_shards, read_shard
from shardkit.sample import KEY, RESERVED, SOURCE, FieldSelection, Sample
from shardkit.storage.base import STDIN, is_remote, split_url
from shardkit.storage.local import absolute_url, canonical_url
from shardkit.storage.registry import storage_for

if TYPE_CHECKING:
    import pyarrow as pa

_SHARD = "__shard__"


class ShardSource:
    """The samples of existing shards, of one dataset or of several, as they are, with the files they were made of.

    Shards of datasets are compared with their indexes while they are read; bare tars are held to what a tar can show.
    Where all shards are uncompressed and have an index, and nothing is filtered, samples are read by position; else
    the shards are gone through once, in order.

    Args:
        urls: A dataset's folder, a tar, a pattern, or a list of them.
        filter: Called with each sample, a read-only mapping of all of its fields, which are decoded when they are
            looked at; False leaves the sample out.
        fields: The fields to keep, and their new names, as for ``ShardStream``; None for all.
        allow_any_url: Let a manifest name shards outside its folder. Only for manifests whose author you trust.
        storage_options: Passed to the storage.

    Raises:
        DatasetError: Nothing is found, or a manifest is not usable.

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
        self._locations = find_shards(urls, storage_options, allow_any_url=allow_any_url)
        self.classes = _common_classes(self._locations, storage_options)
        self._filter = filter
        self._selection = FieldSelection.parse(fields)
        self._storage_options = storage_options
        self._storage = storage_for(self._locations[0].url, storage_options)

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples, shard by shard; the fields are bytes."""
        decoder = Decoder()
        read = self._selection if self._filter is None else EVERY_FIELD
        for location in self._locations:
            samples = read_shard(location, selection=read, storage_options=self._storage_options)
            for sample, made_of in zip(samples, self._sources(location), strict=False):
                if self._filter is not None:
                    fields = {name: data for name, data in sample.items() if name not in RESERVED}
                    if not self._filter(DecodedView(sample[KEY], fields, decoder)):
                        continue
                picked = self._selection.pick(sample) | {SOURCE: made_of}
                yield {name: value for name, value in picked.items() if value is not None}

    def _sources(self, location: ShardLocation) -> Iterator[str | None]:
        """Yield for each sample of a shard the file that it was made of, and then, or if that is not known, None."""
        if location.shard:
            index = read_index(self._storage, location.index_url)
            if index.has_source:
                yield from index.rows([SOURCE]).column(SOURCE).to_pylist()
        yield from repeat(None)

    def overlaps(self, folder: str) -> bool:
        """Say whether some of the shards lie in a folder."""
        return _lie_in(self._locations, folder)

    def listed(self) -> "ListedShards | None":
        """Return the same samples as a source that reads by position; None where that cannot be."""
        random_access = all(
            location.shard and location.shard.compression == "none" and not is_remote(location.url)
            for location in self._locations
        )  # what is far away is better read forward, once, than by a request for each sample
        if self._filter is not None or not random_access:
            return None
        locations = [replace(at, url=absolute_url(at.url)) for at in self._locations]  # parts of it may go elsewhere
        return ListedShards(locations, self._rows(), self._selection, self.classes)

    def _rows(self) -> "pa.Table":
        import pyarrow as pa

        tables = []
        for number, location in enumerate(self._locations):
            rows = read_index(self._storage, location.index_url).rows()
            wanted = [
                name
                for name in rows.column_names
                if name in (KEY, OFFSET, SIZE, SOURCE)
                or (":" in name and self._selection.wants(name.rpartition(":")[0]))
            ]
            rows = rows.select(wanted)
            tables.append(rows.append_column(_SHARD, pa.array(np.full(len(rows), number, dtype=np.int32))))
        return pa.concat_tables(tables, promote_options="default")


class ListedShards:
    """Samples of uncompressed shards, read by position through their indexes; see ``ListedSource``."""

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
        """The index's numbers by column; -1 where a sample has no such field."""
        import pyarrow.compute as pc

        names = [OFFSET, SIZE, _SHARD, *(f"{f}:{part}" for f in self._fields for part in ("offset", "size", "crc32"))]
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
        data = storage_for(url).read_range(url, start, numbers[SIZE])
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
        """Return a source of some of the samples, in that order."""
        return ListedShards(self._locations, self._rows.take(list(positions)), self._selection, self.classes)

    def overlaps(self, folder: str) -> bool:
        """Say whether some of the shards lie in a folder."""
        return _lie_in(self._locations, folder)

    def fingerprint(self) -> str:
        """Return a hash of the shards' names and checksums, and of the fields taken."""
        shards = [(split_url(at.url)[1], at.shard.sha256 if at.shard else "") for at in self._locations]
        return hashlib.sha256(repr((shards, self._selection)).encode("utf-8", "surrogateescape")).hexdigest()


def _lie_in(locations: Sequence[ShardLocation], folder: str) -> bool:
    written = canonical_url(folder)
    return any(canonical_url(split_url(at.url)[0]) == written for at in locations if at.url != STDIN)


def _common_classes(
    locations: Sequence[ShardLocation], storage_options: Mapping[str, object] | None
) -> tuple[str, ...]:
    """Return the classes of the datasets, if they all have the same."""
    folders = {split_url(location.index_url)[0] for location in locations if location.shard}
    classes = {read_manifest(folder, storage_options=storage_options, allow_any_url=True).classes for folder in folders}
    return classes.pop() if len(classes) == 1 and all(location.shard for location in locations) else ()
