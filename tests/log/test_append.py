"""Appending: whatever the rows come in, they are taken whole, numbered, and where their key says.

Caught: a way in that loses or changes rows, half an entry, offsets with gaps, a key that moves, an
acknowledgement before its sync, a sync per append where one could serve many. Not caught: what a
power cut leaves; `tests/faults` asks that.
"""

from __future__ import annotations

import datetime as dt
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.model.keys import partitions_of
from headrace.model.records import Piece
from tests.log.kit import (
    Child,
    Machine,
    checked,
    files_in,
    forget_live,
    machine_log,
    places,
    rows,
    values,
)

ROWS: list[dict[str, Any]] = [{"a": 1, "b": "x"}, {"a": 2, "b": None}, {"a": 3, "b": "ü"}]
TABLE = pa.Table.from_pylist(ROWS, schema=pa.schema([("a", pa.int64()), ("b", pa.string())]))


class OnlyStream:
    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        return TABLE.__arrow_c_stream__(requested_schema)


WAYS: dict[str, Callable[[], Any]] = {
    "dicts": lambda: ROWS,
    "generator": lambda: (row for row in ROWS),
    "batch": lambda: TABLE.to_batches()[0],
    "table": lambda: TABLE,
    "table of chunks": lambda: pa.concat_tables([TABLE.slice(0, 1), TABLE.slice(1)]),
    "reader": TABLE.to_reader,
    "stream": OnlyStream,
    "pandas": lambda: pd.DataFrame(ROWS),
    "polars": lambda: pl.DataFrame(ROWS),
    "other order": lambda: TABLE.select(["b", "a"]),
    "sliced": lambda: pa.concat_tables([TABLE, TABLE]).combine_chunks().slice(3),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_gives_the_same_rows(log: EmbeddedLog, way: str) -> None:
    """Dicts, Arrow, pandas, Polars and streams of the same rows are the same entry. R-A1"""
    log.create_topic("t", "a bigint, b string")
    receipt = log.append("t", WAYS[way]())
    assert (receipt.rows, receipt.offsets) == (3, {"t": {0: 0}})
    assert rows(log.read("t")) == ROWS


def test_one_row_may_come_alone(log: EmbeddedLog) -> None:
    """A single dict is one row. R-A1"""
    log.create_topic("t", "a bigint")
    assert log.append("t", {"a": 5}).rows == 1
    assert values(log.read("t")) == [5]


@pytest.mark.parametrize("nothing", [[], TABLE.slice(0, 0), pd.DataFrame({"a": []})])
def test_no_rows_are_no_entry(log: EmbeddedLog, nothing: Any) -> None:
    """An append of no rows takes no position. R-A9"""
    log.create_topic("t", "a bigint, b string", key="a", partitions=3)
    before = log.position
    receipt = log.append("t", nothing)
    assert (receipt.position, receipt.rows) == (before, 0)
    assert log.position == before
    assert list(log.read("t")) == []


def test_a_key_may_be_null_but_not_left_out(log: EmbeddedLog) -> None:
    """Who forgets the key would else write to the row of null, and overwrite it again and again."""
    log.create_topic("t", "a bigint, b string", key="a", partitions=2)
    log.append("t", [{"a": None, "b": "said"}])
    log.append("t", pa.table({"a": pa.nulls(1), "b": ["said"]}))
    for bad in (
        [{"a": 1}, {"b": "forgotten"}],
        pa.table({"b": ["forgotten"]}),
        pd.DataFrame({"b": ["forgotten"]}),
    ):
        with pytest.raises(errors.MissingKey, match="part of the key") as caught:
            log.append("t", bad)
        assert caught.value.details["column"] == "a"
        assert caught.value.details["row"] == (1 if isinstance(bad, list) else None)
    assert [row for batch in log.read("t") for row in batch.to_pylist()] == [
        {"a": None, "b": "said"}
    ] * 2
    log.append("t", [])
    log.append("t", pa.table({}))


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"a": 1, "c": 2}, errors.WrongColumn),
        ({"a": "1"}, errors.WrongType),
        ({"a": 2**63}, errors.WrongType),
        ({"b": "no a"}, errors.MissingKey),
        ({"a": None}, errors.MissingKey),
        (7, errors.BadRows),
    ],
)
def test_a_bad_row_refuses_the_whole_entry(
    log: EmbeddedLog, bad: Any, error: type[errors.HeadraceError]
) -> None:
    """One row that does not fit leaves nothing of its entry, and is named. R-D3"""
    log.create_topic("t", "a bigint not null, b string", key="a", partitions=4)
    before = log.position
    good = [{"a": i} for i in range(10)]
    with pytest.raises(error) as caught:
        log.append("t", [*good, bad, *good])
    assert "10" in f"{caught.value.place} {caught.value.fact}"
    assert "topic 't'" in caught.value.place
    assert log.position == before
    assert log.ends("t") == [0, 0, 0, 0]


def test_what_is_not_rows(log: EmbeddedLog) -> None:
    """What cannot be rows is refused by its type. R-D3"""
    log.create_topic("t", "a bigint")
    for bad in (None, 5, "text", b"bytes", object(), pl.LazyFrame({"a": [1]})):
        with pytest.raises(errors.BadRows):
            log.append("t", bad)


def test_an_appended_event_cannot_be_changed(log: EmbeddedLog) -> None:
    """What the caller does to its own memory afterwards does not reach the log. R-A1"""
    log.create_topic("t", "a bigint")
    memory = np.arange(5)
    log.append(
        "t",
        pa.record_batch({"a": pa.Array.from_buffers(pa.int64(), 5, [None, pa.py_buffer(memory)])}),
    )
    memory[:] = -1
    assert values(log.read("t")) == [0, 1, 2, 3, 4]


# --- headers, times, transactions -----------------------------------------------------------------


def test_headers(log: EmbeddedLog) -> None:
    """Headers come back with their row: one set for all, one a row, or none. R-A1"""
    log.create_topic("t", "a bigint", key="a", partitions=4)
    log.append("t", [{"a": 1}, {"a": 2}], headers={"trace": "t1", "raw": b"\xff"})
    log.append("t", [{"a": 3}, {"a": 4}], headers=[{"n": "3"}, None])
    log.append("t", [{"a": 5}])
    log.append(
        "t", [{"a": i} for i in range(10, 50)], headers=[{"n": str(i)} for i in range(10, 50)]
    )
    found: dict[int, Any] = {}
    for batch in log.read("t"):
        found |= dict(zip(batch.data["a"].to_pylist(), batch.headers.to_pylist(), strict=True))
    assert found[1] == found[2] == [("trace", b"t1"), ("raw", b"\xff")]
    assert found[3] == [("n", b"3")]
    assert found[4] is found[5] is None
    assert all(found[i] == [("n", str(i).encode())] for i in range(10, 50))


@pytest.mark.parametrize("bad", [[{"a": "1"}], {"a": 5}, [{"a": 1.5}, {}], [1, 2]])
def test_bad_headers(log: EmbeddedLog, bad: Any) -> None:
    """Headers that do not fit the rows refuse the entry. R-D3"""
    log.create_topic("t", "a bigint")
    before = log.position
    with pytest.raises(errors.BadRows):
        log.append("t", [{"a": 1}, {"a": 2}], headers=bad)
    assert log.position == before


def test_three_times(folder: str) -> None:
    """Event, sent and received time are kept apart, and received time never goes back. R-A1"""
    machine = Machine()
    machine.clock_us = 1_700_000_000_000_000
    with machine_log(folder, machine, background=False) as log:
        log.create_topic("t", "a bigint, at timestamp", event_time="at")
        happened = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
        sent = dt.datetime(2021, 1, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=2)))
        log.append("t", [{"a": 1, "at": happened}], sent_time=sent)
        machine.clock_us -= 3_600_000_000
        back = log.append("t", [{"a": 2}])
        machine.clock_us += 7_200_000_000
        receipt = log.append("t", [{"a": 3}])
        got_sent: list[Any] = []
        got_received: list[Any] = []
        for batch in log.read("t"):
            got_sent += batch.sent_time.to_pylist()
            got_received += batch.received_time.to_pylist()
    noon = dt.datetime.fromtimestamp(1_700_000_000, dt.UTC)
    hour = dt.timedelta(hours=1)
    assert got_sent == [sent, noon - hour, noon + hour]
    assert got_received == [noon, noon, noon + hour]
    assert back.received_time == noon
    assert receipt.received_time == noon + hour


def test_transactions_keep_their_boundaries(log: EmbeddedLog) -> None:
    """An entry of many transactions says which rows belong together. R-A15"""
    log.create_topic("t", "a bigint", key="a", partitions=3)
    log.append("t", [{"a": i} for i in range(6)], transactions=[2, 0, 3, 1])
    log.append("t", [{"a": 9}])
    found: dict[int, int] = {}
    for batch in log.read("t"):
        found |= dict(zip(batch.data["a"].to_pylist(), batch.transaction.to_pylist(), strict=True))
    assert found == {0: 0, 1: 0, 2: 2, 3: 2, 4: 2, 5: 3, 9: 0}
    for wrong in ([5], [7, 0], [-1, 7], []):
        with pytest.raises(errors.BadRows):
            log.append("t", [{"a": i} for i in range(6)], transactions=wrong)


# --- partitions -----------------------------------------------------------------------------------


def test_same_key_same_partition_for_ever(folder: str) -> None:
    """A key's partition is the canonical one: after reopening, and after its type grew. R-A9"""
    keys = [*range(-50, 50), 2**31 - 1]
    with hr.connect(folder) as log:
        log.create_topic("t", "a int, b string", key=["a", "b"], partitions=7)
        log.append("t", [{"a": key, "b": "x"} for key in keys])
        old = {value: partition for partition, _, value in places(log.read("t"))}
    columns = [pa.array(keys, pa.int64()), pa.array(["x"] * len(keys))]
    assert old == dict(zip(keys, partitions_of(columns, 7).tolist(), strict=True))
    with hr.connect(folder) as log:
        log.alter_topic("t", widen={"a": "bigint"})
        log.append("t", pd.DataFrame({"a": keys, "b": "x"}))
        log.append("t", [{"a": key, "b": "x"} for key in reversed(keys)])
        new = places(log.read("t"))
    assert {(value, partition) for partition, _, value in new} == set(old.items())
    assert len(new) == 3 * len(keys)


def test_order_within_a_partition_is_the_callers(log: EmbeddedLog) -> None:
    """Rows of one partition keep the order in which they were given; offsets have no gaps. R-A9"""
    log.create_topic("t", "k string, a bigint", key="k", partitions=5)
    given = [{"k": f"k{i * i % 11}", "a": i} for i in range(500)]
    for at in (0, 10, 170, 480):
        log.append("t", given[at : {0: 10, 10: 170, 170: 480, 480: 500}[at]])
    found = places(log.read("t"))
    for partition in range(5):
        here = [(offset, a) for p, offset, a in found if p == partition]
        assert [offset for offset, _ in here] == list(range(len(here)))
        assert [a for _, a in here] == sorted(a for _, a in here)
    assert sorted(a for _, _, a in found) == list(range(500))


def test_rows_over_many_partitions_stay_as_they_came(folder: str) -> None:
    """Where partitions are many for the rows, order is the caller's, also across partitions. R-A9

    Offsets are those of counting, for readers of a partition and after a boot as well.
    """
    given = [i * 7919 % 600 for i in range(900)]  # some keys twice
    for keys in (given, given[::-1]):  # the last row is in a high partition, then in a low one
        with hr.connect(folder) as log:
            log.create_topic("t", "a bigint", key="a", partitions=1000, exist_ok=True)
            receipt = log.append("t", [{"a": key} for key in keys])
            log.append("t", [{"a": key} for key in keys])
            found = places(log.read("t", after=receipt.position - 1))
            assert [key for _, _, key in found] == 2 * keys
            ends, before = log.ends("t"), receipt.offsets["t"]
            for partition in sorted(before)[:20]:
                here = [(o, key) for p, o, key in found if p == partition]
                assert [o for o, _ in here] == list(range(before[partition], ends[partition]))
                start = {partition: before[partition] + 1}
                assert values(log.read("t", start=start)) == [key for _, key in here[1:]]
                chosen = log.read("t", partitions=[partition], after=receipt.position - 1)
                assert [(o, key) for _, o, key in places(chosen)] == here
        forget_live(folder)
        with hr.connect(folder) as log:
            assert log.ends("t") == ends
    assert checked(folder).rows == 4 * len(given)


def test_rows_without_key_go_round(log: EmbeddedLog) -> None:
    """Without a key each append goes whole to one partition, and the next to the next. R-A9"""
    log.create_topic("t", "a bigint", partitions=3)
    for i in range(6):
        log.append("t", [{"a": i}, {"a": i}])
    assert log.ends("t") == [4, 4, 4]
    for partition in range(3):
        found = values(log.read("t", partitions=[partition]))
        assert found[0::2] == found[1::2]


def test_a_chosen_partition(log: EmbeddedLog) -> None:
    """A caller may choose the partition where no key does, and only there. R-A9"""
    log.create_topic("free", "a bigint", partitions=3)
    log.create_topic("keyed", "a bigint", key="a", partitions=3)
    assert log.append("free", [{"a": 1}], partition=2).offsets == {"free": {2: 0}}
    for topic, partition in (("free", 3), ("free", -1), ("free", "0"), ("keyed", 0)):
        with pytest.raises(errors.BadRows):
            log.append(topic, [{"a": 1}], partition=partition)  # type: ignore[arg-type]


def test_receipts_name_offsets(log: EmbeddedLog) -> None:
    """A receipt has the entry's position and its first offset in each partition. R-A9"""
    log.create_topic("t", "a bigint", key="a", partitions=4)
    ends = [0, 0, 0, 0]
    last = 0
    for start in (0, 5, 50):
        receipt = log.append("t", [{"a": i} for i in range(start, start + 20)])
        assert receipt.position > last
        last = receipt.position
        assert receipt.offsets["t"] == {
            p: ends[p] for p, end in enumerate(log.ends("t")) if end > ends[p]
        }
        ends = log.ends("t")
    assert sum(ends) == 60


# --- durability -----------------------------------------------------------------------------------


def test_durability_by_name(folder: str) -> None:
    """`fsync` returns after a sync, `os` before any, and no other name is taken. R-A4"""
    machine = Machine()
    with machine_log(folder, machine, background=False) as log:
        log.create_topic("t", "a bigint")
        before = machine.syncs
        for _ in range(10):
            log.append("t", [{"a": 1}], durability="os")
        assert machine.syncs == before
        log.append("t", [{"a": 1}])
        assert machine.syncs == before + 1
        for _ in range(10):
            log.append("t", [{"a": 1}], durability="fsync")
        assert machine.syncs == before + 11
        with pytest.raises(errors.BadSetting):
            log.append("t", [{"a": 1}], durability="maybe")
    with pytest.raises(errors.BadSetting):
        hr.connect(folder, durability="never")


@pytest.mark.parametrize("durability", ["interval", "os"])
def test_weaker_durability_is_synced_by_the_timer(folder: str, durability: str) -> None:
    """What was appended without waiting for the disk becomes visible by itself. R-A4"""
    settings: dict[str, Any] = {
        "quiet_seconds": 0.2,
        "interval_seconds": 0.02,
        "durability": durability,
    }
    with hr.connect(folder, **settings) as log:
        log.create_topic("t", "a bigint", exist_ok=True)
        receipt = log.append("t", [{"a": 1}])
        assert log.wait(receipt.position, timeout=10) >= receipt.position
        assert values(log.read("t")) == [1]


def test_threads_share_a_sync(folder: str) -> None:
    """Appends of many threads that wait at the same time are served by one sync. R-A4"""
    machine = Machine()
    with machine_log(folder, machine, background=False) as log:
        log.create_topic("t", "a bigint")
        machine.sync_seconds, machine.syncs = 0.005, 0
        receipts: list[int] = []

        def work(number: int) -> None:
            receipts.extend(log.append("t", [{"a": number * 15 + i}]).position for i in range(15))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert machine.syncs <= 60
        assert len(set(receipts)) == 120
        assert sorted(values(log.read("t"))) == list(range(120))
    checked(folder)


def test_processes_share_a_sync(log: EmbeddedLog) -> None:
    """Appends of many processes that wait at the same time are served by one sync. R-A4"""
    code = """
        sys.path.insert(0, os.getcwd())
        from tests.log.kit import Machine, machine_log
        machine = Machine()
        machine.sync_seconds = 0.01
        log = machine_log(folder, machine, background=False)
        log.append("warm", [{"a": 0}])  # the first conversion of dicts imports pandas
        say("ready"); sys.stdin.readline()
        machine.syncs = 0
        for i in range(25):
            log.append("t", [{"a": int(sys.argv[2]) * 25 + i}])
        say(machine.syncs)
    """
    log.create_topic("t", "a bigint")
    log.create_topic("warm", "a bigint")
    with (
        Child(log.path, code, 0) as a,
        Child(log.path, code, 1) as b,
        Child(log.path, code, 2) as c,
        Child(log.path, code, 3) as d,
    ):
        for child in (a, b, c, d):
            assert child.line() == "ready"
        for child in (a, b, c, d):
            child.go()
        syncs = sum(int(child.wait()) for child in (a, b, c, d))
    assert syncs <= 85, f"{syncs} syncs for 100 appends"
    found = places(log.read("t"))
    assert sorted(a for _, _, a in found) == list(range(100))
    assert [offset for _, offset, _ in found] == list(range(100))
    for number in range(4):
        own = [a for _, _, a in found if a // 25 == number]
        assert own == sorted(own)
    checked(log.path)


# --- large entries --------------------------------------------------------------------------------


def test_large_entries_are_taken_by_reference(folder: str) -> None:
    """Rows above the inline limit go to a file of their own, and are read like any others. R-A15"""
    with hr.connect(folder, inline_bytes_max=64 << 10, chunk_bytes=32 << 10) as log:
        log.create_topic("t", "a bigint, b string", key="a", partitions=3)
        table = pa.table({"a": range(5000), "b": ["x" * 20] * 5000})
        log.append("t", table.slice(0, 1000))
        assert files_in(folder, "pieces") == []
        receipt = log.append("t", table, headers={"h": "1"}, transactions=[4000, 1000])
        assert len(files_in(folder, "pieces")) == 1
        assert receipt.rows == 5000
        log.append("t", table.slice(0, 10))
        assert sorted(
            values(log.read("t", after=receipt.position - 1, through=receipt.position))
        ) == (list(range(5000)))
        found = places(log.read("t"))
        assert len(found) == 6010
        for partition, end in enumerate(log.ends("t")):
            assert [o for p, o, _ in found if p == partition] == list(range(end))
        for batch in log.read("t", after=receipt.position - 1, through=receipt.position):
            of_row = dict(
                zip(batch.data["a"].to_pylist(), batch.transaction.to_pylist(), strict=True)
            )
            assert all(transaction == (a >= 4000) for a, transaction in of_row.items())
            assert set(map(str, batch.headers.to_pylist())) == {"[('h', b'1')]"}
    checked(folder)


def test_an_entry_has_a_limit(folder: str) -> None:
    """An append above the limit is refused, with what to do, and leaves nothing. R-D3"""
    with hr.connect(folder, append_bytes_max=10_000, inline_bytes_max=1000) as log:
        log.create_topic("t", "a binary")
        before = log.position
        with pytest.raises(errors.BatchTooLarge, match="stage"):
            log.append("t", [{"a": b"x" * 20_000}])
        assert log.position == before
        assert files_in(folder, "pieces") == []
        log.append("t", [{"a": b"x" * 5_000}])
        with pytest.raises(errors.BatchTooLarge), log.transaction() as transaction:
            for i in range(20):
                transaction.put(f"value {i}", "v" * 1_000_000)


def test_staged_pieces_are_published_together(folder: str) -> None:
    """Pieces staged by anybody are nothing until one entry names them all. R-A15"""
    with hr.connect(folder, chunk_bytes=4096) as log:
        log.create_topic("t", "a bigint", key="a", partitions=2)
        log.create_topic("u", "a bigint")
        reader = pa.RecordBatchReader.from_batches(
            pa.schema([("a", pa.int64())]),
            (pa.record_batch({"a": pa.array(range(n, n + 500))}) for n in range(0, 5000, 500)),
        )
        with Child(folder, STAGE) as child:
            other = pickle.loads(bytes.fromhex(child.wait().strip()))
        piece = log.stage("t", reader, headers={"from": "here"})
        assert isinstance(other, Piece)
        assert (piece.rows, other.rows) == (5000, 3)
        assert log.ends("t") == [0, 0]
        assert list(log.read("t")) == []
        receipt = log.append("t", [piece, other])
        assert receipt.rows == 5003
        log.append("u", [{"a": 1}])
        assert sorted(values(log.read("t"))) == [*range(5000), 7777, 7778, 7779]
        assert {batch.position for batch in log.read("t")} == {receipt.position}
    assert checked(folder).orphans == []


STAGE = """
    import pickle
    with hr.connect(folder) as log:
        piece = log.stage("t", [{"a": 7777}, {"a": 7778}, {"a": 7779}])
    say(pickle.dumps(piece).hex())
"""


def test_pieces_that_cannot_be_published(log: EmbeddedLog) -> None:
    """A piece of another topic, or whose file is not what it was, refuses the entry. R-D3"""
    log.create_topic("t", "a bigint")
    log.create_topic("u", "a bigint")
    before = log.position
    piece = log.stage("t", [{"a": 1}])
    with pytest.raises(errors.PieceInvalid):
        log.append("u", piece)
    path = os.path.join(log.path, "pieces", piece.name)
    os.truncate(path, piece.bytes - 64)
    with pytest.raises(errors.PieceInvalid):
        log.append("t", piece)
    os.unlink(path)
    with pytest.raises(errors.PieceInvalid):
        log.append("t", piece)
    older = log.stage("t", [{"a": 2}])
    log.alter_topic("t", retype={"a": "string"})
    with pytest.raises(errors.PieceInvalid):
        log.append("t", older)
    assert log.position == before + 1
    assert list(log.read("t")) == []


@pytest.mark.parametrize(
    "given",
    [
        {"headers": {"a": "b"}},
        {"transactions": [1]},
        {"partition": 0},
        {"sent_time": dt.datetime(2024, 1, 1)},
    ],
    ids=str,
)
def test_what_a_piece_cannot_be_given_any_more(log: EmbeddedLog, given: dict[str, Any]) -> None:
    """It is written: what comes later is refused, not left out. R-D3"""
    log.create_topic("t", "a bigint")
    piece = log.stage("t", [{"a": 1}])
    for rows_ in (piece, [piece]):
        with pytest.raises(errors.BadRows, match="already"):
            log.append("t", rows_, **given)
    log.append("t", piece)


def test_a_piece_that_nobody_published_is_seen(log: EmbeddedLog) -> None:
    """A staged piece without an entry is listed by the check, and harms nothing. R-D3"""
    log.create_topic("t", "a bigint")
    piece = log.stage("t", [{"a": 1}])
    assert checked(log.path).orphans == [piece.name]


# --- a topic that changes under the append --------------------------------------------------------


def test_a_change_by_another_handle_is_known_at_once(log: EmbeddedLog) -> None:
    """An append uses the newest schema, whoever changed it. R-A9"""
    log.create_topic("t", "a int")
    with hr.connect(log.path) as other:
        log.append("t", [{"a": 1}])
        other.alter_topic("t", add="b string")
        log.append("t", [{"a": 2}])
        log.append("t", [{"a": 3, "b": "x"}])
        other.create_topic("u", "a bigint")
        log.append("u", [{"a": 4}])
    assert [tuple(row.values()) for row in rows(log.read("t"))] == [(1, None), (2, None), (3, "x")]


@pytest.mark.parametrize("given", ["list", "iterator", "large", "columns"])
def test_a_change_in_the_middle_of_an_append(
    folder: str, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """A topic changed between packing and writing: the rows are packed anew, once. R-A9"""
    with hr.connect(folder, inline_bytes_max=256) as log, hr.connect(folder) as other:
        log.create_topic("t", "a int")
        log.append("t", [{"a": 0}])
        original = log.journal.append
        changes = iter(({"add": "b string"}, {"widen": {"a": "bigint"}}))

        def interrupted(*arguments: Any) -> Any:
            change = next(changes, None)
            if change is not None:
                other.alter_topic("t", **change)
            return original(*arguments)

        monkeypatch.setattr(log.journal, "append", interrupted)
        count = 3 if given != "large" else 1000
        new = [{"a": i} for i in range(1, count + 1)]
        kinds: dict[str, Any] = {"iterator": iter(new), "columns": pa.Table.from_pylist(new)}
        receipt = log.append("t", kinds.get(given, new))
        assert receipt.rows == count
        monkeypatch.undo()
        assert values(log.read("t")) == list(range(count + 1))
        assert log.topic("t").schema.version == 3
    assert len(checked(folder).orphans) == 0


def test_a_sync_that_hangs_does_not_block_readers(folder: str) -> None:
    """While one append waits for a slow disk, others append and readers see what is synced. R-A4"""
    machine = Machine()
    with machine_log(folder, machine, background=False) as log:
        log.create_topic("t", "a bigint")
        log.append("t", [{"a": 1}])
        machine.sync_seconds = 1.5
        thread = threading.Thread(target=log.append, args=("t", [{"a": 2}]))
        thread.start()
        time.sleep(0.1)
        started = time.monotonic()
        log.append("t", [{"a": 3}], durability="os")
        assert values(log.read("t")) == [1]
        assert time.monotonic() - started < 1.2
        machine.sync_seconds = 0
        thread.join()
        log.sync()
        assert values(log.read("t")) == [1, 2, 3]


def test_a_generator_that_fails_leaves_nothing(log: EmbeddedLog) -> None:
    """An error in the caller's own iterator leaves nothing of the entry. R-D3"""
    log.create_topic("t", "a bigint")

    def failing() -> Iterator[dict[str, int]]:
        yield {"a": 1}
        raise ZeroDivisionError

    before = log.position
    with pytest.raises(ZeroDivisionError):
        log.append("t", failing())
    assert log.position == before


def test_a_stream_of_os_appends_becomes_visible(folder: str) -> None:
    """Entries under `os` are synced by the timer though the writer is never quiet. R-A4"""
    with hr.connect(folder, durability="os", quiet_seconds=0.2) as log:
        log.create_topic("t", "a bigint")
        first = log.append("t", [{"a": 0}]).position
        deadline = time.monotonic() + 20
        while log.position < first and time.monotonic() < deadline:
            log.append("t", [{"a": 1}])
        assert log.position >= first


@pytest.mark.parametrize(
    "given",
    [
        {"headers": 5},
        {"headers": {"x": 1}},
        {"transactions": ["a"]},
        {"transactions": [1.0]},
        {"transactions": [2, -1]},
        {"transactions": 1},
        {"transactions": [[1]]},
        {"transactions": [[1], [1, 2]]},
        {"transactions": np.array([2**64 - 1, 2], np.uint64)},
        {"sent_time": "2026-01-01"},
    ],
    ids=str,
)
def test_what_comes_with_the_rows_is_checked_too(log: EmbeddedLog, given: dict[str, Any]) -> None:
    """Headers, transactions and a sent time that are none are an error of the catalogue. R-A1"""
    log.create_topic("t", "a bigint")
    with pytest.raises(errors.BadRows):
        log.append("t", [{"a": 1}], **given)
    assert rows(log.read("t")) == []


def test_pieces_and_rows_do_not_mix_in_one_list(log: EmbeddedLog) -> None:
    log.create_topic("t", "a bigint")
    piece = log.stage("t", [{"a": 1}])
    for mixed in ([piece, {"a": 2}], [{"a": 2}, piece]):
        with pytest.raises(errors.BadRows):
            log.append("t", mixed)
    with log.transaction() as both:
        both.append("t", piece)
        both.append("t", [{"a": 2}])
    assert values(log.read("t")) == [1, 2]
