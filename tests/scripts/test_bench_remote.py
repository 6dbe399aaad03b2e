"""The benchmark of remote reads runs, so that it does not rot. No test here is about speed."""

import json
import sys
from contextlib import closing

import pytest

from tests.support.shared import ROOT, run_program

sys.path.append(str(ROOT / "scripts" / "bench"))

from loading.inputs import make_inputs  # parts of the program, found beside it
from remote import parts, report
from remote.inputs import make_large, make_many
from remote.with_sockets import Connection

IMAGES, MEGABYTES, SHARDS = 40, 8, 10
INSTALLED = [parts.CEILING, parts.STREAM, parts.BLOCKS]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Return a folder with a small input."""
    folder = tmp_path_factory.mktemp("bench_remote")
    images = make_inputs(folder, IMAGES, 100, sys.executable)
    make_large(folder, MEGABYTES)
    make_many(folder, images / "files", SHARDS)
    return folder


def run(work, *options):
    """Return the output and the file of one round of the program, on a machine that may be busy."""
    numbers = ["--images", IMAGES, "--megabytes", MEGABYTES, "--shards", SHARDS, "--rounds", 1, "--quiet", 99]
    results = work / "results.json"
    command = ["scripts/bench/bench_remote.py", "--work", work, "--no-install", "--seconds", 0.01, *numbers, *options]
    output = run_program(*command, "--json", results, PYTHONWARNINGS="ignore")
    return output, json.loads(results.read_text())


@pytest.mark.multiprocess
def test_every_client_reads_the_file_and_the_blocks_that_are_far_away(work):
    output, results = run(work, "--parts", "read", "far", "--connections", 16)
    runs = [run for runs in results["read"].values() for run in runs.items()]
    broken = {name for name, rounds in runs if "error" in rounds[0]}

    assert broken <= {parts.S3FS, "s3fs, cat_file of 4 MB"}  # which need not be installed
    assert all(rounds[0]["checked"] for name, rounds in runs if name not in broken)
    assert list(results["far"]) == ["16 x 1 MB", "16 x 4 MB"]
    assert "| HTTP: shardkit, stream: MB/s / raw socket | 80% | " in output
    assert "| far: 16 x 4 MB: MB/s / what connections can give | 85% | " in output


@pytest.mark.multiprocess
def test_epochs_come_near_and_from_far_away(work):
    chosen = ["--tasks", "image", "--only", parts.HTTP, parts.GETS, parts.FAR_MANY]
    output, results = run(work, "--parts", "near", "epochs-far", "steady", *chosen)

    assert {name: rounds[0]["checked"] for name, rounds in results["near"]["image"].items()} == {
        parts.HTTP: True,
        parts.GETS: True,
    }
    assert results["connections"][parts.FAR_MANY] >= 1
    assert results["steady"][parts.HTTP]["shards"] == SHARDS
    assert f"| {parts.FAR_MANY}: first batch, seconds | 2.00 | " in output


def results_of(*rates, cpu=1.0):
    return [{}, *({"samples_per_second": rate, "cpu_seconds_per_1000": cpu} for rate in rates)]


def test_what_is_missed_is_in_bold():
    runs = {
        parts.CEILING: results_of(10, 10, 20),
        parts.STREAM: results_of(7, 9, 15),
        parts.FSSPEC: results_of(1, 1, 1),
    }
    table = report.targets_table({"read": {"HTTP": runs}})

    assert "| HTTP: shardkit, stream: MB/s / raw socket | 80% | **75% (70% to 90%)** |" in table
    assert "| HTTP: shardkit, stream: CPU / fsspec http, default file | 0.50 | **1.00 (1.00 to 1.00)** |" in table


def test_connections_that_wait_a_round_trip_for_each_block_give_less():
    assert report.far_limit("1 x 1 MB") == pytest.approx(10 * 100 / 130)
    assert report.far_limit("16 x 4 MB") == pytest.approx(160 * 400 / 430)


def test_the_ceiling_is_of_the_right_answers_only(nginx):
    (nginx.folder / "a").write_bytes(bytes(range(100)))
    out = bytearray(10)
    with closing(Connection(f"{nginx.url}/a")) as connection:
        connection.fill(memoryview(out), connection.ask(b"Range: bytes=5-14\r\n"))

    assert out == bytes(range(5, 15))
    with (
        closing(Connection(f"{nginx.url}/b")) as connection,
        pytest.raises(ConnectionError, match="404 Not Found"),
    ):
        connection.ask()
