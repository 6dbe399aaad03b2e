#!/usr/bin/env python3
"""Measure what compression does to shards of images, text and arrays, and how fast.

Run it with ``python scripts/bench/bench_compression.py``, or with ``--megabytes 2 --rounds 1`` for a quick check that
it works. It needs scikit-learn, which includes the photographs. Nothing is downloaded or written.

Each kind of data is packed into tar blocks of 1 MB, as shards are, and kept in memory. zst compresses each block as one
frame, gz all blocks as one stream. Everything runs in one thread. Rates are in 10^6 bytes of uncompressed tar per
second, as the median of all rounds. The compressions take turns, so that a slow moment affects all of them. The ratio
is the uncompressed size divided by the stored size.

Measured with ``--megabytes 32`` on a virtual machine with two shared cores. Compare the rates with each other, not with
those of your machine::

    data                compression  ratio  compress MB/s  decompress MB/s
    ------------------  -----------  -----  -------------  ---------------
    JPEG images         zst:1         1.01            554            1,799
    JPEG images         zst:3         1.02            395            2,933
    JPEG images         zst:9         1.02            348            4,864
    JPEG images         gz:6          1.01             35              560
    text (source code)  zst:1         4.30            451            1,331
    text (source code)  zst:3         4.66            338            1,282
    text (source code)  zst:9         5.31             80            1,395
    text (source code)  gz:6          4.88             51              416
    float32 series      zst:1         1.10            944            1,212
    float32 series      zst:3         1.10            639            1,024
    float32 series      zst:9         1.10            564            1,226
    float32 series      gz:6          1.10             35              264
    int32 tokens        zst:1         2.41            374            1,234
    int32 tokens        zst:3         2.35            213            1,246
    int32 tokens        zst:9         2.42             53            1,126
    int32 tokens        gz:6          2.26             10              279
"""

import argparse
import io
import itertools
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from sklearn.datasets import load_sample_images

from shardkit.codecs.compress import compress_frame, decompress_frame, gzip_writer, open_decompressed, parse_compression
from shardkit.codecs.registry import encode
from shardkit.format.tar_header import member_header, padding
from shardkit.storage.local import LocalStream

BLOCK_BYTES = 1_000_000
COMPRESSIONS = ("none", "zst:1", "zst:3", "zst:9", "gz:6")
CROP = 400
Blocks = list[bytes]


def jpegs(rng: np.random.Generator) -> Iterator[tuple[str, object]]:
    """Yield crops of scikit-learn's two photographs, about 50 KB each as JPEG."""
    photos = load_sample_images().images
    while True:
        photo = photos[rng.integers(len(photos))]
        top, left = rng.integers(photo.shape[0] - CROP + 1), rng.integers(photo.shape[1] - CROP + 1)
        yield "jpg", photo[top : top + CROP, left : left + CROP]


def texts(rng: np.random.Generator) -> Iterator[tuple[str, object]]:
    """Yield the source files of Python's standard library, repeating them without end."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py"))
    files = [file for file in files if "site-packages" not in file.parts]
    for number in itertools.cycle(rng.permutation(len(files))):
        yield "txt", files[number].read_bytes()


def series(rng: np.random.Generator) -> Iterator[tuple[str, object]]:
    """Yield simulated measurements: 16 channels of 1 000 steps, waves and noise, float32."""
    steps = np.arange(1000)[:, None]
    while True:
        waves = np.sin(steps * rng.uniform(0.001, 0.1, 16)) * rng.uniform(1, 10, 16)
        yield "npy", (waves + rng.normal(0, 0.05, (1000, 16))).astype(np.float32)


def tokens(rng: np.random.Generator) -> Iterator[tuple[str, object]]:
    """Yield arrays of 2 048 int32 token ids from a vocabulary of 50 000, distributed like words."""
    frequencies = 1 / np.arange(1, 50_001)
    while True:
        yield "npy", rng.choice(50_000, 2048, p=frequencies / frequencies.sum()).astype(np.int32)


KINDS = {"JPEG images": jpegs, "text (source code)": texts, "float32 series": series, "int32 tokens": tokens}


def tar_blocks(values: Iterator[tuple[str, object]], size: int) -> Blocks:
    """Return at least ``size`` bytes of tar, as blocks of whole members of about 1 MB each."""
    blocks, block = [], bytearray()
    for number, (field, value) in enumerate(values):
        data = encode(field, value)
        block += member_header(f"{number:08}.{field}", len(data)) + data + bytes(padding(len(data)))
        if len(block) >= BLOCK_BYTES:
            blocks.append(bytes(block))
            block.clear()
            if sum(map(len, blocks)) >= size:
                break
    return blocks


def compress(compression: str, blocks: Blocks) -> Blocks:
    """Return the blocks, compressed as they are stored."""
    name, level = parse_compression(compression)
    if name == "zst":
        return [compress_frame(block, level) for block in blocks]
    if name == "gz":
        writer = gzip_writer(level)
        return [*map(writer.compress, blocks), writer.flush()]
    return blocks


def decompress(compression: str, stored: Blocks, sizes: list[int]) -> Blocks:
    """Return the decompressed blocks."""
    name = parse_compression(compression).name
    if name == "zst":
        return [decompress_frame(f, size, url="", offset=0) for f, size in zip(stored, sizes, strict=True)]
    if name == "gz":
        stream = open_decompressed(LocalStream(io.BytesIO(b"".join(stored)), "", None))
        return [stream.read(size) for size in sizes]
    return stored


def timed(function: Callable[[], Blocks]) -> tuple[float, Blocks]:
    """Return how many seconds a call takes, and what it returns."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def measure(blocks: Blocks, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Return the ratio and the MB/s of compressing and decompressing, for each compression."""
    sizes = [len(block) for block in blocks]
    seconds: dict[str, list[tuple[float, float]]] = {compression: [] for compression in COMPRESSIONS}
    ratios = {}
    for _, compression in itertools.product(range(rounds), COMPRESSIONS):
        compressing, stored = timed(partial(compress, compression, blocks))
        decompressing, restored = timed(partial(decompress, compression, stored, sizes))
        if restored != blocks:
            raise SystemExit(f"{compression} does not give back what it was given")
        seconds[compression].append((compressing, decompressing))
        ratios[compression] = sum(sizes) / sum(map(len, stored))
    megabytes = sum(sizes) / 1e6
    return {
        compression: (ratios[compression], *(megabytes / median(column) for column in zip(*rows, strict=True)))
        for compression, rows in seconds.items()
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=64, help="size of each kind of data (default: 64)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to take medians of (default: 5)")
    options = parser.parse_args()

    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; one thread")
    print(f"{options.megabytes:g} MB of each, medians of {options.rounds} rounds\n")
    print("| data | compression | ratio | compress MB/s | decompress MB/s |")
    print("|---|---|---:|---:|---:|")
    for kind, values in KINDS.items():
        blocks = tar_blocks(values(np.random.default_rng(0)), int(options.megabytes * 1e6))
        for compression, (ratio, compressing, decompressing) in measure(blocks, options.rounds).items():
            rates = f"{compressing:,.0f} | {decompressing:,.0f}" if compression != "none" else "- | -"
            print(f"| {kind} | {compression} | {ratio:.2f} | {rates} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
