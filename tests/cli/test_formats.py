"""Rows out in every format and in again: what was read is what is appended.

Caught: a value that CSV, Arrow or Parquet changes, a null that becomes an empty text, a bad CSV
line that is lost or stops the others, a file that looks whole and is not. Not caught: what other
programs make of the files, and NDJSON (tests/cli/test_json.py).
"""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.cli.input import (
    ArrowIntake,
    LineIntake,
    csv_fields,
    csv_lines,
    parquet_batches,
)
from headrace.cli.output import row_writer
from headrace.model.json_values import json_values
from headrace.model.topic import Topic, define
from tests.cli.conftest import Headrace
from tests.model.strategies import TYPES, values_of


def topic_of(*kinds: pa.DataType) -> Topic:
    schema = pa.schema([(f"c{i}", kind) for i, kind in enumerate(kinds)])
    return define("t", schema, (), None, 1, "events")


def csv_of(batch: pa.RecordBatch) -> bytes:
    stream = io.BytesIO()
    writer = row_writer("csv", None, batch.schema, stream)
    writer.write(batch, 1)
    writer.close()
    return stream.getvalue()


def taken(topic: Topic, data: bytes) -> tuple[list[pa.RecordBatch], list[Any]]:
    head, groups = csv_lines(io.BytesIO(data), topic, 3)
    intake = LineIntake(topic, "csv", head)
    found = [intake(lines) for lines in groups]
    return [one.batch for one in found if one.batch is not None], [b for t in found for b in t.bad]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_every_type_comes_back_from_parquet(data: st.DataObject) -> None:
    """In entries of two rows, whatever the row groups are."""
    kind = data.draw(TYPES)
    topic = topic_of(kind)
    values = data.draw(st.lists(st.none() | values_of(kind), max_size=5))
    batch = pa.record_batch([pa.array(values, kind)], schema=topic.schema.arrow)
    stream = io.BytesIO()
    writer = row_writer("parquet", None, batch.schema, stream)
    writer.write(batch, 1)
    writer.close()
    intake = ArrowIntake(topic)
    found = [intake(one, 1) for one in parquet_batches(stream, 2)]
    assert not [bad for one in found for bad in one.bad]
    back = pa.Table.from_batches([o.batch for o in found if o.batch is not None], batch.schema)
    assert back.combine_chunks().column(0).combine_chunks().equals(batch.column(0)), values


@pytest.mark.parametrize("ending", ["ndjson", "csv", "arrow", "parquet"])
def test_a_topic_comes_back_from_a_file_of_every_format(
    clicks: Headrace, tmp_path: Path, ending: str
) -> None:
    """By the ending of the file; one that is cut is refused, or its last line set aside."""
    lines = [{"user": 1, "url": 'a,"b"\n', "price": "1.50"}, {"user": 2, "at": "1901-01-01T00:00Z"}]
    clicks("topic", "append", "clicks", stdin="\n".join(map(json.dumps, lines)))
    file = str(tmp_path / f"clicks.{ending}")
    assert clicks("topic", "read", "clicks", "--output", file).code == 0
    schema = "user bigint not null, url string, at timestamp, price decimal(10,2)"
    clicks("topic", "create", "again", schema, "--key", "user", "--partitions", "3")
    done = clicks("topic", "append", "again", "--file", file, "--json")
    assert (done.code, done.json["rows"]) == (0, 2), done.err
    assert clicks("topic", "read", "again").out == clicks("topic", "read", "clicks").out
    damaged = tmp_path / f"cut.{ending}"
    damaged.write_bytes(Path(file).read_bytes()[:-3])
    refused = clicks("topic", "append", "again", "--file", str(damaged), "--json")
    assert refused.code != 0


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_every_type_comes_back_from_csv(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(TYPES, min_size=1, max_size=3))
    topic = topic_of(*kinds)
    rows = data.draw(
        st.lists(
            st.tuples(*(st.none() | values_of(kind) for kind in kinds)), min_size=1, max_size=7
        )
    )
    schema = topic.schema.arrow
    arrays = [
        pa.array(list(v), f.type) for v, f in zip(zip(*rows, strict=True), schema, strict=True)
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    batches, bad = taken(topic, csv_of(batch))
    assert not bad
    found = pa.Table.from_batches(batches)
    for mine, theirs in zip(found.columns, batch.columns, strict=True):
        assert json_values(mine.combine_chunks()) == json_values(theirs)


@settings(deadline=None)
@given(st.lists(st.text(st.sampled_from('a,"\r\n ')) | st.none(), min_size=1, max_size=4))
def test_text_of_all_kinds_comes_back(values: list[str | None]) -> None:
    topic = topic_of(*[pa.string()] * len(values))
    batch = pa.RecordBatch.from_arrays(
        [pa.array([value], pa.string()) for value in values], schema=topic.schema.arrow
    )
    (found,), bad = taken(topic, csv_of(batch))
    assert not bad
    assert list(found.to_pylist()[0].values()) == values


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()], ids=str)
def test_floats_that_are_no_numbers_come_back_from_csv(kind: pa.DataType) -> None:
    batch = pa.record_batch({"c0": pa.array([math.inf, -math.inf, math.nan, -0.0], kind)})
    batches, bad = taken(topic_of(kind), csv_of(batch))
    assert not bad
    assert repr(pa.Table.from_batches(batches)["c0"].to_pylist()) == "[inf, -inf, nan, -0.0]"
    _, bad = taken(topic_of(kind), b"c0\n1e999\nInf\n")
    assert len(bad) == 2


@pytest.mark.parametrize("form", ["ndjson", "csv"])
def test_moments_that_python_does_not_have_come_back(headrace: Headrace, form: str) -> None:
    columns = "d date, t timestamp, n timestamp_ntz, c time, a array<date>"
    rows = [
        {"d": "infinity", "t": "-infinity", "n": "infinity", "c": "24:00:00", "a": ["-infinity"]},
        {"d": "-0044-03-15", "t": "0000-02-29T01:02:03.5Z", "n": "12000-01-01T00:00:00"},
        {"d": "2024-01-31", "t": "2024-01-31T00:00:00Z", "a": ["2024-01-31", "-4712-01-01"]},
    ]
    for name in ("one", "two"):
        headrace("topic", "create", name, columns, "--key", "d")
    headrace("topic", "append", "one", stdin="\n".join(json.dumps(row) for row in rows))
    written = headrace("topic", "read", "one", "--format", form).data
    assert headrace("topic", "append", "two", "--format", form, stdin=written).code == 0
    found = headrace("topic", "read", "two").rows
    assert [{k: v for k, v in row.items() if v is not None} for row in found] == rows
    assert len(headrace("table", "get", "two", "--", "-0044-03-15", "infinity").rows) == 2
    for wrong in ('{"d": "-0044-02-30"}', '{"n": "12000-01-01T00:00:00Z"}', '{"c": "infinity"}'):
        assert headrace("topic", "append", "one", stdin=wrong).code == 3


def test_fields_are_split_where_they_end() -> None:
    assert csv_fields('a,"b,""c""",,""') == ["a", 'b,"c"', None, ""]
    assert csv_fields("") == [None]
    assert csv_fields('"x",') == ["x", None]


GOOD = 'id,name,tags\n1,"two\nlines","[""x""]"\r\n'


def test_bad_csv_lines_are_set_aside_with_number_and_reason(
    headrace: Headrace, tmp_path: Path
) -> None:
    headrace("topic", "create", "t", "id int not null, name string, tags array<string>")
    lines = GOOD + 'x,a,\n5\n6,b""c,\n7,d,[1\n,e,\n8,"",\n'
    aside = tmp_path / "aside"
    done = headrace("topic", "append", "t", "--format", "csv", "--aside", str(aside), stdin=lines)
    assert done.code == 3
    bad = {b["line"]: b["reason"] for b in map(json.loads, aside.read_text().splitlines())}
    assert list(bad) == [4, 5, 6, 7, 8]
    assert bad[4] == "column 'id': \"x\" is not a whole number"
    assert bad[5] == "1 field, and the head has 3"
    assert bad[6] == "not CSV at character 3: a quote within or left open"
    assert "not JSON" in bad[7]
    assert bad[8] == "column 'id' is missing or null, and may not be"
    rows = headrace("topic", "read", "t").rows
    assert [(row["id"], row["name"]) for row in rows] == [(1, "two\nlines"), (8, "")]


def test_a_quote_that_is_open_to_the_end_is_one_bad_line(headrace: Headrace) -> None:
    headrace("topic", "create", "t", "id int, name string, tags array<string>")
    done = headrace("topic", "append", "t", "--format", "csv", stdin=GOOD + '2,"open,\n3,x,\n')
    assert done.code == 3
    assert "line 4 set aside" in done.err
    assert [row["id"] for row in headrace("topic", "read", "t").rows] == [1]


@pytest.mark.parametrize(
    ("head", "says"),
    [("", "is empty"), ("id,nmae\n1,x\n", "did you mean 'name'"), ("id,id\n1,1\n", "comes twice")],
)
def test_a_head_that_does_not_fit_is_refused_at_once(
    headrace: Headrace, head: str, says: str
) -> None:
    headrace("topic", "create", "t", "id int, name string")
    done = headrace("topic", "append", "t", "--format", "csv", stdin=head)
    assert done.code == 2
    assert says in done.err


def test_headers_are_kept_and_places_are_not(headrace: Headrace) -> None:
    headrace("topic", "create", "t", "id int")
    headrace("topic", "create", "u", "id int")
    headrace("topic", "append", "t", stdin='{"id": 1, "_headers": {"a": "b"}}\n{"id": null}\n')
    out = headrace("topic", "read", "t", "--format", "csv", "--with-position").data
    done = headrace("topic", "append", "u", "--format", "csv", stdin=out)
    assert done.code == 0, done.err
    assert "new places" in done.err
    again = headrace("topic", "read", "u", "--with-position").rows
    assert [(row["id"], row.get("_headers")) for row in again] == [(1, {"a": "b"}), (None, None)]


@pytest.mark.parametrize("value", ["json", "text", "bytes"])
def test_opaque_topics_come_back_from_csv(headrace: Headrace, value: str) -> None:
    headrace("topic", "create", "t", value)
    headrace("topic", "create", "u", value)
    values = {"json": '{"a": [1, "x,y"]}', "text": '"a,\\nb"', "bytes": '"AP8="'}
    headrace("topic", "append", "t", stdin=f'{{"key": "aw==", "value": {values[value]}}}\n')
    out = headrace("topic", "read", "t", "--format", "csv").data
    done = headrace("topic", "append", "u", "--format", "csv", stdin=out)
    assert done.code == 0, done.err
    assert headrace("topic", "read", "u").rows == headrace("topic", "read", "t").rows
    assert len(headrace("topic", "read", "u").rows) == 1


SCHEMA = "id bigint not null, at timestamp, d decimal(20,3), b binary, i interval day to second"
ROW = {"id": 1, "at": "2024-01-31T12:00:00.5Z", "d": "1.250", "b": "AP8=", "i": "P1DT2H"}


@pytest.mark.parametrize("command", [("topic", "read"), ("table", "scan"), ("topic", "tail")])
def test_every_reading_command_writes_every_format(
    headrace: Headrace, tmp_path: Path, command: tuple[str, ...]
) -> None:
    headrace("topic", "create", "t", SCHEMA, "--key", "id")
    headrace("topic", "append", "t", stdin="\n".join(json.dumps(ROW | {"id": n}) for n in range(9)))
    extra = ["--no-follow"] if "tail" in command else []
    call = [*command, "t", *extra]
    rows = headrace(*call).rows
    assert len(rows) == 9
    for name in ("x.parquet", "x.arrow"):
        file = tmp_path / name
        assert headrace(*call, "--output", str(file)).data == b""
        stream = name.endswith("arrow")
        found = pa.ipc.open_stream(file).read_all() if stream else pq.read_table(file)
        assert [json_values(column.combine_chunks()) for column in found.columns] == [
            [row[name] for row in rows] for name in found.schema.names
        ]
    assert headrace(*call, "--format", "csv").out.count("\n") == 10
    parquet = headrace(*call, "--format", "parquet").data
    assert pq.read_table(io.BytesIO(parquet)).num_rows == 9


def test_a_topic_without_rows_still_says_its_columns(headrace: Headrace) -> None:
    headrace("topic", "create", "t", "id int, v string")
    assert headrace("topic", "read", "t", "--format", "csv").out == "id,v\n"
    arrow = headrace("topic", "read", "t", "--format", "arrow").data
    assert pa.ipc.open_stream(arrow).read_all().schema.names == ["id", "v"]
    parquet = headrace("topic", "read", "t", "--format", "parquet").data
    assert pq.read_table(io.BytesIO(parquet)).schema.names == ["id", "v"]
    headrace("topic", "create", "u", "id int, v string")
    assert headrace("topic", "append", "u", "--format", "csv", stdin="id,v\n").code == 0


def test_a_file_appears_only_when_it_is_whole(headrace: Headrace, tmp_path: Path) -> None:
    headrace("topic", "create", "t", "id int")
    headrace("topic", "append", "t", stdin='{"id": 1}')
    headrace("topic", "alter", "t", "--add", "x=string")
    file = tmp_path / "x.csv"
    done = headrace(
        "topic", "read", "t", "--output", str(file), "--through", "99", "--timeout", "0"
    )
    assert done.code == 1
    assert [one for one in os.listdir(tmp_path) if one.startswith("x.csv")] == []
    done = headrace("topic", "read", "t", "--output", str(tmp_path / "no" / "x.csv"))
    assert done.code == 2


MEMORY = """
import re, sys
from headrace.cli.main import run
code = run(["topic", "read", "big", "--log", sys.argv[1], "--output", sys.argv[2]])
status = open("/proc/self/status").read()  # rusage counts what was before exec, the tests' own
sys.exit(code or print(int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) // 1024))
"""


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_an_export_needs_memory_for_a_batch_not_for_all(tmp_path: Path, form: str) -> None:
    import headrace as hr

    folder = str(tmp_path / "data")
    text = pa.array([f"{i:0400d}" for i in range(50_000)])
    with hr.connect(folder) as log:
        log.create_topic("big", "b string")
        for _ in range(24):  # 480 MB
            log.append("big", pa.record_batch([text], ["b"]))
    out = str(tmp_path / f"out.{form}")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, folder, out], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 420
