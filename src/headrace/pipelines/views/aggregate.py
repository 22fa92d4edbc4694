"""Aggregates: one row of partial results a group, moved by the change alone.

Collection `g` has a row for each group: its keys, the number of its rows, and for each call what
the call needs to go on (`Part.fields`). A step adds up the change by group, reads the old row of
each touched group, and replaces it; the change of the output is the old result with -1 and the new
one with +1. A group without rows is gone; the one group of an aggregate without keys never is, and
is there before the first row.

* **count, sum, avg** add (`sums`: exactly). avg is a sum and a count; Spark itself divides.
* **min, max** keep the values of each group in order, as collection `v`: an insert compares with
  the extreme known; only when a row equal to it goes are the next values read, from its end of the
  order.
* **distinct** calls keep each value once with its number of rows, as collection `d`; a value counts
  when that number leaves zero, and stops counting when it comes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace import errors
from headrace.model.hashing import order64
from headrace.model.json_values import json_values
from headrace.pipelines.views.algebra import Aggregate, Call
from headrace.pipelines.views.changes import (
    Failed,
    Numbers,
    State,
    States,
    Step,
    Words,
    change,
    check_same,
    consolidated,
    each_once,
    joined,
    kept_columns,
    key_hashes,
    keyed_rows,
    keys_of,
    never_there,
    row_columns,
    state_schema,
    weights,
)
from headrace.pipelines.views.sums import (
    added_up,
    carried,
    decimals,
    exact_float_sums,
    integers,
    limbs_of,
    packed,
    rounded,
    unpacked,
)

Columns = list[pa.Array]
Mask = npt.NDArray[np.bool_]


@dataclass
class Rows:
    """The rows of a change that a call looks at."""

    group: Numbers
    """Which of the touched groups each row belongs to."""
    weight: Numbers
    value: pa.Array | None
    groups: int
    """How many groups are touched."""

    def total(self, of_row: Numbers) -> Numbers:
        """The sum of weight * `of_row` by group."""
        return added_up(self.group, self.weight * of_row, self.groups)

    @property
    def count(self) -> Numbers:
        """How many rows each group has more, or fewer."""
        return added_up(self.group, self.weight, self.groups)


class Part(Protocol):
    """How one kind of call keeps its partial result."""

    def fields(self) -> list[pa.DataType]:
        """The types of the columns it keeps."""

    def add(self, old: Columns, rows: Rows) -> Columns:
        """Its columns after a change; `old` has a null where there was no group."""

    def result(self, kept: Columns) -> tuple[pa.Array, Mask | None]:
        """The call's value, and where it has none since it does not fit its type."""


def _numbers(column: pa.Array) -> Numbers:
    filled = column.fill_null(0) if column.null_count else column
    found: Numbers = filled.to_numpy(zero_copy_only=False)
    return found


class Count:
    """count(*), count(x)."""

    def fields(self) -> list[pa.DataType]:
        """See `Part`."""
        return [pa.int64()]

    def add(self, old: Columns, rows: Rows) -> Columns:
        """See `Part`."""
        return [pa.array(_numbers(old[0]) + rows.count)]

    def result(self, kept: Columns) -> tuple[pa.Array, Mask | None]:
        """See `Part`."""
        return kept[0], None


class WideSum:
    """The sum of integers or decimals: how many values, then limbs."""

    def __init__(self, call: Call) -> None:
        """`call.type` is the type of the result."""
        self.type = call.type
        self.overflow = call.overflow
        self.limbs = 4 if pa.types.is_decimal(call.type) else 2

    def fields(self) -> list[pa.DataType]:
        """See `Part`."""
        return [pa.int64()] * (1 + self.limbs)

    def add(self, old: Columns, rows: Rows) -> Columns:
        """See `Part`."""
        assert rows.value is not None
        count = _numbers(old[0]) + rows.count
        limbs = [
            _numbers(column) + rows.total(limb)
            for column, limb in zip(old[1:], limbs_of(rows.value), strict=True)
        ]
        return [pa.array(count), *map(pa.array, carried(limbs))]

    def result(self, kept: Columns) -> tuple[pa.Array, Mask | None]:
        """See `Part`."""
        limbs = [_numbers(column) for column in kept[1:]]
        if self.limbs == 2:
            whole, over = integers(limbs)
            values = pa.array(whole)
        else:
            values, over = decimals(limbs, self.type)
        some = pa.array(_numbers(kept[0]) > 0)
        sums = pc.if_else(some, values, pa.nulls(len(values), self.type))
        return sums, over if self.overflow == "error" else None


class FloatSum:
    """The sum of floats: how many values, NaNs, infinities of both signs, the exact finite sum."""

    def __init__(self, call: Call) -> None:
        """`call.type` is the type of the result: double."""
        self.type = call.type

    def fields(self) -> list[pa.DataType]:
        """See `Part`."""
        return [pa.int64()] * 4 + [pa.binary()]

    def add(self, old: Columns, rows: Rows) -> Columns:
        """See `Part`."""
        assert rows.value is not None
        values = rows.value.cast(pa.float64()).to_numpy(zero_copy_only=False)
        counts = [_numbers(column) for column in old[:4]]
        counts[0] = counts[0] + rows.count
        group, weight, finite = rows.group, rows.weight, np.isfinite(values)
        if not finite.all():
            kinds = (np.isnan(values), values == np.inf, values == -np.inf)
            for at, kind in enumerate(kinds, 1):
                counts[at] = counts[at] + rows.total(kind.astype(np.int64))
            group, values, weight = group[finite], values[finite], weight[finite]
        sums = exact_float_sums(group, values, weight, rows.groups)
        new = [
            packed(unpacked(before or b"") + plus)
            for before, plus in zip(old[4].to_pylist(), sums, strict=True)
        ]
        return [*map(pa.array, counts), pa.array(new, pa.binary())]

    def result(self, kept: Columns) -> tuple[pa.Array, Mask | None]:
        """See `Part`."""
        count, nan, up, down = (_numbers(column) for column in kept[:4])
        sums = np.array([rounded(unpacked(data or b"")) for data in kept[4].to_pylist()], float)
        sums = np.where(up > 0, np.inf, np.where(down > 0, -np.inf, sums))
        sums = np.where((nan > 0) | ((up > 0) & (down > 0)), np.nan, sums)
        return pa.array(sums, mask=count <= 0).cast(self.type), None


class Extreme:
    """min or max: the value known; `add` is given the new one."""

    def __init__(self, call: Call) -> None:
        """`call.type` is the type of the argument and of the result."""
        self.type = call.type

    def fields(self) -> list[pa.DataType]:
        """See `Part`."""
        return [self.type]

    def add(self, old: Columns, rows: Rows) -> Columns:
        """See `Part`: what `_extremes` found is the rows' value, one a group."""
        del old
        return [rows.value]

    def result(self, kept: Columns) -> tuple[pa.Array, Mask | None]:
        """See `Part`."""
        return kept[0], None


def part_of(call: Call) -> Part:
    """How a call is kept."""
    if call.kind in ("count", "count_distinct"):
        return Count()
    if call.kind in ("min", "max"):
        return Extreme(call)
    return FloatSum(call) if pa.types.is_floating(call.type) else WideSum(call)


def _values_of(node: Aggregate, kinds: Sequence[str]) -> dict[tuple[int, int | None], int]:
    """The different (argument, filter) of calls of these kinds, numbered."""
    found: dict[tuple[int, int | None], int] = {}
    for call in node.calls:
        if call.kind in kinds and call.argument is not None:
            found.setdefault((call.argument, call.filter), len(found))
    return found


ORDERED = ("min", "max")
DISTINCT = ("count_distinct", "sum_distinct")


def collections(node: Aggregate) -> dict[str, pa.Schema]:
    """What the aggregate keeps."""
    kept = {"g": state_schema(_group_schema(node))}
    for (argument, _), number in _values_of(node, ORDERED).items():
        kept[f"v{number}"] = state_schema(_value_schema(node, argument), ordered=True)
    for (argument, _), number in _values_of(node, DISTINCT).items():
        kept[f"d{number}"] = state_schema(_value_schema(node, argument))
    return kept


def _key_fields(node: Aggregate) -> list[pa.Field]:
    return [node.inputs[0].columns.field(i) for i in node.keys]


def _value_schema(node: Aggregate, argument: int) -> pa.Schema:
    value = node.inputs[0].columns.field(argument).with_name("value")
    return pa.schema([*_key_fields(node), value])


def _group_schema(node: Aggregate) -> pa.Schema:
    fields = [*_key_fields(node), pa.field("n", pa.int64())]
    for i, call in enumerate(node.calls):
        fields += [pa.field(f"p{i}_{j}", kind) for j, kind in enumerate(part_of(call).fields())]
    return pa.schema(fields)


def step(node: Aggregate, states: States, inputs: Sequence[pa.RecordBatch], seed: int) -> Step:
    """The change of an aggregate."""
    columns, weight = row_columns(inputs[0]), weights(inputs[0])
    touched, groups, keys = _grouped([columns[i] for i in node.keys], len(weight), seed)
    old = states["g"].probe(touched)
    known = np.searchsorted(touched, keys_of(old))
    check_same(kept_columns(old)[: len(keys)], [key.take(pa.array(known)) for key in keys])

    before = _aligned(old, known, len(touched))[len(keys) :]
    n = _numbers(before[0]) + Rows(groups, weight, None, len(touched)).count
    if (n < 0).any():
        raise never_there("aggregate")
    state: dict[str, pa.RecordBatch] = {}
    after: Columns = [pa.array(n)]
    at = 1
    for call in node.calls:
        part = part_of(call)
        width = len(part.fields())
        mine = before[at : at + width]
        rows = _rows_of(node, call, columns, weight, groups, len(touched))
        if call.kind in ORDERED:
            rows = _extremes(node, call, states, state, mine[0], rows, keys, seed, touched)
        elif call.kind in DISTINCT:
            rows = _once(node, call, states, state, rows, keys, seed)
        after += part.add(mine, rows)
        at += width
    there = np.zeros(len(touched), bool)
    there[known] = True
    stays = (n > 0) if node.keys else np.ones(1, bool)
    state["g"] = keyed_rows(
        _twice([*keys, *before], [*keys, *after], there, stays),
        np.repeat([-1, 1], [there.sum(), stays.sum()]),
        _twice(keys, keys, there, stays),
        _group_schema(node),
        seed,
    )
    output, failed = [], []
    for sign, kept, chosen in ((-1, before, there), (1, after, stays)):
        result, too_large = _results(node, keys, kept, chosen)
        count = len(result[-1]) if result else int(chosen.sum())
        output.append(change(result, np.full(count, sign), node.columns))
        failed += [_failed(node, reason, groups, sign) for reason, groups in too_large]
    if too_large and not node.tolerant:
        names, rows, reason = failed[-1]
        group = dict(zip(names, [json_values(key)[0] for key in row_columns(rows)], strict=True))
        raise errors.ExpressionFailed(
            f"{reason} in the group {group}" if group else reason,
            fix="cast the summed column to a wider decimal, use try_sum, or say "
            "on_error='set_aside'",
        )
    return Step(consolidated(joined(output, node.columns), seed), state, failed)


def _failed(node: Aggregate, reason: str, keys: Columns, sign: int) -> Failed:
    """Groups that have no result, by their keys."""
    fields = _key_fields(node)
    names = [node.inputs[0].names[i] for i in node.keys]
    count = len(keys[0]) if keys else 1
    return Failed(names, change(keys, np.full(count, sign), pa.schema(fields)), reason)


def snapshot(node: Aggregate, states: States, seed: int) -> Iterator[pa.RecordBatch]:
    """The whole output, from what is kept, in chunks."""
    del seed
    for chunk in states["g"].scan():
        columns = kept_columns(chunk)
        keys, kept = columns[: len(node.keys)], columns[len(node.keys) :]
        result, _ = _results(node, keys, kept, np.ones(chunk.num_rows, bool))
        rows = len(result[-1]) if result else chunk.num_rows
        yield change(result, np.ones(rows), node.columns)


def _grouped(keys: Columns, rows: int, seed: int) -> tuple[Words, Numbers, Columns]:
    """The key hashes that occur, sorted; which of them each row has; and the keys of each."""
    if not keys:
        return np.zeros(1, np.uint64), np.zeros(rows, np.int64), []
    codes, once = each_once(keys)
    touched, heads, groups = np.unique(
        key_hashes(once, len(once[0]), seed), return_index=True, return_inverse=True
    )
    found = [key.take(pa.array(heads)) for key in once]
    check_same(once, [key.take(pa.array(groups)) for key in found])
    return touched, groups if codes is None else groups[codes], found


def _aligned(old: pa.RecordBatch, known: Numbers, groups: int) -> Columns:
    """The old rows of the touched groups, nulls where there was none."""
    if len(known) == groups:  # both are sorted
        return kept_columns(old)
    places = np.full(groups, -1)
    places[known] = np.arange(old.num_rows)
    index = pa.array(places, mask=places < 0)
    return [column.take(index) for column in kept_columns(old)]


def _twice(old: Columns, new: Columns, there: Any, stays: Any) -> Columns:
    """Old rows that were there, then new rows that stay."""
    pairs = zip(_chosen(old, there), _chosen(new, stays), strict=True)
    return [pa.concat_arrays(pair) for pair in pairs]


def _chosen(columns: Columns, mask: Any) -> Columns:
    """These rows of columns; most often that is all."""
    if mask.all():
        return columns
    wanted = pa.array(mask)
    return [column.filter(wanted) for column in columns]


def _results(
    node: Aggregate, keys: Columns, kept: Columns, chosen: Any
) -> tuple[Columns, list[tuple[str, Columns]]]:
    """The output rows of these groups, and the keys of those that have none, by the reason."""
    own, kept = _chosen(keys, chosen), _chosen(kept, chosen)
    at, found = 1, list(own)
    fits: Mask | None = None
    too_large: list[tuple[str, Columns]] = []
    for call in node.calls:
        part = part_of(call)
        width = len(part.fields())
        values, over = part.result(kept[at : at + width])
        found.append(values)
        at += width
        if over is not None and over.any():
            new = over if fits is None else over & fits
            groups = [key.filter(pa.array(new)) for key in own]
            too_large += [(f"a sum does not fit {call.type}", groups)] if new.any() else []
            fits = ~over if fits is None else fits & ~over
    if fits is not None:
        found = [column.filter(pa.array(fits)) for column in found]
    return found, too_large


def _rows_of(
    node: Aggregate,
    call: Call,
    columns: Columns,
    weight: Numbers,
    groups: Numbers,
    count: int,
) -> Rows:
    """The rows a call looks at: its filter is true and its argument is not null."""
    del node
    mask: Any = None
    if call.filter is not None:
        mask = columns[call.filter].fill_null(False)
    if call.argument is not None and columns[call.argument].null_count:
        valid = columns[call.argument].is_valid()
        mask = valid if mask is None else pc.and_(mask, valid)
    value = None if call.argument is None else columns[call.argument]
    if mask is None:
        return Rows(groups, weight, value, count)
    chosen = mask.to_numpy(zero_copy_only=False)
    return Rows(
        groups[chosen], weight[chosen], None if value is None else value.filter(mask), count
    )


def _once(
    node: Aggregate,
    call: Call,
    states: States,
    state: dict[str, pa.RecordBatch],
    rows: Rows,
    keys: Columns,
    seed: int,
) -> Rows:
    """Each value once: the values that began or ceased to be there, with +1 or -1."""
    assert call.argument is not None
    assert rows.value is not None
    name = f"d{_values_of(node, DISTINCT)[call.argument, call.filter]}"
    index = pa.array(rows.group)
    columns = [*(key.take(index) for key in keys), rows.value]
    values = keyed_rows(columns, rows.weight, columns, _value_schema(node, call.argument), seed)
    state[name] = values
    old = states[name].weights_of(values)
    new = old + weights(values)
    moved = (new > 0).astype(np.int64) - (old > 0).astype(np.int64)
    kept = kept_columns(values)
    touched = key_hashes(keys, rows.groups, seed)
    groups = np.searchsorted(touched, key_hashes(kept[:-1], len(moved), seed))
    return Rows(groups, moved, kept[-1], rows.groups)


def _extremes(
    node: Aggregate,
    call: Call,
    states: States,
    state: dict[str, pa.RecordBatch],
    known: pa.Array,
    rows: Rows,
    keys: Columns,
    seed: int,
    touched: Words,
) -> Rows:
    """The new extreme of each touched group."""
    assert call.argument is not None
    assert rows.value is not None
    name = f"v{_values_of(node, ORDERED)[call.argument, call.filter]}"
    index = pa.array(rows.group)
    columns = [*(key.take(index) for key in keys), rows.value]
    order, exact = order64(rows.value)
    values = keyed_rows(
        columns,
        rows.weight,
        columns[:-1],
        _value_schema(node, call.argument),
        seed,
        order,
    )
    state[name] = values
    highest = call.kind == "max"
    finder = _Finder(values, exact, highest, states[name])
    found = finder.after(touched, known)
    return Rows(rows.group, rows.weight, found, rows.groups)


class _Finder:
    """Finds the extreme of groups after a change of their ordered values."""

    def __init__(self, values: pa.RecordBatch, exact: bool, highest: bool, state: State) -> None:
        self.k = keys_of(values)
        self.o: Words = values.column("_o").to_numpy()
        self.h: Words = values.column("_h").to_numpy()
        self.w = weights(values)
        self.value = values.column(values.num_columns - 1)
        self.exact = exact
        self.highest = highest
        self.state = state

    def after(self, touched: Words, known: pa.Array) -> pa.Array:
        """The new extreme of each touched group; `known` are the old ones.

        All groups at once where rows only come and no two values tie; the others one by one.
        """
        if not len(self.k):
            return known
        starts = np.searchsorted(self.k, touched, "left")
        ends = np.searchsorted(self.k, touched, "right")
        changed = ends > starts
        best = np.where(changed, ends - 1 if self.highest else starts, 0)
        beside = np.clip(best + (-1 if self.highest else 1), starts, np.maximum(ends - 1, 0))
        old, _ = order64(known)
        has_old = known.is_valid().to_numpy(zero_copy_only=False)
        gone = np.concatenate(([0], np.cumsum(self.w < 0)))
        order = self.o[best]
        beyond = order > old if self.highest else order < old
        ties = (has_old & (order == old)) | ((beside != best) & (self.o[beside] == order))
        single = changed & ((gone[ends] > gone[starts]) | (ties & (not self.exact)))
        chosen = changed & ~single & (beyond | ~has_old)
        found = pc.if_else(pa.array(chosen), self.value.take(pa.array(best)), known)
        if not single.any():
            return found
        values = found.to_pylist()
        for i in np.flatnonzero(single).tolist():
            before = (int(old[i]), values[i]) if has_old[i] else None
            values[i] = self._one(int(touched[i]), int(starts[i]), int(ends[i]), before)
        return pa.array(values, known.type)

    def _one(self, key: int, low: int, high: int, best: tuple[int, Any] | None) -> Any:
        """The new extreme of one group, whose rows of the change are those from low to high."""
        gone = self.w[low:high] < 0
        if gone.any() and (best is None or self._reaches(low, high, gone, best)):
            best = self._walk(key, low, high)  # the extreme may go: read on from there
        for at in self._near_end(low, high):
            best = self._better(best, (int(self.o[at]), self.value[at].as_py()))
        return None if best is None else best[1]

    def _near_end(self, low: int, high: int) -> list[int]:
        """The inserted rows that may be the extreme: the outermost, and those that tie with it."""
        inside = range(high - 1, low - 1, -1) if self.highest else range(low, high)
        found: list[int] = []
        for at in inside:
            if self.w[at] <= 0:
                continue
            if found and (self.exact or self.o[at] != self.o[found[0]]):
                break
            found.append(at)
        return found

    def _reaches(self, low: int, high: int, gone: Any, best: tuple[int, Any]) -> bool:
        """Whether a row that goes may be the extreme."""
        orders = self.o[low:high][gone]
        outermost = int(orders.max() if self.highest else orders.min())
        return outermost >= best[0] if self.highest else outermost <= best[0]

    def _better(self, one: tuple[int, Any] | None, other: tuple[int, Any]) -> tuple[int, Any]:
        if one is None:
            return other
        if self.exact or one[0] != other[0]:
            return (max if self.highest else min)(one, other, key=lambda pair: pair[0])
        return (max if self.highest else min)(one, other, key=lambda pair: pair[1])

    def _walk(self, key: int, low: int, high: int) -> tuple[int, Any] | None:
        """The extreme of the rows that were there and still are, read from its end."""
        change_of = {(int(self.o[at]), int(self.h[at])): int(self.w[at]) for at in range(low, high)}
        best: tuple[int, Any] | None = None
        for chunk in self.state.ordered(key, reverse=self.highest):
            orders, hashes = chunk.column("_o").to_numpy(), chunk.column("_h").to_numpy()
            weight = chunk.column("_w").to_numpy()
            value = chunk.column(chunk.num_columns - 1)
            for at in range(chunk.num_rows):
                order = int(orders[at])
                if best is not None and (self.exact or order != best[0]):
                    return best
                left = int(weight[at]) + change_of.get((order, int(hashes[at])), 0)
                if left > 0:
                    best = self._better(best, (order, value[at].as_py()))
        return best
