"""What a simulated machine did, and what a disk holds: plain values shared by the test kit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import xxhash

SECTOR = 512
"""What a disk writes whole or not at all."""
PAGE = 4096
"""What the page cache writes back at once."""
DERIVED = frozenset(("live", "locks"))
"""Folders whose files hold nothing that is promised: shared memory and locks."""

EFFECTS = frozenset(
    (
        "create",
        "write",
        "store",
        "size",
        "fdatasync",
        "mkdir",
        "rename",
        "unlink",
        "fsync_dir",
        "evict",
    )
)
"""The kinds of operation that can change what a power cut leaves."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of one process on the machine."""

    index: int
    pid: int
    kind: str
    path: str
    inode: int = 0
    offset: int = 0
    size: int = 0
    data: bytes = b""
    cuts: tuple[int, ...] = ()
    """Where the buffers of a `pwritev` met: a killed writer may stop at each of these."""
    other: str = ""
    """The new name of a rename."""
    failed: int = 0
    """The errno it ended with; 0 when it went well."""
    drops: bool = False
    """A failed sync after which the system takes the lost pages for clean."""

    def __str__(self) -> str:
        """One line for a report."""
        text = f"#{self.index} pid {self.pid} {self.kind} {self.path}"
        if self.other:
            text += f" -> {self.other}"
        if self.kind in ("write", "store"):
            text += f" [{self.offset}, {self.offset + len(self.data)})"
        elif self.kind in ("create", "size"):
            text += f" size {self.size}"
        return text + (f" FAILED errno {self.failed}" if self.failed else "")


@dataclass(frozen=True, slots=True)
class Image:
    """What a disk holds: folders, and files by path with their inode number and content."""

    folders: frozenset[str] = frozenset("/")
    files: Mapping[str, tuple[int, bytes]] = field(default_factory=dict)

    def digest(self, *, derived: bool = True) -> bytes:
        """Equal for equal content; file numbers do not count, nor, if so asked, derived files."""
        total = xxhash.xxh3_128()
        for folder in sorted(self.folders):
            total.update(folder.encode() + b"/\0")
        for path in sorted(self.files):
            if not derived and is_derived(path):
                continue
            content = self.files[path][1]
            total.update(path.encode() + b"\0" + xxhash.xxh3_128_digest(content))
        return total.digest()


def is_derived(path: str) -> bool:
    """Whether a file holds nothing that is promised."""
    return parent(path).rpartition("/")[2] in DERIVED


def parent(path: str) -> str:
    """The folder that holds a path's name."""
    return path.rpartition("/")[0] or "/"


def sectors(offset: int, length: int) -> range:
    """The numbers of the sectors that a write touches."""
    if not length:
        return range(0)
    return range(offset // SECTOR, (offset + length - 1) // SECTOR + 1)


def around(ops: Iterable[Op], at: int, width: int = 6) -> str:
    """The operations near one, for a report; `>` is where the power went."""
    lines = [
        f"  {'>' if op.index == at else ' '} {op}"
        for op in ops
        if at - width <= op.index <= at + width // 2
    ]
    return "\n".join(lines)
