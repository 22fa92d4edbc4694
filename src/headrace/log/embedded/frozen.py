"""A log whose disk cannot be written: full or read-only when it was opened.

What stands in the journal can be read without writing a byte, so that is what such a handle does:
locks and shared memory are its own, in memory, and nothing is changed on the disk. Appends are
refused with the error that opening met. Nobody can wake such a handle, so waiting for more ends
with that error too, and not with a sleep that never ends. Whoever opens the log when the disk can
be written again recovers it as ever.
"""

from __future__ import annotations

import errno
import os
import time
from typing import Any, cast

from headrace.log.embedded.system import File, Shared, System


class _Memory:
    """`Shared` that nobody shares."""

    def __init__(self, size: int, old: memoryview) -> None:
        self.view = memoryview(bytearray(size))
        self.view[: len(old)] = old

    def identity(self) -> int:
        return 0

    def in_place(self) -> bool:
        return True

    def wait(self, _index: int, _seen: int, timeout: float | None) -> None:
        """Other threads of this handle may hold a lock for a moment."""
        time.sleep(min(0.01, 0.01 if timeout is None else timeout))

    def wake(self, _index: int, _count: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Lock:
    """A lock file that is always free: threads are kept apart by `CrossLock` itself."""

    def __init__(self, path: str) -> None:
        self.path = path

    def try_lock(self) -> bool:
        return True

    def unlock(self) -> None:
        pass

    def close(self) -> None:
        pass


class Frozen:
    """A `System` that reads the disk of another, and keeps in memory what others would share."""

    def __init__(self, system: System) -> None:
        """Everything that is not said here is done by `system`."""
        self._system = system
        self._maps: dict[str, _Memory] = {}

    def __getattr__(self, name: str) -> Any:
        """The clock, the boot id, folders: as they are."""
        return getattr(self._system, name)

    def open(self, path: str, *, create: bool = False) -> File:
        """See `System`; only locks are opened to be made."""
        return cast("File", _Lock(path)) if create else self._system.open(path)

    def map(self, path: str, size: int) -> Shared:
        """See `System`; made longer, it keeps what it holds."""
        old = self._maps.get(path)
        view = old.view if old is not None else memoryview(b"")
        self._maps[path] = _Memory(max(size, len(view)), view)
        return self._maps[path]

    def mkdir(self, _path: str) -> None:
        """Nothing needs one."""

    def unlink(self, _path: str) -> None:
        """Nothing was made."""

    def create(self, path: str, _size: int) -> File:
        """Refused, and so are the others that write."""
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def rename(self, old: str, _new: str) -> None:
        """Refused."""
        self.create(old, 0)

    def fsync_dir(self, path: str) -> None:
        """Refused."""
        self.create(path, 0)
