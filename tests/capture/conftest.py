"""One PostgreSQL server for the tests of a worker, and an empty database for each of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

import headrace as hr
from headrace.log.embedded.log import EmbeddedLog
from headrace.testing.postgres import Server, fresh_database

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Database:
    """An empty database of a server."""

    server: Server
    name: str

    def dsn(self, **more: str) -> str:
        return self.server.dsn(self.name, **more)

    def connect(self, *, autocommit: bool = True, **more: str) -> psycopg.Connection[Any]:
        return self.server.connect(self.name, autocommit=autocommit, **more)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A server that all tests of this worker share."""
    with Server() as server:
        yield server


@pytest.fixture
def database(postgres: Server) -> Iterator[Database]:
    """An empty database in the shared server, dropped afterwards with its slots."""
    with fresh_database(postgres, f"test_{next(_numbers)}") as name:
        yield Database(postgres, name)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EmbeddedLog]:
    """An empty log."""
    with hr.connect(tmp_path / "log") as log:
        yield log
