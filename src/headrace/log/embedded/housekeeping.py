"""The writer's own timer: sync what weaker durability left, mark the end after a quiet second.

One thread per handle, started by its first append and asleep without a timeout while nothing was
appended: an idle log does nothing.
"""

from __future__ import annotations

import threading

from headrace.errors import HeadraceError
from headrace.log.embedded.journal import Journal
from headrace.settings import LogSettings


class Housekeeper:
    """Runs `Journal.sync` and `Journal.mark` when it is time."""

    def __init__(self, journal: Journal, settings: LogSettings) -> None:
        """Nothing is started yet."""
        self._journal = journal
        self._settings = settings
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._asleep = True
        self._last = 0.0
        self._unsynced = False
        self.used = False
        self.problem: HeadraceError | None = None
        """The last error of the timer; the next append meets it too."""

    def appended(self, durability: str) -> None:
        """An entry was appended: the quiet second starts again."""
        self.used = True
        if not self._settings.background:
            return
        self._last = self._journal.system.monotonic()
        if durability == "interval":
            self._unsynced = True
        if self._asleep:
            with self._change:
                if self._thread is None and not self._stopped:
                    name = "headrace-housekeeper"
                    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                    self._thread.start()
                self._asleep = False
                self._change.notify()
        elif durability == "interval":
            with self._change:
                self._change.notify()

    def _run(self) -> None:
        while self._wait():
            self._work(quiet_since=self._last)

    def _wait(self) -> bool:
        """Sleep until there is work; False when stopped."""
        settings = self._settings
        with self._change:
            self._change.wait_for(lambda: self._stopped or not self._asleep)
            pause = self._last + settings.quiet_seconds - self._journal.system.monotonic()
            if self._unsynced:
                pause = min(pause, settings.interval_seconds)
            if pause > 0 and not self._stopped:
                self._change.wait(pause)
            return not self._stopped

    def _work(self, quiet_since: float) -> None:
        journal = self._journal
        try:
            if self._unsynced:
                self._unsynced = False
                journal.sync(journal.live.tail().end)
            if journal.system.monotonic() - quiet_since >= self._settings.quiet_seconds:
                journal.mark()
                with self._change:
                    if self._last == quiet_since:
                        self._asleep = True
        except HeadraceError as error:
            self.problem = error
            with self._change:
                self._asleep = True

    def stop(self) -> None:
        """End the thread."""
        with self._change:
            self._stopped = True
            self._change.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
