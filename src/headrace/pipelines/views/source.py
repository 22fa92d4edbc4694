"""What the inputs of a pipeline give: changes in whole entries, with the columns that it knows.

The columns are those that the views were read with. A column that a topic gets later, loses or
widens ends the reading (`InputChanged`), and so does another topic of its name: whoever runs the
pipeline reads its views anew. Rows of an older generation of a topic count for nothing, here as in
every table of the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace import errors
from headrace.log.embedded.reader import Reading
from headrace.pipelines.pipeline import Input
from headrace.pipelines.views.changes import change, joined
from headrace.pipelines.views.reading import own_columns

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog
    from headrace.model.records import Batch
    from headrace.model.topic import Topic
    from headrace.pipelines.views.define import Views

STEP_BYTES = 64 << 20
"""Wide rows make shorter batches and chunks, and so does little memory."""
Changes = dict[str, pa.RecordBatch]


class Source:
    """The changes of the inputs after a position, in whole entries.

    With `through` it ends there, exactly; without, it goes on as the log does.
    """

    def __init__(
        self,
        log: EmbeddedLog,
        inputs: Mapping[str, Input],
        views: Views,
        after: int,
        rows: int,
        through: int | None = None,
        bytes_max: int | None = None,
    ) -> None:
        """Nothing is read yet; `rows` and `bytes_max`: where a step ends."""
        self._rows, self._bytes = rows, bytes_max or STEP_BYTES
        self.cuts = True
        """Whether an entry of more rows is taken in several steps."""
        self.whole = True
        """Whether what was taken last ends with an entry."""
        self._goal = through
        self._of_topic: dict[str, list[str]] = {}
        for one in inputs.values():
            self._of_topic.setdefault(one.topic, []).append(one.name)
        self._inputs, self._views, self._log = inputs, views, log
        self._schemas = views.input_schemas
        self._known: dict[str, Topic] = {}
        """The topics as they were looked at last."""
        self.taken = Counter(dict.fromkeys(self._of_topic, 0))
        """Topic -> rows taken so far."""
        self._reading: Reading = log.read(
            list(self._of_topic), after=after, through=through, follow=through is None
        )
        self.through = after

    def take(self) -> tuple[dict[str, pa.RecordBatch], int]:
        """The changes of the next entries, and how many rows; none if there is nothing new."""
        visible = self._log.position
        found: dict[str, list[pa.RecordBatch]] = {}
        rows = size = 0
        while True:
            batch = self._reading.poll() if self._goal is None else next(self._reading, None)
            if batch is None:
                self.through = max(self.through, visible) if self._goal is None else self._goal
                break
            for name in self._names(batch):
                found.setdefault(name, []).append(as_change(batch.data, self._schemas[name]))
            rows += len(batch)
            self.taken[batch.topic] += len(batch)
            self.whole = batch.last
            if batch.last:  # it may have come after `visible` was asked for
                self.through = max(self.through, batch.position)
            size += batch.data.nbytes
            if (rows >= self._rows or size >= self._bytes) and (batch.last or self.cuts):
                break
        for name in self._of_topic:  # one that was made anew may have no rows yet
            self._same(name)
        return {name: joined(parts, self._schemas[name]) for name, parts in found.items()}, rows

    def entries(self) -> Iterator[tuple[int, dict[str, pa.RecordBatch]]]:
        """The changes of each entry by itself, with its position (only with `through`)."""
        waiting: dict[int, dict[str, list[pa.RecordBatch]]] = {}
        for batch in self._reading:
            positions = batch.positions.to_numpy()
            for position in np.unique(positions).tolist():
                rows = batch.data.filter(pa.array(positions == position))
                found = waiting.setdefault(position, {})
                for name in self._names(batch):
                    found.setdefault(name, []).append(as_change(rows, self._schemas[name]))
            if not batch.last:
                continue
            for position in sorted(waiting):
                parts = waiting[position]
                yield position, {name: joined(p, self._schemas[name]) for name, p in parts.items()}
            waiting = {}

    def _names(self, batch: Batch) -> list[str]:
        """The inputs that take these rows: none, if they are of an older generation."""
        topic = self._same(batch.topic)
        written = topic.schemas[batch.schema_version - 1]
        counts = written.generation == topic.schema.generation
        return self._of_topic[batch.topic] if counts else []

    def _same(self, name: str) -> Topic:
        """A topic, if it is what it was when the views were read."""
        topic = self._log.topic(name)
        if topic is not self._known.get(name):
            for one in (self._inputs[each] for each in self._of_topic[name]):
                known = self._schemas[one.name], self._views.input_identities[one.name]
                if known != (input_schema(self._log, one), input_identity(self._log, one)):
                    raise errors.InputChanged(
                        f"topic '{name}' has other columns than when '{one.name}' was read, "
                        "or was made anew",
                        place=one.name,
                    )
            self._known[name] = topic
        return topic

    def close(self) -> None:
        """End the reading."""
        self._reading.close()


def input_schema(log: EmbeddedLog, one: Input) -> pa.Schema:
    """The columns of an input, under the user's names."""
    topic = log.topic(one.topic)
    wanted = {"table": "changes", "stream": "events"}[one.kind]
    if topic.kind != wanted or topic.value != "columns":
        right = {"changes": "table", "events": "stream"}[topic.kind]
        raise errors.BadPipeline(
            f"'{one.name}' is a {one.kind}, and topic '{topic.name}' holds {topic.kind}"
            + ("" if topic.value == "columns" else f" of {topic.value}"),
            place=one.name,
            fix=f"declare it with .{right}(...)" if topic.value == "columns" else "",
        )
    schema = topic.schema.arrow
    return pa.schema([schema.field(i).with_nullable(True) for i in own_columns(schema)])


def input_identity(log: EmbeddedLog, one: Input) -> str:
    """What state over an input depends on, besides the columns that are used of it."""
    topic = log.topic(one.topic)
    schema = topic.schema
    gone = {column.name for column in schema.columns if column.retired}
    again = [f"{column.name}={column.id}" for column in schema.live if column.name in gone]
    return " ".join([one.kind, one.topic, str(topic.id), str(schema.generation), *again])


def as_change(data: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Rows of a topic as a change."""
    columns = [data.column(name) for name in schema.names]
    at = data.schema.get_field_index("_weight")
    weight = data.column(at).to_numpy() if at >= 0 else np.ones(data.num_rows, np.int64)
    named = pa.schema([field.with_name(f"c{i}") for i, field in enumerate(schema)])
    return change(columns, weight, named)
