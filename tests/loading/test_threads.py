"""Threads end when they are asked to, or with the program, whatever they are doing."""

import gc
import subprocess
import sys
import textwrap
import threading
from queue import SimpleQueue

from shardkit.loading.threads import Threads


def names():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("test-")]


def test_tasks_are_done_in_the_order_given():
    done, threads = SimpleQueue(), Threads(1, "test", SimpleQueue())
    for i in range(1000):
        threads.submit(done.put, i)

    assert [done.get() for _ in range(1000)] == list(range(1000))
    threads.close()
    threads.join(None)


def test_as_many_tasks_are_done_at_a_time_as_there_are_threads():
    threads, meeting = Threads(3, "test", SimpleQueue()), threading.Barrier(4)
    for _ in range(3):
        threads.submit(meeting.wait, 60)

    meeting.wait(60)  # raises if they do not all arrive
    threads.close()
    threads.join(None)


def test_closing_ends_what_is_done_and_drops_the_rest():
    begun, may_end, done = threading.Event(), threading.Event(), []
    threads = Threads(1, "test", SimpleQueue())
    threads.submit(lambda: (begun.set(), may_end.wait(60), done.append("first")))
    threads.submit(done.append, "second")
    begun.wait(60)

    threads.close()
    may_end.set()
    threads.join(60)

    assert done == ["first"]
    assert not names()


def test_closing_twice_and_from_one_of_its_own_threads_is_fine():
    threads = Threads(2, "test", SimpleQueue())
    threads.submit(lambda: (threads.close(), threads.join(None)))
    threads.join(60)
    threads.close()
    threads.join(None)

    assert not names()


def test_a_task_that_raises_ends_the_threads_and_says_so():
    failures = SimpleQueue()
    threads = Threads(2, "test", failures)
    threads.submit(lambda: 1 / 0)
    threads.join(60)

    assert isinstance(failures.get(), ZeroDivisionError)
    assert threads.has_ended
    assert not names()


def test_threads_that_nobody_refers_to_end():
    threads = Threads(2, "test", SimpleQueue())
    (one, other) = threads._threads
    assert not threads.has_ended
    del threads
    gc.collect()
    one.join(60)
    other.join(60)

    assert not names()


def run(program):
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_program_ends_though_nobody_has_closed_them():
    ended = run("""
        from queue import SimpleQueue
        from shardkit.loading.threads import Threads
        threads = Threads(4, "test", SimpleQueue())
        threads.submit(print)
    """)

    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_program_ends_though_a_task_does_not():
    ended = run("""
        import threading, shardkit.loading.threads
        from queue import SimpleQueue
        shardkit.loading.threads._EXIT_SECONDS = 0.1
        begun = threading.Event()
        threads = shardkit.loading.threads.Threads(2, "test", SimpleQueue())
        threads.submit(lambda: (begun.set(), threading.Event().wait()))
        begun.wait()
    """)

    assert (ended.returncode, ended.stderr) == (0, "")
