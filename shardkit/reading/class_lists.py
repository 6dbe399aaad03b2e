"""The class lists of several datasets, found for their shards and joined into one."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from urllib.parse import unquote

from shardkit.errors import DatasetError, hide_secrets
from shardkit.format.classes import ClassMap, LabelledPart, holds_classes, join_classes
from shardkit.format.manifest import MANIFEST_NAME, Manifest, load_manifest
from shardkit.reading.forward import ShardLocation
from shardkit.sample import FieldSelection
from shardkit.storage.base import STDIN, is_web, split_url
from shardkit.storage.registry import storage_for


def with_class_lists(
    locations: Sequence[ShardLocation], storage_options: Mapping[str, object] | None
) -> list[ShardLocation]:
    """Return shards with the class lists of their datasets, even if the shards were named one by one.

    A shard belongs to the dataset of the manifest in its folder, if the manifest lists it.
    """
    folders = dict.fromkeys(split_url(at.url)[0] for at in locations if at.shard is None and at.url != STDIN)
    manifests = {folder: _manifest_in(folder, storage_options) for folder in folders}
    listed = {folder: {shard.url for shard in manifest.shards} for folder, manifest in manifests.items() if manifest}
    found = []
    for at in locations:
        folder, name = split_url(at.url)
        manifest = manifests.get(folder) if at.shard is None else None
        if manifest and (unquote(name) if is_web(at.url) else name) in listed[folder]:
            found.append(replace(at, classes=manifest.classes, fields=manifest.fields))
        else:
            found.append(at)
    return found


def _manifest_in(folder: str, storage_options: Mapping[str, object] | None) -> Manifest | None:
    try:
        return load_manifest(storage_for(folder, storage_options), folder, MANIFEST_NAME, allow_any_url=True)
    except (FileNotFoundError, NotADirectoryError, PermissionError, DatasetError):  # none, or of another program
        return None


def labelled_part(location: ShardLocation, selection: FieldSelection, others: Collection[str] = ()) -> LabelledPart:
    """Return the classes of a shard's dataset, and whether fields with class numbers may be read from it.

    Args:
        location: The shard.
        selection: The fields that are read.
        others: Other fields that hold classes, regardless of their names.
    """
    fields = location.fields
    if fields is None:  # unknown until the shard is read
        fields = tuple(field for wanted in selection.wanted.values() for field in wanted) or ("cls",)
    labelled = any((holds_classes(field) or field in others) and selection.wants(field) for field in fields)
    where = location.url if location.fields is None else split_url(location.url)[0]
    return LabelledPart(hide_secrets(where), location.classes, labelled)


def join_class_lists(
    locations: Sequence[ShardLocation], selection: FieldSelection, others: Collection[str] = ()
) -> tuple[tuple[str, ...], dict[tuple[str, ...], ClassMap]]:
    """Return one class list for shards of several datasets, and for each dataset's list a map of its numbers.

    Datasets whose numbers do not change have no map.

    Args:
        locations: The shards.
        selection: The fields that are read.
        others: Other fields that hold classes, regardless of their names.

    Raises:
        DatasetError: Some datasets name their classes, and one that does not has class fields.
    """
    # One shard of each dataset is enough. There may be many shards and long class lists, so lists are compared by
    # identity: a manifest has one list for all of its shards.
    distinct = {
        at.url if at.fields is None else (split_url(at.url)[0], id(at.classes), at.fields): at for at in locations
    }
    parts = [labelled_part(at, selection, others) for at in distinct.values()]
    joined = join_classes(parts)
    lists = {part.classes for part in parts} - {(), joined}
    return joined, {classes: ClassMap(classes, joined, others=others) for classes in lists}
