"""`hr.sql(log, "select ...")`: DuckDB over topics, tables and views, all at one position.

::

    position  one for the whole query: the newest, or the one asked for
    names     every topic that the query can be about becomes a table (`names`), read on demand
              (`sources`): events are their rows; changes are what they add up to
    locked    no files, no network, no settings, nothing but reading
    answer    batches as they come, in the types of the log

**Changes.** With a key the current rows are read from the topic's index; without one they are added
up by DuckDB itself, which spills to a temporary folder when memory is short:
`select columns, sum(_weight) from history group by columns`, each row as often as its sum says.

**Types.** What went through DuckDB comes back in the types that the log has for it: instants in
UTC, intervals as durations, lists by one name for their elements. A sum of integers is a `bigint`,
as in Spark; one that does not fit is an error.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Self

import pyarrow as pa

from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.model.casts import cast
from headrace.model.ddl import DURATION, TIMESTAMP
from headrace.model.records import microseconds_of
from headrace.model.schema import RESERVED
from headrace.model.topic import Topic
from headrace.model.values import Refusal
from headrace.queries.names import HISTORY, LATEST, Parts, mentioned, names_of
from headrace.queries.sources import Keyed, Rows, Source, register

At = int | str | datetime
MEMORY = "1GB"
BATCH_ROWS = 16_384
TIMEOUT_SECONDS = 5.0
READING = ("SELECT", "EXPLAIN", "MULTI")
"""Kinds of statements that only read; MULTI is what DuckDB makes of PIVOT."""
WIDE = ("HUGEINT", "UHUGEINT")
POSITION = b"headrace.position"


def sql(
    log: EmbeddedLog,
    text: str,
    *,
    at: At | None = None,
    timeout: float = TIMEOUT_SECONDS,
    memory: str = MEMORY,
) -> pa.Table:
    """Ask the log in SQL; the answer, with the position in the metadata of its schema.

    `at`: as it was at this position (waiting for it, `timeout` seconds at most), or when the log
    had received all before this time; by default now. For answers larger than memory: `Query`.
    """
    with Query(log, text, at=at, timeout=timeout, memory=memory) as query:
        return pa.Table.from_batches(list(query), query.schema)


class Query:
    """A query that is being answered: iterate over its batches, then close it.

    `position` is the one position of the log at which everything is read, `schema` that of the
    answer. `memory` limits DuckDB; what does not fit goes to a temporary folder.
    """

    def __init__(
        self,
        log: EmbeddedLog,
        text: str,
        *,
        at: At | None = None,
        timeout: float = TIMEOUT_SECONDS,
        memory: str = MEMORY,
    ) -> None:
        """Understand the query; what it reads is read when batches are asked for."""
        self._duckdb = need_duckdb()
        self._log, self._text = log, text
        self.position = position_at(log, at, timeout)
        self._sources: dict[str, Source] = {}
        self._folder = tempfile.mkdtemp(prefix="headrace-sql-")
        self._connection: Any = None
        try:
            self._connection = self._connected(memory)
            self._check()
            self._register()
            self._lock()
            self._reader, self._wide = self._begun()
        except BaseException as error:
            self.close()
            self._raise(error)
            raise
        names = _differing(self._reader.schema.names)
        fields = [pa.field(name, self._type(at)) for at, name in enumerate(names)]
        self.schema = pa.schema(fields, metadata={POSITION: str(self.position).encode()})

    def __enter__(self) -> Self:
        """For `with`."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Let DuckDB go, and what it has spilled."""
        if self._connection is not None:
            self._reader = None
            self._connection.close()
            self._connection = None
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def topics(self) -> list[str]:
        """The topics that were read, so far."""
        read = {name.partition("$")[0] for name, one in self._sources.items() if one.opened}
        return sorted(read)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """The answer, batch by batch; once."""
        while True:
            try:
                batch = self._reader.read_next_batch()
            except StopIteration:
                return
            except BaseException as error:
                self._raise(error)
                raise
            yield self._cast(batch)

    # -- the connection ---------------------------------------------------------------------

    def _connected(self, memory: str) -> Any:
        settings = {
            "memory_limit": memory,
            "temp_directory": self._folder,
            "python_enable_replacements": "false",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        }
        try:
            connection = self._duckdb.connect(":memory:", config=settings)
        except self._duckdb.Error as error:
            raise errors.BadSetting(
                f"memory {memory!r}: {str(error).partition(chr(10))[0]}", place="memory"
            ) from None
        connection.execute("set TimeZone='UTC'")
        connection.execute("set enable_progress_bar=false")  # it draws on standard output
        return connection

    def _check(self) -> None:
        """One statement, and one that reads."""
        found = self._connection.extract_statements(self._text)
        if len(found) != 1:
            what = f"{len(found)} statements" if found else "no statement"
            raise errors.BadQuery(f"the text has {what}, not one", place="query")
        kind = str(found[0].type).rpartition(".")[2]
        if kind not in READING:
            raise errors.QueryRefused(f"{kind} is not a question", place="query")

    def _lock(self) -> None:
        self._connection.execute("set enable_external_access=false")
        self._connection.execute("set lock_configuration=true")

    def _begun(self) -> tuple[Any, set[int]]:
        try:
            relation = self._connection.sql(self._text)
        except self._duckdb.Error:
            self._connection.execute(self._text)  # says the same, and where in the text
            raise
        wide = {at for at, kind in enumerate(relation.types) if str(kind) in WIDE}
        return relation.to_arrow_reader(BATCH_ROWS), wide

    # -- names ------------------------------------------------------------------------------

    def _register(self) -> None:
        """Make a table of every topic that can be meant, under all its names."""
        topics = {topic.name: topic for topic in self._log.topics()}
        self._names = names_of(topics)
        self._catalogs = self._names.catalogs()
        for catalog in sorted(self._catalogs):
            self._connection.execute(f"attach ':memory:' as {quoted(catalog)}")
        for name in mentioned(self._text, list(topics)):
            if (name.lower(),) in self._names.found:
                self._register_topic(topics[name])

    def _register_topic(self, topic: Topic) -> None:
        log, at = self._log, self.position
        name = topic.name
        history, latest = f"{name}$history", f"{name}$latest"
        keyed = Keyed(log, topic, at) if topic.key else None
        self._add(history, Rows(log, topic, at, places=True))
        if topic.kind == "events":
            self._add(name, Rows(log, topic, at, places=False))
        elif keyed is not None:
            self._add(name, keyed)
        else:
            own = [quoted(n) for n in topic.schema.arrow.names if n not in RESERVED]
            self._view((name,), _added_up(own, history))
        if topic.kind == "events" and keyed is not None:
            self._add(latest, keyed)
        for parts in self._names.of(name):
            if parts != (name.lower(),):
                self._view(parts, f"from {quoted(name)}")
            if len(parts) == 1:
                self._view((HISTORY, *parts), f"from {quoted(history)}")
                if latest in self._sources:
                    self._view((LATEST, *parts), f"from {quoted(latest)}")

    def _add(self, name: str, source: Source) -> None:
        self._sources[name] = source
        register(self._connection, name, source)

    def _view(self, parts: Parts, body: str) -> None:
        if len(parts) == 2 and parts[0] in self._catalogs:
            parts = (parts[0], "main", parts[1])
        if len(parts) > 1:
            folder = ".".join(map(quoted, parts[:-1]))
            self._connection.execute(f"create schema if not exists {folder}")
        self._connection.execute(f"create view {'.'.join(map(quoted, parts))} as {body}")

    # -- the answer -------------------------------------------------------------------------

    def _type(self, at: int) -> pa.DataType:
        return pa.int64() if at in self._wide else inner_type(self._reader.schema.field(at).type)

    def _cast(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = []
        for at, (column, field) in enumerate(zip(batch.columns, self.schema, strict=True)):
            try:
                same = at in self._wide or column.type.equals(field.type)
                arrays.append(column.cast(field.type) if same else cast(column, field.type))
            except Refusal as no:
                raise _misfit(field.name, no.fact, no.why) from None
            except pa.ArrowInvalid as error:
                raise _misfit(field.name, "a sum is larger than a bigint", str(error)) from None
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _raise(self, error: BaseException) -> None:
        """What DuckDB says, as an error of the catalogue; returns if it is none of DuckDB's."""
        for source in self._sources.values():
            if source.failed is not None:
                raise source.failed from None
        if isinstance(error, self._duckdb.Error | pa.ArrowException | OSError):
            raise self._explained(error) from None

    def _explained(self, error: BaseException) -> errors.HeadraceError:
        duckdb, said = self._duckdb, _Said(str(error))
        place = said.place
        unknown = re.match(r"Table with name (.+?) does not exist", said.fact)
        if unknown:
            return self._unknown(unknown[1].strip('"'), place)
        if isinstance(error, duckdb.OutOfMemoryException) or "Out of Memory" in str(error):
            return errors.QueryTooLarge(said.fact, place=place)
        if isinstance(error, duckdb.PermissionException) or "configuration has been" in said.fact:
            return errors.QueryRefused(said.fact, place=place)
        return errors.BadQuery(said.fact, place=place, why=said.hint)

    def _unknown(self, name: str, place: str) -> errors.UnknownTable:
        folded = tuple(name.lower().split("."))
        several = next((v for k, v in self._names.unclear.items() if k[-1:] == folded[-1:]), None)
        if several:
            return errors.UnknownTable(
                f"'{name}' could be {' or '.join(several)}",
                place=place,
                why="SQL does not tell small letters from large ones, and ends of names may agree",
                fix=f'write the whole name: "{several[0]}"',
            )
        known = {topic.name for topic in self._log.topics()}
        short = {parts[0] for parts in self._names.found if len(parts) == 1}
        listed = sorted(known)
        more = f" and {len(listed) - 20} more" if len(listed) > 20 else ""
        return errors.UnknownTable(
            f"there is no table '{name}'",
            place=place,
            why=f"the log has {', '.join(listed[:20]) or 'no topics'}{more}",
            fix=errors.nearest(name, short | known) or "see 'headrace topic ls'",
        )


def position_at(log: EmbeddedLog, at: At | None, timeout: float | None) -> int:
    """The position for `at`: a position, or a time: that of the last entry received before.

    If nothing is left that was received between what a topic no longer has and that time, it is
    one at which the topic is not whole: what is gone may have been there, or not.
    """
    if at is None:
        return log.position
    if isinstance(at, str):
        if at.isdigit():
            at = int(at)
        else:
            try:
                at = datetime.fromisoformat(at)
            except ValueError:
                raise errors.BadPosition(
                    f"'{at}' is neither a position nor a time",
                    place=log.path,
                    fix="e.g. 120, or 2024-01-31T12:00:00Z",
                ) from None
    if isinstance(at, int):
        if at < 0:
            raise errors.BadPosition(f"the log cannot be read at {at}", place=log.path)
        log.wait(at, timeout)
        return at
    moment = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    newest, names = log.position, [topic.name for topic in log.topics()]
    reading = log.read(names, moment, columns=[]) if names else iter(())
    first = next(iter(reading), None)
    if first is None and microseconds_of(moment) > log.journal.live.tail().received:
        return newest
    found = newest if first is None else min(newest, first.positions[0].as_py() - 1)
    since = {name: log.since_of(name) for name in names}
    for gone in sorted(set(since.values()), reverse=True):  # were these rows received before?
        if 0 < gone <= found:
            whole = [name for name in names if since[name] <= gone]
            if next(iter(log.read(whole, after=gone, through=found, columns=[])), None) is None:
                found = gone - 1  # nothing says so
    return found


def inner_type(kind: pa.DataType) -> pa.DataType:
    """What the log has for a type of DuckDB; its own where the log has none."""
    types = pa.types
    if types.is_interval(kind):
        return DURATION
    if types.is_timestamp(kind) and kind.tz is not None:
        return TIMESTAMP
    if types.is_map(kind):
        return pa.map_(inner_type(kind.key_type), inner_type(kind.item_type))
    if types.is_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(inner_type(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([field.with_type(inner_type(field.type)) for field in kind])
    if types.is_dictionary(kind):
        return inner_type(kind.value_type)
    return kind


def need_duckdb() -> Any:
    """DuckDB, or the error that says how to get it."""
    try:
        import duckdb
    except ImportError:
        raise errors.NoDuckDB("DuckDB is not installed", place="import duckdb") from None
    return duckdb


def quoted(name: str) -> str:
    """A name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def _added_up(columns: list[str], history: str) -> str:
    """What a topic of changes without a key adds up to, each row as often as its weight."""
    names = ", ".join(columns)
    return (
        f"select {names} from (select {names}, sum(_weight)::bigint as _weight "  # noqa: S608
        f"from {quoted(history)} group by {names} having sum(_weight) > 0), range(_weight)"
    )


def _differing(names: list[str]) -> list[str]:
    """Names of columns, those that came before with a number: `id`, `id_1`."""
    found: list[str] = []
    for name in names:
        more = (f"{name}_{n}" for n in range(1, len(names) + 1))
        found.append(name if name not in found else next(n for n in more if n not in found))
    return found


def _misfit(column: str, fact: str, why: str) -> errors.BadQuery:
    fix = "cast the column in the query, e.g. to double or varchar"
    return errors.BadQuery(fact, place=f"column '{column}' of the answer", why=why, fix=fix)


class _Said:
    """An error of DuckDB, taken apart: kind and fact, a hint, an empty line, `LINE 1: ...`."""

    def __init__(self, text: str) -> None:
        head, _, rest = text.partition("\n\nLINE ")
        fact, _, hint = head.partition("\n")
        fact = re.sub(r"^[A-Z][A-Za-z ]* Error: ", "", fact).rstrip("!.")
        self.fact = fact[:1].lower() + fact[1:] if not fact.startswith("Table") else fact
        self.hint = hint.replace("\n", " ").strip()
        self.place = "query"
        line, _, carets = rest.partition("\n")
        number, _, shown = line.partition(": ")
        if number.isdigit():
            self.place = f"query, line {number}"
            if "^" in carets and "..." not in shown:
                self.place += f", column {carets.index('^') - len(number) - 6}"
