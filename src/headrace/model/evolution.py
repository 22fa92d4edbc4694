"""How a schema changes, and how rows written under an older version are read under a newer one.

Allowed are, and nothing else: add a nullable column; widen a type (`WIDENINGS`), or let a column
be null; retire a column; rename one, which is to retire it and to add another of the same type
that remembers `renamed_from`; and give a column another type, which starts a new **generation**.

Within a generation, old rows are read as new ones by the ids of columns (`upgrade`): what was
added later is null, what was widened is cast, what was retired is left out unless asked for by its
name. A rename makes a new column, so under the new name old rows are null; their values are there
under the old one. Between generations there is no such reading: whoever follows a topic sees the
change and decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pyarrow as pa

from headrace.errors import SchemaChangeRefused
from headrace.model.ddl import ddl_type as spell
from headrace.model.ddl import duplicate, normal_type, parse_type, quoted
from headrace.model.keys import key_tag
from headrace.model.schema import Column, Schema, fields_of
from headrace.settings import several

_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
WIDENINGS: frozenset[tuple[pa.DataType, pa.DataType]] = frozenset(
    [
        (pa.int8(), pa.int16()),
        (pa.int8(), pa.int32()),
        (pa.int8(), pa.int64()),
        (pa.int16(), pa.int32()),
        (pa.int16(), pa.int64()),
        (pa.int32(), pa.int64()),
        (pa.int8(), pa.float64()),
        (pa.int16(), pa.float64()),
        (pa.int32(), pa.float64()),
        (pa.float32(), pa.float64()),
    ]
)
"""What may become what without losing a value; decimals besides, see `is_widening`."""


def is_widening(old: pa.DataType, new: pa.DataType) -> bool:
    """Say whether every value of ``old`` is exactly one of ``new``.

    A decimal may grow before and after its point: ``s2 >= s`` and ``p2 - s2 >= p - s``.
    """
    if pa.types.is_decimal128(old) and pa.types.is_decimal128(new):
        whole_old, whole_new = old.precision - old.scale, new.precision - new.scale
        return bool(old != new and new.scale >= old.scale and whole_new >= whole_old)
    return (old, new) in WIDENINGS


def evolve(
    schema: Schema,
    *,
    add: str | pa.Schema | None = None,
    widen: Mapping[str, str | pa.DataType] | None = None,
    nullable: Sequence[str] = (),
    retire: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    retype: Mapping[str, str | pa.DataType | pa.Field] | None = None,
    key: Sequence[str] = (),
    event_time: str | None = None,
) -> Schema:
    """Give the next version of a schema; the next generation too if there is a ``retype``.

    ``add`` is DDL or a pyarrow schema of new columns, which come last. ``widen`` and ``retype``
    give types by the names of columns (``retype`` also fields, with a comment); ``nullable`` names
    columns that may be null from now on; ``rename`` is old name to new name. Renamed and retyped
    columns keep their place in the order, and get a new id. ``key`` and ``event_time`` name the
    topic's columns that are bound: they keep name and meaning (a key may be widened among integers,
    which moves no row to another partition; retyping starts a new generation and is allowed).

    Raises `SchemaChangeRefused`, naming what to do instead; `WrongColumn` for an unknown column;
    `BadSchema` and `ReservedName` as `schema_of` does.
    """
    by_name: dict[str, Any] = {"widen": widen, "rename": rename, "retype": retype}
    for what, given in by_name.items():
        if given is not None and not isinstance(given, Mapping):
            fix = f"give a dict: {what}={{'name of the column': ...}}"
            raise SchemaChangeRefused(f"{what}={given!r} does not name columns", fix=fix)
    change = _Change(schema, frozenset(key), event_time)
    change.widen({name: _type_of(spec, name) for name, spec in (widen or {}).items()})
    change.nullable(nullable)
    change.retire(retire)
    change.rename(rename or {})
    for name, spec in (retype or {}).items():
        if isinstance(spec, pa.Field):
            (field,) = fields_of(pa.schema([spec]))
            change.retype(name, field.type, field.comment)
        else:
            change.retype(name, _type_of(spec, name), schema.column(name).comment)
    if add is not None:
        change.add(add)
    return change.result(schema.generation + 1 if retype else schema.generation)


def _type_of(spec: Any, column: str) -> pa.DataType:
    if not isinstance(spec, str | pa.DataType):
        raise _refused(column, f"{spec!r} is no type", fix="give it as in DDL, e.g. 'bigint'")
    return parse_type(spec) if isinstance(spec, str) else normal_type(spec, column)


def _refused(column: str, fact: str, *, why: str = "", fix: str = "") -> SchemaChangeRefused:
    return SchemaChangeRefused(fact, place=f"column '{column}'", why=why, fix=fix, column=column)


class _Change:
    """The columns on their way to the next version; each existing one is changed at most once."""

    def __init__(self, schema: Schema, key: frozenset[str], event_time: str | None) -> None:
        self.schema = schema
        self.key = key
        self.event_time = event_time
        self.columns: dict[int, list[Column]] = {c.id: [c] for c in schema.columns}
        self.added: list[Column] = []
        self.touched: dict[str, str] = {}
        self.ids = count(schema.next_id)

    def _begin(self, name: str, what: str) -> Column:
        """Find the column, and see that nothing else is done to it."""
        column = self.schema.column(name)
        if name.startswith("_"):
            raise _refused(
                name,
                f"reserved column '{name}' cannot be {what}",
                why="readers rely on its name and type",
                fix="leave it as it is",
            )
        if name in self.touched:
            raise _refused(
                name,
                f"column '{name}' cannot be {self.touched[name]} and {what} at once",
                fix="make two changes, one after the other",
            )
        self.touched[name] = what
        return column

    def _refuse_bound(self, name: str, what: str) -> None:
        if name in self.key:
            raise _refused(
                name,
                f"key column '{name}' cannot be {what}",
                why="the key decides the partition of every row, old and new",
                fix="use retype, it starts a new generation; or make a new topic",
            )
        if name == self.event_time:
            raise _refused(
                name,
                f"event time column '{name}' cannot be {what}",
                why="the topic's event time must stay where readers look for it",
                fix="make a new topic",
            )

    def widen(self, wanted: Mapping[str, pa.DataType]) -> None:
        for name, new in wanted.items():
            column = self._begin(name, "widened")
            if column.type == new:
                fact = f"column '{name}' is {spell(new)} already"
                raise _refused(name, fact, fix="leave it out of the change")
            if not is_widening(column.type, new):
                raise _refused(
                    name,
                    f"{spell(column.type)} to {spell(new)} is not a widening",
                    why="not every old value would be the same value in the new type",
                    fix="use retype, it starts a new generation",
                )
            if name in self.key and not (column.type in _INTEGERS and new in _INTEGERS):
                raise _refused(
                    name,
                    f"key column '{name}' cannot become {spell(new)}",
                    why="a key may be widened among integers only, so that no row moves",
                    fix="use retype, it starts a new generation",
                )
            self.columns[column.id] = [replace(column, type=new)]

    def nullable(self, names: Sequence[str]) -> None:
        for name in several(names):
            column = self._begin(name, "made nullable")
            if name in self.key:
                self._refuse_bound(name, "made nullable")
            if column.nullable:
                fact = f"column '{name}' is nullable already"
                raise _refused(name, fact, fix="leave it out of the change")
            self.columns[column.id] = [replace(column, nullable=True)]

    def retire(self, names: Sequence[str]) -> None:
        for name in several(names):
            column = self._begin(name, "retired")
            self._refuse_bound(name, "retired")
            self.columns[column.id] = [replace(column, retired=True)]

    def rename(self, names: Mapping[str, str]) -> None:
        for old, new in names.items():
            column = self._begin(old, "renamed")
            self._refuse_bound(old, "renamed")
            if new == old:
                fact = f"column '{old}' is named so already"
                raise _refused(old, fact, fix="leave it out of the change")
            (field,) = fields_of(f"{quoted(new)} {spell(column.type)}")
            added = Column(
                next(self.ids), field.name, column.type, renamed_from=old, comment=column.comment
            )
            self.columns[column.id] = [replace(column, retired=True), added]

    def retype(self, name: str, new: pa.DataType, comment: str | None) -> None:
        column = self._begin(name, "retyped")
        if column.type == new:
            fact = f"column '{name}' is {spell(new)} already"
            raise _refused(name, fact, fix="leave it out of the change")
        if name in self.key:
            key_tag(new, name)
        if name == self.event_time and not pa.types.is_timestamp(new):
            fact = f"event time column '{name}' cannot become {spell(new)}"
            raise _refused(name, fact, fix="use timestamp or timestamp_ntz")
        added = replace(column, id=next(self.ids), type=new, renamed_from=None, comment=comment)
        self.columns[column.id] = [replace(column, retired=True), added]

    def add(self, spec: str | pa.Schema) -> None:
        for field in fields_of(spec):
            if not field.nullable:
                raise _refused(
                    field.name,
                    f"column '{field.name}' is new and 'not null'",
                    why="rows already written have no value for it",
                    fix="add it without 'not null'",
                )
            added = Column(next(self.ids), field.name, field.type, comment=field.comment)
            self.added.append(added)

    def result(self, generation: int) -> Schema:
        if not self.touched and not self.added:
            fix = "name what to add, widen, retire, rename or retype"
            raise SchemaChangeRefused("nothing would change", fix=fix)
        columns = [column for group in self.columns.values() for column in group] + self.added
        twice = duplicate(column.name for column in columns if not column.retired)
        if twice:
            raise _refused(
                twice,
                f"column '{twice}' is there already",
                why="Spark does not tell upper from lower case in names",
                fix="choose another name; to change its type use widen or retype",
            )
        if all(column.retired for column in columns):
            raise SchemaChangeRefused("no column would be left", fix="keep at least one column")
        return Schema(self.schema.version + 1, generation, tuple(columns))


# --- reading old as new ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    """Where one column of the result comes from: a column of the old rows, or nowhere."""

    source: str | None
    type: pa.DataType
    same: bool


class Upgrade:
    """Reads batches written under one version as rows of a later one; prepare once, call often.

    ``columns`` chooses columns of the result and their order, as names of live columns of
    ``target`` or of retired ones (their values in old rows, null in rows written later); without
    it all live columns. A name that only ``newest``, of another generation, has is null in all
    rows. `schema` is the Arrow schema of the result. Nothing is copied for columns
    that did not change, and a batch in which nothing changes is given back itself.
    """

    __slots__ = ("_picked", "_steps", "_untouched", "picked", "schema")

    def __init__(
        self,
        written: Schema,
        target: Schema,
        columns: Sequence[str] | None = None,
        newest: Schema | None = None,
    ) -> None:
        if written.generation != target.generation or written.version > target.version:
            raise SchemaChangeRefused(
                f"rows of schema version {written.version} (generation {written.generation}) are "
                f"not readable as version {target.version} (generation {target.generation})",
                why="older rows can be read as newer ones, within one generation",
                fix="read each generation by itself",
            )
        by_id = {column.id: column for column in written.live}
        steps, fields = [], []
        for column in target.live if columns is None else _chosen(target, columns, newest):
            old = by_id.get(column.id)
            if old is None:
                steps.append(_Step(None, column.type, same=False))
            else:
                steps.append(_Step(old.name, column.type, old.type == column.type))
            may_be_null = column.nullable or column.retired
            fields.append(pa.field(column.name, column.type, nullable=may_be_null))
        self._steps = steps
        self.schema = pa.schema(fields)
        # The same names are not enough: one may belong to another column by now.
        same = [step.source for step in steps] == written.arrow.names
        self._untouched = same and self.schema.equals(written.arrow)
        found = [written.arrow.field(step.source) for step in steps if step.source is not None]
        self._picked = [field.name for field in found] if pa.schema(found) == self.schema else None
        """The columns, if all of them are taken as they are."""

        self.picked = self._picked and [written.arrow.get_field_index(n) for n in self._picked]
        """Their places in a batch that has all columns as they were written."""

    @property
    def sources(self) -> frozenset[str]:
        """The columns of old rows that are used."""
        return frozenset(step.source for step in self._steps if step.source is not None)

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Read one batch; it has (at least) the columns that are used, as they were written."""
        if self._untouched and batch.schema.equals(self.schema):
            return batch
        if self._picked is not None:
            return batch.select(self._picked)
        arrays = []
        for step in self._steps:
            if step.source is None:
                arrays.append(pa.nulls(batch.num_rows, step.type))
                continue
            array = batch.column(step.source)
            arrays.append(array if step.same else array.cast(step.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _chosen(schema: Schema, names: Sequence[str], newest: Schema | None) -> list[Column]:
    """Find columns by name: live ones first, else the retired one that had the name last."""
    retired = {c.name: c for c in sorted(schema.columns, key=lambda c: c.id) if c.retired}
    result = []
    for name in names:
        if not schema.has(name) and name in retired:
            result.append(retired[name])
        elif not schema.has(name) and newest is not None and newest.has(name):
            result.append(replace(newest.column(name), nullable=True))
        else:
            result.append(schema.column(name))
    return result
