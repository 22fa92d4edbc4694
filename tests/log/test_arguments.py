"""Arguments of a wrong Python type: an error that says which, and never a guess.

Caught: what Python or numpy say passed on without a code; booleans taken for partitions, which
chose others than meant. Not caught: names of arguments that there are not: Python says so itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pandas as pd
import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from tests.log.kit import rows

NOT_A_TIME: Any = pd.NaT
WRONG_TYPES: dict[str, Callable[[Any], object]] = {
    "topics": lambda log: log.read(None),
    "topic": lambda log: log.append(["t"], [{"a": 1}]),
    "columns": lambda log: log.read("t", columns=5),
    "column": lambda log: log.read("t", columns=[["a"]]),
    "partitions that are no numbers": lambda log: log.read("t", partitions=[True, False, True]),
    "partition": lambda log: log.read("t", start={True: 0}),
    "start": lambda log: log.read("t", start=NOT_A_TIME),
    "sent_time": lambda log: log.append("t", [{"a": 1}], sent_time=NOT_A_TIME),
    "timeout as text": lambda log: log.read("t", follow=True, timeout="1"),
    "timeout": lambda log: log.wait(1, timedelta(seconds=1)),
    "timeout that is no number": lambda log: log.read("t", follow=True, timeout=math.nan),
    "consumer": lambda log: log.consumer(None, "g"),
    "key": lambda log: log.create_topic("u", "a int", key=5),
    "event time": lambda log: log.create_topic("u", "a timestamp", event_time=["a"]),
    "widen": lambda log: log.alter_topic("t", widen="a bigint"),
    "type": lambda log: log.alter_topic("t", widen={"a": int}),
    "retire": lambda log: log.alter_topic("t", retire=5),
    "offsets": lambda log: log.transaction().commit_offsets("g", {"t": 5}),
    "producer": lambda log: log.producer("t", rows_max="5"),
    "folder": lambda _: hr.connect(None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", WRONG_TYPES)
def test_arguments_of_a_wrong_type_are_errors_of_the_catalogue(log: EmbeddedLog, what: str) -> None:
    log.create_topic("t", "a int", partitions=3)
    with pytest.raises(errors.UsageError):
        WRONG_TYPES[what](log)


def test_one_partition_and_no_end_of_waiting_can_be_given_as_they_are(log: EmbeddedLog) -> None:
    log.create_topic("t", "a int", partitions=3)
    log.append("t", [{"a": 1}], partition=2)
    one: Any = 2
    assert len(rows(log.read("t", partitions=one))) == 1
    assert next(log.read("t", follow=True, timeout=math.inf)).position == 2
