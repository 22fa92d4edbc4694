"""``headrace wait``: read your own writes in a target, a view or a topic that one reads oneself."""

from __future__ import annotations

import json

import click

from headrace.cli.options import Command, json_option, log_option, open_log, project_option
from headrace.cli.verify import known_in, log_path


@click.command(
    cls=Command,
    short_help="Wait until a target, a view or a topic has what was written.",
    example="headrace wait shop/main lsn:0/16B3748 && psql -c 'select * from revenue' views",
)
@click.argument("name")
@click.argument("token")
@click.option("--timeout", metavar="SECONDS", type=click.FloatRange(0), default=5.0,
              show_default=True, help="How long to wait.")  # fmt: skip
@click.option("--file", metavar="FILE", help="The pipeline file; by default those of the project.")
@project_option
@log_option
@json_option
def wait(
    name: str, token: str, timeout: float, file: str | None, folder: str, path: str, as_json: bool
) -> None:
    """Wait until NAME, a follower (shop/main) or a topic, has TOKEN: a position, or lsn:X/Y.

    A token is what `append` says, or what the database says behind a commit by
    `select pg_current_wal_lsn()`. When the time is over, the error says how far behind it is.
    """
    from headrace.runtime.tokens import wait_for

    with open_log(log_path(folder, path)) as log:
        kept = known_in(folder, file, needs_file="/" in name).kept
        at = wait_for(log, name, kept, token, timeout)
    click.echo(json.dumps({"name": name, "position": at}) if as_json else at)
