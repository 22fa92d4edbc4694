"""What passes and what does not: the one table of it, and the exit codes that say so.

A part that ends says by its exit code what shall happen to it; the supervisor knows no errors.
"""

from __future__ import annotations

from headrace import errors

DONE = 0
PASSES = 75
"""Tried again, with back-off: the server is away, the disk is full, a lock is held."""
STAYS = 78
"""Stopped, with the error shown: a person must change something first."""
CRASHED = 70
"""Tried again, against the restart budget: nobody knows why. So is every other exit code."""

VERDICTS: dict[type[errors.HeadraceError], int] = {
    # The groups of errors.py say most of it ...
    errors.TransientError: PASSES,
    errors.UsageError: STAYS,
    errors.DamageError: STAYS,
    # ... and these are the exceptions.
    errors.UnknownTopic: PASSES,  # an input that its capture, or its writer, has not made yet
    errors.Unknown: PASSES,  # claiming the name again tells what was taken
    errors.Conflict: PASSES,  # somebody was first: look again
    errors.Fenced: STAYS,  # another process has the name; taking it back would be a quarrel
    errors.LogClosed: CRASHED,  # nobody closes the log of a part
    errors.LogPoisoned: CRASHED,  # opening it again copies what was not synced
    errors.BadReplicationData: CRASHED,  # the server sends the transaction anew
}


def verdict(error: BaseException) -> int:
    """The exit code of a part that ends with this error: that of its nearest class in the table."""
    for kind in type(error).__mro__:
        if kind in VERDICTS:
            return VERDICTS[kind]
    return CRASHED
