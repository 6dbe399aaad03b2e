"""Indexes and a manifest for existing shards: our own, webdataset's, or any tar."""

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from shardkit.errors import (
    ArgumentError,
    DatasetError,
    DatasetExistsError,
    NoListingError,
    UnfinishedDatasetError,
    check_path,
    check_paths,
    check_texts,
    hide_secrets,
)
from shardkit.format.classes import ClassMap, LabelledPart, holds_classes, join_classes, longest_classes
from shardkit.format.columns import Column, ColumnMaker, ColumnTypes
from shardkit.format.index import (
    OFFSET,
    SIZE,
    BlockTable,
    ShardIndex,
    open_index,
    publish_index,
    read_index,
    read_named_index,
)
from shardkit.format.manifest import (
    MANIFEST_NAME,
    SHARD_SUFFIXES,
    UNFINISHED_NAME,
    Manifest,
    Shard,
    check_finished,
    index_file_name,
    index_name,
    load_manifest,
    read_writer_marker,
    strip_suffix,
)
from shardkit.format.scan import ShardScan, count_repeated_keys, find_block_samples
from shardkit.format.side_files import publish_manifest
from shardkit.hashing import hash_keys
from shardkit.packing.writer import list_indexes, refuse_links, sweep
from shardkit.progress import track
from shardkit.reading.class_lists import labelled_part, with_class_lists
from shardkit.reading.forward import EVERY_FIELD, ShardLocation, find_shards
from shardkit.sample import KEY, SOURCE
from shardkit.storage.base import STDIN, Storage, is_remote, is_web, join, parse_bytes, read_only, split_url
from shardkit.storage.local import canonical_url
from shardkit.storage.registry import storage_for
from shardkit.storage.safe_names import find_unsafe

if TYPE_CHECKING:
    import pyarrow as pa

_logger = logging.getLogger("shardkit")


def index_shards(
    urls: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    out: str | PathLike[str] | None = None,
    columns: Mapping[str, Column] | None = None,
    block_bytes: int | str = "1MB",
    classes: Sequence[str] | None = None,
    overwrite: bool = False,
    progress: bool = False,
    storage_options: Mapping[str, object] | None = None,
) -> Manifest:
    """Make a dataset of existing shards: an index for each, and the manifest, which is written last.

    The shards are only read. They may be plain tars or compressed with zst, gz, bz2 or xz; blocks can be read on their
    own only in plain shards and in zst shards whose frames shardkit wrote. Samples are grouped as readers group them:
    a sample is a run of adjacent members with one key, without the members that readers skip. Fields that shardkit
    would not write itself are indexed unchanged. Keys that occur more than once are accepted, counted in a log message,
    and recorded: ``Manifest.unique_keys`` is then False.

    If a manifest exists, the shards are compared with it, and only matching shards are indexed again. The size of
    blocks, the class names and the record of how the dataset was packed are kept, and so are the indexes' columns that
    ``columns`` does not name. A dataset of format 1 becomes one of format 2, with the same digest and the same order;
    its old indexes are deleted after the manifest is published. Shards that a stopped ``ShardWriter`` left become a
    dataset, too.

    If the shards come from several datasets, the longest class list is taken. Every other class list must be the
    beginning of it, because an index changes no class numbers. To change them, use ``pack`` with a ``ShardSource`` of
    several datasets.

    Args:
        urls: A folder of shards, a pattern with braces or wildcards, or a list of these.
        out: The folder for indexes and manifest, by default beside the shards; needed for read-only storage. The
            manifest then names shards outside its own folder, and can be opened only with ``allow_any_url``.
        columns: Values to have in the index, such as ``{"label": "cls", "width": lambda s: s["jpg"].shape[1]}``: a
            field, decoded, or a function of the sample.
        block_bytes: The approximate size of a block, if no manifest specifies it.
        classes: The names of the classes, by number.
        overwrite: Replace a manifest that is damaged, lists other shards, or does not match them. Its entries are still
            kept for the shards that do match.
        progress: Show a progress bar on a terminal.
        storage_options: Passed to the storage.

    Returns:
        The manifest.

    Raises:
        ShardError: A shard is damaged, a sample has a field twice, or a name is not UTF-8. Indexes of earlier shards
            have been written; the manifest has not, and an old one is unchanged.
        DatasetError: A shard does not match the manifest (it was damaged, or replaced), or there are no shards. Or the
            class lists of the shards' datasets are incompatible.
        SampleError: A class number has no name in its dataset's list, and would have one in the list that is taken.
        DatasetExistsError: The manifest has other shards.
        UnfinishedDatasetError: The folder's dataset is still being packed.
        ArgumentError: The shards are in several folders and ``out`` is not given. Or a column names a field that no
            sample has; the indexes have then been written, but not the manifest, and an old one is unchanged.

    Example:
        >>> import tarfile, tempfile
        >>> from pathlib import Path
        >>> folder = tempfile.mkdtemp()
        >>> _ = Path(folder, "0001.cls").write_text("7")
        >>> with tarfile.open(f"{folder}/train.tar", "w") as tar:
        ...     tar.add(f"{folder}/0001.cls", "0001.cls")
        >>> index_shards(folder).num_samples
        1
    """
    maker = ColumnMaker(columns)
    classes = None if classes is None else check_texts("classes", classes)
    block_bytes = parse_bytes(block_bytes)
    locations = _find_shards(urls, storage_options)
    shard_urls = [location.url for location in locations]
    folder = _manifest_folder(shard_urls, check_path("out", out) if out else None)
    storage = storage_for(folder, storage_options)
    for place in {folder, *(split_url(url)[0] for url in shard_urls)}:
        check_finished(storage, place, by_pack=True)
    names = [_name(url, folder) for url in shard_urls]
    _check_names(dict(zip(names, shard_urls, strict=True)), folder)
    old = _old_manifest(storage, folder, set(names), overwrite=overwrite)
    expected = {shard.url: shard for shard in old.shards} if old else {}
    left = _LeftIndexes(storage, folder, old)
    block_samples = left.block_samples or find_block_samples(storage, shard_urls, block_bytes)
    class_list = _choose_classes(locations, classes, old)
    if classes is None and old is None:
        class_list = class_list or left.classes

    shards: list[Shard] = []
    tables: list[BlockTable] = []
    fields: set[str] = set()
    hashes = []
    column_types = ColumnTypes()
    with track("indexing", total=len(names), unit="shards", enabled=progress) as advance:
        for location, name in zip(locations, names, strict=True):
            url = location.url
            scan = ShardScan(storage, url, block_samples=block_samples, columns=_checked(maker, location, class_list))
            scan.run()
            if (
                classes is None and "/" in name and name not in expected
            ):  # shards that are new in its folder use its classes
                labelled = any(map(holds_classes, scan.fields))
                join_classes(
                    [LabelledPart(folder, class_list, labelled=True), LabelledPart(url, location.classes, labelled)]
                )
            facts, table, blocks = scan.facts(), scan.table(), scan.blocks()
            known = expected.get(name)
            if known and known.sha256 != facts.sha256 and not overwrite:
                raise _is_other_shard(url, facts.sha256, known.sha256)
            table = left.add_columns(table, name, facts.sha256)
            column_types.add(name, table.schema)
            shards.append(publish_index(storage, folder, name, table, facts, blocks))
            tables.append(blocks)
            fields |= scan.fields
            hashes.append(hash_keys(scan.keys))
            advance(1)
    maker.check_fields([fields] if fields else [])
    repeated = count_repeated_keys(hashes, lambda i: open_index(storage, folder, shards[i]).sample_keys())
    if repeated:
        _logger.warning(
            "%s: %s samples have a key that an earlier sample has; unique_keys is false", hide_secrets(folder), repeated
        )
    is_as_packed = old is not None and [s.sha256 for s in old.shards] == [s.sha256 for s in shards]
    manifest = Manifest(
        tuple(shards),
        block_samples,
        tuple(sorted(fields)),
        repeated == 0,
        class_list,
        column_types.as_text(),
        old.packed if old and is_as_packed else {},
        url=folder,
    )
    manifest = publish_manifest(storage, manifest, tables, column_types.schema)
    left.delete(manifest)
    return manifest


def _find_shards(
    urls: str | PathLike[str] | Sequence[str | PathLike[str]], storage_options: Mapping[str, object] | None
) -> list[ShardLocation]:
    """Return the shards that ``urls`` names. A folder means all its shards, whether its manifest lists them or not."""
    found = []
    for url in check_paths("urls", urls):
        if url == STDIN:
            raise ArgumentError("standard input cannot be indexed; write it to a file first")
        try:
            names = storage_for(url, storage_options).list(url)
        except NotADirectoryError:
            found.append(ShardLocation(url))
            continue
        except NoListingError:
            names = []
        shards = [ShardLocation(join(url, name)) for name in names if name.lower().endswith(SHARD_SUFFIXES)]
        if UNFINISHED_NAME in names and not shards:
            raise UnfinishedDatasetError(
                f"{url}: is unfinished, and none of its shards is complete; run its writer again, a ShardWriter "
                "with resume=True",
                url=url,
            )
        found += shards or find_shards(url, storage_options)
    return with_class_lists(found, storage_options)


def _choose_classes(
    locations: Sequence[ShardLocation], classes: tuple[str, ...] | None, old: Manifest | None
) -> tuple[str, ...]:
    """Return the class list for all shards.

    Args:
        locations: The shards, with the class lists of their datasets.
        classes: The requested class list.
        old: The existing manifest.

    Raises:
        DatasetError: A number would mean two classes.
    """
    parts = [labelled_part(location, EVERY_FIELD) for location in locations if location.fields is not None]
    if classes is not None:
        parts = [part for part in parts if part.classes]
        asked = LabelledPart("the call", classes, labelled=True)
        return longest_classes([*parts, asked]) if len(set(parts)) > 1 else classes
    longest = longest_classes(parts)
    if old and len(old.classes) >= len(longest):  # it may name the classes differently
        return old.classes
    return longest_classes([*parts, LabelledPart(old.url, old.classes, labelled=True)]) if old else longest


def _checked(maker: ColumnMaker, location: ShardLocation, class_list: tuple[str, ...]) -> ColumnMaker:
    """Return a column maker that also checks that no class number without a name gets one from a longer list."""
    own = location.classes
    is_longer = own and len(own) < len(class_list) and class_list[: len(own)] == own
    return _CheckedLabels(maker, ClassMap(own, class_list)) if is_longer else maker


class _CheckedLabels(ColumnMaker):
    """Computes columns, and checks that all class numbers are in their dataset's list."""

    def __init__(self, maker: ColumnMaker, class_map: ClassMap) -> None:
        super().__init__(maker.columns)
        self._class_map = class_map

    def needs(self, field: str) -> bool:
        """See ``ColumnMaker.needs``."""
        return holds_classes(field) or super().needs(field)

    def values(self, key: str, fields: Iterable[tuple[str, bytes]]) -> dict[str, object]:
        """See ``ColumnMaker.values``. Raises SampleError if a class number is not in the list."""
        sample = dict(fields)
        self._class_map.apply({KEY: key} | sample)
        return super().values(key, sample.items())


def _manifest_folder(shard_urls: Sequence[str], out: str | None) -> str:
    folders = sorted({split_url(url)[0] for url in shard_urls})
    if out and is_web(out):
        raise read_only(out)
    if out:
        return out.rstrip("/") or out
    if len(folders) == 1 and not is_web(folders[0]):
        return folders[0]
    lie = f"the shards are in {', '.join(folders[:5])}" if folders else "there are no shards"
    cannot = ", where nothing can be written" if len(folders) == 1 else ""
    raise ArgumentError(f"{lie}{cannot}; pass the folder for the manifest and the indexes as out=")


def _check_names(names: Mapping[str, str], folder: str) -> None:
    """Check that indexes named after the shards, given by name, have safe names, and that no link leads elsewhere."""
    for name, url in names.items():
        if unsafe := find_unsafe([split_url(index_file_name(name, "0" * 64))[1]]):
            raise ArgumentError(f"the index {unsafe[0]!r} of the shard {url} {unsafe[1]}; rename the shard", url=url)
    refuse_links(folder)


def _name(url: str, folder: str) -> str:
    if not is_remote(url) and not is_remote(folder):
        return Path(os.path.relpath(canonical_url(url), canonical_url(folder))).as_posix()
    if hide_secrets(url) != url:
        raise ArgumentError(
            f"{url}: has a password or a query that may be a signature, and the manifest would reveal it; pass "
            "username and password as storage_options, and give an address that needs no signature",
            url=url,
        )
    begin = f"{folder.rstrip('/')}/"
    if not url.startswith(begin):
        return url if is_remote(url) else Path(canonical_url(url)).as_uri()
    name = url.removeprefix(begin)
    return unquote(name) if is_web(url) else name


def _old_manifest(storage: Storage, folder: str, names: set[str], *, overwrite: bool) -> Manifest | None:
    """Return the existing manifest, which must not list other shards unless ``overwrite`` is True."""
    try:
        old = load_manifest(storage, folder, MANIFEST_NAME, allow_any_url=True)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DatasetError as error:
        if not overwrite:
            raise
        _logger.warning("%s; so nothing is kept from it", error)
        return None
    missing = [shard.url for shard in old.shards if shard.url not in names]
    if missing and not overwrite:
        raise DatasetExistsError(
            f"{folder}: its manifest also lists {missing[0]}{' and more' if missing[1:] else ''}, which would be lost; "
            f"index all of its shards, or pass overwrite=True to make a dataset of these {len(names):,} alone",
            url=folder,
        )
    return old


def _delete_old_indexes(storage: Storage, manifest: Manifest) -> None:
    """Delete the indexes of format 1 beside the shards; other files with such names stay."""
    for shard in manifest.shards:
        url = join(manifest.url, index_name(shard.url))
        with contextlib.suppress(FileNotFoundError, DatasetError, OSError):
            index = read_index(storage, url)
            if index.facts.sha256 == shard.sha256:
                storage.delete(url)


def _is_other_shard(url: str, found: str, expected: str) -> DatasetError:
    return DatasetError(
        f"shard {url}: has the SHA-256 {found[:16]}..., expected {expected[:16]}... as its manifest says; it was "
        "damaged or replaced. Fetch it again, or, if the shard is right, pass overwrite=True",
        url=url,
    )


class _LeftIndexes:
    """The indexes that a folder has before it is indexed: from its manifest, or from a stopped writer."""

    def __init__(self, storage: Storage, folder: str, old: Manifest | None) -> None:
        self._storage = storage
        self._folder = folder
        self._old = old
        self._shards = {shard.url: shard for shard in old.shards} if old else {}
        self._names = {} if old else list_indexes(storage, folder)
        marker = read_writer_marker(storage, folder)
        self._is_by_writer = marker is not None
        self.classes = tuple(str(name) for name in (marker or {}).get("classes", ()))
        self.block_samples = old.block_samples if old else 0
        for name in sorted(self._names)[:1]:
            for file in self._names[name]:
                with contextlib.suppress(DatasetError):
                    self.block_samples = read_named_index(storage, folder, file)[0].facts.block_samples

    def delete(self, manifest: Manifest) -> None:
        """Delete files that the new manifest replaces: indexes of format 1, and files of a stopped writer."""
        _delete_old_indexes(self._storage, manifest)
        if self._is_by_writer:
            sweep(self._folder)
            self._storage.delete(join(self._folder, UNFINISHED_NAME))

    def add_columns(self, table: "pa.Table", name: str, sha256: str) -> "pa.Table":
        """Return a shard's rows with the columns that only its existing index has, if that is of the same bytes.

        A column without values that no manifest lists is left out, because it is from a call whose column named a
        field that no sample has.
        """
        known = self._old.columns if self._old else {}
        try:
            index = self._open(name, sha256)
            if index is None:
                return table
            kept = index.rows([name for name in (*sorted(index.columns), SOURCE) if name not in table.column_names])
        except (FileNotFoundError, DatasetError) as error:
            if lost := [name for name in known if name not in table.column_names]:
                _logger.warning("%s; so the columns %s of its shard are lost", error, ", ".join(lost))
            return table
        for column in kept.column_names:
            if index.columns.get(column) != "null" or column in known:
                table = table.append_column(column, kept.column(column))
        own = [column for column in table.column_names if ":" in column or column in (KEY, OFFSET, SIZE)]
        return table.select([*own, *sorted(set(table.column_names) - set(own))])

    def _open(self, name: str, sha256: str) -> ShardIndex | None:
        shard = self._shards.get(name)
        if shard is not None:
            return open_index(self._storage, self._folder, shard) if shard.sha256 == sha256 else None
        for file in self._names.get(strip_suffix(split_url(name)[1]), ()):
            index, _ = read_named_index(self._storage, self._folder, file)
            if index.facts.sha256 == sha256:
                return index
        return None
