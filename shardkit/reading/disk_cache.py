"""Blocks kept on this machine's disk, for the next epoch and for all processes that use the same folder.

- Shared: all ranks, workers and runs of a machine that name the folder share it; it may be in memory,
  such as ``/dev/shm/me``. A block in the cache needs no request. Blocks are identified by their shard's SHA-256, so a
  dataset that was replaced never gets old blocks, and the same dataset in two places shares them.
- Checked: every block from the cache is compared with its CRC-32; a damaged one is deleted and fetched again. That does
  not protect against forgery: use a separate folder for datasets whose authors you do not trust.
- Bounded: all processes together keep within ``cache_bytes`` at every moment. The blocks that were used longest ago are
  deleted first, but none that was used since the dataset was opened. So if half of a dataset fits, half of every
  epoch comes from the cache; if the most recently used blocks were kept, it would be 15 %.
- Harmless: everything is in a subfolder ``shardkit-cache`` of the named folder, and only blocks are ever deleted there.
  Any process may be killed at any moment. A disk that is full, or cannot be written to, is not an error: that is logged
  once, and blocks are read from their source.

Manifests, indexes and side files are read from their source whenever a dataset is opened. Streams do not read by
blocks, and have no cache.
"""

import errno
import fcntl
import logging
import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from stat import S_ISREG

from shardkit.errors import ArgumentError, TruncatedShardError, check_path
from shardkit.reading.disk_cache_folder import CacheFolder, Usage, room_of
from shardkit.storage.base import format_bytes, parse_bytes
from shardkit.storage.local import LocalStorage
from shardkit.storage.safe_names import check_no_links

_SHARE = 16  # a full cache frees a 16th of its size at once, so that the folder is seldom listed
_RECOUNT = 600 * 10**9  # nanoseconds after which blocks are counted again: somebody may have deleted files
_FULL = {errno.ENOSPC, errno.EDQUOT}

_log = logging.getLogger("shardkit")
_storage = LocalStorage()
_warned: set[Path] = set()


class BlockCache:
    """Keeps blocks on disk, up to ``max_bytes``, for all processes that use the same folder.

    Blocks that were used since this object was created are not deleted. If not all blocks of an epoch fit, the first
    ones stay, and are found again in every epoch. Deleting the least recently used block would always delete the one
    that is needed next.

    Callers check every block that they get, and drop it if it is wrong. A failing disk is not an error: no blocks
    are found or kept then, and one line is logged.

    Threads may share it, and it can be sent to other processes by fork and by spawn.

    Args:
        folder: Where to keep blocks: in a subfolder ``shardkit-cache``. It is created if its parent exists.
        max_bytes: How many bytes of the disk all blocks may take, including those that are being written.

    Raises:
        ArgumentError: The folder cannot have a cache.

    Example:
        >>> import tempfile
        >>> from shardkit.reading.disk_cache_folder import block_name
        >>> cache = BlockCache(tempfile.mkdtemp(), 1_000_000)
        >>> name = block_name(64 * "0", "none", 0, 5)
        >>> cache.put(name, b"block")
        >>> cache.get(name, 5)
        b'block'
    """

    def __init__(self, folder: str, max_bytes: int) -> None:
        self._folder = CacheFolder(folder)
        self._max_bytes = max_bytes
        self._opened = time.time_ns()
        try:
            with self._folder.locked() as usage:
                self._folder.remove_leftovers(usage)
                if usage.held > max_bytes:
                    self._evict(usage, max_bytes)
        except OSError as error:
            self._warn(error)

    def get(self, name: str, size: int, out: memoryview | None = None) -> bytes | memoryview | None:
        """Return a block as it was stored; None if it is not in the cache.

        Args:
            name: Its name, from ``block_name``.
            size: How many bytes it has.
            out: The memory to read it into, which is returned; by default new memory.
        """
        path = str(self._folder.path(name))
        data: bytes | memoryview
        try:
            if out is None:
                data = _storage.read_range(path, 0, size)
            else:
                _storage.read_into(path, 0, out)
                data = out
        except TruncatedShardError:
            self.drop(name)
            return None
        except OSError as error:
            if error.errno == errno.EIO:
                self.drop(name)
            return None
        now = time.time_ns()
        with suppress(OSError):  # it has been deleted meanwhile, or the folder is not writable
            os.utime(path, ns=(now, now))
        return data

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Keep a block, if there is room.

        Args:
            name: Its name, from ``block_name``.
            data: The block as it is stored in its shard, already checked.
        """
        try:
            self._store(self._folder.path(name), data)
        except (OSError, ArgumentError) as error:
            is_full = isinstance(error, OSError) and error.errno in _FULL
            if not (is_full and self._make_way(room_of(len(data)))):
                self._warn(error)

    def drop(self, name: str) -> None:
        """Delete a block that is wrong."""
        path = self._folder.path(name)
        _log.warning("%s: is damaged; it is deleted, and read again from its source", path)
        with suppress(OSError, ArgumentError):
            self._remove(path)

    def _store(self, path: Path, data: bytes | memoryview) -> None:
        temporary, room = self._folder.new_temporary(), room_of(len(data))
        with ExitStack() as stack:
            with self._folder.locked() as usage:
                if os.path.lexists(path) or not self._has_room(usage, room):
                    return
                usage.add(room)  # first: a process that is killed must leave a count that is too high, never too low
                try:
                    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                except BaseException:
                    usage.add(-room)
                    raise
                stack.callback(os.close, descriptor)
                stack.callback(self._remove, temporary, room)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, len(data))  # so that others count its full size from now on
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            now = time.time_ns()
            os.utime(descriptor, ns=(now, now))
            path.parent.mkdir(exist_ok=True)
            check_no_links(self._folder.root, [f"{path.parent.name}/{path.name}"])
            with self._folder.locked():
                if not os.path.lexists(path):
                    temporary.rename(path)

    def _remove(self, path: Path, room: int | None = None) -> None:
        """Delete a file of ours, if it is there, and subtract ``room`` from the count, by default the file's size."""
        if path.is_file():
            with self._folder.locked() as usage, suppress(FileNotFoundError):
                status = path.lstat()
                if S_ISREG(status.st_mode):
                    path.unlink()
                    usage.add(-(room or room_of(status.st_size)))

    def _has_room(self, usage: Usage, room: int) -> bool:
        """Return whether there is room for a block, after deleting old blocks if necessary."""
        if room > self._max_bytes:
            return False
        if usage.held + room > self._max_bytes:
            self._evict(usage, self._max_bytes - room - self._max_bytes // _SHARE)
        return usage.held + room <= self._max_bytes

    def _make_way(self, room: int) -> bool:
        """Delete blocks on a disk that is full; return whether there were any."""
        with suppress(OSError, ArgumentError), self._folder.locked() as usage:
            before = usage.held
            self._evict(usage, before - room - before // _SHARE)
            return usage.held < before
        return False

    def _evict(self, usage: Usage, goal: int) -> None:
        """Delete blocks until at most ``goal`` bytes are held: the oldest first, none used since this was created."""
        if usage.oldest >= self._opened and time.time_ns() - usage.counted < _RECOUNT:
            return
        for block in self._folder.count(usage):
            if usage.held <= goal or block.used >= self._opened:
                break
            Path(block.path).unlink(missing_ok=True)
            usage.held -= block.room
        usage.save()

    def _warn(self, error: Exception) -> None:
        """Log once what is wrong with the disk."""
        if self._folder.root not in _warned:
            _warned.add(self._folder.root)
            problem = error.strerror if isinstance(error, OSError) else error
            _log.warning("%s: keeps no new blocks (%s); they are read from their source", self._folder.root, problem)


def open_cache(
    folder: str | os.PathLike[str] | None, max_bytes: int | str | None, *, block_bytes: float
) -> BlockCache | None:
    """Return the cache that a dataset's arguments ask for, or None.

    Args:
        folder: ``cache=``.
        max_bytes: ``cache_bytes=``.
        block_bytes: The average size of the dataset's blocks.

    Raises:
        ArgumentError: One is given without the other, a block does not fit, or the folder cannot have a cache.
    """
    if folder is None and max_bytes is None:
        return None
    if folder is None or max_bytes is None:
        raise ArgumentError(
            f"cache={folder!r} and cache_bytes={max_bytes!r}: give both, a folder and how much space it may use, as "
            "'200GB'"
        )
    size = parse_bytes(max_bytes)
    if size < block_bytes:
        raise ArgumentError(
            f"cache_bytes={max_bytes!r} is less than the size of one block, {format_bytes(block_bytes)}"
        )
    return BlockCache(check_path("cache", folder), size)
