"""List and clear a cache: ``shardkit cache ls`` and ``shardkit cache clear``."""

from typing import Annotated

import typer

from shardkit.cli.common import AsJson, command, new_app, print_json, print_lines
from shardkit.cli.output import describe_cache, format_blocks, format_cache

Folder = Annotated[str, typer.Argument(help="The folder that is passed to a dataset as cache=.")]

app = new_app("List or clear a cache of blocks.")


@command(app)
def ls(folder: Folder, *, as_json: AsJson = False) -> None:
    """List what is in a cache.

    Each line is a shard: its SHA-256 from the manifest, how many of its blocks are cached, and when one of them was
    last used. The least recently used come first.

    Example: shardkit cache ls /scratch/me
    """
    from shardkit.reading.disk_cache_folder import list_blocks

    blocks = list_blocks(folder)
    if as_json:
        print_json(describe_cache(blocks))
    else:
        typer.echo(f"{folder}: {format_blocks(blocks)}")
        print_lines(format_cache(blocks))


@command(app)
def clear(folder: Folder) -> None:
    """Delete all blocks of a cache, and nothing else.

    The cache may be in use: missing blocks are read from their dataset again.

    Example: shardkit cache clear /scratch/me
    """
    from shardkit.reading.disk_cache_folder import clear_cache

    typer.echo(f"{folder}: deleted {format_blocks(clear_cache(folder))}")
