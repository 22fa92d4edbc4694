"""``headrace doctor``: whether all that a project needs is there."""

from __future__ import annotations

import json

import click

from headrace.cli.options import Command, json_option, project_option, styled

COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


@click.command(
    cls=Command,
    short_help="Look whether all that a project needs is there.",
    example="headrace doctor",
)
@click.option("--quick", is_flag=True, help="Do not start Spark.")
@project_option
@json_option
def doctor(quick: bool, folder: str, as_json: bool) -> None:
    """Look at Python, Java, Spark, folders, databases, targets and ports, and say what helps.

    It only looks. Exit code 1 if something would keep a part from running.
    """
    from headrace.runtime.doctor import examined
    from headrace.runtime.project import find_project

    found = []
    for one in examined(find_project(folder), quick=quick):
        found.append(one)
        if not as_json:
            level = styled(f"{one.level:7}", fg=COLOURS[one.level])
            click.echo(f"{level}  {one.what}: {one.found}")
            if one.fix:
                click.echo(f"           fix: {one.fix}")
    if as_json:
        click.echo(json.dumps([one.to_json() for one in found], ensure_ascii=False))
    if any(one.level == "error" for one in found):
        raise click.exceptions.Exit(1)
