"""First builds go through the loading path: runs laid aside, in memory or on the disk, then merged.
Entries of more rows than a step are cut, in builds and by live views, and published whole.

Random views without Spark, some of them defined late or changed, are built in chunks of a few rows
with collections so small that every chunk counts as large. Can catch: rows that are lost, doubled
or unseen while they are laid aside; a build that is joined before it is settled. Cannot catch: what
only real sizes do (tests/tables/test_collection.py has the collections themselves).
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.log.embedded.log import EmbeddedLog
from headrace.pipelines.views import run as loop
from headrace.pipelines.views import source
from headrace.pipelines.views.algebra import Join, Scan
from headrace.pipelines.views.engine import Batch, Engine
from headrace.tables import levels, packs
from headrace.tables.sliced import Run
from headrace.testing import views_case
from headrace.testing.views_case import told
from headrace.testing.views_plain import attempt, make_node, plain_case

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
    for name, value in (("SLICE", 2), ("FAN", 2)):
        monkeypatch.setattr(levels, name, value)
    options = {**(loop.Runner.__init__.__kwdefaults__ or {}), "memory_bytes": held_bytes}
    monkeypatch.setattr(loop.Runner.__init__, "__kwdefaults__", options)
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


def test_entries_that_are_cut_are_published_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is read by itself, and is a step: every commit is still a whole entry."""
    settings = replace(views_case.SETTINGS, inline_bytes_max=1, chunk_bytes=1)
    monkeypatch.setattr(views_case, "SETTINGS", settings)
    cuts = 0
    large_entry = loop.Runner._large_entry

    def counted(self: Any, *given: Any) -> bool:
        nonlocal cuts
        cuts += 1
        return large_entry(self, *given)

    monkeypatch.setattr(loop.Runner, "_large_entry", counted)
    for seed in range(CASES // 2):
        case = replace(plain_case(f"cut{seed}"), batch_rows=1 + seed % 3)
        wrong = attempt(case)
        assert wrong is None, told(case, wrong)
    assert cuts > CASES


@pytest.mark.parametrize("live", [True, False])
def test_half_an_entry_may_break_a_view_that_the_whole_does_not(
    spark: Any, tmp_path: Path, live: bool
) -> None:
    """For a moment two rows have one key: then the entry is taken in one step."""
    settings: dict[str, Any] = {"inline_bytes_max": 1, "chunk_bytes": 1}
    with hr.connect(tmp_path / "log", **settings) as log:
        log.create_topic("t", "id bigint, k bigint", key="id", kind="changes")
        log.append("t", [{"id": 1, "k": 1}, {"id": 3, "k": 3}])
        pipeline = hr.Pipeline("p")
        pipeline.table("t")
        pipeline.view("v", key="k", sql="SELECT k, id FROM t")
        if live:
            pipeline.run(log, until="caught up", spark=spark, batch_rows=1)
        log.append("t", [{"id": 2, "k": 1, "_weight": 1}, {"id": 1, "k": 1, "_weight": -1}])
        pipeline.run(log, until="caught up", spark=spark, batch_rows=1)
        assert sorted(pipeline.rows("v").to_pylist(), key=str) == [
            {"k": 1, "id": 2},
            {"k": 3, "id": 3},
        ]
        bad = log.append("t", [{"id": 4, "k": 1}, {"id": 5, "k": 5}])
        with pytest.raises(hr.errors.ViewStopped) as stopped:
            pipeline.run(log, until="caught up", spark=spark, batch_rows=1)
        assert str(bad.position) in str(stopped.value.why)


def test_memory_does_not_grow_with_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A join is built over the log, then takes one entry as large as all there is.

    Arrow's own count of the memory in use at most: four times the rows, about the same memory.
    """
    monkeypatch.setattr(source, "STEP_BYTES", 256 << 10)
    monkeypatch.setattr(levels, "PIECE_BYTES", 256 << 10)
    monkeypatch.setattr(levels, "SLICE", 100)
    monkeypatch.setattr(packs, "OWN_FILE", 64 << 10)

    def rows(first: int, count: int) -> pa.RecordBatch:
        names = [f"{number:08}" * 128 for number in range(first, first + count)]
        return pa.record_batch({"id": range(first, first + count), "name": names})

    def put(log: EmbeddedLog, first: int, count: int) -> None:
        # A call of its own: what is put is not held here while it is worked on, and not counted
        # (another test's run may have left Arrow with the pool that is counted).
        with log.transaction() as entry:
            for name in ("l", "r"):
                entry.append(name, rows(first, count))

    def in_use(folder: str, count: int, *, entries: int) -> int:
        types = [pa.int64(), pa.string()]
        sides = [make_node(Scan, (name,), types, name=name) for name in ("l", "r")]
        join = make_node(
            Join, ("all",), types * 2, kind="inner", left=sides[0], right=sides[1],
            left_keys=(0,), right_keys=(0,), null_safe=(False,), residual=None,
        )  # fmt: skip
        pipeline = views_case.pipeline_of(["v"], [])
        settings: dict[str, Any] = {
            "inline_bytes_max": 64 << 10,
            "chunk_bytes": 64 << 10,
            "read_bytes_max": 64 << 10,
        }
        most = 0
        pool = pa.system_memory_pool()  # that of a run
        gc.collect()
        before = pool.bytes_allocated()  # what other tests hold

        def step(engine: Engine, *given: Any) -> Batch:
            nonlocal most
            found = stepped(engine, *given)
            most = max(most, pool.bytes_allocated() - before)
            return found

        stepped = Engine.step
        monkeypatch.setattr(Engine, "step", step)
        with hr.connect(tmp_path / folder, **settings) as log:
            for name in ("l", "r"):
                pipeline.table(name)
                log.create_topic(name, "id bigint, name string", key="id", kind="changes")
            with views_case.defined_as({"v": join}):
                driver = loop.Runner(pipeline, log, memory_bytes=256 << 10)
            with driver as runner:
                for first in range(0, count, count // entries):
                    put(log, first, count // entries)
                    if entries == 2:
                        runner.run("caught up")
                runner.run("caught up")
            assert sum(log.ends(f"{pipeline.name}.v")) == count
        monkeypatch.setattr(Engine, "step", stepped)
        return most

    for entries in (40, 2):
        few = in_use(f"few{entries}", 1_000, entries=entries)
        assert in_use(f"many{entries}", 4_000, entries=entries) < 1.5 * few + (1 << 20)
