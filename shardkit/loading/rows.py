"""The bytes of a sample -> a row of a batch, here or in another process.

A worker process gets the bytes of rows through a pipe and makes values from them. It writes them into the batch, in
memory that it shares with its parent, and sends back those that do not fit there. The memory has no name and the
process has no files. So nothing is left behind when the parent is killed: the pipe ends, and then the process.
"""

import contextlib
import os
import pickle
import signal
import threading
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from shardkit.codecs.registry import Decoder
from shardkit.errors import ArgumentError, CodecError, SampleError, ShardError, WorkerError, check_importable
from shardkit.hashing import derive, extend
from shardkit.loading.batch_memory import Column, Slab
from shardkit.reading.memory import SharedMemory
from shardkit.sample import FieldSelection, Sample
from shardkit.transforms.apply import Transform, decode_fields, undecoded_fields, was_undecodable
from shardkit.transforms.resize import use_one_thread
from shardkit.transforms.rng import Rng

V = TypeVar("V")

_MAPPED = 16  # batches whose memory a process keeps mapped: more than are made at a time
_TRANSFORM = 4  # the purpose of a key: random numbers of transforms; the order's keys use 1 to 3


class RawRow(NamedTuple):
    """A row to be made: a sample's bytes, and its epoch and position.

    Attributes:
        sample: The fields' bytes, with ``__key__`` and ``__url__``; or the error of reading them.
        epoch: The epoch's number.
        position: The row's position in the epoch.
    """

    sample: Sample | Exception
    epoch: int
    position: int


class Row(NamedTuple):
    """A row of a batch.

    Attributes:
        value: The value that the transforms returned; None if there was an error.
        error: The error; None if there was none.
        is_skippable: Whether the error is caused by the sample itself, and not by a transform.
    """

    value: Any
    error: BaseException | None = None
    is_skippable: bool = False


@dataclass(frozen=True)
class RowMaker:
    """Makes rows: picks, decodes and transforms fields. It can be pickled if the transforms can be.

    Attributes:
        selection: Which fields are picked.
        decoder: How they are decoded; None keeps bytes.
        transforms: The transforms, called one after the other.
        seed: Together with epoch and position, the key of a transform's random numbers.
    """

    selection: FieldSelection
    decoder: Decoder | None
    transforms: tuple[Transform, ...]
    seed: int

    @cached_property
    def _undecoded(self) -> frozenset[str]:
        return undecoded_fields(self.transforms, self.decoder)

    @cached_property
    def _needs_rng(self) -> bool:
        return any(transform.needs_rng for transform in self.transforms)

    def __call__(self, raw: RawRow, slab: Slab | None = None, number: int = 0) -> Row:
        """Return the row, with its error if there was one. It raises nothing.

        Args:
            raw: The row to be made.
            slab: The memory for values that fit there; others are returned.
            number: The number of the row in the slab.
        """
        if isinstance(raw.sample, Exception):
            return Row(None, raw.sample, isinstance(raw.sample, ShardError))
        try:
            value: Any = decode_fields(raw.sample, self.selection, self.decoder, undecoded=self._undecoded)
        except (CodecError, SampleError) as error:
            return Row(None, error, is_skippable=True)
        except BaseException as error:  # noqa: BLE001 - it is raised in the place of its batch
            return Row(None, error)
        rng = Rng(extend(_epoch_key(self.seed, raw.epoch), raw.position)) if self._needs_rng else None
        outs = slab.row(number) if slab else None
        try:
            for transform in self.transforms:
                # Only the last one writes there directly: it could overwrite an earlier one's value while reading it.
                value = transform(value, rng, outs if transform is self.transforms[-1] else None)
            if slab and outs:
                value = slab.put(value, outs)
        except BaseException as error:  # noqa: BLE001 - as above
            return Row(None, error, is_skippable=was_undecodable(value, error))
        return Row(value)


@lru_cache(16)
def _epoch_key(seed: int, epoch: int) -> int:
    """Return the key of an epoch, from which the keys of its rows are derived."""
    return derive(seed, epoch, _TRANSFORM)


class RowThreads:
    """Makes rows in the thread that calls it. From then on, torch uses no additional threads in that thread."""

    def __init__(self, maker: RowMaker) -> None:
        self._maker = maker
        self._caller = threading.local()

    def __call__(self, raws: Sequence[RawRow], slab: Slab | None = None, start: int = 0) -> list[Row]:
        """Return the rows.

        Args:
            raws: The rows to be made.
            slab: The memory for values that fit there; others are returned.
            start: The number of the first row in the slab.
        """
        if not hasattr(self._caller, "is_ready"):
            use_one_thread()
            self._caller.is_ready = True
        return [self._maker(raw, slab, number) for number, raw in enumerate(raws, start)]

    def close(self) -> None:
        """Do nothing: the threads belong to the caller."""


class RowProcesses:
    """Makes rows in processes, which are started when they are first needed, and then kept.

    Args:
        maker: Makes the rows.
        count: The number of processes. The same number of threads may call at the same time.

    Raises:
        ArgumentError: The transforms or codecs cannot be pickled.
    """

    def __init__(self, maker: RowMaker, count: int) -> None:
        try:
            self._maker = pickle.dumps(maker)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ArgumentError(
                f"transform= and the codecs must be picklable for worker_type='process' ({error}); define them at the "
                "top of a module, or use threads"
            ) from error
        check_importable(self._maker)
        self._count = count
        self._lock = threading.Lock()
        self._processes: list[_Process] = []
        # None wakes a waiting thread, so that it checks again.
        self._idle: SimpleQueue[_Process | None] = SimpleQueue()
        weakref.finalize(self, _close_all, self._processes)

    def __call__(self, raws: Sequence[RawRow], slab: Slab | None = None, start: int = 0) -> list[Row]:
        """Return the rows, made by one of the processes. It writes them into the slab if it can map that memory.

        Args:
            raws: The rows to be made.
            slab: The memory for values that fit there, from ``SharedBuffers``; others are returned.
            start: The number of the first row in the slab.

        Raises:
            WorkerError: The process has died.
            Exception: Its result cannot be unpickled. After any error, another process replaces it.
        """
        process = self._take()
        try:
            rows = process.make(raws, slab, start)
            self._idle.put(process)
        except BaseException:  # the process is in an unknown state
            self._end([process])
            raise
        return rows

    def _take(self) -> "_Process":
        while True:
            with self._lock:
                if len(self._processes) < self._count:
                    self._processes.append(_Process(self._maker))
                    return self._processes[-1]
            process = self._idle.get()
            if process in self._processes:  # it may have been closed meanwhile
                return process

    def close(self) -> None:
        """End the processes. Rows in progress are dropped."""
        self._end(self._processes.copy())

    def _end(self, processes: list["_Process"]) -> None:
        with self._lock:
            self._processes[:] = [process for process in self._processes if process not in processes]
        self._idle.put(None)
        _close_all(processes)


class _Process:
    """A process that makes rows, for one thread at a time."""

    def __init__(self, maker: bytes) -> None:
        context = get_context("spawn")  # a fork would inherit other threads' locks
        self._is_used = threading.Lock()
        self._mapped: OrderedDict[int, None] = (
            OrderedDict()
        )  # memory that the process has mapped; it keeps the same list
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, maker), name="shardkit-rows", daemon=True)
        self._process.start()
        theirs.close()

    def make(self, raws: Sequence[RawRow], slab: Slab | None, start: int) -> list[Row]:
        sendable = [_sendable(raw) for raw in raws]
        shared = slab.shared if slab else None
        with self._is_used:
            try:
                if slab and shared:
                    is_new = _note(self._mapped, shared.number, None)
                    self._connection.send((sendable, _Place(slab.columns, slab.rows, start, shared.number, is_new)))
                    if is_new:
                        send_handle(self._connection, shared.descriptor, self._process.pid)
                else:
                    self._connection.send((sendable, None))
                made: list[Row] | _Failure = self._connection.recv()
            except (EOFError, OSError) as error:
                raise WorkerError(
                    f"a worker process has died ({self._how()}); see above for its own message. If memory ran out, use "
                    "fewer workers; a script that starts processes needs if __name__ == '__main__':"
                ) from error
            if isinstance(made, _Failure):
                raise made.error
            return made

    def _how(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        return "its pipe was closed" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """End the process. Rows in progress are dropped."""
        is_idle = self._is_used.acquire(timeout=1)
        if not is_idle:  # its transform does not end; the thread that is waiting for it gets an error
            self._process.kill()
            self._is_used.acquire()
        self._connection.close()
        self._process.join()
        self._is_used.release()


def _close_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().close()


def _sendable(raw: RawRow) -> RawRow:
    if isinstance(raw.sample, Exception):
        return raw
    return raw._replace(sample={name: bytes(v) if isinstance(v, memoryview) else v for name, v in raw.sample.items()})


class _Place(NamedTuple):
    """Where a process writes rows: the arguments of the slab, and the number of the memory that holds it."""

    columns: Mapping[str, Column]
    rows: int
    start: int
    memory: int
    is_new: bool


def _note(mapped: "OrderedDict[int, V]", number: int, value: V) -> bool:
    """Note that memory is used and forget the least recently used; return whether it is new. Both sides do the same."""
    is_new = number not in mapped
    if is_new:
        mapped[number] = value
        if len(mapped) > _MAPPED:
            mapped.popitem(last=False)
    else:
        mapped.move_to_end(number)
    return is_new


def _slab(connection: Connection, place: _Place, mapped: OrderedDict[int, SharedMemory]) -> Slab:
    """Return the slab, in memory of the parent process."""
    import torch

    if place.is_new:
        descriptor = recv_handle(connection)
        _note(mapped, place.memory, SharedMemory(descriptor, os.fstat(descriptor).st_size, 0))
    else:
        mapped.move_to_end(place.memory)
    memory = torch.frombuffer(mapped[place.memory], dtype=torch.uint8)
    return Slab(place.columns, place.rows, memory)


class _Failure(NamedTuple):
    """A process sends this instead of rows if it can make no more rows."""

    error: BaseException


def _serve(connection: Connection, pickled: bytes) -> None:
    """Make the rows that the parent asks for until it closes the pipe. On an error, send the error and end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and then closes the pipe
    try:
        _make_rows(connection, pickled)
    except BaseException as error:  # noqa: BLE001 - it is raised in the parent, unless the parent has closed the pipe
        with contextlib.suppress(OSError):
            connection.send(_Failure(_picklable(Row(None, error)).error or error))
            while os.read(connection.fileno(), 1 << 16):  # drop what the parent is sending, so that it can receive
                pass
    os._exit(0)


def _make_rows(connection: Connection, pickled: bytes) -> None:
    import torch

    torch.set_num_threads(1)  # one process is one worker
    make = RowThreads(pickle.loads(pickled))  # noqa: S301 - the parent pickled it
    mapped: OrderedDict[int, SharedMemory] = OrderedDict()
    while True:
        raws, place = connection.recv()
        slab = _slab(connection, place, mapped) if place else None
        try:
            rows = make(raws, slab, place.start if place else 0)
        except BaseException as error:  # noqa: BLE001 - it is raised in the place of its batch
            rows = [Row(None, error)] * len(raws)
        del slab
        connection.send_bytes(_pickled(rows))


def _pickled(rows: list[Row]) -> bytes:
    try:
        pickled = pickle.dumps(rows, protocol=5)
        if any(row.error for row in rows):
            pickle.loads(pickled)  # noqa: S301 - our own; some errors can be pickled but not unpickled
    except Exception:  # noqa: BLE001 - a value or an error cannot be sent
        return pickle.dumps([_picklable(row) for row in rows], protocol=5)
    return pickled


def _picklable(row: Row) -> Row:
    try:
        pickle.loads(pickle.dumps(row))  # noqa: S301 - our own
    except Exception as cause:  # noqa: BLE001 - whatever it is, it cannot be sent
        if row.error is None:
            return Row(None, WorkerError(f"the result of transform= cannot be sent between processes: {cause}"))
        text = "".join(traceback.format_exception(row.error))
        return Row(None, WorkerError(f"a worker process raised an error that cannot be sent: {text}"))
    return row
