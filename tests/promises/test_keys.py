"""A key and its split never change: added files change neither, or are an error that names them."""

import re
import tempfile
import unicodedata
from pathlib import Path

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from shardkit import FileFolder, ImageFolder, ShardkitError, ShardSource, pack

SPLITS = {"train": 0.5, "val": 0.5}
FIELDS = ("jpg", "png", "seg.png", "txt", "cls")
SOURCES = {
    "images": ImageFolder,
    "files": FileFolder,
    "fields": lambda folder: FileFolder(folder, fields=FIELDS),
}

folders = st.sampled_from(["cat", "dog", "cat/deep", "Cat", "é", unicodedata.normalize("NFD", "é"), "v1.5"])
stems = st.sampled_from(
    [
        "0",
        "1",
        "2",
        "x",
        "X",
        "é",
        unicodedata.normalize("NFD", "é"),
        "a%2Ejpg",
        "a",
        "a.b",
        "a.seg",
        ".hidden",
        "__x__",
    ]
)
endings = st.sampled_from([".jpg", ".JPG", ".jpeg", ".png", ".txt", ".cls", ".seg.png", ".jpg.txt", ".md"])
trees = st.sets(st.builds("{}/{}{}".format, folders, stems, endings), min_size=1, max_size=5)
plain = st.sets(
    st.builds("{}/{}{}".format, folders, st.sampled_from("012xXé"), st.sampled_from([".jpg", ".png"])),
    min_size=1,
    max_size=5,
)


def write(folder, paths):
    for path in paths:
        file = Path(folder, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(path.encode())


def files_of(samples):
    """Return the key of the sample made from each file; a file contains its own path."""
    values = ((value, sample["__key__"]) for sample in samples for value in sample.values())
    return {value.decode(): key for value, key in values if isinstance(value, bytes) and b"/" in value}


def keys_of(source):
    """Return the sample's key for each file of a folder."""
    return files_of(source.read(i) for i in range(len(source)))


def packed(source, out):
    """Pack into splits; return the sample's key and the split for each file."""
    pack(source, out, splits=SPLITS, compression="none", num_workers=1, progress=False)
    return {
        path: (key, split)
        for split in SPLITS
        if list(Path(out, split).glob("*.tar"))
        for path, key in files_of(ShardSource(f"{out}/{split}")).items()
    }


@pytest.mark.parametrize("kind", SOURCES)
@given(first=trees | plain, more=trees)
def test_files_that_are_added_change_no_key(kind, first, more):
    """Every file keeps its key; an error that is not only about the new files names two conflicting files."""
    with tempfile.TemporaryDirectory() as folder:
        write(f"{folder}/first", first)
        write(f"{folder}/more", more)
        write(f"{folder}/both", first | more)
        try:
            before = keys_of(SOURCES[kind](f"{folder}/first"))
        except ShardkitError:
            event("the first files are refused")
            return
        try:
            after = keys_of(SOURCES[kind](f"{folder}/both"))
        except ShardkitError as error:
            event("both are refused")
            named = [path for path in first | more if re.search(rf"\b{re.escape(path)}(?!\.?\w)", str(error))]
            if len(named) < 2:  # then the file is wrong by itself, whatever other files there are
                with pytest.raises(ShardkitError):
                    SOURCES[kind](f"{folder}/more")
        else:
            event("more files" if len(after) > len(before) else "nothing new")
            assert before.items() <= after.items()


@given(first=plain, more=trees)
def test_files_that_are_added_move_no_sample_to_another_split(first, more):
    with tempfile.TemporaryDirectory() as folder:
        write(f"{folder}/photos", first)
        try:
            before = packed(ImageFolder(f"{folder}/photos"), f"{folder}/before")
        except ShardkitError:
            event("the first files are refused")
            return
        write(f"{folder}/photos", more)
        try:
            after = packed(ImageFolder(f"{folder}/photos"), f"{folder}/after")
        except ShardkitError:
            event("both are refused")
            return
        event("more files" if len(after) > len(before) else "nothing new")
        assert before.items() <= after.items()


def test_a_dataset_that_is_packed_with_another_keeps_keys_and_splits(tmp_path):
    first, more = [f"a/{i}.jpg" for i in range(40)], [f"b/{i}.png" for i in range(40)]
    for name, paths in (("first", first), ("more", more)):
        write(tmp_path / name, paths)
        pack(FileFolder(tmp_path / name), tmp_path / f"{name}-shards", progress=False)
    before = packed(ShardSource(tmp_path / "first-shards"), tmp_path / "before")
    after = packed(ShardSource([tmp_path / "first-shards", tmp_path / "more-shards"]), tmp_path / "after")

    assert (len(before), len(after)) == (40, 80)
    assert before.items() <= after.items()
    assert before == packed(FileFolder(tmp_path / "first"), tmp_path / "loose")


def test_a_second_image_of_a_name_is_refused_and_moves_none_of_400(tmp_path):
    """A regression test: 57 of 400 pictures changed their split when 100 were added."""
    write(tmp_path / "photos", [f"a/{i:04d}.jpg" for i in range(400)])
    before = packed(ImageFolder(tmp_path / "photos"), tmp_path / "before")
    write(tmp_path / "photos", [f"b/{i:04d}.png" for i in range(0, 400, 4)])
    after = packed(ImageFolder(tmp_path / "photos"), tmp_path / "after")
    write(tmp_path / "photos", [f"a/{i:04d}.png" for i in range(0, 400, 4)])

    assert before.items() <= after.items()
    with pytest.raises(
        ShardkitError, match=r"a/0000\.jpg and a/0000\.png would both be the sample 'a/0000'; .* Rename"
    ):
        ImageFolder(tmp_path / "photos")


def test_datasets_that_were_packed_with_endings_in_keys_are_read_and_packed_as_they_are(tmp_path):
    """Version 0.1 gave two pictures with the same name the keys ``a%2Ejpg`` and ``a%2Epng``."""
    pack(
        [{"__key__": "c/a%2Ejpg", "jpg": b"1"}, {"__key__": "c/a%2Epng", "png": b"2"}], tmp_path / "old", progress=False
    )
    pack(ShardSource(tmp_path / "old"), tmp_path / "new", progress=False)

    assert {s["__key__"] for s in ShardSource(tmp_path / "new")} == {"c/a%2Ejpg", "c/a%2Epng"}


def test_names_that_differ_in_case_or_unicode_form_alone_are_samples_of_their_own(tmp_path):
    names = ["é", unicodedata.normalize("NFD", "é"), "x", "X"]
    write(tmp_path, [f"c/{name}.jpg" for name in names])

    assert keys_of(ImageFolder(tmp_path)) == {f"c/{name}.jpg": f"c/{name}" for name in names}
