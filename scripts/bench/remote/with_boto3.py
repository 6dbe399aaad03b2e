"""boto3: the body of ``get_object``."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from loading.job import Batch, Job, Passes

from remote.pieces import read_pieces

PACKAGES = ("boto3",)


def make_client(options: dict[str, Any]) -> Any:
    """Return a client for storage options."""
    region = options["client_kwargs"]["region_name"]
    session = import_module("boto3").session.Session(options["key"], options["secret"], region_name=region)
    return session.client("s3", endpoint_url=options["endpoint_url"])


def open_passes(job: Job) -> Passes:
    """Return a function that reads the file once."""
    client = make_client(job.options["storage_options"])
    bucket, _, key = job.options["url"].removeprefix("s3://").partition("/")

    def forward() -> Iterator[Batch]:
        yield from read_pieces(client.get_object(Bucket=bucket, Key=key)["Body"].read)

    return forward
