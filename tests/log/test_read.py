"""Reading: from any place, whole entries, in one order, and never past the synced end.

Caught: rows missing, twice or out of order for any start, end, filter or window; half an entry
taken for a whole one; a reader that sees what is not on the disk. Not caught: what a reader has
seen and a power cut takes away (`tests/faults` has followers); memory has a file of its own.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded import live as shared
from headrace.log.embedded.log import EmbeddedLog
from headrace.model.records import Batch
from tests.log.kit import TINY, Machine, files_in, machine_log, places, rows, values


@pytest.fixture
def many(folder: str) -> Iterator[EmbeddedLog]:
    """A log of 120 entries in several journal files: a = 0..359, three a entry, 4 partitions."""
    log = hr.connect(folder, **TINY, read_rows_max=32)
    log.create_topic("t", "a bigint, pad string", key="a", partitions=4)
    log.create_topic("other", "a bigint")
    for i in range(120):
        new = [{"a": 3 * i + j, "pad": "x" * 200} for j in range(3)]
        log.append("t", new, durability="os")
        if i % 3 == 0:
            log.append("other", [{"a": i}], durability="os")
    log.sync()
    assert len(files_in(folder, "journal")) > 4
    with log:
        yield log


def positions(batches: list[Batch]) -> list[int]:
    return [position for batch in batches for position in batch.positions.to_pylist()]


def test_from_the_earliest(many: EmbeddedLog) -> None:
    """A reading gives every row once, entries in order, partitions numbered without gaps. R-A9"""
    batches = list(many.read("t"))
    assert sorted(values(batches)) == list(range(360))
    assert positions(batches) == sorted(positions(batches))
    found = places(batches)
    for partition, end in enumerate(many.ends("t")):
        here = [(offset, a) for p, offset, a in found if p == partition]
        assert [offset for offset, _ in here] == list(range(end))
        assert [a for _, a in here] == sorted(a for _, a in here)


def test_from_the_latest(many: EmbeddedLog) -> None:
    """`latest` gives only what comes after. R-A2"""
    assert list(many.read("t", start="latest")) == []
    reading = many.read("t", start="latest", follow=True, timeout=0.05)
    many.append("t", [{"a": 1000}])
    assert values(reading) == [1000]


@pytest.mark.parametrize("offset", [0, 1, 17, 80, 85])
def test_from_an_offset(many: EmbeddedLog, offset: int) -> None:
    """An offset starts every partition there. R-A9"""
    expected = [place for place in places(many.read("t")) if place[1] >= offset]
    assert places(many.read("t", start=offset)) == expected
    only = [place for place in expected if place[0] in (1, 3)]
    assert places(many.read("t", start=offset, partitions=[1, 3])) == only
    both = many.read("t", start=dict.fromkeys([0, 1, 3], offset), partitions=[1, 2, 3])
    assert places(both) == only


def test_from_offsets_by_partition(many: EmbeddedLog) -> None:
    """{partition: offset} starts each there, and reads no other. R-A9 R-A10"""
    everything = places(many.read("t"))
    ends = many.ends("t")
    starts: list[dict[int, int]] = [
        {0: 0},
        {1: 40, 3: 2},
        {0: ends[0], 1: ends[1] - 1, 2: 0, 3: 50},
        {2: ends[2]},
    ]
    for start in starts:
        expected = [(p, o, a) for p, o, a in everything if p in start and o >= start[p]]
        assert places(many.read("t", start=start)) == expected


def test_from_a_time(folder: str) -> None:
    """A time starts at the first entry that the log received then or later. R-A1"""
    machine = Machine()
    machine.clock_us = 1_700_000_000_000_000
    with machine_log(folder, machine, background=False, **TINY) as log:
        log.create_topic("t", "a bigint, pad string")
        for i in range(300):
            machine.clock_us += 1_000_000
            log.append("t", [{"a": i, "pad": "x" * 300}], durability="os")
        log.sync()
        assert len(files_in(folder, "journal")) > 2
        first = dt.datetime.fromtimestamp(1_700_000_001, dt.UTC)
        for i in (0, 1, 77, 150, 299):
            at = first + dt.timedelta(seconds=i)
            assert values(log.read("t", start=at)) == list(range(i, 300))
            just_before = at - dt.timedelta(microseconds=1)
            assert values(log.read("t", start=just_before)) == list(range(i, 300))
        assert values(log.read("t", start=first - dt.timedelta(days=9))) == list(range(300))
        assert values(log.read("t", start=first + dt.timedelta(days=9))) == []


def test_a_range_of_positions(many: EmbeddedLog) -> None:
    """(after, through] gives exactly the entries between, for any two positions. R-A9"""
    pairs = [
        (position, a)
        for batch in many.read("t")
        for position, a in zip(
            batch.positions.to_pylist(), batch.data["a"].to_pylist(), strict=True
        )
    ]
    newest = many.position
    points = [0, 1, 2, 3, 7, newest // 3, newest // 2, newest - 1, newest]
    for after, through in itertools.combinations_with_replacement(points, 2):
        expected = [a for position, a in pairs if after < position <= through]
        assert values(many.read("t", after=after, through=through)) == expected, (after, through)
    for after in points:
        assert values(many.read("t", after=after)) == [a for p, a in pairs if p > after]


@pytest.mark.timeout(20)
def test_a_range_that_ends_where_the_topic_has_nothing(folder: str) -> None:
    """A range may end in entries, or whole files, without a row of the topic. R-A9"""
    with hr.connect(folder, **TINY) as log:
        log.create_topic("a", "a bigint")
        log.create_topic("b", "a string")
        first = log.append("a", [{"a": 1}]).position
        for _ in range(60):
            log.append("b", [{"a": "z" * 2000}], durability="os")
        last = log.append("a", [{"a": 2}]).position
        for through in range(first, last):
            assert values(log.read("a", through=through)) == [1]
            assert values(log.read("a", after=first, through=through)) == []
        assert values(log.read("a", through=last)) == [1, 2]
        assert values(log.read("a", through=0)) == []


def test_through_waits(log: EmbeddedLog) -> None:
    """A range that ends in the future is read when it is there, wherever a reading stands. R-A2"""
    log.create_topic("t", "a bigint")
    position = log.append("t", [{"a": 0}]).position
    early = log.read("t", through=position + 2)
    started = log.read("t", through=position + 2)
    assert values([next(iter(started))]) == [0]
    for a in (1, 2, 3):
        log.append("t", [{"a": a}])
    assert values(early) == [0, 1, 2]
    assert values(started) == [1, 2]
    with pytest.raises(errors.WaitTimeout):
        values(log.read("t", through=position + 99, timeout=0.05))
    with pytest.raises(errors.WaitTimeout):
        log.wait(position + 99, timeout=0.05)
    assert log.wait(position + 3) == position + 3


def test_places_that_are_not_there(many: EmbeddedLog) -> None:
    """A start outside of the log is an error that says what there is. R-D3"""
    bad: list[dict[str, Any]] = [
        {"after": many.position + 1},
        {"start": {0: 10_000}},
        {"start": {4: 0}},
        {"start": {0: -1}},
        {"start": -1},
        {"start": "soon"},
        {"start": 1.5},
        {"start": True},
        {"partitions": [4]},
        {"partitions": [-1]},
    ]
    for options in bad:
        with pytest.raises(errors.BadPosition):
            list(many.read("t", **options))
    with pytest.raises(errors.BadPosition):
        many.read(["t", "other"], start={0: 0})
    with pytest.raises(errors.WrongColumn, match="'pad'"):
        list(many.read("t", columns=["pat"]))


def test_chosen_columns(many: EmbeddedLog) -> None:
    """Only the columns asked for are given, in that order; none is possible too. R-A9"""
    batches = list(many.read("t", columns=["pad", "a"]))
    assert {tuple(batch.data.schema.names) for batch in batches} == {("pad", "a")}
    assert sorted(values(batches)) == list(range(360))
    none = list(many.read("t", columns=[]))
    assert sum(len(batch) for batch in none) == 360
    assert all(batch.data.num_columns == 0 for batch in none)
    assert [p for b in none for p in b.partition.to_pylist()] == [
        p for b in many.read("t") for p in b.partition.to_pylist()
    ]


def test_chosen_partitions(many: EmbeddedLog) -> None:
    """Only rows of the partitions asked for are given, with their own offsets. R-A9"""
    everything = places(many.read("t"))
    for chosen in ([0], [1, 2], [0, 1, 2, 3], [3]):
        expected = [place for place in everything if place[0] in chosen]
        assert places(many.read("t", partitions=chosen)) == expected


def test_several_topics_are_one_order(many: EmbeddedLog) -> None:
    """Readings of several topics end their entries together, marked by `last`. R-A15"""
    with many.transaction() as transaction:
        transaction.append("t", [{"a": 5000}])
        transaction.append("other", [{"a": 5000}])
    seen: dict[str, list[int]] = {"t": [], "other": []}
    open_until = done = 0
    last = False
    for batch in many.read(["other", "t"]):
        found = batch.positions.to_pylist()
        seen[batch.topic] += batch.data["a"].to_pylist()
        assert min(found) > done
        assert max(found) <= batch.position
        assert open_until in (0, batch.position)
        open_until, last = batch.position, batch.last
        if last:
            done, open_until = batch.position, 0
    assert last
    assert sorted(seen["t"]) == [*range(360), 5000]
    assert seen["other"] == [*range(0, 120, 3), 5000]


def test_small_entries_are_read_together(folder: str) -> None:
    """A batch gathers small entries up to its limits, and ends at the end of an entry. R-A9"""
    with hr.connect(folder, read_rows_max=10) as log:
        log.create_topic("t", "a bigint")
        for i in range(40):
            log.append("t", [{"a": 4 * i + j} for j in range(4)], durability="os")
        log.sync()
        batches = list(log.read("t"))
        assert values(batches) == list(range(160))
        assert all(10 <= len(batch) <= 12 for batch in batches[:-1])
        for batch in batches:
            assert batch.last
            assert len(batch) % 4 == 0
            assert batch.positions.to_pylist()[-1] == batch.position


def test_large_entries_come_chunk_by_chunk(folder: str) -> None:
    """A large entry is given in several batches, of which only the final one is `last`. R-A15"""
    with hr.connect(folder, inline_bytes_max=8 << 10, chunk_bytes=4 << 10) as log:
        log.create_topic("t", "a bigint", key="a", partitions=2)
        log.append("t", [{"a": -1}])
        receipt = log.append("t", pa.table({"a": range(5000)}))
        log.append("t", [{"a": -2}])
        batches = list(log.read("t"))
        assert (values(batches[:1]), values(batches[-1:])) == ([-1], [-2])
        large = batches[1:-1]
        assert len(large) >= 8
        assert [batch.last for batch in large] == [False] * (len(large) - 1) + [True]
        assert {batch.position for batch in large} == {receipt.position}
        assert sorted(values(large)) == list(range(5000))
        ends = [
            batch.last
            for partition in (0, 1)
            for batch in log.read("t", partitions=[partition], after=receipt.position - 1)
        ]
        assert ends.count(True) == 3


def test_nobody_reads_past_the_synced_end(folder: str) -> None:
    """An entry is seen only once it is on the disk, whatever its writer asked for. R-A4"""
    machine = Machine()
    with (
        machine_log(folder, machine, background=False) as log,
        hr.connect(folder, background=False) as other,
    ):
        log.create_topic("t", "a bigint")
        log.append("t", [{"a": 0}])
        position = log.position
        follower = other.read("t", follow=True, timeout=0.05)
        late = log.append("t", [{"a": 1}], durability="os").position
        log.append("t", [{"a": 2}], durability="interval")
        assert late > position
        assert log.position == other.position == position
        assert values(log.read("t")) == values(other.read("t")) == values(follower) == [0]
        with pytest.raises(errors.BadPosition):
            log.read("t", after=late)
        assert log.sync() == late + 1
        assert values(other.read("t")) == [0, 1, 2]


def test_a_reading_stays_where_it_was_cut(many: EmbeddedLog) -> None:
    """A bounded reading gives what was there when it began, whatever comes meanwhile. R-A9"""
    reading = iter(many.read("t"))
    found = values([next(reading)])
    for i in range(50):
        many.append("t", [{"a": 10_000 + i, "pad": "x" * 500}], durability="os")
    many.sync()
    found += values(reading)
    assert sorted(found) == list(range(360))


def test_a_reading_can_be_ended(many: EmbeddedLog) -> None:
    """A closed reading ends, and the log goes on. R-A9"""
    reading = many.read("t", follow=True)
    next(iter(reading))
    reading.close()
    assert list(reading) == []
    many.append("t", [{"a": 1}])


def test_a_reading_that_begins_while_a_sync_is_being_told_misses_nothing(folder: str) -> None:
    # The synced end and its position are two words: between the two stores, one is the newer.
    with hr.connect(folder) as log:
        log.create_topic("t", "a bigint")
        first = log.append("t", [{"a": 1}]).position
        last = log.append("t", [{"a": 2}]).position
        words = log.journal.live.words
        words[shared.SYNCED_POSITION] = first
        reading = log.read("t", after=first, follow=True, timeout=0)
        words[shared.SYNCED_POSITION] = last
        assert values(reading) == [2]


@pytest.mark.parametrize(
    "given",
    [
        {"after": "3"},
        {"through": "3"},
        {"partitions": ["0"]},
        {"start": {"0": 0}},
        {"start": {0: 0.5}},
    ],
    ids=str,
)
def test_a_place_that_is_none_is_refused_at_once(log: EmbeddedLog, given: dict[str, Any]) -> None:
    """Not when the first row comes, which may be tomorrow. R-A9"""
    log.create_topic("t", "a bigint", partitions=2)
    with pytest.raises(errors.BadPosition):
        log.read("t", **given)


def test_columns_are_checked_before_there_are_rows(log: EmbeddedLog) -> None:
    """A misspelt column of an empty topic is an error, and a name alone is one column. R-A9"""
    log.create_topic("t", "a bigint, b bigint, ab bigint")
    with pytest.raises(errors.WrongColumn):
        log.read("t", columns=["c"])
    log.append("t", [{"a": 1, "b": 2, "ab": 3}])
    assert rows(log.read("t", columns="ab")) == [{"ab": 3}]


def test_a_reading_does_not_begin_at_two_places(log: EmbeddedLog) -> None:
    """One of them would be ignored, and nobody would notice."""
    log.create_topic("t", "a bigint")
    log.append("t", [{"a": 1}])
    with pytest.raises(errors.BadPosition, match="not at both"):
        log.read("t", 1, after=1)
    assert len(list(log.read("t", after=0))) == 1
