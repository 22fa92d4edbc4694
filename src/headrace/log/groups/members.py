"""Membership: joining a group, leaving it, and putting out those who are dead or hang.

Every change of a group is one entry that expects the generation it was computed from: whoever is
second computes again from what the first one made. What a change is, `model.groups` says; here it
is appended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace import errors
from headrace.log.groups import watch
from headrace.model.fold import is_name, topic_counter
from headrace.model.groups import GroupState, Member, Partitions, group_name, matches
from headrace.model.policy import Pressure
from headrace.model.topic import Topic

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog

RENEWALS = 10
"""A member writes a sign of life at most so many times in a lease."""
Change = Callable[[GroupState], tuple[GroupState, Mapping[str, Any]] | None]
"""What a group becomes, and what else the entry says; None: nothing is to be changed."""


def state_of(log: EmbeddedLog, group: str) -> GroupState:
    """A group as the entries say that are on the disk."""
    return GroupState.from_json(log.value(group_name(group)))


def change(log: EmbeddedLog, group: str, how: Change) -> GroupState:
    """Change a group; the state after it, or as it is if there is nothing to change."""
    name = group_name(group)
    while True:
        state = state_of(log, group)
        made = how(state)
        if made is None:
            return state
        after, more = made
        control = {**more, "values": {**more.get("values", {}), name: after.to_json()}}
        expect = {name: state.generation}
        pressed = _pressed(log, group, after)
        if pressed:
            control["topics"] = [topic.to_json() for topic in pressed]
            expect |= {topic_counter(topic.name): topic.revision - 1 for topic in pressed}
        with contextlib.suppress(errors.Conflict):  # somebody was first: look again
            log.append_entry([], control, expect=expect, require={})
            return after


def _pressed(log: EmbeddedLog, group: str, after: GroupState) -> list[Topic]:
    """The topics as they are to be said anew, when producers begin or end to wait for a group."""
    found = []
    for topic in log.topics():
        read = after.topics.get(topic.name)
        said = after.pressure if read is not None and read.id == topic.id else None
        if topic.pressure.get(group) != said:
            others = {name: one for name, one in topic.pressure.items() if name != group}
            pressure = {**others, group: said} if said is not None else others
            found.append(topic.revised(pressure=pressure))
    return found


def living(log: EmbeddedLog, state: GroupState) -> list[int]:
    """The members whose locks are held."""
    return [n for n, one in state.members.items() if watch.lives(log.path, one.lock)]


def topics_of(log: EmbeddedLog, state: GroupState, wanted: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a group reads: what it read before and is still there, and what its members want."""
    asked = [*wanted, *(name for one in state.members.values() for name in one.topics)]
    found = {}
    for topic in log.topics():
        old = state.topics.get(topic.name)
        if matches(topic.name, asked) or (old is not None and old.id == topic.id):
            found[topic.name] = (topic.id, topic.partitions)
    return found


class Membership:
    """One member of a group, which may join more than once: each time under another number."""

    def __init__(
        self,
        log: EmbeddedLog,
        group: str,
        topics: tuple[str, ...],
        lease_seconds: float,
        pressure: Pressure | None = None,
    ) -> None:
        """Be alive, without having joined; `pressure`: what it then says for the whole group."""
        if not is_name(group):
            raise errors.BadSetting(f"{group!r} is not a group's name", place="group")
        self.log = log
        self.group = group
        self.prefix = watch.prefix_of(group)
        self.topics = topics
        self.lease_seconds = lease_seconds
        self.pressure = pressure
        self.number = 0
        """The generation in which it joined; 0: it has not."""
        self._renewed = log._system.monotonic()
        self._looked = self._renewed
        self._pid = os.getpid()
        self._file = watch.MemberFile(log.path, group, self._renewed)
        self._json: object = None
        self._state = GroupState()
        watch.watches.add(log.path, self)

    # -- what is known ----------------------------------------------------------------------

    def state(self) -> GroupState:
        """The group as it is: cheap when it has not changed."""
        if self._pid != os.getpid():
            raise errors.LogClosed(
                "a consumer does not live on in a forked process",
                place=f"group '{self.group}'",
                why="the member is the process that made it",
                fix="make the consumer after the fork",
            )
        journal, name = self.log.journal, group_name(self.group)
        journal.refresh_control()
        data = journal.control.values.get(name)
        if data is not self._json:
            self.log.sync()  # nothing is acted upon that may be gone after a power cut
            self._json, self._state = data, GroupState.from_json(data)
        return self._state

    # -- changes ----------------------------------------------------------------------------

    def join(self, starts: Callable[[GroupState], Mapping[str, Any]]) -> GroupState:
        """Become a member; `starts` says where partitions begin that were never committed."""
        me = Member(self._file.name, self._pid, self.topics, self.lease_seconds)
        dead: list[str] = []

        def how(state: GroupState) -> tuple[GroupState, Mapping[str, Any]]:
            gone = set(state.members) - set(living(self.log, state))
            dead[:] = [state.members[number].lock for number in gone]
            topics = topics_of(self.log, state, self.topics)
            after = state.next(member=me, gone=gone, topics=topics)
            return replace(after, pressure=self.pressure), starts(after)

        state = change(self.log, self.group, how)
        self.number = state.generation
        watch.forget(self.log.path, dead)
        return state

    def take_up(self, starts: Callable[[GroupState], Mapping[str, Any]]) -> GroupState:
        """Read topics that were made since, and no more those that were deleted."""

        def how(state: GroupState) -> tuple[GroupState, Mapping[str, Any]] | None:
            topics = topics_of(self.log, state)
            if {name: one.id for name, one in state.topics.items()} == {
                name: number for name, (number, _) in topics.items()
            }:
                return None
            after = state.next(topics=topics)
            return after, starts(after)

        return change(self.log, self.group, how)

    def hand_over(self, partitions: Partitions) -> GroupState:
        """Give partitions to whom they are meant for."""

        def how(state: GroupState) -> tuple[GroupState, Mapping[str, Any]] | None:
            if self.number not in state.members:
                return None
            return state.handed_over(self.number, partitions), {}

        return change(self.log, self.group, how)

    def leave(self) -> None:
        """Be a member no more; what was not committed is read again by others."""
        if self._pid != os.getpid():
            return  # the parent's membership is not ours to end
        watch.watches.discard(self.log.path, self)
        with contextlib.suppress(errors.HeadraceError, OSError):  # else: seen as a death
            change(self.log, self.group, self._left)
        self._file.remove()

    def _left(self, state: GroupState) -> tuple[GroupState, Mapping[str, Any]] | None:
        return None if self.number not in state.members else (state.next(gone=[self.number]), {})

    # -- who lives --------------------------------------------------------------------------

    def renew(self) -> None:
        """Say that this member does something; cheap, so that it can be said often."""
        now = self.log._system.monotonic()
        if now - self._renewed >= self.lease_seconds / RENEWALS:
            self._renewed = now
            self._file.renew(now)

    def look(self) -> None:
        """Put out those who are dead; called by the watch, from its own thread."""
        with contextlib.suppress(errors.HeadraceError, OSError):  # the lease finds them, too
            self._put_out(self._dead)

    def look_for_hung(self) -> float:
        """Put out those whose lease is over, a few times in a lease; seconds to the next look."""
        now = self.log._system.monotonic()
        every = self.lease_seconds / 3
        if now - self._looked >= every:
            self._looked = now
            self._put_out(lambda state: self._dead(state) | self._hung(state, now))
        return max(0.0, self._looked + every - now)

    def _put_out(self, who: Callable[[GroupState], set[int]]) -> None:
        dead: list[str] = []

        def how(state: GroupState) -> tuple[GroupState, Mapping[str, Any]] | None:
            gone = who(state) - {self.number}
            dead[:] = [state.members[number].lock for number in gone & self._dead(state)]
            return (state.next(gone=gone), {}) if gone and self.number in state.members else None

        change(self.log, self.group, how)
        watch.forget(self.log.path, dead)

    def _dead(self, state: GroupState) -> set[int]:
        return set(state.members) - set(living(self.log, state)) - {self.number}

    def _hung(self, state: GroupState, now: float) -> set[int]:
        signs = {n: watch.last_sign(self.log.path, one.lock) for n, one in state.members.items()}
        return {
            number
            for number, sign in signs.items()
            if sign is not None and now - sign > state.members[number].lease_seconds
        }
