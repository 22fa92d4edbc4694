"""``headrace plan``: what a pipeline file would change, before anything starts."""

from __future__ import annotations

import json

import click

from headrace.cli.options import (
    Command,
    aligned,
    counted,
    json_option,
    lasting,
    log_option,
    open_log,
    talk,
)


@click.command(
    cls=Command,
    short_help="Say what a pipeline file would change.",
    example="headrace plan shop.py",
)
@click.argument("file")
@log_option
@json_option
def plan(file: str, path: str, as_json: bool) -> None:
    """Say which views of FILE go on, which are built and why, and how long that should take."""
    from headrace.pipelines.files import load_pipeline
    from headrace.pipelines.views.plan import planned

    with open_log(path) as log:
        found = planned(load_pipeline(file), log)
    if as_json:
        click.echo(json.dumps(found.to_json(), ensure_ascii=False))
        return
    rows = [(one.name, one.action, one.why) for one in found.views]
    click.echo(aligned([("view", "action", "why"), *rows]))
    if found.kept:
        talk(f"{counted(found.kept, 'operator')} below them keep their state")
    if found.rows:
        about = lasting(found.seconds) if found.seconds else "an unknown time"
        talk(f"building reads {counted(found.rows, 'row')}: about {about}")
