"""Bugs of a capture on purpose: mutants of production code, as in `seeded`.

The hunters are the general ones: random operations against a dict
(`capture_pure`), and a capture with its writers in one thread against the embedded PostgreSQL
(`capture_case.stepped`), whose checks are named there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import headrace as hr
from headrace.sources import complete
from headrace.sources.postgres import operations
from headrace.sources.postgres.capture import Capture
from headrace.sources.postgres.captured import Captured
from headrace.sources.postgres.group import Group
from headrace.sources.postgres.large import Large, Overlay
from headrace.sources.postgres.snapshots import Snapshots
from headrace.sources.postgres.spill import Spill
from headrace.testing import capture_bag, capture_case, capture_pure
from headrace.testing.hunt import Catch, each, look_with
from headrace.testing.postgres import Server, fresh_database
from headrace.testing.seeded import Bug, mutant

# --- the bugs -----------------------------------------------------------------------------

ENTRY = "with self._entry(max(self.state.lsn, end)) as entry:"
HALVES = """last = items[-1]
    if isinstance(last, Transaction) and len(last.changes) > 1:
        half, rest = (
            Transaction(last.xid, last.final_lsn, end, last.commit_time_us, changes)
            for end, changes in (
                (last.end_lsn - 1, last.changes[:1]), (last.end_lsn, last.changes[1:]))
        )
        self._append([*items[:-1], half])
        items = [rest]
    group = Group(items)"""

BUGS = [
    mutant("an unchanged large value is taken for null", "pure", (
        (complete, "_filled", "source[:count][mask] = old[mask]", "pass"),)),
    mutant("a value left out comes from one step back only", "pure", (
        (complete, "_filled", "if (further == source).all():", "if True:"),)),
    mutant("a key-changing update reads the new key", "pure", (
        (complete, "_within", "one.take(pa.array(readers))",
         "operations.new.column(name).take(pa.array(readers))"),)),
    mutant("a row of the group is looked up in the table", "pure", (
        (complete, "complete", "ask & ~seen", "ask"),)),
    mutant("a large key that did not change is null", "pure", (
        (complete, "whole_keys", "mask is not None and mask.any()", "mask is None"),)),
    mutant("a given old row is taken away though it is not there", "pure", (
        (complete, "complete", "if given_is_there:\n", "if True:\n"),)),
    mutant("a row is said of which not all is known", "pure", (
        (complete, "_filled", "unknown |= source[:count] == NONE",
         "source = np.where(source == NONE, same, source)"),)),
    mutant("it is confirmed before the log has it", "stepped", (
        (Capture, "_stream", "self._take(group, control)",
         "stream.confirm(stream.received); self._take(group, control)"),)),
    mutant("the resume point is saved before the data", "stepped", (
        (Capture, "_append", ENTRY, f"self._save(end)\n    {ENTRY}"),)),
    mutant("the resume point stays behind the data", "stepped", (
        (Capture, "_append", ENTRY, "with self._entry(self.state.lsn) as entry:"),)),
    mutant("an xid is taken for a resume point", "stepped", (
        (Group, "__init__", "self.end = max(self.end, one.end_lsn)",
         "self.end = max(self.end, one.xid)"),)),
    mutant("old rows come from a table that is behind", "stepped", (
        (Captured, "lookup", "found = self.log.table(self.state.topic).get(asked)",
         "self._seen = [*getattr(self, '_seen', []), self.log.position][-3:]\n"
         "        found = self.log.table(self.state.topic).get(asked, at=self._seen[0])"),)),
    mutant("a chunk is published before the stream has passed it", "stepped", (
        (Snapshots, "advance", "received < captured.chunks[0].lsn", "False"),)),
    mutant("a chunk keeps keys of later transactions", "stepped", (
        (Captured, "publish", "if newer and rows.num_rows:", "if False:"),)),
    mutant("transactions of a group are in another order", "stepped", (
        (Capture, "_parts", "group = Group(items)", "group = Group(items[::-1])"),)),
    mutant("half a transaction is an entry", "stepped", (
        (Capture, "_parts", "group = Group(items)", HALVES),)),
    mutant("a rolled-back subtransaction stays", "stepped", (
        (Spill, "roll_back", "kept.gone.add(subxid)", "pass"),)),
    mutant("truncate is forgotten", "parts", (
        (Large, "_truncate", "for rows, weight in there:", "for rows, weight in ():"),)),
    mutant("a truncate leaves what its own transaction wrote", "parts", (
        (Overlay, "empty", "ordered(self._state(), self._part, (0,))", "()"),)),
    mutant("a part of a transaction does not know the parts before", "parts", (
        (Large, "_part", "None if overlay is None else overlay.lookup", "None"),)),
    mutant("what an earlier part took away is there for a later one", "parts", (
        (Overlay, "lookup", "np.flatnonzero(~found", "np.flatnonzero(found"),)),
    mutant("rows that were not staged stay out of the entry", "parts", (
        (Large, "append_to", "if done.waiting:", "if done.waiting and not done.pieces:"),)),
    mutant("a chunk that was read before a truncate is published", "stepped", (
        (Captured, "overtaken", "if self.snapshotting:", "if False:"),)),
    mutant("an unchanged large value of the stream is null", "stepped", (
        (operations, "_left_out", "return whole if order is None else whole[order.to_numpy()]",
         "return None"),)),
    mutant("what a snapshot sees is heard from the stream too", "bag", (
        (Captured, "_counts", "return not self.view.sees(xid)", "return True"),)),
    mutant("rows of a snapshot that broke off stay", "bag", (
        (Captured, "watch", "if self.state.dirty else", "if False else"),)),
    mutant("an old row that the snapshot does not have is owed for ever", "bag", (
        (Captured, "gone", "yield from self.owed.rest()", "yield from ()"),)),
    mutant("a key-changing update is one in place", "stepped", (
        (operations, "_read_texts", "if old is None or kinds is None:", "if new is not None:"),)),
]  # fmt: skip

# --- the hunt -----------------------------------------------------------------------------


QUICK: dict[str, Any] = {"rounds": 2, "pauses": 30, "kills": 0.05}
"""Short cases, and more kills in them."""


def _pure(number: int, server: Server | None) -> str:
    del server
    return capture_pure.counter_example(f"hunt{number}").partition("\n")[0]


def _stepped(number: int, server: Server | None) -> str:
    assert server is not None
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        wrong, _ = capture_case.stepped(
            server, Path(folder), f"hunt{number}", alters=False, **QUICK
        )
    return wrong[0] if wrong else ""


def _bag(number: int, server: Server | None) -> str:
    assert server is not None
    with (
        tempfile.TemporaryDirectory(prefix="headrace-") as folder,
        fresh_database(server, f"bag_{number}") as database,
        hr.connect(Path(folder) / "log") as log,
    ):
        return capture_bag.bag_case(server, database, log, f"hunt{number}")


def _parts(number: int, server: Server | None) -> str:
    assert server is not None
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        wrong = capture_case.by_parts(server, Path(folder), f"hunt{number}")
    return wrong[0] if wrong else ""


HUNTERS: dict[str, tuple[str, int, Callable[[int, Server | None], str]]] = {
    "pure": ("random operations against a dict", 2000, _pure),
    "stepped": ("stepped capture", 12, _stepped),
    "parts": ("capture by parts", 12, _parts),
    "bag": ("a table without a key", 12, _bag),
}
"""The title of each hunter, how many cases it tries, and how it tries one."""


def catch(bug: Bug, server: Server | None = None) -> Catch:
    """Look for a bug where it should show."""
    (where,) = bug.where
    title, most, look = HUNTERS[where]
    found = look_with(bug, title, most, lambda number: (look(number, server), 1))
    if found.caught_by and where in ("stepped", "parts"):
        check = found.says.partition(":")[0]
        return replace(found, caught_by=f"{title}, check `{check}`")
    return found


def hunt(only: str, say: Callable[[str], None]) -> list[Catch]:
    """Look for all bugs whose name contains `only`."""
    with Server(**capture_case.SETTINGS) as server:
        return each(BUGS, only, lambda bug: catch(bug, server), say)
