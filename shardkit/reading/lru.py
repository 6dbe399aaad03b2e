"""The most recently used values, kept within a memory bound; and work done once for all threads that ask for it."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")
V = TypeVar("V")

# Guards all caches, during one look-up or entry. A fork waits for it, so that no child inherits it locked.
_LOCK = threading.Lock()
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


class BoundedCache(Generic[V]):
    """Keeps the most recently requested values, up to ``max_bytes``.

    Threads and forked processes may share it. Pickling drops all values.

    Attributes:
        nbytes: How many bytes all values take.

    Example:
        >>> cache = BoundedCache(10)
        >>> cache.put("a", b"12345", 5), cache.put("b", b"123456", 6)
        (None, None)
        >>> cache.get("a"), cache.get("b")
        (None, b'123456')
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self.nbytes = 0

    def get(self, key: Hashable) -> V | None:
        """Return a value, or None if it is not kept."""
        with _LOCK:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, value: V, nbytes: int) -> None:
        """Keep a value, unless it alone is larger than ``max_bytes``."""
        if nbytes > self._max_bytes:
            return
        with _LOCK:
            if key in self._entries:
                return
            self._entries[key] = value, nbytes
            self.nbytes += nbytes
            while self.nbytes > self._max_bytes:
                self.nbytes -= self._entries.popitem(last=False)[1][1]

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return type(self), (self._max_bytes,)


class SharedWork:
    """Does a piece of work once for all threads that ask for it at the same time; an error is raised in all of them.

    A forked process and an unpickled object start without any work under way.

    Example:
        >>> SharedWork().do("a", lambda: 3)
        3
    """

    def __init__(self) -> None:
        self._running: dict[Hashable, Future[Any]] = {}

    def do(self, key: Hashable, work: Callable[[], T]) -> T:
        """Return the result of the work that is under way under this key; if there is none, do ``work``."""
        place = os.getpid(), key
        own: Future[T] = Future()
        while (future := self._running.setdefault(place, own)) is not own:
            try:
                result: T = future.result()
            except CancelledError:  # the thread that did it was interrupted
                continue
            return result
        try:
            own.set_result(work())
        except Exception as error:
            own.set_exception(error)
            raise
        finally:
            self._running.pop(place)
            own.cancel()  # no effect if it is done
        return own.result()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()
