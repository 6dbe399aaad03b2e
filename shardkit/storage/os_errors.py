"""Failures of the operating system as shardkit's errors: which file is affected, what is wrong, and what to do."""

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.errors import AccessError, MissingFileError, NotAFolderError, ShardkitError, StorageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The system's error codes for a disk without room, for a file that is too large, and for an exceeded quota."""

_ADVICE = {
    errno.ENOENT: ("does not exist", "correct the path, or fetch the file again"),
    errno.ENOTDIR: ("is a file, or its path leads through one, where a folder is needed", "correct the path"),
    errno.EEXIST: ("exists already", "choose another name"),
    errno.EISDIR: ("is a folder, expected a file", "correct the path"),
    errno.EACCES: ("access is refused", "change the permissions, or choose another place"),
    errno.EPERM: ("access is refused", "change the permissions, or choose another place"),
    errno.EROFS: ("cannot be written", "choose a folder on a disk that can be written to"),
    errno.ENOSPC: ("cannot be written, because the disk is full", "make room on it, or choose another one"),
    errno.EDQUOT: ("cannot be written, because your quota is used up", "make room, or choose another disk"),
    errno.EFBIG: ("cannot be written", "raise 'ulimit -f', or choose another disk"),
    errno.ENAMETOOLONG: ("has a name that is too long", "choose a shorter one"),
    errno.ELOOP: ("is a link that leads nowhere, or may not be followed", "remove it, or give the path of its target"),
    errno.EMFILE: ("cannot be opened, because too many files are open", "raise 'ulimit -n'"),
    errno.EIO: ("the disk reports an error", "check the disk, and fetch or write the file again elsewhere"),
}
_CLASSES = (
    (FileNotFoundError, MissingFileError),
    (NotADirectoryError, NotAFolderError),
    (PermissionError, AccessError),
)
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe (FIFO)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def storage_error(error: OSError, url: str) -> StorageError:
    """Return shardkit's error for a failure of the operating system.

    Example:
        >>> storage_error(OSError(errno.EFBIG, "File too large"), "a.tar")
        StorageError("a.tar: cannot be written (File too large); raise 'ulimit -f', or choose another disk")
    """
    problem, advice = _ADVICE.get(error.errno or 0, ("cannot be used", "mend that, and try again"))
    kind = next((ours for theirs, ours in _CLASSES if isinstance(error, theirs)), StorageError)
    said = kind(f"{url}: {problem} ({error.strerror or error}); {advice}", url=url)
    said.errno = error.errno
    return said


@contextmanager
def os_errors(url: str) -> Iterator[None]:
    """Raise failures of the operating system as errors about this file or folder.

    Example:
        >>> with os_errors("no such folder"):
        ...     os.listdir("no such folder")
        Traceback (most recent call last):
        shardkit.errors.MissingFileError: no such folder: does not exist (No such file or directory); correct ...
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, ShardkitError):
            raise
        raise storage_error(error, url) from error


def open_file(path: str | Path, url: str) -> int:
    """Return a file descriptor for reading. Anything but a file is refused: opening a pipe could block forever.

    Raises:
        StorageError: It cannot be opened, or is not a file.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - for many small files, making a Path takes as long as opening one
        if stat.S_ISREG(status.st_mode):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise storage_error(error, url) from error
    raise _no_file(status, url)


def check_is_file(status: os.stat_result, url: str) -> None:
    """Check that something is a file. Raises a StorageError that says what it is."""
    if not stat.S_ISREG(status.st_mode):
        raise _no_file(status, url)


def _no_file(status: os.stat_result, url: str) -> StorageError:
    kind = next((kind for is_kind, kind in _KINDS if is_kind(status.st_mode)), "something else")
    remedy = "correct the path, or put a file there"
    if stat.S_ISFIFO(status.st_mode):
        remedy += "; a shard that comes through a pipe is read from standard input, as '-'"
    return StorageError(f"{url}: is {kind}, expected a file; {remedy}", url=url)


class CheckedFile(io.FileIO):
    """A file for writing whose errors name the file, in whatever thread they are raised.

    Args:
        file: Its path, or a descriptor that is closed with it.
        url: Its name in messages.
        mode: As for ``io.FileIO``.
    """

    def __init__(self, file: str | int, url: str, mode: str) -> None:
        self._url = url
        with os_errors(url):
            super().__init__(file, mode)

    def write(self, data: "ReadableBuffer", /) -> int:
        """See ``io.FileIO.write``."""
        with os_errors(self._url):
            return super().write(data)

    def close(self) -> None:
        """See ``io.FileIO.close``; some file systems report only then that the disk is full."""
        with os_errors(self._url):
            super().close()
