"""The classic experiment: the speed-up of a loader over a loop, by workers, batch size and weight of the transform.

A speed-up is the time that the loop takes for an epoch, divided by the time that another way takes in the same round.
Each pipeline of albumentations has a process of its own in each round, which loads an epoch in each way.
"""

import json
import statistics
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from loading.job import Errand, Way
from loading.notes import note
from loading.rounds import REPEATS, child_environment

WORKERS = (1, 2, 4, 6, 8)
BATCH_SIZES = (10, 100, 1000)

LOOP = Way("sequential", 1, 100)
BARE = Way("bare", 2, 100)
_WORKERS, _BATCH_SIZE = 2, 100  # the fixed value while the other one varies

SERIES = {"threads": ("thread", 0), "processes": ("process", 0), "processes, next epoch": ("process", 1)}
"""The series compared with the loop: the kind of worker and the measured epoch; the first epoch includes the start."""
TARGETS = (
    ("1 worker / the loop", (1, _BATCH_SIZE), LOOP, 1.0),
    ("2 workers / 2 bare threads", (2, _BATCH_SIZE), BARE, 0.95),
    ("4 workers / 2 workers", (4, _BATCH_SIZE), (2, _BATCH_SIZE), 0.9),
    ("8 workers / 2 workers", (8, _BATCH_SIZE), (2, _BATCH_SIZE), 0.9),
    ("batches of 10 / of 1000", (_WORKERS, 10), (_WORKERS, 1000), 0.95),
)
"""The targets: workers and batch size, what their rate is compared with, and the least ratio."""

Runs: TypeAlias = dict[Way, list[dict[str, Any]]]
"""The results of each way, one per round."""
Ratio: TypeAlias = dict[str, float]
"""The median, the minimum and the maximum of the ratios of the rounds."""

_CHILD = Path(__file__).with_name("ways.py")
_TIMEOUT = 900


def measure_classic(
    python: str,
    folder: Path,
    pipelines: Sequence[str],
    workers: Sequence[int],
    batch_sizes: Sequence[int],
    *,
    rounds: int,
    quiet: float,
) -> dict[str, Runs]:
    """Return the measurements of each round, by pipeline and way.

    Args:
        python: A Python that has albumentations.
        folder: The input, as ``inputs`` made it.
        pipelines: The pipelines of albumentations.
        workers: The numbers of workers to measure, with batches of 100.
        batch_sizes: The batch sizes to measure, with two workers.
        rounds: The number of rounds.
        quiet: A run is repeated, at most ``REPEATS`` times, if others used more than this fraction of a processor.

    Raises:
        RuntimeError: Two ways had different images; or a process failed, and has printed why.
    """
    kinds = ("thread", "process")
    ways = [LOOP, BARE, *(Way(kind, n, _BATCH_SIZE) for kind in kinds for n in workers)]
    ways += [Way(kind, _WORKERS, size) for kind in kinds for size in batch_sizes]
    ways = list(dict.fromkeys(ways))
    runs: dict[str, Runs] = {pipeline: {way: [] for way in ways} for pipeline in pipelines}
    for turn in range(rounds):
        first = turn * len(ways) // rounds
        turned = (*ways[first:], *ways[:first])
        for pipeline in pipelines:
            results = _run_child(python, Errand(str(folder), pipeline, turned, quiet, REPEATS))
            for way, result in zip(turned, results, strict=True):
                runs[pipeline][way].append(result)
                times = " and ".join(f"{seconds:.2f} s" for seconds in result["seconds"])
                name = f"{way.kind} {way.workers}, batches of {way.batch_size}"
                note(f"{pipeline}, round {turn + 1} of {rounds}, {name}: {times}, others {result['others']:.0%}")
        _compare(runs)
    return runs


def _run_child(python: str, errand: Errand) -> Iterator[dict[str, Any]]:
    """Yield the lines that a process prints, as soon as they come."""
    command = [python, "-W", "ignore", str(_CHILD), errand.to_json()]
    with subprocess.Popen(command, env=child_environment(), stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(_TIMEOUT, process.kill)
        timer.start()
        try:
            yield from map(json.loads, process.stdout or ())
        finally:
            timer.cancel()
    if process.returncode:
        raise RuntimeError(f"the process that measures {errand.pipeline} has ended with {process.returncode}")


def _compare(runs: Mapping[str, Runs]) -> None:
    """Check that all ways have given the same images, each once."""
    for pipeline, ways in runs.items():
        expected = ways[LOOP][0]["outputs"][0]
        for way, results in ways.items():
            for output in (output for result in results for output in result["outputs"]):
                if output != expected:
                    raise RuntimeError(
                        f"{pipeline}, {way}: the images add up to {output}, those of the loop to {expected}"
                    )


def summarise_classic(runs: Mapping[str, Runs]) -> dict[str, dict[str, Any]]:
    """Return for each pipeline the medians of the loop's time, of the speed-ups, and of the figures with targets."""
    rows: dict[str, dict[str, Any]] = {}
    for pipeline, ways in runs.items():
        samples, _ = ways[LOOP][0]["outputs"][0]
        seconds = statistics.median(result["seconds"][0] for result in ways[LOOP])
        row: dict[str, Any] = {"milliseconds": 1000 * seconds / samples, "bare": _ratio(ways, BARE, LOOP)}
        row |= {"workers": {}, "batch_sizes": {}, "targets": {}}
        for series, (kind, epoch) in SERIES.items():
            own = sorted((way for way in ways if way.kind == kind), key=lambda way: (way.workers, way.batch_size))
            speedups = {way: _ratio(ways, way, LOOP, epoch) for way in own}
            row["workers"][series] = {w.workers: speedups[w] for w in own if w.batch_size == _BATCH_SIZE}
            row["batch_sizes"][series] = {w.batch_size: speedups[w] for w in own if w.workers == _WORKERS}
            row["targets"][series] = {}
            for text, numbers, beside, _ in TARGETS:
                way, other = Way(kind, *numbers), beside if isinstance(beside, Way) else Way(kind, *beside)
                if way in ways and other in ways:
                    row["targets"][series][text] = _ratio(ways, way, other, epoch)
        rows[pipeline] = row
    return rows


def _ratio(runs: Runs, way: Way, beside: Way, epoch: int = 0) -> Ratio:
    """Return how many times as fast as another way a way is."""
    epochs = epoch, (epoch if beside.kind == way.kind else 0)
    pairs = zip(runs[way], runs[beside], strict=True)
    ratios = [other["seconds"][epochs[1]] / own["seconds"][epochs[0]] for own, other in pairs]
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
