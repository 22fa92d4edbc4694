"""The user's test kit, the test that `init` writes, and the plan of a project, on a shared Spark.

Caught: a kit that gives other rows than the view, loses a transaction or a retraction, mixes two
pipelines or two definitions of one; a new project whose test fails; a plan that does not say what
is rebuilt and what becomes of the target. Not caught: how long it takes.
"""

from __future__ import annotations

import importlib
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql

import headrace as hr
from headrace import errors
from headrace.pipelines.files import load_pipeline
from headrace.pipelines.views import run
from headrace.runtime.parts import JVM_FAILURES, Turns
from headrace.runtime.plan import project_plan
from headrace.runtime.project import FollowerOf, find_project
from headrace.testing.postgres import Server, fresh_database
from tests.cli.conftest import Headrace, folder, headrace

__all__ = ["folder", "headrace"]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def spark() -> Any:
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    from headrace.pipelines.spark import session

    return session(settings={"spark.sql.codegen.wholeStage": "false"}, quick=True)


def shop() -> hr.Pipeline:
    made = hr.Pipeline("shop")
    made.table("orders", of="shop.public.orders")
    made.stream("clicks")
    revenue = "SELECT country, sum(amount) AS revenue FROM orders GROUP BY country"
    made.view("revenue", key="country", sql=revenue)
    made.view("pages", sql="SELECT page, count(*) AS clicks FROM clicks GROUP BY page")
    return made


ORDER = {"id": 1, "country": "DE", "amount": 10}
CLICKS = "user bigint, page string"


def test_rows_come_go_and_change() -> None:
    after = hr.testing.history(
        [
            {"orders": [ORDER, {"id": 2, "country": "DE", "amount": 5}]},
            {"-orders": [ORDER], "orders": [ORDER | {"country": "FR"}]},
            {"-orders": [{"id": 2, "country": "DE", "amount": 5}]},
            {"clicks": [{"user": 1, "page": "/"}]},
        ],
        clicks=CLICKS,
    ).rows(shop(), "revenue")
    assert after == [
        [{"country": "DE", "revenue": 15}],
        [{"country": "DE", "revenue": 5}, {"country": "FR", "revenue": 10}],
        [{"country": "FR", "revenue": 10}],
        [{"country": "FR", "revenue": 10}],
    ]


def test_all_views_after_each_transaction_and_types_that_are_said() -> None:
    pipeline = shop()
    found = hr.testing.history(
        [{"orders": [ORDER], "clicks": [{"user": 1, "page": "/"}]}, {}],
        orders="id bigint, country string, amount decimal(10,2)",
    ).views(pipeline)
    assert found[0] == found[1]
    hr.testing.same(found[0]["revenue"], [{"country": "DE", "revenue": Decimal("10.00")}])
    hr.testing.same(found[0]["pages"], [{"page": "/", "clicks": 1}])
    other = hr.testing.history([{"orders": [ORDER]}], clicks=CLICKS)  # now a whole number
    assert other.rows(pipeline, "revenue") == [[{"country": "DE", "revenue": 10}]]


def test_a_definition_that_was_added_is_seen() -> None:
    pipeline = shop()
    history = hr.testing.history([{"orders": [ORDER]}], clicks=CLICKS)
    history.rows(pipeline, "revenue")
    pipeline.view("total", sql="SELECT sum(revenue) AS total FROM revenue")
    assert history.rows(pipeline, "total") == [[{"total": 10}]]


def test_a_difference_is_shown_row_by_row() -> None:
    hr.testing.same([{"a": 1, "b": None}, {"a": 1, "b": None}], [{"b": None, "a": 1}] * 2)
    with pytest.raises(AssertionError) as caught:
        hr.testing.same([{"a": 1}, {"a": 2}, {"a": 2}], [{"a": 1}, {"a": 2}, {"a": 3}])
    assert str(caught.value).splitlines()[1:] == ["  + a=2", "  - a=3"]


@pytest.mark.parametrize(
    ("transactions", "view", "said"),
    [
        ([{"order": [ORDER]}], "revenue", "did you mean 'orders'"),
        ([{"orders": [ORDER]}], "revenues", "did you mean 'revenue'"),
        ([{"orders": [ORDER]}], "revenue", "no row of input 'clicks'"),
        ([{"orders": [ORDER], "-clicks": [{"page": "/"}]}], "revenue", "it is a stream"),
    ],
)
def test_what_cannot_be_is_said(transactions: list[Any], view: str, said: str) -> None:
    with pytest.raises(errors.BadPipeline, match=said):
        hr.testing.history(transactions).rows(shop(), view)


def test_a_pipeline_that_fails_waits_stops_or_asks_for_another_jvm(tmp_path: Path) -> None:
    """What passes is tried again, what stays is not; a Spark that fails on and on is replaced."""
    file = tmp_path / "shop.py"
    file.write_text("import headrace as hr\nshop = hr.Pipeline('shop')\nshop.table('orders')\n"
                    "shop.view('same', sql='SELECT * FROM orders')\n")  # fmt: skip
    with hr.connect(tmp_path / "data") as log:
        turns = Turns(file, log)
        assert not turns.take()  # 'orders' is not there yet
        assert (turns.state, type(turns.error)) == ("waiting", errors.UnknownTopic)
        log.create_topic("orders", "id bigint", kind="changes")
        log.append("orders", [{"id": 1}])
        turns.try_at = None
        while turns.take():
            assert turns.state in ("building", "live")
        assert (turns.state, turns.error) == ("live", None)
        assert turns.pipeline is not None
        assert turns.pipeline.rows("same", log=log).to_pylist() == [{"id": 1}]
        asked = []
        for _ in range(JVM_FAILURES + 1):
            turns.fail(errors.SparkFailed("lost", place="x"))
            asked.append(turns.needs_jvm)
        assert asked == [False] * JVM_FAILURES + [True]
        turns.fail(RuntimeError("a bug"))
        assert turns.state == "failing"
        turns.fail(errors.Fenced("by another", place="x"))
        assert (turns.state, turns.try_at, turns.take()) == ("stopped", None, False)


def test_a_new_view_joins_where_its_new_table_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live views that are behind pass the snapshot of a table; a view of it must not show half."""
    with hr.connect(tmp_path / "data", read_rows_max=2) as log:
        for name in ("old", "new"):
            log.create_topic(name, "id bigint", key="id", kind="changes")
        pipeline = hr.Pipeline("p")
        pipeline.table("old")
        pipeline.view("olds", key="id", sql="SELECT id FROM old")
        log.append("old", [{"id": 0}])
        pipeline.run(until="caught up", log=log)
        for n in range(1, 9):  # a snapshot in eight chunks, and the old view stands still
            log.append("old", [{"id": n}])
            log.append("new", [{"id": n}])
        pipeline.table("new")
        pipeline.view("news", key="id", sql="SELECT id FROM new")
        whole = log.position
        monkeypatch.setattr(run, "BATCH_ROWS", 2)
        with run.Runner(pipeline, log) as runner:
            runner.run("caught up")
        says = [row for batch in log.read("p._commits") for row in batch.data.to_pylist()]
        assert min(one["through"] for one in says if "news" in one["views"]) >= whole
        assert len(says) > 3  # the old view did not wait for it
        assert pipeline.rows("news", log=log).num_rows == 8


def try_out(root: Path, test: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the test of a new project, in this process; the module of its pipeline."""
    names = ("pipeline", "test_pipeline")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(root))
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        try:
            getattr(importlib.import_module("test_pipeline"), test)()
            return importlib.import_module("pipeline")
        finally:
            for name in names:
                sys.modules.pop(name, None)


def test_a_project_of_a_database_begins_with_its_first_table(
    headrace: Headrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres: Server
) -> None:
    monkeypatch.delenv("HEADRACE_LOG")
    with fresh_database(postgres, "runtime_init") as database:
        empty = headrace("init", str(tmp_path / "empty"), "--dsn", postgres.dsn(database))
        with postgres.connect(database) as connection:
            connection.execute("create table orders (id int primary key, amount int)")
            connection.execute('create table "a b" (id int primary key)')
        dsn = postgres.dsn(database, password="secret")
        done = headrace("init", str(tmp_path / "first"), "--dsn", dsn)
        assert done.code == 0, done.err
        project = find_project(tmp_path / "first")
        assert project.captures[0].tables == ("public.orders",)
        assert headrace("doctor", "--quick", "--project", str(project.folder)).code == 0
    assert (empty.code, not (tmp_path / "empty").exists()) == (1, True)
    assert "HR-CAPTURE-028" in empty.err
    assert "secret" not in (project.folder / "headrace.toml").read_text()
    try_out(project.folder, "test_rows_are_counted", monkeypatch)


@pytest.mark.parametrize("name", ["My Table", "class", "F", "counted", "ünï", 'a"b', "a[1]", "😀"])
def test_a_project_of_a_database_whose_only_table_has_an_odd_name(
    name: str,
    headrace: Headrace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    postgres: Server,
) -> None:
    monkeypatch.delenv("HEADRACE_LOG")
    with fresh_database(postgres, "runtime_init_odd") as database:
        with postgres.connect(database) as connection:
            table = sql.Identifier(name)
            connection.execute(
                sql.SQL('create table {} ("the ""id" int primary key)').format(table)
            )
        dsn = postgres.dsn(database, application_name=name)
        done = headrace("init", str(tmp_path / "first"), "--dsn", dsn)
        assert done.code == 0, done.err
        project = find_project(tmp_path / "first")
        with hr.connect(project.log) as log:
            (one,) = project.captures
            hr.capture(log, one.name, one.dsn, tables=one.tables).run("caught up")
            pipeline = load_pipeline(str(project.pipelines[0]))
            (source,) = pipeline.inputs.values()
            assert log.topic(source.topic).key == ('the "id',)
        assert headrace("capture", "remove", "source", "--yes", "--log", str(project.log)).code == 0
    try_out(project.folder, "test_rows_are_counted", monkeypatch)


def test_the_test_of_a_new_project_passes_and_its_plan_says_what_a_change_does(
    headrace: Headrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_LOG")
    root = tmp_path / "first"
    assert headrace("init", str(root)).code == 0
    pipeline = try_out(root, "test_visits_are_counted", monkeypatch).web
    project = find_project(root)
    with hr.connect(project.log) as log:
        (new,) = project_plan(project, log)
        assert new.plan is not None
        assert [one.action for one in new.plan.views] == ["is built"]
        assert [one.action for one in new.kept] == ["is loaded"]
        pipeline.run(log, until="caught up")
        project.note_followers(FollowerOf.of(one) for one in pipeline.kept.values())
        (same,) = project_plan(project, log)
        assert same.plan is not None
        assert [one.action for one in same.plan.views] == ["goes on"]
        assert [one.action for one in same.kept] == ["goes on"]
    text = (root / "pipeline.py").read_text()
    (root / "pipeline.py").write_text(text.replace('F.count("*")', "F.count('page')"))
    done = headrace("plan", "--project", str(root), "--json")
    (changed,) = done.json
    assert [one["action"] for one in changed["views"]] == ["is rebuilt"]
    assert "then what differs is applied" in changed["followers"][0]["why"]
    (root / "pipeline.py").write_text("wrong")
    done = headrace("plan", "--project", str(root))
    assert done.code == 1
    assert "HR-VIEW-022" in done.out


@pytest.mark.parametrize(
    ("transactions", "schemas", "said"),
    [
        ({"orders": []}, {}, "not a list of transactions"),
        ([{"orders": {"id": 1}}], {}, "not a list of transactions"),
        (["orders"], {}, "not a list of transactions"),
        ([{"orders": [{"amount": 1}, {"amount": "a"}]}], {}, "no common types"),
        ([], {"order": "id int"}, "has no input 'order'"),
    ],
)
def test_a_history_that_is_none_is_refused(
    transactions: Any, schemas: dict[str, str], said: str
) -> None:
    with pytest.raises(errors.BadPipeline, match=said):
        hr.testing.history(transactions, **schemas).rows(shop(), "revenue")
