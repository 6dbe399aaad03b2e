"""Local files -> objects of S3, whole or not at all, and compared afterwards; and the remains of killed uploads.

A file is sent in one request, or in parts that become an object when the last request completes it. Each request
carries an MD5 that the server checks. If an answer is lost, it is unknown what the server has done, so the stored
object is compared with the file: by its size, and by the SHA-256 that is sent with it.
"""

import contextlib
import hashlib
import logging
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from shardkit.errors import StorageError, hide_secrets
from shardkit.storage.base import taken
from shardkit.storage.s3.client import Caller, RefusedError
from shardkit.storage.s3.session import split_s3

ONE_REQUEST_BYTES = 64 << 20
"""The largest file that is sent in one request."""

PART_BYTES = 16 << 20
"""The size of parts, unless there would be more than S3's limit of 10 000."""

_MAX_PARTS = 10_000
_SENDS = 3  # tries to send a file, if the server stores something different
_SHA256 = "shardkit-sha256"
_MD5 = re.compile(r'"[0-9a-f]{32}(-\d+)?"\Z')

_logger = logging.getLogger("shardkit")


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload that was neither completed nor aborted; its parts take up room.

    Attributes:
        url: The URL that the object would have.
        id: S3's id of the upload.
        began: When it began, in seconds since 1970.
    """

    url: str
    id: str
    began: float


@dataclass(frozen=True, slots=True)
class _Content:
    """What is known about a file before it is sent."""

    size: int
    sha256: str
    md5s: tuple[bytes, ...]  # of the parts, or of the file if it is sent in one request
    part_size: int

    @classmethod
    def of(cls, file: BinaryIO) -> "_Content":
        size = file.seek(0, 2)
        one = size <= ONE_REQUEST_BYTES
        part_size = max(1, size) if one else max(PART_BYTES, -(-size // _MAX_PARTS))
        sha256, md5s = hashlib.sha256(), []
        file.seek(0)
        for _ in range(0, max(1, size), part_size):
            data = file.read(part_size)
            sha256.update(data)
            md5s.append(_md5(data))
        return cls(size, sha256.hexdigest(), tuple(md5s), part_size)

    @property
    def has_parts(self) -> bool:
        return self.size > ONE_REQUEST_BYTES

    def md5(self, number: int) -> str:
        """Return the MD5 of a part in the form in which it is sent, by its number from 1."""
        return b64encode(self.md5s[number - 1]).decode()

    @property
    def etag(self) -> str:
        """The ETag of the object, on servers that compute it from MD5s."""
        if not self.has_parts:
            return f'"{self.md5s[0].hex()}"'
        return f'"{_md5(b"".join(self.md5s)).hex()}-{len(self.md5s)}"'

    def is_same(self, found: dict[str, Any]) -> bool:
        """Return whether an object's metadata says that it is this file."""
        named = {name.lower(): value for name, value in found.get("Metadata", {}).items()}
        return found["ContentLength"] == self.size and named.get(_SHA256) == self.sha256

    def differs(self, found: dict[str, Any]) -> str:
        """Return how an object differs from this file; empty if no difference is visible."""
        if found["ContentLength"] != self.size:
            return f"it has {found['ContentLength']:,} bytes, {self.size:,} were sent"
        if _MD5.match(found["ETag"]) and found["ETag"] != self.etag:
            return f"its ETag is {found['ETag']}, {self.etag} was sent"
        return ""


class Uploads:
    """Publishes files as objects.

    Args:
        caller: Calls S3 operations.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._has_conditions = True  # until a server says that it does not support them

    def find(self, url: str) -> dict[str, Any] | None:
        """Return S3's metadata of an object; None if there is no object.

        Raises:
            StorageError: S3 does not return it.
        """
        return self._caller.call_if_there("head_object", url, "cannot be looked for", _place(url))

    def publish(self, url: str, file: BinaryIO, *, overwrite: bool) -> None:
        """Send a file, and then compare the stored object with it.

        Raises:
            DatasetExistsError: There is an object of that name with other content, and ``overwrite`` is False.
            StorageError: It could not be sent. Then there is no object, or the old one, or in rare cases the new one.
        """
        content = _Content.of(file)
        problem = ""
        for _ in range(_SENDS):
            self._send(url, file, content, overwrite=overwrite or bool(problem))
            found = self.find(url)
            problem = content.differs(found) if found else "it is not there"
            if not problem:
                return
            _logger.warning("%s: what is stored is not what was sent: %s; sending it again", hide_secrets(url), problem)
        self.delete(url)
        raise StorageError(
            f"{url}: what is stored is not what was sent: {problem}; it was deleted. Look for what changes data on its "
            "way to the server",
            url=url,
        )

    def _send(self, url: str, file: BinaryIO, content: _Content, *, overwrite: bool) -> None:
        """Send a file once, or find that it was sent although the answer was lost."""
        for _ in range(_SENDS):
            is_conditional = self._has_conditions and not overwrite
            condition = {"IfNoneMatch": "*"} if is_conditional else {}
            try:
                if content.has_parts:
                    self._send_parts(url, file, content, condition)
                else:
                    self._send_whole(url, file, content, condition)
            except RefusedError as error:
                if self._is_there(url, content):
                    return
                if is_conditional and _knows_no_conditions(error):
                    self._has_conditions = False
                elif is_conditional and error.status == 412:
                    raise taken(url) from None
                elif error.status != 409:  # 409: another client wrote it at the same time, so try again
                    raise error.explain(url, "cannot be written") from None
            except StorageError:
                if not self._is_there(url, content):
                    raise
                return
            else:
                return
        raise StorageError(f"{url}: other clients are writing it now; choose another name, or wait for them", url=url)

    def _is_there(self, url: str, content: _Content) -> bool:
        found = self.find(url)
        return found is not None and content.is_same(found)

    def _send_whole(self, url: str, file: BinaryIO, content: _Content, condition: dict[str, str]) -> None:
        def body() -> BinaryIO:
            file.seek(0)
            return file

        self._caller.call(
            "put_object",
            url,
            "cannot be written",
            {**_place(url), **condition, "ContentMD5": content.md5(1), "Metadata": {_SHA256: content.sha256}},
            attempts=self._caller.attempts(url, content.size),
            body=body,
        )

    def _send_parts(self, url: str, file: BinaryIO, content: _Content, condition: dict[str, str]) -> None:
        doing = "cannot be written"
        attempts = self._caller.attempts(url)
        metadata = {"Metadata": {_SHA256: content.sha256}}
        begun = self._caller.call("create_multipart_upload", url, doing, {**_place(url), **metadata}, attempts=attempts)
        place = {**_place(url), "UploadId": begun["UploadId"]}
        try:
            if attempts.failures:
                self._abort_others(url, begun["UploadId"])  # an answer, and with it an upload's id, may have been lost
            numbers = range(1, len(content.md5s) + 1)
            parts = [{"PartNumber": n, "ETag": self._send_part(url, file, content, n, place)} for n in numbers]
            whole = {**place, **condition, "MultipartUpload": {"Parts": parts}}
            self._caller.call("complete_multipart_upload", url, doing, whole)
        except BaseException:
            with contextlib.suppress(RefusedError, StorageError):  # a completed upload cannot be aborted
                self._caller.call("abort_multipart_upload", url, "its upload cannot be aborted", place)
            raise

    def _send_part(self, url: str, file: BinaryIO, content: _Content, number: int, place: Mapping[str, str]) -> str:
        """Send one part, and return its ETag."""
        file.seek((number - 1) * content.part_size)
        data, md5 = file.read(content.part_size), content.md5s[number - 1]
        if _md5(data) != md5:
            raise StorageError(f"{url}: the file was changed while it was being sent; write it again", url=url)
        for _ in range(_SENDS):
            sent = self._caller.call(
                "upload_part",
                url,
                "cannot be written",
                {**place, "PartNumber": number, "ContentMD5": content.md5(number)},
                attempts=self._caller.attempts(url, len(data)),
                body=lambda: data,
            )
            etag: str = sent["ETag"]
            if not _MD5.match(etag) or etag == f'"{md5.hex()}"':
                return etag
        raise StorageError(
            f"{url}: part {number:,} is not stored as it was sent; look for what changes data on its way",
            url=url,
        )

    def delete(self, url: str) -> None:
        """Delete an object; nothing happens if there is none."""
        self._caller.call_if_there("delete_object", url, "cannot be deleted", _place(url))

    def list(self, url: str) -> Iterator[Upload]:
        """Yield the unfinished multipart uploads to a folder or an object.

        Raises:
            StorageError: The server does not list them.
        """
        bucket, key = split_s3(url)
        doing = "its unfinished uploads cannot be listed"
        marker: dict[str, str] = {}
        while True:
            try:
                parameters = {"Bucket": bucket, "Prefix": key, **marker}
                page = self._caller.call("list_multipart_uploads", url, doing, parameters)
            except RefusedError as error:
                raise error.explain(url, doing) from None
            for found in page.get("Uploads", ()):
                yield Upload(f"s3://{bucket}/{found['Key']}", found["UploadId"], found["Initiated"].timestamp())
            if not page.get("IsTruncated"):
                return
            marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def abort(self, upload: Upload) -> None:
        """Abort an upload, so that its parts are deleted; nothing happens if it no longer exists.

        Raises:
            StorageError: The server does not abort it.
        """
        doing = f"its upload {upload.id} cannot be aborted"
        place = {**_place(upload.url), "UploadId": upload.id}
        self._caller.call_if_there("abort_multipart_upload", upload.url, doing, place)

    def _abort_others(self, url: str, upload_id: str) -> None:
        for upload in self.list(url):
            if upload.url == url and upload.id != upload_id:
                self.abort(upload)


def _knows_no_conditions(error: RefusedError) -> bool:
    """Return whether a server refuses a request because it does not support conditions, as Swift and old servers do."""
    return error.status in (400, 501) or (error.status == 412 and error.refusal.code != "PreconditionFailed")


def _place(url: str) -> dict[str, str]:
    bucket, key = split_s3(url)
    return {"Bucket": bucket, "Key": key}


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()
