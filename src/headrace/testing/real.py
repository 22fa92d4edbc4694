"""Real processes on a real folder: start them, kill them, and hold the log to what they were told.

What it can catch: whatever the simulated machine has wrong about Linux: locks that outlive their
holder, futexes that nobody wakes, writes and maps of one file that do not see each other, system
calls that end in ways nobody thought of. What it cannot: it sees only the states that happen.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from headrace.log.embedded.check import check
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.system import OsSystem
from headrace.settings import LogSettings
from headrace.testing.promises import REFUSED, TAKEN, UNKNOWN, Attempt, History, Row, judge
from headrace.testing.simulation import COUNTERS, SCHEMA, TOPICS, content_of

SMALL: dict[str, Any] = {
    "journal_bytes_first": 64 << 10,
    "journal_bytes_max": 256 << 10,
    "quiet_seconds": 0.05,
}
"""Settings under which a second of work fills several journal files."""


class Rebooted(OsSystem):
    """This machine, after a boot."""

    def __init__(self, boot: int = 1) -> None:
        """Another number is another boot."""
        self._boot = boot.to_bytes(16, "big")

    def boot_id(self) -> bytes:
        """See `System`."""
        return self._boot


class Worker:
    """A process of `headrace.testing.worker`, and what it has said."""

    def __init__(
        self, folder: str, *arguments: str, before: Sequence[str] = (), **settings: Any
    ) -> None:
        """Start it; `before` goes before the command: strace and its options."""
        command = [*before, sys.executable, "-m", "headrace.testing.worker", folder, *arguments]
        command += ["--settings", json.dumps({**SMALL, **settings})]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def wait_for(self, start: str, seconds: float = 60.0, count: int = 1) -> list[str]:
        """Wait until so many lines have begun with `start`; those lines."""
        deadline = time.monotonic() + seconds
        while True:
            found = [line for line in self.lines if line.startswith(start)]
            if len(found) >= count:
                return found
            if time.monotonic() > deadline or (self.process.poll() is not None and not self.busy):
                raise AssertionError(f"no '{start}' from {self.process.args!r}: {self.lines[-5:]}")
            time.sleep(0.005)

    @property
    def busy(self) -> bool:
        """Whether it may still say something."""
        return self._reader.is_alive()

    def send(self, number: int) -> None:
        """Send a signal."""
        if self.process.poll() is None:
            os.kill(self.process.pid, number)

    def end(self, number: int = signal.SIGKILL) -> str:
        """Kill it, if need be, and take its last words; what it wrote to stderr."""
        self.send(signal.SIGCONT)
        self.send(number)
        return self.finish()

    def finish(self, seconds: float = 60.0) -> str:
        """Wait until it has ended by itself; what it wrote to stderr."""
        assert self.process.stderr is not None
        self._reader.join(seconds)
        with self.process.stderr:
            talk = self.process.stderr.read()
        self.process.wait(seconds)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return talk


def prepare(folder: str, **settings: Any) -> None:
    """Make a log with the topics that the workers use."""
    with EmbeddedLog(folder, LogSettings(**{**SMALL, **settings})) as log:
        for name, partitions in TOPICS.items():
            log.create_topic(name, SCHEMA, key="k", partitions=partitions)


def history_of(workers: Sequence[Worker], *, durable: bool = True) -> History:
    """What the workers were told, as a history."""
    return history_from([list(worker.lines) for worker in workers], durable=durable)


def history_from(said: Sequence[Sequence[str]], *, durable: bool = True) -> History:
    """What workers were told, from the lines that each wrote."""
    history = History(counters=COUNTERS)
    for number, lines in enumerate(said):
        _add(history, lines, f"follower {number}", durable=durable)
    return history


def _add(history: History, lines: Sequence[str], reader: str, *, durable: bool) -> None:
    attempts: dict[int, Attempt] = {}
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "start":
            number, _, rest = rest.partition(" ")
            rows, counter, value = rest.rsplit(" ", 2)
            expect = {} if counter == "-" else {counter: int(value)}
            attempt = Attempt(int(number), json.loads(rows), expect, {}, durable, 0)
            attempts[attempt.number] = attempt
            history.attempts.append(attempt)
        elif word == "saw":
            through, _, data = rest.partition(" ")
            history.show(reader, TOPICS, [Row(*row) for row in json.loads(data)], int(through), 0)
        elif word in ("taken", "refused", "unknown"):
            number, _, rest = rest.partition(" ")
            if int(number) not in attempts:
                continue
            attempt = attempts[int(number)]
            attempt.ended = 0
            attempt.outcome = {"taken": TAKEN, "refused": REFUSED, "unknown": UNKNOWN}[word]
            attempt.position = int(rest) if word == "taken" else 0
            attempt.error = rest


def account(folder: str, history: History, *, system: OsSystem | None = None) -> list[str]:
    """Open the folder, check it, and judge; with a `Rebooted` system it is a power cut."""
    log = EmbeddedLog(folder, LogSettings(**SMALL), system=system)
    try:
        content = content_of(log)
        problems = [problem.render() for problem in check(system or OsSystem(), folder).problems]
    finally:
        log.close()
    return problems + judge(history, content, killed=system is None)
