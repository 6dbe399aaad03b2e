"""Batches for a training loop: every sample exactly once an epoch, always in the same order, resumable after any batch.

``ShardLoader`` defines the batches, counts those that were returned, and keeps the state; the engine makes them.
"""

import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NoReturn, TypedDict

from shardkit.errors import ArgumentError, StateError, check_choice, check_whole
from shardkit.loading.batch_memory import BatchMaker
from shardkit.loading.collate import Batch, without_rows
from shardkit.loading.columnar import Arena, ColumnReader
from shardkit.loading.engine import Engine, Finished
from shardkit.loading.epochs import too_many_skipped
from shardkit.loading.rows import RowMaker, RowProcesses, RowThreads
from shardkit.order.plan import OPEN_BLOCKS, Batches
from shardkit.order.ranks import find_place
from shardkit.reading.dataset import ShardDataset
from shardkit.reading.memory import Buffers, SharedBuffers, keep_freed_memory
from shardkit.storage.base import format_bytes, parse_bytes
from shardkit.transforms.apply import FieldFunctions, Transform

STATE_VERSION = 1

_log = logging.getLogger("shardkit")


class LoaderState(TypedDict):
    """The position of a loader: the same on every rank, a few hundred bytes of JSON.

    Attributes:
        version: The version of this format.
        dataset: The dataset's digest, which includes its selection.
        block_samples: How many samples a block has.
        lanes: How many lanes the order has.
        shuffle: Whether the order is shuffled.
        seed: The seed of the order.
        epoch: The epoch of the next batch.
        position: How many samples of this epoch all ranks together have received.
    """

    version: int
    dataset: str
    block_samples: int
    lanes: int
    shuffle: bool
    seed: int
    epoch: int
    position: int


class ShardLoader:
    """Batches of a dataset, for a training loop: shuffled, decoded, transformed, in an order that is always the same.

    Every sample is returned exactly once per epoch, over all ranks. Every rank has the same number of batches, none of
    them empty unless samples are skipped. The order depends only on the dataset, ``seed``, the epoch and ``lanes``: not
    on ranks, workers or time.

    A batch is a dict of the dataset's fields and ``__key__``, the list of keys. A field is a tensor if the values of
    all samples have one shape and type, otherwise a list. Before ``model(**batch)``, remove the keys with
    ``batch.pop("__key__")`` or with a ``collate_fn``. Images are uint8, (batch, 3, height, width), with the channels
    last in memory: ``.flatten(1)`` accepts them, ``.view(batch, -1)`` does not. A stock ``DataLoader`` over the dataset
    makes different batches: images are (batch, height, width, 3), and there is also ``__url__``.

    Batches are in this machine's memory. If torch finds a GPU, their images and arrays are in pinned memory, so that
    ``batch["image"].to("cuda", non_blocking=True)`` copies while the GPU computes.

    Each ``iter()`` is the next epoch, from 0, even if the previous one was left early. An epoch from which no batch was
    taken is not counted. ``state_dict()`` may be called between any two batches. After ``load_state_dict()``, the
    loader resumes after the last batch that was returned, with any number of ranks, workers and samples per batch.

    A loader can be copied and pickled, for example for a spawned process. The copy resumes where the loader is.

    Lightning saves and loads a loader's state automatically. Accelerate does so after
    ``register_for_checkpointing(loader)``; its ``prepare`` does not change a loader, so your loop must copy batches to
    the GPU. An HF ``Trainer`` whose ``get_train_dataloader`` returns a loader resumes with ``ignore_data_skip=True``
    and a callback that saves the loader's state in ``on_save`` and loads it in ``on_train_begin``.

    If several ranks must get the same samples (those of one tensor-parallel group), give each of them the same ``rank``
    and ``world_size``: the group's number and the number of groups.

    Args:
        dataset: The dataset to load.
        batch_size: How many samples a batch of this rank has. The last batch may have fewer. If fewer samples than
            ranks would remain after a batch, they are added to it, and some ranks get one more.
        shuffle: Whether each epoch has a different order. False for the dataset's own order.
        seed: The key of the orders.
        transform: Called with every decoded sample, a dict, and returns the dict that is put into the batch. Or a
            mapping with functions for single fields, as in ``{"image": function}``, or for several fields, by a tuple
            of names. A parameter named ``rng`` gets a ``shardkit.Rng`` for this sample in this epoch. Several threads
            may call it at the same time.
        collate_fn: Called with a list of the samples that ``transform`` returned; its return value is the batch.
            Several threads may call it at the same time. The list is empty if ``on_error="skip"`` has left out all
            samples of a batch.
        num_workers: How many threads or processes decode and transform; by default one per processor. More threads
            than processors are started only when threads wait for data, for example from a server.
        worker_type: ``"process"`` for a transform whose Python code holds the GIL. Processes are spawned, so a script
            needs ``if __name__ == "__main__":``, and the transform must be importable.
        memory: How many bytes of blocks may be held, in bytes or as text: the blocks that the order mixes at a time,
            and those fetched ahead. If the whole dataset fits, each block is read once per epoch.
        lanes: How many places of the dataset a batch draws from; by default as many as mix well in 512 MB over all
            ranks. Part of the order and of the state. ``shardkit shuffle-report`` shows its effect.
        drop_last: Leave out the last batch if it is not full.
        on_error: ``"skip"`` leaves samples that are damaged or cannot be decoded out of their batch, and counts them.
            The number of batches stays the same, so a batch may have few samples or none. A batch without samples has
            the fields of the previous batch, with tensors and lists of length 0; if there is no previous batch, it is
            an error. Errors of a transform are never skipped.
        max_skipped: How many samples per epoch this rank may skip.
        rank: This process's number: by default torch.distributed's, otherwise that in torchrun's environment,
            otherwise 0.
        world_size: The number of ranks, found in the same way.

    Attributes:
        dataset: The dataset.
        batch_size: As given.

    Raises:
        ArgumentError: An argument is out of range, or ``memory`` is too small for the blocks that the order holds open;
            or while iterating, there are fewer samples than ranks.
        ShardError: While iterating, a shard is damaged; raised in place of the batch with the damaged sample.
        CodecError: While iterating, a field cannot be decoded; raised in place of the batch with that sample.
        SampleError: While iterating, a sample lacks a field; raised in place of the batch with that sample.
        StateError: While iterating, fewer samples than ranks remain in the epoch of a loaded state.
        TooManySkippedError: While iterating, more than ``max_skipped`` samples were skipped, or all of the first batch.
        WorkerError: While iterating, a worker process died.

    Example:
        >>> import tempfile, shardkit
        >>> folder = tempfile.mkdtemp() + "/digits"
        >>> samples = ({"__key__": f"{i:04d}", "cls": i % 10} for i in range(100))
        >>> _ = shardkit.pack(samples, folder, progress=False)
        >>> loader = ShardLoader(shardkit.ShardDataset(folder, fields={"label": "cls"}), batch_size=32)
        >>> [len(batch["label"]) for batch in loader]
        [32, 32, 32, 4]
        >>> len(loader), loader.state_dict()["epoch"], loader.state_dict()["position"]
        (4, 1, 0)
    """

    def __init__(  # noqa: PLR0913 - they are independent, and all but the first two are named
        self,
        dataset: ShardDataset,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        transform: Callable[..., Any] | FieldFunctions | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        worker_type: Literal["thread", "process"] = "thread",
        memory: int | str = "1GB",
        lanes: int | None = None,
        drop_last: bool = False,
        on_error: Literal["raise", "skip"] = "raise",
        max_skipped: int = 100,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        if not isinstance(dataset, ShardDataset):
            raise ArgumentError(f"dataset is {type(dataset).__name__}, expected ShardDataset('path/of/the/dataset')")
        check_choice("worker_type", worker_type, ("thread", "process"))
        check_choice("on_error", on_error, ("raise", "skip"))
        if collate_fn is not None and not callable(collate_fn):
            raise ArgumentError(f"collate_fn is {collate_fn!r}, expected a function of a list of samples")
        self.dataset, processors = dataset, len(os.sched_getaffinity(0))
        self.batch_size = check_whole("batch_size", batch_size, least=1)
        self._shuffle = bool(shuffle)
        self._seed = check_whole("seed", seed)
        self._lanes = dataset.order(seed=0, epoch=0, lanes=lanes, shuffle=self._shuffle).lanes
        self._num_workers = check_whole("num_workers", processors if num_workers is None else num_workers, least=1)
        self._busy_workers = self._num_workers if worker_type == "process" else min(self._num_workers, processors)
        self._memory = parse_bytes(memory)
        keep_freed_memory()
        self._buffers = Buffers(self._memory)
        self._drop_last, self._skips, self._makes_dicts = bool(drop_last), on_error == "skip", collate_fn is None
        self._max_skipped = check_whole("max_skipped", max_skipped, least=0)
        self._place = rank, world_size
        dataset.check_transform(parsed := Transform.parse(transform))
        transforms = tuple(one for one in (dataset.transform, parsed) if one)
        maker = RowMaker(dataset.selection, dataset.decoder, transforms, self._seed)
        results = Buffers(self._memory) if worker_type == "thread" else SharedBuffers(self._memory)
        self._make_batch = BatchMaker(dataset.selection, collate_fn, results)
        reader = ColumnReader(dataset.selection, dataset.decoder)
        is_light = not (transforms or collate_fn or dataset.columns) and reader.supports(dataset.manifest.fields)
        block_samples = dataset.manifest.block_samples
        self._make_arena = partial(Arena, reader, results, block_samples=block_samples) if is_light else None
        self._make_rows = RowProcesses(maker, self._num_workers) if worker_type == "process" else RowThreads(maker)
        # The position of the next batch, and the pass that is under way there, which the next epoch follows. The pass
        # is kept as a token and not as the object itself, which must end when the training loop drops it.
        self._epoch = self._position = self._skipped = 0
        self._pass: object | None = None
        self._empty: Batch | None = None  # the last batch without its rows
        # A pass from which no batch was taken does not count as an epoch: Lightning makes one as a test.
        self._is_used = False
        self._find_batches()

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._epoch

    @property
    def skipped(self) -> int:
        """The number of samples that this rank has skipped in its latest epoch."""
        return self._skipped

    @property
    def sampler(self) -> NoReturn:
        """Not available: training frameworks that find one build a stock ``DataLoader`` from it, with other batches.

        Raises:
            AttributeError: Always. The message says what to do instead.
        """
        raise AttributeError(
            "a ShardLoader has no sampler: its order is part of it. To resume with an HF Trainer, pass "
            "ignore_data_skip=True, save state_dict() in on_save, and pass it to load_state_dict() in on_train_begin",
            name="sampler",
            obj=self,
        )

    def __repr__(self) -> str:
        at = f"epoch={self._epoch:,}, position={self._position:,}"
        return f"{type(self).__name__}({self.dataset!r}, batch_size={self.batch_size:,}, {at})"

    def __len__(self) -> int:
        """Return the number of batches of the next ``iter()``; after ``load_state_dict``, the number that remains."""
        return self._find_batches().count(self._position if self._pass is None else 0)

    def __iter__(self) -> Iterator[Any]:
        if self._is_used:
            self._epoch, self._position = self._epoch + 1, 0
        batches = self._find_batches()
        if batches.leaves_ranks_empty(self._position):
            if self._position == 0:
                raise batches.too_few()
            remain = batches.num_samples - self._position
            raise StateError(
                f"epoch {self._epoch}: {remain} samples remain, fewer than the {batches.world_size} ranks, and no rank "
                f"may get an empty batch; finish the epoch on at most {remain} ranks, leave them out with "
                f"set_epoch({self._epoch + 1}), or pass drop_last=True"
            )
        token = object()
        made = _Pass(partial(self._take, token), self._engine(batches))
        self._pass, self._is_used, self._skipped = token, False, 0
        return made

    def __reduce__(self) -> tuple[Callable[..., "ShardLoader"], tuple[Any, ...]]:
        names = ("_epoch", "_position", "_skipped", "_pass", "_is_used", "_empty")
        return _restored, (partial(type(self), **self._arguments), {name: getattr(self, name) for name in names})

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` start at the beginning of this epoch, and later ones continue with the next epochs.

        It is not needed: each ``iter()`` is the next epoch anyway. If a state of this epoch was loaded, the next
        ``iter()`` still resumes there.

        Args:
            epoch: The number of the epoch, from 0.

        Raises:
            ArgumentError: It is negative, or not a whole number.
        """
        epoch = check_whole("epoch", epoch, least=0)
        if self._is_used or epoch != self._epoch:
            self._pass, self._is_used, self._epoch, self._position = None, False, epoch, 0

    def state_dict(self) -> LoaderState:
        """Return the loader's position, which is after the last batch that ``next()`` returned. See ``LoaderState``."""
        return {
            "version": STATE_VERSION,
            "dataset": self.dataset.digest,
            "block_samples": self.dataset.manifest.block_samples,
            "lanes": self._lanes,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next ``iter()`` resume where a state was taken.

        The number of ranks, of workers and of samples per batch may have changed since.

        Args:
            state_dict: The state that ``state_dict()`` returned, on any rank.

        Raises:
            StateError: It is of another dataset, selection or order, or is not a state. The loader is unchanged.

        Example:
            >>> import tempfile, shardkit
            >>> folder = tempfile.mkdtemp() + "/digits"
            >>> _ = shardkit.pack(({"__key__": f"{i}", "cls": i} for i in range(10)), folder, progress=False)
            >>> loader = ShardLoader(shardkit.ShardDataset(folder), batch_size=3)
            >>> first = next(iter(loader))
            >>> state = loader.state_dict()
            >>> other = ShardLoader(shardkit.ShardDataset(folder), batch_size=5)
            >>> other.load_state_dict(state)
            >>> sorted(first["__key__"] + [key for batch in other for key in batch["__key__"]])
            ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9']
        """
        self._epoch, self._position = self._check_state(state_dict)
        self._pass, self._is_used = None, False

    def close(self) -> None:
        """End the worker processes. A later ``iter()`` starts new ones. Threads end with their iterator."""
        self._make_rows.close()

    def _check_state(self, state: Mapping[str, Any]) -> tuple[int, int]:
        if not isinstance(state, Mapping) or "version" not in state:
            raise StateError(f"{str(state)[:80]!r} is not a state of a ShardLoader; pass what state_dict() returned")
        if state["version"] != STATE_VERSION:
            raise StateError(
                f"the state is of version {state['version']!r}, this shardkit reads version {STATE_VERSION}; use the "
                "shardkit that wrote it until the epoch has ended"
            )
        own = self.state_dict()
        remedies = {
            "dataset": "open the dataset and the selection (where=, subset) that it was taken with",
            "block_samples": "the dataset was indexed anew with other blocks; restore its index",
            "shuffle": "pass shuffle={}",  # before the lanes: an order that is not shuffled has one lane
            "seed": "pass seed={}",
            "lanes": "pass lanes={}",
        }
        for name, remedy in remedies.items():
            there, here = state.get(name), own[name]  # type: ignore[literal-required] # all of them are names of it
            if there != here or type(there) is not type(here):
                raise StateError(
                    f"the state has {name} {_short(there)}, this loader has {_short(here)}; {remedy.format(there)}, or "
                    "begin an epoch with set_epoch() instead"
                )
        for name, limit in (("epoch", sys.maxsize - 1), ("position", len(self.dataset))):
            value = state.get(name)
            if type(value) is not int or not 0 <= value <= limit:
                raise StateError(f"the state has {name} {value!r}, expected a number from 0 to {limit}; it is damaged")
        return state["epoch"], state["position"]

    def _find_batches(self) -> Batches:
        """Return where batches begin and end. The world size is looked up now: torch.distributed may start late."""
        _, world_size = find_place(*self._place)
        lanes_of_rank = min(self._lanes, -(-self._lanes // world_size) + (self._lanes % world_size > 0))
        total = self.dataset.block_bytes * self.dataset.num_blocks
        needed = min(total, OPEN_BLOCKS * lanes_of_rank * self.dataset.block_bytes)
        if needed > self._memory:
            raise ArgumentError(
                f"memory is {format_bytes(self._memory)}, but the order holds {format_bytes(needed)} open on each of "
                f"{world_size} ranks ({lanes_of_rank} of {self._lanes} lanes, {OPEN_BLOCKS} blocks of "
                f"{format_bytes(self.dataset.block_bytes)} each); raise memory, or pass fewer lanes, which mix less"
            )
        return Batches(len(self.dataset), self.batch_size, world_size, self._drop_last)

    def _engine(self, batches: Batches) -> Engine:
        return Engine(
            self.dataset,
            self.dataset.order(seed=self._seed, epoch=self._epoch, lanes=self._lanes, shuffle=self._shuffle),
            batches,
            position=self._position,
            rank=find_place(*self._place)[0],
            epoch=self._epoch,
            make_rows=self._make_rows,
            make_batch=self._make_batch,
            make_arena=self._make_arena,
            skips=self._skips,
            buffers=self._buffers,
            num_workers=self._num_workers,
            busy_workers=self._busy_workers,
            memory=self._memory,
        )

    def _take(self, token: object, finished: Finished | None) -> Any:
        """Return the batch that a pass has made, and move the loader after it; None is the end of the pass.

        Only the latest pass moves the loader.

        Raises:
            TooManySkippedError: Too many samples were skipped, or all of the first batch.
            BaseException: The error in the batch's place.
        """
        is_current = token is self._pass
        if finished is None:
            if is_current:
                self._pass, self._is_used, self._epoch, self._position = None, False, self._epoch + 1, 0
            return None
        if is_current:
            self._is_used = True
            self._count(finished.skipped)
        if finished.error is not None:
            raise finished.error
        batch = self._filled(finished) if self._skips and self._makes_dicts else finished.value
        if is_current:
            self._position = finished.stop
        return batch

    def _count(self, skipped: Sequence[BaseException]) -> None:
        for error in skipped:
            self._skipped += 1
            if self._skipped == 1:
                _log.warning(
                    "skipped a sample; further skips in this epoch are only counted (see loader.skipped): %s", error
                )
            if self._skipped > self._max_skipped:
                problem = f"{self._skipped:,} samples were skipped, expected at most max_skipped={self._max_skipped:,}"
                raise too_many_skipped(self._epoch, f"{problem}; repair the shards or raise it", error) from error

    def _filled(self, finished: Finished) -> Batch:
        """Return a batch; if all of its rows were skipped, the previous batch without its rows."""
        if finished.value is not None:
            self._empty = without_rows(finished.value)
        elif self._empty is None:
            error = finished.skipped[-1]
            problem = "all samples of a batch were skipped, and there is no batch before it to copy the fields from"
            remedy = "repair the shards, or pass a collate_fn, which then gets an empty list"
            raise too_many_skipped(self._epoch, f"{problem}; {remedy}", error) from error
        return finished.value or without_rows(self._empty)


class _Pass:
    """One iteration over a loader. Its threads end when it ends, fails, or is no longer referenced."""

    def __init__(self, take: Callable[[Finished | None], Any], engine: Engine) -> None:
        self._take = take
        self._engine = engine
        self._is_over = False
        weakref.finalize(self, engine.close, wait=False)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._is_over:  # perhaps after an error, so the engine must not be asked again
            raise StopIteration
        try:
            finished = self._engine.next()
            batch = self._take(finished)
        except BaseException as error:
            self._end(wait=not isinstance(error, KeyboardInterrupt))  # a transform might never end
            raise
        if finished is None:
            self._end(wait=True)
            raise StopIteration
        return batch

    def _end(self, *, wait: bool) -> None:
        self._is_over = True
        self._engine.close(wait=wait)


def _short(value: object) -> str:
    """Return a value of a state for a message, with a digest shortened to its first characters."""
    return f"'{value[:12]}...'" if isinstance(value, str) and len(value) > 12 else repr(value)


def _restored(make: Callable[[], ShardLoader], place: Mapping[str, Any]) -> ShardLoader:
    """Return a new loader at the position of another."""
    loader = make()
    vars(loader).update(place)
    return loader
