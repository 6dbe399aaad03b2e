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

# Programs that a shell starts in the background ignore Ctrl-C. So would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run, so that a failure is due to a change and not to chance; no deadline, as timings vary.
# The nightly profile tries more examples, above all in the tests marked "nightly", which then take hours, not seconds:
# pytest --hypothesis-profile=nightly -m nightly -o timeout=0 -o faulthandler_timeout=0
settings.register_profile("default", derandomize=True, max_examples=50, deadline=None)
settings.register_profile("nightly", max_examples=1000, deadline=None)
settings.load_profile("default")


def pytest_collection_finish():
    """Exclude the objects that exist before the first test from garbage collection, which would visit them each time.

    Half a million objects stay to the end, and garbage collection in forked processes would copy their memory.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def dataset(tmp_path, originals):
    """Return a function that copies a dataset to be damaged; ``originals`` has a folder for each compression."""

    def copy(compression="none"):
        return Path(shutil.copytree(originals[compression], tmp_path / compression / "train"))

    return copy


@pytest.fixture(scope="session")
def processes():
    """Provide an object that starts servers and ends all of them, whatever happens to pytest."""
    with contextlib.closing(Processes()) as processes:
        yield processes


@pytest.fixture(scope="session")
def authority():
    """Return a certificate authority that no system trusts."""
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
    """Provide the program that runs the proxies."""
    with Proxies(processes, tmp_path_factory.mktemp("proxies")) as program:
        yield program


def close_connections(others):
    """Close this process's connections to all servers except some."""
    for server in set(connections._managers) - others:
        connections._close_idle(server)


@pytest.fixture
def proxy(proxies):
    """Return a function of a server's URL that makes a fault-injecting proxy in front of the server.

    Connections kept open to a proxy are closed after the test, because no later test uses the same proxy.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(close_connections, set(connections._managers))
        yield lambda url: stack.enter_context(contextlib.closing(FaultProxy(proxies.port.number, url)))


@pytest.fixture
def tries(monkeypatch):
    """Return the functions to call, one after the other, instead of waiting before a request is retried."""
    called = []
    lock = threading.Lock()  # a function may take some time, and all other threads wait for it

    def sleep(_):
        with lock:
            if called:
                called.pop(0)()

    monkeypatch.setattr("shardkit.storage.retry._sleep", sleep)
    return called


def pytest_terminal_summary(terminalreporter):
    """Print a table of how each network fault has ended, for each way of reading or writing through it."""
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
