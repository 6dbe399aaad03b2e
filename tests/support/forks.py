"""Processes that tests start, and often kill: they begin at once, as a small server forks them that has all imports."""

from multiprocessing import get_context, util

_preloaded = ["pyarrow.compute", "pandas"]  # pyarrow's array() imports pandas


def forkserver(module):
    """Return the context that starts processes which have imported a test module already.

    Python has one such server for a process, which imports what the list says that was set last: so all are in one.
    """
    if module not in _preloaded:
        _preloaded.append(module)
    util.get_temp_dir()  # the server's socket lies there; made later, it may be in a TMPDIR that a test deletes
    context = get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    return context
