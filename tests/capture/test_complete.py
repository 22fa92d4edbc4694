"""Old and new rows in full: random operations against a dict, and what was once wrong. R-B5

Caught: values, old rows and orders that differ from doing one operation after the other, with rows
that are not in the log yet, values and keys left out, old rows given or not. Not caught: keys of
more than one column, many rows (both in `test_capture`), hashes that meet.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from headrace.sources.complete import DELETE, INSERT, UPDATE, Numbers, Operations, complete
from headrace.testing.capture_pure import Case, Operation, counter_example, random_case, wrong


@pytest.mark.parametrize("hundred", range(10))
def test_random_operations_against_a_dict(hundred: int) -> None:
    for number in range(100):
        assert counter_example(f"{hundred} {number}") == ""


def test_the_random_cases_have_everything() -> None:
    """Or the test above says nothing."""
    cases = [random_case(str(number)) for number in range(200)]
    ones = [one for case in cases for group in case.groups for one in group]
    updates = [one for one in ones if one.kind == UPDATE and one.old and one.new]
    assert {one.kind for one in ones} == {INSERT, UPDATE, DELETE}
    assert any(one.old and one.new and one.old[0] != one.new[0] for one in updates)
    assert {at for one in updates for at in one.left_out} == {0, 2, 3}
    assert {one.given for one in ones} == {True, False}
    assert {case.snapshotting for case in cases} == {True, False}


OLD, NEW = (1, 1, "x", "y"), (1, 2, "x", "z")


def test_a_given_old_row_that_is_not_in_the_log_is_not_taken_away() -> None:
    """While a table is read, a row with REPLICA IDENTITY FULL may change that is not there yet."""
    change = Operation(UPDATE, OLD, NEW, frozenset({2}), given=True)
    assert wrong(Case({}, [[change]], snapshotting=True)) == ""
    gone = Operation(DELETE, OLD, None, given=True)
    assert wrong(Case({}, [[gone]], snapshotting=True)) == ""


def test_a_given_old_row_that_is_in_the_log_is_taken_away() -> None:
    change = Operation(UPDATE, OLD, NEW, frozenset({2}), given=True)
    for snapshotting in (True, False):
        assert wrong(Case({1: OLD}, [[change]], snapshotting)) == ""


def test_a_large_key_that_did_not_change_is_left_out_too() -> None:
    """Of a key outside of its row the database says only the old value."""
    first = Operation(UPDATE, OLD, NEW, frozenset({0, 2}))
    again = Operation(UPDATE, NEW, (1, 3, "x", "z"), frozenset({0, 2, 3}))
    gone = Operation(DELETE, (1, 3, "x", "z"), None)
    assert wrong(Case({1: OLD}, [[first, again, gone]], snapshotting=False)) == ""


@pytest.mark.parametrize("there", [[], [1], [2], [1, 2]])
def test_two_rows_that_change_their_keys_with_each_other(there: list[int]) -> None:
    """A deferrable key: both have the same for a while. The table is being read."""
    schema = pa.schema({"id": pa.int64(), "v": pa.string()})

    def rows(*some: tuple[int, str]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([{"id": k, "v": v} for k, v in some], schema)

    in_log = {key: (key, "ab"[key - 1]) for key in there}

    def lookup(keys: list[pa.Array]) -> tuple[Numbers, pa.RecordBatch]:
        found = [(at, in_log[key]) for at, key in enumerate(keys[0].to_pylist()) if key in in_log]
        return np.array([at for at, _ in found], np.int64), rows(*[row for _, row in found])

    given = rows((1, "a"), (2, "b"))
    swap = Operations(
        np.array([UPDATE, UPDATE], np.uint8),
        rows((2, ""), (1, "b")),  # the first does not say 'a': it did not change
        [given.column("id")],
        {"v": np.array([True, False])},
        given,
        np.array([0, 1]),
    )
    made = complete(swap, ["id"], lookup, given_is_there=False, by_row=True)
    sums = Counter(in_log.values())
    for row, weight in zip(made.rows.to_pylist(), made.weight.tolist(), strict=True):
        sums[row["id"], row["v"]] += weight
    known = [(1, "b"), (2, "a")] if 2 in there else [(1, "b")]  # or 2 is read from the database
    assert (+sums, -sums) == (Counter(known), Counter())
    assert made.doubtful.tolist() == ([] if 2 in there else [1])
