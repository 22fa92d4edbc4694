"""The errors of the HTTP interface, provoked by requests: what a client gets is raised here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import headrace as hr
from headrace import errors
from headrace.serving.server import bound
from tests.serving.kit import ask, make_project, served


def refused(folder: str, path: str, **headers: str) -> None:
    """Raise what the answer to this request says."""

    def failing(project: object, log: object) -> dict[str, object]:
        raise OSError("no more files")

    project = make_project(Path(folder))
    with hr.connect(project.log) as log:
        log.create_topic("t", "n bigint", exist_ok=True)
    with served(project, status=failing) as server:
        body = ask(server.url, path, headers=headers).json
    kind = errors.catalogue()[body["code"]]
    raise kind(body["detail"], place=body["place"], why=body["why"], fix=body["fix"])


PROVOCATIONS: dict[str, Callable[[str], object]] = {
    "HR-HTTP-001": lambda folder: refused(folder, "/v1/nothing"),
    "HR-HTTP-002": lambda folder: refused(folder, "/v1/status", Origin="http://evil.example"),
    "HR-HTTP-003": lambda folder: refused(folder, "/v1/topics?color=blue"),
    "HR-HTTP-004": lambda folder: refused(folder, "/v1/topics/t/rows?page=ffffffff-1"),
    "HR-HTTP-005": lambda _: bound("0.0.0.0", 8321),
    "HR-HTTP-006": lambda folder: refused(folder, "/v1/status"),
}
