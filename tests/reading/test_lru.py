"""The cache of index data is bounded, is shared by threads and forked processes, and is never pickled."""

import os
import pickle
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.reading import lru as recent
from shardkit.reading.lru import BoundedCache, SharedWork
from tests.support.shared import fork_beside_threads


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), max_size=60))
def test_a_cache_keeps_what_was_asked_for_last_within_its_bound(puts):
    cache = BoundedCache(20)
    expected = {}  # in the order of the requests
    for key, size in puts:
        value = expected.pop(key, None)
        assert cache.get(key) == value
        if value is None:
            cache.put(key, size, size)
            value = size
        expected[key] = value
        while sum(expected.values()) > 20:
            del expected[next(iter(expected))]

        assert cache.nbytes == sum(expected.values()) <= 20
    assert [cache.get(key) for key in range(10)] == [expected.get(key) for key in range(10)]


def test_a_value_that_is_larger_than_the_bound_is_not_kept_and_drives_nothing_out():
    cache = BoundedCache(10)
    cache.put("a", 1, 10)
    cache.put("b", 2, 11)

    assert (cache.get("a"), cache.get("b")) == (1, None)


def test_what_is_put_twice_is_counted_once():
    cache = BoundedCache(10)
    cache.put("a", 1, 6)
    cache.put("a", 2, 6)

    assert (cache.get("a"), cache.nbytes) == (1, 6)


def test_threads_share_a_cache():
    cache = BoundedCache(100)

    def use(i):
        found = cache.get(i % 37)
        cache.put(i % 37, i % 37, 5)
        return found in (None, i % 37)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(20_000)))
    assert cache.nbytes == 100


def test_a_pickle_of_a_cache_is_an_empty_one_with_the_same_bound():
    cache = BoundedCache(10)
    cache.put("a", 1, 10)
    copy = pickle.loads(pickle.dumps(cache))
    copy.put("b", 2, 11)
    copy.put("c", 3, 10)

    assert [copy.get(key) for key in "abc"] == [None, None, 3]


def test_a_fork_while_threads_use_a_cache_leaves_it_usable():
    cache = BoundedCache(100)

    def use(_):
        cache.put(threading.get_ident(), 1, 5)
        cache.get(0)

    def put_and_get(_):
        cache.put("child", 1, 5)
        return cache.get("child") == 1

    assert fork_beside_threads(use, put_and_get) == [0] * 20


@pytest.fixture
def want(monkeypatch):
    """Return a function that makes four threads request the same work, which ends once all of them have requested it.

    It calls ``meanwhile`` at that point, and returns how often the work was begun and each thread's result.
    """
    come = threading.Semaphore(0)

    class WatchedFuture(Future):
        def result(self, timeout=None):
            come.release()
            return super().result(timeout)

    def want(shared, work, meanwhile=lambda: None):
        begun, go_on, calls = threading.Event(), threading.Event(), []

        def held():
            calls.append(None)
            begun.set()
            go_on.wait()
            return work(len(calls))

        with ThreadPoolExecutor(4) as pool:
            wanted = [pool.submit(shared.do, "a", held)]
            begun.wait()
            wanted += [pool.submit(shared.do, "a", held) for _ in range(3)]
            try:
                assert all(come.acquire(timeout=10) for _ in range(3))
                meanwhile()
            finally:
                go_on.set()
        return len(calls), wanted

    monkeypatch.setattr(recent, "Future", WatchedFuture)
    return want


def test_work_that_several_threads_want_at_the_same_time_is_done_once(want):
    shared, others = SharedWork(), []
    count, wanted = want(shared, lambda _: object(), lambda: others.append(shared.do("b", lambda: 3)))

    assert (count, others) == (1, [3])
    assert len({one.result() for one in wanted}) == 1
    assert [shared.do("a", lambda n=n: n) for n in range(3)] == [0, 1, 2]


def test_an_error_is_that_of_all_who_wait_and_of_nobody_later(want):
    shared = SharedWork()
    count, wanted = want(shared, lambda _: 1 // 0)

    assert count == 1
    assert len({one.exception() for one in wanted}) == 1
    assert isinstance(wanted[0].exception(), ZeroDivisionError)
    assert shared.do("a", lambda: 3) == 3


def test_work_that_was_interrupted_is_done_by_another(want):
    def work(number):
        if number == 1:
            raise KeyboardInterrupt
        return number

    count, wanted = want(SharedWork(), work)

    assert isinstance(wanted[0].exception(), KeyboardInterrupt)
    assert {one.result() for one in wanted[1:]} == set(range(2, count + 1))


def test_who_is_forked_or_unpickled_meanwhile_waits_for_nobody(want):
    shared, ends = SharedWork(), []

    def fork():
        ends.append(pickle.loads(pickle.dumps(shared)).do("a", lambda: 0))
        child = os.fork()
        if not child:
            os._exit(shared.do("a", lambda: 3))
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    assert want(shared, lambda _: 1, fork)[0] == 1
    assert ends == [0, 3]
