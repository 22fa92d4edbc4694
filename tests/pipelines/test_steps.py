"""The delta rules against plain Python, without Spark: random histories, every step compared.

Can catch: a wrong rule (a pair forgotten, a count that crosses zero unseen, an old side used for a
new one), nulls, NaN, infinities, duplicates, key changes, empty changes, hot keys. State is real:
collections in packs, with merges. Cannot catch: what Spark evaluates (templates are Python here),
the loop, crashes.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import errors
from headrace.pipelines.views.aggregate import _grouped
from headrace.pipelines.views.algebra import Aggregate, Call, Distinct, Join, Node, Regroup, Scan
from headrace.pipelines.views.changes import key_hashes
from headrace.pipelines.views.engine import Engine
from headrace.pipelines.views.sums import exact_float_sums
from headrace.tables.packs import Packs

Row = tuple[Any, ...]
Bag = Counter[Row]
SEED = 0x5EED
INT = pa.int64()


PLAIN: dict[str, Any] = {"names": (), "fingerprint": "", "origin": ""}


def scan(name: str, *types: pa.DataType) -> Scan:
    columns = pa.schema([(f"c{i}", t) for i, t in enumerate(types)])
    return Scan(name=name, columns=columns, **PLAIN)


def canonical(value: Any) -> Any:
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return value + 0.0
    return value


def rows_of(batch: pa.RecordBatch) -> Iterable[tuple[Row, int]]:
    lists = [column.to_pylist() for column in batch.columns]
    for row in zip(*lists, strict=True):
        yield tuple(canonical(value) for value in row[:-1]), row[-1]


def as_change(node: Node, bag: Bag) -> pa.RecordBatch:
    rows = list(bag.items())
    arrays = [pa.array([row[i] for row, _ in rows], f.type) for i, f in enumerate(node.columns)]
    schema = node.columns.append(pa.field("_w", pa.int64(), nullable=False))
    return pa.RecordBatch.from_arrays(
        [*arrays, pa.array([w for _, w in rows], pa.int64())], schema=schema
    )


class Run:
    """An operator fed with random changes, beside the whole inputs."""

    def __init__(self, folder: str, node: Node) -> None:
        self.node = node
        self.scans = [scan for scan in node.inputs if isinstance(scan, Scan)]
        self.packs = Packs(folder)
        self.engine = Engine(
            {"v": node}, {scan.name: scan.name for scan in self.scans}, self.packs, SEED
        )
        self.whole: dict[str, Bag] = {scan.name: Counter() for scan in self.scans}
        self.output: Bag = Counter()
        self.number = 0

    def step(self, changes: dict[str, Bag]) -> None:
        attempt = self.packs.attempt(self.number)
        self.number += 1
        given = {s.name: as_change(s, changes.get(s.name, Counter())) for s in self.scans}
        batch = self.engine.step(given, attempt)
        attempt.finish()
        self.engine.keep(batch)
        for name, bag in changes.items():
            add(self.whole[name], bag)
        add(self.output, total(rows_of(batch.views["v"])))
        if self.number % 4 == 0:  # what is kept says the whole output, whenever it is asked
            known: Bag = Counter()
            for chunk in self.engine.snapshot(self.node):
                add(known, total(rows_of(chunk)))
            assert known == self.output


def total(rows: Iterable[tuple[Row, int]]) -> Bag:
    found: Bag = Counter()
    for row, weight in rows:
        found[row] += weight
    return found


def add(bag: Bag, more: Bag) -> None:
    for row, weight in more.items():
        bag[row] += weight
        if not bag[row]:
            del bag[row]


def history(chance: random.Random, make: Callable[[], Row], held: Bag, size: int) -> Bag:
    """Some rows come, some that are there go, some change."""
    change: Bag = Counter()
    for _ in range(chance.randrange(size + 1)):
        present = [row for row in held if held[row] + change[row] > 0]
        if present and chance.random() < 0.45:
            row = chance.choice(present)
            change[row] -= 1
            if chance.random() < 0.4:
                change[make()] += 1
        else:
            change[make()] += 1
    return Counter({row: weight for row, weight in change.items() if weight})


# --- joins ----------------------------------------------------------------------------------------


def naive_join(kind: str, left: Bag, right: Bag, keys: int, residual: Any) -> Bag:
    found: Bag = Counter()

    def partners(row: Row, others: Bag, turned: bool) -> Iterable[tuple[Row, int]]:
        for other, weight in others.items():
            a, b = (other, row) if turned else (row, other)
            if any(a[i] is None or a[i] != b[i] for i in range(keys)):
                continue
            if residual is None or residual(a, b):
                yield other, weight

    for row, weight in left.items():
        pairs = list(partners(row, right, False))
        if kind in ("inner", "left", "right", "full", "single"):
            for other, times in pairs:
                found[row + other] += weight * times
        if kind in ("left", "full", "single") and not pairs:
            found[row + (None,) * 2] += weight
        if kind == "semi" and pairs:
            found[row] += weight
        if kind == "anti" and not pairs:
            found[row] += weight
        if kind == "existence":
            found[(*row, bool(pairs))] += weight
    if kind in ("right", "full"):
        for row, weight in right.items():
            if not list(partners(row, left, True)):
                found[(None,) * 2 + row] += weight
    return found


def template(keep: Callable[[Row, Row], bool]) -> Any:
    def run(batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = list(zip(*(c.to_pylist() for c in batch.columns), strict=True))
        return batch.filter(pa.array([keep(row[:2], row[2:4]) for row in rows], pa.bool_()))

    return run


def less(a: Row, b: Row) -> bool:
    return a[1] is not None and b[1] is not None and a[1] < b[1]


@pytest.mark.parametrize("keys", [0, 1, 2])
@pytest.mark.parametrize("residual", [None, less])
@pytest.mark.parametrize("kind", ["inner", "left", "right", "full", "semi", "anti", "existence"])
def test_joins(tmp_path: Any, kind: str, residual: Any, keys: int) -> None:
    for seed in range(3):
        chance = random.Random(f"{kind} {keys} {seed}")
        a, b = scan("a", pa.int64(), pa.string()), scan("b", pa.int64(), pa.string())
        types = [pa.int64(), pa.string()]
        if kind == "existence":
            types = [*types, pa.bool_()]
        elif kind not in ("semi", "anti"):
            types *= 2
        node = Join(
            **PLAIN,
            kind=kind,  # type: ignore[arg-type]
            left=a,
            right=b,
            null_safe=(False,) * keys,
            left_keys=tuple(range(keys)),
            right_keys=tuple(range(keys)),
            residual=None if residual is None else template(residual),
            columns=pa.schema([(f"c{i}", t) for i, t in enumerate(types)]),
        )
        run = Run(str(tmp_path / str(seed)), node)
        spread = chance.choice([1, 3, 8])

        def make(chance: random.Random = chance, spread: int = spread) -> Row:
            key = None if chance.random() < 0.15 else chance.randrange(spread)
            return key, chance.choice([None, "a", "b", "c"])

        for _ in range(12):
            changes = {name: history(chance, make, run.whole[name], 5) for name in ("a", "b")}
            run.step(changes)
            expected = naive_join(kind, run.whole["a"], run.whole["b"], keys, residual)
            assert run.output == expected


@pytest.mark.parametrize("residual", [None, less])
def test_a_scalar_subquery_with_two_rows_stops(tmp_path: Any, residual: Any) -> None:
    a, b = scan("a", pa.int64(), pa.string()), scan("b", pa.int64(), pa.string())
    node = Join(
        **PLAIN,
        kind="single",
        left=a,
        right=b,
        null_safe=(False,),
        left_keys=(0,),
        right_keys=(0,),
        residual=None if residual is None else template(residual),
        columns=pa.schema([(f"c{i}", t) for i, t in enumerate([pa.int64(), pa.string()] * 2)]),
    )
    run = Run(str(tmp_path), node)
    run.step({"a": Counter({(1, "a"): 1}), "b": Counter({(1, "b"): 1, (2, "b"): 2})})
    assert run.output == {(1, "a", 1, "b"): 1}
    with pytest.raises(errors.ViewStopped):
        run.step({"b": Counter({(1, "c"): 1})})
    with pytest.raises(errors.ViewStopped):
        run.step({"a": Counter({(2, "a"): 1})})


# --- aggregates -----------------------------------------------------------------------------------


def naive_aggregate(rows: Bag, keys: int, node: Aggregate) -> Bag:
    by_group: dict[Row, list[Row]] = {}
    for row, weight in rows.items():
        by_group.setdefault(row[:keys], []).extend([row] * weight)
    if not keys:
        by_group.setdefault((), [])
    found: Bag = Counter()
    for key, members in by_group.items():
        found[key + tuple(canonical(naive_call(call, members)) for call in node.calls)] += 1
    return found


def naive_call(call: Call, rows: list[Row]) -> Any:
    if call.filter is not None:
        rows = [row for row in rows if row[call.filter]]
    if call.argument is None:
        return len(rows)
    values = [row[call.argument] for row in rows if row[call.argument] is not None]
    if call.kind.endswith("distinct"):
        values = list({canonical(value): value for value in values}.values())
    if call.kind.startswith("count"):
        return len(values)
    if not values:
        return None
    if call.kind in ("min", "max"):
        pick = max if call.kind == "max" else min
        return (
            pick(values, key=lambda v: (v != v, v))
            if isinstance(values[0], float)
            else pick(values)
        )
    if isinstance(values[0], float):
        if any(math.isnan(v) for v in values) or {math.inf, -math.inf} <= set(values):
            return math.nan
        infinite = [v for v in values if math.isinf(v)]
        if infinite:
            return infinite[0]
        exact = sum(map(Fraction, values))
        try:
            return float(exact)
        except OverflowError:
            return math.copysign(math.inf, exact)
    return sum(values)


VALUES: dict[str, tuple[pa.DataType, pa.DataType, Callable[[random.Random], Any]]] = {
    "int": (pa.int32(), pa.int64(), lambda c: c.randrange(-3, 4)),
    "bigint": (pa.int64(), pa.int64(), lambda c: c.randrange(-(2**50), 2**50)),
    "double": (
        pa.float64(),
        pa.float64(),
        lambda c: c.choice(
            [0.1, -0.1, 1e16, -1e16, 1e300, 5e-324, math.nan, math.inf, -math.inf, -0.0, 0.0]
        ),
    ),
    "decimal": (
        pa.decimal128(10, 2),
        pa.decimal128(20, 2),
        lambda c: Decimal(c.randrange(-(10**9), 10**9)) / 100,
    ),
    "string": (
        pa.string(),
        pa.string(),
        lambda c: "prefixed" + c.choice(["", "a", "b", "ü", "zz"]),
    ),
    "date": (
        pa.date32(),
        pa.date32(),
        lambda c: __import__("datetime").date(2020, 1, c.randrange(1, 9)),
    ),
}


@pytest.mark.parametrize("keys", [0, 1])
@pytest.mark.parametrize("kind", VALUES)
def test_aggregates(tmp_path: Any, kind: str, keys: int) -> None:
    argument, result, pick = VALUES[kind]
    for seed in range(5):
        chance = random.Random(f"{kind} {keys} {seed}")
        source = scan("a", *[pa.string()] * keys, argument, pa.bool_())
        calls = [
            Call("count", None, None, INT),
            Call("count", keys, None, INT),
            Call("count_distinct", keys, None, INT),
        ]
        calls += [Call("min", keys, None, argument), Call("max", keys, keys + 1, argument)]
        if kind not in ("string", "date"):
            calls += [Call("sum", keys, keys + 1, result), Call("sum_distinct", keys, None, result)]
        types = [pa.string()] * keys + [call.type for call in calls]
        node = Aggregate(
            **PLAIN,
            over=source,
            keys=tuple(range(keys)),
            calls=tuple(calls),
            columns=pa.schema([(f"c{i}", t) for i, t in enumerate(types)]),
        )
        run = Run(str(tmp_path / str(seed)), node)

        def make(chance: random.Random = chance) -> Row:
            key = [chance.choice([None, "x", "y"])] * keys
            value = None if chance.random() < 0.15 else pick(chance)
            return (*key, canonical_in(value), chance.choice([True, False, None]))

        for _ in range(12):
            run.step({"a": history(chance, make, run.whole["a"], 6)})
            expected = naive_aggregate(run.whole["a"], keys, node)
            assert run.output == expected


class NaN(float):
    """A NaN equal to itself, so that bags of rows can hold it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NaN)

    def __hash__(self) -> int:
        return 1


def canonical_in(value: Any) -> Any:
    return NaN("nan") if isinstance(value, float) and math.isnan(value) else value


def test_a_sum_that_overflows_stops(tmp_path: Any) -> None:
    node = Aggregate(
        **PLAIN,
        over=scan("a", pa.int64()),
        keys=(),
        calls=(Call("sum", 0, None, pa.int64()),),
        columns=pa.schema([("c0", pa.int64())]),
    )
    run = Run(str(tmp_path), node)
    run.step({"a": Counter({(2**62,): 1})})
    with pytest.raises(errors.ViewStopped):
        run.step({"a": Counter({(2**62,): 1})})
    run.step({"a": Counter({(2**62,): 1, (-5,): 1, (-(2**62),): 2})})
    assert run.output == {(-5,): 1}


def test_a_sum_that_overflows_without_ansi_wraps_around_or_is_null(tmp_path: Any) -> None:
    wide = pa.decimal128(38, 0)
    node = Aggregate(
        **PLAIN,
        over=scan("a", pa.int64(), wide),
        keys=(),
        calls=(
            Call("sum", 0, None, pa.int64(), "wrap"),
            Call("sum", 1, None, wide, "null"),
        ),
        columns=pa.schema([("c0", pa.int64()), ("c1", wide)]),
    )
    run = Run(str(tmp_path), node)
    most = Decimal(10**38 - 1)
    run.step({"a": Counter({(2**62, most): 2})})
    assert run.output == {(-(2**63), None): 1}
    run.step({"a": Counter({(2**62, most): -1})})
    assert run.output == {(2**62, most): 1}


# --- distinct, regroup ----------------------------------------------------------------------------


def test_distinct(tmp_path: Any) -> None:
    for seed in range(5):
        chance = random.Random(seed)
        source = scan("a", pa.int64(), pa.float64())
        run = Run(str(tmp_path / str(seed)), Distinct(over=source, columns=source.columns, **PLAIN))

        def make(chance: random.Random = chance) -> Row:
            return chance.randrange(3), canonical_in(chance.choice([0.0, 1.5, None, math.nan]))

        for _ in range(12):
            run.step({"a": history(chance, make, run.whole["a"], 5)})
            assert run.output == Counter({tuple(map(canonical, row)): 1 for row in run.whole["a"]})


def test_regroup_retracts_what_it_gave(tmp_path: Any) -> None:
    calls = 0

    def median(rows: pa.RecordBatch) -> pa.RecordBatch:
        nonlocal calls
        calls += 1
        groups: dict[Any, list[int]] = {}
        for key, value in zip(*(c.to_pylist() for c in rows.columns), strict=True):
            groups.setdefault(key, []).append(value)
        # Every computation rounds in another way, as an unstable aggregate would.
        found = [(key, sorted(v)[len(v) // 2] + calls / 1000) for key, v in groups.items()]
        return pa.RecordBatch.from_arrays(
            [
                pa.array([k for k, _ in found], pa.string()),
                pa.array([m for _, m in found], pa.float64()),
            ],
            names=["c0", "c1"],
        )

    source = scan("a", pa.string(), pa.int64())
    node = Regroup(
        **PLAIN,
        over=source,
        keys=(0,),
        groups=median,  # type: ignore[arg-type]
        columns=pa.schema([("c0", pa.string()), ("c1", pa.float64())]),
    )
    chance = random.Random(7)
    run = Run(str(tmp_path), node)

    def make() -> Row:
        return chance.choice(["x", "y", None]), chance.randrange(9)

    for _ in range(30):
        run.step({"a": history(chance, make, run.whole["a"], 4)})
        expected: dict[Any, list[int]] = {}
        for (key, value), weight in run.whole["a"].items():
            expected.setdefault(key, []).extend([value] * weight)
        got = {key: math.floor(value) for key, value in run.output}
        assert got == {key: sorted(v)[len(v) // 2] for key, v in expected.items()}
        assert all(weight == 1 for weight in run.output.values())


DOUBLES = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.25, 0.1, -0.1, 5e-324, 2.0**-1022, 1.7e308, -1.7e308, 2.0**960, 0.0, -0.0]),
)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            DOUBLES,
            st.one_of(st.integers(-3, 3), st.integers(-(2**40), 2**40)),
        ),
        max_size=40,
    )
)
def test_float_sums_are_exact(rows: list[tuple[int, float, int]]) -> None:
    groups, values, weight = (np.array(column) for column in zip(*rows, strict=True)) if rows else (
        np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64)
    )  # fmt: skip
    found = exact_float_sums(groups, values, weight, 4)
    for group in range(4):
        exact = sum((Fraction(v) * w for g, v, w in rows if g == group), Fraction(0))
        assert found[group] == exact * 2**1074


def test_keys_that_repeat_are_grouped_as_others_are() -> None:
    chance = random.Random(7)
    doubles = pa.array(chance.choices([0.0, -0.0, math.nan, None, 1.5], k=3_000))
    strings = pa.array(chance.choices(["", "a", None], k=3_000))
    one_by_one = pa.array(range(3_000))
    for keys in ([doubles], [strings], [doubles, strings, doubles], [strings, one_by_one]):
        touched, groups, found = _grouped(list(keys), 3_000, SEED)
        hashes = key_hashes(keys, 3_000, SEED)
        assert (touched[groups] == hashes).all()
        assert len({*hashes.tolist()}) == len(touched)
        assert (key_hashes(found, len(touched), SEED) == touched).all()


@pytest.mark.parametrize("kind", ["aggregate", "left", "regroup"])
def test_a_row_that_goes_and_was_never_there_stops(tmp_path: Any, kind: str) -> None:
    over = scan("a", INT, INT)
    columns = pa.schema([("c0", INT), ("c1", INT)])
    same: Any = lambda rows: rows  # noqa: E731
    node: Node = Regroup(over=over, keys=(0,), groups=same, columns=columns, **PLAIN)
    if kind == "aggregate":
        calls = (Call("count", None, None, INT),)
        node = Aggregate(over=over, keys=(0,), calls=calls, columns=columns, **PLAIN)
    if kind == "left":
        node = Join(
            kind="left", left=scan("b", INT, INT), right=over, left_keys=(0,), right_keys=(0,),
            null_safe=(False,), residual=None,
            columns=pa.schema([(f"c{i}", INT) for i in range(4)]), **PLAIN,
        )  # fmt: skip
    packs = Packs(str(tmp_path))
    engine = Engine({"v": node}, {"a": "a", "b": "b"}, packs, SEED)
    with pytest.raises(errors.ViewStopped, match="never there"):
        engine.step({"a": as_change(over, Counter({(1, 2): -1}))}, packs.attempt(0))
