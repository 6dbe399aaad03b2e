"""List the unfinished uploads in a bucket (``shardkit uploads ls``) and delete them (``shardkit uploads abort``)."""

import time
from datetime import UTC, datetime
from typing import Annotated

import typer

from shardkit.cli.common import AsJson, StorageOptions, command, new_app, print_json, print_lines, read_storage_options
from shardkit.storage.s3.storage import S3Storage, find_uploads

Url = Annotated[str, typer.Argument(help="A folder or an object, for example s3://bucket/folder.")]

_HOUR = 3600.0

app = new_app("List or delete unfinished uploads to S3.")


@command(app)
def ls(url: Url, *, storage_option: StorageOptions = None, as_json: AsJson = False) -> None:
    """List uploads that were started and not finished.

    Each line has the time when the upload started, and the object's URL. Some may still be running.

    Example: shardkit uploads ls s3://bucket/train
    """
    found = find_uploads(url, S3Storage(read_storage_options(storage_option)))
    times = [datetime.fromtimestamp(upload.began, UTC).isoformat(timespec="seconds") for upload in found]
    if as_json:
        names = zip(found, times, strict=True)
        print_json([{"url": upload.url, "id": upload.id, "began": began} for upload, began in names])
    else:
        print_lines(f"{began}  {upload.url}" for upload, began in zip(found, times, strict=True))


@command(app)
def abort(
    url: Url,
    *,
    older_than: Annotated[
        float, typer.Option(metavar="HOURS", help="Keep uploads that started later; they may still be running.")
    ] = 24,
    storage_option: StorageOptions = None,
) -> None:
    """Delete the parts of uploads that were started and never finished.

    Objects are not touched. An upload that is still running fails.

    Example: shardkit uploads abort s3://bucket/train
    """
    storage = S3Storage(read_storage_options(storage_option))
    old = [u for u in find_uploads(url, storage) if time.time() - u.began >= older_than * _HOUR]
    for upload in old:
        storage.uploads.abort(upload)
    typer.echo(f"{url}: {len(old):,} uploads aborted")
