"""A machine in memory: files with a page cache, names, locks, shared maps, processes, a clock.

`SimulatedMachine` stands in the place of the operating system. `machine.process()` is the `System`
of one simulated process; all processes of a machine see the same page cache, as real ones do. A
killed process loses its handles and locks, and leaves the page cache as it was. What a *power cut*
leaves is another matter: `machine.crash_states(at)` enumerates it from the operation log (see
`headrace.testing.powercut`), `machine.killed_states(at)` what the death of all processes leaves.

Differences from a real machine, on purpose: a folder entry is on the disk only after `fsync_dir`
(ext4 is often kinder), a mapped file cannot grow far beyond its first size, and a clock moves one
microsecond per operation.
"""

from __future__ import annotations

import errno as codes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pyarrow as pa

from headrace.log.embedded.system import Buffer
from headrace.testing.oplog import PAGE, Image, Op, parent
from headrace.testing.verdicts import Violated

if TYPE_CHECKING:
    from headrace.testing.powercut import CrashState

T = TypeVar("T")
_MAP_RESERVE = 32 << 10
_START_US = 1_700_000_000_000_000


class Killed(BaseException):
    """Thrown inside a simulated process that is dead: no handler of production code takes it."""


class Deadlock(Violated):
    """Everybody waits, and nobody can wake anybody."""


class Endless(Violated):
    """Something goes on and on."""


class Conductor(Protocol):
    """Decides which simulated process runs; see `headrace.testing.schedule`."""

    def step(self, process: SimulatedProcess, kind: str) -> None:
        """The process is about to do an operation: let others go first, perhaps."""

    def sleep(
        self, process: SimulatedProcess, word: tuple[int, int], timeout: float | None
    ) -> None:
        """The process sleeps on a futex word (inode, index)."""

    def wake(self, word: tuple[int, int], count: int) -> None:
        """Up to `count` sleepers of a word go on."""


class _Inode:
    """A file's content as the page cache has it."""

    __slots__ = ("buffer", "length", "lock", "mapped", "number", "recorded")

    def __init__(self, number: int, content: bytes = b"") -> None:
        self.number = number
        self.buffer: bytes | bytearray = content  # bytes until the first change: copies are free
        self.length = len(content)
        self.lock: SimulatedFile | None = None
        self.mapped = False
        self.recorded = b""  # a mapped file's content as the operation log knows it

    def content(self) -> bytes:
        if isinstance(self.buffer, bytes):
            return self.buffer
        return bytes(memoryview(self.buffer)[: self.length])

    def writable(self) -> bytearray:
        if isinstance(self.buffer, bytes):
            self.buffer = bytearray(self.buffer)
        return self.buffer

    def resize(self, length: int) -> None:
        buffer = self.writable()
        if length < self.length:
            buffer[length : self.length] = bytes(self.length - length)
        elif length > len(buffer):
            if self.mapped:
                raise NotImplementedError("the simulated machine cannot grow a mapped file so far")
            buffer.extend(bytes(length - len(buffer)))
        self.length = length

    def write(self, data: bytes, offset: int) -> None:
        if offset + len(data) > self.length:
            self.resize(offset + len(data))
        self.writable()[offset : offset + len(data)] = data
        if self.mapped:
            self.recorded = self.content()

    def map(self, size: int) -> memoryview:
        if not self.mapped:
            buffer = self.writable()
            buffer.extend(bytes(max(self.length, size) + _MAP_RESERVE - len(buffer)))
            self.mapped = True
        if size > self.length:
            self.resize(size)
        self.recorded = self.content()
        return memoryview(self.writable())[:size]


class SimulatedFile:
    """An open file of a simulated process."""

    def __init__(self, process: SimulatedProcess, path: str, inode: _Inode) -> None:
        """Handles are made by `SimulatedProcess.open` and `create`."""
        self.path = path
        self._process = process
        self._inode = inode
        self._open = True

    def pread(self, length: int, offset: int) -> bytes:
        """See `File`."""
        self._enter("pread")
        inode = self._inode
        return bytes(
            memoryview(inode.buffer)[offset : max(offset, min(offset + length, inode.length))]
        )

    def read(self, length: int, offset: int) -> pa.Buffer:
        """See `File`."""
        return pa.py_buffer(self.pread(length, offset))

    def read_nothing_ahead(self) -> None:
        """See `File`; nothing is."""

    def again(self) -> SimulatedFile:
        """See `File`."""
        self._enter("open")
        return self._process._handle(self.path, self._inode)

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        """See `File`."""
        data = b"".join(buffers)
        cuts: list[int] = []
        for buffer in buffers[:-1]:
            cuts.append((cuts[-1] if cuts else 0) + memoryview(buffer).nbytes)
        fault = self._enter("pwritev", raises=False)
        if fault is not None:
            done = fault.portion(len(data))
            if done:
                self._write(data[:done], offset, ())
            fault.strike(self._process, self.path)
        self._write(data, offset, tuple(cuts))

    def fdatasync(self) -> None:
        """See `File`."""
        fault = self._enter("fdatasync", raises=False)
        machine = self._process.machine
        failed = fault.errno if fault is not None else 0
        if fault is None or failed:
            machine.record(
                self._process, "fdatasync", self.path, inode=self._inode.number, failed=failed,
                drops=fault is not None and fault.drops,
            )  # fmt: skip
        if fault is not None:
            if fault.evicts:
                self._evict()
            fault.strike(self._process, self.path)
        self._process.leave("fdatasync")

    def _evict(self) -> None:
        """The pages that could not be written leave the cache: what the disk has comes back."""
        from headrace.testing.powercut import Disk

        machine = self._process.machine
        content = Disk.replayed(machine, len(machine.ops)).certain(self._inode.number)
        content = content[: self._inode.length].ljust(self._inode.length, b"\0")
        machine.record(self._process, "evict", self.path, inode=self._inode.number, data=content)
        self._inode.writable()[: len(content)] = content

    def size(self) -> int:
        """See `File`."""
        self._enter("size")
        return self._inode.length

    def try_lock(self) -> bool:
        """See `File`."""
        self._enter("lock")
        if self._inode.lock not in (None, self):
            return False
        self._inode.lock = self
        self._process.machine.record(self._process, "lock", self.path)
        return True

    def unlock(self) -> None:
        """See `File`."""
        self._enter("unlock")
        if self._inode.lock is self:
            self._inode.lock = None
            self._process.machine.record(self._process, "unlock", self.path)

    def close(self) -> None:
        """See `File`."""
        if self._open and self._process.alive:
            self._process.enter("close", self.path)
        self.drop()

    def drop(self) -> None:
        """Close it without a word, as the death of its process does."""
        self._open = False
        self._process.handles.discard(self)
        if self._inode.lock is self:
            self._inode.lock = None

    def _enter(self, kind: str, *, raises: bool = True) -> _Fault | None:
        self._process.check_alive()
        if not self._open:
            raise OSError(codes.EBADF, os.strerror(codes.EBADF), self.path)
        return self._process.enter(kind, self.path, raises=raises)

    def _write(self, data: bytes, offset: int, cuts: tuple[int, ...]) -> None:
        machine = self._process.machine
        machine.record(
            self._process, "write", self.path,
            inode=self._inode.number, offset=offset, data=data, cuts=cuts,
        )  # fmt: skip
        self._inode.write(data, offset)


class SimulatedShared:
    """A mapped file of a simulated process."""

    def __init__(self, process: SimulatedProcess, path: str, inode: _Inode, size: int) -> None:
        """Maps are made by `SimulatedProcess.map`."""
        self._process = process
        self._path = path
        self._inode = inode
        self.view = inode.map(size)

    def identity(self) -> int:
        """See `Shared`."""
        return self._inode.number

    def in_place(self) -> bool:
        """See `Shared`."""
        return self._process.machine.names.get(self._path) is self._inode

    def wait(self, index: int, seen: int, timeout: float | None) -> None:
        """See `Shared`."""
        process = self._process
        process.enter("wait", self._path)
        if memoryview(self._inode.buffer)[4 * index : 4 * index + 4] == seen.to_bytes(4, "little"):
            word = (self._inode.number, index)
            process.machine.sleep(process, word, timeout)

    def wake(self, index: int, count: int) -> None:
        """See `Shared`."""
        process = self._process
        process.enter("wake", self._path)
        process.machine.record(process, "wake", self._path, offset=index, size=count)
        if process.machine.conductor is not None:
            process.machine.conductor.wake((self._inode.number, index), count)

    def close(self) -> None:
        """See `Shared`."""
        self.view = memoryview(b"")


class SimulatedProcess:
    """The `System` of one process of a simulated machine."""

    def __init__(self, machine: SimulatedMachine, pid: int) -> None:
        """Processes are made by `SimulatedMachine.process`."""
        self.machine = machine
        self.alive = True
        self.handles: set[SimulatedFile] = set()
        self._pid = pid
        self._maps_at_death: dict[int, bytes] = {}

    # --- the System ---

    def open(self, path: str, *, create: bool = False) -> SimulatedFile:
        """See `System`."""
        self.enter("open", path)
        inode = self.machine.names.get(path)
        if inode is None and create:
            inode = self._linked(path, "create", 0)
        if inode is None:
            raise FileNotFoundError(codes.ENOENT, os.strerror(codes.ENOENT), path)
        return self._handle(path, inode)

    def create(self, path: str, size: int) -> SimulatedFile:
        """See `System`; when it fails in the middle, the name is taken away again."""
        fault = self.enter("create", path, raises=False)
        inode = self._linked(path, "create", size)
        if fault is not None:
            if fault.errno:
                self._remove(path)
            fault.strike(self, path)
        inode.resize(size)
        return self._handle(path, inode)

    def mkdir(self, path: str) -> None:
        """See `System`."""
        path = path.rstrip("/") or "/"
        self.enter("mkdir", path)
        if path in self.machine.folders:
            return
        if parent(path) not in self.machine.folders:
            self.mkdir(parent(path))
        self.machine.record(self, "mkdir", path)
        self.machine.folders.add(path)

    def listdir(self, path: str) -> list[str]:
        """See `System`."""
        path = path.rstrip("/") or "/"
        self.enter("listdir", path)
        there = [*self.machine.names, *(self.machine.folders - {"/"})]
        return sorted(name.rpartition("/")[2] for name in there if parent(name) == path)

    def rename(self, old: str, new: str) -> None:
        """See `System`."""
        self.enter("rename", old)
        names = self.machine.names
        if old not in names or parent(new) not in self.machine.folders:
            raise FileNotFoundError(codes.ENOENT, os.strerror(codes.ENOENT), old)
        self.machine.record(self, "rename", old, inode=names[old].number, other=new)
        names[new] = names.pop(old)

    def unlink(self, path: str) -> None:
        """See `System`."""
        self.enter("unlink", path)
        if path in self.machine.names:
            self._remove(path)

    def fsync_dir(self, path: str) -> None:
        """See `System`."""
        path = path.rstrip("/") or "/"
        fault = self.enter("fsync_dir", path, raises=False)
        if path not in self.machine.folders:
            raise FileNotFoundError(codes.ENOENT, os.strerror(codes.ENOENT), path)
        failed = fault.errno if fault is not None else 0
        if fault is None or failed:
            self.machine.record(self, "fsync_dir", path, failed=failed)
        if fault is not None:
            fault.strike(self, path)
        self.leave("fsync_dir")

    def map(self, path: str, size: int) -> SimulatedShared:
        """See `System`."""
        self.enter("map", path)
        inode = self.machine.names.get(path) or self._linked(path, "create", 0)
        if inode.length < size:
            self.machine.record(self, "size", path, inode=inode.number, size=size)
        return SimulatedShared(self, path, inode, size)

    def boot_id(self) -> bytes:
        """See `System`."""
        return self.machine.boot

    def now_us(self) -> int:
        """See `System`."""
        return _START_US + self.machine.clock_us

    def monotonic(self) -> float:
        """See `System`."""
        return self.machine.clock_us / 1e6

    def pid(self) -> int:
        """See `System`."""
        return self._pid

    def give_way(self) -> None:
        """See `System`: as every operation does here."""
        self.enter("give way", "")

    def random(self, length: int) -> bytes:
        """See `System`; the same in every run of the machine."""
        return self.machine.dice.randbytes(length)

    def takes_short_cut(self) -> bool:
        """See `System`."""
        return self.machine.short_cut

    def check_folder(self, path: str) -> None:
        """See `System`: a simulated disk can always lock."""

    # --- its life ---

    def run(self, work: Callable[[], T]) -> T | None:
        """Do the work; None when the process died in the middle of it."""
        try:
            return work()
        except Killed:
            return None
        finally:
            if not self.alive:
                self.bury()

    def kill(self) -> None:
        """`kill -9`: locks and handles are gone, the page cache and the maps stay as they are."""
        if self.alive:
            self.machine.note_stores()
            self.alive = False
            for handle in list(self.handles):
                handle.drop()
            inodes = self.machine.mapped
            self._maps_at_death = {number: inode.content() for number, inode in inodes.items()}

    def bury(self) -> None:
        """Undo what the handlers of a dead process wrote to the maps while the stack unwound."""
        for number, content in self._maps_at_death.items():
            inode = self.machine.mapped[number]
            inode.writable()[: len(content)] = content
        self._maps_at_death = {}

    def check_alive(self) -> None:
        """Raise in a process that is dead."""
        if not self.alive:
            raise Killed

    def enter(self, kind: str, path: str, *, raises: bool = True) -> _Fault | None:
        """Every operation begins here: others may run, and a fault may be due."""
        self.check_alive()
        machine = self.machine
        if machine.conductor is not None:
            machine.conductor.step(self, kind)
            self.check_alive()
        machine.clock_us += 1
        machine.note_stores(self._pid)
        fault = machine.due(kind, path, self)
        if fault is not None and raises:
            fault.strike(self, path)
        return fault

    def leave(self, kind: str) -> None:
        """An operation that takes long ends: others may have run meanwhile."""
        if self.machine.conductor is not None:
            self.machine.conductor.step(self, f"{kind} done")
            self.check_alive()

    def _handle(self, path: str, inode: _Inode) -> SimulatedFile:
        handle = SimulatedFile(self, path, inode)
        self.handles.add(handle)
        return handle

    def _linked(self, path: str, kind: str, size: int) -> _Inode:
        machine = self.machine
        if parent(path) not in machine.folders:
            raise FileNotFoundError(codes.ENOENT, os.strerror(codes.ENOENT), path)
        inode = machine.names.get(path)
        if inode is None:
            inode = machine.new_inode()
        machine.record(self, kind, path, inode=inode.number, size=size)
        inode.resize(0)
        machine.names[path] = inode
        return inode

    def _remove(self, path: str) -> None:
        self.machine.record(self, "unlink", path, inode=self.machine.names[path].number)
        del self.machine.names[path]


@dataclass(slots=True)
class _Fault:
    """One operation that shall fail, or in which its process shall die."""

    kind: str
    nth: int
    errno: int
    """0: the process is killed."""
    pid: int | None
    path: str
    persistent: bool = False
    drops: bool = False
    evicts: bool = False
    fraction: float = 0.0

    def portion(self, length: int) -> int:
        """How much of a write still reaches the page cache."""
        return int(length * self.fraction)

    def strike(self, process: SimulatedProcess, path: str) -> None:
        """End the operation."""
        if self.errno:
            raise OSError(self.errno, os.strerror(self.errno), path)
        process.kill()
        raise Killed


class SimulatedMachine:
    """Files, maps, locks, a clock and processes, all in memory, all recorded."""

    def __init__(
        self, image: Image | None = None, *, boot: bytes = bytes(16), clock_us: int = 0
    ) -> None:
        """Start with what the disk holds; everything in an image is on the disk already."""
        self.start = image or Image()
        self.boot = boot
        self.clock_us = clock_us
        self.dice = Random(boot)
        self.short_cut = False
        """Whether its processes append by the short cut, where that is compiled."""
        self.generation = 0
        """How many crashes this machine has behind it."""
        self.ops: list[Op] = []
        self.recorded = True
        """False: stores to maps are not looked for, and no disks can be told from the operations.
        It is for runs of which only the end counts, and that takes less time."""
        self.ops_max = 50_000
        self.conductor: Conductor | None = None
        self.processes: list[SimulatedProcess] = []
        self.folders = set(self.start.folders)
        self.names = {
            path: _Inode(number, content) for path, (number, content) in self.start.files.items()
        }
        self.mapped: dict[int, _Inode] = {}
        self._last_inode = max((inode.number for inode in self.names.values()), default=0)
        self._faults: list[_Fault] = []

    def process(self, pid: int | None = None) -> SimulatedProcess:
        """Start a process."""
        process = SimulatedProcess(self, pid or 1001 + len(self.processes))
        self.processes.append(process)
        return process

    def image(self) -> Image:
        """What the page cache shows now."""
        files = {path: (inode.number, inode.content()) for path, inode in self.names.items()}
        return Image(frozenset(self.folders), files)

    def crash_states(self, at: int, rng: Random, bound: int) -> Iterator[CrashState]:
        """What the disk may hold after a power cut before operation `at`; see `powercut`."""
        from headrace.testing.powercut import Disk

        return Disk.replayed(self, at).crash_states(rng, bound)

    def killed_states(self, at: int, rng: Random, bound: int) -> Iterator[CrashState]:
        """What is left when all processes die before or inside operation `at`; see `powercut`."""
        from headrace.testing.powercut import Disk

        return Disk.replayed(self, at).killed_states(rng, bound)

    # --- faults ---

    def fail(
        self, kind: str, nth: int, errno: int, *, process: SimulatedProcess | None = None,
        path: str = "", **how: Any,
    ) -> None:  # fmt: skip
        """Let the `nth` call (from 1, from now) of a kind fail; `path`: only paths that contain it.

        `persistent=True`: and every one after it. `fraction=0.5`: half of a failing write is
        written first. What a failing sync should have written is taken for clean, and never
        written, unless `drops=False`; with `evicts=True` it is also gone from the page cache.
        """
        pid = process.pid() if process is not None else None
        how = {"drops": True, **how}
        self._faults.append(_Fault(kind, nth, errno, pid, path, **how))

    def kill_at(
        self, kind: str, nth: int, *, process: SimulatedProcess | None = None,
        path: str = "", fraction: float = 0.0,
    ) -> None:  # fmt: skip
        """Kill the process that does the `nth` call of a kind, `fraction` of a write done."""
        pid = process.pid() if process is not None else None
        self._faults.append(_Fault(kind, nth, 0, pid, path, fraction=fraction))

    def due(self, kind: str, path: str, process: SimulatedProcess) -> _Fault | None:
        """The fault that this operation meets, if any."""
        for fault in self._faults:
            if fault.kind != kind or fault.path not in path:
                continue
            if fault.pid is not None and fault.pid != process.pid():
                continue
            fault.nth -= 1
            if fault.nth == 0 or (fault.nth < 0 and fault.persistent):
                return fault
        return None

    def heal(self) -> None:
        """No more faults."""
        self._faults.clear()

    # --- for the processes ---

    def new_inode(self) -> _Inode:
        """A file without a name yet."""
        self._last_inode += 1
        return _Inode(self._last_inode)

    def record(
        self, process: SimulatedProcess | None, kind: str, path: str, **rest: object
    ) -> None:
        """Add an operation to the log."""
        pid = process.pid() if process is not None else 0
        if len(self.ops) >= self.ops_max:
            raise Endless(f"{self.ops_max} operations and no end; the last: {self.ops[-1]}")
        self.ops.append(Op(len(self.ops), pid, kind, path, **rest))  # type: ignore[arg-type]

    def note_stores(self, pid: int = 0) -> None:
        """Record what was stored to maps since the last operation, page by page."""
        if not self.recorded:
            return
        for path, inode in self.names.items():
            if not inode.mapped:
                continue
            self.mapped[inode.number] = inode
            now = inode.content()
            if now == inode.recorded:
                continue
            before = inode.recorded
            for offset in range(0, len(now), PAGE):
                page = now[offset : offset + PAGE]
                if page != before[offset : offset + PAGE]:
                    op = Op(len(self.ops), pid, "store", path, inode.number, offset, data=page)
                    self.ops.append(op)
            inode.recorded = now

    def sleep(
        self, process: SimulatedProcess, word: tuple[int, int], timeout: float | None
    ) -> None:
        """Sleep on a futex word; without a conductor nobody else runs, so time passes."""
        if self.conductor is not None:
            self.conductor.sleep(process, word, timeout)
        elif timeout is None:
            raise Deadlock(f"process {process.pid()} sleeps for ever on word {word}")
        else:
            self.clock_us += max(1, round(timeout * 1e6))
