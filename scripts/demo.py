#!/usr/bin/env python3
"""Pack handwritten digits into shards, train from them, stop and resume; run scripts/demo to install everything first.

The digits are the 1,797 scans that scikit-learn ships, 8 x 8 pixels each: small, but real. All files stay in the
folder, and a second run reuses them.
"""

import argparse
import io
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

import shardkit

EPOCHS = 10
BATCH_SIZE = 64
SHARD_SAMPLES = 80  # about 18 training shards from these few samples; real shards have 256 MB
LEAST_ACCURACY = 0.97
PROGRAMS = Path(sys.executable).parent  # where the shardkit program was installed


def write_digits(folder: Path) -> int:
    """Write the scans as PNG files in class folders, except those already there, and return the number of scans."""
    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(np.uint8)  # the scans have 17 shades of grey, 0 to 16
    for number, (scan, label) in enumerate(zip(pixels, digits.target, strict=True)):
        file = io.BytesIO()
        Image.fromarray(scan).save(file, "PNG")
        path = folder / str(label) / f"{number:04d}.png"
        if not (path.exists() and path.read_bytes() == file.getvalue()):  # a killed run may have left half a file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.getvalue())
    return len(pixels)


def pack_digits(source: Path, destination: Path, compression: str) -> dict[str, shardkit.Manifest]:
    """Pack the scans into shards, four fifths for training, and return the manifest of each split."""
    return shardkit.pack(
        shardkit.ImageFolder(source),
        destination,
        splits={"train": 0.8, "val": 0.2},
        shard_samples=SHARD_SAMPLES,
        compression=compression,
        columns={"label": "cls"},
        seed=0,
    )


def digits(shards: str) -> shardkit.ShardDataset:
    """Return the samples of shards: {"image": uint8 (8, 8, 3), "label": int}."""
    return shardkit.ShardDataset(shards, fields={"image": "png", "label": "cls"})


def pixels(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a batch's images as input of the network, float32 (batch, 1, 8, 8); their three channels are equal."""
    return batch["image"][:, :1] / 255


def make_network() -> nn.Sequential:
    """Return a small convolutional network for 8 x 8 pixels and ten classes."""
    return nn.Sequential(
        *[nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()],
        *[nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Flatten(), nn.Dropout(0.3), nn.Linear(256, 10)],
    )


class Training:
    """The training of a network from shards; the same seed gives the same network."""

    def __init__(self, shards: str, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.network = make_network()
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=3e-3)
        self.loader = shardkit.ShardLoader(digits(shards), BATCH_SIZE, seed=seed)

    def run(self, *, stop: tuple[int, int] | None = None) -> None:
        """Train to the end, or stop after some batches of an epoch: (epoch, batches)."""
        while self.loader.epoch < EPOCHS:
            epoch, started, losses, samples = self.loader.epoch, time.perf_counter(), 0.0, 0
            for number, batch in enumerate(self.loader, start=1):  # each pass is a new epoch, in another order
                loss = nn.functional.cross_entropy(self.network(pixels(batch)), batch["label"])
                self.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                losses += loss.item() * len(batch["label"])
                samples += len(batch["label"])
                if (epoch, number) == stop:
                    break
            seconds, mean = time.perf_counter() - started, losses / samples
            print(f"  epoch {epoch + 1:2d} of {EPOCHS}: {samples:,} samples in {seconds:.1f} s, loss {mean:.3f}")
            if stop and epoch == stop[0]:
                return

    def save(self, path: Path) -> None:
        """Write everything needed to resume: the states of the network, the optimizer and the loader."""
        checkpoint = {name: getattr(self, name).state_dict() for name in ("network", "optimizer", "loader")}
        torch.save({**checkpoint, "random": torch.get_rng_state()}, path)  # the random state is for dropout

    def load(self, path: Path) -> None:
        """Resume from a checkpoint."""
        checkpoint = torch.load(path, weights_only=True)
        for name in ("network", "optimizer", "loader"):
            getattr(self, name).load_state_dict(checkpoint[name])
        torch.set_rng_state(checkpoint["random"])


def train(shards: str, checkpoint: Path, *, seed: int) -> nn.Sequential:
    """Train a network twice, once undisturbed and once stopped and resumed, and return it if both results are equal.

    Raises:
        AssertionError: They are not equal.
    """
    print(f"seed {seed}, undisturbed:")
    undisturbed = Training(shards, seed=seed)
    undisturbed.run()

    stop = EPOCHS // 2, 7 + seed % 10
    print(f"seed {seed}, once more, but stopped in mid-epoch, after {stop[1]} batches:")
    stopped = Training(shards, seed=seed)
    stopped.run(stop=stop)
    stopped.save(checkpoint)
    print(f"  network, optimizer and loader are in {checkpoint}; the loader's state is:")
    print(f"  {json.dumps(stopped.loader.state_dict())}")
    del stopped

    print("  resumed from the file, in new objects:")
    resumed = Training(shards, seed=seed)
    resumed.load(checkpoint)
    resumed.run()
    if not is_same(undisturbed.network, resumed.network):
        raise AssertionError("the run that was resumed ended with other parameters than the undisturbed one")
    parameters = sum(parameter.numel() for parameter in resumed.network.parameters())
    print(f"  all {parameters:,} parameters are equal to those of the undisturbed run, to the last bit")
    return resumed.network


def is_same(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two networks have the same parameters and statistics, to the last bit."""
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        ours[name].numpy().tobytes() == theirs[name].numpy().tobytes() for name in ours
    )


@torch.no_grad()
def count_right(network: nn.Sequential, shards: str) -> tuple[int, int]:
    """Return the number of samples that the network classifies correctly, and the number of all samples."""
    network.eval()
    right, samples = 0, 0
    for batch in shardkit.ShardLoader(digits(shards), BATCH_SIZE, shuffle=False):
        right += int((network(pixels(batch)).argmax(dim=1) == batch["label"]).sum())
        samples += len(batch["label"])
    return right, samples


def run_command(*command: str) -> None:
    """Run a command as a user would, after printing it."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    path = f"{PROGRAMS}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    subprocess.run(command, check=True, env=os.environ | {"PATH": path})


def run(folder: Path, seeds: int) -> float:
    """Run all steps, and return the accuracy of the worst network."""
    images = folder / "images"
    print(f"All files of this demo go to {folder.resolve()}.")

    print("\n== 1. Real images: scanned handwritten digits, 8 x 8 pixels, as PNG files in a folder for each class")
    print(f"{write_digits(images):,} files are in {images}, for example {images / '0' / '0000.png'}.")

    print("\n== 2. Packed in a shuffled order, once plain and once compressed; about a fifth is kept for validation")
    for compression in ("none", "zst"):
        for manifest in pack_digits(images, folder / f"shards-{compression}", compression).values():
            shards, kilobytes = manifest.shards, sum(shard.file_size for shard in manifest.shards) / 1000
            print(f"{manifest.url}: {manifest.num_samples:,} samples in {len(shards)} shards, {kilobytes:,.0f} KB")
    print("A tar gives each file 1,024 bytes or more. These have about 120, so that zst has much to save.")

    train_shards, val_shards = (str(folder / "shards-zst" / split) for split in ("train", "val"))
    print("\n== 3. What is in the compressed shards, and whether every byte is as it was packed")
    run_command("shardkit", "stats", train_shards)
    run_command("shardkit", "verify", train_shards)
    run_command("shardkit", "verify", val_shards)

    print("\n== 4. A small convolutional network, trained from the compressed shards on the CPU, stopped and resumed")
    accuracies = []
    for seed in range(seeds):
        right, samples = count_right(train(train_shards, folder / "checkpoint.pt", seed=seed), val_shards)
        accuracies.append(right / samples)
        print(f"  accuracy on the validation shards: {right / samples:.1%} ({right} of {samples} digits)", flush=True)

    shardkit_program = os.path.relpath(PROGRAMS / "shardkit")
    print(f"\nEverything is still there. To look on, in {Path.cwd()}:")
    print(f"  tar -tvf {shlex.quote(str(folder / 'shards-none' / 'train' / 'train-000000.tar'))}")
    print(f"  {shlex.join([shardkit_program, 'ls', train_shards])}")
    print(f"  {shlex.join([shardkit_program, '--help'])}")
    return min(accuracies)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code: 1 if a network is too inaccurate, or differs after resuming."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", type=Path, default=Path("demo-data"), help="folder for all files (default: demo-data)")
    parser.add_argument("--seeds", type=int, default=1, help="number of networks to train, each with a different seed")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"argument --seeds: expected at least 1, got {options.seeds}")
    torch.set_num_threads(1)  # more threads do not speed up so small a network, and would change its results
    try:
        accuracy = run(options.dir, options.seeds)
    except (shardkit.ShardkitError, OSError, AssertionError, subprocess.CalledProcessError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    if accuracy < LEAST_ACCURACY:
        print(f"{parser.prog}: the accuracy is {accuracy:.1%}, expected {LEAST_ACCURACY:.0%} or more", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
