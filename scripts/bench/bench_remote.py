#!/usr/bin/env python3
"""How fast shardkit reads from web servers and object stores, beside other clients and beside a raw socket.

read: a file, over one connection, from nginx and from Ceph's S3 gateway. far: blocks, over 1 to 16 connections, through
a proxy that emulates a distance: 30 ms a round trip, 10 MB/s a connection. near: epochs of photographs, decoded and
not, from local files, HTTP and S3, and with a GET for each image. epochs-far: the same from far away, and of a dataset
of 1 000 shards. steady: memory with a setting, and descriptors and threads, in the course of an epoch of 1 000 shards.

All servers are on this machine, and started and ended by this program; scripts/test says which programs they are. Each
client runs in a process of its own, and they take turns; a ratio is of one round. What comes is compared with what was
stored. CPU is that of the client alone. Other clients are installed into environments in the folder --work, where they
are not installed already.
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
