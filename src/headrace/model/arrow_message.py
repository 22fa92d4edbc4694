"""Arrow's message of a few rows, made of plain bytes: what a lone row needs, and no more.

A batch of rows is stored as one message of Arrow's IPC format: a length, metadata (a flatbuffer
that says how many rows there are and, for each column, how many nulls, and for each buffer where it
stands), then the buffers. Made by Arrow, the message of a lone row of twelve columns is some forty
calls into a large library; and where a process has slept for a few milliseconds nothing of that
library is in the caches: what takes 3 us in a loop takes 20 to 80 then.

All metadata of one schema has the same layout. Flatbuffers leave out nothing but numbers that are 0
and stand in a table of their own (here: the rows, and the length of the body, which are not); nodes
and buffers are arrays of plain structs. So Arrow makes one message of the schema, and `MessageForm`
remembers where in it the numbers stand; the messages that follow are this one with other numbers
and other buffers.

::

    FF FF FF FF  length  metadata { ... rows ... nodes (rows, nulls) ... buffers (at, bytes) ...
    ... length of the body ... }  buffers, each at a multiple of 8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct, unpack_from
from typing import Any

import pyarrow as pa
from pyarrow.ipc import read_record_batch

Buffers = Sequence[bytes]
"""Of a column: which values are there (empty: all), then what its type has."""
_PREFIX = 8
_BODY, _HEADER = 10, 8  # places in the vtable of Message
_LENGTH, _NODES, _BUFFERS = 4, 6, 8  # and of RecordBatch
_PAD = [bytes(-length % 8) for length in range(8)]
_INT64 = Struct("<q")


@dataclass(frozen=True, slots=True)
class ArrowMessage:
    """Rows of a schema as they are stored; whoever takes Arrow takes it."""

    schema: pa.Schema
    rows: int
    body: bytes

    def batch(self) -> pa.RecordBatch:
        """The rows."""
        return read_record_batch(pa.py_buffer(self.body), self.schema)

    def __arrow_c_array__(self, requested_schema: object = None) -> Any:
        """For logs that store rows in another form."""
        return self.batch().__arrow_c_array__(requested_schema)


class MessageForm:
    """Makes messages of one schema, whose columns are numbers, booleans, texts or bytes."""

    def __init__(self, schema: pa.Schema) -> None:
        """Let Arrow make one, and find the places of its numbers."""
        self.schema = schema
        self.names: list[str] = schema.names
        self._required = [not field.nullable for field in schema]
        nothing = [pa.nulls(1, field.type) for field in schema]
        made = pa.RecordBatch.from_arrays(nothing, [field.name for field in schema]).serialize()
        size = _PREFIX + int.from_bytes(made[4:_PREFIX].to_pybytes(), "little")
        self._head = head = made[:size].to_pybytes()
        message = _PREFIX + unpack_from("<I", head, _PREFIX)[0]
        batch = _pointed_to(head, _field(head, message, _HEADER))
        nodes = _pointed_to(head, _field(head, batch, _NODES))
        buffers = _pointed_to(head, _field(head, batch, _BUFFERS))
        self._body_at, self._rows_at = _field(head, message, _BODY), _field(head, batch, _LENGTH)
        self._nodes_at, self._buffers_at = nodes + 4, buffers + 4
        self._nodes = Struct(f"<{2 * unpack_from('<I', head, nodes)[0]}q")
        self._buffers = Struct(f"<{2 * unpack_from('<I', head, buffers)[0]}q")

    def message(self, rows: int, columns: Sequence[Buffers]) -> ArrowMessage | None:
        """So many rows (at least one); None: a value is missing in a column that must have it."""
        nodes: list[int] = []
        places: list[int] = []
        parts: list[bytes] = []
        end = 0
        for required, buffers in zip(self._required, columns, strict=True):
            there = buffers[0]
            if there and required:
                return None
            nodes += rows, rows - int.from_bytes(there, "little").bit_count() if there else 0
            for buffer in buffers:
                length = len(buffer)
                places += end, length
                parts += buffer, _PAD[length & 7]
                end += (length + 7) & -8
        head = bytearray(self._head)
        _INT64.pack_into(head, self._rows_at, rows)
        _INT64.pack_into(head, self._body_at, end)
        self._nodes.pack_into(head, self._nodes_at, *nodes)
        self._buffers.pack_into(head, self._buffers_at, *places)
        return ArrowMessage(self.schema, rows, b"".join((head, *parts)))


def _field(data: bytes, table: int, entry: int) -> int:
    """Where a field of a table stands; `entry`: its place in the table's vtable."""
    vtable = table - unpack_from("<i", data, table)[0]
    place: int = unpack_from("<H", data, vtable + entry)[0]
    return table + place


def _pointed_to(data: bytes, at: int) -> int:
    place: int = unpack_from("<I", data, at)[0]
    return at + place
