"""Any tar shards become a dataset with correct indexes; nothing is lost, and damage is not accepted by mistake."""

import bz2
import gzip
import hashlib
import io
import json
import logging
import lzma
import shutil
import subprocess
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit.codecs.compress import compress_frame, decompress_frame, open_decompressed, seek_table
from shardkit.codecs.registry import Decoder
from shardkit.errors import (
    ArgumentError,
    CodecError,
    DatasetError,
    DatasetExistsError,
    ShardError,
    TruncatedShardError,
    UnfinishedDatasetError,
)
from shardkit.format.index import open_index, read_index
from shardkit.format.manifest import UNFINISHED_NAME, read_manifest
from shardkit.format.scan import count_repeated_keys
from shardkit.format.tar import END_OF_ARCHIVE
from shardkit.hashing import hash_keys
from shardkit.packing.indexing import index_shards
from shardkit.packing.writer import ShardWriter
from shardkit.reading.forward import find_shards, read_shard
from shardkit.storage.local import LocalStorage
from tests.support.folders import names_in
from tests.support.shared import tar_of

STORAGE = LocalStorage()
GOLDEN = Path(__file__).parents[1] / "data/format-1/photos/train"
LONG = "folder/" * 20 + "ünïcode "
SAMPLES = {
    **{f"{i:04d}": {"cls": b"%d" % (i % 3), "txt": b"the caption of a picture " * i} for i in range(9)},
    LONG + "1": {"seg.png": bytes(range(256)) * 5, "cls": b"0"},
    LONG + "2": {"jpg": b"", "cls": b"1"},
}


def members_of(samples):
    return [(f"{key}.{field}", data) for key, fields in samples.items() for field, data in fields.items()]


def write_with_webdataset(path, _):
    with webdataset.TarWriter(str(path)) as writer:
        for key, fields in SAMPLES.items():
            writer.write({"__key__": key, **fields})


def write_with_python(tar_format):
    def write(path, _):
        with tarfile.open(path, "w", format=tar_format) as tar:
            for name, data in members_of(SAMPLES):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))

    return write


def write_compressed(compress):
    def write(path, _):
        path.write_bytes(compress(tar_of(members_of(SAMPLES))))

    return write


WRITERS = {
    "webdataset.tar": write_with_webdataset,
    "python-ustar.tar": write_with_python(tarfile.USTAR_FORMAT),
    "python-pax.tar": write_with_python(tarfile.PAX_FORMAT),
    "python-gnu.tar": write_with_python(tarfile.GNU_FORMAT),
    "shardkit.format.tar": write_compressed(bytes),
    "one.tar.gz": write_compressed(gzip.compress),
    "one.tgz": write_compressed(gzip.compress),
    "one.tar.bz2": write_compressed(bz2.compress),
    "one.tar.xz": write_compressed(lzma.compress),
    "one.tar.zst": write_compressed(lambda data: compress_frame(data, 3)),
}


def uncompressed(path):
    stream = open_decompressed(STORAGE.open(str(path)))
    try:
        return b"".join(iter(lambda: stream.read(1 << 20), b""))
    finally:
        stream.close()


def index_of(manifest, i=0):
    return open_index(STORAGE, manifest.url, manifest.shards[i])


def samples_in(index, tar):
    """Return every sample in an index, with its bytes taken from the tar by offset; check the checksums."""
    samples = {}
    for row in index.rows().to_pylist():
        fields = {
            name.removesuffix(":size") for name, size in row.items() if name.endswith(":size") and size is not None
        }
        sample = {f: tar[row[f"{f}:offset"] : row[f"{f}:offset"] + row[f"{f}:size"]] for f in fields}
        assert {f: zlib.crc32(data) for f, data in sample.items()} == {f: row[f"{f}:crc32"] for f in fields}
        samples[row["__key__"]] = sample
    return samples


@pytest.fixture
def packed(tmp_path):
    """Return the manifest of a dataset of ours: two zst shards of several blocks."""
    options = {"compression": "zst", "shard_samples": 20, "block_bytes": 6000, "columns": {"label": "cls"}}
    with ShardWriter(str(tmp_path / "train"), **options) as writer:
        for i in range(35):
            sample = {"__key__": f"{i:04d}", "txt": "a caption " * 50, "cls": i % 3, "__source__": f"photos/{i}"}
            writer.write(sample)
    return writer.manifest


@pytest.mark.parametrize("name", WRITERS)
def test_every_member_of_anybodys_tar_lies_where_the_index_says(name, tmp_path):
    WRITERS[name](tmp_path / name, tmp_path)

    manifest = index_shards(str(tmp_path))
    tar = uncompressed(tmp_path / name)

    assert samples_in(index_of(manifest), tar) == SAMPLES
    assert manifest.shards[0].sha256 == hashlib.sha256(tar).hexdigest()
    assert (manifest.shards[0].tar_size, manifest.shards[0].file_size) == (len(tar), (tmp_path / name).stat().st_size)
    assert manifest.fields == ("cls", "jpg", "seg.png", "txt")
    assert manifest == read_manifest(str(tmp_path))


def test_what_gnu_tar_writes_is_indexed_with_its_folders_left_out(tmp_path):
    for name, data in members_of(SAMPLES):
        file = tmp_path / "files" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    subprocess.run(["tar", "--sort=name", "-cf", tmp_path / "gnu.tar", "-C", tmp_path / "files", "."], check=True)

    manifest = index_shards(str(tmp_path / "gnu.tar"))

    tar = (tmp_path / "gnu.tar").read_bytes()
    assert samples_in(index_of(manifest), tar) == {f"./{key}": fields for key, fields in SAMPLES.items()}


@given(
    sizes=st.lists(st.integers(0, 2000), max_size=30),
    block_bytes=st.integers(1, 20_000),
    skipped=st.sets(st.integers(0, 29)),
)
def test_blocks_hold_all_samples_in_order_and_their_checksums_are_right(sizes, block_bytes, skipped, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    members = []
    for i, size in enumerate(sizes):
        members += [("__meta__/note.txt", b"skipped" * 200)] * (i in skipped)
        members += [(f"{i}.a", bytes(size)), (f"{i}.b", b"b")]
    (folder / "a.tar").write_bytes(tar_of(members))

    manifest = index_shards(str(folder), block_bytes=block_bytes)
    index, tar = index_of(manifest), (folder / "a.tar").read_bytes()

    rows, blocks = index.rows().to_pylist(), index.blocks
    assert len(blocks) == manifest.shards[0].blocks == -(-len(sizes) // manifest.block_samples)
    for i in range(len(blocks)):
        samples = rows[i * manifest.block_samples : (i + 1) * manifest.block_samples]
        end = samples[-1]["__offset__"] + samples[-1]["__size__"]
        block = tar[samples[0]["__offset__"] : end]
        assert (blocks.offset[i], blocks.size[i]) == (samples[0]["__offset__"], len(block))
        assert blocks.crc32[i] == zlib.crc32(block)
        assert (blocks.stored_offset[i], blocks.stored_size[i]) == (blocks.offset[i], blocks.size[i])
    shutil.rmtree(folder)


def test_a_dataset_of_ours_that_is_indexed_again_is_what_it_was(packed):
    before = [index_of(packed, i) for i in range(2)]
    rows = [index.rows() for index in before]

    packed = replace(packed, packed={"seed": 0}, classes=("cat", "dog", "fox"))
    Path(packed.url, "manifest.json").write_text(packed.to_json())

    manifest = index_shards(packed.url)

    after = [index_of(manifest, i) for i in range(2)]
    assert manifest == packed
    assert [index.facts for index in after] == [index.facts for index in before]
    assert [index.rows().equals(r) for index, r in zip(after, rows, strict=True)] == [True, True]
    for one, other in zip(after, before, strict=True):
        assert all(np.array_equal(getattr(one.blocks, n), getattr(other.blocks, n)) for n in one.blocks.__slots__)


def without_indexes(manifest):
    return replace(manifest, shards=tuple(replace(shard, index=None) for shard in manifest.shards))


def test_lost_indexes_of_our_zst_shards_are_made_again_with_a_block_a_frame(packed, tmp_path):
    (tmp_path / "train/manifest.json").unlink()
    shutil.rmtree(tmp_path / "train/__index__")

    manifest = index_shards(packed.url, block_bytes="1KB", columns={"label": "cls"})

    assert without_indexes(manifest) == without_indexes(packed)  # the original files are not recorded
    assert manifest.column_file == packed.column_file
    blocks, stored = index_of(manifest).blocks, (tmp_path / "train" / manifest.shards[0].url).read_bytes()
    for i in range(len(blocks)):
        frame = stored[blocks.stored_offset[i] : blocks.stored_offset[i] + blocks.stored_size[i]]
        data = decompress_frame(frame, int(blocks.size[i]), url="", offset=0)
        assert zlib.crc32(data) == blocks.crc32[i]


@pytest.mark.parametrize(("cut", "block_samples"), [(512, 2), (1024, 2), (1536, 1), (3000, 2)])
def test_blocks_of_foreign_frames_are_not_read_on_their_own(cut, block_samples, tmp_path):
    tar = tar_of(members_of(SAMPLES))
    frames = [(compress_frame(part, 3), len(part)) for part in (tar[:cut], tar[cut:])]
    table = seek_table([(len(frame), size) for frame, size in frames])
    (tmp_path / "a.tar.zst").write_bytes(b"".join(frame for frame, _ in frames) + table)

    manifest = index_shards(str(tmp_path), block_bytes=4000)
    blocks = index_of(manifest).blocks

    assert manifest.block_samples == block_samples  # the first sample ends at byte 1536
    assert len(blocks) > 1
    assert len(blocks.stored_offset) == len(blocks.stored_size) == 0


def test_empty_shards_and_no_shards_are_datasets_too(tmp_path):
    (tmp_path / "a.tar").write_bytes(END_OF_ARCHIVE)
    (tmp_path / "b.tar").write_bytes(tar_of([("1.txt", b"one")]))

    manifest = index_shards(str(tmp_path))
    nothing = index_shards([], out=str(tmp_path / "nothing"))

    assert [shard.samples for shard in manifest.shards] == [0, 1]
    assert list(read_shard(find_shards(str(tmp_path))[0])) == []
    assert (nothing.num_samples, read_manifest(nothing.url)) == (0, nothing)


def test_fields_that_shardkit_would_not_write_are_indexed_as_they_are(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_of([("a.", b"1"), ("a._x", b"2"), ("a.b c:d", b"3"), ("a..e", b"4")]))

    manifest = index_shards(str(tmp_path))

    assert samples_in(index_of(manifest), (tmp_path / "a.tar").read_bytes()) == {
        "a": {"": b"1", "_x": b"2", "b c:d": b"3", ".e": b"4"}
    }


def test_the_readers_read_what_was_indexed_and_compare_it(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_of(members_of(SAMPLES)))
    index_shards(str(tmp_path))

    [location] = find_shards(str(tmp_path))
    samples = {s["__key__"]: {f: s[f] for f in s if f[0] != "_"} for s in read_shard(location)}

    assert location.shard
    assert samples == SAMPLES


@pytest.mark.parametrize(
    ("shards", "repeated"),
    [
        ([["a", "b"], ["c"]], 0),
        ([["a", "b"], ["b", "a"]], 2),
        ([["a", "b", "a"]], 1),  # its members are not adjacent: every reader sees two samples
    ],
)
def test_repeated_keys_are_counted_and_recorded(shards, repeated, tmp_path, caplog):
    for i, keys in enumerate(shards):
        (tmp_path / f"{i}.tar").write_bytes(tar_of([(f"{key}.txt", b"") for key in keys]))

    with caplog.at_level(logging.WARNING, logger="shardkit"):
        manifest = index_shards(str(tmp_path))

    assert manifest.unique_keys == (repeated == 0)
    told = [f"{tmp_path}: {repeated} samples have a key that an earlier sample has; unique_keys is false"]
    assert caplog.messages == (told if repeated else [])


@given(st.lists(st.lists(st.sampled_from("abcdef"), max_size=5), max_size=5))
def test_equal_hashes_are_no_repeated_keys_until_the_keys_are_equal(shards):
    keys = [key for shard in shards for key in shard]
    colliding = [np.zeros(len(shard), dtype=np.uint64) for shard in shards]

    expected = len(keys) - len(set(keys))
    assert count_repeated_keys(colliding, lambda i: shards[i]) == expected
    assert count_repeated_keys([hash_keys(shard) for shard in shards], lambda i: shards[i]) == expected


def test_columns_are_fields_or_functions_of_the_sample(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_of([("1.cls", b"7"), ("1.txt", b"one"), ("2.txt", b"two")]))

    columns = {"label": "cls", "length": lambda sample: len(sample["txt"])}
    manifest = index_shards(str(tmp_path), columns=columns)

    rows = index_of(manifest).rows(["label", "length"]).to_pylist()
    assert rows == [{"label": 7, "length": 3}, {"label": None, "length": 3}]
    assert manifest.columns == {"label": "int64", "length": "int64"}
    assert index_shards(str(tmp_path), columns={"key": lambda s: s["__key__"]}).columns == {
        "label": "int64",
        "length": "int64",
        "key": "string",
    }
    assert index_shards(str(tmp_path), overwrite=True).columns.keys() == {"label", "length", "key"}
    (tmp_path / "manifest.json").unlink()
    assert index_shards(str(tmp_path)).columns.keys() == {"label", "length", "key"}  # from the remaining indexes
    (tmp_path / "manifest.json").unlink()
    shutil.rmtree(tmp_path / "__index__")
    assert index_shards(str(tmp_path)).columns == {}


def test_a_column_of_a_field_that_no_sample_has_is_an_error_and_there_is_no_manifest(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_of([("1.cls", b"7"), ("1.txt", b"one"), ("2.json", b"2")]))

    with pytest.raises(ArgumentError, match=r"'label' names the field 'clss', which no sample .* cls, json, txt\)"):
        index_shards(tmp_path, columns={"label": "clss", "rare": "json"})
    assert not (tmp_path / "manifest.json").exists()
    assert index_shards(tmp_path, columns={"rare": "json"}).columns == {"rare": "int64"}


def test_a_field_is_decoded_once_for_all_columns_of_a_sample_and_only_if_one_asks(tmp_path, monkeypatch):
    (tmp_path / "a.tar").write_bytes(tar_of([("1.cls", b"1"), ("1.txt", b"one"), ("2.cls", b"2"), ("2.txt", b"two")]))
    decode, decoded = Decoder.decode, []

    def counting(self, field, data, **where):
        decoded.append((where["key"], field))
        return decode(self, field, data, **where)

    monkeypatch.setattr(Decoder, "decode", counting)
    index_shards(tmp_path, columns={"label": "cls", "odd": lambda s: s["cls"] % 2, "double": lambda s: s["cls"] * 2})

    assert decoded == [("1", "cls"), ("2", "cls")]


def test_columns_of_other_bytes_are_not_taken_over(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_of([("1.cls", b"7")]))
    index_shards(str(tmp_path), columns={"label": "cls"})
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "a.tar").write_bytes(tar_of([("1.cls", b"8")]))

    assert index_shards(str(tmp_path)).columns == {}


def test_columns_that_fail_or_have_no_common_type_name_the_column(tmp_path):
    for i in range(2):
        (tmp_path / f"{i}.tar").write_bytes(tar_of([(f"{i}.cls", b"%d" % i)]))

    with pytest.raises(CodecError, match="sample '0': column 'x' cannot be computed"):
        index_shards(str(tmp_path), columns={"x": lambda sample: 1 / sample["cls"]})
    with pytest.raises(ArgumentError, match=r"columns: the values in shard 1\.tar are not of the type"):
        index_shards(str(tmp_path), columns={"x": lambda sample: [1, "one"][sample["cls"]]})
    with pytest.raises(
        ArgumentError, match="'a:size' is reserved for the index; choose a name without a ':' or a leading '_'"
    ):
        index_shards(str(tmp_path), columns={"a:size": "cls"})
    assert not (tmp_path / "manifest.json").exists()


def test_a_shard_that_is_not_what_its_manifest_says_is_not_blessed(packed, tmp_path):
    shard = tmp_path / "train" / packed.shards[1].url
    before = (tmp_path / "train/manifest.json").read_bytes()
    tar = bytearray(uncompressed(shard))
    tar[600] ^= 1
    shard.write_bytes(compress_frame(bytes(tar), 3))

    with pytest.raises(DatasetError, match=r"train-000001\.tar\.zst: has the SHA-256 .* as its manifest says"):
        index_shards(packed.url)

    assert (tmp_path / "train/manifest.json").read_bytes() == before
    assert index_shards(packed.url, overwrite=True).shards[1].sha256 == hashlib.sha256(tar).hexdigest()


def test_shards_that_the_manifest_has_are_not_dropped_from_it(packed, tmp_path):
    with pytest.raises(DatasetExistsError, match=r"also lists train-000000\.tar\.zst, which would be lost"):
        index_shards(str(tmp_path / "train/train-000001.tar.zst"))

    (tmp_path / "train/more.tar").write_bytes(tar_of([("new.txt", b"")]))
    assert index_shards(packed.url).num_samples == packed.num_samples + 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_of_somebody_else_beside_a_shard_stays_and_is_not_in_the_way(overwrite, tmp_path):
    (tmp_path / "00000.tar").write_bytes(tar_of([("1.txt", b"")]))
    pq.write_table(pa.table({"url": ["http://..."]}), tmp_path / "00000.parquet")  # as img2dataset writes it
    before = (tmp_path / "00000.parquet").read_bytes()

    for _ in range(2):
        assert index_shards(str(tmp_path), overwrite=overwrite).num_samples == 1
        assert (tmp_path / "00000.parquet").read_bytes() == before
    assert read_manifest(tmp_path).num_samples == 1


def copy_of_format_1(tmp_path):
    folder = tmp_path / "train"
    shutil.copytree(GOLDEN, folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def test_a_dataset_of_format_1_becomes_one_of_format_2_with_the_same_digest_and_order(tmp_path):
    folder = copy_of_format_1(tmp_path)
    old = read_manifest(folder)
    before = [read_index(STORAGE, f"{folder}/{shard.index_url}") for shard in old.shards]
    rows = [index.rows() for index in before]
    samples = list(shardkit.ShardDataset(folder, columns=tuple(old.columns), decode=False))

    new = index_shards(folder)

    assert (old.version, new.version, read_manifest(folder)) == (1, 2, new)
    for name in ("digest", "fields", "classes", "columns", "packed", "unique_keys", "block_samples"):
        assert getattr(new, name) == getattr(old, name)
    after = [index_of(new, i) for i in range(len(new.shards))]
    assert [index.rows().equals(r) for index, r in zip(after, rows, strict=True)] == [True] * len(rows)
    assert [a.blocks.to_bytes() == b.blocks.to_bytes() for a, b in zip(after, before, strict=True)] == [True] * len(
        rows
    )
    assert list(shardkit.ShardDataset(folder, columns=tuple(old.columns), decode=False)) == samples
    assert not list(folder.glob("*.parquet"))  # its old indexes are deleted
    assert shardkit.verify(folder).ok


def test_of_old_indexes_only_those_of_these_shards_are_deleted(tmp_path):
    folder = copy_of_format_1(tmp_path)
    first, second = (folder / shard.index_url for shard in read_manifest(folder).shards[:2])
    (folder / "other.parquet").write_bytes(first.read_bytes())
    second.write_bytes(first.read_bytes())  # the index of another shard
    index_shards(folder, overwrite=True)

    assert {path.name for path in folder.glob("*.parquet")} == {"other.parquet", second.name}


def test_an_index_that_changes_gets_another_name_and_who_reads_the_old_one_is_not_disturbed(packed):
    reading = shardkit.ShardDataset(packed.url, columns=("label",))
    expected = [(s["txt"], s["label"]) for s in shardkit.ShardDataset(packed.url, columns=("label",))]
    changed = index_shards(packed.url, columns={"label": lambda sample: -sample["cls"]})

    assert {s.index_url for s in changed.shards}.isdisjoint(s.index_url for s in packed.shards)
    assert [(s["txt"], s["label"]) for s in reading] == expected
    assert [s["label"] for s in shardkit.ShardDataset(packed.url, columns=("label",))] == [-n for _, n in expected]


def test_a_manifest_that_cannot_be_read_is_replaced_only_when_asked_for(packed, tmp_path):
    (tmp_path / "train/manifest.json").write_text('{"wids_version": 1, "shardlist": []}')

    with pytest.raises(DatasetError, match="wids wrote it"):
        index_shards(packed.url)

    assert index_shards(packed.url, overwrite=True, columns={"label": "cls"}) == packed


def test_an_unfinished_dataset_is_not_finished_by_an_index(packed, tmp_path):
    (tmp_path / "train" / UNFINISHED_NAME).write_text("{}")

    with pytest.raises(UnfinishedDatasetError):
        index_shards(packed.url)
    with pytest.raises(UnfinishedDatasetError):
        index_shards(packed.url, out=str(tmp_path / "out"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_damaged_shard_leaves_no_index_and_no_manifest(overwrite, tmp_path):
    whole = tar_of([("1.txt", b"")])
    (tmp_path / "a.tar").write_bytes(whole)
    (tmp_path / "b.tar").write_bytes(whole[:-1])

    with pytest.raises(TruncatedShardError, match=r"b\.tar"):
        index_shards(str(tmp_path), overwrite=overwrite)

    assert names_in(tmp_path) == ["__index__/a.*.parquet", "a.tar", "b.tar"]
    assert index_shards(str(tmp_path / "a.tar")).num_samples == 1


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.txt", b""), ("a.TXT", b"")], "a second field 'txt' of sample 'a'"),
        ([("a.__url__", b"")], "the field '__url__' of sample 'a'"),
        ([("a\udce4.txt", b"")], "whose name is not UTF-8"),
    ],
)
def test_names_that_no_index_can_hold_are_errors_that_say_where(members, message, tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_of([("0.txt", b""), *members]))

    with pytest.raises(ShardError, match=message) as caught:
        index_shards(str(tmp_path))

    assert caught.value.offset == 512 * len(members)


def test_shards_in_a_read_only_place_are_reached_only_by_who_allows_it(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store/a.tar").write_bytes(tar_of([("1.txt", b"one")]))
    before = sorted((tmp_path / "store").iterdir())

    manifest = index_shards(str(tmp_path / "store"), out=str(tmp_path / "indexes/"))

    assert sorted((tmp_path / "store").iterdir()) == before
    assert names_in(tmp_path / "indexes") == [
        *["__index__/a.*.parquet", "__index__/blocks.*.npy", "__index__/manifest-*.json", "manifest.json"]
    ]
    with pytest.raises(DatasetError, match="allow_any_url=True"):
        read_manifest(manifest.url)
    opened = read_manifest(manifest.url, allow_any_url=True)
    assert (tmp_path / "indexes" / opened.shards[0].url).read_bytes() == (tmp_path / "store/a.tar").read_bytes()
    assert index_of(opened).sample_keys() == ["1"]


def test_shards_and_the_place_of_their_manifest_may_be_named_by_paths(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_of([("1.txt", b"one")]))

    manifest = index_shards(tmp_path, out=tmp_path / "out")

    assert manifest == index_shards(str(tmp_path), out=str(tmp_path / "out"))
    assert index_shards([tmp_path / "a.tar"]).url == str(tmp_path)


def test_shards_of_several_folders_need_a_place_for_the_manifest(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.tar").write_bytes(tar_of([(f"{name}.txt", b"")]))

    with pytest.raises(
        ArgumentError, match=r"the shards are in .*; pass the folder for the manifest and the indexes as out="
    ):
        index_shards([str(tmp_path / "x"), str(tmp_path / "y")])

    manifest = index_shards([str(tmp_path / "x"), str(tmp_path / "y")], out=str(tmp_path))
    assert [shard.url for shard in manifest.shards] == ["x/a.tar", "y/a.tar"]
    assert [index_of(manifest, i).sample_keys() for i in range(2)] == [["x"], ["y"]]
    elsewhere = index_shards([str(tmp_path / "x"), str(tmp_path / "y")], out=str(tmp_path / "out"))
    assert [index_of(elsewhere, i).sample_keys() for i in range(2)] == [["x"], ["y"]]
    assert names_in(tmp_path / "out").count("__index__/a.*.parquet") == 2


@pytest.mark.parametrize(
    ("urls", "message"),
    [("-", "standard input cannot be indexed"), ([], "there are no shards")],
)
def test_what_cannot_be_indexed_is_an_error(urls, message):
    with pytest.raises(ArgumentError, match=message):
        index_shards(urls)


def test_shards_of_one_stem_have_an_index_each(tmp_path):
    for name, data in (("a.tar", b"one"), ("a.tar.gz", b"two")):
        tar = tar_of([(f"{data.decode()}.txt", data)])
        (tmp_path / name).write_bytes(tar if name == "a.tar" else gzip.compress(tar))
    manifest = index_shards([tmp_path / "a.tar", tmp_path / "a.tar.gz"])

    assert [index_of(manifest, i).sample_keys() for i in range(2)] == [["one"], ["two"]]
    assert [s["txt"] for s in shardkit.ShardStream(tmp_path, shuffle=False)] == ["one", "two"]


def test_patterns_and_lists_name_shards(tmp_path):
    for i in range(3):
        (tmp_path / f"s-{i}.tar").write_bytes(tar_of([(f"{i}.txt", b"")]))

    manifest = index_shards(f"{tmp_path}/s-{{0..1}}.tar", classes=["cat", "dog"])

    assert [shard.url for shard in manifest.shards] == ["s-0.tar", "s-1.tar"]
    assert index_shards([f"{tmp_path}/s-[01].tar", f"{tmp_path}/s-2.tar"]).classes == ("cat", "dog")
    assert json.loads((tmp_path / "manifest.json").read_text())["wids_version"] == 1


def test_the_public_name_is_the_function():
    assert shardkit.index_shards is index_shards
