"""The parts of the benchmark: a file through each client, blocks from far away, epochs. Each returns runs by name."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loading.environments import find_python
from loading.job import Job
from loading.notes import note
from loading.peers import Peer
from loading.rounds import Runs, child_environment, measure_rounds

from remote.servers import Servers

CEILING, STREAM, BLOCKS = "raw socket", "shardkit, stream", "shardkit, blocks of 4 MB"
FSSPEC, S3FS = "fsspec http, default file", "s3fs, default file"
LOCAL, HTTP, S3 = "shardkit, local files", "shardkit, HTTP", "shardkit, S3"
GETS, S3_GETS = "a GET for each image, HTTP", "a GET for each image, S3"
FAR, FAR_MANY, FAR_GETS = "shardkit, far", "shardkit, far, 1 000 shards", "a GET for each image, far"

MEGABYTE = 1_000_000
BLOCK_SIZES = (MEGABYTE, 4 * MEGABYTE)
TASKS = ("image", "raw")
MEMORY = 128_000_000
"""The ``memory=`` setting for measuring memory."""
_BLOCK = {"block": 4 * MEGABYTE}
_GETS_AT_A_TIME = 16  # from the distant server
_LONG = 60.0  # seconds: no pass is stopped early

_OF_BOTH = (
    Peer(CEILING, "remote.with_sockets", ()),
    Peer(STREAM, "remote.with_storage", ()),
    Peer(BLOCKS, "remote.with_storage", (), options=_BLOCK),
)
READERS = {
    "HTTP": (
        *_OF_BOTH,
        Peer(FSSPEC, "remote.with_fsspec", (), package="aiohttp"),
        Peer("fsspec http, cat_file of 4 MB", "remote.with_fsspec", (), options=_BLOCK, package="aiohttp"),
        Peer("webdataset, pipe:curl", "remote.with_curl", (), package="webdataset"),
    ),
    "S3": (
        *_OF_BOTH,
        Peer(S3FS, "remote.with_fsspec", (), package="s3fs"),
        Peer("s3fs, cat_file of 4 MB", "remote.with_fsspec", (), options=_BLOCK, package="s3fs"),
        Peer("boto3, get_object", "remote.with_boto3", (), package="boto3"),
        Peer("webdataset, pipe:curl, signed URL", "remote.with_curl", (), package="webdataset"),
    ),
}
"""The clients that read a file, by protocol."""


@dataclass(frozen=True)
class Inputs:
    """Folders below the served one; see ``inputs``."""

    images: Path
    large: Path
    many: Path


@dataclass(frozen=True)
class Bench:
    """Settings of all measurements.

    Attributes:
        servers: The servers.
        inputs: The folders that they serve.
        work: The folder of the environments.
        rounds: The number of rounds.
        quiet: See ``measure_rounds``.
        seconds: The least time of a run, which makes whole passes.
        install: Whether environments may be created.
        only: Measure only peers whose name contains one of these; all if there are none.
    """

    servers: Servers
    inputs: Inputs
    work: Path
    rounds: int
    quiet: float
    seconds: float
    install: bool
    only: Sequence[str]

    def url(self, folder: Path) -> str:
        """Return the HTTP URL of a part of the input."""
        return f"{self.servers.url}/{folder.relative_to(self.servers.folder).as_posix()}"

    def measure(self, peers: Sequence[Peer], folder: Path) -> Runs:
        """Measure peers in turns."""
        chosen = [peer for peer in peers if not self.only or any(part in peer.name for part in self.only)]

        def make_job(peer: Peer) -> Job:
            job = Job(peer.tasks[0], peer.module, str(folder), peer.workers, peer.options, self.seconds, _LONG)
            return replace(job, servers=self.servers.pids)

        if not chosen:
            return {}
        return measure_rounds(
            chosen,
            lambda peer: find_python(peer.package, self.work, install=self.install),
            make_job,
            rounds=self.rounds,
            quiet=self.quiet,
        )


def read_file(bench: Bench) -> dict[str, Runs]:
    """Measure how each client reads a file, over one connection."""
    large = bench.inputs.large
    size = (large / "large").stat().st_size
    task = f"read-{size // MEGABYTE}"
    stored = f"{bench.servers.upload(large, large.name)}/large"
    runs = {}
    for protocol, peers in READERS.items():
        options: dict[str, Any] = {"url": f"{bench.url(large)}/large"}
        if protocol == "S3":
            options = {"url": stored, "storage_options": bench.servers.storage_options}
        told = []
        for peer in peers:
            address = options
            if protocol == "S3" and peer.module in ("remote.with_sockets", "remote.with_curl", ()):
                address = {"url": bench.servers.signed(stored)}
            told.append(replace(peer, tasks=(task,), workers=1, options={**peer.options, "size": size, **address}))
        runs[protocol] = bench.measure(told, large)
    return runs


def read_far(bench: Bench, connections: Sequence[int]) -> dict[str, Runs]:
    """Measure reading distant blocks over each number of connections, by a raw socket and by shardkit."""
    large = bench.inputs.large
    path = (large / "large").relative_to(bench.servers.folder)
    runs = {}
    for count in connections:
        url = f"{bench.servers.distant(count).url}/input/{path}"
        for block in BLOCK_SIZES:
            size = min((large / "large").stat().st_size, count * max(2 * block, 5 * MEGABYTE)) // block * block
            options = {"url": url, "size": size, "block": block}
            peers = [
                Peer(name, f"remote.{module}", (f"read-{size // MEGABYTE}",), count, options)
                for name, module in ((CEILING, "with_sockets"), (BLOCKS, "with_storage"))
            ]
            runs[f"{count} x {block // MEGABYTE} MB"] = bench.measure(peers, large)
    return runs


def load_near(bench: Bench, tasks: Sequence[str]) -> dict[str, Runs]:
    """Measure epochs from local files, HTTP and S3, and with a GET for each image."""
    folder = bench.inputs.images
    options = {"storage_options": bench.servers.storage_options}
    shards = {"url": bench.servers.upload(folder / "image", f"{folder.name}/image"), **options}
    files = {"url": bench.servers.upload(folder / "files", f"{folder.name}/files"), **options}
    runs = {}
    for task in tasks:
        peers = [
            Peer(LOCAL, "loading.with_shardkit", (task,)),
            Peer(HTTP, "loading.with_shardkit", (task,), options={"url": f"{bench.url(folder)}/image"}),
            Peer(S3, "loading.with_shardkit", (task,), options=shards),
            Peer(GETS, "remote.with_gets", (task,), options={"url": f"{bench.url(folder)}/files"}),
            Peer(S3_GETS, "remote.with_gets", (task,), options=files, package="boto3"),
        ]
        runs[task] = bench.measure(peers, folder)
    return runs


def load_far(bench: Bench) -> tuple[dict[str, Runs], dict[str, int]]:
    """Measure epochs from the distant server; also return the most connections that each loader opened."""
    proxies = {name: bench.servers.distant() for name in (FAR, FAR_MANY, FAR_GETS)}
    images, many = (
        folder.relative_to(bench.servers.folder).as_posix() for folder in (bench.inputs.images, bench.inputs.many)
    )
    near = [
        Peer(LOCAL, "loading.with_shardkit", ("image",)),
        Peer(FAR, "loading.with_shardkit", ("image",), options={"url": f"{proxies[FAR].url}/input/{images}/image"}),
        Peer(
            FAR_GETS,
            "remote.with_gets",
            ("image",),
            _GETS_AT_A_TIME,
            {"url": f"{proxies[FAR_GETS].url}/input/{images}/files"},
        ),
    ]
    options = {"url": f"{proxies[FAR_MANY].url}/input/{many}/image"}
    runs = bench.measure(near, bench.inputs.images)
    runs |= bench.measure([Peer(FAR_MANY, "loading.with_shardkit", ("image",), options=options)], bench.inputs.many)
    return {"image": runs}, {name: proxy.connections()[1] for name, proxy in proxies.items()}


def keep_steady(bench: Bench) -> dict[str, dict[str, Any]]:
    """Measure the memory, descriptors and threads of an epoch of many shards, with little memory for fetching ahead."""
    many = bench.inputs.many
    options = {"memory": f"{MEMORY // MEGABYTE}MB"}
    places: dict[str, dict[str, Any]] = {LOCAL: {}, HTTP: {"url": f"{bench.url(many)}/image"}}
    found = {}
    for name in (LOCAL, HTTP, S3):
        if bench.only and not any(part in name for part in bench.only):
            continue
        if name == S3:
            stored = bench.servers.upload(many / "image", f"{many.name}/image")
            places[S3] = {"url": stored, "storage_options": bench.servers.storage_options}
        job = Job("raw", "loading.with_shardkit", str(many), 2, {**options, **places[name]})
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("steady.py")), job.to_json()]
        done = subprocess.run(command, env=child_environment(), stdout=subprocess.PIPE, text=True, check=True)
        found[name] = json.loads(done.stdout)
        note(f"{name}: {done.stdout.strip()}")
    return found
