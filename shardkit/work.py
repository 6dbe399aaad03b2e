"""Independent tasks, done here, in threads, in processes, or wherever an executor reaches."""

import os
import signal
import threading
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event as EventClass
from typing import Literal, Protocol, TypeVar

from shardkit.errors import ArgumentError, check_whole

R_co = TypeVar("R_co", covariant=True)


class Cancelled(Exception):  # noqa: N818 - it never reaches a user
    """Another task failed, or the user gave up."""


class StopSign(Protocol):
    """An event of threads or of processes."""

    def is_set(self) -> bool:
        """Tell whether what is being done is no longer wanted."""
        ...


class Task(Protocol[R_co]):
    """Something to be done once, that leaves nothing behind when it fails."""

    def run(self, stop: StopSign) -> R_co:
        """Do it. Raises Cancelled soon after ``stop`` is set."""
        ...


class Workers:
    """Where tasks are done.

    Args:
        num_workers: How many at the same time; None for as many as there are processors.
        worker_type: ``"thread"``, or ``"process"`` for tasks whose Python code holds the GIL. Processes are spawned,
            so a script that starts them needs ``if __name__ == "__main__":``.
        executor: Does the tasks instead; it is left open.

    Raises:
        ArgumentError: A number below 1, another type, or what is no executor.
    """

    def __init__(
        self,
        *,
        num_workers: int | None = None,
        worker_type: Literal["thread", "process"] = "thread",
        executor: Executor | None = None,
    ) -> None:
        if num_workers is not None:
            num_workers = check_whole("num_workers", num_workers, least=1)
        if worker_type not in ("thread", "process"):
            raise ArgumentError(f"worker_type must be 'thread' or 'process', got {worker_type!r}")
        if executor is not None and not hasattr(executor, "submit"):
            raise ArgumentError(f"executor is {executor!r}, expected one of concurrent.futures, or one like those")
        self._count = num_workers or len(os.sched_getaffinity(0))
        self._type = worker_type
        self._executor = executor

    def run(self, tasks: Iterable[Task[R_co]]) -> Generator[R_co, None, None]:
        """Do the tasks and yield their results, as they come.

        If one fails, or the generator is closed, those that have begun end as soon as they can and the others are not
        begun. Then the error is raised.
        """
        if self._executor is not None:
            yield from _submit(self._executor, tasks, 2 * self._count, threading.Event())
        elif self._count == 1 and self._type == "thread":
            never = threading.Event()
            yield from (task.run(never) for task in tasks)
        elif self._type == "thread":
            with ThreadPoolExecutor(self._count, thread_name_prefix="shardkit-pack") as threads:
                yield from _submit(threads, tasks, 2 * self._count, threading.Event())
        else:
            context = get_context("spawn")
            stop = context.Event()
            with ProcessPoolExecutor(
                self._count, mp_context=context, initializer=_start_worker, initargs=(stop,)
            ) as processes:
                yield from _submit(processes, tasks, 2 * self._count, stop)


def _submit(
    executor: Executor, tasks: Iterable[Task[R_co]], window: int, stop: threading.Event | EventClass
) -> Generator[R_co, None, None]:
    """Keep up to ``window`` tasks in the executor, so that not all of them are pickled at once."""
    remaining = iter(tasks)
    pending: set[Future[R_co]] = set()
    in_threads = isinstance(executor, ThreadPoolExecutor)
    try:
        while True:
            for task in islice(remaining, window - len(pending)):
                with _uninterrupted():
                    pending.add(executor.submit(task.run, stop) if in_threads else executor.submit(_run, task))
            if not pending:
                return
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        stop.set()
        wait([future for future in pending if not future.cancel()])


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C for a moment. Processes begun meanwhile never see it: they would print what they were at."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


_worker_stop: StopSign = threading.Event()  # in a process of our own, set by the parent


def _run(task: Task[R_co]) -> R_co:
    return task.run(_worker_stop)


def _start_worker(stop: StopSign) -> None:
    """Prepare a process: it ends when its parent says so or was killed, and not by a Ctrl-C that the parent handles."""
    global _worker_stop  # noqa: PLW0603 - the only way in that a process pool leaves
    _worker_stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)
