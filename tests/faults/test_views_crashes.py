"""Drivers that are killed at every operation, power cuts, two drivers at once; without Spark.

Can catch: what `headrace.testing.views_crash` says, here with few points and seeds. Cannot catch:
the rest of the points (`./run faults views --only crash`), and what a real JVM does
(tests/pipelines/test_views_bank.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from headrace.log.embedded.log import EmbeddedLog
from headrace.pipelines.pipeline import Input
from headrace.pipelines.views.define import Views
from headrace.pipelines.views.source import Source, input_identity, input_schema
from headrace.testing.views_case import (
    Driver,
    append_entry,
    defined_as,
    make_topics,
    pipeline_of,
)
from headrace.testing.views_crash import explore, raced
from headrace.testing.views_history import TABLES, Row
from headrace.testing.views_plain import plain_case

ROW: Row = (1, "a", 0.5)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
def test_after_a_crash_at_any_operation_all_is_as_without(seed: int) -> None:
    found = explore(plain_case(f"crash{seed}"), points=12, bound=5, again=0.02)
    assert found.wrong == []
    assert found.opened > 20


@pytest.mark.timeout(600)
def test_a_crash_at_every_operation_of_one_run() -> None:
    case = plain_case("small4")
    found = explore(case, points=0, bound=1)
    assert found.wrong == []
    assert found.points > 100


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, 20, 5))
def test_two_drivers_and_a_writer_at_once(first: int) -> None:
    for seed in range(first, first + 5):
        assert raced(plain_case(f"race{seed}"), str(seed)) == ""


def test_a_batch_is_through_the_entry_that_came_while_it_read(tmp_path: Any) -> None:
    with EmbeddedLog(tmp_path) as log:
        make_topics(log, [TABLES["s"]])
        append_entry(log, {"s": [(ROW, 1)]})
        one = Input("s", "s", "stream")
        known = {"s": input_identity(log, one)}, {"s": input_schema(log, one)}
        source = Source(log, {"s": one}, Views({}, *known), 0, 1 << 30)
        poll, calls = source._reading.poll, 0

        def meanwhile() -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:  # it was asked where the log ends, and has not read yet
                append_entry(log, {"s": [(ROW, 1)]})
            return poll()

        source._reading.poll = meanwhile  # type: ignore[method-assign]
        _, rows = source.take()
        assert (rows, source.through) == (2, log.position)
        source.close()


def test_two_drivers_that_start_at_once_make_the_topics_together(
    tmp_path: Any, monkeypatch: Any
) -> None:
    case = plain_case("topics")
    with EmbeddedLog(tmp_path) as log, defined_as(case.views):
        make_topics(log, case.tables)
        Driver(pipeline_of(case.views, case.tables), log).close()
        monkeypatch.setattr(log, "topics", list)  # what the second one saw a moment before
        Driver(pipeline_of(case.views, case.tables), log).close()
