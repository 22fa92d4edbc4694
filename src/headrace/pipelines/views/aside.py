"""Evaluating templates, and what happens to a row that makes one fail.

A failed evaluation says nothing of which row it was; the batch is halved until it is known. Under
`on_error="set_aside"` the rows that fail are left out and noted, with their reason; otherwise the
first of them is shown and the pipeline stops, with nothing committed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from headrace import errors
from headrace.model.json_values import json_values
from headrace.pipelines.pipeline import View
from headrace.pipelines.views.algebra import Stateless
from headrace.pipelines.views.changes import joined, weights
from headrace.pipelines.views.engine import Batch


def row_of(names: Sequence[str], rows: pa.RecordBatch) -> dict[str, Any]:
    """The first row as JSON; -0.0 is 0.0, as in state, where either may stand for both."""

    def one(value: Any) -> Any:
        if isinstance(value, float):
            return value + 0.0
        if isinstance(value, dict):
            return {name: one(inner) for name, inner in value.items()}
        return [*map(one, value)] if isinstance(value, list) else value

    columns = zip(names, rows.columns, strict=False)
    return {name: one(json_values(column.slice(0, 1))[0]) for name, column in columns}


class Evaluator:
    """Evaluates the templates of a pipeline."""

    def __init__(self, views: Mapping[str, View]) -> None:
        """The views say what they want done with rows that fail."""
        self._views = views

    def __call__(
        self, batch: Batch, node: Stateless, inputs: Sequence[pa.RecordBatch]
    ) -> pa.RecordBatch:
        """The rows that these rows become."""
        try:
            return node.template(*inputs)
        except errors.ExpressionFailed:
            parts = [
                part
                for place, rows in enumerate(inputs)
                for part in self._halves(batch, node, rows, place)
            ]
            return joined(parts, node.columns)

    def _halves(
        self, batch: Batch, node: Stateless, rows: pa.RecordBatch, place: int
    ) -> Iterator[pa.RecordBatch]:
        """What the rows of one input become, less those that fail."""
        if not rows.num_rows:
            return
        try:
            yield node.template(*self._alone(node, rows, place))
        except errors.ExpressionFailed as error:
            if rows.num_rows == 1:
                self._failed(batch, node, rows, place, error)
                return
            middle = rows.num_rows // 2
            for half in (rows.slice(0, middle), rows.slice(middle)):
                yield from self._halves(batch, node, half, place)

    def _alone(self, node: Stateless, rows: pa.RecordBatch, place: int) -> list[pa.RecordBatch]:
        """The inputs of a template, all empty but one."""
        return [
            rows if i == place else joined([], one.columns) for i, one in enumerate(node.inputs)
        ]

    def _failed(
        self,
        batch: Batch,
        node: Stateless,
        rows: pa.RecordBatch,
        place: int,
        error: errors.ExpressionFailed,
    ) -> None:
        view = self._views[batch.view]
        names = node.inputs[place].names or rows.schema.names
        row = row_of(names, rows)
        reason = error.fact.strip()
        if view.on_error == "stop":
            raise errors.ViewStopped(
                f"view '{view.name}' fails on the row {row}: {reason}", place=view.place
            ) from error
        text = json.dumps(row, ensure_ascii=False)
        weight = int(weights(rows)[0])
        aside = {"view": view.name, "reason": reason, "row": text}
        batch.aside += [{**aside, "_weight": 1 if weight > 0 else -1}] * abs(weight)
