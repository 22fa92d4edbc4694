"""The keeper: sealing, retention, archive, compaction, holds, deletion (R-A9, A11, A14).

Caught: a reading that notices that rows were sealed, in any of the ways to start one and while it
goes on; rows, times, headers, offsets that change; a gap that is not told, or told wrongly; a row
that compaction should have kept or dropped, against a dict; files that are read after they went, or
never go; damage of a sealed file. Not caught: crashes, which are the enumerator's (its workloads
`keeps` and `kept_meanwhile`), and what many processes do to each other (`./run faults chaos`).
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace import errors
from headrace.log.embedded import compaction, gone
from headrace.log.embedded import keeper as keeping
from headrace.log.embedded.check import check
from headrace.log.embedded.keeper import COUNTER, Keeper
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.system import OsSystem
from headrace.model.records import Batch
from tests.log.kit import TINY, Machine, checked, machine_log
from tests.model.strategies import TYPES, values_of

SMALL: dict[str, Any] = {**TINY, "inline_bytes_max": 8 << 10, "chunk_bytes": 8 << 10}
Seen = tuple[Any, ...]


def seen(batch: Batch) -> list[Seen]:
    """All that a batch says of its rows."""
    columns = (
        batch.positions, batch.partition, batch.offset, batch.sent_time, batch.received_time,
        batch.headers, batch.transaction,
    )  # fmt: skip
    told = zip(*(column.to_pylist() for column in columns), strict=True)
    rows = (str(row) for row in batch.to_pylist())
    return [(batch.topic, *one, row) for one, row in zip(told, rows, strict=True)]


def contents(log: EmbeddedLog, topics: Any, **start: Any) -> list[Seen]:
    """What a reading gives; entries must be whole where a batch says so, and go forward."""
    found: list[Seen] = []
    through = 0
    for batch in log.read(topics, **start):
        rows = seen(batch)
        assert all(position > through for _, position, *_ in rows), "an entry goes on behind `last`"
        assert all(position <= batch.position for _, position, *_ in rows)
        through = batch.position if batch.last else through
        found += rows
    if len([topics] if isinstance(topics, str) else topics) > 1:  # of one window in any order
        found.sort(key=lambda one: (one[1], one[0], one[2], one[3]))
    return found


def fill(log: EmbeddedLog, chance: random.Random, entries: int = 120) -> None:
    """Three topics, entries of all sizes, with headers, transactions, a new schema version."""
    log.create_topic("a", "id bigint, s string", key="id", partitions=3)
    log.create_topic("b", "id bigint, t timestamp", key="id", kind="changes")
    log.create_topic("c", "text")
    for number in range(entries):
        if number == entries // 2:
            log.alter_topic("a", add="more int")
        with log.transaction() as entry:
            for name in chance.sample(["a", "b", "c"], chance.randint(1, 3)):
                count = chance.choice([1, 2, 30, 500])
                rows: Any = [{"id": chance.randint(0, 50)} for _ in range(count)]
                if name == "c":
                    rows = [(str(n), "v" * n) for n in range(count)]
                headers = {"h": b"1"} if chance.random() < 0.2 else None
                split = [1, count - 1] if count > 1 and chance.random() < 0.3 else None
                entry.append(name, rows, headers=headers, transactions=split)


@pytest.fixture
def log(folder: str) -> Iterator[EmbeddedLog]:
    with hr.connect(folder, **SMALL) as log:
        yield log


def seal(log: EmbeddedLog, turns: int = 1) -> None:
    keeper = log.keeper()
    try:
        for _ in range(turns):
            keeper.turn(close=True)
    finally:
        keeper.release()


def names(log: EmbeddedLog, folder: str) -> list[str]:
    return sorted(os.listdir(f"{log.path}/{folder}"))


@pytest.mark.parametrize("seed", range(3))
def test_readings_do_not_notice_that_rows_were_sealed(log: EmbeddedLog, seed: int) -> None:
    chance = random.Random(seed)
    fill(log, chance)
    cut, end = chance.randint(1, log.position), log.position
    moment = chance.choice(contents(log, "a"))[5]
    offsets = {p: chance.randint(0, end) for p, end in enumerate(log.ends("a"))}
    ways: list[tuple[Any, dict[str, Any]]] = [
        *((topic, {"through": end}) for topic in ("a", "b", "c", ["a", "b", "c"])),
        (["a", "c"], {"after": cut, "through": end}),
        (["a", "b"], {"through": cut}),
        (["c", "b"], {"start": moment, "through": end}),
        ("a", {"start": offsets, "through": end}),
        ("a", {"start": 5, "partitions": [1], "through": end}),
        ("a", {"columns": ["more", "id"], "through": end}),
    ]
    before = [contents(log, topics, **way) for topics, way in ways]
    files = names(log, "journal")
    seal(log)
    assert [contents(log, topics, **way) for topics, way in ways] == before
    seal(log, turns=2)
    assert not set(names(log, "journal")) & set(files), "they are deleted by now"
    assert not names(log, "pieces")
    assert [contents(log, topics, **way) for topics, way in ways] == before
    assert checked(log.path).ok
    log.append("c", ["more"])
    assert len(contents(log, "c")) == len(contents(log, "c", through=end)) + 1


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_type_is_sealed_as_it_was(tmp_path: Path, data: st.DataObject) -> None:
    kind = data.draw(TYPES)
    values = data.draw(st.lists(st.none() | values_of(kind), min_size=1, max_size=5))
    rows = pa.record_batch([pa.array(values, kind)], names=["a.b"])
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder, hr.connect(folder) as log:
        log.create_topic("t", rows.schema)
        log.append("t", rows)
        before = next(log.read("t")).data
        seal(log)
        after = next(log.read("t")).data
        assert after.schema.equals(before.schema)
        assert repr(after.to_pylist()) == repr(before.to_pylist())


@pytest.mark.parametrize("large", [False, True])
def test_a_reading_goes_on_when_its_file_is_gone(log: EmbeddedLog, large: bool) -> None:
    """Also in the middle of a large entry, whose pieces go too."""
    log.create_topic("a", "id bigint, s string")
    rows = [{"id": n, "s": "x" * 100} for n in range(900)]
    for _ in range(3):
        log.append("a", rows if large else rows[:50])
    reading = log.read("a", follow=True, timeout=0.1)
    first = next(reading)
    want = contents(log, "a")
    seal(log, turns=3)
    assert names(log, "pieces") == []
    log.append("a", [{"id": 7}])
    found = seen(first)
    for batch in reading:
        found += seen(batch)
    assert [one[3] for one in found] == list(range(len(want) + 1))
    assert found[:-1] == want


def test_a_reading_that_waits_at_the_end_goes_on_behind_the_sealed_files(log: EmbeddedLog) -> None:
    log.create_topic("a", "id bigint")
    log.append("a", [{"id": 0}])
    reading = log.read("a", follow=True)
    assert len(next(reading)) == 1
    for number in range(1, 6):
        log.append("a", [{"id": number}])
        seal(log)
        batch = next(reading)
        assert batch.to_pylist() == [{"id": number}]
        assert batch.last


@pytest.mark.parametrize("compact", [False, True])
def test_many_small_files_become_one(log: EmbeddedLog, compact: bool) -> None:
    """Else the list of files, which every checkpoint holds, would grow for ever."""
    log.create_topic("a", "id bigint", key="id", partitions=2)
    log.set_topic("a", compact=compact)
    for number in range(40):
        log.append("a", [{"id": number}], headers={"h": b"x"} if number % 7 == 0 else None)
        seal(log)
    found = contents(log, "a")
    assert sorted(one[-1] for one in found) == sorted(str({"id": n}) for n in range(40))
    assert [one[6] is not None for one in found] == [n % 7 == 0 for n in range(40)]
    assert len(log.journal.control.sealed.of(1)) < 18
    assert contents(log, "a", start={0: 3, 1: 5}) == [
        one for one in found if one[3] >= (3 if one[2] == 0 else 5)
    ]
    assert checked(log.path).ok


# --- retention --------------------------------------------------------------------------------


def filled(log: EmbeddedLog, entries: int, rows: int = 10) -> None:
    """Entries of one topic, each sealed by itself."""
    for number in range(entries):
        log.append("a", [{"id": number * rows + n} for n in range(rows)])
        seal(log)


def test_what_is_too_old_goes_and_who_missed_it_is_told_what(log: EmbeddedLog) -> None:
    """Exactly the offsets; a reader that begins with what there is does not notice. R-A11"""
    log.create_topic("a", "id bigint")
    log.create_topic("other", "id bigint")
    log.append("other", [{"id": 1}])
    behind = log.read("a", follow=True, timeout=0.1)
    filled(log, 1)
    assert len(next(behind)) == 10
    filled(log, 4)
    at = log.position
    log.set_topic("a", retention_bytes=1)
    log.append("a", [{"id": 99}])
    keeper = log.keeper()
    done = keeper.turn()
    keeper.release()
    assert len(done.dropped) == 5
    assert log.starts("a") == [50]
    assert log.since_of("a") > 0
    assert [row["id"] for batch in log.read("a") for row in batch.to_pylist()] == [99]
    assert len(contents(log, "other")) == 1
    with pytest.raises(errors.OffsetsGone) as told:
        next(behind)
    assert told.value.details["partitions"] == {0: [10, 49]}
    assert "offsets 10 to 49 of partition 0" in told.value.fact
    with pytest.raises(errors.OffsetsGone) as told:
        list(log.read("a", {0: 7}))
    assert told.value.details["partitions"] == {0: [7, 49]}
    assert [one[3] for one in contents(log, "a", start={0: 50})] == [50]
    assert [one[3] for one in contents(log, "a", after=at)] == [50]
    assert checked(log.path).ok


@pytest.mark.parametrize("kept", [250_000, 9])
def test_who_goes_on_behind_a_position_is_told_exactly_what_it_missed(
    log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Every position, in the middle of files too; what is forgotten is not guessed. R-A11"""
    monkeypatch.setattr(gone, "RUNS_KEPT", kept)
    rng = random.Random(7)
    log.create_topic("a", "id bigint", partitions=3)
    log.create_topic("other", "id bigint")
    ends: dict[int, list[int]] = {log.position: [0, 0, 0]}
    log.set_topic("a", retention_bytes=1)
    for entry in range(40):
        if rng.random() < 0.3:
            log.append("other", [{"id": entry}])
        else:
            rows = [{"id": n} for n in range(rng.randrange(1, 5))]
            log.append("a", rows, partition=rng.randrange(3))
        ends[log.position] = log.ends("a")
        if entry in (9, 10, 25):
            seal(log)
    starts = log.starts("a")
    told: dict[int, bool] = {}
    for position, had in ends.items():
        missed = {p: [had[p], starts[p] - 1] for p in range(3) if had[p] < starts[p]}
        if not missed:
            held = sum(log.ends("a")) - sum(had)
            assert len(contents(log, "a", after=position)) == held
            continue
        for chosen in (None, [min(missed)]):
            with pytest.raises(errors.OffsetsGone) as raised:
                next(log.read("a", after=position, partitions=chosen))
            found: dict[str, Any] = raised.value.details
            told[position] = found["exact"]
            if found["exact"]:
                wanted = missed if chosen is None else {p: missed[p] for p in chosen}
            else:
                assert "not known any more" in raised.value.fact
                wanted = {p: [0, starts[p] - 1] for p in chosen or range(3)}
            assert found["partitions"] == wanted
    assert set(told.values()) == ({True} if kept > 9 else {True, False})
    assert list(told.values()) == sorted(told.values())  # what is newer is known
    assert checked(log.path).ok


@pytest.mark.parametrize("harm", ["missing", "damaged", "empty"])
def test_without_what_was_written_down_it_is_said_that_nobody_knows(
    log: EmbeddedLog, harm: str
) -> None:
    log.create_topic("a", "id bigint")
    at = log.append("a", [{"id": 1}]).position
    log.append("a", [{"id": 2}])
    log.set_topic("a", retention_bytes=1)
    seal(log)
    path = Path(log.path) / "gone" / str(log.topic("a").id)
    content = path.read_bytes()
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(b"" if harm == "empty" else content[:20] + b"x" + content[21:])
    with pytest.raises(errors.OffsetsGone) as raised:
        next(log.read("a", after=at))
    assert raised.value.details["partitions"] == {0: [0, 1]}
    assert not raised.value.details["exact"]
    at = log.append("a", [{"id": 3}]).position
    log.append("a", [{"id": 4}])
    seal(log)
    with pytest.raises(errors.OffsetsGone) as raised:
        next(log.read("a", after=at))
    assert raised.value.details["partitions"] == {0: [3, 3]}
    log.delete_topic("a")
    seal(log)
    assert not path.exists()


def test_rows_go_on_a_full_disk_though_nobody_writes_down_which(folder: str) -> None:
    machine = Machine()
    with machine_log(folder, machine, **SMALL) as log:
        log.create_topic("a", "id bigint")
        at = log.append("a", [{"id": 1}]).position
        log.append("a", [{"id": 2}])
        log.set_topic("a", retention_bytes=1)
        full = OSError(errno.ENOSPC, "no space left")
        machine.fails = lambda call, path: full if "/gone/" in path else None
        keeper = log.keeper()
        assert keeper.turn(close=True).dropped
        keeper.release()
        assert log.starts("a") == [2]
        with pytest.raises(errors.OffsetsGone) as raised:
            next(log.read("a", after=at))
        assert not raised.value.details["exact"]


def test_a_topic_whose_rows_are_all_gone_goes_on_at_its_offset(log: EmbeddedLog) -> None:
    log.create_topic("a", "id bigint", partitions=2)
    for partition in (0, 0, 1):
        log.append("a", [{"id": 1}], partition=partition)
    log.set_topic("a", retention_seconds=0)
    seal(log)
    assert (contents(log, "a"), log.starts("a"), log.ends("a")) == ([], [2, 1], [2, 1])
    log.append("a", [{"id": 2}], partition=1)
    assert [one[2:4] for one in contents(log, "a")] == [(1, 1)]


@pytest.mark.parametrize(
    "given", [{"position": -1}, {"position": "7"}, {"seconds": 0}, {"seconds": float("inf")}]
)
def test_a_hold_that_would_hold_nothing_is_refused(log: EmbeddedLog, given: Any) -> None:
    with pytest.raises(errors.BadSetting):
        log.hold("me", **{"position": 0, **given})
    assert not log.holds()


def test_a_hold_keeps_what_somebody_needs_until_it_ends(folder: str) -> None:
    """By position, by topic, for its time."""
    machine = Machine()
    with machine_log(folder, machine, **SMALL) as log:
        log.create_topic("a", "id bigint")
        filled(log, 2)
        at = log.position
        filled(log, 2)
        log.set_topic("a", retention_seconds=0)
        log.hold("mine", at, topics=["a"], seconds=60)
        log.hold("another's", 0, topics=[], seconds=60)
        assert set(log.holds()) == {"mine", "another's"}
        seal(log)
        assert log.starts("a") == [20]
        machine.clock_us = time.time_ns() // 1000 + 61_000_000
        assert log.holds() == {}
        seal(log)
        assert log.starts("a") == [40]


def test_a_hold_that_is_let_go_holds_nothing(log: EmbeddedLog) -> None:
    log.create_topic("a", "id bigint")
    filled(log, 2)
    log.set_topic("a", retention_seconds=0)
    log.hold("all", 0)
    seal(log)
    assert log.starts("a") == [0]
    log.release("all")
    seal(log)
    assert log.starts("a") == [20]


def test_an_archive_is_found_from_every_folder(
    log: EmbeddedLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that was said in one working directory is the same one in another."""
    log.create_topic("a", "id bigint")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    log.set_topic("a", retention_seconds=0, archive="old")
    monkeypatch.chdir(tmp_path)
    filled(log, 2)
    assert os.listdir(tmp_path / "here" / "old")
    monkeypatch.chdir("/")
    assert len(contents(log, "a")) == 20


def test_old_files_are_archived_and_read_from_there(log: EmbeddedLog, tmp_path: Path) -> None:
    """By offset and by time, without a word; with the archive away it is an error. R-A11"""
    log.create_topic("a", "id bigint, s string")
    filled(log, 3)
    want = contents(log, "a")
    archive = tmp_path / "archive" / "of a"
    log.set_topic("a", retention_seconds=0, archive=str(archive))
    seal(log, turns=3)
    assert names(log, "sealed") == []
    assert len(os.listdir(archive)) == 3
    assert (contents(log, "a"), log.starts("a"), log.since_of("a")) == (want, [0], 0)
    assert contents(log, "a", start={0: 15}) == want[15:]
    assert contents(log, "a", start=want[20][5]) == want[20:]
    assert checked(log.path).ok
    shutil.move(archive, tmp_path / "away")
    with pytest.raises(errors.LogDamaged, match="missing"):
        contents(log, "a")


def test_who_is_behind_what_is_archived_does_not_need_the_archive(
    log: EmbeddedLog, tmp_path: Path
) -> None:
    """Nor the last archived file, by whose end alone nobody knows what it holds."""
    log.create_topic("a", "id bigint", partitions=2)
    log.append("a", [{"id": n} for n in range(5)], partition=0)
    archive = tmp_path / "archive"
    log.set_topic("a", retention_seconds=0, archive=str(archive))
    seal(log, turns=3)
    shutil.rmtree(archive)
    assert contents(log, "a", start={0: 5, 1: 0}) == []
    following = log.read("a", {0: 5}, follow=True)
    assert following.poll() is None
    log.append("a", [{"id": 7}], partition=0)
    log.append("a", [{"id": 8}], partition=1)
    assert [one[2:4] for one in contents(log, "a", start={0: 5, 1: 0})] == [(0, 5), (1, 0)]
    batch = following.poll()
    assert batch is not None
    assert batch.to_pylist() == [{"id": 7}]
    with pytest.raises(errors.LogDamaged, match="missing"):
        contents(log, "a", start={0: 4})


def test_an_archive_out_of_reach_keeps_nobody_else_from_going(
    log: EmbeddedLog, tmp_path: Path
) -> None:
    """The error names the archive; other topics are let go, and the journal is deleted."""
    for name in ("a", "b"):
        log.create_topic(name, "id bigint")
        log.append(name, [{"id": 1}, {"id": 2}])
    (tmp_path / "file").touch()
    log.set_topic("a", retention_seconds=0, archive=str(tmp_path / "file" / "old"))
    log.set_topic("b", retention_seconds=0)
    for _ in range(4):
        with pytest.raises(errors.HeadraceError, match=r"file/old"):
            seal(log)
    assert (log.starts("a"), log.starts("b")) == ([0], [2])
    assert len(contents(log, "a")) == 2
    assert len(names(log, "journal")) <= 3


def test_an_archive_that_was_moved_away_is_given_nothing(log: EmbeddedLog, tmp_path: Path) -> None:
    """Else rows would lie below a mount point, and be hidden when the disk is mounted again."""
    log.create_topic("a", "id bigint")
    archive = tmp_path / "archive"
    log.set_topic("a", retention_seconds=0, archive=str(archive))
    filled(log, 1)
    seal(log)
    want = contents(log, "a")
    assert len(want) == len(os.listdir(archive)) * 10
    shutil.move(archive, tmp_path / "away")
    archive.mkdir()
    log.append("a", [{"id": 1}])
    with pytest.raises(errors.LogDamaged, match="missing"):
        seal(log)
    assert os.listdir(archive) == []
    archive.rmdir()
    with pytest.raises(errors.LogDamaged, match="missing"):
        seal(log)
    assert not archive.exists()
    shutil.move(tmp_path / "away", archive)
    seal(log)
    assert len(os.listdir(archive)) == 2
    assert len(contents(log, "a")) == len(want) + 1


def test_a_full_disk_is_made_room_on(folder: str) -> None:
    """Sealing fails; what retention lets go goes all the same, and then sealing does not fail."""
    machine = Machine()
    with machine_log(folder, machine, **SMALL) as log:
        log.create_topic("a", "id bigint")
        filled(log, 2)
        seal(log)
        before = names(log, "sealed")
        log.set_topic("a", retention_bytes=1)
        log.append("a", [{"id": 1}])
        full = OSError(errno.ENOSPC, "no space left")
        machine.fails = lambda call, path: full if call == "create" and "/sealed/" in path else None
        for _ in range(4):
            log.append("a", [{"id": 1}])
            with pytest.raises(errors.DiskFull):
                seal(log)
        assert log.starts("a") == [20]
        assert not set(before) & set(names(log, "sealed"))
        machine.fails = lambda call, path: None
        seal(log)


def test_changes_do_not_go_by_their_age(log: EmbeddedLog) -> None:
    log.create_topic("b", "id bigint", key="id", kind="changes")
    log.create_topic("a", "id bigint")
    with pytest.raises(errors.BadSetting, match="add up"):
        log.set_topic("b", retention_seconds=5)
    with pytest.raises(errors.BadSetting, match="key"):
        log.set_topic("a", compact=True)
    with pytest.raises(errors.BadSetting, match="no setting"):
        log.set_topic("a", compactt=True)


# --- compaction -------------------------------------------------------------------------------


def compact(log: EmbeddedLog) -> None:
    keeper = log.keeper()
    keeper.turn(close=True, compact=True)
    keeper.release()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["events", "changes"])
def test_a_compacted_topic_is_its_table(log: EmbeddedLog, kind: str, seed: int) -> None:
    """Read from the start, whatever was appended before and between compactions. R-A14"""
    chance = random.Random(seed)
    log.create_topic("t", "id bigint, v string, _op string", key="id", kind=kind, partitions=2)
    log.set_topic("t", compact=True, grace_seconds=0)
    now: dict[Any, dict[str, Any]] = {}
    for number in range(60):
        if number == 30:
            log.alter_topic("t", add="w int")
        rows = []
        for key in chance.sample([None, *range(8)], 3):
            old = now.pop(key, None)
            if old is not None and kind == "changes":
                rows.append({**old, "_weight": -1})
            if chance.random() < 0.7:
                now[key] = {"id": key, "v": f"{number}"} | ({"w": number} if number > 30 else {})
                rows.append(now[key])
            elif kind == "events":
                rows.append({"id": key, "_op": "d"})
        if rows:
            log.append("t", rows)
        if chance.random() < 0.2:
            compact(log)
            table = log.table("t").scan().read_all().to_pylist()
            assert read_up(log, kind) == shown(table) == shown(now.values())
    compact(log)
    assert read_up(log, kind) == shown(now.values())
    assert len(contents(log, "t")) == len(now), "one row a key"
    shutil.rmtree(f"{log.path}/tables", ignore_errors=True)
    with hr.connect(log.path) as again:
        assert shown(again.table("t").scan().read_all().to_pylist()) == shown(now.values())
    assert checked(log.path).ok


def shown(rows: Any) -> list[tuple[Any, ...]]:
    return sorted(((r["id"], r["v"], r.get("w")) for r in rows), key=str)


def read_up(log: EmbeddedLog, kind: str) -> list[tuple[Any, ...]]:
    """The rows of a topic by reading it from the start."""
    found: dict[Any, dict[str, Any]] = {}
    for batch in log.read("t", across_gaps=True):
        for row in batch.to_pylist():
            if kind == "events" and row["_op"] == "d":
                found.pop(row["id"], None)
            elif kind == "events" or row["_weight"] > 0:
                found[row["id"]] = row
            elif found.get(row["id"]) is not None and found[row["id"]]["v"] == row["v"]:
                del found[row["id"]]
    return shown(found.values())


def test_what_says_that_a_key_is_gone_stays_for_the_grace_time(log: EmbeddedLog) -> None:
    """Of an opaque topic it is a null value."""
    log.create_topic("t", "text")
    log.set_topic("t", compact=True, grace_seconds=3600)
    log.append("t", [("a", "1"), ("b", "1"), ("a", None)])
    compact(log)
    assert [one[3] for one in contents(log, "t")] == [1, 2]
    assert [row["key"] for row in log.table("t").scan().read_all().to_pylist()] == ["b"]
    log.set_topic("t", grace_seconds=0)
    compact(log)
    assert [one[3] for one in contents(log, "t")] == [1]


def test_no_batch_spans_a_gap_between_offsets(log: EmbeddedLog) -> None:
    log.create_topic("t", "id bigint, v bigint", key="id", partitions=2)
    log.set_topic("t", compact=True)
    for number in range(20):
        log.append("t", [{"id": (n * 7 + number) % 23, "v": number} for n in range(number % 6)])
    compact(log)
    batches = list(log.read("t"))
    for batch in batches:
        of = list(zip(batch.partition.to_pylist(), batch.offset.to_pylist(), strict=True))
        for partition in (0, 1):
            offsets = [offset for one, offset in of if one == partition]
            gaps = [b - a for a, b in itertools.pairwise(offsets)]
            assert gaps == [1] * len(gaps)
    assert [batch.last for batch in batches] == [False] * (len(batches) - 1) + [True]
    assert len(list(log.read("t", across_gaps=True))) < len(batches)


def test_who_stopped_among_changes_that_are_compacted_is_told(log: EmbeddedLog) -> None:
    """It has seen rows whose end is gone; who begins anew is right."""
    log.create_topic("t", "id bigint, v bigint", key="id", kind="changes")
    log.set_topic("t", compact=True)
    log.append("t", [{"id": 1, "v": 0}])
    stopped = log.position
    log.append("t", [{"id": 1, "v": 0, "_weight": -1}, {"id": 1, "v": 1}])
    log.table("t").scan()
    compact(log)
    with pytest.raises(errors.BadPosition, match="is whole from position"):
        list(log.read("t", after=stopped))
    with pytest.raises(errors.BadPosition, match="cannot be read"):
        log.table("t").scan(at=stopped)
    assert [row["v"] for batch in log.read("t") for row in batch.to_pylist()] == [1]


def test_many_keys_are_decided_in_slices(log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "SLICE_ROWS", 50)
    log.create_topic("t", "id bigint, v bigint", key="id")
    log.set_topic("t", compact=True)
    for number in range(10):
        log.append("t", [{"id": n, "v": number} for n in range(100)])
    compact(log)
    found = [row for batch in log.read("t", across_gaps=True) for row in batch.to_pylist()]
    assert found == [{"id": n, "v": 9} for n in range(100)]


# --- the role, the budget, what is deleted ------------------------------------------------------


def test_one_process_keeps_a_log(log: EmbeddedLog) -> None:
    first, second = log.keeper(), log.keeper()
    assert first.take()
    assert not second.take()
    with pytest.raises(errors.NotKeeper):
        second.turn()
    first.release()
    second.turn()
    second.release()


def test_a_keeper_that_was_passed_by_changes_nothing(
    log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are garbage, and go with the next turn."""
    log.create_topic("a", "id bigint")
    log.append("a", [{"id": 1}])
    log.journal.close_file()
    said = Keeper._say

    def late(self: Keeper, control: Any, number: int) -> None:
        log.append_entry([], {}, expect={COUNTER: number}, require={})
        said(self, control, number)

    monkeypatch.setattr(Keeper, "_say", late)
    keeper = log.keeper()
    with pytest.raises(errors.Conflict):
        keeper.turn()
    monkeypatch.undo()
    assert len(names(log, "sealed")) == 1
    keeper.turn()
    assert len(names(log, "sealed")) == 1
    assert len(contents(log, "a")) == 1
    keeper.release()


def test_without_a_keeper_appends_seal_above_the_budget_and_say_so_once(folder: str) -> None:
    with hr.connect(folder, **SMALL, journal_budget_bytes=50 << 10) as log:
        log.create_topic("a", "id bigint, s string")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for number in range(100):
                log.append("a", [{"id": number, "s": "x" * 5000}])
        assert [str(one.message)[:17] for one in warned] == ["nobody keeps the "]
        assert len(names(log, "journal")) < 10
        assert [one[3] for one in contents(log, "a")] == list(range(100))
    with hr.connect(folder, **SMALL, journal_budget_bytes=50 << 10) as log, log.keeper() as keeper:
        assert keeper.take()
        for number in range(30):
            log.append("a", [{"id": number, "s": "x" * 5000}])  # nobody is warned


@pytest.mark.parametrize("what", ["a warning is an error", "no descriptor is left"])
def test_what_sealing_meets_is_not_told_of_an_entry_that_was_taken(
    folder: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Who appended would append it again, and a producer would stop. R-A4"""

    def keeps_none(self: OsSystem, path: str, *, create: bool = False) -> Any:
        if path.endswith("/locks/keeper"):
            raise OSError(errno.EMFILE, "no descriptor")
        return opened(self, path, create=create)

    opened = OsSystem.open
    with hr.connect(folder, **SMALL, journal_budget_bytes=50 << 10) as log:
        log.create_topic("a", "id bigint, s string")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if what.startswith("no"):
                monkeypatch.setattr(OsSystem, "open", keeps_none)
            for number in range(40):
                log.append("a", [{"id": number, "s": "x" * 5000}])
        assert [one[3] for one in contents(log, "a")] == list(range(40))


def test_the_keeper_works_by_itself(log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "TURN_SECONDS", 0.01)
    log.create_topic("a", "id bigint, s string")
    for number in range(60):
        log.append("a", [{"id": number, "s": "x" * 3000}])
    many = keeping.STALE_FILES + 2
    assert len(names(log, "journal")) > many
    with log.keeper():  # also when nobody appends any more, and files would never roll
        end = time.monotonic() + 30
        while len(names(log, "journal")) > many and time.monotonic() < end:
            time.sleep(0.01)
        assert len(names(log, "journal")) <= many
        assert [one[3] for one in contents(log, "a")] == list(range(60))


@pytest.mark.parametrize("compact", [False, True])
def test_a_process_that_ends_does_not_wait_for_its_keeper(
    log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch, compact: bool
) -> None:
    """What was begun is left undone, and nothing of it is read."""
    log.create_topic("a", "id bigint", key="id")
    log.set_topic("a", compact=compact)
    for number in range(3):
        log.append("a", [{"id": number}])
    if compact:
        seal(log)
        log.append("a", [{"id": 3}])
    log.journal.close_file()
    keeper = log.keeper()
    where, name = (compaction, "filtered") if compact else (keeping, "rows_of")
    real = getattr(where, name)

    def last(*given: Any) -> Any:
        keeper._stop.set()
        return real(*given)

    monkeypatch.setattr(where, name, last)
    with pytest.raises(keeping.Stopped):
        for _ in range(3):
            keeper.turn(compact=compact)
    monkeypatch.undo()
    keeper.release()
    assert len(contents(log, "a")) == 3 + compact
    seal(log)
    assert len(contents(log, "a")) == 3 + compact


def test_a_topic_that_is_deleted_is_gone_with_its_rows(log: EmbeddedLog) -> None:
    """Its name is free, its id and its places are not given again."""
    for name in ("a", "b"):
        log.create_topic(name, "id bigint")
        log.append(name, [{"id": 1}])
    seal(log)
    log.delete_topic("b")
    with pytest.raises(errors.UnknownTopic):
        log.append("b", [{"id": 2}])
    seal(log, turns=3)
    assert len(names(log, "sealed")) == 1
    again = log.create_topic("b", "other string")
    assert again.id == 3
    log.append("b", [{"other": "x"}])
    assert [one[3] for one in contents(log, "b")] == [0]
    seal(log)
    assert [one[3] for one in contents(log, "b")] == [0]
    assert checked(log.path).ok


def test_damage_of_a_sealed_file_is_found_with_its_place(log: EmbeddedLog) -> None:
    log.create_topic("a", "id bigint, s string")
    filled(log, 2)
    (path, other) = (f"{log.path}/sealed/{name}" for name in names(log, "sealed"))
    data = Path(path).read_bytes()
    for at in (10, len(data) // 2, len(data) - 5):
        Path(path).write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        report = check(OsSystem(), log.path)
        assert [problem.details["file"] for problem in report.problems] == [path]
        with pytest.raises(errors.LogDamaged) as told:
            contents(log, "a")
        on = told.value.details["resume_after"]
        assert [one[3] for one in contents(log, "a", after=on)] == list(range(10, 20))
    Path(path).write_bytes(data)
    os.unlink(other)
    with pytest.raises(errors.LogDamaged, match="missing"):
        contents(log, "a")
    assert not check(OsSystem(), log.path).ok


def test_a_turn_does_not_read_again_what_was_said_since_the_last_checkpoint(tmp_path: Path) -> None:
    """A capture says something with each entry, tens of thousands of times between two of them."""
    with hr.connect(tmp_path / "log") as log:
        keeper, files, read = log.keeper(), log.journal.files, [0]
        record = files.record

        def counted(address: int) -> Any:
            read[0] += 1
            return record(address)

        for _ in range(300):
            with log.transaction() as entry:
                entry.put("place", "here")
        keeper.turn()
        files.record = counted  # type: ignore[method-assign]
        keeper.turn()
        keeper.release()
        assert read[0] < 20
