"""The operators a view is made of: plain data, without Spark in it.

A definition is read once (`lift`) into a tree of these nodes; the engine keeps each node's state
and turns the changes of its inputs into the change of its output. The columns of a node go by
position and are called ``c0``, ``c1`` ...; what the user called them stands in ``names`` and
matters only at the top. On an edge flows a batch of these columns and, last, ``_w``: the weight,
an int64.

What the user computes row by row stays Spark's: a `Template` is a plan that was fused, bound and
compiled once, and turns batches into a batch. A node knows its templates, and nothing of Catalyst.

The ``fingerprint`` of a node names everything its rows depend on: operators, expressions,
functions of the user, inputs by name and type, settings of the session, version of Spark; and
nothing else. It is equal in every process, so state can be named by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

import pyarrow as pa

WEIGHT = pa.field("_w", pa.int64(), nullable=False)
"""The last column of every change: how many of this row there are more, or fewer."""


class Template(Protocol):
    """A fused plan without state, evaluated by Spark: rows in, rows out.

    Every batch given and got ends in the column ``_w``, which rides along untouched; the templates
    of `Regroup` and `Full` see whole rows instead, and no such column.
    """

    @property
    def inputs(self) -> tuple[pa.Schema, ...]:
        """What each batch must hold, less the weight."""
        ...

    @property
    def output(self) -> pa.Schema:
        """What comes out, less the weight."""
        ...

    def __call__(self, *batches: pa.RecordBatch) -> pa.RecordBatch:
        """Evaluate; raises `headrace.errors.ExpressionFailed` with Spark's message."""
        ...


@dataclass(frozen=True, kw_only=True)
class Node:
    """What all operators have."""

    columns: pa.Schema
    """c0, c1, ... with their types, all nullable."""
    names: tuple[str, ...]
    """What Spark calls these columns; may hold a name twice."""
    fingerprint: str
    origin: str
    """The operator in Spark's words, for ``explain``."""
    tolerant: bool = field(default=False, compare=False)
    """Whether a step leaves out and tells what fails in it, instead of failing as a whole."""

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes whose changes this one takes in."""
        return ()

    def walk(self) -> Iterator[Node]:
        """Give all nodes below and this one, inputs first; a shared subtree comes once."""
        seen: set[str] = set()

        def visit(node: Node) -> Iterator[Node]:
            if node.fingerprint not in seen:
                seen.add(node.fingerprint)
                for below in node.inputs:
                    yield from visit(below)
                yield node

        return visit(self)

    def below(self, made: Callable[[Node], Node]) -> dict[str, Any]:
        """The fields that hold nodes, with what is made of each of them: for `replace`."""
        found: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Node):
                found[one.name] = made(value)
            elif isinstance(value, tuple) and value and isinstance(value[0], Node):
                found[one.name] = tuple(map(made, value))
        return found


@dataclass(frozen=True, kw_only=True)
class Scan(Node):
    """An input of the pipeline or another view, by name."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Const(Node):
    """Literal rows; they enter once, with weight 1."""

    rows: pa.RecordBatch = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Stateless(Node):
    """Projections, filters, unions, explodes and expands, fused into one template."""

    template: Template = field(compare=False)
    over: tuple[Node, ...]
    selects: tuple[int | None, ...] = field(default=(), compare=False)
    """The column of its input that each column is, or None; none where a row may become several."""

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The template's inputs, in its order."""
        return self.over


JoinKind = Literal["inner", "left", "right", "full", "semi", "anti", "existence", "single"]


@dataclass(frozen=True, kw_only=True)
class Join(Node):
    """Pairs of rows with equal keys that the residual keeps.

    Columns: left + right (inner, left, right, full, single), left (semi, anti), left + a boolean
    "has a match" (existence). *single* is a left join that must not find two matches for a row.
    An inner join has no residual: it stands as a filter above. No keys: every pair is a candidate.
    """

    kind: JoinKind
    left: Node
    right: Node
    left_keys: tuple[int, ...]
    right_keys: tuple[int, ...]
    null_safe: tuple[bool, ...]
    """Per key: whether null equals null (``<=>``); otherwise a null key matches nothing."""
    residual: Template | None = field(compare=False)
    """Over left + right columns (and the weight): gives the pairs that match."""

    @property
    def inputs(self) -> tuple[Node, ...]:
        """Left, right."""
        return (self.left, self.right)


CallKind = Literal["sum", "count", "min", "max", "sum_distinct", "count_distinct"]


@dataclass(frozen=True)
class Call:
    """One aggregate: over the non-null values of a column, in the rows that its filter keeps."""

    kind: CallKind
    argument: int | None
    """None: count(*), the rows themselves."""
    filter: int | None
    """A boolean column; null and false leave the row out."""
    type: pa.DataType
    """Of the result. A sum is null when there is no value; a count is 0."""
    overflow: Literal["error", "null", "wrap"] = "error"
    """What a sum that does not fit its type becomes (ANSI: error)."""


@dataclass(frozen=True, kw_only=True)
class Aggregate(Node):
    """Groups by key columns; columns: the keys, then one per call. No keys: exactly one row.

    Null and NaN are keys like any other; there is always at least one call.
    """

    over: Node
    keys: tuple[int, ...]
    calls: tuple[Call, ...]

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The rows to be grouped."""
        return (self.over,)


@dataclass(frozen=True, kw_only=True)
class Distinct(Node):
    """Each row once."""

    over: Node

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The rows with their repetitions."""
        return (self.over,)


@dataclass(frozen=True, kw_only=True)
class Regroup(Node):
    """Whatever splits by keys and has no rule of its own: Spark computes touched groups anew.

    The template takes all rows of some groups, a row as often as its weight says and without the
    column, and gives these groups' result rows: the keys first, then what was computed (a
    `Stateless` above drops the keys if they are not wanted). No keys: there is one group, and it is
    always there.
    """

    over: Node
    keys: tuple[int, ...]
    groups: Template = field(compare=False)

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The rows to be grouped."""
        return (self.over,)


@dataclass(frozen=True, kw_only=True)
class Full(Node):
    """``refresh="full"``: the definition itself, computed anew from whole inputs."""

    over: tuple[Node, ...]
    compute: Template = field(compare=False)

    @property
    def inputs(self) -> tuple[Node, ...]:
        """All inputs of the definition, in its order."""
        return self.over


def is_unique(node: Node, key: frozenset[int]) -> bool:
    """Whether no two rows can be equal in these columns, because of what the operators are."""
    if isinstance(node, Stateless) and node.selects:
        below = (node.selects[at] for at in key)
        return is_unique(node.over[0], frozenset(at for at in below if at is not None))
    if isinstance(node, Aggregate):
        return key.issuperset(range(len(node.keys)))
    return isinstance(node, Distinct) and key.issuperset(range(len(node.columns)))
