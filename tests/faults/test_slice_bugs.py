"""Seeded bugs of the slice are caught: its tests would notice.

Can catch: a hunter that has become blind, and a bug whose place in the code has gone (all of them
are switched on here). Cannot catch: bugs of a kind that nobody has thought of. Here only some are
hunted, `./run faults slice --only bugs` hunts all.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.testing.capture_bugs import Bug
from headrace.testing.postgres import Server
from headrace.testing.slice_bugs import BUGS, catch, stepped

QUICK = ("captured tables run ahead of the views beside them",)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(wal_writer_delay="10ms") as server:
        yield server


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "_"))
def test_its_place_is_there(bug: Bug) -> None:
    with bug.on():
        pass


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", QUICK, ids=lambda name: name.replace(" ", "_"))
def test_caught(name: str, server: Server) -> None:
    (bug,) = [bug for bug in BUGS if bug.name == name]
    found = catch(bug, server)
    assert found.caught_by, f"{bug.name}: {found.tries} tries, and nobody noticed: {found.says}"


@pytest.mark.timeout(900)
def test_without_a_bug_nothing_is_wrong(server: Server) -> None:
    assert stepped(server, "tests") == []


def test_there_are_enough_of_them() -> None:
    assert len({bug.name for bug in BUGS}) >= 12
