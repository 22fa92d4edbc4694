"""Servers of one's own, for tests: nothing of them may be left behind, whatever becomes of us.

A server runs in a session of its own, so that Ctrl-C at the test run does not reach it before the
test is done with it. Should this process be killed, a watcher, which is a shell that reads from a
pipe whose other end we hold, gets to the end of the pipe, ends the server and removes its folder.
(The parent-death signal of Linux is tied to the thread that started the child, and setting it needs
Python code between fork and exec, which is not safe beside other threads.)
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
from pathlib import Path
from typing import Any


class Watched:
    """A server process, and its watcher."""

    def __init__(self) -> None:
        """Nothing runs yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the server's first process is alive."""
        return self._process is not None and self._process.poll() is None

    def _watch(self, script: str, *more: str, **user: Any) -> None:
        """Have the script (`read line && exit`, and the end) run with the server's pid and more."""
        assert self._process is not None
        self._watcher = subprocess.Popen(
            ["sh", "-c", script, "watcher", str(self._process.pid), *more],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **user,
        )

    def _reap(self) -> None:
        """Wait for the processes we started; the watcher is told that all is well."""
        if self._process is not None:
            if self.running:
                self._process.kill()
            self._process.wait()
            self._process = None
        if self._watcher is not None:
            with contextlib.suppress(BrokenPipeError):
                self._watcher.communicate(b"done\n")
            self._watcher = None


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and that are still there."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text(encoding="ascii").split())
    return found


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody uses just now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
