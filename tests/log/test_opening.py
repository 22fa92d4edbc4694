"""Opening a log where something is odd, and closing it while it is used.

Caught: a folder made where none was meant, what the system says passed on without a code, threads
that hang or fail on a file that another has closed.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded import system
from headrace.log.embedded.log import EmbeddedLog
from tests.log.kit import checked


@pytest.mark.parametrize("address", ["http://host/x", "postgresql://me:secret@host/db"])
def test_an_address_that_is_no_folder_makes_none(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.BadSetting) as caught:
        hr.connect(address)
    assert "secret" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_the_home_of_the_user_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with hr.connect("~/data") as log:
        assert log.path == str(tmp_path / "data")


def test_a_path_may_be_bytes(tmp_path: Path) -> None:
    with hr.connect(os.fsencode(tmp_path / "data")) as log:  # type: ignore[arg-type]
        assert log.path == str(tmp_path / "data")


def test_a_folder_that_cannot_be_looked_into_is_an_error_of_the_catalogue(tmp_path: Path) -> None:
    with pytest.raises(errors.IoFailed, match="File name too long"):
        hr.connect(tmp_path / ("x" * 300))


def test_too_many_open_files_are_an_error_of_the_catalogue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str) -> str:
        raise OSError(errno.EMFILE, "Too many open files", "/proc/self/mountinfo")

    monkeypatch.setattr(system, "filesystem_of", full)
    with pytest.raises(errors.IoFailed, match="Too many open files"):
        hr.connect(tmp_path / "log")


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o711])
def test_a_folder_that_this_user_may_not_look_into(tmp_path: Path, mode: int) -> None:
    """An error of the catalogue, and not that there is no log."""
    hr.connect(tmp_path / "log").close()
    program = """
import os, sys, headrace as hr, headrace.log.embedded.log, headrace.cli.topic, headrace.cli.main
if os.geteuid() == 0:
    os.setuid(65534)
try:
    hr.connect(sys.argv[1])
except hr.errors.ReadOnlyDisk as error:
    print(error.code)
sys.exit(headrace.cli.main.run(["topic", "ls", "--log", sys.argv[1]]))
"""
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    (tmp_path / "log").chmod(mode)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "log"], capture_output=True, text=True
    )
    (tmp_path / "log").chmod(0o755)
    assert (done.returncode, done.stdout) == (1, "HR-LOG-004\n"), done.stderr
    assert "error[HR-LOG-004]" in done.stderr


def test_a_journal_file_of_another_user_is_refused_and_poisons_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made by a roll where it may not be written by this one: nothing is, and others go on."""
    opened = system.OsSystem.open

    def readable(self: system.OsSystem, path: str, *, create: bool = False) -> system.OsFile:
        if path.endswith("/00000001.log"):
            return system.OsFile(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        return opened(self, path, create=create)

    with hr.connect(tmp_path / "log") as log:
        log.create_topic("t", "text")
        log.append("t", ["a"])
        with monkeypatch.context() as patch:
            patch.setattr(system.OsSystem, "open", readable)
            with hr.connect(log.path) as other:
                for _ in range(2):
                    with pytest.raises(errors.ReadOnlyDisk, match="Permission denied"):
                        other.append("t", ["b"])
                other._housekeeper.used = True  # it has appended before the roll: it marks the end
        log.append("t", ["c"])
        assert [row["value"] for batch in log.read("t") for row in batch.to_pylist()] == ["a", "c"]


def test_a_mount_whose_name_is_no_text_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(b"1 1 0:1 / /\xff rw - nfs x rw\n2 1 0:1 / / rw - ext4 x rw\n")
    monkeypatch.setattr(system, "MOUNTS", str(mounts))
    assert system.filesystem_of("/somewhere") == "ext4"


def test_a_log_that_is_closed_under_other_threads_tells_them_so(tmp_path: Path) -> None:
    """Whoever writes or syncs may finish; a number of a file that is closed is never used again."""
    odd: list[BaseException] = []

    def use(log: EmbeddedLog, work: Callable[[EmbeddedLog], object]) -> None:
        try:
            while True:
                work(log)
        except (errors.LogClosed, errors.Unknown):
            pass
        except BaseException as error:
            odd.append(error)

    works: list[Callable[[EmbeddedLog], object]] = [
        lambda log: log.append("t", [{"a": 1}]),
        lambda log: log.append("t", [{"a": 2}], durability="os"),
        lambda log: list(log.read("t", after=max(0, log.position - 3))),
        lambda log: (log.counter("c"), log.value("v"), log.topics()),
    ]
    for _ in range(40):
        log = hr.connect(tmp_path / "data")
        log.create_topic("t", "a bigint", exist_ok=True)
        threads = [threading.Thread(target=use, args=[log, work]) for work in works * 2]
        for thread in threads:
            thread.start()
        log.wait(log.position + 5, timeout=60)
        log.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert odd == []
    checked(str(tmp_path / "data"))
