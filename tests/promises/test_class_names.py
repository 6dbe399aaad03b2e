"""Labels keep their meaning: however datasets are joined, each sample's class keeps its name, or it is an error."""

import tempfile
import warnings
from pathlib import Path

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import shardkit
from shardkit import ShardkitError, ShardSource, ShardStream, ShardWriter, index_shards, pack
from shardkit.codecs.registry import Decoder, encode

NAMES = ["bird", "cat", "dog", "Cat", "é"]
FIELDS = ["cls", "label.cls", "cls.gz", "finecls"]


class Dataset:
    """A small dataset as it is generated: its class list and the class numbers of its samples."""

    def __init__(self, classes, labels, field, compression):
        self.classes, self.labels, self.field, self.compression = classes, labels, field, compression

    def __repr__(self):
        return f"Dataset({self.classes}, {self.labels}, {self.field!r}, {self.compression!r})"

    @property
    def is_named(self):
        return all(label is None or 0 <= label < len(self.classes) for label in self.labels) and bool(self.classes)

    def write(self, folder, prefix):
        options = {"classes": self.classes, "compression": self.compression, "shard_samples": 2}
        with ShardWriter(folder, **options) as writer:
            for i, label in enumerate(self.labels):
                sample = {"__key__": f"{prefix}{i}", "txt": f"{label}"}
                if label is not None:
                    sample[self.field] = encode("cls", label) if self.field == "finecls" else label
                writer.write(sample)

    def names(self, prefix):
        """Return each sample's class name; its number if there is no name, None if it has no class."""
        return {f"{prefix}{i}": name_of(self.classes, label) for i, label in enumerate(self.labels)}


def name_of(classes, label):
    return classes[label] if label is not None and 0 <= label < len(classes) else label


@st.composite
def datasets(draw):
    """Draw a dataset, rarely one with numbers that have no name."""
    classes = draw(st.permutations(NAMES) | st.just(NAMES))[: draw(st.sampled_from([0, 1, 2, 3, 4, 5, 5]))]
    named = st.integers(0, max(0, len(classes) - 1))
    labels = draw(st.lists(st.none() | named | named | named, min_size=1, max_size=4))
    if draw(st.integers(0, 9)) == 9:
        labels.append(draw(st.integers(-2, 11)))
    return Dataset(classes, labels, draw(st.sampled_from(FIELDS)), draw(st.sampled_from(["none", "zst"])))


some = st.lists(datasets(), min_size=2, max_size=3)
different = st.lists(datasets(), min_size=2, max_size=3, unique_by=lambda dataset: tuple(dataset.classes))
several = different | different | some | st.lists(datasets(), min_size=1, max_size=1)


def names_in(samples, classes):
    """Return the class name of each sample that was read, by the class list that comes with it."""
    found = {}
    for sample in samples:
        values = [decoded(field, value) for field, value in sample.items() if field in FIELDS]
        found[sample["__key__"]] = name_of(classes, values[0]) if values else None
    return found


def decoded(field, value):
    if not isinstance(value, bytes):
        return value
    return Decoder().decode("cls" if field == "finecls" else field, value)


def repacked(folders, out):
    source = ShardSource(folders)
    pack(source, out, num_workers=1, progress=False)
    dataset = shardkit.ShardDataset(out)
    return names_in((dataset[i] for i in range(len(dataset))), dataset.classes)


def filtered(folders, out):
    pack(ShardSource(folders, filter=lambda _: True), out, num_workers=1, progress=False)
    dataset = shardkit.ShardDataset(out)
    return names_in((dataset[i] for i in range(len(dataset))), dataset.classes)


def transformed(folders, out):
    pack(ShardSource(folders), out, transform=lambda sample: sample | {"txt": "new"}, num_workers=1, progress=False)
    dataset = shardkit.ShardDataset(out)
    return names_in((dataset[i] for i in range(len(dataset))), dataset.classes)


def indexed(folders, out):
    index_shards(folders, out=out)
    dataset = shardkit.ShardDataset(out, allow_any_url=True)
    return names_in((dataset[i] for i in range(len(dataset))), dataset.classes)


def streamed(folders, _):
    stream = ShardStream(folders)
    return names_in(stream, stream.classes)


def shards_repacked(folders, out):
    """Read the shards one by one, without their datasets."""
    shards = [str(path) for folder in folders for path in sorted(Path(folder).glob("*.tar*"))]
    pack(ShardSource(shards), out, num_workers=1, progress=False)
    dataset = shardkit.ShardDataset(out)
    return names_in((dataset[i] for i in range(len(dataset))), dataset.classes)


JOINS = [repacked, filtered, indexed, streamed, shards_repacked]


@given(several=several)
def test_whatever_joins_datasets_keeps_the_names_of_classes(several):
    """If no dataset has class names, numbers are kept.

    One dataset alone is never refused, nor are several if each has names for all of its classes. Only an index, which
    cannot change numbers, may refuse them.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", shardkit.StreamWarning)
        folders, expected = [], {}
        for prefix, dataset in zip("abc", several, strict=False):
            folders.append(f"{folder}/{prefix}")
            dataset.write(folders[-1], prefix)
            expected |= dataset.names(prefix)
        for join in JOINS:
            try:
                found = join(folders, f"{folder}/{join.__name__}")
            except ShardkitError:
                event(f"{join.__name__}: refused")
                is_named = all(dataset.is_named for dataset in several)
                if len(several) == 1 or (is_named and join is not indexed):
                    raise
            else:
                event(f"{join.__name__}: {len({tuple(dataset.classes) for dataset in several})} lists")
                assert found == expected


def write(folder, classes, names, **options):
    with ShardWriter(folder, classes=classes, compression="none", **options) as writer:
        for i, name in enumerate(names):
            writer.write({"__key__": f"{folder.name}{i}", "cls": classes.index(name) if classes else name})


@pytest.mark.parametrize("join", [repacked, filtered, transformed, streamed, shards_repacked])
def test_different_lists_are_joined_by_name(tmp_path, join):
    write(tmp_path / "x", ["cat", "dog"], ["dog", "cat"])
    write(tmp_path / "y", ["bird", "cat"], ["cat", "bird"])

    found = join([tmp_path / "x", tmp_path / "y"], tmp_path / "out")
    assert found == {"x0": "dog", "x1": "cat", "y0": "cat", "y1": "bird"}


@pytest.mark.parametrize("out", ["out", "x"])
def test_an_index_of_different_lists_is_refused_and_shows_both(tmp_path, out):
    write(tmp_path / "x", ["cat", "dog"], ["dog"])
    write(tmp_path / "y", ["bird", "cat"], ["cat"])

    with pytest.raises(
        ShardkitError, match=r"x has the classes cat, dog and .*y has bird, cat; number 0 would be .*ShardSource"
    ):
        index_shards([tmp_path / "x", tmp_path / "y"], out=tmp_path / out)
    assert not (tmp_path / "out").exists()


def test_an_index_keeps_the_longer_of_lists_that_begin_alike(tmp_path):
    write(tmp_path / "x", ["cat", "dog"], ["dog"])
    write(tmp_path / "y", ["cat", "dog", "bird"], ["bird"])

    for order in ("xy", "yx"):
        manifest = index_shards([tmp_path / name for name in order], out=tmp_path / order)
        assert manifest.classes == ("cat", "dog", "bird")


def test_a_dataset_and_one_of_its_shards_are_one_dataset(tmp_path):
    write(tmp_path / "x", ["cat", "dog"], ["dog"])
    with pytest.warns(shardkit.StreamWarning):
        stream = ShardStream([tmp_path / "x", tmp_path / "x/x-000000.tar"])

    assert stream.classes == ("cat", "dog")
    assert [sample["cls"] for sample in stream] == [1, 1]


@pytest.mark.parametrize("join", JOINS)
def test_classes_without_names_are_not_joined_with_those_that_have_some(tmp_path, join):
    write(tmp_path / "x", ["cat", "dog"], ["dog"])
    write(tmp_path / "y", [], [1])
    write(tmp_path / "z", [], [])

    with pytest.raises(ShardkitError, match=r"y.* class names.*--class"):
        join([tmp_path / "x", tmp_path / "y"], tmp_path / "out")
    assert not list(tmp_path.glob("out/*manifest*"))
    with ShardWriter(tmp_path / "captions") as writer:
        writer.write({"__key__": "z", "txt": "no class, so nothing to mix"})
    found = join([tmp_path / "x", tmp_path / "captions"], tmp_path / "both")
    assert found == {"x0": "dog", "z": None}


def test_a_label_that_is_no_number_of_its_list_is_an_error_where_lists_differ(tmp_path):
    for name, label in (("text", b"cat"), ("high", b"2"), ("low", b"-1")):
        with ShardWriter(tmp_path / name, classes=["cat", "dog"]) as writer:
            writer.write({"__key__": name, "cls": label})
    write(tmp_path / "y", ["bird", "cat"], ["cat"])

    for name in ("text", "high", "low"):
        with pytest.raises(ShardkitError, match=rf"sample '{name}'.*'cls'"):
            pack(ShardSource([tmp_path / "y", tmp_path / name]), tmp_path / "out" / name, progress=False)
        with pytest.raises(ShardkitError, match=rf"sample '{name}'.*'cls'"):
            list(ShardStream([tmp_path / "y", tmp_path / name]))


def test_a_stream_skips_a_label_without_a_name_and_counts_it(tmp_path):
    write(tmp_path / "x", ["bird", "cat"], ["cat"])
    with ShardWriter(tmp_path / "y", classes=["cat", "dog"]) as writer:
        for i, label in enumerate((1, 2, 0)):
            writer.write({"__key__": f"y{i}", "cls": label})
    stream = ShardStream([tmp_path / "x", tmp_path / "y"], on_error="skip")

    assert names_in(stream, stream.classes) == {"x0": "cat", "y0": "dog", "y2": "cat"}
    assert stream.skipped.samples == 1


def test_labels_that_are_not_taken_are_not_compared(tmp_path):
    write(
        tmp_path / "x",
        ["cat", "dog"],
        ["dog"],
    )
    with ShardWriter(tmp_path / "y") as writer:
        writer.write({"__key__": "y", "cls": 1, "txt": "one"})
    with ShardWriter(tmp_path / "z", classes=["dog"]) as writer:
        writer.write({"__key__": "z", "txt": "two"})

    stream = ShardStream([tmp_path / "y", tmp_path / "z"], fields=("txt",))
    assert sorted(sample["txt"] for sample in stream) == ["one", "two"]
    source = ShardSource([tmp_path / "y", tmp_path / "z"], fields=("txt",))
    assert sorted(sample["txt"] for sample in source) == [b"one", b"two"]


def test_a_filter_sees_the_numbers_of_the_joined_list(tmp_path):
    write(tmp_path / "x", ["cat", "dog"], ["dog", "cat"])
    write(tmp_path / "y", ["bird", "cat"], ["cat", "bird"])
    source = ShardSource([tmp_path / "x", tmp_path / "y"], filter=lambda sample: source.classes[sample["cls"]] == "cat")

    assert source.classes == ("cat", "dog", "bird")
    assert sorted(sample["__key__"] for sample in source) == ["x1", "y0"]


@pytest.mark.parametrize("names", [{"label": "cls"}, {"other.cls": "label"}])
def test_a_class_field_that_gets_another_name_is_mapped_too(tmp_path, names):
    (field,) = names.values()
    for name, classes in (("x", ["cat", "dog"]), ("y", ["bird", "cat"])):
        with ShardWriter(tmp_path / name, classes=classes) as writer:
            for i in range(2):
                writer.write({"__key__": f"{name}{i}", field: b"%d" % i})
    source = ShardSource([tmp_path / "x", tmp_path / "y"], fields=names)

    found = {sample["__key__"]: source.classes[int(sample[next(iter(names))])] for sample in source}
    assert found == {"x0": "cat", "x1": "dog", "y0": "bird", "y1": "cat"}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_worker_of_a_stream_maps_alike(tmp_path, num_workers):
    from torch.utils.data import DataLoader

    write(tmp_path / "x", ["cat", "dog"], ["dog", "cat"], shard_samples=1)
    write(tmp_path / "y", ["bird", "cat"], ["cat", "bird"], shard_samples=1)
    stream = ShardStream([tmp_path / "x", tmp_path / "y"])

    loader = DataLoader(stream, batch_size=None, num_workers=num_workers)
    assert names_in(loader, stream.classes) == {"x0": "dog", "x1": "cat", "y0": "cat", "y1": "bird"}
