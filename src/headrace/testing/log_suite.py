"""What every log must do (`interfaces.EntryLog` and the readings on it): the conformance suite.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_a_log(check): check(lambda: MyLog(...))

`open_log` gives a handle of the same, empty log each time: two of them are two processes as far as
the log can tell. A check raises `AssertionError`. Positions are only asked to increase, since those
of Kafka are not dense. What is promised to consumer groups: `group_suite.GROUP_CHECKS`, in the same
way. What it cannot see: what a crash leaves (`powercut`, `schedule`), damage,
and anything in the files of one kind of log.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace import errors
from headrace.interfaces import Part

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog as Log
    from headrace.model.records import Batch

Open = Callable[[], "Log"]
PATIENCE_SECONDS = 30.0


def two(open_log: Open) -> tuple[Log, Log]:
    """Two handles, and two topics."""
    one, other = open_log(), open_log()
    one.create_topic("orders", "id bigint, note string", key="id", partitions=4)
    one.create_topic("audit", "id bigint")
    return one, other


def ids(batches: Iterable[Batch]) -> list[int]:
    """What was read, in order."""
    return [one for batch in batches for one in batch.data.column("id").to_pylist()]


def positions(batches: Iterable[Batch]) -> list[int]:
    """The position of the entry of each row."""
    return [one for batch in batches for one in batch.positions.to_pylist()]


def some(*numbers: int) -> list[dict[str, Any]]:
    """Rows."""
    return [{"id": number} for number in numbers]


def refused(kind: type[Exception], call: Callable[[], object]) -> Any:
    """The error, which must come."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} did not come")


def what_is_acknowledged_is_read_by_others(open_log: Open) -> None:
    """At once, in the order of positions, which increase."""
    one, other = two(open_log)
    receipts = []
    for number in range(5):
        receipts.append((one, other)[number % 2].append("audit", some(number)))
        assert ids(other.read("audit")) == list(range(number + 1))
        assert min(one.position, other.position) >= receipts[-1].position
    at = [receipt.position for receipt in receipts]
    assert positions(one.read("audit")) == at == sorted(set(at))
    times = [receipt.received_time for receipt in receipts]
    assert times == sorted(times)


def rows_of_a_key_stay_in_order_in_one_partition(open_log: Open) -> None:
    """Each partition counts its own offsets, without gaps; where a key goes is for ever."""
    one, other = two(open_log)
    for turn in range(6):
        rows = [{"id": number % 7, "note": f"{turn}"} for number in range(turn * 5, turn * 5 + 9)]
        (one, other)[turn % 2].append("orders", rows)
    home: dict[int, int] = {}
    seen: dict[int, list[int]] = {}
    for batch in other.read("orders"):
        columns = (batch.partition, batch.offset, batch.data.column("id"))
        for partition, offset, key in zip(*(one.to_pylist() for one in columns), strict=True):
            seen.setdefault(partition, []).append(offset)
            assert home.setdefault(key, partition) == partition
    assert home == {0: 1, 1: 2, 2: 0, 3: 3, 4: 0, 5: 2, 6: 3}, home  # murmur2, as in Kafka
    ends = one.ends("orders")
    for partition, offsets in seen.items():
        assert offsets == list(range(ends[partition]))


def an_entry_is_seen_whole_or_not_at_all(open_log: Open) -> None:
    """Rows of several topics and partitions, offsets, values and counters share a position."""
    one, other = two(open_log)
    transaction = one.transaction()
    transaction.append("orders", some(*range(20)))
    transaction.append("audit", some(1))
    transaction.put("manifest", {"files": [1]})
    transaction.commit_offsets("billing", {"orders": {0: 3}})
    transaction.expect("version", 0)
    assert not ids(other.read(["orders", "audit"]))
    assert (other.value("manifest"), other.counter("version")) == (None, 0)
    position = transaction.commit().position
    batches = list(other.read(["orders", "audit"]))
    assert set(positions(batches)) == {position}
    assert [batch.last for batch in batches] == [False] * (len(batches) - 1) + [True]
    assert sorted(ids(batches)) == sorted([1, *range(20)])
    assert other.value("manifest") == {"files": [1]}
    assert other.offsets("billing") == {"orders": {0: 3}}
    assert other.counter("version") == 1


def a_condition_that_fails_takes_nothing(open_log: Open) -> None:
    """`expect` moves its counter, `require` compares; `Conflict` says which and what it is."""
    one, other = two(open_log)
    one.append("audit", some(1), expect={"a": 0})
    other.append("audit", some(2), expect={"a": 1}, require={"b": 0})
    error = refused(errors.Conflict, lambda: one.append("audit", some(3), expect={"a": 1, "b": 0}))
    details = {name: error.details[name] for name in ("counter", "expected", "found")}
    assert details == {"counter": "a", "expected": 1, "found": 2}
    refused(errors.Conflict, lambda: one.append("audit", some(3), require={"a": 1}))
    part = Part("audit", some(3))
    put = {"values": {"x": 1}}
    refused(
        errors.Conflict, lambda: one.append_entry([part], put, expect={"b": 0}, require={"a": 0})
    )
    assert (other.counter("a"), other.counter("b"), other.value("x")) == (2, 0, None)
    assert ids(other.read("audit")) == [1, 2]


def of_those_who_expect_the_same_one_wins(open_log: Open) -> None:
    """Two handles race for each of many versions."""
    handles = two(open_log)
    won: list[int] = []
    at_once = threading.Barrier(len(handles))

    def race(log: Log) -> None:
        for version in range(30):
            at_once.wait(PATIENCE_SECONDS)
            try:
                log.append("audit", some(version), expect={"v": version})
                won.append(version)
            except errors.Conflict:
                pass

    racing = [threading.Thread(target=race, args=[log], daemon=True) for log in handles]
    for thread in racing:
        thread.start()
    for thread in racing:
        thread.join(PATIENCE_SECONDS)
    assert sorted(won) == ids(handles[0].read("audit")) == list(range(30))


def a_writer_stores_once_and_is_fenced(open_log: Open) -> None:
    """However often it tries; whoever claims the name knows what was stored, and ends the other."""
    one, other = two(open_log)
    old = one.writer("capture")
    old.append("audit", some(1), version=0, state={"lsn": 5})
    assert old.append("audit", some(1), version=0).duplicate
    new = other.writer("capture")
    assert (new.version, new.state) == (1, {"lsn": 5})
    for _ in range(2):  # also one that goes on as if its entry had been taken
        refused(errors.Fenced, lambda: old.append("audit", some(9)))
        old.version += 1
    new.append("audit", some(2), version=1, state={"lsn": 6})
    refused(errors.Fenced, lambda: old.append("audit", some(9)))
    refused(errors.Conflict, lambda: new.append("audit", some(9), version=5))
    assert ids(one.read("audit")) == [1, 2]
    assert new.state == {"lsn": 6}


def a_reading_begins_and_ends_where_it_is_told(open_log: Open) -> None:
    """By position, offset, time; bounded by a position that may be yet to come."""
    one, other = two(open_log)
    receipts = [one.append("audit", some(number)) for number in range(5)]
    at = [receipt.position for receipt in receipts]
    assert ids(other.read("audit", after=at[1])) == [2, 3, 4]
    assert ids(other.read("audit", after=at[1], through=at[3])) == [2, 3]
    assert ids(other.read("audit", 3)) == [3, 4]
    assert ids(other.read("audit", {0: 4})) == [4]
    assert not ids(other.read("audit", "latest"))
    assert not ids(other.read("audit", datetime(2999, 1, 1, tzinfo=UTC)))
    assert ids(other.read("audit", receipts[0].received_time)) == [0, 1, 2, 3, 4]
    assert not ids(other.read("orders"))
    late = threading.Timer(0.2, lambda: one.append("audit", some(5)))
    late.start()
    assert ids(other.read("audit", after=at[3], through=at[4] + 1))[:2] == [4, 5]
    late.join()


def a_follower_is_woken(open_log: Open) -> None:
    """It sees each entry once, in order, and ends when there was no news for its timeout."""
    one, other = two(open_log)
    one.append("audit", some(0))
    seen: list[int] = []

    def follow() -> None:
        for batch in other.read("audit", follow=True, timeout=PATIENCE_SECONDS):
            seen.extend(ids([batch]))
            if seen[-1] == 20:
                return

    following = threading.Thread(target=follow, daemon=True)
    following.start()
    for number in range(1, 21):
        one.append("audit", some(number))
    following.join(PATIENCE_SECONDS)
    assert seen == list(range(21)), seen
    assert not ids(other.read("audit", "latest", follow=True, timeout=0.05))


def staged_rows_come_with_the_entry_that_names_them(open_log: Open) -> None:
    """Nobody sees them before; several pieces, of several handles, in one entry."""
    one, other = two(open_log)
    pieces = [one.stage("orders", some(1, 2)), other.stage("orders", some(3))]
    assert not ids(other.read("orders"))
    with one.transaction() as transaction:
        transaction.append("orders", pieces)
        transaction.append("audit", some(7))
    assert sorted(ids(other.read("orders"))) == [1, 2, 3]
    assert transaction.receipt is not None
    assert transaction.receipt.rows == 4
    both = other.read(["orders", "audit"])
    assert set(positions(both)) == {transaction.receipt.position}


def what_is_said_beside_the_rows_is_kept(open_log: Open) -> None:
    """Headers, the boundaries of source transactions, the time of sending."""
    one, other = two(open_log)
    sent = datetime(2024, 2, 29, 12, 0, 0, 123456, tzinfo=UTC)
    headers = [{"who": b"a"}, None, {"who": b"b"}]
    one.append("audit", some(1, 2, 3), headers=headers, transactions=[2, 1], sent_time=sent)
    (batch,) = other.read("audit")
    assert batch.transaction.to_pylist() == [0, 0, 1]
    assert batch.sent_time.to_pylist() == [sent] * 3
    assert [one and dict(one) for one in batch.headers.to_pylist()] == headers


def a_topic_has_one_history_of_schemas(open_log: Open) -> None:
    """What one handle changes the other knows; old rows are read by the newest schema."""
    one, other = two(open_log)
    one.append("audit", some(1))
    one.alter_topic("audit", add="note string")
    other.append("audit", [{"id": 2, "note": "x"}])
    newest = [
        row for batch in one.read("audit", columns=["id", "note"]) for row in batch.to_pylist()
    ]
    assert newest == [{"id": 1, "note": None}, {"id": 2, "note": "x"}]
    refused(errors.TopicExists, lambda: other.create_topic("audit", "id string"))
    assert {topic.name for topic in other.topics()} >= {"orders", "audit"}


def bad_rows_are_refused_whole(open_log: Open) -> None:
    """One of them, and none is taken; an unknown topic has near names."""
    one, other = two(open_log)
    before = one.position
    refused(errors.HeadraceError, lambda: one.append("audit", [{"id": 1}, {"id": "x"}]))
    refused(errors.WrongColumn, lambda: one.append("audit", [{"id": 1}, {"idd": 2}]))
    assert "audit" in refused(errors.UnknownTopic, lambda: one.append("audt", some(1))).fix
    assert one.position == before
    assert not ids(other.read("audit"))


def a_producer_stores_everything_in_order(open_log: Open) -> None:
    """Rows and batches, many to an entry; all of them are there when it is closed."""
    one, other = two(open_log)
    with one.producer("audit") as producer:
        for number in range(0, 600, 3):
            producer.send({"id": number})
            producer.send(pa.record_batch({"id": [number + 1, number + 2]}))
        refused(errors.WrongColumn, lambda: producer.send(pa.record_batch({"idd": [1]})))
    assert ids(other.read("audit")) == list(range(600))


CHECKS: list[Callable[[Open], None]] = [
    what_is_acknowledged_is_read_by_others,
    rows_of_a_key_stay_in_order_in_one_partition,
    an_entry_is_seen_whole_or_not_at_all,
    a_condition_that_fails_takes_nothing,
    of_those_who_expect_the_same_one_wins,
    a_writer_stores_once_and_is_fenced,
    a_reading_begins_and_ends_where_it_is_told,
    a_follower_is_woken,
    staged_rows_come_with_the_entry_that_names_them,
    what_is_said_beside_the_rows_is_kept,
    a_topic_has_one_history_of_schemas,
    bad_rows_are_refused_whole,
    a_producer_stores_everything_in_order,
]
