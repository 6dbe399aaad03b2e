"""Blocks are fetched ahead, more at a time if fetching means waiting, in whatever order they arrive."""

import itertools
import random
import threading
import time

import pytest

import shardkit
from shardkit import ShardDataset, ShardLoader
from shardkit.loading import fetch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fetch") / "train"
    samples = ({"__key__": f"{i:04d}", "bin": bytes(3000), "cls": i} for i in range(400))
    shardkit.pack(samples, folder, shard_bytes="200kB", block_bytes="9kB", progress=False)
    return folder


def fetching(folder, monkeypatch, wait):
    """Return the labels of an epoch, and how many blocks were fetched at a time, if each fetch has to wait."""
    dataset, lock, now, most = ShardDataset(folder), threading.Lock(), [0], [0]
    open_block = ShardDataset.open_block

    def slow(self, *place):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        wait()
        try:
            return open_block(self, *place)
        finally:
            with lock:
                now[0] -= 1

    monkeypatch.setattr(ShardDataset, "open_block", slow)
    labels = [label for batch in ShardLoader(dataset, 8) for label in batch["cls"].tolist()]
    return labels, most[0]


def test_more_is_fetched_at_a_time_from_far_away(folder, monkeypatch):
    expected = [label for batch in ShardLoader(ShardDataset(folder), 8) for label in batch["cls"].tolist()]
    labels, most = fetching(folder, monkeypatch, lambda: time.sleep(0.03))

    assert labels == expected
    assert 16 <= most <= 32


def test_the_first_batch_is_already_fetched_by_many(folder, monkeypatch):
    monkeypatch.setattr(fetch, "_MORE_THREADS", ((-1.0, 32),))
    is_awaited, enough, calls = threading.Event(), threading.Event(), itertools.count()
    open_block = ShardDataset.open_block

    def read(self, *place):
        number = next(calls)
        if number < 4:  # each completed fetch doubles the limit: 2, 4, 8, 16, 32
            assert is_awaited.wait(60)
        elif number < 4 + 32 - 1:
            assert enough.wait(60)
        else:
            enough.set()
        return open_block(self, *place)

    monkeypatch.setattr(ShardDataset, "open_block", read)
    batches = iter(ShardLoader(ShardDataset(folder), 64))
    wait = batches._engine._wait
    monkeypatch.setattr(batches._engine, "_wait", lambda: (is_awaited.set(), wait()))

    assert len(next(batches)["cls"]) == 64
    assert enough.is_set()


def test_only_who_waits_gets_more_threads_and_never_more_than_the_most(folder):
    batches = iter(ShardLoader(ShardDataset(folder), 8))
    fetcher = batches._engine._fetcher
    counts = []
    for waits in (0.0, 0.001, 0.005, 0.005, 1.0, 0.0, 1.0, 1.0, 1.0):
        with fetcher._lock:
            fetcher._waits = waits
            fetcher.hurry()
            counts.append(fetcher.threads.count)

    assert counts == [2, 2, 4, 4, 8, 8, 16, 32, 32]
    assert len(list(batches)) == 50


def test_the_order_does_not_depend_on_which_block_comes_first(folder, monkeypatch):
    expected = [label for batch in ShardLoader(ShardDataset(folder), 8) for label in batch["cls"].tolist()]
    waits = random.Random(0)

    labels, _ = fetching(folder, monkeypatch, lambda: time.sleep(waits.random() / 50))

    assert labels == expected


def same(sample):
    return sample


@pytest.mark.parametrize("transform", [None, same])
def test_an_epoch_may_have_thousands_of_blocks(tmp_path, transform):
    samples = ({"__key__": f"{i:05d}", "cls": i} for i in range(2500))
    shardkit.pack(samples, tmp_path / "many", block_bytes=1500, compression="none", progress=False)
    dataset = ShardDataset(tmp_path / "many")
    loader = ShardLoader(dataset, 100, transform=transform)

    assert dataset.num_blocks >= 2500 // 2
    assert sorted(label for batch in loader for label in batch["cls"].tolist()) == list(range(2500))
