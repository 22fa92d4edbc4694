"""Random views in SQL, read by Spark and kept by the product, against two references.

A small grammar gives queries of every kind that is kept: projections with arithmetic, strings,
dates and cases, filters, explodes, unions and the other set operations, joins of all kinds with and
without residual conditions, self-joins, null-safe equality, IN, NOT IN and EXISTS, scalar
subqueries, groups with filters, having, rollup, cube and time windows, aggregates without a rule,
views on views.

Every commit is compared with the reference interpreter (`headrace.testing.algebra`: naive, but with
the same templates), the end with Spark's own batch reading. Can catch: a definition read wrongly,
an expression bound wrongly, and all that `views_plain` can. Cannot catch: what both Spark readings
have wrong; floats in their last digits (columns that are averages decide nothing).
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pyarrow as pa

from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.pipelines.views.algebra import Node
from headrace.pipelines.views.reading import rows_of
from headrace.testing import algebra
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

Column = tuple[str, str]
"""Name and kind."""
ROUGH = "rough"
"""A kind of column whose last digits may differ: it is shown, and nothing is decided by it."""
NUMBERS = ("int", "bigint", "double", "decimal")
LITERALS = {
    "int": ("0", "1", "2"),
    "bigint": ("1L", "3L", "1099511627776L"),
    "double": ("0D", "1.25D", "double('NaN')", "double('Infinity')"),
    "decimal": ("1.10", "0.00"),
    "string": ("'a'", "'ü'", "''"),
    "date": ("date'2026-03-29'",),
    "timestamp": ("timestamp'2026-03-28 22:37:00.000001'",),
    "boolean": ("true",),
}
SQL_TYPES = {"decimal": "decimal(20,4)", "strings": "array<string>", "rough": "double"}


@dataclass(frozen=True)
class Rel:
    """A query that stands by itself."""

    sql: str
    columns: tuple[Column, ...]
    parts: tuple[Rel, ...] = ()

    def walk(self) -> Iterator[Rel]:
        """Everything it is made of, the smallest first."""
        for part in self.parts:
            yield from part.walk()
        yield self

    def of(self, *kinds: str) -> list[str]:
        """The columns of these kinds."""
        return [name for name, kind in self.columns if kind in kinds]


@dataclass
class Query:
    """Makes random queries."""

    chance: Random
    views: dict[str, Rel] = field(default_factory=dict)
    _count: int = 0

    def fresh(self) -> str:
        """A name that no other column has."""
        self._count += 1
        return f"c{self._count}"

    def pick(self, *values: Any) -> Any:
        """One of these."""
        return self.chance.choice(values)

    def often(self, share: float) -> bool:
        """True in this share of cases."""
        return self.chance.random() < share

    # --- expressions ---

    def column(self, rel: Rel, *kinds: str) -> str | None:
        """A column of one of these kinds, if there is one."""
        found = rel.of(*kinds)
        return self.chance.choice(found) if found else None

    def value(self, rel: Rel, kind: str, depth: int = 1) -> str:
        """An expression of a kind."""
        own = self.column(rel, kind)
        if kind in (ROUGH, "strings"):
            return own or ("cast(null as double)" if kind == ROUGH else "array('a')")
        if own is None or self.often(0.08):
            return str(self.pick(*LITERALS[kind]))
        if depth <= 0 or self.often(0.45):
            return own
        again = self.value(rel, kind, depth - 1)
        general = [
            f"case when {self.condition(rel, 0)} then {own} else {again} end",
            f"coalesce({own}, {again})",
            f"nullif({own}, {again})",
            f"if({self.condition(rel, 0)}, {own}, null)",
        ]
        special = {
            "int": [f"({own} + 1)", f"({own} * 2)", f"-{own}", f"abs({own} % 3)"],
            "bigint": [f"({own} + 1)", f"-{own}", f"({own} % 5)"],
            "double": [f"({own} + {again})", f"({own} * 2)", f"nanvl({own}, 0D)", f"-{own}"],
            "decimal": [f"({own} + {again})", f"({own} * 2)", f"round({own}, 1)"],
            "string": [f"upper({own})", f"concat({own}, {again})", f"substring({own}, 1, 1)"],
            "date": [f"date_add({own}, 1)", f"trunc({own}, 'MM')"],
            "timestamp": [f"({own} + interval 1 hour)", f"date_trunc('hour', {own})"],
            "boolean": [f"not {own}", self.condition(rel, 0)],
        }[kind]
        return str(self.pick(*special, *special, *general))

    def turned(self, rel: Rel) -> Column | None:
        """An expression that makes another kind of a column."""
        makers: list[tuple[str, str, str]] = [
            ("string", "int", "length({})"), ("date", "int", "day({})"),
            ("int", "string", "cast({} as string)"), ("date", "string", "cast({} as string)"),
            ("timestamp", "date", "cast({} as date)"), ("timestamp", "int", "hour({})"),
            ("timestamp", "string", "date_format({}, 'HH:mm')"), ("int", "double", "({} / 4)"),
            ("int", "bigint", "cast({} as bigint)"), ("strings", "int", "size({})"),
            ("strings", "boolean", "array_contains({}, 'a')"), ("boolean", "int", "int({})"),
        ]  # fmt: skip
        fitting = [maker for maker in makers if rel.of(maker[0])]
        if not fitting:
            return None
        source, kind, text = self.chance.choice(fitting)
        return text.format(self.column(rel, source)), kind

    def condition(self, rel: Rel, depth: int = 1) -> str:
        """A condition on a row."""
        if depth > 0 and self.often(0.4):
            terms = self.condition(rel, depth - 1), self.condition(rel, depth - 1)
            return f"({terms[0]} {self.pick('and', 'or')} {self.pick('', 'not ')}({terms[1]}))"
        kinds = [kind for _, kind in rel.columns if kind in LITERALS]
        if not kinds:
            return "true"
        kind = self.chance.choice(kinds)
        one = self.column(rel, kind)
        literal = self.pick(*LITERALS[kind])
        other = self.column(rel, kind) if self.often(0.3) else literal
        forms = [
            f"{one} {self.pick('<', '<=', '=', '<>', '>', '<=>')} {other}",
            f"{one} {self.pick('<', '=', '>=')} {other}",
            f"{one} is {self.pick('', 'not ')}null",
            f"{one} in ({literal}, {self.pick(*LITERALS[kind])})",
        ]
        if kind == "string":
            forms.append(f"{one} like '%{self.pick('a', 'ü', '')}%'")
        if kind == "boolean":
            forms.append(str(one))
        return str(self.chance.choice(forms))

    # --- relations ---

    def table(self) -> Rel:
        """An input or a view, some of its columns."""
        name = self.pick(*TABLES, "t", "u", *self.views, *self.views)
        columns = self.views[name].columns if name in self.views else TABLES[name].columns
        count = min(len(columns), self.pick(2, 3, 4, 5))
        chosen = sorted(self.chance.sample(range(len(columns)), count))
        made = [(columns[i][0], self.fresh(), columns[i][1]) for i in chosen]
        text = ", ".join(f"{old} as {new}" for old, new, _ in made)
        return Rel(f"select {text} from {name}", tuple((new, kind) for _, new, kind in made))

    def any(self, depth: int) -> Rel:
        """Anything."""
        if depth <= 0:
            return self.table()
        makers = [
            self.projected, self.filtered, self.exploded, self.combined, self.distinct,
            self.joined, self.joined, self.joined, self.tested, self.tested, self.scalar,
            self.grouped, self.grouped, self.grouped, self.regrouped,
        ]  # fmt: skip
        made: Rel = self.chance.choice(makers)(depth)
        return made

    def projected(self, depth: int) -> Rel:
        """Expressions."""
        rel = self.any(depth - 1)
        items: list[tuple[str, Column]] = []
        for _, kind in self.chance.sample(
            rel.columns, self.chance.randrange(1, len(rel.columns) + 1)
        ):
            items.append((self.value(rel, kind, 2), (self.fresh(), kind)))
        turned = self.turned(rel)
        if turned is not None:
            items.append((turned[0], (self.fresh(), turned[1])))
        return self._select(items, f"({rel.sql}) a", (rel,))

    def _select(
        self, items: Sequence[tuple[str, Column]], source: str, parts: tuple[Rel, ...]
    ) -> Rel:
        text = ", ".join(f"{value} as {column[0]}" for value, column in items)
        return Rel(f"select {text} from {source}", tuple(column for _, column in items), parts)

    def filtered(self, depth: int) -> Rel:
        """Some rows."""
        rel = self.any(depth - 1)
        return Rel(f"select * from ({rel.sql}) a where {self.condition(rel)}", rel.columns, (rel,))

    def exploded(self, depth: int) -> Rel:
        """An array taken apart."""
        rel = self.any(depth - 1)
        whole, text = self.column(rel, "strings"), self.column(rel, "string")
        if not whole and not text:
            return self.filtered(depth)
        array = whole or f"array({text}, cast(null as string), 'b')"
        items: list[tuple[str, Column]] = [
            (name, (self.fresh(), kind)) for name, kind in rel.columns if kind != "strings"
        ]
        element = self.fresh()
        items.append((f"z.{element}", (self.fresh(), "string")))
        how = self.pick("", "outer ")
        source = f"({rel.sql}) a lateral view {how}explode({array}) z as {element}"
        return self._select(items, source, (rel,))

    def shaped(self, rel: Rel, kinds: Sequence[str]) -> str:
        """A query of these kinds of columns, whatever the relation has."""
        items = [
            f"cast({self.value(rel, kind, 0)} as {SQL_TYPES.get(kind, kind)})" for kind in kinds
        ]
        return f"select {', '.join(items)} from ({rel.sql}) a"

    def combined(self, depth: int) -> Rel:
        """Unions and the other set operations."""
        one, other = self.any(depth - 1), self.any(depth - 1)
        kinds = [kind for _, kind in one.columns if kind != ROUGH][:3] or ["int"]
        columns = tuple((self.fresh(), kind) for kind in kinds)
        how = self.pick(
            "union all", "union all", "union", "intersect", "except", "intersect all", "except all"
        )
        first = [
            f"cast({self.value(one, kind, 0)} as {SQL_TYPES.get(kind, kind)}) as {name}"
            for name, kind in columns
        ]
        sql = f"select {', '.join(first)} from ({one.sql}) a {how} {self.shaped(other, kinds)}"
        return Rel(sql, columns, (one, other))

    def distinct(self, depth: int) -> Rel:
        """Each row once."""
        rel = self.any(depth - 1)
        items = [(n, (self.fresh(), k)) for n, k in rel.columns if k != ROUGH][:3]
        items = items or [("1", (self.fresh(), "int"))]
        made = self._select(items, f"({rel.sql}) a", (rel,))
        return replace(made, sql=made.sql.replace("select ", "select distinct ", 1))

    def pair(self, left: Rel, right: Rel, *, keys: int | None = None) -> str:
        """A condition on two rows: equalities, and perhaps a residual."""
        both = [
            (one, other, kind)
            for one, kind in left.columns
            for other, same in right.columns
            if kind == same and kind in LITERALS
        ]
        wanted = self.pick(1, 1, 1, 2, 0) if keys is None else keys
        terms = [
            f"a.{one} {self.pick('=', '=', '=', '<=>')} b.{other}"
            for one, other, _ in self.chance.sample(both, min(wanted, len(both)))
        ]
        if both and self.often(0.4):
            one, other, _ = self.chance.choice(both)
            terms.append(f"a.{one} {self.pick('<', '<>', '>=')} b.{other}")
        if self.often(0.1):
            terms.append(f"b.{self.chance.choice(right.columns)[0]} is not null")
        return " and ".join(terms) or "true"

    def shallow(self, depth: int) -> int:
        """How deep the other side of a join is: two deep sides would make millions of rows."""
        return int(self.pick(0, 0, 1)) if depth == 2 else 0

    def joined(self, depth: int) -> Rel:
        """A join, at times of a relation with itself."""
        left = self.any(depth - 1)
        itself = depth == 1 and self.often(0.3)
        right = left if itself else self.any(self.shallow(depth))
        kind = self.pick("inner", "left", "right", "full", "left semi", "left anti")
        condition = self.pair(left, right, keys=None if depth == 1 else self.pick(1, 1, 2))
        items = [(f"a.{name}", (self.fresh(), k)) for name, k in left.columns]
        if kind in ("inner", "left", "right", "full"):
            items += [(f"b.{name}", (self.fresh(), k)) for name, k in right.columns]
        items = self.chance.sample(items, min(len(items), 6))
        source = f"({left.sql}) a {kind} join ({right.sql}) b on {condition}"
        return self._select(items, source, (left, right))

    def tested(self, depth: int) -> Rel:
        """IN, NOT IN, EXISTS, alone or beside another condition."""
        left, right = self.any(depth - 1), self.any(self.shallow(depth))
        word = self.pick("", "not ")
        both = [(a, b) for a, k in left.columns for b, o in right.columns if k == o in LITERALS]
        if both and self.often(0.6):
            one, other = self.chance.choice(both)
            test = f"a.{one} {word}in (select b.{other} from ({right.sql}) b)"
        else:
            condition = self.pair(left, right, keys=1)
            test = f"{word}exists (select 1 from ({right.sql}) b where {condition})"
        if self.often(0.3):
            test = f"({test} or {self.condition(left, 0)})"
        return Rel(f"select * from ({left.sql}) a where {test}", left.columns, (left, right))

    def scalar(self, depth: int) -> Rel:
        """A scalar subquery, with or without the outer row in it."""
        left, right = self.any(depth - 1), self.any(self.shallow(depth))
        kind = self.pick("bigint", "double", "string", "int")
        value = self.value(right, kind, 0)
        value = f"b.{value}" if value in right.of(kind) else value
        call = self.pick(f"max({value})", f"min({value})") if kind != "bigint" else "count(*)"
        condition = self.pair(left, right, keys=1)
        equal = re.fullmatch(r"a\.\w+ (=|<=>) b\.\w+", condition)
        where = f" where {condition}" if equal and self.often(0.6) else ""
        query = f"(select {call} from ({right.sql}) b{where})"
        if self.often(0.4) and left.of(kind):
            sql = f"select * from ({left.sql}) a where a.{self.column(left, kind)} >= {query}"
            return Rel(sql, left.columns, (left, right))
        items = [(f"a.{name}", (self.fresh(), k)) for name, k in left.columns[:4]]
        return self._select(
            [*items, (query, (self.fresh(), kind))], f"({left.sql}) a", (left, right)
        )

    def call(self, rel: Rel) -> tuple[str, str]:
        """An aggregate that has a rule."""
        kind = self.chance.choice([k for _, k in rel.columns])
        value = self.value(rel, kind, 1)
        if kind in (ROUGH, "strings"):
            return "count(*)" if self.often(0.5) else f"count({value})", "bigint"
        found: list[tuple[str, str]] = [
            ("count(*)", "bigint"), (f"count({value})", "bigint"), (f"min({value})", kind),
            (f"max({value})", kind), (f"max({value})", kind), (f"min({value})", kind),
            (f"count(distinct {value})", "bigint"),
        ]  # fmt: skip
        if kind in NUMBERS:
            wide = "bigint" if kind == "int" else kind
            found += [(f"sum({value})", wide)] * 4
            found += [(f"avg({value})", "decimal" if kind == "decimal" else ROUGH)] * 2
            found += [(f"sum(distinct {value})", wide)]
        call, result = self.chance.choice(found)
        if self.often(0.25):
            call += f" filter (where {self.condition(rel, 0)})"
        return call, result

    def grouped(self, depth: int) -> Rel:
        """Groups."""
        return self._grouped(depth, self.call)

    def regrouped(self, depth: int) -> Rel:
        """Groups with an aggregate that has no rule."""

        def other(rel: Rel) -> tuple[str, str]:
            possible = [
                ("stddev({})", "double", ROUGH), ("var_pop({})", "bigint", ROUGH),
                ("bool_or({})", "boolean", "boolean"), ("bit_xor({})", "bigint", "bigint"),
                ("percentile({}, 0.5)", "int", ROUGH), ("bit_and({})", "int", "int"),
            ]  # fmt: skip
            fitting = [one for one in possible if rel.of(one[1])]
            if not fitting:
                return self.call(rel)
            text, kind, result = self.chance.choice(fitting)
            return text.format(self.column(rel, kind)), result

        return self._grouped(depth, other)

    def _grouped(self, depth: int, call: Callable[[Rel], tuple[str, str]]) -> Rel:
        rel = self.any(depth - 1)
        usable = [(n, k) for n, k in rel.columns if k in LITERALS]
        chosen = self.chance.sample(usable, min(len(usable), self.pick(0, 1, 1, 1, 2)))
        keys = [(n, (self.fresh(), k)) for n, k in chosen]
        at = self.column(rel, "timestamp")
        if at and self.often(0.3):
            length = self.pick("'1 hour'", "'2 hours', '1 hour'")
            keys = [(f"window({at}, {length})", (self.fresh(), "timestamp"))]
        shown = [
            (f"{text}.start" if text.startswith("window") else text, column)
            for text, column in keys
        ]
        calls = [call(rel) for _ in range(self.chance.randrange(1, 4))]
        items = [*shown, *((text, (self.fresh(), kind)) for text, kind in calls)]
        made = self._select(items, f"({rel.sql}) a", (rel,))
        names = ", ".join(text for text, _ in keys)
        windows = any(text.startswith("window") for text, _ in keys)
        if len(keys) == 2 and not windows and self.often(0.5):
            names = f"{self.pick('rollup', 'cube')}({names})"
        having = f" having {self.pick('count(*) > 1', 'count(*) < 3')}" if self.often(0.2) else ""
        if not keys:
            return replace(made, sql=f"{made.sql}{having}")
        return replace(made, sql=f"{made.sql} group by {names}{having}")


# --- cases --------------------------------------------------------------------------------


def random_queries(chance: Random) -> dict[str, Rel]:
    """One or two views, or three; later ones may read earlier ones."""
    query = Query(chance)
    for number in range(chance.choice((1, 1, 1, 2, 2, 3))):
        query.views[f"v{number}"] = query.any(chance.choice((1, 2, 2, 3)))
    return query.views


def read(spark: Any, views: Mapping[str, Rel]) -> dict[str, Node]:
    """Read the views as a pipeline does."""
    from headrace.pipelines.views.lift_definition import read_definition

    schemas = {name: table.schema for name, table in TABLES.items()}
    found = {}
    for name, rel in views.items():
        reads = {n: schema for n, schema in schemas.items() if _names(rel.sql, n)}
        node = read_definition(spark, rel.sql, reads, name=name)
        found[name] = node
        schemas[name] = pa.schema(
            [f.with_name(n) for f, n in zip(node.columns, node.names, strict=True)]
        )
    return found


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
            known[name] = batch_reading(spark, rel.sql, reads, name=name)
            found[name] = algebra.rows_of(known[name])
    return found


SETTINGS = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.shuffle.partitions": "1",
}
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
            sql = "\n".join(f"  {name}: {rel.sql}" for name, rel in views.items())
            self.tally.wrong.append(f"seed {seed}: {type(error).__name__}: {error}\n{sql}")
            return
        texts = {name: rel.sql for name, rel in views.items()}
        for number in histories:
            self.tally.cases += 1
            fate = Random(f"views/sql/{seed}/{number}")
            case = random_case(fate, f"{seed} --history {number}", nodes, text=texts)
            wrong = self.attempt(case, views)
            if wrong is not None:
                self.tally.wrong.append(self._shrunk(case, wrong, views))
                return

    def attempt(self, case: Case, views: Mapping[str, Rel]) -> Wrong | None:
        """Drive a case; whatever it raises is wrong too."""
        try:
            return run_case(case, lambda tables: by_spark(self.spark, views, tables))
        except Exception as error:  # noqa: BLE001 - whatever it is, the view is not there
            return Wrong(f"{type(error).__name__}: {error}")

    def _shrunk(self, case: Case, wrong: Wrong, views: Mapping[str, Rel]) -> str:
        known: dict[str, Mapping[str, Rel]] = {_id(case): views}

        def queries(case: Case) -> Iterator[Case]:
            for less in _smaller(known[_id(case)]):
                texts = {name: rel.sql for name, rel in less.items()}
                try:
                    made = replace(case, views=read(self.spark, less), text=texts)
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
            yield {**views, last: part}
