"""A capture that is started again: refused by name wherever changes could be lost, else let go on.

The twelve errors are provoked on a real server by what really leads to them (`provocations`), and
told from each other. This can catch: a difference that is not seen, seen as another one, or seen
where there is none (after a crash of the server, an idle restart, a rename of the database). It
cannot catch what a standby or a managed server does otherwise. R-B3
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import headrace as hr
from headrace import errors
from headrace.sources.postgres import catalog
from headrace.sources.postgres.capture import Capture
from headrace.testing.postgres import Server, fresh_database
from tests.capture.conftest import Database
from tests.capture.provocations import PROVOCATIONS, Provocation, capture, check

CASES = [
    pytest.param(code, function, id=f"{code}-{function.__name__}")
    for code, functions in PROVOCATIONS.items()
    for function in functions
]


@pytest.mark.parametrize(("code", "provocation"), CASES)
def test_it_is_refused_by_name(code: str, provocation: Provocation, database: Database) -> None:
    with pytest.raises(errors.HeadraceError) as caught:
        provocation(database.server, database.name)
    assert caught.value.code == code, caught.value.render()
    assert "None" not in caught.value.render()


def test_there_are_twelve() -> None:
    assert list(PROVOCATIONS) == [f"HR-CAPTURE-{number:03}" for number in range(1, 13)]


def test_it_goes_on_after_restarts_and_crashes_of_the_server() -> None:
    """The slot goes back to what the server last wrote down: before the log, which is no loss."""
    with Server() as server, fresh_database(server, "shop"):
        with capture(server, "shop") as captured:
            captured.do("checkpoint")
            captured.write()
            captured.save()
            captured.advance()
            saved = captured.saved
        for end in (server.stop, server.kill):
            end()
            server.start()
            with server.connect("shop") as connection:
                check(connection, saved)
                slot = catalog.slot(connection, saved.slot)
                assert slot is not None
                assert slot.confirmed_flush is not None
                assert slot.confirmed_flush <= saved.confirmed


def test_a_database_may_be_renamed(database: Database) -> None:
    with capture(database.server, database.name) as captured:
        saved = captured.saved
    renamed = database.name + "_renamed"
    with database.server.connect() as connection:
        connection.execute(f"alter database {database.name} rename to {renamed}")
        try:
            with database.server.connect(renamed) as there:
                check(there, saved)
        finally:
            connection.execute(f"alter database {renamed} rename to {database.name}")


def test_other_tables_and_more_tables_do_not_matter(database: Database) -> None:
    with capture(database.server, database.name) as captured:
        captured.do("create table more (id int)")
        captured.do("alter publication hr_shop add table more")
        captured.do("drop table other")
        captured.do("alter table orders replica identity full")
        captured.resume()


def test_without_a_note_a_restored_log_is_told_as_a_slot_that_is_ahead(database: Database) -> None:
    with capture(database.server, database.name) as captured, captured.open_transaction():
        captured.do("comment on publication hr_shop is 'ask Ada before you touch this'")
        captured.write()
        captured.advance()
        with pytest.raises(errors.SlotAhead, match="restored from a backup"):
            captured.resume()


def test_what_another_log_has_left_is_no_hindrance_without_a_slot(
    database: Database, tmp_path: Path
) -> None:
    """As the advice says; and a log that comes late is refused at once, not after some patience."""
    with database.connect() as connection, hr.connect(tmp_path / "new") as log:
        connection.execute("create table t(id int primary key); insert into t values (1)")
        with hr.connect(tmp_path / "lost") as lost:
            Capture(lost, "shop", database.dsn()).run("caught up")
        began = time.monotonic()
        with pytest.raises(errors.SlotInUse) as refused:
            Capture(log, "shop", database.dsn()).run("caught up")
        assert time.monotonic() - began < 15
        for statement in refused.value.fix.partition("left: ")[2].split("; ")[:-1]:
            connection.execute(statement.encode())
        Capture(log, "shop", database.dsn()).run("caught up")
        assert log.table("shop.public.t").scan().read_all()["id"].to_pylist() == [1]


def test_a_slot_that_was_moved_is_told_from_one_that_was_made_again(
    database: Database, tmp_path: Path
) -> None:
    """Both keep no WAL from before; only from the first one was ever anything streamed."""
    with hr.connect(tmp_path / "log") as log, database.connect() as connection:
        connection.execute("create table t(id int primary key)")
        shop = Capture(log, "shop", database.dsn())
        shop.run("caught up")
        connection.execute("insert into t values (1)")
        shop.run("caught up")
        assert shop.state is not None
        slot = shop.state.slot
        active = "select from pg_replication_slots where slot_name = %s and active"
        while connection.execute(active, (slot,)).fetchone() is not None:  # a moment longer
            time.sleep(0.01)
        for number in range(2, 20):
            connection.execute("insert into t values (%s)", (number,))
            connection.execute("select pg_log_standby_snapshot()")
            connection.execute(
                "select pg_replication_slot_advance(%s, pg_current_wal_lsn())", (slot,)
            )
            found = catalog.slot(connection, slot)
            assert found is not None
            if (found.restart or 0) >= shop.state.lsn:
                break
        else:
            pytest.fail("it was not moved that far")
        with pytest.raises(errors.SlotAhead):
            shop.run("caught up")
        connection.execute("select pg_drop_replication_slot(%s)", (slot,))
        connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
        with pytest.raises(errors.SlotRecreated):
            shop.run("caught up")


def test_the_note_is_kept_up_to_date(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sources.postgres.capture.NOTE_SECONDS", 0.0)
    with hr.connect(tmp_path / "log") as log, database.connect() as connection:
        connection.execute("create table t(id int primary key)")
        shop = Capture(log, "shop", database.dsn())
        shop.run("caught up")
        first = catalog.note(connection, "headrace_shop")
        connection.execute("insert into t values (1)")
        behind = catalog.lsn(connection)
        running = threading.Thread(target=shop.run)
        running.start()
        try:
            until = time.monotonic() + 30
            while True:
                note = catalog.note(connection, "headrace_shop")
                assert note is not None
                assert first is not None
                if note.confirmed >= behind:
                    break
                assert time.monotonic() < until, (first, note)
                connection.execute("insert into t select max(id) + 1 from t")
                time.sleep(0.05)
        finally:
            shop.stop()
            running.join()
        assert note.starts == first.starts + 1


def test_an_old_log_is_no_harm_while_the_slot_still_has_its_changes(database: Database) -> None:
    with capture(database.server, database.name) as captured:
        backup = captured.saved
        captured.write()
        captured.save(starts=2)
        captured.note()
        captured.saved = backup
        captured.resume()
