"""Transforms are called as they declare, and images are decoded by the first transform that gets them."""

import pickle
from functools import partial

import numpy as np
import pytest

from shardkit.codecs.registry import Codec, Decoder
from shardkit.errors import ArgumentError, CodecError, SampleError
from shardkit.sample import FieldSelection
from shardkit.transforms.apply import (
    Transform,
    decode_fields,
    undecoded_fields,
    was_undecodable,
)
from shardkit.transforms.crops import Resize
from shardkit.transforms.image_source import PendingImage
from shardkit.transforms.rng import Rng

SAMPLE = {"__key__": "a/1", "__url__": "x.tar", "txt": "abc", "cls": 7, "seg": None}


def shifted(value, rng):
    return value + rng.integers(0, 1000)


def test_nothing_to_call_is_false_and_gives_the_sample_back():
    transform = Transform.parse(None)

    assert not transform
    assert not transform.needs_rng
    assert not Transform.parse({})
    assert transform(dict(SAMPLE)) == SAMPLE


class Turn:
    """A function with a state, as in other libraries."""

    def __call__(self, value, rng=None):
        return (value, rng)

    def method(self, value, *, rng):
        return (value, rng)


@pytest.mark.parametrize("function", [shifted, partial(shifted), Turn(), Turn().method])
def test_a_function_with_a_parameter_rng_is_given_one(function):
    of_field, of_sample = Transform.parse({"cls": function}), Transform.parse(function)
    rng = Rng(3)

    assert of_field.needs_rng
    assert of_sample.needs_rng
    assert of_field(dict(SAMPLE), rng)["cls"] in (7 + Rng(3).integers(0, 1000), (7, rng))


@pytest.mark.parametrize("function", [len, str, dict, int, partial(shifted, rng=Rng(1)), lambda **rng: rng])
def test_other_functions_are_not(function):
    assert not Transform.parse(function).needs_rng
    assert not Transform.parse({"cls": function}).needs_rng


def test_a_function_of_the_sample_may_return_anything():
    assert Transform.parse(lambda sample: (sample["cls"], 1))(dict(SAMPLE)) == (7, 1)


def test_functions_of_fields_leave_none_and_the_others_alone():
    transform = Transform.parse({"txt": str.upper, "seg": len, "cls": shifted})

    assert transform(dict(SAMPLE), Rng(0)) == {**SAMPLE, "txt": "ABC", "cls": shifted(7, Rng(0))}


def test_a_function_of_several_fields_gets_and_returns_a_dict_of_them():
    def swap(values):
        return {"txt": values["cls"], "cls": values["txt"], "seg": values["seg"]}

    assert Transform.parse({("txt", "cls", "seg"): swap})(dict(SAMPLE)) == {**SAMPLE, "txt": 7, "cls": "abc"}
    add = Transform.parse({("cls",): lambda values, rng: {"cls": shifted(values["cls"], rng)}, "txt": len})
    assert add.needs_rng
    assert add(dict(SAMPLE), Rng(0)) == {**SAMPLE, "cls": shifted(7, Rng(0)), "txt": 3}


@pytest.mark.parametrize("made", [7, {"txt": 1}, {"txt": 1, "cls": 2, "seg": 3}, ["txt", "cls"]])
def test_a_function_of_several_fields_that_returns_others_is_an_error(made):
    with pytest.raises(ArgumentError, match=r"a function of txt, cls returned .*, expected a dict of these") as error:
        Transform.parse({("txt", "cls"): lambda _: made})(dict(SAMPLE))

    assert error.value.__notes__ == [
        "This was raised by transform= for field 'txt', 'cls' of sample 'a/1' of shard x.tar"
    ]


@pytest.mark.parametrize("fields", [(), (3,), ("txt", None)])
def test_a_function_of_several_fields_names_them(fields):
    with pytest.raises(ArgumentError, match="expected a field, or a tuple of fields"):
        Transform.parse({fields: len})


def test_one_of_several_fields_that_is_missing_is_an_error_that_names_it():
    with pytest.raises(SampleError, match="has no field 'jpg', which transform names"):
        Transform.parse({("txt", "jpg"): dict})(dict(SAMPLE))


# Images that transforms decode


CROP, MASKED = Resize(8), Resize(8, nearest=("mask",))


def undecoded(*transforms, images="numpy"):
    return set(undecoded_fields([Transform.parse(one) for one in transforms], Decoder(images=images)))


def test_a_field_is_left_undecoded_where_an_image_transform_is_the_first_to_get_it():
    assert undecoded({"image": CROP, ("a", "b"): CROP, "cls": abs}) == {"image", "a", "b"}
    assert undecoded({"cls": abs}, {"image": CROP}) == {"image"}
    assert undecoded({"image": np.flipud}, {"image": CROP}) == set()
    assert undecoded({"image": np.flipud, ("image", "a"): CROP}) == {"a"}
    assert undecoded({"image": CROP, ("image", "a"): dict}) == {"image"}
    assert undecoded(dict, {"image": CROP}) == set()
    assert undecoded({"image": CROP}, dict) == {"image"}
    assert undecoded({("image", "mask"): MASKED}) == {"image", "mask"}
    assert undecoded({("image", "mask"): MASKED}, images="pil") == {"image"}
    assert undecoded_fields([Transform.parse({"image": CROP})], None) == frozenset()


def test_only_images_are_left_undecoded_and_registered_codecs_are_asked_first():
    raw = {"__key__": "a", "__url__": "x.tar", "jpg": b"jpeg", "png.gz": b"", "txt": b"text", "cls": b"7", "seg": None}
    names = {"image": "jpg", "text": "txt", "label": "cls", "none": "gif?"}
    selection = FieldSelection.parse(names)
    decoded = decode_fields(dict(raw), selection, Decoder(), undecoded=names)

    assert isinstance(decoded.pop("image"), PendingImage)
    assert decoded == {"__key__": "a", "__url__": "x.tar", "text": "text", "label": 7, "none": None}
    own = Decoder(codecs={"jpg": Codec(bytes.upper, None)})
    assert decode_fields(dict(raw), selection, own, undecoded=names)["image"] == b"JPEG"
    with pytest.raises(CodecError, match=r"field 'png\.gz'"):
        decode_fields(dict(raw), FieldSelection.parse(None), Decoder(), undecoded=raw)
    del raw["png.gz"]
    everything = decode_fields(dict(raw), FieldSelection.parse(None), Decoder(), undecoded=raw)
    assert list(everything) == list(raw)
    assert isinstance(everything["jpg"], PendingImage)
    assert everything["seg"] is None


def test_a_pending_image_that_cannot_be_decoded_is_told_from_what_functions_raise():
    sample = decode_fields({"__key__": "a", "jpg": b"?"}, FieldSelection.parse(None), Decoder(), undecoded=["jpg"])
    with pytest.raises(CodecError) as error:
        Transform.parse({"jpg": CROP})(sample)

    assert was_undecodable(sample, error.value)
    assert not hasattr(error.value, "__notes__")
    assert not was_undecodable(sample, CodecError("another"))
    assert not was_undecodable((sample,), error.value)


def test_a_field_that_is_missing_is_an_error_that_names_it():
    with pytest.raises(
        SampleError, match=r"sample 'a/1' of shard x.tar: has no field 'jpg', which transform names"
    ) as error:
        Transform.parse({"cls": abs, "jpg": len})(dict(SAMPLE))

    assert (error.value.key, error.value.url, error.value.field) == ("a/1", "x.tar", "jpg")


def test_what_a_function_raises_is_raised_with_a_note_of_where():
    with pytest.raises(TypeError) as of_field:
        Transform.parse({"cls": len})(dict(SAMPLE))
    with pytest.raises(KeyError) as of_sample:
        Transform.parse(lambda sample: sample["jpg"])({"__key__": "b"})

    assert of_field.value.__notes__ == [
        "This was raised by transform= for field 'cls' of sample 'a/1' of shard x.tar",
    ]
    assert of_sample.value.__notes__ == ["This was raised by transform= for sample 'b'"]


@pytest.mark.parametrize("transform", [lambda _: next(iter(())), {"cls": lambda _: next(iter(()))}])
def test_stop_iteration_of_a_function_never_ends_a_loop_over_samples(transform):
    says = "sample 'a/1' of shard x.tar: transform= raised StopIteration, which would be taken for the end of the data"

    with pytest.raises(ArgumentError, match=says):
        list(map(Transform.parse(transform), [SAMPLE]))


@pytest.mark.parametrize("transform", [3, "flip", {"cls": 3}, ["flip"]])
def test_what_cannot_be_called_is_an_error_at_once(transform):
    with pytest.raises(
        ArgumentError, match=r"transform is .*, expected a function, or a mapping of names to functions"
    ):
        Transform.parse(transform)


def test_a_transform_goes_into_other_processes():
    transform = pickle.loads(pickle.dumps(Transform.parse({"cls": abs, "txt": len})))

    assert transform(dict(SAMPLE)) == {**SAMPLE, "txt": 3}


def test_index_columns_come_beside_the_fields_undecoded():
    raw = {"__key__": "a", "cls": memoryview(b"7"), "__columns__": {"cls": 8, "width": None}}
    selection = FieldSelection.parse({"label": "cls"})

    assert decode_fields(dict(raw), selection, Decoder()) == {"__key__": "a", "label": 7, "cls": 8, "width": None}
    assert decode_fields(dict(raw), selection, None) == {"__key__": "a", "label": b"7", "cls": 8, "width": None}
    assert type(decode_fields(dict(raw), selection, None)["label"]) is bytes
    del raw["__columns__"]["cls"]
    assert decode_fields(dict(raw), FieldSelection.parse(None), Decoder()) == {"__key__": "a", "cls": 7, "width": None}
    assert decode_fields(dict(raw), FieldSelection.parse(None), None) == {"__key__": "a", "cls": b"7", "width": None}


def test_fields_are_decoded_by_their_own_names_and_only_those_picked():
    raw = {"__key__": "a", "__url__": "x.tar", "cls": b"7", "json": b"{", "png": b"...", "txt": b"t"}
    selection = FieldSelection.parse({"label": "index;cls", "caption": "txt", "mask": "seg.png?"})

    decoded = {"__key__": "a", "__url__": "x.tar", "label": 7, "caption": "t", "mask": None}
    assert decode_fields(raw, selection, Decoder()) == decoded
    assert decode_fields(raw, selection, None) == {**decoded, "label": b"7", "caption": b"t"}
    assert decode_fields({"cls": b"1"}, FieldSelection.parse(None), Decoder()) == {"cls": 1}
    with pytest.raises(SampleError, match="has no field jpg"):
        decode_fields(raw, FieldSelection.parse(["jpg"]), Decoder())
