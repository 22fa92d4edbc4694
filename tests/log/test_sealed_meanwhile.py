"""Readers that are overtaken by a keeper: nothing is skipped, and nothing is called damaged.

Two were found by `./run faults kills`, with a keeper among those who are killed, two by reading,
one by readings that went on beside a keeper who compacted all the time.
Caught: these instants, by hand. Not caught: others; chaos and the crash enumerator look for them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded import archive, sealed
from headrace.log.embedded.log import EmbeddedLog
from headrace.model.records import Batch
from tests.log.kit import TINY, values


def some(log: EmbeddedLog, number: int) -> None:
    log.append("t", [{"id": number}])


def seal(log: EmbeddedLog) -> None:
    """Twice, so that the newest checkpoint does not name the journal file any more."""
    keeper = log.keeper()
    for _ in range(2):
        keeper.turn(close=True)
        log.append("other", [{"id": 0}])
    keeper.turn(close=True)
    keeper.release()


def log_in(folder: Path) -> EmbeddedLog:
    log = hr.connect(folder)
    for name in ("t", "other"):
        log.create_topic(name, "id bigint")
    return log


def test_what_is_sealed_while_sealed_files_are_read_is_not_skipped(tmp_path: Path) -> None:
    with log_in(tmp_path / "log") as log:
        some(log, 1)
        seal(log)
        reading = log.read("t", follow=True, timeout=0.1)
        first = next(reading)
        some(log, 2)
        seal(log)
        some(log, 3)
        rest = [row for batch in reading for row in batch.to_pylist()]
        assert first.to_pylist() + rest == [{"id": 1}, {"id": 2}, {"id": 3}]


def test_a_follower_at_the_end_of_a_file_that_is_sealed_and_deleted_goes_on(tmp_path: Path) -> None:
    with log_in(tmp_path / "log") as log:
        reading = log.read("t", follow=True)
        some(log, 1)
        found = reading.poll()
        assert found is not None
        assert reading.poll() is None
        log.keeper().turn(close=True)
        for _ in range(3):
            log.journal.close_file()
            log.append("other", [{"id": 0}])
        some(log, 2)
        following = reading.poll()
        assert following is not None
        assert following.to_pylist() == [{"id": 2}]


def test_rows_that_go_while_sealed_files_are_read_are_told(folder: str) -> None:
    """The reader has the first file open; those behind it go. R-A11"""
    with hr.connect(folder, **TINY) as log:
        log.create_topic("t", "a bigint", partitions=2)
        keeper = log.keeper()
        for number in range(5):
            log.append("t", [{"a": number}] * 10, partition=number % 2)
            keeper.turn(close=True)
        reading = log.read("t")
        assert len(next(reading)) == 10
        log.set_topic("t", retention_bytes=1)
        log.append("t", [{"a": 5}])
        keeper.turn()
        with pytest.raises(errors.OffsetsGone) as told:
            list(reading)
        assert told.value.details["partitions"] == {0: [10, 29], 1: [0, 19]}
        assert values(log.read("t")) == [5]
        keeper.release()


def test_changes_that_are_compacted_while_they_are_read_are_told(folder: str) -> None:
    """Else a row would be there for the reader whose end is gone. R-A14"""
    with hr.connect(folder, **TINY) as log:
        log.create_topic("t", "a bigint", key="a", kind="changes")
        log.set_topic("t", compact=True, grace_seconds=0)
        keeper = log.keeper()
        log.hold("me", log.position)
        for rows in ([{"a": 1}, {"a": 2}], [{"a": 1, "_weight": -1}], [{"a": 3}]):
            log.append("t", rows)
            keeper.turn(close=True)
        reading = log.read("t")
        assert len(next(reading)) == 2
        log.release("me")
        keeper.turn(compact=True)
        with pytest.raises(errors.BadPosition, match="is whole from position"):
            list(reading)
        assert values(log.read("t")) == [2, 3]
        keeper.release()


def test_rows_that_are_compacted_while_their_file_is_read_come_once(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last entry of the old file is in the new one too, which comes next. R-A14"""
    monkeypatch.setattr(sealed, "GROUP_ROWS", 10)
    with hr.connect(folder, **TINY) as log:
        log.create_topic("t", "a bigint", key="a")
        log.set_topic("t", compact=True)
        keeper = log.keeper()
        for number in range(8):
            log.append("t", [{"a": 5 * number + n} for n in range(5)])
        keeper.turn(close=True)
        reading = log.read("t")
        found = [next(reading)]
        keeper.turn(compact=True)
        found += reading
        assert values(found) == list(range(40))
        ends = [(batch.position, batch.last) for batch in found]
        assert ends == sorted(ends)
        assert ends[-1][1]
        keeper.release()


def test_what_was_read_before_damage_is_handed_out(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an entry larger than a row group too: the rows that are intact come first. R-D3"""
    monkeypatch.setattr(sealed, "GROUP_ROWS", 10)
    with hr.connect(folder, **TINY) as log:
        log.create_topic("t", "a bigint")
        pieces = [log.stage("t", [{"a": 10 * n + i} for i in range(10)]) for n in range(3)]
        log.append("t", pieces)
        keeper = log.keeper()
        keeper.turn(close=True)
        keeper.release()
        (name,) = os.listdir(f"{folder}/sealed")
        path = Path(folder) / "sealed" / name
        content = bytearray(path.read_bytes())
        (file,) = log.journal.control.sealed.files.values()
        reader = archive.open_sealed(log.journal.system, folder, file)
        start, length, *_ = reader._groups[1]
        reader.close()
        content[start + length // 2] ^= 1
        path.write_bytes(content)
        found: list[Batch] = []
        with pytest.raises(errors.LogDamaged):
            for batch in log.read("t"):
                found.append(batch)  # noqa: PERF402 (what came before the error counts)
        assert values(found) == list(range(10))
        assert not found[-1].last
