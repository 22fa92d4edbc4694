"""``headrace table``: keys from the command line, rows out, what is missing said.

Catches: keys understood as another value or type, missing keys that are silent, an order or a
position that is not kept on the way out. Cannot catch: wrong versions (tests/tables has these).
"""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from tests.cli.conftest import Headrace


@pytest.fixture
def orders(headrace: Headrace) -> Headrace:
    headrace("topic", "create", "orders", "id bigint, state string", "--key", "id")
    rows = "\n".join(json.dumps({"id": n, "state": f"s{n}"}) for n in (5, 1, 3))
    assert headrace("topic", "append", "orders", stdin=rows).code == 0
    return headrace


def test_get_prints_the_rows_of_keys_and_names_the_missing(orders: Headrace) -> None:
    done = orders("table", "get", "orders", "3", "9", "5", "--json")
    assert [(row["id"], row["state"]) for row in done.rows] == [(3, "s3"), (5, "s5")]
    assert "there is no row with key 9" in done.err
    assert done.code == 0


def test_scan_is_in_the_order_of_keys_at_a_position(orders: Headrace) -> None:
    before = orders("table", "scan", "orders").rows
    assert [row["id"] for row in before] == [1, 3, 5]
    orders("topic", "append", "orders", stdin='{"id": 1, "state": "new"}')
    assert orders("table", "scan", "orders", "--limit", "1").rows[0]["state"] == "new"
    at = str(before[0]["_position"])
    assert orders("table", "scan", "orders", "--at", at).rows == before
    out = orders("table", "scan", "orders", "--format", "arrow", "--columns", "state").data
    assert pa.ipc.open_stream(out).read_all().column("state").to_pylist() == ["new", "s3", "s5"]
    assert "s3" in orders("table", "scan", "orders", "--format", "table").out


def test_keys_of_several_columns_and_null_are_json(headrace: Headrace) -> None:
    headrace("topic", "create", "t", "a string, b date, v int", "--key", "a,b")
    rows = '{"a": "x", "b": "2024-01-31", "v": 1}\n{"a": null, "b": null, "v": 2}'
    headrace("topic", "append", "t", stdin=rows)
    done = headrace("table", "get", "t", '["x", "2024-01-31"]', '{"a": null, "b": null}')
    assert [row["v"] for row in done.rows] == [1, 2]


@pytest.mark.parametrize("key", ["x", '{"nope": 1}', "[1]", "1.5"])
def test_what_is_not_a_key_is_refused(orders: Headrace, key: str) -> None:
    done = orders("table", "get", "orders", key, "--json")
    assert done.code == 2
    assert done.error["code"] == "HR-CLI-001"


def test_a_topic_without_a_key_is_refused(headrace: Headrace) -> None:
    headrace("topic", "create", "plain", "x int")
    assert headrace("table", "scan", "plain", "--json").error["code"] == "HR-TABLE-002"
    assert headrace("table", "get", "plain", "1", "--json").error["code"] == "HR-TABLE-002"


def test_a_position_that_does_not_come_ends_in_time(orders: Headrace) -> None:
    done = orders("table", "get", "orders", "1", "--at", "99", "--timeout", "0", "--json")
    assert done.error["code"] == "HR-LOG-026"
