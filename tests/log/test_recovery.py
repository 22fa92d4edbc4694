"""Opening again: after a close, a kill, a boot, a copy, a failed sync, and damage.

These tests use the real filesystem and real kills. Caught: anything acknowledged that is gone or
there twice, a log that does not open, damage that is not noticed or makes more unreadable than it
hit. Not caught: what only a power cut does to a disk; `tests/faults` enumerates that.
"""

from __future__ import annotations

import errno
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded.check import check
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.system import OsFile, OsShared, OsSystem
from tests.log.kit import (
    TINY,
    Child,
    Machine,
    checked,
    files_in,
    flip,
    forget_live,
    machine_log,
    values,
)


def filled(folder: str, entries: int = 60, **settings: Any) -> int:
    """A closed log with a = 0, 1, 2, ...; the number of its newest journal file."""
    with hr.connect(folder, **settings) as log:
        log.create_topic("t", "a bigint, pad string")
        for a in range(entries):
            log.append("t", [{"a": a, "pad": "x" * 200}], expect={"c": a}, durability="os")
    return int(files_in(folder, "journal")[-1][:8])


def content(log: EmbeddedLog) -> tuple[list[int], int, int, list[int]]:
    return values(log.read("t")), log.position, log.counter("c"), log.ends("t")


def test_reopened_it_is_the_same(folder: str) -> None:
    """A log that was closed is the same when it is opened, and goes on. R-A4"""
    filled(folder)
    expected = (list(range(60)), 61, 60, [60])
    for _ in range(3):
        with hr.connect(folder) as log:
            assert content(log) == expected
    with hr.connect(folder, create=False) as log:
        log.append("t", [{"a": 60}], expect={"c": 60})
        assert values(log.read("t")) == list(range(61))
    checked(folder)


def test_without_shared_memory_it_is_the_same(folder: str) -> None:
    """Shared memory and locks are derived: without them the log is the same. R-A4"""
    filled(folder, 200, **TINY)
    for name in ("live", "locks"):
        shutil.rmtree(os.path.join(folder, name))
    with hr.connect(folder, **TINY) as log:
        assert content(log) == (list(range(200)), 201, 200, [200])
        log.append("t", [{"a": 200}], expect={"c": 200})
    forget_live(folder)
    with hr.connect(folder) as log:
        assert content(log) == (list(range(201)), 202, 201, [201])
    checked(folder)


def test_a_boot_changes_nothing_that_was_acknowledged(folder: str) -> None:
    """After a boot the log has all that was acknowledged, and does not trust shared memory. R-A4"""
    machine = Machine()
    for boot in range(4):
        machine.boot = bytes([boot]) * 16
        log = machine_log(folder, machine, background=False, **TINY)
        log.create_topic("t", "a bigint", exist_ok=True)
        assert values(log.read("t")) == list(range(boot * 10))
        for a in range(boot * 10, boot * 10 + 10):
            log.append("t", [{"a": a}], expect={"c": a})
        # No close: the machine goes down as it is.
        log._finalizer.detach()
    checked(folder)


def test_a_copy_is_a_log_of_its_own(folder: str, tmp_path: Path) -> None:
    """A copied folder opens with all of it, and goes its own way. R-A4"""
    filled(folder, 100, **TINY)
    copy = str(tmp_path / "copy")
    with hr.connect(folder) as log:
        shutil.copytree(folder, copy)
        log.append("t", [{"a": 100}])
        with hr.connect(copy) as other:
            assert values(other.read("t")) == list(range(100))
            other.append("t", [{"a": -1}])
            assert values(other.read("t"))[-1] == -1
        log.append("t", [{"a": 101}])
        assert values(log.read("t")) == list(range(102))
    checked(folder)
    checked(copy)


STREAM = """
    log = hr.connect(folder, journal_bytes_first=16384, journal_bytes_max=32768)
    a = log.counter("c")
    while True:
        log.append("t", [{"a": a, "pad": "x" * 300}] * 2, expect={"c": a})
        say(a)
        a += 1
"""


def test_killed_in_mid_stream(folder: str) -> None:
    """What a process killed at any moment was told is there, once and whole. R-A4 R-A15"""
    with hr.connect(folder) as log:
        log.create_topic("t", "a bigint, pad string")
    acknowledged = -1
    for turn in range(5):
        with Child(folder, STREAM) as child:
            for _ in range(20 + 13 * turn):
                acknowledged = int(child.line())
            child.kill()
            rest = child.process.stdout
            assert rest is not None
            acknowledged = max([acknowledged, *map(int, rest.read().split())])
        if turn % 2:
            forget_live(folder)
        with hr.connect(folder) as log:
            found = values(log.read("t"))
            assert found == [a for a in range(len(found) // 2) for _ in range(2)]
            assert acknowledged < len(found) // 2 <= acknowledged + 2
            assert log.counter("c") == len(found) // 2
    checked(folder)


def test_killed_with_others_at_work(folder: str) -> None:
    """When one of several processes is killed, the others go on and nothing is lost. R-A4"""
    with hr.connect(folder) as log:
        log.create_topic("t", "a bigint, pad string")
        own = """
            log = hr.connect(folder)
            say("ready")
            for i in range(100000):
                log.append("t", [{"a": int(sys.argv[2]) * 1000000 + i}])
                say(i)
        """
        with Child(folder, own, 1) as one, Child(folder, own, 2) as two:
            for child in (one, two):
                assert child.line() == "ready"
            told = max(int(one.line()) for _ in range(30))
            one.kill()
            before = int(two.line())
            while int(two.line()) < before + 30:
                pass
            log.append("t", [{"a": 3_000_000}])
            two.kill()
        found = values(log.read("t"))
        ones = [a - 1_000_000 for a in found if 1_000_000 <= a < 2_000_000]
        assert ones == list(range(len(ones)))
        assert len(ones) > told
        assert found.count(3_000_000) == 1
    checked(folder)


def test_the_next_opener_syncs_for_a_dead_writer(folder: str) -> None:
    """What a dead process wrote without a sync becomes visible when somebody opens the log. R-A4"""
    code = """
        log = hr.connect(folder, background=False)
        log.create_topic("t", "a bigint")
        for a in range(20):
            log.append("t", [{"a": a}], durability="os")
        say(log.position)
        os.kill(os.getpid(), 9)
    """
    with Child(folder, code) as child:
        seen = int(child.line())
        child.process.wait()
    with hr.connect(folder) as log:
        assert log.position > seen
        assert values(log.read("t")) == list(range(20))


# --- a failed sync --------------------------------------------------------------------------------


def test_a_counter_moved_by_an_entry_that_was_carried_over_stays_moved(folder: str) -> None:
    """Carried to a new file after a failed sync, then a roll, then a boot: the run must have it."""
    machine = Machine()
    log = machine_log(folder, machine, background=False)
    log.create_topic("t", "a bigint")
    log.append("t", [{"a": 0}])
    machine.fails = lambda call, path: OSError(errno.EIO, "") if call == "fdatasync" else None
    with pytest.raises(errors.Unknown):
        log.append("t", [{"a": 1}], expect={"c": 0})
    machine.fails = lambda call, path: None
    with machine_log(folder, machine, background=False) as other:
        assert other.counter("c") == 1
        other.journal.close_file()
    log.close()
    shutil.rmtree(f"{folder}/live")
    with hr.connect(folder) as again:
        assert again.counter("c") == 1


def test_a_poisoned_log_heals_when_it_is_opened(folder: str) -> None:
    """After a failed sync the next opener keeps all positions, and the log goes on. R-A4"""
    machine = Machine()
    log = machine_log(folder, machine, background=False)
    log.create_topic("t", "a bigint")
    log.append("t", [{"a": 0}])
    told = log.append("t", [{"a": 1}], durability="os")

    def fails(call: str, path: str) -> OSError | None:
        return OSError(errno.EIO, "Input/output error") if call == "fdatasync" else None

    machine.fails = fails
    with pytest.raises(errors.Unknown):
        log.append("t", [{"a": 2}], expect={"c": 0})
    with pytest.raises(errors.LogPoisoned):
        log.append("t", [{"a": 3}], durability="os")
    with pytest.raises(errors.LogPoisoned):
        log.sync()
    assert values(log.read("t")) == [0]
    machine.fails = lambda call, path: None
    with pytest.raises(errors.LogPoisoned):  # trying again is not enough
        log.append("t", [{"a": 4}])
    with machine_log(folder, machine, background=False) as other:
        found = [
            (position, a)
            for batch in other.read("t")
            for position, a in zip(
                batch.positions.to_pylist(), batch.data["a"].to_pylist(), strict=True
            )
        ]
        assert found[1] == (told.position, 1)
        assert [a for _, a in found] == [0, 1, 2]
        assert other.counter("c") == 1
        other.append("t", [{"a": 5}])
        log.append("t", [{"a": 6}])
        assert values(log.read("t")) == [0, 1, 2, 5, 6]
    log.close()
    checked(folder)


# --- damage ---------------------------------------------------------------------------------------


def test_damage_in_an_old_file_is_named_and_stepped_over(folder: str) -> None:
    """A reader meets damage as an error with its place, and can go on behind it. R-D3"""
    filled(folder, 200, **TINY)
    path = os.path.join(folder, "journal", files_in(folder, "journal")[1])
    flip(path, 9000)
    with hr.connect(folder) as log:
        found: list[int] = []
        reading = iter(log.read("t"))
        with pytest.raises(errors.LogDamaged) as caught:
            for batch in reading:
                found += values([batch])
        details = caught.value.details
        assert details["file"] == path
        assert isinstance(details["offset"], int)
        assert 8000 < details["offset"] <= 9000
        assert details["expected"] != details["found"]
        after = details["resume_after"]
        assert isinstance(after, int)
        rest = values(log.read("t", after=after))
        assert len(found) + len(rest) == 199
        assert sorted(found + rest) == sorted(set(range(200)) - ({*range(200)} - {*found, *rest}))
        log.append("t", [{"a": 200}], expect={"c": 200})  # the newest file is sound
    report = check(OsSystem(), folder)
    assert [problem.details["file"] for problem in report.problems] == [path]


@pytest.mark.parametrize("how", ["header", "file"])
def test_a_reading_that_begins_in_damage_says_so(folder: str, how: str) -> None:
    """What comes next and is damaged is not left out without a word. R-D3"""
    filled(folder, 200, **TINY)
    second, third = (Path(folder, "journal", name) for name in files_in(folder, "journal")[1:3])
    data = second.read_bytes()
    at = data.rindex(b"HRlog", 0, 9000) if how == "header" else 0
    position, received = (int.from_bytes(data[at + n : at + n + 8], "little") for n in (32, 64))
    if how == "header":
        flip(str(second), at + 40)
    else:  # a file in another's place: nothing in it is what it should be
        shutil.copy(third, second)
    after = position - (how == "header")
    ways: list[dict[str, Any]] = [
        {"after": after},
        {"start": datetime.fromtimestamp(received / 1e6, UTC)},
    ]
    with hr.connect(folder) as log:
        for start in ways:
            with pytest.raises(errors.LogDamaged) as caught:
                values(log.read("t", **start))
        resume = caught.value.details["resume_after"]
        assert isinstance(resume, int)
        assert resume > after
        assert values(log.read("t", after=resume)) == list(range(resume - 1, 200))


def test_damage_in_the_newest_file_refuses_appends(folder: str) -> None:
    """Damage below the synced end leaves what is intact to be read, and no more. R-A4 R-D3"""
    newest = filled(folder, 50)
    path = os.path.join(folder, "journal", f"{newest:08d}.log")
    before = Path(path).read_bytes()
    middle = before.rindex(b"HRlog", 0, len(before.rstrip(b"\0")) // 2)
    flip(path, middle + 40)  # the chain of one header
    forget_live(folder)
    damaged = Path(path).read_bytes()
    for _ in range(2):
        with hr.connect(folder) as log:
            with pytest.raises(errors.LogDamaged) as caught:
                log.append("t", [{"a": 99}])
            assert caught.value.details["offset"] == middle
            for what_entries_say in (log.counter, log.value, log.values, log.offsets):
                with pytest.raises(errors.LogDamaged):  # not what older ones said
                    what_entries_say("c")
            found: list[int] = []
            with pytest.raises(errors.LogDamaged) as caught:
                for batch in log.read("t"):
                    found += values([batch])
            after = caught.value.details["resume_after"]
            assert isinstance(after, int)
            found += values(log.read("t", after=after))
            assert len(found) == 49
            assert log.position == 51
    assert Path(path).read_bytes() == damaged
    flip(path, middle + 40)
    forget_live(folder)
    with hr.connect(folder) as log:
        assert content(log) == (list(range(50)), 51, 50, [50])
    checked(folder)


def test_a_torn_tail_is_not_damage(folder: str) -> None:
    """What was never synced and is not whole after a boot is cut off, without a word. R-A4"""
    machine = Machine()
    machine.boot = b"a" * 16
    log = machine_log(folder, machine, background=False)
    log.create_topic("t", "a bigint, pad string")
    log.append("t", [{"a": 0, "pad": "x"}])
    end = log.journal.live.tail().end
    log.append("t", [{"a": 1, "pad": "y" * 1000}], durability="os")
    log.append("t", [{"a": 2, "pad": "z" * 1000}], durability="os")
    log._finalizer.detach()
    path = os.path.join(folder, "journal", "00000001.log")
    flip(path, (end & ((1 << 40) - 1)) + 400)
    machine.boot = b"b" * 16
    with machine_log(folder, machine, background=False) as log:
        assert values(log.read("t")) == [0]
        log.append("t", [{"a": 3}])
        assert values(log.read("t")) == [0, 3]
        assert log.ends("t") == [2]
    checked(folder)


def test_a_missing_newest_file_is_named(folder: str) -> None:
    """And not the one before it, which is whole. R-D3"""
    newest = filled(folder, 200, **TINY)
    path = os.path.join(folder, "journal", f"{newest:08d}.log")
    os.unlink(path)
    (problem,) = check(OsSystem(), folder).problems
    assert problem.details["file"] == path
    assert problem.details["found"] == "no file"


def test_a_missing_piece_is_damage(folder: str) -> None:
    """A large entry whose file is gone or changed is damage; the rest is read. R-D3"""
    with hr.connect(folder, inline_bytes_max=1000) as log:
        log.create_topic("t", "a bigint, pad string")
        log.append("t", [{"a": 0}])
        log.append("t", [{"a": 1, "pad": "x" * 5000}])
        log.append("t", [{"a": 2}])
        (piece,) = files_in(folder, "pieces")
        path = os.path.join(folder, "pieces", piece)
        flip(path, 3000)
        for _ in range(2):
            with pytest.raises(errors.LogDamaged) as caught:
                values(log.read("t"))
            assert caught.value.details["file"] == path
            after = caught.value.details.get("resume_after")
            if os.path.exists(path):
                assert isinstance(after, int)
                assert values(log.read("t", after=after)) == [2]
                os.unlink(path)
        log.append("t", [{"a": 3}])
    report = check(OsSystem(), folder)
    assert [problem.details["file"] for problem in report.problems] == [path]


def test_a_changed_format_file_is_damage(folder: str) -> None:
    """A format file that is not what it was does not open as another log. R-D3"""
    filled(folder, 3)
    path = os.path.join(folder, "headrace.json")
    text = Path(path).read_text()
    for changed in ("", "{}", text.replace('"format": 1', '"format": 0'), text[:-20]):
        Path(path).write_text(changed)
        with pytest.raises(errors.LogDamaged) as caught:
            hr.connect(folder)
        assert caught.value.details["file"] == path
    Path(path).write_text(text.replace('"format": 1', '"format": 7'))
    with pytest.raises(errors.LogDamaged, match="names format 7") as caught:
        hr.connect(folder)
    assert "newer Headrace" in caught.value.fix
    Path(path).write_text(text)
    with hr.connect(folder) as log:
        assert values(log.read("t")) == [0, 1, 2]


def test_a_counter_run_that_changed_is_damage(folder: str) -> None:
    """Counters are not guessed when their run is damaged and shared memory is gone. R-D3"""
    filled(folder, 200, **TINY)
    run = os.path.join(folder, "counters", files_in(folder, "counters")[-1])
    flip(run, 70)
    forget_live(folder)
    with pytest.raises(errors.LogDamaged) as caught:
        hr.connect(folder)
    assert caught.value.details["file"] == run
    assert not check(OsSystem(), folder).ok


def test_opening_reads_the_newest_file_only(folder: str) -> None:
    """What opening reads after a boot does not grow with what the log holds. R-A4"""
    filled(folder, 1500, **TINY)
    forget_live(folder)
    machine = Machine()
    machine_log(folder, machine, background=False).close()
    held = sum(path.stat().st_size for path in Path(folder, "journal").iterdir())
    assert held > 30 * (32 << 10)
    assert machine.read_bytes < 16 * (32 << 10)  # 4 KB for each of some 50 records, and more


def test_a_half_made_folder_is_made(folder: str) -> None:
    """A folder left by a crash while the log was made becomes a log. R-A4"""
    for name in ("journal", "live", "locks"):
        os.makedirs(os.path.join(folder, name))
    Path(folder, "journal", "00000001.log").write_bytes(b"HRlog")
    Path(folder, "headrace.json.new").write_bytes(b"{")
    with hr.connect(folder) as log:
        log.create_topic("t", "a bigint")
        log.append("t", [{"a": 1}])
        assert values(log.read("t")) == [1]
    checked(folder)


# -- a disk that cannot be written -----------------------------------------------------------------


class Unwritable(OsSystem):
    """A machine after a boot, whose disk is full or read-only."""

    def __init__(self, number: int, boot: bytes = b"after the reboot") -> None:
        self.error = OSError(number, os.strerror(number))
        self.boot = boot

    def boot_id(self) -> bytes:
        return self.boot

    def create(self, path: str, size: int) -> OsFile:
        raise self.error

    def map(self, path: str, size: int) -> OsShared:
        if self.error.errno == errno.EROFS or not os.path.exists(path):
            raise self.error
        return super().map(path, size)

    def open(self, path: str, *, create: bool = False) -> OsFile:
        if create and self.error.errno == errno.EROFS:
            raise self.error
        return OsFile(path, os.open(path, os.O_RDWR if create else os.O_RDONLY))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_cannot_be_written_can_be_read(folder: str, number: int) -> None:
    """After a boot all is read that recovery would keep; only appends are refused. L18"""
    filled(folder, **TINY)
    machine = f"{folder}-after"
    with hr.connect(folder) as log:
        log.append("t", [{"a": 60}], expect={"c": 60})
        log.append("t", [{"a": 61}], expect={"c": 61})
        shutil.copytree(folder, machine)
    before = disk(machine)
    with EmbeddedLog(machine, system=Unwritable(number)) as reader:
        assert content(reader) == (list(range(62)), 63, 62, [62])
        assert values(reader.read("t", after=31, through=41)) == list(range(30, 40))
        refused = errors.DiskFull if number == errno.ENOSPC else errors.ReadOnlyDisk
        for _ in range(2):
            with pytest.raises(refused, match=os.strerror(number)) as caught:
                reader.append("t", [{"a": 62}])
            assert "open the log again" in caught.value.fix
        with pytest.raises(refused):
            reader.create_topic("other", "a bigint")
        with pytest.raises(refused):
            list(reader.read("t", follow=True))
        with pytest.raises(refused):
            reader.wait(64)
        with pytest.raises(refused):
            reader.keeper().turn()
    assert disk(machine) == before
    with hr.connect(machine) as log:
        log.append("t", [{"a": 62}], expect={"c": 62})
        assert values(log.read("t")) == list(range(63))


def test_a_failed_sync_is_not_forgotten_by_a_recovery_that_fails(folder: str) -> None:
    """No room for the marker and for the new file: what was not synced is copied all the same."""
    machine = Machine()
    log = machine_log(folder, machine, background=False)
    log.create_topic("t", "a bigint")
    log.append("t", [{"a": 0}])
    numbers = {"fdatasync": errno.EIO, "create": errno.ENOSPC}
    machine.fails = lambda call, _: OSError(numbers[call], call) if call in numbers else None
    with pytest.raises(errors.Unknown):
        log.append("t", [{"a": 1}])
    with machine_log(folder, machine) as reader:
        assert values(reader.read("t")) == [0]
    machine.fails = lambda call, path: None
    with machine_log(folder, machine) as again:
        assert values(again.read("t")) == [0, 1]
        assert again.journal.closed_files[-1].cut == "poisoned"
    log.close()


def test_where_others_append_a_reader_without_rights_sees_what_is_synced(folder: str) -> None:
    """The same boot: what is not synced yet could still be lost, so it is not shown. L18"""
    with hr.connect(folder, quiet_seconds=1000.0) as log:
        log.create_topic("t", "a bigint")
        log.append("t", [{"a": 0}])
        log.append("t", [{"a": 1}], durability="os")
        boot = OsSystem().boot_id()
        with EmbeddedLog(folder, system=Unwritable(errno.EROFS, boot)) as reader:
            assert values(reader.read("t")) == [0]
        log.sync()
        with EmbeddedLog(folder, system=Unwritable(errno.EROFS, boot)) as reader:
            assert values(reader.read("t")) == [0, 1]


def disk(folder: str) -> dict[str, bytes]:
    """Everything that is not derived."""
    paths = sorted(Path(folder).rglob("*"))
    return {str(p): p.read_bytes() for p in paths if p.is_file() and p.parent.name != "live"}
