"""What a topic says of a table: its columns, its changes added up, its rows at a cut.

**Added up.** The rows that a cut brings for one key become one: what the newest entry that says
anything of the key says of it, by the rules of tables (`tables.keyed`): old and new cancel, what is
there counts over what is gone. So a cut of a thousand entries and a thousand cuts of one entry end
in the same table. Rows of a topic without a key are a multiset: weights of equal rows are added up.
A follower that is behind has each key many times, so this is what its speed depends on: keys are
numbered by a hash table, and of nearly all of them the last row says everything.

**Row ids.** A row of a multiset is known by 16 bytes, two hashes of all its columns with fixed
seeds. They are stored in targets: the hash may not change.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from headrace.interfaces import Cut, Kept, KeptTable
from headrace.log.embedded.log import EmbeddedLog
from headrace.model.hashing import hash64, is_bytes
from headrace.model.schema import RESERVED
from headrace.model.topic import Topic
from headrace.tables.keyed import what_is_left
from headrace.tables.runs import Words, differs, sorted_order, take_rows

Numbers = npt.NDArray[np.int64]
WEIGHT = "_weight"
ROW_ID = pa.binary(16)
CHUNK_ROWS = 200_000
MANY = 1 << 40
"""More copies than any row has."""
_SEEDS = (0x5EED_0001, 0x5EED_0002)


def kept_table(topic: Topic, name: str, *, view: bool) -> KeptTable:
    """The table of a topic, in its newest schema version."""
    columns = tuple(one for one in topic.schema.live if one.name not in RESERVED)
    opaque = topic.value != "columns"
    return KeptTable(name, topic.name, columns, topic.key, topic.schema.generation, view, opaque)


def kept_tables(log: EmbeddedLog, kept: Kept) -> list[KeptTable]:
    """The tables that a follower keeps; `UnknownTopic` if one has no topic yet."""
    return [
        kept_table(log.topic(topic), name, view=topic in kept.views)
        for name, topic in kept.topics.items()
    ]


def row_ids(rows: pa.RecordBatch) -> pa.Array:
    """What rows of a multiset are known by; `rows` has exactly the table's columns."""
    words = np.stack([hash64(rows.columns, seed) for seed in _SEEDS], axis=1).astype(">u8")
    return pa.Array.from_buffers(ROW_ID, rows.num_rows, [None, pa.py_buffer(words.tobytes())])


def added_up(table: KeptTable, rows: pa.RecordBatch, positions: Numbers) -> pa.RecordBatch:
    """The change that these rows of the topic are, in log order, with the position of each."""
    names = table.schema.names
    has = rows.schema.names
    own = rows.select(names)
    weight = rows.column(WEIGHT).to_numpy() if WEIGHT in has else np.ones(rows.num_rows, np.int64)
    if not table.key:
        words = [hash64(own.columns, seed) for seed in _SEEDS]
        order, starts = _groups(words)
        sums = np.add.reduceat(weight[order], starts) if len(starts) else weight
        left = np.flatnonzero(sums)
        return _weighted(take_rows(own, order[starts[left]]), sums[left])
    code, count = _numbered([own.column(name) for name in table.key])
    newest = np.empty(count, np.int64)
    newest[code] = np.arange(rows.num_rows)  # of several the last one stays
    if WEIGHT in has:
        told = np.flatnonzero(positions == positions[newest][code])
        picked, there = _what_counts(rows, weight, code, newest, told)
        if len(picked) < count:  # these need their older entries too
            done = np.zeros(count, bool)
            done[code[picked]] = True
            rest = np.flatnonzero(~done[code])
            entries = [code[rest].astype(np.uint64), ~positions[rest].astype(np.uint64)]
            some, stay = what_is_left(take_rows(rows, rest), entries, _SEEDS[0])
            fresh = np.ones(len(some), bool)
            fresh[1:] = differs([entries[0][some]])
            picked = np.concatenate([picked, rest[some[fresh]]])
            there = np.concatenate([there, stay[fresh]])
        return _weighted(take_rows(own, picked), np.where(there, 1, -1))
    gone = np.zeros(rows.num_rows, bool)
    if table.opaque:
        gone = rows.column("value").is_null().to_numpy(zero_copy_only=False)
    elif "_op" in has:
        gone = pc.equal(rows.column("_op"), "d").fill_null(False).to_numpy(zero_copy_only=False)
    return _weighted(take_rows(own, newest), np.where(gone[newest], -1, 1))


def _numbered(key: list[pa.Array]) -> tuple[Numbers, int]:
    """A small number for each key, in the order in which they come, and how many there are.

    By one hash, in which integers cannot collide; where others do, by two of them and a sort.
    """
    first = hash64(key, _SEEDS[0])
    encoded = pa.array(first).dictionary_encode()
    code, count = encoded.indices.to_numpy(), len(encoded.dictionary)
    if len(key) == 1 and pt.is_integer(key[0].type) and not key[0].null_count:
        return code, count
    second = hash64(key, _SEEDS[1])
    of_code = np.empty(count, np.uint64)
    of_code[code] = second
    if (of_code[code] == second).all():
        return code, count
    order, starts = _groups([first, second])
    code = np.empty(len(order), np.int64)
    code[order] = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(order)))
    return code, len(starts)


def _what_counts(
    rows: pa.RecordBatch, weight: Numbers, code: Numbers, newest: Numbers, told: Numbers
) -> tuple[Numbers, npt.NDArray[np.bool_]]:
    """For each key the row that counts in its newest entry, and whether it is there, or gone.

    `told`: the rows of these entries. Keys are left out of which it takes more to say: several rows
    come and go at once, or one that came also went.
    """
    came, went = told[weight[told] > 0], told[weight[told] <= 0]
    gains, losses = (np.bincount(code[some], minlength=len(newest)) for some in (came, went))
    newest[code[came]] = came  # what is there counts over what is gone
    before = newest.copy()
    before[code[went]] = went
    hard = (gains > 0) & (losses > 0)
    same = np.flatnonzero((gains == 1) & (losses == 1))
    hard[same] = False
    for column in sorted(_own(rows), key=lambda one: is_bytes(one.type) or pt.is_nested(one.type)):
        if not len(same):
            break
        new, old = (hash64([column.take(pa.array(at[same]))]) for at in (newest, before))
        same = same[new == old]
    hard[same] = True
    hard[code[np.abs(weight) != 1]] = True
    easy = np.flatnonzero(~hard)
    return newest[easy], gains[easy] > 0


def _own(rows: pa.RecordBatch) -> list[pa.Array]:
    """The columns that are not Headrace's."""
    return [rows.column(name) for name in rows.schema.names if name[:1] != "_"]


def _groups(keys: list[Words]) -> tuple[Numbers, Numbers]:
    """Rows in order, and where each group of equal keys begins in it."""
    rows = len(keys[0])
    order = sorted_order(keys)
    if order is None:
        order = np.arange(rows)
    fresh = np.ones(rows, bool)
    fresh[1:] = differs([word[order] for word in keys])
    return order, np.flatnonzero(fresh)


def _weighted(rows: pa.RecordBatch, weight: Numbers) -> pa.RecordBatch:
    named = pa.field(WEIGHT, pa.int64(), nullable=False)
    plain = pa.schema([*(pa.field(one.name, one.type) for one in rows.schema), named])
    return pa.RecordBatch.from_arrays([*rows.columns, pa.array(weight, pa.int64())], schema=plain)


# --- at a cut -------------------------------------------------------------------------------------


def loading(log: EmbeddedLog, table: KeptTable, cut: Cut) -> Iterator[pa.RecordBatch]:
    """All rows at a cut, as changes to an empty table, in bounded memory.

    Rows of other generations of the topic do not count; where the topic has a key, it is
    `BadPosition` if the cut is in an older one.
    """
    at = table.at(cut)
    if not table.key:
        schemas = log.topic(table.topic).schemas
        for batch in log.read(table.topic, through=at):
            if schemas[batch.schema_version - 1].generation == table.generation:
                yield added_up(table, batch.data, batch.positions.to_numpy())
        return
    for batch in log.table(table.topic).scan(at=at, columns=table.schema.names):
        yield _weighted(batch.select(table.schema.names), np.ones(batch.num_rows, np.int64))


def expected(log: EmbeddedLog, table: KeptTable, cut: Cut) -> Iterator[pa.RecordBatch]:
    """The rows that a target must hold at a cut, as `Target.read` gives them.

    A multiset is added up in memory; all else is read in bounded memory.
    """
    if table.key:
        for batch in loading(log, table, cut):
            yield batch.select(table.schema.names)
        return
    parts = list(loading(log, table, cut))
    if not parts:
        return
    rows = added_up(table, pa.concat_batches(parts), np.zeros(sum(map(len, parts)), np.int64))
    own = rows.select(table.schema.names)
    order = np.lexsort([hash64(own.columns, seed) for seed in reversed(_SEEDS)])
    copies = np.maximum(rows.column(WEIGHT).to_numpy(), 0)[order]
    yield take_rows(own, np.repeat(order, copies))


def current(log: EmbeddedLog, table: KeptTable, keys: pa.Table, cut: Cut) -> pa.RecordBatch:
    """The change that makes these keys what they are at a cut: their row, or gone.

    `keys` has the key columns. For a multiset: `_row`; the change is then to none of its copies.
    """
    if not table.key:
        wanted = keys.column("_row").combine_chunks()
        rows = pa.Table.from_batches(expected(log, table, cut), schema=table.schema)
        batch = rows.combine_chunks().to_batches()[0] if rows.num_rows else None
        if batch is None:
            return _weighted(pa.RecordBatch.from_pylist([], table.schema), np.zeros(0, np.int64))
        found = batch.filter(pc.is_in(row_ids(batch), wanted.cast(ROW_ID)))
        return added_up(
            table, _weighted(found, np.ones(len(found), np.int64)), np.zeros(len(found), np.int64)
        )
    found = log.table(table.topic).get(keys, at=table.at(cut), columns=table.schema.names)
    there = found.select(table.schema.names).combine_chunks().to_batches()
    parts = [_weighted(one, np.ones(one.num_rows, np.int64)) for one in there]
    missing = np.setdiff1d(np.arange(keys.num_rows), found.column("_index").to_numpy())
    lost = keys.take(pa.array(missing)).combine_chunks()
    arrays = [
        lost.column(one.name).combine_chunks().cast(one.type)
        if one.name in table.key
        else pa.nulls(len(missing), one.type)
        for one in table.schema
    ]
    gone = pa.RecordBatch.from_arrays(arrays, schema=table.schema)
    return pa.concat_batches([*parts, _weighted(gone, np.full(len(missing), -1))])
