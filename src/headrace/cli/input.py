"""Rows on their way in from text: lines of JSON to rows of a topic, bad ones set aside.

JSON has fewer types than a topic, so values are converted by the type of their column, where
nothing is lost: decimals from numbers (by their digits, not through a double) or text, binary from
base64, times from ISO 8601, intervals from `P1DT2H3.5S`, floats also from "NaN" and "Infinity",
maps from objects or arrays of pairs. Nothing else is converted: "1" is not a number.

CSV has text only, so its fields are first read as what stands for a value of their column in JSON
(what `cli.output` writes): digits are a number, `true` is true, JSON text is a list. An empty field
is null, `""` the empty text. The first record is the head; a record may go over several lines.

A line that cannot be a row becomes a `BadLine`, with its number and its reason, and the others go
on. Where a row stood (`_position`, `_offset`, ...; what `--with-position` prints) is not kept,
since the log gives it a new place, and is reported; `_headers` is kept.
"""

from __future__ import annotations

import binascii
import contextlib
import json
import math
import re
import select
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import IO, Any, NamedTuple

import pyarrow as pa

from headrace.errors import (
    BadInputLine,
    BadRows,
    BadUsage,
    HeadraceError,
    MissingKey,
    WrongType,
    nearest,
)
from headrace.model.ddl import TIMESTAMP, TIMESTAMP_NTZ, ddl_type
from headrace.model.json_values import far_moment, json_values
from headrace.model.rows import Intake, opaque_rows
from headrace.model.topic import Topic
from headrace.model.values import Far

LINE_BYTES_MAX = 64 << 20
BATCH_BYTES_MAX = 4 << 20
PLACE = frozenset(("_position", "_partition", "_offset", "_sent_time", "_received_time"))
HEADERS = "_headers"
_types = pa.types

Convert = Callable[[Any], Any]


class Line(NamedTuple):
    """A line of the input, without its end."""

    number: int
    """Counted from 1."""
    data: bytes
    cut: bool = False
    """It was longer than `LINE_BYTES_MAX`; this is its beginning."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line, or a row of Arrow, that was set aside."""

    number: int
    code: str
    """Of the catalogue: HR-LOG-015 for a wrong column, and so on."""
    reason: str
    column: str
    data: bytes

    @property
    def text(self) -> str:
        """What stood there, readable."""
        return self.data.decode(errors="backslashreplace")

    def to_json(self) -> dict[str, Any]:
        """Give it for the file of `--aside`; `base64` instead of `text` if it is no text."""
        found: dict[str, Any] = {"line": self.number, "code": self.code, "reason": self.reason}
        if self.column:
            found["column"] = self.column
        try:
            found["text"] = self.data.decode()
        except UnicodeDecodeError:
            found["base64"] = b64encode(self.data).decode("ascii")
        return found


@dataclass(slots=True)
class Taken:
    """What became of some lines: a batch of the topic's schema, and those set aside."""

    batch: pa.RecordBatch | None = None
    headers: list[Mapping[str, bytes] | None] | pa.Array | None = None
    bad: list[BadLine] = field(default_factory=list)
    moved: bool = False
    """Some rows said where they stood before."""


# --- lines ----------------------------------------------------------------------------------------


def lines_of(
    stream: IO[bytes],
    *,
    lines_max: int,
    blank: bool,
    line_bytes_max: int = LINE_BYTES_MAX,
    records: bool = False,
) -> Iterator[list[Line]]:
    """Give the lines in groups: of `lines_max`, or what there is when no more waits to be read.

    So a file goes in large groups, and a pipe that trickles is not kept waiting. `blank`: whether
    a line of white space only counts as one (its number counts in any case). `records`: of CSV,
    where a line goes on while a quote is open; its number is that of its first line.
    """
    group: list[Line] = []
    size = 0
    lines = _split(stream, line_bytes_max)
    for line in _records(lines, line_bytes_max) if records else lines:
        if line is None:
            if group and not _more_waits(stream):
                yield group
                group, size = [], 0
        elif blank or line.data.strip():
            group.append(line)
            size += len(line.data)
            if len(group) >= lines_max or size >= BATCH_BYTES_MAX:
                yield group
                group, size = [], 0
    if group:
        yield group


def _split(stream: IO[bytes], line_bytes_max: int) -> Iterator[Line | None]:
    """Give the lines as they come, and None after each piece that was read."""
    read: Callable[[int], bytes] = getattr(stream, "read1", stream.read)
    number = held = 0
    parts: list[bytes] = []

    def line() -> Line:
        data = b"".join(parts)
        return Line(number, data[:line_bytes_max], cut=len(data) > line_bytes_max)

    while chunk := read(1 << 18):
        first, *rest = chunk.split(b"\n")
        if held <= line_bytes_max:
            parts.append(first)
            held += len(first)
        if rest:
            number += 1
            yield line()
            for data in rest[:-1]:
                number += 1
                yield Line(number, data[:line_bytes_max], cut=len(data) > line_bytes_max)
            parts, held = [rest[-1]], len(rest[-1])
        yield None
    if held:
        number += 1
        yield line()


def _records(lines: Iterator[Line | None], line_bytes_max: int) -> Iterator[Line | None]:
    """Lines joined to records of CSV: as long as the quotes do not come in pairs."""
    held: list[bytes] = []
    first = size = 0
    is_open = False
    for line in lines:
        if line is None:
            if not held:
                yield None
            continue
        first = first if held else line.number
        is_open ^= bool(line.data.count(b'"') % 2)
        if size <= line_bytes_max:
            held.append(line.data)
            size += len(line.data)
        if not is_open:
            data = b"\n".join(held)
            yield Line(first, data[:line_bytes_max].removesuffix(b"\r"), cut=size > line_bytes_max)
            held, size = [], 0
    if held:
        yield Line(first, b"\n".join(held)[:line_bytes_max], cut=size > line_bytes_max)


def csv_lines(
    stream: IO[bytes], topic: Topic, lines_max: int
) -> tuple[list[str], Iterator[list[Line]]]:
    """The names in the head of a CSV file, and its records."""
    groups = lines_of(stream, lines_max=lines_max, blank=True, records=True)
    group = next(groups, None)
    if group is None:
        raise BadUsage("the input is empty, and CSV begins with a head", fix="give it a head")
    head = [name or "" for name in csv_fields(_text(group[0]))]
    known = [*topic.schema.arrow.names, *PLACE, HEADERS]
    for at, name in enumerate(head):
        if name not in known or name in head[:at]:
            what = "comes twice" if name in known else f"is no column of topic '{topic.name}'"
            near = "" if name in known else nearest(name, known)
            fix = near or f"begin with a head, e.g. {','.join(topic.schema.arrow.names)}"
            raise BadUsage(f"'{name[:60]}' in the head of the CSV file {what}", fix=fix)

    def rest() -> Iterator[list[Line]]:
        found: list[Line] | None = group[1:]
        while found is not None:
            # Nothing is a row only where it can be one: null, in a file of one column.
            lines = [line for line in found if line.data or len(head) == 1]
            if lines:
                yield lines
            found = next(groups, None)

    return head, rest()


_FIELD = re.compile(r'"([^"]*(?:""[^"]*)*)"(?=,|\Z)|([^",]*)(?=,|\Z)')


def csv_fields(text: str) -> list[str | None]:
    """The fields of a record; None for one that is empty without quotes."""
    if '"' not in text:
        return [field or None for field in text.split(",")]
    found: list[str | None] = []
    at = 0
    while True:
        match = _FIELD.match(text, at)
        if match is None:
            raise BadInputLine(f"not CSV at character {at + 1}: a quote within or left open")
        quoted, plain = match.groups()
        found.append((plain or None) if quoted is None else quoted.replace('""', '"'))
        if match.end() == len(text):
            return found
        at = match.end() + 1


def _text(line: Line) -> str:
    """A line as text."""
    data = line.data.removeprefix(b"\xef\xbb\xbf") if line.number == 1 else line.data
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadInputLine(f"not UTF-8 at byte {error.start}") from None


def _more_waits(stream: IO[bytes]) -> bool:
    try:
        return bool(select.select([stream.fileno()], [], [], 0)[0])
    except (AttributeError, OSError, ValueError):  # not a real file: all of it is there
        return True


# --- lines to rows --------------------------------------------------------------------------------


class LineIntake:
    """Takes lines in for one topic, as it is now."""

    def __init__(self, topic: Topic, form: str = "ndjson", head: Sequence[str] = ()) -> None:
        """Prepare the conversions; `form` is `ndjson`, `lines`, or `csv` with its `head`."""
        self.topic = topic
        self.head = head
        self._lines = form == "lines"
        if self._lines and topic.value == "columns":
            raise BadUsage(
                f"topic '{topic.name}' has columns: a bare line cannot be a row of it",
                fix="use --format ndjson",
            )
        schema = topic.schema.arrow
        self._take = rows_intake(topic)
        self._converts = [
            (f.name, convert) for f in schema if (convert := conversion(f.type)) is not None
        ]
        exact = any(_has_decimal(f.type) for f in schema)
        self._decode = json.JSONDecoder(
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=Decimal if exact else None,
            parse_int=_whole,
        ).decode
        kinds = {f.name: f.type for f in schema}
        self._fields = [(name, self._field(name, kinds.get(name))) for name in head]

    def __call__(self, lines: Sequence[Line]) -> Taken:
        """Take lines in: a batch of all that are rows, and the others with their reasons."""
        taken = Taken()
        rows: list[Any] = []
        headers: list[Mapping[str, bytes] | None] = []
        good: list[Line] = []
        for line in lines:
            try:
                row, header, moved = self._row(line)
            except HeadraceError as error:
                taken.bad.append(bad_line(error, line.number, line.data))
                continue
            rows.append(row)
            headers.append(header)
            good.append(line)
            taken.moved |= moved
        taken.batch, refused = sift(len(rows), lambda start, end: self._take(rows[start:end]))
        for index, refusal in refused:
            wrong = _reworded(refusal, rows[index], self.topic)
            taken.bad.append(bad_line(wrong, good[index].number, good[index].data))
        if refused:
            out = {index for index, _ in refused}
            headers = [header for index, header in enumerate(headers) if index not in out]
            taken.bad.sort(key=lambda bad: bad.number)
        if any(header is not None for header in headers):
            taken.headers = headers
        return taken

    def _row(self, line: Line) -> tuple[Any, Mapping[str, bytes] | None, bool]:
        """Give the row of a line, its headers, and whether it said where it stood."""
        if line.cut:
            raise BadInputLine(f"the line is longer than {LINE_BYTES_MAX >> 20} MiB")
        if self._lines:
            return self._bare(line.data), None, False
        text = _text(line)
        value = self._record(text) if self.head else self._json(text)
        if not isinstance(value, dict):
            raise BadInputLine(f"{_shown(value)} is not an object with the topic's columns")
        headers = _headers(value.pop(HEADERS)) if HEADERS in value else None
        moved = not PLACE.isdisjoint(value)
        if moved:
            for name in PLACE:
                value.pop(name, None)
        if self.topic.value == "json":
            self._known(value)
            raw = value.get("value") if self.head else raw_members(text).get("value")
            return (value.get("key"), None if raw is None else raw.encode()), headers, moved
        for name, convert in self._converts:
            found = value.get(name)
            if found is not None:
                value[name] = _converted(convert, found, name)
        if self.topic.value != "columns":
            self._known(value)
            return (value.get("key"), value.get("value")), headers, moved
        return value, headers, moved

    def _json(self, text: str) -> Any:
        try:
            return self._decode(text)
        except json.JSONDecodeError as error:
            raise BadInputLine(f"not JSON at character {error.pos + 1}: {error.msg}") from None
        except (ValueError, RecursionError) as error:
            raise BadInputLine(f"not JSON: {error}") from None

    def _record(self, text: str) -> dict[str, Any]:
        """A record of CSV as what JSON would say."""
        fields = csv_fields(text)
        if len(fields) != len(self.head):
            count = f"{len(fields)} field{'s' if len(fields) > 1 else ''}"
            raise BadInputLine(f"{count}, and the head has {len(self.head)}")
        return {
            name: None if field is None or meaning is None else _converted(meaning, field, name)
            for (name, meaning), field in zip(self._fields, fields, strict=True)
        }

    def _field(self, name: str, kind: pa.DataType | None) -> Convert | None:
        """What a field means in JSON; None: nothing, it is a place."""
        if name == HEADERS or (kind is not None and _types.is_nested(kind)):
            return self._json
        if kind is None:
            return None
        return next((mean for belongs, mean in _MEANINGS if belongs(kind)), str)

    def _known(self, row: Mapping[str, Any]) -> None:
        for name in row:
            if name not in ("key", "value"):
                what = f"a topic of {self.topic.value} has key and value"
                raise BadInputLine(f"there is no column '{name}': {what}", column=name)

    def _bare(self, data: bytes) -> Any:
        if self.topic.value == "text":
            try:
                return data.decode()
            except UnicodeDecodeError as error:
                raise BadInputLine(f"not UTF-8 at byte {error.start}") from None
        return data


def rows_intake(topic: Topic) -> Callable[[Any], pa.RecordBatch]:
    """Give what makes record batches of a topic's newest schema out of rows."""
    place = f"topic '{topic.name}'"
    if topic.value != "columns":
        return lambda rows: opaque_rows(topic.value, rows, place=place)
    defaults = {"_weight": 1} if topic.kind == "changes" else {}
    return Intake(topic.schema.arrow, place=place, defaults=defaults, key=topic.key)


def sift(
    count: int, take: Callable[[int, int], pa.RecordBatch]
) -> tuple[pa.RecordBatch | None, list[tuple[int, HeadraceError]]]:
    """Take `count` rows in, by halves where something is wrong: what is good, and what is not."""
    good: list[pa.RecordBatch] = []
    bad: list[tuple[int, HeadraceError]] = []

    def some(start: int, end: int) -> None:
        try:
            good.append(take(start, end))
        except HeadraceError as error:
            if end - start == 1:
                bad.append((start, error))
                return
            middle = (start + end) // 2
            some(start, middle)
            some(middle, end)

    if count:
        some(0, count)
    if not good:
        return None, bad
    return good[0] if len(good) == 1 else pa.concat_batches(good), bad


def bad_line(error: HeadraceError, number: int, data: bytes) -> BadLine:
    """Say of a line what is wrong with it, in one line."""
    column = error.details.get("column")
    reason = error.fact
    if isinstance(error, MissingKey) and column and not error.details.get("absent"):
        reason = f"column '{column}' is missing or null, and may not be"
    elif column and f"'{column}'" not in reason:
        reason = f"column '{column}': {reason}"
    if error.fix.startswith("did you mean"):
        reason += f" ({error.fix})"
    return BadLine(number, error.code, reason, str(column or ""), data)


def _reworded(error: HeadraceError, row: Any, topic: Topic) -> HeadraceError:
    """Speak of a wrong value as it stands in JSON, not as Python has it."""
    name = error.details.get("column")
    if not isinstance(error, WrongType) or not isinstance(row, dict) or not isinstance(name, str):
        return error
    value = row.get(name)
    if not isinstance(value, bool | int | float | str | list | dict | Decimal):
        return error
    kind = topic.schema.column(name).type
    if _types.is_nested(kind) and isinstance(value, list | dict):
        return error
    spelled = ddl_type(kind)
    what = "is not an" if spelled[0] in "aeiou" else "is not a"
    if "does not fit" in error.fact:
        what = "does not fit"
    return WrongType(f"{_shown(value)} {what} {spelled}", column=name)


def _unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) != len(members):
        names = [name for name, _ in members]
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise BadInputLine(f"'{twice}' comes twice", column=twice)
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f'{name} needs quotes: "{name}"')


def _whole(digits: str) -> int | Decimal:
    """Python makes no integers of thousands of digits; they are JSON all the same."""
    return int(digits) if len(digits) <= 640 else Decimal(digits)


_SPACE = re.compile(r"[ \t\r\n]*")
_raw_decode = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_int=_whole
).raw_decode


def raw_members(text: str) -> dict[str, str]:
    """Give the members of a JSON object, each with its value as it is written; it is valid."""
    found: dict[str, str] = {}
    at = _space(text, _space(text, 0) + 1)
    while text[at] != "}":
        name, at = _raw_decode(text, at)
        at = _space(text, _space(text, at) + 1)  # behind the colon
        _, end = _raw_decode(text, at)
        found[name] = text[at:end]
        at = _space(text, end)
        if text[at] == ",":
            at = _space(text, at + 1)
    return found


def _space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _shown(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        text = repr(value)
    if isinstance(value, Decimal):
        text = f"{value}e0" if str(value).lstrip("-").isdigit() else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _headers(value: Any) -> Mapping[str, bytes] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BadInputLine(f"{_shown(value)} is not an object of headers", column=HEADERS)
    return {name: _header(name, one) for name, one in value.items()}


def _header(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode(errors="surrogatepass")
    if isinstance(value, dict) and set(value) == {"base64"} and isinstance(value["base64"], str):
        return bytes(_converted(_from_base64, value["base64"], HEADERS))
    fact = f"header '{name}' is {_shown(value)}, not text or {{\"base64\": ...}}"
    raise BadInputLine(fact, column=HEADERS)


# --- values ---------------------------------------------------------------------------------------


class _No(Exception):
    """A value that does not convert; its text ends the sentence that begins with the value."""


def _converted(convert: Convert, value: Any, column: str) -> Any:
    try:
        return convert(value)
    except _No as no:
        raise WrongType(str(no), column=column) from None


def conversion(kind: pa.DataType) -> Convert | None:
    """Give what turns a value of JSON (not null) into one for the log; None: it stays as it is."""
    if _types.is_list(kind):
        inner = conversion(kind.value_type)
        return None if inner is None else _list_conversion(inner)
    if _types.is_struct(kind):
        return _struct_conversion(kind)
    if _types.is_map(kind):
        return _map_conversion(kind)
    for belongs, convert in _CONVERSIONS:
        if belongs(kind):
            far = _types.is_date(kind) or _types.is_timestamp(kind) or _types.is_time(kind)
            return _far_too(kind, convert) if far else convert
    return None


def _far_too(kind: pa.DataType, convert: Convert) -> Convert:
    """Take moments that Python does not have (infinity, 44 BC, 24:00) as they are printed."""

    def moment(value: Any) -> Any:
        with contextlib.suppress(ValueError):
            far = far_moment(value, kind) if isinstance(value, str) else None
            if far is not None and json_values(pa.array([far], kind)) == [value]:
                return Far(far)
        return convert(value)

    return moment


def _list_conversion(inner: Convert) -> Convert:
    def convert(value: Any) -> Any:
        if not isinstance(value, list):
            return value  # the log refuses it
        return [None if item is None else inner(item) for item in value]

    return convert


def _struct_conversion(kind: pa.DataType) -> Convert | None:
    fields = [(f.name, inner) for f in kind if (inner := conversion(f.type)) is not None]
    if not fields:
        return None

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            for name, inner in fields:
                found = value.get(name)
                if found is not None:
                    value[name] = inner(found)
        return value

    return convert


def _map_conversion(kind: pa.DataType) -> Convert:
    of_key, of_item = conversion(kind.key_type), conversion(kind.item_type)
    text_keys = not (
        _types.is_integer(kind.key_type)
        or _types.is_floating(kind.key_type)
        or _types.is_boolean(kind.key_type)
        or _types.is_nested(kind.key_type)
    )

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            if not text_keys and value:
                example = "[[1, ...], [2, ...]]"
                raise _No(f"the keys are {ddl_type(kind.key_type)}: write pairs, like {example}")
            value = list(value.items())
        if not isinstance(value, list):
            return value
        found = []
        for pair in value:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise _No(f"{_shown(pair)} is not a pair of key and value")
            key, item = pair
            found.append(
                (
                    key if of_key is None or key is None else of_key(key),
                    item if of_item is None or item is None else of_item(item),
                )
            )
        return found

    return convert


def _has_decimal(kind: pa.DataType) -> bool:
    if _types.is_decimal(kind):
        return True
    if not _types.is_nested(kind):
        return False
    return any(_has_decimal(kind.field(i).type) for i in range(kind.num_fields))


_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _to_float(value: Any) -> Any:
    if type(value) is float or isinstance(value, Decimal):
        number = float(value)
        if math.isinf(number):
            raise _No(f"{'' if number > 0 else '-'}1e309 or more does not fit double")
        return number
    if isinstance(value, str):
        if value not in _SPECIAL:
            raise _No(f'{_shown(value)} is not a number, nor "NaN", "Infinity" or "-Infinity"')
        return _SPECIAL[value]
    return value


def _spelled(pattern: str, mean: Convert, what: str) -> Convert:
    """What text means that is spelled so."""
    found = re.compile(pattern, re.ASCII)

    def meaning(text: str) -> Any:
        if not found.fullmatch(text):
            raise _No(f"{_shown(text)} is not {what}")
        return mean(text)

    return meaning


_DIGITS = r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,4})?"
_finite = _spelled(_DIGITS, float, "a number")
_MEANINGS: tuple[tuple[Callable[[pa.DataType], bool], Convert], ...] = (
    (_types.is_boolean, _spelled("true|false", "true".__eq__, "true or false")),
    (_types.is_integer, _spelled(r"[+-]?\d{1,40}", int, "a whole number")),
    (_types.is_floating, lambda text: text if text in _SPECIAL else _finite(text)),
)

_NUMBER = re.compile(_DIGITS, re.ASCII)


def _to_decimal(value: Any) -> Any:
    if isinstance(value, str):
        if not _NUMBER.fullmatch(value):
            raise _No(f"{_shown(value)} is not a decimal number")
        return Decimal(value)
    return value


def _from_base64(value: Any) -> Any:
    if not isinstance(value, str):
        raise _No(f"{_shown(value)} is not base64 text")
    try:
        return b64decode(value.encode("ascii"), validate=True)
    except (binascii.Error, ValueError):
        raise _No(f"{_shown(value)} is not base64") from None


_CLOCK = r"\d\d:\d\d(?::\d\d(?:\.(?P<fraction>\d+))?)?"
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_TIME = re.compile(_CLOCK, re.ASCII)
_MOMENT = re.compile(rf"\d{{4}}-\d\d-\d\d[T ]{_CLOCK}(?P<zone>Z|[+-]\d\d(?::?\d\d)?)?", re.ASCII)


def _iso(pattern: re.Pattern[str], value: Any, what: str, example: str) -> re.Match[str]:
    """Match ISO 8601, stricter than Python, which drops what is finer than microseconds."""
    found = pattern.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise _No(f"{_shown(value)} is not {what} such as {example}")
    if (found.groupdict().get("fraction") or "")[6:].strip("0"):
        raise _No(f"{_shown(value)} is finer than a microsecond")
    return found


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise _No(f"{_shown(text)}: {error}") from None


def _moment(pattern: re.Pattern[str], parse: Convert, what: str, example: str) -> Convert:
    """What reads moments that are spelled so."""

    def convert(value: Any) -> Any:
        _iso(pattern, value, what, example)
        return _parsed(parse, value)

    return convert


_to_date = _moment(_DATE, date.fromisoformat, "a date", '"2024-01-31"')
_to_time = _moment(_TIME, time.fromisoformat, "a time", '"12:30:00.5"')
_to_timestamp = _moment(_MOMENT, datetime.fromisoformat, "a timestamp", '"2024-01-31T12:30:00Z"')


def _to_local(value: Any) -> datetime:
    match = _iso(_MOMENT, value, "a timestamp_ntz", '"2024-01-31T12:30:00"')
    if match["zone"]:
        raise _No(f"{_shown(value)} has a time zone, timestamp_ntz has none")
    found: datetime = _parsed(datetime.fromisoformat, value)
    return found


_SPAN = re.compile(
    r"(?P<sign>-?)P(?:(?P<days>\d+)D)?"
    r"(?P<time>T(?:(?P<hours>\d+)H)?(?:(?P<minutes>\d+)M)?"
    r"(?:(?P<seconds>\d+)(?:\.(?P<fraction>\d+))?S)?)?",
    re.ASCII,
)


def _to_span(value: Any) -> timedelta:
    match = _iso(_SPAN, value, "an interval", '"P1DT2H30M4.5S"')
    if match["time"] == "T" or value.endswith("P"):
        raise _No(f"{_shown(value)} is not an interval: it names no part")
    fraction = (match["fraction"] or "")[:6].ljust(6, "0")
    try:
        span = timedelta(
            days=int(match["days"] or 0),
            hours=int(match["hours"] or 0),
            minutes=int(match["minutes"] or 0),
            seconds=int(match["seconds"] or 0),
            microseconds=int(fraction),
        )
    except (OverflowError, ValueError):
        raise _No(f"{_shown(value)} does not fit an interval") from None
    return -span if match["sign"] else span


_CONVERSIONS: tuple[tuple[Callable[[pa.DataType], bool], Convert], ...] = (
    (_types.is_floating, _to_float),
    (_types.is_decimal, _to_decimal),
    (_types.is_binary, _from_base64),
    (_types.is_date, _to_date),
    (TIMESTAMP.equals, _to_timestamp),
    (TIMESTAMP_NTZ.equals, _to_local),
    (_types.is_time, _to_time),
    (_types.is_duration, _to_span),
)


# --- Arrow ----------------------------------------------------------------------------------------


class ArrowIntake:
    """Takes record batches of an Arrow stream in for one topic; bad rows are set aside too."""

    def __init__(self, topic: Topic) -> None:
        """For the topic as it is now."""
        self.topic = topic
        self._take = rows_intake(topic)

    def __call__(self, batch: pa.RecordBatch, first: int) -> Taken:
        """Take a batch in, whose first row has the number `first` in the stream.

        A stream that does not have the topic's columns at all is an error of its own.
        """
        taken = Taken()
        moved = [name for name in batch.schema.names if name in PLACE]
        taken.moved = bool(moved)
        headers = batch.column(HEADERS) if HEADERS in batch.schema.names else None
        batch = batch.drop_columns([*moved, *([HEADERS] if headers is not None else [])])
        self._take(batch.slice(0, 0))

        def take(start: int, end: int) -> pa.RecordBatch:
            part = batch.slice(start, end - start)
            _validate(part)
            return self._take(part)

        taken.batch, refused = sift(batch.num_rows, take)
        for index, error in refused:
            row = json.dumps(_readable(batch.slice(index, 1)), default=str, ensure_ascii=False)
            taken.bad.append(bad_line(error, first + index, row.encode()))
        if headers is not None and headers.null_count < len(headers):
            out = {index for index, _ in refused}
            taken.headers = headers.take(
                pa.array([i for i in range(len(headers)) if i not in out], pa.int64())
            )
        return taken


def _validate(part: pa.RecordBatch | pa.Array) -> None:
    """Look at every offset and every letter: Arrow itself believes what it reads."""
    try:
        part.validate(full=True)
    except pa.ArrowException as error:
        raise BadRows("not valid Arrow", why=str(error), fix="write the stream anew") from error


def _readable(row: pa.RecordBatch) -> dict[str, Any]:
    """The columns of a row that can be shown."""
    found = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        with contextlib.suppress(BadRows):
            _validate(column)
            found[name] = column[0].as_py()
    return found


_ARROW_FILE = b"ARROW1\0\0"


class _Behind:
    """A stream of which the beginning was read already."""

    closed = False

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head, self._rest = head, rest

    def read(self, size: int) -> bytes:
        head, self._head = self._head[:size], self._head[size:]
        return head + self._rest.read(size - len(head))


def arrow_batches(stream: IO[bytes]) -> Iterator[pa.RecordBatch]:
    """Give the record batches of an Arrow IPC stream, or file: that is one behind its magic."""
    try:
        head = stream.read(len(_ARROW_FILE))
        rest = _Behind(b"" if head == _ARROW_FILE else head, stream)
        with pa.ipc.open_stream(pa.PythonFile(rest, "r")) as reader:
            yield from reader
    except (pa.ArrowException, OSError, EOFError) as error:
        raise BadRows(
            "the input is not a whole Arrow stream",
            why=str(error).partition("\n")[0],
            fix="write it with 'headrace topic read --format arrow' or pyarrow.ipc.new_stream()",
        ) from error


def parquet_batches(stream: IO[bytes], rows_max: int) -> Iterator[pa.RecordBatch]:
    """Give the rows of a Parquet file, so many at a time."""
    from pyarrow import parquet

    if not stream.seekable():
        raise BadUsage("a Parquet file cannot be read from a pipe", fix="name it with --file")
    try:
        with parquet.ParquetFile(stream) as file:
            yield from file.iter_batches(rows_max)
    except (pa.ArrowException, OSError) as error:
        raise BadRows(
            "the input is not a whole Parquet file", why=str(error).partition("\n")[0],
            fix="write it with 'headrace topic read --output FILE.parquet'",
        ) from error  # fmt: skip
