"""Results as Markdown tables."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loading.classic import SERIES, TARGETS
from loading.peers import OWN

Rows = Mapping[str, Mapping[str, Any]]


def task_table(task: str, rows: Rows) -> str:
    """Return a task's loaders.

    ``memory`` is the peak memory of a loader and its processes; ``beyond imports`` is its growth since before the
    loader was made.
    """
    head = [task, "samples/s", "of the ceiling", "shardkit is", "CPU s per 1 000", "memory", "beyond imports"]
    cells = []
    for name, row in rows.items():
        if "error" in row:
            cells.append([name, f"not measured: {row['error']}", *([""] * len(head[1:]))])
            continue
        is_other = "of_shardkit" in row and name != OWN
        cells.append(
            [
                name,
                f"{row['samples_per_second']:,.0f}",
                f"{row['of_ceiling']:.0%}" if "of_ceiling" in row else "",
                f"{1 / row['of_shardkit']:.2f} x" if is_other else "",
                f"{row['cpu_seconds_per_1000']:.3g}",
                f"{row['memory_bytes'] / 1e6:,.0f} MB",
                f"{row['memory_beyond_imports_bytes'] / 1e6:,.0f} MB",
                f"{row['first_batch_seconds']:.2f} s",
            ]
        )
    return markdown([*head, "first batch"], cells)


def classic_tables(rows: Rows) -> str:
    """Return speed-ups by workers and by batch sizes, and the figures with targets, in bold if a target is missed."""
    tables = []
    for what, title in (("workers", "workers, batches of 100"), ("batch_sizes", "2 workers, batches of")):
        numbers = next(iter(rows.values()))[what]["threads"]
        cells = [
            [f"{pipeline}, {series}", f"{row['milliseconds']:.2f} ms", *map(_times, (row["bare"], *ratios.values()))]
            for pipeline, row in rows.items()
            for series, ratios in row[what].items()
        ]
        tables.append(markdown([title, "the loop, a sample", "2 bare threads", *map(str, numbers)], cells))
    cells = [
        [
            f"{text}, {series}",
            f"{least} x",
            *(_wanted(row["targets"][series].get(text), least) for row in rows.values()),
        ]
        for text, _, _, least in TARGETS
        for series in SERIES
    ]
    tables.append(markdown(["target", "at least", *rows], cells))
    return "\n\n".join(tables)


def _times(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} x"


def _wanted(ratio: Mapping[str, float] | None, least: float) -> str:
    if ratio is None:
        return ""
    return _times(ratio) if ratio["median"] >= least else f"**{_times(ratio)}**"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; all columns but the first are aligned to the right."""
    lines = [head, ["---", *(["---:"] * (len(head) - 1))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
