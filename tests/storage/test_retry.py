"""Whatever pause a server asks for, pauses grow and vary, and the number of tries is bounded."""

import email.utils
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import StorageError
from shardkit.storage import retry
from shardkit.storage.responses import asked_pause
from shardkit.storage.retry import MAX_TRIES, Attempts

dates = st.integers(-(10**6), 10**6).map(lambda away: email.utils.formatdate(time.time() + away, usegmt=True))
numbers = st.integers(0, 10**30).map(str)
odd = st.sampled_from(["", "-1", "nan", "inf", "²", "0x10", "1.5", "Mon, 99 Foo 0000 00:00:00 GMT", "1" * 500])
asked = st.none() | dates | numbers | odd | st.text(max_size=30)


@given(text=asked)
def test_whatever_is_asked_for_is_a_pause_or_nothing(text):
    pause = asked_pause(text)
    assert pause is None or pause >= 0


@given(texts=st.lists(asked, min_size=MAX_TRIES, max_size=MAX_TRIES))
def test_no_answer_takes_the_growing_random_pauses_away(texts):
    made, drawn = [], []

    def draw_the_longest(_, longest):
        drawn.append(longest)
        return longest

    def try_all():
        attempts = Attempts("https://host/a.tar", 10**6)
        for text in texts:
            attempts.fail("cannot be read", "503", pause=asked_pause(text))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retry, "_sleep", made.append)
        patch.setattr(retry.random, "uniform", draw_the_longest)
        with pytest.raises(StorageError, match=f"tried {MAX_TRIES} times"):
            try_all()

    assert drawn == sorted(drawn)
    assert drawn[0] > 0
    assert len(made) == MAX_TRIES - 1
    assert all(own <= pause <= 60 for own, pause in zip(drawn, made, strict=True))
