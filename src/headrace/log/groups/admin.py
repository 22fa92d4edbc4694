"""Groups seen from outside: which there are, how far behind they are, moving, copying, deleting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace import errors
from headrace.log.groups import watch
from headrace.log.groups.consumer import skipped_name
from headrace.log.groups.members import change, living, state_of
from headrace.log.groups.offsets import Place, received, resolve
from headrace.model.groups import GroupState, group_name
from headrace.model.lag import Lag, Summary, summed

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog

PREFIX = group_name("")


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A group as it is now."""

    name: str
    state: GroupState
    alive: tuple[int, ...]
    """The numbers of the members who live; others are dead, and nobody has noticed yet."""
    lags: tuple[Lag, ...]
    """Of each partition of each topic that it reads."""

    @property
    def lag(self) -> Summary:
        """All partitions together."""
        return summed(self.lags)

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "group": self.name,
            "generation": self.state.generation,
            "members": [
                {
                    "member": number,
                    "pid": one.pid,
                    "alive": number in self.alive,
                    "topics": list(one.topics),
                    "partitions": {t: sorted(p) for t, p in self.state.owned(number).items()},
                }
                for number, one in self.state.members.items()
            ],
            "pressure": None if self.state.pressure is None else asdict(self.state.pressure),
            "lag": self.lag.to_json(),
            "topics": {
                topic: summed(lag for lag in self.lags if lag.topic == topic).to_json()
                for topic in dict.fromkeys(lag.topic for lag in self.lags)
            },
            "partitions": [lag.to_json() for lag in self.lags],
        }


@dataclass(frozen=True, slots=True)
class Move:
    """Where a reset takes one partition of a group."""

    topic: str
    partition: int
    before: int | None
    after: int

    @property
    def events(self) -> int | None:
        """How many more will be read again (above 0) or not be read (below 0)."""
        return None if self.before is None else self.before - self.after

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "topic": self.topic,
            "partition": self.partition,
            "from": self.before,
            "to": self.after,
            "events": self.events,
        }


def names(log: EmbeddedLog) -> list[str]:
    """All groups, by name."""
    log.sync()
    log.journal.refresh_control()
    control = log.journal.control
    joined = {
        name.removeprefix(PREFIX)
        for name, value in control.values.items()
        if name.startswith(PREFIX) and (value["members"] or value["topics"])
    }
    return sorted(joined | set(control.groups))


def known(log: EmbeddedLog, group: str) -> GroupState:
    """A group that is there, or the error with the nearest names."""
    every = names(log)
    if group not in every:
        raise errors.UnknownGroup(
            f"there is no group '{group}'", place=log.path, fix=errors.nearest(group, every)
        )
    return state_of(log, group)


def facts(log: EmbeddedLog, group: str) -> GroupFacts:
    """All there is to say of a group."""
    state = known(log, group)
    return GroupFacts(group, state, tuple(living(log, state)), tuple(lags(log, group, state)))


def lags(log: EmbeddedLog, group: str, state: GroupState) -> list[Lag]:
    """How far a group is behind, in each partition of its topics."""
    now = log._system.now_us()
    committed = log.offsets(group)
    found = []
    for topic in log.topics():
        name = topic.name
        if name not in committed and name not in state.topics:
            continue
        offsets, starts, ends = committed.get(name, {}), log.starts(name), log.ends(name)
        behind = {p: max(at, starts[p]) for p, at in offsets.items() if at < ends[p]}
        oldest, problems = _oldest(log, name, behind)
        for partition, at in offsets.items():
            if at > ends[partition]:
                problems[partition] = f"offset {at} was committed, and {ends[partition]} is the end"
        for partition, end in enumerate(ends):
            skipped = log.value(skipped_name(group, name, partition)) or {}
            found.append(
                Lag(
                    name,
                    partition,
                    offsets.get(partition),
                    starts[partition],
                    end,
                    oldest.get(partition),
                    now,
                    topic.policy,
                    sum(skipped.values()),
                    problems.get(partition),
                )
            )
    return found


def _oldest(
    log: EmbeddedLog, topic: str, behind: Mapping[int, int]
) -> tuple[dict[int, int], dict[int, str]]:
    """When the row at each offset was received; and why not, where it cannot be read."""
    try:
        return received(log, topic, behind), {}
    except errors.LogClosed:
        raise
    except errors.HeadraceError as error:  # e.g. an archive out of reach; others may not be there
        if len(behind) == 1:
            return {}, dict.fromkeys(behind, error.fact)
    found: dict[int, int] = {}
    problems: dict[int, str] = {}
    for partition, offset in behind.items():
        some, why = _oldest(log, topic, {partition: offset})
        found |= some
        problems |= why
    return found, problems


def reset(
    log: EmbeddedLog,
    group: str,
    to: Place,
    *,
    topics: str | Sequence[str] | None = None,
    partitions: Sequence[int] | None = None,
    dry_run: bool = False,
    force: bool = False,
) -> list[Move]:
    """Move a group's offsets; with `dry_run` only say where to.

    Refused while members are alive, unless `force` puts them out: they join again, and go on where
    the group is then.
    """
    state = known(log, group)
    have = log.offsets(group)
    wanted = [topics] if isinstance(topics, str) else topics
    wanted = _topics(log, state, have) if wanted is None else list(wanted)
    moves = []
    for name in wanted:
        topic = log.topic(name)
        places = resolve(log, name, to)
        numbers = range(topic.partitions) if partitions is None else partitions
        for partition in numbers:
            if partition not in range(topic.partitions):
                raise errors.BadPosition(
                    f"topic '{name}' has no partition {partition}",
                    place=f"group '{group}'",
                    why=f"it has {topic.partitions}, numbered from 0",
                    fix=f"name one from 0 to {topic.partitions - 1}",
                )
            before = have.get(name, {}).get(partition)
            moves.append(Move(name, partition, before, places[partition]))
    if not dry_run:
        _move(log, group, moves, force=force)
    return moves


def copy(log: EmbeddedLog, source: str, group: str, to: Place | None = None) -> list[Move]:
    """Make a group that starts where another one is, or at another place of its topics."""
    if group in names(log):
        raise errors.GroupExists(f"group '{group}' exists already", place=log.path)
    state = known(log, source)
    have = log.offsets(source)
    if to is None:
        there = {name: have.get(name, {}) for name in _topics(log, state, have)}
        moves = [Move(t, p, None, at) for t, places in there.items() for p, at in places.items()]
    else:
        moves = [
            Move(name, partition, None, at)
            for name in _topics(log, state, have)
            for partition, at in enumerate(resolve(log, name, to))
        ]
    _move(log, group, moves, force=False)
    return moves


def release(log: EmbeddedLog, group: str) -> None:
    """Let producers wait for a group no more, until a member that says so joins it again."""

    def how(state: GroupState) -> tuple[GroupState, Mapping[str, Any]] | None:
        after = replace(state, generation=state.generation + 1, pressure=None)
        return None if state.pressure is None else (after, {})

    known(log, group)
    change(log, group, how)


def delete(log: EmbeddedLog, group: str, *, force: bool = False) -> None:
    """Forget a group and its offsets; nobody waits for it any more."""
    known(log, group)
    _overrule(log, group, {"offsets": {group: None}}, force=force, topics={})


def _topics(log: EmbeddedLog, state: GroupState, have: Mapping[str, object]) -> list[str]:
    """The topics of a group that are still there."""
    return [
        topic.name for topic in log.topics() if topic.name in have or topic.name in state.topics
    ]


def _move(log: EmbeddedLog, group: str, moves: Sequence[Move], *, force: bool) -> None:
    offsets: dict[str, dict[str, int]] = {}
    for move in moves:
        offsets.setdefault(move.topic, {})[str(move.partition)] = move.after
    _overrule(log, group, {"offsets": {group: offsets}}, force=force)


def _overrule(
    log: EmbeddedLog,
    group: str,
    control: Mapping[str, Any],
    *,
    force: bool,
    topics: Mapping[str, tuple[int, int]] | None = None,
) -> None:
    """Change a group from outside, in a generation without members."""

    def how(state: GroupState) -> tuple[GroupState, Mapping[str, Any]]:
        alive = living(log, state)
        if alive and not force:
            pids = ", ".join(str(state.members[number].pid) for number in alive)
            raise errors.GroupInUse(
                f"group '{group}' has {len(alive)} members who are alive, of process {pids}",
                place=f"group '{group}'",
                pids=[state.members[number].pid for number in alive],
            )
        watch.forget(log.path, [one.lock for n, one in state.members.items() if n not in alive])
        after = state.next(gone=list(state.members), topics=topics)
        return (after if topics is None else replace(after, pressure=None)), control

    change(log, group, how)
