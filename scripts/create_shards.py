#!/usr/bin/env python3
"""Pack a folder of images into shards for training.

Copy this program and adapt it. Run it as ``scripts/create_shards.py photos shards``. It expects a folder of images for
each class, and shrinks images that are larger than training needs. If it is stopped and started again, it resumes.
"""

import argparse
import io
from collections.abc import Mapping
from typing import Any

from PIL import Image, ImageOps

import shardkit

SHORTER_SIDE = 512  # pixels; enough for crops of 224 to 448
QUALITY = 90  # of the JPEGs that this program encodes
IMAGE_FIELDS = {"jpg", "png", "webp", "gif", "bmp", "tif", "ppm", "pgm", "pbm"}


def image_field(sample: Mapping[str, Any]) -> str:
    """Return the name of the field that holds the image."""
    return next(field for field in sample if field in IMAGE_FIELDS)


def shrink(sample: dict[str, Any]) -> dict[str, Any] | None:
    """Return the sample, with its image shrunk if it is too large. To leave a sample out, return None instead."""
    field = image_field(sample)
    with Image.open(io.BytesIO(sample[field])) as image:
        scale = SHORTER_SIDE / min(image.size)
        if scale >= 1:
            return sample  # keep the file: encoding it again would only lose quality
        upright = ImageOps.exif_transpose(image).convert("RGB")  # the new file has no EXIF orientation
    file = io.BytesIO()
    upright.resize([round(side * scale) for side in upright.size]).save(file, "JPEG", quality=QUALITY)
    del sample[field]
    return sample | {"jpg": file.getvalue()}


# Columns of the index: these samples can later be chosen by size and label without reading any image.
def width(sample: Mapping[str, Any]) -> int:
    """Return the width of the image as it is stored, in pixels."""
    return int(sample[image_field(sample)].shape[1])


def height(sample: Mapping[str, Any]) -> int:
    """Return the height of the image as it is stored, in pixels."""
    return int(sample[image_field(sample)].shape[0])


def main() -> None:
    """Pack, and print a summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", help="a folder of images for each class: photos/cat/1.jpg, photos/dog/2.png")
    parser.add_argument("destination", help="the folder for the shards, with a folder for each split")
    parser.add_argument("--shard-bytes", default="256MB", help="the largest size of a shard (default: 256MB)")
    parser.add_argument("--num-workers", type=int, help="number of processes (default: one per processor)")
    options = parser.parse_args()

    splits = shardkit.pack(
        shardkit.ImageFolder(options.source),
        options.destination,
        splits={"train": 0.95, "val": 0.05},  # decided by each file's name, so new images do not move others
        shard_bytes=options.shard_bytes,
        transform=shrink,
        columns={"label": "cls", "width": width, "height": height},
        num_workers=options.num_workers,
        worker_type="process",  # because shrinking takes time; processes need the `if` at the end
    )
    for manifest in splits.values():
        megabytes = sum(shard.file_size for shard in manifest.shards) / 1e6
        print(f"{manifest.url}: {manifest.num_samples:,} samples, {megabytes:,.1f} MB, shards: {len(manifest.shards)}")


if __name__ == "__main__":
    try:
        main()
    except shardkit.ShardkitError as error:
        raise SystemExit(f"error: {error}") from None
