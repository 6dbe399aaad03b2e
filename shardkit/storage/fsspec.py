"""Files of every other place that fsspec has a filesystem for: ranges with a checked length, and files written whole.

``fs.open`` is never used: its read-ahead data may be too short or belong to two versions, and a file that it writes
appears even if the writer failed. Ranges are fetched whole, and their length is checked; files are written to this
machine first, and then uploaded.
"""

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from secrets import token_hex
from typing import Any, BinaryIO, TypeVar

from shardkit.errors import (
    AccessError,
    ArgumentError,
    ChangedFileError,
    MissingExtraError,
    MissingFileError,
    NoListingError,
    NotAFolderError,
    ShardkitError,
    StorageError,
    hide_secrets,
)
from shardkit.storage.base import TEMPORARY_PREFIX, FileInfo, ended, split_url, taken
from shardkit.storage.connections import TOTAL_TIMEOUT
from shardkit.storage.os_errors import storage_error
from shardkit.storage.responses import AGAIN, FORBIDDEN, MISSING
from shardkit.storage.retry import Attempts
from shardkit.storage.spool import spooled

T = TypeVar("T")

# The options of the constructor of fsspec's base class, to which the others pass options that they do not know.
_BASE_OPTIONS = frozenset({"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache"})
_WINDOW_BYTES = 1 << 22  # of a stream that are fetched at once
_VERSIONS = ("ETag", "etag", "generation", "version_id", "mtime", "LastModified", "last_modified", "updated", "created")
# In these a file appears only when it is complete; elsewhere it is put under another name first, and then renamed.
_OBJECT_STORES = frozenset({"abfs", "abfss", "adl", "az", "gcs", "gs", "hf", "memory", "oci", "oss", "s3", "s3a"})


def _forget_lock() -> None:
    """Give a forked child a new lock: another thread may have held fsspec's lock at the moment of the fork."""
    if "fsspec.asyn" in sys.modules:
        sys.modules["fsspec.asyn"].reset_lock()


os.register_at_fork(after_in_child=_forget_lock)

# Filesystems that were used, by their ids. They are never released: if a forked child released its parent's, it would
# close their connections and remove them from the epoll that it shares with the parent's event loop.
_used: dict[int, Any] = {}


def has_filesystem(url: str) -> bool:
    """Return whether fsspec knows a filesystem for a URL, installed or not."""
    if "://" not in url:
        return False
    from fsspec.registry import known_implementations, registry

    first = url.partition("::")[0].partition("://")[0].lower()
    return first in known_implementations or first in registry


def _known_options(kind: type) -> frozenset[str]:
    """Return the options that a filesystem's constructors name; fsspec's base class silently drops all others."""
    signatures = (inspect.signature(vars(base)["__init__"]) for base in kind.__mro__[:-1] if "__init__" in vars(base))
    return _BASE_OPTIONS.union(*(signature.parameters for signature in signatures))


class GenericStorage:
    """Files of a place that fsspec has a filesystem for; URLs may be chained: ``simplecache::gs://bucket/folder``.

    Args:
        options: Passed to the filesystem; for a chained URL, by protocol: ``{"gs": {...}, "simplecache": {...}}``.
            Options of a chained URL that are not grouped by protocol must be known to the cache. Filesystems decide
            themselves what to do with unknown options.
    """

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        self._options = dict(options or {})

    def _filesystem(self, url: str) -> tuple[Any, str]:
        """Return this process's filesystem for a URL, and the filesystem's path of the file."""
        from fsspec.core import url_to_fs

        try:
            filesystem, path = url_to_fs(url, **self._options)
        except ImportError as error:
            raise MissingExtraError(f"{url}: its filesystem is not installed: {error}") from None
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{url}: {error}; correct the URL or storage_options", url=url) from None
        self._check_options(url, filesystem)
        inner = filesystem
        while inner is not None:
            _used[id(inner)] = inner
            inner = getattr(inner, "fs", None)
        return filesystem, str(path)

    def _check_options(self, url: str, filesystem: Any) -> None:
        """Raise ArgumentError for options that a cache would drop, such as credentials for what it caches."""
        from fsspec.implementations.cached import CachingFileSystem

        if not self._options or not isinstance(filesystem, CachingFileSystem):
            return
        protocols = [part.partition("://")[0] for part in url.split("::")]
        first, last = protocols[0], protocols[-1]
        own = self._options.get(first)
        given = {name for name in self._options if not has_filesystem(f"{name}://")}
        given.update(own if isinstance(own, Mapping) else ())
        if unknown := sorted(given - _known_options(type(filesystem))):
            raise ArgumentError(
                f"{url}: storage_options: {', '.join(unknown)} is not an option of {first}; correct it, or say whose "
                f'it is: {{"{last}": {{"{unknown[0]}": ...}}}}',
                url=url,
            )

    def _uncached(self, url: str) -> tuple[Any, str]:
        """Return the filesystem behind a URL's caches, and its path of the file."""
        from fsspec.implementations.cached import CachingFileSystem

        filesystem, path = self._filesystem(url)
        while isinstance(filesystem, CachingFileSystem):
            filesystem = filesystem.fs
        return filesystem, path

    def _do(self, url: str, doing: str, work: Callable[[Any, str], T], *, is_cached: bool = False) -> T:
        """Call a filesystem, and try again after a failure that may be temporary. Only reads may use its cache."""
        attempts = Attempts(url, TOTAL_TIMEOUT)
        while True:
            try:
                filesystem, path = self._filesystem(url) if is_cached else self._uncached(url)
                return work(filesystem, path)
            except (ShardkitError, NotImplementedError):
                raise
            except (NotADirectoryError, IsADirectoryError) as error:
                raise storage_error(error, url) from error
            except Exception as error:  # noqa: BLE001 - each filesystem has its own errors
                status = _status(error)
                if isinstance(error, FileNotFoundError) or status in MISSING:
                    raise MissingFileError(f"{url}: does not exist; correct the URL", url=url) from None
                if isinstance(error, PermissionError) or status in FORBIDDEN:
                    message = f"{url}: {doing}: access is refused ({_brief(error)}); correct storage_options"
                    raise AccessError(message, url=url) from None
                is_final = isinstance(error, TypeError | ValueError) or (400 <= status < 500 and status not in AGAIN)
                attempts.fail(doing, _brief(error), is_final=is_final)

    def info(self, url: str) -> FileInfo:
        """See ``Storage.info``."""

        def look(filesystem: Any, path: str) -> FileInfo:
            filesystem.invalidate_cache()
            found = filesystem.info(path)
            if found.get("type") == "directory":
                raise FileNotFoundError(path)
            if found.get("size") is None:
                raise StorageError(f"{url}: its filesystem does not say how large it is; copy it elsewhere", url=url)
            version = next((str(found[name]) for name in _VERSIONS if found.get(name) is not None), "")
            return FileInfo(hide_secrets(url), int(found["size"]), version)

        return self._do(url, "cannot be looked for", look)

    def read_range(self, url: str, start: int, size: int, *, fresh: bool = False) -> bytes:
        """See ``Storage.read_range``."""
        if not size:
            return b""
        doing = f"cannot be read from byte {start:,} on"

        def fetch(filesystem: Any, path: str) -> bytes:
            return bytes(filesystem.cat_file(path, start=start, end=start + size))

        attempts = Attempts(url, TOTAL_TIMEOUT)
        while True:
            data = self._do(url, doing, fetch, is_cached=not fresh)
            if len(data) == size:
                return data
            there = self.info(url).size
            if start + size > there:
                raise ended(url, start, max(0, there - start), size)
            attempts.fail(
                doing, f"{len(data):,} bytes arrived instead of {size:,}", is_final=fresh and len(data) > size
            )
            fresh = True

    def read_into(self, url: str, start: int, out: memoryview, *, fresh: bool = False) -> None:
        """See ``Storage.read_into``."""
        out[:] = self.read_range(url, start, len(out), fresh=fresh)

    def open(self, url: str, start: int = 0, *, fresh: bool = False) -> "WindowStream":
        """See ``Storage.open``."""
        return WindowStream(self, url, start, fresh=fresh)

    @contextlib.contextmanager
    def create(self, url: str, *, overwrite: bool = False) -> Iterator[BinaryIO]:
        """See ``Storage.create``. The file stays on this machine's disk until it is complete."""
        if not overwrite and self._exists(url):
            raise taken(url)
        with spooled(url, is_named=True) as file:
            yield file
            file.flush()
            if not overwrite and self._exists(url):  # most filesystems cannot make the upload itself conditional
                raise taken(url)
            self._publish(url, file.name, file.tell())

    def _exists(self, url: str) -> bool:
        return self._do(url, "cannot be looked for", lambda filesystem, path: bool(filesystem.exists(path)))

    def _publish(self, url: str, name: str, size: int) -> None:
        def put(filesystem: Any, path: str) -> None:
            protocols = filesystem.protocol if isinstance(filesystem.protocol, tuple) else (filesystem.protocol,)
            if _OBJECT_STORES.intersection(protocols):
                filesystem.put_file(name, path)
                return
            folder = filesystem._parent(path)  # noqa: SLF001 - fsspec has no public name for it
            filesystem.makedirs(folder, exist_ok=True)
            temporary = f"{folder}/{TEMPORARY_PREFIX}{token_hex(8)}"
            try:
                filesystem.put_file(name, temporary)
                filesystem.mv(temporary, path)
            except BaseException:
                with contextlib.suppress(Exception):
                    filesystem.rm_file(temporary)
                raise

        self._do(url, "cannot be written", put)
        stored = self.info(url).size
        if stored != size:
            self.delete(url)
            raise StorageError(
                f"{url}: has {stored:,} bytes, {size:,} were sent; it was deleted, write it again", url=url
            )

    def delete(self, url: str) -> None:
        """See ``Storage.delete``."""
        with contextlib.suppress(FileNotFoundError):
            self._do(url, "cannot be deleted", lambda filesystem, path: filesystem.rm_file(path))

    def list(self, url: str) -> list[str]:
        """See ``Storage.list``."""

        def look(filesystem: Any, path: str) -> list[str]:
            filesystem.invalidate_cache()
            found = filesystem.ls(path, detail=True)
            if [entry["name"].rstrip("/") for entry in found] == [path.rstrip("/")] and found[0]["type"] == "file":
                raise NotAFolderError(f"{url}: is a file, expected a folder; correct the URL", url=url)
            return [split_url(entry["name"].rstrip("/"))[1] for entry in found]

        try:
            names = self._do(url, "its folder cannot be listed", look)
        except NotImplementedError:
            raise NoListingError(f"{url}: its filesystem lists no folders; name the files", url=url) from None
        except FileNotFoundError:
            return []
        return sorted(name for name in names if name and not name.startswith(TEMPORARY_PREFIX))


class WindowStream:
    """A file read forward, some megabytes at a time; see ``ByteStream``.

    Args:
        storage: Reads the file.
        url: The file.
        start: Where to begin.
        fresh: Fetch it bypassing caches.
    """

    def __init__(self, storage: GenericStorage, url: str, start: int, *, fresh: bool) -> None:
        self._storage = storage
        self._info = storage.info(url)
        self._position = start
        self._fresh = fresh
        self._window = memoryview(b"")
        self.url = url
        self.size: int | None = self._info.size

    def read(self, n: int, /) -> bytes:
        """See ``ByteStream.read``."""
        pieces = []
        while n > 0 and (piece := self._next(n)):
            pieces.append(piece)
            n -= len(piece)
        return b"".join(pieces)

    def _next(self, n: int) -> memoryview:
        if not self._window and self._position < self._info.size:
            size = min(max(n, _WINDOW_BYTES), self._info.size - self._position)
            self._window = memoryview(self._storage.read_range(self.url, self._position, size, fresh=self._fresh))
            if self._position + size == self._info.size and (now := self._storage.info(self.url)) != self._info:
                raise ChangedFileError(
                    f"{self.url}: was replaced while it was being read ({now.size:,} bytes, there were "
                    f"{self._info.size:,}); read it again",
                    url=self.url,
                )
        piece, self._window = self._window[:n], self._window[n:]
        self._position += len(piece)
        return piece

    def skip(self, n: int, /) -> None:
        """See ``ByteStream.skip``."""
        self._window = self._window[n:]
        self._position += max(0, n)

    def close(self) -> None:
        """See ``ByteStream.close``."""
        self._window = memoryview(b"")


def _status(error: Exception) -> int:
    """Return the HTTP status of an error of aiohttp, gcsfs and the like; 0 if it has none."""
    numbers = (str(getattr(error, name, "")) for name in ("status", "code"))
    return next((int(number) for number in numbers if number.isdecimal()), 0)


def _brief(error: Exception) -> str:
    """Return an error's message, in one line and without secrets."""
    return hide_secrets(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
