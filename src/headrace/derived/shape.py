"""What must happen to a table when its topic gets a new schema version. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from headrace import errors
from headrace.interfaces import KeptTable
from headrace.model.schema import Column


def alterations(old: KeptTable, new: KeptTable) -> list[tuple[str, Column]]:
    """The steps, `drop`, `add` or `type`; a column is known by its id, not by its name.

    Raises `TargetStopped` if there is no way: another generation, or another key.
    """
    if (old.generation, old.key, old.topic) != (new.generation, new.key, new.topic):
        raise errors.TargetStopped(
            f"table '{new.name}' holds generation {old.generation} of topic '{old.topic}',"
            f" and the log has generation {new.generation} of '{new.topic}'",
            place=f"table '{new.name}'",
            why="rows of another generation cannot be read as rows of this one: a column was given "
            "a type that does not hold its old values",
            fix=f'drop table "{new.name}"',
        )
    before = {column.id: column for column in old.columns}
    after = {column.id: column for column in new.columns}
    steps = [("drop", column) for column in old.columns if column.id not in after]
    for column in new.columns:
        if column.id not in before:
            steps.append(("add", column))
        elif before[column.id].type != column.type:
            steps.append(("type", column))
    return steps


def still_there(tables: Mapping[str, KeptTable], name: str, place: str) -> KeptTable:
    """A table of a target; if somebody has dropped it, who opens the target again loads it."""
    if name not in tables:
        raise errors.TargetAway(f"table '{name}' is gone", place=place)
    return tables[name]


def to_load(old: tuple[KeptTable, ...], new: list[KeptTable]) -> list[KeptTable]:
    """The tables that a target must load: it does not have them, or knows rows by other ids.

    That of a multiset is made of all columns. Raises `TargetStopped` as `alterations` does.
    """
    before = {table.name: table for table in old}
    found = []
    for table in new:
        has = before.get(table.name)
        if has is None or (alterations(has, table) and not table.key):
            found.append(table)
    return found
