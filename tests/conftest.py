"""Settings for all tests."""

from hypothesis import settings

# The same examples on every run, so that a failure is the change's and not the day's; no deadline, as timings vary.
# The nightly profile looks further: pytest --hypothesis-profile=nightly
settings.register_profile("default", derandomize=True, max_examples=50, deadline=None)
settings.register_profile("nightly", max_examples=1000, deadline=None)
settings.load_profile("default")
