"""An error at any call, in any thread or process of a loader, ends the pass with that error; the pass never hangs."""

import gc
import itertools
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings

import shardkit
from shardkit import Resize, ShardDataset, ShardLoader, WorkerError
from shardkit.loading import rows as rows_module
from shardkit.loading.rows import RawRow, Row, RowProcesses
from shardkit.reading import access
from shardkit.reading.page_cache import OpenFile
from tests.support.shared import PHOTO

pytestmark = pytest.mark.nightly

PACKAGE = str(Path(shardkit.__file__).parent)
SECONDS = 60  # after which a pass counts as hanging
COUNT = 70
NEVER_FAIL = ("__exit__", "release")  # these release locks: nothing could be promised if that failed


class InjectedError(Exception):
    """An exception that no except clause expects."""


class Calls:
    """Counts, per line, the calls of and by shardkit's functions, and raises an error at one of them.

    Args:
        case: The line, and the number of the call; None for no error.
        error: The error to raise there.
    """

    def __init__(self, case=None, error=None):
        self.counts = Counter()
        self.case = case
        self.error = error
        self._lock = threading.Lock()

    def __call__(self, frame, event, argument):
        name = frame.f_code.co_filename
        if event not in ("call", "c_call") or not name.startswith(PACKAGE):
            return
        if event == "c_call" and argument.__name__ in NEVER_FAIL:
            return
        place = name.removeprefix(PACKAGE), frame.f_lineno, event, frame.f_code.co_name
        with self._lock:
            self.counts[place] += 1
            is_it = (place, self.counts[place]) == self.case
        if is_it:
            error, self.error = self.error, None  # threads keep their counter, and everything that it refers to
            raise error


def profiled(calls, function):
    """Return the result or error of a function, called in a thread that counts calls, as do the threads it starts."""
    results = []

    def run():
        try:
            results.append((function(), None))
        except BaseException as error:  # noqa: BLE001 - it is looked at
            results.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    threading.setprofile(calls)
    try:
        thread.start()
        thread.join(SECONDS)
    finally:
        threading.setprofile(None)
    assert not thread.is_alive(), f"the pass waits for ever after an error at {calls.case}"
    return results[0]


def some_of(calls, count):
    """Return all counted calls, or some: for each line the first, the last and one in between."""
    cases = sorted((place, n) for place, last in calls.counts.items() for n in {1, (1 + last) // 2, last})
    step = max(1, len(cases) / count)
    return [cases[int(number * step)] for number in range(int(len(cases) / step))]


def same(sample):
    return sample


def with_itself(sample):
    return sample | {"old": sample["png"]}


WAYS = {
    "whole blocks": ({"fields": ["cls", "npy", "txt"]}, {}),
    "rows": ({"fields": ["cls", "npy", "txt"]}, {"transform": same}),
    "images": ({"transform": {"png": Resize(16)}}, {"transform": with_itself}),
    "page cache": ({}, {"transform": {"png": Resize(16)}}),
    "skipping": ({}, {"on_error": "skip"}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raising")
    for name, compression in itertools.product(WAYS, ("none", "zst")):
        samples = (
            {"__key__": f"{i:03d}", "cls": i, "npy": np.full((16, 16), i), "txt": f"text {i}", "png": PHOTO}
            | ({"npy": b"?"} if name == "skipping" and i % 30 == 7 else {})
            for i in range(COUNT)
        )
        options = {"shard_samples": 40, "block_bytes": 60_000, "shuffle": False, "progress": False}
        shardkit.pack(samples, folder / name / compression, compression=compression, **options)
    return folder


def chain(error):
    """Yield an error and the errors that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def left():
    """Return the threads that remain after all that can end have ended."""
    for seconds in (1, SECONDS):
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("shardkit-")]
        for thread in threads:
            thread.join(seconds)
        if not any(thread.is_alive() for thread in threads):
            return []
        gc.collect()  # a pass that has barely begun ends its threads when it is garbage-collected
    return threads


def seen(batch):
    return batch["__key__"], batch["cls"].tolist()


class Pass:
    """A new loader, and what remains of it after its pass has ended, with or without an error."""

    def __init__(self, folder, way, compression):
        self.folder = folder / way / compression
        self.of_dataset, self.of_loader = WAYS[way]
        self.loader = self.batches = None
        self.found = []

    def __call__(self):
        dataset = ShardDataset(self.folder, **self.of_dataset)
        self.loader = ShardLoader(dataset, 6, num_workers=2, lanes=2, memory=1_200_000, **self.of_loader)
        self.batches = iter(self.loader)
        self.found += map(seen, self.batches)
        return self.found


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # files are closed when they are garbage-collected
@pytest.mark.parametrize("kind", [InjectedError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize(("way", "compression"), [*((way, "none") for way in WAYS), ("rows", "zst")])
def test_an_error_at_any_call_ends_the_pass_with_it(folders, way, compression, kind):
    is_large = 0 if way == "page cache" else 1 << 60
    with (
        mock.patch.object(access, "_LARGE_BYTES", is_large),
        mock.patch.object(OpenFile, "is_resident", return_value=True),
        mock.patch.object(threading, "excepthook"),
        mock.patch.object(sys, "unraisablehook"),
    ):
        calls = Calls()
        expected, error = profiled(calls, Pass(folders, way, compression))
        assert error is None
        assert {"_admit_batches", "_fetch", "next"} <= {place[3] for place in calls.counts}  # in all threads
        for case in some_of(calls, settings().max_examples // 3):
            made, injected = Pass(folders, way, compression), kind("injected")
            found, error = profiled(Calls(case, injected), made)
            if error is None:  # Python drops errors in finalizers; others have a fallback
                came = sum(len(keys) for keys, _ in found)  # a sample that could not be decoded may be skipped
                assert found == expected or (made.loader.skipped and came + made.loader.skipped == COUNT), case
            elif case[0][3] == "_work" and isinstance(error, WorkerError):  # before the thread's first line
                pass
            else:
                assert injected in chain(error), (case, error)
            if made.batches is not None:
                rest = list(map(seen, made.batches))  # there is a rest if the error was raised before the pass noticed
                assert not rest or made.found + rest == expected, case
                made.loader.set_epoch(0)
                assert list(map(seen, made.loader)) == expected, case
            found = error = injected = made = None
            assert not left(), f"threads are left after {kind.__name__} at {case}"
        gc.collect()


# -- processes


class Nearby(rows_module._Process):
    """A fake process: what is sent to it comes back as rows."""

    def __init__(self, _):
        self._is_used = threading.Lock()
        self._connection = mock.Mock()
        self._connection.recv.side_effect = self._receive
        self._process = mock.Mock(exitcode=0)

    def _receive(self):
        time.sleep(0.001)  # so that other threads wait for the process
        return [Row(raw) for raw in self._connection.send.call_args[0][0][0]]


def use(rows):
    """Call from more threads than there are processes, each until an error ends it; return how each ended."""
    ends = []

    def run():
        try:
            ends.append([rows([RawRow({}, 0, n)])[0].value.position for n in range(9)])
        except BaseException as error:  # noqa: BLE001 - it is looked at
            ends.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a thread waits for a process for ever"
    return ends


def test_an_error_at_any_call_leaves_no_thread_waiting_for_a_process(monkeypatch):
    monkeypatch.setattr(rows_module, "_Process", Nearby)
    right, calls, rows = [*range(9)], Calls(), RowProcesses(None, 1)
    assert profiled(calls, lambda: use(rows)) == ([right] * 4, None)
    for case in some_of(calls, settings().max_examples):
        rows, injected = RowProcesses(None, 1), InjectedError("injected")
        ends, error = profiled(Calls(case, injected), lambda rows=rows: use(rows))

        assert error is None
        assert ends.count(right) >= 3, case
        assert all(end == right or injected in chain(end) for end in ends), case
        assert use(rows) == [right] * 4
        assert len(rows._processes) == 1


class Bomb:
    """A transform that raises an error at one of the calls in the process that it is sent to."""

    def __init__(self, case):
        self.case = case
        self.calls = None

    def __setstate__(self, state):
        vars(self).update(state)
        self.calls = Calls(self.case, InjectedError("injected"))
        sys.setprofile(self.calls)

    def __call__(self, sample):
        return {"__key__": sample["__key__"], "counts": dict(self.calls.counts)}


@pytest.mark.multiprocess
def test_an_error_at_any_call_in_a_process_ends_the_pass(folders):
    dataset = ShardDataset(folders / "rows" / "none", fields=["cls", "npy"])

    def batches(case):
        loader = ShardLoader(dataset, 10, worker_type="process", num_workers=1, transform=Bomb(case))
        try:
            yield from loader
        finally:
            loader.close()

    calls, whole = Calls(), list(batches(None))
    calls.counts.update(whole[-1]["counts"][-1])
    expected = [batch["__key__"] for batch in whole]
    for case in some_of(calls, settings().max_examples // 16):
        try:
            found = list(batches(case))
        except (InjectedError, shardkit.CodecError, WorkerError) as error:
            says = str(error)
        else:  # rows that cannot be sent together are sent one by one; Python drops an error at a generator's end
            assert case[0][3] in ("_pickled", "<genexpr>"), case
            assert [batch["__key__"] for batch in found] == expected
            continue
        assert "injected" in says, case
