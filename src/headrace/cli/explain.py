"""``headrace explain``: the catalogue of errors."""

from __future__ import annotations

import json

import click

from headrace.cli.options import Command, json_option
from headrace.errors import BadUsage, HeadraceError, catalogue, nearest


@click.command(cls=Command, example="headrace explain HR-LOG-006")
@click.argument("code", required=False)
@json_option
def explain(code: str | None, as_json: bool) -> None:
    """Explain the error CODE, such as HR-LOG-006; without a CODE, list them all."""
    errors = catalogue()
    if code is None:
        listing(errors, as_json)
        return
    error = errors.get(code.upper())
    if error is None:
        raise BadUsage(
            f"there is no error '{code}'",
            why="codes look like HR-LOG-006",
            fix=f"{nearest(code, errors)} 'headrace explain' lists them all".strip(),
        )
    if as_json:
        click.echo(json.dumps(entry(error)))
        return
    click.echo(f"{error.code}: {error.title}  ({error.__name__})\n")
    click.echo(click.wrap_text(error.why, 88, "why: ", "     "))
    click.echo(click.wrap_text(error.fix, 88, "fix: ", "     "))


def listing(errors: dict[str, type[HeadraceError]], as_json: bool) -> None:
    """List all errors, a line each."""
    if as_json:
        click.echo(json.dumps([entry(error) for error in errors.values()]))
        return
    for code, error in errors.items():
        click.echo(f"{code}  {error.title}")


def entry(error: type[HeadraceError]) -> dict[str, str]:
    """Give an error of the catalogue as a JSON object."""
    return {
        "code": error.code,
        "name": error.__name__,
        "title": error.title,
        "why": error.why,
        "fix": error.fix,
    }
