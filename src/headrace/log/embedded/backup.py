"""Backup of a live log, consistent at one position, and the way back.

::

    role     that of the keeper, if nobody has it: then nobody deletes anything meanwhile
    end      under the sync lock: the synced end, and the position P that readers see there
    files    counter runs, journal files, pieces, sealed files; each copied, summed up and synced
    names    the folders synced
    manifest what there is, with sizes and checksums, P, the log; written last, synced, renamed
    sweep    what only an older manifest named is removed

**What counts** is what recovery would read at the synced end: the journal file in which it lies, up
to there and not one byte further, the older files that its checkpoint names, each up to its end,
the counter runs that it names, the pieces that entries in these files name, the sealed files that
the control state names at P, `headrace.json` and `restored.json`. All of it is immutable, so
writers go on. But what a newer entry has let go is deleted: counter runs by a roll, the others by a
keeper that is at work (it has the role for as long as it lives, so it is not waited for). A file
that is gone when it is to be copied means that there is a newer end by now: the backup begins again
from there, with what it has copied. If the end has not moved since, the file is lost: damage.

**What is left out** is derived: shared memory, locks, the indexes of tables (`tables/`) and the
state of views (`pipelines/`), which are built again; the witness, which may know more than the copy
has; pieces and sealed files that nothing names. **Files in an archive** stay there: an archive is
where what is old outlives the machine, and a backup that copied it would be as large as everything
that ever was. The manifest names each of them, and a restore says which it cannot reach; where the
archive has another address by then, it is told so, and says it in the first entry of the new log.

**Again into the same folder.** Files that cannot change (all but the newest journal file, whose
copy has its length in its name) are kept if they still have the checksum that the manifest says. A
file that the old manifest names is never written to: until the new manifest is in place the old
backup is whole, and afterwards the new one is. A folder that holds the backup of another log, or of
another history of this one, is refused.

**Crash argument.** A manifest appears by a rename after everything it names is on the disk, names
of files included. So a power cut leaves the old manifest with all its files (those of the new one
are garbage), or the new one with all of its own; without any manifest it is not a backup. A restore
puts `headrace.json`, without which there is no log, in place last.

**After a restore** the log has its old id and its old positions through P, and a new history from
there on (`restored`).

Rejected: holding the append lock for the copy (writers would wait for a disk); hard links (an image
on the same disk is no backup, and the newest file goes on changing); parsing all bodies (`log
check` does, on the copy).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from xxhash import xxh3_128

from headrace import errors
from headrace.log.embedded import live as shared
from headrace.log.embedded.archive import reachable
from headrace.log.embedded.checkpoint import Checkpoint
from headrace.log.embedded.files import JournalFiles
from headrace.log.embedded.format import CHANGES_CONTROL, ENTRY, address_of, place_of
from headrace.log.embedded.journal import Journal
from headrace.log.embedded.keeper import COUNTER
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.recovery import FOLDERS, FORMAT_FILE
from headrace.log.embedded.restored import NAME as RESTORED
from headrace.log.embedded.restored import histories
from headrace.log.embedded.system import EVERYBODY, File, OsSystem, System, os_errors
from headrace.model.fold import topic_counter

FORMAT = 2
"""1 if it names no archived files: then older programs read it too."""
MANIFEST = "backup.json"
STORED_FORMAT = "log.json"
"""The copy of `headrace.json`: under its own name it would make the backup look like a log."""
SEALED = "sealed"
KEPT_FOLDERS = ("journal", "counters", "pieces", SEALED)
CHUNK_BYTES = 4 << 20
TRIES = 20
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Copied:
    """A file of a backup."""

    path: str
    """In the folder of the log."""
    stored: str
    """In the folder of the backup."""
    size: int
    checksum: str
    """XXH3 of 128 bits, in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Archived:
    """A file that a backup does not hold: the log reads it from an archive."""

    archive: str
    name: str
    size: int
    topic: str
    first: int
    """The positions of its rows, from this one."""
    through: int

    @property
    def path(self) -> str:
        """Its address."""
        return f"{self.archive}/{self.name}"


@dataclass(frozen=True, slots=True)
class Backup:
    """What a backup holds, as its manifest says."""

    folder: str
    log: str
    history: str
    position: int
    """The log is as it was here."""
    received_us: int
    """When the log took the entry at this position, or the last before it."""
    files: tuple[Copied, ...]
    archived: tuple[Archived, ...] = ()
    """Files that are not in it, and that the log needs all the same."""
    written: int = 0
    """Bytes that were copied this time; the others were there."""
    unreachable: tuple[Archived, ...] = ()
    """After a restore: archived files that are not where the log looks for them."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def encode(self) -> bytes:
        """The manifest."""
        content = {
            "format": FORMAT if self.archived else 1,
            "log": self.log,
            "history": self.history,
            "position": self.position,
            "received_us": self.received_us,
            "files": [asdict(file) for file in self.files],
            **({"archived": [asdict(one) for one in self.archived]} if self.archived else {}),
        }
        text = json.dumps(content, indent=1)
        digest = xxh3_128(text.encode()).hexdigest()
        return f'{text[:-2]},\n "checksum": "{digest}"\n}}\n'.encode()


# --- backup ---------------------------------------------------------------------------------------


def backup(log: EmbeddedLog, to: str | os.PathLike[str]) -> Backup:
    """Copy the log, as it is at its newest visible position, to a folder; writers go on.

    A folder that holds an older backup of this log is brought up to date; until that is done, it
    is the older backup.
    """
    journal = log.journal
    if journal.live.words[shared.DAMAGED]:
        raise journal.files.damage(journal.live.words[shared.DAMAGED])
    system, folder = journal.system, os.fspath(to)
    with os_errors("making a backup", folder), _alone(journal):
        before = _previous(system, folder, journal)
        copying = _Copying(journal, folder, before)
        try:
            made = copying.run()
        finally:
            copying.source.close()
        _publish(system, made, before)
    return made


@contextlib.contextmanager
def _alone(journal: Journal) -> Iterator[None]:
    """One backup at a time; with the keeper's role, if it is free: then nothing is deleted."""
    system, timeout = journal.system, journal.settings.lock_timeout_seconds
    turn = system.open(f"{journal.folder}/locks/backup", create=True)
    role = system.open(f"{journal.folder}/locks/keeper", create=True)
    deadline = system.monotonic() + timeout
    try:
        while not turn.try_lock():
            if system.monotonic() >= deadline:
                raise errors.LockTimeout(
                    f"another backup of this log was not done within {timeout:g} s",
                    place=turn.path,
                )
            time.sleep(POLL_SECONDS)
        role.try_lock()
        yield
    finally:
        role.close()
        turn.close()


def _previous(system: System, folder: str, journal: Journal) -> Backup | None:
    """The backup that is in the folder, if it is an older one of this log."""
    names = system.listdir(folder)
    if MANIFEST not in names:
        foreign = set(names) - {*KEPT_FOLDERS, STORED_FORMAT, RESTORED, f"{MANIFEST}.new"}
        if foreign:
            fact = f"the folder holds other things, such as '{min(foreign)}'"
            raise errors.BackupElsewhere(fact, place=folder)
        return None
    found = read_manifest(system, folder)
    own = histories(system, journal.folder, journal.log_id).current
    if (found.log, found.history) != (journal.log_id.hex(), own):
        raise errors.BackupElsewhere(
            f"the folder holds a backup of log {found.log}, history {found.history}; this is log"
            f" {journal.log_id.hex()}, history {own}",
            place=folder,
        )
    return found


class _Copying:
    """One backup on its way."""

    def __init__(self, journal: Journal, folder: str, before: Backup | None) -> None:
        self.journal, self.folder = journal, folder
        self.system = journal.system
        self.source = JournalFiles(journal.system, journal.folder, journal.log_id)
        self.before = {file.stored: file for file in before.files} if before else {}
        self.files: list[Copied] = []
        self.written = 0
        for name in ("", *KEPT_FOLDERS):
            self.system.mkdir(f"{folder}/{name}" if name else folder)

    def run(self) -> Backup:
        """Copy what counts; again from a newer end, if somebody has deleted some of it meanwhile.

        What was copied is kept, so it is ever less that is missing.
        """
        before = -1
        for left in reversed(range(TRIES)):
            end, position = synced_end(self.journal)
            try:
                return self._all(end, position)
            except (FileNotFoundError, errors.LogDamaged):
                if end == before or not left:  # nobody has let anything go since: it is damage
                    raise
            before = end
            self.before |= {file.stored: file for file in self.files}
            self.files.clear()
        raise AssertionError

    def _all(self, end: int, position: int) -> Backup:
        journal, source = self.journal, self.source
        number, offset = place_of(end)
        first = source.record(address_of(number, 0))
        if first is None:
            raise source.damage(address_of(number, 0))
        checkpoint = Checkpoint.from_json(first.control())
        for run in checkpoint.counters:
            self._copy_file(f"counters/{run['name']}")
        ends = {file.number: file.end for file in checkpoint.files} | {number: offset}
        control = checkpoint.control.copy()
        pieces: dict[str, int] = {}
        previous: int | None = None
        received = 0
        for at, length in sorted(ends.items()):
            start = address_of(at, 0)
            for record, _, _ in source.walk(start, start + length, previous=previous):
                previous, received = record.checksum, record.received
                if any(section.piece for section in record.sections()):
                    pieces |= dict.fromkeys(record.control()["pieces"], record.position)
                if at == number and record.kind == ENTRY and record.flags & CHANGES_CONTROL:
                    control.apply(record.control())
            path = f"journal/{os.path.basename(source.path(at))}"
            stored = path if at != number else f"{path}.{length}"
            self._copy(path, source.file(at)[0], length, stored)
        named = {**checkpoint.control.sealed.files, **control.sealed.files}
        sealed = [f"{SEALED}/{file.name}" for file in named.values() if not file.archive]
        names = self.system.listdir(journal.folder)
        own = [name for name in (FORMAT_FILE, RESTORED) if name in names]
        for path in (*(f"pieces/{name}" for name in sorted(pieces)), *sorted(sealed), *own):
            self._copy_file(path)
        history = histories(self.system, journal.folder, journal.log_id).current
        found = tuple(sorted(self.files, key=lambda file: file.path))
        archived = tuple(
            Archived(f.archive, f.name, f.bytes, control.by_id[f.topic].name, f.first, f.through)
            for f in sorted(control.sealed.files.values(), key=lambda file: file.first)
            if f.archive
        )
        return Backup(
            self.folder, journal.log_id.hex(), history, position, received, found, archived,
            self.written,
        )  # fmt: skip

    def _copy_file(self, path: str) -> None:
        file = self.system.open(f"{self.journal.folder}/{path}")
        try:
            self._copy(path, file, file.size(), STORED_FORMAT if path == FORMAT_FILE else "")
        finally:
            file.close()

    def _copy(self, path: str, source: File, length: int, stored: str = "") -> None:
        stored = stored or path
        known = self.before.get(stored)
        target = f"{self.folder}/{stored}"
        if known is None or known.size != length or not _holds(self.system, target, known):
            digest = copy_file(self.system, source, length, target, source.path)
            known = Copied(path, stored, length, digest)
            self.written += length
        self.files.append(known)


def synced_end(journal: Journal) -> tuple[int, int]:
    """The address below which all is on the disk, and the position that readers see there."""
    tail = journal.live.tail()
    journal.sync(tail.end, tail.position)
    try:
        journal.sync_lock.acquire(journal.settings.lock_timeout_seconds)
        words = journal.live.words
        return words[shared.SYNCED], words[shared.SYNCED_POSITION]
    finally:
        journal.sync_lock.release(EVERYBODY)


def copy_file(system: System, source: File, length: int, path: str, place: str) -> str:
    """Copy the first bytes of a file, synced; their checksum."""
    target = system.create(path, 0)
    digest = xxh3_128()
    try:
        at = 0
        while at < length:
            data = source.pread(min(CHUNK_BYTES, length - at), at)
            if not data:
                raise errors.IoFailed(f"the file ends at byte {at}, not at {length}", place=place)
            digest.update(data)
            target.pwritev([data], at)
            at += len(data)
        target.fdatasync()
    finally:
        target.close()
    return str(digest.hexdigest())


def _holds(system: System, path: str, known: Copied) -> bool:
    """Whether a file of the backup is still what the manifest says."""
    try:
        file = system.open(path)
    except FileNotFoundError:
        return False
    digest, at = xxh3_128(), 0
    while data := file.pread(CHUNK_BYTES, at):
        digest.update(data)
        at += len(data)
    file.close()
    return (at, digest.hexdigest()) == (known.size, known.checksum)


def _publish(system: System, made: Backup, before: Backup | None) -> None:
    """Put the manifest in place, when all that it names is on the disk; then sweep."""
    folder = made.folder
    for name in (*(f"{folder}/{name}" for name in KEPT_FOLDERS), folder):
        system.fsync_dir(name)
    _place(system, f"{folder}/{MANIFEST}", made.encode())
    if before is None:
        system.fsync_dir(os.path.dirname(os.path.abspath(folder)))
    stored = {file.stored for file in made.files}
    for name in KEPT_FOLDERS:
        for left in system.listdir(f"{folder}/{name}"):
            if f"{name}/{left}" not in stored:
                system.unlink(f"{folder}/{name}/{left}")


def _place(system: System, path: str, content: bytes) -> None:
    """Put a file in place, whole and synced."""
    file = system.create(f"{path}.new", 0)
    file.pwritev([content], 0)
    file.fdatasync()
    file.close()
    system.rename(f"{path}.new", path)
    system.fsync_dir(os.path.dirname(path))


# --- restore --------------------------------------------------------------------------------------


def read_manifest(system: System, folder: str) -> Backup:
    """What a backup says that it holds."""
    path = f"{folder}/{MANIFEST}"
    try:
        file = system.open(path)
    except (FileNotFoundError, NotADirectoryError):
        raise errors.NotABackup(f"{folder} has no {MANIFEST}", place=folder) from None
    data = file.pread(file.size(), 0)
    file.close()
    try:
        content: dict[str, Any] = json.loads(data)
        if content["format"] > FORMAT:
            fact = f"this backup has format {content['format']}, this program reads up to {FORMAT}"
            raise errors.NewerFormat(fact, place=path)
        files = tuple(Copied(**file) for file in content["files"])
        found = Backup(
            folder,
            content["log"],
            content["history"],
            content["position"],
            content["received_us"],
            files,
            tuple(Archived(**one) for one in content.get("archived", ())),
        )
    except (ValueError, KeyError, TypeError):
        found = None
    if found is None or found.encode() != data:
        raise errors.BackupDamaged(f"{MANIFEST} does not match its checksum", place=path)
    return found


def restore(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    archives: Mapping[str, str] | None = None,
    system: System | None = None,
) -> Backup:
    """Make a log of a backup, in an empty folder; every byte is held against its checksum.

    The log has the id and the positions of the one that was backed up, through the position of the
    backup, and goes on as a history of its own: see `EmbeddedLog.history`. `archives`: old address
    -> new one, of archives that are elsewhere now. What cannot be reached is in `unreachable`.
    """
    on = system or OsSystem()
    folder = os.fspath(to) if system is not None else os.path.abspath(os.fspath(to))
    found = read_manifest(on, os.fspath(source))
    moved = _moved(found, archives or {})
    on.check_folder(folder)
    _refuse_unless_empty(on, folder)
    made: list[str] = []
    with os_errors("restoring a log", folder):
        try:
            for name in ("", *FOLDERS, SEALED):
                on.mkdir(f"{folder}/{name}" if name else folder)
            for file in found.files:
                named = f"{file.path}.new" if file.path == FORMAT_FILE else file.path
                made.append(f"{folder}/{named}")
                _bring_back(on, f"{found.folder}/{file.stored}", file, made[-1])
            past = histories(on, folder, bytes.fromhex(found.log))
            new = past.restored(on.random(16).hex(), found.position)
            _place(on, f"{folder}/{RESTORED}", new.encode())
            made.append(f"{folder}/{RESTORED}")
            for name in (*FOLDERS, SEALED):
                on.fsync_dir(f"{folder}/{name}")
            on.rename(f"{folder}/{FORMAT_FILE}.new", f"{folder}/{FORMAT_FILE}")
            on.fsync_dir(folder)
            on.fsync_dir(os.path.dirname(folder))
        except BaseException:
            for path in reversed(made):
                on.unlink(path)
            raise
    with EmbeddedLog(folder, create=False, system=system) as log:
        if log.position != found.position:
            raise errors.BackupDamaged(
                f"the restored log is at position {log.position}, not {found.position}",
                place=folder,
            )
        if moved:
            _say_moved(log, moved)
    now = [replace(one, archive=moved.get(one.archive, one.archive)) for one in found.archived]
    away = tuple(one for one in now if not reachable(one.path, one.size))
    return replace(found, unreachable=away)


def _moved(found: Backup, archives: Mapping[str, str]) -> dict[str, str]:
    """Where archives are now; one that the backup does not know is a mistake."""
    known = sorted({one.archive for one in found.archived})
    for old in archives:
        if old not in known:
            raise errors.BadSetting(
                f"the backup names no archive {old!r}",
                place=found.folder,
                fix=f"it names {', '.join(known)}" if known else "it needs no archive",
            )
    return {old: new for old, new in archives.items() if old != new}


def _say_moved(log: EmbeddedLog, moved: Mapping[str, str]) -> None:
    """One entry: from here on archived files are read, and new ones written, elsewhere."""
    control = log.journal.control
    files = [
        replace(file, archive=moved[file.archive])
        for file in control.sealed.files.values()
        if file.archive in moved
    ]
    topics = [
        topic.revised(policy=replace(topic.policy, archive=moved[topic.policy.archive or ""]))
        for topic in control.topics.values()
        if topic.policy.archive in moved
    ]
    expect = {topic_counter(topic.name): topic.revision - 1 for topic in topics}
    said = {
        "sealed": {"add": [file.to_json() for file in files]},
        **({"topics": [topic.to_json() for topic in topics]} if topics else {}),
    }
    expect[COUNTER] = log.counter(COUNTER)
    log.append_entry([], said, expect=expect, require={})


def _refuse_unless_empty(system: System, folder: str) -> None:
    for name in ("", *FOLDERS, SEALED):
        path = f"{folder}/{name}" if name else folder
        try:
            found = [one for one in system.listdir(path) if one not in (*FOLDERS, SEALED)]
        except NotADirectoryError:
            found = [os.path.basename(path)]
        if found:
            raise errors.FolderNotEmpty(f"{path} holds '{found[0]}'", place=path)


def _bring_back(system: System, path: str, file: Copied, to: str) -> None:
    """Copy a file of a backup, if it is what the manifest says."""
    try:
        source = system.open(path)
    except FileNotFoundError:
        raise errors.BackupDamaged(f"{file.stored} is missing", place=path) from None
    try:
        if source.size() != file.size:
            fact = f"{file.stored} has {source.size()} bytes, not {file.size}"
            raise errors.BackupDamaged(fact, place=path)
        if copy_file(system, source, file.size, to, path) != file.checksum:
            raise errors.BackupDamaged(f"{file.stored} has another checksum", place=path)
    finally:
        source.close()
