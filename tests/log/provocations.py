"""The errors of consumer groups and of what retention took, provoked by calls."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

import headrace as hr
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.groups.consumer import Consumer


def _log(folder: str) -> EmbeddedLog:
    log = hr.connect(folder)
    log.create_topic("t", "a bigint")
    log.append("t", [{"a": 1}, {"a": 2}])
    return log


def _reading(folder: str) -> tuple[EmbeddedLog, Consumer]:
    log = _log(folder)
    consumer = log.consumer("t", "g")
    next(consumer)
    return log, consumer


def put_out(folder: str, _: pytest.MonkeyPatch) -> None:
    log, consumer = _reading(folder)
    log.reset_group("g", "latest", force=True)
    consumer.commit()


def left(folder: str, _: pytest.MonkeyPatch) -> None:
    consumer = _reading(folder)[1]
    consumer.close()
    consumer.commit()


def moved(folder: str, _: pytest.MonkeyPatch) -> None:
    log, consumer = _reading(folder)
    with log.transaction() as transaction:
        consumer.commit_in(transaction)
        log.consumer("t", "g").close()


def unknown_group(folder: str, _: pytest.MonkeyPatch) -> None:
    log = _reading(folder)[0]
    log.group("h")


def in_use(folder: str, _: pytest.MonkeyPatch) -> None:
    log, consumer = _reading(folder)
    assert consumer.assignment
    log.reset_group("g", "earliest")


def exists(folder: str, _: pytest.MonkeyPatch) -> None:
    log = _reading(folder)[0]
    log.copy_group("g", "g")


def full(folder: str, _: pytest.MonkeyPatch) -> None:
    log = _reading(folder)[0]
    log.set_topic("t", flow="backpressure", flow_rows=2, flow_seconds=0.01)
    log.append("t", [{"a": 3}])


def gone(folder: str, patch: pytest.MonkeyPatch) -> None:
    log = _log(folder)
    log.consumer("t", "g").close()
    patch.setattr(log, "starts", lambda _: [1])
    next(log.consumer("t", "g"))


def deleted(folder: str, _: pytest.MonkeyPatch) -> None:
    log = _log(folder)
    shutil.rmtree(folder)
    with pytest.raises(hr.errors.Unknown):
        log.append("t", [{"a": 3}])
    log.append("t", [{"a": 3}])


PROVOCATIONS: dict[str, list[Callable[[str, pytest.MonkeyPatch], None]]] = {
    "HR-LOG-031": [gone],
    "HR-LOG-033": [deleted],
    "HR-GROUP-001": [put_out, left],
    "HR-GROUP-002": [moved],
    "HR-GROUP-003": [unknown_group],
    "HR-GROUP-004": [in_use],
    "HR-GROUP-005": [exists],
    "HR-GROUP-006": [full],
}
