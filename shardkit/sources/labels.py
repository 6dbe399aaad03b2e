"""Tables of labels -> a label for each file."""

import csv
import json
import operator
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardkit.errors import ArgumentError, SourceError, check_path, hide_secrets
from shardkit.storage.base import is_remote
from shardkit.storage.os_errors import check_is_file, os_errors

_TOO_MANY = 10  # from this many images on, labels that all differ are taken for captions
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?|nan|NaN")


def find_labels(
    paths: Sequence[str], keys: Sequence[str], labels: Mapping[str, Any], folder: str | os.PathLike[str]
) -> list[int | str]:
    """Return the label of each file: a class number or a class name.

    Args:
        paths: The files, below the folder.
        keys: Their samples' keys.
        labels: Labels by path or key. Those of other files are ignored.
        folder: The folder, for messages.

    Raises:
        SourceError: A file has no label, two different ones, or one that is neither a whole number nor text. Or the
            labels of many files are names that all differ, like captions.

    Example:
        >>> find_labels(["a.jpg", "b.jpg"], ["a", "b"], {"a.jpg": 1, "b": 0}, "photos")
        [1, 0]
    """
    found = [_find_label(path, key, labels, folder) for path, key in zip(paths, keys, strict=True)]
    if len(found) >= _TOO_MANY and len({label for label in found if isinstance(label, str)}) == len(found):
        raise SourceError(
            f"{os.fspath(folder)}: each of {len(found):,} images has a label of its own ({paths[0]}: {found[0]!r}), so "
            "these are not classes; captions are fields: FileFolder takes 0001.txt beside 0001.jpg, and pack() takes "
            "samples from a generator"
        )
    return found


def _find_label(path: str, key: str, labels: Mapping[str, Any], folder: str | os.PathLike[str]) -> int | str:
    given: list[Any] = [labels[name] for name in (path, key) if name in labels]
    label: Any = given[0] if given else None
    if given[1:] and given[1] != label:
        raise SourceError(
            f"{os.fspath(folder)}: {path} has the label {label!r} by its path and {given[1]!r} by its key {key!r}; "
            "leave one of them out"
        )
    if isinstance(label, bool) or not (isinstance(label, str) or hasattr(label, "__index__")):
        problem = "has no label" if label is None else f"has the label {label!r}, expected a number or a name"
        if label is None and any(value in (path, key) for value in labels.values() if isinstance(value, str)):
            problem += ", and is itself a label in the table: its columns are the other way round"
        raise SourceError(f"{os.fspath(folder)}: {path} {problem}; label it by its path or its key {key!r}")
    return label if isinstance(label, str) else operator.index(label)


def number_labels(
    paths: Sequence[str],
    labels: Sequence[int | str],
    classes: tuple[str, ...] | None,
    folder: str | os.PathLike[str],
) -> tuple[tuple[str, ...], list[int]]:
    """Return the names of the classes, and the class number of each file.

    Args:
        paths: The files, below the folder.
        labels: Their labels: class numbers, or names.
        classes: The names of the classes, by number; None for the names that occur, sorted.
        folder: The folder, for messages.

    Raises:
        SourceError: Labels are partly numbers and partly names, or one is not in ``classes``.

    Example:
        >>> number_labels(["a.jpg", "b.jpg"], ["dog", "cat"], None, "photos")
        (('cat', 'dog'), [1, 0])
    """
    found = {label for label in labels if isinstance(label, str)}
    if found and any(isinstance(label, int) for label in labels):
        raise SourceError(f"{os.fspath(folder)}: labels are partly numbers, partly names; write them all in one way")
    names = tuple(sorted(found)) if classes is None else classes
    numbers = {name: number for number, name in reversed(list(enumerate(names)))}
    if classes is not None:
        for path, label in zip(paths, labels, strict=True):
            if label not in (numbers if found else range(len(classes))):
                raise SourceError(
                    f"{os.fspath(folder)}: {path} has the label {label!r}, which is none of the {len(classes):,} "
                    "classes; add it to them, or correct it"
                )
    return names, [numbers[label] if isinstance(label, str) else label for label in labels]


def read_labels(labels: Mapping[str, int | str] | str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return a table of labels, read from a file if ``labels`` is the name of one.

    A CSV file has a header line that names a column ``path`` or ``key`` and a column ``label``, in any order, and
    perhaps others; if all labels are whole numbers, they are read as numbers. A JSON file has an object that maps path
    or key to label.

    Raises:
        ArgumentError: ``labels`` is neither a mapping nor the name of a CSV or JSON file.
        SourceError: The file is not valid CSV or JSON, lacks the columns, or has a path twice.
        StorageError: The file cannot be read.
    """
    if isinstance(labels, Mapping):
        return labels
    if not isinstance(labels, str | os.PathLike):
        raise ArgumentError(
            f"labels is {type(labels).__name__}, expected a mapping of path or key to label, or the name of a .csv or "
            ".json file; of a table, dict(zip(table['path'], table['label'])) makes a mapping"
        )
    if is_remote(url := check_path("labels", labels)):
        raise SourceError(f"{hide_secrets(url)}: labels are read from this machine only; copy the file")
    path = Path(url)
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
    for name, label in data.items():
        if isinstance(label, bool) or not isinstance(label, int | str):
            raise SourceError(
                f"{path}: {name!r} is {json.dumps(label)[:50]}, expected a whole number or a name; write an object of "
                "path and label"
            )
    return data


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict from a JSON object, and refuse repeated names: Python would keep the last value."""
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"{name!r} is in it twice")
        table[name] = value
    return table


def _read_csv(path: Path) -> Mapping[str, int | str]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            rows = [(reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"{path}: is not a CSV file in UTF-8 ({error}); save it as one") from error
    header = [name.strip().lower() for name in rows[0][1]] if rows else []
    names = [number for number, name in enumerate(header) if name in ("path", "key")]
    if len(names) != 1 or header.count("label") != 1:
        first = ",".join(rows[0][1]) if rows else ""
        raise SourceError(
            f"{path}: its first line is {first[:80]!r}, expected a header that names one column path (or key) and one "
            "label, such as path,label; rename those columns, or add the line"
        )
    table: dict[str, str] = {}
    for line, row in rows[1:]:
        label = row[header.index("label")].strip() if len(row) == len(header) else ""
        if not label or row[names[0]] in table:
            raise SourceError(
                f"{path}: line {line}: expected a path not named before and its label, in the {len(header)} columns "
                f"{','.join(header)}, got {row!r}; put quotes around values that contain a comma"
            )
        table[row[names[0]]] = label
    return _whole_numbers(path, table) or table


def _whole_numbers(path: Path, table: Mapping[str, str]) -> dict[str, int | str] | None:
    """Return the labels as numbers if all are whole numbers, and None if none is a number."""
    numbers: dict[str, int | str] = {name: int(label) for name, label in table.items() if _WHOLE.fullmatch(label)}
    if len(numbers) == len(table):
        if len(set(numbers.values())) < len(set(table.values())):
            raise SourceError(
                f"{path}: some labels are the same number, written in two ways, as 7 and 07; write each in one way"
            )
        return numbers
    for name, label in table.items():  # as class names, numbers would be numbered anew
        if _NUMBER.fullmatch(label):
            raise SourceError(
                f"{path}: the label of {name} is {label!r}, and not all labels are whole numbers; write them "
                "all as whole numbers, or all as names"
            )
    return None
