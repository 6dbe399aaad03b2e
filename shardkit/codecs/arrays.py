"""Arrays and tensors <-> npy, npz and pth, without pickle and without trusting any claimed size."""

import ast
import contextlib
import io
import math
import re
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt

_NPY_MAGIC = b"\x93NUMPY"
_NPY_LENGTH_BYTES = {b"\1\0": 2, b"\2\0": 4, b"\3\0": 4}
_MAX_NPY_HEADER_BYTES = 10_000  # NumPy's own limit: a longer header could exhaust the parser
_ATTEMPTS = 20  # at parsing a header; in the worst case that could be provoked, one header in 10 000 fails
_LENGTH = r"(?:0|[1-9]\d{0,17})"
_PLAIN_HEADER = re.compile(  # what NumPy writes for arrays of numbers, matched in a tenth of the parser's time
    r"\{'descr': '([<>|][a-zA-Z]\d{1,4})', 'fortran_order': (True|False), "
    rf"'shape': \(((?:{_LENGTH},|{_LENGTH}(?:, {_LENGTH})+)?)\), \}} *\n?\Z"
)
_NPZ_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # others are inflated without a bound


def decode_npy(data: bytes, max_bytes: int) -> npt.NDArray[Any]:
    """Return the array of an npy file. The array is writable.

    Args:
        data: The whole file.
        max_bytes: The largest permitted size of the array.

    Raises:
        ValueError: It is not an npy file, or its header does not match its size, exceeds ``max_bytes``, or declares
            Python objects.
    """
    shape, is_fortran, dtype, start = _read_npy_header(data)
    size = math.prod(shape) * dtype.itemsize
    if dtype.hasobject:
        raise ValueError(
            "it holds Python objects, which only pickle reads, and that runs code from the file; store numbers or json"
        )
    if size > max_bytes:
        raise ValueError(f"it claims an array of {size:,} bytes, the limit is max_array_bytes={max_bytes:,}")
    if size != len(data) - start:
        raise ValueError(f"its header claims an array of {size:,} bytes, but {len(data) - start:,} are there")
    array = np.ndarray(shape, dtype, data, start, order="F" if is_fortran else "C")
    return array.copy(order="K")


def encode_npy(value: object) -> bytes:
    """Return an npy file of an array, or of a value that NumPy converts to one: numbers, nested lists, tensors.

    Raises:
        ValueError: It holds Python objects.
        TypeError: It has a mask, which npy cannot store.
        Exception: Whatever NumPy raises if it cannot make an array.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("npy has no masks; fill the array, or store its data and its mask as two fields")
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise ValueError(f"expected an array of numbers or text, got Python objects in {type(value).__name__}")
    file = io.BytesIO()
    # If NumPy chooses the version itself, it warns about 3.0, which field names beyond Latin-1 need.
    is_latin = all(ord(letter) < 256 for letter in repr(array.dtype.descr))
    np.lib.format.write_array(file, array, version=(1, 0) if is_latin else (3, 0), allow_pickle=False)
    data = file.getvalue()
    _read_npy_header(data)  # a file that reading would refuse is refused now
    return data


def decode_npz(data: bytes, max_bytes: int) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an npz file by name.

    Args:
        data: The whole file.
        max_bytes: The largest permitted size of all arrays together. The sizes in the zip directory are compared with
            it before anything is inflated, and no array gets more memory than the directory claims.

    Raises:
        ValueError: A member is not an npy file as NumPy stores it in an npz, or the bound is exceeded.
        Exception: Whatever ``zipfile`` raises on a damaged file.
    """
    arrays = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for member in _bounded_members(archive, max_bytes):
            name = member.filename.removesuffix(".npy")
            if name == member.filename:
                raise ValueError(f"its member {name!r} is not an npy file")
            if name in arrays:
                raise ValueError(f"its member {member.filename!r} is in it twice")
            if member.compress_type not in _NPZ_COMPRESSIONS:
                raise ValueError(f"its member {member.filename!r} is compressed in a way that NumPy does not use")
            with archive.open(member) as file:
                arrays[name] = decode_npy(file.read(member.file_size), max_bytes)  # a bare read() has no bound
    return arrays


def encode_npz(value: object) -> bytes:
    """Return an uncompressed npz file of a dict of arrays, without timestamps: equal arrays give equal bytes.

    Raises:
        TypeError: It is not a dict with strings as names.
        Exception: As for ``encode_npy``.
    """
    if not isinstance(value, dict) or not all(isinstance(name, str) and name and "\0" not in name for name in value):
        raise TypeError("expected a dict of arrays by name")
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in value.items():
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), encode_npy(array))
    return file.getvalue()


def decode_pth(data: bytes, max_bytes: int) -> Any:
    """Load what ``torch.save`` wrote, on the CPU: tensors, numbers, text, and dicts, lists and tuples of them.

    Nothing in the file can run code (``weights_only``). The size of its members is bounded, but the memory that a
    forged file makes torch allocate is not: for data that you do not trust, use npy.

    Args:
        data: The whole file.
        max_bytes: The largest permitted size of the file's members together.

    Raises:
        ValueError: It is not a zip file as ``torch.save`` writes it (files from torch before 1.6 are not), or it
            exceeds the bound.
        Exception: Whatever torch raises on other classes than those above.
    """
    import torch

    if not data.startswith(b"PK\x03\x04"):
        raise ValueError(
            "it is not a zip file as torch.save writes it; plain pickles and files of torch before 1.6 are not read"
        )
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in _bounded_members(archive, max_bytes)):
            raise ValueError("it has compressed members, unlike torch's")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def encode_pth(value: object) -> bytes:
    """Return the file that ``torch.save`` writes, provided that ``decode_pth`` can read it.

    A tensor that is a view is saved together with the whole tensor that it views: ``clone()`` it first.

    Raises:
        Exception: Whatever torch raises on anything but tensors, numbers, text, and dicts, lists and tuples of them.
    """
    import torch

    file = io.BytesIO()
    torch.save(value, file)
    torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=True)  # better now than in training
    return file.getvalue()


def _read_npy_header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return the shape, whether the array is in Fortran order, the dtype, and the offset of the array's bytes."""
    if not data.startswith(_NPY_MAGIC):
        raise ValueError(f"it begins with {data[:6]!r}, not like an npy file")
    version = data[6:8]
    length_bytes = _NPY_LENGTH_BYTES.get(version)
    if length_bytes is None:
        raise ValueError(f"its npy version is {'.'.join(map(str, version))}, expected 1.0, 2.0 or 3.0")
    start = 8 + length_bytes
    end = start + int.from_bytes(data[8:start], "little")
    if end - start > _MAX_NPY_HEADER_BYTES or end > len(data):
        raise ValueError(
            f"its header claims {end - start:,} bytes, the limit is {_MAX_NPY_HEADER_BYTES:,}, all has {len(data):,}"
        )
    text = data[start:end].decode("utf-8" if version == b"\3\0" else "latin-1")
    if plain := _PLAIN_HEADER.match(text):
        shape = tuple(int(length) for length in plain[3].split(",") if length)
        return shape, plain[2] == "True", np.dtype(plain[1]), end
    header = _parse_literal(text)
    if not isinstance(header, dict) or header.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("its header is not a dict of descr, fortran_order and shape")
    shape = header["shape"]
    if not isinstance(shape, tuple) or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"its shape is {shape!r}, expected a tuple of lengths")
    return shape, bool(header["fortran_order"]), np.lib.format.descr_to_dtype(header["descr"]), end


def _parse_literal(text: str) -> Any:
    # CPython counts the depth of syntax trees for all threads together. If the garbage collector runs Python code
    # during the parse, so that another thread parses too, CPython raises a SystemError although the text is valid.
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(SystemError):
            return ast.literal_eval(text)
    return ast.literal_eval(text)


def _bounded_members(archive: zipfile.ZipFile, max_bytes: int) -> list[zipfile.ZipInfo]:
    members = archive.infolist()
    size = sum(member.file_size for member in members)
    if size > max_bytes:
        raise ValueError(
            f"its {len(members):,} members claim {size:,} bytes, the limit is max_array_bytes={max_bytes:,}"
        )
    return members
