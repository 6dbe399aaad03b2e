"""Settings for all tests."""

import contextlib
import gc
import shutil
import signal
import threading
from pathlib import Path

import pytest
from hypothesis import settings

from shardkit.storage import connections
from tests.support.servers.ceph import Ceph
from tests.support.servers.faults import FaultProxy
from tests.support.servers.processes import Processes
from tests.support.servers.programs import Moto, Nginx, Proxies

pytest.register_assert_rewrite("tests.support.shared")

# A shell lets what it starts in the background ignore Ctrl-C, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run, so that a failure is the change's and not the day's; no deadline, as timings vary.
# The nightly profile looks further, above all in the tests that are marked so, which then take hours, not seconds:
# pytest --hypothesis-profile=nightly -m nightly -o timeout=0 -o faulthandler_timeout=0
settings.register_profile("default", derandomize=True, max_examples=50, deadline=None)
settings.register_profile("nightly", max_examples=1000, deadline=None)
settings.load_profile("default")


def pytest_collection_finish():
    """Keep what is there before the first test out of Python's search for garbage, which would go through it each time.

    It is half a million objects that stay to the end; forked processes that look for garbage would copy them all.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def dataset(tmp_path, originals):
    """Return what makes a copy of a dataset to be damaged, of ``originals``: a folder for each compression."""

    def copy(compression="none"):
        return Path(shutil.copytree(originals[compression], tmp_path / compression / "train"))

    return copy


@pytest.fixture(scope="session")
def processes():
    """Provide what starts servers, and ends them all, whatever happens to pytest."""
    with contextlib.closing(Processes()) as processes:
        yield processes


@pytest.fixture(scope="session")
def authority():
    """Return an authority that signs certificates and that nobody knows."""
    import trustme

    return trustme.CA()


@pytest.fixture
def nginx(processes, tmp_path, authority):
    """Provide a web server for one test."""
    with Nginx(processes, tmp_path / "nginx", authority) as server:
        yield server


@pytest.fixture(scope="session")
def moto(processes, tmp_path_factory):
    """Provide an S3 server in memory."""
    with Moto(processes, tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def ceph(processes, tmp_path_factory):
    """Provide a real S3 server."""
    with Ceph(processes, tmp_path_factory.mktemp("ceph")) as server:
        yield server


@pytest.fixture(scope="session")
def proxies(processes, tmp_path_factory):
    """Provide the program that the proxies are in."""
    with Proxies(processes, tmp_path_factory.mktemp("proxies")) as program:
        yield program


def close_connections(others):
    """Close this process's connections to all servers but some."""
    for server in set(connections._managers) - others:
        connections._close_idle(server)


@pytest.fixture
def proxy(proxies):
    """Return what makes a proxy that injects faults before a server, of its URL.

    Connections that are kept open to it are closed in the end: each test has another one, which never comes back.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(close_connections, set(connections._managers))
        yield lambda url: stack.enter_context(contextlib.closing(FaultProxy(proxies.port.number, url)))


@pytest.fixture
def tries(monkeypatch):
    """Return what is called instead of waiting for the next try of a request, one after the other."""
    called = []
    lock = threading.Lock()  # what is called may take its time, and all others wait for it

    def sleep(_):
        with lock:
            if called:
                called.pop(0)()

    monkeypatch.setattr("shardkit.storage.retry._sleep", sleep)
    return called


def pytest_terminal_summary(terminalreporter):
    """Print how each fault of a network has ended, for each way of reading or writing through it, as a table."""
    places = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "fault":
                    place, fault, way, end = value
                    places.setdefault(place, {}).setdefault(fault, {})[way] = end
    for place, faults in sorted(places.items()):
        ways = sorted({way for ends in faults.values() for way in ends})
        rows = [[f"faults of {place}", *ways]]
        rows += [[fault, *(ends.get(way, "") for way in ways)] for fault, ends in sorted(faults.items())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        terminalreporter.section(f"how the faults of networks end: {place}")
        for row in rows:
            terminalreporter.line(
                "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            )
