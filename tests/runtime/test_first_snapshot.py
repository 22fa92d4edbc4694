"""Nothing is computed or kept from tables that are still read for the first time.

Caught: views and targets that show tables of different moments, as long as a snapshot has not
ended (R-C14). Not caught: a snapshot that says too early that it has ended (tests/capture).
"""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace as hr
from headrace.log.writer import Writer
from headrace.pipelines.views.reading import Status
from headrace.pipelines.views.reading import writer_name as pipeline_writer
from headrace.runtime.parts import being_read, too_early
from headrace.sources.postgres.settings import Settings
from headrace.sources.postgres.state import (
    LIVE,
    SNAPSHOTTING,
    STOPPED,
    State,
    TableState,
    settings_name,
    writer_name,
)


def says(capture: Writer, status: str) -> None:
    """What a capture says of a table that no view reads."""
    tables = {
        "public.orders": TableState("shop.public.orders", ["id"], 1, {"id": 1}, status=LIVE),
        "public.other": TableState("shop.public.other", ["id"], 2, {"id": 1}, status=status),
    }
    state = State("1", 1, "shop", 1, "slot", "publication", lsn=1, tables=tables)
    with capture.transaction(state=state.to_json()) as entry:
        for name, value in state.unsaved("shop").items():
            entry.put_own(name, value)


@pytest.mark.parametrize(
    ("status", "early"), [(SNAPSHOTTING, True), (LIVE, False), (STOPPED, False)]
)
def test_a_pipeline_begins_when_all_its_tables_are_whole(
    tmp_path: Path, status: str, early: bool
) -> None:
    pipeline = hr.Pipeline("p")
    pipeline.table("orders", of="shop.public.orders")
    pipeline.table("other", of="shop.public.other")
    with hr.connect(tmp_path / "data") as log:
        with log.transaction() as entry:
            entry.put(settings_name("shop"), Settings("dbname=x", ("public.*",)).to_json())
        says(log.writer(writer_name("shop")), status)
        assert too_early(log, pipeline) == early
        assert being_read(log, ["shop.public.other"]) == early
        assert not being_read(log, ["shop.public.orders"])


def test_a_table_that_comes_later_is_waited_for_too(tmp_path: Path) -> None:
    """A pipeline that has run before gets another input: what it has is taken in, what is new not.

    The topic is there a moment before the capture says that it reads the table.
    """
    pipeline = hr.Pipeline("p")
    pipeline.table("orders", of="shop.public.orders")
    with hr.connect(tmp_path / "data") as log:
        with log.transaction() as entry:
            entry.put(settings_name("shop"), Settings("dbname=x", ("public.*",)).to_json())
        says(log.writer(writer_name("shop")), SNAPSHOTTING)
        status = Status(1, 1, 1, (), {"v": "1"}, {"shop.public.orders": 0})
        with log.writer(pipeline_writer("p")).transaction(state=status.to_json()):
            pass
        assert not too_early(log, pipeline)
        pipeline.table("newest", of="shop.public.newest")
        assert not too_early(log, pipeline)  # there is no such topic: another error says so
        log.create_topic("shop.public.newest", "id bigint", key="id", kind="changes")
        assert too_early(log, pipeline)
        pipeline = hr.Pipeline("p")
        pipeline.table("other", of="shop.public.other")
        assert too_early(log, pipeline)
        says(log.writer(writer_name("shop")), LIVE)
        assert not too_early(log, pipeline)
