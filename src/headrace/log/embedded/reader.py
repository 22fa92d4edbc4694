"""Reading: whole entries in order, never past the synced end, woken by the next sync.

A reading walks the journal's records from an address. Small entries are gathered into a *window*
and handed out as one batch per topic; a large entry is handed out section by section, which is
chunk by chunk where it was staged. So memory is bounded by the window and one chunk, whatever the
log holds. Every batch of a window has the position of the window's last entry, and the last batch
of it is `last`.

Files in which no topic wanted has rows are skipped. Waiting is on the word that changes with every
sync; nothing polls.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
from pyarrow.ipc import read_record_batch

from headrace import errors
from headrace.log.embedded import gone as gone_rows
from headrace.log.embedded import live as shared
from headrace.log.embedded.checkpoint import FileRange
from headrace.log.embedded.files import JournalFiles
from headrace.log.embedded.format import (
    ENTRY,
    WITH_HEADERS,
    WITH_TRANSACTION,
    Record,
    Section,
    address_of,
    checksum,
    place_of,
)
from headrace.log.embedded.history import Bounds, Stream, merged
from headrace.log.embedded.journal import Journal
from headrace.log.embedded.locks import CrossLock
from headrace.log.embedded.pieces import Pieces
from headrace.log.embedded.places import Places, Start, is_whole
from headrace.log.embedded.shortcut import Compiled
from headrace.log.embedded.ways import Wanted, Way, Ways
from headrace.model.records import (
    HEADERS,
    HEADERS_COLUMN,
    TRANSACTION_COLUMN,
    Batch,
    Span,
    microseconds_of,
)
from headrace.model.sealed import Trim
from headrace.model.topic import Topic
from headrace.settings import LogSettings

_EVER = -(1 << 63)
ALONE_BYTES = 64 << 10
"""Rows of this size are a batch of their own: gathering is copying."""
SMALL_PART = 32


class Part(NamedTuple):
    """Rows of one section, decoded."""

    way: Way
    data: pa.RecordBatch
    bytes: int
    span: Span
    headers: pa.Array | None
    transaction: pa.Array | None


class Window:
    """Whole entries gathered for the next batches; bounded in rows and in memory kept."""

    def __init__(self, settings: LogSettings) -> None:
        """Empty."""
        self._settings = settings
        self._counted: object = None
        self._rows = self._bytes = 0
        self.parts: list[Part] = []
        self.versions: dict[int, int] = {}
        """topic id -> the schema version of its rows in this window."""
        self.position = 0
        """Of the last entry that is in it."""

    def add(self, position: int, data: pa.Buffer, parts: Iterable[Part | None]) -> None:
        """Add one entry, read from `data`."""
        self.position = position
        for part in parts:
            if part is None:
                continue
            self.parts.append(part)
            self.versions[part.way.wanted.topic.id] = part.way.target.version
            self._rows += part.span.rows
            self._bytes += part.bytes
            if data is not self._counted:  # it lives as long as the rows in it
                self._counted = data
                self._bytes += data.size

    def takes(self, found: list[tuple[Section, Way]]) -> bool:
        """Whether one more entry with these sections may be added."""
        settings = self._settings
        if self._rows >= settings.read_rows_max or self._bytes >= settings.read_bytes_max:
            return False
        for section, way in found:
            version = way.target.version
            if self.versions.get(section.topic, version) != version:
                return False
        return True


class Reading:
    """An iterator of batches; made by `EmbeddedLog.read`."""

    def __init__(
        self,
        journal: Journal,
        pieces: Pieces,
        topics: Sequence[Topic],
        *,
        start: Start,
        after: int | None,
        through: int | None,
        columns: Sequence[str] | None,
        partitions: Sequence[int] | None,
        follow: bool,
        timeout: float | None,
        across_gaps: bool,
        closed: Callable[[], bool],
    ) -> None:
        """Find the place to start; nothing is read yet."""
        self._across_gaps = across_gaps
        self._journal = journal
        self._files = journal.files
        self._pieces = pieces
        self._columns = [columns] if isinstance(columns, str) else columns
        self._through = through
        self._follow = follow or through is not None
        self._timeout = timeout
        self._closed = closed
        self._places = Places(journal)
        self._limit = self._places.limit
        chosen = frozenset(partitions) if partitions is not None else None
        for position in (after, through):
            if position is not None and not is_whole(position):
                raise self._places.bad(f"{position!r} is not a position")
        for topic in topics:
            self._places.check_partitions(topic, chosen or frozenset())
            for name in self._columns or ():
                if not any(name == c.name for schema in topic.schemas for c in schema.columns):
                    topic.schema.column(name)  # says what is wrong
        self._wanted = {
            topic.id: Wanted(topic, topic.schema.version, chosen, {}) for topic in topics
        }
        self._ways = Ways(journal, self._wanted, self._columns)
        self._skip_through = after if after is not None else 0
        self._received = _EVER
        self._passed = self._skip_through
        """All entries up to this position were read."""
        self._sealed = self._from_sealed(start, after)
        """Whether what comes next is read from sealed files."""
        self._cursor = self._place(start, after)
        self._previous: int | None = None
        self._done = False
        self._polling = False
        self._batches = self._run()

    def __iter__(self) -> Iterator[Batch]:
        """The batches to come."""
        return cast("Iterator[Batch]", self._batches)  # it gives None to `poll` only

    def __next__(self) -> Batch:
        """The next batch."""
        batch = next(self._batches)
        assert batch is not None
        return batch

    def poll(self) -> Batch | None:
        """The next batch of a following reading if it is there by now, else None.

        After None every entry that was visible before the call has been handed out.
        """
        self._polling = True
        try:
            return next(self._batches, None)
        finally:
            self._polling = False

    def close(self) -> None:
        """End the reading."""
        self._batches.close()

    def _from_sealed(self, start: Start, after: int | None) -> bool:
        """Whether what is to be read may begin in a sealed file."""
        through = self._journal.control.sealed.through
        if start == "latest" and after is None:
            self._passed = self._places.reached
            return False
        return through > (after or 0)

    def _place(self, start: Start, after: int | None) -> int:
        """The address in the journal; also of what comes behind the sealed files."""
        if after is not None:
            return self._places.after(after)
        if start == "earliest":
            return self._places.first()
        if start == "latest":
            return self._limit
        if isinstance(start, datetime):
            self._received = microseconds_of(start)
            return self._places.at(start)
        if isinstance(start, bool) or not isinstance(start, int | Mapping):
            raise self._places.bad(f"{start!r} is not a place to start")
        if len(self._wanted) != 1:
            raise self._places.bad("a start by offset needs one topic")
        (wanted,) = self._wanted.values()
        self._places.check_offsets(wanted.topic, start)
        if isinstance(start, int):
            chosen = wanted.partitions if wanted.partitions is not None else None
            wanted.offsets = dict.fromkeys(chosen or range(wanted.topic.partitions), start)
        else:
            wanted.offsets = dict(start)
            named, chosen = frozenset(start), wanted.partitions
            wanted.partitions = named if chosen is None else named & chosen
        if self._sealed and self._places.unsealed(wanted.topic, wanted.offsets):
            self._sealed = False  # not even the last sealed file is opened: it may be far away
            self._skip_through = self._passed = self._journal.control.sealed.through
        return self._places.of_offsets(wanted.topic, wanted.offsets)

    # -- what is sealed ---------------------------------------------------------------------

    def _read_sealed(self) -> Iterator[Batch]:
        """What the sealed files have; then the journal goes on behind them."""
        sealed = self._journal.control.sealed
        through = sealed.through if self._through is None else min(sealed.through, self._through)
        bounds = Bounds(self._skip_through, through, self._received)
        streams = []
        for wanted in self._wanted.values():
            trim = sealed.trim(wanted.topic.id)
            if trim is not None:
                self._refuse_if_gone(wanted, trim, self._passed)
            streams.append(Stream(self._journal, wanted, self._ways, bounds, self._refuse_if_gone))
        yield from merged(streams, across_gaps=self._across_gaps)
        self._skip_through = self._passed = max(self._skip_through, through)
        self._done = self._through is not None and through >= self._through
        self._sealed, self._previous = False, None
        if self._done:
            return
        places = Places(self._journal)
        if self._journal.control.sealed.through > sealed.through:
            self._sealed = True  # more was sealed meanwhile: the journal may not have it any more
        else:
            self._cursor = max(self._cursor, places.after(sealed.through))

    def _sealed_meanwhile(self) -> bool:
        """Whether what is missing in the journal is in sealed files by now."""
        self._journal.refresh_control()
        sealed = self._journal.control.sealed.through
        number, _ = place_of(self._cursor)
        left = number < min([f.number for f in self._closed_files()] + [place_of(self._limit)[0]])
        if sealed < self._passed or (sealed == self._passed and not left):
            return False  # `left`: all of it was read, and nobody names the file any more
        self._sealed, self._skip_through = True, self._passed
        return True

    def _refuse_if_gone(self, wanted: Wanted, trim: Trim, passed: int, since: int = 0) -> None:
        """Who has read up to here and missed something is told what; who begins misses nothing.

        `since`: what the topic was whole from when the reader began with what there was.
        """
        topic = wanted.topic
        if topic.kind == "changes" and 0 < passed < trim.since > since:
            raise errors.BadPosition(
                f"topic '{topic.name}' is whole from position {trim.since} on, not {passed}",
                place=f"topic '{topic.name}'",
                why="changes that cancelled each other before that are gone",
                fix="begin anew: read from the earliest, without what was read before",
                since=trim.since,
                upper=self._places.reached,
            )
        first, exact = wanted.next.tolist(), True
        if wanted.offsets:
            first = [max(n, wanted.offsets.get(p, 0)) for p, n in enumerate(first)]
        elif not 0 < passed < trim.gone:
            return
        else:
            known = gone_rows.of(self._journal, topic, trim)
            exact = known.after <= passed
            if exact:
                first = [max(pair) for pair in zip(first, known.offsets(passed), strict=True)]
        chosen = range(topic.partitions) if wanted.partitions is None else wanted.partitions
        gone = {p: [first[p], trim.starts[p] - 1] for p in chosen if first[p] < trim.starts[p]}
        if gone:
            unsure = f"; which of them were read up to position {passed} is not known any more"
            raise errors.OffsetsGone(
                f"{_told(gone)} of topic '{topic.name}' are gone{'' if exact else unsure}",
                place=f"topic '{topic.name}'",
                topic=topic.name,
                partitions=gone,
                exact=exact,
                since=trim.since,
            )

    # -- the loop ---------------------------------------------------------------------------

    def _run(self) -> Generator[Batch | None, None, None]:
        through, after = self._through, self._skip_through
        if through is not None and through <= after:
            return
        while not self._done:
            if self._sealed:
                yield from self._read_sealed()
                continue
            if through is not None and self._follow and self._places.reached >= through:
                self._follow = False  # it is all there
                self._limit = self._journal.live.words[shared.SYNCED]
            if self._follow:
                self._limit = self._journal.live.words[shared.SYNCED]
            if self._cursor >= self._limit:
                self._say_if_lost()
                if self._polling:
                    yield None
                    continue
                came = self._follow and self._wait()
                if not came:
                    self._say_if_short()
                    return
                if came is not True:
                    yield came
                continue
            try:
                end = self._end_of_file()
                if self._cursor >= end:
                    self._next_file()
                    continue
                yield from self._read_to(end)
            except errors.LogDamaged as damage:
                if not self._sealed_meanwhile():
                    raise self._with_way_on(damage) from None

    def _say_if_short(self) -> None:
        """A reading through a position that did not come within the timeout is not complete."""
        through = self._through
        if self._follow and through is not None and not self._closed():
            raise errors.WaitTimeout(
                f"position {through} not reached within {self._timeout:g} s;"
                f" the log is at {self._places.reached}",
                place=self._journal.folder,
                position=self._places.reached,
            )

    def _say_if_lost(self) -> None:
        """The end of a log whose newest part is gone is damage, not an end."""
        damaged = self._journal.live.words[shared.DAMAGED]
        if damaged and damaged >= self._limit:  # all words are 0 once the log is closed
            raise self._files.damage(damaged)

    def _with_way_on(self, damage: errors.LogDamaged) -> errors.LogDamaged:
        """Where nothing behind the damage is left in its file, the next file is the way on."""
        number, _ = place_of(self._cursor)
        through = next((f.through for f in self._closed_files() if f.number == number), None)
        if damage.details.get("resume_after") is not None or through is None:
            return damage
        damage.details["resume_after"] = through
        damage.fix = (
            f"the next file is intact: read on with after={through}; put this one back from a"
            " backup to get the rest"
        )
        return damage

    def _wait(self) -> bool | Batch:
        """Sleep until there is more; False when the timeout passed or the log was closed.

        What comes is given back at once where the short cut can read it.
        """
        lock, words = self._journal.sync_lock, self._journal.live.words
        if self._journal.refused is not None:
            raise self._journal.refused.with_traceback(None)
        deadline = None
        if self._timeout is not None:
            deadline = self._journal.system.monotonic() + self._timeout
        while True:
            seen = lock.seen()
            if self._closed():  # who closes says so first, and wakes then
                return False
            if words[shared.SYNCED] > self._cursor:
                return True
            left = None
            if deadline is not None:
                left = deadline - self._journal.system.monotonic()
                if left <= 0:
                    return False
            short = self._journal.short_at(self._cursor) if self._is_plain() else None
            if short is None:
                lock.wait_changed(seen, left)
                continue
            (wanted,) = self._wanted.values()
            limit = CrossLock.LOOK_UNASKED_SECONDS
            found = short.next(
                seen,
                self._cursor,
                self._previous or 0,
                wanted.topic.id,
                limit if left is None else min(left, limit),
            )
            if found is False:
                continue
            if deadline is not None:
                left = max(0.0, deadline - self._journal.system.monotonic())
            if found is not True:
                batch = self._next(short, wanted, limit if left is None else left, *found)
                if batch is not None:
                    return batch
            if (
                words[shared.SYNCED] <= self._cursor
            ):  # nothing for the short cut, and not for us yet
                lock.wait_changed(seen, left)

    def _is_plain(self) -> bool:
        """Whether it reads all rows of one topic, and knows what comes before the next record."""
        if self._previous is None or self._through is not None or len(self._wanted) != 1:
            return False
        (wanted,) = self._wanted.values()
        return not wanted.chooses and self._received == _EVER

    def _next(
        self,
        short: Compiled,
        wanted: Wanted,
        limit: float,
        visible: bool,
        position: int,
        received: int,
        sent: int,
        checksum: int,
        length: int,
        schema: int,
        rows: int,
        runs: bytes,
        body: bytes,
    ) -> Batch | None:
        """The batch of an entry that the short cut has read and verified, once it is synced."""
        if position <= self._skip_through:
            return None
        way = self._ways.of(wanted.topic.id, schema, 0)
        data = read_record_batch(pa.py_buffer(body), way.stored)
        if way.picked is not None:
            data = data.select(way.picked)
        elif way.upgrade is not None:
            data = way.upgrade(data)
        spans, version = [Span(rows, position, sent, received, runs)], way.target.version
        batch = Batch(
            wanted.topic,
            data,
            spans,
            position=position,
            last=True,
            schema_version=version,
            extra={},
        )
        end = self._cursor + length
        if not visible and not short.confirm(self._cursor, end, checksum, limit):
            return None  # somebody else will tell why, if it comes at all
        wanted.handed_out(spans)
        self._cursor = self._limit = end
        self._previous, self._passed = checksum, position
        return batch

    def _end_of_file(self) -> int:
        """The address at which the file under the cursor ends, as far as it may be read."""
        number, _ = place_of(self._cursor)
        if number == place_of(self._limit)[0]:
            return self._limit
        for closed in self._closed_files():
            if closed.number == number:
                return address_of(number, closed.end)
        raise self._files.damage(self._cursor, self._previous)

    def _closed_files(self) -> list[FileRange]:
        """Every file before the one with the limit: looked up anew when some are not known."""
        newest, _ = place_of(self._limit)
        files = self._journal.closed_files
        if not files or files[-1].number < newest - 1:
            self._journal.refresh_control()
            files = self._journal.closed_files
        return files

    def _sealed_beyond(self) -> bool:
        return self._journal.control.sealed.through > self._passed

    def _next_file(self) -> None:
        number, _ = place_of(self._cursor)
        newest, _ = place_of(self._limit)
        for closed in self._closed_files():
            if number < closed.number < newest:
                if closed.number > number + 1 and self._sealed_beyond():
                    break
                number = closed.number
                if any(topic in self._wanted for topic in closed.topics):
                    self._cursor = address_of(number, 0)
                    return
                self._previous = None  # skipped: the chain cannot be followed over it
        if newest != number + 1:
            raise self._files.damage(address_of(number + 1, 0))
        self._cursor = address_of(newest, 0)

    def _read_to(self, end: int) -> Iterator[Batch]:
        """Windows of whole entries from the cursor to `end`, in one file."""
        window = Window(self._journal.settings)
        walk = self._files.walk(self._cursor, end, previous=self._previous, bodies=True)
        try:
            for record, data, at in walk:
                if record.kind == ENTRY and record.position > self._skip_through:
                    if self._through is not None and record.position > self._through:
                        self._done = True
                        break
                    found = []
                    large = False
                    for section in record.sections():
                        if section.topic in self._wanted:
                            way = self._ways.of(section.topic, section.schema, section.flags)
                            found.append((section, way))
                            large = large or section.length >= ALONE_BYTES or section.piece > 0
                    if window.parts and (large or not window.takes(found)):
                        yield from self._window(window)
                        window = Window(self._journal.settings)
                    if large and len(found) == 1:
                        part = self._part(record, *found[0], data, at)
                        if part is not None:
                            yield self._batch([part], record.position, last=True)
                    elif large:
                        yield from self._chunks(record, found, data, at)
                    else:
                        parts = [self._part(record, s, way, data, at) for s, way in found]
                        window.add(record.position, data, parts)
                self._cursor, self._previous = record.address + record.length, record.checksum
                self._passed = record.position
        except errors.LogDamaged:
            yield from self._window(window)  # what is intact before the damage comes first
            raise
        yield from self._window(window)

    def _window(self, window: Window) -> list[Batch]:
        if not window.parts:
            return []
        if len(window.versions) == 1:
            return [self._batch(window.parts, window.position, last=True)]
        by_topic: dict[int, list[Part]] = {}
        for part in window.parts:
            by_topic.setdefault(part.way.wanted.topic.id, []).append(part)
        groups = list(by_topic.values())
        return [self._batch(group, window.position, last=group is groups[-1]) for group in groups]

    def _chunks(
        self, record: Record, found: list[tuple[Section, Way]], data: pa.Buffer, at: int
    ) -> Iterator[Batch]:
        """A large entry, section by section; only the last batch ends it."""
        waiting: Part | None = None
        for section, way in found:
            part = self._part(record, section, way, data, at)
            if part is None:
                continue
            if waiting is not None:
                yield self._batch([waiting], record.position, last=False)
            waiting = part
        if waiting is not None:
            yield self._batch([waiting], record.position, last=True)

    def _batch(self, parts: list[Part], position: int, *, last: bool) -> Batch:
        first = parts[0]
        extra: dict[str, pa.Array] = {}
        if len(parts) == 1:
            data, spans = first.data, [first.span]
            if first.headers is not None:
                extra[HEADERS_COLUMN] = first.headers
            if first.transaction is not None:
                extra[TRANSACTION_COLUMN] = first.transaction
        else:
            data = pa.concat_batches([part.data for part in parts])
            spans = [part.span for part in parts]
            if any(part.headers is not None for part in parts):
                extra[HEADERS_COLUMN] = pa.concat_arrays(
                    [
                        p.headers if p.headers is not None else pa.nulls(p.span.rows, HEADERS)
                        for p in parts
                    ]
                )
            if any(part.transaction is not None for part in parts):
                extra[TRANSACTION_COLUMN] = pa.concat_arrays(
                    [
                        p.transaction
                        if p.transaction is not None
                        else pa.array(np.zeros(p.span.rows, np.uint32))
                        for p in parts
                    ]
                )
        first.way.wanted.handed_out(spans)
        return Batch(
            first.way.wanted.topic,
            data,
            spans,
            position=position,
            last=last,
            schema_version=first.way.target.version,
            extra=extra,
        )

    # -- one section ------------------------------------------------------------------------

    def _part(
        self, record: Record, section: Section, way: Way, data: pa.Buffer, at: int
    ) -> Part | None:
        wanted = way.wanted
        table: Any = section.table
        keep = None
        if wanted.chooses:
            keep = wanted.kept(section.runs)
            if keep is not None and not keep.any():
                return None
        batch = read_record_batch(
            rows_of(self._files, self._pieces, record, section, data, at), way.stored
        )
        headers = transaction = None
        if section.flags:
            if section.flags & WITH_HEADERS:
                headers = batch.column(way.width)
            if section.flags & WITH_TRANSACTION:
                transaction = batch.column(batch.num_columns - 1)
        if way.picked is not None:
            batch = batch.select(way.picked)
        elif way.upgrade is not None:
            batch = way.upgrade(batch)
        rows = section.rows
        if keep is not None and not keep.all():
            mask = pa.array(keep)
            batch = batch.filter(mask)
            headers = headers.filter(mask) if headers is not None else None
            transaction = transaction.filter(mask) if transaction is not None else None
            table = _filtered(section.runs, keep)
            rows = batch.num_rows
        span = Span(rows, record.position, section.sent_time, record.received, table)
        return Part(way, batch, section.length, span, headers, transaction)


def rows_of(
    files: JournalFiles, pieces: Pieces, record: Record, section: Section, data: pa.Buffer, at: int
) -> pa.Buffer:
    """The rows of a section, verified; `data` has the record at `at`."""
    path = ""
    if section.piece == 0:
        start = at + record.body_offset + section.offset
        if section.length * SMALL_PART < len(data):  # do not keep the rest for these few
            buffer = pa.py_buffer(data[start : start + section.length].to_pybytes())
        else:
            buffer = data.slice(start, section.length)
    else:
        name = record.control()["pieces"][section.piece - 1]
        file = pieces.open(name, record.position)
        buffer = pa.py_buffer(file.pread(section.length, section.offset))
        file.close()
        path = pieces.path(name)
    found = checksum(buffer)
    if found != section.checksum:
        raise files.rows_damage(record, section, found, path)
    return buffer


def _told(gone: Mapping[int, list[int]]) -> str:
    return ", ".join(
        f"offsets {first} to {last} of partition {partition}"
        for partition, (first, last) in gone.items()
    )


def _filtered(runs: Any, keep: Any) -> Any:
    """Runs of the rows kept: each run loses rows at its front, or all of them."""
    starts = np.cumsum(runs["rows"], dtype=np.int64) - runs["rows"]
    counts = np.add.reduceat(keep, starts, dtype=np.int64).astype(np.uint32)
    kept = runs.copy()
    kept["base"] += (runs["rows"] - counts).astype(np.uint64)
    kept["rows"] = counts
    return kept[counts > 0]
