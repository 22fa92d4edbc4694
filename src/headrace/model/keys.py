"""Canonical key bytes, and the partition they decide; this never changes, for any version.

The same key must go to the same partition whoever writes it, on every log, for ever. So a key is
first turned into bytes that depend on its value only, part by part, one after the other::

    null                    00
    boolean                 01  one byte, 00 or 01
    integers of all widths  02  8 bytes, two's complement
    float, double           03  8 bytes, IEEE 754 double; each NaN is 7ff8000000000000, -0.0 is 0.0
    decimal                 04  scale in 1 byte, unscaled value in 16 bytes two's complement, after
                                zeros at the end of the fraction are removed: 1.50 is 1.5, 7.00 is 7
    string                  05  length in 4 bytes, UTF-8
    binary                  06  length in 4 bytes, the bytes
    date                    07  8 bytes, days since 1970
    timestamp               08  8 bytes, microseconds since 1970, UTC
    timestamp_ntz           09  8 bytes, microseconds since 1970, local
    time                    0a  8 bytes, microseconds since midnight
    duration                0b  8 bytes, microseconds

All numbers are big-endian. A tag says how long its payload is, so the concatenation of several
parts is unambiguous, and widening an integer, a float or a decimal moves no key. The partition is
``(murmur2(bytes) & 0x7fffffff) % partitions``, with the murmur2 of Kafka's default partitioner.

The bytes are not in the order of the values: they are for hashing and for equality.

Whole arrays are hashed in numpy, a block of rows at a time so that everything stays in the
processor's cache; a handful of rows is quicker one by one. Both give the same bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import BadSchema
from headrace.model.ddl import DURATION, TIME, TIMESTAMP, TIMESTAMP_NTZ

TAG_NULL, TAG_BOOLEAN, TAG_INTEGER, TAG_DOUBLE, TAG_DECIMAL, TAG_STRING = 0, 1, 2, 3, 4, 5
TAG_BINARY, TAG_DATE, TAG_TIMESTAMP, TAG_TIMESTAMP_NTZ, TAG_TIME, TAG_DURATION = 6, 7, 8, 9, 10, 11

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]

_SEED = 0x9747B28C
_M = 0x5BD1E995
_MASK = 0xFFFFFFFF
# Arrays of no dimension, which is what numpy makes of a scalar at each use, in half the time of it.
_M32, _ROTATE, _SHIFT_13, _SHIFT_15, _NINE_BYTES, _POSITIVE = (
    np.array(value, np.uint32) for value in (_M, 24, 13, 15, (_SEED ^ 9) * _M & _MASK, 0x7FFFFFFF)
)
_SHIFT_8 = np.array(8, np.uint64)
_FEW = 12
"""Up to so many rows are hashed one by one."""
_BLOCK = 16_384
"""So many rows are hashed at a time."""
_STRAGGLERS = 4
"""Once only so many long rows are left, each is finished alone."""

_NAN = struct.pack(">Q", 0x7FF8000000000000)
_LONG = struct.Struct(">Bq")
_LENGTH = struct.Struct(">BI")
_DOUBLE = struct.Struct(">Bd")
_NULL = bytes([TAG_NULL])

_TAGS: dict[int, int] = {  # by the number of the Arrow type: a type itself is slow to look up
    pa.bool_().id: TAG_BOOLEAN,
    pa.int8().id: TAG_INTEGER,
    pa.int16().id: TAG_INTEGER,
    pa.int32().id: TAG_INTEGER,
    pa.int64().id: TAG_INTEGER,
    pa.float32().id: TAG_DOUBLE,
    pa.float64().id: TAG_DOUBLE,
    pa.decimal128(1, 0).id: TAG_DECIMAL,
    pa.string().id: TAG_STRING,
    pa.binary().id: TAG_BINARY,
    pa.date32().id: TAG_DATE,
}
_TIMES: dict[pa.DataType, int] = {
    TIMESTAMP: TAG_TIMESTAMP,
    TIMESTAMP_NTZ: TAG_TIMESTAMP_NTZ,
    TIME: TAG_TIME,
    DURATION: TAG_DURATION,
}
_VARIABLE = (TAG_STRING, TAG_BINARY)
_RAW = (TAG_DATE, TAG_TIMESTAMP, TAG_TIMESTAMP_NTZ, TAG_TIME, TAG_DURATION)


def key_tag(arrow: pa.DataType, column: str = "") -> int:
    """Give the tag of a type; raises `BadSchema` for types that cannot be part of a key."""
    tag = _TAGS.get(arrow.id)
    if tag is None:
        tag = _TIMES.get(arrow)
    if tag is not None:
        return tag
    raise BadSchema(
        f"type {arrow} cannot be part of a key",
        place=f"column '{column}'" if column else "",
        why="a key is compared and hashed by its value; nested values have no canonical bytes",
        fix="use columns of numbers, strings, bytes or times as the key",
        column=column,
    )


# --- one value ------------------------------------------------------------------------------------


def murmur2(data: bytes) -> int:
    """Hash as Kafka does; the result is unsigned, of 32 bits."""
    length = len(data)
    whole = length & ~3
    h = _murmur2_words(struct.unpack_from(f"<{whole >> 2}I", data), (_SEED ^ length) & _MASK)
    tail = data[whole:]
    if tail:
        h = ((h ^ int.from_bytes(tail, "little")) * _M) & _MASK
    h = ((h ^ (h >> 13)) * _M) & _MASK
    return h ^ (h >> 15)


def _murmur2_words(words: Sequence[int], h: int) -> int:
    for word in words:
        k = (word * _M) & _MASK
        k = ((k ^ (k >> 24)) * _M) & _MASK
        h = ((h * _M) & _MASK) ^ k
    return h


def _scalar_bytes(scalar: Any, tag: int) -> bytes:
    if not scalar.is_valid:
        return _NULL
    if tag == TAG_INTEGER:
        return _LONG.pack(tag, scalar.as_py())
    if tag == TAG_STRING:
        data: bytes = scalar.as_buffer().to_pybytes()
        return _LENGTH.pack(tag, len(data)) + data
    if tag in _RAW:
        return _LONG.pack(tag, scalar.value)
    value = scalar.as_py()
    if tag == TAG_BINARY:
        return _LENGTH.pack(tag, len(value)) + bytes(value)
    if tag == TAG_BOOLEAN:
        return bytes((tag, value))
    if tag == TAG_DOUBLE:
        if math.isnan(value):
            return bytes((tag,)) + _NAN
        return _DOUBLE.pack(tag, value + 0.0)
    return bytes((tag,)) + _decimal_payload(value)


def _decimal_payload(value: Decimal) -> bytes:
    sign, digits, exponent = value.as_tuple()
    unscaled = int("".join(map(str, digits)))
    scale = -int(exponent)
    while scale > 0 and unscaled % 10 == 0:
        unscaled //= 10
        scale -= 1
    if sign:
        unscaled = -unscaled
    return bytes((scale,)) + unscaled.to_bytes(16, "big", signed=True)


def partition_of(key: bytes, partitions: int) -> int:
    """Give the partition of one key, given its canonical bytes."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


# --- whole arrays ---------------------------------------------------------------------------------


def partitions_of(columns: Sequence[pa.Array], partitions: int) -> Words:
    """Give each row's partition from the key columns, which are arrays of equal length.

    Arrays may be slices and may hold nulls. Raises `BadSchema` for a type that cannot be a key.
    """
    rows = len(columns[0])
    if rows <= _FEW:
        tags = [key_tag(column.type) for column in columns]
        few = [partition_of(_row_bytes(columns, tags, i), partitions) for i in range(rows)]
        return np.array(few, np.uint32)
    hashes = murmur2_of(columns)
    hashes &= _POSITIVE
    hashes %= np.uint32(partitions)
    return hashes


def murmur2_of(columns: Sequence[pa.Array]) -> Words:
    """Give each row's hash: `murmur2` of the row's canonical bytes."""
    tags = [key_tag(column.type) for column in columns]
    rows = len(columns[0])
    if rows <= _BLOCK:
        return _hash_block(columns, tags)
    hashes = np.empty(rows, np.uint32)
    for start in range(0, rows, _BLOCK):
        block = [column.slice(start, _BLOCK) for column in columns]
        hashes[start : start + _BLOCK] = _hash_block(block, tags)
    return hashes


def key_bytes_of(columns: Sequence[pa.Array]) -> list[bytes]:
    """Give each row's canonical bytes; for tests and for small numbers of keys."""
    tags = [key_tag(column.type) for column in columns]
    return [_row_bytes(columns, tags, i) for i in range(len(columns[0]))]


def _row_bytes(columns: Sequence[pa.Array], tags: Sequence[int], row: int) -> bytes:
    if len(columns) == 1:
        return _scalar_bytes(columns[0][row], tags[0])
    return b"".join(
        _scalar_bytes(column[row], tag) for column, tag in zip(columns, tags, strict=True)
    )


def _hash_block(columns: Sequence[pa.Array], tags: Sequence[int]) -> Words:
    if any(column.null_count for column in columns) or any(tag in _VARIABLE for tag in tags):
        data, offsets = _join(columns, tags)
        return _hash_variable(data, offsets)
    if len(columns) == 1 and tags[0] in _EIGHT_BYTES:
        return _hash_eight(tags[0], _PAYLOADS[tags[0]](columns[0]))
    return _hash_fixed([_fixed(c, tag) for c, tag in zip(columns, tags, strict=True)])


def _hash_eight(tag: int, payload: Bytes) -> Words:
    """Hash rows of a tag and eight bytes, the most common key, without laying them out."""
    words = (payload.view("<u8").reshape(-1) << _SHIFT_8 | np.uint64(tag)).view("<u4")
    words *= _M32
    words ^= words >> _ROTATE
    words *= _M32
    h: Words = words[::2] ^ _NINE_BYTES
    h *= _M32
    h ^= words[1::2]
    h ^= payload[:, 7]
    h *= _M32
    return _finish(h)


def _hash_fixed(parts: list[Bytes]) -> Words:
    """Hash rows that all have the same length; each part holds its tag and payload."""
    width = sum(part.shape[1] for part in parts)
    padded = (width + 3) & ~3
    rows = np.zeros((len(parts[0]), padded), np.uint8)
    at = 0
    for part in parts:
        rows[:, at : at + part.shape[1]] = part
        at += part.shape[1]
    words = rows.view("<u4")
    h = np.full(len(rows), _SEED ^ width, np.uint32)
    for i in range(width >> 2):
        _mix(h, words[:, i].copy())
    if width & 3:
        h ^= words[:, -1]
        h *= _M32
    return _finish(h)


def _mix(h: Words, k: Words) -> None:
    """Take one word of each row into its hash; both arrays are overwritten."""
    k *= _M32
    k ^= k >> _ROTATE
    k *= _M32
    h *= _M32
    h ^= k


def _finish(h: Words) -> Words:
    h ^= h >> _SHIFT_13
    h *= _M32
    h ^= h >> _SHIFT_15
    return h


def _hash_variable(data: Bytes, offsets: npt.NDArray[np.int64]) -> Words:
    """Hash rows of any length, given their bytes one after the other (4 spare bytes at the end).

    Rows are taken in the order of their length, longest first, so that those which still have a
    word to give are always the first ones. The few that are much longer are finished alone.
    """
    starts, lengths = offsets[:-1], np.diff(offsets)
    order = None
    if lengths.min() != lengths.max():
        order = np.argsort(lengths >> 2, kind="stable")[::-1]
        starts, lengths = starts[order], lengths[order]
    # The word at every byte; reading it where it is not aligned is fine.
    words: Words = np.ndarray((len(data) - 3,), "<u4", data, 0, (1,))
    counts = lengths >> 2
    h = lengths.astype(np.uint32) ^ np.uint32(_SEED)
    ascending = counts[::-1]
    for i in range(int(counts[0])):
        active = len(counts) - int(np.searchsorted(ascending, i, "right"))
        if active <= _STRAGGLERS:
            for row in range(active):
                begin = int(starts[row])
                rest = words[begin + 4 * i : begin + 4 * int(counts[row]) : 4].tolist()
                h[row] = _murmur2_words(rest, int(h[row]))
            break
        _mix(h[:active], words[starts[:active] + 4 * i])
    left = lengths & 3
    tail = words[starts + (counts << 2)] & ((np.uint32(1) << (left << 3).astype(np.uint32)) - 1)
    h = np.where(left > 0, (h ^ tail) * np.uint32(_M), h)
    h = _finish(h)
    if order is None:
        return h
    result = np.empty_like(h)
    result[order] = h
    return result


def _join(columns: Sequence[pa.Array], tags: Sequence[int]) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """Give the canonical bytes of all rows, one after the other, and where each row begins."""
    pieces: list[pa.Array] = []
    for column, tag in zip(columns, tags, strict=True):
        if tag in _VARIABLE:
            pieces += _pieces_of_variable(column, tag)
        else:
            pieces.append(_piece(_fixed(column, tag), _valid(column)))
    joined = pc.binary_join_element_wise(*pieces, pa.scalar(b"", pa.large_binary()))
    _, offsets, data = joined.buffers()
    bounds = np.frombuffer(offsets, np.int64, len(joined) + 1)
    spare = np.zeros(int(bounds[-1]) + 4, np.uint8)
    spare[:-4] = np.frombuffer(data, np.uint8, int(bounds[-1]))
    return spare, bounds


def _pieces_of_variable(column: pa.Array, tag: int) -> list[pa.Array]:
    """Give tag and length, then the bytes, as two arrays."""
    valid = _valid(column)
    lengths = pc.binary_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    head = np.empty((len(column), 5), np.uint8)
    head[:, 0] = tag
    head[:, 1:] = _bytes_of(lengths.astype(">u4"), 4)
    large = column.cast(pa.binary()).cast(pa.large_binary())
    if valid is not None:
        large = large.fill_null(b"")
    return [_piece(head, valid), large]


def _piece(rows: Bytes, valid: npt.NDArray[np.bool_] | None) -> pa.Array:
    """Make an Arrow array of the rows of a matrix; null rows become the tag of null."""
    count, width = rows.shape
    if valid is None:
        offsets = np.arange(0, (count + 1) * width, width, dtype=np.int64)
        data = np.ascontiguousarray(rows)
    else:
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(np.where(valid, width, 1), out=offsets[1:])
        keep = np.repeat(valid[:, None], width, axis=1)
        keep[:, 0] = True
        rows[~valid, 0] = TAG_NULL
        data = rows[keep]
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_binary(), count, buffers)


def _valid(column: pa.Array) -> npt.NDArray[np.bool_] | None:
    if not column.null_count:
        return None
    valid: npt.NDArray[np.bool_] = column.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _bytes_of(values: npt.NDArray[Any], width: int) -> Bytes:
    return values.view(np.uint8).reshape(-1, width)


def _fixed(column: pa.Array, tag: int) -> Bytes:
    """Give tag and payload of each row as a matrix of bytes; rows that are null hold anything."""
    payload = _PAYLOADS[tag](column)
    rows = np.empty((len(column), payload.shape[1] + 1), np.uint8)
    rows[:, 0] = tag
    rows[:, 1:] = payload
    return rows


def _buffer(column: pa.Array, kind: str) -> npt.NDArray[Any]:
    """See the values of a fixed-width array without copying, nulls included."""
    size = np.dtype(kind).itemsize
    data = column.buffers()[1]
    if data is None:  # allowed where all is null
        return np.zeros(len(column), kind)
    return np.frombuffer(data, kind, len(column), column.offset * size)


def _boolean_payload(column: pa.Array) -> Bytes:
    filled = column.fill_null(False) if column.null_count else column
    return _bytes_of(filled.cast(pa.uint8()).to_numpy(zero_copy_only=False), 1)


def _integer_payload(column: pa.Array) -> Bytes:
    return _bytes_of(_buffer(column, f"<i{column.type.bit_width >> 3}").astype(">i8"), 8)


def _double_payload(column: pa.Array) -> Bytes:
    values = _buffer(column, f"<f{column.type.bit_width >> 3}").astype(np.float64)
    values += 0.0
    bits = values.view(np.uint64)
    bits[np.isnan(values)] = 0x7FF8000000000000
    return _bytes_of(bits.astype(">u8"), 8)


def _decimal_matrix(column: pa.Array) -> Bytes:
    """Remove the zeros at the end of the fraction, 128 bits as four limbs of 32."""
    count = len(column)
    pairs = _buffer_pairs(column)
    negative = (pairs[:, 1] >> np.uint64(63)).astype(bool)
    low = np.where(negative, ~pairs[:, 0] + np.uint64(1), pairs[:, 0])
    carry = (negative & (low == 0)).astype(np.uint64)
    high = np.where(negative, ~pairs[:, 1] + carry, pairs[:, 1])
    scale = np.full(count, column.type.scale, np.int64)
    scale[(low == 0) & (high == 0)] = 0
    active = np.flatnonzero(scale)
    while len(active):
        quotient_high, quotient_low, rest = _divide_by_ten(high[active], low[active])
        exact = rest == 0
        active = active[exact]
        high[active], low[active] = quotient_high[exact], quotient_low[exact]
        scale[active] -= 1
        active = active[scale[active] > 0]
    low = np.where(negative, ~low + np.uint64(1), low)
    carry = (negative & (low == 0)).astype(np.uint64)
    high = np.where(negative, ~high + carry, high)
    payload = np.empty((count, 17), np.uint8)
    payload[:, 0] = scale
    payload[:, 1:9] = _bytes_of(high.astype(">u8"), 8)
    payload[:, 9:] = _bytes_of(low.astype(">u8"), 8)
    return payload


def _buffer_pairs(column: pa.Array) -> npt.NDArray[np.uint64]:
    pairs = _bytes_of(_buffer(column, "V16"), 16).view("<u8")
    if column.null_count:  # what stands under a null is anything
        pairs = pairs * column.is_valid().to_numpy(zero_copy_only=False)[:, None]
    return pairs


def _divide_by_ten(
    high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Divide numbers of 128 bits by ten: quotient in two halves, and rest."""
    ten, half, mask = np.uint64(10), np.uint64(32), np.uint64(_MASK)
    quotient_high, rest = high // ten, high % ten
    upper = (rest << half) | (low >> half)
    lower = ((upper % ten) << half) | (low & mask)
    return quotient_high, ((upper // ten) << half) | (lower // ten), lower % ten


def _long_payload(column: pa.Array) -> Bytes:
    return _bytes_of(_buffer(column, "<i8").astype(">i8"), 8)


_PAYLOADS: dict[int, Callable[[pa.Array], Bytes]] = {
    TAG_BOOLEAN: _boolean_payload,
    TAG_INTEGER: _integer_payload,
    TAG_DOUBLE: _double_payload,
    TAG_DECIMAL: _decimal_matrix,
    TAG_DATE: _integer_payload,
    TAG_TIMESTAMP: _long_payload,
    TAG_TIMESTAMP_NTZ: _long_payload,
    TAG_TIME: _long_payload,
    TAG_DURATION: _long_payload,
}
_EIGHT_BYTES = frozenset(_PAYLOADS) - {TAG_BOOLEAN, TAG_DECIMAL}
