"""Packs: files of immutable sections, each one Arrow batch, mapped and not copied when read.

::

    pack     = 64 bytes: magic, version; then sections, each at a multiple of 64
    section  = an Arrow IPC stream of one batch (schema message, batch message), uncompressed;
               or JSON
    ref      = (pack, offset, length, rows, checksum): whoever holds it can read the section

A pack is written by one **attempt**: small sections together in one file, each large one (over 1
MB, so that a small live section never keeps a large dead one) in a file of its own. Names are
unique: ``<batch>-<epoch>-<random>.pack``; nothing is ever overwritten or renamed.

**Crash argument.** A ref reaches the log (or a manifest) only after `finish`: all files are written
and synced, then the folder, so that the names are on the disk too. A crash before leaves files that
nobody names: garbage, removed by `drop_except` once a later batch is committed, never read. Two
attempts at one batch have different names. A file is never changed, so what is cached can be
missing, never wrong; a file may be unlinked while somebody has it mapped.

A section's checksum (xxh3, 64 bits) is verified when this process first opens it; what does not
agree is damage with file, place, expected and found. Opening closes the descriptor at once (the map
stays), so thousands of packs cost no descriptors.

Rejected: a table of contents in the file (the refs are the contents), compression (a probe would
unpack a whole section for a row), renaming into place (the name is unknown until it is committed).
"""

from __future__ import annotations

import json
import os
import re
import weakref
from collections.abc import Callable, Collection, Hashable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import xxhash

from headrace import errors
from headrace.log.embedded.system import OsSystem, System, os_errors
from headrace.tables.runs import Words, identity

MAGIC = b"HRpack\1\0"
HEADER_BYTES = 64
ALIGNMENT = 64
OWN_FILE = 1 << 20
"""Sections of more bytes get a file of their own."""
HELD_BYTES = 512 << 20
"""Runs laid aside while a collection is loaded are kept in memory up to here (`levels`)."""
CACHED = 4096
"""So many opened sections are kept at hand: maps, not memory."""
SUFFIX = ".pack"
NAME = re.compile(r"(\d+)-\d+-[0-9a-f]+(-\d+)?\.pack")

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Ref(NamedTuple):
    """Where a section is; in JSON, a list of these."""

    pack: str
    offset: int
    length: int
    rows: int
    checksum: int


class Piece:
    """An opened section: its batch, and the words it is sorted by."""

    __slots__ = ("_words", "batch")

    def __init__(self, batch: pa.RecordBatch) -> None:
        """The words are looked up when first asked for."""
        self.batch = batch
        self._words: list[Words] | None = None

    @property
    def words(self) -> list[Words]:
        """The identity of each row, seen by numpy."""
        if self._words is None:
            self._words = identity(self.batch)
        return self._words


class Held:
    """A section that is only in memory: for runs that will be merged before anything is stored."""

    __slots__ = ("__weakref__", "length", "piece", "rows")

    def __init__(self, batch: pa.RecordBatch, packs: Packs) -> None:
        """Counted in `packs.held` as long as somebody has it."""
        self.piece = Piece(batch)
        self.length: int = batch.nbytes
        self.rows: int = batch.num_rows
        packs.held += self.length
        weakref.finalize(self, packs.let_go, self.length)


class Packs:
    """The packs of a folder. Threads may share it; executors make their own."""

    def __init__(
        self,
        folder: str,
        system: System | None = None,
        *,
        cached: int = CACHED,
        may_hold: int = HELD_BYTES,
    ) -> None:
        """The folder, and the one it is in, are made when the first pack is written, if need be."""
        self.folder = folder
        self.system = system or OsSystem()
        self._cached = cached
        self._made = False
        self._maps: dict[str, pa.Buffer] = {}
        self._pieces: dict[Ref, Piece] = {}
        self._pending: dict[Ref, Piece] = {}
        self._newest: dict[Ref, Piece] = {}
        """The sections of the last attempt, if they are small: the next one rewrites most."""
        self.held = 0
        """Bytes of sections that are only in memory."""
        self.may_hold = may_hold

    def path(self, pack: str) -> str:
        """Where a pack is."""
        return f"{self.folder}/{pack}"

    def attempt(self, batch: int, epoch: int = 0) -> Attempt:
        """Begin to write the packs of a batch."""
        return Attempt(self, f"{batch:08d}-{epoch}-{self.system.random(8).hex()}")

    def prepare(self) -> None:
        """Make the folder, if need be."""
        if not self._made:
            parent = os.path.dirname(self.folder)
            self.system.mkdir(self.folder)
            for folder in (parent, os.path.dirname(parent)):
                self.system.fsync_dir(folder or ".")  # their names too must outlive a power cut
            self._made = True

    def open(self, ref: Ref) -> pa.RecordBatch:
        """The batch of a section."""
        return self.piece(ref).batch

    def let_go(self, size: int) -> None:
        """A section in memory is gone."""
        self.held -= size

    def piece(self, ref: Ref | Held) -> Piece:
        """A section, opened."""
        if isinstance(ref, Held):
            return ref.piece
        found = self._pieces.get(ref) or self._pending.get(ref) or self._newest.get(ref)
        if found is None:
            found = _keep(self._pieces, ref, lambda: Piece(self._batch(ref)), self._cached)
        return found

    def json(self, ref: Ref) -> Any:
        """The value of a JSON section."""
        return json.loads(self.section(ref).to_pybytes())

    def _batch(self, ref: Ref) -> pa.RecordBatch:
        with pa.ipc.open_stream(self.section(ref)) as stream:
            return stream.read_next_batch()

    def section(self, ref: Ref) -> pa.Buffer:
        """The bytes of a section, verified."""
        try:
            data = self._bytes(ref)
        except FileNotFoundError:
            raise self.damaged(ref, "a pack", "no file") from None
        found = xxhash.xxh3_64_intdigest(data)
        if data.size != ref.length or found != ref.checksum:
            found_text = f"{found:016x} over {data.size} bytes"
            raise self.damaged(ref, f"{ref.checksum:016x} over {ref.length} bytes", found_text)
        return data

    def _bytes(self, ref: Ref) -> pa.Buffer:
        path = self.path(ref.pack)
        if isinstance(self.system, OsSystem):
            data = _keep(self._maps, ref.pack, lambda: _mapped(path), self._cached)
            self._check_header(ref, data[: len(MAGIC)].to_pybytes())
            end = min(ref.offset + ref.length, data.size)
            return data.slice(min(ref.offset, data.size), max(0, end - ref.offset))
        file = self.system.open(path)
        try:
            self._check_header(ref, file.pread(len(MAGIC), 0))
            return file.read(ref.length, ref.offset)
        finally:
            file.close()

    def _check_header(self, ref: Ref, found: bytes) -> None:
        if found != MAGIC:
            raise self.damaged(
                ref._replace(offset=0), f"a pack of version 1: {MAGIC!r}", f"{found!r}"
            )

    def damaged(self, ref: Ref, expected: str, found: str) -> errors.PackDamaged:
        """The error for a section that is not what was written."""
        path = self.path(ref.pack)
        return errors.PackDamaged(
            f"the section at {ref.offset} of {ref.pack} is damaged",
            place=path,
            why=f"expected {expected}, found {found}",
            file=path,
            offset=ref.offset,
            expected=expected,
            found=found,
        )

    def names(self) -> list[str]:
        """The packs in the folder."""
        return [name for name in self.system.listdir(self.folder) if NAME.fullmatch(name)]

    def newest(self) -> int:
        """The number of the newest batch that left a pack here; 0 if none did."""
        return max((batch_of(name) for name in self.names()), default=0)

    def drop_except(self, names: Collection[str], older_than: int) -> list[str]:
        """Remove packs of batches before `older_than` that are not among `names`."""
        dropped = [n for n in self.names() if n not in names and batch_of(n) < older_than]
        for name in dropped:
            self.system.unlink(self.path(name))
        return dropped


class Attempt:
    """The packs of one attempt at one batch. What it adds can be read at once, by this process."""

    def __init__(self, packs: Packs, stem: str) -> None:
        """`stem` is unique: no other attempt has had it."""
        self.packs = packs
        self.stem = stem
        self.bytes = 0
        """Bytes of all sections so far."""
        self._sections: list[pa.Buffer] = []
        self._end = HEADER_BYTES
        self._files = 0
        self._refs: list[Ref] = []

    def add(self, batch: pa.RecordBatch) -> Ref:
        """Store a batch as a section; it is on the disk after `finish`."""
        ref = self._add([_schema_message(batch.schema), batch.serialize()], batch.num_rows)
        if ref.length <= OWN_FILE:
            self.packs._pending[ref] = Piece(batch)
            self._refs.append(ref)
        return ref

    def add_json(self, value: Any) -> Ref:
        """Store a JSON value as a section; to be read after `finish`."""
        text = json.dumps(value, separators=(",", ":"), sort_keys=True)
        return self._add([pa.py_buffer(text.encode())], 0)

    def _add(self, parts: list[pa.Buffer], rows: int) -> Ref:
        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(part)
        length = sum(part.size for part in parts)
        self.bytes += length
        padding = pa.py_buffer(bytes(-length % ALIGNMENT))
        if length > OWN_FILE:
            self._files += 1
            name = f"{self.stem}-{self._files}{SUFFIX}"
            self._write(name, [*parts, padding])
            return Ref(name, HEADER_BYTES, length, rows, digest.intdigest())
        ref = Ref(f"{self.stem}{SUFFIX}", self._end, length, rows, digest.intdigest())
        self._sections += [*parts, padding]
        self._end += length + padding.size
        return ref

    def _write(self, name: str, sections: list[pa.Buffer]) -> None:
        path = self.packs.path(name)
        with os_errors("writing a pack", path):
            self.packs.prepare()
            file = self.packs.system.create(path, 0)
            try:
                at = 0
                header = pa.py_buffer(MAGIC.ljust(HEADER_BYTES, b"\0"))
                buffers = [header, *sections]
                for start in range(0, len(buffers), 512):  # the system takes 1,024 at once
                    part = [memoryview(buffer) for buffer in buffers[start : start + 512]]
                    file.pwritev(part, at)
                    at += sum(map(len, part))
                file.fdatasync()
            finally:
                file.close()

    def finish(self) -> None:
        """Return when all that was added is on the disk, under its names."""
        if self._sections:
            self._write(f"{self.stem}{SUFFIX}", self._sections)
            self._files += 1
        if self._files:
            with os_errors("syncing the folder of packs", self.packs.folder):
                self.packs.system.fsync_dir(self.packs.folder)
        pieces = {ref: self.packs._pending[ref] for ref in self._refs}
        self.packs._newest = pieces if self.bytes <= OWN_FILE else {}
        self.forget()

    def forget(self) -> None:
        """Give the memory of what was added back: after `finish`, or when the attempt is given up.

        What is on the disk already stays there, as garbage.
        """
        for ref in self._refs:
            self.packs._pending.pop(ref, None)
        self._sections, self._refs = [], []


def batch_of(name: str) -> int:
    """The number of the batch that a pack was written for."""
    return int(name.partition("-")[0])


def _keep(cache: dict[K, V], key: K, make: Callable[[], V], most: int) -> V:
    found = cache.get(key)
    if found is None:
        found = cache[key] = make()
        while len(cache) > most:  # the oldest: an order of use would cost each probe
            cache.pop(next(iter(cache)), None)
    return found


def _mapped(path: str) -> pa.Buffer:
    with pa.memory_map(path) as file:
        return file.read_buffer()


@lru_cache(maxsize=256)
def _schema_message(schema: pa.Schema) -> pa.Buffer:
    return schema.serialize()
