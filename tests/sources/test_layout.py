"""Labels and samples are never guessed: a misleading layout or table is refused or read correctly."""

import csv
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import SourceError
from shardkit.sources.folders import FileFolder, ImageFolder
from shardkit.sources.layout import check_alike, check_class_folders, check_parallel, check_splits

TRAIN = st.sampled_from(["train", "Train", "TRAIN", "training", "train2017", "train_images", "train-set"])
OTHERS = st.sampled_from(
    ["val", "valid", "validation", "Val", "val2017", "test", "Test_Images", "testing", "dev", "eval"]
)
CLASSES = ["n01440764", "cat", "dog", "Dandie Dinmont", "é", "trainer", "testimony", "valley", "devil", "train station"]
classes = st.lists(st.sampled_from(CLASSES), min_size=1, max_size=4, unique=True)
numbers = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)
IMAGES = st.sampled_from(
    ["images", "Images", "image", "img", "imgs", "JPEGImages", "rgb", "train_images", "leftImg8bit"]
)
TARGETS = st.sampled_from(
    [
        *["masks", "Masks", "labels", "annotations", "SegmentationClass", "gtFine", "depth", "ground_truth"],
        *["train_masks", "thermal", "Infrared", "disparities", "instance_maps", "alpha", "landmarks", "lidar"],
    ]
)


def write(folder, paths):
    for path in paths:
        file = Path(folder, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"image")
    return folder


@given(
    train=TRAIN,
    others=st.lists(OTHERS, min_size=1, max_size=3, unique=True),
    classes=classes,
    below=st.sampled_from(["", "Data/CLS-LOC/"]),
)
def test_splits_are_never_classes(train, others, classes, below):
    paths = [f"{below}{split}/{name}/1.jpg" for split in (train, *others) for name in classes]

    with pytest.raises(SourceError) as caught:
        check_class_folders("photos", paths)
    for split in (train, *others):
        assert f"'shardkit pack {shlex.quote(f'photos/{below}{split}')} SHARDS/{split}'" in str(caught.value)
    with pytest.raises(SourceError, match="are splits"):
        check_splits("photos", paths, classes=False)
    flat = [f"{below}{train}/{name}/1.jpg" for name in classes] + [f"{below}{split}/1.jpg" for split in others]
    with pytest.raises(SourceError, match="are splits"):
        check_class_folders("photos", flat)


@given(classes=classes, splits=st.lists(TRAIN | OTHERS, min_size=1, max_size=1), more=st.booleans())
def test_one_split_alone_is_no_class_either(classes, splits, more):
    """But a folder ``train`` among those of other vehicles is a class."""
    (split,) = splits
    alone = [f"{split}/{name}/1.jpg" for name in classes]

    with pytest.raises(SourceError, match=f"{split} is a split by name"):
        check_class_folders("photos", alone + [f"rest/{name}/1.jpg" for name in classes] * more)
    check_class_folders("photos", ["car/1.jpg", "bus/1.jpg", f"{split}/1.jpg"])
    check_class_folders("photos", ["car/a/1.jpg", "bus/b/1.jpg", f"{split}/c/1.jpg"])


@given(classes=classes, numbers=numbers, ending=st.sampled_from(["jpg", "png"]))
def test_class_folders_are_class_folders(classes, numbers, ending):
    """This holds even if their files have the same numbers."""
    paths = [f"{name}/{number:04d}.{ending}" for name in classes for number in numbers]

    check_class_folders("photos", paths)
    check_parallel("photos", paths)


def test_splits_below_classes_are_refused_too(tmp_path):
    with pytest.raises(SourceError, match=r"cat/test, cat/train are splits"):
        ImageFolder(write(tmp_path, ["cat/train/1.jpg", "cat/test/2.jpg", "dog/train/1.jpg"]))


def test_splits_that_lack_classes_are_told_how_to_be_numbered_alike(tmp_path):
    write(tmp_path, ["train/cat/1.jpg", "train/dog/1.jpg", "train/eel/1.jpg", "val/cat/2.jpg", "val/eel/2.jpg"])

    with pytest.raises(SourceError, match=r"val has no dog, so give each the same --class options \(classes=\)"):
        ImageFolder(tmp_path)
    names = ["cat", "dog", "eel"]
    train, val = (ImageFolder(tmp_path / split, classes=names) for split in ("train", "val"))
    assert train.classes == val.classes == tuple(names)
    assert [source.read(i)["cls"] for source in (train, val) for i in range(len(source))] == [0, 1, 2, 0, 2]
    with pytest.raises(SourceError, match=r"dog/1\.jpg has the label 'dog', which is none of the 2 classes"):
        ImageFolder(tmp_path / "train", classes=["cat", "eel"])


@given(
    images=IMAGES,
    targets=TARGETS,
    stems=numbers,
    endings=st.sampled_from([("jpg", "png"), ("png", "png")]),
    below=st.sampled_from(["", "scene/1/"]),
)
def test_folders_whose_files_belong_together_are_no_classes_and_no_samples_apart(
    images, targets, stems, endings, below
):
    paths = [f"{below}{images}/{stem}.{endings[0]}" for stem in stems]
    paths += [f"{below}{targets}/{stem}.{endings[1]}" for stem in stems]

    for check in (check_class_folders, check_parallel):
        with pytest.raises(SourceError, match="put the files of a sample into one folder") as caught:
            check("voc", paths)
        assert paths[0] in str(caught.value)
        assert paths[len(stems)] in str(caught.value)


@given(
    one=st.text("abcxyz", min_size=1, max_size=4),
    other=st.text("ABCXYZ", min_size=1, max_size=4),
    stems=st.integers(3, 20),
)
def test_folders_of_other_names_whose_stems_are_alike_and_whose_endings_are_not(one, other, stems):
    paths = [f"{one}/{stem}.jpeg" for stem in range(stems)] + [f"{other}/{stem}.xyz" for stem in range(stems)]

    with pytest.raises(SourceError, match="lie in folders side by side whose files belong together"):
        check_parallel("voc", paths)
    check_parallel("voc", [path.replace(".xyz", ".png") for path in paths])


def test_words_of_images_may_be_classes_among_others():
    """In pictures of pages, for example, captions and images are parts of a page."""
    paths = [f"{name}/{number}.png" for number, name in enumerate(["caption", "image", "table", "title", "photos"])]

    check_class_folders("pages", paths)
    for pair in (["image", "mask"], ["photos", "masks"]):
        with pytest.raises(SourceError, match="put the files of a sample into one folder"):
            check_class_folders("pages", [f"{pair[0]}/1.png", f"{pair[1]}/1_mask.png"])


def test_a_folder_of_images_is_no_class(tmp_path):
    with pytest.raises(
        SourceError, match=r"images is a name for a folder of images and not for a class \(images/1.jpg"
    ):
        ImageFolder(write(tmp_path, ["images/1.jpg"]))


def test_folders_are_the_classes_that_they_are_said_to_be(tmp_path):
    write(tmp_path, ["train/1.jpg", "test/2.jpg", "images/3.jpg"])

    with pytest.raises(SourceError, match="test, train are splits"):
        ImageFolder(tmp_path)
    with pytest.raises(SourceError, match=r"images/3\.jpg has the label 'images', which is none of the 2 classes"):
        ImageFolder(tmp_path, classes=["test", "train"])
    source = ImageFolder(tmp_path, classes=["test", "train", "images"])
    assert [source.read(i)["cls"] for i in range(3)] == [2, 0, 1]


def test_labels_decide_whatever_folders_are_called(tmp_path):
    write(tmp_path, ["train/1.jpg", "val/1.jpg", "images/2.jpg", "masks/2.png"])
    source = ImageFolder(tmp_path, labels={"train/1": "a", "val/1": "b", "images/2": "a", "masks/2": "b"})

    assert source.classes == ("a", "b")


@given(
    samples=st.integers(2, 40),
    odd=st.sampled_from(["results.csv", "results_20130124.token", "a/instances.json", "classes.txt", "notes.md"]),
    fields=st.sets(st.sampled_from(["txt", "json", "cls"])),
    endings=st.lists(st.sampled_from(["jpg", "png", "wav", "mp4"]), min_size=1, max_size=1),
)
def test_a_table_among_samples_is_no_sample(samples, odd, fields, endings):
    groups = [(f"{i:04d}.{endings[0]}", [endings[0], *fields]) for i in range(samples)]

    check_alike("flickr", groups)
    with pytest.raises(SourceError) as caught:
        check_alike("flickr", [*groups, (odd, [odd.rpartition(".")[2]])])
    assert odd in str(caught.value)
    assert groups[0][0] in str(caught.value)


def test_files_that_are_no_samples_are_left_out_by_who_says_what_fields_are(tmp_path):
    write(tmp_path, ["1.jpg", "2.jpg", "3.jpg", "results.csv"])

    with pytest.raises(
        SourceError, match=r"results\.csv would be a sample without image, and 3 of 4 samples have one \(1\.jpg"
    ):
        FileFolder(tmp_path)
    source = FileFolder(tmp_path, fields=("jpg",))
    assert (len(source), source.ignored) == (3, ("results.csv",))
    assert len(FileFolder(tmp_path, fields=("jpg", "csv"))) == 4


def test_files_of_splits_are_one_dataset_only_if_it_is_said(tmp_path):
    write(tmp_path, ["train/1.jpg", "train/1.txt", "val/2.jpg", "val/2.txt"])

    with pytest.raises(SourceError, match="train, val are splits"):
        FileFolder(tmp_path)
    assert len(FileFolder(tmp_path, fields=("jpg", "txt"))) == 2


columns = st.sampled_from(
    ["path", "key", "label", "file_name", "caption", "ImageId", "PredictionString", "id", "width"]
)


@given(
    header=st.permutations(["path", "label"])
    | st.permutations(["key", "label", "split"])
    | st.lists(columns, min_size=1, max_size=4),
    labels=st.lists(st.sampled_from(["cat", "dog", "7", "a dog runs"]), min_size=1, max_size=4),
    spaced=st.booleans(),
)
def test_a_table_is_read_by_the_names_of_its_columns_or_not_at_all(header, labels, spaced, tmp_path_factory):
    folder = tmp_path_factory.mktemp("labels")
    write(folder / "images", [f"{i}.jpg" for i in range(len(labels))])
    with (folder / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([f" {name.upper()} " if spaced else name for name in header])
        for i, label in enumerate(labels):
            cells = {"path": f"{i}.jpg", "key": f"{i}", "label": label}
            rows.writerow([cells.get(name, f"{name} {i}") for name in header])

    meant = header.count("label") == 1 and header.count("path") + header.count("key") == 1
    mixed = {label.isdigit() for label in labels} == {True, False}
    if not meant or mixed:
        with pytest.raises(SourceError):
            ImageFolder(folder / "images", labels=folder / "labels.csv")
        return
    source = ImageFolder(folder / "images", labels=folder / "labels.csv")
    found = [source.read(i)["cls"] for i in range(len(source))]
    assert [source.classes[number] if source.classes else str(number) for number in found] == labels


def test_captions_are_no_classes(tmp_path):
    write(tmp_path, [f"{i:02d}.jpg" for i in range(12)])

    with pytest.raises(SourceError, match=r"each of 12 images has a label of its own \(00\.jpg: 'a dog 0'\)"):
        ImageFolder(tmp_path, labels={f"{i:02d}": f"a dog {i}" for i in range(12)})
    assert ImageFolder(tmp_path, labels={f"{i:02d}": f"a dog {i % 6}" for i in range(12)}).classes[0] == "a dog 0"
    assert len(ImageFolder(write(tmp_path / "one", [f"{i}/1.jpg" for i in range(12)])).classes) == 12


def test_numbers_get_the_names_that_are_given(tmp_path):
    write(tmp_path, ["a.jpg", "b.jpg"])

    assert ImageFolder(tmp_path, labels={"a": 1, "b": 0}, classes=["cat", "dog"]).classes == ("cat", "dog")
    with pytest.raises(SourceError, match=r"a\.jpg has the label 2, which is none of the 2 classes"):
        ImageFolder(tmp_path, labels={"a": 2, "b": 0}, classes=["cat", "dog"])
