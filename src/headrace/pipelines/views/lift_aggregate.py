"""Aggregates: arguments below, calls in the middle, what is made of the results above.

``sum(price * (1 - discount)) / count(distinct customer) + 1`` is a product below, a sum and a
count over columns, and a quotient above. An average is a sum and a count, and above them the
expression that Spark itself evaluates over them (bound by the ids of its buffer). Where one of the
functions is not among the calls, the whole Aggregate is regrouped: Spark computes the touched
groups as it is. An Aggregate without functions is a Distinct of its keys.

The calls stand in an order of their own, not in the user's: whoever puts the columns of a select in
another order keeps the state, since only the projection above changes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, cast

from headrace.pipelines.views import algebra
from headrace.pipelines.views.catalyst import EXPRESSIONS, Attribute, Java, items, kind_of
from headrace.pipelines.views.evaluate_plan import Leaf, Operator
from headrace.pipelines.views.lift import Lifter, Pending, text
from headrace.pipelines.views.lift_fingerprint import Numbering, exactly
from headrace.pipelines.views.lift_join import with_columns
from headrace.pipelines.views.refusals import (
    COLLECTORS,
    FUNCTIONS,
    MAPS,
    ORDER_FREE,
    SESSION,
    refuse_function,
    refuse_operator,
)

INTEGRAL = {'"byte"', '"short"', '"integer"', '"long"'}
FLOATING = {'"float"', '"double"'}
FLAT = INTEGRAL | FLOATING | {'"string"', '"boolean"', '"date"', '"timestamp"', '"timestamp_ntz"'}
FLAT |= {'"binary"'}


@dataclass(frozen=True)
class _Wanted:
    """A call, with its argument and filter still as expressions, and the attribute it fills."""

    kind: str
    argument: Java | None
    filter: Java | None
    result: Attribute
    overflow: str

    @property
    def same(self) -> tuple[Any, ...]:
        """What is equal for calls that are."""
        expressions = [each and exactly(each) for each in (self.argument, self.filter)]
        return (self.kind, *expressions, self.result.type, self.overflow)


def lift_aggregate(lifter: Lifter, java: Java) -> Pending:
    """Lift an Aggregate."""
    groupings = items(java.groupingExpressions())
    results = items(java.aggregateExpressions())
    for key in groupings:
        if kind_of(key) == "AttributeReference" and key.metadata().contains(SESSION):
            raise refuse_operator(java, SESSION)
        _refuse_maps(java, key)
    for expression in results:
        _refuse(lifter, java, expression)
    below = lifter.lift(java.child())
    wanted: list[_Wanted] = []
    replaced = []
    for expression in results:
        new = _replace(lifter, expression, wanted)
        if new is None:
            return _regroup(lifter, java, below, groupings)
        replaced.append(new)
    if not wanted and not groupings:
        wanted.append(_Wanted("count", None, None, _long(lifter), "error"))
    _sort(wanted, below)
    pre, keys, calls = _arguments(lifter, below, groupings, wanted)
    node = lifter.node(pre)
    key_columns = tuple(pre.output[position] for position in keys)
    if not wanted:
        assert keys == tuple(range(len(pre.output)))
        about = lifter.about(key_columns, ("distinct", node.fingerprint), text(java))
        made: algebra.Node = algebra.Distinct(over=node, **about)
        output = key_columns
    else:
        output = (*key_columns, *(call.result for call in wanted))
        spelled = [[c.kind, c.argument, c.filter, str(c.type), c.overflow] for c in calls]
        about = lifter.about(output, ("aggregate", keys, spelled, node.fingerprint), text(java))
        made = algebra.Aggregate(over=node, keys=keys, calls=calls, **about)
    return lifter.project(lifter.leaf(made, output), replaced, "results of the aggregate")


def _long(lifter: Lifter) -> Attribute:
    return lifter.bridge.new_attribute("count", lifter.bridge.datatype('"long"'))


def _sort(wanted: list[_Wanted], below: Pending) -> None:
    """Put calls into an order that follows from what they compute, whoever asks first."""
    known: dict[int, int | str] = {
        attribute.id: f"{position:06}" for position, attribute in enumerate(below.output)
    }
    for node, leaf in zip(below.nodes, below.leaves, strict=True):
        if isinstance(node, algebra.Scan):  # its columns go by name: there may be more of them soon
            known |= {attribute.id: attribute.name for attribute in leaf}

    def spelled(call: _Wanted) -> str:
        expressions = [
            each and Numbering(known).canonical(each) for each in (call.argument, call.filter)
        ]
        return json.dumps([call.kind, *expressions, call.result.type, call.overflow])

    wanted.sort(key=spelled)


def _arguments(
    lifter: Lifter, below: Pending, groupings: list[Java], wanted: list[_Wanted]
) -> tuple[Pending, tuple[int, ...], tuple[algebra.Call, ...]]:
    """Compute keys, arguments and filters as columns, each once, and nothing else."""
    bridge = lifter.bridge
    columns: list[Java] = []
    positions: dict[Any, int] = {}

    def place(expression: Java) -> int:
        plain = kind_of(expression) == "AttributeReference"
        key = expression.exprId().id() if plain else exactly(expression)
        if key not in positions:
            positions[key] = len(columns)
            name = f"a{len(columns)}"
            columns.append(expression if plain else bridge.alias(expression, name))
        return positions[key]

    keys = tuple(dict.fromkeys(place(expression) for expression in groupings))
    calls = tuple(
        algebra.Call(
            cast("algebra.CallKind", call.kind),
            None if call.argument is None else place(call.argument),
            None if call.filter is None else place(call.filter),
            bridge.arrow_type(call.result.type),
            cast("Any", call.overflow),
        )
        for call in wanted
    )
    return lifter.project(below, columns, "arguments of the aggregate"), keys, calls


def _refuse_maps(java: Java, expression: Java) -> None:
    if '"map"' in expression.dataType().json():
        raise refuse_operator(java, MAPS)


def _refuse(lifter: Lifter, java: Java, expression: Java, around: Java | None = None) -> None:
    """Refuse functions whose result depends on the order of rows."""
    if not expression.containsPattern(lifter.bridge.pattern("AGGREGATE_EXPRESSION")):
        return
    if kind_of(expression) != "AggregateExpression":
        for child in items(expression.children()):
            _refuse(lifter, java, child, expression)
        return
    function = expression.aggregateFunction()
    kind = kind_of(function)
    for child in items(function.children()) if expression.isDistinct() else ():
        _refuse_maps(java, child)
    if kind in FUNCTIONS and not (
        (kind in COLLECTORS and around is not None and _hides_order(lifter, around))
        or (kind == "ListAgg" and _by_itself(function))
        or (kind == "Mode" and function.reverseOpt().isDefined())  # the least of several, or last
    ):
        raise refuse_function(kind, expression.sql())


def _hides_order(lifter: Lifter, around: Java) -> bool:
    """Say whether no order of a list changes what this makes of it."""
    if kind_of(around) != "ArraySort":
        return kind_of(around) in ORDER_FREE
    usual = lifter.bridge.scala_object(EXPRESSIONS + "ArraySort").defaultComparator()
    given, wanted = (
        re.sub(r"lambda |#\d+L?|'", "", f.toString()) for f in (around.function(), usual)
    )
    return bool(given == wanted)


def _by_itself(function: Java) -> bool:
    """Say whether a list is in the order of its values, so that only equal ones are tied."""
    return any(
        order.child().semanticEquals(function.child())
        for order in items(function.orderExpressions())
    )


def _replace(lifter: Lifter, expression: Java, wanted: list[_Wanted]) -> Java | None:
    """Put attributes in the place of aggregate functions; None if one of them is no call."""
    bridge = lifter.bridge
    if not expression.containsPattern(bridge.pattern("AGGREGATE_EXPRESSION")):
        return expression
    if kind_of(expression) == "AggregateExpression":
        return _call(lifter, expression, wanted)
    children = []
    for child in items(expression.children()):
        new = _replace(lifter, child, wanted)
        if new is None:
            return None
        children.append(new)
    return expression.withNewChildren(bridge.seq(children))


def _call(lifter: Lifter, expression: Java, wanted: list[_Wanted]) -> Java | None:
    """Give what stands for an aggregate function, and note the calls it needs."""
    bridge = lifter.bridge
    function = expression.aggregateFunction()
    kind, distinct = kind_of(function), "_distinct" if expression.isDistinct() else ""
    option = expression.filter()
    kept = None if option.isEmpty() else option.get()
    result = bridge.attribute(expression.resultAttribute())
    children = items(function.children())

    def want(name: str, argument: Java | None, result: Attribute, overflow: str = "error") -> Java:
        """Give the attribute of this call, or of one like it that is there already."""
        call = _Wanted(name, argument, kept, result, overflow)
        like = [other for other in wanted if other.same == call.same]
        if not like:
            wanted.append(call)
        return (like or [call])[0].result.java

    if kind == "Count":
        return want(f"count{distinct}", _counted(lifter, children, distinct), result)
    if kind in {"Min", "Max"} and _flat(children[0]):
        return want(kind.lower(), children[0], result)
    if kind not in {"Sum", "Average"} or not _number(children[0]):
        return None
    spelled = function.productElement(1).toString()  # a mode, or a context that holds one
    mode = next(name for name in ("ANSI", "LEGACY", "TRY") if name in spelled)
    if mode == "TRY":
        return None
    overflow = "error" if mode == "ANSI" else "wrap" if result.type == '"long"' else "null"
    if kind == "Sum":
        return want(f"sum{distinct}", children[0], result, overflow)
    total, count = bridge.attributes(function.aggBufferAttributes())
    argument = children[0]
    if total.type in FLOATING and argument.dataType().json() != total.type:
        modes = bridge.scala_object("org.apache.spark.sql.catalyst.expressions.EvalMode")
        to, how = total.java.dataType(), getattr(modes, mode)()
        argument = bridge.expression("Cast")(argument, to, bridge.none, how)
    parts = {
        total.id: want(f"sum{distinct}", argument, total, overflow),
        count.id: want(f"count{distinct}", children[0], count),
    }
    return _with_attributes(lifter, function.evaluateExpression(), parts)


def _with_attributes(lifter: Lifter, expression: Java, parts: dict[int, Java]) -> Java:
    """Put these attributes in the place of those of these ids."""
    if kind_of(expression) == "AttributeReference":
        return parts[expression.exprId().id()]
    children = items(expression.children())
    if not children:
        return expression
    new = [_with_attributes(lifter, child, parts) for child in children]
    return expression.withNewChildren(lifter.bridge.seq(new))


def _counted(lifter: Lifter, children: list[Java], distinct: str) -> Java | None:
    """Give the column to count: none for count(*), one that is null where any of several is."""
    bridge = lifter.bridge
    if not distinct and all(kind_of(c) == "Literal" and not c.nullable() for c in children):
        return None
    if len(children) == 1:
        return children[0]
    there = None
    for child in children:
        one = bridge.expression("IsNotNull")(child)
        there = one if there is None else bridge.expression("And")(there, one)
    make = bridge.scala_object("org.apache.spark.sql.catalyst.expressions.CreateStruct")
    value = make.apply(bridge.seq(children))
    return bridge.expression("If")(there, value, bridge.null(value.dataType()))


def _number(expression: Java) -> bool:
    spelled = expression.dataType().json()
    return spelled in INTEGRAL | FLOATING or spelled.startswith('"decimal')


def _flat(expression: Java) -> bool:
    return _number(expression) or expression.dataType().json() in FLAT


def _regroup(lifter: Lifter, java: Java, below: Pending, groupings: list[Java]) -> Pending:
    """Keep the rows by their keys, and let Spark compute touched groups."""
    bridge = lifter.bridge
    extended, keys = with_columns(lifter, below, groupings)
    if not extended.output:  # rows without columns could not be counted
        extended, _ = with_columns(lifter, below, [bridge.null(bridge.datatype('"boolean"'))])
    node = lifter.node(extended)
    results = bridge.attributes(java.output())
    named = [bridge.alias(grouping, f"k{i}") for i, grouping in enumerate(groupings)]
    parts = [java.productElement(i) for i in range(java.productArity())]
    parts[1] = bridge.seq([*named, *items(java.aggregateExpressions())])
    whole = java.copy(*parts)  # the keys first: they say which group a result belongs to
    output = bridge.attributes(whole.output())
    plan = Operator(Leaf(0, extended.output), whole, output)
    template, prints = lifter.template(plan, (extended.output,), text(java), rider=False)
    about = lifter.about(output, ("regroup", keys, prints, node.fingerprint), text(java))
    leaf = lifter.leaf(algebra.Regroup(over=node, keys=keys, groups=template, **about), output)
    return lifter.project(leaf, [one.java for one in results], "results of the aggregate")
