"""Where bytes come from and go to. Everything that shardkit reads or writes goes through a ``Storage``.

A storage reads ranges and forward streams, and it publishes a whole file or nothing: a file has a temporary name until
it is complete and on the disk. ``registry`` finds the storage that serves a URL.
"""

import contextlib
import logging
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Protocol, TypeVar
from urllib.parse import quote, unquote

from shardkit.errors import ArgumentError, DatasetError, DatasetExistsError, ShardError, TruncatedShardError

T = TypeVar("T")

TEMPORARY_PREFIX = ".shardkit-"
"""The prefix of the name of every temporary file; listings leave these files out."""

LOCK_NAME = f"{TEMPORARY_PREFIX}lock"
STDIN = "-"

_UNITS = {
    "": 1,
    "B": 1,
    **dict.fromkeys(("K", "KB"), 10**3),
    **dict.fromkeys(("M", "MB"), 10**6),
    **dict.fromkeys(("G", "GB"), 10**9),
    **dict.fromkeys(("T", "TB"), 10**12),
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_LARGEST = 2**60  # so that sums of sizes fit into 64 bits
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*\Z")
FRESH_READS = 2
"""How often data that arrived damaged from another machine is fetched again."""

_logger = logging.getLogger("shardkit")

_WEB = re.compile(r"https?://", re.IGNORECASE)
_PLAIN = "/!$&'()*+,;=:@~"  # not percent-encoded in the path of a web address


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What is known about a file without reading it.

    Attributes:
        url: The file.
        size: Its size in bytes.
        version: Text that changes when the file changes: its modification time and inode, or the ETag from a server;
            empty if nothing is known.
    """

    url: str
    size: int
    version: str


class ByteStream(Protocol):
    """Bytes that are read strictly forward.

    Attributes:
        url: Their source, for messages.
        size: Their total number, if it is known.
    """

    url: str
    size: int | None

    def read(self, n: int, /) -> bytes:
        """Return ``n`` bytes; fewer, or none, only at the end."""
        ...

    def skip(self, n: int, /) -> None:
        """Go ``n`` bytes forward, possibly beyond the end, without reading them if that can be avoided."""
        ...

    def close(self) -> None:
        """Release all resources. It may be called twice."""
        ...


class Storage(Protocol):
    """The operations that shardkit needs from a place that has files.

    A storage may be used by threads and forked processes, and it can be pickled. If a remote file's version is known
    from an earlier call, later calls read only that version: a file that was replaced meanwhile is a ChangedFileError.
    ``info`` accepts the current version.
    """

    def info(self, url: str) -> FileInfo:
        """Return size and version. Raises FileNotFoundError."""
        ...

    def read_range(self, url: str, start: int, size: int, *, fresh: bool = False) -> bytes:
        """Return exactly ``size`` bytes from ``start``. Raises TruncatedShardError if the file ends before.

        ``fresh`` says that the bytes arrived damaged before: they are fetched over a new connection, bypassing caches.
        """
        ...

    def read_into(self, url: str, start: int, out: memoryview, *, fresh: bool = False) -> None:
        """Fill ``out`` with the bytes from ``start``, like ``read_range``. After an error, its content is undefined."""
        ...

    def open(self, url: str, start: int = 0, *, fresh: bool = False) -> ByteStream:
        """Return a forward stream from ``start``; ``fresh`` as for ``read_range``."""
        ...

    def create(self, url: str, *, overwrite: bool = False) -> contextlib.AbstractContextManager[BinaryIO]:
        """Write a file that appears under its name, whole and synced, when the context ends without an exception.

        After an exception nothing is left. Raises DatasetExistsError if the name is taken and ``overwrite`` is False.
        """
        ...

    def list(self, url: str) -> list[str]:
        """Return the names in a folder, sorted, without temporary files; none if there is no folder.

        Raises NotADirectoryError if it is a file, and NoListingError if the storage lists nothing.
        """
        ...

    def delete(self, url: str) -> None:
        """Delete a file; nothing happens if there is none."""
        ...


def read_right(url: str, read: Callable[..., T]) -> T:
    """Return the result of ``read``; if data from another machine arrives damaged, read it again, at most twice.

    Args:
        url: Where the data is: only data from another machine can have been damaged in transit.
        read: Reads and checks the data. It is called with ``fresh``, which it passes to the storage. A ShardError or
            DatasetError that it raises means that the data is damaged.
    """
    for number in range(FRESH_READS if is_remote(url) else 0):
        try:
            return read(fresh=number > 0)
        except (ShardError, DatasetError) as error:
            _logger.warning("the data is wrong, so it is fetched again: %s", error)
    return read(fresh=is_remote(url))


def join(url: str, name: str) -> str:
    """Return the URL of ``name`` in a folder. A name that is a URL itself is that URL.

    The path of a web address is quoted, and its query stays at the end.

    Example:
        >>> join("shards/train/", "manifest.json"), join("https://host/a?token=1", "b 1.tar")
        ('shards/train/manifest.json', 'https://host/a/b%201.tar?token=1')
    """
    if "://" in name:
        return name
    if not url:
        return name
    if _WEB.match(url):
        folder, mark, query = url.partition("?")
        return f"{folder.rstrip('/')}/{quote(name, safe=_PLAIN)}{mark}{query}"
    return f"{url.rstrip('/')}/{name}"


def split_url(url: str) -> tuple[str, str]:
    """Return the folder and the name of a URL.

    Example:
        >>> split_url("shards/train/manifest.json"), split_url("https://host/a/b%201.tar?token=1")
        (('shards/train', 'manifest.json'), ('https://host/a?token=1', 'b 1.tar'))
    """
    if _WEB.match(url):
        path, mark, query = url.partition("?")
        folder, _, name = path.rpartition("/")
        return f"{folder}{mark}{query}", unquote(name)
    folder, _, name = url.rpartition("/")
    return folder or ("/" if url.startswith("/") else "."), name


def is_web(url: str) -> bool:
    """Return whether a URL is a web address.

    Example:
        >>> is_web("https://host/a.tar"), is_web("s3://bucket/a.tar")
        (True, False)
    """
    return _WEB.match(url) is not None


def is_remote(url: str) -> bool:
    """Return whether a URL names a place other than this machine's file systems and standard input.

    Example:
        >>> is_remote("s3://bucket/a.tar"), is_remote("a.tar"), is_remote("file:///a.tar")
        (True, False, False)
    """
    return "://" in url and not url.lower().startswith("file:")


def check_options(scheme: str, options: Mapping[str, object], known: tuple[str, ...]) -> None:
    """Check that all options are known. Raises ArgumentError."""
    if unknown := sorted(set(options) - set(known)):
        raise ArgumentError(
            f"storage_options: {', '.join(unknown)} is not an option of {scheme}: {', '.join(known)}; correct it"
        )


def ended(url: str, start: int, found: int, size: int) -> TruncatedShardError:
    """Return the error for a file that ends before the end of the requested range."""
    return TruncatedShardError(
        f"{url}: ends at byte {start + found:,}, expected {size:,} bytes from byte {start:,}; it was cut or replaced, "
        "so fetch or write it again",
        url=url,
        offset=start + found,
    )


def taken(url: str) -> DatasetExistsError:
    """Return the error for a name that is not to be overwritten."""
    return DatasetExistsError(
        f"{url}: exists already; choose another name, or pass overwrite=True to replace it", url=url
    )


def not_a_folder(url: str) -> DatasetExistsError:
    """Return the error for a folder that cannot be made, because something else has its name."""
    return DatasetExistsError(
        f"{url}: is a file, or a link that leads nowhere, expected a folder; choose another name, or remove it", url=url
    )


def read_only(url: str) -> ArgumentError:
    """Return the error for writing to a place that can only be read."""
    return ArgumentError(
        f"{url}: http and https can only be read; write to a local folder or an object store, and put it there", url=url
    )


def parse_bytes(size: int | str) -> int:
    """Return a size in bytes. ``"256MB"`` and ``"256M"`` are 256 * 10^6, ``"256MiB"`` is 256 * 2^20.

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
    """Return a human-readable size with three digits.

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
