"""Files -> samples: what can be packed.

A source is any iterable of sample dicts, or a ``ListedSource``, which has a length, reads samples by position, and
knows their sizes beforehand, so that the shards are planned before anything is read.
"""

import hashlib
import os
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from shardkit.codecs.images import IMAGE_EXTENSIONS
from shardkit.errors import SourceError, check_path, check_texts, hide_secrets
from shardkit.sample import KEY, SOURCE, Sample, stored_field
from shardkit.sources.filenames import (
    check_names,
    escape_key,
    plain_field,
    split_extension,
    split_file,
)
from shardkit.sources.labels import find_labels, number_labels, read_labels
from shardkit.sources.layout import check_alike, check_class_folders, check_parallel, check_splits
from shardkit.storage.base import is_remote
from shardkit.storage.local import canonical_url
from shardkit.storage.os_errors import open_file, os_errors, storage_error


@runtime_checkable
class ListedSource(Protocol):
    """Samples that are read by position and whose sizes are known without reading them."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, by number; empty if there are none."""
        ...

    @property
    def ignored(self) -> tuple[str, ...]:
        """Files that were found and are not part of any sample."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def key(self, position: int, /) -> str:
        """Return a sample's key."""
        ...

    def sizes(self, position: int, /) -> list[tuple[str, int]]:
        """Return a sample's fields, sorted, and their sizes in bytes."""
        ...

    def read(self, position: int, /) -> Sample:
        """Return a sample. Raises SourceError if it has changed."""
        ...

    def take(self, positions: Sequence[int], /) -> "ListedSource":
        """Return a source of the samples at some positions, in the order given; its pickle is small."""
        ...

    def fingerprint(self) -> str:
        """Return a text that changes when a sample is added, removed or changed."""
        ...


class SourceFile(NamedTuple):
    """One file: its field, its path below the folder, its size in bytes and its modification time."""

    field: str
    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class _Files:
    """Samples made from files, and perhaps a label; see ``ListedSource``."""

    folder: str
    classes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    _keys: Sequence[str] = field(default=(), repr=False)
    _files: Sequence[tuple[SourceFile, ...]] = field(default=(), repr=False)
    _labels: Sequence[int] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, position: int, /) -> str:
        """Return a sample's key."""
        return self._keys[position]

    def sizes(self, position: int, /) -> list[tuple[str, int]]:
        """Return a sample's fields, sorted, and their sizes in bytes."""
        sizes = [(file.field, file.size) for file in self._files[position]]
        if self._labels is not None:
            sizes.append(("cls", len(str(self._labels[position]))))
        return sorted(sizes)

    def read(self, position: int, /) -> Sample:
        """Return a sample; the fields are bytes, the label is an int.

        Raises:
            SourceError: A file has been removed or has changed.
        """
        files = self._files[position]
        sample: Sample = {KEY: self._keys[position], SOURCE: files[0].path}
        for file in files:
            sample[file.field] = _read_file(self.folder, file)
        if self._labels is not None:
            sample["cls"] = self._labels[position]
        return sample

    def take(self, positions: Sequence[int], /) -> "_Files":
        """Return a source of the samples at some positions, in the order given; it does not need the current folder."""
        return _Files(
            str(Path(self.folder).absolute()),
            self.classes,
            _keys=[self._keys[p] for p in positions],
            _files=[self._files[p] for p in positions],
            _labels=None if self._labels is None else [self._labels[p] for p in positions],
        )

    def overlaps(self, folder: str) -> bool:
        """Return whether files written to a folder would lie among these files."""
        read, written = Path(canonical_url(self.folder)), Path(canonical_url(folder))
        return not is_remote(folder) and (read == written or read in written.parents)

    def fingerprint(self) -> str:
        """Return a hash of all keys, labels, paths, sizes and modification times."""
        digest = hashlib.sha256(repr(self.classes).encode("utf-8", "surrogateescape"))
        for position, key in enumerate(self._keys):
            label = self._labels[position] if self._labels is not None else None
            described = repr((key, label, [tuple(file) for file in self._files[position]]))
            digest.update(described.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


class ImageFolder(_Files):
    """Images in one folder per class; or images anywhere below a folder, with a table of labels.

    Each image becomes a sample with its unchanged bytes under ``jpg`` (also for ``.jpeg`` and ``.JPEG``), ``png`` and
    so on, and its class number under ``cls``. Its key is its path without extension and does not depend on other files.
    Classes are numbered in the order of their names. Images at the top have no class: they need ``labels``. Links are
    followed. Hidden files are left out; other files that are not images are listed in ``ignored``.

    Args:
        folder: The folder.
        labels: Labels instead of class folders: a mapping from path or key to class number or name; or a CSV file
            whose header names a column ``path`` or ``key`` and a column ``label``, in any order, and perhaps others; or
            a JSON file with an object that maps path or key to label. Every image needs a label.
        classes: The names of the classes, by number; by default the names that occur, sorted. Needed if a split lacks
            some classes, if folders do not look like classes, and to name labels that are numbers.

    Raises:
        SourceError: There is no image; an image has no label, or one that is not a class; two images would have the
            same key; or a name cannot be written. Or the folders at the top are not classes: they are splits, like
            ``train`` and ``val``, or their files belong together, like ``images`` and ``masks``.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "cat").mkdir()
        >>> _ = (folder / "cat" / "0001.JPEG").write_bytes(b"...")
        >>> source = ImageFolder(folder)
        >>> source.read(0)
        {'__key__': 'cat/0001', '__source__': 'cat/0001.JPEG', 'jpg': b'...', 'cls': 0}
        >>> source.classes
        ('cat',)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        labels: Mapping[str, int | str] | str | os.PathLike[str] | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        images, ignored = [], []
        for path, status in _walk(folder):
            kind = IMAGE_EXTENSIONS.get(split_extension(path)[1])
            if kind:
                images.append(SourceFile(kind, path, status.st_size, status.st_mtime_ns))
            else:
                ignored.append(path)
        if not images:
            raise SourceError(
                f"{os.fspath(folder)}: has no images (looked for {', '.join(IMAGE_EXTENSIONS)} in all folders)"
            )
        paths = [image.path for image in images]
        keys = _image_keys(paths, folder)
        named: list[int | str]
        if labels is None:
            named = [_class_folder(path, folder) for path in paths]
            if classes is None:
                check_class_folders(os.fspath(folder), paths)
        else:
            named = find_labels(paths, keys, read_labels(labels), folder)
        names, numbers = number_labels(
            paths, named, None if classes is None else check_texts("classes", classes), folder
        )
        super().__init__(
            folder=os.fspath(folder),
            classes=names,
            ignored=tuple(ignored),
            _keys=keys,
            _files=[(image,) for image in images],
            _labels=numbers,
        )


class FileFolder(_Files):
    """Files of any kind in a folder, grouped into samples by their names.

    ``a.jpg`` and ``a.txt`` make the sample ``a``. The extension in lower case is the field; ``.jpeg`` also becomes
    ``jpg``, as in an ``ImageFolder``. Names with several dots are ambiguous, so they need ``fields``: with
    ``fields=("jpg", "seg.png")``, ``a.seg.png`` is the field ``seg.png`` of ``a``, and ``v1.5.jpg`` is the field
    ``jpg`` of a separate sample. Hidden files are left out; with ``fields``, files with none of these
    endings are listed in ``ignored``.

    Args:
        folder: The folder.
        fields: The endings that are fields; the longest one that matches is used. None to accept all extensions.

    Raises:
        ArgumentError: ``fields`` is not a sequence of texts, or one of them says how to decode it.
        SourceError: There are no files, a name is ambiguous, or two files would be the same field of the same sample.
            Or files in several folders belong together, as in ``images`` and ``masks``. Or, without ``fields``, splits,
            like ``train`` and ``val``, would become one dataset, or a sample would lack an image although most samples
            have one.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("hello"), (folder / "a.cls").write_text("1")
        >>> FileFolder(folder).read(0)
        {'__key__': 'a', '__source__': 'a.cls', 'cls': b'1', 'txt': b'hello'}
    """

    def __init__(self, folder: str | os.PathLike[str], *, fields: Sequence[str] | None = None) -> None:
        endings = None
        if fields is not None:
            plain = (plain_field(stored_field(field)).removeprefix(".") for field in check_texts("fields", fields))
            endings = sorted(plain, key=len, reverse=True)
        groups, ignored = _group_files(folder, endings)
        super().__init__(
            folder=os.fspath(folder),
            ignored=tuple(ignored),
            _keys=[escape_key(stem) for stem in groups],
            _files=[tuple(files) for files in groups.values()],
        )
        for key, grouped in zip(self._keys, self._files, strict=True):
            check_names(key, [file.field for file in grouped], grouped[0].path)
        paths = [file.path for files in self._files for file in files]
        check_parallel(self.folder, paths)
        if fields is None:
            check_splits(self.folder, paths, classes=False)
            check_alike(self.folder, ((files[0].path, [file.field for file in files]) for files in self._files))


def _group_files(
    folder: str | os.PathLike[str], endings: Sequence[str] | None
) -> tuple[dict[str, list[SourceFile]], list[str]]:
    """Return the files of each stem, sorted by field, and the files that have none of the endings.

    Raises:
        SourceError: There are no files, a name is ambiguous, or two files would be the same field of the same sample.
    """
    groups: dict[str, list[SourceFile]] = {}
    ignored = []
    for path, status in _walk(folder):
        split = split_file(path, endings)
        if split is None:
            ignored.append(path)
            continue
        stem, name = split
        groups.setdefault(stem, []).append(SourceFile(name, path, status.st_size, status.st_mtime_ns))
    if not groups:
        raise SourceError(f"{os.fspath(folder)}: has no files to pack; name another folder, or other fields")
    for files in groups.values():
        files.sort()
        for one, other in pairwise(files):
            if one.field == other.field:
                raise SourceError(
                    f"{os.fspath(folder)}: {one.path} and {other.path} would both be the field {one.field!r} "
                    "of one sample; rename one of them"
                )
    return groups, ignored


def _walk(folder: str | os.PathLike[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files below a folder that are not hidden, in the order of their names; links are followed."""
    path = check_path("folder", folder)
    if is_remote(path):
        raise SourceError(
            f"{hide_secrets(path)}: is not on this machine, and folders are read from its file systems only; copy it, "
            "or give pack() a generator of samples that are read there. A ShardSource reads shards of any URL"
        )
    with os_errors(path):
        is_folder = Path(path).is_dir()
    if not is_folder:
        raise SourceError(f"{path}: is not a folder; name one that holds the files to pack")
    yield from _walk_below(path, "", set())


def _walk_below(folder: str, prefix: str, seen: set[tuple[int, int]]) -> Iterator[tuple[str, os.stat_result]]:
    with os_errors(folder):
        status = Path(folder).stat()
    if (status.st_dev, status.st_ino) in seen:
        raise SourceError(f"{folder}: was reached twice by links, so its files would be packed twice; remove a link")
    seen.add((status.st_dev, status.st_ino))
    with os_errors(folder), os.scandir(folder) as entries:
        visible = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in visible:
        try:
            status = entry.stat()
        except OSError as error:
            if not entry.is_symlink():
                raise storage_error(error, entry.path) from error
            raise SourceError(
                f"{entry.path}: is a link to '{Path(entry.path).readlink()}', which cannot be followed "
                f"({error.strerror}); mend it or remove it"
            ) from error
        if stat.S_ISDIR(status.st_mode):
            yield from _walk_below(entry.path, f"{prefix}{entry.name}/", seen)
        elif stat.S_ISREG(status.st_mode):
            yield prefix + entry.name, status
        else:
            raise SourceError(f"{entry.path}: is neither a file nor a folder; move it elsewhere")


def _read_file(folder: str, file: SourceFile) -> bytes:
    path = f"{folder}/{file.path}"
    try:
        descriptor = open_file(path, path)
    except FileNotFoundError:
        raise SourceError(
            f"{path}: was there when the pack began and is gone, or is not visible from {socket.gethostname()}; run it "
            "again when nothing changes the folder, or let that machine see it"
        ) from None
    try:
        with os_errors(path):
            data = os.read(descriptor, file.size + 1)
            while len(data) < file.size and (piece := os.read(descriptor, file.size + 1 - len(data))):
                data += piece
        mtime_ns = os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)
    if len(data) != file.size or mtime_ns != file.mtime_ns:
        raise SourceError(
            f"{path}: had {file.size:,} bytes when the pack began and was written to since; run it again when "
            "nothing changes the folder"
        )
    return data


def _image_keys(paths: Sequence[str], folder: str | os.PathLike[str]) -> list[str]:
    """Return the images' keys. Raises SourceError if two images have the same key."""
    taken: dict[str, str] = {}
    for path in paths:
        key = escape_key(split_extension(path)[0])
        check_names(key, ["jpg"], path)
        other = taken.setdefault(key, path)
        if other is not path:
            raise SourceError(
                f"{os.fspath(folder)}: {other} and {path} would both be the sample {key!r}; keys have no extension, so "
                "that adding files never changes them. Rename one of them; to make two fields of one sample from files "
                "like a.jpg and a.png, use a FileFolder"
            )
    return list(taken)


def _class_folder(path: str, folder: str | os.PathLike[str]) -> str:
    name, slash, _ = path.partition("/")
    if not slash:
        raise SourceError(
            f"{os.fspath(folder)}: the image {path} is in no class folder; move it into one, or pass labels= "
            "(or use FileFolder for images without labels)"
        )
    return name
