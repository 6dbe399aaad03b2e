"""A batch depends only on its samples: not on how they are read, by which worker, or after which batches."""

import pickle
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

import shardkit
from shardkit import Resize, ShardDataset, ShardLoader, ShardStream
from shardkit.codecs.registry import encode
from shardkit.errors import CodecError, SampleError, ShardkitError, TooManySkippedError
from shardkit.loading import columnar
from shardkit.loading.collate import collate
from shardkit.packing.indexing import index_shards
from shardkit.reading import access, extents, index_cache
from shardkit.reading.page_cache import OpenFile
from shardkit.transforms.apply import Transform
from tests.support.servers.programs import Nginx
from tests.support.shared import assert_same_batch, assert_same_value, examples, tar_of

pytestmark = pytest.mark.nightly

ARRAYS = [
    np.array,
    lambda i: np.array(i, np.uint8),
    lambda i: np.array(i / 2, np.float32),
    lambda i: np.full(3, i, np.uint8),
    lambda i: np.full((16, 16), i, np.float32),
    lambda i: np.full((16, 16, 3), i, np.uint8),
    lambda i: np.asfortranarray(np.full((16, 17), i)),
    lambda i: np.full(1 + i % 2, i),
    lambda i: np.full(5, i, ">i4"),
    lambda i: np.full((2, 0), i, np.int16),
    lambda i: np.array([f"{i}", "é"]),
    lambda i: np.full(300, i % 2 == 0),
]
# Possible values of a field in the i-th sample, some of which cannot be decoded.
VALUES = {
    "npy": ARRAYS,
    "a.npy": ARRAYS,
    "txt": [lambda i: f"text {i}", lambda _: "", lambda _: "größe\n", lambda _: b"\xff"],
    "cls": [lambda i: i, lambda i: -i, lambda _: b" 8 ", lambda _: b"007", lambda _: b"1_0", lambda _: b"9" * 30],
    "deep.er.id": [lambda i: 10**18 + i],
    "json": [
        lambda i: i,
        lambda i: i / 2,
        lambda _: True,
        lambda i: {"a": [i, None]},
        lambda _: b"null",
        lambda _: b"{",
    ],
    "bin": [lambda i: bytes(i % 5), lambda i: bytes([i % 256]) * 5000, lambda _: b"", lambda _: b"same"],
    "png": [
        lambda i: np.full((8, 9, 3), i, np.uint8),
        lambda i: np.full((8 + i % 2, 9, 3), i, np.uint8),
        lambda i: np.full((16, 16, 3), i, np.uint8),
        lambda _: b"?",
    ],
    "_own.cls": [lambda i: i],  # only tars of other programs have such names
}
KEYS = ["{:04d}".format, "é/{:05d}".format, lambda i: f"{'x' * (i % 3)}{i}", lambda i: f"{'y' * 120}{i:03d}"]


@st.composite
def datasets(draw):
    """Samples that are mostly alike, like those of a dataset; and whether another program wrote them."""
    is_strange = draw(st.booleans())
    names = sorted(VALUES) if is_strange else sorted(name for name in VALUES if name[0] != "_")
    fields = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    kinds = {field: draw(st.sampled_from(VALUES[field])) for field in fields}
    key_of = draw(st.sampled_from(KEYS))
    count = draw(st.integers(1, 8) | st.integers(60, 140))
    samples = [{"__key__": key_of(i), **{f: kinds[f](i) for f in fields}} for i in range(count)]
    for _ in range(draw(st.integers(0, 3))):
        i, field = draw(st.integers(0, count - 1)), draw(st.sampled_from(fields))
        change = draw(st.sampled_from(["value", "value", "missing", "order", "from here on"]))
        if change == "value":
            samples[i][field] = draw(st.sampled_from(VALUES[field]))(i)
        elif change == "missing" and len(samples[i]) > 2:
            samples[i].pop(field, None)
        elif change == "order":
            samples[i] = {"__key__": samples[i]["__key__"], **dict(reversed(samples[i].items()))}
        elif change == "from here on":
            make = draw(st.sampled_from(VALUES[field]))
            for j in range(i, count):
                samples[j][field] = make(j)
    return samples, is_strange


@st.composite
def choices(draw, samples):
    """How the samples are read: the options of a dataset and of a loader."""
    there = sorted({field for sample in samples for field in sample if field != "__key__"})
    some = draw(st.lists(st.sampled_from(there), min_size=1, unique=True))
    fields = draw(
        st.sampled_from(
            [
                None,
                None,
                tuple(some),
                tuple(f"{field}?" for field in some),
                {"x": ";".join(some), "y": f"{some[-1]}?"},
                {"x": f"{';'.join(there)}?"},
            ]
        )
    )
    of_dataset = {"fields": fields, "decode": draw(st.sampled_from([True, True, False]))}
    of_loader = {
        "batch_size": draw(st.integers(1, 40)),
        "lanes": draw(st.sampled_from([1, 3])),
        "on_error": draw(st.sampled_from(["raise", "skip"])),
        "seed": draw(st.integers(0, 3)),
    }
    functions = draw(st.sampled_from([None, None, None, same, with_itself, "resized", "resized, with itself"]))
    if "png" in there and fields is None and of_dataset["decode"] and isinstance(functions, str):
        is_last = functions == "resized"
        (of_loader if is_last else of_dataset)["transform"] = {"png": Resize((10, 11))}
        of_loader |= {} if is_last else {"transform": with_itself}
    elif not isinstance(functions, str):
        of_loader["transform"] = functions
    return of_dataset, of_loader


def same(sample):
    return sample


def with_itself(sample):
    """Return a sample with each array unchanged and inverted; the inverted ones have the old names."""
    arrays = {
        name: value for name, value in sample.items() if isinstance(value, np.ndarray) and value.dtype == np.uint8
    }
    return sample | {name: ~value for name, value in arrays.items()} | {f"old {n}": v for n, v in arrays.items()}


def the_long_way(dataset, before, *, batch_size, lanes, seed, on_error, transform=None, epoch=0):
    """Yield the batches of an epoch, each collated from samples read one by one, until an error of shardkit.

    The layout of the last batch is kept in ``before``, for a batch that has lost all of its samples.
    """
    plan = dataset.order(seed=seed, epoch=epoch, lanes=lanes)
    transform = Transform.parse(transform)
    for start in range(0, len(dataset), batch_size):
        positions = plan.deal(start, min(start + batch_size, len(dataset)), 0, 1)
        samples = []
        for number in plan.locate(positions).samples.tolist():
            try:
                sample = dataset[number]
                samples.append(transform(sample) if transform else sample)
            except (CodecError, SampleError):
                if on_error == "raise":
                    raise
        if samples:
            batch = collate(samples, selection=dataset.selection)
            before.clear()
            before |= {n: value[:0] if isinstance(value, torch.Tensor) else [] for n, value in batch.items()}
        elif not before:
            raise TooManySkippedError("all of the first batch")
        yield batch if samples else before.copy()


def until_error(batches):
    """Return the batches before an error of shardkit, and the error."""
    found = []
    try:
        found.extend(batches)
    except ShardkitError as error:
        is_ours = isinstance(error, CodecError | SampleError)
        return found, (type(error), error.key, error.field) if is_ours else type(error)
    return found, None


def two_epochs(dataset, **options):
    """Return the results of a loader's first epoch, and of its second, when it knows the layout of batches."""
    with ExitStack() as stack:
        loader = ShardLoader(dataset, max_skipped=1000, **options)
        stack.callback(loader.close)
        for epoch in range(2):
            loader.set_epoch(epoch)
            yield until_error(loader)


WAYS = {
    "by whole blocks": {},
    "row by row": {"transform": same},
    "one thread": {"num_workers": 1},
    "many threads": {"num_workers": 5},
    "of little memory": {"memory": 1},
    "of the page cache": {(access, "_LARGE_BYTES"): 0, (OpenFile, "is_resident"): lambda *_: True},
    "of blocks of large samples": {(access, "_LARGE_BYTES"): 0, (OpenFile, "is_resident"): lambda *_: False},
    "in parts": {(index_cache, "REQUEST_BYTES"): 0, (extents, "REQUEST_BYTES"): 0, (access, "REQUEST_BYTES"): 0},
    "by few headers at once": {(columnar, "_LEAST_REGULAR"): 2},
    "compressed": {"compression": "zst"},
    "into a cache": {"cache": "cache"},
    "of a cache": {"cache": "cache"},
    "by processes": {"worker_type": "process", "num_workers": 1},
    "remote": {"is_remote": True},
    "remote in parts": {"is_remote": True, (index_cache, "REQUEST_BYTES"): 0, (extents, "REQUEST_BYTES"): 0},
}


SLOW = {"by processes"}


@pytest.fixture(scope="module")
def server(processes, tmp_path_factory, authority):
    with Nginx(processes, tmp_path_factory.mktemp("ways") / "nginx", authority) as server:
        yield server


def write(folder, samples, compression, *, is_strange):
    """Write samples as a dataset: packed by shardkit, or as a tar of another program that gets an index."""
    if not is_strange:
        options = {"shard_samples": 50, "block_bytes": 60_000, "compression": compression, "progress": False}
        shardkit.pack(samples, folder, shuffle=False, **options)
        return
    folder.mkdir(parents=True)
    files = [(f"{s['__key__']}.{f}", encode(f, v)) for s in samples for f, v in s.items() if f != "__key__"]
    (folder / "theirs.tar").write_bytes(tar_of(files))
    index_shards(folder, block_bytes=60_000, progress=False)


def opened(way, folder, server, of_dataset, of_loader, stack):
    """Return the dataset and the loader's options for a way of reading."""
    of_dataset, of_loader, place = dict(of_dataset), dict(of_loader), folder / way.get("compression", "none")
    for name, value in way.items():
        if isinstance(name, tuple):
            stack.enter_context(mock.patch.object(*name, value))
        elif name == "is_remote":
            place = f"{server.url}/{place.relative_to(server.folder)}"
        elif name == "cache":
            of_dataset |= {"cache": folder / value, "cache_bytes": "1GB"}
        elif name != "compression" and not (name == "transform" and of_loader.get("transform")):
            of_loader[name] = value
    dataset = ShardDataset(place, **of_dataset)
    if "memory" in way:
        of_loader["memory"] = int(2 * (1 + of_loader["lanes"]) * dataset.block_bytes) + 1
    return dataset, of_loader


def compare(samples, of_dataset, of_loader, names, server, folder, *, is_strange):
    """Compare the batches of some ways of reading with those of the long way, and return those."""
    for compression in ("none", "zst"):
        if compression == "none" or ("compressed" in names and not is_strange):
            write(folder / compression, samples, compression, is_strange=is_strange)
    dataset = ShardDataset(folder / "none", **of_dataset)
    before = {}
    expected = [until_error(the_long_way(dataset, before, epoch=epoch, **of_loader)) for epoch in range(2)]
    for name in names:
        if name == "compressed" and is_strange:
            continue
        with ExitStack() as stack:
            dataset, options = opened(WAYS[name], folder, server, of_dataset, of_loader, stack)
            for (batches, error), (theirs, their_error) in zip(two_epochs(dataset, **options), expected, strict=True):
                assert error == their_error, name
                assert len(batches) == len(theirs), name
                for batch, other in zip(batches, theirs, strict=True):
                    assert_same_batch(batch, other)
    return expected


@given(data=st.data())
def test_a_batch_is_the_same_whatever_the_way(server, data):
    names = data.draw(st.lists(st.sampled_from(sorted(WAYS.keys() - SLOW)), min_size=4, max_size=4, unique=True))
    samples, is_strange = data.draw(datasets())
    with TemporaryDirectory(dir=server.folder) as folder:
        choice = data.draw(choices(samples))
        for batches, error in compare(samples, *choice, sorted(names), server, Path(folder), is_strange=is_strange):
            event(f"{'some' if batches else 'no'} batches, {'an error' if error else 'no error'}")


# Cases that were not the same in the past.
ONCE = {
    "ints and arrays of no dimensions": (
        [{"npy": np.array(i, "u1" if i == 70 else "<i8")} for i in range(140)],
        {},
        {},
    ),
    "an int or an array of no dimensions": (
        [{"npy": np.array(i)} if i < 60 else {"cls": i} for i in range(120)],
        {"fields": {"x": "cls;npy"}},
        {},
    ),
    "images that a later function still sees": (
        [{"png": np.full((16, 16, 3), i, np.uint8)} for i in range(40)],
        {"transform": {"png": Resize(16)}},
        {"transform": with_itself},
    ),
    "images that a later function of the same transform still sees": (
        [{"png": np.full((16, 16, 3), i, np.uint8), "x.npy": np.full((16, 16, 3), 99, np.uint8)} for i in range(40)],
        {},
        {"transform": {"png": Resize(16), ("png", "x.npy"): lambda two: {"png": two["x.npy"], "x.npy": two["png"]}}},
    ),
    "fields in another order": (
        [{"cls": i, "txt": ""} if i < 64 else {"txt": "", "cls": i} for i in range(128)],
        {},
        {},
    ),
    "fields in an order of each block": (
        [{"cls": i, "bin": b"b"} if i // 29 % 2 else {"bin": b"b", "cls": i} for i in range(116)],
        {},
        {},
    ),
    "a text that is none, in the middle": (
        [{"txt": b"\xff" if i == 70 else "text", "cls": i} for i in range(140)],
        {},
        {},
    ),
    "numbers that are none, left out": (
        [{"npy": np.full(3, i), "cls": b"?" if i % 9 == 7 else i} for i in range(140)],
        {},
        {"on_error": "skip"},
    ),
    "fields that begin with _": ([{"cls": i, "_own.cls": i} for i in range(64)], {}, {}),
}


@pytest.mark.parametrize("what", ONCE)
def test_what_once_was_not_the_same_is(server, what):
    parts, of_dataset, of_loader = ONCE[what]
    samples = [{"__key__": f"{i:04d}", **part} for i, part in enumerate(parts)]
    of_loader = {"batch_size": 6, "lanes": 3, "seed": 0, "on_error": "raise"} | of_loader
    with TemporaryDirectory(dir=server.folder) as folder:
        compare(samples, of_dataset, of_loader, WAYS.keys() - SLOW, server, Path(folder), is_strange="fields" in what)


@pytest.mark.multiprocess
@examples(1 / 16)
@given(data=st.data())
def test_a_batch_is_the_same_made_by_processes(server, data):
    samples, is_strange = data.draw(datasets())
    with TemporaryDirectory(dir=server.folder) as folder:
        compare(samples, *data.draw(choices(samples)), SLOW, server, Path(folder), is_strange=is_strange)


def what_comes_of(read, *args):
    """Return a sample that was read, or the error."""
    try:
        return read(*args)
    except (CodecError, SampleError) as error:
        return type(error), error.key, error.field


def all_of(dataset):
    """Return the result of reading each sample of a dataset."""
    return [what_comes_of(dataset.__getitem__, i) for i in range(len(dataset))]


def without_urls(samples):
    return [{n: v for n, v in one.items() if n != "__url__"} if isinstance(one, dict) else one for one in samples]


@examples(1 / 2)
@given(data=st.data())
def test_a_sample_is_the_same_whatever_the_way(server, data):
    samples, is_strange = data.draw(datasets())
    of_dataset, _ = data.draw(choices(samples))
    with TemporaryDirectory(dir=server.folder) as name:
        folder = Path(name)
        write(folder / "none", samples, "none", is_strange=is_strange)
        dataset = ShardDataset(folder / "none", **of_dataset)
        keys, each = [sample["__key__"] for sample in samples], all_of(dataset)
        right = [i for i, sample in enumerate(each) if isinstance(sample, dict)]
        some, i = data.draw(st.slices(len(samples))), data.draw(st.integers(0, len(samples) - 1))
        chosen = range(len(samples))[some]

        assert dataset.keys() == keys
        if {*chosen} <= {*right}:
            assert_same_value(dataset[some], [each[j] for j in chosen])
        assert_same_value(what_comes_of(dataset.by_key, keys[i]), each[i])
        assert_same_value(what_comes_of(pickle.loads(pickle.dumps(dataset)).__getitem__, i - len(samples)), each[i])

        condition = ("__key__", "in", [keys[j] for j in chosen] + ["nobody's"])
        where = ShardDataset(folder / "none", where=[condition], **of_dataset)
        assert_same_value(all_of(where), [each[j] for j in sorted(chosen)])
        assert_same_value(all_of(dataset.subset(chosen)), [each[j] for j in sorted(chosen)])

        stream = ShardStream(folder / "none", shuffle=False, on_error="skip", max_skipped=1000, **of_dataset)
        assert_same_value(list(stream), [each[j] for j in right])

        others = [ShardDataset(f"{server.url}/{folder.name}/none", **of_dataset)]
        others += [ShardDataset(folder / "none", cache=folder / "cache", cache_bytes="1GB", **of_dataset)] * 2
        if not is_strange:
            write(folder / "zst", samples, "zst", is_strange=False)
            others.append(ShardDataset(folder / "zst", **of_dataset))
        for other in others:
            assert_same_value(without_urls(all_of(other)), without_urls(each))
