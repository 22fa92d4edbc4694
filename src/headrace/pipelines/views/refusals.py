"""What cannot be kept: each construct by its name, with the reason and what to write instead.

Chance and the clock are looked for in the *analyzed* plan: one rule later ``now()`` is a literal.
Spark's "deterministic" says nothing about order: ``first``, ``collect_list`` or a limit without an
order give other answers for other orders of the same rows, so these have a list of their own.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.errors import HeadraceError, NondeterministicView, NotKept
from headrace.pipelines.views.catalyst import Catalyst, Java, items, kind_of


class Refusal(NamedTuple):
    """What is refused in the user's words, why, and what to write instead."""

    name: str
    why: str
    instead: str = ""


LATER = "the rule that keeps it is not written yet"
ORDERLESS = "which row comes first is not defined, so the same rows can give different answers"
FILES = "files change without a word to the log"
INPUT = "its rows to a topic, and declare that as an input"

SESSION = "spark.sessionWindow"
"""How Spark marks the column of a session window."""
MAPS = "maps"

OPERATORS = {
    "Window": Refusal("a window function", LATER),
    "WindowGroupLimit": Refusal("a window function", LATER),
    "AsOfJoin": Refusal("an as-of join", LATER),
    SESSION: Refusal("a session window", LATER),
    MAPS: Refusal(
        "grouping by a map, or counting different maps,",
        "equal maps may have their entries in different orders, and rows are told apart by bytes",
        "sort_array(map_entries(m)) instead of the map m",
    ),
    "MapInPandas": Refusal("mapInPandas", "it sees batches of rows, whose cut is not defined"),
    "MapInArrow": Refusal("mapInArrow", "it sees batches of rows, whose cut is not defined"),
    "PythonMapInArrow": Refusal("mapInArrow", "it sees batches of rows, whose cut is not defined"),
    "FlatMapGroupsInPandas": Refusal("applyInPandas", LATER, "a pandas UDF as an aggregate"),
    "FlatMapGroupsInArrow": Refusal("applyInArrow", LATER, "a pandas UDF as an aggregate"),
    "FlatMapCoGroupsInPandas": Refusal("cogroup.applyInPandas", LATER),
    "FlatMapCoGroupsInArrow": Refusal("cogroup.applyInArrow", LATER),
    "Deduplicate": Refusal(
        "dropDuplicates with a subset of the columns",
        ORDERLESS,
        "groupBy(those columns) with min or max of the others, or dropDuplicates() of all columns",
    ),
    "Sample": Refusal("sample", "which rows are chosen depends on how they are spread"),
    "CollectMetrics": Refusal("observe", "a kept view has no run to be observed", "a view of them"),
    "UnionLoop": Refusal("a recursive query", LATER),
    "UnionLoopRef": Refusal("a recursive query", LATER),
    "LogicalRelation": Refusal("a file or table read inside the view", FILES, INPUT),
    "DataSourceV2Relation": Refusal("a table read inside the view", FILES, INPUT),
    "HiveTableRelation": Refusal("a table read inside the view", FILES, INPUT),
    "LogicalRDD": Refusal(
        "a frame made inside the view by createDataFrame or from an RDD",
        "its rows cannot be told from those of the empty frames the view is called with",
        "the rows as SQL: spark.sql(\"select * from values (1, 'a') as t(x, y)\")",
    ),
    "TransformWithState": Refusal("transformWithState", LATER),
    "ScriptTransformation": Refusal("TRANSFORM", "it runs a program over batches of rows"),
    "Tail": Refusal("tail", ORDERLESS),
}
LIMITS = {"GlobalLimit", "LocalLimit", "Offset"}
LIMIT = Refusal("limit without orderBy", ORDERLESS, "orderBy(...) before it, once that is kept")
TOP = Refusal("orderBy with limit", LATER)

FUNCTIONS = {
    "First": ("first (also called first_value and any_value)", "min or max"),
    "Last": ("last (also called last_value)", "min or max"),
    "CollectList": ("collect_list (also called array_agg)", "sort_array(collect_list(x))"),
    "CollectSet": ("collect_set", "sort_array(collect_set(x))"),
    "MaxBy": ("max_by", "max(struct(order, value)).value"),
    "MinBy": ("min_by", "min(struct(order, value)).value"),
    "MaxMinByK": ("max_by or min_by", "a view of the values and their order"),
    "Mode": ("mode", "mode(x, true), which of several takes the least"),
    "PandasMode": ("mode", "a view that counts the values"),
    "ListAgg": ("listagg (also called string_agg)", "listagg(x, ',') within group (order by x)"),
    "ApproximatePercentile": ("approx_percentile", "percentile(x, p), which is exact"),
    "HistogramNumeric": ("histogram_numeric", "a view that counts rounded values"),
    "ApproxTopK": ("approx_top_k", "a view that counts the values"),
    "ApproxTopKAccumulate": ("approx_top_k_accumulate", "a view that counts the values"),
    "ApproxTopKCombine": ("approx_top_k_combine", "a view that counts the values"),
    "CollectFrequentItems": ("freqItems", "a view that counts the values"),
    **{
        f"Kll{what}Agg{kind}": ("a KLL sketch", "percentile(x, p), which is exact")
        for what in ("Sketch", "Merge")
        for kind in ("Bigint", "Double", "Float")
    },
    "NthValue": ("nth_value", "min or max"),
}
COLLECTORS = {"CollectList", "CollectSet"}
ORDER_FREE = {"SortArray", "Size", "ArrayMin", "ArrayMax", "ArrayContains"}
"""What may stand around a collector: of it nothing is seen but what no order changes. So may
array_sort without an order of its own."""


def refuse_operator(java: Java, kind: str) -> HeadraceError:
    """Make the refusal of an operator."""
    refusal = OPERATORS.get(kind)
    if kind in LIMITS:
        refusal = TOP if _sorted_below(java) else LIMIT
    if refusal is None:
        refusal = Refusal(f"the operator {kind}", "there is no rule that keeps it")
    return _not_kept(refusal, java.simpleString(25))


def refuse_function(kind: str, text: str) -> HeadraceError:
    """Make the refusal of an aggregate function."""
    name, instead = FUNCTIONS[kind]
    return _not_kept(Refusal(name, ORDERLESS, instead), text)


def _not_kept(refusal: Refusal, text: str) -> HeadraceError:
    proposal = f"write {refusal.instead}, or " if refusal.instead else ""
    return NotKept(
        f"{refusal.name} cannot be kept up to date",
        why=refusal.why,
        fix=f"{proposal}say refresh='full' to have the view computed anew from all rows",
        construct=refusal.name,
        operator=text,
    )


def _sorted_below(java: Java) -> bool:
    while kind_of(java) in LIMITS | {"Project", "SubqueryAlias"}:
        java = java.child()
    return kind_of(java) == "Sort"


def refuse_chance(plan: Java, bridge: Catalyst) -> None:
    """Refuse an analyzed plan that depends on chance, the clock or the user."""
    clock = bridge.pattern("CURRENT_LIKE")
    if not plan.deterministic() or plan.containsPattern(clock):
        found = _culprit(plan, clock)
        culprit = str(found.simpleString(25)) if _is_plan(found) else str(found.sql())
        own = {
            "fix": "if it gives the same for the same rows, say so: F.udtf(...).asDeterministic()"
        }
        raise NondeterministicView(
            f"{culprit} gives another answer every time",
            construct=culprit,
            **(own if kind_of(found) == "PythonUDTF" else {}),
        )


def refuse_files(plan: Java) -> None:
    """Refuse what reads files, before their readers' own jobs are taken for actions."""
    for leaf in items(plan.collectLeaves()):
        kind = kind_of(leaf)
        if kind in OPERATORS and OPERATORS[kind].why == FILES:
            raise refuse_operator(leaf, kind)


def _culprit(tree: Java, clock: Java) -> Java:
    """Find the lowest part of a plan that is to blame."""
    parts = items(tree.children())
    if _is_plan(tree):
        parts += items(tree.expressions())
    elif _has_plan(tree):
        parts.append(tree.plan())
    for part in parts:
        if not part.deterministic() or part.containsPattern(clock):
            return _culprit(part, clock)
    return tree


def _is_plan(tree: Java) -> bool:
    return ".plans." in tree.getClass().getName()


def _has_plan(tree: Java) -> bool:
    return kind_of(tree) in {"ScalarSubquery", "Exists", "ListQuery", "LateralSubquery"}
