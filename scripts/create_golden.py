#!/usr/bin/env python3
"""Write golden data: small datasets, orders of epochs and states of loaders that later versions must read identically.

Run it only when the format changes, with a new folder: ``scripts/create_golden.py tests/data/format-N``. Never write
into an existing folder. ``tests/data/format-1`` was written by the code of format 1, before that was changed.

The datasets are packed from tests/data/inputs. Those files are part of the golden data too, because other builds of the
image libraries would encode different bytes. ``expected.json`` records what was read from the datasets, and
``tests/promises/test_golden.py`` compares it with what is read today.
"""

import argparse
import hashlib
import io
import json
import shutil
import tarfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import shardkit

DATA = Path(__file__).parents[1] / "tests" / "data"
INPUTS = DATA / "inputs"
EXACT_FIELDS = ("bmp", "cls", "json", "jsonl", "npy", "npz", "png", "txt")  # their values are the same with any library
GZIPPED = bytes.fromhex(
    "1f8b0800000000000003010500faff5b312c325dbf508b0805000000"
)  # [1,2], stored: the same with any library

#: Conditions on columns, by dataset; the samples that each one selects are recorded.
CONDITIONS: dict[str, list[list[list[Any]]]] = {
    "photos/train": [
        [["label", "==", 1]],
        [["width", ">", 18], ["weight", "<", 2.0]],
        [["name", "in", ["cat/10", "dog/05"]]],
    ],
    "numbers": [[["label", "<", 3]], [["label", "==", 11]], [["note", "==", "third"], ["label", "not in", [0, 3]]]],
    "strangers": [[["label", ">=", 4]]],
}

#: Selections whose orders and states are recorded: (dataset, where=, numbers of a subset).
WHOLE = ("numbers", None, None)
SOME = ("numbers", [["label", "<", 4]], None)
FEW = ("numbers", None, list(range(3, 190, 5)))
PHOTOS = ("photos/train", None, None)

#: Arguments of loaders; the epochs of each are 0, 1 and 5.
LOADERS: list[tuple[tuple[str, Any, Any], dict[str, Any]]] = [
    (WHOLE, {"batch_size": 16}),
    (WHOLE, {"batch_size": 16, "seed": 1}),
    (WHOLE, {"batch_size": 7, "seed": 2**63 + 5}),
    (WHOLE, {"batch_size": 16, "lanes": 1}),
    (WHOLE, {"batch_size": 9, "lanes": 5, "seed": 3}),
    (WHOLE, {"batch_size": 16, "shuffle": False}),
    (WHOLE, {"batch_size": 16, "drop_last": True}),
    *((WHOLE, {"batch_size": 8, "seed": 1, "rank": rank, "world_size": 2}) for rank in range(2)),
    *((WHOLE, {"batch_size": 11, "lanes": 6, "rank": rank, "world_size": 3}) for rank in range(3)),
    *((WHOLE, {"batch_size": 13, "drop_last": True, "rank": rank, "world_size": 2}) for rank in range(2)),
    (SOME, {"batch_size": 10, "seed": 4}),
    (SOME, {"batch_size": 10, "rank": 1, "world_size": 2}),
    (FEW, {"batch_size": 6, "seed": 4}),
    (FEW, {"batch_size": 6, "shuffle": False}),
    (PHOTOS, {"batch_size": 4}),
    (PHOTOS, {"batch_size": 4, "seed": 9, "rank": 0, "world_size": 2}),
]
EPOCHS = (0, 1, 5)

#: Arguments of samplers.
SAMPLERS: list[tuple[tuple[str, Any, Any], dict[str, Any]]] = [
    (WHOLE, {"batch_size": 16, "seed": 1}),
    (WHOLE, {"batch_size": 8, "seed": 1, "lanes": 5, "rank": 1, "world_size": 2, "drop_last": True}),
    (SOME, {"batch_size": 10, "rank": 0, "world_size": 1}),
    (FEW, {"batch_size": 6, "shuffle": False}),
]

#: Arguments of streams; the epochs of each are 0 and 3.
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("numbers", {"seed": 0}),
    ("numbers", {"seed": 7, "buffer_size": 20, "open_shards": 2}),
    ("numbers", {"seed": 7, "buffer_size": 1, "open_shards": 1}),
    ("numbers", {"seed": 1, "buffer_size": 30, "rank": 0, "world_size": 2}),
    ("numbers", {"seed": 1, "buffer_size": 30, "rank": 1, "world_size": 2}),
    ("words", {"seed": 2, "buffer_size": 10}),
    ("photos/train", {"seed": 3, "buffer_size": 5, "open_shards": 3}),
    ("strangers", {"seed": 3}),
]
STREAM_EPOCHS = (0, 3)

#: States of loaders: the selection, the loader's arguments, the epoch, and the number of batches taken; -1 for all.
STATES: list[tuple[tuple[str, Any, Any], dict[str, Any], int, int]] = [
    (WHOLE, {"batch_size": 16}, 0, 0),
    (WHOLE, {"batch_size": 16}, 0, 1),
    (WHOLE, {"batch_size": 16, "seed": 1}, 2, 5),
    (WHOLE, {"batch_size": 16, "seed": 1}, 2, -1),
    (WHOLE, {"batch_size": 16, "shuffle": False}, 1, 3),
    (WHOLE, {"batch_size": 9, "lanes": 5, "seed": 3}, 1, 7),
    (WHOLE, {"batch_size": 7, "drop_last": True}, 0, -1),
    (WHOLE, {"batch_size": 8, "seed": 1, "rank": 0, "world_size": 2}, 1, 4),
    (WHOLE, {"batch_size": 8, "seed": 1, "rank": 1, "world_size": 2}, 1, 4),
    (SOME, {"batch_size": 10, "seed": 4}, 0, 2),
    (FEW, {"batch_size": 6, "seed": 4}, 3, 2),
    (PHOTOS, {"batch_size": 4, "drop_last": True}, 0, 2),
]
#: Arguments that change when a state is loaded; none of them affects the order.
RESUMED: list[dict[str, Any]] = [
    {},
    {"batch_size": 5, "rank": 0, "world_size": 1, "drop_last": False},
    {"batch_size": 3, "rank": 0, "world_size": 2},
    {"batch_size": 3, "rank": 1, "world_size": 2},
]


def main() -> None:
    """Write the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Write golden data that every later version must read identically.")
    parser.add_argument("folder", type=Path, help="a new folder, such as tests/data/format-1")
    folder = parser.parse_args().folder
    if not INPUTS.exists():
        create_inputs(INPUTS)
    folder.mkdir(parents=True)
    create_datasets(folder)
    text = json.dumps(describe(folder), ensure_ascii=False, indent=1)
    (folder / "expected.json").write_text(text + "\n", encoding="utf-8")


def create_inputs(inputs: Path) -> None:
    """Write the inputs of the datasets: images in class folders, files of samples, and tars from another program."""
    rng = np.random.default_rng(1)
    for name, count in (("cat", 12), ("dog", 9), ("fächer", 8)):
        folder = inputs / "photos" / name
        folder.mkdir(parents=True)
        for number in range(count):
            pixels = _picture(rng, 14 + number % 5, 16 + number % 7)
            ending = "png" if number % 4 == 2 else "jpg"
            Image.fromarray(pixels).save(folder / f"{number:02d}.{ending}")
    scenes = inputs / "scenes"
    for number in range(14):
        stem = scenes / ("night" if number % 3 else "día ☀") / f"{number:03d}"
        stem.parent.mkdir(parents=True, exist_ok=True)
        height, width = 12 + number % 3, 15 + number % 4
        values: dict[str, Any] = {
            "jpg": _saved(Image.fromarray(_picture(rng, height, width)), "JPEG"),
            "seg.png": _saved(Image.fromarray(rng.integers(0, 21, (height, width), dtype=np.uint8)), "PNG"),
            "depth.png": _saved(Image.fromarray(rng.integers(0, 1 << 16, (height, width), dtype=np.uint16)), "PNG"),
            "txt": f"scene {number}: eine Gasse, 雨".encode(),
            "json": json.dumps({"number": number, "boxes": [[0, 1.5, number, 7]], "ü": None}).encode(),
            "npy": _saved_array(rng.normal(size=(number % 4 + 1, 3)).astype(np.float32)),
            "bin": bytes(rng.integers(0, 256, number * 37, dtype=np.uint8)),
            "cls": str(number % 5).encode(),
        }
        for field, data in values.items():
            if (number + len(field)) % 6:  # the other samples lack this field
                Path(f"{stem}.{field}").write_bytes(data)
    strangers = inputs / "strangers"
    strangers.mkdir()
    for shard in range(2):
        with tarfile.open(
            strangers / f"part-{shard}.tar", "w", format=(tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)[shard]
        ) as tar:
            _add(tar, "./images", None)
            for number in range(9):
                name = f"./images/{'long/' * 25 if number == 3 else ''}{shard * 7 + number:04d}"  # two keys repeat
                _add(tar, f"{name}.cls", str(number % 6).encode())
                _add(tar, f"{name}.TXT", f"stranger {number}\n".encode())
                if number % 2:
                    _add(tar, f"{name}.left.bmp", _saved(Image.fromarray(_picture(rng, 5, 6)), "BMP"))
            _add(tar, "./.hidden", b"hidden")


def create_datasets(folder: Path) -> None:
    """Write all golden datasets into a folder."""
    scenes = ("jpg", "seg.png", "depth.png", "txt", "json", "npy", "bin", "cls")
    options: dict[str, Any] = {"progress": False, "num_workers": 2}
    shardkit.pack(
        shardkit.ImageFolder(INPUTS / "photos"),
        folder / "photos",
        shard_bytes=16_000,
        block_bytes=4_000,
        seed=11,
        compression="none",
        splits={"train": 0.8, "val": 0.2},
        columns={
            "label": "cls",
            "name": lambda sample: sample["__key__"],
            "weight": lambda sample: len(sample["__key__"]) / 4,
            "width": lambda sample: sample["png"].shape[1] if "png" in sample else None,
        },
        **options,
    )
    shardkit.pack(
        shardkit.FileFolder(INPUTS / "scenes", fields=scenes),
        folder / "scenes",
        shard_samples=5,
        block_bytes=8_000,
        compression="zst",
        **options,
    )
    shardkit.pack(
        _numbers(),
        folder / "numbers",
        shard_bytes=110_000,
        block_bytes=9_000,
        seed=5,
        compression="zst:9",
        columns={"label": "cls", "note": lambda sample: "third" if sample["cls"] % 3 == 0 else None},
        **options,
    )
    shardkit.pack(
        ({"__key__": f"w{i:02d}", "txt": "wort " * i, "json": {"i": i}} for i in range(40)),
        folder / "words",
        shard_samples=15,
        shuffle=False,
        compression="gz",
        **options,
    )
    with shardkit.ShardWriter(
        folder / "written", shard_samples=6, block_bytes=2_000, compression="none", classes=["no", "yes"]
    ) as writer:
        for i in range(15):
            sample = {"__key__": f"ordner/ключ-{i}", "__source__": f"origin/{i}.txt", "txt": f"line {i}", "cls": i % 2}
            arrays = {"a": np.arange(i), "b": np.array(i, dtype=np.int16)}
            writer.write(sample | {"npz": arrays, "jsonl": [i, {"x": [i]}], "json.gz": GZIPPED} if i % 3 else sample)
    shardkit.pack(shardkit.ShardSource(folder / "written"), folder / "again", compression="zst", seed=3, **options)
    with shardkit.ShardWriter(folder / "empty"):
        pass
    shutil.copytree(INPUTS / "strangers", folder / "strangers")
    shardkit.index_shards(folder / "strangers", columns={"label": "cls"}, block_bytes=4_000, classes=list("abcdef"))


def find_datasets(folder: Path) -> dict[str, Path]:
    """Return the folders of datasets below a folder, by name."""
    return {path.parent.relative_to(folder).as_posix(): path.parent for path in sorted(folder.rglob("manifest.json"))}


def describe(folder: Path) -> dict[str, Any]:
    """Return what is read from golden datasets: content, orders, states and the batches after them."""
    datasets = find_datasets(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shardkit.StreamWarning)  # ranks of a stream get different numbers of samples
        return {
            "datasets": {name: describe_dataset(name, path) for name, path in datasets.items()},
            "orders": list(_orders(folder)),
            "samplers": list(_sampler_orders(folder)),
            "streams": list(_stream_orders(folder)),
            "states": list(_states(folder)),
        }


def describe_dataset(name: str, path: Path) -> dict[str, Any]:
    """Return what is read from one dataset."""
    manifest = shardkit.read_manifest(path)
    found: dict[str, Any] = {
        "digest": manifest.digest,
        "fields": list(manifest.fields),
        "classes": list(manifest.classes),
        "columns": dict(manifest.columns),
        "unique_keys": manifest.unique_keys,
        "block_samples": manifest.block_samples,
        "shards": [[s.url, s.samples, s.tar_size, s.sha256, s.compression, s.blocks] for s in manifest.shards],
        "samples": [],
    }
    if manifest.shards:
        found["samples"] = [describe_bytes(sample) for sample in shardkit.ShardSource(path)]
    if all(shard.compression in ("none", "zst") for shard in manifest.shards):
        dataset = shardkit.ShardDataset(
            path, fields=exact_fields(manifest.fields) or None, columns=list(manifest.columns)
        )
        found["values"] = [describe_values(dataset[i]) for i in range(len(dataset))]
        found["where"] = [
            {"where": where, "digest": selected.digest, "keys": selected.keys()}
            for where in CONDITIONS.get(name, [])
            for selected in [select(path, where, None)]
        ]
    return found


def describe_bytes(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample's key, its source file, and the size and SHA-256 of each field's bytes."""
    told = {name: sample[name] for name in ("__key__", "__source__") if name in sample}
    fields = {name: data for name, data in sorted(sample.items()) if not name.startswith("__")}
    return told | {name: f"{len(data)} {hashlib.sha256(data).hexdigest()}" for name, data in fields.items()}


def describe_values(sample: Mapping[str, Any]) -> dict[str, str]:
    """Return the type, shape and digest of each value of a sample, or its JSON."""
    return {name: _describe(value) for name, value in sample.items() if name != "__url__" and value is not None}


def exact_fields(fields: Iterable[str]) -> dict[str, str]:
    """Return the fields whose decoded values are compared, all optional."""
    return {f: f"{f}?" for f in fields if f in EXACT_FIELDS or f.endswith(".bmp")}


def select(path: Path, where: Any, subset: Any, **options: Any) -> shardkit.ShardDataset:
    """Open a dataset, or some of its samples."""
    conditions = None if where is None else [tuple(condition) for condition in where]
    dataset = shardkit.ShardDataset(path, where=conditions, **options)
    return dataset if subset is None else dataset.subset(subset)


def loader_of(folder: Path, selection: Iterable[Any], arguments: Mapping[str, Any]) -> shardkit.ShardLoader:
    """Return a loader of a selection whose batches are only used for their keys."""
    name, where, subset = selection
    dataset = select(folder / name, where, subset, fields=("cls",))
    return shardkit.ShardLoader(dataset, **{"rank": 0, "world_size": 1, "num_workers": 2} | dict(arguments))


def keys_of(batches: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys of each batch, separated by spaces."""
    return [" ".join(batch["__key__"]) for batch in batches]


def _orders(folder: Path) -> Iterator[dict[str, Any]]:
    for selection, arguments in LOADERS:
        loader = loader_of(folder, selection, arguments)
        for epoch in EPOCHS:
            loader.set_epoch(epoch)
            yield {"selection": selection, "arguments": arguments, "epoch": epoch, "batches": keys_of(loader)}


def _sampler_orders(folder: Path) -> Iterator[dict[str, Any]]:
    for selection, arguments in SAMPLERS:
        sampler = shardkit.ShardSampler(select(folder / selection[0], *selection[1:]), **arguments)
        for epoch in EPOCHS:
            sampler.set_epoch(epoch)
            batches = [" ".join(map(str, batch)) for batch in sampler]
            yield {"selection": selection, "arguments": arguments, "epoch": epoch, "batches": batches}


def _stream_orders(folder: Path) -> Iterator[dict[str, Any]]:
    for name, arguments in STREAMS:
        stream = shardkit.ShardStream(folder / name, decode=False, **{"rank": 0, "world_size": 1} | arguments)
        for epoch in STREAM_EPOCHS:
            stream.set_epoch(epoch)
            keys = " ".join(sample["__key__"] for sample in stream)
            yield {"dataset": name, "arguments": arguments, "epoch": epoch, "keys": keys}


def _states(folder: Path) -> Iterator[dict[str, Any]]:
    for selection, arguments, epoch, after in STATES:
        loader = loader_of(folder, selection, arguments)
        loader.set_epoch(epoch)
        batches = iter(loader)
        taken = list(batches) if after < 0 else list(islice(batches, after))
        state = loader.state_dict()
        then = []
        for change in RESUMED:
            changed = arguments | change
            other = loader_of(folder, selection, changed)
            other.load_state_dict(state)
            then.append({"arguments": changed, "batches": keys_of(other)})
        yield {"selection": selection, "taken": keys_of(taken), "state": state, "then": then}


def _numbers() -> Iterator[dict[str, Any]]:
    for number in range(200):
        yield {"__key__": f"{number:03d}", "cls": number % 13, "txt": f"number {number}"}


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype.str} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, dict) and any(isinstance(item, np.ndarray) for item in value.values()):
        return ", ".join(f"{name}: {_describe(item)}" for name, item in value.items())
    return json.dumps(value, ensure_ascii=False)


def _picture(rng: np.random.Generator, height: int, width: int) -> Any:
    ramp = np.add.outer(np.arange(height) * 9, np.arange(width) * 7)[:, :, None] + rng.integers(0, 120, 3)
    return (ramp + rng.integers(0, 12, (height, width, 3))).clip(0, 255).astype(np.uint8)


def _saved(image: Image.Image, form: str) -> bytes:
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


def _saved_array(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes | None) -> None:
    member = tarfile.TarInfo(name)
    member.mtime, member.uname, member.mode = 1_600_000_000, "stranger", 0o755 if data is None else 0o600
    member.type, member.size = (tarfile.DIRTYPE, 0) if data is None else (tarfile.REGTYPE, len(data))
    tar.addfile(member, None if data is None else io.BytesIO(data))


if __name__ == "__main__":
    main()
