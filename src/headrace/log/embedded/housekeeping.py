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
        self.asleep = True
        self.last = 0.0
        self._sync_due: float | None = None
        self.used = False
        self.problem: HeadraceError | None = None
        """The last error of the timer; the next append meets it too."""

    def appended(self, durability: str) -> None:
        """An entry was appended: the quiet second starts again, and a sync may be due."""
        self.used = True
        settings = self._settings
        if not settings.background:
            return
        self.last = now = self._journal.system.monotonic()
        sooner = False
        if durability != "fsync":
            wait = settings.interval_seconds if durability == "interval" else settings.quiet_seconds
            sooner = self._sync_due is None or now + wait < self._sync_due
            if sooner:
                self._sync_due = now + wait
        if self.asleep or sooner:
            with self._change:
                if self._thread is None and not self._stopped and not self._start():
                    self._sync_due = None
                    if durability != "fsync":  # what the timer would have done
                        self._sync()
                    return
                self.asleep = False
                self._change.notify()

    def _start(self) -> bool:
        """Whether there is a thread now: the entry is taken, also where there cannot be one."""
        name = "headrace-housekeeper"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # too many threads, or the program is about to end
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        while self._wait():
            self._work(self.last, self._journal.system.monotonic())

    def _wait(self) -> bool:
        """Sleep until there is work; False when stopped."""
        with self._change:
            while not self._stopped:
                if self.asleep:
                    self._change.wait()
                    continue
                due = self.last + self._settings.quiet_seconds
                if self._sync_due is not None:
                    due = min(due, self._sync_due)
                pause = due - self._journal.system.monotonic()
                if pause <= 0:
                    return True
                self._change.wait(pause)
        return False

    def _work(self, last: float, now: float) -> None:
        journal = self._journal
        try:
            if self._sync_due is not None and now >= self._sync_due:
                self._sync_due = None
                self._sync()
            if now - last >= self._settings.quiet_seconds:
                journal.mark()
                with self._change:
                    self.asleep = self.last == last
        except HeadraceError as error:
            self.problem = error
            with self._change:
                self.asleep = True

    def _sync(self) -> None:
        tail = self._journal.live.tail()
        self._journal.sync(tail.end, tail.position)

    def stop(self) -> None:
        """End the thread."""
        with self._change:
            self._stopped = True
            self._change.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
