#!/usr/bin/env python3
"""Measure how fast shardkit loads, compared with other loaders and with what the hardware can do.

There are four tasks. image: photographs of 60 KB are decoded, cropped at random to 224 x 224, mirrored and batched by
64. raw: the loader returns their bytes and labels. small: texts of 300 bytes and labels. npy: arrays of 1 KB. Each
loader runs in a process of its own, with two threads or two processes. The loaders take turns, and each ratio compares
two runs of the same round. The ceiling is the same work in bare threads, on bytes in memory. Loaders that are not
installed already are installed into environments in the folder --work.

--classic measures how much faster the loader is than a loop over loose files, with 1 to 8 threads or processes, batches
of 10 to 1000, and four pipelines of albumentations from light to heavy. The time includes starting the loader, and the
batches must be equal to the last bit.

Either takes less than 15 minutes on an otherwise idle machine with two processors. A run that other programs disturbed
is repeated, at most twice. The input is made from photographs that scikit-image and scikit-learn ship. Each pass is
checked: every sample must come exactly once. Tables, JSON (``--json FILE``) and pictures (``--plot FILE``) show the
medians of the rounds. ``memory`` is the peak of a loader, ``beyond imports`` its growth since before the loader was
made, ``first batch`` the time from making the loader to its first batch. One line says how long the GIL is held per
image.

Measured on an otherwise idle virtual machine with two shared cores, CPython 3.11, compared with loaders that also have
two threads or two processes. The first row is shardkit's rate; the others say how many times as fast as each loader
shardkit is::

                                                          image    raw    small      npy
    ---------------------------------------------------  ------  ------  -------  -------
    shardkit, samples/s                                   2 170  40 000  553 000  658 000
    bare threads on bytes in memory: the ceiling           0.82    0.17     0.13     0.09
    webdataset as documented, DataLoader                   1.79     4.0     12.3     19.5
    webdataset in the training process                              2.4     22.9     31.6
    webdataset with shardkit's decoder, DataLoader         1.10
    HF datasets 5.2, DataLoader                            1.82     4.0     17.7
    loose files, DataLoader                                1.65     3.2
    loose files with shardkit's decoder, DataLoader        1.11
    loose files in the training process                            0.67
    SPDL 0.8 with its decoder                              1.88     6.0     67.1
    SPDL 0.8 with shardkit's decoder                       1.21
    DALI 2.4 on the CPU, antialiased                       1.50    0.63      3.4
    DALI 2.4 on the CPU, not antialiased                   1.25

The first batch of photographs came after 0.20 s. The loader took 280 MB beyond its imports, or 144 MB with
``memory="64MB"``. It compares the CRC-32 of every block or field, which no other loader does. It holds the GIL for at
most 135 us per image. A ``ShardStream`` in a DataLoader is 1.6 times as fast as webdataset, and equally fast with the
same decoder.

A JPEG is decoded completely, whatever the crop, so that damage anywhere in it is an error. Before format 2, the rows
below a crop were not decoded: random crops were 1.13 times as fast as they are now, and center crops 1.03 times.

Rates that are bound by Python or by memory vary from one minute to the next on such a machine. On another day they were
2 920 (with fewer rows decoded), 58 800, 723 000 and 860 000.

For undecoded files of 60 KB, loose files in the system's page cache and DALI are faster: copying and comparing a file
takes 10 us, Python takes 10 us more, and threads wait for each other for a quarter of the time. ``--classic`` was last
run before all rows were decoded. An epoch of 1 500 photographs, including the start, ran with two threads at 0.85 to
0.97 of the speed of bare threads, and with one thread at 0.93 to 0.99 of the speed of a loop. Starting processes takes
1.5 s, longer than that epoch, so they only pay off in long epochs.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from loading.classic import BATCH_SIZES as CLASSIC_BATCH_SIZES
from loading.classic import WORKERS, measure_classic, summarise_classic
from loading.environments import find_python, python_of
from loading.inputs import make_inputs
from loading.job import BATCH_SIZES, PIPELINES, Job
from loading.notes import describe_machine
from loading.peers import OWN, PEERS, Peer
from loading.rounds import child_environment, measure_rounds, summarise
from loading.tables import classic_tables, task_table

_INPUT, _CLASSIC_INPUT = (4000, 200_000), (1500, 100)  # images, and small samples, which --classic does not need
_WORK = Path(tempfile.gettempdir(), "shardkit-bench-loading")


def measure_gil(folder: Path, seconds: float) -> dict[str, float]:
    """Return how long shardkit holds the GIL, as measured by ``loading/gil.py``."""
    program = Path(__file__).with_name("loading") / "gil.py"
    command = [sys.executable, str(program), str(folder), str(seconds)]
    done = subprocess.run(command, env=child_environment(), stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def compare_loaders(arguments: argparse.Namespace, folder: Path, title: str) -> dict[str, Any]:
    """Measure shardkit and the other loaders in all tasks, and print tables."""
    results: dict[str, dict[str, Any]] = {}
    for task in arguments.tasks:
        peers = [peer for peer in PEERS if task in peer.tasks]
        if arguments.only:
            peers = [peer for peer in peers if any(part in peer.name for part in arguments.only)]

        def make_job(peer: Peer, task: str = task) -> Job:
            options = peer.options
            return Job(task, peer.module, str(folder), peer.workers, options, arguments.seconds, arguments.limit)

        runs = measure_rounds(
            peers,
            lambda peer: find_python(peer.package, arguments.work, install=not arguments.no_install),
            make_job,
            rounds=arguments.rounds,
            quiet=arguments.quiet,
        )
        rows = summarise(runs)
        print(f"\n{task_table(task, rows)}", flush=True)
        results[task] = {"loaders": rows, "runs": runs}
        if task == "image" and OWN in rows:
            results[task]["gil"] = gil = measure_gil(folder, arguments.seconds)
            print(f"\nshardkit holds the GIL for {gil['with_gil_us']:.0f} us a sample at most")
    if arguments.plot:
        from loading.plots import plot_tasks

        plot_tasks({task: result["loaders"] for task, result in results.items()}, arguments.plot, title)
    return {"tasks": results}


def compare_ways(arguments: argparse.Namespace, folder: Path, title: str) -> dict[str, Any]:
    """Run the classic experiment, and print tables."""
    runs = measure_classic(
        find_python("albumentations", arguments.work, install=not arguments.no_install),
        folder,
        arguments.pipelines,
        arguments.workers,
        arguments.batch_sizes,
        rounds=arguments.rounds,
        quiet=arguments.quiet,
    )
    rows = summarise_classic(runs)
    print(f"\n{classic_tables(rows)}")
    if arguments.plot:
        from loading.plots import plot_classic

        plot_classic(rows, arguments.plot, title)
    listed = {
        pipeline: [vars(way) | {"rounds": results} for way, results in ways.items()] for pipeline, ways in runs.items()
    }
    return {"classic": rows, "runs": listed}


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=_WORK, help=f"folder for input and environments (default: {_WORK})"
    )
    parser.add_argument("--images", type=int, help="number of images (default: 4000; 1500 with --classic)")
    parser.add_argument("--smalls", type=int, help="samples of small and npy (default: 200000; 100 with --classic)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quiet", type=float, default=0.05, help="repeat a run if others used more of a processor")
    parser.add_argument("--no-install", action="store_true", help="measure only what is installed")
    parser.add_argument("--json", type=Path, help="write all results into this file")
    parser.add_argument("--plot", type=Path, help="draw the results into this .png or .svg file (needs matplotlib)")
    tasks = parser.add_argument_group("loaders")
    tasks.add_argument("--tasks", nargs="+", choices=BATCH_SIZES, default=list(BATCH_SIZES))
    tasks.add_argument("--only", nargs="+", help="measure only loaders whose name contains one of these")
    tasks.add_argument("--seconds", type=float, default=1.5, help="least time of a run; it makes whole passes")
    tasks.add_argument("--limit", type=float, default=4, help="seconds after which a pass is stopped early")
    classic = parser.add_argument_group("the classic experiment")
    classic.add_argument("--classic", action="store_true")
    classic.add_argument("--pipelines", nargs="+", choices=PIPELINES, default=list(PIPELINES))
    classic.add_argument("--workers", nargs="+", type=int, default=WORKERS)
    classic.add_argument("--batch-sizes", nargs="+", type=int, default=CLASSIC_BATCH_SIZES)
    arguments = parser.parse_args()
    if arguments.plot and not importlib.util.find_spec("matplotlib"):
        parser.error("--plot needs matplotlib; install it with: pip install 'shardkit[plot]'")
    arguments.work = arguments.work.resolve()
    python = sys.executable if arguments.no_install else python_of("input", arguments.work)
    images, smalls = _CLASSIC_INPUT if arguments.classic else _INPUT
    folder = make_inputs(arguments.work, arguments.images or images, arguments.smalls or smalls, python)
    state = describe_machine()
    print(", ".join(f"{name} {value}" for name, value in state.items()), flush=True)
    title = f"{state['processor']}, {state['processors']} processors, Python {state['python']}"
    results = (compare_ways if arguments.classic else compare_loaders)(arguments, folder, title)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": state, **results}, indent=1))


if __name__ == "__main__":
    main()
