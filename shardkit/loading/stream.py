"""Shards -> samples for training, forward only: shuffled by shard and in a buffer, decoded, transformed, batched."""

import inspect
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from os import PathLike
from typing import Any, Literal, TypeVar

import numpy as np
from torch import Tensor, distributed
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from shardkit.codecs.registry import Decoder
from shardkit.errors import ArgumentError, CodecError, SampleError, check_choice, check_whole
from shardkit.format.classes import ClassMap
from shardkit.hashing import derive, hash_key, mix64_array, shuffled
from shardkit.loading.collate import channels_first, holds_images
from shardkit.loading.epochs import Pass, SharedEpochs, Skipped, Skipper
from shardkit.order.ranks import find_place
from shardkit.reading.class_lists import join_class_lists, with_class_lists
from shardkit.reading.forward import ShardLocation, find_shards, read_shard
from shardkit.reading.missing import check_streamed
from shardkit.sample import KEY, RESERVED, URL, FieldSelection, Sample
from shardkit.storage.base import STDIN, split_url
from shardkit.storage.registry import storage_for
from shardkit.transforms.apply import (
    FieldFunctions,
    Transform,
    decode_fields,
    parse_decode,
    undecoded_fields,
    was_undecodable,
)
from shardkit.transforms.rng import Rng

T = TypeVar("T")

# The purpose of each key, so that no two random choices of an epoch use the same numbers.
_SHARDS, _BUFFER, _REST, _TRANSFORM = 1, 2, 3, 4
_DRAWS = 1024


class StreamWarning(UserWarning):
    """Warns of something that a stream cannot guarantee and that its user should know."""


class ShardStream(IterableDataset[Any]):
    """Stream the samples of shards, strictly forward, for a training loop or a ``DataLoader``.

    Every shard is read by exactly one DataLoader worker of one rank, so every sample is returned exactly once per
    epoch. Every iteration is the next epoch and has a different order; the same seed, epoch, ranks and workers give the
    same order again. A damaged shard is an error; it is never read as a shorter shard.

    Workers without a shard end immediately, so give at least ``world_size * num_workers`` shards. Ranks have different
    numbers of batches. There is no ``len()``: how many samples a worker gets depends on its shards, and torch would
    rely on a wrong length. ``num_samples`` is the number of all samples, if manifests contain it.

    With a ``DataLoader``, either let it make the batches (pass ``batch_size=32`` to it), or make them here and pass it
    ``batch_size=None``. The latter sends whole batches between processes and is faster.

    Args:
        urls: A dataset's folder, shards, brace patterns, wildcards, ``-`` for standard input (without workers), or a
            list of these. Only shards of a folder with a manifest are compared with their indexes, which detects
            changed data.
        fields: What to read, all by default: ``("jpg", "cls")``, or ``{"image": "jpg;png", "label": "cls?"}`` with
            new names, alternatives, and ``?`` for None where the field is missing. A name may say how an image is
            decoded: ``"seg.png:unchanged"`` for the stored values (grey, 16 bits, palette numbers), ``:pil``,
            ``:bytes``, or ``:rgb``, the default. Other fields are not kept or decoded, and large ones are not read from
            uncompressed local files.
        decode: True to decode fields by their names, False for bytes, or a ``Decoder`` with other settings.
        shuffle: Whether each epoch has a different order of shards and samples. False for the order as given, one shard
            after the other.
        seed: The key of the orders.
        buffer_size: How many undecoded samples are mixed; 0 mixes none, so that only the order of shards changes. The
            first sample is returned when the buffer is full.
        open_shards: How many shards are read in turns into the buffer, so that it holds samples of more than one shard.
            Each takes up to a megabyte of memory, and is one more place for a disk to read from: the read-ahead of a
            spinning disk serves 4, and a buffer of 1 000 still has 250 samples of each.
        transform: Called with every decoded sample, and its return value is yielded. Or a mapping like
            ``{"image": function}`` for single fields, which leaves None unchanged, or for several fields
            ``{("image", "mask"): function}``, with a function of a dict. An image transform decodes the image itself.
            A parameter named ``rng`` gets an ``Rng`` keyed by seed, epoch and the sample's key. Errors of a transform
            are never skipped.
        batch_size: How many samples a batch has. Batches are made by torch's ``default_collate``: arrays become tensors
            with a new first dimension, keys become lists. Images become uint8, (batch, 3, height, width), with the
            channels last in memory; ``:unchanged`` images may have other channels, or none, or be uint16. By default,
            single samples are yielded.
        drop_last: Leave out the last batch of a worker if it is not full.
        on_error: ``"skip"`` leaves out samples with a field that is missing or cannot be decoded, and the rest of
            damaged shards, with a line in the log for each shard. Files that are missing or cannot be read are always
            errors.
        max_skipped: How many samples and shards together may be left out per epoch, over all workers of this rank.
        rank: This process's number: by default torch.distributed's if it is initialised, otherwise torchrun's ``RANK``,
            otherwise 0.
        world_size: The number of ranks, with the same defaults.
        allow_any_url: Let a manifest name shards outside its folder, as ``shardkit index --out`` writes them.
        storage_options: Passed to the storage.

    Attributes:
        num_samples: How many samples all ranks have together; None if a shard has no manifest.
        classes: The names of the classes, by number; empty if they are not known. Different class lists of several
            datasets are joined into one, and class numbers are mapped to it in fields whose name ends in ``cls``.

    Raises:
        ArgumentError: An argument is out of range, or only one of rank and world_size is known.
        DatasetError: There are no shards, or a manifest is not usable. Or some datasets name their classes, and another
            one has class numbers without names. While iterating, an index is not usable.
        StorageError: Shards or indexes on this machine are missing. While iterating, one is missing or cannot be read.
        ShardError: While iterating, a shard is damaged.
        CodecError: While iterating, a field cannot be decoded.
        SampleError: While iterating, a sample lacks a field, or a class number that must be mapped has no name.
        TooManySkippedError: While iterating, more than ``max_skipped`` samples and shards were left out.

    Example:
        >>> import tempfile, shardkit
        >>> folder = tempfile.mkdtemp() + "/digits"
        >>> digits = ({"__key__": f"{i:04d}", "cls": i % 10} for i in range(100))
        >>> _ = shardkit.pack(digits, folder, progress=False)
        >>> stream = ShardStream(folder, fields={"label": "cls"}, shuffle=False)
        >>> stream.num_samples, sorted(sample["label"] for sample in stream) == sorted(list(range(10)) * 10)
        (100, True)
    """

    def __init__(  # noqa: PLR0913 - they are independent, and all but the first are named
        self,
        urls: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        fields: Sequence[str] | Mapping[str, str] | None = None,
        decode: bool | Decoder = True,
        shuffle: bool = True,
        seed: int = 0,
        buffer_size: int = 1000,
        open_shards: int = 4,
        transform: Callable[..., Any] | FieldFunctions | None = None,
        batch_size: int | None = None,
        drop_last: bool = False,
        on_error: Literal["raise", "skip"] = "raise",
        max_skipped: int = 100,
        rank: int | None = None,
        world_size: int | None = None,
        allow_any_url: bool = False,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        check_choice("on_error", on_error, ("raise", "skip"))
        self._place = rank, world_size
        find_place(rank, world_size)  # so that wrong ones are refused before anything is read
        self._selection = FieldSelection.parse(fields)
        self._decoder = parse_decode(decode, self._selection)
        self._shuffle = shuffle
        self._seed = check_whole("seed", seed)
        self._buffer_size = check_whole("buffer_size", buffer_size, least=0)
        self._open_shards = check_whole("open_shards", open_shards, least=1)
        self._transform = Transform.parse(transform)
        if self._selection.wanted:
            self._transform.check_names([*self._selection.wanted, *RESERVED])
        self._undecoded = undecoded_fields([self._transform], self._decoder)
        self._batch_size = None if batch_size is None else check_whole("batch_size", batch_size, least=1)
        self._drop_last = drop_last
        self._skips = on_error == "skip"
        self._max_skipped = check_whole("max_skipped", max_skipped, least=0)
        self._storage_options = storage_options
        self._shards = find_shards(urls, storage_options, allow_any_url=allow_any_url)
        if bare := [location.url for location in self._shards if location.shard is None]:
            check_streamed(storage_for(bare[0], storage_options), urls, bare)
        datasets = {
            (id(at.classes), split_url(at.url)[0]) for at in self._shards
        }  # compared as objects, not name by name
        if len(datasets) > 1:
            self._shards = with_class_lists(self._shards, storage_options)
        self.classes, self._class_maps = join_class_lists(self._shards, self._selection)
        self._epochs = SharedEpochs()
        self._has_stdin = any(location.url == STDIN for location in self._shards)
        # The seed of the loader that this worker process belongs to; and how often that loader, or without workers this
        # process, has iterated.
        self._worker_seed: int | None = None
        self._iterations = 0
        counts = [None if location.shard is None else location.shard.samples for location in self._shards]
        self.num_samples = None if None in counts else sum(count or 0 for count in counts)
        self._warn()

    def __repr__(self) -> str:
        samples = "samples not counted" if self.num_samples is None else f"{self.num_samples:,} samples"
        return f"ShardStream({samples} in {len(self._shards):,} shards)"

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch, and later iterations the epochs that follow.

        It is not needed: every iteration is the next epoch anyway. The same epoch has the same order again.

        Args:
            epoch: The number of the epoch, from 0.

        Raises:
            ArgumentError: It is negative, or not a whole number.
        """
        self._epochs.set_next(check_whole("epoch", epoch, least=0))

    @property
    def skipped(self) -> Skipped:
        """The numbers of samples and shards left out so far in the latest epoch, over all workers of this rank."""
        return self._epochs.skipped

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: every worker must join its pass when torch calls this, not when it asks for the first sample.
        worker = get_worker_info()
        if self._has_stdin and self._iterations:
            raise ArgumentError("standard input can be read once, and was; for more epochs, write it to a file first")
        if worker is None:
            self._iterations += 1
            current, number, workers = self._epochs.begin(), 0, 1
        else:
            if self._has_stdin:
                raise ArgumentError("standard input cannot be shared by worker processes; pass num_workers=0")
            base = worker.seed - worker.id  # the same for all workers of a loader
            self._iterations = self._iterations + 1 if base == self._worker_seed else 1
            self._worker_seed = base
            number, workers = worker.id, worker.num_workers
            current = self._epochs.begin(derive(base, self._iterations, workers), number)
        rank, world_size = find_place(*self._place)  # not earlier: torch.distributed may be initialised late
        shards = [self._shards[i] for i in self._shard_order(current.epoch)[rank::world_size][number::workers]]
        key = derive(self._seed, current.epoch, _BUFFER, rank, number)
        return self._run(shards, current, key)

    def _shard_order(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._shards))
        order: list[int] = shuffled(len(self._shards), key=derive(self._seed, epoch, _SHARDS)).tolist()
        return order

    def _run(self, shards: list[ShardLocation], current: Pass, key: int) -> Iterator[Any]:
        skipper = Skipper(self._epochs, current, self._max_skipped) if self._skips else None
        samples = _interleave(
            (self._read(shard, skipper) for shard in shards), self._open_shards if self._shuffle else 1
        )
        if self._shuffle and self._buffer_size:
            samples = _mix(samples, self._buffer_size, key)
        if self._selection.wanted or self._decoder or self._transform:
            samples = self._made(samples, derive(self._seed, current.epoch, _TRANSFORM), skipper)
        if self._batch_size is None:
            return samples
        return map(self._channels_first, _batches(samples, self._batch_size, drop_last=self._drop_last))

    def _channels_first(self, batch: Any) -> Any:
        """Return a batch with its images as (batch, channels, height, width). In memory, the channels stay last."""
        for name, value in batch.items() if isinstance(batch, dict) else ():
            if isinstance(value, Tensor) and holds_images(self._selection, name):
                batch[name] = channels_first(value)
        return batch

    def _read(self, shard: ShardLocation, skipper: "Skipper | None") -> Generator[Sample, None, None]:
        samples = read_shard(shard, selection=self._selection, storage_options=self._storage_options)
        if skipper is not None:
            samples = skipper.without_damage(samples, shard.url)
        class_map = self._class_maps.get(shard.classes)
        return samples if class_map is None else _mapped(samples, class_map, skipper)

    def _made(self, samples: Iterator[Sample], key: int, skipper: "Skipper | None") -> Iterator[Any]:
        """Decode and transform."""
        for sample in samples:
            decoded: Any = None
            try:
                value = decoded = decode_fields(sample, self._selection, self._decoder, undecoded=self._undecoded)
                if self._transform:
                    rng = Rng(derive(key, hash_key(sample[KEY]))) if self._transform.needs_rng else None
                    value = self._transform(decoded, rng)
            except (CodecError, SampleError) as error:
                is_of_transform = decoded is not None and not was_undecodable(decoded, error)
                if skipper is None or is_of_transform:
                    raise
                skipper.skip_sample(sample[URL], error)
                continue
            yield value

    def _warn(self) -> None:
        _, world_size = find_place(*self._place)
        if world_size > 1:
            _warn_user(
                f"ShardStream deals whole shards to {world_size} ranks, so they have different numbers of batches. "
                "Code that waits for all ranks at every step, like DistributedDataParallel, hangs at an epoch's end; "
                "stop all ranks after a number of batches that each of them has"
            )
        if self.num_samples is None:
            _warn_user(
                "these shards are read without an index: cut shards are detected, changed data is not, and there is no "
                "exact resuming. 'shardkit index FOLDER' makes one; then pass the folder instead of its shards"
            )

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker has the environment of its rank, but no initialised torch.distributed.
        is_rank = distributed.is_available() and distributed.is_initialized()
        return {**self.__dict__, "_place": find_place(*self._place) if is_rank else self._place}


def _mapped(
    samples: Generator[Sample, None, None], class_map: ClassMap, skipper: "Skipper | None"
) -> Generator[Sample, None, None]:
    """Yield samples with the class numbers of the joined list."""
    with closing(samples):
        for sample in samples:
            try:
                mapped = class_map.apply(sample)
            except SampleError as error:
                if skipper is None:
                    raise
                skipper.skip_sample(sample[URL], error)
                continue
            yield mapped


def _interleave(sources: Iterator[Generator[T, None, None]], at_once: int) -> Iterator[T]:
    """Yield from ``at_once`` sources in turns. When one ends, the next takes its place."""
    active = list(islice(sources, at_once))
    try:
        while active:
            if len(active) == 1:
                yield from active[0]
                active = list(islice(sources, 1))
                continue
            for source in tuple(active):
                try:
                    yield next(source)
                except StopIteration:
                    position = active.index(source)
                    active[position : position + 1] = islice(sources, 1)
    finally:
        for source in active:
            source.close()


def _mix(samples: Iterator[T], buffer_size: int, key: int) -> Iterator[T]:
    """Yield all samples, each from a random place of a full buffer, and finally the rest of the buffer, shuffled."""
    buffer = list(islice(samples, buffer_size))
    places = _draws(buffer_size, key)
    for sample, place in zip(samples, places, strict=False):
        yield buffer[place]
        buffer[place] = sample
    for place in shuffled(len(buffer), key=derive(key, _REST)).tolist():
        yield buffer[place]


def _draws(below: int, key: int) -> Iterator[int]:
    """Yield an endless sequence of random numbers in [0, below), always the same for a key."""
    start = np.uint64(0)
    while True:
        numbers = mix64_array(mix64_array(np.arange(_DRAWS, dtype=np.uint64) + start) ^ np.uint64(key))
        yield from (((numbers >> np.uint64(32)) * np.uint64(below)) >> np.uint64(32)).tolist()
        start += np.uint64(_DRAWS)


def _batches(samples: Iterator[Any], batch_size: int, *, drop_last: bool) -> Iterator[Any]:
    while batch := list(islice(samples, batch_size)):
        if drop_last and len(batch) < batch_size:
            return
        try:
            collated = default_collate(batch)
        except (RuntimeError, TypeError, KeyError) as error:
            error.add_note(
                "The samples of a batch must have the same fields, of equal shapes and not None: bring them into one "
                "shape with transform=, or omit batch_size and give the DataLoader a collate_fn"
            )
            raise
        yield collated


def _warn_user(message: str) -> None:
    """Warn at the line outside of shardkit that called it."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith("shardkit."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, StreamWarning, stacklevel=level)
