"""Datasets with false statements and matching checksums, as an attacker who knows the format could write them."""

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pyarrow as pa

from shardkit.errors import DatasetError
from shardkit.format import index as index_module
from shardkit.format import manifest as manifest_module
from shardkit.format.columns import promoted_columns
from shardkit.format.index import open_index, publish_index
from shardkit.format.manifest import Manifest
from shardkit.format.parquet import write_parquet
from shardkit.format.side_files import encode_blocks, publish_manifest
from shardkit.storage.local import LocalStorage

STORAGE = LocalStorage()


def manifest_of(folder):
    """Return a dataset's manifest, whether the dataset is finished or not."""
    return Manifest.from_json(Path(folder, "manifest.json").read_bytes(), url=str(folder), allow_any_url=True)


def index_path(folder, shard=0):
    """Return the path of a shard's index, by the shard's number."""
    return Path(folder, manifest_of(folder).shards[shard].index_url)


def index_of(folder, shard=0):
    """Return the index of a shard, by the shard's number."""
    return open_index(STORAGE, str(folder), manifest_of(folder).shards[shard])


def rewrite_index(folder, shard=0, *, rows=None, facts=None, blocks=None):
    """Replace a shard's index by another one, and put its checksums into the manifest.

    Args:
        folder: The dataset's folder.
        shard: The shard's number.
        rows: A function that changes the rows of the index's table.
        facts: Other facts, by name; the manifest's entry of the shard keeps the old ones.
        blocks: Another block table; the manifest gets the number of its blocks.
    """
    manifest = manifest_of(folder)
    indexes = [open_index(STORAGE, str(folder), entry) for entry in manifest.shards]
    old, entry = indexes[shard], manifest.shards[shard]
    table = old.rows() if rows is None else rows(old.rows())
    tables = [index.blocks for index in indexes]
    tables[shard] = old.blocks if blocks is None else blocks
    with mock.patch.object(index_module, "write_parquet", _write_any_types):
        told = publish_index(STORAGE, str(folder), entry.url, table, replace(old.facts, **facts or {}), tables[shard])
    shards = list(manifest.shards)
    shards[shard] = replace(entry, index=told.index, blocks=told.blocks, blocks_crc32=told.blocks_crc32)
    write_manifest(folder, replace(manifest, shards=tuple(shards)), tables=tables)


def _write_any_types(file, groups, schema, metadata, *, encodings, **options):
    """Write a Parquet file whose columns may have types that do not support the encodings of an index."""
    fits = {"DELTA_BYTE_ARRAY": pa.types.is_string, "DELTA_BINARY_PACKED": pa.types.is_integer}
    encodings = {name: kind for name, kind in encodings.items() if fits[kind](schema.field(name).type)}
    return write_parquet(file, groups, schema, metadata, encodings=encodings, **options)


def write_manifest(folder, manifest, *, tables=None):
    """Write a manifest with matching side files; if the indexes cannot be read, the file of columns stays unchanged."""
    manifest = replace(manifest, url=str(folder))
    if tables is None:
        tables = [open_index(STORAGE, str(folder), entry).blocks for entry in manifest.shards]
    try:
        indexes = [open_index(STORAGE, str(folder), entry) for entry in manifest.shards[:1]]
        schema = promoted_columns(indexes[0].schema if indexes else pa.schema([]))
        publish_manifest(STORAGE, manifest, tables, schema)
    except DatasetError:
        data, block_file = encode_blocks(tables)
        manifest = replace(manifest, block_file=block_file)
        Path(folder, manifest.block_file_url).write_bytes(data)
        Path(folder, "manifest.json").write_text(manifest.to_json())


def edit_manifest(folder, change):
    """Let a function change the JSON object of a manifest, and write the text with a matching checksum."""
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
