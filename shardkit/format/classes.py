"""Class lists: what the numbers in class fields mean, and how they change when datasets are combined.

A dataset's class list names its classes by number. Fields whose name ends in ``cls`` hold such numbers.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shardkit.codecs.registry import Decoder, encode
from shardkit.errors import CodecError, DatasetError, SampleError
from shardkit.sample import KEY, RESERVED, URL

_COMPRESSED = (".gz", ".zst")
_SHOWN = 10  # names of a long list that a message shows
_KNOWN = 65_536  # values whose translation is cached


def holds_classes(field: str) -> bool:
    """Return whether a field holds class numbers, by its name.

    Example:
        >>> holds_classes("cls"), holds_classes("label.cls"), holds_classes("cls.gz"), holds_classes("txt")
        (True, True, True, False)
    """
    while field.endswith(_COMPRESSED):
        field = field.rpartition(".")[0]
    return field.endswith("cls")


class LabelledPart(NamedTuple):
    """One of several datasets that are combined.

    Attributes:
        url: Its folder, or its shard, for messages.
        classes: Its class list; empty if it has none.
        labelled: Whether it may have fields that hold classes.
    """

    url: str
    classes: tuple[str, ...]
    labelled: bool


def join_classes(parts: Iterable[LabelledPart]) -> tuple[str, ...]:
    """Return one class list for several datasets: the first one's names, then the new names of each other in order.

    Raises:
        DatasetError: Some datasets have class names, and one without class names has class numbers, so that their
            meaning is unknown.

    Example:
        >>> join_classes([LabelledPart("a", ("cat", "dog"), True), LabelledPart("b", ("bird", "cat"), True)])
        ('cat', 'dog', 'bird')
    """
    parts = list(dict.fromkeys(parts))
    named = [part for part in parts if part.classes]
    for part in parts if named else ():
        if part.labelled and not part.classes:
            raise DatasetError(
                f"{part.url}: has no class names, and {named[0].url} has some ({show_classes(named[0].classes)}), so "
                "their class numbers may not mean the same; name them with 'shardkit index FOLDER --class "
                "NAME', once for each class in order, or leave the class field out",
                url=part.url,
            )
    first, others = (named[0].classes, named[1:]) if named else ((), [])
    known = set(first)
    return first + tuple(dict.fromkeys(name for part in others for name in part.classes if name not in known))


def longest_classes(parts: Iterable[LabelledPart]) -> tuple[str, ...]:
    """Return the longest class list, which must begin with every other list, so that no class number changes.

    Raises:
        DatasetError: A list is not the beginning of the longest one; or as ``join_classes``.
    """
    parts = [part for part in parts if part.classes or part.labelled]
    join_classes(parts)
    longest = max(parts, key=lambda part: len(part.classes), default=LabelledPart("", (), labelled=False))
    for part in parts:
        for number, (one, other) in enumerate(zip(longest.classes, part.classes, strict=False)):
            if one != other:
                raise DatasetError(
                    f"{longest.url} has the classes {show_classes(longest.classes)} and {part.url} has "
                    f"{show_classes(part.classes)}; number {number:,} would be {one!r} and {other!r}, and an index "
                    "changes no numbers. Packing them together does: shardkit.pack(shardkit.ShardSource([...]), ...), "
                    "or shardkit pack '{A,B}' DESTINATION",
                    url=part.url,
                )
    return longest.classes


def show_classes(classes: Sequence[str]) -> str:
    """Return a class list for people: the first names, and how many more there are.

    Example:
        >>> show_classes(["cat", "dog"]), show_classes([])
        ('cat, dog', 'none')
    """
    more = f" and {len(classes) - _SHOWN:,} more" if len(classes) > _SHOWN else ""
    return ", ".join(name if name.isprintable() else repr(name) for name in classes[:_SHOWN]) + more or "none"


class ClassMap:
    """Translates a dataset's class numbers into those of another class list, by the names of the classes.

    Args:
        classes: The dataset's class list.
        joined: A class list that contains all of these names.
        others: More fields that hold classes, whatever their names are.

    Example:
        >>> ClassMap(["bird", "cat"], ["cat", "dog", "bird"]).apply({"__key__": "0001", "cls": b"1", "txt": b"1"})
        {'__key__': '0001', 'cls': b'0', 'txt': b'1'}
    """

    def __init__(self, classes: Sequence[str], joined: Sequence[str], *, others: Collection[str] = ()) -> None:
        self._classes = tuple(classes)
        self._others = frozenset(others)
        numbers = {name: number for number, name in reversed(list(enumerate(joined)))}
        begins = tuple(joined[: len(classes)]) == self._classes
        self._numbers = list(range(len(classes))) if begins else [numbers[name] for name in classes]
        self._known: dict[tuple[str, bytes], bytes] = {}

    def apply(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sample with the other list's numbers; its fields are bytes.

        Raises:
            SampleError: A class field is not a number, or its number has no name in the dataset's own list.
        """
        mapped = dict(sample)
        for field, data in sample.items():
            if field not in RESERVED and data is not None and (holds_classes(field) or field in self._others):
                mapped[field] = self._translate(field, data, sample)
        return mapped

    def _translate(self, field: str, data: bytes, sample: Mapping[str, Any]) -> bytes:
        translated = self._known.get((field, data))
        if translated is None:
            number = self._number(field, data)
            if number is None:
                key, url = str(sample.get(KEY, "")), str(sample.get(URL, ""))
                raise SampleError(
                    f"{url + ': ' if url else ''}sample {key!r}: its class field {field!r} is {data[:32]!r}, expected "
                    f"a number below {len(self._classes):,}, as its dataset has the classes "
                    f"{show_classes(self._classes)}; correct it, or leave the sample out",
                    key=key,
                    url=url,
                    field=field,
                )
            new = self._numbers[number]
            translated = data if new == number else encode(_plain(field), new, codecs={})
            if len(self._known) < _KNOWN:
                self._known[field, data] = translated
        return translated

    def _number(self, field: str, data: bytes) -> int | None:
        try:
            number = Decoder(codecs={}).decode(_plain(field), data)
        except CodecError:
            return None
        return number if 0 <= number < len(self._classes) else None


def _plain(field: str) -> str:
    """Return a class field's name as the codecs know it: ``cls``, with a compression suffix if it has one."""
    stem = field
    while stem.endswith(_COMPRESSED):
        stem = stem.rpartition(".")[0]
    return "cls" + field[len(stem) :]
