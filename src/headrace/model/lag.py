"""How far a group is behind, in events and in seconds, and when it loses something. Pure.

Unknown is not zero. A partition that a group never committed has no lag: nobody said where it
starts (`NEVER_COMMITTED`). One that is read to its end has nothing that could be old or go
(`NOTHING_TO_READ`). Without retention nothing ever goes (`KEPT`); where only the size of a topic is
limited, when something goes depends on what others append, and nobody knows (`BY_SIZE`). What
goes to an archive is still read, and stays. Where the oldest row cannot be read, as in an archive
that is out of reach, its age is not known, and `problem` says why.

The age of what waits is counted from the clock of now, not from the newest event: a group that
stands still on a quiet topic grows older every second.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from headrace.model.policy import Policy

NEVER_COMMITTED = "never committed"
NOTHING_TO_READ = "nothing to read"
KEPT = "kept"
BY_SIZE = "by size"
BY_TIME = "by time"


@dataclass(frozen=True, slots=True)
class Lag:
    """One partition of one group, at one moment."""

    topic: str
    partition: int
    committed: int | None
    """The next offset to read; None: never committed."""
    start: int
    """The first offset that is held."""
    end: int
    """The next offset to be given."""
    oldest_us: int | None
    """When the log received the oldest event that is held and not committed; None: not known."""
    now_us: int
    policy: Policy
    skipped: int = 0
    """Events that the group did not read by its own choice, and counted."""
    problem: str | None = None
    """Why the oldest event cannot be read, if it cannot."""

    @property
    def events(self) -> int | None:
        """How many are not committed, those that are gone included; None: not known."""
        return None if self.committed is None else max(0, self.end - self.committed)

    @property
    def gone(self) -> int:
        """How many of these are not held any more."""
        return 0 if self.committed is None else max(0, self.start - self.committed)

    @property
    def seconds(self) -> float | None:
        """The age of the oldest that waits; 0 if nothing does, None if it is not known."""
        if self.events == 0:
            return 0.0
        if self.events is None or self.oldest_us is None:
            return None
        return max(0.0, (self.now_us - self.oldest_us) / 1e6)

    @property
    def fall(self) -> str:
        """What decides when the oldest that waits is gone: one of the words above."""
        if self.events is None:
            return NEVER_COMMITTED
        if self.events == 0:
            return NOTHING_TO_READ
        if self.policy.archive is not None:
            return KEPT
        if self.policy.retention_seconds is not None:
            return BY_TIME
        return KEPT if self.policy.retention_bytes is None else BY_SIZE

    @property
    def falls_off_seconds(self) -> float | None:
        """In how many seconds the oldest may be gone; 0: it is due. None: `fall` says why."""
        keep = self.policy.retention_seconds
        if self.fall != BY_TIME or keep is None or self.seconds is None:
            return None
        return max(0.0, keep - self.seconds)

    def to_json(self) -> dict[str, Any]:
        """Everything, for those who watch it."""
        return {
            "topic": self.topic,
            "partition": self.partition,
            "committed": self.committed,
            "start": self.start,
            "end": self.end,
            "events": self.events,
            "gone": self.gone,
            "skipped": self.skipped,
            "seconds": self.seconds,
            "fall": self.fall,
            "falls_off_seconds": self.falls_off_seconds,
            "problem": self.problem,
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """Several partitions together."""

    events: int
    """Of those that are known."""
    unknown: int
    """Partitions that were never committed."""
    gone: int
    skipped: int
    seconds: float | None
    """The oldest; None if no age is known."""
    falls_off_seconds: float | None
    """The soonest that is known; None if nothing goes by time."""
    problem: str | None
    """Why some age is not known, if something could not be read."""

    def warns(self, within_seconds: float) -> bool:
        """Whether something is gone, or will be so soon."""
        soon = self.falls_off_seconds is not None and self.falls_off_seconds <= within_seconds
        return self.gone > 0 or soon

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return asdict(self)


def summed(lags: Iterable[Lag]) -> Summary:
    """The worst of ages and times to fall, the sum of events."""
    every = list(lags)
    known = [lag for lag in every if lag.events is not None]
    ages = [lag.seconds for lag in known if lag.seconds is not None]
    falls = [lag.falls_off_seconds for lag in known if lag.falls_off_seconds is not None]
    complete = len(ages) == len(known) and known
    return Summary(
        sum(lag.events or 0 for lag in known),
        len(every) - len(known),
        sum(lag.gone for lag in known),
        sum(lag.skipped for lag in every),
        max(ages) if complete else None,
        min(falls, default=None),
        next((lag.problem for lag in every if lag.problem is not None), None),
    )
