"""The errors of queries, provoked; `tests/test_provoke_errors.py` walks through them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

import headrace as hr


def asked(folder: str, text: str, memory: str = "1GB") -> None:
    with hr.connect(folder) as log:
        log.create_topic("t", "a bigint")
        hr.sql(log, text, memory=memory)


def no_duckdb(folder: str, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "duckdb", None)
    asked(folder, "select 1")


PROVOCATIONS: dict[str, Callable[[str, pytest.MonkeyPatch], object]] = {
    "HR-SQL-001": no_duckdb,
    "HR-SQL-002": lambda folder, _: asked(folder, "select a +"),
    "HR-SQL-003": lambda folder, _: asked(folder, "select * from tt"),
    "HR-SQL-004": lambda folder, _: asked(folder, "select * from read_csv('/etc/passwd')"),
    "HR-SQL-005": lambda folder, _: asked(
        folder, "select list(range) from range(100000000)", memory="20MB"
    ),
}
