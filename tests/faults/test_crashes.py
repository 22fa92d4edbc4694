"""The crash enumerator, in short: every workload, a choice of crash points, all kinds of disks.

Caught: what `headrace.testing.crashes` says it can catch, here with few points and seeds. Not
caught: the rest of the points; `./run faults log --minutes 30` tries them. A failure prints the
command that shows it again.
"""

from __future__ import annotations

from unittest import mock

import pytest

from headrace.testing.crashes import one_round, record, replay
from headrace.testing.disk import Killed, SimulatedProcess
from headrace.testing.explore import Limits
from headrace.testing.schedule import Schedule
from headrace.testing.simulation import Run, new_machine
from headrace.testing.workloads import WORKLOADS

RACES = ("two_processes", "two_processes_killed", "chased", "killed_often")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_nothing_promised_is_lost(workload: str) -> None:
    one = one_round(workload, 1, Limits(bound=8, points=12, again=0.02))
    assert one.reports() == []
    assert one.tally.states > 40
    assert one.attempts > 5


@pytest.mark.parametrize("seed", range(200, 202))
def test_other_seeds(seed: int) -> None:
    """Fewer points of every workload: the seeds differ in what is written and who runs when."""
    for workload in WORKLOADS:
        assert one_round(workload, seed, Limits(bound=6, points=2, again=0.0)).reports() == []


@pytest.mark.parametrize("workload", [w for w in WORKLOADS if w.removesuffix("_in_c") in RACES])
def test_many_schedules(workload: str) -> None:
    """Nothing is cut, but processes run and die in many orders."""
    for seed in range(1000, 1030):
        assert one_round(workload, seed, Limits(points=0)).reports() == []


@pytest.mark.parametrize("seed", range(5))
def test_a_follower_gets_the_entry_whose_syncer_died_before_it_woke_anybody(seed: int) -> None:
    """The entry is visible and nobody else comes: the follower looks by itself, once a minute."""
    run = Run(new_machine(), seed)
    run.make_topics(run.open())

    def read(process: SimulatedProcess) -> int:
        return next(run.open(process).read("orders", follow=True)).position

    def write(process: SimulatedProcess) -> None:
        log = run.open(process)

        def die(_wake: int) -> None:
            process.kill()
            raise Killed

        with mock.patch.object(log.journal.sync_lock, "signal", die):
            run.append(log, {"orders": 1})

    schedule = Schedule(run.machine, seed)
    reader, writer = schedule.spawn(read), schedule.spawn(write)
    schedule.run()
    run.end()
    assert writer.killed
    assert (reader.error, reader.result) == (None, 3)
    assert run.machine.clock_us < 70e6


def test_a_run_and_its_states_repeat_to_the_letter() -> None:
    record("two_processes_killed", 5)  # fills caches: kills count lines, and these run once
    one, two = record("two_processes_killed", 5), record("two_processes_killed", 5)
    kinds = [(op.pid, op.kind, op.path, op.offset, len(op.data)) for op in one.machine.ops]
    assert kinds == [(op.pid, op.kind, op.path, op.offset, len(op.data)) for op in two.machine.ops]
    assert one.history == two.history


def test_processes_share_the_crash_points() -> None:
    limits = Limits(bound=4, points=8, again=0.0)
    one, two = (one_round("writers", 1, limits, jobs=jobs) for jobs in (1, 2))
    assert (two.tally.points, two.tally.states) == (one.tally.points, one.tally.states)
    assert (two.reports(), one.reports()) == ([], [])


def test_one_path_can_be_taken_again() -> None:
    one = replay("plain", 1, [(100, 1), (20, 0)], bound=10)
    assert (one.tally.states, one.tally.second) == (2, 1)
    assert one.reports() == []
