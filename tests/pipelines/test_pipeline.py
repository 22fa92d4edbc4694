"""A pipeline from definition to rows, with real Spark and a real log (R-C1, C9, C12, C14).

Can catch: a definition read wrongly, a batch committed half, state lost or used twice over a
restart, a changed or added view that does not join the others right, a bad row that stops what it
should not, an older driver that is not fenced. Cannot catch: what only random queries and histories
find (test_views_random), crashes at every instant (the kill tests), speed.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

import headrace as hr
from headrace.pipelines.views.algebra import Scan
from headrace.pipelines.views.define import define_views
from headrace.pipelines.views.plan import planned
from headrace.pipelines.views.reading import added_up, status_of
from headrace.pipelines.views.run import Progress, Runner

ORDERS = "id bigint, customer bigint, amount decimal(10,2), status string"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Any]:
    with hr.connect(tmp_path / "log") as log:
        log.create_topic("orders", ORDERS, key="id", kind="changes")
        log.create_topic("customers", "customer bigint, country string", kind="changes")
        yield log


def order(
    number: int, customer: int, amount: float, status: str, weight: int = 1
) -> dict[str, Any]:
    row = {"id": number, "customer": customer, "amount": amount, "status": status}
    return {**row, "_weight": weight}


def shop(**views: Any) -> hr.Pipeline:
    made = hr.Pipeline("shop")
    made.table("orders")
    made.table("customers")
    for name, view in views.items():
        definition, options = view if isinstance(view, tuple) else (view, {})
        if isinstance(definition, str):
            made.view(name, sql=definition, **options)
        else:
            made.view(name, **options)(definition)
    return made


def revenue(orders: Any, customers: Any) -> Any:
    paid = orders.where(F.col("status") == "paid").join(customers, "customer")
    return paid.groupBy("country").agg(
        F.sum("amount").alias("revenue"), F.count("*").alias("orders")
    )


def rows(pipeline: hr.Pipeline, name: str, **at: Any) -> list[tuple[Any, ...]]:
    found = [tuple(row.values()) for row in pipeline.rows(name, **at).to_pylist()]
    return sorted(found, key=repr)


def fill(log: Any) -> None:
    log.append("customers", [{"customer": 1, "country": "at"}, {"customer": 2, "country": "ch"}])
    log.append("orders", [order(1, 1, 10, "paid"), order(2, 2, 5, "open"), order(3, 9, 1, "paid")])


def values(found: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(country, float(amount), count) for country, amount, count in found]


def test_a_view_follows_inserts_updates_and_deletes(log: Any, spark: Any) -> None:
    fill(log)
    pipeline = shop(revenue=(revenue, {"key": "country"}))
    assert pipeline.run(log, until="caught up") == pipeline.through
    assert values(rows(pipeline, "revenue")) == [("at", 10.0, 1)]
    before = log.position
    log.append("orders", [order(2, 2, 5, "open", -1), order(2, 2, 5, "paid")])
    pipeline.run(log, until="caught up")
    assert values(rows(pipeline, "revenue")) == [("at", 10.0, 1), ("ch", 5.0, 1)]
    log.append("customers", [{"customer": 2, "country": "ch", "_weight": -1}])
    log.append("orders", [order(1, 1, 10, "paid", -1)])
    pipeline.run(log, until="caught up")
    assert rows(pipeline, "revenue") == []
    assert values(rows(pipeline, "revenue", at=before)) == [("at", 10.0, 1)]


def test_views_read_views_and_are_through_one_position(log: Any, spark: Any) -> None:
    fill(log)
    pipeline = shop(
        total="SELECT sum(revenue) AS total, count(*) AS countries FROM revenue",
        revenue=revenue,
    )
    with pytest.raises(hr.errors.BadDefinition):
        pipeline.run(log, until="caught up")  # SQL reads what stands before it
    pipeline = shop(
        revenue=revenue,
        total="SELECT sum(revenue) AS total, count(*) AS countries FROM revenue",
    )
    pipeline.run(log, until="caught up")
    assert [(float(t), n) for t, n in rows(pipeline, "total")] == [(10.0, 1)]
    log.append("orders", [order(4, 2, 7, "paid")])
    pipeline.run(log, until="caught up")
    assert [(float(t), n) for t, n in rows(pipeline, "total")] == [(17.0, 2)]
    positions = [
        {batch.position for batch in log.read(f"shop.{name}")} for name in ("revenue", "total")
    ]
    assert positions[0] == positions[1]


@pytest.mark.parametrize("refresh", ["incremental", "full"])
def test_what_is_wrong_with_sql_is_said_with_the_file_and_line_of_the_view(
    log: Any, spark: Any, refresh: str
) -> None:
    made = shop()
    made.view("wrong", sql="select idd from orders", refresh=refresh)
    line = sys._getframe().f_lineno - 1
    with pytest.raises(hr.errors.BadDefinition) as caught:
        made.run(log, until="caught up")
    assert caught.value.place == f"view wrong, {__file__}:{line}"


def test_a_parameter_with_a_default_is_no_input_and_a_partial_function_is_a_definition(
    log: Any, spark: Any
) -> None:
    def above(orders: Any, least: int = 6) -> Any:
        return orders.where(orders.amount > least).select("id")

    fill(log)
    pipeline = shop(six=above, four=functools.partial(above, least=4))
    pipeline.run(log, until="caught up")
    assert (rows(pipeline, "six"), rows(pipeline, "four")) == ([(1,)], [(1,), (2,)])


def test_names_that_differ_in_their_case_only_are_refused(log: Any, spark: Any) -> None:
    with pytest.raises(hr.errors.BadPipeline, match="'orders' is there already"):
        shop().view("Orders", sql="select 1 as a")
    with pytest.raises(hr.errors.BadPipeline, match="comes twice"):
        shop(v="select id as a, customer as A from orders").run(log, until="caught up")


def test_sql_reads_what_it_names_and_nothing_else(log: Any, spark: Any) -> None:
    top = "select * from ORDERS order by amount, id limit 1"
    pipeline = shop(revenue=revenue, top=(top, {"refresh": "full"}))
    found = define_views(pipeline, log, spark, topics=False).by_name["top"].node
    assert [node.name for node in found.walk() if isinstance(node, Scan)] == ["orders"]


def test_rows_set_aside_are_counted_once_however_the_view_is_built(log: Any, spark: Any) -> None:
    """Two equal rows fail together; a large entry is taken in steps; a view is built anew."""

    def aside() -> list[tuple[str, str]]:
        found = added_up(log, "shop._aside", None).to_pylist()
        return sorted((row["view"], row["row"]) for row in found)

    def bad(name: str) -> Any:
        def view(orders: Any) -> Any:
            numbers = orders.groupBy("customer", "status").agg(F.count("*").alias("n"))
            both = numbers.join(orders.select("customer"), "customer")
            return both.selectExpr(f"10 div (customer - 1) as {name}")

        return view

    made: dict[str, Any] = {"on_error": "set_aside"}
    fill(log)
    log.append("orders", [order(7, 1, 10, "paid"), order(8, 1, 10, "paid"), order(9, 1, 1, "paid")])
    shop(share=(bad("a"), made)).run(log, until="caught up", spark=spark)
    first = aside()
    assert len(first) == 4
    shop(share=(bad("b"), made)).run(log, until="caught up", spark=spark)
    assert aside() == first
    log.append("orders", [order(number, 1, 3, "open") for number in range(20, 26)])
    shop(share=(bad("b"), made)).run(log, until="caught up", spark=spark, batch_rows=2)
    assert len(aside()) == 2 * (4 + 6)
    shop(share=("select 1 as b from orders", made)).run(log, until="caught up", spark=spark)
    assert aside() == []


def test_a_restart_goes_on_from_the_last_entry(log: Any, spark: Any) -> None:
    fill(log)
    pipeline = shop(revenue=revenue)
    for number in range(10, 30):
        log.append("orders", [order(number, 1 + number % 2, number, "paid")])
        with Runner(pipeline, log, spark) as runner:
            runner.run("caught up")
    expected = {"at": 10.0, "ch": 0.0}
    for number in range(10, 30):
        expected[["at", "ch"][number % 2]] += number
    assert {c: float(r) for c, r, _ in rows(shop(revenue=revenue), "revenue", log=log)} == expected


def test_an_added_and_a_changed_view_join_in_one_entry(log: Any, spark: Any) -> None:
    fill(log)
    first = shop(revenue=revenue, paid=lambda orders: orders.where("status = 'paid'").select("id"))
    first.run(log, until="caught up")
    assert rows(first, "paid") == [(1,), (3,)]
    log.append("orders", [order(5, 1, 2, "paid")])
    seen: list[Progress] = []
    second = shop(
        revenue=revenue,
        paid=lambda orders: orders.where("status = 'paid'").selectExpr("id", "amount * 2 AS twice"),
        open=lambda orders: orders.where("status = 'open'").select("id"),
    )
    second.run(log, until="caught up", report=seen.append)
    assert [(i, float(t)) for t, i in sorted_by_names(second, "paid")] == [(1, 20), (3, 2), (5, 4)]
    assert rows(second, "open") == [(2,)]
    assert values(rows(second, "revenue")) == [("at", 12.0, 2)]
    assert seen
    assert set(seen[-1].views) == {"paid", "open"}
    joined = [batch.position for batch in log.read(["shop.paid", "shop.open"])]
    assert joined[-1] == joined[-2]
    assert second.through == first.through


def test_a_changed_view_keeps_the_state_of_what_did_not_change(log: Any, spark: Any) -> None:
    fill(log)
    shop(revenue=revenue).run(log, until="caught up")
    log.append("orders", [order(7, 2, 3, "paid")])

    def shown(orders: Any, customers: Any) -> Any:
        known = revenue(orders, customers)
        return known.selectExpr("upper(country) AS country", "orders", "revenue + 1 AS more")

    def by_size(orders: Any, customers: Any) -> Any:
        known = revenue(orders, customers)
        return known.groupBy("orders").agg(F.max("country"), F.sum("revenue"), F.count("*"))

    def largest(orders: Any, customers: Any) -> Any:
        paid = orders.where(F.col("status") == "paid").join(customers, "customer")
        return paid.groupBy("country").agg(F.max("amount"))

    changed = shop(revenue=shown, sizes=by_size, largest=largest)
    plan = planned(changed, log, spark)
    assert [step.action for step in plan.views] == ["is rebuilt", "is built", "is built"]
    assert plan.rows == 0
    assert plan.kept == 2
    with Runner(changed, log, spark) as runner:
        build = runner.build
        assert build is not None
        kinds = [type(node).__name__ for node in build.reused.values()]
        assert sorted(kinds) == ["Aggregate", "Join"]
        assert not build.engine.reads_inputs(build.reused)
        runner.run("caught up")
        assert [row[:2] for row in rows(changed, "revenue", log=log)] == [("AT", 1), ("CH", 1)]
    log.append("orders", [order(8, 2, 3, "paid")])
    changed.run(log, until="caught up")
    assert [(size, last, n) for size, last, _, n in rows(changed, "sizes")] == [
        (1, "at", 1),
        (2, "ch", 1),
    ]


def test_a_select_in_another_order_keeps_the_state_and_gives_the_same(log: Any, spark: Any) -> None:
    fill(log)
    calls = [F.sum("amount").alias("total"), F.count("*").alias("n"), F.max("id").alias("last")]

    def one(orders: Any) -> Any:
        return orders.groupBy("customer").agg(*calls)

    def other(orders: Any) -> Any:
        return orders.groupBy("customer").agg(*calls[::-1])

    shop(v=one).run(log, until="caught up")
    before = shop(v=one).rows("v", log=log).to_pylist()
    changed = shop(v=other)
    with Runner(changed, log, spark) as runner:
        assert runner.build is not None
        assert [type(node).__name__ for node in runner.build.reused.values()] == ["Aggregate"]
        assert not runner.build.engine.reads_inputs(runner.build.reused)
        runner.run("caught up")
    after = changed.rows("v", log=log).to_pylist()
    assert sorted(after, key=repr) == sorted(before, key=repr)
    assert len(after) == 3


def sorted_by_names(pipeline: hr.Pipeline, name: str) -> list[tuple[Any, ...]]:
    found = [
        tuple(row[k] for k in sorted(row, reverse=True)) for row in pipeline.rows(name).to_pylist()
    ]
    return sorted(found, key=lambda row: row[1])


def test_a_failing_row_stops_with_its_position_or_is_set_aside(log: Any, spark: Any) -> None:
    fill(log)
    bad = log.append("orders", [order(6, 1, 0, "paid"), order(7, 1, 4, "paid")]).position

    def share(orders: Any) -> Any:
        return orders.selectExpr("id", "100 / amount AS share")

    with pytest.raises(hr.errors.ViewStopped, match="DIVIDE_BY_ZERO") as stopped:
        shop(share=share).run(log, until="caught up")
    assert stopped.value.details["position"] == bad
    assert "shop.share" in {topic.name for topic in log.topics()}
    assert not list(log.read("shop.share"))
    pipeline = shop(share=(share, {"on_error": "set_aside"}))
    pipeline.run(log, until="caught up")
    assert [i for i, _ in rows(pipeline, "share")] == [1, 2, 3, 7]
    log.append("orders", [order(6, 1, 0, "paid", -1), order(8, 1, 0, "paid")])
    pipeline.run(log, until="caught up")
    aside = [row for batch in log.read("shop._aside") for row in batch.to_pylist()]
    assert [(row["view"], row["_weight"]) for row in aside] == [("share", w) for w in (1, -1, 1)]
    assert "DIVIDE_BY_ZERO" in aside[0]["reason"]


def test_a_key_that_is_not_unique_stops_the_view_with_both_rows(log: Any, spark: Any) -> None:
    fill(log)
    pipeline = shop(paid=(lambda orders: orders.select("status", "id"), {"key": "status"}))
    with pytest.raises(hr.errors.ViewStopped, match="not unique") as stopped:
        pipeline.run(log, until="caught up")
    assert "'id': 1" in stopped.value.fact
    assert "'id': 3" in stopped.value.fact


def test_the_older_of_two_drivers_is_fenced(log: Any, spark: Any) -> None:
    fill(log)
    pipeline = shop(revenue=revenue)
    with Runner(pipeline, log, spark) as older:
        older.run("caught up")
        with Runner(pipeline, log, spark) as newer:
            log.append("orders", [order(4, 2, 7, "paid")])
            with pytest.raises(hr.errors.Fenced):
                older.run("caught up")
            newer.run("caught up")
    assert values(rows(pipeline, "revenue", log=log)) == [("at", 10.0, 1), ("ch", 7.0, 1)]


def test_refresh_full_and_regroup(log: Any, spark: Any) -> None:
    fill(log)
    pipeline = shop(
        newest=(
            lambda orders: orders.orderBy(F.desc("id")).limit(1).select("id"),
            {"refresh": "full"},
        ),
        spread=lambda orders: orders.groupBy("status").agg(F.stddev("amount").alias("spread")),
    )
    pipeline.run(log, until="caught up")
    assert rows(pipeline, "newest") == [(3,)]
    log.append("orders", [order(3, 9, 1, "paid", -1), order(9, 1, 20, "paid")])
    pipeline.run(log, until="caught up")
    assert rows(pipeline, "newest") == [(9,)]
    assert rows(pipeline, "spread") == [("open", None), ("paid", pytest.approx(50**0.5))]


def test_garbage_goes(log: Any, spark: Any, tmp_path: Path) -> None:
    fill(log)
    pipeline = shop(revenue=revenue)
    with Runner(pipeline, log, spark) as runner:
        runner.run("caught up")
        for number in range(10, 150):
            log.append("orders", [order(number, 1, 1, "paid")])
            runner.run("caught up")
        assert len(runner.packs.names()) < 80
    with Runner(pipeline, log, spark) as runner:
        runner.run("caught up")
    assert values(rows(pipeline, "revenue", log=log)) == [("at", 150.0, 141)]


def test_streams_only_gain_rows(log: Any, spark: Any) -> None:
    log.create_topic("clicks", "user bigint, at timestamp")
    log.append("clicks", [{"user": 1, "at": datetime(2024, 1, 1, tzinfo=UTC)}])
    pipeline = hr.Pipeline("web")
    pipeline.stream("clicks")

    @pipeline.view(key=["user", "start"])
    def minutes(clicks: Any) -> Any:
        window = F.window("at", "1 minute").start.alias("start")
        return clicks.groupBy("user", window).count()

    pipeline.run(log, until="caught up")
    log.append(
        "clicks", [{"user": 1, "at": datetime(2024, 1, 1, 0, m, 30, tzinfo=UTC)} for m in (0, 1)]
    )
    pipeline.run(log, until="caught up")
    assert sorted(n for *_, n in rows(pipeline, "minutes")) == [1, 2]
    wrong = hr.Pipeline("wrong")
    wrong.table("clicks")
    wrong.view("v")(lambda clicks: clicks)
    with pytest.raises(hr.errors.BadPipeline, match="stream"):
        wrong.run(log, until="caught up")


def test_a_pipeline_knows_how_many_rows_it_is_behind(log: Any, spark: Any) -> None:
    fill(log)
    pipeline = shop(revenue=revenue)
    for _ in range(2):
        pipeline.run(log, until="caught up")
        assert status_of(log, "shop").behind(log) == 0
        log.append("orders", [order(4, 1, 1, "paid"), order(5, 1, 1, "paid")])
        assert status_of(log, "shop").behind(log) == 2
    shop(revenue=revenue, paid=lambda orders: orders).run(log, until="caught up")
    assert status_of(log, "shop").behind(log) == 0


def test_rows_without_columns_and_empty_nested_constants(log: Any, spark: Any) -> None:
    fill(log)
    pipeline = shop(
        constant="SELECT var_pop(3L) AS x FROM orders",
        both="""SELECT id, e FROM orders LATERAL VIEW explode(array('a', 'b')) AS e
                UNION ALL SELECT customer, 'c' FROM customers""",
    )
    pipeline.run(log, until="caught up")
    assert rows(pipeline, "constant") == [(0.0,)]
    log.append("customers", [{"customer": 7, "country": "de"}])
    pipeline.run(log, until="caught up")
    assert len(rows(pipeline, "both")) == 9


def test_rows_of_an_input_that_comes_later_are_counted_from_its_start(log: Any, spark: Any) -> None:
    """Or the pipeline would seem behind for ever, and a token of other topics be waited for."""
    fill(log)
    log.create_topic("extra", "n bigint", kind="changes")
    log.create_topic("unread", "n bigint", kind="changes")
    for topic in ("extra", "unread"):
        log.append(topic, [{"n": n, "_weight": 1} for n in range(3)])
    paid = "SELECT id FROM orders WHERE status = 'paid'"
    shop(paid=paid).run(log, until="caught up", spark=spark)
    later = shop(paid=paid)
    later.table("extra")
    later.table("unread")
    later.view("more", sql="SELECT n FROM extra")
    with Runner(later, log, spark) as runner:
        runner.run("caught up")
        log.append("orders", [order(4, 1, 1, "paid")])
        runner.run("caught up")
    assert status_of(log, "shop").behind(log) == 0


def test_views_whose_state_is_gone_are_built_anew(log: Any, spark: Any, tmp_path: Path) -> None:
    """As in a log that was restored from a backup, which has no state of views."""
    fill(log)
    pipeline = shop(revenue=(revenue, {"key": "country"}))
    pipeline.run(log, until="caught up")
    log.backup(tmp_path / "backup")
    hr.restore(tmp_path / "backup", tmp_path / "restored")
    with hr.connect(tmp_path / "restored") as restored:
        restored.append("orders", [order(2, 2, 5, "open", -1), order(2, 2, 5, "paid")])
        again = shop(revenue=(revenue, {"key": "country"}))
        again.run(restored, until="caught up")
        assert values(rows(again, "revenue")) == [("at", 10.0, 1), ("ch", 5.0, 1)]
        said = [batch.data.column("_weight").to_pylist() for batch in restored.read("shop.revenue")]
        assert said == [[1], [1]], "what was right is not said again"


def test_a_time_of_day_is_kept_by_every_operator(log: Any, spark: Any) -> None:
    """Spark's have nanoseconds, the log's microseconds: state and topics must agree on one."""
    log.create_topic("shifts", "id bigint, starts time, ends array<time>", key="id", kind="changes")
    early, late = time(1, 2, 3, 456789), time(23, 59, 59, 999999)
    first = {"id": 1, "starts": early, "ends": [late, None]}
    log.append("shifts", [first, {"id": 2, "starts": None, "ends": None}])
    pipeline = hr.Pipeline("work")
    pipeline.table("shifts")
    pipeline.view("same", key="id", sql="SELECT * FROM shifts")
    pipeline.view("both", sql="SELECT a.starts, b.ends FROM same a JOIN shifts b ON a.id = b.id")
    pipeline.view("each", sql="SELECT DISTINCT starts FROM shifts")
    pipeline.view("first", sql="SELECT min(starts) AS at, count(*) AS n FROM shifts")
    pipeline.run(log, until="caught up")
    assert rows(pipeline, "same") == [(1, early, [late, None]), (2, None, None)]
    second = {"id": 1, "starts": late, "ends": [early]}
    log.append("shifts", [{**first, "_weight": -1}, {**second, "_weight": 1}])
    pipeline.run(log, until="caught up")
    assert rows(pipeline, "same") == [(1, late, [early]), (2, None, None)]
    assert rows(pipeline, "both") == [(None, None), (late, [early])]
    assert rows(pipeline, "each") == [(None,), (late,)]
    assert rows(pipeline, "first") == [(late, 2)]


def test_a_failing_row_with_moments_that_python_does_not_have_is_set_aside(
    log: Any, spark: Any
) -> None:
    log.create_topic("terms", "id bigint, until date", key="id", kind="changes")
    until = pa.array([2**31 - 1, 0], pa.int32()).view(pa.date32())
    log.append("terms", pa.table({"id": [1, 2], "until": until, "_weight": [1, 1]}))
    pipeline = hr.Pipeline("rent")
    pipeline.table("terms")
    pipeline.view("inverse", sql="SELECT until, 1 / (id - 1) AS n FROM terms", on_error="set_aside")
    pipeline.run(log, until="caught up")
    (row,) = added_up(log, "rent._aside", None).column("row").to_pylist()
    assert json.loads(row) == {"id": 1, "until": "infinity"}
    wrong = hr.Pipeline("wrong")
    wrong.table("terms")
    wrong.view("same", key="one", sql="SELECT 1 AS one, until FROM terms")
    with pytest.raises(hr.errors.ViewStopped, match="'until': 'infinity'"):
        wrong.run(log, until="caught up")


def test_a_view_without_columns_or_types_is_refused_at_its_place(log: Any, spark: Any) -> None:
    for sql, said in (
        ("SELECT id, NULL AS note FROM orders", "'note' of view 'v' has no type"),
        ("SELECT * EXCEPT (id, customer, amount, status) FROM orders", "has no columns"),
    ):
        with pytest.raises(hr.errors.BadPipeline, match=said) as caught:
            shop(v=sql).run(log, until="caught up")
        assert "test_pipeline.py:" in caught.value.place


def test_columns_that_a_topic_cannot_have_are_refused_at_the_view(log: Any, spark: Any) -> None:
    for sql, key, said in (
        ("SELECT id AS `` FROM orders", [], "a column name is empty"),
        ("SELECT struct() AS s FROM orders", [], "struct<> is not supported"),
        ("SELECT DISTINCT array(id) AS a FROM orders", ["a"], "cannot be part of a key"),
        ("SELECT id FROM orders", ["id", "id"], "a key column comes twice"),
    ):
        pipeline = shop()
        pipeline.view("v", key=key, sql=sql)
        with pytest.raises(hr.errors.BadSchema, match=said) as caught:
            planned(pipeline, log)  # before anything is made
        assert "of view 'v', " in caught.value.place
        assert "test_pipeline.py:" in caught.value.place


def test_a_pipeline_says_how_much_memory_its_drivers_hold(log: Any, spark: Any) -> None:
    small = hr.Pipeline("small", memory_bytes=9 << 20)
    with Runner(small, log, spark) as runner:
        assert runner.packs.may_hold == 9 << 20
    with Runner(small, log, spark, memory_bytes=10 << 20) as runner:
        assert runner.packs.may_hold == 10 << 20
