"""Written data stays: a killed writer can be resumed or finished, and no advice given to a user costs data."""

import contextlib
import itertools
import os
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import shardkit
from shardkit.errors import ArgumentError, DatasetError, DatasetExistsError, UnfinishedDatasetError
from tests.support.folders import contents_of
from tests.support.forge import edit_manifest, manifest_of
from tests.support.forks import forkserver
from tests.support.shared import examples

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
GOLDEN = ROOT / "tests" / "data" / "format-1"
PHOTOS = ROOT / "tests" / "data" / "inputs" / "photos"
COUNT = 60
OPTIONS = {"shard_samples": 9, "block_bytes": 6000, "columns": {"label": "cls"}, "classes": ("a", "b", "c")}

SERVER = forkserver(__name__)


def sample(i):
    return {"__key__": f"{i:03d}", "cls": i % 3, "txt": f"{i} " * i}


def write_all(folder, compression, steps, how):
    """Write the samples in this process, which kills itself before its n-th call that changes the disk."""
    calls = itertools.count(1)

    def count_down(function):
        def call(*arguments, **options):
            if next(calls) == steps:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "link", "replace", "rename", "unlink", "open"):
            patch.setattr(os, name, count_down(getattr(os, name)))
        with shardkit.ShardWriter(folder, compression=compression, **OPTIONS, **how) as writer:
            for i in range(writer.samples, COUNT):
                writer.write(sample(i))


def write(folder, compression, steps=10**9, **how):
    """Write in a process of its own, and return its exit code."""
    process = SERVER.Process(target=write_all, args=(folder, compression, steps, how))
    process.start()
    process.join()
    return process.exitcode


def hashes_of(manifest):
    return {shard.sha256 for shard in manifest.shards}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folders = {}
    for compression in ("none", "zst", "gz"):
        folders[compression] = tmp_path_factory.mktemp(compression) / "out"
        assert write(folders[compression], compression) == 0
    return folders


@examples(1 / 5)
@given(compression=st.sampled_from(["none", "zst", "gz"]), kills=st.lists(st.integers(1, 90), min_size=1, max_size=2))
def test_a_writer_that_is_killed_anywhere_goes_on_to_the_same_bytes(compression, kills, undisturbed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed") / "out"
    for number, steps in enumerate(kills):
        exit_code = write(folder, compression, steps, resume=number > 0)
        event(f"{'begun' if number == 0 else 'resumed'} and {'killed' if exit_code else 'finished'}")
        assert exit_code in (0, -signal.SIGKILL)
        if exit_code == 0:
            break
    if exit_code != 0:
        exit_code = write(folder, compression, resume=True)
        if (folder / "unfinished.json").exists() or not (folder / "manifest.json").exists():
            assert exit_code == 0

    assert contents_of(folder) == contents_of(undisturbed[compression])
    shutil.rmtree(folder.parent)


@examples(1 / 5)
@given(compression=st.sampled_from(["none", "zst", "gz"]), steps=st.integers(1, 60))
def test_no_shard_of_a_dataset_that_is_replaced_is_taken_for_one_of_the_new(
    compression, steps, undisturbed, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("replaced") / "out"
    with shardkit.ShardWriter(folder, compression=compression, **OPTIONS) as writer:
        for i in range(COUNT):
            writer.write(sample(i) | {"cls": 2})
    old = hashes_of(manifest_of(folder))
    new = hashes_of(manifest_of(undisturbed[compression]))
    exit_code = write(folder, compression, steps, overwrite=True)
    assert exit_code in (0, -signal.SIGKILL)
    if not (folder / "unfinished.json").exists():
        assert hashes_of(manifest_of(folder)) == (new if exit_code == 0 else old)
        return
    copy = shutil.copytree(folder, folder.parent / "copy" / "out")
    with contextlib.suppress(DatasetError):  # it refuses, or there is no shard
        assert hashes_of(shardkit.index_shards(copy)) <= new

    assert write(folder, compression, resume=True) == 0
    assert contents_of(folder) == contents_of(undisturbed[compression])
    shutil.rmtree(folder.parent)


@examples(1 / 8)
@given(compression=st.sampled_from(["none", "zst", "gz"]), steps=st.integers(8, 80))
def test_the_shards_of_a_writer_that_was_killed_become_a_dataset(compression, steps, undisturbed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed") / "out"
    exit_code = write(folder, compression, steps)
    shards = sorted(path.name for path in folder.glob("out-*.tar*"))
    if exit_code == 0 or not shards or not (folder / "unfinished.json").exists():
        event("nothing to finish")
        return
    event(f"{len(shards)} shards")
    manifest = shardkit.index_shards(folder)
    expected = manifest_of(undisturbed[compression])

    assert [shard.url for shard in manifest.shards] == shards
    assert list(folder.glob(".shardkit-*")) == []
    assert [shard.sha256 for shard in manifest.shards] == [shard.sha256 for shard in expected.shards[: len(shards)]]
    assert (manifest.classes, manifest.columns) == (expected.classes, expected.columns)
    assert manifest.block_samples == expected.block_samples
    assert shardkit.verify(folder).ok
    shutil.rmtree(folder.parent)


def begun(folder, count=30):
    """Return a folder in which a ShardWriter was stopped after some samples: 30 make three shards and a part."""
    with contextlib.suppress(ZeroDivisionError), shardkit.ShardWriter(folder, compression="none", **OPTIONS) as writer:
        for i in range(count):
            writer.write(sample(i))
        raise ZeroDivisionError
    return folder


def test_advice_about_an_unfinished_folder_keeps_what_is_there(tmp_path):
    folder = begun(tmp_path / "out")
    with pytest.raises(
        UnfinishedDatasetError, match=r"continue with ShardWriter\(..., resume=True\), or run 'shardkit ind"
    ):
        shardkit.ShardDataset(folder)
    with pytest.raises(
        DatasetExistsError, match=r"holds an unfinished dataset already .* continue it with resume=True"
    ):
        shardkit.ShardWriter(folder)

    assert len(list(folder.glob("*.tar"))) == 3
    with shardkit.ShardWriter(folder, compression="none", resume=True, **OPTIONS) as writer:
        assert writer.samples == 27
        writer.write(sample(27))
    assert writer.manifest.num_samples == 28


def test_a_writer_goes_on_only_as_it_began(tmp_path):
    folder = begun(tmp_path / "out")
    before = contents_of(folder)
    with pytest.raises(
        ArgumentError, match=r"its shards have compression 'none', and the writer that resumes has 'zst'; pass the sa"
    ):
        shardkit.ShardWriter(folder, compression="zst", resume=True, **OPTIONS)
    with pytest.raises(
        ArgumentError, match=r"its shards have columns \['label'\], and the writer that resumes has \[\]"
    ):
        shardkit.ShardWriter(folder, resume=True)

    assert contents_of(folder) == before


@pytest.mark.parametrize("lost", [0, 1])
def test_a_writer_does_not_delete_shards_behind_one_that_is_missing(lost, tmp_path):
    folder = begun(tmp_path / "out")
    (folder / f"out-00000{lost}.tar").unlink()
    before = contents_of(folder)
    with pytest.raises(
        DatasetError, match=rf"holds out-00000{lost + 1}.tar, .* and not out-00000{lost}.tar or its like"
    ):
        shardkit.ShardWriter(folder, resume=True, **OPTIONS)

    assert contents_of(folder) == before


def test_a_writer_that_goes_on_keeps_its_class_names(tmp_path):
    folder = begun(tmp_path / "out")
    others = {name: value for name, value in OPTIONS.items() if name != "classes"}
    with pytest.raises(
        ArgumentError, match=r"its shards have classes \['a', 'b', 'c'\], and the writer that resumes has \['b', 'a'\]"
    ):
        shardkit.ShardWriter(folder, resume=True, classes=["b", "a"], **others)
    with shardkit.ShardWriter(folder, resume=True, **others) as writer:
        writer.write(sample(27))

    assert writer.manifest.classes == ("a", "b", "c")


@pytest.mark.parametrize(("kind", "path"), [("ImageFolder", PHOTOS), ("FileFolder", PHOTOS / "cat")])
def test_a_pack_that_an_earlier_version_finished_is_accepted(kind, path, tmp_path):
    make, folder = getattr(shardkit, kind), tmp_path / "out"
    shardkit.pack(make(path), folder, seed=3, progress=False)
    edit_manifest(folder, lambda manifest: manifest["packed"].update(plan="0" * 64))
    edit_manifest(folder, lambda manifest: manifest["packed"]["request"].update(version=1))
    before = contents_of(folder)
    manifest = shardkit.pack(make(path), folder, seed=3, progress=False)["out"]

    assert contents_of(folder) == before
    assert manifest == manifest_of(folder)
    with pytest.raises(DatasetExistsError, match=r"what differs: version .*, seed"):
        shardkit.pack(make(path), folder, seed=4, progress=False)
    with pytest.raises(DatasetExistsError, match=r"what differs: version \(there 1, here 2\)"):
        shardkit.pack(make(path), folder, seed=3, check=True, progress=False)
    assert contents_of(folder) == before


def test_a_finished_dataset_is_not_gone_on_with(tmp_path):
    with shardkit.ShardWriter(tmp_path / "out", **OPTIONS) as writer:
        writer.write(sample(0))
    with pytest.raises(DatasetExistsError, match="holds a dataset already"):
        shardkit.ShardWriter(tmp_path / "out", resume=True, **OPTIONS)


@pytest.mark.parametrize("name", ["photos/train", "numbers", "scenes", "strangers", "words", "written", "again"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_indexing_a_dataset_of_format_1_again_keeps_all_that_it_says(name, overwrite, tmp_path):
    original = GOLDEN / name
    folder = Path(shutil.copytree(original, tmp_path / original.name))
    for path in folder.iterdir():
        path.chmod(0o644)
    tars = {path.name: path.read_bytes() for path in folder.glob("*.tar*")}
    before = manifest_of(folder)
    after = shardkit.index_shards(folder, overwrite=overwrite)

    for part in ("classes", "columns", "packed", "fields", "block_samples", "unique_keys", "digest", "num_samples"):
        assert getattr(after, part) == getattr(before, part), part
    assert (before.version, after.version) == (1, 2)
    assert {path.name: path.read_bytes() for path in folder.glob("*.tar*")} == tars
    assert not list(folder.glob("*.parquet"))
    assert shardkit.verify(folder).ok
    assert shardkit.index_shards(folder, overwrite=True) == after


def test_an_unfinished_pack_is_not_finished_by_indexing(tmp_path):
    (tmp_path / "unfinished.json").write_text('{"request": {}}')
    (tmp_path / "a.tar").write_bytes(bytes(1024))
    with pytest.raises(UnfinishedDatasetError, match="run the same pack again to continue"):
        shardkit.index_shards(tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "unfinished.json"]


def test_what_has_no_complete_shard_yet_is_not_advised_to_be_indexed(tmp_path):
    folder = begun(tmp_path / "out", 1)
    with pytest.raises(
        UnfinishedDatasetError, match=r"none of its shards is complete; run its writer again, a ShardWriter "
    ) as caught:
        shardkit.index_shards(folder)
    assert "shardkit index" not in str(caught.value)
