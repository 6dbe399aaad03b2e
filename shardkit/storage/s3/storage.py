"""Objects of S3 servers as files: read in ranges, written whole."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from shardkit.errors import ArgumentError, MissingFileError, NoListingError, NotAFolderError
from shardkit.storage.base import TEMPORARY_PREFIX, check_options, taken
from shardkit.storage.ranges import Ranges
from shardkit.storage.s3.client import Caller, RefusedError
from shardkit.storage.s3.session import OPTIONS, S3Options, S3Signer, split_s3
from shardkit.storage.s3.uploads import Upload, Uploads
from shardkit.storage.spool import spooled


class S3Storage(Ranges):
    """Files of S3 servers: ``s3://bucket/folder/name``.

    Args:
        options: See ``S3Options``.

    Raises:
        ArgumentError: An option is unknown or invalid.
        MissingExtraError: botocore is not installed.
    """

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        given: dict[str, Any] = dict(options or {})
        check_options("s3", given, OPTIONS)
        known = S3Options(**given)
        super().__init__(S3Signer(known))
        self._caller = Caller(known)
        self.uploads = Uploads(self._caller)

    @contextlib.contextmanager
    def create(self, url: str, *, overwrite: bool = False) -> Iterator[BinaryIO]:
        """See ``Storage.create``. The file stays on this machine's disk until it is complete."""
        if not split_s3(url)[1]:
            raise ArgumentError(f"{url}: is a bucket, not a file; write s3://bucket/name", url=url)
        if not overwrite and self.uploads.find(url) is not None:
            raise taken(url)
        with spooled(url) as file:
            yield file
            file.flush()
            self.uploads.publish(url, file, overwrite=overwrite)
        self.forget(url)

    def delete(self, url: str) -> None:
        """See ``Storage.delete``."""
        self.uploads.delete(url)
        self.forget(url)

    def list(self, url: str) -> list[str]:
        """See ``Storage.list``. Raises NoListingError if listing is denied."""
        bucket, key = split_s3(url)
        prefix = f"{key.rstrip('/')}/" if key else ""
        found: list[str] = []
        page: dict[str, Any] = {}
        doing = "its folder cannot be listed"
        while not page or page.get("IsTruncated"):
            token = {"ContinuationToken": page["NextContinuationToken"]} if page else {}
            try:
                parameters = {"Bucket": bucket, "Prefix": prefix, "Delimiter": "/", **token}
                page = self._caller.call("list_objects_v2", url, doing, parameters)
            except RefusedError as error:
                explained = error.explain(url, doing)
                raise NoListingError(str(explained), url=url) if error.status == 403 else explained from None
            found += [entry["Key"] for entry in page.get("Contents", ())]
            found += [entry["Prefix"].removesuffix("/") for entry in page.get("CommonPrefixes", ())]
        names = sorted(name.removeprefix(prefix) for name in found)
        if not names and key and not url.endswith("/"):
            with contextlib.suppress(MissingFileError):
                self.info(url)
                raise NotAFolderError(f"{url}: is a file, expected a folder; correct the URL", url=url)
        return [name for name in names if name and not name.startswith(TEMPORARY_PREFIX)]


def find_uploads(url: str, storage: S3Storage) -> list[Upload]:
    """Return the unfinished uploads to a folder or an object, the oldest first.

    Raises:
        ArgumentError: It is not an S3 URL.
        StorageError: The server does not list them.
    """
    if not url.lower().startswith("s3://"):
        raise ArgumentError(f"{url}: only S3 has unfinished uploads; write s3://bucket/folder", url=url)
    return sorted(storage.uploads.list(url), key=lambda upload: upload.began)
