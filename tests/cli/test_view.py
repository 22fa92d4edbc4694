"""`headrace plan`, `run` and `view`, as somebody would type them; with real Spark.

Can catch: commands that do not find, name or print what they should. Cannot catch: whether the
rows are right (tests/pipelines), what a terminal shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.pipelines.views.run import Runner
from tests.cli.conftest import Headrace

FILE = """
import headrace as hr
from pyspark.sql import functions as F

shop = hr.Pipeline("shop")
shop.table("orders")

@shop.view(key="status")
def revenue(orders):
    return orders.groupBy("status").agg(F.sum("amount").alias("revenue"))
"""


@pytest.fixture
def file(headrace: Headrace, folder: str, tmp_path: Path) -> str:
    with hr.connect(folder) as log:
        log.create_topic("orders", "id bigint, amount bigint, status string", kind="changes")
        rows = [{"id": i, "amount": i, "status": ["paid", "open"][i % 2]} for i in range(5)]
        log.append("orders", rows)
    path = tmp_path / "shop.py"
    path.write_text(FILE)
    return str(path)


def test_from_plan_to_rows(headrace: Headrace, file: str) -> None:
    assert "no views yet" in headrace("view", "ls").err
    planned = headrace("plan", file, "--json").json
    assert [(one["name"], one["action"]) for one in planned["views"]] == [("revenue", "is built")]
    assert planned["rows"] == 5
    done = headrace("run", file, "--once", "--json").json
    assert (done["pipeline"], done["commits"]) == ("shop", 1)
    (view,) = headrace("view", "ls", "--json").json
    assert (view["view"], view["behind"], view["state"]) == ("shop.revenue", 0, "kept")
    assert "shop.revenue" in headrace("view", "ls").out
    assert "key: status" in headrace("view", "show", "revenue").out
    rows = headrace("view", "read", "revenue").rows
    assert sorted((row["status"], row["revenue"]) for row in rows) == [("open", 4), ("paid", 6)]
    assert "open" in headrace("view", "read", "shop.revenue", "--format", "table").out
    late = headrace("view", "read", "revenue", "--at", "99999", "--timeout", "0.1")
    assert (late.code, "HR-LOG-026" in late.err) == (1, True)
    assert "unchanged" in headrace("plan", file).out
    assert "HR-LOG-010" in headrace("view", "show", "nothing").err


def test_topics_that_are_gone_are_left_out(headrace: Headrace, folder: str, file: str) -> None:
    text = Path(file).read_text()
    Path(file).write_text(text + 'shop.view("number", sql="select count(*) n from orders")\n')
    headrace("run", file, "--once")
    Path(file).write_text(text)
    headrace("run", file, "--once")
    with hr.connect(folder) as log:
        log.delete_topic("shop.number")
        log.delete_topic("orders")
    (view,) = headrace("view", "ls", "--json").json
    assert (view["view"], view["behind"]) == ("shop.revenue", 0)


def test_a_file_is_read_anew_when_an_input_changes(
    headrace: Headrace, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Altered(Runner):
        """Has a column added after the views were read."""

        def run(self, until: Any) -> int:
            if "z" not in self.log.topic("orders").schema.arrow.names:
                self.log.alter_topic("orders", add="z bigint")
            return super().run(until)

    monkeypatch.setattr("headrace.pipelines.views.run.Runner", Altered)
    Path(file).write_text(FILE + 'shop.view("itself", sql="select * from orders")\n')
    done = headrace("run", file, "--once")
    assert (done.code, "the views are read anew" in done.err) == (0, True)
    assert "z" in headrace("view", "read", "itself").rows[0]


def test_explain_says_what_is_kept(headrace: Headrace, file: str) -> None:
    text = headrace("view", "explain", file, "revenue").out
    assert "aggregate (sum)" in text
    assert "keeps one row a group" in text
    lines = headrace("view", "explain", file, "revenue", "--json").json
    assert lines[-1]["operator"] == "input orders"
    assert headrace("view", "explain", file, "nothing").code == 1


def test_a_file_that_defines_no_pipeline(headrace: Headrace, file: str) -> None:
    Path(file).write_text("x = 1\n")
    assert "defines 0 pipelines" in headrace("plan", file).err
    Path(file).write_text("x = 1 / 0\n")
    assert f"{file}:1" in headrace("plan", file).err
    assert "HR-VIEW-022" in headrace("run", "nowhere.py").err
