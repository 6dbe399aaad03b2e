#!/usr/bin/env python3
"""How fast shardkit reads from web servers and object stores, beside other clients and beside a raw socket.

read: a file, over one connection, from nginx and from Ceph's S3 gateway. far: blocks, over 1 to 16 connections, through
a proxy that emulates a distance: 30 ms a round trip, 10 MB/s a connection. near: epochs of photographs, decoded and
not, from local files, HTTP and S3, and with a GET for each image. epochs-far: the same from far away, and of a dataset
of 1 000 shards. steady: memory with a setting, and descriptors and threads, in the course of an epoch of 1 000 shards.

All servers are on this machine, and started and ended by this program; scripts/test says which programs they are. Each
client runs in a process of its own, and they take turns; a ratio is of one round. What comes is compared with what was
stored. CPU is that of the client alone. Other clients are installed into environments in the folder --work, where they
are not installed already. All parts take seven minutes.

Measured on a virtual machine of two shared cores that does nothing else, one run of each table, medians of three
rounds. At the loopback a client that waits less is quicker than one that does less, so CPU says more than MB/s::

    read                                         HTTP, MB/s  CPU s/GB  S3, MB/s  CPU s/GB
    -------------------------------------------  ----------  --------  --------  --------
    raw socket                                        5 700      0.06     2 430      0.07
    shardkit, stream                                  7 400      0.13     2 350      0.12
    shardkit, blocks of 4 MB                          6 200      0.16     1 430      0.23
    fsspec http, s3fs: files as by default            1 840      0.52     1 080      0.68
    fsspec http, s3fs: cat_file of 4 MB               5 340      0.19     1 030      0.47
    webdataset's pipe:curl                            3 760      0.27     2 170      0.21
    boto3, get_object                                                     2 290      0.08

near and epochs-far: an epoch of 1 500 photographs of 60 KB, decoded and cropped by two threads. Far away, the single
GETs had 16 connections, and shardkit opened 32 by itself, through a proxy that needs much of both processors. The rows
from far away were measured on another day, when the machine was quicker and only some rows of a JPEG were decoded::

                                      images/s  CPU ms an image           first batch
    --------------------------------  --------  ------------------------  -----------
    shardkit, local files                2 130  0.90                           0.15 s
    shardkit, HTTP                       1 950  0.94 (1.06 times local)        0.20 s
    shardkit, S3                         1 650  0.92 (1.04 times local)        0.50 s
    a GET for each image, HTTP           1 470  1.20                           0.33 s
    a GET for each image, S3               270  2.43                           0.90 s
    shardkit, far away                   1 390  0.69                           0.86 s
    shardkit, far away, 1 000 shards     1 360  0.83                           0.65 s
    a GET for each image, far away         410  1.04                           0.32 s

far: 1, 4 and 16 connections bring 96 to 99 % of what can be had by waiting a round trip for each block of 1 or 4 MB; a
raw socket brings no more. steady: with ``memory="128MB"`` and a slow training loop, 128 MB of blocks are held, and 215
MB in all with batches and indexes, as much as for local files. Over 1 000 shards neither descriptors nor threads grow.

Where shardkit is not ahead: boto3 needs two thirds of its CPU for an S3 object, because shardkit takes an answer in
small pieces, checks which file and version it is from and can continue in its middle. Blocks, each a signed request,
need twice as much as a stream. Photographs that are not decoded come two fifths as fast from HTTP and a seventh as fast
from S3 as from local files. A single GET has its first batch sooner from far away, because a shuffled batch of shards
needs a block for nearly each sample. If a server serves fewer connections at a time than a loader opens, 32, the others
wait; when one has waited for a second, idle ones are closed, so that the server turns to it, and the epoch goes on,
though in jerks. Only the server can close idle connections of other processes: give it a short keep-alive time.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from loading.environments import python_of
from loading.inputs import make_inputs
from loading.notes import describe_machine
from remote import parts, report
from remote.inputs import make_large, make_many
from remote.servers import serve

_WORK = Path(tempfile.gettempdir(), "shardkit-bench-loading")  # shared with bench_loading.py
_PARTS = ("read", "far", "near", "epochs-far", "steady")


def measure(arguments: argparse.Namespace, bench: parts.Bench) -> dict[str, Any]:
    """Measure parts, print their tables, and return everything."""
    results: dict[str, Any] = {}
    if "read" in arguments.parts:
        results["read"] = parts.read_file(bench)
        for protocol, runs in results["read"].items():
            print(f"\n{report.read_table(protocol, runs)}", flush=True)
    if "far" in arguments.parts:
        results["far"] = parts.read_far(bench, arguments.connections)
        print(f"\n{report.far_table(results['far'])}", flush=True)
    if "near" in arguments.parts:
        results["near"] = parts.load_near(bench, arguments.tasks)
        for task, runs in results["near"].items():
            print(f"\n{report.epoch_table(task, runs)}", flush=True)
    if "epochs-far" in arguments.parts:
        results["epochs far"], results["connections"] = parts.load_far(bench)
        for task, runs in results["epochs far"].items():
            print(f"\n{report.epoch_table(f'{task}, from far away', runs, results['connections'])}", flush=True)
    if "steady" in arguments.parts:
        results["steady"] = parts.keep_steady(bench)
        print(f"\n{report.steady_table(results['steady'])}")
    print(f"\n{report.targets_table(results)}")
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=_WORK, help=f"for input and environments; by default {_WORK}")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--only", nargs="+", default=[], help="clients and loaders whose name contains one of these")
    parser.add_argument("--tasks", nargs="+", choices=parts.TASKS, default=list(parts.TASKS), help="of near")
    parser.add_argument("--connections", nargs="+", type=int, default=[1, 4, 16], help="of far")
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--megabytes", type=int, default=256, help="of the file")
    parser.add_argument("--shards", type=int, default=1000, help="of the dataset of many shards")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="that each run takes, in whole passes")
    parser.add_argument("--quiet", type=float, default=0.05, help="repeat a run if others used more of a processor")
    parser.add_argument("--no-install", action="store_true", help="measure only what is installed")
    parser.add_argument("--json", type=Path, help="write everything into a file")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    python = sys.executable if arguments.no_install else python_of("input", work)
    images = make_inputs(work, arguments.images, 100, python)
    large, many = make_large(work, arguments.megabytes), make_many(work, images / "files", arguments.shards)
    state = describe_machine()
    print(", ".join(f"{name} {value}" for name, value in state.items()), flush=True)
    with tempfile.TemporaryDirectory() as home, serve(Path(home), work) as servers:
        bench = parts.Bench(
            servers,
            parts.Inputs(images, large, many),
            work,
            arguments.rounds,
            arguments.quiet,
            arguments.seconds,
            not arguments.no_install,
            arguments.only,
        )
        results = measure(arguments, bench)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": state, **results}, indent=1))


if __name__ == "__main__":
    main()
