"""Boxes of images are the same whether the file is decoded for them or was decoded before."""

import io
import struct
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps

from shardkit.codecs.registry import MAX_PIXELS, Decoder
from shardkit.errors import ArgumentError, CodecError
from shardkit.transforms import image_source as boxes
from shardkit.transforms.image_source import ArraySource, Box, PendingImage, Shape, aligned, divisor_of, open_source
from tests.support.shared import DECODER, LARGE_PHOTO, PHOTO, PHOTO_FILES, saved

WHOLE = Box(0, 0, *PHOTO.shape[:2])
sides = st.integers(1, 5000)


def source_of(data, *, max_pixels=MAX_PIXELS, exif=False):
    return open_source(data, max_pixels=max_pixels, exif=exif)


def with_orientation(image, form, orientation):
    exif = Image.Exif()
    exif[ExifTags.Base.Make] = "a camera"
    exif[ExifTags.Base.Orientation] = orientation
    return saved(image, form, exif=exif)


@pytest.mark.parametrize("form", PHOTO_FILES)
@pytest.mark.parametrize("view", [bytes, memoryview])
def test_a_box_of_a_file_is_that_box_of_the_decoded_image(form, view):
    source = source_of(view(PHOTO_FILES[form]))
    box = Box(3, 5, 20, 17)

    assert (source.height, source.width) == PHOTO.shape[:2]
    assert np.array_equal(source.pixels(box, Shape(8, 8)), DECODER.decode("jpg", PHOTO_FILES[form])[3:23, 5:22])


def test_a_jpeg_is_decoded_smaller_where_that_is_enough():
    source = source_of(saved(Image.fromarray(LARGE_PHOTO), "JPEG", quality=95))

    for side, divisor in ((8, 8), (12, 8), (13, 4), (25, 4), (26, 2), (50, 2), (51, 1), (400, 1)):
        pixels = source.pixels(Box(0, 0, 400, 480), Shape(side, side))
        mean = LARGE_PHOTO.reshape(400 // divisor, divisor, 480 // divisor, divisor, 3).mean((1, 3))

        assert pixels.shape == mean.shape
        assert np.abs(pixels - mean).mean() < 2


def test_a_box_that_a_smaller_image_has_no_whole_pixels_of_is_decoded_whole():
    source = source_of(saved(Image.fromarray(LARGE_PHOTO), "JPEG", quality=95))

    assert source.pixels(Box(8, 16, 256, 256), Shape(8, 8)).shape == (32, 32, 3)
    assert source.pixels(Box(4, 16, 256, 256), Shape(8, 8)).shape == (64, 64, 3)
    assert source.pixels(Box(8, 16, 258, 256), Shape(8, 8)).shape == (129, 128, 3)
    assert source.pixels(Box(9, 16, 256, 256), Shape(8, 8)).shape == (256, 256, 3)


def test_also_smaller_a_box_is_the_part_it_says():
    source = source_of(saved(Image.fromarray(LARGE_PHOTO), "JPEG", quality=95))
    found = source.pixels(Box(64, 128, 256, 320), Shape(8, 8))
    mean = LARGE_PHOTO[64:320, 128:448].reshape(32, 8, 40, 8, 3).mean((1, 3))

    assert np.abs(found - mean).mean() < 2


@given(box=st.builds(Box, sides, sides, sides, sides), shape=st.builds(Shape, st.integers(1, 300), st.integers(1, 300)))
def test_an_aligned_box_lies_in_the_box_but_for_less_than_a_pixel_of_the_smaller_image(box, shape):
    found, divisor = aligned(box, shape), divisor_of(box, shape)

    assert divisor in (1, 2, 4, 8)
    assert all(number % divisor == 0 and 0 <= old - number < divisor for old, number in zip(box, found, strict=True))
    assert divisor == 1 or min(found.height / shape.height, found.width / shape.width) > 3 * divisor


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_an_image_is_turned_as_its_exif_orientation_says_when_asked(form, orientation):
    data = with_orientation(Image.fromarray(LARGE_PHOTO), form, orientation)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    turned, stored = source_of(data, exif=True), source_of(data)
    box = Box(16, 32, 200, 304)

    assert (turned.height, turned.width) == upright.shape[:2]
    assert np.abs(turned.pixels(box, Shape(200, 300)).astype(int) - box.of(upright)).max() <= 2
    if form != "TIFF":  # which Pillow always turns
        assert (stored.height, stored.width) == (400, 480)
    assert np.array_equal(stored.pixels(box, Shape(200, 300)), box.of(DECODER.decode("jpg", data)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_jpeg_that_is_decoded_smaller_is_turned_too(orientation):
    data = with_orientation(Image.fromarray(LARGE_PHOTO), "JPEG", orientation)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    found = source_of(data, exif=True).pixels(Box(16, 32, 256, 320), Shape(16, 16))
    mean = upright[16:272, 32:352].reshape(64, 4, 80, 4, 3).mean((1, 3))

    assert np.abs(found - mean).mean() < 3


def test_a_turned_jpeg_whose_sides_are_no_multiples_is_decoded_whole():
    data = with_orientation(Image.fromarray(LARGE_PHOTO[:-1]), "JPEG", 3)

    assert source_of(data, exif=True).pixels(Box(16, 32, 256, 320), Shape(16, 16)).shape == (256, 320, 3)


def test_jpegs_without_an_orientation_or_with_one_that_is_none_are_upright():
    plain = PHOTO_FILES["jpg"]
    filled = plain[:2] + b"\xff\xff" + with_orientation(Image.fromarray(PHOTO), "JPEG", 6)[2:]

    assert source_of(plain, exif=True).height == 40
    assert source_of(with_orientation(Image.fromarray(PHOTO), "JPEG", 9), exif=True).height == 40
    assert source_of(filled, exif=True).height == 48  # fill bytes before a marker are skipped


@given(cut=st.integers(0, len(PHOTO_FILES["jpg"]) - 1))
def test_a_jpeg_cut_anywhere_is_an_error(cut):
    with pytest.raises((ValueError, OSError, SyntaxError)):
        source_of(PHOTO_FILES["jpg"][:cut]).pixels(WHOLE, Shape(*PHOTO.shape[:2]))


def test_a_large_jpeg_that_is_cut_is_an_error_also_where_it_is_decoded_smaller():
    data = saved(Image.fromarray(LARGE_PHOTO), "JPEG", quality=95)
    for cut in range(len(data) // 2, len(data) - 2, 997):
        with pytest.raises(ValueError, match=r"[Pp]remature end"):
            source_of(data[:cut]).pixels(Box(0, 0, 400, 480), Shape(16, 16))


def test_where_pillow_takes_over_from_a_smaller_image_it_is_decoded_whole(monkeypatch):
    data = saved(Image.fromarray(LARGE_PHOTO), "JPEG", quality=95)
    monkeypatch.setattr(boxes, "decode_jpeg", lambda *_, **__: None)
    found = source_of(data).pixels(Box(8, 16, 256, 256), Shape(8, 8))

    assert np.array_equal(found, DECODER.decode("jpg", data)[8:264, 16:272])


def test_an_image_with_a_side_too_long_to_resize_is_an_error():
    data = saved(Image.new("1", (65_536, 1)), "PNG")

    assert source_of(saved(Image.new("1", (65_535, 1)), "PNG")).width == 65_535
    with pytest.raises(ArgumentError, match="it has 1 x 65,536 pixels, expected at most 65,535 on a side"):
        source_of(data)
    with pytest.raises(ArgumentError, match="it has 1 x 65,536 pixels"):
        ArraySource(np.zeros((1, 65_536, 3), np.uint8))


def pending(data, **limits):
    return PendingImage(data, max_pixels=limits.get("max_pixels", MAX_PIXELS), field="jpg", key="a/1", url="x.tar")


def test_a_pending_image_is_decoded_when_it_is_asked_for():
    image = pending(memoryview(PHOTO_FILES["jpg"])).open(exif=False)

    assert (image.height, image.width) == PHOTO.shape[:2]
    assert np.array_equal(image.pixels(WHOLE, Shape(40, 48)), DECODER.decode("jpg", PHOTO_FILES["jpg"]))
    assert image.error is None


@pytest.mark.parametrize(
    ("data", "limit", "cause"),
    [
        (b"no image", MAX_PIXELS, "it begins with b'no image'"),
        (b"", MAX_PIXELS, "it begins with b''"),
        (PHOTO_FILES["jpg"][:100], MAX_PIXELS, "cannot be decoded"),
        (PHOTO_FILES["jpg"], 40 * 48 - 1, "limit is max_pixels=1,919"),
        (PHOTO_FILES["png"], 40 * 48 - 1, "limit is max_pixels=1,919"),
        (PHOTO_FILES["jpg"][:-100], MAX_PIXELS, "Premature end"),
        (PHOTO_FILES["png"][:-100], MAX_PIXELS, "it is cut"),
    ],
)
def test_what_cannot_be_decoded_is_the_same_error_as_decoders_raise(data, limit, cause):
    image = pending(data, max_pixels=limit)
    with pytest.raises(CodecError, match=cause) as error:
        image.open(exif=False).pixels(WHOLE, Shape(8, 8))
    with pytest.raises(CodecError) as expected:
        Decoder(max_pixels=limit).decode("jpg", data, key="a/1", url="x.tar")

    assert str(error.value) == str(expected.value)
    assert (error.value.field, error.value.key, error.value.url) == ("jpg", "a/1", "x.tar")
    assert image.error is error.value


def test_damaged_exif_data_is_an_error_when_it_is_asked_for():
    data = bytearray(with_orientation(Image.fromarray(PHOTO), "JPEG", 6))
    at = data.index(b"Exif\0\0") + 6
    data[at : at + 8] = struct.pack(">4sI", b"XX*\0", 8)

    assert pending(bytes(data)).open(exif=False).height == 40
    with pytest.raises(CodecError):
        pending(bytes(data)).open(exif=True)


def test_without_simplejpeg_pillow_decodes(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    found = source_of(PHOTO_FILES["jpg"]).pixels(WHOLE, Shape(8, 8))

    assert np.abs(found.astype(int) - DECODER.decode("jpg", PHOTO_FILES["jpg"])).max() <= 2
