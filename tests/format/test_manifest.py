"""A manifest is read as it was written, or refused with the reason; it reaches nothing outside its folder."""

import hashlib
import io
import json
import tarfile
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import ArgumentError, DatasetError, UnfinishedDatasetError
from shardkit.format.manifest import (
    MANIFEST_NAME,
    UNFINISHED_NAME,
    Manifest,
    Shard,
    index_file_name,
    index_name,
    read_manifest,
    version_name,
)
from shardkit.format.parquet import FileFacts
from tests.support.forge import signed

SUFFIXES = {"none": ".tar", "zst": ".tar.zst", "gz": ".tar.gz"}
SIZES = st.integers(0, 1 << 58)  # their sum is a valid size, too
CRCS = st.integers(0, 2**32 - 1)
FILES = st.builds(FileFacts, SIZES, st.integers(0, 2**256 - 1).map(lambda n: f"{n:064x}"), SIZES, CRCS, CRCS)
GOLDEN = """
 "block_file": {
  "footer_crc32": 0,
  "footer_size": 0,
  "group_rows": 0,
  "sha256": "00000000000000000000000000000000000000000000000000000000000000bf",
  "size": 200
 },
 "block_samples": 16,
 "classes": [],
 "column_file": null,
 "columns": {},
 "digest": "6cce8d5d49f5fb4deb8d61ef19af418ddff037a3aa31fdbc67e73421fb6b85fd",
 "fields": [
  "cls",
  "jpg"
 ],
 "packed": {},
 "samples": 4,
 "shardkit_version": 2,
 "unique_keys": true,
 "wids_version": 1,
 "shardlist": [
  ENTRY 0,
  ENTRY 1
 ]
}
"""
GOLDEN_ENTRIES = (
    (
        '{"url": "train-000000.tar", "nsamples": 2, '
        '"filesize": 4096, "tarsize": 4096, '
        '"sha256": "0000000000000000000000000000000000000000000000000000000000000000", '
        '"compression": "none", "blocks": 1, "blocks_crc32": 8, '
        '"index": {"size": 2000, "sha256": "00000000000000000000000000000000000000000000000000000000000000a0", '
        '"footer_size": 900, "footer_crc32": 7, "group_rows": 4096}}'
    ),
    (
        '{"url": "train-000001.tar", "nsamples": 2, '
        '"filesize": 4096, "tarsize": 4096, '
        '"sha256": "0000000000000000000000000000000000000000000000000000000000000001", '
        '"compression": "none", "blocks": 1, "blocks_crc32": 8, '
        '"index": {"size": 2001, "sha256": "00000000000000000000000000000000000000000000000000000000000000a1", '
        '"footer_size": 900, "footer_crc32": 7, "group_rows": 4096}}'
    ),
)
GOLDEN_SHA256 = "0ec8bb5dfc84696d3567f39913647e20667a537d83abfd8bf44b437dec852195"


def shard(number=0, **changes):
    index = FileFacts(2000 + number, f"{0xA0 + number:064x}", 900, 7, 4096)
    values = {"samples": 2, "file_size": 4096, "tar_size": 4096, "compression": "none", "blocks": 1}
    values |= {"blocks_crc32": 8, "index": index}
    return Shard(**{"url": f"train-{number:06d}.tar", "sha256": f"{number:064x}", **values, **changes})


def manifest_of(*shards, **changes):
    values = {"block_samples": 16, "fields": ("cls", "jpg"), "block_file": FileFacts(200, f"{0xBF:064x}")}
    return Manifest(shards or (shard(0), shard(1)), **{**values, **changes})


def as_format_1(manifest):
    """Return a manifest in format 1, and its text."""
    shards = tuple(replace(shard, blocks_crc32=None, index=None) for shard in manifest.shards)
    data = json.loads(manifest.to_json())
    for name in ("crc32", "block_file", "column_file"):
        del data[name]
    for entry in data["shardlist"]:
        del entry["blocks_crc32"], entry["index"]
    data["shardkit_version"] = 1
    return replace(manifest, shards=shards, block_file=None, column_file=None, version=1), json.dumps(data)


def edited(change):
    """Return a manifest's text after a change, with its checksum corrected."""
    data = json.loads(manifest_of().to_json())
    del data["crc32"]
    change(data)
    return signed(json.dumps(data).encode())


@st.composite
def manifests(draw):
    shards = []
    for number in range(draw(st.integers(0, 4))):
        compression = draw(st.sampled_from(sorted(SUFFIXES)))
        sizes = {name: draw(SIZES) for name in ("samples", "file_size", "tar_size", "blocks")}
        name = draw(st.text("aä _%", max_size=5))
        url = f"{name}{number}{SUFFIXES[compression]}"
        sizes |= {"blocks_crc32": draw(CRCS), "index": draw(FILES)}
        shards.append(shard(draw(st.integers(0, 1 << 200)), url=url, compression=compression, **sizes))
    names = st.lists(st.text(max_size=4), max_size=3).map(tuple)
    packed = draw(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2))
    columns = draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))
    return Manifest(
        tuple(shards),
        draw(st.integers(1, 1024)),
        draw(names),
        draw(st.booleans()),
        draw(names),
        columns,
        packed,
        draw(FILES),
        draw(FILES) if columns else None,
    )


@given(manifest=manifests())
def test_a_manifest_is_read_as_it_was_written(manifest):
    again = Manifest.from_json(manifest.to_json())

    assert again == manifest
    assert (again.digest, again.to_json()) == (manifest.digest, manifest.to_json())


@given(manifest=manifests())
def test_a_manifest_of_format_1_is_read_for_ever(manifest):
    expected, text = as_format_1(manifest)
    again = Manifest.from_json(text)

    assert again == expected
    assert (again.version, again.digest) == (1, manifest.digest)
    assert [s.index_url for s in again.shards] == [index_name(s.url) for s in manifest.shards]


def test_the_bytes_of_a_manifest_are_these():
    text = manifest_of().to_json()

    golden = GOLDEN
    for number, entry in enumerate(GOLDEN_ENTRIES):
        golden = golden.replace(f"ENTRY {number}", entry)

    assert text[512:].rstrip("\n") + "\n" == golden
    assert len(text) % 512 == 0
    assert hashlib.sha256(text.encode()).hexdigest() == GOLDEN_SHA256


def test_who_opens_a_manifest_as_a_tar_finds_nothing_to_read():
    data = manifest_of().to_json().encode()
    header = tarfile.TarInfo.frombuf(data[:512], "utf-8", "strict")  # its checksum is correct

    assert (header.type, header.size) == (b"Z", len(data) - 512)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert [member.type for member in tar] == [b"Z"]


def test_a_flipped_bit_anywhere_in_a_manifest_is_an_error():
    text = manifest_of(columns={"label": "int64"}, column_file=FileFacts(7, "00" * 32, 5, 3, 1)).to_json().encode()

    for bit in range(8 * len(text)):
        damaged = bytearray(text)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DatasetError):
            Manifest.from_json(bytes(damaged))


@pytest.mark.parametrize("cut", [0, 1, 14, 100, -2])
def test_a_manifest_that_was_cut_or_grew_is_an_error(cut):
    text = manifest_of().to_json().encode()

    for damaged in (text[:cut], text[cut:], text + b" ", text + text[:cut]):
        if damaged != text:
            check_refused(damaged)


def test_the_first_line_and_the_version_belong_together():
    check_refused(json.dumps(json.loads(manifest_of().to_json())))  # the checksum is there, but in the wrong place
    data = json.loads(as_format_1(manifest_of())[1])
    check_refused(signed(json.dumps(data).encode()))


def test_text_that_would_become_far_larger_than_its_shards_need_is_refused_before_it_is_parsed(monkeypatch):
    monkeypatch.setattr(json, "loads", None)

    with pytest.raises(DatasetError, match=r"it has 1,000,00\d values, far more than its shards need"):
        Manifest.from_json(b"[" + b"[]," * 500_000 + b"[]]")


def test_a_manifest_has_a_line_a_shard_and_what_wids_reads():
    text = manifest_of().to_json()
    data = json.loads(text)

    assert data["wids_version"] == 1
    assert [(s["url"], s["nsamples"], s["filesize"]) for s in data["shardlist"]] == [
        ("train-000000.tar", 2, 4096),
        ("train-000001.tar", 2, 4096),
    ]
    assert sum('"url"' in line for line in text.splitlines()) == 2


def test_the_digest_is_what_the_readme_says():
    lines = f"shardkit dataset 1\ntrain-000000\t2\t{'0' * 64}\ntrain-000001\t2\t{'0' * 63}1\n"

    assert manifest_of().digest == hashlib.sha256(lines.encode()).hexdigest()


def test_the_digest_is_of_the_content_and_not_of_its_place_or_compression():
    digest = manifest_of().digest
    moved = [
        replace(s, url=f"below/{s.url}.zst", compression="zst", file_size=7, blocks=3) for s in manifest_of().shards
    ]

    assert manifest_of(*moved, block_samples=1, classes=("cat",), fields=()).digest == digest
    for other in ([shard(0)], [shard(1), shard(0)], [shard(0), shard(1, samples=3)], [shard(0), shard(1, url="x.tar")]):
        assert manifest_of(*other).digest != digest


@pytest.mark.parametrize("version", [0, 3, 9, "1", None])
def test_an_unknown_version_is_refused_by_its_name(version):
    message = f"of format version {version!r}, this shardkit reads versions 1 to 2; upgrade"
    with pytest.raises(DatasetError, match=message):
        Manifest.from_json(edited(lambda data: data.update(shardkit_version=version)))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["shardlist"].pop(),
        lambda data: data["shardlist"].reverse(),
        lambda data: data["shardlist"][0].update(sha256="00"),
        lambda data: data["shardlist"][0].update(nsamples=3),
        lambda data: data["shardlist"][0].update(url="train-000007.tar"),
        lambda data: data.update(samples=5),
    ],
    ids=["a shard less", "another order", "another checksum", "another number", "another name", "another sum"],
)
def test_what_was_edited_is_refused(change):
    with pytest.raises(DatasetError, match=r"photos/manifest\.json: does not match its own digest; it was edited"):
        Manifest.from_json(edited(change), url="photos")


def check_refused(text):
    with pytest.raises(
        DatasetError, match=r"manifest\.json: is not a manifest of shardkit .*; fetch it again, or make"
    ):
        Manifest.from_json(text)


@pytest.mark.parametrize("text", [b"", b"[]", b"7", b"null", b"{", b"\xff", b"[" * 100_000, b'{"shardkit_version": 1}'])
def test_what_is_no_manifest_is_refused(text):
    check_refused(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("url", 7), ("url", None), ("nsamples", "2"), ("nsamples", -2), ("nsamples", True), ("filesize", "9")],
        *[("filesize", -1), ("tarsize", 1.5), ("sha256", None), ("compression", 7), ("blocks", None)],
        *[("blocks", 2**70), ("filesize", 2**63), ("block_samples", 2**63)],
        *[("block_samples", 0), ("block_samples", "16"), ("fields", "jpg"), ("fields", [1]), ("classes", {})],
        *[("unique_keys", "no"), ("columns", []), ("columns", {"a": 1}), ("packed", 3), ("shardlist", 7)],
        *[("shardlist", [7]), ("shardlist", [{}])],
        *[("blocks_crc32", None), ("blocks_crc32", -1), ("blocks_crc32", "8"), ("index", None), ("index", 7)],
        *[("block_file", None), ("block_file", []), ("block_file", {}), ("column_file", {}), ("column_file", 7)],
        ("columns", {"label": "int64"}),  # without their file
    ],
)
def test_a_value_that_cannot_be_is_refused(name, value):
    def change(data):
        (data if name in data else data["shardlist"][0])[name] = value

    check_refused(edited(change))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("size", -1), ("size", None), ("size", 2**63), ("size", True), ("footer_size", 1.5), ("group_rows", "4")],
        *[("footer_crc32", -1), ("sha256", "../" * 21 + "a"), ("sha256", "AA" * 32), ("sha256", "00"), ("sha256", 7)],
        ("more", 1),
    ],
)
@pytest.mark.parametrize("file", ["block_file", "column_file", "index"])
def test_facts_of_a_file_that_cannot_be_are_refused(file, name, value):
    def change(data):
        data["columns"] = {"label": "int64"}
        data["column_file"] = dict(data["block_file"])
        (data if file in data else data["shardlist"][0])[file][name] = value

    check_refused(edited(change))


def test_what_is_not_known_is_ignored():
    assert Manifest.from_json(edited(lambda data: data.update(later={"and": "more"}))) == manifest_of()


@pytest.mark.parametrize(
    "url",
    [
        *["/etc/passwd", "../x.tar", "a/../../x.tar", "..", "", "-", "-x.tar", "//host/x.tar"],
        *["http://host/x.tar", "file:///x.tar", "s3://b/x.tar", "pipe:cat x.tar", "C:\\x.tar", "..\\x.tar", "\\x.tar"],
    ],
)
def test_a_shard_outside_the_folder_is_refused_unless_it_is_allowed(url):
    text = manifest_of(shard(url=url)).to_json()

    with pytest.raises(DatasetError, match="is outside its folder; if you trust who wrote it, pass allow_any_url=True"):
        Manifest.from_json(text)
    assert Manifest.from_json(text, allow_any_url=True).shards[0].url == url


def test_an_index_is_named_after_its_shard_and_what_is_in_it():
    names = ["train-0.tar", "a/b.tar.zst", "a.b.TAR.GZ", "x.tgz", "../x.tar", "/store/x.tar", "https://h/a/x.tar"]
    manifest = manifest_of(*(shard(url=name) for name in names))

    assert [s.index_url for s in manifest.shards] == [index_file_name(name, f"{0xA0:064x}") for name in names]
    assert [index_file_name(name, "0123456789abcdef" * 4) for name in names] == [
        f"__index__/{stem}.0123456789abcdef.parquet" for stem in ("train-0", "b", "a.b", "x", "x", "x", "x")
    ]
    assert manifest.block_file_url == "__index__/blocks.0000000000000000.npy"
    assert manifest.column_file_url == ""


def test_an_index_of_format_1_lies_beside_its_shard_or_with_the_manifest():
    names = ["train-0.tar", "a/b.tar.zst", "a.b.TAR.GZ", "x.tgz", "../x.tar", "/store/x.tar", "https://h/a/x.tar"]

    assert [index_name(name) for name in names] == [
        *["train-0.parquet", "a/b.parquet", "a.b.parquet", "x.parquet", "x.parquet", "x.parquet", "x.parquet"],
    ]


def test_a_folder_is_a_dataset_only_with_its_manifest_and_when_it_is_finished(tmp_path):
    with pytest.raises(DatasetError, match=r"has no manifest\.json, so it is not a dataset"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).write_text(manifest_of().to_json())
    assert read_manifest(tmp_path) == read_manifest(tmp_path / MANIFEST_NAME) == manifest_of()
    assert read_manifest(tmp_path).url == str(tmp_path)
    (tmp_path / UNFINISHED_NAME).touch()
    with pytest.raises(UnfinishedDatasetError, match="is unfinished: it is being written, or its pack was stopped"):
        read_manifest(tmp_path)


def test_a_dataset_is_opened_by_its_digest_also_when_a_newer_one_has_taken_its_place(tmp_path):
    old, new = manifest_of(), manifest_of(shard(2))
    (tmp_path / "__index__").mkdir()
    (tmp_path / MANIFEST_NAME).write_text(new.to_json())

    assert read_manifest(tmp_path, digest=new.digest) == new
    with pytest.raises(DatasetError, match=f"is the dataset {new.digest}, expected {old.digest}; it was replaced, or"):
        read_manifest(tmp_path, digest=old.digest)
    (tmp_path / version_name(old.digest)).write_text(new.to_json())
    with pytest.raises(DatasetError, match=f"is the dataset {new.digest}, expected {old.digest}"):
        read_manifest(tmp_path, digest=old.digest)
    (tmp_path / version_name(old.digest)).write_text(old.to_json())
    assert read_manifest(tmp_path, digest=old.digest) == old
    assert read_manifest(tmp_path) == new


@pytest.mark.parametrize("digest", ["", "00", "0" * 63 + "g", "../" * 21 + "a", "AB" * 32, 7, b"00" * 32])
def test_what_is_no_digest_is_an_argument_error(digest, tmp_path):
    with pytest.raises(ArgumentError, match="expected the 64 hexadecimal digits"):
        read_manifest(tmp_path, digest=digest)
