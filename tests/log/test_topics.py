"""Topics: made once, described the same to everybody, and refused with a reason.

Caught: two processes that make one topic twice or give two the same place, a type that does not
come back as it went in, a name or a key that should have been refused. Not caught: what Kafka
would say to these names.
"""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.model.topic import PARTITIONS_MAX, Topic
from tests.log.kit import Child, rows, run_child, values

ALL_TYPES = """
    boolean boolean, tinyint tinyint, smallint smallint, int int, bigint bigint not null,
    float float, double double, string string, binary binary, decimal decimal(38,10), date date,
    timestamp timestamp, timestamp_ntz timestamp_ntz, time time, span interval day to second,
    array array<int>, map map<string,bigint>, struct struct<x:int,y:array<struct<z:string>>>,
    `odd name, ``quoted``` string
"""
FULL: dict[str, Any] = {
    "boolean": True,
    "tinyint": -128,
    "smallint": 32767,
    "int": -(2**31),
    "bigint": 2**63 - 1,
    "float": 0.5,
    "double": 1e308,
    "string": "Grüße\0\U0001f30a",
    "binary": bytes(range(256)),
    "decimal": Decimal("-1234567890123456789012345678.0123456789"),
    "date": dt.date(1, 1, 1),
    "timestamp": dt.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=dt.UTC),
    "timestamp_ntz": dt.datetime(1969, 12, 31, 23, 59, 59, 1),
    "time": dt.time(23, 59, 59, 999999),
    "span": dt.timedelta(days=-3, microseconds=1),
    "array": [1, None, 3],
    "map": [("a", 1), ("b", None)],
    "struct": {"x": None, "y": [{"z": "deep"}, None]},
    "odd name, `quoted`": "",
}
EMPTY = dict.fromkeys(FULL) | {"bigint": 0}


def test_a_topic_is_described_as_it_was_made(log: EmbeddedLog) -> None:
    """What `create_topic` was told is what `topic` says, in every handle. R-A1"""
    made = log.create_topic(
        "shop.public.orders-1",
        "id bigint not null, at timestamp, total decimal(10,2) comment 'with tax'",
        key="id",
        event_time="at",
        partitions=8,
    )
    assert (made.name, made.kind, made.value) == ("shop.public.orders-1", "events", "columns")
    assert (made.key, made.event_time, made.partitions) == (("id",), "at", 8)
    assert made.schema.version == made.schema.generation == 1
    assert made.schema.ddl() == (
        "id bigint not null, at timestamp, total decimal(10,2) comment 'with tax'"
    )
    with hr.connect(log.path) as other:
        assert other.topic("shop.public.orders-1") == made
        assert Topic.from_json(made.to_json()) == made


def test_every_type_comes_back(log: EmbeddedLog) -> None:
    """A value of any type, and null, is read as it was appended. R-A1"""
    log.create_topic("t", ALL_TYPES)
    log.append("t", [FULL, EMPTY, FULL])
    assert rows(log.read("t")) == [FULL, EMPTY, FULL]
    forth = next(iter(log.read("t"))).data
    log.append("t", forth)
    assert rows(log.read("t", start=3)) == [FULL, EMPTY, FULL]


def test_a_pyarrow_schema_makes_the_same_topic(log: EmbeddedLog) -> None:
    """A pyarrow schema and its DDL are one schema. R-A1"""
    arrow = pa.schema([pa.field("a", pa.int64(), nullable=False), ("b", pa.large_string())])
    by_arrow = log.create_topic("x", arrow)
    by_ddl = log.create_topic("y", "a bigint not null, b string")
    assert by_arrow.schema == by_ddl.schema


def test_no_key_may_be_said(log: EmbeddedLog) -> None:
    assert log.create_topic("t", "a bigint", key=None).key == ()


@pytest.mark.parametrize("name", ["a", "_internal", "A.b-C_9", "9", "a" * 249, "a..b"])
def test_names_that_are_taken(log: EmbeddedLog, name: str) -> None:
    """A name of letters, digits, '.', '_' and '-' is a topic's. R-A1"""
    log.create_topic(name, "a bigint")
    log.append(name, [{"a": 1}])
    assert values(log.read(name)) == [1]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a b", "a/b", "ä", "a\n", "\ud800", "a" * 250, None, b"a"]
)
def test_names_that_are_refused(log: EmbeddedLog, name: Any) -> None:
    """Any other name is refused before anything is written, in words that can be shown. R-D3"""
    with pytest.raises(errors.BadTopicName) as refused:
        log.create_topic(name, "a bigint")
    assert str(refused.value).encode().count(b"\n") == 3  # fact, place, why, fix
    assert log.topics() == []
    assert log.position == 0


def test_a_topic_is_made_once(log: EmbeddedLog) -> None:
    """A second `create_topic` is refused, or gives the same topic back if asked to. R-D3"""
    made = log.create_topic("t", "a bigint", key="a", partitions=2)
    with pytest.raises(errors.TopicExists):
        log.create_topic("t", "a bigint", key="a", partitions=2)
    assert log.create_topic("t", "a bigint", key="a", partitions=2, exist_ok=True) == made
    position = log.position
    others: list[dict[str, Any]] = [
        {"schema": "a int", "key": "a", "partitions": 2},
        {"schema": "a bigint", "partitions": 2},
        {"schema": "a bigint", "key": "a", "partitions": 3},
        {"schema": "a bigint", "key": "a", "partitions": 2, "kind": "changes"},
        {"schema": "json", "partitions": 2},
    ]
    for other in others:
        with pytest.raises(errors.TopicExists, match="differs"):
            log.create_topic("t", exist_ok=True, **other)
    assert log.position == position


def test_two_processes_make_topics_at_once(log: EmbeddedLog) -> None:
    """Of two processes that make the same topics, one makes each, and no two share a place. R-A9"""
    code = """
        log = hr.connect(folder)
        say("ready"); sys.stdin.readline()
        made = 0
        for i in range(25):
            try:
                log.create_topic(f"t{i}", "a bigint", partitions=i + 1)
                made += 1
            except errors.TopicExists:
                log.create_topic(f"t{i}", "a bigint", partitions=i + 1, exist_ok=True)
            log.create_topic(f"own-{sys.argv[2]}-{i}", "a bigint", partitions=3)
        say(made)
    """
    with Child(log.path, code, 1) as one, Child(log.path, code, 2) as two:
        for child in (one, two):
            assert child.line() == "ready"
        for child in (one, two):
            child.go()
        assert int(one.wait()) + int(two.wait()) == 25
    topics = log.topics()
    assert [topic.id for topic in topics] == list(range(1, 76))
    taken = [s for t in topics for s in range(t.slot, t.slot + t.partitions)]
    assert len(taken) == len(set(taken))


def test_other_processes_know_a_topic_at_once(log: EmbeddedLog) -> None:
    """A handle that was open before a topic was made uses it without being told. R-A9"""
    code = """
        log = hr.connect(folder)
        assert log.topics() == []
        say("ready"); sys.stdin.readline()
        log.append("new", [{"a": 7}])
    """
    with Child(log.path, code) as child:
        assert child.line() == "ready"
        log.create_topic("new", "a bigint")
        child.go()
        child.wait()
    assert values(log.read("new")) == [7]


def test_topics_survive(log: EmbeddedLog) -> None:
    """Topics are there after the log was closed and opened again. R-A9"""
    log.create_topic("t", ALL_TYPES, key=["bigint", "string"], event_time="timestamp", partitions=5)
    log.create_topic("o", "json")
    before = log.topics()
    log.close()
    with hr.connect(log.path) as again:
        assert again.topics() == before
    out = run_child(log.path, "say([t.name for t in hr.connect(folder).topics()])")
    assert out.strip() == "['t', 'o']"


def test_an_unknown_topic_names_the_nearest(log: EmbeddedLog) -> None:
    """A misspelt topic is an error that names what may have been meant. R-D3"""
    log.create_topic("clicks", "a bigint")
    for use in (
        lambda: log.append("click", [{"a": 1}]),
        lambda: log.read("click"),
        lambda: log.stage("click", [{"a": 1}]),
        lambda: log.alter_topic("click", add="b int"),
        lambda: log.ends("click"),
    ):
        with pytest.raises(errors.UnknownTopic, match="'clicks'"):
            use()


# --- opaque values --------------------------------------------------------------------------------


def test_opaque_bytes(log: EmbeddedLog) -> None:
    """Bytes come back as they are, with their key or none. R-A1"""
    log.create_topic("b", "bytes", partitions=3)
    log.append("b", [b"\0\xff", (b"k", b"v"), (b"k", None), b""])
    found = [(row["key"], row["value"]) for row in rows(log.read("b"))]
    assert sorted(found, key=repr) == sorted(
        [(None, b"\0\xff"), (b"k", b"v"), (b"k", None), (None, b"")], key=repr
    )


def test_opaque_json(log: EmbeddedLog) -> None:
    """JSON is kept as text that means the same value, and what is not JSON is refused. R-A1"""
    log.create_topic("j", "json")
    log.append("j", [{"a": [1, 2.5, None, "ü"]}, "text", 3, ("key", {"b": True}), b"[1, 2]"])
    found = [(row["key"], row["value"]) for row in rows(log.read("j"))]
    assert found == [
        (None, '{"a":[1,2.5,null,"ü"]}'),
        (None, '"text"'),
        (None, "3"),
        ("key", '{"b":true}'),
        (None, "[1, 2]"),
    ]
    position = log.position
    for bad in ([b"{"], [object()], [float("nan")]):
        with pytest.raises(errors.WrongType):
            log.append("j", [{"fine": 1}, *bad])
    assert log.position == position


def test_opaque_text(log: EmbeddedLog) -> None:
    """Text is kept as it is, and equal keys share a partition. R-A1 R-A9"""
    log.create_topic("t", "text", partitions=16)
    for _ in range(3):
        log.append("t", [(f"k{i}", "x") for i in range(20)])
    partitions: dict[str, set[int]] = {}
    for batch in log.read("t"):
        for row, partition in zip(batch.to_pylist(), batch.partition.to_pylist(), strict=True):
            partitions.setdefault(row["key"], set()).add(partition)
    assert all(len(found) == 1 for found in partitions.values())
    assert len({min(found) for found in partitions.values()}) > 5


@pytest.mark.parametrize(
    "options", [{"key": "key"}, {"event_time": "value"}, {"kind": "changes"}, {"key": ["x", "y"]}]
)
def test_opaque_topics_have_their_columns_only(log: EmbeddedLog, options: dict[str, Any]) -> None:
    """An opaque topic takes no key columns, event time or weights of its own. R-D3"""
    with pytest.raises(errors.BadSchema, match="opaque"):
        log.create_topic("o", "bytes", **options)


# --- changes, keys, times, partitions -------------------------------------------------------------


def test_changes_have_a_weight(log: EmbeddedLog) -> None:
    """A row of a `changes` topic weighs +1 unless it says otherwise. R-A1"""
    topic = log.create_topic("c", "a bigint not null comment 'key'", key="a", kind="changes")
    assert topic.schema.arrow.names == ["a", "_weight", "_op"]
    assert topic.schema.column("a").comment == "key"
    log.append("c", [{"a": 1}, {"a": 1, "_weight": -1, "_op": "d"}])
    log.append("c", pa.table({"a": [2]}))
    found = [tuple(row.values()) for row in rows(log.read("c"))]
    assert found == [(1, 1, None), (1, -1, "d"), (2, 1, None)]
    with pytest.raises(errors.MissingKey):
        log.append("c", [{"a": 3, "_weight": None}])


def test_reserved_columns(log: EmbeddedLog) -> None:
    """Columns with '_' are Headrace's: known ones with their type, no others. R-D3"""
    log.create_topic("ok", "a bigint, _lsn bigint, _xid bigint, _commit_time timestamp")
    with pytest.raises(errors.ReservedName):
        log.create_topic("t", "a bigint, _mine string")
    with pytest.raises(errors.ReservedName):
        log.create_topic("t", "a bigint, _weight string")
    log.create_topic("plain", "a bigint")
    for name in ("_weight", "_headers", "_transaction"):
        with pytest.raises(errors.UsageError):
            log.append("plain", [{"a": 1, name: 1}])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"schema": "a bigint, at string", "event_time": "at"}, errors.BadSchema),
        ({"schema": "a bigint", "event_time": "at"}, errors.WrongColumn),
        ({"schema": "a bigint", "event_time": 5}, errors.WrongColumn),
        ({"schema": "a bigint", "key": "b"}, errors.WrongColumn),
        ({"schema": "a array<int>", "key": "a"}, errors.BadSchema),
        ({"schema": "a bigint", "key": ["a", "a"]}, errors.BadSchema),
        ({"schema": "a bigint, A string"}, errors.BadSchema),
        ({"schema": "a varchar(3)"}, errors.BadSchema),
        ({"schema": ""}, errors.BadSchema),
        ({"schema": 7}, errors.BadSchema),
        ({"schema": pa.schema([("a", pa.uint64())])}, errors.BadSchema),
        ({"schema": "a bigint", "partitions": 0}, errors.BadSetting),
        ({"schema": "a bigint", "partitions": PARTITIONS_MAX + 1}, errors.BadSetting),
        ({"schema": "a bigint", "partitions": True}, errors.BadSetting),
        ({"schema": "a bigint", "kind": "queue"}, errors.BadSetting),
    ],
)
def test_what_cannot_be_a_topic(log: EmbeddedLog, options: dict[str, Any], error: type) -> None:
    """A topic that could not keep its promises is refused, and leaves nothing. R-D3"""
    with pytest.raises(error):
        log.create_topic("t", **options)
    assert log.position == 0


def test_event_time_is_the_callers(log: EmbeddedLog) -> None:
    """The event time is a column, kept as the producer gave it. R-A1"""
    log.create_topic("t", "at timestamp, local timestamp_ntz", event_time="at")
    long_ago = dt.datetime(1912, 6, 23, tzinfo=dt.UTC)
    log.append("t", [{"at": long_ago}])
    assert rows(log.read("t"))[0]["at"] == long_ago


def test_many_partitions(log: EmbeddedLog) -> None:
    """A topic of the most partitions allowed numbers each by itself. R-A9"""
    log.create_topic("before", "a bigint")
    log.create_topic("t", "a bigint", partitions=PARTITIONS_MAX)
    log.create_topic("after", "a bigint")
    for partition in (0, PARTITIONS_MAX - 1, 700, 0):
        log.append("t", [{"a": partition}], partition=partition)
        log.append("after", [{"a": 1}])
    ends = log.ends("t")
    assert (ends[0], ends[700], ends[-1], sum(ends)) == (2, 1, 1, 4)
    assert log.ends("after") == [4]
    assert log.ends("before") == [0]


@pytest.mark.timeout(20)
def test_the_logs_own_counters_are_its_own(log: EmbeddedLog) -> None:
    """A caller cannot move the counters by which topics are made. R-A15"""
    log.create_topic("t", "a bigint")
    for name in ("headrace/topics", "headrace/topic/t", "headrace/", "headrace/epoch/w"):
        with pytest.raises(errors.UsageError):
            log.append("t", [{"a": 1}], expect={name: 1})
        with pytest.raises(errors.UsageError):
            log.append("t", [{"a": 1}], require={name: 1})
        with pytest.raises(errors.UsageError), log.transaction() as transaction:
            transaction.expect(name, 1)
    log.append("t", [{"a": 1}], expect={"topics": 0, "topic/t": 0})
    log.alter_topic("t", add="b int")
    log.create_topic("u", "a bigint")
