"""Processes that measure one loader each, in turns, and summaries of their rounds."""

import json
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loading.child import anonymous_bytes, processes_below
from loading.job import Job
from loading.notes import note
from loading.peers import CEILING, OWN, Peer

Runs = dict[str, list[dict[str, Any]]]
"""The results of each loader, one per round; ``{"error": ...}`` if it could not be measured."""

_CHILD = Path(__file__).with_name("child.py")
_TIMEOUT = 300
REPEATS = 2
"""The most repetitions of a run that other processes disturbed."""


def measure_rounds(
    peers: Sequence[Peer],
    python_of: Callable[[Peer], str],
    make_job: Callable[[Peer], Job],
    *,
    rounds: int,
    quiet: float,
) -> Runs:
    """Measure loaders in turns, so that other load on the machine affects all of them.

    Before the rounds, each loader makes one pass alone, in which its memory is sampled often.

    Args:
        peers: The loaders.
        python_of: Returns the Python that a loader needs; raises if there is none.
        make_job: Returns the job of a loader's process.
        rounds: The number of rounds.
        quiet: A run is repeated, at most ``REPEATS`` times, if others used more than this fraction of a processor.
    """
    runs: Runs = {}
    for turn in range(rounds + 1):
        turned = turn % len(peers)
        for peer in [*peers[turned:], *peers[:turned]]:
            known = runs.setdefault(peer.name, [])
            if known and "error" in known[0]:
                continue
            try:
                python, job = python_of(peer), make_job(peer)
                result = _quiet_run(python, job, quiet) if turn else run_child(python, job, watch=True)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with a peer, the table says so
                runs[peer.name] = [{"error": str(error)}]
                note(f"{peer.name}: {error}")
                continue
            known.append(result)
            if turn:
                shown = f"{result['samples_per_second']:,.0f} a second, others {result['others']:.0%}"
            else:
                shown = f"{result['memory_bytes'] / 1e6:,.0f} MB"
            note(f"{job.task}, round {turn} of {rounds}, {peer.name}: {shown}")
    return runs


def _quiet_run(python: str, job: Job, quiet: float) -> dict[str, Any]:
    best: dict[str, Any] = {}
    for _ in range(1 + REPEATS):
        result = run_child(python, job)
        best = min(best or result, result, key=lambda one: one["others"])
        if best["others"] <= quiet:
            break
    return best


def run_child(python: str, job: Job, *, watch: bool = False) -> dict[str, Any]:
    """Return a process's measurements of a job; with ``watch``, those of its first pass and its peak memory.

    Raises:
        RuntimeError: It failed; the message has the last line that it printed.
        subprocess.TimeoutExpired: It did not end in time.
    """
    environment = child_environment() | {"HF_HOME": str(Path(job.folder).parent / "huggingface")}
    command = [python, "-W", "ignore", str(_CHILD), replace(job, only_first=watch).to_json()]
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


def child_environment() -> dict[str, str]:
    """Return environment variables with which a process finds this package."""
    paths = [str(_CHILD.parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def summarise(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], ceiling: str = CEILING, own: str = OWN
) -> dict[str, dict[str, Any]]:
    """Return each loader's medians, and the medians of its ratios to the ceiling and to shardkit within each round."""
    rows: dict[str, dict[str, Any]] = {}
    for name, results in runs.items():
        if "error" in results[0]:
            rows[name] = {"error": results[0]["error"]}
            continue
        check, *measured = results
        row = {
            what: statistics.median(result[what] for result in measured)
            for what in ("samples_per_second", "cpu_seconds_per_1000", "first_batch_seconds")
        }
        row["memory_bytes"] = check["memory_bytes"]
        row["memory_beyond_imports_bytes"] = check["memory_bytes"] - check["memory_before_bytes"]
        row["checked"] = check["checked"]
        row["others"] = max(result["others"] for result in measured)
        for what, against in (("of_ceiling", ceiling), ("of_shardkit", own)):
            row |= _ratios(what, runs, name, against)
        rows[name] = row
    return rows


def _ratios(what: str, runs: Mapping[str, Sequence[Mapping[str, Any]]], name: str, against: str) -> dict[str, float]:
    ratios = ratios_of("samples_per_second", runs, name, against)
    if not ratios:
        return {}
    return {what: statistics.median(ratios), f"{what}_least": min(ratios), f"{what}_most": max(ratios)}


def ratios_of(what: str, runs: Mapping[str, Sequence[Mapping[str, Any]]], name: str, against: str) -> list[float]:
    """Return the ratios of two loaders, one per round; none if one of the loaders was not measured."""
    pairs = zip(runs.get(name, ())[1:], runs.get(against, ())[1:], strict=False)
    return [run[what] / other[what] for run, other in pairs]
