"""What lies in a dataset's folder, with names in which hashes are stars."""

import re
from pathlib import Path

from shardkit.format.side_files import CARD_NAME


def files_of(folder):
    """Return all files in a folder and below it, sorted."""
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def names_in(folder):
    """Return the names of all files, sorted, with a star for each hash; without the card for HF datasets."""
    names = [path.relative_to(folder).as_posix() for path in files_of(folder) if path.name != CARD_NAME]
    return sorted(re.sub(r"(?<=[.-])[0-9a-f]{16}(?=\.)", "*", name) for name in names)


def temporary_files(folder):
    """Return what writers have left under names of their own."""
    return [path for path in files_of(folder) if path.name.startswith(".") and path.name != CARD_NAME]
