"""The capture of a PostgreSQL database: every transaction whole, once, in commit order.

::

    slot ---stream---> transactions ---> group ---> one entry: rows of every table, with the
                                           ^        boundaries of the transactions in it,
    tables ---chunks (snapshot) -----------+        and the resume point          --> confirm

**Exactly once.** The resume point, an LSN at a commit boundary, is part of the entry that holds the
data before it. The server is told only what is in a synced entry, so it never forgets what we do
not have; and after a crash the stream begins at the resume point, so nothing comes twice. The entry
requires the epoch of this writer: of two captures with one name the older one is fenced.

**A group** is what has come while the last entry was being written, up to GROUP_ROWS rows: many
small transactions share an entry. A large one is an entry alone, whole, and is never in memory
whole: it comes by way of files (`spill`), and goes by way of staged pieces (`large`).

**The same table?** The stream names a table and its columns, and says nothing of most of what DDL
does. So six things are remembered of each table (`TableState`); where one is another than it was,
rows may have changed in silence, and the table is read anew. They are its `oid` (another table has
the name, or this one had another name meanwhile); its entry in the publication (`member`: what it
did while it was out never comes); its files (`storage`: rewritten, or partitions came or went; a
truncate gives it new ones too, so behind one `altered` decides); the numbers of its `columns`; the
`labels` of its enums; and who has altered its `partitions` (they may have named rows by other
columns: a reason only where a row is missing, or would not be missed). The catalog is seen as it is
now, and the stream is behind: what is seen counts once the stream has passed the place of the look,
or when the stream itself describes it.

**What stops what.** A value or type that cannot be carried, or a lost replica identity, stops its
table, which says why, and the others go on; `snapshot` reads it anew. What concerns the whole
stream (a slot that is gone, another server), and an identity that was lost while nobody was there,
stops the capture with a named error (`resume`). A connection that breaks is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql

from headrace import errors
from headrace.model.arrow_message import ArrowMessage, MessageForm
from headrace.model.records import Piece
from headrace.model.schema import RESERVED
from headrace.sources.complete import Lookup
from headrace.sources.postgres import catalog, resume, waits
from headrace.sources.postgres.captured import META, OF_A_TABLE, Captured, Changes
from headrace.sources.postgres.group import Group, Run, told_of
from headrace.sources.postgres.large import PART_BYTES, Large
from headrace.sources.postgres.prepare import refusals
from headrace.sources.postgres.protocol import Column, Message, Relation, Rows, Truncate
from headrace.sources.postgres.redefine import redefine, refuse_reserved
from headrace.sources.postgres.session import connected, in_session
from headrace.sources.postgres.snapshot import CHUNK_ROWS
from headrace.sources.postgres.snapshots import READERS, Report, Snapshots
from headrace.sources.postgres.spill import Spill
from headrace.sources.postgres.state import (
    LIVE,
    SNAPSHOTTING,
    STOPPED,
    State,
    TableState,
    error_line,
    full_name,
    settings_name,
    table_of,
    topic_name,
    writer_name,
)
from headrace.sources.postgres.stream import Stream
from headrace.sources.postgres.transactions import Transaction
from headrace.sources.postgres.values import FEW, PgType, arrow_type, refuse_as_key, told

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog

PUBLISH_MS, PUBLISH_SECONDS = 2000, 10.0
"""How long a table that somebody has locked is waited for, to be published, and how often."""
SAY_SECONDS = 1.0
"""What is waited for is said after so long."""
GONE = -1
"""As the oid of a table that had another name meanwhile: what was said then is not known. One that
the catalog does not have any more, while the stream may still speak of it, has its own, negative.
"""
GROUP_ROWS = 50_000
"""A group ends with the transaction that makes it this large."""
SPILLED_PARTS = 4
"""So many parts' worth of changes are kept in memory before they go to files."""
HEARTBEAT_SECONDS = 10.0
"""On a quiet database the resume point moves at least so often."""
NOTE_SECONDS = 60.0
"""The note in the database is so old at most."""
LOOK_SECONDS = 0.5
"""While a table is snapshotted, or has other columns, it is looked at so often."""
PATIENCE_SECONDS = 30.0
"""How long a run that has an end waits for a database that is away; and the longest pause."""
PAUSE_SECONDS, STEADY_SECONDS = 0.1, 1.0
"""The first pause before it is tried again; and a stream that has held so long was no failure."""
RECENT = 100_000
"""Transactions whose numbers are remembered, for snapshots that begin later."""
TRANSACTIONS = "xid bigint, lsn bigint, commit_time timestamp, rows bigint"
MESSAGES = "prefix string, content binary, lsn bigint, xid bigint"
Parts = tuple[
    list[tuple[str, pa.RecordBatch | ArrowMessage, list[int] | None]],
    pa.RecordBatch | ArrowMessage | None,
    list[dict[str, Any]],
    int,
]
"""What becomes an entry: see `Capture._parts`."""


class Capture:
    """Keeps topics `NAME.schema.table` equal to tables of a database."""

    def __init__(
        self,
        log: EmbeddedLog,
        name: str,
        dsn: str,
        tables: Sequence[str] = ("public.*",),
        *,
        numeric_as_text: bool = False,
        chunk_rows: int = CHUNK_ROWS,
        readers: int = READERS,
        group_rows: int = GROUP_ROWS,
        part_bytes: int = PART_BYTES,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        report: Report | None = None,
        lost: Callable[[Exception], None] | None = None,
        stopped: Callable[[str, str], None] | None = None,
    ) -> None:
        """Nothing is done before `run`. `tables`: patterns, as `public.*` or `!public.tmp_*`.

        `report` is told how far tables are read, `lost` that something is waited for, `stopped`
        which tables are stopped, and why: at each start and when it happens.
        """
        self.log = log
        self.name = name
        self.dsn = in_session(dsn, application_name=f"headrace {name}", client_encoding="UTF8")
        self.patterns = tuple(tables)
        self._numeric_as_text = numeric_as_text
        self._group_rows = group_rows
        self._part_bytes = part_bytes
        self._folder = f"{log.path}/spill/{name}"
        """For what does not outlive a connection."""
        self._staged = f"{log.path}/spill/{name}.staged"
        """The pieces that no entry names yet."""
        self._heartbeat = heartbeat_seconds
        self._lost = lost
        self._stopped = stopped
        self._told: dict[str, str] = {}
        """The tables that were said to be stopped, and why."""
        self.writer = log.writer(writer_name(name))
        self.state = State.load(log, name)
        self._tables: dict[tuple[str, str], Captured] = {}
        self._refused: dict[tuple[str, str], str] = {}
        """Tables that the server does not let us publish, and why."""
        self._published_at = 0.0
        self._others: dict[int, Relation] = {}
        """What the stream has said of tables that are not captured."""
        self._topics: set[str] = set()
        """Those beside the tables' that are there."""
        self._recent = deque(self._said_lately(), RECENT)
        self._snapshots = Snapshots(
            self.dsn, self._tables, lambda: self._entry(self._lsn), self._topic,
            chunk_rows=chunk_rows, readers=readers, report=report,
        )  # fmt: skip
        self._saved_at = 0.0
        self._looked_at = 0.0
        self._noted = (0.0, 0)
        self._held: Transaction | None = None
        """Taken from the stream, and waiting for a chunk to be published."""
        self._in_progress = True
        """Whether large transactions come while they still run: see `Stream`."""
        self._stopping = False
        self._sound = True
        """Whether the state in memory is that in the log: not after an error."""
        self._told_messages: MessageForm | None = None
        self._awaited, self._awaited_since = 0, 0.0
        """Somebody waits for the resume point to come here, and since when."""

    def _said_lately(self) -> Iterator[int]:
        """The numbers of the last transactions that are in the log."""
        if self.state is not None and self.state.lsn:
            topic = self._topic("_transactions", TRANSACTIONS)
            start = max(self.state.told, self.log.ends(topic)[0] - RECENT)
            for batch in self.log.read(topic, start, columns=["xid"]):
                yield from batch.data.column("xid").to_pylist()

    # -- running ----------------------------------------------------------------------------

    def run(self, until: str | int | None = None) -> int:
        """Capture; the LSN that the log has when it returns.

        `until`: "caught up" (all that is committed now, snapshots included), an LSN, or None: for
        ever. Lost connections are made again; what cannot be mended is a named error, and is kept
        in the log for who asks later.
        """
        try:
            with refusals(self.name):
                return self._run(until)
        except errors.HeadraceError as error:
            self._keep(error)
            raise

    def _keep(self, error: Exception) -> None:
        """Say in the log with which error it ends; the rest of the state there stays as it is."""
        with contextlib.suppress(errors.HeadraceError, OSError):  # as when it is fenced
            state = State.load(self.log, self.name)
            if state is not None:
                state.ended = error_line(error)
                with self.writer.transaction(state=state.to_json()):
                    pass

    def _run(self, until: str | int | None) -> int:
        pause, away, self._stopping = PAUSE_SECONDS, time.monotonic(), False
        in_use = 0.0  # since when another one has the slot
        if not self._sound:
            self._read_state()
        self._sound = False
        while True:
            began = math.inf
            try:
                with connected(self.dsn) as control:
                    self._prepare(control)
                    began = time.monotonic()
                    try:
                        reached = self._stream(control, until)
                        self._sound = True
                        return reached
                    finally:
                        self._snapshots.end()
            except (psycopg.OperationalError, errors.SlotInUse) as error:
                now = time.monotonic()
                in_use = (in_use or now) if isinstance(error, errors.SlotInUse) else 0.0
                if isinstance(error, errors.SlotInUse) and (
                    not error.details or now - in_use >= PATIENCE_SECONDS
                ):
                    raise  # and at once if there is no process that could let go of it
                if now - began >= (PATIENCE_SECONDS if _refuses(error) else STEADY_SECONDS):
                    pause, away = PAUSE_SECONDS, now
                said = str(getattr(error, "fact", error)).partition("\n")[0]
                if self.state is not None and self.state.failed != said:
                    self.state.failed = said
                    self._save(self.state.lsn)
                if (getattr(error, "sqlstate", None) or "").startswith("XX"):
                    self._in_progress = False
                if until is not None and now - away >= PATIENCE_SECONDS:
                    refuses = _refuses(error)
                    what = "refuses" if refuses else "is away"
                    raise errors.SourceAway(
                        f"the database of capture '{self.name}' {what}: {said}",
                        place=self.name,
                        why="it answers, and says no to what it is asked for" if refuses else "",
                        fix="look for it in the server's log, mend it, then run the capture again"
                        if refuses
                        else "",
                    ) from error
                if self._lost is not None:
                    self._lost(error)
                self._rest(pause)
                if self._stopping:
                    return 0 if self.state is None else self.state.lsn
                pause = min(2 * pause, PATIENCE_SECONDS)

    def _rest(self, seconds: float) -> None:
        """Do nothing for so long, unless it is to stop."""
        again = time.monotonic() + seconds
        while time.monotonic() < again and not self._stopping:
            time.sleep(0.1)

    def _read_state(self) -> None:
        """Go back to what is in the log."""
        self.state = State.load(self.log, self.name)
        self._tables.clear()

    def stop(self) -> None:
        """Make `run` return soon; from another thread."""
        self._stopping = True

    def _stream(self, control: psycopg.Connection, until: str | int | None) -> int:
        assert self.state is not None
        target = catalog.lsn(control) if isinstance(until, str) else until
        began, beat = time.monotonic(), 0.0
        state, self._held = self.state, None
        group: list[Transaction | Message] = []
        self._unstage_rest()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.makedirs(self._folder)
        spill = Spill(self._folder, SPILLED_PARTS * self._part_bytes)
        place = state.slot, state.publication, state.lsn
        with Stream(self.dsn, *place, spill, in_progress=self._in_progress) as stream:
            if self._hear():  # before the stream: a table that it cannot go on with is read anew
                return state.lsn
            while True:
                now = time.monotonic()
                often = LOOK_SECONDS if self._awaits(stream) else self._heartbeat
                behind = until is not None and not group and stream.received < (target or 0)
                if now - beat >= often or behind:
                    beat = now
                    catalog.heartbeat(control)
                if (state.failed or state.ended) and now - began >= STEADY_SECONDS:
                    state.failed = state.ended = ""
                    self._save(state.lsn)
                if now - self._noted[0] >= NOTE_SECONDS and state.lsn > self._noted[1]:
                    self._note(control)
                group = self._gather(stream, 0.02 if until or self._snapshots.under_way() else 1.0)
                self._take(group, control)
                if self._hear() or self._stopping:
                    return state.lsn
                self._save_if_due(stream)
                stream.confirm(state.lsn)
                caught_up = target is not None and stream.received >= target and self._held is None
                last = caught_up and not self._snapshots.under_way()
                self._look(control, stream, at_once=last)
                self._snapshots.advance(control, self._passed(stream))
                if last and not self._unsettled():
                    state.failed = state.ended = ""
                    self._save(max(state.lsn, stream.received))
                    stream.confirm(state.lsn)
                    return state.lsn

    def _passed(self, stream: Stream) -> int:
        """What was committed up to here is in the log."""
        return stream.received if self._held is None else self._held.end_lsn - 1

    def _hear(self) -> bool:
        """Do what people ask for by way of the log (`settings_name`); whether to stop.

        `paused`: true while it shall not run. `snapshots`: table -> how often it was asked for.
        `awaited`: an LSN that the resume point shall pass soon, on a quiet database too.
        """
        assert self.state is not None
        settings = self.log.value(settings_name(self.name)) or {}
        for table, times in self._asked().items():
            self.state.tables[table].asked = times
            self.snapshot(table)
        if settings.get("awaited", 0) != self._awaited:
            self._awaited, self._awaited_since = settings["awaited"], time.monotonic()
        return bool(settings.get("paused"))

    def _asked(self) -> dict[str, int]:
        """The tables that are to be read anew, and how often that was asked for."""
        known = {} if self.state is None else self.state.tables
        asked = (self.log.value(settings_name(self.name)) or {}).get("snapshots", {})
        return {one: n for one, n in asked.items() if one in known and known[one].asked < n}

    def _awaits(self, stream: Stream) -> bool:
        """Whether the stream must move on for somebody; not for ever: it may never be there."""
        recently = time.monotonic() - self._awaited_since < PATIENCE_SECONDS
        return stream.received < self._awaited and recently

    def _gather(self, stream: Stream, seconds: float) -> list[Transaction | Message]:
        """What has come; while a chunk waits, only what is before it.

        So a chunk is published right behind the place where it was read, and few rows of it are
        already out of date.
        """
        assert self.state is not None
        limit = self._snapshots.limit()
        group: list[Transaction | Message] = []
        rows = size = 0
        held, self._held = self._held, None
        with contextlib.closing(stream.receive(seconds if held is None else 0.0)) as come:
            for one in come if held is None else chain([held], come):
                if isinstance(one, Transaction):
                    if one.end_lsn <= self.state.lsn:
                        continue
                    if one.end_lsn > limit:
                        self._held = one
                        break
                    group.append(one)
                    size += one.size
                    if size >= SPILLED_PARTS * self._part_bytes:
                        break
                    rows += sum([len(change) for change in one.changes if type(change) is Rows])
                    if rows >= self._group_rows:
                        break
                elif one.prefix != "headrace" and one.lsn > self.state.lsn:
                    group.append(one)
        return group

    # -- the beginning ----------------------------------------------------------------------

    def _prepare(self, control: psycopg.Connection) -> None:
        """Find everything as it was left, or make it."""
        self._told = {}
        if self.state is not None:
            self._save(self.state.lsn)  # or we are fenced: then nothing here is for us to judge
        role, statement = catalog.replicates(control)
        if statement:  # else the stream would only find no connection
            raise errors.SourceNotReady(
                f"role {role} may not replicate", place=self.name, fix=statement
            )
        found = catalog.identity(control)
        name = f"headrace_{self.name}" if self.state is None else self.state.publication
        chosen, published = self._there(control, name)
        if self.state is None:
            slot = f"headrace_{self.name}_{self.log.journal.system.random(4).hex()}"
            self.state = State(
                found.system_id, found.timeline, found.database, found.database_oid, slot,
                publication=name,
            )  # fmt: skip
            self._save(0)
        state = self.state
        if not state.lsn:  # or it was removed, and added again
            state.system_id, state.timeline = found.system_id, found.timeline
            state.database, state.database_oid = found.database, found.database_oid
            others = [one for one in catalog.slots_of(control, name) if one != state.slot]
            note = catalog.note(control, name)
            resume.check_new(name, self.log.journal.log_id.hex(), note, others)
        else:
            resume.check(
                self._saved(chosen),
                found,
                catalog.lsn(control),
                catalog.slot(control, state.slot),
                published,
                chosen.values(),
                catalog.note(control, state.publication),
            )
        if not state.lsn:
            self._publish_tables(control, chosen)
            if catalog.slot(control, state.slot) is not None:  # of an attempt that ended here
                control.execute("SELECT pg_drop_replication_slot(%s)", (state.slot,))
            make = "SELECT lsn - '0/0' FROM pg_create_logical_replication_slot(%s, 'pgoutput')"
            with self._says_for_whom(control):  # all transactions that have begun must end
                row = control.execute(make, (state.slot,)).fetchone()
            assert row is not None
            state.lsn = int(row[0])
            (state.told,) = self.log.ends(self._topic("_transactions", TRANSACTIONS))
        self._join(control, chosen)
        self._mark_gone(chosen)
        state.starts += 1
        self._save(state.lsn)
        self._say_stopped()
        self._note(control)

    def _there(
        self,
        control: psycopg.Connection,
        publication: str,
        known: Mapping[int, PgType] | None = None,
    ) -> tuple[dict[tuple[str, str], catalog.TableInfo], catalog.Publication | None]:
        """The tables that are chosen, and the publication, at one moment: one may be renamed."""
        with control.transaction():
            control.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            found = catalog.tables(control, self.patterns, known)
            published = catalog.publication(control, publication)
        return {(one.schema, one.name): one for one in found}, published

    @contextlib.contextmanager
    def _says_for_whom(self, control: psycopg.Connection) -> Iterator[None]:
        """While a statement runs that waits for others."""
        ended, process = threading.Event(), control.info.backend_pid

        def look() -> None:
            while not ended.wait(SAY_SECONDS) and self._lost is not None:
                with contextlib.suppress(psycopg.Error), connected(self.dsn) as other:
                    who = waits.for_session(other, process)
                    if who:
                        self._lost(psycopg.OperationalError(f"the slot waits for {who}"))

        threading.Thread(target=look, daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _note(self, control: psycopg.Connection) -> None:
        """Leave word in the database of how far the log is."""
        state = self.state
        assert state is not None
        note = catalog.Note(self.log.journal.log_id.hex(), state.starts, state.lsn)
        self._noted = (time.monotonic(), state.lsn)
        catalog.write_note(control, state.publication, note)

    def _join(
        self, control: psycopg.Connection, chosen: Mapping[tuple[str, str], catalog.TableInfo]
    ) -> catalog.Publication:
        """Take tables into the capture, those that are new too; the publication, with them."""
        assert self.state is not None
        published = self._publish_tables(control, chosen)
        self.state.publication_oid = published.oid
        known = catalog.types(control)
        for name, info in chosen.items():
            self._add(name, info, known, published.member(info))
        return published

    def _saved(self, chosen: Mapping[tuple[str, str], catalog.TableInfo]) -> resume.Saved:
        state = self.state
        assert state is not None
        asked = self._asked()  # they are read anew, whatever was the matter with them
        tables = {
            table_of(name): one.member
            for name, one in state.tables.items()
            if name not in asked
            and (info := chosen.get(table_of(name))) is not None
            and one.oid in (0, info.oid)  # another table of the name is read anew too
        }
        return resume.Saved(
            log=self.log.journal.log_id.hex(),
            starts=state.starts,
            system_id=state.system_id,
            timeline=state.timeline,
            database=state.database,
            database_oid=state.database_oid,
            slot=state.slot,
            publication=state.publication,
            publication_oid=state.publication_oid,
            tables={name: member for name, member in tables.items() if member},
            stopped=frozenset(
                table_of(name) for name, one in state.tables.items() if one.status == STOPPED
            ),
            confirmed=state.lsn,
        )

    def _publish_tables(
        self, control: psycopg.Connection, chosen: Mapping[tuple[str, str], catalog.TableInfo]
    ) -> catalog.Publication:
        """The publication, with these tables in it; those that the server refuses are stopped.

        A table without identity is left alone: if it were published, updates of it would fail.
        """
        assert self.state is not None
        name = self.state.publication
        there = catalog.publication(control, name)
        if self.state.lsn:
            resume.check_publication(self._saved(chosen), there, ())
        elif there is None:
            made = sql.SQL("CREATE PUBLICATION {} WITH (publish_via_partition_root = true)")
            control.execute(made.format(sql.Identifier(name)))
            there = catalog.publication(control, name)
        assert there is not None
        self._refused = {one: why for one, why in self._refused.items() if one not in chosen}
        self._published_at = time.monotonic()
        wanted = [
            one
            for one, info in chosen.items()
            if one not in there.tables and info.identity and not info.unlogged
        ]
        why = self._publish(control, wanted) if wanted else ""
        if why:  # then one by one
            found = {one: self._publish(control, [one]) for one in wanted if len(wanted) > 1}
            found = found or dict.fromkeys(wanted, why)
            self._refused |= {one: why for one, why in found.items() if why}
        there = catalog.publication(control, name)
        assert there is not None
        return there

    def _publish(self, control: psycopg.Connection, names: Sequence[tuple[str, str]]) -> str:
        """Add tables to the publication, all or none; why not, if the server refuses."""
        assert self.state is not None
        listed = sql.SQL(", ").join(sql.SQL("ONLY {}").format(sql.Identifier(*n)) for n in names)
        add = sql.SQL("ALTER PUBLICATION {} ADD TABLE {}")
        try:
            with control.transaction():
                control.execute(f"SET LOCAL lock_timeout = {PUBLISH_MS}")
                control.execute(add.format(sql.Identifier(self.state.publication), listed))
        except psycopg.errors.LockNotAvailable:
            return f"waits for {waits.for_table(control, names[0], modes=waits.PUBLISHING)}"
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            return "waits for the table, which has just gone"
        except psycopg.errors.DuplicateObject as error:  # renamed, and just so again
            return "" if len(names) == 1 else str(error)
        except psycopg.OperationalError:
            raise
        except psycopg.Error as error:
            return " ".join(str(error).split())
        return ""

    def _add(
        self,
        name: tuple[str, str],
        info: catalog.TableInfo,
        known: dict[int, PgType],
        member: int,
    ) -> None:
        """A table of the capture: known from before, or new."""
        assert self.state is not None
        full = full_name(*name)
        state = self.state.tables.get(full)
        if state is None:
            key = info.identity if info.replica_identity == "i" else info.key
            state = TableState(
                topic=topic_name(self.name, full),
                key=list(key),
                member=member,
                fence=-1,
                columns={column.name: column.number for column in info.columns},
            )
            with _stops(state):
                self._make_topic(info, state)
            self.state.tables[full] = state
        why = self._refused.get(name, "")
        if not (member or why) and state.status != STOPPED:  # left alone: once it was published
            with _stops(state):
                _refuse_unfit(info, state)
        if why and state.status != STOPPED:
            later = why.startswith("waits for")
            if later and state.status != SNAPSHOTTING:
                (self._tables.get(name) or state).read_again()
            state.status = SNAPSHOTTING if later else STOPPED
            state.reason = why if later else f"not published: {why}"
            if later and self._lost is not None:
                self._lost(psycopg.OperationalError(f"{full} {why}"))
        if not state.member and state.oid in (0, info.oid):  # else `resume` finds it another one
            state.member = member
        if not state.oid:
            state.oid, state.partitions = info.oid, info.partitions
            _note_files(state, info)
        captured = self._tables.get(name)
        if captured is None:
            if state.key:
                state.fence = -1  # which keys the stream has said before is not known any more
            if state.status == SNAPSHOTTING and (state.thorough or not state.key):
                state.read_again()  # which rows it has seen is not known any more
            self._tables[name] = Captured(
                self.log, info, state, known, f"{self._folder}/owed", self._numeric_as_text,
                recent=self._recent,
            )  # fmt: skip
            if 0 in state.columns.values():  # a topic that was there
                with _stops(state):
                    redefine(
                        self._tables[name], _as_relation(info), self._numeric_as_text,
                        lambda: self._save(self._lsn),
                    )  # fmt: skip
        else:  # a connection was lost: what was in flight is read again
            captured.info, captured.types, captured.relation = info, known, None
            captured.drop()
        self._tables[name].published = not why and bool(member or state.status == STOPPED)

    def _make_topic(self, info: catalog.TableInfo, state: TableState) -> None:
        assert self.state is not None
        if any(one.topic == state.topic for one in self.state.tables.values()):
            raise errors.TopicExists(f"'{state.topic}' is another table's", place=state.topic)
        _refuse_unfit(info, state)
        _refuse_key(info, state)
        refuse_reserved(column.name for column in info.streamed)
        fields = [
            pa.field(column.name, kind, metadata=told(column.type, column.modifier, kind))
            for column, kind in (
                (one, arrow_type(
                    one.type, one.modifier, column=one.name, numeric_as_text=self._numeric_as_text
                ))
                for one in info.streamed
            )
        ]  # fmt: skip
        reserved = (RESERVED[name] for name in META)
        fields += [pa.field(one.name, one.type, nullable=one.nullable) for one in reserved]
        schema = pa.schema(fields)
        try:
            self.log.create_topic(state.topic, schema, key=state.key, kind="changes", exist_ok=True)
        except errors.TopicExists:  # perhaps ours, and we were killed before we said so
            topic = self.log.topic(state.topic)
            ours = topic.kind == "changes" and list(topic.key) == state.key
            if not ours or any(self.log.ends(state.topic)):
                raise
            state.columns = dict.fromkeys(topic.schema.arrow.names, 0)

    # -- groups -----------------------------------------------------------------------------

    def _take(self, group: Sequence[Transaction | Message], control: psycopg.Connection) -> None:
        """Append a group; where a table changes its columns, what comes before is an entry."""
        pending: list[Transaction | Message] = []
        for one in group:
            if isinstance(one, Transaction) and not self._is_plain(one):
                changed = list(self._new_definitions(one, control))
                large = one.size > self._part_bytes or any(
                    isinstance(change, Truncate) for change in one.changes
                )
                alone = bool(changed) or large
                if alone:
                    self._append(pending)
                    pending = []
                for captured, relation in changed:
                    self._redefine(captured, relation, control)
                if large:
                    self._append_large(one)
                elif alone:
                    self._append([one])
                if alone:
                    continue
            pending.append(one)
        self._append(pending)

    def _is_plain(self, one: Transaction) -> bool:
        """Whether it is one run of rows with columns that are known, as most are."""
        changes = one.changes
        if type(changes) is not list or len(changes) != 1 or one.size > self._part_bytes:
            return False
        run = changes[0]
        if type(run) is not Rows:
            return False
        found = self._tables.get((run.relation.schema, run.relation.table))
        return found is not None and found.relation is run.relation

    def _captured(self, relation: Relation) -> Captured | None:
        found = self._tables.get((relation.schema, relation.table))
        return None if found is None or found.state.status == STOPPED else found

    def _new_definitions(
        self, one: Transaction, control: psycopg.Connection
    ) -> Iterator[tuple[Captured, Relation]]:
        """The tables that are not as they were, as the stream describes them."""
        for relation in one.relations():
            captured = self._captured(relation)
            if captured is not None and captured.relation is not relation:
                captured.relation = relation
                self._mark_renamed(relation)
                known = abs(captured.state.oid) == relation.id
                if (
                    not known
                    or not self._fits(captured, relation)
                    or (relation.identity == "f" and self._rewritten(captured, control))
                ):
                    yield captured, relation
            elif captured is None and self._others.get(id(relation)) is not relation:
                self._others[id(relation)] = relation
                self._mark_renamed(relation)

    def _rewritten(self, captured: Captured, control: psycopg.Connection) -> bool:
        """Whether the rows of a live table were rewritten.

        What the stream says of old rows is believed if they are whole, so the topic must have them
        so first. It describes a table again whenever something was done to it. (A truncate that is
        still to come is no reason to read it: what happened before would be lost.)
        """
        info = catalog.table(control, (captured.info.schema, captured.info.name))
        if info is None or captured.snapshotting:
            return False
        self._settle_storage(captured, info)
        return captured.state.storage != info.storage and captured.state.altered != info.altered

    def _mark_renamed(self, relation: Relation) -> None:
        """The stream calls a table so: if we know it by another name, it may be back again soon."""
        for name, other in self._tables.items():
            if name != (relation.schema, relation.table) and abs(other.state.oid) == relation.id:
                other.state.oid = GONE

    def _fits(self, captured: Captured, relation: Relation) -> bool:
        """Whether a topic has the columns of a relation, and its key."""
        if not _same_key(captured, relation):
            return False
        try:
            types = {
                column.name: arrow_type(
                    captured.types[column.type_oid], column.type_modifier,
                    numeric_as_text=self._numeric_as_text,
                )
                for column in relation.columns
            }  # fmt: skip
        except (KeyError, errors.HeadraceError):
            return False
        own = captured.own
        if set(own.names) != set(types) or any(own.field(n).type != t for n, t in types.items()):
            return False
        numbers = captured.state.columns
        if [*types] != sorted(types, key=lambda name: numbers.get(name, 0)):
            return False  # some have changed their names with each other
        return not captured.says_otherwise(relation, types)

    def _look(self, control: psycopg.Connection, stream: Stream, *, at_once: bool) -> None:
        """Look for tables that are new, and for columns that changed without a row that says so.

        And whether all are still published: of those that are not, the stream says nothing.

        What a table is now counts only once the stream has passed the place where it was seen:
        rows that are still to come may be older than the change.
        """
        assert self.state is not None
        now = time.monotonic()
        often = LOOK_SECONDS if self._unsettled() else self._heartbeat
        if not at_once and now - self._looked_at < often:
            return
        self._looked_at = now
        known = next((one.types for one in self._tables.values()), None)
        found, published = self._there(control, self.state.publication, known)
        resume.check_publication(self._saved(found), published, found.values())
        place = catalog.lsn(control)
        there = {
            name: one.info.oid
            for name, one in self._tables.items()
            if one.published or name in self._refused
        }
        again = [
            one
            for one in self._refused
            if one in self._tables and self._tables[one].state.status != STOPPED
        ]
        if again and now - self._published_at < PUBLISH_SECONDS:
            again = []
        if again or any(there.get(name) != info.oid for name, info in found.items()):
            self._join(control, found)
        if self._mark_gone(found):
            self._save(self._lsn)
        for name, one in self._tables.items():
            if name not in found:
                one.differs_at = None
        for name, info in found.items():
            captured = self._tables[name]
            relation = _as_relation(info)
            self._note_member(captured, published, info)
            self._settle_storage(captured, info)
            self._take_in_empty(captured, info, control)
            self._doubt_altered(captured, info, control)
            if captured.state.status == STOPPED and captured.state.oid >= 0:
                captured.differs_at = None
            elif self._is_so(captured, info):
                captured.differs_at, captured.info = None, info
                _note_files(captured.state, info)
            elif captured.differs_at is None:
                captured.differs_at = place
                catalog.heartbeat(control)
            elif self._passed(stream) >= captured.differs_at:
                captured.differs_at, captured.info = None, info
                self._redefine(captured, relation, control)

    def _mark_gone(self, found: Container[tuple[str, str]]) -> bool:
        """Whether a table is not there any more; should it come back, it is read anew."""
        assert self.state is not None
        gone = [
            one
            for name, one in self.state.tables.items()
            if table_of(name) not in found
            and (one.status == SNAPSHOTTING or (one.status != STOPPED and one.oid >= 0))
        ]
        for one in gone:
            one.oid, one.reason = -abs(one.oid) or GONE, "the table is gone, or not chosen any more"
            if one.status == SNAPSHOTTING:
                one.status = STOPPED
        return bool(gone)

    def _unsettled(self) -> bool:
        """Whether the topics are not yet what the tables are, wherever the stream is."""
        return self._snapshots.under_way() or any(
            one.differs_at is not None for one in self._tables.values()
        )

    def _is_so(self, captured: Captured, info: catalog.TableInfo) -> bool:
        """Whether a topic has the columns of a table: those, not others of the same names."""
        state = captured.state
        numbers = {column.name: column.number for column in info.columns}
        return (
            not info.unlogged
            and info.oid == state.oid
            and state.storage in ("", info.storage)
            and numbers == state.columns
            and _labels(info, state.labels) == state.labels
            and self._fits(captured, _as_relation(info))
        )

    def _redefine(
        self, captured: Captured, relation: Relation, control: psycopg.Connection
    ) -> None:
        """Give a topic the columns that its table has now."""
        assert self.state is not None
        lsn, state = self.state.lsn, captured.state
        known = catalog.types(control)
        info = catalog.table(control, (captured.info.schema, captured.info.name))
        for one in self._tables.values():
            one.types = known
        with _stops(state):
            if info is not None and info.unlogged:
                _refuse_unfit(info, state)
            back = info is not None and _same_key(captured, _as_relation(info))
            if not _same_key(captured, relation) and back:  # it was another one for a while
                captured.read_again()
                state.fence = -1
            elif not _same_key(captured, relation):
                named = ", ".join(one.name for one in relation.columns if one.key)
                if not named or not state.key:
                    what = "no replica identity" if state.key else "no REPLICA IDENTITY FULL"
                    raise errors.NoReplicaIdentity(
                        f"table {captured.name} has {what} any more", place=state.topic
                    )
                state.status = STOPPED
                state.reason = f"its key is now ({named}), the topic's ({', '.join(state.key)})"
                state.reason += "; a topic keeps its key: a capture of another name has the new one"
                return
            if info is not None:
                _refuse_key(info, state)
                captured.info = info
                self._settle_storage(captured, info)
                self._take_in_empty(captured, info, control)
            if state.oid != relation.id:  # another table of the name: nothing of it is known
                there = {} if info is None else {(info.schema, info.name): info}
                published = self._join(control, there)
                state.oid, state.fence, state.member = relation.id, -1, 0
                if info is not None and info.oid == relation.id:
                    state.member = published.member(info)
                captured.read_again()
            if info is not None:
                if state.storage != info.storage:
                    own = catalog.is_named(control, self.state.publication, info.oid)
                    captured.read_again(thorough=info.partitioned or not own)
                if _labels(info, state.labels) != state.labels:
                    captured.read_again()
                _note_files(state, info)
                if self._is_so(captured, info):  # the topic is ahead of the stream:
                    if captured.reads_by_other_names(relation):
                        captured.read_again(thorough=False)
                    self._save(lsn)
                    return  # what comes is read as far as it goes
            redefine(captured, relation, self._numeric_as_text, lambda: self._save(lsn))

    def _note_member(
        self, captured: Captured, published: catalog.Publication | None, info: catalog.TableInfo
    ) -> None:
        """By which entry a table is published, where that is not known: then it is read anew."""
        state = captured.state
        unknown = not state.member and state.oid == info.oid and state.status != STOPPED
        if unknown and captured.published and published is not None and published.member(info):
            state.member = published.member(info)
            captured.read_again()

    def _settle_storage(self, captured: Captured, info: catalog.TableInfo) -> None:
        """A table that was emptied is in new files: they are known now, if it is not altered."""
        state, new = captured.state, catalog.emptied(info.storage)
        if not state.storage or (state.storage, state.altered) == (new, info.altered):
            state.storage = info.storage

    def _take_in_empty(
        self, captured: Captured, info: catalog.TableInfo, control: psycopg.Connection
    ) -> None:
        """Partitions that came without rows change nothing: their rows will be in the stream."""
        state = captured.state
        known = state.storage.split()
        came = [one for one in info.storage.split() if one not in known]
        if info.partitioned and state.storage and "~" not in state.storage and came:
            oids = {one: int(re.split("[/:]", one)[0]) for one in (*known, *came)}
            if not catalog.have_rows(control, [oids[one] for one in came]):
                state.grown = catalog.lsn(control)
                state.storage = " ".join(sorted(oids, key=oids.__getitem__))

    def _doubt_altered(
        self, captured: Captured, info: catalog.TableInfo, control: psycopg.Connection
    ) -> None:
        """A partition that was altered may have named its rows by other columns for a while.

        In a live table a row whose key was changed then is missing, and so it is seen. In one that
        was being read it is not: that is read anew.
        """
        state = captured.state
        if _altered(state.partitions, info.partitions):
            state.grown = catalog.lsn(control)
            if captured.snapshotting or (captured.read_lately and state.status == LIVE):
                captured.read_again()
        state.partitions, captured.read_lately = info.partitions, captured.snapshotting

    def _changes(
        self, captured: Captured, runs: Sequence[Run], lookup: Lookup | None = None
    ) -> Changes:
        """What transactions do to a table; it is read anew if its rows changed in silence."""
        try:
            return captured.changes(runs, lookup)
        except (errors.BeforeImageMissing, errors.NoReplicaIdentity) as error:
            named = not isinstance(error, errors.NoReplicaIdentity)
            with connected(self.dsn) as control:
                info = catalog.table(control, (captured.info.schema, captured.info.name))
            state = captured.state
            if info is not None:  # or it is gone by now, and nobody can tell
                if not _same_key(captured, _as_relation(info)):
                    raise captured.named_otherwise() from None
                self._settle_storage(captured, info)
                moved = state.storage != info.storage or self._lsn < state.grown
                moved = moved or _altered(state.partitions, info.partitions)
                if named and not moved and _labels(info, state.labels) == state.labels:
                    raise
                _note_files(state, info)
            captured.read_again()
            if named:
                return captured.changes(runs, lookup)
            state.fence = -1  # they are not heard, so they must be seen
            return captured.nothing()

    def _append(self, items: Sequence[Transaction | Message]) -> None:
        """One entry: the rows of all tables, and the resume point."""
        assert self.state is not None
        if not items:
            return
        found = self._lone(items[0]) if len(items) == 1 else None
        parts, told, said, end = found or self._parts(items)
        with self._entry(max(self.state.lsn, end)) as entry:
            for topic, batch, boundaries in parts:
                entry.append(topic, batch, transactions=boundaries)
            if told is not None:
                entry.append(self._topic("_transactions", TRANSACTIONS), told)
            if said:
                entry.append(self._topic("_messages", MESSAGES), said)
        if len(items) == 1:  # whom it has woken waits for this processor, often, and we go on
            self.log.journal.system.give_way()

    def _lone(self, one: Transaction | Message) -> Parts | None:
        """`_parts` of a transaction that inserts a few rows into one table; None: it is another."""
        if not isinstance(one, Transaction) or not self._is_plain(one):
            return None
        (run,) = one.changes
        assert isinstance(run, Rows)
        if run.op != "i" or len(run) > FEW:
            return None
        captured = self._tables[run.relation.schema, run.relation.table]
        rows, told = captured.inserted(run, one), told_of(one, len(run), self._told_form())
        if rows is None or told is None:
            return None
        self._recent.append(one.xid)
        return [(captured.state.topic, rows, None)], told, [], one.end_lsn

    def _told_form(self) -> MessageForm:
        """Of the topic of transactions."""
        schema = self.log.topic(self._topic("_transactions", TRANSACTIONS)).schema.arrow
        if self._told_messages is None or self._told_messages.schema is not schema:
            self._told_messages = MessageForm(schema)
        return self._told_messages

    def _parts(self, items: Sequence[Transaction | Message]) -> Parts:
        """The rows of all tables; the rows of transactions, and of messages; the resume point."""
        group = Group(items)
        self._recent.extend(group.xid.tolist())
        counts = np.zeros(len(group.transactions), np.int64)
        parts: list[tuple[str, pa.RecordBatch | ArrowMessage, list[int] | None]] = []
        for name, of_table in group.tables.items():
            captured = self._tables.get(name)
            if captured is None or captured.state.status == STOPPED:
                continue
            try:
                rows, weight, of, op = self._changes(captured, of_table)
            except OF_A_TABLE as error:
                captured.state.stop(error)
                continue
            if rows.num_rows:
                of_each = np.bincount(of, minlength=len(counts))
                counts += of_each
                batch = captured.with_meta(
                    rows, weight, op, group.lsn[of], group.xid[of], group.time[of]
                )
                boundaries = of_each.tolist() if len(counts) > 1 else None
                parts.append((captured.state.topic, batch, boundaries))
        said = [
            {"prefix": one.prefix, "content": one.content, "lsn": one.lsn, "xid": xid}
            for one, xid in group.messages
        ]
        return parts, group.told(counts) if counts.any() else None, said, group.end

    def _append_large(self, one: Transaction) -> None:
        """One entry that names the rows of a transaction, staged before."""
        assert self.state is not None
        large = Large(
            self.log, self._tables, one, folder=f"{self._folder}/{one.xid}",
            messages=lambda: self._topic("_messages", MESSAGES), part_bytes=self._part_bytes,
            changes=self._changes, staged=lambda piece: self._note_staged(piece, one),
        )  # fmt: skip
        large.stage()
        group = Group([replace(one, changes=[])])
        self._recent.append(one.xid)
        with self._entry(max(self.state.lsn, group.end)) as entry:
            large.append_to(entry)
            if large.rows:
                told = group.told(np.array([large.rows]))
                entry.append(self._topic("_transactions", TRANSACTIONS), told)
        Path(self._staged).unlink(missing_ok=True)
        one.close()

    def _note_staged(self, piece: Piece, one: Transaction) -> None:
        """Remember a piece until an entry names it: if we are killed before, nobody will."""
        assert self.state is not None
        with open(self._staged, "a") as file:
            server = f"{self.state.system_id} {self.state.timeline}"
            file.write(f"{server} {one.end_lsn} {piece.name}\n")

    def _unstage_rest(self) -> None:
        """Remove pieces of a transaction that was killed on its way: the log ends before it.

        Positions count on one server and timeline only; what is of another one is left alone.
        """
        assert self.state is not None
        ours = [self.state.system_id, str(self.state.timeline)]
        with contextlib.suppress(FileNotFoundError):
            for line in Path(self._staged).read_text().splitlines():
                *server, end, name = line.split()
                if server == ours and int(end) > self.state.lsn:
                    with contextlib.suppress(OSError):
                        self.log.unstage([Piece(name, "", 0, 0, 0, 0, ())])
        Path(self._staged).unlink(missing_ok=True)

    def _topic(self, name: str, schema: str) -> str:
        full = f"{self.name}.{name}"
        if full not in self._topics:
            self.log.create_topic(full, schema, exist_ok=True)
            self._topics.add(full)
        return full

    @contextlib.contextmanager
    def _entry(self, lsn: int) -> Iterator[Any]:
        """An entry that moves the resume point."""
        assert self.state is not None
        self.state.lsn = lsn
        unsaved = self.state.unsaved(self.name)
        with self.writer.transaction(state=self.state.to_json()) as entry:
            for table, one in unsaved.items():
                entry.put_own(table, one)
            yield entry
        self.state.save()
        self._saved_at = time.monotonic()
        if unsaved:
            self._say_stopped()

    def _say_stopped(self) -> None:
        """Tell of the tables that are stopped, each once."""
        assert self.state is not None
        now = {name: one.reason for name, one in self.state.tables.items() if one.status == STOPPED}
        for name, why in now.items():
            if self._stopped is not None and self._told.get(name) != why:
                self._stopped(name, why)
        self._told = now

    @property
    def _lsn(self) -> int:
        assert self.state is not None
        return self.state.lsn

    def _save(self, lsn: int) -> None:
        with self._entry(lsn):
            pass

    def _save_if_due(self, stream: Stream) -> None:
        """On a quiet database the resume point moves without data."""
        assert self.state is not None
        due = time.monotonic() - self._saved_at >= self._heartbeat
        due = due or self.state.lsn < self._awaited <= stream.received
        if due and stream.received > self.state.lsn and self._held is None:
            self._save(stream.received)

    def snapshot(self, table: str) -> None:
        """Read a table anew, from its beginning, while the capture goes on.

        What differs is put right; rows that the database does not have go in the end.
        """
        assert self.state is not None
        for captured in self._tables.values():
            if captured.name != table:
                continue
            if captured.state.topic in {topic.name for topic in self.log.topics()}:
                captured.read_again()
                if captured.state.key:
                    captured.state.fence = -1  # perhaps it was not published all the time
                captured.state.member, captured.published = 0, False
                self._looked_at = self._published_at = 0.0
            else:  # it could not be captured: perhaps now it can
                del self._tables[captured.info.schema, captured.info.name]
                del self.state.tables[table]
            self._save(self.state.lsn)
            return


def _refuses(error: Exception) -> bool:
    """Whether the server has said no, and is neither away nor going."""
    code = getattr(error, "sqlstate", None) or ""
    return bool(code) and code[:2] not in ("08", "57")


@contextlib.contextmanager
def _stops(state: TableState) -> Iterator[None]:
    """What is wrong stops the table, unless it concerns all."""
    try:
        yield
    except (errors.PublicationDropped, errors.TableLeftPublication, errors.Fenced):
        raise
    except errors.HeadraceError as error:
        state.stop(error)


def _refuse_unfit(info: catalog.TableInfo, state: TableState) -> None:
    """Raise why the changes of a table cannot be followed."""
    why = ""
    if info.unlogged:
        why = "has a partition that is unlogged or foreign" if info.partitioned else "is unlogged"
        why += ", so its changes are in no stream"
    elif not info.identity or (not state.key and info.replica_identity != "f"):
        why = "has a key that cannot be used" if info.key else "has no primary key"
        why += ", and its replica identity is not FULL"
        if not info.streamed:
            why = "has no columns"
        elif info.replica_identity == "f" and any(one.generated for one in info.columns):
            why = "has REPLICA IDENTITY FULL and generated columns, which the server refuses"
    if why:
        raise errors.NoReplicaIdentity(f"table {info.schema}.{info.name} {why}", place=state.topic)


def _refuse_key(info: catalog.TableInfo, state: TableState) -> None:
    """Raise that rows cannot be known by a column."""
    for column in info.streamed:
        if column.name in state.key or not state.key:
            refuse_as_key(column.type, column.name)


def _note_files(state: TableState, info: catalog.TableInfo) -> None:
    """The topic has the rows that are in these files, with these labels."""
    state.storage, state.altered, state.labels = info.storage, info.altered, _labels(info)


def _labels(info: catalog.TableInfo, like: str | None = None) -> str:
    """What `TableState.labels` is of a table; of those labels only that another one is of."""
    if like == "" or not info.labels:
        return ""
    last = info.labels[-1][0] if like is None else int(like.partition(" ")[0])
    known = repr([one for one in info.labels if one[0] <= last])
    return f"{last} {hashlib.blake2b(known.encode(), digest_size=8).hexdigest()}"


def _altered(before: str, now: str) -> bool:
    """Whether a partition was altered that was there before: see `TableInfo.partitions`."""
    known = dict(one.split(":") for one in before.split())
    return any(known.get(oid, xid) != xid for oid, xid in (one.split(":") for one in now.split()))


def _as_relation(info: catalog.TableInfo) -> Relation:
    """A table as the stream would describe it now."""
    columns = tuple(
        Column(column.name, column.type.oid, column.modifier, column.name in info.identity)
        for column in info.streamed
    )
    return Relation(info.oid, info.schema, info.name, info.replica_identity, columns)


def _same_key(captured: Captured, relation: Relation) -> bool:
    """Whether the stream names rows by the topic's key, or says them whole."""
    named = {column.name for column in relation.columns if column.key}
    key = set(captured.state.key)
    return relation.identity == "f" or (bool(key) and named == key)
