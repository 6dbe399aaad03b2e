"""Registered codecs go along into the processes of a pack, and what is no sample is refused by name."""

import pytest

from shardkit.codecs import registry as codecs
from shardkit.errors import ArgumentError, DatasetError, SampleError
from shardkit.loading.stream import ShardStream
from shardkit.packing.indexing import index_shards
from shardkit.packing.job import pack
from shardkit.reading.forward import find_shards, read_shard
from shardkit.sources.folders import FileFolder
from shardkit.sources.shards import ShardSource
from tests.support.forge import index_of


def encode_reversed(text):
    return text[::-1].encode()


def decode_reversed(data):
    return data.decode()[::-1]


def add_reversed(sample):
    return {"__key__": sample["__key__"], "rev": sample["txt"].decode()}


@pytest.mark.multiprocess
def test_codecs_registered_here_encode_and_make_columns_in_spawned_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(codecs, "_registered", {})
    codecs.register_codec("rev", encode=encode_reversed, decode=decode_reversed)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("hello")

    source = FileFolder(tmp_path / "texts")
    options = {"columns": {"said": "rev"}, "worker_type": "process", "num_workers": 1, "progress": False}
    pack(source, tmp_path / "packed", transform=add_reversed, **options)

    (sample,) = read_shard(find_shards(tmp_path / "packed")[0])
    assert sample["rev"] == b"olleh"
    assert index_of(tmp_path / "packed").rows(["said"]).column("said").to_pylist() == ["hello"]


@pytest.mark.parametrize("sample", ["a", None, ["a", b""], ("a", b"")])
def test_what_is_no_dict_is_refused_by_what_it_is(tmp_path, sample):
    with pytest.raises(SampleError, match=f"is {type(sample).__name__}, expected a dict"):
        pack([sample], tmp_path / "packed", progress=False)


@pytest.mark.parametrize("source", [5, None, "photos", {"__key__": "a", "txt": b""}])
def test_what_is_no_source_is_refused_by_what_it_is(tmp_path, source):
    with pytest.raises(ArgumentError, match=f"source is {type(source).__name__}"):
        pack(source, tmp_path / "packed", progress=False)
    assert not (tmp_path / "packed").exists()


def test_shards_indexed_from_elsewhere_are_streamed_and_packed_when_their_place_is_trusted(tmp_path):
    pack([{"__key__": "a", "txt": "hello"}], tmp_path / "store", compression="none", progress=False)
    (tmp_path / "store" / "manifest.json").unlink()
    indexed = str(tmp_path / "indexed")
    index_shards(str(tmp_path / "store"), out=indexed)

    with pytest.raises(DatasetError, match="allow_any_url"):
        ShardStream(indexed)

    assert [sample["txt"] for sample in ShardStream(indexed, allow_any_url=True)] == ["hello"]
    source = ShardSource(indexed, allow_any_url=True)
    assert pack(source, tmp_path / "again", progress=False)["again"].num_samples == 1
