"""The producer with record batches: joined in their order, refused one by one, bounded.

Caught: rows lost, repeated or reordered where batches and rows are joined; a wrong batch that takes
others with it; a small slice that keeps or writes its parent; values that change after they were
sent; a batch that waits while its topic changes. Not caught: how quick it is (`./run bench log
--only producer`); what each form of rows becomes (tests/model/test_rows.py).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.producer import Producer
from tests.log.kit import Gate, rows, values

TEXT = "x" * 50


def batch(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch({"a": pa.array(numbers, pa.int64())})


@pytest.fixture
def t(log: EmbeddedLog) -> EmbeddedLog:
    """A log with a topic of one column."""
    log.create_topic("t", "a bigint")
    return log


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "batch": lambda numbers: batch(*numbers),
    "slice": lambda numbers: batch(-1, *numbers, -1).slice(1, len(numbers)),
    "table": lambda numbers: pa.Table.from_batches([batch(n) for n in numbers], batch().schema),
    "reader": lambda numbers: pa.Table.from_batches([batch(*numbers)]).to_reader(),
    "pandas": lambda numbers: pd.DataFrame({"a": numbers}, dtype="int64"),
    "polars": lambda numbers: pl.DataFrame({"a": numbers}, {"a": pl.Int64}),
    "narrow": lambda numbers: pa.record_batch({"a": pa.array(numbers, pa.int16())}),
    "list": lambda numbers: [{"a": number} for number in numbers],
    "tuple": lambda numbers: tuple({"a": number} for number in numbers),
    "iterator": lambda numbers: ({"a": number} for number in numbers),
}


@pytest.mark.parametrize("size", [3, 50, 10_000])
@pytest.mark.parametrize("seed", range(3))
def test_rows_and_batches_keep_their_order(t: EmbeddedLog, seed: int, size: int) -> None:
    """Whatever form they come in, and however they are cut into entries. R-A15"""
    chance = random.Random(seed)
    gate = Gate(t)
    next_one = 0
    with Producer(gate, "t", batch_rows_max=size) as producer:
        for turn in range(150):
            if chance.random() < 0.4:
                producer.send({"a": next_one})
                next_one += 1
            else:
                count = chance.choice([0, 1, 2, 7, 20])
                form = FORMS[chance.choice(list(FORMS))]
                producer.send(form(list(range(next_one, next_one + count))))
                next_one += count
            if turn == 100:
                gate.open.set()
    assert producer.sent_total == next_one
    assert producer.unsent == []
    assert values(t.read("t")) == list(range(next_one))


def test_batches_are_joined_to_entries_of_so_many_rows(t: EmbeddedLog) -> None:
    """Up to the limit and not above; a larger batch is an entry of its own, as it is. R-A15"""
    gate = Gate(t)
    with Producer(gate, "t", batch_rows_max=10) as producer:
        producer.send(batch(0))
        assert gate.reached.wait(10)  # it goes alone, while the others gather
        for first in range(1, 25, 4):
            producer.send(batch(*range(first, first + 4)))
        producer.send(batch(*range(25, 50)))
        producer.send(batch(50))
        gate.open.set()
    entries: dict[int, list[int]] = {}
    for found in t.read("t"):
        for position, a in zip(
            found.positions.to_pylist(), found.data["a"].to_pylist(), strict=True
        ):
            entries.setdefault(position, []).append(a)
    sizes = [len(entry) for entry in entries.values()]
    assert sizes == [1, 8, 8, 8, 25, 1]
    assert [a for entry in entries.values() for a in entry] == list(range(51))


WRONG: dict[str, tuple[Any, type[errors.HeadraceError]]] = {
    "a column that is not there": (pa.record_batch({"k": [1], "z": [1]}), errors.WrongColumn),
    "a value of another type": (pa.record_batch({"k": ["x"]}), errors.WrongType),
    "no key": (pa.record_batch({"v": ["x"]}), errors.MissingKey),
    "a null where none may be": (
        pa.record_batch({"k": [1], "w": pa.array([None], pa.int64())}),
        errors.MissingKey,
    ),
    "a table": (pa.table({"k": [1, 2], "w": [1, 2], "z": [1, 2]}), errors.WrongColumn),
    "pandas": (pd.DataFrame({"k": [1], "w": ["x"]}), errors.WrongType),
    "polars": (pl.DataFrame({"k": [1], "w": ["x"]}), errors.WrongType),
    "a list": ([{"k": 1, "w": 1}, {"k": 1, "w": "x"}], errors.WrongType),
    "a list of something else": ([1, 2], errors.BadRows),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_batch_is_refused_at_once_and_takes_nobody_with_it(
    log: EmbeddedLog, wrong: str
) -> None:
    """By `send`, to who sent it; those who share the producer go on. R-D3"""
    schema = pa.schema([("k", pa.int64()), pa.field("w", pa.int64(), nullable=False), ("v", "str")])
    log.create_topic("t", schema, key="k")
    given, error = WRONG[wrong]
    good = pa.record_batch({"k": [1], "w": [1]})
    gate = Gate(log)
    with Producer(gate, "t") as producer:
        producer.send(good)
        with pytest.raises(error):
            producer.send(given)
        with pytest.raises(errors.BadRows, match="2 headers for 1 rows"):
            producer.send(good, headers=[{}, {}])
        producer.send({"k": 2, "w": 2})
        producer.send(good)
        assert len(producer.unsent) == 3
        gate.open.set()
    assert values(log.read("t"), "k") == [1, 2, 1]


def test_opaque_rows_are_what_append_takes(log: EmbeddedLog) -> None:
    """A list is many rows, a tuple one with its key. R-A15"""
    given: list[Any] = [{"x": 1}, 5, "text", ("k", [1]), [1, ("k", 2), None], [[1, 2]], None]
    log.create_topic("sent", "json")
    log.create_topic("appended", "json")
    with log.producer("sent") as producer:
        for one in given:
            producer.send(one)
            log.append("appended", one)
        producer.send([1, 2], headers=({"h": "v"}, None))
        with pytest.raises(errors.BadRows):
            producer.send([1], headers=pa.array([[("h", b"v")]], pa.map_(pa.string(), pa.binary())))
    found = rows(log.read("sent"))
    assert found[:-2] == rows(log.read("appended"))
    assert [one for batch in log.read("sent") for one in batch.headers.to_pylist()][-2:] == [
        [("h", b"v")],
        None,
    ]


def test_a_wrong_row_among_batches_loses_nothing(t: EmbeddedLog) -> None:
    """The entry is refused as before; all of it can be sent again, in its order. R-D3"""
    gate = Gate(t)
    producer = Producer(gate, "t")
    given = [batch(0), batch(1, 2), {"b": 3}, batch(4), {"a": 5}]
    for one in given:
        producer.send(one)
        assert gate.reached.wait(10)
    gate.open.set()
    with pytest.raises(errors.WrongColumn):
        producer.close()
    assert producer.unsent == given[1:]
    with t.producer("t") as second:
        for one in producer.unsent:
            if one != {"b": 3}:
                second.send(one)
    assert values(t.read("t")) == [0, 1, 2, 4, 5]


def test_memory_is_bounded_in_rows(t: EmbeddedLog) -> None:
    """A batch counts its rows; one above the limit goes alone. R-D3"""
    gate = Gate(t)
    producer = Producer(gate, "t", rows_max=50, batch_rows_max=50, timeout_seconds=0.1)
    for first in range(0, 40, 10):
        producer.send(batch(*range(first, first + 10)))
    with pytest.raises(errors.ProducerFull, match="40 rows"):
        producer.send(batch(*range(11)))
    producer.send(batch(*range(40, 50)))
    with pytest.raises(errors.ProducerFull, match="50 rows"):
        producer.send(batch(50))
    producer.send(batch())
    assert len(producer.unsent) == 5  # nothing is not kept
    with pytest.raises(errors.WaitTimeout, match="50 rows"):
        producer.flush(0.01)
    gate.open.set()
    producer.flush(10)
    gate.open.clear()
    producer.send(batch(*range(50, 150)))
    with pytest.raises(errors.ProducerFull, match="100 rows"):
        producer.send(batch(150))
    gate.open.set()
    producer.close()
    assert producer.sent_total == 150
    assert values(t.read("t")) == list(range(150))


def test_memory_is_bounded_in_bytes(log: EmbeddedLog) -> None:
    """Few large batches fill the producer as well as many small ones. R-D3"""
    log.create_topic("t", "a string")
    large = pa.record_batch({"a": [TEXT * 1000]})
    gate = Gate(log)
    producer = Producer(gate, "t", bytes_max=500_000, timeout_seconds=0.1)
    with pytest.raises(errors.ProducerFull):
        for _ in range(20):
            producer.send(large)
    assert len(producer.unsent) == 9
    gate.open.set()
    producer.close()
    assert values(log.read("t")) == [TEXT * 1000] * 9


@pytest.mark.parametrize("nested", [False, True])
def test_memory_is_bounded_where_batches_are_tiny_and_wide(log: EmbeddedLog, nested: bool) -> None:
    """Fifty arrays of one value take fifty times a thousand bytes, not fifty times eight. R-D3"""
    columns = {f"c{number}": pa.array([number]) for number in range(50)}
    arrow = pa.schema([(name, pa.int64()) for name in columns])
    schema = pa.schema([("s", pa.struct(arrow))]) if nested else arrow
    log.create_topic("t", schema)
    gate = Gate(log)
    producer = Producer(gate, "t", bytes_max=16 << 20, timeout_seconds=0.01)
    before, sent = resident(), 0
    with pytest.raises(errors.ProducerFull):
        while True:
            one = pa.record_batch({name: pa.array([sent]) for name in columns})
            one = pa.record_batch({"s": one.to_struct_array()}) if nested else one
            producer.send(one)
            sent += 1
    assert resident() - before < 100 << 20  # of 16, and what Arrow reserves
    gate.open.set()
    producer.close()
    assert producer.sent_total == sent > 100


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("rows", [100, 100_000])
def test_a_slice_neither_keeps_nor_writes_its_parent(log: EmbeddedLog, rows: int) -> None:
    """Of a large batch only the rows that were sent stay in memory, and reach the disk. R-D3"""
    log.create_topic("t", "a bigint, s string")
    parent = pa.record_batch({"a": range(rows), "s": [TEXT] * rows})
    gate = Gate(log)
    before = log.journal.live.tail().end
    with Producer(gate, "t") as producer:
        for a in range(0, 100, 5):
            producer.send(parent.slice(a, 1))
        kept = [one.get_total_buffer_size() for one in producer.unsent]
        assert max(kept) <= 64 << 10
        gate.open.set()
    assert log.journal.live.tail().end - before < 20_000
    assert values(log.read("t")) == list(range(0, 100, 5))
    assert values(log.read("t"), "s") == [TEXT] * 20


def test_a_frame_is_what_it_was_when_it_was_sent(t: EmbeddedLog) -> None:
    """Pandas writes into the memory that Arrow would share with it."""
    gate = Gate(t)
    frame = pd.DataFrame({"a": [0, 0]})
    headers: list[Any] = [{"n": "0"}, None]
    with Producer(gate, "t") as producer:
        for a in range(5):
            frame.loc[:, "a"] = a
            headers[0]["n"] = str(a)
            producer.send(frame, headers=headers)
        gate.open.set()
    assert values(t.read("t")) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    found = [pairs for one in t.read("t") for pairs in one.headers.to_pylist()]
    assert found[::2] == [[("n", str(a).encode())] for a in range(5)]
    assert found[1::2] == [None] * 5


def test_columns_come_in_any_order_and_encoding(log: EmbeddedLog) -> None:
    """Dictionaries, another order, a nullable column that is missing: joined with plain ones."""
    log.create_topic("t", "a bigint, s string, n double")
    gate = Gate(log)
    words = pa.array(["x", "y", "x"]).dictionary_encode()
    with Producer(gate, "t") as producer:
        producer.send(pa.record_batch({"a": [0], "s": ["w"], "n": [0.5]}))
        producer.send(pa.record_batch({"s": words, "a": [1, 2, 3]}))
        producer.send(pa.record_batch({"n": [4.0], "a": [4]}))
        producer.send({"s": "z", "a": 5})
        gate.open.set()
    rows = [row for one in log.read("t") for row in one.to_pylist()]
    assert [tuple(row.values()) for row in rows] == [
        (0, "w", 0.5), (1, "x", None), (2, "y", None), (3, "x", None), (4, None, 4.0),
        (5, "z", None),
    ]  # fmt: skip


def test_headers_of_a_batch(t: EmbeddedLog) -> None:
    """One mapping for all its rows, or one for each; none beside them stays none. R-A1"""
    gate = Gate(t)
    with Producer(gate, "t") as producer:
        producer.send(batch(0))
        producer.send(batch(1, 2), headers={"n": "1"})
        producer.send({"a": 3}, headers={"n": b"3"})
        producer.send(batch(4, 5), headers=[None, {"n": "5"}])
        producer.send({"a": 6})
        gate.open.set()
    found = [pairs for one in t.read("t") for pairs in one.headers.to_pylist()]
    one, three, five = [("n", b"1")], [("n", b"3")], [("n", b"5")]
    assert found == [None, one, one, three, None, five, None]
    assert values(t.read("t")) == list(range(7))


def test_headers_that_can_be_read_once(t: EmbeddedLog) -> None:
    """As `append` takes them; that `send` looks at them takes nothing away. R-A1"""
    with t.producer("t") as producer:
        producer.send(batch(0, 1), headers=({"n": str(a)} for a in range(2)))  # type: ignore[arg-type]
    found = [pairs for one in t.read("t") for pairs in one.headers.to_pylist()]
    assert found == [[("n", b"0")], [("n", b"1")]]


def test_headers_of_a_row_never_become_those_of_another(t: EmbeddedLog) -> None:
    """A row has one mapping: two for the one and none for the other are not one for each. R-D3"""
    gate = Gate(t)
    producer = Producer(gate, "t")
    producer.send({"a": 0})
    assert gate.reached.wait(10)
    producer.send({"a": 1}, headers=[{"n": "1"}, {"n": "1"}])
    producer.send({"a": 2}, headers=[])
    gate.open.set()
    with pytest.raises(errors.BadRows, match="headers do not fit"):
        producer.close()
    assert producer.unsent == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(("kind", "good"), [("bytes", b"1"), ("text", "1"), ("json", "1")])
def test_opaque_topics(log: EmbeddedLog, kind: str, good: bytes | str) -> None:
    """Columns `key` and `value`, beside single values and pairs; JSON is looked at by `send`."""
    log.create_topic("t", kind)
    gate = Gate(log)
    pairs = pa.record_batch({"key": [good, None], "value": [good, good]})
    with Producer(gate, "t") as producer:
        producer.send(pairs)
        producer.send(1 if kind == "json" else good)
        producer.send(pairs.select(["value"]))
        producer.send((good, 1 if kind == "json" else good))
        if kind == "json":
            with pytest.raises(errors.WrongType):
                producer.send(pa.record_batch({"value": ["{"]}))
        gate.open.set()
    assert values(log.read("t"), "value") == [good] * 6
    assert values(log.read("t"), "key") == [good, None, None, None, None, good]


def test_a_topic_of_changes_fills_the_weight(log: EmbeddedLog) -> None:
    """What is missing has its default, in batches as in rows."""
    log.create_topic("t", "k bigint", key="k", kind="changes", partitions=3)
    with log.producer("t") as producer:
        producer.send(pa.record_batch({"k": [1]}))
        producer.send({"k": 1})
        producer.send(pa.record_batch({"k": [1], "_weight": pa.array([-1], pa.int8())}))
    assert values(log.read("t"), "_weight") == [1, 1, -1]


def test_a_writer_stores_batches_once_and_is_fenced(t: EmbeddedLog) -> None:
    """What a fenced producer could not store is handed to the next one as it is. R-A15"""
    producer = t.producer("t", writer="p")
    producer.send(batch(1, 2))
    producer.send({"a": 3})
    producer.flush()
    stored = t.writer("p").version
    producer.send(batch(4))
    with pytest.raises(errors.Fenced):
        producer.flush()
    with pytest.raises(errors.Fenced):
        producer.send(batch(5))
    assert producer.unsent == [batch(4)]
    with t.producer("t", writer="p") as second:
        for one in producer.unsent:
            second.send(one)
    assert t.writer("p").version == stored + 1
    assert values(t.read("t")) == [1, 2, 3, 4]


@pytest.fixture
def waiting(t: EmbeddedLog) -> Iterator[tuple[Gate, Producer]]:
    """A producer with a batch on its way, and two more and a row that wait."""
    gate = Gate(t)
    producer = Producer(gate, "t")
    for one in (batch(0), batch(1), {"a": 2}, batch(3)):
        producer.send(one)
        assert gate.reached.wait(10)
    yield gate, producer
    gate.open.set()


def test_a_topic_that_grows_while_batches_wait(
    t: EmbeddedLog, waiting: tuple[Gate, Producer]
) -> None:
    """Batches of both versions are joined as the newer one."""
    gate, producer = waiting
    t.alter_topic("t", add="s string")
    producer.send(pa.record_batch({"a": [4], "s": ["x"]}))
    producer.send(batch(5))
    gate.open.set()
    producer.close()
    assert values(t.read("t")) == [0, 1, 2, 3, 4, 5]
    assert values(t.read("t"), "s") == [None] * 4 + ["x", None]


def test_a_column_that_is_renamed_while_batches_wait(
    t: EmbeddedLog, waiting: tuple[Gate, Producer]
) -> None:
    """They are refused like rows, and are in `unsent` with all that came after them."""
    gate, producer = waiting
    t.alter_topic("t", rename={"a": "b"})
    renamed = pa.record_batch({"b": [4]})
    producer.send(renamed)
    with pytest.raises(errors.WrongColumn):
        producer.send(batch(5))
    gate.open.set()
    with pytest.raises(errors.WrongColumn):
        producer.close()
    assert producer.unsent == [batch(0), batch(1), {"a": 2}, batch(3), renamed]


def test_a_column_that_another_handle_has_just_added(folder: str, t: EmbeddedLog) -> None:
    """Is known to `send` at once."""
    with t.producer("t") as producer:
        producer.send(batch(0))
        producer.flush()
        with EmbeddedLog(folder) as other:
            other.alter_topic("t", add="s string")
        producer.send(pa.record_batch({"a": [1], "s": ["x"]}))
    assert values(t.read("t"), "s") == [None, "x"]


def test_batches_that_never_have_room_together_go_in_parts(t: EmbeddedLog) -> None:
    """A topic may take fewer rows at once than a producer joins: none of them is lost. R-A3"""
    t.set_topic("t", flow="backpressure", flow_rows=10)
    gate = Gate(t)
    with Producer(gate, "t") as producer:
        for first in range(0, 60, 6):
            producer.send(batch(*range(first, first + 6)))
        gate.open.set()
    assert values(t.read("t")) == list(range(60))


def test_a_batch_that_never_has_room_is_refused_at_once(t: EmbeddedLog) -> None:
    """By `send`, as any wrong batch: those who share the producer go on. R-A3"""
    t.set_topic("t", flow="backpressure", flow_rows=10)
    with t.producer("t") as producer:
        producer.send(batch(0))
        with pytest.raises(errors.BatchTooLarge, match="11 rows"):
            producer.send(batch(*range(11)))
        producer.send(batch(1))
    assert values(t.read("t")) == [0, 1]
