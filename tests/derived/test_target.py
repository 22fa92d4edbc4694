"""The conformance suite on PostgreSQL and SQLite, and what only PostgreSQL must do (R-B6).

Catches: a target that loses or adds a row, shows half a cut, takes an older epoch, changes a value.
Cannot catch: what a crash of the server's machine would do; PostgreSQL answers for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import headrace as hr
from headrace import errors
from headrace.derived import postgres_merging
from headrace.derived.follower import Follower
from headrace.derived.sqlite import SQLiteTarget
from headrace.interfaces import Kept, Target
from headrace.testing.target_suite import CHECKS, Open
from tests.capture.conftest import Database


@pytest.fixture(params=["postgres", "postgres by COPY", "sqlite"])
def open_target(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Open]:
    if request.param == "postgres by COPY":
        monkeypatch.setattr(postgres_merging, "FEW", 0)
    if request.param == "sqlite":
        place: hr.Table | hr.SQLite = hr.SQLite(str(tmp_path / "target.db"))
    else:
        database: Database = request.getfixturevalue("database")
        place = hr.Table(database.dsn(), schema="kept here")
    opened: list[Target] = []

    def opens(follower: str) -> Target:
        opened.append(place.open(follower))
        return opened[-1]

    yield opens
    for one in opened:
        one.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: str(check.__name__))
def test_a_target_conforms(check: Callable[[Open], None], open_target: Open) -> None:
    check(open_target)


def test_captured_types_are_themselves_again(database: Database, tmp_path: Path) -> None:
    """A table captured from PostgreSQL and kept in PostgreSQL has the types it had (R-B3)."""
    with database.connect() as user:
        user.execute("create type mood as enum ('sad', 'ok')")
        user.execute(
            "create table things (id uuid primary key, n numeric, j jsonb, i interval, a inet, "
            "m mood, d numeric(10,2), t timestamptz, u uuid[], x text)"
        )
        user.execute(
            "insert into things values (gen_random_uuid(), 1e30, '{\"a\": 1.50}', '1 mon 2 days', "
            "'10.0.0.1/8', 'ok', 1.5, 'infinity', array[gen_random_uuid()], 'x'), "
            "(gen_random_uuid(), 'NaN', 'null', '-1 us', null, null, null, '-infinity', '{}', '')"
        )
        with hr.connect(tmp_path / "log") as log:
            hr.capture(log, "db", database.dsn()).run(until="caught up")
            place = hr.Table(database.dsn(), schema="kept")
            kept = Kept("p", "main", {"things": "db.public.things"}, frozenset(), place)
            with Follower(log, kept) as follower:
                follower.run("caught up")
        types = user.execute(
            "select a.attname, format_type(a.atttypid, a.atttypmod) from pg_attribute a "
            "where a.attrelid = 'kept.things'::regclass and a.attnum > 0 order by a.attnum"
        ).fetchall()
        assert [kind for _, kind in types] == [
            "uuid", "numeric", "jsonb", "interval", "inet", "text", "numeric(10,2)",
            "timestamp with time zone", "text[]", "text"]  # fmt: skip
        columns = "id, n, j, i, a, m::text, d, t, u::text[], x"
        left = user.execute(
            f"select {columns} from things except select {columns} from kept.things"
        )
        assert left.fetchall() == []


def test_a_new_file_is_opened_by_several_at_once(tmp_path: Path) -> None:
    """A follower and who waits for it: nobody is told that the file is locked."""
    refused: list[BaseException] = []

    def opened(path: str, together: threading.Barrier) -> None:
        together.wait()
        try:
            SQLiteTarget(path, "p/main").close()
        except errors.HeadraceError as error:
            refused.append(error)

    for number in range(60):
        given = str(tmp_path / f"{number}.db"), threading.Barrier(4)
        threads = [threading.Thread(target=opened, args=given) for _ in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert refused == []
