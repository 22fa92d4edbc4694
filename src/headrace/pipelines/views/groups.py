"""Distinct, and regroup: the rule that is right for everything that splits by a key.

**Distinct** keeps each different row with its number of copies; a row is part of the output while
that number is above zero.

**Full** (`refresh="full"`) keeps the whole inputs and what it gave, and computes all of it anew.

**Unique** holds a view to the key that it declares.

**Regroup** keeps the rows by key and what it gave for each key. When rows of a key change, Spark
itself computes the whole group anew from the rows it has now, and the change of the output is that
less *what was given before*: never less a second computation of it, which might break ties or round
in another way. It costs the size of the touched groups, and is right for every aggregate.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headrace import errors
from headrace.model.json_values import json_values
from headrace.pipelines.views.algebra import Distinct, Full, Node, Regroup
from headrace.pipelines.views.changes import (
    Failed,
    States,
    Step,
    Words,
    change,
    copies,
    distinct,
    halved,
    kept_columns,
    keyed,
    keys_of,
    state_schema,
    weights,
)
from headrace.tables.runs import consolidate, with_weights

GROUP_ROWS = 1_000_000
"""A group that is regrouped says so when it has more rows."""


def distinct_collections(node: Distinct) -> dict[str, pa.Schema]:
    """What a distinct keeps."""
    return {"d": state_schema(node.columns)}


def distinct_step(
    node: Distinct, states: States, inputs: Sequence[pa.RecordBatch], seed: int
) -> Step:
    """The change of a distinct."""
    rows = keyed(inputs[0], range(len(node.columns)), seed)
    old = states["d"].weights_of(rows)
    moved = (old + weights(rows) > 0).astype(np.int64) - (old > 0).astype(np.int64)
    output = change(kept_columns(rows), moved, node.columns)
    return Step(output.filter(pa.array(moved != 0)), {"d": rows})


def distinct_snapshot(node: Distinct, states: States, seed: int) -> Iterator[pa.RecordBatch]:
    """The whole output, from what is kept, in chunks."""
    del seed
    for chunk in states["d"].scan():
        yield change(kept_columns(chunk), np.ones(chunk.num_rows), node.columns)


def kept_as(name: str) -> Callable[[Node, States, int], Iterator[pa.RecordBatch]]:
    """Make the snapshot of an operator that keeps its output in a collection of that name."""

    def snapshot(node: Node, states: States, seed: int) -> Iterator[pa.RecordBatch]:
        del seed
        for chunk in states[name].scan():
            yield change(kept_columns(chunk), weights(chunk), node.columns)

    return snapshot


def regroup_collections(node: Regroup) -> dict[str, pa.Schema]:
    """What a regroup keeps."""
    return {
        "rows": state_schema(node.inputs[0].columns),
        "given": state_schema(node.columns),
    }


def regroup_step(
    node: Regroup, states: States, inputs: Sequence[pa.RecordBatch], seed: int
) -> Step:
    """The change of any aggregate, by computing the touched groups anew."""
    rows = keyed(inputs[0], node.keys, seed)
    touched = distinct(keys_of(rows)) if node.keys else np.zeros(1, np.uint64)
    before = states["rows"].probe(touched)
    now = consolidate(pa.concat_batches([before, rows]))
    _warn_of_size(node, now)
    given = states["given"].probe(touched)
    failed: list[Failed] = []
    if node.tolerant:
        results = _computed(node, now, touched, 1, failed)
        lost = np.setdiff1d(distinct(keys_of(before)), keys_of(given))
        if len(lost):  # what had rows and gave nothing failed: it is asked again why
            of_lost = before.filter(pa.array(np.isin(keys_of(before), lost)))
            _computed(node, of_lost, lost, -1, failed)
    else:
        results = node.groups(_copies(now, node.over.columns))
    new = keyed(
        change(results.columns, np.ones(results.num_rows), node.columns),
        range(len(node.keys)),
        seed,
    )
    moved = consolidate(pa.concat_batches([new, with_weights(given, -weights(given))]))
    output = change(kept_columns(moved), weights(moved), node.columns)
    return Step(output, {"rows": rows, "given": moved}, failed)


def _computed(
    node: Regroup, rows: pa.RecordBatch, groups: Words, sign: int, failed: list[Failed]
) -> pa.RecordBatch:
    """What Spark makes of the groups, less those that fail: these are told by their keys."""
    of_row = np.searchsorted(groups, keys_of(rows))

    def some(first: int, last: int) -> pa.RecordBatch:
        chosen = rows.filter(pa.array((of_row >= first) & (of_row < last)))
        return node.groups(_copies(chosen, node.over.columns))

    found: list[pa.RecordBatch] = []
    names = [node.over.names[i] for i in node.keys]
    schema = pa.schema([node.over.columns.field(i) for i in node.keys])
    for part in halved(len(groups), some):
        if not isinstance(part, tuple):
            found.append(part)
            continue
        group, error = part
        own = kept_columns(rows.filter(pa.array(of_row == group)).slice(0, 1))
        if not own[0]:  # there would be nothing to know it by when it does not fail any more
            raise error
        keys = [own[i] for i in node.keys]
        failed.append(Failed(names, change(keys, [sign], schema), error.fact))
    return pa.concat_batches(found) if found else some(0, 0)


def _warn_of_size(node: Regroup, rows: pa.RecordBatch) -> None:
    largest = int(np.unique(keys_of(rows), return_counts=True)[1].max(initial=0))
    if largest > GROUP_ROWS:
        warnings.warn(
            f"a group of {largest:,} rows is computed anew at every change ({node.origin})",
            RuntimeWarning,
            stacklevel=2,
        )


def full_collections(node: Full) -> dict[str, pa.Schema]:
    """What `refresh="full"` keeps: the rows of each input, and what was given."""
    inputs = {f"in{i}": state_schema(one.columns) for i, one in enumerate(node.inputs)}
    return {**inputs, "given": state_schema(node.columns)}


def full_step(node: Full, states: States, inputs: Sequence[pa.RecordBatch], seed: int) -> Step:
    """The change of a view that is computed anew: what it is now, less what was given."""
    state = {
        f"in{i}": keyed(batch, range(len(one.columns)), seed)
        for i, (one, batch) in enumerate(zip(node.inputs, inputs, strict=True))
    }
    whole = [
        _copies(
            consolidate(pa.concat_batches([*states[name].scan(), rows])), node.inputs[i].columns
        )
        for i, (name, rows) in enumerate(state.items())
    ]
    results = node.compute(*whole)
    new = keyed(
        change(results.columns, np.ones(results.num_rows), node.columns),
        range(len(node.columns)),
        seed,
    )
    given = [with_weights(chunk, -weights(chunk)) for chunk in states["given"].scan()]
    moved = consolidate(pa.concat_batches([new, *given]))
    state["given"] = moved
    return Step(change(kept_columns(moved), weights(moved), node.columns), state)


def _copies(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Each row as often as its weight says, without its identity."""
    times = copies(rows, "view")
    columns = [column.take(times) for column in kept_columns(rows)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@dataclass(frozen=True, kw_only=True)
class Unique(Node):
    """The rows below, of which no two may have the same key."""

    over: Node
    keys: tuple[int, ...]
    view: str

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The view's rows."""
        return (self.over,)


def unique_collections(node: Unique) -> dict[str, pa.Schema]:
    """What is kept: the rows by key."""
    return {"rows": state_schema(node.columns)}


def unique_step(node: Unique, states: States, inputs: Sequence[pa.RecordBatch], seed: int) -> Step:
    """The change as it is, or the error that shows two rows with one key."""
    rows = keyed(inputs[0], node.keys, seed)
    now = consolidate(pa.concat_batches([states["rows"].probe(distinct(keys_of(rows))), rows]))
    k = keys_of(now)
    again = np.flatnonzero(k[1:] == k[:-1])
    if len(again) or (weights(now) > 1).any():
        at = int(again[0]) if len(again) else int(np.argmax(weights(now) > 1))
        twice = now.slice(at, 2 if len(again) else 1)
        columns = [json_values(column) for column in kept_columns(twice)]
        shown = [dict(zip(node.names, row, strict=True)) for row in zip(*columns, strict=True)]
        key = ", ".join(node.names[i] for i in node.keys)
        raise errors.ViewStopped(
            f"the key of view '{node.view}' is not unique: {shown[0]}, {shown[-1]}",
            place=f"view '{node.view}'",
            why=f"it declares key={key}, and two of its rows have the same",
            fix="declare a key that is unique, or none: then the whole row is the key",
        )
    return Step(inputs[0], {"rows": rows})
