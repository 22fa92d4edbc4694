"""What a view is made of, what each operator keeps, and what a change costs: for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headrace.pipelines.views.algebra import (
    Aggregate,
    Const,
    Distinct,
    Full,
    Join,
    Node,
    Regroup,
    Scan,
    Stateless,
)
from headrace.pipelines.views.groups import Unique


@dataclass(frozen=True)
class Line:
    """One operator."""

    depth: int
    operator: str
    what: str
    keeps: str
    cost: str
    warning: str = ""

    def to_json(self) -> dict[str, Any]:
        """As it is."""
        return asdict(self)


def explained(node: Node, streams: Mapping[str, str]) -> Iterator[Line]:
    """The operators of a view, topmost first; `streams`: names of inputs that only grow."""

    def visit(node: Node, depth: int) -> Iterator[Line]:
        operator, keeps, cost, warning = _about(node, streams)
        yield Line(depth, operator, " ".join(node.origin.split()), keeps, cost, warning)
        for below in node.inputs:
            yield from visit(below, depth + 1)

    return visit(node, 0)


def _about(node: Node, streams: Mapping[str, str]) -> tuple[str, str, str, str]:
    """Operator, what it keeps, what a change costs, what to beware of."""
    grows = any(isinstance(n, Scan) and n.name in streams for n in node.walk())
    bound = "grows for ever with the stream" if grows else ""
    if isinstance(node, Scan):
        return f"input {node.name}", "nothing", "the rows that change", ""
    if isinstance(node, Const):
        return "literal rows", "nothing", "nothing", ""
    if isinstance(node, Stateless):
        return "compute", "nothing", "the rows that change", ""
    if isinstance(node, Join):
        return _about_join(node, bound)
    if isinstance(node, Aggregate):
        kinds = {call.kind for call in node.calls}
        keeps = ["one row a group" if node.keys else "one row"]
        keeps += ["the values in order"] if kinds & {"min", "max"} else []
        keeps += ["each value once"] if kinds & {"count_distinct", "sum_distinct"} else []
        names = ", ".join(sorted(kinds))
        return f"aggregate ({names})", ", ".join(keeps), "the groups that change, a row each", bound
    if isinstance(node, Distinct):
        return "distinct", "each row once", "the rows that change", bound
    if isinstance(node, Regroup):
        cost = "all rows of the groups that change, computed by Spark"
        return "regroup", "all rows by group, and what was given", cost, bound
    if isinstance(node, Unique):
        return "unique key", "the view's rows by key", "the rows that change", ""
    if isinstance(node, Full):
        return "full", "all rows of its inputs, and what was given", "everything, every time", bound
    return type(node).__name__.lower(), "", "", ""


def _about_join(node: Join, bound: str) -> tuple[str, str, str, str]:
    keeps = "both sides by key"
    if node.kind not in ("inner", "single"):
        keeps += ", numbers of partners" + (" by row" if node.residual is not None else " by key")
    if not node.left_keys:
        warning = "no equality in its condition: a change of one side reads the whole other side"
        return f"{node.kind} join", "both sides", "the whole other side", warning
    return f"{node.kind} join", keeps, "the rows of the other side with equal keys", bound


def as_text(lines: Iterator[Line]) -> Iterator[str]:
    """The lines as a tree."""
    for line in lines:
        indent = "   " * line.depth
        yield f"{indent}{line.operator}" + (f"  [{_short(line.what)}]" if line.what else "")
        yield f"{indent}   keeps {line.keeps}; a change costs {line.cost}"
        if line.warning:
            yield f"{indent}   beware: {line.warning}"


def _short(text: str) -> str:
    return text if len(text) <= 90 else text[:87] + "..."
