"""A capture, its writers and its server, broken at random: a short run of `./run faults capture`.

Caught: rows lost or twice, half a transaction, a wrong before-image, a wrong order, with kills at
chosen instants, snapshots, truncates, streamed transactions and other columns meanwhile. Not
caught: instants that did not happen, and what only processes killed at random show: that is
`./run faults capture --only case`, which depends on the machine's load too much for a test.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import headrace as hr
from headrace.sources.postgres.capture import Capture
from headrace.testing.capture_case import NAME, Stepped, make_table, make_tables, stepped
from headrace.testing.capture_case import differences as differ
from headrace.testing.postgres import Server
from tests.capture.conftest import Database


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", ["1", "2"])
def test_stopped_at_chosen_instants(seed: str, postgres: Server, tmp_path: Path) -> None:
    wrong, found = stepped(postgres, tmp_path, seed, rounds=2)
    assert wrong == []
    assert found.summed > 0


def test_killed_between_the_slot_and_its_entry(database: Database, tmp_path: Path) -> None:
    """The next one makes the slot again, and the server waits for all that is under way."""
    with Stepped(database.server, database.name, tmp_path, "45", kills=1.0) as case:
        case.write(60)
        case.finish()
        case.run(1)
        assert case.kinds == {"entry": 1, "kills": 1}
        assert differ(case.log, case.connection, [*case.tables, "history"]) == []


def test_a_key_outside_of_its_row(database: Database, tmp_path: Path) -> None:
    """Of a key so large that it is not kept in the row an update does not say the new value."""
    with database.connect() as connection, hr.connect(tmp_path / "log") as log:
        run = connection.execute
        run("create table big(id text primary key, v text, w text)")
        run("alter table big alter id set storage external")
        big = "select string_agg(md5(g::text), '') from generate_series({}, {} + 60) g"
        for start in (1, 9):
            run(f"insert into big values (({big.format(start, start)}), 'a', 'b')")
        shop = Capture(log, NAME, database.dsn())
        shop.run("caught up")
        for value in "xyz":
            with connection.transaction():
                run("update big set v = %s", (value,))
                run("update big set w = %s where v = %s", (value, value))
            shop.run("caught up")
            assert differ(log, connection, ["big"]) == []
        run("delete from big")
        shop.run("caught up")
        assert differ(log, connection, ["big"]) == []


def test_a_row_that_was_under_way_when_its_table_was_added(
    database: Database, tmp_path: Path
) -> None:
    """It was written before the table was published, and committed after the table was read."""
    with database.connect() as connection, hr.connect(tmp_path / "log") as log:
        make_tables(connection, ["a"])
        Capture(log, NAME, database.dsn()).run("caught up")
        make_table(connection, "b")
        with database.connect(autocommit=False) as slow:
            slow.execute("insert into b (id, part, amount) values (1, 'a', 1)")
            shop = Capture(log, NAME, database.dsn(), heartbeat_seconds=0.1)
            thread = threading.Thread(target=shop.run, args=("caught up",))
            thread.start()
            time.sleep(1.5)
            slow.commit()
            thread.join()
        shop.run("caught up")
        assert differ(log, connection, ["a", "b", "history"]) == []
