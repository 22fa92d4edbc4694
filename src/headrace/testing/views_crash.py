"""A pipeline on a simulated machine: the power is cut, or everybody dies, at every operation.

A case of `views_plain` runs through the product's loop on the machine of `headrace.testing.disk`,
so that every file operation of log and packs is recorded, drivers that are killed and replaced
included. Then, for each operation and each disk that may be left of it: open the log; what is
committed must be right for the position it says, and nothing that was acknowledged may be gone; a
new driver goes on to the end and every commit of it must be right; another entry, and it must still
be; then no garbage may be left.

Can catch: state named before it is on the disk, state of another batch, a batch applied twice or
not at all, a pack removed that is needed, garbage that stays. Cannot catch: what Spark does; disks
that lie about syncs; states that the bound left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.pipelines.views import run as loop
from headrace.pipelines.views.reading import rows_of, status_of
from headrace.settings import LogSettings
from headrace.testing import algebra
from headrace.testing.disk import SimulatedMachine, SimulatedProcess
from headrace.testing.explore import QUIET
from headrace.testing.powercut import CrashState, Disk
from headrace.testing.schedule import Schedule
from headrace.testing.simulation import FOLDER, new_machine, time_limit
from headrace.testing.verdicts import Violated, verdict_on
from headrace.testing.views_case import (
    PIPELINE,
    Case,
    Driver,
    append_entry,
    defined_as,
    difference,
    make_topics,
    pipeline_of,
    reference,
    table_at,
)
from headrace.testing.views_history import random_row

SETTINGS = LogSettings(
    journal_bytes_first=16 << 10, journal_bytes_max=64 << 10, background=False,
    lock_timeout_seconds=5.0, read_rows_max=4,
)  # fmt: skip


@contextmanager
def sweeping(every: int) -> Iterator[None]:
    """Look for garbage more often."""
    with mock.patch.object(loop, "SWEEP_EVERY", every):
        yield


def opened(process: SimulatedProcess) -> EmbeddedLog:
    """The log, in a simulated process."""
    return EmbeddedLog(FOLDER, SETTINGS, system=process)


def let_go(logs: list[EmbeddedLog]) -> None:
    """Forget handles as the end of a machine does: nothing is written any more."""
    for log in logs:
        log._finalizer.detach()


# --- the recorded run ---------------------------------------------------------------------


@dataclass
class Recorded:
    """A case that ran on a machine, and what was promised when."""

    case: Case
    machine: SimulatedMachine
    promises: list[tuple[int, int]] = field(default_factory=list)
    """(operation, through): from then on the views are through that, whatever happens."""

    def promised(self, at: int) -> int:
        """What was promised before an operation."""
        return max((through for when, through in self.promises if when <= at), default=0)


def record(case: Case) -> Recorded:
    """Run a case; its restarts are kills, and before each the old driver tries once more."""
    found = Recorded(case, new_machine())
    machine = found.machine
    machine.ops_max = 400_000
    logs = [opened(machine.process())]
    make_topics(logs[0], case.tables)
    names = {table.name for table in case.tables}
    driver: Driver | None = None
    with defined_as(case.views), sweeping(2):
        for number, batch in enumerate(case.history):
            for entry in batch:
                append_entry(logs[0], {n: rows for n, rows in entry.items() if n in names})
            if driver is None or number in case.restarts or number in case.late.values():
                old = driver
                logs.append(opened(machine.process()))
                there = [name for name in case.views if case.late.get(name, 0) <= number]
                pipeline = pipeline_of(there, case.tables)
                driver = Driver(pipeline, logs[-1], batch_rows=case.batch_rows)
                if old is not None:
                    _must_be_fenced(old, before=len(old.made))
            if driver.pipeline.views:
                driver.run("caught up")
                found.promises.append((len(machine.ops), driver.status.through))
    machine.note_stores()
    for process in machine.processes:
        process.kill()
    let_go(logs)
    return found


def _must_be_fenced(old: Driver, before: int) -> None:
    """A driver whose name was claimed by another commits nothing any more."""
    try:
        if old.pipeline.views:
            old.run("caught up")
    except errors.Fenced:
        pass
    if len(old.made) != before:
        raise Violated("a driver committed after another had taken over")
    process: Any = old.log.journal.system
    process.kill()


# --- what is left of it -------------------------------------------------------------------


def recovered(machine: SimulatedMachine, case: Case, promised: int) -> str:
    """Go on from what is left on a machine; what is wrong, or nothing."""
    logs: list[EmbeddedLog] = []
    machine.ops_max = 100_000
    try:
        with time_limit(60), defined_as(case.views), sweeping(1):
            return _recovered(machine, case, promised, logs)
    except Exception as error:  # noqa: BLE001 - whatever it is, the pipeline does not go on
        return verdict_on(error)
    finally:
        for process in machine.processes:
            process.kill()
        let_go(logs)


def _recovered(
    machine: SimulatedMachine, case: Case, promised: int, logs: list[EmbeddedLog]
) -> str:
    log = opened(machine.process())
    logs.append(log)
    there = {topic.name for topic in log.topics()}
    make_topics(log, [table for table in case.tables if table.name not in there])
    status = status_of(log, PIPELINE)
    if status.through < promised:
        return f"views were through {promised}, and are through {status.through}"
    views = {name: node for name, node in case.views.items() if status.views.get(name)}
    wrong = _compared(log, case, views, status.through, log.position, "as it was left")
    if wrong:
        return wrong
    driver = Driver(pipeline_of(case.views, case.tables), log, batch_rows=case.batch_rows)
    chance = Random(f"after/{case.seed}")
    for _ in range(3):
        before = len(driver.made)
        driver.run("caught up")
        for through, position, made in driver.made[before:]:
            wrong = _compared(log, case, made, through, position, "after the crash")
            if wrong:
                return wrong
        append_entry(
            log, {table.name: [(random_row(chance, table, 0.1), 1)] for table in case.tables}
        )
    driver.run("caught up")
    kept = set().union(*driver._manifests)
    left = [
        name
        for name in driver.packs.names()
        if name not in kept and int(name.partition("-")[0]) < driver.status.batch - 1
    ]
    return f"garbage stays: {left[:3]}" if left else ""


def _compared(
    log: EmbeddedLog, case: Case, views: Any, through: int, position: int, when: str
) -> str:
    tables = {t.name: table_at(log, t.name, through) for t in case.tables}
    for name, wanted in reference(views, tables).items():
        got = algebra.rows_of(rows_of(log, PIPELINE, name, position))
        wrong = difference(got, wanted)
        if wrong:
            return f"{when}, view {name} through {through}: {wrong}"
    return ""


# --- exploring ----------------------------------------------------------------------------


@dataclass
class Crashes:
    """What was tried."""

    operations: int = 0
    points: int = 0
    states: int = 0
    opened: int = 0
    second: int = 0
    wrong: list[str] = field(default_factory=list)


def explore(
    case: Case, *, points: int, bound: int, again: float = 0.0,
    done: Callable[[], bool] = lambda: False,
) -> Crashes:  # fmt: skip
    """Record a case and crash it at so many operations, spread over the run; 0: at every one."""
    tally = Crashes()
    try:
        found = record(case)
    except Exception as error:  # noqa: BLE001 - a case ends well, or something is wrong
        tally.wrong.append(verdict_on(error, "while it ran: "))
        return tally
    tally.operations = len(found.machine.ops)
    _Explorer(found, tally, bound, again, done).explore(points)
    return tally


class _Explorer:
    def __init__(
        self, found: Recorded, tally: Crashes, bound: int, again: float, done: Callable[[], bool]
    ) -> None:
        self.found, self.tally, self.bound, self.again = found, tally, bound, again
        self.done = done
        self.seen: set[bytes] = set()

    def explore(self, points: int) -> None:
        machine, seed = self.found.machine, self.found.case.seed
        chosen = [op.index for op in machine.ops if op.kind not in QUIET]
        chance = Random(f"crashes/{seed}")
        if points and len(chosen) > points:
            ours = [at for at in chosen if "/pipelines/" in machine.ops[at].path]
            share = min(len(ours), 2 * points // 3)
            rest = chance.sample(chosen, points - share)
            chosen = sorted({*chance.sample(ours, share), *rest})
        chosen.append(len(machine.ops))
        disk = Disk(machine)
        for at in chosen:
            disk.advance(at)
            self.tally.points += 1
            for state in self._states(disk, f"{seed}/{at}"):
                if self.tally.wrong or self.done():
                    return
                self._try(state, at, self.found.promised(at), f"operation {at}")

    def _states(self, disk: Disk, name: str) -> Iterator[CrashState]:
        yield from disk.crash_states(Random(name), self.bound)
        yield from disk.killed_states(Random(name), 2)

    def _try(self, state: CrashState, at: int, promised: int, where: str) -> None:
        self.tally.states += 1
        digest = state.image.digest()
        if digest in self.seen:
            return
        self.seen.add(digest)
        self.tally.opened += 1
        machine = state.machine()
        wrong = recovered(machine, self.found.case, promised)
        if wrong:
            op = self.found.machine.ops[at] if at < len(self.found.machine.ops) else "the end"
            self.tally.wrong.append(f"{wrong} (crash at {where}: {op}; {state.title})")
            return
        chance = Random(f"again/{self.found.case.seed}/{at}/{state.number}")
        if chance.random() >= self.again:
            return
        second = Disk(machine)
        places = [op.index for op in machine.ops if op.kind not in QUIET]
        for later in sorted(chance.sample(places, min(3, len(places)))):
            second.advance(later)
            for after in second.crash_states(chance, 2):
                self.tally.second += 1
                wrong = recovered(after.machine(), self.found.case, promised)
                if wrong:
                    self.tally.wrong.append(f"{wrong} ({where}, then at {later}; {after.title})")
                    return


# --- two drivers, and writers beside them -------------------------------------------------


def raced(case: Case, seed: str) -> str:
    """Two drivers and a writer at once, switched at every operation, one of them killed.

    At most one of them may be left unfenced; whatever was committed must be right at each
    commit, and a last driver must find everything as it must be.
    """
    machine = new_machine()
    machine.ops_max = 400_000
    logs = [opened(machine.process())]
    make_topics(logs[0], case.tables)
    names = {table.name for table in case.tables}
    entries = [entry for batch in case.history for entry in batch]
    chance = Random(f"raced/{seed}")
    made: list[tuple[int, int, Any]] = []

    def write(process: SimulatedProcess) -> None:
        log = opened(process)
        logs.append(log)
        for entry in entries:
            append_entry(log, {n: rows for n, rows in entry.items() if n in names})
            for _ in range(chance.choice((0, 0, 20, 100))):
                process.listdir(FOLDER)  # nothing but a turn for the others

    def drive(process: SimulatedProcess) -> str:
        log = opened(process)
        logs.append(log)
        try:
            driver = Driver(pipeline_of(case.views, case.tables), log, batch_rows=case.batch_rows)
            driver.made = made
            while not writer.done:
                driver.run("caught up")
                process.listdir(FOLDER)
        except errors.Fenced:
            return "fenced"
        return "ended"

    schedule = Schedule(machine, seed, steps_max=400_000)
    writer = schedule.spawn(write)
    tasks = [schedule.spawn(drive) for _ in range(2)]
    if chance.random() < 0.5:
        schedule.kill(tasks[0], chance.randrange(20, 400))
    try:
        with time_limit(120), defined_as(case.views), sweeping(2):
            schedule.run()
            bad = [task.error for task in (writer, *tasks) if task.error is not None]
            if bad:
                return verdict_on(bad[0])
            log = opened(machine.process())
            logs.append(log)
            for through, position, views in made:
                wrong = _compared(log, case, views, through, position, "while they raced")
                if wrong:
                    return wrong
            return recovered(machine, case, max((through for through, _, _ in made), default=0))
    finally:
        for process in machine.processes:
            process.kill()
        let_go(logs)
