"""Bugs of a follower on purpose: a line of production code is changed for as long as a hunt lasts.

As in `capture_bugs`. The hunter is `follower_case.stepped`: a follower with its killers and rivals,
checked at every rest.
"""

from __future__ import annotations

import inspect
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from headrace.derived import cuts
from headrace.derived.follower import Follower
from headrace.derived.postgres import PostgresTarget
from headrace.testing import capture_bugs, follower_case
from headrace.testing.capture_bugs import Bug
from headrace.testing.hunt import Catch, look_for, put_between, table
from headrace.testing.postgres import Server

BEGIN, END = "<!-- bugs of followers: begin -->", "<!-- bugs of followers: end -->"
NOTE = "lambda found: self._note(found, keyed, cut)"
LONG_WAY = (PostgresTarget, "_quick", "if self._left is None or", "if True or")
"""So that a bug of the long way is met each time."""

BUGS = [
    Bug("the cut is written after the transaction", "follower", (
        (PostgresTarget, "apply", "        if cut is not None:\n            self._now_at",
         "        self._run('commit'); self._run('begin')\n"
         "        if cut is not None:\n            self._now_at"), LONG_WAY)),
    Bug("the cut is written before the transaction", "follower", (
        (PostgresTarget, "apply", "            refused = self._merged(changes)",
         "            self._now_at(cut, list(tables.values()))\n"
         "            self._run('commit'); self._run('begin')\n"
         "            refused = self._merged(changes)"), LONG_WAY)),
    Bug("a mark that somebody has moved is moved on", "follower", (
        (PostgresTarget, "_quick", "moved.rowcount != 1", "False"),)),
    Bug("the epoch is not looked at", "follower", (
        (PostgresTarget, "_locked", "if mark.epoch != epoch:", "if False:"), LONG_WAY)),
    Bug("tables go ahead of the views", "follower", (
        (cuts.Between, "_rows", "(self._inputs, cut.through)", "(self._inputs, cut.position)"),)),
    Bug("a view that is being built is shown", "follower", (
        (cuts, "cuts_of", "if views <= set(right)", "if True"),)),
    Bug("of the entries of a cut the oldest counts", "follower", (
        (cuts, "added_up", "newest[code] = np.arange(rows.num_rows)",
         "newest[code[::-1]] = np.arange(rows.num_rows)[::-1]"),)),
    Bug("rows of a multiset are not added up", "follower", (
        (cuts, "added_up", "take_rows(own, order[starts[left]]), sums[left]",
         "take_rows(own, order[starts[left]]), np.sign(sums[left])"),)),
    Bug("what is beyond a cut is forgotten", "follower", (
        (cuts.Feed, "through", "self._held.extendleft(reversed(later))", "pass"),)),
    Bug("a refused row is nowhere", "follower", (
        (Follower, "_apply", NOTE, "lambda found: None"),)),
    Bug("a refused row leaves its old value", "follower", (
        (PostgresTarget, "_emptied", "if table.key:", "if False:"),)),
    Bug("a row stays set aside after it was taken", "follower", (
        (Follower, "_note", "{*touched, *new}", "set(new)"),)),
    Bug("a retry forgets the row", "follower", (
        (Follower, "_retry", "        if keys:\n", "        if False:\n"),)),
]  # fmt: skip

capture_bugs.SOURCES |= {
    (owner, name): textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(owner, name))))
    for bug in BUGS
    for owner, name, _, _ in bug.changes
}

TRIES = 12


def catch(bug: Bug, server: Server) -> Catch:
    """Look for one bug."""

    def sound(number: int) -> tuple[str, int]:
        with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            schema = f"hunt{time.monotonic_ns()}"
            found, _ = follower_case.stepped(
                Path(folder) / "log", server.dsn("postgres"), number - 1, schema=schema
            )
            return found, 1

    def buggy(number: int) -> tuple[str, int]:
        with bug.on():
            return sound(number)

    return look_for(bug.name, "follower case", TRIES, buggy, sound)


def hunt(only: str, say: Callable[[str], None], page: str | None = None) -> list[Catch]:
    """Look for all bugs whose name contains `only`; into the table of a page, if given."""
    found = []
    with Server() as server:
        for bug in BUGS:
            if only in bug.name:
                found.append(catch(bug, server))
                say(found[-1].line())
    if page is not None:
        put_between(page, BEGIN, END, table(found))
    return found
