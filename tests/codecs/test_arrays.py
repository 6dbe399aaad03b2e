"""Arrays and tensors come back bit for bit, and an untrusted file can neither claim memory nor run code."""

import ast
import io
import pickle
import struct
import warnings
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from shardkit.codecs.registry import Decoder, encode
from shardkit.errors import CodecError
from tests.support.shared import DECODER, MIB, arrays, refuses, round_trip, same_array


@given(array=arrays)
def test_arrays_come_back_to_the_bit_and_can_be_written_to(array):
    back = round_trip("npy", array)

    assert same_array(back, array)
    assert back.flags.writeable
    assert back.flags.aligned


@given(
    value=st.dictionaries(st.text(min_size=1, alphabet=st.characters(exclude_characters="\0", codec="utf-8")), arrays)
)
def test_dicts_of_arrays_come_back(value):
    back = round_trip("npz", value)

    assert back.keys() == value.keys()
    assert all(same_array(back[name], np.asarray(array)) for name, array in value.items())


@given(
    array=npst.arrays(st.sampled_from([np.uint8, np.int64, np.float32, np.bool_]), npst.array_shapes(min_side=0)),
)
def test_tensors_and_containers_of_them_come_back(array):
    value = {"tensor": torch.from_numpy(array), "others": [1, 2.5, "text", None, (True,)]}
    back = round_trip("pth", value)

    assert torch.equal(torch.nan_to_num(back["tensor"]), torch.nan_to_num(value["tensor"]))
    assert back["others"] == value["others"]


# Untrusted arrays


def npy(descr="'<f4'", shape="(2,)", order="False", body=bytes(8), version=(1, 0), header=None):
    """Return an npy file with the header that the caller wants."""
    text = header if header is not None else f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"
    length = struct.pack("<H" if version == (1, 0) else "<I", len(text.encode()))
    return b"\x93NUMPY" + bytes(version) + length + text.encode() + body


def test_npy_files_of_all_versions_and_orders_are_read():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for version in ((1, 0), (2, 0), (3, 0)):
        assert DECODER.decode("npy", npy(version=version)).tolist() == [0, 0]
    for a in (array, np.asfortranarray(array), array[:, ::2], array[::-1], array.astype(">f4"), array[:0]):
        file = io.BytesIO()
        np.save(file, a)

        assert same_array(DECODER.decode("npy", file.getvalue()), a)
    names = "[('ü\u4e2d', '<i4')]"
    assert DECODER.decode("npy", npy(names, version=(3, 0))).dtype.names == ("ü\u4e2d",)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (npy(shape="(1000000000000,)"), "claims an array of 4,000,000,000,000 bytes, the limit is max_array_bytes"),
        (npy(shape="(1 << 70, 0)"), "malformed|shape"),
        (npy(shape="(1000000, 1000000, 1000000)"), "the limit is max_array_bytes"),
        (npy("'|V2000000000'", "(3,)"), "the limit is max_array_bytes"),
        (npy("('<f4', (10000, 10000))", "(3,)"), "the limit is max_array_bytes"),
        (npy(shape="(3,)"), "claims an array of 12 bytes, but 8 are there"),
        (npy(shape="(1,)"), "claims an array of 4 bytes, but 8 are there"),
        (npy(shape="()"), "claims an array of 4 bytes, but 8 are there"),
        (npy("'|O'"), "Python objects"),
        (npy("[('a', '<i4'), ('b', '|O')]"), "Python objects"),
        (npy(shape="(-2,)"), r"its shape is \(-2,\), expected a tuple of lengths"),
        (npy(shape="(True, 2)"), "its shape is"),
        (npy(shape="[2]"), "its shape is"),
        (npy(shape="(2.0,)"), "its shape is"),
        (npy(header="{'descr': '<f4', 'shape': (2,)}"), "its header is not a dict of"),
        (npy(header="[1, 2]"), "its header is not a dict of"),
        (npy(header="__import__('os').system('true')"), "malformed node"),
        (npy(header="(" * 9000), "SyntaxError|MemoryError|RecursionError"),
        (npy(header=" " * 10_001), "its header claims 10,001 bytes, the limit is 10,000"),
        (b"\x93NUMPY\x01\x00\xff\x00", "its header claims 255 bytes"),
        (npy("'no such type'"), "data type"),
        (npy(version=(4, 0)), r"its npy version is 4\.0, expected"),
        (b"\x93NUMPY", "its npy version is"),
        (b"", "it begins with b''"),
        (pickle.dumps(np.arange(3)), "not like an npy file"),
    ],
)
def test_an_npy_file_that_lies_or_holds_objects_is_refused_before_memory_is_taken(data, cause):
    refuses("npy", data, cause)


def test_what_would_not_be_read_is_not_written():
    many_fields = np.dtype([(f"field {i:06}", "<f4") for i in range(1000)])
    with pytest.raises(CodecError, match=r"its header claims [0-9,]+ bytes, the limit is 10,000"):
        encode("npy", np.zeros(1, many_fields))
    with pytest.raises(CodecError, match="expected an array of numbers or text, got Python objects"):
        encode("npy", np.array([None]))


def test_an_npy_file_cut_anywhere_is_refused():
    data = encode("npy", np.arange(5))
    for cut in range(len(data)):
        with pytest.raises(CodecError):
            DECODER.decode("npy", data[:cut])


def test_npy_files_are_read_where_another_thread_disturbs_pythons_parser(monkeypatch):
    def parse(text):
        disturbed.append(text)
        if len(disturbed) < 4:
            raise SystemError("AST constructor recursion depth mismatch (before=63, after=60)")
        return literal_eval(text)

    disturbed, literal_eval = [], ast.literal_eval
    monkeypatch.setattr(ast, "literal_eval", parse)

    records = np.zeros(3, dtype=[("x", "<i4")])  # the headers of plain arrays need no parser

    assert same_array(round_trip("npy", records), records)
    assert len(disturbed) == 5  # encoding reads its output again


def test_arrays_are_bounded_by_the_decoders_limit():
    data = encode("npy", np.zeros(1000, np.uint8))

    assert Decoder(max_array_bytes=1000).decode("npy", data).shape == (1000,)
    refuses(
        "npy", data, "claims an array of 1,000 bytes, the limit is max_array_bytes=999", Decoder(max_array_bytes=999)
    )


def zipped(members, compression=zipfile.ZIP_DEFLATED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members:
            with warnings.catch_warnings(action="ignore"):  # about duplicate names
                archive.writestr(name, content)
    return file.getvalue()


ZEROS = encode("npy", np.zeros(32 * MIB, np.uint8))


def test_npz_files_of_numpy_are_read():
    arrays = {"a": np.arange(5), "b/c": np.ones((2, 3), ">f8"), "file": np.array("text")}
    for save in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        save(file, **{name: array for name, array in arrays.items() if name != "file"})
        back = DECODER.decode("npz", file.getvalue())

        assert all(same_array(back[name], arrays[name]) for name in ("a", "b/c"))
    assert np.load(io.BytesIO(encode("npz", arrays)))["file"] == "text"


def lying_npz(claimed):
    """Return an npz of 32 MiB zeros whose directory claims another size."""
    data = bytearray(zipped([("a.npy", ZEROS)]))
    struct.pack_into("<I", data, data.rindex(b"PK\1\2") + 24, claimed)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (zipped([("a.npy", ZEROS)]), "its 1 members claim 33,554,560 bytes, the limit is max_array_bytes=1,048,576"),
        (zipped([(f"{i}.npy", encode("npy", np.zeros(MIB // 2))) for i in range(4)]), "its 4 members claim"),
        (lying_npz(1000), "claims an array of|Bad CRC|has"),
        (lying_npz(128), "claims an array of|Bad CRC|has"),
        (zipped([("a.npy", b"x" * 10)], zipfile.ZIP_BZIP2), "compressed in a way that NumPy does not use"),
        (zipped([("a.npy", b"x" * 10)], zipfile.ZIP_LZMA), "compressed in a way that NumPy does not use"),
        (zipped([("a.txt", b"text")]), "'a.txt' is not an npy file"),
        (zipped([("a.npy", encode("npy", 1)), ("a.npy", encode("npy", 2))]), "'a.npy' is in it twice"),
        (zipped([("a.npy", npy("'|O'"))]), "Python objects"),
        (zipped([("a.npy", b"text")]), "not like an npy file"),
        (b"PK\3\4 no zip", "not a zip file"),
    ],
)
def test_an_npz_file_that_lies_or_holds_other_things_is_refused_before_memory_is_taken(data, cause):
    refuses("npz", data, cause, Decoder(max_array_bytes=MIB))


def test_an_npz_file_cut_or_damaged_anywhere_is_refused_or_unchanged():
    value = {"a": np.arange(3)}
    data = encode("npz", value)
    for cut in range(len(data)):
        with pytest.raises(CodecError):
            DECODER.decode("npz", data[:cut])
    start = data.index(b"\x93NUMPY")
    for at in range(start, start + len(encode("npy", value["a"]))):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(CodecError):
            DECODER.decode("npz", bytes(damaged))


class Evil:
    def __reduce__(self):
        return print, ("code from the file ran",)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (pickle.dumps({"a": 1}), "not a zip file as torch.save writes it"),
        (pickle.dumps(Evil()), "not a zip file as torch.save writes it"),
        (b"", "not a zip file as torch.save writes it"),
        (b"PK\3\4 no zip", "not a zip file"),
        (zipped([("archive/data.pkl", bytes(32 * MIB))]), "its 1 members claim 33,554,432 bytes, the limit is"),
        (zipped([("archive/data.pkl", bytes(1000))]), "it has compressed members"),
    ],
)
def test_a_pth_file_that_is_not_torchs_is_refused_before_it_is_unpickled(data, cause, capsys):
    torch.zeros(1)  # torch has now allocated what it needs for itself
    refuses("pth", data, cause, Decoder(max_array_bytes=MIB))

    assert capsys.readouterr().out == ""


def test_a_pth_file_with_code_is_refused_and_the_code_does_not_run(capsys):
    file = io.BytesIO()
    torch.save({"a": Evil()}, file)
    refuses("pth", file.getvalue(), "Unsupported global|WeightsUnpickler")

    assert capsys.readouterr().out == ""


def test_old_pth_files_are_refused():
    file = io.BytesIO()
    torch.save(torch.zeros(3), file, _use_new_zipfile_serialization=False)
    refuses("pth", file.getvalue(), "files of torch before 1.6")
