"""Tables of labels -> a label for each file."""

import csv
import json
import operator
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardkit.errors import ArgumentError, SourceError, check_path
from shardkit.storage.os_errors import check_is_file, os_errors

_WHOLE = re.compile(r"-?[0-9]{1,18}")
_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?|nan|NaN")


def find_labels(
    paths: Sequence[str], keys: Sequence[str], labels: Mapping[str, Any], folder: str | os.PathLike[str]
) -> list[int | str]:
    """Return the label of each file: a class number, or a class's name.

    Args:
        paths: The files, below the folder.
        keys: Their samples' keys.
        labels: Labels by path or key. Those of other files are left alone.
        folder: The folder, for messages.

    Raises:
        SourceError: A file has no label, two different ones, or one that is neither a whole number nor text.

    Example:
        >>> find_labels(["a.jpg", "b.jpg"], ["a", "b"], {"a.jpg": 1, "b": 0}, "photos")
        [1, 0]
    """
    found: list[int | str] = []
    for path, key in zip(paths, keys, strict=True):
        given: list[Any] = [labels[name] for name in (path, key) if name in labels]
        label: Any = given[0] if given else None
        if given[1:] and given[1] != label:
            raise SourceError(
                f"{os.fspath(folder)}: {path} has the label {label!r} by its path and {given[1]!r} by its key {key!r}; "
                "leave one of them out"
            )
        if isinstance(label, bool) or not (isinstance(label, str) or hasattr(label, "__index__")):
            problem = "has no label" if label is None else f"has the label {label!r}, expected a number or a name"
            raise SourceError(f"{os.fspath(folder)}: {path} {problem}; label it by its path or its key {key!r}")
        found.append(label if isinstance(label, str) else operator.index(label))
    return found


def read_labels(labels: Mapping[str, int | str] | str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return a table of labels, read from a file if it is one's name.

    A CSV file has a header line and the columns path and label; if all labels are whole numbers, they are numbers. A
    JSON file has an object.

    Raises:
        ArgumentError: It is neither a mapping nor the name of a CSV or JSON file.
        SourceError: The file cannot be read as what its name says, or has a path twice.
        StorageError: It cannot be read.
    """
    if isinstance(labels, Mapping):
        return labels
    path = Path(check_path("labels", labels))
    read = {".json": _read_json, ".csv": _read_csv}.get(path.suffix.lower())
    if read is not None:
        with os_errors(os.fspath(path)):
            check_is_file(path.stat(), os.fspath(path))
            return read(path)
    raise ArgumentError(f"labels {os.fspath(path)!r}: expected a mapping, a .csv or a .json file")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8-sig"), object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: cannot be read as JSON ({error}); write an object of path and label") from error
    if not isinstance(data, dict):
        raise SourceError(f"{path}: holds a {type(data).__name__}, expected an object of path and label")
    return data


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON; Python would let the last of equal names win."""
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"{name!r} is in it twice")
        table[name] = value
    return table


def _read_csv(path: Path) -> Mapping[str, int | str]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"{path}: is no CSV in UTF-8 ({error}); save it as that") from error
    table: dict[str, str] = {}
    for number, row in enumerate(rows[1:], start=2):
        label = row[1].strip() if len(row) > 1 else ""
        if not label or row[0] in table:
            raise SourceError(f"{path}: line {number}: expected a path not named before and its label, got {row!r}")
        table[row[0]] = label
    numbers = {name: int(label) for name, label in table.items() if _WHOLE.fullmatch(label)}
    if len(numbers) == len(table):
        return numbers
    for name, label in table.items():  # as names they would be numbered anew, in another order
        if _NUMBER.fullmatch(label):
            raise SourceError(
                f"{path}: the label of {name} is {label!r}, and not all labels are whole numbers; write them "
                "all as whole numbers, or all as names"
            )
    return table
