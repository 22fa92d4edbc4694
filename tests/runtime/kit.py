"""A project that runs in a process of its own, and a look at /proc that does not trust it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace import errors
from headrace.runtime.control import ask
from headrace.runtime.project import Project, find_project

PATIENCE_SECONDS = 180.0
"""Until a test gives up; machines that run tests are slow."""


def until(true: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> Any:
    """Wait for something; its value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = true()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} did not come")


def identity(pid: int) -> tuple[int, str] | None:
    """A process and when it began: its number may be used again. None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else (pid, fields[19])


def family(pid: int) -> list[tuple[int, str]]:
    """A process and all that it and they have started."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            text = Path("/proc", name, "stat").read_text()
            parents.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(name))
    found, pending = [], [pid]
    while pending:
        one = pending.pop()
        found.append(identity(one))
        pending += parents.get(one, [])
    return [one for one in found if one is not None]


def alive(processes: list[tuple[int, str]]) -> list[tuple[int, str]]:
    return [one for one in processes if identity(one[0]) == one]


def commands(processes: list[tuple[int, str]]) -> list[str]:
    """What they run, for people."""
    lines = []
    for pid, _ in processes:
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            lines.append(f"{pid} {line.decode(errors='replace')}")
    return lines


class Running:
    """`headrace run` of a project."""

    def __init__(self, folder: Path) -> None:
        self.project: Project = find_project(folder)
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        with open(self.folder / "said", "a") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headrace", "run", "--project", str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                text=True,
            )
        until(lambda: self.answers() or self.ended(), "an answer of the supervisor")

    def answers(self) -> bool:
        with contextlib.suppress(errors.NotRunning):
            return bool(ask(self.project, "list")["ok"])
        return False

    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def part(self, name: str) -> dict[str, Any]:
        parts: list[dict[str, Any]] = ask(self.project, "list")["parts"]
        found = {part["name"]: part for part in parts}
        unknown: dict[str, Any] = {"state": "unknown", "pid": None, "restarts": 0, "said": {}}
        return found.get(name, unknown)

    def comes(self, name: str, state: str, **more: Any) -> dict[str, Any]:
        """Wait until a part is so; how it is then."""

        def so() -> dict[str, Any] | None:
            part = self.part(name)
            right = part["state"] == state and all(part[k] == v for k, v in more.items())
            return part if right else None

        try:
            found: dict[str, Any] = until(so, f"{name} {state} {more}")
        except AssertionError as error:
            parts = json.dumps(ask(self.project, "list")["parts"], indent=1)
            raise AssertionError(f"{error}\n{self.said}\n{parts}") from None
        return found

    def kill(self) -> None:
        """kill -9 of the supervisor."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end; its exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            os.kill(self.pid, number)
        return self.process.wait(30)
