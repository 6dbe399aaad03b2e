"""Values come back unchanged, untrusted bytes take no more memory than allowed, and every error says where."""

import gzip
import json
import multiprocessing
import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shardkit.codecs import registry as codecs_module
from shardkit.codecs.compress import compress_frame
from shardkit.codecs.registry import Codec, Decoder, encode, register_codec, registered_codecs
from shardkit.errors import ArgumentError, CodecError
from tests.support.shared import DECODER, MIB, PHOTO, refuses, round_trip, same_array

SUFFIXES = ["", ".gz", ".zst", ".zst.gz"]
IMAGE_FIELDS = ["jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "pbm"]

fields_with_suffixes = st.tuples(st.sampled_from(["", "a.", "seg.b."]), st.sampled_from(SUFFIXES))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=10,
).filter(lambda value: not isinstance(value, str))


# Every pair returns the value that it was given


@given(value=st.text(), name=fields_with_suffixes, component=st.sampled_from(["txt", "text", "caption", "transcript"]))
def test_text_comes_back(value, name, component):
    assert round_trip(component.join(name), value) == value


@given(value=st.integers(-(1 << 63), (1 << 63) - 1), component=st.sampled_from(["cls", "index", "id", "count"]))
def test_integers_come_back(value, component):
    assert round_trip(component, value) == value
    assert round_trip(f"{component}.gz", value) == value


@given(value=json_values, name=fields_with_suffixes)
def test_json_comes_back(value, name):
    assert round_trip("json".join(name), value) == value


@given(values=st.lists(json_values | st.text()), name=fields_with_suffixes)
def test_jsonl_comes_back(values, name):
    assert round_trip("jsonl".join(name), values) == values


@given(value=st.binary(), field=st.sampled_from(["bin", "wav", "mp4", "", "x.y", "json.txt.unknown"]))
def test_other_fields_are_bytes(value, field):
    assert round_trip(field, value) == value


@given(value=st.binary(), field=st.sampled_from([*IMAGE_FIELDS, "json", "cls", "npy", "txt.gz", "x"]))
def test_bytes_are_stored_as_they_are_whatever_the_field(value, field):
    for data in (value, bytearray(value), memoryview(value)):
        assert encode(field, data) == value
        assert isinstance(encode(field, data), bytes)


def test_a_str_is_stored_as_utf_8_whatever_the_field():
    assert encode("json", '{"a": 1}') == b'{"a": 1}'
    assert encode("html", "ü") == "ü".encode()
    assert gzip.decompress(encode("html.gz", "ü")) == "ü".encode()


@pytest.mark.parametrize("field", ["txt.gz", "TXT.GZ", "a.b.txt.zst", "txt.zst.gz", "txt.gz.gz"])
def test_compressed_fields_are_decompressed_first(field):
    data = encode(field, "the same text " * 100)

    assert len(data) < 200
    assert DECODER.decode(field, data) == "the same text " * 100


def test_compressed_fields_of_other_programs_are_read():
    assert DECODER.decode("json.gz", gzip.compress(b"[1,") + gzip.compress(b"2]")) == [1, 2]
    assert DECODER.decode("bin.zst", compress_frame(b"a", 1) + compress_frame(b"b", 9)) == b"ab"
    assert DECODER.decode("gz", gzip.compress(b"raw")) == b"raw"
    assert DECODER.decode("tar.zst", compress_frame(b"raw", 1)) == b"raw"


def test_the_same_value_is_the_same_bytes():
    values = {
        "json.gz": {"b": 1, "a": [1.5, None]},
        "npz": {"x": np.arange(3)},
        "npy.zst": PHOTO,
        "png": PHOTO,
        "jpg": PHOTO,
    }

    for field, value in values.items():
        assert encode(field, value) == encode(field, value)
    assert encode("json", values["json.gz"]) == b'{"b":1,"a":[1.5,null]}'
    assert encode("jsonl", [1, "ü"]) == '1\n"ü"\n'.encode()


def test_a_field_is_known_by_its_last_component_in_any_case():
    assert DECODER.decode("page.0.JSON", b"[1]") == [1]
    assert DECODER.decode("json.x", b"[1]") == b"[1]"
    assert encode("Label.CLS", 3) == b"3"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_all_kinds_of_bytes_are_decoded(kind):
    for field, value in {"txt": "a", "cls": 1, "json": [1], "x": b"raw", "json.gz": [1]}.items():
        assert DECODER.decode(field, kind(encode(field, value))) == value
    assert same_array(DECODER.decode("png", kind(encode("png", PHOTO))), PHOTO)
    assert same_array(DECODER.decode("npy", kind(encode("npy", PHOTO))), PHOTO)
    assert DECODER.decode("jpg", kind(encode("jpg", PHOTO))).shape == PHOTO.shape


# Text and numbers


@pytest.mark.parametrize(
    ("data", "values"), [(b"", []), (b"\n", []), (b"1", [1]), (b"1\n", [1]), (b"1\r\n\n \r\n[2]\n", [1, [2]])]
)
def test_jsonl_of_none_one_or_many_lines(data, values):
    assert DECODER.decode("jsonl", data) == values


def test_jsonl_is_split_at_newlines_only():
    assert DECODER.decode("jsonl", '"a\u2028b\u0085c"\n'.encode()) == ["a\u2028b\u0085c"]


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"7", 7),
        (b"-7", -7),
        (b"+7", 7),
        (b" 7\n", 7),
        (b"0007", 7),
        (b"0" * 100, 0),
        (b"9223372036854775807", (1 << 63) - 1),
        (b"-9223372036854775808", -(1 << 63)),
    ],
)
def test_integers_are_decimal(data, value):
    assert DECODER.decode("cls", data) == value


@pytest.mark.parametrize(
    "data",
    [
        *[b"", b" ", b"x", b"7.0", b"1e3", b"0x7", b"1_000", b"1 2", b"--1", b"\xd9\xa7", b"7\0"],
        *[b"9223372036854775808", b"-9223372036854775809", b"9" * 20, b"9" * 10_000],
    ],
)
def test_what_is_no_integer_of_64_bits_is_refused(data):
    refuses("cls", data, "64 bits")


@pytest.mark.parametrize("value", [np.int32(5), np.uint8(5), True, torch.tensor(5), np.array(5)])
def test_what_python_takes_as_an_index_is_an_integer(value):
    assert encode("cls", value) == b"%d" % int(value)


BAD_VALUES = {
    "cls": [1.0, np.float32(1), None, [1], 1 << 63, -(1 << 63) - 1],
    "txt": [1, None, ["a"], "\ud800"],
    "json": [
        {1, 2},
        np.arange(2),
        np.float32(1),
        float("nan"),
        [float("inf")],
        {(1, 2): 3},
        b"\xff"[0:0].join,
        "\ud800",
    ],
    "jsonl": [None, 1, {"a": 1}, iter([1]), [{1}]],
    "npy": [{1: 2}, [[1], [1, 2]], np.array([None]), ["a", None], object(), np.ma.array([1, 2], mask=[0, 1])],
    "npz": [
        np.arange(3),
        [np.arange(3)],
        {1: np.arange(3)},
        {"": np.arange(3)},
        {"a\0b": np.arange(3)},
        {"a": object()},
    ],
    "pth": [object(), {"a": object()}, {"f": print}, Image.new("L", (2, 2))],
    "jpg": [1, None, [[1]], PHOTO.astype(np.float32), PHOTO[:0], PHOTO[0, 0], PHOTO[:, :, :2], PHOTO[None]],
    "bmp": [PHOTO[:0], PHOTO[:, :, 0] > 9, PHOTO[:, :, 0].astype(np.uint16), PHOTO[:, :, 0].astype(np.float32)],
    "tif": [PHOTO[:, :, 0] > 9, PHOTO[:, :, 0].astype(np.uint16), PHOTO[:, :, :2]],
    "png": [np.zeros((3, 8, 8), np.uint8), torch.zeros(8, 8, 3, dtype=torch.uint8), Image.new("F", (2, 2))],
    "ppm": [PHOTO[:, :, 0], Image.new("RGBA", (2, 2))],
    "pgm": [PHOTO],
    "pbm": [PHOTO, PHOTO[:, :, 0]],
    "wav": [1, PHOTO, None],
    "": [1],
    "gz": [1],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD_VALUES.items() for value in values]
)
def test_a_value_that_a_field_cannot_hold_is_refused_with_field_and_key(field, value):
    for name in (field, f"a.{field}", f"{field}.gz"):
        with pytest.raises(CodecError) as caught:
            encode(name, value, key="cats/0001")

        message = f"sample 'cats/0001', field {name!r} cannot be encoded from {type(value).__name__}: "
        assert str(caught.value).startswith(message)
        assert str(caught.value).endswith("; give what the field holds, or its bytes")
        assert (caught.value.key, caught.value.field) == ("cats/0001", name)
        assert caught.value.__cause__ is not None


def test_a_field_without_a_codec_says_how_to_get_one():
    with pytest.raises(
        CodecError, match=r"from list: shardkit has no codec for 'wav'; register_codec\('wav', encode=...\)"
    ):
        encode("wav", [1, 2])


# Errors say where


@pytest.mark.parametrize(
    ("field", "data", "cause"),
    [
        ("json", b"{", "Expecting property name"),
        ("json", b"[" * 100_000, "RecursionError: "),
        ("jsonl", b"1\n{\n3", "line 2: Expecting property name"),
        ("txt", b"\xff", "'utf-8' codec can't decode byte 0xff"),
        ("cls", b"cat", "expected a decimal integer of 64 bits, got b'cat'"),
        ("json.gz", b"{}", "it is damaged or not gz data"),
        ("npy", b"not an array", "it begins with b'not an', not like an npy file"),
        ("npz", b"not a zip", "BadZipFile: File is not a zip file"),
        ("jpg", b"not an image", "it begins with b'not an i', unlike every image that shardkit reads"),
        ("jpg", b"", "it begins with b''"),
    ],
)
def test_an_error_says_shard_key_field_and_cause_in_one_message(field, data, cause):
    with pytest.raises(CodecError) as caught:
        DECODER.decode(field, data, key="cats/0001", url="train-000000.tar")

    message = str(caught.value)
    assert message.startswith(f"shard train-000000.tar, sample 'cats/0001', field {field!r} cannot be decoded: {cause}")
    assert message.endswith("; repair the sample or leave it out, as a stream or a loader does with on_error='skip'")
    assert (caught.value.url, caught.value.key, caught.value.field) == ("train-000000.tar", "cats/0001", field)
    assert caught.value.__cause__ is not None


def test_an_error_without_shard_and_key_names_the_field():
    with pytest.raises(CodecError, match=r"^field 'json' cannot be decoded: "):
        DECODER.decode("json", b"")


# A sample


def test_a_sample_is_decoded_field_by_field():
    sample = {
        "__key__": "0001",
        "__url__": "a.tar",
        "cls": b"1",
        "json.gz": gzip.compress(b"[]"),
        "wav": b"raw",
        "txt": None,
    }

    assert DECODER.decode_sample(sample) == {**sample, "cls": 1, "json.gz": []}
    assert sample["cls"] == b"1"


def test_a_sample_that_cannot_be_decoded_says_which():
    with pytest.raises(CodecError, match=r"^shard a.tar, sample '0001', field 'cls' cannot"):
        DECODER.decode_sample({"__key__": "0001", "__url__": "a.tar", "txt": b"a", "cls": b"a"})
    with pytest.raises(CodecError, match=r"^field 'cls' cannot"):
        DECODER.decode_sample({"cls": b"a"})


@pytest.mark.parametrize(
    "options",
    [
        {"images": "torch"},
        *[
            {name: bad}
            for name in ("max_pixels", "max_array_bytes", "max_decompressed_bytes")
            for bad in (0, -1, 1.5, "1MB", True, None)
        ],
    ],
)
def test_a_decoder_with_limits_that_are_none_is_refused(options):
    with pytest.raises(ArgumentError, match=f"{next(iter(options))} must be"):
        Decoder(**options)


# The user's own codecs


def decode_wav(data):
    return list(struct.unpack(f"<{len(data) // 2}h", data))


def encode_wav(value):
    return struct.pack(f"<{len(value)}h", *value)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Give each test the codecs of a new process."""
    monkeypatch.setattr(codecs_module, "_registered", {})


def test_a_codec_is_registered_in_one_line():
    register_codec("wav", decode=decode_wav, encode=encode_wav)

    for field in ("wav", "left.WAV", "wav.gz", "wav.zst"):
        assert Decoder().decode(field, encode(field, [1, -2, 3])) == [1, -2, 3]


def test_a_registered_codec_comes_before_shardkits_own_but_never_before_bytes():
    register_codec("TXT", decode=lambda data: data.decode().split(), encode=lambda value: " ".join(value).encode())

    assert Decoder().decode("txt", b"a b") == ["a", "b"]
    assert encode("txt", ["a", "b"]) == b"a b"
    assert encode("txt", b"as it is") == b"as it is"


def test_half_a_codec_leaves_the_other_half_as_it_was():
    register_codec("cls", decode=lambda data: f"class {data.decode()}")
    register_codec("npy", encode=lambda value: b"encoded %d" % len(value))

    assert Decoder().decode("cls", encode("cls", 7)) == "class 7"
    assert encode("npy", [1, 2]) == b"encoded 2"
    assert same_array(Decoder().decode("npy", codecs_module.encode_npy(PHOTO)), PHOTO)


def test_a_decoder_keeps_the_codecs_that_there_were_when_it_was_made():
    before = Decoder()
    register_codec("wav", decode=decode_wav, encode=encode_wav)
    after = Decoder()
    captured = registered_codecs()
    register_codec("wav", decode=len)

    assert (before.decode("wav", b"\1\0"), after.decode("wav", b"\1\0"), Decoder().decode("wav", b"\1\0")) == (
        b"\1\0",
        [1],
        2,
    )
    assert captured == {"wav": Codec(decode_wav, encode_wav)}
    assert encode("wav", [1], codecs=captured) == b"\1\0"
    with pytest.raises(CodecError, match="no codec for 'wav'"):
        encode("wav", [1])


def test_a_decoder_goes_to_spawned_processes_with_its_codecs():
    register_codec("ints", decode=json.loads)
    decoder = Decoder(max_pixels=5)

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(decoder.decode, ("ints", b"[1]")) == [1]
    assert pickle.loads(pickle.dumps(decoder)) == decoder


def test_what_a_registered_codec_raises_is_a_codec_error_that_says_where():
    def fail(_):
        raise KeyError("rate")

    register_codec("wav", decode=fail, encode=fail)
    register_codec("text", encode=lambda value: value)

    with pytest.raises(CodecError, match=r"sample 'a', field 'wav' cannot be decoded: KeyError: 'rate'; "):
        Decoder().decode("wav", b"", key="a")
    with pytest.raises(CodecError, match=r"sample 'a', field 'wav.gz' cannot be encoded from int: KeyError: 'rate'; "):
        encode("wav.gz", 1, key="a")
    with pytest.raises(CodecError, match="its registered codec returned int, expected bytes"):
        encode("text", 1)


@pytest.mark.parametrize("field", ["", "gz", "ZST", "a.wav", ".wav", "a/b", "a b", "wav\n"])
def test_what_is_no_last_component_gets_no_codec(field):
    with pytest.raises(ArgumentError, match="cannot have a codec"):
        register_codec(field, decode=len)


def test_a_codec_does_something():
    with pytest.raises(ArgumentError, match="needs decode=, encode= or both"):
        register_codec("wav")


# Bombs in compressed fields


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("component", ["txt", "json", "npy", "jpg", "bin"])
def test_a_bomb_in_a_compressed_field_is_refused_before_memory_is_taken(component, suffix):
    zeros = bytes(32 * MIB)
    bomb = gzip.compress(zeros) if suffix == "gz" else compress_frame(zeros, 3)
    decoder = Decoder(max_decompressed_bytes=MIB)
    refuses(f"{component}.{suffix}", bomb, "it holds more than the limit, max_decompressed_bytes=1,048,576", decoder)

    assert decoder.decode(f"bin.{suffix}", encode(f"bin.{suffix}", "a" * MIB)) == b"a" * MIB


def test_a_bomb_in_a_bomb_is_refused():
    bomb = gzip.compress(gzip.compress(bytes(32 * MIB)))
    refuses(
        "txt.gz.gz",
        bomb,
        "it holds more than the limit, max_decompressed_bytes=1,048,576",
        Decoder(max_decompressed_bytes=MIB),
    )


LOOP = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": 1, "b": [0, {"c": np.int64(3)}]}, r"the value at \['b'\]\[1\]\['c'\]: Object of type int64 is not JSON"),
        ([1.0, (float("nan"),)], r"the value at \[1\]\[0\]: Out of range float"),
        ({("a", 1): 2}, r"from dict: keys must be str"),
        (np.float32(1), r"from float32: Object of type float32 is not JSON"),
        (LOOP, r"the value at (\[0\]){20}\.\.\.: Circular reference"),
    ],
)
def test_what_json_does_not_know_is_named(value, says):
    with pytest.raises(CodecError, match=says):
        encode("json", value)
