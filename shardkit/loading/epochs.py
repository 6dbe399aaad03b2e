"""The epoch of each pass over a stream, and the numbers of skipped samples, in memory that all worker processes share.

A ``DataLoader`` does not tell its workers the epoch. Workers may live for one pass or for all, may start at very
different times, and may belong to loaders that exist at the same time. So each worker identifies its pass by a number,
and the first worker of a pass takes the next epoch for all of them.

The memory is an anonymous file: forked processes inherit it, spawned processes receive its descriptor. So it has no
name that could be left behind or used twice, and needs no helper process. It is guarded by a record lock, which the
system releases when a process dies.
"""

import fcntl
import logging
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from struct import Struct
from typing import Any, NamedTuple

from shardkit.errors import ShardError, ShardkitError, TooManySkippedError
from shardkit.sample import Sample

_log = logging.getLogger("shardkit")

_COUNT = Struct("<q")  # how many entries have been written
_ENTRY = Struct("<QQqqqq128s")  # see _Entry
_KEPT = 256  # entries; older ones are overwritten, when no worker can still start in them or skip something
_BYTES = _COUNT.size + _KEPT * _ENTRY.size
_SET = 2  # the identity of an entry that is not a pass but sets the epoch of the next one; those of passes are odd or 0

# Record locks work between processes, this one between threads. A fork waits for it, so that no child inherits it
# locked.
_THREADS = threading.Lock()
os.register_at_fork(before=_THREADS.acquire, after_in_parent=_THREADS.release, after_in_child=_THREADS.release)


class Skipped(NamedTuple):
    """How many samples and shards one epoch has left out so far, over all workers of a rank.

    Attributes:
        samples: The number of single samples that have a field that is missing or cannot be decoded.
        shards: The number of shards whose remaining samples were left out because of damage.
    """

    samples: int
    shards: int


class Pass(NamedTuple):
    """One pass over a stream.

    Attributes:
        serial: The number of its entry in the memory.
        epoch: The epoch's number.
    """

    serial: int
    epoch: int


class _Entry(NamedTuple):
    owner: int
    identity: int
    serial: int
    epoch: int
    samples: int = 0
    shards: int = 0
    workers: bytes = b""  # one bit for each worker, set when it has begun


class SharedEpochs:
    """The passes over one stream, in memory that forked and spawned worker processes share.

    A copy has its own memory with the same content. So has an unpickled object, unless it was sent to a new process.

    Example:
        >>> epochs = SharedEpochs()
        >>> epochs.begin().epoch, epochs.begin().epoch
        (0, 1)
    """

    def __init__(self) -> None:
        self._attach(_anonymous_file())

    def set_next(self, epoch: int) -> None:
        """Set the epoch of the next pass of this process and its workers; the pass after it has ``epoch + 1``."""
        with self._locked():
            self._append(_Entry(os.getpid(), _SET, 0, epoch))

    def begin(self, identity: int | None = None, worker: int = 0) -> Pass:
        """Return the pass that this process begins; in a worker, the pass that its parent's loader begins.

        Epochs are counted separately for each process with a training loop: several may have inherited the same stream.

        Args:
            identity: A number that is the same for all workers of a pass, and nearly always different for other passes.
                If two passes have the same number (because torch was seeded before every epoch), a worker that has
                already begun the pass begins the next one. None without workers.
            worker: The worker's number.
        """
        parent = parent_process()
        owner = os.getpid() if identity is None or parent is None or parent.pid is None else parent.pid
        own = 0 if identity is None else identity | 1
        with self._locked():
            if own:
                for entry in self._newest_first(owner):
                    if entry.identity == own:
                        workers = int.from_bytes(entry.workers, "little")
                        if workers >> worker & 1:
                            break
                        self._store(entry._replace(workers=_bits(workers | 1 << worker)))
                        return Pass(entry.serial, entry.epoch)
            last = next(self._newest_first(owner), None)
            epoch = 0 if last is None else last.epoch if last.identity == _SET else last.epoch + 1
            return Pass(self._append(_Entry(owner, own, 0, epoch, workers=_bits(1 << worker))), epoch)

    def skip(self, current: Pass, *, samples: int = 0, shards: int = 0) -> Skipped:
        """Count samples and shards that a pass leaves out, and return the totals of the pass."""
        with self._locked():
            entry = self._entry(current.serial)
            if entry.serial != current.serial:
                return Skipped(samples, shards)  # its entry was overwritten by a later pass
            entry = entry._replace(samples=entry.samples + samples, shards=entry.shards + shards)
            self._store(entry)
            return Skipped(entry.samples, entry.shards)

    @property
    def skipped(self) -> Skipped:
        """The numbers of samples and shards that the latest pass of this process has left out so far."""
        with self._locked():
            passes = (entry for entry in self._newest_first(os.getpid()) if entry.identity != _SET)
            last = next(passes, None)
            return Skipped(0, 0) if last is None else Skipped(last.samples, last.shards)

    def _newest_first(self, owner: int) -> Iterator[_Entry]:
        (count,) = _COUNT.unpack_from(self._memory)
        entries = map(self._entry, range(count - 1, max(count - _KEPT, 0) - 1, -1))
        return (entry for entry in entries if entry.owner == owner)

    def _entry(self, serial: int) -> _Entry:
        return _Entry(*_ENTRY.unpack_from(self._memory, _COUNT.size + serial % _KEPT * _ENTRY.size))

    def _append(self, entry: _Entry) -> int:
        (serial,) = _COUNT.unpack_from(self._memory)
        self._store(entry._replace(serial=serial))
        _COUNT.pack_into(self._memory, 0, serial + 1)
        return int(serial)

    def _store(self, entry: _Entry) -> None:
        _ENTRY.pack_into(self._memory, _COUNT.size + entry.serial % _KEPT * _ENTRY.size, *entry)

    def _attach(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _BYTES)
        weakref.finalize(self, os.close, descriptor)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with _THREADS:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            return {"descriptor": DupFd(self._descriptor)}
        with self._locked():
            return {"content": bytes(self._memory)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "descriptor" in state:
            self._attach(state["descriptor"].detach())
        else:
            self._attach(_anonymous_file())
            self._memory[:] = state["content"]


class Skipper:
    """Counts and logs the samples and shards that one pass leaves out, and raises an error if there are too many."""

    def __init__(self, epochs: SharedEpochs, current: Pass, max_skipped: int) -> None:
        self._epochs = epochs
        self._current = current
        self._max_skipped = max_skipped
        self._reported: set[str] = set()

    def skip_sample(self, url: str, error: ShardkitError) -> None:
        """Leave out a sample of a shard."""
        if url not in self._reported:
            self._reported.add(url)
            _log.warning("skipped a sample; further skips in this shard are only counted: %s", error)
        self._check(self._epochs.skip(self._current, samples=1), error)

    def without_damage(self, samples: Iterator[Sample], url: str) -> Generator[Sample, None, None]:
        """Yield a shard's samples; if it is damaged, skip the samples from the damage on."""
        try:
            yield from samples
        except ShardError as error:
            _log.warning("skipped the rest of shard %s: %s", url, error)
            self._check(self._epochs.skip(self._current, shards=1), error)

    def _check(self, skipped: Skipped, error: ShardkitError) -> None:
        if skipped.samples + skipped.shards > self._max_skipped:
            problem = f"{skipped.samples:,} samples and {skipped.shards:,} shards were skipped, expected at most "
            problem += f"max_skipped={self._max_skipped:,}; repair the shards or raise it"
            raise too_many_skipped(self._current.epoch, problem, error) from error


def too_many_skipped(epoch: int, problem: str, last: BaseException) -> TooManySkippedError:
    """Return the error for an epoch in which too much was skipped, with the location of the last error."""
    error = TooManySkippedError(f"epoch {epoch}: {problem}. The last: {last}")
    if isinstance(last, ShardkitError):
        error.url, error.offset, error.key, error.field = last.url, last.offset, last.key, last.field
    return error


def _anonymous_file() -> int:
    """Return the descriptor of a file of zeros without a name; the caller must close it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("shardkit-epochs")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, _BYTES)
    return descriptor


def _bits(number: int) -> bytes:
    return number.to_bytes(128, "little")
