"""What a capture keeps of itself in the log."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.sources.postgres.capture import Capture
from headrace.sources.postgres.state import State, TableState, table_name, writer_name
from tests.capture.conftest import Database


def new_state(*tables: str) -> State:
    """A state with tables."""
    made = {one: TableState(one, ["id"], 1, {"id": 1}) for one in tables}
    return State("1", 1, "shop", 2, "slot", "publication", tables=made)


def save(log: EmbeddedLog, state: State) -> list[str]:
    """Put it into the log; the tables that this took."""
    writer = log.writer(writer_name("shop"))
    unsaved = state.unsaved("shop")
    with writer.transaction(state=state.to_json()) as entry:
        for name, value in unsaved.items():
            entry.put_own(name, value)
    state.save()
    return [name.removeprefix(table_name("shop", "")) for name in unsaved]


def test_only_what_changed_is_saved(log: EmbeddedLog) -> None:
    assert State.load(log, "shop") is None
    state = new_state("a", "b", "c")
    assert save(log, state) == ["a", "b", "c"]
    assert save(log, state) == []
    state.tables["b"].rows += 1
    state.tables["c"].rows = state.tables["c"].rows
    state.tables["a"].pending += [["1"]]
    state.lsn = 7
    assert save(log, state) == ["a", "b"]
    del state.tables["a"]
    state.tables["d"] = TableState("d", ["id"], 1, {"id": 1})
    assert sorted(save(log, state)) == ["a", "d"]
    assert save(log, state) == []
    found = State.load(log, "shop")
    assert found is not None
    assert found.unsaved("shop") == {}
    assert (found.lsn, found.tables) == (7, state.tables)
    found.tables["b"].read_again()
    assert save(log, found) == ["b"]


def test_tables_are_told_from_those_of_a_capture_with_a_longer_name(log: EmbeddedLog) -> None:
    save(log, new_state("a"))
    with log.writer(writer_name("shop2")).transaction(state={"format": 9}):
        pass
    found = State.load(log, "shop")
    assert found is not None
    assert list(found.tables) == ["a"]
    with pytest.raises(errors.NewerFormat, match="format 9"):
        State.load(log, "shop2")


def test_a_state_of_the_first_format_is_read(log: EmbeddedLog) -> None:
    old = new_state("a", "b")
    tables = {
        name: {k: v for k, v in vars(one).items() if k[0] != "_"}
        for name, one in old.tables.items()
    }
    with log.writer(writer_name("shop")).transaction(
        state=old.to_json() | {"format": 1, "tables": tables}
    ):
        pass
    found = State.load(log, "shop")
    assert found is not None
    assert found.tables == old.tables
    assert save(log, found) == ["a", "b"]
    assert State.load(log, "shop") == found


def test_an_entry_of_many_tables_has_nothing_of_those_that_stay(
    database: Database, log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database.connect() as connection:
        for number in range(20):
            connection.execute(f"create table t{number}(id int primary key)")
        shop = Capture(log, "shop", database.dsn())
        shop.run("caught up")
        assert shop.state is not None
        assert len(shop.state.tables) == 20
        saved: list[str] = []
        unsaved = State.unsaved

        def watched(state: State, name: str) -> dict[str, Any]:
            found = unsaved(state, name)
            saved.extend(found)
            return found

        monkeypatch.setattr(State, "unsaved", watched)
        connection.execute("insert into t7 values (1)")
        shop.run("caught up")
        assert saved == []
        connection.execute("alter table t7 add more int")
        shop.run("caught up")
        assert set(saved) == {table_name("shop", "public.t7")}
