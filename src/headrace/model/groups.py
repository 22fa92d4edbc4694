"""Consumer groups, the pure part: who is in a group, and who reads which partition.

A group is a named value of the log, `headrace/group/NAME`, guarded by the counter of the same name,
its **generation**: each change *expects* the generation it was computed from, so changes come one
after the other whoever makes them, and there is no leader.

A member is known by the generation in which it joined; it never gets that number again, so to be
still in the group under one's number is to have been in it all the time. Per partition there is an
**owner** (who may read and commit) and a **target** (who should). They differ only while a member
that is alive has something to finish: it stops reading the partition, commits, and hands it over.
What belongs to nobody goes to its target at once. So a member that joins or leaves in peace causes
no row to be read twice, and one that dies causes only what it had not committed.

`assign` is sticky: nothing moves that need not, and no single move would make it more even.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from headrace.model.fold import OWN_COUNTERS
from headrace.model.policy import Pressure

NOBODY = 0
Owners = tuple[int, ...]
"""One number of a member a partition."""
Partitions = Mapping[str, Iterable[int]]


def group_name(group: str) -> str:
    """The name of a group's value, and of the counter that is its generation."""
    return f"{OWN_COUNTERS}group/{group}"


def is_pattern(topic: str) -> bool:
    """Whether this stands for all topics that match it: names have none of these."""
    return any(sign in topic for sign in "*?[")


def matches(topic: str, wanted: Iterable[str]) -> bool:
    """Whether a topic is one of those that are named or described."""
    return any(topic == one or fnmatchcase(topic, one) for one in wanted)


def assign(wanted: Mapping[int, frozenset[str]], owners: Mapping[str, Owners]) -> dict[str, Owners]:
    """Who should have each partition: `wanted` are the topics of each member."""
    target: dict[str, list[int]] = {}
    held: dict[int, dict[str, list[int]]] = {member: {} for member in sorted(wanted)}
    load = dict.fromkeys(held, 0)

    def give(topic: str, partition: int, member: int) -> None:
        target[topic][partition] = member
        held[member].setdefault(topic, []).append(partition)
        load[member] += 1

    free = []
    for topic in sorted(owners):
        target[topic] = [NOBODY] * len(owners[topic])
        for partition, member in enumerate(owners[topic]):
            if member in wanted and topic in wanted[member]:
                give(topic, partition, member)
            else:
                free.append((topic, partition))
    for topic, partition in free:
        able = [member for member in load if topic in wanted[member]]
        if able:
            give(topic, partition, min(able, key=lambda member: (load[member], member)))
    while (move := _better(wanted, held, load)) is not None:
        topic, giver, taker = move
        load[giver] -= 1
        give(topic, held[giver][topic].pop(), taker)
    return {topic: tuple(members) for topic, members in target.items()}


def _better(
    wanted: Mapping[int, frozenset[str]],
    held: Mapping[int, Mapping[str, list[int]]],
    load: Mapping[int, int],
) -> tuple[str, int, int] | None:
    """A topic, who gives a partition of it, who takes it: the step that evens loads most."""
    order = sorted(load, key=lambda member: (load[member], member))
    for giver in reversed(order):
        for taker in order:
            if load[giver] - load[taker] < 2:
                break
            common = [t for t, parts in held[giver].items() if parts and t in wanted[taker]]
            if common:
                return max(common, key=lambda topic: (len(held[giver][topic]), topic)), giver, taker
    return None


@dataclass(frozen=True, slots=True)
class Member:
    """Somebody who reads for the group."""

    lock: str
    """The file that it keeps locked while it lives."""
    pid: int
    topics: tuple[str, ...]
    """Names, or patterns such as `shop.*`."""
    lease_seconds: float
    """It is put out when it does not iterate or commit for so long."""


@dataclass(frozen=True, slots=True)
class Division:
    """One topic of a group."""

    id: int
    """Of the topic: a name can be used again for another one."""
    owner: Owners
    target: Owners


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group in one generation; each method gives the next one."""

    generation: int = 0
    members: Mapping[int, Member] = field(default_factory=dict)
    topics: Mapping[str, Division] = field(default_factory=dict)
    pressure: Pressure | None = None
    """Producers of its topics wait for it; the member that joined last says so, for good."""

    def next(
        self,
        *,
        member: Member | None = None,
        gone: Iterable[int] = (),
        topics: Mapping[str, tuple[int, int]] | None = None,
    ) -> GroupState:
        """With one member more, whose number is the new generation; without those who are gone.

        `topics`, id and number of partitions of each, replace those it has. What is owned by nobody
        who is there goes where it should be.
        """
        out = frozenset(gone)
        members = {number: one for number, one in self.members.items() if number not in out}
        if member is not None:
            members[self.generation + 1] = member
        divisions = self._divisions(topics) if topics is not None else self.topics
        wanted = {
            number: frozenset(name for name in divisions if matches(name, one.topics))
            for number, one in members.items()
        }
        targets = assign(wanted, {name: one.owner for name, one in divisions.items()})
        settled = {
            name: Division(
                one.id,
                tuple(
                    owner if name in wanted.get(owner, ()) else target
                    for owner, target in zip(one.owner, targets[name], strict=True)
                ),
                targets[name],
            )
            for name, one in divisions.items()
        }
        return GroupState(self.generation + 1, members, settled, self.pressure)

    def _divisions(self, topics: Mapping[str, tuple[int, int]]) -> dict[str, Division]:
        found = {}
        for name, (number, partitions) in topics.items():
            old, nobody = self.topics.get(name), (NOBODY,) * partitions
            found[name] = old if old and old.id == number else Division(number, nobody, nobody)
        return found

    def handed_over(self, member: int, partitions: Partitions) -> GroupState:
        """With these partitions of a member given to whom they are meant for."""
        topics = dict(self.topics)
        for name, numbers in partitions.items():
            division = topics[name]
            owner = list(division.owner)
            for partition in numbers:
                if owner[partition] == member:
                    owner[partition] = division.target[partition]
            topics[name] = replace(division, owner=tuple(owner))
        return replace(self, generation=self.generation + 1, topics=topics)

    def owned(self, member: int) -> dict[str, frozenset[int]]:
        """What a member may read and commit."""
        return self._of(member, lambda one: one.owner)

    def to_hand_over(self, member: int) -> dict[str, frozenset[int]]:
        """What it has and should give to another."""
        owned, meant = self.owned(member), self._of(member, lambda one: one.target)
        more = {name: have - meant.get(name, frozenset()) for name, have in owned.items()}
        return {name: partitions for name, partitions in more.items() if partitions}

    def _of(self, member: int, which: Any) -> dict[str, frozenset[int]]:
        found = {
            name: frozenset(p for p, one in enumerate(which(division)) if one == member)
            for name, division in self.topics.items()
        }
        return {name: partitions for name, partitions in found.items() if partitions}

    def to_json(self) -> dict[str, Any]:
        """As it stands in the log."""
        return {
            "generation": self.generation,
            "members": {
                str(number): {
                    "lock": member.lock,
                    "pid": member.pid,
                    "topics": list(member.topics),
                    "lease_seconds": member.lease_seconds,
                }
                for number, member in self.members.items()
            },
            "topics": {
                name: {"id": one.id, "owner": list(one.owner), "target": list(one.target)}
                for name, one in self.topics.items()
            },
            **({"pressure": self.pressure.to_json()} if self.pressure else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> GroupState:
        """The inverse; of nothing, a group that nobody has joined yet."""
        if data is None:
            return cls()
        return cls(
            data["generation"],
            {
                int(number): Member(
                    one["lock"], one["pid"], tuple(one["topics"]), one["lease_seconds"]
                )
                for number, one in data["members"].items()
            },
            {
                name: Division(one["id"], tuple(one["owner"]), tuple(one["target"]))
                for name, one in data["topics"].items()
            },
            Pressure.from_json(data.get("pressure")),
        )
