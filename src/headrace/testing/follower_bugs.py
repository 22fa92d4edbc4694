"""Bugs of a follower on purpose: mutants of production code, as in `seeded`.

The hunter is `follower_case.stepped`: a follower with its killers and rivals,
checked at every rest.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from headrace.derived import cuts
from headrace.derived.follower import Follower
from headrace.derived.postgres import PostgresTarget
from headrace.testing import follower_case
from headrace.testing.hunt import Catch, each, look_with, write_table
from headrace.testing.postgres import Server
from headrace.testing.seeded import Bug, mutant

NOTE = "lambda found: self._note(found, keyed, cut)"
LONG_WAY = (PostgresTarget, "_quick", "if self._left is None or", "if True or")
"""So that a bug of the long way is met each time."""

BUGS = [
    mutant("the cut is written after the transaction", "follower", (
        (PostgresTarget, "apply", "        if cut is not None:\n            self._now_at",
         "        self._run('commit'); self._run('begin')\n"
         "        if cut is not None:\n            self._now_at"), LONG_WAY)),
    mutant("the cut is written before the transaction", "follower", (
        (PostgresTarget, "apply", "            refused = self._merged(changes)",
         "            self._now_at(cut, list(tables.values()))\n"
         "            self._run('commit'); self._run('begin')\n"
         "            refused = self._merged(changes)"), LONG_WAY)),
    mutant("a mark that somebody has moved is moved on", "follower", (
        (PostgresTarget, "_quick", "moved.rowcount != 1", "False"),)),
    mutant("the epoch is not looked at", "follower", (
        (PostgresTarget, "_locked", "if mark.epoch != epoch:", "if False:"), LONG_WAY)),
    mutant("tables go ahead of the views", "follower", (
        (cuts.Between, "_rows", "(self._inputs, cut.through)", "(self._inputs, cut.position)"),)),
    mutant("a view that is being built is shown", "follower", (
        (cuts, "cuts_of", "if views <= set(right)", "if True"),)),
    mutant("of the entries of a cut the oldest counts", "follower", (
        (cuts, "added_up", "newest[code] = np.arange(rows.num_rows)",
         "newest[code[::-1]] = np.arange(rows.num_rows)[::-1]"),)),
    mutant("rows of a multiset are not added up", "follower", (
        (cuts, "added_up", "take_rows(own, order[starts[left]]), sums[left]",
         "take_rows(own, order[starts[left]]), np.sign(sums[left])"),)),
    mutant("what is beyond a cut is forgotten", "follower", (
        (cuts.Feed, "through", "self._held.extendleft(reversed(later))", "pass"),)),
    mutant("a refused row is nowhere", "follower", (
        (Follower, "_apply", NOTE, "lambda found: None"),)),
    mutant("a refused row leaves its old value", "follower", (
        (PostgresTarget, "_emptied", "if table.key:", "if False:"),)),
    mutant("a row stays set aside after it was taken", "follower", (
        (Follower, "_note", "{*touched, *new}", "set(new)"),)),
    mutant("a retry forgets the row", "follower", (
        (Follower, "_retry", "        if keys:\n", "        if False:\n"),)),
]  # fmt: skip

TRIES = 12


def catch(bug: Bug, server: Server) -> Catch:
    """Look for one bug."""

    def look(number: int) -> tuple[str, int]:
        with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            schema = f"hunt{time.monotonic_ns()}"
            found, _ = follower_case.stepped(
                Path(folder) / "log", server.dsn("postgres"), number - 1, schema=schema
            )
            return found, 1

    return look_with(bug, "follower case", TRIES, look)


def hunt(only: str, say: Callable[[str], None], page: str | None = None) -> list[Catch]:
    """Look for all bugs whose name contains `only`; into the table of a page, if given."""
    with Server() as server:
        found = each(BUGS, only, lambda bug: catch(bug, server), say)
    if page is not None:
        write_table(page, "bugs of followers", found)
    return found
