"""Evaluating templates, and what happens to a row that makes one fail.

A failed evaluation says nothing of which row it was; the batch is halved until it is known
(`halved`). Under `on_error="set_aside"` the rows that fail are left out and noted, with their
reason; otherwise the first of them is shown and the pipeline stops, with nothing committed.

What fails *in* a step with state is set aside too: a group whose sum does not fit or whose function
raises, by its keys, for as long as it does; a pair of rows that a join's residual fails on, which
then are no partners.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from headrace import errors
from headrace.model.json_values import json_values
from headrace.pipelines.pipeline import View
from headrace.pipelines.views.algebra import Stateless
from headrace.pipelines.views.changes import Failed, consolidated, halved, joined, weights
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
            parts: list[pa.RecordBatch] = []
            # What cancels was never there: a join gives the new row of one side with the old one
            # of the other, and takes it back.
            for place, rows in enumerate(consolidated(one, 0) for one in inputs):
                empty = [joined([], one.columns) for one in node.inputs]
                names = node.inputs[place].names or rows.schema.names

                def alone(first: int, last: int) -> pa.RecordBatch:
                    some = rows.slice(first, last - first)  # noqa: B023 - used at once
                    return node.template(*empty[:place], some, *empty[place + 1 :])  # noqa: B023

                for part in halved(rows.num_rows, alone):
                    if isinstance(part, tuple):
                        at, error = part
                        self.failed(batch, Failed(names, rows.slice(at, 1), error.fact))
                    else:
                        parts.append(part)
            return joined(parts, node.columns)

    def tolerates(self, view: str) -> bool:
        """Whether a view goes on without what fails."""
        return self._views[view].on_error == "set_aside"

    def failed(self, batch: Batch, failed: Failed) -> None:
        """Note what failed, or stop."""
        view, reason = self._views[batch.view], failed.reason.strip()
        for number, weight in enumerate(weights(failed.rows)):
            row = row_of(failed.names, failed.rows.slice(number, 1))
            if weight > 0 and view.on_error == "stop":
                raise errors.ViewStopped(
                    f"view '{view.name}' fails on the row {row}: {reason}",
                    place=view.place,
                    row=row,
                )
            text = json.dumps(row, ensure_ascii=False)
            aside = {"view": view.name, "reason": reason, "row": text}
            batch.aside += [{**aside, "_weight": 1 if weight > 0 else -1}] * abs(int(weight))
