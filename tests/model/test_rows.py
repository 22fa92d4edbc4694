"""Rows on their way into a topic.

These tests catch a value that is changed, cut or guessed, a row that gets in and should not, and an
error that names the wrong column or row. They use the versions of pandas and Polars that are
installed, and cannot catch what other versions export.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import BadRows, BadSchema, MissingKey, WrongColumn, WrongType
from headrace.model.rows import Intake, opaque_rows, opaque_schema
from headrace.model.schema import schema_of
from tests.model.strategies import SCALARS, TYPES, large, values_of

CLICKS = schema_of("user bigint not null, url string, at timestamp").arrow
NOON = dt.datetime(2024, 5, 1, 12, tzinfo=dt.UTC)
ROWS: list[dict[str, Any]] = [
    {"user": 1, "url": "/a", "at": NOON},
    {"user": 2, "url": None, "at": None},
]


def take(rows: Any, ddl: str | pa.Schema = CLICKS, **defaults: object) -> list[dict[str, Any]]:
    schema = schema_of(ddl).arrow if isinstance(ddl, str) else ddl
    batch = Intake(schema, place="topic 't'", defaults=defaults)(rows)
    batch.validate(full=True)
    assert batch.schema.equals(schema, check_metadata=True)
    result: list[dict[str, Any]] = batch.to_pylist()
    return result


def one(value: Any, ddl: str) -> Any:
    """Take one value in as a dict, and give what became of it."""
    return take({"a": value}, f"a {ddl}")[0]["a"]


# --- the ways in ----------------------------------------------------------------------------------


class OnlyArray:
    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch

    def __arrow_c_array__(self, requested_schema: object = None) -> Any:
        return self.batch.__arrow_c_array__(requested_schema)


class OnlyStream:
    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        return self.table.__arrow_c_stream__(requested_schema)


TABLE = pa.Table.from_pylist(ROWS, schema=CLICKS)
BATCH = TABLE.to_batches()[0]
WAYS: dict[str, Any] = {
    "dicts": ROWS,
    "generator": lambda: (row for row in ROWS),
    "batch": BATCH,
    "batch in other order": BATCH.select(["at", "url", "user"]),
    "table": TABLE,
    "table of chunks": pa.concat_tables([TABLE.slice(0, 1), TABLE.slice(1)]),
    "slice": pa.concat_tables([TABLE, TABLE]).combine_chunks().slice(2, 2),
    "large types": TABLE.cast(
        pa.schema(
            [("user", pa.int32()), ("url", pa.large_string()), ("at", pa.timestamp("ms", "UTC"))]
        )
    ),
    "dictionary": TABLE.set_column(1, "url", pc.dictionary_encode(TABLE["url"])),
    "reader": lambda: TABLE.to_reader(),
    "struct array": BATCH.to_struct_array(),
    "C array": OnlyArray(BATCH),
    "C stream": OnlyStream(TABLE),
    "pandas": TABLE.to_pandas(),
    "pandas with arrow types": TABLE.to_pandas(types_mapper=pd.ArrowDtype),
    "pandas with an index": TABLE.to_pandas().set_index("user"),
    "polars": pl.from_arrow(TABLE),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_gives_the_same_rows(way: str) -> None:
    """Dicts, Arrow, pandas, Polars and the C interfaces give the same batch."""
    rows = WAYS[way]
    assert take(rows() if callable(rows) else rows) == ROWS


def test_a_batch_that_fits_is_given_back_itself() -> None:
    """A record batch of the very schema is not copied; metadata of others is not kept."""
    assert Intake(CLICKS, place="t")(BATCH) is BATCH
    tagged = BATCH.replace_schema_metadata({"pandas": "x"})
    assert Intake(CLICKS, place="t")(tagged).schema.metadata is None


def test_one_dict_is_one_row_and_no_rows_are_fine() -> None:
    """A dict is one row; an empty list, table or DataFrame is none."""
    assert take(ROWS[0]) == ROWS[:1]
    assert take([]) == []
    assert take(TABLE.slice(0, 0)) == []
    assert take(TABLE.to_pandas().iloc[:0]) == []
    assert take(pl.from_arrow(TABLE.slice(0, 0))) == []


@pytest.mark.parametrize(
    "rows",
    [None, 3, "text", b"bytes", [1], [ROWS[0], "x"], pa.array([1]), pd.Series([1]), object()],
)
def test_what_is_not_rows_is_refused(rows: Any) -> None:
    """Other things are BadRows, with what is accepted."""
    with pytest.raises(BadRows) as raised:
        take(rows)
    assert raised.value.fix


def test_a_lazy_frame_is_told_to_collect() -> None:
    """A Polars LazyFrame is refused with the call that makes rows of it."""
    with pytest.raises(BadRows, match="collect"):
        take(pl.LazyFrame({"user": [1]}))


# --- columns --------------------------------------------------------------------------------------


def test_missing_columns_are_null_or_default() -> None:
    """A missing nullable column is null, one with a default has it; a given null stays null."""
    ddl = "a int, _weight bigint"
    for rows in (
        {"a": 1},
        pa.table({"a": [1]}),
        pl.DataFrame({"a": [1]}),
        pd.DataFrame({"a": [1]}),
    ):
        assert take(rows, ddl, _weight=1) == [{"a": 1, "_weight": 1}]
    assert take([{"_weight": -1}, {"a": 2}], ddl, _weight=1) == [
        {"a": None, "_weight": -1},
        {"a": 2, "_weight": 1},
    ]
    with pytest.raises(MissingKey):
        take({"a": 1, "_weight": None}, ddl, _weight=1)


@pytest.mark.parametrize("way", [dict, pa.table, pl.DataFrame, pd.DataFrame])
def test_a_column_without_null_must_be_there(way: Any) -> None:
    """A missing column that may not be null is named."""
    rows = way({"url": "/"} if way is dict else {"url": ["/"]})
    with pytest.raises(MissingKey) as raised:
        take(rows)
    assert raised.value.details["column"] == "user"


@pytest.mark.parametrize("way", [pa.table, pl.DataFrame, pd.DataFrame])
def test_an_unknown_column_is_refused_with_its_neighbours(way: Any) -> None:
    """An unknown column is refused, with the nearest names."""
    with pytest.raises(WrongColumn, match="did you mean 'url'"):
        take(way({"user": [1], "urls": ["/"]}))


def test_an_unknown_key_in_any_row_is_refused() -> None:
    """A key that no column has is refused in whichever row it stands, with the row."""
    with pytest.raises(WrongColumn) as raised:
        take([{"user": 1}, {"user": 2, "Url": "/"}])
    assert raised.value.place == "topic 't', column 'Url', row 1"
    assert raised.value.details["row"] == 1
    assert "'url'" in raised.value.fix


def test_a_column_that_comes_twice_is_refused() -> None:
    """Two columns of one name are refused, in Arrow and in pandas."""
    with pytest.raises(BadRows, match="'user' comes twice"):
        take(pa.table([[1], [2]], names=["user", "user"]))
    with pytest.raises(BadRows, match="'user' comes twice"):
        take(pd.DataFrame([[1, 2]], columns=["user", "user"]))


@pytest.mark.parametrize("way", ["dicts", "batch", "fitting batch", "table", "polars", "pandas"])
def test_null_where_none_may_be_is_named_with_its_row(way: str) -> None:
    """Null in a column without null is MissingKey with column and row, on every way in."""
    rows = [{"user": n if n != 7 else None, "url": "/", "at": None} for n in range(10)]
    table = pa.Table.from_pylist(rows, schema=CLICKS)
    given_rows = {
        "dicts": rows,
        "batch": pa.record_batch({"user": [r["user"] for r in rows]}),
        "fitting batch": table.to_batches()[0],
        "table": table,
        "polars": pl.DataFrame({"user": [r["user"] for r in rows]}),
        "pandas": pd.DataFrame({"user": [r["user"] for r in rows]}),
    }[way]
    with pytest.raises(MissingKey) as raised:
        take(given_rows)
    assert raised.value.details == {"column": "user", "row": 7}


# --- Python values --------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "ddl", "result"),
    [
        (True, "boolean", True),
        (np.bool_(True), "boolean", True),
        (127, "tinyint", 127),
        (np.int32(5), "bigint", 5),
        (Colour.RED, "int", 1),
        (3, "double", 3.0),
        (np.float32(0.5), "double", 0.5),
        (0.1, "float", float(np.float32(0.1))),
        (Decimal("1.50"), "decimal(3,1)", Decimal("1.5")),
        (7, "decimal(3,1)", Decimal("7.0")),
        (Text("x"), "string", "x"),
        (bytearray(b"x"), "binary", b"x"),
        (memoryview(b"x"), "binary", b"x"),
        (dt.date(2024, 1, 1), "date", dt.date(2024, 1, 1)),
        (dt.datetime(2024, 5, 1, 12), "timestamp", NOON),
        (dt.datetime(2024, 5, 1, 14, tzinfo=ZoneInfo("Europe/Berlin")), "timestamp", NOON),
        (pd.Timestamp("2024-05-01 12:00"), "timestamp", NOON),
        (np.datetime64("2024-05-01T12:00", "us"), "timestamp", NOON),
        (dt.datetime(2024, 5, 1), "timestamp_ntz", dt.datetime(2024, 5, 1)),
        (dt.time(1, 2), "time", dt.time(1, 2)),
        (dt.timedelta(1), "interval day to second", dt.timedelta(1)),
        (pd.Timedelta("1 day"), "interval day to second", dt.timedelta(1)),
        ((1, None), "array<int>", [1, None]),
        (np.array([1, 2]), "array<int>", [1, 2]),
        ({"x": 1}, "struct<x int, y string>", {"x": 1, "y": None}),
        ({"x": dt.datetime(2024, 5, 1, 12)}, "map<string,timestamp>", [("x", NOON)]),
        ([("x", 1)], "map<string,int>", [("x", 1)]),
        ([{"x": [1]}], "array<struct<x array<int>>>", [{"x": [1]}]),
        (None, "array<int>", None),
    ],
)
def test_python_values_are_taken_exactly(value: Any, ddl: str, result: Any) -> None:
    """Values of the column's own kind are taken, alone and beside a plain one."""
    taken = one(value, ddl)
    assert taken == result
    assert type(taken) is type(result) or isinstance(taken, dt.datetime)


@pytest.mark.parametrize(
    ("value", "ddl", "fix"),
    [
        (True, "int", "int(value)"),
        (np.bool_(True), "int", "int(value)"),
        (True, "double", "int(value)"),
        (True, "decimal", "int(value)"),
        (1, "boolean", ""),
        ("1", "int", "convert it first"),
        ("1.0", "double", "convert it first"),
        (1.0, "int", ""),
        (128, "tinyint", ""),
        (2**63, "bigint", ""),
        (2**53 + 1, "double", ""),
        (1e39, "float", "use double"),
        (1.5, "decimal(3,1)", "Decimal(str(value))"),
        (Decimal("1.55"), "decimal(3,1)", ""),
        (Decimal(1000), "decimal(3,1)", ""),
        (Decimal("NaN"), "decimal(3,1)", ""),
        (1, "string", "str(value)"),
        (b"x", "string", "decode"),
        ("\ud800", "string", ""),
        ("x", "binary", "encode"),
        (NOON, "date", "value.date()"),
        ("2024-05-01", "date", "datetime.date.fromisoformat"),
        (pd.NaT, "timestamp", "give a datetime.datetime"),
        pytest.param(10**5000, "bigint", "", id="thousands of digits"),
        (pd.Timestamp("2024-05-01"), "date", "value.date()"),
        ("2024-05-01", "timestamp", "datetime.datetime.fromisoformat"),
        (1714564800, "timestamp", "datetime.datetime"),
        (dt.date(2024, 5, 1), "timestamp", "datetime.datetime"),
        (NOON, "timestamp_ntz", "replace(tzinfo=None)"),
        (pd.Timestamp(1), "timestamp", "microseconds"),
        (pd.Timedelta(1), "interval day to second", "microseconds"),
        (1, "interval day to second", "timedelta"),
        ("12:00", "time", "datetime.time.fromisoformat"),
        (dt.time(1, tzinfo=dt.UTC), "time", "replace(tzinfo=None)"),
        ([1], "int", "list of dicts"),
        ("ab", "array<string>", ""),
        ({"x"}, "array<string>", ""),
        ([1, "2"], "array<int>", "convert it first"),
        ([300], "array<tinyint>", ""),
        ([1e39], "array<float>", "use double"),
        (np.float64(1e39), "float", "use double"),
        ([1], "struct<x int>", ""),
        ({"x": True}, "struct<x int>", "int(value)"),
        ({"x": 1}, "map<int,int>", "convert it first"),
        (["ab"], "map<string,string>", ""),
    ],
)
def test_other_values_are_refused_with_column_row_and_value(value: Any, ddl: str, fix: str) -> None:
    """A value of another kind, or one that does not fit, is named with its column and row."""
    good = {"a": None}
    with pytest.raises(WrongType) as raised:
        take([good, good, {"a": value}, good, {"a": value}], f"a {ddl}")
    assert raised.value.details["column"] == "a"
    assert raised.value.details["row"] == 2
    assert raised.value.place.startswith("topic 't', column 'a'")
    assert fix in raised.value.fix


def test_a_refusal_inside_a_value_names_its_path() -> None:
    """What is wrong inside a nested value is named by its path."""
    with pytest.raises(WrongType) as raised:
        take({"a": [{"x": 1}, {"x": "1"}]}, "a array<struct<x int>>")
    assert "(a[1].x), row 0" in raised.value.place
    with pytest.raises(WrongColumn, match="no field 'y'"):
        take({"a": {"y": 1}}, "a struct<x int>")


@pytest.mark.parametrize(
    ("value", "ddl"),
    [
        ({"x": None}, "struct<x int not null>"),
        ({}, "struct<x int not null>"),
        ([{"x": 1}, {"x": None}], "array<struct<x int not null>>"),
        ({"k": {"x": None}}, "map<string,struct<x int not null>>"),
        ([(None, 1)], "map<string,int>"),
        ({"y": {"x": None}}, "struct<y struct<x int not null>>"),
    ],
)
def test_null_inside_a_value_is_refused_where_none_may_be(value: Any, ddl: str) -> None:
    """Not null holds inside structs too; a null struct has no fields to miss."""
    with pytest.raises(MissingKey) as raised:
        take([{"a": None}, {"a": value}], f"a {ddl}")
    assert raised.value.details["row"] == 1


def test_errors_in_long_lists_are_found() -> None:
    """The first of several bad rows among thousands is the one that is named."""
    rows = [{"a": n} for n in range(5000)]
    rows[3210] = {"a": 2**31}
    rows[4000] = {"a": 2**31}
    with pytest.raises(WrongType) as raised:
        take(rows, "a int")
    assert raised.value.details["row"] == 3210


@settings(max_examples=100)
@given(st.data(), SCALARS)
def test_random_values_come_back_as_given(data: st.DataObject, arrow: pa.DataType) -> None:
    """Dicts of any scalar type come back the same, and so do they as an Arrow table."""
    values = data.draw(st.lists(st.none() | values_of(arrow), max_size=20))
    schema = pa.schema([("a", arrow)])
    batch = Intake(schema, place="t")([{"a": value} for value in values])
    assert batch.column(0).equals(pa.array(values, arrow)) or _same(batch.column(0), values)
    assert Intake(schema, place="t")(pa.table({"a": batch.column(0)})).equals(batch) or (
        pa.types.is_floating(arrow)
    )


@settings(max_examples=150)
@given(st.data(), TYPES)
def test_random_nested_values_come_back_as_given(data: st.DataObject, arrow: pa.DataType) -> None:
    """Nested values come back the same, from dicts, and from slices of Arrow of other types."""
    values = data.draw(st.lists(st.none() | values_of(arrow), max_size=6))
    schema = pa.schema([("a", arrow)])
    batch = Intake(schema, place="t")([{"a": value} for value in values])
    batch.validate(full=True)
    assert _same(batch.column(0), pa.array(values, arrow).to_pylist())
    other = pa.array([*values, *values], large(arrow)).slice(len(values))
    again = Intake(schema, place="t")(pa.table({"a": other}))
    again.validate(full=True)
    assert _same(again.column(0), batch.column(0).to_pylist())


def _same(column: pa.Array, values: list[Any]) -> bool:
    """Compare floats, where NaN is the same as NaN."""
    return repr(column.to_pylist()) == repr(values)


# --- Arrow ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "ddl", "result"),
    [
        (pa.array([1, None], pa.int64()), "tinyint", [1, None]),
        (pa.array([2**63 - 1], pa.uint64()), "bigint", [2**63 - 1]),
        (pa.array([1], pa.int64()), "double", [1.0]),
        (pa.array([0.5], pa.float64()), "float", [0.5]),
        (pa.array([0.5], pa.float16()), "double", [0.5]),
        (pa.array([3], pa.int64()), "decimal(3,2)", [Decimal("3.00")]),
        (pa.array([Decimal("1.10")]), "decimal(2,1)", [Decimal("1.1")]),
        (pa.array([Decimal("1.1")], pa.decimal256(50, 1)), "decimal(4,2)", [Decimal("1.10")]),
        (pa.array(["x"], pa.string_view()), "string", ["x"]),
        (pa.array([b"xy"], pa.binary(2)), "binary", [b"xy"]),
        (pa.array([dt.date(2024, 1, 1)], pa.date64()), "date", [dt.date(2024, 1, 1)]),
        (
            pa.array([10**9], pa.timestamp("ns")),
            "timestamp_ntz",
            [dt.datetime(1970, 1, 1, 0, 0, 1)],
        ),
        (
            pa.array([0], pa.timestamp("s", "Asia/Tokyo")),
            "timestamp",
            [dt.datetime(1970, 1, 1, tzinfo=dt.UTC)],
        ),
        (pa.array([0], pa.timestamp("s")), "timestamp", [dt.datetime(1970, 1, 1, tzinfo=dt.UTC)]),
        (pa.array([1], pa.time32("s")), "time", [dt.time(0, 0, 1)]),
        (pa.array([1], pa.duration("s")), "interval day to second", [dt.timedelta(seconds=1)]),
        (pa.nulls(2), "array<int>", [None, None]),
        (pc.run_end_encode(pa.array([5, 5])), "bigint", [5, 5]),
        (
            pa.array([[1], None, [2, 3]], pa.large_list(pa.int64())),
            "array<int>",
            [[1], None, [2, 3]],
        ),
        (pa.array([[1, 2], None], pa.list_(pa.int8(), 2)), "array<int>", [[1, 2], None]),
        (pa.array([[1], None], pa.list_view(pa.int8())), "array<int>", [[1], None]),
        (
            pa.array([{"y": 1}, None], pa.struct([("y", pa.int8())])),
            "struct<x string, y int>",
            [{"x": None, "y": 1}, None],
        ),
        (
            pa.array([[("k", 1)], None, []], pa.map_(pa.large_string(), pa.int8())),
            "map<string,int>",
            [[("k", 1)], None, []],
        ),
    ],
)
def test_arrow_columns_are_converted_where_nothing_is_lost(
    column: pa.Array, ddl: str, result: list[Any]
) -> None:
    """Other encodings, widths and units become the topic's; slices too."""
    padded = pa.concat_arrays([column, column, column]) if _concatenates(column) else column
    some = padded.slice(len(column), len(column)) if padded is not column else column
    assert [row["a"] for row in take(pa.table({"a": some}), f"a {ddl}")] == result


def _concatenates(column: pa.Array) -> bool:
    return not pa.types.is_run_end_encoded(column.type)


@pytest.mark.parametrize(
    ("column", "ddl", "row"),
    [
        (pa.array([1, 200, 300]), "tinyint", 1),
        (pa.array([1, 2**53 + 1]), "double", 1),
        (pa.array([0.5, None, float("nan"), 0.1]), "float", 3),
        (pa.array([0.5, 1e300]), "float", 1),
        (pa.array([1, 100]), "decimal(3,2)", 1),
        (pa.array([Decimal("1.10"), Decimal("1.11")]), "decimal(2,1)", 1),
        (pa.array([1000, 1001], pa.timestamp("ns")), "timestamp", 1),
        (pa.array([0, 2**60], pa.timestamp("s")), "timestamp", 1),
        (pa.array([0, 1], pa.date64()), "date", 1),
        (pa.array([[1], None, [1, 300]]), "array<tinyint>", 2),
        (pa.array([{"x": 1}, {"x": 300}]), "struct<x tinyint>", 1),
        (
            pa.array([[("a", 1)], [], [("b", 300)]], pa.map_(pa.string(), pa.int16())),
            "map<string,tinyint>",
            2,
        ),
    ],
)
def test_an_arrow_value_that_would_change_is_named(column: pa.Array, ddl: str, row: int) -> None:
    """A value that would be lost or rounded is WrongType with its row."""
    for given_rows, shift in ((column, 0), (pa.concat_arrays([column, column]).slice(1), -1)):
        with pytest.raises(WrongType) as raised:
            take(pa.table({"a": given_rows}), f"a {ddl}")
        assert raised.value.details["row"] == row + shift
        assert raised.value.details["column"] == "a"


@pytest.mark.parametrize(
    ("column", "ddl"),
    [
        (pa.array([True]), "int"),
        (pa.array([1]), "boolean"),
        (pa.array(["1"]), "int"),
        (pa.array([1]), "string"),
        (pa.array([1.0]), "int"),
        (pa.array([1.0]), "decimal"),
        (pa.array(["x"]), "binary"),
        (pa.array([b"x"]), "string"),
        (pa.array([0], pa.timestamp("us")), "date"),
        (pa.array([0], pa.date32()), "timestamp"),
        (pa.array([0], pa.timestamp("us", "UTC")), "timestamp_ntz"),
        (pa.array([0]), "timestamp"),
        (pa.array(["2024-01-01"]), "timestamp"),
        (pa.array([0], pa.time64("us")), "interval day to second"),
        (pa.array([1]), "array<int>"),
        (pa.array([["1"]]), "array<int>"),
    ],
)
def test_arrow_types_are_never_guessed(column: pa.Array, ddl: str) -> None:
    """A column of another kind is refused as a whole, with a fix."""
    with pytest.raises(WrongType) as raised:
        take(pa.table({"a": column}), f"a {ddl}")
    assert raised.value.fix


def test_extension_types_are_refused() -> None:
    """An extension type means something that we would lose."""
    column = pa.array([b"0123456789abcdef"], pa.binary(16)).cast(pa.uuid())
    with pytest.raises(BadRows, match="extension"):
        take(pa.table({"a": column}), "a binary")


def test_fields_of_structs_are_taken_by_name() -> None:
    """Unknown fields inside Arrow structs are refused, not dropped."""
    with pytest.raises(WrongColumn, match="did you mean 'name'"):
        take(pa.table({"a": [{"nam": "x"}]}), "a struct<name string>")
    schema = schema_of("a struct<x int not null>").arrow
    column = pa.array([{"x": 1}, None, {"x": None}], pa.struct([("x", pa.int32())]))
    assert take(pa.table({"a": column.slice(0, 2)}), schema) == [{"a": {"x": 1}}, {"a": None}]
    with pytest.raises(MissingKey) as raised:
        take(pa.table({"a": column}), schema)
    assert raised.value.details["row"] == 2


# --- pandas and Polars ----------------------------------------------------------------------------


def test_missing_values_of_pandas_are_null() -> None:
    """NaN, NaT, NA and None in a DataFrame are null, in every type of column."""
    frame = pd.DataFrame(
        {
            "i": [1, np.nan],
            "f": [0.5, np.nan],
            "s": ["x", np.nan],
            "b": [True, None],
            "t": [pd.Timestamp("2024-05-01 12:00"), pd.NaT],
            "n": pd.array([1, pd.NA], dtype="Int64"),
            "c": pd.Categorical(["x", None]),
            "l": [[1], None],
        }
    )
    ddl = "i int, f double, s string, b boolean, t timestamp, n bigint, c string, l array<int>"
    first, second = take(frame, ddl)
    assert first == {"i": 1, "f": 0.5, "s": "x", "b": True, "t": NOON, "n": 1, "c": "x", "l": [1]}
    assert set(second.values()) == {None}


@pytest.mark.parametrize("missing", [np.nan, pd.NaT, None])
@pytest.mark.parametrize("ddl", ["string", "timestamp", "decimal(5,2)", "array<int>"])
def test_a_column_of_pandas_without_any_value_is_null(missing: Any, ddl: str) -> None:
    """pandas makes floats of it, whatever was meant to come (a column of CSV that is empty)."""
    frame = pd.DataFrame({"i": [1, 2], "x": [missing, missing]})
    assert [row["x"] for row in take(frame, f"i int, x {ddl}")] == [None, None]
    assert take(frame[:0], f"i int, x {ddl}") == []


def test_nan_is_a_value_elsewhere() -> None:
    """NaN in dicts, Arrow and Polars stays NaN."""
    nan = float("nan")
    for rows in ({"a": nan}, pa.table({"a": [nan]}), pl.DataFrame({"a": [nan]})):
        assert np.isnan(take(rows, "a double")[0]["a"])


@pytest.mark.parametrize(
    ("values", "ddl", "row"),
    [
        ([1.0, np.nan, 1.5], "int", 2),
        (["x", np.nan, 3], "string", 2),
        ([1, "2"], "int", 1),
        ([0.5, 0.1], "float", 1),
        (pd.to_datetime([1_000, 1_001], unit="ns"), "timestamp", 1),
    ],
)
def test_pandas_values_that_do_not_fit_are_named(values: Any, ddl: str, row: int) -> None:
    """Columns of objects and columns of numbers name the row that is wrong."""
    with pytest.raises(WrongType) as raised:
        take(pd.DataFrame({"a": values}, index=range(10, 10 + len(values))), f"a {ddl}")
    assert raised.value.details["row"] == row


def test_the_index_of_pandas() -> None:
    """A named index is a column; an unnamed one is left out."""
    frame = pd.DataFrame({"url": ["/"]}, index=pd.Index([9], name="user"))
    assert take(frame)[0]["user"] == 9
    with pytest.raises(WrongColumn):
        take(pd.DataFrame({"user": [1]}, index=pd.Index([9], name="other")))
    two = pd.MultiIndex.from_tuples([(7, 1)], names=["user", None])
    assert take(pd.DataFrame({"url": ["/"]}, index=two))[0]["user"] == 7
    both = pd.DataFrame({"user": [1]}, index=pd.Index([9], name="user"))
    with pytest.raises(BadRows):
        take(both)


def test_types_of_polars() -> None:
    """The types that Polars has of its own are taken as what they are."""
    frame = pl.DataFrame(
        {
            "c": pl.Series(["x", None], dtype=pl.Categorical),
            "e": pl.Series(["x", None], dtype=pl.Enum(["x"])),
            "d": [Decimal("1.5"), None],
            "t": [dt.time(1), None],
            "l": [[1], None],
            "s": [{"x": 1}, None],
            "u": pl.Series([1, None], dtype=pl.UInt64),
        }
    )
    ddl = "c string, e string, d decimal(5,2), t time, l array<int>, s struct<x int>, u bigint"
    first, second = take(frame, ddl)
    assert first == {
        "c": "x",
        "e": "x",
        "d": Decimal("1.50"),
        "t": dt.time(1),
        "l": [1],
        "s": {"x": 1},
        "u": 1,
    }
    assert set(second.values()) == {None}


def test_polars_in_chunks() -> None:
    """A frame that Polars keeps in several chunks is one batch."""
    parts = [
        pl.DataFrame({"user": [n], "url": pl.Series([f"long enough not to be inlined {n}"])})
        for n in range(3)
    ]
    frame = pl.concat(parts, rechunk=False).with_columns(pl.col("url").cast(pl.Categorical))
    assert [row["url"][-1] for row in take(frame)] == ["0", "1", "2"]
    assert [row["url"][-1] for row in take(pl.concat(parts, rechunk=False))] == ["0", "1", "2"]
    assert take(pl.concat(parts)[1:2])[0]["user"] == 1


# --- opaque values --------------------------------------------------------------------------------


def opaque(kind: str, rows: Any) -> list[tuple[Any, Any]]:
    batch = opaque_rows(kind, rows)
    assert batch.schema == opaque_schema(kind)
    return [(row["key"], row["value"]) for row in batch.to_pylist()]


def test_bare_values_have_no_key_and_tuples_have_one() -> None:
    """A value stands alone, or as (key, value); one of them needs no list around it."""
    assert opaque("bytes", [b"v", (b"k", b"w"), (b"k", None)]) == [
        (None, b"v"),
        (b"k", b"w"),
        (b"k", None),
    ]
    assert opaque("bytes", b"v") == [(None, b"v")]
    assert opaque("text", ("k", "v")) == [("k", "v")]
    assert opaque("text", iter(["a", "b"])) == [(None, "a"), (None, "b")]
    assert opaque("text", []) == []


def test_json_values_are_encoded() -> None:
    """Python values become compact JSON text; bytes are JSON text already; None is no value."""
    rows = [{"a": [1, None]}, "text", 1.5, ("k", True), [1, 2], b' {"raw": 1} ', None, "ü"]
    assert opaque("json", rows) == [
        (None, '{"a":[1,null]}'),
        (None, '"text"'),
        (None, "1.5"),
        ("k", "true"),
        (None, "[1,2]"),
        (None, ' {"raw": 1} '),
        (None, None),
        (None, '"ü"'),
    ]
    assert opaque("json", {"key": 1, "value": 2}) == [(None, '{"key":1,"value":2}')]


def test_columns_of_keys_and_values_are_taken() -> None:
    """Arrow and DataFrames with key and value are taken as they are; a key may be left out."""
    table = pa.table({"key": ["a", None], "value": ['{"x": 1}', None]})
    assert opaque("json", table) == [("a", '{"x": 1}'), (None, None)]
    assert opaque("text", pl.DataFrame({"value": ["x"]})) == [(None, "x")]
    assert opaque("text", pd.DataFrame({"value": ["x"]})) == [(None, "x")]
    with pytest.raises(WrongColumn):
        opaque("text", pa.table({"val": ["x"]}))


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("bytes", [b"a", "b"]),
        ("text", ["a", b"b"]),
        ("text", ["a", {"b": 1}]),
        ("bytes", [b"a", ("k", b"b")]),
        ("json", [1, float("nan")]),
        ("json", [1, {1, 2}]),
        ("json", [1, b"{"]),
        ("json", [1, b"\xff"]),
        ("json", [1, (7, 1)]),
        ("json", [1, "\ud800"]),
        ("json", pa.table({"value": ["1", "{x}"]})),
        ("json", pa.table({"value": ["1", "NaN"]})),
        ("json", pa.table({"value": ["1", ""]})),
        ("json", pa.table({"value": ["1", "[" * 100_000]})),
        ("json", pd.DataFrame({"value": ["1", "{"]})),
    ],
)
def test_other_opaque_values_are_refused_with_their_row(kind: str, rows: Any) -> None:
    """A value of another kind, or text that is not JSON, is WrongType with its row."""
    with pytest.raises(WrongType) as raised:
        opaque(kind, rows)
    assert raised.value.details["row"] == 1


def test_long_numbers_are_json() -> None:
    """A number of any length is valid JSON text."""
    assert opaque("json", pa.table({"value": ["9" * 10_000]}))


def test_other_kinds_and_tuples_are_refused() -> None:
    """There are three kinds of opaque values, and tuples have two parts."""
    with pytest.raises(BadSchema, match="did you mean 'json'"):
        opaque_schema("jsn")
    with pytest.raises(BadRows, match="row 1"):
        opaque("text", ["a", ("k", "v", "x")])


def test_an_intake_can_be_kept() -> None:
    """One Intake takes any number of rows, of any kind, one after the other."""
    intake = Intake(CLICKS, place="t")

    def stream() -> Iterator[dict[str, Any]]:
        yield from ROWS

    ways: list[Any] = [ROWS, TABLE, BATCH, stream()]
    for rows in ways:
        assert intake(rows).to_pylist() == ROWS
