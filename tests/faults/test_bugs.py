"""Every seeded bug is caught: the machine that breaks the log would notice.

Caught: a check that has become blind. Not caught: bugs of a kind that nobody has thought of; but
forty of different kinds, each caught by a general check that does not know it, are some comfort.
"""

from __future__ import annotations

import pytest

from headrace.testing.bugs import Bug
from headrace.testing.hunt import EVERY_BUG, catch


@pytest.mark.parametrize("bug", EVERY_BUG, ids=lambda bug: bug.name.replace(" ", "_"))
def test_caught(bug: Bug) -> None:
    found = catch(bug)
    assert found.caught_by, f"{bug.name}: {found.tries} tries, and nobody noticed"


def test_there_are_enough_of_them() -> None:
    assert len({bug.name for bug in EVERY_BUG}) >= 40
