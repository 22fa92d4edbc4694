"""Rows as versions of keys: the words by which a table is sorted, and which version counts.

A table is a collection (`collection`) whose identity is::

    _0 .. _n   order words of the key: they ascend as Spark sorts the key
    _h         hash of the whole key, which tells keys with equal order words apart
    _p         ~position: the newest version comes first
    _s         ~place in the reading: what came last in an entry comes first

So all versions of a key stand together, newest first, and **the version at P is the first row at or
after (key, ~P, 0)**: one search per run, whatever the number of versions. Rows have weight 1 and
are never added up: no two have one identity.

**Order words.** One column of fixed width is one word (`order64`). Otherwise the columns become
bytes whose order is that of the key (per column: 00 for null, else 01 and the value, big-endian,
sign flipped; strings with 00 written as 00 ff and ended by 00 00), of which the first 32 (more with
more columns) become words. Keys that agree in all of these differ in `_h` only and stand in its
order; `scan` puts each such group into order by the key columns themselves.

**Which row counts.** In a `changes` topic the rows of one key in one entry are added up, as weights
are: a row that is there in the end is the key's row, if several the last; if only rows are gone, so
is the key; and if nothing is left (a row came and went) the entry says nothing of the key. Rows of
a large entry come in several batches: within a batch they are added up, and a later batch counts
over an earlier one, but for a key whose new row came in one and whose old row goes in the other: it
is there (`not_taken_back`). In an `events` topic the last row of the entry counts; with `_op = 'd'`
the key is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from headrace.model.hashing import Words, bytes_of, fixed, hash64, is_bytes, order64, valid_of
from headrace.tables.runs import (
    WEIGHT,
    WORD,
    Index,
    differs,
    find_rows,
    identity,
    sorted_order,
    take_rows,
)

if TYPE_CHECKING:
    from headrace.tables.collection import Collection

GONE = "_gone"
POSITION = "_position"
STRING_WORDS = 4
"""Words for the first string of a key: 32 bytes; each further column adds one."""
_TOP = np.uint64(1 << 63)


def word_count(types: Sequence[pa.DataType]) -> int:
    """How many order words a key of these columns has."""
    if len(types) == 1 and not is_bytes(types[0]) and not _wide(types[0]):
        return 1
    if any(is_bytes(kind) for kind in types):
        return STRING_WORDS + len(types) - 1
    return (sum(17 if _wide(kind) else 9 for kind in types) + 7) // 8


def _wide(kind: pa.DataType) -> bool:
    return bool(pt.is_decimal(kind) and kind.precision > 18)


def table_schema(key: Sequence[pa.DataType], rows: pa.Schema) -> pa.Schema:
    """The columns of the runs of a table."""
    names = [*(f"_{at}" for at in range(word_count(key))), "_h", "_p", "_s"]
    words = [pa.field(name, WORD, nullable=False) for name in names]
    own = [pa.field(WEIGHT, pa.int64(), nullable=False), pa.field(GONE, pa.bool_(), nullable=False)]
    return pa.schema([*words, *own, *rows])


def key_words(columns: Sequence[pa.Array], seed: int) -> list[Words]:
    """The order words of keys, and their hash."""
    count = word_count([column.type for column in columns])
    if count == 1:
        return [order64(columns[0])[0], hash64(columns, seed)]
    joined = pc.binary_join_element_wise(
        *(part for column in columns for part in _ordered_bytes(column)),
        pa.scalar(b"", pa.large_binary()),
    )
    data, bounds = bytes_of(joined)
    lengths = np.minimum(np.diff(bounds), 8 * count)
    matrix = np.zeros((len(joined), 8 * count), np.uint8)
    rows = np.repeat(np.arange(len(joined)), lengths)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    matrix[rows, places] = data[np.repeat(bounds[:-1], lengths) + places]
    words = matrix.view(">u8").astype(np.uint64)
    return [*(np.ascontiguousarray(words[:, at]) for at in range(count)), hash64(columns, seed)]


def _ordered_bytes(column: pa.Array) -> list[pa.Array]:
    """Bytes in the order of a column, as parts to be joined."""
    valid = valid_of(column)
    if is_bytes(column.type):
        tag = _rows_of_bytes(valid.astype(np.uint8)[:, None], None)
        value = column.cast(pa.binary()).cast(pa.large_binary()).fill_null(b"")
        if pc.any(pc.match_substring(value, b"\0")).as_py():
            value = pc.replace_substring(value, b"\0", b"\0\xff")
        end = np.zeros((len(column), 2), np.uint8)
        return [tag, value, _rows_of_bytes(end, np.where(valid, 2, 0))]
    if _wide(column.type):
        halves = fixed(column, "V16").view("<u8").reshape(-1, 2)
        words = np.stack([halves[:, 1] ^ _TOP, halves[:, 0]], axis=1)
    elif column.type.bit_width == 64 and not pt.is_floating(column.type):
        words = (fixed(column, "<i8").view(np.uint64) ^ _TOP)[:, None]
    else:
        words = order64(column)[0][:, None]
    body = words.astype(">u8").view(np.uint8).reshape(len(column), 8 * words.shape[1])
    whole = np.concatenate([valid.astype(np.uint8)[:, None], body], axis=1)
    return [_rows_of_bytes(whole, np.where(valid, whole.shape[1], 1))]


def _rows_of_bytes(
    matrix: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int64] | None
) -> pa.Array:
    """The rows of a matrix, each cut to its length, as an Arrow array."""
    count, width = matrix.shape
    if lengths is None:
        lengths = np.full(count, width, np.int64)
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    data = matrix[np.arange(width) < lengths[:, None]]
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(pa.large_binary(), count, buffers)


def versions(
    rows: pa.RecordBatch,
    key: Sequence[str],
    positions: npt.NDArray[np.int64],
    counted: int,
    *,
    changes: bool,
    seed: int,
    schema: pa.Schema,
    tombstone: npt.NDArray[np.bool_] | None = None,
) -> pa.RecordBatch:
    """Rows of a topic as rows of its table; `counted` rows of the reading came before these.

    `tombstone`: which of them say that their key is gone.
    """
    words = key_words([rows.column(name) for name in key], seed)
    places = np.arange(counted, counted + rows.num_rows, dtype=np.uint64)
    gone = tombstone if tombstone is not None else np.zeros(rows.num_rows, bool)
    if changes:
        gone = rows.column("_weight").to_numpy() < 0
    words += [~positions.astype(np.uint64), ~places]
    own = [pa.array(np.ones(rows.num_rows, np.int64)), pa.array(gone)]
    batch = pa.RecordBatch.from_arrays(
        [*(pa.array(word) for word in words), *own, *rows.columns], schema=schema
    )
    if changes:
        left, there = what_is_left(rows, words[:-1], seed)
        batch = take_rows(batch, left)
        return batch.set_column(schema.get_field_index(GONE), schema.field(GONE), pa.array(~there))
    # Of the rows of one key in one entry only the one that counts is kept.
    order = sorted_order(words)
    if order is None:
        order = np.arange(rows.num_rows)
    fresh = differs([word[order] for word in words[:-1]])
    return take_rows(batch, order[np.concatenate(([True], fresh))[: rows.num_rows]])


def what_is_left(
    rows: pa.RecordBatch, of_key: Sequence[Words], seed: int
) -> tuple[Index, npt.NDArray[np.bool_]]:
    """For each key and entry the row that counts, if the entry says anything of the key.

    And whether it is there, or gone. In the order of the words `of_key`, which say key and entry.
    """
    if not rows.num_rows:
        return np.empty(0, np.int64), np.empty(0, bool)
    words = [*of_key, _content(rows, seed)]
    order = sorted_order(words)
    if order is None:
        order = np.arange(rows.num_rows)
    words = [word[order] for word in words]
    starts = np.concatenate(([0], np.flatnonzero(differs(words)) + 1))
    weight = np.add.reduceat(rows.column("_weight").to_numpy()[order], starts)
    last = np.maximum.reduceat(order, starts)
    left = np.flatnonzero(weight)
    if not len(left):
        return np.empty(0, np.int64), np.empty(0, bool)
    keys = [word[starts[left]] for word in words[:-1]]
    groups = np.concatenate(([0], np.flatnonzero(differs(keys)) + 1))
    # What is there counts over what is gone, then what came last.
    best = np.maximum.reduceat(last[left] | ((weight[left] > 0) << 62), groups)
    return best & ((1 << 62) - 1), best >> 62 > 0


def _content(rows: pa.RecordBatch, seed: int) -> Words:
    """A hash of all columns that are not Headrace's own."""
    columns = [rows.column(at) for at, name in enumerate(rows.schema.names) if name[:1] != "_"]
    return hash64(columns, ~seed & 0xFFFF_FFFF)


def probed(
    collection: Collection, words: Sequence[Words], position: int
) -> tuple[Index, pa.RecordBatch]:
    """Which of the keys have a version at a position, in their order, and the newest of each."""
    batch = collection.probe(np.unique(words[0]))
    found = identity(batch)
    visible = np.flatnonzero(found[-2] >= np.uint64(~position & 0xFFFF_FFFF_FFFF_FFFF))
    keys = [word[visible] for word in found[:-2]]
    first = np.ones(len(visible), bool)
    first[1:] = differs(keys)
    rows = visible[first]
    if not len(rows):
        return rows, take_rows(batch, rows)
    at, there = find_rows([key[first] for key in keys], words)
    asked = np.flatnonzero(there)
    return asked, take_rows(batch, rows[at[asked]])


def not_taken_back(
    part: pa.RecordBatch, rows: pa.RecordBatch, before: Collection, position: int, seed: int
) -> pa.RecordBatch:
    """The versions of a later batch of an entry, without the keys that are not gone after all.

    `part` are those of `rows`, and `before` has what earlier batches of the entry at `position`
    said. A row that these brought, and that `rows` do not take back, is still there: what they take
    is the row from before the entry.
    """
    words = identity(part)
    gone = np.flatnonzero(part.column(GONE).to_numpy(zero_copy_only=False))
    asked, found = probed(before, [word[gone] for word in words[:-2]], position)
    same = identity(found)[-2] == np.uint64(~position & 0xFFFF_FFFF_FFFF_FFFF)
    came = np.flatnonzero(same & ~found.column(GONE).to_numpy(zero_copy_only=False))
    said, each = np.unique(_content(rows, seed), return_inverse=True)
    weight = np.bincount(each, rows.column("_weight").to_numpy())
    stays = ~np.isin(_content(take_rows(found, came), seed), said[weight < 0])
    return take_rows(part, np.delete(np.arange(part.num_rows), gone[asked[came[stays]]]))
