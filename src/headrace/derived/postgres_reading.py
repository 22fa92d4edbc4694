"""What a PostgreSQL target says of itself: the mark of its follower, and rows in key order."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from uuid import UUID

import pyarrow as pa
import pyarrow.types as pt
from psycopg import sql

from headrace.derived.postgres_copy import pieces
from headrace.derived.postgres_session import Session, raw
from headrace.derived.postgres_text import from_csv, selected, type_of
from headrace.interfaces import Cut, KeptTable, Key, Mark


class Reading(Session):
    """Reads the mark and the tables."""

    def _read_mark(self, *, lock: bool = False) -> Mark:
        row = self._run(
            "select epoch, through, position, log, (select jsonb_agg(e order by o)::text "
            "from jsonb_array_elements(tables) with ordinality as x(e, o) where exists (select "
            "from pg_class c join pg_namespace n on n.oid = c.relnamespace "
            "where n.nspname = $1 and c.relname = e->>'name' and c.relkind in ('r', 'p'))) "
            "from {schema}._headrace where follower = $2 {lock}",
            *(self._schema, self._follower),
            lock=raw("for update" if lock else ""),
        ).fetchone()
        if row is None:
            return Mark(0, None, "", ())
        epoch, through, position, log, tables = row
        cut = None if through is None else Cut(through, position)
        return Mark(epoch, cut, log, _tables(tables or "[]"))

    def _is_there(self, name: str) -> str | None:
        """What has that name: `table`, `view`, ..."""
        row = self._run(
            "select case relkind when 'v' then 'view' when 'm' then 'materialized view' "
            "when 'f' then 'foreign table' when 'S' then 'sequence' when 'i' then 'index' "
            "else 'table' end from pg_class c join pg_namespace n on n.oid = c.relnamespace "
            "where n.nspname = $1 and c.relname = $2",
            *(self._schema, name),
        ).fetchone()
        return row and str(row[0])

    def read(
        self, table: KeptTable, *, after: Key | None = None, through: Key | None = None
    ) -> tuple[Mark, Iterator[pa.RecordBatch]]:
        """See `Target`. The transaction lasts until the last row was read."""
        scope = contextlib.ExitStack()
        scope.enter_context(self._transaction("begin isolation level repeatable read read only"))
        try:
            mark = self._read_mark()
        except BaseException as error:
            scope.__exit__(type(error), error, error.__traceback__)
            raise
        return mark, self._rows(scope, table, table.name, after, through)

    def _rows(
        self,
        scope: contextlib.ExitStack,
        table: KeptTable,
        name: str,
        after: Key | None,
        through: Key | None,
    ) -> Iterator[pa.RecordBatch]:
        with scope:
            made = self._copying(table, name, after, through)
            for piece in pieces(self._connection, made.as_bytes(self._connection)):
                yield from_csv(piece, table.schema)

    def _copying(
        self, table: KeptTable, name: str, after: Key | None, through: Key | None
    ) -> sql.Composed:
        keys = table.key or ("_row",)
        bounds = [_beyond(keys, after)] if after is not None else []
        if through is not None:
            bounds.append(sql.SQL("not ") + _beyond(keys, through))
        return sql.SQL("copy (select {} from {} t {} order by {}) to stdout (format csv)").format(
            sql.SQL(", ").join(
                raw(selected(sql.Identifier(one.name).as_string(self._connection), one.type))
                for one in table.columns
            ),
            self._table(name),
            sql.SQL("where ") + sql.SQL(" and ").join(bounds) if bounds else sql.SQL(""),
            sql.SQL(", ").join(raw(one) for one in self._order(table, name)),
        )

    def _order(self, table: KeptTable, name: str) -> list[str]:
        """The key as the log orders it: what is text there as text, null first.

        Where no null can be it is not said: the index of a primary key has them last, and would
        not serve.
        """
        found = self._run(
            "select attname from pg_attribute where attrelid = {t}::regclass and attnotnull",
            t=sql.Literal(self._table(name).as_string(self._connection)),
        ).fetchall()
        types = {column.name: column for column in table.columns}
        order = []
        for key in table.key or ("_row", "_copy"):
            # With the table: a bare name would be that of the text that is selected.
            made = f"t.{sql.Identifier(key).as_string(self._connection)}"
            if key in types and pt.is_string(types[key].type) and type_of(types[key]) != "text":
                made = f"format('%s', {made}) collate \"C\""  # as it is written: see `selected`
            order.append(made if (key,) in found else f"{made} nulls first")
        return order


@functools.lru_cache(maxsize=8)
def _tables(text: str) -> tuple[KeptTable, ...]:
    return tuple(KeptTable.from_json(one) for one in json.loads(text))


def _beyond(keys: Sequence[str], bound: Key) -> sql.Composed:
    """Keys above a bound, in the order of columns, null below all else."""
    made: list[sql.Composed] = []
    for at, value in enumerate(bound):
        name = sql.Identifier(keys[at])
        given = sql.Literal(UUID(bytes=value) if keys[at] == "_row" else value)
        before = [
            sql.SQL("{} is not distinct from {}").format(sql.Identifier(k), sql.Literal(v))
            for k, v in zip(keys[:at], bound, strict=False)
        ]
        above = sql.SQL("{} is not null" if value is None else "coalesce({} > {}, false)")
        made.append(sql.SQL(" and ").join([*before, above.format(name, given)]))
    return sql.SQL("((") + sql.SQL(") or (").join(made) + sql.SQL("))")
