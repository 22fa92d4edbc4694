"""The errors of projects, provoked; `tests/test_provoke_errors.py` walks through them."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.demo import demo
from headrace.cli.init import init
from headrace.cli.part import run_page
from headrace.runtime.control import ask
from headrace.runtime.parts import Voice
from headrace.runtime.project import Project, find_project
from headrace.runtime.supervisor import Supervisor
from tests.runtime.kit import Running


def made(folder: str, text: str = "") -> Project:
    os.makedirs(folder)
    Path(folder, "headrace.toml").write_text(text)
    return find_project(folder)


def no_project(folder: str, patch: pytest.MonkeyPatch) -> None:
    find_project(folder)


def bad_project(folder: str, patch: pytest.MonkeyPatch) -> None:
    made(folder, "pipeline = []")


def already_running(folder: str, patch: pytest.MonkeyPatch) -> None:
    project = made(folder)
    project.run_folder.mkdir()
    with open(project.run_folder / "lock", "w") as held:
        held.write("4711")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        Supervisor(project).run()


def not_running(folder: str, patch: pytest.MonkeyPatch) -> None:
    ask(made(folder), "list")


def unknown_part(folder: str, patch: pytest.MonkeyPatch) -> None:
    running = Running(made(folder, "[page]\nport = 0\n").folder)
    running.start()
    try:
        ask(running.project, "kill", "pages")
    finally:
        running.stop()


def nothing_to_run(folder: str, patch: pytest.MonkeyPatch) -> None:
    Supervisor(made(folder, "[page]\nport = false\n")).run()


def port_taken(folder: str, patch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run_page(made(folder, f"[page]\nport = {port}\n"), "", Voice(None))


def no_serve(folder: str, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "uvicorn", None)
    run_page(made(folder), "", Voice(None))


def file_there(folder: str, patch: pytest.MonkeyPatch) -> None:
    made(folder)
    init.main([folder], standalone_mode=False)


def not_installed(folder: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("headrace.cli.demo.find_spec", lambda name: name != "pyspark" or None)
    demo.main([], standalone_mode=False)


PROVOCATIONS: dict[str, list[Callable[[str, pytest.MonkeyPatch], object]]] = {
    "HR-PROJECT-001": [no_project],
    "HR-PROJECT-002": [bad_project, nothing_to_run],
    "HR-PROJECT-003": [already_running],
    "HR-PROJECT-004": [not_running],
    "HR-PROJECT-005": [unknown_part],
    "HR-PROJECT-006": [port_taken],
    "HR-PROJECT-007": [no_serve],
    "HR-PROJECT-008": [file_there],
    "HR-PROJECT-009": [not_installed],
}
