"""The manifest: the list of a dataset's shards. A dataset exists if and only if it has one; it is published last.

``manifest.json`` is a superset of the JSON that wids reads (``wids_version``, ``shardlist`` with ``url``,
``nsamples`` and ``filesize``), so that wids can open it unchanged. While a dataset is being written, the folder has
``unfinished.json`` instead.

In format 2 it begins with its own CRC-32, and holds the size, the SHA-256 and the footer's CRC-32 of every index and
side file. So everything that is read from a dataset is compared with a checksum before it is parsed. Those files are
in ``__index__/``, which other programs skip when they look for shards. Their names contain a hash of their content, so
a new file never replaces one that is being read. Format 1 has its indexes beside the shards and no such checksums; it
can still be read, but is no longer written.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from os import PathLike
from typing import Any

from isal.isal_zlib import crc32

from shardkit.errors import (
    ArgumentError,
    DatasetError,
    UnfinishedDatasetError,
    can_be_a_path,
    check_path,
    hide_secrets,
)
from shardkit.format.parquet import FileFacts
from shardkit.storage.base import Storage, format_bytes, is_remote, is_web, join, read_right, split_url
from shardkit.storage.local import local_path
from shardkit.storage.registry import storage_for

FORMAT_VERSION = 2
INDEX_FOLDER = "__index__"
MANIFEST_NAME = "manifest.json"
UNFINISHED_NAME = "unfinished.json"
SHARD_SUFFIXES = (".tar", ".tar.zst", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")

MAX_MANIFEST_BYTES = 256_000_000
"""The largest size of a manifest in bytes: enough for about 600,000 shards."""

_READ_BYTES = 1 << 20
_BYTES_A_VALUE = 12  # the least average bytes of JSON per value; a shard's entry has 25 per value
_SOME_VALUES = 100_000  # accepted in a manifest of any size
_CRC32 = b'{\n "crc32": "'
_CRC32_AT = slice(len(_CRC32), len(_CRC32) + 8)
_TAR_SUM_AT = slice(148, 156)  # as in every tar header
_HEAD_BYTES = 512
_SHORT_HASH = 16
_HEXADECIMAL = frozenset("0123456789abcdef")

_TYPES = {"fields": list, "classes": list, "columns": dict, "packed": dict, "unique_keys": bool, "block_samples": int}


@dataclass(frozen=True, slots=True)
class Shard:
    """A manifest's entry for one shard.

    Attributes:
        url: The shard's URL, relative to the manifest.
        samples: The number of samples.
        file_size: Its size as stored, in bytes.
        tar_size: The uncompressed tar's size, in bytes.
        sha256: The SHA-256 of the uncompressed tar, in hexadecimal.
        compression: ``none``, ``zst``, ``gz``, ``bz2`` or ``xz``.
        blocks: The number of blocks.
        blocks_crc32: The CRC-32 of its rows in the file of block tables; None in format 1.
        index: The facts of its index; None in format 1.
    """

    url: str
    samples: int
    file_size: int
    tar_size: int
    sha256: str
    compression: str
    blocks: int
    blocks_crc32: int | None = None
    index: FileFacts | None = None

    @property
    def index_url(self) -> str:
        """Its index's URL, relative to the manifest."""
        return index_name(self.url) if self.index is None else index_file_name(self.url, self.index.sha256)

    @property
    def is_block_readable(self) -> bool:
        """Whether its compression allows reading a block without the bytes before it."""
        return self.compression in ("none", "zst")


@dataclass(frozen=True)
class Manifest:
    """The list of a dataset's shards, and the facts of the whole dataset.

    Attributes:
        shards: Its shards, in order.
        block_samples: The number of samples in a block; a shard's last block may have fewer.
        fields: The fields that occur, sorted.
        unique_keys: Whether no key occurs twice in the dataset.
        classes: Names of the classes, by number; empty if they are not known.
        columns: The promoted columns of the indexes and their Arrow types.
        packed: How it was packed, for people; empty if it was made by indexing.
        block_file: The facts of the file with the block tables of all shards; None in format 1.
        column_file: The facts of the file with the promoted columns of all samples; None in format 1 and without
            promoted columns.
        version: The version of the format: 1 or 2.
        url: The folder that it was read from; not part of the file.

    Example:
        >>> file = FileFacts(2000, "00" * 32, 900, 7, 4096)
        >>> shard = Shard("train-000000.tar", 2, 4096, 4096, "00" * 32, "none", 1, 8, file)
        >>> manifest = Manifest((shard,), block_samples=16, fields=("txt",), block_file=FileFacts(228, "00" * 32))
        >>> Manifest.from_json(manifest.to_json()) == manifest
        True
    """

    shards: tuple[Shard, ...]
    block_samples: int
    fields: tuple[str, ...]
    unique_keys: bool = True
    classes: tuple[str, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    packed: Mapping[str, object] = field(default_factory=dict)
    block_file: FileFacts | None = None
    column_file: FileFacts | None = None
    version: int = FORMAT_VERSION
    url: str = field(default="", compare=False, repr=False)

    def __repr__(self) -> str:
        url, shards, classes = hide_secrets(self.url), len(self.shards), len(self.classes)
        of_classes = f" of {classes:,} classes" if classes else ""
        held = f"{self.num_samples:,} samples{of_classes} in {shards:,} shards"
        return f"Manifest({url!r}, {held}, fields={', '.join(self.fields)})"

    @cached_property
    def num_samples(self) -> int:
        """The number of samples in the dataset."""
        return sum(shard.samples for shard in self.shards)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the shards' names, numbers of samples and checksums, in order.

        It does not change when a dataset is moved, compressed in another way, or indexed again.
        """
        digest = hashlib.sha256(b"shardkit dataset 1\n")
        for shard in self.shards:
            name = strip_suffix(split_url(shard.url)[1])
            digest.update(f"{name}\t{shard.samples}\t{shard.sha256}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    @property
    def request(self) -> Mapping[str, Any]:
        """The arguments of the pack that made the dataset; empty if they are not known."""
        request = self.packed.get("request")
        return request if isinstance(request, dict) else {}

    @property
    def block_file_url(self) -> str:
        """The URL of the file of block tables, relative to the manifest."""
        return f"{INDEX_FOLDER}/blocks.{self.block_file.sha256[:_SHORT_HASH]}.npy" if self.block_file else ""

    @property
    def column_file_url(self) -> str:
        """The URL of the file of promoted columns, relative to the manifest."""
        return f"{INDEX_FOLDER}/columns.{self.column_file.sha256[:_SHORT_HASH]}.parquet" if self.column_file else ""

    def to_json(self) -> str:
        """Return the text of ``manifest.json``, in format 2."""
        head = {
            "shardkit_version": FORMAT_VERSION,
            "wids_version": 1,
            "digest": self.digest,
            "samples": self.num_samples,
            "block_samples": self.block_samples,
            "fields": list(self.fields),
            "unique_keys": self.unique_keys,
            "classes": list(self.classes),
            "columns": dict(self.columns),
            "packed": dict(self.packed),
            "block_file": self.block_file and asdict(self.block_file),
            "column_file": self.column_file and asdict(self.column_file),
        }
        lines = [
            json.dumps(
                {
                    "url": s.url,
                    "nsamples": s.samples,
                    "filesize": s.file_size,
                    "tarsize": s.tar_size,
                    "sha256": s.sha256,
                    "compression": s.compression,
                    "blocks": s.blocks,
                    "blocks_crc32": s.blocks_crc32,
                    "index": s.index and asdict(s.index),
                }
            )
            for s in self.shards
        ]
        text = json.dumps(head, indent=1, sort_keys=True)
        shardlist = ",\n  ".join(lines)
        return _sealed(f'{text[1:-2]},\n "shardlist": [\n  {shardlist}\n ]\n}}\n'.encode()).decode()

    @classmethod
    def from_json(cls, text: str | bytes, *, url: str = "", allow_any_url: bool = False) -> "Manifest":
        """Return the manifest with this content.

        Args:
            text: The content of a ``manifest.json``.
            url: The folder that it comes from, for messages and for its shards' URLs.
            allow_any_url: Accept shards outside that folder. Only for manifests whose author you trust.

        Raises:
            DatasetError: It is damaged, of an unknown version, does not match its checksum or its digest, or names
                files outside its folder.
        """
        where = join(url, MANIFEST_NAME) if url else MANIFEST_NAME
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        try:
            _check_text(data)
            described = json.loads(data)
            version = described.get("shardkit_version", "none: wids wrote it" if "wids_version" in described else None)
            if version not in (1, FORMAT_VERSION):
                raise DatasetError(
                    f"{where}: is of format version {version!r}, this shardkit reads versions 1 to {FORMAT_VERSION}; "
                    "upgrade shardkit, or make it again with 'shardkit index'",
                    url=where,
                )
            manifest = _parse(described, url, has_crc32=data.startswith(_CRC32))
            is_true = (manifest.digest, manifest.num_samples) == (described["digest"], described["samples"])
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise DatasetError(
                f"{where}: is not a manifest of shardkit ({type(error).__name__}: {error}); "
                "fetch it again, or make it again with 'shardkit index'",
                url=where,
            ) from error
        if not is_true:
            raise DatasetError(
                f"{where}: does not match its own digest; it was edited or damaged. Fetch it again, or make it again "
                "with 'shardkit index'",
                url=where,
            )
        for shard in manifest.shards:
            _check_url(shard.url, where, allow_any_url=allow_any_url)
        return manifest


def _sealed(rest: bytes) -> bytes:
    """Return the text of a manifest: its first 512 bytes, which contain its checksum, and then ``rest``.

    The first 512 bytes are JSON, and also the header of a tar member of a private type whose data is ``rest``. So
    programs that open all files of a folder as tars (Ray Data) find no regular member in the manifest, and continue.
    """
    rest += b"\n" * (-len(rest) % _HEAD_BYTES)
    name = _CRC32 + bytes(8) + b'",\n "tar_header": "'
    numbers = b"0000644 0000000 0000000 %011o 00000000000 " % len(rest)
    head = bytearray((name.ljust(100) + numbers + bytes(8) + b'Z",').ljust(_HEAD_BYTES - 1) + b"\n")
    head[_CRC32_AT] = b"%08x" % _crc32_of(head + rest)
    head[_TAR_SUM_AT] = _tar_sum(head)
    return bytes(head + rest)


def _crc32_of(data: bytes | bytearray) -> int:
    """Return the CRC-32 of a manifest; its own digits and the tar header's checksum count as 0."""
    head = bytearray(data[:_HEAD_BYTES])
    head[_CRC32_AT] = head[_TAR_SUM_AT] = bytes(8)
    return int(crc32(memoryview(data)[_HEAD_BYTES:], crc32(head)))


def _tar_sum(head: bytes | bytearray) -> bytes:
    return b"%07o " % (sum(head) - sum(head[_TAR_SUM_AT]) + sum(b" " * 8))


def _check_text(data: bytes) -> None:
    """Check a manifest's size, number of values and checksum before it is parsed. Raises ValueError."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise ValueError(f"it has {format_bytes(len(data))}, expected at most {format_bytes(MAX_MANIFEST_BYTES)}")
    head = data[:_HEAD_BYTES]
    if data.startswith(_CRC32) and (
        len(head) < _HEAD_BYTES or head[_CRC32_AT] != b"%08x" % _crc32_of(data) or head[_TAR_SUM_AT] != _tar_sum(head)
    ):
        raise ValueError("it does not match its own checksum, so it was edited or damaged")
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values > _SOME_VALUES + len(data) // _BYTES_A_VALUE:
        raise ValueError(f"it has {values:,} values, far more than its shards need")


def _parse(data: dict[str, Any], url: str, *, has_crc32: bool) -> Manifest:
    """Return the manifest that a JSON object describes. Raises KeyError, TypeError or ValueError."""
    version = data["shardkit_version"]
    if has_crc32 != (version > 1):
        raise ValueError("its first line does not match its format")
    _check_types(data)
    shards = tuple(
        Shard(
            s["url"],
            s["nsamples"],
            s["filesize"],
            s["tarsize"],
            s["sha256"],
            s["compression"],
            s["blocks"],
            *(() if version == 1 else (s["blocks_crc32"], FileFacts(**s["index"]))),
        )
        for s in data["shardlist"]
    )
    block_file = None if version == 1 else FileFacts(**data["block_file"])
    column_file = None if version == 1 or data["column_file"] is None else FileFacts(**data["column_file"])
    if bool(data["columns"]) != (column_file is not None) and version > 1:
        raise ValueError("it has columns without their file, or the file without columns")
    return Manifest(
        shards,
        data["block_samples"],
        tuple(data["fields"]),
        data["unique_keys"],
        tuple(data["classes"]),
        data["columns"],
        data["packed"],
        block_file,
        column_file,
        version,
        url,
    )


def _check_types(data: dict[str, Any]) -> None:
    """Check the types and ranges of a manifest's values. Raises KeyError, TypeError or ValueError."""
    for name, kind in _TYPES.items():
        if type(data[name]) is not kind:
            raise TypeError(f"{name} is {data[name]!r:.50}, expected {kind.__name__}")
    texts = [*data["fields"], *data["classes"], *data["columns"].values()]
    numbers = [data["block_samples"] - 1]
    files = [data[name] for name in ("block_file", "column_file") if data.get(name) is not None]
    for shard in data["shardlist"]:
        texts += (shard["url"], shard["sha256"], shard["compression"])
        numbers += (shard["nsamples"], shard["filesize"], shard["tarsize"], shard["blocks"])
        if "index" in shard:
            files.append(shard["index"])
            numbers.append(shard["blocks_crc32"])
    for file in files:
        texts.append(file["sha256"])
        numbers += [value for name, value in file.items() if name != "sha256"]
    if not set(map(type, texts)) <= {str} or set(map(type, numbers)) != {int}:
        raise TypeError("a name is not text, or a number is not an integer")
    if min(numbers) < 0 or sum(numbers) >= 1 << 63:
        raise ValueError("a number is out of range")
    if not all(len(sha) == 64 and _HEXADECIMAL.issuperset(sha) for sha in (file["sha256"] for file in files)):
        raise ValueError("a SHA-256 is not 64 hexadecimal digits")


def read_manifest(
    url: str | PathLike[str],
    *,
    digest: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    allow_any_url: bool = False,
) -> Manifest:
    """Return the manifest of a dataset.

    Args:
        url: The dataset's folder, or its ``manifest.json``.
        digest: The digest of the expected dataset. If a newer dataset has replaced it, the manifest that is kept under
            this digest is read.
        storage_options: Passed to the storage.
        allow_any_url: Accept shards outside the folder. Only for manifests whose author you trust.

    Raises:
        UnfinishedDatasetError: The dataset is being written, or its writer was killed.
        DatasetError: There is no manifest, it is not usable, or its dataset has another digest.
        ArgumentError: ``digest`` is not a digest.

    Example:
        >>> read_manifest("no/such/folder")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        shardkit.errors.DatasetError: no/such/folder: does not exist, so it has no manifest.json; correct the path
    """
    url = check_path("url", url)
    folder, name = split_url(url)
    if not name.endswith(".json"):
        folder, name = url.rstrip("/") or url, MANIFEST_NAME
    if digest is not None and not (isinstance(digest, str) and len(digest) == 64 and _HEXADECIMAL.issuperset(digest)):
        raise ArgumentError(f"digest is {digest!r:.100}, expected the 64 hexadecimal digits of a Manifest.digest")
    storage = storage_for(folder, storage_options)
    check_finished(storage, folder)
    try:
        manifest = load_manifest(storage, folder, name, allow_any_url=allow_any_url)
    except (FileNotFoundError, NotADirectoryError):
        raise _no_manifest(folder, name) from None
    if digest in (None, manifest.digest):
        return manifest
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # as in check_finished
        earlier = load_manifest(storage, folder, version_name(digest), allow_any_url=allow_any_url)
        if earlier.digest == digest:
            return earlier
    raise DatasetError(
        f"{folder}: is the dataset {manifest.digest}, expected {digest}; it was replaced, or is another one. Check "
        "what has changed before you pass its digest",
        url=folder,
    )


def _no_manifest(folder: str, name: str) -> DatasetError:
    """Return the error for a folder without a manifest: it may not exist, or its folders may be datasets."""
    problem = f"has no {name}, so it is not a dataset; make one with 'shardkit index {folder}'"
    if is_web(folder):  # whose files cannot be listed, and where nothing can be written
        problem = f"has no {name}, so it is not a dataset; run 'shardkit index' where the shards come from, and upload "
        problem += "what it writes, or index a pattern of their names, with --out for a folder of yours"
    elif not is_remote(folder):
        path = local_path(folder)
        inner = sorted(str(found.parent) for found in islice(path.glob(f"*/{MANIFEST_NAME}"), 10))
        if inner:
            problem = f"has no {name} itself; give one of the datasets in it: {', '.join(inner)}"
        elif not path.exists():
            problem = f"does not exist, so it has no {name}; correct the path"
    return DatasetError(f"{folder}: {problem}", url=folder)


def load_manifest(storage: Storage, folder: str, name: str, *, allow_any_url: bool) -> Manifest:
    """Return the manifest that a folder has under a name, whether the dataset is finished or not.

    Raises:
        DatasetError: It is not usable.
        FileNotFoundError: There is no such file.
    """
    url = join(folder, name)

    def read(*, fresh: bool) -> Manifest:
        text = read_whole(storage, url, fresh=fresh)
        return Manifest.from_json(text, url=folder, allow_any_url=allow_any_url)

    return read_right(url, read)


def check_finished(storage: Storage, folder: str, *, by_pack: bool = False) -> None:
    """Check that a folder has no unfinished dataset.

    Args:
        storage: Serves the folder.
        folder: The folder.
        by_pack: Refuse only what ``pack`` left. Accept the shards of a ``ShardWriter``, which can be made a dataset,
            unless it has not yet deleted the dataset that it replaces.

    Raises:
        UnfinishedDatasetError: It has one.
    """
    url = join(folder, UNFINISHED_NAME)
    try:
        storage.info(url)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # S3 may deny access to a file that does not exist
        return
    marker = read_writer_marker(storage, folder)
    if marker is None:
        writer, advice = "pack", "run the same pack again to continue, or pass overwrite=True to start over"
    elif marker.get("replaces"):
        writer, advice = "ShardWriter", "start over with ShardWriter(..., resume=True)"
    elif by_pack:
        return
    else:
        writer, advice = (
            "ShardWriter",
            (
                f"continue with ShardWriter(..., resume=True), or run 'shardkit index {folder}' to make a dataset of "
                "the complete shards"
            ),
        )
    raise UnfinishedDatasetError(
        f"{folder}: is unfinished: it is being written, or its {writer} was stopped (it has a {UNFINISHED_NAME}). "
        f"If nobody is writing it, {advice}",
        url=folder,
    )


def read_writer_marker(storage: Storage, folder: str) -> dict[str, Any] | None:
    """Return what a ``ShardWriter`` has recorded of the unfinished dataset in a folder; None if there is none.

    This is ``classes``, its class names, and ``replaces``: whether shards of a dataset that it replaces may be there.
    """
    try:
        marker = json.loads(read_whole(storage, join(folder, UNFINISHED_NAME)))
    except (FileNotFoundError, NotADirectoryError, PermissionError, DatasetError, ValueError, RecursionError):
        return None
    return marker if isinstance(marker, dict) and marker.get("writer") == "ShardWriter" else None


def find_names(storage: Storage, folder: str, names: Iterable[str]) -> list[str]:
    """Return those of the given names that exist in a folder that cannot be listed."""
    found = []
    for name in names:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # as in check_finished
            storage.info(join(folder, name))
            found.append(name)
    return found


def read_whole(storage: Storage, url: str, *, most: int = MAX_MANIFEST_BYTES, fresh: bool = False) -> bytes:
    """Return a small file's content.

    Raises:
        DatasetError: It has more than ``most`` bytes.
    """
    stream = storage.open(url, fresh=fresh)
    try:
        pieces = []
        size = stream.size or 0
        while size <= most and (piece := stream.read(_READ_BYTES)):
            pieces.append(piece)
            size = max(size, sum(map(len, pieces)))
        if size > most:
            raise DatasetError(
                f"{url}: has {format_bytes(size)}, expected at most {format_bytes(most)}; shardkit did not write it",
                url=url,
            )
        return b"".join(pieces)
    finally:
        stream.close()


def write_whole(storage: Storage, url: str, data: bytes, *, overwrite: bool = False) -> None:
    """Publish a small file."""
    with storage.create(url, overwrite=overwrite) as file:
        file.write(data)


def strip_suffix(name: str) -> str:
    """Return a shard's name without ``.tar`` and everything after it.

    Example:
        >>> strip_suffix("train-000000.tar.zst")
        'train-000000'
    """
    for suffix in SHARD_SUFFIXES:
        if name.lower().endswith(suffix):
            return name[: -len(suffix)]
    return name


def index_name(url: str) -> str:
    """Return the URL of a shard's index in format 1, relative to the manifest.

    The index is beside the shard; for a shard outside the manifest's folder it is in the manifest's folder.

    Example:
        >>> index_name("a/train-000000.tar.zst"), index_name("../read-only/train-000000.tar")
        ('a/train-000000.parquet', 'train-000000.parquet')
    """
    return strip_suffix(url if _is_inside(url) else split_url(url)[1].rpartition("/")[2]) + ".parquet"


def index_file_name(url: str, sha256: str) -> str:
    """Return the URL of a shard's index in format 2, relative to the manifest; its name changes with its content.

    Example:
        >>> index_file_name("a/train-000000.tar.zst", "0123456789abcdef" * 4)
        '__index__/train-000000.0123456789abcdef.parquet'
    """
    stem = strip_suffix(split_url(url)[1].rpartition("/")[2])  # the name in a web address may have slashes
    return f"{INDEX_FOLDER}/{stem}.{sha256[:_SHORT_HASH]}.parquet"


def version_name(digest: str) -> str:
    """Return the URL of the manifest that is kept under a digest, relative to ``manifest.json``.

    Example:
        >>> version_name("0123456789abcdef" * 4)
        '__index__/manifest-0123456789abcdef.json'
    """
    return f"{INDEX_FOLDER}/manifest-{digest[:_SHORT_HASH]}.json"


def _is_inside(url: str) -> bool:
    parts = url.replace("\\", "/").split("/")
    return parts[0] != "" and ":" not in parts[0] and ".." not in parts and not parts[0].startswith("-")


def _check_url(url: str, where: str, *, allow_any_url: bool) -> None:
    if not can_be_a_path(url):
        raise DatasetError(
            f"{where}: names the shard {url!r}, which cannot be a file's name; it was edited or damaged, so fetch it "
            "again, or make it again with 'shardkit index'",
            url=where,
        )
    if not allow_any_url and not _is_inside(url):
        raise DatasetError(
            f"{where}: names the shard {url!r}, which is outside its folder; if you trust who wrote it, "
            "pass allow_any_url=True",
            url=where,
        )
