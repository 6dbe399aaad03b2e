"""Notebooks: how results are shown, and functions that other processes cannot import."""

import sys

import pytest

import shardkit
from tests.support.shared import started

CELLS = """
import shardkit, sys
folder = sys.argv[1]

def load(sample): return sample

class Upper:
    def __call__(self, text): return text.upper()

for make in (
    lambda: shardkit.ShardLoader(shardkit.ShardDataset(folder), 2, transform=load, worker_type="process"),
    lambda: shardkit.ShardLoader(shardkit.ShardDataset(folder), 2, transform={"txt": Upper()}, worker_type="process"),
    lambda: shardkit.pack([], folder + "/../new", split_by=None, transform=load, worker_type="process"),
    lambda: shardkit.pack(shardkit.ShardSource(folder), folder + "/../new", transform=load, worker_type="process"),
):
    try:
        make()
    except shardkit.ShardkitError as error:
        print(type(error).__name__, error)
dataset = shardkit.ShardDataset(folder)
loader = shardkit.ShardLoader(dataset, 2, transform={"txt": str}, num_workers=1, worker_type="process")
print(len(list(loader)))
"""
REFUSED = "ArgumentError worker_type='process': processes cannot import what was defined in a notebook or at a prompt"


@pytest.fixture
def dataset(tmp_path):
    samples = ({"__key__": f"{i}", "txt": "__main__"} for i in range(4))  # a text that looks like a module's name
    shardkit.pack(samples, tmp_path / "words", compression="none", progress=False)
    return tmp_path / "words"


@pytest.mark.multiprocess
def test_a_function_that_no_process_can_import_is_refused_before_one_is_started(dataset):
    with started([sys.executable, "-c", CELLS, str(dataset)]) as process:  # -c has no file either
        out, err = process.communicate(timeout=120)
    lines = out.decode().splitlines()

    assert [line[: len(REFUSED)] for line in lines[:2]] == [REFUSED] * 2
    assert lines[2] == "SourceError the source has no samples; nothing was written"
    assert lines[3].startswith(REFUSED)
    assert lines[4:] == ["2"]
    assert b"Traceback" not in err


def test_what_is_shown_of_a_result_fits_on_a_line(tmp_path):
    samples = ({"__key__": f"{i:05d}", "txt": "x" * i, "cls": i % 3} for i in range(300))
    [manifest] = shardkit.pack(samples, tmp_path / "words", shard_samples=10, progress=False).values()
    loader = shardkit.ShardLoader(shardkit.ShardDataset(tmp_path / "words"), 8, seed=3)
    next(iter(loader))
    url = str(tmp_path / "words")

    assert repr(manifest) == f"Manifest({url!r}, 300 samples in 30 shards, fields=cls, txt)"
    assert repr(loader) == (
        f"ShardLoader(ShardDataset({url!r}, 300 samples in 30 shards), batch_size=8, epoch=0, position=8)"
    )
    assert repr(shardkit.ShardStream(url)) == "ShardStream(300 samples in 30 shards)"
