"""Which storage serves a URL."""

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import BinaryIO

from shardkit.errors import ArgumentError, can_be_a_path
from shardkit.storage.base import ByteStream, FileInfo, Storage
from shardkit.storage.fsspec import GenericStorage, has_filesystem
from shardkit.storage.http import WebStorage
from shardkit.storage.local import LocalStorage
from shardkit.storage.s3.storage import S3Storage

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")


class SchemeStorage:
    """Serves URLs of every scheme, each by its own storage, which is created when it is first needed.

    Args:
        storage_options: Options of the storages. Local files use none, so options given with a local manifest apply
            to its remote shards.

    Raises:
        ArgumentError: They are not a mapping with names as keys.
    """

    def __init__(self, storage_options: Mapping[str, object] | None = None) -> None:
        options = {} if storage_options is None else storage_options
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise ArgumentError(
                f"storage_options must be a mapping of names to values, got {type(storage_options).__name__}; write "
                'them as {"name": value}'
            )
        self._options = dict(options)
        self._storages: dict[str, Storage] = {}

    def serving(self, url: str) -> Storage:
        """Return the storage that serves a URL.

        Raises:
            ArgumentError: There is none, or it does not know an option.
        """
        match = _SCHEME.match(url)
        scheme = match[1].lower() if match else "file"
        storage = self._storages.get(scheme)
        if storage is None:
            storage = self._storages.setdefault(scheme, self._make(scheme, url))
        return storage

    def _make(self, scheme: str, url: str) -> Storage:
        if scheme == "file":
            return LocalStorage()
        if scheme in ("http", "https"):
            return WebStorage(self._options)
        if scheme == "s3":
            return S3Storage(self._options)
        if has_filesystem(url):
            return GenericStorage(self._options)
        raise ArgumentError(
            f"{url}: shardkit does not read or write {scheme}: URLs, nor does fsspec; copy the files to a local path. "
            f"(If this is a file name, write it as ./{url})"
        )

    def info(self, url: str) -> FileInfo:
        """See ``Storage.info``."""
        return self.serving(url).info(url)

    def read_range(self, url: str, start: int, size: int, *, fresh: bool = False) -> bytes:
        """See ``Storage.read_range``."""
        return self.serving(url).read_range(url, start, size, fresh=fresh)

    def read_into(self, url: str, start: int, out: memoryview, *, fresh: bool = False) -> None:
        """See ``Storage.read_into``."""
        self.serving(url).read_into(url, start, out, fresh=fresh)

    def open(self, url: str, start: int = 0, *, fresh: bool = False) -> ByteStream:
        """See ``Storage.open``."""
        return self.serving(url).open(url, start, fresh=fresh)

    def create(self, url: str, *, overwrite: bool = False) -> AbstractContextManager[BinaryIO]:
        """See ``Storage.create``."""
        return self.serving(url).create(url, overwrite=overwrite)

    def list(self, url: str) -> list[str]:
        """See ``Storage.list``."""
        return self.serving(url).list(url)

    def delete(self, url: str) -> None:
        """See ``Storage.delete``."""
        self.serving(url).delete(url)


def storage_for(url: str, storage_options: Mapping[str, object] | None = None) -> Storage:
    """Return a storage that serves this URL and every other one. It does not connect before it is used.

    It remembers the versions of remote files: as long as it exists, everything read from a file is of one version.

    Args:
        url: The file or folder.
        storage_options: Options of the storages; see ``SchemeStorage``.

    Raises:
        ArgumentError: No storage serves the URL's scheme, or it does not know an option.

    Example:
        >>> storage_for("shards/train").list("no such folder")
        []
    """
    if not can_be_a_path(url):
        raise ArgumentError(f"{url!r}: no file's name has a NUL, or half of a surrogate pair; correct it")
    storage = SchemeStorage(storage_options)
    storage.serving(url)
    return storage
