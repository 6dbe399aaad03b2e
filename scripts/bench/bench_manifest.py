#!/usr/bin/env python3
"""Measure how long it takes to open the manifest of a large dataset.

Measured on a virtual machine with two shared cores: a manifest of 100 000 shards opens in 1.4 s.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from shardkit.format.manifest import Manifest, Shard, read_manifest
from shardkit.format.parquet import FileFacts

ROUNDS = 7


def main() -> None:
    """Write a manifest of invented shards and print the median time to open it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=int, nargs="?", default=100_000, help="number of shards (default: 100,000)")
    num_shards = parser.parse_args().shards
    shards = tuple(
        Shard(
            url=f"train-{i:06d}.tar.zst",
            samples=4_000 + i % 7,
            file_size=250_000_000 + i,
            tar_size=255_999_488,
            sha256=f"{i:064x}",
            compression="zst",
            blocks=250,
            blocks_crc32=i,
            index=FileFacts(70_000, f"{i:064x}", footer_size=30_000, footer_crc32=i, group_rows=4096),
        )
        for i in range(num_shards)
    )
    blocks = FileFacts(36 * 250 * num_shards, "00" * 32)
    text = Manifest(shards, block_samples=16, fields=("cls", "jpg"), block_file=blocks).to_json()
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
