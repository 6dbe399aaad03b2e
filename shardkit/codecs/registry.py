"""Values <-> bytes: the last component of a field names its codec, so ``seg.png`` is decoded as ``png``.

::

    field                              decoded                                          encoded from
    ---------------------------------  -----------------------------------------------  -----------------------------
    jpg jpeg png webp gif bmp tif      uint8, (height, width, 3), RGB; or as the field  uint8 array or PIL image
      tiff ppm pgm pbm                   says, see below
    txt text caption transcript        str, from UTF-8                                  str
    cls index id count                 int of 64 bits, from decimal digits              int, or convertible to one
    json                               the JSON value                                   what JSON can represent
    jsonl                              a list of JSON values, one per line              list or tuple of such values
    npy                                an array                                         what NumPy can make an array of
    npz                                a dict of arrays                                 dict of arrays
    pth                                tensors, and containers of them, on the CPU      the same
    *.gz *.zst                         decompressed, then as the component before says  as the component before says
    anything else                      bytes                                            bytes

A field may say how it is decoded: ``depth.png:unchanged`` for an image as it is stored, ``jpg:pil`` for a PIL image,
``jpg:bytes`` for the bytes in the tar; see ``sample.FieldSelection``.

When a sample is written, bytes are stored unchanged, whatever the field, and text is stored as UTF-8. Decoding returns
the encoded value, with these exceptions: images become RGB (unless ``:unchanged``), lossy images differ (see
``encode_image``), tuples in JSON come back as lists and its keys as text, and arrays come back as arrays whatever they
were made from. Pickle is never used. Every size that a file claims is bounded before it is used.
"""

import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from shardkit.codecs.arrays import decode_npy, decode_npz, decode_pth, encode_npy, encode_npz, encode_pth
from shardkit.codecs.compress import compress_frame, gzip_writer
from shardkit.codecs.decompress import decompress
from shardkit.codecs.images import (
    IMAGE_FIELDS,
    BitDepthError,
    decode_image,
    decode_unchanged,
    encode_image,
    open_image,
)
from shardkit.errors import ArgumentError, CodecError, ShardkitError
from shardkit.sample import DECODINGS, KEY, URL, Sample, split_decoding

MAX_PIXELS = (1 << 28) // 3
"""The default limit on an image's pixels: 89 million, 256 MiB of RGB, where Pillow begins to warn."""
MAX_ARRAY_BYTES = 1 << 30
"""The default limit on the bytes of an array, or of all arrays of one field together: 1 GiB."""
MAX_DECOMPRESSED_BYTES = 1 << 30
"""The default limit on the decompressed size of a ``gz`` or ``zst`` field: 1 GiB."""

_COMPRESSED = ("gz", "zst")
_SHOWN_LEVELS = 20  # of nesting, in a message
_GZIP_LEVEL, _ZST_LEVEL = 6, 3
_INTEGER = re.compile(rb"\s*[+-]?0*[0-9]{1,19}\s*\Z")
_MIN_INT, _MAX_INT = -(1 << 63), (1 << 63) - 1
_COMPONENT = re.compile(r"[^./\s]+\Z")


class Codec(NamedTuple):
    """How fields with one last component are decoded and encoded; None where they can only be bytes."""

    decode: Callable[[bytes], Any] | None
    encode: Callable[[Any], bytes] | None


_registered: dict[str, Codec] = {}


def register_codec(
    field: str, *, decode: Callable[[bytes], Any] | None = None, encode: Callable[[Any], bytes] | None = None
) -> None:
    """Use these functions for fields with this last component in this process, even in place of shardkit's own codec.

    Register codecs before you make the stream or call pack: each of them keeps the codecs registered at that moment,
    and passes them to its worker processes. For spawned workers the functions must be importable, so lambdas do not
    work.

    Args:
        field: The part after the field's last dot, such as ``"wav"``; not ``gz`` or ``zst``.
        decode: Turns bytes into a value. The bytes come from a shard, so they may be damaged or malicious.
        encode: Turns a value into bytes.

    Raises:
        ArgumentError: ``field`` is not a single component, or neither function is given.

    Example:
        >>> register_codec("hex", decode=bytes.hex, encode=bytes.fromhex)
        >>> Decoder().decode("mask.hex", b"AB")
        '4142'
    """
    field = field.lower()
    if not _COMPONENT.match(field) or field in _COMPRESSED:
        raise ArgumentError(
            f"{field!r} cannot have a codec; give the one part behind a field's last dot, and not gz or zst"
        )
    if decode is None and encode is None:
        raise ArgumentError(f"a codec for {field!r} needs decode=, encode= or both")
    _registered[field] = Codec(decode, encode)


def registered_codecs() -> dict[str, Codec]:
    """Return the codecs that are registered now, to pass them to another process."""
    return dict(_registered)


@dataclass(frozen=True)
class Decoder:
    """Turns the bytes of fields into values. It can be pickled if the registered functions can.

    Attributes:
        images: How images are decoded if their field name does not say it: ``"rgb"`` for uint8, (height, width, 3);
            ``"unchanged"`` for arrays of the stored pixels; ``"pil"`` for loaded PIL images in the mode of the file;
            ``"bytes"``. ``"numpy"`` is an older name for ``"rgb"``.
        max_pixels: The largest permitted number of pixels of an image.
        max_array_bytes: The largest permitted size of the arrays of one field, in bytes.
        max_decompressed_bytes: The largest permitted decompressed size of a ``gz`` or ``zst`` field, in bytes.
        codecs: The registered codecs; by default, those that are registered when the decoder is made.

    Raises:
        ArgumentError: An argument is out of range.

    Example:
        >>> Decoder().decode("scores.json", b'{"cat": 0.9}')
        {'cat': 0.9}
    """

    images: Literal["rgb", "unchanged", "pil", "bytes", "numpy"] = "rgb"
    max_pixels: int = MAX_PIXELS
    max_array_bytes: int = MAX_ARRAY_BYTES
    max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES
    codecs: Mapping[str, Codec] = field(default_factory=registered_codecs)

    def __post_init__(self) -> None:
        if self.images == "numpy":
            object.__setattr__(self, "images", "rgb")
        if self.images not in DECODINGS:
            raise ArgumentError(f"images must be one of {', '.join(DECODINGS)}, got {self.images!r}")
        for name in ("max_pixels", "max_array_bytes", "max_decompressed_bytes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ArgumentError(f"{name} must be a positive int, got {value!r}")

    def decode(self, field: str, data: bytes | bytearray | memoryview, *, key: str = "", url: str = "") -> Any:
        """Return the value of one field.

        Args:
            field: Its name; the last component selects the codec. It may name a decoding: ``depth.png:unchanged``.
            data: Its bytes.
            key: The sample, for messages.
            url: The shard, for messages.

        Raises:
            CodecError: The bytes are damaged, do not match the field's name, or exceed a limit. The cause is chained.
            ArgumentError: The name asks for a decoding that such a field does not have.
        """
        decoding = self.decoding_of(field)
        if decoding == "bytes":
            return bytes(data)
        try:
            return self._decode(_parsed(field).components, bytes(data), decoding)
        except Exception as error:
            raise undecodable(error, _parsed(field).name, key=key, url=url) from error

    def decoding_of(self, field: str) -> str:
        """Return how a field is decoded: as its name says; otherwise, as ``images`` says for an image, or empty.

        Raises:
            ArgumentError: The name asks for a decoding that such a field does not have.

        Example:
            >>> [Decoder().decoding_of(field) for field in ("seg.png:unchanged", "png.gz", "cls")]
            ['unchanged', 'rgb', '']
        """
        name, decoding, _, component = _parsed(field)
        if not component and decoding not in ("", "bytes"):
            raise ArgumentError(
                f"field {field!r}: {name!r} is no image, and {decoding!r} is for images; leave it out, or write "
                f"'{name}:bytes' for its bytes"
            )
        codec = self.codecs.get(component)
        return decoding or (self.images if component and not (codec and codec.decode) else "")

    def takes_as_image(self, field: str) -> bool:
        """Return whether a field is an image that is decoded to an array, so that a transform may decode it itself.

        Example:
            >>> [Decoder().takes_as_image(field) for field in ("seg.png", "png:unchanged", "png:pil", "png.gz")]
            [True, True, False, False]
        """
        _, decoding, components, _ = _parsed(field)
        return components[-1] not in _COMPRESSED and decoding != "pil" and self.decoding_of(field) not in ("", "bytes")

    def decode_sample(self, sample: Sample) -> Sample:
        """Return the sample with all of its fields decoded. Entries that begin with ``_``, and None, are not changed.

        Raises:
            CodecError: As from ``decode``, for the first field that cannot be decoded.

        Example:
            >>> Decoder().decode_sample({"__key__": "0001", "cls": b"7", "txt": b"seven"})
            {'__key__': '0001', 'cls': 7, 'txt': 'seven'}
        """
        key, url = sample.get(KEY, ""), sample.get(URL, "")
        return {
            name: value if value is None or name.startswith("_") else self.decode(name, value, key=key, url=url)
            for name, value in sample.items()
        }

    def _decode(self, components: tuple[str, ...], data: bytes, decoding: str) -> Any:
        while components and components[-1] in _COMPRESSED:
            data = decompress(data, components[-1], self.max_decompressed_bytes)
            components = components[:-1]
        if decoding:
            return _IMAGES[decoding](data, max_pixels=self.max_pixels)
        component = components[-1] if components else ""
        codec = self.codecs.get(component)
        if codec and codec.decode:
            return codec.decode(data)
        builtin = _BUILTIN.get(component)
        return builtin.decode(data, self) if builtin else data


def names_image(field: str) -> bool:
    """Return whether a field's name denotes an image, possibly a compressed one.

    Example:
        >>> names_image("seg.png"), names_image("png.gz"), names_image("cls")
        (True, True, False)
    """
    return bool(_parsed(field).image)


class LightKind(Enum):
    """Kinds of fields that are so cheap to decode that a whole block is decoded at once.

    ``NPY`` is an array, ``INT`` a whole number, ``TEXT`` text, ``BYTES`` the bytes themselves.
    """

    NPY = "npy"
    INT = "int"
    TEXT = "text"
    BYTES = "bytes"


def light_kind(field: str, decoder: Decoder | None) -> LightKind | None:
    """Return the light kind of a field; None for images, containers, compressed and registered fields.

    Example:
        >>> light_kind("cls", Decoder()), light_kind("jpg", Decoder()), light_kind("jpg:bytes", Decoder())
        (<LightKind.INT: 'int'>, None, <LightKind.BYTES: 'bytes'>)
    """
    if decoder is None:
        return LightKind.BYTES if _parsed(field).decoding in ("", "bytes") else None
    if decoder.decoding_of(field) == "bytes":
        return LightKind.BYTES
    component = _parsed(field).components[-1]
    if component in decoder.codecs or component in _COMPRESSED:
        return None
    if component in IMAGE_FIELDS:
        return None
    builtin = _BUILTIN.get(component)
    return builtin.light if builtin else LightKind.BYTES


def undecodable(error: Exception, field: str, *, key: str, url: str) -> CodecError:
    """Return the error for a field that cannot be decoded, with advice about its cause."""
    advice = (
        f"write '{field}:unchanged' in fields=, or pass decode=Decoder(images='unchanged')"
        if isinstance(error, BitDepthError)
        else "repair the sample or leave it out, as a stream or a loader does with on_error='skip'"
    )
    return CodecError(
        f"{_place(field, key, url)} cannot be decoded: {describe_cause(error)}; {advice}",
        url=url,
        key=key,
        field=field,
    )


def encode(field: str, value: object, *, key: str = "", codecs: Mapping[str, Codec] | None = None) -> bytes:
    """Return the bytes to store for a field's value.

    Bytes are stored unchanged and unchecked: a JPEG under ``png``, or plain JSON under ``json.gz``, is not noticed.
    A str is stored as UTF-8, even under ``json``, where it is taken as JSON text; only a registered codec takes
    precedence over that.

    Args:
        field: Its name; the last component determines how the value is encoded.
        value: Bytes, a str, or a value that the codec accepts.
        key: The sample, for messages.
        codecs: The registered codecs; by default, those of this process.

    Raises:
        CodecError: The field cannot hold the value. The cause is chained.

    Example:
        >>> encode("cls", 7), encode("tags.json", ["a", "b"])
        (b'7', b'["a","b"]')
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    components = field.lower().split(".")
    compressed = []
    while components and components[-1] in _COMPRESSED:
        compressed.append(components.pop())
    try:
        data = _encode(components[-1] if components else "", value, _registered if codecs is None else codecs)
    except Exception as error:
        raise CodecError(
            f"{_place(field, key, '')} cannot be encoded from {type(value).__name__}: {describe_cause(error)}; "
            "give what the field holds, or its bytes",
            key=key,
            field=field,
        ) from error
    for name in reversed(compressed):
        data = compress_frame(data, _ZST_LEVEL) if name == "zst" else _gzip(data)
    return data


def _encode(component: str, value: Any, codecs: Mapping[str, Codec]) -> bytes:
    codec = codecs.get(component)
    if codec and codec.encode:
        data = codec.encode(value)
        if not isinstance(data, bytes):
            raise TypeError(f"its registered codec returned {type(data).__name__}, expected bytes")
        return data
    if isinstance(value, str):
        return value.encode()
    if component in IMAGE_FIELDS:
        return encode_image(component, value)
    builtin = _BUILTIN.get(component)
    if builtin:
        return builtin.encode(value)
    raise TypeError(f"shardkit has no codec for {component!r}; register_codec({component!r}, encode=...) makes one")


class _Builtin(NamedTuple):
    decode: Callable[[bytes, Decoder], Any]
    encode: Callable[[Any], bytes]
    light: LightKind | None = None


_IMAGES: dict[str, Callable[..., Any]] = {"rgb": decode_image, "unchanged": decode_unchanged, "pil": open_image}


class _Field(NamedTuple):
    """A field as it was requested. For an image, ``image`` is its image component, even if others follow."""

    name: str
    decoding: str
    components: tuple[str, ...]
    image: str


@lru_cache(1024)
def _parsed(field: str) -> _Field:
    name, decoding = split_decoding(field)
    components = tuple(name.lower().split("."))
    component = next((one for one in reversed(components) if one not in _COMPRESSED), "")
    return _Field(name, decoding, components, component if component in IMAGE_FIELDS else "")


def _encode_text(value: object) -> bytes:
    raise TypeError(f"expected str, got {value!r:.50}")


def _decode_int(data: bytes) -> int:
    if not _INTEGER.match(data):
        raise ValueError(f"expected a decimal integer of 64 bits, got {data[:32]!r}")
    return _bounded_int(int(data))


def _encode_int(value: Any) -> bytes:
    return b"%d" % _bounded_int(operator.index(value))


def _bounded_int(value: int) -> int:
    if not _MIN_INT <= value <= _MAX_INT:
        raise ValueError(f"{value} does not fit into 64 bits, which is what batches hold; store it as txt")
    return value


def _encode_json(value: object) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        if not (at := _find_unencodable(value)):
            raise
        raise type(error)(f"the value at {at}: {error}") from error


def _find_unencodable(value: object) -> str:
    """Return the place in a value that JSON cannot represent, such as ``['boxes'][0]``; empty if it is all of it."""
    at = ""
    for _ in range(_SHOWN_LEVELS):
        parts = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
        )
        for name, part in parts:
            try:
                json.dumps(part, allow_nan=False)
            except (TypeError, ValueError):
                at, value = f"{at}[{name!r}]", part
                break
        else:
            return at
    return f"{at}..."  # a list that contains itself has no end


def _decode_jsonl(data: bytes) -> list[Any]:
    values = []
    for number, line in enumerate(data.split(b"\n"), 1):
        try:
            if line.strip():
                values.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"line {number:,}: {error}") from error
    return values


def _encode_jsonl(value: object) -> bytes:
    if not isinstance(value, list | tuple):
        raise TypeError("expected a list or tuple, one element for each line")
    return b"".join(_encode_json(line) + b"\n" for line in value)


_TEXT = _Builtin(lambda data, _: data.decode(), _encode_text, LightKind.TEXT)
_INT = _Builtin(lambda data, _: _decode_int(data), _encode_int, LightKind.INT)
_BUILTIN = {
    **dict.fromkeys(("txt", "text", "caption", "transcript"), _TEXT),
    **dict.fromkeys(("cls", "index", "id", "count"), _INT),
    "json": _Builtin(lambda data, _: json.loads(data), _encode_json),
    "jsonl": _Builtin(lambda data, _: _decode_jsonl(data), _encode_jsonl),
    "npy": _Builtin(lambda data, decoder: decode_npy(data, decoder.max_array_bytes), encode_npy, LightKind.NPY),
    "npz": _Builtin(lambda data, decoder: decode_npz(data, decoder.max_array_bytes), encode_npz),
    "pth": _Builtin(lambda data, decoder: decode_pth(data, decoder.max_array_bytes), encode_pth),
}


def _gzip(data: bytes) -> bytes:
    writer = gzip_writer(_GZIP_LEVEL)
    return writer.compress(data) + writer.flush()


def _place(field: str, key: str, url: str) -> str:
    return ", ".join((*([f"shard {url}"] if url else []), *([f"sample {key!r}"] if key else []), f"field {field!r}"))


def describe_cause(error: BaseException) -> str:
    """Return an error as text, with its type where the message alone would be unclear, such as that of a KeyError."""
    return (
        str(error) if isinstance(error, ValueError | TypeError | ShardkitError) else f"{type(error).__name__}: {error}"
    )
