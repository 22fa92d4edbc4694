"""`headrace aside`, as somebody would type it.

Can catch: rows that are not listed, asks that do not reach the follower. Cannot catch: whether the
rows are the right ones (tests/derived).
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

import headrace as hr
from headrace.derived.follower import Follower
from headrace.interfaces import Kept
from tests.cli.conftest import Headrace


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept("p", "main", {"t": "t"}, frozenset(), hr.SQLite(str(tmp_path / "t.db")))


def test_rows_set_aside_are_listed_shown_tried_again_and_dropped(
    headrace: Headrace, folder: str, kept: Kept, tmp_path: Path
) -> None:
    with hr.connect(folder) as log:
        log.create_topic("t", "k bigint, v int", key="k", kind="changes")
        with Follower(log, kept) as follower:
            follower.run("caught up")
            with sqlite3.connect(tmp_path / "t.db") as user:
                user.execute(
                    "create trigger no before insert on t when new.v > 1 "
                    "begin select raise(abort, 'too much'); end"
                )
            log.append("t", [{"k": 1, "v": 1}, {"k": 2, "v": 2}, {"k": 3, "v": 3}])
            follower.run("caught up")
            listed = headrace("aside", "ls", "--json").json
            assert [(one["by"], one["key"]) for one in listed] == [
                ("p/main", '{"k": 2}'), ("p/main", '{"k": 3}')]  # fmt: skip
            assert "too much" in headrace("aside", "ls").out
            shown = headrace("aside", "show", "p/main", "t", '{"k":2}').out
            assert '"v": 2' in shown
            user.execute("drop trigger no")
            user.close()
            headrace("aside", "retry", "p/main", "t", '{"k": 2}')
            headrace("aside", "drop", "p/main", "t", '{"k": 3}')
            follower.run("caught up")
    assert headrace("aside", "ls", "--json").json == []
    with sqlite3.connect(tmp_path / "t.db") as user:
        assert user.execute("select k from t order by k").fetchall() == [(1,), (2,)]
    user.close()
    assert "HR-FOLLOW-006" in headrace("aside", "drop", "p/main", "t").err
    assert "HR-FOLLOW-006" in headrace("aside", "show", "x", "t", "{}").err


def test_in_a_project_it_is_the_log_of_the_project(
    headrace: Headrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_LOG")
    (tmp_path / "headrace.toml").write_text('log = "elsewhere"\n')
    hr.connect(tmp_path / "elsewhere").close()
    done = headrace("aside", "ls", "--json", "--project", str(tmp_path))
    assert (done.code, done.json) == (0, [])
