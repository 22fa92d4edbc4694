"""The only place that asks what time it is, so that a test can decide it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time of day, and a time that only ever goes forward."""

    def now_us(self) -> int:
        """Wall clock: microseconds since 1970 in UTC; may jump."""
        ...

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back. For waits and durations."""
        ...


class SystemClock:
    """The clock of the machine."""

    def now_us(self) -> int:
        """Microseconds since 1970 in UTC."""
        return time.time_ns() // 1000

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back."""
        return time.monotonic()


class HandClock:
    """A clock that stands still until somebody moves it."""

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self._now_us = now_us
        self._elapsed_us = 0

    def now_us(self) -> int:
        """Microseconds since 1970, as set and moved by hand."""
        return self._now_us

    def monotonic(self) -> float:
        """Seconds it has been moved forward."""
        return self._elapsed_us / 1e6

    def advance(self, seconds: float) -> None:
        """Let time pass, on both clocks."""
        us = round(seconds * 1e6)
        if us < 0:
            raise ValueError("time passes forward; use jump() to set the wall clock back")
        self._now_us += us
        self._elapsed_us += us

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an administrator or a bad NTP server does."""
        self._now_us += round(seconds * 1e6)
