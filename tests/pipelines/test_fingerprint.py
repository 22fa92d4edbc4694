"""Fingerprints: equal in every process, and different as soon as the rows could be."""

from __future__ import annotations

import json
import marshal
import os
import select
import signal
import subprocess
import sys
import types
from decimal import Decimal
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.pipelines.views.algebra import Aggregate
from headrace.pipelines.views.lift_definition import read_definition
from headrace.pipelines.views.lift_fingerprint import code_of
from tests.pipelines.queries import QUERIES, SCHEMAS

COMPARED = ["revenue", "lambdas", "correlated_scalar", "rollup", "python_functions"]

IN_ANOTHER_PROCESS = """
import json, sys
from pyspark import SparkContext
from headrace.pipelines.spark import session
from tests.pipelines.test_fingerprint import prints
spark = session(quick=True)
spark.range(7).selectExpr("transform(array(id), x -> x)")  # ids and lambdas count on from here
sys.stdout.write(json.dumps([SparkContext._gateway.proc.pid, prints(spark)]) + chr(10))
sys.stdout.flush()
sys.stdin.read()
"""


def prints(spark: Any) -> dict[str, list[str]]:
    return {
        name: [node.fingerprint for node in read_definition(spark, QUERIES[name], SCHEMAS).walk()]
        for name in COMPARED
    }


def test_another_process_finds_the_same_quietly_and_takes_its_jvm_along_when_killed(
    spark: Any,
) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS]
    root = Path(__file__).parent.parent.parent
    with subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, stderr=pipe) as driver:
        assert driver.stdout is not None
        assert driver.stderr is not None
        here = prints(spark)
        assert prints(spark) == here
        line = driver.stdout.readline()
        assert line, driver.stderr.read().decode()
        jvm, there = json.loads(line)
        assert there == here
        watched = os.pidfd_open(jvm)
        driver.send_signal(signal.SIGKILL)
        said = driver.stderr.read().decode()
    try:
        ended, _, _ = select.select([watched], [], [], 60)
    finally:
        os.close(watched)
    assert ended, "the JVM is still there"
    assert said == ""


def top(spark: Any, definition: Any) -> str:
    return read_definition(spark, definition, SCHEMAS).fingerprint


def test_names_do_not_matter_and_values_do(spark: Any) -> None:
    first = top(spark, "select id + 1 as x from orders o where qty > 2")
    assert top(spark, "select p.id + 1 as y from orders p where p.qty > 2") == first
    assert top(spark, lambda orders: orders.where("qty > 2").select(F.col("id") + 1)) == first
    others = [
        "select id + 2 as x from orders where qty > 2",
        "select id + 1 as x from orders where qty > 3",
        "select id + 1 as x from orders where customer_id > 2",
        "select id + 1L as x, 1 from orders where qty > 2",
        "select id - -1 as x from orders where qty > 2",
        "select order_id + 1 as x from returns where order_id > 2",
    ]
    found = {first, *(top(spark, text) for text in others)}
    assert len(found) == len(others) + 1


def test_the_order_of_aggregate_calls_does_not_matter(spark: Any) -> None:
    calls = ["sum(qty + 1) a", "count(*) b", "avg(id) c", "max(qty) filter (where id > 2) d"]

    def kept(text: str) -> Aggregate:
        nodes = read_definition(spark, text, SCHEMAS).walk()
        (found,) = (node for node in nodes if isinstance(node, Aggregate))
        return found

    for source in ("orders", "(select id * 2 as id, qty from orders where qty < 9)"):
        tail = f"from {source} group by customer_id" if source == "orders" else f"from {source}"
        found = [kept(f"select {', '.join(o)} {tail}") for o in permutations(calls)]
        assert len({node.fingerprint for node in found}) == 1
        assert len({(node.keys, node.calls) for node in found}) == 1
        fewer = kept(f"select {', '.join(calls[:3])} {tail}")
        assert fewer.fingerprint != found[0].fingerprint


def test_a_new_column_of_a_topic_matters_only_where_it_is_used(spark: Any) -> None:
    wider = SCHEMAS | {"returns": SCHEMAS["returns"].insert(0, pa.field("extra", pa.int64()))}
    other = SCHEMAS | {"returns": SCHEMAS["returns"].set(0, pa.field("order_id", pa.int32()))}
    named = "select reason, count(order_id) c from returns group by reason"
    every = "select * from returns where order_id > 1"
    for text, same in ((named, True), (every, False)):
        here, there, typed = (
            read_definition(spark, text, schemas).fingerprint for schemas in (SCHEMAS, wider, other)
        )
        assert (here == there) == same
        assert typed != here


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("spark.sql.session.timeZone", "Europe/Berlin"),
        ("spark.sql.ansi.enabled", "false"),
        ("spark.sql.caseSensitive", "true"),
    ],
)
def test_settings_of_the_session_matter(spark: Any, setting: str, value: str) -> None:
    text = "select id from orders"
    before, first = spark.conf.get(setting), top(spark, text)
    spark.conf.set(setting, value)
    try:
        assert top(spark, text) != first
    finally:
        spark.conf.set(setting, before)
    assert top(spark, text) == first


def test_the_code_of_a_python_function_matters(spark: Any) -> None:
    def view(step: int, extra: Any) -> Any:
        def definition(orders: DataFrame) -> DataFrame:
            return orders.select(F.udf(lambda x: x + step + len(extra), "bigint")("id"))

        return definition

    first = top(spark, view(1, "a"))
    assert top(spark, view(1, "a")) == first
    assert top(spark, view(2, "a")) != first
    assert top(spark, view(1, ["a", {"b": 1}])) != first


def test_where_the_code_of_a_python_function_comes_from_does_not_matter(spark: Any) -> None:
    """As text or, at the next start, as bytecode; its line; the name of its file. A pickle differs:
    a view with such a function was built anew after the first restart."""
    text = """
from pyspark.sql import functions as F
size_of = F.udf(lambda amount: "small" if amount < 100 else "large", "string")
def view(orders):
    return orders.select(size_of("id"))
"""

    def print_of(code: types.CodeType) -> str:
        made: dict[str, Any] = {"__name__": "headrace_pipeline_of_a_test"}
        exec(code, made)  # our own
        return top(spark, made["view"])

    as_text = compile(text, "pipeline.py", "exec")
    first = print_of(as_text)
    assert print_of(marshal.loads(marshal.dumps(as_text))) == first
    assert print_of(compile("# moved\n" + text, "other/pipeline.py", "exec")) == first
    assert print_of(compile(text.replace("100", "99"), "pipeline.py", "exec")) != first


def test_what_a_function_computes_is_found_in_its_code() -> None:
    def one(x: int) -> int:
        return x + 1

    def same(x: int) -> int:
        """With a docstring, on other lines."""
        return x + 1

    def other(x: int) -> int:
        return x + 2

    assert code_of(one) != code_of(other)
    assert code_of(lambda x: one(x)) != code_of(lambda x: other(x))
    assert code_of({1: {"b", "a"}}) == code_of({1: {"a", "b"}})
    assert code_of(same) != code_of(other)


def test_objects_of_the_users_classes_matter_with_their_code_and_values() -> None:
    def made(step: int, sign: int) -> Any:
        class Rate:
            kind = "flat"

            def __init__(self, by: int) -> None:
                self.by = by

            def __call__(self, x: int) -> int:
                return x * self.by + sign

            @property
            def twice(self) -> int:
                return self.by * 2

        Rate.__module__ = "__main__"  # as in a file that is run
        return Rate(step)

    def used(rate: Any) -> Any:
        return code_of(lambda x: rate(x))

    assert used(made(1, 1)) == used(made(1, 1))
    assert used(made(1, 1)) != used(made(2, 1))
    assert used(made(1, 1)) != used(made(1, 2))
    assert used(made(1, 1).__call__) != used(made(2, 1).__call__)
    assert used(partial(pow, 2)) != used(partial(pow, 3))
    assert used(Decimal(1)) != used(Decimal(2))
    assert used(np.arange(3)) == used(np.arange(3)) != used(np.arange(4))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("6 / qty", "try_divide(6, qty)"),
        ("amount + 1", "try_add(amount, 1)"),
        ("cast(status as int)", "try_cast(status as int)"),
        ("if(id > 1, 6 / qty, 0)", "if(id > 1, try_divide(6, qty), 0)"),
        ("to_timestamp(status)", "try_to_timestamp(status)"),
        ("status like 'a/_'", "status like 'a/_' escape '/'"),
        ("from_csv(status, 'a int')", "from_csv(status, 'a int', map('sep', ';'))"),
        ("stddev(6 / qty)", "stddev(try_divide(6, qty))"),
    ],
)
def test_what_json_does_not_say_counts(spark: Any, one: str, other: str) -> None:
    """Modes, options and characters are null in Catalyst's JSON."""
    here, there = (
        read_definition(spark, f"select {text} x from orders", SCHEMAS).fingerprint
        for text in (one, other)
    )
    assert here != there


def test_bytes_in_a_definition_have_the_same_fingerprint_each_time(spark: Any) -> None:
    """Catalyst's JSON has their address."""
    text = "select {} x from orders where cast(status as binary) = x'{}'"
    here, again, other, more = (
        read_definition(spark, text.format(*parts), SCHEMAS).fingerprint
        for parts in (
            ("array(x'01')", "61"),
            ("array(x'01')", "61"),
            ("array(x'02')", "61"),
            ("array(x'01')", "62"),
        )
    )
    assert here == again
    assert len({here, other, more}) == 3
