"""``headrace topic append``: rows from a pipe or a file into a topic."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

import click

from headrace.cli.formats import BINARY, ENDINGS
from headrace.cli.options import (
    SET_ASIDE,
    Command,
    Progress,
    counted,
    json_option,
    log_option,
    open_log,
    stdin,
    talk,
)
from headrace.errors import BadInputLine, BadUsage, UsageError

if TYPE_CHECKING:
    from headrace.cli.input import BadLine, Taken
    from headrace.log.embedded.log import EmbeddedLog


@click.command(
    cls=Command,
    short_help="Append rows from a pipe or a file.",
    example="""echo '{"user": 1, "url": "/"}' | headrace topic append clicks""",
)
@click.argument("name")
@click.option(
    "--format",
    "form",
    type=click.Choice(["ndjson", "csv", "arrow", "parquet", "lines"]),
    help="What comes in: a JSON object a line, CSV with a head, an Arrow IPC stream, a Parquet "
    "file, or bare lines, for topics of text, json or bytes. By default what the ending of FILE "
    "says, else ndjson.",
)
@click.option("--file", "source", metavar="FILE", help="Read FILE; by default, standard input.")
@click.option(
    "--batch",
    "lines_max",
    metavar="N",
    type=click.IntRange(1, 1_000_000),
    default=1000,
    help="Lines in one entry, at the most; by default 1000, fewer when no more wait to be read.",
)
@click.option(
    "--aside",
    metavar="FILE",
    help="Add bad lines to FILE as NDJSON: line, code, reason, text; by default, to stderr.",
)
@click.option("--strict", is_flag=True, help="Stop at the first bad line; by default, go on.")
@log_option
@json_option
@click.pass_context
def append(
    ctx: click.Context,
    name: str,
    form: str | None,
    source: str | None,
    lines_max: int,
    aside: str | None,
    strict: bool,
    path: str,
    as_json: bool,
) -> None:
    """Append rows to topic NAME, durably; bad lines are set aside with their number and reason.

    The exit code is 3 if lines were set aside.
    """
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open_log(path))
        log.topic(name)
        stream = stack.enter_context(_opened(source))
        bad_lines = stack.enter_context(_aside(aside))
        appending = _Appending(log, name, bad_lines, strict=strict)
        appending.source = source or "standard input"
        if form is None:
            form = ENDINGS.get(os.path.splitext(source or "")[1], "ndjson")
        try:
            appending.run(form, stream, lines_max)
        finally:
            appending.progress.clear()
            appending.summary(aside, as_json=as_json)
        if appending.bad:
            ctx.exit(SET_ASIDE)


@contextlib.contextmanager
def _opened(source: str | None) -> Iterator[IO[bytes]]:
    if source in (None, "-"):
        yield stdin()
        return
    try:
        file = open(source, "rb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise BadUsage(f"--file {source}: {error.strerror}", fix="name a file to read") from None
    with file:
        yield file


@contextlib.contextmanager
def _aside(aside: str | None) -> Iterator[Callable[[BadLine], None]]:
    """Where bad lines go."""
    if aside is None:
        yield lambda bad: talk(
            f"line {bad.number} set aside [{bad.code}]: {bad.reason}\n  {bad.text}"
        )
        return
    try:
        # half a surrogate, which JSON may name and UTF-8 has not, is written as JSON names it
        file = open(aside, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    except OSError as error:
        fix = "name a file that can be written"
        raise BadUsage(f"--aside {aside}: {error.strerror}", fix=fix) from None
    try:
        with file:
            yield lambda bad: print(
                json.dumps(bad.to_json(), ensure_ascii=False), file=file, flush=True
            )
    except OSError as error:
        error.filename = error.filename or aside
        raise


class _Appending:
    """One run of the command, and what it has come to."""

    def __init__(
        self, log: EmbeddedLog, name: str, bad_lines: Callable[[BadLine], None], *, strict: bool
    ) -> None:
        self.log = log
        self.name = name
        self.set_aside = bad_lines
        self.strict = strict
        self.rows = self.entries = self.bad = self.read = self.position = 0
        self.moved = False
        self.unit = "line"
        self.source = ""
        self.progress = Progress()

    def run(self, form: str, stream: IO[bytes], lines_max: int) -> None:
        """Append everything the stream gives."""
        from headrace.cli.input import (
            ArrowIntake,
            LineIntake,
            arrow_batches,
            csv_lines,
            lines_of,
            parquet_batches,
        )

        if form in BINARY:
            self.unit = "row"
            arrow = form == "arrow"
            for batch in arrow_batches(stream) if arrow else parquet_batches(stream, lines_max):

                def take_rows(upto: int | None = None, batch: Any = batch) -> Taken:
                    first = self.read + 1
                    rows = batch if upto is None else batch.slice(0, upto - first)
                    return ArrowIntake(self.log.topic(self.name))(rows, first)

                self._append(take_rows)
                self.read += batch.num_rows
            return
        head: list[str] = []
        if form == "csv":
            head, groups = csv_lines(stream, self.log.topic(self.name), lines_max)
        else:
            groups = lines_of(stream, lines_max=lines_max, blank=form == "lines")
        intake = LineIntake(self.log.topic(self.name), form, head)
        for lines in groups:

            def take(upto: int | None = None, lines: Any = lines) -> Taken:
                nonlocal intake
                topic = self.log.topic(self.name)
                if topic is not intake.topic:
                    intake = LineIntake(topic, form, head)
                return intake([line for line in lines if upto is None or line.number < upto])

            self._append(take)
            self.read = lines[-1].number

    def _append(self, take: Callable[..., Taken]) -> None:
        taken = take()
        first_bad = taken.bad[0] if taken.bad else None
        if self.strict and first_bad is not None:
            self._store(take(upto=first_bad.number))
            self.read = first_bad.number - 1
            raise BadInputLine(
                first_bad.reason,
                place=f"{self.source}, {self.unit} {first_bad.number}",
                why=f"--strict stops at the first bad {self.unit}; none from it on was taken",
                fix="correct it and append the rest",
                line=first_bad.number,
                reason_code=first_bad.code,
                text=first_bad.text,
            )
        try:
            self._store(taken)
        except UsageError:
            again = take()  # the topic may have been changed meanwhile
            if again.batch is None or taken.batch is None:
                raise
            if again.batch.schema.equals(taken.batch.schema):
                raise
            taken = again
            self._store(taken)
        self.progress.clear()
        for bad in taken.bad:
            self.bad += 1
            self.set_aside(bad)
        self.progress.show(lambda seconds: f"{self.rows:,} rows, {self.rows / seconds:,.0f} rows/s")

    def _store(self, taken: Taken) -> None:
        if taken.batch is None or not taken.batch.num_rows:
            return
        receipt = self.log.append(self.name, taken.batch, headers=taken.headers)
        self.rows += receipt.rows
        self.entries += 1
        self.position = receipt.position
        self.moved |= taken.moved

    def summary(self, aside: str | None, *, as_json: bool) -> None:
        """Say what was done, also when an error ended it."""
        if as_json:
            found = {
                "topic": self.name,
                "rows": self.rows,
                "entries": self.entries,
                "position": self.position or None,
                "set_aside": self.bad,
                "read": self.read,
            }
            click.echo(json.dumps(found))
            return
        said = f"{counted(self.rows, 'row')} appended to '{self.name}'"
        if self.rows:
            entries = counted(self.entries, "entry", "entries")
            said += f" in {entries}, through position {self.position}"
        said += f"; {counted(self.bad, self.unit)} set aside" if self.bad else ""
        talk(said + (f" in {aside}" if self.bad and aside else ""))
        if self.moved:
            talk("the rows got new places: _position, _offset and so on were not kept")
