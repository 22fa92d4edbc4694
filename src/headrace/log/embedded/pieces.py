"""Staged pieces: rows of large entries, in files of their own, written before they are named.

A piece is written and synced, and its name synced, before any entry can name it; so whoever sees
the entry can read the piece. What no entry names is harmless: `headrace log check` lists it, and
the keeper removes it when nobody can publish it any more (`orphans`). A piece is a sequence of
chunks, each one Arrow message of rows ordered by partition, at a multiple of 64; length and
checksum of each stand in the entry's sections: the file has no index.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace import errors
from headrace.log.embedded.format import ALIGNMENT, PAD, SectionDraft, aligned, checksum
from headrace.log.embedded.packing import Packer
from headrace.log.embedded.system import File, System, os_errors
from headrace.model.records import RUNS, Chunk, Piece
from headrace.model.topic import Topic

PIECE_MAGIC = b"HRpiece\1"
PIECE_HEADER_BYTES = 64
STAGING = "staging-"


def boot_mark(system: System) -> str:
    """How the names of pieces that were staged in this boot begin, behind the topic."""
    return hashlib.blake2b(system.boot_id(), digest_size=4).hexdigest()


def owner_of(name: str) -> str:
    """Boot and token of the handle that staged a piece; empty in names of before there were any."""
    parts = name.split("-")
    return parts[1] if len(parts) == 3 else ""


def staging_lock(folder: str, owner: str) -> str:
    """The lock that a handle holds while it lives, from its first piece on."""
    return f"{folder}/locks/{STAGING}{owner}"


class Pieces:
    """The folder of pieces."""

    def __init__(self, system: System, folder: str, log_id: bytes) -> None:
        """`folder` is the log's folder."""
        self._system = system
        self._log_folder = folder
        self.folder = f"{folder}/pieces"
        self._log_id = log_id
        self._owner = ""
        self._lock: File | None = None
        self._guard = threading.Lock()

    def path(self, name: str) -> str:
        """Where a piece is."""
        return f"{self.folder}/{name}"

    def _claimed(self) -> str:
        """Our token; from the first piece on a lock says that we live."""
        with self._guard, os_errors("opening a lock", f"{self._log_folder}/locks"):
            while self._lock is None:
                self._owner = f"{boot_mark(self._system)}{self._system.random(4).hex()}"
                path = staging_lock(self._log_folder, self._owner)
                lock = self._system.open(path, create=True)
                if lock.try_lock() and self._is_named(path):
                    self._lock = lock
                else:  # a keeper came between the two, and took it for that of a dead one
                    lock.close()
            return self._owner

    def _is_named(self, path: str) -> bool:
        """Whether the lock that we hold is still the one under its name."""
        try:
            again = self._system.open(path)
        except FileNotFoundError:
            return False
        free = again.try_lock()
        again.close()
        return not free

    def close(self) -> None:
        """Give up what was staged and not published."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # the keeper does it
                self._system.unlink(staging_lock(self._log_folder, self._owner))
            self.abandon()

    def abandon(self) -> None:
        """In a forked child: let go of the lock that the parent holds."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write(self, topic: Topic, drafts: Iterable[SectionDraft], sent_time: int) -> Piece:
        """Write chunks as they come, sync, and describe them."""
        name = f"{topic.id:06d}-{self._claimed()}-{self._system.random(8).hex()}.piece"
        chunks: list[Chunk] = []
        offset = PIECE_HEADER_BYTES
        with os_errors("staging rows", self.path(name)):
            file = self._system.create(self.path(name), 0)
            try:
                header = (PIECE_MAGIC + self._log_id).ljust(PIECE_HEADER_BYTES, b"\0")
                file.pwritev([header], 0)
                for draft in drafts:
                    body = draft.body
                    assert body is not None
                    runs = np.frombuffer(draft.table(), RUNS)
                    file.pwritev([body, PAD[-len(body) % ALIGNMENT]], offset)
                    chunks.append(
                        Chunk(
                            rows=draft.rows,
                            flags=draft.flags,
                            offset=offset,
                            length=len(body),
                            checksum=checksum(body),
                            partitions=tuple(runs["partition"].tolist()),
                            counts=tuple(runs["rows"].tolist()),
                        )
                    )
                    offset += aligned(len(body))
                file.fdatasync()
            except BaseException:
                file.close()
                self._system.unlink(self.path(name))
                raise
            file.close()
            self._system.fsync_dir(self.folder)
        return Piece(
            name=name,
            topic=topic.name,
            schema=topic.schema.version,
            rows=sum(chunk.rows for chunk in chunks),
            bytes=offset,
            sent_time=sent_time,
            chunks=tuple(chunks),
        )

    def sections(self, topic: Topic, piece: Piece, index: int) -> list[SectionDraft]:
        """The sections that name a piece; it must be there, whole in size, and fit the topic."""
        self._check(topic, piece)
        result = []
        for chunk in piece.chunks:
            runs = np.zeros(len(chunk.partitions), RUNS)
            runs["partition"] = chunk.partitions
            runs["rows"] = chunk.counts
            result.append(
                SectionDraft(
                    topic=topic,
                    schema=piece.schema,
                    flags=chunk.flags,
                    rows=chunk.rows,
                    sent_time=piece.sent_time,
                    runs=runs,
                    body=None,
                    piece=index,
                    offset=chunk.offset,
                    length=chunk.length,
                    checksum=chunk.checksum,
                )
            )
        return result

    def _check(self, topic: Topic, piece: Piece) -> None:
        if piece.topic != topic.name:
            raise errors.PieceInvalid(
                f"the piece was staged for topic '{piece.topic}'", place=f"topic '{topic.name}'"
            )
        written = topic.schemas[piece.schema - 1] if piece.schema <= len(topic.schemas) else None
        if written is None or written.generation != topic.schema.generation:
            raise errors.PieceInvalid(
                f"the piece has schema version {piece.schema}, of another generation",
                place=f"topic '{topic.name}'",
                fix="stage the rows again",
            )
        size = must_be_there(self._system, self._log_folder, [piece.name])
        if size != piece.bytes:
            raise errors.PieceInvalid(
                f"the piece has {size} bytes, not {piece.bytes}", place=self.path(piece.name)
            )

    def size(self, name: str) -> int:
        """The bytes of a piece; 0 if it is not there."""
        return size_of(self._system, self.path(name))

    def drop(self, pieces: Iterable[Piece]) -> None:
        """Remove pieces that no entry will name."""
        for piece in pieces:
            self._system.unlink(self.path(piece.name))

    def open(self, name: str, position: int) -> File:
        """A piece that the entry at `position` names; gone means damage."""
        try:
            return self._system.open(self.path(name))
        except FileNotFoundError:
            raise errors.LogDamaged(
                f"the piece {name} is missing",
                place=self.path(name),
                fix=f"what follows is intact: read on with after={position}; put the file back"
                " from a backup to get the rest",
                file=self.path(name),
                offset=0,
                expected="a staged piece",
                found="no file",
                resume_after=position,
            ) from None


def size_of(system: System, path: str) -> int:
    """The bytes of a file; 0 if it is not there."""
    try:
        file = system.open(path)
    except OSError:
        return 0
    size = file.size()
    file.close()
    return size


def must_be_there(system: System, folder: str, names: Iterable[str]) -> int:
    """Raise if one of the pieces of the log in `folder` is gone; their bytes together."""
    total = 0
    for name in names:
        path = f"{folder}/pieces/{name}"
        size = size_of(system, path)
        if not size:
            raise errors.PieceInvalid(f"the piece {name} is not there", place=path)
        total += size
    return total


def chunked(
    packer: Packer,
    batches: Iterable[Any],
    chunk_bytes: int,
    sent_time: int,
    headers: pa.Array | None = None,
    transactions: npt.NDArray[np.uint32] | None = None,
    partition: int | None = None,
) -> Iterator[SectionDraft]:
    """Batches cut into chunks of about `chunk_bytes`, packed one at a time."""
    start = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        rows = max(1, batch.num_rows * chunk_bytes // max(1, batch.nbytes))
        for at in range(0, batch.num_rows, rows):
            part: pa.RecordBatch = batch.slice(at, rows)
            end = start + part.num_rows
            yield packer.pack(
                part,
                sent_time,
                None if headers is None else headers[start:end],
                None if transactions is None else transactions[start:end],
                partition,
                ordered=True,
            )
            start = end
