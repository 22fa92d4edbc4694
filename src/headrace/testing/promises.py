"""What was promised while a workload ran, and whether a log still keeps it: a plain-list oracle.

A `History` remembers every attempt to append (what it was to write, how it ended, at which
position) and everything a reader was shown, each with the number of machine operations done by
then. So it can be asked for any crash point: what had to survive there, what may, what must not be
there?

`judge` compares that with `Content`, what a log holds after it was opened again. It knows nothing
of the log's inner life; it holds lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

OPEN, TAKEN, REFUSED, UNKNOWN = "open", "taken", "refused", "unknown"
"""How an attempt ended: not yet, with a receipt, with an error that says it was not taken, or with
one that does not say."""


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """One row as a reader saw it."""

    topic: str
    partition: int
    offset: int
    attempt: int
    """The attempt that wrote it: every row carries its number."""
    index: int
    """Which of the attempt's rows in this topic it is."""
    value: int = 0
    """A checksum of its other columns."""


@dataclass(slots=True)
class Attempt:
    """One try to append an entry."""

    number: int
    rows: dict[str, int]
    """Topic: how many rows."""
    expect: dict[str, int]
    require: dict[str, int]
    durable: bool
    """A receipt means that it is on the disk."""
    started: int
    ended: int = -1
    outcome: str = OPEN
    position: int = 0
    error: str = ""


@dataclass(slots=True)
class Content:
    """What an opened log shows."""

    rows: list[Row]
    """All of them, each topic's in the order in which a reader gets them."""
    counters: dict[str, int]
    upper: int
    """The position of the last entry."""
    positions: dict[int, int] = field(default_factory=dict)
    """Attempt: the position at which a reader gets it, where that is known."""
    topics: tuple[str, ...] = ()
    """The topics that were read."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a reader was given at once; a reader reads its topics from the beginning."""

    now: int
    reader: str
    topics: frozenset[str]
    rows: tuple[Row, ...]
    through: int
    """The position through which it has now read."""


@dataclass(slots=True)
class History:
    """Everything that was promised."""

    attempts: list[Attempt] = field(default_factory=list)
    shown: list[Shown] = field(default_factory=list)
    counters: tuple[str, ...] = ()
    """Names of the counters that are compared."""

    def start(
        self, rows: Mapping[str, int], *, expect: Mapping[str, int] | None = None,
        require: Mapping[str, int] | None = None, durable: bool, now: int,
    ) -> Attempt:  # fmt: skip
        """An append begins."""
        attempt = Attempt(
            len(self.attempts) + 1,
            dict(rows),
            dict(expect or {}),
            dict(require or {}),
            durable,
            now,
        )
        self.attempts.append(attempt)
        return attempt

    def show(
        self, reader: str, topics: Iterable[str], rows: Iterable[Row], through: int, now: int
    ) -> None:
        """A reader was given rows, and told that it is through a position."""
        self.shown.append(Shown(now, reader, frozenset(topics), tuple(rows), through))

    def until(self, now: int) -> History:
        """What of it had happened when `now` operations were done."""
        attempts = []
        for attempt in self.attempts:
            if attempt.started > now:
                break
            under_way = attempt.ended > now
            attempts.append(_unended(attempt) if under_way else attempt)
        shown = [shown for shown in self.shown if shown.now <= now]
        return History(attempts, shown, self.counters)

    def version(self, now: int) -> tuple[int, int, int]:
        """Equal for two moments between which nothing began, ended or was shown."""
        return (
            sum(attempt.started <= now for attempt in self.attempts),
            sum(0 <= attempt.ended <= now for attempt in self.attempts),
            sum(shown.now <= now for shown in self.shown),
        )

    def branch(self) -> History:
        """A history that goes on from here without changing this one: nobody lives any more.

        What was still under way ends here, and nobody knows how.
        """
        now = self.until(1 << 60)
        now.attempts = [
            replace(a, started=0, ended=0, outcome=UNKNOWN if a.outcome == OPEN else a.outcome)
            for a in now.attempts
        ]
        now.shown = [replace(shown, now=0) for shown in now.shown]
        return now

    def known_through(self, *, killed: bool) -> int:
        """The position through which everything must have survived.

        A power cut spares what a durable receipt covers and what was shown; the death of processes
        spares whatever has a receipt.
        """
        shown = max((shown.through for shown in self.shown), default=0)
        taken = (a.position for a in self.attempts if a.outcome == TAKEN and (a.durable or killed))
        return max(shown, max(taken, default=0))


def _unended(attempt: Attempt) -> Attempt:
    return replace(attempt, ended=-1, outcome=OPEN, position=0, error="")


def judge(history: History, content: Content, *, killed: bool = False) -> list[str]:
    """Everything in which the log breaks a promise; an empty list when it keeps them all."""
    verdicts: list[str] = []
    attempts = {attempt.number: attempt for attempt in history.attempts}
    found: dict[int, list[Row]] = {}
    for row in content.rows:
        found.setdefault(row.attempt, []).append(row)
    verdicts += _offsets(content.rows)
    verdicts += _whole(attempts, found)
    verdicts += _kept(history, found, killed=killed)
    verdicts += _shown(history, content)
    verdicts += _order(attempts, content)
    verdicts += _counters(history, content, found)
    return verdicts


def _offsets(rows: list[Row]) -> list[str]:
    """Offsets of a partition are dense, from 0, in the order of reading."""
    verdicts, ends = [], dict[tuple[str, int], int]()
    for row in rows:
        end = ends.get((row.topic, row.partition), 0)
        if row.offset != end:
            what = "twice" if row.offset < end else "with a gap"
            verdicts.append(f"offsets {what}: {row}, expected offset {end}")
        ends[row.topic, row.partition] = row.offset + 1
    return verdicts


def _whole(attempts: Mapping[int, Attempt], found: Mapping[int, list[Row]]) -> list[str]:
    """Every entry is there once and whole, or not at all."""
    verdicts = []
    for number, rows in found.items():
        attempt = attempts.get(number)
        if attempt is None:
            verdicts.append(f"rows of attempt {number}, which nobody made: {rows[0]}")
            continue
        if attempt.outcome == REFUSED:
            verdicts.append(f"attempt {number} was refused ({attempt.error}), and is there")
        expected = sorted((t, index) for t, count in attempt.rows.items() for index in range(count))
        there = sorted((row.topic, row.index) for row in rows)
        if there != expected:
            twice = len(there) != len(set(there))
            verdicts.append(
                f"attempt {number} is {'there twice' if twice else 'not whole'}: "
                f"{len(there)} rows of {len(expected)}"
            )
    return verdicts


def _kept(history: History, found: Mapping[int, list[Row]], *, killed: bool) -> list[str]:
    """What was acknowledged is there."""
    through = history.known_through(killed=killed)
    return [
        f"attempt {a.number} was acknowledged at position {a.position}, and is lost"
        for a in history.attempts
        if a.outcome == TAKEN and a.position <= through and a.number not in found and a.rows
    ]


def _shown(history: History, content: Content) -> list[str]:
    """What a reader saw is there, unchanged, and nothing has appeared behind it."""
    places = {(row.topic, row.partition, row.offset): row for row in content.rows}
    verdicts = []
    readers: dict[str, tuple[int, set[int], set[str]]] = {}
    for shown in history.shown:
        for row in shown.rows:
            now = places.get((row.topic, row.partition, row.offset))
            if now != row:
                verdicts.append(f"a reader saw {row}, and there is now {now or 'nothing'}")
        if shown.through > content.upper:
            verdicts.append(
                f"a reader was through {shown.through}, and the log ends at {content.upper}"
            )
        through, seen, topics = readers.setdefault(shown.reader, (0, set(), set()))
        seen.update(row.attempt for row in shown.rows)
        topics.update(shown.topics)
        readers[shown.reader] = max(through, shown.through), seen, topics
    for reader, (through, seen, topics) in readers.items():
        there = {row.attempt for row in content.rows if row.topic in topics}
        for number in sorted(there - seen):
            position = content.positions.get(number, through + 1)
            if position <= through:
                verdicts.append(
                    f"attempt {number} appeared at position {position}, behind {reader}, which "
                    f"was through {through} and had not seen it"
                )
    return verdicts[:5]


def _order(attempts: Mapping[int, Attempt], content: Content) -> list[str]:
    """Positions are what the receipts said, and rows of a partition come in their order."""
    verdicts = []
    for number, position in content.positions.items():
        attempt = attempts.get(number)
        if attempt is not None and attempt.outcome == TAKEN and attempt.position != position:
            verdicts.append(
                f"attempt {number} had position {attempt.position}, and now has {position}"
            )
    last: dict[tuple[str, int], tuple[int, int]] = {}
    for row in content.rows:
        key = (row.topic, row.partition)
        now = (content.positions.get(row.attempt, 0), row.index)
        if row.attempt in content.positions and key in last and now <= last[key]:
            verdicts.append(f"{row} comes after a row of position and index {last[key]}")
        if row.attempt in content.positions:
            last[key] = now
    positions = list(content.positions.values())
    if len(set(positions)) != len(positions):
        verdicts.append("two entries have one position")
    return verdicts


def _counters(history: History, content: Content, found: Mapping[int, list[Row]]) -> list[str]:
    """Every condition held when its entry was taken, and the counters are what they made them.

    An entry without rows (a claim) shows itself only by its receipt; what one without a receipt
    may have moved is left out.
    """
    positions = dict(content.positions)
    doubtful: set[str] = set()
    for attempt in history.attempts:
        if not attempt.rows and attempt.outcome == TAKEN and attempt.position <= content.upper:
            positions[attempt.number] = attempt.position
        elif not attempt.rows and attempt.outcome in (OPEN, UNKNOWN):
            doubtful.update(attempt.expect)
    there = [
        a for a in history.attempts if a.number in positions and (a.number in found or not a.rows)
    ]
    there.sort(key=lambda attempt: positions[attempt.number])
    values: dict[str, int] = {}
    verdicts = []
    for attempt in there:
        verdicts += [
            f"attempt {attempt.number} wanted {name} = {value}, and was taken at "
            f"{values.get(name, 0)}"
            for name, value in (*attempt.require.items(), *attempt.expect.items())
            if values.get(name, 0) != value and name not in doubtful
        ]
        values.update({name: value + 1 for name, value in attempt.expect.items()})
    verdicts += [
        f"counter {name} is {content.counters.get(name, 0)}, and its entries make it "
        f"{values.get(name, 0)}"
        for name in history.counters
        if content.counters.get(name, 0) != values.get(name, 0) and name not in doubtful
    ]
    return verdicts
