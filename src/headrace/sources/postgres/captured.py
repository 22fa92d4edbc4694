"""One table of a capture while it runs: its topic, its rows on their way into it, its snapshot.

What the stream says of a table becomes rows of its topic (`changes`); what a chunk of a snapshot
says does too (`publish`). Both look at the rows as they are in the log, through the topic's table.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace import errors
from headrace.model.arrow_message import ArrowMessage, MessageForm
from headrace.model.hashing import hash64
from headrace.sources.complete import (
    DELETE,
    INSERT,
    Completed,
    Lookup,
    Numbers,
    Operations,
    complete,
    equal_rows,
    joined,
    whole_keys,
)
from headrace.sources.postgres.group import INT64, TIMESTAMP, Run, column, repeated
from headrace.sources.postgres.keyless import Owed
from headrace.sources.postgres.operations import Format, format_of, operations
from headrace.sources.postgres.protocol import UNCHANGED, Relation, Rows
from headrace.sources.postgres.seen import Seen, Words
from headrace.sources.postgres.snapshot import Chunk, Visible, Wanted
from headrace.sources.postgres.state import LIVE, SNAPSHOTTING, TableState, full_name
from headrace.sources.postgres.transactions import Transaction
from headrace.sources.postgres.values import FEW, PgType, arrow_type, printed, told

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog
    from headrace.sources.postgres.catalog import TableInfo

TOUCHED_MAX = 1_000_000
"""So many keys of one transaction are noted while a table is snapshotted."""
UNSEEN_MAX = 10_000
PENDING_ROWS = 5000
"""Keys that are read once more, at a time."""
OF_A_TABLE = (errors.TypeNotCarried, errors.ValueNotCarried, errors.NoReplicaIdentity)
"""What stops a table, and no other."""
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
    folder: str
    """For files that are of no use to a later process."""
    numeric_as_text: bool = False
    relation: Relation | None = None
    """What the stream last said of the columns."""
    touched: list[Touched] = field(default_factory=list)
    """Keys that the stream has touched while the table is snapshotted."""
    seen: Seen = field(init=False)
    """A thorough snapshot: every key that it has read, or that a transaction has touched which its
    first chunk does not see. (What that sees it decides: perhaps it saw more than the stream, of
    which a table that was not published for a while has only a part.)"""
    begun: bool = False
    """A snapshot: whether its first chunk is published."""
    emptied: list[int] = field(default_factory=list)
    """Transactions that have truncated the table while it is snapshotted, or were too large."""
    recent: Iterable[int] = ()
    """Transactions that the stream has said lately: the capture's own."""
    must_see: set[int] = field(default_factory=set)
    """Those of them that were said before the table was snapshotted: they are in no `touched`."""
    chunks: deque[Chunk] = field(default_factory=deque)
    """Read, and waiting for the stream to pass them, in their order."""
    turn: int = 0
    """A chunk whose reading began in another turn is of no use."""
    view: Visible | None = None
    """Without a key: the snapshot that is being read; see `keyless`."""
    owed: Owed = field(init=False)
    """Without a key: rows that are to be taken away in the end."""
    width: float = 0.0
    """Bytes of a row, as last seen."""
    published: bool = True
    """Whether the stream has its changes: else it waits to be published, and is not read."""
    read_lately: bool = False
    """Whether it was being read since it was last looked at."""
    differs_at: int | None = None
    """Where the write-ahead log was when the table was first seen to have other columns."""
    _formats: dict[int, tuple[Relation, Format]] = field(default_factory=dict)
    _arrow: pa.Schema | None = None
    """The topic's, of which `_own` was made."""
    _own: pa.Schema | None = None
    _messages: MessageForm | None = None

    def __post_init__(self) -> None:
        """What the stream has said before now is not known by key."""
        self.must_see = set(self.recent)
        self.seen, self.owed = Seen(self.log.path), Owed(self.folder)
        self.width = self.info.bytes / self.info.rows if self.info.rows > 0 else 1000.0

    @property
    def name(self) -> str:
        """As `schema.table`."""
        return full_name(self.info.schema, self.info.name)

    @property
    def own(self) -> pa.Schema:
        """The topic's columns that are the table's."""
        arrow = self.log.topic(self.state.topic).schema.arrow
        if arrow is not self._arrow:
            own = [one.with_nullable(True) for one in arrow if one.name not in META]
            self._arrow, self._own = arrow, pa.schema(own)
        return self._own

    @property
    def snapshotting(self) -> bool:
        """Whether rows may be missing in the topic."""
        return self.state.status == SNAPSHOTTING

    def format(self, relation: Relation) -> Format:
        """How rows of a relation are read."""
        found = self._formats.get(id(relation))
        if found is None or found[0] is not relation:
            columns = [
                (column.name, self.types.get(column.type_oid), column.type_modifier)
                for column in relation.columns
            ]
            found = relation, self._format(columns)
            self._formats[id(relation)] = found
        return found[1]

    def says_otherwise(self, relation: Relation, types: Mapping[str, pa.DataType]) -> list[str]:
        """The columns whose type in the topic stays, and is of another type in the table."""
        schema = self.log.topic(self.state.topic).schema
        return [
            column.name
            for column in relation.columns
            if column.name not in self.state.key
            and column.name in types
            and self.own.field(column.name).type == (kind := types[column.name])
            and schema.column(column.name).comment
            != told(self.types[column.type_oid], column.type_modifier, kind).get("comment")
        ]

    def reads_by_other_names(self, relation: Relation) -> bool:
        """Whether a column that the topic has, or another one, was perhaps renamed meanwhile."""
        read = self.format(relation).names
        now = [one.name for one in self.info.streamed if one.name in read]
        said = [one.name for one in relation.columns]
        return read != now or len(read) < min(len(said), len(self.own))

    def _format(self, columns: Sequence[tuple[str, PgType | None, int]]) -> Format:
        """Columns that have another type than the topic's are older than it, and left out.

        So are those whose type is gone. Old rows of partitions are looked up: the stream calls them
        whole if the root has REPLICA IDENTITY FULL, whatever the partition has written.
        """
        own = self.own
        return format_of(
            columns,
            pa.schema(
                [
                    own.field(name)
                    for name, kind, modifier in columns
                    if name in own.names
                    and kind is not None
                    and own.field(name).type
                    == arrow_type(kind, modifier, numeric_as_text=self.numeric_as_text)
                ]
            ),
            self.state.key,
            numeric_as_text=self.numeric_as_text,
            gives=not (self.info.partitioned and self.state.key),
        )

    def with_meta(
        self,
        rows: pa.RecordBatch,
        weight: Numbers,
        op: pa.Array,
        lsn: Numbers,
        xid: Numbers | None = None,
        commit_time: Numbers | None = None,
    ) -> pa.RecordBatch:
        """Rows as the topic has them."""
        by, at = (
            pa.nulls(rows.num_rows, kind) if one is None else column(one, kind)
            for one, kind in ((xid, INT64), (commit_time, TIMESTAMP))
        )
        meta = [column(weight), op, column(lsn), by, at]
        return self._whole(dict(zip(rows.schema.names, rows.columns, strict=True)), meta)

    def _whole(self, columns: dict[str, pa.Array], meta: Sequence[pa.Array]) -> pa.RecordBatch:
        columns.update(zip(META, meta, strict=True))
        arrow = self.log.topic(self.state.topic).schema.arrow
        return pa.RecordBatch.from_arrays([columns[one.name] for one in arrow], schema=arrow)

    def inserted(self, run: Rows, by: Transaction) -> ArrowMessage | None:
        """`changes` and `with_meta` of a few inserted rows; None: they are not so simple.

        The row of a lone transaction waits most for calls of Arrow and numpy: none is made.
        """
        if self.state.status != LIVE:
            return None
        form, count = self.format(run.relation), len(run)
        texts = list(zip(*[row.new or () for row in run.rows()], strict=True))
        if len(form.places) != len(self.own) or any(UNCHANGED in one for one in texts):
            return None
        columns: dict[str, Sequence[bytes] | None] = {
            name: form.few(at, [*texts[place]])
            for at, (name, place) in enumerate(zip(form.names, form.places, strict=True))
        }
        columns["_weight"] = repeated(1, count)
        columns["_op"] = b"", _PLACES[: 4 * count + 4], b"c" * count
        columns["_lsn"], columns["_xid"] = repeated(by.end_lsn, count), repeated(by.xid, count)
        columns["_commit_time"] = repeated(by.commit_time_us, count)
        if None in columns.values():
            return None
        if self._messages is None or self._messages.schema is not self._arrow:
            self._messages = MessageForm(self._arrow)
        return self._messages.message(count, [columns[one] or () for one in self._messages.names])

    def forget_formats(self) -> None:
        """The topic has changed."""
        self._formats.clear()

    # -- the log ----------------------------------------------------------------------------

    def lookup(self, keys: list[pa.Array]) -> tuple[Numbers, pa.RecordBatch]:
        """Rows of the topic's table by key: which of the keys are there, and their rows."""
        if not self.state.key:
            return np.empty(0, np.int64), _empty(self.own)
        asked = pa.table(dict(zip(self.state.key, keys, strict=True)))
        try:
            found = self.log.table(self.state.topic).get(asked)
        except errors.BadPosition:  # a new generation that has no rows yet
            return np.empty(0, np.int64), _empty(self.own)
        places = found.column("_index").to_numpy()
        rows = found.select(self.own.names).cast(self.own).combine_chunks().to_batches()
        batch = rows[0] if rows else _empty(self.own)
        return places, batch

    def scan(self) -> Iterator[pa.RecordBatch]:
        """All rows of the topic's table, some at a time."""
        with contextlib.suppress(errors.BadPosition):  # as above
            own = self.own
            for batch in self.log.table(self.state.topic).scan():
                yield batch.select(own.names).cast(own)

    def added_up(self) -> Owed:
        """Without a key: the rows of the topic, each as often as it is there."""
        topic, own, found = self.log.topic(self.state.topic), self.own, Owed(self.folder)
        for batch in self.log.read(topic.name):
            if topic.schemas[batch.schema_version - 1].generation == topic.schema.generation:
                rows = batch.data.select(own.names).cast(own)
                found.add(rows, batch.data.column("_weight").to_numpy())
        return found

    # -- the stream -------------------------------------------------------------------------

    def changes(self, runs: Sequence[Run], lookup: Lookup | None = None) -> Changes:
        """What a group of transactions does to the topic, or a part of a large one.

        `lookup`: the rows as they are before these operations, if not as the log has them.
        """
        keyless = not self.state.key
        if keyless and self.snapshotting:
            runs = [run for run in runs if self._counts(run[1])]
        if not runs:
            return self.nothing()
        if len(runs) == 1 and runs[0][2].op == "i" and self.state.status == LIVE:
            number, _, rows = runs[0]  # nothing is to be completed
            made = self._widened(operations([rows], self.format(rows.relation)))
            if not made.left_out:
                weight, of = np.ones(len(made), np.int64), np.full(len(made), number)
                return Changes(made.new, weight, of, _letters(made.kinds))
        parts: list[Operations] = []
        for _, group in groupby(runs, lambda run: id(run[2].relation)):
            same = [run for _, _, run in group]  # runs of one definition of the table
            if not self._says_key(same[0]):
                return self.changes(self._without_older(runs), lookup)
            parts.append(self._widened(operations(same, self.format(same[0].relation))))
        made = whole_keys(joined(parts), self.state.key)
        changed = made.kinds != INSERT
        if any(key.null_count and key.filter(pa.array(changed)).null_count for key in made.read):
            raise self.named_otherwise()
        transaction = np.repeat([one for one, _, _ in runs], [len(run) for _, _, run in runs])
        if self.info.deferrable and not self.snapshotting and self._may_swap(made):
            self.read_again()
        if self.info.deferrable and self.snapshotting:
            return self._deferred(made, runs, transaction, lookup)
        found = complete(
            made,
            self.state.key,
            lookup or self.lookup,
            given_is_there=keyless or not self.snapshotting,
        )
        kinds = made.kinds[found.operation]
        all_of = Changes(found.rows, found.weight, transaction[found.operation], _letters(kinds))
        if keyless:
            return self._counted(all_of, found)
        self._note(made, found, runs)
        if self.snapshotting and self.state.thorough:
            return self._displacing(all_of, made, found, transaction, lookup or self.lookup)
        return all_of

    def _says_key(self, rows: Rows) -> bool:
        """Whether the key has the types that the topic's has."""
        return set(self.state.key) <= set(self.format(rows.relation).names)

    def _without_older(self, runs: Sequence[Run]) -> list[Run]:
        """Those that say the key as the topic has it; what the others did is read with the table.

        They are of the transaction that has given the key other types, or of one before it.
        """
        self.read_again()
        for xid in {xid for _, xid, rows in runs if not self._says_key(rows)}:
            self.overtaken(xid)
        return [run for run in runs if self._says_key(run[2])]

    def nothing(self) -> Changes:
        """No rows."""
        none = np.empty(0, np.int64)
        return Changes(_empty(self.own), none, none, pa.array([], pa.string()))

    def _displacing(
        self, changes: Changes, made: Operations, found: Completed, of: Numbers, lookup: Lookup
    ) -> Changes:
        """Take away first what has the key of a row that comes: the database lost it unheard.

        Also if that row is not known yet. `of`: the transaction of each operation.
        """
        at = np.concatenate([found.operation, found.unknown])
        order = np.argsort(at, kind="stable")
        at, come = at[order], np.concatenate([changes.weight > 0, found.unknown >= 0])[order]
        new = made.new.take(pa.array(found.unknown))
        keys = [
            pa.concat_arrays([changes.rows.column(name), new.column(name)]).take(pa.array(order))
            for name in self.state.key
        ]
        first = np.unique(hash64(keys, 1), return_index=True)[1]  # later ones follow from it
        first = np.sort(first[come[first]])
        if not len(first):
            return changes
        there, old = lookup([key.take(pa.array(first)) for key in keys])
        by = at[first[there]]
        order = np.argsort(np.concatenate([by, found.operation]), kind="stable")
        return Changes(
            pa.concat_batches([old, changes.rows]).take(pa.array(order)),
            np.concatenate([np.full(len(by), -1), changes.weight])[order],
            np.concatenate([of[by], changes.transaction])[order],
            pa.concat_arrays([pa.repeat("d", len(by)), changes.op]).take(pa.array(order)),
        )

    def _may_swap(self, made: Operations) -> bool:
        """Whether a row gets a key that another operation takes a row from, and which is not said.

        The old rows of partitions are looked up by their keys (`_format`).
        """
        if not self.info.partitioned or not self.state.key:
            return False
        read = hash64(made.read, 1)
        put = hash64([made.new.column(name) for name in self.state.key], 1)
        gets = (made.kinds == INSERT) | ((made.kinds != DELETE) & (read != put))
        return bool(np.isin(read[made.kinds != INSERT], put[gets]).any())

    def _deferred(
        self, made: Operations, runs: Sequence[Run], of: Numbers, lookup: Lookup | None
    ) -> Changes:
        """A deferrable key: until a transaction ends, several rows may have the same.

        Which of them the topic has is not known while the table is read. So what it has under the
        keys goes, and they are read from the database; if they are many, with the table.
        """
        if lookup is not None or len(made) > UNSEEN_MAX:
            self.read_again()
            for xid in {xid for _, xid, _ in runs}:
                self.overtaken(xid)
            return self.nothing()
        self._note_touched(made, runs)
        reads, writes = (np.flatnonzero(made.kinds != kind) for kind in (INSERT, DELETE))
        at = np.concatenate([reads, writes])
        keys = [
            pa.concat_arrays(
                [read.take(pa.array(reads)), made.new.column(name).take(pa.array(writes))]
            )
            for name, read in zip(self.state.key, made.read, strict=True)
        ]
        each = np.unique(hash64(keys, 1), return_index=True)[1]
        keys = [key.take(pa.array(each)) for key in keys]
        self._ask_for(keys)
        there, old = self.lookup(keys)
        by = at[each[there]]
        order = np.argsort(by, kind="stable")
        gone = old.take(pa.array(order))
        return Changes(gone, np.full(len(by), -1), of[by[order]], pa.repeat("d", len(by)))

    def _counts(self, xid: int) -> bool:
        """Without a key, snapshotting: whether the stream is heard on a transaction."""
        if self.view is not None:
            return not self.view.sees(xid)
        if xid not in self.state.unseen[-1:]:
            self.state.unseen += [xid]
        if (
            len(self.state.unseen) > UNSEEN_MAX
        ):  # it takes long to begin: then all of them must have ended
            self.state.fence, self.state.unseen = -1, []
        return False

    def _counted(self, changes: Changes, found: Completed) -> Changes:
        """Without a key: old rows are those that the database gave; see `keyless`."""
        if len(found.missing) or len(found.unknown):
            raise self.named_otherwise()
        if not self.snapshotting:
            return changes
        self.state.dirty = True
        put = changes.weight > 0
        self.owed.add(changes.rows.filter(pa.array(~put)))
        return Changes(
            changes.rows.filter(pa.array(put)),
            changes.weight[put],
            changes.transaction[put],
            changes.op.filter(pa.array(put)),
        )

    def named_otherwise(self) -> errors.NoReplicaIdentity:
        """The stream does not say by the key, or wholly, which row is changed."""
        key = ", ".join(self.state.key)
        how = f"names its row by other columns than ({key})" if key else "does not say the old row"
        return errors.NoReplicaIdentity(
            f"a change of table {self.name}, or of a partition, {how}", place=self.state.topic
        )

    def overtaken(self, xid: int) -> None:
        """A transaction changes more than is noted: what was read without it is of no use."""
        if self.snapshotting and not self.state.key:
            if self._counts(xid):
                self.drop()
                self.state.unseen += [xid]
        elif self.snapshotting:
            self.drop()
            self.emptied.append(xid)
            self.touched = [one for one in self.touched if one.xid != xid]

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
        if self.snapshotting:
            self._note_touched(made, part)
            asked = found.unknown
            if self.state.thorough and made.left_out:  # completed of rows that may be out of date
                asked = np.flatnonzero(np.logical_or.reduce([*made.left_out.values()]))
            new = made.new.take(pa.array(asked))
            self._ask_for([new.column(name) for name in self.state.key])

    def _note_touched(self, made: Operations, part: Sequence[Run]) -> None:
        self.state.dirty = True
        written = [made.new.column(name) for name in self.state.key]
        hashes = [
            np.where(made.kinds == ord("i"), hash64(written, seed), hash64(made.read, seed))
            for seed in (1, 2)
        ]
        more = [hash64(written, seed) for seed in (1, 2)]
        of_run = np.repeat(np.arange(len(part)), [len(run) for _, _, run in part])
        starts = np.concatenate(([0], np.flatnonzero(np.diff(of_run)) + 1, [len(of_run)]))
        for begin, end in pairwise(starts):
            xid = part[int(of_run[begin])][1]
            of_both = [
                np.concatenate([one[begin:end], other[begin:end]])
                for one, other in zip(hashes, more, strict=True)
            ]
            if xid not in self.emptied:
                self.touched.append(Touched(xid, *of_both))
            if self.state.thorough and self.begun:
                self.seen.add(of_both[0], of_both[1])
        last = part[-1][1]  # only a transaction that comes by parts has so many
        if sum(len(one.first) for one in self.touched if one.xid == last) > TOUCHED_MAX:
            self.overtaken(last)

    def _ask_for(self, keys: list[pa.Array]) -> None:
        """What is there under these keys is read from the database, in the end."""
        if len(keys[0]):
            all_of = [*map(tuple, self.state.pending), *zip(*map(key_texts, keys), strict=True)]
            if not self.state.read_through:  # or the first of them are being read
                all_of = [*dict.fromkeys(all_of)]
            self.state.pending = [list(one) for one in all_of]

    # -- the snapshot -----------------------------------------------------------------------

    def read_again(self, *, thorough: bool = True) -> None:
        """Begin a snapshot from the start of the table."""
        self.state.read_again(thorough=thorough)
        self.drop()
        self.touched, self.emptied, self.seen = [], [], Seen(self.log.path)
        self.begun, self.read_lately = False, True
        self.must_see = set(self.recent)

    def drop(self) -> None:
        """What was read, or is being read, is of no use any more."""
        self.chunks.clear()
        self.turn += 1
        if self.snapshotting and not self.state.key:  # all begins again
            self.view, self.owed = None, Owed(self.folder)
            self.must_see = set(self.recent)
            self.state.read_through, self.state.rows = False, 0

    def watch(self, view: Visible) -> None:
        """Without a key: this snapshot is read from now on."""
        self.view = view
        self.owed = self.added_up() if self.state.dirty else Owed(self.folder)
        self.must_see, self.state.unseen, self.state.dirty = set(), [], True

    def wanted(self, chunk_rows: int, chunk_bytes: int) -> Wanted:
        """What is to be read next; the schema of the topic as it is now."""
        state, own = self.state, self.own
        columns = [column.name for column in self.info.streamed if column.name in own.names]
        kinds = {one.name: (one.type, one.modifier) for one in self.info.columns}
        form = self._format([(name, *kinds[name]) for name in columns])

        def decode(texts: list[pa.Array]) -> pa.RecordBatch:
            arrays = [form.column(at, texts[place]) for at, place in enumerate(form.places)]
            return _with_all(pa.RecordBatch.from_arrays(arrays, schema=form.schema), own)

        last = self.chunks[-1] if self.chunks else None
        limit = max(1, min(chunk_rows, int(chunk_bytes / max(1.0, self.width))))
        return Wanted(
            table=(self.info.schema, self.info.name),
            columns=columns,
            key=state.key,
            limit=limit,
            decode=decode,
            after=last.last if last else state.after,
            upto=last.upto if last else state.upto,
            only=state.pending[: min(limit, PENDING_ROWS)] if state.read_through else None,
            bytes=2 * chunk_bytes,
            fence=state.fence,
            must_see=[*self.must_see, *self.emptied, *state.unseen],
            shape=",".join(
                [str(self.info.oid)]
                + [
                    f"{one.number} {one.name} {one.type.oid} {one.modifier}"
                    for one in self.info.streamed
                    if one.name in columns
                ]
            ),
            whole=self.info.partitioned,
        )

    def publish(self, chunk: Chunk) -> tuple[pa.RecordBatch, Numbers]:
        """Rows of the topic's own columns and weights that put the log right for a chunk."""
        rows = chunk.rows
        if not self.state.key:
            rows = rows.filter(pa.array(self.owed.pay(rows)))
            return rows, np.ones(rows.num_rows, np.int64)
        if self.state.thorough and rows.num_rows:
            keys = [rows.column(name) for name in self.state.key]
            self.seen.add(hash64(keys, 1), hash64(keys, 2))
        newer = [one for one in self.touched if not chunk.visible.sees(one.xid)]
        for one in newer if self.state.thorough and not self.begun else ():
            self.seen.add(one.first, one.second)
        self.begun = True
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

    def gone(self) -> Iterator[pa.RecordBatch]:
        """The table has been read through: the rows that the log has, and the database has not."""
        if not self.state.key:
            yield from self.owed.rest()
        elif self.state.thorough:
            for some in self.seen.passes():
                for rows in self.scan():
                    yield some.missing(rows, self.state.key)

    def lacking(self) -> Iterator[pa.RecordBatch]:
        """Without a key, at the same time: the rows that the log has less often than never."""
        return iter(()) if self.state.key else self.owed.rest(-1)

    def finish(self) -> None:
        """What is gone is gone: the topic is what the table is."""
        self.state.status, self.state.thorough = LIVE, False
        self.view, self.owed = None, Owed(self.folder)
        self.touched, self.emptied, self.must_see = [], [], set()
        self.seen = Seen(self.log.path)

    def settle_pending(self, read: Sequence[Sequence[str]]) -> None:
        """Keys that a chunk was read for are done, but for those that changed meanwhile.

        Of these some are in the log by now: the stream has said the whole row.
        """
        left: list[Sequence[str]] = [*self.state.pending[len(read) :]]
        if self.touched:
            kinds = {one.name: (one.type, one.modifier) for one in self.info.columns}
            form = self._format([(name, *kinds[name]) for name in self.state.key])
            texts = zip(*read, strict=True)
            keys = [
                form.column(at, pa.array([text.encode() for text in column], pa.binary()))
                for at, column in enumerate(texts)
            ]
            again = np.isin(hash64(keys, 1), np.concatenate([one.first for one in self.touched]))
            again[self.lookup(keys)[0]] = False
            left += [one for one, wanted in zip(read, again, strict=True) if wanted]
        self.state.pending = [list(one) for one in dict.fromkeys(map(tuple, left))]


def key_texts(column: pa.Array) -> list[str]:
    """Values of a key as they stand in a query."""
    if pa.types.is_binary(column.type):
        return [rf"\x{one.hex()}" for one in column.to_pylist()]
    if pa.types.is_temporal(column.type):
        return [str(one) for one in printed(column)]
    found: list[str] = column.cast(pa.string()).to_pylist()
    return found


def _with_all(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    names = set(batch.schema.names)
    arrays = [
        batch.column(one.name) if one.name in names else pa.nulls(batch.num_rows, one.type)
        for one in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=schema)


_LETTERS = pa.array(["c" if number == ord("i") else chr(number) for number in range(128)])
_CREATED = bytes.maketrans(b"i", b"c")
_PLACES = np.arange(FEW + 1, dtype=np.int32).tobytes()
_STRING = pa.string()


def _letters(kinds: npt.NDArray[np.uint8]) -> pa.Array:
    """The operations, as Debezium names them: c, u, d."""
    if len(kinds) > FEW:
        return _LETTERS.take(pa.array(kinds))
    parts = [None, pa.py_buffer(_PLACES), pa.py_buffer(kinds.tobytes().translate(_CREATED))]
    return pa.Array.from_buffers(_STRING, len(kinds), parts)
