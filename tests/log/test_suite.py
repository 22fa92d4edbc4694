"""The conformance suite of logs, on the embedded one, and on copies of it that break a promise.

Caught: a check that cannot fail. Not caught: what the suite says of itself.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace import errors
from headrace.interfaces import Part
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.groups.admin import GroupFacts
from headrace.log.groups.consumer import Consumer, options_of
from headrace.log.transaction import Transaction
from headrace.model.groups import matches
from headrace.model.records import Receipt
from headrace.testing import group_suite, log_suite
from headrace.testing.group_suite import GROUP_CHECKS
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


@pytest.mark.parametrize("check", [*CHECKS, *GROUP_CHECKS], ids=lambda check: check.__name__)
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


class EachAlone(EmbeddedLog):
    """Members of a group do not know each other: each is handed every row."""

    def consumer(self, topics: Any, group: str, **options: Any) -> Consumer:
        return super().consumer(topics, f"{group} {next(_numbers)}", **options)


class OneGroup(EmbeddedLog):
    """All groups are one."""

    def consumer(self, topics: Any, group: str, **options: Any) -> Consumer:
        return super().consumer(topics, "all", **options)


class NamesOnly(EmbeddedLog):
    """A pattern stands for the topics that are there when somebody joins."""

    def consumer(self, topics: Any, group: str, **options: Any) -> Consumer:
        names = [topic.name for topic in self.topics() if matches(topic.name, topics)]
        return super().consumer(names, group, **options)


class CommitsAtClose(EmbeddedLog):
    """What was handed out counts as done."""

    def consumer(self, topics: Any, group: str, **options: Any) -> Consumer:
        class Hasty(Consumer):
            def close(self) -> None:
                if not self._closed:
                    with contextlib.suppress(errors.MemberPutOut):
                        self.commit()
                super().close()

        return Hasty(self, topics, group, options_of(options))


class NeverCommits(EmbeddedLog):
    def consumer(self, topics: Any, group: str, **options: Any) -> Consumer:
        class Idle(Consumer):
            def commit(self, *_: Any, **__: Any) -> None:
                pass

        return Idle(self, topics, group, options_of(options))


class NobodyHangs(EmbeddedLog):
    def consumer(self, topics: Any, group: str, **options: Any) -> Consumer:
        return super().consumer(topics, group, **{**options, "lease_seconds": 60.0})


class UnknownIsZero(EmbeddedLog):
    def group(self, name: str) -> GroupFacts:
        found = super().group(name)
        lags = (replace(one, committed=one.committed or 0) for one in found.lags)
        return replace(found, lags=tuple(lags))


class AgeOfTheNewest(EmbeddedLog):
    """Lag in seconds is counted from the newest event: who stands still does not grow older."""

    def group(self, name: str) -> GroupFacts:
        found = super().group(name)
        newest = max(lag.oldest_us or 0 for lag in found.lags)
        return replace(found, lags=tuple(replace(lag, now_us=newest) for lag in found.lags))


class MovesAtPreview(EmbeddedLog):
    def reset_group(self, name: str, to: Any, **more: Any) -> Any:
        return super().reset_group(name, to, **{**more, "dry_run": False})


class CopyMoves(EmbeddedLog):
    def copy_group(self, source: str, name: str, to: Any = None) -> Any:
        if to is not None:
            super().reset_group(source, to)
        return super().copy_group(source, name, to)


_numbers = itertools.count()

BROKEN = [
    (EachAlone, "each_group_gets_every_row_and_each_member_its_share"),
    (OneGroup, "each_group_gets_every_row_and_each_member_its_share"),
    (NamesOnly, "a_pattern_takes_up_topics_that_are_made_later"),
    (CommitsAtClose, "who_takes_over_goes_on_at_the_committed_offset"),
    (NeverCommits, "who_takes_over_goes_on_at_the_committed_offset"),
    (EachAlone, "who_comes_and_goes_in_peace_makes_nothing_come_twice"),
    (NeverCommits, "who_was_put_out_commits_nothing"),
    (NoConditions, "a_transaction_of_an_older_generation_is_refused_whole"),
    (NobodyHangs, "a_member_that_hangs_is_put_out"),
    (UnknownIsZero, "lag_is_what_arithmetic_says"),
    (AgeOfTheNewest, "lag_is_what_arithmetic_says"),
    (MovesAtPreview, "a_group_is_moved_to_any_place_and_a_copy_leaves_it_alone"),
    (CopyMoves, "a_group_is_moved_to_any_place_and_a_copy_leaves_it_alone"),
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
    for suite in (log_suite, group_suite):
        monkeypatch.setattr(suite, "PATIENCE_SECONDS", 1.0)
    suite = log_suite if hasattr(log_suite, check) else group_suite
    with pytest.raises(AssertionError):
        getattr(suite, check)(opening(kind))
