"""How each error of followers is provoked."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable

import pytest

import headrace as hr
from headrace.derived import aside
from headrace.derived.follower import Follower
from headrace.interfaces import Kept

Provocation = Callable[[str, pytest.MonkeyPatch], None]


def _followed(folder: str, target: hr.Table | hr.SQLite | None = None, name: str = "log") -> None:
    with hr.connect(os.path.join(folder, name)) as log:
        log.create_topic("t", "k bigint, v int", key="k", kind="changes", exist_ok=True)
        place = target or hr.SQLite(os.path.join(folder, "t.db"))
        kept = Kept("p", "main", {"t": "t"}, frozenset(), place)
        with Follower(log, kept, patience=0) as follower:
            follower.run("caught up")


def away(folder: str, patch: pytest.MonkeyPatch) -> None:
    _followed(folder, hr.Table("postgresql://127.0.0.1:1/x"))


def not_ours(folder: str, patch: pytest.MonkeyPatch) -> None:
    os.makedirs(folder, exist_ok=True)
    with sqlite3.connect(os.path.join(folder, "t.db")) as other:
        other.execute("create table t (x)")
    other.close()
    _followed(folder)


def stopped(folder: str, patch: pytest.MonkeyPatch) -> None:
    _followed(folder)
    with hr.connect(os.path.join(folder, "log")) as log:
        log.alter_topic("t", retype={"v": "string"})
    _followed(folder)


def other_log(folder: str, patch: pytest.MonkeyPatch) -> None:
    _followed(folder)
    _followed(folder, name="another")


def bad_address(folder: str, patch: pytest.MonkeyPatch) -> None:
    _followed(folder, hr.Table("no address at all"))


def unknown_aside(folder: str, patch: pytest.MonkeyPatch) -> None:
    _followed(folder)
    with hr.connect(os.path.join(folder, "log")) as log:
        aside.one_of(log, "p/main", "t", '{"k": 1}')


PROVOCATIONS: dict[str, list[Provocation]] = {
    "HR-FOLLOW-001": [away],
    "HR-FOLLOW-002": [not_ours],
    "HR-FOLLOW-003": [stopped],
    "HR-FOLLOW-004": [other_log],
    "HR-FOLLOW-005": [bad_address],
    "HR-FOLLOW-006": [unknown_aside],
}
