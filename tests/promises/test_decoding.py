"""A field that cannot be decoded is found before training: on request, verify names it and pack refuses it."""

import io
import json
import random
import string
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

import shardkit
from shardkit.cli.app import app
from shardkit.errors import ArgumentError, CodecError
from tests.support.shared import PHOTO, PHOTO_FILES, peak_memory, saved

MIB = 1 << 20
DECODER = shardkit.Decoder(images="unchanged")  # the meaning of True: images of any depth


def _npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


# One good value for each kind of field, and for some that hold bytes, which can always be "decoded".
GOOD = {
    "jpg": PHOTO_FILES["jpg"],
    "seg.png": PHOTO_FILES["png"],
    "webp": PHOTO_FILES["webp"],
    "bmp": saved(Image.fromarray(PHOTO), "BMP"),
    "npy": _npy(np.arange(40, dtype=np.float32)),
    "npz": _npz(a=np.arange(5), b=np.ones((2, 3))),
    "json": json.dumps({"caption": "a gate, 雨", "boxes": [[0, 1.5, 3, 4]]}).encode(),
    "lines.jsonl": b'{"a": 1}\n[2]\n',
    "txt": "eine Gasse, 雨".encode(),
    "cls": b"12",
    "bin": bytes(range(256)),
}

damages = st.one_of(
    st.builds(lambda share: lambda data: data[: int(len(data) * share)], st.floats(0, 1, exclude_max=True)),
    st.builds(
        lambda share, bit: lambda data: flipped(data, int(len(data) * share), bit),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 7),
    ),
    st.binary(max_size=30).map(lambda other: lambda _: other),
    st.sampled_from(sorted(GOOD)).map(lambda other: lambda _: GOOD[other]),  # for example a JPEG named npy
)


def flipped(data, at, bit):
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    return bytes(changed)


@st.composite
def samples(draw, most=12):
    """Draw samples, some of whose fields are damaged."""
    drawn = []
    for number in range(draw(st.integers(1, most))):
        fields = draw(st.sets(st.sampled_from(sorted(GOOD)), min_size=1, max_size=4))
        sample = {field: GOOD[field] for field in sorted(fields)}
        for field in draw(st.sets(st.sampled_from(sorted(fields)), max_size=2)) if draw(st.booleans()) else ():
            sample[field] = draw(damages)(sample[field])
        drawn.append({"__key__": f"{number:03d}", **sample})
    return drawn


def fields_of(sample):
    return [name for name in sample if not name.startswith("__")]


def undecodable(drawn):
    """Return each (key, field) that the decoder refuses, in order."""
    pairs = []
    for sample in drawn:
        for field in fields_of(sample):
            try:
                DECODER.decode(field, sample[field])
            except CodecError:
                pairs.append((sample["__key__"], field))
    return pairs


def reported(report):
    return [(problem.key, problem.field) for shard in report.damaged for problem in shard.problems]


def write(folder, drawn, **options):
    with shardkit.ShardWriter(folder, **{"block_bytes": 4000, "shard_samples": 5} | options) as writer:
        for sample in drawn:
            writer.write(sample)


@given(drawn=samples(), compression=st.sampled_from(["none", "zst", "gz"]), num_workers=st.integers(1, 3))
def test_verify_names_exactly_the_fields_that_the_decoder_refuses(tmp_path_factory, drawn, compression, num_workers):
    folder = tmp_path_factory.mktemp("verify") / "train"
    write(folder, drawn, compression=compression)
    expected = undecodable(drawn)
    report = shardkit.verify(folder, decode=True, num_workers=num_workers)

    assert shardkit.verify(folder).ok, "its bytes are what was packed"
    assert reported(report) == expected
    assert report.ok == (not expected)
    assert report.problems == ()
    bad = {key for key, _ in expected}
    assert [key for shard in report.damaged for key in shard.damaged] == sorted(bad)
    assert sum(shard.samples - shard.whole for shard in report.damaged) == len(bad)
    if compression != "gz":  # the samples that training with on_error="skip" leaves out
        stream = shardkit.ShardStream(folder, shuffle=False, decode=DECODER, on_error="skip")
        assert {s["__key__"] for s in stream} == {s["__key__"] for s in drawn} - bad


@given(drawn=samples(), source=st.sampled_from(["iterable", "shards", "files", "transform"]))
def test_pack_refuses_what_the_decoder_refuses_before_it_writes_a_shard(tmp_path_factory, drawn, source):
    folder = tmp_path_factory.mktemp("pack")
    target = folder / "train"
    options = {"progress": False, "num_workers": 2, "compression": "none"}
    if source == "shards":
        write(folder / "source", drawn)
        given = shardkit.ShardSource(folder / "source")
    elif source == "files":
        for sample in drawn:
            for field in fields_of(sample):
                Path(folder, f"{sample['__key__']}.{field}").write_bytes(sample[field])
        given = shardkit.FileFolder(folder, fields=sorted(GOOD))
        target = tmp_path_factory.mktemp("packed") / "train"
    else:
        given = drawn
        options |= {"transform": dict} if source == "transform" else {}
    expected = undecodable(drawn)
    if expected:
        with pytest.raises(CodecError) as error:
            shardkit.pack(given, target, check=True, **options)
        message = str(error.value)

        assert [line for line in message.splitlines() if line.startswith("  sample ")] == sorted(
            line for line in message.splitlines() if line.startswith("  sample ")
        )
        assert all(f"sample {key!r}, field {field!r}" in message for key, field in expected)
        assert message.count("\n") == len(expected)
        assert (error.value.key, error.value.field) == expected[0]
        assert not [path for path in target.rglob("*") if path.name != "unfinished.json"]
        with pytest.raises(shardkit.DatasetError):
            shardkit.read_manifest(target)
    else:
        shardkit.pack(given, target, check=True, **options)
    # Packing without a check gives the same, and so does packing with one.
    unchecked = shardkit.pack(given, target, **options)["train"]
    assert unchecked.num_samples == len(drawn)


def test_damage_and_what_cannot_be_decoded_are_told_apart(tmp_path):
    """A sample with both faults counts once; samples after a cut are not whole; those before it are decoded."""
    cut = GOOD["jpg"][:100]
    write(
        tmp_path / "train",
        [{"__key__": f"{i}", "jpg": cut if i in (1, 3, 8) else GOOD["jpg"]} for i in range(10)],
        compression="none",
        shard_samples=10,
    )
    [path] = (tmp_path / "train").glob("*.tar")
    data = bytearray(path.read_bytes())
    data[data.index(b"1.jpg") + 512 + 50] ^= 1  # in sample 1, which cannot be decoded either
    path.write_bytes(data)
    [shard] = shardkit.verify(tmp_path / "train", decode=True).damaged

    assert (shard.samples, shard.whole, shard.damaged) == (10, 7, ("1", "3", "8"))
    assert [(p.key, p.field) for p in shard.problems if "cannot be decoded" in p.message] == [
        (key, "jpg") for key in ("1", "3", "8")
    ]
    path.write_bytes(data[: len(data) // 2])
    [shard] = shardkit.verify(tmp_path / "train", decode=True).damaged

    assert [p.key for p in shard.problems if "cannot be decoded" in p.message] == ["1", "3"]
    assert shard.whole == 3  # 0, 2 and 4


def test_the_first_fields_are_named_and_the_rest_is_counted(tmp_path):
    drawn = [{"__key__": f"{i:04d}", "json": b"{", "cls": b"x"} for i in range(1200)]
    write(tmp_path / "train", drawn, shard_samples=500)
    report = shardkit.verify(tmp_path / "train", decode=True, num_workers=3)
    named = [pair for pair in reported(report) if pair[0]]

    assert named == [(sample["__key__"], field) for sample in drawn for field in ("cls", "json")][:1000]
    assert [shard.whole for shard in report.damaged] == [0, 0, 0]
    assert [shard.problems[-1].message for shard in report.damaged[1:]] == [
        "has 1,000 more fields that cannot be decoded",
        "has 400 more fields that cannot be decoded",
    ]
    with pytest.raises(
        CodecError, match=r"because 2,400 fields cannot be decoded, in 1,200 of 1,200 samples;"
    ) as error:
        shardkit.pack(drawn, tmp_path / "packed", check=True, progress=False)
    assert str(error.value).endswith("\n  ... and 2,300 more")


@pytest.mark.multiprocess
def test_processes_find_what_threads_find(tmp_path):
    drawn = [{"__key__": f"{i:03d}", "npy": GOOD["npy"][: 40 if i % 7 == 2 else None]} for i in range(40)]
    write(tmp_path / "train", drawn)

    processes = shardkit.verify(tmp_path / "train", decode=True, num_workers=2, worker_type="process")
    assert processes == shardkit.verify(tmp_path / "train", decode=True)
    assert reported(processes) == undecodable(drawn)
    with pytest.raises(CodecError, match="because 6 fields cannot be decoded"):
        shardkit.pack(drawn, tmp_path / "a", check=True, num_workers=2, worker_type="process", progress=False)


def test_the_decoder_that_is_given_decides(tmp_path):
    drawn = [{"__key__": "a", "npy": _npy(np.zeros(1000))}]
    write(tmp_path / "train", drawn)
    small = shardkit.Decoder(max_array_bytes=100)

    assert shardkit.verify(tmp_path / "train", decode=True).ok
    assert reported(shardkit.verify(tmp_path / "train", decode=small)) == [("a", "npy")]
    with pytest.raises(CodecError, match=r"'npy': it claims an array of 8,000 bytes, the limit is max_array_bytes=100"):
        shardkit.pack(drawn, tmp_path / "a", check=small, progress=False)
    with pytest.raises(ArgumentError, match="check is 1, expected True, False or a Decoder"):
        shardkit.pack(drawn, tmp_path / "a", check=1, progress=False)
    with pytest.raises(ArgumentError, match="decode is 'jpg', expected True, False or a Decoder"):
        shardkit.verify(tmp_path / "train", decode="jpg")


@pytest.mark.parametrize("kind", [np.uint16, np.uint8, bool])
def test_images_that_are_no_photographs_are_no_damage(tmp_path, kind):
    pixels = np.arange(12).reshape(3, 4).astype(kind)
    drawn = [{"__key__": "a", "depth.png": saved(Image.fromarray(pixels), "PNG")}]
    shardkit.pack(drawn, tmp_path / "train", check=True, progress=False)

    assert shardkit.verify(tmp_path / "train", decode=True).ok


def test_a_finished_pack_is_checked_when_that_is_asked_for(tmp_path):
    source = tmp_path / "photos"
    source.mkdir()
    (source / "a.jpg").write_bytes(b"no photo")
    pack = {"destination": tmp_path / "train", "progress": False}
    shardkit.pack(shardkit.FileFolder(source), **pack)

    with pytest.raises(CodecError, match=r"sample 'a', field 'jpg', made of a\.jpg: it begins with b'no photo'"):
        shardkit.pack(shardkit.FileFolder(source), check=True, **pack)
    (source / "a.jpg").write_bytes(GOOD["jpg"])

    shardkit.pack(shardkit.FileFolder(source), check=True, overwrite=True, **pack)
    shardkit.pack(shardkit.FileFolder(source), check=True, **pack)


def test_the_command_line_does_both(tmp_path):
    source = tmp_path / "photos"
    source.mkdir()
    (source / "a.jpg").write_bytes(GOOD["jpg"])
    (source / "b.jpg").write_bytes(GOOD["jpg"][:200])
    runner = CliRunner()
    refused = runner.invoke(app, ["pack", "--kind", "files", "--check", str(source), str(tmp_path / "train")])

    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "because 1 fields cannot be decoded, in 1 of 2 samples; repair them" in refused.stderr
    assert "sample 'b', field 'jpg', made of b.jpg: " in refused.stderr
    assert runner.invoke(app, ["pack", "--kind", "files", str(source), str(tmp_path / "train")]).exit_code == 0
    assert runner.invoke(app, ["verify", str(tmp_path / "train")]).exit_code == 0
    verified = runner.invoke(app, ["verify", "--decode", "--workers", "2", str(tmp_path / "train")])

    assert verified.exit_code == 1
    assert "1 of 2 samples are whole\n  sample 'b': field 'jpg' cannot be decoded: " in verified.stdout
    assert verified.stdout.endswith("not whole: b; all others are\n2 samples in 1 shard read; 1 shard is damaged\n")


def test_checking_holds_a_few_samples_at_a_time(tmp_path):
    """Of 48 MiB, four workers' samples and one shard's reader are in memory; never all, and nothing twice."""
    noise = random.Random(1).randbytes(MIB)
    source = tmp_path / "files"
    source.mkdir()
    for letter in string.ascii_letters[:48]:
        (source / f"{letter}.bin").write_bytes(noise)
    pack = {"compression": "none", "shard_bytes": "16MiB", "progress": False, "num_workers": 2}
    plain = peak_memory(lambda: shardkit.pack(shardkit.FileFolder(source), tmp_path / "a", **pack))
    checked = peak_memory(lambda: shardkit.pack(shardkit.FileFolder(source), tmp_path / "b", check=True, **pack))

    assert checked < plain + 4 * MIB
    assert peak_memory(lambda: shardkit.verify(tmp_path / "a", decode=True, num_workers=2)) < 16 * MIB
