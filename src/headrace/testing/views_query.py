"""Random queries: a small grammar of every kind that is kept, in SQL and by methods of DataFrames.

Projections with arithmetic, strings, dates and cases, filters, explodes, unions and the other set
operations, joins of all kinds with and without residual conditions, self-joins, null-safe equality,
IN, NOT IN and EXISTS, scalar subqueries, groups with filters, having, rollup, cube and time
windows, aggregates without a rule, views on views.

A query is text, and where all of it has such a form also the same in calls of DataFrame methods
(`Rel.frame`): what the pipeline is then given is the function, what it is compared with the text.
Two kinds of views are special: some fail on some rows (`Query.failing`), with a text beside them
that leaves these rows out; some can only be computed anew (`Query.whole`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from headrace.testing.views_history import TABLES

Frame = Callable[[Mapping[str, Any]], Any]
"""A query by methods of DataFrames, over frames by name."""
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
FAILS = (
    ("int", "bigint", "(12 div {})", "{0} is null or {0} <> 0"),
    ("bigint", "bigint", "(7 % {})", "{0} is null or {0} <> 0"),
    ("int", "double", "(1 / {})", "{0} is null or {0} <> 0"),
    ("double", "int", "cast({} as int)", "{0} is null or abs({0}) < 1e9"),
    ("string", "int", "cast({} as int)", "{0} is null or try_cast({0} as int) is not null"),
    ("strings", "string", "element_at({}, 2)", "{0} is null or size({0}) >= 2"),
)
"""What fails on some rows: of which kind of column it makes which, how, and for which it works."""
METHODS = {
    "union all": "unionAll", "union": "union", "intersect": "intersect", "except": "subtract",
    "intersect all": "intersectAll", "except all": "exceptAll",
}  # fmt: skip
SQL_TYPES = {"decimal": "decimal(20,4)", "strings": "array<string>", "rough": "double"}


@dataclass(frozen=True)
class Rel:
    """A query that stands by itself."""

    sql: str
    columns: tuple[Column, ...]
    parts: tuple[Rel, ...] = ()
    frame: Frame | None = None
    """The same by methods of DataFrames, if all of it has such a form."""
    without_failing: str = ""
    """For a query that fails on some rows: the same without these."""
    full: bool = False
    """Whether it can only be computed anew."""

    def walk(self) -> Iterator[Rel]:
        """Everything it is made of, the smallest first."""
        for part in self.parts:
            yield from part.walk()
        yield self

    def of(self, *kinds: str) -> list[str]:
        """The columns of these kinds."""
        return [name for name, kind in self.columns if kind in kinds]


Items = Sequence[tuple[str, Column]]
"""Expressions, and the columns they become."""


def _columns(items: Items) -> list[Any]:
    from pyspark.sql import functions as F

    return [F.expr(text).alias(name) for text, (name, _) in items]


def _over(rel: Rel, step: Callable[[Any], Any]) -> Frame | None:
    """A step on the frame of a relation, which has the name `a`."""
    below = rel.frame
    return None if below is None else lambda frames: step(below(frames).alias("a"))


def _over_both(one: Rel, other: Rel, step: Callable[[Any, Any], Any]) -> Frame | None:
    """A step on the frames of two relations, `a` and `b`."""
    left, right = one.frame, other.frame
    if left is None or right is None:
        return None
    return lambda frames: step(left(frames).alias("a"), right(frames).alias("b"))


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
        items = [(old, (new, kind)) for old, new, kind in made]
        return Rel(
            f"select {text} from {name}",
            tuple(column for _, column in items),
            frame=lambda frames: frames[name].select(*_columns(items)),
        )

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
        return self._selected(items, rel)

    def _selected(self, items: Items, rel: Rel) -> Rel:
        frame = _over(rel, lambda a: a.select(*_columns(items)))
        return self._select(items, f"({rel.sql}) a", (rel,), frame)

    def _select(
        self, items: Items, source: str, parts: tuple[Rel, ...], frame: Frame | None = None
    ) -> Rel:
        text = ", ".join(f"{value} as {column[0]}" for value, column in items)
        columns = tuple(column for _, column in items)
        return Rel(f"select {text} from {source}", columns, parts, frame)

    def filtered(self, depth: int) -> Rel:
        """Some rows."""
        rel = self.any(depth - 1)
        condition = self.condition(rel)
        sql = f"select * from ({rel.sql}) a where {condition}"
        return Rel(sql, rel.columns, (rel,), _over(rel, lambda a: a.where(condition)))

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

        def explode(a: Any) -> Any:
            call = "explode_outer" if how else "explode"
            return a.select(*_columns([*items[:-1], (f"{call}({array})", items[-1][1])]))

        return self._select(items, source, (rel,), _over(rel, explode))

    def shaped(self, rel: Rel, columns: Sequence[Column]) -> list[tuple[str, Column]]:
        """Expressions for these columns, whatever the relation has."""
        return [
            (f"cast({self.value(rel, kind, 0)} as {SQL_TYPES.get(kind, kind)})", (name, kind))
            for name, kind in columns
        ]

    def combined(self, depth: int) -> Rel:
        """Unions and the other set operations."""
        one, other = self.any(depth - 1), self.any(depth - 1)
        kinds = [kind for _, kind in one.columns if kind != ROUGH][:3] or ["int"]
        columns = tuple((self.fresh(), kind) for kind in kinds)
        how = self.pick(
            "union all", "union all", "union", "intersect", "except", "intersect all", "except all"
        )
        first = self._selected(self.shaped(one, columns), one)
        second = self._selected(self.shaped(other, columns), other)

        def combine(a: Any, b: Any) -> Any:
            both = getattr(a, METHODS[how])(b)
            return both.distinct() if how == "union" else both

        frame = _over_both(first, second, combine)
        return Rel(f"{first.sql} {how} {second.sql}", columns, (one, other), frame)

    def distinct(self, depth: int) -> Rel:
        """Each row once."""
        rel = self.any(depth - 1)
        items = [(n, (self.fresh(), k)) for n, k in rel.columns if k != ROUGH][:3]
        items = items or [("1", (self.fresh(), "int"))]
        made = self._selected(items, rel)
        frame = _over(made, lambda a: a.distinct())
        return replace(made, sql=made.sql.replace("select ", "select distinct ", 1), frame=frame)

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

        def join(a: Any, b: Any) -> Any:
            from pyspark.sql import functions as F

            return a.join(b, F.expr(condition), kind.replace(" ", "_")).select(*_columns(items))

        return self._select(items, source, (left, right), _over_both(left, right, join))

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
        how = "groupBy"
        if len(keys) == 2 and not windows and self.often(0.5):
            how = self.pick("rollup", "cube")
            names = f"{how}({names})"
        many = self.pick("> 1", "< 3") if self.often(0.2) else ""

        def group(a: Any) -> Any:
            from pyspark.sql import functions as F

            groups = getattr(a, how)(*(F.expr(text) for text, _ in keys))
            found = groups.agg(*_columns([*items[len(keys) :], ("count(*)", ("many", "bigint"))]))
            found = found.toDF(*(name for name, _ in made.columns), "many")
            found = found.where(f"many {many}") if many else found
            first = [f"{made.columns[0][0]}.start"] if windows else []
            shown = [name for name, _ in made.columns]
            shown[: len(first)] = first
            return found.select(*shown).toDF(*(name for name, _ in made.columns))

        sql = f"{made.sql} group by {names}" if keys else made.sql
        sql = f"{sql} having count(*) {many}" if many else sql
        return replace(made, sql=sql, frame=_over(rel, group))

    # --- views that are special ---

    def failing(self, depth: int) -> Rel:
        """A view that fails on some rows.

        Above what keeps state, or a table itself, so that one row in is at most one row out: a row
        that is exploded and fails in part is set aside whole.
        """
        below = self.chance.choice((self.grouped, self.distinct, self.joined, None, None))
        rel: Rel = self.table() if below is None else below(depth)
        fitting = [one for one in FAILS if rel.of(one[0])]
        if not fitting:
            return self.failing(depth)
        source, kind, text, works = self.chance.choice(fitting)
        column = self.column(rel, source)
        items = [(name, (self.fresh(), k)) for name, k in rel.columns[:4]]
        items.insert(self.pick(0, len(items)), (text.format(column), (self.fresh(), kind)))
        made = self._selected(items, rel)
        return replace(made, without_failing=f"{made.sql} where {works.format(column)}")

    def whole(self, depth: int) -> Rel:
        """A view that can only be computed anew: the first rows, or functions over windows."""
        rel = self.any(depth - 1)
        items = [(n, (self.fresh(), k)) for n, k in rel.columns if k != ROUGH][:4]
        items = items or [("1", (self.fresh(), "int"))]
        down = self.pick("", " desc")
        if self.often(0.5):
            made = self._selected(items, rel)
            order = ", ".join(f"{name}{down}" for name, _ in made.columns)
            return replace(
                made, sql=f"{made.sql} order by {order} limit {self.pick(1, 2, 3)}", full=True
            )
        order = ", ".join(f"{text}{down}" for text, _ in items)
        first, (_, kind) = items[0]
        call, result = self.pick(
            ("row_number()", "int"), ("rank()", "int"), (f"lag({first})", kind),
            (f"last_value({first})", kind), ("count(*)", "bigint"),
        )  # fmt: skip
        over = f"over (partition by {self.pick(*(text for text, _ in items))} order by {order})"
        numbered = [*items, (f"{call} {over}", (self.fresh(), result))]
        return replace(self._selected(numbered, rel), full=True)


def random_queries(chance: Random) -> dict[str, Rel]:
    """One or two views, or three; later ones may read earlier ones."""
    query = Query(chance)
    for number in range(chance.choice((1, 1, 1, 2, 2, 3))):
        make = chance.choice((*[query.any] * 10, query.failing, query.whole))
        rel = make(chance.choice((1, 2, 2, 3)))
        if rel.full or chance.random() < 0.5:
            rel = replace(rel, frame=None)
        query.views[f"v{number}"] = rel
    return query.views
