"""Reading records out of journal files: one at a time, or as a verified walk.

Everybody who reads the journal reads it here: appenders that fold what others left, recovery,
readers, `check`. A record is handed out only if header and meta match their checksum; a walk also
checks the chain. What does not match is `LogDamaged`, with file, place, expected and found; whether
it is damage or just the torn end of the log is for the caller to say.
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Iterator

import pyarrow as pa

from headrace import errors
from headrace.log.embedded.format import (
    ALIGNMENT,
    HEADER_BYTES,
    MAGIC,
    OFFSET_MASK,
    Record,
    Section,
    address_of,
    checksum,
    file_name,
    place_of,
)
from headrace.log.embedded.system import File, System, os_errors

WINDOW_BYTES = 2 << 20
HOP_BYTES = 64 << 10
OPEN_FILES_MAX = 32
_NOTHING = pa.py_buffer(b"")


class JournalFiles:
    """The journal folder: files by number, kept open while they are used."""

    def __init__(self, system: System, folder: str, log_id: bytes) -> None:
        """`folder` is the log's folder; the journal is below it."""
        self._system = system
        self.folder = f"{folder}/journal"
        self.log_id = log_id
        self._open: dict[int, tuple[File, int]] = {}
        self._guard = threading.Lock()

    def path(self, number: int) -> str:
        """Where a journal file is."""
        return f"{self.folder}/{file_name(number)}"

    def numbers(self) -> list[int]:
        """The numbers of the files that are there, ascending."""
        names = (re.fullmatch(r"(\d{8})\.log", name) for name in self._system.listdir(self.folder))
        return sorted(int(match[1]) for match in names if match)

    def file(self, number: int) -> tuple[File, int]:
        """An open file and its size (journal files never change their size)."""
        found = self._open.get(number)
        if found is None:
            with self._guard:
                path = self.path(number)
                try:
                    with os_errors("opening a journal file", path):
                        file = self._system.open(path)
                except errors.IoFailed as error:
                    if error.details["errno"] != errno.ENOENT:
                        raise
                    raise self._missing(number) from None
                found = self._open[number] = (file, file.size())
                while len(self._open) > OPEN_FILES_MAX:
                    del self._open[next(iter(self._open))]  # closed when nobody uses it any more
        return found

    def forget_before(self, number: int) -> None:
        """Let go of files that are not read any more: they may be deleted, which frees space."""
        with self._guard:
            for old in [one for one in self._open if one < number]:
                del self._open[old]

    def close(self) -> None:
        """Forget them all; one that a thread reads right now is closed when it has done so."""
        with self._guard:
            self._open.clear()

    # -- one record -------------------------------------------------------------------------

    def record(self, address: int) -> Record | None:
        """The record at `address`, header and meta verified; None if there is no whole one."""
        number, offset = place_of(address)
        file, size = self.file(number)
        data = file.pread(4096, offset)
        return self._decode(file, size, address, data, 0)

    def _decode(
        self, file: File, size: int, address: int, data: bytes | pa.Buffer, at: int
    ) -> Record | None:
        if len(data) - at < HEADER_BYTES:
            return None
        record = Record(data, at)
        if not record.fits(address, self.log_id, size):
            return None
        end = at + HEADER_BYTES + record.meta_length
        if end > len(data):
            data = file.pread(HEADER_BYTES + record.meta_length, address & OFFSET_MASK)
            at, end = 0, len(data)
        view = memoryview(data)[at:end]
        return record if record.take_meta(view) else None

    def bytes_of(self, record: Record) -> bytes:
        """A record as it stands in its file."""
        number, offset = place_of(record.address)
        return self.file(number)[0].pread(record.length, offset)

    def body_intact(self, record: Record) -> bool:
        """Whether the rows that stand in the record itself match their checksums."""
        number, offset = place_of(record.address)
        file, _ = self.file(number)
        for section in record.sections():
            if section.piece == 0 and section.length:
                start = offset + record.body_offset + section.offset
                if checksum(file.pread(section.length, start)) != section.checksum:
                    return False
        return True

    def whole(self, address: int, previous: int) -> Record | None:
        """The record at `address` if it is whole and follows the one with checksum `previous`."""
        record = self.record(address)
        if record is None or record.previous != previous or not self.body_intact(record):
            return None
        return record

    # -- walks ------------------------------------------------------------------------------

    def walk(
        self, start: int, end: int, *, previous: int | None = None, bodies: bool = False
    ) -> Iterator[tuple[Record, pa.Buffer, int]]:
        """The records of one file in [start, end): (record, data, its place in data).

        With `bodies`, data holds the whole record. A record that is not intact or does not follow
        the one before it raises `LogDamaged`.
        """
        number, offset = place_of(start)
        stop = end & OFFSET_MASK
        file, size = self.file(number)
        data, base = _NOTHING, offset
        want = WINDOW_BYTES if bodies else HOP_BYTES
        address = start
        while offset < stop:
            at = offset - base
            if at + HEADER_BYTES > data.size:
                data, base, at = file.read(min(want, stop - offset), offset), offset, 0
            record = self._decode(file, size, address, data, at)
            if record is None or (previous is not None and record.previous != previous):
                raise self.damage(address, previous)
            if bodies and at + record.length > data.size:
                data = file.read(max(record.length, min(WINDOW_BYTES, stop - offset)), offset)
                base, at = offset, 0
            yield record, data, at
            if bodies:  # whole records, if they go on like this: none is read twice
                want = record.length * max(1, WINDOW_BYTES // record.length)
            previous = record.checksum
            offset += record.length
            address += record.length

    def found_after(self, address: int) -> Iterator[Record]:
        """Intact headers anywhere in the file behind `address`, in order: survivors of damage."""
        number, offset = place_of(address)
        file, size = self.file(number)
        needle = MAGIC + self.log_id
        overlap = len(needle)
        start = offset
        while start < size:
            data = file.pread(8 << 20, start)
            at = data.find(needle)
            while at >= 0:
                place = start + at
                if place % ALIGNMENT == 0:
                    record = self.record(address_of(number, place))
                    if record is not None:
                        yield record
                at = data.find(needle, at + 1)
            if len(data) <= overlap:
                return
            start += len(data) - overlap

    def intact_range(self, number: int) -> tuple[Record | None, Record | None]:
        """The first and the last record of a file that chain, as far as nothing is wrong."""
        first = last = None
        try:
            for record, _, _ in self.walk(address_of(number, 0), address_of(number + 1, 0) - 1):
                first, last = first or record, record
        except errors.LogDamaged:
            pass  # or just the end: the caller knows
        return first, last

    # -- damage -----------------------------------------------------------------------------

    def damage(self, address: int, previous: int | None = None) -> errors.LogDamaged:
        """The error for what is not a record at `address`: expected and found, and what follows."""
        number, offset = place_of(address)
        if number not in self.numbers():
            return self._missing(number)
        file, size = self.file(number)
        head = file.pread(HEADER_BYTES, offset)
        expected, found = "a record", "the end of the file"
        if len(head) == HEADER_BYTES:
            record = Record(head)
            expected, found = self._difference(record, address, size, previous)
        following = next(self.found_after(address + ALIGNMENT), None)
        resume = following.behind if following is not None else None
        return errors.LogDamaged(
            f"journal file {number}, byte {offset}: expected {expected}, found {found}",
            place=f"{self.path(number)}, byte {offset}",
            fix=(
                f"what follows is intact: read on with after={resume}; put the file back from a"
                " backup to get the rest"
                if resume is not None
                else ""
            ),
            file=self.path(number),
            offset=offset,
            expected=expected,
            found=found,
            resume_after=resume,
        )

    def _missing(self, number: int) -> errors.LogDamaged:
        return errors.LogDamaged(
            f"journal file {number} is missing",
            place=self.path(number),
            file=self.path(number),
            offset=0,
            expected="a journal file",
            found="no file",
            resume_after=None,
        )

    def _difference(
        self, record: Record, address: int, size: int, previous: int | None
    ) -> tuple[str, str]:
        if record.magic != MAGIC:
            return f"magic {MAGIC!r}", f"{record.magic!r}"
        if record.log_id != self.log_id:
            return f"log id {self.log_id.hex()}", record.log_id.hex()
        if record.address != address:
            return f"address {address:#x}", f"{record.address:#x}"
        if (address & OFFSET_MASK) + record.length > size:
            return f"a record within {size} bytes", f"one of {record.length} bytes"
        if previous is not None and record.previous != previous:
            return f"previous checksum {previous:016x}", f"{record.previous:016x}"
        return f"checksum {record.checksum:016x} over header and meta", "other bytes"

    def rows_damage(
        self, record: Record, section: Section, found: int, path: str
    ) -> errors.LogDamaged:
        """The error for rows whose checksum is `found`, not that of their section."""
        number, offset = place_of(record.address)
        place = (
            offset + record.body_offset + section.offset if section.piece == 0 else section.offset
        )
        where = self.path(number) if section.piece == 0 else path
        return errors.LogDamaged(
            f"rows of entry {record.position} do not match their checksum",
            place=f"{where}, byte {place}",
            fix=f"what follows is intact: read on with after={record.position}; put the file back"
            " from a backup to get the rest",
            file=where,
            offset=place,
            expected=f"{section.checksum:016x}",
            found=f"{found:016x}",
            resume_after=record.position,
        )
