"""Rows of the stream as operations on a topic's columns: raw text by column in, Arrow out. Pure.

Runs of one table alternate between insert, update and delete. They are gathered by kind, so that
each kind is read and each column converted once for the whole group, and then put back in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.sources.complete import DELETE, INSERT, UPDATE, Operations
from headrace.sources.postgres.protocol import OLD, RawColumns, Rows, Texts, join
from headrace.sources.postgres.values import (
    FewReader,
    PgType,
    Reader,
    array_of,
    arrow_type,
    few_reader,
    reader,
)

KINDS = {"i": INSERT, "u": UPDATE, "d": DELETE}
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Format:
    """How the columns of a relation become those of its topic."""

    schema: pa.Schema
    """The topic's columns that the relation has."""
    places: tuple[int, ...]
    """Where the relation has each of them."""
    types: tuple[tuple[PgType, int], ...]
    """Type and modifier of each."""
    key: tuple[str, ...]
    numeric_as_text: bool = False
    gives: bool = True
    """Whether old rows are whole where the stream says so."""

    def column(self, at: int, texts: Texts) -> pa.Array:
        """The values that the server has printed so."""
        read, wanted = self._readers[at]
        found = read(texts)
        return found if found.type == wanted else found.cast(wanted)

    def few(self, at: int, texts: Texts) -> list[bytes] | None:
        """The buffers of a few values (`model.arrow_message`); None: they are not so simple."""
        read = self._few_readers[at]
        return None if read is None else read(texts)

    @cached_property
    def names(self) -> list[str]:
        """Of the schema."""
        found: list[str] = self.schema.names
        return found

    @cached_property
    def _readers(self) -> list[tuple[Reader, pa.DataType]]:
        return [
            (reader(kind, arrow, field.name), field.type)
            for field, kind, arrow in zip(self.schema, self._kinds, self._arrow, strict=True)
        ]

    @cached_property
    def _few_readers(self) -> list[FewReader | None]:
        return [
            few_reader(kind, arrow) if arrow == field.type else None
            for field, kind, arrow in zip(self.schema, self._kinds, self._arrow, strict=True)
        ]

    @property
    def _kinds(self) -> list[PgType]:
        return [kind for kind, _ in self.types]

    @property
    def _arrow(self) -> list[pa.DataType]:
        """What the texts become."""
        return [
            arrow_type(kind, modifier, column=name, numeric_as_text=self.numeric_as_text)
            for name, (kind, modifier) in zip(self.names, self.types, strict=True)
        ]


def format_of(
    columns: Sequence[tuple[str, PgType | None, int]],
    topic: pa.Schema,
    key: Sequence[str],
    *,
    numeric_as_text: bool = False,
    gives: bool = True,
) -> Format:
    """How to read rows of these columns (name, type, modifier) into a topic."""
    known = [(at, *one) for at, one in enumerate(columns) if one[0] in topic.names]
    return Format(
        pa.schema([topic.field(name).with_nullable(True) for _, name, _, _ in known]),
        tuple(at for at, _, _, _ in known),
        tuple((kind, modifier) for _, _, kind, modifier in known if kind is not None),
        tuple(key),
        numeric_as_text,
        gives,
    )


def operations(runs: Sequence[Rows], form: Format) -> Operations:
    """The operations of runs of one relation, in order."""
    by_kind: dict[str, list[Rows]] = {}
    for run in runs:
        by_kind.setdefault(run.op, []).append(run)
    joined = [join(same) if len(same) > 1 else same[0] for same in by_kind.values()]
    raw = joined[0].new
    if by_kind.keys() == {"i"} and raw and all(mask is None for mask in raw.unchanged):
        columns = [form.column(at, raw.values[place]) for at, place in enumerate(form.places)]
        new = pa.RecordBatch.from_arrays(columns, schema=form.schema)
        inserts = np.full(len(joined[0]), INSERT, np.uint8)
        return Operations(inserts, new, [new.column(name) for name in form.key], {})
    order: pa.Array | None = None
    if len(joined) > 1:
        codes = np.frombuffer("".join([run.op for run in runs]).encode(), np.uint8)
        of_row = np.repeat(codes, [len(run) for run in runs])
        place = np.concatenate([np.flatnonzero(of_row == ord(op)) for op in by_kind])
        order = pa.array(np.argsort(place))
    news = [
        form.column(at, _ordered([_texts(run.new, place, len(run)) for run in joined], order))
        for at, place in enumerate(form.places)
    ]
    keys = [form.schema.get_field_index(name) for name in form.key]
    read = [
        form.column(at, _ordered([_read_texts(run, form.places[at]) for run in joined], order))
        for at in keys
    ]
    kinds = np.concatenate([np.full(len(run), KINDS[run.op], np.uint8) for run in joined])
    given, given_at = _given(joined, form, order)
    left_out = {
        form.schema.names[at]: mask
        for at, place in enumerate(form.places)
        if (mask := _left_out(joined, place, order)) is not None
    }
    return Operations(
        kinds if order is None else kinds[order.to_numpy()],
        pa.RecordBatch.from_arrays(news, schema=form.schema),
        read,
        left_out,
        given,
        given_at,
    )


def _ordered(parts: list[Texts], order: pa.Array | None) -> Texts:
    if len(parts) == 1 and order is None:
        return parts[0]
    whole = pa.concat_arrays([array_of(one) for one in parts])
    return whole if order is None else whole.take(order)


def _texts(raw: RawColumns | None, at: int, rows: int) -> Texts:
    return [None] * rows if raw is None else raw.values[at]


def _read_texts(run: Rows, at: int) -> Texts:
    """The key of the row that was there: as the database says, else that of the new row."""
    old, kinds, new = run.old, run.old_kind, run.new
    if run.op == "i" or (old is None and new is None):
        return [None] * len(run)
    if old is None or kinds is None:
        assert new is not None
        return new.values[at]
    if new is None or kinds.all():
        return old.values[at]
    both = pa.concat_arrays([array_of(old.values[at]), array_of(new.values[at])])
    rows = np.arange(len(run))
    return both.take(pa.array(np.where(kinds != 0, rows, rows + len(run))))


def _given(
    joined: Sequence[Rows], form: Format, order: pa.Array | None
) -> tuple[pa.RecordBatch | None, Numbers | None]:
    """Old rows that the database gave whole."""
    at, end = [], 0
    chosen: list[tuple[Rows, pa.Array]] = []
    for run in joined:
        places = np.full(len(run), -1)
        if run.op != "i" and run.old_kind is not None and form.gives:
            whole = np.flatnonzero(run.old_kind == OLD)
            places[whole] = np.arange(end, end + len(whole))
            end += len(whole)
            chosen.append((run, pa.array(whole)))
        at.append(places)
    if not end:
        return None, None
    columns = [
        form.column(
            number,
            pa.concat_arrays(
                [array_of(run.old.values[at]).take(rows) for run, rows in chosen if run.old]
            ),
        )
        for number, at in enumerate(form.places)
    ]
    found = np.concatenate(at)
    batch = pa.RecordBatch.from_arrays(columns, schema=form.schema)
    return batch, found if order is None else found[order.to_numpy()]


def _left_out(
    joined: Sequence[Rows], at: int, order: pa.Array | None
) -> npt.NDArray[np.bool_] | None:
    masks = [run.new.unchanged[at] if run.new is not None else None for run in joined]
    if all(mask is None for mask in masks):
        return None
    whole = np.concatenate(
        [
            np.zeros(len(run), bool) if mask is None else mask
            for mask, run in zip(masks, joined, strict=True)
        ]
    )
    return whole if order is None else whole[order.to_numpy()]
