"""Shared memory of a log: a cache, stamped with the boot and with the entry it is folded through.

Nothing here is true; the journal is. What stands here is what every process would know had it read
the whole journal: the end, the synced end, the partition ends, the counters. So an append costs
what its rows cost, not what others wrote. The rules that make it safe:

1. Only the holder of the append lock changes anything but the synced end, which only the holder of
   the sync lock changes.
2. It is written *after* the entry is in the journal, and the tail last: into the one of two places
   that is not in use, then `STAMP` says which counts. A writer that dies in between leaves a valid
   entry at the end that the tail names; whoever takes the lock next looks there and folds it.
   Folding is absolute (`model.fold`), so a half-made update does no harm.
3. It is believed only if boot id, log id and the identity of the file itself are right. After a
   boot, or in a copied folder, it is rebuilt from the journal.

`words` is one page of 64-bit words; `ends` an array, one per partition of each topic; `counters.N`
a hash table of (blake2b-128 of the name, value, journal file in which it last changed): names are
not kept, since there may be millions. A table that is half full is replaced by a larger one under
the next number. A writer that dies while inserting may leave a slot with half a digest and value 0:
it matches no name and is not written to a checkpoint.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace import errors
from headrace.log.embedded.system import Shared, System, os_errors

MAGIC = 0x3145_5649_4C52_4848
(
    READY,
    BOOT_0,
    BOOT_1,
    IDENTITY,
    LOG_0,
    LOG_1,
    STAMP,
    SYNCED,
    SYNCED_POSITION,
    POISONED,
    DAMAGED,
    APPEND_HOLDER,
    SYNC_HOLDER,
    COUNTERS_NUMBER,
    COUNTERS_SLOTS,
    COUNTERS_USED,
    APPENDING,
) = range(17)
"""Where each word is; `APPENDING`: how many entries the last sync of the short cut covered or left
behind, from which it guesses how many it may wait for. No promise hangs on it."""
_TAIL = struct.Struct("<9Q")
_TAIL_PLACES = (256, 384)
_CATALOGS = tuple(place // 8 + 4 for place in _TAIL_PLACES)
# Futex words, counted in 32 bits; each has a cache line of its own, with the flag of its waiters.
# `WRITTEN_WORD` is that of the short cut's followers: it changes as soon as an entry is written.
APPEND_WORD, SYNC_WORD, WRITTEN_WORD = 512, 528, 544
WORDS_BYTES = 4096
SLOT = np.dtype([("high", "<u8"), ("low", "<u8"), ("value", "<u8"), ("file", "<u8")])
COUNTERS_SLOTS_FIRST = 256
ENDS_FIRST = 512

Slots = npt.NDArray[Any]


class Tail(NamedTuple):
    """The state of the journal's end: everything the next entry continues from."""

    end: int = 0
    """The address after the last record."""
    position: int = 0
    checksum: int = 0
    """Of the last record."""
    control: int = 0
    """The address of the last record that changed the control state."""
    catalog: int = 0
    """How often a topic was made or changed."""
    received: int = 0
    entries: int = 0
    """Records in the newest journal file."""
    marked: int = 0
    """The end after the last mark: equal to `end` when the log is quiet and says so."""
    zeroed: int = 0
    """The address up to which the newest file has really been written, zeros included."""


_new = tuple.__new__  # what a NamedTuple does, without its signature


@lru_cache(1024)
def digest_of(name: str) -> bytes:
    """What stands for a counter's name."""
    return blake2b(name.encode(), digest_size=16).digest()


class Live:
    """One process's view of the shared memory."""

    def __init__(self, system: System, folder: str) -> None:
        """Map it; `believed` says whether it may be used."""
        self._system = system
        self._folder = folder
        system.mkdir(folder)
        self.shared: Shared = system.map(f"{folder}/words", WORDS_BYTES)
        self._view = self.shared.view
        self.words = self._view.cast("Q")
        self._ends_map: Shared | None = None
        self._ends: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._end_words = memoryview(b"").cast("Q")
        self._table: Shared | None = None
        self._table_number = -1
        self._table_view = memoryview(b"")

    def _stamp(self, log_id: bytes) -> tuple[int, ...]:
        boot = self._system.boot_id()
        return (
            MAGIC,
            int.from_bytes(boot[:8], "little"),
            int.from_bytes(boot[8:], "little"),
            self.shared.identity(),
            int.from_bytes(log_id[:8], "little"),
            int.from_bytes(log_id[8:], "little"),
        )

    def believed(self, log_id: bytes) -> bool:
        """Whether it was made in this boot, for this log, in this very file."""
        return tuple(self.words[READY : LOG_1 + 1]) == self._stamp(log_id)

    def begin(self) -> None:
        """Forget everything but the poison: a rebuild starts, and nobody believes it meanwhile."""
        self.words[READY] = 0
        for index in (SYNCED, SYNCED_POSITION, DAMAGED):
            self.words[index] = 0
        self.publish(Tail())
        self.ends(ENDS_FIRST)[:] = 0
        self._new_table(np.zeros(0, SLOT))

    def finish(self, log_id: bytes) -> None:
        """The rebuild is done: stamp it, `READY` last."""
        stamp = self._stamp(log_id)
        for index in range(LOG_1, READY - 1, -1):
            self.words[index] = stamp[index]

    def check_in_place(self) -> None:
        """Raise if the folder is gone, or another's since: what is at its path is not ours."""
        if not self.shared.in_place():
            folder = self._folder.removesuffix("/live")
            raise errors.LogGone(f"{folder} was deleted, moved or replaced", place=folder)

    def _map(self, name: str, size: int) -> Shared:
        self.check_in_place()
        path = f"{self._folder}/{name}"
        with os_errors("mapping shared memory", path):
            return self._system.map(path, size)

    # -- the tail ---------------------------------------------------------------------------

    def tail(self) -> Tail:
        """The end of the journal, consistent even while somebody publishes a new one."""
        while True:
            stamp = self.words[STAMP]
            tail = _new(Tail, _TAIL.unpack_from(self._view, _TAIL_PLACES[stamp & 1]))
            if self.words[STAMP] == stamp:
                return tail

    @property
    def catalog(self) -> int:
        """That of the tail, read alone: it only grows, so it is no older than was asked for."""
        return self.words[_CATALOGS[self.words[STAMP] & 1]]

    def publish(self, tail: Tail | tuple[int, ...]) -> None:
        """Move the end (append lock held): into the place not in use, then switch."""
        stamp = self.words[STAMP] + 1
        _TAIL.pack_into(self._view, _TAIL_PLACES[stamp & 1], *tail)
        self.words[STAMP] = stamp

    # -- partition ends ---------------------------------------------------------------------

    def ends(self, count: int) -> npt.NDArray[np.uint64]:
        """The array of partition ends, with at least `count` places."""
        if len(self._ends) < count:
            size = ENDS_FIRST
            while size < count:
                size *= 2
            self._ends_map = self._map("ends", size * 8)
            self._ends = np.frombuffer(self._ends_map.view, np.uint64, size)
            self._end_words = self._ends_map.view[: size * 8].cast("Q")
        return self._ends

    def end_words(self, count: int) -> memoryview:
        """The same, for who needs one of them: numpy takes far longer, above all when cold."""
        if len(self._end_words) < count:
            self.ends(count)
        return self._end_words

    # -- counters ---------------------------------------------------------------------------

    def get(self, name: str) -> int:
        """The counter's value."""
        view = self.current_table()
        at = self._find(view, digest_of(name))
        return int.from_bytes(view[at + 16 : at + 24], "little")

    def put(self, name: str, value: int) -> None:
        """Set a counter (append lock held)."""
        self._put(digest_of(name), value, self.tail().end >> 40)

    def make_room(self, count: int) -> None:
        """For so many new counters: before an entry moves them, which no full disk stops then."""
        if 2 * (self.words[COUNTERS_USED] + count) > self.words[COUNTERS_SLOTS]:
            self._new_table(self.counters(), count)

    def load(self, run: Slots) -> None:
        """Replace all counters by those of a run, in which no name stands twice (lock held)."""
        self._new_table(run)

    def counters(self) -> Slots:
        """A copy of all counters above 0."""
        slots = np.frombuffer(self.current_table(), SLOT)
        return slots[slots["value"] > 0].copy()

    def _put(self, digest: bytes, value: int, file: int) -> None:
        view = self.current_table()
        at = self._find(view, digest)
        if view[at : at + 16] == _EMPTY:
            if 2 * (self.words[COUNTERS_USED] + 1) > self.words[COUNTERS_SLOTS]:
                self._new_table(self.counters())
                view = self.current_table()
                at = self._find(view, digest)
            view[at : at + 16] = digest
            self.words[COUNTERS_USED] += 1
        view[at + 24 : at + 32] = file.to_bytes(8, "little")
        view[at + 16 : at + 24] = value.to_bytes(8, "little")

    def _find(self, view: memoryview, digest: bytes) -> int:
        mask = len(view) // SLOT.itemsize - 1
        index = int.from_bytes(digest[:8], "little") & mask
        while True:
            at = index * SLOT.itemsize
            found = bytes(view[at : at + 16])
            if found in (digest, _EMPTY):
                return at
            index = (index + 1) & mask

    def current_table(self) -> memoryview:
        """The counters as they lie there."""
        number = self.words[COUNTERS_NUMBER]
        if number != self._table_number:
            size = self.words[COUNTERS_SLOTS] * SLOT.itemsize
            self._table = self._map(f"counters.{number}", size)
            self._table_view = self._table.view[:size]
            self._table_number = number
        return self._table_view

    def _new_table(self, kept: Slots, more: int = 0) -> None:
        """Make a table with room for twice as many; the number, and so the switch, comes last."""
        slots = COUNTERS_SLOTS_FIRST
        while slots < 4 * (len(kept) + more):
            slots *= 2
        old = self.words[COUNTERS_NUMBER]
        size = slots * SLOT.itemsize
        self._table = self._map(f"counters.{old + 1}", size)
        self._table_view = self._table.view[:size]
        self._table_view[:] = hashed(kept, slots).tobytes()
        self._table_number = old + 1
        self.words[COUNTERS_SLOTS] = slots
        self.words[COUNTERS_USED] = len(kept)
        self.words[COUNTERS_NUMBER] = old + 1
        self._system.unlink(f"{self._folder}/counters.{old}")

    def close(self) -> None:
        """Unmap; a thread in the midst of something sees an empty log, and that it is closed."""
        self._view = memoryview(bytearray(WORDS_BYTES))
        self.words = self._view.cast("Q")
        self._ends = np.zeros(0, np.uint64)
        self._end_words = memoryview(b"").cast("Q")
        self._table_view = memoryview(b"")
        for shared in (self.shared, self._ends_map, self._table):
            if shared is not None:
                shared.close()


_EMPTY = bytes(16)


def hashed(kept: Slots, slots: int) -> Slots:
    """The counters in an open-addressing table of `slots` places (a power of two)."""
    table = np.zeros(slots, SLOT)
    mask = np.uint64(slots - 1)
    places = kept["high"] & mask
    waiting = np.arange(len(kept))
    while len(waiting):
        wanted = places[waiting]
        _, first = np.unique(wanted, return_index=True)
        free = first[(table["high"][wanted[first]] | table["low"][wanted[first]]) == 0]
        table[wanted[free]] = kept[waiting[free]]
        waiting = np.delete(waiting, free)
        places[waiting] = (places[waiting] + np.uint64(1)) & mask
    return table
