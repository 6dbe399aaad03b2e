"""One verdict for a file: whichever part of a JPEG is requested, and however small, damage anywhere is an error.

A file refused for one box is refused for every box, in every epoch. Otherwise a box has the pixels of the whole.
"""

import numpy as np
import pytest
import simplejpeg
from hypothesis import event, example, given
from hypothesis import strategies as st

from shardkit import (
    Decoder,
    RandomResizedCrop,
    Resize,
    ResizeCenterCrop,
    Rng,
    ShardDataset,
    ShardLoader,
    ShardStream,
    pack,
)
from shardkit.codecs.images import MAX_SCANS, decode_jpeg, decode_other_image, jpeg_size
from shardkit.errors import CodecError
from shardkit.transforms.image_source import Box, Shape, divisor_of, open_source
from tests.support.jpegs import JPEGS, of_scans, segment
from tests.support.shared import examples

MAX_PIXELS = 1_000_000  # a flipped bit may be in the height

# The place where a file is cut, and the bits that are flipped, as fractions of its length.
parts = st.floats(0, 1, exclude_max=True)
damages = st.one_of(
    st.none(),
    st.tuples(st.just("cut"), st.lists(parts, min_size=1, max_size=1)),
    st.tuples(st.just("flip"), st.lists(parts, min_size=1, max_size=3)),
    st.tuples(st.just("hole"), st.lists(parts, min_size=1, max_size=1)),
)
files = st.sampled_from(sorted(JPEGS))


def place(part, length):
    """Return the position at a fraction of a length; it is less than the length even if rounding would reach it."""
    return min(int(part * length), length - 1)


def damaged(data, damage):
    """Return a file that is cut, has flipped bits, or lacks 20 bytes."""
    if damage is None:
        return data
    kind, where = damage
    if kind == "cut":
        return data[: place(where[0], len(data))]
    if kind == "hole":
        at = int(where[0] * (len(data) - 22))
        return data[:at] + data[at + 20 :]
    changed = bytearray(data)
    for part in where:
        at, bit = divmod(place(part, 8 * len(data)), 8)
        changed[at] ^= 1 << bit
    return bytes(changed)


def outcome(function):
    """Return the result of a function, or None if it raises."""
    try:
        return function()
    except Exception:  # noqa: BLE001 - of Pillow, anything
        return None


def decoded_whole(data, divisor):
    """Return all pixels of a file, decoded at a smaller scale."""
    size = jpeg_size(data, max_pixels=MAX_PIXELS)
    pixels = decode_jpeg(data, size, divisor=divisor) if size else None
    return decode_other_image(data, max_pixels=MAX_PIXELS) if pixels is None else pixels


@examples(10)
@given(name=files, damage=damages, box=st.tuples(parts, parts, parts, parts), smaller=st.integers(1, 60))
def test_a_box_is_refused_if_and_only_if_the_whole_file_is_and_has_its_pixels(name, damage, box, smaller):
    data = damaged(JPEGS[name], damage)
    source = outcome(lambda: open_source(data, max_pixels=MAX_PIXELS, exif=False))
    if source is None:
        event("refused when it is opened")
        assert outcome(lambda: decoded_whole(data, 1)) is None
        return
    top, left = place(box[0], source.height), place(box[1], source.width)
    height, width = 1 + place(box[2], source.height - top), 1 + place(box[3], source.width - left)
    shape = Shape(max(1, height // smaller), max(1, width // smaller))
    divisor = divisor_of(Box(top, left, height, width), shape)
    at = Box(*(number // divisor * divisor for number in (top, left, height, width)))
    whole, part = outcome(lambda: decoded_whole(data, divisor)), outcome(lambda: source.pixels(at, shape))

    event(f"refused {'as a whole' if whole is None else 'not'}, 1/{divisor}")
    assert (whole is None) == (part is None), "refused for one of both"
    if whole is not None:
        scale = divisor if len(whole) < source.height else 1  # Pillow does not decode at a smaller scale
        assert np.array_equal(part, Box(*(number // scale for number in at)).of(whole))


@examples(10)
@example(name="garbage before the tables {'restart_marker_rows': 1}", cut=0.99999, key=0)  # the end marker alone
@given(name=files, cut=parts, key=st.integers(0, 1 << 30))
def test_a_file_that_is_cut_is_refused_whatever_is_taken_of_it(name, cut, key):
    data = JPEGS[name]
    if name.startswith("two images"):  # the second image is never read
        data = data[: len(data) // 2]
    data = data[: place(cut, len(data))]
    out = np.empty((4, 4, 3), np.uint8)
    for transform in (RandomResizedCrop(4, scale=(0.01, 0.05)), ResizeCenterCrop(4, crop=0.1), Resize(4)):
        assert outcome(lambda: transform.decode_into(data, out, Rng(key), max_pixels=MAX_PIXELS) or out) is None  # noqa: B023
    for decoding in ("rgb", "unchanged", "pil"):
        assert outcome(lambda: Decoder().decode(f"jpg:{decoding}", data)) is None  # noqa: B023


@examples(10)
@given(name=files, damage=damages, key=st.integers(0, 1 << 30), size=st.sampled_from([2, 9, 24]))
def test_every_transform_refuses_what_the_decoder_refuses_and_nothing_else(name, damage, key, size):
    data = damaged(JPEGS[name], damage)
    decoder = Decoder(max_pixels=MAX_PIXELS)
    whole = outcome(lambda: decoder.decode("jpg", data))
    event("refused" if whole is None else f"decoded, {damage and damage[0]}")
    for transform in (
        RandomResizedCrop(size),
        RandomResizedCrop(size, scale=(0.01, 0.1)),
        ResizeCenterCrop(size),
        Resize(size),
    ):
        out = np.empty((size, size, 3), np.uint8)
        made = outcome(lambda: transform.decode_into(data, out, Rng(key), max_pixels=MAX_PIXELS) or out)  # noqa: B023

        assert (made is None) == (whole is None), f"{transform} gives another verdict"
        if whole is not None and size == 24:  # too large for a box to be decoded at a smaller scale
            assert np.array_equal(made, transform(whole, Rng(key)))
    for decoding in ("unchanged", "pil"):
        found = outcome(lambda: decoder.decode(f"jpg:{decoding}", data))  # noqa: B023
        assert (found is None) == (whole is None), f"{decoding} gives another verdict"


CROPS = {"small": RandomResizedCrop(16, scale=(0.02, 0.2)), "tiny": RandomResizedCrop(2), "middle": ResizeCenterCrop(8)}


def test_every_kind_of_file_is_decoded_as_long_as_it_is_whole():
    decoded = {name for name in JPEGS if outcome(lambda: Decoder().decode("jpg", JPEGS[name])) is not None}  # noqa: B023

    assert sorted(JPEGS.keys() - decoded) == []


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Return a dataset of damaged and whole files, and the keys of those that the decoder accepts."""
    rng = np.random.default_rng(1)
    samples, whole = [], set()
    for name in sorted(JPEGS):
        for damage in (None, ("cut", [rng.uniform(0.7, 1)]), ("flip", rng.uniform(0.2, 1, 1)), ("hole", [0.9])):
            data = damaged(JPEGS[name], damage)
            key = f"{len(samples):03d}"
            samples.append({"__key__": key, "jpg": data})
            if outcome(lambda: Decoder().decode("jpg", data)) is not None:  # noqa: B023
                whole.add(key)
    folder = tmp_path_factory.mktemp("verdict") / "photos"
    pack(samples, folder, progress=False, compression="none")
    return folder, whole


@pytest.mark.parametrize("crop", CROPS)
def test_the_same_files_are_skipped_in_every_epoch_whatever_is_cut_out(photos, crop):
    folder, whole = photos
    dataset = ShardDataset(folder, fields={"image": "jpg"})
    loader = ShardLoader(dataset, 16, transform={"image": CROPS[crop]}, on_error="skip", max_skipped=len(dataset))
    stream = ShardStream(
        folder, fields={"image": "jpg"}, transform={"image": CROPS[crop]}, on_error="skip", max_skipped=len(dataset)
    )

    assert 0 < len(whole) < len(dataset)
    for _ in range(2):
        assert {key for batch in loader for key in batch["__key__"]} == whole
        assert {sample["__key__"] for sample in stream} == whole


# Scans

BOMB = of_scans(MAX_SCANS + 1)
DECODINGS = ["rgb", "unchanged", "pil"]


@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("is_simple", [True, False])
def test_a_jpeg_of_too_many_scans_is_refused_before_it_is_decoded(monkeypatch, decoding, is_simple):
    def must_not_be_decoded(*_, **__):
        raise AssertionError

    if not is_simple:
        monkeypatch.setitem(__import__("sys").modules, "simplejpeg", None)
    assert Decoder(images=decoding).decode("jpg", of_scans(MAX_SCANS)) is not None

    monkeypatch.setattr(simplejpeg, "decode_jpeg", must_not_be_decoded)
    monkeypatch.setattr("PIL.JpegImagePlugin.JpegImageFile.load", must_not_be_decoded)
    with pytest.raises(CodecError, match=f"it is a JPEG of more than {MAX_SCANS} scans, as no encoder makes them"):
        Decoder(images=decoding).decode("jpg", BOMB)


def test_every_reader_refuses_a_jpeg_of_too_many_scans(tmp_path):
    pack([{"__key__": "0", "jpg": BOMB}, {"__key__": "1", "jpg": of_scans(3)}], tmp_path / "bombs", progress=False)
    for transform in (None, {"jpg": Resize(4)}, {"jpg": RandomResizedCrop(1)}, {"jpg": Resize(4, exif=True)}):
        stream = ShardStream(tmp_path / "bombs", transform=transform, on_error="skip")
        loader = ShardLoader(ShardDataset(tmp_path / "bombs"), 2, transform=transform, on_error="skip")

        assert [sample["__key__"] for sample in stream] == ["1"]
        assert [batch["__key__"] for batch in loader] == [["1"]]
        with pytest.raises(CodecError, match="more than 100 scans"):
            ShardDataset(tmp_path / "bombs", transform=transform).by_key("0")


@pytest.mark.parametrize("number", [1, 10, MAX_SCANS])
def test_what_looks_like_a_scan_and_is_none_does_not_count(number):
    looks = b"\xff\xda" * 2 * MAX_SCANS
    thumbnails = b"".join(segment(marker, looks) for marker in (0xE1, 0xFE, 0xED))
    for data in (of_scans(number, before=thumbnails), of_scans(number) + BOMB):
        assert np.array_equal(Decoder().decode("jpg", data), Decoder().decode("jpg", of_scans(number)))


@given(number=st.integers(MAX_SCANS - 3, MAX_SCANS + 3), fill=st.integers(0, 5), comments=st.integers(0, 3))
def test_scans_are_counted_whatever_is_between_them(number, fill, comments):
    between = segment(0xFE, b"\xff\xda" * 9) * comments + b"\xff" * fill
    data = of_scans(number).replace(b"\xff\xda", between + b"\xff\xda")

    assert (outcome(lambda: Decoder().decode("jpg", data)) is None) == (number > MAX_SCANS)
