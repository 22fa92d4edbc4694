"""From Catalyst's tree to the algebra, bottom up.

While operators without state are met, nothing is made: they pile up in a `Pending`, a plan over
leaves. An operator with state turns what is pending below it into one `Stateless` node, and
becomes a leaf itself. So every maximal tree of projections, filters, unions, explodes and expands
ends up in one template, and so do the parts that joins (`lift_join`) and aggregates
(`lift_aggregate`) leave to be computed below and above them.

Attributes are told apart by Catalyst's ids, never by name: a self-join has different ids on its
sides already. An id may stand twice in an output (``select("x", "x")``), so columns go by
position.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from headrace.pipelines.views import algebra
from headrace.pipelines.views.catalyst import Attribute, Catalyst, Java, items, kind_of
from headrace.pipelines.views.evaluate import GENERATORS, SparkTemplate, simple
from headrace.pipelines.views.evaluate_plan import (
    Expanded,
    Filtered,
    Generated,
    Leaf,
    Operator,
    Plan,
    Projected,
    United,
    moved,
    walk,
)
from headrace.pipelines.views.evaluate_rows import whole
from headrace.pipelines.views.lift_fingerprint import PYTHON, Numbering, digest, salt
from headrace.pipelines.views.refusals import refuse_operator

IGNORED = {"Sort", "Repartition", "RepartitionByExpression", "RebalancePartitions", "SubqueryAlias"}
CONSTANT = {"LocalRelation", "OneRowRelation", "Range"}


@dataclass(frozen=True)
class Pending:
    """A plan without state over nodes, not yet a node itself."""

    plan: Plan
    nodes: tuple[algebra.Node, ...]
    leaves: tuple[tuple[Attribute, ...], ...]
    origin: tuple[str, ...] = ()

    @property
    def output(self) -> tuple[Attribute, ...]:
        """The columns of the plan."""
        return self.plan.output


class Lifter:
    """Lifts the plans of one definition."""

    def __init__(self, bridge: Catalyst, scans: dict[int, str]) -> None:
        self.bridge = bridge
        self._scans = scans
        self._salt = salt(bridge)

    def lift(self, java: Java) -> Pending:
        """Lift a plan, with all that is below it."""
        kind = kind_of(java)
        if kind in IGNORED:
            return self.lift(java.child())
        if kind in CONSTANT or kind == "LogicalRDD":
            return self._source(java, kind)
        if kind == "Project":
            return self.project(self.lift(java.child()), items(java.projectList()), text(java))
        if kind == "Filter":
            return self.filter(self.lift(java.child()), java.condition(), text(java))
        if kind == "Union":
            return self._union(java)
        if kind == "Expand":
            below = self.lift(java.child())
            lists = tuple(tuple(items(each)) for each in items(java.projections()))
            plan = Expanded(below.plan, lists, self.bridge.attributes(java.output()))
            return over(below, plan, text(java))
        if kind == "Generate":
            below = self.lift(java.child())
            unrequired = set(items(java.unrequiredChildIndex()))
            required = tuple(i for i in range(len(below.output)) if i not in unrequired)
            output = self.bridge.attributes(java.output())
            return over(below, Generated(below.plan, java, required, output), text(java))
        if kind in {"Distinct", "Deduplicate"}:
            return self._distinct(java)
        if kind == "Join":
            from headrace.pipelines.views.lift_join import lift_join

            return lift_join(self, java)
        if kind == "Aggregate":
            from headrace.pipelines.views.lift_aggregate import lift_aggregate

            return lift_aggregate(self, java)
        raise refuse_operator(java, kind)

    # --- without state ----------------------------------------------------------------------------

    def project(self, below: Pending, expressions: list[Java], origin: str) -> Pending:
        """Put a projection on what is pending, less selections below it.

        These are there only where a table has columns that nobody asks for; whether it has must not
        matter to the fingerprint.
        """
        while isinstance(below.plan, Projected) and all(
            kind_of(e) == "AttributeReference" for e in below.plan.expressions
        ):
            below = replace(below, plan=below.plan.below, origin=below.origin[:-1])
        output = tuple(self.bridge.attribute(e.toAttribute()) for e in expressions)
        return over(below, Projected(below.plan, tuple(expressions), output), origin)

    def filter(self, below: Pending, condition: Java, origin: str) -> Pending:
        """Put a filter on what is pending."""
        return over(below, Filtered(below.plan, condition), origin)

    def _union(self, java: Java) -> Pending:
        parts = [self.lift(child) for child in items(java.children())]
        plans, count = [], 0
        for part in parts:
            plans.append(moved(part.plan, count))
            count += len(part.nodes)
        return Pending(
            United(tuple(plans), self.bridge.attributes(java.output())),
            tuple(node for part in parts for node in part.nodes),
            tuple(leaf for part in parts for leaf in part.leaves),
            (*(line for part in parts for line in part.origin), "Union"),
        )

    # --- nodes ------------------------------------------------------------------------------------

    def leaf(self, node: algebra.Node, output: tuple[Attribute, ...]) -> Pending:
        """Start anew above a node."""
        return Pending(Leaf(0, output), (node,), (output,))

    def node(self, pending: Pending) -> algebra.Node:
        """Make what is pending a node, unless it is one."""
        if isinstance(pending.plan, Leaf):
            return pending.nodes[0]
        origin = "\n".join(pending.origin)
        template, prints = self.template(pending.plan, pending.leaves, origin, pending.nodes)
        below = [
            f"scan {node.name}" if isinstance(node, algebra.Scan) else node.fingerprint
            for node in pending.nodes
        ]
        about = self.about(pending.output, ("stateless", prints, below), origin)
        selects = selected(pending.plan)
        return algebra.Stateless(template=template, over=pending.nodes, selects=selects, **about)

    def template(
        self,
        plan: Plan,
        leaves: tuple[tuple[Attribute, ...], ...],
        origin: str,
        nodes: tuple[algebra.Node, ...] = (),
        *,
        rider: bool = True,
    ) -> tuple[SparkTemplate, Any]:
        """Make a template, and what its fingerprint consists of.

        A column of an input goes in by its name, and only if it is used: a topic that gets another
        column leaves the fingerprint, and the state above it, as they were. All others go in by
        position.
        """
        known: dict[int, int | str] = {}
        for index, leaf in enumerate(leaves):
            scan = index < len(nodes) and isinstance(nodes[index], algebra.Scan)
            for attribute in leaf:
                known.setdefault(attribute.id, f"{index} {attribute.name}" if scan else len(known))
        numbers = Numbering(known)
        prints = [self._print(part, numbers) for part in walk(plan)]
        compiled = not numbers.classes & PYTHON and not any(
            isinstance(part, Operator)
            or (isinstance(part, Generated) and kind_of(part.java.generator()) not in GENERATORS)
            for part in walk(plan)
        )
        return SparkTemplate(self.bridge, plan, leaves, compiled, origin, rider), prints

    def about(self, output: tuple[Attribute, ...], prints: Any, origin: str) -> dict[str, Any]:
        """Give what every node is made with."""
        return {
            "columns": self.bridge.schema(output),
            "names": tuple(attribute.name for attribute in output),
            "fingerprint": digest(self._salt, prints),
            "origin": origin,
        }

    def _print(self, plan: Plan, numbers: Numbering) -> Any:
        """Give one operator as plain data."""
        name = type(plan).__name__
        if isinstance(plan, Leaf):
            return [name, plan.index]
        if isinstance(plan, Projected):
            made = [numbers.canonical(e) for e in plan.expressions]
        elif isinstance(plan, Filtered):
            made = [numbers.canonical(plan.condition)]
        elif isinstance(plan, Expanded):
            made = [[numbers.canonical(e) for e in each] for each in plan.projections]
        elif isinstance(plan, Generated):
            made = [numbers.canonical(plan.java.generator()), plan.required, plan.java.outer()]
        elif isinstance(plan, Operator):
            made = [numbers.canonical(e) for e in items(plan.java.expressions())]
        else:
            made = []
        return [name, made, [[numbers.number(each.id), each.type] for each in plan.output]]

    def _source(self, java: Java, kind: str) -> Pending:
        output = self.bridge.attributes(java.output())
        if kind == "LogicalRDD":
            name = self._scans.get(java.rdd().id())
            if name is None:
                raise refuse_operator(java, kind)
            return self.leaf(self.scan(name, output), output)
        rows = self._rows(java, output)
        prints = ["const", [a.type for a in output], rows.num_rows, repr(rows.to_pylist())]
        node = algebra.Const(rows=rows, **self.about(output, prints, text(java)))
        return self.leaf(node, output)

    def scan(self, name: str, output: tuple[Attribute, ...]) -> algebra.Scan:
        """Give the node of an input."""
        prints = ["scan", name, [[a.name, a.type] for a in output]]
        return algebra.Scan(name=name, **self.about(output, prints, f"Scan {name}"))

    def _rows(self, java: Java, output: tuple[Attribute, ...]) -> pa.RecordBatch:
        """Ask Spark for literal rows."""
        from pyspark.sql import DataFrame

        datasets = self.bridge.java_class("org.apache.spark.sql.classic.Dataset")
        made = datasets.ofRows(self.bridge.session._jsparkSession, java)
        schema = self.bridge.schema(output)
        if not output:
            count = made.count()
            return pa.RecordBatch.from_struct_array(pa.array([{}] * count, pa.struct([])))
        table = DataFrame(made, self.bridge.session).toDF(*schema.names).toArrow()
        return whole(table.cast(schema))

    def _distinct(self, java: Java) -> Pending:
        below = self.node(self.lift(java.child()))
        output = self.bridge.attributes(java.output())
        if kind_of(java) == "Deduplicate" and java.keys().size() < len(output):
            raise refuse_operator(java, "Deduplicate")
        about = self.about(output, ("distinct", below.fingerprint), "Distinct")
        return self.leaf(algebra.Distinct(over=below, **about), output)


def over(below: Pending, plan: Plan, origin: str) -> Pending:
    """Give what is pending with one more operator on it."""
    return Pending(plan, below.nodes, below.leaves, (*below.origin, origin))


def selected(plan: Plan) -> tuple[int | None, ...]:
    """Give the column of the leaf that each column is, if any; none if a row may become several."""
    if isinstance(plan, Leaf):
        return tuple(range(len(plan.output)))
    if isinstance(plan, Filtered):
        return selected(plan.below)
    below = selected(plan.below) if isinstance(plan, Projected) else ()
    if not isinstance(plan, Projected) or not below:
        return ()
    positions = {attribute.id: at for at, attribute in enumerate(plan.below.output)}
    found = (simple(expression, positions) for expression in plan.expressions)
    return tuple(below[at] if isinstance(at, int) else None for at in found)


def text(java: Java) -> str:
    """Say an operator in Spark's words, without ids."""
    return re.sub(r"#\d+L?", "", java.simpleString(25))
