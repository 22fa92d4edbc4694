"""One table of a capture while it runs: its topic, its rows on their way into it, its snapshot.

What the stream says of a table becomes rows of its topic (`changes`); what a chunk of a snapshot
says does too (`publish`). Both look at the rows as they are in the log, through the topic's table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace import errors
from headrace.sources.complete import (
    Completed,
    Lookup,
    Numbers,
    Operations,
    complete,
    equal_rows,
    joined,
    whole_keys,
)
from headrace.sources.postgres.group import TIMESTAMP, OfTable, Run
from headrace.sources.postgres.operations import Format, format_of, operations
from headrace.sources.postgres.protocol import Relation
from headrace.sources.postgres.snapshot import Chunk
from headrace.sources.postgres.state import LIVE, SNAPSHOTTING, TableState
from headrace.sources.postgres.values import PgType, arrow_type
from headrace.tables.hashing import hash64
from headrace.tables.runs import differs

if TYPE_CHECKING:
    from headrace.sources.postgres.catalog import TableInfo
    from headrace.log.embedded.log import EmbeddedLog

Words = npt.NDArray[np.uint64]
META = ("_weight", "_op", "_lsn", "_xid", "_commit_time")


class Changes(NamedTuple):
    """Rows of the topic's own columns."""

    rows: pa.RecordBatch
    weight: Numbers
    transaction: Numbers
    """Which transaction of the group each row belongs to, ascending."""
    op: pa.Array


@dataclass
class Touched:
    """The keys that a transaction has touched, as two hashes each."""

    xid: int
    first: Words
    second: Words


@dataclass
class Captured:
    """A table, its topic and its state."""

    log: EmbeddedLog
    info: TableInfo
    state: TableState
    types: Mapping[int, PgType]
    numeric_as_text: bool = False
    relation: Relation | None = None
    """What the stream last said of the columns."""
    touched: list[Touched] = field(default_factory=list)
    """Keys that the stream has touched while the table is snapshotted."""
    seen: list[tuple[Words, Words]] = field(default_factory=list)
    """A thorough snapshot: every key that it has read or that the stream has touched since."""
    emptied: list[int] = field(default_factory=list)
    """Transactions that have truncated the table while it is snapshotted."""
    chunk: Chunk | None = None
    """Read, and waiting for the stream to pass it."""
    chunk_keys: list[list[str]] | None = None
    """The keys that the chunk was read for; None: it is a range."""
    differs_at: int | None = None
    """Where the write-ahead log was when the table was first seen to have other columns."""
    _formats: dict[int, tuple[Relation, Format]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As `schema.table`."""
        return f"{self.info.schema}.{self.info.name}"

    @property
    def own(self) -> pa.Schema:
        """The topic's columns that are the table's."""
        arrow = self.log.topic(self.state.topic).schema.arrow
        return pa.schema([one.with_nullable(True) for one in arrow if one.name not in META])

    @property
    def snapshotting(self) -> bool:
        """Whether rows may be missing in the topic."""
        return self.state.status == SNAPSHOTTING

    def format(self, relation: Relation) -> Format:
        """How rows of a relation are read."""
        found = self._formats.get(id(relation))
        if found is None or found[0] is not relation:
            columns = [
                (column.name, self.types[column.type_oid], column.type_modifier)
                for column in relation.columns
            ]
            found = relation, self._format(columns)
            self._formats[id(relation)] = found
        return found[1]

    def _format(self, columns: Sequence[tuple[str, PgType, int]]) -> Format:
        """Columns that have another type than the topic's are older than it, and left out."""
        own = self.own
        return format_of(
            columns,
            pa.schema(
                [
                    own.field(name)
                    for name, kind, modifier in columns
                    if name in own.names
                    and own.field(name).type
                    == arrow_type(kind, modifier, numeric_as_text=self.numeric_as_text)
                ]
            ),
            self.state.key,
            numeric_as_text=self.numeric_as_text,
        )

    def forget_formats(self) -> None:
        """The topic has changed."""
        self._formats.clear()

    # -- the log ----------------------------------------------------------------------------

    def lookup(self, keys: list[pa.Array]) -> tuple[Numbers, pa.RecordBatch]:
        """Rows of the topic's table by key: which of the keys are there, and their rows."""
        asked = pa.table(dict(zip(self.state.key, keys, strict=True)))
        try:
            found = self.log.table(self.state.topic).get(asked)
        except errors.BadPosition:  # a new generation that has no rows yet
            return np.empty(0, np.int64), _empty(self.own)
        places = found.column("_index").to_numpy()
        rows = found.select(self.own.names).cast(self.own).combine_chunks().to_batches()
        batch = rows[0] if rows else _empty(self.own)
        return places, batch

    def all_rows(self) -> pa.RecordBatch:
        """All rows of the topic's table."""
        try:
            found = self.log.table(self.state.topic).scan().read_all()
        except errors.BadPosition:  # as above
            return _empty(self.own)
        rows = found.select(self.own.names).cast(self.own).combine_chunks().to_batches()
        return rows[0] if rows else _empty(self.own)

    # -- the stream -------------------------------------------------------------------------

    def changes(self, of: OfTable) -> Changes:
        """What a group of transactions does to the topic."""
        if not of.truncates:
            return self._changes(of.runs)
        parts: list[Changes] = []
        start = 0
        for end, number, xid in of.truncates:
            if end > start:
                parts.append(self._changes(of.runs[start:end], emptied=start > 0))
            before = self.all_rows()
            there = what_is_left(
                [before, *(part.rows for part in parts)],
                [np.ones(before.num_rows, np.int64), *(part.weight for part in parts)],
            )
            gone = there.num_rows
            letters = pa.array(["t"] * gone, pa.string())
            parts.append(Changes(there, np.full(gone, -1), np.full(gone, number), letters))
            self._truncated(xid)
            start = end
        if of.runs[start:]:
            parts.append(self._changes(of.runs[start:], emptied=True))
        return Changes(
            pa.concat_batches([part.rows for part in parts]),
            np.concatenate([part.weight for part in parts]),
            np.concatenate([part.transaction for part in parts]),
            pa.concat_arrays([part.op for part in parts]),
        )

    def _truncated(self, xid: int) -> None:
        """A chunk that was read before is no longer what the table holds."""
        if self.snapshotting:
            self.chunk = None
            self.emptied.append(xid)

    def _changes(self, runs: Sequence[Run], *, emptied: bool = False) -> Changes:
        """Of operations only. `emptied`: nothing was in the table before them."""
        parts: list[Operations] = []
        for _, group in groupby(runs, lambda run: id(run[2].relation)):
            same = [run for _, _, run in group]  # runs of one definition of the table
            parts.append(self._widened(operations(same, self.format(same[0].relation))))
        made = whole_keys(joined(parts), self.state.key)
        of_run = np.repeat(np.arange(len(runs)), [len(run) for _, _, run in runs])
        found = complete(
            made,
            self.state.key,
            _nothing(self.own) if emptied else self.lookup,
            given_is_there=not self.snapshotting,
        )
        self._note(made, found, of_run, runs)
        transaction = np.array([number for number, _, _ in runs])[of_run]
        kinds = made.kinds[found.operation]
        return Changes(found.rows, found.weight, transaction[found.operation], _letters(kinds))

    def _widened(self, made: Operations) -> Operations:
        """The same with all columns of the topic: those that the table lost are null."""
        own = self.own
        if made.new.schema.names == own.names:
            return made
        made.new = _with_all(made.new, own)
        if made.given is not None:
            made.given = _with_all(made.given, own)
        return made

    def _note(
        self,
        made: Operations,
        found: Completed,
        of_run: Numbers,
        part: Sequence[Run],
    ) -> None:
        """Remember what a snapshot must know; say so if a row is not there that must be."""
        if self.state.status == LIVE and (len(found.missing) or len(found.unknown)):
            which = int((found.missing if len(found.missing) else found.unknown)[0])
            key = {n: c[which].as_py() for n, c in zip(self.state.key, made.read, strict=True)}
            raise errors.BeforeImageMissing(
                f"the row of {self.name} with key {key} is not in topic '{self.state.topic}'",
                place=self.name,
                key=key,
            )
        if not self.snapshotting:
            return
        self.state.dirty = True
        written = [made.new.column(name) for name in self.state.key]
        hashes = [
            np.where(made.kinds == ord("i"), hash64(written, seed), hash64(made.read, seed))
            for seed in (1, 2)
        ]
        more = [hash64(written, seed) for seed in (1, 2)]
        starts = np.concatenate(([0], np.flatnonzero(np.diff(of_run)) + 1, [len(of_run)]))
        for begin, end in pairwise(starts):
            xid = part[int(of_run[begin])][1]
            of_both = [
                np.concatenate([one[begin:end], other[begin:end]])
                for one, other in zip(hashes, more, strict=True)
            ]
            self.touched.append(Touched(xid, *of_both))
            if self.state.thorough:
                self.seen.append((of_both[0], of_both[1]))
        if len(found.unknown):
            places = pa.array(found.unknown)
            texts = [
                made.new.column(name).take(places).cast(pa.string()) for name in self.state.key
            ]
            self.state.pending += [
                list(one) for one in zip(*(t.to_pylist() for t in texts), strict=True)
            ]

    # -- the snapshot -----------------------------------------------------------------------

    def publish(self, chunk: Chunk, columns: Sequence[str]) -> tuple[pa.RecordBatch, Numbers]:
        """Rows of the topic's own columns and weights that put the log right for a chunk."""
        kinds = {one.name: (one.type, one.modifier) for one in self.info.columns}
        form = self._format([(name, *kinds[name]) for name in columns])
        arrays = [form.column(at, chunk.texts[place]) for at, place in enumerate(form.places)]
        rows = _with_all(pa.RecordBatch.from_arrays(arrays, schema=form.schema), self.own)
        if self.state.thorough and rows.num_rows:
            keys = [rows.column(name) for name in self.state.key]
            self.seen.append((hash64(keys, 1), hash64(keys, 2)))
        newer = [one for one in self.touched if not chunk.visible.sees(one.xid)]
        if newer and rows.num_rows:
            keys = [rows.column(name) for name in self.state.key]
            gone = np.isin(hash64(keys, 1), np.concatenate([one.first for one in newer]))
            gone &= np.isin(hash64(keys, 2), np.concatenate([one.second for one in newer]))
            rows = rows.filter(pa.array(~gone))
        self.touched = newer
        weight = np.ones(rows.num_rows, np.int64)
        if not self.state.dirty or not rows.num_rows:
            return rows, weight
        found, old = self.lookup([rows.column(name) for name in self.state.key])
        new = rows.take(pa.array(found))
        other = ~equal_rows(old, new)
        fresh = np.ones(rows.num_rows, bool)
        fresh[found] = other
        replaced = np.flatnonzero(other)
        place = np.concatenate([2 * found[replaced], 2 * np.flatnonzero(fresh) + 1])
        both = pa.concat_batches([old.take(pa.array(replaced)), rows.filter(pa.array(fresh))])
        order = np.argsort(place)
        weight = np.where(place % 2 == 0, -1, 1)
        return both.take(pa.array(order)), weight[order]

    def finished(self) -> pa.RecordBatch:
        """The table has been read through: the rows that the log has, and the database has not."""
        rows = self.all_rows() if self.state.thorough else _empty(self.own)
        if rows.num_rows and self.seen:
            keys = [rows.column(name) for name in self.state.key]
            there = np.isin(hash64(keys, 1), np.concatenate([first for first, _ in self.seen]))
            there &= np.isin(hash64(keys, 2), np.concatenate([second for _, second in self.seen]))
            rows = rows.filter(pa.array(~there))
        self.state.status, self.state.thorough = LIVE, False
        self.touched, self.emptied, self.seen = [], [], []
        return rows

    def settle_pending(self) -> None:
        """Keys that a chunk was read for are done, but for those that changed meanwhile.

        Of these some are in the log by now: the stream has said the whole row.
        """
        assert self.chunk_keys is not None
        left = self.state.pending[len(self.chunk_keys) :]
        if self.touched:
            kinds = {one.name: (one.type, one.modifier) for one in self.info.columns}
            form = self._format([(name, *kinds[name]) for name in self.state.key])
            texts = zip(*self.chunk_keys, strict=True)
            keys = [
                form.column(at, pa.array([text.encode() for text in column], pa.binary()))
                for at, column in enumerate(texts)
            ]
            again = np.isin(hash64(keys, 1), np.concatenate([one.first for one in self.touched]))
            again[self.lookup(keys)[0]] = False
            left += [one for one, wanted in zip(self.chunk_keys, again, strict=True) if wanted]
        self.state.pending = [list(one) for one in dict.fromkeys(map(tuple, left))]


def with_meta(
    rows: pa.RecordBatch,
    weight: Numbers,
    op: Sequence[str] | pa.Array,
    lsn: Numbers,
    xid: Numbers | None,
    commit_time: Numbers | None,
) -> pa.RecordBatch:
    """Rows as a topic of changes has them."""
    count = rows.num_rows
    meta = [
        pa.array(weight, pa.int64()),
        op if isinstance(op, pa.Array) else pa.array(op, pa.string()),
        pa.array(lsn, pa.int64()),
        pa.nulls(count, pa.int64()) if xid is None else pa.array(xid, pa.int64()),
        pa.nulls(count, TIMESTAMP)
        if commit_time is None
        else pa.array(commit_time, pa.int64()).cast(pa.timestamp("us")).cast(TIMESTAMP),
    ]
    return pa.RecordBatch.from_arrays([*rows.columns, *meta], names=[*rows.schema.names, *META])


def what_is_left(rows: Sequence[pa.RecordBatch], weights: Sequence[Numbers]) -> pa.RecordBatch:
    """The rows that are there when all these are added up."""
    whole, weight = pa.concat_batches(list(rows)), np.concatenate(list(weights))
    if not whole.num_rows:
        return whole
    words = [hash64(whole.columns, 1), hash64(whole.columns, 2)]
    order = np.lexsort(words)
    starts = np.concatenate(([0], np.flatnonzero(differs([w[order] for w in words])) + 1))
    sums = np.add.reduceat(weight[order], starts)
    return whole.take(pa.array(np.repeat(order[starts], np.maximum(sums, 0))))


def _with_all(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    names = set(batch.schema.names)
    arrays = [
        batch.column(one.name) if one.name in names else pa.nulls(batch.num_rows, one.type)
        for one in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _nothing(schema: pa.Schema) -> Lookup:
    def lookup(keys: list[pa.Array]) -> tuple[Numbers, pa.RecordBatch]:
        del keys
        return np.empty(0, np.int64), _empty(schema)

    return lookup


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=schema)


_LETTERS = pa.array([chr(number) for number in range(128)])


def _letters(kinds: npt.NDArray[np.uint8]) -> pa.Array:
    """The operations, as Debezium names them: c, u, d."""
    named = np.where(kinds == ord("i"), ord("c"), kinds)
    return _LETTERS.take(pa.array(named))
