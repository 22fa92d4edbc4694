"""PostgreSQL's text to Arrow, by column. Pure: the texts come from `COPY` or logical replication.

The server prints a value by the settings of the session, so these belong to the format read here:
`DateStyle=ISO, MDY`, `IntervalStyle=iso_8601`, `bytea_output=hex`, `extra_float_digits=1` (each
float as the shortest text that means it, and no other), `TimeZone=UTC`, `client_encoding=UTF8`.

**What becomes what.** A type that Arrow (and Spark after it) has with all its values becomes that
type; all others stay the text that the server printed, which loses nothing (R-B3):

| PostgreSQL | Arrow |
|---|---|
| bool, int2, int4, int8, float4, float8 | the same |
| oid | int64 |
| numeric(p, s), p up to 38, s from 0 to p | decimal128(p, s) |
| date | date32 |
| timestamp, timestamptz | timestamp[us], timestamp[us, UTC] |
| time | time64[us] |
| bytea | binary |
| a domain | what its base becomes |
| an array | list of what its element becomes |
| other base types (also of extensions), enums, ranges, multiranges | string |
| composite and pseudo types | `TypeNotCarried` |

**Values that the Arrow type has no room for.** Infinity is the largest number of the type and
-infinity the smallest (days, microseconds); no date and no timestamp that is carried has these
numbers. 24:00:00 is 86,400,000,000 microseconds. Python has none of these, nor years before 1 or
after 9999, so `to_pylist` and pandas refuse a column with one: `printed` reads it. What cannot be
told apart otherwise is refused with `ValueNotCarried`: NaN in a decimal column (`numeric_as_text`
makes all numerics strings), timestamps from the year 294247 on (beyond int64), arrays of more than
one dimension or with bounds of their own, texts that are not UTF-8.

**How it is fast.** A whole column goes through one cast of Arrow, whose parsers are strict: what
is unusual (BC, years of five digits) makes the cast fail, and only then is the column looked at to
tell the unusual values apart. Infinity is seen by its length before, since a cast that fails often
is slow. Strings are the bytes as they came, once Arrow has seen that they are UTF-8. Best of three
on a busy machine, ms a million: bools 15, ints 20, floats 30, timestamps 30 (half of them infinity:
70), decimals 55, times 65, bytea of 16 bytes 135. A few values (`FEW`) are read one by one where
the type is simple: most of the time of a lone row is that Arrow's kernels are not in the cache.

**Arrays** are taken apart without a loop too. A quote counts unless a backslash that is not itself
escaped stands before it; braces and delimiters count where the number of quotes before them is
even. All other bytes are content: those of all elements are one column again, and go the way of
the element's type. A million elements, four to an array, ms: ints 165, timestamps 315.
"""

from __future__ import annotations

import contextlib
import re
from array import array
from binascii import unhexlify
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from itertools import accumulate
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import TypeNotCarried, ValueNotCarried
from headrace.sources.postgres.protocol import Texts

Bytes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Reader = Callable[[Texts], pa.Array]
FewReader = Callable[[Texts], list[bytes] | None]
"""The buffers of a few values (`model.arrow_message`); None: one of them is not as usual."""
One = Callable[[bytes], int]


@dataclass(frozen=True)
class PgType:
    """A type as `pg_type` has it; built-in types are known by their oid, not by their name."""

    oid: int
    name: str
    kind: str
    """`typtype`: b base, e enum, d domain, r range, m multirange, c composite, p pseudo."""
    element: PgType | None = None
    """Of true arrays only, those that `array_out` prints: not of int2vector, name or point."""
    base: PgType | None = None
    """Of domains only."""
    base_modifier: int = -1
    """Of domains only, `typtypmod`: a column of a domain has no modifier of its own."""
    delimiter: str = ","
    """`typdelim`, between the elements of an array of this type: `;` for box."""
    range_of: PgType | None = None
    """Of ranges and multiranges only."""


BOOL, BYTEA, INT8, INT2, INT4, OID = 16, 17, 20, 21, 23, 26
FLOAT4, FLOAT8, DATE, TIME, TIMESTAMP, TIMESTAMPTZ, NUMERIC = 700, 701, 1082, 1083, 1114, 1184, 1700

ARROW = {
    BOOL: pa.bool_(),
    BYTEA: pa.binary(),
    INT8: pa.int64(),
    INT2: pa.int16(),
    INT4: pa.int32(),
    OID: pa.int64(),
    FLOAT4: pa.float32(),
    FLOAT8: pa.float64(),
    DATE: pa.date32(),
    TIME: pa.time64("us"),
    TIMESTAMP: pa.timestamp("us"),
    TIMESTAMPTZ: pa.timestamp("us", tz="UTC"),
}

FIRST_OWN = 16_384
"""The first oid that is not PostgreSQL's own."""
TEXTS = (18, 19, 25, 1042, 1043)
"""char, name, text, character(n), varchar(n)."""
FEW = 16
DAY_US = 86_400_000_000
FIRST_ORDINAL = date(1970, 1, 1).toordinal()
LAST_US = 2**63 - 1
FIRST_DAY = "1970-01-01 "
DECIMAL_DIGITS_MAX = 38
WHY_NOT_PRINTED_SO = "the server prints no such text of this type under the settings of a capture"
FIX_NOT_PRINTED_SO = "report it with the type and the text: a setting or a type is read wrongly"


# --- types ----------------------------------------------------------------------------------------


def arrow_type(
    pg_type: PgType,
    modifier: int = -1,
    *,
    column: str = "",
    numeric_as_text: bool = False,
) -> pa.DataType:
    """The Arrow type that holds all values of a column of this type, or `TypeNotCarried`."""
    if pg_type.base is not None:
        return arrow_type(
            pg_type.base, pg_type.base_modifier, column=column, numeric_as_text=numeric_as_text
        )
    if pg_type.element is not None:
        return pa.list_(
            arrow_type(pg_type.element, modifier, column=column, numeric_as_text=numeric_as_text)
        )
    if pg_type.kind in "cp":
        kind = "composite" if pg_type.kind == "c" else "pseudo"
        raise TypeNotCarried(
            f"values of type '{pg_type.name}' are not carried", place=_place(column), kind=kind
        )
    if pg_type.oid == NUMERIC:
        return pa.string() if numeric_as_text else _decimal_type(modifier)
    return ARROW.get(pg_type.oid, pa.string())


def refuse_as_key(pg_type: PgType, column: str) -> None:
    """Raise `TypeNotCarried` for regclass and its like: rows are not known by what they print."""
    while inner := pg_type.base or pg_type.element:
        pg_type = inner
    if pg_type.oid < FIRST_OWN and pg_type.name.startswith("reg"):
        raise TypeNotCarried(
            f"values of type '{pg_type.name}' are not carried in a key, or where there is none",
            place=_place(column),
            why="rows are known by them, and they are names of things that can be renamed",
            fix="keep it as oid or text, or give the table another key",
        )


def told(pg_type: PgType, modifier: int, arrow: pa.DataType) -> dict[str, str]:
    """The comment of a topic's column: the type, where the column's own does not say it.

    A follower gives a table in another PostgreSQL that type again, and `debezium` needs it.
    """
    while pg_type.base is not None:
        pg_type, modifier = pg_type.base, pg_type.base_modifier
    of_one, leaf = (
        pg_type.element or pg_type,
        arrow.value_type if pa.types.is_list(arrow) else arrow,
    )
    if of_one.base is not None or of_one.oid >= FIRST_OWN or of_one.oid in TEXTS:
        return {}
    if leaf != pa.string() and not (pa.types.is_temporal(leaf) and modifier >= 0):
        return {}
    name, zone = _SQL_NAMES.get(of_one.name, (of_one.name, ""))
    sized = ""
    if modifier >= 0 and of_one.oid == NUMERIC:
        sized = f"({(modifier - 4) >> 16},{(((modifier - 4) & 0x7FF) ^ 0x400) - 0x400})"
    elif modifier >= 0 and (zone or name in ("bit", "bit varying")):
        sized = f"({modifier})"
    array = "" if of_one is pg_type else "[]"
    return {"comment": f"postgresql {name}{sized}{zone}{array}"}


_SQL_NAMES = {
    "varbit": ("bit varying", ""),
    "time": ("time", " without time zone"),
    "timetz": ("time", " with time zone"),
    "timestamp": ("timestamp", " without time zone"),
    "timestamptz": ("timestamp", " with time zone"),
}


def _decimal_type(modifier: int) -> pa.DataType:
    """What numeric(p, s) becomes; the scale is a signed number of 11 bits."""
    if modifier < 0:
        return pa.string()
    precision = (modifier - 4) >> 16
    scale = (((modifier - 4) & 0x7FF) ^ 0x400) - 0x400
    if precision > DECIMAL_DIGITS_MAX or not 0 <= scale <= precision:
        return pa.string()
    return pa.decimal128(precision, scale)


# --- values ---------------------------------------------------------------------------------------


def convert(
    texts: pa.Array,
    pg_type: PgType,
    modifier: int = -1,
    *,
    column: str = "",
    numeric_as_text: bool = False,
) -> pa.Array:
    """The values that the server has printed so, in the Arrow type of `arrow_type`; nulls stay.

    `texts` is a binary array (or a large one of less than 2 GB), `column` is for messages only.
    """
    arrow = arrow_type(pg_type, modifier, column=column, numeric_as_text=numeric_as_text)
    return reader(pg_type, arrow, column)(texts)


def reader(pg_type: PgType, arrow: pa.DataType, column: str = "") -> Reader:
    """`convert`, prepared for a column of which `arrow` is the `arrow_type`."""
    of = pg_type
    while of.base is not None:
        of = of.base
    few = few_reader(pg_type, arrow)

    def read(texts: Texts) -> pa.Array:
        found = few(texts) if few is not None and len(texts) <= FEW else None
        if found is None:
            return _convert(array_of(texts), of, arrow, column)
        there, *rest = [pa.py_buffer(one) for one in found]
        return pa.Array.from_buffers(arrow, len(texts), [there if there.size else None, *rest])

    return read


def few_reader(pg_type: PgType, arrow: pa.DataType) -> FewReader | None:
    """`reader` for a few values, which gives their buffers; None: the type is not so simple."""
    if pa.types.is_string(arrow):
        return _few_texts
    while pg_type.base is not None:
        pg_type = pg_type.base
    if pg_type.oid == BYTEA:
        return _few_bytes
    if pg_type.oid not in _ONES:
        return None
    one, width = _ONES[pg_type.oid](arrow), arrow.bit_width // 8

    def read(texts: Texts) -> list[bytes] | None:
        given: list[bytes | None] = texts if isinstance(texts, list) else texts.to_pylist()
        try:
            if len(given) == 1 and (text := given[0]) is not None:
                return [b"", one(text).to_bytes(width or 1, "little", signed=True)]
            numbers = [0 if text is None else one(text) for text in given]
            if not width:
                return [_there(given), _bits(numbers)]
            content = [number.to_bytes(width, "little", signed=True) for number in numbers]
            return [_there(given), b"".join(content)]
        except (ValueError, OverflowError):
            return None

    return read


def _few_texts(texts: Texts) -> list[bytes] | None:
    given: list[bytes | None] = texts if isinstance(texts, list) else texts.to_pylist()
    plain = all(text is None or text.isascii() or _is_utf8(text) for text in given)
    return _laid_out(given) if plain else None


def _few_bytes(texts: Texts) -> list[bytes] | None:
    given: list[bytes | None] = texts if isinstance(texts, list) else texts.to_pylist()
    if not all(text is None or text.startswith(rb"\x") for text in given):
        return None
    try:
        return _laid_out([None if text is None else unhexlify(text[2:]) for text in given])
    except ValueError:
        return None


def _convert(texts: pa.Array, pg_type: PgType, arrow: pa.DataType, column: str) -> pa.Array:
    while pg_type.base is not None:
        pg_type = pg_type.base
    if not len(texts):
        return pa.nulls(0, arrow)
    if pa.types.is_list(arrow):
        assert pg_type.element is not None
        return _lists(texts, pg_type.element, arrow, column)
    if pa.types.is_string(arrow):
        return _strings(texts, arrow, column)
    return _READERS.get(pg_type.oid, _numbers)(texts, arrow, column)


def array_of(texts: Texts) -> pa.Array:
    """In Arrow, whatever they are; not by `pa.array`, which asks pandas first."""
    if not isinstance(texts, list):
        return texts if pa.types.is_binary(texts.type) else texts.cast(pa.binary())
    there, *rest = [pa.py_buffer(one) for one in _laid_out(texts)]
    return pa.Array.from_buffers(pa.binary(), len(texts), [there if there.size else None, *rest])


def _laid_out(texts: list[bytes | None]) -> list[bytes]:
    if len(texts) == 1 and (text := texts[0]) is not None:
        return [b"", _PLACES.pack(0, len(text)), text]
    given = [text or b"" for text in texts]
    places = array("i", accumulate(map(len, given), initial=0))  # quicker than numpy, for a few
    return [_there(texts), places.tobytes(), b"".join(given)]


def _there(texts: Sequence[bytes | None]) -> bytes:
    """The bits that say which are not null; none: all."""
    return _bits([text is not None for text in texts]) if None in texts else b""


def _bits(flags: Sequence[int]) -> bytes:
    whole = sum(flag << place for place, flag in enumerate(flags))
    return whole.to_bytes(len(flags) // 8 + 1, "little")


def _integer(text: bytes) -> int:
    if not text.removeprefix(b"-").isdigit():
        raise ValueError
    return int(text)


def _decimal(arrow: pa.DataType) -> One:
    scale, limit = arrow.scale, 10**arrow.precision

    def one(text: bytes) -> int:
        whole, _, rest = text.partition(b".")
        number = _integer(whole + rest)
        if len(rest) != scale or not -limit < number < limit:
            raise ValueError
        return number

    return one


def _float(arrow: pa.DataType) -> One:
    """The number whose bits are those of the float."""
    return _single if arrow.bit_width == 32 else _double


def _double(text: bytes) -> int:
    return int(_DOUBLE[1].unpack(_DOUBLE[0].pack(float(text)))[0])


def _single(text: bytes) -> int:
    """Not of a double in the middle of two floats, or a very small one: it is rounded already."""
    number = float(text)
    if _double(text) & _BELOW_SINGLE == _MIDDLE or 0 < abs(number) < _LEAST_SINGLE:
        raise ValueError
    return int(_SINGLE[1].unpack(_SINGLE[0].pack(number))[0])


_PLACES = Struct("<ii")
_SINGLE = Struct("<f"), Struct("<i")
_BELOW_SINGLE, _MIDDLE, _LEAST_SINGLE = (1 << 29) - 1, 1 << 28, 2.0**-126
_DOUBLE = Struct("<d"), Struct("<q")


def _usual_day(text: bytes) -> int:
    """Days since 1970, of the years that Python has."""
    if len(text) != 10 or text[4:8:3] != b"--":
        raise ValueError
    return date.fromisoformat(text.decode()).toordinal() - FIRST_ORDINAL


def _usual_time(arrow: pa.DataType) -> One:
    """Microseconds since 1970, the same."""
    zone = b"" if arrow.tz is None else b"+00"

    def one(text: bytes) -> int:
        plain = text.removesuffix(zone)
        if len(plain) + len(zone) != len(text) or not 19 <= len(plain) <= 26:
            raise ValueError
        if plain[10:17:3] != b" ::":
            raise ValueError
        at = datetime.fromisoformat(plain.decode())
        seconds = (at.hour * 60 + at.minute) * 60 + at.second
        return _usual_day(plain[:10]) * DAY_US + seconds * 1_000_000 + at.microsecond

    return one


def _strings(texts: pa.Array, arrow: pa.DataType, column: str) -> pa.Array:
    """The same bytes, once they are seen to be UTF-8; a SQL_ASCII database has not checked that."""
    try:
        return texts.cast(arrow)
    except pa.ArrowInvalid:
        bad = next(one for one in texts.to_pylist() if one is not None and not _is_utf8(one))
        raise ValueNotCarried(
            f"{_short(bad.decode(errors='backslashreplace'))} is not UTF-8",
            place=_place(column),
            why="the database has the encoding SQL_ASCII, which checks nothing",
            fix="correct the row, or move the data into a database of the encoding UTF8",
        ) from None


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _numbers(texts: pa.Array, arrow: pa.DataType, column: str) -> pa.Array:
    return _cast(texts.view(pa.string()), arrow, column)


def _bools(texts: pa.Array, arrow: pa.DataType, column: str) -> pa.Array:
    true = pc.equal(texts, b"t")
    if not pc.all(pc.or_(true, pc.equal(texts, b"f")), min_count=0).as_py():
        raise _refused(texts, pc.is_in(texts, pa.array([b"t", b"f", None])), arrow, column)
    return true


def _decimals(texts: pa.Array, arrow: pa.DataType, column: str) -> pa.Array:
    """Digits beyond the precision would be lost silently where they leave 128 bits."""
    point, zero = arrow.scale > 0, arrow.scale == arrow.precision
    room = arrow.precision + point + zero
    if (pc.max(pc.binary_length(texts)).as_py() or 0) > room:
        unsigned = pc.binary_length(pc.ascii_ltrim(texts.view(pa.string()), characters="-"))
        fits = pc.less_equal(unsigned, room)
        if not pc.all(fits).as_py():
            raise _refused(texts, fits.fill_null(True), arrow, column)
    return _cast(texts.view(pa.string()), arrow, column)


def _bytes(texts: pa.Array, arrow: pa.DataType, column: str) -> pa.Array:
    r"""All of `\x0a0b\x0c` is hex once `\x` is `00`: a byte too many before each value."""
    data, offsets = _plain(texts)
    there = np.array(texts.is_valid())
    starts = offsets[:-1][there]
    prefixed = pc.all(pc.starts_with(texts, rb"\x"), min_count=0).as_py()
    try:
        if not prefixed or (offsets & 1).any():
            raise ValueError
        digits = data.copy()
        digits[starts] = digits[starts + 1] = ord("0")
        content = np.frombuffer(unhexlify(digits.data), np.uint8)
    except ValueError:
        good = pc.match_substring_regex(texts, r"^\\x([0-9a-f]{2})*$")
        raise _refused(texts, good.fill_null(True), arrow, column) from None
    keep = np.ones(len(content), np.bool_)
    keep[starts >> 1] = False
    halves = offsets >> 1
    halves[1:] -= np.cumsum(there)
    return _binary(halves, content[keep], there)


# --- dates and times ------------------------------------------------------------------------------


def _moments(texts: pa.Array, arrow: pa.DataType, column: str) -> pa.Array:
    """Dates and timestamps: the usual ones by a cast, infinity by comparison, others singly."""
    strings = texts.view(pa.string())
    shortest = pc.min(pc.binary_length(texts)).as_py()
    if shortest is None or shortest >= len("2024-01-01"):
        with contextlib.suppress(pa.ArrowInvalid):
            return strings.cast(arrow)
    integer = pa.int32() if arrow == pa.date32() else pa.int64()
    odd = _unusual(texts)
    usual = _cast(pc.if_else(odd, pa.scalar(None, pa.string()), strings), arrow, column)
    numbers = _filled(usual, integer)
    limits = np.iinfo(numbers.dtype)
    for text, number in ((b"infinity", limits.max), (b"-infinity", limits.min)):
        infinite = _true(pc.equal(texts, text))
        numbers[infinite] = number
        odd &= ~infinite
    for at in np.flatnonzero(odd):
        numbers[at] = _moment(strings[at].as_py(), arrow, column)
    return _as(numbers, texts, arrow)


def _unusual(texts: pa.Array) -> Mask:
    """Which values are no moments of the years 1 to 9999: not `2024-...`, or with BC at the end."""
    data, offsets = _plain(texts)
    usual = np.diff(offsets) >= len("2024-")
    usual[usual] = data[offsets[:-1][usual] + 4] == ord("-")
    usual[usual] = data[offsets[1:][usual] - 1] != ord("C")
    unusual: Mask = np.array(texts.is_valid()) & ~usual
    return unusual


_MOMENT = re.compile(
    r"(?P<year>\d{4,})-(?P<month>\d\d)-(?P<day>\d\d)"
    r"(?: (?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)(?:\.(?P<us>\d{1,6}))?)?(?P<utc>\+00)?(?P<bc> BC)?"
)


def _moment(text: str, arrow: pa.DataType, column: str) -> int:
    """Days or microseconds since 1970, of any year; `0044-03-15 BC` is in the year -43."""
    found = _MOMENT.fullmatch(text)
    is_date = arrow == pa.date32()
    if (
        found is None
        or (found["h"] is None) != is_date
        or (found["utc"] is None) != (getattr(arrow, "tz", None) is None)
    ):
        raise _not_carried(text, arrow, column)
    year = 1 - int(found["year"]) if found["bc"] else int(found["year"])
    days = _days(year, int(found["month"]), int(found["day"]))
    if is_date:
        return days
    seconds = (int(found["h"]) * 60 + int(found["m"])) * 60 + int(found["s"])
    number = days * DAY_US + seconds * 1_000_000 + int((found["us"] or "").ljust(6, "0"))
    if number >= LAST_US:
        raise ValueNotCarried(
            f"'{text}' is beyond the last timestamp that 64 bits hold",
            place=_place(column),
            why="microseconds since 1970 end in January 294247; the largest number is infinity",
            fix="correct the row at the source, or leave the column out",
        )
    return number


def _days(year: int, month: int, day: int) -> int:
    """Days since 1970 in the calendar that PostgreSQL uses for all years, with a year 0.

    The year begins in March here, so that the leap day is its last; 400 years have 146,097 days.
    """
    year -= month <= 2
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    era, year_of_era = divmod(year, 400)
    return (
        era * 146_097
        + year_of_era * 365
        + year_of_era // 4
        - year_of_era // 100
        + of_year
        - 719_468
    )


def _civil(days: int) -> tuple[int, int, int]:
    """Year, month and day: the inverse of `_days`."""
    era, of_era = divmod(days + 719_468, 146_097)
    year = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    month = (5 * of_year + 2) // 153
    day = of_year - (153 * month + 2) // 5 + 1
    month = month + 3 if month < 10 else month - 9
    return era * 400 + year + (month <= 2), month, day


def printed(column: pa.Array) -> list[str | None]:
    """Dates, times and timestamps as the server prints them: all of them.

    Python has no infinity, no years before 1 or after 9999 and no 24:00:00: where a column has one,
    `to_pylist` raises. This reads it nevertheless.
    """
    kind = column.type
    is_date = kind == pa.date32()
    integer = pa.int32() if is_date else pa.int64()
    limits = np.iinfo(np.int32 if is_date else np.int64)
    zone = "+00" if getattr(kind, "tz", None) else ""

    def text(number: int) -> str:
        if not pa.types.is_time(kind) and number in (limits.max, limits.min):
            return "infinity" if number > 0 else "-infinity"
        days, rest = (number, 0) if is_date else divmod(number, DAY_US)
        if pa.types.is_time(kind):
            days, rest = 0, number
        year, month, day = _civil(days)
        date = f"{year if year > 0 else 1 - year:04}-{month:02}-{day:02}"
        seconds, micros = divmod(rest, 1_000_000)
        time = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        time += f".{micros:06}".rstrip("0").rstrip(".")
        if pa.types.is_time(kind):
            return time
        return (date if is_date else f"{date} {time}{zone}") + " BC" * (year <= 0)

    return [None if one is None else text(one) for one in column.view(integer).to_pylist()]


def _times(texts: pa.Array, arrow: pa.DataType, column: str) -> pa.Array:
    """A time is a moment of the first day; 24:00:00 is the one that is not."""
    midnight = _true(pc.equal(texts, b"24:00:00"))
    strings = texts.view(pa.string())
    if midnight.any():
        strings = pc.if_else(midnight, "00:00:00", strings)
    moments = pc.binary_join_element_wise(FIRST_DAY, strings, "")
    try:
        numbers = moments.cast(pa.timestamp("us"))
    except pa.ArrowInvalid:
        bad = _first_bad(moments, pa.timestamp("us")).removeprefix(FIRST_DAY)
        raise _not_carried(bad, arrow, column) from None
    if not midnight.any():
        return numbers.view(arrow)
    filled = _filled(numbers, pa.int64())
    filled[midnight] = DAY_US
    return _as(filled, texts, arrow)


def _filled(array: pa.Array, integer: pa.DataType) -> npt.NDArray[np.int64]:
    """The numbers of a fixed-width array, to be written to; 0 where it has nulls."""
    numbers: npt.NDArray[np.int64] = np.array(array.view(integer).fill_null(0))
    return numbers


def _as(numbers: npt.NDArray[np.int64], texts: pa.Array, arrow: pa.DataType) -> pa.Array:
    """Numbers as values of a type, null where the text is."""
    return pa.array(numbers, mask=np.array(texts.is_null())).view(arrow)


# --- arrays ---------------------------------------------------------------------------------------

QUOTE, BACKSLASH, OPEN, CLOSE = b'"\\{}'


def _lists(texts: pa.Array, element: PgType, arrow: pa.DataType, column: str) -> pa.Array:
    data, offsets = _plain(texts)
    escapes = _escapes(data)
    quotes = _quotes(data, escapes)
    opens, closes, delimiters = (
        _outside(np.flatnonzero(data == byte), quotes)
        for byte in (OPEN, CLOSE, ord(element.delimiter))
    )
    there = np.array(texts.is_valid())
    starts, ends = offsets[:-1], offsets[1:]
    if not (np.array_equal(opens, starts[there]) and np.array_equal(closes, ends[there] - 1)):
        raise _bad_form(texts, arrow, column)

    filled = ends - starts > len("{}")
    lists = np.searchsorted(delimiters, offsets)
    lists[1:] += np.cumsum(filled)
    begin = _between(starts[filled], delimiters, lists[:-1][filled]) + 1
    end = _between(ends[filled] - 1, delimiters, lists[1:][filled] - 1)
    quoted = data[begin] == QUOTE
    lengths = end - begin - 2 * quoted
    if len(escapes):
        lengths -= np.searchsorted(escapes, end) - np.searchsorted(escapes, begin)

    keep = np.ones(len(data), np.bool_)
    for dropped in (opens, closes, delimiters, quotes, escapes):
        keep[dropped] = False
    elements = _elements(data[keep], lengths, quoted)
    values = _convert(elements, element, arrow.value_type, column)
    nulls = pa.array(~there) if texts.null_count else None
    return pa.ListArray.from_arrays(pa.array(lists, pa.int32()), values, type=arrow, mask=nulls)


def _escapes(data: Bytes) -> Index:
    """Where the backslashes are that escape: the first, third, ... of each run of them."""
    at = np.flatnonzero(data == BACKSLASH)
    number = np.arange(len(at))
    first = np.ones(len(at), np.bool_)
    first[1:] = np.diff(at) > 1
    in_run = number - np.maximum.accumulate(np.where(first, number, 0))
    escapes: Index = at[in_run & 1 == 0]
    return escapes


def _quotes(data: Bytes, escapes: Index) -> Index:
    """Where the quotes are that are not escaped: in turn they open and close."""
    quote = data == QUOTE
    quote[np.minimum(escapes + 1, len(data) - 1)] = False
    return np.flatnonzero(quote)


def _outside(positions: Index, quotes: Index) -> Index:
    """Those of the positions that are not between quotes."""
    outside: Index = positions[np.searchsorted(quotes, positions) & 1 == 0]
    return outside


def _between(outer: Index, delimiters: Index, at: Index) -> Index:
    """Delimiters, with the outer braces of each list put in at these places."""
    edges = np.empty(len(outer) + len(delimiters), np.int64)
    is_outer = np.zeros(len(edges), np.bool_)
    is_outer[at] = True
    edges[is_outer] = outer
    edges[~is_outer] = delimiters
    return edges


def _elements(content: Bytes, lengths: Index, quoted: Mask) -> pa.Array:
    """The elements as a column of texts; NULL without quotes is null."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    texts = _binary(offsets, content, None)
    null = np.array(pc.equal(texts, b"NULL")) & ~quoted
    return _binary(offsets, content, ~null) if null.any() else texts


def _bad_form(texts: pa.Array, arrow: pa.DataType, column: str) -> ValueNotCarried:
    """What is wrong with the first value that does not have the form `{a,b}`."""
    for text in (text.decode() for text in texts.drop_null().to_pylist()):
        if text.startswith("{{"):
            what = "has more than one dimension"
        elif text.startswith("["):
            what = "has bounds of its own"
        elif text[:1] + text[-1:] == "{}":
            continue
        else:
            return _not_carried(text, arrow, column)
        return ValueNotCarried(
            f"the array {_short(text)} {what}",
            place=_place(column),
            why="a list in a row of the log has one dimension and starts at its first element",
            fix="flatten it at the source (to_jsonb keeps its form), or leave the column out",
        )
    return _not_carried(texts.drop_null()[0].as_py().decode(), arrow, column)


# --- columns seen by numpy ------------------------------------------------------------------------


def _plain(texts: pa.Array) -> tuple[Bytes, Index]:
    """The bytes of all values end to end, and where each starts; nulls are empty."""
    dense = texts.fill_null(b"") if texts.null_count else texts
    buffer = dense.buffers()[2]
    offsets = np.frombuffer(dense.buffers()[1], np.int32)[dense.offset :][: len(dense) + 1]
    data = np.frombuffer(buffer, np.uint8) if buffer else np.zeros(0, np.uint8)
    return data[offsets[0] : offsets[-1]], offsets.astype(np.int64) - offsets[0]


def _binary(offsets: npt.NDArray[np.integer[Any]], content: Bytes, there: Mask | None) -> pa.Array:
    """A binary array from its parts."""
    validity = None if there is None else pa.py_buffer(np.packbits(there, bitorder="little"))
    parts = [validity, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, parts)


def _true(flags: pa.Array) -> Mask:
    """Where flags are true, and neither false nor null."""
    seen: Mask = np.array(flags.fill_null(False), np.bool_)
    return seen


# --- what does not go -----------------------------------------------------------------------------


def _cast(strings: pa.Array, arrow: pa.DataType, column: str) -> pa.Array:
    try:
        return strings.cast(arrow)
    except pa.ArrowInvalid:
        raise _not_carried(_first_bad(strings, arrow), arrow, column) from None


def _first_bad(strings: pa.Array, arrow: pa.DataType) -> str:
    """The first text that the cast does not take, found by halving."""
    while len(strings) > 1:
        half = len(strings) // 2
        try:
            strings[:half].cast(arrow)
        except pa.ArrowInvalid:
            strings = strings[:half]
        else:
            strings = strings[half:]
    return str(strings[0].as_py())


def _refused(texts: pa.Array, good: pa.Array, arrow: pa.DataType, column: str) -> ValueNotCarried:
    text = texts[pc.index(good, False).as_py()].as_py()
    return _not_carried(text.decode(errors="replace"), arrow, column)


def _not_carried(text: str, arrow: pa.DataType, column: str) -> ValueNotCarried:
    fact = f"{_short(text)} does not fit into {arrow}"
    if pa.types.is_decimal(arrow) and text in ("NaN", "Infinity", "-Infinity"):
        return ValueNotCarried(fact, place=_place(column))
    return ValueNotCarried(
        fact, place=_place(column), why=WHY_NOT_PRINTED_SO, fix=FIX_NOT_PRINTED_SO
    )


def _short(text: str) -> str:
    return f"'{text}'" if len(text) <= 80 else f"'{text[:77]}...'"


def _place(column: str) -> str:
    return f"column '{column}'" if column else "a column without a name"


_ONES: dict[int, Callable[[pa.DataType], One]] = {
    BOOL: lambda _: (b"f", b"t").index,
    **dict.fromkeys((INT2, INT4, INT8, OID), lambda _: _integer),
    **dict.fromkeys((FLOAT4, FLOAT8), _float),
    NUMERIC: _decimal,
    DATE: lambda _: _usual_day,
    **dict.fromkeys((TIMESTAMP, TIMESTAMPTZ), _usual_time),
}
_READERS: dict[int, Callable[[pa.Array, pa.DataType, str], pa.Array]] = {
    BOOL: _bools,
    BYTEA: _bytes,
    NUMERIC: _decimals,
    DATE: _moments,
    TIMESTAMP: _moments,
    TIMESTAMPTZ: _moments,
    TIME: _times,
}
