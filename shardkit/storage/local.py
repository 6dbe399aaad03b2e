"""Files of this machine's file systems, and standard input."""

import contextlib
import hashlib
import io
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from shardkit.errors import AccessError, ArgumentError
from shardkit.storage.base import LOCK_NAME, STDIN, TEMPORARY_PREFIX, ByteStream, FileInfo, ended, is_remote, taken
from shardkit.storage.os_errors import CheckedFile, check_is_file, open_file, os_errors


class LocalStream:
    """A local file, or standard input, read forward. It is unbuffered: callers read large pieces."""

    def __init__(self, file: BinaryIO, url: str, size: int | None) -> None:
        self.url = url
        self.size = size
        self._file = file
        self._seekable = file.seekable()

    def read(self, n: int, /) -> bytes:
        """See ``ByteStream.read``."""
        with os_errors(self.url):
            data = self._file.read(n) or b""
            if len(data) == n or not data:
                return data
            pieces = [data]  # a pipe returns what it has; callers are promised n bytes
            missing = n - len(data)
            while missing and (piece := self._file.read(missing)):
                pieces.append(piece)
                missing -= len(piece)
            return b"".join(pieces)

    def skip(self, n: int, /) -> None:
        """See ``ByteStream.skip``."""
        with os_errors(self.url):
            if self._seekable:
                self._file.seek(n, os.SEEK_CUR)
                return
            while n > 0 and (piece := self._file.read(min(n, 1 << 20))):
                n -= len(piece)

    def close(self) -> None:
        """See ``ByteStream.close``."""
        self._file.close()


class LocalStorage:
    """Files of this machine's file systems, by path or ``file://`` URL; ``-`` is standard input."""

    def info(self, url: str) -> FileInfo:
        """See ``Storage.info``."""
        if url == STDIN:
            raise ArgumentError("standard input has no size and can be read only once; write it to a file first")
        with os_errors(url):
            status = local_path(url).stat()
        check_is_file(status, url)
        return FileInfo(url, status.st_size, f"{status.st_mtime_ns}-{status.st_ino}")

    def read_range(self, url: str, start: int, size: int, *, fresh: bool = False) -> bytes:  # noqa: ARG002 - no cache
        """See ``Storage.read_range``."""
        with _opened(url) as descriptor:
            data = os.pread(descriptor, size, start)
            while len(data) < size:  # one pread returns at most 2 GiB
                piece = os.pread(descriptor, size - len(data), start + len(data))
                if not piece:
                    raise ended(url, start, len(data), size)
                data += piece
            return data

    def read_into(self, url: str, start: int, out: memoryview, *, fresh: bool = False) -> None:  # noqa: ARG002 - as above
        """See ``Storage.read_into``."""
        with _opened(url) as descriptor:
            done = 0
            while done < len(out):
                count = os.preadv(descriptor, [out[done:]], start + done)
                if not count:
                    raise ended(url, start, done, len(out))
                done += count

    def open(self, url: str, start: int = 0, *, fresh: bool = False) -> ByteStream:  # noqa: ARG002
        """See ``Storage.open``."""
        if url == STDIN:
            return LocalStream(os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0), "standard input", None)
        file = os.fdopen(open_file(local_path(url), url), "rb", buffering=0)
        try:
            with os_errors(url):
                file.seek(start)
                return LocalStream(file, url, os.fstat(file.fileno()).st_size)
        except BaseException:
            file.close()
            raise

    @contextlib.contextmanager
    def create(self, url: str, *, overwrite: bool = False) -> Iterator[BinaryIO]:
        """See ``Storage.create``."""
        path = local_path(url)
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
        with os_errors(url):
            if not overwrite and path.exists():
                raise taken(url)
            path.parent.mkdir(parents=True, exist_ok=True)
        raw = CheckedFile(str(temporary), url, "xb")
        try:
            with io.BufferedWriter(raw) as file:  # closing it also writes
                yield file
                file.flush()
                with os_errors(url):
                    os.fsync(file.fileno())
            with os_errors(url):
                if overwrite:
                    temporary.replace(path)
                else:
                    _rename_without_replacing(temporary, path, url)
        finally:
            with os_errors(url):
                temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)

    def list(self, url: str) -> list[str]:
        """See ``Storage.list``."""
        try:
            with os_errors(url):
                names = os.listdir(local_path(url))  # noqa: PTH208 - a Path for each of 100,000 names is slow
        except FileNotFoundError:
            return []
        return sorted(name for name in names if not name.startswith(TEMPORARY_PREFIX))

    def delete(self, url: str) -> None:
        """See ``Storage.delete``."""
        with os_errors(url):
            local_path(url).unlink(missing_ok=True)


def local_path(url: str) -> Path:
    """Return the path that a local URL means.

    Example:
        >>> str(local_path("file:///data/x%20y.tar"))
        '/data/x y.tar'
    """
    if not url.lower().startswith("file:"):
        return Path(url)
    from urllib.parse import unquote, urlsplit

    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ArgumentError(f"{url}: is no URL ({error}); write file:///path, or the path") from None
    if parts.netloc not in ("", "localhost"):
        raise ArgumentError(f"{url}: names the host {parts.netloc!r}; a local file is written file:///path")
    return Path(unquote(parts.path))


def absolute_url(url: str) -> str:
    """Return a local URL as an absolute path, and any other URL unchanged.

    Example:
        >>> absolute_url("s3://bucket/a"), absolute_url("/data/a")
        ('s3://bucket/a', '/data/a')
    """
    return url if is_remote(url) else str(local_path(url).absolute())


def canonical_url(url: str) -> str:
    """Return a unique name of a folder: the path with links resolved, or the URL if it is not local.

    Example:
        >>> canonical_url("s3://bucket/a/"), canonical_url("/data/../a")
        ('s3://bucket/a', '/a')
    """
    if is_remote(url):
        return url.rstrip("/")
    return os.path.realpath(local_path(url))  # unlike Path.resolve, it raises no special error for circular links


def working_folder(url: str) -> Path:
    """Return the local folder for files that belong to a folder: itself, or one in ``TMPDIR`` if it is remote.

    Raises:
        AccessError: Another user has created that folder in ``TMPDIR``.
        StorageError: It cannot be created.

    Example:
        >>> str(working_folder("shards/train"))
        'shards/train'
    """
    return temporary_folder(url) if is_remote(url) else local_path(url)


def temporary_folder(url: str) -> Path:
    """Return the path in ``TMPDIR`` that belongs to a folder; it need not exist.

    Raises:
        AccessError: Another user has created it.
    """
    with os_errors("TMPDIR"):  # there may be no folder for temporary files
        own = Path(tempfile.gettempdir(), f"{TEMPORARY_PREFIX}{os.getuid()}")
    with os_errors(str(own)):
        own.mkdir(mode=0o700, exist_ok=True)
        if own.lstat().st_uid != os.getuid():
            raise AccessError(f"{own}: belongs to another user; set TMPDIR to another folder", url=str(own))
    return own / hashlib.sha256(canonical_url(url).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def remove_temporary_files(folder: str) -> None:
    """Delete the temporary files that killed writers left in a folder. No writer may be active there."""
    with os_errors(folder):
        for leftover in local_path(folder).glob(f"{TEMPORARY_PREFIX}*"):
            if leftover.is_file() and leftover.name != LOCK_NAME:
                leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(url: str) -> Iterator[int]:
    descriptor = open_file(local_path(url), url)
    try:
        with os_errors(url):
            yield descriptor
    finally:
        os.close(descriptor)


def _rename_without_replacing(temporary: Path, path: Path, url: str) -> None:
    try:
        os.link(temporary, path)  # unlike a rename, this never replaces a file that appeared meanwhile
    except FileExistsError:
        raise taken(url) from None
    except OSError:  # FAT and some network file systems have no hard links
        if path.exists():
            raise taken(url) from None
        temporary.rename(path)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable, so that it survives a power failure. Some file systems do not support this."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
