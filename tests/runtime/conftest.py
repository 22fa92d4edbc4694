"""What the tests of a running project share: a PostgreSQL server, and projects that are ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.testing.postgres import Server
from tests.runtime.kit import Running, alive, commands, family, until


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A server that all tests of this worker share."""
    with Server() as server:
        yield server


@pytest.fixture(scope="module")
def running() -> Iterator[Callable[[Path], Running]]:
    """Starts projects; in the end they are stopped, and nothing of them may be left."""
    with contextlib.ExitStack() as stack:

        def make(folder: Path) -> Running:
            made = Running(folder)
            stack.callback(end, made)
            made.start()
            return made

        yield make


def end(running: Running) -> None:
    if running.ended():
        return
    processes = family(running.pid)
    running.stop()
    until(lambda: not alive(processes), f"the end of {commands(alive(processes))}", 20)
