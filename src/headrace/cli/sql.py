"""``headrace sql``: ask the log in SQL; DuckDB answers."""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING, Any

import click

from headrace.cli.formats import chosen, destination, format_options
from headrace.cli.options import (
    Command,
    json_option,
    log_option,
    open_log,
    stdin,
    stdout,
    talk,
)
from headrace.cli.verify import log_path

if TYPE_CHECKING:
    from headrace.queries.query import Query


@click.command(
    cls=Command,
    short_help="Ask topics, tables and views in SQL.",
    example="headrace sql 'select state, count(*) from orders group by state'",
)
@click.argument("query")
@click.option(
    "--at",
    metavar="WHEN",
    help="As it was at this position, or at this time (ISO 8601, UTC unless it says); by default "
    "as it is now.",
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    help="With --at: how long to wait for a position that is not there yet.",
)
@click.option(
    "--memory",
    metavar="SIZE",
    default="1GB",
    show_default=True,
    help="What DuckDB may hold in memory; the rest goes to a temporary folder.",
)
@format_options(default="table on a terminal, ndjson elsewhere")
@log_option
@json_option
def sql(
    query: str,
    at: str | None,
    timeout: float,
    memory: str,
    form: str | None,
    output: str | None,
    path: str,
    as_json: bool,
) -> None:
    """Answer QUERY, one SELECT over the topics of the log; - reads it from standard input.

    Every topic is a table: an events topic is its rows, a changes topic or a view is what it holds
    now. history.NAME has every row with its place, latest.NAME the last row of each key. Everything
    is read at one position, which is said on stderr.
    """
    default = "table" if output is None and stdout().isatty() else "ndjson"
    form = chosen(form, output, as_json=as_json, default=default)
    text = stdin().read().decode(errors="replace") if query == "-" else query
    with open_log(log_path(".", path)) as log:
        from headrace.queries.query import Query

        with (
            Query(log, text, at=at, timeout=timeout, memory=memory) as answer,
            destination(output) as stream,
        ):
            if as_json:
                _write_json(answer, stream)
                return
            import pyarrow as pa

            from headrace.cli.output import row_writer

            writer = row_writer(form, None, answer.schema, stream)
            rows = 0
            for batch in answer:
                writer.write(batch, answer.position)
                rows += batch.num_rows
            if not rows:
                writer.write(pa.RecordBatch.from_pylist([], answer.schema), answer.position)
            writer.close()
            talk(f"{rows:,} {'row' if rows == 1 else 'rows'} at position {answer.position}")


def _write_json(answer: Query, stream: IO[bytes]) -> None:
    """One object: position, columns with their types, rows; written as it comes."""
    from headrace.cli.output import json_columns

    columns: dict[str, Any] = {one.name: str(one.type) for one in answer.schema}
    head = json.dumps({"position": answer.position, "columns": columns}, ensure_ascii=False)
    stream.write(f'{head[:-1]}, "rows": ['.encode())
    between = ""
    for batch in answer:
        names = batch.schema.names
        rows = zip(*json_columns(batch), strict=True)
        said = ", ".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows)
        stream.write(f"{between if said else ''}{said}".encode())
        between = between or (", " if said else "")
    stream.write(b"]}\n")
    stream.flush()
