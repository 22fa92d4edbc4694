"""Old and new rows in full: random operations against a dict, and what was once wrong. R-B5

Caught: values, old rows and orders that differ from doing one operation after the other, with rows
that are not in the log yet, values and keys left out, old rows given or not. Not caught: keys of
more than one column, many rows (both in `test_capture`), hashes that meet.
"""

from __future__ import annotations

import pytest

from headrace.sources.complete import DELETE, INSERT, UPDATE
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
