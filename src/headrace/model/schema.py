"""The schema of a topic: columns with ids that are stable for ever.

A column is known by its id, not by its name: ids are given once, in order, and never again, so
that rows written under an older version can be read under a newer one without guessing. A retired
column stays in the schema, marked, so that its id is not reused and its old values can still be
asked for. `version` counts all changes; `generation` counts those after which older rows cannot
be read as newer ones (see `evolution`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from headrace.errors import BadSchema, ReservedName, WrongColumn, nearest
from headrace.model.ddl import (
    TIMESTAMP,
    Field,
    ddl_type,
    duplicate,
    format_ddl,
    normal_type,
    parse_ddl,
    parse_type,
)

RESERVED: dict[str, Field] = {
    "_weight": Field("_weight", pa.int64(), nullable=False),
    "_op": Field("_op", pa.string()),
    "_lsn": Field("_lsn", pa.int64()),
    "_xid": Field("_xid", pa.int64()),
    "_commit_time": Field("_commit_time", TIMESTAMP),
}
"""The columns whose names start with ``_``, with the only type each may have."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column, from its first version on; `retired` when new rows no longer have it."""

    id: int
    name: str
    type: pa.DataType
    nullable: bool = True
    retired: bool = False
    renamed_from: str | None = None
    comment: str | None = None


@dataclass(frozen=True)
class Schema:
    """One version of a topic's schema; made by `schema_of`, changed by `evolution.evolve`.

    Invariants: ids are unique; names of live columns are unique, ignoring case; at least one
    column is live; all types are normal (`ddl.normal_type` changes nothing).
    """

    version: int
    generation: int
    columns: tuple[Column, ...]

    @cached_property
    def live(self) -> tuple[Column, ...]:
        """The columns that rows of this version have, in order."""
        return tuple(column for column in self.columns if not column.retired)

    @cached_property
    def arrow(self) -> pa.Schema:
        """The Arrow schema of rows of this version."""
        return pa.schema([pa.field(c.name, c.type, nullable=c.nullable) for c in self.live])

    @cached_property
    def _by_name(self) -> dict[str, Column]:
        return {column.name: column for column in self.live}

    def column(self, name: Any) -> Column:
        """Give the live column of this name; raises `WrongColumn` with the nearest names."""
        found = self._by_name.get(name) if isinstance(name, str) else None
        if found is None:
            raise WrongColumn(
                f"there is no column '{name}'",
                why=f"the columns are {', '.join(self._by_name)}",
                fix=nearest(str(name), self._by_name) or "name one of the columns",
                column=str(name),
            )
        return found

    def has(self, name: str) -> bool:
        """Say whether a live column has this name."""
        return name in self._by_name

    @property
    def next_id(self) -> int:
        """The id that the next new column gets."""
        return max(column.id for column in self.columns) + 1

    def ddl(self) -> str:
        """Spell the live columns as Spark DDL."""
        return format_ddl(Field(c.name, c.type, c.nullable, c.comment) for c in self.live)

    def to_json(self) -> dict[str, Any]:
        """Give a value of plain dicts and lists for JSON, types as DDL; `from_json` reads it."""
        return {
            "version": self.version,
            "generation": self.generation,
            "columns": [_column_to_json(column) for column in self.columns],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Schema:
        """Read what `to_json` gave; raises `BadSchema` if it is something else."""
        try:
            columns = tuple(_column_from_json(column) for column in value["columns"])
            return cls(int(value["version"]), int(value["generation"]), columns)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadSchema(f"not a stored schema: {error!r}") from error


def _column_to_json(column: Column) -> dict[str, Any]:
    value: dict[str, Any] = {"id": column.id, "name": column.name, "type": ddl_type(column.type)}
    if not column.nullable:
        value["nullable"] = False
    if column.retired:
        value["retired"] = True
    if column.renamed_from is not None:
        value["renamed_from"] = column.renamed_from
    if column.comment is not None:
        value["comment"] = column.comment
    return value


def _column_from_json(value: Mapping[str, Any]) -> Column:
    return Column(
        id=int(value["id"]),
        name=value["name"],
        type=parse_type(value["type"]),
        nullable=value.get("nullable", True),
        retired=value.get("retired", False),
        renamed_from=value.get("renamed_from"),
        comment=value.get("comment"),
    )


def fields_of(spec: str | pa.Schema) -> list[Field]:
    """Read the columns a user gave, as DDL or as a pyarrow schema, with types normal for us.

    Raises `BadSchema` (not understood, empty, a name twice) or `ReservedName`.
    """
    if isinstance(spec, str):
        fields = parse_ddl(spec)
    elif isinstance(spec, pa.Schema):
        fields = [_field_of_arrow(field) for field in spec]
    else:
        raise BadSchema(
            f"a schema cannot be made from {type(spec).__name__}",
            fix="give a Spark DDL string or a pyarrow.Schema",
        )
    if not fields:
        raise BadSchema("the schema has no columns", fix="name at least one column")
    return [_reserved(field) for field in fields]


def schema_of(spec: str | pa.Schema) -> Schema:
    """Make the first version of a schema from Spark DDL or a pyarrow schema.

    A column whose name starts with ``_`` must be one of `RESERVED`, and has the type and the
    nullability stated there. Raises `BadSchema` or `ReservedName`.
    """
    fields = fields_of(spec)
    refuse_duplicates(field.name for field in fields)
    columns = (
        Column(id, f.name, f.type, f.nullable, comment=f.comment)
        for id, f in enumerate(fields, start=1)  # noqa: A001 (the word of the design)
    )
    return Schema(1, 1, tuple(columns))


def refuse_duplicates(names: Iterable[str]) -> None:
    """Raise `BadSchema` if a name comes twice, ignoring case as Spark does."""
    twice = duplicate(names)
    if twice:
        raise BadSchema(
            f"column '{twice}' is named twice",
            place=f"column '{twice}'",
            why="Spark does not tell upper from lower case in names",
            fix="rename one of them",
            column=twice,
        )


def _field_of_arrow(field: pa.Field) -> Field:
    if not field.name:
        raise BadSchema("a column name is empty", fix="name the column")
    comment = (field.metadata or {}).get(b"comment")
    return Field(
        field.name,
        normal_type(field.type, field.name),
        field.nullable,
        None if comment is None else comment.decode("utf-8", "replace"),
    )


def _reserved(field: Field) -> Field:
    """Give the field as it may be: a reserved name only with its reserved meaning."""
    if not field.name.startswith("_"):
        return field
    known = RESERVED.get(field.name)
    if known is None:
        raise ReservedName(
            f"column '{field.name}' starts with '_'",
            place=f"column '{field.name}'",
            fix=nearest(field.name, RESERVED) or "choose a name that does not start with '_'",
            column=field.name,
        )
    if field.type != known.type:
        raise ReservedName(
            f"column '{field.name}' is {ddl_type(field.type)}, reserved as {ddl_type(known.type)}",
            place=f"column '{field.name}'",
            fix=f"write '{format_ddl([known])}'",
            column=field.name,
        )
    return Field(known.name, known.type, known.nullable, field.comment)
