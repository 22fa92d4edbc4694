"""Readers that are overtaken by a keeper: nothing is skipped, and nothing is called damaged.

Found by `./run faults kills`, with a keeper among those who are killed. Caught: these two instants,
by hand. Not caught: others; the chaos and the crash enumerator look for them.
"""

from __future__ import annotations

from pathlib import Path

import headrace as hr
from headrace.log.embedded.log import EmbeddedLog


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
