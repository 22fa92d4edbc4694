"""Seeded bugs of followers are caught: the tests of followers would notice.

Can catch: a hunter that has become blind, and a bug whose place in the code has gone (all of them
are switched on here). Cannot catch: bugs of a kind that nobody has thought of. Here only some are
hunted; `headrace.testing.follower_bugs.hunt` hunts all.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.testing.capture_bugs import Bug
from headrace.testing.follower_bugs import BUGS, catch
from headrace.testing.postgres import Server

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
