"""Weighted rows in the order of their identity: consolidated, merged, searched. Pure: no files.

A row is some words of 64 bits, its **identity**; then `_w`, its weight; then the payload. In the
views' state the identity is `_k` (hash of the key), in ordered collections `_o` (order word), and
`_h` (hash of the whole row); in tables it is of key and position (`keyed`). A batch is *sorted*
when identities ascend strictly and no weight is 0; `consolidate` makes it so: weights of equal
identities are added up, rows of weight 0 go.

**How it is sorted.** By `_k`, and where few are equal that is nearly all. Else one word is made of
two: the rank of `_k`, and below it as many bits of the next word as there is room for. Only rows
that are equal in the word are compared by everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow.compute import take

Words = npt.NDArray[np.uint64]
Index = npt.NDArray[np.int64]
Identity = tuple[int, ...]
"""The words before the weight; some functions also take the first few of them."""

IDENTITY = ("_k", "_o", "_h")
WEIGHT = "_w"
WORD = pa.uint64()
SMALL = 2048
"""Fewer rows are sorted as fast by comparisons."""


@lru_cache(maxsize=1024)
def state_schema(payload: pa.Schema, *, ordered: bool = False) -> pa.Schema:
    """The columns of a collection: identity, weight, then those of `payload`."""
    names = IDENTITY if ordered else (IDENTITY[0], IDENTITY[2])
    fields = [pa.field(name, WORD, nullable=False) for name in names]
    return pa.schema([*fields, pa.field(WEIGHT, pa.int64(), nullable=False), *payload])


def state_batch(
    payload: Sequence[pa.Array],
    schema: pa.Schema,
    weights: npt.NDArray[np.int64] | pa.Array,
    *,
    k: Words,
    h: Words,
    o: Words | None = None,
) -> pa.RecordBatch:
    """A change for a collection of this schema, from its parts; not consolidated."""
    words = [pa.array(word) for word in (k, o, h) if word is not None]
    weight = weights if isinstance(weights, pa.Array) else pa.array(weights, pa.int64())
    return pa.RecordBatch.from_arrays([*words, weight, *payload], schema=schema)


def identity(batch: pa.RecordBatch) -> list[Words]:
    """The columns of a batch that say which row is which, seen by numpy."""
    return [batch.column(at).to_numpy() for at in range(batch.schema.get_field_index(WEIGHT))]


def identity_at(batch: pa.RecordBatch, row: int) -> Identity:
    """The identity of one row."""
    return tuple(int(column[row]) for column in identity(batch))


def weights(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """The weights, seen by numpy."""
    seen: npt.NDArray[np.int64] = batch.column(WEIGHT).to_numpy()
    return seen


def consolidate(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Sort by identity, add weights up, drop what is zero."""
    return _taken(batch, *consolidation(batch))


def consolidate_runs(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Make one of several sorted batches (at least one)."""
    return parts[0] if len(parts) == 1 else consolidate(pa.concat_batches(parts))


def consolidation(
    batch: pa.RecordBatch,
) -> tuple[Index | None, npt.NDArray[np.int64] | None]:
    """Which rows to take, in order (None: all as they are), and their weights (None: their own)."""
    if not batch.num_rows:
        return None, None
    columns, weight = identity(batch), weights(batch)
    order, distinct = _sorted(columns)
    if distinct and weight.all():
        return order, None  # nothing to add up
    if order is not None:
        columns, weight = [column[order] for column in columns], weight[order]
    fresh = differs(columns)
    if fresh.all() and weight.all():
        return order, None
    starts = np.concatenate(([0], np.flatnonzero(fresh) + 1))
    sums = np.add.reduceat(weight, starts)
    kept = np.flatnonzero(sums)
    rows = starts[kept]
    return rows if order is None else order[rows], sums[kept]


def differs(columns: Sequence[Words]) -> npt.NDArray[np.bool_]:
    """Whether each row but the first differs from the one before."""
    differs: npt.NDArray[np.bool_] = columns[-1][1:] != columns[-1][:-1]
    for column in columns[:-1]:
        differs |= column[1:] != column[:-1]
    return differs


def sorted_order(columns: Sequence[Words]) -> Index | None:
    """The order of the rows by all columns; None if that is how they stand."""
    return _sorted(columns)[0]


def _sorted(columns: Sequence[Words]) -> tuple[Index | None, bool]:
    """The order of the rows (None: as they stand), and whether they are known to differ."""
    strictly, weakly = _in_order(columns)
    if weakly:
        return None, strictly
    first = columns[0]
    order = _ordered(first)
    found = first[order]
    fresh = found[1:] != found[:-1]
    if fresh.all():
        return order, True
    if len(columns) == 1:
        return order, False
    word = found
    if np.count_nonzero(fresh) < 7 * len(first) // 8:
        order, word = _by_two(order, fresh, columns[1])
    ties = word[1:] == word[:-1]
    if not ties.any():
        return order, True
    # Put the rows in order whose word is not alone: places stay, who stands there changes.
    places = np.flatnonzero(_not_alone(ties))
    rows = order[places]
    order[places] = rows[np.lexsort([column[rows] for column in reversed(columns)])]
    return order, False


def _by_two(order: Index, fresh: npt.NDArray[np.bool_], second: Words) -> tuple[Index, Words]:
    """The order by two words, and a word of both; `order` is that by the first.

    `fresh`: where, in this order, the first word changes.
    """
    rank = np.zeros(len(order), np.uint64)
    np.cumsum(fresh, out=rank[1:])
    bits = int(rank[-1]).bit_length()
    most = int(np.diff(np.flatnonzero(fresh), prepend=-1, append=len(fresh)).max())
    word = _two_in_one(rank, second[order], np.uint64(bits))
    inner = _ordered(word, 2 if bits + 2 * most.bit_length() <= 34 else 3)
    return order[inner], word[inner]


def _ordered(words: Words, digits: int = 2) -> Index:
    """A stable argsort: by the first bits, 16 for a digit, and where that is wrong by all of them.

    For 16 bits numpy has a radix sort, which takes a sixth of the time of a sort by comparisons.
    """
    if len(words) < SMALL:
        return np.argsort(words, kind="stable")
    high = words - words.min()
    size = int(high.max()).bit_length()
    high >>= np.uint64(max(0, size - 16 * digits))
    order = np.argsort(high.astype(np.uint16), kind="stable")
    for bit in range(16, min(size, 16 * digits), 16):
        digit = (high >> np.uint64(bit)).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
    found = words[order]
    falls = found[1:] < found[:-1]
    if falls.any():
        group = np.zeros(len(words), np.int64)
        high = high[order]
        np.cumsum(high[1:] != high[:-1], out=group[1:])
        wrong = np.zeros(group[-1] + 1, bool)
        wrong[group[1:][falls]] = True
        places = np.flatnonzero(wrong[group])
        order[places] = order[places][np.argsort(found[places], kind="stable")]
    return order


def _not_alone(same: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which rows are like a neighbour; `same`: which but the first are like the one before."""
    found = np.zeros(len(same) + 1, bool)
    found[1:] = same
    found[:-1] |= same
    return found


def _in_order(columns: Sequence[Words]) -> tuple[bool, bool]:
    """Whether the rows ascend, and whether they do if equal ones may follow each other."""
    first = columns[0]
    if (first[1:] < first[:-1]).any():
        return False, False
    above = columns[-1][1:] > columns[-1][:-1]
    same = columns[-1][1:] == columns[-1][:-1]
    for column in reversed(columns[:-1]):
        equal = column[1:] == column[:-1]
        above = (column[1:] > column[:-1]) | (equal & above)
        same &= equal
    return bool(above.all()), bool((above | same).all())


def _two_in_one(rank: Words, word: Words, bits: np.uint64) -> Words:
    """A word that orders by rank (which fits into so many bits), then by the other word."""
    if not bits:  # all have one rank
        return word
    made: Words = (rank << (np.uint64(64) - bits)) | (word >> bits)
    return made


def take_rows(batch: pa.RecordBatch, rows: Index) -> pa.RecordBatch:
    """These rows, in this order."""
    return take(batch, pa.array(rows), boundscheck=False)


def _taken(
    batch: pa.RecordBatch, rows: Index | None, weight: npt.NDArray[np.int64] | None
) -> pa.RecordBatch:
    if rows is not None:
        batch = take_rows(batch, rows)
    return batch if weight is None else with_weights(batch, weight)


def with_weights(batch: pa.RecordBatch, weight: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """The same rows with other weights."""
    at = batch.schema.get_field_index(WEIGHT)
    return batch.set_column(at, batch.schema.field(at), pa.array(weight, pa.int64()))


def bounds_of(columns: Sequence[Words], at: Identity) -> tuple[int, int]:
    """Where the rows of a sorted batch begin and end that have this identity (or begin with it)."""
    low, high = 0, len(columns[0])
    for column, word in zip(columns, at, strict=False):
        if low == high:
            break
        part, value = column[low:high], np.uint64(word)
        high = low + int(part.searchsorted(value, "right"))
        low += int(part.searchsorted(value, "left"))
    return low, high


def locate(columns: Sequence[Words], at: Identity, *, after: bool = False) -> int:
    """How many rows come before `at`; with `after`, those that begin with it are counted too."""
    return bounds_of(columns, at)[after]


def find_rows(
    columns: Sequence[Words], wanted: Sequence[Words]
) -> tuple[Index, npt.NDArray[np.bool_]]:
    """Where each wanted identity stands in a sorted batch, and whether it does."""
    low = columns[0].searchsorted(wanted[0], "left")
    high = columns[0].searchsorted(wanted[0], "right")
    last = len(columns[0]) - 1
    while (open_ := low < high).any():  # all at once: each step halves what is left of each
        middle = (low + high) >> 1
        less, equal = np.zeros(len(low), bool), open_.copy()
        for column, want in zip(columns[1:], wanted[1:], strict=True):
            found = column[np.minimum(middle, last)]
            less |= equal & (found < want)
            equal &= found == want
        low = np.where(open_ & less, middle + 1, low)
        high = np.where(open_ & ~less, middle, high)
    there = low <= last
    for column, want in zip(columns, wanted, strict=True):
        there &= column[np.minimum(low, last)] == want
    return low, there
