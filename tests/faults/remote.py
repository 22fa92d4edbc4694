"""A log handle in another process, called as if it were here; made to be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from headrace import errors

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["headrace.log.embedded.log", "headrace.testing.simulation"])


class Remote:
    """One handle in one process."""

    def __init__(self, folder: str, settings: dict[str, Any]) -> None:
        self._here, there = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(there, folder, settings), daemon=True)
        self._process.start()
        there.close()

    def call(self, name: str, *given: Any, **named: Any) -> Any:
        """Call a function of this module's `Served`; raises what it raises."""
        self._here.send((name, given, named))
        if not self._here.poll(30.0):
            raise AssertionError(f"{name} does not answer")
        kind, value = self._here.recv()
        if kind == "error":
            raise value
        return value

    def begin(self, name: str, *given: Any, **named: Any) -> None:
        """Call without waiting for the answer, as somebody about to be killed."""
        self._here.send((name, given, named))

    def answer(self) -> Any:
        """The answer to what was begun, if it came before the end."""
        try:
            return self._here.recv() if self._here.poll(0) else None
        except (EOFError, OSError):
            return None

    def kill(self) -> None:
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(10.0)

    def close(self) -> None:
        """End it in good order."""
        self.call("close")
        self._process.join(10.0)
        self._here.close()


class Served:
    """What a remote handle can do; everything in and out is plain."""

    def __init__(self, folder: str, settings: dict[str, Any]) -> None:
        import headrace as hr

        self._log = hr.connect(folder, **settings)

    def make(self, topics: dict[str, int]) -> None:
        from headrace.testing.simulation import SCHEMA

        for name, partitions in topics.items():
            if name not in [topic.name for topic in self._log.topics()]:
                self._log.create_topic(name, SCHEMA, key="k", partitions=partitions)

    def append(
        self, number: int, rows: dict[str, int], pad: int, expect: dict[str, int], durability: str
    ) -> int:
        from headrace.testing.simulation import rows_to_write

        with self._log.transaction(durability=durability) as transaction:
            for topic, count in rows.items():
                transaction.append(topic, rows_to_write(number, count, pad))
            for name, value in expect.items():
                transaction.expect(name, value)
        assert transaction.receipt is not None
        return transaction.receipt.position

    def content(self) -> Any:
        from headrace.testing.simulation import content_of

        return content_of(self._log)

    def counter(self, name: str) -> int:
        return self._log.counter(name)

    def sync(self) -> int:
        return self._log.sync()

    def tick(self) -> None:
        self._log.tick()

    def close(self) -> None:
        self._log.close()


def _serve(pipe: Connection, folder: str, settings: dict[str, Any]) -> None:
    served = Served(folder, settings)
    while True:
        try:
            name, given, named = pipe.recv()
        except EOFError:
            return
        try:
            result = getattr(served, name)(*given, **named)
        except errors.HeadraceError as error:
            pipe.send(("error", error))
        else:
            pipe.send(("result", result))
        if name == "close":
            return
