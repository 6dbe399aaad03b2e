"""Look into shards: which samples they have, one member of one sample, and statistics of the whole dataset."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, repeat
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from shardkit.codecs.compress import open_decompressed
from shardkit.codecs.images import IMAGE_EXTENSIONS
from shardkit.codecs.registry import Decoder
from shardkit.errors import SampleError, ShardError, SourceError, check_path, hide_secrets
from shardkit.format.index import ShardIndex, open_index
from shardkit.format.manifest import (
    MANIFEST_NAME,
    SHARD_SUFFIXES,
    UNFINISHED_NAME,
    Manifest,
    read_manifest,
    version_name,
)
from shardkit.format.scan import group_members, range_reader
from shardkit.format.side_files import CARD_NAME
from shardkit.format.tar import read_members
from shardkit.reading.forward import ShardLocation, find_shards
from shardkit.reading.missing import check_streamed
from shardkit.sample import KEY, SOURCE, split_name, stored_field
from shardkit.storage.base import STDIN, Storage, join, read_right
from shardkit.storage.os_errors import os_errors
from shardkit.storage.registry import storage_for

FILE_SYSTEM_BLOCK = 4096
"""The block size of most file systems: the space that a file takes is a multiple of it."""

_LOOKED_AT = 1000  # at most this many files are looked at to recognise what a folder holds


class SampleInfo(NamedTuple):
    """A sample: the shard that it is in, its key, and the size of each of its fields."""

    shard: str
    key: str
    fields: dict[str, int]


@dataclass(frozen=True)
class _Shard:
    """A shard whose samples are found by its index, or by its tar headers if it has no index."""

    storage: Storage
    location: ShardLocation

    @property
    def url(self) -> str:
        return hide_secrets(self.location.url)

    @cached_property
    def index(self) -> ShardIndex | None:
        shard = self.location.shard
        return open_index(self.storage, self.location.folder, shard) if shard else None

    def samples(self) -> Iterator[SampleInfo]:
        """Yield the shard's samples. Without an index, only the tar headers are read if the format allows it."""
        if self.index is None:
            for key, fields, _ in self.read(""):
                yield SampleInfo(self.url, key, fields)
            return
        names = [f"{field}:size" for field in self.index.facts.fields]
        for row in self.index.rows([KEY, *names]).to_pylist():
            fields = {n.removesuffix(":size"): row[n] for n in names if row[n] is not None}
            yield SampleInfo(self.url, row[KEY], fields)

    def sources(self) -> Iterator[str | None]:
        """Yield the file that each sample was made from, or None if it is unknown; after the last one, None forever."""
        if self.index and self.index.has_source:
            yield from self.index.rows([SOURCE]).column(SOURCE).to_pylist()
        yield from repeat(None)

    def read(self, field: str, key: str | None = None) -> Iterator[tuple[str, dict[str, int], bytes | None]]:
        """Read forward, and yield each sample's key, sizes and the bytes of one field; with a key, only its bytes."""

        def wanted(name: str) -> bool:
            parts = split_name(name)
            return parts is not None and parts[1] == field and key in (None, parts[0])

        stream = self.storage.open(self.location.url)
        try:
            members = read_members(open_decompressed(stream), wanted=wanted)
            for found, sample in group_members(members, self.url):
                data = sample[field].data if field in sample else None
                yield found, {name: member.size for name, member in sample.items()}, data
        finally:
            stream.close()

    def field_values(self, field: str) -> Iterator[bytes]:
        """Yield the bytes of one field for all samples that have it. With an index, nothing else is read."""
        index = self.index
        if index is None or not index.blocks.is_readable:
            yield from (data for _, _, data in self.read(field) if data is not None)
        elif field in index.facts.fields:
            read = range_reader(self.storage, self.location.url, index)
            names = (f"{field}:offset", f"{field}:size")
            columns = index.rows(names)
            for offset, size in zip(*(columns.column(n).to_pylist() for n in names), strict=True):
                if size is not None:
                    yield read(offset, size)

    def find(self, key: str, field: str) -> tuple[bool, bytes | None]:
        """Return whether the shard has the sample, and the field's bytes, or None if the sample lacks the field."""
        index = self.index
        if index is None:
            for found, _, data in self.read(field, key):
                if found == key:
                    return True, data
            return False, None
        position = index.rows([KEY]).column(KEY).combine_chunks().index(key).as_py()
        if position < 0:
            return False, None
        if field not in index.facts.fields:
            return True, None
        names = [f"{field}:offset", f"{field}:size", f"{field}:crc32"]
        row = index.rows(names).slice(position, 1).to_pylist()[0]
        offset, size, crc = (row[name] for name in names)
        if size is None:
            return True, None

        def read(*, fresh: bool) -> bytes:
            if not index.blocks.is_readable:
                data = next(data for found, _, data in self.read(field, key) if found == key) or b""
            else:
                data = range_reader(self.storage, self.location.url, index, fresh=fresh)(offset, size)
            if crc32(data) != crc:
                raise ShardError(
                    f"shard {self.url}: field {field!r} of sample {key!r} at byte {offset:,} does not match the "
                    "index; 'shardkit verify' says what is whole",
                    url=self.url,
                    offset=offset,
                    key=key,
                    field=field,
                )
            return data

        return True, read_right(self.location.url, read)


def _open(
    urls: str | Sequence[str], storage_options: Mapping[str, object] | None, *, allow_any_url: bool
) -> tuple[Manifest | None, Iterator[_Shard]]:
    """Return the manifest, if the URLs name one dataset, and an iterator over the shards, so that none is kept."""
    locations = find_shards(urls, storage_options, allow_any_url=allow_any_url)
    manifest = None
    shard = locations[0].shard if locations else None
    if isinstance(urls, str) and (shard or not locations):
        folder = urls.rstrip("/") or urls
        if not shard or "{" not in folder or locations[0].folder == folder:  # one dataset
            manifest = read_manifest(folder, storage_options=storage_options, allow_any_url=allow_any_url)
    if locations:
        storage = storage_for(locations[0].url, storage_options)
        check_streamed(storage, urls, [location.url for location in locations if location.shard is None])
    return manifest, (_Shard(storage_for(location.url, storage_options), location) for location in locations)


def list_samples(
    urls: str | Sequence[str], *, allow_any_url: bool = False, storage_options: Mapping[str, object] | None = None
) -> Iterator[SampleInfo]:
    """Yield the samples of shards, in order, with the sizes of their fields; the fields themselves are not read.

    Raises:
        ShardError: A shard without an index is damaged; the samples before the damage have been yielded.
        DatasetError: Nothing is found, or an index is damaged.
    """
    for shard in _open(urls, storage_options, allow_any_url=allow_any_url)[1]:
        yield from shard.samples()


def list_shards(
    urls: str | Sequence[str], *, allow_any_url: bool = False, storage_options: Mapping[str, object] | None = None
) -> Iterator[dict[str, object]]:
    """Yield facts about each shard: URL, number of samples, size, compression, and whether it has an index."""
    for shard in _open(urls, storage_options, allow_any_url=allow_any_url)[1]:
        entry = shard.location.shard
        size = entry.file_size if entry else shard.storage.info(shard.location.url).size
        samples = entry.samples if entry else sum(1 for _ in shard.samples())
        kind = entry.compression if entry else ""
        yield {"url": shard.url, "samples": samples, "bytes": size, "compression": kind, "indexed": entry is not None}


def read_member(
    url: str,
    key: str,
    field: str,
    *,
    allow_any_url: bool = False,
    storage_options: Mapping[str, object] | None = None,
) -> bytes:
    """Return the bytes of one field of one sample. With an index, only that member or its block is read.

    If a key occurs more than once, the first sample with that key is used.

    Raises:
        SampleError: There is no such sample, or it has no such field.
        ShardError: The member is damaged.
    """
    field = stored_field(field)
    for shard in _open(url, storage_options, allow_any_url=allow_any_url)[1]:
        found, data = shard.find(key, field)
        if data is not None:
            return data
        if found:
            raise SampleError(
                f"{shard.url}: sample {key!r} has no field {field!r}; 'shardkit ls' shows its fields",
                url=shard.url,
                key=key,
                field=field,
            )
    raise SampleError(f"{url}: has no sample {key!r}; 'shardkit ls' lists the samples", url=url, key=key)


class Sizes(NamedTuple):
    """Statistics of sizes in bytes."""

    number: int
    total: int
    min: int
    median: float
    mean: float
    max: int

    @classmethod
    def of(cls, sizes: Sequence[int] | npt.NDArray[np.int64]) -> "Sizes":
        """Return the statistics of sizes; all are 0 if there are no sizes."""
        values = np.asarray(sizes if len(sizes) else [0], dtype=np.int64)
        middle, mean = float(np.median(values)), float(values.mean())
        return cls(len(sizes), int(values.sum()), int(values.min()), middle, mean, int(values.max()))


class Footprint(NamedTuple):
    """The space that files take on a file system.

    Attributes:
        files: The number of files; each takes one inode.
        bytes: The sum of their sizes.
        lost: How many bytes are lost because sizes are rounded up to blocks of 4 KiB.
    """

    files: int
    bytes: int
    lost: int

    @classmethod
    def of(cls, sizes: npt.NDArray[np.int64]) -> "Footprint":
        """Return the footprint of files of these sizes."""
        return cls(len(sizes), int(sizes.sum()), int((-sizes % FILE_SYSTEM_BLOCK).sum()))


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of shards.

    Attributes:
        samples: The number of samples in them.
        fields: The sizes of each field.
        shards: The shards' sizes as stored.
        tar_bytes: Their uncompressed size; 0 if it is not known, because there is no manifest.
        classes: How many samples each class has, by name, or by number where names are not known.
        before: The footprint of the files that the samples were made from. A sample that names no file counts as one
            file for each field. Labels that come from folder names or from a table do not count as files.
        after: The footprint of the shards, their indexes and the manifest.
        originals: How many samples name a file that they were made from.
        folders: How many folders there are below the root folder of these files.
    """

    samples: int
    fields: dict[str, Sizes]
    shards: Sizes
    tar_bytes: int
    classes: dict[str, int]
    before: Footprint
    after: Footprint
    originals: int
    folders: int


def compute_statistics(
    urls: str | Sequence[str], *, allow_any_url: bool = False, storage_options: Mapping[str, object] | None = None
) -> Statistics:
    """Return statistics of a dataset or of shards. Only the field ``cls`` of the samples is read.

    Raises:
        DatasetError: Nothing is found, or an index is damaged.
        ShardError: A shard without an index is damaged.
        CodecError: A class is not a number.
        ArgumentError: The source is standard input, which can be read only once.
    """
    manifest, shards = _open(urls, storage_options, allow_any_url=allow_any_url)
    sizes: dict[str, list[npt.NDArray[np.int64]]] = {}
    samples = originals = 0
    classes = _ClassCounts()
    folders: set[str] = set()
    files = [np.zeros(0, dtype=np.int64)]  # their sizes
    labels_were_files = _label_files(manifest)
    stored, others = [], _manifest_sizes(manifest, storage_options) if manifest else []
    for shard in shards:
        stored.append(shard.storage.info(shard.location.url).size)
        by_field: dict[str, list[int]] = {}
        sizes_of_files: list[int] = []
        for sample, source in zip(shard.samples(), shard.sources(), strict=False):
            samples += 1
            folders.add((source or sample.key).rpartition("/")[0])
            originals += source is not None
            for name, size in sample.fields.items():
                by_field.setdefault(name, []).append(size)
                if source is None or name != "cls" or labels_were_files:
                    sizes_of_files.append(size)
        files.append(np.array(sizes_of_files, dtype=np.int64))
        for name, found in by_field.items():
            sizes.setdefault(name, []).append(np.array(found, dtype=np.int64))
        if "cls" in by_field:
            classes.add(shard)
        if entry := shard.location.shard:
            others.append(shard.storage.info(join(shard.location.folder, entry.index_url)).size)
    joined = {name: np.concatenate(found) for name, found in sorted(sizes.items())}
    return Statistics(
        samples,
        {name: Sizes.of(found) for name, found in joined.items()},
        Sizes.of(stored),
        sum(shard.tar_size for shard in manifest.shards) if manifest else 0,
        classes.by_name(),
        Footprint.of(np.concatenate(files)),
        Footprint.of(np.array(stored + others, dtype=np.int64)),
        originals,
        len({parent for folder in folders for parent in _with_parents(folder)}),
    )


class _ClassCounts:
    """How many samples each class has, over shards whose class lists may differ."""

    def __init__(self) -> None:
        self._decoder = Decoder()
        self._order: dict[str, int] = {}  # the position of each name, over all datasets
        self._counts: Counter[tuple[bool, int, str]] = Counter()  # classes without a name sort last, by number

    def add(self, shard: _Shard) -> None:
        """Count the classes of a shard's samples."""
        names = shard.location.classes
        for name in names:
            self._order.setdefault(name, len(self._order))
        for data, count in Counter(shard.field_values("cls")).items():
            number = self._decoder.decode("cls", data, url=shard.url)
            if 0 <= number < len(names):
                self._counts[False, self._order[names[number]], names[number]] += count
            else:
                self._counts[True, number, str(number)] += count

    def by_name(self) -> dict[str, int]:
        """Return the counts by name, or by number where a class has no name."""
        return {name: count for (_, _, name), count in sorted(self._counts.items())}


def _manifest_sizes(manifest: Manifest, storage_options: Mapping[str, object] | None) -> list[int]:
    """Return the sizes of a dataset's manifest and of the files that belong to it as a whole."""
    sizes = [len(manifest.to_json())]
    sizes += [file.size for file in (manifest.block_file, manifest.column_file) if file]
    storage = storage_for(manifest.url, storage_options)
    for name in (version_name(manifest.digest), CARD_NAME):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            sizes.append(storage.info(join(manifest.url, name)).size)
    return sizes


def _label_files(manifest: Manifest | None) -> bool:
    """Return whether the labels of a dataset were files, according to its manifest."""
    source = manifest.request.get("source") if manifest else None
    return source == "FileFolder" or (source != "ImageFolder" and not (manifest and manifest.classes))


def _with_parents(folder: str) -> Iterator[str]:
    while folder:
        yield folder
        folder = folder.rpartition("/")[0]


def is_loose(url: str) -> bool:
    """Return whether a folder has files but neither shards nor datasets: it has not been packed yet."""
    folder = Path(url)
    if not folder.is_dir() or _holds_shards(folder):
        return False
    return bool(next(folder.iterdir(), None)) and not any(_holds_shards(in_it) for in_it in folder.iterdir())


def _holds_shards(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    own = (MANIFEST_NAME, UNFINISHED_NAME)
    return any(inner.name in own or inner.name.lower().endswith(SHARD_SUFFIXES) for inner in folder.iterdir())


def measure_folder(folder: str) -> tuple[Footprint, int]:
    """Return the footprint of the files below a folder and the number of their folders, without hidden ones.

    Raises:
        OSError: The folder cannot be read.
    """
    files = [(inner, name) for inner, names in _walk(Path(folder), set()) for name in names]
    sizes = np.array([(inner / name).stat().st_size for inner, name in files], dtype=np.int64)
    folders = {inner.relative_to(folder).as_posix() for inner, _ in files} - {"."}
    return Footprint.of(sizes), len({parent for inner in folders for parent in _with_parents(inner)})


def recognise_source(path: str) -> Literal["images", "files", "shards"]:
    """Recognise what a path holds: class folders of images, files of any kind, or shards.

    A path that is not a folder, and a folder that has a manifest or a tar in it, hold shards. A folder of class
    folders has nothing but images, and none at the top; to decide this, about a thousand files are looked at. Hidden
    files and folders are ignored.

    Raises:
        SourceError: The path does not exist, and is neither a pattern nor a URL; or it is a file that is not a shard.
            Or there are shards and images; or images both at the top and in folders, so that some have a class and
            some have none.
        StorageError: The path cannot be read.

    Example:
        >>> recognise_source("shards/train-{000000..000015}.tar")
        'shards'
    """
    with os_errors(check_path("source", path)):
        return _recognise(Path(path), path)


def _recognise(folder: Path, path: str) -> Literal["images", "files", "shards"]:
    if not folder.exists() and path != STDIN and not set(path) & set("{*?[:"):
        raise SourceError(f"{path}: does not exist; name a folder of images or of other files, or shards")
    if folder.is_file() and not folder.name.lower().endswith((*SHARD_SUFFIXES, ".json")):
        raise SourceError(
            f"{path}: is a file that is not called like a shard ({', '.join(SHARD_SUFFIXES)}); name the folder it is in"
        )
    if not folder.is_dir():
        return "shards"
    folders = _walk(folder, set())
    _, at_the_top = next(folders)
    in_folders = list(islice((str(inner / name) for inner, names in folders for name in names), _LOOKED_AT))
    if _holds_shards(folder):
        for name in (*at_the_top, *in_folders):
            if Path(name).suffix.lower() in IMAGE_EXTENSIONS:
                raise SourceError(
                    f"{path}: holds shards or a manifest, and images ({name}); move one of them elsewhere, or say by "
                    "--kind what to pack (ImageFolder, FileFolder or ShardSource)"
                )
        return "shards"
    if not all(Path(name).suffix.lower() in IMAGE_EXTENSIONS for name in (*at_the_top, *in_folders)):
        return "files"
    if at_the_top and in_folders:
        raise SourceError(
            f"{path}: the image {at_the_top[0]} lies beside folders of images ({in_folders[0]}), so it has no class if "
            "they are classes; move it into one. --kind files (or FileFolder) packs all of them without classes"
        )
    return "images" if in_folders else "files"


def _walk(folder: Path, seen: set[tuple[int, int]]) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder and those below it, each with its files. Hidden ones are left out; links are followed once."""
    with os_errors(str(folder)):
        status = folder.stat()
        if (status.st_dev, status.st_ino) in seen:
            return
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as entries:
            visible = sorted((entry for entry in entries if entry.name[0] != "."), key=lambda entry: entry.name)
    files: list[str] = []
    folders: list[str] = []
    for entry in visible:
        with os_errors(entry.path):
            (folders if entry.is_dir() else files).append(entry.name)
    yield folder, files
    for name in folders:
        yield from _walk(folder / name, seen)
