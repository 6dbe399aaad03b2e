"""The benchmark of loaders runs, so that it does not rot. Nothing here is about how fast anything is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IMAGES, SMALLS = 80, 400
sys.path.append(str(ROOT / "scripts"))

from loading.inputs import make_inputs  # noqa: E402 - a part of the program, found beside it
from loading.job import Job  # noqa: E402
from loading.peers import CEILING, OWN, PEERS  # noqa: E402
from loading.rounds import summarise  # noqa: E402

DEV = ("", "webdataset", "datasets")


@pytest.fixture(scope="session")
def work(tmp_path_factory):
    """Return a folder that has a small input."""
    folder = tmp_path_factory.mktemp("bench_loading")
    make_inputs(folder, IMAGES, SMALLS, sys.executable)
    return folder


def run(*command):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    environment = os.environ | {
        "PYTHONPATH": paths,
        "PYTHONWARNINGS": "ignore",
        "MPLBACKEND": "agg",
    }
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, env=environment, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.multiprocess
def test_every_loader_hands_over_all_samples_of_every_task_once_each(work):
    jobs = [
        Job(task, peer.module, str(work / f"input-{IMAGES}-{SMALLS}"), peer.workers, peer.options, 0.01, 60)
        for peer in PEERS
        for task in peer.tasks
        if peer.package in DEV
    ]
    results = [
        json.loads(line) for line in run("scripts/loading/child.py", *(job.to_json() for job in jobs)).splitlines()
    ]

    assert len(results) == len(jobs)
    assert all(result["checked"] and result["samples_per_second"] > 0 for result in results)


@pytest.mark.multiprocess
def test_the_benchmark_prints_a_row_for_every_loader_also_for_those_that_cannot_be_measured(work, tmp_path):
    command = ["scripts/bench_loading.py", "--work", work, "--no-install", "--images", IMAGES, "--smalls", SMALLS]
    command += ["--rounds", 1, "--seconds", 0.01, "--tasks", "image", "--only", CEILING, "SPDL", "--quiet", 99]
    output = run(*command, "--json", tmp_path / "results.json")
    rows = json.loads((tmp_path / "results.json").read_text())["tasks"]["image"]["loaders"]

    assert f"| {CEILING} |" in output
    assert rows[CEILING]["of_ceiling"] == 1
    assert rows[CEILING]["memory_bytes"] > 0


def test_a_ratio_is_the_median_of_those_of_single_rounds():
    def rounds(*rates):
        common = {"cpu_seconds_per_1000": 1, "first_batch_seconds": 1, "others": 0}
        return [{**common, "samples_per_second": rate, "memory_bytes": 7, "checked": True} for rate in rates]

    rows = summarise({CEILING: rounds(99, 10, 20, 40), OWN: rounds(1, 9, 10, 32), "broken": [{"error": "why"}]})

    assert rows[OWN]["of_ceiling"] == 0.8
    assert rows[OWN]["samples_per_second"] == 10
    assert rows["broken"] == {"error": "why"}
