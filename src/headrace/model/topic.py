"""A topic: related rows, typed, in partitions. Frozen; a change makes a new value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from headrace import errors
from headrace.model.schema import Schema

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

    @property
    def schema(self) -> Schema:
        """The newest version."""
        return self.schemas[-1]

    def to_json(self) -> dict[str, Any]:
        """As it stands in control records."""
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
        }

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
        )


def check_name(name: str) -> None:
    """Refuse a topic name that could not be a file, an URL part and a Kafka topic."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise errors.BadTopicName(f"{name!r} cannot be the name of a topic", place=str(name))
