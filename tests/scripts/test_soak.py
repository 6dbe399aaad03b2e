"""The soak test runs, and detects growth."""

import subprocess
import sys
import threading

import pytest

from tests.support.shared import ROOT, run_program

sys.path.append(str(ROOT / "scripts" / "bench"))

import soak  # the program, found in scripts/bench
from soak import Usage

MB = 1_000_000


@pytest.mark.multiprocess
def test_a_cycle_goes_through_all_that_can_go_wrong():
    output = run_program("scripts/bench/soak.py", "--seconds", 0, "--cycles", 1, PYTHONWARNINGS="ignore")

    assert output[:18] == "nothing has grown "


@pytest.mark.parametrize("name", Usage._fields)
def test_what_grows_with_every_cycle_is_seen(name):
    steady = Usage(400 * MB, 3, 40, 2)
    step = 4 * MB if name == "memory" else 1
    usages = [steady._replace(**{name: getattr(steady, name) + step * cycle}) for cycle in range(8)]

    assert list(soak.grown(usages)) == [name]


def test_neither_warming_up_nor_chance_is_growth():
    cold, warm, more = Usage(200 * MB, 1, 8, 0), Usage(400 * MB, 3, 40, 2), Usage(406 * MB, 4, 44, 3)

    assert soak.grown([cold, cold, warm, more, warm, warm, more, warm]) == {}


def test_what_a_process_has_is_counted(tmp_path):
    before = soak.usage()
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    held = bytearray(b"x") * (64 * MB)  # bytes that were never written do not take memory yet
    with (tmp_path / "file").open("w"), subprocess.Popen(["sleep", "99"]) as process:
        during = soak.usage()
        process.kill()
    over.set()
    thread.join()

    assert during.memory > before.memory + len(held) / 2
    assert during[1:] == (before.threads + 1, before.descriptors + 1, before.processes + 1)


def test_an_error_that_does_not_come_is_an_error():
    with pytest.raises(RuntimeError, match="expected ValueError"), soak.expected(ValueError):
        pass
