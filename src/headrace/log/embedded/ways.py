"""What a reading wants of each topic, and how rows of each schema version are handed out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.log.embedded.format import RUN_BYTES, Runs
from headrace.log.embedded.journal import Journal
from headrace.log.embedded.packing import storage_schema
from headrace.model.evolution import Upgrade
from headrace.model.records import RUNS, Span, offsets_of
from headrace.model.schema import Schema
from headrace.model.topic import Topic

_NEVER = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(slots=True)
class Wanted:
    """One topic of a reading."""

    topic: Topic
    first_version: int
    """Rows are read at least at this version, the newest when the reading began."""
    partitions: frozenset[int] | None
    offsets: dict[int, int]
    """partition -> rows below this offset are not wanted."""
    _next: npt.NDArray[np.uint64] = field(init=False)
    _last: bytes = field(init=False, default=b"")
    """Of a topic with one partition: runs of what was handed out, the last of them last."""
    _floor: npt.NDArray[np.uint64] | None = field(init=False, default=None)
    """Of each partition the first offset that is wanted, as an array."""

    def __post_init__(self) -> None:
        """Nothing was handed out yet."""
        self._next = np.zeros(self.topic.partitions, np.uint64)

    @property
    def next(self) -> npt.NDArray[np.uint64]:
        """Of each partition the offset behind the last row handed out."""
        if self._last:
            _, rows, base = np.frombuffer(self._last, RUNS)[-1]
            self._next[0] = base + rows
        return self._next

    @property
    def chooses(self) -> bool:
        """Whether some rows are not wanted."""
        return self.partitions is not None or bool(self.offsets)

    def kept(self, runs: Runs) -> npt.NDArray[np.bool_] | None:
        """A mask of the rows wanted, in the order of their runs; None: all of them."""
        if self._floor is None:
            wanted = range(self.topic.partitions) if self.partitions is None else self.partitions
            self._floor = np.full(self.topic.partitions, _NEVER, np.uint64)
            self._floor[list(wanted)] = [self.offsets.get(partition, 0) for partition in wanted]
        floor = self._floor[runs["partition"]]
        if (runs["base"] >= floor).all():
            return None
        keep: npt.NDArray[np.bool_] = offsets_of(runs) >= np.repeat(floor, runs["rows"])
        return keep

    def handed_out(self, spans: Sequence[Span]) -> None:
        """Remember how far each partition was read."""
        if self.topic.partitions == 1:
            self._last = bytes(spans[-1].table[-RUN_BYTES:])
            return
        for span in spans:
            runs = span.runs
            self._next[runs["partition"]] = runs["base"] + runs["rows"]


@dataclass(slots=True)
class Way:
    """How rows of one topic that were written under one schema version are handed out."""

    wanted: Wanted
    target: Schema
    stored: pa.Schema
    """The columns in the journal."""
    width: int
    """How many of them are the topic's own; headers and transaction follow."""
    picked: Sequence[int] | None
    """Which of them are handed out, if all are as they were written; None: see `upgrade`."""
    upgrade: Upgrade | None
    """None: as they were written."""

    @property
    def sources(self) -> list[str]:
        """Names of the topic's own columns that are needed, as they were written."""
        own = self.stored.names[: self.width]
        return own if self.upgrade is None else [n for n in own if n in self.upgrade.sources]


class Ways:
    """The ways of a reading, found once for each schema version."""

    def __init__(
        self, journal: Journal, wanted: dict[int, Wanted], columns: Sequence[str] | None
    ) -> None:
        """`columns`: those only."""
        self._journal = journal
        self._wanted = wanted
        self._columns = columns
        self._found: dict[tuple[int, int, int], Way] = {}

    def of(self, topic: int, schema: int, flags: int) -> Way:
        """How to hand out rows that were written so."""
        way = self._found.get((topic, schema, flags))
        if way is None:
            wanted = self._wanted[topic]
            target = self._target(wanted, schema)
            written = wanted.topic.schemas[schema - 1]
            width, upgrade = len(written.arrow), None
            picked: Sequence[int] | None = range(width) if flags else None
            if self._columns is not None or written is not target:
                upgrade = Upgrade(written, target, self._columns, wanted.topic.schema)
                picked = upgrade.picked
            way = self._found[topic, schema, flags] = Way(
                wanted=wanted,
                target=target,
                stored=storage_schema(written.arrow, flags),
                width=width,
                picked=picked,
                upgrade=upgrade,
            )
        return way

    def _target(self, wanted: Wanted, schema: int) -> Schema:
        """The version in which rows are handed out: the newest of their generation known."""
        topic = wanted.topic
        if schema > len(topic.schemas):
            self._journal.refresh_control()
            topic = wanted.topic = self._journal.control.by_id[topic.id]
        written = topic.schemas[schema - 1]
        floor = max(wanted.first_version, schema)
        same = [s for s in topic.schemas[:floor] if s.generation == written.generation]
        return same[-1]


def without_gaps(runs: Any) -> list[int]:
    """Where rows must be cut, so that no partition has a gap in its offsets in any of the parts."""
    order = np.argsort(runs["partition"], kind="stable")
    partition, base, rows = (runs[name][order] for name in ("partition", "base", "rows"))
    gap = np.zeros(len(runs), bool)
    gap[order[1:]] = (partition[1:] == partition[:-1]) & (base[1:] != base[:-1] + rows[:-1])
    starts = np.cumsum(runs["rows"], dtype=np.int64) - runs["rows"]
    cuts: list[int] = starts[gap].tolist()
    return cuts
