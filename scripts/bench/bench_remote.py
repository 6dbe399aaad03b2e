#!/usr/bin/env python3
"""Measure how fast shardkit reads from web servers and object stores, compared with other clients and a raw socket.

There are five parts. read: a file, over one connection, from nginx and from Ceph's S3 gateway. far: blocks, over 1 to
16 connections, through a proxy that emulates a distant server: 30 ms per round trip, 10 MB/s per connection. near:
epochs of photographs, decoded and undecoded, from local files, HTTP and S3, and with a GET for each image. epochs-far:
the same from the distant server, and epochs of a dataset of 1 000 shards. steady: memory with a ``memory=`` setting,
descriptors and threads, in the course of an epoch of 1 000 shards.

This program starts and stops all servers, on this machine; scripts/test names the programs. Each client runs in a
process of its own. The clients take turns, and each ratio compares two runs of the same round. Received bytes are
compared with the stored ones. CPU is the client's alone. Clients that are not installed already are installed into
environments in the folder --work. All parts together take seven minutes.

Measured on an otherwise idle virtual machine with two shared cores, one run of each table, medians of three rounds.
Over the loopback, a client that waits less is quicker than one that does less, so CPU says more than MB/s::

    read                                         HTTP, MB/s  CPU s/GB  S3, MB/s  CPU s/GB
    -------------------------------------------  ----------  --------  --------  --------
    raw socket                                        5 700      0.06     2 430      0.07
    shardkit, stream                                  7 400      0.13     2 350      0.12
    shardkit, blocks of 4 MB                          6 200      0.16     1 430      0.23
    fsspec http, s3fs: files as by default            1 840      0.52     1 080      0.68
    fsspec http, s3fs: cat_file of 4 MB               5 340      0.19     1 030      0.47
    webdataset's pipe:curl                            3 760      0.27     2 170      0.21
    boto3, get_object                                                     2 290      0.08

near and epochs-far: an epoch of 1 500 photographs of 60 KB, decoded and cropped by two threads. With the distant
server, the single GETs used 16 connections and shardkit opened 32 by itself, through a proxy that takes much of both
processors. The "far away" rows were measured on another day, when the machine was quicker and only some rows of a JPEG
were decoded::

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

far: 1, 4 and 16 connections reach 96 to 99 % of the limit that a round trip per block of 1 or 4 MB sets; a raw socket
reaches no more. steady: with ``memory="128MB"`` and a slow training loop, the loader holds 128 MB of blocks, and 215 MB
in all with batches and indexes, as much as for local files. Neither descriptors nor threads grow over 1 000 shards.

Where shardkit is slower: boto3 needs two thirds of shardkit's CPU for an S3 object, because shardkit reads a response
in small pieces, checks which file and version it comes from and can resume in the middle. Blocks, each a signed
request, need twice as much CPU as a stream. Undecoded photographs are read two fifths as fast over HTTP and a seventh
as fast from S3 as from local files. From a distant server, single GETs return their first batch sooner, because a
shuffled batch from shards needs a block for nearly every sample. If a server accepts fewer connections at a time than
the 32 that a loader opens, the others wait. When one has waited for a second, idle ones are closed so that the server
can accept it, and the epoch continues, though unevenly. Only the server can close idle connections of other processes:
give it a short keep-alive time.
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
    """Measure the chosen parts, print their tables, and return all results."""
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
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=_WORK, help=f"folder for input and environments (default: {_WORK})"
    )
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--only", nargs="+", default=[], help="measure only names that contain one of these")
    parser.add_argument(
        "--tasks", nargs="+", choices=parts.TASKS, default=list(parts.TASKS), help="tasks for the part near"
    )
    parser.add_argument("--connections", nargs="+", type=int, default=[1, 4, 16], help="numbers for the part far")
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--megabytes", type=int, default=256, help="size of the file")
    parser.add_argument("--shards", type=int, default=1000, help="number of shards of the larger dataset")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="least time of a run; it makes whole passes")
    parser.add_argument("--quiet", type=float, default=0.05, help="repeat a run if others used more of a processor")
    parser.add_argument("--no-install", action="store_true", help="measure only what is installed")
    parser.add_argument("--json", type=Path, help="write all results into this file")
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
