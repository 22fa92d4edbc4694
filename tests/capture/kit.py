"""What the tests of captures share: a database that changes at random, and the comparison."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.sources.postgres.capture import Capture
from headrace.testing.capture_case import TABLE, Writer

__all__ = [
    "COLUMNS",
    "TABLE",
    "Writer",
    "added_up",
    "capture",
    "differences",
    "ending",
    "in_database",
    "in_log",
]

COLUMNS = "id, part, title, amount, body, at"


def in_log(log: EmbeddedLog, topic: str) -> list[tuple[Any, ...]]:
    """The rows of a table as the log has them, in the order of their keys."""
    rows = log.table(topic).scan().read_all().to_pylist()
    return [tuple(row[name.strip()] for name in COLUMNS.split(",")) for row in rows]


def in_database(connection: psycopg.Connection, table: str) -> list[tuple[Any, ...]]:
    """The same of the database."""
    found = connection.execute(f'select {COLUMNS} from {table} order by id, part collate "C"')
    return found.fetchall()


def differences(
    log: EmbeddedLog, connection: psycopg.Connection, name: str, tables: Sequence[str]
) -> list[str]:
    """How log and database differ."""
    wrong = []
    for table in tables:
        one, other = in_log(log, f"{name}.public.{table}"), in_database(connection, table)
        if one != other:
            only = [row for row in one if row not in other][:3]
            missing = [row for row in other if row not in one][:3]
            wrong.append(f"{table}: {len(one)} and {len(other)} rows; {only} {missing}")
    return wrong


def capture(log: EmbeddedLog, dsn: str, **options: Any) -> Capture:
    """A capture of everything."""
    return Capture(log, "shop", dsn, **options)


def added_up(log: EmbeddedLog, topic: str) -> Counter[tuple[Any, ...]]:
    """How often each row is in a topic, with a key or without, by the weights of all changes."""
    sums: Counter[tuple[Any, ...]] = Counter()
    for batch in log.read(topic):
        for row in batch.data.to_pylist():
            sums[tuple(v for name, v in row.items() if name[0] != "_")] += row["_weight"]
    return Counter({row: count for row, count in sums.items() if count})


@contextlib.contextmanager
def ending(shop: Capture) -> Iterator[tuple[threading.Thread, list[errors.HeadraceError]]]:
    """A capture that is to end by itself, in a thread; and the error with which it has."""
    raised: list[errors.HeadraceError] = []

    def go() -> None:
        try:
            shop.run()
        except errors.HeadraceError as one:
            raised.append(one)

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield thread, raised
    finally:
        shop.stop()
        thread.join()
