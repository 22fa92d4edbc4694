"""Joins: what must be equal becomes keys, by which the state is indexed; the rest is a residual.

A key must be a column, so an expression (``upper(a.x) = b.y``) is computed below the join and
dropped above it. The residual of an inner join is a filter above it; for all other kinds it
decides what counts as a match, and stays with the join. A condition without any equality leaves no
keys, and every pair is a candidate.
"""

from __future__ import annotations

from typing import cast

from headrace.pipelines.views import algebra
from headrace.pipelines.views.catalyst import Attribute, Catalyst, Java, items, kind_of
from headrace.pipelines.views.evaluate_plan import Filtered, Leaf
from headrace.pipelines.views.lift import Lifter, Pending, text
from headrace.pipelines.views.refusals import refuse_operator

KINDS = {
    "Inner": "inner",
    "Cross": "inner",
    "LeftOuter": "left",
    "RightOuter": "right",
    "FullOuter": "full",
    "LeftSemi": "semi",
    "LeftAnti": "anti",
    "LeftSingle": "single",
    "ExistenceJoin": "existence",
}


def lift_join(lifter: Lifter, java: Java) -> Pending:
    """Lift a join, its keys below and its residual above."""
    bridge = lifter.bridge
    spelled = java.joinType().toString().partition("(")[0]
    if spelled not in KINDS:
        raise refuse_operator(java, f"{spelled} Join")
    kind = cast("algebra.JoinKind", KINDS[spelled])
    sides = (java.left(), java.right())
    keys, rest = _split(bridge, java, sides)
    pendings = [lifter.lift(side) for side in sides]
    extended, positions = [], []
    for pending, wanted in zip(pendings, ([k[0] for k in keys], [k[1] for k in keys]), strict=True):
        made, where = with_columns(lifter, pending, wanted)
        extended.append(made)
        positions.append(where)
    left, right = (lifter.node(pending) for pending in extended)
    outputs = [pending.output for pending in extended]
    both = (*outputs[0], *outputs[1])
    residual, prints = None, None
    if rest is not None and kind != "inner":
        residual, prints = lifter.template(Filtered(Leaf(0, both), rest), (both,), text(java))
    output = _output(lifter, java, kind, outputs)
    safe = tuple(key[2] for key in keys)
    about = lifter.about(
        output,
        ("join", kind, positions, safe, prints, left.fingerprint, right.fingerprint),
        text(java),
    )
    node = algebra.Join(
        kind=kind,
        left=left,
        right=right,
        left_keys=positions[0],
        right_keys=positions[1],
        null_safe=safe,
        residual=residual,
        **about,
    )
    result = lifter.leaf(node, output)
    if rest is not None and kind == "inner":
        result = lifter.filter(result, rest, f"Filter {rest.sql()}")
    wanted_output = bridge.attributes(java.output())
    if [a.id for a in wanted_output] == [a.id for a in output]:
        return result
    return lifter.project(result, [a.java for a in wanted_output], "columns of the join")


def _output(
    lifter: Lifter, java: Java, kind: str, sides: list[tuple[Attribute, ...]]
) -> tuple[Attribute, ...]:
    if kind in {"semi", "anti"}:
        return sides[0]
    if kind == "existence":
        return (*sides[0], lifter.bridge.attribute(java.joinType().exists()))
    return (*sides[0], *sides[1])


def with_columns(
    lifter: Lifter, pending: Pending, wanted: list[Java]
) -> tuple[Pending, tuple[int, ...]]:
    """Give what is pending with these expressions among its columns, and their positions."""
    known = {attribute.id: index for index, attribute in enumerate(pending.output)}
    positions: list[int] = []
    made: list[Java] = []
    for expression in wanted:
        if kind_of(expression) == "AttributeReference":
            positions.append(known[expression.exprId().id()])
        else:
            positions.append(len(pending.output) + len(made))
            made.append(lifter.bridge.alias(expression, f"key{len(made)}"))
    if not made:
        return pending, tuple(positions)
    columns = [attribute.java for attribute in pending.output]
    return lifter.project(pending, [*columns, *made], "keys of the join"), tuple(positions)


def _split(
    bridge: Catalyst, java: Java, sides: tuple[Java, Java]
) -> tuple[list[tuple[Java, Java, bool]], Java | None]:
    """Split the condition into keys (left, right, null-safe) and what remains."""
    option = java.condition()
    if option.isEmpty():
        return [], None
    left, right = (side.outputSet() for side in sides)
    keys, others = [], []
    for conjunct in _conjuncts(option.get()):
        kind = kind_of(conjunct)
        if kind in {"EqualTo", "EqualNullSafe"}:
            ends = items(conjunct.children())
            pairs = [(a, b) for a, b in (ends, ends[::-1]) if _fit(a, left) and _fit(b, right)]
            if pairs:
                keys.append((*pairs[0], kind == "EqualNullSafe"))
                continue
        others.append(conjunct)
    rest = None
    for conjunct in others:
        rest = conjunct if rest is None else bridge.expression("And")(rest, conjunct)
    return keys, rest


def _conjuncts(condition: Java) -> list[Java]:
    if kind_of(condition) != "And":
        return [condition]
    return [*_conjuncts(condition.left()), *_conjuncts(condition.right())]


def _fit(expression: Java, side: Java) -> bool:
    references = expression.references()
    return bool(references.nonEmpty() and references.subsetOf(side))
