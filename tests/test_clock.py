"""The clocks."""

from __future__ import annotations

import pytest

from headrace.clock import Clock, HandClock, SystemClock


def test_the_system_clock_counts_microseconds_and_never_goes_back() -> None:
    clock: Clock = SystemClock()
    assert 1_600_000_000_000_000 < clock.now_us() < 10_000_000_000_000_000
    assert clock.monotonic() <= clock.monotonic()


def test_the_hand_clock_moves_only_by_hand() -> None:
    clock = HandClock(1_000)
    assert (clock.now_us(), clock.monotonic()) == (1_000, 0.0)
    clock.advance(1.5)
    assert (clock.now_us(), clock.monotonic()) == (1_501_000, 1.5)
    clock.jump(-1)
    assert (clock.now_us(), clock.monotonic()) == (501_000, 1.5)
    with pytest.raises(ValueError, match="forward"):
        clock.advance(-1)
