"""Files appear whole or not at all, and a read returns all the bytes that were requested."""

import os
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import ArgumentError, DatasetExistsError, TruncatedShardError
from shardkit.storage.base import TEMPORARY_PREFIX, format_bytes, join, parse_bytes, split_url
from shardkit.storage.local import LocalStorage, local_path, remove_temporary_files
from shardkit.storage.registry import storage_for

STORAGE = LocalStorage()


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def refuse_links(*_):
    raise PermissionError("FAT has no links")


def write(url, data, *, meanwhile=lambda: None, overwrite=False):
    with STORAGE.create(url, overwrite=overwrite) as file:
        file.write(data)
        file.flush()
        meanwhile()


def test_a_file_appears_when_it_is_whole(tmp_path):
    with STORAGE.create(f"{tmp_path}/new/a.tar") as file:
        file.write(b"whole")
        assert STORAGE.list(f"{tmp_path}/new") == []

    assert names_in(tmp_path / "new") == ["a.tar"]
    assert (tmp_path / "new/a.tar").read_bytes() == b"whole"


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def fsync(descriptor):
        synced.append((os.fstat(descriptor).st_size, (tmp_path / "a.tar").exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write(f"{tmp_path}/a.tar", b"whole")

    assert synced[0] == (5, False)
    assert len(synced) == 2  # then the folder, so that the name is durable too
    assert synced[1][1]


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("overwrite", [False, True])
def test_after_any_exception_nothing_is_left_and_what_was_there_is_as_it_was(tmp_path, error, overwrite):
    if overwrite:
        (tmp_path / "a.tar").write_bytes(b"old")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def fail():
        raise error

    with pytest.raises(error):
        write(f"{tmp_path}/a.tar", b"half", meanwhile=fail, overwrite=overwrite)

    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_name_that_is_taken_is_refused_and_replaced_only_when_asked(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"old")
    with pytest.raises(DatasetExistsError, match=r"a\.tar: exists already; .*overwrite=True"):
        write(f"{tmp_path}/a.tar", b"new")
    assert (tmp_path / "a.tar").read_bytes() == b"old"
    write(f"{tmp_path}/a.tar", b"new", overwrite=True)

    assert (tmp_path / "a.tar").read_bytes() == b"new"


@pytest.mark.parametrize("has_links", [True, False])
def test_a_name_that_is_taken_meanwhile_is_not_replaced(tmp_path, monkeypatch, has_links):
    if not has_links:
        monkeypatch.setattr(os, "link", refuse_links)
    with pytest.raises(DatasetExistsError):
        write(f"{tmp_path}/a.tar", b"mine", meanwhile=lambda: (tmp_path / "a.tar").write_bytes(b"another's"))

    assert names_in(tmp_path) == ["a.tar"]
    assert (tmp_path / "a.tar").read_bytes() == b"another's"


def test_a_file_appears_also_where_there_are_no_links(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", refuse_links)
    write(f"{tmp_path}/a.tar", b"whole")

    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.tar": b"whole"}


def test_temporary_files_are_not_listed_and_can_be_removed(tmp_path):
    (tmp_path / f"{TEMPORARY_PREFIX}0123").touch()
    (tmp_path / "b").touch()
    (tmp_path / "a").touch()

    assert STORAGE.list(str(tmp_path)) == ["a", "b"]
    remove_temporary_files(str(tmp_path))
    assert names_in(tmp_path) == ["a", "b"]


def test_deleting_what_is_not_there_is_nothing(tmp_path):
    (tmp_path / "a").touch()
    STORAGE.delete(f"{tmp_path}/a")
    STORAGE.delete(f"{tmp_path}/a")

    assert STORAGE.list(str(tmp_path)) == STORAGE.list(f"{tmp_path}/nothing") == []


def test_the_version_of_a_file_changes_when_it_is_replaced(tmp_path):
    versions = []
    for _ in range(2):
        write(f"{tmp_path}/a", b"same", overwrite=True)
        info = STORAGE.info(f"{tmp_path}/a")
        versions.append(info.version)

    assert (info.url, info.size) == (f"{tmp_path}/a", 4)
    assert versions[0] != versions[1]


def test_a_range_is_all_of_it_or_an_error(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(range(100)))
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, start: real(descriptor, min(size, 7), start))  # as 2 GiB

    assert STORAGE.read_range(f"{tmp_path}/a", 10, 80) == bytes(range(10, 90))
    assert STORAGE.read_range(f"{tmp_path}/a", 100, 0) == b""
    with pytest.raises(TruncatedShardError, match=r"a: ends at byte 100, expected 20 bytes from byte 90") as caught:
        STORAGE.read_range(f"{tmp_path}/a", 90, 20)
    out = bytearray(80)
    STORAGE.read_into(f"{tmp_path}/a", 10, memoryview(out))
    assert out == bytes(range(10, 90))
    with pytest.raises(TruncatedShardError, match="ends at byte 100, expected 80 bytes from byte 30"):
        STORAGE.read_into(f"{tmp_path}/a", 30, memoryview(out))
    assert (caught.value.url, caught.value.offset) == (f"{tmp_path}/a", 100)


def test_a_stream_begins_where_it_is_told_and_skips_without_reading(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(100)))
    stream = STORAGE.open(f"{tmp_path}/a", 10)
    first = stream.read(5)
    stream.skip(70)

    assert (stream.url, stream.size, first) == (f"{tmp_path}/a", 100, bytes(range(10, 15)))
    assert stream.read(100) == bytes(range(85, 100))
    stream.skip(10)
    assert stream.read(1) == b""
    stream.close()
    stream.close()


def test_a_pipe_gives_all_that_is_asked_for_however_it_comes(monkeypatch):
    data = bytes(range(256)) * 1000
    read_end, write_end = os.pipe()

    def write():
        with os.fdopen(write_end, "wb", buffering=0) as file:
            for start in range(0, len(data), 1000):
                file.write(data[start : start + 1000])

    writer = threading.Thread(target=write)
    writer.start()
    with os.fdopen(read_end, "rb") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        stream = STORAGE.open("-")
        first = stream.read(100_000)
        stream.skip(100_000)
        rest = stream.read(1 << 20)
        stream.close()
    writer.join()

    assert stream.size is None
    assert (first, rest) == (data[:100_000], data[200_000:])


def test_local_urls_are_paths(tmp_path):
    (tmp_path / "x y.tar").write_bytes(b"1")

    assert STORAGE.read_range(f"file://{tmp_path}/x%20y.tar", 0, 1) == b"1"
    assert str(local_path("file://localhost/a")) == "/a"
    assert str(local_path("100%25.tar")) == "100%25.tar"
    with pytest.raises(ArgumentError, match="names the host 'server'; a local file is written file:///path"):
        local_path("file://server/a")


@pytest.mark.parametrize("url", ["odd://b/x", "hdfs:/x", "pipe:cat x"])
def test_what_cannot_be_reached_is_refused_with_what_to_do(url):
    with pytest.raises(
        ArgumentError, match=r"does not read or write \w+: URLs, nor does fsspec; copy the files to a local path"
    ):
        storage_for(url)


def test_local_files_need_no_options_and_leave_those_of_other_places_alone():
    assert storage_for("no such folder", {"key": 1}).list("no such folder") == []


@pytest.mark.parametrize("size", ["", "MB", "-1", "0", 0, -1, True, 1.5, "1 MBit", "1e3", "nan", None], ids=repr)
def test_what_is_no_size_is_refused(size):
    with pytest.raises(ArgumentError, match="is not a size; write a positive number of bytes, or text like '256MB'"):
        parse_bytes(size)


@given(number=st.integers(1, 999), unit=st.sampled_from("KMGTkmgt"), blank=st.sampled_from(["", " "]))
def test_a_unit_needs_no_b(number, unit, blank):
    """People write ``500G``; without the i it is the decimal unit, as with the B."""
    power = "KMGT".index(unit.upper()) + 1

    assert parse_bytes(f"{number}{blank}{unit}") == parse_bytes(f"{number}{unit}B") == number * 1000**power
    assert parse_bytes(f"{number}{blank}{unit}iB") == number * 1024**power


def test_sizes_are_read_and_shown_in_powers_of_ten():
    assert [parse_bytes(size) for size in ("1kb", " 2 MB ", "0.5GB", "1TB", "1 GiB", "7")] == [
        *[1000, 2_000_000, 500_000_000, 10**12, 1 << 30, 7],
    ]
    assert [format_bytes(size) for size in (0, 999, 1000, 99_950, 999_499, 999_500, 10**13)] == [
        *["0 B", "999 B", "1 KB", "100 KB", "999 KB", "1 MB", "10 TB"],
    ]


def test_a_url_is_its_folder_and_its_name():
    assert [split_url(url) for url in ("a", "/a", "b/a", "/b/a")] == [(".", "a"), ("/", "a"), ("b", "a"), ("/b", "a")]
    assert split_url("s3://bucket/a/b?c") == ("s3://bucket/a", "b?c")
    assert split_url("HTTPS://host/a/b%20c?d=e/f") == ("HTTPS://host/a?d=e/f", "b c")


@pytest.mark.parametrize(
    ("folder", "name", "url"),
    [
        ("a/", "b", "a/b"),
        ("", "b", "b"),
        ("s3://bucket/a", "b c%", "s3://bucket/a/b c%"),
        ("https://host/a/?d=e/f", "b c%#é?.tar", "https://host/a/b%20c%25%23%C3%A9%3F.tar?d=e/f"),
        ("https://host", "x/b.tar", "https://host/x/b.tar"),
        ("a", "https://host/b%20c", "https://host/b%20c"),
        ("a", "simplecache::s3://bucket/b", "simplecache::s3://bucket/b"),
    ],
)
def test_a_name_in_a_folder_is_quoted_where_urls_are_and_a_url_stays_as_it_is(folder, name, url):
    assert join(folder, name) == url
    if "://" not in name and folder:
        assert split_url(url)[1] == name.rpartition("/")[2]
