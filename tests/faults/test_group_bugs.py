"""Random schedules of groups against an oracle, and the seeded bugs of groups, each noticed by it.

Caught: rows skipped, read again after a commit, read by two; offsets that go back; zombies that
commit; drops that are not counted; a crash that counts as a catch. Not caught: what only real
processes and clocks do (`tests/log/test_group_processes.py`); bugs of a kind that nobody has
thought of.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.log.groups.consumer import Consumer
from headrace.testing import group_bugs
from headrace.testing.group_bugs import BUGS, catch
from headrace.testing.group_case import GroupCase, dropped_exactly
from headrace.testing.seeded import Bug, instead


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["war", "peace", "drop"])
def test_groups_keep_their_promises(tmp_path: Path, kind: str, seed: int) -> None:
    """R-A7, R-A10: each event to one member of each group, resumed at the committed offset."""
    case = GroupCase(
        str(tmp_path / "log"), 1000 + seed, peace=kind == "peace", drop=7 if kind == "drop" else 0
    )
    case.run(100)
    assert case.rows > 0


@pytest.mark.parametrize("seed", range(3))
def test_a_topic_that_drops_counts_to_the_row(tmp_path: Path, seed: int) -> None:
    """R-A3."""
    dropped_exactly(str(tmp_path / "log"), seed)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "_"))
def test_caught(bug: Bug) -> None:
    found = catch(bug)
    assert found.caught_by, f"{bug.name}: {found.tries} tries, and nobody noticed: {found.says}"


@pytest.mark.parametrize("error", [KeyError("x"), AssertionError("of the kit")])
def test_a_crash_catches_nothing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_bugs, "TRIES", 2)

    def broken(*_: object) -> None:
        raise error

    bug = Bug("it does not even run", lambda: [instead(Consumer, "_poll", broken)], ("war",))
    found = catch(bug)
    assert not found.caught_by
    assert found.says.startswith("crash: ")
