"""The deterministic schedule: races are found, runs repeat, the dead stay dead.

Caught here: a schedule that lets two run at once, forgets a sleeper, or differs between two runs
of one seed. Not caught here: races between threads of one process, and processors that reorder.
"""

from __future__ import annotations

import pytest

from headrace.log.embedded.locks import CrossLock
from headrace.log.embedded.system import EVERYBODY, System
from headrace.testing.disk import Deadlock, SimulatedMachine, SimulatedProcess
from headrace.testing.schedule import Schedule, Stuck


def add_one(system: System, *, locked: bool) -> None:
    """Read a number from a file and write it back, one higher."""
    file = system.open("/number")
    shared = system.map("/live", 4096)
    lock = CrossLock(system, system.open("/lock"), shared, name="number", word=100, holder=10)
    for _ in range(5):
        if locked:
            lock.acquire(30.0)
        value = int.from_bytes(file.pread(8, 0), "little")
        file.pwritev([(value + 1).to_bytes(8, "little")], 0)
        if locked:
            lock.release()


def counted(seed: int, *, locked: bool, lines: float = 0.0) -> tuple[int, Schedule]:
    machine = SimulatedMachine()
    first = machine.process(1)
    first.create("/number", 8)
    first.create("/lock", 0)
    schedule = Schedule(machine, seed, lines=lines)
    for _ in range(3):
        schedule.spawn(lambda system: add_one(system, locked=locked))
    schedule.run()
    assert [task.error for task in schedule.tasks] == [None, None, None]
    return int.from_bytes(first.open("/number").pread(8, 0), "little"), schedule


def test_a_race_is_found_and_a_lock_prevents_it() -> None:
    assert any(counted(seed, locked=False)[0] < 15 for seed in range(5))
    assert all(counted(seed, locked=True)[0] == 15 for seed in range(20))


def test_who_waits_for_a_lock_is_woken_by_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without looking again by themselves, sleepers forgotten by a release would time out."""
    monkeypatch.setattr(CrossLock, "LOOK_AGAIN_SECONDS", 1e6)
    assert all(counted(seed, locked=True, lines=1.0)[0] == 15 for seed in range(250))


def test_the_same_seed_is_the_same_run() -> None:
    one, two = counted(3, locked=True)[1], counted(3, locked=True)[1]
    assert one.trace == two.trace
    assert [str(op) for op in one.machine.ops] == [str(op) for op in two.machine.ops]
    assert one.trace != counted(4, locked=True)[1].trace


@pytest.mark.parametrize("at", range(1, 40, 3))
def test_a_killed_holder_frees_the_lock(at: int) -> None:
    machine = SimulatedMachine()
    first = machine.process(1)
    first.create("/number", 8)
    first.create("/lock", 0)
    schedule = Schedule(machine, at)
    victim = schedule.spawn(lambda system: add_one(system, locked=True))
    schedule.spawn(lambda system: add_one(system, locked=True))
    schedule.kill(victim, at)
    schedule.run()
    assert victim.killed == ((victim.process.pid(), "killed") in schedule.trace)
    assert schedule.tasks[1].error is None
    assert int.from_bytes(first.open("/number").pread(8, 0), "little") >= 5


def test_sleepers_are_woken_and_timeouts_pass_on_the_machine_clock() -> None:
    machine = SimulatedMachine()
    seen: list[str] = []

    def sleeper(system: SimulatedProcess) -> None:
        shared = system.map("/live", 4096)
        words = shared.view.cast("I")
        while words[0] == 0:
            shared.wait(0, 0, None)
        seen.append("woken")
        before = system.monotonic()
        shared.wait(1, 0, 5.0)
        seen.append(f"slept {system.monotonic() - before:.0f}")

    def waker(system: SimulatedProcess) -> None:
        shared = system.map("/live", 4096)
        system.listdir("/")
        shared.view.cast("I")[0] = 1
        shared.wake(0, 1)

    schedule = Schedule(machine, 1)
    schedule.spawn(sleeper)
    schedule.spawn(waker)
    schedule.run()
    assert seen == ["woken", "slept 5"]


def test_everybody_asleep_is_a_deadlock() -> None:
    schedule = Schedule(SimulatedMachine(), 1)
    for _ in range(2):
        schedule.spawn(lambda system: system.map("/live", 4096).wait(0, 0, None))
    with pytest.raises(Deadlock, match="everybody sleeps"):
        schedule.run()


def test_a_run_without_an_end_is_stuck() -> None:
    def forever(system: SimulatedProcess) -> None:
        while True:
            system.listdir("/")

    schedule = Schedule(SimulatedMachine(), 1, steps_max=500)
    schedule.spawn(forever)
    with pytest.raises(Stuck, match="no end after 500"):
        schedule.run()


def test_with_lines_a_process_may_stop_between_two_stores() -> None:
    """Publishing two words takes two stores: a reader that comes between them sees half of it."""

    def writer(process: SimulatedProcess) -> None:
        shared = process.map("/live", 4096)
        lock = CrossLock(process, process.create("/lock", 0), shared, name="x", word=8, holder=0)
        for _ in range(3):
            lock.acquire(1.0)
            lock.release(EVERYBODY)

    def reader(process: SimulatedProcess) -> list[tuple[int, int]]:
        words = process.map("/live", 4096).view.cast("Q")
        found = []
        for _ in range(30):
            process.listdir("/")
            found.append((words[0], words[4]))
        return found

    kinds = set()
    for seed in range(20):
        schedule = Schedule(SimulatedMachine(), seed, lines=0.5)
        schedule.spawn(writer)
        task = schedule.spawn(reader)
        schedule.run()
        assert isinstance(task.result, list)
        kinds |= {(holder != 0, signal != 0) for holder, signal in task.result}
    assert kinds == {(False, False), (True, False), (False, True), (True, True)}
