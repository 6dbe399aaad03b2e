"""However a file other than a shard is damaged, every reader gives the right samples or an error of shardkit.

One search covers all damage of up to 16 bytes: in the manifest, the indexes and the side files, including their footers
and page headers. It uses all readers. The same search over a dataset of format 1, which has no such checksums, finds
damage that no reader notices; this shows that the search can find some.
"""

import shutil
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import shardkit
from shardkit.errors import ShardkitError
from shardkit.inspection.contents import compute_statistics, list_samples, list_shards, read_member
from tests.support.shared import examples

GOLDEN = Path(__file__).parents[1] / "data" / "format-1"
CLASSES = ("cat", "dog", "hen", "pig", "yak")
COUNT = 60


def key_of(sample):
    return sample["__key__"]


def by_stream(folder):
    return [dict(s, __url__="") for s in shardkit.ShardStream(folder, shuffle=False)]


def by_number(folder):
    dataset = shardkit.ShardDataset(folder, columns=("half", "label"))
    return [dict(dataset[i], __url__="") for i in range(len(dataset))], dataset.classes, dataset.digest


def by_loader(folder):
    loader = shardkit.ShardLoader(shardkit.ShardDataset(folder, fields=("cls", "txt?")), 16, num_workers=1)
    return [(batch["__key__"], batch["cls"].tolist(), batch["txt"]) for batch in loader]


def where(condition):
    def read(folder):
        return [s["__key__"] for s in shardkit.ShardDataset(folder, fields=("cls",), where=condition)]

    return read


def by_key(folder):
    return shardkit.ShardDataset(folder, fields=("txt",)).by_key("0009")["txt"]


def by_source(folder):
    return [dict(s, __url__="") for s in shardkit.ShardSource(folder)], shardkit.ShardSource(folder).classes


def by_listing(folder):
    figures = asdict(compute_statistics(folder)) | {"after": None}  # the size on the disk has changed
    shards = [(shard["samples"], shard["bytes"], shard["indexed"]) for shard in list_shards(folder)]
    return [(s.key, s.fields) for s in list_samples(folder)], shards, figures


def by_member(folder):
    return read_member(folder, "0041", "txt")


def by_manifest(folder):
    manifest = shardkit.read_manifest(folder)
    return manifest.classes, manifest.columns, manifest.fields, manifest.unique_keys, manifest.packed, manifest.digest


READERS = {
    "stream": by_stream,
    "number": by_number,
    "loader": by_loader,
    "where column": where([("label", "==", 1)]),
    "where two columns": where([("label", "in", [1, 2]), ("half", ">", 3.0)]),
    "where key": where([("__key__", "<", "0020")]),
    "where size": where([("txt:size", ">", 12)]),
    "by key": by_key,
    "source": by_source,
    "listing": by_listing,
    "member": by_member,
    "manifest": by_manifest,
}


def samples():
    for i in range(COUNT):
        text = {"txt": f"text {i} " * (i % 4)} if i % 7 else {}
        yield {"__key__": f"{i:04d}", "cls": i % 5, "bin": bytes([i]) * i, **text}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage") / "train"
    with shardkit.ShardWriter(
        folder, shard_samples=25, block_bytes=20_000, compression="none", classes=CLASSES,
        columns={"label": "cls", "half": lambda s: s["cls"] * 2.5, "word": lambda s: "w" * s["cls"]},
    ) as writer:  # fmt: skip
        for sample in samples():
            writer.write(sample)
    return folder


@pytest.fixture(scope="module")
def expected(original):
    return {name: read(str(original)) for name, read in READERS.items()}


def files_of(folder):
    """Return all files of a dataset except shards, the card, and the manifest's copy, which no reader here uses."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return [name for name in names if not name.endswith((".tar", ".yaml")) and "manifest-" not in name]


HOWS = ["flip", "delete", "insert", "zero", "random", "repeat"]
damages = st.tuples(
    st.integers(0, 1 << 30),  # which file
    st.sampled_from(["anywhere", "begin", "end"]),
    st.integers(0, 1 << 30),  # where in it
    st.sampled_from(HOWS),
    st.integers(1, 16),
    st.integers(0, 255),
    st.integers(0, 1 << 30),  # the seed of random bytes
)


def damaged(data, where, at, how, count, value, seed):
    """Return a file's bytes with one damage of up to 16 bytes."""
    at %= len(data) if where == "anywhere" else min(len(data), 600)
    at = len(data) - 1 - at if where == "end" else at
    before, hit, after = data[:at], data[at : at + count], data[at + count :]
    new = {
        "flip": bytes(byte ^ (1 << value % 8) for byte in hit),
        "delete": b"",
        "insert": hit + bytes([value]) * count,
        "zero": bytes(len(hit)),
        "random": Random(seed).randbytes(len(hit)),
        "repeat": hit + hit,
    }[how]
    return before + new + after


def find_silent(folder, readers, expected):
    """Return the results of readers that are neither right nor an error of shardkit."""
    silent = {}
    for name, read in readers.items():
        try:
            found = read(str(folder))
        except ShardkitError:
            continue
        if found != expected[name]:
            silent[name] = found
    return silent


def copy_with_damage(original, damage, tmp_path_factory):
    """Return a copy of a dataset with damage in one file, the file's name, and its bytes before and after."""
    names = files_of(original)
    name = names[damage[0] % len(names)]
    data = (original / name).read_bytes()
    wrong = damaged(data, *damage[1:])
    copy = tmp_path_factory.mktemp("copy") / "train"
    shutil.copytree(original, copy)
    (copy / name).chmod(0o644)
    (copy / name).write_bytes(wrong)
    return copy, name, data, wrong


@examples(2)
@given(damage=damages)
def test_damage_beside_the_shards_gives_the_right_samples_or_an_error(damage, original, expected, tmp_path_factory):
    copy, name, data, wrong = copy_with_damage(original, damage, tmp_path_factory)
    event(f"{name}, {damage[1]}")

    assert find_silent(copy, READERS, expected) == {}
    if wrong != data:
        assert not shardkit.verify(str(copy)).ok
    shutil.rmtree(copy.parent)


def by_values(folder):
    dataset = shardkit.ShardDataset(folder, decode=False, columns=("label", "weight"))
    return [dict(dataset[i], __url__="") for i in range(len(dataset))]


def by_raw_loader(folder):
    loader = shardkit.ShardLoader(shardkit.ShardDataset(folder, decode=False, fields=("cls",)), 8, num_workers=1)
    return [(batch["__key__"], batch["cls"]) for batch in loader]


OLD_SAMPLES = {
    "stream": lambda folder: [dict(s, __url__="") for s in shardkit.ShardStream(folder, shuffle=False, decode=False)],
    "number": by_values,
    "loader": by_raw_loader,
    "where column": where([("label", "==", 1)]),
}
"""The parts of format 1 without checksums of their own: rows and fields are counted."""
OLD_WORDS = {"manifest": by_manifest}
"""The parts of format 1 that nothing protects, as ``verify`` says."""


@given(damage=damages)
def test_damage_to_format_1_loses_no_sample(damage, tmp_path_factory):
    original = GOLDEN / "photos" / "train"
    expected = {name: read(str(original)) for name, read in OLD_SAMPLES.items()}
    copy, name, _, _ = copy_with_damage(original, damage, tmp_path_factory)
    event(f"{name}, {damage[1]}")

    assert find_silent(copy, OLD_SAMPLES, expected) == {}


def test_the_search_finds_damage_where_there_are_no_checksums(tmp_path_factory):
    """In format 1, nothing protects class names and the record of packing, and the search notices that."""
    original = GOLDEN / "photos" / "train"
    expected = {name: read(str(original)) for name, read in OLD_WORDS.items()}
    silent = 0
    random = Random(0)
    for _ in range(300):
        at, how, count = random.randrange(1 << 30), random.choice(HOWS), random.randint(1, 16)
        damage = (0, "anywhere", at, how, count, 3, random.random())
        copy, *_ = copy_with_damage(original, damage, tmp_path_factory)
        silent += bool(find_silent(copy, OLD_WORDS, expected))
        shutil.rmtree(copy.parent)

    assert silent > 0
