"""Registered codecs also work in the processes of a pack, and values that are not samples are refused by name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.codecs import registry as codecs
from shardkit.errors import ArgumentError, DatasetError, SampleError
from shardkit.loading.stream import ShardStream
from shardkit.packing.indexing import index_shards
from shardkit.packing.job import pack
from shardkit.packing.records import SampleTransform
from shardkit.reading.forward import find_shards, read_shard
from shardkit.sources.folders import FileFolder
from shardkit.sources.shards import ShardSource
from shardkit.transforms.crops import RandomResizedCrop, Resize, ResizeCenterCrop
from tests.support.forge import index_of
from tests.support.shared import DECODER, PHOTO


def encode_reversed(text):
    return text[::-1].encode()


def decode_reversed(data):
    return data.decode()[::-1]


def add_reversed(sample):
    return {"__key__": sample["__key__"], "rev": sample["txt"].decode()}


@given(size=st.integers(4, 20), field=st.sampled_from(["png", "left.bmp", "ppm", "jpg"]), data=st.data())
def test_an_image_transform_is_given_bytes_and_decodes_them(size, field, data):
    """As in training: a file or a shard gives bytes, and the result is the same as for the pixels."""
    function = data.draw(st.sampled_from([Resize(size), ResizeCenterCrop(size), RandomResizedCrop(size)]))
    transform = SampleTransform({field: function}, seed=7)
    sample = {"__key__": "0001", field: codecs.encode(field, PHOTO), "txt": b"kept"}
    of_bytes = transform(sample)
    of_pixels = transform(sample | {field: DECODER.decode(field, sample[field])})

    assert of_bytes["txt"] == b"kept"
    assert of_bytes[field].shape == (size, size, 3)
    off = np.abs(of_bytes[field].astype(int) - of_pixels[field])
    assert off.max() <= (8 if field == "jpg" else 0)  # a JPEG is decoded at a reduced size


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
