"""Holds: a name keeps a position readable, for as long as it says.

A hold is a named value of the log, `headrace/hold/NAME`: the position, the time until which it
counts, and the topics that it is about (none: all). So it is taken and let go by an entry, alone or
together with what it is for, and everybody sees the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.model.fold import OWN_COUNTERS, ControlState
from headrace.model.policy import DEFAULTS

PREFIX = f"{OWN_COUNTERS}hold/"
FOREVER = 1 << 62


SECONDS_MAX = 100 * 365 * 86_400.0
LEASE_SECONDS = 7 * 86_400.0
"""How long a pipeline or a follower that is away can come back without beginning anew."""

HOLD_SECONDS = 60.0
"""So often they say so again."""


def needed(control: ControlState, topics: Iterable[str]) -> bool:
    """Whether anything may go of these topics: else nobody need hold them."""
    known = (control.topics.get(name) for name in topics)
    return any(one is not None and one.policy != DEFAULTS for one in known)


def hold_value(position: int, until: int, topics: list[str] | None) -> dict[str, Any]:
    """As it is kept."""
    return {"position": position, "until": until, "topics": topics}


def holds_of(control: ControlState, now: int) -> dict[str, dict[str, Any]]:
    """The holds that count at this time, by name."""
    return {
        name.removeprefix(PREFIX): value
        for name, value in control.values.items()
        if name.startswith(PREFIX) and value is not None and value["until"] > now
    }


def held(control: ControlState, topic: str, now: int) -> int:
    """The position up to which a topic may be trimmed; what comes after it stays."""
    return min(
        [
            one["position"]
            for one in holds_of(control, now).values()
            if one["topics"] is None or topic in one["topics"]
        ],
        default=FOREVER,
    )
