"""``headrace sql``: what is printed and where, exit codes, the log of a project.

Caught: rows that change on the way out, talk among the data, a position that is not said. Not
caught: what queries mean (tests/queries).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.conftest import Headrace


@pytest.fixture
def orders(headrace: Headrace) -> Headrace:
    headrace("topic", "create", "orders", "id bigint, state string", "--key", "id")
    lines = "\n".join(json.dumps({"id": n, "state": f"s{n}"}) for n in (5, 1, 3))
    assert headrace("topic", "append", "orders", stdin=lines).code == 0
    return headrace


ASKED = "select id, state from orders order by id"


def test_rows_go_out_in_every_form_and_the_position_to_stderr(
    orders: Headrace, tmp_path: Path
) -> None:
    wanted = [{"id": n, "state": f"s{n}"} for n in (1, 3, 5)]
    done = orders("sql", ASKED)
    assert (done.code, done.rows, done.err) == (0, wanted, "3 rows at position 2\n")
    assert orders("sql", ASKED, "--format", "csv").out == "id,state\n1,s1\n3,s3\n5,s5\n"
    arrow = orders("sql", ASKED, "--format", "arrow").data
    assert pa.ipc.open_stream(arrow).read_all().to_pylist() == wanted
    file = tmp_path / "out.parquet"
    assert orders("sql", ASKED, "--output", str(file)).data == b""
    assert pq.read_table(file).to_pylist() == wanted
    assert [one.name for one in tmp_path.iterdir() if one.name != "data"] == ["out.parquet"]
    table = orders("sql", ASKED, "--format", "table").out
    assert table.splitlines() == ["id  state", "--  -----", " 1  s1", " 3  s3", " 5  s5"]


def test_json_is_one_object_with_the_position(orders: Headrace) -> None:
    done = orders("sql", ASKED, "--json")
    assert done.json["position"] == 2
    assert done.json["columns"] == {"id": "int64", "state": "string"}
    assert [row["id"] for row in done.json["rows"]] == [1, 3, 5]
    assert done.err == ""
    none = orders("sql", "select * from orders where false", "--json")
    assert none.json["rows"] == []


def test_at_reads_as_it_was(orders: Headrace) -> None:
    orders("topic", "append", "orders", stdin='{"id": 9, "state": "late"}')
    count = "select count(*) n from orders"
    assert orders("sql", count, "--at", "2").rows == [{"n": 3}]
    assert orders("sql", count, "--at", "2001-01-01T00:00Z").rows == [{"n": 0}]
    assert orders("sql", count).rows == [{"n": 4}]


def test_errors_are_of_the_catalogue(orders: Headrace, tmp_path: Path) -> None:
    done = orders("sql", "select * from order_s", "--json")
    assert done.code == 1
    assert done.error["code"] == "HR-SQL-003"
    assert "orders" in done.error["fix"]
    file = tmp_path / "out.csv"
    failing = "select cast(state as int) from orders"
    assert orders("sql", failing, "--output", str(file)).code == 1
    assert not file.exists()
    assert not Path(f"{file}.part").exists()


def test_an_empty_answer_still_says_its_columns(orders: Headrace) -> None:
    none = "select id, state from orders where id > 9"
    assert orders("sql", none, "--format", "csv").out == "id,state\n"
    assert orders("sql", none, "--format", "table").out.startswith("id  state\n")
    assert orders("sql", none).out == ""


def test_the_query_may_come_from_standard_input(orders: Headrace) -> None:
    assert orders("sql", "-", stdin="select count(*) n from orders").rows == [{"n": 3}]


def test_in_a_project_its_log_is_asked(
    orders: Headrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "headrace.toml").write_text('log = "data"\npipelines = []\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_LOG")
    assert orders("sql", "select count(*) n from orders").rows == [{"n": 3}]


def test_duckdb_is_imported_only_by_sql() -> None:
    code = (
        "import sys, headrace, headrace.cli.main, headrace.cli.topic, headrace.cli.sql;"
        "print([m for m in ('duckdb', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
