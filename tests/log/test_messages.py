"""A log takes Arrow messages made of plain bytes as it takes any rows. R-A1

Caught: a message stored where it does not fit (other schema, partitions, headers, too large, a
topic with a limit). Not caught: wrong bytes in the message itself (tests/model).
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from headrace.log.embedded.log import EmbeddedLog
from headrace.model.arrow_message import ArrowMessage, MessageForm
from tests.model.test_arrow_message import buffers_of


def message(log: EmbeddedLog, values: list[int], names: list[str]) -> ArrowMessage:
    schema = log.topic("t").schema.arrow
    batch = pa.RecordBatch.from_pydict({"n": values, "name": names}, schema)
    made = MessageForm(schema).message(len(values), [buffers_of(one) for one in batch.columns])
    assert made is not None
    return made


def rows_of(log: EmbeddedLog) -> list[dict[str, Any]]:
    return [row for batch in log.read("t") for row in batch.data.to_pylist()]


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_log_takes_messages_like_any_rows(log: EmbeddedLog, partitions: int) -> None:
    log.create_topic("t", "n bigint, name string", key="n", partitions=partitions)
    receipt = log.append("t", message(log, [1, 2], ["a", "\u00e4"]))
    assert receipt.rows == 2
    with log.transaction() as entry:
        entry.append("t", message(log, [3], ["c"]), headers={"h": "x"})
        entry.append("t", message(log, [4], ["d"]), transactions=[1])
        entry.append("t", message(log, [5], ["e"]))
    assert sorted(row["n"] for row in rows_of(log)) == [1, 2, 3, 4, 5]
    found = {row["n"]: row["name"] for row in rows_of(log)}
    assert found[2] == "\u00e4"


def test_a_message_of_an_older_schema_is_taken_in_anew(log: EmbeddedLog) -> None:
    log.create_topic("t", "n bigint, name string")
    old = message(log, [1], ["a"])
    log.alter_topic("t", add="more int")
    log.append("t", old)
    assert rows_of(log) == [{"n": 1, "name": "a", "more": None}]


def test_a_large_message_goes_by_reference(log: EmbeddedLog) -> None:
    log.create_topic("t", "n bigint, name string")
    long = "x" * (5 << 20)
    log.append("t", message(log, [1], [long]))
    assert rows_of(log) == [{"n": 1, "name": long}]


def test_a_topic_with_a_limit_counts_messages(log: EmbeddedLog) -> None:
    log.create_topic("t", "n bigint, name string")
    log.set_topic("t", flow="drop", flow_rows=1)
    with log.consumer("t", "g"):
        log.append("t", message(log, [1], ["a"]))
        log.append("t", message(log, [2], ["b"]))
    assert log.dropped("t") + len(rows_of(log)) == 2
