"""Transactions: rows of several topics, offsets, values and counters as one entry, or none.

Caught: a part that is visible without the others, anything left by a block that failed, progress
that moves without its result. Not caught: a crash in the middle; see `tests/faults`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from tests.log.kit import checked, places, rows, values


@pytest.fixture
def shop(log: EmbeddedLog) -> EmbeddedLog:
    log.create_topic("orders", "a bigint", key="a", partitions=4)
    log.create_topic("audit", "a string")
    return log


def test_all_of_it_is_one_entry(shop: EmbeddedLog) -> None:
    """Rows of several topics, offsets, values and counters share a position. R-A15"""
    with shop.transaction() as transaction:
        transaction.append("orders", [{"a": i} for i in range(20)])
        transaction.append("audit", [{"a": "x"}], headers={"who": "me"})
        transaction.commit_offsets("billing", {"orders": {0: 3, 2: 1}})
        transaction.put("manifest", {"files": [1, 2]})
        transaction.expect("version", 0)
    receipt = transaction.receipt
    assert receipt is not None
    assert receipt.rows == 21
    assert {batch.position for batch in shop.read(["orders", "audit"])} == {receipt.position}
    assert shop.offsets("billing") == {"orders": {0: 3, 2: 1}}
    assert shop.value("manifest") == {"files": [1, 2]}
    assert shop.counter("version") == 1
    assert sum(shop.ends("orders")) == 20
    with hr.connect(shop.path) as other:
        assert other.offsets("billing") == {"orders": {0: 3, 2: 1}}
        assert other.value("manifest") == {"files": [1, 2]}


def test_a_transaction_has_as_many_parts_as_it_likes(shop: EmbeddedLog) -> None:
    """More than the system takes in one write. R-A15"""
    with shop.transaction() as transaction:
        for i in range(1500):
            transaction.append("orders", [{"a": i}])
    assert checked(shop.path).rows == 1500
    assert sorted(values(shop.read("orders"))) == list(range(1500))


@pytest.mark.parametrize(
    ("group", "offset", "error"),
    [
        ("", 0, errors.BadSetting),
        (5, 0, errors.BadSetting),
        ("\ud800", 0, errors.BadSetting),
        ("g", 2**63, errors.BadPosition),
    ],
)
def test_offsets_that_are_none(
    shop: EmbeddedLog, group: Any, offset: int, error: type[errors.HeadraceError]
) -> None:
    with pytest.raises(error), shop.transaction() as transaction:
        transaction.commit_offsets(group, {"orders": {0: offset}})


def test_a_part_has_its_sent_time(shop: EmbeddedLog) -> None:
    """As an append has. R-A1"""
    then = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
    with shop.transaction() as transaction:
        transaction.append("audit", [{"a": "x"}], sent_time=then)
    (batch,) = shop.read("audit")
    assert batch.sent_time.to_pylist() == [then]


def test_a_value_that_is_nested_too_deep(shop: EmbeddedLog) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(errors.BadRows), shop.transaction() as transaction:
        transaction.put("deep", deep)


def test_a_value_has_a_name(shop: EmbeddedLog) -> None:
    for name in (None, "", 5):
        with pytest.raises(errors.BadRows):
            shop.transaction().put(name, 1)  # type: ignore[arg-type]


def test_values_of_the_log_itself_are_not_put(shop: EmbeddedLog) -> None:
    """A group, a writer or a hold would be what no program understands."""
    shop.consumer("orders", "g").close()
    for name in ("headrace/group/g", "headrace/hold/h", "headrace/anything"):
        with pytest.raises(errors.ReservedName, match="belongs to Headrace"):
            shop.transaction().put(name, 1)
    assert shop.groups() == ["g"]


def test_nothing_is_visible_before_the_commit(shop: EmbeddedLog) -> None:
    """Until the commit nobody sees anything of it. R-A15"""
    before = shop.position
    transaction = shop.transaction()
    transaction.append("orders", [{"a": 1}])
    transaction.put("x", 1)
    transaction.expect("c", 0)
    assert shop.position == before
    assert list(shop.read("orders")) == []
    assert (shop.value("x"), shop.counter("c"), shop.ends("orders")) == (None, 0, [0] * 4)
    transaction.commit()
    assert values(shop.read("orders")) == [1]


def test_an_error_in_the_block_leaves_nothing(shop: EmbeddedLog) -> None:
    """A block that raises commits nothing, whatever it had added. R-A15"""
    before = shop.position
    with pytest.raises(ZeroDivisionError), shop.transaction() as transaction:
        transaction.append("orders", [{"a": 1}])
        transaction.commit_offsets("g", {"orders": {0: 1}})
        raise ZeroDivisionError
    with pytest.raises(errors.WrongColumn), shop.transaction() as transaction:
        transaction.append("audit", [{"a": "fine"}])
        transaction.append("orders", [{"b": 1}])
    with pytest.raises(errors.UnknownTopic), shop.transaction() as transaction:
        transaction.append("audit", [{"a": "fine"}])
        transaction.append("order", [{"a": 1}])
    assert shop.position == before
    assert shop.offsets("g") == {}


def test_a_failed_condition_leaves_nothing(shop: EmbeddedLog) -> None:
    """A condition that fails at the commit takes everything with it. R-A15"""
    shop.append("audit", [], expect={"orders/7": 0})
    before = shop.position
    with pytest.raises(errors.Conflict), shop.transaction() as transaction:
        transaction.append("orders", [{"a": 1}])
        transaction.put("x", 1)
        transaction.expect("orders/7", 0)
    assert shop.position == before
    assert (shop.value("x"), values(shop.read("orders"))) == (None, [])
    with shop.transaction() as transaction:
        transaction.append("orders", [{"a": 1}])
        transaction.require("orders/7", 1)
    assert values(shop.read("orders")) == [1]


def test_progress_is_committed_with_the_result(shop: EmbeddedLog) -> None:
    """A batch committed with its result resumes behind it, without loss or repetition. R-A10"""
    for i in range(30):
        shop.append("orders", [{"a": 2 * i}, {"a": 2 * i + 1}])
    seen: list[int] = []
    for _ in range(4):
        done = shop.offsets("copy").get("orders", {})
        start = {p: done.get(p, 0) for p in range(4)}
        for batch in shop.read("orders", start=start):
            with shop.transaction() as transaction:
                transaction.append("audit", [{"a": str(v)} for v in batch.data["a"].to_pylist()])
                transaction.commit_offsets("copy", batch)
            seen += batch.data["a"].to_pylist()
        shop.append("orders", [{"a": 1000 + len(seen)}])
    assert sorted(map(int, values(shop.read("audit")))) == sorted(seen)
    assert len(seen) == len(set(seen)) == 63


def test_one_topic_may_come_twice(shop: EmbeddedLog) -> None:
    """Rows added to one topic in several steps are numbered one after the other. R-A9"""
    shop.create_topic("wide", "a bigint", partitions=1000)
    with shop.transaction() as transaction:
        for a, partition in enumerate((0, 700, 0, 999, 700, 0)):
            transaction.append("wide", [{"a": a}, {"a": a}], partition=partition)
        transaction.append("orders", [{"a": i} for i in range(10)])
        transaction.append("orders", [{"a": i} for i in range(10)])
    found = places(shop.read("wide"))
    for partition, expected in ((0, [0, 0, 2, 2, 5, 5]), (700, [1, 1, 4, 4]), (999, [3, 3])):
        here = sorted((offset, a) for p, offset, a in found if p == partition)
        assert here == list(enumerate(expected))
    assert sum(shop.ends("orders")) == 20
    for partition, end in enumerate(shop.ends("orders")):
        offsets = [o for p, o, _ in places(shop.read("orders")) if p == partition]
        assert offsets == list(range(end))
    checked(shop.path)


def test_pieces_in_a_transaction(shop: EmbeddedLog) -> None:
    """Staged pieces and plain rows are one entry. R-A15"""
    piece = shop.stage("orders", [{"a": i} for i in range(100)])
    with shop.transaction() as transaction:
        transaction.append("audit", [{"a": "begin"}])
        transaction.append("orders", piece)
        transaction.append("orders", [{"a": 100}])
    assert transaction.receipt is not None
    assert transaction.receipt.rows == 102
    batches = list(shop.read(["orders", "audit"]))
    assert sorted(values(b for b in batches if b.topic == "orders")) == list(range(101))
    assert [batch.last for batch in batches].count(True) == 1
    assert batches[-1].last


def test_an_empty_transaction_is_no_entry(shop: EmbeddedLog) -> None:
    """A transaction of nothing takes no position. R-A15"""
    before = shop.position
    with shop.transaction() as transaction:
        transaction.append("orders", [])
    assert shop.position == before


def test_a_transaction_is_committed_once(shop: EmbeddedLog) -> None:
    """A second commit is refused, and leaving the block after a commit adds nothing. R-A15"""
    with shop.transaction() as transaction:
        transaction.append("audit", [{"a": "1"}])
        transaction.commit()
    with pytest.raises(errors.UsageError):
        transaction.commit()
    assert values(shop.read("audit")) == ["1"]


@pytest.mark.parametrize("bad", [object(), {1, 2}, dt.date(2020, 1, 1), {"deep": [b"x"]}])
def test_values_are_json(shop: EmbeddedLog, bad: Any) -> None:
    """A named value is JSON; anything else refuses the entry with a reason. R-D3"""
    before = shop.position
    with pytest.raises(errors.UsageError), shop.transaction() as transaction:
        transaction.append("audit", [{"a": "1"}])
        transaction.put("x", bad)
    assert shop.position == before


def test_the_last_value_counts(shop: EmbeddedLog) -> None:
    """Values, and a group's offsets, are what was committed last, also after reopening. R-A10"""
    for i in range(3):
        with shop.transaction() as transaction:
            transaction.put("x", {"i": i, "ü": None})
            transaction.commit_offsets("g", {"orders": {i: i + 1}, "audit": {0: i}})
    expected = ({"i": 2, "ü": None}, {"orders": {0: 1, 1: 2, 2: 3}, "audit": {0: 2}})
    assert (shop.value("x"), shop.offsets("g")) == expected
    shop.close()
    with hr.connect(shop.path) as again:
        assert (again.value("x"), again.offsets("g")) == expected
        assert rows(again.read("orders")) == []


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_can_be_added_to_a_transaction_that_is_over(log: EmbeddedLog, fails: bool) -> None:
    """It would be in no entry, and nobody would notice. R-A9"""
    log.create_topic("t", "a bigint")
    with contextlib.suppress(ZeroDivisionError), log.transaction() as transaction:
        transaction.append("t", [{"a": 1}])
        assert 1 / (not fails)
    additions: list[Callable[[], Any]] = [
        lambda: transaction.append("t", [{"a": 2}]),
        lambda: transaction.put("name", 1),
        lambda: transaction.expect("counter", 0),
        lambda: transaction.require("counter", 0),
        lambda: transaction.commit_offsets("group", {"t": {0: 1}}),
        transaction.commit,
    ]
    for add in additions:
        with pytest.raises(errors.BadRows, match="over"):
            add()
    assert rows(log.read("t")) == ([] if fails else [{"a": 1}])


@pytest.mark.parametrize(
    ("offsets", "error"),
    [
        ({"ordres": {0: 1}}, errors.UnknownTopic),
        ({"orders": {4: 1}}, errors.BadPosition),
        ({"orders": {-1: 1}}, errors.BadPosition),
        ({"orders": {"0": 1}}, errors.BadPosition),
        ({"orders": {0: -1}}, errors.BadPosition),
        ({"orders": {0: 1.5}}, errors.BadPosition),
    ],
)
def test_offsets_of_what_is_not_there_are_refused(
    log: EmbeddedLog, offsets: Any, error: type[errors.HeadraceError]
) -> None:
    """They were taken, and then nobody could ask how far the group is behind."""
    log.create_topic("orders", "id bigint", partitions=4)
    before = log.position
    with pytest.raises(error), log.transaction() as transaction:
        transaction.append("orders", [{"id": 1}])
        transaction.commit_offsets("g", offsets)
    assert (log.position, log.groups()) == (before, [])
