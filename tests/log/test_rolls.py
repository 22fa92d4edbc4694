"""Journal files that fill up: checkpoints, rolls, counter runs, with files as small as allowed.

Caught: state that a checkpoint forgets, a roll that loses or repeats, counters that are wrong after
their runs were merged, files left behind. Not caught: rolls cut by a crash; see `tests/faults`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from tests.log.kit import TINY, Machine, checked, files_in, forget_live, machine_log, values


def test_everything_survives_many_rolls(folder: str) -> None:
    """Topics, offsets, values, counters and rows are the same after many files. R-A9 R-A10"""
    with hr.connect(folder, **TINY) as log:
        log.create_topic("t", "a bigint, pad string", key="a", partitions=3)
        for i in range(300):
            with log.transaction(durability="os") as transaction:
                transaction.append("t", [{"a": i, "pad": "x" * 300}])
                transaction.expect(f"c/{i % 7}", i // 7)
                transaction.put("last", i)
                transaction.commit_offsets("g", {"t": {i % 3: i}})
            if i % 100 == 50:
                log.create_topic(f"t{i}", "a bigint", partitions=2)
                log.alter_topic("t", add=f"c{i} int")
    assert len(files_in(folder, "journal")) > 6
    for _ in range(2):
        with hr.connect(folder) as log:
            assert sorted(values(log.read("t"))) == list(range(300))
            assert [topic.name for topic in log.topics()] == ["t", "t50", "t150", "t250"]
            assert log.topic("t").schema.version == 4
            assert [log.counter(f"c/{n}") for n in range(7)] == [43] * 6 + [42]
            assert log.value("last") == 299
            assert log.offsets("g") == {"t": {0: 297, 1: 298, 2: 299}}
        forget_live(folder)
    checked(folder)


def test_an_entry_larger_than_a_file_gets_a_larger_file(folder: str) -> None:
    """An inline entry that no file would hold rolls to one that is large enough. R-A9"""
    with hr.connect(folder, **TINY) as log:
        log.create_topic("t", "a bigint, pad binary")
        for a in range(10):
            log.append("t", [{"a": a, "pad": b"x" * 100_000}])
            log.append("t", [{"a": a}])
        assert values(log.read("t")) == [a for a in range(10) for _ in range(2)]
    sizes = [os.path.getsize(path) for path in Path(folder, "journal").glob("*.log")]
    assert max(sizes) > 100_000
    checked(folder)


def test_a_file_holds_so_many_entries_at_most(folder: str) -> None:
    """A file rolls after its number of entries too, so that opening folds no more. R-A4"""
    with hr.connect(folder, journal_entries_max=10) as log:
        log.create_topic("t", "a bigint")
        for a in range(100):
            log.append("t", [{"a": a}], durability="os")
        log.sync()
        assert values(log.read("t")) == list(range(100))
    assert len(files_in(folder, "journal")) >= 10
    checked(folder)


def test_a_full_disk_at_a_roll(folder: str) -> None:
    """When there is no room for the next file the entry is refused, and goes through later. R-D3"""
    machine = Machine()
    with machine_log(folder, machine, background=False, **TINY) as log:
        log.create_topic("t", "a bigint, pad string")

        def fails(call: str, path: str) -> OSError | None:
            full = call == "create" and "/journal/" in path
            return OSError(errno.ENOSPC, "No space left on device") if full else None

        machine.fails = fails
        taken = 0
        with pytest.raises(errors.DiskFull):
            while True:
                log.append("t", [{"a": taken, "pad": "x" * 1000}])
                taken += 1
        for _ in range(3):
            with pytest.raises(errors.DiskFull):
                log.append("t", [{"a": -1}])
        assert values(log.read("t")) == list(range(taken))
        machine.fails = lambda call, path: None
        log.append("t", [{"a": taken}])
        assert values(log.read("t")) == list(range(taken + 1))
    checked(folder)


def test_a_log_on_a_full_disk_is_closed_all_the_same(folder: str) -> None:
    """There is no room for a mark; what was taken is synced, also what did not wait for it."""
    machine = Machine()
    with machine_log(folder, machine, background=False, **TINY) as log:
        log.create_topic("t", "a bigint, pad string")
        full = OSError(errno.ENOSPC, "No space left on device")
        machine.fails = lambda call, path: full if call == "create" else None
        taken = 0
        with contextlib.suppress(errors.DiskFull):
            while True:
                log.append("t", [{"a": taken, "pad": "x" * 1000}], durability="os")
                taken += 1
    machine.fails = lambda call, path: None
    with hr.connect(folder) as log:
        assert values(log.read("t")) == list(range(taken))


def test_marks_take_no_position(folder: str) -> None:
    """Synced marks at the end of a quiet log are no entries, and do not pile up. R-A4"""
    with hr.connect(folder, background=False) as log:
        log.create_topic("t", "a bigint")
        log.append("t", [{"a": 1}])
        position = log.position
        end = log.journal.live.tail().end
        for _ in range(5):
            log.tick()
        assert log.position == position
        assert log.journal.live.tail().end <= end + 256
    for _ in range(5):
        hr.connect(folder).close()
    with hr.connect(folder) as log:
        assert log.position == position
        assert log.journal.live.tail().end <= end + 256
    assert checked(folder).entries == 2


def test_a_hundred_thousand_counters(folder: str) -> None:
    """100,000 counters are right over rolls, merged runs, a reopening and a boot. R-A15"""
    settings: dict[str, Any] = {"journal_bytes_first": 64 << 10, "journal_bytes_max": 256 << 10}
    with hr.connect(folder, **settings, durability="os", background=False) as log:
        log.create_topic("t", "a bigint")
        for start in range(0, 100_000, 500):
            log.append("t", [], expect={f"counter/{i}": 0 for i in range(start, start + 500)})
        for start in range(0, 10_000, 500):
            log.append("t", [], expect={f"counter/{i}": 1 for i in range(start, start + 500)})
        with pytest.raises(errors.Conflict):
            log.append("t", [], expect={"counter/7": 1})

    def right(log: EmbeddedLog) -> bool:
        some = [*range(0, 100_000, 4999), 9_999, 10_000, 99_999, 100_000]
        expected = [2 if i < 10_000 else 1 if i < 100_000 else 0 for i in some]
        return [log.counter(f"counter/{i}") for i in some] == expected

    assert len(files_in(folder, "journal")) > 4
    with hr.connect(folder, background=False) as log:
        assert right(log)
        assert len(log.journal.live.counters()) >= 100_000
    forget_live(folder)
    with hr.connect(folder, background=False) as log:
        assert right(log)
        log.append("t", [], expect={"counter/99999": 1})
    checked(folder)


def test_old_counter_runs_are_removed(folder: str) -> None:
    """Counter runs that no kept checkpoint names are deleted, the named ones are not. R-A4"""
    with hr.connect(folder, **TINY) as log:
        log.create_topic("t", "a bigint, pad string")
        for i in range(400):
            log.append("t", [{"a": i, "pad": "x" * 300}], expect={f"c/{i}": 0}, durability="os")
        log.sync()
        runs = files_in(folder, "counters")
        assert len(runs) < len(files_in(folder, "journal"))
        assert len(runs) <= 12
    forget_live(folder)
    with hr.connect(folder) as log:
        assert all(log.counter(f"c/{i}") == 1 for i in range(0, 400, 13))


def test_large_entries_over_rolls(folder: str) -> None:
    """Entries by reference are found from every journal file. R-A9"""
    with hr.connect(folder, **TINY, inline_bytes_max=2000, chunk_bytes=1000) as log:
        log.create_topic("t", "a bigint")
        for i in range(30):
            log.append("t", pa.table({"a": range(i * 1000, i * 1000 + 1000)}))
        assert values(log.read("t")) == list(range(30_000))
        assert values(log.read("t", start=12_345)) == list(range(12_345, 30_000))
    assert checked(folder).pieces == 30
