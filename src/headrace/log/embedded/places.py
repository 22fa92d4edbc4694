"""Where a reading starts: the address for a position, a time, an offset, or either end.

There is no index. The newest checkpoint names the range of positions and times of every closed
file; the checkpoint at the start of each file names the partition ends there, so a file for an
offset is found by bisection; within the file the headers are walked. Damage on the way to a place
behind it is stepped over, but not damage that may have held the place itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime

import numpy as np

from headrace import errors
from headrace.log.embedded import live as shared
from headrace.log.embedded.checkpoint import Checkpoint, FileRange
from headrace.log.embedded.format import ENTRY, Record, address_of, place_of
from headrace.log.embedded.journal import Journal
from headrace.model.records import microseconds_of
from headrace.model.topic import Topic

Start = str | int | datetime | Mapping[int, int]


def is_whole(number: object) -> bool:
    """Whether this is a whole number, of Python or of numpy."""
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


class Places:
    """The places of a log below `limit`, the synced end when the reading began."""

    def __init__(self, journal: Journal) -> None:
        """Take the limit first: every file below it is then known to the control state."""
        self._journal = journal
        self._files = journal.files
        self.limit: int = journal.live.words[shared.SYNCED]
        if not self.limit:
            raise errors.LogClosed("the log was closed meanwhile", place=journal.folder)
        journal.refresh_control()
        self._newest = place_of(self.limit)[0]
        self._closed = [f for f in journal.closed_files if f.number < self._newest]

    @property
    def reached(self) -> int:
        """The newest position that readers see."""
        return self._journal.live.words[shared.SYNCED_POSITION]

    def bad(self, fact: str) -> errors.BadPosition:
        """The error for a place that is not there."""
        since, upper = 0, self.reached
        return errors.BadPosition(
            fact,
            place=self._journal.folder,
            why=f"the log holds positions {since} to {upper}",
            fix="begin at what is there: a position of the log, an offset of a partition of the "
            "topic, a datetime, 'earliest' or 'latest'",
            since=since,
            upper=upper,
        )

    def first(self) -> int:
        """The start of the log."""
        return address_of(self._closed[0].number if self._closed else self._newest, 0)

    def after(self, position: int) -> int:
        """A place at or before the first entry above `position`."""
        reached = self.reached
        if position > reached:
            raise self.bad(f"position {position} is not in the log yet")
        if position <= 0 and self._files.record(self.first()) is not None:
            return self.first()
        tail = self._journal.live.tail()
        if position == tail.position:  # not `reached`: it lags behind `limit` for a moment
            return tail.end
        return self._seek(
            lambda file: file.through > position,
            lambda record: record.position > position,
            lambda record: record.behind > position,
        )

    def at(self, time: datetime) -> int:
        """The first entry received at `time` or later."""
        found = microseconds_of(time)
        return self._seek(
            lambda file: file.time_last >= found,
            lambda record: record.received >= found,
            lambda record: record.received >= found,
        )

    def _seek(
        self,
        file_wanted: Callable[[FileRange], bool],
        record_wanted: Callable[[Record], bool],
        lost: Callable[[Record], bool],
    ) -> int:
        """The first entry wanted; or damage that may have held it, which the reading will say.

        `lost`: whether what stood just before this record was wanted.
        """
        ends = [address_of(file.number, file.end) for file in self._closed if file_wanted(file)]
        for end in [*ends, self.limit]:
            start = address_of(place_of(end)[0], 0)
            while start < end:
                try:
                    for record, _, _ in self._files.walk(start, end):
                        start = record.end
                        if record.kind == ENTRY and record_wanted(record):
                            return record.address
                except errors.LogDamaged:
                    found = next(self._files.found_after(start + 64), None)
                    if found is None or lost(found):
                        return start
                    start = found.address
        return self.limit

    def of_offsets(self, topic: Topic, offsets: Mapping[int, int]) -> int:
        """A place at or before the given offset of each partition."""
        numbers = [*(file.number for file in self._closed), self._newest]
        low, high = 0, len(numbers) - 1
        while low < high:  # the last file that begins at or before all the offsets
            middle = (low + high + 1) // 2
            begins = self._ends_before(numbers[middle], topic)
            if all(begins[partition] <= offset for partition, offset in offsets.items()):
                low = middle
            else:
                high = middle - 1
        return address_of(numbers[low], 0)

    def unsealed(self, topic: Topic, offsets: Mapping[int, int]) -> bool:
        """Whether all rows from these offsets on are in the journal, behind what is sealed."""
        through = self._journal.control.sealed.through
        behind = (file.number for file in self._closed if file.after >= through)
        begins = self._ends_before(next(behind, self._newest), topic)
        return all(begins[partition] <= offset for partition, offset in offsets.items())

    def _ends_before(self, number: int, topic: Topic) -> list[int]:
        record = self._files.record(address_of(number, 0))
        if record is None:
            raise self._files.damage(address_of(number, 0))
        ends = Checkpoint.from_json(record.control()).ends
        known = ends[topic.slot : topic.slot + topic.partitions]
        return known or [0] * topic.partitions

    def check_offsets(self, topic: Topic, start: int | Mapping[int, int]) -> None:
        """Refuse partitions and offsets that the topic does not have."""
        stop = topic.slot + topic.partitions
        ends = self._journal.live.ends(stop)[topic.slot : stop].tolist()
        if isinstance(start, int):
            if not 0 <= start <= max(ends):
                raise self.bad(f"'{topic.name}' has offsets 0 to {max(ends)}, not {start}")
            return
        self.check_partitions(topic, start)
        for partition, offset in start.items():
            if not is_whole(offset) or not 0 <= offset <= ends[partition]:
                raise self.bad(
                    f"partition {partition} of '{topic.name}' has offsets 0 to {ends[partition]},"
                    f" not {offset}"
                )

    def check_partitions(
        self, topic: Topic, partitions: Mapping[int, int] | frozenset[int]
    ) -> None:
        """Refuse partitions that the topic does not have."""
        for partition in partitions:
            if not is_whole(partition) or not 0 <= partition < topic.partitions:
                raise self.bad(f"topic '{topic.name}' has no partition {partition!r}")
