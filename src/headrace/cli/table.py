"""``headrace table``: the rows of a topic by key, as they are or were at a position."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.formats import chosen, destination, format_options
from headrace.cli.options import (
    Group,
    json_option,
    listed,
    log_option,
    open_log,
    several,
    talk,
)
from headrace.errors import BadUsage

if TYPE_CHECKING:
    import pyarrow as pa

    from headrace.log.embedded.log import EmbeddedLog
    from headrace.model.topic import Topic


@click.group(cls=Group)
def table() -> None:
    """Read a topic by key, as it is or was at a position."""


reading_options = several(
    json_option,
    log_option,
    click.option(
        "--at",
        metavar="POSITION",
        type=int,
        help="As it was at this position, waiting until it is there; by default as it is now.",
    ),
    click.option(
        "--after",
        metavar="TOKEN",
        help="Wait until the log has this: a position, or lsn:X/Y of a captured database.",
    ),
    click.option(
        "--timeout",
        metavar="SECONDS",
        type=click.FloatRange(0),
        help="With --at: how long to wait, by default for ever; with --after, by default 5 s.",
    ),
    click.option("--columns", metavar="A,B", help="Only these columns; by default all."),
    format_options(),
)
"""The options of both commands."""


@table.command(short_help="Print the rows of some keys.", example="headrace table get orders 7 8")
@click.argument("name")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@reading_options
def get(
    name: str,
    keys: tuple[str, ...],
    at: int | None,
    after: str | None,
    timeout: float | None,
    columns: str | None,
    form: str | None,
    output: str | None,
    path: str,
    as_json: bool,
) -> None:
    """Print the rows of topic NAME that have these keys.

    A KEY is a value (7, paid, 2024-01-31); a JSON array for a key of several columns
    ('["a", 7]'); or a JSON object ('{"id": null}'). Keys that are not there are named on stderr.
    """
    from headrace.cli.output import row_writer, write_all

    form = chosen(form, output, as_json=as_json)
    with open_log(path) as log, destination(output) as stream:
        topic = log.topic(name)
        at = _at(log, name, at, after, timeout)
        found = log.table(name).get(
            _keys(topic, keys), at=at, columns=listed(columns) or None, timeout=timeout
        )
        index = found.column("_index").to_pylist()
        rows = found.drop_columns(["_index"])
        writer = row_writer(form, topic, rows.schema, stream)
        write_all(writer, rows.to_batches(), log.position)
        for missing in sorted(set(range(len(keys))) - set(index)):
            talk(f"there is no row with key {keys[missing]}")


@table.command(
    short_help="Print all rows in the order of their keys.",
    example="headrace table scan orders --at 120 --format table",
)
@click.argument("name")
@click.option("--limit", metavar="N", type=click.IntRange(0), help="Only N rows; by default all.")
@reading_options
def scan(
    name: str,
    limit: int | None,
    at: int | None,
    after: str | None,
    timeout: float | None,
    columns: str | None,
    form: str | None,
    output: str | None,
    path: str,
    as_json: bool,
) -> None:
    """Print the rows of topic NAME in the order of their keys."""
    from headrace.cli.output import row_writer, write_all

    form = chosen(form, output, as_json=as_json)
    with open_log(path) as log, destination(output) as stream:
        at = _at(log, name, at, after, timeout)
        reader = log.table(name).scan(at=at, columns=listed(columns) or None, timeout=timeout)
        batches = reader if limit is None else _limited(reader, limit)
        writer = row_writer(form, log.topic(name), reader.schema, stream)
        write_all(writer, batches, log.position)


def _at(
    log: EmbeddedLog, name: str, at: int | None, after: str | None, timeout: float | None
) -> int | None:
    """The position to read at."""
    from headrace.runtime.tokens import TIMEOUT_SECONDS, wait_topic

    if after is None:
        return at
    if at is not None:
        raise BadUsage("--at and --after exclude each other", fix="give one of them")
    return wait_topic(log, name, after, TIMEOUT_SECONDS if timeout is None else timeout)


def _keys(topic: Topic, texts: Sequence[str]) -> Any:
    """Understand keys as `topic append` understands rows that have only these columns."""
    from dataclasses import replace

    from headrace.cli.input import Line, LineIntake
    from headrace.model.schema import Schema

    columns = tuple(
        replace(topic.schema.column(name), nullable=True, retired=False) for name in topic.key
    )
    schema = Schema(topic.schema.version, topic.schema.generation, columns)
    own = replace(topic, schemas=(schema,), kind="events", value="columns", event_time=None)
    lines = [Line(at, _object(own, text).encode()) for at, text in enumerate(texts, start=1)]
    taken = LineIntake(own)(lines)
    for bad in taken.bad:
        raise BadUsage(
            f"{texts[bad.number - 1]} is not a key of topic '{topic.name}'",
            why=f"its key is ({schema.ddl()})",
            fix="give a value, a JSON array of the key's columns, or a JSON object",
        )
    return taken.batch


def _object(topic: Topic, text: str) -> str:
    """A key as a JSON object."""
    import pyarrow as pa

    if text.startswith("{"):
        return text
    if len(topic.key) == 1:
        (name,), kind = topic.key, topic.schema.live[0].type
        plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        return f"{{{json.dumps(name)}: {text if plain else json.dumps(text)}}}"
    try:
        values = json.loads(text)
    except ValueError:
        return text
    if not isinstance(values, list) or len(values) != len(topic.key):
        return text
    return json.dumps(dict(zip(topic.key, values, strict=True)))


def _limited(batches: Iterable[pa.RecordBatch], limit: int) -> Iterable[pa.RecordBatch]:
    for batch in batches:
        if limit <= 0:
            return
        yield batch.slice(0, limit)
        limit -= batch.num_rows
