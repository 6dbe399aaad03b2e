"""The command line: ``shardkit pack``, ``index``, ``verify``, ``ls``, ``cat``, ``stats``, ``shuffle-report``, ...

Results go to standard output, as JSON with ``--json``; progress and errors to standard error. The exit code is 0, 1 if
``verify`` found damage, 2 for an error, 130 after Ctrl-C.
"""

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from shardkit import __version__
from shardkit.cli import cache as cli_cache
from shardkit.cli import uploads as cli_uploads
from shardkit.cli.common import (
    EXIT_DAMAGED,
    AsJson,
    StorageOptions,
    command,
    new_app,
    print_json,
    print_lines,
    read_storage_options,
)
from shardkit.cli.output import (
    describe_manifest,
    describe_statistics,
    format_footprints,
    format_ignored,
    format_manifest,
    format_packed,
    format_report,
    format_sample,
    format_shard,
    format_shuffle_report,
    format_statistics,
)
from shardkit.errors import ArgumentError, hide_secrets

_WHO_READS = {
    "none": "plain tar: read by tar, webdataset, HF datasets, DALI, wids and others",
    "gz": "gz: read by tar, webdataset and HF datasets; cannot be read by block",
    "zst": "zst: read by shardkit and 'tar --zstd'; for webdataset and others pass --compression none",
}

app = new_app(
    "Pack training data into tar shards, and inspect them. 'shardkit COMMAND --help' shows an example of each command."
)
app.add_typer(cli_cache.app, name="cache")
app.add_typer(cli_uploads.app, name="uploads")


class Kind(StrEnum):
    """What a source is."""

    auto = "auto"
    images = "images"
    files = "files"
    shards = "shards"


class WorkerType(StrEnum):
    """What writes shards at the same time."""

    thread = "thread"
    process = "process"


Url = Annotated[str, typer.Argument(help="A dataset, a folder of shards, a shard, or a pattern.")]
AllowAnyUrl = Annotated[
    bool, typer.Option("--allow-any-url", help="Allow shards in other folders, as 'index --out' creates them.")
]
Columns = Annotated[
    list[str] | None,
    typer.Option("--column", metavar="NAME=FIELD", help="A field whose value is copied into the index."),
]
BlockBytes = Annotated[str, typer.Option(help="The approximate size of a block, the unit of reading.")]
ClassNames = Annotated[
    list[str] | None, typer.Option("--class", metavar="NAME", help="A class's name; repeat for each class, in order.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing dataset.")]


def main() -> None:
    """Run the command line; this is the console script."""
    app()


def _print_version(is_wanted: bool) -> None:  # noqa: FBT001 - as typer calls it
    if is_wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Handle the options that come before a command."""


@command(app)
def pack(  # noqa: PLR0913 - as many options as the function that it calls
    source: Annotated[str, typer.Argument(help="A folder of images or files, or shards to pack again.")],
    destination: Annotated[str, typer.Argument(help="The folder of the new dataset.")],
    *,
    kind: Annotated[Kind, typer.Option(help="The kind of source; auto inspects it.")] = Kind.auto,
    shard_bytes: Annotated[str, typer.Option(help="The largest shard, headers included.")] = "256MB",
    shard_samples: Annotated[int | None, typer.Option(help="The most samples in a shard.")] = None,
    shuffle: Annotated[
        bool, typer.Option("--shuffle/--no-shuffle", help="Shuffle all samples, or keep the source's order.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Each seed gives a different order.")] = 0,
    compression: Annotated[
        str, typer.Option(help="none, zst or gz, optionally with a level: zst:9; auto measures.")
    ] = "auto",
    block_bytes: BlockBytes = "1MB",
    split: Annotated[
        list[str] | None, typer.Option(metavar="NAME=SHARE", help="A split, for example train=0.9.")
    ] = None,
    labels: Annotated[str | None, typer.Option(help="CSV or JSON: labels instead of class folders.")] = None,
    class_name: ClassNames = None,
    fields: Annotated[str | None, typer.Option(help="Fields to take from files or shards: jpg,seg.png.")] = None,
    column: Columns = None,
    workers: Annotated[int | None, typer.Option(help="Shards written at a time; by default one per processor.")] = None,
    worker_type: Annotated[WorkerType, typer.Option(help="What writes them.")] = WorkerType.thread,
    check: Annotated[bool, typer.Option("--check", help="Decode every field before anything is written.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue where a run stopped, or start over.")
    ] = True,
    overwrite: Overwrite = False,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Pack a folder into shuffled shards of equal size.

    Class folders of images become samples with an image and a class; other files are grouped by name; shards are
    packed again. A run that was stopped continues when the same command is run again.

    Example: shardkit pack photos shards --split train=0.9 --split val=0.1
    """
    from shardkit.packing.job import pack as pack_source

    splits = {name: _share(name, share) for name, share in _pairs(split, "--split").items()} or None
    options = read_storage_options(storage_option)
    files = _source(source, kind, labels, class_name or None, fields.split(",") if fields else None, options)
    manifests = pack_source(
        files,
        destination,
        shard_bytes=shard_bytes,
        shard_samples=shard_samples,
        shuffle=shuffle,
        seed=seed,
        compression=compression,
        block_bytes=block_bytes,
        columns=_pairs(column, "--column"),
        splits=splits,
        num_workers=workers,
        worker_type=worker_type.value,
        check=check,
        resume=resume,
        overwrite=overwrite,
        storage_options=options,
    )
    if ignored := getattr(files, "ignored", ()):
        typer.echo(format_ignored(ignored), err=True)
    if as_json:
        print_json({name: describe_manifest(manifest) for name, manifest in manifests.items()})
        return
    for manifest in manifests.values():
        typer.echo(format_manifest(manifest))
        print_lines(format_packed(manifest))
    kinds = {shard.compression for manifest in manifests.values() for shard in manifest.shards}
    for name in sorted(kinds):
        typer.echo(_WHO_READS[name])


@command(app)
def index(
    urls: Annotated[list[str], typer.Argument(help="A folder of shards, shards, or patterns.")],
    *,
    out: Annotated[
        str | None, typer.Option(help="The folder for indexes and manifest, if not beside the shards.")
    ] = None,
    column: Columns = None,
    block_bytes: BlockBytes = "1MB",
    class_name: ClassNames = None,
    overwrite: Overwrite = False,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Make a dataset of existing tar shards.

    Each shard gets an index, and the dataset gets a manifest. Shards that no longer match their manifest are refused.

    Example: shardkit index laion/ --column label=cls
    """
    from shardkit.packing.indexing import index_shards

    manifest = index_shards(
        urls,
        out=out,
        columns=_pairs(column, "--column"),
        block_bytes=block_bytes,
        classes=class_name or None,
        overwrite=overwrite,
        progress=True,
        storage_options=read_storage_options(storage_option),
    )
    if as_json:
        print_json(describe_manifest(manifest))
    else:
        typer.echo(format_manifest(manifest))


@command(app)
def verify(
    url: Url,
    *,
    decode: Annotated[bool, typer.Option("--decode", help="Decode every field too.")] = False,
    workers: Annotated[
        int | None, typer.Option(help="Number of workers that decode; by default one per processor.")
    ] = None,
    worker_type: Annotated[WorkerType, typer.Option(help="What decodes.")] = WorkerType.thread,
    allow_any_url: AllowAnyUrl = False,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Check every byte of a dataset.

    It reports what is damaged, where, and which samples are undamaged.
    Only --decode finds files that were already broken when they were packed.
    The exit code is 0 if every byte is as packed, 1 if not.

    Example: shardkit verify shards/train --decode
    """
    from shardkit.inspection.verification import verify as check

    options = read_storage_options(storage_option)
    report = check(
        url,
        decode=decode,
        num_workers=workers,
        worker_type=worker_type.value,
        allow_any_url=allow_any_url,
        progress=True,
        storage_options=options,
    )
    if as_json:
        typer.echo(report.to_json())
    else:
        print_lines(format_report(report))
    if not report.ok:
        raise typer.Exit(EXIT_DAMAGED)


@command(app)
def ls(
    url: Url,
    *,
    shards: Annotated[bool, typer.Option("--shards", help="List shards instead of samples.")] = False,
    allow_any_url: AllowAnyUrl = False,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """List samples, or shards.

    Each line has the key, and the fields with their sizes in bytes. With --json, each line is an object.

    Example: shardkit ls shards/train
    """
    from shardkit.inspection.contents import list_samples, list_shards

    options = read_storage_options(storage_option)
    if shards:
        found = list_shards(url, allow_any_url=allow_any_url, storage_options=options)
        print_lines(json.dumps(shard) if as_json else format_shard(shard) for shard in found)
    else:
        samples = list_samples(url, allow_any_url=allow_any_url, storage_options=options)
        print_lines(json.dumps(sample._asdict()) if as_json else format_sample(sample) for sample in samples)


@command(app)
def cat(
    url: Url,
    key: Annotated[str, typer.Argument(help="The sample's key.")],
    field: Annotated[str, typer.Argument(help="The field, for example jpg.")],
    *,
    allow_any_url: AllowAnyUrl = False,
    storage_option: StorageOptions = None,
) -> None:
    """Write one field of one sample to standard output.

    With an index, only this field is read; from zst shards, only its block.

    Example: shardkit cat shards/train cat/0001 jpg > cat.jpg
    """
    from shardkit.inspection.contents import read_member

    options = read_storage_options(storage_option)
    data = read_member(url, key, field, allow_any_url=allow_any_url, storage_options=options)
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


@command(app)
def stats(
    url: Url,
    *,
    allow_any_url: AllowAnyUrl = False,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Print figures of a dataset.

    They are fields with their sizes, classes, shards, and the number of files and disk space before and after packing.
    For a folder that is not packed, only the number of files and disk space are printed.

    Example: shardkit stats shards/train
    """
    from shardkit.inspection.contents import compute_statistics, is_loose, measure_folder

    options = read_storage_options(storage_option)
    if is_loose(url):
        footprint, folders = measure_folder(url)
        if as_json:
            print_json({"before": footprint._asdict(), "folders": folders})
        else:
            typer.echo(format_footprints({"not packed": footprint}, folders=folders))
        return
    figures = compute_statistics(url, allow_any_url=allow_any_url, storage_options=options)
    if as_json:
        print_json(describe_statistics(figures))
    else:
        print_lines(format_statistics(figures))


@command(app)
def shuffle_report(  # noqa: PLR0913 - as many options as the function that it calls
    url: Annotated[str, typer.Argument(help="A dataset.")],
    *,
    batch_size: Annotated[int, typer.Option(help="Samples in a batch, on each rank.")] = 256,
    world_size: Annotated[int, typer.Option(help="Ranks that train together.")] = 1,
    lanes: Annotated[
        int | None, typer.Option(help="Lanes that samples are taken from; by default as in a loader.")
    ] = None,
    memory: Annotated[str, typer.Option(help="A loader's memory for blocks.")] = "1GB",
    seed: Annotated[int, typer.Option(help="The order's seed.")] = 0,
    epoch: Annotated[int, typer.Option(help="The order's epoch.")] = 0,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw a picture, a .png or .svg.")] = None,
    allow_any_url: AllowAnyUrl = False,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Report how well training mixes a dataset.

    It reports how much a batch is worth, how far shards are spread over an epoch, how much is held in memory, and how
    much is read twice. It compares this with webdataset's buffer and a random permutation, and suggests improvements.
    No shard is read.

    Example: shardkit shuffle-report shards/train --batch-size 256 --plot mixing.png
    """
    from shardkit.inspection.shuffle import shuffle_report as report_on

    report = report_on(
        url,
        batch_size,
        world_size=world_size,
        lanes=lanes,
        memory=memory,
        seed=seed,
        epoch=epoch,
        allow_any_url=allow_any_url,
        storage_options=read_storage_options(storage_option),
    )
    if plot is not None:
        report.plot(plot)
    if as_json:
        typer.echo(report.to_json())
    else:
        print_lines(format_shuffle_report(report))


def _source(
    source: str,
    kind: Kind,
    labels: str | None,
    classes: list[str] | None,
    fields: list[str] | None,
    storage_options: dict[str, object] | None,
) -> Any:
    from shardkit.inspection.contents import recognise_source
    from shardkit.sources.folders import FileFolder, ImageFolder
    from shardkit.sources.shards import ShardSource

    if kind == Kind.auto:
        kind = Kind.images if labels or classes else Kind(recognise_source(source))
        typer.echo(f"{hide_secrets(source)}: taken for {kind.value}; --kind says otherwise", err=True)
    if labels and kind != Kind.images:
        raise ArgumentError(f"--labels is for images, not for {kind.value}")
    if classes and kind != Kind.images:
        raise ArgumentError(f"--class is for images, not for {kind.value}; 'shardkit index' names classes of shards")
    if fields and kind == Kind.images:
        raise ArgumentError("--fields is for files and shards; images have the fields that their names say")
    if kind == Kind.images:
        return ImageFolder(source, labels=labels, classes=classes)
    if kind == Kind.files:
        return FileFolder(source, fields=fields)
    return ShardSource(source, fields=fields, storage_options=storage_options)


def _pairs(texts: Sequence[str] | None, option: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name or not value or name in pairs:
            raise ArgumentError(f"{option} {text!r}: write name=value, each name once")
        pairs[name] = value
    return pairs


def _share(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentError(f"--split {name}={text}: {text!r} is no share; write a number such as 0.9") from None
