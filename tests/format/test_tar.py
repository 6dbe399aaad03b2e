"""A tar is read whole or not at all, and written as the same bytes every time."""

import contextlib
import io
import itertools
import os
import subprocess
import tarfile
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import ArgumentError, ShardError, TruncatedShardError
from shardkit.format import tar
from shardkit.format.tar import END_OF_ARCHIVE, Member, member_header, member_size, padding, read_members
from tests.support.shared import examples

URL = "shards/train-000000.tar"
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
GIB = 1 << 30


class Stream:
    """A ByteStream that records the requests made. A part that is a number stands for that number of zeros."""

    url = URL

    def __init__(self, *parts, sized=True):
        self._parts = list(parts)
        self.size = sum(part if isinstance(part, int) else len(part) for part in parts) if sized else None
        self.reads = []
        self.skips = []
        self.is_closed = False

    def read(self, n, /):
        self.reads.append(n)
        return b"".join(bytes(part) if isinstance(part, int) else part for part in self._advance(n))

    def skip(self, n, /):
        self.skips.append(n)
        list(self._advance(n))

    def close(self):
        self.is_closed = True

    def _advance(self, n):
        while n and self._parts:
            part = self._parts.pop(0)
            length = part if isinstance(part, int) else len(part)
            if length > n:
                self._parts.insert(0, part - n if isinstance(part, int) else part[n:])
                part, length = (n if isinstance(part, int) else part[:n]), n
            n -= length
            yield part


def read_all(*parts, **options):
    """Return the members, which must be the same after another member: the fast path never reads the first header."""
    members = list(read_members(Stream(*parts), **options))
    behind = list(read_members(Stream(FIRST, *parts), **options | {"skipped": None}))

    assert members == [m._replace(header_offset=m[1] - len(FIRST), data_offset=m[2] - len(FIRST)) for m in behind[1:]]
    return members


def read_until_error(stream, **options):
    """Return the members that are yielded and the error after them, which names the shard and the offset."""
    members, found = [], None
    try:
        for each in read_members(stream, **options):
            members.append(each)  # noqa: PERF402 - those before an error are wanted
    except ShardError as error:
        found = error
    if found is not None:
        assert found.url == URL
        assert f"shard {URL}: " in str(found)
        assert f"byte {found.offset:,}" in str(found) or "is empty" in str(found)
    return members, found


def error_of(*parts, **options):
    """Return the error, which must be the same after a member: the fast path never reads the first header."""
    members, error = read_until_error(Stream(*parts), **options)
    behind, later = read_until_error(Stream(FIRST, *parts), **options)

    assert error is not None, f"read {[each.name for each in members]} and no error"
    assert (type(error), error.offset, len(members)) == (type(later), later.offset - len(FIRST), len(behind) - 1)
    return error


def read_at_most(n):
    """Let the reader have n bytes of the stream at a time, so that everything crosses the end of a piece."""
    return mock.patch.multiple(tar, _MIN_READ=n, _MAX_READ=n)


def member(name, data):
    return member_header(name, len(data)) + data + bytes(padding(len(data)))


FIRST = member("first", b"")


def header(name=b"a.jpg", size=0, kind=b"0", *, magic=b"ustar\x0000", prefix=b"", checksum=sum):
    """Return a header with the given fields and a correct checksum."""
    size = size if isinstance(size, bytes) else b"%011o\0" % size
    block = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + size + b"00000000000\0" + b" " * 8 + kind
    block = block.ljust(257, b"\0") + magic.ljust(88, b"\0") + prefix.ljust(167, b"\0")
    assert len(block) == 512
    return block[:148] + b"%06o\0 " % checksum(block) + block[156:]


def extension(kind, body):
    return header(b"././@LongLink", len(body), kind) + body + bytes(padding(len(body)))


def pax(keyword, value, kind=b"x"):
    return extension(kind, record(keyword, value))


def record(keyword, value):
    rest = b" %b=%b\n" % (keyword, value)
    return next(b"%d" % n + rest for n in itertools.count() if len(b"%d" % n + rest) == n)


def tarfile_archive(tar_format, entries):
    """Return an archive that Python's tarfile makes from (name, type, data), cut after its end-of-archive mark."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format, encoding="utf-8") as archive:
        for name, kind, data in entries:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.size = len(data)
            info.mtime = 1.5 if tar_format == tarfile.PAX_FORMAT else 1  # PAX stores a fraction in an extended header
            info.linkname = "a.jpg" if kind in (tarfile.LNKTYPE, tarfile.SYMTYPE) else ""
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()[: archive.offset]


def small_archive(tar_format):
    name = "k" * (99 if tar_format == tarfile.USTAR_FORMAT else 130)
    sizes = {"a.jpg": 700, name: 3, "ü.cls": 0}
    return tarfile_archive(tar_format, [(name, tarfile.REGTYPE, b"\xaa" * size) for name, size in sizes.items()])


def by_tarfile(data):
    """Return the regular files that Python's tarfile finds, as our members, and the names of all other entries."""
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8") as archive:
        infos = archive.getmembers()
        regular = [
            Member(i.name, i.offset, i.offset_data, i.size, archive.extractfile(i).read()) for i in infos if i.isreg()
        ]
        return regular, [i.name for i in infos if not i.isreg()]


def run_tar(*arguments, **options):
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    return subprocess.run(["tar", *arguments], check=True, capture_output=True, env=environment, **options).stdout


WINDOWS = pytest.mark.parametrize("window", [contextlib.nullcontext(), read_at_most(100)], ids=["", "read-100"])
EACH_FORMAT = pytest.mark.parametrize("tar_format", FORMATS.values(), ids=FORMATS)

# --------------------------------------------------------------------------------------------- damage is an error


@WINDOWS
@EACH_FORMAT
@pytest.mark.parametrize("sized", [True, False])
def test_an_archive_cut_anywhere_is_an_error_after_all_whole_members(tar_format, window, sized):
    data = small_archive(tar_format)
    whole = read_all(data)
    with window:
        for cut in range(len(data)):
            members, error = read_until_error(Stream(data[:cut], sized=sized))

            assert type(error) is TruncatedShardError, f"cut at byte {cut}: {error!r}"
            assert error.offset == cut
            assert members == [each for each in whole if each.data_offset + each.size <= cut]


@EACH_FORMAT
def test_an_archive_cut_anywhere_is_an_error_also_when_nothing_of_it_is_wanted(tar_format):
    data = small_archive(tar_format)
    with read_at_most(100):
        for cut in range(len(data)):
            for sized in (True, False):
                _, error = read_until_error(Stream(data[:cut], sized=sized), wanted=lambda _: False)

                assert type(error) is TruncatedShardError, f"cut at byte {cut}: {error!r}"
                assert error.offset == cut or (error.offset > cut and not sized)


def assert_changes_are_noticed(data, changes):
    """Every change of the byte at an offset to another value must be an error, or give the same members."""
    whole = read_all(data)
    for at, other in changes:
        members, error = read_until_error(Stream(data[:at] + bytes([other]) + data[at + 1 :]))

        assert error is not None or members == whole, f"byte {at} changed to {other}"
        assert members == whole[: len(members)], f"byte {at} changed to {other}"


@WINDOWS
@EACH_FORMAT
def test_a_changed_byte_in_a_header_or_in_the_end_mark_is_an_error_or_changes_nothing(tar_format, window):
    data = small_archive(tar_format)
    blocks = [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]
    assert len(blocks) == {tarfile.USTAR_FORMAT: 3, tarfile.GNU_FORMAT: 4, tarfile.PAX_FORMAT: 6}[tar_format]
    changes = [
        (at, other)
        for block in [*blocks, len(data) - 1024, len(data) - 512]
        for at in range(block, block + 512)
        for other in {data[at] ^ 1, data[at] ^ 0x80, data[at] ^ 0xFF, 0x37} - {data[at]}
    ]
    with window:
        assert_changes_are_noticed(data, changes)


def test_every_other_value_of_every_byte_of_a_header_is_an_error_or_changes_nothing():
    data = small_archive(tarfile.USTAR_FORMAT)

    assert_changes_are_noticed(data, [(at, other) for at in range(512) for other in range(256) if other != data[at]])


@pytest.mark.parametrize("garbage", [b"\1" + bytes(511), b"x" * 512, bytes(512) + b"x" * 512, bytes(512)])
def test_anything_between_members_is_an_error(garbage):
    first, second = member("a.jpg", b"a" * 600), member("b.jpg", b"b")
    members, error = read_until_error(Stream(first + garbage + second + END_OF_ARCHIVE))

    assert [each.name for each in members] == ["a.jpg"]
    assert type(error) is ShardError
    assert error.offset in range(len(first), len(first + garbage) + 1)


def test_a_second_archive_behind_the_first_is_an_error_and_not_dropped():
    one, two = member("a.jpg", b"a") + END_OF_ARCHIVE, member("b.jpg", b"b") + END_OF_ARCHIVE
    members, error = read_until_error(Stream(one + bytes(9000) + two))

    assert [each.name for each in members] == ["a.jpg"]
    assert error.offset == len(one) + 9000
    assert "continues after its end-of-archive mark, expected zeros; join archives with tar --concatenate" in str(error)


def test_zeros_after_the_end_are_padding_but_not_for_ever():
    data = member("a.jpg", b"a") + END_OF_ARCHIVE
    endless = Stream(data, 1 << 50)

    assert len(read_all(data, 1)) == 1
    assert len(read_all(data, 64 << 20)) == 1
    _, error = read_until_error(endless)
    assert "still has zeros, expected at most 67,108,864 of them after the end; cut them off" in str(error)
    assert sum(endless.reads) < 66 << 20


@pytest.mark.parametrize("data", [b"", b"\0", bytes(512), bytes(1023)])
def test_nothing_and_too_few_zeros_are_no_archive(data):
    assert type(error_of(data)) is TruncatedShardError


def test_the_end_mark_alone_is_an_archive_without_members():
    assert read_all(END_OF_ARCHIVE) == []
    assert read_all(bytes(10_240)) == []


def test_what_is_no_tar_is_an_error_at_its_first_byte():
    error = error_of(b"\x1f\x8b\x08" + bytes(2000))

    assert str(error) == (
        f"shard {URL}: at byte 0 it has no tar header, or one whose checksum is wrong; fetch or write it again"
    )


def test_an_error_says_where_the_archive_ends_and_what_is_missing():
    data = member("a.jpg", b"a" * 5000)

    assert str(error_of(data[:2000])) == (
        f"shard {URL}: ends at or before byte 2,000, expected the data of member 'a.jpg' up to byte 5,512; "
        "fetch or write it again"
    )
    assert str(error_of(b"")) == f"shard {URL}: is empty, expected a header; fetch or write it again"


# ---------------------------------------------------------------------- no claim is trusted, and no sample is lost


def test_a_size_is_bounded_before_it_is_believed():
    unsized = Stream(header(size=3 * GIB) + bytes(1000), sized=False)
    sized = Stream(header(size=3 * GIB) + bytes(1000))

    assert type(read_until_error(unsized)[1]) is TruncatedShardError
    assert max(unsized.reads) <= 1 << 20
    assert type(read_until_error(sized)[1]) is TruncatedShardError
    assert len(sized.reads) == 1


@pytest.mark.parametrize("wanted", [None, lambda _: False])
def test_a_member_above_the_limit_is_an_error_that_names_the_limit(wanted):
    data = member("a.jpg", b"a" * 1000) + END_OF_ARCHIVE

    assert len(read_all(data, max_member_bytes=1000, wanted=wanted)) == 1
    assert str(error_of(data, max_member_bytes=999, wanted=wanted)) == (
        f"shard {URL}: at byte 0 it has a member 'a.jpg' of 1,000 bytes, expected at most 999; "
        "fetch or write it again, in smaller members"
    )
    assert "5,368,709,120 bytes, expected at most 4,294,967,296" in str(error_of(header(size=5 * GIB), 6 * GIB))


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
def test_an_extended_header_above_the_limit_is_an_error_before_it_is_read(kind):
    stream = Stream(header(size=(1 << 20) + 1, kind=kind), 2 << 20)
    _, error = read_until_error(stream)

    assert error.offset == 0
    assert "has an extended header of 1,048,577 bytes, expected at most 1,048,576" in str(error)
    assert sum(stream.reads) < 1 << 20


@pytest.mark.parametrize(
    "size",
    [
        b"-0000000001\0",
        b"+0000000001\0",
        b"000_0000001\0",
        b"0o000000001\0",
        b"00000000008\0",
        b"0000000000a\0",
        b"0000 000001\0",
        b"00000000001x",
        b"\xff" * 12,
        b"\x80" + b"\xff" * 11,
        b"\x81" + bytes(10) + b"\1",
        b" " * 12,
        b"\0" * 12,
    ],
)
@pytest.mark.parametrize("kind", [b"0", b"x"])
def test_a_size_that_is_no_number_is_an_error(size, kind):
    first = member("first", b"1")
    members, error = read_until_error(Stream(first + header(size=size, kind=kind) + bytes(512) + END_OF_ARCHIVE))

    assert [each.name for each in members] == ["first"]
    assert error.offset == len(first)
    assert "expected" in str(error)


@pytest.mark.parametrize(
    "body",
    [
        b"path=b.jpg\n",
        b"x5 path=b.jpg\n",
        b"-5 path=b.jpg\n",
        b" 14 path=b.jpg\n",
        b"14path=b.jpg\n",
        b"14 path=b.jpg",
        b"14 path=b.jpgx",
        b"15 path=b.jpg\n",
        b"13 path=b.jpg\n",
        b"1 path=b.jpg\n",
        b"0 path=b.jpg\n",
        b"99999999999999999999 path=b.jpg\n",
        b"9 path\nx=\n",
        b"11 =b.jpgx\n",
        b"9 patheq\n",
        b"\n",
        b"\0",
    ],
)
@pytest.mark.parametrize("before", [b"", record(b"mtime", b"1.5")])
@pytest.mark.parametrize("kind", [b"x", b"g"])
def test_a_malformed_pax_record_is_an_error_where_it_stands(kind, before, body):
    error = error_of(extension(kind, before + body) + header() + END_OF_ARCHIVE)

    assert "has a malformed PAX record, expected 'length keyword=value'" in str(error)
    assert error.offset == 512 + len(before)


def test_a_pax_size_that_is_no_number_is_an_error():
    for value in (b"-1", b"1.0", b"0x1", b" 1", b"1" * 21, b"\xd9\xa1"):
        assert "bytes, expected a number" in str(error_of(pax(b"size", value) + header() + bytes(512) + END_OF_ARCHIVE))


def test_names_that_are_empty_or_have_a_nul_are_errors():
    for entry in (
        header(name=b""),
        header(name=b"", prefix=b"folder"),
        extension(b"L", b"\0") + header(),
        extension(b"L", b"") + header(),
        extension(b"L", b"a\0b\0") + header(),
        pax(b"path", b"a\0b") + header(),
        pax(b"path", b"a\0") + header(),
    ):
        assert "has a member whose name is" in str(error_of(entry + END_OF_ARCHIVE))


def test_extended_headers_without_their_member_or_twice_are_errors():
    long_name = extension(b"L", b"n" * 101 + b"\0")

    assert "has an extended header without a member" in str(error_of(long_name + END_OF_ARCHIVE))
    assert "has a second header of type 'L'" in str(error_of(long_name * 2 + header() + END_OF_ARCHIVE))
    assert "has a second header of type 'x'" in str(error_of(pax(b"path", b"a") * 2 + header() + END_OF_ARCHIVE))


def test_members_that_would_be_read_wrongly_are_errors_that_say_what_to_do():
    for entry, problem in (
        (header(kind=b"S"), "a GNU sparse file; store it whole, without tar's --sparse"),
        (pax(b"GNU.sparse.major", b"1") + header(), "a GNU sparse file; store it whole, without tar's --sparse"),
        (header(kind=b"M"), "the rest of a file from an earlier volume; write the archive again without"),
        (pax(b"GNU.volume.filename", b"a", b"g") + header(), "the rest of a file from an earlier volume"),
        (header(kind=b"D"), "a folder of an incremental archive; write the archive again without tar's"),
        (header(kind=b"Z"), "of the unknown type 'Z'; write it again with tar --format=ustar"),
        (header(kind=b"\xff"), "of the unknown type 'ÿ'"),
        (
            pax(b"hdrcharset", b"ISO-IR 8859 1 1998") + header(),
            "in the character set b'ISO-IR 8859 1 1998', expected UTF-8",
        ),
    ):
        members, error = read_until_error(Stream(member("first", b"") + entry + END_OF_ARCHIVE))

        assert [each.name for each in members] == ["first"]
        assert problem in str(error)
        assert error.offset >= 512


fields = st.builds(
    header,
    name=st.binary(max_size=100),
    size=st.binary(min_size=12, max_size=12) | st.integers(0, 600),
    kind=st.sampled_from([bytes([kind]) for kind in b"00xxgLLK7\x005SMVZ"]),
    magic=st.sampled_from([b"ustar\x0000", b"ustar  \0", b""]),
    prefix=st.binary(max_size=167),
)
keywords = st.sampled_from([b"path", b"size", b"hdrcharset", b"mtime", b"GNU.sparse.name"])
bodies = st.binary(max_size=600) | st.lists(st.builds(record, keywords, st.binary(max_size=9))).map(b"".join)


@given(st.lists(fields | bodies.map(lambda body: extension(b"x", body)) | st.just(bytes(512)), max_size=5), bodies)
def test_whatever_headers_say_they_are_read_or_are_an_error_of_the_shard(blocks, rest):
    stream = Stream(*blocks, rest)
    members, error = read_until_error(stream)

    assert error is not None or b"".join([*blocks, rest]).endswith(END_OF_ARCHIVE)
    assert all(each.name and each.size == len(each.data) for each in members)


# ----------------------------------------------------------------------------- archives of other writers are read


@WINDOWS
@EACH_FORMAT
def test_what_python_writes_is_read_as_python_reads_it(tar_format, window):
    names = ["a.jpg", "b/c.d/e.seg.png", "./f.txt", "ünï/çødé/日本.jpg", "x" * 100, "d" * 80 + "/" + "f" * 90]
    if tar_format != tarfile.USTAR_FORMAT:
        names += ["y" * 101, "deeper/" * 40 + "z.cls", "ü" * 150 + ".jpg"]
    kinds = [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE]
    regular = [tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE]
    entries = []
    for number, name in enumerate(names):
        entries.append((name, regular[number % 3], bytes([number]) * (0, 1, 511, 512, 513, 70_000)[number % 6]))
        entries.append((f"other/{name}"[:99], kinds[number % 6], b""))
    data = tarfile_archive(tar_format, entries)
    skipped = []
    with window:
        members = read_all(data, skipped=lambda name, kind: skipped.append((name, kind)))

    assert (members, [name.rstrip("/") for name, _ in skipped]) == by_tarfile(data)
    assert [each.name for each in members] == names
    assert {kind for _, kind in skipped} == {
        "hard link", "symbolic link", "character device", "block device", "directory", "FIFO"
    }  # fmt: skip


@pytest.mark.parametrize("tar_format", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_what_gnu_tar_writes_is_read(tmp_path, tar_format):
    files = {"a.jpg": b"a" * 700, "b/ü.txt": b"", "b/" + "n" * 90: b"n" * 512}
    if tar_format != "v7":
        files["d" * 90 + "/" + "e" * 90] = b"e"
    if tar_format not in ("v7", "ustar"):
        files["f" * 180] = b"f" * 20_000
    for name, data in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    (tmp_path / "in/link").symlink_to("t" * 99)
    (tmp_path / "in/same").hardlink_to(tmp_path / "in/a.jpg")
    run_tar(f"--format={tar_format}", "--sort=name", "-cf", tmp_path / "x.tar", "-C", tmp_path / "in", ".")
    skipped = {}
    members = read_all((tmp_path / "x.tar").read_bytes(), skipped=skipped.__setitem__)

    assert {each.name.removeprefix("./"): each.data for each in members} == files
    assert (skipped["./link"], skipped["./same"], skipped["./b/"]) == ("symbolic link", "hard link", "directory")


def test_a_volume_label_is_skipped(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"a")
    skipped = []
    data = run_tar("--format=gnu", "--label=my shard", "-c", "-C", tmp_path, "a.jpg")
    members = read_all(data, skipped=lambda *what: skipped.append(what))

    assert [each.name for each in members] == ["a.jpg"]
    assert skipped == [("my shard", "volume label")]


@pytest.mark.parametrize(
    "size", [b"\x80" + bytes(10) + b"\5", b"         5 \0", b"000000000005", b"00000000005 ", b"5"]
)
def test_sizes_are_read_in_all_their_spellings(size):
    data = header(size=size.ljust(12, b"\0")) + b"12345" + bytes(507) + END_OF_ARCHIVE

    assert [each.data for each in read_all(data)] == [b"12345"]
    assert read_all(data) == by_tarfile(data)[0]


@pytest.mark.parametrize("make", ["gnu", "pax", "shardkit"])
def test_a_member_of_nine_gib_is_passed_over_and_what_follows_is_read(make):
    info = tarfile.TarInfo("big.bin")
    info.size = 9 * GIB
    big = member_header("big.bin", 9 * GIB) if make == "shardkit" else info.tobuf(FORMATS[make])
    assert len(big) == (512 if make == "gnu" else 1536)
    rest = member("small.cls", b"7") + END_OF_ARCHIVE
    for sized in (True, False):
        stream = Stream(big, 9 * GIB, rest, sized=sized)
        members = list(read_members(stream, wanted=lambda name: name.endswith("cls"), max_member_bytes=10 * GIB))

        assert members == [
            Member("big.bin", 0, len(big), 9 * GIB, None),
            Member("small.cls", len(big) + 9 * GIB, len(big) + 9 * GIB + 512, 1, b"7"),
        ]
        assert sum(stream.reads) < 100_000
    assert "9,663,676,416 bytes, expected at most 4,294,967,296" in str(error_of(big, 9 * GIB, rest))
    assert type(error_of(big, 8 * GIB, max_member_bytes=10 * GIB)) is TruncatedShardError


def test_a_pax_size_stands_above_the_header_and_moves_what_follows():
    data = pax(b"size", b"600") + header(b"a.jpg", 0) + b"a" * 600 + bytes(424) + member("b.jpg", b"b") + END_OF_ARCHIVE

    assert [(each.name, each.data) for each in read_all(data)] == [("a.jpg", b"a" * 600), ("b.jpg", b"b")]
    assert read_all(data) == by_tarfile(data)[0]


@WINDOWS
def test_global_pax_records_hold_until_a_local_one_or_another_global_one(window):
    everyone = pax(b"path", b"everyone.txt", b"g") + pax(b"size", b"3", b"g")
    data = everyone + (header(size=0) + b"abc" + bytes(509)) * 2
    data += pax(b"path", b"own.txt") + pax(b"comment", b"git writes these", b"g") + header() + b"own" + bytes(509)
    data += extension(b"L", b"long.txt\0") + header() + b"lon" + bytes(509)
    data += pax(b"path", b"") + header(b"taken/back.txt") + b"not" + bytes(509)
    data += header(kind=b"5", name=b"folder") + pax(b"path", b"", b"g") + header(b"z.jpg") + b"zzz" + bytes(509)
    data += pax(b"size", b"", b"g") + header(b"last.txt", 1) + b"!" + bytes(511) + END_OF_ARCHIVE
    with window:
        members = read_all(data)

    assert [(each.name, each.data) for each in members] == [
        ("everyone.txt", b"abc"),
        ("everyone.txt", b"abc"),
        ("own.txt", b"own"),
        ("long.txt", b"lon"),
        ("taken/back.txt", b"not"),
        ("z.jpg", b"zzz"),
        ("last.txt", b"!"),
    ]


def test_offsets_are_those_of_the_whole_member_and_of_its_data():
    first = member("a.jpg", b"a" * 600)
    second = extension(b"L", b"long.jpg\0") + extension(b"K", b"target\0")
    folder = pax(b"path", b"folder/") + header(kind=b"5")
    data = first + second + header(size=1) + b"b" + bytes(511) + folder + member("c.jpg", b"c") + END_OF_ARCHIVE
    members = read_all(data)

    assert [(each.name, each.header_offset, each.data_offset) for each in members] == [
        ("a.jpg", 0, 512),
        ("long.jpg", 1536, 4096),
        ("c.jpg", 6144, 6656),
    ]
    assert all(data[each.data_offset :].startswith(each.data) for each in members)


def test_the_prefix_counts_only_under_the_posix_magic():
    times = b"14371237772\x0014371237772\0"  # where GNU tar keeps them in incremental archives
    data = header(b"a.jpg", magic=b"ustar\x0000", prefix=b"folder") + header(b"b.jpg", magic=b"ustar  \0", prefix=times)
    data += header(b"c.jpg", magic=b"", prefix=b"junk") + header(b"d.jpg", magic=b"", kind=b"\0") + END_OF_ARCHIVE

    assert [each.name for each in read_all(data)] == ["folder/a.jpg", "b.jpg", "c.jpg", "d.jpg"]


def test_a_trailing_slash_makes_a_directory_of_the_old_type_only():
    skipped = []
    data = header(b"old/", kind=b"\0") + header(b"new/", kind=b"0") + END_OF_ARCHIVE
    members = read_all(data, skipped=lambda *what: skipped.append(what))

    assert [each.name for each in members] == ["new/"]
    assert skipped == [("old/", "directory")]


def test_a_long_name_that_is_cut_at_a_slash_in_its_header_is_still_a_file():
    # Python's tarfile takes it for a directory and drops its data.
    data = extension(b"L", b"deep/" * 30 + b"a.jpg\0") + header(b"deep/" * 20, 3, b"\0") + b"abc" + bytes(509)

    assert [(each.name, each.data) for each in read_all(data + END_OF_ARCHIVE)] == [("deep/" * 30 + "a.jpg", b"abc")]


def test_the_historic_signed_checksum_is_accepted():
    data = header("ü.jpg".encode(), checksum=lambda block: sum(byte - 256 * (byte > 127) for byte in block))

    assert [each.name for each in read_all(data + END_OF_ARCHIVE)] == ["ü.jpg"]


def test_checksums_are_right_up_to_the_largest_sum():
    name = b"\xff" * 100
    data = header(name, magic=b"ustar  \0", prefix=b"\xff" * 167)

    assert int(data[148:154], 8) > 1 << 16
    assert [os.fsencode(each.name) for each in read_all(data + END_OF_ARCHIVE)] == [name]


def test_names_that_are_not_utf8_are_read_with_surrogate_escapes():
    data = header(b"\xff.jpg") + pax(b"path", b"\xfe.jpg") + header() + extension(b"L", b"\xfd\0") + header()

    assert [each.name for each in read_all(data + END_OF_ARCHIVE)] == ["\udcff.jpg", "\udcfe.jpg", "\udcfd"]


# ------------------------------------------------------------------------------ only the wanted members are read


def test_data_that_is_not_wanted_is_skipped_and_hardly_read():
    data = (
        b"".join(member(f"{i}.jpg", b"j" * 100_000) + member(f"{i}.cls", b"%d" % i) for i in range(20)) + END_OF_ARCHIVE
    )
    everything = read_all(data)
    small = member("a.jpg", b"a") + member("a.cls", b"7") + member("b.jpg", b"b") + END_OF_ARCHIVE
    stream = Stream(data)
    members = list(read_members(stream, wanted=lambda name: name.endswith(".cls")))

    assert members == [m if m.name.endswith(".cls") else m._replace(data=None) for m in everything]
    assert [each.data for each in read_all(small, wanted=lambda name: name == "a.cls")] == [None, b"7", None]
    assert len(stream.skips) == 20
    assert sum(stream.reads) < 0.05 * len(data)


def test_reads_grow_until_they_are_large_and_no_data_is_asked_for_twice():
    data = member("a.jpg", b"a" * (9 << 20)) + member("b.jpg", b"b") * 3000 + END_OF_ARCHIVE
    stream = Stream(data)

    assert len(list(read_members(stream))) == 3001
    assert len(stream.reads) < 50
    assert max(stream.reads) == 512 << 10


def test_the_stream_is_left_open():
    stream = Stream(member("a.jpg", b"a") + END_OF_ARCHIVE)
    list(read_members(stream))

    assert not stream.is_closed


# ----------------------------------------------------------------------------------------------- writing archives

text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=80)
escaped = st.builds(lambda n: chr(0xDC80 + n), st.integers(0, 127))
part = text | escaped | st.builds(str.__mul__, text, st.integers(1, 20))
path = st.lists(part, min_size=1, max_size=5).map("/".join).map(lambda path: path.rstrip("/") + ".jpg")
contents = st.binary(max_size=40) | st.builds(bytes.__mul__, st.binary(min_size=1, max_size=2), st.integers(0, 2000))


@given(st.lists(st.tuples(path, contents), max_size=6), st.integers(1, 5000))
def test_what_is_written_is_read_back_by_shardkit_and_by_python(samples, window):
    data = b"".join(member(name, content) for name, content in samples)
    assert len(data) == sum(member_size(name, len(content)) for name, content in samples)
    data += END_OF_ARCHIVE
    with read_at_most(window):
        members = read_all(data)

    assert [(each.name, each.data) for each in members] == samples
    assert members == read_all(data) == by_tarfile(data)[0]
    assert by_tarfile(data)[1] == []


@given(st.lists(path.filter(lambda name: "\n" not in name), min_size=1, max_size=30, unique=True))
@examples(0.3)
def test_gnu_tar_lists_what_is_written(names):
    data = b"".join(member(name, os.fsencode(name)[:600]) for name in names) + END_OF_ARCHIVE
    listing = run_tar("-t", "--quoting-style=literal", input=data)

    assert os.fsdecode(listing).removesuffix("\n").split("\n") == names
    assert run_tar("-xO", input=data) == b"".join(os.fsencode(name)[:600] for name in names)


def test_webdataset_reads_what_is_written():
    from webdataset.tariterators import tar_file_iterator  # slow to import

    names = ["a.jpg", "ü/b.txt", "d" * 80 + "/" + "f" * 90 + ".cls", "n" * 180 + ".json"]
    data = b"".join(member(name, name.encode()) for name in names) + END_OF_ARCHIVE

    assert [each["fname"] for each in tar_file_iterator(io.BytesIO(data))] == names
    assert [each["data"] for each in tar_file_iterator(io.BytesIO(data))] == [name.encode() for name in names]


def test_headers_are_the_same_bytes_for_ever():
    plain = member_header("train/0001.jpg", 60_123)
    fixed = b"0000444\x000000000\x000000000\x00"
    zero = b"\x00"

    assert plain == (
        b"train/0001.jpg" + zero * 86 + fixed + b"00000165333\x0000000000000\x00010155\x00 0" + zero * 100
        + b"ustar\x0000" + zero * 247
    )  # fmt: skip
    assert member_header("p" * 60 + "/" + "n" * 60, 1) == (
        b"n" * 60 + zero * 40 + fixed + b"00000000001\x0000000000000\x00037744\x00 0" + zero * 100
        + b"ustar\x0000" + zero * 80 + b"p" * 60 + zero * 107
    )  # fmt: skip
    assert member_header("n" * 110, 8 * GIB) == (
        b"././@PaxHeader" + zero * 86 + fixed + b"00000000213\x0000000000000\x00010225\x00 x" + zero * 100
        + b"ustar\x0000" + zero * 247
        + b"120 path=" + b"n" * 110 + b"\n" + b"19 size=8589934592\n" + zero * 373
        + b"n" * 100 + fixed + b"00000000000\x0000000000000\x00033323\x00 0" + zero * 100
        + b"ustar\x0000" + zero * 247
    )  # fmt: skip


@given(path.filter(lambda name: len(os.fsencode(name)) <= 100), st.integers(0, 8 * GIB - 1))
def test_a_plain_header_is_that_of_pythons_tarfile(name, size):
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o444

    assert member_header(name, size) == info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")


@pytest.mark.parametrize(
    ("name", "headers"),
    [
        ("n" * 100, 512),
        ("n" * 101, 1536),
        ("p" * 155 + "/" + "n" * 100, 512),
        ("p" * 156 + "/" + "n" * 100, 1536),
        ("p" * 155 + "/" + "n" * 101, 1536),
        ("/" + "n" * 100, 1536),
        ("p/" * 70 + "n" * 100, 512),
        ("ü" * 50, 512),
        ("ü" * 51, 1536),
    ],
)
def test_pax_is_used_only_where_ustar_cannot_say_the_name(name, headers):
    assert len(member_header(name, 5)) == headers
    assert member_size(name, 5) == headers + 512
    assert [each.name for each in read_all(member(name, b"12345") + END_OF_ARCHIVE)] == [name]


@pytest.mark.parametrize("name", ["", "a\0b", "folder/", "\ud800", "\udcc3\udca9", "n" * (1 << 20)])
def test_a_name_that_would_be_read_back_otherwise_is_refused(name):
    with pytest.raises(ArgumentError, match="cannot have this name, expected 1 to 1,048,476 bytes, UTF-8 or escaped"):
        member_header(name, 0)


def test_the_longest_name_that_is_accepted_is_read_back():
    name = "n" * 1_048_476

    assert [each.name for each in read_all(member(name, b"") + END_OF_ARCHIVE)] == [name]


def test_a_negative_size_is_refused():
    with pytest.raises(ArgumentError, match="its size is -1 bytes, expected 0 or more"):
        member_header("a.jpg", -1)


def test_gnu_tar_and_python_read_a_member_of_nine_gib(tmp_path):
    with (tmp_path / "big.tar").open("wb") as file:
        file.write(member_header("big.bin", 9 * GIB))
        file.seek(9 * GIB, os.SEEK_CUR)
        file.write(member("small.cls", b"7") + END_OF_ARCHIVE)

    assert run_tar("-tf", tmp_path / "big.tar") == b"big.bin\nsmall.cls\n"
    with tarfile.open(tmp_path / "big.tar") as archive:
        assert [info.size for info in archive] == [9 * GIB, 1]
