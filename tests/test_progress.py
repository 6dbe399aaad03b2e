"""Progress is shown on a terminal, with rate and remaining time, and nowhere else."""

import io
import re
from itertools import count

import pytest

from shardkit.progress import track


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown_on(file, monkeypatch, **options):
    monkeypatch.setattr("sys.stderr", file)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with track("packing", total=200, **options) as advance:
        for _ in range(3):
            advance(50)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())


def test_a_terminal_shows_what_is_done_how_much_how_fast_and_how_long(monkeypatch):
    shown = shown_on(Terminal(), monkeypatch, unit="shards")

    last = shown.strip().splitlines()[-1]
    assert re.search(r"packing .*150/200 shards [\d,]+/s \d+:\d\d:\d\d", last), last


@pytest.mark.parametrize(("file", "enabled"), [(io.StringIO, True), (Terminal, False)])
def test_what_is_no_terminal_or_not_asked_shows_nothing(monkeypatch, file, enabled):
    assert shown_on(file(), monkeypatch, enabled=enabled) == ""


def test_the_rate_counts_from_the_start_though_many_are_done_at_once(monkeypatch):
    clock = count(0, 10)  # ten seconds between two readings
    monkeypatch.setattr("rich.console.monotonic", lambda: next(clock))
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with track("packing", total=200) as advance:
        advance(50)
    one_step = re.findall(r"([\d,]+)/s", terminal.getvalue())

    assert one_step
    assert int(one_step[-1]) <= 5
