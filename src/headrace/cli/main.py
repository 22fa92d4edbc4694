"""``headrace``: finds the command, runs it, and turns errors into words and exit codes.

A command is a file of this folder named after it, which has a click command of the same name. It is
imported only when it is called, and it imports what is heavy only when it runs: `headrace --help`
answers at once. Data goes to stdout, talk to stderr. The exit codes stand in `--help`.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Never

import click

from headrace.cli.options import io_failed, styled
from headrace.errors import BadUsage, HeadraceError, nearest

# Command -> the line that --help shows, so that --help imports none of them.
COMMANDS = {
    "aside": "Show, retry or drop rows that a target or a view did not take.",
    "capture": "Take the changes of a PostgreSQL database into the log.",
    "demo": "Show Headrace alive: a database, views of it, a page to watch.",
    "doctor": "Look whether all that a project needs is there.",
    "explain": "Explain an error by its code; without a code, list them all.",
    "group": "List, show, move, copy and delete consumer groups.",
    "init": "Make a small project that works.",
    "log": "Check a log, see what is in it, make a backup and restore it.",
    "plan": "Say what a project or a pipeline file would change.",
    "restart": "Start a part of the running project anew.",
    "run": "Run a project, or keep the views of one pipeline file right.",
    "sql": "Ask topics, tables and views in SQL.",
    "status": "Show how a project is.",
    "table": "Read a topic by key, as it is or was at a position.",
    "topic": "Create, list, show, change, append to, read and follow topics.",
    "verify": "Prove that what is derived equals its source.",
    "view": "List, show, read and explain views.",
    "wait": "Wait until a target, a view or a topic has what was written.",
}
HIDDEN = ("part",)
"""What nobody types: the supervisor does."""


class Commands(click.Group):
    """A group of commands that are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in (*COMMANDS, *HIDDEN):
            return None
        command = getattr(importlib.import_module(f"headrace.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or say which one may have been meant."""
        if args and not args[0].startswith("-") and not self.get_command(ctx, args[0]):
            names = self.list_commands(ctx)
            raise BadUsage(
                f"there is no command '{args[0]}'",
                why=f"the commands are {', '.join(names)}",
                fix=nearest(args[0], names),
            )
        return super().resolve_command(ctx, args)


EXIT_CODES = (
    "Exit codes: 0 done, 1 an error, 2 wrong usage, 3 done but some input was set aside, "
    "130 interrupted."
)


@click.group(
    cls=Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="headrace", message="%(prog)s %(version)s")
def cli() -> None:
    """Headrace keeps derived data correct and fresh, and proves it."""


def main() -> Never:
    """Run the command line and leave with its exit code."""
    for stream in range(3):  # what is closed must not become the number of a file of the log
        try:
            os.fstat(stream)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line; errors become words on stderr."""
    try:
        result = cli.main(arguments, prog_name="headrace", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        return fail(as_usage(error), 2)
    except HeadraceError as error:
        return fail(error, 2 if isinstance(error, BadUsage) else 1)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except OSError as error:  # --help onto a full disk
        return fail(io_failed(error), 1)


def as_usage(error: click.ClickException) -> BadUsage:
    """Give click's complaint the form of the catalogue."""
    fact = error.format_message().rstrip(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    fix = f"see '{context.command_path} --help'" if context else ""
    return BadUsage(fact[:1].lower() + fact[1:], fix=fix)


def fail(error: HeadraceError, code: int) -> int:
    """Say the error, in colour on a terminal."""
    head, _, rest = error.render().partition("\n")
    label, _, fact = head.partition(": ")
    click.echo(f"{styled(label, fg='red', bold=True)}: {fact}", err=True)
    if rest:
        click.echo(rest, err=True)
    return code
