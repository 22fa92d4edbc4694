"""A table has other columns than its topic: what the topic's next schema version is.

A column that the table lost is retired; one that it got is added; a rename is seen by the number
that a column keeps, and is both. A type that holds all values of the old one widens the column;
any other begins a new generation of the topic, for which the table is read again. So it is after a
rename, and where a new column has a value in rows that were there before (a default, which
PostgreSQL does not log).
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from headrace import errors
from headrace.capture.postgres.captured import Captured
from headrace.capture.postgres.protocol import Relation
from headrace.capture.postgres.values import arrow_type
from headrace.model.evolution import evolve


def redefine(
    captured: Captured, relation: Relation, numeric_as_text: bool, save: Callable[[], None]
) -> None:
    """Alter the topic of a table, and its state; raises what cannot be.

    That the table is to be read again is saved first: a crash must not forget it.
    """
    log, state, info = captured.log, captured.state, captured.info
    own = captured.own
    wanted = {
        column.name: arrow_type(
            captured.types[column.type_oid], column.type_modifier, column=column.name,
            numeric_as_text=numeric_as_text,
        )
        for column in relation.columns
    }  # fmt: skip
    now = {column.number: column for column in info.columns}
    lost = [name for name in own.names if name not in wanted]
    fresh = [name for name in wanted if name not in own.names]
    rename = {}
    for name in lost:
        column = now.get(state.columns.get(name, 0))
        if (
            column is not None
            and column.name in fresh
            and own.field(name).type == wanted[column.name]
        ):
            rename[name] = column.name
    retire = [name for name in lost if name not in rename]
    add = [name for name in fresh if name not in rename.values()]
    retype = {n: wanted[n] for n in own.names if n in wanted and wanted[n] != own.field(n).type}
    topic = log.topic(state.topic)
    widen = {}
    try:
        evolve(topic.schema, key=topic.key, widen=retype)
        widen, retype = retype, {}
    except errors.SchemaChangeRefused:
        pass
    if (
        retype
        or rename
        or any(
            column.name in add and (column.missing is not None or column.default is not None)
            for column in info.columns
        )
    ):
        state.read_again(thorough=False)
        save()
    captured.chunk = None
    captured.forget_formats()
    captured.chunk = None  # it was read with the columns of before
    if retire or rename or add:
        fields = pa.schema([pa.field(name, wanted[name]) for name in add])
        log.alter_topic(state.topic, retire=retire, rename=rename, add=fields if add else None)
    if widen or retype:
        log.alter_topic(state.topic, widen=widen, retype=retype)
    state.columns = {c.name: c.number for c in info.columns if c.name in wanted}
