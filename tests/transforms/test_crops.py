"""Image transforms match Pillow's crop and resize with torchvision's boxes, decoded or not, here or in a loader."""

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image

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
from shardkit.codecs.registry import MAX_PIXELS
from shardkit.errors import ArgumentError, CodecError
from shardkit.transforms.image_source import PendingImage, Shape, divisor_of
from shardkit.transforms.resize import resize_linear
from tests.support.shared import DECODER, LARGE_PHOTO, PHOTO, PHOTO_FILES, saved

PLACES = np.arange(PHOTO.shape[0] * PHOTO.shape[1]).reshape(PHOTO.shape[:2])  # the value of each pixel is its position


def kinds(size):
    return {
        "random": RandomResizedCrop(size),
        "not antialiased": RandomResizedCrop(size, antialias=False),
        "center": ResizeCenterCrop(size),
        "whole": Resize(size),
    }


KINDS = kinds((20, 24))
every_kind = pytest.mark.parametrize("kind", KINDS)
keys = st.integers(0, 1 << 40)


def difference(a, b):
    return np.abs(a.astype(int) - b).max()


def uniforms(n, seed):
    return iter(np.random.default_rng(seed).random(n).tolist())


def torchvision_box(height, width, scale, ratio, draw):
    """Return top, left, height and width as torchvision draws them; draw() returns numbers in [0, 1)."""
    area = height * width
    log_ratio = [math.log(number) for number in ratio]
    for _ in range(10):
        target = area * (scale[0] + (scale[1] - scale[0]) * draw())
        aspect = math.exp(log_ratio[0] + (log_ratio[1] - log_ratio[0]) * draw())
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(draw() * (height - h + 1)), int(draw() * (width - w + 1)), h, w
    if width / height < min(ratio):
        w, h = width, round(width / min(ratio))
    elif width / height > max(ratio):
        w, h = round(height * max(ratio)), height
    else:
        w, h = width, height
    return (height - h) // 2, (width - w) // 2, h, w


def largest_gap(a, b):
    """Return the largest difference of two samples' distribution functions."""
    both = np.sort(np.concatenate([a, b]))
    return np.abs(
        np.searchsorted(np.sort(a), both, "right") / len(a) - np.searchsorted(np.sort(b), both, "right") / len(b)
    ).max()


def boxes_of(crop, height, width, n):
    return np.array([crop._draw(height, width, Rng(key))[0] for key in range(n)])


def test_the_boxes_are_torchvisions_for_the_same_random_numbers():
    for height, width in ((400, 500), (500, 300), (333, 100), (100, 1000), (2, 2), (7, 2000), (3, 50)):
        for scale, ratio in (
            ((0.08, 1), (3 / 4, 4 / 3)),
            ((0.5, 0.6), (1, 1)),
            ((0.9, 1), (3, 5)),
            ((1e-9, 1e-6), (1, 1)),
        ):
            crop = RandomResizedCrop(64, scale=scale, ratio=ratio)
            for key in range(50):
                rng = Rng(key)
                box, _ = crop._draw(height, width, Rng(key))

                assert box == torchvision_box(height, width, scale, ratio, rng.random)


@pytest.mark.parametrize("ratio", [(3 / 4, 4 / 3), (3, 5), (0.1, 0.2)])
def test_the_box_of_a_single_pixel_is_that_pixel(ratio):
    assert {RandomResizedCrop(8, ratio=ratio)._draw(1, 1, Rng(key))[0] for key in range(50)} == {(0, 0, 1, 1)}


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (3000, 4000)])
def test_the_boxes_are_distributed_as_torchvisions(height, width):
    n = 4000
    numbers = uniforms(100 * n, 1)
    ours = boxes_of(RandomResizedCrop(224), height, width, n).T
    theirs = np.array(
        [torchvision_box(height, width, (0.08, 1.0), (3 / 4, 4 / 3), lambda: next(numbers)) for _ in range(n)]
    ).T
    for measure in (
        lambda box: box[2] * box[3],  # area
        lambda box: box[3] / box[2],  # ratio
        lambda box: box[0] / (height - box[2] + 1),  # the position, as a fraction of the possible positions
        lambda box: box[1] / (width - box[3] + 1),
        lambda box: box[0] + box[2] / 2,
        lambda box: box[1] + box[3] / 2,
    ):
        # Two samples of one distribution differ by 0.044 or more once in a thousand times.
        assert largest_gap(measure(ours.astype(float)), measure(theirs.astype(float))) < 0.044


def test_as_many_are_mirrored_as_asked():
    for flip, low, high in ((0, 0, 0), (0.25, 0.22, 0.28), (0.5, 0.47, 0.53), (1, 1, 1)):
        crop = RandomResizedCrop(8, flip=flip)

        assert low <= np.mean([crop._draw(40, 48, Rng(key))[1] for key in range(2000)]) <= high


@given(
    key=keys,
    height=st.integers(1, 60),
    width=st.integers(1, 60),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
)
def test_a_random_crop_is_pillows_within_two_grey_levels(key, height, width, size):
    pixels = np.random.default_rng(height * 64 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    crop = RandomResizedCrop(size)
    (top, left, box_height, box_width), mirrored = crop._draw(height, width, Rng(key))
    part = Image.fromarray(pixels).crop((left, top, left + box_width, top + box_height))
    expected = np.asarray(part.resize(size[::-1], Image.Resampling.BILINEAR))
    found = crop(pixels, Rng(key))

    assert (found.dtype, found.shape) == (np.uint8, (*size, 3))
    assert difference(found, expected[:, ::-1] if mirrored else expected) <= 2


def test_the_middle_is_what_resizing_and_cropping_leaves():
    for height, width in ((375, 500), (500, 375), (256, 256), (300, 900)):
        pixels = np.asarray(Image.fromarray(PHOTO).resize((width, height), Image.Resampling.BICUBIC))
        found = ResizeCenterCrop(224)(pixels)
        short = min(height, width)
        size = round(width * 256 / short), round(height * 256 / short)
        resized = Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR)
        left, top = (size[0] - 224) / 2, (size[1] - 224) / 2
        expected = np.asarray(resized.crop((int(left), int(top), int(left) + 224, int(top) + 224)))

        assert np.abs(found.astype(int) - expected).mean() < 2  # its boxes begin at whole pixels at another size


def test_the_middle_has_the_shape_that_is_asked_for():
    def box_of(size, height, width, **options):
        return tuple(ResizeCenterCrop(size, **options)._draw(height, width, None)[0])

    assert box_of(224, 400, 600) == (25, 125, 350, 350)
    assert box_of(224, 400, 600, crop=1) == (0, 100, 400, 400)
    assert box_of((100, 200), 400, 600, crop=1) == (50, 0, 300, 600)
    assert box_of((200, 100), 400, 600, crop=0.5) == (100, 250, 200, 100)
    assert box_of(224, 1, 1, crop=0.1) == (0, 0, 1, 1)


def test_a_whole_image_is_resized_whatever_its_shape():
    expected = Image.fromarray(PHOTO).resize((31, 17), Image.Resampling.BILINEAR)

    assert difference(Resize((17, 31))(PHOTO), np.asarray(expected)) <= 2
    assert Resize(9)(PHOTO).shape == (9, 9, 3)
    assert Resize([17, 31]).out_shape == (17, 31, 3)


@every_kind
@pytest.mark.parametrize("form", PHOTO_FILES)
def test_a_file_decoded_into_a_row_is_what_decoding_and_transforming_gives(kind, form):
    batch = np.full((3, 20, 24, 3), 7, np.uint8)
    for key in range(8):
        KINDS[kind].decode_into(memoryview(PHOTO_FILES[form]), batch[1], Rng(key))

        assert np.array_equal(batch[1], KINDS[kind](DECODER.decode("jpg", PHOTO_FILES[form]), Rng(key)))
    assert (batch[[0, 2]] == 7).all()


@every_kind
def test_pil_images_and_arrays_give_the_same(kind):
    image = Image.fromarray(PHOTO)
    expected = KINDS[kind](PHOTO, Rng(3))

    assert np.array_equal(KINDS[kind](image, Rng(3)), expected)
    assert np.array_equal(KINDS[kind](image.convert("RGBA"), Rng(3)), expected)
    assert np.array_equal(KINDS[kind](np.ascontiguousarray(PHOTO[::-1])[::-1], Rng(3)), expected)


@every_kind
def test_a_large_jpeg_gives_nearly_what_it_gives_decoded_in_full(kind):
    data = saved(Image.fromarray(LARGE_PHOTO), "JPEG", quality=95)
    transform = kinds((10, 12))[kind]
    out = np.empty((10, 12, 3), np.uint8)
    whole = 0
    for key in range(40):
        transform.decode_into(data, out, Rng(key))
        error = np.abs(out.astype(int) - transform(DECODER.decode("jpg", data), Rng(key)))
        whole += not error.any()
        if kind != "not antialiased":  # without antialiasing, a pixel is not the mean of many
            assert (error <= 2).mean() > 0.97
            assert error.max() <= 8
    assert whole < 40  # some were decoded at a reduced size


@pytest.mark.parametrize("transform", [RandomResizedCrop(8), ResizeCenterCrop(8)])
def test_a_box_of_a_large_image_begins_and_ends_at_whole_pixels_of_the_smaller_image(transform):
    divisors = set()
    for height in range(100, 1000, 7):
        box = transform._draw(height, height + 51, Rng(height))[0]
        divisor = divisor_of(box, Shape(8, 8))
        divisors.add(divisor)

        assert not any(number % divisor for number in box)
    assert divisors >= {2, 4, 8}


def test_it_is_antialiased_unless_asked_not_to():
    for antialias in (True, False):
        expected = np.empty((10, 12, 3), np.uint8)
        resize_linear(PHOTO, expected, mirrored=False, antialias=antialias)

        assert np.array_equal(Resize((10, 12), antialias=antialias)(PHOTO), expected)
    assert np.array_equal(Resize((10, 12))(PHOTO), Resize((10, 12), antialias=True)(PHOTO))
    assert difference(expected, Resize((10, 12))(PHOTO)) > 2


def test_what_cannot_be_decoded_is_an_error():
    out = np.empty((20, 24, 3), np.uint8)
    with pytest.raises(ValueError, match=r"[Pp]remature end"):
        KINDS["whole"].decode_into(PHOTO_FILES["jpg"][:-50], out)
    with pytest.raises(ValueError, match="unlike every image that shardkit reads"):
        KINDS["whole"].decode_into(b"text", out)
    with pytest.raises(ValueError, match="limit is max_pixels=1,919"):
        KINDS["whole"].decode_into(PHOTO_FILES["jpg"], out, max_pixels=40 * 48 - 1)


@pytest.mark.parametrize(
    "out",
    [
        np.empty((20, 25, 3), np.uint8),
        np.empty((20, 24), np.uint8),
        np.empty((20, 24, 3), np.int8),
        np.empty((20, 3, 24), np.uint8).swapaxes(1, 2),
        np.frombuffer(bytes(20 * 24 * 3), np.uint8).reshape(20, 24, 3),
    ],
)
def test_a_row_that_cannot_hold_the_result_is_an_error(out):
    with pytest.raises(ArgumentError, match=r"expected uint8 \(20, 24, 3\), contiguous and writable"):
        KINDS["whole"].decode_into(PHOTO_FILES["jpg"], out)


# Several fields


@given(key=keys)
def test_several_fields_are_cut_and_mirrored_alike(key):
    both = RandomResizedCrop((20, 24), nearest=("places",))
    made = both({"image": PHOTO, "places": PLACES, "other": PHOTO[::-1]}, Rng(key))
    rows, columns = np.divmod(made["places"], PHOTO.shape[1])
    (top, left, height, width), mirrored = both._draw(*PHOTO.shape[:2], Rng(key))

    assert np.array_equal(made["image"], RandomResizedCrop((20, 24))(PHOTO, Rng(key)))
    assert np.array_equal(made["other"], RandomResizedCrop((20, 24))(PHOTO[::-1], Rng(key)))
    assert (made["places"].dtype, made["places"].shape) == (PLACES.dtype, (20, 24))
    assert top <= rows.min() <= rows.max() < top + height
    assert left <= columns.min() <= columns.max() < left + width
    assert ((np.diff(columns, axis=1) <= 0) if mirrored else (np.diff(columns, axis=1) >= 0)).all()


def test_a_mask_is_never_decoded_smaller():
    mask = np.where(LARGE_PHOTO[:, :, :1] > 128, np.uint8(255), np.uint8(0)).repeat(3, 2)
    pending = PendingImage(saved(Image.fromarray(mask), "PNG"), max_pixels=MAX_PIXELS, field="png", key="", url="")
    jpeg = PendingImage(
        saved(Image.fromarray(mask), "JPEG", quality=100, subsampling=0),
        max_pixels=MAX_PIXELS,
        field="",
        key="",
        url="",
    )
    made = Resize(8, nearest=("a", "b")).apply({"a": pending, "b": jpeg}, None)

    assert set(np.unique(made["a"])) == {0, 255}
    assert set(np.unique(made["b"])) <= {*range(4), *range(252, 256)}


def test_a_mask_that_is_a_pil_image_keeps_the_numbers_of_its_palette():
    classes = (PLACES % 7).astype(np.uint8)
    mask = Image.fromarray(classes)
    mask.putpalette([40, 80, 120] * 7)

    assert mask.mode == "P"
    assert np.array_equal(Resize((40, 48), nearest=("mask",))({"mask": mask})["mask"], classes)


def test_fields_that_are_none_stay_none():
    both = RandomResizedCrop((20, 24), nearest=("mask",))

    assert both({"image": None, "mask": None}, Rng(0)) == {"image": None, "mask": None}
    made = both({"image": PHOTO, "mask": None}, Rng(3))
    assert made["mask"] is None
    assert np.array_equal(made["image"], RandomResizedCrop((20, 24))(PHOTO, Rng(3)))


def test_what_is_cut_alike_must_be_of_one_size():
    with pytest.raises(ArgumentError, match="must have the same height and width, got a 40 x 48, b 39 x 48"):
        Resize(8)({"a": PHOTO, "b": PHOTO[1:]})


def test_results_go_where_they_are_to_go_if_they_fit():
    row, other = np.empty((20, 24, 3), np.uint8), np.empty((20, 24, 3), np.uint8)
    transform = RandomResizedCrop((20, 24), nearest=("places",))
    places = PLACES[:, :, None].repeat(3, 2)
    made = transform.apply({"image": PHOTO, "places": places}, Rng(1), {"image": row, "places": other})

    assert made["image"] is row
    assert np.array_equal(row, RandomResizedCrop((20, 24))(PHOTO, Rng(1)))
    assert made["places"].dtype == PLACES.dtype
    assert made["places"].max() > 255


# EXIF


def test_an_image_is_turned_by_its_exif_orientation_only_when_asked():
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    image = Image.fromarray(PHOTO)
    image.getexif()[ExifTags.Base.Orientation] = 6
    turned = np.rot90(PHOTO, -1)
    out = np.empty((24, 20, 3), np.uint8)
    for form in ("PNG", "TIFF"):
        Resize((24, 20), exif=True).decode_into(saved(Image.fromarray(PHOTO), form, exif=exif), out)

        assert np.array_equal(out, Resize((24, 20))(turned))
    Resize((24, 20)).decode_into(saved(Image.fromarray(PHOTO), "PNG", exif=exif), out)
    assert np.array_equal(out, Resize((24, 20))(PHOTO))
    assert np.array_equal(Resize((24, 20), exif=True)(image), Resize((24, 20))(turned))
    assert np.array_equal(Resize((24, 20))(image), Resize((24, 20))(PHOTO))


def test_what_is_decoded_already_cannot_be_turned_any_more():
    with pytest.raises(
        ArgumentError, match=r"image: exif=True needs the file, .* or pass decode=Decoder\(images='pil'\)"
    ):
        Resize(8, exif=True)(PHOTO)


# Transforms in datasets, streams and loaders


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Return a dataset of 30 photographs; number 7 is truncated."""
    folder = tmp_path_factory.mktemp("images") / "photos"
    rng = np.random.default_rng(0)
    samples = []
    for i in range(30):
        height, width = 40 + i, 70 - i
        noise = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
        form = ("JPEG", "PNG", "WEBP")[i % 3]
        data = saved(image, form)
        samples.append({"__key__": f"{i:02d}", ("jpg", "png", "webp")[i % 3]: data[:-50] if i == 7 else data, "cls": i})
    pack(samples, folder, shard_samples=11, shuffle=False, compression="none", progress=False)
    return folder


FIELDS = {"image": "jpg;png;webp", "label": "cls"}
CROP = RandomResizedCrop((20, 24))


def loaded(photos, **options):
    """Return the images of two epochs by epoch and label, and how many were skipped."""
    loader = ShardLoader(ShardDataset(photos, fields=FIELDS), 8, seed=3, on_error="skip", **options)
    images, skipped = {}, 0
    for epoch in range(2):
        for batch in loader:
            images |= {
                (epoch, label): image for label, image in zip(batch["label"].tolist(), batch["image"], strict=True)
            }
        skipped += loader.skipped
    return images, skipped


@pytest.mark.multiprocess
def test_a_loader_gives_the_same_images_with_any_workers_and_skips_what_cannot_be_decoded(photos):
    expected, skipped = loaded(photos, transform={"image": CROP}, num_workers=1)

    assert (len(expected), skipped) == (58, 2)
    assert (0, 7) not in expected
    for options in ({"num_workers": 3}, {"num_workers": 2, "worker_type": "process"}):
        found, skipped = loaded(photos, transform={"image": CROP}, **options)

        assert (found.keys(), skipped) == (expected.keys(), 2)
        assert all(torch.equal(found[which], expected[which]) for which in expected)
    assert len({image.numpy().tobytes() for image in expected.values()}) == 58
    assert all(image.shape == (3, 20, 24) for image in expected.values())


def test_a_loader_gives_what_the_transform_makes_of_decoded_images(photos):
    def crop(image, rng):
        return CROP(image, rng)  # a function that the library knows nothing about

    fused, plain = (loaded(photos, transform={"image": one})[0] for one in (CROP, crop))

    assert fused.keys() == plain.keys()
    assert all(torch.equal(fused[which], plain[which]) for which in fused)


def test_an_image_that_cannot_be_decoded_is_an_error_with_its_place(photos):
    dataset = ShardDataset(photos, fields=FIELDS)
    message = r"photos-000000\.tar, sample '07', field 'png' cannot be decoded: it is cut"
    with pytest.raises(CodecError, match=message):
        list(ShardLoader(dataset, 8, transform={"image": CROP}))
    with pytest.raises(CodecError, match=message):
        ShardDataset(photos, fields=FIELDS, transform={"image": CROP})[7]
    with pytest.raises(CodecError, match=message):
        list(ShardStream(photos, fields=FIELDS, transform={"image": CROP}))


def test_datasets_and_streams_crop_while_they_decode(photos, monkeypatch):
    monkeypatch.setattr(Decoder, "decode", lambda *_, **__: 0)  # decodes nothing but labels
    turned = Resize((20, 24), exif=True)  # needs the file
    dataset = ShardDataset(photos, fields=FIELDS, transform={"image": turned})
    stream = ShardStream(photos, fields=FIELDS, transform={"image": turned}, on_error="skip", shuffle=False)
    images = {sample["__key__"]: sample["image"] for sample in stream}

    assert sorted({*images, "07"}) == dataset.keys()
    assert stream.skipped.samples == 1
    assert all(np.array_equal(dataset.by_key(key)["image"], image) for key, image in images.items())


# Arguments


@pytest.mark.parametrize(
    "value",
    [
        PHOTO[:, :, 0],
        PHOTO.astype(np.int16),
        PHOTO[:0],
        np.zeros((3, 4, 4), np.uint8),
        "text",
        b"bytes",
        3,
        [PHOTO],
    ],
)
def test_what_is_no_image_is_an_error(value):
    with pytest.raises(ArgumentError, match=r"image: expected uint8 \(height, width, 3\) or a PIL image, got"):
        Resize(8)(value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"size": 2.5}, "size must be a whole number"),
        ({"size": "224"}, "expected a number of pixels, or"),
        ({"size": (3, 4, 5)}, "expected a number of pixels, or"),
        ({"size": (3, True)}, "size must be a whole number"),
        ({"scale": (0, 1)}, r"scale is \(0, 1\), expected \(low, high\), above 0 and up to 1"),
        ({"scale": (0.5, 0.4)}, "scale is"),
        ({"scale": (0.5, 1.1)}, "scale is"),
        ({"scale": 0.5}, "scale is"),
        ({"scale": (math.nan, 1)}, "scale is"),
        ({"ratio": (0, 1)}, r"ratio is \(0, 1\), expected \(low, high\), above 0$"),
        ({"ratio": (1, math.inf)}, "ratio is"),
        ({"flip": 1.5}, "flip is 1.5, expected how often"),
        ({"flip": -0.5}, "flip is"),
        ({"nearest": "mask"}, r"nearest must be a sequence of texts, got the text 'mask'; write \(\"mask\",\)"),
        ({"nearest": (1,)}, r"nearest must be a sequence of texts, got \(1,\)"),
        ({"nearest": 5}, "nearest must be a sequence of texts, got 5"),
    ],
)
def test_arguments_out_of_range_are_errors(options, message):
    with pytest.raises(ArgumentError, match=message):
        RandomResizedCrop(**{"size": 8, **options})


@pytest.mark.parametrize("crop", [0, 1.1, -1, math.nan])
def test_a_part_of_the_sides_is_above_0_and_up_to_1(crop):
    with pytest.raises(ArgumentError, match="crop is"):
        ResizeCenterCrop(8, crop=crop)


def test_a_random_transform_needs_its_random_numbers():
    with pytest.raises(ArgumentError, match="was called without rng; pass an Rng"):
        RandomResizedCrop(8)(PHOTO)


def test_names_of_masks_must_be_names_of_images():
    transform = Resize(8, nearest=("mask",))
    with pytest.raises(ArgumentError, match="nearest names mask, but one image was given, without a name"):
        transform(PHOTO)
    with pytest.raises(ArgumentError, match="nearest names mask, but one image was given, without a name"):
        transform.decode_into(PHOTO_FILES["jpg"], np.empty((8, 8, 3), np.uint8))
    with pytest.raises(ArgumentError, match="nearest names mask, the images are image, other; name some of those"):
        transform({"image": PHOTO, "other": PHOTO})


@every_kind
def test_transforms_go_into_other_processes(kind):
    other = pickle.loads(pickle.dumps(KINDS[kind]))

    assert np.array_equal(other(PHOTO, Rng(7)), KINDS[kind](PHOTO, Rng(7)))
