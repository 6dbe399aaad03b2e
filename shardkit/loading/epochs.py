"""Which epoch a pass over a stream is, and what was skipped in it: a little memory that all worker processes share.

A ``DataLoader`` does not tell its workers which epoch it is. They may live for one pass or for all, start long after
one another, and belong to loaders that are alive at the same time. So each names the pass that it believes to be in,
and the first of a pass takes the next epoch for all of them.

The memory has no name that could leak or collide, and needs no helper process: it is an anonymous file, inherited by
forked processes and handed to spawned ones. A record lock guards it, which the system releases when a process dies.
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

_COUNT = Struct("<q")  # how many entries there have been
_ENTRY = Struct("<QQqqqq128s")  # see _Entry
_KEPT = 256  # only those entries matter of which a worker is still to start or to skip something
_BYTES = _COUNT.size + _KEPT * _ENTRY.size
_SET = 2  # the identity of an entry that is no pass, but says the epoch of the next one; those of passes are odd, or 0

# Record locks are between processes, this is between threads; a fork waits for it, so that no child inherits it locked.
_THREADS = threading.Lock()
os.register_at_fork(before=_THREADS.acquire, after_in_parent=_THREADS.release, after_in_child=_THREADS.release)


class Skipped(NamedTuple):
    """What one epoch has left out so far, over all workers of a rank.

    Attributes:
        samples: Single samples, because a field is missing or cannot be decoded.
        shards: Shards whose rest was left out because of damage.
    """

    samples: int
    shards: int


class Pass(NamedTuple):
    """One pass over a stream.

    Attributes:
        serial: Its number among all entries of the memory.
        epoch: Which epoch it is.
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
    workers: bytes = b""  # a bit for every worker that has begun


class SharedEpochs:
    """The passes over one stream, in memory that forked and spawned worker processes share.

    A copy, or one that was pickled for anything but a new process, has its own memory with the same content.

    Example:
        >>> epochs = SharedEpochs()
        >>> epochs.begin().epoch, epochs.begin().epoch
        (0, 1)
    """

    def __init__(self) -> None:
        self._attach(_anonymous_file())

    def set_next(self, epoch: int) -> None:
        """Let the next pass of this process and its workers be ``epoch``, and the one after it ``epoch + 1``."""
        with self._locked():
            self._append(_Entry(os.getpid(), _SET, 0, epoch))

    def begin(self, identity: int | None = None, worker: int = 0) -> Pass:
        """Return the pass that this process begins, or the one that its parent's loader does if it is a worker.

        Epochs are counted for each process that has a training loop: several may have inherited the same stream.

        Args:
            identity: The same for all workers of the pass, another for almost every other pass: where it is the same
                (somebody seeds torch before every epoch), a worker that has begun that pass begins the next one. None
                if there are no workers.
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
        """Count what a pass leaves out, and return what it has left out in all."""
        with self._locked():
            entry = self._entry(current.serial)
            if entry.serial != current.serial:
                return Skipped(samples, shards)  # so many passes have begun since that this one is forgotten
            entry = entry._replace(samples=entry.samples + samples, shards=entry.shards + shards)
            self._store(entry)
            return Skipped(entry.samples, entry.shards)

    @property
    def skipped(self) -> Skipped:
        """What the pass of this process that began last has left out so far."""
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
    """Counts, reports and bounds what one pass leaves out."""

    def __init__(self, epochs: SharedEpochs, current: Pass, max_skipped: int) -> None:
        self._epochs = epochs
        self._current = current
        self._max_skipped = max_skipped
        self._reported: set[str] = set()

    def skip_sample(self, url: str, error: ShardkitError) -> None:
        """Leave out a sample of a shard."""
        if url not in self._reported:
            self._reported.add(url)
            _log.warning("skipped a sample; further ones of this shard are only counted, see skipped: %s", error)
        self._check(self._epochs.skip(self._current, samples=1), error)

    def without_damage(self, samples: Iterator[Sample], url: str) -> Generator[Sample, None, None]:
        """Yield a shard's samples up to damage, if there is any."""
        try:
            yield from samples
        except ShardError as error:
            _log.warning("skipped the rest of shard %s: %s", url, error)
            self._check(self._epochs.skip(self._current, shards=1), error)

    def _check(self, skipped: Skipped, error: ShardkitError) -> None:
        if skipped.samples + skipped.shards > self._max_skipped:
            raise TooManySkippedError(
                f"epoch {self._current.epoch}: {skipped.samples:,} samples and {skipped.shards:,} shards were skipped, "
                f"expected at most max_skipped={self._max_skipped:,}; repair the shards or raise it. The last: {error}",
                url=error.url,
                offset=error.offset,
                key=error.key,
                field=error.field,
            ) from error


def _anonymous_file() -> int:
    """Return a descriptor of a file of zeros without a name; its user closes it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("shardkit-epochs")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, _BYTES)
    return descriptor


def _bits(number: int) -> bytes:
    return number.to_bytes(128, "little")
