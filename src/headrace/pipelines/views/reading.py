"""Reading what a pipeline has committed. Needs no Spark: a view is a topic of the log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace import errors
from headrace.log.writer import state_counter
from headrace.model.schema import RESERVED
from headrace.pipelines.views.changes import copies, keyed_rows

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog
    from headrace.model.records import Batch

FORMAT = 1


@dataclass(frozen=True)
class Status:
    """What the last commit of a pipeline says of it."""

    through: int = 0
    batch: int = 0
    seed: int = 0
    manifest: tuple[Any, ...] = ()
    """Where the state is: a section of a pack."""
    views: dict[str, str] = field(default_factory=dict)
    """View -> the identity of its definition; "": it was kept once, and its rows are old."""

    taken: dict[str, int] = field(default_factory=dict)
    """Topic -> how many of its rows are taken in."""
    rate: float = 0.0
    """Rows a second of the last build; 0 if there was none."""

    def to_json(self) -> dict[str, Any]:
        """As it stands in the log entry."""
        return {
            "format": FORMAT,
            "through": self.through,
            "batch": self.batch,
            "seed": self.seed,
            "manifest": list(self.manifest),
            "views": self.views,
            "taken": self.taken,
            "rate": self.rate,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], pipeline: str) -> Status:
        """The inverse; refuses what a newer version wrote."""
        if data["format"] != FORMAT:
            raise errors.NewerFormat(
                f"pipeline '{pipeline}' has state of format {data['format']}, not {FORMAT}",
                place=pipeline,
            )
        return cls(
            data["through"],
            data["batch"],
            data["seed"],
            tuple(data["manifest"]),
            data["views"],
            data["taken"],
            data["rate"],
        )

    def behind(self, log: EmbeddedLog) -> int:
        """How many rows of its inputs a pipeline has not taken in; none of those that are gone."""
        there = {topic.name for topic in log.topics()} & self.taken.keys()
        return sum(max(0, sum(log.ends(topic)) - self.taken[topic]) for topic in there)


def writer_name(pipeline: str) -> str:
    """The name under which a pipeline commits."""
    return f"pipeline/{pipeline}"


def status_of(log: EmbeddedLog, pipeline: str) -> Status:
    """What a pipeline has committed last."""
    data = log.value(state_counter(writer_name(pipeline)))
    return Status() if data is None else Status.from_json(data, pipeline)


def pipelines(log: EmbeddedLog) -> dict[str, Status]:
    """Every pipeline that has committed to a log, with the views whose topics are still there."""
    start = state_counter(writer_name(""))
    there = {topic.name for topic in log.topics()}
    found = {}
    for counter, data in log.values(start).items():
        name = counter.removeprefix(start)
        status = Status.from_json(data, name)
        views = {one: what for one, what in status.views.items() if topic_of(name, one) in there}
        found[name] = replace(status, views=views)
    return found


def topic_of(pipeline: str, view: str) -> str:
    """The topic of a view."""
    return f"{pipeline}.{view}"


def aside_topic(log: EmbeddedLog, pipeline: str) -> str:
    """The topic of rows that made a view fail, made when it is first needed."""
    name = f"{pipeline}._aside"
    schema = "view string, reason string, row string"
    log.create_topic(name, schema, kind="changes", exist_ok=True)
    return name


def commits_topic(log: EmbeddedLog, pipeline: str) -> str:
    """The topic that says at each commit through which input position which views are right.

    A view that is being built is not among them.
    """
    name = f"{pipeline}._commits"
    log.create_topic(name, "through bigint, views array<string>", exist_ok=True)
    return name


def own_columns(schema: pa.Schema) -> list[int]:
    """The places of the columns that are not Headrace's own."""
    return [i for i, name in enumerate(schema.names) if name not in RESERVED]


def rows_of(log: EmbeddedLog, pipeline: str, view: str, at: int | None) -> pa.Table:
    """The rows of a view, added up through a position."""
    return added_up(log, topic_of(pipeline, view), at)


def newest_generation(log: EmbeddedLog, name: str, through: int | None = None) -> Iterator[Batch]:
    """The rows of a topic that count: those of older generations do not."""
    topic = log.topic(name)
    for batch in log.read(name, through=log.position if through is None else through):
        if topic.schemas[batch.schema_version - 1].generation == topic.schema.generation:
            yield batch


def added_up(log: EmbeddedLog, name: str, at: int | None) -> pa.Table:
    """The rows of a topic of changes, added up through a position, always in the same order."""
    topic = log.topic(name)
    parts = []
    for batch in newest_generation(log, name, at):
        own = own_columns(batch.data.schema)
        weight = batch.data.column("_weight").to_numpy()
        parts.append(([batch.data.column(i) for i in own], weight))
    places = own_columns(topic.schema.arrow)
    schema = pa.schema([topic.schema.arrow.field(i) for i in places])
    if not parts:
        return schema.empty_table()
    columns = [pa.concat_arrays(list(found)) for found in zip(*(p for p, _ in parts), strict=True)]
    weight = np.concatenate([w for _, w in parts])
    keys = [columns[schema.get_field_index(key)] for key in topic.key]
    total = keyed_rows(columns, weight, keys, schema, 0)
    found = total.take(copies(total, f"topic '{name}'")).select(schema.names)
    return pa.Table.from_batches([found.cast(schema)])
