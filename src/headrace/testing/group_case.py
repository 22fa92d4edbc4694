"""Groups under a random schedule: members that join, leave, die, hang, read and commit; an oracle.

Everything happens in one thread and by a clock that is moved by hand, so a seed is a history. A
member dies by letting its lock go; it hangs by doing nothing while the clock moves on. The oracle
knows how many rows there are and what was committed, and looks at every batch that is handed out:

* **once**: nobody is handed a row below what its group has committed;
* **nothing skipped**: a member's rows of a partition go on where they stopped, and begin at the
  committed offset;
* **one owner**: no two members of a group read a partition at the same time;
* **forward**: committed offsets never go back, and are never beyond what was handed out;
* **fenced**: who was put out cannot commit;
* **counted**: with `drop`, rows committed and rows counted as dropped are all there are;
* **in peace** (nobody dies or hangs): no row is handed out twice at all;
* and at the end one member reads all that is left.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.system import OsSystem
from headrace.log.groups.consumer import Consumer, skipped_name
from headrace.log.groups.watch import watches
from headrace.model.records import Batch
from headrace.settings import LogSettings
from headrace.testing.verdicts import Violated

TOPIC, OUT = "t", "out"
PARTITIONS = 4
LEASE = 30.0
Place = tuple[str, int]
"""Group and partition."""


class HandClock(OsSystem):
    """The machine, with a monotonic clock that is moved by hand."""

    def __init__(self) -> None:
        """At some time."""
        self.now = 1000.0

    def monotonic(self) -> float:
        """See `System`."""
        return self.now


@dataclass
class Seen:
    """What one consumer was handed since it last joined."""

    consumer: Consumer
    number: int = 0
    next: dict[int, int] = field(default_factory=dict)
    """Partition -> the offset that it must be handed next."""
    rows: Counter[int] = field(default_factory=Counter)
    """Partition -> rows handed out and not committed."""
    hung: bool = False


class GroupCase:
    """One log, some groups, a seed."""

    def __init__(self, folder: str, seed: int, *, peace: bool = False, drop: int = 0) -> None:
        """`peace`: nobody dies or hangs. `drop`: the consumers' `flow_rows`."""
        self.random = random.Random(seed)
        self.clock = HandClock()
        settings = LogSettings(durability="os", background=False)
        self.log = EmbeddedLog(folder, settings, system=self.clock)
        self.log.create_topic(TOPIC, "n bigint", partitions=PARTITIONS)
        self.log.create_topic(OUT, "n bigint", partitions=1)
        self.peace, self.drop = peace, drop
        self.members: dict[str, list[Seen]] = {"a": [], "b": []}
        self.committed: dict[Place, int] = {}
        self.handed: dict[Place, Counter[int]] = {}
        self.skipped: Counter[Place] = Counter()
        self.made: Counter[int] = Counter()
        self.rows = 0

    def run(self, steps: int) -> None:
        """Some steps, then everybody leaves, and one of each group reads the rest."""
        for _ in range(steps):
            group = self.random.choice(sorted(self.members))
            kinds = [self.append, self.join, self.leave, self.read, self.read, self.commit]
            if not self.peace:
                kinds += [self.die, self.hang, self.pass_time]
            kinds += [self.transact] if group == "a" and not (self.drop or self.peace) else []
            self.random.choice(kinds)(group)
            self.check(group)
        for group in self.members:
            self.finish(group)
        self.log.close()

    # -- steps ------------------------------------------------------------------------------

    def append(self, _: str) -> None:
        """Rows for a partition."""
        count = self.random.randint(1, 20)
        rows = [{"n": self.rows + n} for n in range(count)]
        self.log.append(TOPIC, rows, partition=self.random.randrange(PARTITIONS))
        self.rows += count

    def join(self, group: str) -> None:
        """One member more, at most four."""
        if len(self.members[group]) < 4:
            limits = {"flow": "drop", "flow_rows": self.drop} if self.drop else {}
            most = self.random.choice([None, 3])
            consumer = self.log.consumer(
                TOPIC, group, follow=False, max_rows=most, lease_seconds=LEASE, **limits
            )
            watches.discard(self.log.path, consumer._member)  # deaths are found by looking only
            self.members[group].append(Seen(consumer))

    def leave(self, group: str) -> None:
        """A member goes, having committed or not."""
        one = self._one(group)
        if one is not None and (self.peace is False or self._clean(one)):
            one.consumer.close()
            self.members[group].remove(one)

    def die(self, group: str) -> None:
        """A member lets its lock go without a word."""
        one = self._one(group)
        if one is not None:
            one.consumer._member._file.close()
            self.members[group].remove(one)

    def hang(self, group: str) -> None:
        """A member does nothing for longer than its lease; the others go on."""
        one = self._one(group)
        if one is not None:
            one.hung = True
            self.clock.now += 0.8 * LEASE
            self._others_read(group)
            self.clock.now += 0.8 * LEASE
            self._others_read(group)

    def _others_read(self, group: str) -> None:
        for one in self.members[group]:
            if not one.hung:
                self._take(group, one)

    def pass_time(self, _: str) -> None:
        """The clock moves on."""
        self.clock.now += self.random.choice([1.0, 0.4 * LEASE])

    def read(self, group: str) -> None:
        """A member is handed a batch."""
        one = self._one(group)
        if one is not None:
            one.hung = False
            self._take(group, one)

    def commit(self, group: str) -> None:
        """A member commits."""
        one = self._one(group)
        if one is not None:
            out = self._is_out(group, one)
            try:
                one.consumer.commit()
            except errors.MemberPutOut:
                if not out:
                    raise Violated(f"{group}: a member that is in it could not commit") from None
                return
            if out and one.rows:
                raise Violated(f"{group}: a member that was put out has committed")
            self.check(group, one)

    def transact(self, group: str) -> None:
        """A member copies what it reads, with its offsets, in one transaction; some fail."""
        one = self._one(group)
        batch = self._take(group, one) if one is not None else None
        if one is None or batch is None:
            return
        try:
            with self.log.transaction() as transaction:
                transaction.append(OUT, [{"n": n} for n in batch.data.column("n").to_pylist()])
                one.consumer.commit_in(transaction, batch)
                if self.random.random() < 0.3:
                    self.join(group)
                if self.random.random() < 0.3:
                    raise ArithmeticError
        except (errors.GroupMoved, errors.MemberPutOut, ArithmeticError):
            for partition in batch.ends:  # it comes again
                one.next.pop(partition, None)
                one.rows.pop(partition, None)
            return
        self.made.update(batch.data.column("n").to_pylist())
        self.check(group, one)

    # -- the oracle -------------------------------------------------------------------------

    def _one(self, group: str) -> Seen | None:
        return self.random.choice(self.members[group]) if self.members[group] else None

    def _is_out(self, group: str, one: Seen) -> bool:
        members = self.log.group(group).state.members
        return one.consumer._member.number not in members

    def _clean(self, one: Seen) -> bool:
        return not one.consumer._to_commit(None)

    def _take(self, group: str, one: Seen) -> Batch | None:
        batch = next(one.consumer, None)
        number = one.consumer._member.number
        if number != one.number:
            one.number, one.next, one.rows = number, {}, Counter()
        self._owners(group)
        mine = one.consumer._places.get(TOPIC, {})  # those that it is to give up, too
        one.next = {p: at for p, at in one.next.items() if p in mine}
        one.rows = Counter({p: count for p, count in one.rows.items() if p in mine})
        if batch is None:
            return None
        offsets = zip(batch.partition.to_pylist(), batch.offset.to_pylist(), strict=True)
        for partition, offset in offsets:
            place = (group, partition)
            low = self.committed.get(place, 0)
            if offset < low:
                raise Violated(f"{group}/{partition}: {offset} again, {low} is committed")
            expected = one.next.get(partition, low)
            if offset != expected and not (self.drop and offset > expected):
                raise Violated(f"{group}/{partition}: {offset} handed out, not {expected}")
            one.next[partition] = offset + 1
            one.rows[partition] += 1
            counts = self.handed.setdefault(place, Counter())
            counts[offset] += 1
            if self.peace and counts[offset] > 1:
                raise Violated(f"{group}/{partition}: {offset} twice, and nobody died")
        return batch

    def _owners(self, group: str) -> None:
        state = self.log.group(group).state
        readers: Counter[int] = Counter()
        for one in self.members[group]:
            if one.consumer._member.number in state.members:
                readers.update(one.consumer.assignment.get(TOPIC, ()))
        twice = [partition for partition, count in readers.items() if count > 1]
        if twice:
            raise Violated(f"{group}: two members read partitions {twice}")

    def check(self, group: str, by: Seen | None = None) -> None:
        """What the log says of a group's offsets, after a commit of one member or of nobody."""
        for partition, offset in self.log.offsets(group).get(TOPIC, {}).items():
            place = (group, partition)
            values = self.log.value(skipped_name(group, TOPIC, partition)) or {}
            skipped = sum(values.values()) - self.skipped[place]
            moved = offset - self.committed.get(place, 0)
            if moved < 0:
                raise Violated(f"{group}/{partition}: committed {offset} after a larger one")
            handed = by.rows.pop(partition, 0) if by is not None and moved else 0
            if moved != handed + skipped:
                raise Violated(
                    f"{group}/{partition}: moved by {moved}, {handed} read, {skipped} skipped"
                )
            self.committed[place] = offset
            self.skipped[place] += skipped

    def finish(self, group: str) -> None:
        """Everybody who can leaves; one member reads and commits all that is left."""
        hung = [one.consumer for one in self.members[group] if one.hung]
        for one in self.members[group]:
            if one.hung:
                continue
            if self.peace:
                one.consumer.commit()
                self.check(group, one)
            one.consumer.close()
        self.members[group] = []
        self.join(group)
        (last,) = self.members[group]
        for _ in range(5):  # a lease is over, it is looked at, what was freed is read
            self.clock.now += 0.5 * LEASE if hung else 0.0  # the dead need no lease
            while self._take(group, last) is not None:
                last.consumer.commit()
                self.check(group, last)
        for consumer in (last.consumer, *hung):
            consumer.close()
        ends = self.log.ends(TOPIC)
        for partition, end in enumerate(ends):
            place = (group, partition)
            if self.committed.get(place, 0) != end:
                raise Violated(f"{group}/{partition}: {end} rows, {self.committed.get(place)} read")
        if group == "a":
            copied = Counter(r["n"] for b in self.log.read(OUT) for r in b.to_pylist())
            if copied != self.made or any(count > 1 for count in copied.values()):
                raise Violated("what transactions made of rows is not there exactly once")


def dropped_exactly(folder: str, seed: int) -> None:
    """A topic with flow `drop`: rows appended, rows counted as dropped, and room agree."""
    chosen = random.Random(seed)
    settings = LogSettings(durability="os", background=False)
    with EmbeddedLog(folder, settings, system=HandClock()) as log:
        log.create_topic(TOPIC, "n bigint", partitions=2)
        log.set_topic(TOPIC, flow="drop", flow_rows=50)
        offered = taken = told = 0
        slow = log.consumer(TOPIC, "slow", follow=False, max_rows=5)
        quick = log.consumer(TOPIC, "quick", follow=False)
        for _ in range(60):
            count = chosen.randint(1, 30)
            receipt = log.append(TOPIC, [{"n": n} for n in range(count)])
            offered, taken, told = offered + count, taken + receipt.rows, told + receipt.dropped
            behind = sum(log.ends(TOPIC)) - sum(log.offsets("slow")[TOPIC].values())
            if behind > 50:
                raise Violated(f"the group is {behind} rows behind, not at most 50")
            if behind < 50 and receipt.dropped:
                raise Violated(f"{receipt.dropped} rows dropped, with room for {50 - behind}")
            while next(quick, None) is not None:
                quick.commit()
            if chosen.random() < 0.5 and next(slow, None) is not None:
                slow.commit()
        slow.close()
        quick.close()
        counted = log.dropped(TOPIC)
        if (offered - taken, sum(log.ends(TOPIC))) != (told, taken) or counted != told:
            raise Violated(f"{offered} offered, {taken} taken, {told} told, {counted} counted")
