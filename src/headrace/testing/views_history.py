"""Random histories of tables: what comes, goes and changes, entry by entry, batch by batch.

A history is made to be unkind: few different values, so that keys meet; rows several times; nulls
in every column; NaN, infinities and both zeros; updates that move a row to another key, and updates
that change nothing; tables that are emptied and filled again.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa

from headrace.testing import algebra

Row = tuple[Any, ...]
Entry = dict[str, list[tuple[Row, int]]]
"""One transaction: the weighted rows of each table."""
History = list[list[Entry]]
"""The entries of each batch."""

START = datetime.datetime(2026, 3, 28, 22, tzinfo=datetime.UTC)
DAY = datetime.date(2026, 3, 28)


@dataclass(frozen=True)
class Kind:
    """A type of columns, and the values that a history takes."""

    arrow: pa.DataType
    pick: Callable[[Random], Any]


def _of(*values: Any) -> Callable[[Random], Any]:
    return lambda chance: chance.choice(values)


KINDS = {
    "int": Kind(pa.int32(), _of(0, 1, 2, 3, -1)),
    "bigint": Kind(pa.int64(), _of(0, 1, 2, 3, 7, -5, 1 << 40)),
    # Sums of these are exact in any order, so Spark's own answer is exact too.
    "double": Kind(
        pa.float64(), _of(0.0, -0.0, 0.5, 1.25, -2.5, 3.0, math.nan, math.inf, -math.inf)
    ),
    "decimal": Kind(pa.decimal128(10, 2), _of(*map(Decimal, ("0.00", "1.10", "-2.25", "99.99")))),
    "string": Kind(pa.string(), _of("a", "b", "ü", "", "prefixed-a", "prefixed-b")),
    "date": Kind(pa.date32(), lambda c: DAY + datetime.timedelta(days=c.randrange(3))),
    "timestamp": Kind(
        pa.timestamp("us", "UTC"),
        lambda c: START + datetime.timedelta(minutes=37 * c.randrange(5), microseconds=1),
    ),
    "boolean": Kind(pa.bool_(), _of(True, False)),
    "strings": Kind(
        pa.list_(pa.string()), lambda c: [c.choice("abü") for _ in range(c.randrange(3))]
    ),
}


@dataclass(frozen=True)
class Table:
    """A table of the tests: columns and their kinds."""

    name: str
    columns: tuple[tuple[str, str], ...]
    stream: bool = False

    @property
    def schema(self) -> pa.Schema:
        """Its columns in Arrow."""
        return pa.schema([(name, KINDS[kind].arrow) for name, kind in self.columns])


def _table(name: str, columns: str, *, stream: bool = False) -> Table:
    pairs = [one.split() for one in columns.split(",")]
    return Table(name, tuple((column, kind) for column, kind in pairs), stream)


TABLES = {
    table.name: table
    for table in (
        _table(
            "t",
            "id bigint, k int, g string, x double, d decimal, n bigint, day date, at timestamp,"
            " b boolean, tags strings",
        ),
        _table("u", "k int, g string, y double, e decimal, m bigint, day date"),
        _table("s", "k int, g string, z double", stream=True),
    )
}


def random_row(chance: Random, table: Table, nulls: float) -> Row:
    """A row of a table."""
    return tuple(
        None if chance.random() < nulls else KINDS[kind].pick(chance) for _, kind in table.columns
    )


def random_history(chance: Random, tables: Sequence[Table], batches: int, size: int) -> History:
    """What happens to some tables."""
    held: dict[str, list[Row]] = {table.name: [] for table in tables}
    nulls = chance.choice((0.05, 0.15, 0.4))
    leaves = chance.choice((0.2, 0.4, 0.55))
    history: History = []
    for _ in range(batches):
        entries: list[Entry] = []
        for _ in range(chance.choice((1, 1, 2, 3))):
            entry: Entry = {}
            for table in chance.sample(tables, chance.randrange(1, len(tables) + 1)):
                rows = entry.setdefault(table.name, [])
                if not table.stream and chance.random() < 0.04:
                    rows += [(row, -1) for row in held[table.name]]
                    held[table.name].clear()
                for _ in range(chance.randrange(size + 1)):
                    rows += _moved(chance, table, held[table.name], nulls, leaves)
            entries.append({name: rows for name, rows in entry.items() if rows})
        history.append([entry for entry in entries if entry])
    return history


def _moved(
    chance: Random, table: Table, held: list[Row], nulls: float, leaves: float
) -> list[tuple[Row, int]]:
    """One thing that happens to a table."""
    if held and not table.stream and chance.random() < leaves:
        at = chance.randrange(len(held))
        old = held.pop(at)
        if chance.random() < 0.5:
            return [(old, -1)]
        new = list(old)
        fresh = random_row(chance, table, nulls)
        for place in chance.sample(range(len(new)), chance.choice((0, 1, 1, 2, len(new)))):
            new[place] = fresh[place]
        held.append(tuple(new))
        return [(old, -1), (tuple(new), 1)]
    again = bool(held) and chance.random() < 0.2
    row = chance.choice(held) if again else random_row(chance, table, nulls)
    held.append(row)
    return [(row, 1)]


def is_sound(history: History) -> bool:
    """Whether nothing disappears that is not there."""
    held: Counter[Hashable] = Counter()
    for batch in history:
        for entry in batch:
            for name, rows in entry.items():
                for row, weight in rows:
                    held[name, algebra.key(row)] += weight
            if any(count < 0 for count in held.values()):
                return False
    return True


def as_batch(table: Table, rows: Sequence[tuple[Row, int]]) -> pa.RecordBatch:
    """The rows of an entry as the log takes them."""
    data = algebra.batch_of([row for row, _ in rows], table.schema)
    if table.stream:
        return data
    weight = pa.array([weight for _, weight in rows], pa.int64())
    return data.append_column("_weight", weight)


def smaller(history: History) -> Iterator[History]:
    """Histories with less in them, the boldest first."""
    for at in range(len(history)):
        yield [*history[:at], *history[at + 1 :]]
    for at in range(len(history) - 1):
        yield [*history[:at], [*history[at], *history[at + 1]], *history[at + 2 :]]
    for at, batch in enumerate(history):
        for one in range(len(batch)):
            yield [*history[:at], [*batch[:one], *batch[one + 1 :]], *history[at + 1 :]]
    for at, batch in enumerate(history):
        for one, entry in enumerate(batch):
            for name, rows in entry.items():
                for gone in range(len(rows)):
                    less = {**entry, name: [*rows[:gone], *rows[gone + 1 :]]}
                    kept = {table: left for table, left in less.items() if left}
                    changed = [*batch[:one], *([kept] if kept else []), *batch[one + 1 :]]
                    yield [*history[:at], changed, *history[at + 1 :]]


def written(history: History, tables: Mapping[str, Table]) -> str:
    """A history to be read by a person: each batch, each entry, each row."""
    lines = []
    for number, batch in enumerate(history):
        lines.append(f"batch {number}")
        for entry in batch:
            lines.append("  entry")
            for name, rows in entry.items():
                lines.append(f"    {name} ({', '.join(c for c, _ in tables[name].columns)})")
                lines += [f"      {weight:+d} {row!r}" for row, weight in rows]
    return "\n".join(lines)
