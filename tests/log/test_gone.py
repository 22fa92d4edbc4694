"""The folder of an open log is deleted, moved or replaced.

Caught: entries acknowledged that nobody will ever find; an old handle that writes its next
file, its counters or its partition ends into the log that somebody has made at the same path since.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from tests.log.kit import checked, rows


def opened(folder: Path) -> EmbeddedLog:
    small = 1 << 16
    return hr.connect(folder, journal_bytes_first=small, journal_bytes_max=small, background=False)


def made(folder: Path, count: int) -> EmbeddedLog:
    log = opened(folder)
    log.create_topic("t", "id bigint, text string")
    fill(log, count)
    return log


def fill(log: EmbeddedLog, count: int) -> None:
    """Some twenty of them fill a journal file."""
    for number in range(count):
        log.append("t", [{"id": number, "text": "x" * 2000}])


def replaced(folder: Path) -> EmbeddedLog:
    """Another log at this path, three journal files long."""
    shutil.rmtree(folder)
    return made(folder, 60)


def test_what_is_appended_to_a_deleted_log_is_not_acknowledged(tmp_path: Path) -> None:
    log = made(tmp_path / "log", 1)
    shutil.rmtree(tmp_path / "log")
    with pytest.raises(errors.Unknown, match="was deleted, moved or replaced"):
        fill(log, 1)
    with pytest.raises(errors.LogGone):
        fill(log, 1)
    assert len(rows(log.read("t"))) == 1
    log.close()


def test_a_log_that_is_closed_after_its_folder_was_deleted_says_nothing(tmp_path: Path) -> None:
    with made(tmp_path / "log", 1):
        shutil.rmtree(tmp_path / "log")


def test_what_waits_for_its_sync_in_a_deleted_log_is_told_by_the_next_append(
    tmp_path: Path,
) -> None:
    log = made(tmp_path / "log", 1)
    shutil.rmtree(tmp_path / "log")
    log.append("t", [{"id": 2}], durability="os")
    with pytest.raises(errors.LogGone):
        log.sync()
    with pytest.raises(errors.LogGone):
        log.append("t", [{"id": 3}], durability="os")


def test_a_moved_log_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    log = made(tmp_path / "log", 3)
    (tmp_path / "log").rename(tmp_path / "moved")
    with pytest.raises(errors.Unknown):
        fill(log, 1)
    log.close()
    with hr.connect(tmp_path / "moved") as again:
        assert [row["id"] for row in rows(again.read("t"))][:3] == [0, 1, 2]


def test_an_old_handle_does_not_put_its_next_file_into_a_new_log(tmp_path: Path) -> None:
    old = made(tmp_path / "log", 1)
    new = replaced(tmp_path / "log")
    for _ in range(60):
        with pytest.raises((errors.Unknown, errors.LogGone)):
            old.append("t", [{"id": 7, "text": "x" * 2000}], durability="os")
            old.sync()
    old.close()
    new.close()
    with hr.connect(tmp_path / "log") as again:
        assert [row["id"] for row in rows(again.read("t"))] == list(range(60))
    checked(str(tmp_path / "log"))


def test_an_old_handle_rolls_into_no_new_log(tmp_path: Path) -> None:
    old = made(tmp_path / "log", 1)
    new = replaced(tmp_path / "log")
    with pytest.raises(errors.LogGone):
        for _ in range(60):
            old.append("t", [{"id": 7, "text": "x" * 2000}], durability="os")
    assert len(rows(new.read("t"))) == 60
    new.close()
    checked(str(tmp_path / "log"))


def test_an_old_handle_does_not_share_counters_and_ends_with_a_new_log(tmp_path: Path) -> None:
    made(tmp_path / "log", 1).close()
    old = opened(tmp_path / "log")
    new = replaced(tmp_path / "log")
    new.append("t", [{"id": 60}], expect={"mine": 0})
    for conditions in ({}, {"mine": 1}):
        with pytest.raises((errors.Unknown, errors.LogGone)):
            old.append("t", [{"id": 7}], expect=conditions)
    assert new.counter("mine") == 1
    assert new.ends("t") == [61]


def test_an_old_keeper_deletes_nothing_of_a_new_log(tmp_path: Path) -> None:
    old = made(tmp_path / "log", 1)
    keeper = old.keeper()
    assert keeper.take()
    new = replaced(tmp_path / "log")
    new.keeper().turn(close=True)
    with pytest.raises(errors.LogGone):
        keeper.turn()
    assert len(rows(new.read("t"))) == 60
