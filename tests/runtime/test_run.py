"""A whole project: a database captured, views on Spark, a target that follows them, the page.

Caught: a part that is not wired to the others; a broken pipeline file that stops the good ones;
a JVM that is gone and not noticed, or left behind; Python workers of Spark that outlive it; a
status that does not show what is the case. Not caught: wrong rows under load and kills at random,
which is for `faults slice`. One Spark start for the project, one more after its JVM is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.runtime.control import ask
from headrace.runtime.status import project_status
from headrace.testing.postgres import Server, fresh_database
from tests.runtime.kit import Running, alive, commands, family, until

pytestmark = pytest.mark.timeout(300)

PIPELINE = """
import headrace as hr
from pyspark.sql import functions as F

shop = hr.Pipeline("shop")
shop.table("orders", of="source.public.orders")

@F.udf("string")  # a Python worker of Spark
def upper(text):
    return text.upper()

@shop.view(key="country")
def revenue(orders):
    return orders.groupBy(upper("country").alias("country")).agg(F.sum("amount").alias("revenue"))

shop.keep("orders", "revenue", in_=hr.SQLite("kept.db"))
"""
BROKEN = """
import headrace as hr

broken = hr.Pipeline("broken")
broken.table("orders", of="source.public.orders")

@broken.view()
def wrong(orders):
    return orders.select("no_such_column")
"""
WAITS = """
import headrace as hr

waits = hr.Pipeline("waits")
waits.stream("clicks")

@waits.view()
def same(clicks):
    return clicks
"""


@dataclass
class Whole:
    """The project, and its database."""

    running: Running
    server: Server
    database: str

    def status(self) -> dict[str, Any]:
        return project_status(self.running.project)

    def insert(self, country: str, amount: int) -> None:
        with self.server.connect(self.database) as connection:
            connection.execute("insert into orders values (default, %s, %s)", (country, amount))

    def kept(self) -> dict[str, int]:
        """What the target says."""
        with sqlite3.connect(f"file:{self.running.folder}/kept.db?mode=ro", uri=True) as target:
            return dict(target.execute("select country, revenue from revenue").fetchall())

    def comes(self, **revenue: int) -> None:
        def so() -> bool:
            try:
                return self.kept() == revenue
            except sqlite3.Error:
                return False

        try:
            until(so, f"{revenue} in the target", 240)
        except AssertionError as error:
            status = json.dumps(self.status(), indent=1)
            raise AssertionError(f"{error}\n{self.running.said}\n{status}") from None


@pytest.fixture(scope="module")
def whole(
    postgres: Server,
    running: Callable[[Path], Running],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Whole]:
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    with fresh_database(postgres, "runtime_whole") as database:
        with postgres.connect(database) as connection:
            connection.execute(
                "create table orders (id serial primary key, country text, amount int)"
            )
            connection.execute("insert into orders (country, amount) values ('de', 5)")
        folder = tmp_path_factory.mktemp("whole")
        for name, text in (("shop", PIPELINE), ("broken", BROKEN), ("waits", WAITS)):
            (folder / f"{name}.py").write_text(text)
        (folder / "headrace.toml").write_text(
            'pipelines = ["broken.py", "shop.py", "waits.py"]\n'
            f'[capture.source]\ndsn = "{postgres.dsn(database)}"\n[page]\nport = 0\n'
            "[spark]\nquick = true\nmemory = '1g'\n"
        )
        made = Whole(running(folder), postgres, database)
        yield made
        if not made.running.ended():
            made.running.stop()


def test_all_parts_come_and_the_target_is_right(whole: Whole) -> None:
    whole.insert("de", 2)
    whole.comes(DE=7)
    for part in ("capture/source", "pipelines", "follower/shop/main", "keeper", "page"):
        whole.running.comes(part, "running")


def test_a_broken_pipeline_and_one_that_waits_do_not_stop_the_good_one(whole: Whole) -> None:
    found = {one["name"]: one for one in whole.status()["pipelines"]}
    assert found["shop"]["state"] == "live"
    assert found["broken"]["state"] == "stopped"
    assert found["broken"]["error"]["code"] == "HR-VIEW-005"
    assert found["waits"]["state"] == "waiting"
    assert found["waits"]["error"]["code"] == "HR-LOG-010"


def test_the_status_says_how_far_each_is(whole: Whole) -> None:
    whole.insert("fr", 1)
    whole.comes(DE=7, FR=1)
    until(lambda: whole.status()["followers"][0]["behind"] == 0, "a follower that has caught up")
    status = whole.status()
    (follower,) = status["followers"]
    (shop,) = [one for one in status["pipelines"] if one["name"] == "shop"]
    assert follower["through"] == shop["through"]
    assert (shop["behind"], follower["aside"]) == (0, 0)
    assert shop["inputs"] == {"orders": "source.public.orders"}
    assert shop["views"][0]["columns"] == {"country": "string", "revenue": "bigint"}
    assert "def revenue(orders)" in shop["views"][0]["definition"]
    rows = {one["name"]: one["rows"] for one in status["topics"]}
    assert rows["source.public.orders"] == 3


def test_the_page_answers_at_the_address_that_it_says(whole: Whole) -> None:
    url = whole.running.comes("page", "running")["said"]["url"]
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert answer.status == 200


def test_killed_one_after_the_other_all_go_on(whole: Whole) -> None:
    for part in ("page", "follower/shop/main", "keeper", "capture/source"):
        before = whole.running.comes(part, "running")
        os.kill(before["pid"], signal.SIGKILL)
        after = whole.running.comes(part, "running", restarts=before["restarts"] + 1)
        assert after["said"].get("url") == before["said"].get("url")
    whole.insert("it", 3)
    whole.comes(DE=7, FR=1, IT=3)


def test_a_killed_jvm_takes_its_workers_along_and_everything_goes_on(whole: Whole) -> None:
    before = whole.running.comes("pipelines", "running")
    processes = family(before["pid"])
    (jvm,) = [int(line.split()[0]) for line in commands(processes) if "SparkSubmit" in line]
    assert any("pyspark" in line and "daemon" in line for line in commands(processes)), "a worker"
    os.kill(jvm, signal.SIGKILL)
    until(lambda: not alive(processes), f"the end of {commands(alive(processes))}", 20)
    whole.insert("it", 1)
    whole.comes(DE=7, FR=1, IT=4)
    assert whole.running.comes("pipelines", "running")["restarts"] == before["restarts"] + 1


def test_a_killed_supervisor_leaves_no_process_at_all(whole: Whole) -> None:
    ask(whole.running.project, "list")
    processes = family(whole.running.pid)
    assert any("SparkSubmit" in line for line in commands(processes))
    whole.running.kill()
    until(lambda: not alive(processes), f"the end of {commands(alive(processes))}", 20)
