"""Reading what is sealed: batches like those of the journal, from files of one topic each.

Each topic is a **stream** of row groups, in the order of the log. A group is decoded only when its
rows are due, so that of many topics few are in memory. Entries must come out whole and in order
over all topics that are read, so the streams are merged in rounds::

    bound of a stream   the last position of its next group of which the group has all rows
    round               all rows of all streams up to the smallest bound; its last batch is `last`

Where the smallest bound has nothing (an entry larger than a group comes next), the round is that
one entry, group after group, and only the last of them ends it.

The list of files is looked up again for each file, since compaction, retention and the archive
change it meanwhile; a file that is open stays readable. If rows that come next have gone since, the
reader is told, as it is when it begins. What was handed out before is known by its
offsets, so it does not matter into which files the rows were put since.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace import errors
from headrace.log.embedded.archive import open_sealed
from headrace.log.embedded.journal import Journal
from headrace.log.embedded.sealed import Group, SealedReader, filtered, spans_of
from headrace.log.embedded.ways import Wanted, Way, Ways, without_gaps
from headrace.model.records import Batch, Span, offsets_of
from headrace.model.sealed import SealedFile, Trim

KEPT_BYTES = 64 << 20
"""Decoded rows of which a part was handed out are kept up to this size; else decoded again."""


class Bounds(NamedTuple):
    """Which entries are read."""

    after: int
    through: int
    received: int
    """Those received before this time are not."""


Refuse = Callable[[Wanted, Trim, int, int], None]
"""Raises if rows behind a position are gone; see `reader`."""


class Stream:
    """The sealed rows of one topic that are wanted, in order."""

    def __init__(
        self, journal: Journal, wanted: Wanted, ways: Ways, bounds: Bounds, refuse: Refuse
    ) -> None:
        """Nothing is read yet; `refuse` is asked before each file whether rows went meanwhile."""
        self._refuse = refuse
        trim = journal.control.sealed.trim(wanted.topic.id)
        self._since = trim.since if trim is not None else 0
        self._journal = journal
        self._wanted = wanted
        self._ways = ways
        self._bounds = bounds
        self._at = bounds.after
        self._done: set[str] = set()
        self._file: SealedReader | None = None
        self._rest: list[Group] = []
        self._group: Group | None = None
        """The next one of which rows are wanted; of these its spans are."""
        self._keep: npt.NDArray[np.bool_] | None = None
        self._complete = True
        self._taken = 0
        """Spans of the group that were handed out."""
        self._data: pa.RecordBatch | None = None

    @property
    def first(self) -> int:
        """The next position that has rows."""
        assert self._group is not None
        return int(self._group.spans["position"][self._taken])

    @property
    def bound(self) -> int:
        """The last position of which all rows are in the group, or before it."""
        assert self._group is not None
        last = int(self._group.spans["position"][-1])
        return last if self._complete else last - 1

    @property
    def bytes(self) -> int:
        """Of the rows that are decoded and not handed out yet."""
        return 0 if self._data is None else int(self._data.nbytes)

    def load(self) -> bool:
        """Find the next rows; False at the end."""
        while self._group is None or self._taken == len(self._group.spans):
            self._group = self._data = None
            if not self._rest and not self._next_file():
                return False
            self._look(self._rest.pop(0))
        return True

    def _next_file(self) -> bool:
        self.close()
        while True:
            described = self._following()
            trim = self._journal.control.sealed.trim(self._wanted.topic.id)
            if trim is not None and self._done:
                self._refuse(self._wanted, trim, self._at, self._since)
            if described is None or described.first > self._bounds.through:
                return False
            try:
                self._file = open_sealed(self._journal.system, self._journal.folder, described)
            except errors.LogDamaged:
                self._journal.refresh_control()  # it may be elsewhere by now
                if self._following() == described:
                    raise
                continue
            self._done.add(described.name)
            self._rest = self._file.groups()
            return True

    def _following(self) -> SealedFile | None:
        """The next file: the oldest that may have rows behind what was handed out."""
        low, early = max(self._at, self._bounds.after + 1), self._bounds.received
        files, offsets = (
            self._journal.control.sealed.of(self._wanted.topic.id),
            self._wanted.offsets,
        )
        for file, beyond in itertools.zip_longest(files, files[1:]):
            if file.name in self._done or file.through < low or file.time_last < early:
                continue
            if not offsets or beyond is None or file.schema != beyond.schema:
                return file
            if any(beyond.starts[partition] > offset for partition, offset in offsets.items()):
                return file
        return None

    def _look(self, group: Group) -> None:
        """Choose the rows that are wanted; nothing is decoded for that."""
        spans, last = group.spans, int(group.spans["position"][-1])
        if self._rest:
            following: int | None = int(self._rest[0].spans["position"][0])
        else:
            file = self._following()
            following = file.first if file is not None else None
        self._complete = following is None or following > last
        self._at = max(self._at, last)
        bounds, position = self._bounds, spans["position"]
        wanted = (position > bounds.after) & (position <= bounds.through)
        wanted &= spans["received"] >= bounds.received
        keep = np.repeat(wanted, spans["rows"])
        if self._wanted.chooses and (chosen := self._wanted.kept(group.runs)) is not None:
            keep &= chosen
        known = self._wanted.next[group.runs["partition"]]
        if (group.runs["base"] < known).any():
            keep &= offsets_of(group.runs) >= np.repeat(known, group.runs["rows"])
        self._keep = None if keep.all() else keep
        self._group = group if self._keep is None else filtered(group, keep)
        self._taken = 0

    def last_until(self, bound: int) -> int:
        """The last position up to `bound` that has rows in the group."""
        assert self._group is not None
        positions = self._group.spans["position"]
        return int(positions[np.searchsorted(positions, bound, "right") - 1])

    def take(self, position: int, *, across_gaps: bool) -> list[Batch]:
        """The rows of the group up to a position, as batches of it that are not `last`."""
        group, file = self._group, self._file
        assert group is not None
        assert file is not None
        way = self._ways.of(self._wanted.topic.id, file.described.schema, file.flags)
        if self._data is None:
            self._data = self._read(group, file, way)
        stop = int(np.searchsorted(group.spans["position"], position, "right"))
        rows, runs = (np.cumsum(group.spans[name]) for name in ("rows", "runs"))
        at = [int(sums[self._taken - 1]) if self._taken else 0 for sums in (rows, runs)]
        data = self._data.slice(at[0], int(rows[stop - 1]) - at[0])
        part = Group(
            group.number,
            group.spans[self._taken : stop],
            group.runs[at[1] : int(runs[stop - 1])],
        )
        self._taken = stop
        spans = spans_of(part)
        self._wanted.handed_out(spans)  # before the next group is chosen: it may hold them too
        cuts = [0, data.num_rows]
        if file.described.compacted and not across_gaps:
            cuts[1:1] = without_gaps(part.runs)
        if len(cuts) == 2:
            return [self._batch(spans, data, way, position)]
        made = []
        for start, end in itertools.pairwise(cuts):
            keep = np.zeros(data.num_rows, bool)
            keep[start:end] = True
            some = data.slice(start, end - start)
            made.append(self._batch(spans_of(filtered(part, keep)), some, way, position))
        return made

    def _read(self, group: Group, file: SealedReader, way: Way) -> pa.RecordBatch:
        names = [*way.sources, *way.stored.names[way.width :]]
        data = file.read(group, names)
        return data if self._keep is None else data.filter(pa.array(self._keep))

    def _batch(self, spans: list[Span], data: pa.RecordBatch, way: Way, position: int) -> Batch:
        width = len(way.sources)
        named = enumerate(way.stored.names[way.width :], width)
        extra = {name: data.column(at) for at, name in named}
        own = data.select(range(width))
        own = way.upgrade(own) if way.upgrade is not None else own
        return Batch(
            self._wanted.topic,
            own,
            spans,
            position=position,
            last=False,
            schema_version=way.target.version,
            extra=extra,
        )

    def forget(self) -> None:
        """Let decoded rows go; they are decoded again when they are due."""
        self._data = None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def merged(streams: Sequence[Stream], *, across_gaps: bool) -> Iterator[Batch]:
    """All rows of the streams: whole entries, in the order of their positions."""
    try:
        while live := [stream for stream in streams if stream.load()]:
            bound = min(stream.bound for stream in live)
            due = [stream for stream in live if stream.first <= bound]
            if due:
                last = max(stream.last_until(bound) for stream in due)
                batches = _round(due, last, across_gaps)
            else:
                batches = _entry(live, min(stream.first for stream in live), across_gaps)
            yield from _ended(batches)
            if sum(stream.bytes for stream in live) > KEPT_BYTES:
                for stream in live:
                    stream.forget()
    finally:
        for stream in streams:
            stream.close()


def _round(streams: Sequence[Stream], position: int, across_gaps: bool) -> Iterator[Batch]:
    for stream in streams:
        yield from stream.take(position, across_gaps=across_gaps)


def _entry(streams: Sequence[Stream], position: int, across_gaps: bool) -> Iterator[Batch]:
    """One entry, part by part."""
    for stream in streams:
        while stream.load() and stream.first == position:
            yield from stream.take(position, across_gaps=across_gaps)


def _ended(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The last one is marked as such."""
    waiting: Batch | None = None
    try:
        for batch in batches:
            if waiting is not None:
                yield waiting
            waiting = batch
    except errors.HeadraceError:
        if waiting is not None:
            yield waiting  # what was read before what is damaged or gone
        raise
    if waiting is not None:
        waiting.last = True
        yield waiting
