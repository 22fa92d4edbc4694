"""First builds go through the loading path: runs laid aside, in memory or on the disk, then merged.

Random views without Spark, some of them defined late or changed, are built in chunks of a few rows
with collections so small that every chunk counts as large. Can catch: rows that are lost, doubled
or unseen while they are laid aside; a build that is joined before it is settled. Cannot catch: what
only real sizes do (tests/tables/test_collection.py has the collections themselves).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headrace.tables import levels
from headrace.tables.sliced import Run
from headrace.testing.views_case import told
from headrace.testing.views_plain import attempt, plain_case

CASES = 40


@pytest.mark.timeout(600)
@pytest.mark.parametrize("held_bytes", [0, 2000, 1 << 20])
def test_builds_that_lay_runs_aside_are_right(
    monkeypatch: pytest.MonkeyPatch, held_bytes: int
) -> None:
    settled: list[tuple[int, bool]] = []
    settle = levels.Levels.settle

    def counted(self: Any, aside: Sequence[Run]) -> None:
        settled.append((len(aside), any(run.in_memory for run in aside)))
        settle(self, aside)

    monkeypatch.setattr(levels.Levels, "settle", counted)
    for name, value in (("SLICE", 2), ("FAN", 2), ("HELD_BYTES", held_bytes)):
        monkeypatch.setattr(levels, name, value)
    late = changed = 0
    for seed in range(CASES):
        case = plain_case(f"build{seed}")
        late += bool(case.late)
        changed += bool(case.later)
        wrong = attempt(case)
        assert wrong is None, told(case, wrong)
    assert min(late, changed) > 5
    assert max(runs for runs, _ in settled) > 1
    assert any(in_memory for _, in_memory in settled) == (held_bytes > 0)
