"""Two or more simulated processes, one running at a time, in an order that a seed decides.

Each process is a thread; a `Schedule` lets exactly one of them run. Every operation on the machine
is a point at which another may go on, and with `lines` so is every line of the log's own code:
shared memory is read and written by plain stores, between which no operation stands. Futex sleeps
block in the schedule; when everybody sleeps, the clock jumps to the next deadline. A process may be
killed at any such point. The same seed gives the same run, to the letter.

What it cannot show: two stores of two processors out of order (one runs at a time), and threads of
one process (each process is one thread here).
"""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Any

from headrace.testing.disk import Deadlock, Killed, SimulatedMachine, SimulatedProcess
from headrace.testing.verdicts import Violated

_PATIENCE_SECONDS = 60.0
_CODE = "/headrace/log/embedded/"


class Stuck(Violated):
    """A simulated process blocks outside the machine, or runs without an end."""


class Task:
    """One simulated process with its work."""

    def __init__(
        self, process: SimulatedProcess, work: Callable[[SimulatedProcess], object]
    ) -> None:
        """Tasks are made by `Schedule.spawn`."""
        self.process = process
        self.result: object = None
        self.error: BaseException | None = None
        self.done = False
        self.killed = False
        self.word: tuple[int, int] | None = None
        self.deadline_us: int | None = None
        self.steps = 0
        self.turn = threading.Semaphore(0)
        self._work = work

    def run(self) -> None:
        """Do the work; whatever it ends with is kept."""
        try:
            self.result = self._work(self.process)
        except Killed:
            self.killed = True
        except BaseException as error:  # noqa: BLE001 - shown by whoever looks at the task
            self.error = error


class Schedule:
    """Decides who runs. It is the machine's `Conductor` while `run` runs."""

    def __init__(
        self, machine: SimulatedMachine, seed: int | str, *, lines: float = 0.0,
        steps_max: int = 40_000,
    ) -> None:  # fmt: skip
        """`lines`: the share of the log's own lines at which another process may go on."""
        self.machine = machine
        self.trace: list[tuple[int, str]] = []
        """Who did what, in order: (pid, kind of operation)."""
        self.tasks: list[Task] = []
        self._random = Random(seed)
        self._lines = lines
        self._steps_max = steps_max
        self._kills: dict[int, int] = {}
        self._current: Task | None = None
        self._over = threading.Event()
        self._failure: Violated | None = None
        self._ending = False
        self._patience = 0.0

    def spawn(self, work: Callable[[SimulatedProcess], object], pid: int | None = None) -> Task:
        """Add a process that does this work."""
        task = Task(self.machine.process(pid), work)
        self.tasks.append(task)
        return task

    def kill(self, task: Task, at_step: int) -> None:
        """Kill the process at its `at_step`-th switch point (from 1)."""
        self._kills[task.process.pid()] = at_step

    def run(self) -> list[Task]:
        """Run all processes to their ends; raises `Deadlock` or `Stuck` if there is none."""
        threads = [
            threading.Thread(target=self._body, args=(task,), daemon=True) for task in self.tasks
        ]
        self.machine.conductor = self
        try:
            for thread in threads:
                thread.start()
            self._hand_over(None)
            if not self._over.wait(_PATIENCE_SECONDS):
                raise Stuck(f"a process blocks outside the machine: {self._where()}")
            for thread in threads:
                thread.join(_PATIENCE_SECONDS)
        finally:
            self.machine.conductor = None
        if self._failure is not None:
            raise self._failure
        return self.tasks

    # --- the conductor ---

    def step(self, process: SimulatedProcess, kind: str) -> None:
        """See `Conductor`."""
        task = self._current
        if task is None or task.process is not process:
            return  # not one of ours: the test itself looks at the machine
        self.trace.append((process.pid(), kind))
        self._point(task)

    def sleep(
        self, process: SimulatedProcess, word: tuple[int, int], timeout: float | None
    ) -> None:
        """See `Conductor`."""
        task = self._current
        assert task is not None
        assert task.process is process
        task.word = word
        task.deadline_us = None
        if timeout is not None:
            task.deadline_us = self.machine.clock_us + max(1, round(timeout * 1e6))
        self._hand_over(task)

    def wake(self, word: tuple[int, int], count: int) -> None:
        """See `Conductor`."""
        for task in self.tasks:
            if count and task.word == word:
                task.word = None
                count -= 1

    # --- inside ---

    def _body(self, task: Task) -> None:
        task.turn.acquire()
        if self._lines:
            sys.settrace(self._trace_calls)
        try:
            if not self._ending:
                task.run()
        finally:
            sys.settrace(None)
            task.done = True
            if task.killed:
                task.process.bury()
            else:
                task.process.kill()  # the process ends: its handles close
            self._hand_over(task)

    def _point(self, task: Task) -> None:
        """A point at which others may run, and at which the process may die."""
        task.steps += 1
        if self._ending or len(self.trace) > self._steps_max:
            if not self._ending:
                self._fail(Stuck(f"no end after {self._steps_max} operations: {self._where()}"))
            raise Killed
        if self._kills.get(task.process.pid()) == task.steps:
            self.trace.append((task.process.pid(), "killed"))
            task.process.kill()
            raise Killed
        self._hand_over(task)

    def _hand_over(self, task: Task | None) -> None:
        """Choose who goes on; returns when it is this task's turn again."""
        chosen = self._choose()
        if chosen is task and task is not None:
            return
        self._current = chosen
        if chosen is None:
            self._over.set()
        else:
            chosen.turn.release()
        if task is not None and not task.done:
            task.turn.acquire()
            if self._ending:
                raise Killed

    def _choose(self) -> Task | None:
        living = [task for task in self.tasks if not task.done]
        if not living:
            return None
        now = self.machine.clock_us
        for task in living:
            if task.word and task.deadline_us is not None and task.deadline_us <= now:
                task.word = None
        ready = [task for task in living if task.word is None]
        if not ready:
            timed = [task for task in living if task.deadline_us is not None]
            if not timed:
                self._fail(Deadlock(f"everybody sleeps: {self._where()}"))
                ready = living
            else:
                first = min(timed, key=lambda task: task.deadline_us or 0)
                self.machine.clock_us = max(now, first.deadline_us or 0)
                ready = [first]
            for task in ready:
                task.word = None
        return ready[0] if len(ready) == 1 else self._one_of(ready)

    def _one_of(self, ready: list[Task]) -> Task:
        """One of those that can run: now evenly, now one of them far ahead of the others."""
        if self._random.random() < 0.02:
            self._patience = self._random.choice((0.0, 0.5, 0.9, 0.99, 0.999))
        if self._current in ready and self._random.random() < self._patience:
            return self._current
        return self._random.choice(ready)

    def _fail(self, failure: Violated) -> None:
        self._ending = True
        self._failure = failure

    def _where(self) -> str:
        return "; ".join(
            f"pid {task.process.pid()}"
            f" {'done' if task.done else f'sleeps on {task.word}' if task.word else 'ready'}"
            f" after {task.steps} points"
            for task in self.tasks
        )

    def _trace_calls(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        return self._trace_lines if _CODE in frame.f_code.co_filename else None

    def _trace_lines(self, frame: FrameType, event: str, _argument: Any) -> Any:
        task = self._current
        if event == "line" and task is not None and task.process.alive:
            due = self._kills.get(task.process.pid()) == task.steps + 1
            if (due or self._random.random() < self._lines) and not _takes_a_lock(frame):
                self._point(task)
        return self._trace_lines


def _takes_a_lock(frame: FrameType) -> bool:
    """Whether dying at this line would leave a lock of Python's own locked: at `with` and at `try`.

    A process that is really killed takes such locks with it; here its handlers still run. Python
    3.11 runs none of them for what is raised at the line of a `try` (its own table leaves it out).
    """
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith(("with ", "try:"))
