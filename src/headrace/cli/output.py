"""Rows on their way out: NDJSON, CSV, an Arrow stream, Parquet, a table, or bare lines.

What values are in JSON: `headrace.model.json_values`. The values of a topic of `json` stand as they
are; such a row without `value` has none, which is not the same as `null`.

**CSV** has one head, then a record a row (RFC 4180, lines end with a line feed). A value is written
as in JSON, without the quotes of JSON: text as it is, numbers and decimals by their digits, `true`
and `false`, times as ISO 8601, binary as base64; lists, maps, structs and headers as JSON text.
Null is an empty field, the empty text is `""`. So `topic append --format csv` takes all of it back.

All of them write batch by batch. Parquet is written in row groups of some 100,000 rows, which are
held until they are full.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa

from headrace.errors import BadUsage, SchemaChangeRefused
from headrace.model.json_values import json_values
from headrace.model.records import HEADERS_COLUMN, PLACE_FIELDS

if TYPE_CHECKING:
    from headrace.model.records import Batch
    from headrace.model.topic import Topic

CELL_WIDTH_MAX = 40
_types = pa.types
_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
_BREAKS = str.maketrans("\r\n", "  ")
_QUOTE = '"'
_SPECIAL = re.compile(r'[,"\r\n]|^\s|\s$')
GROUP_ROWS, GROUP_BYTES = 100_000, 64 << 20
"""Parquet row groups are written when they have so many rows, or so many bytes in memory."""


# --- where each row stands ------------------------------------------------------------------------


def with_place(batch: Batch) -> pa.RecordBatch:
    """Add to the rows of a batch where they stand and when they came."""
    data = batch.data
    for field in PLACE_FIELDS:
        data = data.append_column(field, batch.place(field.name))
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


class RowWriter:
    """Writes record batches to a stream."""

    def __init__(self, stream: IO[bytes]) -> None:
        """Write to a stream of bytes."""
        self._stream = stream

    def write(self, data: pa.RecordBatch, position: int) -> None:
        """Write the rows, which were read through `position`."""
        raise NotImplementedError

    def close(self) -> None:
        """Write what belongs at the end."""
        self._stream.flush()


def row_writer(form: str, topic: Topic | None, schema: pa.Schema, stream: IO[bytes]) -> RowWriter:
    """Give the writer of a format; `schema` is that of the first batch, `topic` if it is of one."""
    if form == "arrow":
        return ArrowWriter(schema, stream)
    if form == "parquet":
        return ParquetWriter(schema, stream)
    if form == "csv":
        return CsvWriter(schema, stream)
    if form == "table":
        return TableWriter(stream)
    if form == "lines":
        assert topic is not None
        return LinesWriter(topic, stream)
    return NdjsonWriter(stream, raw_json=topic is not None and topic.value == "json")


def write_all(writer: RowWriter, batches: Iterable[pa.RecordBatch], position: int) -> None:
    """Write all batches, read at `position`, and the end."""
    for batch in batches:
        writer.write(batch, position)
    writer.close()


def json_columns(data: pa.RecordBatch) -> list[list[Any]]:
    """The columns as what stands for their values in JSON."""
    return [
        header_values(column) if name == HEADERS_COLUMN else json_values(column)
        for name, column in zip(data.schema.names, data.columns, strict=True)
    ]


class NdjsonWriter(RowWriter):
    """One JSON object a line."""

    def __init__(self, stream: IO[bytes], *, raw_json: bool = False) -> None:
        """Write to a stream of bytes; `raw_json`: the values of `value` are JSON already."""
        super().__init__(stream)
        self._raw_json = raw_json

    def write(self, data: pa.RecordBatch, position: int) -> None:
        """Write the rows."""
        self._stream.write("".join(self._lines(data)).encode())
        self._stream.flush()

    def _lines(self, data: pa.RecordBatch) -> Iterator[str]:
        names = data.schema.names
        columns = json_columns(data)
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


class _OneSchema(RowWriter):
    """What can hold rows of one schema only; those of another end it with an error."""

    what = ""

    def __init__(self, schema: pa.Schema, stream: IO[bytes]) -> None:
        super().__init__(stream)
        self._schema = schema
        self._position = 0

    def write(self, data: pa.RecordBatch, position: int) -> None:
        """Write the rows."""
        if not data.schema.equals(self._schema):
            raise SchemaChangeRefused(
                f"the schema changes after position {self._position}",
                why=f"{self.what} has one schema",
                fix=f"read up to there with --through {self._position}, the rest with --after"
                f" {self._position}, or use --format ndjson",
                position=self._position,
            )
        self._write(data)
        self._position = position

    def _write(self, data: pa.RecordBatch) -> None:
        raise NotImplementedError


class ArrowWriter(_OneSchema):
    """An Arrow IPC stream."""

    what = "an Arrow stream"

    def __init__(self, schema: pa.Schema, stream: IO[bytes]) -> None:
        """Write the schema at once: a stream without rows has it too."""
        super().__init__(schema, stream)
        self._writer = pa.ipc.new_stream(stream, schema)

    def _write(self, data: pa.RecordBatch) -> None:
        self._writer.write_batch(data)
        self._stream.flush()

    def close(self) -> None:
        """Mark the end of the stream."""
        self._writer.close()
        self._stream.flush()


class ParquetWriter(_OneSchema):
    """A Parquet file, in row groups of bounded size."""

    what = "a Parquet file"

    def __init__(self, schema: pa.Schema, stream: IO[bytes]) -> None:
        """Write the head."""
        import pyarrow.parquet as pq

        super().__init__(schema, stream)
        self._writer = pq.ParquetWriter(stream, schema, compression="zstd")
        self._held: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def _write(self, data: pa.RecordBatch) -> None:
        self._held.append(data)
        self._rows += data.num_rows
        self._bytes += data.get_total_buffer_size()
        if self._rows >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._write_group()

    def _write_group(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_batches(self._held, self._schema))
        self._held = []
        self._rows = self._bytes = 0

    def close(self) -> None:
        """Write the last rows and the foot, without which it is no Parquet file."""
        self._write_group()
        self._writer.close()
        self._stream.flush()


class CsvWriter(_OneSchema):
    """Comma-separated values: a head, then a record a row."""

    what = "a CSV file"

    def __init__(self, schema: pa.Schema, stream: IO[bytes]) -> None:
        """Write the head at once: a file without rows has it too."""
        super().__init__(schema, stream)
        self._stream.write((",".join(map(_field, schema.names)) + "\n").encode())

    def _write(self, data: pa.RecordBatch) -> None:
        columns = [map(_field, column) for column in json_columns(data)]
        lines = (",".join(row) + "\n" for row in zip(*columns, strict=True))
        self._stream.write("".join(lines).encode())
        self._stream.flush()


def _field(value: object) -> str:
    """A value of JSON as a field of CSV."""
    if value is None:
        return ""
    if not isinstance(value, str):
        value = _dumps(value)
    elif not value:
        return '""'
    return f'"{value.replace(_QUOTE, _QUOTE * 2)}"' if _SPECIAL.search(value) else value


class TableWriter(RowWriter):
    """Columns for the eye; their widths are those of the first batch, longer cells are cut."""

    def __init__(self, stream: IO[bytes]) -> None:
        """Write to a stream of bytes."""
        super().__init__(stream)
        self._names: list[str] = []
        self._widths: list[int] = []

    def write(self, data: pa.RecordBatch, position: int) -> None:
        """Write the rows, under a head if these are the first or have other columns."""
        if HEADERS_COLUMN in data.schema.names:
            headers = data.column(HEADERS_COLUMN)
            if headers.null_count == len(headers):
                data = data.drop_columns([HEADERS_COLUMN])
        names = data.schema.names
        columns = [list(map(_cell, column)) for column in json_columns(data)]
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


class LinesWriter(RowWriter):
    """The bare values of an opaque topic, one a line."""

    def __init__(self, topic: Topic, stream: IO[bytes]) -> None:
        """Write to a stream of bytes."""
        if topic.value == "columns":
            raise BadUsage(
                f"topic '{topic.name}' has columns: its rows are not single lines",
                fix="use --format ndjson",
            )
        super().__init__(stream)

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
