"""What the tests of the log share: children, a machine that fails when told, and short readings."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import IO, Any

import pyarrow as pa

from headrace.log.embedded.check import Report, check
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.system import Buffer, OsFile, OsSystem
from headrace.log.producer import Appender
from headrace.model.records import Batch, Receipt
from headrace.settings import LogSettings

TINY: dict[str, Any] = {"journal_bytes_first": 16 << 10, "journal_bytes_max": 32 << 10}
"""Journal files so small that a test rolls over many of them."""

PRELUDE = """
import os, sys, time
import headrace as hr
from headrace import errors
folder = sys.argv[1]
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # at once: children say things too
"""


class Child:
    """Another Python process with `hr`, `folder`, `say` and `sys.argv[2:]`; killed at the end."""

    def __init__(self, folder: str, code: str, *arguments: object) -> None:
        program = PRELUDE + textwrap.dedent(code)
        command = [sys.executable, "-c", program, folder, *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        """The next line it says; what it complained about, if it ended instead."""
        found = _pipe(self.process.stdout).readline()
        if not found:
            raise AssertionError(f"the child ended: {_pipe(self.process.stderr).read()}")
        return found.rstrip("\n")

    def go(self, text: str = "go") -> None:
        """Give it a line on its standard input."""
        stdin = _pipe(self.process.stdin)
        stdin.write(text + "\n")
        stdin.flush()

    def wait(self, timeout: float = 60.0) -> str:
        """Let it end well; all it said meanwhile."""
        out, complaint = self.process.communicate(timeout=timeout)
        assert self.process.returncode == 0, complaint
        return out

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def run_child(folder: str, code: str, *arguments: object) -> str:
    """Run a child to its end; what it said."""
    with Child(folder, code, *arguments) as child:
        return child.wait()


class Gate:
    """A log, or writer, whose appends wait until the gate is open: what is sent gathers."""

    def __init__(self, appender: Appender) -> None:
        self._appender = appender
        self.open = threading.Event()
        self.reached = threading.Event()

    def append(self, topic: str, rows: Any, *, headers: Any = None) -> Receipt:
        self.reached.set()
        assert self.open.wait(20)
        return self._appender.append(topic, rows, headers=headers)

    def taken_in(self, topic: str, rows: Any, headers: Any = None) -> pa.RecordBatch:
        return self._appender.taken_in(topic, rows, headers)


class Machine(OsSystem):
    """The real machine, which fails or dawdles when told, and counts."""

    def __init__(self) -> None:
        self.fails: Callable[[str, str], OSError | None] = lambda call, path: None
        """Asked before each call: ("pwritev" | "fdatasync" | "create" | ..., path)."""
        self.sync_seconds = 0.0
        self.syncs = 0
        self.read_bytes = 0
        self.clock_us: int | None = None
        self.boot: bytes | None = None

    def _ask(self, call: str, path: str) -> None:
        error = self.fails(call, path)
        if error is not None:
            raise error

    def _wrapped(self, file: OsFile) -> OsFile:
        wrapped = _MachineFile(file.path, os.dup(file._fd))
        wrapped.machine = self
        file.close()
        return wrapped

    def open(self, path: str, *, create: bool = False) -> OsFile:
        self._ask("open", path)
        return self._wrapped(super().open(path, create=create))

    def create(self, path: str, size: int) -> OsFile:
        self._ask("create", path)
        return self._wrapped(super().create(path, size))

    def rename(self, old: str, new: str) -> None:
        self._ask("rename", new)
        super().rename(old, new)

    def now_us(self) -> int:
        return super().now_us() if self.clock_us is None else self.clock_us

    def boot_id(self) -> bytes:
        return super().boot_id() if self.boot is None else self.boot


class _MachineFile(OsFile):
    machine: Machine

    def pread(self, length: int, offset: int) -> bytes:
        data = super().pread(length, offset)
        self.machine.read_bytes += len(data)
        return data

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        self.machine._ask("pwritev", self.path)
        super().pwritev(buffers, offset)

    def fdatasync(self) -> None:
        self.machine._ask("fdatasync", self.path)
        self.machine.syncs += 1
        time.sleep(self.machine.sync_seconds)
        super().fdatasync()


def machine_log(folder: str, machine: Machine, **settings: Any) -> EmbeddedLog:
    """A log on such a machine."""
    return EmbeddedLog(folder, LogSettings(**settings), system=machine)


def rows(batches: Iterable[Batch]) -> list[dict[str, Any]]:
    """All rows of a reading."""
    return [row for batch in batches for row in batch.to_pylist()]


def values(batches: Iterable[Batch], column: str = "a") -> list[Any]:
    """One column of a reading."""
    return [value for batch in batches for value in batch.data.column(column).to_pylist()]


def places(batches: Iterable[Batch], column: str = "a") -> list[tuple[int, int, Any]]:
    """(partition, offset, value of one column) of each row of a reading."""
    found: list[tuple[int, int, Any]] = []
    for batch in batches:
        found += zip(
            batch.partition.to_pylist(),
            batch.offset.to_pylist(),
            batch.data.column(column).to_pylist(),
            strict=True,
        )
    return found


def checked(folder: str) -> Report:
    """What `log check` says; it must find nothing wrong."""
    report = check(OsSystem(), folder)
    assert report.ok, [str(problem) for problem in report.problems]
    return report


def files_in(folder: str, name: str) -> list[str]:
    """The names in a folder of the log."""
    return sorted(os.listdir(os.path.join(folder, name)))


def forget_live(folder: str) -> None:
    """Take the shared memory away, as a boot does; nobody may have the log open."""
    live = os.path.join(folder, "live")
    for name in os.listdir(live):
        os.unlink(os.path.join(live, name))


def flip(path: str, offset: int, mask: int = 0xFF) -> None:
    """Change one byte of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))
