"""``headrace restart``: start one part of a running project anew."""

from __future__ import annotations

import click

from headrace.cli.options import Command, json_option, outcome, project_option


@click.command(
    cls=Command,
    short_help="Start a part of the running project anew.",
    example="headrace restart pipelines",
)
@click.argument("part")
@project_option
@json_option
def restart(part: str, folder: str, as_json: bool) -> None:
    """Stop PART of the running project and start it anew; also one that is stopped by an error.

    `pipelines` reads its files again: so a changed definition takes effect.
    """
    from headrace.runtime.control import ask
    from headrace.runtime.project import find_project

    answer = ask(find_project(folder), "restart", part)
    words = f"{part} is started anew; 'headrace status' shows it"
    outcome({"part": part, "was": answer["pid"]}, words, as_json=as_json)
