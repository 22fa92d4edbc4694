"""Consumer groups in one process: what a consumer promises, replay, lag; members on threads.

Caught: rows that a group misses or reads twice without need, wrong starts, patterns that overlook a
topic, gaps that are not told, resets that do something else than their preview, lag that differs
from arithmetic. Not caught: what needs real deaths (`test_group_processes.py`) or odd schedules
(`tests/faults/test_group_bugs.py`).
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.groups.consumer import Consumer
from headrace.log.groups.watch import lives
from headrace.model.lag import KEPT
from tests.log.kit import Machine, machine_log
from tests.log.test_keeper import seal


def rows(count: int, first: int = 0) -> list[dict[str, int]]:
    return [{"n": n} for n in range(first, first + count)]


def numbers(consumer: Consumer, *, commit: bool = True) -> list[int]:
    """All that there is to read now."""
    found: list[int] = []
    for batch in consumer:
        found += batch.data.column("n").to_pylist()
        if commit:
            consumer.commit()
    return found


@pytest.fixture
def t(log: EmbeddedLog) -> EmbeddedLog:
    """A log with the topic t of four partitions and 100 rows."""
    log.create_topic("t", "n bigint, b string", key="n", partitions=4)
    log.append("t", rows(100))
    return log


# --- reading and committing -----------------------------------------------------------------------


def test_a_group_reads_everything_once_and_goes_on_where_it_stopped(t: EmbeddedLog) -> None:
    with t.consumer("t", "g", follow=False) as consumer:
        assert sorted(numbers(consumer)) == list(range(100))
    t.append("t", rows(10, 100))
    with t.consumer("t", "g", follow=False) as consumer:
        assert sorted(numbers(consumer)) == list(range(100, 110))
    assert sum(t.offsets("g")["t"].values()) == 110


def test_what_was_not_committed_comes_again(t: EmbeddedLog) -> None:
    with t.consumer("t", "g", follow=False, max_rows=7) as consumer:
        first, second = next(consumer), next(consumer)
        consumer.commit(first)
    assert (len(first), len(second)) == (7, 7)
    with t.consumer("t", "g", follow=False) as consumer:
        again = numbers(consumer)
    assert sorted([*first.data.column("n").to_pylist(), *again]) == list(range(100))


def test_two_groups_both_get_everything_and_members_share(t: EmbeddedLog) -> None:
    """R-A7: fan-out, load balancing, and both."""
    for group in ("a", "b"):
        members = [t.consumer("t", group, follow=False) for _ in range(3)]
        found = [numbers(member) for _ in range(3) for member in members]
        assert sorted(n for some in found for n in some) == list(range(100))
        sizes = sorted(len(member.assignment.get("t", ())) for member in members)
        assert sizes == [1, 1, 2]
        for member in members:
            member.close()


def test_columns_and_batches_of_at_most_so_many_rows(t: EmbeddedLog) -> None:
    with t.consumer("t", "g", columns=["b"], max_rows=8, follow=False) as consumer:
        batches = list(consumer)
    assert {batch.data.schema.names[0] for batch in batches} == {"b"}
    assert max(map(len, batches)) == 8
    offsets = sorted(
        pair
        for batch in batches
        for pair in zip(batch.partition.to_pylist(), batch.offset.to_pylist(), strict=True)
    )
    assert offsets == [(p, o) for p, end in enumerate(t.ends("t")) for o in range(end)]


def test_members_on_threads_share_the_work(t: EmbeddedLog) -> None:
    guard, found, ready = threading.Lock(), [], threading.Barrier(3)

    def work() -> None:
        with t.consumer("t", "g", timeout=1.0, max_rows=5) as consumer:
            ready.wait()
            for batch in consumer:
                with guard:
                    found.extend(batch.data.column("n").to_pylist())
                consumer.commit()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(100))
    assert t.group("g").state.members == {}


def test_a_waiting_consumer_is_woken_by_an_append(t: EmbeddedLog) -> None:
    with t.consumer("t", "g", start="latest", timeout=30) as consumer:
        timer = threading.Timer(0.1, lambda: t.append("t", rows(1, 500)))
        timer.start()
        assert next(consumer).data.column("n").to_pylist() == [500]
        timer.join()


def test_a_forgotten_consumer_is_a_dead_one(t: EmbeddedLog) -> None:
    consumer = t.consumer("t", "g", lease_seconds=600)
    name = consumer._member._file.name
    assert lives(t.path, name)
    with t.consumer("t", "g", lease_seconds=600, timeout=30) as other:
        assert other.assignment == {}
        del consumer
        gc.collect()
        assert len(next(other)) == 100  # the watch has put it out
    assert not lives(t.path, name)


def test_without_inotify_a_death_is_found_when_leases_are_looked_at(
    t: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoMore:
        inotify_init1 = staticmethod(lambda _: -1)

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: NoMore)
    dead = t.consumer("t", "g", lease_seconds=600)
    with t.consumer("t", "g", lease_seconds=0.6, timeout=30) as consumer:
        dead._member._file.close()
        assert len(next(consumer)) == 100


def test_consumers_leave_nothing_behind(t: EmbeddedLog) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    t.consumer("t", "g").close()
    before = held()
    for _ in range(20):
        with t.consumer("t", "g", follow=False) as one, t.consumer("t", "h", follow=False) as two:
            next(one)
            next(two)
    deadline = time.monotonic() + 20  # the thread of a watch ends a moment later
    while held() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held() <= before
    assert os.listdir(f"{t.path}/locks/members") == []


def test_the_end_of_the_log_ends_the_iteration(folder: str, t: EmbeddedLog) -> None:
    consumer = t.consumer("t", "g")
    numbers_read = 0
    while numbers_read < 100:
        numbers_read += len(next(consumer))
    threading.Timer(0.1, t.close).start()
    assert list(consumer) == []


# --- where a group begins -------------------------------------------------------------------------


def test_a_new_group_begins_at_the_end_if_it_says_so(t: EmbeddedLog) -> None:
    """And what comes before its first commit is not skipped by the next member."""
    t.consumer("t", "g", start="latest").close()
    t.append("t", rows(5, 100))
    with t.consumer("t", "g", start="latest", follow=False) as consumer:
        assert sorted(numbers(consumer)) == list(range(100, 105))


def test_a_new_group_begins_at_a_time(t: EmbeddedLog) -> None:
    receipt = t.append("t", rows(20, 100))
    t.append("t", rows(20, 120))
    with t.consumer("t", "g", start=receipt.received_time, follow=False) as consumer:
        assert sorted(numbers(consumer)) == list(range(100, 140))


def test_a_pattern_takes_up_topics_that_are_made_later(t: EmbeddedLog) -> None:
    for name in ("shop.a", "shop.b", "other"):
        t.create_topic(name, "n bigint", partitions=2)
        t.append(name, rows(3))
    with t.consumer("shop.*", "g", start="latest", follow=False) as consumer:
        assert set(consumer.assignment) == {"shop.a", "shop.b"}
        assert numbers(consumer) == []
        t.create_topic("shop.c", "n bigint")
        t.append("shop.c", rows(4))
        assert numbers(consumer) == [0, 1, 2, 3]  # a topic that is new is read from its start
        t.delete_topic("shop.a")
        assert numbers(consumer) == []
        assert set(consumer.assignment) == {"shop.b", "shop.c"}


def test_a_topic_made_again_under_its_name_is_another_one(t: EmbeddedLog) -> None:
    """Offsets of the deleted one do not count, nor does a commit of what was read of it."""
    t.create_topic("x", "n bigint")
    t.append("x", rows(5))
    with t.consumer("x", "g", follow=False) as consumer:
        assert len(next(consumer)) == 5
        t.delete_topic("x")
        t.create_topic("x", "n bigint")
        t.append("x", rows(3))
        with pytest.raises(errors.UnknownTopic):
            consumer.commit()
        assert t.offsets("g").get("x", {}) in ({}, {0: 0})
        assert numbers(consumer) == [0, 1, 2]
    assert t.offsets("g") == {"x": {0: 3}}


def test_settings_that_cannot_be_are_refused(t: EmbeddedLog) -> None:
    bad: list[dict[str, Any]] = [
        {"max_rows": 0},
        {"flow": "backpressure"},
        {"flow": "drop"},
        {"flow_rows": 5},
        {"on_gone": "ignore"},
        {"start": 5},
        {"lease_seconds": 0},
        {"colums": ["n"]},
    ]
    for options in bad:
        with pytest.raises(errors.BadSetting):
            t.consumer("t", "g", **options)
    with pytest.raises(errors.BadSetting):
        t.consumer("t", "")
    with pytest.raises(errors.UnknownTopic):
        t.consumer("tt", "g")
    assert t.groups() == []


# --- generations ----------------------------------------------------------------------------------


def test_a_member_that_joins_takes_over_without_anything_twice(t: EmbeddedLog) -> None:
    with t.consumer("t", "g", follow=False, max_rows=50) as first:
        found = next(first).data.column("n").to_pylist()
        with t.consumer("t", "g", follow=False) as second:
            assert numbers(second) == []  # the first one has not finished its batch
            first.commit()
            found += numbers(first) + numbers(second)
            assert sorted(found) == list(range(100))
            assert len(second.assignment["t"]) == 2


def test_a_commit_goes_on_in_the_next_generation(t: EmbeddedLog) -> None:
    with t.consumer("t", "g", follow=False) as first:
        next(first)
        generation = first.generation
        t.consumer("t", "g").close()
        first.commit()
        assert t.group("g").state.generation > generation
        assert sum(t.offsets("g")["t"].values()) == 100


def test_whoever_does_not_commit_gives_up_its_partitions_after_a_lease(folder: str) -> None:
    machine = _Clock()
    with machine_log(folder, machine, background=False) as log:
        log.create_topic("t", "n bigint", partitions=2)
        log.append("t", rows(10), partition=0)
        log.append("t", rows(10, 10), partition=1)
        with log.consumer("t", "g", follow=False) as first:
            assert len(next(first)) == 20
            with log.consumer("t", "g", follow=False) as second:
                for _ in range(2):
                    assert next(first, None) is None
                    assert numbers(second) == []
                    machine.now += 16
                assert next(first, None) is None
                assert len(numbers(second)) == 10
                first.commit()
                assert sum(log.offsets("g")["t"].values()) == 20


class _Clock(Machine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_consume_transform_produce_exactly_once(t: EmbeddedLog) -> None:
    """R-A15: what is made of a batch and its offsets are one entry; what fails comes again."""
    t.create_topic("out", "n bigint")
    with t.consumer("t", "g", follow=False, max_rows=30) as consumer:
        fail = True
        for batch in consumer:
            try:
                with t.transaction() as transaction:
                    transaction.append("out", batch.data.select(["n"]))
                    consumer.commit_in(transaction)
                    if fail:
                        raise ArithmeticError
            except ArithmeticError:
                fail = False
    made = [row["n"] for batch in t.read("out") for row in batch.to_pylist()]
    assert sorted(made) == list(range(100))


def test_a_transaction_of_an_old_generation_is_refused_and_its_rows_come_again(
    t: EmbeddedLog,
) -> None:
    t.create_topic("out", "n bigint")
    with t.consumer("t", "g", follow=False) as consumer:
        batch = next(consumer)
        transaction = t.transaction()
        transaction.append("out", batch.data.select(["n"]))
        consumer.commit_in(transaction)
        t.consumer("t", "g").close()
        with pytest.raises(errors.GroupMoved):
            transaction.commit()
        assert t.ends("out") == [0]
        assert sorted(numbers(consumer)) == list(range(100))


def test_a_member_that_was_put_out_commits_nothing_and_joins_again(t: EmbeddedLog) -> None:
    with t.consumer("t", "g", follow=False) as consumer:
        next(consumer)
        with t.transaction() as transaction:
            consumer.commit_in(transaction)
            t.reset_group("g", "earliest", force=True)
            with pytest.raises(errors.MemberPutOut):
                transaction.commit()
        with pytest.raises(errors.MemberPutOut):
            consumer.commit()
        assert sum(t.offsets("g")["t"].values()) == 0
        assert sorted(numbers(consumer)) == list(range(100))


# --- what is gone ---------------------------------------------------------------------------------


def test_what_retention_took_is_told_exactly_or_skipped_and_counted(
    t: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-A11: the reader that fell off the end knows which offsets are gone."""
    t.consumer("t", "g").close()
    ends = t.ends("t")
    starts = [ends[0], 5, 0, 3]
    monkeypatch.setattr(t, "starts", lambda _: starts)
    with (
        t.consumer("t", "g", follow=False) as consumer,
        pytest.raises(errors.OffsetsGone) as raised,
    ):
        next(consumer)
    assert raised.value.details == {
        "topic": "t",
        "partitions": {0: [0, ends[0] - 1], 1: [0, 4], 3: [0, 2]},
    }
    with t.consumer("t", "g", follow=False, on_gone="skip") as consumer:
        assert len(numbers(consumer)) == 100 - sum(starts)
        assert consumer.skipped == {"gone": sum(starts), "dropped": 0}
    facts = t.group("g")
    assert [lag.skipped for lag in facts.lags] == starts
    assert facts.lag.events == 0


def test_what_the_keeper_let_go_is_told_and_skipped(t: EmbeddedLog) -> None:
    """With real retention, over sealed files: also while a reading is under way."""
    t.consumer("t", "g").close()
    reader = t.consumer("t", "late", follow=False, max_rows=10, on_gone="skip")
    read = len(next(reader))
    reader.commit()
    t.set_topic("t", retention_seconds=0)
    seal(t)
    starts = t.starts("t")
    assert starts == t.ends("t")
    t.append("t", rows(10, 100))
    with (
        t.consumer("t", "g", follow=False) as consumer,
        pytest.raises(errors.OffsetsGone) as raised,
    ):
        next(consumer)
    gone = {p: [0, start - 1] for p, start in enumerate(starts)}
    assert raised.value.details["partitions"] == gone
    with reader:
        read += len(numbers(reader))
        assert read + reader.skipped["gone"] == 110
    assert t.group("late").lag.events == 0


# --- lag ------------------------------------------------------------------------------------------


def test_lag_is_what_the_oracle_says(folder: str) -> None:
    """R-A12: each partition, in events and seconds; the group stands still, the topic is quiet."""
    machine = Machine()
    machine.clock_us = 10**15
    with machine_log(folder, machine, background=False) as log:
        log.create_topic("t", "n bigint", partitions=3)
        log.set_topic("t", retention_seconds=100)
        with log.consumer("t", "g", follow=False) as consumer:
            times: dict[int, list[int]] = {0: [], 1: [], 2: []}
            for step in range(30):
                machine.clock_us += 1_000_000
                partition = step % 2
                log.append("t", rows(2), partition=partition)
                times[partition] += [machine.clock_us] * 2
                if step == 9:
                    numbers(consumer)
        machine.clock_us += 40_000_000
        committed = log.offsets("g")["t"]
        for lag in log.group("g").lags:
            unread = times[lag.partition][committed[lag.partition] :]
            age = (machine.clock_us - unread[0]) / 1e6 if unread else 0.0
            assert (lag.events, lag.seconds) == (len(unread), age)
            assert lag.falls_off_seconds == (100 - age if unread else None)
        facts = log.group("g")
        assert (facts.lag.events, facts.lag.seconds, facts.lag.falls_off_seconds) == (40, 59, 41)
        assert facts.lag.warns(41)
        assert not facts.lag.warns(40)


def test_an_archive_out_of_reach_is_an_age_that_is_not_known(
    log: EmbeddedLog, tmp_path: Path
) -> None:
    """The rest is told: events, other partitions and groups. What is archived is not lost."""
    archive = tmp_path / "archive"
    log.create_topic("t", "n bigint", partitions=2)
    log.set_topic("t", retention_seconds=0, archive=str(archive))
    for group in ("late", "early"):
        log.consumer("t", group).close()
    log.append("t", rows(4), partition=0)
    log.keeper().turn(close=True)
    log.append("t", rows(3), partition=1)
    log.reset_group("early", "latest", partitions=[0])
    assert [lag.fall for lag in log.group("late").lags] == [KEPT, KEPT]
    assert not log.group("late").lag.warns(1e9)
    shutil.move(archive, tmp_path / "away")
    old, new = log.group("late").lags
    assert (old.events, old.seconds, new.events, new.problem) == (4, None, 3, None)
    assert old.problem is not None
    assert "archived file" in old.problem
    assert new.seconds is not None
    both = log.group("late").lag
    assert (both.events, both.seconds, both.problem) == (7, None, old.problem)
    assert log.group("early").lag.problem is None
    assert log.group("early").lag.seconds is not None


def test_an_offset_beyond_the_end_is_said(t: EmbeddedLog) -> None:
    """Somebody committed what nobody could have read: no consumer can begin there."""
    with t.transaction() as transaction:
        transaction.commit_offsets("far", {"t": {0: 10**6, 1: t.ends("t")[1]}})
    first, second, *_ = t.group("far").lags
    assert first.problem == f"offset 1000000 was committed, and {t.ends('t')[0]} is the end"
    assert second.problem is None


def test_what_was_never_committed_is_not_zero(t: EmbeddedLog) -> None:
    with t.transaction() as transaction:
        transaction.commit_offsets("plain", {"t": {0: 3}})
    lags = t.group("plain").lags
    assert [lag.events for lag in lags] == [t.ends("t")[0] - 3, None, None, None]
    assert t.group("plain").lag.unknown == 3


def test_lag_of_many_partitions_over_many_files(folder: str) -> None:
    """The age of each is found, wherever its oldest unread row is."""
    machine = Machine()
    machine.clock_us = 10**15
    small = {"journal_bytes_first": 16 << 10, "journal_bytes_max": 32 << 10}
    with machine_log(folder, machine, background=False, durability="os", **small) as log:
        log.create_topic("t", "n bigint", partitions=20)
        times: dict[int, list[int]] = {p: [] for p in range(20)}
        for step in range(400):
            machine.clock_us += 1_000_000
            partition = step * step % 20
            log.append("t", rows(1), partition=partition)
            times[partition].append(machine.clock_us)
        committed = {p: len(found) // 2 for p, found in times.items()}
        with log.transaction() as transaction:
            transaction.commit_offsets("g", {"t": committed})
        for lag in log.group("g").lags:
            unread = times[lag.partition][committed[lag.partition] :]
            assert lag.seconds == ((machine.clock_us - unread[0]) / 1e6 if unread else 0.0)


# --- replay ---------------------------------------------------------------------------------------


def test_a_range_read_twice_gives_equal_rows(t: EmbeddedLog) -> None:
    """R-A13."""
    with t.consumer("t", "g", follow=False) as consumer:
        first = [batch.data for batch in consumer]
        consumer.commit()
    t.reset_group("g", "earliest")
    with t.consumer("t", "g", follow=False) as consumer:
        assert [batch.data for batch in consumer] == first


def test_a_reset_does_what_its_preview_says(t: EmbeddedLog) -> None:
    """To a time, a position, an offset, either end; R-A13."""
    second = t.append("t", rows(20, 100))
    t.append("t", rows(20, 120))
    with t.consumer("t", "g", follow=False) as consumer:
        numbers(consumer)
    before_third = f"position:{second.position}"
    for place, read in (
        ("earliest", range(140)),
        (second.received_time, range(100, 140)),
        (before_third, range(120, 140)),
        (second.received_time + timedelta(days=1), range(0)),
        ("latest", range(0)),
    ):
        preview = t.reset_group("g", place, dry_run=True)
        assert t.offsets("g")["t"] == {move.partition: move.before for move in preview}
        assert sum(move.events or 0 for move in preview) == len(read)
        assert t.reset_group("g", place) == preview
        with t.consumer("t", "g", follow=False) as consumer:
            assert sorted(numbers(consumer)) == list(read)
    moves = t.reset_group("g", 2, topics="t", partitions=[1])
    assert [(move.partition, move.after) for move in moves] == [(1, 2)]
    assert t.offsets("g")["t"][1] == 2


def test_a_place_that_is_none_is_refused(t: EmbeddedLog) -> None:
    t.consumer("t", "g").close()
    for place in ("yesterday", "position:x", True, 1.5):
        with pytest.raises(errors.BadPosition):
            t.reset_group("g", place)  # type: ignore[arg-type]
    with pytest.raises(errors.BadPosition):
        t.reset_group("g", "earliest", partitions=[4])
    with pytest.raises(errors.UnknownGroup) as raised:
        t.reset_group("gg", "earliest")
    assert "did you mean 'g'?" in raised.value.fix


def test_a_deleted_topic_is_no_hindrance(t: EmbeddedLog) -> None:
    t.create_topic("x", "n bigint")
    t.consumer(["t", "x"], "g").close()
    t.delete_topic("x")
    assert {move.topic for move in t.reset_group("g", "latest")} == {"t"}
    assert {move.topic for move in t.copy_group("g", "h")} == {"t"}
    assert {lag.topic for lag in t.group("g").lags} == {"t"}


def test_a_group_in_use_is_not_moved_unless_forced(t: EmbeddedLog) -> None:
    with t.consumer("t", "g", follow=False) as consumer:
        assert len(numbers(consumer)) == 100
        for change in (
            lambda: t.reset_group("g", "earliest"),
            lambda: t.delete_group("g"),
        ):
            with pytest.raises(errors.GroupInUse):
                change()
        t.reset_group("g", "earliest", force=True)
        assert len(numbers(consumer)) == 100


def test_a_copy_starts_elsewhere_and_leaves_the_first_alone(t: EmbeddedLog) -> None:
    """A consumer at yesterday's offsets, writing elsewhere; R-A13."""
    second = t.append("t", rows(20, 100))
    with t.consumer("t", "g", follow=False) as consumer:
        numbers(consumer)
        t.copy_group("g", "yesterday", second.received_time)
        t.copy_group("g", "here")
        before = t.offsets("g")
        with t.consumer("t", "yesterday", follow=False) as copy:
            assert sorted(numbers(copy)) == list(range(100, 120))
        assert t.offsets("g") == before == t.offsets("here")
        with pytest.raises(errors.GroupExists):
            t.copy_group("g", "here")


def test_a_deleted_group_is_gone_and_begins_anew(t: EmbeddedLog) -> None:
    with t.consumer("t", "g", follow=False) as consumer:
        numbers(consumer)
    t.delete_group("g")
    assert t.groups() == []
    with pytest.raises(errors.UnknownGroup):
        t.group("g")
    with t.consumer("t", "g", follow=False) as consumer:
        assert len(numbers(consumer)) == 100
    assert t.groups() == ["g"]


def test_groups_survive_a_reopening(folder: str, t: EmbeddedLog) -> None:
    with t.consumer("t", "g", follow=False) as consumer:
        numbers(consumer)
    before = t.offsets("g")
    t.close()
    with EmbeddedLog(folder) as again:
        assert again.offsets("g") == before
        with again.consumer("t", "g", follow=False) as consumer:
            assert numbers(consumer) == []
