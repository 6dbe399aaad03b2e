"""Shards -> samples: which shards a user means, and the samples of one shard, read strictly forward.

A sample is a run of adjacent members with one key. If the dataset has a manifest, every sample is compared with its row
in the index before it is yielded, and the number of samples with the manifest. This finds damage that a tar alone
cannot show. Without a manifest, only the tar's own checksums and rules are checked.
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from itertools import islice
from os import PathLike
from typing import Any, TypeAlias

from isal.isal_zlib import crc32

from shardkit.codecs.compress import open_decompressed
from shardkit.errors import ArgumentError, DatasetError, NoListingError, ShardError, check_paths, hide_secrets
from shardkit.format.index import OFFSET, PARTS, ShardIndex, open_index
from shardkit.format.manifest import MANIFEST_NAME, SHARD_SUFFIXES, Manifest, Shard, check_finished, read_manifest
from shardkit.format.tar import Member, read_members
from shardkit.reading.missing import check_present
from shardkit.sample import (
    COLUMNS,
    KEY,
    MAX_KNOWN,
    RESERVED,
    SOURCE,
    URL,
    FieldSelection,
    Sample,
    split_name,
    split_new_name,
)
from shardkit.storage.base import FRESH_READS, STDIN, Storage, is_remote, is_web, join, split_url
from shardkit.storage.local import local_path
from shardkit.storage.registry import storage_for

EVERY_FIELD = FieldSelection.parse(None)

_logger = logging.getLogger("shardkit")

_MAGIC = re.compile(r"[*?[]")
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)")
_MAX_NAMES = (
    1_000_000  # in a pattern: these take a second and a few hundred megabytes; more are probably a typing error
)
_MAX_BATCH_ROWS = 4096  # index rows converted to Python objects at a time: about a megabyte per field

_ManifestReader: TypeAlias = Callable[[str], Manifest]
_Rows: TypeAlias = Iterator[tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class ShardLocation:
    """Where a shard is, and what its dataset says about it.

    Attributes:
        url: The shard.
        shard: Its entry in the manifest; None if it was not found through one.
        folder: The folder of the manifest that lists it; empty if there is none, and so no index either.
        classes: Its dataset's class list; empty if that is not known.
        fields: Its dataset's fields; None if they are not known.
    """

    url: str = dataclasses.field(repr=False)  # it may contain a signature
    shard: Shard | None = None
    folder: str = dataclasses.field(default="", repr=False)
    classes: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    fields: tuple[str, ...] | None = dataclasses.field(default=None, repr=False)


def find_shards(
    urls: str | PathLike[str] | Sequence[str | PathLike[str]],
    storage_options: Mapping[str, object] | None = None,
    *,
    allow_any_url: bool = False,
) -> list[ShardLocation]:
    """Return the shards that a user means, in order. A shard that is named twice is returned twice.

    Shards of a manifest on this machine must exist: each folder is listed once. Other shards are not checked: a
    missing one is an error when it is read. The list is empty for a dataset without samples, such as a small split.

    Args:
        urls: One of these, or several: a dataset's folder or its ``manifest.json``, whose shards are read with their
            indexes; a folder of tars without a manifest, sorted by name; the name of a shard; a brace pattern
            (``train-{000..127}.tar``); a pattern with ``*``, ``?`` or ``[...]``, sorted by name; ``-`` for standard
            input. A name that exists is not taken as a pattern.
        storage_options: Passed to the storage.
        allow_any_url: Let a manifest name shards outside its folder. Only for manifests whose author you trust.

    Raises:
        ArgumentError: A URL is not text or has an unknown scheme, a pattern is malformed, or there are no URLs.
        DatasetError: Nothing is found, or a manifest is not usable.
        IncompleteDatasetError: Shards or indexes that a manifest names are missing.
        UnfinishedDatasetError: A folder is being written, or its writer was killed.

    Example:
        >>> [location.url for location in find_shards("train-{00..02}.tar")]
        ['train-00.tar', 'train-01.tar', 'train-02.tar']
    """
    read = partial(read_manifest, storage_options=storage_options, allow_any_url=allow_any_url)
    several = check_paths("urls", urls)
    if not several:
        raise ArgumentError("urls is empty; give at least one shard, pattern or folder")
    return [
        location
        for pattern in several
        for url in _expand_braces(pattern, storage_options)
        for location in _find(storage_for(url, storage_options), url, read)
    ]


def _expand_braces(pattern: str, storage_options: Mapping[str, object] | None) -> list[str]:
    if "{" not in pattern or (not is_remote(pattern) and _exists(storage_for(pattern, storage_options), pattern)):
        return [pattern]
    from braceexpand import braceexpand

    try:
        longest = max((abs(int(last) - int(first)) for first, last in _RANGE.findall(pattern)), default=0)
        names = list(islice(braceexpand(pattern), _MAX_NAMES + 1)) if longest < _MAX_NAMES else None
    except ValueError as error:
        raise ArgumentError(f"{pattern}: is not a valid brace pattern ({error}); close every brace") from error
    if names is None or len(names) > _MAX_NAMES:
        raise ArgumentError(f"{pattern}: stands for more than {_MAX_NAMES:,} names; correct it, or give a folder")
    return names


def _find(storage: Storage, url: str, read: _ManifestReader) -> list[ShardLocation]:
    if url == STDIN:
        return [ShardLocation(url)]
    if url.lower().startswith("file:"):
        url = str(local_path(url))  # the names in a folder are not quoted as those in a URL are
    name = split_url(url)[1]
    if _is_pattern(url) and not _exists(storage, url):
        matches = [match for match in _glob(storage, url) if match.lower().endswith(SHARD_SUFFIXES)]
        if not matches:
            raise DatasetError(f"{url}: matches no shards ({', '.join(SHARD_SUFFIXES)}); correct the pattern", url=url)
        return [ShardLocation(match) for match in matches]
    if name.lower().endswith(SHARD_SUFFIXES):
        return [ShardLocation(url)]
    if name.endswith(".json"):
        return _from_manifest(storage, read(url))
    try:
        names = storage.list(url)
    except NotADirectoryError:
        return [ShardLocation(url)]
    except NoListingError:  # only a manifest can name the shards
        return _from_manifest(storage, read(url))
    return _find_in_folder(storage, url, names, read)


def _is_pattern(url: str) -> bool:
    """Return whether a URL has wildcards. In a web address only ``*`` is one, before the query."""
    return "*" in url.partition("?")[0] if is_web(url) else _MAGIC.search(url) is not None


def _find_in_folder(storage: Storage, url: str, names: list[str], read: _ManifestReader) -> list[ShardLocation]:
    if MANIFEST_NAME in names:
        return _from_manifest(storage, read(url))
    check_finished(storage, url)
    shards = [name for name in names if name.lower().endswith(SHARD_SUFFIXES)]
    if shards:
        return [ShardLocation(join(url, name)) for name in shards]
    inner = [join(url, name) for name in names if MANIFEST_NAME in (_list(storage, join(url, name)) or ())]
    if inner:
        raise DatasetError(f"{url}: has no shards itself; give one of the datasets in it: {', '.join(inner)}", url=url)
    problem = f"has neither {MANIFEST_NAME} nor shards ({', '.join(SHARD_SUFFIXES)})"
    if not names and not _exists(storage, url):
        problem = "does not exist"
    raise DatasetError(f"{url}: {problem}; give a folder of shards, a shard or a pattern", url=url)


def _from_manifest(storage: Storage, manifest: Manifest) -> list[ShardLocation]:
    check_present(storage, manifest)
    return [
        ShardLocation(join(manifest.url, shard.url), shard, manifest.url, manifest.classes, manifest.fields)
        for shard in manifest.shards
    ]


def _glob(storage: Storage, pattern: str) -> list[str]:
    folder, name = split_url(pattern)
    prefix = "" if folder == "." and not pattern.startswith("./") else folder
    folders = _glob(storage, folder) if _is_pattern(folder) else [prefix]
    return [
        join(parent, found)
        for parent in folders
        for found in _list(storage, parent or ".") or ()
        if fnmatchcase(found, name) and (name.startswith(".") or not found.startswith("."))
    ]


def _exists(storage: Storage, url: str) -> bool:
    try:
        if not is_remote(url):
            return local_path(url).exists()  # a folder too
        storage.info(url)
    except OSError:
        return False
    return True


def _list(storage: Storage, url: str) -> list[str] | None:
    """Return the names in a folder, or None if it is a file."""
    try:
        return storage.list(url)
    except NotADirectoryError:
        return None


def read_shard(
    location: ShardLocation,
    *,
    selection: FieldSelection = EVERY_FIELD,
    storage_options: Mapping[str, object] | None = None,
) -> Generator[Sample, None, None]:
    """Yield the samples of one shard, complete and in order; raise if the shard is damaged or ends too early.

    Damage is found when it is reached: a shard is known to be whole only when the iterator has ended without an error.
    One sample is in memory at a time. The shard is closed when the iterator ends, fails or is closed.

    Args:
        location: The shard, from ``find_shards``.
        selection: The fields to read. Others are left out, and large ones are not read from uncompressed local files.
            Fields keep their own names, and a missing one is not an error here: ``selection.pick`` checks that later.
        storage_options: Passed to the storage.

    Yields:
        Samples with ``__key__``, ``__url__`` and the bytes of their fields, in the order of the shard.

    Raises:
        ShardError: The shard is damaged, has a field twice in one sample, or does not match its index. The samples
            yielded before are complete.
        DatasetError: The index is damaged, or belongs to another shard.
        StorageError: The shard, or the index that its manifest lists, is missing or cannot be read.
    """
    storage = storage_for(location.url, storage_options)
    if not is_remote(location.url):
        yield from _read_once(storage, location, selection)
        return
    given = 0
    for attempt in range(1 + FRESH_READS):
        with closing(_read_once(storage, location, selection, fresh=attempt > 0)) as samples:
            try:
                for sample in islice(samples, given, None):
                    yield sample
                    given += 1
            except ShardError as error:
                if attempt == FRESH_READS:
                    raise
                _logger.warning("the data is wrong, so the shard is fetched again: %s", error)
            else:
                return


def _read_once(
    storage: Storage, location: ShardLocation, selection: FieldSelection, *, fresh: bool = False
) -> Generator[Sample, None, None]:
    check = _checker(storage, location, location.shard, selection) if location.shard else None
    wanted = _wants_member(selection) if selection.wanted else None
    stream = storage.open(location.url, fresh=fresh)
    try:
        stream = open_decompressed(stream)
        members = read_members(stream, wanted=wanted)
        yield from _group(members, hide_secrets(location.url), check)
    finally:
        stream.close()


def _group(  # noqa: C901 - the hot loop: a call for every member would cost a tenth
    members: Iterator[Member], url: str, check: "Callable[[Sample | None, int, dict[str, Member]], None] | None"
) -> Iterator[Sample]:
    """Yield samples of adjacent members with one key, the last one only after reading the end-of-archive mark."""
    current = None
    sample: Sample = {}
    seen: dict[str, Member] = {}  # the sample's members by field: those not read, or all if they are to be checked
    begin = 0
    known: dict[str, str] = {}  # field names by the text after the key: a look-up is faster than the rules
    for member in members:
        name, header_offset, _, _, data = member
        key, _, rest = name.partition(".")
        field = known.get(rest)
        if field is None or not key or key[-1] == "/" or "__" in key:
            split = split_new_name(name, key, rest, known)
            if split is None:
                continue
            key, field = split
        if key != current:
            if current is not None:
                if check is not None:
                    check(sample, begin, seen)
                yield sample
            current, begin = key, header_offset
            sample, seen = {KEY: key, URL: url}, {}
        if field in sample or field in seen or field in (SOURCE, COLUMNS):
            raise _twice(url, header_offset, name, key, field)
        if data is not None:
            sample[field] = data
        if data is None or check is not None:
            seen[field] = member
    if current is not None:
        if check is not None:
            check(sample, begin, seen)
        yield sample
    if check is not None:
        check(None, 0, {})


def _twice(url: str, offset: int, name: str, key: str, field: str) -> ShardError:
    return ShardError(
        f"shard {url}: at byte {offset:,} sample {key!r} has the field {field!r} again, or a reserved name ({name!r}), "
        f"expected each field once and none of {', '.join(sorted(RESERVED))}; pack it again under other names",
        url=url,
        offset=offset,
        key=key,
        field=field,
    )


def _wants_member(selection: FieldSelection) -> Callable[[str], bool]:
    wants_field = lru_cache(MAX_KNOWN)(selection.wants)  # the fields of most samples are the same

    def wants(name: str) -> bool:
        split = split_name(name)
        return split is not None and wants_field(split[1])

    return wants


def _checker(
    storage: Storage, location: ShardLocation, shard: Shard, selection: FieldSelection
) -> "Callable[[Sample | None, int, dict[str, Member]], None]":
    """Return a function that compares each sample with its row; a call with None checks that the shard has ended."""
    index = open_index(storage, location.folder, shard)
    fields = [field for field in index.facts.fields if selection.wants(field)]
    rows = _rows(index, fields)
    nothing = (None, None, None)

    def check(sample: Sample | None, begin: int, seen: dict[str, Member]) -> None:
        expected = next(rows, None)
        if sample is None:
            if expected is not None:
                problem = f"ends before sample {expected[0]!r}, which its index has at byte {expected[1]:,}"
                raise _differs(location, problem, key=str(expected[0]))
            return
        key, known = sample[KEY], 2  # __key__ and __url__
        found = [key, begin]
        for field in fields:
            data = sample.get(field)
            if data is None:
                found += nothing
            else:
                known += 1
                found += (seen[field].data_offset, len(data), crc32(data))
        if tuple(found) == expected and len(sample) == known:
            return
        if expected is None or (key, begin) != expected[:2]:
            instead = f"{expected[0]!r} at byte {expected[1]:,}" if expected else "no more samples"
            raise _differs(location, f"has sample {key!r} at byte {begin:,}, its index says {instead}", begin, key)
        for position, field in enumerate(fields):
            here, there = tuple(found[2 + 3 * position :][:3]), expected[2 + 3 * position :][:3]
            if here != there:
                offset = seen[field].data_offset if field in seen else begin
                says = f"its offset, size and CRC-32 are {_says(here)}, the index says {_says(there)}"
                raise _differs(location, f"has a damaged field {field!r} in sample {key!r}: {says}", offset, key, field)
        field = next(field for field in sample if field in seen and field not in fields)
        problem = f"has a field {field!r} in sample {key!r} that its index does not have"
        raise _differs(location, problem, seen[field].header_offset, key, field)

    return check


def _rows(index: ShardIndex, fields: Sequence[str]) -> _Rows:
    """Yield the key and offset of every sample, then offset, size and CRC-32 of each of its ``fields``."""
    columns = [KEY, OFFSET, *(f"{field}:{part}" for field in fields for part in PARTS)]
    for group in range(index.num_groups):
        for batch in index.rows(columns, group=group).select(columns).to_batches(max_chunksize=_MAX_BATCH_ROWS):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _says(where: tuple[Any, ...]) -> str:
    return "that it is not there" if where[0] is None else "{:,}, {:,} and {:08x}".format(*where)


def _differs(
    location: ShardLocation, problem: str, offset: int | None = None, key: str = "", field: str = ""
) -> ShardError:
    message = f"shard {location.url}: {problem}; it is damaged or was replaced, so fetch or write it again"
    return ShardError(message, url=location.url, offset=offset, key=key, field=field)
