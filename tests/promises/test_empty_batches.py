"""Batches keep their shape: one that lost all of its samples is like the previous one, but of length 0."""

import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

import shardkit
from shardkit import ShardDataset, ShardLoader, TooManySkippedError

pytestmark = pytest.mark.nightly

VALUES = {
    "png": lambda i: np.full((8, 9, 3), i, np.uint8),
    "ragged.png": lambda i: np.full((8 + i % 2, 9, 3), i, np.uint8),
    "cls": lambda i: i,
    "zero.npy": np.array,
    "large.npy": lambda i: np.full((3, 16, 8), i, np.float32),
    "txt": str,
    "json": lambda i: {"i": i},
}
LIGHT = ("cls", "zero.npy", "large.npy", "txt")  # batches of these are gathered from whole blocks


def same(sample):
    return sample


def like(batch):
    """Return the layout of batches: the types of fields, and for tensors also dtype and shape without the length."""
    return {n: (v.dtype, v.shape[1:]) if isinstance(v, torch.Tensor) else type(v) for n, v in batch.items()}


@given(
    batch_size=st.integers(1, 5),
    lost=st.sets(st.integers(0, 7)),
    others=st.sets(st.integers(0, 39), max_size=5),
    fields=st.sampled_from([None, LIGHT]),
    world_size=st.integers(1, 3),
    options=st.sampled_from([{}, {"transform": same}, {"num_workers": 1}]),
    start=st.integers(1, 7),
)
def test_a_batch_that_lost_all_its_samples_is_like_the_one_before(
    tmp_path_factory, batch_size, lost, others, fields, world_size, options, start
):
    count, size = 8 * batch_size * world_size, batch_size * world_size
    bad = {i for i in range(count) if i // size in lost} | others
    folder = tmp_path_factory.mktemp("empty") / "train"
    samples = (
        {"__key__": f"{i:03d}"} | {f: make(i) for f, make in VALUES.items()} | ({"cls": b"?"} if i in bad else {})
        for i in range(count)
    )
    shardkit.pack(samples, folder, block_bytes=16_000, compression="none", shuffle=False, progress=False)
    dataset = ShardDataset(folder, fields=fields)
    for rank in range(world_size):
        loader = ShardLoader(
            dataset, batch_size, shuffle=False, on_error="skip", rank=rank, world_size=world_size, lanes=1, **options
        )
        # A loader that begins anywhere has no batch before its first one; until then, an empty batch is an error.
        loader.load_state_dict(loader.state_dict() | {"position": start * size})
        before, batches = None, iter(loader)
        for number in (*range(start, 8), *range(8)):
            if number == 0 and start:
                assert list(batches) == []
                batches = iter(loader)
            plan = dataset.order(seed=0, epoch=0, lanes=1, shuffle=False)
            ours = plan.locate(plan.deal(number * size, number * size + size, rank, world_size)).samples.tolist()
            left = [f"{i:03d}" for i in ours if i not in bad]
            if not left and before is None:
                with pytest.raises(TooManySkippedError, match="there is no batch before it to copy the fields from"):
                    next(batches)
                break
            batch = next(batches)
            assert batch["__key__"] == left
            assert {len(value) for value in batch.values()} == {len(left)}
            if not left:
                event("a batch lost all its samples")
                assert list(batch) == list(before)
                assert like(batch) == like(before)
            before = batch
        assert list(batches) == []
