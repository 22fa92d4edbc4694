"""Fixtures of the tests of the log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace as hr
from headrace.log.embedded.log import EmbeddedLog


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Where a log can be made."""
    return str(tmp_path / "log")


@pytest.fixture
def log(folder: str) -> Iterator[EmbeddedLog]:
    """A new log with its defaults."""
    with hr.connect(folder) as log:
        yield log
