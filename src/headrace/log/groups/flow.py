"""When producers are faster than consumers (R-A3): topics that say so limit what is appended.

`buffer`, the default, costs nothing: rows are on the disk, bounded by the retention, and `append`
never comes here. With `drop` and `backpressure` a topic has room for as many rows as its slowest
group may still fall behind, `flow_rows`. A group can say `backpressure` for itself: then only what
it may fall behind counts, and the topics that it reads carry the limit (`Topic.pressure`), so that
producers need not look at groups to know that there is none. How far a group is behind follows from
its committed offsets, so there is no room counter that could be wrong; producers of such topics
look and append one after the other, under one lock, or two would use the same room. They do not
wait for the disk under it: syncs are shared as always. A group counts from the moment it has
offsets, which is when its first member joins, until it is deleted; a topic without groups has room
for everything.

That all members of a group are dead changes nothing: it would come back to more than it said it can
bear, and to look who lives before every append is no small thing. Its producers get `TopicFull`
after their wait, which says that nobody of the group is alive, and how to go on without it.

`drop`: rows that find no room are not appended. How many is counted in the entry that holds the
others, so the count is as durable as they are, and is right to the row after any crash.
`backpressure`: the producer sleeps until something new is on the disk (a commit is), and looks
again; after `flow_seconds` it gets `TopicFull`, which names the group. Nothing polls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace import errors
from headrace.interfaces import Part
from headrace.log.embedded.journal import Taken
from headrace.log.embedded.locks import CrossLock
from headrace.log.groups.members import living, state_of
from headrace.model.fold import OWN_COUNTERS
from headrace.model.policy import BACKPRESSURE, DROP, Pressure
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


def slowest(
    log: EmbeddedLog, topic: Topic, only: Iterable[str] | None = None
) -> tuple[str, int] | None:
    """The group of a topic that is furthest behind, and by how many rows; None: no groups."""
    ends = log.ends(topic.name)
    found = None
    groups = log.journal.control.groups
    for group in groups if only is None else only:
        offsets = groups.get(group, {}).get(topic.name)
        if offsets:
            behind = sum(max(0, ends[p] - at) for p, at in offsets.items() if p < len(ends))
            if found is None or behind > found[1]:
                found = (group, behind)
    return found


class Full(NamedTuple):
    """Why a producer has to wait."""

    topic: Topic
    limit: Pressure
    group: str
    behind: int
    own: bool
    """Whether the group says so, and not the topic."""

    def error(self, log: EmbeddedLog) -> errors.TopicFull:
        """The wait was too long."""
        group, name, limit = self.group, self.topic.name, self.limit
        alive = len(living(log, state_of(log, group)))
        fact = (
            f"group '{group}' is {self.behind} rows behind in '{name}', which may be {limit.rows};"
            f" waited {limit.seconds:g} s"
        )
        fix = f"start a consumer of group '{group}'" if not alive else f"speed up group '{group}'"
        if self.own:
            fix += (
                f"; to go on without it: 'headrace group release {group}', which keeps its offsets"
            )
        else:
            fix += f"; to wait for nobody: 'headrace topic set {name} flow=buffer'"
        fix += f"; if nobody needs the group any more: 'headrace group delete {group}'"
        return errors.TopicFull(
            fact if alive else f"{fact}; none of its members is alive",
            place=f"topic '{name}'",
            fix=fix,
            group=group,
            behind=self.behind,
            flow_rows=limit.rows,
            members=alive,
        )


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
            return receipt._replace(dropped=lost) if lost else receipt
        left = began + full.limit.seconds - clock()
        if left <= 0:
            raise full.error(log)
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


def _full(log: EmbeddedLog, parts: Sequence[Part]) -> Full | None:
    """What makes a producer of these rows wait now."""
    rows: dict[str, int] = {}
    for part in parts:
        rows[part.topic] = rows.get(part.topic, 0) + _rows(log, part)
    for name, count in rows.items():
        topic = log.topic(name)
        refuse_too_many(topic, count)
        for limit, group in _limits(topic):
            found = slowest(log, topic, None if group is None else [group])
            if found is not None and found[1] + count > limit.rows:
                return Full(topic, limit, *found, own=group is not None)
    return None


def refuse_too_many(topic: Topic, rows: int) -> None:
    """Raise if so many rows in one entry never have room, however far the groups come."""
    for limit, group in _limits(topic):
        if rows > limit.rows:
            who = "the topic" if group is None else f"group '{group}'"
            raise errors.BatchTooLarge(
                f"{rows} rows in one entry, and {who} has room for {limit.rows}",
                place=f"topic '{topic.name}'",
                why=f"the flow of {who} is 'backpressure', and so many never have room",
                fix=f"append fewer rows at once, or give {who} larger flow_rows",
            )


def _limits(topic: Topic) -> Iterator[tuple[Pressure, str | None]]:
    """How far behind groups may be: any of them, or the one that is named."""
    policy = topic.policy
    if policy.flow == BACKPRESSURE:
        yield Pressure(policy.flow_rows, policy.flow_seconds), None
    for group, limit in topic.pressure.items():
        yield limit, group


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
