"""Seeded bugs of followers are caught: the tests of followers would notice.

Can catch: a hunter that has become blind or takes a crash for a catch, and a bug whose place in the
code has gone (all of them are switched on here). Cannot catch: bugs of a kind that nobody has
thought of. Here only some are hunted; `headrace.testing.follower_bugs.hunt` hunts all.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.derived.postgres import PostgresTarget
from headrace.testing import follower_bugs
from headrace.testing.follower_bugs import BUGS, LONG_WAY, catch
from headrace.testing.postgres import Server
from headrace.testing.seeded import Bug, mutant

QUICK = ("tables go ahead of the views", "the epoch is not looked at", "a refused row is nowhere")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "_"))
def test_its_place_is_there(bug: Bug) -> None:
    with bug.on():
        pass


@pytest.mark.parametrize(
    "bug", [b for b in BUGS if b.name in QUICK], ids=lambda bug: bug.name.replace(" ", "_")
)
def test_it_is_caught(bug: Bug, server: Server) -> None:
    assert catch(bug, server).caught_by


@pytest.mark.parametrize(
    "broken", ["raise KeyError('x')", "self._run('nonsense')"], ids=["KeyError", "SQL"]
)
def test_a_crash_catches_nothing(
    broken: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_bugs, "TRIES", 2)
    merged = "refused = self._merged(changes)"
    changes = ((PostgresTarget, "apply", merged, f"{broken}; {merged}"), LONG_WAY)
    found = catch(mutant("it does not even run", "follower", changes), server)
    assert not found.caught_by
    assert found.says.startswith("crash: ")
