"""Asking the supervisor: one JSON object a line over a unix socket, one answer a line.

`{"do": "list"}`, `{"do": "kill", "part": NAME}`, `{"do": "restart", "part": NAME}`,
`{"do": "stop"}`. The answer has `"ok": true`, or `"ok": false` and an `error`.

The path of a unix socket is limited to 107 bytes, which a project's folder may exceed; so it is
named through a descriptor of its folder.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.errors import NotRunning, UnknownPart
from headrace.runtime.project import Project


@contextmanager
def short(path: Path) -> Iterator[str]:
    """A short name of a path, while it is used."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def ask(project: Project, do: str, part: str = "", timeout: float = 5.0) -> dict[str, Any]:
    """Ask the supervisor of a project for something; its answer."""
    try:
        with socket.socket(socket.AF_UNIX) as client, short(project.socket) as path:
            client.settimeout(timeout)
            client.connect(path)
            client.sendall(json.dumps({"do": do, "part": part}).encode() + b"\n")
            with client.makefile("rb") as answers:
                line = answers.readline()
        answer: dict[str, Any] = json.loads(line)
    except (OSError, ValueError) as why:
        late = isinstance(why, TimeoutError)
        fact = f"does not answer within {timeout:g} s" if late else "does not run"
        raise NotRunning(f"project '{project.name}' {fact}", place=str(project.folder)) from None
    if not answer.get("ok"):
        error = answer["error"]
        raise UnknownPart(error["fact"], place=error["place"], why=error["why"], fix=error["fix"])
    return answer
