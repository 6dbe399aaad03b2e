"""The cache commands list the contents of a cache, and delete nothing else."""

import hashlib
import json
import os
import re
from datetime import UTC, datetime

import pytest
from typer.testing import CliRunner

from shardkit.cli.app import app
from shardkit.reading.disk_cache import BlockCache
from shardkit.reading.disk_cache_folder import CacheFolder, block_name

SHARDS = [hashlib.sha256(name).hexdigest() for name in (b"a", b"b")]
DAY = 24 * 3600


def invoke(*arguments):
    return CliRunner().invoke(app, ["cache", *map(str, arguments)])


@pytest.fixture
def place(tmp_path):
    """Return a folder with a cache of two blocks of one shard and an older block of another."""
    blocks = BlockCache(str(tmp_path), 10**6)
    for shard, offset, day in [(0, 0, 2), (0, 5000, 3), (1, 0, 1)]:
        name = block_name(SHARDS[shard], "none", offset, 5000)
        blocks.put(name, bytes(5000))
        os.utime(CacheFolder(str(tmp_path)).path(name), (day * DAY, day * DAY))
    return tmp_path


@pytest.mark.parametrize("command", ["ls", "clear"])
def test_help_has_an_example(command):
    result = invoke(command, "--help")

    assert result.exit_code == 0
    assert f"  Example: shardkit cache {command} " in result.stdout


def test_ls_lists_what_there_is_of_each_shard_what_was_used_longest_ago_first(place):
    lines = invoke("ls", place).stdout.splitlines()
    objects = json.loads(invoke("ls", place, "--json").stdout)

    assert lines[0] == f"{place}: 3 blocks of 2 shards, 24.6 KB"
    assert lines[1].split() == ["shard", "blocks", "size", "last", "used"]
    used = [datetime.fromtimestamp(day * DAY, UTC).astimezone().strftime("%Y-%m-%d %H:%M") for day in (1, 3)]
    assert [re.split(r" {2,}", line) for line in lines[2:]] == [
        [SHARDS[1], "1", "8.19 KB", used[0]],
        [SHARDS[0], "2", "16.4 KB", used[1]],
    ]
    assert objects == [
        {"sha256": SHARDS[1], "blocks": 1, "bytes": 8192, "last_used": "1970-01-02T00:00:00+00:00"},
        {"sha256": SHARDS[0], "blocks": 2, "bytes": 16384, "last_used": "1970-01-04T00:00:00+00:00"},
    ]


def test_clear_deletes_all_blocks_and_says_how_many(place):
    assert invoke("clear", place).stdout == f"{place}: deleted 3 blocks of 2 shards, 24.6 KB\n"

    assert invoke("ls", place).stdout == f"{place}: 0 blocks of 0 shards, 0 B\n"
    assert json.loads(invoke("ls", place, "--json").stdout) == []
    assert invoke("clear", place).stdout == f"{place}: deleted 0 blocks of 0 shards, 0 B\n"
    blocks = BlockCache(str(place), 3 * 8192)
    for offset in range(3):
        blocks.put(block_name(SHARDS[0], "none", offset, 5000), bytes(5000))
    assert "3 blocks" in invoke("ls", place).stdout


@pytest.mark.parametrize("command", ["ls", "clear"])
def test_a_folder_without_a_cache_is_an_error_and_stays_as_it_is(tmp_path, command):
    for folder in (tmp_path, tmp_path / "nowhere"):
        result = invoke(command, folder)

        assert result.exit_code == 2
        assert result.stderr == (
            f"error: {folder}: has no cache of this version of shardkit; name the folder that is passed as cache=\n"
        )
    assert list(tmp_path.iterdir()) == []
