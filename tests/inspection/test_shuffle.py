"""The shuffle report tells in words and in a picture how well a dataset is mixed, and reads only its manifest."""

import json
import sys
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from shardkit.cli.app import app
from shardkit.cli.output import format_shuffle_report
from shardkit.errors import ArgumentError, DatasetError, MissingExtraError
from shardkit.format.manifest import Manifest, Shard
from shardkit.format.parquet import FileFacts
from shardkit.inspection.shuffle import shuffle_report
from shardkit.packing.job import pack
from shardkit.reading.dataset import ShardDataset

SAMPLE_BYTES = 60_000
NO_FILE = FileFacts(0, "00" * 32)


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a manifest without shards."""

    def write(counts, *, block_samples=16, compression="none", packed=None):
        shards = tuple(
            Shard(f"a-{i:06d}.tar", n, n * SAMPLE_BYTES // 2, n * SAMPLE_BYTES, f"{i:064x}", compression, 1, 0, NO_FILE)
            for i, n in enumerate(counts)
        )
        manifest = Manifest(shards, block_samples, ("jpg",), packed=packed or {}, block_file=NO_FILE)
        (tmp_path / "manifest.json").write_text(manifest.to_json())
        return tmp_path

    return write


def text_of(report):
    return "\n".join(format_shuffle_report(report))


def invoke(*arguments):
    return CliRunner().invoke(app, ["shuffle-report", *map(str, arguments)])


def test_the_manifest_is_enough(write):
    report = shuffle_report(write([500] * 100), 64)

    assert (report.num_samples, report.num_shards, report.num_blocks, report.lanes) == (50_000, 100, 3200, 240)
    assert (report.sample_bytes, report.read_bytes) == (60_000, 30_000 * 50_000 / 3200)
    assert report.plan.effective_batch_by_shard > 0.98
    assert report.plan.dispersion_by_shard > 0.95
    assert report.buffer.effective_batch_by_shard < 0.5
    assert report.uniform.effective_batch_by_shard == pytest.approx(1, abs=0.02)
    assert report.plan.held_samples * report.sample_bytes < 512_000_000
    assert report.buffer.held_samples == 8000
    assert report.uniform.held_samples == 50_000
    assert list(report.read_amplification) == [1, 2, 3, 4, 6, 7, 8, 12, 16, 24, 32, 64, 128]
    assert 1 < report.read_amplification[1] == report.read_amplification[24] < report.read_amplification[7]
    assert not report.sampled


def test_the_order_is_that_of_a_dataset(tmp_path):
    samples = [{"__key__": f"{i:04d}", "txt": "x" * (i % 1000)} for i in range(3000)]
    pack(samples, tmp_path / "train", shard_samples=100, block_bytes="20kB", compression="none", progress=False)
    order = ShardDataset(str(tmp_path / "train")).order(seed=0, epoch=0)
    report = shuffle_report(tmp_path / "train", 8)

    assert (report.lanes, report.num_blocks) == (order.lanes, order.num_blocks)
    assert report.packed_shuffled


def test_seed_epoch_and_lanes_are_those_of_the_order(write):
    folder = write([40] * 50)
    reports = [
        shuffle_report(folder, 8, **options).plan
        for options in ({}, {"seed": 1}, {"epoch": 1}, {"lanes": 3}, {"world_size": 2})
    ]

    assert len(set(reports)) == 5


def test_figures_are_explained(write):
    text = text_of(shuffle_report(write([500] * 100), 64))

    for words in (
        "50,000 samples in 100 shards and 3,200 blocks",
        "batches of 64, 240 lanes, epoch 0 of seed 0",
        "this order  webdataset's shuffle(1000)  random permutation",
        "effective batch: what a batch is worth beside one of random samples",
        "spread: how far apart",
        "held in memory: ",
        "one read: ",
        "bytes read: ",
        "Nothing is to be done.",
    ):
        assert words in text
    assert "note:" not in text
    assert "packed shuffled" not in text


def test_a_batch_that_takes_much_of_few_lanes_is_advised_more(write):
    report = shuffle_report(write([500] * 100), 64, world_size=8, lanes=60)

    assert "on each of 8 ranks" in text_of(report)
    assert report.advice[0].startswith(
        "A batch takes 8.5 samples of each lane, and these lie together. 960 lanes would"
    )
    assert "pack the dataset again, shuffled" in report.advice[0]


def test_a_dataset_that_was_packed_shuffled_is_not_to_be_packed_again(write):
    report = shuffle_report(write([500] * 100, packed={"request": {"seed": 0}}), 64, lanes=1)

    assert "pack the dataset again" not in report.advice[0]
    assert "The dataset was packed shuffled" in text_of(report)
    assert not shuffle_report(write([500] * 100, packed={"request": {"seed": None}}), 64).packed_shuffled


def test_shards_of_few_blocks_are_advised_smaller_ones(write):
    report = shuffle_report(write([32] * 2000), 64)

    assert any("A shard has only 2 blocks" in advice for advice in report.advice)


def test_ranks_that_do_not_divide_the_lanes_are_advised_lanes_that_they_do(write):
    report = shuffle_report(write([500] * 100), 64, world_size=7)

    assert any("7 ranks do not divide 240 lanes" in text and "With 238 lanes" in text for text in report.advice)
    assert shuffle_report(write([500] * 100), 64, world_size=7, lanes=238).advice == ()


def test_lanes_that_cut_many_blocks_are_explained(write):
    report = shuffle_report(write([100] * 20), 8, memory="119MB")

    assert any("cut many of only 140 blocks in two" in advice for advice in report.advice)


@pytest.mark.parametrize(
    ("packed", "in_order"),
    [({"request": {"seed": None}}, True), ({"request": {"seed": 0}}, False), ({}, False), ({"request": {}}, False)],
)
def test_a_dataset_that_was_packed_in_order_is_to_be_packed_again(write, packed, in_order):
    report = shuffle_report(write([5000], block_samples=488, packed=packed), 64)
    advised = [text for text in report.advice if "packed in its source's order" in text]

    assert report.packed_in_order == in_order == bool(advised)
    said = " ".join(text_of(report).split())
    assert ("is not known. If they are sorted by class, classes of fewer than about" in said) == (
        not (in_order or report.packed_shuffled)
    )


def test_a_sorted_source_is_reported_as_badly_mixed_where_it_is(tmp_path):
    """It is mixed well by shards and blocks, but classes with fewer samples than the report names come late."""
    samples = ({"__key__": f"{i:04d}", "cls": i // 100, "bin": bytes(2000)} for i in range(5000))
    pack(samples, tmp_path / "sorted", shuffle=False, compression="none", progress=False)
    report = shuffle_report(tmp_path / "sorted", 64)
    plan = ShardDataset(str(tmp_path / "sorted")).order(seed=0, epoch=0, lanes=report.lanes)
    first_quarter = plan.samples_at(np.arange(1250))

    assert len(set(first_quarter // 100)) <= 47  # of 50 classes; a random order has all of them
    assert report.plan.effective_batch_by_block > 0.98
    assert report.plan.dispersion_by_block > 0.95
    assert 100 < report.spread_run <= 1024
    assert len(set(first_quarter // report.spread_run)) == -(-5000 // report.spread_run)
    assert shuffle_report(tmp_path / "sorted", 64, lanes=240).spread_run < report.spread_run
    assert f"classes of fewer than about {report.spread_run:,} samples are missing" in report.advice[0]
    assert "pack it again, shuffled, or use more lanes" in report.advice[0]


def test_what_fits_into_memory_is_said_to_be_read_once_and_not_twice_to_be_held(write):
    folder = write([100] * 20)
    whole = 2000 * SAMPLE_BYTES
    fits, does_not = (shuffle_report(folder, 8, memory=memory) for memory in (whole, whole - 1))

    assert (fits.in_memory, fits.read_amplification[1], fits.plan.held_samples) == (True, 1, 2000)
    assert fits.advice == ()
    assert not does_not.in_memory
    assert does_not.read_amplification[1] > 1.1


def test_of_a_large_dataset_some_is_looked_at_and_it_is_said(write):
    report = shuffle_report(write([4000] * 1000), 256)

    assert report.sampled
    assert "about a million were looked at" in text_of(report)
    assert report.plan.effective_batch_by_shard > 0.98
    assert report.plan.dispersion_by_shard > 0.95
    assert report.buffer.effective_batch_by_shard < 0.1
    assert report.buffer.dispersion_by_shard < 0.1


@pytest.mark.parametrize("counts", [[1], [0, 1, 0], [7], [3, 0, 2]])
def test_the_smallest_datasets_have_a_report_too(write, counts):
    assert f"{sum(counts):,} sample" in text_of(shuffle_report(write(counts), 256))


def test_what_cannot_be_read_by_block_has_no_order(write):
    with pytest.raises(DatasetError, match=r"a-000000\.tar: is gz without frames of its blocks, .*shardkit pack"):
        shuffle_report(write([5], compression="gz"), 1)
    with pytest.raises(DatasetError, match="has no samples"):
        shuffle_report(write([0]), 1)


@pytest.mark.parametrize("name", ["batch_size", "world_size", "lanes"])
def test_arguments_that_are_too_small_are_errors(write, name):
    with pytest.raises(ArgumentError, match=f"{name} must be at least 1, got 0"):
        shuffle_report(write([5]), **{"batch_size": 1, name: 0})


@pytest.mark.parametrize("counts", [[400] * 64, [50, 50], pytest.param([1100] * 1000, marks=pytest.mark.slow), [1]])
def test_a_picture_shows_it(write, counts):
    folder = write(counts)
    shuffle_report(folder, 16).plot(folder / "mixing.png")

    with Image.open(folder / "mixing.png") as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape == (960, 1320, 3)
    edge = np.concatenate([pixels[:3].reshape(-1, 3), pixels[-3:].reshape(-1, 3), pixels[:, :3].reshape(-1, 3)])
    assert (edge == 255).all()  # nothing is cut off


def test_a_picture_shows_lanes_and_buffers_that_the_dataset_has(write):
    small, large = (shuffle_report(write(counts), 16) for counts in ([50, 50], [400] * 64))

    assert (list(small._orders()), list(small._buffers())) == ([1, 4, 6], [100])
    assert (list(large._orders()), list(large._buffers())) == ([1, 4, 15, 60, 240, 960], [100, 1000])


def test_a_picture_may_be_made_of_lines(write):
    folder = write([400] * 64)
    shuffle_report(folder, 16).plot(str(folder / "mixing.svg"))

    assert ET.parse(folder / "mixing.svg").getroot().tag.endswith("svg")


def test_a_picture_of_another_kind_is_refused(write):
    with pytest.raises(ArgumentError, match=r"plot 'a\.gif': is a picture of an unknown kind, expected \.png or \.svg"):
        shuffle_report(write([5]), 1).plot("a.gif")


def test_without_matplotlib_it_is_said_how_to_install_it(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(MissingExtraError, match=r"pip install 'shardkit\[plot\]'"):
        shuffle_report(write([5]), 1).plot("a.png")


def test_the_command_prints_it(write):
    folder = write([500] * 100)
    options = ["--batch-size", 64, "--world-size", 2, "--lanes", 60, "--seed", 1, "--epoch", 2]
    report = shuffle_report(folder, 64, world_size=2, lanes=60, seed=1, epoch=2)

    assert invoke(folder, *options).stdout == text_of(report) + "\n"
    printed = json.loads(invoke(folder, *options, "--json").stdout)
    assert printed == json.loads(report.to_json())
    assert printed["plan"]["effective_batch_by_shard"] == report.plan.effective_batch_by_shard
    assert printed["read_amplification"]["7"] == report.read_amplification[7]
    assert printed["advice"] == list(report.advice)
    assert "_layout" not in printed


def test_the_command_draws_it(write):
    folder = write([50])
    done = invoke(folder, "--batch-size", 4, "--plot", folder / "a.png")

    assert (done.exit_code, (folder / "a.png").exists()) == (0, True)


def test_the_command_needs_a_dataset_alone(write):
    folder = write([5])

    assert "has no manifest.json" in invoke("no/such/folder", "--batch-size", 4).stderr
    assert invoke(folder).stdout == text_of(shuffle_report(folder, 256)) + "\n"


def test_text_is_as_wide_as_the_terminal(write, monkeypatch):
    report = shuffle_report(write([500] * 100), 64)
    monkeypatch.setenv("COLUMNS", "50")
    narrow = [line for line in format_shuffle_report(report) if line.startswith("spread: ")]
    monkeypatch.setenv("COLUMNS", "300")
    wide = [line for line in format_shuffle_report(report) if line.startswith("spread: ")]

    assert len(narrow[0]) <= 50 < len(wide[0]) <= 100
