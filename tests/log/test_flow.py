"""When the producer is faster than its consumers: buffer, drop, backpressure (R-A3).

Each with a consumer that commits one row for a hundred appended. Caught: rows that are neither
appended nor counted, counts that differ from what happened, producers that do not wait or never
stop waiting, two producers that use the same room, memory that grows with what is waiting. Not
caught: how fast it is.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.groups import flow
from headrace.model.policy import Pressure
from tests.log.kit import TINY, Child


def rows(count: int, first: int = 0) -> list[dict[str, int]]:
    return [{"n": n} for n in range(first, first + count)]


@pytest.fixture
def t(log: EmbeddedLog) -> EmbeddedLog:
    """A log with the topic t, read by the group g, which has committed nothing yet."""
    log.create_topic("t", "n bigint", partitions=2)
    log.consumer("t", "g").close()
    return log


# --- backpressure ---------------------------------------------------------------------------------


def test_a_producer_waits_until_the_slowest_group_commits(t: EmbeddedLog) -> None:
    t.set_topic("t", flow="backpressure", flow_rows=100, flow_seconds=30)
    t.append("t", rows(100))
    with t.consumer("t", "g", max_rows=60, timeout=10) as consumer:
        next(consumer)
        done: list[int] = []
        producer = threading.Thread(target=lambda: done.append(t.append("t", rows(50)).rows))
        producer.start()
        producer.join(0.2)
        assert not done  # no room for 50
        consumer.commit()
        producer.join(20)
        assert done == [50]
    assert sum(t.ends("t")) == 150


def test_a_producer_that_waited_too_long_is_told_for_whom(t: EmbeddedLog) -> None:
    t.set_topic("t", flow="backpressure", flow_rows=100, flow_seconds=0.1)
    t.append("t", rows(80))
    with pytest.raises(errors.TopicFull) as raised:
        t.append("t", rows(30))
    assert raised.value.details == {"group": "g", "behind": 80, "flow_rows": 100, "members": 0}
    assert sum(t.ends("t")) == 80
    t.delete_group("g")  # nobody needs it any more
    t.append("t", rows(100))


def test_what_can_never_have_room_is_refused_at_once(t: EmbeddedLog) -> None:
    t.set_topic("t", flow="backpressure", flow_rows=10)
    with pytest.raises(errors.BatchTooLarge):
        t.append("t", rows(11))


def test_transactions_and_writers_wait_too(t: EmbeddedLog) -> None:
    t.create_topic("free", "n bigint")
    t.set_topic("t", flow="backpressure", flow_rows=10, flow_seconds=0.05)
    writer = t.writer("w")
    writer.append("t", rows(10))
    with pytest.raises(errors.TopicFull), t.transaction() as transaction:
        transaction.append("free", rows(1))
        transaction.append("t", rows(1))
    assert t.ends("free") == [0]
    with pytest.raises(errors.TopicFull):
        writer.append("t", rows(1))
    assert writer.version == 1


def test_a_consumer_hundred_times_slower_holds_its_producers_back(t: EmbeddedLog) -> None:
    """R-A3: never more than flow_rows are waiting, and all of them arrive."""
    t.set_topic("t", flow="backpressure", flow_rows=300, flow_seconds=60)
    behind: list[int] = []

    def produce(first: int) -> None:
        for number in range(10):
            t.append("t", rows(100, first + 100 * number))

    producers = [threading.Thread(target=produce, args=(base,)) for base in (0, 1000)]
    found: list[int] = []
    with t.consumer("t", "g", max_rows=50, timeout=20) as consumer:
        for producer in producers:
            producer.start()
        while len(found) < 2000:
            found += next(consumer).data.column("n").to_pylist()
            behind.append(sum(t.ends("t")) - sum(t.offsets("g")["t"].values()))
            consumer.commit()
    for producer in producers:
        producer.join()
    assert sorted(found) == list(range(2000))
    assert max(behind) <= 300


# --- backpressure of a subscription ---------------------------------------------------------------


def test_a_subscription_makes_producers_wait_for_itself_alone(t: EmbeddedLog) -> None:
    """R-A3: other groups of the topic may be as far behind as they like."""
    t.append("t", rows(500))  # g, which has said nothing, is 500 behind
    calm = {"flow": "backpressure", "flow_rows": 100, "flow_seconds": 30}
    with t.consumer("t", "calm", start="latest", max_rows=60, timeout=10, **calm) as consumer:
        t.append("t", rows(100))
        next(consumer)
        done: list[int] = []
        producer = threading.Thread(target=lambda: done.append(t.append("t", rows(50)).rows))
        producer.start()
        producer.join(0.2)
        assert not done  # no room for 50
        consumer.commit()
        producer.join(20)
        assert done == [50]
    assert t.topic("t").pressure == {"calm": Pressure(100, 30.0)}
    assert sum(t.ends("t")) == 650


def test_a_subscription_hundred_times_slower_holds_producers_of_two_processes_back(
    folder: str, t: EmbeddedLog
) -> None:
    """R-A3: never more than flow_rows wait, every row that was acknowledged arrives, once."""
    code = """
        log = hr.connect(folder)
        first = int(sys.argv[2])
        say("ready")
        sys.stdin.readline()
        taken = waits = 0
        while taken < 1000:
            try:
                rows = [{"n": first + n} for n in range(taken, taken + 100)]
                taken += log.append("t", rows).rows
            except errors.TopicFull as full:
                assert full.details["group"] == "slow", full
                waits += 1
                if waits == 1:
                    say("held back")
        say(taken, waits)
    """
    found: list[int] = []
    slow = {"flow": "backpressure", "flow_rows": 300, "flow_seconds": 0.01}
    with (
        t.consumer("t", "slow", max_rows=20, timeout=20, **slow) as consumer,
        Child(folder, code, 0) as one,
        Child(folder, code, 1000) as two,
    ):
        assert one.line() == two.line() == "ready"
        one.go()
        two.go()
        assert one.line() == two.line() == "held back"  # before anything is read: 300 rows wait
        while len(found) < 2000:
            found += next(consumer).data.column("n").to_pylist()
            assert sum(t.ends("t")) - sum(t.offsets("slow")["t"].values()) <= 300
            consumer.commit()
        reports = [[int(word) for word in child.line().split()] for child in (one, two)]
    assert [taken for taken, _ in reports] == [1000, 1000]
    assert sum(waits for _, waits in reports) > 0
    assert sorted(found) == list(range(2000))


def test_a_subscriber_that_died_is_named_with_the_way_out(folder: str, t: EmbeddedLog) -> None:
    """Its bound holds while it is away, producers are told whom they wait for, and can go on."""
    code = """
        log = hr.connect(folder)
        options = {"flow": "backpressure", "flow_rows": 10, "flow_seconds": 0.05}
        consumer = log.consumer("t", "dead", **options)
        say("joined")
        sys.stdin.readline()
    """
    with Child(folder, code) as child:
        assert child.line() == "joined"
        t.append("t", rows(10))
        with pytest.raises(errors.TopicFull) as raised:
            t.append("t", rows(1))
        assert raised.value.details["members"] == 1
        assert "speed up group 'dead'" in raised.value.fix
        child.kill()
    with pytest.raises(errors.TopicFull) as raised:
        t.append("t", rows(1))
    assert raised.value.details == {"group": "dead", "behind": 10, "flow_rows": 10, "members": 0}
    assert "none of its members is alive" in raised.value.fact
    assert "headrace group release dead" in raised.value.fix
    t.release_group("dead")
    t.append("t", rows(20))
    assert t.offsets("dead") == {"t": {0: 0, 1: 0}}  # where it was: it misses nothing
    with t.consumer("t", "dead", follow=False) as back:
        assert sum(len(batch) for batch in back) == 30


@pytest.mark.parametrize("end", ["deleted", "another flow", "topic made again"])
def test_producers_wait_no_more_when_it_is_over(t: EmbeddedLog, end: str) -> None:
    limit = {"flow": "backpressure", "flow_rows": 10, "flow_seconds": 0.05}
    t.consumer("t", "s", **limit).close()
    t.append("t", rows(10))
    with pytest.raises(errors.TopicFull):
        t.append("t", rows(1))
    if end == "deleted":
        t.delete_group("s")
        t.copy_group("g", "s")  # another group of its name
        assert t.group("s").state.pressure is None
    elif end == "another flow":
        t.consumer("t", "s").close()
    else:
        t.delete_topic("t")
        t.create_topic("t", "n bigint")
    assert not t.topic("t").limited
    assert t.append("t", rows(50)).rows == 50


def test_a_pattern_with_backpressure_counts_for_topics_made_later(t: EmbeddedLog) -> None:
    limit = {"flow": "backpressure", "flow_rows": 10, "flow_seconds": 0.05}
    with t.consumer("shop.*", "s", follow=False, **limit) as consumer:
        t.create_topic("shop.orders", "n bigint")
        assert next(consumer, None) is None  # it has taken the topic up
        t.append("shop.orders", rows(10))
        with pytest.raises(errors.TopicFull):
            t.append("shop.orders", rows(1))
        t.append("t", rows(100))
        assert len(next(consumer)) == 10
        consumer.commit()
        t.append("shop.orders", rows(1))


def test_a_copy_of_a_group_holds_nobody_up(t: EmbeddedLog) -> None:
    """A replay from the start is far behind: that must not stop the producers."""
    t.append("t", rows(10))
    with t.consumer(
        "t", "s", flow="backpressure", flow_rows=10, flow_seconds=0.05, follow=False
    ) as consumer:
        for _ in consumer:
            consumer.commit()
        t.copy_group("s", "again", "earliest")
        assert t.append("t", rows(10)).rows == 10
        with pytest.raises(errors.TopicFull) as raised:
            t.append("t", rows(1))
        assert raised.value.details["group"] == "s"


def test_a_topic_and_a_subscription_limit_together(t: EmbeddedLog) -> None:
    """The wait for a subscription comes first, then the topic drops what finds no room."""
    limit = {"flow": "backpressure", "flow_rows": 20, "flow_seconds": 0.05}
    t.set_topic("t", flow="drop", flow_rows=15)
    with t.consumer("t", "s", start="latest", **limit):
        receipt = t.append("t", rows(18))
        assert (receipt.rows, receipt.dropped) == (15, 3)
        with pytest.raises(errors.TopicFull):
            t.append("t", rows(6))
        assert t.append("t", rows(5)).dropped == 5
    with pytest.raises(errors.BatchTooLarge) as refused:
        t.append("t", rows(21))
    assert "group 's'" in refused.value.fact
    assert t.dropped("t") == 8


def test_what_a_subscription_says_survives_checkpoints_and_restarts(folder: str) -> None:
    with hr.connect(folder, **TINY) as log:
        log.create_topic("t", "n bigint")
        limit = {"flow": "backpressure", "flow_rows": 5000, "flow_seconds": 0.05}
        log.consumer("t", "s", **limit).close()
        for _ in range(50):
            log.append("t", rows(100))  # several journal files
    with hr.connect(folder) as log:
        assert log.group("s").state.pressure == Pressure(5000, 0.05)
        with pytest.raises(errors.TopicFull):
            log.append("t", rows(1))


@pytest.mark.parametrize(
    "options",
    [
        {"flow": "backpressure"},
        {"flow": "backpressure", "flow_rows": 0},
        {"flow": "backpressure", "flow_rows": 1, "flow_seconds": -1},
        {"flow": "wait", "flow_rows": 1},
        {"flow_rows": 1},
    ],
)
def test_a_flow_that_cannot_be_is_refused(t: EmbeddedLog, options: dict[str, Any]) -> None:
    with pytest.raises(errors.BadSetting):
        t.consumer("t", "s", **options)
    assert "s" not in t.groups()


# --- drop -----------------------------------------------------------------------------------------


def test_rows_that_find_no_room_are_counted_to_the_row(folder: str, t: EmbeddedLog) -> None:
    """R-A3: in the receipt and in the log, with two processes at once and a slow consumer."""
    t.set_topic("t", flow="drop", flow_rows=150)
    code = """
        log = hr.connect(folder)
        say("ready")
        sys.stdin.readline()
        told = taken = 0
        for number in range(60):
            receipt = log.append("t", [{"n": n} for n in range(40)])
            told, taken = told + receipt.dropped, taken + receipt.rows
        say(taken, told)
    """
    with Child(folder, code) as one, Child(folder, code) as two:
        assert one.line() == two.line() == "ready"
        reports: list[list[int]] = []

        def collect() -> None:
            reports.extend([int(word) for word in child.line().split()] for child in (one, two))

        collector = threading.Thread(target=collect)
        collector.start()
        one.go()
        two.go()
        read, over = 0, False
        with t.consumer("t", "g", max_rows=1, timeout=0.1) as consumer:
            while not over:
                over = not collector.is_alive()  # what is there now is all that there will be
                for batch in consumer:
                    read += len(batch)
                    consumer.commit()
                    assert sum(t.ends("t")) - sum(t.offsets("g")["t"].values()) <= 150
        collector.join()
    taken, told = (sum(column) for column in zip(*reports, strict=True))
    assert taken + told == 2 * 60 * 40
    assert (read, sum(t.ends("t"))) == (taken, taken)
    assert t.dropped("t") == told > 0
    t.close()
    with hr.connect(folder) as again:
        assert again.dropped("t") == told


def test_the_first_rows_of_a_batch_are_kept_and_transactions_are_not_cut(t: EmbeddedLog) -> None:
    t.set_topic("t", flow="drop", flow_rows=10)
    receipt = t.append("t", rows(15), headers=[{"h": b"%d" % n} for n in range(15)])
    assert (receipt.rows, receipt.dropped) == (10, 5)
    kept = [row["n"] for batch in t.read("t") for row in batch.to_pylist()]
    assert sorted(kept) == list(range(10))
    t.set_topic("t", flow_rows=15)
    assert t.append("t", rows(6), transactions=[3, 3]).dropped == 6
    assert t.append("t", [t.stage("t", rows(6))]).dropped == 6
    assert t.append("t", rows(6)).dropped == 1
    assert t.dropped("t") == 5 + 6 + 6 + 1


def test_a_producer_says_what_was_dropped(t: EmbeddedLog) -> None:
    t.set_topic("t", flow="drop", flow_rows=10)
    with t.producer("t") as producer:
        for row in rows(25):
            producer.send(row)
    assert (producer.sent_total, producer.dropped_total) == (10, 15)


def test_a_commit_that_is_tried_again_counts_once(
    t: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outcome that is not known: the commit was taken, and is repeated."""
    t.append("t", rows(100), partition=0)
    with t.consumer("t", "g", flow="drop", flow_rows=20, follow=False) as consumer:
        next(consumer)
        original = t.append_entry

        def unsure(*given: Any, **named: Any) -> Any:
            original(*given, **named)
            raise errors.Unknown("the disk went away for a moment")

        monkeypatch.setattr(t, "append_entry", unsure)
        with pytest.raises(errors.Unknown):
            consumer.commit()
        monkeypatch.undo()
        consumer.commit()
    assert [lag.skipped for lag in t.group("g").lags] == [80, 0]


def test_changes_are_not_dropped(t: EmbeddedLog) -> None:
    t.create_topic("c", "k bigint", key="k", kind="changes")
    with pytest.raises(errors.BadSetting):
        t.set_topic("c", flow="drop")


def test_a_subscription_that_drops_skips_ahead_and_counts(t: EmbeddedLog) -> None:
    """R-A3: per subscription; what was read and what was skipped are all there is, durably."""
    total = read = 0
    with t.consumer("t", "g", flow="drop", flow_rows=20, max_rows=2, follow=False) as consumer:
        for number in range(30):
            t.append("t", rows(100), partition=number % 2)
            total += 100
            read += len(next(consumer))
            consumer.commit()
        while (batch := next(consumer, None)) is not None:
            read += len(batch)
            consumer.commit()
        assert consumer.skipped == {"gone": 0, "dropped": total - read}
    assert sum(lag.skipped for lag in t.group("g").lags) == total - read > 0
    assert t.group("g").lag.events == 0


# --- buffer, and memory ---------------------------------------------------------------------------

SLOW = """
    import resource
    flow, limit = sys.argv[2], int(sys.argv[3])
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    log = hr.connect(folder, durability="os")
    block = os.urandom(64 << 10)
    options = {} if flow in ("buffer", "topic drop", "topic wait") else {
        "flow": flow, "flow_rows": limit, **({"flow_seconds": 0} if flow == "backpressure" else {})
    }
    consumer = log.consumer("t", "g", max_rows=1, follow=False, **options)
    say("joined")
    def step(produce):
        for _ in range(produce):
            try:
                taken = log.append("t", [{"b": block}])
            except errors.TopicFull:
                counts[3] += 1
                continue
            counts[0] += taken.rows
            counts[1] += taken.dropped
        if next(consumer, None) is not None:
            counts[2] += 1
            consumer.commit()
    counts = [0, 0, 0, 0]
    for _ in range(3):
        step(20)
    before = peak()
    for _ in range(50):
        step(100)
    log.sync()
    while next(consumer, None) is not None:
        counts[2] += 1
        if counts[2] % 50 == 0:
            consumer.commit()
    consumer.commit()
    say(*counts, consumer.skipped["dropped"], peak() - before)
"""


@pytest.mark.parametrize(
    "flow_name", ["buffer", "topic drop", "topic wait", "drop", "backpressure"]
)
def test_memory_is_bounded_with_a_consumer_hundred_times_slower(
    folder: str, log: EmbeddedLog, flow_name: str
) -> None:
    """5,060 rows of 64 KB, 316 MB: nothing grows with what waits, every row is accounted for."""
    log.create_topic("t", "b binary")
    if flow_name == "topic drop":
        log.set_topic("t", flow="drop", flow_rows=200)
    if flow_name == "topic wait":
        log.set_topic("t", flow="backpressure", flow_rows=200, flow_seconds=0)
    with Child(folder, SLOW, flow_name, 200) as child:
        assert child.line() == "joined"
        taken, dropped, read, refused, skipped, grown = map(int, child.line().split())
    assert (taken + dropped + refused, read + skipped) == (5060, taken)
    assert (dropped > 0, skipped > 0) == (flow_name == "topic drop", flow_name == "drop")
    assert (refused > 0) == (flow_name in ("topic wait", "backpressure"))
    assert grown < 120, f"grew by {grown} MB"


def test_a_topic_without_flow_is_not_asked(t: EmbeddedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is paid for it: no lock, no look at groups."""
    monkeypatch.setattr(flow, "append_entry", lambda *_, **__: pytest.fail("it was asked"))
    t.append("t", rows(1))
    with t.transaction() as transaction:
        transaction.append("t", rows(1))


def test_a_flow_set_by_another_handle_counts_from_the_next_append_on(
    folder: str, t: EmbeddedLog
) -> None:
    t.append("t", rows(1))
    with hr.connect(folder) as other:
        other.set_topic("t", flow="drop", flow_rows=5)
    assert t.append("t", rows(10)).dropped == 6


def test_an_idle_producer_waits_without_polling(t: EmbeddedLog) -> None:
    """It sleeps until a commit: no processor time goes by."""
    t.set_topic("t", flow="backpressure", flow_rows=10, flow_seconds=1.0)
    t.append("t", rows(10))
    used = time.thread_time()
    with pytest.raises(errors.TopicFull):
        t.append("t", rows(1))
    assert time.thread_time() - used < 0.2
