"""scripts/train_ddp.py as users run it: by torchrun, killed, and resumed with the same number of processes or not."""

import os
import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import pytest
import torch

import shardkit
from shardkit.hashing import derive
from tests.support.folders import names_in
from tests.support.shared import started

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train_ddp.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--rdzv-backend=c10d"]
LOOPBACK = ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
EVERY = 4  # steps between checkpoints
COUNT = 301
KEYS = [f"{i:04d}" for i in range(COUNT)]
FOREVER = 10_000  # epochs


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A dataset of small images; the last batch of an epoch is not full."""
    rng = np.random.default_rng(0)
    samples = ({"__key__": key, "png": rng.integers(0, 256, (8, 8, 3), dtype=np.uint8), "cls": 3} for key in KEYS)
    folder = tmp_path_factory.mktemp("images") / "train"
    shardkit.pack(samples, folder, shard_bytes="100kB", block_bytes="9kB", progress=False)
    return folder


@contextmanager
def training(images, folder, name, *, processes, epochs=FOREVER):
    """Start a training that resumes from the folder's checkpoint; its lists of keys are in a folder of that name."""
    (folder / name).mkdir()
    options = [f"--checkpoint={folder}/run.pt", f"--checkpoint-every={EVERY}", f"--log-keys={folder / name}"]
    launcher = [*TORCHRUN, *LOOPBACK, f"--nproc-per-node={processes}"] if processes else [sys.executable]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [*launcher, str(SCRIPT), str(images), "--batch-size=20", f"--epochs={epochs}", *options]
    with started(command, env=environment, text=True) as process:
        yield process


def finish(images, folder, name, *, processes, epochs):
    """Train to the end of an epoch, and return the last checkpoint."""
    with training(images, folder, name, processes=processes, epochs=epochs) as process:
        _, errors = process.communicate()

    assert process.returncode == 0, errors
    return torch.load(folder / "run.pt", weights_only=True)


def killed(images, folder, name, *, processes, steps, rank=None):
    """Kill a training, or one of its processes, after this many more steps, and return the last checkpoint."""
    log = folder / name / "rank0.txt"
    with training(images, folder, name, processes=processes) as process:
        first = wait_for(lambda: log.exists() and read_log(log))[0][1]
        wait_for(lambda: read_log(log)[-1][1] >= first + steps)
        ranks = {rank_of(child): child for child in children_of(process.pid)}
        watched = [os.pidfd_open(pid) for pid in (*ranks.values(), process.pid)]

        assert sorted(ranks) == list(range(processes))

        for pid in (process.pid, *ranks.values()) if rank is None else (ranks[rank],):
            os.kill(pid, signal.SIGKILL)
        process.communicate()
        for descriptor in watched:  # it is readable when the process has ended
            assert wait([descriptor], 60)
            os.close(descriptor)
    assert process.returncode == (-signal.SIGKILL if rank is None else 1)
    return torch.load(folder / "run.pt", weights_only=True)


def wait_for(condition):
    deadline = time.monotonic() + 100
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def rank_of(pid):
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(int(text.removeprefix(b"RANK=")) for text in variables if text.startswith(b"RANK="))


def read_log(path):
    """Return the epoch, step and key of each sample that a process has trained on, without an incomplete last line."""
    lines = path.read_text().splitlines(keepends=True)
    parts = [line.split() for line in lines if line.endswith("\n")]
    return [(int(epoch), int(step), key) for epoch, step, key in parts]


def consumed(folder, name, start, stop):
    """Return how often each sample came in each epoch, in the steps between two checkpoints, over all ranks."""
    logs = [read_log(path) for path in (folder / name).iterdir()]
    return Counter((epoch, key) for log in logs for epoch, step, key in log if start < step <= stop)


def random_steps(number):
    """Return the number of steps after which to kill: within one or two epochs of 15 or 16 steps."""
    return 5 + derive(number) % 25


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(("processes", "rank"), [(1, None), (2, None), (3, 1)])
def test_killed_and_resumed_on_as_many_processes_it_has_the_parameters_of_an_undisturbed_run(
    images, tmp_path, processes, rank
):
    checkpoint = killed(images, tmp_path, "killed", processes=processes, steps=random_steps(processes), rank=rank)
    epochs = checkpoint["loader"]["epoch"] + 1
    resumed = finish(images, tmp_path, "resumed", processes=processes, epochs=epochs)
    (tmp_path / "other").mkdir()
    alone = 0 if processes == 1 else processes  # the result without torchrun is the same
    undisturbed = finish(images, tmp_path / "other", "undisturbed", processes=alone, epochs=epochs)

    start, stop = checkpoint["step"], resumed["step"]
    keys = consumed(tmp_path, "killed", 0, start) + consumed(tmp_path, "resumed", start, stop)
    assert keys == Counter((epoch, key) for epoch in range(epochs) for key in KEYS)
    assert keys == consumed(tmp_path / "other", "undisturbed", 0, stop)
    assert resumed["loader"] == undisturbed["loader"]
    found, expected = parameters_of(resumed), parameters_of(undisturbed)
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def parameters_of(checkpoint):
    momenta = {i: state["momentum_buffer"] for i, state in checkpoint["optimizer"]["state"].items()}
    return checkpoint["network"] | momenta


@pytest.mark.multiprocess
@pytest.mark.slow
def test_killed_again_and_again_and_resumed_on_other_numbers_of_processes_every_sample_comes_once(images, tmp_path):
    checkpoints, keys = [0], Counter()
    for number, (processes, rank) in enumerate([(1, None), (4, 3), (2, None)]):
        name = f"run{number}"
        checkpoint = killed(images, tmp_path, name, processes=processes, steps=random_steps(10 + number), rank=rank)
        keys += consumed(tmp_path, name, checkpoints[-1], checkpoint["step"])
        checkpoints.append(checkpoint["step"])
    epochs = checkpoint["loader"]["epoch"] + 1
    last = finish(images, tmp_path, "last", processes=3, epochs=epochs)
    keys += consumed(tmp_path, "last", checkpoints[-1], last["step"])

    assert checkpoints == sorted(set(checkpoints))  # every run made progress
    assert keys == Counter((epoch, key) for epoch in range(epochs) for key in KEYS)
    assert set(names_in(images)) == names_of(shardkit.read_manifest(images))


def names_of(manifest):
    shards = [shard.url for shard in manifest.shards]
    side = {f"__index__/{url.partition('.tar')[0]}.*.parquet" for url in shards}
    side |= {"__index__/columns.*.parquet"} if manifest.columns else set()
    return {"manifest.json", *shards, *side, "__index__/blocks.*.npy", "__index__/manifest-*.json"}
