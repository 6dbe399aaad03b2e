"""Images of every kind come back as RGB; a truncated one is an error, and one that claims too much takes no memory."""

import io
import pickle
import struct
import sys
import warnings
import zlib

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from PIL import ExifTags, Image, ImageFile

from shardkit.codecs import images as pixels
from shardkit.codecs.registry import MAX_PIXELS, Decoder, encode
from shardkit.errors import CodecError
from tests.support.shared import DECODER, PHOTO, refuses, round_trip, same_array, saved

sizes = st.tuples(st.integers(1, 20), st.integers(1, 20))
colour_images = npst.arrays(np.uint8, sizes.map(lambda size: (*size, 3)))
grey_images = npst.arrays(np.uint8, sizes)


@given(image=colour_images, field=st.sampled_from(["png", "bmp", "tif", "tiff", "ppm", "seg.PNG", "png.gz"]))
def test_colour_images_come_back_from_lossless_formats(image, field):
    assert same_array(round_trip(field, image), image)
    assert same_array(round_trip(field, Image.fromarray(image)), image)


@given(image=grey_images, field=st.sampled_from(["png", "bmp", "tif", "tiff", "pgm", "gif"]))
def test_grey_images_come_back_from_lossless_formats_with_their_grey_repeated(image, field):
    assert same_array(round_trip(field, image), np.stack([image] * 3, axis=2))


@given(image=npst.arrays(np.bool_, sizes))
def test_black_and_white_images_come_back_from_pbm(image):
    black_and_white = np.where(image, 255, 0).astype(np.uint8)

    assert same_array(round_trip("pbm", black_and_white), np.stack([black_and_white] * 3, axis=2))
    assert same_array(round_trip("pbm", Image.fromarray(image)), np.stack([black_and_white] * 3, axis=2))


@pytest.mark.parametrize(("field", "error"), [("jpg", 4), ("jpeg", 4), ("webp", 4), ("gif", 30)])
def test_images_come_back_nearly_from_lossy_formats(field, error):
    back = round_trip(field, PHOTO)

    assert (back.dtype, back.shape) == (np.uint8, PHOTO.shape)
    assert 0 < np.abs(back.astype(int) - PHOTO).mean() < error


def test_alpha_is_stored_where_a_format_has_it():
    image = np.dstack([PHOTO, PHOTO[:, :, 0]])

    for field in ("png", "tif"):
        assert same_array(np.asarray(Decoder(images="pil").decode(field, encode(field, image))), image)


def test_alpha_in_a_jpeg_is_refused_and_not_dropped():
    with pytest.raises(CodecError, match="RGBA"):
        encode("jpg", np.dstack([PHOTO, PHOTO[:, :, 0]]))


# Images


def chunk(kind, content):
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def image_of(mode):
    """Return an image of a mode, and the pixels that decoding it must give."""
    grey = PHOTO[:, :, 0]
    if mode.startswith("I;16"):
        return Image.fromarray((grey.astype(np.uint16) << 8) + 77), np.stack([grey] * 3, axis=2)
    image = Image.fromarray(PHOTO)
    image = image.quantize(64) if mode == "P" else image.convert(mode)
    rgb = image.convert("RGB") if mode != "P" else image.convert("RGBA").convert("RGB")
    return image, np.asarray(rgb)


@pytest.mark.parametrize(
    ("form", "mode"),
    [
        *[("PNG", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")],
        *[("TIFF", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB")],
        *[("BMP", mode) for mode in ("1", "L", "P", "RGB", "RGBA")],
        *[("PPM", mode) for mode in ("1", "L", "RGB")],
        *[("GIF", mode) for mode in ("1", "L", "P")],
    ],
)
def test_every_kind_of_image_is_decoded_to_the_right_rgb(form, mode):
    image, pixels = image_of(mode)
    decoded = DECODER.decode("png", saved(image, form))  # the format is recognised by the bytes

    assert (decoded.dtype, decoded.shape) == (np.uint8, PHOTO.shape)
    assert np.array_equal(decoded, pixels)
    assert decoded.flags.writeable


@pytest.mark.parametrize("simplejpeg", [True, False])
@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK", "YCbCr"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}])
def test_every_kind_of_jpeg_is_decoded_to_pillows_rgb(monkeypatch, simplejpeg, mode, options):
    if not simplejpeg:
        monkeypatch.setitem(sys.modules, "simplejpeg", None)
    data = saved(Image.fromarray(PHOTO).convert(mode), "JPEG", **options)
    decoded = DECODER.decode("jpg", data)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))

    assert (decoded.dtype, decoded.shape) == (np.uint8, PHOTO.shape)
    assert np.abs(decoded.astype(int) - expected).max() <= 2  # two builds of libjpeg may round differently
    assert decoded.flags.writeable


TRANSPARENT = np.dstack([PHOTO, (np.arange(40 * 48).reshape(40, 48) % 3 * 127).astype(np.uint8)])


def png_variants():
    """Yield PNGs of all kinds, including the chunks around the pixels."""
    for mode in ("1", "L", "P", "RGB"):
        yield saved(image_of(mode)[0], "PNG")
    for mode in ("LA", "RGBA"):
        yield saved(Image.fromarray(TRANSPARENT).convert(mode), "PNG")
    for transparency in (3, bytes(range(0, 256, 4))):
        yield saved(Image.fromarray(PHOTO).quantize(64), "PNG", transparency=transparency)
    yield saved(Image.fromarray(PHOTO), "PNG", transparency=tuple(PHOTO[3, 3].tolist()))
    yield saved(Image.fromarray(PHOTO[:, :, 0]), "PNG", transparency=77)
    yield saved(Image.fromarray(PHOTO).quantize(4), "PNG", bits=2)
    chunks = (b"gAMA", struct.pack(">I", 22_000)), (b"sBIT", b"\5\5\5"), (b"bKGD", bytes(6))
    data = saved(Image.fromarray(PHOTO), "PNG")
    for kind, content in chunks:
        yield data[:33] + chunk(kind, content) + data[33:]
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    yield saved(Image.fromarray(PHOTO), "PNG", exif=exif)
    frames = [Image.fromarray(np.roll(PHOTO, shift, 0)) for shift in range(3)]
    yield saved(frames[0], "PNG", save_all=True, append_images=frames[1:])
    yield saved(frames[0], "PNG", save_all=True, append_images=frames[1:], default_image=True)


def webp_variants():
    for image in (PHOTO, PHOTO[:, :, 0], TRANSPARENT):
        for options in ({"lossless": True}, {"quality": 30}, {"quality": 95, "alpha_quality": 50}, {"exact": True}):
            yield saved(Image.fromarray(image), "WEBP", **options)
    for image in (PHOTO, TRANSPARENT):
        frames = [Image.fromarray(np.roll(image, shift, 0)) for shift in range(3)]
        yield saved(frames[0], "WEBP", save_all=True, append_images=frames[1:])


def test_pngs_and_webps_are_decoded_to_the_same_pixels_with_opencv_and_without(monkeypatch):
    for data in (*png_variants(), *webp_variants()):
        with_opencv = DECODER.decode("png", data)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "cv2", None)
            without = DECODER.decode("png", data)

        assert same_array(with_opencv, without)
        assert with_opencv.flags.writeable


def test_opencv_decodes_where_it_can(monkeypatch):
    calls = []
    decode = cv2.imdecode
    monkeypatch.setattr(cv2, "imdecode", lambda *args: calls.append(0) or decode(*args))
    for form, options in (("PNG", {}), ("WEBP", {}), ("WEBP", {"lossless": True})):
        DECODER.decode("png", saved(Image.fromarray(PHOTO), form, **options))

    assert len(calls) == 3


def test_a_png_of_whole_chunks_that_hold_other_than_its_pixels_is_the_same_with_opencv_and_without(monkeypatch):
    def outcome(data):
        try:
            return DECODER.decode("png", data).tobytes()
        except CodecError as error:
            return str(error)

    data = WHOLE_FILES["png"]
    rows = zlib.decompress(data[data.index(b"IDAT") + 4 : -16])
    broken = bytearray(zlib.compress(rows))
    broken[len(broken) // 2] ^= 255
    for stream in (zlib.compress(rows + rows), zlib.compress(rows[:-1]), bytes(broken), broken[:-9], b"", b"no zlib"):
        changed = data[:33] + chunk(b"IDAT", bytes(stream)) + data[-12:]
        with_opencv = outcome(changed)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "cv2", None)

            assert outcome(changed) == with_opencv


def test_what_opencv_cannot_decode_pillow_decides(monkeypatch):
    def refuse(*_):
        raise cv2.error

    for imdecode in (refuse, lambda *_: None):
        monkeypatch.setattr(cv2, "imdecode", imdecode)

        assert np.array_equal(DECODER.decode("png", WHOLE_FILES["png"]), PHOTO)
    monkeypatch.delattr(cv2, "IMREAD_COLOR_RGB")  # as before OpenCV 4.10
    assert np.array_equal(DECODER.decode("png", WHOLE_FILES["png"]), PHOTO)


def test_webp_with_and_without_alpha_and_loss_is_decoded():
    for mode in ("RGB", "RGBA"):
        for lossless in (True, False):
            decoded = DECODER.decode("webp", saved(image_of(mode)[0], "WEBP", lossless=lossless, quality=95))

            assert decoded.shape == PHOTO.shape
            assert np.abs(decoded.astype(int) - PHOTO).mean() < (1e-9 if lossless else 12)


def test_palettes_with_transparency_are_decoded_without_a_warning():
    image = Image.fromarray(PHOTO).quantize(16)
    for transparency in (3, bytes(range(0, 256, 16))):
        data = saved(image, "PNG", transparency=transparency)

        assert np.array_equal(DECODER.decode("png", data), np.asarray(image.convert("RGBA").convert("RGB")))


def test_of_animations_the_first_image_is_decoded():
    frames = [Image.fromarray(PHOTO[:, :, channel]) for channel in range(3)]
    for form in ("GIF", "TIFF", "PNG"):
        data = saved(frames[0], form, save_all=True, append_images=frames[1:])

        assert np.array_equal(DECODER.decode("gif", data), np.stack([PHOTO[:, :, 0]] * 3, axis=2))


def test_pixels_of_32_bits_are_refused_and_not_clipped():
    for image, kind in (
        (Image.fromarray(np.full((2, 2), 70_000, np.int32)), "integers"),
        (Image.fromarray(np.full((2, 2), 0.5, np.float32)), "floats"),
    ):
        data = saved(image, "TIFF")
        refuses("tif", data, f"its pixels are 32-bit {kind}, expected 8 bits, .*; write 'tif:unchanged'")

        assert np.array_equal(np.asarray(Decoder(images="pil").decode("tif", data)), np.asarray(image))


@pytest.mark.parametrize(
    ("form", "mode"), [("PNG", "P"), ("PNG", "I;16"), ("JPEG", "CMYK"), ("PNG", "RGBA"), ("JPEG", "RGB")]
)
def test_a_pil_image_is_loaded_and_has_the_mode_of_the_file(form, mode):
    image = image_of(mode)[0]
    decoded = Decoder(images="pil").decode("png", saved(image, form))

    assert isinstance(decoded, Image.Image)
    assert decoded.mode == mode
    assert decoded.size == image.size
    if form == "PNG":
        assert decoded.tobytes() == image.tobytes()
        assert pickle.loads(pickle.dumps(decoded)).tobytes() == image.tobytes()


WHOLE_FILES = {
    "jpg": saved(Image.fromarray(PHOTO), "JPEG"),
    "progressive jpg": saved(Image.fromarray(PHOTO), "JPEG", progressive=True),
    "cmyk jpg": saved(Image.fromarray(PHOTO).convert("CMYK"), "JPEG"),
    "png": saved(Image.fromarray(PHOTO), "PNG"),
    "webp": saved(Image.fromarray(PHOTO), "WEBP"),
    "gif": saved(Image.fromarray(PHOTO[:, :, 0]), "GIF"),
    "animated gif": saved(Image.fromarray(PHOTO), "GIF", save_all=True, append_images=[Image.fromarray(PHOTO.T[0].T)]),
    "bmp": saved(Image.fromarray(PHOTO), "BMP"),
    "tif": saved(Image.fromarray(PHOTO), "TIFF"),
    "lzw tif": saved(Image.fromarray(PHOTO), "TIFF", compression="tiff_lzw"),
    "ppm": saved(Image.fromarray(PHOTO), "PPM"),
}


@pytest.mark.parametrize(
    ("name", "simplejpeg"),
    [*[(name, True) for name in WHOLE_FILES], *[(name, False) for name in WHOLE_FILES if name.endswith("jpg")]],
)
def test_an_image_cut_anywhere_is_an_error(monkeypatch, name, simplejpeg):
    if not simplejpeg:
        monkeypatch.setitem(sys.modules, "simplejpeg", None)
    data = WHOLE_FILES[name]
    assert DECODER.decode("jpg", data).shape == PHOTO.shape

    for cut in [*range(0, len(data), 7), *range(len(data) - 40, len(data))]:
        # Pillow warns about truncated directories of a TIFF.
        with warnings.catch_warnings(action="ignore"), pytest.raises(CodecError):
            DECODER.decode("jpg", data[:cut])


@pytest.mark.parametrize("name", WHOLE_FILES)
def test_a_cut_image_is_an_error_also_as_a_pil_image(name):
    data = WHOLE_FILES[name]
    with warnings.catch_warnings(action="ignore"), pytest.raises(CodecError):
        Decoder(images="pil").decode("png", data[: len(data) * 9 // 10])


def test_cut_images_are_refused_also_where_pillow_is_told_to_make_pixels_up(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)

    assert DECODER.decode("jpg", WHOLE_FILES["jpg"]).shape == PHOTO.shape
    for name in ("gif", "cmyk jpg"):
        refuses(
            "jpg",
            WHOLE_FILES[name],
            "LOAD_TRUNCATED_IMAGES is on, so that cut images pass for whole ones; set it to False",
        )


def test_a_damaged_png_is_refused_but_for_what_is_not_critical():
    data = WHOLE_FILES["png"]
    for at in range(8, len(data), 5):
        damaged = bytearray(data)
        damaged[at] ^= 4
        with pytest.raises(CodecError):
            DECODER.decode("png", bytes(damaged))
    comment = bytearray(chunk(b"tEXt", b"Comment\0text"))
    comment[-1] ^= 1
    assert np.array_equal(DECODER.decode("png", data[:-12] + bytes(comment) + data[-12:]), PHOTO)
    assert np.array_equal(DECODER.decode("png", data + b"garbage behind the end"), PHOTO)


def test_pillow_takes_over_what_simplejpeg_refuses_although_nothing_is_missing():
    data = WHOLE_FILES["jpg"]

    assert np.array_equal(DECODER.decode("jpg", data[:-2] + b"\1\2\3" + data[-2:]), DECODER.decode("jpg", data))


def test_a_jpeg_with_missing_pixels_is_refused_also_where_pillow_would_take_it():
    data = WHOLE_FILES["jpg"]
    middle = data.rindex(b"\xff\xda") + 100
    holed = data[:middle] + data[-2:]

    assert Image.open(io.BytesIO(holed)).convert("RGB").size == (48, 40)
    refuses("jpg", holed, "premature end")


def png_of(width, height):
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def tiff_of(tile_width, tile_height):
    """Return a TIFF of 16 x 16 pixels in one tile of another size."""
    data = zlib.compress(bytes(256))
    entries = {
        256: 16,
        257: 16,
        258: 8,
        259: 8,
        262: 1,
        277: 1,
        322: tile_width,
        323: tile_height,
        324: 8,
        325: len(data),
    }
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries.items())
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(entries)) + directory + bytes(4)


def resized(name, old, new):
    """Return a file with the bytes that store its size replaced."""
    data = WHOLE_FILES[name]
    assert data.count(old) == 1
    return data.replace(old, new)


BIG_WEBP = saved(Image.new("RGB", (4000, 4000)), "WEBP", lossless=True, quality=0, method=0)
BOMBS = {
    "png": png_of(100_000, 100_000),
    "jpg": resized("jpg", struct.pack(">HH", 40, 48), struct.pack(">HH", 60_000, 60_000)),
    "progressive jpg": resized("progressive jpg", struct.pack(">HH", 40, 48), struct.pack(">HH", 60_000, 60_000)),
    "cmyk jpg": resized("cmyk jpg", struct.pack(">HH", 40, 48), struct.pack(">HH", 60_000, 60_000)),
    "gif": WHOLE_FILES["gif"][:6] + struct.pack("<HH", 65_000, 65_000) + WHOLE_FILES["gif"][10:],
    "bmp": resized("bmp", struct.pack("<ii", 48, 40), struct.pack("<ii", 100_000, 100_000)),
    "ppm": WHOLE_FILES["ppm"].replace(b"48 40", b"100000 100000"),
    "tif": saved(Image.new("1", (4000, 4000)), "TIFF", compression="group4"),
    "tiled tif": tiff_of(60_000, 60_000),
    "webp": BIG_WEBP,
}


@pytest.mark.parametrize("images", ["numpy", "pil"])
@pytest.mark.parametrize("name", BOMBS)
def test_an_image_that_claims_too_many_pixels_is_refused_before_it_is_decoded(name, images):
    decoder = Decoder(images=images, max_pixels=10_000_000)

    refuses("png", BOMBS[name], r"claims [0-9,]+ x [0-9,]+ pixels, the limit is max_pixels=10,000,000", decoder)


def test_ten_thousand_million_pixels_are_too_many_by_default():
    refuses("png", BOMBS["png"], "it claims 100,000 x 100,000 pixels, the limit is max_pixels=89,478,485")


@pytest.mark.parametrize("name", WHOLE_FILES)
def test_images_are_bounded_by_the_decoders_limit(name):
    assert Decoder(max_pixels=40 * 48).decode("png", WHOLE_FILES[name]).shape == PHOTO.shape
    refuses("png", WHOLE_FILES[name], "the limit is max_pixels=1,919", Decoder(max_pixels=40 * 48 - 1))


@pytest.mark.parametrize("name", [name for name in WHOLE_FILES if not name.endswith("tif")])
def test_pillows_own_limit_is_neither_needed_nor_in_the_way(monkeypatch, name):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40 * 48 - 1)  # Pillow warns above it, and warnings are errors here
    assert DECODER.decode("png", WHOLE_FILES[name]).shape == PHOTO.shape

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    refuses("png", WHOLE_FILES[name], "the limit is max_pixels=1,919", Decoder(max_pixels=40 * 48 - 1))


def test_a_tif_in_tiles_is_decoded():
    assert np.array_equal(DECODER.decode("tif", tiff_of(16, 16)), np.zeros((16, 16, 3), np.uint8))


def test_a_webp_that_claims_too_many_pixels_is_refused_before_pillow_opens_it(monkeypatch):
    def must_not_be_opened(_):
        raise AssertionError

    monkeypatch.setattr("PIL.WebPImagePlugin.WebPImageFile", must_not_be_opened)
    refuses("webp", BIG_WEBP, "claims 4,000 x 4,000 pixels", Decoder(max_pixels=10_000_000))


def test_a_webp_is_known_whatever_its_size():
    noise = np.random.default_rng(0).integers(0, 256, (1, 2000, 3), dtype=np.uint8)
    files = (saved(Image.fromarray(noise[:, :width]), "WEBP", lossless=True) for width in range(1, 2000))
    data = next(data for data in files if b"\n" in data[4:8])

    assert DECODER.decode("webp", data).shape[0] == 1


@pytest.mark.parametrize("options", [{"lossless": True}, {"lossless": False}, {"save_all": True}])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_the_size_of_a_webp_is_read_without_opening_it(options, mode):
    image = Image.new(mode, (300, 200), (1, 2, 3, 4)[: len(mode)])
    others = [Image.new(mode, (300, 200))] if "save_all" in options else []

    assert pixels._webp_size(saved(image, "WEBP", **options, append_images=others)) == (300, 200)


def test_formats_that_no_field_names_are_not_read():
    for form in ("ICO", "PCX", "TGA", "EPS"):
        refuses("png", saved(Image.fromarray(PHOTO), form), "unlike every image that shardkit reads")


def test_the_default_limit_is_where_pillow_begins_to_warn():
    assert Image.MAX_IMAGE_PIXELS == MAX_PIXELS


@given(pieces=st.lists(st.sampled_from([b"\xff", b"\xda", b"\xff\xda", b"\0", b"\xd9"]), max_size=30))
def test_the_quick_count_of_scans_is_that_of_bytes(pieces):
    data = b"".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pixels, "MAX_SCANS", 3)
        patch.setattr(pixels, "_jpeg_segments", lambda _: [(0xDA, 0, 0)] * 9)
        for given_as in (data, memoryview(data)):
            is_refused = False
            try:
                pixels._check_scans(given_as)
            except ValueError:
                is_refused = True
            assert is_refused == (data.count(b"\xff\xda") > 3)
