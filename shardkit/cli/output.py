"""The results of commands, as text for people and as values for JSON."""

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from shardkit.errors import hide_secrets
from shardkit.storage.base import format_bytes

if TYPE_CHECKING:
    from shardkit.format.manifest import Manifest
    from shardkit.inspection.contents import Footprint, SampleInfo, Sizes, Statistics
    from shardkit.inspection.findings import VerifyReport
    from shardkit.inspection.shuffle import ShuffleReport
    from shardkit.reading.disk_cache_folder import CachedBlock

_WIDTH = 100  # columns of text, at most
_SHOWN = 10  # of a long list, before it says how many more there are


def describe_manifest(manifest: "Manifest") -> dict[str, Any]:
    """Return a manifest's facts about its dataset, without its shards, for JSON."""
    return {
        "url": hide_secrets(manifest.url),
        "samples": manifest.num_samples,
        "shards": len(manifest.shards),
        "bytes": _stored_bytes(manifest),
        "fields": list(manifest.fields),
        "classes": list(manifest.classes),
        "columns": dict(manifest.columns),
        "unique_keys": manifest.unique_keys,
        "digest": manifest.digest,
    }


def format_manifest(manifest: "Manifest") -> str:
    """Return a line about a dataset."""
    samples, shards = _count(manifest.num_samples, "sample"), _count(len(manifest.shards), "shard")
    return f"{hide_secrets(manifest.url)}: {samples} in {shards}, {format_bytes(_stored_bytes(manifest))}"


def format_packed(manifest: "Manifest") -> Iterator[str]:
    """Yield the classes, and how many samples have each field, so that the user can check that this was intended."""
    if manifest.classes:
        number = len(manifest.classes)
        shown = ", ".join(map(_plain, manifest.classes[:_SHOWN])) + (", ..." if number > _SHOWN else "")
        yield f"  {number:,} class{'' if number == 1 else 'es'}: {shown}"
    counts = manifest.packed.get("samples_with")
    if not isinstance(counts, dict) or not counts:
        return
    if set(counts.values()) == {manifest.num_samples}:
        yield f"  fields: {', '.join(map(_plain, counts))} in every sample"
    else:
        fields = ", ".join(f"{_plain(field)} in {count:,}" for field, count in counts.items())
        yield f"  fields: {fields} of {_count(manifest.num_samples, 'sample')}"


def format_ignored(paths: Sequence[str]) -> str:
    """Return a line that says how many files of a source were not packed."""
    were = "was" if len(paths) == 1 else "were"
    return f"note: {_count(len(paths), 'file')} {were} not packed, for example {_plain(paths[0])}"


def _stored_bytes(manifest: "Manifest") -> int:
    return sum(shard.file_size for shard in manifest.shards)


def format_shard(shard: dict[str, Any]) -> str:
    """Return a line about a shard, as ``list_shards`` yields it."""
    kind = shard["compression"] or "no index"
    return f"{shard['url']}\t{shard['samples']:,} samples\t{shard['bytes']:,} bytes\t{kind}"


def format_sample(sample: "SampleInfo") -> str:
    """Return a line about a sample."""
    sizes = "  ".join(f"{field} {size:,}" for field, size in sorted(sample.fields.items()))
    return f"{_plain(sample.key)}\t{sizes}"


def format_report(report: "VerifyReport") -> Iterator[str]:
    """Yield the lines of a ``verify`` report; the last one is the summary."""
    for problem in report.problems:
        yield f"{problem.url}: {problem.message}"
    for shard in report.damaged:
        yield f"{shard.url}: {shard.whole:,} of {shard.samples:,} samples are whole"
        for problem in shard.problems:
            yield f"  {problem.message}" if problem.url == shard.url else f"  {problem.url}: {problem.message}"
        if shard.damaged:
            shown = ", ".join(map(_plain, shard.damaged[:_SHOWN]))
            more = len(shard.damaged) - _SHOWN
            rest = f" and {more:,} more (--json lists all)" if more > 0 else ""
            yield f"  not whole: {shown}{rest}; all others are"
    for note in report.notes:
        yield f"note: {note}"
    if report.ok:
        found = "everything is as it should be"
    elif report.damaged:
        found = f"{_count(len(report.damaged), 'shard')} {'is' if len(report.damaged) == 1 else 'are'} damaged"
    else:
        found = "the dataset is not as it should be"
    yield f"{_count(report.samples, 'sample')} in {_count(report.shards, 'shard')} read; {found}"


def describe_statistics(figures: "Statistics") -> dict[str, Any]:
    """Return figures for JSON, each by its name."""
    values = {name: _named(value) for name, value in asdict(figures).items()}
    return values | {"fields": {name: _named(sizes) for name, sizes in figures.fields.items()}}


def _named(value: Any) -> Any:
    return value._asdict() if hasattr(value, "_asdict") else value


def format_statistics(figures: "Statistics") -> Iterator[str]:
    """Yield figures as tables, with empty lines between."""
    yield f"{_count(figures.samples, 'sample')} in {_count(figures.shards.number, 'shard')}"
    yield ""
    rows = [_sizes_row(name or "(no name)", sizes) for name, sizes in figures.fields.items()]
    rows.append(_sizes_row("shards", figures.shards))
    yield format_table(["field", "number", "total", "min", "median", "mean", "max"], rows)
    yield ""
    if figures.classes:
        yield format_table(["class", "samples"], [[name, f"{count:,}"] for name, count in figures.classes.items()])
        yield ""
    if figures.tar_bytes:
        ratio = figures.tar_bytes / max(1, figures.shards.total)
        yield f"compression: {ratio:.2f} times smaller than the uncompressed tars"
        yield ""
    known = figures.samples and figures.originals == figures.samples
    unpacked = "unpacked: the files that it was packed of" if known else "unpacked, a file for every field"
    yield format_footprints(
        {unpacked: figures.before, "packed: shards, indexes, manifest": figures.after}, folders=figures.folders
    )


def format_footprints(footprints: Mapping[str, "Footprint"], *, folders: int) -> str:
    """Return a table of the disk space of files, by kind; below the first row, the number of folders they are in."""
    rows = [_footprint_row(name, footprint) for name, footprint in footprints.items()]
    if folders:
        rows.insert(1, ["  and their folders", f"{folders:,}", "", ""])
    return format_table(["on disk", "files (inodes)", "bytes", "lost to 4 KiB blocks"], rows)


_FIGURES = (
    ("effective batch, by shard", "effective_batch_by_shard"),
    ("effective batch, by block", "effective_batch_by_block"),
    ("spread of a shard", "dispersion_by_shard"),
    ("spread of a block", "dispersion_by_block"),
)

_MEANINGS = """\
effective batch: what a batch is worth beside one of random samples, if the samples of a shard (or block) are a little \
alike (intraclass correlation 0.1). More lanes raise it. It is more than 100 % if these share batches less often than \
by chance.
spread: how far apart the samples of a shard (or block) come in the epoch, as the standard deviation of their \
positions; 100 % is all over it. Smaller blocks raise a shard's. A block is read at once, so its samples come close \
to each other, among those of all other lanes.
held in memory: the samples in open blocks, or in all blocks if the dataset fits into a loader's memory, on all ranks \
together. Fewer lanes and smaller blocks lower it.
one read: the unit of reading. Disks and distant stores want 1 MB or more; block_bytes says it when packing.
bytes read: by all ranks in an epoch, in multiples of the dataset. It is least if the ranks divide the lanes, and the \
blocks are many times the lanes."""


def format_shuffle_report(report: "ShuffleReport") -> Iterator[str]:
    """Yield the lines of a shuffle report: the figures, their meaning, and advice."""
    samples, shards, blocks = report.num_samples, report.num_shards, report.num_blocks
    yield f"{report.url}: {_count(samples, 'sample')} in {_count(shards, 'shard')} and {_count(blocks, 'block')}"
    ranks = "" if report.world_size == 1 else f" on each of {report.world_size:,} ranks"
    seeded = f"epoch {report.epoch:,} of seed {report.seed}"
    yield f"batches of {report.batch_size:,}{ranks}, {_count(report.lanes, 'lane')}, {seeded}"
    yield ""
    orders = (report.plan, report.buffer, report.uniform)
    rows = [[name, *(f"{100 * getattr(order, figure):.0f} %" for order in orders)] for name, figure in _FIGURES]
    rows.append(["held in memory", *(format_bytes(order.held_samples * report.sample_bytes) for order in orders)])
    rows.append(["one read", format_bytes(report.read_bytes), "a shard", format_bytes(report.sample_bytes)])
    yield format_table(["", "this order", "webdataset's shuffle(1000)", "random permutation"], rows)
    yield ""
    read = report.read_amplification
    yield format_table(["ranks", *map(str, read)], [["bytes read", *(f"{times:.2f}" for times in read.values())]])
    yield ""
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 0)).columns)
    for text in _MEANINGS.splitlines():
        yield from textwrap.wrap(text, width, subsequent_indent="  ")
    if report.sampled:
        yield "note: of all samples, about a million were looked at, spread over the dataset and the epoch"
    yield ""
    if report.packed_shuffled:
        order = "The dataset was packed shuffled: samples of a shard are no more alike than others, whatever the order."
        yield from textwrap.wrap(order, width, subsequent_indent="  ")
    elif not report.packed_in_order:
        order = (
            "How its samples were ordered when they were packed is not known. If they are sorted by class, classes of "
            f"fewer than about {report.spread_run:,} samples are missing from long parts of an epoch; then pack it "
            "again, or use more lanes."
        )
        yield from textwrap.wrap(order, width, subsequent_indent="  ")
    for text in report.advice or ("Nothing is to be done.",):
        yield from textwrap.wrap(text, width, subsequent_indent="  ")


def describe_cache(blocks: Sequence["CachedBlock"]) -> list[dict[str, Any]]:
    """Return the cached blocks of each shard, for ``cache ls --json``, the shard used longest ago first."""
    shards: dict[str, dict[str, Any]] = {}
    for block in sorted(blocks):
        shard = shards.setdefault(block.shard, {"sha256": block.shard, "blocks": 0, "bytes": 0})
        shard["blocks"] += 1
        shard["bytes"] += block.room
        shard["last_used"] = datetime.fromtimestamp(block.used / 1e9, UTC).isoformat(timespec="seconds")
    return sorted(shards.values(), key=itemgetter("last_used", "sha256"))


def format_blocks(blocks: Sequence["CachedBlock"]) -> str:
    """Return the number of blocks in a cache, as text."""
    shards = len({block.shard for block in blocks})
    size = format_bytes(sum(block.room for block in blocks))
    return f"{_count(len(blocks), 'block')} of {_count(shards, 'shard')}, {size}"


def format_cache(blocks: Sequence["CachedBlock"]) -> Iterator[str]:
    """Yield the lines of ``cache ls`` that are about shards."""
    rows = []
    for shard in describe_cache(blocks):
        used = datetime.fromisoformat(shard["last_used"]).astimezone().strftime("%Y-%m-%d %H:%M")
        rows.append([shard["sha256"], f"{shard['blocks']:,}", format_bytes(shard["bytes"]), used])
    if rows:
        yield format_table(["shard", "blocks", "size", "last used"], rows)


def _sizes_row(name: str, sizes: "Sizes") -> list[str]:
    numbers = (sizes.total, sizes.min, sizes.median, sizes.mean, sizes.max)
    return [name, f"{sizes.number:,}", *(format_bytes(number) for number in numbers)]


def _footprint_row(name: str, footprint: "Footprint") -> list[str]:
    return [name, f"{footprint.files:,}", format_bytes(footprint.bytes), format_bytes(footprint.lost)]


def format_table(header: list[str], rows: list[list[str]]) -> str:
    """Return columns as text, the first aligned left and the others aligned right.

    Example:
        >>> print(format_table(["class", "samples"], [["cat", "7"]]))
        class  samples
        cat          7
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for first, *others in [header, *rows]:
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _plain(key: str) -> str:
    """Return a key without control characters, which a terminal would obey; its author may not be trusted."""
    return key if key.isprintable() else repr(key)[1:-1]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
