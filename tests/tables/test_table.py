"""Tables of the log against a dict of lists: {key: [(position, row or None), ...]}.

Catches: a wrong version at any position, rows missing or out of order in a scan, keys confused
(equal prefixes, nulls, -0.0 and 0.0, composite, long strings), a table that trusts a stale, foreign
or damaged index, processes that get in each other's way. Cannot catch: collisions of 64-bit hashes
of keys that agree in all order words; whether it is fast (`./run bench tables`).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.model.hashing import order64
from headrace.settings import LogSettings
from headrace.tables import keyed, levels, upkeep
from headrace.testing.disk import SimulatedMachine

Oracle = dict[Any, list[tuple[int, str | None]]]
PREFIX = "https://shop.example.org/articles/of/the/year/"
KEYS: dict[str, tuple[str, Any, Callable[[random.Random], Any]]] = {
    "bigint": (
        "k bigint",
        "k",
        lambda rng: rng.choice([None, -(2**63), 2**63 - 1, rng.randrange(-9, 9)]),
    ),
    "int": ("k int", "k", lambda rng: rng.randrange(-20, 20)),
    "double": ("k double", "k", lambda rng: rng.choice([0.0, -1.5, 1e300, float("inf"), None])),
    "string": (
        "k string",
        "k",
        lambda rng: rng.choice(["", None, "\0", "a", "a\0", "ab", "é" * rng.randrange(20)]),
    ),
    "long strings": ("k string", "k", lambda rng: PREFIX + str(rng.randrange(30))),
    "composite": (
        "a string, b bigint",
        ("a", "b"),
        lambda rng: (rng.choice(["", None, "a", "a\0", "b", PREFIX]), rng.choice([None, -1, 0, 5])),
    ),
    "decimals": (
        "a decimal(38,2), b date, c boolean",
        ("a", "b", "c"),
        lambda rng: (
            rng.choice([None, hr_decimal("1.50"), hr_decimal("-2")]),
            None,
            rng.choice([None, True, False]),
        ),
    ),
}


def hr_decimal(text: str) -> Any:
    import decimal

    return decimal.Decimal(text)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge and commit all the time; and no slow disk."""
    for name, value in (("SLICE", 16), ("BASE", 8), ("RATIO", 3)):
        monkeypatch.setattr(levels, name, value)
    monkeypatch.setattr(upkeep, "COMMIT_ROWS", 20)
    monkeypatch.setattr(upkeep, "BUILD_ROWS", 50)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def parts(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def rows_at(oracle: Oracle, position: int) -> dict[Any, str]:
    found = {}
    for key, versions in oracle.items():
        value = next((value for at, value in reversed(versions) if at <= position), None)
        if value is not None:
            found[key] = value
    return found


def in_order(keys: list[Any], types: list[pa.DataType]) -> list[Any]:
    """As Spark sorts: null first; exact Python comparison of the rest."""

    def word(value: Any) -> Any:
        if value is None:
            return (0,)
        return (1, value.encode() if isinstance(value, str) else value)

    assert types
    return sorted(keys, key=lambda key: [word(value) for value in parts(key)])


class World:
    """A log, its table and what should be in it."""

    def __init__(self, log: EmbeddedLog, kind: str, shape: str, rng: random.Random) -> None:
        ddl, self.key, self.make = KEYS[shape]
        op = ", _op string" if kind == "events" else ""
        self.log, self.kind, self.rng = log, kind, rng
        self.names = parts(self.key)
        log.create_topic("t", f"{ddl}, v string{op}", key=self.key, kind=kind, partitions=3)
        log.create_topic("other", "x bigint")
        self.types = [log.topic("t").schema.column(name).type for name in self.names]
        self.oracle: Oracle = {}
        self.positions = [0]

    def write(self) -> None:
        rng = self.rng
        if rng.random() < 0.2:
            self.positions.append(self.log.append("other", [{"x": 1}]).position)
            return
        rows, versions = [], {}
        for _ in range(rng.choice([1, 2, 5, 30])):
            key = self.make(rng)
            row = {**dict(zip(self.names, parts(key), strict=True)), "v": str(rng.random())}
            gone = rng.random() < 0.3
            if self.kind == "events":
                rows.append({**row, "_op": "d" if gone else rng.choice([None, "c"])})
                versions[key] = None if gone else row["v"]
            else:
                rows.append({**row, "_weight": -1 if gone else 1})
                versions[key] = versions.get(key) if gone else row["v"]
        position = self.log.append("t", rows).position
        self.positions.append(position)
        for key, value in versions.items():
            self.oracle.setdefault(key, []).append((position, value))

    def check(self, log: EmbeddedLog) -> None:
        rng = self.rng
        at = rng.choice([*self.positions, self.positions[-1]])
        want = rows_at(self.oracle, at)
        keys = [self.make(rng) for _ in range(rng.choice([6, 300]))]
        found = log.table("t").get(keys, at=at).to_pylist()
        assert [row["_index"] for row in found] == [i for i, k in enumerate(keys) if k in want]
        for row in found:
            assert row["v"] == want[keys[row["_index"]]]
            assert row["_position"] <= at
        scanned = log.table("t").scan(at=at).read_all().to_pylist()
        got = [tuple(row[name] for name in self.names) for row in scanned]
        assert got == [parts(key) for key in in_order(list(want), self.types)]
        assert [row["v"] for row in scanned] == [want[k] for k in in_order(list(want), self.types)]


@pytest.mark.parametrize("kind", ["events", "changes"])
@pytest.mark.parametrize("shape", KEYS)
def test_a_table_is_the_last_version_of_each_key_at_every_position(
    kind: str, shape: str, tmp_path: Path, small: None
) -> None:
    rng = random.Random(f"{kind} {shape}")
    with hr.connect(tmp_path / "log") as log, hr.connect(tmp_path / "log") as second:
        world = World(log, kind, shape, rng)
        for step in range(50):
            world.write()
            if rng.random() < 0.4:
                world.check(rng.choice([log, second]))
            if step == 30:
                with hr.connect(tmp_path / "log") as third:
                    world.check(third)
        world.check(log)
        world.check(second)


def test_the_words_of_keys_ascend_with_the_keys() -> None:
    rng = random.Random(4)
    for _, names, make in KEYS.values():
        keys = list({make(rng) for _ in range(200)})
        types = {1: [pa.string()], 2: [pa.string(), pa.int64()]}.get(len(parts(names)))
        if types is None or not any(isinstance(parts(key)[0], str) for key in keys):
            continue
        ordered = in_order(keys, types)
        columns = [pa.array([parts(k)[at] for k in ordered], t) for at, t in enumerate(types)]
        words = list(zip(*(w.tolist() for w in keyed.key_words(columns, 0)[:-1]), strict=True))
        assert words == sorted(words)
    assert keyed.word_count([pa.int64()]) == 1
    assert keyed.key_words([pa.array([1])], 0)[0].tolist() == order64(pa.array([1]))[0].tolist()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EmbeddedLog]:
    with hr.connect(tmp_path / "log") as log:
        log.create_topic("t", "k bigint, v string", key="k", kind="changes")
        yield log


def rows(count: int, text: str = "") -> list[dict[str, Any]]:
    return [{"k": number, "v": f"{text}{number}"} for number in range(count)]


def test_at_above_the_newest_position_waits_and_below_since_is_refused(log: EmbeddedLog) -> None:
    position = log.append("t", rows(1)).position
    with pytest.raises(errors.WaitTimeout):
        log.table("t").get([0], at=position + 100, timeout=0)
    with pytest.raises(errors.BadPosition):
        log.table("t").get([0], at=-1)
    with pytest.raises(errors.BadPosition):
        log.table("t").scan(at=True)


def test_a_topic_without_a_key_is_no_table(log: EmbeddedLog) -> None:
    log.create_topic("plain", "x bigint")
    with pytest.raises(errors.NotATable, match="has no key"):
        log.table("plain")


def test_keys_of_a_wrong_form_are_refused_and_arrow_is_taken(log: EmbeddedLog) -> None:
    log.append("t", rows(5))
    found = log.table("t")
    assert found.get(pa.array([3, 1], pa.int32())).column("v").to_pylist() == ["3", "1"]
    assert found.get(pa.table({"k": [2]}), columns=["v"]).to_pylist() == [
        {"v": "2", "_position": log.position, "_index": 0}
    ]
    assert found.get([{"k": 4}, (3,), 4]).column("v").to_pylist() == ["4", "3", "4"]
    assert found.get([]).num_rows == 0
    for number, types in enumerate(("string", "decimal(38,2)", "int", "double")):
        log.create_topic(f"n{number}", f"a {types}, b int", key=["a", "b"])
        assert log.table(f"n{number}").get([]).num_rows == 0
    for keys in (["x"], [{"x": 1}], [(1, 2)], pa.array(["x"])):
        with pytest.raises(errors.WrongType):
            found.get(keys)
    with pytest.raises(errors.WrongColumn):
        found.get([1], columns=["nope"])


def test_a_new_column_appears_and_a_new_generation_begins_anew(
    log: EmbeddedLog, small: None
) -> None:
    first = log.append("t", rows(100)).position
    assert log.table("t").scan().read_all().num_rows == 100
    log.alter_topic("t", add="w bigint")
    log.append("t", [{"k": 1, "v": "new", "w": 7}])
    found = log.table("t").get([0, 1]).to_pylist()
    assert [(row["v"], row["w"]) for row in found] == [("0", None), ("new", 7)]
    assert log.table("t").get([1], at=first).to_pylist()[0]["v"] == "1"
    log.alter_topic("t", retype={"v": "bigint"})
    last = log.append("t", [{"k": 5, "v": 5}]).position
    assert log.table("t").scan(at=last).read_all().column("v").to_pylist() == [5]
    with pytest.raises(errors.BadPosition, match="older schema generation"):
        log.table("t").get([1], at=first)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_new_generation_is_empty_from_the_first_moment_and_nothing_is_said_of_before(
    log: EmbeddedLog, *, sealed: bool
) -> None:
    log.create_topic("other", "n bigint")
    log.append("t", rows(3))
    between = log.append("other", [{"n": 1}]).position
    log.alter_topic("t", retype={"v": "bigint"})
    if sealed:
        log.keeper().turn(close=True)
    with EmbeddedLog(log.path) as fresh:
        assert fresh.table("t").scan().read_all().num_rows == 0
        with pytest.raises(errors.BadPosition, match="older schema generation"):
            fresh.table("t").scan(at=between)
    log.append("t", [{"k": 5, "v": 5}])
    with EmbeddedLog(log.path) as fresh:
        assert fresh.table("t").get([1, 5]).column("v").to_pylist() == [5]
        with pytest.raises(errors.BadPosition, match="older schema generation"):
            fresh.table("t").scan(at=between)


def pack_files(log: EmbeddedLog) -> list[Path]:
    folder = Path(log.path) / "tables" / str(log.topic("t").id)
    return sorted(folder.glob("*.pack"))


def ahead_of_the_log(manifest: bytes) -> bytes:
    """As if the log had been put back from an older backup."""
    data = upkeep._parsed(manifest)
    assert data is not None
    return upkeep._text({**data, "through": data["through"] + 1000})


def test_a_damaged_foreign_or_missing_index_is_built_anew(log: EmbeddedLog, small: None) -> None:
    log.append("t", rows(500))
    want = log.table("t").scan().read_all()
    manifest = pack_files(log)[0].parent / "manifest"
    good = manifest.read_bytes()

    def flip_packs() -> None:
        for path in pack_files(log):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)

    def drop_packs() -> None:
        for path in pack_files(log):
            path.unlink()

    breakages: list[Callable[[], object]] = [
        lambda: manifest.write_bytes(good[:-5]),
        lambda: manifest.write_bytes(b""),
        lambda: manifest.write_bytes(b"nonsense"),
        lambda: manifest.write_bytes(
            upkeep._text({"for": [1, "00" * 16, 1, 1], "number": 3, "through": 0})
        ),
        lambda: manifest.write_bytes(ahead_of_the_log(good)),
        manifest.unlink,
        flip_packs,
        drop_packs,
    ]
    for breakage in breakages:
        breakage()
        with hr.connect(log.path) as fresh:
            assert fresh.table("t").get([1, 499, 500]).num_rows == 2
            assert fresh.table("t").scan().read_all() == want
        assert manifest.exists()


def test_a_scan_goes_on_when_its_packs_are_gone(log: EmbeddedLog, small: None) -> None:
    log.append("t", rows(300))
    want = log.table("t").scan().read_all()
    with hr.connect(log.path) as other:
        scan = other.table("t").scan()
        got = [scan.read_next_batch()]
        for path in pack_files(log):
            path.unlink()
        got += list(scan)
    assert pa.Table.from_batches(got) == want


def test_a_reading_that_a_close_cut_short_is_not_taken_for_the_whole(
    log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append("t", rows(10))

    def closing(*_: Any, **__: Any) -> Iterator[Any]:
        log.close()
        return iter(())

    monkeypatch.setattr(log, "read", closing)
    with pytest.raises(errors.LogClosed):
        log.table("t").get([1])


def test_small_tails_are_read_without_writing(log: EmbeddedLog) -> None:
    log.append("t", rows(10))
    assert log.table("t").get([3]).num_rows == 1
    assert not (Path(log.path) / "tables").exists()


def _reader(path: str, results: Any) -> None:
    with hr.connect(path) as log:
        upkeep.COMMIT_ROWS, upkeep.BUILD_ROWS = 50, 200
        results.put([log.table("t").scan(at=at).read_all().num_rows for at in range(2, 12)])


def test_processes_keep_one_table_together(log: EmbeddedLog) -> None:
    for number in range(10):
        log.append("t", [{"k": number * 100 + i, "v": ""} for i in range(100)])
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=_reader, args=[log.path, results]) for _ in range(4)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=90) for _ in workers]
    for worker in workers:
        worker.join()
    assert found == [[0, *range(100, 1000, 100)]] * 4 or found == [[*range(100, 1001, 100)]] * 4


def test_after_a_power_cut_at_any_operation_the_table_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, name, value in (
        (levels, "SLICE", 8),
        (levels, "BASE", 4),
        (upkeep, "COMMIT_ROWS", 5),
        (upkeep, "BUILD_ROWS", 12),
    ):
        monkeypatch.setattr(module, name, value)
    rng = random.Random(9)
    machine = SimulatedMachine()
    settings = LogSettings(background=False, journal_bytes_first=1 << 16)
    log = EmbeddedLog("/log", settings, system=machine.process())
    log.create_topic("t", "k bigint, v string", key="k", kind="changes")
    oracle: Oracle = {}
    done = []
    for step in range(4):
        news = {rng.randrange(12): f"{step}" for _ in range(8)}
        position = log.append("t", [{"k": k, "v": v} for k, v in news.items()]).position
        for k, v in news.items():
            oracle.setdefault(k, []).append((position, v))
        log.table("t").get([1])
        done.append((len(machine.ops), position, rows_at(oracle, position)))
    states = with_index = 0
    for at in range(done[0][0], len(machine.ops) + 1, 3):
        _, position, want = [entry for entry in done if entry[0] <= at][-1]
        for state in machine.crash_states(at, rng, 2):
            after = EmbeddedLog("/log", settings, system=state.machine().process())
            with_index += bool(after.table("t").index.manifest())  # type: ignore[attr-defined]
            found = after.table("t").scan(at=position).read_all()
            assert dict(zip(*(found.column(c).to_pylist() for c in "kv"), strict=True)) == want
            states += 1
            after.close()
    assert states > 30
    assert with_index


def test_what_comes_and_goes_in_one_entry_is_not_there(log: EmbeddedLog) -> None:
    """The rows of an entry are added up, in whatever order they stand."""

    def entry(*rows: tuple[int, str, int]) -> None:
        log.append("t", [{"k": k, "v": v, "_weight": w} for k, v, w in rows])

    def found() -> dict[int, str]:
        return {row["k"]: row["v"] for row in log.table("t").scan().read_all().to_pylist()}

    entry((1, "a", 1), (1, "a", -1))
    assert found() == {}
    entry((1, "a", 1), (1, "a", -1), (1, "b", 1), (2, "x", 1))
    assert found() == {1: "b", 2: "x"}
    entry((1, "c", 1), (1, "b", -1))  # an update, the new row first
    assert found() == {1: "c", 2: "x"}
    entry((1, "c", -1), (1, "d", 1), (1, "d", -1), (1, "c", 1))  # there and back
    assert found() == {1: "c", 2: "x"}
    entry((1, "c", -1), (1, "d", 1), (1, "d", -1), (2, "x", -1), (3, "y", 1))
    assert found() == {3: "y"}
    assert log.table("t").get([1, 2, 3]).to_pylist()[0]["_index"] == 2


def test_rows_of_one_entry_count_by_their_sum_not_by_the_last(log: EmbeddedLog) -> None:
    """Written twice and taken away once it is there; the other way round it is not."""
    log.create_topic("sums", "k bigint, v int", key="k", kind="changes")
    for weights, there in (([1, 1, -1], [1]), ([-1, -1, 1], [])):
        log.append("sums", [{"k": 1, "v": 1, "_weight": one} for one in weights])
        assert log.table("sums").scan().read_all().column("v").to_pylist() == there


@pytest.mark.parametrize("seed", range(30))
def test_an_entry_in_several_batches_says_what_it_says_in_one(seed: int, tmp_path: Path) -> None:
    """Old rows go and new ones come in any order, over any borders; also rows that come and go.

    Not here: two rows of one key that are there at once in an earlier batch.
    """
    rng = random.Random(seed)
    with hr.connect(tmp_path / "log") as log:
        log.create_topic("t", "id bigint, v bigint", key="id", kind="changes")
        now: dict[int, int] = {}
        fresh = iter(range(10**6))
        for _ in range(8):
            after = {key: now.get(key, -1) for key in rng.sample(range(12), 6) if key in now}
            after |= {key: next(fresh) for key in rng.sample(range(12), 5)}
            took = [(-1, key, value) for key, value in now.items() if after.get(key) != value]
            gave = [(1, key, value) for key, value in after.items() if now.get(key) != value]
            rows = took + gave
            rng.shuffle(rows)
            for passing in rng.sample(range(50, 60), 3):
                at = rng.randrange(len(rows) + 1)
                rows.insert(at, (1, passing, 0))
                rows.insert(rng.randrange(at + 1, len(rows) + 1), (-1, passing, 0))
            cuts = sorted(rng.sample(range(len(rows) + 1), 3))
            parts = [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
            schema = pa.schema([("_weight", pa.int64()), ("id", pa.int64()), ("v", pa.int64())])
            batches = [
                pa.RecordBatch.from_pylist(
                    [dict(zip(schema.names, row, strict=True)) for row in part], schema
                )
                for part in parts
                if part
            ]
            reader = pa.RecordBatchReader.from_batches(schema, batches)
            log.append("t", log.stage("t", reader))
            now = after
            found = log.table("t").scan().read_all()
            assert {row["id"]: row["v"] for row in found.to_pylist()} == now


def test_a_table_is_what_reading_from_the_start_comes_to_after_retention(tmp_path: Path) -> None:
    """Whether its index was built before the rows went or after: it is derived. R-A14"""
    with hr.connect(tmp_path / "log") as log:
        log.create_topic("t", "k bigint, v bigint", key="k", partitions=2)
        log.append("t", [{"k": k, "v": 0} for k in range(300)])
        keeper = log.keeper()
        keeper.turn(close=True)
        kept = log.append("t", [{"k": k, "v": 1} for k in range(0, 300, 3)]).position
        assert log.table("t").scan().read_all().num_rows == 300
        log.set_topic("t", retention_seconds=0)
        keeper.turn()
        keeper.release()
        read = {row["k"]: row["v"] for batch in log.read("t") for row in batch.to_pylist()}
        assert len(read) == 100
        for at in (None, kept):
            scanned = log.table("t").scan(at=at).read_all().to_pylist()
            assert {row["k"]: row["v"] for row in scanned} == read
            for count in (6, 300):
                found = log.table("t").get(list(range(count)), at=at)
                assert found.column("k").to_pylist() == list(range(0, count, 3))
                assert found.column("_index").to_pylist() == list(range(0, count, 3))
    shutil.rmtree(tmp_path / "log" / "tables", ignore_errors=True)
    with hr.connect(tmp_path / "log") as log:
        scanned = log.table("t").scan().read_all().to_pylist()
        assert {row["k"]: row["v"] for row in scanned} == read
