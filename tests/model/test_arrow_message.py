"""Messages made of plain bytes are Arrow's own. R-A1

The oracle is Arrow: the same rows, made and serialized by it. Caught: a wrong place of a number in
the metadata, wrong padding, nulls that are lost or made, another order of buffers. Not caught:
types that no `MessageForm` is made for (lists, structs, views).
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.arrow_message import MessageForm

TYPES = [
    pa.bool_(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.date32(),
    pa.timestamp("us", tz="UTC"), pa.decimal128(12, 2), pa.string(), pa.binary(),
]  # fmt: skip


def buffers_of(column: pa.Array) -> list[bytes]:
    """Of an array that is no slice: the bits only where something is null, nothing but values."""
    there, *rest = column.buffers()
    found = [b"" if one is None else one.to_pybytes() for one in rest]
    return [there.to_pybytes() if column.null_count and there is not None else b"", *found]


def value_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_string(kind):
        return st.text(max_size=20)
    if pa.types.is_binary(kind):
        return st.binary(max_size=20)
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_floating(kind):
        return st.floats(width=32 if kind.bit_width == 32 else 64, allow_nan=False)
    if pa.types.is_decimal(kind):
        return st.decimals(-9999, 9999, places=2)
    if pa.types.is_timestamp(kind):
        return st.integers(-(2**62), 2**62)
    return st.integers(-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1)


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    count = draw(st.integers(1, 16))
    kinds = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=14))
    arrays = []
    for kind in kinds:
        values = st.lists(st.none() | value_of(kind), min_size=count, max_size=count)
        arrays.append(pa.array(draw(values), kind))
    return pa.RecordBatch.from_arrays(arrays, [f"c{at}" for at in range(len(kinds))])


@given(batches())
def test_a_message_is_what_arrow_makes_of_the_rows(batch: pa.RecordBatch) -> None:
    form = MessageForm(batch.schema)
    for _ in range(2):  # the second is made of the same form
        made = form.message(batch.num_rows, [buffers_of(column) for column in batch.columns])
        assert made is not None
        found = made.batch()
        found.validate(full=True)
        assert found.equals(batch)
        assert [one.null_count for one in found.columns] == [
            one.null_count for one in batch.columns
        ]
        assert pa.record_batch(made).equals(batch)
        assert len(made.body) % 8 == 0


def test_a_value_that_must_be_there() -> None:
    form = MessageForm(pa.schema([pa.field("a", pa.int64(), nullable=False), ("b", pa.int64())]))
    seven = (7).to_bytes(8, "little")
    assert form.message(1, [[b"", seven], [b"\0", seven]]) is not None
    assert form.message(1, [[b"\0", seven], [b"", seven]]) is None
