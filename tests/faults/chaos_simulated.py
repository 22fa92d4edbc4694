"""A correct log in a few lines of lists, whose processes record what they are told.

It makes good histories for the checker of the chaos, and the beginnings of bad ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from headrace.testing.chaos_history import (
    ACKED,
    INDEX_BITS,
    REFUSED,
    UNKNOWN,
    Attempt,
    Commit,
    Final,
    History,
    Kept,
    Place,
    Reading,
    Written,
    attempt_of,
)

TOPICS = {"plain": 2, "other": 1, "one": 2, "two": 2, "short": 2}
TWINS = ("one", "two")
GROUP = "group"
GRACE_US = 50


class Simulated:
    """The log, its clock and the history."""

    def __init__(self) -> None:
        self.history = History()
        self.now = 0.0
        self.position = 0
        self.rows: list[tuple[Place, int]] = []
        self.written: dict[int, Written] = {}
        self.starts = {topic: [0] * count for topic, count in TOPICS.items()}
        self.ends = {topic: [0] * count for topic, count in TOPICS.items()}
        self.kept = {"short": Kept(retention=True)}
        self.committed: dict[str, dict[int, int]] = {}
        self.generation = 0

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def append(
        self,
        rows: Mapping[str, Sequence[tuple[int, bool]]],
        outcome: str = ACKED,
        *,
        stored: bool = True,
        whole: bool = True,
    ) -> Attempt:
        number = len(self.history.attempts) + 1
        index, named = 0, {}
        for topic, some in rows.items():
            named[topic] = [
                Written(number << INDEX_BITS | index + at, key, gone)
                for at, (key, gone) in enumerate(some)
            ]
            index += len(some)
        attempt = Attempt(number, named, self.tick(), f"process {number % 3}", whole)
        self.history.attempts[number] = attempt
        if stored:
            self.position += 1
            attempt.received = int(self.tick())
            runs: dict[str, list[tuple[int, int, int]]] = {}
            for topic, written in named.items():
                for partition in range(TOPICS[topic]):
                    mine = [row for row in written if row.key % TOPICS[topic] == partition]
                    if mine:
                        base = self.ends[topic][partition]
                        runs.setdefault(topic, []).append((partition, len(mine), base))
                    for row in mine:
                        self.place(topic, partition, self.position, row, attempt.received)
            if outcome == ACKED and whole:
                attempt.position, attempt.runs = self.position, runs
        attempt.outcome, attempt.ended = outcome, self.tick()
        if not stored or outcome != ACKED:
            attempt.received = None
        return attempt

    def place(self, topic: str, partition: int, position: int, row: Written, at: int) -> Place:
        place = Place(topic, partition, self.ends[topic][partition], position, row.id)
        self.ends[topic][partition] += 1
        self.rows.append((place, at))
        self.written[row.id] = row
        return place

    def read(
        self,
        topics: Sequence[str],
        start: Mapping[str, Any] | None = None,
        partitions: list[int] | None = None,
        name: str = "reader",
    ) -> Reading:
        starts = {topic: list(self.starts[topic]) for topic in topics}
        reading = Reading(name, list(topics), self.tick(), dict(start or {}), partitions, starts)
        found: dict[tuple[int, str], list[Place]] = {}
        for place, received in self.rows:
            if reading.wants(place, received):
                found.setdefault((place.position, place.topic), []).append(place)
        for at, ((position, topic), places) in enumerate(found.items()):
            following = list(found)[at + 1 :]
            last = not following or following[0][0] != position
            reading.batches.append((topic, position, last, places))
        reading.through = self.position
        self.history.readings.append(reading)
        return reading

    def glimpse(self, process: str) -> None:
        self.history.glimpses.append((process, self.tick(), self.position))

    def newest(self, topic: str, position: int) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for place, _ in self.rows:
            if place.topic == topic and place.position <= position:
                found[self.written[place.id].key] = place.id, place.position
        return {key: row for key, row in found.items() if not self.written[row[0]].gone}

    def table(self, position: int | None = None) -> None:
        at = self.position if position is None else position
        tables = {
            topic: [(key, row, where) for key, (row, where) in self.newest(topic, at).items()]
            for topic in TWINS
        }
        self.history.tables.append(("reader", at, tables))

    def expire(self, topic: str, partition: int, first: int) -> None:
        self.starts[topic][partition] = max(first, self.starts[topic][partition])
        self.rows = [
            (place, received)
            for place, received in self.rows
            if place[:2] != (topic, partition) or place.offset >= first
        ]

    def told_gone(self, topic: str, offsets: Mapping[int, int]) -> None:
        start = {"offsets": {str(p): offset for p, offset in offsets.items()}}
        reading = Reading("behind", [topic], self.tick(), start)
        gone = {p: self.starts[topic][p] for p, o in offsets.items() if o < self.starts[topic][p]}
        if gone:
            reading.gone = {topic: gone}
            self.history.readings.append(reading)

    def compact(self) -> None:
        """Of each key of the twins the newest row stays; one that says it is gone, for a while."""
        for topic in TWINS:
            self.kept[topic] = Kept(compact=True, grace_us=GRACE_US)
            last = {
                self.written[place.id].key: place.id
                for place, _ in self.rows
                if place.topic == topic
            }
            self.rows = [
                (place, received)
                for place, received in self.rows
                if place.topic != topic
                or (
                    last[self.written[place.id].key] == place.id
                    and not (self.written[place.id].gone and self.now - received > 2 * GRACE_US)
                )
            ]

    def join(self) -> None:
        self.generation += 1
        self.history.joined.append((GROUP, self.tick(), self.generation))

    def consume(self, topic: str, partition: int, most: int) -> None:
        begin = self.committed.get(topic, {}).get(partition, 0)
        mine = [
            place
            for place, _ in self.rows
            if place[:2] == (topic, partition) and place.offset >= begin
        ][:most]
        self.history.took.setdefault(GROUP, set()).update(mine)
        if mine:
            offsets = {topic: {partition: mine[-1].offset + 1}}
            commit = Commit(GROUP, self.generation, offsets, self.tick(), self.tick(), ACKED)
            self.history.commits.append(commit)
            self.committed.setdefault(topic, {})[partition] = mine[-1].offset + 1

    def final(self) -> Final:
        tables = {
            topic: {key: row for key, (row, _) in self.newest(topic, self.position).items()}
            for topic in TWINS
        }
        return Final(
            list(self.rows), self.starts, self.ends, tables, {GROUP: self.committed}, self.kept,
            TWINS, int(self.tick()),
        )  # fmt: skip


def random_history(seed: int, steps: int = 60) -> tuple[History, Final]:
    """What some processes on a correct log might have recorded."""
    rng = Random(f"simulated/{seed}")
    log = Simulated()
    log.join()
    compacts = rng.random() < 0.5
    for _ in range(steps):
        what = rng.randrange(12)
        outcome = rng.choice((ACKED, ACKED, ACKED, UNKNOWN, REFUSED))
        stored = outcome == ACKED or (outcome == UNKNOWN and rng.random() < 0.5)
        keys = [(rng.randrange(6), False) for _ in range(rng.randint(1, 4))]
        if what < 3:
            topics = rng.sample(["plain", "other", "short"], rng.randint(1, 3))
            log.append(dict.fromkeys(topics, keys), outcome, stored=stored)
        elif what < 5:
            twins = [(key, rng.random() < 0.3) for key in rng.sample(range(6), 2)]
            log.append(dict.fromkeys(TWINS, twins), outcome, stored=stored)
        elif what == 5:
            some = rng.sample(list(TOPICS), rng.randint(1, 4))
            kind = rng.randrange(3)
            start = {"after": rng.randint(0, log.position)} if kind else {}
            if kind == 2:
                start = {"time": rng.randint(0, int(log.now))}
            log.read(some, start, [0] if rng.random() < 0.2 else None)
        elif what == 6:
            offsets = {str(p): rng.randint(s, e) for p, (s, e) in _bounds(log, "plain")}
            log.read(["plain"], {"offsets": offsets})
        elif what == 7:
            log.table(rng.randint(0, log.position) if not compacts else None)
        elif what == 8:
            log.glimpse(f"process {rng.randrange(3)}")
        elif what == 9:
            partition = rng.randrange(2)
            ends = log.ends["short"][partition]
            log.expire("short", partition, rng.randint(0, ends))
            log.told_gone("short", {partition: rng.randint(0, ends)})
        elif what == 10:
            if rng.random() < 0.3:
                log.join()
            log.consume("plain", rng.randrange(2), rng.randint(1, 9))
        elif compacts:
            log.compact()
    return log.history, log.final()


def _bounds(log: Simulated, topic: str) -> list[tuple[int, tuple[int, int]]]:
    return list(enumerate(zip(log.starts[topic], log.ends[topic], strict=True)))


def without(final: Final, *rows: int) -> None:
    """Take rows out of the final contents."""
    final.rows = [one for one in final.rows if one[0].id not in rows]


def rows_of(final: Final, attempt: Attempt) -> list[int]:
    """The ids of an attempt's rows that are there."""
    return [place.id for place, _ in final.rows if attempt_of(place.id) == attempt.number]
