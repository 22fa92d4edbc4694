"""Running the command line, in this process or in others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.cli.main import run


@dataclass
class Done:
    """What a command came to."""

    code: int
    data: bytes
    err: str

    @property
    def out(self) -> str:
        return self.data.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def rows(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> Any:
        return json.loads(self.err.splitlines()[-1])["error"]


Headrace = Callable[..., Done]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Where the log of a test is; nothing is there yet."""
    return str(tmp_path / "data")


@pytest.fixture
def headrace(folder: str, monkeypatch: pytest.MonkeyPatch) -> Headrace:
    """Runs a command on the log of the test, in this process."""
    monkeypatch.setenv("HEADRACE_LOG", folder)

    def call(*arguments: str, stdin: str | bytes = b"") -> Done:
        with CliRunner().isolation(input=stdin) as (out, err, _):
            code = run(list(arguments))
            sys.stdout.flush()
            return Done(code, out.getvalue(), err.getvalue().decode())

    return call


@pytest.fixture
def clicks(headrace: Headrace) -> Headrace:
    """As `headrace`, with a topic 'clicks' in the log."""
    schema = "user bigint not null, url string, at timestamp, price decimal(10,2)"
    done = headrace("topic", "create", "clicks", schema, "--key", "user", "--partitions", "3")
    assert done.code == 0, done.err
    return headrace


def started(
    folder: str, *arguments: str, extra: Mapping[str, str] | None = None, **pipes: Any
) -> subprocess.Popen[bytes]:
    """Start a command in a process of its own; `extra` adds to its environment."""
    environment = os.environ | {"HEADRACE_LOG": folder} | dict(extra or {})
    command = [sys.executable, "-m", "headrace", *arguments]
    return subprocess.Popen(command, env=environment, **pipes)
