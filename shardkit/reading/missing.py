"""Shards and indexes that are missing: found all at once, when a dataset on this machine is opened."""

import errno
from collections.abc import Sequence

from shardkit.errors import IncompleteDatasetError, MissingFileError, StorageError
from shardkit.format.manifest import Manifest
from shardkit.storage.base import STDIN, Storage, is_remote, join
from shardkit.storage.local import local_path
from shardkit.storage.safe_names import fold

_NAMED = 5  # files named in a message; the error has all of them as an attribute


def check_present(storage: Storage, manifest: Manifest) -> None:
    """Check that the shards and indexes of a dataset exist, by one listing of each folder on this machine.

    Files elsewhere are not checked: a missing one is an error when it is read.

    Raises:
        IncompleteDatasetError: Some are missing.
    """
    shards = [shard.url for shard in manifest.shards]
    side_files = [url for url in (manifest.block_file_url, manifest.column_file_url) if url]
    indexes = [*(shard.index_url for shard in manifest.shards), *side_files]
    lists: dict[str, frozenset[str] | None] = {}
    lost = _missing(storage, manifest.url, shards, lists)
    unindexed = _missing(storage, manifest.url, indexes, lists)
    if not lost and not unindexed:
        return
    kinds = [("shards", lost, len(shards)), ("indexes", unindexed, len(indexes))]
    counts = " and ".join(f"{len(names):,} of {count:,} {kind}" for kind, names, count in kinds if names)
    remedy = f"make them again with 'shardkit index {manifest.url}'"
    if lost:
        remedy = f"'shardkit index {manifest.url} --overwrite' makes a dataset of what is there"
    error = IncompleteDatasetError(
        f"{manifest.url}: {counts} are missing: {_some(lost + unindexed)}; fetch them again, or {remedy}",
        url=manifest.url,
    )
    error.errno = errno.ENOENT
    error.missing = tuple(join(manifest.url, name) for name in lost + unindexed)
    raise error


def check_streamed(storage: Storage, urls: object, shards: Sequence[str]) -> None:
    """Check in the same way that several shards without a manifest exist. A single shard is not checked.

    Args:
        storage: The storage of the shards.
        urls: What the user wrote, for the message.
        shards: Their URLs.

    Raises:
        MissingFileError: Some are missing.
    """
    missing = _missing(storage, "", shards, {}) if len(shards) > 1 else []
    if missing:
        error = MissingFileError(
            f"{f'{urls}: ' if isinstance(urls, str) else ''}{len(missing):,} of {len(shards):,} shards are missing: "
            f"{_some(missing)}; correct the pattern or the paths, or fetch them again",
            url=missing[0],
        )
        error.errno = errno.ENOENT
        raise error


def _some(names: Sequence[str]) -> str:
    """Return the first of some names, for a message."""
    return ", ".join(names[:_NAMED]) + " ..." * (len(names) > _NAMED)


def _missing(storage: Storage, base: str, names: Sequence[str], lists: dict[str, frozenset[str] | None]) -> list[str]:
    """Return which files are missing in the listings of their folders."""
    missing = []
    for name in names:
        if name == STDIN:
            continue
        folder, _, last = name.rpartition("/")
        if folder not in lists:
            lists[folder] = _list(storage, (join(base, folder) if folder else base) or ("/" if "/" in name else "."))
        there = lists[folder]
        if there is not None and last not in there and (":" not in folder or local_path(name).name not in there):
            missing.append(name)
    if not missing:
        return missing
    # Some file systems write accents or case differently from the manifest.
    folded = {folder: {fold(name) for name in names} for folder, names in lists.items() if names is not None}
    return [name for name in missing if fold(name.rpartition("/")[2]) not in folded[name.rpartition("/")[0]]]


def _list(storage: Storage, folder: str) -> frozenset[str] | None:
    """Return the names in a folder; None if it cannot be listed."""
    if is_remote(folder):
        return None
    try:
        return frozenset(storage.list(folder))
    except NotADirectoryError:
        return frozenset()
    except StorageError:
        return None
