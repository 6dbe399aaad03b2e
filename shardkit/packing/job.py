"""A source -> a dataset: shuffled, levelled, split, resumable.

If the sizes are known, the plan is made at once. Otherwise the samples are first written to a spill: plain shards in
``TMPDIR``, or in the destination if tasks may run on other machines. The plan assigns each sample to a shard, so each
shard is an independent task that gives the same bytes wherever and whenever it runs.
"""

import hashlib
import inspect
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeVar

import numpy as np

from shardkit.codecs.compress import Compression, parse_compression
from shardkit.codecs.registry import Decoder
from shardkit.errors import (
    ArgumentError,
    CodecError,
    ShardkitError,
    SourceError,
    StorageError,
    WorkerError,
    check_whole,
)
from shardkit.format.columns import Column, ColumnMaker
from shardkit.format.index import choose_block_samples
from shardkit.format.manifest import Manifest, read_manifest
from shardkit.format.shard_writer import WrittenShard, choose_compression
from shardkit.format.side_files import publish_card
from shardkit.format.tar import END_OF_ARCHIVE
from shardkit.hashing import Permutation, derive
from shardkit.packing.checks import CheckTask, Undecodable, parse_check
from shardkit.packing.lock import exclusive
from shardkit.packing.plan import Positions, ShardPlan, assign_splits, check_splits, plan_shards
from shardkit.packing.records import (
    ListedPart,
    ListedRecords,
    Records,
    SampleFunction,
    SampleTransform,
    encode_samples,
    promised_hashes,
    take_part,
)
from shardkit.packing.spill import Segment, SegmentTask, Spill, Staging, read_segment, segment_url, write_segments
from shardkit.packing.target import Request, Target, check_apart, refuse_dataset, refuse_other_splits
from shardkit.packing.tasks import ShardTask
from shardkit.packing.workers import Workers
from shardkit.packing.writer import (
    check_shard_samples,
    check_unique,
    clean_destination,
    dataset_name,
    publish_dataset,
    refuse_links,
    shard_stem,
    sweep,
    too_large,
)
from shardkit.progress import track
from shardkit.reading.dataset import ShardDataset
from shardkit.sources.folders import ListedSource
from shardkit.sources.shards import ShardSource
from shardkit.storage.base import Storage, format_bytes, join, parse_bytes
from shardkit.storage.local import absolute_url
from shardkit.storage.os_errors import FULL
from shardkit.storage.registry import storage_for

T = TypeVar("T")

PLAN_VERSION = 2
# Objects that are iterable, or are paths, but do not yield samples as they are stored.
_NO_SOURCE = (str, bytes, bytearray, memoryview, os.PathLike, Mapping, ShardDataset)
_SPILL_SAMPLES = 4096  # samples of a listed source in one segment, which is one task
_CHECK_SAMPLES = 64  # samples in one task of the check
_NAMED = 100  # the most fields that an error about undecodable fields names; the rest are counted
_CHOICE_SAMPLES = 1024  # the most samples that are read to choose a compression
_SPLITS_OF_OTHERS = {"val": "validation", "valid": "validation", "dev": "validation"}  # the names of HF datasets
_CHOICE_DOMAIN = 0x4155_544F  # "AUTO"


@dataclass(frozen=True)
class _Layout:
    """The decisions before the first shard is written: for each split its plan and the number of samples in a block."""

    plans: dict[str, ShardPlan]
    block_samples: dict[str, int]
    compression: Compression
    columns: ColumnMaker
    digest: str  # of everything that decides the shards' bytes


class _Pack:
    """One call of ``pack``."""

    def __init__(
        self,
        source: ListedSource | Iterable[Mapping[str, Any]],
        folder: str,
        request: Request,
        workers: Workers,
        *,
        decoder: Decoder | None,
        storage_options: Mapping[str, object] | None,
        progress: bool,
    ) -> None:
        self._source = (source.listed() or source) if isinstance(source, ShardSource) else source
        self._folder = folder
        self._storage_options = storage_options
        self._storage = storage_for(folder, storage_options)
        self._request = request
        self._described = {"version": PLAN_VERSION, "source": type(source).__name__, **request.describe()}
        self._workers = workers
        self._decoder = decoder  # checks every field; None for no check
        self._progress = progress
        self._fingerprint = ""  # of a listed source
        self._left = 0  # bytes of the shards that are not yet written
        names = list(request.splits) if request.splits is not None else []
        self._targets = {n: Target(self._storage, join(folder, n), self._described) for n in names} or {
            dataset_name(folder): Target(self._storage, folder, self._described)
        }

    def run(self, *, resume: bool, overwrite: bool) -> dict[str, Manifest]:
        check_apart(self._source, [target.folder for target in self._targets.values()])
        refuse_links(self._folder, *(self._request.splits or ()))
        for target in self._targets.values():
            refuse_links(target.folder)
        try:
            with exclusive([self._folder, *(target.folder for target in self._targets.values())]):
                return self._run(resume=resume, overwrite=overwrite)
        except StorageError as error:
            if error.errno not in FULL:
                raise
            left = f"The remaining shards have up to {format_bytes(self._left)}. " if self._left > 0 else ""
            full = StorageError(f"{error}. {left}Then run the same pack again to continue", url=error.url)
            full.errno = error.errno
            raise full from error

    def _run(self, *, resume: bool, overwrite: bool) -> dict[str, Manifest]:
        if self._request.splits is not None:
            refuse_dataset(self._storage, self._folder)
            if not overwrite and not any(target.exists for target in self._targets.values()):
                refuse_other_splits(self._storage, self._folder, self._targets)
        for target in self._targets.values():
            target.claim(resume=resume, overwrite=overwrite)
        listed = isinstance(self._source, ListedSource)
        if isinstance(self._source, ListedSource):
            self._fingerprint = self._source.fingerprint()
            for target in self._targets.values():
                target.check_source(self._fingerprint)
        if self._decoder or not (listed and all(target.is_finished for target in self._targets.values())):
            elsewhere = self._workers.are_elsewhere
            Staging(self._folder, self._storage, is_shared=not elsewhere).clear()  # an earlier call had other workers
            staging = Staging(self._folder, self._storage, is_shared=elsewhere)
            try:
                self._write(self._records(staging, resume=resume and not overwrite), staging)
            except BaseException as error:
                unusable = isinstance(error, ShardkitError) and not isinstance(error, WorkerError | StorageError)
                if not listed or unusable:  # the next call could not use the spill
                    staging.clear()
                if isinstance(error, StorageError) and error.url.startswith(staging.url):
                    error.add_note(
                        "All samples wait there until they are packed. Without executor, TMPDIR sets the place."
                    )
                raise
        return {
            name: read_manifest(target.folder, storage_options=self._storage_options)
            for name, target in self._targets.items()
        }

    def _records(self, staging: Staging, *, resume: bool) -> Records:
        source, transform = self._source, self._request.transform
        if isinstance(source, ListedSource) and transform is None:
            return ListedRecords(source, self._fingerprint)
        for target in self._targets.values():
            target.announce()
        if isinstance(source, ListedSource):
            described = json.dumps([self._described, self._fingerprint, _SPILL_SAMPLES], sort_keys=True)
            stem = hashlib.sha256(described.encode()).hexdigest()[:16]
            there = staging.clear(keep=stem if resume else None)
            url = join(staging.url, stem)
            segments = self._spill_listed(source, staging.storage, url, there)
            return Spill(staging.storage, url, segments, is_kept=True)
        staging.clear()
        url = join(staging.url, secrets.token_hex(8))  # a new name, to which workers of a killed pack do not write
        samples: Iterable[Mapping[str, Any]] = source if transform is None else transform.of_all(source)
        with track("reading", total=None, enabled=self._progress) as advance:
            encoded = _counted(encode_samples(samples), advance)
            segments = list(write_segments(staging.storage, url, encoded, shard_bytes=self._request.shard_bytes))
        return Spill(staging.storage, url, segments, is_kept=False)

    def _spill_listed(self, source: ListedSource, storage: Storage, url: str, there: Container[str]) -> list[Segment]:
        """Encode a listed source with a transform, in parallel; segments that an earlier call finished are kept."""
        hashes = promised_hashes(source)
        segments: dict[str, Segment] = {}
        urls = [segment_url(url, number) for number in range(-(-len(hashes) // _SPILL_SAMPLES))]

        def tasks() -> Iterator[SegmentTask]:
            for number, segment in enumerate(urls):
                earlier = read_segment(storage, segment, there)
                if earlier is not None:
                    segments[segment] = earlier
                    advance(len(earlier.table))
                    continue
                some = range(len(hashes))[number * _SPILL_SAMPLES : (number + 1) * _SPILL_SAMPLES]
                part = take_part(source, some)
                samples = ListedPart(part, hashes[some.start : some.stop], transform=self._request.transform)
                yield SegmentTask(storage, segment, samples, self._request.shard_bytes)

        with (
            track("transforming", total=len(hashes), enabled=self._progress) as advance,
            closing(self._workers.run(tasks())) as results,
        ):
            for done in results:
                segments[done.url] = done
                advance(len(done.table))
        return [segments[segment] for segment in urls]

    def _sort(self, spill: Spill, order: Positions) -> None:
        with (
            track("sorting", total=len(order), enabled=self._progress) as advance,
            closing(self._workers.run(spill.sort_tasks(order))) as results,
        ):
            for number in results:
                advance(spill.end_sort(number))

    def _check(self, records: Records) -> None:
        if not len(records.hashes):
            raise SourceError("the source has no samples; nothing was written")
        largest = int(records.tar_sizes.argmax())
        if records.tar_sizes[largest] > self._capacity:
            key = next(islice(records.keys(), largest, None))
            raise too_large(key, int(records.tar_sizes[largest]), self._request.shard_bytes)
        check_unique(records.hashes, records.keys)

    def _check_decodable(self, records: Records, decoder: Decoder) -> None:
        """Decode every field, in parallel. Raises CodecError if some cannot be decoded."""
        total = len(records.hashes)
        starts = range(0, total, _CHECK_SAMPLES)
        tasks = (
            CheckTask(records.take(np.arange(start, min(start + _CHECK_SAMPLES, total))), decoder, start)
            for start in starts
        )
        fields, samples, named = 0, 0, list[Undecodable]()
        with (
            track("checking", total=total, enabled=self._progress) as advance,
            closing(self._workers.run(tasks)) as results,
        ):
            for checked in results:
                fields += len(checked.undecodable)
                samples += len({one.sample for one in checked.undecodable})
                named = sorted([*named, *checked.undecodable])[:_NAMED]
                advance(checked.samples)
        if not named:
            return
        lines = [
            f"sample {one.key!r}, field {one.field!r}{f', made of {one.source}' if one.source else ''}: {one.reason}"
            for one in named
        ]
        if fields > len(named):
            lines.append(f"... and {fields - len(named):,} more")
        raise CodecError(
            f"{self._folder}: nothing was written, because {fields:,} fields cannot be decoded, in {samples:,} of "
            f"{total:,} samples; repair them, or leave them out with a transform that returns None:\n  "
            + "\n  ".join(lines),
            key=named[0].key,
            field=named[0].field,
        )

    @property
    def _capacity(self) -> int:
        return self._request.shard_bytes - len(END_OF_ARCHIVE)

    def _write(self, records: Records, staging: Staging) -> None:
        """Plan, write and publish all targets that are not finished."""
        self._check(records)
        columns = ColumnMaker(self._request.columns)
        columns.check_fields(records.fields())
        if self._decoder:
            self._check_decodable(records, self._decoder)
        layout = self._lay_out(records, columns)
        packed = {"request": self._described, "plan": layout.digest, "compression": _spelled(layout.compression)}
        if self._fingerprint:
            packed["source"] = self._fingerprint
        for target in self._targets.values():
            target.begin(packed)
        if isinstance(records, Spill):
            self._sort(records, np.concatenate([plan.order for plan in layout.plans.values()]))
        unfinished = [name for name, target in self._targets.items() if not target.is_finished]
        done = self._write_shards(records, layout, unfinished)
        staging.clear()  # before a manifest marks the dataset as finished
        if self._request.splits is not None:
            suffix = layout.compression.suffix
            self._publish_card({name: [f"{name}/*{suffix}"] for name, plan in layout.plans.items() if len(plan)})
        for name in unfinished:
            self._publish(self._targets[name], done[name], layout.block_samples[name], packed)

    def _lay_out(self, records: Records, columns: ColumnMaker) -> _Layout:
        plans = self._plan(records)
        described = json.dumps([self._described, records.digest], sort_keys=True)
        block_samples = {
            name: choose_block_samples(
                len(plan.order), int(records.tar_sizes[plan.order].sum()), self._request.block_bytes
            )
            for name, plan in plans.items()
        }
        digest = hashlib.sha256(described.encode()).hexdigest()
        return _Layout(plans, block_samples, self._choose_compression(records), columns, digest)

    def _write_shards(
        self, records: Records, layout: _Layout, unfinished: Iterable[str]
    ) -> dict[str, list[WrittenShard]]:
        """Write the missing shards; return all shards of each unfinished target, in order."""
        targets = {name: self._targets[name] for name in unfinished}
        stems = {
            name: [shard_stem(target.folder, number) for number in range(len(layout.plans[name]))]
            for name, target in targets.items()
        }
        done: dict[str, WrittenShard] = {}

        def end(written: WrittenShard) -> None:
            done[written.shard.url] = written
            self._left -= written.shard.tar_size
            advance(written.shard.samples)

        def tasks() -> Iterator[ShardTask]:
            for name, target in targets.items():
                indexes = target.clean(stems[name], layout.compression)
                for number, stem in enumerate(stems[name]):
                    earlier = target.finished_shard(stem, indexes[stem], layout.compression, layout.digest)
                    if earlier is not None:
                        end(earlier)
                        continue
                    yield ShardTask(
                        self._storage,
                        absolute_url(target.folder),  # a worker may have a different working folder
                        stem,
                        records.take(layout.plans[name].positions(number)),
                        layout.compression,
                        layout.block_samples[name],
                        layout.columns,
                        layout.digest,
                    )

        orders = [layout.plans[name].order for name in targets]
        self._left = sum(int(records.tar_sizes[order].sum()) for order in orders)
        with (
            track("packing", total=sum(map(len, orders)), enabled=self._progress) as advance,
            closing(self._workers.run(tasks())) as results,
        ):
            for written in results:
                end(written)
        suffix = layout.compression.suffix
        return {name: [done[stem + suffix] for stem in of_target] for name, of_target in stems.items()}

    def _publish(
        self, target: Target, shards: Sequence[WrittenShard], block_samples: int, packed: Mapping[str, object]
    ) -> None:
        sweep(target.folder)
        ignored_files = len(getattr(self._source, "ignored", ()))
        publish_dataset(
            self._storage,
            target.folder,
            shards,
            block_samples=block_samples,
            classes=getattr(self._source, "classes", ()),
            packed={**packed, "ignored_files": ignored_files, "samples_with": _samples_with(shards)},
        )

    def _publish_card(self, paths: Mapping[str, Sequence[str]]) -> None:
        sweep(self._folder)  # a call may have been killed while it wrote the card
        publish_card(self._storage, self._folder, {_SPLITS_OF_OTHERS.get(n, n): path for n, path in paths.items()})

    def _plan(self, records: Records) -> dict[str, ShardPlan]:
        request = self._request
        parts = {next(iter(self._targets)): np.arange(len(records.hashes), dtype=np.int64)}
        if request.splits is not None:
            parts = assign_splits(records.hashes, request.splits, request.split_by, records.keys)
        return {
            name: plan_shards(
                positions,
                records.tar_sizes,
                capacity=self._capacity,
                shard_samples=request.shard_samples,
                seed=request.seed,
            )
            for name, positions in parts.items()
        }

    def _choose_compression(self, records: Records) -> Compression:
        if self._request.compression != "auto":
            return parse_compression(self._request.compression)
        count = len(records.hashes)
        some = Permutation(count, key=derive(_CHOICE_DOMAIN)).forward(np.arange(min(count, _CHOICE_SAMPLES)))
        return choose_compression(data for sample in records.take(some) for _, data in sample.members)


def _samples_with(shards: Iterable[WrittenShard]) -> dict[str, int]:
    """Return, for each field, the number of samples in some shards that have it."""
    counts: Counter[str] = Counter()
    for written in shards:
        counts.update(written.fields)
    return dict(sorted(counts.items()))


def _counted(samples: Iterable[T], advance: Callable[[int], None]) -> Iterator[T]:
    for sample in samples:
        yield sample
        advance(1)


def _spelled(compression: Compression) -> str:
    return f"{compression.name}:{compression.level}" if compression.level else compression.name


def pack(  # noqa: PLR0913 - one call that says it all; each has a default
    source: ListedSource | Iterable[Mapping[str, Any]],
    destination: str | os.PathLike[str],
    *,
    shard_bytes: int | str = "256MB",
    shard_samples: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    compression: str = "auto",
    block_bytes: int | str = "1MB",
    columns: Mapping[str, Column] | None = None,
    splits: Mapping[str, float] | None = None,
    split_by: Callable[[str], str] | None = None,
    transform: SampleFunction | None = None,
    num_workers: int | None = None,
    worker_type: Literal["thread", "process"] = "thread",
    executor: Executor | None = None,
    check: bool | Decoder = False,
    resume: bool = True,
    overwrite: bool = False,
    progress: bool = True,
    storage_options: Mapping[str, object] | None = None,
) -> dict[str, Manifest]:
    """Pack samples into shuffled shards of equal size, and publish them as a dataset, or as one dataset per split.

    Every sample is written exactly once. The order is a keyed permutation of all samples, decided by ``seed``; memory
    stays bounded. The same source and arguments give the same bytes, whatever workers do the work. No incomplete file
    ever has a final name, and the manifest is written last. After a crash, a full disk or Ctrl-C, the same call
    continues where it stopped. If the samples come from a plain iterable or a transform, the call goes through them
    again first, and then writes only the missing shards.

    Args:
        source: An ``ImageFolder``, a ``FileFolder``, a ``ShardSource``, or any iterable of samples: dicts with
            ``__key__`` and fields, whose values are bytes, text, or what the field's codec encodes.
        destination: The dataset's folder; with ``splits``, the folder of the datasets' folders.
        shard_bytes: The largest size of a shard, uncompressed, headers and padding included. The shards get equal sizes
            below it.
        shard_samples: The most samples that a shard may have.
        shuffle: False keeps the source's order.
        seed: Decides the order, and the random numbers of a transform.
        compression: ``"none"``, ``"zst"``, ``"gz"``, with a level as in ``"zst:9"``; ``"auto"`` takes zst if the
            payload shrinks by a tenth or more, else none.
        block_bytes: The approximate size of a block, the unit of reading in training.
        columns: Values to promote into the index: a field's name, or a function of the sample.
        splits: Shares that add up to 1, for example ``{"train": 0.9, "val": 0.1}``. A sample's split depends on its
            key alone.
        split_by: Returns for a key the value that decides the split instead, so that related samples stay together.
        transform: Called with each sample before it is written; returns it, changed or not, or None to leave it out.
            For single fields, it can be a mapping like ``{"jpg": function}``, which leaves None unchanged. Values are
            as in the source: bytes, if they come from files or shards; image transforms, such as
            ``{"jpg": Resize(256)}``, decode them. A parameter named ``rng`` gets an ``Rng`` keyed by the seed and the
            sample's key.
        num_workers: The number of shards written at the same time; None for one per processor. An executor gets twice
            as many tasks at a time; None then means its number of workers (known for ``concurrent.futures``,
            loky and Dask), or 64 if that is unknown.
        worker_type: ``"thread"``, or ``"process"`` for a transform that holds the GIL (everything must be picklable
            then).
        executor: An executor of ``concurrent.futures``, or a similar one (for Dask: ``client.get_executor()``), which
            writes the shards instead of our own workers. Its workers must be able to access the source and the
            destination, and need nothing else in common: unpacked samples are held in ``__staging__`` of the
            destination.
        check: Decode every field before anything is written. True decodes by the field's name, images with any bit
            depth; a ``Decoder`` uses its own settings. A file that is truncated, or is not the image that its name
            claims, is then an error now, not in training. The workers do this, and files are read twice.
        resume: Continue the work of an earlier call with the same arguments, and accept its finished datasets. False
            starts over.
        overwrite: Replace another dataset at the destination. Files that do not belong to a dataset are never deleted.
        progress: Show a bar on standard error, if that is a terminal.
        storage_options: Passed to the destination's storage. A shard for remote storage is held in ``TMPDIR`` until it
            is complete. All samples of a plain iterable or a transform are held there until they are packed, unless an
            executor has processes.

    Returns:
        The manifests, by split; without ``splits``, one under the destination's name.

    Raises:
        DatasetExistsError: The destination has another dataset, or an unfinished one from other arguments or another
            source; or it has files and no dataset. Nothing was changed.
        SampleError: A key or a field cannot be written, a key occurs twice, or a sample is larger than a shard. No
            shard was written.
        CodecError: A value cannot be encoded. Or ``check`` found fields that cannot be decoded; the message names the
            first 100. No shard was written.
        SourceError: The source is empty, changed while it was read, or returns another key or size than it promised.
        WorkerError: A worker process, or a worker of the executor, died. The same call continues from there.
        ArgumentError: A column names a field that no sample has. No shard was written.
        StorageError: A file could not be read or written, for example because the disk is full. The same call continues
            from there.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> samples = ({"__key__": f"{i:04d}", "cls": i % 10} for i in range(100))
        >>> pack(samples, f"{folder}/digits", splits={"train": 0.8, "val": 0.2})["train"].num_samples
        91
    """
    seed = check_whole("seed", seed)
    request = Request(
        shard_bytes=parse_bytes(shard_bytes),
        shard_samples=check_shard_samples(shard_samples),
        seed=seed if shuffle else None,
        compression=compression if compression == "auto" else _spelled(parse_compression(compression)),
        block_bytes=parse_bytes(block_bytes),
        columns=ColumnMaker(columns).columns,
        splits=check_splits(splits),
        split_by=split_by,
        transform=None if transform is None else SampleTransform(transform, seed=seed),
    )
    if not isinstance(source, ListedSource | Iterable) or isinstance(source, _NO_SOURCE):
        remedy = "; call it, to give the samples that it yields" if inspect.isgeneratorfunction(source) else ""
        remedy = "; a ShardSource packs shards again" if isinstance(source, ShardDataset) else remedy
        raise ArgumentError(
            f"source is {type(source).__name__}, expected ImageFolder or another source, or samples{remedy}"
        )
    workers = Workers(num_workers=num_workers, worker_type=worker_type, executor=executor)
    folder = clean_destination(destination)
    decoder = parse_check("check", check)
    job = _Pack(source, folder, request, workers, decoder=decoder, storage_options=storage_options, progress=progress)
    return job.run(resume=resume, overwrite=overwrite)
