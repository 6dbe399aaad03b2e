"""Settings for all tests."""

import shutil
from pathlib import Path

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("tests.shared")

# The same examples on every run, so that a failure is the change's and not the day's; no deadline, as timings vary.
# The nightly profile looks further: pytest --hypothesis-profile=nightly
settings.register_profile("default", derandomize=True, max_examples=50, deadline=None)
settings.register_profile("nightly", max_examples=1000, deadline=None)
settings.load_profile("default")


@pytest.fixture
def dataset(tmp_path, originals):
    """Return what makes a copy of a dataset to be damaged, of ``originals``: a folder for each compression."""

    def copy(compression="none"):
        return Path(shutil.copytree(originals[compression], tmp_path / compression / "train"))

    return copy
