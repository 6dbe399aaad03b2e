"""The blocks that the batches of an epoch need are planned in stretches, and each block is wanted once."""

import numpy as np
import pytest

from shardkit.order.plan import Batches, OrderPlan
from shardkit.order.schedule import schedule

COUNT, BLOCK = 15_000, 50  # more than the first planned stretches


class Numbers:
    """Where the samples of one shard lie."""

    def places(self, samples):
        return np.zeros_like(samples), samples // BLOCK, samples % BLOCK


@pytest.mark.parametrize("holds_all", [True, False])
def test_a_block_is_wanted_once_however_many_samples_an_epoch_has(holds_all):
    plan = OrderPlan(np.array([COUNT]), BLOCK, seed=0, epoch=0, lanes=12, shuffle=True)
    planned = list(schedule(Numbers(), plan, Batches(COUNT, 64, 1, False), position=0, rank=0, holds_all=holds_all))
    wanted = [one for batch in planned for one in batch.wanted]
    found = np.concatenate([plan.locate(batch.positions).samples for batch in planned])
    blocks = np.array([one.block for one in wanted])

    assert len(wanted) == planned[-1].opened
    assert len(wanted) <= COUNT // BLOCK + (0 if holds_all else 12)  # a block that a lane's end cuts is wanted twice
    assert len({one[:3] for one in wanted}) == len(wanted)
    assert sorted(found.tolist()) == list(range(COUNT))
    assert (found == np.concatenate([blocks[batch.numbers] * BLOCK + batch.rows for batch in planned])).all()
