"""``headrace view``: list views, show one, read its rows, explain what keeps it right."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.formats import chosen, destination, format_options
from headrace.cli.options import (
    Group,
    aligned,
    counted,
    json_option,
    log_option,
    open_log,
    talk,
)
from headrace.errors import UnknownTopic, nearest

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog


@click.group(cls=Group)
def view() -> None:
    """List views, show one, read its rows, explain what keeps it right."""


def described(log: EmbeddedLog) -> list[dict[str, Any]]:
    """All views of all pipelines of a log."""
    from headrace.model.ddl import ddl_type
    from headrace.pipelines.views.reading import own_columns, pipelines, topic_of

    found = []
    for pipeline, status in pipelines(log).items():
        for name, identity in status.views.items():
            topic = log.topic(topic_of(pipeline, name))
            arrow = topic.schema.arrow
            columns = [arrow.field(i) for i in own_columns(arrow)]
            found.append(
                {
                    "view": topic.name,
                    "through": status.through if identity else None,
                    "behind": status.behind(log),
                    "key": list(topic.key),
                    "changes": sum(log.ends(topic.name)),
                    "columns": {one.name: ddl_type(one.type) for one in columns},
                    "identity": identity,
                    "state": "kept" if identity else "ended",
                }
            )
    return found


def one_of(log: EmbeddedLog, name: str) -> dict[str, Any]:
    """A view by its name, with or without that of its pipeline."""
    views = described(log)
    same = [one for one in views if name in (one["view"], one["view"].partition(".")[2])]
    if len(same) == 1:
        return same[0]
    names = [one["view"] for one in views]
    raise UnknownTopic(
        f"there {'are several views' if same else 'is no view'} '{name}'",
        place=log.path,
        fix=nearest(name, names) or f"the views are {', '.join(names) or 'none'}",
    )


@view.command(short_help="List the views.", example="headrace view ls")
@log_option
@json_option
def ls(path: str, as_json: bool) -> None:
    """List the views: how far each is, its key and its columns."""
    with open_log(path) as log:
        found = described(log)
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    if not found:
        talk("there are no views yet; 'headrace run FILE' keeps those of a pipeline file")
        return
    head = ("view", "state", "through", "behind", "changes", "key")
    rows = [
        (
            one["view"],
            one["state"],
            str(one["through"] or "-"),
            f"{one['behind']:,}",
            f"{one['changes']:,}",
            ", ".join(one["key"]) or "-",
        )
        for one in found
    ]
    click.echo(aligned([head, *rows], right=(2, 3, 4)))


@view.command(short_help="Show one view.", example="headrace view show shop.revenue")
@click.argument("name")
@log_option
@json_option
def show(name: str, path: str, as_json: bool) -> None:
    """Show how far view NAME is, its columns and its key."""
    with open_log(path) as log:
        found = one_of(log, name)
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    click.echo(f"{found['view']}: {found['state']}, through {found['through']}")
    click.echo(f"behind its inputs by {counted(found['behind'], 'row')}")
    click.echo(f"key: {', '.join(found['key']) or 'the whole row'}")
    for column, kind in found["columns"].items():
        click.echo(f"  {column} {kind}")


@view.command(short_help="Read the rows of a view.", example="headrace view read shop.revenue")
@click.argument("name")
@click.option("--at", metavar="POSITION", type=int, help="As visible at this position of the log.")
@click.option("--after", metavar="TOKEN", help="Wait until it has this: a position, or lsn:X/Y.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    help="With --after or --at: how long to wait.",
)
@format_options()
@log_option
@json_option
def read(
    name: str,
    at: int | None,
    after: str | None,
    timeout: float,
    form: str | None,
    output: str | None,
    path: str,
    as_json: bool,
) -> None:
    """Print the rows of view NAME: in the order of its key, a few at a time, if it has one."""
    from headrace.cli.output import row_writer, write_all
    from headrace.runtime.tokens import rows as rows_of
    from headrace.runtime.tokens import wait_topic

    form = chosen(form, output, as_json=as_json)
    with open_log(path) as log, destination(output) as stream:
        topic = log.topic(one_of(log, name)["view"])
        if after is not None and at is None:
            at = wait_topic(log, topic.name, after, timeout)
        if topic.key:
            reader = log.table(topic.name).scan(at=at, timeout=timeout)
            own = reader.schema.names[:-1]  # the last is `_position`
            schema, rows = reader.schema.remove(len(own)), (batch.select(own) for batch in reader)
        else:
            whole = rows_of(log, topic.name, at=at, timeout=timeout)
            schema, rows = whole.schema, iter(whole.to_batches())
        write_all(row_writer(form, topic, schema, stream), rows, log.position)


@view.command(
    short_help="Explain what keeps a view right.",
    example="headrace view explain shop.py revenue",
)
@click.argument("file")
@click.argument("name")
@log_option
@json_option
def explain(file: str, name: str, path: str, as_json: bool) -> None:
    """Show what view NAME of the pipeline FILE is made of, what it keeps, what a change costs."""
    from headrace.pipelines.files import load_pipeline
    from headrace.pipelines.views.define import define_views
    from headrace.pipelines.views.explain import as_text, explained

    with open_log(path) as log:
        pipeline = load_pipeline(file)
        defined = define_views(pipeline, log, None, topics=False)
    found = defined.by_name.get(name)
    if found is None:
        raise UnknownTopic(
            f"there is no view '{name}' in {file}", place=file, fix=nearest(name, defined.by_name)
        )
    streams = {one.name: one.topic for one in pipeline.inputs.values() if one.kind == "stream"}
    lines = explained(found.node, streams)
    if as_json:
        click.echo(json.dumps([line.to_json() for line in lines], ensure_ascii=False))
        return
    for line in as_text(lines):
        click.echo(line)
