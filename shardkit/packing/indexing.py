"""Indexes and a manifest for shards that are there already: ours, webdataset's, anybody's tar."""

import contextlib
import logging
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from shardkit.codecs.compress import open_decompressed
from shardkit.errors import (
    ArgumentError,
    DatasetError,
    DatasetExistsError,
    NoListingError,
    check_path,
    check_paths,
    check_texts,
    hide_secrets,
)
from shardkit.format.classes import ClassMap, LabelledPart, holds_classes, join_classes, longest_classes
from shardkit.format.columns import Column, ColumnMaker
from shardkit.format.index import (
    MAX_BLOCK_SAMPLES,
    OFFSET,
    SIZE,
    BlockTable,
    ShardFacts,
    choose_block_samples,
    read_index,
    write_index,
)
from shardkit.format.manifest import (
    MANIFEST_NAME,
    SHARD_SUFFIXES,
    Manifest,
    Shard,
    check_finished,
    index_name,
    read_manifest,
    write_whole,
)
from shardkit.format.scan import ShardScan, content_frames, count_repeated_keys, group_members
from shardkit.format.tar import read_members
from shardkit.hashing import hash_keys
from shardkit.progress import track
from shardkit.reading.class_lists import labelled_part, with_class_lists
from shardkit.reading.forward import EVERY_FIELD, ShardLocation, find_shards
from shardkit.sample import KEY, SOURCE
from shardkit.storage.base import STDIN, Storage, is_remote, is_web, join, parse_bytes, read_only, split_url
from shardkit.storage.local import local_path
from shardkit.storage.registry import storage_for

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

    The shards themselves are only read. They may be plain tars or compressed with zst, gz, bz2 or xz; blocks can be
    read on their own only in plain ones and in those zst shards whose frames shardkit wrote. Samples are grouped as
    the readers group them: adjacent members with one key; what readers skip is skipped. Fields that shardkit would not
    write itself are indexed as they are. Keys that occur more than once are accepted, counted in a log message, and
    recorded: ``Manifest.unique_keys`` is False then.

    Where a manifest exists, the shards are compared with it: only shards that are what it says are indexed anew, the
    size of blocks, class names and how the dataset was packed are taken over, and so are the columns of the indexes
    that ``columns`` does not name.

    Shards of several datasets must have class lists of which one begins with all others, and that one is taken: an
    index changes no class numbers. ``pack`` with a ``ShardSource`` of several datasets does.

    Args:
        urls: A folder of shards, a pattern with braces or wildcards, or a list of these.
        out: Where indexes and manifest go if not beside the shards, for read-only stores. The manifest then names
            shards outside its own folder, and who opens it must say that this is meant (``allow_any_url``).
        columns: Values to have in the index, such as ``{"label": "cls", "width": lambda s: s["jpg"].shape[1]}``: a
            field, decoded, or a function of the sample.
        block_bytes: About how large a block is.
        classes: The names of the classes, by number.
        overwrite: Replace a manifest that says otherwise, and files that are in the way of indexes; take nothing over.
        progress: Show a progress bar on a terminal.
        storage_options: Passed to the storage.

    Returns:
        The manifest.

    Raises:
        ShardError: A shard is damaged, a sample has a field twice, or a name is not UTF-8. Indexes of earlier shards
            are there, the manifest is not, or is the old one.
        DatasetError: A shard is not what the manifest says (it was damaged, or replaced), or there are no shards. Or
            the shards are of datasets whose class lists do not go together.
        SampleError: A class number has no name in its dataset's list, and would have one in the list that is taken.
        DatasetExistsError: The manifest has other shards, or a file that is no index has an index's name.
        UnfinishedDatasetError: The folder's dataset is still being written.
        ArgumentError: The shards lie in several folders and ``out`` is not given, or two would have one index. Or a
            column names a field that no sample has: the indexes are there then, the manifest is not, or is the old one.

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
        check_finished(storage, place)
    names = _names(shard_urls, folder)
    old = None if overwrite else _old_manifest(storage, folder, set(names), storage_options)
    expected = {shard.url: shard for shard in old.shards} if old else {}
    for name in names:
        if not overwrite and name not in expected:
            _check_index_place(storage, join(folder, index_name(name)))
    class_list = _choose_classes(locations, classes, old)
    block_samples = old.block_samples if old else _choose_block_samples(storage, shard_urls, block_bytes)

    shards = []
    fields: set[str] = set()
    hashes = []
    column_types = ColumnTypes()
    with track("indexing", total=len(names), unit="shards", enabled=progress) as advance:
        for location, name in zip(locations, names, strict=True):
            url = location.url
            scan = ShardScan(storage, url, block_samples=block_samples, columns=_checked(maker, location, class_list))
            scan.run()
            if classes is None and "/" in name and name not in expected:  # what comes into its folder has its classes
                labelled = any(map(holds_classes, scan.fields))
                join_classes(
                    [LabelledPart(folder, class_list, labelled=True), LabelledPart(url, location.classes, labelled)]
                )
            facts = scan.facts()
            _check_expected(url, facts, expected.get(name))
            index_url = join(folder, index_name(name))
            table = scan.table()
            if not overwrite:
                table = _with_old_columns(table, facts, storage, index_url, known=old.columns if old else ())
            column_types.add(name, table)
            blocks = scan.blocks()
            with storage.create(index_url, overwrite=True) as file:
                write_index(file, table, facts, blocks)
            shards.append(describe_shard(name, facts, blocks))
            fields |= scan.fields
            hashes.append(hash_keys(scan.keys))
            advance(1)
    maker.check_fields([fields] if fields else [])
    repeated = count_repeated_keys(
        hashes, lambda i: read_index(storage, join(folder, shards[i].index_url)).sample_keys()
    )
    if repeated:
        _logger.warning(
            "%s: %s samples have a key that an earlier sample has; unique_keys is false", hide_secrets(folder), repeated
        )
    manifest = Manifest(
        tuple(shards),
        block_samples,
        tuple(sorted(fields)),
        repeated == 0,
        class_list,
        column_types.as_text(),
        old.packed if old else {},
        folder,
    )
    write_whole(storage, join(folder, MANIFEST_NAME), manifest.to_json().encode(), overwrite=True)
    return manifest


def describe_shard(name: str, facts: ShardFacts, blocks: BlockTable) -> Shard:
    """Return the manifest's entry for a shard."""
    return Shard(
        name, facts.samples, facts.file_size, facts.tar_size, facts.sha256, facts.compression, blocks=len(blocks)
    )


def _find_shards(
    urls: str | PathLike[str] | Sequence[str | PathLike[str]], storage_options: Mapping[str, object] | None
) -> list[ShardLocation]:
    """Return the shards that are meant. A folder means all that is in it, whatever a manifest there says."""
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
        found += shards or find_shards(url, storage_options)
    return with_class_lists(found, storage_options)


def _choose_classes(
    locations: Sequence[ShardLocation], classes: tuple[str, ...] | None, old: Manifest | None
) -> tuple[str, ...]:
    """Return the class list of shards together.

    Args:
        locations: The shards, with the class lists of their datasets.
        classes: What was asked for.
        old: The manifest that is there.

    Raises:
        DatasetError: One number would mean two classes.
    """
    parts = [labelled_part(location, EVERY_FIELD) for location in locations if location.fields is not None]
    if classes is not None:
        parts = [part for part in parts if part.classes]
        asked = LabelledPart("the call", classes, labelled=True)
        return longest_classes([*parts, asked]) if len(set(parts)) > 1 else classes
    longest = longest_classes(parts)
    if old and len(old.classes) >= len(longest):  # it may have other names for them
        return old.classes
    return longest_classes([*parts, LabelledPart(old.url, old.classes, labelled=True)]) if old else longest


def _checked(maker: ColumnMaker, location: ShardLocation, class_list: tuple[str, ...]) -> ColumnMaker:
    """Return what computes columns and checks that no number without a name gets one in a longer list."""
    own = location.classes
    is_longer = own and len(own) < len(class_list) and class_list[: len(own)] == own
    return _CheckedLabels(maker, ClassMap(own, class_list)) if is_longer else maker


class _CheckedLabels(ColumnMaker):
    """Computes columns of samples whose class numbers are all in their dataset's list."""

    def __init__(self, maker: ColumnMaker, class_map: ClassMap) -> None:
        super().__init__(maker.columns)
        self._class_map = class_map

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
    lie = f"the shards lie in {', '.join(folders[:5])}" if folders else "there are no shards"
    cannot = ", where nothing can be written" if len(folders) == 1 else ""
    raise ArgumentError(f"{lie}{cannot}; say by out= where the manifest and the indexes go")


def _names(shard_urls: Sequence[str], folder: str) -> list[str]:
    """Return what the manifest calls the shards: their URLs relative to its folder, or whole if they lie elsewhere."""
    names = [_name(url, folder) for url in shard_urls]
    taken: dict[str, str] = {}
    for url, name in zip(shard_urls, names, strict=True):
        other = taken.setdefault(index_name(name), url)
        if other is not url:
            raise ArgumentError(
                f"the shards {other} and {url} would have one index, {index_name(name)}; "
                "rename one, or index them apart",
                url=url,
            )
    return names


def _name(url: str, folder: str) -> str:
    if not is_remote(url) and not is_remote(folder):
        return Path(os.path.relpath(local_path(url).resolve(), local_path(folder).resolve())).as_posix()
    if hide_secrets(url) != url:
        raise ArgumentError(
            f"{url}: has a password or a query that may be a signature, and the manifest would tell it; pass username "
            "and password as storage_options, and give an address that needs no signature",
            url=url,
        )
    begin = f"{folder.rstrip('/')}/"
    if not url.startswith(begin):
        return url if is_remote(url) else local_path(url).resolve().as_uri()
    name = url.removeprefix(begin)
    return unquote(name) if is_web(url) else name


def _old_manifest(
    storage: Storage, folder: str, names: set[str], storage_options: Mapping[str, object] | None
) -> Manifest | None:
    """Return the manifest that is there, which must not have other shards than these."""
    try:
        storage.info(join(folder, MANIFEST_NAME))
    except FileNotFoundError:
        return None
    old = read_manifest(folder, storage_options=storage_options, allow_any_url=True)
    if missing := [shard.url for shard in old.shards if shard.url not in names]:
        raise DatasetExistsError(
            f"{folder}: its manifest also lists {missing[0]}{' and more' if missing[1:] else ''}, which would be lost; "
            f"index all of its shards, or pass overwrite=True to make a dataset of these {len(names):,} alone",
            url=folder,
        )
    return old


def _check_index_place(storage: Storage, url: str) -> None:
    """Check that nothing is there but an index: other programs, too, put Parquet files of that name beside shards."""
    with contextlib.suppress(FileNotFoundError):
        try:
            read_index(storage, url)
        except (DatasetError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise DatasetExistsError(
                f"{url}: is in the place of an index, but is none of shardkit; pass out= to put the indexes elsewhere, "
                "or overwrite=True to replace it",
                url=url,
            ) from error


def _choose_block_samples(storage: Storage, shard_urls: Sequence[str], block_bytes: int) -> int:
    """Return how many samples a block has, from the first shard that has samples; only its headers are read."""
    for url in shard_urls:
        stream = storage.open(url)
        try:
            opened = open_decompressed(stream)
            groups = group_members(read_members(opened, wanted=lambda _: False), url)
            offsets = [next(iter(sample.values())).header_offset for _, sample in groups]
        finally:
            stream.close()
        if not offsets:
            continue
        info = storage.info(url)
        if opened.compression == "none":
            return choose_block_samples(len(offsets), info.size, block_bytes)
        frames = content_frames(storage, url, info.size) if opened.compression == "zst" else {}
        ends = [offset + size for offset, size in frames]
        first = sum(offset < ends[0] for offset in offsets) if ends else 0
        if 0 < first <= MAX_BLOCK_SAMPLES and offsets[first : first + 1] in ([], ends[:1]):
            return first  # a frame a block, as shardkit writes them
        return choose_block_samples(len(offsets), offsets[-1] + (offsets[-1] - offsets[0]) // len(offsets), block_bytes)
    return choose_block_samples(0, 0, block_bytes)


def _check_expected(url: str, facts: ShardFacts, expected: Shard | None) -> None:
    if expected and expected.sha256 != facts.sha256:
        raise DatasetError(
            f"shard {url}: has the SHA-256 {facts.sha256[:16]}..., expected {expected.sha256[:16]}... as its manifest "
            "says; it was damaged or replaced. Fetch it again, or, if it is what it should be, pass overwrite=True",
            url=url,
        )


def _with_old_columns(
    table: "pa.Table", facts: ShardFacts, storage: Storage, url: str, *, known: Container[str]
) -> "pa.Table":
    """Return the table with the columns that only the present index of the same bytes has.

    One without values that no manifest knows is left out: it is of a call whose columns named no field.
    """
    try:
        old = read_index(storage, url)
        if old.facts.sha256 != facts.sha256:
            return table
        kept = old.rows([name for name in (*sorted(old.columns), SOURCE) if name not in table.column_names])
    except (FileNotFoundError, DatasetError):
        return table
    for name in kept.column_names:
        if old.columns.get(name) == "null" and name not in known:
            continue
        table = table.append_column(name, kept.column(name))
    own = [name for name in table.column_names if ":" in name or name in (KEY, OFFSET, SIZE)]
    return table.select([*own, *sorted(set(table.column_names) - set(own))])


class ColumnTypes:
    """The promoted columns of all shards, in types that hold the values of each."""

    def __init__(self) -> None:
        self._schema: pa.Schema | None = None

    def add(self, name: str, table: "pa.Table") -> None:
        """Add the columns of one shard's index.

        Raises:
            ArgumentError: No type holds the values of a column in this shard and those before it.
        """
        import pyarrow as pa

        promoted = [f.remove_metadata() for f in table.schema if ":" not in f.name and not f.name.startswith("__")]
        schemas = [self._schema or pa.schema([]), pa.schema(promoted)]
        try:
            self._schema = pa.unify_schemas(schemas, promote_options="permissive")
        except pa.ArrowException as error:
            raise ArgumentError(
                f"columns: the values in shard {name} are not of the type that they have in the shards before it "
                f"({error}); return one type, or None"
            ) from error

    def as_text(self) -> dict[str, str]:
        """Return the columns and their Arrow types as text."""
        return {field.name: str(field.type) for field in self._schema or ()}
