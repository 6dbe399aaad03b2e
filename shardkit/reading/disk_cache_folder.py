"""The folder of a cache of blocks: the files in it, how they are recognized as ours, and the lock for changing them.

::

    FOLDER/shardkit-cache/
      CACHEDIR.TAG                  marks the folder as a cache of shardkit, and holds its size; locked while blocks are
                                    added or deleted
      3f/3f...-0-1048576.none       a block as stored in its shard: the shard's SHA-256, offset, size, compression
      .shardkit-0123456789abcdef    a block that is being written; its writer locks it

A process may be killed at any moment: the system releases its locks, and the size in the tag is never less than what is
on the disk. Blocks are not synced, because readers check them.
"""

import fcntl
import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from shardkit.errors import ArgumentError
from shardkit.storage.base import TEMPORARY_PREFIX, is_remote
from shardkit.storage.local import local_path
from shardkit.storage.os_errors import open_file, os_errors
from shardkit.storage.safe_names import check_no_links

FOLDER = "shardkit-cache"

_TAG = "CACHEDIR.TAG"  # https://bford.info/cachedir/: backup programs skip folders that contain one
_HEADER = b"""Signature: 8a477f597d28d172789f06886806bc55
# Blocks of datasets, kept by shardkit, version 1. 'shardkit cache clear' deletes them.
"""
_COUNTS = re.compile(re.escape(_HEADER) + rb"# (\d{20}) bytes, used after (\d{20}), counted at (\d{20})\n")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"([0-9a-f]{64})-\d+-\d+\.(?:none|zst)")
_PAGE = 4096  # bytes: disks and memory allocate room in pages

# The tag's lock is between processes, and a fork would inherit it; so a fork waits until no thread holds it.
_LOCK = threading.Lock()
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


class CachedBlock(NamedTuple):
    """A block that is in a cache.

    Attributes:
        used: When it was last used, in nanoseconds since 1970.
        room: How many bytes of the disk it takes.
        path: Where it is.
        shard: Its shard's SHA-256.
    """

    used: int
    room: int
    path: str
    shard: str


class Usage:
    """The numbers in the tag of a cache, while its lock is held. Times are nanoseconds since 1970.

    Attributes:
        held: How many bytes of the disk all blocks take, at most.
        oldest: No block was last used before this.
        counted: When the blocks were last counted.
        is_known: Whether the tag has these numbers.
    """

    def __init__(self, descriptor: int, text: bytes) -> None:
        counts = _COUNTS.fullmatch(text)
        self.is_known = counts is not None
        self.held, self.oldest, self.counted = map(int, counts.groups()) if counts else (0, 0, 0)
        self._descriptor = descriptor

    def add(self, room: int) -> None:
        """Add to the size of all blocks, or subtract from it if ``room`` is negative."""
        self.held = max(0, self.held + room)
        self.save()

    def save(self) -> None:
        """Write the numbers into the tag with a single write."""
        counts = f"# {self.held:020} bytes, used after {self.oldest:020}, counted at {self.counted:020}\n"
        os.pwrite(self._descriptor, _HEADER + counts.encode(), 0)


class CacheFolder:
    """A cache's folder. It is created when something is first written to it.

    Args:
        folder: The folder that was passed as ``cache=``. It contains the cache's own folder.

    Attributes:
        root: The cache's own folder; everything in it belongs to the cache.

    Raises:
        ArgumentError: It is on another machine.

    Example:
        >>> import tempfile
        >>> cache = CacheFolder(tempfile.mkdtemp())
        >>> with cache.locked() as usage:
        ...     usage.held
        0
    """

    def __init__(self, folder: str) -> None:
        if is_remote(folder):
            raise ArgumentError(f"cache: {folder} is not a folder of this machine; name one, on a quick disk")
        self.root = local_path(folder).absolute() / FOLDER

    def path(self, name: str) -> Path:
        """Return the path of a block, whether or not it exists."""
        return self.root / name[:2] / name

    def new_temporary(self) -> Path:
        """Return a path to which a block may be written."""
        return self.root / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"

    @contextmanager
    def locked(self) -> Iterator[Usage]:
        """Keep all others from adding and deleting blocks.

        Raises:
            ArgumentError: The folder is not ours, or its parent does not exist.
            OSError: It cannot be written to.
        """
        with _LOCK:
            descriptor = self._open_tag()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                text = os.pread(descriptor, _PAGE, 0)
                if not text.startswith(_HEADER) and (text or self._names() != [_TAG]):
                    raise self._foreign()
                usage = Usage(descriptor, text)
                if not usage.is_known:
                    self.count(usage)
                    os.fsync(descriptor)  # without it, blocks would not be recognized as ours after a power failure
                yield usage
            finally:
                os.close(descriptor)

    def _open_tag(self) -> int:
        tag, folder = self.root / _TAG, self.root.parent
        check_no_links(folder, [f"{FOLDER}/{_TAG}"])
        with suppress(FileNotFoundError, NotADirectoryError):
            return os.open(tag, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        if not folder.parent.is_dir():
            raise ArgumentError(f"cache: {folder} cannot be made, as {folder.parent} does not exist; make that first")
        if folder.exists() and not folder.is_dir():
            raise ArgumentError(f"cache: {folder} is a file, expected a folder")
        folder.mkdir(exist_ok=True)
        self.root.mkdir(exist_ok=True)
        names = self._names()
        if names and _TAG not in names:
            raise self._foreign()
        return os.open(tag, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def _names(self) -> list[str]:
        return [path.name for path in self.root.iterdir()]

    def _foreign(self) -> ArgumentError:
        return ArgumentError(
            f"cache: {self.root} is not a cache of this version of shardkit, so it is not changed; name another folder"
        )

    def blocks(self) -> Iterator[CachedBlock]:
        """Yield all blocks: the files with names of ``block_name``."""
        for folder in _entries(self.root):
            if len(folder.name) == 2 and folder.is_dir(follow_symlinks=False):
                for file in _entries(folder):
                    match = _NAME.fullmatch(file.name)
                    if match and match[1].startswith(folder.name) and file.is_file(follow_symlinks=False):
                        with suppress(FileNotFoundError):  # it has been deleted meanwhile
                            status = file.stat(follow_symlinks=False)
                            yield CachedBlock(status.st_mtime_ns, room_of(status.st_size), file.path, match[1])

    def count(self, usage: Usage) -> list[CachedBlock]:
        """Count all files, and return the blocks, the least recently used first."""
        blocks = sorted(self.blocks())
        usage.counted = time.time_ns()
        usage.held = sum(block.room for block in blocks)
        usage.held += sum(room_of(path.lstat().st_size) for path in self._temporaries())
        usage.oldest = blocks[0].used if blocks else usage.counted
        usage.save()
        return blocks

    def remove_leftovers(self, usage: Usage) -> None:
        """Delete the unfinished files of killed processes."""
        found = False
        for path in self._temporaries():
            with suppress(OSError):  # its writer holds its lock, or we may not delete it
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    found = True
                finally:
                    os.close(descriptor)
        if found:
            self.count(usage)

    def _temporaries(self) -> list[Path]:
        return [path for path in self.root.glob(f"{TEMPORARY_PREFIX}*") if path.is_file()]


def block_name(sha256: str, compression: str, offset: int, size: int) -> str:
    """Return the name of a block, which is the same in every cache and for every location of its shard.

    Args:
        sha256: The SHA-256 of the shard's uncompressed tar.
        compression: The shard's compression.
        offset: Where the block begins in the stored shard, in bytes.
        size: How many bytes it has in the stored shard.

    Example:
        >>> block_name(64 * "0", "zst", 7, 12)
        '0000000000000000000000000000000000000000000000000000000000000000-7-12.zst'
    """
    if not _SHA256.fullmatch(sha256):  # an untrusted manifest may say anything
        sha256 = hashlib.sha256(sha256.encode(errors="backslashreplace")).hexdigest()
    return f"{sha256}-{offset}-{size}.{compression}"


def room_of(size: int) -> int:
    """Return how many bytes of the disk a file of ``size`` bytes takes.

    Example:
        >>> room_of(1), room_of(4096)
        (4096, 4096)
    """
    return -(-size // _PAGE) * _PAGE


def list_blocks(folder: str) -> list[CachedBlock]:
    """Return the blocks of a cache, the least recently used first.

    Args:
        folder: The folder that was passed as ``cache=``.

    Raises:
        ArgumentError: There is no cache.
        StorageError: It cannot be read.
    """
    with os_errors(folder):
        return sorted(_existing(folder).blocks())


def clear_cache(folder: str) -> list[CachedBlock]:
    """Delete all blocks of a cache, which may be in use. Returns the deleted blocks.

    Args:
        folder: The folder that was passed as ``cache=``.

    Raises:
        ArgumentError: There is no cache.
        StorageError: It cannot be written to.
    """
    with os_errors(folder):
        cache = _existing(folder)
        with cache.locked() as usage:
            cache.remove_leftovers(usage)
            blocks = cache.count(usage)
            for block in blocks:
                Path(block.path).unlink(missing_ok=True)
                usage.add(-block.room)
        return blocks


def _entries(folder: "os.PathLike[str]") -> "list[os.DirEntry[str]]":
    with os.scandir(folder) as entries:
        return list(entries)


def _existing(folder: str) -> CacheFolder:
    cache = CacheFolder(folder)
    try:
        with os.fdopen(open_file(cache.root / _TAG, folder), "rb") as tag:
            if tag.read(len(_HEADER)) == _HEADER:
                return cache
    except (FileNotFoundError, NotADirectoryError):
        pass
    raise ArgumentError(f"{folder}: has no cache of this version of shardkit; name the folder that is passed as cache=")
