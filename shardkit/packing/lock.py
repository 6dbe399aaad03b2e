"""One pack at a time in a folder."""

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shardkit.errors import DatasetExistsError
from shardkit.storage.base import LOCK_NAME, not_a_folder
from shardkit.storage.local import working_folder
from shardkit.storage.os_errors import os_errors

_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}  # some network file systems

_held: set[int] = set()  # descriptors of this process's locks


def _leave_to_parent() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(
    after_in_child=_leave_to_parent
)  # an executor's worker may live longer than the pack that forked it


@contextmanager
def exclusive(folders: Iterable[str]) -> Iterator[None]:
    """Keep other packs out of folders while the context is open. A killed process keeps nobody out.

    Missing folders are made, and removed again if they stay empty. For remote folders, only packs of this machine and
    user are kept out; other packs find the mark of an unfinished dataset there.

    Raises:
        DatasetExistsError: Another process or thread is packing into a folder, or it is a file.
        StorageError: Nothing can be written there.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with exclusive([folder]):
        ...     with exclusive([folder]):  # doctest: +ELLIPSIS
        ...         pass
        Traceback (most recent call last):
        shardkit.errors.DatasetExistsError: ...: is being packed by another process; wait for it, ...
    """
    with ExitStack() as stack:
        for folder in dict.fromkeys(folders):
            stack.enter_context(_lock(working_folder(folder), folder))
        yield


@contextmanager
def _lock(folder: Path, url: str) -> Iterator[None]:
    path = folder / LOCK_NAME
    with os_errors(url):
        made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise not_a_folder(url) from None
    try:
        with os_errors(str(path)):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        _held.add(descriptor)
        try:
            with os_errors(str(path)):
                is_ours = _take(descriptor, path)
            if not is_ours:
                raise DatasetExistsError(
                    f"{url}: is being packed by another process; wait for it, or choose another folder", url=url
                )
            try:
                yield
            finally:
                with os_errors(str(path)):
                    path.unlink(missing_ok=True)
        finally:
            _held.discard(descriptor)
            os.close(descriptor)
    finally:
        with suppress(OSError):  # it is not empty
            for parent in made:
                parent.rmdir()


def _take(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between our open and our lock, the holder may have removed the file and another process made a new one.
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return True
