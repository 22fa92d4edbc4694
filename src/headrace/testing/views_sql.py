"""Random views, read by Spark and kept by the product, against two references.

The queries are `views_query`'s: SQL, or functions with methods of DataFrames; some fail on some
rows and set them aside; some are computed anew by each batch (`refresh="full"`).

Every commit is compared with the reference interpreter (`headrace.testing.algebra`: naive, but with
the same templates), the end with Spark's own batch reading of the SQL. Can catch: a definition read
wrongly, an expression bound wrongly, a row set aside that is sound or kept on that fails, and all
that `views_plain` can. Cannot catch: what both Spark readings have wrong; floats in their last
digits (columns that are averages decide nothing).
"""

from __future__ import annotations

import contextlib
import inspect
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pyarrow as pa

from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.pipelines.views.algebra import Full, Node, Template
from headrace.pipelines.views.reading import rows_of
from headrace.testing import algebra
from headrace.testing.verdicts import verdict_on
from headrace.testing.views_case import (
    PIPELINE,
    Case,
    Driver,
    Wrong,
    append_entry,
    defined_as,
    difference,
    make_topics,
    pipeline_of,
    random_case,
    run_case,
    shrunk,
    table_at,
    told,
)
from headrace.testing.views_case import SETTINGS as CASE_SETTINGS
from headrace.testing.views_history import TABLES, random_history
from headrace.testing.views_query import Rel, random_queries


def read(spark: Any, views: Mapping[str, Rel]) -> dict[str, Node]:
    """Read the views as a pipeline does."""
    from headrace.pipelines.views.lift_definition import read_definition

    schemas = {name: table.schema for name, table in TABLES.items()}
    found = {}
    for name, rel in views.items():
        reads = {n: schema for n, schema in schemas.items() if _names(rel.sql, n)}
        refresh: Any = "full" if rel.full else "changes"
        node = read_definition(spark, definition_of(rel, reads), reads, name=name, refresh=refresh)
        if isinstance(node, Full):
            node = replace(node, compute=_Remembered(node.compute))
        found[name] = node
        schemas[name] = pa.schema(
            [f.with_name(n) for f, n in zip(node.columns, node.names, strict=True)]
        )
    return found


class _Remembered:
    """A whole definition that is not computed twice from the same rows: view, then reference."""

    def __init__(self, compute: Template) -> None:
        self.compute, self.inputs, self.output = compute, compute.inputs, compute.output
        self._known: dict[Any, pa.RecordBatch] = {}

    def __call__(self, *batches: pa.RecordBatch) -> pa.RecordBatch:
        key = tuple(tuple(sorted(map(repr, algebra.rows_of(batch)))) for batch in batches)
        if key not in self._known:
            self._known[key] = self.compute(*batches)
        return self._known[key]


def definition_of(rel: Rel, reads: Iterable[str]) -> str | Callable[..., Any]:
    """What a pipeline is given: a function of frames, by the names of its inputs, or SQL."""
    frame = rel.frame
    if frame is None:
        return rel.sql

    def defined(**frames: Any) -> Any:
        return frame(frames)

    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in reads]
    defined.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return defined


def texts_of(views: Mapping[str, Rel]) -> dict[str, str]:
    """The views as a person reads them."""
    how = {True: "  -- by methods of DataFrames", False: ""}
    return {name: rel.sql + how[rel.frame is not None] for name, rel in views.items()}


def _names(sql: str, table: str) -> bool:
    return re.search(rf"\bfrom {table}\b", sql) is not None


def by_spark(
    spark: Any, views: Mapping[str, Rel], tables: Mapping[str, pa.Table]
) -> dict[str, algebra.Rows]:
    """The batch reading of the views."""
    from headrace.pipelines.views.lift_definition import batch_reading

    known = {name: table.schema.empty_table() for name, table in TABLES.items()} | dict(tables)
    found = {}
    with settings_of(spark, SETTINGS):
        for name, rel in views.items():
            reads = {n: table for n, table in known.items() if _names(rel.sql, n)}
            text = rel.without_failing or rel.sql
            known[name] = batch_reading(spark, text, reads, name=name)
            found[name] = algebra.rows_of(known[name])
    return found


JOBS = {"spark.sql.codegen.wholeStage": "false", "spark.sql.shuffle.partitions": "1"}
"""Of all: jobs are small. What a view evaluates without a job is compiled as ever."""
SETTINGS = {**JOBS, "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
"""Of the batch reading: nothing is compiled for a handful of rows."""


@contextlib.contextmanager
def settings_of(spark: Any, settings: Mapping[str, str]) -> Iterator[None]:
    """Have other settings for a while."""
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)


def moved_zone(spark: Any) -> str:
    """A view that depends on the time zone, kept on by a session with another one."""
    zone = "spark.sql.session.timeZone"
    rel = Rel("select cast(at as date) as c1, count(*) as c2 from t group by 1", ())
    history = random_history(Random("zones"), [TABLES["t"]], 2, 8)
    with tempfile.TemporaryDirectory() as folder, EmbeddedLog(folder, CASE_SETTINGS) as log:
        make_topics(log, [TABLES["t"]])
        for number, name in enumerate(("UTC", "Pacific/Auckland")):
            for entry in history[number]:
                append_entry(log, entry)
            with settings_of(spark, {zone: name}):
                with defined_as(read(spark, {"v": rel})):
                    pipeline = pipeline_of(["v"], [TABLES["t"]])
                    with Driver(pipeline, log) as driver:
                        driver.run("caught up")
                tables = {"t": table_at(log, "t", log.position)}
                wanted = by_spark(spark, {"v": rel}, tables)["v"]
            wrong = difference(algebra.rows_of(rows_of(log, PIPELINE, "v", None)), wanted)
            if wrong:
                return f"in {name}: {wrong}"
    return ""


@dataclass
class Tally:
    """What was tried."""

    queries: int = 0
    refused: int = 0
    cases: int = 0
    wrong: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


class Trial:
    """Random queries, each with several histories, in one session."""

    def __init__(self, spark: Any, seconds: float = 120.0) -> None:
        """`seconds`: how long a counter-example may be shrunk."""
        self.spark = spark
        self.seconds = seconds
        self.tally = Tally()

    def query(self, seed: str, histories: Iterable[int]) -> None:
        """One query with the histories of these numbers."""
        chance = Random(f"views/sql/{seed}")
        views = random_queries(chance)
        self.tally.queries += 1
        try:
            nodes = read(self.spark, views)
        except errors.NotKept as error:
            self.tally.refused += 1
            self.tally.refusals.append(f"{seed}: {error.fact}")
            return
        except Exception as error:  # noqa: BLE001 - what Spark takes must be read or refused
            sql = "\n".join(f"  {name}: {text}" for name, text in texts_of(views).items())
            self.tally.wrong.append(f"seed {seed}: {type(error).__name__}: {error}\n{sql}")
            return
        fails = any(rel.without_failing for rel in views.values())
        about: dict[str, Any] = {
            "text": texts_of(views),
            "on_error": "set_aside" if fails else "stop",
        }
        for number in histories:
            self.tally.cases += 1
            fate = Random(f"views/sql/{seed}/{number}")
            case = random_case(fate, f"{seed} --history {number}", nodes, **about)
            wrong = self.attempt(case, views)
            if wrong is not None:
                self.tally.wrong.append(self._shrunk(case, wrong, views))
                return

    def attempt(self, case: Case, views: Mapping[str, Rel]) -> Wrong | None:
        """Drive a case; whatever it raises is wrong too."""
        try:
            with settings_of(self.spark, JOBS):
                return run_case(case, lambda tables: by_spark(self.spark, views, tables))
        except Exception as error:  # noqa: BLE001 - whatever it is, the view is not there
            return Wrong(verdict_on(error))

    def _shrunk(self, case: Case, wrong: Wrong, views: Mapping[str, Rel]) -> str:
        known: dict[str, Mapping[str, Rel]] = {_id(case): views}

        def queries(case: Case) -> Iterator[Case]:
            for less in _smaller(known[_id(case)]):
                try:
                    made = replace(case, views=read(self.spark, less), text=texts_of(less))
                except Exception:  # noqa: BLE001 - not a query by itself
                    continue
                known[_id(made)] = less
                late = {name: at for name, at in made.late.items() if name in less}
                yield replace(made, late=late)

        def again(case: Case) -> Wrong | None:
            return self.attempt(case, known[_id(case)])

        return told(*shrunk(case, wrong, again, queries, self.seconds))


def _id(case: Case) -> str:
    return repr(sorted(case.text.items()))


def _smaller(views: Mapping[str, Rel]) -> Iterator[Mapping[str, Rel]]:
    """Fewer views, or a part of one alone."""
    for name in [*views][::-1]:
        rest = {other: rel for other, rel in views.items() if other != name}
        if rest and not any(_names(rel.sql, name) for rel in rest.values()):
            yield rest
    last = [*views][-1]
    for part in views[last].walk():
        if part is not views[last] and part.parts:
            frame = part.frame if views[last].frame is not None else None
            yield {**views, last: replace(part, frame=frame)}
