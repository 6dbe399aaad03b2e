"""An index holds what Arrow can hold, and says so of what it cannot."""

import pytest

from shardkit.errors import ArgumentError
from shardkit.index import IndexBuilder


@pytest.mark.parametrize("value", [2**80, "\udcff", object()])
def test_a_column_that_arrow_cannot_hold_is_an_error_that_names_it(value):
    builder = IndexBuilder()
    builder.add("a", 0, 1024, [("txt", 512, 3, 0)], columns={"width": value})

    with pytest.raises(ArgumentError, match="column 'width': its values have no common type, or none of Arrow's"):
        builder.table()
