"""One case: views, a history, cuts; driven through the real loop and held to the reference.

The loop is the product's own (`Runner`): a log in a folder, entries appended, batches computed,
state in packs, commits. At every commit the rows of every view, read from its topic, are compared
with `headrace.testing.algebra` over the whole inputs at the position that the commit says it is
through. What a view computes row by row is Spark's (`views_sql`) or plain Python (`views_plain`).
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from unittest import mock

import pyarrow as pa

from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.pipelines.pipeline import Pipeline, View
from headrace.pipelines.views import algebra as nodes
from headrace.pipelines.views import define, source
from headrace.pipelines.views import run as loop
from headrace.pipelines.views.aside import row_of
from headrace.pipelines.views.groups import Unique
from headrace.pipelines.views.reading import added_up, own_columns, rows_of, topic_of
from headrace.settings import LogSettings
from headrace.testing import algebra
from headrace.testing.views_history import TABLES, History, Table, as_batch, is_sound, smaller

PIPELINE = "p"
SETTINGS = LogSettings(background=False, read_rows_max=4)


@dataclass(frozen=True)
class Case:
    """Something to be tried."""

    seed: str
    views: Mapping[str, nodes.Node]
    """By name, each after those it reads."""
    history: History = field(repr=False)
    batch_rows: int = 1 << 30
    restarts: frozenset[int] = frozenset()
    """Before these batches another driver takes over."""
    late: Mapping[str, int] = field(default_factory=dict)
    """Views that are defined only from a batch on."""
    later: Mapping[str, tuple[int, nodes.Node]] = field(default_factory=dict)
    """Views whose definition is another one from a batch on."""
    on_error: str = "stop"
    """Of all views."""
    text: Mapping[str, str] = field(default_factory=dict)
    """The views as a person reads them."""

    @property
    def tables(self) -> list[Table]:
        """The tables that the views read."""
        named = {s.name for v in self.views.values() for s in v.walk() if isinstance(s, nodes.Scan)}
        return [table for name, table in TABLES.items() if name in named] or [TABLES["t"]]


@dataclass(frozen=True)
class Wrong:
    """A view that is not what it must be."""

    what: str
    commits: int = 0

    def __str__(self) -> str:
        """What is wrong."""
        return self.what


# --- definitions without Spark ------------------------------------------------------------


def pipeline_of(views: Iterable[str], tables: Iterable[Table], on_error: str = "stop") -> Pipeline:
    """A pipeline with these names in it; the definitions come from elsewhere."""
    found = Pipeline(PIPELINE)
    for table in tables:
        (found.stream if table.stream else found.table)(table.name)
    for name in views:
        found.views[name] = View(name, "", None, (), "incremental", on_error, name)
    return found


def _defined(pipeline: Pipeline, log: EmbeddedLog, views: Mapping[str, nodes.Node]) -> define.Views:
    found = define.Views()
    for one in pipeline.inputs.values():
        found.input_identities[one.name] = source.input_identity(log, one)
        found.input_schemas[one.name] = source.input_schema(log, one)
    for name in pipeline.views:
        defined = define._checked(pipeline.views[name], views[name])
        found.by_name[name] = defined
        define.ensure_topic(log, topic_of(pipeline.name, name), defined)
    return found


@contextlib.contextmanager
def defined_as(views: Mapping[str, nodes.Node]) -> Iterator[None]:
    """Let drivers take these nodes for what they would read from the definitions."""

    def found(pipeline: Pipeline, log: EmbeddedLog, *_: Any, **__: Any) -> define.Views:
        return _defined(pipeline, log, views)

    with mock.patch.object(loop, "define_views", found):
        yield


class Driver(loop.Runner):
    """The product's driver, and the commits it has made: (through, position, views)."""

    def __init__(self, *given: Any, **named: Any) -> None:
        """As `Runner`."""
        self.made: list[tuple[int, int, dict[str, nodes.Node]]] = []
        super().__init__(*given, **named)

    def _commit(self, *given: Any, **named: Any) -> None:
        super()._commit(*given, **named)
        self.made.append((self.status.through, self.committed, given[4].views))


# --- the reference ------------------------------------------------------------------------


def table_at(log: EmbeddedLog, name: str, through: int) -> pa.Table:
    """The rows of an input at a position, added up in plain Python."""
    schema = log.topic(name).schema.arrow
    own = [schema.field(i) for i in own_columns(schema)]
    counts: Counter[Hashable] = Counter()
    rows: dict[Hashable, algebra.Row] = {}
    for batch in log.read(name, through=through) if through else ():
        found = algebra.rows_of(batch.data.select([field.name for field in own]))
        weighted = "_weight" in batch.data.schema.names
        weight = batch.data.column("_weight").to_pylist() if weighted else [1] * len(found)
        for row, times in zip(found, weight, strict=True):
            counts[algebra.key(row)] += times
            rows[algebra.key(row)] = row
    held = [row for of, row in rows.items() for _ in range(counts[of])]
    return pa.Table.from_batches([algebra.batch_of(held, pa.schema(own))])


def reference(
    views: Mapping[str, nodes.Node], tables: Mapping[str, pa.Table]
) -> dict[str, algebra.Rows]:
    """What all views must be over these tables."""
    known = dict(tables)
    found = {}
    for name, node in views.items():
        over = node.over if isinstance(node, Unique) else node
        found[name] = algebra.evaluate(over, known)
        known[name] = pa.Table.from_batches([algebra.batch_of(found[name], node.columns)])
    return found


def lenient(node: nodes.Node, failed: set[str]) -> nodes.Node:
    """The same view, less the rows that its templates fail on; these as they are set aside."""
    below = node.below(lambda one: lenient(one, failed))
    if isinstance(node, nodes.Stateless):
        below["template"] = _Lenient(node.template, [each.names for each in node.inputs], failed)
    made: nodes.Node = replace(node, **below)
    return made


class _Lenient:
    """A template that leaves out what it fails on, found row by row."""

    def __init__(
        self, template: nodes.Template, names: Sequence[Sequence[str]], failed: set[str]
    ) -> None:
        self.template, self.names, self.failed = template, names, failed
        self.inputs, self.output = template.inputs, template.output

    def __call__(self, *batches: pa.RecordBatch) -> pa.RecordBatch:
        with contextlib.suppress(errors.ExpressionFailed):
            return self.template(*batches)
        found = [self.template(*(batch.slice(0, 0) for batch in batches))]
        for place, rows in enumerate(batches):
            for number in range(rows.num_rows):
                alone = [batch.slice(0, 0) for batch in batches]
                alone[place] = rows.slice(number, 1)
                try:
                    found.append(self.template(*alone))
                except errors.ExpressionFailed:
                    row = row_of(self.names[place], rows.slice(number, 1))
                    self.failed.add(json.dumps(row, ensure_ascii=False))
        return pa.concat_batches(found)


def difference(got: algebra.Rows, wanted: algebra.Rows) -> str:
    """What two bags of rows do not have in common; floats count as equal within 1e-9."""
    here, there = algebra.bag(got), algebra.bag(wanted)
    extra, missing = list((here - there).elements()), list((there - here).elements())
    for row in list(extra):
        near = next((other for other in missing if _near(row, other)), None)
        if near is not None:
            extra.remove(row)
            missing.remove(near)
    if not extra and not missing:
        return ""
    return f"too many: {extra[:5]}, missing: {missing[:5]}, of {len(wanted)} rows"


def _near(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_near, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
    return bool(one == other)


# --- driving a case -----------------------------------------------------------------------

AtEnd = Callable[[Mapping[str, pa.Table]], Mapping[str, algebra.Rows]]
"""A second opinion on what the views must be at the end: Spark's batch reading."""


def run_case(case: Case, at_end: AtEnd | None = None) -> Wrong | None:
    """Drive a case; what is wrong with it, or nothing."""
    folder = tempfile.mkdtemp(prefix="headrace-views-")
    try:
        with EmbeddedLog(folder, SETTINGS) as log:
            return _Drive(case, log, at_end).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def append_entry(log: EmbeddedLog, entry: Mapping[str, Any]) -> None:
    """Append an entry of a history."""
    with log.transaction() as transaction:
        for name, rows in entry.items():
            transaction.append(name, as_batch(TABLES[name], rows))


def make_topics(log: EmbeddedLog, tables: Iterable[Table]) -> None:
    """Make the topics of these tables."""
    for table in tables:
        kind: Any = "events" if table.stream else "changes"
        log.create_topic(table.name, table.schema, kind=kind)


class _Drive:
    """A case on its way."""

    def __init__(self, case: Case, log: EmbeddedLog, at_end: AtEnd | None) -> None:
        self.case = case
        self.log = log
        self.at_end = at_end
        self.commits = 0

    def run(self) -> Wrong | None:
        case = self.case
        make_topics(self.log, case.tables)
        names = {table.name for table in case.tables}
        driver: Driver | None = None
        try:
            for number, batch in enumerate(case.history):
                for entry in batch:
                    append_entry(self.log, {n: r for n, r in entry.items() if n in names})
                if driver is None or self._changes(number):
                    if driver is not None:
                        driver.close()
                    driver = self._driver(number)
                wrong = self._step(driver)
                if wrong:
                    return Wrong(f"in batch {number}: {wrong}", self.commits)
            if driver is not None and driver.made:
                wrong = self._aside(*driver.made[-1])
                if wrong:
                    return Wrong(wrong, self.commits)
            whole = driver is not None and len(driver.pipeline.views) == len(case.views)
            return self._end() if whole else None
        finally:
            if driver is not None:
                driver.close()

    def _changes(self, number: int) -> bool:
        changed = {at for at, _ in self.case.later.values()}
        return number in {*self.case.restarts, *self.case.late.values(), *changed}

    def _driver(self, number: int) -> Driver:
        case = self.case
        there = [name for name in case.views if case.late.get(name, 0) <= number]
        changed = {name: node for name, (at, node) in case.later.items() if at <= number}
        with defined_as({**case.views, **changed}):
            pipeline = pipeline_of(there, case.tables, case.on_error)
            return Driver(pipeline, self.log, batch_rows=case.batch_rows)

    def _step(self, driver: Driver) -> str:
        if not driver.pipeline.views:
            return ""
        before = len(driver.made)
        driver.run("caught up")
        for through, position, views in driver.made[before:]:
            self.commits += 1
            tables = {t.name: table_at(self.log, t.name, through) for t in self.case.tables}
            for name, wanted in reference(self._judged(views), tables).items():
                got = algebra.rows_of(rows_of(self.log, PIPELINE, name, position))
                wrong = difference(got, wanted)
                if wrong:
                    return f"view {name} through {through}: {wrong}"
        return ""

    def _judged(self, views: Mapping[str, nodes.Node]) -> Mapping[str, nodes.Node]:
        if self.case.on_error == "stop":
            return views
        return {name: lenient(node, set()) for name, node in views.items()}

    def _aside(self, through: int, position: int, views: Mapping[str, nodes.Node]) -> str:
        """What is wrong with the rows that are set aside at the end."""
        topic = topic_of(PIPELINE, "_aside")
        if self.case.on_error == "stop" or topic not in {one.name for one in self.log.topics()}:
            return ""
        kept = added_up(self.log, topic, position).to_pylist()
        got = {(row["view"], row["row"]) for row in kept}
        failed: dict[str, set[str]] = {name: set() for name in views}
        tables = {t.name: table_at(self.log, t.name, through) for t in self.case.tables}
        reference({name: lenient(node, failed[name]) for name, node in views.items()}, tables)
        wanted = {(name, row) for name, rows in failed.items() for row in rows}
        return f"aside: too many {got - wanted}, missing {wanted - got}" if got != wanted else ""

    def _end(self) -> Wrong | None:
        if self.at_end is None:
            return None
        position = self.log.position
        tables = {t.name: table_at(self.log, t.name, position) for t in self.case.tables}
        for name, wanted in self.at_end(tables).items():
            got = algebra.rows_of(rows_of(self.log, PIPELINE, name, None))
            wrong = difference(got, wanted)
            if wrong:
                return Wrong(f"at the end, by Spark: view {name}: {wrong}", self.commits)
        return None


# --- random cuts, shrinking ---------------------------------------------------------------


def random_case(
    chance: Random, seed: str, views: Mapping[str, nodes.Node], size: int = 5, **named: Any
) -> Case:
    """A history for these views, and where it is cut."""
    case = Case(seed, views, [], **named)
    batches = chance.randrange(2, 7)
    late = {}
    if len(views) > 1 and chance.random() < 0.4:
        late = {[*views][-1]: chance.randrange(batches)}
    return replace(
        case,
        history=random_history_of(chance, case.tables, batches, size),
        batch_rows=chance.choice((1, 4, 1 << 30)),
        restarts=frozenset(n for n in range(batches) if chance.random() < 0.15),
        late=late,
    )


def random_history_of(chance: Random, tables: Sequence[Table], batches: int, size: int) -> History:
    """See `views_history`."""
    from headrace.testing.views_history import random_history

    return random_history(chance, tables, batches, size)


Try = Callable[[Case], Wrong | None]


def shrunk(
    case: Case, wrong: Wrong, again: Try, queries: Callable[[Case], Iterable[Case]], seconds: float
) -> tuple[Case, Wrong]:
    """A smaller case that is still wrong."""
    deadline = time.monotonic() + seconds

    def smaller_cases() -> Iterator[Case]:
        yield from queries(case)
        if case.restarts or case.late:
            yield replace(case, restarts=frozenset(), late={})
        if case.later:
            yield replace(case, later={})
        if case.batch_rows < 1 << 30:
            yield replace(case, batch_rows=1 << 30)
        for history in smaller(case.history):
            if is_sound(history):
                yield replace(case, history=history)

    found = True
    while found:
        found = False
        for candidate in smaller_cases():
            if time.monotonic() > deadline:
                return case, wrong
            verdict = _quietly(again, candidate)
            if verdict is not None:
                case, wrong, found = candidate, verdict, True
                break
    return case, wrong


def _quietly(again: Try, case: Case) -> Wrong | None:
    try:
        return again(case)
    except Exception:  # noqa: BLE001 - a candidate that cannot even be tried is no smaller case
        return None


def told(case: Case, wrong: Wrong) -> str:
    """A counter-example, to be read and to be run again."""
    from headrace.testing.views_history import written

    cuts = f"batch_rows={case.batch_rows}, restarts={sorted(case.restarts)}, late={case.late}"
    cuts += "".join(f", {name} changes at batch {at}" for name, (at, _) in case.later.items())
    views = "\n".join(f"view {name}:\n  {text}" for name, text in case.text.items())
    return f"{wrong}\nseed {case.seed}, {cuts}\n{views}\n{written(case.history, TABLES)}"
