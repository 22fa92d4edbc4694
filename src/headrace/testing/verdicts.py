"""What an error says about whoever is tested: a verdict, or nothing, because something crashed.

A hunt for seeded bugs counts verdicts only. `Violated` is one: a checker has seen what must not be.
So is an error by which production code itself names a state that is wrong. Any other error may come
from the kit, from the server beside it, or from a seeded bug that does not even run.
"""

from __future__ import annotations

from headrace import errors

CRASH = "crash: "
"""Before what is said of an error that is no verdict."""
GUARDS = (
    errors.DamageError,
    errors.Conflict,
    errors.BadPosition,
    errors.OffsetsGone,
    errors.SlotAhead,
    errors.OtherLog,
)
"""Errors that name a wrong state; the others tell of a call, of a server, or of anything."""


class Violated(AssertionError):
    """A checker has seen something that must not be."""


def verdict_on(error: BaseException, where: str = "") -> str:
    """What is said of an error that ended something, and where it did."""
    says = f"{where}{type(error).__name__}: {error}"
    return says if isinstance(error, (Violated, *GUARDS)) else f"{CRASH}{says}"


def is_verdict(says: str) -> bool:
    """Whether something is wrong, and not just the kit."""
    return bool(says) and not says.startswith(CRASH)
