"""The follower: keeps one target at the log's cuts, and never shows anything else.

::

    open:  claim the name in the log (epoch), claim the target with it, read the target's cut
    load:  tables are missing, or all: wipe, load them at the newest cut, swap; the others step on
           to that cut in the same transaction
    step:  cuts after it -> changes added up -> one transaction in the target, with cut and epoch

**Killed anywhere.** The target's cut is the only memory of progress, and it moves with the data. So
whoever comes next goes on from it, and changes are made once: nothing twice, nothing missing. An
answer that was lost with the connection is resolved in the same way, by reading the cut.

**Two at once.** The later one has the higher epoch. It claims the log's writer first, then the
target: from then on the earlier one is refused by the target before it has changed anything, and by
the log when it wants to set a row aside.

**Refused rows** are set aside in the log before the target goes on without them (`aside`).

**What passes** (`TargetAway`: a restart, a lost connection, a lock) is waited for, longer each
time; everything else ends `run`: what a person must change is in the error.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from headrace import errors
from headrace.derived import aside
from headrace.derived.cuts import Between, Commits, NewVersion, streamed
from headrace.derived.postgres_text import from_json
from headrace.derived.rows import MANY, WEIGHT, current, kept_tables, loading, row_ids
from headrace.derived.shape import to_load
from headrace.interfaces import Changes, Cut, Kept, KeptTable, Mark, Refused, Target
from headrace.log.embedded.holds import HOLD_SECONDS
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.writer import Writer
from headrace.model.hashing import hash64

BACK_OFF = (0.1, 5.0)
"""Seconds before a target that is away is asked again: first, and at most."""
IDLE = 1.0
"""Seconds after which a cut is written that brings no rows, and a call to stop is noticed."""
AsideKey = tuple[str, str]


@dataclass(frozen=True)
class State:
    """How it is with a follower; `report` gets it whenever it changes."""

    name: str
    doing: str = "starting"
    """`starting`, `loading`, `following`, `waiting for the views`, `waiting for the target`."""
    cut: Cut | None = None
    aside: int = 0
    error: str | None = None
    rows: int = 0
    """Rows of the log that were taken in since it was started."""


class Follower:
    """Keeps what a pipeline says is kept in one target."""

    def __init__(
        self,
        log: EmbeddedLog,
        kept: Kept,
        *,
        report: Callable[[State], None] | None = None,
        patience: float | None = None,
        being_read: Callable[[list[str]], bool] = lambda topics: False,
    ) -> None:
        """Nothing is opened yet. `patience`: seconds to wait for a target; None: for ever.

        `being_read`: whether one of these topics is of a table that is read for the first time.
        """
        self.log, self.kept = log, kept
        self.name = kept.follower
        self.state = State(self.name)
        self._report, self._patience, self._being_read = report, patience, being_read
        self._stopped = threading.Event()
        self._writer: Writer | None = None
        self._target: Target | None = None
        self._mark = Mark(0, None, "", ())
        self._held = -HOLD_SECONDS
        self._tables: list[KeptTable] = []
        self._missing: list[KeptTable] = []
        """Those that must be loaded."""
        self._commits: Commits | None = None
        self._between: Between | None = None
        self._cuts: deque[Cut] = deque()
        self._began: list[int] = []
        """The schema versions that the readings began with."""
        self._shapes: list[Changes] = []
        """Tables that must get other columns, with the next cut."""
        self._pending: Cut | None = None
        """A cut that brought no rows and is not written yet."""
        self._due: Cut | None = None
        """The cut at which a retry is made that somebody asks for."""
        self._written = 0.0
        self._aside: dict[AsideKey, dict[str, Any]] = {}
        self._aside_end = -1

    def __enter__(self) -> Follower:
        """For `with`."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Let target and readings go."""
        self._end_readings()
        if self._target is not None:
            self._target.close()
            self._target = None

    def stop(self) -> None:
        """Let `run` return after the transaction at hand; from any thread or a signal."""
        self._stopped.set()

    # -- the loop ---------------------------------------------------------------------------

    def run(self, until: str | int | None = None) -> Cut | None:
        """Follow; the cut of the target when it returns (None: it has nothing yet).

        `until`: "caught up" (every cut that is in the log now), a position (the target is through
        it), or None: for ever. Ends early when `stop` is called.
        """
        if not (until is None or isinstance(until, int) or until == "caught up"):
            raise errors.BadSetting(
                f"until={until!r} is not 'caught up', a position or None", place="run"
            )
        goal = self.log.position if isinstance(until, str) else None
        delay, away_since = BACK_OFF[0], None
        while not self._stopped.is_set():
            try:
                seen = self.log.position
                if self._target is None:
                    self._open()
                busy = self._round()
                through = self._mark.cut.through if self._mark.cut else -1
                if not busy and goal is not None and seen >= goal:
                    return self._settle()
                if isinstance(until, int) and max(through, self._free_through()) >= until:
                    return self._settle()
                delay, away_since = BACK_OFF[0], None
                if not busy:
                    self._wait(seen)
            except errors.TargetAway as error:
                now = time.monotonic()
                away_since = away_since or now
                self.close()
                self._say("waiting for the target", error=error.fact)
                if self._patience is not None and now - away_since >= self._patience:
                    raise
                self._stopped.wait(delay)
                delay = min(delay * 2, BACK_OFF[1])
        return self._mark.cut

    def _wait(self, seen: int) -> None:
        try:
            self.log.wait(seen + 1, IDLE)
        except errors.WaitTimeout:
            self._write_pending()

    def _round(self) -> bool:
        """One thing that can be done now; whether there was any."""
        if self._ends() != self._aside_end:
            self._read_aside()
        if self._between is None and not self._begin():
            return False
        assert self._commits is not None
        self._cuts.extend(self._commits.poll())
        if self._between is None:
            return self._load()
        if self._versions() != self._began:
            self._end_readings()
        elif self._retry_is_due():
            self._retry()
        elif self._cuts or self._shapes:
            self._step()
        else:
            return False
        return True

    def _retry_is_due(self) -> bool:
        """Whether somebody asks for a retry, and what the log had by then is applied.

        After that it goes first: there may always be another cut.
        """
        cut = self._pending or self._mark.cut
        assert cut is not None
        if not any(one["asked"] for one in self._aside.values()):
            self._due = None
        elif self._due is None:
            self._due = self._cuts[-1] if self._cuts else cut
        return self._due is not None and cut >= self._due and not self._shapes

    def _versions(self) -> list[int]:
        return [self.log.topic(one.topic).schema.version for one in self._tables]

    def _say(self, doing: str, *, error: str | None = None, rows: int = 0) -> None:
        state = State(
            self.name, doing, self._mark.cut, len(self._aside), error, self.state.rows + rows
        )
        if state != self.state:
            self.state = state
            if self._report is not None:
                self._report(state)

    # -- opening ----------------------------------------------------------------------------

    def _open(self) -> None:
        """Claim the name and the target, and read where it is."""
        target = self.kept.target.open(self.name)
        try:
            mark = target.mark()
            own = self.log.history
            newest = max(mark.cut.through, mark.cut.position) if mark.cut else 0
            if not self.log.knows(mark.log or own, newest):
                raise errors.OtherLog(
                    f"the target of follower '{self.name}' is at {newest} of log {mark.log},"
                    f" this is log {own} at {self.log.position}",
                    place=self.kept.target.describe(),
                )
            if self._writer is None:
                self._writer = self._claimed()
            while mark.log not in ("", own) and self._writer.epoch <= mark.epoch:
                self._writer = self._claimed()  # the log that this one was restored from went on
            if mark.epoch != self._writer.epoch:
                mark = target.mark(self._writer.epoch, own)
        except BaseException:
            target.close()
            raise
        self._target, self._mark = target, mark
        self._aside_end = -1

    def _claimed(self) -> Writer:
        aside.ensure(self.log, self.name)
        writer = self.log.writer(f"follower/{self.name}")
        state = {
            "topics": dict(self.kept.topics),
            "views": sorted(self.kept.views),
            "target": self.kept.target.describe(),
        }
        with writer.transaction(state=state):
            pass
        return writer

    def _begin(self) -> bool:
        """Begin to read at the target's cut; whether all topics are there.

        Without `_between` the target must be loaded first.
        """
        try:
            self._tables = kept_tables(self.log, self.kept)
            self._began = self._versions()
        except errors.UnknownTopic:
            self._say("waiting for the views")
            return False
        cut, have = self._mark.cut, {one.name: one for one in self._mark.tables}
        self._missing = self._to_load()
        # What is kept no longer stands still: it must be forgotten, or would be taken for right.
        if cut is None or self._missing or have.keys() - self.kept.topics.keys():
            if self._commits is None:
                self._commits = Commits(self.log, self.kept, 0)
            return True
        self._end_readings()
        self._commits = Commits(self.log, self.kept, cut.position)
        self._between = Between(self.log, self.kept, self._tables, cut)
        self._shapes = [Changes(one, _nothing) for one in self._tables if one != have[one.name]]
        self._say("following")
        return True

    def _to_load(self) -> list[KeptTable]:
        try:
            return to_load(self._mark.tables, self._tables)
        except errors.TargetStopped as error:
            schema = getattr(self.kept.target, "schema", "")
            if schema:  # a table of that name may be elsewhere too: the captured one
                error.fix = error.fix.replace("drop table ", f'drop table "{schema}".')
            raise

    def _end_readings(self) -> None:
        for one in (self._commits, self._between):
            if one is not None:
                one.close()
        self._commits = self._between = None
        self._cuts.clear()
        self._shapes = []

    # -- what a target is given -------------------------------------------------------------

    def _load(self) -> bool:
        """Load what is missing at the newest cut, with the changes of all else up to it.

        False if there is no cut that can be shown.
        """
        assert self._target is not None
        assert self._writer is not None
        if not self._cuts:
            self._say("waiting for the views")
            return False
        cut = self._cuts[-1]
        self._cuts.clear()
        if self._too_early(cut):
            self._cuts.append(cut)  # looked at again
            self._say("waiting for the views")
            return False
        self._say("loading")
        refused: list[Refused] = []
        epoch = self._writer.epoch
        changes = [
            streamed(self.log, one, self._mark.cut or cut, cut)
            for one in self._tables
            if one not in self._missing
        ]
        try:
            self._target.wipe(epoch, self._missing)
            for table in self._missing:
                change = Changes(table, _loading(self.log, table, cut))
                self._target.apply(epoch, None, [change], refused.extend)
            self._apply(cut, changes, loaded=refused)
        except errors.BadPosition:  # an older generation of a topic: a later cut will do
            self._say("waiting for the views")
            return False
        except NewVersion:
            self._cuts.append(cut)
            return True
        self._begin()
        return True

    def _too_early(self, cut: Cut) -> bool:
        """Whether a load at a cut would go back, or show half a table.

        Back: a view is kept that was right long ago, and is built anew. Half: a captured table is
        being read for the first time, or that ended behind the cut.
        """
        shown, kept = self._mark.cut or cut, {one.topic for one in self._tables}
        for one in self._mark.tables:
            back = one.topic in kept and one.at(cut) < one.at(shown)
            if back and self._has(one.topic, one.at(cut), one.at(shown)):
                return True
        captured = [one.topic for one in self._missing if not one.view]
        captured = [one for one in captured if self.log.topic(one).kind == "changes"]
        return self._being_read(captured) or any(
            self._has(one, cut.through, self.log.position, first=True) for one in captured
        )

    def _has(self, topic: str, after: int, through: int, *, first: bool = False) -> bool:
        """Whether a topic has rows there; `first`: those of a first reading."""
        columns = ["_op"] if first else None
        with closing(self.log.read(topic, after=after, through=through, columns=columns)) as rows:
            return any(not first or "r" in one.data.column("_op").to_pylist() for one in rows)

    def _step(self) -> None:
        """Apply the next cuts."""
        assert self._between is not None
        try:
            step = self._between.step(self._cuts)
            free = not self.kept.views and not self._shapes and not step.rows
            if free and time.monotonic() - self._written < IDLE:
                self._pending = step.cut  # written when it is quiet
                return
            given = {one.table.name for one in step.changes}
            shapes = [one for one in self._shapes if one.table.name not in given]
            self._apply(step.cut, [*step.changes, *shapes])
        except NewVersion:
            self._end_readings()
            return
        self._shapes = []
        if step.large:
            self._end_readings()
        self._say("following", rows=step.rows)

    def _free_through(self) -> int:
        return self._pending.through if self._pending is not None else -1

    def _write_pending(self) -> None:
        """Write a cut that brought no rows."""
        if self._pending is not None and self._target is not None:
            self._apply(self._pending, [])
            self._say("following")

    def _settle(self) -> Cut | None:
        self._write_pending()
        return self._mark.cut

    def _apply(
        self, cut: Cut, changes: Sequence[Changes], loaded: Sequence[Refused] | None = None
    ) -> None:
        """Make changes; `loaded`: show what was loaded too, of which these rows were refused."""
        assert self._target is not None
        assert self._writer is not None
        touched = self._touched(changes) if self._aside else []
        # Of a multiset a change says nothing of the copies set aside: they are looked at anew.
        bags = {one.table.name for one in changes if not one.table.key}
        keyed = [key for key in touched if key[0] not in bags]
        tables = {one.table.name: one.table for one in changes}
        if loaded is None:
            tables = {one.name: one for one in self._mark.tables} | tables
            self._target.apply(
                self._writer.epoch, cut, changes, lambda found: self._note(found, keyed, cut)
            )
        else:
            keyed += [key for key in self._aside if key[0] not in tables]
            tables |= {one.name: one for one in self._missing}
            self._target.swap(
                self._writer.epoch,
                cut,
                changes,
                lambda found: self._note([*loaded, *found], keyed, cut),
            )
        for key in touched:
            if key[0] in bags and key in self._aside:
                self._aside[key]["asked"] = True
        self._mark = replace(self._mark, cut=cut, tables=tuple(tables.values()))
        self._pending = None
        self._written = time.monotonic()
        if self._written - self._held > HOLD_SECONDS:  # so that what comes next is not compacted
            self._held = self._written
            topics = list(self.kept.topics.values())
            self.log.hold_if_needed(f"follower/{self.name}", cut.through, topics)

    # -- rows set aside ---------------------------------------------------------------------

    def _ends(self) -> int:
        return sum(self.log.ends(aside.aside_topic(self.name)))

    def _read_aside(self) -> None:
        end = self._ends()
        found = aside.rows(self.log, self.name)
        self._aside = {(one["table"], one["key"]): one for one in found}
        self._aside_end = end

    def _note(self, refused: Sequence[Refused], touched: Sequence[AsideKey], cut: Cut) -> None:
        """Set rows aside, and take those out that were taken: before the target goes on."""
        assert self._writer is not None
        new = aside.noted(refused, cut)
        old = [self._aside[key] for key in {*touched, *new} if key in self._aside]
        rows = [{**one, "_weight": -1} for one in old] + [
            {**one, "_weight": 1} for one in new.values()
        ]
        if not rows:
            return
        self._writer.append(aside.aside_topic(self.name), rows)
        self._read_aside()

    def _touched(self, changes: Sequence[Changes]) -> list[AsideKey]:
        """The rows set aside of which changes say something."""
        found: list[AsideKey] = []
        for one in changes:
            keys = [key for key in self._aside if key[0] == one.table.name]
            if not keys:
                continue
            asked = _keys_of(one.table, [key for _, key in keys])
            names = asked.schema.names
            hashes = hash64(asked.combine_chunks().to_batches()[0].columns, 1)
            for chunk in one.chunks():
                if one.table.key:
                    columns = [chunk.column(name) for name in names]
                else:
                    columns = [row_ids(chunk.select(one.table.schema.names))]
                there = np.isin(hashes, hash64(columns, 1))
                found += [key for key, yes in zip(keys, there, strict=True) if yes]
        return found

    def _retry(self) -> None:
        """Apply what the keys are now for which somebody has asked."""
        assert self._mark.cut is not None
        asked = [key for key, one in self._aside.items() if one["asked"]]
        changes = []
        for table in self._tables:
            keys = [key for name, key in asked if name == table.name]
            if keys:
                batch = current(self.log, table, _keys_of(table, keys), self._mark.cut)
                chunks = [batch] if table.key else [_none_of(batch), batch]
                changes.append(Changes(table, lambda chunks=chunks: iter(chunks)))  # type: ignore[misc]
        assert self._target is not None
        assert self._writer is not None
        cut = self._mark.cut
        self._target.apply(
            self._writer.epoch, cut, changes, lambda found: self._note(found, asked, cut)
        )
        self._say("following")


def _none_of(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The change that takes away all copies: some may be there, and some set aside."""
    gone = pa.array(np.full(rows.num_rows, -MANY), pa.int64())
    return rows.set_column(rows.num_columns - 1, rows.schema.field(WEIGHT), gone)


def _nothing() -> Any:
    return iter(())


def _loading(log: EmbeddedLog, table: KeptTable, cut: Cut) -> Callable[[], Any]:
    return lambda: loading(log, table, cut)


def _keys_of(table: KeptTable, texts: Sequence[str]) -> pa.Table:
    """Keys that were written as JSON, as columns."""
    found = [json.loads(text) for text in texts]
    if not table.key:
        return pa.table(
            {"_row": pa.array([bytes.fromhex(one["_row"]) for one in found], pa.binary(16))}
        )
    types = {column.name: column.type for column in table.columns}
    return pa.table(
        {
            name: pa.array([from_json(one[name], types[name]) for one in found], types[name])
            for name in table.key
        }
    )
