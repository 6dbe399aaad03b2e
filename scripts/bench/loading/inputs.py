"""The input, written once into a folder: loose images, and the shards that every loader reads.

::

    files/3/000013.jpg   the images, in a folder for each class
    image/               the same images, packed by shardkit: jpg and cls
    small/               samples of a text of 300 bytes and a cls
    npy/                 samples of one array of 1 KB

An index for DALI lies next to each shard. The shards are plain tars, so all loaders read the same ones.
"""

import json
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from pyarrow import parquet

import shardkit
from loading.job import ARRAY

_SHARDS = 8  # of each kind, so that two or four workers have equally many
_PHOTOGRAPHS = Path(__file__).with_name("photographs.py")


def make_inputs(work: Path, images: int, smalls: int, python: str) -> Path:
    """Return the folder of the input, which is created if it does not exist.

    Args:
        work: Its parent folder; the folder itself is named after the numbers.
        images: The number of images.
        smalls: The number of small samples of either kind.
        python: A Python that has scikit-image or scikit-learn.
    """
    folder = work / f"input-{images}-{smalls}"
    if folder.exists():
        return folder
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as temporary:
        new = Path(temporary) / folder.name
        subprocess.run([python, _PHOTOGRAPHS, new / "files", str(images)], check=True)
        source = shardkit.ImageFolder(new / "files")
        pack_shards(source, new / "image", images)
        pack_shards(_texts(smalls), new / "small", smalls)
        pack_shards(_arrays(smalls), new / "npy", smalls)
        expected = {task: sum_samples(new / name) for task, name in (("raw", "image"), ("small", "small"))}
        expected["image"] = {"samples": images, "labels": expected["raw"]["labels"]}
        expected["npy"] = {"samples": smalls}
        (new / "expected.json").write_text(json.dumps(expected))
        shutil.move(new, folder)
    return folder


def pack_shards(source: Any, destination: Path, count: int, shards: int = _SHARDS) -> None:
    """Pack ``count`` samples into ``shards`` shards, and write DALI's index next to each."""
    shardkit.pack(source, destination, shard_samples=-(-count // shards), compression="none", progress=False)
    for shard in shardkit.read_manifest(destination).shards:
        _write_dali_index(destination / shard.index_url, destination / f"{shard.url}.idx")


def _write_dali_index(index: Path, path: Path) -> None:
    """Write what DALI's wds2idx would write: the place of each field's data."""
    rows = parquet.read_table(index).to_pydict()
    fields = [name.removesuffix(":offset") for name in rows if name.endswith(":offset")]
    lines = [f"v1.2 {len(rows['__key__'])}"]
    for i, key in enumerate(rows["__key__"]):
        places = [(field, rows[f"{field}:offset"][i], rows[f"{field}:size"][i]) for field in fields]
        lines.append(" ".join(f"{field} {offset} {size} {key}.{field}" for field, offset, size in places))
    path.write_text("\n".join(lines) + "\n")


def _texts(count: int) -> Iterator[dict[str, Any]]:
    text = random.Random(0).randbytes(1000).hex()  # noqa: S311 - of a benchmark
    for number in range(count):
        start = number % 1700
        yield {"__key__": f"{number:09d}", "txt": text[start : start + 300], "cls": number % 1000}


def _arrays(count: int) -> Iterator[dict[str, Any]]:
    numbers = np.random.default_rng(0).standard_normal(ARRAY + 1000, dtype=np.float32)
    for number in range(count):
        start = number % 1000
        yield {"__key__": f"{number:09d}", "npy": numbers[start : start + ARRAY]}


def sum_samples(folder: Path) -> dict[str, int]:
    """Return the sums over a whole pass of undecoded samples."""
    sums = {"samples": 0, "labels": 0, "bytes": 0, "checksum": 0}
    for sample in shardkit.ShardStream(folder, decode=False, shuffle=False):
        (data,) = (sample[field] for field in ("jpg", "txt") if field in sample)
        sums["samples"] += 1
        sums["labels"] += int(sample["cls"])
        sums["bytes"] += len(data)
        sums["checksum"] += crc32(data)
    return sums
