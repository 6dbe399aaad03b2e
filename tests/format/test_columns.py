"""Columns have the values of their fields or functions, and an error in one names the column and the sample."""

import pickle

import pytest

from shardkit.codecs.registry import Decoder
from shardkit.errors import ArgumentError, CodecError
from shardkit.format.columns import ColumnMaker, DecodedView

FIELDS = [("cls", b"7"), ("json", b'{"width": 3}'), ("txt", b"seven")]


def test_a_field_gives_its_decoded_value_and_a_missing_one_none():
    maker = ColumnMaker({"label": "cls", "text": "txt", "image": "jpg"})

    assert maker.values("a", FIELDS) == {"label": 7, "text": "seven", "image": None}


def test_a_function_sees_the_key_and_decoded_fields_and_cannot_change_them():
    def width(sample):
        assert dict(sample) == {"__key__": "a", "cls": 7, "json": {"width": 3}, "txt": "seven"}
        assert len(sample) == 4
        assert sample.get("jpg") is None
        with pytest.raises(TypeError):
            sample["txt"] = "other"
        return sample["json"]["width"]

    assert ColumnMaker({"width": width}).values("a", FIELDS) == {"width": 3}


def test_only_what_is_looked_at_is_decoded():
    view = DecodedView("a", {"jpg": b"no image", "cls": b"1"}, Decoder())

    assert view["cls"] == 1
    with pytest.raises(CodecError, match="jpg"):
        view["jpg"]


def test_a_field_that_no_sample_has_is_an_error_and_one_that_a_few_have_is_none():
    maker = ColumnMaker({"label": "cls", "key": "__key__", "length": len})
    maker.check_fields([["txt"], ["txt", "cls"], None])  # it stops as soon as every field was found
    maker.check_fields([])

    with pytest.raises(ArgumentError, match=r"'label' names the field 'cls', which no .*\(there are jpg, txt\)"):
        maker.check_fields([["txt"], ["jpg"]])


def test_without_columns_nothing_is_done():
    assert ColumnMaker(None).values("a", iter(FIELDS)) == {}


def test_a_function_that_fails_is_an_error_with_its_cause():
    with pytest.raises(
        CodecError, match=r"sample 'a': column 'n' cannot be computed \(KeyError: 'nothing'\)"
    ) as caught:
        ColumnMaker({"n": lambda sample: sample["nothing"]}).values("a", FIELDS)
    assert isinstance(caught.value.__cause__, KeyError)
    assert (caught.value.key, caught.value.field) == ("a", "n")


def test_a_field_that_cannot_be_decoded_is_an_error_of_that_field():
    with pytest.raises(CodecError, match="'a'") as caught:
        ColumnMaker({"label": "cls"}).values("a", [("cls", b"seven")])
    assert caught.value.field == "cls"


@pytest.mark.parametrize("name", ["", "_a", "__key__", "jpg:size"])
def test_names_that_the_index_uses_are_refused(name):
    with pytest.raises(ArgumentError, match="is reserved for the index; choose a name without a ':' or a leading '_'"):
        ColumnMaker({name: "cls"})


@pytest.mark.parametrize("column", [None, 7, ["cls"]])
def test_what_is_neither_a_field_nor_a_function_is_refused(column):
    with pytest.raises(ArgumentError, match="expected a field's name or a function of the sample"):
        ColumnMaker({"a": column})


@pytest.mark.parametrize("columns", [["cls"], "cls", 3, {3: "cls"}])
def test_what_is_no_mapping_of_names_is_refused(columns):
    with pytest.raises(ArgumentError, match="columns"):
        ColumnMaker(columns)


def test_a_maker_goes_to_other_processes():
    maker = pickle.loads(pickle.dumps(ColumnMaker({"label": "cls", "size": len})))

    assert maker.values("a", FIELDS) == {"label": 7, "size": 4}
