"""Existing shards are packed again without loss: resized, reordered, recompressed, filtered or merged."""

import pytest

from shardkit.errors import SampleError, ShardError
from shardkit.packing.job import pack
from shardkit.reading.forward import find_shards, read_shard
from shardkit.sources.folders import FileFolder
from shardkit.sources.shards import ShardSource
from tests.support.forge import index_of


def samples(count, *, prefix=""):
    return [{"__key__": f"{prefix}{i:04d}", "cls": i % 3, "txt": f"text {i}" * (i % 7)} for i in range(count)]


def read_all(folder):
    found = [sample for location in find_shards(str(folder)) for sample in read_shard(location)]
    return {s["__key__"]: {k: v for k, v in s.items() if not k.startswith("__")} for s in found}


@pytest.fixture
def words(tmp_path):
    pack(samples(100), tmp_path / "words", shard_samples=30, compression="none", progress=False)
    return tmp_path / "words"


@pytest.mark.parametrize("compression", ["none", "zst", "gz"])
def test_packing_shards_again_keeps_every_sample(tmp_path, words, compression):
    pack(ShardSource(words), tmp_path / "again", shard_samples=7, seed=5, compression=compression, progress=False)

    assert read_all(tmp_path / "again") == read_all(words)


def test_shards_with_indexes_and_without_give_the_same_dataset(tmp_path, words):
    bare = [str(path) for path in sorted(words.glob("*.tar"))]
    assert ShardSource(words).listed() is not None
    assert ShardSource(bare).listed() is None

    indexed = pack(ShardSource(words), tmp_path / "a" / "again", compression="none", progress=False)["again"]
    streamed = pack(ShardSource(bare), tmp_path / "b" / "again", compression="none", progress=False)["again"]

    assert indexed.digest == streamed.digest


def test_a_filter_sees_decoded_fields_and_keeps_what_it_says(tmp_path, words):
    source = ShardSource(words, filter=lambda sample: sample["cls"] == 1)

    pack(source, tmp_path / "ones", progress=False)

    expected = {key: fields for key, fields in read_all(words).items() if fields["cls"] == b"1"}
    assert read_all(tmp_path / "ones") == expected


@pytest.mark.parametrize("compression", ["none", "zst"])
def test_only_the_fields_asked_for_are_taken(tmp_path, words, compression):
    pack(ShardSource(words), tmp_path / "first", compression=compression, progress=False)
    pack(ShardSource(tmp_path / "first", fields=("txt",)), tmp_path / "texts", progress=False)

    assert read_all(tmp_path / "texts") == {key: {"txt": s["txt"]} for key, s in read_all(words).items()}


@pytest.mark.parametrize("compression", ["none", "zst"])
@pytest.mark.parametrize("keep", [None, lambda sample: sample["cls"] == 1])
def test_fields_get_the_names_asked_for_and_a_missing_one_is_an_error(tmp_path, words, compression, keep):
    pack(ShardSource(words), tmp_path / "first", compression=compression, progress=False)
    fields = {"caption": "text;txt", "extra": "json?"}
    pack(ShardSource(tmp_path / "first", fields=fields, filter=keep), tmp_path / "texts", progress=False)

    kept = {key: s for key, s in read_all(words).items() if keep is None or s["cls"] == b"1"}
    assert read_all(tmp_path / "texts") == {key: {"caption": s["txt"]} for key, s in kept.items()}
    with pytest.raises(SampleError, match="has no field json "):
        pack(ShardSource(words, fields=("cls", "json"), filter=keep), tmp_path / "missing", progress=False)
    assert not list((tmp_path / "missing").glob("*.tar*"))


def test_datasets_are_merged_and_a_key_in_both_is_an_error(tmp_path, words):
    pack(samples(50, prefix="other"), tmp_path / "other", progress=False)

    merged = pack(ShardSource([words, tmp_path / "other"]), tmp_path / "merged", progress=False)["merged"]

    assert merged.num_samples == 150
    with pytest.raises(SampleError, match="occurs more than once"):
        pack(ShardSource([words, words]), tmp_path / "twice", progress=False)
    assert not (tmp_path / "twice" / "manifest.json").exists()


def test_a_damaged_shard_is_an_error_that_names_the_sample_and_nothing_is_published(tmp_path, words):
    shard = min(words.glob("*.tar"))
    data = bytearray(shard.read_bytes())
    at = data.find(b"text 5text 5")
    data[at] ^= 1
    shard.write_bytes(data)

    with pytest.raises(ShardError, match="CRC-32") as caught:
        pack(ShardSource(words), tmp_path / "again", progress=False)
    assert (caught.value.field, caught.value.url) == ("txt", str(shard))
    assert not list((tmp_path / "again").glob("manifest.json"))


def test_the_original_path_stays_in_the_index(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "a.TXT").write_text("hello")
    pack(FileFolder(folder), tmp_path / "first", compression="none", progress=False)
    pack(ShardSource(tmp_path / "first"), tmp_path / "second", compression="none", progress=False)

    assert index_of(tmp_path / "second").rows(["__source__"]).column("__source__").to_pylist() == ["a.TXT"]


@pytest.mark.parametrize("compression", ["none", "zst", "gz"])
@pytest.mark.parametrize("keep", [None, lambda sample: sample["cls"] == 1])
def test_the_files_that_samples_were_made_of_stay_known(tmp_path, compression, keep):
    first = [s | ({"__source__": f"photos/{s['__key__']}.txt"} if s["cls"] else {}) for s in samples(40)]
    pack([*first, *samples(30, prefix="b")], tmp_path / "a", shard_samples=20, compression=compression, progress=False)
    pack(ShardSource(tmp_path / "a", filter=keep), tmp_path / "again", compression="none", progress=False)
    index = index_of(tmp_path / "again").rows(["__key__", "__source__"])

    kept = [s for s in [*first, *samples(30, prefix="b")] if keep is None or keep(s)]
    assert dict(zip(*index.to_pydict().values(), strict=True)) == {s["__key__"]: s.get("__source__") for s in kept}
