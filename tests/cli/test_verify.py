"""``headrace verify`` and ``--after``: what is named is found, the verdict is said, and kept.

Catches: names and options understood wrongly, an exit code that hides a difference, output that is
not JSON, a repair without being asked. Cannot catch: wrong verdicts (tests/derived has these), what
needs Spark or PostgreSQL.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

import headrace as hr
from headrace.derived.follower import Follower
from headrace.interfaces import Kept
from headrace.runtime.project import FollowerOf, find_project
from tests.cli.conftest import Headrace


@pytest.fixture
def shop(
    headrace: Headrace, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> sqlite3.Connection:
    """A project that keeps a table in a file; the rows are those of the log."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "headrace.toml").write_text("")
    kept = Kept("shop", "main", {"orders": "orders"}, frozenset(), hr.SQLite("kept.db"))
    find_project(".").note_followers([FollowerOf.of(kept)])
    with hr.connect(folder) as log:
        log.create_topic("orders", "id bigint, state string", key="id", kind="changes")
        log.append("orders", [{"id": n, "state": "new", "_weight": 1} for n in range(50)])
        with Follower(log, kept) as follower:
            follower.run("caught up")
    return sqlite3.connect(tmp_path / "kept.db", isolation_level=None)


def test_the_verdict_is_said_and_kept(headrace: Headrace, shop: sqlite3.Connection) -> None:
    assert "nothing was verified" in headrace("verify", "--last").err
    done = headrace("verify", "shop/main")
    assert (done.code, done.out) == (0, "")
    assert "shop/main orders: verified against the log through" in done.err
    assert "50 rows" in done.err
    assert done.err.strip().endswith(": equal")
    (last,) = headrace("verify", "--last", "--json").json
    assert (last["name"], last["rows"], last["differing"]) == ("shop/main", 50, 0)
    assert "shop/main" in headrace("verify", "--last").out
    shop.close()


def test_differences_are_named_and_repaired_when_asked(
    headrace: Headrace, shop: sqlite3.Connection
) -> None:
    shop.execute("update orders set state = 'by hand' where id in (7, 8)")
    shop.execute("delete from orders where id = 9")
    done = headrace("verify", "shop/main", "--limit", "2")
    assert done.code == 1
    assert 'changed {"id": 7}' in done.out
    assert 'expected {"id": 7, "state": "new"}' in done.out
    assert 'found    {"id": 7, "state": "by hand"}' in done.out
    assert "touched at " in done.out
    assert "and 1 more key" in done.out
    assert "3 keys differ" in done.err
    (result,) = headrace("verify", "shop/main", "--json").json
    assert [(one["kind"], one["key"]["id"]) for one in result["differences"]] == [
        ("changed", 7),
        ("changed", 8),
        ("missing", 9),
    ]
    assert shop.execute("select count(*) from orders").fetchone() == (49,)
    done = headrace("verify", "shop/main", "--repair", "--rate", "100000")
    assert done.code == 0
    assert "3 keys repaired: equal" in done.err
    assert shop.execute("select count(*) from orders where state = 'new'").fetchone() == (50,)
    rows = headrace("topic", "read", "_repairs").rows
    assert [row["before"] for row in rows][:1] == ['{"id": 7, "state": "by hand"}']
    shop.close()


def test_what_cannot_be_verified(headrace: Headrace, shop: sqlite3.Connection) -> None:
    shop.close()
    assert headrace("verify").code == 2
    assert headrace("verify", "shop/main", "--last").code == 2
    done = headrace("verify", "shop/mian", "--json")
    assert (done.code, done.error["code"]) == (1, "HR-VERIFY-002")
    assert "shop/main" in done.error["fix"]
    assert headrace("verify", "orders", "--json").error["code"] == "HR-VERIFY-002"
    assert headrace("verify", "order", "--json").error["code"] == "HR-LOG-010"
    assert headrace("verify", "shop/main", "--table", "x", "--json").error["code"] == (
        "HR-VERIFY-002"
    )


def test_after_a_token(headrace: Headrace, shop: sqlite3.Connection) -> None:
    shop.close()
    done = headrace("table", "get", "orders", "7", "--after", "1")
    assert [row["id"] for row in done.rows] == [7]
    done = headrace("table", "scan", "orders", "--after", "999999", "--timeout", "0", "--json")
    assert (done.code, done.error["code"]) == (1, "HR-READ-002")
    assert done.error["details"]["behind"] > 0
    assert headrace("table", "get", "orders", "7", "--after", "1", "--at", "1").code == 2
    assert headrace("table", "get", "orders", "7", "--after", "x", "--json").error["code"] == (
        "HR-READ-001"
    )
