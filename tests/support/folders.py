"""The files in a dataset's folder, by names with stars in place of hashes."""

import re
from pathlib import Path

from shardkit.format.side_files import CARD_NAME


def files_of(folder):
    """Return all files in a folder and below it, sorted."""
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def contents_of(folder):
    """Return the bytes of every file in a folder and below it, including hidden ones, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in files_of(folder)}


def names_in(folder):
    """Return the names of all files, sorted, with a star for each hash; without the card for HF datasets."""
    names = [path.relative_to(folder).as_posix() for path in files_of(folder) if path.name != CARD_NAME]
    return sorted(re.sub(r"(?<=[.-])[0-9a-f]{16}(?=\.)", "*", name) for name in names)


def temporary_files(folder):
    """Return the temporary files that writers have left."""
    return [path for path in files_of(folder) if path.name.startswith(".") and path.name != CARD_NAME]
