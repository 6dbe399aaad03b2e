"""More workers are started while workers wait, so that others can compute, but not while they compute."""

import os
import threading
import time

import pytest

import shardkit
from shardkit import ShardDataset, ShardLoader
from shardkit.loading import engine

COUNT = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a dataset."""
    folder = tmp_path_factory.mktemp("engine") / "numbers"
    shardkit.pack(({"__key__": str(i), "cls": i} for i in range(COUNT)), folder, progress=False)
    return folder


class Count:
    """A transform that counts how many threads are in it at a time."""

    def __init__(self, wait):
        self.most = self._now = 0
        self._lock = threading.Lock()
        self._wait = wait

    def __call__(self, sample):
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self._wait()
        with self._lock:
            self._now -= 1
        return sample


@pytest.mark.parametrize("processors", [1, 2])
def test_workers_that_wait_get_company(folder, monkeypatch, processors):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    together = threading.Barrier(5)  # no thread continues before five have arrived
    count = Count(lambda: together.wait(60))
    batches = ShardLoader(ShardDataset(folder), 10, transform=count, num_workers=5)

    assert sorted(label for batch in batches for label in batch["cls"].tolist()) == list(range(COUNT))
    assert count.most == 5


@pytest.mark.parametrize("processors", [1, 2, 3])
def test_workers_that_compute_get_none(folder, monkeypatch, processors):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    monkeypatch.setattr(engine, "_LOOK_SECONDS", 0.002)
    monkeypatch.setattr(time, "process_time", lambda: 0.7 * processors * time.perf_counter())
    count = Count(lambda: time.sleep(0.002))
    batches = ShardLoader(ShardDataset(folder), 10, transform=count, num_workers=8)

    assert sorted(label for batch in batches for label in batch["cls"].tolist()) == list(range(COUNT))
    assert count.most <= processors
