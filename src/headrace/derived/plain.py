"""Rows in a store that knows only numbers, texts and bytes, and does not order them itself.

What a small target needs beside its own calls: values of any Arrow type stored and back again, the
rows of a key range in the order of the log, the mark as a text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from headrace.derived.postgres_text import from_json
from headrace.derived.rows import row_ids
from headrace.interfaces import Cut, KeptTable, Key, Mark
from headrace.model.json_values import json_values


def stored(column: pa.Array) -> list[Any]:
    """Numbers, texts and bytes as they are; moments as numbers, nested values as JSON."""
    kind = column.type
    if pt.is_nested(kind):
        return [None if one is None else json.dumps(one) for one in json_values(column)]
    if pt.is_floating(kind):
        return ["nan" if one != one else one for one in column.to_pylist()]  # noqa: PLR0124
    if pt.is_temporal(kind):
        column = column.view(pa.int32() if pt.is_date(kind) else pa.int64())
    elif pt.is_decimal(kind) or pt.is_boolean(kind):
        column = column.cast(pa.string())
    return list(column.to_pylist())


def restored(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """The inverse of `stored`."""
    if pt.is_nested(kind):
        there = [None if one is None else from_json(json.loads(one), kind) for one in values]
        return pa.array(there, kind)
    if pt.is_floating(kind):
        return pa.array([None if one is None else float(one) for one in values], kind)
    if pt.is_temporal(kind):
        return pa.array(values, pa.int32() if pt.is_date(kind) else pa.int64()).view(kind)
    if pt.is_decimal(kind) or pt.is_boolean(kind):
        return pa.array(values, pa.string()).cast(kind)
    return pa.array(values, kind)


def between(table: KeptTable, rows: pa.Table, after: Key | None, through: Key | None) -> pa.Table:
    """The rows with after < key <= through in the order of keys, as `Target.read` gives them.

    All of them are in memory: a target for large tables lets its index do that.
    """
    keys: list[str] = list(table.key)
    if not keys:
        ids = [row_ids(one) for one in rows.combine_chunks().to_batches()]
        rows, keys = rows.append_column("_row", pa.chunked_array(ids, pa.binary(16))), ["_row"]
    kinds = [rows.schema.field(key).type for key in keys]
    found = _orders([rows.column(key).combine_chunks() for key in keys])
    low, high = (
        one and _orders([pa.array([v], k) for v, k in zip(one, kinds, strict=True)])[0]
        for one in (after, through)
    )
    chosen = [
        at
        for at in sorted(range(rows.num_rows), key=found.__getitem__)
        if (low is None or found[at] > low) and (high is None or found[at] <= high)
    ]
    return rows.take(pa.array(chosen, pa.int64())).select(table.schema.names)


def _orders(columns: Sequence[pa.Array]) -> list[tuple[tuple[int, Any], ...]]:
    """Keys to compare in the order of the log: null first, NaN last, texts by their bytes."""
    made = []
    for column in columns:
        kind = column.type
        if pt.is_temporal(kind):  # Python does not have them all
            column = column.view(pa.int32() if pt.is_date(kind) else pa.int64())  # noqa: PLW2901
        elif pt.is_string(kind):
            column = column.cast(pa.binary())  # noqa: PLW2901
        made.append(
            [(0, 0) if v is None else (2, 0) if v != v else (1, v) for v in column.to_pylist()]  # noqa: PLR0124
        )
    return list(zip(*made, strict=True))


def mark_text(mark: Mark) -> str:
    """A mark to keep beside the rows."""
    cut = mark.cut and [mark.cut.through, mark.cut.position]
    return json.dumps([mark.epoch, cut, mark.log, [table.to_json() for table in mark.tables]])


def mark_of(text: str) -> Mark:
    """The inverse of `mark_text`."""
    epoch, cut, log, tables = json.loads(text)
    kept = tuple(KeptTable.from_json(table) for table in tables)
    return Mark(epoch, Cut(*cut) if cut else None, log, kept)
