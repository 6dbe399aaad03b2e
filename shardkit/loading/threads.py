"""Threads that do small tasks in the order given, and end when they are told to, or with the program.

They are lighter than those of ``concurrent.futures``, which makes an object with a lock for each task, and safer in a
training loop: there a Ctrl-C while a thread starts leaves one behind that the program then waits for, for ever.
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

_EXIT_SECONDS = 5.0  # a program waits so long for tasks that have begun: it must not end in the middle of torch's code


class Failures(Protocol):
    """What is told of an error that ended a thread: a SimpleQueue."""

    def put(self, error: BaseException, /) -> object:
        """Note an error."""
        ...


class Threads:
    """Threads that do tasks, until they are closed or nobody refers to them. What tasks return is dropped.

    A task that raises ends all of them, once the tasks are done that were submitted before.

    Args:
        count: How many there are.
        name: What they are called, for debuggers.
        failures: Where the error goes that a task raised.

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
        """How many there are."""
        return len(self._threads)

    @property
    def has_ended(self) -> bool:
        """Whether one of them has ended, whatever the reason."""
        return not all(thread.is_alive() or thread.ident is None for thread in self._threads)

    def add(self, count: int) -> None:
        """Have so many more."""
        for number in range(self.count, self.count + count):
            name = f"{self._name}-{number}"
            thread = threading.Thread(target=_work, args=(self._tasks, self._failures), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def submit(self, function: Callable[..., object], *args: Any) -> None:
        """Have a task done, after those that were submitted before."""
        self._tasks.put((function, args))

    def close(self) -> None:
        """Tell the threads to end: tasks that have begun are finished, others are dropped. ``join`` waits for it."""
        with contextlib.suppress(Empty):
            while True:
                self._tasks.get_nowait()
        for _ in range(1 + self.count):  # also if one should end before it has told the next
            self._tasks.put(None)

    def join(self, timeout: float | None) -> None:
        """Wait for the threads to end, each for so many seconds at most."""
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(timeout)


def _work(tasks: "SimpleQueue[_Task]", failures: Failures) -> None:
    try:
        while (task := tasks.get()) is not None:
            task[0](*task[1])
            del task  # so that what it held is free while the next is waited for
    except BaseException as error:  # noqa: BLE001 - it is raised by whoever looks there
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
