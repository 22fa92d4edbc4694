"""What every log must promise consumer groups (R-A7, A10, A12, A13); used as `log_suite` is.

Each check has a log to itself, and handles of it, which are processes as far as the log can tell.
Members are on threads, or take turns in one. What it cannot see: a member that is killed (its
process is that of the test; `tests/log/test_group_processes.py`), and how soon anything happens.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from headrace import errors
from headrace.model.lag import BY_TIME, NEVER_COMMITTED, NOTHING_TO_READ
from headrace.testing.log_suite import PATIENCE_SECONDS, Open, ids, refused, some, two

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog as Log
    from headrace.log.groups.consumer import Consumer
    from headrace.model.records import Batch

Places = list[tuple[str, int, int]]
"""Topic, partition and offset of rows."""


def places(batches: Iterable[Batch]) -> Places:
    """Where rows were read."""
    return [
        (batch.topic, partition, offset)
        for batch in batches
        for partition, offset in zip(
            batch.partition.to_pylist(), batch.offset.to_pylist(), strict=True
        )
    ]


def drained(members: Sequence[Consumer]) -> list[list[Batch]]:
    """What each member is handed, taking turns and committing, until nobody gets anything more."""
    found: list[list[Batch]] = [[] for _ in members]
    idle = 0
    while idle < 3:  # a hand-over takes a turn of who gives, then one of who takes
        idle += 1
        for one, got in zip(members, found, strict=True):
            batch = next(one, None)
            if batch is not None:
                got.append(batch)
                one.commit()
                idle = 0
    return found


def filled(log: Log, rows: int = 200) -> set[tuple[str, int, int]]:
    """Rows in all partitions of `orders`; all the places there are."""
    log.append("orders", some(*range(rows)))
    return set(places(log.read("orders")))


def each_group_gets_every_row_and_each_member_its_share(open_log: Open) -> None:
    """Two groups of three members of two handles; no row goes to two members of one (R-A7)."""
    one, other = two(open_log)
    groups = {
        name: [log.consumer("orders", name, follow=False, max_rows=7) for log in (one, other, one)]
        for name in ("billing", "search")
    }
    for members in groups.values():
        drained(members)  # all have what is theirs
        owned = [one.assignment.get("orders", frozenset()) for one in members]
        assert sorted(map(len, owned)) == [1, 1, 2], owned
        assert frozenset().union(*owned) == {0, 1, 2, 3}
    every = filled(one)
    for members in groups.values():
        found = drained(members)
        assert Counter(places(batch for got in found for batch in got)) == Counter(every)
        for member, got in zip(members, found, strict=True):
            read = {partition for _, partition, _ in places(got)}
            assert read <= member.assignment["orders"], (read, member.assignment)
            member.close()


def a_pattern_takes_up_topics_that_are_made_later(open_log: Open) -> None:
    """Also while a member reads, by whichever handle they are made (R-A7)."""
    one, other = two(open_log)
    with one.consumer(["or*", "shop.?"], "g", follow=False) as consumer:
        one.append("orders", some(1))
        assert sum(map(len, drained([consumer])[0])) == 1
        for number, name in enumerate(("shop.a", "shop.b", "shop.no")):
            other.create_topic(name, "id bigint")
            other.append(name, some(number))
        found = drained([consumer])[0]
        assert sorted(batch.topic for batch in found) == ["shop.a", "shop.b"]
        assert set(consumer.assignment) == {"orders", "shop.a", "shop.b"}


def who_takes_over_goes_on_at_the_committed_offset(open_log: Open) -> None:
    """Nothing is skipped; twice comes only what was handed out and not committed (R-A10)."""
    one, other = two(open_log)
    every = filled(one)
    first = one.consumer("orders", "g", follow=False, max_rows=30)
    kept = [next(first), next(first)]
    first.commit()
    lost = next(first)
    first.close()
    with other.consumer("orders", "g", follow=False) as second:
        rest = [batch for got in drained([second]) for batch in got]
    assert set(places(rest)) >= set(places([lost]))
    assert Counter(places([*kept, *rest])) == Counter(every)
    behind = other.group("g").lag
    assert (behind.events, behind.unknown) == (0, 0)
    with one.consumer("orders", "g", follow=False) as third:
        assert next(third, None) is None


def who_comes_and_goes_in_peace_makes_nothing_come_twice(open_log: Open) -> None:
    """Members join and leave between batches; each row is handed out once (R-A7, A10)."""
    one, other = two(open_log)
    every: set[tuple[str, int, int]] = set()
    members = [one.consumer("orders", "g", follow=False, max_rows=5)]
    found: list[Batch] = []
    for turn in range(6):
        every = filled(one, 40)
        handed = [next(member, None) for member in members]
        if turn % 2 == 0:  # joins while batches are open
            handle = (one, other)[turn // 2 % 2]
            members.append(handle.consumer("orders", "g", follow=False, max_rows=5))
        for member, batch in zip(members, handed, strict=False):
            if batch is not None:
                found.append(batch)
                member.commit()
        if turn % 3 == 2:
            members.pop(0).close()
        found += [batch for got in drained(members) for batch in got]
    assert Counter(places(found)) == Counter(every)
    for member in members:
        member.close()


def who_was_put_out_commits_nothing(open_log: Open) -> None:
    """A commit, alone or in a transaction, counts in the generation it was meant for (R-A10)."""
    one, other = two(open_log)
    filled(one)
    before = None
    for in_transaction in (False, True):
        with one.consumer("orders", "g", follow=False, max_rows=10) as member:
            before = before or other.offsets("g")
            next(member)
            other.reset_group("g", "earliest", force=True)

            def commit(member: Consumer = member, both: bool = in_transaction) -> None:
                if not both:
                    return member.commit()
                with one.transaction() as transaction:
                    transaction.append("audit", some(1))
                    member.commit_in(transaction)
                return None

            refused(errors.MemberPutOut, commit)
            assert other.offsets("g") == before
            assert sum(map(len, drained([member])[0])) == 200  # it has joined again
        other.reset_group("g", "earliest")
    assert not ids(other.read("audit"))


def a_transaction_of_an_older_generation_is_refused_whole(open_log: Open) -> None:
    """Somebody joined since `commit_in`: what was made of the rows is not there either (R-A10)."""
    one, other = two(open_log)
    every = filled(one)
    joined: list[Consumer] = []

    def transform() -> None:
        with one.transaction() as transaction:
            batch = next(member)
            transaction.append("audit", batch.data.select(["id"]))
            member.commit_in(transaction)
            joined.append(other.consumer("orders", "g", follow=False))

    with one.consumer("orders", "g", follow=False, max_rows=50) as member:
        refused(errors.GroupMoved, transform)
        assert not ids(other.read("audit"))
        found = drained([member, *joined])
        assert Counter(places(b for got in found for b in got)) == Counter(every)
    joined[0].close()


def a_member_that_hangs_is_put_out(open_log: Open) -> None:
    """Others read what was its own, from the committed offset on (R-A10)."""
    one, other = two(open_log)
    every = filled(one)
    hung = one.consumer("orders", "g", lease_seconds=0.2, follow=False, max_rows=20)
    kept = next(hung)
    hung.commit()
    next(hung)
    found: list[Batch] = []
    patience = threading.Timer(PATIENCE_SECONDS, lambda: other.append("audit", some(0)))
    patience.start()
    with other.consumer(["orders", "audit"], "g", lease_seconds=0.2) as member:
        for batch in member:
            if batch.topic == "audit":
                break
            found.append(batch)
            member.commit()
            if len(places([kept, *found])) >= len(every):
                break
    patience.cancel()
    assert Counter(places([kept, *found])) == Counter(every)
    refused(errors.MemberPutOut, hung.commit)
    hung.close()


def lag_is_what_arithmetic_says(open_log: Open) -> None:
    """In events and seconds, of a stopped group on a quiet topic; unknown is not zero (R-A12)."""
    one, other = two(open_log)
    one.set_topic("audit", retention_seconds=10_000_000)
    receipts = [one.append("audit", some(number)) for number in range(5)]
    with one.transaction() as transaction:
        transaction.commit_offsets("g", {"audit": {0: 2}, "orders": {1: 0}})
    one.append("orders", some(1))  # of partition 2
    lags = {(lag.topic, lag.partition): lag for lag in other.group("g").lags}
    audit = lags["audit", 0]
    assert (audit.committed, audit.end, audit.events, audit.gone) == (2, 5, 3, 0)
    assert audit.seconds is not None
    assert audit.oldest_us == receipts[2].received_us
    assert audit.seconds == (audit.now_us - audit.oldest_us) / 1e6
    assert (audit.fall, audit.falls_off_seconds) == (BY_TIME, 10_000_000 - audit.seconds)
    orders = [lags["orders", partition] for partition in range(4)]
    assert [lag.events for lag in orders] == [None, 0, None, None]
    assert [lag.seconds for lag in orders] == [None, 0.0, None, None]
    assert [lag.fall for lag in orders] == [
        NOTHING_TO_READ if partition == 1 else NEVER_COMMITTED for partition in range(4)
    ]
    total = other.group("g").lag
    assert (total.events, total.unknown) == (3, 3)
    later = {(lag.topic, lag.partition): lag for lag in other.group("g").lags}["audit", 0]
    assert later.seconds is not None
    assert later.seconds > audit.seconds  # nothing was appended, and it is older


def a_group_is_moved_to_any_place_and_a_copy_leaves_it_alone(open_log: Open) -> None:
    """By offset, time, position, to either end; a preview moves nothing (R-A13)."""
    one, other = two(open_log)
    receipts = [one.append("audit", some(number)) for number in range(6)]
    with one.consumer("audit", "g", follow=False) as consumer:
        drained([consumer])
        refused(errors.GroupInUse, lambda: other.reset_group("g", "earliest"))
    at: dict[Any, int] = {
        "earliest": 0,
        "latest": 6,
        4: 4,
        receipts[3].received_time: min(
            n for n in range(6) if receipts[n].received_time >= receipts[3].received_time
        ),
        receipts[5].received_time + timedelta(days=1): 6,
        f"position:{receipts[1].position}": 2,
    }
    for place, offset in at.items():
        have = one.offsets("g")["audit"][0]
        (move,) = other.reset_group("g", place, dry_run=True)
        assert (move.before, move.after, move.events) == (have, offset, have - offset), place
        assert one.offsets("g") == {"audit": {0: have}}
        other.reset_group("g", place)
        assert one.offsets("g") == {"audit": {0: offset}}
        with one.consumer("audit", "g", follow=False) as consumer:
            assert ids(drained([consumer])[0]) == list(range(offset, 6))
    refused(errors.BadPosition, lambda: other.reset_group("g", "position:x"))
    refused(errors.UnknownGroup, lambda: other.reset_group("gg", "earliest"))
    found = []
    for name in ("again", "and again"):
        other.copy_group("g", name, "earliest")
        with one.consumer("audit", name, follow=False) as consumer:
            found.append([batch.data for batch in drained([consumer])[0]])
    assert found[0] == found[1]
    assert sum(batch.num_rows for batch in found[0]) == 6
    assert one.offsets("g") == {"audit": {0: 6}}
    refused(errors.GroupExists, lambda: other.copy_group("g", "again"))
    other.delete_group("again")
    assert other.groups() == one.groups() == ["and again", "g"]


GROUP_CHECKS: list[Callable[[Open], None]] = [
    each_group_gets_every_row_and_each_member_its_share,
    a_pattern_takes_up_topics_that_are_made_later,
    who_takes_over_goes_on_at_the_committed_offset,
    who_comes_and_goes_in_peace_makes_nothing_come_twice,
    who_was_put_out_commits_nothing,
    a_transaction_of_an_older_generation_is_refused_whole,
    a_member_that_hangs_is_put_out,
    lag_is_what_arithmetic_says,
    a_group_is_moved_to_any_place_and_a_copy_leaves_it_alone,
]
