"""Progress is shown on a terminal, with rate and remaining time, and nowhere else."""

import io
import re

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
