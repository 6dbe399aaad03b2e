"""Columns: values promoted into the index, so that samples can be selected before any shard is read."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from shardkit.codecs.registry import Decoder
from shardkit.errors import ArgumentError, CodecError, ShardkitError
from shardkit.sample import KEY, split_decoding

if TYPE_CHECKING:
    import pyarrow as pa

Column: TypeAlias = str | Callable[[Mapping[str, Any]], object]


class DecodedView(Mapping[str, Any]):
    """A read-only sample whose fields are decoded on first access.

    A field may be requested as in a ``fields`` argument, for example ``view["depth.png:unchanged"]``.

    Example:
        >>> view = DecodedView("0001", {"cls": b"7"}, Decoder())
        >>> view["cls"], view["__key__"]
        (7, '0001')
    """

    def __init__(self, key: str, fields: Mapping[str, bytes], decoder: Decoder) -> None:
        self._key = key
        self._fields = fields
        self._decoder = decoder
        self._decoded: dict[str, Any] = {KEY: key}

    def __getitem__(self, name: str) -> Any:
        if name not in self._decoded:
            self._decoded[name] = self._decoder.decode(name, self._fields[split_decoding(name)[0]], key=self._key)
        return self._decoded[name]

    def __iter__(self) -> Iterator[str]:
        yield KEY
        yield from self._fields

    def __len__(self) -> int:
        return 1 + len(self._fields)


class ColumnMaker:
    """Computes the promoted columns of samples.

    Args:
        columns: For each column a field's name, whose decoded value is taken (None where the field is missing), or a
            function of the sample. The function gets a read-only mapping whose fields are decoded on first access,
            once for all columns.

    Raises:
        ArgumentError: It is not a mapping, or a column's name would collide with the index's own.

    Example:
        >>> maker = ColumnMaker({"label": "cls", "length": lambda sample: len(sample["txt"])})
        >>> maker.values("0001", [("cls", b"7"), ("txt", b"seven")])
        {'label': 7, 'length': 5}
    """

    def __init__(self, columns: Mapping[str, Column] | None) -> None:
        if columns is not None and not isinstance(columns, Mapping):
            raise ArgumentError(f"columns is {columns!r}, expected a mapping of names to fields or functions")
        self.columns = dict(columns or {})
        self._decoder = Decoder()
        for name, column in self.columns.items():
            if not isinstance(name, str) or not name or name.startswith("_") or ":" in name:
                raise ArgumentError(
                    f"columns: {name!r} is reserved for the index; choose a name without a ':' or a leading '_'"
                )
            if not isinstance(column, str) and not callable(column):
                raise ArgumentError(
                    f"columns: {name!r} is {column!r}, expected a field's name or a function of the sample"
                )

    def check_fields(self, samples: Iterable[Iterable[str]]) -> None:
        """Check that each field that a column names is in some sample: a misspelt name would give None for all samples.

        Args:
            samples: Each sample's fields. The search ends when all named fields are found. Without samples there is
                nothing to check.

        Raises:
            ArgumentError: No sample has a field that a column names.
        """
        named = {field: name for name, field in self.columns.items() if isinstance(field, str)}
        known: set[str] = set()
        for fields in samples if named else ():
            known.update(fields)
            known.add(KEY)
            if named.keys() <= known:
                return
        for field in sorted(named.keys() - known) if known else ():
            raise ArgumentError(
                f"columns: {named[field]!r} names the field {field!r}, which no sample has (there are "
                f"{', '.join(sorted(known - {KEY}))}); correct it, or leave the column out",
                field=field,
            )

    def needs(self, field: str) -> bool:
        """Return whether some column may look at a field."""
        return any(not isinstance(column, str) or column == field for column in self.columns.values())

    def values(self, key: str, fields: Iterable[tuple[str, bytes]]) -> dict[str, object]:
        """Return the columns' values for one sample.

        Args:
            key: The sample's key.
            fields: Its fields' names and bytes.

        Raises:
            CodecError: A field cannot be decoded, or a function failed; the cause is chained.
        """
        if not self.columns:
            return {}
        view = DecodedView(key, dict(fields), self._decoder)
        result: dict[str, object] = {}
        for name, column in self.columns.items():
            try:
                if isinstance(column, str):
                    result[name] = view.get(column)
                else:
                    result[name] = column(view)
            except ShardkitError:
                raise
            except Exception as error:
                raise CodecError(
                    f"sample {key!r}: column {name!r} cannot be computed ({type(error).__name__}: {error}); "
                    "return None from its function where there is no value",
                    key=key,
                    field=name,
                ) from error
        return result


def make_schema(columns: "Iterable[pa.Field]") -> "pa.Schema":
    """Return a schema with these columns, sorted by name."""
    import pyarrow as pa

    return pa.schema(sorted(columns, key=lambda column: column.name))


def promoted_columns(schema: "pa.Schema") -> "pa.Schema":
    """Return the promoted columns of an index with this schema, in the types that Parquet gives back."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = pa.schema([f.remove_metadata() for f in schema if ":" not in f.name and not f.name.startswith("__")])
    if any(column.type.num_fields for column in columns):  # Parquet renames the elements of lists
        file = io.BytesIO()
        pq.write_table(columns.empty_table(), file)
        columns = pq.read_schema(file).remove_metadata()
    return columns


class ColumnTypes:
    """The promoted columns of all shards, each in a type that holds the values of every shard."""

    def __init__(self) -> None:
        self._schema: pa.Schema | None = None

    def add(self, name: str, schema: "pa.Schema") -> None:
        """Add the columns of one shard's index.

        Raises:
            ArgumentError: No type holds a column's values from this shard and from the shards before it.
        """
        import pyarrow as pa

        try:
            self._schema = pa.unify_schemas([self.schema, promoted_columns(schema)], promote_options="permissive")
        except pa.ArrowException as error:
            raise ArgumentError(
                f"columns: the values in shard {name} are not of the type that they have in the shards before it "
                f"({error}); return one type, or None"
            ) from error

    @property
    def schema(self) -> "pa.Schema":
        """The columns of all shards so far."""
        import pyarrow as pa

        return self._schema if self._schema is not None else pa.schema([])

    def as_text(self) -> dict[str, str]:
        """Return the columns and their Arrow types as text."""
        return {field.name: str(field.type) for field in self.schema}
