"""Random views without Spark: the same operators, with templates in plain Python.

Thousands of cases a minute, because nothing is compiled and no JVM is asked. Can catch: a wrong
delta rule, state, the loop, restarts, builds. Cannot catch: a definition that is read wrongly, or
an expression that Spark evaluates otherwise than we think; that is `views_sql`.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pyarrow as pa

from headrace.pipelines.views.algebra import (
    WEIGHT,
    Aggregate,
    Call,
    Const,
    Distinct,
    Join,
    JoinKind,
    Node,
    Regroup,
    Scan,
    Stateless,
)
from headrace.testing import algebra
from headrace.testing.verdicts import verdict_on
from headrace.testing.views_case import Case, Wrong, random_case, run_case, shrunk, told
from headrace.testing.views_history import TABLES, Row

Step = Callable[..., list[Row]]
"""The name of columns whose last digits depend on the order of rows: nothing is decided by them."""


@dataclass(frozen=True)
class Plain:
    """A template in Python: lists of rows in, a list of rows out."""

    inputs: tuple[pa.Schema, ...]
    output: pa.Schema
    step: Step
    weighted: bool = True

    def __call__(self, *batches: pa.RecordBatch) -> pa.RecordBatch:
        """See `Template`."""
        rows = self.step(*(algebra.rows_of(batch) for batch in batches))
        schema = self.output.append(WEIGHT) if self.weighted else self.output
        return algebra.batch_of(rows, schema)


def make_node(make: type[Any], about: Sequence[Any], types: Sequence[Any], **fields: Any) -> Any:
    """A node whose fingerprint says what it is made of."""
    below = [n.fingerprint for n in _below(fields)]
    text = repr((make.__name__, *about, *map(str, types), *below))
    columns = pa.schema([(f"c{i}", one) for i, one in enumerate(types)])
    return make(
        columns=columns,
        names=tuple(f"c{i}" for i in range(len(types))),
        fingerprint=hashlib.sha256(text.encode()).hexdigest()[:16],
        origin=" ".join(map(str, about)),
        **fields,
    )


def _below(fields: Mapping[str, Any]) -> Iterator[Node]:
    for value in fields.values():
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Node):
                yield one


def _types(node: Node) -> list[pa.DataType]:
    return [field.type for field in node.columns]


def less(one: Any, other: Any) -> bool:
    """Spark's `<`: null is neither, NaN is the largest."""
    if one is None or other is None:
        return False
    return bool(algebra.order(one) < algebra.order(other))


def _seeded(row: Row, salt: int) -> int:
    """A number that depends on the row as Spark would see it."""
    return int.from_bytes(
        hashlib.blake2b(repr((algebra.key(row), salt)).encode(), digest_size=4).digest(), "little"
    )


class Plan:
    """Makes random views."""

    def __init__(self, chance: Random) -> None:
        """Chance decides."""
        self.chance = chance
        self.views: dict[str, Node] = {}

    def scan(self) -> Node:
        """An input, or a view that is there."""
        name = self.chance.choice([*TABLES, *TABLES, *self.views])
        if name in self.views:
            types = _types(self.views[name])
        else:
            types = [field.type for field in TABLES[name].schema]
        node: Node = make_node(Scan, (name,), types, name=name)
        return self.narrowed(node)

    def narrowed(self, node: Node) -> Node:
        """Some columns, in another order; small rows make rows meet."""
        count = self.chance.randrange(1, min(4, len(node.columns)) + 1)
        return self.selected(node, self.chance.sample(range(len(node.columns)), count))

    def selected(self, node: Node, places: Sequence[int]) -> Node:
        """These columns."""
        types = [_types(node)[i] for i in places]

        def step(rows: list[Row]) -> list[Row]:
            return [(*(row[i] for i in places), row[-1]) for row in rows]

        return self.stateless(("select", *places), types, step, node)

    def stateless(
        self, about: Sequence[Any], types: Sequence[pa.DataType], step: Step, *over: Node
    ) -> Node:
        """A node without state."""
        output = pa.schema([(f"c{i}", one) for i, one in enumerate(types)])
        template = Plain(tuple(node.columns for node in over), output, step)
        made: Node = make_node(Stateless, about, types, template=template, over=over)
        return made

    def any(self, depth: int) -> Node:
        """Anything."""
        if depth <= 0:
            return self.scan()
        known = [n for v in self.views.values() for n in v.walk() if not isinstance(n, Scan)]
        if known and self.chance.random() < 0.15:  # a subtree that another view has too
            return self.chance.choice(known)
        kinds = [
            self.filtered, self.repeated, self.united, self.distinct, self.joined, self.joined,
            self.joined, self.aggregated, self.summed, self.regrouped, self.constant,
        ]  # fmt: skip
        return self.chance.choice(kinds)(depth)

    def filtered(self, depth: int) -> Node:
        """Some rows of it."""
        return self.only_some(self.any(depth - 1))

    def only_some(self, node: Node) -> Node:
        """Some rows of a node; floats do not decide: their last digits may differ."""
        salt = self.chance.randrange(1 << 20)
        exact = [i for i, one in enumerate(_types(node)) if not pa.types.is_floating(one)]

        def step(rows: list[Row]) -> list[Row]:
            return [row for row in rows if _seeded(tuple(row[i] for i in exact), salt) % 3]

        return self.stateless(("filter", salt), _types(node), step, node)

    def repeated(self, depth: int) -> Node:
        """Each row not at all, once or twice, with a number: an explode."""
        node, salt = self.any(depth - 1), self.chance.randrange(1 << 20)

        def step(rows: list[Row]) -> list[Row]:
            return [
                (*row[:-1], i % 2, row[-1])
                for row in rows
                for i in range(_seeded(row[:-1], salt) % 3)
            ]

        return self.stateless(("explode", salt), [*_types(node), pa.int64()], step, node)

    def united(self, depth: int) -> Node:
        """Both, one after the other."""
        one = self.any(depth - 1)
        other = self.like(one, self.any(depth - 1))

        def step(a: list[Row], b: list[Row]) -> list[Row]:
            return a + b

        return self.stateless(("union",), _types(one), step, one, other)

    def like(self, one: Node, other: Node) -> Node:
        """`other` with the types of `one`: columns that it has, else nulls."""
        places: list[int | None] = []
        for kind in _types(one):
            fitting = [i for i, own in enumerate(_types(other)) if own == kind]
            places.append(self.chance.choice(fitting) if fitting else None)

        def step(rows: list[Row]) -> list[Row]:
            return [(*(None if i is None else row[i] for i in places), row[-1]) for row in rows]

        return self.stateless(("like", *places), _types(one), step, other)

    def distinct(self, depth: int) -> Node:
        """Each row once."""
        node = self.any(depth - 1)
        made: Node = make_node(Distinct, (), _types(node), over=node)
        return made

    def constant(self, depth: int) -> Node:
        """Literal rows beside others."""
        node = self.any(depth - 1)
        types = _types(node)
        rows = algebra.batch_of([(None,) * len(types)] * 2, node.columns)
        const: Node = make_node(Const, ("nulls",), types, rows=rows)

        def step(a: list[Row], b: list[Row]) -> list[Row]:
            return a + b

        return self.stateless(("with",), types, step, node, const)

    def joined(self, depth: int) -> Node:
        """A join of any kind."""
        chance = self.chance
        left = self.any(depth - 1)
        right = left if depth == 1 and chance.random() < 0.3 else self.any(self.shallow(depth))
        fitting = [
            (i, j)
            for i, one in enumerate(_types(left))
            for j, other in enumerate(_types(right))
            if one == other and not pa.types.is_nested(one)
        ]
        count = min(len(fitting), chance.choice((1, 1, 1, 2) if depth > 1 else (0, 1, 1, 2)))
        keys = chance.sample(fitting, count)
        kinds: list[JoinKind] = ["inner", "left", "right", "full", "semi", "anti", "existence"]
        kind = chance.choice(kinds)
        residual = None
        if kind != "inner" and chance.random() < 0.5:
            residual = self.residual(left, right, fitting)
        types = _types(left)
        if kind == "existence":
            types = [*types, pa.bool_()]
        elif kind not in ("semi", "anti"):
            types = types + _types(right)
        safe = tuple(chance.random() < 0.2 for _ in keys)
        node: Node = make_node(
            Join,
            (kind, keys, safe, residual.step.__doc__ if residual else None),
            types,
            kind=kind,
            left=left,
            right=right,
            left_keys=tuple(i for i, _ in keys),
            right_keys=tuple(j for _, j in keys),
            null_safe=safe,
            residual=residual,
        )
        return self.narrowed(node) if chance.random() < 0.5 else node

    def shallow(self, depth: int) -> int:
        """How deep the other side of a join is: two deep sides would make millions of rows."""
        return self.chance.choice((0, 0, 1)) if depth == 2 else 0

    def residual(self, left: Node, right: Node, fitting: Sequence[tuple[int, int]]) -> Plain:
        """A condition on pairs: a comparison, or any function of both."""
        salt = self.chance.randrange(1 << 20)
        compared = self.chance.choice(fitting) if fitting else None
        width = len(left.columns)

        def step(rows: list[Row]) -> list[Row]:
            if compared is None:
                return [row for row in rows if _seeded(row[:-1], salt) % 2]
            return [row for row in rows if less(row[compared[0]], row[width + compared[1]])]

        step.__doc__ = f"{compared} {salt if compared is None else ''}"
        types = _types(left) + _types(right)
        schema = pa.schema([(f"c{i}", one) for i, one in enumerate(types)])
        return Plain((schema,), schema, step)

    def keys_of(self, node: Node, most: int = 2) -> list[int]:
        """Columns to group by."""
        plain = [i for i, one in enumerate(_types(node)) if not pa.types.is_nested(one)]
        return self.chance.sample(plain, min(len(plain), self.chance.randrange(most + 1)))

    def aggregated(self, depth: int) -> Node:
        """Groups and what is known of them."""
        node = self.flagged(self.any(depth - 1))
        keys = self.keys_of(node)
        calls = tuple(self.call(node) for _ in range(self.chance.randrange(1, 4)))
        types = [_types(node)[i] for i in keys] + [call.type for call in calls]
        made: Node = make_node(
            Aggregate, (keys, *map(str, calls)), types, over=node, keys=tuple(keys), calls=calls
        )
        return made

    def summed(self, depth: int) -> Node:
        """The plainest of all: a table by one column, and all there is to say of another."""
        del depth
        name = self.chance.choice([*TABLES])
        types = [field.type for field in TABLES[name].schema]
        names = TABLES[name].schema.names
        key = names.index(self.chance.choice(("k", "g")))
        doubles = [i for i, one in enumerate(types) if pa.types.is_floating(one)]
        others = [i for i, one in enumerate(types) if i != key and not pa.types.is_nested(one)]
        value = self.chance.choice([*doubles, *doubles, *others])
        node = self.flagged(self.selected(make_node(Scan, (name,), types, name=name), (key, value)))
        calls = tuple(self.call(node, 1) for _ in range(4))
        keys = self.chance.choice(((0,), (0,), ()))
        made: Node = make_node(
            Aggregate,
            (keys, *map(str, calls)),
            [*(types[key] for _ in keys), *(call.type for call in calls)],
            over=node,
            keys=keys,
            calls=calls,
        )
        return made

    def flagged(self, node: Node) -> Node:
        """With a boolean column at the end, for filters of calls."""
        salt = self.chance.randrange(1 << 20)

        def step(rows: list[Row]) -> list[Row]:
            flags = (True, False, None, True)
            return [(*row[:-1], flags[_seeded(row[:-1], salt) % 4], row[-1]) for row in rows]

        return self.stateless(("flag", salt), [*_types(node), pa.bool_()], step, node)

    def call(self, node: Node, column: int | None = None) -> Call:
        """One aggregate, of any column unless one is given."""
        types = _types(node)
        at = self.chance.randrange(len(types) - 1) if column is None else column
        kind = types[at]
        chosen = len(types) - 1 if self.chance.random() < 0.3 else None
        possible = ["count", "count_distinct", "rows"]
        if not pa.types.is_nested(kind):
            possible += ["min", "max"] * 2
        number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        if number or pa.types.is_decimal(kind):
            possible += ["sum"] * 4 + ["sum_distinct"]
        if pa.types.is_nested(kind):
            possible = ["rows"]
        what: Any = self.chance.choice(possible)
        if what == "rows":
            return Call("count", None, chosen, pa.int64())
        if what.startswith("count"):
            return Call(what, at, chosen, pa.int64())
        if what in ("min", "max"):
            return Call(what, at, chosen, kind)
        if pa.types.is_decimal(kind):
            return Call(what, at, chosen, pa.decimal128(min(38, kind.precision + 10), kind.scale))
        return Call(what, at, chosen, pa.float64() if pa.types.is_floating(kind) else pa.int64())

    def unsteady(self, depth: int) -> Node:
        """A regroup whose last digits differ from one computation to the next."""
        return self.regrouped(depth, noise=1e-11)

    def regrouped(self, depth: int, noise: float = 0.0) -> Node:
        """An aggregate that has no rule: the median of something, and how many."""
        node = self.any(depth - 1)
        calls = 0
        keys = self.keys_of(node, 1)
        salt = self.chance.randrange(1 << 20)
        types = [*(_types(node)[i] for i in keys), pa.float64(), pa.int64()]

        def groups(rows: list[Row]) -> list[Row]:
            nonlocal calls
            calls += 1
            by_key: dict[Any, list[Row]] = {} if keys else {(): []}
            for row in rows:
                by_key.setdefault(algebra.key([row[i] for i in keys]), []).append(row)
            found: list[Row] = []
            for members in by_key.values():
                of_group = tuple(members[0][i] for i in keys) if members else ()
                values = [_seeded(row, salt) % 7 for row in members]
                middle = float(statistics.median(values)) if values else math.nan
                found.append((*of_group, middle + noise * (calls % 7), len(members)))
            return found

        output = pa.schema([(f"c{i}", one) for i, one in enumerate(types)])
        template = Plain((node.columns,), output, groups, weighted=False)
        made: Node = make_node(
            Regroup, ("median", keys, salt), types, over=node, keys=tuple(keys), groups=template
        )
        return made


def random_views(chance: Random) -> dict[str, Node]:
    """One to three views, of which later ones may read earlier ones."""
    plan = Plan(chance)
    for number in range(chance.choice((1, 1, 2, 3))):
        plan.views[f"v{number}"] = plan.any(chance.choice((1, 2, 2, 3)))
    if chance.random() < 0.2:  # nobody reads it: nothing may depend on its last digits
        plan.views[f"v{len(plan.views)}"] = plan.unsteady(1)
    return plan.views


def shown(node: Node) -> str:
    """A node as a person reads it."""
    inner = ", ".join(shown(below) for below in node.inputs)
    if isinstance(node, Scan):
        return node.name
    return f"{type(node).__name__}[{node.origin}]({inner})"


def with_texts(case: Case) -> Case:
    """The case with its views written down."""
    return replace(case, text={name: shown(node) for name, node in case.views.items()})


def plain_case(seed: str) -> Case:
    """The case of a seed."""
    chance = Random(f"views/plain/{seed}")
    case = with_texts(random_case(chance, seed, random_views(chance)))
    if chance.random() < 0.3:  # the last view, which nobody reads, gets another definition
        name = [*case.views][-1]
        after = Plan(chance).only_some(case.views[name])
        at = chance.randrange(len(case.history))
        case = replace(case, later={name: (max(at, case.late.get(name, 0)), after)})
    return case


def smaller_views(case: Case) -> Iterator[Case]:
    """The same history with less of the views."""
    for name in [*case.views][::-1]:
        read = {n.name for v in case.views.values() for n in v.walk() if isinstance(n, Scan)}
        if name not in read and len(case.views) > 1:
            rest = {other: node for other, node in case.views.items() if other != name}
            late = {other: at for other, at in case.late.items() if other != name}
            yield with_texts(replace(case, views=rest, late=late, later={}))
    if len(case.views) == 1:
        ((name, node),) = case.views.items()
        for below in sorted(node.walk(), key=lambda one: len([*one.walk()])):
            if below is not node and not isinstance(below, Scan | Const):
                yield with_texts(replace(case, views={name: below}, later={}))


def counter_example(seed: str, seconds: float = 20.0) -> str:
    """Try the case of a seed; empty if it is right, else the smallest case found that is not."""
    case = plain_case(seed)
    wrong = attempt(case)
    if wrong is None:
        return ""
    return told(*shrunk(case, wrong, attempt, smaller_views, seconds))


def attempt(case: Case) -> Wrong | None:
    """Drive a case; whatever it raises is wrong too."""
    try:
        return run_case(case)
    except Exception as error:  # noqa: BLE001 - whatever it is, the view is not there
        return Wrong(verdict_on(error))
