"""The rules that bring an analyzed plan into a form that can be lifted: Spark's own, by name.

Not the whole optimizer: it folds, pushes limits below joins, splits Python functions off, rewrites
distinct aggregates, and would make other plans of the same query in every version. These rules do
three things: what is sugar goes away (views, hints, aliases, CTEs, set operations), subqueries
become joins, and filters and columns move down, so that less is kept as state. Rounds, because the
body of a subquery becomes part of the tree only when the subquery has been rewritten.

One step is ours: a subquery that depends on nothing outside, whose value stands in an expression,
becomes a join without a condition. If it is an aggregate without groups it has exactly one row,
and an inner join will do; else a "single" join, which gives null for no row and an error for two.
An EXISTS that depends on nothing outside is the value ``count(*) > 0``. A limit inside an EXISTS
says nothing, and goes; any other that depends on what is outside is refused here, under its name:
one rule later it is a window function.

Another is ``a NOT IN (select b from R)``. Spark makes it an anti join on ``a = b OR isnull(a =
b)``, which has no key: every pair of rows would be a candidate. It is the same as an anti join on
``a = b``, and above it a filter by two facts about R, which are one row: all rows pass if R is
empty, none if it has a null, else those whose a is not null.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.pipelines.views.catalyst import (
    EXPRESSIONS,
    PLANS,
    Catalyst,
    Java,
    items,
    kind_of,
    with_field,
)
from headrace.pipelines.views.refusals import LIMITS, refuse_operator

OPTIMIZER = "org.apache.spark.sql.catalyst.optimizer."
ANALYSIS = "org.apache.spark.sql.catalyst.analysis."
SUBQUERIES = {"ScalarSubquery", "Exists", "ListQuery", "LateralSubquery"}
Change = Callable[[Java], Java | None]
"""Gives what stands for a subquery, or None to look inside it."""
JOIN_TYPES = "org.apache.spark.sql.catalyst.plans."

LESS = (OPTIMIZER + "EliminateLimits",)
"""Of what has no more rows than that: one row of sums, a list of values."""
SUGAR = (
    ANALYSIS + "EliminateView",
    OPTIMIZER + "EliminateResolvedHint",
    ANALYSIS + "EliminateSubqueryAliases",
    EXPRESSIONS + "EliminatePipeOperators",
    OPTIMIZER + "EvalInlineTables",
    "InlineCTE",
    OPTIMIZER + "ReplaceExpressions",
    OPTIMIZER + "RewriteWithExpression",
    OPTIMIZER + "ReplaceUpdateFieldsExpression",
    OPTIMIZER + "PullOutGroupingExpressions",
    OPTIMIZER + "ReplaceIntersectWithSemiJoin",
    OPTIMIZER + "ReplaceExceptWithAntiJoin",
    OPTIMIZER + "RewriteExceptAll",
    OPTIMIZER + "RewriteIntersectAll",
    *LESS,
)
PULL_UP = (OPTIMIZER + "PullupCorrelatedPredicates",)
TO_JOINS = (
    OPTIMIZER + "RewriteCorrelatedScalarSubquery",
    OPTIMIZER + "RewritePredicateSubquery",
    OPTIMIZER + "RewriteLateralSubquery",
)
TIDY = (
    OPTIMIZER + "PushDownPredicates",
    OPTIMIZER + "ReorderJoin",
    OPTIMIZER + "BooleanSimplification",
    OPTIMIZER + "ConstantFolding",
    OPTIMIZER + "SimplifyCasts",
    OPTIMIZER + "EliminateOuterJoin",
    OPTIMIZER + "CombineUnions",
    OPTIMIZER + "ColumnPruning",
    OPTIMIZER + "CollapseProject",
    OPTIMIZER + "RemoveNoopOperators",
)
ROUNDS = 8
"""Of subqueries that appear only when others have been rewritten; TPC-H needs three."""
PASSES = 4
"""Of the tidying rules: each may make room for another."""


def rewrite(plan: Java, bridge: Catalyst) -> Java:
    """Apply the rules until no subquery is left, then tidy up."""
    plan = _not_in(_flatten(plan, bridge), bridge)
    for _ in range(PASSES):
        tidied = _apply(TIDY, plan, bridge)
        if tidied.fastEquals(plan):
            break
        plan = tidied
    return plan


def _flatten(plan: Java, bridge: Catalyst) -> Java:
    """Turn subqueries into joins: what they take from outside first, then those inside them."""

    def inside(expression: Java) -> Java | None:
        if kind_of(expression) not in SUBQUERIES:
            return None
        if not _has_subquery(expression.plan(), bridge):
            return expression
        return expression.withNewPlan(_flatten(expression.plan(), bridge))

    plan = _apply(SUGAR, plan, bridge)
    for _ in range(ROUNDS):
        if not _has_subquery(plan, bridge):
            break
        plan = _map_expressions(plan, lambda each: _unlimited(each, bridge), bridge)
        plan = _apply(PULL_UP, plan, bridge)
        plan = _map_expressions(plan, inside, bridge)
        plan = _apply(TO_JOINS, plan, bridge)
        plan = _values_to_joins(plan, bridge)
        plan = _apply(SUGAR, plan, bridge)
    return plan


def _unlimited(expression: Java, bridge: Catalyst) -> Java | None:
    """Give a subquery without a limit that changes nothing; refuse one that cannot be kept."""
    kind = kind_of(expression)
    if kind not in SUBQUERIES:
        return None
    plan = _apply(LESS, expression.plan(), bridge)
    while kind == "Exists" and (kind_of(plan) == "Sort" or _keeps_some(plan)):
        plan = plan.child()
    if expression.outerAttrs().nonEmpty():
        _refuse_limits(plan)
    return expression.withNewPlan(plan)


def _keeps_some(plan: Java) -> bool:
    """Say whether this is a limit of one row or more."""
    if kind_of(plan) not in {"GlobalLimit", "LocalLimit"}:
        return False
    most = plan.limitExpr()
    return bool(most.foldable() and most.eval(None) > 0)


def _refuse_limits(plan: Java) -> None:
    if kind_of(plan) in LIMITS:
        raise refuse_operator(plan, kind_of(plan))
    for child in items(plan.children()):
        _refuse_limits(child)


def _apply(names: tuple[str, ...], plan: Java, bridge: Catalyst) -> Java:
    for name in names:
        plan = _rule(name, bridge).apply(plan)
    return plan


def _rule(name: str, bridge: Catalyst) -> Java:
    if name != "InlineCTE":
        return bridge.scala_object(name)
    if name not in bridge._objects:
        made = bridge.java_class("java.lang.Class").forName(OPTIMIZER + name)
        constructor = made.getConstructors()[0]
        flags = [index == 0 for index in range(constructor.getParameterCount())]  # alwaysInline
        bridge._objects[name] = constructor.newInstance(bridge.array(flags))
    return bridge._objects[name]


def _has_subquery(tree: Java, bridge: Catalyst) -> bool:
    return bool(tree.containsPattern(bridge.pattern("PLAN_EXPRESSION")))


def _map_expressions(plan: Java, change: Change, bridge: Catalyst) -> Java:
    """Change the subqueries in the expressions of a plan."""
    if not _has_subquery(plan, bridge):
        return plan
    children = [_map_expressions(child, change, bridge) for child in items(plan.children())]
    return _map_own(plan.withNewChildren(bridge.seq(children)), change, bridge)


def _map_own(plan: Java, change: Change, bridge: Catalyst) -> Java:
    """Change the subqueries in the expressions of one operator."""
    changed = plan
    for index in range(plan.productArity()):
        field = plan.productElement(index)
        new = _replaced(field, change, bridge)
        if new is not field:
            changed = with_field(changed, field, new, bridge)
    return changed


def _values_to_joins(plan: Java, bridge: Catalyst) -> Java:
    """Turn subqueries that stand for a value, and depend on nothing outside, into joins."""
    if not _has_subquery(plan, bridge):
        return plan
    children = [_values_to_joins(child, bridge) for child in items(plan.children())]
    plan = plan.withNewChildren(bridge.seq(children))
    split = _results_apart(plan, bridge) if kind_of(plan) == "Aggregate" else plan
    if split is not plan:
        return _values_to_joins(split, bridge)
    found: dict[int, Java] = {}

    def column(expression: Java) -> Java | None:
        kind = kind_of(expression)
        if kind not in {"ScalarSubquery", "Exists"} or not expression.children().isEmpty():
            return None
        key = expression.exprId().id()
        if key not in found:
            below = expression.plan()
            found[key] = below if kind == "ScalarSubquery" else _exists(below, bridge)
        return found[key].output().apply(0)

    changed = _map_own(plan, column, bridge)
    if not found:
        return plan
    if kind_of(plan) == "Join":
        side = changed.right() if _right_may_grow(plan) else changed.left()
    else:
        side = changed.child()
    joined = side
    for subquery in found.values():
        joined = _joined(joined, subquery, bridge)
    changed = with_field(changed, side, joined, bridge)
    output = plan.output()
    if changed.output().size() == output.size():
        return changed
    return bridge.plan("Project")(output, changed)


def _results_apart(plan: Java, bridge: Catalyst) -> Java:
    """Put a projection above an Aggregate whose results have subqueries beside its functions.

    ``sum(n) + (select ...)``: the value is no key and no argument, and is joined above the groups.
    """
    below: dict[int, Java] = {}

    def beside(expression: Java) -> bool:
        """Say whether there is a subquery outside of all functions."""
        if kind_of(expression) == "AggregateExpression" or not _has_subquery(expression, bridge):
            return False
        inner = items(expression.children())
        return kind_of(expression) in SUBQUERIES or any(map(beside, inner))

    def above(expression: Java) -> Java:
        kind = kind_of(expression)
        if kind == "AttributeReference":
            below[expression.exprId().id()] = expression
        if kind == "AggregateExpression":
            named = bridge.alias(expression, "a")
            below[named.exprId().id()] = named
            return named.toAttribute()
        if kind in SUBQUERIES or not expression.children().size():
            return expression
        inner = [above(child) for child in items(expression.children())]
        return expression.withNewChildren(bridge.seq(inner))

    results = items(plan.aggregateExpressions())
    if not any(map(beside, results)):
        return plan
    projected = bridge.seq([above(result) for result in results])
    parts = [plan.productElement(index) for index in range(plan.productArity())]
    parts[1] = bridge.seq(list(below.values()))
    return bridge.plan("Project")(projected, plan.copy(*parts))


def _right_may_grow(join: Java) -> bool:
    """Say whether the value is joined to the right: the side whose rows are only looked for."""
    return bool(join.joinType().toString() not in {"RightOuter", "FullOuter"})


def _joined(left: Java, right: Java, bridge: Catalyst) -> Java:
    name = "Inner" if _has_one_row(right) else "LeftSingle"
    hint = bridge.scala_object(PLANS + "JoinHint").NONE()
    kind = bridge.scala_object(JOIN_TYPES + name)
    return bridge.plan("Join")(left, right, kind, bridge.none, hint)


def _exists(plan: Java, bridge: Catalyst) -> Java:
    """Give the plan of one row that says whether this one has any."""
    counted = _frame(plan, bridge).selectExpr(bridge.seq(["count(*) > 0"]))
    return counted.queryExecution().analyzed()


def _has_one_row(plan: Java) -> bool:
    kind = kind_of(plan)
    if kind in {"Project", "SubqueryAlias"}:
        return _has_one_row(plan.child())
    return kind == "Aggregate" and plan.groupingExpressions().isEmpty()


def _replaced(value: Java, change: Change, bridge: Catalyst) -> Java:
    """Change subqueries wherever they stand: in an expression, an option, a list."""
    if not hasattr(value, "_target_id"):
        return value
    if kind_of(value) == "Some":
        inner = value.get()
        new = _replaced(inner, change, bridge)
        return value if new is inner else bridge.java_class("scala.Some")(new)
    if _is(value, "Seq", bridge):
        old = items(value)
        replaced = [_replaced(item, change, bridge) for item in old]
        same = all(a is b for a, b in zip(old, replaced, strict=True))
        return value if same else bridge.seq(replaced)
    if not _is(value, "Expression", bridge) or not _has_subquery(value, bridge):
        return value
    changed = change(value)
    if changed is not None:
        return changed
    old = items(value.children())
    replaced = [_replaced(child, change, bridge) for child in old]
    same = all(a is b for a, b in zip(old, replaced, strict=True))
    return value if same else value.withNewChildren(bridge.seq(replaced))


def _not_in(plan: Java, bridge: Catalyst) -> Java:
    """Give every NOT IN that stands alone an equality to be kept by."""
    if not plan.containsPattern(bridge.pattern("LEFT_SEMI_OR_ANTI_JOIN")):
        return plan
    children = [_not_in(child, bridge) for child in items(plan.children())]
    plan = plan.withNewChildren(bridge.seq(children))
    if kind_of(plan) != "Join" or plan.joinType().toString() != "LeftAnti":
        return plan
    option = plan.condition()
    equal = None if option.isEmpty() else _equal_or_unknown(option.get())
    if equal is None:
        return plan
    ends = items(equal.children())
    right = plan.right().outputSet()
    inner = [end for end in ends if end.references().subsetOf(right)]
    outer = [end for end in ends if not end.references().subsetOf(right)]
    if len(inner) != 1 or not outer[0].references().subsetOf(plan.left().outputSet()):
        return plan
    some = bridge.java_class("scala.Some")
    anti = with_field(plan, option, some(equal), bridge)
    value = bridge.plan("Project")(bridge.seq([bridge.alias(inner[0], "b")]), plan.right())
    asked = bridge.seq(["count(*) = 0", "count(*) = count(b)"])
    counts = _frame(value, bridge).selectExpr(asked).queryExecution().analyzed()
    joined = _joined(anti, counts, bridge)
    empty, without_null = items(counts.output())
    sure = bridge.expression("And")(bridge.expression("IsNotNull")(outer[0]), without_null)
    passes = bridge.expression("Or")(empty, sure)
    return bridge.plan("Project")(plan.output(), bridge.plan("Filter")(passes, joined))


def _equal_or_unknown(condition: Java) -> Java | None:
    """Give ``a = b`` of ``a = b OR isnull(a = b)``."""
    if kind_of(condition) != "Or" or kind_of(condition.right()) != "IsNull":
        return None
    equal = condition.left()
    same = kind_of(equal) == "EqualTo" and condition.right().child().semanticEquals(equal)
    return equal if same else None


def _frame(plan: Java, bridge: Catalyst) -> Java:
    datasets = bridge.java_class("org.apache.spark.sql.classic.Dataset")
    return datasets.ofRows(bridge.session._jsparkSession, plan)


def _is(value: Java, what: str, bridge: Catalyst) -> bool:
    names = {
        "Seq": "scala.collection.immutable.Seq",
        "Expression": "org.apache.spark.sql.catalyst.expressions.Expression",
    }
    key = f"class {what}"
    if key not in bridge._objects:
        bridge._objects[key] = bridge.java_class("java.lang.Class").forName(names[what])
    return bool(bridge._objects[key].isInstance(value))
