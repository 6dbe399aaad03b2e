"""Everything that shardkit raises on purpose.

::

    ShardkitError
    ├── ArgumentError            an argument is wrong (also a ValueError)
    ├── ShardError               a shard is damaged
    │   └── TruncatedShardError  ... because they end too early
    ├── SampleError              a sample is not valid or cannot be found
    ├── CodecError               a field cannot be encoded or decoded
    ├── SourceError              the data to be packed is missing, unreadable or has changed
    ├── StorageError             a file cannot be read or written (also an OSError)
    │   ├── MissingFileError     ... because it does not exist (also a FileNotFoundError)
    │   ├── NotAFolderError      ... because a folder is needed and a file is there (also a NotADirectoryError)
    │   ├── AccessError          ... because it is not allowed (also a PermissionError)
    │   ├── ChangedFileError     ... because it was replaced while it was being read
    │   └── NoListingError       ... because the storage does not list its folders
    ├── DatasetError             a manifest, an index or a directory of shards is not usable
    │   ├── DatasetExistsError   ... because another dataset is in the way
    │   ├── UnfinishedDatasetError  ... because it is still being written, or its writer was killed
    │   └── IncompleteDatasetError  ... because shards or indexes are missing (also a MissingFileError)
    ├── StateError               a loader's state is of another dataset, order or version
    ├── WorkerError              a worker process has died
    ├── TooManySkippedError      more samples were skipped than ``max_skipped`` allows
    └── MissingExtraError        an optional dependency is needed (also an ImportError)

Failures of the operating system (no such file, no permission, a full disk) are a ``StorageError`` too, which is an
``OSError`` with the ``errno`` of the system.

An error is built from one message, *where: what is, what was expected; what to do*, because a PyTorch ``DataLoader``
rebuilds a worker's exception from its message alone. The attributes are for programs and survive pickling. Passwords
and signatures in URLs are left out of both.
"""

import operator
import re
import sys
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from os import PathLike, fsencode, fspath
from typing import Any, SupportsIndex

_USER = re.compile(r"(?<=://)[^\s/?#]*@")  # up to the last @, as a password may contain more of them
# The quantifiers are possessive, so the time is linear in the length of the text.
_QUERY = re.compile(r"(https?://[^\s?#]*+)(?:\?(?!\.\.\.)([^\s#'\"]*+))?", re.IGNORECASE)
_AFTER_URL = ",;:.)]}"


def hide_secrets(text: str) -> str:
    """Return a text whose URLs have no passwords and no queries, which may be signatures.

    Example:
        >>> hide_secrets("https://me:secret@host/a.tar?X-Amz-Signature=0123: is missing")
        'https://host/a.tar?...: is missing'
    """
    if "://" not in text:
        return text
    return _QUERY.sub(_without_query, _USER.sub("", text))


def _without_query(url: re.Match[str]) -> str:
    query = url[2]
    return url[0] if query is None else f"{url[1]}?...{query[len(query.rstrip(_AFTER_URL)) :]}"


class ShardkitError(Exception):
    """The root of everything that shardkit raises on purpose.

    Attributes:
        url: The shard, index or manifest concerned; empty if there is none.
        offset: Where in the uncompressed shard, in bytes from its start; None if that is not known.
        key: The sample concerned; empty if there is none.
        field: The field concerned; empty if there is none.

    Example:
        >>> str(ShardkitError("shard a.tar: is empty", url="a.tar"))
        'shard a.tar: is empty'
    """

    def __init__(
        self, message: str, *, url: str = "", offset: int | None = None, key: str = "", field: str = ""
    ) -> None:
        super().__init__(hide_secrets(message))
        self.url = hide_secrets(url)
        self.offset = offset
        self.key = key
        self.field = field


class ArgumentError(ShardkitError, ValueError):
    """An argument is wrong; nothing has been read or written."""


class ShardError(ShardkitError):
    """A shard is damaged. No sample after ``offset`` was yielded from it."""


class TruncatedShardError(ShardError):
    """A shard ends before its end-of-archive mark. Complete samples before the cut may have been yielded."""


class SampleError(ShardkitError):
    """A sample has a key or a field that a reader would merge, rename or drop, or is too large. It was not written."""


class CodecError(ShardkitError):
    """A field's value cannot be encoded, or its bytes cannot be decoded. The cause is chained."""


class SourceError(ShardkitError):
    """The data to be packed is missing, unreadable, or has changed since the pack began."""


class StorageError(ShardkitError, OSError):
    """A file cannot be read or written, even after retries. All data read before the error is right.

    Attributes:
        errno: The operating system's number for the failure, such as ``errno.ENOSPC``; None if the failure is not one
            of the operating system's.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, {**self.__dict__, "errno": self.errno}  # OSError leaves it out


class MissingFileError(StorageError, FileNotFoundError):
    """The file does not exist."""


class NotAFolderError(StorageError, NotADirectoryError):
    """A file is where a folder is needed."""


class AccessError(StorageError, PermissionError):
    """The storage refuses access: credentials are wrong, missing or expired, or lack this permission."""


class ChangedFileError(StorageError):
    """A file was replaced while it was being read. No data of the new file was mixed with the old one."""


class NoListingError(StorageError):
    """The storage cannot list its folders. Files whose names are given can be read."""


class DatasetError(ShardkitError):
    """A manifest, an index or a directory of shards is not usable."""


class DatasetExistsError(DatasetError):
    """Another dataset, or something else that would be overwritten, is in the way. Nothing was changed."""


class UnfinishedDatasetError(DatasetError):
    """The dataset is still being written, or its writer was killed. Running the same pack again continues it."""


class IncompleteDatasetError(DatasetError, MissingFileError):
    """Shards or indexes that the manifest lists are missing. The message names the first of them.

    Attributes:
        missing: The URLs of all of them.
    """

    missing: tuple[str, ...] = ()


class StateError(ShardkitError):
    """A loader's state belongs to another dataset, order or version. The loader is unchanged."""


class WorkerError(ShardkitError):
    """A worker process has died, or cannot be started. Everything returned or written before is complete."""


class TooManySkippedError(ShardkitError):
    """More samples or shards were skipped than ``max_skipped`` allows, or all of a loader's first batch."""


class MissingExtraError(ShardkitError, ImportError):
    """An optional dependency is needed; the message has the command that installs it."""


def check_importable(pickled: bytes) -> None:
    """Check that spawned processes can import the functions and classes that were pickled.

    They cannot import objects that were defined in a notebook or at a prompt, and would die without a clear message.

    Raises:
        ArgumentError: They cannot import one of them.
    """
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) or getattr(main, "__spec__", None) or b"__main__" not in pickled:
        return
    import pickletools

    if any(argument == "__main__" for _, argument, _ in pickletools.genops(pickled)):
        raise ArgumentError(
            "worker_type='process': processes cannot import what was defined in a notebook or at a prompt; put the "
            "functions and classes that they need into a module, a .py file, and import them, or use threads"
        )


def check_whole(name: str, value: SupportsIndex, *, least: int | None = None) -> int:
    """Return a whole number of any type, NumPy's too, as an int.

    Args:
        name: What it is called, for the message.
        value: The number.
        least: The smallest value allowed; None allows any value, however small or large.

    Raises:
        ArgumentError: It is not a whole number, is smaller than ``least``, or is at least ``sys.maxsize``.

    Example:
        >>> import numpy as np
        >>> check_whole("seed", np.uint8(7))
        7
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(f"{name} must be a whole number, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:  # a NumPy array raises only here if it has several elements
        raise ArgumentError(f"{name} must be a whole number, got {value!r}") from None
    if least is not None and number < least:
        raise ArgumentError(f"{name} must be at least {least}, got {value!r}")
    if least is not None and number >= sys.maxsize:
        raise ArgumentError(f"{name} must be less than {sys.maxsize}, got {value!r}")
    return number


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Check that an argument is one of some strings.

    Args:
        name: What it is called, for the message.
        value: The argument.
        choices: The allowed strings.

    Raises:
        ArgumentError: It is none of them.

    Example:
        >>> check_choice("on_error", "skip", ("raise", "skip"))
    """
    if value not in choices:
        raise ArgumentError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")


def check_path(name: str, value: str | PathLike[str]) -> str:
    """Return a path or a URL as text.

    Args:
        name: What it is called, for the message.
        value: The path.

    Raises:
        ArgumentError: It is neither text nor a path, it is empty, or it is not a valid file name.

    Example:
        >>> from pathlib import Path
        >>> check_path("folder", Path("photos", "cats"))
        'photos/cats'
    """
    path = fspath(value) if isinstance(value, str | PathLike) else None
    if not isinstance(path, str):
        raise ArgumentError(f"{name} must be text or a path, got {value!r}")
    if not path:
        raise ArgumentError(f"{name} is empty, expected a path; the current folder is written '.'")
    if not can_be_a_path(path):
        raise ArgumentError(f"{name} {path!r}: no file's name has a NUL, or half of a surrogate pair; correct it")
    return path


def can_be_a_path(text: str) -> bool:
    """Return whether the operating system accepts a text as a path: it must have no NUL and no unpaired surrogate.

    Example:
        >>> can_be_a_path("a.tar"), can_be_a_path("a" + chr(0) + ".tar")
        (True, False)
    """
    try:
        return b"\0" not in fsencode(text)
    except UnicodeEncodeError:
        return False


def check_paths(name: str, values: str | PathLike[str] | Iterable[str | PathLike[str]]) -> list[str]:
    """Return one path or URL, or several, as a list of text.

    Raises:
        ArgumentError: One is neither text nor a path, or is empty, or they are a collection without an order.

    Example:
        >>> check_paths("urls", "train.tar")
        ['train.tar']
    """
    if isinstance(values, str | PathLike):
        return [check_path(name, values)]
    if isinstance(values, bytes | Mapping | AbstractSet) or not isinstance(values, Iterable):
        raise ArgumentError(f"{name} must be text, a path, or a list of these, got {values!r}")
    return [check_path(f"{name}[{number}]", value) for number, value in enumerate(values)]


def check_texts(name: str, values: Iterable[str]) -> tuple[str, ...]:
    """Return a sequence of strings as a tuple.

    Raises:
        ArgumentError: It is a single string, or one of its elements is not a string.

    Example:
        >>> check_texts("classes", ["cat", "dog"])
        ('cat', 'dog')
    """
    if isinstance(values, str):
        raise ArgumentError(f'{name} must be a sequence of texts, got the text {values!r}; write ("{values}",)')
    texts = tuple(values) if isinstance(values, Iterable) else None
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise ArgumentError(f"{name} must be a sequence of texts, got {values!r}")
    return texts
