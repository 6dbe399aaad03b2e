"""Buffers: memory is reused, but never while anything still refers to it."""

import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardkit.reading.memory import Buffers

VIEWS = {
    "slice": lambda array: array[10:20],
    "memoryview": lambda array: memoryview(array)[10:20],
    "reshaped": lambda array: array.reshape(10, 100)[::2, ::3],
    "tensor": torch.from_numpy,
    "view of a tensor": lambda array: torch.from_numpy(array.reshape(10, 10, 10)).permute(2, 0, 1)[3:5],
    "array of a tensor": lambda array: torch.from_numpy(array)[5:].numpy(),
    "array of a memoryview": lambda array: np.frombuffer(array.data[5:50], dtype=np.uint8),
}


@pytest.mark.parametrize("view", VIEWS)
def test_memory_is_not_used_again_while_there_is_a_view_of_it(view):
    buffers = Buffers(1_000_000)
    first = buffers.take(1000)
    first[:] = 7
    kept = VIEWS[view](first)
    del first

    others = [buffers.take(1000) for _ in range(10)]
    for other in others:
        other[:] = 8

    assert bytes(np.asarray(kept).ravel()) == bytes([7]) * np.asarray(kept).size


@pytest.mark.parametrize("view", VIEWS)
def test_memory_is_used_again_when_no_view_is_left(view):
    buffers = Buffers(1_000_000)
    first = buffers.take(1000)
    address = first.ctypes.data
    kept = VIEWS[view](first)
    del first
    del kept

    assert buffers.take(990).ctypes.data == address


@given(sizes=st.lists(st.integers(0, 5000), max_size=30))
def test_arrays_have_the_size_asked_for_and_nothing_in_common(sizes):
    buffers = Buffers(20_000)
    for _ in range(2):
        arrays = [buffers.take(size) for size in sizes]
        for i, array in enumerate(arrays):
            array[:] = i

        assert [array.tolist() for array in arrays] == [[i] * size for i, size in enumerate(sizes)]
        arrays.clear()


def test_no_more_is_kept_than_allowed_when_other_sizes_are_asked_for():
    buffers = Buffers(10_000)
    arrays = [buffers.take(1024) for _ in range(100)]
    arrays.clear()

    buffers.take(3000)

    assert sum(len(free) * size for size, free in buffers._free.items()) <= 10_000 + 3000 * 17 / 16


def test_buffers_are_forgotten_with_their_last_user():
    buffers = Buffers(10_000)
    array = buffers.take(10)
    forgotten = weakref.ref(buffers)
    del buffers

    assert forgotten() is None
    array[:] = 1  # its memory still exists


def test_threads_never_get_the_same_memory():
    buffers, wrong = Buffers(1 << 20), []

    def work(number):
        for i in range(2000):
            array = buffers.take(64 + i % 3)
            array[:] = number
            if (array != number).any():
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong


CHURN = """
import resource
from shardkit.reading.memory import keep_freed_memory

def churned():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        values = [bytes(60_000) for _ in range(100)]
        del values
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = churned()
keep_freed_memory()
churned()
print(first, churned())
"""


def test_freed_memory_is_used_again_without_going_back_to_the_system():
    done = subprocess.run([sys.executable, "-c", CHURN], stdout=subprocess.PIPE, check=True)
    before, after = map(int, done.stdout.split())

    assert before > 20_000  # pages of 4 KB that the system had to clear
    assert after < 1000
