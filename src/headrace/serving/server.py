"""The server of the page: on this machine only, and it stops within a second.

uvicorn waits for open connections before it stops, and a feed never ends by itself. So feeds are
told first; a reader that does not take what is written to it is cut off after a moment.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn

from headrace import errors
from headrace.serving.app import make_app, stop
from headrace.serving.live import Status

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog
    from headrace.runtime.project import Project

CUT_OFF_SECONDS = 0.4


class Server:
    """A page that is being served, or will be."""

    def __init__(
        self,
        project: Project,
        port: int = 0,
        host: str = "127.0.0.1",
        status: Callable[[Project, EmbeddedLog], Status] | None = None,
    ) -> None:
        """Take the port; 0: a free one. Nothing is answered before `run`."""
        self._socket = bound(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        app = make_app(project, status)
        config = uvicorn.Config(
            app, lifespan="on", access_log=False, log_level="warning", server_header=False,
            proxy_headers=False, ws="none",
        )  # fmt: skip
        self._server = _Stopping(config)

    def run(self, ready: Callable[[str], None] | None = None) -> None:
        """Serve until SIGTERM, SIGINT or `stop`; call `ready` with the address once it answers."""
        self._server.ready = lambda: ready(self.url) if ready else None
        try:
            asyncio.run(self._server.serve([self._socket]))
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Let `run` return; from any thread."""
        self._server.should_exit = True


class _Stopping(uvicorn.Server):
    ready: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stop(self.config.app)  # type: ignore[arg-type]
        asyncio.get_running_loop().call_later(CUT_OFF_SECONDS, self._cut_off)
        await super().shutdown(sockets)

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()

    def handle_exit(self, sig: int, frame: object) -> None:
        """Stop; unlike uvicorn, do not raise the signal again once all is done."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


def bound(host: str, port: int) -> socket.socket:
    """A socket on a port of this machine's loopback."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        address = ipaddress.ip_address("0.0.0.0")  # noqa: S104 - refused below
    if not address.is_loopback:
        raise errors.NotLoopback(f"the page shall listen on '{host}'", place=f"{host}:{port}")
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((str(address), port))
        made.listen(128)
    except OSError as error:
        made.close()
        raise errors.PortTaken(
            f"port {port} cannot be used: {error.strerror or error}", place=f"{host}:{port}"
        ) from None
    return made
