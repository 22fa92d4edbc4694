"""Every query, lifted and computed operator by operator, equals Spark's own answer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame

from headrace.errors import BadDefinition, PlanReaderFailed
from headrace.pipelines.views import algebra, lift_definition
from headrace.pipelines.views.lift_definition import batch_reading, check_reader, read_definition
from headrace.testing import tpch
from headrace.testing.algebra import bag, evaluate, rows_of
from tests.pipelines.queries import QUERIES, SCHEMAS, tables

IN_THE_TEST_RUN = ("q2", "q13", "q16", "q20", "q22")


def assert_equal_to_batch(
    spark: Any, definition: Any, given: dict[str, pa.Table], name: str
) -> algebra.Node:
    schemas = {key: table.schema for key, table in given.items()}
    node = read_definition(spark, definition, schemas, name=name)
    expected = batch_reading(spark, definition, given)
    assert bag(evaluate(node, given)) == bag(rows_of(expected))
    assert list(node.names) == expected.column_names
    for column, wanted in zip(node.columns, expected.schema, strict=True):
        assert str(column.type) == str(wanted.type).replace(" not null", "")
    return node


@pytest.mark.parametrize("name", QUERIES)
def test_a_lifted_query_gives_what_spark_gives(spark: Any, name: str) -> None:
    assert_equal_to_batch(spark, QUERIES[name], tables(), name)


@cache
def tpch_tables(folder: Path) -> dict[str, pa.Table]:
    program = shutil.which("tpchgen-cli", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("tpchgen-cli is not installed")
    command = [program, "parquet", "-s", "0.002", "--output-dir", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    read = {path.stem: pq.read_table(path) for path in folder.glob("*.parquet")}
    return {
        name: table.cast(
            pa.schema(
                [
                    (field.name, pa.string() if "string" in str(field.type) else field.type)
                    for field in table.schema
                ]
            )
        )
        for name, table in read.items()
    }


@pytest.mark.parametrize("name", IN_THE_TEST_RUN)
def test_a_query_of_tpch_is_lifted(
    spark: Any, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    given = tpch_tables(tmp_path_factory.getbasetemp() / "tpch")
    assert_equal_to_batch(spark, tpch.QUERIES[name], given, name)


def kinds(node: algebra.Node) -> list[str]:
    return [type(each).__name__ for each in node.walk()]


def test_a_chain_without_state_is_one_node(spark: Any) -> None:
    text = """select y from (select id * 2 x, upper(status) y from orders where qty > 1
        union all select order_id, reason from returns) where x > 3"""
    node = read_definition(spark, text, SCHEMAS)
    assert kinds(node) == ["Scan", "Scan", "Stateless"]


def test_an_average_is_a_sum_and_a_count_which_others_share(spark: Any) -> None:
    text = (
        "select avg(amount), sum(amount) / count(amount), sum(amount) + 1, avg(amount) from orders"
    )
    node = read_definition(spark, text, SCHEMAS)
    (aggregate,) = [each for each in node.walk() if isinstance(each, algebra.Aggregate)]
    assert [call.kind for call in aggregate.calls] == ["count", "sum"]
    assert aggregate.calls[1].type == pa.decimal128(22, 2)


@pytest.mark.parametrize(
    ("text", "key", "unique"),
    [
        ("select qty, status s, count(*) n from orders group by status, qty", {0, 1}, True),
        ("select qty, status s, count(*) n from orders group by status, qty", {0, 1, 2}, True),
        ("select qty, status s, count(*) n from orders group by status, qty", {0}, False),
        ("select status, count(*) n from orders group by status having n > 1", {0}, True),
        ("select upper(status) u, n from (select status, count(*) n from orders group by status)",
         {0}, False),  # two groups may have one name
        ("select explode(array(1, 2)), status from (select status from orders group by status)",
         {1}, False),  # a group becomes two rows
        ("select max(qty), min(qty) from orders", {1}, True),  # one row
        ("select distinct status, qty from orders", {0, 1}, True),
        ("select distinct status, qty from orders", {0}, False),
        ("select status, count(*) n from orders group by status union all select 'x', 1", {0},
         False),
        ("select id from orders", {0}, False),
    ],
)  # fmt: skip
def test_which_keys_are_unique_by_what_the_operators_are(
    spark: Any, text: str, key: set[int], unique: bool
) -> None:
    node = read_definition(spark, text, SCHEMAS)
    assert algebra.is_unique(node, frozenset(key)) is unique


def test_the_residual_of_an_inner_join_is_a_filter_above_it(spark: Any) -> None:
    text = """select o.id from orders o {} join customers c
        on o.customer_id = c.customer_id and c.name <=> o.status and o.qty > c.address.zip"""
    for kind in ("inner", "left"):
        node = read_definition(spark, text.format(kind), SCHEMAS)
        (join,) = [each for each in node.walk() if isinstance(each, algebra.Join)]
        assert (join.residual is None) == (kind == "inner")
        assert len(join.left_keys) == 2
        assert join.null_safe == (False, True)


def test_not_in_is_kept_by_a_key(spark: Any) -> None:
    node = read_definition(spark, QUERIES["not_in"], SCHEMAS)
    anti, single = [each for each in node.walk() if isinstance(each, algebra.Join)]
    assert (anti.kind, len(anti.left_keys), anti.residual) == ("anti", 1, None)
    assert (single.kind, single.left_keys) == ("inner", ())
    assert isinstance(single.right.inputs[0], algebra.Aggregate)


def test_a_view_on_a_view_is_a_scan_of_it(spark: Any) -> None:
    first = read_definition(spark, QUERIES["having"], SCHEMAS)
    schema = pa.schema(list(zip(first.names, first.columns.types, strict=True)))
    second = read_definition(spark, "select sum(c) from busy", {"busy": schema})
    scan = next(second.walk())
    assert isinstance(scan, algebra.Scan)
    assert scan.name == "busy"


def test_a_full_refresh_computes_the_definition_from_whole_inputs(spark: Any) -> None:
    text = "select id, row_number() over (order by id, status) n from orders where qty > 1"
    node = read_definition(spark, text, SCHEMAS, refresh="full")
    assert isinstance(node, algebra.Full)
    given = tables()
    assert bag(evaluate(node, given)) == bag(rows_of(batch_reading(spark, text, given)))


def test_columns_that_depend_on_rows_are_refused_when_computed(spark: Any) -> None:
    def pivoted(orders: DataFrame) -> DataFrame:
        return orders.groupBy("status").pivot("qty").sum("id")

    node = read_definition(spark, pivoted, SCHEMAS, refresh="full")
    with pytest.raises(BadDefinition, match="columns with rows in its inputs"):
        evaluate(node, tables())


def test_tables_of_the_session_survive_a_definition_in_sql(spark: Any) -> None:
    spark.sql("select 7 as mine").createOrReplaceTempView("orders")
    try:
        read_definition(spark, "select id from orders", SCHEMAS)
        assert spark.sql("select mine from orders").collect()[0][0] == 7
    finally:
        spark.catalog.dropTempView("orders")


def test_the_self_test_passes_and_can_fail(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_reader(spark)
    check_reader.cache_clear()
    monkeypatch.setattr(lift_definition, "PROBES", {"select k from a": "Scan Join"})
    with pytest.raises(PlanReaderFailed, match="read differently"):
        check_reader(spark)
    check_reader.cache_clear()
