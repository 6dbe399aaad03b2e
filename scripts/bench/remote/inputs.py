"""The input, written once into a folder: a file, many small shards, and the input of ``loading.inputs``.

::

    input-1500-100/     made by loading.inputs: images as loose files, and packed into 8 shards
    large-256/          a file of 256 MB; the task "read-1" reads its first MB, "read-2" its first two, and so on
    many-1000/image/    1 000 shards of four images each
"""

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from zlib import crc32

from loading.inputs import pack_shards, sum_samples

from remote.pieces import PIECE

_EACH = 4  # images in a small shard


def make_large(work: Path, megabytes: int) -> Path:
    """Return the folder of a file of random bytes, which is created if it does not exist."""

    def make(folder: Path) -> dict[str, Any]:
        numbers = random.Random(0)  # noqa: S311 - of a benchmark
        checksum, expected = 0, {}
        with (folder / "large").open("wb") as file:
            for number in range(1, megabytes + 1):
                piece = numbers.randbytes(PIECE)
                checksum += crc32(piece)
                file.write(piece)
                expected[f"read-{number}"] = {"samples": number, "bytes": number * PIECE, "checksum": checksum}
        return expected

    return _made(work / f"large-{megabytes}", make)


def make_many(work: Path, images: Path, shards: int) -> Path:
    """Return the folder of a dataset of many small shards, which is created if it does not exist.

    Args:
        work: Its parent folder.
        images: The folder of loose images; they repeat if there are too few.
        shards: The number of shards.
    """

    def samples() -> Iterator[dict[str, Any]]:
        paths = cycle(sorted(images.glob("*/*.jpg")))
        for number, path in enumerate(islice(paths, shards * _EACH)):
            yield {"__key__": f"{number:06d}", "jpg": path.read_bytes(), "cls": int(path.parent.name)}

    def make(folder: Path) -> dict[str, Any]:
        pack_shards(samples(), folder / "image", shards * _EACH, shards)
        sums = sum_samples(folder / "image")
        return {"raw": sums, "image": {name: sums[name] for name in ("samples", "labels")}}

    return _made(work / f"many-{shards}", make)


def _made(folder: Path, make: Callable[[Path], dict[str, Any]]) -> Path:
    """Return a folder, created if it does not exist, and the sums that a pass over it must give."""
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            new = Path(temporary) / folder.name
            new.mkdir()
            (new / "expected.json").write_text(json.dumps(make(new)))
            shutil.move(new, folder)
    return folder
