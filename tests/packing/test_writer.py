"""Written samples are read back, the bytes are the same every time, and only a complete dataset is one."""

import errno
import hashlib
import io
import tarfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import (
    ArgumentError,
    CodecError,
    DatasetError,
    DatasetExistsError,
    SampleError,
    UnfinishedDatasetError,
)
from shardkit.format.manifest import read_manifest
from shardkit.packing import writer as writer_module
from shardkit.packing.job import pack
from shardkit.packing.writer import ShardWriter
from shardkit.reading.forward import ShardLocation, find_shards, read_shard
from shardkit.sample import KEY, URL
from shardkit.storage.base import join
from shardkit.storage.local import LocalStorage
from tests.support.folders import files_of, names_in, temporary_files

GOLDEN = (
    b"0001.txt".ljust(100, b"\0")
    + b"0000444\x000000000\x000000000\0"  # mode and owner
    + b"00000000005\x0000000000000\0"  # size and time
    + b"007057\0 0"  # checksum and kind
    + bytes(100)
    + b"ustar\x0000".ljust(255, b"\0")
    + b"hello".ljust(512, b"\0")
    + bytes(1024)
)
SHARD_OF_THREE = 3 * 1024 + 1024  # three samples of one small field (header and data), then the archive's end

texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=40)
keys = texts.filter(lambda text: not set(text) & set("./") and not text.startswith("__"))
paths = st.lists(keys, min_size=1, max_size=3).map("/".join)
fields = st.sampled_from(["jpg", "txt", "cls", "seg.png", "json", "a-b", "x1"])
sizes = st.sampled_from([0, 1, 511, 512, 513, 1024, 70_000]) | st.integers(0, 2000)
payloads = st.builds(lambda size, byte: bytes([byte]) * size, sizes, st.integers(0, 255))
datasets = st.dictionaries(paths, st.dictionaries(fields, payloads, min_size=1), min_size=1, max_size=12)


def write(folder, samples, **options):
    with ShardWriter(folder, **{"compression": "none"} | options) as writer:
        for sample in samples:
            writer.write(sample)
    return writer.manifest


def read(folder):
    """Return the samples of every shard, read strictly and compared with the index."""
    found = [list(read_shard(location)) for location in find_shards(str(folder))]
    return [[{name: value for name, value in s.items() if name != URL} for s in shard] for shard in found]


def small(number, text=b"x"):
    return {KEY: f"{number:04d}", "txt": text}


@given(dataset=datasets, compression=st.sampled_from(["none", "zst", "gz", "auto"]), block_bytes=st.integers(1, 5000))
def test_what_is_written_is_read_back_in_order_and_once(tmp_path_factory, dataset, compression, block_bytes):
    folder = tmp_path_factory.mktemp("round") / "trip"
    samples = [{KEY: key, **members} for key, members in dataset.items()]
    manifest = write(folder, samples, shard_bytes=200_000 * 7, compression=compression, block_bytes=block_bytes)

    assert [sample for shard in read(folder) for sample in shard] == samples
    assert manifest == read_manifest(str(folder))
    assert manifest.num_samples == len(samples)


def test_a_small_shard_has_exactly_the_golden_bytes(tmp_path):
    """A change to these bytes changes every shard that is packed from now on."""
    write(tmp_path / "a", [{KEY: "0001", "txt": "hello"}])

    assert (tmp_path / "a/a-000000.tar").read_bytes() == GOLDEN


def test_a_small_dataset_has_the_pinned_checksum(tmp_path):
    samples = [
        {KEY: f"{'ä' * (i % 3)}{i:03d}", "jpg": bytes([i]) * (i * 37 % 1500), "cls": i % 10, "json": {"i": i}}
        for i in range(50)
    ] + [{KEY: "/".join(["long"] * 60), "txt": "a name that needs a PAX header"}]
    manifest = write(tmp_path / "pinned", samples)

    assert manifest.shards[0].sha256 == "546a6b36f4b062489b2d3f34387391217e0315fedf368d230715771cae55d9b2"
    assert (
        hashlib.sha256((tmp_path / "pinned/pinned-000000.tar").read_bytes()).hexdigest()
        == "546a6b36f4b062489b2d3f34387391217e0315fedf368d230715771cae55d9b2"
    )


def test_shards_never_exceed_their_bytes_and_are_filled(tmp_path):
    manifest = write(tmp_path / "a", map(small, range(10)), shard_bytes=SHARD_OF_THREE + 1023)

    assert [shard.samples for shard in manifest.shards] == [3, 3, 3, 1]
    assert [(tmp_path / "a" / s.url).stat().st_size for s in manifest.shards] == [4096, 4096, 4096, 2048]


def test_shards_never_have_more_samples_than_asked_for(tmp_path):
    manifest = write(tmp_path / "a", map(small, range(7)), shard_samples=2)

    assert [shard.samples for shard in manifest.shards] == [2, 2, 2, 1]


def test_a_sample_larger_than_a_shard_is_an_error_and_the_writer_goes_on(tmp_path):
    with ShardWriter(tmp_path / "a", shard_bytes=SHARD_OF_THREE) as writer:
        writer.write(small(0))
        with pytest.raises(SampleError, match=r"sample '0001': takes 4,608 bytes .* more than shard_bytes=4,096; pass"):
            writer.write(small(1, b"x" * 2561))
        writer.write(small(2, b"x" * 2560))

    assert [s[KEY] for shard in read(tmp_path / "a") for s in shard] == ["0000", "0002"]


BAD_KEYS = {
    "": "is empty",
    "a.b": "has a dot in its last part",
    "a//b": "has an empty part",
    "/a": "has an empty part",
    "a/": "has an empty part",
    "../a": "'.' or '..'",
    "./a": "'.' or '..'",
    "__a__": "like __x__",
    "__a__/b": "like __x__",
    "__a": "like __x__",
    "a\nb": "control",
    "a\0": "control",
    "a\udcff": "control or unpaired surrogate",
    "x" * 4097: "longer than 4,096 bytes",
    7: "is int, expected text",
    None: "is NoneType, expected text",
}
BAD_FIELDS = {
    "": "must be dot-separated components",
    "_x": "starts with '_'",
    "JPG": "is not lower case; readers would rename it to 'jpg'",
    "a..b": "must be dot-separated components",
    ".a": "must be dot-separated components",
    "a.": "must be dot-separated components",
    "a b": "must be dot-separated components",
    "a/b": "must be dot-separated components",
    "a;b": "must be dot-separated components",
    "a?": "must be dot-separated components",
    "a:b": "must be dot-separated components",
    "a\x7f": "must be dot-separated components",
    7: "is int, expected text",
}


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_key_that_readers_would_change_is_refused_and_the_writer_goes_on(tmp_path, key):
    with ShardWriter(tmp_path / "a") as writer:
        with pytest.raises(SampleError, match=BAD_KEYS[key]):
            writer.write({KEY: key, "txt": "x"})
        writer.write(small(0))

    assert read(tmp_path / "a") == [[small(0)]]


@pytest.mark.parametrize("field", BAD_FIELDS)
def test_a_field_that_readers_would_change_is_refused_and_the_writer_goes_on(tmp_path, field):
    with ShardWriter(tmp_path / "a") as writer:
        with pytest.raises(SampleError, match=BAD_FIELDS[field]):
            writer.write({KEY: "bad", field: "x", "txt": "x"})
        writer.write(small(0))

    assert read(tmp_path / "a") == [[small(0)]]


def test_a_sample_without_fields_or_with_a_value_that_has_no_bytes_is_refused(tmp_path):
    with ShardWriter(tmp_path / "a", columns={"n": lambda sample: 1 / len(sample["txt"])}) as writer:
        with pytest.raises(SampleError, match="sample 'a': has no fields"):
            writer.write({KEY: "a", URL: "elsewhere.tar"})
        with pytest.raises(CodecError, match="sample 'a'"):
            writer.write({KEY: "a", "json": object()})
        with pytest.raises(CodecError, match=r"sample 'a': column 'n' cannot be computed \(ZeroDivisionError"):
            writer.write({KEY: "a", "txt": ""})
        writer.write(small(0))

    assert read(tmp_path / "a") == [[small(0)]]


def test_a_key_that_is_in_the_shard_already_is_refused_at_once_and_the_writer_goes_on(tmp_path):
    with ShardWriter(tmp_path / "a", block_bytes=1) as writer:
        writer.write(small(0))
        writer.write(small(1))
        with pytest.raises(SampleError, match="sample '0000': its key was written before"):
            writer.write(small(0))
        writer.write(small(2))

    assert [s[KEY] for shard in read(tmp_path / "a") for s in shard] == ["0000", "0001", "0002"]


def test_a_key_that_is_in_another_shard_is_an_error_before_the_dataset_is_published(tmp_path):
    with pytest.raises(SampleError, match="sample '0000': its key occurs more than once"):
        write(tmp_path / "a", map(small, [0, 1, 0]), shard_samples=1, block_bytes=1)

    with pytest.raises(UnfinishedDatasetError):
        read_manifest(str(tmp_path / "a"))


def test_different_keys_with_the_same_hash_are_not_duplicates(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "hash_key", lambda _: 7)
    manifest = write(tmp_path / "a", map(small, range(10)), shard_samples=3)

    assert manifest.num_samples == 10
    with pytest.raises(SampleError, match="sample '0003': its key occurs more than once"):
        write(tmp_path / "b", map(small, [0, 1, 2, 3, 4, 5, 6, 3]), shard_samples=3, block_bytes=1)


def test_after_an_exception_there_is_no_dataset_and_whoever_opens_it_is_told(tmp_path):
    samples = ({KEY: f"{number}", "txt": "x" * (10 // (5 - number))} for number in range(9))
    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "a", samples, shard_samples=2, block_bytes=1)

    assert names_in(tmp_path / "a") == [
        *["__index__/a-000000.*.parquet", "__index__/a-000001.*.parquet"],
        *["a-000000.tar", "a-000001.tar", "unfinished.json"],
    ]
    for open_it in (read_manifest, find_shards):
        with pytest.raises(UnfinishedDatasetError, match="is unfinished"):
            open_it(str(tmp_path / "a"))


@pytest.mark.parametrize("fail_at", range(1, 8))
def test_a_disk_that_fails_leaves_no_incomplete_shard_and_no_dataset_even_if_the_error_is_held_back(
    tmp_path, monkeypatch, fail_at
):
    """Let the n-th write to a file fail once; all other writes succeed."""
    create = LocalStorage.create
    writes = iter(range(1, 1000))

    class FailingFile(io.BytesIO):
        def __init__(self, file):
            self._file = file
            self.tell = file.tell

        def write(self, data):
            if next(writes) == fail_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self._file.write(data)

    @contextmanager
    def create_failing(self, url, *, overwrite=False):
        with create(self, url, overwrite=overwrite) as file:
            yield FailingFile(file) if url.endswith(".tar") else file

    writer = ShardWriter(tmp_path / "a", shard_samples=3, block_bytes=1, compression="none")
    monkeypatch.setattr(LocalStorage, "create", create_failing)
    errors = []
    try:
        with writer:
            for number in range(9):
                try:
                    writer.write(small(number))
                except (OSError, DatasetError) as error:
                    errors.append(error)
    except (OSError, DatasetError) as error:
        errors.append(error)

    assert any(isinstance(error, OSError) for error in errors)
    assert not (tmp_path / "a/manifest.json").exists()
    assert not temporary_files(tmp_path / "a")
    for shard in (tmp_path / "a").glob("*.tar"):
        assert len(list(read_shard(ShardLocation(str(shard))))) == 3


def test_a_closed_writer_writes_no_more(tmp_path):
    with ShardWriter(tmp_path / "a") as writer:
        writer.write(small(0))

    with pytest.raises(DatasetError, match="its writer is closed"):
        writer.write(small(1))
    assert read(tmp_path / "a") == [[small(0)]]


def test_no_samples_are_a_dataset_without_shards(tmp_path):
    manifest = write(tmp_path / "a", [])

    assert (manifest.shards, manifest.num_samples) == ((), 0)
    assert read_manifest(str(tmp_path / "a")) == manifest


def test_a_dataset_in_the_way_is_refused_and_replaced_only_on_demand(tmp_path):
    write(tmp_path / "a", map(small, range(6)), shard_samples=1)
    (tmp_path / "a/notes.txt").write_text("mine")
    before = [(p, p.stat().st_mtime_ns) for p in files_of(tmp_path / "a")]

    with pytest.raises(DatasetExistsError, match=r"holds a dataset already .* replace it with overwrite=True"):
        ShardWriter(tmp_path / "a")
    assert [(p, p.stat().st_mtime_ns) for p in files_of(tmp_path / "a")] == before
    write(tmp_path / "a", [small(9)], overwrite=True, compression="zst")
    assert names_in(tmp_path / "a") == [
        *["__index__/a-000000.*.parquet", "__index__/blocks.*.npy", "__index__/manifest-*.json"],
        *["a-000000.tar.zst", "manifest.json", "notes.txt"],
    ]
    assert read(tmp_path / "a") == [[small(9)]]


@pytest.mark.parametrize(
    "name",
    [
        *["a-000000.tar", "a-000007.tar.zst", "a-000000.parquet", "unfinished.json"],
        *["__index__/a-000000.0123456789abcdef.parquet", "__index__/blocks.0123456789abcdef.npy"],
    ],
)
def test_parts_of_a_dataset_are_in_the_way_too(tmp_path, name):
    (tmp_path / "a/__index__").mkdir(parents=True)
    (tmp_path / "a" / name).write_bytes(b"")

    with pytest.raises(
        DatasetExistsError, match=r"holds (an unfinished dataset|shards that no manifest lists) already"
    ):
        ShardWriter(tmp_path / "a")


@pytest.mark.parametrize("name", ["train.tar", "train.tar/", "a/Train.TAR.ZST", "x.tgz", "s3://bucket/train.tar.gz"])
def test_a_destination_that_is_named_as_a_shard_is_refused(name, tmp_path):
    destination = name if "://" in name else f"{tmp_path}/{name}"
    folder = destination.rstrip("/").partition(".t")[0].partition(".T")[0]
    for write in (ShardWriter, lambda destination: pack([small(1)], destination)):
        with pytest.raises(
            ArgumentError, match=r"is named like a shard, but a dataset is a folder of shards; name"
        ) as error:
            write(destination)
        assert str(error.value).endswith(f"like '{folder}'")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["/", ".", "..", "a/.."])
def test_a_destination_without_a_name_is_refused(name):
    with pytest.raises(ArgumentError, match="has no name that can be used for shards"):
        ShardWriter(name)


@pytest.mark.parametrize(
    "options", [{"shard_samples": 0}, {"shard_bytes": 0}, {"block_bytes": "x"}, {"compression": "rar"}]
)
def test_wrong_arguments_are_refused_before_anything_is_made(tmp_path, options):
    with pytest.raises(ArgumentError):
        ShardWriter(tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()


def test_columns_classes_and_fields_are_known_afterwards(tmp_path):
    columns = {"label": "cls", "length": lambda sample: len(sample["txt"]), "none": lambda _: None, "last": "id"}
    samples = [{KEY: f"{i}", "txt": "x" * i, "cls": i % 2} | ({"id": 7} if i == 4 else {}) for i in range(5)]
    manifest = write(tmp_path / "a", samples, shard_samples=2, columns=columns, classes=("even", "odd"))

    assert dict(manifest.columns) == {"label": "int64", "length": "int64", "none": "null", "last": "int64"}
    assert manifest.classes == ("even", "odd")
    assert manifest.fields == ("cls", "id", "txt")


def test_a_column_of_a_field_that_no_sample_has_is_an_error_and_there_is_no_dataset(tmp_path):
    with pytest.raises(ArgumentError, match=r"'label' names the field 'clss', which no sample has \(there are txt\)"):
        write(tmp_path / "a", map(small, range(5)), shard_samples=2, columns={"label": "clss"})
    with pytest.raises(UnfinishedDatasetError):
        read_manifest(tmp_path / "a")

    assert write(tmp_path / "b", [], columns={"label": "clss"}).num_samples == 0


def test_a_column_has_one_type_in_all_shards(tmp_path):
    def mixed(sample):
        return 1 if sample[KEY] < "0001" else "text"

    with pytest.raises(ArgumentError, match=r"column 'mixed': is string in a-000001.tar and int64 before it"):
        write(tmp_path / "a", map(small, range(2)), shard_samples=1, columns={"mixed": mixed})
    with pytest.raises(ArgumentError, match="column 'mixed': its values have no common type"):
        write(tmp_path / "b", map(small, range(2)), columns={"mixed": mixed})


def test_samples_that_were_read_can_be_written_again(tmp_path):
    first = write(tmp_path / "a", map(small, range(5)))
    again = [sample for location in find_shards(first.url) for sample in read_shard(location)]
    second = write(tmp_path / "b", again)

    assert second.shards[0].sha256 == first.shards[0].sha256


def test_a_shard_is_a_plain_tar_for_others(tmp_path):
    write(tmp_path / "a", [{KEY: "ä/0001", "txt": "hello", "cls": 7}])

    with tarfile.open(tmp_path / "a/a-000000.tar") as archive:
        assert archive.getnames() == ["ä/0001.cls", "ä/0001.txt"]
        assert archive.extractfile("ä/0001.cls").read() == b"7"
        assert {(m.mode, m.uid, m.gid, m.mtime) for m in archive} == {(0o444, 0, 0, 0)}


def test_a_folder_may_be_named_by_url(tmp_path):
    manifest = write(f"file://{tmp_path}/a", [small(0)])

    assert Path(tmp_path / "a/manifest.json").exists()
    assert join(manifest.url, manifest.shards[0].url) == f"file://{tmp_path}/a/a-000000.tar"
