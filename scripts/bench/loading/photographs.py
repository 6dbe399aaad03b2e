"""Make JPEGs of about 60 KB and 470 x 390 pixels from the photographs that scikit-image and scikit-learn ship.

It is a program of its own, photographs.py FOLDER COUNT, because shardkit does not depend on those two packages. Each
image is a crop of a photograph at a random place and scale, mirrored at random, and saved with the quality that gives
the wanted size. So the images differ, and cost as much to decode as photographs. Their ten folders are their classes.
"""

import importlib
import importlib.util
import io
import random
import sys
from pathlib import Path

from PIL import Image

_CLASSES = 10
_BYTES = 60_000
_NAMES = {
    "skimage.data": ("astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg", "rocket.jpg",
                     "motorcycle_left.png", "retina.jpg"),
    "sklearn.datasets.images": ("china.jpg", "flower.jpg"),
}  # fmt: skip


def photographs() -> list[Image.Image]:
    """Return the photographs of the installed ones of the two packages."""
    found = []
    for package, names in _NAMES.items():
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        folder = Path(str(spec.origin)).parent if spec else Path()
        found += [Image.open(folder / name).convert("RGB") for name in names if (folder / name).exists()]
    if not found:
        raise SystemExit("install scikit-image or scikit-learn, whose photographs are the input")
    return found


def make_jpeg(photograph: Image.Image, numbers: random.Random) -> bytes:
    """Return a random part of a photograph as a JPEG of about the right size."""
    size = round(470 * numbers.uniform(0.85, 1.15)), round(390 * numbers.uniform(0.85, 1.15))
    scale = min(numbers.uniform(0.6, 1), photograph.width / size[0], photograph.height / size[1])
    width, height = round(size[0] * scale), round(size[1] * scale)
    left, upper = numbers.randint(0, photograph.width - width), numbers.randint(0, photograph.height - height)
    part = photograph.crop((left, upper, left + width, upper + height)).resize(size, Image.Resampling.BICUBIC)
    if numbers.random() < 0.5:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    wanted = _BYTES * numbers.uniform(0.6, 1.4)
    low, high = 30, 98
    while low < high:  # the least quality that gives the wanted size
        quality = (low + high) // 2
        data = _encode(part, quality)
        low, high = (quality + 1, high) if len(data) < wanted else (low, quality)
    return _encode(part, low)


def _encode(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def main() -> None:
    """Write the images."""
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    sources = photographs()
    for number in range(count):
        numbers = random.Random(number)  # noqa: S311 - of a benchmark
        path = folder / str(number % _CLASSES) / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_jpeg(numbers.choice(sources), numbers))


if __name__ == "__main__":
    main()
