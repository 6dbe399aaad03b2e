"""Batches are written row by row into their own memory: the result is the same, whatever the rows are like."""

import gc
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import shardkit
from shardkit import RandomResizedCrop, Resize, ShardDataset, ShardLoader
from shardkit.loading.batch_memory import BatchMaker
from shardkit.loading.collate import collate
from shardkit.reading.memory import Buffers, SharedBuffers
from shardkit.sample import FieldSelection
from shardkit.transforms.apply import Transform
from tests.support.shared import PHOTO, assert_same_batch, examples, saved

SELECTION = FieldSelection.parse({"image": "jpg", "x": "npy"})


def array(shape=(10, 10, 3), dtype="u1", seed=0):
    return np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)


VALUES = {
    "image": lambda seed: array(seed=seed),
    "large": lambda seed: array((20, 20, 3), seed=seed),
    "floats": lambda seed: array((9, 9), "<f4", seed),
    "big-endian": lambda seed: array((9, 9), ">f4", seed),
    "small": lambda seed: array((3,), seed=seed),
    "number": lambda seed: seed,
    "text": str,
    "none": lambda _: None,
    "reversed": lambda seed: array(seed=seed)[::-1, ::-1],
    "fortran": lambda seed: np.asfortranarray(array(seed=seed)),
    "matrix": lambda seed: array(seed=seed).view(np.recarray),
    "tensor": lambda seed: torch.from_numpy(array(seed=seed)),
    "channels last": lambda seed: torch.from_numpy(array(seed=seed)).permute(2, 0, 1),
    "floats of torch": lambda seed: torch.full((3, 99), seed + 0.5),
    "bfloat16": lambda seed: torch.full((300,), seed + 0.5).bfloat16(),
    "gradient": lambda seed: torch.full((300,), seed + 0.5, requires_grad=True),
    "complex": lambda seed: torch.full((300,), seed + 1j),
    "conjugate": lambda seed: torch.full((300,), seed + 1j).conj(),
}


def made(make_batch, samples, dropped):
    """Return a batch as the engine makes it."""
    slab = make_batch.slab(len(samples))
    values = [slab.put(sample, slab.row(i)) if slab else sample for i, sample in enumerate(samples)]
    kept = [i for i in range(len(samples)) if i not in dropped]
    return make_batch.batch([values[i] for i in kept], slab, kept), slab


kinds = st.sampled_from(sorted(VALUES))


@examples(6)
@given(
    batches=st.lists(
        st.tuples(
            kinds,
            kinds,
            st.integers(1, 5),
            st.dictionaries(st.integers(0, 4), kinds, max_size=2),
            st.sets(st.integers(0, 4), max_size=1),
        ),
        min_size=1,
        max_size=4,
    )
)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_batches_are_what_collating_their_samples_gives(batches):
    make_batch = BatchMaker(SELECTION, None, Buffers(1_000_000))
    results = []
    for image, x, count, others, dropped in batches:
        samples = [
            {"__key__": f"{i}", "image": VALUES[others.get(i, image)](i), "x": VALUES[x](i)} for i in range(count)
        ]
        batch, _ = made(make_batch, samples, dropped)
        left = [one for i, one in enumerate(samples) if i not in dropped]
        if not left:
            assert batch is None
            continue
        expected = collate(left, selection=SELECTION)
        assert_same_batch(batch, expected)
        results.append((batch, expected))

    for batch, expected in results:  # later batches do not change those that are kept
        assert_same_batch(batch, expected)


@pytest.mark.parametrize(
    "kind", ["image", "floats", "tensor", "floats of torch", "complex", "reversed", "channels last"]
)
def test_from_the_second_batch_on_values_are_in_its_memory_and_nowhere_else(kind):
    make_batch = BatchMaker(SELECTION, None, Buffers(1_000_000))
    samples = [{"__key__": f"{i}", "image": VALUES[kind](i)} for i in range(4)]

    _, none = made(make_batch, samples, set())
    batch, slab = made(make_batch, samples, set())

    assert none is None
    addresses = [slab.row(i)["image"].ctypes.data for i in range(4)]
    assert batch["image"].data_ptr() == addresses[0]
    assert {b - a for a, b in pairwise(addresses)} == {batch["image"].element_size() * batch["image"][0].numel()}


def test_batches_that_change_get_memory_that_fits_from_the_next_one_on():
    make_batch = BatchMaker(SELECTION, None, Buffers(1_000_000))
    slabs = []
    for kind in ("image", "image", "large", "large", "number", "number"):
        samples = [{"__key__": f"{i}", "image": VALUES[kind](i), "x": VALUES["floats"](i)} for i in range(4)]
        slabs.append(made(make_batch, samples, set())[1])

    shapes = [{name: column.shape for name, column in slab.columns.items()} for slab in slabs[1:]]
    assert [shape.get("image") for shape in shapes] == [(10, 10, 3), (10, 10, 3), (20, 20, 3), (20, 20, 3), None]
    assert [shape["x"] for shape in shapes] == [(9, 9)] * 5


def test_a_transform_that_always_returns_the_same_dict_is_not_written_to():
    make_batch = BatchMaker(SELECTION, None, Buffers(1_000_000))
    same = {"__key__": "a", "image": array()}

    for _ in range(3):
        batch, _ = made(make_batch, [same, same], set())
        assert isinstance(same["image"], np.ndarray)
        assert (batch["image"] == torch.from_numpy(array()).permute(2, 0, 1)).all()


def test_memory_is_pinned_where_there_is_a_gpu(monkeypatch):
    asked, empty = [], torch.empty

    def without_gpu(*size, pin_memory, **options):
        asked.append(pin_memory)
        return empty(*size, **options)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", without_gpu)
    make_batch = BatchMaker(SELECTION, None, Buffers(1_000_000))
    samples = [{"__key__": f"{i}", "image": VALUES["image"](i)} for i in range(4)]
    made(make_batch, samples, set())
    batch, _ = made(make_batch, samples, set())

    assert asked == [True]
    for _ in range(2):  # memory that processes write to is not pinned
        made(BatchMaker(SELECTION, None, SharedBuffers(1_000_000)), samples, set())
    assert asked == [True]
    assert_same_batch(batch, collate(samples, selection=SELECTION))


# -- with real loaders


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slabs") / "train"
    samples = (
        {
            "__key__": f"{i:04d}",
            "jpg": saved(Image.fromarray(np.roll(PHOTO, i, 0)), "JPEG"),
            "npy": array(seed=i),
            "cls": i,
        }
        for i in range(150)
    )
    shardkit.pack(samples, folder, shard_bytes="100kB", block_bytes="20kB", progress=False)
    return folder


def halve(sample, rng):
    return sample | {"half": sample["npy"].astype(np.float32) / 2, "noise": np.full((8, 8), rng.random())}


def load(folder, worker_type="thread", epochs=2, transform=None, **options):
    """Return epochs of batches, all kept."""
    dataset = ShardDataset(folder, fields={"image": "jpg", "npy": "npy", "label": "cls"}, transform=transform)
    crop = {"image": RandomResizedCrop(32)}
    loader = ShardLoader(dataset, 16, transform=crop, worker_type=worker_type, num_workers=2, **options)
    try:
        return [batch for _ in range(epochs) for batch in loader]
    finally:
        loader.close()


@pytest.mark.parametrize("worker_type", ["thread", "process"])
@pytest.mark.parametrize("transform", [None, halve])
def test_loaders_give_what_collating_gives_and_kept_batches_stay(folder, worker_type, transform):
    selection = ShardDataset(folder, fields={"image": "jpg", "npy": "npy", "label": "cls"}).selection
    expected = load(folder, transform=transform, collate_fn=partial(collate, selection=selection))
    batches = load(folder, worker_type, transform=transform)

    assert len(batches) == len(expected) == 20
    for ours, theirs in zip(batches, expected, strict=True):
        assert_same_batch(ours, theirs)


def inverted(sample):
    return {"image": ~sample["image"], "old": sample["image"]}


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_what_a_transform_is_given_stays_what_it_is_while_the_batch_is_written(folder, worker_type):
    dataset = ShardDataset(folder, fields={"image": "jpg"}, transform={"image": Resize(32)})
    loader = ShardLoader(dataset, 16, transform=inverted, worker_type=worker_type, num_workers=2)
    expected = {key: dataset.by_key(key)["image"] for key in dataset.keys()[:20]}
    for _ in range(2):  # from the second epoch on, the form of batches is known
        for batch in loader:
            assert torch.equal(batch["image"], ~batch["old"].permute(0, 3, 1, 2))
            for key, image in zip(batch["__key__"], batch["old"].numpy(), strict=True):
                assert np.array_equal(image, expected.get(key, image))
    loader.close()


def test_only_the_last_function_of_a_field_writes_into_the_batch():
    functions = {"image": Resize(32), ("image", "other"): lambda both: {"image": both["other"], "other": both["image"]}}
    transform, rows = Transform.parse(functions), {"image": np.zeros((32, 32, 3), np.uint8)}
    sample = transform({"image": PHOTO, "other": PHOTO[:32, :32]}, None, rows)

    assert np.array_equal(sample["other"], Resize(32)(PHOTO))
    assert not rows["image"].any()
    assert transform.functions[0].function.apply({"image": PHOTO}, None, rows)["image"] is rows["image"]


def descriptors():
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def mapping_of(address):
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, stop = line.split()[0].partition("-")
        if int(start, 16) <= address < int(stop, 16):
            return line
    return ""


@pytest.mark.multiprocess
def test_processes_write_into_the_batch_itself_through_memory_without_a_name(folder):
    batches = load(folder, "process", transform=halve)

    # In the first epoch, many batches are begun before one is complete and shows their form.
    for batch in batches[10:]:
        for name in ("image", "npy", "half", "noise"):
            assert "/memfd:shardkit (deleted)" in mapping_of(batch[name].data_ptr())


@pytest.mark.multiprocess
def test_descriptors_of_shared_memory_are_closed_with_it(folder):
    load(folder, "process", epochs=1)
    gc.collect()
    before = len(descriptors())
    load(folder, "process", epochs=3)
    gc.collect()

    assert len(descriptors()) == before


def test_shared_buffers_are_used_again_and_closed():
    before = descriptors()
    buffers = SharedBuffers(1_000_000)
    address = buffers.take(5000).ctypes.data

    assert buffers.take(5000).ctypes.data == address
    del buffers
    gc.collect()
    assert descriptors() <= before


def test_few_large_batches_are_made_ahead(folder):
    def enlarge(sample):
        return sample | {"npy": np.full((2, 1_000_000), len(sample["__key__"]), np.uint8)}

    loader = ShardLoader(ShardDataset(folder, fields=["npy"]), 20, transform=enlarge, num_workers=2)
    for _ in range(2):  # in the first epoch, their size is not known yet
        for _ in loader:
            pass

    buffers = loader._make_batch._buffers
    assert len(buffers._users) + sum(map(len, buffers._free.values())) <= 5
