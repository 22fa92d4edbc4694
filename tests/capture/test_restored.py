"""A capture whose log was restored from a backup, on a real server (R-B3, R-A13).

Caught: a capture that goes on over a gap, a gap without its name, a way out that leaves rows which
the database no longer has, a refusal where nothing is lost. Not caught: what other sources do.
"""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.sources.postgres.remove import remove
from tests.capture.conftest import Database


def rows(log: EmbeddedLog) -> list[tuple[int, str]]:
    found = log.table("shop.public.t").scan().read_all().to_pylist()
    return [(row["id"], row["v"]) for row in found]


def captured(log: EmbeddedLog, database: Database) -> None:
    hr.capture(log, "shop", database.dsn()).run("caught up")


def test_the_gap_has_its_name_and_the_way_out_leads_out(database: Database, tmp_path: Path) -> None:
    """Rows that came, changed and went after the backup: refused, and right after a new reading."""
    with database.connect() as connection:
        connection.execute("create table t (id int primary key, v text)")
        connection.execute("insert into t select n, 'old' from generate_series(1, 50) n")
        with hr.connect(tmp_path / "log") as log:
            captured(log, database)
            log.backup(tmp_path / "backup")
            connection.execute("insert into t values (100, 'new')")
            connection.execute("update t set v = 'changed' where id = 2")
            connection.execute("delete from t where id = 3")
            captured(log, database)
        hr.restore(tmp_path / "backup", tmp_path / "restored")
        with hr.connect(tmp_path / "restored") as log:
            before = log.ends("shop.public.t")
            with pytest.raises(errors.LogRestored) as caught:
                captured(log, database)
            assert "remove the capture and add it again" in caught.value.fix
            assert rows(log) == [(n, "old") for n in range(1, 51)]
            assert log.ends("shop.public.t") == before, "it took nothing"
            remove(log, "shop", connection)
            captured(log, database)
            wanted = connection.execute("select id, v from t order by id").fetchall()
            assert rows(log) == wanted
            connection.execute("insert into t values (101, 'after')")
            captured(log, database)
            assert rows(log)[-1] == (101, "after")


def test_nothing_is_refused_where_the_server_still_has_it(
    database: Database, tmp_path: Path
) -> None:
    """A backup that is as new as what was confirmed loses nothing, and goes on."""
    with database.connect() as connection:
        connection.execute("create table t (id int primary key, v text)")
        with hr.connect(tmp_path / "log") as log:
            captured(log, database)
            connection.execute("insert into t values (1, 'one')")
            captured(log, database)
            log.backup(tmp_path / "backup")
        connection.execute("insert into t values (2, 'two')")
        hr.restore(tmp_path / "backup", tmp_path / "restored")
        with hr.connect(tmp_path / "restored") as log:
            captured(log, database)
            assert rows(log) == [(1, "one"), (2, "two")]


def test_backups_beside_a_running_capture_have_transactions_whole(
    database: Database, tmp_path: Path
) -> None:
    """Each transaction writes one id to two tables: a backup has it in both or in none."""
    over = threading.Event()

    def write() -> None:
        with database.connect(autocommit=False) as connection:
            for number in itertools.count():
                if over.is_set():
                    return
                connection.execute("insert into a values (%s)", (number,))
                connection.execute("insert into b values (%s)", (number,))
                connection.commit()

    with database.connect() as connection, hr.connect(tmp_path / "log") as log:
        for table in ("a", "b"):
            connection.execute(f"create table {table} (id int primary key)")
        shop = hr.capture(log, "shop", database.dsn())
        shop.run("caught up")
        running = [threading.Thread(target=one) for one in (write, shop.run)]
        for thread in running:
            thread.start()
        counts = []
        try:
            seen = log.position
            for number in range(4):
                seen = log.wait(seen + 3, 60)
                log.backup(tmp_path / "backup")
                hr.restore(tmp_path / "backup", tmp_path / f"r{number}")
                with hr.connect(tmp_path / f"r{number}") as restored:
                    both = "select (select list(id order by id) from a) as a, "
                    both += "(select list(id order by id) from b) as b"
                    (row,) = hr.sql(restored, both).to_pylist()
                    assert row["a"] == row["b"]
                    counts.append(len(row["a"]))
        finally:
            over.set()
            shop.stop()
            for thread in running:
                thread.join()
        assert counts == sorted(counts)
        assert counts[-1] > counts[0]
