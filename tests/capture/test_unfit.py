"""Tables that cannot be followed any more are stopped with a name, and nothing else is. R-B3, R-B5

Caught: a table that is called live while its changes are in no stream (it left the publication, is
unlogged, has a partition that is, says no old rows), or that ends the capture of the others; an
error of the whole capture that is taken for one of a table. Not caught: other ways to become so.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import psycopg
import pytest

from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.sources.postgres import snapshot, snapshots
from headrace.sources.postgres.capture import Capture
from headrace.sources.postgres.preflight import Wanted, findings
from headrace.sources.postgres.prepare import reached
from headrace.testing.postgres import Server
from tests.capture.conftest import Database
from tests.capture.kit import added_up, capture, ending
from tests.capture.test_capture import running, wait
from tests.capture.test_tables import asks, reason, rows, statuses


@pytest.fixture
def connection(database: Database) -> Iterator[psycopg.Connection[Any]]:
    with database.connect() as connection:
        yield connection


@contextlib.contextmanager
def following(shop: Capture, connection: psycopg.Connection[Any]) -> Iterator[threading.Thread]:
    """The capture while it streams: it has looked at everything, and would have refused to start.

    The slot alone may be called active for a moment after the run before.
    """
    assert shop.state is not None
    before = shop.state.starts
    with running(shop, connection) as thread:
        wait(lambda: shop.state is not None and shop.state.starts > before)
        yield thread


LEFT = "alter publication headrace_shop drop table t;"


@pytest.mark.parametrize("down", [False, True], ids=["", "while nobody is there"])
@pytest.mark.parametrize(
    ("first", "then", "said", "back"),
    [
        ("", LEFT + "alter table t set unlogged", "is unlogged", "alter table t set logged"),
        ("", LEFT + "alter table t drop constraint t_pkey", "no primary key",
         "alter table t add primary key (id)"),
        ("alter table t drop constraint t_pkey; alter table t replica identity full",
         LEFT + "alter table t replica identity default", "is not FULL",
         "alter table t replica identity full"),
        ("", "drop table t; create unlogged table t(id int primary key)", "is unlogged",
         "alter table t set logged"),
    ],
    ids=["unlogged", "no key", "not full", "another table"],
)  # fmt: skip
def test_a_table_that_is_asked_for_and_cannot_be_published_is_stopped(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any],
    first: str, then: str, said: str, back: str, down: bool,
) -> None:  # fmt: skip
    """Once it was in the publication; live, it would say nothing of its changes."""
    run = connection.execute
    run(("create table t(id int primary key);" + first).encode())
    run("create table good(id int primary key); insert into t values (1)")
    shop = capture(log, database.dsn(), heartbeat_seconds=3600)
    shop.run("caught up")

    def ask(times: int) -> None:
        asks(log, database, t=times)
        if down:
            shop.run("caught up")

    with contextlib.nullcontext() if down else following(shop, connection):
        run(then.encode())
        ask(1)
        wait(lambda: statuses(shop)["public.t"] == "stopped")
        assert said in reason(shop, "public.t")
        assert "HR-CAPTURE-012" in reason(shop, "public.t")
    run("insert into t values (2); insert into good values (1)")
    shop.run("caught up")
    assert statuses(shop) == {"public.t": "stopped", "public.good": "live"}
    assert rows(log, "public.good") == [(1,)]
    run(back.encode())
    with contextlib.nullcontext() if down else following(shop, connection):
        ask(2)
        wait(lambda: statuses(shop)["public.t"] == "live")
        run("insert into t values (3)")
    shop.run("caught up")
    assert added_up(log, "shop.public.t") == dict.fromkeys(run("select * from t").fetchall(), 1)


@pytest.mark.parametrize("partitioned", [False, True], ids=["", "partitioned"])
@pytest.mark.parametrize("to", ["nothing", "default", "using index t_id"])
def test_a_table_without_a_key_that_says_no_old_rows_any_more_is_stopped(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any],
    partitioned: bool, to: str,
) -> None:  # fmt: skip
    """At once, not with the next update."""
    run = connection.execute
    run("create table good(id int primary key)")
    run("create table t(id int not null) partition by range (id)" if partitioned
        else "create table t(id int not null)")  # fmt: skip
    run("create unique index t_id on t(id)")
    parts = ["t"]
    if partitioned:
        run("create table t1 partition of t for values from (0) to (100)")
        parts.append("t1")
    for one in parts:
        run(f"alter table {one} replica identity full")
    run("insert into t values (1)")
    shop = capture(log, database.dsn(), heartbeat_seconds=0.3)
    shop.run("caught up")
    with following(shop, connection):
        index = "t1_id_idx" if partitioned else "t_id"
        run(f"alter table {parts[-1]} replica identity {to.replace('t_id', index)}")
        wait(lambda: statuses(shop)["public.t"] == "stopped")
        assert "no REPLICA IDENTITY FULL any more (HR-CAPTURE-012)" in reason(shop, "public.t")
        run("insert into t values (2); insert into good values (1)")
        wait(lambda: rows(log, "public.good") == [(1,)])
        assert statuses(shop) == {"public.t": "stopped", "public.good": "live"}
        run(f"alter table {parts[-1]} replica identity full")
        asks(log, database, t=1)
        wait(lambda: added_up(log, "shop.public.t") == {(1,): 1, (2,): 1})


WRAPPER = "create foreign data wrapper w; create server s foreign data wrapper w"
ATTACHED = {
    "foreign": (False, "create foreign table t2 (id int not null) server s"),
    "unlogged": (False, "create unlogged table t2 (id int not null)"),
    "unlogged, keyed": (True, "create unlogged table t2 (id int primary key)"),
}


@pytest.mark.parametrize(("key", "made"), ATTACHED.values(), ids=ATTACHED)
def test_a_table_that_gets_a_partition_whose_changes_are_in_no_stream_is_stopped(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any], key: bool, made: str
) -> None:
    run = connection.execute
    run(WRAPPER)
    run("create table good(id int primary key)")
    run("create table t(id int not null) partition by range (id)")
    run("create table t1 partition of t for values from (0) to (100)")
    for one in ("t", "t1"):
        if not key:
            run(f"alter table {one} replica identity full")
    if key:
        run("alter table t add primary key (id)")
    run("insert into t values (1)")
    shop = capture(log, database.dsn(), heartbeat_seconds=0.3)
    shop.run("caught up")
    with following(shop, connection):
        run(made.encode())
        run("alter table t attach partition t2 for values from (100) to (200)")
        wait(lambda: statuses(shop)["public.t"] == "stopped")
        assert "partition that is unlogged or foreign" in reason(shop, "public.t")
        assert "HR-CAPTURE-012" in reason(shop, "public.t")
        run("insert into good values (1)")
        wait(lambda: rows(log, "public.good") == [(1,)])
        run("alter table t detach partition t2; insert into t values (2)")
        asks(log, database, t=1)
        wait(lambda: added_up(log, "shop.public.t") == {(1,): 1, (2,): 1})


LOST = {
    "nothing": ("", "", "alter table t replica identity nothing", "no replica identity any more"),
    "no key": ("", "", "alter table t drop constraint t_pkey", "no replica identity any more"),
    "partition": (" partition by range (id)", "", "alter table t1 replica identity nothing",
                  "no replica identity any more"),
    "not full": ("", "full", "alter table t replica identity default", "FULL any more"),
}  # fmt: skip


@pytest.mark.parametrize("down", [False, True], ids=["", "while nobody is there"])
@pytest.mark.parametrize("reading", [False, True], ids=["live", "being read"])
@pytest.mark.parametrize(("parts", "identity", "lost", "said"), LOST.values(), ids=LOST)
def test_an_identity_that_is_lost_stops_its_table_and_is_said(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any],
    parts: str, identity: str, lost: str, said: str, reading: bool, down: bool,
) -> None:  # fmt: skip
    """One that is started refuses first, if it did not know; what came before is in the topic."""
    run, told = connection.execute, []
    run("create table good(id int primary key)")
    run(f"create table t(id int not null){parts}".encode())
    if parts:
        run("create table t1 partition of t for values from (0) to (100)")
    run("alter table t replica identity full" if identity else "alter table t add primary key (id)")
    run("insert into t values (1)")
    shop = capture(
        log, database.dsn(), heartbeat_seconds=0.3,
        stopped=lambda table, why: told.append(f"{table} {why}"),
    )  # fmt: skip
    shop.run("caught up")
    assert told == []
    with contextlib.nullcontext() if down else following(shop, connection):
        with connection.transaction():
            run("insert into t values (2)")
            if reading:
                asks(log, database, t=1)
            run(lost.encode())
        run("insert into t values (3); insert into good values (1)")
        if not down:
            wait(lambda: statuses(shop)["public.t"] == "stopped")
    if down and not reading:
        with pytest.raises(errors.NoReplicaIdentity):
            shop.run("caught up")
        return
    shop.run("caught up")
    assert statuses(shop) == {"public.t": "stopped", "public.good": "live"}
    assert rows(log, "public.good") == [(1,)]
    assert f"{said} (HR-CAPTURE-012)" in reason(shop, "public.t")
    if not reading:
        assert added_up(log, "shop.public.t") >= Counter([(1,), (2,)])
    again = len(told)
    shop.run("caught up")
    assert told[again:] == [f"public.t {reason(shop, 'public.t')}"]  # at each start
    assert set(told) == {told[0]}


def test_a_table_that_is_unfit_from_the_start_is_said_once(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    connection.execute("create table bare(); create table t(id int primary key)")
    told: list[str] = []
    capture(log, database.dsn(), stopped=lambda table, _: told.append(table)).run("caught up")
    assert told == ["public.bare"]


@pytest.mark.parametrize("down", [False, True], ids=["", "while nobody is there"])
def test_a_stopped_table_may_be_taken_out_of_the_publication(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any], down: bool
) -> None:
    """As one must that has no identity: else the server refuses its updates. The others go on."""
    run = connection.execute
    run("create table good(id int primary key); create table t(id int primary key)")
    run("insert into t values (1), (2)")
    shop = capture(log, database.dsn(), heartbeat_seconds=0.3)
    shop.run("caught up")
    with following(shop, connection):
        run("alter table t replica identity nothing; insert into t values (3)")
        wait(lambda: statuses(shop)["public.t"] == "stopped")
        if not down:
            run(LEFT.encode())
            time.sleep(1)  # some looks
    if down:
        run(LEFT.encode())
    run("delete from t where id = 1; insert into good values (1)")
    shop.run("caught up")
    assert statuses(shop) == {"public.t": "stopped", "public.good": "live"}
    assert rows(log, "public.good") == [(1,)]
    run("alter table t replica identity default")
    asks(log, database, t=1)
    shop.run("caught up")
    run("update t set id = 4 where id = 2")
    shop.run("caught up")
    assert added_up(log, "shop.public.t") == {(3,): 1, (4,): 1}


CHANGES = {
    "value": "update t set a = 9 where id = 1",
    "delete": "delete from t where id = 1",
    "key": "update t set id = 9 where id = 1",  # it says no old columns at all
    "keys": "update t set id = 9 where id = 2; update t set id = 2 where id = 1",
}


@pytest.mark.parametrize("back", [False, True], ids=["", "and back"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "by parts"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_partition_that_names_its_rows_by_other_columns_stops_its_table_only(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any],
    change: str, back: bool, large: bool,
) -> None:  # fmt: skip
    """Whatever comes before the look, which would have seen it; not if all is well by then."""
    run = connection.execute
    run("create table good(id int primary key)")
    run("create table t(id int primary key, a int not null) partition by range (id)")
    run("create table t1 partition of t for values from (0) to (100)")
    run("create unique index t1_a on t1(a); insert into t values (1, 1), (2, 2)")
    shop = capture(log, database.dsn(), heartbeat_seconds=3600, part_bytes=1 if large else 1 << 20)
    shop.run("caught up")
    with following(shop, connection) as thread:
        with connection.transaction():
            run("alter table t1 replica identity using index t1_a")
            run(change.encode())
            if back:
                run("alter table t1 replica identity default")
        run("insert into good values (1)")
        wait(lambda: not thread.is_alive() or rows(log, "public.good") == [(1,)])
        assert thread.is_alive()
        assert statuses(shop)["public.good"] == "live"
        if not back:
            assert statuses(shop)["public.t"] == "stopped"
            assert "HR-CAPTURE-012" in reason(shop, "public.t")
            run("alter table t1 replica identity default")
            asks(log, database, t=1)
        wait(lambda: statuses(shop)["public.t"] == "live")
    assert added_up(log, "shop.public.t") == dict.fromkeys(run("select * from t").fetchall(), 1)


IDENTITIES = {
    "index": ("", "", "using index t_a", "default"),
    "nothing": ("", "", "nothing", "default"),
    "full": ("", "", "full", "default"),
    "partition": (" partition by range (id)", "", "using index t1_a_idx", "default"),
    "no key": ("", "full", "using index t_a", "full"),
    "no key, nothing": ("", "full", "nothing", "full"),
    "no key, partition": (" partition by range (id)", "full", "using index t1_a_idx", "full"),
}


@pytest.mark.parametrize("seen", [False, True], ids=["", "looked at before it comes"])
@pytest.mark.parametrize("down", [False, True], ids=["", "while nobody is there"])
@pytest.mark.parametrize(
    ("parts", "before", "meanwhile", "after"), IDENTITIES.values(), ids=IDENTITIES
)
def test_an_identity_that_was_another_one_for_a_while_stops_nothing(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
    parts: str, before: str, meanwhile: str, after: str, down: bool, seen: bool,
) -> None:  # fmt: skip
    """The stream still has changes of that while, and the catalog is as it was before."""
    run = connection.execute
    run("create table good(id int primary key)")
    run(f"create table t(id int not null, a int not null){parts}".encode())
    if parts:
        run("create table t1 partition of t for values from (0) to (100)")
        run("create index on t1(a); drop index t1_a_idx; create unique index t1_a_idx on t1(a)")
    else:
        run("create unique index t_a on t(a)")
    tables = ["t", "t1"] if parts else ["t"]
    for one in tables:
        if before:
            run(f"alter table {one} replica identity {before}".encode())
    if not before:
        run("alter table t add primary key (id)")
    run("insert into t values (1, 1), (2, 2), (3, 3), (4, 4)")
    shop = capture(log, database.dsn(), heartbeat_seconds=0.1 if seen else 3600)
    shop.run("caught up")
    if seen:  # the stream waits until the look is done
        take = Capture._take

        def late(self: Capture, group: Any, control: Any) -> None:
            self._looked_at = 0.0
            self._look(control, mock.Mock(received=0), at_once=True)
            take(self, group, control)

        monkeypatch.setattr(Capture, "_take", late)
    with contextlib.nullcontext() if down else following(shop, connection):
        with connection.transaction():
            run(f"alter table {tables[-1]} replica identity {meanwhile}".encode())
            if meanwhile != "nothing":
                run("update t set id = 9 where id = 2; update t set id = 2 where id = 1")
                run("delete from t where id = 3; update t set a = 44 where id = 4")
            run("insert into t values (5, 5)")
            run(f"alter table {tables[-1]} replica identity {after}".encode())
        run("insert into good values (1)")
        if not down:
            wait(lambda: rows(log, "public.good") == [(1,)])
    shop.run("caught up")
    assert statuses(shop) == {"public.t": "live", "public.good": "live"}
    assert added_up(log, "shop.public.t") == dict.fromkeys(run("select * from t").fetchall(), 1)


def test_a_partition_whose_identity_was_another_one_while_its_table_was_read(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A row that is missing there is nothing strange, so it does not show what happened."""
    run = connection.execute
    run("create table t(id int primary key, a int not null) partition by range (id)")
    run("create table t1 partition of t for values from (0) to (100)")
    run("create unique index t1_a on t1(a)")
    run("insert into t select g, g from generate_series(1, 6) g")
    publish, published = snapshots.Snapshots._publish, threading.Event()

    def written(*given: Any) -> None:
        publish(*given)
        if not published.is_set():
            published.set()
            with connection.transaction():
                run("alter table t1 replica identity using index t1_a")
                run("update t set id = 9 where id = 1")
                run("alter table t1 replica identity default")

    monkeypatch.setattr(snapshots.Snapshots, "_publish", written)
    shop = capture(log, database.dsn(), chunk_rows=2)
    shop.run("caught up")
    assert statuses(shop) == {"public.t": "live"}
    assert added_up(log, "shop.public.t") == dict.fromkeys(run("select * from t").fetchall(), 1)


@pytest.mark.parametrize("large", [False, True], ids=["small", "by parts"])
@pytest.mark.parametrize(
    "comes", ["insert into t values (5, 55)", "update t set id = 5 where id = 7"]
)
@pytest.mark.parametrize(("key", "identity"), [("", "default"), ("deferrable", "full")])
def test_a_row_that_was_deleted_unheard_goes_when_another_one_gets_its_key(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch, key: str, identity: str, comes: str, large: bool,
) -> None:  # fmt: skip
    """Its table was stopped, is read anew, and the first chunk sees the other row, or does not."""
    run = connection.execute
    run(f"create table t(id int primary key {key}, a int)".encode())
    run(f"alter table t replica identity {identity}".encode())
    run("insert into t select g, g from generate_series(1, 10) g")
    shop = capture(log, database.dsn(), heartbeat_seconds=0.3, part_bytes=1 if large else 1 << 20)
    shop.run("caught up")
    read, begun = snapshot.read_chunk, threading.Event()

    def written(*given: Any) -> Any:
        if begun.is_set():
            return read(*given)
        begun.set()
        run(comes.encode())
        chunk = read(*given)
        run("delete from t where id = 3; insert into t values (3, 33), (6, 66)")
        return chunk

    with following(shop, connection):
        run("alter table t replica identity nothing; insert into t values (20, 20)")
        wait(lambda: statuses(shop)["public.t"] == "stopped")
        run(f"alter table t replica identity {identity}".encode())
        run("delete from t where id in (5, 6)")
        monkeypatch.setattr(snapshots, "read_chunk", written)
        asks(log, database, t=1)
        wait(lambda: begun.is_set() and statuses(shop)["public.t"] == "live")
    shop.run("caught up")
    assert added_up(log, "shop.public.t") == dict.fromkeys(run("select * from t").fetchall(), 1)


def test_a_row_that_was_deleted_unheard_goes_when_one_gets_its_key_that_nobody_knows(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The stream leaves out a large value of that one, which is not in the topic, or an old one."""
    run = connection.execute
    run("create table t(id int primary key, a text)")
    run("alter table t alter a set storage external")
    run("insert into t select g, g from generate_series(1, 10) g")
    shop = capture(log, database.dsn(), heartbeat_seconds=0.3)
    shop.run("caught up")
    read, begun = snapshot.read_chunk, threading.Event()

    def written(*given: Any) -> Any:
        chunk = read(*given)
        if not begun.is_set():
            begun.set()
            with connection.transaction():
                run("update t set id = 5 where id = 30; delete from t where id = 5")
                run("update t set id = 6 where id = 31; update t set id = 1 where id = 7")
        return chunk

    with following(shop, connection):
        run("alter table t replica identity nothing; insert into t values (20, '')")
        wait(lambda: statuses(shop)["public.t"] == "stopped")
        run("alter table t replica identity default; delete from t where id in (5, 6)")
        run("insert into t select g, repeat('x', 9000) from generate_series(30, 31) g")
        run("update t set a = repeat('y', 9000) where id = 7; delete from t where id = 1")
        monkeypatch.setattr(snapshots, "read_chunk", written)
        asks(log, database, t=1)
        wait(lambda: begun.is_set() and statuses(shop)["public.t"] == "live")
    shop.run("caught up")
    assert added_up(log, "shop.public.t") == dict.fromkeys(run("select * from t").fetchall(), 1)


def test_what_is_wrong_with_the_publication_is_no_matter_of_the_table_that_shows_it(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    """Another table of the name comes by the stream, before the look."""
    run = connection.execute
    run("create publication headrace_shop for all tables with (publish_via_partition_root)")
    run("create table t(id int primary key); create table good(id int primary key)")
    shop = capture(log, database.dsn(), heartbeat_seconds=3600)
    shop.run("caught up")
    with ending(shop) as (thread, raised):
        run("insert into t values (1)")
        wait(lambda: rows(log, "public.t") == [(1,)])
        run("drop table t; create table t(id int primary key)")
        run("alter publication headrace_shop set (publish = 'insert')")
        run("insert into t values (2)")
        wait(lambda: bool(raised) or statuses(shop)["public.t"] != "live")
        thread.join(5)
    assert isinstance(raised[0], errors.TableLeftPublication)
    assert statuses(shop) == {"public.t": "live", "public.good": "live"}


REG = ("class", "collation", "config", "dictionary", "namespace", "oper", "operator", "proc",
       "procedure", "role", "type")  # fmt: skip


def test_rows_are_not_known_by_what_can_be_renamed(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    """A regclass is printed as the name of a table: a row would be another one after a rename."""
    run = connection.execute
    run("create domain named as regclass; create table good(id int primary key, a regclass)")
    run("create table full_row(id int, a regclass[]); alter table full_row replica identity full")
    run("create table later(id text primary key)")
    for one in (*(f"reg{one}" for one in REG), "named"):
        run(f"create table k_{one}(id {one} primary key, a int)")
        run(f"insert into k_{one} select oid::{one}, 1 from pg_class limit 3")
    with reached(database.dsn()) as connected:
        want = Wanted("headrace_shop", "headrace_shop", ("*",))
        warned = [one for one in findings(connected, want) if "another key" in one.why]
    shop = capture(log, database.dsn())
    shop.run("caught up")
    run("alter table later alter id type regclass using id::regclass")
    run("insert into later values ('later')")
    shop.run("caught up")
    found = statuses(shop)
    assert found.pop("public.good") == "live"
    assert set(found.values()) == {"stopped"}
    assert len(found) == len(REG) + 3
    assert {f"table {one}" for one in found} == {one.where for one in warned} | {
        "table public.later"
    }
    for table in found:
        assert "are not carried in a key" in reason(shop, table)
        assert "HR-CAPTURE-020" in reason(shop, table)


def test_a_publication_that_has_partitions_instead_of_their_table_is_refused(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    connection.execute("create publication headrace_shop")
    connection.execute("create table p(id int primary key) partition by range (id)")
    connection.execute("create table p1 partition of p default")
    connection.execute("insert into p values (1)")
    with pytest.raises(errors.TableLeftPublication, match="publish_via_partition_root"):
        capture(log, database.dsn()).run("caught up")
    connection.execute("alter publication headrace_shop set (publish_via_partition_root)")
    capture(log, database.dsn()).run("caught up")
    assert added_up(log, "shop.public.p") == {(1,): 1}


def test_what_is_said_of_a_table_that_is_full_and_cannot_be(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    """It is not told to do what it has done."""
    connection.execute("create table t(a int); alter table t replica identity full")
    capture(log, database.dsn()).run("caught up")
    connection.execute("alter table t drop column a")
    with pytest.raises(errors.NoReplicaIdentity) as raised:
        capture(log, database.dsn()).run("caught up")
    assert raised.value.fix == 'give table "public"."t" a primary key'


def test_a_text_that_is_not_utf8_stops_its_table_only(postgres: Server, log: EmbeddedLog) -> None:
    """A database of the encoding SQL_ASCII takes any bytes; the server would end the stream."""
    with postgres.connect() as control:
        control.execute("create database loose encoding 'SQL_ASCII' locale 'C' template template0")
    try:
        with postgres.connect("loose", client_encoding="SQL_ASCII") as connection:
            run = connection.execute
            run("create table t(id int primary key, v text); create table u(id int primary key)")
            run(b"create table there(id int primary key, v text)")
            run(b"insert into there values (1, E'caf\\xe9')")
            shop = capture(log, postgres.dsn("loose"))
            shop.run("caught up")
            run(b"insert into t values (1, 'caf\xc3\xa9')")
            run(b"select pg_logical_emit_message(true, E'\\xe9', 'said')")
            run(b"insert into t values (2, E'caf\\xe9')")
            run("insert into u values (1)")
            shop.run("caught up")
        assert shop.state is not None
        for table in ("public.t", "public.there"):
            reason = shop.state.tables[table].reason
            assert "is not UTF-8" in reason
            assert "HR-CAPTURE-021" in reason
        assert log.table("shop.public.u").scan().read_all().to_pylist()[0]["id"] == 1
        assert [row["prefix"] for one in log.read("shop._messages") for row in one.to_pylist()] == [
            r"\xe9"
        ]
        with postgres.connect("loose", client_encoding="SQL_ASCII") as connection:
            connection.execute(b'create table "caf\xe9"(id int primary key)')
        with pytest.raises(errors.SourceNotReady, match="a name in the database is not UTF-8"):
            shop.run("caught up")
    finally:
        postgres.drop_database("loose")


def test_deferrable_keys_of_partitions_are_exchanged(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    """Old rows of partitions are looked up by key, and until the end two rows have the same."""
    run = connection.execute
    run("create table t(id int, v text, primary key (id) deferrable initially deferred)"
        " partition by range (id)")  # fmt: skip
    for name, bounds in (("t1", "(0) to (10)"), ("t2", "(10) to (20)")):
        run(f"create table {name} partition of t for values from {bounds}".encode())
        run(f"alter table {name} replica identity full".encode())
    run("alter table t replica identity full")
    run("insert into t values (1, 'a'), (2, 'b'), (12, 'c')")
    shop = capture(log, database.dsn())
    shop.run("caught up")
    for statement in ("update t set id = 3 - id where id < 10",
                      "update t set id = 14 - id where id in (2, 12)",
                      "update t set v = v || 'x'"):  # fmt: skip
        run(statement.encode())
        shop.run("caught up")
        there = [tuple(row) for row in run("select id, v from t").fetchall()]
        assert added_up(log, "shop.public.t") == Counter(there), statement
    assert statuses(shop) == {"public.t": "live"}
