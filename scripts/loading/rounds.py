"""Processes that measure one loader each, in turns; and what their rounds say together."""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loading.child import anonymous_bytes, processes_below
from loading.job import Job
from loading.peers import CEILING, OWN, Peer

Runs = dict[str, list[dict[str, Any]]]
"""Of each loader what each round gave; ``{"error": ...}`` where it could not be measured."""

_CHILD = Path(__file__).with_name("child.py")
_TIMEOUT = 300
_ATTEMPTS = 5


def measure_rounds(
    peers: Sequence[Peer],
    python_of: Callable[[Peer], str],
    make_job: Callable[[Peer], Job],
    *,
    rounds: int,
    quiet: float,
) -> Runs:
    """Measure loaders in turns, so that what the machine does besides concerns all of them.

    Before the rounds each runs once for its memory, which is looked at often; that run's rates are not kept.

    Args:
        peers: The loaders.
        python_of: Returns the Python that a loader needs; raises where there is none.
        make_job: Returns what its process is to do.
        rounds: How many.
        quiet: A run is repeated if other processes took more of a processor than this; at most five times.
    """
    runs: Runs = {}
    for turn in range(rounds + 1):
        turned = turn % len(peers)
        for peer in [*peers[turned:], *peers[:turned]]:
            known = runs.setdefault(peer.name, [])
            if known and "error" in known[0]:
                continue
            try:
                result = _quiet_run(python_of(peer), make_job(peer), quiet, watch=not turn)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with a peer, the table says so
                runs[peer.name] = [{"error": str(error)}]
                continue
            known.append(result)
            shown = f"{result['samples_per_second']:,.0f} samples/s, others {result['others']:.0%}"
            print(f"   round {turn} {peer.name}: {shown}", file=sys.stderr)
    return runs


def _quiet_run(python: str, job: Job, quiet: float, *, watch: bool) -> dict[str, Any]:
    best: dict[str, Any] = {}
    for _ in range(_ATTEMPTS):
        result = run_child(python, job, watch=watch)
        if not best or result["others"] < best["others"]:
            best = result
        if watch or result["others"] <= quiet:
            break
    return best


def run_child(python: str, job: Job, *, watch: bool) -> dict[str, Any]:
    """Return what a process says of a job; with ``watch`` also the most memory that it and its workers had.

    Raises:
        RuntimeError: It failed; the message has the last line that it printed.
        subprocess.TimeoutExpired: It did not end.
    """
    paths = [str(_CHILD.parents[1]), os.environ.get("PYTHONPATH", "")]
    caches = {"HF_HOME": str(Path(job.folder).parent / "huggingface")}
    environment = os.environ | caches | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [python, "-W", "ignore", str(_CHILD), job.to_json()]
    largest = 0
    with subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True) as process:
        started = time.monotonic()
        while watch and process.poll() is None and time.monotonic() - started < _TIMEOUT:
            largest = max(largest, sum(map(anonymous_bytes, processes_below(process.pid))))
            time.sleep(0.05)
        try:
            output, errors = process.communicate(timeout=_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    lines = output.splitlines()
    if process.returncode or not lines:
        said = [line for line in errors.splitlines() if line.strip()] or [f"exit code {process.returncode}"]
        raised = [line for line in said if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)] or said
        raise RuntimeError(raised[-1][:300])
    result: dict[str, Any] = json.loads(lines[-1])
    return result | ({"memory_bytes": largest} if watch else {})


def summarise(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return for each loader its medians, and the medians of its ratios to the ceiling and to shardkit, by rounds."""
    rows: dict[str, dict[str, Any]] = {}
    for name, results in runs.items():
        if "error" in results[0]:
            rows[name] = {"error": results[0]["error"]}
            continue
        measured = results[1:] or results
        row = {
            what: statistics.median(result[what] for result in measured)
            for what in ("samples_per_second", "cpu_seconds_per_1000", "first_batch_seconds")
        }
        row |= {"memory_bytes": results[0]["memory_bytes"], "checked": results[0]["checked"]}
        row["others"] = max(result["others"] for result in measured)
        for what, against in (("of_ceiling", CEILING), ("of_shardkit", OWN)):
            row |= _ratio(what, measured, runs.get(against, ()))
        rows[name] = row
    return rows


def _ratio(what: str, runs: Sequence[Any], others: Sequence[Any]) -> dict[str, float]:
    """Return the median of the ratios of rounds, and the least and the largest."""
    if not others or "error" in others[0]:
        return {}
    pairs = zip(runs, others[1:] or others, strict=True)
    ratios = [run["samples_per_second"] / other["samples_per_second"] for run, other in pairs]
    return {what: statistics.median(ratios), f"{what}_least": min(ratios), f"{what}_most": max(ratios)}
