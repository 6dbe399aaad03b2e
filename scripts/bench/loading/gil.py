"""Measure how long shardkit holds the GIL per image, at most: time in which a training loop's Python cannot run.

It is a program of its own: gil.py FOLDER SECONDS prints one line of JSON. It measures the processor time of all threads
while batches of the task image are loaded. It subtracts the time inside the two functions that compute without the GIL,
decoding and resizing, by the clock of the calling thread. These functions hold the GIL while they check arguments and
create arrays. That time is added back: it is the time that they take for an image of 8 x 8 pixels, where they do little
else.

The result is more than the time that the GIL is held, since reading, CRC-32, passing batches on and waking threads are
counted as well. It is processor time, so other programs on the machine affect it only through the processor's caches.
The slowdown of a spinning thread would say less: each switch of threads then costs more than the time that the GIL is
held.
"""

import io
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import simplejpeg
from PIL import Image

from loading.job import Job
from loading.with_shardkit import open_passes
from shardkit.transforms import crops

if TYPE_CHECKING:
    from collections.abc import Callable

_CALLS = 2000


class _Clock:
    """Replaces a function of a module by one that also counts the processor time of its calls."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self._function: Callable[..., Any] = getattr(module, name)
        self._times: list[int] = []  # a list, because appending is atomic
        setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.thread_time_ns()
        try:
            return self._function(*args, **kwargs)
        finally:  # decoding only the upper rows of a JPEG ends in an error
            self._times.append(time.thread_time_ns() - started)

    def take(self) -> int:
        """Return the nanoseconds of the calls since this was last called."""
        total = sum(self._times)
        self._times.clear()
        return total


def measure(folder: str, seconds: float) -> dict[str, float]:
    """Return microseconds per sample: processor time, the part certainly without the GIL, and at most with the GIL."""
    clocks = _Clock(simplejpeg, "decode_jpeg"), _Clock(crops, "resize_linear")
    passes = open_passes(Job("image", "with_shardkit", folder, workers=1))
    for _ in passes():  # for warming up
        pass
    for clock in clocks:
        clock.take()
    samples, used = 0, time.process_time_ns()
    started = time.perf_counter()
    while not samples or time.perf_counter() - started < seconds:
        for _, labels in passes():
            samples += len(labels)
    used = time.process_time_ns() - used
    inside = sum(clock.take() for clock in clocks)
    _call_with_little(*clocks)
    little = sum(clock.take() for clock in clocks) / _CALLS
    without = inside / samples - little
    return {
        "processor_us": used / samples / 1000,
        "without_gil_us": without / 1000,
        "with_gil_us": (used / samples - without) / 1000,
    }


def _call_with_little(decode: _Clock, resize: _Clock) -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    out = np.empty((8, 8, 3), np.uint8)
    for i in range(_CALLS):
        resize(decode(file.getvalue(), "RGB"), out, mirrored=i % 2 == 0, antialias=True)


def main() -> None:
    """Run the measurement and print its result."""
    print(json.dumps(measure(str(Path(sys.argv[1])), float(sys.argv[2]))))


if __name__ == "__main__":
    main()
