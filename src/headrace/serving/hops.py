"""The last changes, and the time each hop took: source commit, log, view commit, target.

    committed at the source --> taken by the log --> in a commit of the views --> in the target
    (the source's clock)        (the log's clock)    (the log's clock)           (the follower's)

A transaction is in the log at the position of its entry; in the views with the first commit that
says `through` at or above it; in a target with the first cut that does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.log.tail import last_rows
from headrace.model.records import microseconds_of, time_of

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog

SHOWN = 12
UNDER_WAY = 3
"""So many of those shown may still be under way: the others have arrived."""
KEPT = 2000


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transaction of a source, as the log has it."""

    capture: str
    xid: int
    rows: int
    position: int
    committed: int
    """Microseconds since 1970, as all times here."""
    logged: int


@dataclass(frozen=True, slots=True)
class Through:
    """From `at` on, somebody had everything through a position."""

    through: int
    at: int


def last_changes(log: EmbeddedLog, status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The last transactions of all captures with their hops, newest first."""
    transactions: list[Transaction] = []
    for capture in status.get("captures", ()):
        rows = last_rows(log, f"{capture['name']}._transactions", KEPT)
        names = ("xid", "rows", "_position", "commit_time", "_received_time")
        columns = _numbers(rows, *names)
        transactions += [Transaction(capture["name"], *row) for row in zip(*columns, strict=True)]
    commits = {}
    for pipeline in status.get("pipelines", ()):
        rows = last_rows(log, f"{pipeline['name']}._commits", KEPT)
        commits[pipeline["name"]] = [
            Through(through, at)
            for through, at in zip(*_numbers(rows, "through", "_received_time"), strict=True)
        ]
    applied = {
        one["name"]: [
            Through(cut["through"], microseconds_of(datetime.fromisoformat(cut["at"])))
            for cut in one.get("applied", ())
        ]
        for one in status.get("followers", ())
    }
    return newest(transactions, commits, applied)


def _numbers(rows: pa.Table | None, *names: str) -> list[list[int]]:
    """Columns as integers, times in microseconds; empty ones of no rows."""
    if rows is None:
        return [[] for _ in names]
    return [rows.column(name).cast(pa.int64()).to_pylist() for name in names]


def newest(
    transactions: Iterable[Transaction],
    commits: Mapping[str, Sequence[Through]],
    applied: Mapping[str, Sequence[Through]],
) -> list[dict[str, Any]]:
    """The last transactions that have arrived, and before them a few that are under way."""
    found: list[dict[str, Any]] = []
    under_way = 0
    in_order = sorted(transactions, key=lambda each: each.position)
    for one in in_order[::-1]:
        told = changed(one, commits, applied)
        if told["hops"][-1]["ms"] is None:
            under_way += 1
            if under_way > UNDER_WAY:
                continue
        found.append(told)
        if len(found) == SHOWN:
            break
    return found


def changed(
    one: Transaction,
    commits: Mapping[str, Sequence[Through]],
    applied: Mapping[str, Sequence[Through]],
) -> dict[str, Any]:
    """A transaction with its hops; one that has not come, or is not known, has no time."""
    hops: list[dict[str, Any]] = [{"hop": "log", "ms": _between(one.committed, one.logged)}]
    kinds: list[tuple[str, Mapping[str, Sequence[Through]]]] = [
        ("views", commits),
        ("target", applied),
    ]
    before = one.logged
    for kind, of_kind in kinds:
        at = [_first(passed, one.position) for passed in of_kind.values()]
        if not at:
            continue
        if None in at:
            hops.append({"hop": kind, "ms": None})
            break
        last = max(moment for moment in at if moment is not None)  # the slowest decides
        hops.append({"hop": kind, "ms": _between(before, last)})
        before = last
    return {
        "capture": one.capture,
        "xid": one.xid,
        "rows": one.rows,
        "position": one.position,
        "committed": time_of(one.committed).isoformat(),
        "hops": hops,
        "ms": _between(one.committed, before),
    }


def _first(passed: Sequence[Through], position: int) -> int | None:
    """When a position was first passed; None: not yet, or before the first that is known here."""
    if not passed or passed[0].through >= position:
        return None
    found = bisect_left(passed, position, key=lambda one: one.through)
    return passed[found].at if found < len(passed) else None


def _between(start: int, end: int) -> float:
    """Milliseconds; not below 0, though two clocks may say so."""
    return max(0.0, round((end - start) / 1000, 1))
