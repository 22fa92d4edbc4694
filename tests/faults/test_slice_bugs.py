"""Seeded bugs of the slice are caught: its tests would notice.

Can catch: a hunter that has become blind or takes a crash for a catch, and a bug whose place in the
code has gone (all of them are switched on here). Cannot catch: bugs of a kind that nobody has
thought of. Here only some are hunted, `./run faults slice --only bugs` hunts all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.derived.postgres import PostgresTarget
from headrace.testing import shop, slice_bugs
from headrace.testing.follower_bugs import LONG_WAY
from headrace.testing.postgres import Server
from headrace.testing.seeded import Bug, mutant
from headrace.testing.slice_bugs import BUGS, catch, stepped

QUICK = (
    "captured tables run ahead of the views beside them",
    "a part that was killed stays away",
)


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
def test_a_crash_catches_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_bugs, "TRIES", 1)
    cut = "refused = self._merged(changes)"
    broken = ((PostgresTarget, "apply", cut, f"raise KeyError('x'); {cut}"), LONG_WAY)
    found = catch(mutant("it does not even run", "stepped", broken), server)
    assert not found.caught_by
    assert "crash: " in found.says


def test_a_project_that_does_not_even_run_catches_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_bugs, "TRIES", 1)
    monkeypatch.setattr(slice_bugs, "_comes", lambda *_: None)
    (bug,) = [bug for bug in BUGS if bug.name == "a part that was killed stays away"]
    found = catch(bug, server)
    assert (found.caught_by, found.says) == ("", "crash: the part never came")


@pytest.mark.timeout(900)
def test_without_a_bug_nothing_is_wrong(server: Server) -> None:
    assert stepped(server, "tests") == []


@pytest.mark.parametrize("whole", [True, False])
def test_views_must_agree_at_every_position_of_the_log(whole: bool, tmp_path: Path) -> None:
    """A follower shows cuts only, and so cannot see that a commit came in several entries."""
    rows: dict[str, dict[str, Any]] = {
        "balances": {"account_id": 1, "balance": 5, "bookings": 1},
        "total": {"total": 5, "bookings": 1, "accounts": 1},
        "revenue": {"country": "x", "orders": 0, "revenue": 0},
        "bestsellers": {"product": "x", "sold": 0, "amount": 0},
        "sizes": {"size": "x", "payments": 0},
    }
    with hr.connect(tmp_path / "log") as log:
        for view, row in rows.items():
            columns = ", ".join(f"{n} {'string' if v == 'x' else 'bigint'}" for n, v in row.items())
            log.create_topic(f"shop.{view}", columns, kind="changes")
        with log.transaction() as entry:
            for view, row in rows.items():
                log_or_entry = entry if whole else log
                log_or_entry.append(f"shop.{view}", [{**row, "_weight": 1}])
        found = shop.views_disagree(log)
    assert found == ([] if whole else ["at position 6 of the log: total is not the balances'"])


def test_there_are_enough_of_them() -> None:
    assert len({bug.name for bug in BUGS}) >= 12
