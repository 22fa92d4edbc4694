"""Bugs of consumer groups, on purpose: see `seeded`.

They show that the random schedules of `group_case` would notice if groups were wrong.
"""

from __future__ import annotations

import tempfile
from typing import Any

from headrace.log.groups import flow, watch
from headrace.log.groups.consumer import Consumer
from headrace.log.groups.members import Membership
from headrace.model.groups import GroupState
from headrace.testing.group_case import GroupCase, dropped_exactly
from headrace.testing.hunt import Catch, look_with
from headrace.testing.seeded import Bug, Patch, instead, nothing, seeding

BUGS: list[Bug] = []
_bug = seeding(BUGS)
TRIES = 40


def catch(bug: Bug) -> Catch:
    """Look for a bug in schedules of the kinds named."""

    def look(number: int) -> tuple[str, int]:
        seed, kind = divmod(number - 1, len(bug.where))
        with tempfile.TemporaryDirectory() as folder:
            _run(f"{folder}/log", seed, bug.where[kind])
        return "", 1

    return look_with(bug, "random schedules", TRIES * len(bug.where), look)


def _run(folder: str, seed: int, kind: str) -> None:
    if kind == "topic":
        dropped_exactly(folder, seed)
    else:
        options: Any = {"peace": {"peace": True}, "drop": {"drop": 7}}.get(kind, {})
        GroupCase(folder, seed, **options).run(100)


@_bug("a commit of an old generation is accepted", "war")
def _() -> list[Patch]:
    return [
        instead(Consumer, "_refuse_if_out", nothing),
        instead(Consumer, "_guards", lambda *_: {}),
    ]


@_bug("a partition is read by two: the next one begins before it is handed over", "peace")
def _() -> list[Patch]:
    original = GroupState.owned

    def owned(self: GroupState, member: int) -> dict[str, frozenset[int]]:
        found = dict(original(self, member))
        for name, parts in self._of(member, lambda one: one.target).items():
            found[name] = found.get(name, frozenset()) | parts
        return found

    return [instead(GroupState, "owned", owned)]


@_bug("whoever takes over begins where the dead one read, not where it committed", "war")
def _() -> list[Patch]:
    furthest: dict[tuple[str, str, str, int], int] = {}
    poll, begin = Consumer._poll, Consumer._begin

    def noted(self: Consumer) -> Any:
        batch = poll(self)
        if batch is not None:
            for partition, end in batch.ends.items():
                furthest[self._log.path, self.group, batch.topic, partition] = end
        return batch

    def begun(self: Consumer, topic: str, partition: int, offset: int) -> None:
        at = furthest.get((self._log.path, self.group, topic, partition), offset)
        begin(self, topic, partition, max(at, offset))

    return [instead(Consumer, "_poll", noted), instead(Consumer, "_begin", begun)]


@_bug("a partition is handed over before what was read of it is committed", "peace")
def _() -> list[Patch]:
    original = Consumer._hand_over

    def at_once(self: Consumer) -> None:
        self._leaving = {t: dict.fromkeys(parts, 0.0) for t, parts in self._leaving.items()}
        original(self)

    return [instead(Consumer, "_hand_over", at_once)]


@_bug("the dead are taken for alive", "war")
def _() -> list[Patch]:
    return [instead(watch, "lives", lambda *_: True)]


@_bug("those who hang are never put out", "war")
def _() -> list[Patch]:
    return [instead(Membership, "_hung", lambda *_: set())]


@_bug("a transaction that failed is taken for committed", "war")
def _() -> list[Patch]:
    def settle(self: Consumer) -> None:
        for one in [one for one in self._pending if one.transaction.over]:
            self._pending.remove(one)
            self._note(one.offsets)

    return [instead(Consumer, "_settle", settle)]


@_bug("a commit notes what is read ahead and was not handed out", "war", "peace")
def _() -> list[Patch]:
    original = Consumer._poll

    def poll(self: Consumer) -> Any:
        batch = original(self)
        if batch is not None and self._rest is not None:
            self._places[batch.topic].update(self._rest.ends)
        return batch

    return [instead(Consumer, "_poll", poll)]


@_bug("what a consumer skips is not counted", "drop")
def _() -> list[Patch]:
    return [instead(Consumer, "_counts", lambda *_: {})]


@_bug("what a consumer skips is counted before it is committed", "drop")
def _() -> list[Patch]:
    original = Consumer._skip

    def skip(self: Consumer, topic: str, partition: int, to: int, why: str) -> None:
        original(self, topic, partition, to, why)
        with self._log.transaction() as transaction:
            places = {topic: {partition: self._places[topic][partition]}}
            for name, count in self._counts(places).items():
                transaction.put_own(name, count)

    return [instead(Consumer, "_skip", skip)]


@_bug("rows that find no room are not counted", "topic")
def _() -> list[Patch]:
    original = flow._fitting

    def fitting(log: Any, parts: Any) -> Any:
        kept, _, lost = original(log, parts)
        return kept, {}, lost

    return [instead(flow, "_fitting", fitting)]


@_bug("room is what the quickest group leaves, not the slowest", "topic")
def _() -> list[Patch]:
    return [instead(flow, "slowest", lambda *_: ("quick", 0))]
