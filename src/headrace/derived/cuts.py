"""Cuts: what of the log may be shown together, and the changes from one to a later one.

::

    inputs     i1 i2 i3 | i4 i5 | i6 ...        a commit's entry holds the rows of all views, and
    commits         T=i3   T=i5                 a row of `_commits`: through T these views are right
    views          c1|     c2|                  cut = (through T, position of the commit)

A cut is a commit that names all the views kept: a view that is being built, or whose definition has
changed and which is built anew, is not named, and there is no cut until it is. From cut to cut the
inputs move (T, T'] and the views (C, C'], each in whole entries. Without views every position is a
cut.

**How much at once.** Commits are taken together until they change `CUT_ROWS` rows of the target,
added up at the ends of entries as they come: what is behind comes in a few transactions, however
often its rows changed, what is live in one a commit. A commit that changes more than `LARGE_ROWS`
is not held in memory: its topics are read one by one, in chunks, while the target takes them.

Two readings go along, one of the inputs and one of the views. A reading hands out batches of
several entries, so what is beyond a cut waits in its `Feed` for the next one. When a topic gets a
new schema version both begin again at the last cut: all rows then come in the newest version.
Beginning anew for each cut would be simpler, and costs a walk through a journal file each time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.derived.rows import CHUNK_ROWS, WEIGHT, Numbers, added_up, current
from headrace.interfaces import Changes, Cut, Kept, KeptTable
from headrace.log.embedded.log import EmbeddedLog
from headrace.model.records import Batch

CUT_ROWS = 300_000
LARGE_ROWS = 1_000_000


class Part(NamedTuple):
    """Rows of one topic that came together, and the position of the entry of each."""

    topic: str
    version: int
    rows: pa.RecordBatch
    positions: Numbers
    ends: int
    """The position of the entry that ends with these rows; 0 if more of it follows."""


def _part(batch: Batch) -> Part:
    ends = batch.position if batch.last else 0
    return Part(batch.topic, batch.schema_version, batch.data, batch.positions.to_numpy(), ends)


def split(part: Part, position: int) -> tuple[Part | None, Part | None]:
    """What of a part is up to a position, and what is beyond."""
    count = int(np.searchsorted(part.positions, position, "right"))
    if count == len(part.positions):
        return part, None
    later = part._replace(rows=part.rows.slice(count), positions=part.positions[count:])
    if not count:
        return None, later
    now = part._replace(rows=part.rows.slice(0, count), positions=part.positions[:count], ends=0)
    return now, later


class Feed:
    """Rows of some topics after a position, handed out up to any position that is visible."""

    def __init__(self, log: EmbeddedLog, topics: list[str], after: int) -> None:
        """Nothing is read yet."""
        self._reading = log.read(topics, after=after, follow=True) if topics else None
        self._held: deque[Part] = deque()

    def through(self, position: int) -> Iterator[Part]:
        """What is there up to and with a position, and was not handed out before."""
        later: list[Part] = []
        try:
            while self._held:
                now, then = split(self._held.popleft(), position)
                later += [then] if then is not None else []
                if now is not None:
                    yield now
            beyond = bool(later)
            seen: set[str] = set()
            while self._reading is not None and not beyond:
                batch = self._reading.poll()
                if batch is None:
                    break
                now, then = split(_part(batch), position)
                later += [then] if then is not None else []
                # Other topics of the same window may have rows that are wanted. A topic comes once
                # in a window; twice only in a large entry, and that is beyond as a whole.
                beyond = bool(later) and (batch.last or batch.topic in seen)
                seen = set() if batch.last else {*seen, batch.topic}
                if now is not None:
                    yield now
        finally:
            self._held.extendleft(reversed(later))

    def close(self) -> None:
        """End the reading."""
        if self._reading is not None:
            self._reading.close()


def cuts_of(commits: Iterable[tuple[int, int, Iterable[str]]], views: frozenset[str]) -> list[Cut]:
    """The cuts among commits, given as (position, through, the views that are right)."""
    return [Cut(through, at) for at, through, right in commits if views <= set(right)]


class Commits:
    """The cuts that a log has after a position, oldest first, as they come."""

    def __init__(self, log: EmbeddedLog, kept: Kept, after: int) -> None:
        """Nothing is read yet."""
        self._log = log
        self._views = frozenset(one.removeprefix(f"{kept.pipeline}.") for one in kept.views)
        self._topic = f"{kept.pipeline}._commits"
        self._after = after
        self._feed: Feed | None = None

    def poll(self) -> list[Cut]:
        """The cuts that came since the last call."""
        if not self._views:
            before, self._after = self._after, self._log.position
            return [Cut(self._after, self._after)] if self._after > before else []
        if self._feed is None:
            if self._topic not in {topic.name for topic in self._log.topics()}:
                return []
            self._feed = Feed(self._log, [self._topic], self._after)
        commits: list[tuple[int, int, list[str]]] = []
        for part in self._feed.through(self._log.position):
            rows = part.rows.to_pydict()
            commits += zip(part.positions.tolist(), rows["through"], rows["views"], strict=True)
        return cuts_of(commits, self._views)

    def close(self) -> None:
        """End the reading."""
        if self._feed is not None:
            self._feed.close()


class NewVersion(Exception):
    """A topic has another schema version than the readings began with: begin again."""


@dataclass(frozen=True)
class Step:
    """From one cut to another."""

    cut: Cut
    changes: list[Changes]
    rows: int
    large: bool


class Between:
    """The changes from a cut to later ones."""

    def __init__(self, log: EmbeddedLog, kept: Kept, tables: list[KeptTable], cut: Cut) -> None:
        """`tables` as they are in the newest schema version."""
        self._log = log
        self._cut = cut
        self._free = not kept.views
        self._tables = {table.topic: table for table in tables}
        self._versions = {topic: log.topic(topic).schema.version for topic in self._tables}
        self._inputs = Feed(log, [t.topic for t in tables if not t.view], cut.through)
        self._views = Feed(log, [t.topic for t in tables if t.view], cut.position)

    def step(self, cuts: deque[Cut]) -> Step:
        """As many of these cuts as make a step, at least one; they are taken off.

        Raises `NewVersion`. After a step that is `large`, or that was not applied, begin again.
        """
        found: dict[str, list[Part]] = {}
        made: dict[str, pa.RecordBatch] = {}
        rows = waiting = held = 0
        cut = self._cut
        while cuts and held < CUT_ROWS:
            cut = cuts[0]
            for part in self._rows(cut):
                found.setdefault(part.topic, []).append(part)
                rows += len(part.positions)
                waiting += len(part.positions)
                if part.ends and waiting >= CUT_ROWS:
                    held, waiting = self._add(found, made), 0
                # Beyond the cut a window may have rows that wait, of other topics.
                if self._free and 0 < part.ends <= cut.through and held >= CUT_ROWS:
                    cut = Cut(part.ends, part.ends)
                    break
                if max(held, waiting) > LARGE_ROWS:
                    return self._large(cuts.popleft())
            if cut == cuts[0]:
                cuts.popleft()
        self._add(found, made)
        changes = [Changes(self._tables[topic], _once(change)) for topic, change in made.items()]
        self._cut = cut
        return Step(cut, changes, rows, large=False)

    def _add(self, found: dict[str, list[Part]], made: dict[str, pa.RecordBatch]) -> int:
        """Put what was found over the changes made so far; how many rows these have then."""
        for topic, parts in found.items():
            table, fresh = self._tables[topic], _added(self._tables[topic], parts)
            if topic in made:
                both = [made[topic], fresh]
                when = np.repeat([0, 1], [one.num_rows for one in both])
                fresh = added_up(table, pa.concat_batches(both), when)
            made[topic] = fresh
        found.clear()
        return sum(change.num_rows for change in made.values())

    def _rows(self, cut: Cut) -> Iterator[Part]:
        for feed, position in ((self._inputs, cut.through), (self._views, cut.position)):
            for part in feed.through(position):
                if part.version != self._versions[part.topic]:
                    raise NewVersion
                yield part

    def _large(self, cut: Cut) -> Step:
        changes = [streamed(self._log, one, self._cut, cut) for one in self._tables.values()]
        return Step(cut, changes, LARGE_ROWS, large=True)

    def close(self) -> None:
        """End the readings."""
        self._inputs.close()
        self._views.close()


def _once(batch: pa.RecordBatch) -> Callable[[], Iterator[pa.RecordBatch]]:
    return lambda: iter([batch])


def streamed(log: EmbeddedLog, table: KeptTable, before: Cut, cut: Cut) -> Changes:
    """The changes of one topic, any number, read when they are asked for; raises `NewVersion`."""
    version = log.topic(table.topic).schema.version

    def chunks() -> Iterator[pa.RecordBatch]:
        parts: list[Part] = []
        for batch in log.read(table.topic, after=table.at(before), through=table.at(cut)):
            if batch.schema_version != version:
                raise NewVersion
            parts.append(_part(batch))
            if sum(len(part.positions) for part in parts) >= CHUNK_ROWS:
                yield _looked_up(log, _added(table, parts), table, cut)
                parts = []
        if parts:
            yield _looked_up(log, _added(table, parts), table, cut)

    return Changes(table, chunks)


def _looked_up(
    log: EmbeddedLog, change: pa.RecordBatch, table: KeptTable, cut: Cut
) -> pa.RecordBatch:
    """A change with what is gone as it is at the cut.

    The row that took the place of another may have come first, in the chunk before.
    """
    there = pc.greater(change.column(WEIGHT), 0)
    gone = change.filter(pc.invert(there)).select(list(table.key))
    if not (table.key and gone.num_rows):
        return change
    now = current(log, table, pa.Table.from_batches([gone]), cut)
    return pa.concat_batches([change.filter(there), now])


def _added(table: KeptTable, parts: list[Part]) -> pa.RecordBatch:
    rows = pa.concat_batches([part.rows for part in parts])
    return added_up(table, rows, np.concatenate([part.positions for part in parts]))
