"""A block yields exactly its samples or an error, however its tar was written."""

import io
import pickle
import tarfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import ShardError
from shardkit.format.tar import END_OF_ARCHIVE, member_header, padding
from shardkit.format.tar_header import _pax_record, _ustar_header
from shardkit.reading.block import Block
from shardkit.sample import FieldSelection

SAMPLES = [
    ("a/0", {"cls": b"7", "jpg": b"x" * 700}),
    ("a/1", {"cls": b"8", "jpg": b""}),
    ("b/2", {"txt": b"two" * 200}),
]

keys = st.from_regex(r"\A[a-z0-9-]{1,12}(/[a-z]{1,90}){0,2}\Z")
fields = st.dictionaries(
    st.sampled_from(["cls", "jpg", "seg.png", "bild-ü", "txt_2"]), st.binary(max_size=1100), min_size=1
)
some_samples = st.lists(st.tuples(keys, fields), min_size=1, max_size=6, unique_by=lambda sample: sample[0])


def member(name, data):
    return member_header(name, len(data)) + data + bytes(padding(len(data)))


def block_of(samples):
    return b"".join(member(f"{key}.{field}", data) for key, sample in samples for field, data in sample.items())


def open_block(data, samples, **options):
    return Block(data, url="x.tar", shard=3, number=5, offset=10_240, samples=samples, **options)


def read(data, samples=3, selection=None):
    """Return the key and the fields of every sample."""
    block = open_block(data, samples)
    found = [block.sample(row, selection) for row in range(samples)]
    assert [sample.pop("__url__") for sample in found] == ["x.tar"] * samples
    assert block.keys() == [sample["__key__"] for sample in found]
    return [(sample.pop("__key__"), {field: bytes(data) for field, data in sample.items()}) for sample in found]


def strangers_tar(samples, form):
    """Return a tar written by Python, with a folder, a link and a file without a field before every sample."""
    with tarfile.open(fileobj=(file := io.BytesIO()), mode="w", format=form) as archive:
        for key, sample in samples:
            for kind, name in ((tarfile.DIRTYPE, f"{key}-folder"), (tarfile.SYMTYPE, f"{key}.link"), (None, "README")):
                info = tarfile.TarInfo(name)
                info.type = kind or tarfile.REGTYPE
                info.linkname = (
                    "elsewhere" * (1 if form == tarfile.USTAR_FORMAT else 20) if kind == tarfile.SYMTYPE else ""
                )
                archive.addfile(info)
            for field, data in sample.items():
                info = tarfile.TarInfo(f"{key}.{field}")
                info.size, info.mtime, info.uid = len(data), 1.5, 1000
                archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def cut_out(tar):
    """Return the bytes from the first sample's first header to the end of the last one's data."""
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        members = [m for m in archive.getmembers() if m.isreg() and "." in m.name.rpartition("/")[2]]
    return tar[members[0].offset : members[-1].offset_data + members[-1].size + padding(members[-1].size)]


@given(some_samples)
def test_samples_are_what_was_written(samples):
    assert read(block_of(samples), len(samples)) == samples


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("key", ["a/1", "long/" * 25 + "k", "ä/ö"])
def test_strangers_tars_are_read_and_what_is_no_field_is_left_out(form, key):
    samples = [(f"{key}{i}", {"cls": b"%d" % i, "jpg": b"x" * 600 * i}) for i in range(5)]

    assert read(cut_out(strangers_tar(samples, form)), 5) == samples


def test_a_name_that_ends_with_its_dot_does_not_make_fields_of_names_without_one():
    data = member("a.", b"1") + member("b", b"2") + member("c.", b"3")

    assert read(data, 2) == [("a", {"": b"1"}), ("c", {"": b"3"})]


def test_only_wanted_fields_come_and_nothing_is_copied():
    block = open_block(data := block_of(SAMPLES), 3)
    sample = block.sample(0, FieldSelection.parse({"image": "png;jpg"}))

    assert list(sample) == ["__key__", "__url__", "jpg"]
    assert sample["jpg"].obj is data
    assert block.nbytes == len(data)
    assert len(block) == 3


def test_index_columns_come_with_their_samples():
    block = open_block(block_of(SAMPLES), 3, columns={"label": [1, None, "two"]})

    assert [block.sample(row)["__columns__"]["label"] for row in range(3)] == [1, None, "two"]


def test_a_row_that_is_not_there_is_an_error():
    with pytest.raises(IndexError):
        open_block(block_of(SAMPLES), 3).sample(3)


def test_a_block_cut_anywhere_or_followed_by_anything_is_an_error():
    data = block_of(SAMPLES)

    for cut in range(0, len(data), 64):
        with pytest.raises(ShardError, match=r"x\.tar.* block 5 at byte 10,240"):
            read(data[:cut])
    for more in (b"\0", bytes(512), END_OF_ARCHIVE, member("c.cls", b"1"), member("b/2.cls", b"1") + b"x"):
        with pytest.raises(ShardError, match=r"x\.tar.* block 5 at byte 10,240"):
            read(data + more)


def test_a_flipped_bit_in_a_header_is_an_error_and_elsewhere_moves_nothing():
    data = block_of(SAMPLES)
    layout = open_block(data, 3)._walk()

    for at in range(0, len(data), 3):
        flipped = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        try:
            found = open_block(flipped, 3)._walk()
        except ShardError as error:
            assert error.url == "x.tar"  # noqa: PT017 - either an error or the samples
            assert 10_240 <= error.offset < 10_240 + len(data) + 1024  # noqa: PT017
        else:
            assert found == layout, at


@pytest.mark.parametrize("samples", [0, 2, 4, 1024])
def test_another_number_of_samples_than_the_index_says_is_an_error(samples):
    with pytest.raises(ShardError, match=f"has 3 samples in 5,632 bytes, its index says {samples:,} in 5,632") as error:
        open_block(block_of(SAMPLES), samples).keys()

    assert (error.value.url, error.value.offset) == ("x.tar", 10_240)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (member("a.cls", b"1") + member("a.CLS", b"2"), r"at byte 1,024 .*a second field 'cls' of sample 'a'"),
        (member("a.__key__", b"1"), r"at byte 0 .*would be the field '__key__'"),
        (b"x" * 1024, "at byte 0 it has no tar header"),
        (member("a.cls", b"1") + member_header("b.cls", 5000), r"ends at or before byte 2,560.*'b.cls'"),
        (member("a.cls", b"1") + _ustar_header(b"d", 0, kind=b"S"), "GNU sparse"),
        (_ustar_header(b"x", 9, kind=b"x") + b"12 path=a" + bytes(503), "malformed PAX record"),
        (bytes(1024), "has 0 samples in 0 bytes"),
        (b"", "has 0 samples in 0 bytes"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(data, problem):
    with pytest.raises(ShardError, match=rf"^shard x\.tar.? block 5 at byte 10,240.*{problem}") as error:
        open_block(data, 1).sample(0)

    assert error.value.url == "x.tar"
    assert error.value.offset >= 10_240


def test_a_member_of_eight_gibibytes_is_not_believed():
    body = _pax_record(b"size", b"%d" % (1 << 40))
    data = _ustar_header(b"x", len(body), kind=b"x") + body + bytes(padding(len(body))) + member("a.cls", b"1")

    with pytest.raises(ShardError, match="1,099,511,627,776 bytes, expected at most"):
        open_block(data, 1).keys()


def test_threads_share_a_block():
    block = open_block(block_of(SAMPLES * 1 + [(f"k{i}", {"cls": b"%d" % i}) for i in range(300)]), 303)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda row: bytes(block.sample(row)["cls"]), [row % 300 + 3 for row in range(3000)]))

    assert found == [b"%d" % (row % 300) for row in range(3000)]


def test_a_block_goes_to_another_process_before_and_after_it_was_walked():
    block = open_block(block_of(SAMPLES), 3)
    before = pickle.loads(pickle.dumps(block))
    expected = block.keys()

    assert before.keys() == pickle.loads(pickle.dumps(block)).keys() == expected
