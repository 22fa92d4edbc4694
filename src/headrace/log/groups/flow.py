"""When producers are faster than consumers (R-A3): topics that say so limit what is appended.

`buffer`, the default, costs nothing: rows are on the disk, bounded by the retention, and `append`
never comes here. With `drop` and `backpressure` a topic has room for as many rows as its slowest
group may still fall behind, `flow_rows`. How far a group is behind follows from its committed
offsets, so there is no room counter that could be wrong; producers of such topics look and append
one after the other, under one lock, or two would use the same room. They do not wait for the disk
under it: syncs are shared as always. A group counts from the moment it has offsets, which is when
its first member joins, until it is deleted; a topic without groups has room for everything.

`drop`: rows that find no room are not appended. How many is counted in the entry that holds the
others, so the count is as durable as they are, and is right to the row after any crash.
`backpressure`: the producer sleeps until something new is on the disk (a commit is), and looks
again; after `flow_seconds` it gets `TopicFull`, which names the group. Nothing polls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace import errors
from headrace.interfaces import Part
from headrace.log.embedded.journal import Taken
from headrace.log.embedded.locks import CrossLock
from headrace.model.fold import OWN_COUNTERS
from headrace.model.policy import BACKPRESSURE, DROP
from headrace.model.records import Piece, Receipt
from headrace.model.topic import Topic

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog


def dropped_name(topic: Topic) -> str:
    """The value that counts the rows of a topic that found no room."""
    return f"{OWN_COUNTERS}dropped/{topic.id}"


def dropped(log: EmbeddedLog, topic: Topic) -> int:
    """How many rows of the topic found no room, ever."""
    return int(log.value(dropped_name(topic)) or 0)


def slowest(log: EmbeddedLog, topic: Topic) -> tuple[str, int] | None:
    """The group of a topic that is furthest behind, and by how many rows; None: no groups."""
    ends = log.ends(topic.name)
    found = None
    for group, topics in log.journal.control.groups.items():
        offsets = topics.get(topic.name)
        if offsets:
            behind = sum(max(0, ends[p] - at) for p, at in offsets.items() if p < len(ends))
            if found is None or behind > found[1]:
                found = (group, behind)
    return found


def append_entry(
    log: EmbeddedLog,
    parts: Sequence[Part],
    control: Mapping[str, Any],
    *,
    expect: Mapping[str, int],
    require: Mapping[str, int],
    durability: str,
) -> Receipt:
    """Append an entry of which some topics limit what they take."""
    journal, clock = log.journal, log._system.monotonic
    began = clock()
    while True:
        seen = journal.sync_lock.seen()
        with _alone(log):
            journal.refresh_control()
            full = _full(log, parts)
            if full is None:
                fitting, more, lost = _fitting(log, parts)
                values = {**control.get("values", {}), **more}
                receipt = log.append_entry(
                    fitting,
                    {**control, "values": values} if values else control,
                    expect=expect,
                    require=require,
                    durability="os",
                    admitted=True,
                )
        if full is None:
            taken = Taken(receipt.position, receipt.received_us, journal.live.tail().end)
            log._make_durable(journal, taken, durability)
            return replace(receipt, dropped=lost) if lost else receipt
        topic, group, behind = full
        left = began + topic.policy.flow_seconds - clock()
        if left <= 0:
            raise errors.TopicFull(
                f"group '{group}' is {behind} rows behind in '{topic.name}', which may be"
                f" {topic.policy.flow_rows}; waited {topic.policy.flow_seconds:g} s",
                place=f"topic '{topic.name}'",
                group=group,
                behind=behind,
                flow_rows=topic.policy.flow_rows,
            )
        journal.sync_lock.wait_changed(seen, left)


@contextlib.contextmanager
def _alone(log: EmbeddedLog) -> Iterator[None]:
    """Hold the lock of those who look for room; it dies with its holder, as all our locks do."""
    journal, clock = log.journal, log._system.monotonic
    timeout = log.settings.lock_timeout_seconds
    file = log._system.open(
        f"{log.path}/locks/flow", create=True
    )  # a description: excludes threads
    try:
        deadline = clock() + timeout
        while True:
            seen = journal.sync_lock.seen()
            if file.try_lock():
                break
            if clock() >= deadline:
                raise errors.LockTimeout(
                    f"the flow lock was not free within {timeout:g} s", place=file.path
                )
            journal.sync_lock.wait_changed(seen, CrossLock.LOOK_AGAIN_SECONDS)
        yield
    finally:
        file.close()


def _full(log: EmbeddedLog, parts: Sequence[Part]) -> tuple[Topic, str, int] | None:
    """A topic that makes its producers wait now, and for whom."""
    rows: dict[str, int] = {}
    for part in parts:
        rows[part.topic] = rows.get(part.topic, 0) + _rows(log, part)
    for name, count in rows.items():
        topic = log.topic(name)
        if topic.policy.flow != BACKPRESSURE:
            continue
        if count > topic.policy.flow_rows:
            raise errors.BatchTooLarge(
                f"{count} rows in one entry, and groups may be {topic.policy.flow_rows} behind",
                place=f"topic '{name}'",
                why="the topic's flow is 'backpressure', and so many rows never have room",
                fix="append fewer rows at once, or give the topic larger flow_rows",
            )
        found = slowest(log, topic)
        if found is not None and found[1] + count > topic.policy.flow_rows:
            return topic, *found
    return None


def _fitting(log: EmbeddedLog, parts: Sequence[Part]) -> tuple[list[Part], dict[str, Any], int]:
    """The parts with the rows that have room, the new counts, and how many rows have none."""
    fitting: list[Part] = []
    room: dict[str, int | None] = {}
    counts: dict[str, int] = {}
    lost = 0
    for part in parts:
        topic = log.topic(part.topic)
        if topic.policy.flow != DROP:
            fitting.append(part)
            continue
        if part.topic not in room:
            found = slowest(log, topic)
            room[part.topic] = None if found is None else topic.policy.flow_rows - found[1]
        left, rows = room[part.topic], _rows(log, part)
        taken = rows if left is None else max(0, min(rows, left))
        kept = part if taken == rows else _front(log, part, taken)
        taken = taken if kept is not None else 0
        if kept is not None:
            fitting.append(kept)
        if left is not None:
            room[part.topic] = left - taken
        if taken < rows:
            lost += rows - taken
            name = dropped_name(topic)
            before = log.journal.control.values.get(name) or 0
            counts[name] = counts.get(name, before) + rows - taken
    return fitting, counts, lost


def _rows(log: EmbeddedLog, part: Part) -> int:
    pieces = _pieces(part)
    if pieces:
        return sum(piece.rows for piece in pieces)
    packer = log._packer(part.topic)
    return int(part.batch(packer.arrow, packer.batch).num_rows)


def _pieces(part: Part) -> list[Piece]:
    rows = part.rows if isinstance(part.rows, list) else [part.rows]
    return rows if rows and isinstance(rows[0], Piece) else []


def _front(log: EmbeddedLog, part: Part, rows: int) -> Part | None:
    """The first rows of a part; None: none. Staged rows and source transactions are not cut."""
    if not rows or _pieces(part) or part.transactions is not None:
        return None
    packer = log._packer(part.topic)
    batch = part.batch(packer.arrow, packer.batch).slice(0, rows)
    headers = part.headers
    if headers is not None and not isinstance(headers, Mapping):
        headers = list(headers)[:rows]
    return Part(part.topic, batch, headers, None, part.partition, part.sent_time)
