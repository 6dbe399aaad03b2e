#!/usr/bin/env python3
"""How fast shardkit loads, beside other loaders and beside what the hardware can do.

image: photographs of 60 KB are decoded, cropped at random to 224 x 224, mirrored, and become batches of 64. raw: their
bytes and labels are handed over. small: texts of 300 bytes and labels. npy: arrays of 1 KB. Each loader runs in a
process of its own, with two threads or two processes, and they take turns; a ratio is of one round. The ceiling is the
same work in bare threads, on bytes in memory. Other loaders are installed into environments in the folder --work, where
they are not installed already.

--classic: how much faster than a loop over loose files the loader is, with 1 to 8 threads or processes, batches of 10
to 1000, and four pipelines of albumentations from light to heavy. Starting is part of the time, and what comes out is
compared to the last bit.

Either takes less than 15 minutes on a machine with two processors that does nothing else. A run that other programs
disturbed is repeated, twice at most. The input is made of photographs that scikit-image and scikit-learn ship. What
comes out is compared: all samples, each once. Tables, JSON (``--json FILE``) and pictures (``--plot FILE``) have the
medians of rounds. ``memory`` is the most that a loader held, ``beyond imports`` how much more than before it was made,
``first batch`` the time from then on. One line says how long the GIL is held for an image.

Measured on a virtual machine of two shared cores that does nothing else, CPython 3.11, beside loaders that also have
two threads or two processes. Rates of shardkit in samples/s, then how many times as fast as each other loader it is::

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

The first batch of photographs came after 0.20 s. The loader took 280 MB beyond its imports, with ``memory="64MB"`` 144
MB. It compares the CRC-32 of every block or field, which none of the others does. It holds the GIL for at most 135 us
an image. A ``ShardStream`` in a DataLoader is 1.6 times as fast as webdataset, and as fast with the same decoder.

All of a JPEG is decoded, whatever the crop, so that damage anywhere in it is an error. Until format 2, the rows below a
crop were left out: random crops were 1.13 times as fast as they are now, and center crops 1.03 times.

Where Python and memory decide, such a machine is not the same from one minute to the next. On another day it gave 2 920
(with fewer rows decoded), 58 800, 723 000 and 860 000.

Undecoded files of 60 KB come sooner from loose files that the system has in memory, and from DALI: copying and
comparing one takes 10 us, Python 10 us more, and a quarter of the time threads wait for each other. With ``--classic``,
when it was last run, before all rows were decoded, an epoch of 1 500 photographs ran with two threads at 0.85 to 0.97
of the speed of bare threads, and with one thread at 0.93 to 0.99 of the speed of a loop, starting included. Starting
processes takes 1.5 s, longer than that epoch, so they are for long ones.
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

_INPUT, _CLASSIC_INPUT = (4000, 200_000), (1500, 100)  # images, and small samples, of which --classic needs none
_WORK = Path(tempfile.gettempdir(), "shardkit-bench-loading")


def measure_gil(folder: Path, seconds: float) -> dict[str, float]:
    """Return for how long shardkit holds the GIL, as ``loading/gil.py`` says."""
    program = Path(__file__).with_name("loading") / "gil.py"
    command = [sys.executable, str(program), str(folder), str(seconds)]
    done = subprocess.run(command, env=child_environment(), stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def compare_loaders(arguments: argparse.Namespace, folder: Path, title: str) -> dict[str, Any]:
    """Measure shardkit and the others at all tasks, and print tables."""
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
    """Measure the classic experiment, and print tables."""
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
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=_WORK, help=f"for input and environments; by default {_WORK}")
    parser.add_argument("--images", type=int, help="by default 4000; 1500 with --classic")
    parser.add_argument("--smalls", type=int, help="samples of small and npy; by default 200000; 100 with --classic")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quiet", type=float, default=0.05, help="repeat a run if others used more of a processor")
    parser.add_argument("--no-install", action="store_true", help="measure only what is installed")
    parser.add_argument("--json", type=Path, help="write everything into a file")
    parser.add_argument("--plot", type=Path, help="draw a picture, .png or .svg, if matplotlib is installed")
    tasks = parser.add_argument_group("loaders")
    tasks.add_argument("--tasks", nargs="+", choices=BATCH_SIZES, default=list(BATCH_SIZES))
    tasks.add_argument("--only", nargs="+", help="loaders whose name contains one of these")
    tasks.add_argument("--seconds", type=float, default=1.5, help="that each run takes, in whole passes")
    tasks.add_argument("--limit", type=float, default=4, help="seconds after which a slow loader's pass is left")
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
