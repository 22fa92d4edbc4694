"""The one small object through which the embedded log touches the machine.

Files, shared memory, locks, waiting, the clock and the boot id: everything the log asks of the
operating system is a method here, so the test kit can put another `System` in its place that
records every operation and enumerates what a disk may hold after a power cut
(`headrace.testing.disk`), or that reboots, jumps in time, or fails at the N-th call.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import pyarrow as pa

from headrace import errors

Buffer = bytes | bytearray | memoryview


class File(Protocol):
    """An open file. Every call raises `OSError` as the operating system does."""

    path: str

    def pread(self, length: int, offset: int) -> bytes:
        """Up to `length` bytes at `offset`; fewer only at the end of the file."""

    def read(self, length: int, offset: int) -> pa.Buffer:
        """As `pread`; much of it into Arrow's pool, warm where memory of `bytes` is not."""

    def read_nothing_ahead(self) -> None:
        """From now on read what is asked for, and not what follows it."""

    def again(self) -> File:
        """The same file, opened once more, whatever its path leads to by now."""

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Write all buffers, one after the other, at `offset`; all of it, or raise."""

    def fdatasync(self) -> None:
        """Return when everything written to the file, by anybody, is on the disk."""

    def size(self) -> int:
        """Bytes in the file."""

    def try_lock(self) -> bool:
        """Take the file's lock if nobody has it."""

    def unlock(self) -> None:
        """Give the lock back."""

    def close(self) -> None:
        """Close it; a lock held goes with it."""


class Shared(Protocol):
    """Memory shared by all processes that map the same path."""

    view: memoryview

    def identity(self) -> int:
        """A number that another copy of this file would not have."""

    def in_place(self) -> bool:
        """Whether its path still leads to it."""

    def wait(self, index: int, seen: int, timeout: float | None) -> None:
        """Sleep until 32-bit word `index` is no longer `seen`, or the timeout (None: for ever)."""

    def wake(self, index: int, count: int) -> None:
        """Wake up to `count` sleepers of word `index`."""

    def close(self) -> None:
        """Unmap it."""


class System(Protocol):
    """What the log asks of the machine."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open a file for reading and, where allowed, writing; `create` makes an empty one."""

    def create(self, path: str, size: int) -> File:
        """Make a file that reads as `size` zeros and has its blocks; replaces an old one."""

    def mkdir(self, path: str) -> None:
        """Make a folder; no error when it is there."""

    def listdir(self, path: str) -> list[str]:
        """Names in a folder; an absent folder has none."""

    def rename(self, old: str, new: str) -> None:
        """Rename a file, replacing `new`."""

    def unlink(self, path: str) -> None:
        """Remove a file; no error when it is gone."""

    def fsync_dir(self, path: str) -> None:
        """Return when the names in the folder are on the disk."""

    def map(self, path: str, size: int) -> Shared:
        """Map a file of at least `size` bytes (made, or made longer, as needed)."""

    def boot_id(self) -> bytes:
        """16 bytes that change when the machine boots."""

    def now_us(self) -> int:
        """The wall clock, microseconds since 1970."""

    def monotonic(self) -> float:
        """A clock that only goes forward, seconds."""

    def pid(self) -> int:
        """This process."""

    def give_way(self) -> None:
        """Let others run who are ready to."""

    def random(self, count: int) -> bytes:
        """Bytes that nobody has had before."""

    def takes_short_cut(self) -> bool:
        """Whether an ordinary append may be made in C (`shortcut`)."""

    def check_folder(self, path: str) -> None:
        """Raise if the filesystem below `path` cannot lock or share memory between processes."""


NETWORK_FILESYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "afs", "davfs")
) | {"ncpfs", "gpfs", "beegfs", "ocfs2", "sshfs", "s3fs", "rclone"}
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
FUTEX_WAIT, FUTEX_WAKE = 0, 1
EVERYBODY = 0x7FFFFFFF
MOUNTS = "/proc/self/mountinfo"
FEW_BYTES = 64 << 10
IOV_MAX = os.sysconf("SC_IOV_MAX")
TRY_LOCK = fcntl.LOCK_EX | fcntl.LOCK_NB


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@functools.cache
def _futex() -> tuple[Callable[..., int], Callable[..., int]]:
    """The system call for waiting, and for waking: that never blocks, so it keeps the GIL."""
    number = FUTEX_NUMBERS.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        raise errors.FilesystemCannotLock(
            f"the embedded log does not run on {platform.system()} {platform.machine()} yet",
            why="waiting across processes uses the Linux futex on x86-64 or arm64",
            fix="run it on Linux, or connect to a log on Kafka",
        )
    wait, wake = ctypes.CDLL(None).syscall, ctypes.PyDLL(None).syscall
    pointer = ctypes.c_void_p
    wait.restype = wake.restype = ctypes.c_long
    wake.argtypes = (ctypes.c_long, pointer, ctypes.c_int, ctypes.c_uint32)
    wait.argtypes = (*wake.argtypes, pointer)
    return functools.partial(wait, number), functools.partial(wake, number)


class OsFile:
    """A real file."""

    __slots__ = ("_fd", "path")

    def __init__(self, path: str, fd: int) -> None:
        """Take over the descriptor."""
        self.path = path
        self._fd = fd

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def pread(self, length: int, offset: int) -> bytes:
        """See `File`."""
        data = os.pread(self._fd, length, offset)
        while len(data) < length:  # a signal or the end of the file
            more = os.pread(self._fd, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def read(self, length: int, offset: int) -> pa.Buffer:
        """See `File`."""
        if length <= FEW_BYTES:
            return pa.py_buffer(self.pread(length, offset))
        buffer = pa.allocate_buffer(length)
        done = os.preadv(self._fd, [buffer], offset)
        while done < length:  # a signal or the end of the file
            more = os.preadv(self._fd, [memoryview(buffer)[done:]], offset + done)
            if not more:
                return buffer.slice(0, done)
            done += more
        return buffer

    def read_nothing_ahead(self) -> None:
        """See `File`."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def again(self) -> OsFile:
        """See `File`."""
        return OsFile(self.path, os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC))

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        """See `File`."""
        total = sum(map(len, buffers))
        if len(buffers) > IOV_MAX:
            buffers = [b"".join(buffers)]
        written = os.pwritev(self._fd, buffers, offset)
        while written < total:  # a full disk or a signal: the rest, or the error itself
            rest = b"".join(buffers)[written:]
            written += os.pwrite(self._fd, rest, offset + written)

    def fdatasync(self) -> None:
        """See `File`."""
        os.fdatasync(self._fd)

    def size(self) -> int:
        """See `File`."""
        return os.fstat(self._fd).st_size

    def try_lock(self) -> bool:
        """See `File`."""
        try:
            fcntl.flock(self._fd, TRY_LOCK)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """See `File`."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """See `File`."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1  # first: closed twice it could be another file's by then
            os.close(fd)

    def __del__(self) -> None:
        """Close it when nobody refers to it any more."""
        self.close()


class OsShared:
    """A mapped file with futex words."""

    def __init__(self, path: str, size: int) -> None:
        """Map the file, making it or making it longer first."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            status = os.fstat(fd)
            if status.st_size < size:  # with its blocks: a full disk is an error, not a SIGBUS
                os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._path, self._identity = path, _identity(status)
        self.view = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._wait, self._wake = _futex()

    def identity(self) -> int:
        """See `Shared`."""
        return self._identity

    def in_place(self) -> bool:
        """See `Shared`."""
        try:
            return _identity(os.stat(self._path)) == self._identity
        except (FileNotFoundError, NotADirectoryError):
            return False

    def wait(self, index: int, seen: int, timeout: float | None) -> None:
        """See `Shared`."""
        limit = None
        if timeout is not None:
            limit = ctypes.byref(_Timespec(int(timeout), int((timeout % 1.0) * 1e9)))
        self._wait(self._address + 4 * index, FUTEX_WAIT, seen, limit)

    def wake(self, index: int, count: int) -> None:
        """See `Shared`."""
        self._wake(self._address + 4 * index, FUTEX_WAKE, count)

    def close(self) -> None:
        """Let go of the map; pages still referred to elsewhere live until those are gone."""
        self.view = memoryview(b"")
        with contextlib.suppress(BufferError):
            self._map.close()


def _identity(status: os.stat_result) -> int:
    return ((status.st_dev << 40) ^ status.st_ino) & 0xFFFF_FFFF_FFFF_FFFF


class OsSystem:
    """The machine we run on."""

    def open(self, path: str, *, create: bool = False) -> OsFile:
        """See `System`."""
        if create:
            return OsFile(path, os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o666))
        try:
            return OsFile(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:  # a log on a read-only disk can be checked
            if error.errno not in READ_ONLY:
                raise
            return OsFile(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def create(self, path: str, size: int) -> OsFile:
        """See `System`."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        file = OsFile(path, os.open(path, flags, 0o666))
        try:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError:
            file.close()
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        return file

    def mkdir(self, path: str) -> None:
        """See `System`."""
        os.makedirs(path, exist_ok=True)

    def listdir(self, path: str) -> list[str]:
        """See `System`."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def rename(self, old: str, new: str) -> None:
        """See `System`."""
        os.rename(old, new)

    def unlink(self, path: str) -> None:
        """See `System`."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def fsync_dir(self, path: str) -> None:
        """See `System`."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def map(self, path: str, size: int) -> OsShared:
        """See `System`."""
        return OsShared(path, size)

    def boot_id(self) -> bytes:
        """See `System`."""
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return bytes.fromhex(file.read().strip().replace("-", ""))

    def now_us(self) -> int:
        """See `System`."""
        return time.time_ns() // 1000

    monotonic = staticmethod(time.monotonic)

    def pid(self) -> int:
        """See `System`."""
        return os.getpid()

    def give_way(self) -> None:
        """See `System`."""
        os.sched_yield()

    def random(self, count: int) -> bytes:
        """See `System`."""
        return os.urandom(count)

    def takes_short_cut(self) -> bool:
        """See `System`; one made of this one hears of every call, unless it says otherwise."""
        return type(self) is OsSystem

    def check_folder(self, path: str) -> None:
        """See `System`."""
        kind = filesystem_of(path)
        if kind.removeprefix("fuse.") in NETWORK_FILESYSTEMS:
            raise errors.FilesystemCannotLock(
                f"{path} is on a {kind} filesystem", place=path, filesystem=kind
            )


def filesystem_of(path: str) -> str:
    """The type of the filesystem that holds `path`, as the kernel names it."""
    real = os.path.realpath(path)
    best, kind = "", "unknown"
    for mount, filesystem in _mounts():
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, filesystem
    return kind


def _mounts() -> Iterator[tuple[str, str]]:
    with open(MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            yield left.split(" ")[4].replace("\\040", " "), right.split(" ")[0]


@contextlib.contextmanager
def os_errors(doing: str, path: str) -> Iterator[None]:
    """Turn what the operating system says into an error of the catalogue."""
    try:
        yield
    except OSError as error:
        raise named(error, doing, path) from error


def named(error: OSError, doing: str, path: str) -> errors.HeadraceError:
    """The catalogue's error for an `OSError`."""
    fact = f"{doing}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return errors.DiskFull(fact, place=path)
    if error.errno in READ_ONLY:
        return errors.ReadOnlyDisk(fact, place=path)
    return errors.IoFailed(fact, place=path, errno=error.errno)
