"""The last rows of a topic, asked for again and again.

Caught: rows that are missing, repeated or not the last, over partitions, as the topic grows; a look
that walks the log again. Not caught: topics whose columns change their types.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace as hr
from headrace.log.embedded.files import JournalFiles
from headrace.log.tail import last_rows


def test_the_last_rows_as_a_topic_grows(tmp_path: Path) -> None:
    with hr.connect(tmp_path / "log") as log:
        assert last_rows(log, "t", 3) is None
        log.create_topic("t", "a bigint not null", key="a", partitions=2)
        log.create_topic("other", "a bigint")
        assert last_rows(log, "t", 3) is None
        for start in range(0, 20, 4):
            receipt = log.append("t", [{"a": start}])
            log.append("other", [{"a": start}])
            for value in range(start + 1, start + 4):
                receipt = log.append("t", [{"a": value}])
            found = last_rows(log, "t", 3)
            assert found is not None
            assert found.column("a").to_pylist() == [start + 1, start + 2, start + 3]
            assert found.column("_position")[-1].as_py() == receipt.position
            assert found.column("_received_time")[-1].as_py() == receipt.received_time
        anew = hr.connect(tmp_path / "log")
        found = last_rows(anew, "t", 3)
        assert found is not None
        assert found.column("a").to_pylist() == [17, 18, 19]
        anew.close()


def test_a_second_look_reads_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked: list[int] = []
    walk = JournalFiles.walk

    def counted(self, *arguments, **named):  # type: ignore[no-untyped-def]
        for found in walk(self, *arguments, **named):
            walked.append(1)
            yield found

    with hr.connect(tmp_path / "log") as log:
        log.create_topic("t", "a bigint")
        for value in range(200):
            log.append("t", [{"a": value}])
        last_rows(log, "t", 1)
        monkeypatch.setattr(JournalFiles, "walk", counted)
        log.append("t", [{"a": 7}])
        found = last_rows(log, "t", 1)
        assert found is not None
        assert found.column("a").to_pylist() == [7]
        assert len(walked) < 10
