"""Where bytes come from and go to. Everything that shardkit reads or writes goes through a ``Storage``.

A storage reads ranges and forward streams, and it publishes whole files or nothing: what is being written has a
temporary name until it is complete and on the disk. Local files are served here; other protocols implement the same
interface.
"""

import contextlib
import errno
import io
import operator
import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from shardkit.errors import ArgumentError, DatasetExistsError, TruncatedShardError

TEMPORARY_PREFIX = ".shardkit-"
"""Every temporary file begins so; listings leave them out."""

LOCK_NAME = f"{TEMPORARY_PREFIX}lock"
STDIN = "-"

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_LARGEST = 2**60  # so that sums of sizes fit into 64 bits
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*\Z")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What is known of a file without reading it.

    Attributes:
        url: The file.
        size: Its size in bytes.
        version: Text that changes when the file does; for a local file, its time of modification and inode.
    """

    url: str
    size: int
    version: str


class ByteStream(Protocol):
    """Bytes that are read strictly forward.

    Attributes:
        url: Where they come from, for messages.
        size: How many there are in all, if that is known.
    """

    url: str
    size: int | None

    def read(self, n: int, /) -> bytes:
        """Return up to ``n`` bytes; fewer, or none, only at the end."""
        ...

    def skip(self, n: int, /) -> None:
        """Go ``n`` bytes forward, perhaps beyond the end, without reading them where that can be avoided."""
        ...

    def close(self) -> None:
        """Release what is held. It may be called twice."""
        ...


class Storage(Protocol):
    """The operations that shardkit needs from a place where files are."""

    def info(self, url: str) -> FileInfo:
        """Return size and version. Raises FileNotFoundError."""
        ...

    def read_range(self, url: str, start: int, size: int) -> bytes:
        """Return exactly ``size`` bytes from ``start``. Raises TruncatedShardError if the file ends before."""
        ...

    def open(self, url: str, start: int = 0) -> ByteStream:
        """Return a forward stream from ``start``."""
        ...

    def create(self, url: str, *, overwrite: bool = False) -> contextlib.AbstractContextManager[BinaryIO]:
        """Write a file that appears under its name, whole and synced, when the context ends without an exception.

        After an exception nothing is left. Raises DatasetExistsError if the name is taken and ``overwrite`` is False.
        """
        ...

    def list(self, url: str) -> list[str]:
        """Return the names in a folder, sorted, without temporary files; none if there is no folder."""
        ...

    def delete(self, url: str) -> None:
        """Delete a file; nothing happens if there is none."""
        ...


class LocalStream:
    """A local file, or standard input, read forward. It is unbuffered: callers read large pieces."""

    def __init__(self, file: BinaryIO, url: str, size: int | None) -> None:
        self.url = url
        self.size = size
        self._file = file
        self._seekable = file.seekable()

    def read(self, n: int, /) -> bytes:
        """See ``ByteStream.read``."""
        data = self._file.read(n) or b""
        if len(data) == n or not data:
            return data
        pieces = [data]  # a pipe gives what it has; callers are promised all of it
        missing = n - len(data)
        while missing and (piece := self._file.read(missing)):
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)

    def skip(self, n: int, /) -> None:
        """See ``ByteStream.skip``."""
        if self._seekable:
            self._file.seek(n, os.SEEK_CUR)
            return
        while n > 0 and (piece := self._file.read(min(n, 1 << 20))):
            n -= len(piece)

    def close(self) -> None:
        """See ``ByteStream.close``."""
        self._file.close()


class RangeFile(io.RawIOBase):
    """A seekable file over ranges of a storage, for libraries that want one. Each read is one range."""

    def __init__(self, storage: Storage, url: str) -> None:
        super().__init__()
        self._storage = storage
        self._url = url
        self._size = storage.info(url).size
        self._position = 0

    def seekable(self) -> bool:
        """See ``io.RawIOBase.seekable``."""
        return True

    def readable(self) -> bool:
        """See ``io.RawIOBase.readable``."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """See ``io.RawIOBase.seek``."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """See ``io.RawIOBase.tell``."""
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        """See ``io.RawIOBase.read``."""
        rest = max(0, self._size - self._position)
        size = rest if size < 0 else min(size, rest)
        data = self._storage.read_range(self._url, self._position, size) if size else b""
        self._position += size
        return data


class LocalStorage:
    """Files of this machine's file systems, by path or ``file://`` URL; ``-`` is standard input."""

    def info(self, url: str) -> FileInfo:
        """See ``Storage.info``."""
        status = local_path(url).stat()
        return FileInfo(url, status.st_size, f"{status.st_mtime_ns}-{status.st_ino}")

    def read_range(self, url: str, start: int, size: int) -> bytes:
        """See ``Storage.read_range``."""
        descriptor = os.open(local_path(url), os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(descriptor, size, start)
            while len(data) < size:  # one pread returns at most 2 GiB
                piece = os.pread(descriptor, size - len(data), start + len(data))
                if not piece:
                    raise TruncatedShardError(
                        f"{url}: ends at byte {start + len(data):,}, expected {size:,} bytes from byte {start:,}; "
                        "it was cut or replaced, so fetch or write it again",
                        url=url,
                        offset=start + len(data),
                    )
                data += piece
            return data
        finally:
            os.close(descriptor)

    def open(self, url: str, start: int = 0) -> ByteStream:
        """See ``Storage.open``."""
        if url == STDIN:
            return LocalStream(os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0), "standard input", None)
        file = local_path(url).open("rb", buffering=0)
        size = os.fstat(file.fileno()).st_size if file.seekable() else None
        if start:
            file.seek(start)
        return LocalStream(file, url, size)

    @contextlib.contextmanager
    def create(self, url: str, *, overwrite: bool = False) -> Iterator[BinaryIO]:
        """See ``Storage.create``."""
        path = local_path(url)
        if not overwrite and path.exists():
            raise _taken(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
        try:
            with temporary.open("xb") as file, _named(url):
                yield file
                file.flush()
                os.fsync(file.fileno())
            if overwrite:
                temporary.replace(path)
            else:
                _rename_without_replacing(temporary, path, url)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)

    def list(self, url: str) -> list[str]:
        """See ``Storage.list``."""
        try:
            return sorted(p.name for p in local_path(url).iterdir() if not p.name.startswith(TEMPORARY_PREFIX))
        except FileNotFoundError:
            return []

    def delete(self, url: str) -> None:
        """See ``Storage.delete``."""
        local_path(url).unlink(missing_ok=True)


def storage_for(url: str, storage_options: Mapping[str, object] | None = None) -> Storage:
    """Return the storage that serves a URL.

    Raises:
        ArgumentError: No storage serves its scheme, or an option is unknown to it.

    Example:
        >>> storage_for("shards/train").list("no such folder")
        []
    """
    if "\0" in url:
        raise ArgumentError(f"{url!r}: no file's name has a NUL character; correct it")
    scheme = _SCHEME.match(url)
    if scheme and scheme[1].lower() != "file":
        raise ArgumentError(
            f"{url}: shardkit does not read or write {scheme[1]}: URLs; copy the files to a local path. "
            f"(If this is a file name, write it as ./{url})"
        )
    if storage_options:
        raise ArgumentError(f"storage_options: local files take none, got {', '.join(sorted(storage_options))}")
    return LocalStorage()


def local_path(url: str) -> Path:
    """Return the path that a local URL means.

    Example:
        >>> str(local_path("file:///data/x%20y.tar"))
        '/data/x y.tar'
    """
    if not url.lower().startswith("file:"):
        return Path(url)
    from urllib.parse import unquote, urlsplit

    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ArgumentError(f"{url}: names the host {parts.netloc!r}; a local file is written file:///path")
    return Path(unquote(parts.path))


def remove_temporary_files(folder: str) -> None:
    """Delete the temporary files that killed writers left in a folder. No writer may be at work there."""
    path = local_path(folder)
    for leftover in path.glob(f"{TEMPORARY_PREFIX}*"):
        if leftover.is_file() and leftover.name != LOCK_NAME:
            leftover.unlink(missing_ok=True)


def join(url: str, name: str) -> str:
    """Return the URL of ``name`` in a folder.

    Example:
        >>> join("shards/train/", "manifest.json")
        'shards/train/manifest.json'
    """
    return f"{url.rstrip('/')}/{name}" if url else name


def split_url(url: str) -> tuple[str, str]:
    """Return the folder and the name of a URL.

    Example:
        >>> split_url("shards/train/manifest.json")
        ('shards/train', 'manifest.json')
    """
    folder, _, name = url.rpartition("/")
    return folder or ("/" if url.startswith("/") else "."), name


def parse_bytes(size: int | str) -> int:
    """Return a size in bytes. ``"256MB"`` is 256 * 10^6, ``"256MiB"`` is 256 * 2^20.

    Raises:
        ArgumentError: It is not a positive size.

    Example:
        >>> parse_bytes("256MB"), parse_bytes("1.5 KiB"), parse_bytes(512)
        (256000000, 1536, 512)
    """
    if isinstance(size, str):
        match = _SIZE.match(size)
        unit = _UNITS.get(match[2].upper()) if match else None
        number = int(float(match[1]) * unit) if match and unit else 0
    else:
        number = 0 if isinstance(size, bool) or not hasattr(size, "__index__") else operator.index(size)
    if not 1 <= number <= _LARGEST:
        raise ArgumentError(
            f"{size!r} is not a size; write a positive number of bytes, or text like '256MB' or '256MiB'"
        )
    return number


def format_bytes(size: float) -> str:
    """Return a size for people, with three digits.

    Example:
        >>> format_bytes(256_000_000), format_bytes(999)
        ('256 MB', '999 B')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if size < 999.5 or (unit == "B" and size < 1000):
            break
        size /= 1000
    else:
        unit = "TB"
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.3g} {unit}"


@contextlib.contextmanager
def _named(url: str) -> Iterator[None]:
    """Say which file it was that a full disk cut short; the system does not."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            error.filename = url
        raise


def _taken(url: str) -> DatasetExistsError:
    return DatasetExistsError(
        f"{url}: exists already; choose another name, or pass overwrite=True to replace it", url=url
    )


def _rename_without_replacing(temporary: Path, path: Path, url: str) -> None:
    try:
        os.link(temporary, path)  # unlike a rename, never replaces what appeared meanwhile
    except FileExistsError:
        raise _taken(url) from None
    except OSError:  # FAT and some network file systems have no hard links
        if path.exists():
            raise _taken(url) from None
        temporary.rename(path)


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut. Some file systems have no such thing."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
