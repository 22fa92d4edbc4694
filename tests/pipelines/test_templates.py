"""Templates: what rides along, what needs no job, what fails and how."""

from __future__ import annotations

import datetime
import os
import random
import signal
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.errors import ExpressionFailed, SparkFailed
from headrace.pipelines.views import algebra, evaluate_rows
from headrace.pipelines.views.lift_definition import read_definition
from headrace.testing.algebra import batch_of, rows_of
from tests.pipelines.queries import QUERIES, SCHEMAS, tables

STATELESS = [
    "division_after_filter",
    "nested_types",
    "explode_outer",
    "union_all",
    "unpivot",
    "stack",
]


def template_of(spark: Any, definition: Any, schemas: dict[str, pa.Schema] = SCHEMAS) -> Any:
    node = read_definition(spark, definition, schemas)
    assert isinstance(node, algebra.Stateless)
    return node


def change(schema: pa.Schema, rows: list[Any], weights: list[int]) -> pa.RecordBatch:
    batch = batch_of(rows, schema)
    columns = [*batch.columns, pa.array(weights, pa.int64())]
    return pa.RecordBatch.from_arrays(columns, schema=schema.append(algebra.WEIGHT))


@pytest.mark.parametrize("name", STATELESS)
def test_weights_ride_along_untouched(spark: Any, name: str) -> None:
    node = template_of(spark, QUERIES[name])
    rng = random.Random(7)
    given, alone = [], []
    for below in node.inputs:
        rows = rows_of(tables()[below.name])
        weights = [rng.choice([-3, -1, 1, 2, 10**15]) for _ in rows]
        given.append(change(below.columns, rows, weights))
        alone.append([change(below.columns, [r], [w]) for r, w in zip(rows, weights, strict=True)])
    together = rows_of(node.template(*given))
    assert {type(row[-1]) for row in together} == {int}
    if len(given) == 1 and node.template.compiled:
        one_by_one = [row for each in alone[0] for row in rows_of(node.template(each))]
        assert sorted(map(repr, together)) == sorted(map(repr, one_by_one))


def jobs(spark: Any) -> int:
    return len(spark.sparkContext.statusTracker().getJobIdsForGroup(None))


def test_expressions_are_evaluated_without_a_job(spark: Any) -> None:
    node = template_of(spark, QUERIES["division_after_filter"])
    rows = rows_of(tables()["orders"])
    before = jobs(spark)
    node.template(change(node.inputs[0].columns, rows, [1] * len(rows)))
    assert jobs(spark) == before


def test_a_selection_never_reaches_the_jvm(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node = template_of(spark, "select status, id, id, 'x' as x, null as n from orders")
    rows = rows_of(tables()["orders"])
    batch = change(node.inputs[0].columns, rows, [2] * len(rows))
    first = node.template(batch)
    monkeypatch.setattr(evaluate_rows.Converter, "map", None)
    assert node.template(batch).equals(first)
    assert rows_of(first)[0] == (rows[0][4], rows[0][0], rows[0][0], "x", None, 2)


def test_no_rows_and_many_rows(spark: Any) -> None:
    node = template_of(spark, "select id + 1 x, upper(status) s from orders where id % 2 = 0")
    schema = node.inputs[0].columns
    assert node.template(change(schema, [], [])).schema.names == ["c0", "c1", "_w"]
    numbers = pa.array(range(100_000), pa.int64())
    others = [pa.nulls(100_000, field.type) for field in list(schema)[1:]]
    many = pa.RecordBatch.from_arrays(
        [numbers, *others, numbers], schema=schema.append(algebra.WEIGHT)
    )
    result = node.template(many)
    assert result.num_rows == 50_000
    assert result.column(0)[-1].as_py() == 99_999
    assert result.column(2)[-1].as_py() == 99_998


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("select id / (id - id) from orders", "DIVIDE_BY_ZERO"),
        ("select cast(status as int) from orders", "CAST_INVALID_INPUT"),
        ("select id + 9223372036854775807 from orders", "ARITHMETIC_OVERFLOW"),
        ("select a from orders lateral view stack(1, id / 0) t as a", "DIVIDE_BY_ZERO"),  # a job
        ("select element_at(tags, 9) from orders", "INVALID_ARRAY_INDEX"),
        ("select raise_error(status) from orders", "USER_RAISED_EXCEPTION"),
    ],
)
def test_a_failing_expression_says_what_spark_says(spark: Any, text: str, said: str) -> None:
    node = template_of(spark, text)
    rows = [row for row in rows_of(tables()["orders"]) if row[0] > 0 and row[4] is not None]
    for _ in range(3):  # and it can be called again
        with pytest.raises(ExpressionFailed, match=said):
            node.template(change(node.inputs[0].columns, rows, [1] * len(rows)))


def test_a_python_function_that_raises_says_so(spark: Any) -> None:
    def failing(orders: DataFrame) -> DataFrame:
        return orders.select(F.udf(lambda x: 1 // x, "bigint")("id"))

    node = template_of(spark, failing)
    rows = rows_of(tables()["orders"])[:3]
    assert rows[0][0] == 0
    with pytest.raises(ExpressionFailed, match="ZeroDivisionError"):
        node.template(change(node.inputs[0].columns, rows, [1] * 3))
    assert rows_of(node.template(change(node.inputs[0].columns, rows[1:], [5, -5]))) == [
        (1, 5),
        (0, -5),
    ]


def test_what_is_not_a_rows_fault_is_not_blamed_on_a_row() -> None:
    from pyspark.errors import PySparkException

    for message in (
        "java.lang.OutOfMemoryError: Java heap space",
        "[INTERNAL_ERROR] SQLSTATE: XX000",
    ):
        with pytest.raises(SparkFailed), evaluate_rows.failing("here"):
            raise PySparkException(message)
    with pytest.raises(ExpressionFailed), evaluate_rows.failing("here"):
        raise PySparkException("[DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012")


@pytest.mark.timeout(300)
def test_lost_workers_are_no_rows_fault(spark: Any, tmp_path: Path) -> None:
    def dying(times: int) -> Any:
        folder = tmp_path / str(times)
        folder.mkdir()

        def once_more(x: int) -> int:
            died = len(list(folder.iterdir()))
            if died < times:
                (folder / str(died)).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return x + 1

        return lambda orders: orders.select(F.udf(lambda x: once_more(x), "bigint")("id"))

    rows = rows_of(tables()["orders"])[:3]
    for times in (2, 100):
        node = template_of(spark, dying(times))
        given = change(node.inputs[0].columns, rows, [1, -1, 5])
        if times < 4:  # so many times Spark tries a task
            assert rows_of(node.template(given)) == [(1, 1), (2, -1), (3, 5)]
        else:
            with pytest.raises(SparkFailed, match="worker"):
                node.template(given)


def test_every_type_comes_back_as_it_went_in(spark: Any) -> None:
    at = datetime.datetime(2026, 3, 1, 12, 30, 0, 123456)
    values: dict[str, tuple[pa.DataType, Any]] = {
        "b": (pa.bool_(), True),
        "i8": (pa.int8(), -128),
        "i16": (pa.int16(), 32767),
        "i32": (pa.int32(), -1),
        "i64": (pa.int64(), 2**62),
        "f32": (pa.float32(), 0.5),
        "f64": (pa.float64(), 1e300),
        "d": (pa.decimal128(38, 10), Decimal("12345678901234567890.0123456789")),
        "s": (pa.string(), "ü€😀\x00"),
        "bin": (pa.binary(), b"\x00\xff"),
        "day": (pa.date32(), datetime.date(1900, 1, 1)),
        "t": (pa.timestamp("us", "UTC"), at.replace(tzinfo=datetime.UTC)),
        "ntz": (pa.timestamp("us"), at),
        "l": (pa.list_(pa.int64()), [1, None]),
        "st": (pa.struct([("a", pa.string()), ("b", pa.list_(pa.date32()))]), {"a": None, "b": []}),
        "m": (pa.map_(pa.string(), pa.float64()), [("k", 1.5)]),
    }
    schema = pa.schema([(name, kind) for name, (kind, _) in values.items()])
    chosen = ", ".join(f"if(i32 is null, null, {name}) as {name}" for name in values)
    node = template_of(spark, f"select {chosen} from t where true", {"t": schema})
    row = tuple(value for _, value in values.values())
    nothing = (None,) * len(values)
    batch = change(node.inputs[0].columns, [row, nothing], [1, 2])
    result = node.template(batch)
    assert rows_of(result) == [(*row, 1), (*nothing, 2)]
    for got, (kind, _) in zip(result.schema, values.values(), strict=False):
        assert str(got.type).replace("element:", "item:") == str(kind).replace("element:", "item:")


def test_templates_can_be_called_by_many_threads(spark: Any) -> None:
    node = template_of(spark, "select id * 2 x from orders where id >= 0")
    schema = node.inputs[0].columns
    wrong: list[Any] = []

    def call(number: int) -> None:
        row = (number, *([None] * (len(schema) - 1)))
        got = [rows_of(node.template(change(schema, [row], [number]))) for _ in range(10)]
        wrong.extend(rows for rows in got if rows != [(number * 2, number)])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
