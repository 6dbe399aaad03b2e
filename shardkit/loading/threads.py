"""Threads that do small tasks in the order given. They end when they are closed, or with the program.

They cost less than those of ``concurrent.futures``, which makes an object with a lock for each task. They are also
safer in a training loop: with ``concurrent.futures``, a Ctrl-C while a thread starts may leave a thread behind, and the
program then waits for it forever.
"""

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeAlias

_Task: TypeAlias = "tuple[Callable[..., object], tuple[Any, ...]] | None"

_EXIT_SECONDS = 5.0  # a program waits this long for running tasks: it must not exit in the middle of torch's code


class Failures(Protocol):
    """Takes the errors that ended threads: a SimpleQueue."""

    def put(self, error: BaseException, /) -> object:
        """Take an error."""
        ...


class Threads:
    """Threads that do tasks, until they are closed or nothing refers to this object. What tasks return is dropped.

    A task that raises ends all of them, after the tasks that were submitted before it.

    Args:
        count: How many threads there are at first.
        name: The beginning of their names, for debuggers.
        failures: Takes the error of a task that raises.

    Example:
        >>> threads = Threads(2, "shardkit-example", SimpleQueue())
        >>> done = SimpleQueue()
        >>> threads.submit(done.put, 7)
        >>> done.get()
        7
        >>> threads.close()
    """

    def __init__(self, count: int, name: str, failures: Failures) -> None:
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        self._name = name
        self._failures = failures
        self._threads: list[threading.Thread] = []
        _ALL.add(self)
        weakref.finalize(self, self._tasks.put, None)
        self.add(count)

    @property
    def count(self) -> int:
        """How many threads there are."""
        return len(self._threads)

    @property
    def has_ended(self) -> bool:
        """Whether one of them has ended, for any reason."""
        return not all(thread.is_alive() or thread.ident is None for thread in self._threads)

    def add(self, count: int) -> None:
        """Start ``count`` additional threads."""
        for number in range(self.count, self.count + count):
            name = f"{self._name}-{number}"
            thread = threading.Thread(target=_work, args=(self._tasks, self._failures), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def submit(self, function: Callable[..., object], *args: Any) -> None:
        """Add a task after all that were submitted earlier."""
        self._tasks.put((function, args))

    def close(self) -> None:
        """Tell the threads to end: tasks that have begun are finished, others are dropped. ``join`` waits for them."""
        with contextlib.suppress(Empty):
            while True:
                self._tasks.get_nowait()
        for _ in range(1 + self.count):  # one more, in case a thread dies before it passes the None on
            self._tasks.put(None)

    def join(self, timeout: float | None) -> None:
        """Wait for the threads to end, for each at most ``timeout`` seconds."""
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(timeout)


def _work(tasks: "SimpleQueue[_Task]", failures: Failures) -> None:
    try:
        while (task := tasks.get()) is not None:
            task[0](*task[1])
            del task  # so that its arguments are freed before the next wait
    except BaseException as error:  # noqa: BLE001 - the owner of the queue raises it
        failures.put(error)
    finally:
        tasks.put(None)  # for the next thread


_ALL: "weakref.WeakSet[Threads]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    threads = list(_ALL)
    for each in threads:
        each.close()
    deadline = time.monotonic() + _EXIT_SECONDS
    for each in threads:
        each.join(max(0.0, deadline - time.monotonic()))
