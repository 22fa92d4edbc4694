"""What a view must be: its definition called as a batch job, on whole tables of one position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.pipelines.pipeline import Input, Pipeline
from headrace.pipelines.views.reading import added_up, newest_generation, own_columns, topic_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.log.embedded.log import EmbeddedLog


def batch_rows(
    pipeline: Pipeline,
    log: EmbeddedLog,
    view: str,
    through: int,
    spark: SparkSession | None = None,
) -> pa.Table:
    """The rows of a view at an input position, as Spark computes them from the tables."""
    from headrace.pipelines.spark import session
    from headrace.pipelines.views.lift_definition import batch_reading

    started = spark or session()
    known: dict[str, pa.Table] = {}

    def read(name: str) -> pa.Table:
        if name in known:
            return known[name]
        if name in pipeline.inputs:
            found = _input_rows(log, pipeline.inputs[name], through)
        else:
            one = pipeline.views[name]
            before = [*pipeline.inputs, *_before(pipeline, name)]
            tables = {other: read(other) for other in one.among(before)}
            found = batch_reading(started, one.definition, tables, name=one.said)
            arrow = log.topic(topic_of(pipeline.name, name)).schema.arrow
            fields = [arrow.field(i).with_nullable(True) for i in own_columns(arrow)]
            found = found.select([one.name for one in fields]).cast(pa.schema(fields))
        known[name] = found
        return found

    return read(view)


def _before(pipeline: Pipeline, view: str) -> list[str]:
    names = [one.name for one in pipeline.in_order()]
    return names[: names.index(view)]


def _input_rows(log: EmbeddedLog, one: Input, through: int) -> pa.Table:
    if one.kind == "table":
        return added_up(log, one.topic, through)
    arrow = log.topic(one.topic).schema.arrow
    schema = pa.schema([arrow.field(i).with_nullable(True) for i in own_columns(arrow)])
    parts = [batch.data.select(schema.names).cast(schema)
             for batch in newest_generation(log, one.topic, through)]  # fmt: skip
    return pa.Table.from_batches(parts, schema)
