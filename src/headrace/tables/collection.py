"""A collection: a weighted set of rows (a Z-set) in sorted runs, kept by merging in slices.

A **run** is an ordered list of slices (piece, from row, to row), disjoint and ascending: it reads
as one sorted batch, whatever files its pieces lie in. A collection is a value: `plus` gives a new
one, which shares all pieces that did not change with the old one, so going back costs nothing.

**Reading.** `probe` finds the pieces of all keys with one search per run over the first words of
its pieces, then searches in each piece met. `scan` and `ordered` merge the runs as they go.
How changes are taken in and merged: `levels`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.tables.levels import Level, Levels
from headrace.tables.packs import Attempt, Packs, Piece, Ref
from headrace.tables.runs import (
    Identity,
    Words,
    consolidate_runs,
    identity,
    locate,
    take_rows,
)
from headrace.tables.sliced import INDEX, Run, Slice, side_by_side

CHUNK = 64
"""The first rows that `ordered` gives; later chunks are larger."""
MOST = 65_536
"""The most rows of a chunk."""
LAST_KEY = (1 << 64) - 1


class Collection:
    """A weighted set of rows: an immutable value."""

    __slots__ = ("__weakref__", "_aside", "_levels", "packs", "schema")

    def __init__(
        self,
        packs: Packs,
        schema: pa.Schema,
        levels: Sequence[Level] = (),
        aside: Sequence[Run] = (),
    ) -> None:
        """Empty, unless levels are given; `schema` as `runs.state_schema` makes it."""
        self.packs = packs
        self.schema = schema
        self._levels = tuple(levels)
        self._aside = tuple(aside)

    @property
    def runs(self) -> list[Run]:
        """All runs."""
        return [run for level in self._levels for run in level if run is not None] + [*self._aside]

    @property
    def rows(self) -> int:
        """How many rows the runs have: at least as many as the set."""
        return sum(run.rows for run in self.runs)

    def __repr__(self) -> str:
        """Sizes only."""
        return f"<collection of {self.rows} rows in {[run.rows for run in self.runs]}>"

    # -- reading ----------------------------------------------------------------------------

    def empty(self) -> pa.RecordBatch:
        """A batch without rows."""
        return _no_rows(self.schema)

    def probe(self, keys: Words) -> pa.RecordBatch:
        """All rows whose `_k` is in `keys`, sorted by identity, consolidated."""
        keys = distinct(keys)
        found: list[list[pa.RecordBatch]] = [[] for _ in self.runs]
        for run, parts in zip(self.runs, found, strict=True):
            for meeting in run.meet(self.packs, keys):
                meeting.rows(parts)
        return self._one(found)

    def weights_of(self, rows: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """The weight of each of these rows (sorted by identity, each once); 0 if it is not there.

        It reads the places of these rows only, however many rows share a `_k` with one of them.
        """
        words = identity(rows)
        total = np.zeros(rows.num_rows, np.int64)
        for run in self.runs if rows.num_rows else ():
            run.add_weights(self.packs, words, total)
        return total

    def _one(self, found: Sequence[Sequence[pa.RecordBatch]]) -> pa.RecordBatch:
        met = [parts for parts in found if parts]
        if not met:
            return self.empty()
        parts = [part for parts in met for part in parts]
        if len(met) == 1:  # one run is consolidated already
            return parts[0] if len(parts) == 1 else pa.concat_batches(parts)
        return consolidate_runs(parts)

    def scan(self, first: int = 0, last: int = LAST_KEY) -> Iterator[pa.RecordBatch]:
        """All rows with `_k` from `first` to `last`, sorted, consolidated, a few pieces at a time.

        Ranges of keys can be scanned by different workers; together they give everything once.
        """
        return self.between((first,), None if last == LAST_KEY else (last + 1,))

    def between(self, start: Identity, stop: Identity | None) -> Iterator[pa.RecordBatch]:
        """As `scan`: from one identity (or its first words) up to but not with another."""
        for parts in side_by_side(self.runs, self.packs, start, stop):
            batch = self._one(parts)
            if batch.num_rows:
                yield batch

    def ordered(self, key: int, *, reverse: bool = False) -> Iterator[pa.RecordBatch]:
        """The rows of one `_k` in the order of (`_o`, `_h`), consolidated, a few at a time."""
        stop = None if key == LAST_KEY else (key + 1,)
        sources = [
            _Cursor(run.between(self.packs, (key,), stop, reverse=reverse), reverse)
            for run in self.runs
        ]
        count = CHUNK
        while True:
            sources = [source for source in sources if source.fill(count)]
            if not sources:
                return
            # Up to where does every source show all it has?
            edges = [source.edge() for source in sources]
            edge = max(edges) if reverse else min(edges)
            parts = [part for source in sources if (part := source.take(edge)).num_rows]
            batch = consolidate_runs(parts)
            if batch.num_rows:
                yield _reversed(batch) if reverse else batch
            count = min(4 * count, MOST)

    # -- changing ---------------------------------------------------------------------------

    def plus(self, change: pa.RecordBatch, attempt: Attempt) -> Collection:
        """This and the rows of `change` (any order, any weights); does the merges that are due."""
        levels = Levels(self.packs, self._levels, attempt)
        levels.take_in(change)
        return Collection(self.packs, self.schema, levels.result(), self._aside)

    def loaded(self, change: pa.RecordBatch, attempt: Attempt) -> Collection:
        """As `plus`, for one of many large changes: it must be `settled` before it is stored."""
        levels = Levels(self.packs, self._levels, attempt)
        aside = levels.load(change, self._aside)
        return Collection(self.packs, self.schema, levels.result(), aside)

    def settled(self, attempt: Attempt) -> Collection:
        """Do the merges that `loaded` has put off."""
        if not self._aside:
            return self
        levels = Levels(self.packs, self._levels, attempt)
        levels.settle(self._aside)
        return Collection(self.packs, self.schema, levels.result())

    # -- storing ----------------------------------------------------------------------------

    def to_manifest(self, attempt: Attempt) -> list[Any]:
        """Store which slices there are; what is given back is JSON, for `from_manifest`."""
        assert not self._aside, "a collection is stored when it is settled"
        runs = [
            (number, bool(drains), run)
            for number, level in enumerate(self._levels)
            for drains, run in enumerate(level)
            if run is not None
        ]
        places = [[number, drains, len(run.slices)] for number, drains, run in runs]
        slices = [run.index for _, _, run in runs] or [_no_rows(INDEX)]
        return [*attempt.add(pa.concat_batches(slices)), places]

    @classmethod
    def from_manifest(cls, data: Sequence[Any], packs: Packs, schema: pa.Schema) -> Collection:
        """The collection that `to_manifest` described."""
        *ref, places = data
        columns = [column.to_pylist() for column in packs.open(Ref(*ref)).columns]
        slices = [
            Slice(Ref(*piece), lo, hi, tuple(first))
            for *piece, lo, hi, first in zip(*columns, strict=True)
        ]
        levels = [Level()] * (max((number for number, _, _ in places), default=-1) + 1)
        for number, drains, count in places:
            run, slices = Run(slices[:count]), slices[count:]
            levels[number] = levels[number]._replace(**{"drain" if drains else "main": run})
        return cls(packs, schema, levels)

    def pack_names(self) -> set[str]:
        """The packs that hold pieces of this collection (its manifest's pack comes on top)."""
        refs = (one.ref for run in self.runs for one in run.slices)
        return {ref.pack for ref in refs if isinstance(ref, Ref)}


class _Cursor:
    """The rows of one run, on their way."""

    def __init__(self, batches: Iterator[pa.RecordBatch], reverse: bool) -> None:
        self._batches = batches
        self._reverse = reverse
        self._piece: Piece | None = None
        self._lo = self._hi = self._shown = 0

    def fill(self, count: int) -> bool:
        """Have rows to show, up to `count`; False at the end."""
        while self._piece is None or self._lo == self._hi:
            batch = next(self._batches, None)
            if batch is None:
                return False
            self._piece = Piece(batch)
            self._lo, self._hi = 0, batch.num_rows
        self._shown = min(count, self._hi - self._lo)
        return True

    def edge(self) -> Identity:
        """The identity up to which all rows are shown."""
        assert self._piece is not None
        row = self._hi - self._shown if self._reverse else self._lo + self._shown - 1
        return tuple(int(column[row]) for column in self._piece.words)

    def take(self, edge: Identity) -> pa.RecordBatch:
        """Give the rows shown up to the edge."""
        assert self._piece is not None
        batch, words = self._piece.batch, self._piece.words
        if self._reverse:
            begin = min(max(self._hi - self._shown, locate(words, edge)), self._hi)
            part = batch.slice(begin, self._hi - begin)
            self._hi = begin
            return part
        end = max(min(self._lo + self._shown, locate(words, edge, after=True)), self._lo)
        part = batch.slice(self._lo, end - self._lo)
        self._lo = end
        return part


def distinct(keys: Words) -> Words:
    """Sorted keys without repeats."""
    if len(keys) < 2 or bool((keys[1:] > keys[:-1]).all()):
        return keys
    return np.unique(keys)


def _reversed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return take_rows(batch, np.arange(batch.num_rows - 1, -1, -1))


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
