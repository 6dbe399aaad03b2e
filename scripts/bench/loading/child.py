"""The process that measures loaders: ``child.py JOB...`` prints one line of JSON for each job.

The first pass gives the time to the first batch and is checked: every sample must come exactly once, with its own
label. Whole passes follow until the time is over. They give the rates and the processor time.
"""

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

from loading.job import ARRAY, SIZE, Batch, Job, Passes

_FORMS: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    "image": [("uint8", (SIZE, SIZE, 3)), ("uint8", (3, SIZE, SIZE))],
    "npy": [("float32", (ARRAY,))],
}
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure the jobs and print the results."""
    for job in sys.argv[1:]:
        print(json.dumps(measure(Job(**json.loads(job)))), flush=True)
    os._exit(0)  # some peers do not exit by themselves


def measure(job: Job) -> dict[str, Any]:
    """Return the measurements of a job."""
    before_import = time.perf_counter()
    module = importlib.import_module(job.module)
    started = time.perf_counter()
    memory_before = anonymous_bytes(os.getpid())
    make = module.open_passes(job)
    check = _Check(job)
    first = elapsed = 0.0
    for batch, elapsed in _timed(make(), started, job.limit):
        first = first or elapsed
        check.add(batch)
    result = {
        "first_batch_seconds": first,
        "import_seconds": started - before_import,
        "memory_before_bytes": memory_before,
        "checked": check.result(was_left=elapsed > job.limit),
        "versions": {name: _version(name) for name in getattr(module, "PACKAGES", ())},
    }
    return result if job.only_first else result | _rates(make, job)


def _rates(make: Passes, job: Job) -> dict[str, float]:
    cpu, machine, servers = tree_cpu_seconds(), machine_cpu_seconds(), _cpu_seconds(job.servers)
    started = time.perf_counter()
    count, seconds = 0, 0.0
    while not count or seconds < job.seconds:
        for (values, _), _ in _timed(make(), started, seconds + job.limit):
            count += len(values)
        seconds = time.perf_counter() - started
    cpu, machine, servers = (
        tree_cpu_seconds() - cpu,
        machine_cpu_seconds() - machine,
        _cpu_seconds(job.servers) - servers,
    )
    return {
        "samples_per_second": count / seconds,
        "cpu_seconds_per_1000": 1000 * cpu / count,
        "others": max(0.0, machine - cpu - servers) / seconds,
    }


def _timed(batches: Iterable[Batch], started: float, limit: float) -> Iterator[tuple[Batch, float]]:
    """Yield batches, each with the time since the start, until there are no more or the time is over."""
    iterator = iter(batches)
    for batch in iterator:
        elapsed = time.perf_counter() - started
        yield batch, elapsed
        if elapsed > limit:
            break
    close: Callable[[], None] | None = getattr(iterator, "close", None)
    if close is not None:
        close()


class _Check:
    """Compares a pass with the input."""

    def __init__(self, job: Job) -> None:
        self._task = job.task
        self._expected = json.loads((Path(job.folder) / "expected.json").read_text())[job.task]
        self._sums = dict.fromkeys(self._expected, 0)

    def add(self, batch: Batch) -> None:
        values, labels = batch
        self._sums["samples"] += len(values)
        if "bytes" in self._sums:
            self._sums["bytes"] += sum(map(len, values))
            self._sums["checksum"] += sum(map(crc32, values))
        else:
            form = str(values.dtype).removeprefix("torch."), tuple(values.shape[1:])
            if form not in _FORMS[self._task]:
                raise RuntimeError(f"a batch is of {form}, expected {_FORMS[self._task]}")
        if "labels" in self._sums:
            self._sums["labels"] += sum(map(int, labels))

    def result(self, *, was_left: bool) -> bool:
        """Return whether the pass was complete; False if it was stopped early.

        Raises:
            RuntimeError: The pass was not stopped early, and did not have the samples of the input.
        """
        if was_left:
            return False
        if self._sums != self._expected:
            raise RuntimeError(f"the pass had {self._sums}, expected {self._expected}")
        return True


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def tree_cpu_seconds() -> float:
    """Return the processor seconds of this process and all its descendants, including those that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    for process in processes_below(os.getpid())[1:]:
        fields = _stat(process)
        total += sum(int(ticks) for ticks in fields[11:15]) / _TICKS
    return total


def _cpu_seconds(processes: Iterable[int]) -> float:
    """Return the processor seconds of processes that are alive."""
    return sum(int(ticks) for process in processes for ticks in _stat(process)[11:13]) / _TICKS


def processes_below(root: int) -> list[int]:
    """Return a process and all its descendants that are alive."""
    parents = {int(path.name): _stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found = [root]
    for process in found:
        found += [child for child, fields in parents.items() if fields and int(fields[1]) == process]
    return found


def _stat(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return []


def machine_cpu_seconds() -> float:
    """Return the processor seconds of all processes of the machine, and the time that its host took away."""
    _, user, nice, system, _idle, _wait, irq, softirq, steal, *_ = Path("/proc/stat").read_text().split(None, 10)
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / _TICKS


def anonymous_bytes(process: int) -> int:
    """Return the anonymous memory of a process: its private memory and its share of shared memory."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem")))


if __name__ == "__main__":
    main()
