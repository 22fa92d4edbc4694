"""Opening: make a log, find its end after a crash, and tell a torn tail from damage.

Shared memory that is believed (same boot, same file) needs no recovery: whatever process died, the
page cache holds all it wrote, and the next appender folds it. Otherwise the machine has booted (or
the folder was copied), and the disk holds the synced part whole and any part of the rest:

1. Truth continues in the newest journal file. Its checkpoint was synced before it got its name, so
   if it is not whole, that is damage.
2. From there the records are walked by their chain up to the first that is not whole: the *break*.
3. Every intact header, also behind the break, names a *synced end*: what lies
   below was on the disk before that header was written; so does the *witness*, a small file written
   with every mark. A break below such an end is **damage**:
   the log opens for reading what is intact, appends are refused, nothing is changed.
4. Above all synced ends the rows are verified too; the first record that is not whole is where the
   log ends. It was never acknowledged (its sync had not returned) and nobody saw it.
5. Recovery itself appends one thing: a new journal file whose checkpoint names the end of the old
   one. The old file is not shortened and never written again, so a crash in here changes nothing:
   the next opener finds the old state, or the new file, whole.

A journal file is therefore written in one boot only, and only until its first failed sync. After a
failed sync (`poisoned`) the part that was not synced is copied, as far as it can be read and
verified, to a new file, under the same positions and offsets: handles with weaker durability have
already been told these.

A disk that is full or read-only has no room for 5: then the log is opened for reading only
(`frozen`), by the same steps 1 to 4 and without changing anything.

Rejected: continuing in the old file when all behind the break is zero. It saves at most one file
per boot and needs an argument about what the disk may still hold behind the zeros we read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple, cast

from headrace import errors
from headrace.log.embedded import live as shared
from headrace.log.embedded.checkpoint import Checkpoint, file_range, unsealed
from headrace.log.embedded.format import (
    CHANGES_CONTROL,
    CHECKPOINT,
    FORMAT_VERSION,
    Record,
    address_of,
    checksum,
    place_of,
)
from headrace.log.embedded.frozen import Frozen
from headrace.log.embedded.journal import MARKER, Journal
from headrace.log.embedded.live import Tail
from headrace.log.embedded.system import EVERYBODY, System, os_errors
from headrace.log.embedded.witness import read_witness
from headrace.model.fold import ControlState
from headrace.settings import LogSettings

FORMAT_FILE = "headrace.json"
FOLDERS = ("locks", "live", "journal", "pieces", "counters", "sealed")


def open_journal(system: System, folder: str, settings: LogSettings, *, create: bool) -> Journal:
    """Open the log in `folder`, made if it is not there and `create`; recovered if need be."""
    with os_errors("opening the log", folder):
        system.check_folder(folder)
        try:
            names = system.listdir(folder)
        except NotADirectoryError:
            fact = f"{folder} is a file, or in one, not a folder"
            raise errors.NotALog(fact, place=folder) from None
    foreign = [name for name in names if name not in (*FOLDERS, FORMAT_FILE, f"{FORMAT_FILE}.new")]
    if FORMAT_FILE not in names and (foreign or not create):
        found = f"other names, such as '{names[0]}'" if names else "nothing"
        raise errors.NotALog(f"{folder} is not a log: it holds {found}", place=folder)
    try:
        return _opened(system, folder, settings, made=FORMAT_FILE in names)
    except (errors.DiskFull, errors.ReadOnlyDisk) as error:
        if FORMAT_FILE not in names:
            raise
        with os_errors("opening the log", folder):
            return _frozen(system, folder, settings, error)


def _opened(system: System, folder: str, settings: LogSettings, *, made: bool) -> Journal:
    with os_errors("opening the log", folder):
        if made:
            for name in FOLDERS:
                system.mkdir(f"{folder}/{name}")
            journal = Journal(system, folder, read_format(system, folder), settings)
        else:
            journal = _make(system, folder, settings)
    try:
        _make_believable(journal)
        journal.refresh_control()
    except BaseException:
        journal.close()
        raise
    return journal


def _make_believable(journal: Journal) -> None:
    live, wait = journal.live, journal.settings.lock_timeout_seconds
    if not live.believed(journal.log_id) or live.words[shared.POISONED]:
        journal.append_lock.acquire(wait)
        try:
            journal.sync_lock.acquire(wait)
            try:
                if not live.believed(journal.log_id) or live.words[shared.POISONED]:
                    with os_errors("recovering the log", journal.folder):
                        recover(journal)
            finally:
                journal.sync_lock.release(EVERYBODY)
        finally:
            journal.append_lock.release()
    elif not live.words[shared.DAMAGED] and journal.append_lock.try_acquire():
        try:
            journal.catch_up()
        finally:
            journal.append_lock.release()
    if not live.words[shared.DAMAGED]:
        tail = live.tail()
        journal.sync(tail.end, tail.position)  # for a writer that died before it could


# -- making a log -------------------------------------------------------------------------------


def read_format(system: System, folder: str) -> bytes:
    """The log's id, after checking that this program can read its format."""
    path = f"{folder}/{FORMAT_FILE}"
    try:
        file = system.open(path)
    except (FileNotFoundError, NotADirectoryError):
        raise errors.NotALog(
            f"{folder} is not a log: it has no {FORMAT_FILE}", place=folder
        ) from None
    data = file.pread(4096, 0)
    file.close()
    version = 0
    try:
        content = json.loads(data)
        version, log_id = int(content["format"]), bytes.fromhex(content["log"])
        intact = content["checksum"] == f"{checksum(f'{version} {log_id.hex()}'.encode()):016x}"
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        newer = version > FORMAT_VERSION
        fix = "put the file back from a backup; every record of the journal names the log id too"
        raise errors.LogDamaged(
            f"{FORMAT_FILE} {f'names format {version}, and ' if newer else ''}does not match its"
            " checksum",
            place=path,
            fix=f"use the newer Headrace that wrote it, if one did; else {fix}" if newer else fix,
            file=path,
            offset=0,
            expected="format, log and their checksum",
            found=data[:80].decode(errors="replace"),
        )
    if version > FORMAT_VERSION:
        raise errors.NewerFormat(
            f"this log has format {version}, this program reads up to {FORMAT_VERSION}", place=path
        )
    return log_id


def _make(system: System, folder: str, settings: LogSettings) -> Journal:
    """Make a log; it exists once its format file does, which is written last."""
    parents = [folder.rpartition("/")[0] or "/"]
    while parents[0] != "/" and not system.listdir(parents[0]):
        parents.insert(0, parents[0].rpartition("/")[0] or "/")
    for name in ("", *FOLDERS):
        system.mkdir(f"{folder}/{name}")
    log_id = system.random(16)
    journal = Journal(system, folder, log_id, settings)
    journal.append_lock.acquire(settings.lock_timeout_seconds)
    try:
        if FORMAT_FILE in system.listdir(folder):  # somebody else was first
            return Journal(system, folder, read_format(system, folder), settings)
        journal.live.begin()
        tail = Tail(received=system.now_us())
        tail = journal.begin_file(
            1, tail, Checkpoint(ControlState()), size=settings.journal_bytes_first
        )
        journal.live.publish(tail)
        journal.publish_synced(tail)
        content = {
            "format": FORMAT_VERSION,
            "log": log_id.hex(),
            "checksum": f"{checksum(f'{FORMAT_VERSION} {log_id.hex()}'.encode()):016x}",
        }
        new = f"{folder}/{FORMAT_FILE}.new"
        file = system.create(new, 0)
        file.pwritev([json.dumps(content, indent=2).encode() + b"\n"], 0)
        file.fdatasync()
        file.close()
        system.fsync_dir(folder)  # the folders made above: what the format file promises
        system.rename(new, f"{folder}/{FORMAT_FILE}")
        system.fsync_dir(folder)
        for made in reversed(parents):
            system.fsync_dir(made)
        journal.live.finish(log_id)
    finally:
        journal.append_lock.release()
    return journal


# -- after a boot, or a failed sync ----------------------------------------------------------------


class Found(NamedTuple):
    """What the disk holds of the newest file."""

    numbers: list[int]
    newest: int
    first: Record
    """Its checkpoint."""
    records: list[Record]
    """What follows and chains, up to the first record that is not whole."""
    synced: int
    """All below this address was on the disk once."""
    damaged: int | None


def _survey(journal: Journal, synced: int, *, others: bool = False) -> Found:
    """Look at the newest file. With `others` who append meanwhile, only `synced` is believed."""
    files = journal.files
    numbers = files.numbers()
    newest, first = _newest_checkpoint(journal, numbers)
    records = list(_chain(journal, first))
    end = records[-1].end if records else first.end
    damaged = next((address_of(n, 0) for n in numbers if n > newest), None)
    if not others:
        survivors = [] if damaged is not None else files.found_after(end)
        witness = read_witness(journal.system, journal.folder, journal.log_id)
        headers = (first, *records, *survivors)
        synced = max([synced, witness, *(record.synced for record in headers)])
    if damaged is None and synced > end:
        lost = place_of(synced)[0]
        damaged = end if lost == newest else address_of(lost, 0)
    if damaged is None:
        torn = (i for i, r in enumerate(records) if r.end > synced and not files.body_intact(r))
        records = records[: next(torn, len(records))]
    return Found(numbers, newest, first, records, synced, damaged)


def recover(journal: Journal) -> None:
    """Rebuild shared memory from the journal and go on in a new file (both locks held)."""
    files, live = journal.files, journal.live
    poisoned = MARKER in journal.system.listdir(journal.folder) or live.words[shared.POISONED] != 0
    synced = 0
    if live.believed(journal.log_id):
        poisoned, synced = True, live.words[shared.SYNCED]
    numbers, newest, first, records, synced, damaged = _survey(journal, synced)
    if damaged is not None:
        _open_damaged(journal, first, records, damaged)
        return
    kept = [record for record in records if not poisoned or record.end <= synced]
    carried = records[len(kept) :]
    if not poisoned:
        file, _ = files.file(newest)
        file.fdatasync()  # the same boot is possible: a copied folder, a deleted `live`
    tail, before, control = _rebuild(journal, first, kept)
    slots = control.slots
    ends = live.ends(slots)[:slots].tolist()
    cut = "poisoned" if poisoned else "reboot"
    closed = file_range(newest, tail.end, first, tail, before, ends, control, cut)
    checkpoint = Checkpoint(
        control=control,
        ends=ends,
        counters=journal.counter_runs.write(live, before.counters, newest),
        files=[*unsealed(before.files, control), closed],
        catalog=tail.catalog,
    )
    tail = journal.begin_file(
        numbers[-1] + 1,
        tail,
        checkpoint,
        size=journal.settings.journal_bytes_first,
        carried=[files.bytes_of(record) for record in carried],
    )
    live.publish(tail)
    journal.publish_synced(tail)
    journal.system.unlink(f"{journal.folder}/{MARKER}")
    live.words[shared.POISONED] = 0
    live.finish(journal.log_id)
    journal.forget()


def _frozen(
    system: System, folder: str, settings: LogSettings, error: errors.HeadraceError
) -> Journal:
    """Open for reading only what cannot be written, changing nothing on the disk.

    After a boot all that can be read is on the disk, and the recovery to come keeps it. Where
    others have the log open in this boot, their synced end is the limit, as it is for all readers;
    behind a failed sync it is the last one that is known.
    """
    log_id = read_format(system, folder)
    journal = Journal(cast("System", Frozen(system)), folder, log_id, settings)
    limit, poisoned = _said_by_others(system, folder, log_id)
    found = _survey(journal, limit or 0, others=limit is not None)
    if found.damaged is not None:
        _open_damaged(journal, found.first, found.records, found.damaged)
    else:
        bound = limit is not None or poisoned
        kept = [r for r in found.records if not bound or r.end <= found.synced]
        tail, _, _ = _rebuild(journal, found.first, kept)
        journal.publish_synced(tail)
        journal.live.finish(log_id)
    journal.refused = error
    error.fix = f"{error.fix}; then open the log again: until then this handle only reads"
    journal.refresh_control()
    return journal


def _said_by_others(system: System, folder: str, log_id: bytes) -> tuple[int | None, bool]:
    """The synced end in shared memory, if it was made in this boot; and whether a sync failed."""
    poisoned = MARKER in system.listdir(folder)
    try:
        file = system.open(f"{folder}/live/words")
    except FileNotFoundError:
        return None, poisoned
    data = file.pread(shared.WORDS_BYTES, 0).ljust(shared.WORDS_BYTES, b"\0")
    file.close()
    words = memoryview(data).cast("Q")
    boot, log = words[shared.BOOT_0 : shared.BOOT_1 + 1], words[shared.LOG_0 : shared.LOG_1 + 1]
    current = bytes(boot) == system.boot_id() and bytes(log) == log_id
    limit = words[shared.SYNCED] if current and words[shared.READY] == shared.MAGIC else None
    return limit, poisoned or words[shared.POISONED] != 0


def _newest_checkpoint(journal: Journal, numbers: list[int]) -> tuple[int, Record]:
    """The newest file that begins with a whole checkpoint; a newer one is damaged."""
    for number in reversed(numbers):
        record = journal.files.record(address_of(number, 0))
        if record is not None and record.kind == CHECKPOINT:
            return number, record
    if numbers:
        raise journal.files.damage(address_of(numbers[-1], 0))
    raise errors.LogDamaged(
        "the log has no journal file",
        place=journal.files.folder,
        file=journal.files.folder,
        offset=0,
        expected="at least one journal file",
        found="none",
    )


def _chain(journal: Journal, first: Record) -> Iterator[Record]:
    """The records after the checkpoint, header and meta intact, as far as they chain."""
    previous, address = first.checksum, first.end
    while True:
        record = journal.files.record(address)
        if record is None or record.previous != previous:
            return
        yield record
        previous, address = record.checksum, record.end


def _rebuild(
    journal: Journal, first: Record, records: list[Record]
) -> tuple[Tail, Checkpoint, ControlState]:
    """Shared memory as of the last of these records."""
    live = journal.live
    before = Checkpoint.from_json(first.control())
    live.begin()
    live.ends(len(before.ends))[: len(before.ends)] = before.ends
    tail = Tail(
        end=first.end,
        position=first.position,
        checksum=first.checksum,
        control=first.address,
        catalog=before.catalog,
        received=first.received,
        entries=1,
        marked=first.end,
        zeroed=first.end,
    )
    live.publish(tail)
    live.load(journal.counter_runs.read(before.counters))
    control = before.control.copy()
    for record in records:
        tail = journal.fold(record, tail)
        if record.flags & CHANGES_CONTROL:
            control.apply(record.control())
    return tail, before, control


def _open_damaged(journal: Journal, first: Record, records: list[Record], damaged: int) -> None:
    """Show what is intact, refuse appends, change nothing on the disk."""
    tail, _, _ = _rebuild(journal, first, records)
    last = records[-1] if records else first
    if place_of(damaged)[0] in journal.files.numbers():
        for record in journal.files.found_after(damaged):
            last = record
    tail = tail._replace(end=last.end, position=last.position, checksum=last.checksum)
    journal.live.publish(tail)
    journal.publish_synced(tail)
    journal.live.words[shared.DAMAGED] = damaged
    journal.live.finish(journal.log_id)
