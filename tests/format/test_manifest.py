"""A manifest is read as it was written, or refused with what is wrong; it reaches nothing outside its folder."""

import hashlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import DatasetError, UnfinishedDatasetError
from shardkit.format.manifest import MANIFEST_NAME, UNFINISHED_NAME, Manifest, Shard, index_name, read_manifest

SUFFIXES = {"none": ".tar", "zst": ".tar.zst", "gz": ".tar.gz"}
SIZES = st.integers(0, 1 << 60)


def shard(number=0, **changes):
    values = {"samples": 2, "file_size": 4096, "tar_size": 4096, "compression": "none", "blocks": 1}
    return Shard(**{"url": f"train-{number:06d}.tar", "sha256": f"{number:064x}", **values, **changes})


def manifest_of(*shards, **changes):
    return Manifest(shards or (shard(0), shard(1)), **{"block_samples": 16, "fields": ("cls", "jpg"), **changes})


def edited(change):
    """Return a manifest's text after somebody changed it."""
    data = json.loads(manifest_of().to_json())
    change(data)
    return json.dumps(data)


@st.composite
def manifests(draw):
    shards = []
    for number in range(draw(st.integers(0, 4))):
        compression = draw(st.sampled_from(sorted(SUFFIXES)))
        sizes = {name: draw(SIZES) for name in ("samples", "file_size", "tar_size", "blocks")}
        name = draw(st.text("aä _%", max_size=5))
        url = f"{name}{number}{SUFFIXES[compression]}"
        shards.append(shard(draw(st.integers(0, 1 << 200)), url=url, compression=compression, **sizes))
    names = st.lists(st.text(max_size=4), max_size=3).map(tuple)
    packed = draw(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2))
    return Manifest(
        tuple(shards), draw(st.integers(1, 1024)), draw(names), draw(st.booleans()), draw(names), {}, packed
    )


@given(manifest=manifests())
def test_a_manifest_is_read_as_it_was_written(manifest):
    again = Manifest.from_json(manifest.to_json())

    assert again == manifest
    assert (again.digest, again.to_json()) == (manifest.digest, manifest.to_json())


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


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_an_unknown_version_is_refused_by_its_name(version):
    with pytest.raises(DatasetError, match=f"of format version {version!r}, this shardkit reads version 1; upgrade"):
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
    ],
)
def test_a_value_that_cannot_be_is_refused(name, value):
    def change(data):
        (data if name in data else data["shardlist"][0])[name] = value

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


def test_an_index_lies_beside_its_shard_or_with_the_manifest():
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
    with pytest.raises(UnfinishedDatasetError, match="is unfinished: it is being written, or its writer was stopped"):
        read_manifest(tmp_path)
