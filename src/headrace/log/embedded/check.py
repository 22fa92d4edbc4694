"""`log check`: read every byte that counts, believe nothing but the files, and say what is wrong.

It does not use shared memory and takes no lock, so it can run beside writers (it looks at what was
there when it began) and on a log that does not open. Verified are: headers and meta against their
checksums, the chain over all files, the rows of every section, in the journal and in pieces, the
offsets (each partition numbered without gap or overlap), conditions against the counters,
positions and times that go forward, checkpoints against what was folded up to them, counter runs;
every row group of every sealed file, and that their offsets fit together.

What lies behind the last record of the newest file is not damage unless some intact record says
that it was synced; it is reported as `torn`, with its place, and does not count as a problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace import errors
from headrace.log.embedded import archive
from headrace.log.embedded.checkpoint import Checkpoint, CounterRuns
from headrace.log.embedded.files import JournalFiles
from headrace.log.embedded.format import (
    CHECKPOINT,
    ENTRY,
    OFFSET_MASK,
    ROLL,
    Record,
    Section,
    address_of,
    checksum,
    place_of,
)
from headrace.log.embedded.live import digest_of
from headrace.log.embedded.pieces import Pieces
from headrace.log.embedded.recovery import read_format
from headrace.log.embedded.sealed import SealedReader
from headrace.log.embedded.system import System
from headrace.log.embedded.witness import read_witness
from headrace.model.fold import ControlState, verdict


@dataclass(slots=True)
class Report:
    """What a check found."""

    folder: str
    files: int = 0
    entries: int = 0
    rows: int = 0
    bytes: int = 0
    pieces: int = 0
    sealed: int = 0
    position: int = 0
    problems: list[errors.LogDamaged] = field(default_factory=list)
    torn: str = ""
    """Where the newest file stops being a chain of whole records, if not in zeros."""
    orphans: list[str] = field(default_factory=list)
    """Pieces and sealed files that no entry names: nobody reads them."""

    @property
    def ok(self) -> bool:
        """Whether everything that counts is intact."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "ok": self.ok,
            "folder": self.folder,
            "files": self.files,
            "entries": self.entries,
            "rows": self.rows,
            "bytes": self.bytes,
            "pieces": self.pieces,
            "sealed": self.sealed,
            "position": self.position,
            "torn": self.torn,
            "orphans": self.orphans,
            "problems": [problem.to_json() for problem in self.problems],
        }


def check(
    system: System, folder: str, progress: Callable[[int, int], None] = lambda done, total: None
) -> Report:
    """Check the log in `folder`; `progress` is told bytes done and bytes in all."""
    return _Check(system, folder, progress).run()


class _Counters(dict[bytes, int]):
    def get(self, name: str, default: int = 0) -> int:  # type: ignore[override]
        return super().get(digest_of(name), default)

    def put(self, name: str, value: int) -> None:
        self[digest_of(name)] = value


class _Check:
    def __init__(self, system: System, folder: str, progress: Callable[[int, int], None]) -> None:
        log_id = read_format(system, folder)
        self.system = system
        self.files = JournalFiles(system, folder, log_id)
        self.runs = CounterRuns(system, folder, log_id)
        self.pieces = Pieces(system, folder, log_id)
        self.progress = progress
        self.report = Report(folder)
        self.control = ControlState()
        self.counters = _Counters()
        self.counted = True
        """Whether the counters are known: not behind files that were deleted."""
        self.ends: dict[int, int] = {}
        self.named: set[str] = set()
        self.position = self.received = 0
        self.done = self.total = self.unsynced = 0

    def run(self) -> Report:
        newest = self._newest()
        if newest is not None:
            closed = {f.number: address_of(f.number, f.end) for f in newest.files}
            last = max(n for n in self.files.numbers() if self._checkpoint(n) is not None)
            closed[last] = address_of(last, self.files.file(last)[1])
            staged = self.system.listdir(self.pieces.folder)
            self.total = sum(end & OFFSET_MASK for end in closed.values())
            self.total += sum(self.pieces.size(name) for name in staged)
            self.total += sum(one.bytes for one in newest.control.sealed.files.values())
            self.unsynced = self._known_synced(last)
            if place_of(self.unsynced)[0] > last:
                self._problem(self.files.damage(address_of(place_of(self.unsynced)[0], 0)))
            previous: int | None = 0
            if min(closed) > 1:
                previous = None
                self._begin(min(closed))
            for number, end in sorted(closed.items()):
                previous = self._file(number, end, previous, last=number == last)
            self.report.orphans = sorted(set(staged) - self.named)
            self._sealed_files()
        self.files.close()
        self.progress(self.total, self.total)
        return self.report

    def _begin(self, number: int) -> None:
        """Believe the first checkpoint that there is: what it sums up is sealed, or gone."""
        found = self._checkpoint(number)
        if found is None:
            return
        self.control, self.ends = found.control.copy(), dict(enumerate(found.ends))
        self.counted = False

    def _sealed_files(self) -> None:
        """Every sealed file that the last entry names, and how their offsets go on."""
        folder, sealed = self.report.folder, self.control.sealed
        local = self.system.listdir(f"{folder}/{archive.FOLDER}")
        self.report.orphans += sorted(set(local) - set(sealed.files))
        for topic in sorted({file.topic for file in sealed.files.values()}):
            ends: list[int] | None = None
            for file in sealed.of(topic):
                self.report.sealed += 1
                try:
                    ends = self._sealed_file(archive.open_sealed(self.system, folder, file), ends)
                except errors.LogDamaged as damage:
                    self._problem(damage)
                    ends = None
                self.report.bytes += file.bytes
                self.done += file.bytes
                self.progress(self.done, self.total)

    def _sealed_file(self, reader: SealedReader, ends: list[int] | None) -> list[int]:
        file = reader.described
        if ends is not None and any(a > b for a, b in zip(ends, file.starts, strict=True)):
            self._problem(_wrong(file.name, 0, f"partition ends {ends}", f"{list(file.starts)}"))
        at, rows, position = list(file.starts), 0, 0
        for group in reader.groups():
            reader.verify(group)
            for partition, count, base in group.runs.tolist():
                gap = base != at[partition] and not file.compacted
                if base < at[partition] or gap:
                    what = f"offset {at[partition]} in partition {partition}"
                    self._problem(_wrong(file.name, 0, what, f"{base}"))
                at[partition] = base + count
            rows += int(group.spans["rows"].sum())
            positions = group.spans["position"]
            if int(positions[0]) < position or (positions[1:] < positions[:-1]).any():
                self._problem(_wrong(file.name, 0, "positions that go forward", "others"))
            position = int(positions[-1])
        if (rows, position) != (file.rows, file.through):
            found = f"{rows} rows through {position}"
            self._problem(_wrong(file.name, 0, f"{file.rows} rows through {file.through}", found))
        reader.close()
        self.report.rows += rows
        return at

    def _newest(self) -> Checkpoint | None:
        numbers = self.files.numbers()
        found: Checkpoint | None = None
        for number in reversed(numbers):
            found = self._checkpoint(number)
            if found is not None:
                break
            self._problem(self.files.damage(address_of(number, 0)))
        if not numbers:
            self._problem(_wrong(self.files.folder, 0, "a journal file", "none"))
        return found

    def _checkpoint(self, number: int) -> Checkpoint | None:
        record = self.files.record(address_of(number, 0))
        if record is None or record.kind != CHECKPOINT:
            return None
        return Checkpoint.from_json(record.control())

    def _problem(self, problem: errors.LogDamaged) -> None:
        if str(problem) not in map(str, self.report.problems):  # two checkpoints may name one run
            self.report.problems.append(problem)

    def _file(self, number: int, end: int, previous: int | None, *, last: bool) -> int | None:
        """Check one file up to `end`; the checksum of its last record, None if it is not known."""
        try:
            size = self.files.file(number)[1]
        except errors.HeadraceError as error:
            self._problem(_wrong(self.files.path(number), 0, "a journal file", error.fact))
            return None
        self.report.files += 1
        end = min(end, address_of(number, size))
        start, kind = address_of(number, 0), 0
        while start < end:
            try:
                walk = self.files.walk(start, end, previous=previous, bodies=True)
                for record, data, at in walk:
                    if last and record.end > self.unsynced and not self.files.body_intact(record):
                        self._note_torn(record.address)
                        return record.previous
                    self._record(record, data, at)
                    previous, start, kind = record.checksum, record.end, record.kind
            except errors.LogDamaged as damage:
                found = next(self.files.found_after(start + 64), None)
                if last and start >= self.unsynced:
                    self._note_torn(start)
                    break
                # Behind a roll the file is whole: what is gone is the next one.
                gone = kind == ROLL
                self._problem(self.files.damage(address_of(number + 1, 0)) if gone else damage)
                previous = None
                start = found.address if found is not None else end
        self.done += end & OFFSET_MASK
        return previous

    def _known_synced(self, last: int) -> int:
        """The highest synced end that anything intact names: what lies above may be torn."""
        witness = read_witness(self.system, self.report.folder, self.files.log_id)
        found = self.files.found_after(address_of(last, 0))
        return max([witness, *(record.synced for record in found)])

    def _note_torn(self, address: int) -> None:
        number, offset = place_of(address)
        file, _ = self.files.file(number)
        if any(file.pread(128, offset)):
            self.report.torn = f"{self.files.path(number)}, byte {offset}"

    # -- one record -------------------------------------------------------------------------

    def _record(self, record: Record, data: bytes, at: int) -> None:
        report = self.report
        report.bytes += record.length
        self.progress(self.done + (record.address & OFFSET_MASK), self.total)
        if record.received < self.received:
            self._wrong_at(record, f"a time not before {self.received}", f"{record.received}")
        self.received = max(self.received, record.received)
        if record.kind == CHECKPOINT:
            self._check_checkpoint(record)
            return
        if record.kind != ENTRY:
            return
        if record.position <= self.position:
            self._wrong_at(record, f"a position above {self.position}", f"{record.position}")
        self.position = report.position = record.position
        report.entries += 1
        control = record.control()
        rejection = verdict(self.counters, control.get("expect", {}), control.get("require", {}))
        if rejection is not None and self.counted:
            self._wrong_at(
                record,
                f"counter '{rejection.name}' at {rejection.expected}",
                f"{rejection.found}",
            )
        for name, value in control.get("expect", {}).items():
            self.counters.put(name, value + 1)
        self.control.apply(control)
        for section in record.sections():
            self._section(record, section, control, data, at)

    def _section(
        self, record: Record, section: Section, control: dict[str, Any], data: bytes, at: int
    ) -> None:
        self.report.rows += section.rows
        for partition, rows, base in section.runs.tolist():
            slot = section.slot + partition
            if base != self.ends.get(slot, 0):
                self._wrong_at(
                    record,
                    f"offset {self.ends.get(slot, 0)} in partition {partition}"
                    f" of topic {section.topic}",
                    f"{base}",
                )
            self.ends[slot] = base + rows
        if section.piece == 0:
            start = at + record.body_offset + section.offset
            rows_data, path = data[start : start + section.length], ""
        else:
            name = control["pieces"][section.piece - 1]
            path = self.pieces.path(name)
            if name not in self.named:
                self.named.add(name)
                self.report.pieces += 1
            try:
                file = self.pieces.open(name, record.position)
            except errors.LogDamaged as damage:
                self._problem(damage)
                return
            rows_data = file.pread(section.length, section.offset)
            file.close()
            self.report.bytes += section.length
            self.done += section.length
        found = checksum(rows_data)
        if found != section.checksum:
            self._problem(self.files.rows_damage(record, section, found, path))

    def _check_checkpoint(self, record: Record) -> None:
        checkpoint = Checkpoint.from_json(record.control())
        known = [self.ends.get(slot, 0) for slot in range(len(checkpoint.ends))]
        if self.report.problems:  # what lies before is not known: go on from here
            self.ends = dict(enumerate(checkpoint.ends))
            self.control = checkpoint.control
        elif known != checkpoint.ends:
            self._wrong_at(record, f"partition ends {known}", f"{checkpoint.ends}")
        if self.control.to_json() != checkpoint.control.to_json():
            self._wrong_at(record, "the control state of the entries before", "another")
            self.control = checkpoint.control
        if place_of(record.address)[0] >= self.files.numbers()[-1] - 1:
            self._check_runs(record, checkpoint)

    def _check_runs(self, record: Record, checkpoint: Checkpoint) -> None:
        """Counter runs are kept for the two newest checkpoints only."""
        try:
            slots = self.runs.read(checkpoint.counters)
        except errors.LogDamaged as damage:
            self._problem(damage)
            return
        found = {
            high.to_bytes(8, "little") + low.to_bytes(8, "little"): value
            for high, low, value, _ in slots.tolist()
        }
        if not self.report.problems and self.counted and found != dict(self.counters):
            self._wrong_at(record, f"{len(self.counters)} counters as folded", f"{len(found)}")
        self.counters.clear()
        self.counters.update(found)
        self.counted = True

    def _wrong_at(self, record: Record, expected: str, found: str) -> None:
        number, offset = place_of(record.address)
        self._problem(_wrong(self.files.path(number), offset, expected, found))


def _wrong(path: str, offset: int, expected: str, found: str) -> errors.LogDamaged:
    return errors.LogDamaged(
        f"expected {expected}, found {found}",
        place=f"{path}, byte {offset}",
        file=path,
        offset=offset,
        expected=expected,
        found=found,
    )


def walk_records(system: System, folder: str) -> Iterator[Record]:
    """Every intact record of a log in order, for those who look inside."""
    files = JournalFiles(system, folder, read_format(system, folder))
    for number in files.numbers():
        start = address_of(number, 0)
        try:
            for record, _, _ in files.walk(start, address_of(number, files.file(number)[1])):
                yield record
        except errors.LogDamaged:
            continue
