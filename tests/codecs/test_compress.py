"""Compressed shards return every byte or an error, take no memory for mere claims, and open in standard tools."""

import bz2
import gzip
import io
import lzma
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zlib
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.codecs import compress as compress_module
from shardkit.codecs import decompress as decompress_module
from shardkit.codecs.compress import (
    MAX_FRAMES,
    compress_frame,
    decompress_frame,
    gzip_writer,
    open_decompressed,
    parse_compression,
    read_seek_table,
    seek_table,
)
from shardkit.codecs.decompress import decompress
from shardkit.errors import ArgumentError, CodecError, ShardError, TruncatedShardError
from shardkit.storage.local import LocalStorage, LocalStream
from tests.support.shared import MIB, peak_memory

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

URL = "shards/train-000000.tar.zst"


def zst_member(data, *, says_size=True):
    parameter = zstd.CompressionParameter
    return zstd.compress(data, options={parameter.checksum_flag: 1, parameter.content_size_flag: int(says_size)})


def skippable(data, magic=0x184D2A50):
    return struct.pack("<II", magic, len(data)) + data


COMPRESS = {
    "zst": zst_member,
    "gz": partial(gzip.compress, mtime=0),
    "bz2": bz2.compress,
    "xz": partial(lzma.compress, preset=0),
}
every_format = pytest.mark.parametrize("name", COMPRESS)
CONTENT = b"".join(b"%d. A sample never ends early.\n" % i for i in range(40))


class Stream(LocalStream):
    """A stream of bytes that counts how many are read."""

    def __init__(self, data):
        super().__init__(io.BytesIO(data), URL, len(data))
        self.bytes_read = 0
        self.is_closed = False

    def read(self, n, /):
        data = super().read(n)
        self.bytes_read += len(data)
        return data

    def close(self):
        self.is_closed = True


def read_all(data, step=1 << 16):
    stream = open_decompressed(Stream(data))
    return b"".join(iter(lambda: stream.read(step), b""))


def read_until_error(data, step=1 << 16):
    """Return the bytes that are read, and the ShardError that ended the reading."""
    content = b""
    try:
        stream = open_decompressed(Stream(data))
        while piece := stream.read(step):
            content += piece
    except ShardError as error:
        return content, error
    return content, None


def framed(contents, level=3):
    """Return a file of frames with a seek table, and the positions of its frames."""
    frames = [compress_frame(content, level) for content in contents]
    table = seek_table([(len(frame), len(content)) for frame, content in zip(frames, contents, strict=True)])
    offsets = [sum(map(len, frames[:i])) for i in range(len(frames))]
    places = [(offset, len(f), len(c)) for offset, f, c in zip(offsets, frames, contents, strict=True)]
    return b"".join(frames) + table, places


def seek_table_of(tmp_path, data):
    (tmp_path / "shard").write_bytes(data)
    return read_seek_table(LocalStorage(), str(tmp_path / "shard"), len(data))


# Streams


@given(
    name=st.sampled_from([*COMPRESS, "none"]),
    contents=st.lists(st.binary(max_size=3000), min_size=1, max_size=4),
    steps=st.lists(st.integers(1, 5000), min_size=1),
)
def test_a_stream_gives_back_what_its_members_hold_whatever_the_steps(name, contents, steps):
    contents = [b"0001.txt", *contents]  # data that is not compressed begins with a name
    stored = b"".join(COMPRESS[name](content) if name != "none" else content for content in contents)
    stream = open_decompressed(Stream(stored))
    rest = b"".join(contents)
    for step in steps:
        assert stream.read(step) == rest[:step]  # fewer only at the end
        rest = rest[step:]

    assert stream.compression == name
    assert stream.read(1 << 16) == rest
    assert stream.read(1) == b""


@pytest.mark.parametrize("name", [*COMPRESS, "none"])
@given(skip=st.integers(0, 2000), before=st.integers(0, 20))
def test_skipping_is_reading_and_forgetting_also_beyond_the_end(name, skip, before):
    stream = open_decompressed(Stream(COMPRESS[name](CONTENT) if name != "none" else CONTENT))
    head = stream.read(before)
    stream.skip(skip)

    assert head == CONTENT[:before]
    assert stream.read(5000) == CONTENT[before + skip :]


def test_what_is_not_compressed_is_skipped_without_reading():
    file = Stream(bytes(MIB))
    stream = open_decompressed(file)
    stream.skip(MIB - 1)

    assert (stream.size, stream.read(10)) == (MIB, b"\0")
    assert file.bytes_read < 100


@pytest.mark.parametrize("data", [b"", b"x", b"not compressed, and no tar"])
def test_what_is_not_compressed_comes_through_as_it_is(data):
    assert read_all(data) == data
    assert open_decompressed(Stream(data)).size == len(data)


@pytest.mark.parametrize("name", [*COMPRESS, "none"])
def test_a_stream_names_its_file_and_closes_it(name):
    file = Stream(COMPRESS[name](CONTENT) if name != "none" else CONTENT)
    stream = open_decompressed(file)
    stream.close()
    stream.close()

    assert (stream.url, stream.size, stream.compression) == (URL, None if name != "none" else len(CONTENT), name)
    assert file.is_closed


@every_format
def test_a_stream_cut_anywhere_is_an_error_after_all_that_is_whole(name):
    stored = COMPRESS[name](CONTENT) + COMPRESS[name](b"second")
    boundary = len(COMPRESS[name](CONTENT))
    for cut in range(1, len(stored)):
        content, error = read_until_error(stored[:cut])

        assert (CONTENT + b"second").startswith(content)
        if cut == boundary:
            assert (content, error) == (CONTENT, None)
        else:
            assert type(error) is TruncatedShardError, f"cut at byte {cut}"
            assert error.url == URL
        if cut > boundary:
            assert content.startswith(CONTENT)


@every_format
def test_a_bit_flipped_anywhere_is_an_error_or_changes_nothing(name):
    stored = COMPRESS[name](CONTENT[:300]) + COMPRESS[name](b"second")
    for at in range(len(stored)):
        for bit in range(8):
            damaged = bytearray(stored)
            damaged[at] ^= 1 << bit
            content, error = read_until_error(bytes(damaged))

            harmless = content == CONTENT[:300] + b"second" or content == damaged  # the magic itself: not compressed
            assert isinstance(error, ShardError) or harmless, f"bit {bit} of byte {at}"


@every_format
@pytest.mark.parametrize("garbage", [b"x", b"garbage behind the end", b"\0x", b"\0" * 999 + b"ustar"])
def test_garbage_behind_the_last_member_is_an_error_after_all_content(name, garbage):
    stored = COMPRESS[name](CONTENT)
    content, error = read_until_error(stored + garbage)
    padding = len(garbage) - len(garbage.lstrip(b"\0")) if name in ("gz", "xz") else 0

    assert content == CONTENT
    assert f"byte {len(stored) + padding:,} of the {name} file, what follows is not {name}" in str(error)
    assert error.offset == len(CONTENT)


@every_format
@pytest.mark.parametrize("other", COMPRESS)
def test_another_format_behind_the_last_member_is_an_error(name, other):
    content, error = read_until_error(COMPRESS[name](CONTENT) + COMPRESS[other](b"more"))

    assert (
        (content, error) == (CONTENT + b"more", None)
        if name == other
        else (content, type(error)) == (CONTENT, ShardError)
    )


@pytest.mark.parametrize("zeros", [1, 4, 511, 300_000])
def test_zeros_behind_a_member_are_padding_only_where_the_tools_say_so(zeros):
    for name, compress in COMPRESS.items():
        content, error = read_until_error(compress(CONTENT) + bytes(zeros))

        assert content == CONTENT
        assert (error is None) == (name in ("gz", "xz"))


def test_padding_between_members_is_passed_over():
    assert read_all(gzip.compress(b"a") + bytes(200_000) + gzip.compress(b"b")) == b"ab"
    assert read_all(lzma.compress(b"a") + bytes(4) + lzma.compress(b"b")) == b"ab"


def test_skippable_and_empty_frames_are_passed_over_first_between_and_last():
    frames = [
        skippable(b""),
        skippable(b"from pzstd", 0x184D2A5F),
        zst_member(b"a"),
        zst_member(b""),
        skippable(bytes(300_000)),
    ]

    assert read_all(b"".join(frames) + zst_member(b"b") + skippable(b"end"), step=1) == b"ab"
    assert read_all(skippable(b"nothing else")) == b""


def test_empty_members_hold_nothing():
    for compress in COMPRESS.values():
        assert read_all(compress(b"")) == b""
        assert read_all(compress(b"") + compress(b"a") + compress(b"")) == b"a"


def test_damage_in_a_later_frame_leaves_all_that_is_before_it():
    first, second = compress_frame(CONTENT, 3), bytearray(compress_frame(bytes(5000), 3))
    second[-1] ^= 1
    content, error = read_until_error(first + second, step=MIB)

    assert content.startswith(CONTENT)
    assert "is damaged" in str(error)
    assert error.offset == len(CONTENT)
    assert str(error).startswith(f"shard {URL}: at or before byte {len(first + second):,} of the zst file")


def test_an_error_is_raised_at_every_read_that_follows():
    stream = open_decompressed(Stream(compress_frame(CONTENT, 3)[:-1]))

    assert stream.read(MIB) == CONTENT
    for _ in range(2):
        with pytest.raises(
            TruncatedShardError, match=r"ends at byte \d+ in the middle of its zst data; fetch or write"
        ):
            stream.read(1)


@every_format
def test_a_bomb_is_read_in_steps_of_what_is_asked_for(name):
    bomb = COMPRESS[name](bytes(64 * MIB))
    stream = open_decompressed(Stream(bomb))

    def read():
        for _ in range(32):
            stream.read(1 << 16)

    assert peak_memory(read) < MIB
    assert peak_memory(lambda: stream.skip(16 * MIB)) < MIB


def huge_window(log):
    """Return a frame of one byte that requires a window of ``2**log`` bytes."""
    return b"\x28\xb5\x2f\xfd\x00" + bytes([(log - 10) << 3]) + b"\x09\x00\x00x"


def test_a_window_larger_than_the_limit_is_refused(monkeypatch):
    assert read_all(huge_window(27)) == b"x"
    for data in (huge_window(28), huge_window(41)):
        with pytest.raises(ShardError, match="too much memory"):
            read_all(data)
    with pytest.raises(ShardError, match="too much memory"):
        decompress_frame(huge_window(28), 1, url=URL, offset=0)
    monkeypatch.setattr(decompress_module, "MAX_WINDOW_BYTES", 1 << 16)
    with pytest.raises(ShardError, match="limit"):
        read_all(lzma.compress(CONTENT))


def test_running_out_of_memory_is_not_taken_for_damage(monkeypatch):
    class Exhausted:
        eof, needs_input, unused_data = False, True, b""

        def decompress(self, _data, /, max_length):
            raise MemoryError(max_length)

    stream = open_decompressed(Stream(zst_member(CONTENT)))
    stream._member = Exhausted()
    with pytest.raises(MemoryError):
        stream.read(10)
    monkeypatch.setattr(decompress_module, "FORMATS", [decompress_module.Format("gz", (), Exhausted)])
    with pytest.raises(MemoryError):
        decompress(b"x", "gz", 10)


# Data in memory


@pytest.mark.parametrize("name", ["gz", "zst"])
@given(contents=st.lists(st.binary(max_size=2000), min_size=1, max_size=3))
def test_compressed_data_gives_back_what_all_its_members_hold(name, contents):
    data = b"".join(COMPRESS[name](content) for content in contents)
    content = b"".join(contents)

    assert decompress(data, name, len(content)) == content
    if content:
        with pytest.raises(
            CodecError, match=f"it holds more than the limit, max_decompressed_bytes={len(content) - 1:,}"
        ):
            decompress(data, name, len(content) - 1)


@pytest.mark.parametrize("name", ["gz", "zst"])
def test_compressed_data_that_is_not_whole_is_an_error(name):
    data = COMPRESS[name](CONTENT)
    for cut in range(len(data)):
        with pytest.raises(CodecError, match=r"ends in the middle|damaged"):
            decompress(data[:cut], name, MIB)
    for garbage in (b"x", b"\0", b"garbage"):
        with pytest.raises(CodecError, match=f"ends in the middle|it is damaged or not {name} data"):
            decompress(data + garbage, name, MIB)


@pytest.mark.parametrize("name", ["gz", "zst"])
def test_a_bomb_in_memory_takes_no_more_than_the_limit(name):
    bomb = COMPRESS[name](bytes(64 * MIB))

    def explode():
        with pytest.raises(CodecError, match="limit"):
            decompress(bomb, name, MIB)

    assert peak_memory(explode) < 4 * MIB


# Frames


@given(data=st.binary(max_size=5000), level=st.sampled_from([1, 3, 9, 19]))
def test_a_frame_gives_back_its_content_and_says_its_size(data, level):
    frame = compress_frame(data, level)

    assert zstd.get_frame_info(frame).decompressed_size == len(data)
    assert zstd.get_frame_size(frame) == len(frame)
    assert decompress_frame(frame, len(data), url=URL, offset=0) == data


def test_higher_levels_make_smaller_frames():
    assert len(compress_frame(CONTENT * 50, 19)) < len(compress_frame(CONTENT * 50, 1))


def test_a_frame_with_a_bit_flipped_anywhere_is_an_error_or_unchanged():
    frame = compress_frame(CONTENT[:300], 3)
    changed = 0
    for at in range(len(frame)):
        for bit in range(8):
            damaged = bytearray(frame)
            damaged[at] ^= 1 << bit
            try:
                content = decompress_frame(bytes(damaged), 300, url=URL, offset=0)
            except ShardError:
                changed += 1
            else:
                assert content == CONTENT[:300], f"bit {bit} of byte {at}"

    assert changed > 7 * len(frame)


FRAME = compress_frame(CONTENT, 3)
NO_SIZE = zst_member(CONTENT, says_size=False)


@pytest.mark.parametrize(
    ("data", "size", "fault"),
    [
        (FRAME, len(CONTENT) - 1, "says that it holds"),
        (FRAME, len(CONTENT) + 1, "says that it holds"),
        (FRAME, 0, "says that it holds"),
        (NO_SIZE, len(CONTENT) - 1, "holds more than the"),
        (NO_SIZE, len(CONTENT) + 1, "holds [0-9,]+ bytes, expected"),
        (FRAME + b"x", len(CONTENT), "ends 1 bytes early"),
        (FRAME + FRAME, len(CONTENT), "ends [0-9,]+ bytes early"),
        (FRAME[:-1], len(CONTENT), "is cut after"),
        (FRAME[:20], len(CONTENT), "is cut after"),
        (FRAME[:3], len(CONTENT), "is damaged"),
        (b"", 0, "is damaged"),
        (b"not a frame, but long enough for one", 10, "is damaged"),
    ],
)
def test_a_frame_that_is_not_what_the_index_says_is_an_error_that_says_where(data, size, fault):
    with pytest.raises(ShardError, match=f"^shard {URL}: the zstd frame of the block at byte 1,024 {fault}") as caught:
        decompress_frame(data, size, url=URL, offset=1024)

    assert (caught.value.url, caught.value.offset) == (URL, 1024)


def test_a_frame_without_a_size_or_a_checksum_is_read_as_others_write_it():
    assert decompress_frame(NO_SIZE, len(CONTENT), url=URL, offset=0) == CONTENT
    assert decompress_frame(zstd.compress(CONTENT), len(CONTENT), url=URL, offset=0) == CONTENT
    assert decompress_frame(skippable(b"no content"), 0, url=URL, offset=0) == b""


def lying_frame(claimed, content):
    """Return a frame that holds ``content`` but claims, in 4 bytes, to hold ``claimed`` bytes."""
    frame = bytearray(zst_member(content))
    assert frame[4] & 0xC0 == 0x80
    assert struct.unpack_from("<I", frame, 5 if frame[4] & 0x20 else 6) == (len(content),)
    struct.pack_into("<I", frame, 5 if frame[4] & 0x20 else 6, claimed)
    return bytes(frame)


@pytest.mark.parametrize("claimed", [1000, MIB, 1 << 30, (1 << 32) - 1])
def test_a_frame_that_lies_about_its_size_is_refused_before_the_memory_is_taken(claimed):
    bomb = lying_frame(claimed, bytes(64 * MIB))

    def explode():
        with pytest.raises(ShardError, match=r"is damaged|holds"):
            decompress_frame(bomb, claimed if claimed < 64 * MIB else MIB, url=URL, offset=0)

    assert peak_memory(explode) < 4 * MIB


def test_a_frame_that_claims_gigabytes_and_holds_little_takes_little():
    frame = lying_frame(1 << 31, CONTENT * 3000)

    def explode():
        with pytest.raises(ShardError, match=r"is damaged|too much memory"):
            decompress_frame(frame, 1 << 31, url=URL, offset=0)

    assert peak_memory(explode) < 16 * MIB


# The seek table


def test_a_seek_table_has_these_bytes():
    assert seek_table([(0x01020304, 0x0A0B0C0D), (7, 8)]) == bytes.fromhex(
        "5e2a4d18 19000000  04030201 0d0c0b0a  07000000 08000000  02000000 00 b1ea928f"
    )


@given(contents=st.lists(st.binary(max_size=300), max_size=20))
def test_a_seek_table_says_where_every_frame_is(tmp_path_factory, contents):
    data, places = framed(contents)
    frames = seek_table_of(tmp_path_factory.mktemp("zst"), data)

    assert frames == places
    assert [
        decompress_frame(data[at : at + stored], size, url=URL, offset=0) for at, stored, size in frames
    ] == contents
    assert read_all(data) == b"".join(contents)


def test_a_long_seek_table_and_one_with_checksums_are_read(tmp_path):
    frames = [(10, 100)] * 5000
    data = bytes(50_000) + seek_table(frames)
    assert seek_table_of(tmp_path, data) == [(10 * i, 10, 100) for i in range(5000)]

    entries = struct.pack("<III", 20, 200, 0xDEAD) + struct.pack("<III", 30, 300, 0xBEEF)
    table = skippable(entries + struct.pack("<IBI", 2, 0x80, 0x8F92EAB1), 0x184D2A5E)
    assert seek_table_of(tmp_path, bytes(50) + table) == [(0, 20, 200), (20, 30, 300)]


@pytest.mark.parametrize(
    "data", [b"", b"short", bytes(16), FRAME, FRAME + skippable(b"something else"), bytes(100_000)]
)
def test_a_file_without_a_seek_table_has_none(tmp_path, data):
    assert seek_table_of(tmp_path, data) is None


def test_a_damaged_seek_table_is_refused_or_its_frames_are(tmp_path):
    contents = [CONTENT[:100], CONTENT[100:250], CONTENT[250:300]]
    data, places = framed(contents)
    table_start = len(data) - len(seek_table(places_sizes(places)))
    outcomes = set()
    for at in range(table_start, len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            try:
                frames = seek_table_of(tmp_path, bytes(damaged))
                for offset, stored, size in frames or []:
                    decompress_frame(data[offset : offset + stored], size, url=URL, offset=0)
            except ShardError:
                outcomes.add("refused")
            else:
                assert frames in (None, places), f"bit {bit} of byte {at}"
                outcomes.add("ignored" if frames is None else "the same")

    assert outcomes == {"refused", "ignored", "the same"}  # the same: the two unused bits of the descriptor


def places_sizes(places):
    return [(stored, size) for _, stored, size in places]


def test_a_seek_table_that_lies_is_refused(tmp_path):
    data, places = framed([b"first", b"second"])
    frames = data[: -len(seek_table(places_sizes(places)))]
    (_, a, _), (_, b, _) = places
    lies = {
        "describes": [(a, 5), (b + 1, 6)],  # beyond its own beginning
        "describes [0-9]+ bytes of frames, expected": [(a, 5)],  # a frame is missing
    }
    for fault, sizes in lies.items():
        with pytest.raises(ShardError, match=fault) as caught:
            seek_table_of(tmp_path, frames + seek_table(sizes))

        assert caught.value.url == str(tmp_path / "shard")
    with pytest.raises(ShardError, match="expected the"):  # two shards, one after the other
        seek_table_of(tmp_path, data + data)
    moved = seek_table_of(tmp_path, frames + seek_table([(a - 1, 5), (b + 1, 6)]))
    with pytest.raises(ShardError):
        [decompress_frame(data[at : at + stored], size, url=URL, offset=0) for at, stored, size in moved]


@pytest.mark.parametrize("count", [3, 1000, MAX_FRAMES + 1, (1 << 32) - 1])
def test_a_seek_table_that_claims_more_frames_than_there_can_be_is_refused_unread(tmp_path, count):
    data, _ = framed([b"first", b"second"])
    forged = data[:-9] + struct.pack("<IBI", count, 0, 0x8F92EAB1)

    with pytest.raises(ShardError, match=r"its seek table (claims|does not begin)"):
        seek_table_of(tmp_path, forged)


def test_a_seek_table_longer_than_any_writer_makes_is_refused(tmp_path, monkeypatch):
    data, _ = framed([b"first", b"second"])
    monkeypatch.setattr(compress_module, "MAX_FRAMES", 1)

    with pytest.raises(ShardError, match="its seek table claims 2 frames"):
        seek_table_of(tmp_path, data)


@pytest.mark.parametrize("bit", [2, 3, 4, 5, 6])
def test_a_seek_table_of_a_later_format_is_refused(tmp_path, bit):
    data, _ = framed([b"first", b"second"])

    with pytest.raises(ShardError, match=r"its seek table claims 2 frames \(descriptor 0x"):
        seek_table_of(tmp_path, data[:-5] + bytes([1 << bit]) + data[-4:])


def test_a_seek_table_has_room_for_what_the_format_can_say():
    assert len(seek_table([((1 << 32) - 1, (1 << 32) - 1)])) == 25
    with pytest.raises(ArgumentError, match="smaller than 4 GiB"):
        seek_table([(100, 1 << 32)])
    with pytest.raises(ArgumentError, match="choose larger blocks"):
        seek_table([(1, 1)] * (MAX_FRAMES + 1))


# Written files, and standard tools


@pytest.mark.parametrize(
    ("text", "name", "level", "suffix"),
    [
        ("none", "none", 0, ".tar"),
        ("zst", "zst", 3, ".tar.zst"),
        ("zst:1", "zst", 1, ".tar.zst"),
        ("zst:22", "zst", 22, ".tar.zst"),
        ("gz", "gz", 6, ".tar.gz"),
        ("gz:9", "gz", 9, ".tar.gz"),
    ],
)
def test_compressions_are_written_as_name_and_level(text, name, level, suffix):
    compression = parse_compression(text)

    assert (compression.name, compression.level, compression.suffix) == (name, level, suffix)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "auto",
        "zstd",
        "ZST",
        "zst:",
        "zst:0",
        "zst:23",
        "zst:-1",
        "zst:3.5",
        "zst: 3",
        "gz:10",
        "none:0",
        "none:1",
        "none:",
    ],
)
def test_other_compressions_are_refused_with_what_there_is(text):
    with pytest.raises(ArgumentError, match="is not known; write 'none', 'zst' or 'gz'") as caught:
        parse_compression(text)

    assert repr(text) in str(caught.value)


def gzipped(data, level=6, step=1000):
    writer = gzip_writer(level)
    return b"".join([*(writer.compress(data[at : at + step]) for at in range(0, len(data), step)), writer.flush()])


@given(data=st.binary(max_size=5000), step=st.integers(1, 6000))
def test_a_gzip_file_is_one_member_with_the_same_bytes_every_time(data, step):
    stored = gzipped(data, step=step)
    member = zlib.decompressobj(31)

    assert member.decompress(stored) == data
    assert member.eof
    assert not member.unused_data
    assert stored == gzipped(data, step=step)
    assert stored[4:8] == bytes(4)  # no modification time


def test_higher_gzip_levels_make_smaller_files():
    assert len(gzipped(CONTENT * 50, 9)) < len(gzipped(CONTENT * 50, 1))


@pytest.fixture
def archive():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for key in range(30):
            info = tarfile.TarInfo(f"{key:04}.txt")
            info.size = len(CONTENT)
            tar.addfile(info, io.BytesIO(CONTENT))
    return file.getvalue()


@pytest.fixture
def run():
    """Return a function that runs a program that must be installed, and returns its output."""

    def run(*command, data=None):
        assert shutil.which(command[0]), f"{command[0]} is not installed, and scripts/test needs it"
        done = subprocess.run(command, input=data, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    return run


def test_standard_tools_open_a_zst_shard(tmp_path, archive, run):
    data, places = framed([archive[at : at + 10_000] for at in range(0, len(archive), 10_000)])
    shard = tmp_path / "train-000000.tar.zst"
    shard.write_bytes(data)

    run("zstd", "-q", "-t", str(shard))
    listing = run("zstd", "-l", "-v", str(shard)).decode()
    assert f"# Zstandard Frames: {len(places)}" in listing
    assert "# Skippable Frames: 1" in listing
    assert "Decompressed Size: " in listing  # every frame stores its size
    assert f"({len(archive)} B)" in listing
    assert "Check: XXH64" in listing
    assert run("zstd", "-q", "-d", "-c", str(shard)) == archive
    assert run("tar", "--zstd", "-tf", str(shard)).decode().split() == [f"{key:04}.txt" for key in range(30)]


def test_standard_tools_open_a_gz_shard(tmp_path, archive, run):
    shard = tmp_path / "train-000000.tar.gz"
    shard.write_bytes(gzipped(archive))

    run("gzip", "-t", str(shard))
    assert run("gzip", "-d", "-c", str(shard)) == archive
    assert run("tar", "-tzf", str(shard)).decode().split() == [f"{key:04}.txt" for key in range(30)]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("zstd -q -c", "zst"),
        ("zstd -q -c --ultra -22", "zst"),
        ("zstd -q -c -T2 --long=27", "zst"),
        ("gzip -c", "gz"),
        ("bzip2 -c", "bz2"),
        ("xz -c -9", "xz"),
        ("xz -c -T2 --block-size=4096", "xz"),
    ],
)
def test_what_standard_tools_compress_is_read(archive, run, command, name):
    data = run(*command.split(), data=archive)

    assert open_decompressed(Stream(data)).compression == name
    assert read_all(data) == archive
    assert read_all(data + data) == archive + archive


def test_the_benchmark_prints_a_row_for_every_kind_of_data_and_compression():
    root = Path(__file__).parents[2]
    command = [sys.executable, "scripts/bench/bench_compression.py", "--rounds", "1", "--megabytes", "1"]
    output = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    rows = re.findall(
        r"^\| (.+?) \| (none|zst:[139]|gz:6) \| ([0-9.]+) \| ([0-9,]+|-) \| ([0-9,]+|-) \|$", output, re.MULTILINE
    )

    assert len(rows) == len({row[:2] for row in rows}) == 4 * 5
    assert {float(ratio) >= 1 for _, _, ratio, _, _ in rows} == {True}
