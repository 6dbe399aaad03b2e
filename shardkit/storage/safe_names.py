"""Names of files that come from a dataset: whether they stay below their intended folder, on every file system.

A dataset may come from an untrusted source. Code that turns its keys, fields or URLs into paths checks them here before
it writes anything. A name is refused if, on some file system, it could lead out of the folder or be the same file as
another name.
"""

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from shardkit.errors import StorageError
from shardkit.storage.os_errors import os_errors

_DEVICE = re.compile(r"(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[0-9¹²³]) *(?:\..*)?", re.IGNORECASE | re.DOTALL)
_MAX_PART_BYTES = 255  # of a file's or folder's name, on nearly all file systems
_MAX_PATH_BYTES = 4096  # PATH_MAX of Linux, with the NUL at its end


def find_unsafe(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the first name that cannot safely be a path below a folder, and why; None if all names can.

    A name is a relative path with ``/`` between folders. The following are refused: absolute paths; ``.`` and ``..``;
    backslashes, colons and control characters, including NUL; parts that Windows reserves for devices or changes (with
    a dot or a space at the end); names that are too long; and names that are the same file as an earlier one, or a
    folder above it, on file systems that ignore case or encode accents differently.

    Example:
        >>> find_unsafe(["a/b.jpg", "a/c.jpg"])
        >>> find_unsafe(["../b.jpg"])
        ('../b.jpg', "leads out of its folder by '..'")
        >>> find_unsafe(["a/b.jpg", "A/b.jpg"])
        ('A/b.jpg', "is the same file as 'a/b.jpg' where case does not count")
    """
    files: dict[str, str] = {}  # folded name: the given name
    folders: dict[str, str] = {}  # every folder of a file: one file in it
    for name in names:
        if problem := _problem(name):
            return name, problem
        folded = fold(name)
        above = [folded[:at] for at, char in enumerate(folded) if char == "/"]
        if folded in files:
            return name, f"is the same file as {files[folded]!r} where case does not count"
        if folded in folders:
            return name, f"is a file, and the folder of {folders[folded]!r}"
        if inside := next((folder for folder in above if folder in files), None):
            return name, f"lies in {files[inside]!r}, which is a file"
        files[folded] = name
        folders.update(dict.fromkeys(above, name))
    return None


def fold(name: str) -> str:
    """Return a form that is equal for names that some file system treats as one: without case, with composed accents.

    Example:
        >>> fold("É.TAR") == fold("e" + chr(0x301) + ".tar")
        True
    """
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def _problem(name: str) -> str:
    parts = name.split("/")
    if name.startswith("/"):
        return "is an absolute path"
    if ".." in parts:
        return "leads out of its folder by '..'"
    for part in parts:
        if part in ("", "."):
            return f"has the part {part!r}, which file systems leave out"
        if any(ord(char) < 0x20 or ord(char) == 0x7F or "\ud800" <= char <= "\udfff" for char in part):
            return "has a control character, or half of a surrogate pair"
        if "\\" in part or ":" in part:
            return "has a backslash or a colon, which lead elsewhere on Windows"
        if part[-1] in ". " or _DEVICE.fullmatch(part):
            return f"has the part {part!r}, which Windows changes or keeps for a device"
        if len(part.encode()) > _MAX_PART_BYTES:
            return f"has a part of more than {_MAX_PART_BYTES} bytes, which file systems do not take"
    return "is too long for a path" if len(name.encode()) >= _MAX_PATH_BYTES else ""


def check_no_links(folder: Path, names: Iterable[str]) -> None:
    """Check that no folder between a folder and names below it is a link, which could lead out of the folder.

    Args:
        folder: The folder that the user named, which may be a link itself.
        names: Names for which ``find_unsafe`` finds nothing.

    Raises:
        StorageError: One of these folders is a link.

    Example:
        >>> import os, tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> os.symlink("/etc", folder / "a")
        >>> check_no_links(folder, ["a/b.jpg"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        shardkit.errors.StorageError: .../a: is a link, which could lead out of ...; remove it, or name another folder
    """
    seen: set[Path] = set()
    for name in names:
        for above in reversed(Path(name).parents[:-1]):
            if above in seen:
                continue
            seen.add(above)
            with os_errors(str(folder / above)):
                if (folder / above).is_symlink():
                    raise StorageError(
                        f"{folder / above}: is a link, which could lead out of {folder}; remove it, or name another "
                        "folder",
                        url=str(folder / above),
                    )
