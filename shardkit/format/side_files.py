"""Two files with the block tables and the promoted columns of all shards, so that readers need no index.

- ``__index__/blocks.<hash>.npy``: the block tables of all shards, in the order of the manifest. It is a NumPy file with
  a row of 36 bytes for each block, so each shard's rows are one range of bytes; the manifest has the CRC-32 of each.
- ``__index__/columns.<hash>.parquet``: the promoted columns of all samples, in the order of the dataset.
"""

import hashlib
import io
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from isal.isal_zlib import crc32

from shardkit.errors import ArgumentError, DatasetError, ShardError, StorageError
from shardkit.format.index import BLOCK_BYTES, BLOCK_TYPE, BlockTable, ShardIndex, open_index
from shardkit.format.manifest import MANIFEST_NAME, Manifest, read_whole, strip_suffix, version_name, write_whole
from shardkit.format.parquet import (
    CheckedParquet,
    FileFacts,
    ParquetError,
    StoredParquet,
    checked_file,
    choose_group_rows,
    damage_of,
    write_parquet,
)
from shardkit.sample import KEY
from shardkit.storage.base import Storage, is_remote, join, read_right
from shardkit.storage.spool import spooled

if TYPE_CHECKING:
    import pyarrow as pa

CARD_NAME = ".huggingface.yaml"

_CARD_HEAD = b"# Written by shardkit, for load_dataset() of HF datasets.\n"
_SMALL_BYTES = 1 << 20  # remote files up to this size are fetched as a whole


def encode_blocks(tables: Iterable[BlockTable]) -> tuple[bytes, FileFacts]:
    """Return the content of the file with these block tables, and the facts that a manifest records of it."""
    rows = b"".join(table.to_bytes() for table in tables)
    file = io.BytesIO()
    np.save(file, np.frombuffer(rows, dtype=BLOCK_TYPE))
    data = file.getvalue()
    return data, FileFacts(len(data), hashlib.sha256(data).hexdigest())


class BlockFile:
    """The block tables of a dataset of format 2, each compared with the manifest when it is read.

    Args:
        manifest: The dataset.
        storage: Serves it.
    """

    def __init__(self, manifest: Manifest, storage: Storage) -> None:
        self._manifest = manifest
        self._storage = storage
        counts = np.array([shard.blocks for shard in manifest.shards], dtype=np.int64)
        self._firsts = np.cumsum(counts) - counts
        size = manifest.block_file.size if manifest.block_file else 0
        self._start = size - BLOCK_BYTES * int(counts.sum())  # after the NumPy header
        self._whole: bytes | None = None

    @property
    def url(self) -> str:
        """The file's URL."""
        return join(self._manifest.url, self._manifest.block_file_url)

    def table(self, shard: int) -> BlockTable:
        """Return the block table of a shard, by its number.

        Raises:
            DatasetError: It is damaged.
            FileNotFoundError: The file does not exist.
        """
        entry = self._manifest.shards[shard]
        start, size = self._start + BLOCK_BYTES * int(self._firsts[shard]), BLOCK_BYTES * entry.blocks

        def read(*, fresh: bool) -> BlockTable:
            try:
                data = self._read(start, size, fresh=fresh) if start > 0 else b""
            except StorageError:
                raise
            except ShardError as error:  # it ends too early
                raise self._damaged(str(error)) from error
            if crc32(data) != entry.blocks_crc32 or len(data) != size:
                raise self._damaged(f"its part of shard {entry.url} has the CRC-32 {crc32(data):08x}")
            return BlockTable.from_bytes(data)

        return read_right(self.url, read)

    def _read(self, start: int, size: int, *, fresh: bool) -> bytes:
        whole = self._manifest.block_file.size if self._manifest.block_file else 0
        if not is_remote(self.url) or whole > _SMALL_BYTES:
            return self._storage.read_range(self.url, start, size, fresh=fresh)
        if self._whole is None or fresh:
            self._whole = self._storage.read_range(self.url, 0, whole, fresh=fresh)
        return self._whole[start : start + size]

    def _damaged(self, problem: str) -> DatasetError:
        return DatasetError(
            f"{self.url}: is damaged ({problem}); fetch it again, or make it again with 'shardkit index'", url=self.url
        )


class ColumnFile:
    """The promoted columns of all samples of a dataset of format 2.

    Args:
        manifest: The dataset, which must have such a file.
        storage: Serves it.

    Raises:
        DatasetError: It is damaged.
        FileNotFoundError: The file does not exist.
    """

    def __init__(self, manifest: Manifest, storage: Storage) -> None:
        facts = manifest.column_file
        if facts is None:
            raise DatasetError(f"{manifest.url}: its manifest has no file of columns", url=manifest.url)
        self.url = join(manifest.url, manifest.column_file_url)

        def open_file(*, fresh: bool) -> CheckedParquet:
            parquet = checked_file(storage, self.url, facts, fresh=fresh)
            parquet.check_groups(manifest.num_samples, facts.group_rows)
            return parquet

        def open_right(*, fresh: bool) -> StoredParquet:
            with damage_of(self.url):
                return StoredParquet(open_file, self.url, fresh=fresh)

        self._stored = read_right(self.url, open_right)

    @property
    def schema(self) -> "pa.Schema":
        """The columns and their types."""
        return self._stored.file.schema

    @property
    def num_groups(self) -> int:
        """The number of row groups."""
        return self._stored.file.num_groups

    def rows(self, columns: Sequence[str], group: int) -> "pa.Table":
        """Return some columns of a row group.

        Raises:
            DatasetError: They are damaged.
        """
        return self._stored.read(columns, group)


def publish_manifest(
    storage: Storage, manifest: Manifest, tables: Iterable[BlockTable], schema: "pa.Schema"
) -> Manifest:
    """Make a dataset of shards that all have indexes: write its side files and, last, its manifest.

    The next version replaces ``manifest.json``. So a copy of the manifest is also written under a name with its digest,
    where this version can be found later.

    Args:
        storage: Serves the dataset's folder.
        manifest: The dataset; its facts of the side files are ignored.
        tables: The block tables of its shards, in order.
        schema: The promoted columns, in types that hold the values of every shard.

    Returns:
        The manifest, with the facts of the side files.

    Raises:
        ArgumentError: The values of a column are too large.
    """
    data, block_file = encode_blocks(tables)
    manifest = replace(manifest, block_file=block_file, column_file=None)
    with storage.create(join(manifest.url, manifest.block_file_url), overwrite=True) as file:
        file.write(data)
    if len(schema):
        manifest = replace(manifest, column_file=_publish_columns(storage, manifest, schema))
    suffixes = {shard.url.removeprefix(strip_suffix(shard.url)) for shard in manifest.shards if "/" not in shard.url}
    if suffixes:
        publish_card(storage, manifest.url, {"train": sorted(f"*{suffix}" for suffix in suffixes)})
    text = manifest.to_json().encode()
    for name in (version_name(manifest.digest), MANIFEST_NAME):
        write_whole(storage, join(manifest.url, name), text, overwrite=True)
    return manifest


def publish_card(storage: Storage, folder: str, splits: Mapping[str, Sequence[str]]) -> None:
    """Write the file that tells HF datasets which files of a folder are shards, unless it has one by another author.

    Args:
        storage: Serves the folder.
        folder: The folder.
        splits: Patterns of the names of each split's shards, relative to it.
    """
    url = join(folder, CARD_NAME)
    try:
        if not read_whole(storage, url).startswith(_CARD_HEAD):
            return
    except FileNotFoundError:
        pass
    except DatasetError:
        return
    lines = [f"  - split: {split}\n    path: {json.dumps(list(paths))}\n" for split, paths in splits.items()]
    data = _CARD_HEAD + f"configs:\n- config_name: default\n  data_files:\n{''.join(lines)}".encode()
    write_whole(storage, url, data, overwrite=True)


def _publish_columns(storage: Storage, manifest: Manifest, schema: "pa.Schema") -> FileFacts:
    """Write the file of columns; each index is read once, though the size of row groups depends on all of them."""
    import pyarrow as pa

    what = f"the file of columns of {manifest.url}"
    with spooled(what) as waiting, spooled(what) as spool:
        size = 0
        with pa.ipc.new_stream(waiting, schema) as stream:
            for table in columns_of_indexes(storage, manifest, schema):
                stream.write_table(table)
                size += table.nbytes
        waiting.seek(0)
        group_rows = choose_group_rows(manifest.num_samples, size)
        tables = (pa.Table.from_batches([batch]) for batch in pa.ipc.open_stream(waiting))
        try:
            column_file = write_parquet(spool, regroup(tables, group_rows), schema, {}, group_rows=group_rows)
        except ParquetError as error:
            raise ArgumentError(f"{manifest.url}: the file of its columns cannot be written: {error}") from error
        spool.seek(0)
        url = join(manifest.url, replace(manifest, column_file=column_file).column_file_url)
        with storage.create(url, overwrite=True) as file:
            shutil.copyfileobj(spool, file)
    return column_file


def columns_of_indexes(storage: Storage, manifest: Manifest, schema: "pa.Schema") -> Iterator["pa.Table"]:
    """Yield the promoted columns of all samples from the indexes, in the types of ``schema``.

    Raises:
        DatasetError: An index is not usable.
    """
    import pyarrow as pa

    for shard in manifest.shards:
        index: ShardIndex = open_index(storage, manifest.url, shard)
        for group in range(index.num_groups):
            rows = index.rows([KEY, *schema.names], group=group)
            nulls = pa.nulls(len(rows))
            columns = [(rows.column(name) if name in rows.column_names else nulls) for name in schema.names]
            yield pa.table(columns, names=schema.names).cast(schema)


def regroup(tables: Iterable["pa.Table"], rows: int) -> Iterator["pa.Table"]:
    """Yield the rows of some tables in tables of ``rows`` rows each except the last.

    Example:
        >>> import pyarrow as pa
        >>> tables = [pa.table({"a": [1, 2, 3]}), pa.table({"a": [4, 5]})]
        >>> [table.column("a").to_pylist() for table in regroup(tables, 2)]
        [[1, 2], [3, 4], [5]]
    """
    import pyarrow as pa

    waiting: list[pa.Table] = []
    count = 0
    for table in tables:
        start = 0
        while len(table) - start >= rows - count:
            yield pa.concat_tables([*waiting, table.slice(start, rows - count)]).combine_chunks()
            start += rows - count
            waiting, count = [], 0
        if start < len(table):
            waiting.append(table.slice(start))
            count += len(table) - start
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()
