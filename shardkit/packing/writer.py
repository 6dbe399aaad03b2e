"""Samples -> shards, one after the other in the order given; and the folder operations of all writers of datasets."""

import contextlib
import json
import os
import re
from array import array
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from shardkit.codecs.compress import parse_compression
from shardkit.errors import (
    ArgumentError,
    DatasetError,
    DatasetExistsError,
    SampleError,
    check_path,
    check_texts,
    check_whole,
)
from shardkit.format.columns import Column, ColumnMaker, make_schema
from shardkit.format.index import (
    MAX_BLOCK_SAMPLES,
    ShardIndex,
    choose_block_samples,
    open_index,
    publish_index,
    read_named_index,
)
from shardkit.format.manifest import (
    INDEX_FOLDER,
    MANIFEST_NAME,
    SHARD_SUFFIXES,
    UNFINISHED_NAME,
    Manifest,
    read_writer_marker,
    strip_suffix,
    write_whole,
)
from shardkit.format.parquet import FileFacts
from shardkit.format.scan import ShardScan, find_block_samples
from shardkit.format.shard_writer import (
    EncodedSample,
    OpenShard,
    ShardFile,
    WrittenShard,
    choose_compression,
    encode_sample,
    sample_size,
    written_shard,
)
from shardkit.format.side_files import publish_manifest
from shardkit.format.tar import END_OF_ARCHIVE
from shardkit.hashing import hash_key
from shardkit.storage.base import Storage, is_remote, is_web, join, parse_bytes, read_only, split_url
from shardkit.storage.local import local_path, remove_temporary_files
from shardkit.storage.registry import storage_for
from shardkit.storage.safe_names import check_no_links

if TYPE_CHECKING:
    import pyarrow as pa

STAGING_FOLDER = "__staging__"
"""The folder in a dataset's folder for samples that are not yet packed, if workers may be on other machines."""

_SUFFIXES = (".tar", ".tar.zst", ".tar.gz")
_STATES = {UNFINISHED_NAME: "an unfinished dataset", MANIFEST_NAME: "a dataset"}


def publish_dataset(
    storage: Storage,
    folder: str,
    written: Sequence[WrittenShard],
    *,
    block_samples: int,
    classes: Sequence[str] = (),
    packed: Mapping[str, object] | None = None,
) -> Manifest:
    """Make a dataset of shards whose keys are known to be unique, and remove the mark that it is unfinished.

    Raises:
        ArgumentError: A promoted column has different types in different shards.
    """
    types: dict[str, pa.Field] = {}
    for shard in written:
        for column in shard.columns:
            known = types.get(column.name, column)
            if "null" not in (str(column.type), str(known.type)) and column.type != known.type:
                raise ArgumentError(
                    f"column {column.name!r}: is {column.type} in {shard.shard.url} and {known.type} before it; return "
                    "one type from its function, or None",
                    field=column.name,
                )
            types[column.name] = column if str(known.type) == "null" else known
    schema = make_schema(types.values())
    manifest = Manifest(
        shards=tuple(w.shard for w in written),
        block_samples=block_samples,
        fields=tuple(sorted({field for w in written for field in w.fields})),
        unique_keys=True,
        classes=tuple(classes),
        columns={column.name: str(column.type) for column in schema},
        packed=packed or {},
        url=folder,
    )
    manifest = publish_manifest(storage, manifest, (w.blocks for w in written), schema)
    storage.delete(join(folder, UNFINISHED_NAME))
    return manifest


class ShardWriter:
    """Writes samples to shards, one after the other and in the order given; a context manager.

    The dataset exists once the context ends without an exception. If it ends with one, the complete shards stay, the
    open one is removed, no manifest is written, and opening the folder raises UnfinishedDatasetError. After that, or
    after a kill, a writer with ``resume=True`` continues after the last complete shard, or ``index_shards`` makes a
    dataset of the complete shards. To shuffle, to level the shards' sizes, or to split, use ``pack``.

    Args:
        destination: The dataset's folder; its name is the first part of the shards' names.
        shard_bytes: The largest size of a shard, uncompressed, headers and padding included.
        shard_samples: The most samples that a shard may have; None for as many as fit.
        compression: ``"none"``, ``"zst"``, ``"gz"``, with a level as in ``"zst:9"``; or ``"auto"``, decided from the
            first samples.
        block_bytes: The approximate size of a block, the unit of reading in training.
        columns: Values to promote into the index: a field's name, or a function of the sample.
        classes: Names of the classes, by number. A resumed writer keeps the names that it began with.
        resume: Keep the complete shards of a ``ShardWriter`` that was stopped, and continue after them. ``samples`` is
            then the number of samples in them; write the samples that follow. Nobody else may be writing there.
        overwrite: Replace an existing dataset, and the files of an unfinished one.
        storage_options: Passed to the storage. A shard for remote storage is held in ``TMPDIR`` until it is complete.

    Attributes:
        samples: The number of samples so far, including those that are not yet in a shard.
        manifest: The dataset's manifest when it is finished; None before.

    Raises:
        DatasetExistsError: The folder already has a dataset, or shards.
        ArgumentError: ``compression``, ``columns`` or ``classes`` differ from those of the shards to continue after.
        DatasetError: A shard is missing and later shards exist.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with ShardWriter(f"{folder}/words") as writer:
        ...     writer.write({"__key__": "0001", "txt": "hello", "cls": 1})
        >>> writer.manifest.num_samples
        1
    """

    def __init__(
        self,
        destination: str | os.PathLike[str],
        *,
        shard_bytes: int | str = "256MB",
        shard_samples: int | None = None,
        compression: str = "auto",
        block_bytes: int | str = "1MB",
        columns: Mapping[str, Column] | None = None,
        classes: Sequence[str] = (),
        resume: bool = False,
        overwrite: bool = False,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        self.samples = 0
        self.manifest: Manifest | None = None
        self._folder = clean_destination(destination)
        self._shard_bytes = parse_bytes(shard_bytes)
        self._shard_samples = check_shard_samples(shard_samples)
        self._compression = None if compression == "auto" else parse_compression(compression)
        self._block_bytes = parse_bytes(block_bytes)
        self._columns = ColumnMaker(columns)
        self._classes = check_texts("classes", classes)
        self._block_samples = 0
        self._waiting: list[tuple[EncodedSample, int, dict[str, object]]] = []  # with their sizes and columns
        self._waiting_bytes = 0
        self._open: OpenShard | None = None
        self._written: list[WrittenShard] = []
        self._keys: set[str] = set()  # of the open shard, and of the waiting samples
        self._over = ""  # why nothing more can be written
        self._hashes = array("Q")  # of all keys
        self._storage = storage_for(self._folder, storage_options)
        earlier = read_writer_marker(self._storage, self._folder) if resume and not overwrite else None
        if resume:
            sweep(self._folder)
        if earlier is not None:
            self._take_classes(earlier.get("classes"))
        if earlier is not None and not earlier.get("replaces"):
            self._take_written()
        else:
            marker = {"writer": "ShardWriter", "classes": list(self._classes)}
            prepare_folder(self._storage, self._folder, marker, overwrite=overwrite or earlier is not None)

    def _take_classes(self, classes: Sequence[str] | None) -> None:
        """Take the class names of the earlier writer. Raises ArgumentError if this one was given others."""
        if classes is None:  # it was of a version that did not record them
            return
        if self._classes and list(self._classes) != list(classes):
            raise self._is_other("classes", list(classes), list(self._classes))
        self._classes = check_texts("classes", classes)

    def _take_written(self) -> None:
        """Take the complete shards of an earlier writer, and delete its other files.

        Raises:
            ArgumentError: This writer could not have written these shards. Nothing was changed.
            DatasetError: A shard is missing and later ones exist. Nothing was changed.
        """
        names, indexes = set(self._storage.list(self._folder)), list_indexes(self._storage, self._folder)
        keep: set[str] = set()
        while True:
            stem = shard_stem(self._folder, len(self._written))
            found = [stem + suffix for suffix in _SUFFIXES if stem + suffix in names]
            if not found:
                break
            index = self._find_index(found[0], indexes.get(stem, ()))
            self._check_same(index)
            written = written_shard(*index)
            self._written.append(written)
            self._block_samples = index[0].facts.block_samples
            self._compression = self._compression or parse_compression(index[0].facts.compression)
            self._hashes.extend(hash_key(key) for key in index[0].sample_keys())
            self.samples += written.shard.samples
            keep |= {written.shard.url, written.shard.index_url}
        others = own_names(self._storage, self._folder)
        if lost := [name for name in others if name not in keep and name.endswith(_SUFFIXES)]:
            raise DatasetError(
                f"{self._folder}: holds {lost[0]}, which would be deleted, and not {stem}{_SUFFIXES[0]} or its like "
                "before it; restore the missing shards, make a dataset of the others with 'shardkit index', or pass "
                "overwrite=True to start over",
                url=self._folder,
            )
        delete_others(self._storage, self._folder, keep=keep)

    def _find_index(self, name: str, candidates: Iterable[str]) -> tuple[ShardIndex, FileFacts]:
        """Return the index of a shard; a shard of an earlier version without an index is indexed."""
        url = join(self._folder, name)
        for candidate in candidates:
            with contextlib.suppress(DatasetError, FileNotFoundError):
                index, facts = read_named_index(self._storage, self._folder, candidate)
                if index.facts.file_size == self._storage.info(url).size:
                    return index, facts
        block_samples = self._block_samples or find_block_samples(self._storage, [url], self._block_bytes)
        scan = ShardScan(self._storage, url, block_samples=block_samples, columns=self._columns)
        scan.run()
        shard = publish_index(self._storage, self._folder, name, scan.table(), scan.facts(), scan.blocks())
        return read_named_index(self._storage, self._folder, split_url(shard.index_url)[1])

    def _check_same(self, found: tuple[ShardIndex, FileFacts]) -> None:
        """Check that this writer could have written a shard. Raises ArgumentError."""
        index = found[0]
        asked = {
            "compression": self._compression.name if self._compression else index.facts.compression,
            "columns": sorted(self._columns.columns),
        }
        there = {"compression": index.facts.compression, "columns": sorted(index.columns)}
        for name, value in asked.items():
            if value != there[name]:
                raise self._is_other(name, there[name], value)

    def _is_other(self, name: str, there: object, asked: object) -> ArgumentError:
        return ArgumentError(
            f"{self._folder}: its shards have {name} {there!r}, and the writer that resumes has {asked!r}; pass the "
            "same, or overwrite=True to start over"
        )

    def write(self, sample: Mapping[str, Any]) -> None:
        """Write one sample.

        Raises:
            SampleError: Its key or a field would not be read back unchanged, its key is in this shard already, or it is
                larger than a shard may be. It was not written; the writer can continue.
            CodecError: A value cannot be encoded, or a column cannot be computed. The sample was not written; the
                writer can continue.
            StorageError: The shard could not be written. After this error, and any error not listed above, the dataset
                will not be finished.
            DatasetError: The writer is closed, or failed before.
        """
        if self._over:
            raise DatasetError(f"{self._folder}: {self._over}", url=self._folder)
        encoded = encode_sample(sample)
        key = encoded.key
        if key in self._keys:
            raise SampleError(f"sample {key!r}: its key was written before; keys must be unique", key=key)
        size = sample_size(key, ((field, len(data)) for field, data in encoded.members))
        if size + len(END_OF_ARCHIVE) > self._shard_bytes:
            raise too_large(key, size, self._shard_bytes)
        columns = self._columns.values(key, encoded.members)
        self._keys.add(key)
        self.samples += 1
        self._waiting.append((encoded, size, columns))
        self._waiting_bytes += size
        if self._block_samples or self._waiting_bytes >= self._block_bytes or len(self._waiting) == MAX_BLOCK_SAMPLES:
            self._write_waiting()

    def _write_waiting(self) -> None:
        """Write the waiting samples; the first of all decide the size of blocks and the compression."""
        waiting, self._waiting = self._waiting, []
        if not self._block_samples:
            self._block_samples = choose_block_samples(len(waiting), self._waiting_bytes, self._block_bytes)
        if self._compression is None:
            self._compression = choose_compression(data for sample, _, _ in waiting for _, data in sample.members)
        self._over = "its writer failed; continue with a new one with resume=True, or start over with overwrite=True"
        for sample, size, columns in waiting:
            self._file_for(sample.key, size).add(sample, columns)
            self._keys.add(sample.key)
            self._hashes.append(hash_key(sample.key))
        self._over = ""

    def _file_for(self, key: str, size: int) -> ShardFile:
        """Return the open shard, or a new one if it has no room."""
        if self._open:
            file = self._open.file
            full = file.tar_size + size + len(END_OF_ARCHIVE) > self._shard_bytes
            if full or file.samples == self._shard_samples:
                self._end_shard()
                self._keys = {key}
        if not self._open:
            self._open = OpenShard(
                self._storage,
                self._folder,
                shard_stem(self._folder, len(self._written)),
                compression=self._compression or parse_compression("none"),
                block_samples=self._block_samples,
            )
        return self._open.file

    def _end_shard(self) -> None:
        if self._open:
            self._written.append(self._open.publish())
            self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Publish the last shard, then the manifest; after an exception, neither.

        Raises:
            SampleError: A key occurs twice in the dataset, which is then not published.
            ArgumentError: A column names a field that no sample has. The dataset is then not published.
            DatasetError: The writer failed before, and the exception was suppressed.
        """
        try:
            if error is None:
                if self._over:
                    raise DatasetError(f"{self._folder}: {self._over}", url=self._folder)
                self._publish()
        finally:
            self._over = "its writer is closed; make another one, with resume=True if it was not finished"
            if self._open:
                self._open.__exit__(kind, error, traceback)

    def _publish(self) -> None:
        self._write_waiting()
        self._end_shard()
        check_unique(
            np.frombuffer(self._hashes, dtype=np.uint64),
            lambda: (
                key for w in self._written for key in open_index(self._storage, self._folder, w.shard).sample_keys()
            ),
        )
        self._columns.check_fields(w.fields for w in self._written)
        self.manifest = publish_dataset(
            self._storage, self._folder, self._written, block_samples=self._block_samples, classes=self._classes
        )


def check_folder(storage: Storage, folder: str) -> None:
    """Check that a folder has no shardkit dataset and no parts of one.

    Raises:
        DatasetExistsError: It has shards, indexes or manifests.
    """
    if names := own_names(storage, folder):
        state = next((said for name, said in _STATES.items() if name in names), "shards that no manifest lists")
        advice = "continue it with resume=True, choose" if UNFINISHED_NAME in names else "choose"
        raise DatasetExistsError(
            f"{folder}: holds {state} already ({len(names):,} files, {names[0]} among them); {advice} another folder, "
            "or replace it with overwrite=True",
            url=folder,
        )


def prepare_folder(storage: Storage, folder: str, marker: Mapping[str, object], *, overwrite: bool = False) -> None:
    """Mark a folder as an unfinished dataset; with ``overwrite``, delete the dataset that it has.

    Raises:
        DatasetExistsError: It has one, and ``overwrite`` is False. Nothing was changed.
    """
    refuse_links(folder)
    url = join(folder, UNFINISHED_NAME)
    if overwrite:  # until the old shards are deleted, they must not be mistaken for shards of the new dataset
        write_whole(storage, url, json.dumps({**marker, "replaces": True}).encode(), overwrite=True)
        delete_others(storage, folder, keep=())
    else:
        check_folder(storage, folder)
    write_whole(storage, url, json.dumps(marker).encode(), overwrite=overwrite)


def refuse_links(folder: str, *names: str) -> None:
    """Check that no subfolder that belongs to a dataset is a link that leads elsewhere.

    Args:
        folder: The dataset's folder.
        names: More folders in it to check.

    Raises:
        StorageError: A subfolder is a link.
    """
    if not is_remote(folder):
        check_no_links(local_path(folder), [f"{name}/0" for name in (INDEX_FOLDER, STAGING_FOLDER, *names)])


def sweep(folder: str) -> None:
    """Delete the temporary files of killed writers. No writer may be active in the folder."""
    if not is_remote(folder):
        remove_temporary_files(folder)
        remove_temporary_files(join(folder, INDEX_FOLDER))


def delete_others(storage: Storage, folder: str, *, keep: Container[str]) -> None:
    """Delete the remaining files of an earlier dataset in a folder that is marked as unfinished."""
    for name in own_names(storage, folder):
        if name != UNFINISHED_NAME and name not in keep:
            storage.delete(join(folder, name))


def own_names(storage: Storage, folder: str) -> list[str]:
    """Return the files of a dataset in a folder, including those below ``__index__``."""
    name = re.escape(dataset_name(folder))
    own = re.compile(rf"{name}-\d{{6,}}\.(?:tar|tar\.zst|tar\.gz|parquet)|{MANIFEST_NAME}|{UNFINISHED_NAME}")
    side = re.compile(
        rf"(?:{name}-\d{{6,}}|columns)\.[0-9a-f]{{16}}\.parquet|blocks\.[0-9a-f]{{16}}\.npy|manifest-.*\.json"
    )
    found = [name for name in storage.list(folder) if own.fullmatch(name)]
    return found + [
        join(INDEX_FOLDER, name) for name in storage.list(join(folder, INDEX_FOLDER)) if side.fullmatch(name)
    ]


def list_indexes(storage: Storage, folder: str) -> dict[str, list[str]]:
    """Return the names of each shard's indexes in a folder, by the shards' names without suffixes."""
    found: dict[str, list[str]] = {}
    for name in storage.list(join(folder, INDEX_FOLDER)):
        if name.endswith(".parquet"):
            found.setdefault(name.removesuffix(".parquet").rpartition(".")[0], []).append(name)
    return found


def check_unique(hashes: npt.NDArray[np.uint64], keys: Callable[[], Iterable[str]]) -> None:
    """Check that no key of a dataset occurs twice.

    Args:
        hashes: ``hash_key`` of every key: uint64, (samples,).
        keys: Returns the keys; called only if two hashes are equal.

    Raises:
        SampleError: A key occurs twice.
    """
    ordered = np.sort(hashes)
    repeated = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    if not repeated:
        return
    seen = set()
    for key in keys():
        if hash_key(key) in repeated:
            if key in seen:
                raise SampleError(
                    f"sample {key!r}: its key occurs more than once in the dataset, and keys must be unique; "
                    "make the keys different. The dataset was not published",
                    key=key,
                )
            seen.add(key)


def too_large(key: str, size: int, shard_bytes: int) -> SampleError:
    """Return the error for a sample that no shard can hold."""
    return SampleError(
        f"sample {key!r}: takes {size + len(END_OF_ARCHIVE):,} bytes as a shard of its own, more than "
        f"shard_bytes={shard_bytes:,}; pass larger shard_bytes, or leave the sample out",
        key=key,
    )


def check_shard_samples(shard_samples: int | None) -> int | None:
    """Return ``shard_samples`` if it is None or a positive number."""
    return None if shard_samples is None else check_whole("shard_samples", shard_samples, least=1)


def clean_destination(destination: str | os.PathLike[str]) -> str:
    """Return a dataset's folder without trailing slashes.

    Raises:
        ArgumentError: It is not a path, its name cannot be used for shards or is a shard's name, or it is a web
            address.
    """
    path = check_path("destination", destination)
    folder = path.rstrip("/")
    if is_web(folder):
        raise read_only(folder)
    name = dataset_name(folder)
    if name in ("", ".", "..") or name.startswith("-") or set(name) & set("\\:\0"):
        raise ArgumentError(
            f"destination {path!r}: has no name that can be used for shards; "
            "name a folder, like 'shards/train', without a backslash, a colon or a leading hyphen"
        )
    if name.lower().endswith(SHARD_SUFFIXES):
        raise ArgumentError(
            f"destination {path!r}: is named like a shard, but a dataset is a folder of shards; name the folder, like "
            f"{strip_suffix(folder)!r}"
        )
    return folder


def dataset_name(folder: str) -> str:
    """Return the first part of the names of a folder's shards: the folder's name."""
    return split_url(folder)[1]


def shard_stem(folder: str, number: int) -> str:
    """Return a shard's name without suffixes.

    Example:
        >>> shard_stem("shards/train", 7)
        'train-000007'
    """
    return f"{dataset_name(folder)}-{number:06d}"
