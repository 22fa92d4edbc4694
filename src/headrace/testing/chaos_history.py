"""What many processes did to one log, as each recorded it, and whether the log kept its word.

Every process writes a file of JSON lines (`Recorder`), one system call a line, with the machine's
monotonic clock, which all processes of a machine share. `read_history` puts the files together,
`Final` is what the log holds when all is quiet, and `judge` names every **anomaly**. It is pure and
knows nothing of the log but its promises::

    begin, end      an append of rows with ids that nobody else uses, and how it ended:
                    acknowledged, refused, unknown; no end: its process died, which is unknown
    reading, batch, through, gone    a reading, what it gave, how far it is complete, what is gone
    glimpse         the newest position, as somebody was told
    table           tables of several topics at one position
    joined, took, commit, committed  a member of a group
    held            a hold, and whether what it holds could be read

Rules never look at each other. Each has one name; tests hold a bad history for each that no other
rule reports. What is known of a row's place comes from the receipts, from all that was read and
from the final contents together.

**What may be gone.** A row of a topic with retention whose offset is below the first one held. A
row of a compacted topic of whose key a newer one is known; and what says that a key is gone, once
its grace is over and nothing older of the key is left. Nothing else.

What it cannot catch: rows wrong in columns other than id and key (the workers compare these when
they read); what happened to rows of an unknown outcome that nobody ever saw.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

ACKED, REFUSED, UNKNOWN = "acknowledged", "refused", "unknown"
INDEX_BITS = 12
"""The id of a row is the number of its attempt, and these bits: which of its rows it is."""
NEVER = float("inf")


class Written(NamedTuple):
    """A row as a producer meant it."""

    id: int
    key: int
    gone: bool = False
    """It says that its key is gone."""


class Place(NamedTuple):
    """A row as somebody was given it."""

    topic: str
    partition: int
    offset: int
    position: int
    id: int


@dataclass(slots=True)
class Attempt:
    """One try to append an entry; not `whole`: rows that may come in several entries."""

    number: int
    rows: dict[str, list[Written]]
    begun: float
    process: str = ""
    whole: bool = True
    durable: bool = True
    ended: float = NEVER
    outcome: str = UNKNOWN
    position: int | None = None
    """None though acknowledged: a writer found out later that it was stored."""
    runs: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    """Topic: partition, rows and first offset of each run, from the receipt."""
    received: int | None = None


@dataclass(slots=True)
class Reading:
    """What one reading was asked for, and what it gave."""

    name: str
    topics: list[str]
    begun: float
    start: dict[str, Any] = field(default_factory=dict)
    """Nothing: the beginning; `after`: a position; `time`: microseconds; `offsets`: by partition,
    as text; the latest: `after` what was newest once it was open."""
    partitions: list[int] | None = None
    starts: dict[str, list[int]] = field(default_factory=dict)
    """The first offsets held, as known before it began."""
    batches: list[tuple[str, int, bool, list[Place]]] = field(default_factory=list)
    """Topic, position, whether it ends the entry, rows."""
    through: int = 0
    gone: dict[str, dict[int, int]] | None = None
    """It was told that what it asks for is gone: topic: partition: first offset there."""

    def places(self) -> Iterator[Place]:
        """All rows that it gave."""
        for _, _, _, rows in self.batches:
            yield from rows

    @property
    def settled(self) -> int:
        """The position through which it has been given everything."""
        return max([self.through, *(at for _, at, last, _ in self.batches if last)])

    def wants(self, place: Place, received: int) -> bool:
        """Whether it asked for this row."""
        if place.topic not in self.topics:
            return False
        if self.partitions is not None and place.partition not in self.partitions:
            return False
        offsets = self.start.get("offsets")
        if offsets is not None:
            return bool(place.offset >= offsets.get(str(place.partition), NEVER))
        after: int = self.start.get("after", -1)
        return place.position > after and received >= int(self.start.get("time", 0))


@dataclass(slots=True)
class Commit:
    """A member's commit."""

    group: str
    generation: int | None
    """The one that it requires; None: any in which its member is still in the group."""
    offsets: dict[str, dict[int, int]]
    begun: float
    ended: float = NEVER
    outcome: str = UNKNOWN


@dataclass(slots=True)
class History:
    """Everything that was recorded."""

    attempts: dict[int, Attempt] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    glimpses: list[tuple[str, float, int]] = field(default_factory=list)
    """Process, when it asked, the newest position it was told."""
    tables: list[tuple[str, int, dict[str, list[tuple[int, int, int]]]]] = field(
        default_factory=list
    )
    """Process, position, topic: key, id and position of each row."""
    joined: list[tuple[str, float, int]] = field(default_factory=list)
    """Group, when a member knew of it, generation."""
    took: dict[str, set[Place]] = field(default_factory=dict)
    """Group: what its members were given."""
    commits: list[Commit] = field(default_factory=list)
    holds: list[tuple[str, int, bool]] = field(default_factory=list)
    """Name and position of a hold that counts, and whether what it holds could be read."""


@dataclass(slots=True)
class Kept:
    """What may be gone of a topic."""

    retention: bool = False
    compact: bool = False
    grace_us: int = 0


@dataclass(slots=True)
class Final:
    """What the log holds when all is quiet."""

    rows: list[tuple[Place, int]] = field(default_factory=list)
    """In the order of reading; with `received`."""
    starts: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, list[int]] = field(default_factory=dict)
    tables: dict[str, dict[int, int]] = field(default_factory=dict)
    """Topic: key: id."""
    committed: dict[str, dict[str, dict[int, int]]] = field(default_factory=dict)
    kept: dict[str, Kept] = field(default_factory=dict)
    twins: tuple[str, ...] = ()
    """Topics that are only ever written together, the same keys in all of them."""
    now: int = 0
    copies: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Group: the topic it reads, and the one into which it copies each row, with its offsets; the
    key of a copy is the id of the row."""


class Anomaly(NamedTuple):
    """A promise that was broken."""

    name: str
    text: str


def attempt_of(row: int) -> int:
    """The number of the attempt that wrote a row."""
    return row >> INDEX_BITS


# --- recording ------------------------------------------------------------------------------------


class Recorder:
    """Writes the file of one process."""

    def __init__(self, path: str) -> None:
        """Lines are added to the file."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def __call__(self, at: float | None = None, **what: Any) -> None:
        """One line, one system call: what is written stays, however the process ends."""
        line = {"at": time.monotonic() if at is None else at, **what}
        os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def read_history(files: Iterable[Path]) -> History:
    """Put the files of all processes together."""
    history = History()
    for file in files:
        text = file.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]  # the last line of a killed process may be a part
        take_lines(history, file.stem, map(json.loads, whole.splitlines()))
    return history


def take_lines(history: History, process: str, lines: Iterable[Mapping[str, Any]]) -> None:
    """Add what one process recorded."""
    readings: dict[int, Reading] = {}
    commits: dict[int, Commit] = {}
    for line in lines:
        at = line["at"]
        if "begin" in line:
            rows = {t: [Written(*row) for row in rows] for t, rows in line["rows"].items()}
            history.attempts[line["begin"]] = Attempt(
                line["begin"], rows, at, process, line.get("whole", True), line.get("durable", True)
            )
        elif "end" in line:
            attempt = history.attempts[line["end"]]
            attempt.ended, attempt.outcome = at, line["outcome"]
            attempt.position, attempt.received = line.get("position"), line.get("received")
            runs = line.get("runs", {})
            attempt.runs = {t: [(p, n, base) for p, n, base in some] for t, some in runs.items()}
        elif "reading" in line:
            reading = Reading(
                f"{process}/{line['reading']}", line["topics"], at, line.get("start", {}),
                line.get("partitions"), line.get("starts", {}),
            )  # fmt: skip
            readings[line["reading"]] = reading
            history.readings.append(reading)
        elif "batch" in line:
            batch = (line["topic"], line["position"], line["last"], _places(line))
            readings[line["batch"]].batches.append(batch)
        elif "through" in line:
            readings[line["through"]].through = line["position"]
        elif "gone" in line:
            first = line["first"]
            readings[line["gone"]].gone = {t: _whole_keys(some) for t, some in first.items()}
        elif "glimpse" in line:
            history.glimpses.append((process, at, line["glimpse"]))
        elif "table" in line:
            tables = {t: [(k, i, p) for k, i, p in rows] for t, rows in line["table"].items()}
            history.tables.append((process, line["position"], tables))
        elif "joined" in line:
            history.joined.append((line["joined"], at, line["generation"]))
        elif "took" in line:
            history.took.setdefault(line["took"], set()).update(_places(line))
        elif "commit" in line:
            offsets = {t: _whole_keys(some) for t, some in line["offsets"].items()}
            commits[line["commit"]] = Commit(line["group"], line["generation"], offsets, at)
            history.commits.append(commits[line["commit"]])
        elif "held" in line:
            history.holds.append((line["held"], line["position"], line["kept"]))
        elif "committed" in line:
            commit = commits[line["committed"]]
            commit.ended, commit.outcome = at, line["outcome"]


def _places(line: Mapping[str, Any]) -> list[Place]:
    return [Place(line["topic"], *row) for row in line["rows"]]


def _whole_keys(offsets: Mapping[str, int]) -> dict[int, int]:
    return {int(partition): offset for partition, offset in offsets.items()}


# --- what is known --------------------------------------------------------------------------------


class Facts:
    """A history and the final contents, looked up in the ways the rules need."""

    def __init__(self, history: History, final: Final) -> None:
        """Walk over everything once."""
        self.history, self.final = history, final
        self.written = {
            row.id: (topic, row)
            for attempt in history.attempts.values()
            for topic, rows in attempt.rows.items()
            for row in rows
        }
        self.by_id: dict[int, Place] = {}
        self.partitions: dict[tuple[str, int], list[Place]] = defaultdict(list)
        self.of_attempt: dict[int, list[Place]] = defaultdict(list)
        for place, _ in final.rows:
            self.by_id.setdefault(place.id, place)
            self.partitions[place.topic, place.partition].append(place)
            self.of_attempt[attempt_of(place.id)].append(place)
        self.at = {place[:3]: place for place, _ in final.rows}
        self.read = {place for reading in history.readings for place in reading.places()}
        for some in history.took.values():
            self.read |= some
        self.newest = self._newest()
        seen = {*self.by_id, *(place.id for place in self.read)}
        self._silent: dict[tuple[str, int], float] = {}
        for attempt in history.attempts.values():
            for topic, rows in attempt.rows.items() if attempt.outcome == UNKNOWN else ():
                for row in rows:
                    if row.gone and row.id not in seen and self.kept(topic).compact:
                        ended = max(attempt.ended, self._silent.get((topic, row.key), 0.0))
                        self._silent[topic, row.key] = ended

    def stays(self, topic: str, row: int) -> bool:
        """Whether the newest row of a key that anybody knows of must be there.

        Not if it says that the key is gone, nor if that may have been said later, by somebody who
        was not told whether it was stored: that may be gone too by now. (If the table has the row,
        nobody said so.)
        """
        key, gone = self.written[row][1][1:]
        if gone or self.final.tables.get(topic, {}).get(key) == row:
            return not gone
        return self._silent.get((topic, key), 0.0) <= self.history.attempts[attempt_of(row)].begun

    def _newest(self) -> dict[tuple[str, int], tuple[int, int]]:
        """(topic, key) -> position and id of the newest row that anybody knows of."""
        newest: dict[tuple[str, int], tuple[int, int]] = {}
        for topic, key, position, row in self.versions():
            if (position, row) > newest.get((topic, key), (-1, -1)):
                newest[topic, key] = position, row
        return newest

    def versions(self) -> Iterator[tuple[str, int, int, int]]:
        """Topic, key, position and id of every row whose position is known."""
        for attempt in self.history.attempts.values():
            if attempt.outcome == ACKED and attempt.position is not None and attempt.whole:
                for topic, rows in attempt.rows.items():
                    for row in rows:
                        yield topic, row.key, attempt.position, row.id
        for place in (*self.read, *self.by_id.values()):
            if place.id in self.written:
                yield place.topic, self.written[place.id][1].key, place.position, place.id

    def kept(self, topic: str) -> Kept:
        """What may be gone of a topic."""
        return self.final.kept.get(topic) or Kept()

    def first(self, topic: str, partition: int) -> int:
        """The first offset that is held."""
        starts = self.final.starts.get(topic, ())
        return starts[partition] if partition < len(starts) else 0

    def expired(self, topic: str, partition: int, offset: int) -> bool:
        """Whether retention has taken an offset."""
        return self.kept(topic).retention and offset < self.first(topic, partition)

    def may_be_gone(self, row: int) -> bool:
        """Whether a row may be gone by what its topic keeps; see the module."""
        topic, _ = self.written[row]
        kept = self.kept(topic)
        if kept.compact:
            return True  # a rule of its own looks at the newest of each key
        if not kept.retention:
            return False
        runs = self.history.attempts[attempt_of(row)].runs.get(topic)
        return runs is None or any(self.expired(topic, p, base) for p, _, base in runs)

    @functools.cached_property
    def not_given(self) -> list[tuple[Reading, set[int], Place]]:
        """What a reading must have been given and was not; and the attempts it was given of."""
        topics: dict[str, list[tuple[Place, int]]] = defaultdict(list)
        for place, received in self.final.rows:
            topics[place.topic].append((place, received))
        for rows in topics.values():
            rows.sort(key=lambda one: one[0].position)
        found = []
        for reading in self.history.readings:
            if reading.gone is not None or not reading.settled:
                continue
            ids = {place.id for place in reading.places()}
            given = {attempt_of(row) for row in ids}
            for topic in reading.topics:
                rows = topics[topic]
                at = bisect_right(
                    rows, reading.start.get("after", -1), key=lambda one: one[0].position
                )
                while at < len(rows) and rows[at][0].position <= reading.settled:
                    place, received = rows[at]
                    if place.id not in ids and reading.wants(place, received):
                        found.append((reading, given, place))
                    at += 1
        return found


Rule = Callable[[Facts], Iterator[str]]
RULES: dict[str, Rule] = {}


def _rule(name: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES[name] = rule
        return rule

    return register


def judge(history: History, final: Final) -> list[Anomaly]:
    """Every promise that was broken; an empty list when all were kept."""
    facts = Facts(history, final)
    return [Anomaly(name, text) for name, rule in RULES.items() for text in rule(facts)]


# --- appends --------------------------------------------------------------------------------------


@_rule("lost")
def _lost(facts: Facts) -> Iterator[str]:
    """Acknowledged, and not there."""
    for attempt in facts.history.attempts.values():
        if attempt.outcome != ACKED or (attempt.whole and attempt.number in facts.of_attempt):
            continue
        for rows in attempt.rows.values():
            for row in rows:
                if row.id not in facts.by_id and not facts.may_be_gone(row.id):
                    yield f"{_name(attempt)} was acknowledged at {attempt.position}; row {row.id}"
                    break


@_rule("vanished")
def _vanished(facts: Facts) -> Iterator[str]:
    """Somebody was given it, nobody was told that it is stored, and it is not there any more."""
    for place in facts.read:
        attempt = facts.history.attempts.get(attempt_of(place.id))
        if attempt is None or attempt.outcome == ACKED or place.id in facts.by_id:
            continue
        kept = facts.kept(place.topic)
        if place[:3] in facts.at or kept.compact:
            continue
        if not facts.expired(place.topic, place.partition, place.offset):
            yield f"{place} was read"


@_rule("duplicate")
def _duplicate(facts: Facts) -> Iterator[str]:
    """One row at two places: in the end, or in the end and when it was read."""
    for place, _ in facts.final.rows:
        if facts.by_id[place.id] != place:
            yield f"{place} and {facts.by_id[place.id]}"
    for place in facts.read:
        now = facts.by_id.get(place.id)
        if now is not None and now[:3] != place[:3] and facts.at.get(place[:3]) is None:
            yield f"{place} was read, and it is now {now}"


@_rule("reordered")
def _reordered(facts: Facts) -> Iterator[str]:
    """Not in the order of positions, of an entry's own rows, or of receipts and what came later."""
    for rows in facts.partitions.values():
        for one, two in itertools.pairwise(rows):
            if (two.position, two.id) < (one.position, one.id) and two.offset > one.offset:
                yield f"{two} comes after {one}"
    attempts = facts.history.attempts.values()
    for attempt, highest in _highest_before(
        [(a.ended, a.position) for a in attempts if a.outcome == ACKED and a.position is not None],
        [(a.begun, a) for a in attempts],
    ):
        places = facts.of_attempt.get(attempt.number)
        if places is not None and min(place.position for place in places) <= highest:
            yield f"{_name(attempt)} has {places[0]}, and {highest} was there before it began"


@_rule("two values")
def _two_values(facts: Facts) -> Iterator[str]:
    """Two rows at one offset: one when it was read or acknowledged, another one now."""
    seen: dict[tuple[str, int, int], Place] = {}
    for place in (*facts.read, *(place for place, _ in facts.final.rows)):
        other = seen.setdefault(place[:3], place)
        if other.id != place.id:
            yield f"{place} and {other}"
    for attempt in facts.history.attempts.values():
        for topic, runs in attempt.runs.items():
            for partition, count, base in runs:
                for offset in range(base, base + count):
                    now = facts.at.get((topic, partition, offset))
                    if now is not None and attempt_of(now.id) != attempt.number:
                        yield f"{_name(attempt)} was given offset {offset}, and {now} is there"


@_rule("gap")
def _gap(facts: Facts) -> Iterator[str]:
    """Offsets that nobody has, and nothing says why."""
    for (topic, partition), rows in facts.partitions.items():
        if facts.kept(topic).compact:
            continue
        expected = facts.first(topic, partition)
        for place in sorted(rows, key=lambda one: one.offset):
            if place.offset > expected:
                yield f"{topic}/{partition}: {expected} to {place.offset - 1}, before {place}"
            expected = place.offset + 1
        ends = facts.final.ends.get(topic)
        if ends is not None and ends[partition] > expected:
            yield f"{topic}/{partition}: {expected} to {ends[partition] - 1}, at the end"
    for reading in facts.history.readings:
        last: dict[tuple[str, int], int] = {}
        for place in reading.places():
            before = last.get(place[:2])
            kept = facts.kept(place.topic)
            dense = not kept.compact and not kept.retention
            if dense and before is not None and place.offset > before + 1:
                yield f"{reading.name} was given {place} right after offset {before}"
            last[place[:2]] = place.offset


@_rule("torn")
def _torn(facts: Facts) -> Iterator[str]:
    """A part of an entry: in the log, or for a reader that was told that it has all of it."""
    for number, places in facts.of_attempt.items():
        attempt = facts.history.attempts.get(number)
        if attempt is None or not attempt.whole:
            continue
        if len({place.position for place in places}) > 1:
            yield f"{_name(attempt)} is at two positions: {places[0]} and {places[-1]}"
        ids = {row.id for rows in attempt.rows.values() for row in rows}
        missing = [
            row for row in sorted(ids - {p.id for p in places}) if not facts.may_be_gone(row)
        ]
        if missing:
            yield f"{_name(attempt)}: {len(places)} of {len(ids)} rows are there, not {missing[0]}"
    for reading, given, place in facts.not_given:
        attempt = facts.history.attempts.get(attempt_of(place.id))
        if attempt is not None and attempt.whole and attempt.number in given:
            yield f"{reading.name} was given a part of {_name(attempt)}, and not {place}"


@_rule("missed")
def _missed(facts: Facts) -> Iterator[str]:
    """A reader was told that it is through a position, and was not given an entry before it."""
    for reading, given, place in facts.not_given:
        attempt = facts.history.attempts.get(attempt_of(place.id))
        if attempt is None or not attempt.whole or attempt.number not in given:
            yield f"{reading.name} is through {reading.settled}, and was not given {place}"


@_rule("refused and there")
def _refused(facts: Facts) -> Iterator[str]:
    """An append that was refused has left something behind."""
    for place in {*facts.by_id.values(), *facts.read}:
        attempt = facts.history.attempts.get(attempt_of(place.id))
        if attempt is not None and attempt.outcome == REFUSED:
            yield f"{_name(attempt)}: {place}"


@_rule("invented")
def _invented(facts: Facts) -> Iterator[str]:
    """A row that nobody wrote, or not into this topic."""
    for place in {*facts.by_id.values(), *facts.read}:
        if place.id not in facts.written or facts.written[place.id][0] != place.topic:
            yield f"{place}"


# --- order in time --------------------------------------------------------------------------------


@_rule("went back")
def _went_back(facts: Facts) -> Iterator[str]:
    """Positions or offsets of one reader, or of one group, that go back."""
    for reading in facts.history.readings:
        position, ends = -1, dict[tuple[str, int], int]()
        for _, at, _, places in reading.batches:
            if at < position:
                yield f"{reading.name} was at {position}, then at {at}"
            position = at
            for place in places:
                if place.offset < ends.get(place[:2], 0):
                    yield f"{reading.name} was past {place}"
                ends[place[:2]] = place.offset + 1
    told: dict[str, int] = {}
    for process, _, position in facts.history.glimpses:
        if position < told.get(process, 0):
            yield f"{process} was told {told[process]}, then {position}"
        told[process] = max(position, told.get(process, 0))
    done: dict[tuple[str, str, int], list[tuple[float, int]]] = defaultdict(list)
    asked: dict[tuple[str, str, int], list[tuple[float, int]]] = defaultdict(list)
    for commit in facts.history.commits:
        for topic, offsets in commit.offsets.items() if commit.outcome == ACKED else ():
            for partition, offset in offsets.items():
                done[commit.group, topic, partition].append((commit.ended, offset))
                asked[commit.group, topic, partition].append((commit.begun, offset))
    for (group, topic, partition), ends_of in done.items():
        for offset, highest in _highest_before(ends_of, asked[group, topic, partition]):
            if offset < highest:
                yield f"group {group}: {topic}/{partition} from {highest} to {offset}"


@_rule("stale")
def _stale(facts: Facts) -> Iterator[str]:
    """Somebody was told of a position below one that had been acknowledged before he asked."""
    done = [
        (a.ended, a.position)
        for a in facts.history.attempts.values()
        if a.outcome == ACKED and a.position is not None and a.durable
    ]
    asked = [(at, (process, position)) for process, at, position in facts.history.glimpses]
    for (process, position), highest in _highest_before(done, asked):
        if position < highest:
            yield f"{process} was told {position}, and {highest} had been acknowledged"


T = TypeVar("T")


def _highest_before(
    done: Iterable[tuple[float, int]], asked: Iterable[tuple[float, T]]
) -> Iterator[tuple[T, int]]:
    """For all that was asked, the highest number that was done before; (time, what) of both."""
    ends, at, highest = sorted(done), 0, -1
    for begun, what in sorted(asked, key=lambda one: one[0]):
        while at < len(ends) and ends[at][0] < begun:
            highest = max(highest, ends[at][1])
            at += 1
        yield what, highest


@_rule("time went back")
def _time(facts: Facts) -> Iterator[str]:
    """`received_time` below that of an earlier position."""
    known = {
        (attempt.position, attempt.received)
        for attempt in facts.history.attempts.values()
        if attempt.position is not None and attempt.received is not None
    } | {(place.position, received) for place, received in facts.final.rows}
    ordered = sorted(known)
    for (before, earlier), (position, received) in itertools.pairwise(ordered):
        if received < earlier:
            yield f"position {position} was received at {received}, {before} at {earlier}"


# --- what is gone ---------------------------------------------------------------------------------


@_rule("read of what is gone")
def _gone_read(facts: Facts) -> Iterator[str]:
    """Rows below the first offset held, of which the reader knew before it began."""
    for reading in facts.history.readings:
        for place in reading.places():
            starts = reading.starts.get(place.topic)
            if starts is not None and place.offset < starts[place.partition]:
                yield f"{reading.name} was given {place}; held from {starts[place.partition]}"


@_rule("not told what is gone")
def _not_told(facts: Facts) -> Iterator[str]:
    """A reader asked for offsets that were gone, as was known, and was given later ones instead."""
    for reading in facts.history.readings:
        if reading.gone is not None or not reading.settled:
            continue
        for partition, offset in reading.start.get("offsets", {}).items():
            for topic, starts in reading.starts.items():
                if offset < starts[int(partition)]:
                    yield f"{reading.name}: {topic}/{partition} from {offset}, held from {starts}"


@_rule("told gone of what is there")
def _told_gone(facts: Facts) -> Iterator[str]:
    """A reader was refused what is still held, or was told of a first offset above the true one."""
    for reading in facts.history.readings:
        asked = {int(p): offset for p, offset in reading.start.get("offsets", {}).items()}
        for topic, firsts in (reading.gone or {}).items():
            for partition, first in firsts.items():
                held = facts.first(topic, partition)
                if held < first or held <= asked.get(partition, 0):
                    yield f"{reading.name}: {topic}/{partition} from {first}, held from {held}"


@_rule("newest dropped")
def _newest_dropped(facts: Facts) -> Iterator[str]:
    """Compaction took the newest row of a key."""
    for (topic, key), (position, row) in facts.newest.items():
        dropped = row not in facts.by_id and facts.stays(topic, row)
        if facts.kept(topic).compact and dropped and not _below_start(facts, topic, row):
            yield f"{topic}, key {key}: row {row} of position {position}"


@_rule("tombstone forgotten")
def _tombstone(facts: Facts) -> Iterator[str]:
    """What says that a key is gone has gone itself: before its grace, or before older rows."""
    keys: dict[tuple[str, int], Place] = {}
    for place in facts.by_id.values():
        if facts.kept(place.topic).compact and place.id in facts.written:
            keys[place.topic, facts.written[place.id][1].key] = place
    for (topic, key), (_, row) in facts.newest.items():
        kept = facts.kept(topic)
        if not kept.compact or not facts.written[row][1].gone or row in facts.by_id:
            continue
        if (topic, key) in keys:
            yield f"{topic}, key {key}: {keys[topic, key]} is there again, {row} is not"
        received = facts.history.attempts[attempt_of(row)].received
        early = received is not None and facts.final.now - received < kept.grace_us
        if early and not _below_start(facts, topic, row):
            yield f"{topic}, key {key}: row {row} went within its grace"


def _below_start(facts: Facts, topic: str, row: int) -> bool:
    runs = facts.history.attempts[attempt_of(row)].runs.get(topic, ())
    return any(facts.expired(topic, partition, base) for partition, _, base in runs)


@_rule("hold ignored")
def _hold(facts: Facts) -> Iterator[str]:
    """What a hold keeps was gone."""
    for name, position, kept in facts.history.holds:
        if not kept:
            yield f"{name}: what comes after {position}"


# --- tables ---------------------------------------------------------------------------------------


@_rule("wrong table")
def _wrong_table(facts: Facts) -> Iterator[str]:
    """A table does not hold the newest row of each key at its position."""
    known: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for topic, key, position, row in facts.versions():
        known[topic, key].append((position, row))
    by_topic: dict[str, list[int]] = defaultdict(list)
    for (topic, key), versions in known.items():
        versions.sort()
        by_topic[topic].append(key)
    for process, at, tables in facts.history.tables:
        for topic, shown in tables.items():
            if facts.kept(topic).retention:
                continue
            rows = {key: (position, row) for key, row, position in shown}
            for key in {*by_topic[topic], *rows}:
                versions = known.get((topic, key), [])
                before = bisect_right(versions, (at, NEVER))
                newest = versions[before - 1] if before else None
                there = rows.get(key)
                if there is not None and (there[0] > at or (newest and newest > there)):
                    yield f"{process}: {topic} at {at}, key {key}: {there}, newest is {newest}"
                elif there is None and newest and facts.stays(topic, newest[1]):
                    yield f"{process}: {topic} at {at} has no key {key}; newest is {newest}"
    for topic, table in facts.final.tables.items():
        expected = {
            key: row for (of, key), (_, row) in facts.newest.items()
            if of == topic and facts.stays(topic, row)
        }  # fmt: skip
        if table != expected:
            key = next(k for k in {*table, *expected} if table.get(k) != expected.get(k))
            yield f"{topic}, key {key}: {table.get(key)} in the end, not {expected.get(key)}"


@_rule("disagree")
def _disagree(facts: Facts) -> Iterator[str]:
    """Topics that are written together, and are not of one moment at one position."""
    for process, at, tables in facts.history.tables:
        views = [
            {key: attempt_of(row) for key, row, _ in tables[topic]}
            for topic in facts.final.twins
            if topic in tables
        ]
        for one, two in itertools.pairwise(views):
            for key in sorted(one.keys() | two.keys()):
                if one.get(key) != two.get(key):
                    yield f"{process} at {at}, key {key}: {one.get(key)} and {two.get(key)}"
                    break


# --- groups ---------------------------------------------------------------------------------------


@_rule("old generation")
def _old_generation(facts: Facts) -> Iterator[str]:
    """A commit was taken though a later generation had begun before it was asked for."""
    for group in {commit.group for commit in facts.history.commits}:
        begun = [(at, generation) for of, at, generation in facts.history.joined if of == group]
        taken = [
            (commit.begun, commit.generation)
            for commit in facts.history.commits
            if commit.group == group and commit.outcome == ACKED and commit.generation is not None
        ]
        for generation, highest in _highest_before(begun, taken):
            if generation < highest:
                yield f"group {group}: a commit of generation {generation}, after {highest}"


@_rule("skipped")
def _skipped(facts: Facts) -> Iterator[str]:
    """A group has committed past a row that none of its members was given."""
    for group, topics in facts.final.committed.items():
        took = {place[:3] for place in facts.history.took.get(group, ())}
        for topic, offsets in topics.items():
            for partition, end in offsets.items():
                for place in facts.partitions.get((topic, partition), ()):
                    if place.offset < end and place[:3] not in took:
                        yield f"group {group} is at {end} of {topic}/{partition}, without {place}"
                        break


@_rule("not once")
def _not_once(facts: Facts) -> Iterator[str]:
    """What a group makes of its rows, in one entry with its offsets, is there once for each row."""
    for group, (source, target) in facts.final.copies.items():
        committed = facts.final.committed.get(group, {}).get(source, {})
        rows = Counter(
            place.id
            for (topic, partition), places in facts.partitions.items()
            for place in places
            if topic == source and place.offset < committed.get(partition, 0)
        )
        copies = Counter(
            facts.written[place.id][1].key
            for place in facts.by_id.values()
            if place.topic == target and place.id in facts.written
        )
        for row in [*(rows - copies), *(copies - rows)][:5]:
            yield f"group {group}: row {row} of {source} is {copies[row]} times in {target}"


def _name(attempt: Attempt) -> str:
    return f"attempt {attempt.number} of {attempt.process or 'somebody'}"


def counted(history: History) -> dict[str, int]:
    """How much there was, for a report."""
    outcomes = [attempt.outcome for attempt in history.attempts.values()]
    return {
        "appends": len(outcomes),
        **{name: outcomes.count(name) for name in (ACKED, REFUSED, UNKNOWN)},
        "rows": sum(len(rows) for a in history.attempts.values() for rows in a.rows.values()),
        "readings": len(history.readings),
        "rows_read": sum(len(rows) for r in history.readings for _, _, _, rows in r.batches),
        "tables": len(history.tables),
        "gone": sum(reading.gone is not None for reading in history.readings),
        "commits": len(history.commits),
        "holds": len(history.holds),
    }


def first_of_each(found: Sequence[Anomaly]) -> list[str]:
    """A report: the first few of each name."""
    names = dict.fromkeys(one.name for one in found)
    return [
        f"{name}: {text}"
        for name in names
        for text in [one.text for one in found if one.name == name][:3]
    ]
