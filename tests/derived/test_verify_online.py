"""Verify and repair while a writer and the follower go on (R-B7, B12).

Caught: differences that are none, since the two sides were not read at one cut; a repair that
stops or fences the follower, or that is undone by it; a token that is waited for in vain or said to
be there too early. Not caught: how long it takes.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace import errors
from headrace.derived import aside
from headrace.derived.follower import Follower
from headrace.derived.targets import SQLite, Table
from headrace.interfaces import Kept
from headrace.log.embedded.log import EmbeddedLog
from headrace.pipelines.views.reading import Status, writer_name
from headrace.runtime import tokens
from headrace.runtime.verify import Known, last, verify, verify_kept
from tests.capture.conftest import Database


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EmbeddedLog]:
    with hr.connect(tmp_path / "log") as log:
        log.create_topic("stock", "part string, n bigint", key="part", kind="changes")
        log.create_topic("moves", "part string, n bigint", kind="changes")
        yield log


class Writer:
    """Changes rows as long as it is told to."""

    def __init__(self, log: EmbeddedLog, seed: int) -> None:
        self.log, self.rng = log, random.Random(seed)
        self.held: dict[str, int] = {}
        self.moves: list[tuple[str, int]] = []
        self.over = threading.Event()

    def __call__(self) -> None:
        while not self.over.wait(0.02):
            self.step()

    def step(self) -> int:
        rows: dict[str, list[dict[str, Any]]] = {"stock": [], "moves": []}
        for part in {f"part {self.rng.randrange(200)}" for _ in range(self.rng.randrange(1, 6))}:
            if part in self.held:
                rows["stock"].append({"part": part, "n": self.held.pop(part), "_weight": -1})
            if self.rng.random() < 0.8:
                self.held[part] = self.rng.randrange(100)
                rows["stock"].append({"part": part, "n": self.held[part], "_weight": 1})
            self.moves.append((part[:6], self.rng.randrange(2)))
            rows["moves"].append(dict(zip(("part", "n"), self.moves[-1], strict=True)))
        with self.log.transaction() as entry:
            for topic, some in rows.items():
                entry.append(topic, [{"_weight": 1, **row} for row in some])
        assert entry.receipt is not None
        return entry.receipt.position


@contextlib.contextmanager
def followed(log: EmbeddedLog, kept: Kept) -> Iterator[Follower]:
    """A follower that runs; it must not have ended by itself."""
    failed: list[BaseException] = []
    with Follower(log, kept) as follower:

        def run() -> None:
            try:
                follower.run()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield follower
            assert thread.is_alive(), failed
        finally:
            follower.stop()
            thread.join()
    assert failed == []


def test_a_follower_goes_on_over_a_multiset_in_which_somebody_has_deleted_copies(
    database: Database, log: EmbeddedLog
) -> None:
    """It counts on from the copies that are there; it refused new ones, and took two for one."""
    log.create_topic("bag", "part string", kind="changes")
    kept = Kept("shop", "main", {"bag": "bag"}, frozenset(), Table(database.dsn(), "t"))
    log.append("bag", [{"part": "a", "_weight": 1}] * 4 + [{"part": "b", "_weight": 1}] * 4)
    with database.connect() as connection, Follower(log, kept) as follower:
        follower.run("caught up")
        connection.execute("delete from t.bag where _copy = 1")
        log.append("bag", [{"part": "a", "_weight": 1}, {"part": "b", "_weight": -1}])
        follower.run("caught up")
        held = "select part, count(*)::int from t.bag group by 1 order by 1"
        assert connection.execute(held).fetchall() == [("a", 4), ("b", 2)]
        assert follower.state.aside == 0
        (result,) = verify_kept(log, kept, repair=True)
        assert (result.repaired, result.differing) == (2, 0)
        assert connection.execute(held).fetchall() == [("a", 5), ("b", 3)]


def test_a_row_that_the_target_refuses_does_not_keep_a_repair_from_the_others(
    database: Database, log: EmbeddedLog
) -> None:
    """It is set aside; it made the whole repair fail, and named a list in which it was not."""
    log.create_topic("t", "id bigint, n bigint", key="id", kind="changes")
    kept = Kept("shop", "main", {"t": "t"}, frozenset(), Table(database.dsn(), "t"))
    log.append("t", [{"id": n, "n": n, "_weight": 1} for n in range(5)])
    with database.connect() as connection, Follower(log, kept) as follower:
        follower.run("caught up")
        connection.execute("update t.t set n = 9")
        connection.execute("alter table t.t add constraint two check (n <> 2)")
        (result,) = verify_kept(log, kept, repair=True)
        assert (result.repaired, result.differing, result.aside) == (4, 0, 1)
        held = "select id, n from t.t order by 1"
        assert connection.execute(held).fetchall() == [(n, n) for n in (0, 1, 3, 4)]
        connection.execute("alter table t.t drop constraint two")
        aside.replace(log, "shop/main", aside.one_of(log, "shop/main", "t", None), asked=True)
        follower.run("caught up")
        assert follower.state.aside == 0
        assert connection.execute(held).fetchall() == [(n, n) for n in range(5)]


def test_no_difference_is_false_and_a_repair_disturbs_nobody(
    database: Database, log: EmbeddedLog
) -> None:
    topics = {"stock": "stock", "moves": "moves"}
    kept = Kept("shop", "main", topics, frozenset(), Table(database.dsn(), "t"))
    writer = Writer(log, 1)
    token = [writer.step() for _ in range(30)][-1]
    rng = random.Random(2)
    with followed(log, kept), database.connect() as connection:
        tokens.wait_target(log, kept, token, 60.0)
        thread = threading.Thread(target=writer)
        thread.start()
        try:
            cuts = set()
            for _ in range(8):
                for one in verify_kept(log, kept):
                    assert one.differing == 0, one.differences
                    cuts.add(one.through)
            assert len(cuts) > 2  # it went on
            for _ in range(2):
                number = rng.randrange(10)
                connection.execute("update t.stock set n = -1 where part like %s", (f"%{number}",))
                connection.execute("delete from t.moves where n = 1 and _copy = 1")
                connection.execute(
                    "insert into t.stock values (%s, 0) on conflict do nothing", (f"~{number}",)
                )
                results = verify_kept(log, kept, repair=True)
                assert [one.differing for one in results] == [0, 0]
                assert results[0].repaired > 0
        finally:
            writer.over.set()
            thread.join()
        tokens.wait_target(log, kept, writer.step(), 60.0)
        held = connection.execute("select part, n from t.stock").fetchall()
        assert dict(held) == writer.held
        moves = connection.execute("select part, n from t.moves").fetchall()
        assert sorted(moves) == sorted(writer.moves)


def test_the_cut_of_a_target_and_not_the_newest_position(tmp_path: Path, log: EmbeddedLog) -> None:
    """The log is ahead of a follower that has stopped: what it shows is right for its cut."""
    kept = Kept("shop", "main", {"stock": "stock"}, frozenset(), SQLite(str(tmp_path / "t.db")))
    writer = Writer(log, 3)
    for _ in range(30):
        writer.step()
    with Follower(log, kept) as follower:
        cut = follower.run("caught up")
    for _ in range(30):
        writer.step()
    assert cut is not None
    (result,) = verify(log, "shop/main", Known({"shop/main": kept}))
    assert (result.differing, result.through) == (0, cut.through)
    assert last(log)["shop/main", "stock", "log"]["through"] == cut.through
    with pytest.raises(errors.CannotVerify, match="no follower 'shop/mian'"):
        verify(log, "shop/mian", Known({"shop/main": kept}))
    with pytest.raises(errors.CannotVerify, match="cannot be held against source"):
        verify(log, "shop/main", Known({"shop/main": kept}), against="source")


def test_a_token_and_a_target(tmp_path: Path, log: EmbeddedLog) -> None:
    kept = Kept("shop", "main", {"stock": "stock"}, frozenset(), SQLite(str(tmp_path / "t.db")))
    writer = Writer(log, 4)
    with pytest.raises(errors.NotYetThere):
        tokens.wait_target(log, kept, writer.step(), 0.02)
    with Follower(log, kept) as follower:
        cut = follower.run("caught up")
        assert cut is not None
        token = writer.step()
        with pytest.raises(errors.NotYetThere, match="rows") as caught:
            tokens.wait_target(log, kept, token, 0.02)
        assert caught.value.details["through"] == cut.through
        assert caught.value.details["rows"] == sum(
            batch.data.num_rows for batch in log.read("stock", after=cut.through)
        )
        follower.run("caught up")
    assert tokens.wait_target(log, kept, token, 0.02).through >= token
    # An entry of another topic: nothing that the target shows lies between.
    log.create_topic("other", "a bigint")
    other = log.append("other", [{"a": 1}])
    assert tokens.wait_target(log, kept, other.position, 5.0).through >= token


def test_a_row_that_was_set_aside_is_not_a_difference(database: Database, log: EmbeddedLog) -> None:
    kept = Kept("shop", "main", {"stock": "stock"}, frozenset(), Table(database.dsn(), "t"))
    log.append("stock", [{"part": "a", "n": 1, "_weight": 1}])
    with Follower(log, kept) as follower, database.connect() as connection:
        follower.run("caught up")
        connection.execute("alter table t.stock add constraint small check (n < 10)")
        log.append("stock", [{"part": p, "n": n, "_weight": 1} for p, n in (("b", 99), ("c", 3))])
        follower.run("caught up")
        connection.execute("delete from t.stock where part = 'c'")
        (result,) = verify_kept(log, kept)
        assert (result.differing, result.aside) == (1, 1)
        assert [(one.kind, one.key) for one in result.differences] == [("missing", {"part": "c"})]
        (result,) = verify_kept(log, kept, repair=True)
        assert (result.differing, result.aside, result.repaired) == (0, 1, 1)


def test_a_view_that_is_built_has_no_token_before_it_is_right(log: EmbeddedLog) -> None:
    """Built for the first time or anew, with or without others that go on meanwhile."""
    log.create_topic("p._commits", "through bigint, views array<string>")
    log.create_topic("p.total", "n bigint", key="n", kind="changes")
    token = log.append("stock", [{"part": "a", "n": 1, "_weight": 1}]).position
    states = [None, {"other": "1"}, {"other": "1", "total": ""}, {"other": "1", "total": "2"}]
    for views in states:
        if views is not None:
            status = Status(log.position, 1, 1, (), views, {"stock": 1})
            with log.writer(writer_name("p")).transaction(state=status.to_json()):
                pass
        if views == states[-1]:
            assert hr.rows(log, "p.total", after=token, timeout=0.02).num_rows == 0
            assert tokens.wait_topic(log, "stock", token, 0.02) >= token
            continue
        with pytest.raises(errors.NotYetThere):
            hr.rows(log, "p.total", after=token, timeout=0.02)
