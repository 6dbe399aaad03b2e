"""Programs that read folders of webdataset's tars find the samples in an unchanged folder of a dataset."""

import json
import os
import subprocess
import sys

import pytest

import shardkit
from shardkit.errors import DatasetExistsError

COUNT = 40

HF = """
import json, sys, datasets
found = datasets.load_dataset(sys.argv[1], streaming=True)
print(json.dumps({split: sorted(row["__key__"] for row in rows) for split, rows in found.items()}))
"""
RAY = """
import json, sys, ray, ray.data
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
ray.data.DataContext.get_current().enable_progress_bars = False
print(json.dumps({"all": sorted(row["__key__"] for row in ray.data.read_webdataset(sys.argv[1]).take_all())}))
"""


def samples(count=COUNT):
    return [{"__key__": f"{i:04d}", "cls": i % 3, "txt": f"text {i}"} for i in range(count)]


def pack(folder, **options):
    return shardkit.pack(samples(), folder, compression="none", columns={"label": "cls"}, progress=False, **options)


def read_by(program, folder):
    """Return the keys that a program finds in a folder, by split."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    command = [sys.executable, "-W", "ignore", "-c", program, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=170)

    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


KEYS = [sample["__key__"] for sample in samples()]


@pytest.mark.parametrize("shard_samples", [COUNT, 9], ids=["one shard", "five shards"])
def test_hf_datasets_finds_the_samples_of_a_folder(shard_samples, tmp_path):
    pack(tmp_path / "words", shard_samples=shard_samples)

    assert read_by(HF, tmp_path / "words") == {"train": KEYS}


def test_hf_datasets_finds_the_splits_of_a_folder(tmp_path):
    packed = pack(tmp_path / "words", splits={"train": 0.7, "val": 0.3})
    found = read_by(HF, tmp_path / "words")

    assert sorted(found) == ["train", "validation"]
    assert [len(found["train"]), len(found["validation"])] == [packed[name].num_samples for name in ("train", "val")]
    assert sorted(found["train"] + found["validation"]) == KEYS


def test_ray_finds_the_samples_of_a_folder(tmp_path):
    pack(tmp_path / "words", shard_samples=9)

    assert read_by(RAY, tmp_path / "words") == {"all": KEYS}


def test_a_card_of_somebody_else_stays(tmp_path):
    card = tmp_path / "words" / ".huggingface.yaml"
    card.parent.mkdir()
    card.write_text("configs: []\n")
    pack(card.parent)

    assert card.read_text() == "configs: []\n"
    with pytest.raises(DatasetExistsError):
        shardkit.ShardWriter(card.parent)
