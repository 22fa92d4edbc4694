"""The fold: what a sequence of entries means. Pure, and the same for every log.

The state of a log is a function of its entries, in order: which entries count, the offset of each
row, the value of each counter, the topics, the committed offsets, the named values. On the embedded
log an entry that a condition rejects is never written; on Kafka it is, and every reader comes to
the same verdict by the same function. So fencing, idempotence and `expect` are decided here and
nowhere else.

* **verdict**: an entry counts iff every `expect` and `require` finds its counter at the value named
  (a counter nobody moved is 0). Then each `expect` moves its counter to v + 1; `require` compares
  only. Without the second kind a zombie that pipelines n and n + 1 gets its n + 1 accepted after a
  successor took n.
* **number**: the accepted rows of a partition are numbered in order, without gaps.
* **apply**: control records replace what they name: a topic, the offsets of a group, a value. They
  are absolute, so folding an entry twice is folding it once; that is what lets shared memory be
  repaired by folding again.

Counters and ends are given as objects with `get`/`put` and as an array, because the embedded log
keeps them in shared memory; nothing here knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace import errors
from headrace.model.sealed import Sealed
from headrace.model.topic import Topic

Offsets = npt.NDArray[np.uint64]


COUNTER_MAX = 2**63 - 1
OWN_COUNTERS = "headrace/"
"""Counters of the log itself start with this; callers cannot name them."""


def topic_counter(name: str) -> str:
    """The counter that guards what is said of topics of this name: their revision."""
    return f"{OWN_COUNTERS}topic/{name}"


def is_name(name: object) -> bool:
    """Whether a counter can have this name: any text but the empty one."""
    try:
        return isinstance(name, str) and bool(name.encode())
    except UnicodeEncodeError:
        return False


def check_counters(conditions: Mapping[str, int]) -> None:
    """Refuse conditions that a caller cannot set."""
    if not isinstance(conditions, Mapping):
        raise errors.BadRows(
            f"conditions are named counters, not {conditions!r}",
            place="expect, require",
            fix="expect={'orders/7': 3}",
        )
    for name, value in conditions.items():
        check_counter(name, value)


def check_counter(name: str, value: int) -> None:
    """Refuse a condition that a caller cannot set."""
    if not (is_name(name) and type(value) is int and 0 <= value < COUNTER_MAX):
        raise errors.BadRows(
            f"a condition is a counter's name and a number, not {name!r}: {value!r}",
            place="expect, require",
            why="conditions compare named counters, which are whole numbers from 0 on",
            fix="expect={'orders/7': 3}",
        )
    if name.startswith(OWN_COUNTERS):
        raise errors.ReservedName(
            f"counter {name!r} belongs to Headrace",
            place="expect, require",
            why=f"counters that start with '{OWN_COUNTERS}' carry topics and writers",
            fix="choose another name",
        )


class Counters(Protocol):
    """Named counters; an absent one is 0."""

    def get(self, name: str) -> int:
        """The counter's value."""

    def put(self, name: str, value: int) -> None:
        """Set it."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """The first condition that failed."""

    kind: str
    name: str
    expected: int
    found: int


def verdict(
    counters: Counters, expect: Mapping[str, int], require: Mapping[str, int]
) -> Rejection | None:
    """None if an entry with these conditions counts, else what rejects it."""
    for kind, conditions in (("require", require), ("expect", expect)):
        for name, value in conditions.items():
            found = counters.get(name)
            if found != value:
                return Rejection(kind, name, value, found)
    return None


def move(counters: Counters, expect: Mapping[str, int]) -> None:
    """Move the counters of an accepted entry; absolute, so twice is once."""
    for name, value in expect.items():
        counters.put(name, value + 1)


def number(ends: Offsets, runs: npt.NDArray[Any], slot: int) -> None:
    """Give each run the next offsets of its partition; its base said how many come before it."""
    runs["base"] += ends[slot:][runs["partition"].astype(np.intp)]


def advance(ends: Offsets, runs: npt.NDArray[Any], slot: int) -> None:
    """Move the partition ends past these runs, the last of each; absolute, so twice is once."""
    ends[slot:][runs["partition"].astype(np.intp)] = runs["base"] + runs["rows"]


@dataclass(slots=True)
class ControlState:
    """The part of the state that is small: topics, committed offsets, named values."""

    topics: dict[str, Topic] = field(default_factory=dict)
    groups: dict[str, dict[str, dict[int, int]]] = field(default_factory=dict)
    """group -> topic -> partition -> the next offset to read."""
    values: dict[str, Any] = field(default_factory=dict)
    by_id: dict[int, Topic] = field(default_factory=dict)
    """Those that were deleted too: their ids and places are not given again."""
    sealed: Sealed = field(default_factory=Sealed)

    def apply(self, control: Mapping[str, Any]) -> None:
        """Fold the control part of one accepted entry."""
        for data in control.get("topics", ()):
            topic = Topic.from_json(data)
            if topic.id not in self.by_id:  # offsets of another topic of this name are not its own
                for offsets in self.groups.values():
                    offsets.pop(topic.name, None)
            self.by_id[topic.id] = topic
            if topic.deleted:
                self.topics.pop(topic.name, None)
            else:
                self.topics[topic.name] = topic
        for group, topics in control.get("offsets", {}).items():
            if topics is None:
                self.groups.pop(group, None)
                continue
            committed = self.groups.setdefault(group, {})
            for topic_name, offsets in topics.items():
                committed.setdefault(topic_name, {}).update(
                    (int(partition), offset) for partition, offset in offsets.items()
                )
        self.values.update(control.get("values", {}))
        if "sealed" in control:
            self.sealed.apply(control["sealed"])

    def copy(self) -> ControlState:
        """A state that can be folded on without changing this one."""
        groups = {
            group: {topic: dict(offsets) for topic, offsets in topics.items()}
            for group, topics in self.groups.items()
        }
        return ControlState(
            dict(self.topics), groups, dict(self.values), dict(self.by_id), self.sealed.copy()
        )

    @property
    def slots(self) -> int:
        """How many places the array of partition ends has."""
        return max((topic.slot + topic.partitions for topic in self.by_id.values()), default=0)

    def revision(self, name: str) -> int:
        """How often something was said of topics of this name, deleted ones too."""
        return max((one.revision for one in self.by_id.values() if one.name == name), default=0)

    def to_json(self) -> dict[str, Any]:
        """As one control record that rebuilds this state from nothing."""
        sealed = self.sealed.to_json()
        return {
            "topics": [topic.to_json() for topic in self.by_id.values()],
            "offsets": self.groups,
            "values": self.values,
            **({"sealed": sealed} if any(sealed.values()) else {}),
        }


CONTROL_KEYS = frozenset(("topics", "offsets", "values", "sealed"))
"""An entry with one of these changes the control state."""
