"""``headrace aside``: rows that a target or a view did not take, and what to do about them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.options import (
    Group,
    aligned,
    counted,
    json_option,
    log_option,
    open_log,
    outcome,
    project_option,
    several,
    talk,
)
from headrace.cli.verify import log_path
from headrace.errors import UnknownAside, nearest

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog


@click.group(cls=Group)
def aside() -> None:
    """Show rows that a target or a view did not take, try them again, or give them up."""


def found_in(log: EmbeddedLog) -> list[dict[str, Any]]:
    """All rows set aside: by followers (`NAME` is the follower), and by views (the pipeline)."""
    from headrace.derived import aside as of_followers
    from headrace.pipelines.views.reading import pipelines, rows_of

    found = [
        {"by": name, **one}
        for name in of_followers.followers(log)
        for one in of_followers.rows(log, name)
    ]
    topics = {topic.name for topic in log.topics()}
    for pipeline in pipelines(log):
        if f"{pipeline}._aside" in topics:
            found += [
                {"by": pipeline, "table": one["view"], "key": None, "reason": one["reason"],
                 "row": one["row"]}
                for one in rows_of(log, pipeline, "_aside", None).to_pylist()
            ]  # fmt: skip
    return found


def chosen(log: EmbeddedLog, name: str, table: str, key: str | None) -> list[dict[str, Any]]:
    """Rows that a follower has set aside; an error that says which there are."""
    from headrace.derived import aside as of_followers

    known = of_followers.followers(log)
    if name not in known:
        raise UnknownAside(
            f"there is no follower '{name}' that has set rows aside",
            place=log.path,
            fix=nearest(name, known) or f"the followers are {', '.join(known) or 'none'}",
        )
    return of_followers.one_of(log, name, table, key)


def of_rows(key: bool) -> Callable[[Any], Any]:
    """The arguments and options of a command on rows that a follower has set aside."""
    return several(
        click.argument("name"),
        click.argument("table"),
        click.argument("key", required=key),
        project_option,
        log_option,
        json_option,
    )


@aside.command(short_help="List rows set aside.", example="headrace aside ls")
@project_option
@log_option
@json_option
def ls(folder: str, path: str, as_json: bool) -> None:
    """List the rows that targets and views did not take."""
    with open_log(log_path(folder, path)) as log:
        found = found_in(log)
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    if not found:
        talk("no row is set aside")
        return
    head = ("by", "table", "key", "reason")
    rows = [(one["by"], one["table"], one["key"] or "-", one["reason"]) for one in found]
    click.echo(aligned([head, *rows]))


@aside.command(
    short_help="Show one row set aside.",
    example="""headrace aside show shop/main orders '{"id": 7}'""",
)
@of_rows(key=True)
def show(name: str, table: str, key: str, folder: str, path: str, as_json: bool) -> None:
    """Show the row of TABLE with KEY (JSON) that follower NAME has set aside, with its reason."""
    with open_log(log_path(folder, path)) as log:
        (found,) = chosen(log, name, table, key)
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    click.echo(f"{found['table']} {found['key']}: {found['reason']} ({found['code']})")
    click.echo(f"row: {found['row'] or 'it was to be deleted'}")
    click.echo(f"at position {found['position']}, through {found['through']}")


@aside.command(
    short_help="Try rows again.",
    example="""headrace aside retry shop/main orders '{"id": 7}'""",
)
@of_rows(key=False)
def retry(**given: Any) -> None:
    """Have follower NAME apply what KEY (JSON; without: every key set aside) of TABLE is now."""
    _replace("asked", "the follower does it now, or when it next runs", **given)


@aside.command(
    short_help="Give rows up.",
    example="""headrace aside drop shop/main orders '{"id": 7}'""",
)
@of_rows(key=False)
def drop(**given: Any) -> None:
    """Forget that KEY (JSON; without: every key) of TABLE is missing; it comes when it changes."""
    _replace("gone", "dropped", **given)


def _replace(
    what: str,
    said: str,
    *,
    name: str,
    table: str,
    key: str | None,
    folder: str,
    path: str,
    as_json: bool,
) -> None:
    from headrace.derived.aside import replace

    with open_log(log_path(folder, path)) as log:
        found = chosen(log, name, table, key)
        replace(log, name, found, **{what: True})
    facts = {"dropped" if what == "gone" else what: len(found)}
    outcome(facts, f"{counted(len(found), 'row')}: {said}", as_json=as_json)
