"""A consumer: reads the partitions that are its own, and commits how far it has come.

**Why nothing is skipped, and what may come twice.** Only the owner of a partition reads it and
commits it; owners are what the entries of the group say, one generation after the other. A new
owner starts at the committed offset, which only grows: commits *require* the generation in which
the committing member knew itself to be in the group, so a member that was put out commits nothing.
Hence every row below a committed offset was handed out to the member that committed it, and only
rows that were handed out and not committed are handed out again. A member that must give up a
partition stops reading it and gives it away once it has committed what it was handed, so nothing
comes twice; if it does not commit for a lease, it gives it away all the same.

    next() ─► the group as it is ─► not in it? join ─► what is mine? read at the committed offset
                                 ─► meant for another, and all committed? hand it over
           ─► a batch of one topic, or sleep until the next entry

**A commit in a generation that is over.** Others join and leave while a batch is worked on. A
member that is still in the group under its number has never been out, and nothing that it did not
hand over has moved: it commits in the new generation. One that is out gets `MemberPutOut`, and
joins again when it iterates. In a user's transaction (`commit_in`) nothing is tried again:
`GroupMoved`, and what was covered by it comes again. So what was made of a batch, appended with its
offsets in one entry, is there exactly once.

**The first offset.** Where a group without offsets starts is decided once, by the entry that makes
it read the topic, and stands there as committed offsets: if it were decided by each new owner,
"latest" would skip what came between two of them, and what retention took before the first commit
would be missed in silence.

**Skipping** (`flow="drop"`, `on_gone="skip"`) moves the place of reading on and is counted with the
commit that covers it, in the same entry. So for each partition: committed = first offset + rows
handed out and committed + rows skipped, to the row.

Several topics are read one after the other, a batch of each in turn; between topics there is no
order. One reading a topic and not one for all: each starts at offsets of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any

from headrace import errors
from headrace.log.groups.members import Membership
from headrace.log.groups.offsets import resolve
from headrace.model.fold import OWN_COUNTERS, topic_counter
from headrace.model.groups import GroupState, group_name, is_pattern
from headrace.model.policy import BACKPRESSURE, BUFFER, DROP, FLOWS, Pressure
from headrace.settings import several

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog
    from headrace.log.embedded.reader import Reading
    from headrace.log.transaction import Transaction
    from headrace.model.records import Batch

ON_GONE = ("raise", "skip")
Offsets = dict[str, dict[int, int]]
"""Topic -> partition -> the next offset."""


def skipped_name(group: str, topic: str, partition: int) -> str:
    """The value that counts what a group did not read of a partition."""
    return f"{OWN_COUNTERS}skipped/{group}/{topic}/{partition}"


@dataclass(frozen=True, slots=True)
class Options:
    """How one member reads."""

    columns: Sequence[str] | None = None
    max_rows: int | None = None
    follow: bool = True
    timeout: float | None = None
    start: str | datetime = "earliest"
    lease_seconds: float = 30.0
    on_gone: str = "raise"
    flow: str = BUFFER
    flow_rows: int | None = None
    flow_seconds: float = 30.0

    @property
    def pressure(self) -> Pressure | None:
        """What producers of its topics have to wait for."""
        if self.flow != BACKPRESSURE or self.flow_rows is None:
            return None
        return Pressure(self.flow_rows, float(self.flow_seconds))

    def check(self) -> None:
        """Refuse what cannot be."""
        for name, fits in (
            ("max_rows", self.max_rows is None or self.max_rows >= 1),
            ("lease_seconds", self.lease_seconds > 0),
            ("on_gone", self.on_gone in ON_GONE),
            ("flow", self.flow in FLOWS),
            ("flow_rows", (self.flow != BUFFER) == ((self.flow_rows or 0) >= 1)),
            ("flow_seconds", 0 <= self.flow_seconds < float("inf")),
            ("start", isinstance(self.start, datetime) or self.start in ("earliest", "latest")),
        ):
            if not fits:
                raise errors.BadSetting(
                    f"{getattr(self, name)!r} is no value of '{name}' of a consumer",
                    place="log.consumer",
                    fix=_HELP.get(name, ""),
                )


_HELP = {
    "flow": "'buffer', or 'drop' or 'backpressure' with flow_rows=N",
    "flow_rows": "how many rows it may be behind: with flow='drop' in each partition, with"
    " flow='backpressure' in each topic; with 'buffer' there is no limit",
    "flow_seconds": "with flow='backpressure': how long a producer waits, 0 or more seconds",
    "on_gone": "'raise' or 'skip'",
    "start": "'earliest', 'latest' or a datetime; reset_group() moves a group that has offsets",
}


def options_of(given: Mapping[str, Any]) -> Options:
    """Options by their names, each checked."""
    known = [one.name for one in fields(Options)]
    for name in given:
        if name not in known:
            raise errors.BadSetting(
                f"a consumer has no setting '{name}'",
                place="log.consumer",
                fix=errors.nearest(name, known) or f"one of {', '.join(known)}",
            )
    options = Options(**given)
    options.check()
    return options


@dataclass(slots=True)
class Pending:
    """Offsets that a user's transaction may commit."""

    transaction: Transaction
    offsets: Offsets


class Consumer:
    """One member of a group; made by `log.consumer`. Not for several threads at once."""

    def __init__(
        self, log: EmbeddedLog, topics: str | Sequence[str], group: str, options: Options
    ) -> None:
        """Join."""
        names = tuple(several(topics))
        for name in names:
            if not isinstance(name, str) or not is_pattern(name):
                log.topic(name)
        self._log = log
        self._options = options
        self.group = group
        self.skipped = {"gone": 0, "dropped": 0}
        """Events that this consumer has not read, and why."""
        self._closed = False
        self._known: GroupState | None = None
        self._catalog = -1
        self._committed: Offsets = {}
        self._places: Offsets = {}
        """The next offset to hand out, of each partition that is this member's."""
        self._leaving: dict[str, dict[int, float]] = {}
        """Partitions that are not read any more, and until when a commit is waited for."""
        self._skips: dict[tuple[str, int], list[tuple[int, str, int]]] = {}
        """What was skipped and is not committed: up to which offset, why, how much."""
        self._counted: dict[tuple[str, int], Counter[str]] = {}
        """What was skipped before, as committed: a commit that is tried again counts the same."""
        self._readings: dict[str, Reading] = {}
        self._rest: Batch | None = None
        self._turns: list[str] = []
        self._pending: list[Pending] = []
        self._member = Membership(log, group, names, options.lease_seconds, options.pressure)
        try:
            self._look()
        except BaseException:
            self._member.leave()
            raise

    # -- reading ----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Itself."""
        return self

    def __next__(self) -> Batch:
        """The next batch of a partition that is this member's."""
        log, options = self._log, self._options
        clock = log._system.monotonic
        deadline = None if options.timeout is None else clock() + options.timeout
        while not (self._closed or log._closed):
            lock = log.journal.sync_lock
            seen = lock.seen()
            self._member.renew()
            self._look()
            batch = self._poll()
            if batch is not None:
                return batch
            pause = self._member.look_for_hung()
            if deadline is not None:
                pause = min(pause, deadline - clock())
            if not options.follow or pause < 0:
                break
            lock.wait_changed(seen, pause)
        raise StopIteration

    @property
    def assignment(self) -> dict[str, frozenset[int]]:
        """What this member reads now: topic -> partitions."""
        readable = {
            topic: frozenset(set(places) - set(self._leaving.get(topic, ())))
            for topic, places in self._places.items()
        }
        return {topic: partitions for topic, partitions in readable.items() if partitions}

    @property
    def generation(self) -> int:
        """The generation of the group that this member knows."""
        return self._known.generation if self._known is not None else 0

    def renew(self) -> None:
        """Say that this member is at work, when a batch takes longer than the lease."""
        self._member.renew()

    def _poll(self) -> Batch | None:
        self._drop()
        if self._rest is None:
            for _ in range(len(self._turns)):
                topic = self._turns.pop(0)
                self._turns.append(topic)
                batch = self._read(topic)
                if batch is not None:
                    self._rest = batch
                    break
        batch, most = self._rest, self._options.max_rows
        self._rest = None
        if batch is None:
            return None
        if most is not None and len(batch) > most:
            self._rest = batch.slice(most, len(batch))
            batch = batch.slice(0, most)
        self._places[batch.topic].update(batch.ends)
        return batch

    def _read(self, topic: str) -> Batch | None:
        for _ in range(2):
            reading = self._readings.get(topic)
            if reading is None:
                reading = self._readings[topic] = self._open(topic)
            try:
                return reading.poll()
            except errors.OffsetsGone:  # retention overtook the reading: say, or skip, exactly what
                self._stop_reading(topic)
        raise errors.OffsetsGone(f"rows of '{topic}' go faster than they are read", place=topic)

    def _open(self, topic: str) -> Reading:
        self._step_over_gone(topic)
        places = {p: self._places[topic][p] for p in sorted(self.assignment[topic])}
        return self._log.read(topic, places, columns=self._options.columns, follow=True)

    def _stop_reading(self, topic: str) -> None:
        reading = self._readings.pop(topic, None)
        if reading is not None:
            reading.close()
        if self._rest is not None and self._rest.topic == topic:
            self._rest = None

    # -- what is not read -------------------------------------------------------------------

    def _step_over_gone(self, topic: str) -> None:
        starts, places = self._log.starts(topic), self._places[topic]
        gone = {p: starts[p] for p in self.assignment[topic] if places[p] < starts[p]}
        if not gone:
            return
        if self._options.on_gone == "skip":
            for partition, start in gone.items():
                self._skip(topic, partition, start, "gone")
            return
        ranges = {partition: [places[partition], start - 1] for partition, start in gone.items()}
        some = ", ".join(f"{p}: {first} to {last}" for p, (first, last) in ranges.items())
        raise errors.OffsetsGone(
            f"group '{self.group}' has not read offsets of '{topic}' that are gone: partition"
            f" {some}",
            place=f"topic '{topic}'",
            fix="go on behind them with on_gone='skip', which counts them, or move the group with"
            " 'headrace group reset'",
            topic=topic,
            partitions=ranges,
        )

    def _drop(self) -> None:
        """With `flow="drop"`: what is too far behind is not read."""
        most = self._options.flow_rows
        if self._options.flow != DROP or most is None:
            return
        for topic, partitions in self.assignment.items():
            ends, places = self._log.ends(topic), self._places[topic]
            late = [p for p in partitions if ends[p] - places[p] > most]
            if late:
                self._stop_reading(topic)
                self._step_over_gone(topic)
            for partition in late:
                self._skip(topic, partition, ends[partition] - most, "dropped")

    def _skip(self, topic: str, partition: int, to: int, why: str) -> None:
        places = self._places[topic]
        count = to - places[partition]
        if count > 0:
            places[partition] = to
            self.skipped[why] += count
            if (topic, partition) not in self._counted:
                known = self._log.value(skipped_name(self.group, topic, partition)) or {}
                self._counted[topic, partition] = Counter(known)
            self._skips.setdefault((topic, partition), []).append((to, why, count))

    def _counts(self, offsets: Offsets) -> dict[str, Any]:
        """The values that count what was skipped below these offsets."""
        values: dict[str, Any] = {}
        for (topic, partition), skips in self._skips.items():
            through = offsets.get(topic, {}).get(partition, -1)
            covered = _summed(skip for skip in skips if skip[0] <= through)
            if covered:
                name = skipped_name(self.group, topic, partition)
                values[name] = dict(self._counted[topic, partition] + covered)
        return values

    # -- committing -------------------------------------------------------------------------

    def commit(self, batch: Batch | None = None, *, durability: str | None = None) -> None:
        """Commit all that was handed out, or up to and with a batch.

        `MemberPutOut` if the group has gone on without this member: then nothing is committed.
        """
        self._member.renew()
        self._settle()
        while True:
            state = self._member.state()
            self._refuse_if_out(state)
            offsets = self._to_commit(batch)
            if not offsets:
                return
            control = _control(self.group, offsets, self._counts(offsets))
            guards = self._guards(state, offsets)
            try:
                self._log.append_entry(
                    [], control, expect={}, require=guards, durability=durability
                )
            except errors.Conflict:
                self._look_at_topics()
                continue  # the group moved: is this member still in it?
            self._note(offsets)
            return

    def commit_in(self, transaction: Transaction, batch: Batch | None = None) -> None:
        """Let a transaction commit what was handed out, with what it made of it: exactly once.

        If the transaction is not taken (`GroupMoved`, an error in its block), the rows come again.
        """
        self._member.renew()
        self._settle()
        state = self._member.state()
        self._refuse_if_out(state)
        offsets = self._to_commit(batch)
        transaction.commit_offsets(self.group, offsets)
        for name, count in self._counts(offsets).items():
            transaction.put_own(name, count)
        for counter, value in self._guards(state, offsets).items():
            transaction.guard(counter, value, self._moved)
        self._pending.append(Pending(transaction, offsets))

    def _guards(self, state: GroupState, offsets: Offsets) -> dict[str, int]:
        """The counters that must not have moved: the generation, and what these topics are."""
        topics = self._log.journal.control.topics
        for topic in offsets:
            if topic not in topics or topics[topic].id != state.topics[topic].id:
                self._log.topic(topic)
                raise errors.UnknownTopic(
                    f"topic '{topic}' was deleted and made again: these rows are not in it",
                    place=f"group '{self.group}'",
                    fix="go on iterating: the new topic is read from its start",
                )
        revisions = {topic_counter(topic): topics[topic].revision for topic in offsets}
        return {group_name(self.group): state.generation, **revisions}

    def _to_commit(self, batch: Batch | None) -> Offsets:
        found: Offsets = {}
        wanted = self._places if batch is None else {batch.topic: batch.ends}
        for topic, places in wanted.items():
            committed = self._committed.get(topic, {})
            new = {p: to for p, to in places.items() if to > committed.get(p, to)}
            if new:
                found[topic] = new
        return found

    def _note(self, offsets: Offsets) -> None:
        for topic, places in offsets.items():
            for partition, to in places.items():
                if partition in self._committed.get(topic, ()):
                    self._committed[topic][partition] = to
                    self._places[topic][partition] = max(to, self._places[topic][partition])
                for skip in self._skips.get((topic, partition), [])[:]:
                    if skip[0] <= to:
                        self._counted[topic, partition] += _summed([skip])
                        self._skips[topic, partition].remove(skip)

    def _settle(self) -> None:
        """See how the user's transactions ended: what was not taken comes again."""
        for one in [one for one in self._pending if one.transaction.over]:
            self._pending.remove(one)
            if one.transaction.receipt is not None:
                self._note(one.offsets)
                continue
            found = self._log.offsets(self.group)  # it may be there all the same, or a part later
            for topic, places in one.offsets.items():
                self._stop_reading(topic)
                for partition in set(places) & set(self._places.get(topic, ())):
                    self._begin(topic, partition, found[topic][partition])

    def _refuse_if_out(self, state: GroupState) -> None:
        if self._closed or self._member.number not in state.members:
            what = "has left" if self._closed else "was put out of"
            raise errors.MemberPutOut(
                f"member {self._member.number} {what} group '{self.group}', which is in"
                f" generation {state.generation}: nothing was committed",
                place=f"group '{self.group}'",
                generation=state.generation,
            )

    def _moved(self, conflict: errors.Conflict) -> errors.HeadraceError:
        try:
            self._refuse_if_out(self._member.state())
        except errors.MemberPutOut as out:
            return out
        moved = errors.GroupMoved(
            f"{conflict.fact}: the group or a topic changed since commit_in()",
            place=f"group '{self.group}'",
        )
        moved.details = dict(conflict.details)
        return moved

    # -- the group --------------------------------------------------------------------------

    def _look(self) -> None:
        """Take in what has become of the group, and do what is this member's part."""
        self._settle()
        state = self._member.state()
        if self._member.number not in state.members:
            self._forget()
            state = self._member.join(self._starts)
        if self._known is None or state.generation != self._known.generation:
            self._adopt(state)
        self._look_at_topics()
        if self._leaving:
            self._hand_over()

    def _look_at_topics(self) -> None:
        """Take up topics that were made since, and let go of those that were deleted."""
        journal = self._log.journal
        if self._catalog != journal.catalog:
            self._catalog = journal.catalog
            state = self._member.take_up(self._starts)
            if self._known is not None and state.generation != self._known.generation:
                self._adopt(state)

    def _forget(self) -> None:
        for topic in list(self._readings):
            self._stop_reading(topic)
        self._known, self._places, self._committed = None, {}, {}
        self._leaving, self._skips, self._counted, self._turns = {}, {}, {}, []
        self._pending = []

    def _adopt(self, state: GroupState) -> None:
        """Own what the state says: begin what is new, forget what is not ours."""
        number = self._member.number
        before = self.assignment
        owned = state.owned(number)
        committed = self._log.offsets(self.group)
        for topic in [*self._places]:
            if not self._same(topic, state):
                before.pop(topic, None)
                kept: frozenset[int] = frozenset()
            else:
                kept = owned.get(topic, frozenset())
            for partition in set(self._places[topic]) - kept:
                del self._places[topic][partition], self._committed[topic][partition]
                self._forget_skips(topic, partition)
        for topic, partitions in owned.items():
            for partition in partitions - set(self._places.get(topic, ())):
                self._begin(topic, partition, committed[topic][partition])
        until = self._log._system.monotonic() + self._options.lease_seconds
        self._leaving = {
            topic: {p: self._leaving.get(topic, {}).get(p, until) for p in partitions}
            for topic, partitions in state.to_hand_over(number).items()
        }
        self._known = state
        after = self.assignment
        for topic in {*before, *after}:
            if before.get(topic) != after.get(topic):
                self._stop_reading(topic)
        self._turns = [t for t in self._turns if t in after]
        self._turns += sorted(set(after) - set(self._turns))

    def _same(self, topic: str, state: GroupState) -> bool:
        """Whether the topic is still the one that this member knows under its name."""
        known = self._known.topics.get(topic) if self._known is not None else None
        now = state.topics.get(topic)
        return known is not None and now is not None and known.id == now.id

    def _begin(self, topic: str, partition: int, offset: int) -> None:
        self._places.setdefault(topic, {})[partition] = offset
        self._committed.setdefault(topic, {})[partition] = offset
        self._forget_skips(topic, partition)

    def _forget_skips(self, topic: str, partition: int) -> None:
        self._skips.pop((topic, partition), None)
        self._counted.pop((topic, partition), None)

    def _hand_over(self) -> None:
        """Give away what is meant for others, once all that was handed out of it is committed."""
        now = self._log._system.monotonic()
        open_ = {
            (topic, partition)
            for one in self._pending
            for topic, places in one.offsets.items()
            for partition in places
        }
        ready: dict[str, list[int]] = {}
        for topic, partitions in self._leaving.items():
            for partition, until in partitions.items():
                done = self._places[topic][partition] == self._committed[topic][partition]
                if (done or now >= until) and (topic, partition) not in open_:
                    ready.setdefault(topic, []).append(partition)
        if ready:
            self._adopt(self._member.hand_over(ready))

    def _starts(self, state: GroupState) -> Mapping[str, Any]:
        """Where partitions begin that were never committed: part of the entry that takes them."""
        known = self._log.offsets(self.group)
        start = self._options.start if not known else "earliest"
        found: Offsets = {}
        for topic in state.topics:
            have = known.get(topic, {})
            partitions = self._log.topic(topic).partitions
            if len(have) < partitions:
                offsets = resolve(self._log, topic, start)
                found[topic] = {p: offsets[p] for p in range(partitions) if p not in have}
        return _control(self.group, found, {}) if found else {}

    # -- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the group; what was not committed is read again by others."""
        if not self._closed:
            self._closed = True
            self._member.leave()
            self._forget()

    def __enter__(self) -> Consumer:
        """For `with`."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the group."""
        self.close()

    def __repr__(self) -> str:
        """The group, and what it reads."""
        count = sum(map(len, self.assignment.values()))
        return f"<consumer {self._member.number} of '{self.group}': {count} partitions>"


def _summed(skips: Iterable[tuple[int, str, int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for _, why, count in skips:
        found[why] += count
    return found


def _control(group: str, offsets: Offsets, values: Mapping[str, Any]) -> dict[str, Any]:
    said = {
        topic: {str(partition): offset for partition, offset in places.items()}
        for topic, places in offsets.items()
    }
    return {"offsets": {group: said}, **({"values": dict(values)} if values else {})}
