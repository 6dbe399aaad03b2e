"""Tasks run the same way in any kind of worker, and leave nothing behind when they or their caller fail."""

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import Executor, Future
from pathlib import Path

import pytest

from shardkit.errors import ArgumentError, ShardkitError, WorkerError
from shardkit.packing.workers import Cancelled, Workers
from tests.support.shared import started

ROOT = Path(__file__).parents[2]
EVERYWHERE = pytest.mark.parametrize(
    "options",
    [{"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "worker_type": "process"}],
    ids=["here", "threads", "processes"],
)
SEVERAL = pytest.mark.parametrize("worker_type", ["thread", "process"])
pytestmark = pytest.mark.multiprocess


class Squares:
    def __init__(self, number):
        self.number = number

    def run(self, _stop):
        return self.number**2


class Raises:
    def __init__(self, error):
        self.error = error

    def run(self, _stop):
        raise self.error


class Meets:
    """Waits for another task that opens the same FIFO, then runs its action."""

    def __init__(self, place, then):
        self.place, self.then = place, then

    def run(self, stop):
        with (self.place / "fifo").open("rb" if self.then in ("end", "fail") else "wb"):
            pass
        if self.then == "fail":
            raise ValueError("failed")
        if self.then == "ignore":
            signal.pause()
        if self.then == "wait":
            (self.place / "at work").touch()
            if stop.wait(60):
                (self.place / "told to stop").touch()
            raise Cancelled
        return "done"


class UnpicklableError(Exception):
    def __init__(self, *words):
        super().__init__(" ".join(words))
        self.file = sys.stderr


class OneWayError(Exception):
    """An error whose pickle has only its class and its message, which is one argument too few."""

    def __init__(self, one, other):
        super().__init__(f"{one} {other}")


class RaisesKind:
    def __init__(self, kind):
        self.kind = kind

    def run(self, _stop):
        raise self.kind("what", "happened")


class Dies:
    def run(self, _stop):
        os.kill(os.getpid(), signal.SIGKILL)


class BlockedSignals:
    def run(self, _stop):
        return signal.pthread_sigmask(signal.SIG_BLOCK, [])


@EVERYWHERE
def test_every_task_is_done_once(options):
    results = list(Workers(**options).run(map(Squares, range(20))))

    assert sorted(results) == [n**2 for n in range(20)]


@EVERYWHERE
def test_no_task_is_begun_long_before_it_is_needed(options):
    begun = []

    def tasks():
        for number in range(100):
            begun.append(number)
            yield Squares(number)

    running = Workers(**options).run(tasks())
    next(running)
    running.close()

    assert len(begun) <= 6


class Done(Executor):
    """An executor that runs tasks immediately."""

    def __init__(self, **own):
        vars(self).update(own)

    def submit(self, fn, /, *args):
        future = Future()
        future.set_result(fn(*args))
        return future


class DaskClient:
    """The client that a Dask executor holds."""

    def nthreads(self):
        return {"tcp://a": 4, "tcp://b": 3}


@pytest.mark.parametrize("asked", [None, 3])
@pytest.mark.parametrize(
    ("own", "workers"),
    [({"_max_workers": 5}, 5), ({"_client": DaskClient()}, 7), ({}, 64), ({"_max_workers": None}, 64)],
)
def test_an_executor_is_given_twice_as_many_tasks_as_it_has_workers(own, workers, asked):
    begun, tasks = [], 2 * (asked or workers)
    running = Workers(num_workers=asked, executor=Done(**own)).run(begun.append(n) or Squares(n) for n in range(1000))
    next(running)
    running.close()

    assert len(begun) == tasks


@EVERYWHERE
@pytest.mark.parametrize("error", [ValueError("what happened"), SystemExit(3), FileNotFoundError(2, "no", "a.jpg")])
def test_an_error_comes_through(options, error):
    with pytest.raises(type(error), match=re.escape(str(error))) as caught:
        list(Workers(**options).run([Squares(1), Raises(error), Squares(2)]))
    if "worker_type" in options:
        assert "raise self.error" in caught.value.__notes__[0]


@pytest.mark.parametrize("kind", [UnpicklableError, OneWayError])
def test_an_error_that_cannot_be_sent_is_told(kind):
    with pytest.raises(ShardkitError, match=f"{kind.__name__} in a worker process: what happened"):
        list(Workers(num_workers=1, worker_type="process").run([RaisesKind(kind)]))


def test_a_task_that_cannot_be_sent_is_an_error_that_says_what_to_do():
    with pytest.raises(ArgumentError, match=r"cannot be pickled \(.*\); define functions at the top level of a module"):
        list(Workers(num_workers=1, worker_type="process").run([Squares(lambda: 1)]))


def test_a_process_that_is_killed_is_an_error_that_says_so():
    with pytest.raises(WorkerError, match="ended with exit code -9 before its task was done"):
        list(Workers(num_workers=2, worker_type="process").run([Squares(1), Dies(), Squares(2)]))


@SEVERAL
def test_when_a_task_fails_those_that_have_begun_are_told_to_stop(tmp_path, worker_type):
    os.mkfifo(tmp_path / "fifo")

    with pytest.raises(ValueError, match="failed"):
        list(Workers(num_workers=2, worker_type=worker_type).run([Meets(tmp_path, "wait"), Meets(tmp_path, "fail")]))
    assert (tmp_path / "at work").exists()
    assert (tmp_path / "told to stop").exists()


@SEVERAL
def test_when_the_caller_gives_up_those_that_have_begun_are_told_to_stop(tmp_path, worker_type):
    os.mkfifo(tmp_path / "fifo")
    running = Workers(num_workers=2, worker_type=worker_type).run([Meets(tmp_path, "wait"), Meets(tmp_path, "end")])
    first = next(running)
    running.close()

    assert first == "done"
    assert (tmp_path / "told to stop").exists()


def start(tmp_path, code):
    """Start a script that can use the names of this module."""
    head = "import sys\nfrom pathlib import Path\nfrom tests.packing.test_workers import *\n"
    script = f"{head}if __name__ == '__main__':\n    {code}\n"
    (tmp_path / "script.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return started([sys.executable, tmp_path / "script.py"], text=True, env=environment)


def test_a_process_never_sees_ctrl_c_not_even_while_it_starts(tmp_path):
    code = """\
before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    masks = list(Workers(num_workers=2, worker_type="process").run([BlockedSignals()] * 4))
    print([signal.SIGINT in mask for mask in masks], before == signal.pthread_sigmask(signal.SIG_BLOCK, []) == set())"""
    with start(tmp_path, code) as process:
        out, err = process.communicate()

    assert (out, err) == ("[True, True, True, True] True\n", "")


@pytest.mark.parametrize("then", ["wait", "ignore"])
@pytest.mark.parametrize("kill_group", [False, True])
def test_processes_whose_parent_is_killed_end_and_leave_nothing_on_the_machine(tmp_path, kill_group, then):
    os.mkfifo(tmp_path / "fifo")
    tasks = f"[Meets(Path({str(tmp_path)!r}), then) for then in ('end', {then!r})]"
    code = f"""\
for _ in Workers(num_workers=2, worker_type="process").run({tasks}):
        print("at work", flush=True)"""
    with start(tmp_path, code) as process:
        assert process.stdout.readline() == "at work\n"
        family = [process.pid, *map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())]
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in family)
        if kill_group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        _, err = process.communicate()  # returns when none of the processes is left

    assert len(family) == 4  # including multiprocessing's own helper
    assert not [name for name in re.findall(r"/dev/shm/\S+", maps) if Path(name).exists()]
    assert err == ""


def test_a_script_without_a_guard_says_what_is_missing(tmp_path):
    (tmp_path / "script.py").write_text(
        "from tests.packing.test_workers import *\n"
        "list(Workers(num_workers=2, worker_type='process').run([Squares(2)]))\n"
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )

    assert done.returncode == 1
    assert "WorkerError: a worker process ended with exit code 1" in done.stderr
    assert "`if __name__ == '__main__':`" in done.stderr
