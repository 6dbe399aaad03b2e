"""fsspec's filesystems http and s3fs: their files with default settings, or, with the option ``block``, cat_file."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from loading.job import Batch, Job, Passes

from remote.pieces import passes_over_blocks, read_pieces

fsspec: Any = import_module("fsspec")


def open_passes(job: Job) -> Passes:
    """Return a function that reads the file once."""
    files, path = fsspec.core.url_to_fs(job.options["url"], **job.options.get("storage_options", {}))
    if "block" in job.options:
        return passes_over_blocks(job, lambda start, count: files.cat_file(path, start=start, end=start + count))

    def forward() -> Iterator[Batch]:
        with files.open(path) as file:
            yield from read_pieces(file.read)

    return forward
