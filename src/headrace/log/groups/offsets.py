"""Where a partition is at a time, at a position, or at either end; and how old an offset is.

Nothing here knows how the log keeps its rows: the first row that a reading hands out is asked for
its offset and its time. A reading finds its place by itself, so a question costs a walk through
about one file. Rows come in the order of positions, and so of times: the first row is the oldest.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from headrace import errors

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog
    from headrace.log.embedded.reader import Reading
    from headrace.model.records import Batch

PATIENCE_ROWS = 200_000
"""After so many rows without a partition that was looked for, a reading begins anew behind them."""
Place = str | int | datetime
"""`earliest`, `latest`, an offset, a time, or `position:P`."""


def resolve(log: EmbeddedLog, topic: str, place: Place) -> list[int]:
    """The offset of each partition of a topic at a place."""
    starts, ends = log.starts(topic), log.ends(topic)
    if place == "earliest":
        return starts
    if place == "latest":
        return ends
    if isinstance(place, bool) or not isinstance(place, int | str | datetime):
        raise _bad(place)
    if isinstance(place, int):
        return [min(max(place, low), high) for low, high in zip(starts, ends, strict=True)]
    log.sync()
    asked: dict[str, Any] = {"start": place}
    if isinstance(place, str):
        word, _, number = place.partition(":")
        if word != "position" or not number.isdecimal():
            raise _bad(place)
        asked = {"after": int(number)}
        if int(number) >= log.position:
            return ends
    found = dict(enumerate(ends))  # a partition without rows behind the place is at its end
    missing = set(found)
    while missing:
        reading = log.read(topic, through=log.position, partitions=sorted(missing), **asked)
        seen = _first_of_each(reading, missing)
        found |= {partition: offset for partition, (offset, _) in seen.items()}
        missing -= set(seen)
        if not seen:
            break
    return [found[partition] for partition in range(len(ends))]


def received(log: EmbeddedLog, topic: str, offsets: Mapping[int, int]) -> dict[int, int]:
    """When the row at each of these offsets was received, or the next one held, in microseconds."""
    found: dict[int, int] = {}
    log.sync()
    ends, through = log.ends(topic), log.position
    left = {partition: offset for partition, offset in offsets.items() if offset < ends[partition]}
    while left:
        seen = _first_of_each(log.read(topic, left, through=through), set(left))
        if not seen:
            break
        for partition, (_, time) in seen.items():
            found[partition] = time
            del left[partition]
    return found


def _first_of_each(reading: Reading, wanted: set[int]) -> dict[int, tuple[int, int]]:
    """Offset and time of the first row of each partition, as far as they are found soon."""
    found: dict[int, tuple[int, int]] = {}
    since = 0
    for batch in reading:
        new = {p: at for p, at in _first(batch).items() if p in wanted and p not in found}
        found |= new
        since = 0 if new else since + len(batch)
        if len(found) == len(wanted) or (found and since > PATIENCE_ROWS):
            break
    reading.close()
    return found


def _first(batch: Batch) -> dict[int, tuple[int, int]]:
    partitions = batch.partition
    offsets, times = batch.offset, batch.received_time
    found = {}
    for partition in pc.unique(partitions).to_pylist():
        row = pc.index(partitions, partition).as_py()
        found[partition] = (offsets[row].as_py(), times[row].value)
    return found


def _bad(place: object) -> errors.BadPosition:
    return errors.BadPosition(
        f"{place!r} is not a place in a topic",
        place="to",
        fix="say earliest, latest, an offset, a time, or position:P",
    )
