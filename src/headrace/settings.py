"""Every knob of the log, with its unit in its name, its default and its reason."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from headrace import errors

DURABILITIES = ("fsync", "interval", "os")
"""How long `append` waits: until the disk has it (default), until the operating system has it and
a timer syncs within `interval_seconds`, or the same within `quiet_seconds`. Readers see an entry
only once it is synced, whatever its writer chose."""


def several(given: Any) -> list[Any]:
    """What was given as a list; text, and what holds nothing, is one thing."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def seconds_of(timeout: Any, name: str = "timeout") -> float | None:
    """A timeout, checked; None is for ever, and so is infinity."""
    if timeout is None or timeout == math.inf:
        return None
    if not isinstance(timeout, Real) or math.isnan(timeout):
        raise errors.BadSetting(
            f"{name} {timeout!r} is not a number of seconds",
            place=name,
            fix="give a number, as 2.5, or None to wait for ever",
        )
    return float(timeout)


@dataclass(frozen=True, slots=True)
class LogSettings:
    """How one handle uses the embedded log. Handles of one folder may differ in every value."""

    durability: str = "fsync"
    journal_bytes_first: int = 1 << 20
    """The first journal file; each next one is four times larger, up to `journal_bytes_max`."""
    journal_bytes_max: int = 64 << 20
    journal_budget_bytes: int = 1 << 30
    """Where nobody keeps the log, appends seal closed journal files above this."""
    journal_entries_max: int = 50_000
    """Entries in one journal file: what the next opener must fold is never more."""
    inline_bytes_max: int = 4 << 20
    """Rows above this size are staged to a file of their own; the entry only names it."""
    append_bytes_max: int = 1 << 30
    """The most that one `append` takes; larger data is staged in several pieces."""
    chunk_bytes: int = 8 << 20
    """A staged piece is cut into chunks of about this size, the unit in which it is read."""
    read_rows_max: int = 65_536
    read_bytes_max: int = 8 << 20
    """Small entries are read together up to these limits; one chunk is never split."""
    lock_timeout_seconds: float = 30.0
    quiet_seconds: float = 1.0
    """After this long without an append the writer's timer writes a synced mark."""
    interval_seconds: float = 0.05
    background: bool = True
    """False: no timer thread; tests call `tick()` themselves."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if self.durability not in DURABILITIES:
            raise errors.BadSetting(
                f"durability {self.durability!r} is not one of {', '.join(DURABILITIES)}",
                place="durability",
            )
        for name in (
            "journal_bytes_first",
            "journal_bytes_max",
            "journal_budget_bytes",
            "journal_entries_max",
            "inline_bytes_max",
            "append_bytes_max",
            "chunk_bytes",
            "read_rows_max",
            "read_bytes_max",
        ):
            if getattr(self, name) <= 0:
                raise errors.BadSetting(f"{name} must be above 0", place=name)
        if self.journal_bytes_first < 16 << 10 or self.journal_bytes_max < self.journal_bytes_first:
            raise errors.BadSetting(
                "journal files must be at least 16 KiB, and the largest not below the first",
                place="journal_bytes_first",
            )
