"""`log.table(topic)`: a topic read by key, at any position.

`get` and `scan` read the index of the topic (`upkeep`), which is first brought up to the position
asked for. What the words of its rows are, and which version of a key counts: `keyed`.

Rows are those of the newest schema version; a new version builds the index anew. A new generation
of the schema begins an empty table: below it a position cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow.compute import sort_indices

from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.system import System
from headrace.model.topic import Topic
from headrace.model.values import Refusal, from_values
from headrace.tables.keyed import GONE, POSITION, key_words, probed
from headrace.tables.packs import Piece
from headrace.tables.runs import differs, identity, take_rows
from headrace.tables.upkeep import Index, State

INDEX = "_index"
FEW = 200
"""Up to so many keys are looked up one by one; more are looked up all at once."""


class Table:
    """The rows of a topic by key. Threads may share it."""

    def __init__(self, log: EmbeddedLog, system: System, name: str) -> None:
        """Made by `log.table(name)`."""
        topic = log.topic(name)
        if not topic.key:
            raise errors.NotATable(f"topic '{name}' has no key", place=f"topic '{name}'")
        self.name = name
        self.index = Index(log, system, topic)
        self._log = log

    def __repr__(self) -> str:
        """The topic."""
        return f"<headrace table {self.name}>"

    # -- reading ----------------------------------------------------------------------------

    def get(
        self,
        keys: Any,
        *,
        at: int | None = None,
        columns: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> pa.Table:
        """The rows of these keys as they are at a position (by default the newest), in this order.

        `keys`: values, or for a key of several columns tuples or dicts; or an Arrow array or table.
        Two columns come on top: `_position`, where the row was written, and `_index`, which of the
        keys it is: a key whose index does not come up is not there. `at` above the newest position
        waits for it, `timeout` seconds at most.
        """
        position = self._position(at, timeout)
        tries = 0
        while True:
            state = self.index.at(position)
            try:
                return self._get(state, keys, position, columns)
            except errors.PackDamaged:
                tries += 1
                if tries > 2:
                    raise
                self.index.distrust(state, build_anew=tries == 2)

    def scan(
        self,
        *,
        at: int | None = None,
        columns: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> pa.RecordBatchReader:
        """All rows as they are at a position, in the order of their keys, a few at a time."""
        position = self._position(at, timeout)
        state = self.index.at(position)
        schema = _result_schema(state.topic, columns)
        return pa.RecordBatchReader.from_batches(schema, self._scan(state, position, schema))

    def _position(self, at: int | None, timeout: float | None) -> int:
        newest = self.index.newest()
        if at is None:
            return newest
        since = self._log.since_of(self.name)
        if type(at) is not int or at < since:
            raise errors.BadPosition(
                f"table '{self.name}' cannot be read at {at!r}",
                place=f"topic '{self.name}'",
                why=f"it is whole from position {since} to {newest}",
            )
        return at if at <= newest else min(at, self._log.wait(at, timeout))

    def _get(
        self, state: State, keys: Any, position: int, columns: Sequence[str] | None
    ) -> pa.Table:
        topic = state.topic
        schema = _result_schema(topic, columns).append(pa.field(INDEX, pa.int64(), nullable=False))
        words = key_words(_key_columns(topic, keys), self.index.seed)
        count = len(words[0])
        if not count:
            return schema.empty_table()
        if count > FEW:
            there, found = probed(state.collection, words, position)
            live = np.flatnonzero(~_gone(found))
            return self._held(take_rows(found, live), schema, {INDEX: pa.array(there[live])})
        newest = (~position & 0xFFFF_FFFF_FFFF_FFFF, 0)
        asked = [(*one, *newest) for one in zip(*(w.tolist() for w in words), strict=True)]
        firsts = np.stack([words[0], words[0] + np.uint64(1)], axis=1)
        best: dict[int, tuple[tuple[int, ...], Piece, int]] = {}
        for run in state.collection.runs:
            for which, row, piece, place in run.seek(self.index.packs, asked, firsts):
                if row[:-2] == asked[which][:-2] and (which not in best or row < best[which][0]):
                    best[which] = row, piece, place
        there = np.array(sorted(best), np.int64)
        if not len(there):
            return schema.empty_table()
        found = pa.concat_batches([best[i][1].batch.slice(best[i][2], 1) for i in there.tolist()])
        live = np.flatnonzero(~_gone(found))
        return self._held(take_rows(found, live), schema, {INDEX: pa.array(there[live])})

    def _held(
        self, batch: pa.RecordBatch, schema: pa.Schema, extra: Mapping[str, pa.Array]
    ) -> pa.Table:
        rows = _result(batch, schema, extra, self._log.gone_of(self.name))
        return pa.Table.from_batches([rows], schema)

    def _scan(self, state: State, position: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        start: tuple[int, ...] = (0,)
        tries, gone = 0, self._log.gone_of(self.name)
        while True:
            try:
                for batch, following in ordered(state, position, start):
                    start, tries = following, 0
                    yield _result(batch, schema, {}, gone)
            except errors.PackDamaged:
                tries += 1
                if tries > 2:
                    raise
                self.index.distrust(state, build_anew=tries == 2)
                state = self.index.at(position)
            else:
                return


def _key_columns(topic: Topic, keys: Any) -> list[pa.Array]:
    """The keys asked for, as columns of the topic's types."""
    names, types = topic.key, [topic.schema.column(name).type for name in topic.key]
    if isinstance(keys, pa.Table | pa.RecordBatch):
        given: list[Any] = [keys.column(name) for name in names]
    elif isinstance(keys, pa.Array | pa.ChunkedArray):
        given = [keys]
    else:
        rows = [_one_key(names, key) for key in keys]
        given = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in names]
    if len(given) != len(names):
        raise _wrong_key(names, f"{len(given)} columns")
    result = []
    for name, values, kind in zip(names, given, types, strict=True):
        try:
            if isinstance(values, list):
                result.append(from_values(values, kind))
            else:
                whole = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
                result.append(whole.cast(kind))
        except Refusal as refusal:
            raise errors.WrongType(
                refusal.fact, place=f"column '{name}'", why=refusal.why, fix=refusal.fix
            ) from refusal
        except pa.ArrowInvalid as error:
            raise errors.WrongType(str(error), place=f"column '{name}'") from error
    return result


def _one_key(names: Sequence[str], key: Any) -> tuple[Any, ...]:
    if isinstance(key, Mapping):
        if set(key) != set(names):
            raise _wrong_key(names, f"the columns {', '.join(map(str, key))}")
        return tuple(key[name] for name in names)
    if len(names) == 1:
        return tuple(key) if isinstance(key, tuple) and len(key) == 1 else (key,)
    if not isinstance(key, tuple | list) or len(key) != len(names):
        raise _wrong_key(names, repr(key))
    return tuple(key)


def _wrong_key(names: Sequence[str], given: str) -> errors.WrongType:
    return errors.WrongType(
        f"a key has the columns {', '.join(names)}, given: {given}",
        fix="give each key as a tuple or a dict of these columns",
    )


def _result_schema(topic: Topic, columns: Sequence[str] | None) -> pa.Schema:
    names = [name for name in topic.schema.arrow.names if not name.startswith("_")]
    fields = [topic.schema.column(name) for name in (names if columns is None else columns)]
    return pa.schema(
        [
            *(pa.field(field.name, field.type, nullable=field.nullable) for field in fields),
            pa.field(POSITION, pa.int64(), nullable=False),
        ]
    )


def _result(
    batch: pa.RecordBatch, schema: pa.Schema, extra: Mapping[str, pa.Array], gone: int
) -> pa.RecordBatch:
    """Rows of a table as the caller sees them: not those that retention took since."""
    positions = (~identity(batch)[-2]).view(np.int64)
    own = {POSITION: pa.array(positions), **extra}
    arrays = [own[name] if name in own else batch.column(name) for name in schema.names]
    made = pa.RecordBatch.from_arrays(arrays, schema=schema)
    return made.filter(pa.array(positions > gone)) if gone else made


def _gone(batch: pa.RecordBatch) -> np.ndarray[Any, np.dtype[np.bool_]]:
    gone: np.ndarray[Any, np.dtype[np.bool_]] = batch.column(GONE).to_numpy(zero_copy_only=False)
    return gone


def ordered(
    state: State, position: int, start: tuple[int, ...]
) -> Iterator[tuple[pa.RecordBatch, tuple[int, ...]]]:
    """The rows at a position in the order of keys; with each batch, where the next one begins."""
    held: list[pa.RecordBatch] = []
    chosen: tuple[int, ...] = ()
    for batch in state.collection.between(start, None):
        words = identity(batch)
        visible = np.flatnonzero(words[-2] >= np.uint64(~position & 0xFFFF_FFFF_FFFF_FFFF))
        keys = [word[visible] for word in words[:-2]]
        if not len(visible):
            continue
        first = np.concatenate(([True], differs(keys)))
        first[0] = tuple(int(key[0]) for key in keys) != chosen
        chosen = tuple(int(key[-1]) for key in keys)
        held.append(take_rows(batch, visible[first]))
        joined = pa.concat_batches(held) if len(held) > 1 else held[0]
        order = identity(joined)[:-3]
        # The last group of equal order words may go on in the next batch.
        changes = np.flatnonzero(differs(order))
        cut = int(changes[-1]) + 1 if len(changes) else 0
        held = [joined.slice(cut)]
        if cut:
            yield (
                _put_in_order(joined.slice(0, cut), state.topic.key),
                tuple(int(word[cut]) for word in order),
            )
    if held and held[0].num_rows:
        yield _put_in_order(pa.concat_batches(held), state.topic.key), start


def _put_in_order(batch: pa.RecordBatch, key: Sequence[str]) -> pa.RecordBatch:
    """Rows that are not gone; groups of equal order words in the order of the key columns."""
    fresh = np.concatenate(([True], differs(identity(batch)[:-3])))
    tied = ~fresh
    tied[:-1] |= ~fresh[1:]
    order = np.arange(batch.num_rows)
    if tied.any():
        places = np.flatnonzero(tied)
        rows = take_rows(batch, places).select(list(key))
        rows = rows.append_column(GONE, pa.array(np.cumsum(fresh)[places]))
        by = [(name, "ascending", "at_start") for name in (GONE, *key)]
        order[places] = places[sort_indices(rows, by).to_numpy()]
    return take_rows(batch, order[~_gone(batch)[order]])
