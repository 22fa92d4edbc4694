"""The keeper: seals what the journal has closed, lets go what may go, deletes what nobody names.

One process at a time has the role: it holds `locks/keeper`, which the kernel gives back when it
dies. Long-lived processes compete for it; commands and Spark's workers never do. All it decides is
said by an entry that *expects* the keeper's counter, so that even a holder that was cut off in some
other way cannot undo what the next one did.

A turn::

    seal      closed journal files, oldest first -> sealed files, synced -> one entry: these are all
              rows through position P, from here on nobody needs the journal below P
    retain    per topic the oldest sealed files that are too old or too many -> archive, or gone:
              one entry that drops them and says from where on the topic is held
    compact   per topic the sealed files of which newer rows make many useless -> rewritten
              (`compaction`) -> one entry that puts new files into the place of old ones
    join      many small files of a topic side by side -> one, as if it had been sealed at once
    collect   delete files that nothing names, and pieces that nobody will name (`orphans`)

**Crash argument.** Files are written and synced before the entry that names them, so whoever sees
the entry can read them; before that they are garbage. A journal file, its pieces, or a sealed file
is deleted only when neither the control state of now nor either of the two newest checkpoints names
it: then a later checkpoint, synced, stands without it, and so does the one before that. What an
entry has named since the newest checkpoint stays until there is another: no single record, should
it be damaged, is all that says where rows are. A journal file below the sealed position is not
named by any checkpoint that is written afterwards. Between the entry and the deletion rows are in
two places, and equal.

**Readers** find out by a file that is missing, look at the control state again, and go on where the
rows are now. **Holds** keep retention and compaction from passing a position: they say until when
they count, so that one whose holder is gone for good does not fill the disk.

**What fails for one topic** (its archive is out of reach, a file of it is damaged) does not keep
the others from their turn, nor a full disk the steps that make room: the first error is raised when
all else is done. An archive that lacks what was put there last is not the archive (somebody moved
it, or the disk is not mounted), and is given nothing: what is put there could not be found.

**Without a keeper** appends go on. Who begins a journal file and finds more of them unsealed than
the budget, and the role free, takes it for one turn.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow.ipc import read_record_batch

from headrace import errors
from headrace.log.embedded import archive, gone
from headrace.log.embedded.checkpoint import Checkpoint, FileRange
from headrace.log.embedded.compaction import compacted, joined, worth_compacting, worth_joining
from headrace.log.embedded.format import (
    ENTRY,
    Record,
    Section,
    address_of,
    place_of,
)
from headrace.log.embedded.holds import held
from headrace.log.embedded.orphans import Orphans
from headrace.log.embedded.packing import storage_schema
from headrace.log.embedded.reader import rows_of
from headrace.log.embedded.sealed import Rows, SealWriter, with_flags
from headrace.log.embedded.system import File, os_errors
from headrace.model import fold
from headrace.model.fold import OWN_COUNTERS, Offsets
from headrace.model.sealed import SealedFile, Trim
from headrace.model.topic import Topic

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog

COUNTER = f"{OWN_COUNTERS}keeper"
SEAL_BYTES = 256 << 20
"""So much of the journal becomes one set of sealed files."""
PENDING_BYTES = 64 << 20
STALE_FILES = 4
"""So many journal files that only a checkpoint still names are worth another checkpoint."""
TURN_SECONDS = 5.0
OF_ONE_TOPIC = (
    errors.LogDamaged,
    errors.IoFailed,
    errors.DiskFull,
    errors.ReadOnlyDisk,
    errors.BadSetting,
)
"""What can be wrong with the files or the archive of one topic, and not with others."""
_talk = logging.getLogger("headrace.keeper")


class Stopped(Exception):
    """The process ends: what was begun is left, and is garbage."""


@dataclass(slots=True)
class Turn:
    """What a turn has done."""

    sealed: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    archived: list[str] = field(default_factory=list)
    compacted: list[str] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    problem: errors.HeadraceError | None = None
    """The first thing that could not be done, while others were."""

    def to_json(self) -> dict[str, list[str]]:
        """For `--json`."""
        return {
            "sealed": self.sealed,
            "dropped": self.dropped,
            "archived": self.archived,
            "compacted": self.compacted,
            "joined": self.joined,
            "deleted": self.deleted,
        }


class Keeper:
    """Has, or waits for, the role of keeper of a log; as a context it works in the background."""

    def __init__(self, log: EmbeddedLog) -> None:
        """Made by `log.keeper()`."""
        self._log = log
        self._lock: File | None = None
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._orphans = Orphans(log, self._go_on)
        self.problem: Exception | None = None
        """What went wrong in the last turn in the background."""

    # -- the role ---------------------------------------------------------------------------

    def take(self) -> bool:
        """Take the role if nobody else has it."""
        with self._guard:
            return self._take()

    def _take(self) -> bool:
        if self._lock is not None:
            return True
        journal = self._log.journal
        if journal.refused is not None:
            return False
        path = f"{journal.folder}/locks/keeper"
        with os_errors("opening a lock", path):
            file = journal.system.open(path, create=True)
            if file.try_lock():
                self._lock = file
            else:
                file.close()
        return self._lock is not None

    def release(self) -> None:
        """Give the role back."""
        with self._guard:
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def __enter__(self) -> Keeper:
        """Begin to work in the background."""
        self._thread = threading.Thread(target=self._run, name="headrace-keeper", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.release()

    def _run(self) -> None:
        while not self._stop.wait(TURN_SECONDS):
            try:
                if self.take():
                    self.turn()
                self.problem = None
            except (errors.LogClosed, Stopped):
                return
            except errors.HeadraceError as error:
                self.complain(error)

    def complain(self, error: Exception) -> None:
        """What goes wrong here is nobody's call: it is told once, and kept to be seen."""
        if self.problem is None:
            _talk.warning("the keeper could not go on: %s", error)
        self.problem = error

    # -- a turn -----------------------------------------------------------------------------

    def turn(self, *, close: bool = False, compact: bool = False) -> Turn:
        """Do what is to be done; `NotKeeper` if another process has the role.

        `close`: the newest journal file too, which is closed for it. `compact`: also where it is
        not worth it yet.
        """
        with self._guard:
            if not self._take():
                raise self._log.journal.refused or errors.NotKeeper(
                    "another process is the keeper of this log", place=self._log.path
                )
            done, journal = Turn(), self._log.journal
            journal.live.check_in_place()  # else it would delete what another log has there
            with os_errors("keeping the log", journal.folder):
                with self._aside(done, errors.DiskFull):
                    if close:
                        journal.close_file()
                    while self._seal(done):
                        pass
                self._retain(done)
                self._compact(done, everything=compact)
                self._join(done)
                self._collect(done)
            if done.problem is not None:
                raise done.problem
            return done

    @contextlib.contextmanager
    def _aside(self, done: Turn, *kinds: type[errors.HeadraceError]) -> Iterator[None]:
        """Go on with the rest of the turn after an error of these kinds."""
        try:
            with os_errors("keeping the log", self._log.journal.folder):
                yield
        except kinds as error:
            done.problem = done.problem or error

    def _go_on(self) -> None:
        """Asked now and then by what takes long: a process that ends does not wait for it."""
        if self._stop.is_set():
            raise Stopped

    def _say(self, control: Mapping[str, Any], number: int) -> None:
        """One entry; files that it would have named are garbage if somebody else was first."""
        expected = {COUNTER: number}
        self._log.append_entry([], {"sealed": control}, expect=expected, require={})

    # -- seal -------------------------------------------------------------------------------

    def _seal(self, done: Turn) -> bool:
        """Seal the oldest closed files; False if there are none."""
        journal = self._log.journal
        number = self._log.counter(COUNTER)
        journal.refresh_control()
        sealed = journal.control.sealed
        chosen: list[FileRange] = []
        for file in journal.closed_files:
            if file.through > sealed.through and sum(f.end for f in chosen) < SEAL_BYTES:
                chosen.append(file)
        if not chosen:
            return False
        sealing = Sealing(self._log, self._go_on)
        try:
            for file in chosen:
                sealing.add(file)
            added = sealing.finish()
        except BaseException:
            sealing.abandon()
            raise
        add = [file.to_json() for file in added]
        self._say({"add": add, "through": chosen[-1].through}, number)
        done.sealed += [file.name for file in added]
        return True

    # -- retain -----------------------------------------------------------------------------

    def _retain(self, done: Turn) -> None:
        journal = self._log.journal
        number = self._log.counter(COUNTER)
        journal.refresh_control()
        sealed, now = journal.control.sealed, journal.system.now_us()
        drop: list[str] = []
        add: list[SealedFile] = []
        trims: dict[str, Any] = {}
        for topic in journal.control.by_id.values():
            files = sealed.of(topic.id)
            if topic.deleted:
                drop += [file.name for file in files]
                if sealed.trim(topic.id) is not None:
                    gone.forget(journal, topic)
                continue
            limit = held(journal.control, topic.name, now)
            going = [file for file in _too_old(topic, files, now) if file.through <= limit]
            with self._aside(done, *OF_ONE_TOPIC):
                if topic.policy.archive is not None:
                    self._archive(topic.policy.archive, files, going, add)
                elif going:
                    trims[str(topic.id)] = self._trimmed(topic, files, going, sealed.trim(topic.id))
                    drop += [file.name for file in going]
        if not drop and not add:
            return
        self._say({"drop": drop, "add": [one.to_json() for one in add], "trim": trims}, number)
        done.dropped += drop
        done.archived += [one.name for one in add]

    def _archive(
        self, to: str, files: list[SealedFile], going: list[SealedFile], add: list[SealedFile]
    ) -> None:
        """Copy what is not there yet; `add` gets what is."""
        system, folder = self._log.journal.system, self._log.journal.folder
        waiting = [file for file in going if not file.archive]
        before = [file for file in files if file.archive == to]
        if waiting and before:
            archive.open_sealed(system, folder, before[-1]).close()
        for file in waiting:
            archive.store(system, folder, file, to)
            add.append(replace(file, archive=to))

    def _trimmed(
        self, topic: Topic, files: list[SealedFile], going: list[SealedFile], old: Trim | None
    ) -> dict[str, Any]:
        """From where on a topic is held when these files are gone."""
        starts = [file.starts for file in files[1 : len(going) + 1]]
        if len(going) == len(files):
            starts.append(tuple(_ends_at(self._log, topic)))
        gone.remember(self._log.journal, topic, going, starts, old)
        since = max(going[-1].through, old.since if old is not None else 0)
        return Trim(since, going[-1].through, starts[-1]).to_json()

    # -- compact ----------------------------------------------------------------------------

    def _compact(self, done: Turn, *, everything: bool) -> None:
        journal = self._log.journal
        for topic in list(journal.control.topics.values()):
            if not topic.policy.compact:
                continue
            number = self._log.counter(COUNTER)
            journal.refresh_control()
            now = journal.system.now_us()
            limit = held(journal.control, topic.name, now)
            files = [file for file in journal.control.sealed.of(topic.id) if file.through <= limit]
            if not worth_compacting(files, everything=everything):
                continue
            with self._aside(done, *OF_ONE_TOPIC):
                added = compacted(journal, topic, files, now, self._go_on)
                old = journal.control.sealed.trim(topic.id)
                trim = Trim(
                    max(files[-1].through, old.since if old is not None else 0),
                    old.gone if old is not None else 0,
                    old.starts if old is not None else (0,) * topic.partitions,
                )
                self._say(
                    {
                        "drop": [file.name for file in files],
                        "add": [file.to_json() for file in added],
                        "trim": {str(topic.id): trim.to_json()},
                    },
                    number,
                )
                done.compacted.append(topic.name)

    def _join(self, done: Turn) -> None:
        """Put many small files of a topic into one."""
        journal = self._log.journal
        for topic in list(journal.control.topics.values()):
            number = self._log.counter(COUNTER)
            journal.refresh_control()
            files = worth_joining(journal.control.sealed.of(topic.id))
            if files:
                with self._aside(done, *OF_ONE_TOPIC):
                    add = [file.to_json() for file in joined(journal, topic, files, self._go_on)]
                    self._say({"drop": [file.name for file in files], "add": add}, number)
                    done.joined += [file.name for file in files]

    # -- collect ----------------------------------------------------------------------------

    def _collect(self, done: Turn) -> None:
        """Delete what neither the state of now nor the two newest checkpoints name."""
        journal = self._log.journal
        self._log.sync()  # what is not named any more was said by an entry that is on the disk
        journal.refresh_control()
        system, files = journal.system, journal.files
        numbers = files.numbers()
        newest = place_of(journal.live.tail().end)[0]
        kept = [number for number in numbers if number <= newest][-2:]
        states = [journal.control.sealed]
        needed = set(kept) | {number for number in numbers if number > kept[0]}
        stale: set[int] = set()
        for number in kept:
            record = files.record(address_of(number, 0))
            if record is None:
                raise files.damage(address_of(number, 0))
            checkpoint = Checkpoint.from_json(record.control())
            needed |= {file.number for file in checkpoint.files}
            old = (f.number for f in checkpoint.files if f.through <= states[0].through)
            stale |= set(old) - set(kept)
            states.append(checkpoint.control.sealed)
        if len(stale) >= STALE_FILES:
            journal.close_file()  # nobody appends any more, and no other checkpoint will come
        for number in numbers:
            if number not in needed:
                self._delete_journal_file(number, needed, done)
        local = {f.name for state in states for f in state.files.values() if not f.archive}
        local.update(journal.sealed_lately)
        folder = f"{journal.folder}/{archive.FOLDER}"
        for name in system.listdir(folder):
            if name not in local:
                system.unlink(f"{folder}/{name}")
                done.deleted.append(f"{archive.FOLDER}/{name}")
        done.deleted += [f"pieces/{name}" for name in self._orphans.remove()]

    def _delete_journal_file(self, number: int, needed: set[int], done: Turn) -> None:
        """Its pieces first, unless a file that stays names them too."""
        journal, pieces = self._log.journal, self._log.pieces
        named = set(pieces_of(self._log, number))
        for other in needed if named else ():
            named -= set(pieces_of(self._log, other))
        for name in sorted(named):
            journal.system.unlink(pieces.path(name))
            done.deleted.append(f"pieces/{name}")
        journal.system.unlink(journal.files.path(number))
        journal.files.forget_before(number + 1)
        done.deleted.append(f"journal/{number:08d}.log")


class Sealing:
    """Rows of journal files on their way into sealed ones."""

    def __init__(self, log: EmbeddedLog, go_on: Callable[[], None]) -> None:
        """Nothing is read yet; `go_on` raises to end it."""
        self._go_on = go_on
        self._journal = log.journal
        self._pieces = log.pieces
        self._folder = f"{log.journal.folder}/{archive.FOLDER}"
        self._ends: Offsets = np.zeros(0, np.uint64)
        self._open: dict[int, SealWriter] = {}
        self._written: list[SealWriter] = []
        self._count = 0

    def add(self, file: FileRange) -> None:
        """The rows of one journal file, each verified."""
        journal = self._journal
        start = address_of(file.number, 0)
        first = journal.files.record(start)
        if first is None:
            raise journal.files.damage(start)
        ends = Checkpoint.from_json(first.control()).ends
        self._ends = np.zeros(max(len(ends), journal.control.slots), np.uint64)
        self._ends[: len(ends)] = ends
        walk = journal.files.walk(start, address_of(file.number, file.end), bodies=True)
        for record, data, at in walk:
            self._go_on()
            if record.kind == ENTRY:
                for section in record.sections():
                    self._section(record, section, data, at)

    def _section(self, record: Record, section: Section, data: pa.Buffer, at: int) -> None:
        topic = self._journal.control.by_id[section.topic]
        if not topic.deleted:
            writer = self._writer(topic, section.schema)
            stored = storage_schema(topic.schemas[section.schema - 1].arrow, section.flags)
            buffer = rows_of(self._journal.files, self._pieces, record, section, data, at)
            batch = with_flags(read_record_batch(buffer, stored), section.flags, writer.stored)
            writer.add(
                Rows(
                    batch, section.flags, record.position, section.sent_time, record.received,
                    section.runs,
                )
            )  # fmt: skip
            while sum(one.pending_bytes for one in self._open.values()) > PENDING_BYTES:
                max(self._open.values(), key=lambda one: one.pending_bytes).flush()
        fold.advance(self._ends, section.runs, section.slot)

    def _writer(self, topic: Topic, schema: int) -> SealWriter:
        found = self._open.get(topic.id)
        if found is None or found.schema != schema:
            if found is not None:
                self._written.append(found)
            starts = self._ends[topic.slot : topic.slot + topic.partitions].tolist()
            found = self._open[topic.id] = SealWriter(
                self._journal.system, self._folder, self._journal.log_id, topic, schema,
                self._count, starts,
            )  # fmt: skip
            self._count += 1
        return found

    def finish(self) -> list[SealedFile]:
        """All files, synced with their names."""
        made = [writer.finish() for writer in [*self._written, *self._open.values()]]
        self._journal.system.fsync_dir(self._folder)
        return made

    def abandon(self) -> None:
        """Remove what was written."""
        for writer in [*self._written, *self._open.values()]:
            with contextlib.suppress(OSError):
                writer.abandon()


def _too_old(topic: Topic, files: list[SealedFile], now: int) -> list[SealedFile]:
    """The files at the front that the policy lets go."""
    policy = topic.policy
    left = sum(file.bytes for file in files)
    going = []
    for file in files:
        old = policy.retention_seconds is not None and (
            file.time_last < now - policy.retention_seconds * 1_000_000
        )
        many = policy.retention_bytes is not None and left > policy.retention_bytes
        if not old and not many:
            break
        going.append(file)
        left -= file.bytes
    return going


def _ends_at(log: EmbeddedLog, topic: Topic) -> list[int]:
    """Where each partition stands at the sealed position: the first journal file behind it says."""
    journal = log.journal
    after = [f for f in journal.closed_files if f.after >= journal.control.sealed.through]
    number = after[0].number if after else place_of(journal.live.tail().end)[0]
    record = journal.files.record(address_of(number, 0))
    if record is None:
        raise journal.files.damage(address_of(number, 0))
    ends = Checkpoint.from_json(record.control()).ends
    found = ends[topic.slot : topic.slot + topic.partitions]
    return found + [0] * (topic.partitions - len(found))


def pieces_of(log: EmbeddedLog, number: int) -> Iterator[str]:
    """The pieces that entries of a journal file name."""
    files = log.journal.files
    end = address_of(number, files.file(number)[1])
    with contextlib.suppress(errors.LogDamaged):  # or just its end
        for record, _, _ in files.walk(address_of(number, 0), end):
            if record.kind == ENTRY and any(one.piece for one in record.sections()):
                yield from record.control()["pieces"]
