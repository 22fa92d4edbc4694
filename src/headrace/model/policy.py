"""What is kept of a topic, for how long, and what happens when its readers are slower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from headrace import errors

FLOWS = BUFFER, DROP, BACKPRESSURE = ("buffer", "drop", "backpressure")
"""When a producer is faster than its readers: the disk keeps what is not read yet, up to the
retention; rows that find no room are dropped, and counted; or the producer waits (R-A3)."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """A group for which producers wait: while it would be more than `rows` behind, for `seconds`.

    What a subscription with `flow="backpressure"` says; the topics that the group reads carry it.
    """

    rows: int
    seconds: float

    def to_json(self) -> list[float]:
        """As it stands in control records."""
        return [self.rows, self.seconds]

    @classmethod
    def from_json(cls, data: Sequence[Any] | None) -> Pressure | None:
        """The inverse; of nothing, none."""
        return None if data is None else cls(*data)


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings of a topic that may change at any time. Absent means: without a limit."""

    retention_seconds: float | None = None
    """Rows received longer ago may go, a sealed file at a time."""
    retention_bytes: int | None = None
    """The oldest sealed files go when all of them are larger than this."""
    compact: bool = False
    """Of each key the newest row is enough."""
    grace_seconds: float = 86_400.0
    """What says that a key is gone stays for so long, for readers that are behind."""
    archive: str | None = None
    """Files that go are kept here instead: a folder, or an address that `pyarrow.fs` knows."""
    flow: str = "buffer"
    flow_rows: int = 1_000_000
    """With `drop` or `backpressure`: how many rows the slowest group may be behind."""
    flow_seconds: float = 30.0
    """How long a producer waits before it gets the error."""

    def to_json(self) -> dict[str, Any]:
        """What differs from the defaults."""
        return {
            name: value for name, value in asdict(self).items() if value != getattr(DEFAULTS, name)
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Policy:
        """The inverse."""
        return cls(**data)

    def changed(self, changes: Mapping[str, Any], place: str) -> Policy:
        """With some settings changed, each checked."""
        known = [one.name for one in fields(self)]
        for name, value in changes.items():
            if name not in known:
                raise errors.BadSetting(
                    f"a topic has no setting '{name}'",
                    place=place,
                    fix=errors.nearest(name, known) or f"one of {', '.join(known)}",
                )
            if not _fits(name, value):
                raise errors.BadSetting(
                    f"{value!r} is no value of '{name}'", place=place, fix=_fitting(name)
                )
        return Policy(**{**asdict(self), **changes})

    def check(self, kind: str, key: tuple[str, ...], place: str) -> None:
        """Refuse what a topic of this kind cannot have."""
        if self.compact and kind == "events" and not key:
            raise errors.BadSetting(
                "a topic without a key cannot be compacted",
                place=place,
                fix="make a topic with a key, or limit it by retention",
            )
        if self.flow == DROP and kind == "changes":
            raise errors.BadSetting(
                "changes cannot be dropped: the table would be wrong",
                place=place,
                fix="flow='backpressure' makes producers wait instead",
            )
        limited = self.retention_seconds is not None or self.retention_bytes is not None
        if limited and kind == "changes" and self.archive is None:
            raise errors.BadSetting(
                "changes cannot go by their age: what is left would not add up to the table",
                place=place,
                fix="compact it (compact=True), or give it an archive to which old files go",
            )


DEFAULTS = Policy()


def _fitting(name: str) -> str:
    """What a setting can be."""
    if name == "flow":
        return f"one of {', '.join(FLOWS)}"
    words = {"compact": "true or false", "archive": "a folder, an address, or none"}
    none = " or none" if name.startswith("retention_") else ""
    kind = "number" if name.endswith("_seconds") else "whole number"
    low = 1 if name == "flow_rows" else 0  # without room for any row nothing would go on
    return words.get(name, f"a {kind} of {name.rpartition('_')[2]}, not below {low}{none}")


def _fits(name: str, value: Any) -> bool:
    if name == "compact":
        return isinstance(value, bool)
    if name == "archive":
        return value is None or (isinstance(value, str) and value != "")
    if name == "flow":
        return value in FLOWS
    if value is None:
        return name.startswith("retention_")
    if name == "flow_rows" and not value:
        return False  # no row would ever have room
    number = isinstance(value, int) or (isinstance(value, float) and name.endswith("_seconds"))
    return number and not isinstance(value, bool) and 0 <= value < float("inf")
