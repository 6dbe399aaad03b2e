"""No bit of an image is lost silently: an ``unchanged`` field has its stored values; rgb has 8 bits or is an error.

The same holds for every reader, with threads and processes, alone and in batches.
"""

import io
import tempfile
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from PIL import ExifTags, Image
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from shardkit import (
    Decoder,
    RandomResizedCrop,
    Resize,
    ResizeCenterCrop,
    Rng,
    ShardDataset,
    ShardLoader,
    ShardSource,
    ShardStream,
    pack,
)
from shardkit.cli.app import app
from shardkit.codecs.registry import encode
from shardkit.errors import ArgumentError, CodecError
from shardkit.transforms.image_source import PendingImage
from shardkit.webdataset import WebDataset
from tests.support.rasters import chunk, png_of, pnm_of, tiff_of
from tests.support.shared import PHOTO, same_array, saved

UNCHANGED = Decoder(images="unchanged")
CHANNELS = {0: (), 2: (3,), 3: (), 4: (2,), 6: (4,)}  # by colour type of a PNG
PNGS = [(0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (2, 8), (2, 16), (3, 1), (3, 2), (3, 4), (3, 8)]
PNGS += [(4, 8), (4, 16), (6, 8), (6, 16)]
# Type, photometric interpretation, channels, meaning of the last channel, bits if fewer than the type has.
TIFFS = [(np.uint8, 1, (), None, bits) for bits in (None, 1, 2, 4)]
TIFFS += [(dtype, 1, (), None, None) for dtype in (np.int8, np.uint16, np.int16, np.uint32, np.int32, np.float32)]
TIFFS += [(dtype, 2, (3,), None, None) for dtype in (np.uint8, np.uint16)]
TIFFS += [(dtype, 2, (4,), 2, None) for dtype in (np.uint8, np.uint16)]
TIFFS += [(dtype, 5, (4,), None, None) for dtype in (np.uint8, np.uint16)]
TIFFS += [
    (np.uint8, 3, (), None, None),
    (np.uint8, 3, (), None, 4),
    (np.uint8, 1, (2,), 2, None),
    (np.uint8, 0, (), None, None),
]
# Images that Pillow cannot read, or reads wrongly: an error.
ODD_TIFFS = [(np.float64, 1, (), None, None), (np.float32, 2, (3,), None, None), (np.uint16, 0, (), None, None)]
ODD_TIFFS += [(dtype, 2, (4,), extra, None) for dtype in (np.uint8, np.uint16) for extra in (0, 1)]


def numbers(draw, dtype, channels, largest=None):
    """Draw an array of up to 12 x 12 pixels."""
    shape = (draw(st.integers(1, 12)), draw(st.integers(1, 12)), *channels)
    elements = None if largest is None else st.integers(0, largest)
    return draw(npst.arrays(dtype, shape, elements=elements))


@st.composite
def pngs(draw):
    colour, bits = draw(st.sampled_from(PNGS))
    pixels = numbers(draw, np.uint16 if bits > 8 else np.uint8, CHANNELS[colour], (1 << bits) - 1)
    filters = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    extra = draw(st.sampled_from([b"", chunk(b"gAMA", b"\0\0\x55\xf0"), chunk(b"sBIT", bytes([bits]) * 3)]))
    return (
        "png",
        png_of(pixels, colour, bits, filters=filters, interlaced=draw(st.booleans()), extra=extra),
        pixels,
        bits,
    )


@st.composite
def tiffs(draw):
    dtype, photometric, channels, extra, bits = draw(st.sampled_from(TIFFS + ODD_TIFFS))
    pixels = numbers(draw, dtype, channels, None if bits is None else (1 << bits) - 1)
    planar = bool(channels) and draw(st.booleans())
    order, deflated = draw(st.sampled_from("<>")), draw(st.booleans())
    data = tiff_of(pixels, photometric, bits=bits, order=order, deflated=deflated, planar=planar, extra=extra)
    return "tif", data, pixels, bits or 8 * pixels.dtype.itemsize


@st.composite
def pnms(draw):
    largest = draw(st.sampled_from([1, 15, 100, 255, 256, 1023, 65535]) | st.integers(1, 65535))
    pixels = numbers(draw, np.uint16 if largest > 255 else np.uint8, draw(st.sampled_from([(), (3,)])), largest)
    comment = draw(st.sampled_from([b"", b"# 7 a\n"]))
    data = pnm_of(pixels, largest, is_plain=draw(st.booleans()), comment=comment)
    return "ppm", data, pixels, 16 if largest > 255 else 8


@st.composite
def written_here(draw):
    field, channels = draw(
        st.sampled_from(
            [(field, ()) for field in ("png", "bmp", "tif", "tiff", "pgm", "gif", "a.seg.png", "png.gz")]
            + [(field, (3,)) for field in ("png", "bmp", "tif", "ppm")]
            + [(field, (4,)) for field in ("png", "tif")]
        )
    )
    pixels = numbers(draw, np.uint8, channels)
    return field, encode(field, pixels), pixels, 8


files = pngs() | tiffs() | pnms() | written_here()


def pillows_rgb(data):
    """Return an 8-bit image as Pillow decodes it."""
    image = Image.open(io.BytesIO(data))
    return np.asarray((image.convert("RGBA") if "transparency" in image.info else image).convert("RGB"))


def outcome(field, data):
    """Return a field's value, or its error, which must say what to do."""
    with warnings.catch_warnings(action="ignore"):  # Pillow's, of TIFFs
        try:
            return Decoder().decode(field, data)
        except CodecError as error:
            return error


@given(file=files)
def test_unchanged_is_what_was_stored_or_an_error(file):
    field, data, pixels, _ = file
    found = outcome(f"{field}:unchanged", data)
    if isinstance(found, CodecError):
        assert field == "tif"
    else:
        assert same_array(found, pixels)
        assert found.flags.writeable
        assert found.flags.c_contiguous


@pytest.mark.parametrize("kind", TIFFS, ids=str)
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("deflated", [False, True])
def test_a_tiff_of_the_usual_kinds_is_what_was_stored_and_no_error(kind, order, deflated):
    dtype, photometric, channels, extra, bits = kind
    pixels = np.random.default_rng(0).integers(0, 1 << (bits or 7), (7, 9, *channels)).astype(dtype)
    pixels = pixels if bits else pixels * dtype(-3 if dtype in (np.int8, np.int16, np.int32, np.float32) else 2)
    data = tiff_of(pixels, photometric, bits=bits, order=order, deflated=deflated, extra=extra)

    if (dtype, order) == (np.uint32, ">"):
        with pytest.raises(CodecError, match="unknown pixel mode"):  # Pillow does not support it
            UNCHANGED.decode("tif", data)
    else:
        assert same_array(UNCHANGED.decode("tif", data), pixels)


@given(file=files)
def test_rgb_is_pillows_of_an_image_of_8_bits_and_else_an_error_that_names_the_way(file):
    field, data, _, bits = file
    found = outcome(field, data)
    if bits > 8:
        assert isinstance(found, CodecError)
        assert f"write '{field}:unchanged' in fields=" in str(found) or "unknown pixel mode" in str(found)
    elif isinstance(found, CodecError):
        assert field == "tif"
    else:
        assert (found.dtype, found.shape[2:]) == (np.uint8, (3,))
        assert field == "png.gz" or np.array_equal(found, pillows_rgb(data))


@given(file=files)
def test_a_pil_image_has_all_bits_or_is_an_error(file):
    field, data, pixels, bits = file
    found = outcome(f"{field}:pil", data)
    if isinstance(found, CodecError):
        assert bits > 8 or field == "tif"
    elif bits > 8:
        assert field == "tif" or found.mode in ("I;16", "I")
        assert field == "ppm" or np.array_equal(np.asarray(found).astype(pixels.dtype), pixels)
        assert len(np.unique(np.asarray(found))) == len(np.unique(pixels))  # Pillow scales the values of a PGM


def test_which_images_of_more_bits_a_pil_image_can_be():
    grey, colours = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000, np.zeros((8, 8, 3), np.uint16)

    assert outcome("png:pil", png_of(grey, 0, 16)).mode == "I;16"
    message = (
        "its pixels are 16-bit, of which a PIL image would keep 8; ':unchanged' keeps all; write 'png:unchanged' in"
    )
    for data in (png_of(colours, 2, 16), pnm_of(colours, 65535), tiff_of(colours, 2)):
        assert message in str(outcome("png:pil", data))


@pytest.mark.parametrize(("colour", "bits"), [(0, 16), (2, 16), (4, 16), (6, 16), (2, 8)])
def test_a_png_whose_header_is_not_its_first_chunk_is_what_was_stored_or_an_error(colour, bits):
    pixels = np.full((3, 4, *CHANNELS[colour]), (1 << bits) - 2, np.uint16 if bits > 8 else np.uint8)
    data = png_of(pixels, colour, bits)
    odd = data[:8] + chunk(b"tEXt", b"Comment\0a comment, long enough") + data[8:]
    for found in (outcome("png:unchanged", odd), outcome("png", odd)):
        assert isinstance(found, CodecError) or same_array(found, pixels)


@pytest.mark.parametrize("text", [b"", b"1 2 3", b"1 2 3 x", b"1 2 3 -4", b"1 2 3 70000", b"1 2 3 4#"])
def test_a_plain_pgm_of_other_than_its_numbers_is_an_error(text):
    found = outcome("pgm:unchanged", b"P2 2 2 65535\n" + text)

    assert isinstance(found, CodecError) != text.endswith(b"#")


def test_a_grey_jpeg_stays_grey_and_colours_are_those_of_rgb():
    for image in (Image.fromarray(PHOTO), Image.fromarray(PHOTO[:, :, 0])):
        data = saved(image, "JPEG")
        rgb, found = Decoder().decode("jpg", data), UNCHANGED.decode("jpg", data)

        assert np.array_equal(found, rgb if image.mode == "RGB" else rgb[:, :, 0])
    cmyk = Image.fromarray(PHOTO).convert("CMYK")
    assert UNCHANGED.decode("jpg", saved(cmyk, "JPEG")).shape == (40, 48, 4)
    assert UNCHANGED.decode("webp", saved(Image.fromarray(PHOTO), "WEBP", lossless=True)).shape == PHOTO.shape


@given(pixels=npst.arrays(np.bool_, (5, 9)), form=st.sampled_from(["PNG", "TIFF", "BMP", "PPM"]))
def test_black_is_0_and_white_is_1(pixels, form):
    assert same_array(UNCHANGED.decode("png", saved(Image.fromarray(pixels), form)), pixels.astype(np.uint8))


@given(pixels=npst.arrays(np.uint8, (9, 5), elements=st.integers(0, 20)), form=st.sampled_from(["PNG", "TIFF", "BMP"]))
def test_a_palette_is_the_numbers_of_its_pixels(pixels, form):
    image = Image.fromarray(pixels)
    image.putpalette([(37 * i) % 256 for i in range(63)])
    data = saved(image, form)

    assert same_array(UNCHANGED.decode("png", data), pixels)
    assert np.array_equal(Decoder().decode("png", data), np.asarray(image.convert("RGB")))


# Readers

MASK, DEPTH = PHOTO[:, :, 0] % 7, np.arange(40 * 48, dtype=np.uint16).reshape(40, 48) * 31
COLOURS = np.stack([DEPTH, DEPTH[::-1], DEPTH ^ 255], axis=2)


def sample(i):
    """Return the stored fields of a sample, and their ``unchanged`` values."""
    palette = Image.fromarray((MASK + i) % 7)
    palette.putpalette(list(range(21)))
    made = {
        "mask.png": (MASK + i).astype(np.uint8),
        "depth.png": (DEPTH + i).astype(np.uint16),
        "flow.png": (COLOURS + i).astype(np.uint16),
        "classes.png": np.asarray(palette),
        "alpha.png": np.dstack([PHOTO, MASK + i]).astype(np.uint8),
    }
    fields = {
        "__key__": f"{i:02d}",
        "jpg": np.roll(PHOTO, i, 0),
        "mask.png": made["mask.png"],
        "depth.png": png_of(made["depth.png"], 0, 16, filters=(2, 4)),
        "flow.png": png_of(made["flow.png"], 2, 16, filters=(1, 3)),
        "classes.png": saved(palette, "PNG"),
        "alpha.png": made["alpha.png"],
        "cls": i,
    }
    return fields, made


SAMPLES = 12
STORED = {f"{i:02d}": sample(i)[1] for i in range(SAMPLES)}
NAMES = list(STORED["00"])
TUPLE = tuple(f"{name}:unchanged" for name in NAMES)
MAPPING = {name: f"tif:unchanged;{name}:unchanged?" for name in NAMES}
EVERYTHING = {"fields": tuple(NAMES), "decode": UNCHANGED}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return a dataset with images of all kinds."""
    folder = tmp_path_factory.mktemp("depth") / "stored"
    pack([sample(i)[0] for i in range(SAMPLES)], folder, shard_samples=5, compression="none", progress=False)
    return folder


def by_key(samples):
    return {one["__key__"]: {name: one[name] for name in NAMES} for one in samples}


def last(image):
    """Return an image of a batch as an array with the channels last."""
    return (image.permute(1, 2, 0) if image.ndim == 3 else image).numpy()


def taken_apart(batches):
    """Return the arrays in batches by key, with the channels last again."""
    found = {}
    for batch in batches:
        for i, key in enumerate(batch["__key__"]):
            found[key] = {name: last(batch[name][i]) for name in NAMES}
    return found


def is_stored(found):
    return found.keys() == STORED.keys() and all(
        same_array(np.ascontiguousarray(found[key][name]), STORED[key][name]) for key in STORED for name in NAMES
    )


SPELLINGS = {"tuple": {"fields": TUPLE}, "mapping": {"fields": MAPPING}, "decoder": EVERYTHING}
SPELLINGS["undecoded"] = {"fields": TUPLE, "decode": False}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_reader_gives_what_was_stored_however_it_is_spelled(stored, spelling):
    options = SPELLINGS[spelling]
    dataset = ShardDataset(stored, **options)
    stream = partial(ShardStream, stored, **options)

    assert is_stored(by_key(dataset[i] for i in range(SAMPLES)))
    assert is_stored(by_key(stream()))
    assert is_stored(taken_apart(ShardLoader(dataset, 5)))
    assert is_stored(taken_apart(stream(batch_size=5)))


@pytest.mark.timeout(600)  # nightly it packs a thousand datasets
@given(found=st.lists(files, min_size=1, max_size=3))
def test_every_reader_gives_what_any_file_holds(found):
    # The first image is good, because a loader must have seen a batch before one that loses all samples.
    named = [("png", encode("png", np.zeros((2, 2, 3), np.uint8)))]
    named += [(field.rpartition(".")[2].replace("gz", "png.gz"), data) for field, data, _, _ in found]
    with tempfile.TemporaryDirectory() as folder:
        samples = [{"__key__": str(i), field: data} for i, (field, data) in enumerate(named)]
        pack(samples, f"{folder}/any", shuffle=False, compression="none", progress=False)
        alternatives = ";".join(f"{field}:unchanged" for field in sorted({field for field, _ in named}))
        options = {"fields": {"image": alternatives}}
        expected = {str(i): outcome(f"{field}:unchanged", data) for i, (field, data) in enumerate(named)}
        expected = {key: value for key, value in expected.items() if isinstance(value, np.ndarray)}
        dataset = ShardDataset(f"{folder}/any", **options)
        with warnings.catch_warnings(action="ignore"):  # Pillow's, of TIFFs
            loader = ShardLoader(dataset, 1, shuffle=False, num_workers=1, on_error="skip")
            stream = ShardStream(f"{folder}/any", on_error="skip", **options)
            readers = {
                "dataset": {key: dataset.by_key(key)["image"] for key in expected},
                "loader": {key: last(batch["image"][0]) for batch in loader for key in batch["__key__"]},
                "stream": {one["__key__"]: one["image"] for one in stream},
            }
    for reader, images in readers.items():
        assert images.keys() == expected.keys(), reader
        assert all(same_array(np.ascontiguousarray(images[key]), expected[key]) for key in expected), reader


@pytest.mark.multiprocess
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_processes_give_what_was_stored(stored):
    dataset = ShardDataset(stored, fields=TUPLE)
    loader = ShardLoader(dataset, 4, num_workers=2, worker_type="process")

    assert is_stored(taken_apart(loader))
    assert is_stored(taken_apart(loader))  # into shared memory
    batches = DataLoader(ShardStream(stored, fields=TUPLE, batch_size=3), batch_size=None, num_workers=2)
    assert is_stored(taken_apart(batches))
    found = {}
    for batch in DataLoader(dataset, batch_size=5, num_workers=2):  # torch's batches have the channels last
        found |= {key: {name: batch[name][i].numpy() for name in NAMES} for i, key in enumerate(batch["__key__"])}
    assert is_stored(found)


def test_a_batch_has_the_shape_and_type_of_its_images(stored):
    dataset = ShardDataset(stored, fields=TUPLE)
    for batches in (ShardLoader(dataset, 4, drop_last=True), ShardStream(stored, fields=TUPLE, batch_size=4)):
        for batch in batches:
            assert batch["mask.png"].shape == batch["classes.png"].shape == (4, 40, 48)
            assert (batch["mask.png"].dtype, batch["depth.png"].dtype) == (torch.uint8, torch.uint16)
            assert (batch["flow.png"].shape, batch["flow.png"].dtype) == ((4, 3, 40, 48), torch.uint16)
            assert (batch["alpha.png"].shape, batch["alpha.png"].dtype) == ((4, 4, 40, 48), torch.uint8)


def test_a_field_comes_in_several_ways_under_several_names(stored):
    fields = {"rgb": "mask.png:rgb", "grey": "mask.png:unchanged", "raw": "mask.png:bytes", "pil": "mask.png:PIL"}
    fields |= {"none": "gif:unchanged?", "image": "mask.png", "label": "cls:bytes"}
    dataset = ShardDataset(stored, fields=fields)
    for one in (dataset.by_key("03"), {s["__key__"]: s for s in ShardStream(stored, fields=fields)}["03"]):
        mask = STORED["03"]["mask.png"]

        assert same_array(one["grey"], mask)
        assert np.array_equal(one["rgb"], np.stack([mask] * 3, 2))
        assert np.array_equal(one["image"], one["rgb"])
        assert one["raw"] == encode("png", mask)
        assert (one["pil"].mode, np.asarray(one["pil"]).tolist()) == ("L", mask.tolist())
        assert (one["none"], one["label"]) == (None, b"3")
    batch = next(iter(ShardLoader(dataset, 3)))
    assert (batch["rgb"].shape, batch["grey"].shape) == ((3, 3, 40, 48), (3, 40, 48))
    assert [type(one) for one in batch["raw"]] == [bytes] * 3


def test_undecoded_fields_and_labels_are_gathered_by_whole_blocks_with_the_same_result(stored):
    fields = {"raw": "depth.png:bytes", "label": "cls", "text": "cls:bytes"}
    dataset = ShardDataset(stored, fields=fields)
    rows = {one["__key__"]: one for one in (dataset[i] for i in range(SAMPLES))}
    for batch in ShardLoader(dataset, 4):
        for i, key in enumerate(batch["__key__"]):
            assert {name: batch[name][i] for name in fields} == {name: rows[key][name] for name in fields}


def test_sixteen_bits_as_rgb_are_an_error_for_every_reader(stored):
    message = r"field 'depth\.png' cannot be decoded: its pixels are 16-bit.*; write 'depth\.png:unchanged' in fields="
    crop = {"depth.png": Resize(8)}
    for options in ({}, {"transform": crop}, {"transform": {"depth.png": Resize(8, exif=True)}}):
        dataset = ShardDataset(stored, fields=("depth.png",), **options)
        for read in (lambda d=dataset: d[0], lambda d=dataset: list(ShardLoader(d, 2))):
            with pytest.raises(CodecError, match=message):
                read()
        with pytest.raises(CodecError, match=message):
            list(ShardStream(stored, fields=("depth.png",), **options))


def test_webdatasets_pipeline_gets_what_is_asked_for(stored):
    stages = WebDataset(str(stored), fields={"depth": "depth.png:unchanged", "jpg": "jpg"}).decode("rgb8", partial=True)
    found = dict(stages.to_tuple("__key__", "depth"))

    assert all(same_array(found[key], STORED[key]["depth.png"]) for key in STORED)


def test_filters_and_columns_may_look_at_what_is_stored(stored, tmp_path):
    deepest = {"deepest": lambda one: int(one["depth.png:unchanged"].max())}
    source = ShardSource(stored, filter=lambda one: one["depth.png:unchanged"].max() > DEPTH.max() + 5)
    pack(source, tmp_path / "deep", columns=deepest, progress=False)
    dataset = ShardDataset(tmp_path / "deep", columns=["deepest"], fields=("cls",))
    assert {dataset[i]["deepest"] for i in range(len(dataset))} == {int(DEPTH.max()) + i for i in range(6, SAMPLES)}


# Transforms

TRANSFORMS = {"crop": RandomResizedCrop, "middle": ResizeCenterCrop, "whole": Resize}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("exif", [False, True])
def test_masks_are_cut_with_their_image_and_stay_what_they_are(stored, transform, exif):
    masks = ("mask.png", "depth.png", "classes.png")
    make = TRANSFORMS[transform]((16, 20), nearest=masks, exif=exif)
    fields = ("jpg", *(f"{name}:unchanged" for name in masks))
    dataset = ShardDataset(stored, fields=fields)
    plain = TRANSFORMS[transform]((16, 20), nearest=masks)
    expected = {}
    for i in range(SAMPLES):
        one = dataset[i]
        key = one.pop("__key__")
        one.pop("__url__")
        expected[key] = partial(plain, one)
    loader = ShardLoader(dataset, 5, seed=3, transform={("jpg", *masks): make})
    for batch in loader:
        for name in masks:
            dtype = torch.uint16 if name == "depth.png" else torch.uint8
            assert (batch[name].dtype, batch[name].shape[1:]) == (dtype, (16, 20))
            for i, key in enumerate(batch["__key__"]):
                assert set(np.unique(batch[name][i])) <= set(np.unique(STORED[key][name]))
        assert batch["jpg"].shape[1:] == (3, 16, 20)
    if transform != "crop":  # a crop depends on the position
        made = {key: one for batch in loader for key, one in zip(batch["__key__"], batch["depth.png"], strict=True)}
        assert all(np.array_equal(made[key], expected[key]()["depth.png"]) for key in expected)


@given(key=st.integers(0, 1 << 30), data=st.data())
def test_a_mask_that_is_not_decoded_yet_is_cut_like_one_that_is(key, data):
    field, stored, pixels, _ = data.draw(pngs() | pnms())
    crop = RandomResizedCrop((7, 5), nearest=("mask",))
    pending = PendingImage(stored, max_pixels=10_000, field=field, key="", url="", is_unchanged=True)
    made = crop({"mask": pending}, Rng(key))["mask"]

    assert same_array(np.ascontiguousarray(made), crop({"mask": pixels}, Rng(key))["mask"])


def test_a_mask_as_a_pil_image_keeps_its_numbers_too(stored):
    for mask, images, exif in (
        ("classes.png:pil", "rgb", True),
        ("classes.png", "pil", True),
        ("classes.png:unchanged", "pil", False),
    ):
        make = Resize((20, 24), nearest=("mask",), exif=exif)
        options = {"fields": {"jpg": "jpg", "mask": mask}, "decode": Decoder(images=images)}
        dataset = ShardDataset(stored, transform={("jpg", "mask"): make}, **options)

        assert np.array_equal(dataset.by_key("02")["mask"], STORED["02"]["classes.png"][1::2, 1::2])


def test_a_transform_that_is_given_more_bits_says_which_way_keeps_them():
    for give in (
        lambda: Resize(8)(Image.fromarray(DEPTH)),
        lambda: Resize(8).decode_into(pnm_of(DEPTH, 65535), np.empty((8, 8, 3), np.uint8)),
        lambda: Resize(8, exif=True).decode_into(pnm_of(DEPTH, 65535), np.empty((8, 8, 3), np.uint8)),
    ):
        with pytest.raises(ValueError, match=r"its pixels are 16-bit, expected 8 bits, .*':unchanged' does"):
            give()


def test_what_is_stored_is_turned_by_its_exif_orientation():
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    grey = Image.fromarray(DEPTH)
    for data in (saved(grey, "PNG", exif=exif), saved(Image.fromarray(MASK), "PNG", exif=exif)):
        turned = np.rot90(UNCHANGED.decode("png", data), -1)
        pending = PendingImage(data, max_pixels=10_000, field="png", key="", url="", is_unchanged=True)
        made = Resize((48, 40), exif=True, nearest=("mask",))({"mask": pending})["mask"]

        assert same_array(np.ascontiguousarray(made), np.ascontiguousarray(turned))


def test_a_pgm_of_16_bits_is_read_also_where_images_are_turned(tmp_path):
    pack([{"__key__": "a", "pgm": pnm_of(DEPTH, 65535)}], tmp_path / "pgm", progress=False)
    for exif in (False, True):
        fields, transform = {"depth": "pgm:unchanged"}, {("depth",): Resize((40, 48), exif=exif, nearest=("depth",))}

        assert same_array(ShardDataset(tmp_path / "pgm", fields=fields, transform=transform)[0]["depth"], DEPTH)
        (one,) = ShardStream(tmp_path / "pgm", fields=fields, transform=transform)
        assert same_array(one["depth"], DEPTH)


@pytest.mark.parametrize("name", ["mask.png", "depth.png", "classes.png", "alpha.png"])
def test_what_is_not_rgb_is_not_mixed_but_refused(stored, name):
    for transform in ({name: Resize(8)}, {name: Resize(8, exif=True)}):
        dataset = ShardDataset(stored, fields=(f"{name}:unchanged",), transform=transform)
        with pytest.raises(ArgumentError, match=f"{name}: expected uint8 .* is resized only if nearest= names it"):
            dataset[0]


# Refused arguments


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("cls:unchanged",), "'cls' is no image, and 'unchanged' is for images; leave it out, or write 'cls:bytes'"),
        ({"label": "jpg;cls:pil"}, "'cls' is no image"),
        (("mask.png:grey",), "'grey' is not a way to decode it, expected rgb, unchanged, bytes or pil"),
        (("mask.png:",), "'' is not a way to decode it"),
        (("mask.png?:unchanged",), "has a '[?]' that is not at its end"),
    ],
)
def test_what_cannot_be_is_an_error_where_it_is_written(stored, fields, message):
    for make in (ShardDataset, ShardStream):
        for decode in (True, False):
            with pytest.raises(ArgumentError, match=message):
                make(stored, fields=fields, decode=decode)


def is_equal_depth(dataset):
    found = {one["__key__"]: one["depth.png"] for one in dataset[:]}
    return found.keys() == STORED.keys() and all(same_array(found[key], STORED[key]["depth.png"]) for key in STORED)


def test_packing_copies_what_is_stored_and_refuses_to_decode(stored, tmp_path):
    pack(ShardSource(stored, fields=("depth.png:unchanged", "cls")), tmp_path / "again", progress=False)

    assert is_equal_depth(ShardDataset(tmp_path / "again", fields=("depth.png:unchanged",)))
    with pytest.raises(ArgumentError, match=r"'depth\.png:rgb': nothing is decoded here"):
        ShardSource(stored, fields=("depth.png:rgb",))


def test_the_command_line_knows_the_same_spelling(stored, tmp_path):
    def invoke(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    packed = invoke("pack", stored, tmp_path / "again", "--fields", "depth.png:unchanged,cls")
    assert packed.exit_code == 0, packed.output
    assert is_equal_depth(ShardDataset(tmp_path / "again", fields=("depth.png:unchanged",)))
    for spelled in ("depth.png", "depth.png:unchanged", "depth.png:bytes"):
        assert invoke("cat", stored, "03", spelled).stdout_bytes == sample(3)[0]["depth.png"]
    for arguments in (("cat", stored, "03", "depth.png:rgb"), ("pack", stored, tmp_path / "b", "--fields", "jpg:pil")):
        refused = invoke(*arguments)
        assert refused.exit_code == 2
        assert "nothing is decoded here, fields stay as they are stored; leave out ':" in refused.stderr
    for i in range(SAMPLES):
        folder = tmp_path / "files"
        folder.mkdir(exist_ok=True)
        (folder / f"{i:02d}.depth.png").write_bytes(sample(i)[0]["depth.png"])
    packed = invoke("pack", tmp_path / "files", tmp_path / "third", "--fields", "depth.png:unchanged")
    assert packed.exit_code == 0, packed.output
    assert is_equal_depth(ShardDataset(tmp_path / "third", fields=("depth.png:unchanged",)))


def test_a_decoder_knows_the_same_words():
    data = encode("png", MASK)

    assert Decoder(images="numpy") == Decoder(images="rgb") == Decoder()
    assert Decoder(images="bytes").decode("png", data) == data
    assert Decoder(images="bytes").decode("cls", b"7") == 7
    assert same_array(Decoder(images="pil").decode("png:unchanged", data), MASK)
    with pytest.raises(ArgumentError, match="images must be one of rgb, unchanged, bytes, pil, got 'grey'"):
        Decoder(images="grey")
