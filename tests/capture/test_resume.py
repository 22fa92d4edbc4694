"""A capture that is started again: refused by name wherever changes could be lost, else let go on.

The twelve errors are provoked on a real server by what really leads to them (`provocations`), and
told from each other. This can catch: a difference that is not seen, seen as another one, or seen
where there is none (after a crash of the server, an idle restart, a rename of the database). It
cannot catch what a standby or a managed server does otherwise. R-B3
"""

from __future__ import annotations

import pytest

from headrace import errors
from headrace.sources.postgres import catalog
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


def test_an_old_log_is_no_harm_while_the_slot_still_has_its_changes(database: Database) -> None:
    with capture(database.server, database.name) as captured:
        backup = captured.saved
        captured.write()
        captured.save(starts=2)
        captured.note()
        captured.saved = backup
        captured.resume()
