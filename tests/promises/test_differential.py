"""Archives for every rule of webdataset, read by webdataset and by shardkit: the same result, or a named deviation.

The archives are generated, and the result of each reader is pinned. The names of the deviations are those in the
docstring of ``shardkit.webdataset``. The last tests show the defects of webdataset's own reader and writer, and what
shardkit does instead: if webdataset fixes one, its test here fails.
"""

import bz2
import gzip
import io
import lzma
import re
import sys
import tarfile
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st

import shardkit.webdataset
from shardkit.codecs.compress import compress_frame
from shardkit.errors import SampleError, ShardError
from shardkit.format.tar import END_OF_ARCHIVE, member_size
from shardkit.loading.stream import ShardStream
from shardkit.packing.writer import ShardWriter
from shardkit.sample import KEY, URL

pytestmark = [
    # A stream warns that shards have no index.
    pytest.mark.filterwarnings("ignore::shardkit.loading.stream.StreamWarning"),
    # webdataset never closes the shards that it opens.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]

GNU, PAX, USTAR = tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT
KNOWS_ZST = sys.version_info >= (3, 14)  # Python's tarfile, and so webdataset


# --- archives


def info(name, size=0, kind=tarfile.REGTYPE, **attributes):
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    for attribute, value in attributes.items():
        setattr(member, attribute, value)
    return member


def archive(*members, form=USTAR, records=None):
    """Return a tar of entries: names, which are also the data; pairs (name, data); and TarInfos."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form, pax_headers=records) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member, io.BytesIO(bytes(member.size)))
            else:
                name, data = (
                    (member, f"data of {member}".encode(errors="replace")) if isinstance(member, str) else member
                )
                tar.addfile(info(name, len(data)), io.BytesIO(data))
    return file.getvalue()


def patched(data, at, change):
    """Return an archive with a part of its first header changed, and with a matching checksum."""
    header = bytearray(data[:512])
    header[at : at + len(change)] = change
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + data[512:]


# --- the result of each reader


def read_out(samples):
    """Return samples as text, ``key: fields`` each, and ``!`` if an error ends them; the samples; the error's type."""
    whole, error = [], None
    try:
        whole.extend(samples)  # the samples before the error
    except Exception as raised:  # noqa: BLE001 - webdataset raises whatever happens to it
        error = type(raised)
        traceback.clear_frames(raised.__traceback__)  # its frames keep webdataset's file open after the test
    texts = [f"{s[KEY]}: {' '.join(field for field in s if field not in (KEY, URL))}" for s in whole]
    return " | ".join(texts + ["!"] * (error is not None)), whole, error


def by_webdataset(urls, **options):
    dataset = wds.WebDataset(urls, shardshuffle=False, empty_check=False, **options)
    return read_out({k: v for k, v in sample.items() if k != "__local_path__"} for sample in dataset)


def by_shardkit(urls):
    return read_out(ShardStream(urls, decode=False, shuffle=False))


class Row(NamedTuple):
    """An archive (or several, one after the other), and the results of the readers."""

    name: str
    shards: list[bytes]
    webdataset: str
    shardkit: str
    deviation: str = ""


def same(name, answer, *shards):
    return Row(name, list(shards), answer, answer)


def differs(name, deviation, webdataset, shardkit, *shards):
    return Row(name, list(shards), webdataset, shardkit, deviation)


DOT_FILES = "files whose names begin with a dot are skipped in every folder, not only at the top"
META = "files named ``__x__``, and files in folders of such names, are skipped in every folder, not only at the top"
NEWLINE = "a newline in a name is a character like any other"
BAD = "``__bad__`` and ``__local_path__`` are fields like any other"
SOURCE = "a field ``__source__`` is an error, because shardkit keeps the name for itself"
NO_END = "an archive without its end-of-archive mark is an error"
TRAILING = "anything but zeros after the end-of-archive mark is an error, a second archive too"
HEADER = "a damaged or cut header is an error, not the end of the shard"
CUT = "compressed data that is cut, or followed by something else, is an error"
PARTS = "all parts of a gz, bz2 or xz file are read, not only the first (pigz, pbzip2 and bgzip write many)"
ZST = "zst is read, also before Python 3.14"
LZMA = "the format that lzma wrote before xz is not read"
KINDS = "sparse members, parts of multi-volume archives and members of unknown types are errors"
NEGATIVE = "a negative size is an error"
CLASSES = "class numbers of several of shardkit's datasets with different class lists are those of one list, by name"

AB, CD = archive("a.jpg", "b.jpg"), archive("c.jpg", "d.jpg")
A_B, C_D = "a: jpg | b: jpg", "c: jpg | d: jpg"
LONG = "n" * 120
VERY_LONG = "/".join(["ä" * 100] * 5)
NESTED = "/".join(["d" * 40] * 4)  # ustar stores it with a prefix

ROWS = [
    # Formats.
    *(
        row
        for form, name in ((USTAR, "ustar"), (GNU, "GNU"), (PAX, "PAX"))
        for row in (
            same(f"{name}, plain", "a: jpg txt | b: jpg", archive("a.jpg", "a.txt", "b.jpg", form=form)),
            same(f"{name}, unicode", "ä/ü: jpg", archive("ä/ü.jpg", form=form)),
            same(f"{name}, not UTF-8", "\udce4: jpg", archive("\udce4.jpg", form=form)),
            same(f"{name}, nested", "d/e/a: jpg | d/f/a: jpg", archive("d/e/a.jpg", "d/f/a.jpg", form=form)),
            same(f"{name}, 165 characters of folders", f"{NESTED}/a: jpg", archive(f"{NESTED}/a.jpg", form=form)),
            same(f"{name}, empty members", "a: jpg txt", archive(("a.jpg", b""), ("a.txt", b""), form=form)),
        )
    ),
    *(
        row
        for form, name in ((GNU, "GNU"), (PAX, "PAX"))
        for row in (
            same(f"{name}, long", f"{LONG}: jpg | a: jpg", archive(f"{LONG}.jpg", "a.jpg", form=form)),
            same(f"{name}, very long", f"{VERY_LONG}: jpg", archive(f"{VERY_LONG}.jpg", form=form)),
        )
    ),
    same("PAX, a time with fractions", "a: jpg", archive(info("a.jpg", 3, mtime=1.5), form=PAX)),
    same("PAX, a size", "a: jpg", archive(info("a.jpg", 3, pax_headers={"size": "3"}), form=PAX)),
    same("PAX, a global comment", "a: jpg", archive("a.jpg", form=PAX, records={"comment": "x"})),
    same("PAX, one name for all", "!", archive("a.jpg", "b.jpg", form=PAX, records={"path": "z.jpg"})),
    same("a size in base 256", "a: jpg", patched(archive(("a.jpg", b"abc")), 124, b"\x80" + bytes(10) + b"\3")),
    differs("a negative size", NEGATIVE, "a: jpg", "!", patched(archive("a.jpg"), 124, b"\xff" * 12)),
    # Types of members.
    same("type NUL, of v7", A_B, patched(AB, 156, b"\0")),
    same("type 7, contiguous", "a: jpg", archive(info("a.jpg", 3, tarfile.CONTTYPE))),
    same("a directory", "d.x/a: jpg", archive(info("d.x", kind=tarfile.DIRTYPE), "d.x/a.jpg")),
    same("a symbolic link", "a: jpg", archive("a.jpg", info("a.txt", kind=tarfile.SYMTYPE, linkname="a.jpg"))),
    same("a hard link", "a: jpg", archive("a.jpg", info("a.txt", kind=tarfile.LNKTYPE, linkname="a.jpg"))),
    same("a FIFO", "a: jpg", archive("a.jpg", info("a.txt", kind=tarfile.FIFOTYPE))),
    same("devices", "a: jpg", archive(info("a.x", kind=tarfile.CHRTYPE), info("a.y", kind=tarfile.BLKTYPE), "a.jpg")),
    same("a volume label", "a: jpg", archive(info("my.disk", kind=b"V"), "a.jpg")),
    same("only links", "", archive(info("a.txt", kind=tarfile.SYMTYPE, linkname="a.jpg"))),
    differs("a sparse file", KINDS, A_B, "!", archive(info("a.jpg", 512, tarfile.GNUTYPE_SPARSE), "b.jpg")),
    differs("a part of a volume", KINDS, "b: jpg", "!", patched(AB, 156, b"M")),
    differs("an unknown type", KINDS, "b: jpg", "!", patched(AB, 156, b"Z")),
    # Skipped members.
    *(
        same(f"skipped: {name!r}", "z: jpg", archive(name, "z.jpg"))
        for name in [
            *["__meta__", "____", "__a__b__", "__a.b__", "__meta__/x.jpg", "d/__meta__"],
            *["noext", "d.x/noext", ".hidden.jpg", "._a.jpg", "./._a.jpg", "x.y/.z", "d/a.jpg/", ".", ".."],
        ]
    ),
    differs("a folder __x__ below", META, "d/__meta__/x: jpg | z: jpg", "z: jpg", archive("d/__meta__/x.jpg", "z.jpg")),
    differs("a file __x__ below", META, "d/__a: b__ | z: jpg", "z: jpg", archive("d/__a.b__", "z.jpg")),
    differs("a dot-file below", DOT_FILES, "d/: hidden.jpg | z: jpg", "z: jpg", archive("d/.hidden.jpg", "z.jpg")),
    differs("two dots below", DOT_FILES, "d/: .jpg | z: jpg", "z: jpg", archive("d/..jpg", "z.jpg")),
    differs(
        "AppleDouble files split every sample",
        DOT_FILES,
        "d/: _0.jpg | d/0: jpg | d/: _0.txt | d/0: txt",
        "d/0: jpg txt",
        archive("d/._0.jpg", "d/0.jpg", "d/._0.txt", "d/0.txt"),
    ),
    same("a skipped member does not end a sample", "a: jpg txt", archive("a.jpg", "README", "a.txt")),
    # Keys and fields.
    *(
        same(f"named: {name!r}", answer, archive(name))
        for name, answer in {
            "a.seg.png": "a: seg.png",
            "d.x/a.b.c": "d.x/a: b.c",
            "./a.jpg": "./a: jpg",
            "../a.jpg": "../a: jpg",
            "/top/a.jpg": "/top/a: jpg",
            "d//a.jpg": "d//a: jpg",
            ".d/a.jpg": ".d/a: jpg",
            "__meta__.json": "__meta__: json",
            "a.": "a: ",
            "a..b": "a: .b",
            "a b.jpg": "a b: jpg",
            "a.jpg\n": "a: jpg\n",
            "A.JPG": "A: jpg",
            "a.Seg.PNG": "a: seg.png",
            "a.ÄÖ.İ": "a: äö.i̇",
            "2024-01-01T00:00:00.123.jpg": "2024-01-01T00:00:00: 123.jpg",
        }.items()
    ),
    differs("a newline in a folder", NEWLINE, "", "d.x\ny/a: jpg", archive("d.x\ny/a.jpg")),
    differs("a newline after __x__", NEWLINE, "", "__a: b__\n", archive("__a.b__\n")),
    same("a field __key__", "!", archive("a.__key__")),
    same("a field __url__", "!", archive("a.__url__")),
    differs("a field __source__", SOURCE, "a: __source__", "!", archive("a.__source__")),
    differs("a field __bad__", BAD, "z: jpg", "a: jpg __bad__ | z: jpg", archive("a.jpg", "a.__bad__", "z.jpg")),
    differs("a field __local_path__", BAD, "a: ", "a: __local_path__", archive("a.__local_path__")),
    # Grouping.
    same("keys that come again later", "a: jpg | b: jpg | a: txt", archive("a.jpg", "b.jpg", "a.txt")),
    same("keys that differ in case", "A: jpg | a: txt", archive("A.jpg", "a.txt")),
    same("dotted keys", "img_1: 5.jpg 7.jpg", archive("img_1.5.jpg", "img_1.7.jpg")),
    same("a field twice", "b: jpg | !", archive("b.jpg", "a.jpg", "a.jpg", "c.jpg")),
    same("a field twice, once in capitals", "b: jpg | !", archive("b.jpg", "a.JPG", "a.jpg", "c.jpg")),
    same("one key at the border of two shards", "a: jpg | b: jpg | b: txt", AB, archive("b.txt")),
    # The end.
    same("an empty tar", "", archive()),
    same("an empty file", "!", b""),
    same("less than a block", "!", bytes(100)),
    same("no tar", "!", b"x" * 2048),
    same("two blocks of zeros", "", bytes(1024)),
    same("10 KiB of zeros", "", bytes(10240)),
    same("1 MB of zeros after the end", A_B, AB + bytes(1 << 20)),
    differs("one block of zeros", NO_END, "", "!", bytes(512)),
    differs("no end-of-archive mark", NO_END, A_B, "a: jpg | !", AB[:2048]),
    differs("half an end-of-archive mark", NO_END, A_B, "a: jpg | !", AB[:2560]),
    differs("a block of zeros within", NO_END, "a: jpg", "!", AB[:1024] + bytes(512) + AB[1024:]),
    differs("a second archive", TRAILING, A_B, "a: jpg | !", AB + CD),
    differs("something after the end", TRAILING, A_B, "a: jpg | !", AB + b"x" * 512),
    differs("a cut header", HEADER, "a: jpg", "!", AB[:1124]),
    differs("garbage for a header", HEADER, "a: jpg", "!", AB[:1024] + b"x" * 512 + AB[1536:]),
    same("cut data", "!", archive(("a.jpg", bytes(100_000)))[:50_000]),
    # Compressed as a whole.
    *(
        row
        for name, compress in (("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress))
        for row in (
            same(name, A_B, compress(AB)),
            same(f"{name} and plain", f"{A_B} | {C_D}", compress(AB), CD),
            differs(f"{name}, cut", CUT, A_B, "a: jpg | !", compress(AB)[:-5]),
            differs(f"{name} and something", CUT, A_B, "a: jpg | !", compress(AB) + b"something"),
            differs(f"{name}, two parts", PARTS, "a: jpg", A_B, compress(AB[:1024]) + compress(AB[1024:])),
            differs(f"{name}, two archives", TRAILING, A_B, "a: jpg | !", compress(AB) + compress(CD)),
        )
    ),
    differs("zst", ZST, A_B if KNOWS_ZST else "!", A_B, compress_frame(AB, 3)),
    differs("lzma", LZMA, A_B, "!", lzma.compress(AB, lzma.FORMAT_ALONE)),
]


@pytest.fixture
def write(tmp_path):
    def write(shards):
        urls = [str(tmp_path / f"{number}.tar") for number in range(len(shards))]
        for url, data in zip(urls, shards, strict=True):
            Path(url).write_bytes(data)
        return urls

    return write


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_an_archive_is_read_as_webdataset_reads_it_or_deviates_by_name(write, row):
    urls = write(row.shards)
    theirs, their_samples, _ = by_webdataset(urls)
    ours, our_samples, error = by_shardkit(urls)

    assert (theirs, ours) == (row.webdataset, row.shardkit)
    assert error is None or issubclass(error, ShardError)
    if not row.deviation:
        assert our_samples == their_samples


def test_every_deviation_is_listed_and_every_listed_one_is_shown():
    listed = re.findall(r"^- (.*)$", shardkit.webdataset.__doc__, re.MULTILINE)

    assert listed == sorted(set(listed), key=listed.index)
    assert {row.deviation for row in ROWS if row.webdataset != row.shardkit} | {CLASSES} == {*listed} - (
        {ZST} if KNOWS_ZST else set()
    )


def test_class_numbers_of_different_lists_are_those_of_one_list_which_they_are_not_in_webdataset(tmp_path):
    for name, classes in (("x", ["cat", "dog"]), ("y", ["dog", "eel"])):
        with ShardWriter(tmp_path / name, classes=classes, compression="none") as writer:
            for number, label in enumerate(classes):
                writer.write({KEY: label + name, "cls": number})
    urls = [str(tmp_path / name / f"{name}-000000.tar") for name in "xy"]
    _, theirs, _ = by_webdataset(urls)
    stream = ShardStream(urls, shuffle=False)

    assert [(sample[KEY], int(sample["cls"])) for sample in theirs] == [
        ("catx", 0),
        ("dogx", 1),
        ("dogy", 0),
        ("eely", 1),
    ]
    assert stream.classes == ("cat", "dog", "eel")
    assert [(sample[KEY], sample["cls"]) for sample in stream] == [("catx", 0), ("dogx", 1), ("dogy", 1), ("eely", 2)]


def deviates(name):
    return re.search(r"/\.[^/]*\Z", name) or re.search(r"/__[^/]*__(/|\Z)", name)


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    return tmp_path_factory.mktemp("shard") / "a.tar"


@given(names=st.lists(st.text("aB./_ä", min_size=1, max_size=12).filter(lambda name: not deviates(name)), max_size=8))
def test_members_of_any_names_are_grouped_as_webdataset_groups_them(shard, names):
    shard.write_bytes(archive(*names))
    theirs, their_samples, _ = by_webdataset(str(shard))
    ours, our_samples, _ = by_shardkit(str(shard))

    assert ours == theirs
    assert our_samples == their_samples


# --- the defects of webdataset


def numbered(count=10, fields=("json", "jpg")):
    return archive(*((f"{i:03d}.{field}", bytes([i]) * 600) for i in range(count) for field in fields))


SAMPLE_BYTES = 2 * member_size("000.jpg", 600)


def test_a_damaged_header_does_not_end_a_shard_as_it_does_in_webdataset(write):
    shard = numbered()
    fourth = 4 * SAMPLE_BYTES
    for name, damaged in {
        "cut between members": shard[:fourth],
        "cut in a header": shard[: fourth + 100],
        "garbage": shard[:fourth] + b"x" * 512 + shard[fourth + 512 :],
        "a flipped bit": shard[:fourth] + bytes([shard[fourth] ^ 1]) + shard[fourth + 1 :],
    }.items():
        urls = write([damaged])
        _, theirs, their_error = by_webdataset(urls)
        _, ours, our_error = by_shardkit(urls)

        assert (len(theirs), their_error) == (4, None), f"{name}: webdataset notices it now"
        assert issubclass(our_error, ShardError), name
        assert ours == theirs[:3], f"{name}: the sample before the damage may not be whole"


def test_a_shard_cut_anywhere_is_an_error_which_it_often_is_not_in_webdataset(write):
    shard = numbered(4)
    end = 4 * SAMPLE_BYTES + len(END_OF_ARCHIVE)
    silent = 0
    for cut in range(0, end, 128):
        urls = write([shard[:cut]])
        _, theirs, their_error = by_webdataset(urls)
        _, ours, our_error = by_shardkit(urls)

        assert issubclass(our_error, ShardError), f"cut at byte {cut}"
        assert [len(sample) for sample in ours] == [4] * len(ours)
        silent += their_error is None and len(theirs) < 4

    assert silent > 0


@pytest.mark.parametrize("again", [2, 3], ids=["the same key", "another key"])
def test_skipping_damage_never_yields_a_part_of_a_sample_nor_fuses_two_as_webdataset_does(write, again):
    cut = 2 * SAMPLE_BYTES + SAMPLE_BYTES // 2 + 600  # in the data of 002.jpg
    first = numbered()[:cut]
    second = archive((f"{again:03d}.jpg", b"second"), "004.jpg", "004.json")
    urls = write([first, second])
    _, fused, _ = by_webdataset(urls, handler=wds.ignore_and_continue)
    stream = ShardStream(urls, decode=False, shuffle=False, on_error="skip")
    ours = list(stream)

    (wrong,) = [sample for sample in fused if sample[KEY] == "002" and sample[URL] == urls[0]]
    assert set(wrong) == {KEY, URL, "json"} | ({"jpg"} if again == 2 else set())
    assert wrong.get("jpg", b"second") == b"second"
    assert [(sample[KEY], sample[URL]) for sample in ours] == [
        *(("000", urls[0]), ("001", urls[0])),
        *((f"{again:03d}", urls[1]), ("004", urls[1])),
    ]
    assert stream.skipped == (0, 1)


def test_epochs_differ_which_they_do_not_in_webdataset(write):
    urls = write([archive(f"{i:02d}.jpg") for i in range(30)])

    def passes(dataset):
        return [[sample[KEY] for sample in dataset] for _ in range(2)]

    first, second = passes(wds.WebDataset(urls, shardshuffle=100))
    assert first == second, "webdataset's epochs differ now"

    for dataset in (ShardStream(urls, decode=False), shardkit.webdataset.WebDataset(urls, shardshuffle=100)):
        first, second = passes(dataset)

        assert first != second
        assert sorted(first) == sorted(second)


def test_short_epochs_see_other_samples_which_they_do_not_in_webdataset(write):
    urls = write([archive(f"{i:02d}.jpg") for i in range(30)])

    def seen(dataset):
        return {sample[KEY] for _ in range(60) for sample in dataset.with_epoch(5)}

    assert len(seen(wds.WebDataset(urls, shardshuffle=100))) == 5
    assert len(seen(shardkit.webdataset.WebDataset(urls, shardshuffle=100))) == 30


def write_by_webdataset(folder, samples, **options):
    with wds.ShardWriter(f"{folder}/w-%04d.tar", verbose=0, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return sorted(folder.glob("w-*.tar"))


def write_by_shardkit(folder, samples, **options):
    with ShardWriter(f"{folder}/s", compression="none", **options) as writer:
        for sample in samples:
            writer.write(sample)
    return sorted((folder / "s").glob("*.tar"))


def header_bytes(shard):
    with tarfile.open(shard) as tar:
        return {member.offset_data - member.offset for member in tar}


def test_a_header_is_512_bytes_which_it_is_not_in_webdataset(tmp_path):
    samples = [{KEY: f"{i:03d}", "txt": "text"} for i in range(3)]
    (theirs,) = write_by_webdataset(tmp_path, samples)
    (ours,) = write_by_shardkit(tmp_path, samples)

    assert header_bytes(theirs) == {1536}
    assert header_bytes(ours) == {512}


def test_the_size_of_a_shard_counts_all_of_it_which_it_does_not_in_webdataset(tmp_path):
    samples = [{KEY: f"{i:04d}", "txt": "ten bytes!"} for i in range(1500)]
    theirs = write_by_webdataset(tmp_path, samples, maxsize=10_000)
    ours = write_by_shardkit(tmp_path, samples, shard_bytes=10_000)

    assert max(shard.stat().st_size for shard in theirs) > 200 * 10_000
    assert max(shard.stat().st_size for shard in ours) <= 10_000


@pytest.mark.parametrize("keys", [("img_1.5", "img_1.7"), ("a", "a")], ids=["dots", "repeated"])
def test_keys_that_would_be_read_as_one_are_refused_which_they_are_not_by_webdataset(tmp_path, keys):
    samples = [{KEY: key, field: "text"} for key, field in zip(keys, ("txt", "caption"), strict=True)]
    (theirs,) = write_by_webdataset(tmp_path, samples)

    assert len(by_webdataset(str(theirs))[1]) == 1
    with pytest.raises(SampleError):
        write_by_shardkit(tmp_path, samples)
