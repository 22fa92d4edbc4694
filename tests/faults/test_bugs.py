"""Every seeded bug is caught: the machine that breaks the log would notice.

Caught: a check that has become blind, a crash that counts as a catch. Not caught: bugs of a kind
that nobody has thought of; but forty of different kinds, each caught by a general check that does
not know it, are some comfort.
"""

from __future__ import annotations

import psycopg
import pytest

from headrace import errors
from headrace.testing import hunt
from headrace.testing.chaos_worker import Worker
from headrace.testing.hunt import EVERY_BUG, Catch, catch, look_for
from headrace.testing.seeded import Bug, Patch, instead
from headrace.testing.shortcut_bugs import SHORTCUT_BUGS, why_not
from headrace.testing.simulation import Run
from headrace.testing.verdicts import Violated


@pytest.mark.parametrize("bug", EVERY_BUG, ids=lambda bug: bug.name.replace(" ", "_"))
def test_caught(bug: Bug) -> None:
    found = catch(bug)
    assert found.caught_by, f"{bug.name}: {found.tries} tries, and nobody noticed"


def test_the_short_cut_has_some_too() -> None:
    if why_not():
        pytest.skip(why_not())
    assert len(SHORTCUT_BUGS) >= 15


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


def _ending(with_bug: Exception | str, without: Exception | str = "") -> Catch:
    """The catch in a case that ends so."""

    def end(how: Exception | str) -> tuple[str, int]:
        if isinstance(how, Exception):
            raise how
        return how, 1

    return look_for("a bug", "a case", 3, lambda _: end(with_bug), lambda _: end(without))


@pytest.mark.parametrize(
    "error",
    [
        KeyError("gone"),
        AssertionError("of the kit"),
        psycopg.errors.SyntaxError("at or near"),
        errors.TargetStopped("syntax error"),
        errors.SourceAway("connection lost"),
        errors.WrongColumn("no such column"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_names_no_wrong_state_catches_nothing(error: Exception) -> None:
    found = _ending(error)
    assert (found.caught_by, found.tries) == ("", 3)
    assert found.says.startswith(f"crash: stopped: {type(error).__name__}: ")


@pytest.mark.parametrize(
    "error",
    [
        Violated("a row is lost"),
        errors.LogDamaged("a file is missing"),
        errors.BeforeImageMissing("the row is not there"),
        errors.SlotAhead("the slot is ahead"),
        errors.Fenced("another one"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_names_a_wrong_state_is_a_catch(error: Exception) -> None:
    found = _ending(error)
    assert (found.caught_by, found.tries) == ("a case", 1)


def test_what_is_wrong_without_the_bug_too_is_no_catch() -> None:
    for without in ("a row is lost", KeyError("gone")):
        assert not _ending("a row is lost", without).caught_by
    assert _ending("a row is lost").caught_by
