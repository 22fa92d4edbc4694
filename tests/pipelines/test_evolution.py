"""Columns that change: of a view whose definition does, and of an input while it is followed.

Can catch: rows of a view that become null, or cannot be read, under another name or type of a
column; a driver that takes one column for another; state kept that depends on a column that is no
more; state thrown away that does not. Cannot catch: what a source makes of its columns (capture).
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.pipelines.views.plan import planned
from headrace.pipelines.views.run import Runner
from headrace.runtime.verify import Known, verify

Rows = list[dict[str, Any]]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Any]:
    with hr.connect(tmp_path / "log") as log:
        log.create_topic("a", "g string, n int", kind="changes")
        log.append("a", [{"g": "x", "n": 1}, {"g": "y", "n": 2}])
        yield log


def pipe(**views: str) -> hr.Pipeline:
    made = hr.Pipeline("p")
    made.table("a")
    for name, sql in views.items():
        made.view(name, sql=sql)
    return made


def rows(pipeline: hr.Pipeline, name: str, log: Any = None) -> Rows:
    return sorted(pipeline.rows(name, log=log).to_pylist(), key=repr)


def is_right(log: Any, pipeline: hr.Pipeline) -> bool:
    known = Known(pipeline=lambda _: pipeline)
    return not any(v.differing for name in pipeline.views for v in verify(log, f"p.{name}", known))


@pytest.mark.timeout(300)
def test_a_view_may_rename_retype_and_reorder_its_columns(log: Any, spark: Any) -> None:
    texts = {
        "select g, n as c from a": [{"g": "x", "c": 1}, {"g": "y", "c": 2}],
        "select g, n as d from a": [{"g": "x", "d": 1}, {"g": "y", "d": 2}],
        "select g, g as d from a": [{"g": "x", "d": "x"}, {"g": "y", "d": "y"}],
        "select n as d from a where n > 5": [],
        "select n as d, g as c from a": [{"d": 1, "c": "x"}, {"d": 2, "c": "y"}],
    }
    for sql, wanted in texts.items():
        pipeline = pipe(v=sql, number="select count(*) as c from v")
        pipeline.run(log, until="caught up")
        assert rows(pipeline, "v") == wanted, sql
        assert rows(pipeline, "number") == [{"c": len(wanted)}]
        assert {one.action for one in planned(pipeline, log).views} == {"goes on"}


@pytest.mark.timeout(300)
def test_a_retyped_view_is_served_as_it_was_until_it_is_built(log: Any, spark: Any) -> None:
    first = pipe(v="select n as c from a")
    first.run(log, until="caught up")
    second = pipe(v="select g as c from a")
    with Runner(second, log, spark) as runner:
        assert rows(second, "v", log) == [{"c": 1}, {"c": 2}]
        runner.run("caught up")
    assert rows(second, "v", log) == [{"c": "x"}, {"c": "y"}]


@pytest.mark.timeout(300)
def test_constant_rows_come_anew_beside_state_that_was_kept(log: Any, spark: Any) -> None:
    """The same constant is below an operator whose state stays, and beside it."""
    kept = "select distinct n from (select n from a union all select 7)"
    pipe(v=kept).run(log, until="caught up")
    second = pipe(v=kept, w=f"select n from ({kept}) union all select 7")
    second.run(log, until="caught up")
    assert rows(second, "w") == [{"n": 1}, {"n": 2}, {"n": 7}, {"n": 7}]


@pytest.mark.timeout(300)
def test_the_columns_of_an_input_change_while_it_is_followed(log: Any, spark: Any) -> None:
    """The weight of a row is never taken from a column that is new."""
    pipeline = pipe(
        sums="select g, sum(n) as s from a group by g",
        every="select * from a where n > 0",
        itself="select * from a",
    )
    pipeline.run(log, until="caught up")
    running = Runner(pipeline, log, spark)
    running.run("caught up")
    steps: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"add": "z bigint"}, {"g": "x", "n": 5, "z": 7}, "goes on"),
        ({"widen": {"n": "bigint"}}, {"g": "x", "n": 1 << 40, "z": 8}, "is rebuilt"),
        ({"retire": ["z"]}, {"g": "q", "n": 9}, "goes on"),
        # Whoever has used the other z must not keep what came of it.
        ({"add": "z bigint"}, {"g": "r", "n": 10, "z": 1}, "is rebuilt"),
        ({"retype": {"n": "decimal(9,2)"}}, {"g": "s", "n": Decimal("2.5"), "z": 1}, "is rebuilt"),
    ]
    for change, row, action in steps:
        log.alter_topic("a", **change)
        log.append("a", [row])
        with pytest.raises(hr.errors.InputChanged), running:
            running.run("caught up")
        assert planned(pipeline, log).views[0].action == action, change
        pipeline.run(log, until="caught up")
        assert is_right(log, pipeline), change
        running = Runner(pipeline, log, spark)
        running.run("caught up")
    running.close()
    assert rows(pipeline, "sums") == [{"g": "s", "s": Decimal("2.50")}]


def test_a_run_reads_its_views_anew_when_an_input_changes(log: Any, spark: Any) -> None:
    class Altered(Runner):
        """Has the column added after the views were read."""

        def run(self, until: Any) -> int:
            if "z" not in self.log.topic("a").schema.arrow.names:
                self.log.alter_topic("a", add="z bigint")
                self.log.append("a", [{"g": "x", "n": 5, "z": 7}])
            return super().run(until)

    pipeline = pipe(itself="select * from a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.pipelines.views.run.Runner", Altered)
        pipeline.run(log, until="caught up")
    assert {"g": "x", "n": 5, "z": 7} in rows(pipeline, "itself")


@pytest.mark.timeout(300)
def test_a_topic_that_is_made_anew_is_another_input(log: Any, spark: Any) -> None:
    """Nothing is left of the rows of the one before, whoever notices, and when."""
    pipeline = pipe(sums="select g, sum(n) as s from a group by g", gs="select distinct g from a")
    pipeline.run(log, until="caught up")
    for given in ([], [{"g": "x", "n": 5}]):
        running = Runner(pipeline, log, spark)
        running.run("caught up")
        log.delete_topic("a")
        with pytest.raises(hr.errors.UnknownTopic):
            running.run("caught up")
        log.create_topic("a", "g string, n int", kind="changes")
        if given:
            log.append("a", given)
        with pytest.raises(hr.errors.InputChanged), running:
            running.run("caught up")
        assert {one.action for one in planned(pipeline, log).views} == {"is rebuilt"}
        pipeline.run(log, until="caught up")
        assert rows(pipeline, "sums") == [{"g": one["g"], "s": one["n"]} for one in given]
        assert rows(pipeline, "gs") == [{"g": one["g"]} for one in given]


@pytest.mark.timeout(300)
def test_a_view_whose_topic_was_deleted_is_built_anew(log: Any, spark: Any) -> None:
    pipeline = pipe(sums="select g, sum(n) as s from a group by g", number="select count(*) from a")
    pipeline.run(log, until="caught up")
    log.delete_topic("p.sums")
    assert [one.action for one in planned(pipeline, log).views] == ["is rebuilt", "goes on"]
    pipeline.run(log, until="caught up")
    assert rows(pipeline, "sums") == [{"g": "x", "s": 1}, {"g": "y", "s": 2}]
    log.append("a", [{"g": "x", "n": 5}])
    pipeline.run(log, until="caught up")
    assert rows(pipeline, "sums") == [{"g": "x", "s": 6}, {"g": "y", "s": 2}]


@pytest.mark.timeout(300)
def test_rows_set_aside_are_noted_once_for_each_view_that_leaves_them_out(
    log: Any, spark: Any
) -> None:
    """Also where a new view reads that view, has the same operators, or is that view changed."""
    text = "select int(g) as i, count(*) as c from a group by int(g)"

    def made(**views: str) -> hr.Pipeline:
        pipeline = hr.Pipeline("p")
        pipeline.table("a")
        for name, sql in views.items():
            pipeline.view(name, sql=sql, on_error="stop" if name == "s" else "set_aside")
        return pipeline

    def noted() -> list[str]:
        return sorted(row["view"] for row in hr.sql(log, "select * from p._aside").to_pylist())

    made(v=text).run(log, until="caught up")
    assert noted() == ["v", "v"]
    made(v=text, w="select c from v", x=text).run(log, until="caught up")
    assert noted() == ["v", "v", "x", "x"]
    changed = made(v=f"select * from ({text}) where c > 0", w="select c from v", x=text)
    changed.run(log, until="caught up")
    assert noted() == ["v", "v", "x", "x"]
    with pytest.raises(hr.errors.ViewStopped):
        made(v=text, s=text).run(log, until="caught up")
    log.append("a", [{"g": g, "n": n, "_weight": -1} for g, n in (("x", 1), ("y", 2))])
    changed.run(log, until="caught up")
    assert noted() == []


@pytest.mark.timeout(300)
def test_what_is_noted_of_a_row_with_minus_zero_goes_with_it(log: Any, spark: Any) -> None:
    """In state -0.0 and 0.0 are one value: which of them a row is taken away with is chance."""
    log.create_topic("z", "g string, n int, x double", kind="changes")
    pipeline = hr.Pipeline("p")
    pipeline.table("z")
    sql = "select int(l.g) i, r.x from z l join (select n, x from z) r on l.n = r.n"
    pipeline.view("v", sql=sql, on_error="set_aside")
    there = [{"g": "a", "n": 1, "x": -0.0}, {"g": "b", "n": 1, "x": 0.0}]
    for row, weight, left in ((there[0], 1, 1), (there[1], 1, 4), (there[1], -1, 1)):
        log.append("z", [{**row, "_weight": weight}])
        pipeline.run(log, until="caught up")
        assert len(hr.sql(log, "select * from p._aside").to_pylist()) == left
