"""Packing writes every sample once, gives the same bytes with any workers, and resumes after any interruption."""

import errno
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.managers import SyncManager
from pathlib import Path
from threading import BrokenBarrierError

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit.packing.writer
from shardkit.errors import (
    ArgumentError,
    CodecError,
    DatasetError,
    DatasetExistsError,
    SampleError,
    SourceError,
    UnfinishedDatasetError,
    WorkerError,
)
from shardkit.format.manifest import read_manifest
from shardkit.format.tar import END_OF_ARCHIVE
from shardkit.loading.stream import ShardStream
from shardkit.packing.job import pack
from shardkit.reading.dataset import ShardDataset
from shardkit.reading.forward import ShardLocation, find_shards, read_shard
from shardkit.sample import KEY, URL
from shardkit.sources.folders import FileFolder, ImageFolder
from shardkit.storage.local import LocalStorage
from shardkit.transforms.crops import Resize
from tests.support.folders import contents_of, files_of, names_in, temporary_files
from tests.support.forks import forkserver
from tests.support.shared import started

ROOT = Path(__file__).parents[2]
MARKED = "unfinished.json"


def test_an_image_that_a_transform_of_a_pack_cannot_decode_is_named(tmp_path):
    with pytest.raises(CodecError, match=r"sample '0007', field 'jpg' cannot be decoded: it begins with b'no photo'"):
        pack([{KEY: "0007", "jpg": b"no photo"}], tmp_path / "a", transform={"jpg": Resize(8)}, progress=False)


def test_a_function_that_would_yield_the_samples_is_to_be_called(tmp_path):
    def generate():
        yield from samples(3)

    with pytest.raises(ArgumentError, match=r"source is function, expected .*; call it, to give"):
        pack(generate, tmp_path / "a")


def test_a_dataset_is_packed_again_as_it_is_stored(tmp_path):
    pack(samples(3), tmp_path / "a", progress=False)

    with pytest.raises(ArgumentError, match=r"source is ShardDataset, expected .*; a ShardSource packs shards again"):
        pack(ShardDataset(tmp_path / "a"), tmp_path / "b")


def small(number):
    return {KEY: f"{number:04d}", "txt": f"text {number} " * (number % 50), "cls": number % 7}


def samples(count):
    return [small(number) for number in range(count)]


def image_files(folder, count=60):
    for number in range(count):
        path = folder / f"class{number % 3}" / f"{number:03d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.Random(number).randbytes(number * 97 % 3000))
    return folder


def read(folder):
    """Return the samples in order, read strictly and compared with the index."""
    found = [sample for location in find_shards(str(folder)) for sample in read_shard(location)]
    return [{name: value for name, value in s.items() if name != URL} for s in found]


def keys(folder):
    return [sample[KEY] for sample in read(folder)]


def quiet(source, destination, **options):
    return pack(source, destination, **({"progress": False, "compression": "none"} | options))


def touched(folder):
    return {(p, p.stat().st_mtime_ns, p.stat().st_ino) for p in folder.rglob("*")}


@pytest.fixture
def images(tmp_path):
    return image_files(tmp_path / "images")


@given(
    sizes=st.lists(st.sampled_from([0, 1, 511, 512, 513, 5000]), min_size=1, max_size=40),
    options=st.fixed_dictionaries(
        {
            "compression": st.sampled_from(["none", "zst:1", "gz:1", "auto"]),
            "shard_bytes": st.integers(8000, 60_000),
            "shard_samples": st.none() | st.integers(1, 9),
            "block_bytes": st.integers(1, 9000),
            "shuffle": st.booleans(),
            "seed": st.integers(0, 9),
        }
    ),
)
def test_every_sample_is_packed_once_into_shards_that_are_not_too_large(tmp_path_factory, sizes, options):
    folder = tmp_path_factory.mktemp("any") / "ds"
    given_samples = [{KEY: f"k/{i}", "a": bytes(size), "b.c": b"%d" % i} for i, size in enumerate(sizes)]
    manifest = quiet(given_samples, folder, num_workers=1, **options)["ds"]
    found = read(folder)

    assert sorted(found, key=lambda s: int(s["b.c"])) == given_samples
    assert options["shuffle"] or found == given_samples
    assert max(shard.tar_size for shard in manifest.shards) <= options["shard_bytes"]
    assert max(shard.samples for shard in manifest.shards) <= (options["shard_samples"] or len(sizes))
    assert not temporary_files(folder)


def test_shards_are_levelled_and_the_last_is_no_crumb(tmp_path, images):
    manifest = quiet(ImageFolder(images), tmp_path / "ds", shard_bytes=30_000)["ds"]
    sizes = [shard.tar_size for shard in manifest.shards]

    assert len(sizes) > 3
    assert max(sizes) <= 30_000
    assert min(sizes) >= sum(sizes) / len(sizes) - 512 * 2 - 3000 - 512


def test_a_folder_of_images_is_packed_with_its_classes_and_paths(tmp_path, images):
    (images / "class0/notes.txt").write_text("not an image")
    manifest = quiet(ImageFolder(images), tmp_path / "ds", columns={"label": "cls"})["ds"]
    found = {s[KEY]: s for s in read(tmp_path / "ds")}

    assert manifest.classes == ("class0", "class1", "class2")
    assert manifest.fields == ("cls", "jpg")
    assert manifest.packed["ignored_files"] == 1
    assert len(found) == 60
    for number in range(60):
        jpg = (images / f"class{number % 3}/{number:03d}.JPEG").read_bytes()
        key = f"class{number % 3}/{number:03d}"
        assert found[key] == {KEY: key, "jpg": jpg, "cls": b"%d" % (number % 3)}


def test_names_of_all_kinds_are_packed_under_their_escaped_keys(tmp_path):
    (tmp_path / "in/ä 貓").mkdir(parents=True)
    for name in ["1.5.jpg", "x.jpg", "%.gif", "é.JPEG"]:
        (tmp_path / "in/ä 貓" / name).write_bytes(name.encode())
    (tmp_path / "in/ä 貓" / os.fsdecode(b"\xff.jpg")).write_bytes(b"not UTF-8")
    quiet(ImageFolder(tmp_path / "in"), tmp_path / "ds", shuffle=False)

    assert set(keys(tmp_path / "ds")) == {f"ä 貓/{name}" for name in ["%25", "%FF", "1%2E5", "x", "é"]}


def test_seeds_give_different_orders_and_the_same_seed_the_same(tmp_path):
    for name, options in {"a": {}, "b": {"seed": 0}, "c": {"seed": 1}, "d": {"shuffle": False}}.items():
        quiet(samples(100), tmp_path / name / "ds", **options)
    order = {name: keys(tmp_path / name / "ds") for name in "abcd"}

    assert order["a"] == order["b"]
    assert order["d"] == sorted(order["a"])
    assert len({tuple(order[name]) for name in "acd"}) == 3


def test_the_order_of_a_pack_is_pinned(tmp_path):
    quiet(samples(12), tmp_path / "ds", seed=7)

    assert [int(key) for key in keys(tmp_path / "ds")] == [2, 7, 1, 9, 11, 10, 3, 0, 4, 5, 8, 6]


@pytest.mark.parametrize("listed", [True, False])
def test_a_sample_larger_than_a_shard_is_an_error_before_anything_is_written(tmp_path, images, listed):
    (images / "class1/huge.jpg").write_bytes(bytes(20_000))
    source = ImageFolder(images)
    source = source if listed else map(source.read, range(len(source)))

    with pytest.raises(SampleError, match=r"sample 'class1/huge': takes 23,040 bytes .* shard_bytes=23,039; pass"):
        quiet(source, tmp_path / "ds", shard_bytes=23_039)
    assert not list(tmp_path.glob("ds/*.tar"))
    assert (tmp_path / "ds").exists() is not listed
    quiet(ImageFolder(images), tmp_path / "ds", shard_bytes=23_040)  # and nothing that it left hinders the next pack


@pytest.mark.parametrize("bad", [{KEY: "a.b", "txt": ""}, {KEY: "a", "TXT": ""}, {KEY: "a"}, {KEY: "a", "json": {1}}])
def test_a_sample_that_cannot_be_written_is_an_error_before_any_shard(tmp_path, bad):
    with pytest.raises((SampleError, CodecError)):
        quiet([*samples(50), bad], tmp_path / "ds", shard_samples=5)
    assert set(contents_of(tmp_path / "ds")) == {MARKED}


@pytest.mark.parametrize("splits", [None, {"train": 0.5, "val": 0.5}])
def test_a_key_that_occurs_twice_is_an_error_before_any_shard(tmp_path, splits):
    with pytest.raises(SampleError, match="sample '0003': its key occurs more than once"):
        quiet([*samples(50), small(3)], tmp_path / "ds", shard_samples=5, splits=splits)
    assert not list(tmp_path.rglob("*.tar"))
    assert not temporary_files(tmp_path)


def test_different_keys_with_the_same_hash_are_packed(tmp_path, monkeypatch):
    monkeypatch.setattr("shardkit.packing.spill.hash_key", lambda _: 5)
    monkeypatch.setattr(shardkit.packing.writer, "hash_key", lambda _: 5)
    quiet(samples(20), tmp_path / "ds")

    assert len(keys(tmp_path / "ds")) == 20
    with pytest.raises(SampleError, match="sample '0007': its key occurs more than once"):
        quiet([*samples(20), small(7)], tmp_path / "other")


def test_no_samples_are_an_error(tmp_path):
    with pytest.raises(SourceError, match="the source has no samples"):
        quiet([], tmp_path / "ds")


@pytest.mark.parametrize(
    "options",
    [
        {"shard_bytes": "many"},
        {"shard_samples": 0},
        {"block_bytes": -1},
        {"compression": "bz2"},
        {"columns": {"__key__": "cls"}},
        {"columns": {"a:b": "cls"}},
        {"columns": {"a": 7}},
        {"splits": {"train": 0.5}},
        {"num_workers": 0},
        {"worker_type": "fiber"},
    ],
)
def test_wrong_arguments_are_refused_before_the_source_is_touched(tmp_path, options):
    source = iter(samples(3))

    with pytest.raises(ArgumentError):
        pack(source, tmp_path / "ds", **options)
    assert len(list(source)) == 3
    assert not (tmp_path / "ds").exists()


def test_an_error_of_the_source_or_the_transform_comes_through_and_leaves_no_temporary_files(tmp_path):
    def broken(count):
        yield from samples(count)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        quiet(broken(100), tmp_path / "a")
    with pytest.raises(ZeroDivisionError):
        quiet(samples(100), tmp_path / "b", transform=lambda _: 1 / 0)
    assert set(contents_of(tmp_path / "a")) == set(contents_of(tmp_path / "b")) == {MARKED}


def test_a_transform_changes_samples_and_leaves_some_out(tmp_path, images):
    def transform(sample):
        return None if sample["cls"] == 1 else sample | {"txt": f"class {sample['cls']}"}

    listed = quiet(ImageFolder(images), tmp_path / "a/ds", transform=transform)["ds"]
    source = ImageFolder(images)
    iterated = quiet(map(source.read, range(60)), tmp_path / "b/ds", transform=transform)["ds"]

    assert listed.num_samples == 40
    assert listed.digest == iterated.digest
    assert {s["txt"] for s in read(tmp_path / "a/ds")} == {b"class 0", b"class 2"}


def reversed_bytes(data):
    return data[::-1]


def jittered(label, rng):
    return label + rng.integers(0, 1000)


BY_FIELD = {"cls": jittered, "jpg": reversed_bytes}


def test_functions_of_fields_change_those_fields(tmp_path, images):
    quiet(ImageFolder(images), tmp_path / "a/ds", transform={"jpg": reversed_bytes})
    source = ImageFolder(images)

    assert {s[KEY]: (s["jpg"], int(s["cls"])) for s in read(tmp_path / "a/ds")} == {
        s[KEY]: (s["jpg"][::-1], s["cls"]) for s in map(source.read, range(60))
    }


@pytest.mark.multiprocess
def test_random_numbers_of_a_transform_follow_from_seed_and_key_whoever_does_it(tmp_path, images):
    def labels(name, source, **options):
        quiet(source, tmp_path / name / "ds", transform=BY_FIELD, **options)
        return {s[KEY]: int(s["cls"]) for s in read(tmp_path / name / "ds")}

    source = ImageFolder(images)
    iterated = labels("iterated", map(source.read, range(60)))
    known = labels("threads", source, num_workers=2)

    assert iterated == known
    assert labels("processes", source, num_workers=2, worker_type="process") == known
    assert labels("backwards", map(source.read, reversed(range(60))), shuffle=False) == known
    assert len(set(known.values())) > 40
    assert contents_of(tmp_path / "processes") == contents_of(tmp_path / "threads")
    assert len(known.items() & labels("other", source, seed=1).items()) < 5


@pytest.mark.parametrize("shuffle", [True, False])
def test_another_seed_of_random_numbers_is_another_pack(tmp_path, images, shuffle):
    quiet(ImageFolder(images), tmp_path / "ds", transform=BY_FIELD, shuffle=shuffle)
    quiet(ImageFolder(images), tmp_path / "ds", transform=BY_FIELD, shuffle=shuffle)
    differs = r"transform \(there 'cls: .*jittered \w+, jpg: .*reversed_bytes \w+, rng of seed 0', here .*seed 1'\)"

    with pytest.raises(DatasetExistsError, match=differs):
        quiet(ImageFolder(images), tmp_path / "ds", transform=BY_FIELD, shuffle=shuffle, seed=1)


@pytest.mark.parametrize("transform", [BY_FIELD, dict])
def test_what_a_transform_cannot_change_is_an_error_that_names_it(tmp_path, transform):
    with pytest.raises(SampleError, match=r"'a': is str, expected a dict .*; of a table, give the rows, as"):
        quiet(["a"], tmp_path / "a", transform=transform)
    with pytest.raises(SampleError, match=r"a sample of 'cls': has no '__key__', its name in the dataset; give"):
        quiet([{"cls": 1}], tmp_path / "b", transform=transform)


def test_a_field_that_a_transform_names_and_a_sample_lacks_is_an_error(tmp_path):
    with pytest.raises(SampleError, match=r"sample '0000', made of a.txt: has no field 'jpg', which transform names"):
        quiet([small(0) | {"__source__": "a.txt"}], tmp_path / "a", transform=BY_FIELD)


def test_columns_stand_in_the_manifest_with_one_type(tmp_path):
    columns = {"label": "cls", "length": lambda sample: len(sample["txt"]), "nothing": lambda _: None, "rare": "json"}
    source = [*samples(29), {KEY: "last", "cls": 1, "txt": "", "json": "2"}]
    manifest = quiet(source, tmp_path / "ds", columns=columns, shard_samples=4)["ds"]

    assert dict(manifest.columns) == {"label": "int64", "length": "int64", "nothing": "null", "rare": "int64"}
    with pytest.raises(CodecError, match=r"column 'bad' cannot be computed \(ZeroDivisionError: "):
        quiet(samples(30), tmp_path / "other", columns={"bad": lambda _: 1 / 0})


@pytest.mark.parametrize("transform", [None, dict])
def test_a_column_of_a_field_that_no_sample_has_is_an_error_before_any_shard(tmp_path, images, transform):
    names_no_field = r"columns: 'label' names the field 'clss', which no sample has \(there are cls, jpg\); correct"
    options = {"transform": transform, "columns": {"key": KEY, "label": "clss"}}
    with pytest.raises(ArgumentError, match=names_no_field):
        quiet(ImageFolder(images), tmp_path / "listed", **options)
    with pytest.raises(ArgumentError, match="which no sample has"):
        quiet(samples(5), tmp_path / "iterated", **options)

    assert not [path for path in tmp_path.glob("*ed/*") if path.name != MARKED]
    corrected = quiet(samples(5), tmp_path / "iterated", **options | {"columns": {"key": KEY, "label": "cls"}})
    assert dict(corrected["iterated"].columns) == {"key": "string", "label": "int64"}


def test_auto_compresses_what_shrinks_by_a_tenth_and_nothing_else(tmp_path):
    noise = random.Random(0)
    texts = [{KEY: f"{i}", "txt": "the same words again " * 50} for i in range(50)]
    jpegs = [{KEY: f"{i}", "jpg": noise.randbytes(1000)} for i in range(50)]
    mixed = [{KEY: f"{i}", "jpg": noise.randbytes(1000), "txt": "word " * 10} for i in range(50)]

    def chosen(name, data):
        return quiet(data, tmp_path / name, compression="auto")[name].shards[0].compression

    assert [chosen("texts", texts), chosen("jpegs", jpegs), chosen("mixed", mixed)] == ["zst", "none", "none"]


def split_of(folder):
    return {key: name for name in ("train", "val") for key in keys(folder / name)}


SPLITS = {"train": 0.7, "val": 0.3}


def test_splits_are_datasets_of_their_own_that_share_nothing(tmp_path):
    manifests = quiet(samples(200), tmp_path / "ds", splits=SPLITS, shard_samples=20)
    train, val = (keys(tmp_path / "ds" / name) for name in SPLITS)

    assert sorted(train + val) == [f"{i:04d}" for i in range(200)]
    assert [manifests[name].num_samples for name in SPLITS] == [len(train), len(val)]
    assert manifests["train"].shards[0].url == "train-000000.tar"
    assert 100 < len(train) < 180


def test_a_sample_stays_in_its_split_when_the_data_is_shuffled_anew_or_grows(tmp_path):
    quiet(samples(200), tmp_path / "a", splits=SPLITS)
    quiet(samples(300)[::-1], tmp_path / "b", splits=SPLITS, seed=9)
    first, second = split_of(tmp_path / "a"), split_of(tmp_path / "b")

    assert {key: second[key] for key in first} == first


@pytest.mark.parametrize("given", [None, 3.5])
def test_split_by_that_gives_no_name_is_an_error(tmp_path, given):
    with pytest.raises(ArgumentError, match=f"split_by returns {given} for the key '0000', expected text or a number"):
        quiet(samples(9), tmp_path / "ds", splits=SPLITS, split_by=lambda _: given)
    assert not list(tmp_path.rglob("*.tar"))


@pytest.mark.parametrize("listed", [True, False])
def test_split_by_keeps_what_belongs_together_in_one_split(tmp_path, listed):
    for number in range(200):
        path = tmp_path / f"in/patient{number % 20:02d}/{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    source = FileFolder(tmp_path / "in")
    source = source if listed else map(source.read, range(len(source)))
    quiet(source, tmp_path / "ds", splits=SPLITS, split_by=lambda key: key.split("/")[0])
    splits = {(key.split("/")[0], name) for key, name in split_of(tmp_path / "ds").items()}

    assert len(splits) == 20
    assert len({name for _, name in splits}) == 2


def test_a_split_may_be_empty(tmp_path):
    manifests = quiet(samples(1), tmp_path / "ds", splits=SPLITS)

    assert sorted(m.num_samples for m in manifests.values()) == [0, 1]


MEETING = None  # where tasks that should run at the same time wait for one another


def meet(sample):
    """A column that waits, once per thread, until as many threads as MEETING requires have arrived."""
    if MEETING is not None and not hasattr(MEETING.local, "met"):
        MEETING.local.met = True
        MEETING.barrier.wait()
    return sample["cls"]


@dataclass
class Meeting:
    barrier: threading.Barrier
    local: threading.local


class Inline(Executor):
    """A third-party executor."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - an executor passes on any error
            future.set_exception(error)
        return future


@pytest.fixture
def undisturbed(tmp_path, images):
    quiet(ImageFolder(images), tmp_path / "one/ds", shard_samples=5, columns={"label": meet}, num_workers=1)
    return contents_of(tmp_path / "one/ds")


def test_one_and_four_threads_that_work_at_the_same_time_give_the_same_bytes(
    tmp_path, images, undisturbed, monkeypatch
):
    monkeypatch.setattr(sys.modules[__name__], "MEETING", Meeting(threading.Barrier(4, timeout=60), threading.local()))
    quiet(ImageFolder(images), tmp_path / "four/ds", shard_samples=5, columns={"label": meet}, num_workers=4)

    assert contents_of(tmp_path / "four/ds") == undisturbed
    monkeypatch.setattr(sys.modules[__name__], "MEETING", Meeting(threading.Barrier(4, timeout=0.1), threading.local()))
    with pytest.raises(CodecError) as caught:  # only three threads arrive, not four
        quiet(ImageFolder(images), tmp_path / "three", shard_samples=5, columns={"label": meet}, num_workers=3)
    assert isinstance(caught.value.__cause__, BrokenBarrierError)


@pytest.mark.parametrize("executor", [Inline(), ThreadPoolExecutor(3)])
def test_a_foreign_executor_gives_the_same_bytes_and_stays_open(tmp_path, images, undisturbed, executor):
    quiet(ImageFolder(images), tmp_path / "ex/ds", shard_samples=5, columns={"label": meet}, executor=executor)

    assert contents_of(tmp_path / "ex/ds") == undisturbed
    assert executor.submit(int, "7").result() == 7
    executor.shutdown()


@dataclass(frozen=True)
class MeetInProcesses:
    """A column like ``meet``, for processes."""

    barrier: object

    def __call__(self, sample):
        if self.barrier is not None and not hasattr(MeetInProcesses, "met"):
            MeetInProcesses.met = True
            self.barrier.wait(60)
        return sample["cls"]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_one_and_four_processes_that_work_at_the_same_time_give_the_same_bytes(tmp_path, images):
    options = {"shard_samples": 5, "worker_type": "process"}
    quiet(
        ImageFolder(images), tmp_path / "one/ds", **options | {"num_workers": 1, "worker_type": "thread"},
        columns={"label": MeetInProcesses(None)},
    )  # fmt: skip
    with SyncManager(ctx=get_context("spawn")) as manager:
        column = MeetInProcesses(manager.Barrier(4))
        quiet(ImageFolder(images), tmp_path / "four/ds", **options, num_workers=4, columns={"label": column})

    assert contents_of(tmp_path / "four/ds") == contents_of(tmp_path / "one/ds")


@pytest.mark.multiprocess
def test_an_error_in_a_process_comes_through_and_nothing_incomplete_stays(tmp_path, images):
    (images / "class0/bad.jpg").write_bytes(b"x")
    source = ImageFolder(images)
    (images / "class0/bad.jpg").write_bytes(b"longer")

    with pytest.raises(SourceError, match=r"bad\.jpg: had 1 bytes when the pack began"):
        quiet(source, tmp_path / "ds", shard_samples=5, num_workers=2, worker_type="process")
    check_what_stands(tmp_path / "ds")
    assert not temporary_files(tmp_path / "ds")


def check_what_stands(folder):
    """Every shard with its final name is whole, and opening the folder says that it is unfinished."""
    for shard in folder.glob("*.tar*"):
        assert sum(1 for _ in read_shard(ShardLocation(str(shard)))) > 0
    if not (folder / MARKED).exists():
        assert not list(folder.glob("*.tar*")) or read_manifest(str(folder)).num_samples == len(keys(folder))
        return
    for open_it in (read_manifest, find_shards, ShardStream):
        with pytest.raises(UnfinishedDatasetError, match="is unfinished"):
            open_it(str(folder))


def transformed(sample):
    return sample | {"txt": "a text"}


@contextmanager
def temporary_folder_beside(folder):
    """Use a folder beside another one as TMPDIR. It remains if anything is left in it."""
    earlier, beside = tempfile.tempdir, Path(f"{folder}.tmp")
    beside.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(beside)
    try:
        yield
    finally:
        tempfile.tempdir = earlier
        with suppress(OSError):
            beside.rmdir()


def job(kind, images, folder, size=4):
    """Pack into tiny shards, so that there are many points to interrupt."""
    with temporary_folder_beside(folder):
        _job(kind, images, folder, size)


def _job(kind, images, folder, size):
    if kind == "listed":
        quiet(ImageFolder(images), folder / "ds", shard_samples=size, num_workers=1)
    elif kind == "splits":
        quiet(ImageFolder(images), folder / "ds", shard_samples=size, splits=SPLITS, compression="zst")
    elif kind == "transform":
        quiet(ImageFolder(images), folder / "ds", shard_samples=size, num_workers=2, transform=transformed)
    elif kind == "iterable":
        quiet((small(i) for i in range(60)), folder / "ds", shard_samples=size, num_workers=2)


def killed_at(event_number, kind, images, folder):
    """Run the job in this process, which kills itself before its n-th operation on a file in the folder."""
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        if event in ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir") and str(folder) in str(
            arguments[0]
        ):
            seen += 1
            if seen == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    job(kind, images, folder, size=30)


SERVER = forkserver(__name__)


def run(target, *args, kill_after=None):
    """Run a function in a separate process and kill -9 it after some seconds. Return whether it ended by itself."""
    process = SERVER.Process(target=target, args=args)
    process.start()
    process.join(kill_after)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def datasets_in(folder):
    return [folder / "ds/train", folder / "ds/val"] if (folder / "ds/train").exists() else [folder / "ds"]


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["listed", "splits", "transform", "iterable"])
def test_a_pack_that_is_killed_before_any_of_its_file_operations_goes_on_to_the_same_bytes(tmp_path, images, kind):
    job(kind, images, tmp_path / "clean", size=30)
    expected = contents_of(tmp_path / "clean")
    number, ended = 0, False
    while not ended:
        number += 1
        folder = tmp_path / f"killed{number}"
        ended = run(killed_at, number, kind, images, folder)
        for dataset in datasets_in(folder):
            check_what_stands(dataset)
        job(kind, images, folder, size=30)

        assert contents_of(folder) == expected
        assert not Path(f"{folder}.tmp").exists()
    assert number > 20


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["listed", "splits", "transform", "iterable"])
def test_a_pack_that_is_killed_at_random_again_and_again_goes_on_to_the_same_bytes(tmp_path, images, kind):
    job(kind, images, tmp_path / "clean")
    moments = random.Random(kind)
    for trial in range(2):
        folder, patience = tmp_path / f"killed{trial}", 1.0
        while not run(job, kind, images, folder, kill_after=patience * moments.uniform(0.02, 0.2)):
            patience *= 1.05  # otherwise a busy machine would never reach the manifest
            for dataset in datasets_in(folder):
                check_what_stands(dataset)

        assert contents_of(folder) == contents_of(tmp_path / "clean")
        assert not Path(f"{folder}.tmp").exists()


SCRIPT = """
import os, sys
from shardkit.packing.job import pack
from shardkit.sources.folders import ImageFolder

def label(sample):
    if sample["__key__"].endswith("7"):
        os.write(1, b"at work\\n")
    return sample["cls"]

def transform(sample):
    return sample | {"txt": "hello"}

if __name__ == "__main__":
    _, images, destination, worker_type = sys.argv
    pack(ImageFolder(images), destination, shard_samples=1, compression="none", num_workers=2,
         worker_type=worker_type, columns={"label": label}, transform=transform, progress=False)
    print("done")
"""


def start_script(tmp_path, *args):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "temporary").mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary")}
    command = [sys.executable, "-W", "error", tmp_path / "script.py", *args]
    return started(command, text=True, env=environment)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("worker_type", ["thread", "process"])
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_a_script_that_is_interrupted_or_killed_goes_on_when_it_is_run_again(tmp_path, images, worker_type, stop):
    for number in range(60, 200):
        (images / "class0" / f"{number}.jpg").write_bytes(b"%d" % number)
    arguments = (images, tmp_path / "a/ds", worker_type)
    with start_script(tmp_path, *arguments) as process:
        assert process.stdout.readline() == "at work\n"
        os.killpg(process.pid, stop) if stop == signal.SIGINT else process.kill()
        rest, errors = process.communicate()
    check_what_stands(tmp_path / "a/ds")
    before = len(list((tmp_path / "a/ds").glob("*.tar")))

    assert process.returncode == -stop
    assert "done" not in rest
    assert 0 < before < 200
    if stop == signal.SIGINT:
        assert errors.count("Traceback") == 1
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert not list((tmp_path / "a/ds").rglob(".*"))
        assert list((tmp_path / "temporary").glob(".shardkit-*/*/*-sorted.tar"))  # for the next call
    with start_script(tmp_path, *arguments) as process:
        rest, errors = process.communicate()
    assert errors == ""
    assert rest.endswith("done\n")
    assert len(set(keys(tmp_path / "a/ds"))) == 200
    assert not temporary_files(tmp_path / "a/ds")
    assert not list((tmp_path / "temporary").iterdir())


@dataclass(frozen=True)
class DiesOnce:
    """A transform that records its calls, and kills its process at the 35th sample of the first run."""

    folder: Path

    def __call__(self, sample):
        with (self.folder / "seen").open("a") as file:
            file.write(f"{sample[KEY]}\n")
        if sample[KEY] == "class1/043" and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sample


@pytest.mark.multiprocess
def test_after_a_worker_was_killed_only_what_was_not_transformed_is_transformed(tmp_path, images, monkeypatch):
    monkeypatch.setattr(sys.modules["shardkit.packing.job"], "_SPILL_SAMPLES", 10)
    source, transform = ImageFolder(images), DiesOnce(tmp_path)

    def run_once():
        quiet(source, tmp_path / "ds", transform=transform, num_workers=1, worker_type="process")

    with pytest.raises(WorkerError, match="exit code -9"):
        run_once()
    run_once()
    seen = (tmp_path / "seen").read_text().split()
    in_order = [source.key(i) for i in range(60)]

    assert seen == in_order[: in_order.index("class1/043") + 1] + in_order[30:]
    assert sorted(keys(tmp_path / "ds")) == sorted(in_order)
    assert not temporary_files(tmp_path / "ds")


def pack_with_limit(images, folder, limit):
    """Pack with a limit on the size of files, in bytes, as if the disk were full."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with pytest.raises(OSError, match="File too large"):
        job("listed", images, folder)


@pytest.mark.multiprocess
@pytest.mark.parametrize("limit", [0, 3000, 9000, 12_000])
def test_a_disk_that_is_full_is_an_error_that_leaves_nothing_incomplete_and_the_next_call_goes_on(
    tmp_path, images, limit
):
    assert run(pack_with_limit, images, tmp_path / "full", limit)
    check_what_stands(tmp_path / "full/ds")

    assert not [p for p in (tmp_path / "full").rglob(".*") if p.is_file()]
    job("listed", images, tmp_path / "full")
    job("listed", images, tmp_path / "clean")
    assert contents_of(tmp_path / "full") == contents_of(tmp_path / "clean")


def test_a_disk_that_is_too_full_for_the_samples_that_wait_is_an_error_that_says_where_they_do(tmp_path, monkeypatch):
    def full(descriptor):
        if re.search(r"/\.shardkit-\d+/", str(Path(f"/proc/self/fd/{descriptor}").readlink())):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"/\.shardkit-\d+/\w+/\w+-000000\.tar") as caught:
        quiet(samples(3), tmp_path / "ds")
    assert "No space left on device" in str(caught.value)
    assert "Without executor, TMPDIR sets the place" in "".join(traceback.format_exception(caught.value))


class Interrupt(Exception):  # noqa: N818
    """An error that stops a pack midway."""


@pytest.fixture
def interrupted(tmp_path, images, monkeypatch):
    """A pack that was stopped when it had written three shards."""
    create = LocalStorage.create
    with monkeypatch.context() as patch:

        def create_three(self, url, *, overwrite=False):
            if "000003.tar" in url:
                raise Interrupt
            return create(self, url, overwrite=overwrite)

        patch.setattr(LocalStorage, "create", create_three)
        with pytest.raises(Interrupt):
            job("listed", images, tmp_path)
    assert len(list((tmp_path / "ds").glob("*.tar"))) == 3
    return tmp_path / "ds"


def test_a_resumed_pack_writes_only_what_is_missing(interrupted, images, tmp_path):
    before = {p: p.stat().st_ino for p in files_of(interrupted) if re.search(r"-00000[012]\.", p.name)}
    job("listed", images, tmp_path)

    assert len(before) == 6
    assert {p: p.stat().st_ino for p in before} == before
    assert read_manifest(str(interrupted)).num_samples == 60


def test_a_shard_that_is_not_that_of_the_plan_is_written_again(interrupted, images, tmp_path):
    whole = (interrupted / "ds-000001.tar").read_bytes()
    (interrupted / "ds-000001.tar").write_bytes(whole[:-1])
    [index] = interrupted.glob("__index__/ds-000002.*.parquet")
    flipped = bytearray(index.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    index.write_bytes(flipped)
    (interrupted / "ds-000077.tar").write_bytes(b"of some other dataset")
    job("listed", images, tmp_path)
    job("listed", images, tmp_path / "clean")

    assert names_in(interrupted) == names_in(tmp_path / "clean/ds")
    assert contents_of(interrupted) == contents_of(tmp_path / "clean/ds")


def test_a_source_that_changed_since_an_interrupted_pack_is_an_error_that_says_so(interrupted, images, tmp_path):
    (images / "class0/new.jpg").write_bytes(b"new")
    before = touched(interrupted)

    with pytest.raises(DatasetExistsError, match="unfinished dataset of another pack; what differs: the source: samp"):
        job("listed", images, tmp_path)
    assert touched(interrupted) == before
    quiet(ImageFolder(images), interrupted, shard_samples=4, overwrite=True)
    assert len(keys(interrupted)) == 61


def test_a_source_that_changed_since_it_was_listed_is_an_error(tmp_path, images):
    source = ImageFolder(images)
    (images / "class2/002.JPEG").write_bytes(b"something else")

    with pytest.raises(SourceError, match=r"002.JPEG: had 194 bytes when the pack began and was written to since"):
        quiet(source, tmp_path / "ds", shard_samples=4)
    assert not temporary_files(tmp_path / "ds")
    with pytest.raises(UnfinishedDatasetError):
        read_manifest(str(tmp_path / "ds"))


def other_transform(sample):
    return sample | {"txt": "another text"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": 3}, r"seed \(there 0, here 3\)"),
        ({"shuffle": False}, r"seed \(there 0, here None\)"),
        ({"shard_samples": 5}, r"shard_samples \(there 4, here 5\)"),
        ({"shard_bytes": 10**6}, r"shard_bytes \(there 256000000, here 1000000\)"),
        ({"compression": "zst"}, r"compression \(there 'none', here 'zst:\d+'\)"),
        ({"block_bytes": 7}, "block_bytes"),
        ({"columns": {"label": "cls"}}, r"columns \(there \{\}, here \{'label': 'cls'\}\)"),
        ({"transform": transformed}, r"transform \(there None, here '.*transformed"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_other_arguments_in_the_same_folder_are_refused_by_name(
    interrupted, images, tmp_path, options, named, finished
):
    if finished:
        job("listed", images, tmp_path)
    before = touched(interrupted)

    with pytest.raises(DatasetExistsError, match=f"of another pack; what differs: {named}"):
        quiet(ImageFolder(images), interrupted, **{"shard_samples": 4} | options)
    assert touched(interrupted) == before
    quiet(ImageFolder(images), interrupted, **{"shard_samples": 4, "overwrite": True} | options)
    quiet(ImageFolder(images), tmp_path / "clean/ds", **{"shard_samples": 4} | options)
    assert contents_of(interrupted) == contents_of(tmp_path / "clean/ds")


@pytest.mark.parametrize(
    "manifest", ["{}", "[" * 100_000, '{"packed": 3}', '{"packed": {"request": [1]}}', "[]", "no JSON"]
)
def test_a_dataset_that_no_pack_wrote_is_refused_and_stays(tmp_path, images, manifest):
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds/manifest.json").write_text(manifest)

    with pytest.raises(DatasetExistsError, match="of another pack; what differs: it was not written by this pack"):
        quiet(ImageFolder(images), tmp_path / "ds")
    assert (tmp_path / "ds/manifest.json").read_text() == manifest


def test_a_function_whose_code_changed_is_another_function(tmp_path, images):
    def version(number):
        namespace = {}
        exec(f"def change(sample): return sample | {{'txt': 'version {number}'}}", namespace)
        return namespace["change"]

    quiet(ImageFolder(images), tmp_path / "ds", transform=version(1))
    quiet(ImageFolder(images), tmp_path / "ds", transform=version(1))

    with pytest.raises(DatasetExistsError, match="what differs: transform"):
        quiet(ImageFolder(images), tmp_path / "ds", transform=version(2))


@pytest.mark.multiprocess
def test_a_function_is_recognised_in_another_process():
    """Sets in its code have a different order in every process."""
    program = (
        "from shardkit.packing.target import describe_function\n"
        "print(describe_function(lambda s: s if s['cls'] in {'a', 'b', 'c', 'd', ('e', 1.5)} else (lambda: s)()))"
    )

    def described(seed):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
        return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True).stdout

    assert described("1") == described("2")


@pytest.mark.parametrize("kind", ["listed", "splits", "transform", "iterable"])
def test_a_pack_that_is_finished_is_not_written_again(tmp_path, images, kind):
    job(kind, images, tmp_path)
    before = {entry for entry in touched(tmp_path / "ds") if entry[0].is_file()}
    job(kind, images, tmp_path)

    assert {entry for entry in touched(tmp_path / "ds") if entry[0].is_file()} == before
    assert not temporary_files(tmp_path / "ds")


def test_a_finished_pack_of_another_source_is_refused(tmp_path):
    quiet(samples(10), tmp_path / "ds")
    before = contents_of(tmp_path / "ds")

    with pytest.raises(DatasetExistsError, match="what differs: the source: samples were added, removed or changed"):
        quiet(samples(11), tmp_path / "ds")
    assert contents_of(tmp_path / "ds") == before


def test_resume_false_starts_an_interrupted_pack_anew(interrupted, images, tmp_path):
    inodes = {p.name: p.stat().st_ino for p in interrupted.glob("*.tar")}
    os.link(interrupted / "ds-000000.tar", tmp_path / "kept")  # so that its inode is not reused
    quiet(ImageFolder(images), interrupted, shard_samples=4, num_workers=1, resume=False)

    assert (interrupted / "ds-000000.tar").stat().st_ino != inodes["ds-000000.tar"]
    with pytest.raises(DatasetExistsError, match="holds a dataset already"):
        quiet(ImageFolder(images), interrupted, shard_samples=4, num_workers=1, resume=False)


def test_what_is_to_be_replaced_stays_until_its_successor_is_planned(tmp_path, images):
    quiet(samples(10), tmp_path / "ds")
    before = contents_of(tmp_path / "ds")

    with pytest.raises(SampleError, match="more than once"):
        quiet([*samples(5), small(3)], tmp_path / "ds", overwrite=True)
    with pytest.raises(SampleError, match="pass larger shard_bytes"):
        quiet(ImageFolder(images), tmp_path / "ds", overwrite=True, shard_bytes=3000)
    assert contents_of(tmp_path / "ds") == before
    quiet(samples(3), tmp_path / "ds", overwrite=True)
    assert len(keys(tmp_path / "ds")) == 3


def test_files_of_others_are_left_alone_and_unknown_shards_are_refused(tmp_path):
    quiet(samples(3), tmp_path / "ds")
    (tmp_path / "ds/notes.txt").write_text("mine")
    (tmp_path / "ds/other-000000.tar").write_bytes(END_OF_ARCHIVE)
    quiet(samples(4), tmp_path / "ds", overwrite=True)

    assert (tmp_path / "ds/notes.txt").read_text() == "mine"
    assert (tmp_path / "ds/other-000000.tar").read_bytes() == END_OF_ARCHIVE
    (tmp_path / "dt").mkdir()
    (tmp_path / "dt/dt-000000.tar").write_bytes(END_OF_ARCHIVE)
    with pytest.raises(DatasetExistsError, match="holds shards that no manifest lists"):
        quiet(samples(3), tmp_path / "dt")


def test_splits_are_not_written_into_a_dataset(tmp_path):
    quiet(samples(3), tmp_path / "ds")

    with pytest.raises(DatasetExistsError, match=r"is a dataset itself \(manifest.json stands in it\)"):
        quiet(samples(3), tmp_path / "ds", splits=SPLITS)


def test_a_split_in_the_way_is_refused_before_another_is_touched(tmp_path):
    quiet(samples(3), tmp_path / "ds/val")

    with pytest.raises(DatasetExistsError, match=r"val: holds a dataset of another pack"):
        quiet(samples(100), tmp_path / "ds", splits=SPLITS)
    assert not (tmp_path / "ds/train").exists()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises((OSError, DatasetError)):
        quiet(samples(3), tmp_path / "file/ds")
