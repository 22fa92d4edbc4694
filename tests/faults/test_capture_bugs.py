"""Seeded bugs of captures are caught: the tests of captures would notice.

Can catch: a hunter that has become blind or takes a crash for a catch, and a bug whose place in the
code has gone (all of them are switched on here). Cannot catch: bugs of a kind that nobody has
thought of. Those that need a server take long: here only some are hunted, `./run faults capture
--only bugs` hunts all.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.sources import complete
from headrace.sources.postgres.capture import Capture
from headrace.sources.postgres.large import Large
from headrace.testing import capture_bugs
from headrace.testing.capture_bugs import BUGS, ENTRY, HUNTERS, catch
from headrace.testing.capture_case import SETTINGS
from headrace.testing.postgres import Server
from headrace.testing.seeded import Bug, mutant

QUICK = (
    "it is confirmed before the log has it",
    "half a transaction is an entry",
    "a chunk that was read before a truncate is published",
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(**SETTINGS) as server:
        yield server


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "_"))
def test_its_place_is_there(bug: Bug) -> None:
    with bug.on():
        pass


@pytest.mark.parametrize(
    "bug", [b for b in BUGS if "pure" in b.where], ids=lambda bug: bug.name.replace(" ", "_")
)
def test_caught_without_a_server(bug: Bug) -> None:
    found = catch(bug)
    assert found.caught_by, f"{bug.name}: {found.tries} tries, and nobody noticed"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", QUICK, ids=lambda name: name.replace(" ", "_"))
def test_caught_with_a_server(name: str, server: Server) -> None:
    (bug,) = [bug for bug in BUGS if bug.name == name]
    found = catch(bug, server)
    assert found.caught_by, f"{bug.name}: {found.tries} tries, and nobody noticed: {found.says}"


@pytest.mark.parametrize("where", ["pure", "stepped", "parts", "bag"])
def test_a_crash_catches_nothing(
    where: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    title, _, look = HUNTERS[where]
    monkeypatch.setitem(capture_bugs.HUNTERS, where, (title, 2, look))
    changes = (
        (complete, "complete", "kinds, new = operations", "kinds, new = operations, {}['x']"),
        (Capture, "_append", ENTRY, f"raise KeyError('x')\n    {ENTRY}"),
        (Large, "_part", "None if overlay is None else overlay.lookup", "{}['x']"),
    )
    found = catch(mutant("it does not even run", where, changes), server)
    assert not found.caught_by
    assert found.says.startswith("crash: ")


def test_there_are_enough_of_them() -> None:
    assert len({bug.name for bug in BUGS}) >= 20
