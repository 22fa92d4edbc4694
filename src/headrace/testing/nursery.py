"""Processes by the hundred: one process imports everything once, and forks on request.

A Python process with Arrow takes most of a second of a processor to start; a fork of one takes
milliseconds. So whoever wants to kill a thousand processes asks a `Nursery`: its own process reads
requests from its input, line by line, and forks. It is the parent of all of them: a signal goes
through it, so it never meets a stranger who was given the number of a dead one, and when the asker
goes away (its end of the pipe closes), they all end.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

LIMITS = {"files": resource.RLIMIT_NOFILE, "memory": resource.RLIMIT_AS}


class Nursery:
    """The asker's end."""

    def __init__(self, *modules: str, environment: Mapping[str, str] | None = None) -> None:
        """Start the process; it imports these modules, so that nobody else has to."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace.testing.nursery", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )
        self.ended: dict[int, int] = {}
        """pid -> exit code, negative for a signal, of those that are over."""

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        out: str,
        limits: Mapping[str, int] | None = None,
    ) -> int:
        """Have `module.main(arguments)` run in a process of its own, with its output in a file.

        `limits`: "files" and "memory" (bytes above what the process has at its start).
        """
        asked = {"module": module, "arguments": list(arguments), "out": out}
        return int(self._ask({**asked, "limits": dict(limits or {})}))

    def send(self, pid: int, number: int) -> None:
        """Send a signal to one of them, if it still lives."""
        self._ask({"pid": pid, "signal": number})

    def alive(self, pid: int) -> bool:
        """Whether it still runs."""
        self.ended.update({int(one): code for one, code in self._ask({}).items()})
        return pid not in self.ended

    def _ask(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End all of them, and the process itself."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Nursery:
        """For `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def main(modules: Sequence[str]) -> None:
    """The nursery's own process."""
    for module in modules:
        importlib.import_module(module)
    living: set[int] = set()
    while request := sys.stdin.buffer.readline():
        asked = json.loads(request)
        if "module" in asked:
            pid = os.fork()
            if not pid:
                _live(asked)
            living.add(pid)
            _answer(pid)
        elif "signal" in asked:
            if asked["pid"] in living:
                os.kill(
                    asked["pid"], asked["signal"]
                )  # not waited for: the number is still its own
            _answer(None)
        else:
            ended = {}
            for pid in list(living):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    living.remove(pid)
                    ended[pid] = os.waitstatus_to_exitcode(status)
            _answer(ended)
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    for pid in living:
        os.waitpid(pid, 0)


def _answer(what: Any) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _live(asked: Mapping[str, Any]) -> None:
    """The forked process: its output to its file, its limits, its task; it does not return."""
    code = 70
    try:
        out = os.open(asked["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(out, 1)
        for name, value in asked["limits"].items():
            limit = value + (_mapped() if name == "memory" else 0)
            resource.setrlimit(LIMITS[name], (limit, limit))
        code = importlib.import_module(asked["module"]).main(asked["arguments"])
    except BaseException:  # noqa: BLE001 - a process ends here, whatever it was
        with contextlib.suppress(BaseException):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _mapped() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main(sys.argv[1:])
