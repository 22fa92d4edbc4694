"""What the supervisor reads and writes: pipes of parts, their output, who asks over the socket."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import IO, Any

from headrace.runtime.project import Project

LOG_BYTES = 1 << 20
LOG_FILES = 3


class Output:
    """What a part prints: the file of it, rotated, and the last lines."""

    def __init__(self, project: Project, name: str) -> None:
        """The file is opened when there is something to write."""
        self.path = project.logs / f"{name.replace('/', '-')}.log"
        self._file: IO[bytes] | None = None
        self._size = 0
        self.last: deque[str] = deque(maxlen=20)

    def write(self, data: bytes) -> None:
        """Write, as far as the disk allows it."""
        self.last.extend(line for line in data.decode(errors="replace").splitlines() if line)
        with contextlib.suppress(OSError):
            if self._file is None or self._size > LOG_BYTES:
                self._rotate()
            assert self._file is not None
            self._file.write(data)
            self._size += len(data)

    def close(self) -> None:
        """Let the file go; it is opened again when there is something to write."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rotate(self) -> None:
        if self._file is not None:
            self.close()
            for n in range(LOG_FILES - 1, 0, -1):
                older = self.path.with_name(f"{self.path.name}.{n}")
                newer = self.path.with_name(f"{self.path.name}.{n - 1}") if n > 1 else self.path
                with contextlib.suppress(FileNotFoundError):
                    os.replace(newer, older)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - kept open
        self._size = self._file.tell()


class Source:
    """A pipe that is read as something comes."""

    def __init__(
        self, selector: selectors.BaseSelector, file: IO[bytes], take: Callable[[bytes], None]
    ) -> None:
        """`take` is given what comes."""
        self._selector, self._file, self._take = selector, file, take
        os.set_blocking(file.fileno(), False)
        selector.register(file, selectors.EVENT_READ, self.read)

    def read(self) -> bool:
        """Take what is there; whether there was something."""
        try:
            data = os.read(self._file.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if data:
            self._take(data)
        else:
            self._let_go()
        return bool(data)

    def close(self) -> None:
        """Take what is left, and let go; others may hold the other end, and are not waited for."""
        for _ in range(64):
            if self._file.closed or not self.read():
                break
        self._let_go()

    def _let_go(self) -> None:
        if not self._file.closed:
            self._selector.unregister(self._file)
            self._file.close()


class Lines:
    """JSON objects, one a line, out of pieces of bytes; what is none is passed over."""

    def __init__(self) -> None:
        """Nothing came yet."""
        self._rest = b""

    def add(self, data: bytes) -> list[dict[str, Any]]:
        """Those that are whole now."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        found = []
        for line in whole:
            with contextlib.suppress(ValueError):
                one = json.loads(line)
                found += [one] if isinstance(one, dict) else []
        return found


class Client:
    """Somebody who asks over the control socket."""

    LIMIT = 1 << 16

    def __init__(
        self,
        selector: selectors.BaseSelector,
        connection: socket.socket,
        answer: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        """It is heard until it closes, or says nonsense at length."""
        lines = Lines()

        def hear() -> None:
            try:
                data = connection.recv(4096)
                requests: Iterable[dict[str, Any]] = lines.add(data)
                for request in requests:
                    connection.setblocking(True)
                    connection.settimeout(0.2)
                    connection.sendall(json.dumps(answer(request)).encode() + b"\n")
                    connection.setblocking(False)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data or len(lines._rest) > self.LIMIT:
                selector.unregister(connection)
                connection.close()

        selector.register(connection, selectors.EVENT_READ, hear)
