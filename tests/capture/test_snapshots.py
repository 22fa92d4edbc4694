"""Snapshots against a real server: tables in parallel, without a key, and what they must see.

Caught: rows counted twice or never in a table without a key, whatever happens between its pieces
(R-B3); a snapshot that uses rows older than what the log has; one that misses what was written
before the table was published; a table that grows and is never done. Not caught: interleavings that
did not happen; a server that tells other transaction numbers than it uses.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

import headrace as hr
from headrace.log.embedded.log import EmbeddedLog
from headrace.sources.postgres import snapshot, snapshots
from headrace.sources.postgres.capture import Capture
from headrace.sources.postgres.snapshots import Progress
from headrace.testing.capture_bag import Bag, bag_case, counted
from headrace.testing.postgres import Server
from tests.capture.conftest import Database
from tests.capture.kit import added_up

Connect = Callable[..., psycopg.Connection[Any]]


@pytest.fixture
def connect(database: Database) -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:
        yield lambda **more: stack.enter_context(database.connect(**more))


@pytest.mark.parametrize("seed", range(5))
def test_a_table_without_a_key(database: Database, log: EmbeddedLog, seed: int) -> None:
    assert bag_case(database.server, database.name, log, str(seed)) == ""


@pytest.mark.timeout(120)
def test_a_table_without_a_key_while_others_write(
    database: Database, connect: Connect, log: EmbeddedLog
) -> None:
    """With readers in threads, and tables in parallel."""
    bag = Bag([connect() for _ in range(3)], "threads")
    bag.write(60)
    bag.finish()
    other = connect()
    for table in ("a", "b", "c", "d", "e"):
        other.execute(f"create table {table}(id int primary key, n int)")
        other.execute(f"insert into {table} select g, 0 from generate_series(1, 500) g")
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(0.002):
            bag.write(3)
            table = bag.chance.choice("abcde")
            other.execute(
                f"update {table} set n = n + 1 where id %% 50 = %s", (bag.chance.randrange(50),)
            )
            other.execute(f"delete from {table} where id = %s", (bag.chance.randrange(500),))

    thread = threading.Thread(target=write)
    thread.start()
    seen: list[str] = []
    try:
        shop = Capture(log, "shop", database.dsn(), chunk_rows=40, readers=3,
                       report=lambda progress: seen.append(progress.table))  # fmt: skip
        shop.run("caught up")
        shop.snapshot("public.bag")
        shop.snapshot("public.c")
        shop.run("caught up")
    finally:
        stop.set()
        thread.join()
    bag.finish()
    shop.run("caught up")
    assert counted(log) == bag.rows()
    for table in "abcde":
        rows = log.table(f"shop.public.{table}").scan().read_all().to_pylist()
        expected = other.execute(f"select id, n from {table} order by id").fetchall()
        assert [(row["id"], row["n"]) for row in rows] == expected
    firsts = [seen.index(f"public.{table}") for table in "abc"]
    assert max(firsts) < len(seen) - 1 - seen[::-1].index("public.a"), "one after the other"


def test_what_a_table_without_a_key_needs(
    database: Database, connect: Connect, log: EmbeddedLog
) -> None:
    """REPLICA IDENTITY FULL; what is refused says so, and is taken when it was put right."""
    run = connect().execute
    run("create table bag(n int, body text)")
    run("insert into bag values (1, 'a'), (1, 'a')")
    shop = Capture(log, "shop", database.dsn())
    shop.run("caught up")
    assert shop.state is not None
    assert shop.state.tables["public.bag"].status == "stopped"
    assert "FULL" in shop.state.tables["public.bag"].reason
    run("alter table bag replica identity full")
    shop.snapshot("public.bag")
    shop.run("caught up")
    assert shop.state.tables["public.bag"].status == "live"
    run("delete from bag where ctid in (select ctid from bag limit 1)")
    shop.run("caught up")
    assert counted(log) == {(1, "a"): 1}
    run("begin; insert into bag values (3, 'x'); truncate bag; insert into bag values (2, 'b');"
        " commit")  # fmt: skip
    shop.run("caught up")
    assert counted(log) == {(2, "b"): 1}
    run("alter table bag add column c int default 5")
    shop.run("caught up")
    run("alter table bag alter n set not null; create unique index one on bag(n)")
    run("alter table bag replica identity using index one; delete from bag")
    shop.run("caught up")
    assert shop.state.tables["public.bag"].status == "stopped"
    assert "FULL" in shop.state.tables["public.bag"].reason


def test_a_table_that_grows_as_fast_as_it_is_read_is_done(
    database: Database, connect: Connect, log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = connect().execute
    run("create table t(id int primary key)")
    run("insert into t select generate_series(1, 20)")
    reading, chunks = snapshot.read_chunk, 0

    def grown(*given: Any) -> Any:
        nonlocal chunks
        chunks += 1
        assert chunks < 50, "it reads what the stream brings"
        run("insert into t select max(id) + g from t, generate_series(1, 5) g group by g")
        return reading(*given)

    monkeypatch.setattr(snapshots, "read_chunk", grown)
    Capture(log, "shop", database.dsn(), chunk_rows=4, readers=0).run("caught up")
    rows = log.table("shop.public.t").scan().read_all().column("id").to_pylist()
    assert rows == list(range(1, 21 + 5 * chunks))


def test_a_chunk_reads_no_other_rows_also_without_statistics(connect: Connect) -> None:
    """By the index in its order; the planner would rather sort all that is left, each time."""
    connection = connect()
    connection.execute("create table t(id int primary key) with (autovacuum_enabled = false)")
    connection.execute("insert into t select generate_series(1, 20000)")
    wanted = snapshot.Wanted(
        ("public", "t"), ["id"], ["id"], 100, lambda texts: texts, after=["1"], upto=["20000"]
    )
    chunk = snapshot.read_chunk(connection, wanted)
    assert chunk is not None
    assert (chunk.count, chunk.last) == (100, ["101"])
    connection.execute("select pg_stat_force_next_flush()")
    read = connection.execute("select idx_tup_read from pg_stat_user_indexes where relname = 't'")
    assert read.fetchone() == (100,)


def test_rows_that_are_wider_than_the_server_thinks_are_chunks_of_few(
    database: Database, connect: Connect, log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or all rows of a table that packs well would be in memory at once."""
    run = connect().execute
    run("create table t(id int primary key, v text)")
    run("insert into t select g, repeat('x', 1000000) from generate_series(1, 40) g")
    monkeypatch.setattr(snapshots, "CHUNK_BYTES", 1 << 20)
    Capture(log, "shop", database.dsn()).run("caught up")
    chunks = [row["rows"] for one in log.read("shop._snapshots") for row in one.to_pylist()]
    assert sum(chunks) == 40
    assert max(chunks) < 20
    said = [row["id"] for one in log.read("shop.public.t") for row in one.to_pylist()]
    assert said == [*range(1, 41)]


@pytest.mark.parametrize("path", ["public", "''", '"$user", "No Such"'])
def test_keys_of_a_type_whose_schema_is_not_in_the_search_path(
    database: Database, connect: Connect, log: EmbeddedLog, path: str
) -> None:
    """Compared as text, but sorted as citext, chunks would leave out rows."""
    run = connect().execute
    run('create schema "Of types"; create extension citext schema "Of types"')
    run('create domain "Of types".code as "Of types".citext')
    names = "select name, 0 from unnest(array['a', 'B', 'c', 'D', 'e', 'F', 'g']) name"
    for table, kind in (("t", "citext"), ("u", "code")):
        run(f'create table {table}(id "Of types".{kind}, n int, primary key (id, n))')
        run(f"insert into {table} {names}")
    run(f"alter database {database.name} set search_path = {path}")
    Capture(log, "shop", database.dsn(), chunk_rows=2).run("caught up")
    for table in ("t", "u"):
        said = [row["id"] for one in log.read(f"shop.public.{table}") for row in one.to_pylist()]
        assert sorted(said) == ["B", "D", "F", "a", "c", "e", "g"]


@pytest.mark.parametrize(("kind", "index"), [("label", ""), ("hstore", ""), ("citext", "text_ops")])
def test_keys_that_are_told_apart_by_their_index_only(
    database: Database, connect: Connect, log: EmbeddedLog, kind: str, index: str
) -> None:
    """By the operators of the type 'a' and 'A' are one key; others have none that is found."""
    run = connect().execute
    run("create extension hstore; create extension citext")
    run("create type word as enum ('b=>1', 'B=>1', 'a=>1'); create domain label as word")
    run(f"create table t(id {kind} not null); create unique index i on t(id {index})")
    run("alter table t replica identity using index i")
    run("insert into t values ('b=>1'), ('B=>1'), ('a=>1')")
    Capture(log, "shop", database.dsn(), chunk_rows=1).run("caught up")
    said = [row["id"] for one in log.read("shop.public.t") for row in one.to_pylist()]
    assert sorted(one.replace('"', "") for one in said) == ["B=>1", "a=>1", "b=>1"]


def test_keys_of_a_type_whose_schema_may_not_be_used(
    database: Database, connect: Connect, log: EmbeddedLog
) -> None:
    run = connect().execute
    run("create role few login replication; create schema hidden")
    try:
        run("create extension citext schema hidden; create table t(id hidden.citext primary key)")
        run("grant select on t to few; create publication headrace_shop for table t")
        shop = Capture(log, "shop", database.dsn(user="few"))
        shop.run("caught up")
        assert shop.state is not None
        state = shop.state.tables["public.t"]
        assert (state.status, state.reason) == ("stopped", "permission denied for schema hidden")
    finally:
        run("drop owned by few; drop role few")


def test_what_is_written_before_the_table_is_published_is_not_missed(
    database: Database, connect: Connect, log: EmbeddedLog
) -> None:
    """A transaction that is under way then is in no stream: it is waited for."""
    connection, open_ = connect(), connect()
    connection.execute("create table t(id int primary key); create table u(id int primary key)")
    shop = Capture(log, "shop", database.dsn(), ["public.u"])
    shop.run("caught up")  # the slot is there
    open_.execute("begin; insert into t values (1)")
    more = Capture(log, "shop", database.dsn(), heartbeat_seconds=0.1)
    running = threading.Thread(target=more.run, args=("caught up",))
    running.start()
    _wait(lambda: more.state is not None and "public.t" in more.state.tables)
    connection.execute("insert into t values (2)")
    time.sleep(0.5)  # long enough to go wrong
    open_.execute("commit")
    running.join()
    rows = log.table("shop.public.t").scan().read_all().column("id").to_pylist()
    assert rows == [1, 2]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("keyed", [True, False])
def test_a_commit_that_waits_for_a_standby(tmp_path: Path, keyed: bool) -> None:
    """It is in the log, and not yet seen by others: no snapshot may take it back, also later."""
    with (
        Server(synchronous_standby_names="nobody") as server,
        hr.connect(tmp_path / "log") as log,
        server.connect(options="-c synchronous_commit=local") as control,
        server.connect() as other,
        server.connect() as later,
    ):
        identity = "" if keyed else "; alter table bag replica identity full"
        key = "primary key" if keyed else ""
        control.execute(f"create table bag(n int {key}, body text){identity}")
        control.execute("insert into bag values (1, 'old'), (2, 'two')")
        shop = Capture(log, "shop", server.dsn(), heartbeat_seconds=0.1)
        shop.run("caught up")
        waiting = threading.Thread(
            target=other.execute, args=("update bag set body = 'new' where n = 1",)
        )
        waiting.start()
        threads = [waiting]
        try:
            _wait(lambda: shop.run("caught up") and counted(log)[1, "new"] == 1)
            assert control.execute("select body from bag where n = 1").fetchone() == ("old",)
            again = Capture(log, "shop", server.dsn(), heartbeat_seconds=0.1)
            assert again.state is not None
            before = log.position
            again.state.tables["public.bag"].asked = -1
            with log.transaction() as entry:
                entry.put("capture/shop", {"snapshots": {"public.bag": 0}})
            threads.append(threading.Thread(target=again.run, args=("caught up",)))
            threads[1].start()
            tables = again.state.tables
            _wait(lambda: tables["public.bag"].status == "snapshotting")
            time.sleep(0.5)  # long enough to go wrong
            assert threads[1].is_alive(), "it did not wait"
            # One more, which comes while it waits; then the first is let go, and it is seen.
            query = "update bag set body = 'newer' where n = 2"
            threads.append(threading.Thread(target=later.execute, args=(query,)))
            threads[2].start()
            _wait(lambda: tables["public.bag"].unseen or counted(log)[2, "newer"] == 1)
            control.execute("select pg_cancel_backend(%s)", (other.info.backend_pid,))
            threads[0].join()
            time.sleep(0.5)  # as above
            assert keyed or threads[1].is_alive(), "it did not wait"
        finally:
            control.execute("alter system set synchronous_standby_names = ''")
            control.execute("select pg_reload_conf()")
            for thread in threads:
                thread.join()
        assert counted(log) == {(1, "new"): 1, (2, "newer"): 1}
        assert sorted(
            (row["n"], row["_weight"])
            for batch in log.read("shop.public.bag", after=before)
            for row in batch.to_pylist()
        ) == [(2, -1), (2, 1)]


def test_a_reader_whose_connection_is_cut_says_so(database: Database) -> None:
    """By an error after which the capture connects again, not one that ends it."""
    with contextlib.suppress(psycopg.OperationalError), database.connect() as connection:
        with socket.socket(fileno=os.dup(connection.pgconn.socket)) as cut:
            cut.shutdown(socket.SHUT_RDWR)
        query = sql.SQL("COPY (SELECT 1) TO STDOUT").format()
        with pytest.raises(psycopg.OperationalError):
            list(snapshot.copied(connection, query))


@pytest.mark.timeout(120)
def test_a_delete_that_waits_for_a_standby_while_a_capture_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream has said it, no row in the log says so: it must be seen before one goes on."""
    read, go_on = snapshots.Snapshots._read, threading.Event()

    def one_chunk(self: Any, name: Any, captured: Any, control: Any) -> None:
        if go_on.is_set() or not (captured.state.rows or captured.chunks):
            read(self, name, captured, control)

    monkeypatch.setattr(snapshots.Snapshots, "_read", one_chunk)
    with (
        Server(synchronous_standby_names="nobody") as server,
        hr.connect(tmp_path / "log") as log,
        server.connect(options="-c synchronous_commit=local") as control,
        server.connect() as other,
    ):
        control.execute("create table bag(n int primary key, body text)")
        control.execute("insert into bag values (1, 'one'), (2, 'two'), (3, 'three')")
        shop = Capture(log, "shop", server.dsn(), heartbeat_seconds=0.1, chunk_rows=1)
        threads = [threading.Thread(target=shop.run)]
        threads[0].start()
        try:
            _wait(lambda: shop.state and shop.state.tables.get("public.bag"))
            assert shop.state is not None
            bag = shop.state.tables["public.bag"]
            _wait(lambda: bag.rows == 1)
            delete = "delete from bag where n = 3"
            threads.append(threading.Thread(target=other.execute, args=(delete,)))
            threads[1].start()
            _wait(lambda: bag.dirty)  # it was heard
            shop.stop()
            threads[0].join()
            go_on.set()
            again = Capture(log, "shop", server.dsn(), heartbeat_seconds=0.1, chunk_rows=1)
            threads.append(threading.Thread(target=again.run, args=("caught up",)))
            threads[2].start()
            threads[2].join(1.0)  # long enough to go wrong
        finally:
            shop.stop()
            control.execute("alter system set synchronous_standby_names = ''")
            control.execute("select pg_reload_conf()")
            for thread in threads:
                thread.join()
        assert counted(log) == {(1, "one"): 1, (2, "two"): 1}


def _wait(what: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_rows_that_change_their_keys_with_each_other_while_they_are_read(
    database: Database, connect: Connect, log: EmbeddedLog
) -> None:
    """A deferrable key, which only the end of a transaction makes unique. Chunks are read ahead."""
    run = connect().execute
    run("create table t(id int primary key deferrable initially deferred, v int)")
    run("alter table t replica identity full")
    run("insert into t select g, g from generate_series(1, 100) g")
    swapped = 0

    def swap(one: Progress) -> None:
        nonlocal swapped
        swapped += 1
        ahead = one.rows + 2
        run(
            f"update t set id = case id when {ahead} then {ahead + 2} else {ahead} end"
            f" where id in ({ahead}, {ahead + 2})"
        )

    shop = Capture(log, "shop", database.dsn(), chunk_rows=2, readers=1, report=swap)
    shop.run("caught up")
    shop.run("caught up")
    assert swapped > 40
    assert added_up(log, "shop.public.t") == Counter(run("select id, v from t").fetchall())
