"""The embedded log: a folder that any number of processes open at once. No daemon."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace import errors
from headrace.interfaces import KeyedTable, Part
from headrace.log.embedded import holds
from headrace.log.embedded import live as shared
from headrace.log.embedded.checkpoint import unsealed
from headrace.log.embedded.drafting import Drafter
from headrace.log.embedded.format import OFFSET_BITS
from headrace.log.embedded.housekeeping import Housekeeper
from headrace.log.embedded.journal import Journal, Taken
from headrace.log.embedded.keeper import Keeper
from headrace.log.embedded.packing import HeadersOfRows, Packer
from headrace.log.embedded.pieces import Pieces, chunked
from headrace.log.embedded.places import Start
from headrace.log.embedded.reader import Reading
from headrace.log.embedded.recovery import open_journal
from headrace.log.embedded.restored import Histories, histories
from headrace.log.embedded.straight import Straight
from headrace.log.embedded.system import EVERYBODY, OsSystem, System
from headrace.log.groups import admin, flow
from headrace.log.groups.admin import GroupFacts, Move
from headrace.log.groups.consumer import Consumer, options_of
from headrace.log.groups.offsets import Place
from headrace.log.producer import Producer
from headrace.log.transaction import Transaction
from headrace.log.writer import Writer
from headrace.model.evolution import evolve
from headrace.model.fold import OWN_COUNTERS, ControlState, check_counters, is_name, topic_counter
from headrace.model.records import Piece, Receipt
from headrace.model.sealed import Trim
from headrace.model.topic import Topic, define, same_definition
from headrace.settings import DURABILITIES, LogSettings, seconds_of, several

if TYPE_CHECKING:
    from headrace.log.embedded.backup import Backup

UNSYNCED = (errors.LogPoisoned, errors.LockTimeout, errors.LogClosed, errors.LogGone)
"""What may end a sync: the entry is written, and may be on the disk or not."""
TOPICS = f"{OWN_COUNTERS}topics"
_RecordBatch = pa.RecordBatch


class EmbeddedLog:
    """A log in a folder. Threads may share a handle; a forked child gets one of its own."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: LogSettings | None = None,
        *,
        create: bool = True,
        system: System | None = None,
    ) -> None:
        """Open the log in `path`, making it if it is not there (unless `create` is False)."""
        self.path = os.path.abspath(os.fspath(path)) if system is None else os.fspath(path)
        self.settings = settings or LogSettings()
        self._system = system or OsSystem()
        self._durability = self.settings.durability
        self._packers: dict[str, Packer] = {}
        self._straight: dict[str, Straight] = {}
        self._tables: dict[str, KeyedTable] = {}
        self._newest_file = 0
        self._warned = False
        self._closed = False
        self._reopening = threading.Lock()
        self._journal: Journal | None = None
        self._open(create=create)
        _handles.add(self)

    def _open(self, *, create: bool) -> Journal:
        journal = open_journal(self._system, self.path, self.settings, create=create)
        self.pieces = Pieces(self._system, self.path, journal.log_id)
        self._drafter = Drafter(self._system, self.settings, self.pieces, self._packer)
        self._housekeeper = Housekeeper(journal, self.settings)
        self._finalizer = weakref.finalize(self, _close_forgotten, journal, self._housekeeper)
        self._journal = journal
        return journal

    @property
    def journal(self) -> Journal:
        """The open journal; in a forked child, one of its own."""
        journal = self._journal
        if journal is not None:
            return journal
        with self._reopening:
            if self._closed:
                raise errors.LogClosed("the log is closed", place=self.path)
            return self._journal or self._open(create=False)

    def _forked(self) -> None:
        """In the child: let go of the parent's locks, which both would hold; re-open on use."""
        journal, self._journal = self._journal, None
        self._straight = {}
        self._reopening = threading.Lock()
        if journal is not None:
            self._finalizer.detach()
            self.pieces.abandon()
            journal.abandon()

    def close(self) -> None:
        """Mark the end as synced and let go; readings of this handle end."""
        if self._closed:
            return
        self._closed = True
        journal, self._journal = self._journal, None
        self._straight = {}
        if journal is not None:
            journal.sync_lock.signal(EVERYBODY)
            self._finalizer.detach()
            try:
                _close(journal, self._housekeeper)
            finally:
                self.pieces.close()
            del self._housekeeper, self._drafter  # they hold the maps of the journal

    def __enter__(self) -> EmbeddedLog:
        """For `with`."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """The folder."""
        return f"<headrace log {self.path}>"

    # -- topics -----------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        schema: str | pa.Schema,
        *,
        key: str | Sequence[str] | None = None,
        event_time: str | None = None,
        partitions: int = 1,
        kind: str = "events",
        exist_ok: bool = False,
    ) -> Topic:
        """Make a topic.

        `schema` is a Spark DDL string ("user bigint, url string"), a pyarrow schema, or "bytes",
        "json" or "text" for opaque values with an optional key. Rows with equal `key` go to one
        partition, for ever; each row has the columns of its key, which may be null.
        `kind="changes"` adds `_weight` (+1 or -1, default +1) and `_op`.
        With `exist_ok` a topic that is already there, and was once made so, is given back.
        """
        asked = define(name, schema, key, event_time, partitions, kind)
        while True:
            control = self._control()
            found = control.topics.get(name)
            if found is not None:
                if exist_ok and same_definition(found, asked):
                    return found
                raise errors.TopicExists(
                    f"topic '{name}' exists" + ("" if not exist_ok else " and differs"),
                    place=self.path,
                )
            count, revision = len(control.by_id), control.revision(name)
            topic = replace(asked, id=count + 1, slot=control.slots, revision=revision + 1)
            if self._say(topic, {TOPICS: count}):
                return self.topic(name)

    def alter_topic(self, name: str, **changes: Any) -> Topic:
        """Give a topic its next schema version: `add=`, `widen=`, `retire=`, `rename=`, `retype=`.

        See `headrace.model.evolution.evolve`. A `retype` starts a new generation; nothing else
        changes what was written.
        """
        while True:
            topic = self.topic(name)
            if topic.value != "columns":
                raise errors.SchemaChangeRefused(
                    f"topic '{name}' holds {topic.value}, not columns", place=f"topic '{name}'"
                )
            schema = evolve(topic.schema, key=topic.key, event_time=topic.event_time, **changes)
            if self._say(topic.revised(schemas=(*topic.schemas, schema))):
                return self.topic(name)

    def set_topic(self, name: str, **settings: Any) -> Topic:
        """Change what is kept of a topic, from now on: see `headrace.model.policy.Policy`."""
        where = settings.get("archive")
        if isinstance(where, str) and where and "://" not in where:  # all processes find it there
            settings["archive"] = os.path.abspath(where)
        while True:
            topic = self.topic(name)
            policy = topic.policy.changed(settings, f"topic '{name}'")
            policy.check(topic.kind, topic.key, f"topic '{name}'")
            if policy == topic.policy or self._say(topic.revised(policy=policy)):
                return self.topic(name)

    def delete_topic(self, name: str) -> None:
        """Forget a topic with its rows; the name can be used again, for another topic."""
        while not self._say(self.topic(name).revised(deleted=True)):
            pass

    def _say(self, topic: Topic, expect: Mapping[str, int] | None = None) -> bool:
        """Append what is true of a topic now; False if somebody else said something meanwhile."""
        expected = {topic_counter(topic.name): topic.revision - 1, **(expect or {})}
        try:
            self.append_entry([], {"topics": [topic.to_json()]}, expect=expected, require={})
        except errors.Conflict:
            return False
        return True

    def topic(self, name: str) -> Topic:
        """A topic by its name."""
        topics = self._control().topics
        found = topics.get(name) if is_name(name) else None
        if found is None:
            near = errors.nearest(str(name), topics)
            raise errors.UnknownTopic(
                f"there is no topic '{name}'",
                place=self.path,
                fix=near or "make it with create_topic, or see `headrace topic ls`",
            )
        return found

    def topics(self) -> list[Topic]:
        """All topics, in the order they were made."""
        return sorted(self._control().topics.values(), key=lambda topic: topic.id)

    def _control(self) -> ControlState:
        journal = self.journal
        if journal.catalog != journal.live.catalog:
            journal.refresh_control()
        return journal.control

    def _packer(self, name: Any) -> Packer:
        journal = self.journal
        packer = self._packers.get(name) if isinstance(name, str) else None
        if packer is None or packer.topic is not journal.control.topics.get(name):
            packer = self._packers[name] = Packer(self.topic(name))
        return packer

    # -- append -----------------------------------------------------------------------------

    def append(
        self,
        topic: str,
        rows: Any,
        *,
        headers: HeadersOfRows | None = None,
        transactions: Sequence[int] | None = None,
        partition: int | None = None,
        sent_time: datetime | None = None,
        expect: Mapping[str, int] | None = None,
        require: Mapping[str, int] | None = None,
        durability: str | None = None,
    ) -> Receipt:
        """Append rows as one entry; return when it is on the disk.

        `rows`: dicts, Arrow, pandas, Polars, anything with `__arrow_c_stream__`, or staged pieces.
        `headers`: one mapping for all rows or one per row. `transactions`: the number of rows in
        each source transaction, when the entry holds several. `expect` and `require`: the entry is
        taken only if each counter named has the value named; `expect` moves it to value + 1.

        Ends with a receipt; or `Conflict`: a condition failed, nothing was taken; or `Unknown`: the
        outcome is not known (resolve it with `log.writer(name)`); or another error: not taken.
        """
        straight = self._straight.get(topic) if type(topic) is str else None
        if (
            straight is not None
            and type(rows) is _RecordBatch
            and headers is None
            and transactions is None
            and partition is None
            and sent_time is None
            and expect is None
            and require is None
        ):
            chosen = self._durability if durability is None else durability
            found = straight(rows, durable=chosen == "fsync" or self._checked(chosen) == "fsync")
            if isinstance(found, Receipt):
                return found
            if found is not None:
                self._make_durable(straight.journal, found, chosen)
                straight.newest = self._newest_file
                runs = ((topic, found.runs),)
                return Receipt(found.position, rows.num_rows, found.received, runs)
        for conditions in (expect, require):
            if conditions:
                check_counters(conditions)
        part = Part(topic, rows, headers, transactions, partition, sent_time)
        receipt = self.append_entry(
            [part], {}, expect=expect or {}, require=require or {}, durability=durability
        )
        self._straighten(topic)
        return receipt

    def _straighten(self, topic: str) -> None:
        """The way for the record batches that follow."""
        journal, packer = self._journal, self._packers.get(topic)
        catalog = (
            -1 if journal is None else journal.catalog
        )  # before the topics: no newer than they
        keeper, known = getattr(self, "_housekeeper", None), self._straight.get(topic)
        if journal is None or keeper is None or journal.short is None or packer is None:
            return
        if known is not None and known.catalog == catalog:
            return
        if packer.plain and packer.topic is journal.control.topics.get(topic):
            self._straight[topic] = Straight(journal, packer, keeper, catalog, self._newest_file)

    def stage(self, topic: str, rows: Any, *, headers: HeadersOfRows | None = None) -> Piece:
        """Write rows, synced, without publishing them: `append` and transactions take the piece.

        Rows that come as a RecordBatchReader are written as they come, in bounded memory. Each time
        an entry names a piece its rows are in the log once more: `expect` keeps it to once. A piece
        that nobody publishes is removed by the keeper, an hour after this handle was closed.
        """
        self._control()
        packer = self._packer(topic)
        sent = self._system.now_us()
        if isinstance(rows, pa.RecordBatchReader):
            batches: Any = (packer.batch(batch) for batch in rows)
        else:
            batches = [packer.batch(rows)]
        column = None
        if headers is not None:
            batches = list(batches)
            column = packer.headers(headers, sum(b.num_rows for b in batches))
        drafts = chunked(packer, batches, self.settings.chunk_bytes, sent, column)
        return self.pieces.write(packer.topic, drafts, sent)

    def unstage(self, pieces: Sequence[Piece]) -> None:
        """Remove pieces that no entry names, nor ever will."""
        self.pieces.drop(pieces)

    def transaction(self, *, durability: str | None = None) -> Transaction:
        """Rows for several topics, offsets, counters: one entry, all or nothing."""
        return Transaction(self, durability=durability)

    def writer(self, name: str) -> Writer:
        """Claim a writer's name: fences older holders, knows how many entries it has stored."""
        return Writer(self, name)

    def producer(self, topic: str, *, writer: str | None = None, **settings: Any) -> Producer:
        """A producer that gathers rows and small batches to large entries, in the background.

        With `writer`, the name of a writer: stored once however often retried, and fenced.
        """
        self.topic(topic)
        return Producer(self if writer is None else self.writer(writer), topic, **settings)

    def append_entry(
        self,
        parts: Sequence[Part],
        control: Mapping[str, Any],
        *,
        expect: Mapping[str, int],
        require: Mapping[str, int],
        durability: str | None = None,
        admitted: bool = False,
    ) -> Receipt:
        """Append one entry; `admitted`: its topics were asked whether they have room for it."""
        durability = self._checked(durability)
        while True:
            self._control()  # a column that somebody has just added is none that is wrong
            journal = self.journal
            catalog = journal.catalog
            for part in () if admitted else parts:
                if self._packer(part.topic).topic.limited:
                    return flow.append_entry(
                        self, parts, control, expect=expect, require=require, durability=durability
                    )
            drafter = getattr(self, "_drafter", None)
            if drafter is None:  # closed since the line above, which will say so
                continue
            draft = drafter.draft(parts, control, expect, require)
            if draft is None:
                return Receipt(self.position, 0, self._system.now_us())
            try:
                taken = journal.append(draft, catalog)
            except errors.Unknown:
                raise
            except errors.HeadraceError:
                for part in parts:
                    self.pieces.drop(part.staged)
                raise
            if taken is not None:  # else the topics changed meanwhile: look again
                break
        self._make_durable(journal, taken, durability)
        rows, runs = 0, []
        for section in draft.sections:
            rows += section.rows
            runs.append((section.topic.name, section.table()))
        return Receipt(taken.position, rows, taken.received, runs)

    def check_part(self, part: Part) -> None:
        """Take the rows of a part in, raising what is wrong with them; nothing is written."""
        self._control()
        packer = self._packer(part.topic)
        rows = part.rows if isinstance(part.rows, list) else [part.rows]
        if not (rows and isinstance(rows[0], Piece)) and packer.ready(part) is None:
            part.batch(packer.arrow, packer.batch)

    def taken_in(
        self, topic: str, rows: Any, headers: HeadersOfRows | None = None
    ) -> pa.RecordBatch:
        """The rows as one batch of the topic's schema; raises what is wrong with them."""
        self._control()
        packer = self._packer(topic)
        batch = packer.batch(rows)
        if headers is not None:
            packer.headers(headers, batch.num_rows)
        if packer.topic.limited:
            flow.refuse_too_many(packer.topic, batch.num_rows)
        return batch

    def _make_durable(self, journal: Journal, taken: Taken, durability: str) -> None:
        housekeeper = getattr(self, "_housekeeper", None)  # None: another thread has closed the log
        if durability == "fsync" and taken.synced != 0:
            try:
                journal.sync(taken.end, taken.position, taken.synced)
            except UNSYNCED as error:
                raise errors.Unknown(
                    f"entry {taken.position} was written, but not synced: {error.fact}",
                    place=self.path,
                    position=taken.position,
                ) from error
        if housekeeper is None or self._closed:
            return
        housekeeper.appended(durability)
        if taken.end >> OFFSET_BITS != self._newest_file:
            self._newest_file = taken.end >> OFFSET_BITS
            self._seal_if_over_budget(journal)

    def _seal_if_over_budget(self, journal: Journal) -> None:
        """Where nobody keeps the log, who begins a file and finds too many does a part of it."""
        keeper = self.keeper()
        try:
            journal.refresh_control()
            waiting = unsealed(journal.closed_files, journal.control)
            over = sum(file.end for file in waiting) > self.settings.journal_budget_bytes
            if not over or not keeper.take():
                return
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"nobody keeps the log {self.path}: appends seal it now and then, which takes"
                    " time; run `headrace log keep`, or `with log.keeper():` in a long-lived"
                    " process",
                    RuntimeWarning,
                    stacklevel=4,
                )
            keeper.turn()
        except (errors.HeadraceError, RuntimeWarning) as error:  # the entry was taken all the same
            keeper.complain(error)
        finally:
            keeper.release()

    def _checked(self, durability: str | None) -> str:
        if durability is None:
            return self.settings.durability
        if durability not in DURABILITIES:
            raise errors.BadSetting(
                f"durability {durability!r} is not one of {', '.join(DURABILITIES)}",
                place="durability",
            )
        return durability

    # -- read -------------------------------------------------------------------------------

    def read(
        self,
        topics: str | Sequence[str],
        start: Start = "earliest",
        *,
        after: int | None = None,
        through: int | None = None,
        columns: Sequence[str] | None = None,
        partitions: Sequence[int] | None = None,
        follow: bool = False,
        timeout: float | None = None,
        across_gaps: bool = False,
    ) -> Reading:
        """Batches in position order, never past the synced end.

        `start`: "earliest", "latest", a `datetime` (the first entry received then or later), an
        offset, or {partition: offset} (partitions not named are not read); or `after=P`: entries
        with positions above P. `through=P`: up to and with P, waiting for it if need be. With
        `follow` the reading goes on for ever, woken by each append; `timeout` seconds without news
        end it. `columns`: those only, retired ones may be named. Compaction leaves gaps between
        offsets: no batch has rows of a partition from both sides of one, unless `across_gaps`.

        Raises `OffsetsGone` when rows behind `after` or an offset are no longer held.
        """
        names = several(topics)
        if after is not None and start != "earliest":
            raise errors.BadPosition(
                "a reading begins at `start` or behind `after`, not at both",
                place=", ".join(names),
                why="one of them would be ignored",
                fix="give one of them",
            )
        found = [self.topic(name) for name in names]
        return Reading(
            self.journal,
            self.pieces,
            found,
            start=start,
            after=after,
            through=through,
            columns=None if columns is None else several(columns),
            partitions=None if partitions is None else several(partitions),
            follow=follow,
            timeout=seconds_of(timeout),
            across_gaps=across_gaps,
            closed=self._is_closed(),
        )

    def keeper(self) -> Keeper:
        """The role that seals, lets go, compacts and deletes; as a context, in the background."""
        return Keeper(self)

    def hold(
        self,
        name: str,
        position: int,
        *,
        topics: Sequence[str] | None = None,
        seconds: float = 3600.0,
    ) -> None:
        """Keep retention and compaction from passing a position, for so long; again moves it.

        `topics`: of these only. What was let go before comes not back: see `since_of`.
        """
        if not is_name(name):
            raise errors.BadSetting(f"{name!r} is not the name of a hold", place="hold")
        if type(position) is not int or position < 0:
            raise errors.BadSetting(f"{position!r} is not a position to hold", place="hold")
        if not 0 < seconds <= holds.SECONDS_MAX:
            raise errors.BadSetting(
                f"a hold of {seconds!r} seconds holds nothing, or for ever",
                place="hold",
                fix="more than 0 and at most a hundred years; release() ends it",
            )
        until = self._system.now_us() + int(seconds * 1_000_000)
        named = None if topics is None else [self.topic(topic).name for topic in topics]
        self._put(f"{holds.PREFIX}{name}", holds.hold_value(position, until, named))

    def hold_if_needed(self, name: str, position: int, topics: Sequence[str]) -> None:
        """As `hold`, for long, if the settings of one of these topics let anything go."""
        if holds.needed(self._control(), topics):
            self.hold(name, position, topics=topics, seconds=holds.LEASE_SECONDS)

    def release(self, name: str) -> None:
        """Let a hold go."""
        self._put(f"{holds.PREFIX}{name}", None)

    def holds(self) -> dict[str, dict[str, Any]]:
        """The holds that count now, by name: position, until (microseconds), topics."""
        return holds.holds_of(self._settled(), self._system.now_us())

    def _put(self, name: str, value: Any) -> None:
        self.append_entry([], {"values": {name: value}}, expect={}, require={})

    # -- groups -----------------------------------------------------------------------------

    def consumer(self, topics: str | Sequence[str], group: str, **options: Any) -> Consumer:
        """Read topics as a member of a group: each row goes to one member, and progress is kept.

        `topics`: names, or patterns ("shop.*": topics that are made later too). `start`: where a
        group without offsets begins, "earliest" (default), "latest" or a `datetime`. `columns`,
        `max_rows` of a batch; `timeout`: seconds without rows after which the iteration ends;
        `follow=False`: it ends when all is read. `lease_seconds` (30): a member that does not
        iterate or commit for so long is put out. `on_gone`: "raise" or "skip" what retention took.
        `flow="drop", flow_rows=N`: what is more than N rows behind in a partition is not read,
        but counted. `flow="backpressure", flow_rows=N, flow_seconds=S` (30): producers wait while
        the group would be more than N rows behind in a topic, and get `TopicFull` after S.
        """
        return Consumer(self, topics, group, options_of(options))

    def groups(self) -> list[str]:
        """The names of all groups."""
        return admin.names(self)

    def group(self, name: str) -> GroupFacts:
        """Members, partitions and lag of a group, as they are now."""
        return admin.facts(self, name)

    def reset_group(
        self,
        name: str,
        to: Place,
        *,
        topics: str | Sequence[str] | None = None,
        partitions: Sequence[int] | None = None,
        dry_run: bool = False,
        force: bool = False,
    ) -> list[Move]:
        """Move a group to "earliest", "latest", an offset, a `datetime` or "position:P".

        With `dry_run` only say what would move. Refused while members are alive, unless `force`
        puts them out: they join again, and go on where the group is then.
        """
        return admin.reset(
            self, name, to, topics=topics, partitions=partitions, dry_run=dry_run, force=force
        )

    def copy_group(self, source: str, name: str, to: Place | None = None) -> list[Move]:
        """Make a new group that starts where another is, or at another place of its topics."""
        return admin.copy(self, source, name, to)

    def release_group(self, name: str) -> None:
        """Let producers go on without a group whose flow is backpressure; its offsets stay."""
        admin.release(self, name)

    def delete_group(self, name: str, *, force: bool = False) -> None:
        """Forget a group and its offsets; see `reset_group` for `force`."""
        admin.delete(self, name, force=force)

    def dropped(self, topic: str) -> int:
        """How many rows of a topic whose flow is `drop` found no room, ever."""
        return flow.dropped(self, self.topic(topic))

    def table(self, topic: str) -> KeyedTable:
        """The topic read by key: `get(keys, at=P)` and `scan(at=P)`. See `headrace.tables`."""
        found = self._tables.get(topic)
        if found is None:  # tables are a layer above: found by name, not imported
            tables = importlib.import_module("headrace.tables.table")
            found = self._tables[topic] = tables.Table(self, self._system, topic)
        return found

    def _is_closed(self) -> Callable[[], bool]:
        reference = weakref.ref(self)

        def closed() -> bool:
            log = reference()
            return log is not None and log._closed

        return closed

    @property
    def position(self) -> int:
        """The newest position that readers see."""
        return self.journal.live.words[shared.SYNCED_POSITION]

    def since_of(self, topic: str) -> int:
        """The oldest position at which a topic is whole: retention and compaction move it."""
        return self._trim(self.topic(topic)).since

    def gone_of(self, topic: str) -> int:
        """The position up to which retention has taken all rows of a topic; 0: none."""
        return self._trim(self.topic(topic)).gone

    def _trim(self, topic: Topic) -> Trim:
        self.journal.refresh_control()
        found = self.journal.control.sealed.trim(topic.id)
        return found or Trim(0, 0, (0,) * topic.partitions)

    @property
    def history(self) -> str:
        """What its positions are of: the log's id, or another name since it was restored."""
        return self._histories().current

    def knows(self, history: str, position: int) -> bool:
        """Whether this position of that history is in the past of this log, and means the same."""
        return position <= self.position and self._histories().knows(history, position)

    def _histories(self) -> Histories:
        return histories(self._system, self.path, self.journal.log_id)

    def backup(self, to: str | os.PathLike[str]) -> Backup:
        """Copy the log at its newest position to a folder, while it goes on; see `hr.restore`."""
        found: Backup = importlib.import_module("headrace.log.embedded.backup").backup(self, to)
        return found

    def wait(self, position: int, timeout: float | None = None) -> int:
        """Return the newest visible position once it is at least `position`; else `WaitTimeout`."""
        journal = self.journal
        words, lock, timeout = journal.live.words, journal.sync_lock, seconds_of(timeout)
        deadline = None if timeout is None else self._system.monotonic() + timeout
        while True:
            seen = lock.seen()
            found = words[shared.SYNCED_POSITION]
            if found >= position:
                return found
            if journal.refused is not None:
                raise journal.refused.with_traceback(None)
            left = None if deadline is None else deadline - self._system.monotonic()
            if left is not None and left <= 0:
                raise errors.WaitTimeout(
                    f"position {position} not reached within {timeout:g} s; the log is at {found}",
                    place=self.path,
                    position=found,
                )
            if self._closed:
                raise errors.LogClosed("the log was closed while waiting", place=self.path)
            lock.wait_changed(seen, left)

    def starts(self, topic: str) -> list[int]:
        """The first offset of each partition that is still held."""
        return list(self._trim(self.topic(topic)).starts)

    def ends(self, topic: str) -> list[int]:
        """The next offset of each partition (entries not yet visible included)."""
        found = self.topic(topic)
        ends = self.journal.live.ends(found.slot + found.partitions)
        result: list[int] = ends[found.slot : found.slot + found.partitions].tolist()
        return result

    def counter(self, name: str) -> int:
        """The value of a counter; 0 if nobody moved it. The entry that moved it is on the disk."""
        if not is_name(name):
            raise errors.BadSetting(f"{name!r} is not the name of a counter", place="counter")
        journal = self.journal
        self._refuse_if_damaged()
        try:
            journal.append_lock.acquire(self.settings.lock_timeout_seconds)
            journal.catch_up()
            found = journal.live.get(name)
        finally:
            journal.append_lock.release()
        self._system.give_way()  # who asks again and again must not keep others from appending
        self.sync()
        return found

    def offsets(self, group: str) -> dict[str, dict[int, int]]:
        """What a group has committed: topic -> partition -> the next offset to read."""
        committed: dict[str, dict[int, int]] = self._settled().groups.get(group, {})
        return {topic: dict(offsets) for topic, offsets in committed.items()}

    def value(self, name: str) -> Any:
        """A named value that an entry set; None if there is none."""
        return self._settled().values.get(name)

    def values(self, prefix: str) -> dict[str, Any]:
        """All named values whose names start so."""
        found = self._settled().values
        return {name: value for name, value in found.items() if name.startswith(prefix)}

    def _settled(self) -> ControlState:
        """What the entries say, once they are on the disk: nothing is shown that may be gone."""
        self._refuse_if_damaged()
        self.journal.refresh_control()
        control = self.journal.control
        self.sync()
        return control

    def _refuse_if_damaged(self) -> None:
        """Where the newest entries cannot be read, nobody knows what they say."""
        journal = self.journal
        damaged = journal.live.words[shared.DAMAGED]
        if damaged:
            raise journal.files.damage(damaged)

    def sync(self) -> int:
        """Put everything appended so far on the disk; the position that is then visible."""
        journal = self.journal
        tail = journal.live.tail()
        journal.sync(tail.end, tail.position)
        return self.position

    def tick(self) -> None:
        """What the timer does after a quiet second: sync and mark."""
        self.journal.mark()


def _close(journal: Journal, keeper: Housekeeper) -> None:
    keeper.stop()
    try:
        words = journal.live.words
        sound = not words[shared.POISONED] and not words[shared.DAMAGED] and not journal.refused
        if sound and keeper.used:
            tail = journal.live.tail()
            journal.sync(tail.end, tail.position)
            unmarked = (errors.DiskFull, errors.ReadOnlyDisk, errors.LogGone)
            with contextlib.suppress(*unmarked):  # a mark says so sooner
                journal.mark()
    finally:
        journal.close()


def _close_forgotten(journal: Journal, keeper: Housekeeper) -> None:
    """Close what nobody closed. Nobody is there to be told, and the log does not need it."""
    with contextlib.suppress(errors.HeadraceError):
        _close(journal, keeper)


_handles: weakref.WeakSet[EmbeddedLog] = weakref.WeakSet()


def _after_fork() -> None:
    for log in list(_handles):
        log._forked()


os.register_at_fork(after_in_child=_after_fork)
