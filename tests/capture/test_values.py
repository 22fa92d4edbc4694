"""PostgreSQL's text to Arrow: every type with its edge values, pure and against a real server.

The server is asked for the same values twice, as text and in its binary format; the text goes
through `convert`, the binary is read here with `struct`, and both must say the same. Types that
stay text must be the server's text, byte by byte. Arrays of every type are compared with their
elements converted one by one.

Caught: a type that is given another Arrow type, a value that is read wrongly or refused although
it can be carried, carried although it cannot, a null or an element lost, a loop over values
(by counting calls). Not caught: what only other versions of the server print (this is one
version), types of extensions other than by their kind, and columns of more than 2 GB.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import TypeNotCarried, ValueNotCarried
from headrace.sources.postgres import values
from headrace.sources.postgres.catalog import types
from headrace.sources.postgres.values import PgType, arrow_type, convert
from tests.capture.conftest import Database

BUILT_IN = {
    "bool": 16, "bytea": 17, "int8": 20, "int2": 21, "int4": 23, "text": 25, "oid": 26,
    "float4": 700, "float8": 701, "date": 1082, "time": 1083, "timestamp": 1114,
    "timestamptz": 1184, "interval": 1186, "numeric": 1700, "uuid": 2950,
}  # fmt: skip
UTC_US = pa.timestamp("us", tz="UTC")
INT32, INT64 = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1)


def base(name: str) -> PgType:
    return PgType(BUILT_IN[name], name, "b")


def array(element: PgType) -> PgType:
    return PgType(90_000 + element.oid, f"_{element.name}", "b", element=element)


def domain(of: PgType, modifier: int = -1) -> PgType:
    return PgType(91_000, "d", "d", base=of, base_modifier=modifier)


def numeric(precision: int, scale: int) -> int:
    """The modifier of numeric(p, s)."""
    return (precision << 16 | scale & 0x7FF) + 4


def read(texts: Sequence[str | None], of: PgType, modifier: int = -1, **more: Any) -> pa.Array:
    """Convert, and check what holds for every result: many such values are read alike."""
    raw = pa.array([None if text is None else text.encode() for text in texts], pa.binary())
    made = convert(raw, of, modifier, column="a", **more)
    check(made)
    assert made.type == arrow_type(of, modifier, column="a", **more)
    assert made.is_null().to_pylist() == [text is None for text in texts]
    if texts:
        many = convert(pa.concat_arrays([raw] * (values.FEW + 1)), of, modifier, **more)
        assert plain(many[: len(texts)]) == plain(made)
    return made


def check(made: pa.Array) -> None:
    """Arrow finds the array in order; 24:00:00 is the one value that it would not have."""
    kind = made.type.value_type if pa.types.is_list(made.type) else made.type
    made.validate(full=not pa.types.is_time(kind))


def plain(made: pa.Array) -> list[Any]:
    """Values that Python can compare: dates and times as numbers, floats by their bits."""
    kind = made.type
    if pa.types.is_list(kind):
        inner = plain(made.flatten())
        lengths = made.value_lengths().fill_null(-1).to_pylist()
        lists: list[Any] = []
        for length in lengths:
            lists.append(None if length < 0 else inner[: max(length, 0)])
            inner = inner[max(length, 0) :]
        return lists
    if pa.types.is_temporal(kind):
        kind = pa.int32() if kind.bit_width == 32 else pa.int64()
        made = made.view(kind)
    if pa.types.is_floating(kind):
        return [None if one is None else struct.pack(">d", one) for one in made.to_pylist()]
    found: list[Any] = made.to_pylist()
    return found


# --- types ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "modifier", "expected"),
    [
        (base("bool"), -1, pa.bool_()),
        (base("int2"), -1, pa.int16()),
        (base("int4"), -1, pa.int32()),
        (base("int8"), -1, pa.int64()),
        (base("oid"), -1, pa.int64()),
        (base("float4"), -1, pa.float32()),
        (base("float8"), -1, pa.float64()),
        (base("date"), -1, pa.date32()),
        (base("time"), 3, pa.time64("us")),
        (base("timestamp"), 0, pa.timestamp("us")),
        (base("timestamptz"), -1, UTC_US),
        (base("bytea"), -1, pa.binary()),
        (base("uuid"), -1, pa.string()),
        (base("interval"), -1, pa.string()),
        (base("numeric"), -1, pa.string()),
        (base("numeric"), numeric(1, 0), pa.decimal128(1, 0)),
        (base("numeric"), numeric(10, 2), pa.decimal128(10, 2)),
        (base("numeric"), numeric(38, 0), pa.decimal128(38, 0)),
        (base("numeric"), numeric(38, 38), pa.decimal128(38, 38)),
        (base("numeric"), numeric(39, 0), pa.string()),
        (base("numeric"), numeric(5, -2), pa.string()),
        (base("numeric"), numeric(2, 5), pa.string()),
        (base("numeric"), numeric(1000, 1000), pa.string()),
        (array(base("numeric")), numeric(10, 2), pa.list_(pa.decimal128(10, 2))),
        (array(base("int4")), -1, pa.list_(pa.int32())),
        (domain(base("numeric"), numeric(10, 2)), -1, pa.decimal128(10, 2)),
        (domain(domain(base("int2"))), -1, pa.int16()),
        (array(domain(array(base("date")))), -1, pa.list_(pa.list_(pa.date32()))),
        (PgType(90_001, "date", "e"), -1, pa.string()),
        (PgType(90_002, "spans", "m"), -1, pa.string()),
        (PgType(90_003, "hstore", "b"), -1, pa.string()),
    ],
    ids=repr,
)
def test_the_arrow_type_of_a_type(of: PgType, modifier: int, expected: pa.DataType) -> None:
    assert arrow_type(of, modifier) == expected
    assert read([], of, modifier).type == expected
    assert read([None, None], of, modifier).to_pylist() == [None, None]


COMPOSITE = PgType(90_004, "address", "c")


@pytest.mark.parametrize(
    "of", [COMPOSITE, PgType(2249, "record", "p"), array(COMPOSITE), array(domain(COMPOSITE))]
)
def test_types_that_are_not_carried(of: PgType) -> None:
    with pytest.raises(TypeNotCarried, match="are not carried") as caught:
        arrow_type(of, column="home")
    assert caught.value.place == "column 'home'"
    with pytest.raises(TypeNotCarried):
        convert(pa.array([], pa.binary()), of)


def test_numerics_as_text() -> None:
    for of in (base("numeric"), domain(base("numeric"), numeric(4, 1))):
        assert read(["1.5", "NaN"], of, numeric(4, 1), numeric_as_text=True).to_pylist() == [
            "1.5",
            "NaN",
        ]
    lists = read(["{NaN,2.0}"], array(base("numeric")), numeric(4, 1), numeric_as_text=True)
    assert lists.to_pylist() == [["NaN", "2.0"]]


# --- values, without a server ---------------------------------------------------------------------


def days(text: str) -> int:
    return (date.fromisoformat(text) - date(1970, 1, 1)).days


def us(text: str) -> int:
    since = datetime.fromisoformat(text) - datetime(1970, 1, 1)
    return since // timedelta(microseconds=1)


VALUES: list[tuple[str, int, dict[str, Any]]] = [
    ("bool", -1, {"t": True, "f": False}),
    ("int2", -1, {"-32768": -32768, "32767": 32767, "0": 0}),
    ("int8", -1, {str(INT64[0]): INT64[0], str(INT64[1]): INT64[1]}),
    ("oid", -1, {"4294967295": 2**32 - 1}),
    ("numeric", numeric(5, 2), {"0.00": Decimal("0.00"), "-999.99": Decimal("-999.99")}),
    ("numeric", numeric(38, 0), {"-" + "9" * 38: Decimal("-" + "9" * 38)}),
    ("numeric", numeric(38, 38), {"-0." + "9" * 38: Decimal("-0." + "9" * 38)}),
    ("date", -1, {"2024-02-29": days("2024-02-29"), "0001-01-01": days("0001-01-01")}),
    ("date", -1, {"9999-12-31": days("9999-12-31"), "10000-01-01": days("9999-12-31") + 1}),
    ("date", -1, {"infinity": INT32[1], "-infinity": INT32[0], "1969-12-31": -1}),
    ("date", -1, {"0001-12-31 BC": days("0001-01-01") - 1, "1970-01-02": 1}),
    ("date", -1, {"4714-11-24 BC": -2440588, "5874897-12-31": 2147483493 - 2440588}),
    ("timestamp", -1, {"2024-02-29 23:59:59.999999": us("2024-02-29 23:59:59.999999")}),
    ("timestamp", -1, {"1969-12-31 23:59:59.9": -100_000, "1970-01-01 00:00:00": 0}),
    ("timestamp", -1, {"infinity": INT64[1], "-infinity": INT64[0], "1970-01-01 00:00:01": 10**6}),
    ("timestamp", -1, {"0001-12-31 23:59:59.5 BC": us("0001-01-01") - 500_000}),
    ("timestamp", -1, {"10000-01-01 00:00:00": us("9999-12-31") + values.DAY_US}),
    ("timestamp", -1, {"294247-01-10 04:00:54.775806": INT64[1] - 1}),
    ("timestamptz", -1, {"2024-02-29 23:59:59.12+00": us("2024-02-29 23:59:59.12")}),
    ("timestamptz", -1, {"0001-12-31 23:59:59.5+00 BC": us("0001-01-01") - 500_000}),
    ("timestamptz", -1, {"10000-01-01 00:00:00+00": us("9999-12-31") + values.DAY_US}),
    ("timestamptz", -1, {"infinity": INT64[1], "1970-01-01 00:00:00+00": 0, "-infinity": INT64[0]}),
    ("time", -1, {"00:00:00": 0, "23:59:59.999999": values.DAY_US - 1}),
    ("time", -1, {"24:00:00": values.DAY_US, "00:00:00.1": 100_000}),
    ("bytea", -1, {r"\x": b"", r"\x00ff0a": b"\x00\xff\n", r"\x5c78": b"\\x"}),
    ("text", -1, {"": "", "NULL": "NULL", "é\0😀": "é\0😀", '"\\{}': '"\\{}'}),
    ("uuid", -1, {"00000000-0000-0000-0000-000000000001": "00000000-0000-0000-0000-000000000001"}),
]


@pytest.mark.parametrize(("name", "modifier", "cases"), VALUES)
def test_values(name: str, modifier: int, cases: dict[str, Any]) -> None:
    """Each alone, all together, between nulls, in a slice, and from a large binary array."""
    of, texts, expected = base(name), list(cases), list(cases.values())
    assert plain(read(texts, of, modifier)) == expected
    if pa.types.is_temporal(arrow_type(of, modifier)):
        assert values.printed(read([None, *texts], of, modifier)) == [None, *texts]
    for text, value in cases.items():
        assert plain(read([text], of, modifier)) == [value]
        assert plain(read([None, text, None], of, modifier)) == [None, value, None]
    raw = pa.array([b"garbage", None, *(text.encode() for text in texts), None, b"garbage"])
    for whole in (raw, raw.cast(pa.large_binary())):
        part = convert(whole[1:-1], of, modifier)
        check(part)
        assert plain(part) == [None, *expected, None]
        assert plain(convert(whole[2:-2], of, modifier)) == expected


FLOATS = ["0", "-0", "1", "0.1", "1e-45", "3.4028235e+38", "Infinity", "-Infinity", "-1.5e-10"]
DOUBLES = ["5e-324", "1.7976931348623157e+308", "2.2250738585072014e-308", "0.30000000000000004"]


def test_floats() -> None:
    for name, texts in (("float4", FLOATS), ("float8", FLOATS + DOUBLES)):
        made = read([*texts, None, "NaN"], base(name))
        single = name == "float4"
        expected = [struct.unpack(">f", struct.pack(">f", float(t)))[0] if single else float(t)
                    for t in texts]  # fmt: skip
        found = made.to_pylist()
        assert [repr(one) for one in found] == [
            repr(one) for one in [*expected, None, float("nan")]
        ]


def test_a_float_is_rounded_once() -> None:
    """As a double it is in the middle of two floats, and would be rounded to the other one."""
    for more in ([], ["0"] * values.FEW):  # by itself, and among many
        made = read(["7.038531e-26", "-7.038531e-26", *more], base("float4"))
        assert made.view(pa.uint32()).to_pylist()[:2] == [0x15AE43FD, 0x95AE43FD]


def test_bytes_hidden_below_a_null_are_not_read() -> None:
    """A null may have bytes in the buffer."""
    hidden = pa.Array.from_buffers(
        pa.binary(),
        2,
        [
            pa.py_buffer(b"\2"),
            pa.py_buffer(struct.pack("=iii", 0, 3, 7)),
            pa.py_buffer(b'"{x' + rb"\x0a"),
        ],
    )
    assert hidden.to_pylist() == [None, rb"\x0a"]
    assert convert(hidden, base("bytea")).to_pylist() == [None, b"\n"]
    assert convert(hidden, base("text")).to_pylist() == [None, r"\x0a"]
    listed = pa.Array.from_buffers(
        pa.binary(),
        2,
        [
            pa.py_buffer(b"\2"),
            pa.py_buffer(struct.pack("=iii", 0, 3, 6)),
            pa.py_buffer(b'"{x{1}'),
        ],
    )
    assert convert(listed, array(base("int4"))).to_pylist() == [None, [1]]


def test_texts_that_are_not_utf8_are_not_carried() -> None:
    """Each by itself: halves of a letter are not one."""
    first, second = (bytes([one]) for one in "é".encode())
    for often in (1, values.FEW):
        with pytest.raises(ValueNotCarried, match=r"'a.xff' is not UTF-8"):
            convert(pa.array([None, "é".encode(), b"a\xff"] * often), base("text"))
        with pytest.raises(ValueNotCarried, match=r"'.xc3' is not UTF-8"):
            convert(pa.array([first, second] * often), base("text"))


def test_strings_are_not_copied() -> None:
    raw = pa.array([b"a", b"bc"] * 10)
    made = convert(raw, base("text"))
    assert made.buffers()[2].address == raw.buffers()[2].address


@pytest.mark.parametrize(
    ("name", "modifier", "text", "says"),
    [
        ("numeric", numeric(5, 2), "NaN", "'NaN' does not fit into decimal128"),
        ("numeric", numeric(5, 2), "Infinity", "'Infinity' does not fit"),
        ("numeric", numeric(5, 2), "1000.00", "'1000.00' does not fit"),
        ("numeric", numeric(5, 2), "1.234", "'1.234' does not fit"),
        ("numeric", numeric(38, 0), "9" * 39, "999' does not fit"),
        ("numeric", numeric(38, 0), "-" + "9" * 39, "999' does not fit"),
        ("timestamp", -1, "294247-01-10 04:00:54.775807", "beyond the last timestamp"),
        ("timestamptz", -1, "294276-12-31 23:59:59.999999+00", "beyond the last timestamp"),
        ("date", -1, "17.03.2024", "does not fit into date32"),
        ("date", -1, "2024-01-01 00:00:00", "does not fit into date32"),
        ("date", -1, "12024-01-01 00:00:00", "does not fit into date32"),
        ("timestamp", -1, "2024-01-01 00:00:00+00", "does not fit into timestamp"),
        ("timestamp", -1, "12024-01-01 00:00:00+00", "does not fit into timestamp"),
        ("timestamptz", -1, "2024-01-01 00:00:00", "does not fit into timestamp"),
        ("timestamptz", -1, "12024-01-01 00:00:00", "does not fit into timestamp"),
        ("timestamptz", -1, "12024-01-01 00:00:00+02", "does not fit into timestamp"),
        ("timestamptz", -1, "now", "does not fit into timestamp"),
        ("time", -1, "25:00:00", "'25:00:00' does not fit into time64"),
        ("int4", -1, "2147483648", "does not fit into int32"),
        ("int4", -1, "", "'' does not fit into int32"),
        ("bool", -1, "true", "'true' does not fit into bool"),
        ("date", -1, "", "'' does not fit into date32"),
        ("timestamp", -1, "", "'' does not fit into timestamp"),
        ("bytea", -1, "", "'' does not fit into binary"),
        ("bytea", -1, r"\x0x", "does not fit into binary"),
        ("bytea", -1, r"\x0", "does not fit into binary"),
        ("bytea", -1, r"\xzz", "does not fit into binary"),
        ("bytea", -1, r"a\000", "does not fit into binary"),
    ],
)
def test_values_that_are_not_carried(name: str, modifier: int, text: str, says: str) -> None:
    """Refused alone, among good ones (the message has the bad one), and in an array."""
    good = {"numeric": "1", "bool": "t", "bytea": r"\x00", "int4": "1", "time": "00:00:00"}
    fine = good.get(name, "infinity")
    quoted = '"' + text.replace("\\", "\\\\") + '"'
    for of, texts in (
        (base(name), [text]),
        (base(name), [None, fine, fine, text, None, fine]),
        (array(base(name)), ["{}", "{" + quoted + "}"]),
    ):
        for often in (1, values.FEW + 1):
            with pytest.raises(ValueNotCarried) as caught:
                read(texts * often, of, modifier)
            assert says in caught.value.fact
        assert caught.value.place == "column 'a'"


def test_nan_in_a_decimal_column_has_its_own_advice() -> None:
    with pytest.raises(ValueNotCarried) as caught:
        read(["NaN"], base("numeric"), numeric(5, 2))
    assert "--numeric-as-text" in caught.value.fix


@given(st.datetimes())
def test_usual_moments_are_read_alike_on_both_ways(moment: datetime) -> None:
    """The way of unusual values knows the usual ones too; each must agree with Python."""
    expected = (moment - datetime(1970, 1, 1)) // timedelta(microseconds=1)
    text = moment.isoformat(" ")
    zoned = text + "+00"
    assert values._moment(text, pa.timestamp("us"), "a") == expected
    assert values._moment(zoned, UTC_US, "a") == expected
    assert values._moment(text[:10], pa.date32(), "a") == days(text[:10])
    assert plain(read([text], base("timestamp"))) == [expected]
    assert plain(read([zoned, "infinity"], base("timestamptz"))) == [expected, INT64[1]]
    assert read([zoned], base("timestamptz"))[0].as_py() == moment.replace(tzinfo=UTC)


# --- arrays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("int4", "{}", []),
        ("int4", "{NULL}", [None]),
        ("int4", "{1,NULL,-3}", [1, None, -3]),
        ("bool", "{t,f,NULL}", [True, False, None]),
        ("text", '{"",NULL,"NULL","null",nulls}', ["", None, "NULL", "null", "nulls"]),
        ("text", r'{"\"","\\","\\\"","\\\\"}', ['"', "\\", '\\"', "\\\\"]),
        ("text", '{"a,b","{}"," "}', ["a,b", "{}", " "]),
        ("text", '{"{{1},{2}}","[0:1]={1,2}"}', ["{{1},{2}}", "[0:1]={1,2}"]),
        ("text", "{é,😀,'}", ["é", "😀", "'"]),
        ("bytea", r'{"\\x","\\x5c22",NULL}', [b"", b'\\"', None]),
        ("timestamp", '{"1970-01-01 00:00:01",infinity,NULL}', [10**6, INT64[1], None]),
        ("time", "{24:00:00,00:00:00.5}", [values.DAY_US, 500_000]),
    ],
)  # fmt: skip
def test_arrays(name: str, text: str, expected: list[Any]) -> None:
    of = array(base(name))
    assert plain(read([text], of)) == [expected]
    mixed = read([None, text, "{}", None, text, text], of)
    assert plain(mixed) == [None, expected, [], None, expected, expected]
    raw = pa.array([b"}", text.encode(), None, b'"'])
    assert plain(convert(raw[1:3], of)) == [expected, None]
    assert plain(convert(raw[1:2], of)) == [expected]


def test_arrays_of_domains_of_arrays() -> None:
    of = array(domain(array(base("text"))))
    text = r'{"{a,\"b \\\"\"}",NULL,"{}"}'
    assert read([text], of).to_pylist() == [[["a", 'b "'], None, []]]


def test_the_delimiter_belongs_to_the_element() -> None:
    box = PgType(603, "box", "b", delimiter=";")
    made = read(["{(1,1),(0,0);(2,2),(1,1)}"], array(box))
    assert made.to_pylist() == [["(1,1),(0,0)", "(2,2),(1,1)"]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{{1,2},{3,4}}", "'{{1,2},{3,4}}' has more than one dimension"),
        ("[0:1]={1,2}", "'[0:1]={1,2}' has bounds of its own"),
        ("[-3:-2]={1,2}", "has bounds of its own"),
        ("[1:1][2:2]={{1}}", "has bounds of its own"),
        ("{1,2", "does not fit into list"),
        ("1,2", "does not fit into list"),
        ("", "does not fit into list"),
        ("{1}{2}", "does not fit into list"),
    ],
)
def test_arrays_that_are_not_carried(text: str, says: str) -> None:
    for texts in ([text], [None, "{1}", text, "{2}"]):
        with pytest.raises(ValueNotCarried) as caught:
            read(texts, array(base("int4")))
        assert says in caught.value.fact


ELEMENT = st.none() | st.text(st.sampled_from('"\\{},; NUL\n\té😀abc'), max_size=6)


def printed(elements: Sequence[str | None] | None) -> str | None:
    """As `array_out` prints it; quotes more than it must, at random but repeatably."""
    if elements is None:
        return None
    parts = []
    for one in elements:
        if one is None:
            parts.append("NULL")
        elif not one or one.upper() == "NULL" or set(one) & set('"\\{}, \n\t;') or len(one) == 3:
            parts.append('"' + one.replace("\\", "\\\\").replace('"', '\\"') + '"')
        else:
            parts.append(one)
    return "{" + ",".join(parts) + "}"


@given(st.lists(st.none() | st.lists(ELEMENT, max_size=5), max_size=8))
def test_lists_of_any_strings_come_back(lists: list[list[str | None] | None]) -> None:
    assert read([printed(one) for one in lists], array(base("text"))).to_pylist() == lists


# --- no loop over values --------------------------------------------------------------------------

USUAL = {
    "bool": ["t", "f"],
    "int4": ["1", "-7"],
    "float8": ["1.5", "NaN", "Infinity"],
    "text": ["a", ""],
    "date": ["2024-01-01", "infinity", "-infinity"],
    "timestamp": ["2024-01-01 00:00:00", "2024-01-01 00:00:00.5", "infinity"],
    "timestamptz": ["2024-01-01 00:00:00+00", "infinity"],
    "time": ["00:00:01.5", "24:00:00"],
    "numeric": ["1.50", "-12.00"],
    "bytea": [r"\x00", r"\x"],
    "uuid": ["00000000-0000-0000-0000-000000000001"],
}


def calls(action: Callable[[], object]) -> int:
    count = 0

    def see(*event: Any) -> None:
        nonlocal count
        count += 1

    sys.setprofile(see)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", USUAL)
@pytest.mark.parametrize("listed", [False, True])
def test_no_loop_over_usual_values(name: str, listed: bool) -> None:
    """The counted twin of the times in the module's docstring."""
    of = array(base(name)) if listed else base(name)
    texts = [printed([one, None]) if listed else one for one in USUAL[name]]

    def convert_times(times: int) -> int:
        raw = pa.array([text.encode() for text in texts if text] * times, pa.binary())
        return calls(lambda: convert(raw, of, numeric(5, 2)))

    assert convert_times(1000) < convert_times(1) + 500


# --- against the server ---------------------------------------------------------------------------

SETTINGS = {
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "iso_8601",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "TimeZone": "UTC",
    "client_encoding": "UTF8",
}

TIMESTAMPS = [
    "epoch", "infinity", "-infinity", "4714-11-24 00:00:00 BC", "0001-12-31 23:59:59.999999 BC",
    "0001-01-01", "1582-10-15", "1969-12-31 23:59:59.999999", "2000-02-29 12:00:00.1",
    "2024-02-29 23:59:59.999999", "9999-12-31 23:59:59.999999", "10000-01-01",
    "294246-12-31 23:59:59.999999", "0044-03-15 12:30:00 BC", "0005-02-29 BC",
]  # fmt: skip
RANDOM_TIMESTAMP = (
    "timestamp '1500-01-01' + make_interval(days => random(-1000000, (10 ^ random(1, 8))::int4), "
    "secs => round((random() * 86400)::numeric, random(0, 6))::float8)"
)
DECIMALS = "random(-1e{}, 1e{})"

CASES: dict[str, tuple[list[str], str | None]] = {
    "bool": (["t", "f"], "random() < 0.5"),
    "int2": (["-32768", "32767", "0"], "random(-32768, 32767)"),
    "int4": (["-2147483648", "2147483647", "0"], "random(-2147483648, 2147483647)"),
    "int8": (
        ["-9223372036854775808", "9223372036854775807", "0"],
        "random(-9223372036854775808, 9223372036854775807)",
    ),
    "oid": (["0", "4294967295"], "random(0, 4294967295)::oid"),
    "float4": ([*FLOATS, "NaN"], "(random() - 0.5) * 10.0::float8 ^ random(-36, 38)"),
    "float8": ([*FLOATS, *DOUBLES, "NaN"], "(random() - 0.5) * 10.0::float8 ^ random(-300, 300)"),
    "numeric": (["NaN", "Infinity", "-Infinity", "0", "1e-100", "-1e100"], DECIMALS.format(9, 9)),
    "numeric(10,2)": (["0", "-0.005", "99999999.99", "-99999999.99"], DECIMALS.format(7, 7)),
    "numeric(38,0)": (["9" * 38, "-" + "9" * 38, "0"], DECIMALS.format(37, 37)),
    "numeric(38,38)": (["0." + "9" * 38, "-0." + "9" * 38, "0"], "random(-0.9999999, 0.9999999)"),
    "numeric(39,5)": (["NaN", "1.5"], DECIMALS.format(33, 33)),
    "numeric(5,-2)": (["1234567", "-150"], None),
    "numeric(2,5)": (["0.00012"], None),
    "date": (
        ["epoch", "infinity", "-infinity", "4714-11-24 BC", "0001-12-31 BC", "0001-01-01",
         "0005-02-29 BC", "9999-12-31", "10000-01-01", "5874897-12-31", "2000-02-29"],
        "date '1970-01-01' + random(-2440588, 2145042905)",
    ),
    "time": (
        ["0:0", "24:00", "23:59:59.999999", "12:00:00.1"],
        "time '0:0' + random() * '1d'::interval",
    ),
    "time(3)": (["23:59:59.9996", "12:00:00.1234"], None),
    "timestamp": (TIMESTAMPS, RANDOM_TIMESTAMP),
    "timestamp(0)": (TIMESTAMPS, RANDOM_TIMESTAMP),
    "timestamptz": ([*TIMESTAMPS, "2024-07-01 12:00:00+05:45"], RANDOM_TIMESTAMP),
    "bytea": (["", r"\x00", r"\x5c78", "'\"{},"], "sha256(random()::text::bytea)"),
    "text": (
        ["", "NULL", "null", " ", "a,b", '"', "\\", "\\\"", "{}", "é😀\n\t", "\\N"],
        "md5(random()::text)",
    ),
    "varchar(5)": (["", "ab", "é😀"], None),
    "char(5)": (["", "ab", "é"], None),
    '"char"': (["a", ""], None),
    "name": (["a", "with space"], None),
    "uuid": (["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"], "gen_random_uuid()"),
    "inet": (["192.168.0.1/24", "::1", "10.1.2.3"], None),
    "cidr": (["192.168.0.0/24", "2001:db8::/32"], None),
    "macaddr": (["08:00:2b:01:02:03"], None),
    "macaddr8": (["08:00:2b:01:02:03:04:05"], None),
    "bit(3)": (["101"], None),
    "varbit": (["", "1011"], None),
    "money": (["-12.34", "92233720368547758.07"], None),
    "interval": (["1 year 2 mons -3 days 04:05:06.789", "infinity", "0", "-1 us"], None),
    "timetz": (["12:00:00.5+05:45", "24:00:00-15:59"], None),
    "json": (['{"a": [1, "x,y"]}', "null"], None),
    "jsonb": (['{"a": [1, "x\\"y"]}', "null"], None),
    "jsonpath": (["$.a[*]"], None),
    "tsvector": (["a:1 fat:2 'x y':3A"], None),
    "tsquery": (["a & !b"], None),
    "point": (["(1.5,-2)"], None),
    "line": (["{1,2,3}"], None),
    "lseg": (["[(1,2),(3,4)]"], None),
    "box": (["(1,2),(3,4)", "(0,0),(1,1)"], None),
    "path": (["((1,2),(3,4))", "[(1,2)]"], None),
    "polygon": (["((1,2),(3,4),(5,0))"], None),
    "circle": (["<(1,2),3>"], None),
    "pg_lsn": (["16/B374D848"], None),
    "xid": (["4294967295"], None),
    "xid8": (["18446744073709551615"], None),
    "tid": (["(1,2)"], None),
    "pg_snapshot": (["10:20:10,14"], None),
    "txid_snapshot": (["10:20:10,14"], None),
    "regclass": (["pg_type"], None),
    "int2vector": (["1 2 3"], None),
    "oidvector": (["1 2 3"], None),
    "int4range": (["[1,5)", "empty", "(,)"], None),
    "tstzrange": (['["2024-01-01 00:00:00+00",)'], None),
    "datemultirange": (["{}", "{[2024-01-01,2024-02-01),[2025-01-01,infinity)}"], None),
    "mood": (["sad", "very happy", "NULL"], None),
    "price": (["1.50", "-0.5"], None),
    "dearer": (["1.50", "99.99"], None),
    "mailing": (["{1,2}", "{}", "{NULL}"], None),
}  # fmt: skip
DEFINITIONS = """
create type mood as enum ('sad', 'very happy', 'NULL');
create domain price as numeric(10,2);
create domain dearer as price check (value > 1);
create domain mailing as int4[];
create type address as (street text, number int4);
"""


def column(
    connection: psycopg.Connection[Any], query: str
) -> tuple[pa.Array, list[bytes | None], PgType, int]:
    """The one column of a query: as the server prints it, in binary, its type and modifier."""
    text = connection.pgconn.exec_(query.encode())
    assert not text.error_message, text.error_message
    texts = pa.array([text.get_value(row, 0) for row in range(text.ntuples)], pa.binary())
    of = types(connection)[text.ftype(0)]
    binary = connection.pgconn.exec_params(query.encode(), [], result_format=1)
    raw = [binary.get_value(row, 0) for row in range(binary.ntuples)]
    return texts, raw, of, text.fmod(0)


EPOCH_DAYS, EPOCH_US = 10_957, 946_684_800_000_000
"""From 1970 to 2000, where PostgreSQL counts from."""


def shifted(form: str, shift: int) -> Callable[[bytes], int]:
    limits = INT32 if form == ">i" else INT64

    def number(raw: bytes) -> int:
        (found,) = struct.unpack(form, raw)
        return int(found) if found in limits else int(found) + shift

    return number


def unpacked(form: str) -> Callable[[bytes], Any]:
    return lambda raw: struct.unpack(form, raw)[0]


BINARY: dict[int, Callable[[bytes], Any]] = {
    16: unpacked("?"),
    17: bytes,
    20: unpacked(">q"),
    21: unpacked(">h"),
    23: unpacked(">i"),
    25: bytes.decode,
    26: unpacked(">I"),
    700: lambda raw: struct.pack(">d", struct.unpack(">f", raw)[0]),
    701: bytes,
    1082: shifted(">i", EPOCH_DAYS),
    1083: unpacked(">q"),
    1114: shifted(">q", EPOCH_US),
    1184: shifted(">q", EPOCH_US),
}


def independent(text: bytes | None, raw: bytes | None, of: PgType, arrow: pa.DataType) -> Any:
    """The value by another way: from the binary format, or by Python's decimal, or the text."""
    if text is None or raw is None:
        return None
    if of.oid in BINARY:
        return BINARY[of.oid](raw)
    if pa.types.is_decimal(arrow):
        return Decimal(text.decode())
    return text.decode()


def elements(raw: bytes, of: PgType) -> list[Any]:
    """An array of at most one dimension from the binary format."""
    (dimensions,) = struct.unpack_from(">i", raw)
    if not dimensions:
        return []
    count, _ = struct.unpack_from(">ii", raw, 12)
    found: list[Any] = []
    at = 20
    for _ in range(count):
        (length,) = struct.unpack_from(">i", raw, at)
        at += 4
        found.append(BINARY[of.oid](raw[at : at + length]) if length >= 0 else None)
        at += max(length, 0)
    return found


def fill(connection: psycopg.Connection[Any], name: str, count: int) -> None:
    """The table v of a column a: the edge values of the type, nulls, and values by chance."""
    edges, chance = CASES[name]
    connection.execute("drop table if exists v")
    connection.execute(f"create table v (n bigint generated always as identity, a {name})")
    for edge in [*edges, None]:
        connection.execute(f"insert into v (a) values (%s::{name})", [edge])
    if chance is not None:
        connection.execute("select setseed(0.42)")
        connection.execute(
            f"insert into v (a) select case when random() < 0.1 then null else {chance} end"
            f" from generate_series(1, {count})"
        )


@pytest.fixture
def connection(database: Database) -> Iterator[psycopg.Connection[Any]]:
    options = " ".join(f"-c {name}={value.replace(' ', '')}" for name, value in SETTINGS.items())
    with database.connect(options=options) as opened:
        opened.execute(DEFINITIONS)
        yield opened


def test_every_type_of_the_server(connection: psycopg.Connection[Any]) -> None:
    """The text through `convert` and the binary format say the same. R-B3"""
    for name in CASES:
        fill(connection, name, 300)
        texts, raw, of, modifier = column(connection, "select a from v order by n")
        made = convert(texts, of, modifier, column=name)
        check(made)
        while of.base is not None:
            of = of.base
        pairs = zip(texts.to_pylist(), raw, strict=True)
        if of.element is not None:
            expected = [None if one is None else elements(one, of.element) for _, one in pairs]
        else:
            expected = [independent(text, one, of, made.type) for text, one in pairs]
        assert plain(made) == expected, name
        if pa.types.is_decimal(made.type):
            back = [None if one is None else f"{one:f}".encode() for one in made.to_pylist()]
            assert back == texts.to_pylist(), name


NOT_AGGREGATED = ("int2vector", "oidvector", "mailing")
"""Of these, which are arrays for it, array_agg makes arrays of two dimensions."""


def test_arrays_of_every_type_of_the_server(connection: psycopg.Connection[Any]) -> None:
    """An array has the elements that the values are, read alone. R-B3"""
    for name in [name for name in CASES if name not in NOT_AGGREGATED]:
        fill(connection, name, 60)
        texts, _, of, modifier = column(connection, "select a from v order by n")
        alone = plain(convert(texts, of, modifier))
        connection.execute("drop table if exists w")
        connection.execute(f"create table w (n bigint, a {name}[])")
        connection.execute(
            f"insert into w select (n - 1) % 7, array_agg(a order by n)::{name}[] from v group by 1"
        )
        connection.execute("insert into w values (7, null), (8, '{}')")
        lists, _, of, modifier = column(connection, "select a from w order by n")
        made = convert(lists, of, modifier, column=name)
        check(made)
        expected = [alone[at::7] for at in range(7)]
        assert plain(made) == [*filter(None, expected), None, []], name


def test_arrays_of_domains_and_vectors_of_the_server(connection: psycopg.Connection[Any]) -> None:
    for expression, expected in {
        """'{"{1,NULL}",NULL,"{}"}'::mailing[]""": [[1, None], None, []],
        "array_fill('1 2'::int2vector, array[2])": ["1 2", "1 2"],
        "'{1.5,NULL}'::dearer[]": [Decimal("1.50"), None],
    }.items():
        texts, _, of, modifier = column(connection, f"select {expression}")
        assert convert(texts, of, modifier).to_pylist() == [expected]


def test_arrays_of_nasty_strings(connection: psycopg.Connection[Any]) -> None:
    """What the server makes of strings that need quotes, and the binary format, agree. R-B3"""
    chance = random.Random(42)
    connection.execute("create table v (n int, a text[])")
    for number in range(300):
        made = [
            chance.choice([None, "".join(chance.choices('"\\{},; NULnul\n\té😀', k=length))])
            for length in chance.choices(range(7), k=chance.randrange(6))
        ]
        connection.execute("insert into v values (%s, %s)", [number, made])
    texts, raw, of, modifier = column(connection, "select a from v order by n")
    expected = [elements(one, base("text")) for one in raw if one is not None]
    assert convert(texts, of, modifier).to_pylist() == expected
    assert len(expected) == 300


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("numeric(5,2)", "NaN", ValueNotCarried),
        ("timestamp", "294276-12-31 23:59:59.999999", ValueNotCarried),
        ("timestamptz", "294247-01-10 04:00:54.775807", ValueNotCarried),
        ("int4[]", "{{1,2},{3,4}}", ValueNotCarried),
        ("text[]", "[0:1]={a,b}", ValueNotCarried),
        ("text[]", '{{"{",NULL}}', ValueNotCarried),
        ("address", "(x,1)", TypeNotCarried),
        ("address[]", '{"(x,1)"}', TypeNotCarried),
    ],
)
def test_what_the_server_has_and_is_not_carried(
    name: str, text: str, error: type[Exception], connection: psycopg.Connection[Any]
) -> None:
    texts, _, of, modifier = column(connection, f"select '{text}'::{name}")
    with pytest.raises(error):
        convert(texts, of, modifier)
