"""Two tables in key order, merged: which keys differ, and how. Pure: batches in, differences out.

::

    ours    (the log's table at a cut)    1 2 3 | 4 5 6 7 | ...        batches of columns,
    theirs  (the target at that cut)      1 2 3 4 | 5 7 8 | ...        cut anywhere
                                                      ^ missing 6, extra 8

**The merge.** Of the two windows the same number of rows is compared column by column; where all
are equal, as nearly always, no row is looked at and no key is read. Where a row differs and the
keys beside it do not, it is *changed*. Only where keys differ too are the order words of the keys
made (`tables.keyed`: they ascend as the table does). All rows below the smaller of the two last
keys are then decided: found on both sides they are compared, found in ours only they are *missing*,
found in theirs only *extra*. So memory is two windows, and a difference costs its window, not the
rest. Rows whose order words are equal (strings that agree in 32 bytes) are never split: a window
grows until its group is whole, and inside a group the hash of the key decides, not the order.

**What is equal.** Null equals null and nothing else; NaN equals NaN; 0.0 equals -0.0; nested values
by two hashes of 64 bits. Rows of one key that stand there twice are paired in their order; what is
left over is missing or extra. A side that is not in order is an error, never a false difference.

Rejected: sets of hashes (memory grows with the table); row by row (20 times as slow); hashes of
ranges computed by the target (no second type system has our values; later, as an optimisation).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from headrace import errors
from headrace.model.hashing import hash64
from headrace.tables.keyed import key_words
from headrace.tables.runs import Words, bounds_of, find_rows, sorted_order, take_rows

Mask = npt.NDArray[np.bool_]
CHANGED, MISSING, EXTRA = "changed", "missing", "extra"


@dataclass(frozen=True)
class Found:
    """Rows that differ in one way; of changed ones both sides, row by row."""

    kind: str
    ours: pa.RecordBatch | None
    theirs: pa.RecordBatch | None

    @property
    def rows(self) -> pa.RecordBatch:
        """Ours, if there are any."""
        return self.theirs if self.ours is None else self.ours

    def __len__(self) -> int:
        """How many keys."""
        return int(self.rows.num_rows)


class Comparison:
    """A merge under way: `for found in comparison`; `rows` says how far it is."""

    def __init__(
        self,
        ours: Iterable[pa.RecordBatch],
        theirs: Iterable[pa.RecordBatch],
        key: Sequence[str],
        *,
        seed: int = 0,
        tolerance: float = 0.0,
    ) -> None:
        """Both sides have the same columns of the same types, in the order of `key`.

        `tolerance`: floats are equal if they differ by less than this part of them.
        """
        self._ours = _Window(ours, key, seed, "ours")
        self._theirs = _Window(theirs, key, seed, "theirs")
        self._key = key
        self._tolerance = tolerance

    @property
    def rows(self) -> tuple[int, int]:
        """How many rows of ours and of theirs are decided."""
        return self._ours.passed, self._theirs.passed

    def __iter__(self) -> Iterator[Found]:
        """The differences, window by window."""
        ours, theirs = self._ours, self._theirs
        while True:
            some, other = ours.fill(), theirs.fill()
            if not (some and other):
                break
            found = self._side_by_side()
            yield from self._by_key() if found is None else found
        for window, kind in ((ours, MISSING), (theirs, EXTRA)):
            while window.fill():
                window.words()  # in order, or an error
                rows = window.drop(window.rows)
                yield Found(kind, *((rows, None) if kind == MISSING else (None, rows)))

    def _side_by_side(self) -> list[Found] | None:
        """Compare row n with row n; None if these are not rows of the same keys."""
        count = min(self._ours.rows, self._theirs.rows)
        one, other = self._ours.batch.slice(0, count), self._theirs.batch.slice(0, count)
        same = equal_rows(one, other, self._tolerance)
        if not same.all():
            keys = [batch.select(list(self._key)) for batch in (one, other)]
            if not equal_rows(*keys).all():
                return None
        self._ours.drop(count)
        self._theirs.drop(count)
        return _changed(one, other, same)

    def _by_key(self) -> Iterator[Found]:
        """Decide all keys below the smaller of the two last ones."""
        windows = (self._ours, self._theirs)
        lasts = [one.last() for one in windows]
        ends = [last for last in lasts if last is not None]
        bound = min(ends) if ends else None
        cuts = [one.rows if bound is None else one.below(bound) for one in windows]
        if not any(cuts):  # one group of equal order words: see all of it
            windows[lasts.index(bound)].grow()
            return
        words = [one.words(cut) for one, cut in zip(windows, cuts, strict=True)]
        one, other = (window.drop(cut) for window, cut in zip(windows, cuts, strict=True))
        at, there = _pairs(*words)
        mine = np.flatnonzero(there)
        both = take_rows(one, mine), take_rows(other, at[mine])
        yield from _changed(*both, equal_rows(*both, self._tolerance))
        left = np.ones(other.num_rows, bool)
        left[at[mine]] = False
        if len(mine) < one.num_rows:
            yield Found(MISSING, take_rows(one, np.flatnonzero(~there)), None)
        if left.any():
            yield Found(EXTRA, None, take_rows(other, np.flatnonzero(left)))


class _Window:
    """Rows of one side that are read and not decided."""

    def __init__(
        self, batches: Iterable[pa.RecordBatch], key: Sequence[str], seed: int, name: str
    ) -> None:
        self._batches = iter(batches)
        self._key, self._seed, self._name = list(key), seed, name
        self.batch: pa.RecordBatch = pa.RecordBatch.from_pylist([], schema=pa.schema([]))
        self.passed = 0
        self._words: list[Words] | None = None
        self._ended = False
        self._before: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return int(self.batch.num_rows)

    def fill(self) -> bool:
        """Have rows, if there are any."""
        while not self.rows and not self._ended:
            self.grow()
        return bool(self.rows)

    def grow(self) -> None:
        """Take the next batch in."""
        following = next(self._batches, None)
        if following is None:
            self._ended = True
            return
        self.batch = pa.concat_batches([self.batch, following]) if self.rows else following
        self._words = None

    def drop(self, count: int) -> pa.RecordBatch:
        """Let the first rows go."""
        gone, self.batch = self.batch.slice(0, count), self.batch.slice(count)
        self.passed += count
        if self._words is not None and count:
            self._before = tuple(int(word[count - 1]) for word in self._words[:-1])
            self._words = [word[count:] for word in self._words]
        return gone

    def words(self, count: int | None = None) -> list[Words]:
        """Order words of the keys and their hash; the side is in order, or it is an error."""
        if self._words is None:
            self._words = key_words([self.batch.column(n) for n in self._key], self._seed)
            order = self._words[:-1]
            first = tuple(int(word[0]) for word in order)
            if first < self._before or not _ascends(order):
                raise errors.OutOfOrder(
                    f"rows of {self._name} do not come in the order of ({', '.join(self._key)})",
                    place=", ".join(self._key),
                )
        return self._words if count is None else [word[:count] for word in self._words]

    def last(self) -> tuple[int, ...] | None:
        """Order words of the last key; None: no row comes behind."""
        return None if self._ended else tuple(int(word[-1]) for word in self.words()[:-1])

    def below(self, bound: tuple[int, ...]) -> int:
        """How many rows have smaller order words."""
        return bounds_of(self.words()[:-1], bound)[0]


def _ascends(order: Sequence[Words]) -> bool:
    above = np.zeros(max(0, len(order[0]) - 1), bool)
    same = ~above
    for word in order:
        above |= same & (word[1:] > word[:-1])
        same &= word[1:] == word[:-1]
    return bool((above | same).all())


def _pairs(ours: list[Words], theirs: list[Words]) -> tuple[npt.NDArray[np.int64], Mask]:
    """For each of our keys the row of theirs that has it, and whether there is one."""
    (mine, order), (other, places) = _numbered(ours), _numbered(theirs)
    at, there = np.zeros(len(order), np.int64), np.zeros(len(order), bool)
    if len(order) and len(places):
        found, is_there = find_rows(other, mine)
        at[order] = places[np.minimum(found, len(places) - 1)]
        there[order] = is_there
    return at, there


def _numbered(words: list[Words]) -> tuple[list[Words], npt.NDArray[np.int64]]:
    """Words in their order, with a last one that tells rows of one key apart; and that order."""
    order = sorted_order(words)
    if order is None:
        order = np.arange(len(words[0]))
    words = [word[order] for word in words]
    fresh = np.ones(len(order), bool)
    if len(order):
        fresh[1:] = np.any([word[1:] != word[:-1] for word in words], axis=0)
    places = np.arange(len(order))
    number = places - np.maximum.accumulate(np.where(fresh, places, 0)) if len(order) else places
    return [*words, number.astype(np.uint64)], order


def _changed(one: pa.RecordBatch, other: pa.RecordBatch, same: Mask) -> list[Found]:
    differ = np.flatnonzero(~same)
    return [Found(CHANGED, take_rows(one, differ), take_rows(other, differ))] if len(differ) else []


def equal_rows(one: pa.RecordBatch, other: pa.RecordBatch, tolerance: float = 0.0) -> Mask:
    """Whether rows at the same place are equal."""
    same = np.ones(one.num_rows, bool)
    for a, b in zip(one.columns, other.columns, strict=True):
        if a.equals(b):
            continue
        if pt.is_nested(a.type):
            for seed in (1, 2):
                same &= hash64([a], seed) == hash64([b], seed)
            continue
        equal = pc.equal(a, b)
        if pt.is_floating(a.type):
            equal = pc.or_(equal, pc.and_(pc.is_nan(a), pc.is_nan(b)))
            if tolerance:
                size = pc.multiply(pc.max_element_wise(pc.abs(a), pc.abs(b)), tolerance)
                equal = pc.or_(equal, pc.less(pc.abs(pc.subtract(a, b)), size))
        nulls = pc.and_(a.is_null(), b.is_null())
        same &= pc.or_(pc.fill_null(equal, False), nulls).to_numpy(zero_copy_only=False)
    return same


def as_multiset(
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    weights: npt.NDArray[np.int64] | None = None,
) -> list[pa.RecordBatch]:
    """Rows without a key as rows that have one: two hashes, the row, and how often it is there.

    All rows are held at once. The key is `MULTISET`. `weights`: of all rows, by default 1 each.
    """
    whole = pa.Table.from_batches(list(batches), schema).combine_chunks()
    rows = whole.to_batches()[0] if whole.num_rows else pa.RecordBatch.from_pylist([], schema)
    words = [hash64(rows.columns, seed) for seed in (1, 2)]
    order = np.lexsort((words[1].view(np.int64), words[0].view(np.int64)))
    words = [word[order] for word in words]
    fresh = np.ones(len(order), bool)
    if len(order):
        fresh[1:] = (words[0][1:] != words[0][:-1]) | (words[1][1:] != words[1][:-1])
    starts = np.flatnonzero(fresh)
    weights = np.ones(len(order), np.int64) if weights is None else weights
    copies = np.add.reduceat(weights[order], starts) if len(starts) else weights
    starts, copies = starts[copies != 0], copies[copies != 0]
    keys = [pa.array(word[starts].view(np.int64)) for word in words]
    rows = take_rows(rows, order[starts])
    columns = [*keys, *rows.columns, pa.array(copies, pa.int64())]
    return [pa.RecordBatch.from_arrays(columns, [*MULTISET, *schema.names, COPIES])]


MULTISET = ("_first", "_second")
COPIES = "_copies"
