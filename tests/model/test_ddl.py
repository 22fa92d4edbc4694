"""Spark DDL and Arrow types.

These tests catch a type that does not survive being spelled and read, a spelling of Spark that is
not understood, and a refusal without place or fix. They cannot catch a difference to a Spark
version that reads a text otherwise: no Spark is asked here.
"""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import BadSchema
from headrace.model.ddl import (
    DURATION,
    TIME,
    TIMESTAMP,
    TIMESTAMP_NTZ,
    Field,
    ddl_type,
    format_ddl,
    normal_type,
    parse_ddl,
    parse_type,
)
from tests.model.strategies import NAMES, TYPES


def test_a_schema_is_read_in_the_order_of_its_columns() -> None:
    """Names, types, nullability and comments of a schema are read as Spark reads them."""
    text = (
        "user bigint, url string not null, at timestamp, tags array<string>, m map<string,int>, "
        "s struct<a:int,b:string not null>, `odd name` decimal(10,2) comment 'it\\'s'"
    )
    assert parse_ddl(text) == [
        Field("user", pa.int64()),
        Field("url", pa.string(), nullable=False),
        Field("at", TIMESTAMP),
        Field("tags", pa.list_(pa.string())),
        Field("m", pa.map_(pa.string(), pa.int32())),
        Field("s", pa.struct([("a", pa.int32()), pa.field("b", pa.string(), nullable=False)])),
        Field("odd name", pa.decimal128(10, 2), comment="it's"),
    ]


@pytest.mark.parametrize(
    ("text", "arrow"),
    [
        ("boolean", pa.bool_()),
        ("tinyint", pa.int8()),
        ("BYTE", pa.int8()),
        ("smallint", pa.int16()),
        ("short", pa.int16()),
        ("int", pa.int32()),
        ("Integer", pa.int32()),
        ("bigint", pa.int64()),
        ("long", pa.int64()),
        ("float", pa.float32()),
        ("real", pa.float32()),
        ("double", pa.float64()),
        ("decimal", pa.decimal128(10, 0)),
        ("dec(5)", pa.decimal128(5, 0)),
        ("numeric( 38 , 38 )", pa.decimal128(38, 38)),
        ("string", pa.string()),
        ("binary", pa.binary()),
        ("date", pa.date32()),
        ("timestamp", TIMESTAMP),
        ("timestamp_ltz", TIMESTAMP),
        ("timestamp_ntz", TIMESTAMP_NTZ),
        ("time", TIME),
        ("time(6)", TIME),
        ("interval DAY to second", DURATION),
        ("array<array<int>>", pa.list_(pa.list_(pa.int32()))),
        (
            'struct<`a``b` : int comment "x", c date>',
            pa.struct([("a`b", pa.int32()), ("c", pa.date32())]),
        ),
    ],
)
def test_each_spelling_has_its_type(text: str, arrow: pa.DataType) -> None:
    """Every type of Spark that can be kept is read, in all its spellings and in any case."""
    assert parse_type(text) == arrow


@pytest.mark.parametrize("text", ["a: int, b :string", "a int,b string", "struct<a:int, b string>"])
def test_colons_and_a_struct_around_all_are_as_good(text: str) -> None:
    """The forms Spark itself prints (simpleString) are read like DDL."""
    assert parse_ddl(text) == [Field("a", pa.int32()), Field("b", pa.string())]


@given(TYPES)
def test_every_type_survives_its_spelling(arrow: pa.DataType) -> None:
    """Reading the canonical spelling of a type gives the same type."""
    assert parse_type(ddl_type(arrow)) == arrow
    assert normal_type(arrow, "c") == arrow


@given(st.lists(st.builds(Field, NAMES, TYPES, st.booleans(), st.none() | st.text(max_size=9))))
def test_every_schema_survives_its_spelling(fields: list[Field]) -> None:
    """Reading the canonical spelling of a schema gives the same columns, comments included."""
    if fields:
        assert parse_ddl(format_ddl(fields)) == fields


@given(st.text(st.sampled_from("ab int<>(),:`'\"9struct array map not null"), max_size=40))
def test_any_text_is_read_or_refused_with_a_place(text: str) -> None:
    """Whatever the text, the outcome is columns, or BadSchema with a place and a fix."""
    refused = None
    try:
        assert parse_ddl(text)
    except BadSchema as error:
        refused = error
    assert refused is None or ("character" in refused.place and refused.fix)


@pytest.mark.parametrize(
    ("text", "fact", "place", "fix"),
    [
        ("a varchar(3)", "'varchar'", "column 'a', character 3", "use string"),
        ("a char(3)", "'char'", "column 'a', character 3", "use string"),
        ("a int, b variant", "'variant'", "column 'b', character 10", "string"),
        ("a void", "'void'", "column 'a', character 3", "leave it out"),
        ("a string collate utf8", "'collate'", "column 'a', character 10", "without collation"),
        ("a interval year to month", "'interval year to month'", "character 3", "int"),
        ("a interval", "'interval'", "character 3", "interval day to second"),
        ("a int default 3", "'default'", "column 'a', character 7", "when appending"),
        ("a int generated always as (b)", "'generated'", "character 7", "before appending"),
        ("a int not null primary key", "'primary'", "character 16", "create_topic"),
        ("s struct<b: array<foo>>", "'foo'", "column 's.b', character 19", "type of Spark"),
        ("a strin", "unknown type 'strin'", "column 'a', character 3", "'string'"),
        ("a", "no type, found the end", "column 'a', character 2", "a string"),
        ("a-b int", "'-'", "character 2", "backquotes"),
        ("`a int", "'`'", "character 1", "close"),
        ("a int b int", "found 'b'", "character 7", "','"),
        ("a int,", "column name", "character 7", "name a column"),
        ("a array<int", "'>'", "column 'a', character 12", "add '>'"),
        ("a array<int not null>", "not null", "character 13", "leave it out"),
        ("a map<map<int,int>,int>", "key", "character 7", "string"),
        ("a decimal(39,2)", "out of range", "character 11", "decimal(38,s)"),
        ("a decimal(3,4)", "out of range", "character 11", "decimal(38,s)"),
        ("a struct<b int, B int>", "'B' is named twice", "column 'a'", "rename"),
        ("", "no columns", "character 1", "at least one"),
        ("`\ud800` int", "half a surrogate", "character 2", "leave it out"),
        ("a struct<`\ud800`: int>", "half a surrogate", "character 11", "leave it out"),
        ("a int comment '\ud800'", "half a surrogate", "character 16", "leave it out"),
        ("a " + "array<" * 40 + "int" + ">" * 40, "nested deeper", "column 'a'", "string"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(text: str, fact: str, place: str, fix: str) -> None:
    """A refusal names the thing, the column, the character counted from 1, and the way out."""
    with pytest.raises(BadSchema) as raised:
        parse_ddl(text)
    assert fact in raised.value.fact
    assert place in raised.value.place
    assert fix in raised.value.fix


@pytest.mark.parametrize(
    ("given_type", "normal"),
    [
        (pa.large_string(), pa.string()),
        (pa.string_view(), pa.string()),
        (pa.dictionary(pa.int32(), pa.large_string()), pa.string()),
        (pa.large_binary(), pa.binary()),
        (pa.binary_view(), pa.binary()),
        (pa.binary(16), pa.binary()),
        (pa.timestamp("ns"), TIMESTAMP_NTZ),
        (pa.timestamp("s", tz="Europe/Berlin"), TIMESTAMP),
        (pa.date64(), pa.date32()),
        (pa.time32("ms"), TIME),
        (pa.duration("ns"), DURATION),
        (pa.decimal64(7, 3), pa.decimal128(7, 3)),
        (pa.decimal256(38, 3), pa.decimal128(38, 3)),
        (pa.large_list(pa.large_string()), pa.list_(pa.string())),
        (pa.list_(pa.field("e", pa.int8(), nullable=False), 3), pa.list_(pa.int8())),
        (pa.list_view(pa.int8()), pa.list_(pa.int8())),
        (pa.run_end_encoded(pa.int32(), pa.date64()), pa.date32()),
        (pa.map_(pa.large_string(), pa.date64()), pa.map_(pa.string(), pa.date32())),
        (pa.struct([("a", pa.large_string())]), pa.struct([("a", pa.string())])),
    ],
)
def test_arrow_types_become_the_types_of_a_topic(
    given_type: pa.DataType, normal: pa.DataType
) -> None:
    """Encodings, offsets and units of a user's Arrow schema become the one type kept."""
    assert normal_type(given_type, "c") == normal
    assert parse_type(ddl_type(normal)) == normal


@pytest.mark.parametrize(
    ("arrow", "fix"),
    [
        (pa.uint8(), "smallint"),
        (pa.uint64(), "decimal(20,0)"),
        (pa.float16(), "float"),
        (pa.null(), "name the type"),
        (pa.dense_union([pa.field("a", pa.int8())]), "struct"),
        (pa.month_day_nano_interval(), "duration"),
        (pa.decimal256(50, 2), "38"),
        (pa.decimal128(5, -2), "38"),
        (pa.uuid(), "storage type"),
        (pa.struct([]), "at least one field"),
        (pa.struct([("a", pa.int8()), ("A", pa.int8())]), "rename"),
        (pa.list_(pa.uint16()), "int (int32)"),
    ],
)
def test_arrow_types_that_spark_lacks_are_refused(arrow: pa.DataType, fix: str) -> None:
    """An Arrow type without a counterpart is refused, with what to use instead."""
    with pytest.raises(BadSchema) as raised:
        normal_type(arrow, "c")
    assert fix in raised.value.fix
    assert "column 'c" in raised.value.place
