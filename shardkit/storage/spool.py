"""Files that wait on this machine's disk until they are whole, and are then sent to another place."""

import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from shardkit.storage.base import TEMPORARY_PREFIX
from shardkit.storage.os_errors import CheckedFile, os_errors


@contextmanager
def spooled(url: str, *, is_named: bool = False) -> Iterator[io.BufferedRandom]:
    """Provide a new file in ``TMPDIR``, for reading and writing, that is gone when the context ends.

    Args:
        url: What it is to become, for messages.
        is_named: It has a path, its ``name``. A process that is killed leaves it then, else nothing.

    Raises:
        StorageError: It cannot be written, for example because the disk is full; with the folder that it is about.
    """
    with os_errors("TMPDIR"):  # there may be no folder at all for temporary files
        place = f"{tempfile.gettempdir()} (TMPDIR, where {url} waits until it is whole)"
    make = tempfile.NamedTemporaryFile if is_named else tempfile.TemporaryFile
    with ExitStack() as stack:
        with os_errors(place):
            base = stack.enter_context(make(prefix=TEMPORARY_PREFIX, suffix=".spool"))
            raw = CheckedFile(os.dup(base.fileno()), place, "r+b")
        raw.name = base.name
        yield stack.enter_context(io.BufferedRandom(raw))
