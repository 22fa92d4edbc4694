"""What makes a view fail is set aside, or stops it: in every operator, and over every change.

Can catch: failures inside a step with state that stop a view which says "set_aside"; notes that are
lost, doubled or left over when a view is changed, shares an operator or is read by another one;
a view that says "stop" and goes on. Cannot catch: crashes (`./run faults views`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql.pandas import functions as pandas_functions

import headrace as hr
from headrace import errors
from headrace.pipelines.views.plan import planned

MOST = (1 << 63) - 1
pandas_udf: Any = pandas_functions.pandas_udf  # its types are too many for mypy


def largest(t: Any) -> Any:
    @pandas_udf("bigint")  # type: ignore[untyped-decorator]
    def most(values: pd.Series) -> int:
        if (values == 0).any():
            raise ValueError("a zero")
        return int(values.max())

    return t.groupBy("k").agg(most("x").alias("m"))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Any]:
    with hr.connect(tmp_path / "log") as made:
        made.create_topic("t", "k int, x bigint", kind="changes")
        made.create_topic("u", "k int, y bigint", kind="changes")
        yield made


def pipeline(on_error: str = "set_aside", **views: Any) -> hr.Pipeline:
    made = hr.Pipeline("p")
    made.table("t")
    made.table("u")
    for name, definition in views.items():
        if isinstance(definition, str):
            made.view(name, sql=definition, on_error=on_error)
        else:
            made.view(name, on_error=on_error)(definition)
    return made


def row(k: int, x: int, weight: int = 1) -> dict[str, int]:
    return {"k": k, "x": x, "_weight": weight}


def rows(made: hr.Pipeline, view: str) -> list[tuple[Any, ...]]:
    found = made.rows(view).to_pylist()
    return sorted((tuple(one.values()) for one in found), key=repr)


def aside(made: hr.Pipeline) -> Counter[tuple[str, str]]:
    return Counter((one["view"], one["row"]) for one in made.rows("_aside").to_pylist())


@pytest.mark.parametrize(
    ("definition", "bad", "reason"),
    [
        ("select k, sum(x) m from t group by k", MOST, "does not fit int64"),
        ("select k, sum(x) m, stddev(10 div x) is null n from t group by k", 0, "DIVIDE_BY_ZERO"),
        (largest, 0, "ValueError: a zero"),
    ],
)
def test_a_group_that_fails_is_set_aside_until_it_does_no_more(
    log: Any, spark: Any, definition: Any, bad: int, reason: str
) -> None:
    log.append("t", [row(1, 5), row(2, 7)])
    made = pipeline(v=definition)
    made.run(log, until="caught up", spark=spark)
    at_first = rows(made, "v")
    log.append("t", [row(1, bad), row(3, 9)])
    made.run(log, until="caught up", spark=spark)
    assert [one[0] for one in rows(made, "v")] == [2, 3]
    noted = made.rows("_aside").to_pylist()
    assert [(one["view"], one["row"]) for one in noted] == [("v", '{"k": 1}')]
    assert reason in noted[0]["reason"]
    log.append("t", [row(1, 1)])  # the group changes, and fails still
    made.run(log, until="caught up", spark=spark)
    assert aside(made).total() == 1
    log.append("t", [row(1, 1, -1), row(1, bad, -1), row(3, 9, -1)])
    made.run(log, until="caught up", spark=spark)
    assert rows(made, "v") == at_first
    assert not aside(made)


def test_a_sum_that_does_not_fit_stops_with_view_group_and_position(log: Any, spark: Any) -> None:
    log.append("t", [row(1, 5)])
    position = log.append("t", [row(2, MOST), row(2, 1)]).position
    made = pipeline("stop", v="select k, sum(x) s from t group by k")
    with pytest.raises(errors.ViewStopped, match=r"view 'v' fails.*the group \{'k': 2\}") as caught:
        made.run(log, until="caught up", spark=spark)
    assert caught.value.details["position"] == position
    assert "try_sum" in caught.value.fix


@pytest.mark.parametrize("kind", ["left", "full", "left semi", "left anti"])
def test_a_pair_that_a_residual_fails_on_is_no_pair(log: Any, spark: Any, kind: str) -> None:
    log.append("t", [row(1, 2), row(1, 0), row(2, 0)])
    log.append("u", [{"k": 1, "y": 4}])
    tried = f"select t.k, x from t {kind} join u on t.k = u.k and u.y > try_divide(6, x)"
    made = pipeline(v=tried.replace("try_divide(6, x)", "6 / x"), tried=tried)
    made.run(log, until="caught up", spark=spark)
    assert rows(made, "v") == rows(made, "tried")
    assert aside(made) == {("v", '{"k": 1, "x": 0, "y": 4}'): 1}  # its k is of both sides
    log.append("u", [{"k": 2, "y": 1}, {"k": 1, "y": 4, "_weight": -1}])
    log.append("t", [row(1, 0, -1)])
    made.run(log, until="caught up", spark=spark)
    assert rows(made, "v") == rows(made, "tried")
    assert aside(made) == {("v", '{"k": 2, "x": 0, "y": 1}'): 1}


@pytest.mark.timeout(300)
def test_a_pair_that_never_was_fails_no_view(log: Any, spark: Any) -> None:
    """Both rows change in one entry: the new one never met the old one of the other side."""
    made = pipeline(
        "stop",
        inner="select 1 / (x - y) q from t join u on t.k = u.k",
        full="select 1 / (x - y) q from t full join u on t.k = u.k",
        scalar="select 1 / (x - (select max(y) from u)) q from t",
        residual="select t.k from t left join u on t.k = u.k and 1 / (x - y) < 5",
        anti="select t.k from t left anti join u on t.k = u.k and 1 / (x - y) > 5",
    )
    log.append("t", [row(1, 1)])
    log.append("u", [{"k": 1, "y": 2}])
    made.run(log, until="caught up")
    with log.transaction() as entry:
        entry.append("t", [row(1, 1, -1), row(1, 2)])
        entry.append("u", [{"k": 1, "y": 2, "_weight": -1}, {"k": 1, "y": 3}])
    made.run(log, until="caught up")
    assert all(rows(made, name) == [(-1.0,)] for name in ("inner", "full", "scalar"))
    assert (rows(made, "residual"), rows(made, "anti")) == ([(1,)], [(1,)])
    log.append("t", [row(1, 3)])  # now there is one
    with pytest.raises(errors.ViewStopped, match="DIVIDE_BY_ZERO"):
        made.run(log, until="caught up")


@pytest.mark.timeout(300)
def test_a_row_that_was_mended_at_its_source_stops_no_view(log: Any, spark: Any) -> None:
    """Neither one that goes on, however short its batches are, nor one that is built later."""
    texts = {
        "above": "select k, 6 div x q from t",
        "inside": "select k, max(6 div x) q, stddev(6 div x) is null from t group by k",
    }
    made = pipeline("stop", **texts)
    log.append("t", [row(1, 1)])
    made.run(log, until="caught up")
    log.append("t", [row(2, 0)])
    with pytest.raises(errors.ViewStopped, match="DIVIDE_BY_ZERO"):
        made.run(log, until="caught up")
    for number in range(5):
        log.append("t", [row(3, number + 1)])
    log.append("t", [row(2, 0, -1), row(2, 2)])
    last = log.append("t", [row(4, 0)]).position
    with pytest.raises(errors.ViewStopped, match="'k': 4, 'x': 0") as stopped:
        made.run(log, until="caught up", batch_rows=1)
    assert stopped.value.details["position"] == last
    log.append("t", [row(4, 0, -1)])
    made.run(log, until="caught up", batch_rows=1)
    assert {(1, 6), (2, 3), (3, 1)} <= set(rows(made, "above"))
    pipeline("stop", more="select k, 6 div x q from t where k > 0", **texts).run(
        log, until="caught up", batch_rows=1
    )
    assert rows(made, "more") == rows(made, "above")


def test_notes_stay_with_a_view_whose_columns_are_renamed(log: Any, spark: Any) -> None:
    """What lies below the state that would be kept is not seen again: so it is not kept."""
    log.append("t", [row(1, 1), row(1, 0), row(2, 5)])
    pipeline(v="select k, sum(10 div x) s from t group by k").run(
        log, until="caught up", spark=spark
    )
    changed = pipeline(v="select k, sum(10 div x) renamed from t group by k")
    assert planned(changed, log, spark).kept == 0
    changed.run(log, until="caught up", spark=spark)
    assert aside(changed) == {("v", '{"k": 1, "x": 0}'): 1}
    log.append("t", [row(1, 0, -1)])
    changed.run(log, until="caught up", spark=spark)
    assert not aside(changed)


def test_a_view_that_is_read_by_a_new_one_is_not_noted_twice(log: Any, spark: Any) -> None:
    log.append("t", [row(1, 0)])
    one = "select 10 div x s from t"
    pipeline(v=one).run(log, until="caught up", spark=spark)
    both = pipeline(v=one, top="select sum(s) s from v")
    both.run(log, until="caught up", spark=spark)
    assert aside(both) == {("v", '{"k": 1, "x": 0}'): 1}


def test_views_with_an_operator_in_common_each_note_what_fails_in_it(log: Any, spark: Any) -> None:
    common = "select k, sum(10 div x) s from t group by k"
    log.append("t", [row(1, 0), row(1, 1)])
    made = pipeline(a=common, b=common)
    made.run(log, until="caught up", spark=spark)
    assert aside(made) == {(view, '{"k": 1, "x": 0}'): 1 for view in "ab"}
    log.append("t", [row(1, 0, -1)])
    made.run(log, until="caught up", spark=spark)
    assert not aside(made)
    strict = pipeline(a=common)
    strict.view("b", sql=common)
    log.append("t", [row(2, 0)])
    with pytest.raises(errors.ViewStopped, match="view 'b' fails on the row"):
        strict.run(log, until="caught up", spark=spark)


def test_a_new_view_that_says_stop_stops_at_what_others_have_set_aside(
    log: Any, spark: Any
) -> None:
    common = "select k, sum(10 div x) s from t group by k"
    log.append("t", [row(1, 0), row(1, 1)])
    pipeline(a=common).run(log, until="caught up", spark=spark)
    more = pipeline(a=common)
    more.view("b", sql=common)
    with pytest.raises(errors.ViewStopped, match="view 'b' fails on the row"):
        more.run(log, until="caught up", spark=spark)


def test_a_full_refresh_that_fails_is_not_told_to_set_rows_aside(log: Any, spark: Any) -> None:
    log.append("t", [row(1, 0)])
    made = pipeline()
    made.view("v", sql="select 10 div x s from t", refresh="full", on_error="set_aside")
    with pytest.raises(errors.ViewStopped, match="DIVIDE_BY_ZERO") as caught:
        made.run(log, until="caught up", spark=spark)
    assert "set_aside" not in caught.value.fix
