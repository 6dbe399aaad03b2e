"""Independent tasks, which run in threads, in processes or in an executor."""

import os
import signal
import threading
import traceback
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_connections
from multiprocessing.reduction import ForkingPickler
from multiprocessing.resource_tracker import ensure_running
from typing import Any, Literal, Protocol, TypeVar

from shardkit.errors import ArgumentError, ShardkitError, WorkerError, check_choice, check_importable, check_whole

R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")

_EXECUTOR_WORKERS = 64  # assumed if an executor's number of workers is unknown


class Cancelled(Exception):  # noqa: N818 - it never reaches a user
    """Another task failed, or the user interrupted the work."""


class StopSign(Protocol):
    """An event of threads or of processes."""

    def is_set(self) -> bool:
        """Return whether the task is to stop."""
        ...


class Task(Protocol[R_co]):
    """A piece of work that is done once, and leaves nothing behind when it fails."""

    def run(self, stop: StopSign) -> R_co:
        """Do the work. Raises Cancelled soon after ``stop`` is set."""
        ...


def until(stop: StopSign, items: Iterable[T]) -> Iterator[T]:
    """Yield the items; raise Cancelled when the sign is set."""
    for item in items:
        if stop.is_set():
            raise Cancelled
        yield item


class Workers:
    """The threads, processes or executor that run tasks.

    Args:
        num_workers: The number of tasks at the same time; None for the number of processors. An executor is given twice
            as many tasks at a time, so that its workers need not wait; None then means its number of workers, or 64 if
            that is unknown.
        worker_type: ``"thread"``, or ``"process"`` for tasks whose Python code holds the GIL. Processes are spawned,
            so a script that starts them needs ``if __name__ == "__main__":``.
        executor: Runs the tasks instead; it is not closed.

    Attributes:
        are_elsewhere: Whether tasks may run where this machine's ``TMPDIR`` does not exist: an executor has processes.

    Raises:
        ArgumentError: The number is below 1, the type is unknown, or the executor is not one.
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
        check_choice("worker_type", worker_type, ("thread", "process"))
        if hasattr(executor, "get_executor"):  # a Client of Dask, whose futures are different
            kind = type(executor).__name__
            raise ArgumentError(f"executor is a {kind}, expected an executor; pass client.get_executor()")
        if executor is not None and not hasattr(executor, "submit"):
            raise ArgumentError(f"executor is {executor!r}, expected one of concurrent.futures, or a similar one")
        self._count = num_workers or (len(os.sched_getaffinity(0)) if executor is None else _workers_of(executor))
        self.are_elsewhere = executor is not None and not isinstance(executor, ThreadPoolExecutor)
        self._type = worker_type
        self._executor = executor

    def run(self, tasks: Iterable[Task[R_co]]) -> Generator[R_co, None, None]:
        """Run the tasks and yield their results in order of completion.

        If a task fails, or the generator is closed, running tasks end as soon as they can and no others start. Then the
        error is raised.
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
            yield from _in_processes(tasks, self._count)


def _workers_of(executor: Executor) -> int:
    client: Any = getattr(executor, "_client", None)
    if hasattr(client, "nthreads"):  # of Dask
        return sum(client.nthreads().values()) or _EXECUTOR_WORKERS
    count = getattr(executor, "_max_workers", None)  # of concurrent.futures and loky
    return count if isinstance(count, int) and count > 0 else _EXECUTOR_WORKERS


def _submit(
    executor: Executor, tasks: Iterable[Task[R_co]], window: int, stop: threading.Event
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
    except BrokenExecutor as error:
        raise WorkerError(
            f"workers of the executor died ({error}), perhaps for lack of memory; the same call with a new executor "
            "goes on"
        ) from error
    finally:
        stop.set()
        wait([future for future in pending if not future.cancel()])


def _run(task: Task[R_co]) -> R_co:
    return task.run(threading.Event())


class _Process:
    """A process of our own, which runs one task after the other.

    It communicates only by pipes. The queues of ``ProcessPoolExecutor`` need named semaphores in ``/dev/shm``, which
    stay there forever when a whole group of processes is killed.
    """

    def __init__(self, stop: Connection) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, stop))
        ensure_running()  # the first process would start it, which lets Ctrl-C through again
        with _uninterrupted():
            self._process.start()
        theirs.close()

    def receive(self) -> Any:
        """Return the result of its task. Raises the task's error if it failed."""
        try:
            is_result, value = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if not is_result:
            raise value
        return value

    def send(self, task: Task[object]) -> None:
        """Give it a task. Raises ArgumentError if the task cannot be pickled."""
        try:
            request = bytes(ForkingPickler.dumps(task))
            check_importable(request)
        except ArgumentError:
            raise
        except Exception as error:
            raise ArgumentError(
                f"worker_type='process': what the processes need cannot be pickled ({error}); define functions at the "
                "top level of a module, or use threads"
            ) from error
        try:
            self.connection.send_bytes(request)
        except OSError as error:
            raise self._ended() from error

    def join(self) -> None:
        """Wait until it has ended; it ends soon after its connection is closed and the stop signal is sent."""
        self._process.join()
        self._process.close()

    def _ended(self) -> WorkerError:
        self._process.join()
        return WorkerError(
            f"a worker process ended with exit code {self._process.exitcode} before its task was done: if that is -9, "
            "perhaps for lack of memory; if 1, perhaps because the script does its work outside of "
            "`if __name__ == '__main__':`. Fewer num_workers need less memory; the same call continues"
        )


def _in_processes(tasks: Iterable[Task[R_co]], count: int) -> Generator[R_co, None, None]:
    remaining = iter(tasks)
    stop, stopper = get_context("spawn").Pipe(duplex=False)
    idle: list[_Process] = []
    busy: dict[Connection, _Process] = {}
    results: list[R_co] = []
    try:
        while True:
            given = list(islice(remaining, count - len(busy)))
            while len(idle) < len(given):  # they all start at the same time
                idle.append(_Process(stop))
            for task in given:
                process = idle.pop()
                busy[process.connection] = process
                process.send(task)
            yield from results
            if not busy:
                return
            results = []
            ready = wait_for_connections(list(busy))
            for connection in [connection for connection in busy if connection in ready]:
                results.append(busy[connection].receive())
                idle.append(busy.pop(connection))
    finally:
        stopper.send_bytes(b"")
        processes = [*idle, *busy.values()]
        for process in processes:
            process.connection.close()
        for process in processes:
            process.join()
        stopper.close()
        stop.close()


def _serve(connection: Connection, stop: Connection) -> None:
    """Run the tasks that are received, in a process of its own, until the connection is closed."""
    sign = threading.Event()
    threading.Thread(target=_watch, args=(stop, sign), daemon=True).start()
    with suppress(EOFError, OSError):  # the caller has gone, or has closed the connection
        while True:
            request = connection.recv_bytes()
            connection.send_bytes(_reply(request, sign))


def _reply(request: bytes, stop: StopSign) -> bytes:
    try:
        return bytes(ForkingPickler.dumps((True, ForkingPickler.loads(request).run(stop))))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the caller raises it
        error.add_note(f"It was raised in a worker process:\n{traceback.format_exc()}")
        try:
            reply = bytes(ForkingPickler.dumps((False, error)))
            ForkingPickler.loads(reply)
        except Exception:  # noqa: BLE001 - an error may be anything
            told = ShardkitError(f"{type(error).__name__} in a worker process: {error}")
            reply = bytes(ForkingPickler.dumps((False, told)))
        return reply


def _watch(stop: Connection, sign: threading.Event) -> None:
    """Set the sign when the parent requests it or has died; if it has died, end this process even during a task."""
    stop.poll(None)
    sign.set()
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Block Ctrl-C for a moment, and for good in processes started meanwhile, which would print a traceback."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
