"""Packing copes with many open files, with workers on other machines, and with processes killed or files damaged."""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit import FileFolder, pack
from shardkit.errors import ArgumentError, SourceError, WorkerError
from shardkit.storage.registry import storage_for
from tests.storage.s3.test_storage import options_for
from tests.support.folders import contents_of
from tests.support.forks import forkserver

ROOT = Path(__file__).parents[2]
SERVER = forkserver(__name__)


def small(number):
    return {"__key__": f"{number:04d}", "bin": random.Random(number).randbytes(number * 37 % 900), "cls": number % 7}


def go_elsewhere(folder, hidden):
    """Make a process act like another machine: its own working folder and TMPDIR, and no access to its caller's."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.chdir(folder)

    def hide(event, arguments):
        if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(str(hidden)):
            raise FileNotFoundError(2, "is on another machine", arguments[0])

    sys.addaudithook(hide)


@dataclass
class Place:
    """Where packs run: a folder of files, a TMPDIR, and an executor whose processes do not see that TMPDIR."""

    folder: Path
    executor: Executor

    def left(self):
        """Return the files of packs in both TMPDIRs."""
        return [*self.folder.glob("here/.shardkit-*"), *self.folder.glob("there/*")]

    def waiting(self):
        """Return the files that hold samples until they are packed."""
        return sorted(self.folder.glob("here/.shardkit-*/*/*"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    for name in ("in", "here", "there", "out"):
        (folder / name).mkdir()
    for number in range(40):
        sample = small(number)
        (folder / f"in/{number:04d}.bin").write_bytes(sample["bin"])
        (folder / f"in/{number:04d}.cls").write_bytes(b"%d" % sample["cls"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder / "here"))
        patch.setattr(tempfile, "tempdir", str(folder / "here"))
        patch.setattr(sys.modules["shardkit.packing.job"], "_SPILL_SAMPLES", 6)  # for many segments
        patch.setattr(sys.modules["shardkit.packing.spill"], "SEGMENT_BYTES", 4000)
        patch.chdir(folder)
        arguments = (folder / "there", folder / "here")
        with ProcessPoolExecutor(2, mp_context=SERVER, initializer=go_elsewhere, initargs=arguments) as executor:
            yield Place(folder, executor)


def marked(sample):
    return None if sample["cls"] in (b"3", 3) else sample | {"txt": f"marked {sample['__key__']}"}


def of_kind(kind):
    """Return a source and a transform."""
    source = FileFolder("in") if "listed" in kind else map(small, range(40))
    return source, marked if "transform" in kind else None


KINDS = ["listed", "listed with transform", "iterable", "iterable with transform"]


@pytest.mark.multiprocess
@given(
    kind=st.sampled_from(KINDS),
    options=st.fixed_dictionaries(
        {
            "shard_samples": st.none() | st.integers(1, 30),
            "splits": st.none() | st.just({"train": 0.7, "val": 0.3}),
            "compression": st.sampled_from(["none", "zst:1", "auto"]),
            "columns": st.none() | st.just({"label": "cls"}),
            "shuffle": st.booleans(),
            "seed": st.integers(0, 9),
        }
    ),
)
def test_workers_that_share_nothing_but_source_and_destination_give_the_same_bytes(place, kind, options):
    options |= {"progress": False}
    with tempfile.TemporaryDirectory(dir="out") as out:  # a relative path
        source, transform = of_kind(kind)
        pack(source, f"{out}/here/ds", transform=transform, num_workers=1, **options)
        source, transform = of_kind(kind)
        pack(source, f"{out}/there/ds", transform=transform, executor=place.executor, **options)

        assert contents_of(f"{out}/there") == contents_of(f"{out}/here")
        assert not list(Path(out).rglob("__staging__"))
    assert not place.left()


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", KINDS)
def test_a_destination_in_a_bucket_holds_the_samples_that_wait_for_workers_elsewhere(place, moto, kind):
    url, storage_options = f"s3://{moto.make_bucket()}/train", options_for(moto)
    options = {"splits": {"a": 0.5, "b": 0.5}, "split_by": by_last_digit, "shard_samples": 9, "progress": False}
    source, transform = of_kind(kind)
    waiting = []

    def watched():
        waiting.extend(storage_for(url, storage_options).list(f"{url}/__staging__"))

    executor = Watched(place.executor, watched)
    there = pack(
        source, url, transform=transform, executor=executor, num_workers=1, storage_options=storage_options, **options
    )
    with tempfile.TemporaryDirectory(dir="out") as out:
        source, transform = of_kind(kind)
        here = pack(source, f"{out}/train", transform=transform, **options)

    assert {name: manifest.digest for name, manifest in there.items()} == {n: m.digest for n, m in here.items()}
    assert bool(waiting) is (kind != "listed")
    assert {"a", "b"} <= {*storage_for(url, storage_options).list(url)} - {"__staging__"}
    assert storage_for(url, storage_options).list(f"{url}/__staging__") == []
    assert not place.left()


@pytest.mark.multiprocess
def test_a_source_that_a_worker_does_not_see_is_an_error_that_names_its_machine(place, tmp_path):
    shutil.copytree("in", place.folder / "here/in")
    source = FileFolder(place.folder / "here/in")

    with pytest.raises(
        SourceError, match=rf"is gone, or is not visible from {re.escape(socket.gethostname())}; run it"
    ):
        pack(source, tmp_path / "ds", executor=place.executor, progress=False)
    assert not (tmp_path / "ds/manifest.json").exists()


def by_last_digit(key):
    return key[-1]


class Watched(Executor):
    """An executor that calls a function before each task."""

    def __init__(self, executor, watch):
        self.executor, self.watch = executor, watch

    def submit(self, fn, /, *args, **kwargs):
        self.watch()
        return self.executor.submit(fn, *args, **kwargs)


FEW_FILES = """
import resource, sys
import pyarrow.compute, pandas, shardkit
from shardkit import pack
from tests.promises.test_packing_elsewhere import FileFolder, marked, small

if __name__ == "__main__":
    sys.modules["shardkit.packing.job"]._SPILL_SAMPLES = 2
    sys.modules["shardkit.packing.spill"].SEGMENT_BYTES = 1500
    options = {"shard_samples": 20, "num_workers": 16, "progress": False, "compression": "none"}
    source = FileFolder(sys.argv[1]) if sys.argv[2] == "listed" else map(small, range(500))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    print(pack(source, sys.argv[3], transform=marked, **options)["ds"].digest)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["listed", "iterable"])
def test_sixteen_workers_and_hundreds_of_segments_need_few_files(tmp_path, kind):
    (tmp_path / "in").mkdir()
    for number in range(500):
        for name in ("bin", "cls"):
            value = small(number)[name]
            (tmp_path / f"in/{number:04d}.{name}").write_bytes(value if name == "bin" else b"%d" % value)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    (tmp_path / "script.py").write_text(FEW_FILES)
    command = [sys.executable, tmp_path / "script.py", tmp_path / "in", kind, tmp_path / "ds"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    there = pack(map(small, range(500)), tmp_path / "again/ds", transform=marked, shard_samples=20, progress=False)

    assert done.stderr == ""
    assert done.stdout.split() == [there["ds"].digest]


class Revived(Executor):
    """An executor that repeats a task if the process running it died, like those of clusters."""

    def __init__(self, folder, hidden):
        self.arguments = (folder, hidden)
        self.processes = self.start()
        self.threads = ThreadPoolExecutor(2)

    def start(self):
        return ProcessPoolExecutor(1, mp_context=SERVER, initializer=go_elsewhere, initargs=self.arguments)

    def submit(self, fn, /, *args, **kwargs):
        return self.threads.submit(self.keep_on, fn, *args, **kwargs)

    def keep_on(self, fn, *args, **kwargs):
        while True:
            processes = self.processes
            try:
                return processes.submit(fn, *args, **kwargs).result()
            except BrokenProcessPool:
                if processes is self.processes:
                    self.processes = self.start()

    def shutdown(self, **_):
        self.threads.shutdown()
        self.processes.shutdown()


@dataclass(frozen=True)
class DiesOnce:
    """A function of a sample that kills its process, once, when it reaches a key."""

    mark: str  # a file that records the death
    key: str

    def __call__(self, sample):
        if sample["__key__"] == self.key and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sample["cls"]


@dataclass(frozen=True)
class KeepsOrDies:
    """The same function as a transform."""

    dies: DiesOnce

    def __call__(self, sample):
        self.dies(sample)
        return marked(sample)


@pytest.mark.multiprocess
@pytest.mark.parametrize("moment", ["transforming", "writing"])
@pytest.mark.parametrize("executor", [Revived, ProcessPoolExecutor])
def test_a_worker_that_is_killed_leaves_nothing_and_the_bytes_are_the_same(place, tmp_path, executor, moment):
    dies = DiesOnce(str(tmp_path / "died"), "0018")
    options = {"shard_samples": 8, "progress": False}
    if moment == "transforming":
        options |= {"transform": KeepsOrDies(dies), "columns": {"label": "cls"}}
    else:
        options |= {"transform": marked, "columns": {"label": dies}}

    def run():
        if executor is Revived:
            with Revived(place.folder / "there", place.folder / "here") as workers:
                return pack(FileFolder("in"), tmp_path / "ds", executor=workers, **options)
        with ProcessPoolExecutor(2, mp_context=SERVER) as workers:
            return pack(FileFolder("in"), tmp_path / "ds", executor=workers, **options)

    if executor is ProcessPoolExecutor:
        with pytest.raises(WorkerError, match=r"workers of the executor died .*; the same call with a new executor"):
            run()
        assert not (tmp_path / "ds/manifest.json").exists()
    run()
    left = contents_of(tmp_path / "ds")
    pack(FileFolder("in"), tmp_path / "again/ds", **options)

    assert (tmp_path / "died").exists()
    assert left == contents_of(tmp_path / "again/ds")
    assert not (tmp_path / "ds/__staging__").exists()
    assert not place.left()


def pack_in_a_group(folder, kind, out):
    """Pack in a process that leads a process group, which includes the processes of its executor."""
    os.setpgid(0, 0)
    os.chdir(folder)
    tempfile.tempdir = str(folder / "here")
    sys.modules["shardkit.packing.job"]._SPILL_SAMPLES = 6
    sys.modules["shardkit.packing.spill"].SEGMENT_BYTES = 4000
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as workers:
        source, transform = of_kind(kind)
        pack(source, f"{out}/ds", transform=transform, executor=workers, shard_samples=3, progress=False)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["listed with transform", "iterable"])
def test_a_pack_that_is_killed_with_its_executor_again_and_again_goes_on_to_the_same_bytes(place, tmp_path, kind):
    source, transform = of_kind(kind)
    pack(source, tmp_path / "clean/ds", transform=transform, shard_samples=3, progress=False)
    moments = random.Random(kind)
    for trial, kills in enumerate([9, 9, 1]):
        out, longest = tmp_path / str(trial), 0.2
        for _ in range(kills):
            process = SERVER.Process(target=pack_in_a_group, args=(place.folder, kind, out))
            process.start()
            process.join(moments.uniform(0, longest))
            longest *= 1.2  # an iterable is read from the start each time
            with suppress(ProcessLookupError):  # it does not lead a group yet, or has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL)
            if process.exitcode == 0:
                break
        source, transform = of_kind(kind)
        pack(source, out / "ds", transform=transform, shard_samples=3, progress=False)  # also works without an executor

        assert contents_of(out) == contents_of(tmp_path / "clean")
        assert not (out / "ds/__staging__").exists()
        assert not place.left()


MEETING = threading.Barrier(12)


def meet(sample):
    MEETING.wait(20)
    return sample["cls"]


def test_an_executor_has_as_many_tasks_at_a_time_as_it_has_workers(tmp_path):
    with ThreadPoolExecutor(12) as executor:
        pack(
            map(small, range(12)), tmp_path, columns={"label": meet}, shard_samples=1, executor=executor, progress=False
        )

    assert len(shardkit.ShardDataset(str(tmp_path))) == 12


class Client:
    """The methods that a Dask client shares with executors, and the one that returns an executor."""

    def submit(self, fn, *args):
        raise NotImplementedError

    def get_executor(self):
        raise NotImplementedError


def test_a_client_of_dask_is_refused_in_one_line_that_names_its_executor(tmp_path):
    with pytest.raises(
        ArgumentError, match=r"^executor is a Client, expected an executor; pass client\.get_executor\(\)$"
    ):
        pack(map(small, range(12)), tmp_path / "ds", executor=Client(), progress=False)
    assert not (tmp_path / "ds").exists()


def damage(path, kind, part):
    data = path.read_bytes()
    at = int(part * max(0, len(data) - 1))
    if kind == "deleted":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(data[:at])
    elif data:
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])


class StopError(BaseException):
    """An error that stops a pack like Ctrl-C."""


@dataclass
class Damaged:
    """A pack that calls a function once, at a given moment."""

    kind: str
    shuffle: bool
    moment: str = ""
    act: Callable = None

    def run(self, out):
        source, transform = of_kind(self.kind)
        options = {"splits": {"a": 0.5, "b": 0.5}, "split_by": self.split_by, "columns": {"label": self.label}}
        options |= {"shuffle": self.shuffle, "shard_samples": 7, "num_workers": 1, "progress": False}
        pack(source, f"{out}/ds", transform=transform, **options)
        return contents_of(f"{out}/ds")

    def happen(self, moment):
        if self.moment == moment:
            self.moment = ""
            self.act()

    def split_by(self, key):
        self.happen("planning")
        return key

    def label(self, sample):
        self.happen("writing")
        return sample["cls"]


def stop():
    raise StopError


@given(
    kind=st.sampled_from(["listed with transform", "iterable"]),
    moment=st.sampled_from(["planning", "writing", "between calls"]),
    how=st.sampled_from(["flipped", "cut", "deleted"]),
    number=st.integers(0, 100),
    part=st.floats(0, 1),
    shuffle=st.booleans(),
)
def test_waiting_samples_that_were_damaged_are_an_error_or_not_needed(place, kind, moment, how, number, part, shuffle):
    def act():
        waiting = place.waiting()
        if waiting:
            damage(waiting[number % len(waiting)], how, part)

    with tempfile.TemporaryDirectory(dir="out") as out:
        job = Damaged(kind, shuffle, moment, act)
        if moment == "between calls":
            with pytest.raises(StopError):
                Damaged(kind, shuffle, "writing", stop).run(out)
            assert bool(place.waiting()) is (kind != "iterable")
            act()
        try:
            job.run(out)
        except SourceError as error:
            failure = str(error)
            assert not list(Path(out).rglob("manifest.json"))
            job.run(out)
        else:
            failure = ""

        assert not failure or "was cut or changed while it was in use" in failure
        assert contents_of(f"{out}/ds") == Damaged(kind, shuffle).run(f"{out}/clean")
    assert not place.left()
