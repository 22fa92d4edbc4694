"""What the commands share: how they are declared, how they open a log, how they say numbers.

A command is declared with an example; with `--json` its errors are JSON objects on stderr too.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

import click

from headrace.errors import BadUsage, HeadraceError, IoFailed, NotALog, nearest

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog

DEFAULT_LOG = "./data"
SET_ASIDE = 3
"""The exit code that says: done, but some of the input was set aside."""

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class Command(click.Command):
    """A command with an example in its help, whose errors are JSON when its output is."""

    def __init__(self, *args: Any, example: str, **kwargs: Any) -> None:
        """`example` is what somebody could type."""
        kwargs["epilog"] = f"\b\nExample:\n  {example}"
        super().__init__(*args, **kwargs)

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Read the arguments."""
        wants_json = "--json" in args
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            if not wants_json:
                raise
            from headrace.cli.main import as_usage

            _fail(as_usage(error))

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever read our output has seen enough
            _forget_output()
            raise click.exceptions.Exit(0) from None  # click would make exit code 1 of it
        except (HeadraceError, OSError) as error:
            problem = error if isinstance(error, HeadraceError) else io_failed(error)
            if ctx.params.get("as_json"):
                _fail(problem)
            raise problem from None


def io_failed(error: OSError) -> IoFailed:
    """A call of the command itself: the log names its own. Mostly the output is on a full disk."""
    if error.filename is None:
        _forget_output()
    place = str(error.filename or "standard output")
    return IoFailed(error.strerror or str(error), place=place, errno=error.errno)


def _forget_output() -> None:
    """What is still buffered goes nowhere, or Python would try once more at the end."""
    if sys.stdout is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _fail(error: HeadraceError) -> NoReturn:
    click.echo(json.dumps({"error": error.to_json()}, ensure_ascii=False), err=True)
    raise click.exceptions.Exit(2 if isinstance(error, BadUsage) else 1)


class Group(click.Group):
    """A group that says which command may have been meant."""

    command_class: type[click.Command] = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or name the nearest."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            names = self.list_commands(ctx)
            raise BadUsage(
                f"there is no command '{args[0]}' in '{ctx.command_path}'",
                why=f"the commands are {', '.join(names)}",
                fix=nearest(args[0], names) or f"see '{ctx.command_path} --help'",
            )
        return super().resolve_command(ctx, args)


def several(*options: Callable[[Any], Any]) -> Callable[[Decorated], Decorated]:
    """Add several options, which `--help` shows in this order."""

    def add(command: Decorated) -> Decorated:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def log_option(command: Decorated) -> Decorated:
    """Add `--log PATH`."""
    return click.option(
        "--log",
        "path",
        metavar="PATH",
        envvar="HEADRACE_LOG",
        default=DEFAULT_LOG,
        help=f"Folder of the log; by default $HEADRACE_LOG, else {DEFAULT_LOG}.",
    )(command)


def json_option(command: Decorated) -> Decorated:
    """Add `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def project_option(command: Decorated) -> Decorated:
    """Add `--project DIR`."""
    return click.option(
        "--project",
        "folder",
        metavar="DIR",
        envvar="HEADRACE_PROJECT",
        default=".",
        help="Folder of the project; by default $HEADRACE_PROJECT, else this one.",
    )(command)


def stdin() -> IO[bytes]:
    """Give standard input, as bytes."""
    return _opened(sys.stdin, "input").buffer


def stdout() -> IO[bytes]:
    """Give standard output, as bytes."""
    return _opened(sys.stdout, "output").buffer


def _opened(stream: TextIO | None, name: str) -> TextIO:
    if stream is None:
        raise BadUsage(f"standard {name} is closed", fix=f"give the command an {name}")
    return stream


def is_log(path: str) -> bool:
    """Say whether there is a log in the folder, without opening it."""
    try:
        return stat.S_ISREG(os.stat(os.path.join(path, "headrace.json")).st_mode)
    except OSError as error:
        return isinstance(error, PermissionError)  # who opens it says what is wrong


def open_log(path: str, *, create: bool = False, **settings: Any) -> EmbeddedLog:
    """Open the log; only a command that makes topics makes a folder into one."""
    import headrace

    if not create and "://" not in path and not is_log(path):
        raise no_log(path)
    try:
        return headrace.connect(path, create=create, **settings)
    except NotADirectoryError:
        raise no_log(path) from None


def no_log(path: str) -> NotALog:
    """Say that there is no log, and what to do about it."""
    fix = (
        "say which folder with --log PATH or HEADRACE_LOG; 'headrace topic create' makes a new log"
    )
    if not os.path.exists(path):
        return NotALog(
            f"there is no log in {path}", place=path, why="the folder does not exist", fix=fix
        )
    if not os.path.isdir(path):
        why = "it is a file, and a log is a folder"
        return NotALog(f"{path} is not a log", place=path, why=why, fix=fix)
    names = sorted(os.listdir(path))
    why = f"the folder holds other things, such as '{names[0]}'" if names else "the folder is empty"
    return NotALog(f"there is no log in {path}", place=path, why=why, fix=fix)


def listed(text: str | None) -> list[str]:
    """Split a list with commas: "a, b" is a and b."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def pairs(values: Iterable[str], option: str, example: str = "a=bigint") -> dict[str, str]:
    """Split what comes as NAME=VALUE."""
    found: dict[str, str] = {}
    for value in values:
        name, sign, rest = value.partition("=")
        if not sign or not name.strip() or not rest.strip():
            raise BadUsage(f"'{option} {value}' is not NAME=VALUE", fix=f"e.g. {option} {example}")
        if name.strip() in found:
            raise BadUsage(f"{option} names '{name.strip()}' twice", fix="name it once")
        found[name.strip()] = rest.strip()
    return found


# --- words ----------------------------------------------------------------------------------------


def styled(text: str, **style: Any) -> str:
    """Give text in colour, unless NO_COLOR says no (https://no-color.org)."""
    return text if os.environ.get("NO_COLOR") else click.style(text, **style)


def talk(text: str) -> None:
    """Say something that is not data."""
    click.echo(text, err=True)


def outcome(facts: Mapping[str, object], words: str, *, as_json: bool) -> None:
    """Say what a command has done: facts, or words."""
    if as_json:
        click.echo(json.dumps(facts))
    else:
        talk(words)


def ask(said: str, question: str, *, as_json: bool) -> None:
    """Ask before something is gone for good; the command ends if the answer is no."""
    if as_json:
        raise BadUsage("with --json nothing is asked", fix="add --yes")
    talk(said)
    click.confirm(question, abort=True, err=True)


def counted(number: int, thing: str, things: str = "") -> str:
    """Say "1 row", "1,000 rows"."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def sized(count: float) -> str:
    """Say a number of bytes: "1.2 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def lasting(seconds: float) -> str:
    """Say a time span: "12 ms", "0.4 s", "3 min 20 s"."""
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def aligned(rows: Sequence[tuple[str, ...]], *, indent: str = "", right: Iterable[int] = ()) -> str:
    """Set rows of cells in columns; those in `right` are set to the right."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    flush = frozenset(right)
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in flush else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def in_place(text: str) -> None:
    """Show a line on stderr in the place of the one before."""
    width = shutil.get_terminal_size().columns - 1  # a line that wraps cannot be taken away
    click.echo(f"\r\x1b[K{text[:width]}", err=True, nl=False)


class Progress:
    """A line on stderr that shows how far a long work is; on a terminal only."""

    EVERY_SECONDS = 0.1

    def __init__(self) -> None:
        """Start the clock."""
        self._clock = time.monotonic
        self._began = self._last = self._clock()
        self._shown = False
        self.on = sys.stderr.isatty()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._clock() - self._began

    def show(self, text: Callable[[float], str]) -> None:
        """Show `text(seconds since the start)`, not more than ten times a second."""
        if not self.on:
            return
        now = self._clock()
        if now - self._last >= self.EVERY_SECONDS:
            self._last = now
            self._shown = True
            in_place(text(now - self._began))

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            self._shown = False
            in_place("")
