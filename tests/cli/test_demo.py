"""`headrace demo`: everything real, every part killed once, and nothing left behind.

Caught: a demo that does not get live, whose target is ever wrong, that does not survive the kill of
a part, that leaves processes, servers or folders behind, or hides where the data is. Not caught:
how long all this takes (`./run bench slice`, and the demo itself says it).
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

import headrace as hr
from headrace.runtime.processes import mark, marked
from tests.cli.conftest import Headrace, started

PIPE = subprocess.PIPE
PATIENCE = 600


def left(folder: Path, port: int) -> list[str]:
    """What is still there of a demo: processes of its project, its server."""
    found = [f"process {pid}" for pid in marked(mark(folder))]
    with socket.socket() as probe:
        return found + [f"port {port}"] * (probe.connect_ex(("127.0.0.1", port)) == 0)


@pytest.mark.timeout(PATIENCE + 60)
def test_every_part_is_killed_and_nothing_is_wrong(tmp_path: Path) -> None:
    """Unattended: live, a kill of each part, and target == log == source == batch."""
    folder = tmp_path / "kept"
    demo = started(
        "", "demo", "--seconds", "1", "--json", "--keep", str(folder), stdout=PIPE, stderr=PIPE
    )
    out, said = demo.communicate(timeout=PATIENCE)
    text = said.decode()
    assert demo.returncode == 0, text
    summary = json.loads(out)
    assert summary["ok"], summary
    assert summary["transactions"] == summary["applied"] > 0
    assert (summary["lost"], summary["twice"], summary["differences"]) == (0, 0, 0)
    killed = {one["part"] for one in summary["kills"]}
    assert killed == {"capture/shop", "pipelines", "follower/shop/main", "keeper", "page"}
    assert {one["against"] for one in summary["verified"]} == {"log", "source", "batch"}
    assert summary["visible_ms"]["of"] > 0
    assert f"the log is in {folder / 'data'}" in text
    with hr.connect(folder / "data", create=False) as log:
        assert sum(log.ends("shop.public.transactions")) == summary["transactions"]
    assert left(folder, _port(text)) == []


def _port(text: str) -> int:
    found = re.search(r"127\.0\.0\.1:(\d+)/shop", text)
    assert found, text
    return int(found[1])


def interruptible() -> tuple[subprocess.Popen[bytes], Path, int]:
    """A demo whose page is served, its folder and the port of its server."""
    demo = started("", "demo", stdout=PIPE, stderr=subprocess.STDOUT)
    assert demo.stdout is not None
    text = ""
    for line in demo.stdout:
        text += line.decode()
        if "the page: http" in text:
            folder = re.search(r"project +(\S+):", text)
            assert folder
            return demo, Path(folder[1]), _port(text)
    raise AssertionError(text)


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_says_where_the_data_is(how: int) -> None:
    """After Ctrl-C or SIGTERM no process is left, and the log is where it says."""
    demo, folder, port = interruptible()
    try:
        demo.send_signal(how)
        text = demo.communicate(timeout=PATIENCE)[0].decode()
        assert left(folder, port) == []
        assert f"the log is in {folder / 'data'}" in text
        assert (folder / "data").is_dir()
    finally:
        shutil.rmtree(folder)


@pytest.mark.timeout(PATIENCE)
def test_killed_it_leaves_no_process_behind() -> None:
    """Even after `kill -9` parts and server end by themselves."""
    demo, folder, port = interruptible()
    try:
        demo.kill()
        demo.communicate(timeout=PATIENCE)
        deadline = time.monotonic() + 60
        while left(folder, port) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left(folder, port) == []
    finally:
        shutil.rmtree(folder)


def test_the_folder_to_keep_must_be_new(headrace: Headrace, tmp_path: Path) -> None:
    """--keep never touches what is there already."""
    (tmp_path / "x").write_text("")
    done = headrace("demo", "--keep", str(tmp_path))
    assert done.code == 2
    assert "is there already" in done.err


def test_json_needs_an_end(headrace: Headrace) -> None:
    """JSON is printed when it is over, which without --seconds is never."""
    done = headrace("demo", "--json")
    assert done.code == 2
    assert "--seconds" in done.err
