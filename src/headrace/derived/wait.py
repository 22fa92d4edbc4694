"""Read your own writes: wait until a target shows what a token stands for, or say how far it is."""

from __future__ import annotations

import time

from headrace import errors
from headrace.interfaces import Cut, Target

PAUSE = (0.005, 0.2)
"""Seconds between two looks at a target: first, and at most."""


def wait(target: Target, token: int, timeout: float) -> Cut:
    """The cut of a target once it is through `token`, the position of a receipt.

    Raises `NotYetThere` when the time is over, with how far it is.
    """
    deadline = time.monotonic() + timeout
    pause = PAUSE[0]
    while True:
        cut = target.mark().cut
        if cut is not None and cut.through >= token:
            return cut
        left = deadline - time.monotonic()
        if left <= 0:
            through = cut.through if cut is not None else 0
            raise errors.NotYetThere(
                f"position {token} is not in the target after {timeout:g} s; "
                + (f"it is through {through}" if cut is not None else "nothing is loaded yet"),
                place="target",
                token=token,
                through=through,
                behind=token - through,
            )
        time.sleep(min(pause, left))
        pause = min(pause * 2, PAUSE[1])
