"""How far long work is: a bar with rate and remaining time, on a terminal only."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PERIOD = 300.0  # seconds, over which a rate is taken: shards are done in bursts


@contextmanager
def track(
    description: str, *, total: int | None, unit: str = "samples", enabled: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error while the context lasts; nothing when that is not a terminal.

    Args:
        description: What is being done.
        total: How many units there are; None if that is not known.
        unit: What is counted.
        enabled: False shows nothing.

    Yields:
        A function to be called with the number of units done since the last call, from any thread.

    Example:
        >>> with track("packing", total=3) as advance:
        ...     advance(3)
    """
    if not enabled or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, speed_estimate_period=_PERIOD) as progress:
        task = progress.add_task(description, total=total, unit=unit, rate="")
        progress.advance(task, 0)  # rates count from here, not from the first that is done

        def advance(count: int) -> None:
            progress.advance(task, count)
            speed = progress.tasks[task].speed
            if speed:
                progress.update(task, rate=f"{speed:,.0f}/s")

        yield advance
