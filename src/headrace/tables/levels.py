"""How a collection takes in a change: levels of runs, merged in slices.

**Levels.** Level i has a main run of at most BASE * RATIO^i rows, and perhaps a run that *drains*
into the main run of the level below it (i + 1). A change enters at the level of its size and is
merged into the main run there. Where that would be too large, the main run moves one level down: by
name alone if nobody is there, else it begins to drain. Weights are added up, so the order of runs
means nothing, and a row may stand in any of them.

**Draining in slices.** One step takes the next piece of the main run A in the order of identities
(about SLICE rows, more if pieces are small), and the rows of the draining run D that fall into it;
their merge replaces the piece in A, and D loses its beginning. After each step the state is again
two runs, so a merge in progress needs no concept of its own, can stop at any batch, and cuts within
one hot key like anywhere else. Each row of A is rewritten at most once while D drains.

**When.** Between D's forming and the next time this level is full, the levels up to it take in as
many rows as D has; so D must shrink as they fill: steps are done while
``rows(D) > capacity - rows taken in since``. Work is so bounded by (1 + RATIO) rows for a row and
level, amortised, and spread. All decisions follow from sizes and contents: the same batch on the
same collection does the same work.

**Much at once.** While a collection is loaded, large changes are only sorted and laid aside as runs
(`load`): in memory as far as the folder `may_hold`, all its collections, then on the disk, where
FAN of one size are merged into one. In the end everything is (`settle`). So each row is written
once or twice, where taking in one change after the other rewrites what is there again and again (5
to 6 times for 20 changes of 500 k rows).

**Sizes**, measured with `./run bench tables`: see the constants. Rejected: one file per run (a
merge of 10 M rows is then one spike of seconds), merging only as far as a ratio asks (it rewrites
the low keys again and again), buckets by key (a hot key does not split, and their number is fixed).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.tables.packs import OWN_FILE, Attempt, Held, Packs, Ref
from headrace.tables.runs import (
    Identity,
    Index,
    consolidate_runs,
    consolidation,
    identity_at,
    take_rows,
    with_weights,
)
from headrace.tables.sliced import Run, Slice, side_by_side

Weights = npt.NDArray[np.int64]

BASE = 1024
"""Rows of the main run of level 0, which each small change rewrites."""
RATIO = 8
"""How many times larger the next level is."""
SLICE = 131_072
"""About so many rows are merged at a time, and stand in a piece."""
FAN = 32
"""So many runs laid aside are merged into one."""
PIECE_BYTES = 16 << 20
PIECE_MIN = 2 * OWN_FILE
"""A piece has at most about so many bytes, less where a folder may hold little in memory; wide rows
make shorter pieces. Never so few that it shares a file, which waits in memory to be written."""


class Level(NamedTuple):
    """The runs of one level."""

    main: Run | None = None
    drain: Run | None = None


class Levels:
    """The levels of a collection while a change is taken in."""

    def __init__(self, packs: Packs, levels: Sequence[Level], attempt: Attempt) -> None:
        """What is written goes to the attempt."""
        self.packs = packs
        self.attempt = attempt
        self.main = [level.main for level in levels]
        self.drain = [level.drain for level in levels]
        self._bytes = min(PIECE_BYTES, max(PIECE_MIN, packs.may_hold // 8))

    def result(self) -> list[Level]:
        """The levels as they are now."""
        levels = [Level(*pair) for pair in zip(self.main, self.drain, strict=True)]
        while levels and levels[-1] == Level():
            levels.pop()
        return levels

    def take_in(self, change: pa.RecordBatch) -> None:
        """Add the rows of a change and do the merges that are due."""
        rows, weight = consolidation(change)
        count = change.num_rows if rows is None else len(rows)
        if not count:
            return
        at = 0
        while capacity(at) < count:
            at += 1
        self._reach(at)
        found = self.main[at]
        if found is not None and found.rows + count > capacity(at):
            self._move_down(at)
            found = None
        if found is not None and self._small(found.rows + count, found.bytes + change.nbytes):
            # in memory, written once
            parts = list(found.between(self.packs, None, None))
            parts.append(_rows_of(change, rows, weight, 0, count))
            self.main[at] = self._written([consolidate_runs(parts)])
        else:
            new = self._run_of(change, rows, weight)
            while found is not None and new is not None:
                found, new = self._step(found, new)
            self.main[at] = found if found is not None else new
        self._drain_due()

    def load(self, change: pa.RecordBatch, aside: Sequence[Run]) -> list[Run]:
        """Take in a small change, lay a large one aside; gives the runs laid aside.

        First those on the disk, then those in memory.
        """
        if change.num_rows < self._rows_of_piece(change):
            self.take_in(change)
            return list(aside)
        run = self._run_of(change, *consolidation(change), self._hold)
        runs = list(aside) if run is None else [*aside, run]
        stored = [one for one in runs if not one.in_memory]
        if self.packs.held > self.packs.may_hold:
            runs = stored = [*stored, *self._merged(runs[len(stored) :])]
        last = stored[-FAN:]
        if len(last) == FAN and max(r.rows for r in last) < 2 * min(r.rows for r in last):
            runs = [*stored[:-FAN], *self._merged(last), *runs[len(stored) :]]
        return runs

    def _hold(self, batch: pa.RecordBatch) -> Held:
        return Held(batch, self.packs)

    def settle(self, aside: Sequence[Run]) -> None:
        """Take in the runs laid aside: everything is one run afterwards."""
        if not aside:
            return
        runs = [*aside, *(run for run in (*self.main, *self.drain) if run is not None)]
        self.main, self.drain = [], []
        for run in self._merged(runs):
            at = 0
            while capacity(at) < run.rows:
                at += 1
            self._reach(at)
            self.main[at] = run

    def _merged(self, runs: Sequence[Run]) -> list[Run]:
        """One run of several; none if nothing is left."""

        def pieces() -> Iterator[pa.RecordBatch]:
            ready: list[pa.RecordBatch] = []
            for parts in side_by_side(runs, self.packs, (0,), None, self._rows_of_piece):
                ready.append(consolidate_runs([one for run in parts for one in run]))
                if sum(part.num_rows for part in ready) >= self._rows_of_piece(ready[0]):
                    yield from self._cut(pa.concat_batches(ready))
                    ready = []
            if ready:
                yield from self._cut(pa.concat_batches(ready))

        run = self._written(pieces())
        return [] if run is None else [run]

    def _run_of(
        self,
        change: pa.RecordBatch,
        rows: Index | None,
        weight: Weights | None,
        put: Callable[[pa.RecordBatch], Ref | Held] | None = None,
    ) -> Run | None:
        """A change as a run; what to take of it as `consolidation` says."""
        count = change.num_rows if rows is None else len(rows)
        step = self._rows_of_piece(change)
        parts = (
            _rows_of(change, rows, weight, start, min(count, start + step))
            for start in range(0, count, step)
        )
        return self._written(parts, put)

    def _reach(self, at: int) -> None:
        while len(self.main) <= at:
            self.main.append(None)
            self.drain.append(None)

    def _move_down(self, at: int) -> None:
        """Make room at a level: its main run moves to the next one, or begins to drain into it."""
        while self.drain[at] is not None:  # overdue
            self._drain_step(at)
        run, self.main[at] = self.main[at], None
        if run is None:
            return
        self._reach(at + 1)
        target = self.main[at + 1]
        if target is not None and target.rows + run.rows > capacity(at + 1):
            self._move_down(at + 1)
            target = None
        if target is None:
            self.main[at + 1] = run
        else:
            self.drain[at] = run

    def _drain_due(self) -> None:
        taken_in = 0
        for at in range(len(self.drain)):
            taken_in += self._rows(self.main[at])
            while (drain := self.drain[at]) is not None:
                both = [run for run in (drain, self.main[at + 1]) if run is not None]
                small = self._small(sum(r.rows for r in both), sum(r.bytes for r in both))
                if not small and drain.rows <= capacity(at) - taken_in:
                    break
                self._drain_step(at)
            taken_in += self._rows(self.drain[at])

    @staticmethod
    def _rows(run: Run | None) -> int:
        return 0 if run is None else run.rows

    def _drain_step(self, at: int) -> None:
        drain, target = self.drain[at], self.main[at + 1]
        assert drain is not None
        if target is None:
            self.main[at + 1], self.drain[at] = drain, None
        else:
            self.main[at + 1], self.drain[at] = self._step(target, drain)

    def _step(self, target: Run, drain: Run) -> tuple[Run | None, Run | None]:
        """Merge the beginning of `drain` into the pieces of `target` where it belongs."""
        begin = max(0, bisect_right(target.firsts, drain.firsts[0]) - 1)
        end, rows = begin, 0
        half = self._slice_of(target) // 2
        while end < len(target.slices) and (end == begin or rows < half):
            rows += target.slices[end].hi - target.slices[end].lo
            end += 1
        stop = target.firsts[end] if end < len(target.slices) else None
        stop = self._shorter(drain, stop)
        parts = [
            *Run(target.slices[begin:end]).between(self.packs, None, stop),
            *drain.between(self.packs, None, stop),
        ]
        merged = self._written(self._cut(consolidate_runs(parts)))
        replaced = Run(target.slices[begin:end])
        rest = replaced.since(self.packs, stop)  # not empty where `drain` was cut short
        slices = [
            *target.slices[:begin],
            *(merged.slices if merged else ()),
            *(rest.slices if rest else ()),
            *target.slices[end:],
        ]
        return Run(slices) if slices else None, drain.since(self.packs, stop)

    def _shorter(self, drain: Run, stop: Identity | None) -> Identity | None:
        """An earlier stop, if more than two slices of `drain` lie before this one."""
        rows, most = 0, self._slice_of(drain)
        for one in drain.slices:
            if stop is not None and one.first >= stop:
                break
            if rows >= most:
                return one.first
            if rows + one.hi - one.lo > 2 * most:
                words = self.packs.piece(one.ref).words
                cut: Identity = tuple(int(column[one.lo + most]) for column in words)
                return cut if stop is None or cut < stop else stop
            rows += one.hi - one.lo
        return stop

    def _small(self, rows: int, size: int) -> bool:
        """Whether so much is merged at once."""
        return rows <= SLICE and size <= self._bytes

    def _slice_of(self, run: Run) -> int:
        """`SLICE`, or fewer where rows are wide."""
        return max(1, min(SLICE, self._bytes * run.rows // max(1, run.bytes)))

    def _rows_of_piece(self, batch: pa.RecordBatch) -> int:
        """How many rows of this kind a piece gets."""
        width: int = max(1, batch.nbytes // max(1, batch.num_rows))
        return max(1, min(SLICE, self._bytes // width))

    def _cut(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """A sorted batch in pieces of about even size, none above one and a half times the aim."""
        count = max(1, round(batch.num_rows / self._rows_of_piece(batch))) if batch.num_rows else 1
        edges = [batch.num_rows * at // count for at in range(count + 1)]
        return [batch.slice(a, b - a) for a, b in itertools.pairwise(edges)]

    def _written(
        self,
        batches: Iterable[pa.RecordBatch],
        put: Callable[[pa.RecordBatch], Ref | Held] | None = None,
    ) -> Run | None:
        put = put or self.attempt.add
        slices = [
            Slice(put(batch), 0, batch.num_rows, identity_at(batch, 0))
            for batch in batches
            if batch.num_rows
        ]
        return Run(slices) if slices else None


def capacity(level: int) -> int:
    """How many rows the main run of a level may have."""
    rows: int = BASE * RATIO**level
    return rows


def _rows_of(
    batch: pa.RecordBatch, rows: Index | None, weight: Weights | None, start: int, stop: int
) -> pa.RecordBatch:
    """Some rows of a batch as `consolidation` wants them."""
    if rows is None:
        part = batch.slice(start, stop - start)
    else:
        part = take_rows(batch, rows[start:stop])
    return part if weight is None else with_weights(part, weight[start:stop])
