"""``headrace topic``: create, list, show, change, delete; append, read and tail their rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.options import (
    Group,
    aligned,
    counted,
    is_log,
    json_option,
    listed,
    log_option,
    open_log,
    pairs,
    talk,
)
from headrace.cli.topic_append import append
from headrace.cli.topic_read import read, tail
from headrace.cli.topic_settings import delete, set_
from headrace.cli.topic_settings import described as kept
from headrace.errors import BadUsage

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog
    from headrace.model.schema import Column, Schema
    from headrace.model.topic import Topic

PARTITIONS_SHOWN = 12


@click.group(cls=Group)
def topic() -> None:
    """Create, list, show, change and delete topics; append, read and follow their rows."""


topic.add_command(append)
topic.add_command(read)
topic.add_command(tail)
topic.add_command(set_)
topic.add_command(delete)


@topic.command(
    short_help="Create a topic.",
    example='headrace topic create clicks "user bigint, url string, at timestamp" --key user',
)
@click.argument("name")
@click.argument("schema")
@click.option("--key", metavar="A,B", help="Columns whose rows stay together; by default none.")
@click.option("--event-time", metavar="COLUMN", help="Column of when it happened; by default none.")
@click.option(
    "--partitions",
    metavar="N",
    type=int,
    default=1,
    help="How many the rows are spread over; by default 1.",
)
@click.option(
    "--kind",
    type=click.Choice(["events", "changes"]),
    default="events",
    help="events are only added (default); changes have a _weight, +1 or -1.",
)
@click.option("--if-missing", is_flag=True, help="Be content if an equal topic is there already.")
@log_option
@json_option
def create(
    name: str,
    schema: str,
    key: str | None,
    event_time: str | None,
    partitions: int,
    kind: str,
    if_missing: bool,
    path: str,
    as_json: bool,
) -> None:
    """Create topic NAME with SCHEMA (and the log, if there is none).

    SCHEMA is columns in Spark's DDL, such as "user bigint not null, tags array<string>", or text,
    json or bytes for values that are taken as they are.
    """
    new_log = not is_log(path)
    with open_log(path, create=True) as log:
        if new_log and not as_json:
            talk(f"a new log was made in {path}")
        before = {found.name for found in log.topics()}
        made = log.create_topic(
            name,
            schema,
            key=listed(key),
            event_time=event_time,
            partitions=partitions,
            kind=kind,
            exist_ok=if_missing,
        )
        if as_json:
            click.echo(json.dumps(described(log, made), ensure_ascii=False))
            return
    if name in before:
        talk(f"topic '{name}' is there already, just like this")
        return
    about = counted(len(made.schema.live), "column")
    about += f", key {', '.join(made.key)}" if made.key else ", no key"
    talk(f"topic '{name}' created: {about}, {counted(made.partitions, 'partition')}")


@topic.command(short_help="List the topics.", example="headrace topic ls --json | jq '.[].name'")
@log_option
@json_option
def ls(path: str, as_json: bool) -> None:
    """List the topics: kind, rows, partitions, key and columns."""
    with open_log(path) as log:
        found = [described(log, one) for one in log.topics()]
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    if not found:
        talk("there are no topics yet; 'headrace topic create' makes one")
        return
    head = ("topic", "kind", "rows", "partitions", "key", "columns")
    rows = [
        (
            one["name"],
            one["kind"],
            f"{one['rows']:,}",
            f"{one['partitions']:,}",
            ", ".join(one["key"]) or "-",
            _shortened(one["ddl"] if one["value"] == "columns" else f"({one['value']})"),
        )
        for one in found
    ]
    click.echo(aligned([head, *rows], right=(2, 3)))


@topic.command(
    short_help="Show columns, key, partitions and versions.",
    example="headrace topic show clicks",
)
@click.argument("name")
@log_option
@json_option
def show(name: str, path: str, as_json: bool) -> None:
    """Show topic NAME: its columns, key and partitions, and how its schema came about."""
    with open_log(path) as log:
        found = log.topic(name)
        facts = described(log, found)
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    click.echo("\n".join(_shown(found, facts, path)))


@topic.command(
    short_help="Change the schema: add, widen, retire ...",
    example='headrace topic alter clicks --add "country string"',
)
@click.argument("name")
@click.option("--add", metavar='"NAME TYPE"', multiple=True, help="Add a column; may be repeated.")
@click.option("--widen", metavar="COLUMN=TYPE", multiple=True, help="Give it a wider type.")
@click.option("--nullable", metavar="COLUMN", multiple=True, help="Let it be null from now on.")
@click.option("--retire", metavar="COLUMN", multiple=True, help="New rows no longer have it.")
@click.option("--rename", metavar="OLD=NEW", multiple=True, help="Retire OLD and add NEW.")
@click.option(
    "--retype",
    metavar="COLUMN=TYPE",
    multiple=True,
    help="Give it any other type: starts a new generation.",
)
@log_option
@json_option
def alter(
    name: str,
    add: tuple[str, ...],
    widen: tuple[str, ...],
    nullable: tuple[str, ...],
    retire: tuple[str, ...],
    rename: tuple[str, ...],
    retype: tuple[str, ...],
    path: str,
    as_json: bool,
) -> None:
    """Give topic NAME its next schema version; rows already written stay as they are.

    Within a generation old rows are read as new ones: an added column is null in them, a widened
    one is converted. A new generation ends that: whoever follows the topic sees the change.
    """
    changes: dict[str, Any] = {
        "add": ", ".join(add),
        "widen": pairs(widen, "--widen"),
        "nullable": list(nullable),
        "retire": list(retire),
        "rename": pairs(rename, "--rename"),
        "retype": pairs(retype, "--retype"),
    }
    changes = {what: how for what, how in changes.items() if how}
    if not changes:
        raise BadUsage(
            "nothing to change is named",
            why="a topic is altered by --add, --widen, --nullable, --retire, --rename or --retype",
            fix="see 'headrace topic alter --help'",
        )
    with open_log(path) as log:
        before = log.topic(name)
        after = log.alter_topic(name, **changes)
        if as_json:
            click.echo(json.dumps(described(log, after), ensure_ascii=False))
            return
    schema = after.schema
    talk(f"topic '{name}' has schema version {schema.version}, generation {schema.generation}")
    for line in _notes(before.schema, schema):
        talk(f"  {line}")


def _notes(old: Schema, new: Schema) -> Iterator[str]:
    """Say what changed and what it means for rows."""
    from headrace.model.ddl import ddl_type

    for change, column, former in _differences(old, new):
        kind = ddl_type(column.type)
        if change == "added":
            yield f"'{column.name}' ({kind}) was added: it is null in older rows"
        elif change == "widened":
            yield f"'{column.name}' is now {kind}: older rows are converted when they are read"
        elif change == "nullable":
            yield f"'{column.name}' may be null from now on"
        elif change == "retired":
            yield (
                f"'{column.name}' was retired: new rows do not have it;"
                f" --columns {column.name} still reads the old values"
            )
        elif change == "renamed" and former is not None:
            yield (
                f"'{former}' is now '{column.name}': older rows have their values under"
                f" '{former}' (--columns {former},{column.name} reads both)"
            )
        elif change == "retyped":
            yield (
                f"'{column.name}' is now {kind}, in a new generation: older rows keep the old type,"
                " and whoever follows sees the change"
            )


def _differences(old: Schema, new: Schema) -> Iterator[tuple[str, Column, str | None]]:
    before = {column.id: column for column in old.columns}
    replaced = {c.renamed_from for c in new.columns if c.id not in before and c.renamed_from}
    names = {c.name for c in new.columns if c.id not in before}
    for column in new.columns:
        was = before.get(column.id)
        if was is None:
            if column.renamed_from:
                yield "renamed", column, column.renamed_from
            elif old.has(column.name):
                yield "retyped", column, None
            else:
                yield "added", column, None
        elif column.retired and not was.retired:
            if column.name not in replaced and column.name not in names:
                yield "retired", column, None
        elif column.type != was.type:
            yield "widened", column, None
        elif column.nullable != was.nullable:
            yield "nullable", column, None


# --- what is shown --------------------------------------------------------------------------------


def described(log: EmbeddedLog, found: Topic) -> dict[str, Any]:
    """Give what there is to say of a topic, for JSON."""
    starts, ends = log.starts(found.name), log.ends(found.name)
    facts = found.to_json()
    for private in ("id", "slot", "policy", "revision"):
        facts.pop(private, None)
    return facts | {
        "ddl": found.schema.ddl(),
        "rows": sum(ends) - sum(starts),
        "starts": starts,
        "ends": ends,
        "settings": asdict(found.policy),
        "dropped": log.dropped(found.name),
        "pressure": {group: asdict(one) for group, one in found.pressure.items()},
    }


def _shown(found: Topic, facts: dict[str, Any], path: str) -> Iterator[str]:
    yield f"topic {found.name}, in the log {path}"
    yield ""
    yield aligned(list(_summary(found, facts)), indent="  ")
    yield ""
    yield aligned([("column", "type", ""), *_columns(found)], indent="  ")
    yield ""
    yield from _partitions(facts["starts"], facts["ends"])
    if len(found.schemas) > 1:
        yield ""
        yield "  schema versions"
        yield from _versions(found.schemas)
    yield ""
    where = "" if path == "./data" else f" --log {path}"
    yield f"  see its first rows:  headrace topic read {found.name} --limit 5{where}"


def _summary(found: Topic, facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    kinds = {
        "events": "events: rows are only added",
        "changes": "changes: a row appears with _weight +1 and disappears with -1",
    }
    yield "kind", kinds[found.kind]
    if found.value != "columns":
        yield "values", f"{found.value}, taken as they are, with an optional key"
    rows = f"{facts['rows']:,} in {counted(found.partitions, 'partition')}"
    if found.policy.compact:
        rows += ", and fewer where it is compacted"
    yield "rows", rows
    if gone := sum(facts["starts"]):
        yield "", f"{gone:,} older ones are gone by retention"
    if found.value == "columns":
        if found.key:
            yield "key", f"{', '.join(found.key)}: equal keys are in one partition, in order"
        else:
            yield "key", "none: each append goes to the next partition"
    if found.event_time:
        yield "event time", found.event_time
    version = f"version {found.schema.version}"
    if found.schema.generation > 1:
        version += f", generation {found.schema.generation}"
    yield "schema", version
    yield from kept(found.policy, found.pressure)
    if facts["dropped"] or found.policy.flow == "drop":
        yield "dropped", f"{facts['dropped']:,} rows found no room"


def _columns(found: Topic) -> Iterator[tuple[str, str, str]]:
    from headrace.model.ddl import ddl_type

    for column in found.schema.live:
        notes = []
        if column.name in found.key:
            notes.append("key")
        if column.name == found.event_time:
            notes.append("event time")
        if not column.nullable:
            notes.append("not null")
        if column.renamed_from:
            notes.append(f"renamed from '{column.renamed_from}'")
        if column.comment:
            notes.append(column.comment)
        yield column.name, ddl_type(column.type), ", ".join(notes)
    for column in found.schema.columns:
        if column.retired:
            yield column.name, ddl_type(column.type), "retired: only older rows have it"


def _partitions(starts: list[int], ends: list[int]) -> Iterator[str]:
    if len(ends) > PARTITIONS_SHOWN:
        held = [end - start for start, end in zip(starts, ends, strict=True)]
        yield (
            f"  partitions hold {min(held):,} to {max(held):,} rows,"
            f" {sum(held) / len(held):,.1f} on average; --json lists them"
        )
        return
    rows = [
        (str(number), f"{start:,}", f"{end:,}")
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
    head = ("partition", "first offset", "next offset")
    yield aligned([head, *rows], indent="  ", right=(0, 1, 2))


def _versions(schemas: tuple[Schema, ...]) -> Iterator[str]:
    yield f"    1  {schemas[0].ddl()}"
    for old, new in pairwise(schemas):
        said = []
        for change, column, former in _differences(old, new):
            what = f"'{former}' to '{column.name}'" if former else f"'{column.name}'"
            said.append(f"{change} {what}")
        generation = f" (generation {new.generation})" if new.generation > old.generation else ""
        yield f"    {new.version}  {', '.join(said)}{generation}"


def _shortened(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
