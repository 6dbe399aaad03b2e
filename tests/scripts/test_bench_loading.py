"""The benchmark of loaders runs, so that it does not rot. No test here is about speed."""

import json
import os
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.shared import ROOT, run_program

IMAGES, SMALLS = 80, 400
sys.path.append(str(ROOT / "scripts" / "bench"))

from loading import classic, plots, rounds, tables, ways  # noqa: E402 - parts of the program, found beside it
from loading.classic import BARE, LOOP  # noqa: E402
from loading.inputs import make_inputs  # noqa: E402
from loading.job import PIPELINES, Errand, Job, Way  # noqa: E402
from loading.peers import CEILING, OWN, PEERS, Peer  # noqa: E402

DEV = ("", "webdataset", "datasets")
PNG = b"\x89PNG"


@pytest.fixture(scope="session")
def work(tmp_path_factory):
    """Return a folder with a small input."""
    folder = tmp_path_factory.mktemp("bench_loading")
    make_inputs(folder, IMAGES, SMALLS, sys.executable)
    return folder


@pytest.fixture
def inputs(work):
    """Return the folder of the input itself."""
    return work / f"input-{IMAGES}-{SMALLS}"


def run(*command):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "scripts" / "bench")])
    return run_program(*command, PYTHONPATH=paths, PYTHONWARNINGS="ignore", MPLBACKEND="agg")


def options_of(work):
    """Return the options for one round with a small input, which work on a busy machine too."""
    numbers = ["--images", IMAGES, "--smalls", SMALLS, "--rounds", 1, "--quiet", 99]
    return ["--work", work, "--no-install", *numbers]


@pytest.mark.parametrize(("task", "field"), [("image", "jpg"), ("small", "txt"), ("npy", "npy")])
def test_dali_gets_an_index_of_every_shard_that_says_where_the_fields_are(task, field, inputs):
    shards = sorted((inputs / task).glob("*.tar"))

    assert shards
    for shard in shards:
        with tarfile.open(shard) as tar:
            expected = {member.name: (member.offset_data, member.size) for member in tar}
        head, *lines = Path(f"{shard}.idx").read_text().splitlines()
        parts = [line.split()[i : i + 4] for line in lines for i in range(0, len(line.split()), 4)]

        assert head.split() == ["v1.2", str(len(lines))]
        assert {name: (int(offset), int(size)) for _, offset, size, name in parts} == expected
        assert field in {kind for kind, *_ in parts}


@pytest.mark.multiprocess
def test_every_loader_hands_over_all_samples_of_every_task_once_each(inputs):
    jobs = [
        Job(task, peer.module, str(inputs), peer.workers, peer.options, 0.01, 60)
        for peer in PEERS
        for task in peer.tasks
        if peer.package in DEV
    ]
    results = [
        json.loads(line)
        for line in run("scripts/bench/loading/child.py", *(job.to_json() for job in jobs)).splitlines()
    ]

    assert len(results) == len(jobs)
    assert all(result["checked"] and result["samples_per_second"] > 0 for result in results)


@pytest.mark.multiprocess
def test_the_benchmark_prints_and_draws_every_loader_also_those_that_cannot_be_measured(work, tmp_path):
    command = ["scripts/bench/bench_loading.py", *options_of(work)]
    command += ["--seconds", 0.01, "--tasks", "image", "--only", CEILING, "SPDL"]
    output = run(*command, "--json", tmp_path / "results.json", "--plot", tmp_path / "results.png")
    loaders = json.loads((tmp_path / "results.json").read_text())["tasks"]["image"]["loaders"]

    assert f"| {CEILING} |" in output
    assert "| SPDL, FFmpeg | not measured: " in output
    assert loaders[CEILING]["of_ceiling"] == 1
    assert loaders[CEILING]["memory_bytes"] > loaders[CEILING]["memory_beyond_imports_bytes"]
    assert (tmp_path / "results.png").read_bytes().startswith(PNG)


@pytest.mark.multiprocess
def test_the_classic_experiment_prints_and_draws_speed_ups(work, tmp_path):
    command = ["scripts/bench/bench_loading.py", "--classic", *options_of(work)]
    command += ["--pipelines", "crop", "--workers", 2, "--batch-sizes", 100]
    output = run(*command, "--json", tmp_path / "results.json", "--plot", tmp_path / "results.png")
    speedups = json.loads((tmp_path / "results.json").read_text())["classic"]["crop"]

    assert "| crop, processes, next epoch |" in output
    assert all(speedups["workers"][series]["2"]["median"] > 0 for series in classic.SERIES)
    assert (tmp_path / "results.png").read_bytes().startswith(PNG)


def test_how_long_the_gil_is_held_is_a_part_of_what_a_sample_takes(inputs):
    times = json.loads(run("scripts/bench/loading/gil.py", inputs, 0))

    assert 0 < times["with_gil_us"] < times["processor_us"]
    assert times["with_gil_us"] + times["without_gil_us"] == pytest.approx(times["processor_us"])


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_images_are_the_same_in_a_loop_in_bare_threads_and_from_the_loader(inputs, pipeline):
    compared = LOOP, BARE, Way("thread", 1, 10), Way("thread", 3, 100)
    errand = Errand(str(inputs), pipeline, compared, quiet=99, repeats=0)
    outputs = [output for way in compared for output in ways.measure(way, errand)["outputs"]]

    assert outputs == [outputs[0]] * len(compared)
    assert outputs[0][0] == IMAGES


def test_a_ratio_is_the_median_of_those_of_single_rounds():
    def results(*rates):
        check = {"memory_bytes": 9, "memory_before_bytes": 2, "checked": True}
        common = {"cpu_seconds_per_1000": 1, "first_batch_seconds": 1, "others": 0}
        return [check, *({**common, "samples_per_second": rate} for rate in rates)]

    rows = rounds.summarise({CEILING: results(10, 20, 40), OWN: results(9, 10, 32), "broken": [{"error": "why"}]})

    assert rows[OWN]["of_ceiling"] == 0.8
    assert rows[OWN]["samples_per_second"] == 10
    assert rows[OWN]["memory_beyond_imports_bytes"] == 7
    assert rows["broken"] == {"error": "why"}


def test_a_run_that_others_disturbed_is_repeated_twice_at_most(monkeypatch):
    noise = iter([0.5, 0.4, 0.3, 0.2, 0.01, 0.02])
    runs = []

    def run_child(_python, _job, *, watch=False):
        runs.append({"memory_bytes": 1} if watch else {"samples_per_second": 1, "others": next(noise)})
        return runs[-1]

    monkeypatch.setattr(rounds, "run_child", run_child)
    peer = Peer("one", "loading.bare", ("raw",))
    job = Job("raw", "loading.bare", "", 1)
    results = rounds.measure_rounds([peer], lambda _: "", lambda _: job, rounds=2, quiet=0.05)

    assert [result.get("others") for result in results["one"]] == [None, 0.3, 0.01]
    assert len(runs) == 1 + 3 + 2


def results_of(*seconds, output=(80, 7)):
    return [{"outputs": [output], "seconds": times, "others": 0} for times in seconds]


def test_a_speed_up_is_the_median_of_those_of_single_rounds():
    runs = {
        LOOP: results_of([4.0], [8.0], [80.0]),
        BARE: results_of([2.0], [4.0], [8.0]),
        Way("thread", 1, 100): results_of([4.0], [4.0], [40.0]),
        Way("thread", 2, 100): results_of([2.0], [5.0], [5.0]),
        Way("process", 2, 100): results_of([8.0, 2.0], [8.0, 2.0], [8.0, 2.0]),
        Way("process", 4, 100): results_of([8.0, 1.0], [8.0, 1.0], [8.0, 1.0]),
    }
    row = classic.summarise_classic({"crop": runs})["crop"]

    assert row["milliseconds"] == 100
    assert row["bare"] == {"median": 2, "least": 2, "most": 10}
    assert row["workers"]["threads"] == {
        1: {"median": 2, "least": 1, "most": 2},
        2: {"median": 2, "least": 1.6, "most": 16},
    }
    assert row["workers"]["processes"][2]["median"] == 1
    assert row["workers"]["processes, next epoch"][2]["median"] == 4
    assert row["targets"]["threads"]["1 worker / the loop"]["median"] == 2
    assert row["targets"]["threads"]["2 workers / 2 bare threads"]["median"] == 1
    assert row["targets"]["processes"]["4 workers / 2 workers"]["median"] == 1
    assert row["targets"]["processes, next epoch"]["4 workers / 2 workers"]["median"] == 2
    assert "8 workers / 2 workers" not in row["targets"]["processes"]


def test_a_target_that_is_missed_is_in_bold():
    runs = {LOOP: results_of([4.0]), BARE: results_of([2.0]), Way("thread", 1, 100): results_of([5.0])}
    text = tables.classic_tables(classic.summarise_classic({"crop": runs}))

    assert "| 1 worker / the loop, threads | 1.0 x | **0.80 x** |" in text


def test_ways_that_give_other_images_are_an_error(monkeypatch):
    def run_child(_python, errand):
        return [results_of([1.0], output=[80, way.kind == "bare"])[0] for way in errand.ways]

    monkeypatch.setattr(classic, "_run_child", run_child)

    with pytest.raises(RuntimeError, match=r"the images add up to \[80, True\]"):
        classic.measure_classic("", Path(), ["crop"], [1], [10], rounds=1, quiet=1)


def test_a_process_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(classic, "_CHILD", ROOT / "no such program.py")

    with pytest.raises(RuntimeError, match="measures crop has ended with 2"):
        classic.measure_classic(sys.executable, Path(), ["crop"], [1], [10], rounds=1, quiet=1)


def test_a_picture_leaves_out_loaders_that_could_not_be_measured(tmp_path):
    rows = {OWN: {"samples_per_second": 3.0}, "broken": {"error": "why"}}
    plots.plot_tasks({"raw": rows, "npy": {"broken": {"error": "why"}}}, tmp_path / "tasks.png", "here")

    assert (tmp_path / "tasks.png").read_bytes().startswith(PNG)
