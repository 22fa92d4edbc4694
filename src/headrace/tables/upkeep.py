"""The index of a table: its folder, its manifest, and keeping it up to date.

An index lies beside the log in ``tables/<topic id>/``: packs (`packs`), and a ``manifest`` that
says through which position they read. It is **derived**: whatever is missing, stale, damaged or of
another format is built again from the log, never trusted. The manifest has a checksum, names the
log, the topic and the schema version, and is put in place by a rename after its packs are on the
disk; so at every instant there is a whole one, or none.

**Upkeep** is done by whoever reads. The rows after the manifest's position are read from the log
and taken into the collection in this process's memory; once they are many (COMMIT_ROWS), they are
written and a new manifest is put in place, under a lock of its own. Whoever finds under the lock
that somebody else was first takes over the other's manifest and drops its own work. So readers of
one log do a small tail each for themselves, and need no lock and no write for it. Packs named by
neither of the two newest manifests go; a reader that meets one that is gone reads the newest
manifest and goes on where it was (the order of rows does not depend on how a table was built).

Rejected: an index that names rows of the log instead of holding them (the log reads entries, not
rows: a key would cost an entry); upkeep by the writer (an append would pay for tables that nobody
reads); a lock for reading (a stopped process would stop all).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.system import System, os_errors
from headrace.model.topic import Topic, tombstones
from headrace.tables.collection import Collection
from headrace.tables.keyed import GONE, not_taken_back, table_schema, versions
from headrace.tables.packs import Attempt, Packs

FORMAT = 2
COMMIT_ROWS = 4096
"""So many new rows are worth writing; fewer are read again by each process."""
BUILD_ROWS = 262_144
"""So many rows are taken in at once while an index is built, or so many bytes."""
BUILD_BYTES = 32 << 20
LOCK_POLL_SECONDS = 0.005
NEVER = 1 << 62


class State(NamedTuple):
    """What this process knows of the index."""

    topic: Topic
    text: bytes
    """The manifest that it is built on; empty: none."""
    number: int
    through: int
    begins: int
    """Before this position its rows are of an older generation of the schema; 0: none are."""
    collection: Collection
    attempt: Attempt | None = None
    """Rows that are not in the manifest yet."""
    pending: int = 0
    names: frozenset[str] = frozenset()
    """The packs of the manifest."""


class Index:
    """The index of one topic, as this process sees it. Threads may share it."""

    def __init__(self, log: EmbeddedLog, system: System, topic: Topic) -> None:
        """Nothing is read yet."""
        self.name = topic.name
        self.folder = f"{log.path}/tables/{topic.id}"
        self.packs = Packs(self.folder, system)
        self.seed = xxhash.xxh3_64_intdigest(log.journal.log_id, topic.id)
        self._log = log
        self._system = system
        self._lock = threading.Lock()
        self._state: State | None = None
        self._seen = 1, 0
        """The newest generation of the schema, and a position by which it had begun."""

    def newest(self) -> int:
        """The newest position."""
        generation = self._log.topic(self.name).schema.generation
        if generation != self._seen[0]:  # it may not be on the disk yet
            self._seen = generation, self._log.wait(self._log.journal.live.tail().position)
        return self._log.position

    def at(self, position: int) -> State:
        """The index, through `position` at least."""
        with self._lock:
            state, self._state = self._state, None  # nobody keeps what an error leaves half done
            topic = self._log.topic(self.name)
            text = self.manifest()
            if state is None or state.text != text or state.topic != topic:
                if state is not None and state.attempt is not None:
                    state.attempt.forget()
                state = self._loaded(topic, text)
            if 0 < state.through < self._log.since_of(self.name):
                state = self._loaded(topic, b"")  # what came since may be gone: from the start
            while state.through < position:
                state = self._extended(state)
            self._state = state
        self.newest()
        begins = min(state.begins, self._seen[1])
        if position < begins:
            raise errors.BadPosition(
                f"table '{self.name}' cannot be read at {position}",
                place=f"topic '{self.name}'",
                why=f"before position {begins} it has rows of an older schema generation, "
                "which cannot be read as rows of the newest",
                fix=f"read it at {begins} or later, or read the older rows with read()",
            )
        return state

    def _loaded(self, topic: Topic, text: bytes) -> State:
        """The index as the manifest says; an empty one if it cannot be used."""
        schema = table_schema([topic.schema.column(c).type for c in topic.key], topic.schema.arrow)
        data = _parsed(text)
        ahead = data is not None and data["through"] > self._log.position  # not of this history
        if data is not None and data["for"] == self._purpose(topic) and not ahead:
            try:
                collection = Collection.from_manifest(data["collection"], self.packs, schema)
            except errors.PackDamaged:
                pass
            else:
                names = frozenset((*collection.pack_names(), data["collection"][0]))
                return State(
                    topic, text, data["number"], data["through"], data["begins"], collection,
                    names=names,
                )  # fmt: skip
        number = data["number"] if data else self.packs.newest()
        return State(topic, text, number, 0, 0, Collection(self.packs, schema))

    def _purpose(self, topic: Topic) -> list[Any]:
        return [FORMAT, self._log.journal.log_id.hex(), topic.id, topic.schema.version]

    def _extended(self, state: State) -> State:
        """The index through the log's newest position, or as far as one commit goes."""
        topic, through = state.topic, self._log.position
        state = state._replace(attempt=state.attempt or self.packs.attempt(state.number + 1))
        waiting: list[pa.RecordBatch] = []
        counted = rows = size = 0
        open_entry = 0  # the position of an entry that goes on, if it has brought rows so far
        reading = self._log.read(self.name, after=state.through, through=through, across_gaps=True)
        for batch in reading:
            if batch.schema_version > topic.schema.version:
                return self._loaded(self._log.topic(self.name), self.manifest())
            if topic.schemas[batch.schema_version - 1].generation != topic.schema.generation:
                state = state._replace(begins=NEVER)
                continue
            if state.begins == NEVER:
                state = state._replace(begins=batch.positions[0].as_py())
            part = versions(
                batch.data, topic.key, batch.positions.to_numpy(), counted,
                changes=topic.kind == "changes", seed=self.seed, schema=state.collection.schema,
                tombstone=None if topic.kind == "changes" else tombstones(topic, batch.data),
            )  # fmt: skip
            if batch.position == open_entry and pc.any(part.column(GONE)).as_py():
                state, waiting = _taken_in(state, waiting), []
                part = not_taken_back(part, batch.data, state.collection, open_entry, self.seed)
            if batch.last or topic.kind != "changes":
                open_entry = 0
            elif not pc.all(part.column(GONE)).as_py():
                open_entry = batch.position
            waiting.append(part)
            counted += len(batch)
            rows += part.num_rows
            size += part.nbytes
            if rows >= BUILD_ROWS or size >= BUILD_BYTES:
                state, waiting, rows, size = _taken_in(state, waiting), [], 0, 0
                if batch.last:
                    return self._committed(state._replace(through=batch.position))
        if self._log.position < through:  # a closed log ends its readings early: it raises here
            raise errors.LogClosed("the log was closed meanwhile", place=self._log.path)
        state = _taken_in(state, waiting)._replace(through=through)
        return self._committed(state) if state.pending >= COMMIT_ROWS else state

    def _committed(self, state: State) -> State:
        """Put a new manifest in place; or, if somebody was first, take over theirs."""
        attempt = state.attempt
        assert attempt is not None
        with self._locked():
            if self.manifest() != state.text:
                attempt.forget()
                return self._loaded(state.topic, self.manifest())
            collection = state.collection.to_manifest(attempt)
            attempt.finish()
            number = state.number + 1
            data = {
                "for": self._purpose(state.topic),
                "number": number,
                "through": state.through,
                "begins": state.begins,
                "collection": collection,
            }
            text = _text(data)
            path = f"{self.folder}/manifest"
            with os_errors("writing the manifest of a table", path):
                file = self._system.create(f"{path}.new", 0)
                file.pwritev([text], 0)
                file.fdatasync()
                file.close()
                self._system.rename(f"{path}.new", path)
                self._system.fsync_dir(self.folder)
            names = frozenset((*state.collection.pack_names(), collection[0]))
            self.packs.drop_except(names | state.names, older_than=number)
        return state._replace(text=text, number=number, attempt=None, pending=0, names=names)

    def manifest(self) -> bytes:
        """The manifest's bytes; none if there is none."""
        try:
            file = self._system.open(f"{self.folder}/manifest")
        except FileNotFoundError:
            return b""
        try:
            return file.pread(file.size(), 0)
        finally:
            file.close()

    def distrust(self, state: State, *, build_anew: bool) -> None:
        """A pack was gone or damaged: read the manifest again; if that does not help, drop it."""
        with self._lock:
            self._state = None
            self.packs = Packs(self.folder, self._system)
            if build_anew:
                with self._locked():
                    if self.manifest() == state.text:
                        self._system.unlink(f"{self.folder}/manifest")

    def _locked(self) -> _Locked:
        self.packs.prepare()
        timeout = self._log.settings.lock_timeout_seconds
        return _Locked(self._system, f"{self.folder}/lock", timeout)


class _Locked:
    """The lock of upkeep: a kernel lock on a file, gone with its process."""

    def __init__(self, system: System, path: str, timeout: float) -> None:
        self._system = system
        self._path = path
        self._timeout = timeout

    def __enter__(self) -> None:
        self._file = self._system.open(self._path, create=True)
        deadline = self._system.monotonic() + self._timeout
        while not self._file.try_lock():
            if self._system.monotonic() > deadline:
                self._file.close()
                raise errors.LockTimeout(
                    f"the lock of a table was not free within {self._timeout:g} s",
                    place=self._path,
                    fix="another process keeps the table: see who it is with 'fuser', and wait",
                )
            time.sleep(LOCK_POLL_SECONDS)

    def __exit__(self, *exception: object) -> None:
        self._file.unlock()
        self._file.close()


def _taken_in(state: State, waiting: Sequence[pa.RecordBatch]) -> State:
    if not waiting:
        return state
    assert state.attempt is not None
    change = pa.concat_batches(waiting)
    return state._replace(
        collection=state.collection.plus(change, state.attempt),
        pending=state.pending + change.num_rows,
    )


def _text(data: Mapping[str, Any]) -> bytes:
    body = json.dumps(data, separators=(",", ":")).encode()
    return b"%016x\n%s" % (xxhash.xxh3_64_intdigest(body), body)


def _parsed(text: bytes) -> dict[str, Any] | None:
    head, _, body = text.partition(b"\n")
    if not body or head != b"%016x" % xxhash.xxh3_64_intdigest(body):
        return None
    data: dict[str, Any] = json.loads(body)
    return data if data["for"][0] == FORMAT else None
