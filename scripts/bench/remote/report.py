"""Results as Markdown: tables and targets; missed targets are bold."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from loading.rounds import Runs, ratios_of, summarise
from loading.tables import markdown

from remote import parts
from remote.servers import RATE, RTT

_CPU, _RATE = "cpu_seconds_per_1000", "samples_per_second"


def read_table(protocol: str, runs: Runs) -> str:
    """Return the table of how each client reads a file; ``CPU`` is the client's own, not the server's."""
    head = [protocol, "MB/s", "of the socket", "CPU s per GB", "CPU, shardkit's stream is 1"]
    rows = summarise(runs, parts.CEILING, parts.STREAM)
    cells = []
    for name, row in rows.items():
        if "error" in row:
            cells.append([name, f"not measured: {row['error']}", "", "", ""])
            continue
        ratios = ratios_of(_CPU, runs, name, parts.STREAM)
        cells.append([name, f"{row[_RATE]:,.0f}", _percent(row), f"{row[_CPU]:.2f}", _median(ratios, ".1f")])
    return markdown(head, cells)


def far_table(runs: Mapping[str, Runs]) -> str:
    """Return the rates of blocks from the distant server, and the limit if each block waits for a round trip."""
    head = ["connections x block", "can give, MB/s", "raw socket", "shardkit", "shardkit / can give", "CPU s per GB"]
    cells = []
    for what, each in runs.items():
        rows = summarise(each)
        if any("error" in row for row in rows.values()) or len(rows) < 2:
            continue
        limit, own = far_limit(what), rows[parts.BLOCKS]
        rates = [f"{rows[name][_RATE]:.1f}" for name in (parts.CEILING, parts.BLOCKS)]
        cells.append([what, f"{limit:.1f}", *rates, f"{own[_RATE] / limit:.1%}", f"{own[_CPU]:.2f}"])
    return markdown(head, cells)


def far_limit(what: str) -> float:
    """Return the highest possible MB/s if each connection requests a block only after it received the previous one.

    Example:
        >>> round(far_limit("16 x 1 MB"), 1)
        123.1
    """
    connections, block = (int(word) for word in what.removesuffix(" MB").split(" x "))
    transfer = block * parts.MEGABYTE / RATE
    return connections * transfer / (transfer + RTT) * RATE / parts.MEGABYTE


def epoch_table(title: str, runs: Runs, connections: Mapping[str, int] | None = None) -> str:
    """Return the table of the rates of epochs; ``CPU`` is the loader's own, not the servers'."""
    head = [title, "images/s", "of local", "CPU ms per image", "CPU, local is 1", "first batch"]
    cells = []
    rows = summarise(runs, parts.LOCAL)
    for name, row in rows.items():
        if "error" in row:
            cells.append([name, f"not measured: {row['error']}", *([""] * 4)])
            continue
        cpu = _median(ratios_of(_CPU, runs, name, parts.LOCAL), ".3f")
        first = f"{row['first_batch_seconds']:.2f} s"
        cells.append([name, f"{row[_RATE]:,.0f}", _percent(row), f"{row[_CPU]:.3f}", cpu, first])
    if connections is not None:
        head.append("connections")
        cells = [[*cell, str(connections.get(cell[0], ""))] for cell in cells]
    return markdown(head, cells)


def steady_table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the usage of epochs of many shards; ``memory`` is the growth since before the epoch, batches included."""
    head = [f"memory={parts.MEMORY // parts.MEGABYTE} MB", "blocks", "memory", "descriptors", "threads"]
    cells = [
        [
            name,
            *(f"{row[what] / 1e6:,.0f} MB" for what in ("held_bytes", "memory_bytes")),
            *(_span(row[what]) for what in ("descriptors", "threads")),
        ]
        for name, row in found.items()
    ]
    return markdown(head, cells)


def _span(ends: Sequence[int]) -> str:
    return " to ".join(str(end) for end in dict.fromkeys(ends))


def targets_table(results: Mapping[str, Any]) -> str:
    """Return the table of targets and results."""
    return markdown(["asked for", "at least or most", "measured"], [_shown(*target) for target in _targets(results)])


def _targets(results: Mapping[str, Any]) -> list[tuple[str, float, list[float], bool, str]]:
    """Return for each target its text, its bound, the ratios of the rounds, whether more is better, and its format."""
    found: list[tuple[str, float, list[float], bool, str]] = []
    for protocol, other in (("HTTP", parts.FSSPEC), ("S3", parts.S3FS)):
        runs = results.get("read", {}).get(protocol, {})
        for own in (parts.STREAM, parts.BLOCKS):
            if protocol == "HTTP":
                rates = ratios_of(_RATE, runs, own, parts.CEILING)
                found.append((f"{protocol}: {own}: MB/s / raw socket", 0.8, rates, True, ".0%"))
            cpu = ratios_of(_CPU, runs, own, other)
            found.append((f"{protocol}: {own}: CPU / {other}", 0.5, cpu, False, ".2f"))
    for what, runs in results.get("far", {}).items():
        rates = [run[_RATE] / far_limit(what) for run in runs.get(parts.BLOCKS, ())[1:]]
        found.append((f"far: {what}: MB/s / what connections can give", 0.85, rates, True, ".0%"))
    near = results.get("near", {}).get("image", {})
    for name, bound in ((parts.HTTP, 1.1), (parts.S3, 1.15)):
        found.append((f"{name}: CPU per image / local", bound, ratios_of(_CPU, near, name, parts.LOCAL), False, ".3f"))
    many = results.get("epochs far", {}).get("image", {}).get(parts.FAR_MANY, ())[1:]
    seconds = [run["first_batch_seconds"] for run in many]
    found.append((f"{parts.FAR_MANY}: first batch, seconds", 2.0, seconds, False, ".2f"))
    for name, row in results.get("steady", {}).items():
        part = row["held_bytes"] / parts.MEMORY
        found.append((f"{name}: blocks held / the setting", 1.0, [part], False, ".2f"))
    return [target for target in found if target[2]]


def _shown(text: str, bound: float, ratios: list[float], is_least: bool, form: str) -> list[str]:  # noqa: FBT001
    median = statistics.median(ratios)
    is_met = median >= bound if is_least else median <= bound
    measured = f"{median:{form}} ({min(ratios):{form}} to {max(ratios):{form}})"
    return [text, f"{bound:{form}}", measured if is_met else f"**{measured}**"]


def _percent(row: Mapping[str, Any]) -> str:
    return f"{row['of_ceiling']:.0%}" if "of_ceiling" in row else ""


def _median(ratios: list[float], form: str) -> str:
    return f"{statistics.median(ratios):{form}}" if ratios else ""
