"""A captured topic against its database, while both go on; and tokens of that database (R-B7, B12).

Caught: differences that are none, since rows changed between the reading of a chunk and the log's
position (made to happen on every chunk, and at random under writers); rows of the log that are
wrong, missing, or not in the database; a token that is said to be there before it is, or that is
waited for in vain. Not caught: servers with standbys that commits wait for.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.runtime import tokens, verify_source
from headrace.runtime.verify import last
from headrace.runtime.verify import verify_source as verify
from headrace.runtime.verify_source import SourceComparison
from headrace.sources.postgres import settings
from headrace.sources.postgres.state import LIVE
from tests.capture.conftest import Database

TABLE = """
    create table a (id int, part text, n numeric(10, 2), t text, f float8, primary key (id, part));
    insert into a
      select g, chr(65 + g % 40), g, repeat('x', g % 9), g from generate_series(1, 300) g
"""
TOPIC = "shop.public.a"
KEYS = ["id", "part"]


@contextlib.contextmanager
def captured(log: EmbeddedLog, database: Database) -> Iterator[psycopg.Connection[Any]]:
    """A table under a running capture."""
    with database.connect() as connection:
        connection.execute(TABLE)
        shop = hr.capture(log, "shop", database.dsn(), heartbeat_seconds=60.0)
        thread = threading.Thread(target=shop.run)
        thread.start()
        try:
            while not _live(log):
                time.sleep(0.02)
            yield connection
        finally:
            shop.stop()
            connection.execute("select pg_logical_emit_message(true, 'headrace', '')")
            thread.join()


def _live(log: EmbeddedLog) -> bool:
    state = settings.saved_state(log, "shop")
    return state is not None and any(one.status == LIVE for one in state.tables.values())


def found(log: EmbeddedLog, chunk_rows: int) -> dict[tuple[int, str], str]:
    comparison = SourceComparison(log, "shop", "public.a", chunk_rows=chunk_rows)
    return {
        (row["id"], row["part"]): one.kind for one in comparison for row in one.rows.to_pylist()
    }


def test_rows_that_change_between_the_reading_and_the_log(
    database: Database, log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind every chunk a transaction changes rows of it, twice, and moves keys."""
    with captured(log, database) as connection:
        read = verify_source._read
        number = 0

        def changed(*given: Any) -> Any:
            nonlocal number
            chunk = read(*given)
            number += 1
            with connection.transaction():
                connection.execute(
                    "update a set n = n + 1, t = null where id %% 5 = %s", (number % 5,)
                )
                connection.execute("update a set f = -f where id % 7 = 3")
                connection.execute("delete from a where id %% 31 = %s", (number,))
                connection.execute("insert into a values (%s, 'new', 1, '', 'NaN')", (number,))
                connection.execute("update a set id = id + 1000 where id = %s", (11 * number,))
            return chunk

        monkeypatch.setattr(verify_source, "_read", changed)
        assert found(log, 60) == {}
        assert found(log, 1000) == {}
        assert number >= 6


def test_no_difference_is_false_under_writers(database: Database, log: EmbeddedLog) -> None:
    over = threading.Event()

    def write(seed: int) -> None:
        rng = random.Random(seed)
        with database.connect() as own:
            while not over.is_set():
                with contextlib.suppress(psycopg.errors.DeadlockDetected), own.transaction():
                    for _ in range(rng.randrange(1, 5)):
                        number = rng.randrange(1, 60)
                        own.execute(
                            rng.choice(
                                [
                                    "update a set n = n + 1 where id = %s",
                                    "delete from a where id = %s",
                                    "insert into a values (%s, 'w', 0) on conflict do nothing",
                                ]
                            ),
                            (number,),
                        )

    with captured(log, database):
        writers = [threading.Thread(target=write, args=(seed,)) for seed in range(2)]
        for one in writers:
            one.start()
        try:
            for rows in (50, 120, 1000, 1000, 1000, 1000):
                assert found(log, rows) == {}
        finally:
            over.set()
            for one in writers:
                one.join()


@pytest.mark.parametrize("seed", range(3))
def test_what_is_wrong_in_the_log_is_found(seed: int, database: Database, log: EmbeddedLog) -> None:
    rng = random.Random(seed)
    with captured(log, database) as connection:
        rows = log.table(TOPIC).scan().read_all().drop_columns(["_position"]).to_pylist()
        rng.shuffle(rows)
        expected: dict[tuple[int, str], str] = {}
        lies: list[dict[str, Any]] = []
        for row in rows[:3]:
            lies += [{**row, "_weight": -1}, {**row, "t": "a lie", "_weight": 1}]
            expected[row["id"], row["part"]] = "changed"
        for row in rows[3:5]:
            lies.append({**row, "_weight": -1})
            expected[row["id"], row["part"]] = "missing"
        for number in range(2):
            lies.append({**rows[9], "id": 5000 + number, "_weight": 1})
            expected[5000 + number, rows[9]["part"]] = "extra"
        log.append(TOPIC, lies)
        connection.execute("update a set n = n + 1 where id = 299")
        assert found(log, rng.choice([40, 1000])) == expected
        result = verify(log, "shop", "public.a")
        assert (result.rows, result.differing) == (300, len(expected))
        assert {
            (one.key["id"], one.key["part"]): one.kind for one in result.differences
        } == expected
        assert all(one.positions for one in result.differences)
        assert last(log)[TOPIC, "public.a", "source"]["differing"] == len(expected)


def test_a_table_without_a_key_is_counted(database: Database, log: EmbeddedLog) -> None:
    """While a writer goes on; then rows that the log has too often, too seldom, or alone."""
    with database.connect() as connection:
        connection.execute(
            "create table bag (a int, b text); alter table bag replica identity full;"
            "insert into bag select g % 7, 'x' from generate_series(1, 50) g;"
            "insert into bag values (null, null), (null, null)"
        )
    with captured(log, database) as connection:
        while not (
            (state := settings.saved_state(log, "shop"))
            and "public.bag" in state.tables
            and state.tables["public.bag"].status == LIVE
        ):
            time.sleep(0.05)
        stop = threading.Event()

        def write() -> None:
            with database.connect() as other:
                while not stop.is_set():
                    other.execute("update bag set b = b || 'y' where a = 3 and length(b) < 5")
                    other.execute("delete from bag where a = 2; insert into bag values (2, 'z')")
                    other.execute("update bag set b = 'x' where a = 3")

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(10):
                result = verify(log, "shop", "public.bag")
                assert (result.differing, result.differences) == (0, [])
        finally:
            stop.set()
            thread.join()
        many = result.rows
        wrong = [(2, "z", 1), (0, "x", -1), (99, "new", 1)]
        log.append("shop.public.bag", [{"a": a, "b": b, "_weight": w} for a, b, w in wrong])
        result = verify(log, "shop", "public.bag")
        assert result.rows in range(many - 10, many + 10)
        kinds = {one.key["a"]: one.kind for one in result.differences}
        assert kinds == {2: "changed", 0: "changed", 99: "extra"}
        log.append("shop.public.bag", [{"a": a, "b": b, "_weight": -w} for a, b, w in wrong])
        connection.execute("truncate bag")
        result = verify(log, "shop", "public.bag")
        assert (result.rows, result.differing) == (0, 0)


def test_an_empty_table_equals_an_empty_topic(database: Database, log: EmbeddedLog) -> None:
    with captured(log, database) as connection:
        connection.execute("delete from a")
        result = verify(log, "shop", "public.a")
        assert (result.rows, result.differing) == (0, 0)
        connection.execute("insert into a values (1, 'x')")
        assert verify(log, "shop", "public.a").rows == 1


def test_a_table_that_is_not_live_is_not_verified(database: Database, log: EmbeddedLog) -> None:
    with captured(log, database), pytest.raises(errors.CannotVerify, match="not captured"):
        SourceComparison(log, "shop", "public.b")


# --- tokens ---------------------------------------------------------------------------------------


def lsn(connection: psycopg.Connection[Any]) -> str:
    row = connection.execute("select pg_current_wal_lsn()").fetchone()
    assert row is not None
    return f"lsn:{row[0]}"


def test_who_writes_reads_it(database: Database, log: EmbeddedLog) -> None:
    """Writers of their own rows, each reads by the token of its commit; none reads an older row."""
    wrong: list[str] = []

    def write(key: int) -> None:
        with database.connect() as own:
            for number in range(12):
                own.execute("update a set n = %s where id = %s", (number, key))
                token = lsn(own)
                at = tokens.wait_log(log, token, 30.0)
                rows = log.table(TOPIC).get([(key, chr(65 + key % 40))], at=at).to_pylist()
                if int(rows[0]["n"]) != number:
                    wrong.append(f"{key}: {rows} instead of {number} at {at}, {token}")

    with captured(log, database):
        writers = [threading.Thread(target=write, args=(key,)) for key in (5, 6, 7)]
        for one in writers:
            one.start()
        for one in writers:
            one.join()
        assert wrong == []


def test_a_token_is_there_on_a_quiet_database_too(database: Database, log: EmbeddedLog) -> None:
    """What moves the write-ahead log and is no row of a table: the heartbeat is a minute away."""
    with captured(log, database) as connection:
        connection.execute("create table other (id int)")
        connection.execute("drop table other")
        began = time.monotonic()
        assert tokens.position_of(log, lsn(connection), 20.0) >= 0
        assert time.monotonic() - began < 20.0
        assert hr.rows(log, TOPIC, after=lsn(connection), timeout=20.0).num_rows == 300
        with pytest.raises(errors.NotYetThere):  # one that never comes keeps nobody else waiting
            tokens.position_of(log, "lsn:FFFF/0", 0.0)
        connection.execute("create table other (id int)")
        assert tokens.position_of(log, lsn(connection), 20.0) >= 0


def test_what_is_not_there_says_how_far_it_is(database: Database, log: EmbeddedLog) -> None:
    with captured(log, database) as connection:
        tokens.position_of(log, lsn(connection), 20.0)
    with database.connect() as connection:  # the capture has ended
        connection.execute("update a set n = 0")
        with pytest.raises(errors.NotYetThere, match="capture 'shop' does not have") as caught:
            tokens.position_of(log, lsn(connection), 0.3)
        assert caught.value.details["bytes"] > 0  # type: ignore[operator]
    position = log.position
    with pytest.raises(errors.NotYetThere, match="2 positions behind"):
        tokens.wait_log(log, position + 2, 0.05)
    receipt = log.append(TOPIC, [])
    assert tokens.wait_log(log, str(receipt.position), 0.05) >= receipt.position


@pytest.mark.parametrize("token", ["", "x", "-1", -1, True, "lsn:", "lsn:0", "lsn:0/1/2", "1.5"])
def test_a_bad_token_is_refused(token: Any, log: EmbeddedLog) -> None:
    with pytest.raises(errors.BadToken):
        tokens.position_of(log, token)


def test_an_lsn_without_its_capture_is_refused(log: EmbeddedLog) -> None:
    with pytest.raises(errors.BadToken, match="of which capture"):
        tokens.position_of(log, "lsn:0/1")
    with pytest.raises(errors.UnknownCapture):
        tokens.position_of(log, "lsn:shop:0/1")


def test_the_entry_of_a_commit_is_found_however_far_back(
    log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "BLOCK", 3)
    log.create_topic("shop._transactions", "xid bigint, lsn bigint")
    rng = random.Random(1)
    entries: list[tuple[int, int]] = []
    number = 100
    for _ in range(15):
        ends = []
        for _ in range(rng.randrange(1, 5)):
            number += rng.randrange(1, 9)
            ends.append(number)
        receipt = log.append("shop._transactions", [{"xid": 1, "lsn": end} for end in ends])
        entries += [(end, receipt.position) for end in ends]
    for asked in (95, number + 5, *rng.sample(range(95, number), 12)):
        expected = max((at for end, at in entries if end <= asked), default=0)
        assert tokens._entry_of(log, "shop", asked) == expected
