"""The checkpoint: the whole state in the first record of a journal file.

Truth is the newest checkpoint, the entries after it, and the files these name. A checkpoint holds
the control state (topics, committed offsets, values), the partition ends, the names of the counter
runs, and the range of every closed journal file; so opening a log reads one record and folds what
came after it, and two checkpoints are kept by keeping two journal files.

Counters may be millions, so they are not in the record: each checkpoint writes those that changed
in the file just closed as one **run** (sorted array of digest, value, file), synced before the
checkpoint that names it. When the small runs together outgrow the first one, all are written anew.
Runs that neither of the two newest checkpoints names are deleted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from headrace import errors
from headrace.log.embedded.format import Record, checksum, place_of
from headrace.log.embedded.live import SLOT, Live, Slots, Tail
from headrace.log.embedded.system import System
from headrace.model.fold import ControlState

RUN_MAGIC = b"HRcount\1"
RUN_HEADER_BYTES = 64


@dataclass(frozen=True, slots=True)
class FileRange:
    """A journal file to which nothing is appended any more."""

    number: int
    end: int
    """Bytes of it that count: a file is never shortened, what lies behind is void."""
    after: int
    """The position before its first entry."""
    through: int
    """The position of its last entry."""
    time_first: int
    time_last: int
    topics: list[int]
    """Ids of the topics that have rows in it."""
    cut: str = ""
    """Why it ends there, when it was not rolled: `reboot`, `poisoned`."""


@dataclass(slots=True)
class Checkpoint:
    """The state of a log at the start of a journal file."""

    control: ControlState
    ends: list[int] = field(default_factory=list)
    counters: list[dict[str, Any]] = field(default_factory=list)
    """Runs, oldest first: name, rows, checksum."""
    files: list[FileRange] = field(default_factory=list)
    catalog: int = 0

    def to_json(self) -> dict[str, Any]:
        """As the control part of a checkpoint record."""
        return {
            "control": self.control.to_json(),
            "ends": self.ends,
            "counters": self.counters,
            "files": [asdict(file) for file in self.files],
            "catalog": self.catalog,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Checkpoint:
        """The inverse of `to_json`."""
        control = ControlState()
        control.apply(data["control"])
        return cls(
            control=control,
            ends=data["ends"],
            counters=data["counters"],
            files=[FileRange(**file) for file in data["files"]],
            catalog=data["catalog"],
        )


def file_range(
    number: int,
    end: int,
    first: Record,
    tail: Tail,
    before: Checkpoint,
    ends: list[int],
    control: ControlState,
    cut: str = "",
) -> FileRange:
    """What the next checkpoint says of a file that is closed now."""
    known = len(before.ends)
    topics = [
        topic.id
        for topic in control.topics.values()
        if any(
            ends[slot] != (before.ends[slot] if slot < known else 0)
            for slot in range(topic.slot, topic.slot + topic.partitions)
        )
    ]
    return FileRange(
        number=number,
        end=place_of(end)[1],
        after=first.position,
        through=tail.position,
        time_first=first.received,
        time_last=tail.received,
        topics=topics,
        cut=cut,
    )


def unsealed(files: list[FileRange], control: ControlState) -> list[FileRange]:
    """Those that are still needed: of the others the rows are in sealed files."""
    return [file for file in files if file.through > control.sealed.through]


class CounterRuns:
    """The folder of counter runs."""

    def __init__(self, system: System, folder: str, log_id: bytes) -> None:
        """`folder` is the log's folder."""
        self._system = system
        self._folder = f"{folder}/counters"
        self._log_id = log_id

    def write(self, live: Live, named: list[dict[str, Any]], file: int) -> list[dict[str, Any]]:
        """Write what changed in journal file `file`, synced; the runs that name all counters."""
        slots = live.counters()
        changed = slots[slots["file"] >= file]
        if not len(changed):
            return named
        rows = [run["rows"] for run in named]
        if not named or sum(rows[1:]) + len(changed) > rows[0]:
            return [self._write(slots, f"{file:08d}-all.run")]
        return [*named, self._write(changed, f"{file:08d}.run")]

    def _write(self, slots: Slots, name: str) -> dict[str, Any]:
        data = slots[np.lexsort((slots["low"], slots["high"]))].tobytes()
        header = RUN_MAGIC + self._log_id + len(slots).to_bytes(8, "little")
        self._system.mkdir(self._folder)
        file = self._system.create(f"{self._folder}/{name}", 0)
        file.pwritev([header.ljust(RUN_HEADER_BYTES, b"\0"), data], 0)
        file.fdatasync()
        file.close()
        self._system.fsync_dir(self._folder)
        return {"name": name, "rows": len(slots), "checksum": checksum(data)}

    def read(self, named: list[dict[str, Any]]) -> Slots:
        """All counters of the named runs; a later run wins."""
        parts = [self._read(run) for run in named]
        if not parts:
            return np.zeros(0, SLOT)
        slots = np.concatenate(parts)[::-1]  # newest first: unique keeps the first it meets
        keys = np.stack((slots["high"], slots["low"]), axis=1)
        _, first = np.unique(keys, axis=0, return_index=True)
        kept: Slots = slots[first]
        return kept

    def _read(self, run: dict[str, Any]) -> Slots:
        path = f"{self._folder}/{run['name']}"
        try:
            file = self._system.open(path)
        except FileNotFoundError:
            raise errors.LogDamaged(
                f"the counter run {run['name']} is missing",
                place=path,
                file=path,
                offset=0,
                expected=f"{run['rows']} counters",
                found="no file",
            ) from None
        data = file.pread(run["rows"] * SLOT.itemsize, RUN_HEADER_BYTES)
        file.close()
        if checksum(data) != run["checksum"]:
            raise errors.LogDamaged(
                f"the counter run {run['name']} does not match its checksum",
                place=f"{path}, byte {RUN_HEADER_BYTES}",
                file=path,
                offset=RUN_HEADER_BYTES,
                expected=f"{run['checksum']:016x}",
                found=f"{checksum(data):016x}",
            )
        return np.frombuffer(data, SLOT)

    def drop_except(self, *named: list[dict[str, Any]]) -> None:
        """Delete the runs that none of these lists names."""
        kept = {run["name"] for runs in named for run in runs}
        for name in self._system.listdir(self._folder):
            if name not in kept:
                self._system.unlink(f"{self._folder}/{name}")
