"""``headrace part``: be one part of a running project. Nobody types it: the supervisor does."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from headrace.errors import NoServe, PortTaken

if TYPE_CHECKING:
    from headrace.runtime.parts import Voice
    from headrace.runtime.project import Project


@click.command(hidden=True)
@click.argument("kind")
@click.argument("name", default="")
@click.option("--project", "folder", default=".")
def part(kind: str, name: str, folder: str) -> None:
    """Be part KIND of the project, under a supervisor."""
    from headrace.runtime.parts import run_part

    code = run_part(kind, name, folder, {"page": run_page})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: Spark's own end takes seconds, and all of value is on the disk


def run_page(project: Project, _: str, voice: Voice) -> None:
    """Serve the page and the HTTP interface: of a layer above the runtime, so it is run here."""
    try:
        import starlette
        import uvicorn
    except ImportError as error:
        raise NoServe(f"{error.name} is not installed", place=sys.executable) from None
    del starlette, uvicorn
    from headrace.runtime.project import write_whole
    from headrace.serving.server import Server

    port, last = project.port or 0, project.run_folder / "port"
    try:  # of any free port the one of the last time: a page that is open finds us again
        server = Server(project, port or int(last.read_text()))
    except (OSError, ValueError, PortTaken):
        server = Server(project, port)
    write_whole(last, str(server.port))
    server.run(ready=lambda url: voice.say(ready=True, url=url))
