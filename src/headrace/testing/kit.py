"""The user's test kit: a history of the inputs in, the rows of a view out, after each transaction.

    def test_revenue():
        after = hr.testing.history([
            {"orders": [{"id": 1, "country": "DE", "amount": 10}]},    # a transaction: rows come
            {"orders": [{"id": 2, "country": "DE", "amount": 5}]},
            {"-orders": [{"id": 1, "country": "DE", "amount": 10}]},   # rows go
        ]).rows(shop, "revenue")
        hr.testing.same(after[-1], [{"country": "DE", "revenue": 5}])

A change of a row is both in one transaction: the old row goes, the new one comes. It is the real
thing that is tested: a log of its own (in memory where the machine has a folder for that), Spark,
the same code that keeps views in production; only the start of Spark is shared, by all tests of a
process. So the first test takes seconds, and each other one some hundredths of a second.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import pyarrow as pa

import headrace
from headrace import errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.log.embedded.log import EmbeddedLog
    from headrace.pipelines.pipeline import Pipeline
    from headrace.pipelines.views.define import Views

Row = Mapping[str, Any]
Transaction = Mapping[str, Sequence[Row]]
"""Input -> rows that come; "-" and the input -> rows that go."""
MEMORY = "/dev/shm"
"""Where logs of tests are, if it is there: nothing waits for a disk."""

_read: WeakKeyDictionary[Pipeline, tuple[Any, Views]] = WeakKeyDictionary()


def history(transactions: Iterable[Transaction], **schemas: str | pa.Schema) -> History:
    """A history of inputs: transactions one after the other.

    The columns of an input are those of its rows: whole numbers are bigint, and so on. `schemas`
    says them exactly, as `orders="id bigint, amount decimal(10, 2)"`; an input without rows needs
    it.
    """
    found = list(transactions)
    for number, one in enumerate(found):
        if not _is_transaction(one):
            raise errors.BadPipeline(
                "the history is not a list of transactions",
                place=f"transaction {number}",
                why="a transaction says for each input which rows come, and which go",
                fix='e.g. hr.testing.history([{"orders": [{"id": 1}]}, {"-orders": [{"id": 1}]}])',
            )
    return History(found, schemas)


def _is_transaction(one: object) -> bool:
    return isinstance(one, Mapping) and all(
        isinstance(rows, list | tuple) and all(isinstance(row, Mapping) for row in rows)
        for rows in one.values()
    )


def same(found: Iterable[Row], expected: Iterable[Row]) -> None:
    """Assert that these are the same rows, in any order; shows what is missing and too much."""
    have, want = (Counter(map(_line, rows)) for rows in (found, expected))
    lines = [f"  - {line}" for line in sorted((want - have).elements())]
    lines += [f"  + {line}" for line in sorted((have - want).elements())]
    if lines:
        head = "the rows differ (- expected and not there, + there and not expected):"
        raise AssertionError("\n".join([head, *sorted(lines, key=lambda line: (line[4:], line))]))


def _line(row: Row) -> str:
    return ", ".join(f"{name}={row[name]!r}" for name in sorted(row))


class History:
    """What happens to the inputs of a pipeline."""

    def __init__(
        self, transactions: list[Transaction], schemas: Mapping[str, str | pa.Schema]
    ) -> None:
        """Made by `history`."""
        self._transactions = transactions
        self._schemas = schemas

    def rows(self, pipeline: Pipeline, view: str) -> list[list[dict[str, Any]]]:
        """The rows of a view after each transaction, ordered by their columns."""
        return [tables[view] for tables in self.views(pipeline, [view])]

    def views(
        self, pipeline: Pipeline, views: Iterable[str] | None = None
    ) -> list[dict[str, list[dict[str, Any]]]]:
        """The rows of several views (None: of all) after each transaction."""
        from headrace.pipelines.spark import session
        from headrace.pipelines.views.run import Runner

        wanted = list(pipeline.views if views is None else views)
        for name in wanted:
            _among(name, pipeline.views, f"pipeline '{pipeline.name}' has no view")
        # Generated code for whole stages takes longer to compile than these rows take to read.
        spark = session(settings={"spark.sql.codegen.wholeStage": "false"}, quick=True)
        place = MEMORY if os.access(MEMORY, os.W_OK) else None
        with (
            tempfile.TemporaryDirectory(prefix="headrace-test-", dir=place) as folder,
            headrace.connect(folder, background=False) as log,
        ):
            self._make_topics(pipeline, log)
            found = []
            with Runner(pipeline, log, spark, defined=_defined(pipeline, log, spark)) as runner:
                for transaction in self._transactions:
                    runner.run(self._append(pipeline, log, transaction))
                    found.append(
                        {name: _sorted(pipeline.rows(name, log=log).to_pylist()) for name in wanted}
                    )
            return found

    def _make_topics(self, pipeline: Pipeline, log: EmbeddedLog) -> None:
        for name in [name.removeprefix("-") for one in self._transactions for name in one]:
            _among(name, pipeline.inputs, f"pipeline '{pipeline.name}' has no input")
        for name in self._schemas:
            _among(name, pipeline.inputs, f"pipeline '{pipeline.name}' has no input")
        for one in pipeline.inputs.values():
            schema = self._schemas.get(one.name)
            if schema is None:
                rows = [
                    row
                    for transaction in self._transactions
                    for name in (one.name, f"-{one.name}")
                    for row in transaction.get(name, ())
                ]
                if not rows:
                    raise errors.BadPipeline(
                        f"the history has no row of input '{one.name}'",
                        place=pipeline.name,
                        why="the columns of an input are those of its rows",
                        fix=f'say them: hr.testing.history([...], {one.name}="id bigint, ...")',
                    )
                columns = list(dict.fromkeys(name for row in rows for name in row))
                try:
                    schema = pa.Table.from_pylist(
                        [{name: row.get(name) for name in columns} for row in rows]
                    ).schema
                except pa.ArrowException as error:
                    raise errors.BadPipeline(
                        f"the rows of input '{one.name}' have no common types: {error}",
                        place=pipeline.name,
                        why="the columns of an input are those of its rows",
                        fix=f'say them: hr.testing.history([...], {one.name}="id bigint, ...")',
                    ) from error
            kind = "changes" if one.kind == "table" else "events"
            log.create_topic(one.topic, schema, kind=kind, exist_ok=True)

    def _append(self, pipeline: Pipeline, log: EmbeddedLog, transaction: Transaction) -> int:
        """One entry; its position."""
        rows: dict[str, list[dict[str, Any]]] = {}
        for name, changed in transaction.items():
            one = pipeline.inputs[name.removeprefix("-")]
            weight: dict[str, Any] = {}
            if one.kind == "table":
                weight = {"_weight": -1 if name.startswith("-") else 1}
            elif name.startswith("-"):
                raise errors.BadPipeline(
                    f"rows of '{one.name}' cannot go: it is a stream",
                    place=pipeline.name,
                    fix=f"declare it with .table('{one.name}'), or leave {name!r} out",
                )
            rows.setdefault(one.topic, []).extend({**row, **weight} for row in changed)
        with log.transaction() as entry:
            for topic, changed_rows in rows.items():
                if changed_rows:
                    ordered = sorted(changed_rows, key=lambda row: row.get("_weight", 1))
                    entry.append(topic, ordered)
        return log.position


def _defined(pipeline: Pipeline, log: EmbeddedLog, spark: SparkSession) -> Views:
    """The definitions; Spark reads them once, as long as they and the inputs' columns are these."""
    from headrace.pipelines.views.define import define_views, make_topics

    columns = [log.topic(one.topic).schema.arrow for one in pipeline.inputs.values()]
    now = (id(spark), dict(pipeline.inputs), dict(pipeline.views), columns)
    known = _read.get(pipeline)
    if known is None or known[0] != now:
        _read[pipeline] = now, define_views(pipeline, log, spark)
    else:
        make_topics(pipeline, log, known[1])
    return _read[pipeline][1]


def _sorted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By their columns; nulls first, and what has no order by its text."""
    return sorted(
        rows,
        key=lambda row: [
            (value is not None, value if isinstance(value, int | float) else 0, str(value))
            for value in row.values()
        ],
    )


def _among(name: str, known: Iterable[str], what: str) -> None:
    names = list(known)
    if name not in names:
        fix = errors.nearest(name, names) or f"there is {', '.join(names) or 'none'}"
        raise errors.BadPipeline(f"{what} '{name}'", place=name, fix=fix)
