"""Schemas of topics.

These tests catch a name or a column that must not get in, and a schema that does not come back
from JSON as it was. They cannot catch what a log does with the ids: see test_evolution.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import BadSchema, ReservedName, WrongColumn
from headrace.model.ddl import TIMESTAMP
from headrace.model.schema import RESERVED, Column, Schema, schema_of
from tests.model.strategies import NAMES, TYPES


def test_the_first_version_has_ids_from_one() -> None:
    """DDL becomes version 1 of generation 1, with ids in the order of the columns."""
    schema = schema_of("user bigint not null, url string comment 'path'")
    assert schema == Schema(
        1,
        1,
        (
            Column(1, "user", pa.int64(), nullable=False),
            Column(2, "url", pa.string(), comment="path"),
        ),
    )
    assert schema.arrow == pa.schema([pa.field("user", pa.int64(), False), ("url", pa.string())])
    assert schema.arrow is schema.arrow
    assert schema.ddl() == "user bigint not null, url string comment 'path'"


def test_an_arrow_schema_is_as_good_as_ddl() -> None:
    """A pyarrow schema gives the same as the DDL of its normal types."""
    arrow = pa.schema([pa.field("user", pa.int64(), False), ("url", pa.large_string())])
    assert schema_of(arrow) == schema_of("user bigint not null, url string")


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("a int, a string", BadSchema),
        ("a int, A string", BadSchema),
        (pa.schema([]), BadSchema),
        (pa.schema([("", pa.int8())]), BadSchema),
        (3, BadSchema),
        ("_private int", ReservedName),
        ("_weight string", ReservedName),
    ],
)
def test_what_is_not_a_schema_is_refused(spec: Any, kind: type[Exception]) -> None:
    """Names that come twice (in any case), no columns, and reserved names are refused."""
    with pytest.raises(kind):
        schema_of(spec)


def test_reserved_columns_have_one_meaning() -> None:
    """A reserved column has the reserved type and nullability, whatever was said of null."""
    schema = schema_of(
        "id int, _weight bigint, _op string, _lsn long, _xid bigint, _commit_time timestamp"
    )
    assert schema.column("_weight").nullable is False
    assert {c.name: c.type for c in schema.live[1:]} == {n: f.type for n, f in RESERVED.items()}
    assert schema.column("_commit_time").type == TIMESTAMP


def test_an_unknown_column_is_named_with_its_neighbours() -> None:
    """Asking for a column that is not there names the nearest ones."""
    with pytest.raises(WrongColumn) as raised:
        schema_of("user int, url string").column("usr")
    assert "'user'" in raised.value.fix


@given(
    st.lists(st.tuples(NAMES, TYPES, st.booleans(), st.booleans()), min_size=1, max_size=5),
    st.integers(1, 9),
)
def test_a_schema_comes_back_from_json(
    columns: list[tuple[str, pa.DataType, bool, bool]], n: int
) -> None:
    """Through JSON text a schema stays the same, retired columns and origins included."""
    schema = Schema(
        n,
        1,
        tuple(
            Column(i, name, arrow, null, retired, renamed_from=name if null else None)
            for i, (name, arrow, null, retired) in enumerate(columns, 1)
        ),
    )
    assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema


@pytest.mark.parametrize("value", [{}, {"version": 1, "generation": 1, "columns": [3]}, []])
def test_other_json_is_refused(value: Any) -> None:
    """JSON that is not a schema is a BadSchema, not a KeyError."""
    with pytest.raises(BadSchema):
        Schema.from_json(value)
