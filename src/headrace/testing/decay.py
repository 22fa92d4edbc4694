"""Damage done to a log at rest: it must be noticed, with its place, or do no harm.

`aged` makes a log with all kinds of files in it (closed and current journal files, pieces, counter
runs, sealed and archived files), an older version of it, and one that went another way from there.
`examine` spoils one file, opens the log after a reboot, and says how it was noticed:

- `open`, `read`, `append`: by an error that names the file;
- `check`: only `headrace log check` notices, and names the file; nothing that was read is wrong;
- `harmless`: everything reads as before, and goes on;
- anything else is a violation: rows wrong, missing or doubled without a word.

What it cannot catch: damage to several files at once that agrees with itself (a whole older
folder), and damage to the end of a log that was neither marked nor closed: it looks like a torn
tail. A file of a copy that went another way is noticed by the chain where it meets the next one;
a reader has seen its rows by then.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from unittest import mock

import numpy as np
from pyarrow import fs

from headrace import errors
from headrace.log.embedded import archive
from headrace.log.embedded.archive import FOLDER as SEALED
from headrace.log.embedded.archive import open_sealed
from headrace.log.embedded.check import check, walk_records
from headrace.log.embedded.format import ENTRY, file_name, place_of
from headrace.log.embedded.log import EmbeddedLog
from headrace.testing.damage import Damage, damages
from headrace.testing.disk import SimulatedFile, SimulatedMachine
from headrace.testing.oplog import Image
from headrace.testing.promises import Content
from headrace.testing.simulation import FOLDER, SCHEMA, Run, content_of, new_machine, take
from headrace.testing.verdicts import verdict_on

NEXT_BOOT = b"the next boot..."
ARCHIVE = "archive"
"""Where the oldest files of a topic go: a real folder, for Arrow reads it past the machine."""
OPENED, READ, APPENDED, CHECKED, HARMLESS = "open", "read", "append", "check", "harmless"


class Shelf:
    """A folder for an archive, gone when nobody has it any more."""

    def __init__(self) -> None:
        """It is empty."""
        self.name = tempfile.mkdtemp(prefix="headrace-archive-")
        weakref.finalize(self, shutil.rmtree, self.name)


@dataclass(slots=True)
class Aged:
    """A log to spoil."""

    image: Image
    content: Content
    versions: dict[str, dict[str, bytes]]
    attempts_in: dict[str, set[int]]
    """Of each file the attempts that have something in it."""
    archive: Shelf

    def damages(self, rng: Random, each: int = 2) -> Iterator[Damage]:
        """Ways to spoil it."""
        names = sorted(Path(self.archive.name).glob(f"{ARCHIVE}/*"))
        archived = {f"{ARCHIVE}/{file.name}": file.read_bytes() for file in names}
        files = {**files_of(self.image), **archived}
        return damages(files, rng, each=each, others=self.versions)


@contextlib.contextmanager
def _archive_in(folder: str) -> Iterator[None]:
    there = fs.SubTreeFileSystem(folder, fs.LocalFileSystem())
    with mock.patch.object(archive, "_filesystem", lambda at: (there, at.lstrip("/"))):
        yield


def aged(seed: int, rounds: tuple[int, int] = (3, 5), *, sealed: bool = True) -> Aged:
    """Make a log with all kinds of files, in so many rounds before and after a boot."""
    shelf = Shelf()
    with _archive_in(shelf.name):
        older = _lived(new_machine(), seed, rounds[0], sealed=sealed)
        second, third = (SimulatedMachine(older, boot=b"boot %d".ljust(16) % n) for n in (2, 3))
        one = _lived(second, seed, rounds[1], sealed=sealed)
        two = _lived(third, -seed, rounds[1], sealed=sealed)
        look = Run(SimulatedMachine(one, boot=NEXT_BOOT), seed)
        log = look.open()
        content = content_of(log)
        attempts_in = _attempts_in(one, content) | _attempts_sealed(log, content)
        look.end()
    versions = {"older": files_of(older), "diverged": files_of(two)}
    return Aged(one, content, versions, attempts_in, shelf)


def _attempts_sealed(log: EmbeddedLog, content: Content) -> dict[str, set[int]]:
    attempts = {position: attempt for attempt, position in content.positions.items()}
    found: dict[str, set[int]] = {}
    for file in log.journal.control.sealed.files.values():
        reader = open_sealed(log.journal.system, FOLDER, file)
        positions = {at for group in reader.groups() for at in group.spans["position"].tolist()}
        found[f"{ARCHIVE if file.archive else SEALED}/{file.name}"] = {
            attempts[at] for at in positions if at in attempts
        }
    return found


def _attempts_in(image: Image, content: Content) -> dict[str, set[int]]:
    attempts = {position: attempt for attempt, position in content.positions.items()}
    found: dict[str, set[int]] = {}
    for record in walk_records(SimulatedMachine(image).process(), FOLDER):
        attempt = attempts.get(record.position)
        if record.kind == ENTRY and attempt is not None:
            names = [f"pieces/{name}" for name in record.control().get("pieces", ())]
            for name in (f"journal/{file_name(place_of(record.address)[0])}", *names):
                found.setdefault(name, set()).add(attempt)
    return found


def files_of(image: Image) -> dict[str, bytes]:
    """The files of the log in an image, relative to its folder."""
    start = len(FOLDER) + 1
    return {path[start:]: content for path, (_, content) in sorted(image.files.items())}


def _lived(machine: SimulatedMachine, seed: int, rounds: int, *, sealed: bool) -> Image:
    """Append to the log on a machine, close it, and keep its disk.

    The sign of the seed decides what is written, its value how much: two lives of the same length
    have records at the same places.
    """
    run = Run(machine, abs(seed))
    run.numbered_from(100 * rounds * (1 if seed > 0 else 2))
    log = run.open(inline_bytes_max=6000, chunk_bytes=3000)
    run.make_topics(log)
    if sealed and "old" not in {topic.name for topic in log.topics()}:
        log.create_topic("old", SCHEMA, key="k", partitions=2)
        log.set_topic("old", retention_bytes=1, archive=f"/{ARCHIVE}")
    for number in range(rounds):
        if sealed:
            run.append(log, {"old": 3}, pad=200)
        run.append(log, {"orders": 3, "audit": 1}, expect={"c0": log.counter("c0")})
        run.append(log, {"orders": 4}, pad=1200)
        run.append(
            log, {"audit": 2}, pad=500, expect={f"c{number % 3}": log.counter(f"c{number % 3}")}
        )
        run.append(log, {"orders": 6}, pad=1500)
        run.append(log, {"audit": 3}, pad=300, stage=True)
        if sealed and number == (rounds - 1) // 2:  # of two rounds the second stays in the journal
            log.keeper().turn(close=True)
    log.close()
    run.end()
    return machine.image()


def examine(log: Aged, damage: Damage) -> tuple[str, str]:
    """How the damage was noticed, and what is wrong if that is not good enough."""
    files, path = dict(log.image.files), f"{FOLDER}/{damage.file}"
    archived = Path(log.archive.name, damage.file)
    in_archive = damage.file.startswith(f"{ARCHIVE}/")
    number, old = (0, archived.read_bytes()) if in_archive else files.pop(path)
    new = damage.change(old)
    if in_archive:
        _put(archived, new)
    elif new is not None:
        files[path] = (number, new)
    machine = SimulatedMachine(Image(log.image.folders, files), boot=NEXT_BOOT)
    machine.recorded = False
    run = Run(machine, 0)
    try:
        with _archive_in(log.archive.name):
            return _examine(run, log, damage)
    except Exception as error:  # noqa: BLE001 - only errors of the catalogue are good enough
        return "", verdict_on(error)
    finally:
        run.end()
        if in_archive:
            _put(archived, old)


class Unread:
    """Which bytes of a log nobody reads who opens it, reads all, appends, checks and reads again.

    All of that is the same each time: what it does not look at, it cannot notice. So damage to
    these bytes only is harmless, and `examine` need not be asked.
    """

    def __init__(self, log: Aged) -> None:
        """Do all of it once, to the log as it is."""
        self._log = log
        self._read = {
            path: np.full(len(content), "/live/" in path)  # a map is not asked what is read of it
            for path, (_, content) in log.image.files.items()
        }
        original = SimulatedFile.pread

        def pread(file: SimulatedFile, length: int, offset: int) -> bytes:
            if file.path in self._read:
                self._read[file.path][offset : offset + length] = True
            return original(file, length, offset)

        with mock.patch.object(SimulatedFile, "pread", pread):
            how, wrong = examine(log, Damage("headrace.json", "nothing", lambda content: content))
        if (how, wrong) != (HARMLESS, ""):
            raise AssertionError(f"a log with no damage: {how} {wrong}")

    def covers(self, damage: Damage) -> bool:
        """Whether the damage changes only what is not read, and no length."""
        path = f"{FOLDER}/{damage.file}"
        if path not in self._read:
            return False
        old = self._log.image.files[path][1]
        new = damage.change(old)
        if new is None or len(new) != len(old):
            return False
        changed = np.frombuffer(old, np.uint8) != np.frombuffer(new, np.uint8)
        return not (changed & self._read[path]).any()


def _put(file: Path, content: bytes | None) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)


def _examine(run: Run, aged_log: Aged, damage: Damage) -> tuple[str, str]:
    original = aged_log.content
    try:
        log = run.open()
    except errors.HeadraceError as error:
        return OPENED, _unnamed(error, damage)
    found = Content([], {}, 0)
    try:
        content_of(log, found)
    except errors.HeadraceError as error:
        if "diverged" in damage.title:
            return READ, ""
        wrong = _not_from(found, original) or _rest(log, error, found, original, original.topics)
        sealed = damage.file.startswith((f"{SEALED}/", f"{ARCHIVE}/"))
        for topic in original.topics if sealed else ():  # a sealed file is of one topic only
            wrong = wrong or _rest(log, None, found, original, [topic])
        allowed = aged_log.attempts_in.get(damage.file, set())
        lost = {row.attempt for row in set(original.rows) - set(found.rows)}
        few = 1 if "flipped" in damage.title and not sealed else len(allowed)
        if not wrong and (lost - allowed or len(lost) > few):
            wrong = f"intact entries cannot be read any more: attempts {sorted(lost)}"
        return READ, wrong or _unnamed(error, damage)
    if _differs(found, original):
        problems = check(run.machine.process(), FOLDER).problems
        if not problems or _not_from(found, original):
            return "", f"nobody noticed, and it reads otherwise: {_differs(found, original)}"
        return CHECKED, _unnamed(problems[0], damage)
    run.numbered_from(1_000_000)
    attempt = run.append(log, {"orders": 1, "audit": 1})
    if attempt.error:
        return APPENDED, "" if damage.file.rpartition("/")[2] in attempt.error else attempt.error
    problems = check(run.machine.process(), FOLDER).problems
    if problems:
        return CHECKED, _unnamed(problems[0], damage)
    again = content_of(log)
    added = [row for row in again.rows if row.attempt == attempt.number]
    kept = [row for row in again.rows if row.attempt != attempt.number]
    if kept != original.rows or len(added) != 2:
        return "", "appending after it went wrong"
    return HARMLESS, ""


def _unnamed(error: errors.HeadraceError, damage: Damage) -> str:
    """What is wrong with an error as the place of a damage: "" if it names the file."""
    names = (damage.file.rpartition("/")[2], damage.file)
    text = error.render()
    missing = isinstance(error, errors.NotALog)
    return "" if any(name in text for name in names) or missing else f"names another place: {text}"


def _differs(found: Content, original: Content) -> str:
    if found.rows != original.rows:
        lost = len(set(original.rows) - set(found.rows))
        return f"{len(found.rows)} rows of {len(original.rows)}, {lost} of them lost"
    if found.counters != original.counters:
        return f"counters {found.counters}, not {original.counters}"
    if (found.positions, found.topics) != (original.positions, original.topics):
        return "positions or topics"
    return ""


def _not_from(found: Content, original: Content) -> str:
    """Rows that were never written, or are there twice."""
    wrong = set(found.rows) - set(original.rows)
    if wrong:
        return f"a row that was never written: {min(wrong)}"
    if len(set(found.rows)) != len(found.rows):
        return "rows twice"
    return ""


def _rest(
    log: EmbeddedLog, error: errors.HeadraceError | None, found: Content, original: Content,
    topics: Sequence[str],
) -> str:  # fmt: skip
    """Read on behind the damage, as the error says; what is intact must come."""
    resume = 0 if error is None else error.details.get("resume_after")
    for _ in range(100):
        if not isinstance(resume, int):
            break
        rest = Content([], {}, 0)
        try:
            for batch in log.read(topics, after=resume):
                take(batch, rest)
            resume = None
        except errors.HeadraceError as again:
            following = again.details.get("resume_after")
            if following == resume:
                return f"reading on after {resume} does not get further: {again.render()}"
            resume = following
        known = set(found.rows)
        found.rows += [row for row in rest.rows if row not in known]
        wrong = _not_from(rest, original)
        if wrong:
            return f"reading on: {wrong}"
    return ""
