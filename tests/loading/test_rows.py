"""Rows are written in place, each image is decoded once, and undecodable data is distinguished from other errors."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from shardkit import Decoder, RandomResizedCrop, Resize, Rng
from shardkit.errors import ArgumentError, CodecError
from shardkit.hashing import derive
from shardkit.loading import rows
from shardkit.loading.batch_memory import Column, Placed, Slab
from shardkit.loading.rows import RawRow, RowMaker, RowThreads
from shardkit.sample import FieldSelection
from shardkit.transforms.apply import Transform
from tests.support.shared import DECODER, PHOTO, saved

JPEG = saved(Image.fromarray(PHOTO), "JPEG")
PNG = saved(Image.fromarray(PHOTO), "PNG")
CROP = RandomResizedCrop((20, 24))
FIELDS = {"image": "jpg;png", "label": "cls?"}


def maker(*transforms, fields=FIELDS, decoder=DECODER, seed=5):
    return RowMaker(FieldSelection.parse(fields), decoder, tuple(map(Transform.parse, transforms)), seed)


def raw(data=JPEG, position=3, **fields):
    return RawRow({"__key__": "a/1", "__url__": "x.tar", "jpg": memoryview(data), **fields}, 2, position)


def in_a_thread(function, *arguments):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


def test_an_image_is_cropped_while_it_is_decoded_with_the_random_numbers_of_its_place():
    row = maker({"image": CROP})(raw(cls=b"7"))

    assert np.array_equal(row.value["image"], CROP(DECODER.decode("jpg", JPEG), Rng(derive(5, 2, rows._TRANSFORM, 3))))
    assert row.value["label"] == 7
    assert not np.array_equal(row.value["image"], maker({"image": CROP})(raw(position=4)).value["image"])


def test_an_image_is_turned_by_its_exif_orientation_when_asked():
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    turned = raw(saved(Image.fromarray(PHOTO), "JPEG", exif=exif))
    made, stored = (maker({"image": Resize((24, 20), exif=exif)})(turned).value["image"] for exif in (True, False))
    decoded = DECODER.decode("jpg", turned.sample["jpg"])

    assert np.array_equal(made, Resize((24, 20))(np.rot90(decoded, -1)))
    assert np.array_equal(stored, Resize((24, 20))(decoded))


def test_an_image_is_decoded_once(monkeypatch):
    import simplejpeg

    calls = []
    decode = simplejpeg.decode_jpeg
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *args, **options: calls.append(0) or decode(*args, **options))
    monkeypatch.setattr(Decoder, "decode", None)
    maker({"image": CROP}, fields={"image": "jpg"})(raw())

    assert len(calls) == 1


def slab_of(rows, **columns):
    columns = {name: Column(*column, is_tensor=False) for name, column in columns.items()}
    return Slab(columns, rows, torch.full((Slab.nbytes(columns, rows),), 7, dtype=torch.uint8))


def test_rows_are_written_where_they_belong():
    slab = slab_of(4, image=((20, 24, 3), "|u1"))
    make = maker({"image": CROP, "label": abs})
    raws = [raw(cls=b"-7"), raw(position=4)]
    made = in_a_thread(RowThreads(make), raws, slab, 1)

    for number, (row, one) in enumerate(zip(made, raws, strict=True), 1):
        assert row.value["image"] is Placed.IN_SLAB
        assert np.array_equal(slab.value("image", number), make(one).value["image"])
    assert [row.value["label"] for row in made] == [7, None]
    assert (slab.tensor("image", [0, 3]) == 7).all()
    assert len(in_a_thread(RowThreads(make), raws)) == 2


def test_an_image_that_is_none_leaves_its_row_alone():
    slab = slab_of(1, image=((20, 24, 3), "|u1"))
    make = maker({"image": CROP}, fields={"image": "gif?"})

    assert make(raw(), slab, 0).value["image"] is None
    assert (slab.value("image", 0) == 7).all()


@pytest.mark.parametrize("data", [b"no image", JPEG[:-50], JPEG[:100], b""])
def test_an_image_that_cannot_be_decoded_may_be_skipped(data):
    for transform in ({"image": CROP}, {("image",): CROP}, None):
        row = maker(transform)(raw(data))

        assert isinstance(row.error, CodecError)
        assert row.is_skippable
        assert (row.error.url, row.error.key, row.error.field) == ("x.tar", "a/1", "jpg")
        assert "sample 'a/1', field 'jpg' cannot be decoded" in str(row.error)


def test_what_a_transform_raises_may_not_be_skipped():
    def fail(_):
        raise CodecError("mine")

    for transforms in (({"image": fail},), ({"image": CROP, "label": fail},), ({"image": CROP}, fail)):
        row = maker(*transforms)(raw(cls=b"7"))

        assert str(row.error) == "mine"
        assert not row.is_skippable
    row = maker({("image", "mask"): CROP}, fields={"image": "jpg", "mask": "png"})(
        raw(png=saved(Image.new("L", (3, 3)), "PNG"))
    )
    assert isinstance(row.error, ArgumentError)
    assert not row.is_skippable


def test_an_image_and_its_mask_are_cropped_alike_and_the_mask_keeps_its_values():
    mask = (np.arange(40 * 48).reshape(40, 48) % 5).astype(np.uint8)
    both = RandomResizedCrop((20, 24), nearest=("mask",))
    fields = {"image": "jpg", "mask": "seg.png"}
    made = maker({("image", "mask"): both}, fields=fields)(
        raw(**{"seg.png": saved(Image.fromarray(mask), "PNG")})
    ).value
    rng = Rng(derive(5, 2, rows._TRANSFORM, 3))
    expected = both({"image": DECODER.decode("jpg", JPEG), "mask": mask}, rng)

    assert np.array_equal(made["image"], expected["image"])
    assert np.array_equal(made["mask"], np.stack([expected["mask"]] * 3, axis=2))


def test_masks_decoded_as_pil_keep_the_numbers_of_their_palette():
    mask = Image.fromarray((np.arange(40 * 48).reshape(40, 48) % 5).astype(np.uint8))
    mask.putpalette([9, 99, 199] * 5)
    make = maker(
        {("image", "mask"): Resize((20, 24), nearest=("mask",))},
        fields={"image": "jpg", "mask": "seg.png"},
        decoder=Decoder(images="pil"),
    )
    made = make(raw(**{"seg.png": saved(mask, "PNG")})).value

    assert (made["image"].shape, made["mask"].shape) == ((20, 24, 3), (20, 24))
    assert set(np.unique(made["mask"])) <= set(range(5))


def test_a_maker_goes_into_other_processes_also_after_it_was_used():
    make = maker({"image": CROP})
    first = make(raw()).value["image"]

    assert np.array_equal(pickle.loads(pickle.dumps(make))(raw()).value["image"], first)


def test_a_thread_that_makes_rows_computes_alone():
    def count():
        RowThreads(maker({"image": CROP}))([raw()])
        return torch.get_num_threads()

    before = torch.get_num_threads()

    assert in_a_thread(count) == 1
    assert torch.get_num_threads() == before
