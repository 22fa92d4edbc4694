"""``headrace verify``: prove that what is derived equals its source; repair what does not."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.options import (
    Command,
    Progress,
    aligned,
    counted,
    json_option,
    lasting,
    log_option,
    open_log,
    project_option,
    talk,
)
from headrace.errors import BadUsage

if TYPE_CHECKING:
    from headrace.pipelines.pipeline import Pipeline
    from headrace.runtime.verify import Known, Result

SHOWN = 20
"""Keys that are shown for the eye; --json has all that are named."""


@click.command(
    cls=Command,
    short_help="Prove that what is derived equals its source.",
    example="headrace verify shop/main --repair",
)
@click.argument("name", required=False)
@click.option("--table", metavar="T", help="Only this table of a follower.")
@click.option(
    "--against",
    type=click.Choice(["log", "source", "batch", "all"]),
    help="By default log for a follower, source for a captured table, batch for a view.",
)
@click.option("--repair", is_flag=True, help="Rewrite the keys that differ in the target.")
@click.option("--limit", metavar="N", type=click.IntRange(0), default=100, show_default=True,
              help="So many keys are named; all are counted.")  # fmt: skip
@click.option("--rate", metavar="ROWS", type=click.FloatRange(1), help="At most so many a second.")
@click.option("--file", metavar="FILE", help="The pipeline file; by default those of the project.")
@click.option("--last", "show_last", is_flag=True, help="Only show what was found the last time.")
@project_option
@log_option
@json_option
def verify(
    name: str | None,
    table: str | None,
    against: str | None,
    repair: bool,
    limit: int,
    rate: float | None,
    file: str | None,
    show_last: bool,
    folder: str,
    path: str,
    as_json: bool,
) -> None:
    """Verify NAME: a follower (shop/main), a captured table's topic, or a view's (shop.revenue).

    Both sides are read in the order of their keys, at one position, while everything goes on.
    Keys that differ are named, with both rows and the entries of the log that touched them. The
    exit code is 1 if there are any left.
    """
    from headrace.runtime.verify import Options, last
    from headrace.runtime.verify import verify as run

    if (name is None) != show_last:
        raise BadUsage("name what to verify, or ask for --last", fix="headrace verify shop/main")
    with open_log(log_path(folder, path)) as log:
        if show_last:
            _show_last([*last(log).values()], as_json)
            return
        assert name is not None
        known = known_in(folder, file, needs_file="/" in name)
        progress = Progress()

        def report(now: Any) -> None:
            progress.show(lambda seconds: _text(now))

        def done(result: Result) -> None:
            progress.clear()
            _show(result)

        results = run(
            log, name, known, against=against, table=table, repair=repair,
            options=Options(limit, rate) if as_json else Options(limit, rate, report, done),
        )  # fmt: skip
    if as_json:
        click.echo(json.dumps([one.to_json() for one in results], ensure_ascii=False))
    if any(one.differing for one in results):
        raise click.exceptions.Exit(1)


def _text(now: Any) -> str:
    rate = now.rows / now.seconds if now.seconds else 0.0
    text = f"{now.table}: {now.rows:,} rows, {rate:,.0f} a second"
    left = (now.of - now.rows) / rate if rate and now.of > now.rows else 0.0
    return f"{text}, about {lasting(left)} left" if left else text


def log_path(folder: str, path: str) -> str:
    """The log of the project, where there is one and no other is named."""
    from headrace.runtime.project import FILE, find_project

    context = click.get_current_context()
    said = context.get_parameter_source("path") is not click.core.ParameterSource.DEFAULT
    if said or not os.path.isfile(os.path.join(folder, FILE)):
        return path
    return str(find_project(folder).log)


def known_in(folder: str, file: str | None, *, needs_file: bool) -> Known:
    """What there is to verify: of a pipeline file, else of the project."""
    from headrace.runtime.project import FILE, find_project
    from headrace.runtime.verify import Known

    files = [file] if file else []
    dsns: dict[str, str] = {}
    kept: dict[str, Any] = {}
    if not file and os.path.isfile(os.path.join(folder, FILE)):
        project = find_project(folder)
        files = [str(one) for one in project.pipelines]
        dsns = {one.name: one.dsn for one in project.captures}
        kept = {name: one.to_kept() for name, one in project.followers().items()}
    loaded: dict[str, Pipeline] = {}

    def pipeline(name: str) -> Pipeline | None:
        from headrace.pipelines.files import load_pipeline

        while name not in loaded and files:
            found = load_pipeline(files.pop(0))
            loaded[found.name] = found
        return loaded.get(name)

    if needs_file and not kept:
        pipeline("")  # reads them all
        kept = {one.follower: one for p in loaded.values() for one in p.kept.values()}
    return Known(kept, pipeline, dsns)


def _show(result: Result) -> None:
    """For the eye: what differs on stdout, the verdict on stderr."""
    for one in result.differences[:SHOWN] if result.differing else []:
        click.echo(f"{one.kind} {json.dumps(one.key, ensure_ascii=False)}")
        for label, row in (("expected", one.expected), ("found", one.found)):
            if row is not None:
                click.echo(f"  {label:<8} {json.dumps(row, ensure_ascii=False)}")
        if one.positions:
            click.echo(f"  touched at {', '.join(map(str, one.positions))}")
    more = result.differing - min(len(result.differences), SHOWN)
    if result.differing and more > 0:
        click.echo(f"and {counted(more, 'more key')}")
    where = f"{result.name} {result.table}".strip()
    said = f"{where}: verified against the {result.against} through {result.through}, "
    said += f"{counted(result.rows, 'row')} in {lasting(result.seconds)}"
    if result.repaired:
        said += f", {counted(result.repaired, 'key')} repaired"
    if result.aside:
        said += f", {counted(result.aside, 'row')} set aside (headrace aside ls)"
    differ = "1 key differs" if result.differing == 1 else f"{result.differing:,} keys differ"
    talk(f"{said}: {differ if result.differing else 'equal'}")


def _show_last(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(rows, ensure_ascii=False))
        return
    if not rows:
        talk("nothing was verified yet: headrace verify NAME")
        return
    names = ("name", "table", "against", "through", "rows", "differing", "at")
    cells = [tuple(f"{row[n]:,}" if n == "rows" else str(row[n]) for n in names) for row in rows]
    click.echo(aligned([names, *cells], right=(3, 4, 5)))
