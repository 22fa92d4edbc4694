"""Changes of schemas, and old rows read as new ones.

These tests catch a change that is allowed and must not be, a refusal without a way out, and a value
that is lost or invented when old rows are read under a newer version. The random histories compare
with a plain list of dicts. They cannot catch a reader that asks with the wrong version.
"""

from __future__ import annotations

from decimal import Context, Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import BadSchema, ReservedName, SchemaChangeRefused, WrongColumn
from headrace.model.ddl import ddl_type, parse_type
from headrace.model.evolution import Upgrade, evolve, is_widening
from headrace.model.rows import Intake
from headrace.model.schema import Schema, schema_of

CONTEXT = Context(prec=60)
CLICKS = schema_of("user int not null, url string, at timestamp, price decimal(10,2)")


def names(schema: Schema) -> list[str]:
    return [column.name for column in schema.live]


def test_adding_gives_a_new_id_at_the_end() -> None:
    """A new column comes last, with the next id, in the next version of the same generation."""
    new = evolve(CLICKS, add="agent string, score float")
    assert (new.version, new.generation) == (2, 1)
    assert names(new) == ["user", "url", "at", "price", "agent", "score"]
    assert [column.id for column in new.columns] == [1, 2, 3, 4, 5, 6]


def test_retiring_keeps_the_column_and_its_id() -> None:
    """A retired column is no longer live, and its id is never given again."""
    new = evolve(evolve(CLICKS, retire=["price"]), add="price string")
    assert names(new) == ["user", "url", "at", "price"]
    assert new.column("price").id == 5
    assert [column.retired for column in new.columns] == [False, False, False, True, False]


def test_renaming_is_retire_and_add_in_place() -> None:
    """A renamed column has a new id, the same place and type, may be null, and knows its origin."""
    new = evolve(schema_of("a int not null, b int"), rename={"a": "c"})
    column = new.column("c")
    assert names(new) == ["c", "b"]
    assert (column.id, column.type, column.nullable) == (3, pa.int32(), True)
    assert column.renamed_from == "a"


def test_names_can_be_swapped() -> None:
    """Two columns can exchange their names in one change."""
    new = evolve(schema_of("a int, b string"), rename={"a": "b", "b": "a"})
    assert [(c.name, c.type) for c in new.live] == [("b", pa.int32()), ("a", pa.string())]


def test_retyping_starts_a_generation() -> None:
    """An incompatible type gives a new generation and a new id in the same place."""
    new = evolve(CLICKS, retype={"user": "string"}, key=["user"])
    assert (new.version, new.generation) == (2, 2)
    assert names(new) == names(CLICKS)
    assert new.column("user").id == 5
    assert new.column("user").nullable is False


def test_not_null_can_be_lifted() -> None:
    """A column that may not be null can be allowed to be."""
    assert evolve(CLICKS, nullable=["user"]).column("user").nullable is True


WIDER = [
    ("tinyint", "smallint"),
    ("tinyint", "int"),
    ("tinyint", "bigint"),
    ("smallint", "int"),
    ("smallint", "bigint"),
    ("int", "bigint"),
    ("tinyint", "double"),
    ("smallint", "double"),
    ("int", "double"),
    ("float", "double"),
    ("decimal(10,2)", "decimal(12,2)"),
    ("decimal(10,2)", "decimal(12,4)"),
]


@pytest.mark.parametrize(("old", "new"), WIDER)
def test_widening_keeps_the_id(old: str, new: str) -> None:
    """Each widening of the table is allowed and keeps the column's id."""
    wide = evolve(schema_of(f"a {old}"), widen={"a": new})
    assert (wide.column("a").id, wide.column("a").type, wide.generation) == (1, parse_type(new), 1)


NOT_WIDER = [
    ("bigint", "int"),
    ("bigint", "double"),
    ("int", "float"),
    ("int", "string"),
    ("int", "decimal(20,0)"),
    ("double", "float"),
    ("decimal(10,2)", "decimal(11,4)"),
    ("decimal(10,2)", "decimal(12,1)"),
    ("date", "timestamp"),
    ("timestamp", "timestamp_ntz"),
    ("string", "binary"),
    ("array<int>", "array<bigint>"),
]


@pytest.mark.parametrize(("old", "new"), NOT_WIDER)
def test_what_is_no_widening_points_to_retype(old: str, new: str) -> None:
    """Every other change of type is refused as widening and allowed as a new generation."""
    schema = schema_of(f"a {old}")
    with pytest.raises(SchemaChangeRefused) as raised:
        evolve(schema, widen={"a": new})
    assert raised.value.fix == "use retype, it starts a new generation"
    assert evolve(schema, retype={"a": new}).generation == 2


@given(st.integers(1, 38), st.integers(0, 38), st.integers(1, 38), st.integers(0, 38))
def test_decimals_widen_exactly_when_the_largest_value_fits(
    p: int, s: int, p2: int, s2: int
) -> None:
    """Decimals widen if and only if their largest and their smallest value are still exact."""
    if s > p or s2 > p2 or (p, s) == (p2, s2):
        return
    old, new = pa.decimal128(p, s), pa.decimal128(p2, s2)
    # Not by Arrow's own cast: it lets a product that overflows 128 bits through (15, 0 to 38, 37).
    extremes = [Decimal(10**p - 1).scaleb(-s, CONTEXT), Decimal(1).scaleb(-s, CONTEXT)]
    unscaled = [one.scaleb(s2, CONTEXT) for one in extremes]
    fits = all(one == one.to_integral_value() and one < 10**p2 for one in unscaled)
    assert is_widening(old, new) == fits


@pytest.mark.parametrize(
    ("change", "fact", "fix"),
    [
        ({}, "nothing would change", "add, widen"),
        ({"add": "x int not null"}, "'not null'", "without 'not null'"),
        ({"add": "url string"}, "'url' is there already", "another name"),
        ({"add": "URL string"}, "'URL' is there already", "another name"),
        ({"add": "x int, X int"}, "'X' is there already", "another name"),
        ({"rename": {"url": "at"}}, "'at' is there already", "another name"),
        ({"rename": {"url": "url"}}, "'url' is named so already", "leave it out"),
        ({"retire": ["user"]}, "key column 'user'", "new generation"),
        ({"rename": {"user": "u"}}, "key column 'user'", "new generation"),
        ({"widen": {"user": "double"}}, "key column 'user'", "new generation"),
        ({"nullable": ["user"]}, "key column 'user'", "new generation"),
        ({"retire": ["at"]}, "event time column 'at'", "new topic"),
        ({"rename": {"at": "when"}}, "event time column 'at'", "new topic"),
        ({"retype": {"at": "string"}}, "event time column 'at'", "timestamp"),
        ({"widen": {"user": "int"}}, "is int already", "leave it out"),
        ({"retype": {"user": "int"}}, "is int already", "leave it out"),
        ({"nullable": ["url"]}, "nullable already", "leave it out"),
        ({"widen": {"price": "decimal(12,2)"}, "retire": ["price"]}, "at once", "two changes"),
        ({"retire": ["price", "price"]}, "at once", "two changes"),
    ],
)
def test_a_refused_change_names_the_way_out(change: dict[str, Any], fact: str, fix: str) -> None:
    """Each change that is not allowed says what it is about and what to do instead."""
    with pytest.raises(SchemaChangeRefused) as raised:
        evolve(CLICKS, **change, key=["user"], event_time="at")
    assert fact in raised.value.fact
    assert fix in raised.value.fix


def test_a_key_widens_among_integers() -> None:
    """A key of integers may get more room, as no row changes its partition by that."""
    assert evolve(CLICKS, widen={"user": "bigint"}, key=["user"]).generation == 1


def test_the_last_column_stays() -> None:
    """A schema cannot lose all its columns."""
    with pytest.raises(SchemaChangeRefused):
        evolve(schema_of("a int"), retire=["a"])


def test_reserved_columns_do_not_change() -> None:
    """Reserved columns are neither changed nor made by a rename; other errors keep their kind."""
    schema = schema_of("a int, _weight bigint")
    with pytest.raises(SchemaChangeRefused):
        evolve(schema, retire=["_weight"])
    with pytest.raises(ReservedName):
        evolve(schema, rename={"a": "_a"})
    with pytest.raises(WrongColumn):
        evolve(schema, retire=["b"])
    with pytest.raises(BadSchema):
        evolve(schema, retype={"a": "array<int>"}, key=["a"])


# --- reading old as new ---------------------------------------------------------------------------

OLD = Intake(CLICKS.arrow, place="test")(
    [{"user": 1, "url": "/a", "price": Decimal("1.50")}, {"user": 2}]
)


def upgrade(
    batch: pa.RecordBatch, written: Schema, target: Schema, columns: list[str] | None = None
) -> pa.RecordBatch:
    return Upgrade(written, target, columns)(batch)


def test_nothing_changed_is_the_same_object() -> None:
    """A batch is given back itself when its version is the one asked for."""
    assert upgrade(OLD, CLICKS, CLICKS) is OLD
    later = evolve(evolve(CLICKS, add="x int"), retire=["x"])
    assert upgrade(OLD, CLICKS, later) is OLD


def test_old_rows_have_nulls_and_wider_values() -> None:
    """Added columns are null, widened ones have the same values, retired ones are gone."""
    new = evolve(
        CLICKS, add="x int", widen={"user": "bigint"}, retire=["at"], rename={"url": "link"}
    )
    batch = upgrade(OLD, CLICKS, new)
    assert batch.schema == new.arrow
    assert batch.to_pylist() == [
        {"user": 1, "link": None, "price": Decimal("1.50"), "x": None},
        {"user": 2, "link": None, "price": None, "x": None},
    ]
    assert batch.column("price").buffers()[1].address == OLD.column("price").buffers()[1].address


def test_retired_columns_can_be_asked_for() -> None:
    """A retired column named in `columns` gives old values in old rows, and nulls in later ones."""
    new = evolve(CLICKS, rename={"url": "link"})
    assert upgrade(OLD, CLICKS, new, ["url", "user"]).to_pylist() == [
        {"url": "/a", "user": 1},
        {"url": None, "user": 2},
    ]
    rows = Intake(new.arrow, place="test")({"user": 3, "link": "/b"})
    assert upgrade(rows, new, new, ["url", "link"]).to_pylist() == [{"url": None, "link": "/b"}]


def test_the_newest_of_several_retired_names_is_meant() -> None:
    """A live column wins over retired ones of its name, a later retired one over an earlier."""
    second = evolve(evolve(CLICKS, retire=["price"]), add="price string")
    assert upgrade(OLD, CLICKS, second, ["price"]).to_pylist() == [{"price": None}] * 2
    third = evolve(second, retire=["price"])
    assert upgrade(OLD, CLICKS, third, ["price"]).schema.field("price").type == pa.string()


def test_a_name_that_came_back_is_another_column() -> None:
    """A column retired and added again, even of the same type, has no values in old rows."""
    again = evolve(evolve(CLICKS, retire=["price"]), add="price decimal(10,2)")
    assert again.arrow == CLICKS.arrow
    assert upgrade(OLD, CLICKS, again).column("price").to_pylist() == [None, None]


def test_only_the_needed_columns_must_be_there() -> None:
    """A batch of the old rows with only the columns that are used is enough."""
    new = evolve(CLICKS, add="x int")
    plan = Upgrade(CLICKS, new, ["x", "url"])
    assert plan(OLD.select(["url"])).to_pylist() == [
        {"x": None, "url": "/a"},
        {"x": None, "url": None},
    ]
    none = Upgrade(CLICKS, new, [])(OLD)
    assert (none.num_rows, none.num_columns) == (2, 0)


def test_generations_are_not_mixed() -> None:
    """Rows of another generation, or of a later version, are not readable as this one."""
    new = evolve(CLICKS, retype={"url": "int"})
    with pytest.raises(SchemaChangeRefused):
        upgrade(OLD, CLICKS, new)
    with pytest.raises(SchemaChangeRefused):
        upgrade(OLD, evolve(CLICKS, add="x int"), CLICKS)
    with pytest.raises(WrongColumn):
        upgrade(OLD, CLICKS, CLICKS, ["nothing"])


WIDENED = dict(WIDER)


@settings(max_examples=60)
@given(st.data())
def test_a_random_history_reads_as_a_list_of_dicts(data: st.DataObject) -> None:
    """After any changes, rows of every version read under the newest as a plain model says."""
    schema = schema_of("c1 int not null, c2 tinyint, c3 string, c4 decimal(10,2)")
    fresh = 5
    written: list[tuple[Schema, pa.RecordBatch, dict[int, Any]]] = []
    for step in range(data.draw(st.integers(1, 6))):
        values = {c.id: _value(c.type, step) for c in schema.live}
        row = {c.name: values[c.id] for c in schema.live}
        written.append((schema, Intake(schema.arrow, place="test")(row), values))
        column = data.draw(st.sampled_from(schema.live))
        what = data.draw(st.sampled_from(["add", "retire", "rename", "widen", "again"]))
        wider = WIDENED.get(ddl_type(column.type))
        if what == "retire" and len(schema.live) > 1:
            schema = evolve(schema, retire=[column.name])
        elif what == "rename":
            schema = evolve(schema, rename={column.name: f"c{fresh}"})
        elif what == "again":
            again = f"{column.name} {ddl_type(column.type)}"
            schema = evolve(schema, retire=[column.name], add=again)
        elif what == "widen" and wider is not None:
            schema = evolve(schema, widen={column.name: wider})
        else:
            schema = evolve(schema, add=f"c{fresh} int")
        fresh += 1
    for version, batch, values in written:
        expected = {c.name: values.get(c.id) for c in schema.live}
        result = upgrade(batch, version, schema)
        result.validate(full=True)
        assert result.schema == schema.arrow
        assert result.to_pylist() == [expected]


def _value(arrow: pa.DataType, step: int) -> Any:
    if pa.types.is_decimal(arrow):
        return Decimal(step)
    return str(step) if arrow == pa.string() else step
