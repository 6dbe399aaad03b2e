"""What a pack writes down of itself, so that the same call goes on with it and another one keeps off."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

from shardkit.columns import Column
from shardkit.compress import Compression
from shardkit.errors import DatasetError, DatasetExistsError
from shardkit.index import read_index
from shardkit.manifest import MANIFEST_NAME, UNFINISHED_NAME, read_whole, write_whole
from shardkit.records import Transform
from shardkit.shards import WrittenShard, written_shard
from shardkit.storage import join, storage_for
from shardkit.writer import prepare_folder


@dataclass(frozen=True)
class Request:
    """What was asked for; all that decides the bytes, beside the source."""

    shard_bytes: int
    shard_samples: int | None
    seed: int | None
    compression: str
    block_bytes: int
    columns: Mapping[str, Column]
    splits: Mapping[str, float] | None
    split_by: Callable[[str], str] | None
    transform: Transform | None

    def describe(self) -> dict[str, Any]:
        """Return it as JSON, functions by name and a hash of their code."""
        described = {name: getattr(self, name) for name in ("shard_bytes", "shard_samples", "seed", "compression")}
        return described | {
            "block_bytes": self.block_bytes,
            "columns": {name: c if isinstance(c, str) else describe_function(c) for name, c in self.columns.items()},
            "splits": self.splits,
            "split_by": describe_function(self.split_by),
            "transform": describe_function(self.transform),
        }


class Target:
    """One dataset's folder, and what an earlier pack left there."""

    def __init__(self, folder: str, request: Mapping[str, Any]) -> None:
        self.folder = folder
        self._request = request
        self._storage = storage_for(folder)
        self._earlier = self._read(UNFINISHED_NAME)
        self._unfinished = self._earlier is not None
        if self._earlier is None and (manifest := self._read(MANIFEST_NAME)) is not None:
            self._earlier = manifest.get("packed", {})

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            data = json.loads(read_whole(self._storage, join(self.folder, name)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:
            return {}
        return data if isinstance(data, dict) else {}

    def claim(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse what is in the way, or clear it, and mark the folder as unfinished.

        Raises:
            DatasetExistsError: Something is in the way.
        """
        earlier = self._earlier
        if earlier is not None and resume and not overwrite:
            if earlier.get("request") == self._request:
                return
            raise self._refuse(_differences(earlier.get("request") or {}, self._request))
        restart = earlier is not None and self._unfinished and earlier.get("request") == self._request
        prepare_folder(self._storage, self.folder, overwrite=overwrite or restart)
        self._earlier = None

    def mark(self, plan: Mapping[str, Any]) -> bool:
        """Write down what is being written. Returns False if exactly that is finished already.

        Raises:
            DatasetExistsError: What is there was made of another source.
        """
        earlier = self._earlier
        if earlier is not None and "plan" in earlier:
            if earlier["plan"] != plan.get("plan", earlier["plan"]):
                raise self._refuse("the source: samples were added, removed or changed since")
            return self._unfinished
        write_whole(self._storage, join(self.folder, UNFINISHED_NAME), json.dumps(plan).encode(), overwrite=True)
        return True

    def finished_shard(self, stem: str, compression: Compression, plan: str) -> WrittenShard | None:
        """Return a shard that an earlier call of the same pack finished; None if there is none."""
        try:
            written = written_shard(index := read_index(self._storage, join(self.folder, f"{stem}.parquet")))
            size = self._storage.info(join(self.folder, stem + compression.suffix)).size
        except (FileNotFoundError, DatasetError):
            return None
        return written if index.facts.plan == plan and size == written.shard.file_size else None

    def _refuse(self, what: str) -> DatasetExistsError:
        state = "an unfinished dataset" if self._unfinished else "a dataset"
        return DatasetExistsError(
            f"{self.folder}: holds {state} of another pack; what differs: {what}. Choose another folder, make the call "
            "that wrote it, or pass overwrite=True to replace it",
            url=self.folder,
        )


def describe_function(function: Callable[..., object] | None) -> str | None:
    """Return a function's name and a hash of its code, so that a resumed pack notices that it changed."""
    if function is None:
        return None
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    code = getattr(function, "__code__", None)
    return f"{name} {hashlib.sha256(_code(code)).hexdigest()[:16]}" if code is not None else name


def _code(code: CodeType) -> bytes:
    constants = (_code(c) if isinstance(c, CodeType) else repr(c).encode() for c in code.co_consts)
    return b" ".join([code.co_code, repr(code.co_names).encode(), *constants])


def _differences(earlier: Mapping[str, Any], request: Mapping[str, Any]) -> str:
    names = [name for name in request if earlier.get(name) != request[name]]
    if len(names) == len(request):
        return "it was not written by this pack"
    return ", ".join(f"{name} (there {earlier.get(name)!r}, here {request[name]!r})" for name in names)
