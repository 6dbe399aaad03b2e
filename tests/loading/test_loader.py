"""ShardLoader yields every sample exactly once, in the same order anywhere, and resumes between any two batches."""

import copy
import gc
import json
import multiprocessing
import os
import pickle
import signal
import sys
import textwrap
import threading
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

import shardkit
from shardkit import ShardDataset, ShardLoader
from shardkit.loading.collate import stack
from shardkit.testing import assert_resumes_anywhere
from tests.support.shared import started

COUNT = 211
SMALL = {"shard_bytes": 60_000, "block_bytes": 9_000, "progress": False}  # 8 shards of about 4 blocks of 7 samples


def make_samples(count=COUNT):
    rng = np.random.default_rng(0)
    for i in range(count):
        yield {"__key__": f"{i:04d}", "cls": i, "npy": rng.integers(0, 256, (4, 5), dtype=np.uint8), "txt": f"text {i}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loader")
    for compression in ("none", "zst"):
        shardkit.pack(make_samples(), folder / compression / "train", compression=compression, **SMALL)
    return folder


@pytest.fixture(scope="module")
def dataset(folder):
    return ShardDataset(folder / "none" / "train")


def keys_of(batches):
    return [key for batch in batches for key in batch["__key__"]]


def every_rank(dataset, batch_size, world_size, *, take=None, state=None, **options):
    """Return each rank's batches, and the ranks' states after them."""
    batches, states = [], []
    for rank in range(world_size):
        loader = ShardLoader(dataset, batch_size, rank=rank, world_size=world_size, num_workers=1, **options)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        batches.append(list(islice(iter(loader), take)))
        states.append(loader.state_dict())
    return batches, states


def add_noise(sample, rng):
    return sample | {"noise": rng.random()}


def fail_at_0100(sample):
    if sample["__key__"] == "0100":
        raise KeyError("no such thing")
    return sample


def die_at_0100(sample):
    if sample["__key__"] == "0100":
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


# -- exactly once, the same order anywhere


@given(batch_size=st.integers(1, 80), world_size=st.integers(1, 9), epoch=st.integers(0, 3), drop_last=st.booleans())
def test_every_sample_comes_once_and_every_rank_has_as_many_batches(dataset, batch_size, world_size, epoch, drop_last):
    ranks = []
    for rank in range(world_size):
        loader = ShardLoader(dataset, batch_size, rank=rank, world_size=world_size, num_workers=1, drop_last=drop_last)
        loader.set_epoch(epoch)
        length = len(loader)
        ranks.append(list(loader))
        assert len(ranks[-1]) == length

    assert len({len(batches) for batches in ranks}) == 1
    assert all(batch["__key__"] for batches in ranks for batch in batches)
    keys = [key for batches in ranks for key in keys_of(batches)]
    expected = COUNT // (batch_size * world_size) * batch_size * world_size if drop_last else COUNT
    assert len(keys) == len(set(keys)) == expected


@given(world_size=st.sampled_from([2, 3, 4, 5, 7, 12]), data=st.data())
def test_a_global_batch_has_the_same_samples_for_any_number_of_ranks(dataset, world_size, data):
    batch_size = data.draw(st.integers(1, 9))
    alone = list(ShardLoader(dataset, batch_size * world_size, num_workers=1, rank=0, world_size=1))

    ranks, _ = every_rank(dataset, batch_size, world_size)

    together = [sorted(keys_of(batches)) for batches in zip(*ranks, strict=True)]
    expected = [sorted(batch["__key__"]) for batch in alone]
    if len(together) < len(expected):  # samples that would leave a rank empty joined the batch before
        expected[-2:] = [sorted(expected[-2] + expected[-1])]
    assert together == expected


@pytest.mark.parametrize("compression", ["none", "zst"])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 7}, {"memory": "661kB"}])
def test_workers_memory_and_compression_change_nothing(folder, compression, options):
    expected = list(ShardLoader(ShardDataset(folder / "none" / "train"), 16, transform=add_noise, num_workers=2))

    found = list(ShardLoader(ShardDataset(folder / compression / "train"), 16, transform=add_noise, **options))

    assert keys_of(found) == keys_of(expected)
    assert all(torch.equal(one["noise"], other["noise"]) for one, other in zip(found, expected, strict=True))
    assert all(torch.equal(one["npy"], other["npy"]) for one, other in zip(found, expected, strict=True))


def test_processes_give_the_same_batches(dataset):
    expected = list(ShardLoader(dataset, 16, transform=add_noise))
    loader = ShardLoader(dataset, 16, transform=add_noise, num_workers=2, worker_type="process")

    found = list(loader)

    loader.close()
    assert keys_of(found) == keys_of(expected)
    assert all(torch.equal(one["noise"], other["noise"]) for one, other in zip(found, expected, strict=True))


def test_epochs_and_seeds_have_orders_of_their_own(dataset):
    orders = []
    for seed in (0, 1):
        loader = ShardLoader(dataset, 10, seed=seed)
        orders += [keys_of(loader), keys_of(loader)]

    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == sorted(orders[0]) for order in orders)


def test_unshuffled_is_the_order_of_the_manifest(dataset):
    loader = ShardLoader(dataset, 10, shuffle=False)

    assert keys_of(loader) == keys_of(loader) == dataset.keys()


@given(schedule=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=5))
def test_any_change_of_ranks_and_batch_size_goes_on_exactly_once(dataset, schedule):
    state, seen = None, []
    for world_size, batch_size, take in schedule:
        if state is not None and 0 < COUNT - state["position"] < world_size:
            break  # tested below
        ranks, states = every_rank(dataset, batch_size, world_size, take=take, state=state)
        assert all(other == states[0] for other in states)
        assert len({len(batches) for batches in ranks}) == 1
        seen += [key for batches in ranks for key in keys_of(batches)]
        state = states[0]
        if state["epoch"] == 1:
            break
    if state["epoch"] == 0:
        ranks, _ = every_rank(dataset, 8, 1, state=state)
        seen += keys_of(ranks[0])

    assert len(seen) == len(set(seen)) == COUNT


def test_a_state_with_fewer_samples_left_than_ranks_is_refused_on_every_rank(dataset):
    state = ShardLoader(dataset, 8).state_dict() | {"position": COUNT - 2}
    for rank in range(3):
        loader = ShardLoader(dataset, 8, rank=rank, world_size=3)
        loader.load_state_dict(state)

        with pytest.raises(shardkit.StateError, match="2 samples remain, fewer than the 3 ranks"):
            iter(loader)

    loader.set_epoch(1)  # as the message says

    assert len(keys_of(loader)) > 60


def test_a_dataset_of_fewer_samples_than_ranks_is_refused_and_drop_last_leaves_it_out(dataset):
    three = dataset.subset(range(3))

    with pytest.raises(shardkit.ArgumentError, match="the dataset has 3 samples, fewer than the 4 ranks"):
        iter(ShardLoader(three, 2, rank=0, world_size=4))
    assert list(ShardLoader(three, 2, rank=0, world_size=4, drop_last=True)) == []


def test_a_sample_that_no_rank_may_have_alone_joins_the_batch_before(tmp_path):
    shardkit.pack(make_samples(9), tmp_path / "nine", **SMALL)

    ranks, _ = every_rank(ShardDataset(tmp_path / "nine"), 2, 4)

    assert [[len(batch["__key__"]) for batch in batches] for batches in ranks] in (
        [[3], [2], [2], [2]],
        [[2], [2], [2], [3]],
    )


# -- resuming


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"drop_last": True}, {"world_size": 3, "rank": 1}])
def test_it_resumes_anywhere(dataset, options):
    assert_resumes_anywhere(lambda: ShardLoader(dataset, 40, transform=add_noise, num_workers=2, **options))


def test_it_resumes_anywhere_with_other_workers_and_another_batch_size(folder):
    plain, compressed = ShardDataset(folder / "none" / "train"), ShardDataset(folder / "zst" / "train")

    assert_resumes_anywhere(
        lambda: ShardLoader(plain, 32, num_workers=2),
        resume_with=lambda: ShardLoader(compressed, 19, num_workers=3, memory="2MB"),
    )


def test_a_state_is_small_json_and_the_same_on_every_rank(dataset):
    _, states = every_rank(dataset, 8, 3, take=4)

    assert all(state == states[0] for state in states)
    assert len(json.dumps(states[0])) < 400
    assert states[0]["position"] == 4 * 8 * 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 5}, "seed 5, this loader has 0; pass seed=5"),
        ({"lanes": 3}, "lanes 3, this loader has .*; pass lanes=3"),
        ({"shuffle": False}, "shuffle False, this loader has True; pass shuffle=False"),
        (
            {"dataset": "0" * 64},
            r"dataset '0{12}\.\.\.', this loader has '\w{12}\.\.\.'; open the dataset and the selection",
        ),
        ({"block_samples": 99}, "block_samples 99.* restore its index"),
        ({"version": 2}, "of version 2, this shardkit reads version 1"),
        ({"position": -1}, "position -1, expected a number from 0 to 211"),
        ({"position": 212}, "position 212, expected"),
        ({"epoch": "0"}, "epoch '0', expected"),
        ({"seed": False}, "seed False"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(dataset, change, says):
    loader = ShardLoader(dataset, 8)
    before = next(iter(loader))["__key__"]
    state = loader.state_dict()

    with pytest.raises(shardkit.StateError, match=says):
        loader.load_state_dict(state | change)
    assert loader.state_dict() == state

    loader.load_state_dict(state)

    assert len(set(before) | set(keys_of(loader))) == COUNT


def test_a_state_of_another_order_is_refused_for_what_the_user_can_change(dataset):
    state = ShardLoader(dataset, 8).state_dict()

    with pytest.raises(shardkit.StateError, match="pass shuffle=True"):
        ShardLoader(dataset, 8, shuffle=False).load_state_dict(state)


@pytest.mark.parametrize("state", [None, {}, {"epoch": 1}, "text"])
def test_what_is_no_state_is_refused(dataset, state):
    with pytest.raises(shardkit.StateError, match="is not a state of a ShardLoader"):
        ShardLoader(dataset, 8).load_state_dict(state)


def test_another_selection_is_another_dataset(dataset):
    state = ShardLoader(dataset, 8).state_dict()

    with pytest.raises(shardkit.StateError, match="open the dataset and the selection"):
        ShardLoader(dataset.subset(range(100)), 8).load_state_dict(state)


def test_a_loop_that_asks_for_a_sampler_is_told_what_to_do(dataset):
    """Accelerate's skip_first_batches would turn it into a DataLoader, without the transform."""
    loader = ShardLoader(dataset, 8)

    assert not hasattr(loader, "sampler")
    assert not hasattr(loader, "batch_sampler")
    with pytest.raises(
        AttributeError, match=r"no sampler.*ignore_data_skip=True.*load_state_dict\(\) in on_train_begin"
    ):
        _ = loader.sampler


# -- epochs


def test_leaving_an_epoch_early_begins_the_next(dataset):
    expected = ShardLoader(dataset, 10)
    first, second = keys_of(expected), keys_of(expected)
    loader = ShardLoader(dataset, 10)
    for batch in loader:
        assert batch["__key__"] == first[:10]
        break

    assert keys_of(loader) == second


def test_set_epoch_begins_that_epoch_but_not_over_a_state_of_it(dataset):
    loader = ShardLoader(dataset, 10)
    zero, one = keys_of(loader), keys_of(loader)
    loader.set_epoch(0)
    again = keys_of(loader)
    loader.set_epoch(1)
    batches = iter(loader)
    taken = next(batches)["__key__"]
    resumed = ShardLoader(dataset, 10)
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(1)

    assert (again, taken + keys_of(resumed)) == (zero, one)


def test_len_is_what_comes_also_after_resuming(dataset):
    loader = ShardLoader(dataset, 50)
    before = len(loader)
    batches = iter(loader)
    next(batches)
    resumed = ShardLoader(dataset, 50)
    resumed.load_state_dict(loader.state_dict())

    assert (before, len(resumed), len(list(resumed)), len(resumed)) == (5, 4, 4, 5)


def test_an_iterator_that_was_left_behind_does_not_move_the_state(dataset):
    loader = ShardLoader(dataset, 10)
    old, new = iter(loader), None
    next(old)
    new = iter(loader)
    next(new)
    state = loader.state_dict()
    next(old)

    assert loader.state_dict() == state
    assert (state["epoch"], state["position"]) == (1, 10)


# -- the contents of a batch


def test_a_batch_is_a_dict_of_tensors_where_values_are_alike_and_lists_where_not(dataset):
    batch = next(iter(ShardLoader(dataset, 6, shuffle=False)))

    keys = dataset.keys()[:6]
    assert batch["__key__"] == keys
    assert batch["cls"].tolist() == [int(key) for key in keys]
    assert batch["cls"].dtype == torch.int64
    assert (batch["npy"].shape, batch["npy"].dtype) == ((6, 4, 5), torch.uint8)
    assert batch["txt"] == [f"text {int(key)}" for key in keys]
    assert set(batch) == {"__key__", "cls", "npy", "txt"}


def test_images_have_their_channels_first_and_last_in_memory(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (7, 5, 6, 3), dtype=np.uint8)
    samples = ({"__key__": f"{i}", "png": image, "npy": image} for i, image in enumerate(pixels))
    shardkit.pack(samples, tmp_path / "images", shuffle=False, **SMALL)

    (batch,) = ShardLoader(ShardDataset(tmp_path / "images", fields={"x": "png", "npy": "npy"}), 7, shuffle=False)

    assert batch["x"].is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_array_equal(batch["x"].permute(0, 2, 3, 1), pixels)
    np.testing.assert_array_equal(batch["npy"], pixels)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2], torch.tensor([1, 2])),
        ([1.5, 2.5], torch.tensor([1.5, 2.5], dtype=torch.float64)),
        ([True, False], torch.tensor([True, False])),
        ([np.float32(1), np.float32(2)], torch.tensor([1.0, 2.0])),
        ([torch.ones(2), torch.zeros(2)], torch.tensor([[1.0, 1.0], [0.0, 0.0]])),
        ([np.ones(()), np.zeros(())], torch.tensor([1.0, 0.0], dtype=torch.float64)),
        ([1, 2.5], None),
        ([1, True], None),
        ([1, None], None),
        ([2**70, 1], None),
        (["a", "b"], None),
        ([b"a", b"b"], None),
        ([np.array("a"), np.array("b")], None),
        ([np.ones(2), np.ones(3)], None),
        ([np.ones(2), np.ones(2, dtype=np.float32)], None),
        ([np.ones(2, dtype=">f8"), np.ones(2, dtype=">f8")], None),
        ([torch.ones(2), torch.ones(3)], None),
        ([], None),
    ],
)
def test_what_is_alike_is_stacked(values, expected):
    found = stack(values)

    if expected is None:
        assert found is values
    else:
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_samples_of_other_fields_in_a_batch_are_an_error(tmp_path):
    samples = ({"__key__": f"{i}", "cls": i, **({"txt": "x"} if i == 3 else {})} for i in range(6))
    shardkit.pack(samples, tmp_path / "mixed", **SMALL)

    with pytest.raises(shardkit.SampleError, match=r"choose with fields=.*'name\?' gives None"):
        list(ShardLoader(ShardDataset(tmp_path / "mixed"), 6))
    (batch,) = ShardLoader(ShardDataset(tmp_path / "mixed", fields=["cls", "txt?"]), 6, shuffle=False)

    assert sorted(batch["txt"], key=str) == [None] * 5 + ["x"]


def test_collate_fn_makes_the_batch(dataset):
    loader = ShardLoader(dataset, 10, collate_fn=lambda samples: [sample["cls"] for sample in samples], shuffle=False)

    assert next(iter(loader)) == [int(key) for key in dataset.keys()[:10]]


def without_a_dict(sample):
    return sample["__key__"], sample["cls"]


def test_a_transform_that_returns_no_dict_needs_a_collate_fn(dataset):
    with pytest.raises(shardkit.ArgumentError, match=r"returned a tuple, expected a dict of fields; .* collate_fn"):
        next(iter(ShardLoader(dataset, 8, transform=without_a_dict)))

    keys, labels = next(iter(ShardLoader(dataset, 8, transform=without_a_dict, collate_fn=default_collate)))

    assert (len(keys), labels.shape) == (8, (8,))


def test_undecoded_fields_are_bytes(folder):
    dataset = ShardDataset(folder / "none" / "train", decode=False, fields=["txt"])

    batch = next(iter(ShardLoader(dataset, 3, shuffle=False)))

    assert batch["txt"] == [f"text {int(key)}".encode() for key in batch["__key__"]]
    assert {type(value) for value in batch["txt"]} == {bytes}


# -- errors, at their place


def position_of(dataset, key):
    return keys_of(ShardLoader(dataset, 1)).index(key)


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_an_error_of_a_transform_comes_where_its_batch_would(dataset, worker_type):
    place = position_of(dataset, "0100")
    loader = ShardLoader(dataset, 4, transform=fail_at_0100, worker_type=worker_type, num_workers=2)
    batches = iter(loader)
    before = list(islice(batches, place // 4))

    with pytest.raises(KeyError, match="no such thing") as error:
        next(batches)
    loader.close()

    assert len(before) == place // 4
    assert "sample '0100'" in "".join(error.value.__notes__)
    assert loader.state_dict()["position"] == place // 4 * 4


def test_a_worker_process_that_dies_is_an_error_and_the_next_epoch_goes_on(dataset):
    loader = ShardLoader(dataset, 8, transform=die_at_0100, worker_type="process", num_workers=2)

    with pytest.raises(shardkit.WorkerError, match="signal 9"):
        list(loader)

    loader.set_epoch(0)
    place = position_of(dataset, "0100")
    assert len(list(islice(iter(loader), place // 8))) == place // 8
    loader.close()


class Unloadable:
    """A transform that fails when a process unpickles it."""

    def __call__(self, sample):
        return sample

    def __reduce__(self):
        return dict.__getitem__, ({}, "no such thing")


@pytest.mark.multiprocess
def test_an_error_in_a_process_before_it_makes_rows_is_the_error_of_the_pass(dataset):
    loader = ShardLoader(dataset, 8, transform=Unloadable(), worker_type="process", num_workers=1)
    for _ in range(2):
        with pytest.raises(KeyError, match="no such thing"):
            next(iter(loader))
    loader.close()

    assert [child for child in multiprocessing.active_children() if child.name == "shardkit-rows"] == []


class OddError(Exception):
    """An error that cannot be rebuilt from its message."""

    def __init__(self, what, how):
        super().__init__(f"{what} {how}")


def raise_oddly(sample):
    if sample["__key__"] == "0100":
        raise OddError("no", "way")
    return sample


@pytest.mark.multiprocess
def test_an_error_that_cannot_be_sent_ends_the_pass_with_its_text_and_others_go_on(dataset):
    loader = ShardLoader(dataset, 8, transform=raise_oddly, worker_type="process", num_workers=1)
    for _ in range(2):
        loader.set_epoch(0)
        with pytest.raises(shardkit.WorkerError, match=r"(?s)an error that cannot be sent.*OddError: no way"):
            list(loader)

        assert [child.name for child in multiprocessing.active_children()].count("shardkit-rows") == 1
    loader.close()


def test_transforms_that_cannot_be_sent_are_refused_at_once(dataset):
    with pytest.raises(shardkit.ArgumentError, match="must be picklable"):
        ShardLoader(dataset, 8, transform=lambda sample: sample, worker_type="process")


@pytest.fixture
def damaged(tmp_path):
    """A dataset in which the data of one field is changed, so that its whole block is refused."""
    folder = tmp_path / "damaged"
    shardkit.pack(make_samples(), folder, compression="none", **SMALL)
    shard = sorted(folder.glob("*.tar"))[3]
    data = bytearray(shard.read_bytes())
    data[data.index(b"text ")] ^= 1
    shard.write_bytes(data)
    return folder


def test_damage_comes_where_its_batch_would(damaged):
    loader = ShardLoader(ShardDataset(damaged), 1)
    seen = []

    with pytest.raises(shardkit.ShardError, match=r"000003\.tar"):
        seen.extend(batch["__key__"] for batch in loader)

    assert loader.state_dict()["position"] == len(seen)


def test_damage_is_skipped_when_asked_counted_and_bounded(damaged):
    dataset = ShardDataset(damaged)
    size = dataset.manifest.block_samples
    loader = ShardLoader(dataset, 16, on_error="skip")
    batches = list(loader)

    assert len(batches) == len(loader)
    assert 0 < loader.skipped <= size
    assert len(set(keys_of(batches))) == COUNT - loader.skipped
    assert loader.state_dict()["epoch"] == 1

    strict = ShardLoader(dataset, 16, on_error="skip", max_skipped=loader.skipped - 1)
    with pytest.raises(shardkit.TooManySkippedError, match="samples were skipped, expected at most max_skipped="):
        list(strict)


def test_what_a_transform_raises_is_never_skipped(dataset):
    with pytest.raises(KeyError):
        list(ShardLoader(dataset, 8, transform=fail_at_0100, on_error="skip"))


@pytest.fixture
def gaps(tmp_path):
    """A dataset of ten samples, of which only the third and the fourth can be decoded."""
    samples = ({"__key__": f"{i}", "json": b"{}" if i in (2, 3) else b"{", "npy": np.zeros((3, i))} for i in range(10))
    shardkit.pack(samples, tmp_path / "gaps", shuffle=False, **SMALL)
    return ShardDataset(tmp_path / "gaps")


def test_a_first_batch_of_which_everything_is_skipped_is_an_error_that_says_so(gaps):
    loader = ShardLoader(gaps, 2, shuffle=False, on_error="skip")
    batches = iter(loader)

    says = "all samples of a batch were skipped, and there is no batch before it to copy the fields from"
    with pytest.raises(shardkit.TooManySkippedError, match=says):
        next(batches)
    assert list(batches) == []
    assert (loader.skipped, loader.state_dict()["position"]) == (2, 0)
    assert wait_for_no_threads() == []


def test_collate_fn_gets_an_empty_list_where_everything_is_skipped(gaps):
    sizes = ShardLoader(gaps, 2, shuffle=False, on_error="skip", collate_fn=len)

    assert list(sizes) == [0, 2, 0, 0, 0]
    with pytest.raises(IndexError) as raised:
        next(iter(ShardLoader(gaps, 2, shuffle=False, on_error="skip", collate_fn=default_collate)))
    assert "collate_fn= got an empty list: all samples of the batch were skipped" in raised.value.__notes__


def test_after_too_much_was_skipped_a_pass_is_over(gaps):
    batches = iter(ShardLoader(gaps, 2, shuffle=False, on_error="skip", max_skipped=1))

    with pytest.raises(shardkit.TooManySkippedError, match="2 samples were skipped, expected at most max_skipped=1"):
        next(batches)

    assert list(batches) == []
    assert wait_for_no_threads() == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
def test_after_an_error_of_the_engine_a_pass_is_over(dataset, error):
    batches = iter(ShardLoader(dataset, 4))
    next(batches)
    batches._engine._failures.put(error("raised in a thread"))

    with pytest.raises(error, match="raised in a thread"):
        list(batches)

    assert list(batches) == []
    assert wait_for_no_threads() == []


def test_a_thread_that_dies_without_a_word_ends_the_pass(dataset):
    may_go_on = threading.Event()
    batches = iter(ShardLoader(dataset, 4, transform=lambda sample: may_go_on.wait(60) and sample, num_workers=1))
    batches._engine._workers.close()
    may_go_on.set()

    with pytest.raises(shardkit.WorkerError, match="a thread of the loader has died"):
        list(batches)

    assert list(batches) == []


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
@pytest.mark.parametrize("then", ["begin", "resume", "next epoch"])
def test_a_copy_of_a_loader_is_where_the_loader_is(dataset, copied, then):
    loader = ShardLoader(dataset, 4, seed=3, transform=add_noise)
    if then != "begin":
        first = list(islice(loader, 5))
    if then == "resume":
        loader.load_state_dict(loader.state_dict())
    copies = copied(loader)

    assert len(copies) == len(loader)
    assert copies.state_dict() == loader.state_dict()
    assert [batch["noise"].tolist() for batch in copies] == [batch["noise"].tolist() for batch in loader]
    if then != "begin":
        assert keys_of(first) != keys_of(islice(copies, 5))
    assert copies.state_dict() == loader.state_dict() or then != "begin"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"num_workers": 0}, "num_workers must be at least 1"),
        ({"worker_type": "fork"}, "worker_type must be"),
        ({"on_error": "ignore"}, "on_error must be"),
        ({"memory": "10kB"}, r"memory is 10 KB, but the order holds .* open on each of 1 ranks"),
        ({"memory": "much"}, "is not a size"),
        ({"lanes": 0}, "lanes must be at least 1"),
        ({"rank": 1}, "give both or neither"),
        ({"transform": 3}, "expected a function"),
        ({"collate_fn": 3}, "expected a function"),
        ({"seed": "a"}, "seed must be a whole number"),
        ({"dataset": "shards/train"}, r"expected ShardDataset\("),
    ],
)
def test_arguments_out_of_range_say_what_was_expected(dataset, options, says):
    with pytest.raises(shardkit.ArgumentError, match=says):
        ShardLoader(**{"dataset": dataset, "batch_size": 8} | options)


def test_half_an_environment_is_refused(dataset, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    with pytest.raises(shardkit.ArgumentError, match="give both or neither"):
        ShardLoader(dataset, 8)


def test_torchruns_environment_says_the_rank(dataset, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = keys_of(ShardLoader(dataset, 8))

    assert found == keys_of(ShardLoader(dataset, 8, rank=1, world_size=2))


# -- memory, reads and cleaning up


@pytest.mark.parametrize("taken", [None, 3])
def test_blocks_are_let_go_when_an_epoch_ends(dataset, taken):
    loader = ShardLoader(dataset, 8, transform={"cls": int})
    batches = iter(loader)
    gc.disable()  # otherwise it might free them
    try:
        assert list(islice(batches, taken))
        engine = batches._engine
        del batches
        engine.close(wait=True)
        assert not loader._buffers._users
    finally:
        gc.enable()


def test_no_more_is_held_than_memory_allows(dataset):
    loader = ShardLoader(dataset, 4, memory="100kB", lanes=4)
    limit = 100_000
    plan_holds = 2 * 4 * dataset.block_bytes
    batches = iter(loader)
    for _ in batches:
        assert batches._engine._fetcher.held_bytes <= limit

    assert plan_holds < batches._engine._fetcher.largest_held_bytes <= limit


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_ranks_that_divide_the_lanes_read_each_block_once_but_for_those_at_lanes_ends(dataset, world_size, monkeypatch):
    reads = []
    open_block = ShardDataset.open_block
    monkeypatch.setattr(ShardDataset, "open_block", lambda self, *at: reads.append(at[:2]) or open_block(self, *at))

    every_rank(dataset, 4, world_size, lanes=12)

    assert len(set(reads)) == dataset.num_blocks
    assert len(reads) <= dataset.num_blocks + 12 - 1


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("shardkit-")]


def wait_for_no_threads():
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return threads()


@pytest.mark.parametrize("how", ["end", "break", "error", "exception in the loop", "next alone"])
def test_no_thread_is_left(dataset, how):
    def run():
        loader = ShardLoader(dataset, 4, transform=fail_at_0100 if how == "error" else None)
        for _ in loader:
            if how == "break":
                break
            if how == "exception in the loop":
                raise KeyError("in the loop")
            if how == "next alone":
                next(iter(loader))
                break

    if how in ("error", "exception in the loop"):
        with pytest.raises(KeyError):
            run()
    else:
        run()

    assert wait_for_no_threads() == []


def run_script(tmp_path, text):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return started([sys.executable, str(script)], env=environment, text=True)


SCRIPT = """
    import os, sys, time
    import shardkit

    def slow(sample):
        time.sleep(0.002)
        return sample

    if __name__ == "__main__":
        dataset = shardkit.ShardDataset({folder!r})
        loader = shardkit.ShardLoader(dataset, 4, transform=slow, worker_type={worker_type!r}, num_workers=2)
        batches = iter(loader)
        next(batches)
        print("begun", flush=True)
        {then}
"""


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_a_script_may_end_in_mid_epoch(folder, tmp_path, worker_type):
    text = SCRIPT.format(folder=str(folder / "none" / "train"), worker_type=worker_type, then="sys.exit(7)")
    with run_script(tmp_path, text) as process:
        output, errors = process.communicate(timeout=60)

    assert (process.returncode, output, errors) == (7, "begun\n", "")


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_ctrl_c_ends_everything_with_one_traceback(folder, tmp_path, worker_type):
    then = "for _ in range(1000): list(loader)"
    text = SCRIPT.format(folder=str(folder / "none" / "train"), worker_type=worker_type, then=then)
    with run_script(tmp_path, text) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)

    assert process.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1
    assert errors.strip().endswith("KeyboardInterrupt")
