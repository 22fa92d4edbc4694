"""Cut the power at every operation of a recorded run, open what is left, and hold it to account.

`explore` walks the crash points of a machine. At each it takes the disks that a power cut (or the
death of all processes) may leave, opens every different one once (`Probe`), and judges what was
found against what had been promised by then. The opening is a recorded run too, so the power can
be cut again inside it (`depth`).

**What is opened once.** A disk with the same bytes was opened before, and comes to the same: it is
judged, against what was promised by now, and not opened again. After a power cut the boot is
another, and nothing in derived files (shared memory, locks) counts; so disks that differ only there
are taken for one, with a choice of these files, except the disk to which everything came at a crash
point: that one is opened with every choice that is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random

from headrace.testing.disk import SimulatedMachine
from headrace.testing.jobs import spread
from headrace.testing.oplog import around
from headrace.testing.powercut import EVERYTHING, CrashState, Disk
from headrace.testing.promises import REFUSED, TAKEN, Attempt, Content, History, judge

QUIET = frozenset(("lock", "unlock", "wake", "store"))
"""Operations before which a power cut tells nothing new."""
KILLED = 1 << 20
"""States of killed processes are numbered from here."""
CHUNK = 6
"""Crash points in a row that one process takes."""
REMEMBERED = 4000
"""Openings that are kept in memory; equal disks are near each other."""


@dataclass(slots=True)
class Opening:
    """What opening one disk came to."""

    machine: SimulatedMachine | None
    """None: nobody wants to cut the power in it again."""
    error: str = ""
    """Why it did not open, or what `check` found."""
    content: Content | None = None
    """What it held."""
    read_at: int = 0
    """The number of operations after which a reader had seen that."""
    later: list[Attempt] = field(default_factory=list)
    """What was appended then."""
    final: list[tuple[int, Content]] = field(default_factory=list)
    """What it held after that, and after opening it again."""


Probe = Callable[[SimulatedMachine], Opening]
"""Opens a log on a machine, checks, reads, appends, opens it again and reads again."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken, and how to see it again."""

    path: tuple[tuple[int, int], ...]
    """(operation, state) of each power cut, the outermost first."""
    state: str
    verdicts: tuple[str, ...]
    operations: str

    def __str__(self) -> str:
        """Everything needed to look into it."""
        where = ", then ".join(f"operation {at} state {number}" for at, number in self.path)
        told = "\n".join(f"  - {verdict}" for verdict in self.verdicts[:8])
        return f"at {where} ({self.state}):\n{told}\n{self.operations}"


@dataclass(slots=True)
class Tally:
    """What an exploration has done so far."""

    points: int = 0
    states: int = 0
    openings: int = 0
    second: int = 0
    """States of a power cut during or after a recovery."""
    violations: list[Violation] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Take in another one."""
        self.points += other.points
        self.states += other.states
        self.openings += other.openings
        self.second += other.second
        self.violations += other.violations


@dataclass(slots=True)
class Limits:
    """How much to try."""

    bound: int = 24
    """Disks per crash point."""
    points: int = 1 << 30
    """Crash points, spread evenly over the run."""
    shown: bool = False
    """Cut only where a reader was just shown something."""
    depth: int = 2
    """How many power cuts in a row."""

    again: float = 0.03
    """The share of openings inside which the power is cut again."""
    violations: int = 1
    """Stop after so many."""
    only: tuple[tuple[int, int], ...] = ()
    """(operation, state) of the one path to take, for a replay."""

    @property
    def within(self) -> int:
        """Disks per crash point of an opening."""
        return max(4, min(self.bound, 72) // 3)


class Explorer:
    """Explores one recorded run."""

    def __init__(self, probe: Probe, seed: int | str, limits: Limits) -> None:
        """`probe` opens what is left."""
        self._probe = probe
        self._seed = seed
        self._limits = limits
        self._opened: dict[bytes, Opening] = {}
        self._sound: set[tuple[object, ...]] = set()
        self.tally = Tally()
        self.done: Callable[[], bool] = lambda: False

    def explore(self, machine: SimulatedMachine, history: History, jobs: int = 1) -> Tally:
        """Try the crash points of a machine; what is found is in the tally."""
        points = self._points(machine, history, 0)
        chunks = [points[at : at + CHUNK] for at in range(0, len(points), CHUNK)]

        def part(chunk: list[int]) -> Tally:
            self.tally = Tally()
            self._explore(machine, history, (), self._limits.bound, chunk)
            return self.tally

        total = Tally()
        for tally in spread(part, chunks if jobs > 1 else [points], jobs):
            total.add(tally)
        return total

    def _explore(
        self, machine: SimulatedMachine, history: History, path: tuple[tuple[int, int], ...],
        bound: int, points: list[int],
    ) -> None:  # fmt: skip
        depth = len(path)
        only = self._limits.only[depth] if depth < len(self._limits.only) else None
        disk = Disk(machine)
        for at in [only[0]] if only else points:
            disk.advance(at)
            known = history.until(at)
            version = (path, history.version(at))
            self.tally.points += not path
            for killed, state in self._states(disk, path, bound):
                if only is not None and state.number != only[1]:
                    continue
                if self.done() or len(self.tally.violations) >= self._limits.violations:
                    return
                here = (*path, (at, state.number))
                self._judge(machine, known, version, state, here, killed=killed)

    def _points(self, machine: SimulatedMachine, history: History, depth: int) -> list[int]:
        """The operations before which to cut: all, or a choice with many right after a promise."""
        if self._limits.shown:
            return sorted({shown.now for shown in history.shown})
        points = [op.index for op in machine.ops if op.kind not in QUIET]
        points.append(len(machine.ops))
        most = self._limits.points if not depth else 6
        if len(points) <= most or not most:
            return points[:most]
        rng = Random(f"{self._seed}/points/{depth}/{len(points)}")
        promises = {a.ended for a in history.attempts} | {shown.now for shown in history.shown}
        told = [at for at in sorted(promises) if 0 < at < len(machine.ops)]
        chosen = set(rng.sample(told, min(len(told), most // 3)))
        rest = [at for at in points[:-1] if at not in chosen]
        return sorted({*chosen, *rng.sample(rest, most - 1 - len(chosen)), points[-1]})

    def _states(
        self, disk: Disk, path: tuple[tuple[int, int], ...], bound: int
    ) -> Iterator[tuple[bool, CrashState]]:
        name = f"{self._seed}/{path}/{disk.at}"
        for state in disk.crash_states(Random(name), bound):
            yield False, state
        for state in disk.killed_states(Random(name), 4):
            yield True, replace(state, number=KILLED + state.number)

    def _judge(
        self, machine: SimulatedMachine, known: History, version: object, state: CrashState,
        path: tuple[tuple[int, int], ...], *, killed: bool,
    ) -> None:  # fmt: skip
        self.tally.states += 1
        self.tally.second += len(path) > 1
        whole = killed or state.title.startswith(EVERYTHING)
        digest = state.image.digest(derived=whole) + b"%d%d%d" % (whole, killed, len(path))
        replayed = len(path) < len(self._limits.only)
        opening = None if replayed else self._opened.pop(digest, None)
        again = False
        if opening is None:
            again = replayed or (len(path) < self._limits.depth and self._chosen(path))
            opening = self._probe(state.machine(recorded=again))
            self.tally.openings += 1
        self._opened[digest] = replace(opening, machine=None)
        if len(self._opened) > REMEMBERED:
            del self._opened[next(iter(self._opened))]
        if (digest, version) in self._sound:
            return
        verdicts = verdicts_of(known, opening, killed=killed)
        if verdicts:
            operations = around(machine.ops, path[-1][0])
            self.tally.violations.append(Violation(path, state.title, tuple(verdicts), operations))
            return
        self._sound.add((digest, version))
        if again and opening.machine is not None:
            later, inside = after(known, opening), opening.machine
            points = self._points(inside, later, len(path))
            self._explore(inside, later, path, self._limits.within, points)

    def _chosen(self, path: tuple[tuple[int, int], ...]) -> bool:
        return Random(f"{self._seed}/again/{path}").random() < self._limits.again


def verdicts_of(known: History, opening: Opening, *, killed: bool) -> list[str]:
    """Everything that is wrong with what opening a disk came to."""
    if opening.error or opening.content is None:
        return [opening.error or "nothing was read"]
    verdicts = judge(known, opening.content, killed=killed)
    if verdicts:
        return verdicts
    highest = known.known_through(killed=killed)
    for attempt in opening.later:
        if attempt.outcome == TAKEN and attempt.position <= highest:
            verdicts.append(f"position {attempt.position} is given again; {highest} was shown")
    then = after(known, opening)
    for at, content in opening.final:
        verdicts += [f"later: {verdict}" for verdict in judge(then.until(at), content)]
    return verdicts


def _settled(attempt: Attempt, content: Content, read_at: int) -> Attempt:
    """What was read after a crash stays; what was not there then never comes back."""
    position = content.positions.get(attempt.number)
    if not attempt.rows or (attempt.outcome == TAKEN and attempt.durable):
        return attempt
    if position is None:
        return replace(attempt, ended=read_at, outcome=REFUSED, error="gone since a crash")
    return replace(attempt, ended=read_at, outcome=TAKEN, position=position, durable=True)


def after(known: History, opening: Opening) -> History:
    """The history that goes on with what the opening did, and showed."""
    then = known.branch()
    if opening.content is not None:
        then.attempts = [
            _settled(attempt, opening.content, opening.read_at) for attempt in then.attempts
        ]
    then.attempts = then.attempts + opening.later
    first = [(opening.read_at, opening.content)] if opening.content is not None else []
    for at, content in [*first, *opening.final]:
        reader = f"reader {len(then.shown)}"
        then.show(reader, content.topics, content.rows, content.upper, at)
    return then
