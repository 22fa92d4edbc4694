"""A server that answers, and refuses what a capture needs: it is tried again, ever later. R-B3

Caught: attempts without a pause between them, a run to the end that never ends, a reason that
nobody can read. Not caught: how a server that is really short of memory or disk behaves; the
refusal here is that of temporary files, which a sort needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from headrace import errors
from headrace.cli.capture import _status_lines
from headrace.log.embedded.log import EmbeddedLog
from headrace.sources.postgres import capture as module
from headrace.sources.postgres.capture import Capture
from headrace.sources.postgres.snapshot import copied
from headrace.sources.postgres.status import statuses
from headrace.sources.postgres.stream import Stream
from tests.capture.conftest import Database
from tests.capture.kit import capture
from tests.capture.test_tables import asks

SAID = "temporary file size exceeds"


@pytest.fixture
def connection(database: Database) -> Iterator[psycopg.Connection[Any]]:
    """With a table that must be sorted to be read, which the server refuses."""
    with database.connect() as connection:
        run = connection.execute
        run("create table t(id text not null); create unique index u on t(id text_pattern_ops)")
        run("alter table t replica identity using index u")
        run("insert into t select repeat('x', 100) || g from generate_series(1, 20000) g")
        run(f"alter database {database.name} set work_mem = '64kB'")
        run(f"alter database {database.name} set temp_file_limit = '200kB'")
        yield connection


def test_it_is_tried_again_ever_later_and_status_says_why(
    database: Database,
    log: EmbeddedLog,
    connection: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rested: list[float] = []
    lost: list[Exception] = []
    shop = capture(log, database.dsn(), lost=lost.append)

    def rest(self: Capture, seconds: float) -> None:
        rested.append(seconds)
        if len(rested) == 12:
            self.stop()

    with monkeypatch.context() as patched:
        patched.setattr(Capture, "_rest", rest)
        shop.run()
    assert rested == [0.1 * 2**n for n in range(9)] + [30.0] * 3
    assert all(SAID in str(one) for one in lost)
    asks(log, database)
    (found,) = statuses(log, ["shop"], pause=0.0)
    assert SAID in found.failed
    assert any("failed" in line and SAID in line for line in _status_lines(found))
    connection.execute(f"alter database {database.name} reset temp_file_limit")
    shop.run("caught up")
    (found,) = statuses(log, ["shop"], pause=0.0)
    assert (found.failed, found.tables["public.t"]["status"]) == ("", "live")


def test_a_run_that_has_an_end_gives_up(
    database: Database,
    log: EmbeddedLog,
    connection: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection is there each time; nobody would wait for ever."""
    shop = capture(log, database.dsn())
    times = 0

    def rest(self: Capture, seconds: float) -> None:
        nonlocal times
        times += 1
        if times == 300:
            self.stop()

    monkeypatch.setattr(Capture, "_rest", rest)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 3.0)
    with pytest.raises(errors.SourceAway, match="refuses: temporary file size") as raised:
        shop.run("caught up")
    assert "server's log" in raised.value.fix


def test_what_the_server_says_of_a_stream_has_its_code(database: Database) -> None:
    """By it we know that the server is not away."""
    with pytest.raises(psycopg.OperationalError, match="does not exist") as raised:
        Stream(database.dsn(), "none", "none", 0)
    assert raised.value.sqlstate == "42704"


def test_a_stream_that_breaks_at_once_is_tried_again_ever_later(
    database: Database, log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the server cannot decode a change."""
    shop = capture(log, database.dsn())
    rested: list[float] = []

    def rest(self: Capture, seconds: float) -> None:
        rested.append(seconds)
        if len(rested) == 3:
            self.stop()

    def broken(*given: Any) -> None:
        raise psycopg.OperationalError("invalid memory alloc request size")

    monkeypatch.setattr(Capture, "_rest", rest)
    monkeypatch.setattr(Capture, "_gather", broken)
    shop.run()
    assert rested == [0.1, 0.2, 0.4]


def test_a_connection_whose_reading_the_server_ended_can_be_used_again(database: Database) -> None:
    query = sql.SQL("COPY (SELECT 1 / (9 - g) FROM generate_series(1, 10) g) TO STDOUT").format()
    with database.connect() as connection:
        with pytest.raises(psycopg.errors.DivisionByZero), connection.transaction():
            for _ in copied(connection, query):
                pass
        assert connection.execute("select 1").fetchone() == (1,)
