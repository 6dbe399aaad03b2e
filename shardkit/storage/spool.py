"""Files that wait on this machine's disk until they are whole, and are then sent to another place."""

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from typing import Any

from shardkit.storage.base import TEMPORARY_PREFIX


@contextlib.contextmanager
def spooled(url: str, *, is_named: bool = False) -> Iterator[Any]:
    """Provide a new file in ``TMPDIR``, for reading and writing, that is gone when the context ends.

    Args:
        url: What it is to become, for messages.
        is_named: It has a path, its ``name``. A process that is killed leaves it then, else nothing.

    Raises:
        OSError: The disk is full; with the folder that it is about.
    """
    make = tempfile.NamedTemporaryFile if is_named else tempfile.TemporaryFile
    with make(prefix=TEMPORARY_PREFIX, suffix=".spool") as file:
        try:
            yield file
            file.flush()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                where = f"{tempfile.gettempdir()} (TMPDIR, where {url} waits until it is whole)"
                raise OSError(error.errno, error.strerror, where) from error
            raise
