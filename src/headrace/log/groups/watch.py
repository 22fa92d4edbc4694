"""Who lives, and how its death is seen at once: a locked file for each member.

A member keeps its own file below `locks/members` open and locked. The kernel lets the lock go with
the last descriptor, however the process ends: **`flock` says who lives**, without clocks. Nobody
would look at the right moment, though, so one thread a process sleeps until the kernel says that
such a file was closed (inotify, `IN_CLOSE_WRITE`): **that only says when to look**, as the futex
does for the locks of the log (decision 0003). Only its member opens a file for writing, others look
at it read-only, so nothing but the end of a member wakes anybody.

    kill -9 of A ── kernel closes A's files ── inotify ─► watch of B: A's lock is free
      ─► entry: the group without A (expects the generation) ── sync ── futex ─► all who wait

An event comes a moment *before* the lock is free (Linux notifies in `__fput`, then drops the
locks), so the look is repeated for a little while. Events can be lost (no inotify left for this
user, an entry that a dying member wrote and nobody has folded yet); then its death is found when
leases are looked at, a third of a lease later. A forked child closes its copies of the files, or it
would keep its parent alive.

A member that lives and does nothing is found by its **lease**: each iteration and commit writes the
time into the file, by the monotonic clock that all processes of a machine share.

Rejected: *a thread that blocks in `flock` on another member's file* cannot be told to look at
somebody else or to stop, so a group that changes leaves threads behind, and a ring of watchers has
a hole whenever one of them is busy; *pidfd* knows processes, not members on threads, and means
nothing in another container that shares the folder; *heartbeats* see a death late, and take a
machine under load for dead.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import threading
import weakref
from collections.abc import Iterable
from hashlib import blake2b
from typing import Protocol

from headrace.log.embedded.system import OsFile, os_errors

MEMBERS = "locks/members"
IN_CLOSE_WRITE, IN_Q_OVERFLOW = 0x8, 0x4000
_EVENT = struct.Struct("<iIII")
_TIME = struct.Struct("<d")
EVENTS_BYTES = 64 << 10
LOOKS, LOOK_SECONDS = 50, 0.001


def prefix_of(group: str) -> str:
    """What the files of a group's members begin with."""
    return blake2b(group.encode(), digest_size=6).hexdigest()


class MemberFile:
    """The file of one member, locked as long as this lives."""

    def __init__(self, folder: str, group: str, now: float) -> None:
        """Make it, lock it, and write the first sign of life."""
        pid = os.getpid()
        self.name = f"{prefix_of(group)}-{pid}-{os.urandom(4).hex()}"
        path = f"{folder}/{MEMBERS}/{self.name}"
        with os_errors("making the file of a member", path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._file = OsFile(path, os.open(path, flags, 0o666))
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX)
        self.renew(now)
        _files.add(self)

    def renew(self, now: float) -> None:
        """Say that its member does something."""
        self._file.pwritev([_TIME.pack(now)], 0)

    def remove(self) -> None:
        """The member is gone in peace."""
        with contextlib.suppress(OSError):
            os.unlink(self._file.path)
        self._file.close()

    def close(self) -> None:
        """Let the lock go, as death would; in a forked child, the parent keeps it."""
        self._file.close()


def _opened(folder: str, name: str) -> int | None:
    path = f"{folder}/{MEMBERS}/{name}"
    with os_errors("looking at the file of a member", path):
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None


def lives(folder: str, name: str) -> bool:
    """Whether the member of this file holds its lock."""
    fd = _opened(folder, name)
    if fd is None:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def last_sign(folder: str, name: str) -> float | None:
    """When the member last did something, by the monotonic clock; None: nobody knows."""
    fd = _opened(folder, name)
    if fd is None:
        return None
    try:
        data = os.pread(fd, _TIME.size, 0)
    finally:
        os.close(fd)
    return float(_TIME.unpack(data)[0]) if len(data) == _TIME.size else None


def forget(folder: str, names: Iterable[str]) -> None:
    """Remove the files of members that are dead."""
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(f"{folder}/{MEMBERS}/{name}")


class Bereaved(Protocol):
    """Somebody to be told when a member of its group may have died."""

    prefix: str

    def look(self) -> None:
        """See who lives."""


class Watch:
    """One thread that sleeps until a member's file is closed; shared by all of a folder."""

    def __init__(self, folder: str) -> None:
        """Begin to watch; without inotify it does nothing."""
        self._folder = f"{folder}/{MEMBERS}"
        os.makedirs(self._folder, exist_ok=True)
        self.told: weakref.WeakSet[Bereaved] = weakref.WeakSet()
        self._end_read, self._end_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        libc = ctypes.CDLL(None, use_errno=True)
        self._events = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self.works = self._events >= 0 and (
            libc.inotify_add_watch(self._events, os.fsencode(self._folder), IN_CLOSE_WRITE) >= 0
        )
        if self.works:
            name = "headrace-members"
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        with contextlib.suppress(OSError):
            os.write(self._end_write, b"x")
        if not self.works:
            self.close()

    def close(self) -> None:
        """Close the descriptors: by the thread at its end, or in a forked child."""
        for fd in (self._events, self._end_read, self._end_write):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._events = self._end_read = self._end_write = -1

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._events, select.POLLIN)
        poll.register(self._end_read, select.POLLIN)
        while all(fd != self._end_read for fd, _ in poll.poll()):
            with contextlib.suppress(BlockingIOError):
                self._handle(os.read(self._events, EVENTS_BYTES))
        self.close()

    def _handle(self, data: bytes) -> None:
        names = set()
        at, lost = 0, False
        while at < len(data):
            _, mask, _, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size
            names.add(os.fsdecode(data[at : at + length].rstrip(b"\0")))
            lost = lost or bool(mask & IN_Q_OVERFLOW)
            at += length
        for name in names:
            self._until_free(name)
        prefixes = {name.partition("-")[0] for name in names}
        with watches.guard:
            told = list(self.told)
        for one in told:
            if lost or one.prefix in prefixes:
                one.look()

    def _until_free(self, name: str) -> None:
        """The lock is let go a moment after the event."""
        folder = os.path.dirname(os.path.dirname(self._folder))
        pause = threading.Event()
        for _ in range(LOOKS):
            if not lives(folder, name):
                return
            pause.wait(LOOK_SECONDS)


class Watches:
    """The watches of this process, one a folder."""

    def __init__(self) -> None:
        """None yet."""
        self.guard = threading.Lock()
        self._found: dict[str, Watch] = {}

    def add(self, folder: str, one: Bereaved) -> None:
        """Have `one` told of deaths in its group, until `discard`."""
        with self.guard:
            if folder not in self._found:
                self._found[folder] = Watch(folder)
            self._found[folder].told.add(one)

    def discard(self, folder: str, one: Bereaved) -> None:
        """Tell it no more; the last one ends the watch."""
        with self.guard:
            found = self._found.get(folder)
            if found is not None:
                found.told.discard(one)
                if not found.told:
                    self._found.pop(folder).stop()

    def forked(self) -> None:
        """In the child: nobody here is a member."""
        self.guard = threading.Lock()
        for found in self._found.values():
            found.close()
        self._found.clear()
        for file in list(_files):
            file.close()


_files: weakref.WeakSet[MemberFile] = weakref.WeakSet()
watches = Watches()
os.register_at_fork(after_in_child=watches.forked)
