"""A table in chunks: what was there before the stream began, and what must be read again.

A chunk is a range of keys (or some keys), read in one REPEATABLE READ transaction that also says
which transactions it sees (`pg_current_snapshot`) and how far the write-ahead log was. It is
*published* when the stream has passed that place: then every transaction that the chunk sees has
been taken from the stream, and of the others those that have come are known by their numbers. Rows
whose keys these have touched are left out: the stream has said newer things of them. For all other
rows the chunk is what the table holds at this place of the stream, so what differs in the log is
put right: missing rows come, other versions are replaced, equal ones are left alone.

So nothing need be locked, writers go on, a kill loses at most the chunk that was being read, and
the first, a resumed and a repeated snapshot are the same. (An exported snapshot dies with its
connection: it cannot be resumed. Watermarks written into a table ask for a table and for rights.)

**It ends.** The first chunk also asks for the last key of the table, and nothing behind that key is
ever read: what its snapshot does not see there is inserted by transactions that the stream brings
whole. So a table that grows as fast as it is read is done nevertheless.
"""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import pq, sql
from psycopg.errors import error_from_result
from pyarrow import csv

from headrace.sources.postgres.catalog import quoted

CHUNK_ROWS = 50_000


@dataclass(frozen=True)
class Visible:
    """Which transactions a snapshot sees: `xmin:xmax:in progress`, of which 32 bits count."""

    xmin: int
    xmax: int
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Visible:
        """As `pg_current_snapshot` prints it."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(int(x) & _WORD for x in running.split(",") if x))

    def sees(self, xid: int) -> bool:
        """Whether a transaction had been committed for this snapshot (or was rolled back)."""
        if _before(xid, self.xmin):
            return True
        return _before(xid, self.xmax) and (xid & _WORD) not in self.running


_WORD = 0xFFFF_FFFF


def _before(one: int, other: int) -> bool:
    """Whether a transaction number is older, in a circle of 32 bits."""
    return 0 < ((other - one) & _WORD) < 1 << 31


@dataclass(frozen=True)
class Wanted:
    """What is to be read of a table, and what the snapshot that reads it must see."""

    table: tuple[str, str]
    columns: Sequence[str]
    key: Sequence[str]
    limit: int
    decode: Callable[[list[pa.Array]], pa.RecordBatch]
    """From the columns, as the server prints them."""
    after: Sequence[str] | None = None
    upto: Sequence[str] | None = None
    """The last key of the table; None: to be asked for."""
    only: Sequence[Sequence[str]] | None = None
    """Keys; None: it is a range."""
    bytes: int = 1 << 62
    """There need not be more rows than these."""
    fence: int = 0
    """All transactions before this one must have ended."""
    must_see: Collection[int] = ()
    shape: str | None = None
    """What `_SHAPE` says of table and columns; if it is another by now, nothing is read."""
    whole: bool = True
    """With the tables that inherit from it, as a partitioned one."""

    @property
    def source(self) -> sql.Composable:
        """As it stands behind FROM."""
        name = sql.Identifier(*self.table)
        return name if self.whole else sql.SQL("ONLY {}").format(name)

    def accepts(self, visible: Visible) -> bool:
        """Whether a snapshot may be used."""
        return visible.xmin >= self.fence and all(map(visible.sees, self.must_see))


@dataclass
class Chunk:
    """Rows of a table as one snapshot saw them."""

    decode: Callable[[], pa.RecordBatch]
    """Asked once, by whoever needs the rows first; others wait for that."""
    count: int
    visible: Visible
    lsn: int
    """Publish when the stream has passed here."""
    last: list[str] | None
    """The key of the last row; None: there are no rows behind."""
    upto: list[str] | None
    only: Sequence[Sequence[str]] | None
    bytes: int
    """As the server sent them."""
    _rows: pa.RecordBatch | None = None
    _decoding: threading.Lock = field(default_factory=threading.Lock)

    @property
    def rows(self) -> pa.RecordBatch:
        """The rows; raises what is wrong with their values."""
        with self._decoding:
            if self._rows is None:
                self._rows = self.decode()
                del self.decode  # and the text
            return self._rows


def read_chunk(connection: psycopg.Connection, wanted: Wanted) -> Chunk | None:
    """The rows behind a key, in its order, or those of some keys; None: not yet, try again."""
    names = sql.SQL(", ").join(map(sql.Identifier, wanted.columns))
    table = wanted.source
    upto = None if wanted.upto is None else list(wanted.upto)
    rows: list[bytes] | None = None
    unlocked = contextlib.suppress(psycopg.errors.LockNotAvailable)
    with unlocked, connection.transaction(), connection.cursor() as cursor:
        found = begin(cursor, wanted)
        if found is None:
            return None
        visible, lsn, unusual = found
        by = [
            (_AS_TEXT if one in unusual else sql.SQL("{}")).format(sql.Identifier(one))
            for one in wanted.key
        ]
        keys = sql.SQL(", ").join(by)
        if wanted.only is None and upto is None:
            printed = sql.SQL(", ").join(_PRINTED.format(sql.Identifier(one)) for one in wanted.key)
            back = sql.SQL(", ").join(sql.SQL("{} DESC").format(one) for one in by)
            asked = sql.SQL("SELECT {} FROM {} ORDER BY {} LIMIT 1").format(printed, table, back)
            row = cursor.execute(asked).fetchone()
            upto = None if row is None else list(row)
        conditions: list[sql.Composable] = [sql.SQL("true")]
        if wanted.only is not None:
            lists = sql.SQL(", ").join(map(_row_literal, wanted.only))
            conditions = [sql.SQL("({}) IN ({})").format(keys, lists)]
        else:
            bounds = ((">", wanted.after), ("<=", upto))
            conditions += [
                sql.SQL("({}) {} {}").format(keys, sql.SQL(sign), _row_literal(bound))
                for sign, bound in bounds
                if bound is not None
            ]
        form = sql.SQL("COPY (SELECT {} FROM {} WHERE {} ORDER BY {} LIMIT {}) TO STDOUT {}")
        query = form.format(
            names, table, sql.SQL(" AND ").join(conditions), keys,
            sql.Literal(wanted.limit if wanted.only is None else len(wanted.only)), FORMAT,
        )  # fmt: skip
        rows, size = [], 0
        with contextlib.closing(copied(connection, query)) as come:
            for some in come:
                rows += some
                size += sum(map(len, some))
                if wanted.only is None and size >= wanted.bytes:  # they are wider than thought
                    break
    if rows is None:
        return None
    last = None
    if wanted.only is None and (len(rows) == wanted.limit or size >= wanted.bytes):
        texts = parsed(rows[-1], len(wanted.columns))
        places = [list(wanted.columns).index(name) for name in wanted.key]
        last = [texts[place][0].as_py().decode() for place in places]
    return chunk_of(wanted, rows, visible, lsn, last, upto)


def chunk_of(
    wanted: Wanted,
    rows: Sequence[bytes],
    visible: Visible,
    lsn: int,
    last: list[str] | None,
    upto: list[str] | None = None,
) -> Chunk:
    """What was read, not decoded yet."""
    data, width = b"".join(rows), len(wanted.columns)
    return Chunk(
        lambda: wanted.decode(parsed(data, width)),
        len(rows), visible, lsn, last, upto, wanted.only, len(data),
    )  # fmt: skip


FORMAT = sql.SQL("(FORMAT csv)")
LOCK_SECONDS = 0.2
"""How long a reading waits for a table that somebody has locked, before it says so."""
_SHAPE = """
    (select concat_ws(',', attrelid::bigint,
      string_agg(concat_ws(' ', attnum, attname, atttypid, atttypmod), ',' order by attnum))
    from pg_attribute where attrelid = %s::regclass and attname = any(%s) group by attrelid)
"""
_OPERATORS = """
    (select set_config('search_path', concat_ws(', ', nullif(current_setting('search_path'), ''),
      string_agg(distinct quote_ident(nspname), ', ')
      filter (where opcintype::regtype::text::regtype is not null)), true)
    from pg_index, unnest(indclass) one join pg_opclass c on c.oid = one
    join pg_amop on amopfamily = opcfamily join pg_operator o on o.oid = amopopr
    join pg_namespace n on n.oid = oprnamespace and nspname <> all(current_schemas(true))
    where indrelid = %s::regclass)
"""
"""Keys are compared as they are sorted: by the operators of their index, also where the type is of
an extension whose schema is not in the search path, where citext would be compared as text.
Who may not use that schema is refused: a type is not found there by its name (the filter)."""

_UNUSUAL = """
    (select coalesce(array_agg(attname::text), '{}')
    from pg_index, unnest(indkey::int2[], indclass::oid[], indcollation::oid[]) part(at, class, by)
    join pg_opclass c on c.oid = class
    join pg_amop on amopfamily = opcfamily and amoplefttype = opcintype
      and amoprighttype = opcintype and amopstrategy = 1
    join pg_operator o on o.oid = amopopr
    join pg_attribute on attrelid = %s::regclass and attnum = at
    join pg_type t on t.oid = atttypid
    where indrelid = attrelid and (indisprimary or indisreplident) and (
      by <> attcollation or oprname <> '<' or opcintype = 'anyenum'::regtype and typtype = 'd'
      or opcintype <> atttypid and exists (select from pg_opclass own
        where own.opcintype = atttypid and own.opcmethod = c.opcmethod and own.opcdefault)))
"""
"""Columns that `<` does not tell apart as their index does: it has another collation than they, or
another class of operators than their type; or that it does not know (hstore, a domain of an enum).
"""
_PRINTED = sql.SQL("format('%s', {})")
_AS_TEXT = sql.SQL("format('%s', {}) COLLATE \"C\"")
"""How these are compared: no index helps, but no key is passed over."""


def begin(cursor: psycopg.Cursor[Any], wanted: Wanted) -> tuple[Visible, int, list[str]] | None:
    """Take a snapshot for this transaction; None if it does not see what it must.

    Its place, and the columns that are not compared as others are.
    """
    cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
    if wanted.only is None:  # or, without statistics, all rows left are sorted for each chunk
        cursor.execute("SET LOCAL enable_sort = off")
    cursor.execute(f"SET LOCAL lock_timeout = {int(LOCK_SECONDS * 1000)}")
    # Locked before the snapshot is taken: to an older one a rewritten table would look empty.
    cursor.execute(
        sql.SQL("LOCK TABLE ONLY {} IN ACCESS SHARE MODE").format(sql.Identifier(*wanted.table))
    )
    cursor.execute(
        "SELECT pg_current_snapshot()::text, pg_current_wal_insert_lsn() - '0/0',"
        f" {_SHAPE}, {_UNUSUAL}, {_OPERATORS}",
        (quoted(wanted.table), list(wanted.columns), *[quoted(wanted.table)] * 2),
    )
    text, lsn, shape, unusual, _ = cursor.fetchone() or ("", 0, None, [], "")
    visible = Visible.parse(text)
    same = shape == (wanted.shape or shape)
    return (visible, int(lsn), unusual) if same and wanted.accepts(visible) else None


def copied(
    connection: psycopg.Connection, query: sql.Composed
) -> Generator[list[bytes], None, None]:
    """Read the rows of a COPY as they come, some at a time; half the cost of psycopg's loop.

    As bytes: of thousands of memoryviews the garbage collector would take a third of the time.
    If it is closed before the end, so is the transaction.
    """
    pg = connection.pgconn
    result = pg.exec_(query.as_bytes(connection))
    if result.status != pq.ExecStatus.COPY_OUT:
        raise _error(connection, result)
    get, wait = pg.get_copy_data, select.poll()
    wait.register(pg.socket, select.POLLIN)
    while True:
        rows = []
        while (found := get(1))[0] > 0:
            rows.append(found[1].tobytes())
        if rows:
            try:
                yield rows
            except GeneratorExit:
                with contextlib.suppress(psycopg.Error):
                    connection.cancel_safe()
                    while pg.get_copy_data(0)[0] > 0:
                        pass
                    while pg.get_result() is not None:
                        pass
                raise
        if found[0] < 0:
            break
        wait.poll()
        pg.consume_input()
    ended = pg.get_result()
    while ended is not None and pg.get_result() is not None:  # or it could not be rolled back
        pass
    if ended is not None and ended.status != pq.ExecStatus.COMMAND_OK:
        raise _error(connection, ended)


def _error(connection: psycopg.Connection, result: Any) -> psycopg.Error:
    """What a result says; if the connection is cut it has no code, by which to know that it is."""
    if connection.pgconn.status == pq.ConnStatus.BAD:
        return psycopg.OperationalError(result.error_message.decode(errors="replace").strip())
    return error_from_result(result)


def _row_literal(values: Sequence[str]) -> sql.Composable:
    """A key; its values take the types of what they are compared with."""
    return sql.SQL("({})").format(sql.SQL(", ").join(map(sql.Literal, values)))


def parsed(data: bytes, count: int) -> list[pa.Array]:
    """CSV as COPY writes it, where a null is nothing and an empty text is in quotes."""
    names = [str(number) for number in range(count)]
    if not data:
        return [pa.array([], pa.binary()) for _ in names]
    table = csv.read_csv(
        pa.BufferReader(data),
        csv.ReadOptions(column_names=names, block_size=len(data) + 1),
        csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.binary()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    return [column.combine_chunks() for column in table.columns]
