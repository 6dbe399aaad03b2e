#!/usr/bin/env python3
"""Pack handwritten digits into shards, and train a network from them; scripts/demo installs what it needs and runs it.

The digits are the 1,797 scans that scikit-learn ships, 8 x 8 pixels each: small, but real. Everything is left in the
folder, and a second run goes on with what is there.
"""

import argparse
import io
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
SHARD_SAMPLES = 80  # some 18 training shards of these few samples; real shards are of 256 MB
LEAST_ACCURACY = 0.97
PROGRAMS = Path(sys.executable).parent  # where the shardkit program was installed


def write_digits(folder: Path) -> int:
    """Write the scans as PNG files in class folders, those that are not there yet, and return how many there are."""
    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(np.uint8)  # they have 17 shades of grey, 0 to 16
    for number, (scan, label) in enumerate(zip(pixels, digits.target, strict=True)):
        file = io.BytesIO()
        Image.fromarray(scan).save(file, "PNG")
        path = folder / str(label) / f"{number:04d}.png"
        if not (path.exists() and path.read_bytes() == file.getvalue()):  # a run that was killed may have left half
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.getvalue())
    return len(pixels)


def pack_digits(source: Path, destination: Path, compression: str) -> dict[str, shardkit.Manifest]:
    """Pack the scans into shards, four fifths for training, and return what each split consists of."""
    return shardkit.pack(
        shardkit.ImageFolder(source),
        destination,
        splits={"train": 0.8, "val": 0.2},
        shard_samples=SHARD_SAMPLES,
        compression=compression,
        columns={"label": "cls"},
        seed=0,
    )


def digits_stream(shards: str, *, shuffle: bool = True, seed: int = 0) -> shardkit.ShardStream:
    """Return a stream of batches: {"image": uint8 (batch, 3, 8, 8), "label": int64 (batch,)}."""
    fields = {"image": "png", "label": "cls"}
    return shardkit.ShardStream(shards, fields=fields, shuffle=shuffle, seed=seed, batch_size=BATCH_SIZE)


def pixels(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a batch's images as the network takes them, float32 (batch, 1, 8, 8); all three colours are the same."""
    return batch["image"][:, :1] / 255


def make_network() -> nn.Sequential:
    """Return a small convolutional network for 8 x 8 pixels and ten classes."""
    return nn.Sequential(
        *[nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()],
        *[nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Flatten(), nn.Dropout(0.3), nn.Linear(256, 10)],
    )


def train(shards: str, *, seed: int) -> nn.Sequential:
    """Train a network from shards; the same seed gives the same network."""
    torch.manual_seed(seed)
    network = make_network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    # The samples are few and small, so that this process reads them alone. Where decoding takes its time, let others do
    # it: torch.utils.data.DataLoader(stream, batch_size=None, num_workers=4).
    stream = digits_stream(shards, seed=seed)
    for epoch in range(EPOCHS):
        started, losses, samples = time.perf_counter(), 0.0, 0
        for batch in stream:  # each pass is the next epoch, in another order
            loss = nn.functional.cross_entropy(network(pixels(batch)), batch["label"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses += loss.item() * len(batch["label"])
            samples += len(batch["label"])
        seconds, loss_per_sample = time.perf_counter() - started, losses / samples
        print(f"  epoch {epoch + 1:2d} of {EPOCHS}: {samples:,} samples in {seconds:.1f} s, loss {loss_per_sample:.3f}")
    return network


@torch.no_grad()
def count_right(network: nn.Sequential, shards: str) -> tuple[int, int]:
    """Return how many samples the network classifies rightly, and how many there are."""
    network.eval()
    right, samples = 0, 0
    for batch in digits_stream(shards, shuffle=False):
        right += int((network(pixels(batch)).argmax(dim=1) == batch["label"]).sum())
        samples += len(batch["label"])
    return right, samples


def run_command(*command: str) -> None:
    """Run a command as a user would, after printing it."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    path = f"{PROGRAMS}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    subprocess.run(command, check=True, env=os.environ | {"PATH": path})


def run(folder: Path, seeds: int) -> float:
    """Do all of it, and return the worst network's accuracy."""
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

    print("\n== 4. A small convolutional network, trained from the compressed shards on the CPU")
    accuracies = []
    for seed in range(seeds):
        print(f"seed {seed}:")
        right, samples = count_right(train(train_shards, seed=seed), val_shards)
        accuracies.append(right / samples)
        print(f"  accuracy on the validation shards: {right / samples:.1%} ({right} of {samples} digits)", flush=True)

    shardkit_program = os.path.relpath(PROGRAMS / "shardkit")
    print(f"\nEverything is still there. To look on, in {Path.cwd()}:")
    print(f"  tar -tvf {shlex.quote(str(folder / 'shards-none' / 'train' / 'train-000000.tar'))}")
    print(f"  {shlex.join([shardkit_program, 'ls', train_shards])}")
    print(f"  {shlex.join([shardkit_program, '--help'])}")
    return min(accuracies)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code: 1 if a network is worse than it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", type=Path, default=Path("demo-data"), help="where all files go (default: demo-data)")
    parser.add_argument("--seeds", type=int, default=1, help="how many networks to train, each from another seed")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"argument --seeds: expected at least 1, got {options.seeds}")
    torch.set_num_threads(1)  # so small a network gains nothing by more, and its figures would depend on how many
    try:
        accuracy = run(options.dir, options.seeds)
    except (shardkit.ShardkitError, OSError, subprocess.CalledProcessError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    if accuracy < LEAST_ACCURACY:
        print(f"{parser.prog}: the accuracy is {accuracy:.1%}, expected {LEAST_ACCURACY:.0%} or more", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
