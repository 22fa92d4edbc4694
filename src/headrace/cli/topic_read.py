"""``headrace topic read`` and ``headrace topic tail``: rows of a topic to a pipe or the eye."""

from __future__ import annotations

import contextlib
import re
import select
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import IO, TYPE_CHECKING, TypeAlias

import click

from headrace.cli.formats import chosen, destination, format_options
from headrace.cli.options import Command, json_option, listed, log_option, open_log, several, talk
from headrace.errors import BadPosition, BadUsage, LogClosed, WaitTimeout

if TYPE_CHECKING:
    import pyarrow as pa

    from headrace.cli.output import RowWriter
    from headrace.log.embedded.log import EmbeddedLog
    from headrace.model.records import Batch
    from headrace.model.topic import Topic

Part: TypeAlias = "tuple[pa.RecordBatch, int]"
"""Rows to print, and the position through which they read."""


output_options = several(
    click.option(
        "--columns", metavar="A,B", help="Only these columns; by default all. Retired ones too."
    ),
    click.option("--partition", metavar="N", type=int, help="Only this partition; by default all."),
    format_options(lines=True),
    click.option(
        "--with-position",
        "places",
        is_flag=True,
        help="Add _position, _partition, _offset, _sent_time, _received_time and _headers.",
    ),
)
"""The options that say what is printed, and how."""


@click.command(
    cls=Command,
    short_help="Read rows, from anywhere to anywhere.",
    example="headrace topic read clicks --start 2024-01-31T12:00Z --limit 5",
)
@click.argument("name")
@click.option(
    "--start",
    metavar="WHERE",
    help="earliest (default), latest, an offset, or a time (ISO 8601, UTC unless it says).",
)
@click.option("--after", metavar="POSITION", type=int, help="Only entries after this position.")
@click.option(
    "--through",
    metavar="POSITION",
    type=int,
    help="Only entries up to this position, waiting until it is there; by default what is there.",
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(0),
    help="With --through: how long to wait without news; by default for ever.",
)
@click.option("--limit", metavar="N", type=click.IntRange(0), help="Only N rows; by default all.")
@output_options
@log_option
@json_option
def read(
    name: str,
    start: str | None,
    after: int | None,
    through: int | None,
    timeout: float | None,
    limit: int | None,
    columns: str | None,
    partition: int | None,
    form: str | None,
    output: str | None,
    places: bool,
    path: str,
    as_json: bool,
) -> None:
    """Read the rows of topic NAME, in the order of their entries."""
    if start is not None and after is not None:
        raise BadUsage("--start and --after exclude each other", fix="give one of them")
    form = chosen(form, output, as_json=as_json)
    with open_log(path) as log, destination(output) as stream:
        out = _Output(log, name, columns, partition, form, stream, places=places)
        if through is not None and through > log.position:
            talk(f"waiting for position {through}; the log is at {log.position}")
        batches = log.read(
            name,
            out.start(start) if start is not None else "earliest",
            after=after,
            through=through,
            columns=out.columns,
            partitions=out.partitions,
            timeout=timeout,
        )
        with out:
            out.write(_limited(out.parts(batches), limit))
        if through is not None and log.position < through and (limit is None or out.rows < limit):
            raise WaitTimeout(
                f"position {through} was not reached; the log is at {log.position}", place=log.path
            )


@click.command(
    cls=Command,
    short_help="Print the last rows, then follow.",
    example="headrace topic tail clicks -n 3 | jq .url",
)
@click.argument("name")
@click.option(
    "-n",
    "count",
    metavar="N",
    type=click.IntRange(0, 1_000_000),
    default=10,
    help="Rows to begin with; by default the last 10.",
)
@click.option("--no-follow", is_flag=True, help="End after these; by default, go on for ever.")
@output_options
@log_option
@json_option
def tail(
    name: str,
    count: int,
    no_follow: bool,
    columns: str | None,
    partition: int | None,
    form: str | None,
    output: str | None,
    places: bool,
    path: str,
    as_json: bool,
) -> None:
    """Print the last rows of topic NAME, then each new row as it comes, until Ctrl-C."""
    form = chosen(form, output, as_json=as_json)
    with open_log(path) as log, destination(output) as stream:
        out = _Output(log, name, columns, partition, form, stream, places=places)
        with out, _until_interrupted(log):
            position = log.position
            out.write(_last(log, out, count, position))
            if not no_follow:
                news = log.read(
                    name,
                    after=position,
                    columns=out.columns,
                    partitions=out.partitions,
                    follow=True,
                )
                out.write(out.parts(news))


class _Output:
    """The options of a reading, checked, and the writer of its rows."""

    def __init__(
        self,
        log: EmbeddedLog,
        name: str,
        columns: str | None,
        partition: int | None,
        form: str,
        stream: IO[bytes],
        *,
        places: bool,
    ) -> None:
        from headrace.model.evolution import Upgrade

        self.topic: Topic = log.topic(name)
        self.columns = listed(columns) or None
        self.schema = Upgrade(self.topic.schema, self.topic.schema, self.columns).schema
        if partition is not None and not 0 <= partition < self.topic.partitions:
            raise BadPosition(
                f"topic '{name}' has no partition {partition}",
                why=f"its partitions are 0 to {self.topic.partitions - 1}",
                fix="name one of these",
            )
        self.partitions = None if partition is None else [partition]
        self.rows = 0
        self._ends = log.ends(name)
        self._form, self._stream = form, stream
        self._places = places
        self._writer: RowWriter | None = None

    def start(self, text: str) -> str | int | datetime:
        """Understand where to start."""
        if text in ("earliest", "latest"):
            return text
        if re.fullmatch(r"\d+", text):
            offset = int(text)
            chosen = self.partitions or range(self.topic.partitions)
            end = max(self._ends[partition] for partition in chosen)
            if offset > end:
                raise BadPosition(
                    f"offset {offset} of topic '{self.topic.name}' is not there yet",
                    why=f"its next row gets offset {end}",
                    fix=f"start at 0 to {end}, or at 'latest'",
                )
            return offset
        try:
            return datetime.fromisoformat(text)
        except ValueError:
            raise BadUsage(
                f"--start {text} is not a place to start",
                why="it is earliest, latest, an offset or a time",
                fix="e.g. --start 2024-01-31T12:00:00Z",
            ) from None

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the output as its format wants it; an unfinished Arrow stream stays without end."""
        if error is None or isinstance(error, KeyboardInterrupt):
            with contextlib.suppress(BrokenPipeError) if error else contextlib.nullcontext():
                self._write_to(self.schema).close()

    def parts(self, batches: Iterable[Batch]) -> Iterator[Part]:
        """Give the rows of batches as they are printed, and through which position each reads."""
        from headrace.cli.output import with_place

        for batch in batches:
            yield with_place(batch) if self._places else batch.data, batch.position

    def write(self, parts: Iterable[Part]) -> None:
        """Write rows, as they come."""
        for data, position in parts:
            self._write_to(data.schema).write(data, position)
            self.rows += data.num_rows

    def _write_to(self, schema: pa.Schema) -> RowWriter:
        if self._writer is None:
            from headrace.cli.output import row_writer
            from headrace.model.records import PLACE_FIELDS

            if self._places and "_position" not in schema.names:
                for field in PLACE_FIELDS:
                    schema = schema.append(field)
            self._writer = row_writer(self._form, self.topic, schema, self._stream)
        return self._writer


def _limited(parts: Iterable[Part], limit: int | None) -> Iterator[Part]:
    left = limit
    if left == 0:
        return
    for data, position in parts:
        if left is not None and data.num_rows >= left:
            yield data.slice(0, left), position
            return
        left = None if left is None else left - data.num_rows
        yield data, position


def _last(log: EmbeddedLog, out: _Output, count: int, position: int) -> list[Part]:
    """The last `count` rows up to `position`, over all partitions."""
    if not count or not position:
        return []
    ends, held = log.ends(out.topic.name), log.starts(out.topic.name)
    starts = {p: max(held[p], ends[p] - count) for p in out.partitions or range(len(ends))}
    kept: deque[Part] = deque()
    rows = 0
    batches = log.read(out.topic.name, starts, through=position, columns=out.columns)
    for part in out.parts(batches):
        kept.append(part)
        rows += part[0].num_rows
        while rows - kept[0][0].num_rows >= count:
            rows -= kept.popleft()[0].num_rows
    if rows > count:
        kept[0] = (kept[0][0].slice(rows - count), kept[0][1])
    return list(kept)


@contextlib.contextmanager
def _until_interrupted(log: EmbeddedLog) -> Iterator[None]:
    """End quietly on Ctrl-C, and when nobody reads our output any more, even if nothing comes."""
    over = threading.Event()
    watch = threading.Thread(target=_watch_reader, args=[log, over], name="watch-stdout")
    watch.daemon = True
    watch.start()
    try:
        with contextlib.suppress(KeyboardInterrupt, LogClosed):
            yield
    finally:
        over.set()


def _watch_reader(log: EmbeddedLog, over: threading.Event) -> None:
    """Sleep until the other end of stdout is closed, then end the wait for rows.

    By closing the log: a signal may be ignored, or come where nobody expects it.
    """
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # errors are reported without being asked for
    except (OSError, ValueError):
        return
    for _, event in poll.poll():
        if event & (select.POLLERR | select.POLLHUP) and not over.is_set():
            log.close()
