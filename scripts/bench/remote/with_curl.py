"""webdataset's ``pipe:curl``, as in its documentation."""

import shlex
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from loading.job import Batch, Job, Passes

from remote.pieces import read_pieces

gopen: Any = import_module("webdataset.gopen")


def open_passes(job: Job) -> Passes:
    """Return a function that reads the file once."""

    def forward() -> Iterator[Batch]:
        stream = gopen.gopen(f"pipe:curl -s -L {shlex.quote(job.options['url'])}", "rb")
        yield from read_pieces(stream.read)
        stream.close()

    return forward
