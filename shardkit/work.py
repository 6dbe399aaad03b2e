"""Independent tasks, done here, in threads, in processes, or wherever an executor reaches."""

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from itertools import islice
from multiprocessing import get_context, parent_process
from typing import Literal, Protocol, TypeVar

from shardkit.errors import ArgumentError

R_co = TypeVar("R_co", covariant=True)


class Cancelled(Exception):  # noqa: N818 - it never reaches a user
    """Another task failed, or the user gave up."""


class Task(Protocol[R_co]):
    """Something to be done once, that leaves nothing behind when it fails."""

    def run(self, stop: threading.Event) -> R_co:
        """Do it. Raises Cancelled soon after ``stop`` is set."""
        ...


class Workers:
    """Where tasks are done; a context manager.

    Args:
        num_workers: How many at the same time; None for as many as there are processors.
        worker_type: ``"thread"``, or ``"process"`` for tasks whose Python code holds the GIL. Processes are spawned,
            so a script that starts them needs ``if __name__ == "__main__":``.
        executor: Does the tasks instead; it is left open.

    Raises:
        ArgumentError: A number below 1, or another type.
    """

    def __init__(
        self,
        *,
        num_workers: int | None = None,
        worker_type: Literal["thread", "process"] = "thread",
        executor: Executor | None = None,
    ) -> None:
        if num_workers is not None and num_workers < 1:
            raise ArgumentError(f"num_workers must be at least 1, got {num_workers!r}")
        if worker_type not in ("thread", "process"):
            raise ArgumentError(f"worker_type must be 'thread' or 'process', got {worker_type!r}")
        self._count = num_workers or len(os.sched_getaffinity(0))
        self._type = worker_type
        self._executor = executor

    def run(self, tasks: Iterable[Task[R_co]]) -> Iterator[R_co]:
        """Do the tasks and yield their results, as they come.

        If one fails, those that have begun end as soon as they can, the others are not begun, and its error is raised.
        """
        if self._executor is not None:
            return _submit(self._executor, tasks, 2 * self._count, threading.Event())
        if self._count == 1 and self._type == "thread":
            never = threading.Event()
            return (task.run(never) for task in tasks)
        return self._run_in_pool(tasks)

    def _run_in_pool(self, tasks: Iterable[Task[R_co]]) -> Iterator[R_co]:
        pool: Executor
        if self._type == "thread":
            pool = ThreadPoolExecutor(self._count, thread_name_prefix="shardkit-pack")
        else:
            pool = ProcessPoolExecutor(self._count, mp_context=get_context("spawn"), initializer=_die_with_parent)
        stop = threading.Event()
        try:
            yield from _submit(pool, tasks, 2 * self._count, stop)
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _submit(executor: Executor, tasks: Iterable[Task[R_co]], window: int, stop: threading.Event) -> Iterator[R_co]:
    """Keep up to ``window`` tasks in the executor, so that not all of them are pickled at once."""
    remaining = iter(tasks)
    pending: set[Future[R_co]] = set()
    in_threads = isinstance(executor, ThreadPoolExecutor)
    try:
        while True:
            for task in islice(remaining, window - len(pending)):
                pending.add(executor.submit(task.run, stop) if in_threads else executor.submit(_run, task))
            if not pending:
                return
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        for future in pending:
            future.cancel()


def _run(task: Task[R_co]) -> R_co:
    return task.run(threading.Event())


def _die_with_parent() -> None:
    """End this worker when its parent is killed, instead of waiting for tasks for ever."""
    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
