"""Followers against a hand-made pipeline: killed at every statement, doubled, refused (R-B6, B12).

Catches: rows lost, twice or out of order; a table ahead of its views; progress that is not in the
transaction; an older follower that is let in; rows refused that are in neither place; schema
changes that do not arrive. Cannot catch: what Spark's own commits get wrong (one test has a real
pipeline), and hardware.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, LiteralString
from unittest import mock

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace import errors
from headrace.derived import aside, cuts
from headrace.derived.follower import Follower
from headrace.derived.postgres import PostgresTarget
from headrace.derived.rows import _SEEDS, added_up, expected, kept_table
from headrace.derived.shape import alterations
from headrace.derived.sqlite import SQLiteTarget
from headrace.derived.wait import wait
from headrace.interfaces import Cut, Kept, Mark
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.writer import state_counter
from headrace.model.hashing import Words, hash64
from headrace.model.topic import define
from headrace.runtime.verify import verify_kept
from headrace.testing.follower_case import (
    ACCOUNTS,
    Bank,
    Fuse,
    Killed,
    Mortal,
    check,
    kept_in,
    stepped,
)
from tests.capture.conftest import Database


def checked(log: EmbeddedLog, kept: Kept) -> None:
    target = kept.target.open(kept.follower)
    assert check(log, target, kept) == ""
    target.close()


def mark_of(kept: Kept) -> Mark:
    with contextlib.closing(kept.target.open(kept.follower)) as target:
        return target.mark()


# --- pure parts -----------------------------------------------------------------------------------

ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from([1, -1])), max_size=12
)


def _collide(columns: Sequence[pa.Array], seed: int = 0) -> Words:
    """A hash in which keys collide by one of the two seeds."""
    return hash64(columns, seed) & np.uint64(1 if seed == _SEEDS[0] else (1 << 64) - 1)


KEYS: dict[str, tuple[str, Callable[[int], tuple[Any, ...]]]] = {
    "number": ("k bigint", lambda n: (n,)),
    "null": ("k bigint", lambda n: (n or None,)),
    "text": ("k string", lambda n: ("ab"[: n % 3] + "\0" * (n // 3),)),
    "two": ("k string, k2 double", lambda n: (None if n % 2 else "a", 0.0 if n < 2 else math.nan)),
}


@pytest.mark.parametrize(
    ("kind", "collide"),
    [*((kind, False) for kind in KEYS), ("text", True), ("two", True)],  # of numbers none can
)
@settings(max_examples=80, deadline=None)
@given(st.lists(ROWS, max_size=5))
def test_changes_added_up_are_what_the_table_says(
    kind: str, collide: bool, entries: list[Any]
) -> None:
    """Also of topics that retract what was not there: the table's rules hold for any rows."""
    rows = [(n, *row) for n, entry in enumerate(entries, 1) for row in entry]
    key, of = KEYS[kind]
    topic = define("t", f"{key}, v bigint", ("k", "k2")[: 1 + key.count(",")], None, 1, "changes")
    batch = pa.RecordBatch.from_pylist(
        [{**dict(zip(topic.key, of(k), strict=True)), "v": v, "_weight": w} for _, k, v, w in rows],
        topic.schema.arrow,
    )
    table = kept_table(topic, "t", view=False)
    positions = np.array([row[0] for row in rows], np.int64)
    with mock.patch("headrace.derived.rows.hash64", _collide if collide else hash64):
        made = added_up(table, batch, positions)
    want: dict[int, int | None] = {}
    for entry in entries:
        for key in {row[0] for row in entry}:
            left: dict[int, int] = {}
            last: dict[int, int] = {}
            for place, (k, v, w) in enumerate(entry):
                if k == key:
                    left[v] = left.get(v, 0) + w
                    last[v] = place
            there = [v for v in left if left[v] > 0]
            if there:
                want[key] = max(there, key=last.__getitem__)
            elif any(left.values()):
                want[key] = None
    number = {str(of(n)): n for n in range(4)}
    got = {
        number[str(tuple(row[name] for name in topic.key))]: row["v"]
        if row["_weight"] > 0
        else None
        for row in made.to_pylist()
    }
    assert got == want
    assert made.num_rows == len(want)


@settings(max_examples=80, deadline=None)
@given(ROWS)
def test_rows_without_a_key_are_added_up(rows: list[Any]) -> None:
    topic = define("t", "k bigint, v bigint", (), None, 1, "changes")
    batch = pa.RecordBatch.from_pylist(
        [{"k": k, "v": v, "_weight": w} for k, v, w in rows], topic.schema.arrow
    )
    bag = kept_table(topic, "t", view=False)
    sums: dict[tuple[int, int], int] = {}
    for k, v, w in rows:
        sums[k, v] = sums.get((k, v), 0) + w
    found = added_up(bag, batch, np.zeros(len(rows), np.int64)).to_pylist()
    assert {(r["k"], r["v"]): r["_weight"] for r in found} == {k: n for k, n in sums.items() if n}


def test_of_an_events_topic_the_last_row_counts(log: EmbeddedLog) -> None:
    topic = log.create_topic("t", "k bigint, v bigint, _op string", key="k")
    table = kept_table(topic, "t", view=False)
    rows = [(1, 1, None), (2, 1, None), (1, 2, None), (2, 2, "d"), (3, 3, "d"), (3, 4, "c")]
    batch = pa.RecordBatch.from_pylist(
        [{"k": k, "v": v, "_op": op} for k, v, op in rows], topic.schema.arrow
    )
    made = added_up(table, batch, np.array([1, 1, 2, 2, 2, 2])).to_pylist()
    assert {r["k"]: r["v"] * r["_weight"] for r in made} == {1: 2, 2: -2, 3: 4}


def test_a_value_that_is_null_takes_its_key_out_of_the_target(
    log: EmbeddedLog, tmp_path: Path
) -> None:
    """As it takes it out of the log's table (R-A14)."""
    log.create_topic("t", "text")
    everything = Kept("shop", "lite", {"t": "t"}, frozenset(), hr.SQLite(str(tmp_path / "t.db")))
    for rows in ([("a", "1"), ("b", "1")], [("a", None), ("c", None)], [("c", "2")]):
        log.append("t", rows)
        with Follower(log, everything) as follower:
            follower.run("caught up")
        checked(log, everything)


def test_what_a_follower_has_not_read_yet_is_held(log: EmbeddedLog, tmp_path: Path) -> None:
    """If anything may go of its topics; else nothing is said."""
    log.create_topic("t", "k bigint, v bigint", key="k", kind="changes")
    everything = Kept("shop", "lite", {"t": "t"}, frozenset(), hr.SQLite(str(tmp_path / "t.db")))
    for compact in (False, True):
        log.set_topic("t", compact=compact)
        log.append("t", [{"k": 1, "v": 1}])
        at = log.position
        with Follower(log, everything) as follower:
            follower.run("caught up")
        held = log.holds().get("follower/shop/lite")
        assert (held is not None) == compact
    assert held is not None
    assert held["position"] >= at
    assert held["topics"] == ["t"]


def test_only_commits_that_name_all_views_are_cuts() -> None:
    commits = [(5, 3, ["a", "b"]), (7, 6, ["a"]), (9, 6, ["b", "a", "c"])]
    assert cuts.cuts_of(commits, frozenset("ab")) == [Cut(3, 5), Cut(6, 9)]
    assert cuts.cuts_of(commits, frozenset("c")) == [Cut(6, 9)]


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=6), st.integers(0, 2**32))
def test_a_feed_hands_out_each_row_once_at_its_place(
    tmp_path_factory: pytest.TempPathFactory, places: list[int], seed: int
) -> None:
    """Windows of many entries and large entries in chunks, taken up to any position."""
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("log")
    with hr.connect(folder, durability="os", chunk_bytes=2000) as log:
        for name in ("a", "b"):
            log.create_topic(name, "n bigint, t string")
        wanted = {}
        for n in range(12):
            with log.transaction() as entry:
                for name in rng.sample(["a", "b"], rng.randrange(1, 3)):
                    rows = [{"n": n, "t": "x" * 50}] * rng.choice([1, 2, 300])
                    entry.append(name, [log.stage(name, rows)] if len(rows) > 100 else rows)
                    wanted[n, name] = len(rows)
            assert entry.receipt is not None
            wanted[n, "at"] = entry.receipt.position
        log.sync()
        feed = cuts.Feed(log, ["a", "b"], 0)
        got: dict[Any, int] = {}
        for place in [*sorted(places), log.position]:
            for part in feed.through(min(place, log.position)):
                for n, count in zip(
                    *np.unique(part.rows.column("n").to_numpy(), return_counts=True), strict=True
                ):
                    assert wanted[int(n), "at"] <= place
                    got[int(n), part.topic] = got.get((int(n), part.topic), 0) + int(count)
        feed.close()
        assert got == {key: n for key, n in wanted.items() if key[1] != "at"}


def test_columns_are_known_by_their_ids(log: EmbeddedLog) -> None:
    topic = log.create_topic("t", "k bigint, a int, b string", key="k")
    old = kept_table(topic, "t", view=False)
    log.alter_topic("t", retire=["a"], add="c string", nullable=())
    log.alter_topic("t", add="a int")
    new = kept_table(log.topic("t"), "t", view=False)
    assert [(what, one.name) for what, one in alterations(old, new)] == [
        ("drop", "a"), ("add", "c"), ("add", "a")]  # fmt: skip
    log.alter_topic("t", widen={"a": "bigint"})
    newest = kept_table(log.topic("t"), "t", view=False)
    assert [(what, one.name) for what, one in alterations(new, newest)] == [("type", "a")]
    log.alter_topic("t", retype={"b": "int"})
    with pytest.raises(errors.TargetStopped, match="generation 2"):
        alterations(newest, kept_table(log.topic("t"), "t", view=False))


# --- kills ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_follower_is_right_whatever_happens_to_it(
    kind: str, seed: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if kind == "sqlite":
        wrong, _ = stepped(tmp_path / "log", str(tmp_path / "t.db"), seed)
    else:
        database: Database = request.getfixturevalue("database")
        wrong, _ = stepped(tmp_path / "log", database.dsn(), seed, schema="kept")
    assert wrong == ""


def test_a_follower_killed_at_every_statement(log: EmbeddedLog, database: Database) -> None:
    """A first load, cuts, a new column: death at each statement in turn, before or after it."""
    bank = Bank(log)
    bank.change({n: {"owner": "ab"[n % 2], "balance": n} for n in range(4)})
    bank.commit()
    mortal = Mortal(database.dsn(), "kept")
    kept = kept_in(mortal)
    deaths = 0
    for at in range(1, 200):
        mortal.fuse = Fuse(at, after=bool(at % 3 == 0))
        follower = Follower(log, kept)
        try:
            follower.run("caught up")
            bank.change({at % 5: {"owner": "c", "balance": at}, 1: {"owner": "a", "balance": -at}})
            if at % 4 == 0:
                log.alter_topic(ACCOUNTS, add=f"more{at} string")
            bank.commit()
            follower.run("caught up")
        except Killed:
            deaths += 1
        follower.close()
        died, mortal.fuse = mortal.fuse.dead, Fuse()
        checked(log, kept)
        if not died:
            break
    with Follower(log, kept) as last:
        last.run("caught up")
    checked(log, kept)
    assert deaths > 30


CHILD = """
import sys, headrace as hr
from headrace.derived.follower import Follower
from headrace.testing.follower_case import kept_in
log = hr.connect(sys.argv[1])
kept = kept_in(hr.Table(sys.argv[2], schema="kept"))
Follower(log, kept, report=lambda state: print(state.doing, flush=True)).run()
"""


@pytest.mark.timeout(180)
def test_killed_for_real_while_readers_look(log: EmbeddedLog, database: Database) -> None:
    """kill -9 of a follower's process; a reader finds in every transaction tables that agree."""
    bank = Bank(log)
    bank.change({n: {"owner": "abcd"[n % 4], "balance": 100} for n in range(8)})
    bank.commit()
    kept = kept_in(hr.Table(database.dsn(), schema="kept"))
    with Follower(log, kept) as first:
        first.run("caught up")
    stop, looks, wrong = threading.Event(), [0], []

    def look() -> None:
        with database.connect(autocommit=False) as reader:
            reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            while not stop.is_set():
                found = reader.execute(
                    "select (select sum(balance) from kept.accounts), "
                    "(select sum(total) from kept.total), (select sum(balance) from kept.bag)"
                ).fetchone()
                reader.commit()
                looks[0] += 1
                if found != (800, 800, 800):
                    wrong.append(found)

    reader = threading.Thread(target=look)
    reader.start()
    rng = random.Random(1)
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, log.path, database.dsn()],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        while child.stdout.readline() != "following\n":
            pass
        until = time.monotonic() + rng.uniform(0.1, 0.6)
        while time.monotonic() < until:
            bank.move(rng)
            bank.commit()
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
    with Follower(log, kept) as last:
        cut = last.run("caught up")
    stop.set()
    reader.join()
    assert not wrong
    assert looks[0] > 10
    assert cut is not None
    assert cut.through == bank.through
    checked(log, kept)


def test_two_at_once_the_later_one_goes_on(log: EmbeddedLog, database: Database) -> None:
    bank = Bank(log)
    bank.change({1: {"owner": "a", "balance": 1}})
    bank.commit()
    kept = kept_in(hr.Table(database.dsn()))
    with Follower(log, kept) as older, Follower(log, kept) as newer:
        older.run("caught up")
        newer.run("caught up")
        bank.change({2: {"owner": "b", "balance": 2}})
        bank.commit()
        with pytest.raises(errors.Fenced):
            older.run("caught up")
        newer.run("caught up")
    checked(log, kept)


# --- what passes and what does not ----------------------------------------------------------------


def test_a_target_that_is_away_is_waited_for(log: EmbeddedLog, database: Database) -> None:
    """Connections cut from outside, again and again, in a running follower."""
    bank = Bank(log)
    bank.change({1: {"owner": "a", "balance": 1}})
    bank.commit()
    kept = kept_in(hr.Table(database.dsn()))
    said = []
    with Follower(log, kept, report=lambda state: said.append(state.doing)) as follower:
        thread = threading.Thread(target=follower.run)
        thread.start()
        for n in range(5):
            with database.connect() as other:
                other.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity "
                    "where application_name = 'headrace follower'"
                )
            if n == 3:
                database.server.restart("immediate")
            position = bank.change({n: {"owner": "a", "balance": 10 + n}})
            bank.commit()
            target = kept.target.open("p/main")
            assert wait(target, position, 30).through >= position
            target.close()
        follower.stop()
        thread.join()
    assert "waiting for the target" in said
    checked(log, kept)
    away = kept_in(hr.Table("postgresql://127.0.0.1:1/x"))
    with Follower(log, away, patience=0.2) as lost, pytest.raises(errors.TargetAway):
        lost.run("caught up")


def test_a_table_that_is_there_is_not_taken_over(log: EmbeddedLog, database: Database) -> None:
    bank = Bank(log)
    bank.commit()
    with database.connect() as other:
        other.execute("create table accounts (x int)")
    kept = kept_in(hr.Table(database.dsn()))
    with Follower(log, kept) as follower, pytest.raises(errors.TableNotOurs, match="accounts"):
        follower.run("caught up")


def test_a_right_that_is_missing_is_named_with_the_statement(
    log: EmbeddedLog, database: Database
) -> None:
    bank = Bank(log)
    bank.commit()
    with database.connect() as other:
        other.execute("drop role if exists may_nothing")
        other.execute("create role may_nothing login")
        other.execute("create schema locked")
    kept = kept_in(hr.Table(database.dsn(user="may_nothing"), "locked"))
    with Follower(log, kept) as follower, pytest.raises(errors.TargetStopped) as caught:
        follower.run("caught up")
    assert "may_nothing may not make tables in schema locked" in caught.value.fact
    assert caught.value.fix == "grant usage, create on schema locked to may_nothing"
    with database.connect() as other:
        other.execute(caught.value.fix)
        with Follower(log, kept) as follower:
            follower.run("caught up")
        other.execute("drop owned by may_nothing cascade")
        other.execute("drop role may_nothing")


@pytest.mark.parametrize(
    "change",
    [
        "alter table s.accounts owner to postgres",
        "revoke insert on s.accounts from plain_role",
        "revoke update on s._headrace from plain_role",
        "alter table s.accounts enable row level security, force row level security; "
        "create policy few on s.accounts using (id < 3) with check (true)",
    ],
)
def test_a_right_that_is_taken_away_is_named_with_the_statement(
    log: EmbeddedLog, database: Database, change: LiteralString
) -> None:
    """Row level security too: rows that it hides would be taken for missing."""
    bank = Bank(log)
    bank.commit()
    with database.connect() as admin:
        admin.execute("drop role if exists plain_role")
        admin.execute("create role plain_role login")
        admin.execute("create schema s authorization plain_role")
        kept = kept_in(hr.Table(database.dsn(user="plain_role"), "s"))
        with Follower(log, kept) as follower:
            follower.run("caught up")
            admin.execute(change)
            for number in range(20):
                bank.move(random.Random(number))
            bank.commit()
            with pytest.raises(errors.TargetStopped) as caught:
                follower.run("caught up")
        assert "s." in caught.value.fact
        admin.execute(caught.value.fix)
        with Follower(log, kept) as follower:
            follower.run("caught up")
        checked(log, kept)
        admin.execute("drop owned by plain_role cascade")
        admin.execute("drop role plain_role")


def test_a_target_of_another_log_is_refused(
    log: EmbeddedLog, tmp_path: Path, database: Database
) -> None:
    kept = kept_in(hr.Table(database.dsn()), views=False)
    Bank(log)
    with Follower(log, kept) as follower:
        follower.run("caught up")
    with hr.connect(tmp_path / "other") as other:
        Bank(other)
        with Follower(other, kept) as follower, pytest.raises(errors.OtherLog):
            follower.run("caught up")


def test_a_schema_change_travels_or_stops_with_the_statement(
    log: EmbeddedLog, database: Database
) -> None:
    log.create_topic("t", "k bigint, a int, b string", key="k", kind="changes")
    log.append("t", [{"k": 1, "a": 1, "b": "x"}])
    kept = Kept("p", "main", {"t": "t"}, frozenset(), hr.Table(database.dsn()))
    with Follower(log, kept) as follower, database.connect() as user:
        follower.run("caught up")
        log.alter_topic("t", add="c timestamp", widen={"a": "bigint"}, retire=["b"])
        log.append("t", [{"k": 2, "a": 2**40}])
        follower.run("caught up")
        found = user.execute("select * from t order by k").fetchall()
        assert found == [(1, 1, None), (2, 2**40, None)]
        user.execute("create view v as select k, c from t")
        log.alter_topic("t", retire=["c"])
        with pytest.raises(errors.TargetStopped, match="other objects depend") as stopped:
            follower.run("caught up")
        assert stopped.value.fix == 'alter table "public"."t" drop column if exists "c" cascade'
        user.execute(stopped.value.fix.encode())
    with Follower(log, kept) as follower, database.connect() as user:
        follower.run("caught up")
        assert user.execute("select * from t order by k").fetchall() == [(1, 1), (2, 2**40)]
        log.alter_topic("t", retype={"a": "string"})
        log.append("t", [{"k": 3, "a": "x"}])
        with pytest.raises(errors.TargetStopped) as stopped:
            follower.run("caught up")
        user.execute(stopped.value.fix.encode())
    with Follower(log, kept) as follower, database.connect() as user:
        follower.run("caught up")
        assert user.execute("select * from t order by k").fetchall() == [(3, "x")]
    checked(log, kept)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_multiset_with_another_column_is_loaded_anew(
    kind: str, log: EmbeddedLog, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """What its rows are known by is made of all columns."""
    place: Any = hr.SQLite(str(tmp_path / "t.db"))
    if kind == "postgres":
        place = hr.Table(request.getfixturevalue("database").dsn())
    log.create_topic("t", "a int, b string", kind="changes")
    log.append("t", [{"a": 1, "b": "x"}, {"a": 1, "b": "x"}, {"a": 2}])
    kept = Kept("p", "main", {"t": "t"}, frozenset(), place)
    with Follower(log, kept) as follower:
        follower.run("caught up")
        log.alter_topic("t", add="c int", retire=["b"])
        follower.run("caught up")
        checked(log, kept)
        gone = {"a": 1, "c": None, "_weight": -1}
        log.append("t", [gone, {"a": 1, "c": 5}])
        follower.run("caught up")
    checked(log, kept)
    assert len(mark_of(kept).tables[0].columns) == 2


# --- rows set aside -------------------------------------------------------------------------------


def test_of_a_multiset_rows_of_an_older_generation_do_not_count(
    log: EmbeddedLog, tmp_path: Path, database: Database
) -> None:
    log.create_topic("bag", "v int", kind="changes")
    log.append("bag", [{"v": 1}, {"v": 2}])
    log.alter_topic("bag", retype={"v": "string"})
    log.append("bag", [{"v": "z"}])
    for target in (hr.SQLite(str(tmp_path / "db")), hr.Table(database.dsn())):
        kept = Kept("p", f"in_{type(target).__name__}", {"bag": "bag"}, frozenset(), target)
        with Follower(log, kept) as follower:
            follower.run("caught up")
            log.append("bag", [{"v": "y"}])
            follower.run("caught up")
        (found,) = verify_kept(log, kept)
        assert (found.rows, found.differing) == (2, 0)  # "z", and copies of "y"


def test_a_refused_row_is_set_aside_and_comes_back(log: EmbeddedLog, database: Database) -> None:
    """NUL in a text, a constraint, a trigger; the rest goes on; retry applies what is there now."""
    topic = "t"
    log.create_topic(topic, "k bigint, v string, n int", key="k", kind="changes")
    log.append(topic, [{"k": k, "v": f"v{k}"} for k in range(200)] + [{"k": 500, "v": "\0"}])
    kept = Kept("p", "main", {"t": topic}, frozenset(), hr.Table(database.dsn()))

    def there() -> set[int]:
        return {one[0] for one in user.execute("select k from t").fetchall()}

    def keys() -> dict[str, str]:
        return {one["key"]: one["code"] for one in aside.rows(log, "p/main")}

    with Follower(log, kept) as follower, database.connect() as user:
        follower.run("caught up")
        assert keys() == {'{"k": 500}': "22021"}
        assert there() == set(range(200))
        user.execute("alter table t add check (n <> 7), add unique (v)")
        user.execute(
            "create function f() returns trigger language plpgsql as "
            "$$ begin if new.n = 8 then raise exception 'no eight'; end if; return new; end $$"
        )
        user.execute(
            "create trigger t before insert or update on t for each row execute function f()"
        )
        changes = [{"k": 1, "v": "v1", "_weight": -1}, {"k": 1, "v": "v1", "n": 7}]
        changes += [{"k": 2, "v": "v2", "_weight": -1}, {"k": 2, "v": "v2", "n": 8}]
        # Two rows exchange a value that is unique: nobody is refused for that.
        changes += [{"k": 3, "v": "v3", "_weight": -1}, {"k": 3, "v": "v4", "n": 3}]
        changes += [{"k": 4, "v": "v4", "_weight": -1}, {"k": 4, "v": "v3", "n": 4}]
        log.append(topic, changes)
        follower.run("caught up")
        assert keys() == {'{"k": 500}': "22021", '{"k": 1}': "23514", '{"k": 2}': "P0001"}
        assert there() == set(range(200)) - {1, 2}
        assert user.execute("select v from t where k in (3, 4) order by k").fetchall() == [
            ("v4",), ("v3",)]  # fmt: skip
        log.append(topic, [{"k": 1, "v": "v1", "n": 7, "_weight": -1}, {"k": 1, "v": "v1", "n": 9}])
        follower.run("caught up")
        assert '{"k": 1}' not in keys()
        assert 1 in there()
        aside.replace(log, "p/main", aside.one_of(log, "p/main", "t", '{"k": 2}'), asked=True)
        follower.run("caught up")
        assert keys() == {'{"k": 500}': "22021", '{"k": 2}': "P0001"}  # refused again
        user.execute("drop trigger t on t")
        aside.replace(log, "p/main", aside.rows(log, "p/main"), asked=True)
        follower.run("caught up")
        assert keys() == {'{"k": 500}': "22021"}
        assert 2 in there()
        log.append(topic, [{"k": 500, "v": "\0", "_weight": -1}])
        follower.run("caught up")
        assert keys() == {}
    checked(log, kept)


def test_rows_that_need_each_other_are_taken_together(log: EmbeddedLog, database: Database) -> None:
    """A foreign key of the user's between two kept tables; one row really has no parent."""
    for name in ("child", "parent"):
        log.create_topic(name, "k bigint, p bigint", key="k", kind="changes")
    kept = Kept("p", "main", {"child": "child", "parent": "parent"}, frozenset(),
                hr.Table(database.dsn()))  # fmt: skip
    with Follower(log, kept) as follower, database.connect() as user:
        follower.run("caught up")
        user.execute("alter table child add foreign key (p) references parent")
        with log.transaction() as entry:
            entry.append("child", [{"k": 1, "p": 1}, {"k": 2, "p": 99}, {"k": 3, "p": 3}])
            entry.append("parent", [{"k": 1}, {"k": 3}])
        follower.run("caught up")
        assert user.execute("select k from child order by k").fetchall() == [(1,), (3,)]
        assert [one["key"] for one in aside.rows(log, "p/main")] == ['{"k": 2}']
        log.append("parent", [{"k": 99}])
        aside.replace(log, "p/main", aside.rows(log, "p/main"), asked=True)
        follower.run("caught up")
        assert user.execute("select count(*) from child").fetchone() == (3,)


def test_a_refused_row_does_not_touch_what_points_at_the_others(
    log: EmbeddedLog, database: Database
) -> None:
    """Tables of the user's refer to a kept one: its rows are changed in place, never deleted."""
    log.create_topic("t", "k bigint, v string", key="k", kind="changes")
    log.append("t", [{"k": k, "v": "old"} for k in range(4)])
    kept = Kept("p", "main", {"t": "t"}, frozenset(), hr.Table(database.dsn()))
    with Follower(log, kept) as follower, database.connect() as user:
        follower.run("caught up")
        for name, action in (("strict", "no action"), ("weak", "cascade")):
            user.execute(f"create table {name}(k bigint references t on delete {action})")
            user.execute(f"insert into {name} values (1), (2)")
        user.execute("alter table t add check (v <> 'bad'), add unique (v, k)")
        changes = [{"k": k, "v": "old", "_weight": -1} for k in range(4)]
        changes += [{"k": k, "v": "bad" if k == 3 else "new", "_weight": 1} for k in range(4)]
        log.append("t", changes)
        follower.run("caught up")
        assert user.execute("select * from t order by k").fetchall() == [
            (k, "new") for k in range(3)
        ]
        assert [one["key"] for one in aside.rows(log, "p/main")] == ['{"k": 3}']
        for name in ("strict", "weak"):
            assert user.execute(f"select count(*) from {name}").fetchone() == (2,)


def test_rows_that_are_pointed_at_exchange_a_unique_value(
    log: EmbeddedLog, database: Database
) -> None:
    """They cannot be deleted for it: they are emptied first. One that is refused stays empty."""
    log.create_topic("t", "k bigint, v string", key="k", kind="changes")
    log.append("t", [{"k": k, "v": f"v{k}"} for k in range(4)])
    kept = Kept("p", "main", {"t": "t"}, frozenset(), hr.Table(database.dsn()))
    now = [f"v{k}" for k in range(4)]
    with Follower(log, kept) as follower, database.connect() as user:

        def becomes(*new: str) -> list[Any]:
            rows = [{"k": k, "v": v, "_weight": -1} for k, v in enumerate(now)]
            now[:] = new
            log.append("t", rows + [{"k": k, "v": v, "_weight": 1} for k, v in enumerate(now)])
            follower.run("caught up")
            return [v for (v,) in user.execute("select v from t order by k").fetchall()]

        follower.run("caught up")
        user.execute("create table strict(k bigint references t)")
        user.execute("create table weak(k bigint references t on delete cascade)")
        user.execute("insert into strict values (0), (1), (2)")
        user.execute("insert into weak values (0), (1), (2)")
        user.execute("alter table t add unique (v), add check (v <> 'bad')")
        assert becomes("v1", "v0", "v2", "v3") == ["v1", "v0", "v2", "v3"]
        assert becomes("v2", "v3", "v1", "v0") == ["v2", "v3", "v1", "v0"]
        assert not aside.rows(log, "p/main")
        assert user.execute("select count(*) from weak").fetchone() == (3,)
        assert becomes("v2", "bad", "v1", "bad") == ["v2", None, "v1"]
        assert [one["key"] for one in aside.rows(log, "p/main")] == ['{"k": 1}', '{"k": 3}']
        assert becomes("v0", "v1", "v2", "v3") == ["v0", "v1", "v2", "v3"]
        assert not aside.rows(log, "p/main")
    checked(log, kept)


def test_rows_are_refused_again_and_again(log: EmbeddedLog, database: Database) -> None:
    """Statements that were sent behind one that failed are not prepared on the server."""
    log.create_topic("t", "k bigint, v string", key="k", kind="changes")
    kept = Kept("p", "main", {"t": "t"}, frozenset(), hr.Table(database.dsn()))
    with Follower(log, kept) as follower, database.connect() as user:
        follower.run("caught up")
        user.execute("alter table t add check (v <> 'bad')")
    histories = ["bb", "ggggbggb", "gggbggb", "gbbgbbgbbgbb", "ggggggggbggb", "gggbggggbggb"]
    for number, history in enumerate(histories):
        with Follower(log, kept) as follower:
            for k, letter in enumerate(history):
                row = {"k": number * 100 + k, "v": "bad" if letter == "b" else "good"}
                log.append("t", [row])
                follower.run("caught up")
    assert len(aside.rows(log, "p/main")) == "".join(histories).count("b")


def test_a_lock_that_is_held_is_waited_for_without_a_queue(
    log: EmbeddedLog, database: Database
) -> None:
    """A new column while a transaction of a reader is open: others read on, and it is said."""
    log.create_topic("t", "k bigint", key="k", kind="changes")
    log.append("t", [{"k": 1}])
    kept = Kept("p", "main", {"t": "t"}, frozenset(), hr.Table(database.dsn()))
    seen: list[Any] = []
    with (
        Follower(log, kept, patience=0, report=seen.append) as follower,
        database.connect() as reader,
        database.connect() as other,
    ):
        follower.run("caught up")
        with reader.transaction():
            reader.execute("select * from t")
            log.alter_topic("t", add="v string")
            log.append("t", [{"k": 2, "v": "two"}])
            with pytest.raises(errors.TargetAway) as found:
                follower.run("caught up")
            assert "add column" in found.value.fact
            assert "add column" in seen[-1].error
            assert other.execute("select count(*) from t").fetchone() == (1,)
        follower.run("caught up")
        assert seen[-1].error is None
    checked(log, kept)


# --- large, and read your own writes --------------------------------------------------------------


def test_a_large_backlog_comes_in_several_cuts_and_a_large_entry_in_chunks(
    log: EmbeddedLog, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "CUT_ROWS", 50)
    monkeypatch.setattr(cuts, "LARGE_ROWS", 200)
    monkeypatch.setattr(cuts, "CHUNK_ROWS", 60)
    bank = Bank(log)
    kept = kept_in(hr.Table(database.dsn()))
    seen = []
    bank.commit()
    with Follower(log, kept, report=lambda state: seen.append(state.cut)) as follower:
        follower.run("caught up")
        for n in range(40):
            bank.change({n * 3 + i: {"owner": "ab"[i % 2], "balance": n} for i in range(5)})
            bank.commit()
        bank.change({i: {"owner": "c", "balance": i} for i in range(700)})
        bank.commit()
        bank.change({i: {"owner": "d", "balance": i} for i in range(300)})
        bank.commit()
        follower.run("caught up")
    assert 5 < len(set(seen)) < 30
    checked(log, kept)
    free = Kept("q", "main", {"accounts": ACCOUNTS}, frozenset(), hr.Table(database.dsn(), "q"))
    with Follower(log, free) as follower:
        follower.run("caught up")
        for n in range(40):
            bank.change({n * 3 + i: {"owner": "x", "balance": n} for i in range(5)})
        bank.change({i: {"owner": "y", "balance": i} for i in range(700)})
        follower.run("caught up")
    checked(log, free)


def test_in_a_large_entry_a_row_may_come_before_the_one_it_replaces_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows exchange their keys: in the order of the database +2a comes before -2b."""
    monkeypatch.setattr(cuts, "LARGE_ROWS", 4)
    monkeypatch.setattr(cuts, "CUT_ROWS", 4)
    monkeypatch.setattr(cuts, "CHUNK_ROWS", 2)

    def rows(*given: tuple[int, int, str]) -> pa.RecordBatch:
        columns = [pa.array(one) for one in zip(*given, strict=True)]
        return pa.RecordBatch.from_arrays(columns, names=["_weight", "id", "v"])

    with hr.connect(tmp_path / "log") as log:
        log.create_topic("t", "id bigint, v string", key="id", kind="changes")
        kept = Kept("q", "main", {"t": "t"}, frozenset(), hr.SQLite(str(tmp_path / "t.db")))
        with Follower(log, kept) as follower:
            log.append("t", rows((1, 1, "a"), (1, 2, "b"), (1, 3, "c")))
            follower.run("caught up")
            chunks = [rows((-1, 1, "a"), (1, 2, "a")), rows((-1, 2, "b"), (1, 1, "b"))]
            chunks += [rows((-1, 3, "c"), (1, 4, "d")), rows((-1, 4, "d"), (1, 5, "e"))]
            reader = pa.RecordBatchReader.from_batches(chunks[0].schema, chunks)
            with log.transaction() as entry:
                entry.append("t", log.stage("t", reader))
            follower.run("caught up")
        checked(log, kept)


def test_rows_that_change_again_and_again_are_applied_once(
    log: EmbeddedLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backlog counts by the rows of the target that it changes, not by its own; a bag too."""
    monkeypatch.setattr(cuts, "CUT_ROWS", 50)
    bank = Bank(log)
    log.create_topic("bag", "v bigint", kind="changes")
    topics = {"accounts": ACCOUNTS, "bag": "bag"}
    kept = Kept("q", "main", topics, frozenset(), hr.SQLite(str(tmp_path / "t.db")))
    seen = []
    with Follower(log, kept, report=lambda state: seen.append(state.cut)) as follower:
        follower.run("caught up")
        for n in range(60):
            bank.change({i: {"owner": "ab"[n % 2], "balance": n} for i in range(n % 3, 7)})
            log.append("bag", [{"v": n % 4, "_weight": 1 if n % 5 else -1} for _ in range(3)])
        bank.change({3: None})
        before = len(set(seen))
        follower.run("caught up")
    assert len(set(seen)) - before <= 2
    checked(log, kept)


def test_a_token_waits_until_it_is_there(log: EmbeddedLog, tmp_path: Path) -> None:
    bank = Bank(log)
    kept = kept_in(hr.SQLite(str(tmp_path / "t.db")))
    with Follower(log, kept) as follower:
        thread = threading.Thread(target=follower.run)
        thread.start()
        target = kept.target.open("p/main")
        for n in range(5):
            token = bank.change({n: {"owner": "a", "balance": n}})
            bank.commit()
            assert wait(target, token, 30).through >= token
            _, batches = target.read(kept_table(log.topic(ACCOUNTS), "accounts", view=False))
            assert sum(batch.num_rows for batch in batches) == n + 1
        token = bank.change({9: {"owner": "a", "balance": 1}})
        with pytest.raises(errors.NotYetThere) as late:
            wait(target, token, 0.05)
        assert late.value.details["token"] == token
        follower.stop()
        thread.join()
        target.close()
    assert mark_of(kept).cut == follower.state.cut
    (started,) = log.values(state_counter("follower/")).values()
    assert started["topics"]["bag"] == "p.bag"


def test_a_follower_without_views_is_through_what_is_not_its_own(
    log: EmbeddedLog, tmp_path: Path
) -> None:
    Bank(log)
    kept = kept_in(hr.SQLite(str(tmp_path / "t.db")), views=False)
    log.create_topic("other", "n bigint")
    with Follower(log, kept) as follower:
        follower.run("caught up")
        token = log.append("other", [{"n": 1}]).position
        cut = follower.run(token)
        assert cut is not None
        assert cut.through >= token
    assert mark_of(kept).cut == cut


def test_nothing_is_shown_before_the_views_are_there(log: EmbeddedLog, tmp_path: Path) -> None:
    kept = kept_in(hr.SQLite(str(tmp_path / "t.db")))
    with Follower(log, kept) as follower:
        assert follower.run("caught up") is None
        assert follower.state.doing == "waiting for the views"
        bank = Bank(log)
        bank.change({1: {"owner": "a", "balance": 1}})
        bank.commit(None, ("total",))
        assert follower.run("caught up") is None
        bank.commit()
        assert follower.run("caught up") is not None
    assert list(expected(log, follower._tables[0], mark_of(kept).cut))  # type: ignore[arg-type]
    checked(log, kept)


def test_a_table_that_is_kept_again_has_missed_nothing(log: EmbeddedLog, tmp_path: Path) -> None:
    """Taken out of `keep` a table stands still, and is not taken for one that was followed."""
    bank = Bank(log)
    target = hr.SQLite(str(tmp_path / "t.db"))
    both = kept_in(target)
    without = Kept(
        "p", "main", {"accounts": ACCOUNTS, "bag": "p.bag"}, frozenset({"p.bag"}), target
    )
    for kept in (both, without):
        bank.change({1: {"owner": "a", "balance": len(kept.topics)}})
        bank.commit()
        with Follower(log, kept) as follower:
            follower.run("caught up")
        checked(log, kept)
    with Follower(log, both) as follower, pytest.raises(errors.TableNotOurs):
        follower.run("caught up")


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_table_that_is_kept_too_is_loaded_alone(
    log: EmbeddedLog,
    kind: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others go on to the cut at which it is loaded, also where they get another column."""
    bank = Bank(log)
    bank.change({n: {"owner": "a", "balance": n} for n in range(9)})
    bank.commit()
    target: Any = hr.SQLite(str(tmp_path / "t.db"))
    if kind == "postgres":
        target = hr.Table(request.getfixturevalue("database").dsn(), schema="kept")
    wiped: list[list[str]] = []
    for one in (SQLiteTarget, PostgresTarget):
        wipe: Any = one.wipe

        def told(self: Any, epoch: int, tables: Any, wipe: Any = wipe) -> None:
            wiped.append([table.name for table in tables])
            wipe(self, epoch, tables)

        monkeypatch.setattr(one, "wipe", told)
    everything = kept_in(target)
    topics = {"accounts": ACCOUNTS, "bag": "p.bag"}
    first = replace(everything, topics=topics, views=frozenset({"p.bag"}))
    for kept in (
        first,
        everything,
        replace(everything, topics={"accounts": ACCOUNTS, "total": "p.total"}),
    ):
        with Follower(log, kept) as follower:
            follower.run("caught up")
        checked(log, kept)
        bank.change({3: None, 4: {"owner": "b", "balance": len(kept.topics)}})
        log.alter_topic(ACCOUNTS, add=f"more{len(wiped)} string")
        bank.commit()
    assert wiped == [["accounts", "bag"], ["total"], []]
    assert {one.name for one in mark_of(kept).tables} == {"accounts", "total"}


def test_while_a_table_is_added_death_at_every_statement_leaves_the_others_right(
    log: EmbeddedLog, database: Database
) -> None:
    bank = Bank(log)
    bank.change({n: {"owner": "ab"[n % 2], "balance": n} for n in range(4)})
    bank.commit()
    everything = kept_in(Mortal(database.dsn(), "first"))
    topics = {"accounts": ACCOUNTS, "total": "p.total"}
    for at in range(1, 100):
        mortal = Mortal(database.dsn(), f"kept{at}")
        fewer = replace(everything, topics=topics, views=frozenset({"p.total"}), target=mortal)
        with Follower(log, fewer) as follower:
            follower.run("caught up")
        bank.change({at % 5: {"owner": "c", "balance": at}, 1: {"owner": "a", "balance": -at}})
        bank.commit()
        mortal.fuse = Fuse(at, after=bool(at % 2))
        more = replace(everything, target=mortal)
        follower = Follower(log, more)
        with contextlib.suppress(Killed):
            follower.run("caught up")
        follower.close()
        died, mortal.fuse = mortal.fuse.dead, Fuse()
        checked(log, more)
        with Follower(log, more) as last:
            last.run("caught up")
        checked(log, more)
        assert len(mark_of(more).tables) == 3
        if not died:
            break
    assert at > 15


def test_a_load_does_not_go_back(log: EmbeddedLog, tmp_path: Path) -> None:
    """A view that was kept long ago and is built anew: its last cut is older than what is shown."""
    bank = Bank(log)
    target = hr.SQLite(str(tmp_path / "t.db"))
    bank.change({1: {"owner": "a", "balance": 1}})
    bank.commit()
    token = bank.change({1: {"owner": "a", "balance": 2}})
    bank.commit(None, ("total",))
    topics = {"accounts": ACCOUNTS, "total": "p.total"}
    with Follower(log, Kept("p", "main", topics, frozenset({"p.total"}), target)) as follower:
        follower.run("caught up")
    kept = kept_in(target)
    with Follower(log, kept) as follower:
        follower.run("caught up")
        assert mark_of(kept).cut >= Cut(token, token)  # type: ignore[operator]
        bank.commit()
        follower.run("caught up")
    checked(log, kept)


def test_a_table_is_not_loaded_before_it_is_whole(log: EmbeddedLog, tmp_path: Path) -> None:
    """Kept since a moment ago, it was read behind the newest cut: that would show it empty."""
    bank = Bank(log)
    target = hr.SQLite(str(tmp_path / "t.db"))
    bank.change({1: {"owner": "a", "balance": 1}})
    bank.commit()
    with Follower(log, kept_in(target)) as follower:
        follower.run("caught up")
    log.create_topic("bank.public.owners", "owner string", key="owner", kind="changes")
    log.append("bank.public.owners", [{"owner": "a", "_weight": 1, "_op": "r"}])
    whole = log.position
    kept = kept_in(target)
    kept = replace(kept, topics={**kept.topics, "owners": "bank.public.owners"})
    reading = True
    with Follower(log, kept, being_read=lambda topics: reading) as follower:
        follower.run("caught up")
        assert follower.state.doing == "waiting for the views"
        bank.history[whole] = bank.history[max(bank.history)]
        bank.commit()
        follower.run("caught up")
        assert follower.state.doing == "waiting for the views"
        reading = False
        cut = follower.run("caught up")
    assert cut is not None
    assert cut.through == whole
    checked(log, kept)


def test_a_cut_does_not_reach_beyond_what_was_asked_for(
    log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries that came since the cut was found are in the same window, and wait."""
    monkeypatch.setattr(cuts, "CUT_ROWS", 2)
    for name in ("a", "b"):
        log.create_topic(name, "n bigint", kind="changes")
    with log.transaction() as entry:
        for name in ("a", "b"):
            entry.append(name, [{"n": 1, "_weight": 1}])
    found = log.position
    log.append("a", [{"n": 2, "_weight": 1}])
    kept = Kept("p", "main", {"a": "a", "b": "b"}, frozenset(), hr.SQLite(""))
    tables = [kept_table(log.topic(name), name, view=False) for name in "ab"]
    between = cuts.Between(log, kept, tables, Cut(0, 0))
    step = between.step(deque([Cut(found, found)]))
    between.close()
    assert (step.cut, step.rows) == (Cut(found, found), 2)


def test_a_null_in_a_key_is_taken_also_where_another_row_is_refused(
    log: EmbeddedLog, database: Database
) -> None:
    log.create_topic("t", "k bigint, v bigint", key="k", kind="changes")
    kept = Kept("q", "main", {"t": "t"}, frozenset(), hr.Table(database.dsn(), "q"))
    log.append("t", [{"k": 1, "v": 1, "_weight": 1}])
    with Follower(log, kept) as follower:
        follower.run("caught up")
        with database.connect() as connection:
            connection.execute("alter table q.t add check (v < 10)")
        log.append("t", [{"k": k, "v": v, "_weight": 1} for k, v in [(None, 1), (2, 10)]])
        follower.run("caught up")
    assert [one["key"] for one in aside.rows(log, "q/main")] == ['{"k": 2}']


@pytest.mark.parametrize("many", [False, True])
def test_keys_that_the_target_takes_for_one_and_the_log_does_not(
    log: EmbeddedLog, database: Database, many: bool
) -> None:
    """A numeric 1.0 that becomes 1.00, as it is in the database that was captured."""
    columns = "k string comment 'postgresql numeric', j bigint, v string"
    log.create_topic("t", columns, key=["k", "j"], kind="changes")
    kept = Kept("q", "main", {"t": "t"}, frozenset(), hr.Table(database.dsn(), "loose"))
    others = [{"k": str(n), "j": 1, "v": "o"} for n in range(100, 100 + 2000 * many)]
    log.append("t", [{"k": "1.0", "j": 1, "v": "a"}, {"k": "2", "j": 1, "v": "b"}])
    with Follower(log, kept) as follower:
        follower.run("caught up")
        for old, new in [("1.0", "1.00"), ("1.00", "1"), ("1", "1.000")]:
            changes = [{"k": new, "j": 1, "v": new}, {"k": old, "j": 1, "v": "x", "_weight": -1}]
            log.append("t", [{"_weight": 1} | one for one in [*changes, *others]])
            follower.run("caught up")
            checked(log, kept)
        log.append("t", [{"k": "1.000", "j": 1, "v": "x", "_weight": -1}])
        follower.run("caught up")
        checked(log, kept)
    with database.connect() as connection:
        found = connection.execute("select k::text from loose.t where k < 100").fetchall()
    assert found == [("2",)]
    assert not aside.rows(log, "q/main")


def test_the_statement_names_the_table_of_the_target_and_no_other(
    log: EmbeddedLog, database: Database
) -> None:
    """The source may be a table of the same name, in the same database."""
    log.create_topic("t", "k bigint, a string", key="k", kind="changes")
    kept = Kept("p", "main", {"t": "t"}, frozenset(), hr.Table(database.dsn(), "q"))
    with Follower(log, kept) as follower, database.connect() as user:
        user.execute("create table t (k bigint)")
        follower.run("caught up")
        log.alter_topic("t", retype={"a": "int"})
        with pytest.raises(errors.TargetStopped) as stopped:
            follower.run("caught up")
        user.execute(stopped.value.fix.encode())
        assert user.execute("select to_regclass('public.t'), to_regclass('q.t')").fetchone() == (
            "t",
            None,
        )


def test_a_retry_comes_to_its_turn_while_the_log_goes_on(
    log: EmbeddedLog, database: Database
) -> None:
    log.create_topic("t", "k bigint, v bigint", key="k", kind="changes")
    kept = Kept("q", "main", {"t": "t"}, frozenset(), hr.Table(database.dsn(), "q"))
    numbers = iter(range(2, 40))

    def go_on(state: Any) -> None:
        number = next(numbers, None)
        if number is None:
            follower.stop()
        elif state.cut is not None:
            log.append("t", [{"k": number, "v": 0, "_weight": 1}])

    with Follower(log, kept) as first, database.connect() as user:
        first.run("caught up")
        user.execute("alter table q.t add constraint small check (v < 10)")
        log.append("t", [{"k": 1, "v": 10, "_weight": 1}])
        first.run("caught up")
        user.execute("alter table q.t drop constraint small")
    aside.replace(log, "q/main", aside.rows(log, "q/main"), asked=True)
    log.append("t", [{"k": 2, "v": 0, "_weight": 1}])
    with Follower(log, kept, report=go_on) as follower:
        follower.run()
    assert aside.rows(log, "q/main") == []


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_table_that_somebody_drops_is_loaded_again(
    kind: str, log: EmbeddedLog, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    place: Any = hr.SQLite(str(tmp_path / "t.db"))
    if kind == "postgres":
        place = hr.Table(request.getfixturevalue("database").dsn(), "q")
    bank, kept = Bank(log), kept_in(place)
    bank.change({1: {"owner": "a", "balance": 1}})
    bank.commit()
    with Follower(log, kept) as follower:
        follower.run("caught up")
        assert follower._target is not None
        follower._target._run(  # type: ignore[attr-defined]
            "drop table total" if kind == "sqlite" else "drop table {schema}.total"
        )
        bank.change({1: {"owner": "a", "balance": 2}})
        bank.commit()
        follower.run("caught up")
    checked(log, kept)


@pytest.mark.parametrize(
    ("change", "fact", "fix"),
    [
        ("alter table t drop column a", "does not exist", "drop table public.t"),
        ("alter table t rename a to b", "does not exist", "drop table public.t"),
        ("drop table t; create view t as select 1 k, 2 a", "a view", 'drop view "public"."t"'),
    ],
)
def test_a_table_that_somebody_changed_stops_with_the_statement(
    change: LiteralString, fact: str, fix: LiteralString, log: EmbeddedLog, database: Database
) -> None:
    log.create_topic("t", "k bigint, a int", key="k", kind="changes")
    log.append("t", [{"k": 1, "a": 1}])
    kept = Kept("p", "main", {"t": "t"}, frozenset(), hr.Table(database.dsn()))
    with Follower(log, kept) as follower, database.connect() as user:
        follower.run("caught up")
        user.execute(change)
        log.append("t", [{"k": 2, "a": 2}])
        with pytest.raises((errors.TargetStopped, errors.TableNotOurs), match=fact) as stopped:
            follower.run("caught up")
        assert stopped.value.fix.endswith(fix)
        user.execute(fix)
    with Follower(log, kept) as follower:
        follower.run("caught up")
    checked(log, kept)


def test_copies_of_a_row_that_were_refused_come_back_and_no_more(
    log: EmbeddedLog, database: Database
) -> None:
    """Of a multiset some copies are there, some set aside: a retry makes them as many as there are.

    When the log says something of such a row, what is set aside is looked at anew.
    """
    log.create_topic("t", "v bigint", kind="changes")
    kept = Kept("q", "main", {"t": "t"}, frozenset(), hr.Table(database.dsn(), "q"))
    with Follower(log, kept) as follower, database.connect() as user:
        log.append("t", [{"v": 1, "_weight": 1}])
        follower.run("caught up")
        for way in ("asked", "touched"):
            user.execute("alter table q.t add constraint no check (v < 0) not valid")
            log.append("t", [{"v": 1, "_weight": 1}] * 3)
            follower.run("caught up")
            assert len(aside.rows(log, "q/main")) == 1
            (found,) = verify_kept(log, kept)
            assert (found.differing, found.aside) == (0, 1)
            user.execute("alter table q.t drop constraint no")
            if way == "asked":
                aside.replace(log, "q/main", aside.rows(log, "q/main"), asked=True)
            else:
                log.append("t", [{"v": 1, "_weight": -1}])
            follower.run("caught up")
            assert aside.rows(log, "q/main") == []
            checked(log, kept)


def test_tables_with_names_as_long_as_postgresql_has_them(
    log: EmbeddedLog, database: Database
) -> None:
    topics = {name: name for name in ("n" * 63, "n" * 62 + "m")}
    for name in topics:
        log.create_topic(name, "id bigint, note string", key="id", kind="changes")
        log.append(name, [{"id": one, "note": name[-1]} for one in range(3)])
    kept = Kept("shop", "main", topics, frozenset(), hr.Table(database.dsn(), "t"))
    with Follower(log, kept) as follower:
        follower.run(until="caught up")
        with database.connect() as connection:
            for name in topics:  # so that changes go through the temporary tables, in halves
                connection.execute(f"alter table t.{name} add check (id <> 1001)")
        for name in topics:
            log.append(name, [{"id": one, "note": name[-1]} for one in range(2000)])
        follower.run(until="caught up")
    assert [one["key"] for one in aside.rows(log, "shop/main")] == ['{"id": 1001}'] * 2
    assert [one.differing for one in verify_kept(log, kept)] == [0, 0]
    log.create_topic("shop." + "n" * 64, "id bigint", key="id", kind="changes")
    wrong = replace(kept, topics={"n" * 64: "shop." + "n" * 64}, name="other")
    with Follower(log, wrong) as follower, pytest.raises(errors.BadTarget, match="too long a name"):
        follower.run(until="caught up")
