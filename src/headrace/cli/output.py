"""Rows on their way out: NDJSON, an Arrow stream, a table, or bare lines.

What values are in JSON: `headrace.model.json_values`. The values of a topic of `json` stand as they
are; such a row without `value` has none, which is not the same as `null`.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from headrace.errors import BadUsage, SchemaChangeRefused
from headrace.model.ddl import TIMESTAMP
from headrace.model.json_values import json_values
from headrace.model.records import HEADERS, HEADERS_COLUMN

if TYPE_CHECKING:
    from headrace.model.records import Batch
    from headrace.model.topic import Topic

CELL_WIDTH_MAX = 40
_types = pa.types
_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
_BREAKS = str.maketrans("\r\n", "  ")


# --- where each row stands ------------------------------------------------------------------------

PLACE_FIELDS = [
    pa.field("_position", pa.int64(), nullable=False),
    pa.field("_partition", pa.uint32(), nullable=False),
    pa.field("_offset", pa.uint64(), nullable=False),
    pa.field("_sent_time", TIMESTAMP, nullable=False),
    pa.field("_received_time", TIMESTAMP, nullable=False),
    pa.field(HEADERS_COLUMN, HEADERS),
]
"""The columns of `--with-position`, after those of the topic."""


def with_place(batch: Batch) -> pa.RecordBatch:
    """Add to the rows of a batch where they stand and when they came."""
    places = (
        batch.positions,
        batch.partition,
        batch.offset,
        batch.sent_time,
        batch.received_time,
        batch.headers,
    )
    data = batch.data
    for field, values in zip(PLACE_FIELDS, places, strict=True):
        data = data.append_column(field, values)
    return data


def header_values(column: pa.Array) -> list[Any]:
    """Give headers as JSON: text where it is text, else {"base64": ...}."""
    return [
        None if row is None else {name: _header(value) for name, value in row}
        for row in column.to_pylist()
    ]


def _header(value: bytes | None) -> object:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(value).decode("ascii")}


# --- writers --------------------------------------------------------------------------------------


class RowWriter(Protocol):
    """Writes record batches to a stream."""

    def write(self, data: pa.RecordBatch, position: int) -> None:
        """Write the rows, which were read through `position`."""

    def close(self) -> None:
        """Write what belongs at the end."""


def row_writer(form: str, topic: Topic, schema: pa.Schema, stream: IO[bytes]) -> RowWriter:
    """Give the writer of a format; `schema` is that of the first batch."""
    if form == "arrow":
        return ArrowWriter(schema, stream)
    if form == "table":
        return TableWriter(stream)
    if form == "lines":
        return LinesWriter(topic, stream)
    return NdjsonWriter(topic, stream)


class NdjsonWriter:
    """One JSON object a line."""

    def __init__(self, topic: Topic, stream: IO[bytes]) -> None:
        """Write to a stream of bytes."""
        self._raw_json = topic.value == "json"
        self._stream = stream

    def write(self, data: pa.RecordBatch, position: int) -> None:
        """Write the rows."""
        self._stream.write("".join(self._lines(data)).encode())
        self._stream.flush()

    def close(self) -> None:
        """Nothing is left to write."""

    def _lines(self, data: pa.RecordBatch) -> Iterator[str]:
        names = data.schema.names
        columns = [
            header_values(column) if name == HEADERS_COLUMN else json_values(column)
            for name, column in zip(names, data.columns, strict=True)
        ]
        encode: Callable[[dict[str, Any]], str] = self._spliced if self._raw_json else _dumps
        if HEADERS_COLUMN in names:
            encode = _without_empty_headers(encode)
        if not columns:
            yield from ["{}\n"] * data.num_rows
        for row in zip(*columns, strict=True):
            yield encode(dict(zip(names, row, strict=True))) + "\n"

    def _spliced(self, row: dict[str, Any]) -> str:
        """A row of a `json` topic: its value stands as it is, on one line; none is left out."""
        parts = []
        for name, value in row.items():
            if name != "value":
                parts.append(f"{_dumps(name)}: {_dumps(value)}")
            elif value is not None:
                parts.append(f'"value": {value.translate(_BREAKS)}')
        return f"{{{', '.join(parts)}}}"


def _without_empty_headers(
    encode: Callable[[dict[str, Any]], str],
) -> Callable[[dict[str, Any]], str]:
    def encoded(row: dict[str, Any]) -> str:
        if row[HEADERS_COLUMN] is None:
            del row[HEADERS_COLUMN]
        return encode(row)

    return encoded


class ArrowWriter:
    """An Arrow IPC stream."""

    def __init__(self, schema: pa.Schema, stream: IO[bytes]) -> None:
        """Write the schema at once: a stream without rows has it too."""
        self._schema = schema
        self._writer = pa.ipc.new_stream(stream, schema)
        self._stream = stream
        self._position = 0

    def write(self, data: pa.RecordBatch, position: int) -> None:
        """Write the rows; those of another schema end the stream with an error."""
        if not data.schema.equals(self._schema):
            raise SchemaChangeRefused(
                f"the schema changes after position {self._position}",
                why="an Arrow stream has one schema",
                fix=f"read up to there with --through {self._position}, the rest with --after"
                f" {self._position}, or use --format ndjson",
                position=self._position,
            )
        self._writer.write_batch(data)
        self._stream.flush()
        self._position = position

    def close(self) -> None:
        """Mark the end of the stream."""
        self._writer.close()
        self._stream.flush()


class TableWriter:
    """Columns for the eye; their widths are those of the first batch, longer cells are cut."""

    def __init__(self, stream: IO[bytes]) -> None:
        """Write to a stream of bytes."""
        self._stream = stream
        self._names: list[str] = []
        self._widths: list[int] = []

    def write(self, data: pa.RecordBatch, position: int) -> None:
        """Write the rows, under a head if these are the first or have other columns."""
        if HEADERS_COLUMN in data.schema.names:
            headers = data.column(HEADERS_COLUMN)
            if headers.null_count == len(headers):
                data = data.drop_columns([HEADERS_COLUMN])
        names = data.schema.names
        columns = [
            [_cell(value) for value in json_values(column)]
            if name != HEADERS_COLUMN
            else [_cell(value) for value in header_values(column)]
            for name, column in zip(names, data.columns, strict=True)
        ]
        right = [_is_number(field.type) for field in data.schema]
        lines = []
        if names != self._names:
            self._names = names
            self._widths = [
                min(CELL_WIDTH_MAX, max(map(len, [name, *column])))
                for name, column in zip(names, columns, strict=True)
            ]
            lines.append(self._line(names, right))
            lines.append("  ".join("-" * width for width in self._widths))
        lines.extend(self._line(row, right) for row in zip(*columns, strict=True))
        self._stream.write("".join(line + "\n" for line in lines).encode())
        self._stream.flush()

    def close(self) -> None:
        """Nothing is left to write."""

    def _line(self, row: Sequence[str], right: list[bool]) -> str:
        cells = []
        for cell, width, flush in zip(row, self._widths, right, strict=True):
            text = cell if len(cell) <= width else cell[: width - 1] + "…"
            cells.append(text.rjust(width) if flush else text.ljust(width))
        return "  ".join(cells).rstrip()


def _is_number(kind: pa.DataType) -> bool:
    return bool(_types.is_integer(kind) or _types.is_floating(kind) or _types.is_decimal(kind))


def _cell(value: object) -> str:
    if value is None:
        return "null"
    text = value if isinstance(value, str) else _dumps(value)
    return text if text.isprintable() else _dumps(text)


class LinesWriter:
    """The bare values of an opaque topic, one a line."""

    def __init__(self, topic: Topic, stream: IO[bytes]) -> None:
        """Write to a stream of bytes."""
        if topic.value == "columns":
            raise BadUsage(
                f"topic '{topic.name}' has columns: its rows are not single lines",
                fix="use --format ndjson",
            )
        self._stream = stream

    def write(self, data: pa.RecordBatch, position: int) -> None:
        """Write the values; one that is not a line is an error, not changed."""
        for value in data.column("value").to_pylist():
            line = value.encode() if isinstance(value, str) else value
            if line is None or b"\n" in line:
                what = "has no value" if line is None else "has more than one line"
                raise BadUsage(
                    f"a row at or before position {position} {what}", fix="use --format ndjson"
                )
            self._stream.write(line + b"\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing is left to write."""
