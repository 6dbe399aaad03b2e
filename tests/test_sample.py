"""Accepted keys and fields are read back unchanged, and a selection of fields has one notation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import ArgumentError, SampleError
from shardkit.sample import (
    DECODINGS,
    KEY,
    MAX_KEY_BYTES,
    URL,
    FieldSelection,
    check_fields,
    check_key,
    split_decoding,
    split_name,
    suggest_key,
)

NAMES = st.text("aB1._-/ ä\t\x7f\udce4;:?", max_size=12) | st.text(max_size=6)


def is_accepted(check, *arguments):
    try:
        check(*arguments)
    except SampleError:
        return False
    return True


@given(key=NAMES, field=NAMES)
def test_what_is_accepted_is_what_readers_make_of_the_name(key, field):
    if is_accepted(check_key, key) and is_accepted(check_fields, key, [field]):
        assert split_name(f"{key}.{field}") == (key, field)


@given(name=st.text(max_size=20))
def test_the_key_that_is_suggested_is_accepted(name):
    assert check_key(suggest_key(name))


@pytest.mark.parametrize("key", ["0001", "a/b", "v1.5/0001", "__a/b", "a__", "a b", "Ä/ß", "-", "a" * MAX_KEY_BYTES])
def test_keys_that_readers_leave_alone_are_accepted(key):
    assert check_key(key) == key


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        *[("", "is empty"), (7, "is int, expected text"), (b"a", "is bytes, expected text"), (None, "is NoneType")],
        *[("img_1.5", "a dot in its last part"), (".a", "a dot in its last part"), ("a/b.c", "a dot in its last part")],
        *[("/a", "an empty part"), ("a/", "an empty part"), ("a//b", "an empty part")],
        *[("../a", "a part '.' or '..'"), ("./a", "a part '.' or '..'")],
        *[("__a__", "which readers skip"), ("__a__/b", "which readers skip"), ("a/__b__/c", "which readers skip")],
        *[
            ("a\n", "control"),
            ("a\0b", "control"),
            ("a\x1b[2J", "control"),
            ("a\x85", "control"),
            ("\udce4", "control"),
        ],
        ("a" * (MAX_KEY_BYTES + 1), "is longer than 4,096 bytes"),
    ],
    ids=lambda value: ascii(value)[:12],
)
def test_keys_that_readers_would_change_are_refused(key, problem):
    with pytest.raises(SampleError, match=problem) as caught:
        check_key(key)

    assert "for example" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        *[("", "dot-separated components"), (".jpg", "dot-separated"), ("jpg.", "dot-separated"), ("a..b", "dot-")],
        *[("_a", "starts with '_'"), ("__note__", "starts with '_'"), ("JPG", "readers would rename it to 'jpg'")],
        *[("Ä", "readers would rename it to 'ä'"), ("a/b", "dot-separated"), ("a;b", "dot-"), ("a?", "dot-")],
        *[("a:b", "dot-"), ("a b", "dot-"), ("a\n", "dot-"), ("a\x1b", "dot-"), (7, "is int, expected text")],
    ],
    ids=ascii,
)
def test_fields_that_readers_would_change_are_refused(field, problem):
    with pytest.raises(SampleError, match=problem) as caught:
        check_fields("0001", ["jpg", field])

    assert (caught.value.key, caught.value.field) == ("0001", str(field))


def test_a_sample_without_fields_is_refused():
    with pytest.raises(SampleError, match="sample '0001': has no fields"):
        check_fields("0001", [])


def test_fields_are_picked_by_name_alternative_and_choice():
    sample = {KEY: "a", URL: "x.tar", "png": b"p", "seg.png": b"s", "cls": b"1"}

    assert FieldSelection.parse(None).pick(sample) == sample
    assert FieldSelection.parse(["png", "txt?"]).pick(sample) == {KEY: "a", URL: "x.tar", "png": b"p", "txt": None}
    assert FieldSelection.parse(["jpg;png"]).pick(sample) == {KEY: "a", URL: "x.tar", "jpg": b"p"}
    assert FieldSelection.parse({"image": "JPG; PNG", "mask": "seg.png?"}).pick(sample) == {
        KEY: "a",
        URL: "x.tar",
        "image": b"p",
        "mask": b"s",
    }


PLAIN = st.lists(st.sampled_from(["jpg", "seg.png", "cls", "a-b_c.npy"]), min_size=1, max_size=3, unique=True)
SPACE = st.sampled_from(["", " "])


@given(fields=PLAIN, decodings=st.lists(st.sampled_from(["", *DECODINGS]), min_size=3), data=st.data())
def test_a_field_says_how_it_is_decoded_whatever_else_is_said(fields, decodings, data):
    said = dict(zip(fields, decodings, strict=False))
    optional = data.draw(st.sampled_from(["", "?"]))
    spec = ";".join(
        f"{data.draw(SPACE)}{field}{data.draw(SPACE)}" + (f":{data.draw(SPACE)}{how.upper()}" if how else "")
        for field, how in said.items()
    )
    for name, selection in (
        ("new", FieldSelection.parse({"new": spec + optional})),
        (fields[0], FieldSelection.parse([spec + optional])),
    ):
        assert selection.wanted == {name: tuple(fields)}
        assert selection.optional == ({name} if optional else set())
        assert selection.decodings == {(name, field): how for field, how in said.items() if how}
        asked = [selection.with_decoding(name, field) for field in fields]
        assert [split_decoding(one) for one in asked] == list(said.items())
        assert FieldSelection.parse({name: ";".join(asked) + optional}) == selection


def test_a_missing_field_is_an_error_that_says_how_to_write_it():
    with pytest.raises(SampleError, match=r"write 'jpg;png:unchanged\?' to get None instead"):
        FieldSelection.parse({"image": "jpg;png:unchanged"}).pick({KEY: "a", "txt": b""})


def test_how_a_field_is_decoded_is_not_part_of_what_is_packed():
    assert repr(FieldSelection.parse(["png:unchanged"])) == repr(FieldSelection.parse(["png"]))


def test_a_missing_field_is_an_error_that_says_what_there_is():
    with pytest.raises(SampleError, match=r"x\.tar: sample 'a': has no field jpg or png \(it has cls, txt\); write"):
        FieldSelection.parse({"image": "jpg;png"}).pick({KEY: "a", URL: "x.tar", "txt": b"", "cls": b""})


@pytest.mark.parametrize(
    "fields",
    [
        *["jpg", [], {}, [""], ["jpg", "jpg"], {"__key__": "txt"}, {"a": ""}, ["jpg;"], ["jpg?;png"], ["?"]],
        *[[":unchanged"], ["png:"], ["png:grey"], ["png:rgb:rgb"], ["png?:rgb"], {"a": "jpg;png:grey"}],
        {"a": "txt;__key__"},
    ],
    ids=repr,
)
def test_what_is_no_selection_is_refused(fields):
    with pytest.raises(ArgumentError, match="field"):
        FieldSelection.parse(fields)
