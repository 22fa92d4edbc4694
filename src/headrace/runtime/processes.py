"""Processes of one's own: marked by an environment variable, found by it, ended with their kin.

Whatever a part starts (Spark's JVM, its Python workers, a recorder) inherits the mark, also what
makes itself a new session or process group. So after a part has died, however, the rest of it is
found in /proc and killed; and what a killed supervisor may have left is found by the next one.

A part dies with its supervisor in two ways that do not need each other: the kernel kills it (the
parent-death signal), and a thread of it reads a pipe whose other end only the supervisor holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from pathlib import Path

MARK = "HEADRACE_PART_OF"
PR_SET_PDEATHSIG = 1


def mark(folder: Path, part: str = "", attempt: str = "") -> str:
    """The mark of a project, of one of its parts, or of one attempt at it."""
    return "".join(f"{one}|" for one in (str(folder.resolve()), part, attempt) if one)


def marked(start: str) -> list[int]:
    """The living processes whose mark starts so; not this one."""
    wanted = b"\0" + f"{MARK}={start}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in b"\0" + Path("/proc", name, "environ").read_bytes():
                found.append(int(name))
    return found


def end_marked(start: str, seconds: float = 2.0) -> int:
    """Kill them, and those they start meanwhile, until there are none; how many there were."""
    ended: set[int] = set()
    deadline = time.monotonic() + seconds
    while (found := [one for one in marked(start) if one not in ended]) or ended & set(
        marked(start)
    ):
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        ended.update(found)
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    return len(ended)


def die_with_parent(pipe: int | None = None) -> None:
    """Let this process be killed when its parent ends; `pipe`: which the parent alone keeps open.

    To be called first, in the main thread. The signal belongs to the thread that started us, which
    in a supervisor is the only one.
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)
    if pipe is None:
        return

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(pipe, 64):
                pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
