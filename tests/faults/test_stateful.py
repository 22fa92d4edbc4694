"""Random operations by two handles in two real processes, against a plain list.

Caught: any sequence of appends, conditions, syncs, marks, reopenings and kills after which the two
processes do not show the same rows, the rows are not those of the list, or a counter is wrong. Not
caught: two operations at the same instant (one is asked at a time, but for one that dies), and
power cuts: the simulated machine has these.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace import errors
from headrace.testing.promises import REFUSED, TAKEN, UNKNOWN, History, judge
from headrace.testing.simulation import COUNTERS, TOPICS
from tests.faults.remote import Remote

SETTINGS: dict[str, Any] = {
    "journal_bytes_first": 16 << 10, "journal_bytes_max": 64 << 10, "inline_bytes_max": 3000,
    "chunk_bytes": 2000, "quiet_seconds": 0.02,
}  # fmt: skip
WHO = st.integers(0, 1)
ROWS = st.fixed_dictionaries({"orders": st.integers(1, 4)}, optional={"audit": st.integers(1, 3)})
PAD = st.sampled_from([10, 100, 1500])
DURABILITY = st.sampled_from(["fsync", "fsync", "os", "interval"])


class TwoProcesses(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="headrace-stateful-")
        self.history = History(counters=COUNTERS)
        self.handles = [Remote(f"{self.folder}/data", SETTINGS) for _ in range(2)]
        self.handles[0].call("make", TOPICS)
        self.synced = True

    @rule(who=WHO, rows=ROWS, pad=PAD, durability=DURABILITY, counter=st.sampled_from("012-"))
    def append(
        self, who: int, rows: dict[str, int], pad: int, durability: str, counter: str
    ) -> None:
        handle = self.handles[who]
        expect = {}
        if counter != "-":
            expect = {f"c{counter}": handle.call("counter", f"c{counter}")}
        attempt = self.history.start(rows, expect=expect, durable=durability == "fsync", now=0)
        attempt.ended = 0
        attempt.position = handle.call("append", attempt.number, rows, pad, expect, durability)
        attempt.outcome = TAKEN

    @rule(who=WHO, rows=ROWS, wrong=st.integers(1, 3))
    def conflict(self, who: int, rows: dict[str, int], wrong: int) -> None:
        handle = self.handles[who]
        expect = {"c0": handle.call("counter", "c0") + wrong}
        attempt = self.history.start(rows, expect=expect, durable=True, now=0)
        attempt.ended, attempt.outcome = 0, REFUSED
        try:
            handle.call("append", attempt.number, rows, 10, expect, "fsync")
        except errors.Conflict:
            return
        raise AssertionError("a conflict was taken")

    @rule(who=WHO)
    def sync(self, who: int) -> None:
        self.handles[who].call("sync")

    @rule(who=WHO)
    def tick(self, who: int) -> None:
        self.handles[who].call("tick")

    @rule(who=WHO)
    def reopen(self, who: int) -> None:
        self.handles[who].close()
        self.handles[who] = Remote(f"{self.folder}/data", SETTINGS)

    @rule(who=WHO, rows=ROWS, pad=PAD, delay=st.floats(0, 0.004))
    def kill(self, who: int, rows: dict[str, int], pad: int, delay: float) -> None:
        handle = self.handles[who]
        handle.call("counter", "c0")  # it is up
        attempt = self.history.start(rows, durable=True, now=0)
        handle.begin("append", attempt.number, rows, pad, {}, "fsync")
        time.sleep(delay)
        handle.kill()
        attempt.ended, attempt.outcome = 0, UNKNOWN
        answer = handle.answer()
        if answer is not None and answer[0] == "result":
            attempt.outcome, attempt.position = TAKEN, answer[1]
        self.handles[who] = Remote(f"{self.folder}/data", SETTINGS)

    @rule()
    def compare(self) -> None:
        """Both show the same: the list."""
        for handle in self.handles:
            handle.call("sync")
        one, two = (handle.call("content") for handle in self.handles)
        assert one == two
        assert judge(self.history, one, killed=True) == []
        self.history.show("everybody", TOPICS, one.rows, one.upper, 0)

    @invariant()
    def alive(self) -> None:
        """Counters can always be read, by both, and agree."""
        if hasattr(self, "handles"):
            assert self.handles[0].call("counter", "c1") == self.handles[1].call("counter", "c1")

    def teardown(self) -> None:
        if hasattr(self, "handles"):
            try:
                self.compare()
                for handle in self.handles:
                    handle.close()
            finally:
                for handle in self.handles:
                    handle.kill()
                shutil.rmtree(self.folder, ignore_errors=True)


TwoProcesses.TestCase.settings = settings(
    max_examples=12,
    stateful_step_count=14,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestTwoProcesses = TwoProcesses.TestCase
