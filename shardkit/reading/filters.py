"""A condition on index columns, or numbers, or a mask -> the selected samples, found before any shard is read."""

import operator
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardkit.errors import ArgumentError, DatasetError
from shardkit.format.manifest import Manifest
from shardkit.format.side_files import ColumnFile
from shardkit.order.plan import IntArray
from shardkit.reading.index_cache import Indexes
from shardkit.sample import KEY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    import pyarrow.compute as pc

Where: TypeAlias = "pc.Expression | Sequence[tuple[str, str, Any]] | Sequence[Sequence[tuple[str, str, Any]]]"

_ROW = "__row__"


class Filter:
    """A ``where`` argument.

    Args:
        where: An expression of ``pyarrow.compute``; or a list of conditions that must all hold, as
            ``[("label", "==", 3), ("width", ">=", 224)]``; or a list of such lists of which at least one must hold.
            Operators are ``== != < <= > >= in "not in"``. A condition on a null value selects nothing.
        types: The columns that it may use, and their types.

    Attributes:
        needed: The columns that it uses.

    Raises:
        ArgumentError: It is none of these, names other columns, or compares values that cannot be compared.

    Example:
        >>> import pyarrow as pa
        >>> rows = pa.table({"label": [3, 7, 3], "__key__": ["a", "b", "c"]})
        >>> Filter([("label", "==", 3)], {"label": pa.int64(), "__key__": pa.string()}).select(rows).tolist()
        [0, 2]
    """

    def __init__(self, where: Where, types: "Mapping[str, pa.DataType]") -> None:
        import pyarrow as pa

        self._where = where
        self._expression = _parse(where, types)
        self._types = types
        empty = pa.table({name: pa.nulls(0, type=kind) for name, kind in types.items()})
        try:
            self._evaluate(empty)
        except (pa.ArrowException, TypeError) as error:
            raise self._unusable(error) from error
        needed = [name for name in types if not self._is_evaluated(empty.drop_columns(name))]
        self.needed = needed or list(types)[:1]

    def select(self, rows: "pa.Table") -> IntArray:
        """Return the numbers of the rows that are selected, ascending: int64.

        Args:
            rows: The columns in ``needed``. A column that the shard does not have counts as null.
        """
        import pyarrow as pa

        columns = {}
        for name in self.needed:
            column = rows.column(name) if name in rows.column_names else None
            if column is None or column.type == pa.null():  # it is None for every sample of the shard
                column = pa.nulls(len(rows), type=self._types[name])
            columns[name] = column
        try:
            return self._evaluate(pa.table(columns))
        except (pa.ArrowException, TypeError) as error:
            raise self._unusable(error) from error

    def _evaluate(self, table: "pa.Table") -> IntArray:
        import pyarrow as pa
        from pyarrow import acero
        from pyarrow.compute import field

        table = table.append_column(_ROW, pa.array(np.arange(len(table))))
        steps = [
            acero.Declaration("table_source", acero.TableSourceNodeOptions(table)),
            acero.Declaration("filter", acero.FilterNodeOptions(self._expression)),
            acero.Declaration("project", acero.ProjectNodeOptions([field(_ROW)], [_ROW])),
        ]
        # Without threads the rows stay in order, and no thread is left when the program ends (see ShardIndex).
        selected = acero.Declaration.from_sequence(steps).to_table(use_threads=False)
        rows: IntArray = selected.column(_ROW).to_numpy()
        return rows

    def _is_evaluated(self, table: "pa.Table") -> bool:
        import pyarrow as pa

        try:
            self._evaluate(table)
        except (pa.ArrowException, TypeError):
            return False
        return True

    def _unusable(self, error: Exception) -> ArgumentError:
        said = str(error).splitlines()[0].partition(" in ")[0] if str(error) else type(error).__name__
        return ArgumentError(
            f"where is {self._where!s:.200}: {said}; the index has the columns {', '.join(self._types)}. "
            "Others are made by pack(columns=...) or 'shardkit index --column'"
        )


def select_samples(where: Where, manifest: Manifest, indexes: Indexes) -> IntArray:
    """Return the numbers of a dataset's samples that a condition selects, in order: int64.

    If the condition uses promoted columns only, they are read from their own file; otherwise, and always in format 1,
    from every index.

    Args:
        where: The condition.
        manifest: The dataset.
        indexes: Its indexes.

    Raises:
        ArgumentError: The condition is not usable.
        DatasetError: An index, or the file of columns, is not usable.
    """
    file = ColumnFile(manifest, indexes.storage) if manifest.column_file else None
    condition = Filter(where, _types(manifest, file, indexes))
    if file is not None and set(condition.needed) <= set(manifest.columns):
        groups = (file.rows(condition.needed, group) for group in range(file.num_groups))
    else:
        opened = (indexes.open(shard) for shard in range(len(manifest.shards)))
        groups = (index.rows(condition.needed, group=group) for index in opened for group in range(index.num_groups))
    selected = [np.zeros(0, dtype=np.int64)]
    first = 0
    for rows in groups:
        selected.append(first + condition.select(rows))
        first += len(rows)
    if first != manifest.num_samples:
        raise DatasetError(
            f"{manifest.url}: its indexes have {first:,} samples, its manifest says {manifest.num_samples:,}; "
            "make them again with 'shardkit index'",
            url=manifest.url,
        )
    return np.concatenate(selected)


def select_indices(indices: "Sequence[int] | npt.ArrayLike", count: int) -> IntArray:
    """Return the numbers of the samples that indices or a mask select, ascending: int64.

    Args:
        indices: Numbers of samples, negative ones from the end; or a mask with True or False for each sample.
        count: How many samples there are.

    Raises:
        ArgumentError: A sample is given twice or does not exist, or the mask has another length.

    Example:
        >>> select_indices([4, 0, -2], 5).tolist()
        [0, 3, 4]
    """
    array = np.asarray(indices)
    if array.dtype == np.bool_:
        if array.shape != (count,):
            raise ArgumentError(f"indices: the mask has the shape {array.shape}, expected ({count:,},)")
        return np.flatnonzero(array)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ArgumentError(f"indices must be whole numbers or a mask in one dimension, got {indices!r:.80}")
    for number in (int(array.min()), int(array.max())):
        if not -count <= number < count:
            raise ArgumentError(f"indices: there is no sample {number:,}, there are {count:,}")
    numbers = array.astype(np.int64)
    numbers[numbers < 0] += count
    numbers.sort()
    repeated = numbers[1:][numbers[1:] == numbers[:-1]]
    if len(repeated):
        raise ArgumentError(f"indices: sample {repeated[0]:,} is given more than once; give each once")
    return numbers


def _parse(where: Where, types: "Mapping[str, pa.DataType]") -> "pc.Expression":
    import pyarrow as pa
    from pyarrow.compute import Expression

    if isinstance(where, Expression):
        return where
    try:
        groups: Any = [where] if isinstance(where[0][0], str) else where
        alternatives = [reduce(operator.and_, [_condition(one, types) for one in group]) for group in groups]
        return reduce(operator.or_, alternatives)
    except (TypeError, ValueError, KeyError, IndexError, pa.ArrowException) as error:
        raise ArgumentError(
            f"where is {where!s:.200} ({error}), expected an expression of pyarrow.compute, or a list of conditions "
            'as [("label", "==", 3)], or a list of such lists'
        ) from error


def _condition(condition: tuple[str, str, Any], types: "Mapping[str, pa.DataType]") -> "pc.Expression":
    """Return the expression for one condition."""
    import pyarrow as pa
    from pyarrow.compute import field
    from pyarrow.parquet import filters_to_expression

    name, sign, value = condition
    if sign not in ("in", "not in"):
        return filters_to_expression([condition])
    # pyarrow's own conversion takes a null as "not in" a list, and cannot compare an empty list, which has no type.
    if isinstance(value, str | bytes):
        raise ValueError(f"{value!r} is not a list of values")
    values = value if isinstance(value, pa.Array | pa.ChunkedArray) else list(value)
    column = field(name)
    found = column.isin(values if len(values) else pa.array([], type=types.get(name)))
    return found if sign == "in" else ~found & column.is_valid()


def _types(manifest: Manifest, file: ColumnFile | None, indexes: Indexes) -> "dict[str, pa.DataType]":
    """Return the columns that a condition may use: the promoted columns, the key, and the size of each field."""
    import pyarrow as pa

    types = {}
    for name, kind in manifest.columns.items():
        if file is not None:
            types[name] = file.schema.field(name).type
            continue
        try:
            types[name] = pa.type_for_alias(kind)
        except ValueError:  # nested types have no alias; only the indexes have them
            schema = indexes.open(0).schema if manifest.shards else pa.schema([])
            types[name] = schema.field(name).type if name in schema.names else pa.null()
    sizes = {f"{field}:size": pa.int64() for field in manifest.fields}
    return {**types, KEY: pa.string(), **sizes}
