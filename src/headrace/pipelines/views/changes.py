"""Change sets: rows with weights, as Arrow batches, and what every operator does with them.

A change has the operator's columns by position, then `_w`, the weight: +1 a row appears, -1 it
disappears. *Keyed*, it has the form in which state is kept (`headrace.tables`): `_k`, the hash of
the key columns; `_h`, the hash of the row; `_w`; then the row; sorted by (`_k`, `_h`), equal rows
added up, zeros gone. Hashes are 64 bits, seeded anew for each state, so nobody can make rows that
collide; that keys with equal hashes are equal is checked all the same, on the rows themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace import errors
from headrace.model.hashing import hash64, repeats
from headrace.tables.runs import consolidate, state_batch, state_schema, weights

WEIGHT = "_w"
_OTHER = 0x0DD
"""The seed of a hash that has nothing to do with the one that is checked."""
IDENTITY = 3
"""Columns before the row in a keyed change: `_k`, `_h`, `_w`."""

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


class State(Protocol):
    """A collection as a step sees it: what was there before the change."""

    def probe(self, keys: Words) -> pa.RecordBatch:
        """All rows with these keys, keyed."""

    def weights_of(self, rows: pa.RecordBatch) -> Numbers:
        """The weight of each of these keyed rows; 0 if it is not there."""

    def ordered(self, key: int, *, reverse: bool = False) -> Iterator[pa.RecordBatch]:
        """The rows of one key by `_o`, in chunks."""

    def scan(self, first: int = 0, last: int = ...) -> Iterator[pa.RecordBatch]:
        """Everything, keyed, in chunks."""


States = Mapping[str, State]


class Failed(NamedTuple):
    """What a tolerant step could not compute and left out: groups by their keys, or pairs."""

    names: Sequence[str]
    rows: pa.RecordBatch
    """A change: what fails now, or (with a negative weight) does so no more."""
    reason: str


class Step(NamedTuple):
    """What a step makes of a change."""

    output: pa.RecordBatch
    """The change of the operator's output."""
    state: dict[str, pa.RecordBatch]
    """What is added to each of its collections, keyed."""
    failed: Sequence[Failed] = ()


def keys_of(batch: pa.RecordBatch) -> Words:
    """The key hashes of a keyed change."""
    found: Words = batch.column("_k").to_numpy()
    return found


def distinct(keys: Words) -> Words:
    """Sorted keys, each once."""
    if not len(keys):
        return keys
    found: Words = keys[np.concatenate(([True], keys[1:] != keys[:-1]))]
    return found


def row_columns(batch: pa.RecordBatch) -> list[pa.Array]:
    """The row's own columns of a change."""
    return list(batch.columns[:-1])


def kept_columns(keyed: pa.RecordBatch) -> list[pa.Array]:
    """The row's own columns of a keyed change."""
    return list(keyed.columns[IDENTITY:])


def change(columns: Sequence[pa.Array], weight: Any, schema: pa.Schema) -> pa.RecordBatch:
    """A change of these columns; `schema` is that of the operator's output."""
    weight = pa.array(np.asarray(weight, np.int64))
    return pa.RecordBatch.from_arrays([*columns, weight], schema=with_weight(schema))


@lru_cache(maxsize=1024)
def with_weight(schema: pa.Schema) -> pa.Schema:
    """The schema of a change of rows of this schema."""
    return schema.append(pa.field(WEIGHT, pa.int64(), nullable=False))


def nothing(schema: pa.Schema) -> pa.RecordBatch:
    """No change."""
    return pa.RecordBatch.from_pylist([], schema=with_weight(schema))


def typed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A change with exactly these types."""
    wanted = with_weight(schema)
    if batch.schema.types == wanted.types:
        return batch
    columns = [c.cast(f.type) for c, f in zip(batch.columns, wanted, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=wanted)


def joined(changes: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Changes one after the other."""
    filled = [one for one in changes if one.num_rows]
    if len(filled) == 1:
        return filled[0]
    return pa.concat_batches(filled) if filled else nothing(schema)


def key_hashes(columns: Sequence[pa.Array], rows: int, seed: int) -> Words:
    """The hash of each key; without key columns all rows have one key."""
    return hash64(columns, seed) if columns else np.zeros(rows, np.uint64)


def each_once(columns: Sequence[pa.Array]) -> tuple[Numbers | None, Sequence[pa.Array]]:
    """Each combination of values once, and which of them each row has.

    Where values repeat, what is done with each of them need not be done with each row. Values that
    are one key may come several times (NaN, both zeros). Without repetition: None, and the columns.
    """
    codes: Any = None
    found: list[pa.Array] = []
    for column in columns:
        if pa.types.is_nested(column.type) or not repeats(column):
            return None, columns
        one = column.dictionary_encode("encode")
        if codes is None:
            codes, found = one.indices, [one.dictionary]
            continue
        count = len(one.dictionary)
        pair = codes.to_numpy().astype(np.int64) * count + one.indices.to_numpy()
        both = pa.array(pair).dictionary_encode()
        first, second = np.divmod(both.dictionary.to_numpy(), count)
        codes = both.indices
        found = [*(each.take(pa.array(first)) for each in found), one.dictionary.take(second)]
    return codes.to_numpy(), found


def keyed_rows(
    columns: Sequence[pa.Array],
    weight: Any,
    keys: Sequence[pa.Array],
    schema: pa.Schema,
    seed: int,
    order: Words | None = None,
) -> pa.RecordBatch:
    """Rows with their identity, sorted and added up."""
    rows = len(weight)
    batch = state_batch(
        columns,
        state_schema(schema, ordered=order is not None),
        np.asarray(weight, np.int64),
        k=key_hashes(keys, rows, seed),
        o=order,
        h=key_hashes(columns, rows, seed ^ 1),
    )
    return consolidate(batch)


def keyed(batch: pa.RecordBatch, keys: Sequence[int], seed: int) -> pa.RecordBatch:
    """A change in the form in which state is kept."""
    columns = row_columns(batch)
    schema = pa.schema(list(batch.schema)[:-1])
    return keyed_rows(columns, weights(batch), [columns[i] for i in keys], schema, seed)


def copies(rows: pa.RecordBatch, place: str) -> pa.Array:
    """The places of keyed rows, each as often as its weight says."""
    if (weights(rows) < 0).any():
        raise never_there(place)
    return pa.array(np.repeat(np.arange(rows.num_rows), weights(rows)))


def never_there(place: str) -> errors.ViewStopped:
    """The error for a row that is taken back and was never given."""
    return errors.ViewStopped(
        "a row disappears that was never there",
        place=place,
        why="an input retracts a row that it did not hold",
        fix="check the source of the input: `headrace topic read` shows its changes",
    )


Result = TypeVar("Result")


def halved(
    count: int, evaluate: Callable[[int, int], Result]
) -> Iterator[Result | tuple[int, errors.ExpressionFailed]]:
    """What `evaluate(first, last)` makes of all, or of the parts of it that do not fail.

    A failed evaluation says nothing of what it was that failed: halves are tried until it is known.
    """

    def some(first: int, last: int) -> Iterator[Result | tuple[int, errors.ExpressionFailed]]:
        try:
            yield evaluate(first, last)
        except errors.ExpressionFailed as error:
            if last - first == 1:
                yield first, error
                return
            middle = (first + last) // 2
            yield from some(first, middle)
            yield from some(middle, last)

    return some(0, count) if count else iter(())


def consolidated(batch: pa.RecordBatch, seed: int) -> pa.RecordBatch:
    """A change with equal rows added up and what cancels gone."""
    if not batch.num_rows:
        return batch
    found = keyed(batch, (), seed)
    return pa.RecordBatch.from_arrays(
        [*kept_columns(found), found.column(WEIGHT)], schema=batch.schema
    )


def pairs(left: pa.RecordBatch, right: pa.RecordBatch) -> tuple[Numbers, Numbers]:
    """The indexes of all pairs of rows with equal key hashes; both sides are keyed."""
    of_left, of_right = keys_of(left), keys_of(right)
    once = distinct(of_left)
    low = np.searchsorted(of_right, once, "left")
    counts = np.searchsorted(of_right, once, "right") - low
    if len(once) < len(of_left):  # for each row what was found for its key
        starts = np.searchsorted(of_left, once)
        times = np.diff(starts, append=len(of_left))
        low, counts = np.repeat(low, times), np.repeat(counts, times)
    if (counts == 1).all():  # as where many rows look for one row each
        return np.arange(len(of_left)), low
    in_left = np.repeat(np.arange(len(of_left)), counts)
    before = np.cumsum(counts) - counts
    in_right = np.arange(len(in_left)) + np.repeat(low - before, counts)
    return in_left, in_right


def check_same(left: Sequence[pa.Array], right: Sequence[pa.Array]) -> None:
    """Stop if keys with equal hashes are not equal, which has never been seen."""
    for one, other in zip(left, right, strict=True):
        if pa.types.is_nested(one.type):  # Arrow compares no structs: a second hash will do
            if (hash64([one], _OTHER) != hash64([other], _OTHER)).any():
                raise errors.StateCollision("two keys have the same hash", place="view state")
            continue
        same = pc.equal(one, other)
        if not same.false_count and not same.null_count:
            continue
        same = same.fill_null(False)
        both_null = pc.and_(one.is_null(nan_is_null=True), other.is_null(nan_is_null=True))
        if pc.all(pc.or_(same, both_null)).as_py() is False:
            raise errors.StateCollision("two keys have the same hash", place="view state")


__all__ = ["state_schema", "weights"]
