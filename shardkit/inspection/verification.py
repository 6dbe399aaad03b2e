"""Check every byte of a dataset: report what is damaged, where, and which samples are still whole.

A shard is read once, the way ``index_shards`` reads it, and the facts found are compared with the manifest and the
index. If they differ, each sample is located by its index and checked separately.
"""

import contextlib
import hashlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from isal.isal_zlib import crc32

from shardkit.codecs.registry import Decoder
from shardkit.errors import DatasetError, NoListingError, ShardError, ShardkitError, check_path
from shardkit.format.columns import ColumnTypes
from shardkit.format.index import (
    OFFSET,
    SIZE,
    BlockTable,
    IndexBuilder,
    ShardFacts,
    ShardIndex,
    describe_shard,
    open_index,
    read_index,
    read_named_index,
)
from shardkit.format.manifest import (
    MANIFEST_NAME,
    SHARD_SUFFIXES,
    UNFINISHED_NAME,
    Manifest,
    Shard,
    find_names,
    index_name,
    load_manifest,
    strip_suffix,
)
from shardkit.format.parquet import FileFacts
from shardkit.format.scan import ShardScan, content_frames, count_repeated_keys, range_reader
from shardkit.format.side_files import BlockFile, ColumnFile, columns_of_indexes, regroup
from shardkit.hashing import UInt64Array, hash_keys
from shardkit.inspection.decoding import Decoding
from shardkit.inspection.findings import DamagedShard, Problem, VerifyReport
from shardkit.packing.checks import CheckTask, parse_check
from shardkit.packing.workers import Workers
from shardkit.packing.writer import list_indexes
from shardkit.progress import track
from shardkit.reading.forward import find_shards
from shardkit.sample import KEY, SOURCE
from shardkit.storage.base import Storage, is_remote, join, split_url
from shardkit.storage.registry import storage_for

if TYPE_CHECKING:
    import pyarrow as pa

_Row = dict[str, Any]
_Scanned: TypeAlias = "tuple[ShardFacts | None, BlockTable | None, pa.Table]"

_PIECE_BYTES = 1 << 20


def verify(
    url: str | PathLike[str],
    *,
    decode: bool | Decoder = False,
    num_workers: int | None = None,
    worker_type: Literal["thread", "process"] = "thread",
    allow_any_url: bool = False,
    progress: bool = False,
    storage_options: Mapping[str, object] | None = None,
) -> VerifyReport:
    """Read every byte of a dataset, and report what is damaged and which samples are whole.

    It checks the tars' headers and ends, the shards' sizes and SHA-256, every sample's key, position, size and CRC-32s,
    the blocks' CRC-32s, seek tables, the indexes and side files with their SHA-256, and the manifest with its checksum
    and its digest. It also checks that no file is missing or unexpected, and that keys are unique if the manifest says
    so. It does not stop at damage. It checks that class names, the facts about how the dataset was packed, and promoted
    columns are unchanged since they were written; format 1 does not record what was written, and the notes say so.

    Shards without a manifest are checked only against their own tar structure and indexes; the notes say so.

    These checks show that the bytes are those that were packed. Only decoding shows whether they are valid images,
    arrays or JSON: ``decode=True`` also decodes every field, and reports each that cannot be decoded, with the reason.
    The first 1,000 of these fields are named, the others counted.

    Args:
        url: A dataset's folder or its ``manifest.json``; or a folder of shards, a shard, or a pattern.
        decode: True to decode every field by its name, and images of any depth; or a ``Decoder`` with other settings.
        num_workers: How many threads or processes decode; None for one per processor.
        worker_type: The kind of worker that decodes: ``"process"`` for registered codecs that hold the GIL.
        allow_any_url: Accept shards outside the folder. Only for manifests whose author you trust.
        progress: Show a progress bar on a terminal.
        storage_options: Passed to the storage.

    Raises:
        DatasetError: There is nothing to verify.
        ArgumentError: The URL cannot be read, or is standard input, which can be read only once; or another argument
            is out of range.
        WorkerError: A worker process died.

    Example:
        >>> import tempfile
        >>> from shardkit.packing.writer import ShardWriter
        >>> folder = tempfile.mkdtemp() + "/words"
        >>> with ShardWriter(folder) as writer:
        ...     writer.write({"__key__": "0001", "txt": "hello"})
        >>> verify(folder).ok
        True
    """
    url = check_path("url", url)
    decoder = parse_check("decode", decode)
    workers = Workers(num_workers=num_workers, worker_type=worker_type)
    storage = storage_for(url, storage_options)
    check = _Dataset(storage, url, allow_any_url=allow_any_url, decoding=Decoding(decoder) if decoder else None)
    check.find(storage_options)
    check.run(workers, progress=progress)
    check.compare_manifest()
    return VerifyReport(
        url,
        len(check.shards),
        check.samples,
        check.bytes,
        tuple(check.damaged()),
        tuple(check.problems),
        tuple(dict.fromkeys(check.notes)),
    )


class _Verified(NamedTuple):
    """What was found in a shard, except for the fields that cannot be decoded: they are known later."""

    url: str
    samples: int
    whole: int
    damaged: list[str]
    problems: list[Problem]
    part: int = -1  # its part in ``Decoding``
    damaged_rows: Collection[int] = ()  # the numbers of the decoded samples that are known not to be whole


@dataclass
class _Dataset:
    """A dataset that is being verified, and what was found."""

    storage: Storage
    url: str
    allow_any_url: bool
    decoding: Decoding | None = None
    manifest: Manifest | None = None
    shards: list[tuple[str, Shard | None]] = field(default_factory=list)  # URL, entry
    indexes: dict[str, dict[str, list[str]]] = field(default_factory=dict)  # by folder, of shards without a manifest
    verified: list[_Verified] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples: int = 0
    bytes: int = 0
    fields: set[str] = field(default_factory=set)
    column_types: ColumnTypes = field(default_factory=ColumnTypes)
    hashes: list[UInt64Array] = field(default_factory=list)
    opened: list[ShardIndex] = field(default_factory=list)  # the indexes of these keys; all, if no shard has problems

    def find(self, storage_options: Mapping[str, object] | None) -> None:
        """Find the shards, and the files that are missing or unexpected."""
        folder, name = split_url(self.url)
        if not name.endswith(".json"):
            folder, name = self.url, MANIFEST_NAME
        try:
            names = self.storage.list(folder)
        except NotADirectoryError:
            names = []
        except NoListingError:
            names = find_names(self.storage, folder, (name, UNFINISHED_NAME))
            self.notes.append("its folder cannot be listed, so it was not checked for unexpected files")
        if UNFINISHED_NAME in names:
            problem = "exists: the dataset is being written, or its writer was stopped. Run the same pack again"
            self._problem(join(folder, UNFINISHED_NAME), problem)
        if name in names:
            try:
                self.manifest = load_manifest(self.storage, folder, name, allow_any_url=self.allow_any_url)
            except DatasetError as error:
                self._problem(join(folder, name), str(error))
        if self.manifest:
            self._take_shards(self.manifest, names)
            return
        self.notes.append("there is no manifest, so missing or replaced shards cannot be detected")
        urls = [join(folder, name) for name in names if name.lower().endswith(SHARD_SUFFIXES)]
        if not urls and not self.problems:
            urls = [location.url for location in find_shards(self.url, storage_options)]
        self.shards = [(shard, None) for shard in urls]

    def _take_shards(self, manifest: Manifest, names: Iterable[str]) -> None:
        """Take the shards that a manifest lists, and report shards and indexes that it does not list."""
        expected = {part for shard in manifest.shards for part in (shard.url, shard.index_url)}
        for extra in names:
            if extra.lower().endswith((*SHARD_SUFFIXES, ".parquet")) and extra not in expected:
                problem = "is not in the manifest; move it away, or index the folder again"
                self._problem(join(manifest.url, extra), problem)
        self.shards = [(join(manifest.url, shard.url), shard) for shard in manifest.shards]
        if manifest.version == 1:
            self.notes.append(
                "its manifest has format 1, which cannot show damage to class names, promoted columns and the facts "
                "about packing; 'shardkit index --overwrite' makes one of format 2"
            )

    def run(self, workers: Workers, *, progress: bool) -> None:
        """Verify all shards and their indexes."""
        with (
            track("verifying", total=len(self.shards), unit="shards", enabled=progress) as advance,
            closing(workers.run(self._verify_shards(advance))) as results,
        ):
            for checked in results:
                if self.decoding:
                    self.decoding.note(checked)

    def damaged(self) -> Iterator[DamagedShard]:
        """Yield the shards that have problems."""
        for shard in self.verified:
            whole, damaged, problems = shard.whole, shard.damaged, shard.problems
            if self.decoding:
                undecodable = self.decoding.problems(shard.part, shard.url)
                problems = problems + undecodable
                damaged = list(dict.fromkeys([*damaged, *(problem.key for problem in undecodable if problem.key)]))
                whole -= sum(row not in shard.damaged_rows for row in self.decoding.samples(shard.part))
            if problems:
                yield DamagedShard(shard.url, shard.samples, max(0, whole), tuple(damaged), tuple(problems))

    def _verify_shards(self, advance: Callable[[int], None]) -> Iterator[CheckTask]:
        for url, entry in self.shards:
            yield from self._verify_shard(url, entry)
            advance(1)

    def _verify_shard(self, url: str, entry: Shard | None) -> Iterator[CheckTask]:
        """Verify one shard and its index, and yield the tasks that decode its samples."""
        problems: list[Problem] = []
        index, rows = self._open_index(url, entry, problems)
        told = self.manifest.block_samples if self.manifest else index.facts.block_samples if index else 1
        expected = entry.sha256 if entry else index.facts.sha256 if index else ""
        facts, blocks, found = yield from self._scan_right(url, max(1, told), expected, problems)
        self.samples += len(found)
        if facts and blocks:
            self.bytes += facts.tar_size
            self.fields.update(facts.fields)
            problems += _compare_facts(url, entry, index, facts, blocks)
        is_damaged = facts is None or expected not in ("", facts.sha256)
        damaged: list[str] = []
        whole = len(found)
        if rows is None:
            whole = 0 if facts and is_damaged else whole
        elif index and is_damaged:
            damaged = self._damaged_samples(url, index, rows, found, problems)
            whole = len(rows) - len(damaged)
        else:
            problems += _compare_rows(index.url if index else url, rows, found)
        if index and rows is not None:
            self.column_types.add(url, rows.schema)
            self.hashes.append(hash_keys(rows.column(KEY).to_pylist()))
            self.opened.append(index)
        samples = entry.samples if entry else whole if rows is None else len(rows)
        part, damaged_rows = -1, set()
        if self.decoding:
            part, not_whole = self.decoding.last, set(damaged)
            damaged_rows = {
                i for i, key in enumerate(found.column(KEY).to_pylist() if damaged else ()) if key in not_whole
            }
        self.verified.append(_Verified(url, samples, whole, damaged, problems, part, damaged_rows))

    def compare_manifest(self) -> None:
        """Compare the manifest with the facts found in all shards together."""
        if self.manifest is None:
            return
        url = join(self.manifest.url, MANIFEST_NAME)
        repeated = count_repeated_keys(self.hashes, lambda i: self.opened[i].sample_keys())
        if repeated and self.manifest.unique_keys:
            self._problem(
                url, f"says that keys are unique, but {repeated:,} samples have a key that an earlier one has"
            )
        if any(shard.problems for shard in self.verified):
            return
        if (fields := sorted(self.fields)) != list(self.manifest.fields):
            self._problem(url, f"has the fields {list(self.manifest.fields)}, its shards have {fields}")
        if (columns := self.column_types.as_text()) != dict(self.manifest.columns):
            self._problem(url, f"has the columns {dict(self.manifest.columns)}, its indexes have {columns}")
        self._compare_side_files(self.manifest)

    def _compare_side_files(self, manifest: Manifest) -> None:
        """Compare the side files with the manifest, and the file of columns with the indexes."""
        if manifest.block_file:
            self._compare_file(join(manifest.url, manifest.block_file_url), manifest.block_file, self.problems)
            self._compare_blocks(manifest)
        if not manifest.column_file:
            return
        url = join(manifest.url, manifest.column_file_url)
        self._compare_file(url, manifest.column_file, self.problems)
        if self.problems:
            return
        file = ColumnFile(manifest, self.storage)
        tables = columns_of_indexes(self.storage, manifest, file.schema)
        for group, rows in enumerate(regroup(tables, manifest.column_file.group_rows)):
            if not file.rows(file.schema.names, group).equals(rows):
                self._problem(url, f"has other values in its group {group:,} than the indexes; make it again")

    def _compare_blocks(self, manifest: Manifest) -> None:
        """Compare the file of block tables with the indexes."""
        file = BlockFile(manifest, self.storage)
        for number, index in enumerate(self.opened):
            try:
                if file.table(number).to_bytes() != index.blocks.to_bytes():
                    name = manifest.shards[number].url
                    self._problem(file.url, f"has another table of {name} than its index; make it again")
            except (ShardkitError, OSError) as error:
                self._problem(file.url, str(error))
                return

    def _compare_file(self, url: str, facts: FileFacts, problems: list[Problem]) -> None:
        """Compare the size and SHA-256 of a file beside the shards with those in the manifest."""
        sha256, size = hashlib.sha256(), 0
        try:
            stream = self.storage.open(url)
            try:
                while piece := stream.read(_PIECE_BYTES):
                    sha256.update(piece)
                    size += len(piece)
            finally:
                stream.close()
        except FileNotFoundError:
            problems.append(Problem(url, "is missing; make it again with 'shardkit index'"))
            return
        except OSError as error:
            problems.append(Problem(url, str(error)))
            return
        if (size, sha256.hexdigest()) != (facts.size, facts.sha256):
            message = f"has {size:,} bytes with the SHA-256 {sha256.hexdigest()[:16]}..., expected {facts.size:,} with "
            problems.append(Problem(url, f"{message}{facts.sha256[:16]}...; make it again with 'shardkit index'"))

    def _problem(self, url: str, message: str) -> None:
        self.problems.append(Problem(url, message))

    def _scan_right(
        self, url: str, block_samples: int, expected: str, problems: list[Problem]
    ) -> "Generator[CheckTask, None, _Scanned]":
        """Read a shard; if a remote shard is damaged, read it again, as the damage may be only in the copy received."""
        found: list[Problem] = []
        scanned = yield from self._scan(url, block_samples, found)
        if is_remote(url) and (scanned[0] is None or scanned[0].sha256 != (expected or scanned[0].sha256)):
            found.clear()
            scanned = yield from self._scan(url, block_samples, found, fresh=True)
        problems += found
        return scanned

    def _scan(
        self, url: str, block_samples: int, problems: list[Problem], *, fresh: bool = False
    ) -> "Generator[CheckTask, None, _Scanned]":
        """Read a shard; return its facts and block table, if it can be read to its end, and its whole samples."""
        if self.decoding:
            self.decoding.begin()
        try:
            scan = ShardScan(
                self.storage,
                url,
                block_samples=block_samples,
                holds_data=self.decoding is not None,
                fresh=fresh,
            )
        except OSError as error:
            problems.append(Problem(url, "is missing" if isinstance(error, FileNotFoundError) else str(error)))
            return None, None, IndexBuilder().table()
        try:
            if self.decoding:
                yield from self.decoding.tasks(scan.samples())
            else:
                scan.run()
            facts, blocks = scan.facts(), scan.blocks()
            if facts.compression == "zst" and (frames := content_frames(self.storage, url, facts.file_size)):
                end = sum(list(frames)[-1])
                if end != facts.tar_size:
                    problem = f"has a seek table for {end:,} bytes, expected {facts.tar_size:,}; pack it again"
                    problems.append(Problem(url, problem))
        except (ShardError, OSError) as error:
            problems.append(Problem(url, str(error), getattr(error, "offset", None)))
            return None, None, scan.table()
        return facts, blocks, scan.table()

    def _open_index(
        self, shard_url: str, entry: Shard | None, problems: list[Problem]
    ) -> "tuple[ShardIndex | None, pa.Table | None]":
        """Return an index and its rows; without a manifest, a file with that name need not be an index."""
        try:
            if self.manifest and entry:
                index = open_index(self.storage, self.manifest.url, entry)
                if entry.index:
                    self._compare_file(index.url, entry.index, problems)
            else:
                index = self._find_index(shard_url)
            rows = index.rows()
            _check_schema(rows, index.url)
        except (ShardkitError, OSError) as error:
            if self.manifest and entry:
                url = join(self.manifest.url, entry.index_url)
                missing = isinstance(error, FileNotFoundError)
                message = "is missing; make it again with 'shardkit index'" if missing else str(error)
                problems.append(Problem(url, message))
            else:
                self.notes.append("there are shards without indexes; only their headers and ends were checked")
            return None, None
        return index, rows

    def _find_index(self, shard_url: str) -> ShardIndex:
        """Return the index of a shard without a manifest: the only one of format 2, or otherwise that of format 1."""
        folder, name = split_url(shard_url)
        if folder not in self.indexes:
            self.indexes[folder] = {}
            with contextlib.suppress(NotADirectoryError, NoListingError):
                self.indexes[folder] = list_indexes(self.storage, folder)
        found = self.indexes[folder].get(strip_suffix(name), [])
        if len(found) == 1:
            return read_named_index(self.storage, folder, found[0])[0]
        return read_index(self.storage, join(folder, index_name(name)))

    def _damaged_samples(
        self, url: str, index: ShardIndex, rows: "pa.Table", found: "pa.Table", problems: list[Problem]
    ) -> list[str]:
        """Return the keys of the samples that are not whole; the first is also reported as a problem."""
        known = {(row[KEY], row[OFFSET]): row for row in found.to_pylist()}
        read = range_reader(self.storage, url, index)
        damaged: list[str] = []
        for row in rows.to_pylist():
            members = _members(row)
            present = known.get((row[KEY], row[OFFSET]))
            if present is not None and _members(present) == members:
                continue
            for name, (offset, size, crc) in members.items():
                is_said = False  # whether a problem already reports what is wrong
                try:
                    if crc32(read(offset, size)) == crc:
                        continue
                except ShardError:
                    pass  # a sample that cannot be read is not whole
                except OSError:  # reported when the shard was read
                    is_said = True
                if not damaged and not is_said:
                    message = f"sample {row[KEY]!r}: field {name!r} at byte {offset:,} does not match the index"
                    problems.append(Problem(url, message, offset, row[KEY], name))
                damaged.append(row[KEY])
                break
        return damaged


def _check_schema(rows: "pa.Table", url: str) -> None:
    """Check the index's own columns; field columns are compared with the shard, promoted ones with the manifest."""
    own = {KEY: "string", OFFSET: "int64", SIZE: "int64", SOURCE: "string"}
    found = {name: str(rows.schema.field(name).type) for name in rows.column_names if name.startswith("_")}
    found = {name: kind for name, kind in found.items() if ":" not in name}
    if {SOURCE: "string"} | found != own:
        raise DatasetError(
            f"{url}: has the columns {found}, expected {own}; make it again with 'shardkit index'", url=url
        )


def _members(row: _Row) -> dict[str, tuple[int, int, int]]:
    """Return offset, size and CRC-32 of every field that a row has."""
    fields = [name.removesuffix(":size") for name, size in row.items() if name.endswith(":size") and size is not None]
    return {name: (row[f"{name}:offset"], row[f"{name}:size"], row[f"{name}:crc32"]) for name in fields}


def _compare_facts(
    url: str, entry: Shard | None, index: ShardIndex | None, facts: ShardFacts, blocks: BlockTable
) -> list[Problem]:
    """Compare the facts found in a shard with those in the manifest and the index."""
    problems = []
    if entry:
        problems += _differences(
            url, "the manifest", asdict(describe_shard(entry.url, facts, blocks, entry.index)), asdict(entry)
        )
    if index:
        told = replace(index.facts, plan="")  # the plan is the packer's
        problems += _differences(url, f"the index {index.url}", asdict(facts), asdict(told))
        for name, values in asdict(blocks).items():
            other = getattr(index.blocks, name)
            if not np.array_equal(values, other):
                at = int(np.flatnonzero(values != other)[0]) if values.shape == other.shape else -1
                which = f"of block {at:,}: {values[at]}, not {other[at]}" if at >= 0 else "of a different length"
                offset = int(blocks.offset[at]) if at >= 0 else None
                message = f"differs from the block table in {index.url}, {name} {which}"
                problems.append(Problem(url, message, offset))
    return problems


def _differences(url: str, who: str, found: Mapping[str, object], told: Mapping[str, object]) -> list[Problem]:
    return [
        Problem(url, f"has {name} {found[name]!r}, expected {told[name]!r} as {who} says; fetch or make them again")
        for name in found
        if found[name] != told[name]
    ]


def _compare_rows(url: str, rows: "pa.Table", found: "pa.Table") -> list[Problem]:
    """Compare an index's rows with those found in a whole shard."""
    names = [name for name in rows.column_names if ":" in name or name in (KEY, OFFSET, SIZE)]
    again = "make it again with 'shardkit index'"
    if names == found.column_names and rows.select(names).equals(found):
        return []
    if set(names) != set(found.column_names) or len(rows) != len(found):
        return [Problem(url, f"has other columns or another number of rows than its shard has samples; {again}")]
    pairs = zip(rows.select(found.column_names).to_pylist(), found.to_pylist(), strict=True)
    wrong = [right for told, right in pairs if told != right]
    if not wrong:
        return [Problem(url, f"has other types of columns than its shard; {again}")]
    message = f"has {len(wrong):,} rows that do not match its shard, the first of sample {wrong[0][KEY]!r}; {again}"
    return [Problem(url, message, wrong[0][OFFSET], wrong[0][KEY])]
