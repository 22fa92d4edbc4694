"""The way to the short cut (`shortcut.c`): an append and its sync in C, where C was compiled.

A log on the real machine tries it first, and goes the long way (`journal.Journal`) where it answers
that it cannot. The long way then *fits* it to what has changed: the newest file, the array of ends,
the table of counters. Handles that only read have none, nor simulated machines unless they want it:
then every call goes through their `System`, as those of the long way do, and is enumerated, too.

`HEADRACE_SHORTCUT=0` in the environment leaves it out.
"""

from __future__ import annotations

import importlib
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from headrace.log.embedded.live import digest_of
from headrace.log.embedded.system import File, OsSystem

if TYPE_CHECKING:
    from headrace.log.embedded.journal import Journal

VERSION = 2
"""Of what `Compiled` asks for; `shortcut.c` says the same."""
LONG_WAY, NOT_IN_PLACE = -1, -2
SpreadBy = Callable[[pa.Array, int, bool], tuple[bytes, bytes | None] | None]
"""A key column without nulls, partitions, ordered: runs, and the order to bring the rows into."""
_CONDITION = struct.Struct("<16sQQ")


class Compiled(Protocol):
    """What `_shortcut.ShortCut` has; a number is an error of the operating system."""

    def append(
        self,
        sections: bytes,
        runs: bytes,
        control: bytes,
        conditions: bytes,
        bodies: Any,
        flags: int,
        catalog: int,
        /,
    ) -> tuple[int, int, int, bytes, int] | int | None:
        """Position, time, end, runs, and LONG_WAY to the sync; None: the long way.

        Or the number of the error that writing met; below 0 if a part of it may be there.
        """

    def append_batch(
        self,
        section: bytes,
        runs: bytes | None,
        body: Any,
        rows: int,
        checksum: int | None,
        catalog: int,
        durable: bool,
        /,
    ) -> tuple[int, int, int, bytes, int] | int | None:
        """As `append`, for one batch, of partition 0 unless runs say; what its `sync` gave is last.

        Without the checksum of a small body it is worked out.
        """

    def sync(self, end: int, position: int, /) -> int:
        """0, or why not."""

    def fit(
        self, file: File, number: int, size: int, ends: Any, counters: Any, table: int, /
    ) -> None:
        """Use these from now on. Nobody else may close the file; a reader needs nothing else."""

    def next(
        self, seen: int, cursor: int, previous: int, topic: int, seconds: float, /
    ) -> tuple[bool, int, int, int, int, int, int, int, bytes, bytes] | bool:
        """Sleep once if nothing is behind `cursor`; the rows of a small entry that is the last.

        Whether it is synced (else `confirm` it); position, received and sent time, checksum and
        length of the record; schema, number, runs and bytes of the rows. False: nothing yet; True:
        something else, see what it is.
        """

    def confirm(self, cursor: int, end: int, checksum: int, seconds: float, /) -> bool:
        """Wait until the record at `cursor` is synced, a second at most; whether it is this one."""

    def syncs(self) -> int:
        """How often it has synced."""

    def abandon(self) -> None:
        """In a forked child: let go of what is the parent's, without unlocking."""

    def close(self) -> None:
        """Let nobody in any more; who is inside closes it."""


def compiled() -> Any:
    """The compiled module, or None."""
    if os.environ.get("HEADRACE_SHORTCUT") == "0":
        return None
    try:
        found = importlib.import_module("headrace.log.embedded._shortcut")
    except ImportError:
        return None
    return found if getattr(found, "VERSION", 0) == VERSION else None  # of an older source


def opened(journal: Journal) -> Compiled | None:
    """A short cut for this handle, not fitted yet; None where there is none."""
    system, folder, shared = journal.system, journal.folder, journal.live.shared
    module = compiled() if system.takes_short_cut() else None
    if module is None:
        return None
    try:
        found: Compiled = module.ShortCut(
            None if type(system) is OsSystem else system,
            system.open(f"{folder}/locks/append"),
            system.open(f"{folder}/locks/sync"),
            shared,
            shared.view,
            f"{folder}/live/words",
            shared.identity(),
            system.pid(),
            journal.log_id,
            journal.settings.journal_entries_max,
            min(journal.settings.inline_bytes_max, journal.settings.append_bytes_max),
            (system.pid() << 12 ^ id(journal) >> 3) & 0xFFFFFFFF,
        )
    except (OSError, ValueError):  # no descriptor left, a disk that is read only, a very long path
        return None
    return found


def spread_by(keys: Iterable[pa.DataType]) -> SpreadBy | None:
    """What gives the rows of a batch their partitions, by a key of this type; None: numpy does."""
    module, types = compiled(), list(keys)
    if module is None or len(types) != 1:
        return None
    (kind,) = types
    if not pa.types.is_signed_integer(kind) and not pa.types.is_string(kind):
        return None
    spread, width = module.spread, 0 if pa.types.is_string(kind) else kind.bit_width >> 3

    def by(column: pa.Array, partitions: int, ordered: bool) -> tuple[bytes, bytes | None] | None:
        if column.null_count:
            return None
        buffers = column.buffers()
        text = None if width else buffers[2]
        if buffers[1] is None or (not width and text is None):
            return None
        rows = len(column)
        found: tuple[bytes, bytes | None] | None = spread(
            buffers[1], text, width, column.offset, rows, partitions, ordered
        )
        return found

    return by


def conditions(control: Mapping[str, Any]) -> bytes:
    """What the short cut needs to decide: names by their digests, values, whether they move."""
    return b"".join(
        _CONDITION.pack(digest_of(name), value, moves)
        for moves, kind in enumerate(("require", "expect"))
        for name, value in control.get(kind, {}).items()
    )
