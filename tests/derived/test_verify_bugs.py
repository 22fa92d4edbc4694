"""Seeded bugs of verify itself: the tests of verify notice each of them (R-B7).

A line of production code is changed, and a test of this folder must fail. Can catch: a test that
has become blind, a bug whose place in the code has gone. Cannot catch: bugs of a kind that nobody
has thought of.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.derived import verify as merging
from headrace.derived.small import SmallTarget
from headrace.derived.verify import Comparison
from headrace.log.embedded.log import EmbeddedLog
from headrace.runtime import tokens
from headrace.runtime import verify as verifying
from headrace.runtime.verify_source import SourceComparison
from headrace.testing.seeded import mutant
from tests.capture.conftest import Database
from tests.derived import test_verify_merge as merge_tests
from tests.derived import test_verify_online as online_tests
from tests.derived import test_verify_source as source_tests
from tests.derived import test_verify_target as target_tests

Hunter = Callable[["Place"], None]


class Place:
    """What a test needs, made when it asks."""

    def __init__(self, request: pytest.FixtureRequest, log: EmbeddedLog, folder: Path) -> None:
        self._request, self.log, self.folder = request, log, folder

    @property
    def database(self) -> Database:
        found: Database = self._request.getfixturevalue("database")
        return found


def merged(place: Place) -> None:
    for name in merge_tests.KEYS:
        for seed in range(25):
            merge_tests.test_the_differences_are_those_of_dicts(name, seed)
    merge_tests.test_a_key_that_is_there_twice_is_extra_or_missing_once()


def repaired(place: Place) -> None:
    target_tests.test_what_was_broken_is_found_and_repaired_and_nothing_else(
        3, place.database, place.log
    )


def overtaken(place: Place) -> None:
    with pytest.MonkeyPatch.context() as patch:
        target_tests.a_repair_is_overtaken(hr.SQLite(str(place.folder / "t.db")), place.log, patch)


def behind(place: Place) -> None:
    place.log.create_topic("stock", "part string, n bigint", key="part", kind="changes")
    place.log.create_topic("moves", "part string, n bigint", kind="changes")
    online_tests.test_the_cut_of_a_target_and_not_the_newest_position(place.folder, place.log)


def changing(place: Place) -> None:
    with pytest.MonkeyPatch.context() as patch:
        source_tests.test_rows_that_change_between_the_reading_and_the_log(
            place.database, place.log, patch
        )


def lying(place: Place) -> None:
    source_tests.test_what_is_wrong_in_the_log_is_found(0, place.database, place.log)


def found_back(place: Place) -> None:
    with pytest.MonkeyPatch.context() as patch:
        source_tests.test_the_entry_of_a_commit_is_found_however_far_back(place.log, patch)


BUGS: dict[str, tuple[Any, str, str, str, Hunter]] = {
    "the merge leaves out what comes last": (
        Comparison, "__iter__", "while window.fill():", "while False:", merged,
    ),
    "null equals everything": (
        merging, "equal_rows", "pc.fill_null(equal, False)", "pc.fill_null(equal, True)", merged,
    ),
    "nan differs from itself": (
        merging, "equal_rows", "pc.and_(pc.is_nan(a), pc.is_nan(b))", "equal", merged,
    ),
    "keys with equal order words are split": (
        merging._Window, "below", "[0]", "[1]", merged,
    ),
    "a key that stands there twice is counted once": (
        merging, "_numbered", "number.astype(np.uint64)", "(number * 0).astype(np.uint64)", merged,
    ),
    "rows that only the target has are passed over": (
        Comparison, "_by_key", "if left.any():", "if False:", merged,
    ),
    "the log is read at another cut": (
        verifying, "_read_target", "expected(log, table, mark.cut)",
        "expected(log, table, Cut(log.position, log.position))", behind,
    ),
    "the repair writes to more keys": (
        verifying, "_right", "rows = found.rows",
        "rows = pa.concat_batches([found.rows.select(list(table.key)), *("
        "b.select(list(table.key)) for b in expected(log, table, cut))])", repaired,
    ),
    "the audit trail tells the old row as the new one": (
        verifying, "_trail", '"before": _text(old), "after": _text(new)',
        '"before": _text(new), "after": _text(old)', repaired,
    ),
    "a repair puts the target back": (
        SmallTarget, "apply", "cut < mark.cut", "False", overtaken,
    ),
    "transactions that a snapshot does not see are not undone": (
        SourceComparison, "_as_seen", "if not len(unseen):", "if True:", changing,
    ),
    "rows that only the log has are not looked for": (
        SourceComparison, "_unseen", "np.flatnonzero(~there)", "np.flatnonzero(there)[:0]", lying,
    ),
    "an lsn is said to be there one transaction too early": (
        tokens, "_entry_of", 'np.searchsorted(ends, lsn, "right")',
        'np.searchsorted(ends, lsn, "left")', found_back,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS, ids=lambda name: name.replace(" ", "_"))
def test_it_is_caught(
    name: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    log: EmbeddedLog,
) -> None:
    owner, function, old, new, hunter = BUGS[name]
    with (
        mutant(name, "", ((owner, function, old, new),)).on(),
        pytest.raises((AssertionError, hr.errors.HeadraceError)),
    ):
        hunter(Place(request, log, tmp_path))
