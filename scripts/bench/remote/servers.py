"""The tests' servers, all on this machine: nginx, Ceph's gateway, and proxies that emulate a distant server."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

RTT, RATE = 0.03, 10_000_000
"""The distant server: seconds per round trip, and bytes per second of each connection."""

sys.path.append(str(Path(__file__).parents[3]))  # for tests.support.servers


@dataclass
class Servers:
    """The running servers and their content.

    Attributes:
        folder: The folder that web servers serve.
        url: Its HTTP URL.
        ceph: The S3 server.
        bucket: One of its buckets.
        processes: The servers' processes.
        control: The port of the program that creates proxies.
        stack: Ends the proxies.
    """

    folder: Path
    url: str
    ceph: Any
    bucket: str
    processes: Any
    control: int
    stack: ExitStack

    @property
    def storage_options(self) -> dict[str, Any]:
        """The options with which s3fs and shardkit connect to the S3 server."""
        region = {"region_name": self.ceph.region}
        who = {"key": self.ceph.key, "secret": self.ceph.secret}
        return {**who, "endpoint_url": self.ceph.url, "client_kwargs": region}

    @property
    def pids(self) -> tuple[int, ...]:
        """The servers' processes."""
        return tuple(process.pid for process in self.processes.running)

    def distant(self, connections: int | None = None) -> Any:
        """Return a new proxy in front of the web server that emulates a distant server.

        Args:
            connections: The most connections at a time; None for no limit.
        """
        faults: Any = import_module("tests.support.servers.faults")
        proxy = self.stack.enter_context(closing(faults.FaultProxy(self.control, self.url)))
        proxy.distance(rtt=RTT, rate=RATE, connections=connections)
        return proxy

    def upload(self, folder: Path, prefix: str) -> str:
        """Put all files of a folder into the bucket; return their URL."""
        with self.ceph.client() as client:
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                key = f"{prefix}/{path.relative_to(folder).as_posix()}"
                with path.open("rb") as file:
                    client.put_object(Bucket=self.bucket, Key=key, Body=file)
        return f"s3://{self.bucket}/{prefix}"

    def signed(self, url: str) -> str:
        """Return a signed address of an S3 object."""
        _, _, key = url.removeprefix("s3://").partition("/")
        with self.ceph.client() as client:
            parameters = {"Bucket": self.bucket, "Key": key}
            address: str = client.generate_presigned_url("get_object", Params=parameters, ExpiresIn=7 * 86400)
        return address


@contextmanager
def serve(home: Path, folder: Path) -> Iterator[Servers]:
    """Start the servers, and end them on leaving the context.

    Args:
        home: An empty folder for the files that they write.
        folder: The folder that the web server serves.
    """
    programs: Any = import_module("tests.support.servers.programs")
    ceph: Any = import_module("tests.support.servers.ceph")
    processes: Any = import_module("tests.support.servers.processes")
    authority = import_module("trustme").CA()
    with ExitStack() as stack:
        started = stack.enter_context(closing(processes.Processes()))
        nginx = stack.enter_context(programs.Nginx(started, home / "nginx", authority))
        (nginx.folder / "input").symlink_to(folder)
        s3 = stack.enter_context(ceph.Ceph(started, home / "ceph"))
        proxies = stack.enter_context(programs.Proxies(started, home / "proxies"))
        own = stack.enter_context(ExitStack())
        yield Servers(folder, f"{nginx.url}/input", s3, s3.make_bucket(), started, proxies.port.number, own)
