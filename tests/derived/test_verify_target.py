"""Verify and repair on a real target: what was broken by hand is found, named and put right. R-B7

Caught: a broken row that is not found, a whole one that is named, a repair that leaves a row wrong
or writes to one that was right (every row that was touched is known by its xmin), audit lines that
say something else than what happened, a repair that puts the target back behind its follower.
Not caught: targets other than PostgreSQL and SQLite; corruption that hides from SELECT.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest

from headrace import errors
from headrace.derived.postgres import PostgresTarget
from headrace.derived.rows import kept_tables, loading
from headrace.derived.targets import SQLite, Table
from headrace.interfaces import Changes, Cut, Kept
from headrace.log.embedded.log import EmbeddedLog
from headrace.runtime.verify import Difference, Options, last, verify_kept
from tests.capture.conftest import Database

LONG = "the same thirty-two bytes in all "
COLUMNS = "region string, id bigint, name string, amount decimal(12,2), at timestamp, rate double"


def loaded(log: EmbeddedLog, kept: Kept) -> None:
    """A target as a follower leaves it, at the log's newest position."""
    target = kept.target.open(kept.follower)
    epoch = target.mark().epoch + 1
    target.mark(epoch, log.journal.log_id.hex())
    tables, cut = kept_tables(log, kept), Cut(log.position, log.position)
    target.wipe(epoch, tables)
    for table in tables:
        changes = Changes(table, lambda table=table: loading(log, table, cut))  # type: ignore[misc]
        target.apply(epoch, None, [changes], _none)
    target.swap(epoch, cut, [], _none)
    target.close()


def _none(refused: Sequence[object]) -> None:
    assert not refused


def orders(rng: random.Random, count: int) -> list[dict[str, Any]]:
    regions = ["", "B", "a", "é", LONG + "1", LONG + "2"]
    keys = {(rng.choice(regions), rng.randrange(count)) for _ in range(count)}
    return [
        {
            "region": region,
            "id": number,
            "name": rng.choice([None, "", "x", 'quo"te', "line\nbreak"]),
            "amount": rng.choice([None, Decimal(rng.randrange(-999, 999)) / 4]),
            "at": None,
            "rate": rng.choice([None, 0.5, float("nan"), float("inf"), rng.random()]),
            "_weight": 1,
        }
        for region, number in sorted(keys)
    ]


def make(log: EmbeddedLog, target: Any, rng: random.Random, count: int = 60) -> Kept:
    """A topic with a key and one without, kept in a target."""
    log.create_topic("orders", COLUMNS, key=("region", "id"), kind="changes", exist_ok=True)
    log.append("orders", orders(rng, count))
    log.create_topic("notes", "who string, what string", kind="changes", exist_ok=True)
    notes = [
        {"who": rng.choice("abc"), "what": rng.choice([None, "x", "y"]), "_weight": 1}
        for _ in range(count // 2)
    ]
    log.append("notes", notes)
    topics = {"orders": "orders", "notes": "notes"}
    kept = Kept("shop", "main", topics, frozenset(), target)
    loaded(log, kept)
    return kept


def corrupt(rng: random.Random, connection: psycopg.Connection[Any]) -> dict[tuple[str, int], str]:
    """Break rows by hand; for each key the kind of difference."""
    keys = connection.execute("select region, id from t.orders").fetchall()
    rng.shuffle(keys)
    broken: dict[tuple[str, int], str] = {}
    for region, number in keys[: rng.randrange(1, 6)]:
        new = rng.choice(["name = coalesce(name, '') || '!'", "amount = coalesce(amount, 0) + 1"])
        if rng.random() < 0.3:
            new = "rate = case when rate is null then 'NaN'::float8 end, at = coalesce(at, 'epoch')"
        connection.execute(f"update t.orders set {new} where region = %s and id = %s",
                           (region, number))  # fmt: skip
        broken[region, number] = "changed"
    for region, number in keys[6 : 6 + rng.randrange(4)]:
        connection.execute("delete from t.orders where region = %s and id = %s", (region, number))
        broken[region, number] = "missing"
    for number in range(rng.randrange(4)):
        key = (rng.choice(["", "~", LONG]), 1_000_000 + number)
        connection.execute("insert into t.orders (region, id) values (%s, %s)", key)
        broken[key] = "extra"
    if rng.random() < 0.5:  # two rows whose contents are exchanged
        (a, b), (c, d) = keys[11:13]
        swap = "update t.orders t set name = o.name, amount = o.amount, at = o.at, rate = o.rate"
        connection.execute(
            f"{swap} from t.orders o where (t.region, t.id, o.region, o.id) in "
            "((%s, %s, %s, %s), (%s, %s, %s, %s))",
            (a, b, c, d, c, d, a, b),
        )
        one, other = connection.execute(
            "select (name, amount, at, rate)::text from t.orders where (region, id) in "
            "((%s, %s), (%s, %s))",
            (a, b, c, d),
        ).fetchall()
        if one != other:
            broken |= {(a, b): "changed", (c, d): "changed"}
    return broken


def by_key(found: Sequence[Difference]) -> dict[tuple[str, int], str]:
    return {(one.key["region"], one.key["id"]): one.kind for one in found}


def repairs(log: EmbeddedLog) -> list[dict[str, Any]]:
    if "_repairs" not in {topic.name for topic in log.topics()}:
        return []
    return [row for batch in log.read("_repairs") for row in batch.to_pylist()]


@pytest.mark.parametrize("seed", range(10))
def test_what_was_broken_is_found_and_repaired_and_nothing_else(
    seed: int, database: Database, log: EmbeddedLog
) -> None:
    rng = random.Random(seed)
    kept = make(log, Table(database.dsn(), "t"), rng)
    with database.connect() as connection:
        assert [one.differing for one in verify_kept(log, kept)] == [0, 0]
        before = connection.execute("select * from t.orders order by 1, 2").fetchall()
        right = {(row[0], row[1]): row for row in before}
        broken = corrupt(rng, connection)
        as_broken = {
            (row[0], row[1]): row for row in connection.execute("select * from t.orders").fetchall()
        }
        versions = connection.execute("select region, id, xmin::text from t.orders").fetchall()

        (result,) = verify_kept(log, kept, table="orders")
        assert by_key(result.differences) == broken
        assert result.differing == len(broken)
        for one in result.differences:
            key = (one.key["region"], one.key["id"])
            assert (one.expected is None) == (one.kind == "extra")
            assert (one.found is None) == (one.kind == "missing")
            if one.expected is not None:
                assert one.expected["name"] == right[key][2]
            if one.found is not None:
                assert one.found["name"] == as_broken[key][2]
            assert len(one.positions) == (0 if one.kind == "extra" else 1)

        (result,) = verify_kept(log, kept, table="orders", repair=True)
        assert (result.differing, result.repaired) == (0, len(broken))
        after = connection.execute("select * from t.orders order by 1, 2").fetchall()
        assert repr(after) == repr(before)  # NaN is not equal to itself
        touched = {
            (region, number)
            for region, number, _ in set(
                connection.execute("select region, id, xmin::text from t.orders").fetchall()
            )
            - set(versions)
        }
        assert touched == {key for key, kind in broken.items() if kind != "extra"}

    lines = repairs(log)
    told = {(row["region"], row["id"]): one for one in lines for row in [json.loads(one["key"])]}
    assert len(lines) == len(told) == len(broken)
    for key, kind in broken.items():
        old, new = told[key]["before"], told[key]["after"]
        assert (old is None) == (kind == "missing")
        assert (new is None) == (kind == "extra")
        if new is not None:
            assert json.loads(new)["name"] == right[key][2]
        if old is not None:
            assert json.loads(old)["name"] == as_broken[key][2]
        assert told[key]["through"] == result.through
    assert last(log)["shop/main", "orders", "log"]["differing"] == 0


def test_rows_without_a_key_are_repaired_too(database: Database, log: EmbeddedLog) -> None:
    kept = make(log, Table(database.dsn(), "t"), random.Random(1))
    with database.connect() as connection:
        before = connection.execute("select who, what from t.notes order by 1, 2").fetchall()
        connection.execute(
            "delete from t.notes where (_row, _copy) in (select _row, 1 from t.notes limit 1)"
        )
        connection.execute(
            "update t.notes set what = 'by hand' where (_row, _copy) in "
            "(select _row, _copy from t.notes order by _row desc limit 1)"
        )
        connection.execute(
            "insert into t.notes (who, what, _row, _copy) values "
            "('z', null, gen_random_uuid(), 1), ('z', null, gen_random_uuid(), 2)"
        )
        (result,) = verify_kept(log, kept, table="notes")
        assert result.differing == 4
        (result,) = verify_kept(log, kept, table="notes", repair=True)
        assert result.differing == 0
        after = connection.execute("select who, what from t.notes order by 1, 2").fetchall()
        assert after == before


def test_a_sqlite_file_is_verified_and_repaired(tmp_path: Path, log: EmbeddedLog) -> None:
    import sqlite3

    kept = make(log, SQLite(str(tmp_path / "kept.db")), random.Random(2))
    with sqlite3.connect(tmp_path / "kept.db") as file:
        file.execute("update orders set name = 'by hand' where id % 7 = 1")
        file.execute("delete from notes where rowid = 3")
    file.close()
    results = verify_kept(log, kept, repair=True)
    assert [one.differing for one in results] == [0, 0]
    assert [one.repaired > 0 for one in results] == [True, True]


def test_keys_that_are_text_here_and_numbers_there(database: Database, log: EmbeddedLog) -> None:
    """What a capture carries as text is of its own type in the target, and sorted as text."""
    about = {"comment": "postgresql numeric"}
    schema = pa.schema([pa.field("rate", pa.string(), metadata=about), ("n", pa.int64())])
    log.create_topic("rates", schema, key="rate", kind="changes")
    texts = ["10", "9", "100.5", "-3", "-20", "NaN"]
    log.append("rates", [{"rate": t, "n": at, "_weight": 1} for at, t in enumerate(texts)])
    kept = Kept("shop", "main", {"rates": "rates"}, frozenset(), Table(database.dsn(), "t"))
    loaded(log, kept)
    with database.connect() as connection:
        (kind,) = connection.execute("select pg_typeof(rate)::text from t.rates").fetchone() or (
            "",
        )
        assert kind == "numeric"
        connection.execute("update t.rates set n = -1 where rate in (9, -20)")
    (result,) = verify_kept(log, kept)
    assert {(one.key["rate"], one.kind) for one in result.differences} == {
        ("9", "changed"),
        ("-20", "changed"),
    }


def test_only_so_many_keys_are_named_and_all_are_counted(
    database: Database, log: EmbeddedLog
) -> None:
    kept = make(log, Table(database.dsn(), "t"), random.Random(3))
    with database.connect() as connection:
        connection.execute("update t.orders set name = 'by hand'")
    seen: list[int] = []
    options = Options(7, 1e9, lambda progress: seen.append(progress.rows))
    (result,) = verify_kept(log, kept, table="orders", options=options)
    assert len(result.differences) == 7
    assert result.differing == result.rows == seen[-1] > 7


@pytest.mark.parametrize("kind", ["postgres", "sqlite"])
def test_a_repair_waits_for_no_follower_and_puts_none_back(
    kind: str,
    database: Database,
    tmp_path: Path,
    log: EmbeddedLog,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target: Any = SQLite(str(tmp_path / "t.db"))
    if kind == "postgres":
        target = Table(database.dsn(), "t")
    a_repair_is_overtaken(target, log, monkeypatch)


def a_repair_is_overtaken(
    descriptor: Any, log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the cut and the repair the follower applies another one."""
    kept = make(log, descriptor, random.Random(4))
    table = kept_tables(log, kept)[0]
    rows = log.table("orders").scan(columns=table.schema.names).read_all().to_pylist()
    old = {name: rows[0][name] for name in table.schema.names}
    new = {**old, "name": "newer"}
    lie = pa.RecordBatch.from_pylist([{**old, "name": "a lie"}], table.schema)
    honest = pa.RecordBatch.from_pylist([new], table.schema)
    one = pa.array(np.ones(1, np.int64))

    def applied(cut: Cut, row: pa.RecordBatch) -> None:
        target = kept.target.open(kept.follower)
        change = Changes(table, lambda: iter([row.append_column("_weight", one)]))
        target.apply(target.mark().epoch, cut, [change], _none)
        target.close()

    applied(Cut(log.position, log.position), lie)
    moved: list[int] = []
    with closing(kept.target.open(kept.follower)) as opened:
        kind: Any = type(opened)
    mark = kind.mark

    def moving(self: Any, *given: Any) -> Any:
        found = mark(self, *given)
        if not moved and "_repairs" in {topic.name for topic in log.topics()}:
            log.append("orders", [{**old, "_weight": -1}, {**new, "_weight": 1}])
            moved.append(log.position)
            applied(Cut(moved[0], moved[0]), honest)
        return found

    monkeypatch.setattr(kind, "mark", moving)
    (result,) = verify_kept(log, kept, table="orders", repair=True)
    assert (result.through, result.differing) == (moved[0], 0)
    assert {line["through"] for line in repairs(log)} == {moved[0]}
    with closing(kept.target.open(kept.follower)) as opened:
        there = [row for batch in opened.read(table)[1] for row in batch.to_pylist()]
    key = [old[name] for name in table.key]
    found = [row["name"] for row in there if [row[name] for name in table.key] == key]
    assert found == ["newer"]


def test_what_cannot_be_verified_says_why(database: Database, log: EmbeddedLog) -> None:
    kept = make(log, Table(database.dsn(), "t"), random.Random(5))
    for name, fix in (("order", "did you mean 'orders'?"), ("nix", "name one of these")):
        with pytest.raises(errors.CannotVerify, match=f"no table '{name}'") as misspelt:
            verify_kept(log, kept, table=name)
        assert misspelt.value.fix == fix
    with database.connect() as connection:
        connection.execute("drop table t.notes")
    with pytest.raises(errors.CannotVerify, match="no table 'notes'"):
        verify_kept(log, kept)
    empty = Kept("shop", "other", {"orders": "orders"}, frozenset(), kept.target)
    with pytest.raises(errors.CannotVerify, match="nothing yet"):
        verify_kept(log, empty)


def test_types_whose_text_is_not_what_a_cast_gives(database: Database, log: EmbeddedLog) -> None:
    """An inet cast to text has its mask, and as the server writes it it has none."""
    names = ("inet", "uuid", "jsonb", "interval", "macaddr", "cidr", "numeric")
    schema = pa.schema(
        [pa.field("key", pa.string(), metadata={"comment": "postgresql inet"})]
        + [pa.field(n, pa.string(), metadata={"comment": f"postgresql {n}"}) for n in names]
    )
    log.create_topic("types", schema, key="key", kind="changes")
    values = {
        "inet": "192.168.0.1", "uuid": "0" * 8 + "-0000-0000-0000-" + "0" * 12,
        "jsonb": '{"a": 1}', "interval": "P1DT2H", "macaddr": "08:00:2b:01:02:03",
        "cidr": "10.0.0.0/8", "numeric": "1.50",
    }  # fmt: skip
    keys = ["10.0.0.1", "10.0.0.1/8", "9.0.0.1", "10.0.0.10", "::1"]
    log.append("types", [{"key": key, **values, "_weight": 1} for key in keys])
    kept = Kept("shop", "main", {"types": "types"}, frozenset(), Table(database.dsn(), "t"))
    loaded(log, kept)
    (result,) = verify_kept(log, kept)
    assert (result.rows, result.differences) == (len(keys), [])


def test_a_repair_does_not_bring_an_older_shape_back(
    database: Database, log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table got another column between the reading and the repair."""
    kept = make(log, Table(database.dsn(), "t"), random.Random(6))
    with database.connect() as connection:
        connection.execute("update t.orders set name = 'by hand'")
    kind: Any = PostgresTarget
    read = kind.read

    def reading(self: Any, table: Any) -> Any:
        found = read(self, table)
        if log.topic("orders").schema.version == 1:
            log.alter_topic("orders", add="more string")
            with closing(kept.target.open(kept.follower)) as other:
                mark, new = other.mark(), kept_tables(log, kept)[0]
                other.apply(mark.epoch, mark.cut, [Changes(new, lambda: iter([]))], _none)
        return found

    monkeypatch.setattr(kind, "read", reading)
    with pytest.raises(errors.CannotVerify, match="other columns"):
        verify_kept(log, kept, table="orders", repair=True)
    with closing(kept.target.open(kept.follower)) as opened:
        assert [one.schema.names[-1] for one in opened.mark().tables] == ["more", "what"]
    (result,) = verify_kept(log, kept, table="orders", repair=True)
    assert (result.repaired > 0, result.differing) == (True, 0)
