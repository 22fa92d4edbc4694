"""The golden folder of each format version: today's program and an independent one read it alike.

Caught: a change of the format that no longer reads what is on disks, a page (docs/log.md) that says
something else than the bytes, rows that the two readers see differently. Not caught: what no golden
folder contains.
"""

from __future__ import annotations

import ast
import datetime as dt
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.log.embedded.check import check
from headrace.log.embedded.system import OsSystem
from tests.golden import make
from tests.log import independent_reader
from tests.log.kit import values

GOLDEN = Path(make.__file__).parent
VERSIONS = sorted(path.stem for path in GOLDEN.glob("log-v*.json"))
PAGE = GOLDEN.parent.parent / "docs" / "log.md"


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a golden folder, which may be written."""
    copy = tmp_path / "log"
    shutil.copytree(GOLDEN / request.param, copy)
    return copy


@pytest.fixture
def expected(request: pytest.FixtureRequest) -> dict[str, Any]:
    name = request.node.callspec.params["golden"]
    found: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    return found


def test_it_is_read_as_it_was_written(golden: Path, expected: dict[str, Any]) -> None:
    """Every row, time, header, counter, offset and value of an old log is what it was. R-A9"""
    with hr.connect(str(golden), create=False) as log:
        assert make.plain(make.described(log)) == expected
        log.append("lines", ["and it goes on"])
        assert values(log.read("lines", after=expected["position"]), "value") == ["and it goes on"]
    forgotten = golden / "live"
    shutil.rmtree(forgotten)
    with hr.connect(str(golden)) as log:
        assert log.position == expected["position"] + 1


def test_it_is_clean(golden: Path, expected: dict[str, Any]) -> None:
    """The check finds nothing wrong with an old log, and says what is torn and left over. R-A4"""
    report = check(OsSystem(), str(golden))
    assert [str(problem) for problem in report.problems] == []
    assert report.rows == len(expected["rows"])
    assert report.position == expected["position"]
    assert len(report.orphans) == 1
    assert report.torn


def test_it_has_one_of_everything(golden: Path) -> None:
    """The golden folder holds rolls, cuts, marks, pieces and counter runs. R-A9"""
    found = independent_reader.Log(golden)
    newest = sorted((golden / "journal").glob("*.log"))[-1]
    first = found.record(newest.read_bytes(), int(newest.stem), 0)
    assert first is not None
    _, control, _, _ = first
    assert {closed["cut"] for closed in control["files"]} == {"", "reboot", "poisoned"}
    assert control["counters"]
    kinds: set[int] = set()
    for path in (golden / "journal").glob("*.log"):
        at, data = 0, path.read_bytes()
        while (record := found.record(data, int(path.stem), at)) is not None:
            header, _, _, body = record
            kinds.add(header.kind)
            at = body + header.body
    assert kinds == {1, 2, 3, 4}
    assert not (golden / "live").exists()
    assert not (golden / "locks").exists()
    assert sum(path.stat().st_size for path in golden.rglob("*")) < 300 << 10


def test_the_independent_reader_reads_the_same(golden: Path, expected: dict[str, Any]) -> None:
    """A reader written from docs/log.md alone comes to the same rows and state. R-A9"""
    log = independent_reader.Log(golden)
    assert log.position == expected["position"]
    assert {
        name: value for name, value in log.counters.items() if name in expected["counters"]
    } == {name: value for name, value in expected["counters"].items() if value}
    assert make.plain(log.offsets) == expected["offsets"]
    assert log.values["manifest"] == expected["values"]["manifest"]
    names = [topic["name"] for topic in log.topics.values()]
    assert names == [topic["name"] for topic in expected["topics"]]
    found = [
        {
            "topic": name,
            "position": position,
            "partition": partition,
            "offset": offset,
            "sent_time": time(sent),
            "received_time": time(received),
            "headers": make.plain(headers),
            "transaction": transaction,
            "row": make.plain(row),
        }
        for name in names
        for position, partition, offset, sent, received, headers, transaction, row in log.read(name)
    ]
    assert found == expected["rows"]


def time(microseconds: int) -> str:
    return str(dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=microseconds))


def test_the_independent_reader_finds_damage(golden: Path) -> None:
    """The independent reader tells damage from a torn end, by the page's rule. R-A4"""
    newest = sorted((golden / "journal").glob("*.log"))[-1]
    data = newest.read_bytes()
    second = data.index(b"HRlog", 64)
    newest.write_bytes(data[: second + 40] + b"\1" + data[second + 41 :])
    with pytest.raises(AssertionError, match="damage"):
        independent_reader.Log(golden)


def test_the_independent_reader_is_independent() -> None:
    """It imports nothing of Headrace, and is short enough to be read. R-A9"""
    text = Path(independent_reader.__file__).read_text()
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    allowed = {
        "__future__",
        "base64",
        "json",
        "re",
        "struct",
        "collections",
        "collections.abc",
        "pathlib",
        "typing",
    }
    assert imported <= allowed | {"pyarrow", "pyarrow.parquet", "xxhash"}


def test_a_folder_made_today_is_read_by_the_independent_reader(tmp_path: Path) -> None:
    """What today's program writes is the newest golden format, entry for entry. R-A9

    Rows of one entry may stand in another order over partitions: it says nothing.
    """
    make.make(tmp_path / "log")
    today = independent_reader.Log(tmp_path / "log")
    golden = independent_reader.Log(GOLDEN / VERSIONS[-1])
    for name in ("id", "position", "topics", "counters", "offsets", "values"):
        assert getattr(today, name) == getattr(golden, name)
    for topic in golden.topics.values():
        name = topic["name"]
        made, kept = (sorted(log.read(name), key=lambda row: row[:3]) for log in (today, golden))
        assert made == kept


def test_what_is_sealed_is_read_by_the_independent_reader(golden: Path) -> None:
    """The rows of all topics are the same when the journal files that held them are gone. R-A11"""
    before = independent_reader.Log(golden)
    with hr.connect(str(golden), create=False) as log:
        keeper = log.keeper()
        for _ in range(3):
            keeper.turn(close=True)
        keeper.release()
        log.append("notes", ["one more"])
    assert not (golden / "journal" / "00000001.log").exists()
    after = independent_reader.Log(golden)
    assert after.sealed
    for topic in before.topics.values():
        rows, more = list(before.read(topic["name"])), list(after.read(topic["name"]))
        assert more[: len(rows)] == rows
        assert len(more) == len(rows) + (topic["name"] == "notes")
    sealed = next((golden / "sealed").iterdir())
    sealed.write_bytes(sealed.read_bytes()[:-9] + b"x" + sealed.read_bytes()[-8:])
    with pytest.raises(AssertionError, match="damage"):
        [list(after.read(topic["name"])) for topic in after.topics.values()]


def test_the_worked_example_of_the_page_is_in_the_golden_folder() -> None:
    """The bytes that docs/log.md takes apart are those of the golden folder. R-D3"""
    dump = re.search(r"```hexdump\n# (\S+), from byte (\d+)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert dump is not None
    shown = bytes.fromhex("".join(line[5:52] for line in dump[3].splitlines()))
    start = int(dump[2])
    assert (GOLDEN / VERSIONS[-1] / dump[1]).read_bytes()[start : start + len(shown)] == shown
