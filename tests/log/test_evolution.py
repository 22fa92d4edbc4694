"""Schemas that change under rows that stay: old rows read as new ones, end to end.

Caught: an old row that becomes unreadable or another value, a reader that breaks at the change, a
change that should have been refused. Not caught: every pair of types; `tests/model` has the matrix.
"""

from __future__ import annotations

from typing import Any

import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from tests.log.kit import Child, checked, rows, values


def tuples(log: EmbeddedLog, **options: Any) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in rows(log.read("t", **options))]


def test_an_added_column_is_null_in_old_rows(log: EmbeddedLog) -> None:
    """Rows written before a column was added have null in it. R-A1"""
    log.create_topic("t", "a bigint")
    log.append("t", [{"a": 1}])
    topic = log.alter_topic("t", add="b string, c array<int>")
    assert (topic.schema.version, topic.schema.generation) == (2, 1)
    log.append("t", [{"a": 2, "b": "x", "c": [1]}])
    log.append("t", [{"a": 3}])
    assert tuples(log) == [(1, None, None), (2, "x", [1]), (3, None, None)]
    assert tuples(log, columns=["b"]) == [(None,), ("x",), (None,)]


def test_a_widened_column_keeps_its_values(log: EmbeddedLog) -> None:
    """Rows written with a narrower type are read with the wider one. R-A1"""
    log.create_topic("t", "a int, f float, d decimal(5,2)")
    log.append("t", [{"a": 2**31 - 1, "f": 0.5, "d": 1}])
    log.alter_topic("t", widen={"a": "bigint", "f": "double", "d": "decimal(20,4)"})
    log.append("t", [{"a": 2**40, "f": 0.1, "d": 2}])
    assert [(a, f, int(d)) for a, f, d in tuples(log)] == [(2**31 - 1, 0.5, 1), (2**40, 0.1, 2)]
    assert {str(b.data.schema.field("a").type) for b in log.read("t")} == {"int64"}


def test_a_retired_column_can_still_be_asked_for(log: EmbeddedLog) -> None:
    """A retired column is left out, and its old values are there by its name. R-A1"""
    log.create_topic("t", "a bigint, b string not null")
    log.append("t", [{"a": 1, "b": "old"}])
    log.alter_topic("t", retire=["b"])
    log.append("t", [{"a": 2}])
    with pytest.raises(errors.WrongColumn):
        log.append("t", [{"a": 3, "b": "gone"}])
    assert tuples(log) == [(1,), (2,)]
    assert tuples(log, columns=["b", "a"]) == [("old", 1), (None, 2)]


def test_a_rename_is_retire_and_add(log: EmbeddedLog) -> None:
    """Under the new name old rows are null; under the old one their values are there. R-A1"""
    log.create_topic("t", "a bigint, b string")
    log.append("t", [{"a": 1, "b": "old"}])
    topic = log.alter_topic("t", rename={"b": "c"})
    assert topic.schema.column("c").renamed_from == "b"
    log.append("t", [{"a": 2, "c": "new"}])
    assert tuples(log) == [(1, None), (2, "new")]
    assert tuples(log, columns=["b", "c"]) == [("old", None), (None, "new")]


def test_a_retype_starts_a_generation(log: EmbeddedLog) -> None:
    """Rows of another generation are given as they were written, in batches of their own. R-A1"""
    log.create_topic("t", "a bigint, b string")
    log.append("t", [{"a": 1, "b": "x"}])
    log.alter_topic("t", add="c int")
    topic = log.alter_topic("t", retype={"b": "int"})
    assert (topic.schema.version, topic.schema.generation) == (3, 2)
    log.append("t", [{"a": 2, "b": 5}])
    batches = list(log.read("t"))
    assert [batch.schema_version for batch in batches] == [2, 3]
    assert [batch.to_pylist() for batch in batches] == [
        [{"a": 1, "b": "x", "c": None}],
        [{"a": 2, "b": 5, "c": None}],
    ]


def test_a_follower_reads_over_a_change(log: EmbeddedLog) -> None:
    """A follower gets each row at the schema known when it began, or newer. R-A2"""
    log.create_topic("t", "a int")
    log.append("t", [{"a": 1}])
    reading = iter(log.read("t", follow=True, timeout=5))
    assert next(reading).to_pylist() == [{"a": 1}]
    with hr.connect(log.path) as other:
        other.alter_topic("t", add="b string")
        other.append("t", [{"a": 2, "b": "x"}])
        assert next(reading).to_pylist() == [{"a": 2, "b": "x"}]
        other.alter_topic("t", widen={"a": "bigint"}, retire=["b"])
        other.append("t", [{"a": 2**40}])
        assert next(reading).to_pylist() == [{"a": 2**40}]
        other.alter_topic("t", retype={"a": "string"})
        other.append("t", [{"a": "text"}])
        found = next(reading)
        assert (found.to_pylist(), found.schema_version) == ([{"a": "text"}], 4)


def test_a_reading_that_starts_at_the_end_knows_older_rows(log: EmbeddedLog) -> None:
    """Whoever begins after a change reads old rows as new ones, also from another process. R-A1"""
    log.create_topic("t", "a int")
    for i in range(3):
        log.append("t", [{"a": i}])
        log.alter_topic("t", add=f"c{i} bigint")
    expected = [(0, None, None, None), (1, None, None, None), (2, None, None, None)]
    assert tuples(log) == expected
    code = "say([tuple(r.values()) for b in hr.connect(folder).read('t') for r in b.to_pylist()])"
    with Child(log.path, code) as child:
        assert child.wait().strip() == str(expected)


@pytest.mark.parametrize(
    "change",
    [
        {"add": "b int not null"},
        {"add": "a int"},
        {"add": "A int"},
        {"widen": {"a": "int"}},
        {"widen": {"s": "int"}},
        {"retire": ["k"]},
        {"rename": {"k": "j"}},
        {"rename": {"at": "when"}},
        {"retire": ["at"]},
        {"retype": {"at": "string"}},
        {"widen": {"k": "double"}},
        {"retire": ["a"], "widen": {"a": "bigint"}},
        {},
    ],
)
def test_changes_that_are_refused(log: EmbeddedLog, change: dict[str, Any]) -> None:
    """A change that old rows or the key could not follow is refused, and nothing changes. R-D3"""
    ddl = "k int not null, a bigint, s string, at timestamp"
    before = log.create_topic("t", ddl, key="k", event_time="at")
    position = log.position
    with pytest.raises(errors.SchemaChangeRefused):
        log.alter_topic("t", **change)
    assert log.topic("t") == before
    assert log.position == position


def test_opaque_topics_do_not_change(log: EmbeddedLog) -> None:
    """Opaque values have no schema to change. R-D3"""
    log.create_topic("t", "json")
    with pytest.raises(errors.SchemaChangeRefused):
        log.alter_topic("t", add="b int")


def test_two_processes_change_one_topic(log: EmbeddedLog) -> None:
    """Changes made at once by two processes all happen, one after the other. R-A15"""
    log.create_topic("t", "a bigint")
    code = """
        log = hr.connect(folder)
        say("ready"); sys.stdin.readline()
        for i in range(10):
            log.alter_topic("t", add=f"c{sys.argv[2]}_{i} int")
    """
    with Child(log.path, code, 0) as one, Child(log.path, code, 1) as two:
        for child in (one, two):
            assert child.line() == "ready"
        for child in (one, two):
            child.go()
        for child in (one, two):
            child.wait()
    topic = log.topic("t")
    assert [schema.version for schema in topic.schemas] == list(range(1, 22))
    assert len({column.id for column in topic.schema.columns}) == 21
    log.append("t", [{"a": 1, "c0_0": 1, "c1_9": 2}])
    assert values(log.read("t", columns=["c1_9"]), "c1_9") == [2]


@pytest.mark.parametrize("way", ["append", "generator", "transaction", "stage", "writer"])
def test_a_handle_that_is_open_knows_a_column_that_another_has_added(
    log: EmbeddedLog, folder: str, way: str
) -> None:
    log.create_topic("t", "a bigint")
    writer = log.writer("w")
    log.append("t", [{"a": 1}])
    with hr.connect(folder) as other:
        other.alter_topic("t", add="b string")
    new = [{"a": 2, "b": "x"}]
    if way == "transaction":
        with log.transaction() as transaction:
            transaction.append("t", new)
    elif way == "stage":
        log.append("t", log.stage("t", new))
    else:
        appender = writer if way == "writer" else log
        appender.append("t", iter(new) if way == "generator" else new)
    assert tuples(log) == [(1, None), (2, "x")]


def test_all_versions_stay_readable(folder: str) -> None:
    """Entries of every version are read after rolls and a reopening. R-A9"""
    with hr.connect(folder, journal_bytes_first=16 << 10, journal_bytes_max=16 << 10) as log:
        log.create_topic("t", "a smallint, s string")
        changes: list[dict[str, Any]] = [
            {"widen": {"a": "int"}},
            {"add": "b string"},
            {"rename": {"s": "text"}},
            {"widen": {"a": "bigint"}, "retire": ["b"]},
        ]
        for number, change in enumerate([*changes, None]):
            for i in range(20):
                log.append("t", [{"a": 100 * number + i}] * 20, durability="os")
            if change:
                log.alter_topic("t", **change)
    with hr.connect(folder) as log:
        expected = [100 * number + i for number in range(5) for i in range(20) for _ in range(20)]
        assert values(log.read("t")) == expected
        assert log.topic("t").schema.ddl() == "a bigint, text string"
    checked(folder)
