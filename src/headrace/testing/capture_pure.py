"""Random operations on a few keys, completed in groups, against a plain dict.

A case is a list of groups of operations, as a database would say them: values left out (of keys
too), old rows given or not, rows that are not in the log yet. The dict does one operation after the
other. A case that goes wrong is made smaller as long as it stays wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.sources import complete as completing
from headrace.sources.complete import (
    DELETE,
    INSERT,
    UPDATE,
    Completed,
    Numbers,
    Operations,
    joined,
)
from headrace.testing.verdicts import is_verdict, verdict_on

SCHEMA = pa.schema(
    [("k", pa.int64()), ("v", pa.int64()), ("big", pa.string()), ("b2", pa.string())]
)
Row = tuple[Any, ...]
"""In the order of the columns; `...`: a value that is not said."""


@dataclass(frozen=True)
class Operation:
    """What happened, and how the database says it."""

    kind: int
    old: Row | None
    new: Row | None
    left_out: frozenset[int] = frozenset()
    """Columns of the new row that are not said."""
    given: bool = False
    """The old row is said whole."""


@dataclass
class Case:
    """Rows that are in the log, rows that are not yet, and groups of operations."""

    there: dict[int, Row]
    groups: list[list[Operation]]
    snapshotting: bool
    cut: int = 0
    """Groups come in runs of this many operations, joined; 0: in one."""
    said: str = field(default="", compare=False)


def random_case(seed: str) -> Case:
    """A case that follows from the seed."""
    chance = Random(seed)
    rows: dict[int, Row] = {k: _row(chance, k) for k in range(6) if chance.random() < 0.6}
    snapshotting = chance.random() < 0.5
    there = {k: row for k, row in rows.items() if not snapshotting or chance.random() < 0.5}
    full = chance.choice([0.0, 0.0, 0.5, 1.0])
    groups = []
    for _ in range(chance.choice([1, 1, 2, 3])):
        size = chance.choice([1, 2, 4, 12])
        groups.append([_operation(chance, rows, full) for _ in range(size)])
    return Case(there, groups, snapshotting, chance.choice([0, 1, 3]))


def _row(chance: Random, key: int) -> Row:
    text = [chance.choice(["x", "y", "z", None, ""]) for _ in range(2)]
    return (key, chance.choice([None, 1, 2, 3]), *text)


def _operation(chance: Random, rows: dict[int, Row], full: float) -> Operation:
    free = [k for k in range(6) if k not in rows]
    kind = chance.random()
    if not rows or (free and kind < 0.3):
        key = chance.choice(free)
        rows[key] = _row(chance, key)
        return Operation(INSERT, None, rows[key])
    key = chance.choice(sorted(rows))
    old = rows.pop(key)
    given = chance.random() < full
    if kind < 0.5:
        return Operation(DELETE, old, None, given=given)
    moved = chance.choice(free) if free and chance.random() < 0.3 else key
    new = list(_row(chance, moved))
    out = {at for at in (2, 3) if chance.random() < 0.4}
    for at in out:
        new[at] = old[at]
    if moved == key and chance.random() < 0.1:
        out.add(0)
    rows[moved] = tuple(new)
    return Operation(UPDATE, old, tuple(new), frozenset(out), given)


# --- the plain dict -----------------------------------------------------------------------

Said = tuple[list[tuple[int, int, Row]], list[int], list[int]]
"""(weight, operation, row), operations that are unknown, operations that took nothing away."""


def by_dict(there: dict[int, Row], group: list[Operation]) -> Said:
    """What must be said of a group; `there` moves on."""
    known = dict(there)  # with `...` where a value is not known
    rows: list[tuple[int, int, Row]] = []
    unknown, missing = [], []
    for number, one in enumerate(group):
        before: Row | None = None
        if one.old is not None:
            before = known.pop(one.old[0], None)
            gone = there.pop(one.old[0], None)
            assert gone is None or gone == one.old
            if gone is None:
                missing.append(number)
        if one.new is None:
            if gone is not None:
                rows.append((-1, number, gone))
            continue
        base = one.old if one.given else before
        new: Row = tuple(
            value if at not in one.left_out or at == 0 else (base[at] if base else ...)
            for at, value in enumerate(one.new)
        )
        known[new[0]] = new
        if ... in new:
            unknown.append(number)
            if one.old is not None and gone is not None:
                raise AssertionError("a row that is there fills everything")
            continue
        if one.old is not None and gone is not None:
            rows.append((-1, number, gone))
        rows.append((1, number, new))
        there[new[0]] = new
    return rows, unknown, missing


# --- the real one -------------------------------------------------------------------------


def operations(group: list[Operation]) -> Operations:
    """A group as the decoder gives it."""
    news = [one.new or (None,) * 4 for one in group]
    told = [[None if at in one.left_out else new[at] for at in range(4)]
            for one, new in zip(group, news, strict=True)]  # fmt: skip
    given = [one.old for one in group if one.given and one.old is not None]
    places = iter(range(len(group)))
    at = [next(places) if one.given else -1 for one in group]
    left = {
        name: np.array([number in one.left_out for one in group])
        for number, name in enumerate(SCHEMA.names)
        if any(number in one.left_out for one in group)
    }
    return Operations(
        np.array([one.kind for one in group], np.uint8),
        _batch(told),
        [pa.array([one.old[0] if one.old else None for one in group], pa.int64())],
        left,
        _batch(given) if given else None,
        np.array(at) if given else None,
    )


def _batch(rows: Any) -> pa.RecordBatch:
    columns = [[row[at] for row in rows] for at in range(4)]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def by_complete(case: Case, there: dict[int, Row], group: list[Operation]) -> Said:
    """What the real one says."""

    def lookup(keys: list[pa.Array]) -> tuple[Numbers, pa.RecordBatch]:
        found = [(at, there[k]) for at, k in enumerate(keys[0].to_pylist()) if k in there]
        return np.array([at for at, _ in found], np.int64), _batch([row for _, row in found])

    size = case.cut or len(group)
    parts = [operations(group[at : at + size]) for at in range(0, len(group), size)]
    whole = completing.whole_keys(joined(parts), ["k"])
    made: Completed = completing.complete(
        whole, ["k"], lookup, given_is_there=not case.snapshotting
    )
    rows = [tuple(row.values()) for row in made.rows.to_pylist()]
    said = list(zip(made.weight.tolist(), made.operation.tolist(), rows, strict=True))
    return said, made.unknown.tolist(), made.missing.tolist()


def wrong(case: Case) -> str:
    """What the two say differently; nothing if all is well."""
    there = dict(case.there)
    for number, group in enumerate(case.groups):
        before = dict(there)
        expected = by_dict(there, group)
        try:
            found = by_complete(case, before, group)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is wrong
            return verdict_on(error, f"group {number}: ")
        if not case.snapshotting and (found[1] or found[2]):
            return f"group {number}: unknown {found[1]}, missing {found[2]}"
        # with a given old row that is trusted nobody looks whether it is there
        if found[:2] != expected[:2] or (case.snapshotting and found[2] != expected[2]):
            return f"group {number}: {found} instead of {expected}"
    return ""


def smaller(case: Case) -> Case:
    """The same fault with fewer operations, as far as leaving some out finds one."""
    while True:
        for less in _less(case):
            try:
                fault = wrong(less)
            except (AssertionError, KeyError):
                continue  # no history of a database
            if fault and is_verdict(fault) == is_verdict(case.said):
                less.said = fault
                case = less
                break
        else:
            return case


def _less(case: Case) -> list[Case]:
    cases = []
    for number, group in enumerate(case.groups):
        for at in range(len(group)):
            fewer = [*case.groups]
            fewer[number] = group[:at] + group[at + 1 :]
            groups = [one for one in fewer if one]
            if groups and _possible(case.there, groups, case.snapshotting):
                cases.append(Case(case.there, groups, case.snapshotting, case.cut))
    return cases


def _possible(there: dict[int, Row], groups: list[list[Operation]], snapshotting: bool) -> bool:
    """Whether each row that goes is the one that was there, as far as is known."""
    rows = dict(there)
    gone: set[int] = set()
    for one in (one for group in groups for one in group):
        if one.old is not None:
            found = rows.pop(one.old[0], None)
            if found != one.old and not (snapshotting and found is None and one.old[0] not in gone):
                return False
            gone.add(one.old[0])
        if one.new is not None:
            if one.new[0] in rows:
                return False
            rows[one.new[0]] = one.new
    return True


def counter_example(seed: str) -> str:
    """A case that goes wrong, made small; nothing if it does not."""
    case = random_case(seed)
    fault = wrong(case)
    if not fault:
        return ""
    case.said = fault
    small = smaller(case)
    return f"{small.said}\n{small}"
