"""The nightly profile tries more examples of every property: no test sets its own number of examples."""

import re
from pathlib import Path

from hypothesis import settings

from tests.support.shared import examples

TESTS = Path(__file__).parents[1]


def test_only_profiles_say_how_many_examples_there_are():
    fixed = [
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("*.py")
        if re.search(r"max_examples=\d", path.read_text())
    ]

    assert fixed == ["conftest.py"]


def test_a_multiple_of_the_profiles_examples_grows_with_it():
    current = settings.get_current_profile_name()
    try:
        settings.load_profile("default")
        assert examples(1 / 100).max_examples == 1
        assert examples(3).max_examples == 150
        settings.load_profile("nightly")
        assert examples(3).max_examples == 3000
    finally:
        settings.load_profile(current)
