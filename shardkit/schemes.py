"""Which storage serves a URL."""

import re
from collections.abc import Mapping

from shardkit.errors import ArgumentError
from shardkit.local import LocalStorage
from shardkit.storage import Storage
from shardkit.web import WebStorage

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")


def storage_for(url: str, storage_options: Mapping[str, object] | None = None) -> Storage:
    """Return the storage that serves a URL. Nothing is connected before it is used.

    Each has versions of its own: keep it as long as what is read through it should be of one version.

    Args:
        url: The file or folder.
        storage_options: What its storage needs to know. Local files need nothing, so that options can be meant for
            the shards of a local manifest that lie elsewhere.

    Raises:
        ArgumentError: No storage serves its scheme, or an option is unknown to it.

    Example:
        >>> storage_for("shards/train").list("no such folder")
        []
    """
    if "\0" in url:
        raise ArgumentError(f"{url!r}: no file's name has a NUL character; correct it")
    match = _SCHEME.match(url)
    scheme = match[1].lower() if match else "file"
    if scheme == "file":
        return LocalStorage()
    if scheme in ("http", "https"):
        return WebStorage(storage_options)
    raise ArgumentError(
        f"{url}: shardkit does not read or write {scheme}: URLs; copy the files to a local path. "
        f"(If this is a file name, write it as ./{url})"
    )
