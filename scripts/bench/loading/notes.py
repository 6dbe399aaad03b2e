"""Progress lines of a long benchmark, and a description of the machine."""

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

_STARTED = time.monotonic()


def note(text: str) -> None:
    """Print a line to standard error, with the minutes and seconds since the start."""
    minutes, seconds = divmod(int(time.monotonic() - _STARTED), 60)
    print(f"{minutes:3d}:{seconds:02d}  {text}", file=sys.stderr, flush=True)


def describe_machine() -> dict[str, Any]:
    """Return a description of the machine and versions that the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": model or platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }
