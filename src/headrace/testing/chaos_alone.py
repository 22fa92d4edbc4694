"""The roles of the chaos in one process, one after the other: the same history, the same checker.

Nothing dies and nothing waits here, so a case takes a second and comes out the same each time. What
it can catch: what is wrong with sealing, retention, compaction, holds and the archive without any
help of a crash. What it cannot: everything that needs two at once, or an end.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from headrace import errors
from headrace.log.embedded.check import check
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.system import OsSystem
from headrace.settings import LogSettings
from headrace.testing import chaos_worker
from headrace.testing.chaos import SETTINGS, final_of, prepare
from headrace.testing.chaos_history import History, judge, take_lines
from headrace.testing.chaos_worker import TOPICS, Worker, look_up, produce, rove
from headrace.testing.verdicts import verdict_on

STEPS = 90


class _Lines:
    """Records into a list what a worker would write to its file."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def __call__(self, at: float | None = None, **what: Any) -> None:
        line = {"at": time.monotonic() if at is None else at, **what}
        self.lines.append(json.loads(json.dumps(line)))


def alone(seed: int, steps: int = STEPS) -> list[str]:
    """Everything that is wrong with a log after so many steps; an empty list if nothing is."""
    with tempfile.TemporaryDirectory() as place, mock.patch.object(chaos_worker, "sleep"):
        folder = Path(place, "log")
        prepare(folder, Path(place, "archive"))
        lines = [_Lines() for _ in range(2)]
        settings = LogSettings(**SETTINGS)
        workers = [
            Worker(str(folder), 1000 * seed + n, settings, record) for n, record in enumerate(lines)
        ]
        try:
            _live(workers, Random(f"alone/{seed}"), steps)
        except Exception as error:  # noqa: BLE001 - no error is expected here
            return [verdict_on(error)]
        history = History()
        for number, one in enumerate(lines):
            take_lines(history, f"worker {number}", one.lines)
        try:
            final = final_of(folder)
        except errors.HeadraceError as error:
            return [verdict_on(error, "in the end: ")]
        problems = check(OsSystem(), str(folder)).problems
        wrong = [f"check: {problem.render()}" for problem in problems]
        return wrong + [f"{name}: {text}" for name, text in judge(history, final)]


def _live(workers: list[Worker], rng: Random, steps: int) -> None:
    with contextlib.ExitStack() as stack:
        for worker in workers:
            log = EmbeddedLog(worker.folder, worker.settings, create=False)
            worker.log = stack.enter_context(log)
        held: int | None = None
        for step in range(steps):
            worker = rng.choice(workers)
            what = rng.random()
            if what < 0.5:
                produce(worker)
            elif what < 0.65:
                rove(worker)
            elif what < 0.75:
                look_up(worker)
            elif what < 0.85:
                _keep(worker, compact=rng.random() < 0.5)
            elif what < 0.9:
                _from_the_start(worker)
            elif held is None:
                held = worker.glimpse()
                worker.log.hold("alone", held, topics=["short"], seconds=1e6)
                held = held if worker.log.since_of("short") <= held else None
            else:
                for _ in range(3):
                    with worker.begin({"short": worker.some(200)}) as attempt:
                        attempt.taken(worker.log.append("short", attempt.rows["short"]))
                    _keep(worker)
                _look(worker, held)
                worker.log.release("alone")
                held = None
            if step == steps // 2:
                worker.log.close()
                worker.log = stack.enter_context(EmbeddedLog(worker.folder, worker.settings))
        if held is not None:
            _look(workers[0], held)


def _keep(worker: Worker, *, compact: bool = False) -> None:
    keeper = worker.log.keeper()
    keeper.turn(close=True, compact=compact)
    keeper.release()


def _from_the_start(worker: Worker) -> None:
    """Ask for what may be gone."""
    offsets = dict.fromkeys(range(TOPICS["short"]), 0)
    newest = worker.glimpse()
    reading = worker.reading(["short"], start={"offsets": offsets})
    with worker.told(reading):
        for batch in worker.log.read("short", offsets):
            worker.batch(reading, batch)
        worker.record(through=reading, position=newest)


def _look(worker: Worker, position: int) -> None:
    """Whether what a hold keeps can be read."""
    try:
        for _ in worker.log.read("short", after=position):
            pass
        worker.record(held="alone", position=position, kept=True)
    except errors.OffsetsGone:
        worker.record(held="alone", position=position, kept=False)
