"""The loaders that are compared: the tasks of each, its settings and its environment."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Peer:
    """A loader and how it is measured.

    Attributes:
        name: Its name in tables.
        module: Its module.
        tasks: The tasks that it is measured in.
        workers: The number of threads or processes; 0 for the process itself.
        options: The options of its module.
        package: The package to import, from the environment that runs the benchmark or from one of the same name.
    """

    name: str
    module: str
    tasks: tuple[str, ...]
    workers: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    package: str = ""


CEILING = "ceiling: bare threads"
OWN = "shardkit"

_PILLOW = {"pillow": True}
_SMALLER = ("raw", "small", "npy")

PEERS = (
    Peer(CEILING, "loading.bare", ("image", *_SMALLER)),
    Peer(OWN, "loading.with_shardkit", ("image", *_SMALLER)),
    Peer("shardkit, memory=64MB", "loading.with_shardkit", ("image", "raw"), options={"memory": "64MB"}),
    Peer("shardkit stream, DataLoader", "loading.with_shardkit", ("image",), options={"stream": True}),
    Peer("webdataset, DataLoader", "loading.with_webdataset", ("image",), options=_PILLOW, package="webdataset"),
    Peer("webdataset, DataLoader, our kernels", "loading.with_webdataset", ("image",), package="webdataset"),
    Peer("webdataset, in process", "loading.with_webdataset", _SMALLER, 0, package="webdataset"),
    Peer("webdataset, DataLoader", "loading.with_webdataset", _SMALLER, package="webdataset"),
    Peer("files, DataLoader", "loading.with_files", ("image",), options=_PILLOW),
    Peer("files, DataLoader, our kernels", "loading.with_files", ("image",)),
    Peer("HF datasets, DataLoader", "loading.with_datasets", ("image", "raw", "small"), package="datasets"),
    Peer("HF datasets, in process", "loading.with_datasets", ("raw", "small"), 0, package="datasets"),
    Peer("SPDL, FFmpeg", "loading.with_spdl", ("image",), package="spdl"),
    Peer("SPDL, our kernels", "loading.with_spdl", ("image",), options={"ours": True}, package="spdl"),
    Peer("SPDL", "loading.with_spdl", ("raw", "small"), package="spdl"),
    Peer("DALI, antialiased", "loading.with_dali", ("image",), options={"antialias": True}, package="dali"),
    Peer("DALI, not antialiased", "loading.with_dali", ("image",), package="dali"),
    Peer("DALI", "loading.with_dali", ("raw", "small"), package="dali"),
    Peer("DALI, bytes not touched", "loading.with_dali", ("raw",), options={"touch": False}, package="dali"),
    Peer("files, in process", "loading.with_files", ("raw",), 0),
    Peer("files, DataLoader", "loading.with_files", ("raw",)),
)
