"""For how long shardkit holds the GIL for an image, at most: time in which a training loop's Python cannot run.

A program of its own: gil.py FOLDER SECONDS, which prints a line of JSON. It counts the processor time of all threads
while batches of the task image are loaded, less what is spent inside the two functions that compute without the GIL,
decoding and resizing, by the clock of the thread that calls them. What these do with the GIL, which is to look at
arguments and to make arrays, is then added: what they take for an image of 8 x 8 pixels, where there is nothing else.

This is more than the time that the GIL is held, since reading, CRC-32, handing over and waking threads are counted as
well. It is processor time, so it does not matter who else uses the machine, but for what they leave of the caches. How
much a thread that spins is slowed down says less: every change of threads then costs more than the GIL is held for.
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
    """A function of a module, replaced by one that counts its calls' processor time as well."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self._function: Callable[..., Any] = getattr(module, name)
        self._times: list[int] = []  # a list, as adding to it is one step, whatever other threads do
        setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.thread_time_ns()
        try:
            return self._function(*args, **kwargs)
        finally:  # a JPEG of which only the upper rows are decoded ends in an error
            self._times.append(time.thread_time_ns() - started)

    def take(self) -> int:
        """Return the nanoseconds of the calls since the last time."""
        total = sum(self._times)
        self._times.clear()
        return total


def measure(folder: str, seconds: float) -> dict[str, float]:
    """Return microseconds a sample: of processor time, of it certainly without the GIL, and at most with the GIL."""
    clocks = _Clock(simplejpeg, "decode_jpeg"), _Clock(crops, "resize_linear")
    passes = open_passes(Job("image", "with_shardkit", folder, workers=1))
    for _ in passes():  # so that what is done once is done
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
    """Measure and print."""
    print(json.dumps(measure(str(Path(sys.argv[1])), float(sys.argv[2]))))


if __name__ == "__main__":
    main()
