"""`expect`, `require` and writers: the one primitive of coordination, from many sides.

Caught: a condition that is not checked, two winners of one value, an entry stored twice after a
retry, a zombie that gets through, an `Unknown` that is not resolved by the claim. Not caught: an
interleaving of two processes that did not happen in this run; the schedules of `tests/faults` are
exhaustive on a small scale.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.system import OsShared, OsSystem
from tests.log.kit import Child, Machine, checked, machine_log, rows, values


def test_expect_compares_and_moves(log: EmbeddedLog) -> None:
    """An entry that expects v is taken if the counter is v, and makes it v + 1. R-A15"""
    log.create_topic("t", "a bigint")
    assert log.counter("orders/7") == 0
    for value in range(3):
        log.append("t", [{"a": value}], expect={"orders/7": value})
    assert log.counter("orders/7") == 3
    before = log.position
    for wrong in (2, 4, 0):
        with pytest.raises(errors.Conflict) as caught:
            log.append("t", [{"a": 99}], expect={"orders/7": wrong})
        details = caught.value.details
        assert (details["counter"], details["expected"], details["found"]) == ("orders/7", wrong, 3)
    assert log.position == before
    assert log.counter("orders/7") == 3
    assert values(log.read("t")) == [0, 1, 2]


def test_require_compares_only(log: EmbeddedLog) -> None:
    """An entry that requires v is taken if the counter is v, and leaves it. R-A15"""
    log.create_topic("t", "a bigint")
    log.append("t", [{"a": 0}], require={"epoch": 0})
    log.append("t", [{"a": 1}], expect={"epoch": 0})
    log.append("t", [{"a": 2}], require={"epoch": 1})
    with pytest.raises(errors.Conflict) as caught:
        log.append("t", [{"a": 3}], require={"epoch": 0}, expect={"other": 0})
    assert caught.value.details["kind"] == "require"
    assert (log.counter("epoch"), log.counter("other")) == (1, 0)
    assert values(log.read("t")) == [0, 1, 2]


def test_conditions_hold_together_or_not_at_all(log: EmbeddedLog) -> None:
    """If one of several conditions fails, no counter moves. R-A15"""
    log.create_topic("t", "a bigint")
    log.append("t", [{"a": 0}], expect={"x": 0, "y": 0})
    with pytest.raises(errors.Conflict):
        log.append("t", [{"a": 1}], expect={"x": 1, "y": 0, "z": 0})
    assert [log.counter(name) for name in "xyz"] == [1, 1, 0]


def test_a_condition_without_rows_is_an_entry(log: EmbeddedLog) -> None:
    """Conditions alone move counters and have a position. R-A15"""
    log.create_topic("t", "a bigint")
    before = log.position
    receipt = log.append("t", [], expect={"x": 0})
    assert receipt.position > before
    assert receipt.rows == 0
    assert log.counter("x") == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"x": -1},
        {"x": "1"},
        {"x": 0.0},
        {"x": False},
        {"x": 2**64},
        {"x": None},
        {5: 0},
        {"\ud800": 0},
    ],
)
def test_bad_conditions(log: EmbeddedLog, bad: dict[Any, Any]) -> None:
    """A condition is a name and a number from 0 on; all else is refused. R-D3"""
    log.create_topic("t", "a bigint")
    before = log.position
    with pytest.raises(errors.BadRows):
        log.append("t", [{"a": 1}], expect=bad)
    with pytest.raises(errors.BadRows):
        log.append("t", [{"a": 1}], require=bad)
    with pytest.raises(errors.BadRows), log.transaction() as transaction:
        ((name, value),) = bad.items()
        transaction.expect(name, value)
    assert log.position == before
    log.append("t", [{"a": 1}])


@pytest.mark.parametrize("bad", [5, [("x", 0)], "x"])
def test_conditions_are_named(log: EmbeddedLog, bad: Any) -> None:
    log.create_topic("t", "a bigint")
    for condition in ("expect", "require"):
        with pytest.raises(errors.BadRows):
            log.append("t", [{"a": 1}], **{condition: bad})
    with pytest.raises(errors.BadSetting):
        log.counter(["x"])  # type: ignore[arg-type]


def test_two_requirements_that_cannot_both_hold(log: EmbeddedLog) -> None:
    """The first is not forgotten for the second."""
    transaction = log.transaction()
    transaction.require("x", 1)
    transaction.require("x", 1)
    with pytest.raises(errors.BadRows, match="1 and 0"):
        transaction.require("x", 0)


RACE = """
    log = hr.connect(folder)
    say("ready"); sys.stdin.readline()
    won = 0
    while True:
        value = log.counter("c")
        if value >= 60:
            break
        try:
            log.append("t", [{"a": value}], expect={"c": value}, durability="os")
            won += 1
        except errors.Conflict as conflict:
            assert conflict.details["found"] > value
    say(won)
"""


def test_two_processes_on_one_counter(log: EmbeddedLog) -> None:
    """Of all who expect the same value, exactly one is taken. R-A15"""
    log.create_topic("t", "a bigint")
    with Child(log.path, RACE) as one, Child(log.path, RACE) as two:
        for child in (one, two):
            assert child.line() == "ready"
        for child in (one, two):
            child.go()
        won = [int(child.wait()) for child in (one, two)]
    log.sync()
    assert sum(won) == 60
    assert values(log.read("t")) == list(range(60))
    checked(log.path)


def test_counters_survive(folder: str) -> None:
    """Counters are what they were after closing and opening. R-A15"""
    with hr.connect(folder) as log:
        log.create_topic("t", "a bigint")
        for value in range(5):
            log.append("t", [], expect={"x": value})
    with hr.connect(folder) as log:
        assert log.counter("x") == 5
        with pytest.raises(errors.Conflict):
            log.append("t", [], expect={"x": 4})


@pytest.mark.parametrize("short_cut", ["0", "1"])
def test_where_counters_find_no_room_their_entry_is_not_taken(
    folder: str, monkeypatch: pytest.MonkeyPatch, short_cut: str
) -> None:
    """The table of counters grows before the entry is written: the error says it is not. R-A4"""
    full, mapped = True, OsSystem.map

    def no_space(self: OsSystem, path: str, size: int) -> OsShared:
        if full and "/counters." in path:
            raise OSError(errno.ENOSPC, "No space left on device")
        return mapped(self, path, size)

    monkeypatch.setenv("HEADRACE_SHORTCUT", short_cut)
    with hr.connect(folder) as log:
        log.create_topic("t", "a bigint")
        monkeypatch.setattr(OsSystem, "map", no_space)
        taken = []
        with pytest.raises(errors.DiskFull):
            for number in range(1000):
                log.append("t", [{"a": number}], expect={f"c{number}": 0})
                taken.append(number)
        with pytest.raises(errors.DiskFull):
            log.append("t", [{"a": -1}], expect={f"d{number}": 0 for number in range(1000)})
        full = False
        log.append("t", [{"a": 1000}], expect={f"d{number}": 0 for number in range(1000)})
        assert values(log.read("t")) == [*taken, 1000]
        assert (log.counter("d999"), log.counter("c0"), log.counter(f"c{len(taken)}")) == (1, 1, 0)


# --- writers --------------------------------------------------------------------------------------


def test_a_writer_knows_what_it_stored(log: EmbeddedLog) -> None:
    """Who claims a name learns how many entries it has stored, and its state. R-A15"""
    log.create_topic("t", "a bigint")
    writer = log.writer("capture/shop")
    assert (writer.version, writer.state) == (0, None)
    writer.append("t", [{"a": 0}], state={"lsn": "0/16B3748"})
    writer.append("t", [{"a": 1}], state={"lsn": "0/16B3750"})
    writer.append("t", [{"a": 2}])
    assert writer.version == 3
    again = log.writer("capture/shop")
    assert again.version == 3
    assert again.state == {"lsn": "0/16B3750"}
    assert again.epoch > writer.epoch


def test_a_retry_is_stored_once(log: EmbeddedLog) -> None:
    """An entry with its number is stored once, however often it is sent. R-A15"""
    log.create_topic("t", "a bigint")
    writer = log.writer("w")
    for version in (0, 0, 1, 0, 1, 2, 2):
        receipt = writer.append("t", [{"a": version}], version=version)
        assert receipt.duplicate == (receipt.rows == 0)
    assert values(log.read("t")) == [0, 1, 2]
    again = log.writer("w")
    assert again.append("t", [{"a": 2}], version=2).duplicate
    assert not again.append("t", [{"a": 3}], version=3).duplicate
    with pytest.raises(errors.Conflict):
        again.append("t", [{"a": 9}], version=9)
    assert values(log.read("t")) == [0, 1, 2, 3]


def test_a_claim_fences_older_holders(log: EmbeddedLog) -> None:
    """After a claim nothing of an older holder is taken, also what it had prepared. R-A15"""
    log.create_topic("t", "a bigint")
    old = log.writer("w")
    old.append("t", [{"a": 1}])
    prepared = old.transaction()
    prepared.append("t", [{"a": 2}])
    new = log.writer("w")
    uses: list[Callable[[], object]] = [
        lambda: old.append("t", [{"a": 3}]),
        lambda: old.append("t", [{"a": 3}], version=1),
        prepared.commit,
    ]
    for use in uses:
        with pytest.raises(errors.Fenced) as caught:
            use()
        assert "'w'" in caught.value.fact
    assert isinstance(caught.value, errors.Conflict)
    new.append("t", [{"a": 4}])
    with pytest.raises(errors.Fenced):
        old.append("t", [{"a": 5}])
    assert values(log.read("t")) == [1, 4]


def test_a_zombie_process_is_fenced(log: EmbeddedLog) -> None:
    """A process that held the name and did not notice is fenced by the other's claim. R-A15"""
    log.create_topic("t", "a bigint")
    code = """
        log = hr.connect(folder)
        writer = log.writer("w")
        writer.append("t", [{"a": 1}])
        say("holds"); sys.stdin.readline()
        for _ in range(3):
            try:
                writer.append("t", [{"a": 66}])
                say("got through")
            except errors.Fenced:
                say("fenced")
    """
    with Child(log.path, code) as child:
        assert child.line() == "holds"
        successor = log.writer("w")
        assert successor.version == 1
        child.go()
        assert [child.line() for _ in range(3)] == ["fenced"] * 3
        child.wait()
    successor.append("t", [{"a": 2}])
    assert values(log.read("t")) == [1, 2]


def test_writers_of_two_names_do_not_meet(log: EmbeddedLog) -> None:
    """Names that look alike are different writers. R-A15"""
    log.create_topic("t", "a bigint")
    writers = {name: log.writer(name) for name in ("a", "a/epoch", "epoch/a", "A", "a/", "epoch")}
    for _ in range(3):
        for name, writer in writers.items():
            writer.append("t", [{"a": 1}], state=name)
    assert {name: writer.version for name, writer in writers.items()} == dict.fromkeys(writers, 3)
    assert all(writer.state == name for name, writer in writers.items())


def test_a_commit_said_by_hand_stores_once_too(log: EmbeddedLog) -> None:
    """A transaction of a version that is stored has nothing to commit, `with` or not. R-A15"""
    log.create_topic("t", "a bigint")
    writer = log.writer("w")
    for again in (False, True):
        transaction = writer.transaction(version=0)
        transaction.append("t", [{"a": 1}])
        assert transaction.commit().duplicate is again
        with pytest.raises(errors.BadRows, match="is over"):
            transaction.commit()
    assert values(log.read("t")) == [1]
    assert writer.version == log.writer("w").version == 1


@pytest.mark.parametrize("version", [-1, 0.0, "0", False])
def test_a_version_is_a_number_from_0_on(log: EmbeddedLog, version: Any) -> None:
    """Rows of version -1 are not rows that were stored before. R-D3"""
    log.create_topic("t", "a bigint")
    writer = log.writer("w")
    writer.append("t", [{"a": 1}])
    with pytest.raises(errors.BadSetting):
        writer.append("t", [{"a": 2}], version=version)


def test_a_writers_transaction(log: EmbeddedLog) -> None:
    """A writer's transaction is its next entry: all of it, once. R-A15"""
    log.create_topic("t", "a bigint")
    log.create_topic("u", "a bigint")
    writer = log.writer("w")
    for _ in range(2):
        with writer.transaction(version=0, state=17) as transaction:
            if transaction.receipt is None:
                transaction.append("t", [{"a": 1}])
                transaction.append("u", [{"a": 2}])
                transaction.expect("x", 0)
    assert transaction.receipt is not None
    assert transaction.receipt.duplicate
    assert (values(log.read("t")), values(log.read("u"))) == ([1], [2])
    assert (writer.version, writer.state, log.counter("x")) == (1, 17, 1)


# --- unknown --------------------------------------------------------------------------------------


def fail_syncs(machine: Machine) -> None:
    def fails(call: str, path: str) -> OSError | None:
        if call == "fdatasync" and path.endswith(".log"):
            return OSError(errno.EIO, "Input/output error")
        return None

    machine.fails = fails


def test_a_failed_sync_is_unknown_and_resolved_by_the_claim(folder: str) -> None:
    """After `Unknown` the claim says what was taken, and a retry stores it once. R-A15 R-A4"""
    machine = Machine()
    log = machine_log(folder, machine, background=False)
    log.create_topic("t", "a bigint")
    writer = log.writer("w")
    writer.append("t", [{"a": 0}], version=0)
    fail_syncs(machine)
    with pytest.raises(errors.Unknown):
        writer.append("t", [{"a": 1}], version=1)
    with pytest.raises(errors.LogPoisoned):
        log.append("t", [{"a": 9}])
    assert values(log.read("t")) == [0]
    log.close()
    machine.fails = lambda call, path: None
    with machine_log(folder, machine, background=False) as again:
        writer = again.writer("w")
        assert writer.version in (1, 2)
        for version in (0, 1, 2):
            writer.append("t", [{"a": version}], version=version)
        assert values(again.read("t")) == [0, 1, 2]
    checked(folder)


def test_poison_is_for_every_process(folder: str) -> None:
    """After a failed sync no process appends, and all read what was synced. R-A4"""
    machine = Machine()
    log = machine_log(folder, machine, background=False)
    log.create_topic("t", "a bigint")
    log.append("t", [{"a": 0}])
    code = """
        log = hr.connect(folder)
        say("ready"); sys.stdin.readline()
        try:
            log.append("t", [{"a": 5}])
            say("appended")
        except errors.LogPoisoned as error:
            say(error.code)
        say([row["a"] for batch in log.read("t") for row in batch.to_pylist()])
    """
    with Child(folder, code) as child:
        assert child.line() == "ready"
        fail_syncs(machine)
        with pytest.raises(errors.Unknown):
            log.append("t", [{"a": 1}])
        child.go()
        assert child.line() == "HR-LOG-007"
        assert child.line() == "[0]"
        child.wait()
    log.close()


def test_a_write_that_fails_is_not_taken(folder: str) -> None:
    """If the write itself fails, nothing was taken, and the next append goes on. R-A15 R-D3"""
    machine = Machine()
    with machine_log(folder, machine, background=False) as log:
        log.create_topic("t", "a bigint")
        log.append("t", [{"a": 0}], expect={"c": 0})
        failures = iter([OSError(errno.EIO, "Input/output error")])

        def fails(call: str, path: str) -> OSError | None:
            return next(failures, None) if call == "pwritev" and path.endswith(".log") else None

        machine.fails = fails
        with pytest.raises(errors.IoFailed):
            log.append("t", [{"a": 1}], expect={"c": 1})
        assert log.counter("c") == 1
        log.append("t", [{"a": 2}], expect={"c": 1})
        assert [tuple(row.values()) for row in rows(log.read("t"))] == [(0,), (2,)]
    checked(folder)


@pytest.mark.parametrize("look", ["value", "values", "counter", "offsets"])
def test_what_is_shown_of_an_entry_is_on_the_disk(folder: str, look: str) -> None:
    """A value, a counter, an offset that a power cut takes back was never shown. R-A2"""
    with hr.connect(folder, durability="os") as log:
        log.create_topic("t", "a bigint")
        with log.transaction() as transaction:
            transaction.append("t", [{"a": 1}])
            transaction.put("here", 7)
            transaction.commit_offsets("group", {"t": {0: 1}})
        getattr(log, look)({"offsets": "group"}.get(look, "here"))
        assert transaction.receipt is not None
        assert log.position >= transaction.receipt.position


@pytest.mark.parametrize("name", ["", None, 5, "\ud800"])
def test_a_writer_has_a_name(log: EmbeddedLog, name: Any) -> None:
    """None, in words, would be a name that strangers share. R-A15"""
    with pytest.raises(errors.BadSetting):
        log.writer(name)


def test_asking_again_and_again_does_not_keep_others_from_appending(log: EmbeddedLog) -> None:
    """Who asks holds the lock of those who append, and Python lets others run only meanwhile."""
    log.create_topic("t", "a bigint")
    over = threading.Event()
    asked = 0

    def ask() -> None:
        nonlocal asked
        while not over.is_set():
            log.counter("c")
            asked += 1

    thread = threading.Thread(target=ask)
    thread.start()
    for i in range(20):
        log.append("t", [{"a": i}])
    over.set()
    thread.join()
    assert asked < 20_000  # 1,000 an append; it was 30,000
