"""The programs in scripts that a user runs first: the demo and the script that creates shards."""

import importlib.util
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet

import shardkit

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", SCRIPTS / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def photos(tmp_path):
    """A folder of two classes: large and small images, in two formats."""
    rng = np.random.default_rng(0)
    for number, (width, height) in enumerate([(700, 900), (600, 400)] * 10):
        path = tmp_path / "photos" / ("cat", "dog")[number // 10] / f"{number:03d}.{('JPEG', 'png')[number % 2]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(rng.integers(0, 256, (height // 50, width // 50, 3), dtype=np.uint8))
        small.resize((width, height)).save(path)
    return tmp_path / "photos"


def create_shards(*arguments):
    command = [sys.executable, SCRIPTS / "create_shards.py", *arguments, "--num-workers", "2"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_demo_packs_verifies_trains_and_resumes_to_the_same_network(demo, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(demo, "EPOCHS", 3)  # of ten; enough for 97 %

    exit_code = demo.main(["--dir", str(tmp_path)])

    printed, errors = capfd.readouterr()
    splits = {split: shardkit.read_manifest(tmp_path / "shards-zst" / split) for split in ("train", "val")}
    assert (exit_code, errors) == (0, "")
    assert len(splits["train"].shards) >= 16
    assert splits["train"].num_samples + splits["val"].num_samples == 1797
    assert {shard.compression for shard in splits["train"].shards} == {"zst"}
    assert f"$ shardkit stats {tmp_path}/shards-zst/train\n1,417 samples in 18 shards" in printed
    assert printed.count("everything is as it should be") == 2
    assert "  epoch  2 of 3: 448 samples" in printed  # stopped in mid-epoch, ...
    assert "  epoch  2 of 3: 969 samples" in printed  # ... and resumed there
    assert "all 58,634 parameters are equal to those of the undisturbed run, to the last bit" in printed
    assert "accuracy on the validation shards: 9" in printed


@pytest.mark.parametrize("forgotten", ["network", "optimizer", "loader", "random"])
def test_the_demo_fails_where_a_resumed_run_forgets_something(demo, forgotten, tmp_path, monkeypatch):
    def load(training, path):
        fresh = tmp_path / "fresh.pt"
        demo.Training(shards, seed=1).save(fresh)
        checkpoint = torch.load(path) | {forgotten: torch.load(fresh)[forgotten]}
        torch.save(checkpoint, path)
        load_whole(training, path)

    shards = str(tmp_path / "shards" / "train")
    demo.write_digits(tmp_path / "images")
    demo.pack_digits(tmp_path / "images", tmp_path / "shards", "zst")
    load_whole = demo.Training.load
    monkeypatch.setattr(demo, "EPOCHS", 1)
    demo.train(shards, tmp_path / "checkpoint.pt", seed=1)
    monkeypatch.setattr(demo.Training, "load", load)

    with pytest.raises(AssertionError, match="ended with other parameters"):
        demo.train(shards, tmp_path / "checkpoint.pt", seed=1)


def test_a_second_run_of_the_demo_writes_nothing_again_but_mends_what_was_left_half(demo, tmp_path):
    def prepare():
        demo.write_digits(tmp_path / "images")
        demo.pack_digits(tmp_path / "images", tmp_path / "shards", "zst")
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file()}

    first = prepare()
    again = prepare()
    scan = tmp_path / "images" / "0" / "0000.png"
    scan.write_bytes(first[scan][1][:50])
    demo.write_digits(tmp_path / "images")

    assert again == first
    assert scan.read_bytes() == first[scan][1]


def test_the_demo_fails_where_a_network_is_worse_than_97_percent(demo, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "train", lambda _shards, _checkpoint, *, seed: seed)
    monkeypatch.setattr(demo, "run_command", lambda *_: None)
    monkeypatch.setattr(demo, "count_right", lambda seed, _: (970 - seed, 1000))

    assert demo.main(["--dir", str(tmp_path)]) == 0
    assert demo.main(["--dir", str(tmp_path), "--seeds", "2"]) == 1
    assert "the accuracy is 96.9%, expected 97% or more" in capsys.readouterr().err


def test_the_demo_says_in_a_line_what_is_in_its_way(demo, tmp_path, capsys):
    (tmp_path / "shards-none" / "train").mkdir(parents=True)
    (tmp_path / "shards-none" / "train" / "train-000000.tar").touch()

    assert demo.main(["--dir", str(tmp_path)]) == 1
    assert f"{tmp_path}/shards-none/train" in capsys.readouterr().err


@pytest.mark.multiprocess
def test_create_shards_shrinks_what_is_large_leaves_the_rest_as_it_is_and_puts_sizes_into_the_index(photos, tmp_path):
    done = create_shards(photos, tmp_path / "shards", "--shard-bytes", "1MB")

    folders = [tmp_path / "shards" / split for split in ("train", "val")]
    samples = {sample["__key__"]: sample for sample in shardkit.ShardStream(folders, decode=False)}
    tables = [parquet.read_table(path) for folder in folders for path in folder.glob("__index__/*-0*.parquet")]
    rows = {
        row["__key__"]: (row["label"], row["width"], row["height"]) for table in tables for row in table.to_pylist()
    }
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{tmp_path}/shards/train: " in done.stdout
    assert len(samples) == len(rows) == 20
    for number in range(20):
        label, is_small = number // 10, number % 2
        key = f"{('cat', 'dog')[label]}/{number:03d}"
        if is_small:
            assert samples[key]["png"] == (photos / f"{key}.png").read_bytes()
            assert rows[key] == (label, 600, 400)
        else:
            assert Image.open(io.BytesIO(samples[key]["jpg"])).size == (512, 658)
            assert rows[key] == (label, 512, 658)


@pytest.mark.multiprocess
def test_create_shards_says_which_image_it_cannot_read(photos, tmp_path):
    (photos / "dog" / "broken.jpg").write_bytes(b"not a picture")

    done = create_shards(photos, tmp_path / "shards")

    assert done.returncode == 1
    assert "sample 'dog/broken', made of dog/broken.jpg" in done.stderr
    assert not list(tmp_path.rglob("manifest.json"))


def test_create_shards_says_in_a_line_what_is_wrong_with_its_source(tmp_path):
    done = create_shards(tmp_path / "nowhere", tmp_path / "shards")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {tmp_path}/nowhere: ")
