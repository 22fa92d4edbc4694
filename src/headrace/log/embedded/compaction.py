"""Compaction: of each key the newest row is enough; rewrites sealed files without the others.

Which rows stay is decided over all files that are rewritten together, oldest to newest:

    events    the last row of each key; if that says that the key is gone (`_op` is 'd', or an
              opaque value is null), it stays for the grace time, and then goes too
    changes   rows whose weights cancel go. What is left of equal rows (all columns but those of
              the log itself, which start with `_`) is as many of the last +1 as the sum says:
              read from the start they add up to the same table

Rows keep their offsets and positions, so there are gaps between them. The files that are rewritten
always begin with the oldest of the topic: no older row of a key can come back when the row that
replaced it goes. From the last position that was rewritten on (`since`) the topic is whole; a
reader of changes that stopped before it has seen rows whose end is gone, and is told so. Readers of
events go on: they miss what was replaced meanwhile, which is what they asked for.

**Memory.** A row is known by 128 bits of hash. The rows of a slice of the hash space are sorted at
a time; as many slices, each a reading of the columns that matter, as it takes to stay in bounds.
Then one bit a row says what stays, and the files are copied row group by row group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.log.embedded import archive
from headrace.log.embedded.journal import Journal
from headrace.log.embedded.sealed import (
    Group,
    Rows,
    SealedReader,
    SealWriter,
    filtered,
    spans_of,
)
from headrace.model.evolution import Upgrade
from headrace.model.hashing import hash64
from headrace.model.sealed import SealedFile
from headrace.model.topic import Topic, tombstones

SLICE_ROWS = 4_000_000
"""So many rows are decided at a time: some 200 MB while they are sorted."""
FILE_BYTES = 256 << 20
SMALL_BYTES = 16 << 20
MANY = 16
"""So many small files side by side are worth joining: the list of files stays short."""
DIRTY = 0.5
"""Files are rewritten when those that never were are at least so large against the others."""


def worth_compacting(files: Sequence[SealedFile], *, everything: bool) -> bool:
    """Whether rewriting these files saves enough."""
    fresh = sum(file.bytes for file in files if not file.compacted)
    old = sum(file.bytes for file in files if file.compacted)
    return bool(files) if everything else fresh > 0 and fresh >= DIRTY * old


def worth_joining(files: Sequence[SealedFile]) -> list[SealedFile]:
    """Small files side by side, if they are many: a topic with few rows has one of each journal."""
    found: list[SealedFile] = []
    for file in files:
        alike = not found or (file.schema, file.compacted) == (found[0].schema, found[0].compacted)
        if file.bytes < SMALL_BYTES and not file.archive and alike:
            found.append(file)
        elif len(found) >= MANY:
            break
        else:
            found = []
    return found if len(found) >= MANY else []


def joined(
    journal: Journal, topic: Topic, files: Sequence[SealedFile], go_on: Callable[[], None]
) -> list[SealedFile]:
    """Rewrite files side by side as one, with all of their rows; `go_on` raises to end it."""
    keep = np.ones(sum(file.rows for file in files), bool)
    return _rewritten(journal, topic, files, keep, go_on, compacted=files[0].compacted)


def compacted(
    journal: Journal,
    topic: Topic,
    files: Sequence[SealedFile],
    now: int,
    go_on: Callable[[], None],
) -> list[SealedFile]:
    """Rewrite these files, the oldest of a topic; the new ones are synced and named by nobody."""
    keep = _kept(journal, topic, files, now, go_on)
    return _rewritten(journal, topic, files, keep, go_on, compacted=True)


def _rewritten(
    journal: Journal,
    topic: Topic,
    files: Sequence[SealedFile],
    keep: npt.NDArray[np.bool_],
    go_on: Callable[[], None],
    *,
    compacted: bool,
) -> list[SealedFile]:
    writers: list[SealWriter] = []
    folder = f"{journal.folder}/{archive.FOLDER}"
    base = 0
    try:
        for file in files:
            reader = archive.open_sealed(journal.system, journal.folder, file)
            for group in reader.groups():
                go_on()
                rows = int(group.spans["rows"].sum())
                mask = keep[base : base + rows]
                base += rows
                if not mask.any():
                    continue
                writer: SealWriter | None = writers[-1] if writers else None
                if writer is None or writer.schema != file.schema or writer.bytes > FILE_BYTES:
                    writer = SealWriter(
                        journal.system, folder, journal.log_id, topic, file.schema, len(writers),
                        file.starts,
                    )  # fmt: skip
                    writers.append(writer)
                _copy(reader, group, mask, writer)
            reader.close()
        made = [writer.finish(compacted=compacted) for writer in writers]
        journal.system.fsync_dir(folder)
    except BaseException:
        for writer in writers:
            writer.abandon()
        raise
    return made


def _copy(
    reader: SealedReader, group: Group, mask: npt.NDArray[np.bool_], writer: SealWriter
) -> None:
    data = reader.read(group, writer.stored.names).filter(pa.array(mask)).cast(writer.stored)
    at = 0
    for span in spans_of(filtered(group, mask)):
        part = data.slice(at, span.rows)
        writer.add(Rows(part, reader.flags, span.position, span.sent, span.received, span.runs))
        at += span.rows


class Known(NamedTuple):
    """What is known of rows when it is decided which of them stay; one value a row."""

    first: npt.NDArray[Any]
    second: npt.NDArray[Any]
    """Two hashes: who has the same is the same row, or the same key."""
    row: npt.NDArray[Any]
    weight: npt.NDArray[Any]
    expired: npt.NDArray[Any]
    """It says that its key is gone, and has said so for long enough."""


def _kept(
    journal: Journal,
    topic: Topic,
    files: Sequence[SealedFile],
    now: int,
    go_on: Callable[[], None],
) -> npt.NDArray[np.bool_]:
    """One bit a row: whether it stays."""
    total = sum(file.rows for file in files)
    keep = np.zeros(total, bool)
    slices = -(-total // SLICE_ROWS)
    for number in range(slices):
        parts = [
            Known(*(column[one.first % slices == number] for column in one))
            for one in _known(journal, topic, files, now, go_on)
        ]
        known = Known(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        order = np.lexsort((known.row, known.second, known.first))
        known = Known(*(column[order] for column in known))
        last = np.ones(len(order), bool)
        last[:-1] = (known.first[1:] != known.first[:-1]) | (known.second[1:] != known.second[:-1])
        stays = left_of(last, known.weight) if topic.kind == "changes" else last & ~known.expired
        keep[known.row[stays]] = True
    return keep


def left_of(last: npt.NDArray[np.bool_], weight: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Of rows side by side that are equal, up to each `last`: those that are left of their sum."""
    if not len(last):
        return last
    group: npt.NDArray[np.int64] = np.cumsum(last) - last
    starts = np.flatnonzero(np.concatenate(([True], last[:-1])))
    net = np.add.reduceat(weight, starts)[group]
    plain = np.logical_and.reduceat(np.abs(weight) == 1, starts)[group] & (net >= 0)
    came = weight > 0
    so_far = np.cumsum(came)
    in_all = so_far[last][group]
    return ~plain | (came & (in_all - so_far < net))


def _known(
    journal: Journal,
    topic: Topic,
    files: Sequence[SealedFile],
    now: int,
    go_on: Callable[[], None],
) -> Iterator[Known]:
    """The rows of files, a row group at a time."""
    early = now - int(topic.policy.grace_seconds * 1_000_000)
    base = 0
    for file in files:
        written = topic.schemas[file.schema - 1]
        same = [one for one in topic.schemas if one.generation == written.generation]
        upgrade = Upgrade(written, same[-1])
        seeds = (2 * written.generation, 2 * written.generation + 1)
        own = [name for name in upgrade.schema.names if not name.startswith("_")]
        names = own if topic.kind == "changes" else list(topic.key)
        reader = archive.open_sealed(journal.system, journal.folder, file)
        for group in reader.groups():
            go_on()
            rows = upgrade(reader.read(group, written.arrow.names))
            columns = [rows.column(name) for name in names]
            first, second = (hash64(columns, seed) for seed in seeds)
            weight = np.ones(rows.num_rows, np.int64)
            expired = np.zeros(rows.num_rows, bool)
            if topic.kind == "changes":
                weight = rows.column("_weight").to_numpy()
            else:
                expired = tombstones(topic, rows)
                expired &= np.repeat(group.spans["received"] < early, group.spans["rows"])
            row = np.arange(base, base + rows.num_rows)
            base += rows.num_rows
            yield Known(first, second, row, weight, expired)
        reader.close()
