"""Datasets that say something else than what is true, with checksums that fit: as a liar writes them who knows the format."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from shardkit.format import manifest as manifest_module
from shardkit.format.columns import promoted_columns
from shardkit.format.index import open_index, publish_index
from shardkit.format.manifest import Manifest
from shardkit.format.side_files import publish_manifest
from shardkit.storage.local import LocalStorage

STORAGE = LocalStorage()


def manifest_of(folder):
    """Return a dataset's manifest, whether the dataset is finished or not."""
    return Manifest.from_json(Path(folder, "manifest.json").read_bytes(), url=str(folder), allow_any_url=True)


def index_path(folder, shard=0):
    """Return where the index of a shard is, by its number."""
    return Path(folder, manifest_of(folder).shards[shard].index_url)


def index_of(folder, shard=0):
    """Return the index of a shard, by its number."""
    return open_index(STORAGE, str(folder), manifest_of(folder).shards[shard])


def rewrite_index(folder, shard=0, *, rows=None, facts=None, blocks=None):
    """Replace a shard's index by one that says something else, and let the manifest have its checksums.

    Args:
        folder: The dataset's.
        shard: Its number.
        rows: What makes other rows of its table.
        facts: Other facts, by name; what the manifest says of the shard stays.
        blocks: Another block table.
    """
    manifest = manifest_of(folder)
    indexes = [open_index(STORAGE, str(folder), entry) for entry in manifest.shards]
    old, entry = indexes[shard], manifest.shards[shard]
    table = old.rows() if rows is None else rows(old.rows())
    tables = [index.blocks for index in indexes]
    tables[shard] = old.blocks if blocks is None else blocks
    told = publish_index(STORAGE, str(folder), entry.url, table, replace(old.facts, **facts or {}), tables[shard])
    shards = list(manifest.shards)
    shards[shard] = replace(entry, index=told.index, blocks_crc32=told.blocks_crc32)
    write_manifest(folder, replace(manifest, shards=tuple(shards)), tables=tables)


def write_manifest(folder, manifest, *, tables=None):
    """Write a manifest with side files that fit, as far as indexes and columns can be read."""
    if tables is None:
        tables = [open_index(STORAGE, str(folder), entry).blocks for entry in manifest.shards]
    indexes = [open_index(STORAGE, str(folder), entry) for entry in manifest.shards[:1]]
    schema = promoted_columns(indexes[0].schema if indexes else pa.schema([]))
    publish_manifest(STORAGE, replace(manifest, url=str(folder)), tables, schema)


def edit_manifest(folder, change):
    """Let a function change the JSON object of a manifest, and let the text have the checksum that fits."""
    path = Path(folder, "manifest.json")
    text = path.read_bytes()
    is_signed = text.startswith(b'{\n "crc32": "')
    described = json.loads(text)
    for name in ("crc32", "tar_header"):
        described.pop(name, None)
    change(described)
    data = json.dumps(described).encode()
    path.write_bytes(signed(data) if is_signed else data)


def signed(data):
    """Return the JSON text of an object with the first 512 bytes of format 2."""
    return manifest_module._sealed(data[1:])
