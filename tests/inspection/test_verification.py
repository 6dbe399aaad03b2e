"""Verify finds any damage, and says which samples are still whole."""

import io
import json
import shutil
import tarfile
from dataclasses import asdict, fields, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal.isal_zlib import crc32

import shardkit
from shardkit.codecs.compress import open_decompressed
from shardkit.errors import DatasetError, ShardkitError
from shardkit.format.index import BlockTable, open_index
from shardkit.format.manifest import UNFINISHED_NAME, Manifest
from shardkit.format.side_files import BlockFile, ColumnFile, encode_blocks
from shardkit.inspection.verification import verify
from shardkit.packing.indexing import index_shards
from shardkit.packing.writer import ShardWriter
from shardkit.reading.forward import find_shards, read_shard
from shardkit.storage.local import LocalStorage
from tests.support.folders import files_of
from tests.support.forge import edit_manifest, index_of, index_path, manifest_of, rewrite_index
from tests.support.shared import COMPRESSIONS, every_compression, examples, tar_of

STORAGE = LocalStorage()
NUM_SAMPLES = 14


def write_dataset(folder, compression):
    options = {"compression": compression, "shard_samples": 8, "block_bytes": 4000, "columns": {"label": "cls"}}
    with ShardWriter(str(folder), **options) as writer:
        for i in range(NUM_SAMPLES):
            text = f"the caption of picture {i} " * (7 * i)
            writer.write({"__key__": f"{i:04d}", "txt": text, "cls": i % 3, "__source__": f"photos/{i}.jpg"})


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Return one folder for each compression; they are never changed."""
    folders = {}
    for compression in COMPRESSIONS:
        folders[compression] = tmp_path_factory.mktemp(compression) / "train"
        write_dataset(folders[compression], compression)
    return folders


def shard_of(folder, i=0):
    return sorted(path for path in folder.iterdir() if ".tar" in path.name)[i]


def flip(path, at, mask=1):
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


def problems_of(report):
    return [*report.problems, *(problem for shard in report.damaged for problem in shard.problems)]


def messages_of(report):
    return [problem.message for problem in problems_of(report)]


def what_a_reader_gets(folder):
    """Return everything that a reader can get from a dataset, or None if it gets an error."""
    try:
        manifest = Manifest.from_json((folder / "manifest.json").read_bytes(), url=str(folder))
        tars, indexes = [], []
        for shard in manifest.shards:
            stream = open_decompressed(STORAGE.open(f"{folder}/{shard.url}"))
            tars.append(b"".join(iter(lambda s=stream: s.read(1 << 20), b"")))
            stream.close()
            index = open_index(STORAGE, str(folder), shard)
            indexes.append((index.facts, index.rows().to_pydict(), index.blocks.to_bytes()))
        blocks = [BlockFile(manifest, STORAGE).table(i).to_bytes() for i in range(len(manifest.shards))]
        columns = ColumnFile(manifest, STORAGE)
        values = [columns.rows(columns.schema.names, i).to_pydict() for i in range(columns.num_groups)]
    except (ShardkitError, OSError):
        return None
    return manifest, tars, indexes, blocks, values


@every_compression
def test_a_whole_dataset_has_no_problems(compression, originals):
    report = verify(str(originals[compression]))

    assert report.ok, messages_of(report)
    assert (report.shards, report.samples, report.notes) == (2, NUM_SAMPLES, ())
    assert json.loads(report.to_json())["ok"] is True
    assert verify(f"{originals[compression]}/manifest.json").ok


def is_read(path):
    """Return whether readers that are given a folder read a file in it."""
    return not path.name.startswith((".", "manifest-"))


@examples(3)
@given(data=st.data(), compression=st.sampled_from(COMPRESSIONS))
def test_a_bit_that_flips_anywhere_is_reported_unless_it_changes_nothing_that_is_read(data, compression, originals):
    """Only changes to gzip's time, and to files that no reader needs here (old manifest, card), may go unnoticed."""
    original = originals[compression]
    path = data.draw(st.sampled_from(files_of(original)), label="file")
    at = data.draw(st.integers(0, path.stat().st_size - 1), label="byte")
    mask = 1 << data.draw(st.integers(0, 7), label="bit")
    folder = original.parent / "flipped" / "train"
    shutil.copytree(original, folder)
    try:
        flip(folder / path.relative_to(original), at, mask)

        report = verify(str(folder))

        if ".tar" in path.name or not is_read(path):
            assert not report.ok or what_a_reader_gets(folder) == what_a_reader_gets(original)
        else:
            assert not report.ok
    finally:
        shutil.rmtree(folder)


@examples(1.2)
@given(data=st.data(), compression=st.sampled_from(COMPRESSIONS))
def test_a_file_that_is_cut_is_reported(data, compression, originals):
    original = originals[compression]
    path = data.draw(st.sampled_from([path for path in files_of(original) if is_read(path)]), label="file")
    size = data.draw(st.integers(0, path.stat().st_size - 1), label="size")
    folder = original.parent / "cut" / "train"
    shutil.copytree(original, folder)
    try:
        (folder / path.relative_to(original)).write_bytes(path.read_bytes()[:size])

        assert not verify(str(folder)).ok
    finally:
        shutil.rmtree(folder)


@given(at=st.integers(0, 30_000))
def test_only_the_sample_that_is_hit_is_not_whole(at, originals):
    original = originals["none"]
    path = shard_of(original)
    at %= path.stat().st_size
    rows = index_of(original).rows().to_pylist()
    hit = [
        row["__key__"]
        for row in rows
        for field in ("txt", "cls")
        if row[f"{field}:offset"] <= at < row[f"{field}:offset"] + row[f"{field}:size"]
    ]
    folder = original.parent / "hit" / "train"
    shutil.copytree(original, folder)
    try:
        flip(folder / path.name, at)

        [damaged] = verify(str(folder)).damaged

        assert list(damaged.damaged) == hit
        assert (damaged.samples, damaged.whole) == (8, 8 - len(hit))
        assert [problem.key for problem in damaged.problems if problem.key] == hit
    finally:
        shutil.rmtree(folder)


def test_after_damage_in_a_zst_shard_the_other_blocks_are_whole(dataset):
    folder = dataset("zst")
    index = index_of(folder)
    block = 1
    flip(shard_of(folder), int(index.blocks.stored_offset[block]) + 20)

    report = verify(str(folder))

    size = index.facts.block_samples
    assert report.damaged[0].damaged == tuple(index.sample_keys()[block * size : (block + 1) * size])
    assert report.damaged[0].whole == 8 - size
    assert len(report.damaged) == 1


def test_after_damage_in_a_gz_shard_the_samples_before_it_are_whole(dataset):
    folder = dataset("gz")
    tar = shard_of(folder)
    tar.write_bytes(tar.read_bytes()[: tar.stat().st_size // 2])

    [damaged] = verify(str(folder)).damaged

    keys = index_of(folder).sample_keys()
    assert 0 < damaged.whole < 8
    assert list(damaged.damaged) == keys[damaged.whole :]


@every_compression
def test_damage_is_said_with_its_place_and_the_rest_goes_on(compression, dataset):
    folder = dataset(compression)
    for i in range(2):
        tar = shard_of(folder, i)
        tar.write_bytes(tar.read_bytes()[: tar.stat().st_size // 2])

    report = verify(str(folder))

    assert [shard.url for shard in report.damaged] == [str(shard_of(folder, i)) for i in range(2)]
    assert all(shard.problems[0].url == shard.url and "ends" in shard.problems[0].message for shard in report.damaged)


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        *[("train-000001.tar", [0]), ("__index__/train-000001.*.parquet", [6])],
        *[("__index__/blocks.*.npy", []), ("__index__/columns.*.parquet", [])],
    ],
)
def test_a_missing_file_is_reported(name, whole, dataset):
    folder = dataset()
    [path] = folder.glob(name)
    path.unlink()

    report = verify(str(folder))

    assert [p.url for p in problems_of(report) if "is missing" in p.message] == [str(path)]
    assert [shard.whole for shard in report.damaged] == whole


@pytest.mark.parametrize("name", ["train-000002.tar", "more.tar.gz", "train-000002.parquet"])
def test_a_file_too_many_is_reported(name, dataset):
    folder = dataset()
    shutil.copy(folder / "train-000000.tar", folder / name)
    (folder / "README.txt").write_text("about these pictures")

    [problem] = problems_of(verify(str(folder)))

    assert problem.url == f"{folder}/{name}"
    assert "is not in the manifest" in problem.message


def test_an_unfinished_dataset_is_reported_and_verified(dataset):
    folder = dataset()
    (folder / UNFINISHED_NAME).write_text("{}")
    flip(shard_of(folder), 512)  # the first byte of the first sample's first field

    report = verify(str(folder))

    assert report.problems[0].url == f"{folder}/{UNFINISHED_NAME}"
    assert len(report.damaged) == 1


def test_a_manifest_that_cannot_be_read_does_not_end_it(dataset):
    folder = dataset()
    (folder / "manifest.json").write_text("{")
    flip(shard_of(folder), 512)  # the first byte of the first sample's first field

    report = verify(str(folder))

    assert [problem.url for problem in report.problems] == [f"{folder}/manifest.json"]
    assert [len(shard.damaged) for shard in report.damaged] == [1]  # found by the index


def test_a_shard_with_its_index_from_elsewhere_is_reported(dataset, tmp_path):
    folder = dataset()
    write_dataset(tmp_path / "other/train", "none")
    shutil.copy(tmp_path / "other/train/train-000001.tar", folder / "train-000000.tar")
    shutil.copy(index_path(tmp_path / "other/train", 1), index_path(folder, 0))

    messages = messages_of(verify(str(folder)))

    assert any("sha256" in message and "the manifest says" in message for message in messages)
    assert any("is not an index of shardkit" in message for message in messages)


def test_a_shard_with_an_index_that_fits_it_and_not_the_manifest_is_reported(dataset, tmp_path):
    folder = dataset()
    write_dataset(tmp_path / "other/train", "none")
    other = index_of(tmp_path / "other/train", 1)
    shutil.copy(tmp_path / "other/train/train-000001.tar", folder / "train-000000.tar")
    rewrite_index(folder, rows=lambda _: other.rows(), facts=asdict(other.facts), blocks=other.blocks)

    messages = messages_of(verify(str(folder)))

    assert any("sha256" in message and "the manifest says" in message for message in messages)
    assert any("is the index of another shard" in message for message in messages)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fields": ("cls", "jpg")}, "has the fields"),
        ({"columns": {"label": "string"}}, "has the columns"),
        ({"columns": {}, "column_file": None}, "has the columns"),
        ({"block_samples": 3}, "block_samples"),
    ],
)
def test_what_the_manifest_says_wrongly_is_reported(change, message, dataset):
    folder = dataset()
    (folder / "manifest.json").write_text(replace(manifest_of(folder), **change).to_json())

    assert any(message in found for found in messages_of(verify(str(folder))))


@pytest.mark.parametrize("attribute", ["file_size", "tar_size", "compression", "blocks"])
def test_what_the_manifest_says_wrongly_of_a_shard_is_reported(attribute, dataset):
    folder = dataset()
    manifest = manifest_of(folder)
    wrong = replace(manifest.shards[0], **{attribute: "gz" if attribute == "compression" else 7})
    (folder / "manifest.json").write_text(replace(manifest, shards=(wrong, *manifest.shards[1:])).to_json())

    messages = messages_of(verify(str(folder)))

    assert [message for message in messages if f"has {attribute} " in message]
    assert len(messages) == 1 + (attribute != "file_size")  # the index does not match such a shard


def with_value(name, value, row=3):
    """Return a function that puts a value into one row of a table."""

    def change(table):
        values = table.column(name).to_pylist()
        values[row] = value
        return table.set_column(table.column_names.index(name), name, pa.array(values, table.schema.field(name).type))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_value("__key__", "x"), "has 1 rows that do not match its shard, the first of sample '0003'"),
        (with_value("__size__", 512), "has 1 rows that do not match its shard, the first of sample '0003'"),
        (with_value("txt:crc32", 7), "has 1 rows that do not match its shard, the first of sample '0003'"),
        (with_value("txt:offset", None), "a sample has one of txt:offset, txt:size, txt:crc32 and lacks another"),
        (lambda table: table.drop_columns(["txt:crc32"]), "lacks txt:crc32"),
        (lambda table: table.drop_columns(["__offset__"]), "lacks __offset__"),
        (lambda table: table.append_column("x:size", table.column("txt:size")), "has other columns"),
        (
            lambda table: table.rename_columns([n.replace("ource", "ourcx") for n in table.column_names]),
            "has the columns",
        ),
    ],
    ids=["key", "size", "crc32", "missing", "no crc32", "no offset", "more", "no source"],
)
def test_rows_of_an_index_that_are_not_what_the_shard_is_are_reported(change, message, dataset):
    folder = dataset()
    rewrite_index(folder, rows=change)

    [found] = messages_of(verify(str(folder)))

    assert message in found


@pytest.mark.parametrize("name", ["offset", "size", "crc32", "stored_offset", "stored_size"])
def test_a_block_table_that_is_not_what_the_shard_is_is_reported(name, dataset):
    folder = dataset("zst")
    blocks = index_of(folder).blocks
    values = getattr(blocks, name).copy()
    values[1] += 1
    rewrite_index(folder, blocks=replace(blocks, **{name: values}))

    assert [m for m in messages_of(verify(str(folder))) if f"{name} of block 1" in m]
    rewrite_index(folder, blocks=BlockTable(*(getattr(blocks, field.name)[:-1] for field in fields(blocks))))
    assert [m for m in messages_of(verify(str(folder))) if f"{name} of a different length" in m]


@pytest.mark.parametrize("name", ["__index__/train-000000.*.parquet", "__index__/columns.*.parquet"])
def test_a_value_that_was_promoted_is_protected(name, dataset):
    folder = dataset()
    [path] = folder.glob(name)
    group = pq.ParquetFile(path).metadata.row_group(0)
    [label] = [c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == "label"]
    whole = path.read_bytes()
    for at in range(label.data_page_offset, label.data_page_offset + label.total_compressed_size):
        path.write_bytes(whole)
        flip(path, at)

        assert any("SHA-256" in message for message in messages_of(verify(str(folder))))
        assert what_a_reader_gets(folder) is None


def test_columns_of_all_samples_that_are_not_what_the_indexes_have_are_reported(dataset):
    folder = dataset()
    manifest = manifest_of(folder)
    rewrite_index(folder, rows=with_value("label", 7))
    (folder / "manifest.json").write_text(replace(manifest_of(folder), shards=manifest.shards).to_json())

    [message] = messages_of(verify(str(folder)))

    assert "has other values in its group 0 than the indexes" in message


def test_a_block_table_of_all_shards_that_is_not_what_the_indexes_have_is_reported(dataset):
    folder = dataset()
    blocks = index_of(folder).blocks
    wrong = replace(blocks, crc32=blocks.crc32 ^ 1)
    data, block_file = encode_blocks([wrong, index_of(folder, 1).blocks])
    manifest = replace(manifest_of(folder), block_file=block_file)
    (folder / manifest.block_file_url).write_bytes(data)
    (folder / "manifest.json").write_text(manifest.to_json())

    assert not verify(str(folder)).ok  # the checksum of the shard's part is still that of the correct data
    shards = (replace(manifest.shards[0], blocks_crc32=crc32(wrong.to_bytes())), manifest.shards[1])
    (folder / "manifest.json").write_text(replace(manifest, shards=shards).to_json())
    assert not verify(str(folder)).ok


def test_a_seek_table_that_says_more_than_there_is_is_reported(dataset):
    folder = dataset("zst")
    size_of_last_frame = -9 - 4  # the footer, and the last number of the last entry
    flip(shard_of(folder), size_of_last_frame)

    [message] = messages_of(verify(str(folder)))

    assert "has a seek table for" in message


def test_without_an_index_nothing_is_known_of_a_shard_that_was_changed(dataset):
    folder = dataset()
    index_path(folder).unlink()
    flip(shard_of(folder), 512)

    [damaged] = verify(str(folder)).damaged

    assert (damaged.samples, damaged.whole, damaged.damaged) == (8, 0, ())


@pytest.mark.parametrize(("name", "value"), [("txt:size", 1 << 60), ("txt:offset", -512), ("txt:offset", 1 << 62)])
def test_what_a_damaged_index_claims_of_a_damaged_shard_is_not_believed(name, value, dataset):
    folder = dataset()
    rewrite_index(folder, rows=with_value(name, value))
    flip(shard_of(folder), 512)

    [damaged] = verify(str(folder)).damaged

    assert damaged.damaged == ("0000", "0003")


@pytest.mark.parametrize(
    ("name", "value"), [("samples", 15), ("digest", "00"), ("block_samples", 0), ("shardlist", [])]
)
def test_a_manifest_that_was_edited_is_reported(name, value, dataset):
    folder = dataset()
    text = (folder / "manifest.json").read_bytes()
    edit_manifest(folder, lambda described: described.update({name: value}))

    assert not verify(str(folder)).ok
    (folder / "manifest.json").write_bytes(text)
    assert verify(str(folder)).ok
    edit_manifest(folder, lambda described: described.pop(name))
    assert not verify(str(folder)).ok


def test_keys_that_should_be_unique_and_are_not_are_reported(tmp_path):
    for i in range(2):
        (tmp_path / f"{i}.tar").write_bytes(tar_of((name, b"one") for name in ["a.txt", f"b{i}.txt"]))
    manifest = index_shards(str(tmp_path))

    assert verify(str(tmp_path)).ok
    (tmp_path / "manifest.json").write_text(replace(manifest, unique_keys=True).to_json())
    assert messages_of(verify(str(tmp_path))) == [
        "says that keys are unique, but 1 samples have a key that an earlier one has"
    ]


def test_shards_without_a_manifest_are_verified_as_far_as_a_tar_tells(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.tar").write_bytes(tar_of((name, b"one") for name in ["a.txt", "b.txt", "c.txt"]))
    pq.write_table(pa.table({"url": ["http://..."]}), tmp_path / "0.parquet")  # as img2dataset writes it
    flip(tmp_path / "1.tar", 2 * 1024 + 5)

    report = verify(str(tmp_path))

    assert [(shard.url, shard.whole, shard.samples) for shard in report.damaged] == [(f"{tmp_path}/1.tar", 1, 1)]
    assert report.damaged[0].problems[0].offset == 2 * 1024
    assert report.notes == (
        "there is no manifest, so missing or replaced shards cannot be detected",
        "there are shards without indexes; only their headers and ends were checked",
    )
    assert verify(f"{tmp_path}/0.tar").ok
    assert not verify(f"{tmp_path}/[12].tar").ok


def test_a_shard_alone_is_verified_by_the_index_beside_it(dataset):
    folder = dataset()
    flip(shard_of(folder), 512)  # the first byte of the first sample's first field

    [damaged] = verify(str(shard_of(folder))).damaged

    assert (damaged.whole, len(damaged.damaged)) == (7, 1)
    assert verify(str(shard_of(folder, 1))).ok


def test_shards_elsewhere_are_verified_if_that_is_allowed(dataset, tmp_path):
    folder = dataset()
    index_shards(str(folder), out=str(tmp_path / "out"))

    assert "allow_any_url" in messages_of(verify(str(tmp_path / "out")))[0]
    assert verify(str(tmp_path / "out"), allow_any_url=True).ok


def test_a_sample_that_verify_calls_whole_is_what_was_written(dataset):
    folder = dataset()
    whole = {sample["__key__"]: sample for location in find_shards(str(folder)) for sample in read_shard(location)}
    tar = shard_of(folder)
    flip(tar, tar.stat().st_size // 2 // 512 * 512 + 3)  # in a header or in the middle of a text

    [damaged] = verify(str(folder)).damaged

    with tarfile.open(fileobj=io.BytesIO(tar.read_bytes()), ignore_zeros=True) as members:
        names = members.getnames()
    assert len(names) < 16 or damaged.damaged
    assert set(damaged.damaged) < set(whole)


def test_a_dataset_may_be_named_by_a_path(originals):
    folder = originals["zst"]

    assert verify(Path(folder)) == verify(str(folder))
    assert verify(Path(folder, "manifest.json")).ok


def test_what_is_not_there_is_an_error(tmp_path):
    with pytest.raises(DatasetError, match="does not exist"):
        verify(str(tmp_path / "nothing"))


def test_the_public_name_is_the_function():
    assert shardkit.verify is verify
