"""The manifest: the list of a dataset's shards. A dataset exists if and only if it has one; it is published last.

``manifest.json`` is a superset of the JSON that wids reads (``wids_version``, ``shardlist`` with ``url``,
``nsamples`` and ``filesize``), so that wids opens it as it is. While a dataset is being written, ``unfinished.json``
stands in its place.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from os import PathLike
from typing import Any

from shardkit.errors import DatasetError, UnfinishedDatasetError, can_be_a_path, check_path
from shardkit.storage.base import Storage, is_remote, join, read_right, split_url
from shardkit.storage.local import local_path
from shardkit.storage.registry import storage_for

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
UNFINISHED_NAME = "unfinished.json"
SHARD_SUFFIXES = (".tar", ".tar.zst", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")

_READ_BYTES = 1 << 20

_TYPES = {"fields": list, "classes": list, "columns": dict, "packed": dict, "unique_keys": bool, "block_samples": int}


@dataclass(frozen=True, slots=True)
class Shard:
    """A manifest's entry for one shard.

    Attributes:
        url: Where it is, relative to the manifest.
        samples: How many it has.
        file_size: Its size as stored, in bytes.
        tar_size: The uncompressed tar's size, in bytes.
        sha256: Of the uncompressed tar, in hexadecimal.
        compression: ``none``, ``zst``, ``gz``, ``bz2`` or ``xz``.
        blocks: How many blocks it has.
    """

    url: str
    samples: int
    file_size: int
    tar_size: int
    sha256: str
    compression: str
    blocks: int

    @property
    def index_url(self) -> str:
        """Where its index is, relative to the manifest."""
        return index_name(self.url)


@dataclass(frozen=True)
class Manifest:
    """What a dataset consists of.

    Attributes:
        shards: Its shards, in order.
        block_samples: How many samples a block has; a shard's last block may have fewer.
        fields: The fields that occur, sorted.
        unique_keys: Whether no key occurs twice in the dataset.
        classes: Names of the classes, by number; empty if they are not known.
        columns: The promoted columns of the indexes and their Arrow types.
        packed: How it was made, for people; empty if it was indexed.
        url: The folder that it was read from; not part of the file.

    Example:
        >>> shard = Shard("train-000000.tar", 2, 4096, 4096, "00" * 32, "none", 1)
        >>> manifest = Manifest((shard,), block_samples=16, fields=("txt",))
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
    url: str = field(default="", compare=False, repr=False)

    @cached_property
    def num_samples(self) -> int:
        """How many samples the dataset has."""
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

    def to_json(self) -> str:
        """Return the text of ``manifest.json``."""
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
                }
            )
            for s in self.shards
        ]
        text = json.dumps(head, indent=1, sort_keys=True)
        shardlist = ",\n  ".join(lines)
        return f'{text[:-2]},\n "shardlist": [\n  {shardlist}\n ]\n}}\n'

    @classmethod
    def from_json(cls, text: str | bytes, *, url: str = "", allow_any_url: bool = False) -> "Manifest":
        """Return the manifest that a text describes.

        Args:
            text: The content of a ``manifest.json``.
            url: The folder that it comes from, for messages and for its shards' URLs.
            allow_any_url: Accept shards outside that folder. Only for manifests whose author you trust.

        Raises:
            DatasetError: It is damaged, of an unknown version, does not match its digest, or names files outside its
                folder.
        """
        where = join(url, MANIFEST_NAME) if url else MANIFEST_NAME
        try:
            data = json.loads(text)
            version = (
                data["shardkit_version"]
                if "shardkit_version" in data or "wids_version" not in data
                else "none: wids wrote it"
            )
            if version != FORMAT_VERSION:
                raise DatasetError(
                    f"{where}: is of format version {version!r}, this shardkit reads version {FORMAT_VERSION}; "
                    "upgrade shardkit, or make it again with 'shardkit index'",
                    url=where,
                )
            _check_types(data)
            shards = tuple(
                Shard(s["url"], s["nsamples"], s["filesize"], s["tarsize"], s["sha256"], s["compression"], s["blocks"])
                for s in data["shardlist"]
            )
            manifest = cls(
                shards,
                data["block_samples"],
                tuple(data["fields"]),
                data["unique_keys"],
                tuple(data["classes"]),
                data["columns"],
                data["packed"],
                url,
            )
            is_true = (manifest.digest, manifest.num_samples) == (data["digest"], data["samples"])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
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
        for shard in shards:
            _check_url(shard.url, where, allow_any_url=allow_any_url)
        return manifest


def _check_types(data: dict[str, Any]) -> None:
    """Check that a manifest's values are what they should be. Raises KeyError, TypeError or ValueError."""
    for name, kind in _TYPES.items():
        if type(data[name]) is not kind:
            raise TypeError(f"{name} is {data[name]!r:.50}, expected {kind.__name__}")
    texts = [*data["fields"], *data["classes"], *data["columns"].values()]
    numbers = [data["block_samples"] - 1]
    for shard in data["shardlist"]:
        texts += (shard["url"], shard["sha256"], shard["compression"])
        numbers += (shard["nsamples"], shard["filesize"], shard["tarsize"], shard["blocks"])
    if not set(map(type, texts)) <= {str} or set(map(type, numbers)) != {int}:
        raise TypeError("a name is not text, or a number is not an integer")
    if min(numbers) < 0 or sum(numbers) >= 1 << 63:
        raise ValueError("a number is out of range")


def read_manifest(
    url: str | PathLike[str], *, storage_options: Mapping[str, object] | None = None, allow_any_url: bool = False
) -> Manifest:
    """Return the manifest of a dataset.

    Args:
        url: The dataset's folder, or its ``manifest.json``.
        storage_options: Passed to the storage.
        allow_any_url: Accept shards outside the folder. Only for manifests whose author you trust.

    Raises:
        UnfinishedDatasetError: The dataset is being written, or its writer was killed.
        DatasetError: There is no manifest, or it is not usable.

    Example:
        >>> read_manifest("no/such/folder")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        shardkit.errors.DatasetError: no/such/folder: does not exist, so it has no manifest.json; correct the path
    """
    url = check_path("url", url)
    folder, name = split_url(url)
    if not name.endswith(".json"):
        folder, name = url.rstrip("/") or url, MANIFEST_NAME
    storage = storage_for(folder, storage_options)
    check_finished(storage, folder)
    try:
        return load_manifest(storage, folder, name, allow_any_url=allow_any_url)
    except (FileNotFoundError, NotADirectoryError):
        raise _no_manifest(folder, name) from None


def _no_manifest(folder: str, name: str) -> DatasetError:
    """Return the error for a folder without a manifest: there may be no such folder, or datasets in it."""
    problem = f"has no {name}, so it is not a dataset; make one with 'shardkit index {folder}'"
    if not is_remote(folder):
        path = local_path(folder)
        inner = sorted(str(found.parent) for found in islice(path.glob(f"*/{MANIFEST_NAME}"), 10))
        if inner:
            problem = f"has no {name} itself; give one of the datasets in it: {', '.join(inner)}"
        elif not path.exists():
            problem = f"does not exist, so it has no {name}; correct the path"
    return DatasetError(f"{folder}: {problem}", url=folder)


def load_manifest(storage: Storage, folder: str, name: str, *, allow_any_url: bool) -> Manifest:
    """Return the manifest that stands in a folder under a name, whether the dataset is finished or not.

    Raises:
        DatasetError: It is not usable.
        FileNotFoundError: There is none.
    """
    url = join(folder, name)

    def read(*, fresh: bool) -> Manifest:
        text = read_whole(storage, url, fresh=fresh)
        return Manifest.from_json(text, url=folder, allow_any_url=allow_any_url)

    return read_right(url, read)


def check_finished(storage: Storage, folder: str) -> None:
    """Check that no unfinished dataset stands in a folder.

    Raises:
        UnfinishedDatasetError: One does.
    """
    try:
        storage.info(join(folder, UNFINISHED_NAME))
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # S3 forbids to know what does not exist
        return
    raise UnfinishedDatasetError(
        f"{folder}: is unfinished: it is being written, or its writer was stopped ({UNFINISHED_NAME} stands in it). "
        "Run the same pack again to go on, or delete the folder",
        url=folder,
    )


def find_names(storage: Storage, folder: str, names: Iterable[str]) -> list[str]:
    """Return which of some files there are in a folder that cannot be listed."""
    found = []
    for name in names:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # as in check_finished
            storage.info(join(folder, name))
            found.append(name)
    return found


def read_whole(storage: Storage, url: str, *, fresh: bool = False) -> bytes:
    """Return a small file's content."""
    stream = storage.open(url, fresh=fresh)
    try:
        pieces = list(iter(lambda: stream.read(_READ_BYTES), b""))
        return b"".join(pieces)
    finally:
        stream.close()


def write_whole(storage: Storage, url: str, data: bytes, *, overwrite: bool = False) -> None:
    """Publish a small file."""
    with storage.create(url, overwrite=overwrite) as file:
        file.write(data)


def strip_suffix(name: str) -> str:
    """Return a shard's name without ``.tar`` and what follows.

    Example:
        >>> strip_suffix("train-000000.tar.zst")
        'train-000000'
    """
    for suffix in SHARD_SUFFIXES:
        if name.lower().endswith(suffix):
            return name[: -len(suffix)]
    return name


def index_name(url: str) -> str:
    """Return where a shard's index is, relative to the manifest.

    That is beside the shard; for a shard outside the manifest's folder it is in that folder.

    Example:
        >>> index_name("a/train-000000.tar.zst"), index_name("../read-only/train-000000.tar")
        ('a/train-000000.parquet', 'train-000000.parquet')
    """
    return strip_suffix(url if _is_inside(url) else split_url(url)[1].rpartition("/")[2]) + ".parquet"


def _is_inside(url: str) -> bool:
    parts = url.replace("\\", "/").split("/")
    return parts[0] != "" and ":" not in parts[0] and ".." not in parts and not parts[0].startswith("-")


def _check_url(url: str, where: str, *, allow_any_url: bool) -> None:
    if not can_be_a_path(url):
        raise DatasetError(
            f"{where}: names the shard {url!r}, which no file can be called; it was edited or damaged, so fetch it "
            "again, or make it again with 'shardkit index'",
            url=where,
        )
    if not allow_any_url and not _is_inside(url):
        raise DatasetError(
            f"{where}: names the shard {url!r}, which is outside its folder; if you trust who wrote it, "
            "pass allow_any_url=True",
            url=where,
        )
