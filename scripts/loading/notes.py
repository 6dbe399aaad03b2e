"""What a long benchmark says of how far it is."""

import sys
import time

_STARTED = time.monotonic()


def note(text: str) -> None:
    """Print a line to standard error, with the minutes and seconds since the start."""
    minutes, seconds = divmod(int(time.monotonic() - _STARTED), 60)
    print(f"{minutes:3d}:{seconds:02d}  {text}", file=sys.stderr, flush=True)
