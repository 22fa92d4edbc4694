"""The status, for all who look: made once, once a second at most, and only while somebody looks."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from headrace.errors import HeadraceError
from headrace.serving.feed import sse
from headrace.serving.problems import problem

EVERY_SECONDS = 1.0
RATE_SECONDS = 5.0

Status = dict[str, Any]


class Rates:
    """Rows a second of each topic, over the last few seconds."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._seen: deque[tuple[float, dict[str, int]]] = deque()

    def add(self, now: float, topics: list[dict[str, Any]]) -> None:
        """Note the rows of each topic, and put `rate` beside them; None: not known yet."""
        rows = {str(topic["name"]): int(topic["rows"]) for topic in topics}
        while len(self._seen) > 1 and now - self._seen[1][0] >= RATE_SECONDS:
            self._seen.popleft()
        then, before = self._seen[0] if self._seen else (now, {})
        for topic in topics:
            name = topic["name"]
            passed = now - then
            known = passed > 0 and name in before
            topic["rate"] = round((rows[name] - before[name]) / passed, 1) if known else None
        self._seen.append((now, rows))


class Live:
    """The newest status, and a stream of it for each who looks."""

    def __init__(self, make: Callable[[], Status]) -> None:
        """`make` may block; it is called in a thread, never twice at once."""
        self._make = make
        self._turn = asyncio.Lock()
        self._lookers = 0
        self._task: asyncio.Task[None] | None = None
        self._text = b""
        self._event = asyncio.Event()
        self._stopping = False

    async def status(self) -> Status:
        """The status now."""
        async with self._turn:
            return await asyncio.to_thread(self._make)

    def stop(self) -> None:
        """End all streams."""
        self._stopping = True
        self._tell(b"")

    def _tell(self, text: bytes) -> None:
        self._text = text
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def _push(self) -> None:
        while not self._stopping:
            try:
                self._tell(sse("status", await self.status()))
            except HeadraceError as error:
                self._tell(sse("problem", problem(error)))
            except Exception as error:  # noqa: BLE001 - a failing look must not end the looking
                self._tell(sse("problem", {"title": f"{type(error).__name__}: {error}"}))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._event.wait(), EVERY_SECONDS)

    async def stream(self) -> AsyncIterator[bytes]:
        """Each new status as an event; one who is slow misses some, and gets the newest."""
        self._lookers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._push())
        try:
            yield b"retry: 1000\n\n"
            if self._text:
                yield self._text
            while not self._stopping:
                await self._event.wait()
                if self._text:
                    yield self._text
        finally:
            self._lookers -= 1
            if not self._lookers and self._task is not None:
                self._task.cancel()
                self._task, self._text = None, b""


def read_checks(text: str) -> list[dict[str, Any]]:
    """The running checks that somebody wrote down, as far as they are understood."""
    try:
        found = json.loads(text)
    except ValueError:
        return []
    return [
        {"label": str(one.get("label", "")), "ok": one.get("ok"), "text": str(one["text"])}
        for one in (found if isinstance(found, list) else ())
        if isinstance(one, dict) and "text" in one
    ]
