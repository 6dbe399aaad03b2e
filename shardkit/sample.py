"""A sample: one training example, with a key and fields; and the rules that map these to the names of tar members.

The grouping and naming rules are those of webdataset, with two named deviations: members whose base name starts with
a dot, and members below a folder of the form ``__x__``, are skipped in every folder and not only at the top.
"""

import dataclasses
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from shardkit.errors import ArgumentError, SampleError

Sample: TypeAlias = dict[str, Any]

KEY = "__key__"
URL = "__url__"
SOURCE = "__source__"
COLUMNS = "__columns__"
RESERVED = frozenset({KEY, URL, SOURCE, COLUMNS})
"""Entries of a sample that are not fields: its key, the shard it was read from, the file it was made from; and, until
it is decoded, its values of the index's columns."""

DECODINGS = ("rgb", "unchanged", "bytes", "pil")
"""The ways to decode a field, written after its name and a colon: ``depth.png:unchanged``; see ``FieldSelection``."""

MAX_KNOWN = 1024  # fields that are cached; a shard of unknown origin may have a different field in every sample
MAX_KEY_BYTES = 4096  # the longest path that Linux accepts (PATH_MAX), so that every shard can be unpacked

PLAIN_KEY = re.compile(r"(?:[A-Za-z0-9-][A-Za-z0-9_-]*/)*[A-Za-z0-9-][A-Za-z0-9_-]*")
"""Matches most keys, all of which are valid: a quick test before the full one."""

_SKIPPED = re.compile(r"(?:\A|/)__[^/]*__(?:/|\Z)")
_FIELD = re.compile(r"[^_.\s;?:/][^.\s;?:/]*(?:\.[^.\s;?:/]+)*\Z")


def split_name(name: str) -> tuple[str, str] | None:
    """Return a member's key and field, or None if the rules skip the member.

    The key ends at the first dot of the base name; folders are part of it. The field is lower-cased. The rules skip
    base names without a dot or with a leading dot, names like ``__x__``, and everything in folders with such names.

    Example:
        >>> split_name("train/0001.seg.PNG")
        ('train/0001', 'seg.png')
        >>> split_name("train/._0001.png") is None
        True
    """
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    if dot <= base or ("__" in name and _SKIPPED.search(name)):
        return None
    return name[:dot], name[dot + 1 :].lower()


def split_new_name(name: str, key: str, rest: str, known: dict[str, str]) -> tuple[str, str] | None:
    """Return ``split_name(name)``, and store the field in ``known`` under ``rest`` if ``rest`` alone decides it.

    This is for loops over many members, which split names at the first dot and look up ``known`` before they apply the
    rules. A field found there is right if ``key`` is not empty, does not end with a slash, and has no ``__``.

    Args:
        name: The member's name.
        key: The part before its first dot.
        rest: The part after its first dot.
        known: Fields by the part after the first dot; most samples share a few.

    Example:
        >>> known = {}
        >>> split_new_name("0001.seg.PNG", "0001", "seg.PNG", known), known
        (('0001', 'seg.png'), {'seg.PNG': 'seg.png'})
    """
    split = split_name(name)
    if split is not None and split[0] == key and rest and "__" not in rest and len(known) < MAX_KNOWN:
        known[rest] = split[1]
    return split


def check_key(key: object) -> str:
    """Return ``key`` if every reader gives it back unchanged.

    Raises:
        SampleError: The key is not text, is empty or too long, has a dot in its last part (where a reader would begin
            the field), is a name or lies in a folder that readers skip, or has parts that file systems or terminals
            change.

    Example:
        >>> check_key("v1.5/0001")
        'v1.5/0001'
    """
    if not isinstance(key, str):
        raise SampleError(
            f"key {key!r}: is {type(key).__name__}, expected text; convert it, for example with f'{{i:08d}}'"
        )
    if len(key) <= MAX_KEY_BYTES and PLAIN_KEY.fullmatch(key):
        return key
    parts = key.split("/")
    problem = ""
    if not key:
        problem = "is empty"
    elif _has_control(key):
        problem = "has control or unpaired surrogate characters"
    elif "." in parts[-1]:
        problem = "has a dot in its last part, where readers end the key"
    elif not all(parts):
        problem = "has an empty part (a slash at an end, or two together)"
    elif "." in parts or ".." in parts:
        problem = "has a part '.' or '..', which file systems resolve"
    elif parts[-1].startswith("__") or any(p.startswith("__") and p.endswith("__") and len(p) >= 4 for p in parts):
        problem = "has a part like __x__, which readers skip"
    elif len(key.encode()) > MAX_KEY_BYTES:
        problem = f"is longer than {MAX_KEY_BYTES:,} bytes"
    if problem:
        raise SampleError(f"key {key!r}: {problem}; rename it, for example {suggest_key(key)!r}", key=key)
    return key


def suggest_key(name: str) -> str:
    """Return a valid key that resembles ``name``. Different names may give the same key.

    Example:
        >>> suggest_key("img_1.5")
        'img_1_5'
    """
    printable = "".join("_" if _has_control(c) else c for c in name)
    parts = [part for part in printable.split("/") if part not in ("", ".", "..")]
    parts = [part.strip("_") or "_" if part.startswith("__") else part for part in parts] or ["_"]
    parts[-1] = parts[-1].replace(".", "_")
    return "/".join(parts)[: MAX_KEY_BYTES // 4]


def check_fields(key: str, fields: Iterable[object]) -> None:
    """Check that every reader gives all fields of a sample back unchanged.

    Raises:
        SampleError: There is no field; or a field is not text, is empty, starts with ``_``, is not lower case
            (readers lower-case it, so that fields that differ only in case collide), has empty components, white
            space, or one of ``/ ; ? :``.

    Example:
        >>> check_fields("0001", ["jpg", "seg.png"])
    """
    empty = True
    for field in fields:
        empty = False
        if isinstance(field, str) and field.isascii() and field.isalnum() and field.islower():
            continue
        problem = ""
        if not isinstance(field, str):
            problem = f"is {type(field).__name__}, expected text"
        elif field.startswith("_"):
            problem = "starts with '_', which is reserved for entries that readers add"
        elif field != field.lower():
            problem = f"is not lower case; readers would rename it to {field.lower()!r}"
        elif not _FIELD.match(field) or _has_control(field):
            problem = "must be dot-separated components without white space, control characters or any of / ; ? :"
        if problem:
            raise SampleError(f"sample {key!r}: field {field!r} {problem}", key=key, field=str(field))
    if empty:
        raise SampleError(
            f"sample {key!r}: has no fields; a tar cannot hold it. Give it at least one, or leave it out", key=key
        )


def fields_of(sample: Mapping[str, Any]) -> list[str]:
    """Return the names of a sample's fields, sorted: everything but ``__key__``, ``__url__`` and ``__source__``.

    Example:
        >>> fields_of({"__key__": "a", "txt": b"", "jpg": b""})
        ['jpg', 'txt']
    """
    return sorted((name for name in sample if name not in (KEY, URL, SOURCE)), key=str)


def split_decoding(text: str) -> tuple[str, str]:
    """Return the field that a text names, and how to decode it, which is empty if the text does not specify it.

    Raises:
        ArgumentError: There is no such way to decode it.

    Example:
        >>> split_decoding("depth.png:unchanged"), split_decoding("jpg")
        (('depth.png', 'unchanged'), ('jpg', ''))
    """
    name, colon, decoding = text.partition(":")
    decoding = decoding.strip().lower()
    if colon and decoding not in DECODINGS:
        raise ArgumentError(
            f"field {text!r}: {decoding!r} is not a way to decode it, expected {', '.join(DECODINGS[:-1])} or "
            f"{DECODINGS[-1]}; write for example '{name.strip()}:unchanged'"
        )
    return name.strip(), decoding


def stored_field(text: str) -> str:
    """Return the field that a text names, for callers that decode nothing and take the bytes as they are stored.

    Raises:
        ArgumentError: The text says how to decode the field.

    Example:
        >>> stored_field("depth.png:unchanged")
        'depth.png'
    """
    name, decoding = split_decoding(text)
    if decoding not in ("", "unchanged", "bytes"):
        raise ArgumentError(
            f"field {text!r}: nothing is decoded here, fields stay as they are stored; leave out ':{decoding}', and "
            "use it when samples are read"
        )
    return name


def _has_control(text: str) -> bool:
    return not (text.isascii() and text.isprintable()) and any(unicodedata.category(c) in ("Cc", "Cs") for c in text)


def _named_specs(fields: Sequence[str] | Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the names that a ``fields`` argument has in the result, and the text that selects a field for each.

    Raises:
        ArgumentError: It is neither a sequence nor a mapping of text.
    """
    if isinstance(fields, str):
        raise ArgumentError(f'fields must be a sequence or a mapping, got the text {fields!r}; write ("{fields}",)')
    if not isinstance(fields, Iterable):
        raise ArgumentError(f"fields must be a sequence or a mapping of text, got {fields!r}")
    items = list(fields.items() if isinstance(fields, Mapping) else ((spec, spec) for spec in fields))
    for name, spec in items:
        if not isinstance(name, str) or not isinstance(spec, str):
            raise ArgumentError(f"fields must be a sequence or a mapping of text, got {spec!r} for {name!r}")
    if isinstance(fields, Mapping):
        return items
    return [(re.split("[;:?]", spec, maxsplit=1)[0].strip(), spec) for _, spec in items]


@dataclasses.dataclass(frozen=True, slots=True)
class FieldSelection:
    """The fields of a sample that are wanted, their names in the result, and how they are decoded.

    A ``fields`` argument names fields, ``("jpg", "cls")``, or gives them new names, ``{"image": "jpg;png", "label":
    "cls"}``. Each field is written as

    ::

        alternative ; alternative ; ... ?      the first that a sample has; with "?" None if it has none of them
        field : decoding                       an alternative; without ":" its name decides how it is decoded

    A decoding is one of

    ::

        rgb        an image as uint8, (height, width, 3); more than 8 bits are an error. The default for images
        unchanged  an image as it is stored: grey and palette numbers (height, width), alpha as another channel,
                   16 bits as uint16
        pil        an image as a PIL image
        bytes      any field as its bytes

    For example ``{"image": "jpg;png", "depth": "depth.png:unchanged", "mask": "seg.png:unchanged?"}``.

    Attributes:
        wanted: For each name in the result, its alternative fields, of which the first that is present is taken. If it
            is empty, every field is taken under its own name.
        optional: The names that may be missing; their value is then None.
        decodings: The decodings that the argument names, by the field's name in the result and its own name.

    Example:
        >>> selection = FieldSelection.parse({"image": "jpg;png", "caption": "txt?"})
        >>> selection.pick({"__key__": "a", "png": b"...", "cls": b"1"})
        {'__key__': 'a', 'image': b'...', 'caption': None}
    """

    wanted: dict[str, tuple[str, ...]]
    optional: frozenset[str]
    # This does not change packed bytes, so it is not in the repr, from which a source's fingerprint is made.
    decodings: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, fields: Sequence[str] | Mapping[str, str] | None) -> "FieldSelection":
        """Return the selection that a ``fields`` argument means.

        Args:
            fields: None for everything, or as above.

        Raises:
            ArgumentError: It is not valid.
        """
        if fields is None:
            return cls({}, frozenset())
        items = _named_specs(fields)
        selection = cls({}, frozenset(name for name, spec in items if spec.rstrip().endswith("?")))
        for name, spec in items:
            alternatives = [split_decoding(part) for part in spec.rstrip().removesuffix("?").split(";")]
            names = tuple(field.lower() for field, _ in alternatives)
            if not all(names) or not RESERVED.isdisjoint((name, *names)) or name in selection.wanted:
                raise ArgumentError(f"fields: {name!r} from {spec!r} is empty, reserved or named twice")
            if any("?" in field for field in names):
                raise ArgumentError(f"fields: {name!r} from {spec!r} has a '?' that is not at its end; write 'a;b?'")
            selection.wanted[name] = names
            selection.decodings.update(
                {(name, field.lower()): decoding for field, decoding in reversed(alternatives) if decoding}
            )
        if not selection.wanted:
            raise ArgumentError("fields is empty; leave it out to take every field")
        return selection

    def wants(self, field: str) -> bool:
        """Return whether a field is needed."""
        return not self.wanted or any(field in alternatives for alternatives in self.wanted.values())

    def with_decoding(self, name: str, field: str) -> str:
        """Return a field with the decoding that the selection has for it under a name: ``depth.png:unchanged``.

        Without a decoding it is only the field's name.

        Example:
            >>> FieldSelection.parse({"depth": "depth.png:unchanged"}).with_decoding("depth", "depth.png")
            'depth.png:unchanged'
        """
        decoding = self.decodings.get((name, field))
        return f"{field}:{decoding}" if decoding else field

    def pick(self, sample: Sample) -> Sample:
        """Return a new sample with the wanted fields under their new names; entries that are not fields are kept.

        Raises:
            SampleError: A field is missing and not optional.
        """
        if not self.wanted:
            return sample
        picked = {name: sample[name] for name in sample if name in RESERVED}
        for name, field in self.choose(sample).items():
            picked[name] = None if field is None else sample[field]
        return picked

    def choose(self, sample: Mapping[str, Any]) -> dict[str, str | None]:
        """Return for each wanted name the sample's field that it is taken from; None if it is optional and missing.

        Raises:
            SampleError: A field is missing and not optional.
        """
        chosen: dict[str, str | None] = {}
        for name, alternatives in self.wanted.items():
            for field in alternatives:
                if field in sample:
                    chosen[name] = field
                    break
            else:
                if name not in self.optional:
                    raise self._missing(sample, name, alternatives)
                chosen[name] = None
        return chosen

    def _missing(self, sample: Mapping[str, Any], name: str, alternatives: tuple[str, ...]) -> SampleError:
        spec = ";".join(self.with_decoding(name, field) for field in alternatives)
        key, url = str(sample.get(KEY, "")), str(sample.get(URL, ""))
        return SampleError(
            f"{url + ': ' if url else ''}sample {key!r}: has no field {' or '.join(alternatives)} (it has "
            f"{', '.join(fields_of(sample)) or 'none of the requested fields'}); write {spec + '?'!r} "
            "to get None instead",
            key=key,
            url=url,
            field=name,
        )
