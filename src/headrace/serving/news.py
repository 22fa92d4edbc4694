"""Who waits for the log: one thread for all.

A thread sleeps in `log.wait` and is woken by each sync; it wakes the event loop, and the loop wakes
whoever has asked for news. So a hundred open feeds cost one sleeping thread, and an idle log costs
a look every `LOOK_SECONDS`, which is how long the thread needs to notice that it shall end. After
each wake-up it rests for `REST_SECONDS`: five hundred commits a second need not be told one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, TypeVar

from headrace import errors
from headrace.serving.feed import Feed, sse
from headrace.serving.problems import problem

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog

Found = TypeVar("Found")
_NO_TIME = re.compile(r"\b(within|after) 0(?:\.0)? s")
LOOK_SECONDS = 0.5
REST_SECONDS = 0.01
BEAT_SECONDS = 10.0
"""So long without news, and a feed says that it is still there."""


class News:
    """Wakes coroutines when the log has more, and when the server stops."""

    def __init__(self, log: EmbeddedLog) -> None:
        """Start to watch; in the event loop that shall be woken."""
        self.stopping = False
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._thread = threading.Thread(target=self._watch, name="headrace-news", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        position = self._log.position
        while not self.stopping:
            try:
                position = self._log.wait(position + 1, LOOK_SECONDS)
            except errors.WaitTimeout:
                continue
            except errors.HeadraceError:
                return  # damaged or closed: whoever reads says so
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._tell)
            time.sleep(REST_SECONDS)

    def _tell(self) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()

    def next(self) -> asyncio.Event:
        """What will be set by news that come after this call: take it before looking."""
        return self._event

    def stop(self) -> None:
        """Wake everybody for the last time; in the event loop."""
        self.stopping = True
        self._tell()

    def join(self) -> None:
        """Wait until the log is not looked at any more."""
        self._thread.join()

    async def until(
        self, look: Callable[[], Found], timeout: float, every: float | None = None
    ) -> Found:
        """What `look` gives, once it does not raise an error that passes; else that error.

        `every`: look also without news of the log, so often.
        """
        deadline = self._loop.time() + timeout
        while True:
            event = self.next()
            try:
                return await asyncio.to_thread(look)
            except errors.TransientError as error:
                left = deadline - self._loop.time()
                if left <= 0 or self.stopping:  # each look took no time, all of them did
                    error.fact = _NO_TIME.sub(rf"\1 {timeout:g} s", error.fact)
                    raise
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), left if every is None else min(left, every))

    async def stream(self, feed: Feed) -> AsyncIterator[bytes]:
        """The feed as it comes, never ahead of its reader; ends when the server stops."""
        try:
            yield b"retry: 1000\n\n"
            while not self.stopping:
                event = self.next()
                chunk = await asyncio.to_thread(feed.take)
                if not chunk:
                    try:
                        await asyncio.wait_for(event.wait(), BEAT_SECONDS)
                        continue
                    except TimeoutError:
                        chunk = feed.beat()
                yield chunk
        except errors.HeadraceError as error:  # the answer has begun: it can only be said in it
            yield sse("problem", problem(error))
        finally:
            feed.close()
