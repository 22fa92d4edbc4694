"""``headrace plan``: what a project or a pipeline file would change, before anything starts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from headrace.cli.options import (
    Command,
    aligned,
    counted,
    json_option,
    lasting,
    log_option,
    open_log,
    project_option,
    talk,
)

if TYPE_CHECKING:
    from headrace.pipelines.views.plan import Plan


@click.command(
    cls=Command,
    short_help="Say what a project or a pipeline file would change.",
    example="headrace plan",
)
@click.argument("file", required=False)
@project_option
@log_option
@json_option
def plan(file: str | None, folder: str, path: str, as_json: bool) -> None:
    """Say which views of the project, or of FILE, go on, which are built and why, and how long.

    For a project also what becomes of what is kept in other databases.
    """
    if file is None:
        _of_project(folder, as_json=as_json)
        return
    from headrace.pipelines.files import load_pipeline
    from headrace.pipelines.views.plan import planned

    with open_log(path) as log:
        found = planned(load_pipeline(file), log)
    if as_json:
        click.echo(json.dumps(found.to_json(), ensure_ascii=False))
    else:
        _show(found)


def _of_project(folder: str, *, as_json: bool) -> None:
    from headrace.runtime.plan import project_plan
    from headrace.runtime.project import find_project

    project = find_project(folder)
    with open_log(str(project.log), create=True) as log:
        plans = project_plan(project, log)
    if as_json:
        click.echo(json.dumps([one.to_json() for one in plans], ensure_ascii=False))
    for one in [] if as_json else plans:
        click.echo(f"{one.file}:")
        if one.error is not None:
            click.echo(one.error.render())
        if one.plan is not None:
            _show(one.plan)
        if one.kept:
            rows = [(step.name, step.action, step.why) for step in one.kept]
            click.echo(aligned([("kept", "action", "why"), *rows]))
    if any(one.error for one in plans):
        raise click.exceptions.Exit(1)


def _show(found: Plan) -> None:
    rows = [(one.name, one.action, one.why) for one in found.views]
    click.echo(aligned([("view", "action", "why"), *rows]))
    if found.kept:
        talk(f"{counted(found.kept, 'operator')} below them keep their state")
    if found.rows:
        about = f": about {lasting(found.seconds)}" if found.seconds else ""
        talk(f"building reads {counted(found.rows, 'row')}{about}")
