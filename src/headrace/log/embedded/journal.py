"""Appending: the journal under one lock, and the sync that many share.

**An append.** Everything that can be done before is done before: rows are serialized and summed up
outside the lock. Then, under the append lock:

1. *catch up*: look at the end that shared memory names. A whole record there means that a writer
   died after writing and before publishing: fold it. (So a stale shared memory can never make
   anybody write over a record.)
2. *decide*: the conditions against the counters, by the fold; and the pieces that it names are
   still there (`orphans`). A rejected entry leaves no trace.
3. *number*: position, offsets, the chain; write the record with one `pwritev` into space that the
   file already has.
4. *publish* in shared memory, the tail last.

**Durability.** Then, under the sync lock: whoever finds its end already synced returns; whoever
finds the lock free syncs for all who have written so far; the others sleep until that is done. So
N writers cost one `fdatasync`, whether they are threads or processes. Readers see nothing beyond
the synced end: what they saw, a power cut cannot take back.

**Crash argument.** Let the power fail
* before the record is whole on the disk: nobody was told, nobody saw it; recovery ends before it;
* after it is whole, before the sync was known: it may survive or not, its writer's outcome is
  unknown; recovery keeps it if every record before it survived (the chain), else cuts it off;
* after the sync: it survives, and so does everything before it in the same file, because one
  `fdatasync` covers the file, and in older files, because a file is synced before the next begins.
Let a process die at any instruction: its locks go with it; what it wrote is in the page cache, and
either is a whole record at the end (folded by the next) or is not (written over by the next).

**Space.** A file gets all its blocks when it is made, so a full disk is met at a roll and not in an
entry. They are "unwritten": the first sync after writing to one costs a commit of the filesystem's
own journal. So a small record that reaches unwritten space writes 256 KB of zeros behind itself,
and the syncs that follow find written space; a large one goes straight in. Zero-filling whole files
ahead of need was measured and rejected (decision 0005).

**A failed sync** may have dropped the pages it could not write, and a second one may say "fine".
So nobody trusts that file again: the log is poisoned for every process, by a word in shared memory
and a marker file, until somebody opens it anew: then what was not synced is copied from what can
still be read, record by record, into a new file (`recovery`).

**A roll**: the roll record, sync of the old file, counter run, the new file with its checkpoint
under another name, sync, rename, folder sync; only then does shared memory point into the new file.
So a numbered file always begins with a whole checkpoint. A roll holds both locks, append before
sync; nobody takes them in the other order.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from headrace import errors
from headrace.log.embedded import live as shared
from headrace.log.embedded import shortcut
from headrace.log.embedded.checkpoint import (
    Checkpoint,
    CounterRuns,
    FileRange,
    file_range,
    unsealed,
)
from headrace.log.embedded.files import JournalFiles
from headrace.log.embedded.format import (
    CHANGES_CONTROL,
    CHECKPOINT,
    HAS_CONDITIONS,
    HEADER_BYTES,
    MAGIC,
    MARK,
    OFFSET_BITS,
    OFFSET_MASK,
    ROLL,
    Draft,
    Record,
    SectionDraft,
    address_of,
    aligned,
    encode,
    place_of,
    readdressed,
)
from headrace.log.embedded.live import Live, Tail
from headrace.log.embedded.locks import CrossLock
from headrace.log.embedded.pieces import must_be_there
from headrace.log.embedded.system import EVERYBODY, File, System, named, os_errors
from headrace.log.embedded.witness import write_witness
from headrace.model import fold
from headrace.model.fold import ControlState, Offsets
from headrace.settings import LogSettings

MARKER = "poisoned"
UNNAMED = "next"
GROWTH = 4
ZERO_WINDOW = 256 << 10
_ZEROS = memoryview(bytes(ZERO_WINDOW))


class Taken(NamedTuple):
    """Where an entry went."""

    position: int
    received: int
    end: int
    runs: bytes = b""
    """All runs, numbered, if the short cut has numbered them."""
    synced: int = shortcut.LONG_WAY
    """What the short cut says of its sync: see `Journal.sync`."""


_new: Any = tuple.__new__  # what a NamedTuple does, without its signature
_LONG_WAY_ONLY = frozenset(("topics", "pieces"))


class Journal:
    """The journal of an open log: append, sync, mark, roll.

    Invariants: (1) records are written only at `live.tail().end`, only under the append lock, and
    only where no whole record stands; (2) `SYNCED` never exceeds what an `fdatasync` that returned
    covers, and never goes back; (3) all files but the newest are synced to their end.
    """

    def __init__(self, system: System, folder: str, log_id: bytes, settings: LogSettings) -> None:
        """Open the parts; `recovery.open_journal` makes the shared memory believable first."""
        self.system = system
        self.folder = folder
        self.log_id = log_id
        self.settings = settings
        self.files = JournalFiles(system, folder, log_id)
        self.counter_runs = CounterRuns(system, folder, log_id)
        self.live = Live(system, f"{folder}/live")
        self.append_lock = self._lock("append", shared.APPEND_WORD, shared.APPEND_HOLDER)
        self.sync_lock = self._lock("sync", shared.SYNC_WORD, shared.SYNC_HOLDER)
        self.control = ControlState()
        self.catalog = -1
        self.closed_files: list[FileRange] = []
        self.sealed_lately: frozenset[str] = frozenset()
        """The sealed files, not archived ones, that entries since the newest checkpoint added."""
        self._folded = 0
        self._control_guard = threading.Lock()
        self._newest: tuple[int, File, int] | None = None
        self._synced_through = 0
        self.refused: errors.HeadraceError | None = None
        """Why this handle only reads, if so (`frozen`)."""
        self.short = shortcut.opened(self)
        self._fitting = threading.Lock()
        self._fitted = (0, 0, 0)
        """What the short cut knows: journal file, length of the ends, table of counters."""
        self._syncs = 0

    @property
    def syncs(self) -> int:
        """How often this handle has synced."""
        return self._syncs + (self.short.syncs() if self.short is not None else 0)

    def _lock(self, name: str, word: int, holder: int) -> CrossLock:
        with os_errors("opening a lock", f"{self.folder}/locks/{name}"):
            file = self.system.open(f"{self.folder}/locks/{name}", create=True)
        return CrossLock(self.system, file, self.live.shared, name=name, word=word, holder=holder)

    @contextlib.contextmanager
    def appending(self) -> Iterator[Tail]:
        """Hold the append lock, with everything folded that is in the journal."""
        try:
            self.append_lock.acquire(self.settings.lock_timeout_seconds)
            self._refuse_unless_sound()
            yield self.catch_up()
        finally:
            self.append_lock.release()

    def _refuse_unless_sound(self) -> None:
        words = self.live.words
        if self.refused is not None:
            raise self.refused.with_traceback(None)
        if words[shared.POISONED]:
            raise errors.LogPoisoned(
                "a sync of this log failed; nothing is appended", place=self.folder
            )
        if words[shared.DAMAGED]:
            raise self.files.damage(words[shared.DAMAGED])

    # -- append -----------------------------------------------------------------------------

    def append(self, draft: Draft, catalog: int) -> Taken | None:
        """Write a sealed entry; None if the topics changed since `catalog`, so look again.

        Raises `Conflict` when a condition fails. What returns is in the operating system's hands;
        `sync` puts it on the disk.
        """
        live, lock, short = self.live, self.append_lock, self.short
        ordinary = self.refused is None and _LONG_WAY_ONLY.isdisjoint(draft.control)
        if short is not None and ordinary:
            conditions = b""
            if draft.flags & HAS_CONDITIONS:
                conditions = shortcut.conditions(draft.control)
            found = short.append(
                draft.section_bytes,
                draft.run_bytes,
                draft.control_bytes,
                conditions,
                draft.bodies,
                draft.flags,
                catalog,
            )
            taken = self.taken(found)
            if taken is not None:
                draft.place(taken.runs)
                return taken
        try:  # first: see `CrossLock.release`
            lock.acquire(self.settings.lock_timeout_seconds)
            self._refuse_unless_sound()
            tail = self.catch_up()
            if tail.catalog != catalog:
                return None
            expect: Mapping[str, int] = {}
            if draft.flags & HAS_CONDITIONS:
                expect = draft.control.get("expect", {})
                self._decide(expect, draft.control.get("require", {}))
                live.make_room(len(expect))
            if "pieces" in draft.control:
                must_be_there(self.system, self.folder, draft.control["pieces"])
            tail = self._make_room(tail, draft.length)
            ends = self._number(draft.sections)
            position = tail.position + 1
            received = max(self.system.now_us(), tail.received)
            checksum, zeroed = self._write(draft, tail, position, received)
            for section in draft.sections:
                section.advance(ends)
            if expect:
                fold.move(live, expect)
            control, catalog = tail.control, tail.catalog
            if draft.flags & CHANGES_CONTROL:
                control, catalog = tail.end, catalog + ("topics" in draft.control)
            end = tail.end + draft.length
            entries = tail.entries + 1
            live.publish(
                (end, position, checksum, control, catalog, received, entries, tail.marked, zeroed)
            )
            if short is not None:
                self._fit(short, end)
            return Taken(position, received, end)
        finally:
            lock.release()

    def taken(self, found: tuple[Any, ...] | int | None) -> Taken | None:
        """What the short cut says of an entry; raises if it could not be written."""
        if not isinstance(found, int):
            return found if found is None else _new(Taken, found)
        error = OSError(abs(found), os.strerror(abs(found)))
        if found > 0:
            raise named(error, "writing an entry", self.files.folder) from error
        self._poison()
        raise self._unknown() from error

    def _fit(self, short: shortcut.Compiled, end: int) -> None:
        """Tell the short cut what it needs to know to go on from `end` (append lock held).

        The entry before `end` is taken: what fails in here is tried again behind the next one.
        """
        with contextlib.suppress(OSError, MemoryError, errors.HeadraceError):
            number, file, size = self._file_of(end)
            ends, table = self.live.end_words(1), self.live.current_table()
            fitted = (number, len(ends), self.live.words[shared.COUNTERS_NUMBER])
            with self._fitting:
                if fitted != self._fitted:
                    short.fit(self._again(file), number, size, ends, table, fitted[2])
                    self._fitted = fitted

    def short_at(self, address: int) -> shortcut.Compiled | None:
        """The short cut, for a reader that waits at `address`; None if there is none."""
        short, number = self.short, address >> OFFSET_BITS
        if short is None or self.refused is not None or self._fitted[0] > number:
            return None
        if self._fitted[0] != number:
            file, size = self.files.file(number)
            with self._fitting, contextlib.suppress(OSError, MemoryError):
                if self._fitted[0] < number:  # else an append was here meanwhile
                    short.fit(self._again(file), number, size, None, None, 0)
                    self._fitted = (number, 0, 0)
        return short

    def _again(self, file: File) -> File:
        """For the short cut alone: threads may be in there when the log closes its own."""
        again = file.again()
        again.read_nothing_ahead()  # see `_file_of`
        return again

    def _unknown(self) -> errors.Unknown:
        return errors.Unknown(
            "the entry was being written when the disk failed", place=self.files.folder
        )

    def _number(self, sections: Sequence[SectionDraft]) -> Offsets | memoryview:
        """Give the rows their offsets; the ends, which move only once the record is written."""
        if len(sections) == 1:
            words = self.live.end_words(sections[0].slot_end)
            sections[0].number(words)
            return words
        last = max([section.slot_end for section in sections], default=0)
        if len({section.topic.id for section in sections}) == len(sections):
            words = self.live.end_words(last)
            for section in sections:
                section.number(words)
            return words
        ends = self.live.ends(last)
        after = ends.copy()
        for section in sections:
            section.number(after)
            section.advance(after)  # a topic may come more than once
        return ends

    def _decide(self, expect: Mapping[str, int], require: Mapping[str, int]) -> None:
        rejection = fold.verdict(self.live, expect, require)
        if rejection is not None:
            raise errors.Conflict(
                f"counter '{rejection.name}' is {rejection.found}, not {rejection.expected}",
                place=self.folder,
                kind=rejection.kind,
                counter=rejection.name,
                expected=rejection.expected,
                found=rejection.found,
            )

    def _write(self, draft: Draft, tail: Tail, position: int, received: int) -> tuple[int, int]:
        """Write one record at the end; its checksum, and how far the file is written now.

        Nothing is published here. A small record that reaches space never written takes a window
        of zeros with it: the syncs of those that follow then write data and no metadata.
        """
        buffers, checksum = encode(
            draft,
            log_id=self.log_id,
            address=tail.end,
            position=position,
            previous=tail.checksum,
            synced=self.live.words[shared.SYNCED],
            previous_control=tail.control,
            received=received,
        )
        number, file, size = self._file_of(tail.end)
        offset = tail.end & OFFSET_MASK
        end = tail.end + draft.length
        zeroed = tail.zeroed
        if end > zeroed:
            zeroed = end
            if draft.length < ZERO_WINDOW // 2:
                zeroed = min(tail.end + ZERO_WINDOW, address_of(number, size))
                buffers.append(_ZEROS[: zeroed - end])
        try:
            file.pwritev(buffers, offset)
        except OSError as error:
            if error.errno == errno.EBADF:  # open for reading only: another user has made it
                refused = OSError(errno.EACCES, os.strerror(errno.EACCES))
                raise named(refused, "writing an entry", file.path) from error
            # A part may be there, and could look whole but for its padding: make it none at all.
            try:
                file.pwritev([bytes(8)], offset)
            except OSError:
                self._poison()
                raise self._unknown() from error
            raise named(error, "writing an entry", file.path) from error
        return checksum, zeroed

    def catch_up(self) -> Tail:
        """Fold what a dead writer left at the end (append lock held); the tail after it."""
        tail = self.live.tail()
        if self._file_of(tail.end)[1].pread(8, tail.end & OFFSET_MASK) != MAGIC or self.refused:
            return tail
        while True:
            record = self.files.whole(tail.end, tail.checksum)
            if record is None:
                return tail
            if record.kind == ROLL:
                tail = self._finish_roll(tail, record)
            else:
                tail = self.fold(record, tail)

    def fold(self, record: Record, tail: Tail) -> Tail:
        """Take one record into shared memory; absolute, so twice is once."""
        for section in record.sections():
            ends = self.live.ends(section.slot + int(section.runs["partition"].max()) + 1)
            fold.advance(ends, section.runs, section.slot)
        topics_changed = False
        if record.flags:
            control = record.control()
            fold.move(self.live, control.get("expect", {}))
            topics_changed = "topics" in control
        tail = Tail(
            end=record.end,
            position=record.position,
            checksum=record.checksum,
            control=record.address if record.flags & CHANGES_CONTROL else tail.control,
            catalog=tail.catalog + topics_changed,
            received=record.received,
            entries=tail.entries + 1,
            marked=record.end if record.kind == MARK else tail.marked,
            zeroed=max(record.end, tail.zeroed),
        )
        self.live.publish(tail)
        return tail

    # -- sync -------------------------------------------------------------------------------

    def sync(self, end: int, position: int = 0, said: int = shortcut.LONG_WAY) -> None:
        """Return when everything below `end` is on the disk; share the sync with all who wait.

        And when everybody sees `position`: whoever synced for us says so a moment later.
        `said`: what the short cut has said already.
        """
        short = self.short
        if said == shortcut.LONG_WAY and short is not None and self.refused is None:
            said = short.sync(end, position)
        if said == 0:
            return
        if said > 0:
            self._poison()
            raise self._unsynced(OSError(said, os.strerror(said)), self.files.folder)
        if said == shortcut.NOT_IN_PLACE:
            self._refuse_if_gone()
        words, lock = self.live.words, self.sync_lock
        timeout, deadline = self.settings.lock_timeout_seconds, 0.0
        while words[shared.SYNCED] < end or words[shared.SYNCED_POSITION] < position:
            seen = lock.seen()
            if words[shared.POISONED]:
                raise errors.LogPoisoned("a sync of this log failed", place=self.folder)
            try:
                free = lock.try_acquire()
                if free and (
                    words[shared.SYNCED] < end or words[shared.SYNCED_POSITION] < position
                ):
                    tail = self.live.tail()
                    if tail.position > self._synced_through + 1:  # others append, too: who
                        self.system.give_way()  # was just woken does now, and shares this
                        tail = self.live.tail()
                    self._sync_to(tail)
                    self._synced_through = tail.position
            finally:
                lock.release(EVERYBODY)
            if not free:
                deadline = deadline or self.system.monotonic() + timeout
                if self.system.monotonic() >= deadline:
                    raise lock.timed_out(timeout)
                lock.wait_changed(seen, CrossLock.LOOK_AGAIN_SECONDS)

    def _sync_to(self, tail: Tail) -> None:
        """Sync the newest file, then say so (sync lock held)."""
        if self.live.words[shared.POISONED]:
            raise errors.LogPoisoned("a sync of this log failed", place=self.folder)
        _, file, _ = self._file_of(tail.end)
        try:
            file.fdatasync()
        except OSError as error:
            self._poison()
            raise self._unsynced(error, file.path) from error
        self._refuse_if_gone()
        self._syncs += 1
        self.publish_synced(tail)

    def _unsynced(self, error: OSError, path: str) -> errors.LogPoisoned:
        return errors.LogPoisoned(f"syncing the journal: {error.strerror or error}", place=path)

    def _refuse_if_gone(self) -> None:
        try:
            self.live.check_in_place()
        except errors.LogGone as gone:  # what was synced is in files that nobody will find
            self.refused = gone
            raise

    def publish_synced(self, tail: Tail) -> None:
        """Move the synced end, which readers and waiters see (sync lock held)."""
        self.live.words[shared.SYNCED] = tail.end
        self.live.words[shared.SYNCED_POSITION] = tail.position

    def _poison(self) -> None:
        self.live.words[shared.POISONED] = 1
        with contextlib.suppress(OSError):  # the word is enough while the machine is up
            self.system.create(f"{self.folder}/{MARKER}", 0).close()
            self.system.fsync_dir(self.folder)
        self.sync_lock.signal(EVERYBODY)

    def mark(self) -> None:
        """Write a synced mark, unless the last record is one: all before it is on the disk."""
        tail = self.live.tail()
        if tail.marked == tail.end:
            self.sync(tail.end)
            return
        with self.appending() as found:
            tail = found
            if tail.marked == tail.end:
                end = tail.end
            else:
                self.sync(tail.end)  # a mark claims that all before it is on the disk
                draft = Draft(kind=MARK).seal()
                tail = self._make_room(tail, draft.length)
                checksum, zeroed = self._write(draft, tail, tail.position, tail.received)
                end = tail.end + draft.length
                self.live.publish(
                    tail._replace(
                        end=end,
                        checksum=checksum,
                        entries=tail.entries + 1,
                        marked=end,
                        zeroed=zeroed,
                    )
                )
        self.sync(end)
        write_witness(self.system, self.folder, self.log_id, end)

    # -- files ------------------------------------------------------------------------------

    def _file_of(self, address: int) -> tuple[int, File, int]:
        """Number, file and size of the journal file at `address`: the newest, as a rule.

        Appends have a descriptor of their own. They look at the end before they write, which the
        kernel takes for reading in order: through the readers' descriptor it would fill the space
        behind the end with pages of zeros, megabytes at a time, in the midst of an append.
        """
        number = address >> OFFSET_BITS
        newest = self._newest
        if newest is None or newest[0] != number:
            known, size = self.files.file(number)
            with os_errors("opening a journal file", known.path):
                file = self.system.open(known.path)
            file.read_nothing_ahead()
            newest = self._newest = (number, file, size)
        return newest

    def _make_room(self, tail: Tail, length: int) -> Tail:
        """Roll if the newest file has no room for a record of `length` and a roll record."""
        _, _, size = self._file_of(tail.end)
        full = (tail.end & OFFSET_MASK) + length + ROLL_BYTES > size
        if not full and tail.entries < self.settings.journal_entries_max:
            return tail
        return self._roll(tail, length)

    def _roll(self, tail: Tail, length: int = 0) -> Tail:
        """Go on in a new file, with room for a record of `length`."""
        draft = Draft(kind=ROLL).seal()
        checksum, _ = self._write(draft, tail, tail.position, tail.received)
        record = self.files.record(tail.end)
        assert record is not None
        assert record.checksum == checksum
        return self._start_file(tail, record, room=length)

    def close_file(self) -> None:
        """Begin a new file, unless the newest has no entry yet: what is in it can be sealed."""
        with self.appending() as tail:
            number, _, _ = self._file_of(tail.end)
            first = self.files.record(address_of(number, 0))
            if first is None:
                raise self.files.damage(address_of(number, 0))
            if first.position < tail.position:
                self._roll(tail)

    def _finish_roll(self, tail: Tail, roll: Record) -> Tail:
        """Go on from a roll record that a dead writer left, or that shared memory missed."""
        number = place_of(roll.address)[0] + 1
        if number not in self.files.numbers():
            return self._start_file(tail, roll)
        first = self.files.whole(address_of(number, 0), roll.checksum)
        if first is None:
            raise self.files.damage(address_of(number, 0), roll.checksum)
        with os_errors("syncing the journal folder", self.files.folder):
            self.system.fsync_dir(self.files.folder)  # the dead writer may not have come so far
        rolled = tail._replace(end=roll.end, checksum=roll.checksum, entries=0)
        return self.fold(first, rolled)

    def _start_file(self, tail: Tail, roll: Record, room: int = 0) -> Tail:
        """Finish a roll whose roll record is written: begin the next file (append lock held)."""
        number, _ = place_of(roll.address)
        try:
            self.sync_lock.acquire(self.settings.lock_timeout_seconds)
            rolled = tail._replace(end=roll.end, checksum=roll.checksum)
            self._sync_to(rolled)
            with os_errors("starting a journal file", self.files.folder):
                tail = self.begin_file(
                    number + 1,
                    rolled,
                    self._checkpoint_after(number, roll.end, tail),
                    size=self._next_size(number),
                    room=room,
                )
            self.live.publish(tail)
            self.publish_synced(tail)
        finally:
            self.sync_lock.release(EVERYBODY)
        return tail

    def _next_size(self, number: int) -> int:
        _, size = self.files.file(number)
        return min(size * GROWTH, self.settings.journal_bytes_max)

    def _checkpoint_after(self, number: int, end: int, tail: Tail) -> Checkpoint:
        """The state at the end of file `number`, from shared memory and its own checkpoint."""
        first = self.files.record(address_of(number, 0))
        if first is None:
            raise self.files.damage(address_of(number, 0))
        before = Checkpoint.from_json(first.control())
        self.refresh_control()
        slots = self.control.slots
        ends = self.live.ends(slots)[:slots].tolist()
        return Checkpoint(
            control=self.control,
            ends=ends,
            counters=self.counter_runs.write(self.live, before.counters, number),
            files=[
                *unsealed(before.files, self.control),
                file_range(number, end, first, tail, before, ends, self.control),
            ],
            catalog=tail.catalog,
        )

    def begin_file(
        self,
        number: int,
        tail: Tail,
        checkpoint: Checkpoint,
        *,
        size: int,
        room: int = 0,
        carried: Sequence[bytes] = (),
    ) -> Tail:
        """Make file `number`: this checkpoint, then copies of the records `carried`, synced.

        It gets `size` bytes, or more if these and a record of `room` bytes need it. It appears
        under its name whole or not at all. Returns the tail behind it (both locks held).
        """
        draft = Draft(kind=CHECKPOINT, control=checkpoint.to_json(), flags=CHANGES_CONTROL).seal()
        need = draft.length + sum(len(record) for record in carried) + room + 2 * ROLL_BYTES
        file = self.system.create(f"{self.files.folder}/{UNNAMED}", max(size, aligned(need)))
        address = address_of(number, 0)
        buffers, checksum = encode(
            draft,
            log_id=self.log_id,
            address=address,
            position=tail.position,
            previous=tail.checksum,
            synced=tail.end,
            previous_control=0,
            received=tail.received,
        )
        file.pwritev(buffers, 0)
        tail = Tail(
            end=address + draft.length,
            position=tail.position,
            checksum=checksum,
            control=address,
            catalog=checkpoint.catalog,
            received=tail.received,
            entries=1,
            marked=address + draft.length,
            zeroed=address + draft.length,
        )
        if carried:
            self.live.publish(tail)  # counters that they move have moved in this file
        for data in carried:
            tail = self._copy(file, data, tail)
        file.fdatasync()
        file.close()
        self.system.rename(f"{self.files.folder}/{UNNAMED}", self.files.path(number))
        self.system.fsync_dir(self.files.folder)
        before = self._runs_named_by(checkpoint.files)
        self.counter_runs.drop_except(checkpoint.counters, before)
        return tail

    def _copy(self, file: File, data: bytes, tail: Tail) -> Tail:
        """Write a record again at `tail`: same content, same position, a new place in the chain."""
        moved = readdressed(
            data, address=tail.end, previous=tail.checksum, previous_control=tail.control
        )
        file.pwritev([moved], place_of(tail.end)[1])
        record = Record(moved)
        record.meta = memoryview(moved)[HEADER_BYTES : HEADER_BYTES + record.meta_length]
        return self.fold(record, tail)

    def _runs_named_by(self, files: list[FileRange]) -> list[dict[str, Any]]:
        """The counter runs of the second-newest checkpoint, which is kept too."""
        if not files:
            return []
        record = self.files.record(address_of(files[-1].number, 0))
        return Checkpoint.from_json(record.control()).counters if record is not None else []

    # -- control state ----------------------------------------------------------------------

    def refresh_control(self) -> None:
        """Fold the control records written since last time, by following their chain backwards."""
        with self._control_guard:
            last = self.live.tail()
            if last.control == self._folded:
                return
            pending: list[Record] = []
            address = last.control
            while address > self._folded:
                record = self.files.record(address)
                if record is None:
                    raise self.files.damage(address)
                pending.append(record)
                if record.kind == CHECKPOINT:
                    break
                address = record.previous_control
            control = self.control.copy()  # others may be reading the old one
            lately = set(self.sealed_lately)
            for record in reversed(pending):
                if record.kind == CHECKPOINT:
                    checkpoint = Checkpoint.from_json(record.control())
                    control = checkpoint.control
                    lately.clear()
                    self.closed_files = checkpoint.files
                    self.files.forget_before(min((f.number for f in checkpoint.files), default=0))
                    continue
                said = record.control()
                control.apply(said)
                added = said["sealed"].get("add", ()) if "sealed" in said else ()
                lately.update(one["name"] for one in added if not one.get("archive"))
            self.sealed_lately = frozenset(lately)
            if self.live.words[shared.DAMAGED]:
                self.closed_files = [
                    *self.closed_files,
                    *self._lost_files(last, list(control.by_id)),
                ]
            self.control = control
            self._folded, self.catalog = last.control, last.catalog

    def _lost_files(self, tail: Tail, topics: list[int]) -> Iterator[FileRange]:
        """Files that no checkpoint names, because the next one is damaged: what they still hold."""
        known = self.closed_files[-1].number if self.closed_files else 0
        newest, _ = place_of(tail.end)
        for number in self.files.numbers():
            if known < number < newest:
                first, last = self.files.intact_range(number)
                if first is not None and last is not None:
                    yield FileRange(
                        number=number,
                        end=place_of(last.end)[1],
                        after=first.position,
                        through=last.position,
                        time_first=first.received,
                        time_last=last.received,
                        topics=topics,
                        cut="damaged",
                    )

    def forget(self) -> None:
        """Read the control state anew next time: shared memory was rebuilt."""
        self._folded, self.catalog = 0, -1

    def abandon(self) -> None:
        """In a forked child: let go of what is the parent's, without unlocking."""
        self.append_lock.abandon()
        self.sync_lock.abandon()
        if self.short is not None:
            self.short.abandon()

    def close(self) -> None:
        """Close files, locks and maps, once no thread writes or syncs."""
        if self.short is not None:
            self.short.close()
        self.append_lock.shut(self.settings.lock_timeout_seconds)
        self.sync_lock.shut(self.settings.lock_timeout_seconds)
        if self._newest is not None:
            self._newest[1].close()
            self._newest = None
        self.files.close()
        self.live.close()


ROLL_BYTES = HEADER_BYTES
