"""Files that stay on this machine's disk until they are complete, and are then sent to another place."""

import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from shardkit.storage.base import TEMPORARY_PREFIX
from shardkit.storage.os_errors import CheckedFile, os_errors


@contextmanager
def spooled(url: str, *, is_named: bool = False) -> Iterator[io.BufferedRandom]:
    """Provide a new file in ``TMPDIR``, for reading and writing, that is deleted when the context ends.

    Args:
        url: The file's destination, for messages.
        is_named: Give it a path, its ``name``. A killed process leaves a named file behind, but not an unnamed one.

    Raises:
        StorageError: It cannot be written, for example because the disk is full. The message names the folder.
    """
    with os_errors("TMPDIR"):  # there may be no folder for temporary files
        place = f"{tempfile.gettempdir()} (TMPDIR, where {url} waits until it is whole)"
    make = tempfile.NamedTemporaryFile if is_named else tempfile.TemporaryFile
    with ExitStack() as stack:
        with os_errors(place):
            base = stack.enter_context(make(prefix=TEMPORARY_PREFIX, suffix=".spool"))
            raw = CheckedFile(os.dup(base.fileno()), place, "r+b")
        raw.name = base.name
        yield stack.enter_context(io.BufferedRandom(raw))
