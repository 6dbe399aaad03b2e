"""Results as pictures. Kinds differ by shade, hatching, marker and line, so that the pictures need no colour."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loading.classic import SERIES
from loading.peers import CEILING, OWN

Rows = Mapping[str, Mapping[str, Any]]

_UNITS = {
    "image": "JPEGs of 60 KB, decoded, cropped to 224 x 224",
    "raw": "images of 60 KB, handed over as bytes",
    "small": "texts of 300 bytes and labels",
    "npy": "arrays of 1 KB",
}
_DARK, _MIDDLE, _LIGHT = "#0b3c5d", "#4f8fbf", "#c9d6df"
_LINES = {
    "threads": ("o", "-", _DARK),
    "processes": ("s", ":", "#d1495b"),
    "processes, next epoch": ("D", "--", "#e8a33d"),
}


def plot_tasks(tasks: Mapping[str, Rows], path: Path, title: str) -> None:
    """Draw the rates of all loaders, in one panel per task.

    Args:
        tasks: The rows of each task.
        path: The picture, which is replaced.
        title: What stands above.
    """
    heights = [1.5 + len(rows) for rows in tasks.values()]
    figure = Figure(figsize=(10, 0.32 * sum(heights) + 1), dpi=120, layout="constrained")
    figure.suptitle(f"Samples loaded a second\n{title}")
    panels = figure.subplots(len(tasks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (task, rows) in zip(panels, tasks.items(), strict=True):
        _draw_task(axes, {name: row for name, row in rows.items() if "error" not in row})
        axes.set_title(f"{task}: {_UNITS[task]}", loc="left", fontsize=10, fontweight="bold")
    panels[-1].set_xlabel("samples per second, median of the rounds (more is better)")
    figure.savefig(path)


def _draw_task(axes: Axes, rows: Rows) -> None:
    names = sorted(rows, key=lambda name: rows[name]["samples_per_second"])
    for y, name in enumerate(names):
        rate = rows[name]["samples_per_second"]
        kind = "ceiling" if name == CEILING else "own" if name.startswith(OWN) else "other"
        color = {"ceiling": "white", "own": _DARK, "other": _LIGHT}[kind]
        axes.barh(y, rate, color=color, edgecolor="black", linewidth=0.7, hatch="////" if kind == "ceiling" else "")
        ratio = rows[name].get("of_shardkit")
        text = f" {rate:,.0f}" + (f"  (shardkit: {1 / ratio:.2f} x)" if ratio and name != OWN else "")
        axes.text(rate, y, text, va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_xlim(0, 1.35 * max((row["samples_per_second"] for row in rows.values()), default=1))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)


def plot_classic(rows: Rows, path: Path, title: str) -> None:
    """Draw speed-ups: above by workers, below by batch sizes, a column for each pipeline.

    Args:
        rows: Of each pipeline.
        path: The picture, which is replaced.
        title: What stands above.
    """
    figure = Figure(figsize=(max(8, 3.2 * len(rows) + 1), 7), dpi=120, layout="constrained")
    figure.suptitle(f"An epoch, times as fast as a loop over loose files\n{title}")
    panels = figure.subplots(2, len(rows), squeeze=False, sharey=True)
    for column, (pipeline, row) in enumerate(rows.items()):
        for axes, what in zip(panels[:, column], ("workers", "batch_sizes"), strict=True):
            _draw_speedups(axes, row[what], row["bare"]["median"])
        panels[0, column].set_title(f"{pipeline}: {row['milliseconds']:.2f} ms a sample", fontsize=10)
        panels[0, column].set_xlabel("workers (batches of 100)")
        panels[1, column].set_xlabel("samples a batch (2 workers)")
    for axes in panels[:, 0]:
        axes.set_ylabel("times as fast as the loop")
        axes.set_ylim(bottom=0)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.savefig(path)


def _draw_speedups(axes: Axes, series: Mapping[str, Mapping[int, Mapping[str, float]]], bare: float) -> None:
    numbers = list(next(iter(series.values())))
    axes.axhline(bare, color="black", linewidth=1, linestyle="-.", label="2 bare threads")
    axes.axhline(1, color="grey", linewidth=1, label="the loop")
    for name in SERIES:
        marker, line, color = _LINES[name]
        ratios = [series[name][number] for number in numbers]
        medians = [ratio["median"] for ratio in ratios]
        label = name if "epoch" in name else f"{name}, starting included"
        errors = [[r["median"] - r["least"] for r in ratios], [r["most"] - r["median"] for r in ratios]]
        axes.errorbar(
            range(len(numbers)), medians, errors, marker=marker, linestyle=line, color=color, capsize=3, label=label
        )
    axes.set_xticks(range(len(numbers)), [f"{number:,}" for number in numbers])
    axes.grid(axis="y", linewidth=0.4)
    axes.spines[["top", "right"]].set_visible(False)
