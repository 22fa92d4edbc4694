"""A lock between all threads of all processes, and waiting without polling.

**Locks.** Three kinds exist on Linux. POSIX record locks vanish when *any* descriptor of the file
is closed in the process: two handles of one log in one program would unlock each other. OFD locks
and `flock` belong to the open file description; both die with the last descriptor, so a killed
process releases them at once, which is all the crash argument needs. Both are shared with a forked
child, which is why a handle re-opens its files after a fork. `flock` is taken: it is older,
whole-file, and /proc/locks names its holder. It excludes between descriptions, not between
threads, so `CrossLock` puts a thread lock around it.

**Waiting** is a futex on a word of the shared map: no polling, no file descriptor per waiter, one
system call wakes everybody in every process. A word is changed by writing a value nobody wrote
before, so that concurrent writers cannot put back a value somebody still waits on.

**Waking only those who wait.** Most releases of the append lock find nobody waiting, and then save
the system call. Who waits for a lock (1) reads the word, (2) raises the flag beside it, (3) tries
the lock, (4) sleeps if the word is still what it read; and again from (1) when it wakes. Who
releases (a) unlocks, (b) looks at the flag; if it is up: (c) lowers it, (d) changes the word, (e)
wakes one, who then raises the flag again for those still asleep. Nobody sleeps through the release
it waits for: (3) failed, so it came before (a), so the flag was up at (b), unless another releaser
lowered it in (c) after (2); but then its (d) comes after (1), and (4) does not sleep. The kernel's
own lock around each `flock` orders (2) before (b) on every processor.
"""

from __future__ import annotations

import contextlib
import threading

from headrace import errors
from headrace.log.embedded.system import File, Shared, System


class CrossLock:
    """A lock between all threads of all processes, which dies with its holder.

    `flock` says who has it; the futex word only says when to look again. A holder that is killed
    wakes nobody, so a waiter also looks by itself every 50 ms; it is never woken for nothing
    otherwise. The holder's pid stands in the shared map for the message of a timeout.
    """

    LOOK_AGAIN_SECONDS = 0.05
    LOOK_UNASKED_SECONDS = 60.0
    """Who waits for news looks by itself so often: who brought them may have died before waking."""

    def __init__(
        self, system: System, file: File, shared: Shared, *, name: str, word: int, holder: int
    ) -> None:
        """`word` counts in 32-bit words of the map, `holder` in 64-bit words."""
        self._system = system
        self._file = file
        self._shared = shared
        self._word = word
        self._holder = holder
        self._words32 = shared.view.cast("I")
        self._words64 = shared.view.cast("Q")
        self._waiting = word + 1
        self._threads = threading.RLock()  # knows whose it is
        self._owner = 0
        self._shut = False
        self._pid = system.pid()
        self._token = (self._pid << 12) ^ (id(self) >> 4)
        self.name = name

    def try_acquire(self) -> bool:
        """Take it if it is free."""
        me = threading.get_ident()
        if self._owner == me:  # a signal's handler, in the midst of what holds it
            return False
        try:
            free = self._threads.acquire(blocking=False)
            if self._shut:
                raise errors.LogClosed("the log is closed", place=self._file.path)
            if free:
                self._owner = me
                if self._file.try_lock():
                    self._words64[self._holder] = self._pid
                    return True
                self._owner = 0
                self._threads.release()
        except BaseException:  # an interrupt (^C) may come anywhere
            self.release()
            with contextlib.suppress(RuntimeError):  # taken, and not noted yet
                self._threads.release()
            raise
        return False

    def acquire(self, timeout: float) -> None:
        """Take it, or raise `LockTimeout` that names the holder."""
        if self.try_acquire():
            return
        deadline = self._system.monotonic() + timeout
        while True:
            seen = self._words32[self._word]
            self._words32[self._waiting] = 1
            if self.try_acquire():
                return
            left = deadline - self._system.monotonic()
            if left <= 0:
                raise self.timed_out(timeout)
            self._shared.wait(self._word, seen, min(left, self.LOOK_AGAIN_SECONDS))

    def seen(self) -> int:
        """The word's value now, for a later `wait_changed`."""
        return self._words32[self._word]

    def wait_changed(self, seen: int, timeout: float | None) -> None:
        """Sleep until somebody has released the lock since `seen` was read, or a minute; look."""
        limit = self.LOOK_UNASKED_SECONDS
        self._shared.wait(self._word, seen, limit if timeout is None else min(timeout, limit))

    def release(self, wake: int = 1) -> None:
        """Give it back and wake that many waiters; one only if somebody waits for the lock.

        Nothing, if this thread has it not: so it can be acquired within the `try` that releases it,
        and an interrupt finds no place between the two.
        """
        if self._owner != threading.get_ident():
            return
        try:
            self._words64[self._holder] = 0
            self._file.unlock()
        finally:
            self._owner = 0
            self._threads.release()
        if wake > 1 or self._words32[self._waiting]:
            self.signal(wake)

    def signal(self, wake: int) -> None:
        """Change the word to a value nobody waits on, and wake."""
        self._words32[self._waiting] = 0
        self._token = (self._token + 0x9E3779B1) & 0xFFFFFFFF
        self._words32[self._word] = self._token
        self._shared.wake(self._word, wake)

    def shut(self, timeout: float) -> None:
        """Let the thread that has it finish, and none after it: it is never given back."""
        self._shut = True
        if self._threads.acquire(timeout=timeout):  # else its file is closed by who has it
            self._file.close()

    def abandon(self) -> None:
        """In a forked child: close the description shared with the parent, without unlocking."""
        self._file.close()

    def timed_out(self, timeout: float) -> errors.LockTimeout:
        """The error that names the holder."""
        pid = self._words64[self._holder]
        who = f"process {pid}{_process_state(pid)}" if pid else "another process"
        return errors.LockTimeout(
            f"the {self.name} lock was not free within {timeout:g} s: {who} holds it",
            place=self._file.path,
            pid=pid,
        )


def _process_state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return " (stopped: continue it with `kill -CONT`, or end it)" if state in "Tt" else ""
