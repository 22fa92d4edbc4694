"""A table has other columns than its topic: what the topic's next schema version is.

A column is known by its number, which it keeps for ever, not by its name. One that the table lost
is retired; one that it got is added; a rename is both, and so is a column that was dropped and made
again under its name (but for those of the key, which stay). A type that holds all values of the old
one widens the column; any other begins a new generation of the topic; a type that the topic carries
as the same text is another column (interval to text). The table is then read again (USING may have
changed the values), as it is after a rename, and where a new column has a value in rows that were
there before (a default, which is not logged). The catalog may be ahead of the stream by several
changes: a column that went and has no number there may be one that came, under another name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow as pa

from headrace import errors
from headrace.model.evolution import evolve
from headrace.sources.postgres.captured import Captured
from headrace.sources.postgres.protocol import Relation
from headrace.sources.postgres.values import arrow_type, told


def refuse_reserved(names: Iterable[str]) -> None:
    """Raise `ReservedName` for a column that is named as a topic's own are."""
    for name in names:
        if name.startswith("_"):
            raise errors.ReservedName(f"column '{name}' starts with '_'", place=f"column '{name}'")


def redefine(
    captured: Captured, relation: Relation, numeric_as_text: bool, save: Callable[[], None]
) -> None:
    """Alter the topic of a table, and its state; raises what cannot be.

    That the table is to be read again is saved first: a crash must not forget it.
    """
    log, state, info = captured.log, captured.state, captured.info
    own = captured.own
    refuse_reserved(column.name for column in relation.columns)
    wanted = {
        column.name: arrow_type(
            captured.types[column.type_oid], column.type_modifier, column=column.name,
            numeric_as_text=numeric_as_text,
        )
        for column in relation.columns
        if column.type_oid in captured.types  # or the type is gone by now, and the column too
    }  # fmt: skip
    now = {column.number: column for column in info.columns}
    numbers = {column.name: column.number for column in info.columns}
    other = [n for n in own.names if n in wanted and numbers.get(n, 0) != state.columns.get(n)]
    if any(name in state.key for name in other):  # a topic keeps its key: only its rows are others
        captured.read_again()
        save()
        other = [name for name in other if name not in state.key]
    both = {name: kind for name, kind in wanted.items() if name in own.names}
    other += [n for n in captured.says_otherwise(relation, both) if n not in other]
    lost = [name for name in own.names if name not in wanted or name in other]
    fresh = [name for name in wanted if name not in own.names or name in other]
    rename = {}
    for name in lost:
        column = now.get(state.columns.get(name, 0))
        if (
            column is not None
            and column.name in fresh
            and column.name not in other
            and own.field(name).type == wanted[column.name]
        ):
            rename[name] = column.name
    retire = [name for name in lost if name not in rename]
    add = [name for name in fresh if name not in rename.values()]
    retype = {
        name: wanted[name]
        for name in own.names
        if name in wanted and name not in other and wanted[name] != own.field(name).type
    }
    topic = log.topic(state.topic)
    widen = {}
    try:
        evolve(topic.schema, key=topic.key, widen=retype)
        widen, retype = retype, {}
    except errors.SchemaChangeRefused:
        pass
    filled = [c for c in info.columns if c.missing is not None or c.has_default]
    renamed = add and any(name not in state.columns for name in retire)  # perhaps: more than once
    shown = [name for name in add if state.columns.get(name) == numbers.get(name)]  # was generated
    some = any(column.name in add for column in filled)
    if retype or widen or rename or renamed or other or shown or some:
        captured.read_again(thorough=False)
        save()

    def fields_of(names: Iterable[str]) -> list[pa.Field]:
        types = {
            one.name: (captured.types[one.type_oid], one.type_modifier) for one in relation.columns
        }
        return [pa.field(n, wanted[n], metadata=told(*types[n], wanted[n])) for n in names]

    captured.forget_formats()
    captured.drop()  # what was read has the columns of before
    if retire or rename:
        log.alter_topic(state.topic, retire=retire, rename=rename)
    if add:
        log.alter_topic(state.topic, add=pa.schema(fields_of(add)))
    if widen or retype:
        log.alter_topic(
            state.topic, widen=widen, retype={one.name: one for one in fields_of(retype)}
        )
    state.columns = {
        name: number for name, number in numbers.items() if name in wanted or now[number].generated
    }
