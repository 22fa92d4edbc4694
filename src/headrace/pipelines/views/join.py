"""Joins of every kind, from three sets of pairs.

Let L and R be the sides before the change, dL and dR their changes. The pairs that come or go are::

    A = L x dR        B = dL x R        C = dL x dR          weights multiply

each cut down to equal keys and to what the residual condition keeps; A + B + C is the change of the
inner join. All other kinds are the inner join and rows *without a partner*::

    left       inner + (rows of L without a partner, padded with nulls)
    full       left  + (rows of R without a partner, padded)
    semi       rows of L with a partner          anti   rows of L without one
    existence  semi with true + anti with false
    single     left, and more than one partner is an error (a scalar subquery)

(`right` is `left` with the sides exchanged.) Whether a row has a partner is known from a **count**
kept as state, so that nothing is read but what changes. Without a residual the count belongs to the
key: collection `n`, one row a key, whose weight is the number of rows on the other side. Only keys
whose count goes from or to zero touch the rows of this side::

    d(rows with a partner) = dL [n_new > 0] + L ([n_new > 0] - [n_old > 0])

With a residual it belongs to the row: collection `m`, one row for each different row of this side,
whose weight is the number of its partners. A row of L that stays gains its pairs in A; one that
appears counts its pairs in B and C; one that is gone takes its count with it.

A row with a null among its keys has no partner (unless the equality is null-safe): where rows
without a partner are shown it is kept under a hash that the other side does not use, else it is
left out. Without keys, every row has the same one: a join with a one-row side reads the other side
whole when the one row changes.

`snapshot` gives the whole output from what is kept, for views that are built on top later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace import errors
from headrace.pipelines.views.algebra import Join
from headrace.pipelines.views.changes import (
    IDENTITY,
    Failed,
    Numbers,
    States,
    Step,
    Words,
    change,
    check_same,
    consolidated,
    distinct,
    halved,
    joined,
    kept_columns,
    keyed,
    keyed_rows,
    keys_of,
    never_there,
    nothing,
    pairs,
    row_columns,
    state_schema,
    weights,
)
from headrace.tables.runs import consolidate, with_weights

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Side:
    """One side of a join: where its columns and its collections are."""

    rows: str
    """The collection of its rows."""
    counts: str
    """The collection of counts of partners of *its* rows, by key (on the other side's keys)."""
    keys: Sequence[int]
    strict: Sequence[int]
    """The keys of which a null matches nothing."""
    schema: pa.Schema


def sides(node: Join) -> tuple[Side, Side]:
    """Left and right."""
    places = [i for i, safe in enumerate(node.null_safe) if not safe]
    return (
        Side("l", "ln", node.left_keys, [node.left_keys[i] for i in places], node.left.columns),
        Side("r", "rn", node.right_keys, [node.right_keys[i] for i in places], node.right.columns),
    )


def shows_unmatched(node: Join) -> tuple[bool, bool]:
    """Whether rows of the left and of the right without a partner are part of the output."""
    left = node.kind in ("left", "full", "anti", "existence", "single")
    return left, node.kind in ("right", "full")


def needs_pairs(node: Join) -> bool:
    """Whether the output holds pairs, and not only rows of the left."""
    return node.kind not in ("semi", "anti", "existence")


def counted(node: Join) -> tuple[bool, bool]:
    """Whether the partners of left rows and of right rows are counted."""
    left, right = shows_unmatched(node)
    return left or node.kind == "semi", right


def collections(node: Join) -> dict[str, pa.Schema]:
    """What the join keeps."""
    left, right = sides(node)
    kept = {"l": state_schema(left.schema), "r": state_schema(right.schema)}
    for side, other, wanted in zip((left, right), (right, left), counted(node), strict=True):
        if wanted and node.residual is None:
            kept[side.counts] = state_schema(_key_schema(other))
        elif wanted:
            kept[side.counts] = state_schema(side.schema)
    if node.residual is None and not needs_pairs(node):
        del kept["r"]  # the counts by key say it all
    return kept


def _key_schema(side: Side) -> pa.Schema:
    return pa.schema([side.schema.field(i) for i in side.keys])


def step(node: Join, states: States, inputs: Sequence[pa.RecordBatch], seed: int) -> Step:
    """The change of a join."""
    both = sides(node)
    left, right = both
    kept = collections(node)
    shows = shows_unmatched(node)
    deltas = [
        _taken(batch, side, shown, seed, number)
        for number, (batch, side, shown) in enumerate(zip(inputs, both, shows, strict=True))
    ]
    d_left, d_right = deltas
    output: list[pa.RecordBatch] = []
    blocks: list[Block] = []
    failed: list[Failed] = []
    if "r" in kept:
        old_left = states["l"].probe(distinct(keys_of(d_right)))
        old_right = states["r"].probe(distinct(keys_of(d_left)))
        blocks = [
            Block.of(old_left, d_right, left, right),
            Block.of(d_left, old_right, left, right),
            Block.of(d_left, d_right, left, right),
        ]
        if node.residual is not None:
            blocks = _residual(node, blocks, failed)
        if needs_pairs(node):
            output.extend(change(b.columns(), b.weights(), node.columns) for b in blocks)
    state = {"l": d_left, "r": d_right}
    for number, side in enumerate(both):
        if not counted(node)[number]:
            continue
        if node.residual is None:
            found = _by_key(
                node, states, side, both[1 - number], deltas[number], deltas[1 - number], seed
            )
        else:
            views = [block if number == 0 else block.turned() for block in blocks]
            gains, arrivals = (views[0], views[1:]) if number == 0 else (views[1], views[::2])
            found = _by_row(node, states, side, deltas[number], gains, arrivals)
        matched, unmatched, state[side.counts] = found
        output.extend(_shown(node, number, matched, unmatched))
    return Step(joined(output, node.columns), {name: state[name] for name in kept}, failed)


def _taken(
    batch: pa.RecordBatch, side: Side, shown: bool, seed: int, number: int
) -> pa.RecordBatch:
    """A side's change, keyed.

    Rows with a null among their keys are left out; where rows without a partner are shown they get
    a key of their own instead, which no row of the other side has.
    """
    null: Any = None
    for i in side.strict:
        column = batch.column(i)
        if column.null_count:
            null = column.is_null() if null is None else pc.or_(null, column.is_null())
    if null is None:
        return keyed(batch, side.keys, seed)
    found = keyed(batch.filter(pc.invert(null)), side.keys, seed)
    if not shown:
        return found
    lone = keyed(batch.filter(null), range(len(side.schema)), seed ^ (2 + number))
    return consolidate(pa.concat_batches([found, lone]))


@dataclass
class Block:
    """Pairs of rows: two keyed batches and the indexes into them."""

    left: pa.RecordBatch
    right: pa.RecordBatch
    in_left: Numbers
    in_right: Numbers

    @classmethod
    def of(cls, left: pa.RecordBatch, right: pa.RecordBatch, a: Side, b: Side) -> Block:
        """All pairs with equal keys."""
        in_left, in_right = pairs(left, right)
        if len(in_left):
            check_same(
                _taken_at([left.column(IDENTITY + i) for i in a.keys], in_left),
                _taken_at([right.column(IDENTITY + i) for i in b.keys], in_right),
            )
        return cls(left, right, in_left, in_right)

    def columns(self) -> list[pa.Array]:
        """The columns of the pairs, left then right."""
        return [
            *_taken_at(kept_columns(self.left), self.in_left),
            *_taken_at(kept_columns(self.right), self.in_right),
        ]

    def weights(self) -> Numbers:
        """The product of both sides' weights."""
        product: Numbers = weights(self.left)[self.in_left] * weights(self.right)[self.in_right]
        return product

    def only(self, chosen: Numbers) -> Block:
        """Some of the pairs."""
        return Block(self.left, self.right, self.in_left[chosen], self.in_right[chosen])

    def turned(self) -> Block:
        """The same with left and right exchanged."""
        return Block(self.right, self.left, self.in_right, self.in_left)

    def partners(self) -> Numbers:
        """For each row of the left, the weight of its partners."""
        total = np.zeros(self.left.num_rows, np.int64)
        np.add.at(total, self.in_left, weights(self.right)[self.in_right])
        return total


def _taken_at(columns: Sequence[pa.Array], rows: Numbers) -> Sequence[pa.Array]:
    """These rows of the columns; as they are if these are all, in order."""
    if len(columns) and len(rows) == len(columns[0]) and (rows == np.arange(len(rows))).all():
        return columns
    index = pa.array(rows)
    return [column.take(index) for column in columns]


def _residual(node: Join, blocks: list[Block], failed: list[Failed]) -> list[Block]:
    """The pairs that the residual condition keeps: asked of Spark once, for all blocks.

    A pair that it fails on is no pair; where that is tolerated, it is added to `failed`. Otherwise
    it must cancel: the new row of one side and the old one of the other never were a pair.
    """
    residual = node.residual
    assert residual is not None
    sizes = [len(block.in_left) for block in blocks]
    if not sum(sizes):
        return blocks
    schema = pa.schema(
        [
            (f"c{i}", field.type)
            for i, field in enumerate([*node.inputs[0].columns, *node.inputs[1].columns])
        ]
    )
    starts = np.cumsum([0, *sizes])
    asked = [
        change(block.columns(), np.arange(start, start + size), schema)
        for block, start, size in zip(blocks, starts, sizes, strict=False)
        if size
    ]
    candidates = joined(asked, schema)
    found, bad = [], []
    weight = np.concatenate([block.weights() for block in blocks])
    for part in halved(
        candidates.num_rows, lambda first, last: residual(candidates.slice(first, last - first))
    ):
        if isinstance(part, tuple):
            at, error = part
            pair = row_columns(candidates.slice(at, 1))
            bad.append((change(pair, weight[at : at + 1], schema), error))
        else:
            found.append(part)
    if node.tolerant:
        names = [*node.inputs[0].names, *node.inputs[1].names]
        failed += [Failed(names, pair, error.fact) for pair, error in bad]
    elif consolidated(joined([pair for pair, _ in bad], schema), 0).num_rows:
        raise bad[0][1]
    kept = np.sort(weights(joined(found, schema)))
    return [
        block.only(kept[(kept >= start) & (kept < start + size)] - start)
        for block, start, size in zip(blocks, starts, sizes, strict=False)
    ]


def _by_key(
    node: Join,
    states: States,
    side: Side,
    other: Side,
    d_this: pa.RecordBatch,
    d_other: pa.RecordBatch,
    seed: int,
) -> tuple[pa.RecordBatch, pa.RecordBatch, pa.RecordBatch]:
    """Changes of the rows with and without a partner, and of the counts, by key."""
    others = kept_columns(d_other)
    keys = [others[i] for i in other.keys]
    d_counts = keyed_rows(keys, weights(d_other), keys, _key_schema(other), seed)
    touched = np.union1d(keys_of(d_counts), keys_of(d_this))
    old = _weight_by_key(states[side.counts].probe(touched), touched)
    new = old + _weight_by_key(d_counts, touched)
    if (new < 0).any():
        raise never_there("join")
    if node.kind == "single" and (new > 1).any():
        _refuse_many(states[side.rows].probe(touched[new > 1]), d_this, touched[new > 1])
    rising, falling = (old == 0) & (new > 0), (old > 0) & (new == 0)
    crossed = states[side.rows].probe(touched[rising | falling])
    of_row = np.searchsorted(touched, keys_of(crossed))
    sign = np.where(rising[of_row], 1, -1)
    rows = change(kept_columns(crossed), weights(crossed) * sign, side.schema)
    away = change(kept_columns(crossed), weights(crossed) * -sign, side.schema)
    own = change(kept_columns(d_this), weights(d_this), side.schema)
    has = new[np.searchsorted(touched, keys_of(d_this))] > 0
    matched = joined([own.filter(pa.array(has)), rows], side.schema)
    unmatched = joined([own.filter(pa.array(~has)), away], side.schema)
    return matched, unmatched, d_counts


def _weight_by_key(keyed_batch: pa.RecordBatch, keys: Any) -> Numbers:
    """The sum of weights for each of these keys."""
    total = np.zeros(len(keys), np.int64)
    np.add.at(total, np.searchsorted(keys, keys_of(keyed_batch)), weights(keyed_batch))
    return total


def _by_row(
    node: Join,
    states: States,
    side: Side,
    d_this: pa.RecordBatch,
    gains: Block,
    arrivals: Sequence[Block],
) -> tuple[pa.RecordBatch, pa.RecordBatch, pa.RecordBatch]:
    """The same by row, where a residual condition decides who is a partner.

    This side is the left one of the blocks. `gains`: pairs that come or go for rows that were
    there; `arrivals`: the pairs of the rows in this side's own change.
    """
    rows, (at_change, at_standing) = _each_once(d_this, gains.left)
    d_weight, d_count, fresh = (np.zeros(rows.num_rows, np.int64) for _ in range(3))
    d_weight[at_change] = weights(d_this)
    d_count[at_standing] = gains.partners()
    fresh[at_change] = sum(block.partners() for block in arrivals)
    old_weight = states[side.rows].weights_of(rows)
    old_count = states[side.counts].weights_of(rows)
    new_weight = old_weight + d_weight
    stays, appears = (old_weight != 0) & (new_weight != 0), (old_weight == 0) & (new_weight != 0)
    new_count = np.where(stays, old_count + d_count, np.where(appears, fresh, 0))
    if (new_count < 0).any():
        raise never_there("join")
    if node.kind == "single" and (new_count > 1).any():
        raise _many()

    def changed(new: Mask, old: Mask) -> pa.RecordBatch:
        weight = new_weight * new - old_weight * old
        batch = change(kept_columns(rows), weight, side.schema)
        return batch.filter(pa.array(weight != 0))

    matched = changed(new_count > 0, old_count > 0)
    unmatched = changed(new_count == 0, old_count == 0)
    counts = with_weights(rows, new_count - old_count)
    return matched, unmatched, counts.filter(pa.array(new_count != old_count))


def _each_once(
    one: pa.RecordBatch, other: pa.RecordBatch
) -> tuple[pa.RecordBatch, tuple[Numbers, Numbers]]:
    """Each different row of two keyed batches once, sorted, and where the rows of both are."""
    both = pa.concat_batches([one, other])
    k, h = keys_of(both), both.column("_h").to_numpy()
    order = np.lexsort((h, k))
    first = np.ones(len(order), bool)
    first[1:] = (k[order][1:] != k[order][:-1]) | (h[order][1:] != h[order][:-1])
    place = np.empty(len(order), np.int64)
    place[order] = np.cumsum(first) - 1
    rows = both.take(pa.array(order[first]))
    return rows, (place[: one.num_rows], place[one.num_rows :])


def _shown(
    node: Join, number: int, matched: pa.RecordBatch, unmatched: pa.RecordBatch
) -> list[pa.RecordBatch]:
    """What the output has of rows with and without a partner."""
    if node.kind == "semi":
        return [_as_output(node, row_columns(matched), weights(matched))]
    if node.kind == "anti":
        return [_as_output(node, row_columns(unmatched), weights(unmatched))]
    if node.kind == "existence":
        return [
            _as_output(
                node,
                [*row_columns(batch), pa.array(np.full(batch.num_rows, there))],
                weights(batch),
            )
            for batch, there in ((matched, True), (unmatched, False))
        ]
    other = node.inputs[1 - number].columns
    padding = [pa.nulls(unmatched.num_rows, field.type) for field in other]
    own = row_columns(unmatched)
    return [
        _as_output(node, [*own, *padding] if number == 0 else [*padding, *own], weights(unmatched))
    ]


def _as_output(node: Join, columns: list[pa.Array], weight: Numbers) -> pa.RecordBatch:
    return change(columns, weight, node.columns)


def _many() -> errors.HeadraceError:
    return errors.ViewStopped(
        "a scalar subquery gives more than one row",
        place="join with a scalar subquery",
        fix="make the subquery give one row for each outer row, e.g. by an aggregate",
    )


def _refuse_many(old: pa.RecordBatch, d_this: pa.RecordBatch, keys: Words) -> None:
    """Stop if a row of this side has one of the keys that have several partners."""
    own = d_this.filter(pa.array(np.isin(keys_of(d_this), keys)))
    if consolidate(pa.concat_batches([old, own])).num_rows:
        raise _many()


def snapshot(node: Join, states: States, seed: int) -> Iterator[pa.RecordBatch]:
    """The whole output, from what is kept, in chunks.

    The rows of the left enter one by one a join that has only the right side and the counts; then
    come the rows of the right that no row of the left is the partner of.
    """
    left, right = sides(node)
    alone = {**states, "l": _Nothing(state_schema(left.schema))}
    for chunk in states["l"].scan():
        rows = change(kept_columns(chunk), weights(chunk), left.schema)
        yield step(node, alone, (rows, nothing(right.schema)), seed).output
    if not counted(node)[1]:
        return
    for chunk in states["r"].scan():
        if node.residual is None:
            keys = distinct(keys_of(chunk))
            by_key = _weight_by_key(states[right.counts].probe(keys), keys)
            count = by_key[np.searchsorted(keys, keys_of(chunk))]
        else:
            count = states[right.counts].weights_of(chunk)
        rows = change(kept_columns(chunk), weights(chunk), right.schema)
        yield from _shown(node, 1, rows.slice(0, 0), rows.filter(pa.array(count == 0)))


class _Nothing:
    """A collection without rows."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def probe(self, keys: Words) -> pa.RecordBatch:
        del keys
        return pa.RecordBatch.from_pylist([], schema=self._schema)

    def weights_of(self, rows: pa.RecordBatch) -> Numbers:
        return np.zeros(rows.num_rows, np.int64)

    def ordered(self, key: int, *, reverse: bool = False) -> Iterator[pa.RecordBatch]:
        del key, reverse
        return iter(())

    def scan(self, first: int = 0, last: int = 0) -> Iterator[pa.RecordBatch]:
        del first, last
        return iter(())
