"""A run in pieces: slices of stored batches, disjoint and ascending, that read as one sorted batch.

Cuts are at identities, so the rows of one key may be spread over pieces. The first identity of each
slice is at hand; a search looks at these, then at the words of the pieces it meets. 100 keys
against 10 M rows meet some 75 pieces: what counts is the overhead of a piece (about 5 us), so a few
ranges are cut out as slices (0.7 us) and copied together at the end, many are taken (15 us).
"""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.tables.packs import Held, Packs, Piece, Ref
from headrace.tables.runs import (
    WEIGHT,
    Identity,
    Index,
    Words,
    bounds_of,
    find_rows,
    identity_at,
    locate,
    take_rows,
    weights,
)

FEW = 6
"""Up to so many rows are looked at one by one rather than all at once."""
CUTS = 24
"""Up to so many ranges of a piece are cut out as slices rather than taken row by row."""

INDEX = pa.schema(
    [
        ("pack", pa.string()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("rows", pa.int64()),
        ("checksum", pa.uint64()),
        ("lo", pa.int64()),
        ("hi", pa.int64()),
        ("first", pa.list_(pa.uint64())),
    ]
)
"""What a manifest says of each slice."""


class Slice(NamedTuple):
    """Rows lo to hi of a piece, of which the first has identity `first`."""

    ref: Ref | Held
    lo: int
    hi: int
    first: Identity


class Run:
    """Slices in order: one sorted batch in pieces."""

    __slots__ = ("_bytes", "_index", "_keys", "firsts", "rows", "slices")

    def __init__(self, slices: Sequence[Slice]) -> None:
        """At least one slice, none empty."""
        self.slices = tuple(slices)
        self.firsts = [one.first for one in slices]
        self.rows = sum(one.hi - one.lo for one in slices)
        self._keys: Words | None = None
        self._index: pa.RecordBatch | None = None
        self._bytes: int | None = None

    @property
    def in_memory(self) -> bool:
        """Whether it is not on the disk."""
        return isinstance(self.slices[0].ref, Held)

    @property
    def bytes(self) -> int:
        """About how many it has."""
        if self._bytes is None:
            self._bytes = sum(
                (one.hi - one.lo) * one.ref.length // one.ref.rows for one in self.slices
            )
        return self._bytes

    @property
    def index(self) -> pa.RecordBatch:
        """The slices, as a manifest has them; made once, as most runs outlive many batches."""
        if self._index is None:
            stored = [(one, one.ref) for one in self.slices if isinstance(one.ref, Ref)]
            assert len(stored) == len(self.slices), "a run in memory is merged before it is stored"
            rows = [(*ref, one.lo, one.hi, one.first) for one, ref in stored]
            columns = zip(*rows, strict=True)
            arrays = [pa.array(c, f.type) for c, f in zip(columns, INDEX, strict=True)]
            self._index = pa.RecordBatch.from_arrays(arrays, schema=INDEX)
        return self._index

    @property
    def keys(self) -> Words:
        """The first `_k` of each slice."""
        if self._keys is None:
            self._keys = np.array([first[0] for first in self.firsts], np.uint64)
        return self._keys

    def between(
        self, packs: Packs, lo: Identity | None, hi: Identity | None, *, reverse: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """The rows from `lo` up to but not with `hi` (identities or their first words)."""
        start = 0 if lo is None else max(0, bisect_right(self.firsts, lo) - 1)
        stop = len(self.slices) if hi is None else bisect_left(self.firsts, hi)
        places = range(start, stop)
        for place in reversed(places) if reverse else places:
            one = self.slices[place]
            piece = packs.piece(one.ref)
            begin, end = one.lo, one.hi
            if lo is not None and one.first < lo:
                begin = max(begin, locate(piece.words, lo))
            if hi is not None and place == stop - 1:
                end = min(end, locate(piece.words, hi))
            if begin < end:
                yield piece.batch.slice(begin, end - begin)

    def since(self, packs: Packs, at: Identity | None) -> Run | None:
        """The rows from `at` on; None if there are none."""
        place = len(self.slices) if at is None else bisect_right(self.firsts, at)
        rest = list(self.slices[place:])
        if at is not None and place:
            cut = self.slices[place - 1]
            words = packs.piece(cut.ref).words
            begin = max(cut.lo, locate(words, at))
            if begin < cut.hi:
                first = tuple(int(column[begin]) for column in words)
                rest.insert(0, Slice(cut.ref, begin, cut.hi, first))
        return Run(rest) if rest else None

    def meet(self, packs: Packs, keys: Words) -> Iterator[Meeting]:
        """Where sorted, distinct `keys` stand: piece by piece, ascending."""
        count = len(keys)
        if not count:
            return
        # Each key and its successor: where both would be inserted is where its rows are.
        both = np.stack([keys, keys + np.uint64(1)], axis=1)
        if len(self.slices) == 1:
            yield self._meeting(packs, 0, both, slice(0, count))
            return
        # A key may stand at the end of the slice before the first one that begins with it.
        first = np.maximum(self.keys.searchsorted(keys, "left") - 1, 0)
        last = np.maximum(self.keys.searchsorted(keys, "right") - 1, 0)
        at: slice | Index = slice(0, count)
        if (first != last).any():
            counts = last - first + 1
            places = np.repeat(first - (np.cumsum(counts) - counts), counts)
            places += np.arange(len(places))
            order = np.argsort(places, kind="stable")
            places, at = places[order], np.repeat(np.arange(count), counts)[order]
        else:
            places = first
        bounds = [0, *(np.flatnonzero(places[1:] != places[:-1]) + 1).tolist(), len(places)]
        for begin, end in itertools.pairwise(bounds):
            which = slice(begin, end) if isinstance(at, slice) else at[begin:end]
            yield self._meeting(packs, int(places[begin]), both, which)

    def _meeting(self, packs: Packs, place: int, both: Words, at: slice | Index) -> Meeting:
        one = self.slices[place]
        piece = packs.piece(one.ref)
        words, asked = piece.words[0], both[at]
        if one.hi - one.lo != len(words):
            words = words[one.lo : one.hi]
        spans = words.searchsorted(asked)
        if asked[-1, 1] == 0:  # the largest key has no successor
            spans[-1, 1] = len(words)
        if one.lo:
            spans += one.lo
        return Meeting(piece, at, spans)

    def seek(
        self, packs: Packs, asked: Sequence[Identity], firsts: Words
    ) -> Iterator[tuple[int, Identity, Piece, int]]:
        """The first row at or after each identity asked for, if it begins with the same word.

        Gives which of those asked, the identity found, and piece and row. `firsts`: the first word
        of each and its successor. Few rows have one first word, as a rule; these are looked at one
        by one, which for some hundred keys is faster than to prepare arrays.
        """
        groups: dict[int, list[int]] = {}
        for which, wanted in enumerate(asked):
            place = bisect_right(self.firsts, wanted) - 1
            groups.setdefault(max(place, 0), []).append(which)
        for place, members in groups.items():
            one = self.slices[place]
            piece = packs.piece(one.ref)
            columns = piece.words
            for which, (begin, end) in zip(
                members, columns[0].searchsorted(firsts[members]).tolist(), strict=True
            ):
                wanted = asked[which]
                stop = one.hi if end == 0 else min(end, one.hi)  # the largest has no successor
                row = max(begin, one.lo)
                if stop - row > FEW:
                    row += locate([column[row:stop] for column in columns], wanted)
                while row < stop and (found := tuple(int(c[row]) for c in columns)) < wanted:
                    row += 1
                if row < stop:
                    yield which, found, piece, row
                elif row >= one.hi and place + 1 < len(self.slices):  # it may go on in the next
                    following = self.slices[place + 1]
                    yield which, following.first, packs.piece(following.ref), following.lo

    def add_weights(
        self, packs: Packs, rows: Sequence[Words], total: npt.NDArray[np.int64]
    ) -> None:
        """Add the weights that rows (their identities, ascending) have in this run."""
        places = self.keys.searchsorted(rows[0], "right") - 1
        # Where a piece begins with the same key, the whole identity says which piece it is.
        for at in np.flatnonzero((places >= 0) & (self.keys[places] == rows[0])).tolist():
            places[at] = bisect_right(self.firsts, tuple(int(column[at]) for column in rows)) - 1
        bounds = [0, *(np.flatnonzero(places[1:] != places[:-1]) + 1).tolist(), len(places)]
        for begin, end in itertools.pairwise(bounds):
            if places[begin] >= 0:
                one = self.slices[places[begin]]
                piece = packs.piece(one.ref)
                if end - begin <= FEW:
                    for at in range(begin, end):
                        wanted = tuple(int(column[at]) for column in rows)
                        low, high = bounds_of(piece.words, wanted)
                        if max(low, one.lo) < min(high, one.hi):
                            total[at] += piece.batch.column(WEIGHT)[low].as_py()
                    continue
                asked = [column[begin:end] for column in rows]
                found, there = find_rows([column[: one.hi] for column in piece.words], asked)
                there &= found >= one.lo
                total[begin:end][there] += weights(piece.batch)[found[there]]


class Meeting(NamedTuple):
    """Which rows of a piece (`spans`: begin, end) have which of the keys (`at`)."""

    piece: Piece
    at: slice | Index
    spans: Index

    def rows(self, parts: list[pa.RecordBatch]) -> None:
        """Add the rows to the parts."""
        batch, spans = self.piece.batch, self.spans
        if len(spans) <= CUTS:
            for begin, end in spans.tolist():
                if begin < end:
                    parts.append(batch.slice(begin, end - begin))
            return
        counts = spans[:, 1] - spans[:, 0]
        shifts = np.repeat(spans[:, 0] - (np.cumsum(counts) - counts), counts)
        if len(shifts):
            parts.append(take_rows(batch, np.arange(len(shifts)) + shifts))


Parts = list[list[pa.RecordBatch]]


def side_by_side(
    runs: Sequence[Run],
    packs: Packs,
    start: Identity,
    stop: Identity | None,
    most: Callable[[pa.RecordBatch], int] = lambda batch: sys.maxsize,
) -> Iterator[Parts]:
    """The rows of several runs in step: up to where one of them has its next piece, from each.

    Where these are more than `most` rows of their kind, in several parts of about that size: runs
    of one length have their pieces at the same places, and many rows lie between two of these.
    """

    def parts(end: Identity | None) -> Iterator[Parts]:
        found = [part for run in runs if (part := list(run.between(packs, start, end)))]
        if found:
            yield found

    fences = {at for run in runs for at in run.firsts if at > start}
    for end in [*(at for at in sorted(fences) if stop is None or at < stop), stop]:
        for found in parts(end):
            batches = [batch for part in found for batch in part]
            largest = max(batches, key=len)
            count = -(-sum(map(len, batches)) // most(largest))
            for cut in range(1, min(count, len(largest))):
                at = identity_at(largest, cut * len(largest) // count)
                if at > start:
                    yield from parts(at)
                    start = at
            yield from parts(end) if count > 1 else (found,)
        if end is not None:
            start = end
