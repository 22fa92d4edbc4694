"""DDL in every order: a storm of it at random, and one case for each bug that storms have found.

R-B1, R-B3, R-B5. Caught: rows that a topic keeps, lacks or has otherwise after tables changed names
with each other, were put in the place of others, emptied, rewritten, attached or taken out of the
publication; a capture that ends, or a table that stops, though nothing is wrong. The short storm
finds only what is frequent: `./run faults capture --only storm` runs for minutes. Not caught: what
a topic says of rows on the way (`test_capture_faults`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import psycopg
import pytest

import headrace as hr
from headrace.log.embedded.log import EmbeddedLog
from headrace.sources.postgres import catalog, snapshot
from headrace.sources.postgres.capture import Capture
from headrace.sources.postgres.session import connected
from headrace.sources.postgres.state import LIVE, SNAPSHOTTING
from headrace.testing import capture_storm
from tests.capture.conftest import Database
from tests.capture.kit import added_up, capture

PARTED = "create table p(id int primary key, a int) partition by range (id);"
KEYED = "create table {}(id int primary key, a int)"


class Killed(BaseException):
    """The capture ends here."""


@pytest.fixture
def run(database: Database) -> Iterator[Any]:
    """Run statements, one after the other."""
    with database.connect() as connection:

        def each(*statements: str) -> psycopg.Cursor[Any]:
            for one in statements:
                cursor = connection.execute(one)
            return cursor

        yield each


def topic(log: EmbeddedLog, table: str) -> Counter[Any]:
    """How often the log has each row."""
    return Counter(tuple(row.values()) for row in rows(log, table))


def rows(log: EmbeddedLog, table: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = hr.sql(log, f'from "shop.public.{table}"').to_pylist()
    return found


def caught_up(log: EmbeddedLog, database: Database) -> Capture:
    shop = capture(log, database.dsn())
    shop.run("caught up")
    assert shop.state is not None
    assert {one.reason for one in shop.state.tables.values() if one.oid > 0} <= {""}
    return shop


def test_a_storm() -> None:
    found = capture_storm.case("short", 8)
    assert not found.wrong
    assert found.events["statements"] > 50


def swapped(one: str, other: str) -> str:
    return (
        f"begin; alter table {one} rename to middle; alter table {other} rename to {one};"
        f" alter table middle rename to {other}; commit"
    )


def test_a_table_that_had_the_name_of_another_one_meanwhile(
    database: Database, log: EmbeddedLog, run: Any
) -> None:
    """What was written to it then is in the stream under the other name."""
    run(KEYED.format("t"), KEYED.format("u"), "insert into t values (1, 1)")
    caught_up(log, database)
    run(swapped("t", "u"), "insert into u values (2, 2)", swapped("t", "u"))
    run("update t set a = 3")
    caught_up(log, database)
    assert topic(log, "t") == {(1, 3): 1, (2, 3): 1}
    assert not topic(log, "u")


def test_a_table_that_was_emptied_under_another_name(
    database: Database, log: EmbeddedLog, run: Any
) -> None:
    run(KEYED.format("t"), "insert into t values (1, 1)")
    caught_up(log, database)
    run("alter table t rename to u", "truncate u", "alter table u rename to t")
    run("insert into t values (2, 2)")
    caught_up(log, database)
    assert topic(log, "t") == {(2, 2): 1}


def test_a_partition_that_says_less_of_old_rows_than_its_root(
    database: Database, log: EmbeddedLog, run: Any
) -> None:
    """The stream calls them whole."""
    run(PARTED, "create table p1 partition of p default", "alter table p replica identity full")
    run("insert into p values (1, 1), (2, 2), (3, 3)")
    caught_up(log, database)
    run("update p set id = 4 where id = 1", "delete from p where id = 2", "update p set a = 9")
    caught_up(log, database)
    assert topic(log, "p") == {(3, 9): 1, (4, 9): 1}
    assert added_up(log, "shop.public.p") == topic(log, "p")


ALTER = "alter table t alter column a type int using a + 10"


@pytest.mark.parametrize(
    "statements",
    [
        (ALTER, "update t set a = 5"),
        ("begin", ALTER, "update t set a = 5", "commit"),
        ("begin", "savepoint s", ALTER, "release s", "update t set a = 5", "commit"),
        (ALTER, "update t set a = 5", "truncate t", "insert into t values (1, 5)"),
    ],
    ids=["before", "in the same transaction", "in a savepoint", "and emptied later"],
)
def test_whole_old_rows_that_are_rewritten(
    database: Database, log: EmbeddedLog, run: Any, statements: tuple[str, ...]
) -> None:
    """The stream takes them away as they are now: they go as the topic has them."""
    run(KEYED.format("t"), "alter table t replica identity full", "insert into t values (1, 1)")
    caught_up(log, database)
    run(*statements)
    caught_up(log, database)
    assert topic(log, "t") == added_up(log, "shop.public.t") == {(1, 5): 1}


def test_whole_old_rows_that_a_transaction_takes_away_which_began_before(
    database: Database, log: EmbeddedLog, run: Any
) -> None:
    run(KEYED.format("t"), KEYED.format("u"), "alter table t replica identity full")
    run("insert into t values (1, 1)")
    caught_up(log, database)
    with database.connect(autocommit=False) as older:
        older.execute("insert into u values (1, 1)")
        run(ALTER)
        older.execute("update t set a = 5")
    caught_up(log, database)
    assert topic(log, "t") == added_up(log, "shop.public.t") == {(1, 5): 1}


def test_a_partition_that_goes_behind_a_truncate_takes_its_rows_along(
    database: Database, log: EmbeddedLog, run: Any
) -> None:
    run(PARTED, "create table p1 partition of p default", "insert into p values (1, 1)")
    caught_up(log, database)
    run("truncate p", "insert into p values (2, 2)")
    run("alter table p detach partition p1", "create table p2 partition of p default")
    caught_up(log, database)
    assert not topic(log, "p")


TABLES = [
    (KEYED.format("t"),),
    (PARTED.replace(" p(", " t("), "create table t1 partition of t default"),
]


@pytest.mark.parametrize("table", TABLES, ids=["", "partitioned"])
@pytest.mark.parametrize("together", [False, True], ids=["", "in one transaction"])
def test_rows_that_are_rewritten_behind_a_truncate(
    database: Database, log: EmbeddedLog, run: Any, table: tuple[str, ...], together: bool
) -> None:
    run(*table, "insert into t values (1, 1)")
    caught_up(log, database)
    run("begin" if together else "", "truncate t", "insert into t values (2, 2)", ALTER, "commit")
    caught_up(log, database)
    assert topic(log, "t") == {(2, 12): 1}


@pytest.mark.parametrize("table", TABLES, ids=["", "partitioned"])
def test_a_truncate_alone_is_no_reason_to_read_a_table(
    database: Database, log: EmbeddedLog, run: Any, table: tuple[str, ...]
) -> None:
    run(*table, "insert into t values (1, 1)")
    caught_up(log, database)
    run("truncate t", "insert into t values (2, 2)", "begin", "savepoint s", "truncate t")
    run("release s", "insert into t values (3, 3)", "commit")
    run("create index on t(a)", "analyze t", "grant select on t to public")
    run("cluster t using t_pkey")
    with mock.patch.object(snapshot, "begin", side_effect=AssertionError):
        caught_up(log, database)
    assert topic(log, "t") == {(3, 3): 1}


@pytest.mark.parametrize("middle", [False, True])
def test_a_partition_that_was_away_meanwhile(
    database: Database, log: EmbeddedLog, run: Any, middle: bool
) -> None:
    """What is done to it then is not in the stream."""
    by = "partition by range (id); create table p2 partition of p1 default" if middle else ""
    run(PARTED, f"create table p1 partition of p default {by}")
    run("insert into p values (1, 1), (2, 2)")
    caught_up(log, database)
    run("alter table p detach partition p1", "insert into p1 values (3, 3)")
    run("delete from p1 where id = 1", "alter table p attach partition p1 default")
    caught_up(log, database)
    assert topic(log, "p") == {(2, 2): 1, (3, 3): 1}


def test_a_table_that_was_unlogged_meanwhile(
    database: Database, log: EmbeddedLog, run: Any
) -> None:
    """The server allows it where a publication has all tables; the stream says nothing then."""
    run("create publication headrace_shop for all tables with (publish_via_partition_root)")
    run(KEYED.format("t"), "insert into t values (1, 1), (2, 2)")
    caught_up(log, database)
    run("alter table t set unlogged", "delete from t where id = 1", "alter table t set logged")
    caught_up(log, database)
    assert topic(log, "t") == {(2, 2): 1}


def test_files_and_columns_are_seen_at_one_moment(database: Database, run: Any) -> None:
    """Else a rewriting between is taken for a truncate that is known."""
    run(KEYED.format("t"))
    with connected(database.dsn()) as control, control.transaction():
        control.execute("set transaction isolation level repeatable read")
        before = catalog.tables(control, ["t"])
        run(ALTER)
        assert catalog.tables(control, ["t"]) == before


def test_a_topic_that_was_made_just_before_a_kill(
    database: Database, log: EmbeddedLog, run: Any
) -> None:
    """The table has other columns when the capture is back."""
    run(KEYED.format("t"), "insert into t values (1, 1)")
    made = Capture._make_topic

    def killed(*given: Any) -> None:
        made(*given)
        raise Killed

    with mock.patch.object(Capture, "_make_topic", killed), pytest.raises(Killed):
        capture(log, database.dsn()).run("caught up")
    run("alter table t drop column a", "alter table t add column b text default 'x'")
    caught_up(log, database)
    assert rows(log, "t") == [{"id": 1, "b": "x"}]


def test_a_topic_of_somebody_else_is_left_alone(
    database: Database, log: EmbeddedLog, run: Any
) -> None:
    run(KEYED.format("t"))
    log.create_topic("shop.public.t", "id int", key=["id"])
    shop = capture(log, database.dsn())
    shop.run("caught up")
    assert shop.state is not None
    assert "HR-LOG-011" in shop.state.tables["public.t"].reason


def test_what_the_stream_said_before_a_gap_in_the_publication_is_not_kept(
    database: Database, log: EmbeddedLog, run: Any
) -> None:
    """A snapshot that sees more than the stream decides."""
    run(KEYED.format("t"), "insert into t values (9, 9)")
    caught_up(log, database)
    run("drop table t", KEYED.format("t"), "alter publication headrace_shop add table t")
    run("insert into t values (1, 1), (2, 2)", "alter publication headrace_shop drop table t")
    run("delete from t where id = 1")
    caught_up(log, database)
    assert topic(log, "t") == {(2, 2): 1}


def test_another_table_whose_key_is_elsewhere(
    database: Database, log: EmbeddedLog, run: Any
) -> None:
    run(KEYED.format("t"), "insert into t values (1, 1)")
    caught_up(log, database)
    run("drop table t", "create table t(a int, id int primary key)", "insert into t values (2, 1)")
    caught_up(log, database)
    assert rows(log, "t") == [{"id": 1, "a": 2}]


def test_a_snapshot_is_of_the_table_and_the_columns_that_are_wanted(
    database: Database, log: EmbeddedLog, run: Any
) -> None:
    run("create table t(id int primary key, a int, b int)", "insert into t values (1, 2, 3)")
    shop = caught_up(log, database)
    (table,) = shop._tables.values()
    wanted = table.wanted(10, 1 << 20)

    def begins() -> bool:
        with database.connect(autocommit=False) as one, one.cursor() as cursor:
            return snapshot.begin(cursor, wanted) is not None

    assert begins()
    run("begin; alter table t rename a to c; alter table t rename b to a")
    run("alter table t rename c to b; commit")
    assert not begins()
    run("drop table t", "create table t(id int primary key, a int, b int)")
    assert not begins()


@pytest.mark.parametrize("emptied", [False, True], ids=["", "and emptied"])
def test_rows_without_a_key_that_are_rewritten_and_then_deleted(
    database: Database, log: EmbeddedLog, run: Any, emptied: bool
) -> None:
    """The stream takes rows away, as they are now, that the topic has as they were."""
    run("create table n(a int, b text)", "alter table n replica identity full")
    run("insert into n select g, 'v' || g % 3 from generate_series(1, 40) g")
    caught_up(log, database)
    run("alter table n alter column b type text using upper(b)")
    run("delete from n where a % 2 = 0")
    if emptied:
        run("truncate n")
    run("insert into n values (2, 'V2'), (4, 'V1')")
    caught_up(log, database)
    assert topic(log, "n") == Counter(run("select a, b from n").fetchall())
    run("truncate n", "insert into n values (6, 'V0')")
    caught_up(log, database)
    assert topic(log, "n") == {(6, "V0"): 1}
    assert added_up(log, "shop.public.n") == topic(log, "n")


def test_the_entry_of_another_table_in_the_publication(
    database: Database, log: EmbeddedLog, run: Any
) -> None:
    """It had the name when the capture was started and killed."""
    run(KEYED.format("t"), KEYED.format("u"), "insert into t values (1, 1)")
    caught_up(log, database)
    run(swapped("t", "u"))
    with mock.patch.object(Capture, "_stream", side_effect=Killed), pytest.raises(Killed):
        capture(log, database.dsn()).run("caught up")
    run(swapped("t", "u"), "insert into t values (2, 2)")
    caught_up(log, database)
    assert topic(log, "t") == {(1, 1): 1, (2, 2): 1}


def test_rows_of_a_partition_that_came_with_them_and_is_gone(
    database: Database, log: EmbeddedLog, run: Any
) -> None:
    """Nobody can tell any more why the topic does not have them; the others go on."""
    run(PARTED, KEYED.format("t"), "create table p1 partition of p for values from (1) to (9)")
    shop = caught_up(log, database)
    run("create table p2(like p including all)", "insert into p2 values (11, 1)")
    run("alter table p attach partition p2 default", "update p set a = 2", "drop table p")
    run("insert into t values (1, 1)")
    shop.run("caught up")
    assert topic(log, "t") == {(1, 1): 1}


def test_rows_of_a_partition_that_came_with_them_and_lost_them(
    database: Database, log: EmbeddedLog, run: Any
) -> None:
    """When it is seen it is empty, and the stream has yet to say so."""
    run(PARTED, "create table p1 partition of p for values from (1) to (9)")
    caught_up(log, database)
    run("create table p2(like p including all)", "insert into p2 values (11, 1)")
    run("alter table p attach partition p2 default", "update p set a = 2", "truncate p2")
    run("insert into p values (1, 1)")
    gather, calls = Capture._gather, 0

    def later(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        return [] if calls < 3 else gather(*given)

    shop = capture(log, database.dsn(), heartbeat_seconds=0.0)
    with mock.patch.object(Capture, "_gather", later):
        shop.run("caught up")
    assert topic(log, "p") == {(1, 1): 1}


def test_a_live_table_that_goes_while_others_are_published(
    database: Database, log: EmbeddedLog, run: Any
) -> None:
    """Should it come back, it is read from its beginning."""
    run(KEYED.format("t"), "insert into t values (1, 1)")
    shop = caught_up(log, database)
    assert shop.state is not None
    with connected(database.dsn()) as control:
        chosen, _ = shop._there(control, shop.state.publication)
        run("drop table t")
        shop._join(control, chosen)
    found = shop.state.tables["public.t"]
    assert (found.status, found.read_through) == (SNAPSHOTTING, False)
    run(KEYED.format("t"), "insert into t values (2, 2)")
    again = caught_up(log, database)
    assert again.state is not None
    assert again.state.tables["public.t"].status == LIVE
    assert topic(log, "t") == {(2, 2): 1}


def test_tables_and_publication_are_seen_at_one_moment(
    database: Database, log: EmbeddedLog, run: Any
) -> None:
    """Else one that is renamed between is taken for one that left the publication."""
    run(KEYED.format("t"))
    shop = caught_up(log, database)
    assert shop.state is not None
    tables = catalog.tables

    def then_renamed(*given: Any) -> Any:
        found = tables(*given)
        run("alter table t rename to u")
        return found

    with connected(database.dsn()) as control, contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(catalog, "tables", then_renamed))
        chosen, published = shop._there(control, shop.state.publication)
    assert published is not None
    assert set(chosen) == published.tables == {("public", "t")}


def test_a_table_is_described_at_one_moment(database: Database, run: Any) -> None:
    """Else one that goes between two queries has no columns."""
    run(KEYED.format("t"))
    asked, queries = catalog._rows, 0

    def then_dropped(*given: Any) -> Any:
        nonlocal queries
        found = asked(*given)
        queries += 1
        if queries == 1:
            run("drop table t")
        return found

    with (
        connected(database.dsn()) as control,
        mock.patch.object(catalog, "_rows", then_dropped),
    ):
        found = catalog.table(control, ("public", "t"))
    assert queries > 1
    assert found is not None
    assert [one.name for one in found.columns] == ["id", "a"]
