"""System calls of a real process that fail, or in which it is killed, at the N-th call.

Caught: an error path that acknowledges what is not there, keeps what was refused, or leaves the log
unusable. Not caught: what the kernel really does to the pages after a failed sync (strace fails the
call before it happens); the simulated machine has that.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

import headrace as hr
from headrace.testing.real import SMALL, Worker, account, history_of, prepare
from headrace.testing.simulation import rows_to_write

WRITE = "pwritev,pwritev2,pwrite64"


@functools.cache
def strace_works() -> str:
    """Why strace cannot be used; empty if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-e", "none", "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"strace does not work here: {tried.stderr.strip()}"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    if strace_works():
        pytest.skip(strace_works())
    path = str(tmp_path / "data")
    prepare(path)
    return path


def injected(folder: str, calls: str, what: str, pad: int = 900, **settings: object) -> Worker:
    """A worker that appends while its system calls are tampered with, at least once."""
    trace = Path(folder).parent / "trace"
    quick = [] if "signal" in what else ["--seccomp-bpf"]  # which would lose the signal
    before = ["strace", "-f", *quick, "-o", str(trace), "-e", f"trace={calls}"]
    before += ["-e", f"inject={calls}:{what}"]
    worker = Worker(folder, "append", "--count", "60", "--pad", str(pad), before=before, **settings)
    talk = worker.finish()
    assert "Traceback" not in talk, talk
    calls_made = trace.read_text()
    assert "INJECTED" in calls_made or "SIGKILL" in calls_made, "the call was never made"
    return worker


@pytest.mark.parametrize(
    ("calls", "what", "when"),
    [
        ("fdatasync", "error=EIO", "3"),
        ("fdatasync", "error=EIO", "9+"),
        (WRITE, "error=EIO", "4"),
        (WRITE, "error=EIO", "11"),
        (WRITE, "error=ENOSPC", "7+"),
        ("fallocate", "error=ENOSPC", "1"),
        ("fallocate", "error=ENOSPC", "1+"),
        ("fsync", "error=EIO", "2"),
        ("fdatasync", "signal=KILL", "6"),
        (WRITE, "signal=KILL", "5"),
        (WRITE, "signal=KILL", "18"),
        ("rename", "signal=KILL", "1"),
        ("fsync", "signal=KILL", "1"),
        ("flock", "signal=KILL", "21"),
        ("flock", "signal=KILL", "22"),
        ("futex", "signal=KILL", "9"),
    ],
)
def test_at_the_nth_call(folder: str, calls: str, what: str, when: str) -> None:
    settings = {"inline_bytes_max": 4000, "background": False}
    worker = injected(folder, calls, f"{what}:when={when}", **settings)
    history = history_of([worker])
    if "KILL" not in what:
        assert [a for a in history.attempts if a.outcome == "open"] == [], "every append ends"
    assert account(folder, history) == []
    with hr.connect(folder, **SMALL) as log:
        receipt = log.append("orders", rows_to_write(900_001, 2))
        assert receipt.position > max((a.position for a in history.attempts), default=0)
        log.append("audit", rows_to_write(900_002, 2))


def test_a_log_whose_sync_failed_takes_nothing_until_it_is_opened_again(folder: str) -> None:
    bystander = hr.connect(folder, **SMALL)
    worker = injected(folder, "fdatasync", "error=EIO:when=6", pad=10, background=False)
    history = history_of([worker])
    outcomes = [attempt.outcome for attempt in history.attempts]
    assert "unknown" in outcomes
    first = outcomes.index("unknown")
    assert all(attempt.outcome == "refused" for attempt in history.attempts[first + 1 :])
    with pytest.raises(hr.errors.LogPoisoned):
        bystander.append("orders", rows_to_write(900_001, 1))
    with hr.connect(folder, **SMALL) as log:
        log.append("orders", rows_to_write(900_002, 1))
    bystander.append("orders", rows_to_write(900_003, 1))
    bystander.close()
