"""Names of files -> keys and fields.

A key is the path below the folder without its extension, with ``/`` between folders. Characters that a key cannot
contain are written as ``%XX``, the hexadecimal bytes of their UTF-8: dots in the last part, ``%`` itself, control
characters, and leading underscores of parts that readers would skip. So different stems have different keys, and a
key depends only on its file's name: other files never change it, nor the split that it decides.
"""

from collections.abc import Sequence

from shardkit.codecs.images import IMAGE_EXTENSIONS
from shardkit.errors import SampleError, SourceError
from shardkit.sample import PLAIN_KEY, check_fields, check_key


def split_extension(path: str) -> tuple[str, str]:
    """Return a path without its extension, and the extension in lower case with its dot.

    Example:
        >>> split_extension("v1.5/0001.JPEG")
        ('v1.5/0001', '.jpeg')
    """
    dot = path.rfind(".", path.rfind("/") + 2)
    return (path, "") if dot < 0 else (path[:dot], path[dot:].lower())


def escape_key(stem: str) -> str:
    """Return a key for a path without extension. The mapping is one to one, and keeps valid keys without ``%``."""
    if PLAIN_KEY.fullmatch(stem):
        return stem
    parts = stem.split("/")
    parts[-1] = "".join(f"%{ord('.'):X}" if c == "." else c for c in _escape_part(parts[-1]))
    return "/".join([*(_escape_part(part) for part in parts[:-1]), parts[-1]])


def _escape_part(part: str) -> str:
    if part.startswith("__"):
        part, prefix = part[1:], "%5F"
    else:
        prefix = ""
    escaped = (
        c
        if c != "%" and (c.isprintable() or ord(c) > 0x9F) and not 0xD800 <= ord(c) <= 0xDFFF
        else "".join(f"%{b:02X}" for b in c.encode("utf-8", "surrogateescape"))
        for c in part
    )
    return prefix + "".join(escaped)


def check_names(key: str, fields: Sequence[str], path: str) -> None:
    """Check that the key and the fields made from a file's name can be written. Raises SourceError."""
    try:
        check_key(key)
        check_fields(key, fields)
    except SampleError as error:
        raise SourceError(f"{path}: cannot be packed under this name ({error})") from error


def plain_field(field: str) -> str:
    """Return a field in lower case, with one name for each kind of image.

    Example:
        >>> plain_field("JPEG"), plain_field("seg.tiff"), plain_field("txt")
        ('jpg', 'seg.tif', 'txt')
    """
    stem, dot, last = field.lower().rpartition(".")
    return stem + dot + IMAGE_EXTENSIONS.get(f".{last}", last)


def split_file(path: str, endings: Sequence[str] | None) -> tuple[str, str] | None:
    """Split a file's path into the part for the key and the field; return None if it has none of ``endings``.

    Args:
        path: The path below the folder.
        endings: The endings that are fields, as ``plain_field`` returns them, longest first; None for any extension.

    Raises:
        SourceError: There is no extension, or it is not clear where the key ends.

    Example:
        >>> split_file("0001.seg.PNG", ["seg.png", "png"]), split_file("0001.JPEG", None)
        (('0001', 'seg.png'), ('0001', 'jpg'))
    """
    parent, _, name = path.rpartition("/")
    prefix = f"{parent}/" if parent else ""
    if endings is not None:
        for ending in endings:
            begin, *end = name.rsplit(".", ending.count(".") + 1)
            if begin and plain_field(".".join(end)) == ending:
                return prefix + begin, ending
        return None
    stem, dot, extension = name.partition(".")
    if not dot or not extension:
        raise SourceError(
            f"{path}: has no extension, so it has no field; rename it, or say which endings are fields: "
            'fields=("jpg", "txt")'
        )
    if "." in extension:
        raise SourceError(
            f"{path}: has several dots, so it is not clear where its key ends; say which endings are fields, "
            f'for example fields=("{extension.lower()}",) or fields=("{extension.rpartition(".")[2].lower()}",)'
        )
    return prefix + stem, plain_field(extension)
