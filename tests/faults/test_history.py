"""The oracle: each way to break a promise is seen, and a log that keeps them all is not blamed.

Caught here: an oracle that overlooks a loss. Not caught here: promises nobody wrote down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from headrace.testing.promises import (
    REFUSED,
    TAKEN,
    UNKNOWN,
    Content,
    History,
    Row,
    judge,
)  # fmt: skip


def kept() -> tuple[History, Content]:
    """Two entries taken and one lost on the way, and a log that has exactly the first two."""
    history = History(counters=("c",))
    one = history.start({"a": 2, "b": 1}, expect={"c": 0}, durable=True, now=1)
    one.outcome, one.position, one.ended = TAKEN, 10, 4
    two = history.start({"a": 1}, require={"c": 1}, durable=True, now=5)
    two.outcome, two.position, two.ended = TAKEN, 12, 8
    history.start({"a": 1}, durable=True, now=9)
    rows = [Row("a", 0, 0, 1, 0), Row("a", 0, 1, 1, 1), Row("b", 0, 0, 1, 0), Row("a", 0, 2, 2, 0)]
    history.show("f", "ab", rows[:3], 10, 6)
    return history, Content(rows, {"c": 1}, 12, {1: 10, 2: 12})


def test_what_is_kept_is_not_blamed() -> None:
    history, content = kept()
    assert judge(history, content) == []


def test_an_open_attempt_may_be_there() -> None:
    history, content = kept()
    content.rows.append(Row("a", 0, 3, 3, 0))
    content.positions[3] = 13
    assert judge(history, content) == []
    history.attempts[2].outcome = UNKNOWN
    assert judge(history, content) == []
    history.attempts[2].outcome = REFUSED
    assert "refused" in judge(history, content)[0]


def lose_the_last(history: History, content: Content) -> None:
    content.rows.pop()


def lose_half(history: History, content: Content) -> None:
    del content.rows[1]


def twice(history: History, content: Content) -> None:
    content.rows.append(Row("a", 0, 3, 2, 0))


def gap(history: History, content: Content) -> None:
    content.rows[3] = replace(content.rows[3], offset=3)


def offset_reused(history: History, content: Content) -> None:
    content.rows[3] = replace(content.rows[3], offset=1)


def changed(history: History, content: Content) -> None:
    content.rows[0], content.rows[1] = (
        replace(content.rows[0], index=1),
        replace(content.rows[1], index=0),
    )


def invented(history: History, content: Content) -> None:
    content.rows.append(Row("a", 0, 3, 99, 0))


def other_position(history: History, content: Content) -> None:
    content.positions[2] = 11


def wrong_order(history: History, content: Content) -> None:
    content.positions.update({1: 12, 2: 10})


def counter_moved(history: History, content: Content) -> None:
    content.counters["c"] = 2


def condition_ignored(history: History, content: Content) -> None:
    history.attempts[1].require = {"c": 0}


def shown_beyond_the_end(history: History, content: Content) -> None:
    history.show("f", "ab", [], 13, 7)


def resurrected(history: History, content: Content) -> None:
    history.show("g", "a", content.rows[:2], 12, 7)


@pytest.mark.parametrize(
    ("breakage", "says"),
    [
        (lose_the_last, "is lost"),
        (lose_half, "not whole"),
        (twice, "there twice"),
        (gap, "with a gap"),
        (offset_reused, "offsets twice"),
        (changed, "a reader saw"),
        (invented, "which nobody made"),
        (other_position, "now has 11"),
        (wrong_order, "comes after"),
        (counter_moved, "counter c is 2"),
        (condition_ignored, "wanted c = 0"),
        (resurrected, "behind g"),
        (shown_beyond_the_end, "the log ends at 12"),
    ],
)
def test_a_broken_promise_is_seen(breakage: Callable[[History, Content], None], says: str) -> None:
    history, content = kept()
    breakage(history, content)
    assert any(says in verdict for verdict in judge(history, content)), judge(history, content)


def test_at_a_crash_point_only_what_had_happened_counts() -> None:
    history, content = kept()
    lose_the_last(history, content)
    content.upper, content.positions = 10, {1: 10}
    assert judge(history.until(7), content) == []
    assert judge(history.until(8), content) != []
    assert judge(history.until(3), Content([], {}, 0)) == []
    assert judge(history.until(4), Content([], {}, 0)) != []


def test_a_receipt_without_a_sync_counts_after_a_kill_and_once_covered() -> None:
    history, content = kept()
    history.attempts[1].durable = False
    lose_the_last(history, content)
    content.upper, content.positions = 10, {1: 10}
    assert judge(history, content) == []
    assert judge(history, content, killed=True) != []
    history.show("g", "", [], 12, 9)
    assert judge(history, content) != []
