"""Values between a topic and JSON: nothing is lost, nothing is guessed."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.cli.input import Line, LineIntake, lines_of, raw_members
from headrace.cli.output import NdjsonWriter
from headrace.derived.postgres_text import from_json
from headrace.model.ddl import parse_type
from headrace.model.json_values import json_values
from headrace.model.rows import opaque_schema
from headrace.model.schema import schema_of
from headrace.model.topic import Topic
from headrace.sources.postgres.values import printed
from tests.model.strategies import TYPES, values_of


def topic_of(schema: str | pa.Schema, value: str = "columns") -> Topic:
    made = schema_of(opaque_schema(value) if value != "columns" else schema)
    return Topic(1, "t", "events", value, (), None, 1, 0, (made,))


def written(topic: Topic, batch: pa.RecordBatch) -> list[Line]:
    stream = io.BytesIO()
    NdjsonWriter(stream, raw_json=topic.value == "json").write(batch, 1)
    lines = stream.getvalue().split(b"\n")[:-1]
    return [Line(number, data) for number, data in enumerate(lines, start=1)]


def intake(topic: Topic, lines: list[Line]) -> Any:
    return LineIntake(topic)(lines)


def taken(schema: str, *lines: str) -> Any:
    return intake(topic_of(schema), [Line(i, t.encode()) for i, t in enumerate(lines, 1)])


@st.composite
def columns(draw: st.DrawFn) -> pa.Array:
    kind = draw(TYPES)
    values = draw(st.lists(st.none() | values_of(kind), min_size=1, max_size=4))
    return pa.array(values, kind)


@settings(max_examples=150, deadline=None)
@given(columns(), st.integers(0, 3))
def test_what_read_prints_append_takes_back(column: pa.Array, start: int) -> None:
    """Every value of every type, nested ones too, comes back from NDJSON as it was."""
    column = column.slice(min(start, len(column) - 1))
    topic = topic_of(pa.schema([("x", column.type)]))
    batch = pa.RecordBatch.from_arrays([column], schema=topic.schema.arrow)
    back = intake(topic, written(topic, batch))
    assert back.bad == []
    assert repr(back.batch.column(0).to_pylist()) == repr(batch.column(0).to_pylist())
    assert back.batch.schema.equals(batch.schema)


@pytest.mark.parametrize(
    ("ddl", "value"),
    [
        ("boolean", True),
        ("tinyint", -128),
        ("bigint", 9223372036854775807),
        ("float", 0.1),
        ("double", 0.1),
        ("double", "NaN"),
        ("double", "-Infinity"),
        ("float", "Infinity"),
        ("decimal(20,2)", "123456789012345678.90"),
        ("decimal(38,10)", "0.0000000001"),
        ("string", 'ä "quoted" \n'),
        ("binary", "AP8="),
        ("date", "2024-02-29"),
        ("timestamp", "2024-01-31T12:30:00Z"),
        ("timestamp", "2024-01-31T12:30:00.5Z"),
        ("timestamp_ntz", "1969-12-31T23:59:59.999999"),
        ("time", "10:20:00"),
        ("time", "00:00:00.000001"),
        ("interval day to second", "PT0S"),
        ("interval day to second", "-P1DT2H3M4.5S"),
        ("interval day to second", "P10D"),
        ("array<int>", [1, None, 2]),
        ("array<date>", ["2024-01-01"]),
        ("struct<a: int, b: decimal(3,1)>", {"a": None, "b": "1.5"}),
        ("map<string, int>", {"a": 1, "b": None}),
        ("map<string, int>", [["a", 1], ["a", 2]]),
        ("map<string, int>", {}),
        ("map<int, timestamp>", [[1, "2024-01-31T00:00:00Z"]]),
    ],
)
def test_how_each_type_is_spelled(ddl: str, value: object) -> None:
    """The spelling of each type in JSON is the documented one, both ways."""
    found = taken(f"x {ddl}", json.dumps({"x": value}))
    assert found.bad == []
    assert json.loads(json.dumps(json_values(found.batch.column(0)))) == [value]


@given(
    st.sampled_from(["date", "timestamp", "timestamp_ntz"]),
    st.integers(0, 63).flatmap(lambda bits: st.integers(-(1 << bits), (1 << bits) - 1)),
)
@example("date", 2**31 - 1)
@example("timestamp", -(2**63))
@example("timestamp_ntz", 2**63 - 1)
def test_no_moment_is_written_as_another(ddl: str, number: int) -> None:
    """Infinity as captures carry it, and years that Python and Arrow do not have."""
    kind = parse_type(ddl)
    integer = pa.int32() if ddl == "date" else pa.int64()
    if ddl == "date":
        number = max(-(2**31), min(2**31 - 1, number))
    column = pa.array([number], integer).view(kind)
    (text,) = json_values(column)
    assert pa.array([from_json(text, kind)], kind).equals(column)
    (wanted,) = printed(column)
    assert wanted is not None
    if wanted.endswith("infinity"):
        assert text == wanted
    elif not wanted.endswith("BC"):
        assert text.replace("T", " ").removesuffix("Z") == wanted.removesuffix("+00")
    midnight = pa.array([86_400_000_000, 1], pa.int64()).view(pa.time64("us"))
    assert json_values(midnight) == ["24:00:00", "00:00:00.000001"]


def test_other_spellings() -> None:
    """Decimals may be numbers, times may have any offset, floats may be whole."""
    schema = "d decimal(30,20), t timestamp, f double, n timestamp"
    line = '{"d": 1234567890.12345678901234567890, "t": "2024-01-01 10:00+02:00", "f": 3}'
    row = taken(schema, line).batch.to_pylist()[0]
    assert str(row["d"]) == "1234567890.12345678901234567890"
    assert row["t"].isoformat() == "2024-01-01T08:00:00+00:00"
    assert row["f"] == 3.0
    assert row["n"] is None


@pytest.mark.parametrize(
    ("ddl", "value", "reason"),
    [
        ("bigint", '"1"', "is not a bigint"),
        ("bigint", "1.0", "1.0 is not a bigint"),
        ("bigint", "true", "true is not a bigint"),
        ("tinyint", "128", "128 does not fit tinyint"),
        ("double", "1e400", "does not fit double"),
        ("double", '"1"', "is not a number"),
        ("float", "1e39", "does not fit float"),
        ("double", "NaN", 'NaN needs quotes: "NaN"'),
        ("decimal(3,1)", "1.25", "does not fit decimal(3,1)"),
        ("decimal(3,1)", '"1_0"', "is not a decimal"),
        ("decimal(3,1)", '"NaN"', "is not a decimal"),
        ("string", "1", "1 is not a string"),
        ("string", '"\\ud800"', "does not fit string"),
        ("binary", '"a"', "is not base64"),
        ("binary", "5", "is not base64"),
        ("date", '"2024-02-30"', "day is out of range"),
        ("date", '"20240230"', "is not a date"),
        ("timestamp", '"2024-01-01"', "is not a timestamp"),
        ("timestamp", "1700000000", "is not a timestamp"),
        ("timestamp", '"2024-01-01T00:00:00.1234567Z"', "finer than a microsecond"),
        ("timestamp_ntz", '"2024-01-01T00:00:00Z"', "has a time zone"),
        ("time", '"25:00"', "hour must be in"),
        ("interval day to second", '"P1Y"', "is not an interval"),
        ("interval day to second", '"PT"', "names no part"),
        ("array<int>", "[1, 1.5]", "1.5 (float) is not a int"),
        ("struct<a: int>", '{"b": 1}', "no field 'b'"),
        ("map<int, int>", '{"1": 1}', "write pairs"),
        ("map<string, int>", "[[1]]", "is not a pair"),
    ],
)
def test_what_is_refused(ddl: str, value: str, reason: str) -> None:
    """A value that does not fit its column is set aside with a reason; it is never bent to fit."""
    (bad,) = taken(f"x {ddl}", f'{{"x": {value}}}').bad
    assert reason in bad.reason
    assert bad.number == 1


def test_nothing_is_dropped_from_a_line() -> None:
    """A name that comes twice, or that the topic lacks, sets the line aside."""
    found = taken("x int, y struct<a: int>", '{"x":1,"x":2}', '{"z":1}', '{"y":{"a":1,"a":2}}')
    assert [bad.code for bad in found.bad] == ["HR-LOG-027", "HR-LOG-015", "HR-LOG-027"]
    assert found.batch is None


def test_the_good_lines_among_bad_ones_keep_their_order() -> None:
    """However the bad lines lie among them, all good ones are taken, in order."""
    lines = [f'{{"x": {n}}}' if n % 3 else f'{{"x": "{n}"}}' for n in range(50)]
    found = taken("x int", *lines)
    assert found.batch.column(0).to_pylist() == [n for n in range(50) if n % 3]
    assert [bad.number for bad in found.bad] == [n + 1 for n in range(50) if n % 3 == 0]


@pytest.mark.parametrize(
    "raw",
    ['{"a":  1.10,"b":[1e2 , 12345678901234567890.123456789]}', "null", '"x"', "1", "[\n]"],
)
def test_json_values_stay_as_they_are_written(raw: str) -> None:
    """The value of a `json` topic keeps its digits and spaces; a line break becomes a space."""
    topic = topic_of("", "json")
    row = pa.record_batch({"key": pa.array(["k"]), "value": pa.array([raw])})
    (line,) = written(topic, row)
    back = intake(topic, [line])
    assert back.batch.to_pylist() == [{"key": "k", "value": raw.replace("\n", " ")}]


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("json", {"key": None, "value": None}),
        ("text", {"key": "k", "value": "a\nb"}),
        ("text", {"key": None, "value": None}),
        ("bytes", {"key": b"\xff", "value": b"\0\n"}),
        ("bytes", {"key": None, "value": b""}),
    ],
)
def test_opaque_rows_come_back(kind: str, row: dict[str, Any]) -> None:
    """Keys and values of opaque topics come back from NDJSON; no value is not null."""
    topic = topic_of("", kind)
    batch = pa.RecordBatch.from_pylist([row], schema=topic.schema.arrow)
    assert intake(topic, written(topic, batch)).batch.to_pylist() == [row]


def test_raw_members() -> None:
    """Members of an object are found with their values as written."""
    assert raw_members(' { "a" : [1, {"b": "}"}] , "c":1.0}\n') == {
        "a": '[1, {"b": "}"}]',
        "c": "1.0",
    }
    assert raw_members("{ }") == {}


def test_lines_are_numbered_and_grouped() -> None:
    """Every line counts, blank ones are skipped, CRLF and a missing last end do no harm."""
    data = b'\xef\xbb\xbf{"x":1}\r\n\n{"x":2}\n  \n{"x":3}'
    groups = list(lines_of(io.BytesIO(data), lines_max=2, blank=False))
    assert [[line.number for line in group] for group in groups] == [[1, 3], [5]]
    found = [intake(topic_of("x int"), group) for group in groups]
    assert [one.batch.column(0).to_pylist() for one in found] == [[1, 2], [3]]


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    """A line longer than the limit is cut and marked, and the next ones are read."""
    data = b"a" * 300_000 + b"\n" + b"b\n" + b"c" * 11
    lines = next(lines_of(io.BytesIO(data), lines_max=9, blank=False, line_bytes_max=10))
    assert lines == [
        Line(1, b"a" * 10, cut=True),
        Line(2, b"b"),
        Line(3, b"c" * 10, cut=True),
    ]


def test_a_line_that_is_not_text_is_kept_whole() -> None:
    """Bytes that are not UTF-8 are set aside as base64, with the place where they fail."""
    found = intake(topic_of("x string"), [Line(7, b'{"x": "\xff"}')])
    assert found.bad[0].reason == "not UTF-8 at byte 7"
    assert found.bad[0].to_json()["base64"] == "eyJ4IjogIv8ifQ=="


def test_nan_is_a_number_that_comes_back() -> None:
    """NaN is text in JSON, and a NaN again in the log."""
    (row,) = taken("x double", '{"x": "NaN"}').batch.to_pylist()
    assert math.isnan(row["x"])
