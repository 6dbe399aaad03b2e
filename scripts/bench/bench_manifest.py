#!/usr/bin/env python3
"""How long the manifest of a large dataset takes to open.

Measured on a virtual machine of two shared cores: a manifest of 100 000 shards opens in 0.5 s.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from shardkit.format.manifest import Manifest, Shard, read_manifest

ROUNDS = 7


def main() -> None:
    """Write a manifest of made-up shards and print the median time of opening it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=int, nargs="?", default=100_000, help="how many shards it has; 100,000")
    num_shards = parser.parse_args().shards
    shards = tuple(
        Shard(f"train-{i:06d}.tar.zst", 4_000 + i % 7, 250_000_000 + i, 255_999_488, f"{i:064x}", "zst", 250)
        for i in range(num_shards)
    )
    text = Manifest(shards, block_samples=16, fields=("cls", "jpg")).to_json()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "manifest.json").write_text(text)
        seconds = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            manifest = read_manifest(folder)
            seconds.append(time.perf_counter() - start)
    size, median = len(text) / 1e6, statistics.median(seconds)
    print(f"{len(manifest.shards):,} shards, {manifest.num_samples:,} samples, {size:.0f} MB: {median:.2f} s to open")


if __name__ == "__main__":
    main()
