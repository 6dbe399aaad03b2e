"""Check, before anything is packed, that the names in a folder mean what they seem to mean.

Keys, fields and classes are made from names. Folders of splits, folders whose files belong together, and files that
are not samples are refused; the error names two of the files and says what to do.
"""

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from shardkit.codecs.images import IMAGE_EXTENSIONS
from shardkit.errors import SourceError
from shardkit.sources.filenames import plain_field

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SPLITS = {
    "train": {"train", "training", "trainset"},
    "val": {"val", "valid", "validation", "valset"},
    "test": {"test", "testing", "testset"},
    "dev": {"dev", "devset"},
    "eval": {"eval", "evaluation"},
}
_SPLIT_OF = {word: split for split, words in _SPLITS.items() for word in words}
_FILLERS = {"images", "image", "imgs", "img", "data", "set", "split"}  # as in train_images

# Words in the names of folders of images, and of folders whose files belong to images.
_IMAGES = {"images", "imgs", "img", "rgb"}
_PERHAPS_IMAGES = {"image", "photos", "pictures", "frames", "inputs", "input", "color", "colour"}
_TARGETS = {
    *["masks", "mask", "labels", "label", "annotations", "annotation", "annots", "anns", "ann", "gt", "groundtruth"],
    *["truth", "segmentations", "segmentation", "segs", "seg", "targets", "target", "depths", "depth", "disparity"],
    *["normals", "bboxes", "bbox", "boxes", "captions", "caption", "texts", "xmls", "xml", "json", "trimaps", "mattes"],
    *["instances", "instance", "semantic", "panoptic", "flow", "flows", "keypoints", "landmarks", "saliency", "matte"],
    *["trimap", "alpha", "alphas", "disparities", "thermal", "infrared", "nir", "lidar", "xml"],
}
_ALIKE = 3  # two folders that have at least this many stems in common belong together

_MEDIA = {
    **dict.fromkeys(IMAGE_EXTENSIONS.values(), "image"),
    **dict.fromkeys(("wav", "flac", "mp3", "ogg", "opus", "m4a"), "recording"),
    **dict.fromkeys(("mp4", "mkv", "webm", "avi", "mov"), "film"),
}


def split_of(name: str) -> str | None:
    """Return the split that a folder's name stands for, or None if it is not the name of a split.

    Example:
        >>> [split_of(name) for name in ("train", "Validation", "test_images", "val2017", "trainA", "trains", "cat")]
        ['train', 'val', 'test', 'val', 'train', None, None]
    """
    words = [word for word in _words(name) if word not in _FILLERS]
    first, rest = words[:1], words[1:]
    numbered = not rest or (len(rest) == 1 and (rest[0].isdigit() or len(rest[0]) == 1))
    return _SPLIT_OF.get(first[0]) if first and numbered else None


def check_class_folders(folder: str, paths: Sequence[str]) -> None:
    """Check that the folders at the top are classes.

    Args:
        folder: The folder, for messages.
        paths: The images below it.

    Raises:
        SourceError: They are splits, or their files belong together, or one is named like a folder of all images.
    """
    siblings = _siblings(paths)
    check_parallel(folder, paths)
    check_splits(folder, paths, classes=True)
    for name, example in siblings[""].items():
        if "".join(_words(name)) in ("images", "imgs", "img", "jpegimages"):
            raise SourceError(
                f"{folder}: {name} is a name for a folder of images and not for a class ({example}); pack "
                f"{_quoted(folder, name)} itself, or name the classes: classes= (--class)"
            )


def check_splits(folder: str, paths: Iterable[str], *, classes: bool) -> None:
    """Check that no folders are splits, like ``train`` and ``val``, which should be separate datasets.

    Args:
        folder: The folder, for messages.
        paths: The files below it.
        classes: Whether the folders at the top would be classes. If so, a single split is refused too, unless it has
            nothing in common with the folders beside it: ``train`` may also be a class of vehicles.

    Raises:
        SourceError: Some folders are splits.
    """
    siblings = _siblings(paths)
    for parent, names in siblings.items():
        splits = [name for name in names if split_of(name)]
        if not splits:
            continue
        several = len({split_of(name) for name in splits}) > 1
        inner = {name: set(siblings.get(f"{parent}{name}/", ())) for name in names}
        shared = any(
            inner[name] & ((inner.keys() | inner[other]) - {name})
            for name in splits
            for other in names
            if other != name
        )
        if several or (classes and not parent and (len(splits) == len(names) or shared)):
            found, examples = ", ".join(parent + name for name in splits), ", ".join(names[name] for name in splits)
            commands = (f"'shardkit pack {_quoted(folder, parent + name)} SHARDS/{name}'" for name in splits)
            otherwise = "name the classes: classes= (--class)" if classes else "say which endings are fields="
            raise SourceError(
                f"{folder}: {found} {'are splits' if splits[1:] else 'is a split'} by name ({examples}); pack each as "
                f"a dataset of its own: {' and '.join(commands)}{_classes_differ(splits, inner)}. If that is not what "
                f"they are, {otherwise}"
            )


def _classes_differ(splits: Sequence[str], inner: Mapping[str, set[str]]) -> str:
    """Return advice if a split lacks classes, so that its classes would get other numbers; otherwise an empty text."""
    everything = set().union(*(inner[name] for name in splits))
    for name in splits:
        if inner[name] and everything - inner[name]:
            lacking = ", ".join(sorted(everything - inner[name])[:3])
            return f"; {name} has no {lacking}, so give each the same --class options (classes=)"
    return ""


def check_parallel(folder: str, paths: Iterable[str]) -> None:
    """Check that no folders lie side by side whose files belong together, like ``images`` and ``masks``.

    They are recognised by their names; or by their contents, if one has images and the other has something else under
    the same names.

    Raises:
        SourceError: There are such folders.
    """
    stems, media = _contents(paths)
    for parent, names in _siblings(paths).items():
        stems_of = {name: stems[f"{parent}{name}/"] for name in names}
        media_of = {name: media[f"{parent}{name}/"] for name in names}
        found = _parallel_by_name(stems_of) or _parallel_by_content(stems_of, media_of)
        if found:
            one, other = (names[name] for name in found)
            raise SourceError(
                f"{folder}: {one} and {other} lie in folders side by side whose files belong together, and would be "
                "separate samples; pack one of the folders alone, or put the files of a sample into one folder, as "
                '0001.jpg and 0001.mask.png, for FileFolder(folder, fields=("jpg", "mask.png")), or give pack() '
                "samples from a generator"
            )


def _parallel_by_name(stems: Mapping[str, set[str]]) -> tuple[str, str] | None:
    """Return two sibling folders whose names say that their files belong together; None if there are none.

    Args:
        stems: For each of the siblings, the stems of its files.
    """
    words = {name: set(_words(name)) for name in stems}
    targets = [name for name in stems if words[name] & _TARGETS]
    images = [name for name in stems if name not in targets and words[name] & (_IMAGES | _PERHAPS_IMAGES)]
    for one, other in product(images, targets):
        if stems[one] & stems[other] or words[one] & _IMAGES or len(stems) == 2:
            return one, other
    return None


def _parallel_by_content(stems: Mapping[str, set[str]], media: Mapping[str, set[str]]) -> tuple[str, str] | None:
    """Return two sibling folders, one with images and one with something else under the same names, or None.

    Args:
        stems: For each of the siblings, the stems of its files.
        media: For each of the siblings, the media of its files: images, recordings, ...
    """
    for medium in dict.fromkeys(_MEDIA.values()):
        having = [name for name in stems if medium in media[name]]
        lacking = [name for name in stems if medium not in media[name]]
        for one, other in product(having, lacking):
            few, many = sorted((stems[one], stems[other]), key=len)
            if len(few) >= _ALIKE and few <= many:
                return one, other
    return None


def check_alike(folder: str, samples: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Check that no file would be a separate sample among samples that have nothing in common with it.

    If most samples have an image, a sample without one is probably a table of labels or captions, or a file whose
    image was lost. The same applies to sound and film.

    Args:
        folder: The folder, for messages.
        samples: For each sample, one of its files, and its fields.

    Raises:
        SourceError: There is such a file.
    """
    having: dict[str, list[str]] = {medium: [] for medium in dict.fromkeys(_MEDIA.values())}
    lacking: dict[str, list[str]] = {medium: [] for medium in having}
    for path, fields in samples:
        found = {_MEDIA.get(field.rpartition(".")[2]) for field in fields}
        for medium in having:
            (having if medium in found else lacking)[medium].append(path)
    for medium, others in lacking.items():
        if 0 < len(others) < len(having[medium]):
            raise SourceError(
                f"{folder}: {others[0]} would be a sample without {medium}, and {len(having[medium]):,} of "
                f"{len(having[medium]) + len(others):,} samples have one ({having[medium][0]}); move it elsewhere, or "
                'say which endings are fields: fields=("jpg", "txt") takes all files with them, and leaves out others'
            )


def _words(name: str) -> list[str]:
    """Return the words of a folder's name, in lower case."""
    return [word.lower() for word in _WORD.findall(name)]


def _siblings(paths: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return for each folder, with a trailing slash, the folders in it, each with an example of a file below it."""
    examples: dict[str, str] = {}
    for path in paths:
        examples.setdefault(path[: path.rfind("/") + 1], path)
    siblings: dict[str, dict[str, str]] = {"": {}}
    for below, example in examples.items():
        parent = ""
        for name in below.split("/")[:-1]:
            siblings.setdefault(parent, {}).setdefault(name, example)
            parent += f"{name}/"
    return siblings


def _contents(paths: Iterable[str]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return for each folder, with a trailing slash, the stems and the media of the files in it."""
    stems: dict[str, set[str]] = defaultdict(set)
    media: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        parent, slash, name = path.rpartition("/")
        stem, _, extension = name.partition(".")
        stems[parent + slash].add(stem)
        media[parent + slash].add(_MEDIA.get(plain_field(extension).rpartition(".")[2], "other"))
    return stems, media


def _quoted(folder: str, name: str) -> str:
    return shlex.quote(f"{folder.rstrip('/')}/{name}")
