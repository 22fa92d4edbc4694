"""`headrace demo`: it shows what it says, and leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Headrace, started

PIPE = subprocess.PIPE
PATIENCE = 100


def workers(folder: str) -> list[str]:
    """The processes of a demo that run in this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"demo_worker" in command and folder.encode() in command:
            found.append(entry.name)
    return found


def test_nothing_is_lost_though_a_producer_is_killed(folder: str) -> None:
    """The demo kills a producer and recounts every row; the log is kept when asked."""
    demo = started(
        "", "demo", "--seconds", "1", "--json", "--keep", folder, stdout=PIPE, stderr=PIPE
    )
    out, said = demo.communicate(timeout=PATIENCE)
    assert demo.returncode == 0, said
    summary = json.loads(out)
    assert summary["ok"]
    assert summary["acknowledged"] == summary["read"] == summary["followed"] > 0
    assert (summary["lost"], summary["twice"]) == (0, 0)
    assert summary["killed"]["stored"] >= summary["killed"]["acknowledged"]
    assert summary["check"]["ok"]
    text = said.decode()
    assert "0 lost, 0 twice" in text
    assert f"headrace topic show orders --log {folder}" in text
    assert workers(folder) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, how: int) -> None:
    """After Ctrl-C or SIGTERM no process and no folder is left."""
    environment = {"TMPDIR": str(tmp_path)}
    demo = interruptible(environment)
    demo.send_signal(how)
    demo.communicate(timeout=PATIENCE)
    assert demo.returncode == 130
    assert list(tmp_path.iterdir()) == []
    assert workers(str(tmp_path)) == []


def test_a_killed_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    """Even after `kill -9` the workers end by themselves."""
    demo = interruptible({"TMPDIR": str(tmp_path)})
    demo.kill()
    demo.communicate(timeout=PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while workers(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert workers(str(tmp_path)) == []


def interruptible(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A demo that has started its processes."""
    demo = started("", "demo", "--seconds", "60", stdout=PIPE, stderr=PIPE, extra=environment)
    assert demo.stdout is not None
    for line in demo.stdout:
        if b"promise" in line:
            return demo
    raise AssertionError(demo.communicate()[1])


def test_the_folder_to_keep_must_be_new(headrace: Headrace, tmp_path: Path) -> None:
    """--keep never touches what is there already."""
    (tmp_path / "x").write_text("")
    done = headrace("demo", "--keep", str(tmp_path))
    assert done.code == 2
    assert "is there already" in done.err
