"""Bugs of the log, on purpose: see `seeded`.

They show that the machine which breaks the log would notice if the log were wrong:
`headrace.testing.hunt` switches each on and looks for it in the workloads named, with the crash
enumerator, and with the corruptor (`damage`), and every one must be caught.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from headrace import errors
from headrace.log.embedded import live as shared
from headrace.log.embedded import reader, recovery
from headrace.log.embedded.checkpoint import CounterRuns
from headrace.log.embedded.files import JournalFiles
from headrace.log.embedded.format import HEADER_BYTES, Record
from headrace.log.embedded.journal import MARKER, Journal
from headrace.log.embedded.live import Live
from headrace.log.embedded.locks import CrossLock
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.pieces import Pieces
from headrace.log.embedded.places import Places
from headrace.log.embedded.reader import Reading
from headrace.log.embedded.system import System
from headrace.model import fold
from headrace.testing.seeded import Bug, Patch, instead, nothing, seeding

BUGS: list[Bug] = []
_bug = seeding(BUGS)


class _Lacking:
    """An object some of whose methods do nothing, on the object and on files it opens."""

    def __init__(self, inner: Any, *methods: str) -> None:
        self._inner = inner
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        if name in self._methods:
            return lambda *_: None
        found = getattr(self._inner, name)
        if name in ("open", "create") and callable(found):
            return lambda *given, **named: _Lacking(found(*given, **named), *self._methods)
        return found


def lacking(owner: type, method: str, attribute: str, *missing: str) -> Patch:
    """While `method` runs, the system in `attribute` does not do what is `missing`."""
    original = getattr(owner, method)

    def run(self: Any, *given: Any, **named: Any) -> Any:
        system: System = getattr(self, attribute)
        setattr(self, attribute, _Lacking(system, *missing))
        try:
            return original(self, *given, **named)
        finally:
            setattr(self, attribute, system)

    return instead(owner, method, run)


# --- durability and visibility --------------------------------------------------------------------


@_bug("acknowledge before sync", "plain")
def _() -> list[Patch]:
    original = EmbeddedLog._make_durable

    def one_late(self: Any, journal: Any, taken: Any, durability: str) -> None:
        late = getattr(self, "_late", None)
        if late is not None:
            original(self, journal, late, durability)
        self._late = taken

    return [instead(EmbeddedLog, "_make_durable", one_late)]


@_bug("a reader sees what is not synced", "weak", "two_processes")
def _() -> list[Patch]:
    original = Reading._run

    def run(self: Any) -> Any:
        self._limit = self._journal.live.tail().end
        yield from original(self)

    reached = property(lambda self: self._journal.live.tail().position)
    return [instead(Reading, "_run", run), instead(Places, "reached", reached)]


@_bug("the synced word moves before the sync", "two_processes")
def _() -> list[Patch]:
    original = Journal._sync_to

    def early(self: Journal, tail: Any) -> None:
        self.publish_synced(tail)
        original(self, tail)

    return [instead(Journal, "_sync_to", early)]


@_bug("a sync is taken to cover what was written during it", "two_processes")
def _() -> list[Patch]:
    original = Journal.publish_synced

    def later(self: Journal, tail: Any) -> None:
        newest = self.live.tail()
        original(self, newest if newest.end > tail.end else tail)

    return [instead(Journal, "publish_synced", later)]


@_bug("a follower jumps over journal files", "chased")
def _() -> list[Patch]:
    original = Journal.refresh_control

    def rarely(self: Any) -> None:
        self.asked = getattr(self, "asked", 0) + 1
        files = self.closed_files
        original(self)
        if self.asked % 3 == 2 and files:
            self.closed_files = files

    return [instead(Journal, "refresh_control", rarely)]


@_bug("a sync wakes nobody", "chased")
def _() -> list[Patch]:
    original = CrossLock.signal
    return [instead(CrossLock, "signal", lambda self, _: original(self, 0))]


@_bug("a failed sync is tried again", "sync_fails")
def _() -> list[Patch]:
    original = Journal._sync_to

    def again(self: Journal, tail: Any) -> None:
        try:
            original(self, tail)
        except errors.LogPoisoned:
            self.live.words[shared.POISONED] = 0
            self.system.unlink(f"{self.folder}/{MARKER}")
            original(self, tail)

    return [instead(Journal, "_sync_to", again)]


@_bug("a failed sync poisons nothing", "sync_fails")
def _() -> list[Patch]:
    return [instead(Journal, "_poison", nothing)]


# --- files ----------------------------------------------------------------------------------------


@_bug("a new journal file without a folder sync", "rolls")
def _() -> list[Patch]:
    return [lacking(Journal, "begin_file", "system", "fsync_dir")]


@_bug("a new journal file whose checkpoint is not synced", "rolls")
def _() -> list[Patch]:
    return [lacking(Journal, "begin_file", "system", "fdatasync")]


@_bug("a roll that does not sync the old file", "weak", "rolls")
def _() -> list[Patch]:
    original = Journal._start_file

    def start(self: Journal, *given: Any, **named: Any) -> Any:
        with mock.patch.object(Journal, "_sync_to", nothing):
            return original(self, *given, **named)

    return [instead(Journal, "_start_file", start)]


@_bug("a piece is named before its rows are synced", "large")
def _() -> list[Patch]:
    return [lacking(Pieces, "write", "_system", "fdatasync")]


@_bug("a piece is named before its name is synced", "large")
def _() -> list[Patch]:
    return [lacking(Pieces, "write", "_system", "fsync_dir")]


@_bug("a counter run is named before it is synced", "rolls", "plain")
def _() -> list[Patch]:
    return [lacking(CounterRuns, "_write", "_system", "fdatasync", "fsync_dir")]


@_bug("the witness is written before the sync", "rolls", "plain")
def _() -> list[Patch]:
    from headrace.log.embedded.witness import write_witness

    original = Journal.mark

    def mark(self: Journal) -> None:
        end = self.live.tail().end + 128
        write_witness(self.system, self.folder, self.log_id, end)
        original(self)

    return [instead(Journal, "mark", mark)]


# --- what is written, and in which order ----------------------------------------------------------


@_bug("shared memory is updated before the entry is written", "plain")
def _() -> list[Patch]:
    original = Journal._write

    def write(self: Journal, draft: Any, tail: Any, position: int, received: int) -> Any:
        self.live.publish(tail._replace(end=tail.end + draft.length, position=position))
        return original(self, draft, tail, position, received)

    return [instead(Journal, "_write", write)]


@_bug("what a dead writer left is not folded", "killed_often", "rolls")
def _() -> list[Patch]:
    return [instead(Journal, "catch_up", lambda self: self.live.tail())]


@_bug("two processes append at once", "two_processes")
def _() -> list[Patch]:
    original = CrossLock.acquire

    def acquire(self: Any, timeout: float) -> None:
        if self.name != "append":
            original(self, timeout)

    release = CrossLock.release

    def let_go(self: Any, wake: int = 1) -> None:
        if self.name != "append":
            release(self, wake)

    return [instead(CrossLock, "acquire", acquire), instead(CrossLock, "release", let_go)]


@_bug("a transaction over two topics is two entries", "plain")
def _() -> list[Patch]:
    original = EmbeddedLog.append_entry

    def split(self: EmbeddedLog, parts: Any, control: Any, **named: Any) -> Any:
        for part in parts[1:]:
            original(self, [part], {}, expect={}, require={})
        return original(self, parts[:1], control, **named)

    return [instead(EmbeddedLog, "append_entry", split)]


@_bug("expect is not checked", "plain")
def _() -> list[Patch]:
    original = fold.verdict
    return [instead(fold, "verdict", lambda counters, _, require: original(counters, {}, require))]


@_bug("require is not checked", "writers")
def _() -> list[Patch]:
    original = fold.verdict
    return [instead(fold, "verdict", lambda counters, expect, _: original(counters, expect, {}))]


# --- recovery -------------------------------------------------------------------------------------


@_bug("shared memory of another boot is believed", "plain")
def _() -> list[Patch]:
    def believed(self: Live, _: bytes) -> bool:
        return bool(self.words[shared.READY] == shared.MAGIC)

    return [instead(Live, "believed", believed)]


@_bug("offsets are given again after a cut", "plain")
def _() -> list[Patch]:
    original = recovery._rebuild

    def rebuild(journal: Journal, first: Any, records: Any) -> Any:
        with mock.patch.object(fold, "advance", nothing):
            return original(journal, first, records)

    return [instead(recovery, "_rebuild", rebuild)]


@_bug("positions are given again after a cut", "plain")
def _() -> list[Patch]:
    original = recovery._rebuild

    def rebuild(journal: Journal, first: Any, records: Any) -> Any:
        tail, before, control = original(journal, first, records)
        return tail._replace(position=first.position), before, control

    return [instead(recovery, "_rebuild", rebuild)]


@_bug("counters are not rebuilt", "rolls", "plain")
def _() -> list[Patch]:
    return [instead(Live, "load", nothing)]


@_bug("the rows of the tail are not verified", "plain", "large")
def _() -> list[Patch]:
    return [instead(JournalFiles, "body_intact", lambda *_: True)]


@_bug("header checksums are not verified", "plain", "damage")
def _() -> list[Patch]:
    def take(self: Record, data: memoryview) -> bool:
        self.meta = data[HEADER_BYTES:]
        return True

    return [instead(Record, "take_meta", take)]


@_bug("the checksum of rows is not verified on reading", "damage")
def _() -> list[Patch]:
    class Whatever:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, _: object) -> bool:
            return True

        def __ne__(self, _: object) -> bool:
            return False

    return [instead(reader, "checksum", lambda _: Whatever())]


@_bug("the chain is not verified", "damage")
def _() -> list[Patch]:
    class Chained:
        """`previous` of any record equals whatever it is compared with."""

        def __get__(self, record: Any, _: type) -> Any:
            return self if record is None else _Anything()

        def __set__(self, _record: Any, _value: Any) -> None:
            pass

    return [instead(Record, "previous", Chained())]


class _Anything(int):
    """A number that is equal to every other."""

    __hash__ = int.__hash__

    def __eq__(self, _: object) -> bool:
        return True

    def __ne__(self, _: object) -> bool:
        return False


@_bug("damage at the end is taken for a torn tail", "damage")
def _() -> list[Patch]:
    class Never:
        """No record names a synced end."""

        def __get__(self, record: Any, _: type) -> Any:
            return self if record is None else 0

        def __set__(self, _record: Any, _value: Any) -> None:
            pass

    return [
        instead(Record, "synced", Never()),
        instead(recovery, "read_witness", lambda *_: 0),
    ]
