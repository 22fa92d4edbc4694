"""TPC-H, kept: views over its eight tables while rows come, go and change.

The data is that of `tpchgen-cli`. Two thirds of the rows of the large tables are there at first;
then rounds of transactions insert, delete and update rows of several tables at once. After the
build and after each round every view is compared with Spark's batch reading of the same definition
over the rows that are in the tables: exact, floats to nine digits.

Can catch: every mistake that these queries and changes reach: joins of all kinds, subqueries,
distinct counts, averages of decimals, groups that appear and vanish. Cannot catch: what they do not
reach: nulls (TPC-H has none), NaN, keys that are not unique; see the random queries for these.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

import headrace as hr
from headrace.pipelines.pipeline import Pipeline
from headrace.pipelines.views.lift_definition import batch_reading
from headrace.pipelines.views.run import Runner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CHANGING = ("orders", "lineitem", "partsupp", "customer", "supplier")
FIXED = ("part", "nation", "region")


def generated(folder: Path, scale: float) -> dict[str, pa.Table]:
    """The tables, as Spark knows their types."""
    tool = str(Path(sys.prefix) / "bin" / "tpchgen-cli")
    command = [tool, "parquet", "-s", str(scale), f"--output-dir={folder}", "-q"]
    subprocess.run(command, check=True, capture_output=True)
    found = {}
    for name in (*CHANGING, *FIXED):
        table = pq.read_table(folder / f"{name}.parquet")
        fields = [
            field.with_type(pa.string()) if _is_text(field.type) else field
            for field in table.schema
        ]
        found[name] = table.cast(pa.schema(fields))
    return found


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string_view(kind) or pa.types.is_large_string(kind))


class Store:
    """The tables in a log, and beside it which rows are in them."""

    def __init__(self, log: Any, tables: Mapping[str, pa.Table], chance: random.Random) -> None:
        """Make the topics and put the first rows in."""
        self._log = log
        self._chance = chance
        self._schemas = {name: table.schema for name, table in tables.items()}
        self.live: dict[str, list[dict[str, Any]]] = {}
        self._rest: dict[str, list[dict[str, Any]]] = {}
        for name, table in tables.items():
            rows = table.to_pylist()
            chance.shuffle(rows)
            cut = len(rows) * 2 // 3 if name in CHANGING else len(rows)
            self.live[name], self._rest[name] = rows[:cut], rows[cut:]
            log.create_topic(name, table.schema, kind="changes")
            log.append(name, self.table(name))

    def table(self, name: str) -> pa.Table:
        """The rows of a table now."""
        return pa.Table.from_pylist(self.live[name], schema=self._schemas[name])

    def change(self) -> None:
        """One transaction over several tables."""
        with self._log.transaction() as transaction:
            for name in CHANGING:
                rows = [row for _ in range(self._chance.randrange(12)) for row in self._one(name)]
                if rows:
                    transaction.append(name, rows)

    def _one(self, name: str) -> Iterator[dict[str, Any]]:
        """Insert, delete or update one row."""
        chance, live, rest = self._chance, self.live[name], self._rest[name]
        what = chance.random()
        if what < 0.4 and rest:
            live.append(rest.pop())
            yield {**live[-1], "_weight": 1}
        elif what < 0.7 and live:
            rest.append(live.pop(chance.randrange(len(live))))
            yield {**rest[-1], "_weight": -1}
        elif live:
            at = chance.randrange(len(live))
            old, other = live[at], chance.choice(live)
            column = chance.choice([c for c in old if not c.endswith("key")])
            live[at] = {**old, column: other[column]}
            yield {**old, "_weight": -1}
            yield {**live[at], "_weight": 1}


def bag(table: pa.Table) -> Counter[tuple[Any, ...]]:
    """Rows with their numbers, floats to nine digits."""
    columns = [
        [float(f"{v:.9g}") if isinstance(v, float) else v for v in column.to_pylist()]
        for column in table.columns
    ]
    return Counter(zip(*columns, strict=True))


def differences(
    queries: Mapping[str, str],
    *,
    spark: SparkSession,
    folder: Path,
    seed: int,
    rounds: int,
    scale: float = 0.001,
) -> Iterator[tuple[str, list[str]]]:
    """Keep these queries as views; after the build and each round, the views that differ."""
    chance = random.Random(seed)
    data = folder / "data"
    data.mkdir()
    with hr.connect(folder / "log") as log:
        store = Store(log, generated(data, scale), chance)
        pipeline = Pipeline("tpch")
        for name in store.live:
            pipeline.table(name)
        for name, sql in queries.items():
            pipeline.view(name, sql=sql)
        with Runner(pipeline, log, spark) as runner:
            for number in range(rounds + 1):
                for _ in range(chance.randint(1, 3) if number else 0):
                    store.change()
                runner.run("caught up")
                tables = {name: store.table(name) for name in store.live}
                wrong = [
                    name
                    for name, sql in queries.items()
                    if bag(pipeline.rows(name, log=log)) != bag(batch_reading(spark, sql, tables))
                ]
                yield f"round {number}" if number else "build", wrong
