"""The record that a pack leaves in its folder, so that the same call continues it and another call refuses it."""

import hashlib
import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from shardkit.codecs.compress import Compression
from shardkit.errors import ArgumentError, DatasetError, DatasetExistsError
from shardkit.format.columns import Column
from shardkit.format.index import read_named_index
from shardkit.format.manifest import INDEX_FOLDER, MANIFEST_NAME, UNFINISHED_NAME, read_whole, write_whole
from shardkit.format.shard_writer import WrittenShard, written_shard
from shardkit.packing.records import SampleFunction, SampleTransform
from shardkit.packing.writer import check_folder, delete_others, list_indexes, own_names, prepare_folder, sweep
from shardkit.storage.base import Storage, join

_OTHER_SOURCE = "the source: samples were added, removed or changed since"


@dataclass(frozen=True)
class Request:
    """The arguments of a pack that, with the source, decide the shards' bytes."""

    shard_bytes: int
    shard_samples: int | None
    seed: int | None
    compression: str
    block_bytes: int
    columns: Mapping[str, Column]
    splits: Mapping[str, float] | None
    split_by: Callable[[str], str] | None
    transform: SampleTransform | None

    def __post_init__(self) -> None:
        if self.split_by is not None and not callable(self.split_by):
            raise ArgumentError(f"split_by is {self.split_by!r}, expected a function")
        if self.split_by is not None and self.splits is None:
            raise ArgumentError("split_by is given and splits is not; pass splits too")

    def describe(self) -> dict[str, Any]:
        """Return it as JSON; functions are described by their name and a hash of their code."""
        described = {name: getattr(self, name) for name in ("shard_bytes", "shard_samples", "seed", "compression")}
        return described | {
            "block_bytes": self.block_bytes,
            "columns": {name: c if isinstance(c, str) else describe_function(c) for name, c in self.columns.items()},
            "splits": None if self.splits is None else [[name, share] for name, share in self.splits.items()],
            "split_by": describe_function(self.split_by),
            "transform": describe_transform(self.transform),
        }


class Target:
    """One dataset's folder, and the record of an earlier pack there."""

    def __init__(self, storage: Storage, folder: str, request: Mapping[str, Any]) -> None:
        self.folder = folder
        self._request = request
        self._storage = storage
        self._earlier = self._read(UNFINISHED_NAME)
        self._unfinished = self._earlier is not None
        self._replace = False
        if self._earlier is None and (manifest := self._read(MANIFEST_NAME)) is not None:
            packed = manifest.get("packed")
            self._earlier = packed if isinstance(packed, dict) else {}

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            data = json.loads(read_whole(self._storage, join(self.folder, name)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, RecursionError):
            return {}
        return data if isinstance(data, dict) else {}

    def claim(self, *, resume: bool, overwrite: bool) -> None:
        """Check that this pack may write to the folder. Nothing is changed yet.

        Raises:
            DatasetExistsError: The folder has another dataset, or other files.
        """
        if self._earlier is None:
            refuse_others(self._storage, self.folder, overwrite=overwrite)
        earlier = self._earlier or {}
        same = self._is_same(earlier)
        if self._earlier is not None and resume and not overwrite:
            if same:
                return
            if not (self._unfinished and "request" in earlier and "plan" not in earlier):  # it wrote no shard yet
                raise self._refuse(_differences(earlier.get("request"), self._request))
            self._replace = True
        else:
            self._replace = overwrite or (self._unfinished and same)
        if not self._replace:
            check_folder(self._storage, self.folder)
        self._earlier = None
        self._unfinished = True

    def _is_same(self, earlier: Mapping[str, Any]) -> bool:
        """Return whether an earlier pack had the same arguments; a finished one may be of any version."""
        request = earlier.get("request")
        if isinstance(request, dict) and not self._unfinished and "source" in earlier:
            request = request | {"version": self._request["version"]}
        return bool(request == self._request)

    @property
    def exists(self) -> bool:
        """Whether there is a dataset, or an unfinished one."""
        return self._earlier is not None

    @property
    def is_finished(self) -> bool:
        """Whether an earlier call of the same pack finished it."""
        return self._earlier is not None and not self._unfinished

    def check_source(self, source: str) -> None:
        """Check that an earlier pack here, if there was one, had the source with this fingerprint.

        Raises:
            DatasetExistsError: It had another source.
        """
        if (self._earlier or {}).get("source", source) != source:
            raise self._refuse(_OTHER_SOURCE)

    def announce(self) -> None:
        """Mark an empty folder as unfinished before the plan is known."""
        if self._earlier is None and not self._replace:
            self._earlier = {"request": self._request}
            prepare_folder(self._storage, self.folder, self._earlier)

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Record which dataset is being written, and delete the dataset that it replaces.

        Raises:
            DatasetExistsError: An earlier pack here had another source. Nothing was changed.
        """
        if self._earlier is None:
            prepare_folder(self._storage, self.folder, plan, overwrite=self._replace)
        elif "plan" not in self._earlier:
            write_whole(self._storage, join(self.folder, UNFINISHED_NAME), json.dumps(plan).encode(), overwrite=True)
        elif self._earlier["plan"] != plan["plan"]:
            raise self._refuse(_differences(self._earlier.get("request"), self._request) or _OTHER_SOURCE)

    def clean(self, stems: Sequence[str], compression: Compression) -> dict[str, list[str]]:
        """Delete files of killed writers and replaced datasets; return the indexes that remain for each shard."""
        sweep(self.folder)
        found = list_indexes(self._storage, self.folder)
        indexes = {stem: found.get(stem, []) for stem in stems}
        keep = {stem + compression.suffix for stem in stems}
        keep |= {join(INDEX_FOLDER, name) for names in indexes.values() for name in names}
        delete_others(self._storage, self.folder, keep=keep)
        return indexes

    def finished_shard(
        self, stem: str, names: Sequence[str], compression: Compression, plan: str
    ) -> WrittenShard | None:
        """Return a shard that an earlier call of the same pack finished, by its indexes; None if there is none."""
        for name in names:
            try:
                index, facts = read_named_index(self._storage, self.folder, name)
                size = self._storage.info(join(self.folder, stem + compression.suffix)).size
            except (FileNotFoundError, DatasetError):
                pass
            else:
                if index.facts.plan == plan and size == index.facts.file_size:
                    return written_shard(index, facts)
            self._storage.delete(join(self.folder, f"{INDEX_FOLDER}/{name}"))
        return None

    def _refuse(self, what: str) -> DatasetExistsError:
        state = "an unfinished dataset" if self._unfinished else "a dataset"
        return DatasetExistsError(
            f"{self.folder}: holds {state} of another pack; what differs: {what}. Choose another folder, make the call "
            "that wrote it, or pass overwrite=True to replace it",
            url=self.folder,
        )


def refuse_dataset(storage: Storage, folder: str) -> None:
    """Check that a folder whose folders become datasets is not one itself. Raises DatasetExistsError."""
    names = storage.list(folder)
    for name in (MANIFEST_NAME, UNFINISHED_NAME):
        if name in names:
            raise DatasetExistsError(
                f"{folder}: is a dataset itself ({name} stands in it), so splits cannot be written below it; "
                "choose another folder, or delete it",
                url=folder,
            )


def refuse_others(storage: Storage, folder: str, *, overwrite: bool) -> None:
    """Check that a folder that is not a dataset is empty, so that a dataset is not mixed with other files.

    With ``overwrite``, other files may stay beside the dataset. But shards are replaced only if they belong to a
    dataset, because otherwise their origin is unknown.

    Raises:
        DatasetExistsError: The folder has other files, or shards of no dataset.
    """
    if own := own_names(storage, folder):
        raise DatasetExistsError(
            f"{folder}: holds shards that no manifest lists ({own[0]} among {len(own):,} files), and replaces none; "
            "choose another folder, move them, or make them a dataset with 'shardkit index'",
            url=folder,
        )
    names = [name for name in storage.list(folder) if not name.startswith(".")]
    if names and not overwrite:
        more = f" and {len(names) - 1:,} more" if names[1:] else ""
        raise DatasetExistsError(
            f"{folder}: holds {names[0]}{more}, and no dataset; choose an empty or a new folder, or pass "
            "overwrite=True to write shards beside what is there",
            url=folder,
        )


def refuse_other_splits(storage: Storage, folder: str, splits: Container[str]) -> None:
    """Check that a folder contains only datasets before the first datasets of splits are written into it.

    Raises:
        DatasetExistsError: It contains something else.
    """
    for name in storage.list(folder):
        if name not in splits and not name.startswith(".") and not _is_dataset(storage, join(folder, name)):
            raise DatasetExistsError(
                f"{folder}: holds {name}, which is no dataset; choose an empty or a new folder for the splits, "
                "or pass overwrite=True to have them beside what is there",
                url=folder,
            )


def _is_dataset(storage: Storage, folder: str) -> bool:
    try:
        return not {MANIFEST_NAME, UNFINISHED_NAME}.isdisjoint(storage.list(folder))
    except NotADirectoryError:
        return False


def check_apart(source: object, folders: Iterable[str]) -> None:
    """Check that no target is where the source is read from, because overwriting it would destroy the source.

    Raises:
        ArgumentError: A target is.
    """
    overlaps = getattr(source, "overlaps", None)
    for folder in folders:
        if overlaps is not None and overlaps(folder):
            raise ArgumentError(f"{folder}: is where the samples are read from; choose another folder")


def describe_function(function: object) -> str | None:
    """Return a function's name and a hash of its code, so that a resumed pack detects that it changed."""
    if function is None:
        return None
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    code = getattr(function, "__code__", None)
    return f"{name} {hashlib.sha256(_code(code)).hexdigest()[:16]}" if code is not None else name


def describe_transform(transform: SampleTransform | None) -> str | None:
    """Return the descriptions of a transform's functions, and the seed of their random numbers."""
    if transform is None:
        return None
    function: SampleFunction = transform.function
    if isinstance(function, Mapping):
        described = ", ".join(f"{field}: {describe_function(one)}" for field, one in function.items())
    else:
        described = str(describe_function(function))
    return described if transform.seed is None else f"{described}, rng of seed {transform.seed}"


def _code(code: CodeType) -> bytes:
    return b" ".join([code.co_code, repr(code.co_names).encode(), *map(_constant, code.co_consts)])


def _constant(value: object) -> bytes:
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, frozenset):  # its order is different in every process
        return b" ".join(sorted(map(_constant, value)))
    return b" ".join(map(_constant, value)) if isinstance(value, tuple) else repr(value).encode()


def _differences(earlier: object, request: Mapping[str, Any]) -> str:
    if not isinstance(earlier, dict) or not earlier:
        return "it was not written by this pack"
    names = [name for name in request if earlier.get(name) != request[name]]
    return ", ".join(f"{name} (there {earlier.get(name)!r}, here {request[name]!r})" for name in names)
