"""Every seeded bug is caught: the machine that breaks the log would notice.

Caught: a check that has become blind. Not caught: bugs of a kind that nobody has thought of; but
forty of different kinds, each caught by a general check that does not know it, are some comfort.
"""

from __future__ import annotations

import pytest

from headrace.testing import hunt
from headrace.testing.bugs import Bug, Patch, instead
from headrace.testing.chaos_worker import Worker
from headrace.testing.hunt import EVERY_BUG, catch
from headrace.testing.simulation import Run


@pytest.mark.parametrize("bug", EVERY_BUG, ids=lambda bug: bug.name.replace(" ", "_"))
def test_caught(bug: Bug) -> None:
    found = catch(bug)
    assert found.caught_by, f"{bug.name}: {found.tries} tries, and nobody noticed"


def test_there_are_enough_of_them() -> None:
    assert len({bug.name for bug in EVERY_BUG}) >= 40


def test_a_crash_of_the_kit_catches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hunt, "SEEDS", range(1, 2))

    def crash(*_: object, **__: object) -> None:
        raise KeyError("gone")

    def patches() -> list[Patch]:
        return [instead(Worker, "batch", crash), instead(Run, "make_topics", crash)]

    for place in ("kept", "plain"):
        assert not catch(Bug("the kit is broken", patches, (place,))).caught_by
