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
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg
import pyarrow as pa
from psycopg import sql
from pyarrow import csv

from headrace.sources.postgres.catalog import TableInfo

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
class Chunk:
    """Rows of a table as one snapshot saw them."""

    texts: list[pa.Array]
    """The columns asked for, as the server prints them."""
    rows: int
    visible: Visible
    lsn: int
    """Publish when the stream has passed here."""
    last: list[str] | None
    """The key of the last row; None: there are no rows behind."""


def read_chunk(
    connection: psycopg.Connection,
    table: TableInfo,
    columns: Sequence[str],
    key: Sequence[str],
    *,
    after: Sequence[str] | None = None,
    only: Sequence[Sequence[str]] | None = None,
    limit: int = CHUNK_ROWS,
) -> Chunk:
    """The rows behind a key, in its order; or those of some keys."""
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    keys = sql.SQL(", ").join(map(sql.Identifier, key))
    condition: sql.Composable = sql.SQL("")
    if only is not None:
        lists = sql.SQL(", ").join(_row_literal(one) for one in only)
        condition = sql.SQL(" WHERE ({}) IN ({})").format(keys, lists)
    elif after is not None:
        condition = sql.SQL(" WHERE ({}) > {}").format(keys, _row_literal(after))
    copied = sql.SQL("COPY (SELECT {} FROM {}{} ORDER BY {} LIMIT {}) TO STDOUT (FORMAT csv)")
    query = copied.format(
        names, sql.Identifier(table.schema, table.name), condition, keys,
        sql.Literal(limit if only is None else len(only)),
    )  # fmt: skip
    with connection.transaction(), connection.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        # Locked before the snapshot is taken: to an older one a rewritten table would look empty.
        cursor.execute(
            sql.SQL("LOCK TABLE ONLY {} IN ACCESS SHARE MODE").format(
                sql.Identifier(table.schema, table.name)
            )
        )
        cursor.execute("SELECT pg_current_snapshot()::text, pg_current_wal_insert_lsn() - '0/0'")
        visible, lsn = cursor.fetchone() or ("", 0)
        with cursor.copy(query) as copy:
            data = b"".join(bytes(block) for block in copy)
    texts = _columns(data, len(columns))
    rows = len(texts[0]) if texts else 0
    last = None
    if only is None and rows == limit:
        places = [list(columns).index(name) for name in key]
        last = [texts[place][rows - 1].as_py().decode() for place in places]
    return Chunk(texts, rows, Visible.parse(visible), int(lsn), last)


def _row_literal(values: Sequence[str]) -> sql.Composable:
    """A key; its values take the types of what they are compared with."""
    return sql.SQL("({})").format(sql.SQL(", ").join(map(sql.Literal, values)))


def _columns(data: bytes, count: int) -> list[pa.Array]:
    """CSV as COPY writes it, where a null is nothing and an empty text is in quotes."""
    names = [str(number) for number in range(count)]
    if not data:
        return [pa.array([], pa.binary()) for _ in names]
    table = csv.read_csv(
        io.BytesIO(data),
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
