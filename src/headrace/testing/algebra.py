"""A reference for the algebra: every operator computed from its whole inputs, as naively as can be.

The engine turns changes into changes with state, indexes and merges; here an operator is a loop
over lists of rows. Nothing is shared with the engine but the templates, which are Spark's
expressions. So ``evaluate(root, tables)`` says what a view must be, and ``bag`` makes two answers
comparable.

Values are compared as Spark does: null is one value for grouping and equal to nothing in a join,
NaN equals NaN and is the largest, -0.0 equals 0.0.
"""

from __future__ import annotations

import datetime
import decimal
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from headrace.pipelines.views import algebra

Row = tuple[Any, ...]
Rows = list[Row]


def evaluate(node: algebra.Node, tables: Mapping[str, pa.Table]) -> Rows:
    """Give the rows of a node over whole input tables."""
    results: dict[str, Rows] = {}
    for below in node.walk():
        inputs = [results[each.fingerprint] for each in below.inputs]
        results[below.fingerprint] = _evaluate(below, inputs, tables)
    return results[node.fingerprint]


def _evaluate(node: algebra.Node, inputs: list[Rows], tables: Mapping[str, pa.Table]) -> Rows:
    match node:
        case algebra.Scan():
            return rows_of(tables[node.name])
        case algebra.Const():
            return rows_of(node.rows)
        case algebra.Stateless():
            batches = [
                batch_of(rows, schema, weight=True)
                for rows, schema in zip(inputs, node.template.inputs, strict=True)
            ]
            return [row[:-1] for row in rows_of(node.template(*batches))]
        case algebra.Join():
            return _join(node, *inputs)
        case algebra.Aggregate():
            return _aggregate(node, inputs[0])
        case algebra.Distinct():
            return list({key(row): row for row in inputs[0]}.values())
        case algebra.Regroup():
            return _regroup(node, inputs[0])
        case algebra.Full():
            given = [batch_of(r, s) for r, s in zip(inputs, node.compute.inputs, strict=True)]
            return rows_of(node.compute(*given))
    raise AssertionError(f"no such operator: {type(node).__name__}")


def rows_of(data: pa.Table | pa.RecordBatch) -> Rows:
    """Give the rows of Arrow data as tuples."""
    columns = [column.to_pylist() for column in data.columns]
    return list(zip(*columns, strict=True)) if columns else [()] * data.num_rows


def batch_of(rows: Rows, schema: pa.Schema, *, weight: bool = False) -> pa.RecordBatch:
    """Make a batch of rows, each with weight 1 if weights are wanted."""
    columns = [
        pa.array([row[index] for row in rows], field.type) for index, field in enumerate(schema)
    ]
    if weight:
        columns.append(pa.array([1] * len(rows), pa.int64()))
        schema = schema.append(algebra.WEIGHT)
    if not columns:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * len(rows), pa.struct([])))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


# --- operators ------------------------------------------------------------------------------------


def _join(node: algebra.Join, left: Rows, right: Rows) -> Rows:
    by_key: dict[Hashable, list[int]] = {}
    for index, row in enumerate(right):
        if (found := _join_key(row, node.right_keys, node.null_safe)) is not None:
            by_key.setdefault(found, []).append(index)
    pairs = [
        (i, j)
        for i, row in enumerate(left)
        for j in by_key.get(_join_key(row, node.left_keys, node.null_safe), ())
    ]
    pairs = _kept(node, left, right, pairs)
    matched = [left[i] + right[j] for i, j in pairs]
    lefts, rights = Counter(i for i, _ in pairs), Counter(j for _, j in pairs)
    nulls_right = (None,) * len(node.right.columns)
    nulls_left = (None,) * len(node.left.columns)
    lonely_left = [row + nulls_right for i, row in enumerate(left) if not lefts[i]]
    lonely_right = [nulls_left + row for j, row in enumerate(right) if not rights[j]]
    match node.kind:
        case "inner":
            return matched
        case "left":
            return matched + lonely_left
        case "right":
            return matched + lonely_right
        case "full":
            return matched + lonely_left + lonely_right
        case "semi":
            return [row for i, row in enumerate(left) if lefts[i]]
        case "anti":
            return [row for i, row in enumerate(left) if not lefts[i]]
        case "existence":
            return [(*row, bool(lefts[i])) for i, row in enumerate(left)]
        case "single":
            if any(count > 1 for count in lefts.values()):
                raise ValueError("more than one row for a scalar subquery")
            return matched + lonely_left
    raise AssertionError(node.kind)


def _kept(
    node: algebra.Join, left: Rows, right: Rows, pairs: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Give the pairs that the residual keeps; the weight carries their number."""
    if node.residual is None or not pairs:
        return pairs
    (schema,) = node.residual.inputs
    batch = batch_of([left[i] + right[j] for i, j in pairs], schema)
    numbers = pa.array(range(len(pairs)), pa.int64())
    given = pa.RecordBatch.from_arrays(
        [*batch.columns, numbers], schema=schema.append(algebra.WEIGHT)
    )
    return [pairs[number] for number in node.residual(given).column(len(schema)).to_pylist()]


def _join_key(row: Row, keys: Sequence[int], null_safe: Sequence[bool]) -> Hashable | None:
    values = [row[position] for position in keys]
    if any(v is None and not safe for v, safe in zip(values, null_safe, strict=True)):
        return None
    return key(values)


def _groups(rows: Rows, keys: Sequence[int]) -> dict[Hashable, Rows]:
    groups: dict[Hashable, Rows] = {} if keys else {key(()): []}
    for row in rows:
        groups.setdefault(key([row[position] for position in keys]), []).append(row)
    return groups


def _aggregate(node: algebra.Aggregate, rows: Rows) -> Rows:
    return [
        (*(group[0][position] for position in node.keys), *(_call(c, group) for c in node.calls))
        for group in _groups(rows, node.keys).values()
    ]


def _call(call: algebra.Call, rows: Rows) -> Any:
    kept = [row for row in rows if call.filter is None or row[call.filter]]
    if call.argument is None:
        return len(kept)
    values = [row[call.argument] for row in kept if row[call.argument] is not None]
    if call.kind.endswith("_distinct"):
        values = list({key(value): value for value in values}.values())
    if call.kind.startswith("count"):
        return len(values)
    if not values:
        return None
    if call.kind in {"min", "max"}:
        return (min if call.kind == "min" else max)(values, key=order)
    if isinstance(values[0], float):
        return _float_sum(values)
    return sum(values[1:], values[0])


def _float_sum(values: list[float]) -> float:
    special = [value for value in values if not math.isfinite(value)]
    return sum(special) if special else math.fsum(values)


def _regroup(node: algebra.Regroup, rows: Rows) -> Rows:
    (schema,) = node.groups.inputs
    if node.keys and not rows:
        return []
    return rows_of(node.groups(batch_of(rows, schema)))


# --- values ---------------------------------------------------------------------------------------


def key(value: Any) -> Hashable:
    """Give something hashable that is equal exactly if Spark groups the values together."""
    if isinstance(value, float):
        return ("NaN",) if math.isnan(value) else value + 0.0
    if isinstance(value, dict):
        return tuple((name, key(inner)) for name, inner in value.items())
    if isinstance(value, list | tuple):
        return tuple(key(inner) for inner in value)
    return (type(value).__name__, value) if isinstance(value, bool) else value


def order(value: Any) -> Any:
    """Give a key by which Python sorts as Spark does."""
    if isinstance(value, float):
        return (math.isnan(value), 0.0 if math.isnan(value) else value)
    return value.encode() if isinstance(value, str) else value


def bag(rows: Iterable[Row]) -> Counter[Hashable]:
    """Give rows without order, floats to nine significant digits."""
    return Counter(map(_rounded, rows))


def _rounded(value: Any) -> Hashable:
    if isinstance(value, float):
        return float(f"{value:.9g}") + 0.0 if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return tuple((name, _rounded(inner)) for name, inner in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_rounded, value))
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.astimezone(datetime.UTC).isoformat()
    if isinstance(value, decimal.Decimal | bool):
        return (type(value).__name__, str(value))
    return value if value is None or isinstance(value, Hashable) else repr(value)
