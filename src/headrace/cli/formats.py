"""Which form rows are printed in, and where to: the options that all commands that read share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import IO, Any

import click

from headrace.cli.options import several, stdout
from headrace.errors import BadUsage

FORMS = {
    "ndjson": "a JSON object a line",
    "csv": "CSV with a head",
    "arrow": "an Arrow IPC stream",
    "parquet": "a Parquet file",
    "table": "a table for the eye",
    "lines": "bare lines, for topics of text, json or bytes",
}
ENDINGS = {".ndjson": "ndjson", ".jsonl": "ndjson", ".json": "ndjson", ".csv": "csv",
           ".arrow": "arrow", ".arrows": "arrow", ".parquet": "parquet"}  # fmt: skip
BINARY = ("arrow", "parquet")


def format_options(*, lines: bool = False, default: str = "ndjson") -> Callable[[Any], Any]:
    """Add `--format` and `--output`; `default` is said in the help only."""
    forms = {name: said for name, said in FORMS.items() if lines or name != "lines"}
    said = "; ".join(f"{name}: {words}" for name, words in forms.items())

    return several(
        click.option(
            "--format",
            "form",
            type=click.Choice(list(forms)),
            help=f"{said}. By default what the ending of FILE says, else {default}.",
        ),
        click.option(
            "--output",
            metavar="FILE",
            help="Write to FILE, which appears when it is whole; by default, standard output.",
        ),
    )


def chosen(form: str | None, output: str | None, *, as_json: bool, default: str = "ndjson") -> str:
    """The form that is asked for, if it goes with the rest."""
    if as_json and form not in (None, "ndjson"):
        raise BadUsage(f"--json and --format {form} exclude each other", fix="give one of them")
    if form is None and output is not None and not as_json:
        form = ENDINGS.get(os.path.splitext(output)[1])
    if form in BINARY and output is None and stdout().isatty():
        raise BadUsage(
            f"{FORMS[form]} is not for a terminal",
            fix="send it to a file or a pipe, or use --format table",
        )
    return form or ("ndjson" if as_json else default)


@contextlib.contextmanager
def destination(output: str | None) -> Iterator[IO[bytes]]:
    """Where rows go: standard output, or a file that gets its name when it is whole."""
    if output is None:
        yield stdout()
        return
    part = f"{output}.part"
    try:
        stream = open(part, "wb")  # noqa: SIM115 (closed below)
    except OSError as error:
        fix = "name a file that can be written"
        raise BadUsage(f"--output {output}: {error.strerror}", fix=fix) from None
    try:
        with stream:
            yield stream
        os.replace(part, output)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        if isinstance(error, OSError):
            error.filename = error.filename or output
        raise
