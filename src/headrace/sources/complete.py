"""Complete changes: of what a database says of a change, the full old row and the full new row.

A database may say less than a change: of an update only the new row, without values that are large
and did not change; of a delete only the key. What it leaves out is what was there before, and that
is known: from an earlier change of the same group, else from the topic's table (the rows as they
are in the log). Here the two are put together, by column, for a whole group of operations at once.

**The pool.** All rows that a result can be made of stand in one pool::

    0 .. n-1          the new rows of the operations (where there is none, nulls that nobody takes)
    n ..              old rows: those the database gave, and those of the table

`old[i]` is the row of the pool that operation i takes away (-1: none), and for each column with
values left out `source[i]` is the row of the pool that has the value. Both are found by sorting:
each operation *reads* a key (update, delete: the row under it goes) and *writes* one (insert,
update); a read sees the last write of its key before it, unless a read took that away; and if the
group has none, what the table has.

**What cannot be completed.** While a table is being snapshotted, a row may change that is not in
the log yet. Its old row is then nothing; and if values of the new row are left out, the row is
*unknown*: nothing is said of it, and its key is given back, to be read from the database.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.model.hashing import hash64
from headrace.tables.runs import sorted_order

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
NONE = -1

INSERT, UPDATE, DELETE = ord("i"), ord("u"), ord("d")


@dataclass
class Operations:
    """Operations on one table, in order. Columns are those of the topic."""

    kinds: npt.NDArray[np.uint8]
    """`INSERT`, `UPDATE` or `DELETE`."""
    new: pa.RecordBatch
    """The new rows; anything where the operation is a delete."""
    read: list[pa.Array]
    """The key columns of the row that was there; anything where the operation is an insert."""
    left_out: dict[str, Mask]
    """Column -> where the new row does not say its value."""
    given: pa.RecordBatch | None = None
    """Old rows as the database gave them."""
    given_at: Numbers | None = None
    """For each operation its row in `given`, or -1."""

    def __len__(self) -> int:
        """How many."""
        return len(self.kinds)


def joined(parts: Sequence[Operations]) -> Operations:
    """Operations one after the other; all have the same columns."""
    if len(parts) == 1:
        return parts[0]
    starts, given, given_at = 0, [], []
    for one in parts:
        at = np.full(len(one), NONE) if one.given_at is None else one.given_at.copy()
        at[at >= 0] += starts
        given_at.append(at)
        if one.given is not None:
            given.append(one.given)
            starts += one.given.num_rows
    names = {name for one in parts for name in one.left_out}
    return Operations(
        np.concatenate([one.kinds for one in parts]),
        pa.concat_batches([one.new for one in parts]),
        [pa.concat_arrays(list(columns)) for columns in zip(*(p.read for p in parts), strict=True)],
        {
            name: np.concatenate([p.left_out.get(name, np.zeros(len(p), bool)) for p in parts])
            for name in names
        },
        pa.concat_batches(given) if given else None,
        np.concatenate(given_at) if given else None,
    )


class Completed(NamedTuple):
    """Rows to append, in the order of the operations."""

    rows: pa.RecordBatch
    weight: Numbers
    operation: Numbers
    """The operation that each row belongs to."""
    unknown: Numbers
    """Operations of which nothing can be said yet."""
    missing: Numbers
    """Operations that take away a row which is not there."""


Lookup = Callable[[list[pa.Array]], tuple[Numbers, pa.RecordBatch]]
"""Rows of the table by key: which of the keys are there, and their rows."""


def whole_keys(operations: Operations, key: Sequence[str]) -> Operations:
    """The same, no key left out: a large one that did not change is that of the old row."""
    for name, read in zip(key, operations.read, strict=True):
        mask = operations.left_out.pop(name, None)
        if mask is not None and mask.any():
            new = operations.new
            places = np.arange(len(operations)) + len(operations) * mask
            column = pa.concat_arrays([new.column(name), read]).take(pa.array(places))
            operations.new = new.set_column(
                new.schema.get_field_index(name), new.schema.field(name), column
            )
    return operations


def complete(
    operations: Operations, key: Sequence[str], lookup: Lookup, *, given_is_there: bool = True
) -> Completed:
    """The full old and new rows of operations (of `whole_keys`); see the top of the file.

    `given_is_there`: an old row that the database gave is in the log too. While a table is being
    snapshotted it may not be: then it only says the values that are left out.
    """
    count = len(operations)
    kinds, new = operations.kinds, operations.new
    reads = kinds != INSERT
    if not reads.any() and not operations.left_out:
        none = np.empty(0, np.int64)
        return Completed(new, np.ones(count, np.int64), np.arange(count), none, none)
    writes = kinds != DELETE
    old = np.full(count, NONE, np.int64)
    given = old.copy()
    parts = [new]
    end = count
    if operations.given is not None and operations.given_at is not None:
        there = operations.given_at >= 0
        given[there] = operations.given_at[there] + end
        parts.append(operations.given)
        end += operations.given.num_rows
    ask = reads & (given == NONE) if given_is_there else reads
    if given_is_there:
        old = given.copy()
    before, seen = _within(operations, key, reads, writes)
    old[ask & seen] = before[ask & seen]
    asked = np.flatnonzero(ask & ~seen)
    if len(asked):
        found, rows = lookup([column.take(pa.array(asked)) for column in operations.read])
        old[asked[found]] = np.arange(end, end + rows.num_rows)
        parts.append(rows.select(new.schema.names).cast(new.schema))
    pool = pa.concat_batches(parts) if len(parts) > 1 else new
    columns, unknown = _filled(pool, np.where(given == NONE, old, given), operations.left_out)
    was_unknown = (old >= 0) & (old < count)
    was_unknown[was_unknown] = unknown[old[was_unknown]]
    old[was_unknown] = NONE  # nothing was said of that row
    taken = np.flatnonzero(reads & (old != NONE) & ~unknown)
    put = np.flatnonzero(writes & ~unknown)
    order = np.argsort(np.concatenate([2 * taken, 2 * put + 1]), kind="stable")
    places = np.concatenate([old[taken], put])[order]
    rows = pa.RecordBatch.from_arrays(
        [column.take(pa.array(at[places])) for column, at in columns], schema=pool.schema
    )
    return Completed(
        rows,
        np.concatenate([np.full(len(taken), -1), np.full(len(put), 1)])[order],
        np.concatenate([taken, put])[order],
        np.flatnonzero(unknown),
        np.flatnonzero(reads & (old == NONE)),
    )


def _within(
    operations: Operations, key: Sequence[str], reads: Mask, writes: Mask
) -> tuple[Numbers, Mask]:
    """What each read finds that the group itself wrote; and whether the group knows the key."""
    count = len(operations)
    before, seen = np.full(count, NONE, np.int64), np.zeros(count, bool)
    readers, writers = np.flatnonzero(reads), np.flatnonzero(writes)
    if not len(readers) or not key:
        return before, seen
    keys = [
        pa.concat_arrays(
            [one.take(pa.array(readers)), operations.new.column(name).take(pa.array(writers))]
        )
        for one, name in zip(operations.read, key, strict=True)
    ]
    times = np.concatenate([2 * readers, 2 * writers + 1])
    words = [hash64(keys, 1), hash64(keys, 2), times.astype(np.uint64)]
    order = sorted_order(words)
    if order is None:
        order = np.arange(len(times))
    same = np.zeros(len(order), bool)
    same[1:] = (np.diff(words[0][order]) == 0) & (np.diff(words[1][order]) == 0)
    times = times[order]
    operation, writing = times >> 1, (times & 1).astype(bool)
    previous, previous_writes = np.roll(operation, 1), np.roll(writing, 1)
    follows = ~writing & same
    seen[operation[follows]] = True
    found = follows & previous_writes
    before[operation[found]] = previous[found]
    return before, seen


def _filled(
    pool: pa.RecordBatch, old: Numbers, left_out: dict[str, Mask]
) -> tuple[list[tuple[pa.Array, Numbers]], Mask]:
    """For each column where each row of the pool has its value; and which new rows lack one."""
    count, same = len(old), np.arange(pool.num_rows)
    unknown = np.zeros(count, bool)
    columns = []
    for name, column in zip(pool.schema.names, pool.columns, strict=True):
        source = same
        mask = left_out.get(name)
        if mask is not None and mask.any():
            source = same.copy()
            source[:count][mask] = old[mask]  # one step back in time; -1 stays
            while True:
                further = np.where(source >= 0, source[source], NONE)
                if (further == source).all():
                    break
                source = further
            unknown |= source[:count] == NONE
        columns.append((column, source))
    return columns, unknown


def equal_rows(one: pa.RecordBatch, other: pa.RecordBatch) -> Mask:
    """Whether rows at the same place are equal: nulls equal nulls, NaN equals NaN."""
    same = np.ones(one.num_rows, bool)
    for a, b in zip(one.columns, other.columns, strict=True):
        if pa.types.is_nested(a.type) or pa.types.is_floating(a.type):
            same &= hash64([a], 1) == hash64([b], 1)
            continue
        equal = pc.fill_null(pc.equal(a, b), False).to_numpy(zero_copy_only=False)
        both = pc.and_(a.is_null(), b.is_null()).to_numpy(zero_copy_only=False)
        same &= equal | both
    return same
