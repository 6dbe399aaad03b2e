"""Processes that tests start and often kill: they start fast, because a small server with all imports forks them."""

from multiprocessing import get_context, util

_preloaded = ["pyarrow.compute", "pandas"]  # pyarrow's array() imports pandas


def forkserver(module):
    """Return the context that starts processes in which a test module is already imported.

    Python has one such server per process, which uses the list of imports that was set last. So all modules are in one
    list.
    """
    if module not in _preloaded:
        _preloaded.append(module)
    util.get_temp_dir()  # folder of the server's socket; made later, it may be in a TMPDIR that a test deletes
    context = get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    return context
