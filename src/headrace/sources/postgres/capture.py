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
small transactions share an entry, and a large one is never cut.

**What stops what.** A value or type that cannot be carried stops its table, which says why, and the
others go on; `snapshot` reads it anew. What concerns the whole stream (a slot that is gone, another
server) stops the capture with a named error (`resume`). A connection that breaks is made again.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql

from headrace import errors
from headrace.sources.postgres import catalog, resume
from headrace.sources.postgres.captured import META, Captured, with_meta
from headrace.sources.postgres.group import Group
from headrace.sources.postgres.protocol import Column, Message, Relation, Rows, Truncate
from headrace.sources.postgres.redefine import redefine
from headrace.sources.postgres.snapshot import CHUNK_ROWS, read_chunk
from headrace.sources.postgres.state import (
    SNAPSHOTTING,
    STOPPED,
    State,
    TableState,
    settings_name,
    writer_name,
)
from headrace.sources.postgres.stream import Stream
from headrace.sources.postgres.transactions import Transaction
from headrace.sources.postgres.values import PgType, arrow_type
from headrace.model.schema import RESERVED
from headrace.tables.hashing import hash64

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog

GROUP_ROWS = 50_000
"""A group ends with the transaction that makes it this large."""
HEARTBEAT_SECONDS = 10.0
"""On a quiet database the resume point moves at least so often."""
LOOK_SECONDS = 0.5
"""While a table is snapshotted, or has other columns, it is looked at so often."""
PATIENCE_SECONDS = 30.0
"""How long a run that has an end waits for a database that is away."""
RECENT = 10_000
"""Transactions whose numbers are remembered, for snapshots that begin later."""
SESSION = (
    "-c DateStyle=ISO,MDY -c IntervalStyle=iso_8601 -c bytea_output=hex -c extra_float_digits=1"
    " -c TimeZone=UTC -c statement_timeout=0 -c idle_in_transaction_session_timeout=0"
)
"""The settings under which values are printed."""
TRANSACTIONS = "xid bigint, lsn bigint, commit_time timestamp, rows bigint"
MESSAGES = "prefix string, content binary, lsn bigint, xid bigint"
CHUNKS = "table string, lsn bigint, rows bigint, published bigint, hash bigint, last string"


@dataclass(frozen=True)
class Progress:
    """How far a snapshot is."""

    table: str
    rows: int
    of: int
    seconds: float


Report = Callable[[Progress], None]


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
        group_rows: int = GROUP_ROWS,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        report: Report | None = None,
        lost: Callable[[Exception], None] | None = None,
    ) -> None:
        """Nothing is done before `run`. `tables`: patterns, as `public.*` or `!public.tmp_*`."""
        self.log = log
        self.name = name
        self.dsn = psycopg.conninfo.make_conninfo(
            dsn, options=SESSION, application_name=f"headrace {name}", client_encoding="UTF8"
        )
        self.patterns = tuple(tables)
        self._numeric_as_text = numeric_as_text
        self._chunk_rows = chunk_rows
        self._group_rows = group_rows
        self._heartbeat = heartbeat_seconds
        self._report = report
        self._lost = lost
        self.writer = log.writer(writer_name(name))
        saved = self.writer.state
        self.state: State | None = None if saved is None else State.from_json(saved, name)
        self._tables: dict[tuple[str, str], Captured] = {}
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._saved_at = 0.0
        self._looked_at = 0.0
        self._held: Transaction | None = None
        """Taken from the stream, and waiting for a chunk to be published."""
        self._stopping = False
        self._started = time.monotonic()

    # -- running ----------------------------------------------------------------------------

    def run(self, until: str | int | None = None) -> int:
        """Capture; the LSN that the log has when it returns.

        `until`: "caught up" (all that is committed now, snapshots included), an LSN, or None: for
        ever. Lost connections are made again; what cannot be mended is a named error.
        """
        pause, away, self._stopping = 0.1, time.monotonic(), False
        while True:
            try:
                with psycopg.connect(self.dsn, autocommit=True) as control:
                    self._prepare(control)
                    pause = 0.1
                    try:
                        return self._stream(control, until)
                    finally:
                        away = time.monotonic()
            except (psycopg.OperationalError, errors.SlotInUse) as error:
                if until is not None and time.monotonic() - away >= PATIENCE_SECONDS:
                    if isinstance(error, errors.SlotInUse):
                        raise
                    said = str(error).partition("\n")[0]
                    raise errors.SourceAway(
                        f"the database of capture '{self.name}' is away: {said}", place=self.name
                    ) from error
                if self._lost is not None:
                    self._lost(error)
                time.sleep(pause)
                pause = min(2 * pause, 30.0)

    def stop(self) -> None:
        """Make `run` return soon; from another thread."""
        self._stopping = True

    def _stream(self, control: psycopg.Connection, until: str | int | None) -> int:
        assert self.state is not None
        target = catalog.lsn(control) if isinstance(until, str) else until
        beat = 0.0
        state, self._held = self.state, None
        with Stream(self.dsn, state.slot, state.publication, state.lsn) as stream:
            while True:
                now = time.monotonic()
                if now - beat >= self._heartbeat or (
                    until is not None and stream.received < (target or 0)
                ):
                    beat = now
                    _heartbeat(control)
                group = self._gather(stream, 0.02 if until or self._snapshotting() else 1.0)
                self._take(group, control)
                if self._hear() or self._stopping:
                    return state.lsn
                self._save_if_due(stream)
                stream.confirm(state.lsn)
                caught_up = target is not None and stream.received >= target and self._held is None
                self._look(control, stream, at_once=caught_up)
                self._snapshot(control, stream)
                if caught_up and not self._unsettled():
                    self._save(max(state.lsn, stream.received))
                    stream.confirm(state.lsn)
                    return state.lsn

    def _hear(self) -> bool:
        """Do what people ask for by way of the log (`settings_name`); whether to stop.

        `paused`: true while it shall not run. `snapshots`: table -> how often it was asked for.
        """
        assert self.state is not None
        settings = self.log.value(settings_name(self.name)) or {}
        for table, times in settings.get("snapshots", {}).items():
            found = self.state.tables.get(table)
            if found is not None and found.asked < times:
                found.asked = times
                self.snapshot(table)
        return bool(settings.get("paused"))

    def _gather(self, stream: Stream, seconds: float) -> list[Transaction | Message]:
        """What has come; while a chunk waits, only what is before it.

        So a chunk is published right behind the place where it was read, and few rows of it are
        already out of date.
        """
        assert self.state is not None
        waiting = [one.chunk.lsn for one in self._tables.values() if one.chunk is not None]
        limit = min(waiting, default=1 << 64)
        group: list[Transaction | Message] = []
        rows = 0
        held, self._held = self._held, None
        come = stream.receive(seconds) if held is None else chain([held], stream.receive(0.0))
        for one in come:
            if isinstance(one, Transaction):
                if one.end_lsn <= self.state.lsn:
                    continue
                if one.end_lsn > limit:
                    self._held = one
                    break
                rows += sum(len(change) for change in one.changes if isinstance(change, Rows))
                group.append(one)
                if rows >= self._group_rows:
                    break
            elif one.prefix != "headrace" and one.lsn >= self.state.lsn:
                group.append(one)
        return group

    # -- the beginning ----------------------------------------------------------------------

    def _prepare(self, control: psycopg.Connection) -> None:
        """Find everything as it was left, or make it."""
        if self.state is not None:
            self._save(self.state.lsn)  # or we are fenced: then nothing here is for us to judge
        found = catalog.identity(control)
        chosen = {(t.schema, t.name): t for t in catalog.tables(control, self.patterns)}
        # A table without identity is left alone: if it were published, updates of it would fail.
        tables = {name: info for name, info in chosen.items() if info.identity}
        if self.state is None:
            slot = f"headrace_{self.name}_{self.log.journal.system.random(4).hex()}"
            self.state = State(
                found.system_id, found.timeline, found.database, found.database_oid, slot,
                publication=f"headrace_{self.name}",
            )  # fmt: skip
            self._save(0)
        state = self.state
        if not state.lsn:  # or it was removed, and added again
            state.system_id, state.timeline = found.system_id, found.timeline
            state.database, state.database_oid = found.database, found.database_oid
        else:
            resume.check(
                self._saved(),
                found,
                catalog.lsn(control),
                catalog.slot(control, state.slot),
                catalog.publication(control, state.publication),
                tables.values(),
                catalog.note(control, state.publication),
            )
        self._publish_tables(control, [*tables])
        if not state.lsn:
            if catalog.slot(control, state.slot) is not None:  # of an attempt that ended here
                control.execute("SELECT pg_drop_replication_slot(%s)", (state.slot,))
            row = control.execute(
                "SELECT lsn - '0/0' FROM pg_create_logical_replication_slot(%s, 'pgoutput')",
                (state.slot,),
            ).fetchone()
            assert row is not None
            state.lsn = int(row[0])
        self._join(control, chosen)
        state.starts += 1
        self._save(state.lsn)
        note = catalog.Note(self.log.journal.log_id.hex(), state.starts, state.lsn)
        catalog.write_note(control, state.publication, note)

    def _join(
        self, control: psycopg.Connection, chosen: Mapping[tuple[str, str], catalog.TableInfo]
    ) -> None:
        """Take tables into the capture, those that are new too."""
        assert self.state is not None
        published = self._publish_tables(
            control, [name for name, info in chosen.items() if info.identity]
        )
        self.state.publication_oid = published.oid
        row = control.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text").fetchone()
        fence = int(row[0]) if row else 0
        known = catalog.types(control)
        for name, info in chosen.items():
            self._add(name, info, known, published.members.get(name, 0), fence)

    def _saved(self) -> resume.Saved:
        state = self.state
        assert state is not None
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
            tables={_split(name): one.member for name, one in state.tables.items() if one.member},
            confirmed=state.lsn,
        )

    def _publish_tables(
        self, control: psycopg.Connection, names: list[tuple[str, str]]
    ) -> catalog.Publication:
        """The publication, with these tables in it."""
        assert self.state is not None
        publication = sql.Identifier(self.state.publication)
        there = catalog.publication(control, self.state.publication)
        wanted = names if there is None else [one for one in names if one not in there.tables]
        listed = sql.SQL(", ").join(sql.Identifier(*one) for one in wanted)
        if there is None:
            made = sql.SQL("CREATE PUBLICATION {}").format(publication)
            if wanted:
                made += sql.SQL(" FOR TABLE {}").format(listed)
            control.execute(made + sql.SQL(" WITH (publish_via_partition_root = true)"))
        elif wanted and not there.all_tables:
            control.execute(
                sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(publication, listed)
            )
        there = catalog.publication(control, self.state.publication)
        assert there is not None
        return there

    def _add(
        self,
        name: tuple[str, str],
        info: catalog.TableInfo,
        known: dict[int, PgType],
        member: int,
        fence: int,
    ) -> None:
        """A table of the capture: known from before, or new."""
        assert self.state is not None
        full = f"{name[0]}.{name[1]}"
        state = self.state.tables.get(full)
        if state is None:
            key = info.identity if info.replica_identity == "i" else info.key
            state = TableState(
                topic=f"{self.name}.{full}",
                key=list(key),
                member=member,
                fence=fence,
                columns={column.name: column.number for column in _streamed(info)},
            )
            self.state.tables[full] = state
            try:
                self._make_topic(info, state)
            except errors.HeadraceError as error:
                state.status, state.reason = STOPPED, error.fact
        state.member = member  # another one, if the capture was removed and added again
        captured = self._tables.get(name)
        if captured is None:
            if state.status == SNAPSHOTTING and state.thorough:
                state.read_again()  # which keys it has seen is not known any more
            self._tables[name] = Captured(self.log, info, state, known, self._numeric_as_text)
        else:  # a connection was lost: what was in flight is read again
            captured.info, captured.types, captured.chunk = info, known, None
            captured.relation = None

    def _make_topic(self, info: catalog.TableInfo, state: TableState) -> None:
        if not state.key:
            raise errors.NoReplicaIdentity(
                f"table {info.schema}.{info.name} has no primary key", place=state.topic
            )
        fields = [
            pa.field(
                column.name,
                arrow_type(
                    column.type, column.modifier, column=column.name,
                    numeric_as_text=self._numeric_as_text,
                ),
            )
            for column in _streamed(info)
        ]  # fmt: skip
        reserved = (RESERVED[name] for name in META)
        fields += [pa.field(one.name, one.type, nullable=one.nullable) for one in reserved]
        self.log.create_topic(
            state.topic, pa.schema(fields), key=state.key, kind="changes", exist_ok=True
        )

    # -- groups -----------------------------------------------------------------------------

    def _take(self, group: Sequence[Transaction | Message], control: psycopg.Connection) -> None:
        """Append a group; where a table changes its columns, what comes before is an entry."""
        pending: list[Transaction | Message] = []
        for one in group:
            if isinstance(one, Transaction):
                changed = list(self._new_definitions(one))
                alone = bool(changed) or any(isinstance(c, Truncate) for c in one.changes)
                if alone:
                    self._append(pending)
                    pending = []
                for captured, relation in changed:
                    self._redefine(captured, relation, control)
                if alone:
                    self._append([one])
                    continue
            pending.append(one)
        self._append(pending)

    def _captured(self, relation: Relation) -> Captured | None:
        found = self._tables.get((relation.schema, relation.table))
        return None if found is None or found.state.status == STOPPED else found

    def _new_definitions(self, one: Transaction) -> Iterator[tuple[Captured, Relation]]:
        for change in one.changes:
            if isinstance(change, Rows):
                captured = self._captured(change.relation)
                if captured is not None and captured.relation is not change.relation:
                    captured.relation = change.relation
                    if not self._fits(captured, change.relation):
                        yield captured, change.relation

    def _fits(self, captured: Captured, relation: Relation) -> bool:
        """Whether a topic has the columns of a relation."""
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
        return set(own.names) == set(types) and all(
            own.field(n).type == t for n, t in types.items()
        )

    def _look(self, control: psycopg.Connection, stream: Stream, *, at_once: bool) -> None:
        """Look for tables that are new, and for columns that changed without a row that says so.

        What a table is now counts only once the stream has passed the place where it was seen:
        rows that are still to come may be older than the change.
        """
        now = time.monotonic()
        often = LOOK_SECONDS if self._unsettled() else self._heartbeat
        if not at_once and now - self._looked_at < often:
            return
        self._looked_at = now
        place = catalog.lsn(control)
        found = {(t.schema, t.name): t for t in catalog.tables(control, self.patterns)}
        if any(name not in self._tables for name in found):
            self._join(control, found)
        for name, captured in self._tables.items():
            if name not in found and captured.snapshotting:
                captured.state.status, captured.state.reason = STOPPED, "the table is gone"
        for name, info in found.items():
            captured = self._tables[name]
            relation = _as_relation(info)
            if captured.state.status == STOPPED or self._is_so(captured, info):
                captured.differs_at = None
            elif captured.differs_at is None:
                captured.differs_at = place
                _heartbeat(control)
            elif stream.received >= captured.differs_at:
                captured.differs_at, captured.info = None, info
                self._redefine(captured, relation, control)

    def _unsettled(self) -> bool:
        """Whether the topics are not yet what the tables are, wherever the stream is."""
        return self._snapshotting() or any(
            one.differs_at is not None for one in self._tables.values()
        )

    def _is_so(self, captured: Captured, info: catalog.TableInfo) -> bool:
        """Whether a topic has the columns of a table: those, not others of the same names."""
        numbers = {column.name: column.number for column in _streamed(info)}
        return numbers == captured.state.columns and self._fits(captured, _as_relation(info))

    def _redefine(
        self, captured: Captured, relation: Relation, control: psycopg.Connection
    ) -> None:
        """Give a topic the columns that its table has now."""
        assert self.state is not None
        lsn = self.state.lsn
        known = catalog.types(control)
        found = catalog.tables(control, [captured.name])
        for one in self._tables.values():
            one.types = known
        try:
            if found:
                captured.info = found[0]
                if self._is_so(captured, found[0]):
                    return  # the topic is ahead of the stream: what comes is read as far as it goes
            redefine(captured, relation, self._numeric_as_text, lambda: self._save(lsn))
        except errors.HeadraceError as error:
            captured.state.status, captured.state.reason = STOPPED, error.fact

    def _append(self, items: Sequence[Transaction | Message]) -> None:
        """One entry: the rows of all tables, and the resume point."""
        assert self.state is not None
        if not items:
            return
        group = Group(items)
        self._recent.extend(group.xid.tolist())
        counts = np.zeros(len(group.transactions), np.int64)
        parts: list[tuple[str, pa.RecordBatch, list[int]]] = []
        for name, of_table in group.tables.items():
            captured = self._tables.get(name)
            if captured is None or captured.state.status == STOPPED:
                continue
            try:
                rows, weight, of, op = captured.changes(of_table)
            except (errors.TypeNotCarried, errors.ValueNotCarried) as error:
                captured.state.status, captured.state.reason = STOPPED, error.fact
                continue
            if rows.num_rows:
                of_each = np.bincount(of, minlength=len(counts))
                counts += of_each
                batch = with_meta(rows, weight, op, group.lsn[of], group.xid[of], group.time[of])
                parts.append((captured.state.topic, batch, of_each.tolist()))
        with self._entry(max(self.state.lsn, group.end)) as entry:
            for topic, batch, boundaries in parts:
                entry.append(topic, batch, transactions=boundaries)
            if counts.any():
                entry.append(self._topic("_transactions", TRANSACTIONS), group.told(counts))
            if group.messages:
                said = [
                    {"prefix": one.prefix, "content": one.content, "lsn": one.lsn, "xid": xid}
                    for one, xid in group.messages
                ]
                entry.append(self._topic("_messages", MESSAGES), said)

    def _topic(self, name: str, schema: str) -> str:
        full = f"{self.name}.{name}"
        self.log.create_topic(full, schema, exist_ok=True)
        return full

    @contextlib.contextmanager
    def _entry(self, lsn: int) -> Iterator[Any]:
        """An entry that moves the resume point."""
        assert self.state is not None
        self.state.lsn = lsn
        with self.writer.transaction(state=self.state.to_json()) as entry:
            yield entry
        self._saved_at = time.monotonic()

    def _save(self, lsn: int) -> None:
        with self._entry(lsn):
            pass

    def _save_if_due(self, stream: Stream) -> None:
        """On a quiet database the resume point moves without data."""
        assert self.state is not None
        due = time.monotonic() - self._saved_at >= self._heartbeat
        if due and stream.received > self.state.lsn and self._held is None:
            self._save(stream.received)

    # -- snapshots --------------------------------------------------------------------------

    def _snapshotting(self) -> bool:
        return any(one.snapshotting for one in self._tables.values())

    def _snapshot(self, control: psycopg.Connection, stream: Stream) -> None:
        """Publish a chunk that the stream has passed; read the next one."""
        for captured in self._tables.values():
            if not captured.snapshotting:
                continue
            if captured.chunk is not None:
                if stream.received < captured.chunk.lsn:
                    continue
                self._publish(captured)
            if captured.state.status == SNAPSHOTTING and captured.differs_at is None:
                self._read(captured, control)

    def _read(self, captured: Captured, control: psycopg.Connection) -> None:
        state = captured.state
        keys = list(state.pending) if state.read_through else None
        columns = self._columns(captured)
        try:
            chunk = read_chunk(
                control, captured.info, columns, state.key,
                after=state.after, only=keys, limit=self._chunk_rows,
            )  # fmt: skip
        except (psycopg.errors.UndefinedColumn, psycopg.errors.UndefinedTable):
            return  # the table has changed: `_look` sees it
        sees = chunk.visible.sees
        told = {one.xid for one in captured.touched}
        if (
            chunk.visible.xmin < state.fence
            or any(xid not in told and not sees(xid) for xid in self._recent)
            or not all(map(sees, captured.emptied))
        ):
            return  # committed and streamed, and not yet seen by others: read again
        captured.chunk, captured.chunk_keys = chunk, keys
        _heartbeat(control)

    def _columns(self, captured: Captured) -> list[str]:
        own = set(captured.own.names)
        return [column.name for column in _streamed(captured.info) if column.name in own]

    def _publish(self, captured: Captured) -> None:
        assert self.state is not None
        state, chunk = captured.state, captured.chunk
        assert chunk is not None
        try:
            rows, weight = captured.publish(chunk, self._columns(captured))
        except (errors.TypeNotCarried, errors.ValueNotCarried) as error:
            state.status, state.reason, captured.chunk = STOPPED, error.fact, None
            self._save(self.state.lsn)
            return
        state.rows += chunk.rows
        if captured.chunk_keys is not None:
            captured.settle_pending()
        elif chunk.last is None:
            state.read_through = True
        else:
            state.after = chunk.last
        if state.read_through and not state.pending:
            gone = captured.finished()
            rows = pa.concat_batches([rows, gone])
            weight = np.concatenate([weight, np.full(gone.num_rows, -1)])
        captured.chunk = None
        op = ["r"] * rows.num_rows
        lsn = np.full(rows.num_rows, chunk.lsn)
        batch = with_meta(rows, weight, op, lsn, None, None)
        with self._entry(self.state.lsn) as entry:
            if batch.num_rows:
                entry.append(state.topic, batch)
            entry.append(self._topic("_snapshots", CHUNKS), [_proof(captured, chunk, rows)])
        if self._report is not None:
            seconds = time.monotonic() - self._started
            self._report(Progress(captured.name, state.rows, captured.info.rows, seconds))

    def snapshot(self, table: str) -> None:
        """Read a table anew, from its beginning, while the capture goes on.

        What differs is put right; rows that the database does not have go in the end.
        """
        assert self.state is not None
        for captured in self._tables.values():
            if captured.name == table and captured.state.key:
                captured.state.read_again()
                captured.chunk, captured.touched, captured.emptied = None, [], []
                captured.seen = []
                self._save(self.state.lsn)


def _as_relation(info: catalog.TableInfo) -> Relation:
    """A table as the stream would describe it now."""
    columns = tuple(
        Column(column.name, column.type.oid, column.modifier, column.name in info.identity)
        for column in _streamed(info)
    )
    return Relation(info.oid, info.schema, info.name, info.replica_identity, columns)


def _split(name: str) -> tuple[str, str]:
    schema, _, table = name.partition(".")
    return schema, table


def _streamed(info: catalog.TableInfo) -> list[catalog.ColumnInfo]:
    """The columns that the stream has."""
    return [column for column in info.columns if not column.generated]


def _heartbeat(control: psycopg.Connection) -> None:
    """Make the stream move on, on a quiet database too."""
    control.execute("SELECT pg_logical_emit_message(false, 'headrace', '')")


def _proof(captured: Captured, chunk: Any, rows: pa.RecordBatch) -> dict[str, Any]:
    """What a chunk was, to be held against the database later."""
    found = hash64(rows.columns, 0) if rows.num_rows else np.zeros(0, np.uint64)
    return {
        "table": captured.name,
        "lsn": chunk.lsn,
        "rows": chunk.rows,
        "published": rows.num_rows,
        "hash": int(np.bitwise_xor.reduce(found, initial=0).view(np.int64)),
        "last": None if chunk.last is None else "\t".join(chunk.last),
    }
