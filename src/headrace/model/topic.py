"""A topic: related rows, typed, in partitions. Frozen; a change makes a new value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace import errors
from headrace.model.keys import key_tag
from headrace.model.policy import BUFFER, DEFAULTS, Policy, Pressure
from headrace.model.rows import opaque_schema
from headrace.model.schema import RESERVED, Column, Schema, schema_of
from headrace.settings import several

KINDS = ("events", "changes")
VALUES = ("columns", "bytes", "json", "text")
PARTITIONS_MAX = 65_536
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,248}")


@dataclass(frozen=True, slots=True)
class Topic:
    """What the log knows of a topic."""

    id: int
    name: str
    kind: str
    """`events` (append-only) or `changes` (rows with a weight)."""
    value: str
    """`columns` (typed), or what the column `value` of an opaque topic holds."""
    key: tuple[str, ...]
    event_time: str | None
    partitions: int
    slot: int
    """Its first place in the array of partition ends, over all topics."""
    schemas: tuple[Schema, ...]
    """Every version, oldest first; version n is at index n - 1."""
    policy: Policy = DEFAULTS
    """What is kept of it, and for how long."""
    revision: int = 1
    """How many entries have said something of a topic of this name: the counter that guards it."""
    deleted: bool = False
    pressure: Mapping[str, Pressure] = field(default_factory=dict, hash=False)
    """Groups for which its producers wait."""

    @property
    def limited(self) -> bool:
        """Whether what is appended depends on how far its readers have come."""
        return self.policy.flow != BUFFER or bool(self.pressure)

    @property
    def schema(self) -> Schema:
        """The newest version."""
        return self.schemas[-1]

    def to_json(self) -> dict[str, Any]:
        """As it stands in control records; what says nothing is left out."""
        more: dict[str, Any] = {"policy": self.policy.to_json(), "deleted": self.deleted}
        more["pressure"] = {group: one.to_json() for group, one in self.pressure.items()}
        if self.revision != len(self.schemas):
            more["revision"] = self.revision
        return {
            "id": self.id,
            "name": self.name,
            "kind": self.kind,
            "value": self.value,
            "key": list(self.key),
            "event_time": self.event_time,
            "partitions": self.partitions,
            "slot": self.slot,
            "schemas": [schema.to_json() for schema in self.schemas],
            **{name: value for name, value in more.items() if value},
        }

    def revised(self, **changes: Any) -> Topic:
        """The topic as the next entry about it says."""
        return replace(self, revision=self.revision + 1, **changes)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Topic:
        """The inverse of `to_json`."""
        return cls(
            id=data["id"],
            name=data["name"],
            kind=data["kind"],
            value=data["value"],
            key=tuple(data["key"]),
            event_time=data["event_time"],
            partitions=data["partitions"],
            slot=data["slot"],
            schemas=tuple(Schema.from_json(schema) for schema in data["schemas"]),
            policy=Policy.from_json(data.get("policy", {})),
            revision=data.get("revision", len(data["schemas"])),
            deleted=data.get("deleted", False),
            pressure={group: Pressure(*one) for group, one in data.get("pressure", {}).items()},
        )


def check_name(name: object) -> None:
    """Refuse a topic name that could not be a file, an URL part and a Kafka topic."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        place = f"topic {name!r}"  # not as it is: it may not be printable
        raise errors.BadTopicName(f"{name!r} cannot be the name of a topic", place=place)


def define(
    name: str,
    spec: str | pa.Schema,
    key: str | Sequence[str] | None,
    event_time: str | None,
    partitions: int,
    kind: str,
) -> Topic:
    """A topic as asked for, checked, without its place in the log: id and slot are 0."""
    check_name(name)
    place = f"topic '{name}'"
    if kind not in KINDS:
        raise errors.BadSetting(f"kind {kind!r} is not 'events' or 'changes'", place=place)
    if type(partitions) is not int or not 1 <= partitions <= PARTITIONS_MAX:
        raise errors.BadSetting(
            f"{partitions} partitions: not between 1 and {PARTITIONS_MAX}", place=place
        )
    keys = () if key is None else tuple(several(key))
    if isinstance(spec, str) and spec in VALUES[1:]:
        if keys or event_time or kind == "changes":
            raise errors.BadSchema(
                f"a topic of opaque {spec} has the columns key and value",
                place=place,
                fix="leave key, event_time and kind out, or give it typed columns",
            )
        schema = schema_of(opaque_schema(spec))
        return Topic(0, name, kind, spec, ("key",), None, partitions, 0, (schema,))
    schema = schema_of(spec)
    if kind == "changes":
        schema = _with_weight(schema)
    for column in keys:
        key_tag(schema.column(column).type, column)
    if len(set(keys)) != len(keys):
        raise errors.BadSchema("a key column comes twice", place=place)
    if event_time is not None and not pa.types.is_timestamp(schema.column(event_time).type):
        raise errors.BadSchema(f"event_time '{event_time}' is not a timestamp column", place=place)
    return Topic(0, name, kind, "columns", keys, event_time, partitions, 0, (schema,))


def _with_weight(schema: Schema) -> Schema:
    missing = [RESERVED[name] for name in ("_weight", "_op") if not schema.has(name)]
    added = tuple(
        Column(number, field.name, field.type, field.nullable)
        for number, field in enumerate(missing, schema.next_id)
    )
    return Schema(schema.version, schema.generation, schema.columns + added)


def tombstones(topic: Topic, rows: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Which rows of an `events` topic say that their key is gone."""
    if topic.value != "columns":
        gone = pc.is_null(rows.column("value"))
    elif "_op" in rows.schema.names:
        gone = pc.equal(rows.column("_op"), "d").fill_null(False)
    else:
        return np.zeros(rows.num_rows, bool)
    found: npt.NDArray[np.bool_] = gone.to_numpy(zero_copy_only=False)
    return found


def same_definition(found: Topic, asked: Topic) -> bool:
    """Whether a topic is as asked for, in its newest schema version or an older one."""
    return (
        found.kind == asked.kind
        and found.value == asked.value
        and found.key == asked.key
        and found.event_time == asked.event_time
        and found.partitions == asked.partitions
        and any(schema.arrow.equals(asked.schema.arrow) for schema in found.schemas)
    )
