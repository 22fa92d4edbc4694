"""Tables of every kind, and what becomes of them while they are captured. R-B1, R-B3, R-B5

Caught: a table that ends the capture of the others, or that its owner cannot change any more once
it is captured; rows that come, go or change without a word in the stream (partitions, inheritance,
renames, generated columns) and that the log does not have; a capture that waits and does not say
for whom. Not caught: kinds of tables that are not named here.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import headrace as hr
from headrace import errors
from headrace.cli.capture import _status_lines
from headrace.log.embedded.log import EmbeddedLog
from headrace.sources.postgres import keyless, seen, snapshot, snapshots
from headrace.sources.postgres import settings as asked
from headrace.sources.postgres.capture import Capture
from headrace.sources.postgres.prepare import reached
from headrace.sources.postgres.session import connected, in_session
from headrace.sources.postgres.snapshots import Progress
from headrace.sources.postgres.state import topic_name
from headrace.sources.postgres.status import Status
from headrace.sources.postgres.status import statuses as statuses_of
from headrace.testing.postgres import Server
from tests.capture.conftest import Database
from tests.capture.kit import capture, ending
from tests.capture.test_capture import running, wait


@pytest.fixture
def connection(database: Database) -> Iterator[psycopg.Connection[Any]]:
    with database.connect() as connection:
        yield connection


def rows(log: EmbeddedLog, table: str) -> list[tuple[Any, ...]]:
    """The rows of a topic's table, in the order of their keys."""
    found = log.table(topic_name("shop", table)).scan().read_all().to_pylist()
    return [tuple(value for name, value in row.items() if name[0] != "_") for row in found]


def asks(log: EmbeddedLog, database: Database, **snapshots: int) -> None:
    """Ask for snapshots."""
    tables = {f"public.{table}": times for table, times in snapshots.items()}
    asked.change(log, "shop", lambda _: asked.Settings(database.dsn(), snapshots=tables))


def statuses(shop: Capture) -> dict[str, str]:
    assert shop.state is not None
    return {table: one.status for table, one in shop.state.tables.items()}


def reason(shop: Capture, table: str) -> str:
    assert shop.state is not None
    return shop.state.tables[table].reason


NAMES = {
    "a space": ("public", "Mixed Case"),
    "unicode": ("public", "größe"),
    "a point": ("public", "a.b"),
    "patterns": ("public", "t[1]*"),
    "quotes": ("public", 'say "x"'),
    "schema": ("My Schema", "T"),
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_table_may_have_any_name(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any], name: tuple[str, str]
) -> None:
    table = psycopg.sql.Identifier(*name)

    def run(text: str) -> None:
        connection.execute(psycopg.sql.SQL(text).format(table))

    connection.execute('create schema "My Schema"')
    run('create table {}("Id" int primary key, "a b" text)')
    run("insert into {} values (1, 'x')")
    shop = capture(log, database.dsn(), tables=["*.*"])
    shop.run("caught up")
    run("update {} set \"a b\" = 'y'")
    run('alter table {} add "ü""." int default 3')
    shop.run("caught up")
    assert rows(log, f"{name[0]}.{name[1]}") == [(1, "y", 3)]
    (event, *_) = hr.debezium(log.read(topic_name("shop", f"{name[0]}.{name[1]}")), database="x")
    assert event.value is not None
    assert (event.value["source"]["schema"], event.value["source"]["table"]) == name


def test_names_that_are_the_same_with_points(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    run = connection.execute
    run('create schema a; create schema "a.b"')
    run('create table a."b.c"(id int primary key); create table "a.b".c(id int primary key)')
    run('insert into a."b.c" values (1); insert into "a.b".c values (2)')
    shop = capture(log, database.dsn(), tables=["*.*"])
    shop.run("caught up")
    run('insert into a."b.c" values (10); insert into "a.b".c values (20)')
    shop.run("caught up")
    assert rows(log, "a.b.c") == [(1,), (10,)]
    assert rows(log, "a_x002E_b.c") == [(2,), (20,)]


def test_names_that_become_the_same_topic(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    run = connection.execute
    run('create table "a b"(id int primary key); create table a_x0020_b(id int primary key)')
    shop = capture(log, database.dsn())
    shop.run("caught up")
    assert sorted(statuses(shop).values()) == ["live", "stopped"]


REFUSED = {
    "unlogged": ("create unlogged table bad(id int primary key)", "unlogged"),
    "a key that is generated": (
        "create table bad(a int, k int generated always as (a * 2) stored primary key)", "key"
    ),
    "full, with a generated column": (
        "create table bad(a int, k int generated always as (a * 2) stored);"
        " alter table bad replica identity full", "generated",
    ),
    "another owner": ("create table bad(a int primary key); alter table bad owner to postgres",
                      "must be owner"),
}  # fmt: skip


@pytest.mark.parametrize(("made", "said"), REFUSED.values(), ids=REFUSED)
def test_a_table_that_cannot_be_published_is_stopped_and_can_be_changed(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any], made: str, said: str
) -> None:
    """The others go on, and updates of it are not refused by the server."""
    run = connection.execute
    role = f"owner_{database.name}"
    run(f"create role {role} login replication; grant create on database {database.name} to {role}")
    run(f"grant all on schema public to {role}")
    try:
        run("create table good(id int primary key)")
        run(f"alter table good owner to {role}")
        shop = capture(log, database.dsn(user=role), heartbeat_seconds=0.2)
        shop.run("caught up")
        with running(shop, connection):
            run(made)
            if "generated" in made:
                run(f"alter table bad owner to {role}")
            if "unlogged" in made or "owner to postgres" in made:
                run(f"grant select on bad to {role}")
            wait(lambda: "public.bad" in statuses(shop))
            run("insert into good values (1)")
            wait(lambda: rows(log, "public.good") == [(1,)])
        run("update bad set a = 3" if "(a " in made else "update bad set id = 3")
        if shop.state and shop.state.tables["public.bad"].status != "live":
            assert statuses(shop) == {"public.good": "live", "public.bad": "stopped"}
            assert said in reason(shop, "public.bad")
        else:  # before version 18 the server takes it
            assert connection.info.server_version < 180000
    finally:
        run(f"reassign owned by {role} to postgres; drop owned by {role}")
        run(f"drop role {role}")


def test_a_parent_has_its_own_rows_only(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    """As in the stream; and a child that is not captured can be changed."""
    run = connection.execute
    run("create table par(id int primary key, a int); create table chi(b int) inherits (par)")
    run("insert into par values (1, 1); insert into chi values (2, 2, 2)")
    shop = capture(log, database.dsn(), tables=["par"])
    shop.run("caught up")
    run("update par set a = a + 10")
    shop.run("caught up")
    assert rows(log, "public.par") == [(1, 11)]


def test_a_column_that_is_not_generated_any_more_is_read(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    run = connection.execute
    run("create table t(id int primary key, b int generated always as (id * 2) stored)")
    run("insert into t values (1), (2)")
    shop = capture(log, database.dsn())
    shop.run("caught up")
    run("alter table t alter b drop expression")
    run("update t set b = 7 where id = 2")
    shop.run("caught up")
    assert rows(log, "public.t") == [(1, 2), (2, 7)]


@pytest.mark.parametrize("key", ["id", "m"])
def test_a_label_of_an_enum_that_is_renamed(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any], key: str
) -> None:
    """The stream says nothing of it; a label that is new costs nothing."""
    run = connection.execute
    run("create type mood as enum ('a', 'b'); create domain moods as mood[]")
    run(f"create table t(id int, m mood, ms moods, primary key ({key}))")
    run("insert into t values (1, 'a', '{a}'), (2, 'b', null)")
    shop = capture(log, database.dsn())
    shop.run("caught up")
    (before,) = log.ends("shop._snapshots")
    run("alter type mood add value 'c'")
    run("insert into t values (3, 'c', null)")
    shop.run("caught up")
    assert log.ends("shop._snapshots") == [before]
    run("alter type mood rename value 'a' to 'z'")
    run("update t set id = 10 where id = 1")
    shop.run("caught up")
    assert sorted(rows(log, "public.t")) == [(2, "b", None), (3, "c", None), (10, "z", ["z"])]
    run("alter type mood rename value 'b' to 'y'")
    shop.run("caught up")
    assert sorted(rows(log, "public.t")) == [(2, "y", None), (3, "c", None), (10, "z", ["z"])]


def test_a_label_of_an_enum_in_ranges(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    run = connection.execute
    run("create type mood as enum ('a', 'b')")
    run("create type moods as range (subtype = mood, multirange_type_name = many)")
    run("create domain lists as many[]; create table t(id int primary key, r moods, l lists)")
    run("""insert into t values (1, '[a,b)', null), (2, null, '{"{[a,b)}"}')""")
    shop = capture(log, database.dsn())
    shop.run("caught up")
    run("alter type mood rename value 'a' to 'z'")
    shop.run("caught up")
    assert sorted(rows(log, "public.t")) == [(1, "[z,b)", None), (2, None, ["{[z,b)}"])]


@pytest.mark.parametrize("noticed", [True, False], ids=["slowly", "at once"])
def test_a_table_that_is_renamed_and_back(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any], noticed: bool
) -> None:
    """What happened under the other name is not missed."""
    run = connection.execute
    run("create table t(id int primary key, a int); insert into t values (1, 1), (2, 2)")
    shop = capture(log, database.dsn(), tables=["t"])
    shop.run("caught up")
    run("alter table t rename to x")
    run("insert into x values (3, 3); update x set a = 10 where id = 1; delete from x where id = 2")
    if noticed:
        shop.run("caught up")
        assert "gone" in reason(shop, "public.t")
    run("alter table x rename to t")
    run("insert into t values (4, 4)")
    shop.run("caught up")
    assert rows(log, "public.t") == [(1, 10), (3, 3), (4, 4)]
    assert reason(shop, "public.t") == ""


SWAP = "alter table t rename a to x; alter table t rename b to a; alter table t rename x to b"
FOR_A_WHILE = {
    "renamed": ("alter table t rename b to c", "alter table t rename c to b"),
    "swapped": (SWAP, SWAP),
    "of another type": (
        "set timezone = 'UTC'; alter table t alter at type timestamptz",
        "alter table t alter at type timestamp",
    ),
}


@pytest.mark.parametrize(("there", "back"), FOR_A_WHILE.values(), ids=FOR_A_WHILE)
@pytest.mark.parametrize("key", [True, False], ids=["keyed", "without a key"])
def test_a_column_that_was_another_one_for_a_while(
    database: Database,
    log: EmbeddedLog,
    connection: psycopg.Connection[Any],
    there: str,
    back: str,
    key: bool,
) -> None:
    """What the stream says meanwhile is under names that the topic does not have, or for others."""
    run = connection.execute
    run("create table t(id int, a text, b text, at timestamp)")
    run("alter table t add primary key (id)" if key else "alter table t replica identity full")
    run("insert into t values (1, 'a', 'b', '2020-01-01')")
    shop = capture(log, database.dsn())
    shop.run("caught up")
    run(there)
    run("insert into t values (2, 'A', 'B', '2020-01-02'); delete from t where id = 1")
    run(back)
    shop.run("caught up")
    net: Counter[tuple[Any, ...]] = Counter()
    for batch in log.read("shop.public.t"):
        for row in batch.to_pylist():
            net[tuple(row[one] for one in ("id", "a", "b", "at"))] += row["_weight"]
    assert +net == Counter(run("select * from t").fetchall())
    assert statuses(shop) == {"public.t": "live"}


def test_a_table_that_is_stopped_stays_so(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    """Until somebody asks for it: it is not read over and over."""
    run = connection.execute
    run("create table t(id int primary key, n numeric(4, 1)); insert into t values (1, 1)")
    shop = capture(log, database.dsn())
    shop.run("caught up")
    for number in range(2, 5):
        run("insert into t values (%s, 'NaN')", [number])
        shop.run("caught up")
        assert statuses(shop) == {"public.t": "stopped"}
    assert len([row for batch in log.read("shop._snapshots") for row in batch.to_pylist()]) == 1
    run("delete from t where n = 'NaN'")
    shop.run("caught up")
    assert statuses(shop) == {"public.t": "stopped"}
    asks(log, database, t=1)
    shop.run("caught up")
    assert statuses(shop) == {"public.t": "live"}


@pytest.mark.parametrize("reading", [False, True], ids=["live", "while it is read"])
def test_a_table_that_is_not_chosen_for_a_while(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any], reading: bool
) -> None:
    run = connection.execute
    run("create table t(id int primary key); create table u(id int primary key)")
    run("insert into u values (1), (2)")
    shop = capture(log, database.dsn())
    shop.run("caught up")
    if reading:
        shop.snapshot("public.u")
    capture(log, database.dsn(), tables=["t"]).run("caught up")
    run("delete from u where id = 1; insert into u values (3)")
    shop = capture(log, database.dsn())
    shop.run("caught up")
    assert rows(log, "public.u") == [(2,), (3,)]
    assert statuses(shop) == {"public.t": "live", "public.u": "live"}


PARTITIONED = """
    create table p(id int primary key, a int) partition by range (id);
    create table p1 partition of p for values from (0) to (100);
    create table p2 partition of p for values from (100) to (200);
    insert into p values (1, 1), (2, 1), (101, 1)
"""
MOVES = {
    "attach": "create table p3(id int primary key, a int); insert into p3 values (201, 3);"
    " alter table p attach partition p3 for values from (200) to (300)",
    "attach, then change": "create table p3(id int primary key, a int);"
    " insert into p3 values (201, 3), (202, 3);"
    " alter table p attach partition p3 for values from (200) to (300);"
    " update p set a = 5 where id = 201; delete from p where id = 202",
    "detach": "alter table p detach partition p2",
    "drop": "drop table p2",
    "truncate": "truncate p1",
    "write anew": "alter table p alter a type int using a + 100",
    "all at once": "truncate p; insert into p values (5, 5); drop table p2",
}


@pytest.mark.parametrize("large", [False, True], ids=["small", "by parts"])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_partitions_come_and_go(
    database: Database,
    log: EmbeddedLog,
    connection: psycopg.Connection[Any],
    move: str,
    large: bool,
) -> None:
    """Nothing of it is in the stream, and the log has it nevertheless."""
    run = connection.execute
    run(PARTITIONED)
    shop = capture(log, database.dsn(), tables=["p"], part_bytes=1 if large else 1 << 20)
    shop.run("caught up")
    for statement in move.split(";"):
        run(statement)
    shop.run("caught up")
    assert rows(log, "public.p") == run("select * from p order by id").fetchall()
    run("update p set a = a + 1")
    shop.run("caught up")
    assert rows(log, "public.p") == run("select * from p order by id").fetchall()


def test_a_new_partition_without_rows_costs_nothing(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    run = connection.execute
    run(PARTITIONED)
    shop = capture(log, database.dsn(), tables=["p"])
    shop.run("caught up")
    (before,) = log.ends("shop._snapshots")
    run("create table p3 partition of p for values from (200) to (300)")
    shop.run("caught up")
    run("insert into p values (201, 1)")
    shop.run("caught up")
    assert rows(log, "public.p") == run("select * from p order by id").fetchall()
    assert log.ends("shop._snapshots") == [before]


def test_a_partition_that_was_attached_for_a_while_is_read_anew(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    run = connection.execute
    run(PARTITIONED)
    run("alter table p detach partition p2")
    shop = capture(log, database.dsn())
    shop.run("caught up")
    run("alter table p attach partition p2 for values from (100) to (200)")
    shop.run("caught up")
    run("update p set a = 9; insert into p values (102, 2)")
    shop.run("caught up")
    run("alter table p detach partition p2")
    shop.run("caught up")
    assert rows(log, "public.p2") == [(101, 9), (102, 2)]
    assert rows(log, "public.p") == [(1, 9), (2, 9)]


def test_a_column_that_is_widened_while_its_table_is_read(
    database: Database,
    log: EmbeddedLog,
    connection: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values that the type of before does not hold do not stop it."""
    run = connection.execute
    run("create table t(id int primary key, a int, n numeric(4, 1), b varchar(3))")
    run("insert into t select g, g, g, g from generate_series(1, 30) g")
    reading, chunks = snapshot.read_chunk, 0

    def widened(*given: Any) -> Any:
        nonlocal chunks
        chunks += 1
        if chunks == 2:
            run("alter table t alter a type bigint, alter n type numeric(10, 2), alter b type text")
            run("update t set a = 9999999999, n = 12345678.25, b = 'longer' where id > 25")
        return reading(*given)

    monkeypatch.setattr(snapshots, "read_chunk", widened)
    shop = capture(log, database.dsn(), chunk_rows=10, readers=0)
    shop.run("caught up")
    assert statuses(shop) == {"public.t": "live"}
    assert rows(log, "public.t") == run("select * from t order by id").fetchall()


@pytest.mark.parametrize("key", [True, False], ids=["keyed", "without a key"])
def test_a_capture_says_for_whom_it_waits(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any], key: bool
) -> None:
    """A table that is locked, or transactions that must end first; and the others go on."""
    run = connection.execute
    run("create table good(id int primary key); create table t(id int)")
    run("alter table t add primary key (id)" if key else "alter table t replica identity full")
    said: list[Progress] = []
    shop = capture(log, database.dsn(), heartbeat_seconds=0.2, report=said.append)
    shop.run("caught up")
    with contextlib.ExitStack() as stack:
        locks, writes = (stack.enter_context(database.connect()) for _ in range(2))
        locks.execute("begin; lock table t in access exclusive mode")
        stack.enter_context(running(shop, connection))
        asks(log, database, t=1)
        wait(lambda: f"process {locks.info.backend_pid}, idle in transaction since" in waits(log))
        assert "lock table t" in waits(log)
        assert waits(log) in [one.waits for one in said]
        run("insert into good values (1)")
        wait(lambda: rows(log, "public.good") == [(1,)])
        locks.execute("rollback")
        wait(lambda: waits(log) == "" and statuses(shop)["public.t"] == "live")
        writes.execute("begin; insert into good values (2)")
        if key:  # it has begun before the table is read: it may have written to it
            asks(log, database, t=2)
            wait(lambda: f"process {writes.info.backend_pid}" in waits(log))
        writes.execute("commit")
        wait(lambda: waits(log) == "")


def waits(log: EmbeddedLog) -> str:
    state = asked.saved_state(log, "shop")
    assert state is not None
    return state.tables["public.t"].reason


def says_it_starts(found: Status) -> bool:
    """And not that nobody has started it."""
    said = "\n".join(_status_lines(found))
    return "shop: starting" in said and found.waits in said and "capture run" not in said


def test_a_new_capture_says_which_transactions_must_end(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    """The server makes no slot before; so it is said, and by `status` too."""
    connection.execute("create table t(id int primary key)")
    lost: list[Exception] = []
    shop = capture(log, database.dsn(), lost=lost.append)
    asks(log, database)
    with database.connect() as writes:
        writes.execute("begin; insert into t values (1)")
        who = f"process {writes.info.backend_pid}, idle in transaction since"
        with running(shop, connection):
            wait(lambda: any(f"the slot waits for {who}" in str(one) for one in lost))
            (found,) = statuses_of(log, ["shop"], pause=0.0)
            assert who in found.waits
            assert "insert into t" in found.waits
            assert says_it_starts(found)
            writes.execute("commit")
            wait(lambda: bool(shop.state and shop.state.lsn))
    shop.run("caught up")
    assert rows(log, "public.t") == [(1,)]


def test_a_new_capture_says_which_prepared_transactions_must_end(log: EmbeddedLog) -> None:
    """They are of no process, and nobody may think of them."""
    with Server(max_prepared_transactions="2") as server, server.connect() as connection:
        run = connection.execute
        run("create table t(id int primary key)")
        run("begin; insert into t values (1); prepare transaction 'forgotten'")
        lost: list[Exception] = []
        shop = capture(log, server.dsn(), lost=lost.append)
        asked.change(log, "shop", lambda _: asked.Settings(server.dsn()))
        with running(shop, connection):
            who = "the slot waits for prepared transaction forgotten since"
            wait(lambda: any(who in str(one) for one in lost))
            (found,) = statuses_of(log, ["shop"], pause=0.0)
            assert "prepared transaction forgotten since" in found.waits
            assert says_it_starts(found)
            run("commit prepared 'forgotten'")
            wait(lambda: bool(shop.state and shop.state.lsn))
        shop.run("caught up")
        assert rows(log, "public.t") == [(1,)]


@pytest.mark.parametrize("new", [True, False], ids=["a new table", "known"])
def test_a_capture_starts_while_a_table_is_locked(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any], new: bool
) -> None:
    run = connection.execute
    run("create table good(id int primary key)")
    if not new:
        run("create table t(id int primary key)")
    lost: list[Exception] = []
    shop = capture(log, database.dsn(), heartbeat_seconds=0.2, lost=lost.append)
    shop.run("caught up")
    if new:
        run("create table t(id int primary key)")
    run("insert into t values (1)")
    with database.connect() as locks:
        locks.execute("begin; lock table t in access exclusive mode")
        with running(shop, connection):
            run("insert into good values (1)")
            wait(lambda: rows(log, "public.good") == [(1,)])
            if new:
                who = f"process {locks.info.backend_pid}, idle in transaction since"
                wait(lambda: who in waits(log))
                assert any(who in str(one) for one in lost)
            locks.execute("rollback")
            run("insert into t values (2)")
            wait(lambda: rows(log, "public.t") == [(1,), (2,)])
    assert statuses(shop) == {"public.good": "live", "public.t": "live"}


def test_a_locked_partition_does_not_hold_up_the_others(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    run = connection.execute
    run(PARTITIONED)
    run("create table good(id int primary key)")
    shop = capture(log, database.dsn(), heartbeat_seconds=0.2)
    shop.run("caught up")
    with database.connect() as locks:
        locks.execute("begin; lock table p2 in access exclusive mode")
        with running(shop, connection):
            asks(log, database, p=1)
            for number in range(3):
                run("insert into good values (%s)", [number])
                wait(lambda number=number: (number,) in rows(log, "public.good"))  # type: ignore[misc]
            locks.execute("rollback")
    shop.run("caught up")
    assert rows(log, "public.p") == [(1, 1), (2, 1), (101, 1)]


def test_a_key_that_becomes_another_one_says_what_to_do(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    run = connection.execute
    run("create table t(id int primary key, a int not null); insert into t values (1, 1)")
    shop = capture(log, database.dsn())
    shop.run("caught up")
    run("alter table t drop constraint t_pkey; alter table t add primary key (a); update t set a=2")
    shop.run("caught up")
    assert "another name" in reason(shop, "public.t")


def test_a_table_that_loses_its_identity_says_so_and_is_read_anew_when_it_has_one(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    run = connection.execute
    run("create table t(id int primary key)")
    shop = capture(log, database.dsn(), heartbeat_seconds=0.3)
    with running(shop, connection):
        run("insert into t values (1)")
        wait(lambda: statuses(shop) == {"public.t": "live"})
        run("alter table t replica identity nothing; insert into t values (2)")
        wait(lambda: statuses(shop) == {"public.t": "stopped"})
        assert "no replica identity any more (HR-CAPTURE-012)" in reason(shop, "public.t")
        run("alter table t replica identity default; insert into t values (3)")
        asks(log, database, t=1)
        wait(lambda: rows(log, "public.t") == [(1,), (2,), (3,)])


def test_a_list_of_columns_is_noticed(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    connection.execute("create table t(id int primary key, a int)")
    shop = capture(log, database.dsn())
    shop.run("caught up")
    connection.execute("alter publication headrace_shop set table t (id)")
    with pytest.raises(errors.TableLeftPublication):
        shop.run("caught up")


@pytest.mark.parametrize("key", [True, False], ids=["keyed", "without a key"])
def test_many_rows_that_are_gone_are_many_entries(
    database: Database,
    log: EmbeddedLog,
    connection: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
    key: bool,
) -> None:
    """What a repeated snapshot knows and says has a bound, whatever is gone."""
    run = connection.execute
    run("create table t(id int, pad text)")
    run("alter table t add primary key (id)" if key else "alter table t replica identity full")
    run("insert into t select g, repeat('x', 100) from generate_series(1, 500) g")
    shop = capture(log, database.dsn(), chunk_rows=100)
    shop.run("caught up")
    stale = [{"id": -at, "pad": "y" * 100, "_weight": 1} for at in range(1, 3001)]
    for part in range(0, 3000, 100):
        log.append("shop.public.t", stale[part : part + 100])
    before = log.position
    monkeypatch.setattr(seen, "KEYS_MAX", 120)
    monkeypatch.setattr(keyless, "REST_ROWS", 100)
    monkeypatch.setattr(snapshots, "CHUNK_BYTES", 20_000)
    make, sizes = snapshots._batch, []

    def made(*given: Any) -> Any:
        sizes.append(given[1].num_rows)
        return make(*given)

    monkeypatch.setattr(snapshots, "_batch", made)
    shop.snapshot("public.t")
    shop.run("caught up")
    assert statuses(shop) == {"public.t": "live"}
    said = list(log.read("shop.public.t", after=before))
    found = [(row["id"], row["_weight"]) for batch in said for row in batch.to_pylist()]
    assert sorted(found) == [(number, -1) for number in range(-3000, 0)]
    assert sum(sizes) == 3000
    assert max(sizes) < 1000
    if key:
        assert len(rows(log, "public.t")) == 500


def test_a_table_whose_row_security_hides_rows_is_stopped(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    """Else the rows that are hidden would be missing in the log, and nobody would know."""
    run = connection.execute
    run(f"create role hidden login replication; grant create on database {database.name} to hidden")
    try:
        run("create table t(id int primary key); insert into t values (1), (2)")
        run("create table good(id int primary key)")
        run("alter table t owner to hidden; alter table good owner to hidden")
        run("alter table t enable row level security; alter table t force row level security")
        run("create policy one on t using (id = 1)")
        shop = capture(log, database.dsn(user="hidden"))
        shop.run("caught up")
        assert statuses(shop) == {"public.t": "stopped", "public.good": "live"}
        assert "row-level security" in reason(shop, "public.t")
        run("alter role hidden bypassrls")
        shop.snapshot("public.t")
        shop.run("caught up")
        assert rows(log, "public.t") == [(1,), (2,)]
    finally:
        run("reassign owned by hidden to postgres; drop owned by hidden; drop role hidden")


def test_what_a_database_has_set_does_not_matter(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    for one in (
        "default_transaction_read_only = on", "lock_timeout = 1", "statement_timeout = 1",
        "idle_session_timeout = 50", "datestyle = 'German'", "bytea_output = 'escape'",
        "intervalstyle = 'postgres_verbose'", "timezone = 'Asia/Kolkata'", "search_path = ''",
        "default_transaction_isolation = 'serializable'", "standard_conforming_strings = off",
    ):  # fmt: skip
        connection.execute(f"alter database {database.name} set {one}")
    run = connection.execute
    run("create table t(id int primary key, b bytea, d date, i interval, t timestamptz)")
    row = "'\\x00ff', '2020-02-29', '1 day 02:03', '2020-01-01 00:00+00'"
    run(f"insert into t values (1, {row})")
    shop = capture(log, database.dsn(options="-c work_mem=7MB"))
    shop.run("caught up")
    run(f"insert into t values (2, {row})")
    shop.run("caught up")
    day, moment = datetime.date(2020, 2, 29), datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    want = (b"\x00\xff", day, "P1DT2H3M", moment)
    assert rows(log, "public.t") == [(1, *want), (2, *want)]
    with psycopg.connect(shop.dsn) as other:
        assert other.execute("show work_mem").fetchone() == ("7MB",), "what the address says"


def test_no_limit_that_a_database_has_set_ends_what_a_capture_does(database: Database) -> None:
    """Neither of its readers and its stream, nor of the commands that make and look at it."""
    limits = ["statement_timeout", "lock_timeout", "default_transaction_read_only"]
    with database.connect() as connection:
        if connection.info.server_version >= 170000:
            limits.append("transaction_timeout")
        for one in limits:
            value = "on" if one.startswith("default") else "'5s'"
            connection.execute(f"alter database {database.name} set {one} = {value}")
    none = {one: "off" if one.startswith("default") else "0" for one in limits}
    for way in (
        lambda: connected(in_session(database.dsn())),
        lambda: connected(in_session(database.dsn()), replication="database"),
        lambda: reached(database.dsn()),
    ):
        with way() as connection:
            found = {one: connection.execute(f"show {one}").fetchone() for one in limits}
            assert found == {one: (value,) for one, value in none.items()}


def test_a_column_that_is_named_as_a_topics_own(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    """Of the same type too: what it says would be taken for what the capture says."""
    run = connection.execute
    run("create table t(id int primary key, _weight bigint)")
    run("create table u(id int primary key)")
    shop = capture(log, database.dsn())
    shop.run("caught up")
    assert reason(shop, "public.t") == "column '_weight' starts with '_' (HR-LOG-025)"
    run("alter table u add column _lsn bigint; insert into u values (1, 5)")
    shop.run("caught up")
    assert reason(shop, "public.u") == "column '_lsn' starts with '_' (HR-LOG-025)"
    run("alter table t rename column _weight to w; insert into t values (1, 2)")
    run("alter table u drop column _lsn")
    asks(log, database, t=1, u=1)
    shop.run("caught up")
    assert rows(log, "public.t") == [(1, 2)]
    assert rows(log, "public.u") == [(1,)]


@pytest.mark.parametrize(
    ("done", "error", "what"),
    [
        ("alter publication headrace_shop drop table t", errors.TableLeftPublication, "not have"),
        (
            "alter publication headrace_shop drop table t;"
            "alter publication headrace_shop add table t",
            errors.TableLeftPublication,
            "put back",
        ),
        (
            "alter publication headrace_shop set table t where (id > 5), other, late",
            errors.TableLeftPublication,
            "row filter",
        ),
        (
            "alter publication headrace_shop set (publish = 'insert, update')",
            errors.TableLeftPublication,
            "delete, truncate",
        ),
        (
            "alter publication headrace_shop drop table t; create table fresh(id int primary key)",
            errors.TableLeftPublication,
            "not have",
        ),
        ("drop publication headrace_shop", errors.PublicationDropped, "is gone"),
        (
            "drop publication headrace_shop; create publication headrace_shop for table t, other",
            errors.PublicationDropped,
            "made again",
        ),
    ],
)
def test_what_is_not_published_any_more_is_noticed_while_it_runs(
    database: Database,
    log: EmbeddedLog,
    connection: psycopg.Connection[Any],
    done: str,
    error: type[errors.HeadraceError],
    what: str,
) -> None:
    """The stream would say nothing of it: the rows would be missing until the next start. R-B3"""
    run = connection.execute
    run("create table t(id int primary key, a int); create table other(id int primary key)")
    shop = capture(log, database.dsn(), heartbeat_seconds=0.3)
    shop.run("caught up")
    with ending(shop) as (thread, raised):
        run("create table late(id int primary key); insert into late values (1)")  # its own doing
        wait(lambda: statuses(shop).get("public.late") == "live")
        run(done.encode())
        thread.join(20)
        assert not thread.is_alive()
    assert isinstance(raised[0], error)
    assert what in str(raised[0])
    with pytest.raises(error):  # nor has it put things right in silence
        shop.run("caught up")


def test_a_table_that_is_asked_for_is_published_again_while_the_capture_runs(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    """What the error says helps also before the capture has noticed."""
    run = connection.execute
    run("create table t(id int primary key)")
    shop = capture(log, database.dsn(), heartbeat_seconds=3600)
    shop.run("caught up")
    thread = threading.Thread(target=shop.run)
    thread.start()
    try:
        run("insert into t values (1)")
        wait(lambda: rows(log, "public.t") == [(1,)])
        run("alter publication headrace_shop drop table t; insert into t values (2)")
        asks(log, database, t=1)
        run("insert into t values (3)")
        wait(lambda: rows(log, "public.t") == [(1,), (2,), (3,)])
        run("insert into t values (4)")
        wait(lambda: rows(log, "public.t") == [(1,), (2,), (3,), (4,)])
    finally:
        shop.stop()
        thread.join()
    shop.run("caught up")


@pytest.mark.parametrize("of", ["all tables", "tables in schema public"])
def test_tables_that_are_published_by_their_schema_leave_the_publication(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any], of: str
) -> None:
    run = connection.execute
    run("create table t(id int primary key)")
    publish = f"create publication headrace_shop for {of} with (publish_via_partition_root)"
    run(publish.encode())
    shop = capture(log, database.dsn())
    shop.run("caught up")
    if of == "all tables":
        run("drop publication headrace_shop; create publication headrace_shop")
    else:
        run("alter publication headrace_shop drop tables in schema public")
    run("insert into t values (1)")
    with pytest.raises((errors.PublicationDropped, errors.TableLeftPublication)):
        shop.run("caught up")


def test_a_publication_that_was_made_again_serves_when_all_tables_are_read_anew(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    """What the error says, helps."""
    run = connection.execute
    run("create table t(id int primary key); create table u(id int primary key)")
    shop = capture(log, database.dsn())
    shop.run("caught up")
    run("drop publication headrace_shop; insert into t values (1); insert into u values (2)")
    run("create publication headrace_shop for table t, u with (publish_via_partition_root)")
    for some in ({}, {"t": 1}):
        asks(log, database, **some)
        with pytest.raises(errors.PublicationDropped):
            shop.run("caught up")
    asks(log, database, t=1, u=1)
    shop.run("caught up")
    shop.run("caught up")
    assert (rows(log, "public.t"), rows(log, "public.u")) == ([(1,)], [(2,)])


def test_a_table_that_goes_while_its_columns_are_looked_at_is_not_waited_for(
    database: Database, log: EmbeddedLog, connection: psycopg.Connection[Any]
) -> None:
    connection.execute("create table t(id int primary key)")
    shop = capture(log, database.dsn())
    shop.run("caught up")
    shop._tables["public", "t"].differs_at = 1
    connection.execute("drop table t")
    with running(shop, connection) as thread:
        wait(lambda: not shop._unsettled())
        assert thread.is_alive()


def test_a_table_that_goes_while_it_is_published_is_taken_in_when_it_is_back(
    database: Database,
    log: EmbeddedLog,
    connection: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not stopped for good, as one is that the server refuses."""
    run, publish = connection.execute, Capture._publish
    run("create table t(id int primary key)")

    def late(self: Capture, *given: Any) -> str:
        run("drop table if exists t")
        return publish(self, *given)

    shop = capture(log, database.dsn())
    with monkeypatch.context() as patched:
        patched.setattr(Capture, "_publish", late)
        shop.run("caught up")
    run("create table t(id int primary key); insert into t values (1)")
    shop.run("caught up")
    assert (statuses(shop), rows(log, "public.t")) == ({"public.t": "live"}, [(1,)])
