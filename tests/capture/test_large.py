"""Transactions that are read, completed and staged by parts. R-B1, R-B3

Every transaction is large here: parts have few bytes. Caught: a part that does not know what an
earlier one did (old rows, values left out, keys that changed), a truncate between parts, rows of
stopped tables, files left behind, half a transaction after a kill, a connection that the server
ends because nobody answers; and memory that grows with the transaction, at 100,000 rows. Not
caught: memory at sizes that only `./run faults capture --only large` tries.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import select
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import headrace as hr
from headrace.log.embedded.log import EmbeddedLog
from headrace.sources.postgres import catalog, stream
from headrace.sources.postgres.capture import Capture
from headrace.sources.postgres.large import Large
from headrace.sources.postgres.stream import Stream
from headrace.sources.postgres.transactions import Transaction
from headrace.testing.capture_case import NAME, Writer, audit, differences, make_tables, stopped
from headrace.testing.capture_large import bulk
from tests.capture.conftest import Database
from tests.log.kit import checked

TABLES = ["a", "b", "c"]
STREAMED = "-c logical_decoding_work_mem=64kB"
"""Of a capture: what has more bytes comes while it still runs."""


def changes(log: EmbeddedLog, name: str) -> dict[str, list[Any]]:
    """All rows of the topics of a capture, and where each transaction stands."""
    return {
        topic.name.removeprefix(name): [
            row for batch in log.read(topic.name) for row in batch.data.to_pylist()
        ]
        for topic in log.topics()
        if topic.name.startswith(f"{name}.") and not topic.name.endswith("._snapshots")
    }


@pytest.mark.parametrize("seed", range(2))
def test_by_parts_the_log_is_the_same(seed: int, database: Database, log: EmbeddedLog) -> None:
    """Savepoints, key changes, truncates, large values: each transaction in parts of a few rows."""
    with database.connect() as connection:
        make_tables(connection, TABLES, "c")
        whole = Capture(log, "whole", database.dsn(options=STREAMED))
        parts = Capture(log, NAME, database.dsn(), part_bytes=[400, 5000][seed])
        for one in (whole, parts):
            one.run("caught up")
        begin = log.position
        writer = Writer(connection, TABLES, f"{seed}", messages=True)
        for _ in range(30):
            writer.transaction()
        for one in (whole, parts):
            one.run("caught up")
        assert changes(log, NAME) == changes(log, "whole")
        assert differences(log, connection, [*TABLES, "history"]) == []
        found = audit(log, [(begin, log.position)])
        assert found.wrong == []
        assert found.summed > 10


def test_by_parts_while_tables_are_read_and_altered(database: Database, log: EmbeddedLog) -> None:
    with database.connect() as connection:
        make_tables(connection, TABLES, "c")
        writer = Writer(connection, TABLES, "7", alters=True)
        for _ in range(5):
            for _ in range(8):
                writer.transaction()
            shop = Capture(log, NAME, database.dsn(), part_bytes=300, chunk_rows=7)
            shop.run("caught up")
            assert stopped(log) == []
            assert differences(log, connection, [*TABLES, "history"]) == []
        assert audit(log).wrong == []


def test_a_table_that_stops_in_the_middle_leaves_the_others(
    database: Database, log: EmbeddedLog
) -> None:
    """What was staged of it before goes; the transaction is whole without it. R-B4"""
    with database.connect() as connection:
        run = connection.execute
        run("create table good(id int primary key, v numeric(8, 2))")
        run("create table bad(id int primary key, v numeric(8, 2))")
        shop = Capture(log, NAME, database.dsn(), part_bytes=5000)
        shop.run("caught up")
        some = "insert into {} select g, g from generate_series({}, {}) g"
        with connection.transaction():
            run(some.format("good", 1, 400))
            run(some.format("bad", 1, 400))
            run("insert into bad values (1000, 'NaN')")
            run(some.format("good", 401, 900))
            run(some.format("bad", 401, 900))
        shop.run("caught up")
        assert [one.partition(":")[0] for one in stopped(log)] == ["stopped"]
        assert differences(log, connection, ["good"]) == []
        assert [len(batch) for batch in log.read(f"{NAME}.public.bad")] == []
        (told,) = [row for batch in log.read(f"{NAME}._transactions") for row in batch.to_pylist()]
        assert told["rows"] == 900
    named = {path.name for path in (Path(log.path) / "pieces").iterdir()}
    assert named
    assert all(name.startswith(f"{log.topic(f'{NAME}.public.good').id:06d}-") for name in named)
    assert list((Path(log.path) / "spill" / NAME).iterdir()) == []


def test_columns_that_come_in_the_middle(database: Database, log: EmbeddedLog) -> None:
    with database.connect() as connection:
        run = connection.execute
        run("create table t(id int primary key, v text)")
        shop = Capture(log, NAME, database.dsn(options=STREAMED), part_bytes=4000)
        shop.run("caught up")
        rows = "insert into t select g, 'v' || g from generate_series({}, {}) g"
        with connection.transaction():
            run(rows.format(1, 2000))
            run("alter table t add column w int")
            run("update t set w = id where id % 3 = 0")
            run("savepoint one")
            run("alter table t add column x int")
            run("update t set x = 1")
            run("rollback to one")
            run(rows.format(2001, 3000))
            run("update t set id = -id where id % 5 = 0")
        shop.run("caught up")
        assert stopped(log) == []
        assert differences(log, connection, ["t"]) == []


@pytest.mark.parametrize("part_bytes", [4000, 4 << 20])
@pytest.mark.parametrize("other", ["bigint", "text using 'k' || id"])
def test_a_key_that_gets_another_type_in_the_middle(
    database: Database, log: EmbeddedLog, other: str, part_bytes: int
) -> None:
    """What the transaction did before is said by keys that the topic does not have any more."""
    with database.connect() as connection:
        run = connection.execute
        run("create table t(id int primary key, v text)")
        run("insert into t select generate_series(1, 100)")
        shop = Capture(log, NAME, database.dsn(), part_bytes=part_bytes)
        shop.run("caught up")
        with connection.transaction():
            run("insert into t select generate_series(101, 300)")
            run("delete from t where id % 7 = 0")
            run("update t set id = id + 1000 where id % 3 = 0")
            run(f"alter table t alter id type {other}")
            run("update t set v = 'after' where id::text like '%5'")
            run("insert into t values ('2000')")
        shop.run("caught up")
        assert stopped(log) == []
        assert differences(log, connection, ["t"]) == []


def test_what_the_server_cannot_stream_before_it_has_ended(
    database: Database, log: EmbeddedLog
) -> None:
    """It is asked for it as a whole; else it would say for ever that it finds no relation."""
    lost: list[Exception] = []
    with database.connect() as connection:
        run = connection.execute
        run("create table t(id int primary key, v text)")
        shop = Capture(log, NAME, database.dsn(options=STREAMED), lost=lost.append)
        shop.run("caught up")
        rows = "insert into t select g, repeat('v', 90) from generate_series({}, {}) g"
        with connection.transaction():
            run(rows.format(1, 2000))
            run("savepoint one")
            run("alter table t add column w int")
            run(rows.format(2001, 4000))
            run("rollback to one")
            run(rows.format(2001, 4000))
            run("alter table t alter id type bigint")
            run(rows.format(4001, 6000))
        shop.run("caught up")
        assert [str(one) for one in lost if "could not map filenumber" not in str(one)] == []
        assert len(lost) <= 1
        assert differences(log, connection, ["t"]) == []


def test_messages_that_were_rolled_back_to_a_savepoint(
    database: Database, log: EmbeddedLog
) -> None:
    """While a transaction runs the server does not say of which subtransaction a message is."""
    lost: list[Exception] = []
    with database.connect() as connection:
        run = connection.execute
        run("create table t(id int primary key, v text)")
        shop = Capture(log, NAME, database.dsn(options=STREAMED), lost=lost.append)
        shop.run("caught up")
        rows = "insert into t select g, repeat('v', 90) from generate_series({}, {}) g"
        with connection.transaction():
            run(rows.format(1, 2000))
            run("savepoint one; select pg_logical_emit_message(true, 'm', 'gone')")
            run(rows.format(2001, 4000))
            run("rollback to one; select pg_logical_emit_message(true, 'm', 'kept')")
            run(rows.format(4001, 6000))
        shop.run("caught up")
        assert [row["content"] for row in changes(log, NAME)["._messages"]] == [b"kept"]
        assert differences(log, connection, ["t"]) == []
    assert ["savepoint was rolled back" in str(one) for one in lost] == [True]


def test_the_server_is_answered_while_we_are_busy(database: Database, log: EmbeddedLog) -> None:
    """It ends a connection that is silent for wal_sender_timeout; ours says how far it is."""
    lost: list[Exception] = []
    part = Large._part

    def slowly(large: Large, *given: Any) -> None:
        time.sleep(1.5)
        part(large, *given)

    with database.connect() as connection:
        connection.execute("create table t(id int primary key)")
        connection.execute(f"alter database {database.name} set wal_sender_timeout = '1s'")
        shop = Capture(log, NAME, database.dsn(), part_bytes=20_000, lost=lost.append)
        with mock.patch.object(stream, "STATUS_SECONDS", 0.2):
            shop.run("caught up")
            connection.execute("insert into t select generate_series(1, 500)")
            with mock.patch.object(Large, "_part", slowly):
                shop.run("caught up")
        assert [str(error) for error in lost] == []
        assert differences(log, connection, ["t"]) == []


@pytest.fixture
def large(database: Database) -> Iterator[Stream]:
    """The stream of transactions of 20,000, 1,000 and again 1,000 rows."""
    with database.connect() as connection:
        connection.execute("create table t(id int primary key, v text); create publication p")
        connection.execute("alter publication p add table t")
        connection.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
        for first, last in ((1, 20_000), (20_001, 21_000), (21_001, 22_000)):
            connection.execute(
                f"insert into t select n, repeat('x', 200) from generate_series({first}, {last}) n"
            )
    with Stream(database.dsn(), "s", "p", 0) as source:
        yield source


def transactions(source: Stream, count: int) -> list[int]:
    """How many transactions came with each call."""
    found: list[int] = []
    while sum(found) < count:
        with contextlib.closing(source.receive(30.0)) as come:
            found.append(sum([isinstance(one, Transaction) for one in come]))
    return found


def test_where_nobody_keeps_a_large_transaction_it_is_not_slept_through(
    large: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it comes in we pause, but not while some of it is there: libpq takes a little each."""
    pause, paused = time.sleep, []

    def sleep(seconds: float) -> None:
        paused.append(bool(select.select([large._pg.socket], [], [], 0)[0]))
        pause(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    large._kept = False
    transactions(large, 1)
    assert sum(paused) <= 20, f"{sum(paused)} of {len(paused)} pauses with something there"


def waiting(source: Stream) -> int:
    """Bytes that have come, and that nobody has taken."""
    there = array.array("i", [0])
    fcntl.ioctl(source._pg.socket, termios.FIONREAD, there)
    return there[0]


def test_a_look_takes_all_that_is_there(large: Stream) -> None:
    """Not 16 KiB: else the server stands still, or sends row by row while those are read."""
    assert large._kept
    deadline = time.monotonic() + 30
    while (there := waiting(large)) < stream.WINDOW_BYTES:  # nobody reads
        assert time.monotonic() < deadline, f"only {there} bytes have come"
        time.sleep(0.01)
    large._look()
    taken = 0
    while (one := large._pg.get_copy_data(1))[0] > 0:
        taken += one[0] + 5  # what stands before each message
    assert taken >= there - 400, f"{taken} bytes of {there}; the last row may have come in part"


def test_while_large_transactions_come_in_looks_are_rare(
    large: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = mock.Mock(side_effect=large._look)
    monkeypatch.setattr(large, "_look", look)
    began = time.monotonic()
    transactions(large, 3)
    pauses = (time.monotonic() - began) / stream.PAUSE_SECONDS
    assert look.call_count <= stream.MANY + 20 + 2 * pauses  # the first rows may come one by one


def test_a_source_is_not_asked_for_a_sign_of_life_while_its_changes_come(
    database: Database, log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sign is a round trip, and a record that the server has to send."""
    with database.connect() as connection:
        connection.execute("create table t(id int primary key)")
        capture = Capture(log, NAME, database.dsn(), ["public.t"], group_rows=1)
        capture.run("caught up")
        for n in range(50):
            connection.execute("insert into t values (%s)", (n,))
        ask = mock.Mock(side_effect=catalog.heartbeat)
        monkeypatch.setattr(catalog, "heartbeat", ask)
        entries = log.ends(f"{NAME}._transactions")
        capture.run("caught up")
        assert log.ends(f"{NAME}._transactions")[0] - entries[0] == 50
        assert differences(log, connection, ["t"]) == []
    assert ask.call_count <= 25, f"{ask.call_count} signs for 50 groups"


@pytest.mark.timeout(300)
def test_memory_does_not_grow_with_a_transaction() -> None:
    """A capture in a process, killed with kill -9 while it captures, then measured."""
    found = bulk(100_000, part_bytes=1 << 19, kills=1, only="savepoints")
    assert found.wrong == []
    assert [step.name for step in found.steps] == ["insert", "savepoints"]
    assert [step for step in found.steps if step.own > step.begun + 45] == []
    assert found.events["kills"] > 0


def test_pieces_of_a_capture_that_was_killed_are_removed(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a transaction that is in the log stay, whether or not it was said in time."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    def captured(log: EmbeddedLog) -> Capture:
        return Capture(log, NAME, database.dsn(), part_bytes=10_000)

    def rows(log: EmbeddedLog) -> int:
        return sum(1 for _ in log.table(f"{NAME}.public.t").scan().read_all().to_pylist())

    insert = "insert into t select g, repeat('x', 100) from generate_series({0}, {0} + 4999) g"
    with database.connect() as connection, hr.connect(tmp_path / "log") as log:
        connection.execute("create table t(id int primary key, pad text)")
        captured(log).run("caught up")
        connection.execute(insert.format(1))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Large, "append_to", killed)
            captured(log).run("caught up")
        assert len(checked(log.path).orphans) > 1
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "unlink", lambda self, **_: killed())
            captured(log).run("caught up")
        captured(log).run("caught up")
        connection.execute(insert.format(10_001))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Transaction, "close", killed)
            captured(log).run("caught up")
        assert rows(log) == 10_000
        captured(log).run("caught up")
        assert rows(log) == 10_000
    assert checked(str(tmp_path / "log")).orphans == []
