"""The capture against a real server: what is in the log equals the database. R-B1, R-B3, R-B5

Caught: rows lost, twice or with wrong values after any mix of changes, while tables are read and
written at once, over restarts and kills of the capture and of the server; before-images from the
wrong place; half a transaction in an entry. Not caught: interleavings that did not happen, server
versions other than the embedded one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.sources.postgres import settings as asked
from headrace.sources.postgres.capture import Capture
from headrace.sources.postgres.group import Group
from headrace.sources.postgres.protocol import Message
from headrace.sources.postgres.stream import Stream
from headrace.sources.postgres.transactions import Transaction
from tests.capture.conftest import Database
from tests.capture.kit import TABLE, Writer, capture, differences

Connect = Callable[[], Any]


@pytest.fixture
def connect(database: Database) -> Iterator[Connect]:
    """Connections to the database, closed in the end."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(database.connect())


def make(connect: Connect, *tables: str) -> Any:
    connection = connect()
    for table in tables:
        connection.execute(TABLE.format(name=table))
    return connection


def test_a_table_is_read_and_then_followed(
    database: Database, connect: Connect, log: EmbeddedLog
) -> None:
    connection = make(connect, "a", "b")
    writer = Writer(connection, ["a", "b"], "first")
    for _ in range(60):
        writer.transaction()
    shop = capture(log, database.dsn(), chunk_rows=7)
    shop.run("caught up")
    assert differences(log, connection, "shop", ["a", "b"]) == []
    for number in range(12):
        for _ in range(10):
            writer.transaction()
        if number % 4 == 3:
            shop = capture(log, database.dsn(), chunk_rows=7)  # another process goes on
        shop.run("caught up")
        assert differences(log, connection, "shop", ["a", "b"]) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_table_that_changes_while_it_is_read(
    seed: int, database: Database, connect: Connect, log: EmbeddedLog
) -> None:
    connection = make(connect, "a", "b")
    writers = [Writer(connect(), ["a", "b"], f"{seed} {n}") for n in range(2)]
    for _ in range(150):
        writers[0].transaction()
    stop = threading.Event()

    def write(writer: Writer) -> None:
        while not stop.is_set():
            writer.transaction()

    threads = [threading.Thread(target=write, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    try:
        shop = capture(log, database.dsn(), chunk_rows=3)
        shop.run("caught up")
        shop.snapshot("public.a")
        shop.run("caught up")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    shop.run("caught up")
    assert differences(log, connection, "shop", ["a", "b"]) == []


def test_every_state_in_the_log_is_one_between_two_transactions(
    database: Database, connect: Connect, log: EmbeddedLog
) -> None:
    """Money moves between rows of two tables; in every entry, and after every transaction in it,
    it adds up."""
    connection = make(connect, "a", "b")
    for table in "ab":
        connection.execute(
            f"insert into {table} select g, 'x', 't', 100, null, now() from generate_series(1, 9) g"
        )
    shop = capture(log, database.dsn())
    shop.run("caught up")
    writer = Writer(connection, ["a", "b"], "bank")
    chance = writer.chance
    for _ in range(120):
        with connection.transaction():
            for sign in (1, -1):
                connection.execute(
                    f"update {chance.choice('ab')} set amount = amount + %s where id = %s",
                    (sign * 7, chance.randrange(1, 10)),
                )
        if chance.random() < 0.1:
            shop.run("caught up")
    shop.run("caught up")
    total: Counter[str] = Counter()
    seen = 0
    by_entry: dict[int, list[tuple[int, int, Any]]] = {}
    for batch in log.read(["shop.public.a", "shop.public.b"]):
        amounts = batch.data.column("amount").to_pylist()
        weights = batch.data.column("_weight").to_pylist()
        lsns = batch.data.column("_lsn").to_pylist()
        ops = batch.data.column("_op").to_pylist()
        for row in zip(batch.positions.to_pylist(), lsns, amounts, weights, ops, strict=True):
            by_entry.setdefault(row[0], []).append((row[1], row[3] * row[2], row[4]))
    for position in sorted(by_entry):
        for lsn in sorted({lsn for lsn, _, _ in by_entry[position]}):
            total["all"] += sum(amount for at, amount, _ in by_entry[position] if at == lsn)
            if {op for at, _, op in by_entry[position] if at == lsn} != {"r"}:
                assert total["all"] == 1800
                seen += 1
    assert seen == 120
    assert differences(log, connection, "shop", ["a", "b"]) == []


CHILD = """
import sys, headrace as hr
from headrace.sources.postgres.capture import Capture
with hr.connect(sys.argv[1]) as log:
    Capture(log, "shop", sys.argv[2], chunk_rows=5, heartbeat_seconds=0.2).run()
"""


@pytest.mark.timeout(300)
def test_a_capture_that_is_killed_goes_on(
    database: Database, connect: Connect, log: EmbeddedLog, tmp_path: Path
) -> None:
    connection = make(connect, "a", "b")
    writer = Writer(connect(), ["a", "b"], "killed")
    for _ in range(50):
        writer.transaction()
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(0.002):
            try:
                writer.transaction()
            except (psycopg.OperationalError, psycopg.Rollback):  # the server was killed
                with contextlib.suppress(psycopg.OperationalError):
                    writer.connection = connect()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for number in range(6):
            child = subprocess.Popen(
                [sys.executable, "-c", CHILD, str(tmp_path / "log"), database.dsn()],
                stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )  # fmt: skip
            time.sleep(1.0 + writer.chance.random() * 1.5)
            if number == 3:
                database.server.kill()
                database.server.start()
                time.sleep(1)
            assert child.poll() is None, child.stderr and child.stderr.read().decode()[-2000:]
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            assert child.stderr is not None
            child.stderr.close()
            if number == 3:
                break
    finally:
        stop.set()
        thread.join()
    connection = connect()
    shop = capture(log, database.dsn())
    shop.run("caught up")
    assert differences(log, connection, "shop", ["a", "b"]) == []


def test_columns_come_go_and_change(database: Database, connect: Connect, log: EmbeddedLog) -> None:
    connection = connect()
    run = connection.execute
    run("create table t(id int primary key, a int, b text)")
    run("insert into t values (1, 1, 'x'), (2, 2, 'y')")
    shop = capture(log, database.dsn())

    def rows(*names: str) -> list[tuple[Any, ...]]:
        shop.run("caught up")
        found = log.table("shop.public.t").scan().read_all().to_pylist()
        return [tuple(row[name] for name in names) for row in found]

    assert rows("id", "a", "b") == [(1, 1, "x"), (2, 2, "y")]
    run("alter table t add column c int default 7")
    run("insert into t values (3, 3, 'z', 8)")
    assert rows("id", "c") == [(1, 7), (2, 7), (3, 8)]
    run("alter table t alter column a type bigint")
    run("update t set a = 5000000000 where id = 1")
    assert rows("id", "a") == [(1, 5_000_000_000), (2, 2), (3, 3)]
    run("alter table t rename column b to title")
    run("update t set title = 'new' where id = 2")
    assert rows("id", "title") == [(1, "x"), (2, "new"), (3, "z")]
    run("alter table t drop column c")
    run("delete from t where id = 3")
    assert rows("id", "a", "title") == [(1, 5_000_000_000, "x"), (2, 2, "new")]
    run("alter table t drop column title, add column title text default 'again'")
    assert rows("id", "title") == [(1, "again"), (2, "again")]
    run("alter table t add column b int default 1")
    run("update t set b = 2 where id = 2")
    assert rows("id", "b") == [(1, 1), (2, 2)]
    run("alter table t rename title to c")
    run("alter table t rename b to title")
    run("alter table t rename c to b")
    assert rows("id", "title", "b") == [(1, 1, "again"), (2, 2, "again")]
    assert len({schema.generation for schema in log.topic("shop.public.t").schemas}) == 1
    run("alter table t drop column title, drop column b, add column title text")
    run("update t set title = 'new' where id = 2")
    assert rows("id", "a", "title") == [(1, 5_000_000_000, None), (2, 2, "new")]
    run("alter table t alter column a type text using 'n' || a")
    run("update t set title = 'newer' where id = 2")
    assert rows("id", "a", "title") == [(1, "n5000000000", None), (2, "n2", "newer")]


def test_a_type_that_is_carried_as_the_same_text_is_another_column(
    database: Database, connect: Connect, log: EmbeddedLog
) -> None:
    """The server rewrites the rows without a word: they are read again, and the type is told."""
    run = connect().execute
    run("create table spans(id int primary key, span interval, price numeric(60, 2))")
    run("insert into spans values (1, '90 minutes', 1.5), (2, null, null)")
    shop = capture(log, database.dsn())
    shop.run("caught up")

    def of(name: str) -> tuple[str | None, list[Any]]:
        rows = log.table("shop.public.spans").scan(columns=[name]).read_all()
        return log.topic("shop.public.spans").schema.column(name).comment, rows[name].to_pylist()

    assert of("span") == ("postgresql interval", ["PT1H30M", None])
    assert of("price") == ("postgresql numeric(60,2)", ["1.50", None])
    run("set intervalstyle = 'postgres'")
    run("alter table spans alter span type text")
    run("alter table spans alter price type numeric(70, 4)")
    shop.run("caught up")
    assert of("span") == (None, ["01:30:00", None])
    assert of("price") == ("postgresql numeric(70,4)", ["1.5000", None])
    run("update spans set span = 'none' where id = 2")
    shop.run("caught up")
    assert of("span") == (None, ["01:30:00", "none"])
    versions = len(log.topic("shop.public.spans").schemas)
    run("alter table spans alter price type numeric(8, 1)")
    shop.run("caught up")
    assert of("price") == (None, [Decimal("1.5"), None])
    run("alter table spans alter price type numeric")
    shop.run("caught up")
    assert of("price") == ("postgresql numeric", ["1.5", None])
    assert len(log.topic("shop.public.spans").schemas) == versions + 2


SILENT = {
    "renamed twice": ["alter table t rename a to b", "insert into t values (3, 3)",
                      "alter table t rename b to c", "insert into t values (4, 4)"],
    "added and renamed": ["alter table t add b int", "insert into t values (3, 3, 3)",
                          "alter table t rename b to c", "insert into t values (4, 4, 4)"],
    "a type that is gone": ["create type mood as enum('x')", "alter table t add b mood",
                            "insert into t values (3, 3, 'x')", "alter table t drop b",
                            "drop type mood", "insert into t values (4, 4)"],
    "the same, and a column": ["create type mood as enum('x')", "alter table t add b mood",
                               "insert into t values (3, 3, 'x')", "alter table t drop b",
                               "drop type mood", "alter table t add z int",
                               "insert into t values (4, 4, 4)"],
    "widened in a transaction": ["begin", "insert into t values (3, 3)",
                                 "alter table t alter a type bigint",
                                 "insert into t values (4, 4)", "commit"],
    "widened to something else": ["alter table t alter a type bigint using a * 100"],
    "the type as before": ["alter table t alter a type int using a * 100"],
    "other keys": ["alter table t alter id type int using id + 10", "update t set a = 3"],
    "other keys, of which one is there": ["alter table t alter id type int using 3 - id",
                                          "alter table t alter id type int using id + 1",
                                          "delete from t where a = 1"],
    "identity": ["alter table t add n int generated always as identity"],
    "default of a domain": ["create domain d as int default 5 check (value > 0)",
                            "alter table t add n d"],
    "a default that is gone": ["alter table t add n float default random()",
                               "alter table t alter n drop default"],
}  # fmt: skip
"""What changes rows of `t(id, a)` without a word in the stream, while nobody is there."""


@pytest.mark.parametrize("statements", SILENT.values(), ids=SILENT)
def test_rows_that_are_written_anew_in_silence(
    database: Database, connect: Connect, log: EmbeddedLog, statements: list[str]
) -> None:
    connection = connect()
    connection.execute("create table t(id int primary key, a int)")
    connection.execute("insert into t values (1, 1), (2, 2)")
    shop = capture(log, database.dsn())
    shop.run("caught up")
    for statement in statements:
        connection.execute(statement)
    shop.run("caught up")
    assert same(log, connection, "t")


def same(log: EmbeddedLog, connection: Any, table: str) -> bool:
    """Whether log and database have the same rows, in the columns that the database has."""
    asked = connection.execute(f"select * from {table} order by 1")
    names = [one.name for one in asked.description]
    rows = log.table(f"shop.public.{table}").scan().read_all().to_pylist()
    found: list[Any] = asked.fetchall()
    return [tuple(row[name] for name in names) for row in rows] == found


@contextlib.contextmanager
def running(shop: Capture, connection: Any) -> Iterator[threading.Thread]:
    """The capture, in a thread of its own, while it streams."""
    thread = threading.Thread(target=shop.run, daemon=True)
    thread.start()
    query = "select active from pg_replication_slots where database = current_database()"
    wait(lambda: connection.execute(query).fetchone() == (True,))
    try:
        yield thread
    finally:
        shop.stop()
        thread.join(20)


def wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.parametrize("down", [False, True], ids=["", "while nobody is there"])
@pytest.mark.parametrize("way", ["made again", "swapped"])
def test_another_table_of_the_same_name(
    database: Database, connect: Connect, log: EmbeddedLog, way: str, down: bool
) -> None:
    """It is published and read; the rows of the one before it go."""
    connection = connect()
    run = connection.execute
    run("create table t(id int primary key, a int)")
    run("create table u(id int primary key, a int)")
    run("insert into t values (1, 1), (2, 2)")
    run("insert into u values (1, 10)")
    shop = capture(log, database.dsn(), heartbeat_seconds=0.2)
    shop.run("caught up")
    run("insert into t values (4, 4)")
    with contextlib.nullcontext() if down else running(shop, connection):
        if way == "swapped":
            run("begin; alter table t rename to old; alter table u rename to t; commit")
        else:
            run("drop table t; create table t(id int primary key, a int)")
        run("insert into t values (3, 30)")
        if down:
            shop.run("caught up")
        wait(lambda: same(log, connection, "t"))
        run("update t set a = 31 where id = 3")
    shop.run("caught up")
    assert same(log, connection, "t")


def test_a_table_that_left_the_publication_is_read_anew_when_asked(
    database: Database, connect: Connect, log: EmbeddedLog
) -> None:
    """What the error says, helps."""
    connection = connect()
    connection.execute("create table t(id int primary key, a int)")
    connection.execute("insert into t values (1, 1), (2, 2)")
    shop = capture(log, database.dsn())
    shop.run("caught up")
    connection.execute("alter publication headrace_shop drop table t; delete from t where id = 1")
    connection.execute("update t set a = 20; insert into t values (3, 30)")
    with pytest.raises(errors.TableLeftPublication):
        shop.run("caught up")
    ask = asked.Settings(database.dsn(), snapshots={"public.t": 1})
    asked.change(log, "shop", lambda _: ask)
    shop.run("caught up")
    assert same(log, connection, "t")


def test_an_entry_that_failed_is_not_taken_for_written(
    database: Database, connect: Connect, log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = make(connect, "a")
    shop = capture(log, database.dsn())
    shop.run("caught up")
    Writer(connection, ["a"], "x").change()
    append = log.append_entry

    def full(parts: Any, *more: Any, **options: Any) -> Any:
        if parts:
            raise OSError("disk full")
        return append(parts, *more, **options)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(log, "append_entry", full)
        connection.execute("insert into a select 900, 'x', 't', 1, null, now()")
        shop.run("caught up")
    shop.run("caught up")
    assert differences(log, connection, "shop", ["a"]) == []


def test_a_capture_stops_when_the_database_is_away(log: EmbeddedLog) -> None:
    away = threading.Event()
    shop = capture(log, "postgresql://localhost:1/x", lost=lambda _: away.set())
    thread = threading.Thread(target=shop.run, daemon=True)
    thread.start()
    assert away.wait(30)
    shop.stop()
    thread.join(30)
    assert not thread.is_alive()


def test_tables_whose_key_cannot_be_used(
    database: Database, connect: Connect, log: EmbeddedLog
) -> None:
    """They are not published, or their owner's updates would fail; and say why."""
    run = connect().execute
    run("create table late(id int primary key deferrable, a int)")
    run("create table mute(id int primary key, a int)")
    run("alter table mute replica identity nothing")
    run("create table moved(id int primary key, e int not null unique)")
    for table in ("late", "mute", "moved"):
        run(f"insert into {table} values (1, 1)")
    shop = capture(log, database.dsn())
    shop.run("caught up")
    for table in ("late", "mute"):
        run(f"update {table} set a = 2")
    run("alter table moved replica identity using index moved_e_key")
    run("update moved set e = 2")
    shop.run("caught up")
    assert shop.state is not None
    found = shop.state.tables
    assert {found[f"public.{one}"].status for one in ("late", "mute", "moved")} == {"stopped"}
    assert "key is now (e)" in found["public.moved"].reason
    run("alter table moved replica identity nothing")
    shop.run("caught up")
    assert "key is now (e)" in found["public.moved"].reason


def test_somebody_locks_a_table(database: Database, connect: Connect, log: EmbeddedLog) -> None:
    """The others go on, and the capture can be stopped."""
    connection = make(connect, "a", "b")
    shop = capture(log, database.dsn(), heartbeat_seconds=0.2)
    shop.run("caught up")
    locks = connect()

    def reading() -> bool:
        return any(one.name.startswith("headrace-snapshot") for one in threading.enumerate())

    with running(shop, connection) as thread:
        locks.execute("begin; lock table b in access exclusive mode")
        for number in range(2):
            time.sleep(0.5)
            connection.execute(f"insert into a select {number}, 'x', 't', 1, null, now()")
        wait(lambda: differences(log, connection, "shop", ["a"]) == [])
        ask = asked.Settings(database.dsn(), snapshots={"public.b": 1})
        asked.change(log, "shop", lambda _: ask)
        wait(reading)  # it waits for the lock
    assert not thread.is_alive()
    wait(lambda: not reading())


def test_a_table_that_cannot_be_carried_stops_and_the_others_go_on(
    database: Database, connect: Connect, log: EmbeddedLog
) -> None:
    connection = make(connect, "a")
    run = connection.execute
    run("create table bad(id int primary key, n numeric(4, 1))")
    run("create table nokey(n int)")
    run("insert into bad values (1, 1.5)")
    shop = capture(log, database.dsn())
    shop.run("caught up")
    assert shop.state is not None
    assert shop.state.tables["public.nokey"].status == "stopped"
    assert "primary key" in shop.state.tables["public.nokey"].reason
    run("insert into bad values (2, 'NaN')")
    Writer(connection, ["a"], "x").change()
    shop.run("caught up")
    assert shop.state.tables["public.bad"].status == "stopped"
    assert "NaN" in shop.state.tables["public.bad"].reason
    assert shop.state.tables["public.bad"].reason.startswith("column ")
    assert shop.state.tables["public.bad"].reason.endswith("(HR-CAPTURE-021)")
    assert differences(log, connection, "shop", ["a"]) == []


def test_an_older_capture_is_fenced(database: Database, connect: Connect, log: EmbeddedLog) -> None:
    connection = make(connect, "a")
    old = capture(log, database.dsn())
    old.run("caught up")
    new = capture(log, database.dsn())
    new.run("caught up")
    Writer(connection, ["a"], "x").change()
    with pytest.raises(errors.Fenced):
        old.run("caught up")


def test_a_snapshot_puts_right_what_differs(
    database: Database, connect: Connect, log: EmbeddedLog
) -> None:
    connection = make(connect, "a")
    connection.execute(
        "insert into a select g, 'x', 't', 1, null, now() from generate_series(1, 20) g"
    )
    shop = capture(log, database.dsn(), chunk_rows=6)
    shop.run("caught up")
    rows = log.table("shop.public.a").scan().read_all().to_pylist()
    wrong = [{**row, "_weight": -1} for row in (rows[3], rows[11])]  # two are gone, one is another
    wrong += [{**rows[11], "title": "other", "_weight": 1}, {**rows[0], "id": 99, "_weight": 1}]
    log.append(
        "shop.public.a", [{k: v for k, v in row.items() if k != "_position"} for row in wrong]
    )
    assert differences(log, connection, "shop", ["a"]) != []
    before = log.position
    shop.snapshot("public.a")
    shop.run("caught up")
    assert differences(log, connection, "shop", ["a"]) == []
    changed = [
        row for batch in log.read("shop.public.a", after=before) for row in batch.to_pylist()
    ]
    assert sorted((row["id"], row["_weight"]) for row in changed) == [
        (4, 1), (12, -1), (12, 1), (99, -1),
    ]  # fmt: skip


def test_a_message_right_before_its_commit(database: Database, connect: Connect) -> None:
    """The resume point behind a message outside of transactions is not behind what follows it.

    A transaction that sends one, and then commits, has its commit right behind it: from one byte
    further on the server leaves the whole transaction out.
    """
    connection = make(connect, "a")
    connection.execute("create publication p for table a")
    connection.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
    with connection.transaction():
        connection.execute("insert into a (id, part) values (1, 'm')")
        emitted = "select pg_logical_emit_message(false, 'mine', 'x') - '0/0'"
        (end,) = connection.execute(emitted).fetchone()
    with Stream(database.dsn(), "s", "p", 0) as stream:
        come = list(stream.receive(10.0))
        while len(come) < 2:
            come += stream.receive(10.0)
    message, transaction = come
    assert isinstance(message, Message)
    assert isinstance(transaction, Transaction)
    assert message.lsn == int(end) < transaction.end_lsn
    assert Group([message]).end == message.lsn
    with Stream(database.dsn(), "s", "p", Group([message]).end) as stream:
        again = [one for one in stream.receive(10.0) if isinstance(one, Transaction)]
    assert [one.xid for one in again] == [transaction.xid]
