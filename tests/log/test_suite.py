"""The conformance suite of logs, on the embedded one, and on copies of it that break a promise.

Caught: a check that cannot fail. Not caught: what the suite says of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.interfaces import Part
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.transaction import Transaction
from headrace.model.records import Receipt
from headrace.testing import log_suite
from headrace.testing.log_suite import CHECKS, Open


@pytest.fixture
def opening(tmp_path: Path) -> Iterator[Callable[[type[EmbeddedLog]], Open]]:
    opened: list[EmbeddedLog] = []

    def of(kind: type[EmbeddedLog]) -> Open:
        def open_log() -> EmbeddedLog:
            opened.append(kind(tmp_path / "log"))
            return opened[-1]

        return open_log

    yield of
    for log in opened:
        log.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_embedded_log_conforms(check: Callable[[Open], None], opening: Any) -> None:
    check(opening(EmbeddedLog))


class NoConditions(EmbeddedLog):
    def append_entry(self, parts: Any, control: Any, **more: Any) -> Receipt:
        return super().append_entry(parts, control, **{**more, "require": {}})


class Unsynced(EmbeddedLog):
    def append_entry(self, parts: Any, control: Any, **more: Any) -> Receipt:
        return super().append_entry(parts, control, **{**more, "durability": "os"})


class Split(EmbeddedLog):
    def append_entry(self, parts: Sequence[Part], control: Any, **more: Any) -> Receipt:
        nothing: Any = {"expect": {}, "require": {}}
        for part in parts[1:]:
            super().append_entry([part], {}, **nothing)
        return super().append_entry(parts[:1], control, **more)


class Forgetful(EmbeddedLog):
    def append(self, topic: str, rows: Any, **more: Any) -> Receipt:
        kept = {name: more[name] for name in ("expect", "require") if name in more}
        return super().append(topic, rows, **kept)


class Deaf(EmbeddedLog):
    def read(self, topics: Any, *start: Any, **more: Any) -> Any:
        return super().read(topics, *start, **{**more, "follow": False})


class TakesHalf(EmbeddedLog):
    def append(self, topic: str, rows: Any, **more: Any) -> Receipt:
        for row in rows[:-1]:
            super().append(topic, [row])
        return super().append(topic, rows[-1:], **more)


class Eager(EmbeddedLog):
    def transaction(self, **more: Any) -> Transaction:
        log = self

        class Now(Transaction):
            def put(self, name: str, value: Any) -> None:
                log.append_entry([], {"values": {name: value}}, expect={}, require={})

        return Now(self, **more)


BROKEN = [
    (NoConditions, "a_condition_that_fails_takes_nothing"),
    (NoConditions, "a_writer_stores_once_and_is_fenced"),
    (Unsynced, "what_is_acknowledged_is_read_by_others"),
    (Split, "an_entry_is_seen_whole_or_not_at_all"),
    (Split, "staged_rows_come_with_the_entry_that_names_them"),
    (Eager, "an_entry_is_seen_whole_or_not_at_all"),
    (Forgetful, "what_is_said_beside_the_rows_is_kept"),
    (Deaf, "a_follower_is_woken"),
    (TakesHalf, "bad_rows_are_refused_whole"),
]


@pytest.mark.parametrize(("kind", "check"), BROKEN, ids=lambda one: getattr(one, "__name__", one))
def test_a_broken_log_does_not(
    kind: type[EmbeddedLog], check: str, opening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_suite, "PATIENCE_SECONDS", 1.0)
    with pytest.raises(AssertionError):
        getattr(log_suite, check)(opening(kind))
