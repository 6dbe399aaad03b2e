"""Files become samples by predictable rules: none is lost, none is merged, and none is read with other contents."""

import json
import os

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import ArgumentError, SourceError
from shardkit.sample import check_key, split_name
from shardkit.sources.filenames import escape_key
from shardkit.sources.folders import FileFolder, ImageFolder, ListedSource


def make(folder, files):
    """Write files, a mapping of paths to contents or a list of paths, and return the folder."""
    for path in files:
        at = os.path.join(os.fsencode(folder), path if isinstance(path, bytes) else path.encode())  # noqa: PTH118
        os.makedirs(os.path.dirname(at), exist_ok=True)  # noqa: PTH103, PTH120
        with open(at, "wb") as file:  # noqa: PTH123
            file.write(files[path] if isinstance(files, dict) else b"image")
    return folder


def samples_of(source):
    samples = [source.read(i) for i in range(len(source))]
    for i, sample in enumerate(samples):
        assert source.key(i) == sample["__key__"]
        encoded = {"cls": lambda value: str(value).encode() if isinstance(value, int) else value}
        sizes = [(f, len(encoded.get(f, bytes)(v))) for f, v in sorted(sample.items()) if not f.startswith("__")]
        assert source.sizes(i) == sizes
    return samples


def test_folders_are_classes_in_the_order_of_their_names(tmp_path):
    source = ImageFolder(make(tmp_path, {"dog/1.jpg": b"d1", "cat/1.jpg": b"c1", "cat/deep/2.png": b"c2"}))

    assert isinstance(source, ListedSource)
    assert source.classes == ("cat", "dog")
    assert samples_of(source) == [
        {"__key__": "cat/1", "__source__": "cat/1.jpg", "jpg": b"c1", "cls": 0},
        {"__key__": "cat/deep/2", "__source__": "cat/deep/2.png", "png": b"c2", "cls": 0},
        {"__key__": "dog/1", "__source__": "dog/1.jpg", "jpg": b"d1", "cls": 1},
    ]


@pytest.mark.parametrize(
    ("name", "key", "field"),
    [
        ("a/x.JPEG", "a/x", "jpg"),
        ("a/x.jpe", "a/x", "jpg"),
        ("a/x.Tiff", "a/x", "tif"),
        ("a/x.pgm", "a/x", "pgm"),
        ("v1.5/x.jpg", "v1.5/x", "jpg"),
        ("a/x.1.5.jpg", "a/x%2E1%2E5", "jpg"),
        ("a/100%.jpg", "a/100%25", "jpg"),
        ("a/__x__.jpg", "a/%5F_x__", "jpg"),
        ("__x__/x.jpg", "%5F_x__/x", "jpg"),
        ("a/ü 貓.jpg", "a/ü 貓", "jpg"),
        ("a/x\n.jpg", "a/x%0A", "jpg"),
        (b"a/x\xff.jpg", "a/x%FF", "jpg"),
    ],
)
def test_every_file_name_becomes_a_key_that_can_be_written_and_read(tmp_path, name, key, field):
    (sample,) = samples_of(ImageFolder(make(tmp_path, [name])))

    assert sample["__key__"] == check_key(key)
    assert sample["__source__"] == os.fsdecode(name)
    assert sample[field] == b"image"
    assert split_name(f"{key}.{field}") == (key, field)


names = st.lists(
    st.text("aAé._%\x01\udcff貓 ", min_size=1, max_size=6).filter(lambda part: part not in (".", "..")),
    min_size=1,
    max_size=3,
).map("/".join)


@given(st.sets(names, max_size=10))
def test_different_names_have_different_keys_that_can_all_be_written(stems):
    assert len({check_key(escape_key(stem)) for stem in stems}) == len(stems)


@pytest.mark.parametrize("files", [["c/a.jpg", "c/a.png"], ["c/d.JPG", "c/d.jpg"], ["c/d.jpeg", "c/d.jpg"]])
def test_images_that_differ_in_their_extension_alone_are_refused(tmp_path, files):
    with pytest.raises(SourceError, match=rf"{files[0]} and {files[1]} would both be the sample 'c/.'.* Rename one"):
        ImageFolder(make(tmp_path, files))


@pytest.mark.parametrize("fields", [None, ("jpg", "tif"), ("jpeg", "Tiff")])
def test_a_folder_of_files_names_kinds_of_images_as_a_folder_of_images_does(tmp_path, fields):
    make(tmp_path, ["a.jpeg", "b.JPG", "c.jpe", "d.TIFF"])

    found = {s["__key__"]: [f for f in s if f[0] != "_"] for s in samples_of(FileFolder(tmp_path, fields=fields))}
    assert found == {"a": ["jpg"], "b": ["jpg"], "c": ["jpg"], "d": ["tif"]}
    with pytest.raises(SourceError, match=r"a\.jpeg and a\.jpg would both be the field 'jpg'"):
        FileFolder(make(tmp_path, ["a.jpg"]), fields=fields)


def test_what_is_no_image_is_ignored_by_name_and_what_is_hidden_is_not_seen(tmp_path):
    source = ImageFolder(make(tmp_path, ["c/a.jpg", "c/b.txt", "c/._a.jpg", ".git/c/a.jpg", "c/Thumbs.db", "c/noext"]))

    assert len(source) == 1
    assert source.ignored == ("c/Thumbs.db", "c/b.txt", "c/noext")


@pytest.mark.parametrize("make_source", [ImageFolder, FileFolder])
def test_a_folder_with_nothing_to_pack_is_an_error(tmp_path, make_source):
    with pytest.raises(SourceError, match=r"has no (images|files)"):
        make_source(tmp_path)
    with pytest.raises(SourceError, match="is not a folder"):
        make_source(tmp_path / "nowhere")


def test_an_image_in_no_class_folder_is_an_error(tmp_path):
    with pytest.raises(SourceError, match=r"the image b.jpg is in no class folder; move it into one, or pass labels="):
        ImageFolder(make(tmp_path, ["a/a.jpg", "b.jpg"]))


def write_labels(folder, kind, labels):
    if kind == "dict":
        return labels
    path = folder / f"labels.{kind}"
    if kind == "json":
        path.write_text(json.dumps(labels))
    else:
        path.write_text("\ufeffpath,label,note\n" + "".join(f'"{name}",{label},x\n' for name, label in labels.items()))
    return path


@pytest.mark.parametrize("kind", ["dict", "csv", "json"])
@pytest.mark.parametrize("values", [(3, -1), ("dog", "cat")])
def test_labels_are_taken_by_path_or_by_key(tmp_path, kind, values):
    make(tmp_path / "images", ["a,b.jpg", "sub/c.png"])
    labels = write_labels(tmp_path, kind, {"a,b.jpg": values[0], "sub/c": values[1], "unused": values[1]})
    source = ImageFolder(tmp_path / "images", labels=labels)

    assert source.classes == (("cat", "dog") if values[0] == "dog" else ())
    assert [s["cls"] for s in samples_of(source)] == ([1, 0] if values[0] == "dog" else [3, -1])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({}, "a.jpg has no label; label it by its path or its key 'a'"),
        ({"a.jpg": 1.5, "b": 1}, "a.jpg has the label 1.5, expected a number or a name"),
        ({"a.jpg": True, "b": 1}, "a.jpg has the label True"),
        ({"a.jpg": 1, "b": "cat"}, "labels are partly numbers, partly names"),
        ({"a.jpg": 1, "a": 2, "b": 1}, "a.jpg has the label 1 by its path and 2 by its key 'a'; leave one of them out"),
    ],
)
def test_wrong_labels_are_errors(tmp_path, labels, message):
    with pytest.raises(SourceError, match=message):
        ImageFolder(make(tmp_path, ["a.jpg", "b.jpg"]), labels=labels)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", "[1]", "holds a list, expected an object"),
        ("x.json", "{", "cannot be read as JSON"),
        ("x.json", '{"a": 1, "b": 2, "a": 3}', "'a' is in it twice"),
        ("x.csv", "path,label\na.jpg\n", "line 2: expected a path not named before and its label"),
        ("x.csv", "path,label\na.jpg,1\na.jpg,2\n", "line 3: expected a path not named before and its label"),
        ("x.csv", "path,label\na.jpg,a cat, asleep\n", "line 2: .* put quotes around values that contain a comma"),
        ("x.csv", "path,label\na.jpg,1\nb.jpg,01\n", "the same number, written in two ways"),
        ("x.csv", 'path,label\n"a.jpg"x,1\n', "is not a CSV file in UTF-8"),
        ("x.csv", "a.jpg,1\n", "its first line is 'a.jpg,1', expected a header"),
        ("x.csv", "", "its first line is '', expected a header"),
        ("x.csv", "path,label\n1,a.jpg\n", "a.jpg has no label, and is itself a label in the table"),
        ("x.json", '{"images": [], "annotations": []}', r"'images' is \[\], expected a whole number or a name"),
        ("x.json", '{"a.jpg": ["a cat", "a pet"]}', "expected a whole number or a name"),
        ("x.json", '{"a.jpg": true}', "'a.jpg' is true, expected a whole number or a name"),
        ("x.txt", "", r"expected a mapping, a .csv or a .json file"),
    ],
)
def test_a_table_of_labels_that_is_none_is_an_error(tmp_path, name, content, message):
    make(tmp_path / "images", ["a.jpg"])
    (tmp_path / name).write_text(content)

    with pytest.raises((SourceError, ArgumentError), match=message):
        ImageFolder(tmp_path / "images", labels=tmp_path / name)


def test_files_are_grouped_by_their_names(tmp_path):
    files = {"a.jpg": b"1", "a.txt": b"2", "sub/a.TXT": b"3", "b.json": b"4"}

    assert samples_of(FileFolder(make(tmp_path, files))) == [
        {"__key__": "a", "__source__": "a.jpg", "jpg": b"1", "txt": b"2"},
        {"__key__": "b", "__source__": "b.json", "json": b"4"},
        {"__key__": "sub/a", "__source__": "sub/a.TXT", "txt": b"3"},
    ]


def test_a_file_name_that_could_mean_two_things_is_an_error_until_the_fields_are_said(tmp_path):
    make(tmp_path, {"a.seg.png": b"1", "a.png": b"2", "v1.5.png": b"3", "notes.md": b"4"})

    with pytest.raises(
        SourceError, match=r'a.seg.png: has several dots, .* fields=\("seg.png",\) or fields=\("png",\)'
    ):
        FileFolder(tmp_path)
    source = FileFolder(tmp_path, fields=("png", ".Seg.png"))
    assert samples_of(source) == [
        {"__key__": "a", "__source__": "a.png", "png": b"2", "seg.png": b"1"},
        {"__key__": "v1%2E5", "__source__": "v1.5.png", "png": b"3"},
    ]
    assert source.ignored == ("notes.md",)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["a.jpg", "a.JPG"], "a.JPG and a.jpg would both be the field 'jpg' of one sample"),
        (["noext"], "noext: has no extension"),
        (["a."], "a.: has no extension"),
        (["a.j pg"], "a.j pg: cannot be packed under this name .*'j pg'"),
        (["a._x"], "a._x: cannot be packed under this name"),
    ],
)
def test_files_that_cannot_be_told_apart_or_named_are_errors(tmp_path, files, message):
    with pytest.raises(SourceError, match=message):
        FileFolder(make(tmp_path, files))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("jpg", r"fields must be a sequence of texts, got the text 'jpg'; write \(\"jpg\",\)"),
        ([1], r"fields must be a sequence of texts, got \[1\]"),
        (5, "fields must be a sequence of texts, got 5"),
    ],
)
def test_fields_that_are_no_sequence_of_texts_are_refused(tmp_path, fields, message):
    with pytest.raises(ArgumentError, match=message):
        FileFolder(make(tmp_path, ["a.jpg"]), fields=fields)


def change_size(path):
    path.write_bytes(b"longer than before")


def change_content(path):
    path.write_bytes(b"IMAGE")


@pytest.mark.parametrize("change", [change_size, change_content, os.unlink, lambda path: os.truncate(path, 2)])
def test_a_file_that_changed_since_is_an_error_when_it_is_read_and_changes_the_fingerprint(tmp_path, change):
    source = ImageFolder(make(tmp_path, ["c/a.jpg", "c/b.jpg"]))
    os.utime(tmp_path / "c/a.jpg", ns=(0, 0))
    source = ImageFolder(tmp_path)
    before = source.fingerprint()
    change(tmp_path / "c/a.jpg")

    with pytest.raises(SourceError, match=r"a.jpg: (had 5 bytes when the pack began and was written to|was there)"):
        source.read(0)
    assert source.read(1)["jpg"] == b"image"
    assert ImageFolder(tmp_path).fingerprint() != before


def test_the_fingerprint_is_that_of_keys_labels_and_files(tmp_path):
    make(tmp_path, ["a/1.jpg", "b/2.jpg"])
    first = ImageFolder(tmp_path).fingerprint()

    assert ImageFolder(tmp_path).fingerprint() == first
    assert ImageFolder(tmp_path, labels={"a/1": 0, "b/2": 0}).fingerprint() != first
    (tmp_path / "b").rename(tmp_path / "c")
    assert ImageFolder(tmp_path).fingerprint() != first


def test_links_are_followed_but_not_in_circles(tmp_path):
    make(tmp_path / "real", ["1.jpg"])
    make(tmp_path / "images", ["b/2.jpg"])
    (tmp_path / "images/a").symlink_to(tmp_path / "real")
    (tmp_path / "images/b/3.jpg").symlink_to(tmp_path / "real/1.jpg")

    assert [s["__key__"] for s in samples_of(ImageFolder(tmp_path / "images"))] == ["a/1", "b/2", "b/3"]
    (tmp_path / "images/c").symlink_to(tmp_path / "real")
    with pytest.raises(SourceError, match="was reached twice by links"):
        ImageFolder(tmp_path / "images")
    (tmp_path / "images/c").unlink()
    (tmp_path / "images/b/up").symlink_to(tmp_path / "images")
    with pytest.raises(SourceError, match="was reached twice by links"):
        ImageFolder(tmp_path / "images")


@pytest.mark.parametrize("source", [ImageFolder, FileFolder])
def test_what_is_no_folder_is_an_error(tmp_path, source):
    make(tmp_path, ["a.jpg"])

    for folder in (tmp_path / "a.jpg", tmp_path / "nowhere"):
        with pytest.raises(SourceError, match="is not a folder; name one that holds the files to pack"):
            source(folder)
    for folder in (3, None, b"photos", ["photos"]):
        with pytest.raises(ArgumentError, match="folder must be text or a path, got"):
            source(folder)
    with pytest.raises(ArgumentError, match="folder is empty, expected a path"):
        source("")


@pytest.mark.parametrize("labels", [3, b"labels.csv", [("a", 1)], pa.table({"path": ["a.jpg"], "label": [1]})])
def test_labels_that_are_neither_a_mapping_nor_a_file_are_refused(tmp_path, labels):
    with pytest.raises(ArgumentError, match=f"labels is {type(labels).__name__}, expected a mapping of path or key"):
        ImageFolder(make(tmp_path, ["a.jpg"]), labels=labels)


@pytest.mark.parametrize("url", ["s3://bucket/photos", "https://me:secret@host/photos", "memory://photos"])
def test_what_is_elsewhere_is_an_error_that_says_how_to_pack_it(tmp_path, url):
    for source in (ImageFolder, FileFolder):
        with pytest.raises(SourceError, match=r"photos: is not on this machine.* a generator.*ShardSource") as caught:
            source(url)
        assert "secret" not in str(caught.value)
    with pytest.raises(SourceError, match=r"photos\.csv: labels are read from this machine only; copy the file"):
        ImageFolder(make(tmp_path, ["a.jpg"]), labels=f"{url}.csv")


def test_numpys_whole_numbers_are_labels(tmp_path):
    source = ImageFolder(make(tmp_path, ["a.jpg"]), labels={"a.jpg": np.int64(3)})

    assert source.read(0)["cls"] == 3
    assert type(source.read(0)["cls"]) is int


def test_a_label_that_is_given_twice_alike_is_that(tmp_path):
    source = ImageFolder(make(tmp_path, ["a.jpg"]), labels={"a": "cat", "a.jpg": "cat"})

    assert source.classes == ("cat",)


@pytest.mark.parametrize("target", ["nowhere", "b.jpg"])
def test_a_link_that_cannot_be_followed_is_an_error_that_says_so(tmp_path, target):
    make(tmp_path, ["c/a.jpg"])
    (tmp_path / "c/b.jpg").symlink_to(target)

    with pytest.raises(SourceError, match=rf"b\.jpg: is a link to '{target}', which cannot be followed \("):
        ImageFolder(tmp_path)


def test_what_cannot_be_looked_at_is_an_error_and_not_left_out(tmp_path):
    make(tmp_path, ["c/a.jpg"])
    os.mkfifo(tmp_path / "c/b.jpg")
    with pytest.raises(SourceError, match=r"b\.jpg: is neither a file nor a folder"):
        ImageFolder(tmp_path)
