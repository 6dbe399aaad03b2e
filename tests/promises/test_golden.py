"""Data of earlier versions is read as they read it: bytes, values, orders, states. It is never rewritten.

``scripts/create_golden.py`` has created the data. A test that fails here means that a format, an order or a state has
changed: users' datasets, and the runs that they want to resume, would break too.
"""

import importlib.util
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import shardkit
from shardkit.cli.app import main

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
DATA = ROOT / "tests" / "data"
FORMATS = sorted(path.parent for path in DATA.glob("*/expected.json"))
EXPECTED = {folder: json.loads((folder / "expected.json").read_text(encoding="utf-8")) for folder in FORMATS}

_spec = importlib.util.spec_from_file_location("create_golden", ROOT / "scripts" / "create_golden.py")
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)

pytestmark = pytest.mark.filterwarnings("ignore::shardkit.StreamWarning")  # ranks of a stream differ in length


def each(part):
    """Return a parametrization over one part of the expected results of each format."""
    found = [(folder, one) for folder in FORMATS for one in EXPECTED[folder][part]]
    return pytest.mark.parametrize(("folder", "one"), found, ids=[f"{f.name}-{i}" for i, (f, _) in enumerate(found)])


def each_dataset(suits=bool):
    found = [
        (folder / name, told)
        for folder in FORMATS
        for name, told in EXPECTED[folder]["datasets"].items()
        if suits(told)
    ]
    return pytest.mark.parametrize(("path", "told"), found, ids=[str(path.relative_to(DATA)) for path, _ in found])


def has_samples(told):
    return bool(told["samples"])


def has_values(told):
    """Return whether a dataset can be read by blocks; gz cannot."""
    return "values" in told


def has_photos(told):
    return has_values(told) and "jpg" in told["fields"]


def has_class_and_text(told):
    return has_values(told) and has_samples(told) and all({"cls", "txt"} <= sample.keys() for sample in told["samples"])


def without_source(samples):
    return [{name: value for name, value in sample.items() if name != "__source__"} for sample in samples]


def test_there_is_golden_data():
    assert {folder.name for folder in FORMATS} >= {"format-1", "format-2"}
    assert all(set(golden.find_datasets(folder)) == set(EXPECTED[folder]["datasets"]) for folder in FORMATS)


@each_dataset()
def test_all_that_is_read_from_a_dataset_is_what_it_was(path, told):
    name = next(path.relative_to(folder).as_posix() for folder in FORMATS if folder in path.parents)
    found = json.loads(json.dumps(golden.describe_dataset(name, path)))

    for part, value in told.items():
        assert found[part] == value, part


@each_dataset()
def test_a_dataset_is_found_whole(path, told):
    report = shardkit.verify(path)

    assert report.ok, report.to_json()
    assert (report.shards, report.samples) == (len(told["shards"]), len(told["samples"]))


@each_dataset()
def test_a_stream_gives_every_byte(path, told):
    stream = shardkit.ShardStream(path, shuffle=False, decode=False)

    assert stream.num_samples == len(told["samples"])
    assert [golden.describe_bytes(sample) for sample in stream] == without_source(told["samples"])


@each_dataset(has_values)
def test_a_dataset_gives_every_byte_by_number_and_by_key(path, told):
    dataset = shardkit.ShardDataset(path, decode=False)

    assert [golden.describe_bytes(dataset[i]) for i in range(len(dataset))] == without_source(told["samples"])
    for sample in without_source(told["samples"])[::3] if told["unique_keys"] else []:
        assert golden.describe_bytes(dataset.by_key(sample["__key__"])) == sample


@each_dataset(has_values)
def test_a_loader_gives_every_value(path, told):
    fields, columns = golden.exact_fields(told["fields"]) or None, list(told["columns"])
    dataset = shardkit.ShardDataset(path, fields=fields, columns=columns)
    loader = shardkit.ShardLoader(dataset, batch_size=4, shuffle=False, collate_fn=list)

    assert [golden.describe_values(sample) for batch in loader for sample in batch] == told["values"]


@each_dataset(has_class_and_text)
def test_batches_have_every_number_and_text(path, told):
    dataset = shardkit.ShardDataset(path, fields=("cls", "txt"))
    batches = list(shardkit.ShardLoader(dataset, batch_size=7, shuffle=False))
    found = {
        "__key__": [key for batch in batches for key in batch["__key__"]],
        "cls": [number for batch in batches for number in batch["cls"].tolist()],
        "txt": [text for batch in batches for text in batch["txt"]],
    }

    assert {n: list(map(json.dumps, v)) for n, v in found.items()} == {
        name: [json.dumps(json.loads(sample[name])) for sample in told["values"]] for name in found
    }


@each_dataset(has_photos)
def test_jpegs_have_the_pixels_of_pillow(path, told):
    """Builds of libjpeg differ in the last bit, so there are no digests of pixels."""
    raw = shardkit.ShardDataset(path, fields={"jpg": "jpg?"}, decode=False)
    decoded = shardkit.ShardDataset(path, fields={"jpg": "jpg?"})
    for i in range(len(told["samples"])):
        data, pixels = raw[i]["jpg"], decoded[i]["jpg"]
        if data is not None:
            with Image.open(io.BytesIO(data)) as image:
                assert np.array_equal(pixels, np.asarray(image.convert("RGB")))


@each("orders")
def test_loaders_have_the_order_that_they_had(folder, one):
    loader = golden.loader_of(folder, one["selection"], one["arguments"])
    loader.set_epoch(one["epoch"])

    assert len(loader) == len(one["batches"])
    assert golden.keys_of(loader) == one["batches"]


@each("samplers")
def test_samplers_have_the_order_that_they_had(folder, one):
    name, where, subset = one["selection"]
    sampler = shardkit.ShardSampler(golden.select(folder / name, where, subset), **one["arguments"])
    sampler.set_epoch(one["epoch"])

    assert [" ".join(map(str, batch)) for batch in sampler] == one["batches"]


@each("streams")
def test_streams_have_the_order_that_they_had(folder, one):
    stream = shardkit.ShardStream(
        folder / one["dataset"], decode=False, **{"rank": 0, "world_size": 1} | one["arguments"]
    )
    stream.set_epoch(one["epoch"])

    assert " ".join(sample["__key__"] for sample in stream) == one["keys"]


@each("states")
def test_states_resume_at_the_very_next_sample(folder, one):
    for then in one["then"]:
        loader = golden.loader_of(folder, one["selection"], then["arguments"])
        loader.load_state_dict(one["state"])

        assert golden.keys_of(loader) == then["batches"]


@pytest.mark.parametrize("folder", FORMATS, ids=lambda folder: folder.name)
def test_the_same_inputs_give_the_same_tars(folder, tmp_path):
    """The SHA-256 is that of the uncompressed tars: other versions of a compressor may compress differently."""
    golden.create_datasets(tmp_path)
    for name, told in EXPECTED[folder]["datasets"].items():
        manifest = shardkit.read_manifest(tmp_path / name)
        found = [[s.url, s.samples, s.tar_size, s.sha256, s.compression, s.blocks] for s in manifest.shards]

        assert (name, manifest.digest, found) == (name, told["digest"], told["shards"])


@each_dataset()
def test_the_command_line_lists_and_verifies(path, told, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["shardkit", *arguments])
        with pytest.raises(SystemExit) as exit_code:
            main()
        return exit_code.value.code, capsys.readouterr().out

    code, listed = run("ls", "--json", str(path))
    samples = [json.loads(line) for line in listed.splitlines()]
    sizes = [
        {"__key__": sample["key"], **{name: str(size) for name, size in sample["fields"].items()}} for sample in samples
    ]

    assert code == 0
    assert sizes == [
        {name: value if name == "__key__" else value.split()[0] for name, value in sample.items()}
        for sample in without_source(told["samples"])
    ]
    code, verified = run("verify", "--json", str(path))

    assert (code, json.loads(verified)["samples"]) == (0, len(told["samples"]))
