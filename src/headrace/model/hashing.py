"""Hashes and order words of whole columns: 64 bits a row, in numpy.

`hash64` names a row by 64 bits. It is part of what lies on disk, so it never changes: it is written
here in full and borrowed from no library. A column becomes one word a row, and the words of a row
are folded with a bijective mixer (that of splitmix64)::

    word  = the bits of a number, a date, a time   (nan: one nan; -0.0: 0.0)
          = fold(8-byte words of a string, its length)
          = fold(words of the items of a list, how many); a map is a list of entries
          = the hash of a struct's fields; a secret of the seed for null
    hash  = mix(mix(seed ^ word of column 0) ^ word of column 1) ...
    fold  = mix(length + sum over i of mix(word i ^ mix(seed + i)))

The sum makes strings and lists of any length one vectorised pass over all their words: no loop over
positions (which one long value would make long for all), no sorting by length. As the mixer is a
bijection, two different numbers in one column of at most 64 bits never collide; otherwise the
chance is 2^-64 a pair, and the seed of a state is random, so that nobody can prepare collisions.
Whoever joins by hash still compares the key columns; a row is known by two hashes, 128 bits.

`order64` gives words in the order in which Spark sorts: null first, nan last, strings by their
bytes. Rejected: Spark's xxhash64 (a trip to the JVM), xxhash per value (150 ns a row against 5 to
30), sorting by the values themselves (slow, and impossible for a numpy search on composite keys).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

Words = npt.NDArray[np.uint64]

BLOCK = 32_768
"""Rows hashed at a time: everything stays in the processor's cache."""
SAMPLE = 256
"""Rows looked at to tell whether the values of a column repeat."""
_MASK = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN, _M1, _M2 = 0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB
_NAN = 0x7FF8_0000_0000_0000
_TOP = np.uint64(1 << 63)
_ONE = np.uint64(1)


def hash64(columns: Sequence[pa.Array], seed: int = 0) -> Words:
    """Give each row's hash over all columns, which have one length; any Arrow type of a topic."""
    rows = len(columns[0]) if columns else 0
    result = np.empty(rows, np.uint64)
    for start in range(0, rows, BLOCK):
        result[start : start + BLOCK] = _hash([c.slice(start, BLOCK) for c in columns], seed)
    return result


def _hash(columns: Sequence[pa.Array], seed: int) -> Words:
    hashes: Words | None = None
    for column in columns:
        words = _words(column, seed)
        if hashes is None:
            hashes = words ^ np.uint64(_mixed(seed))
        else:
            hashes ^= words
        _mix(hashes)
    assert hashes is not None
    return hashes


def _mixed(value: int) -> int:
    """The mixer, for one integer."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _M1) & _MASK
    value = ((value ^ (value >> 27)) * _M2) & _MASK
    return value ^ (value >> 31)


def _mix(words: Words) -> None:
    """The mixer, in place."""
    words += np.uint64(_GOLDEN)
    words ^= words >> np.uint64(30)
    words *= np.uint64(_M1)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_M2)
    words ^= words >> np.uint64(31)


def _fold(words: Words, bounds: npt.NDArray[np.int64], seed: int) -> Words:
    """One word for each range of `words`; overwrites them."""
    lengths = np.diff(bounds)
    first = int(bounds[0])
    places = np.arange(first, int(bounds[-1]), dtype=np.int64)
    places -= np.repeat(bounds[:-1], lengths)
    most = int(lengths.max(initial=0))
    salts = np.arange(most, dtype=np.uint64) + np.uint64(seed)
    _mix(salts)
    words ^= salts[places]
    _mix(words)
    sums = np.zeros(len(words) + 1, np.uint64)
    np.cumsum(words, out=sums[1:])
    folded: Words = sums[bounds[1:] - first] - sums[bounds[:-1] - first]
    folded += lengths.astype(np.uint64)
    _mix(folded)
    return folded


def _words(column: pa.Array, seed: int) -> Words:
    """One word a row: a function of the value alone, whatever the buffers look like."""
    kind = column.type
    if is_bytes(kind) and repeats(column):  # 4x as fast as word by word
        column = column.dictionary_encode()
        kind = column.type
    if pt.is_null(kind) or (pt.is_dictionary(kind) and not len(column.dictionary)):
        return np.full(len(column), _mixed(~seed & _MASK), np.uint64)
    if pt.is_dictionary(kind):
        indices: npt.NDArray[np.int32] = column.indices.fill_null(0).to_numpy(zero_copy_only=False)
        words = _words(column.dictionary, seed).take(indices)
    elif is_bytes(kind):
        words = _string_words(column, seed)
    elif pt.is_struct(kind):
        fields = column.flatten()
        words = _hash(fields, seed) if fields else np.zeros(len(column), np.uint64)
    elif pt.is_list(kind) or pt.is_large_list(kind) or pt.is_map(kind):
        bounds = column.offsets.to_numpy().astype(np.int64)
        items = column.values.slice(int(bounds[0]), int(bounds[-1] - bounds[0]))
        words = _fold(hash64([items], seed) if len(items) else _none(), bounds, seed)
    else:
        words = _number_words(column, seed)
    if column.null_count:
        words[~valid_of(column)] = _mixed(~seed & _MASK)
    return words


def repeats(column: pa.Array) -> bool:
    """Whether a long column seems to have few different values."""
    rows = len(column)
    if rows < SAMPLE * 8:
        return False
    sample = column.take(pa.array(np.arange(0, rows, rows // SAMPLE)))
    return len(sample.unique()) * 2 <= len(sample)


def _none() -> Words:
    return np.empty(0, np.uint64)


def valid_of(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Which rows are not null."""
    valid: npt.NDArray[np.bool_] = column.is_valid().to_numpy(zero_copy_only=False)
    return valid


def is_bytes(kind: pa.DataType) -> bool:
    """Whether a type is strings or bytes of any length."""
    return any(
        is_one(kind)
        for is_one in (pt.is_string, pt.is_binary, pt.is_large_string, pt.is_large_binary)
    )


def _number_words(column: pa.Array, seed: int) -> Words:
    kind = column.type
    if pt.is_boolean(kind):
        return _booleans(column).astype(np.uint64)
    if pt.is_floating(kind):
        return _float_bits(column)
    width = kind.bit_width >> 3
    if width <= 8:
        # Sign-extended, so that a column hashes alike whatever the width of its integers.
        return fixed(column, f"<i{width}").astype(np.int64).view(np.uint64)
    halves = fixed(column, f"V{width}").view("<u8").reshape(-1, width >> 3)
    words: Words = halves[:, 0].copy()  # one row would be a view, and we write
    for at in range(1, halves.shape[1]):
        words ^= np.uint64(_mixed(seed + at))
        _mix(words)
        words ^= halves[:, at]
    return words


def fixed(column: pa.Array, kind: str) -> npt.NDArray[Any]:
    """See the values of a fixed-width array without copying; under a null stands anything."""
    data = column.buffers()[1]
    if data is None:  # allowed where all is null
        return np.zeros(len(column), kind)
    return np.frombuffer(data, kind, len(column), column.offset * np.dtype(kind).itemsize)


def _booleans(column: pa.Array) -> npt.NDArray[np.bool_]:
    filled = column.fill_null(False) if column.null_count else column
    values: npt.NDArray[np.bool_] = filled.to_numpy(zero_copy_only=False)
    return values


def _float_bits(column: pa.Array) -> Words:
    """IEEE 754 doubles with one nan and one zero."""
    values = fixed(column, f"<f{column.type.bit_width >> 3}").astype(np.float64)
    values += 0.0
    bits = values.view(np.uint64)
    bits[np.isnan(values)] = _NAN
    return bits


def bytes_of(column: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The bytes of strings, with 8 spare ones at the end, and where each begins and ends."""
    large = pt.is_large_string(column.type) or pt.is_large_binary(column.type)
    _, offsets, data = column.buffers()
    bounds = np.zeros(len(column) + 1, np.int64)
    if offsets is not None and len(column):
        kind = np.int64 if large else np.int32
        at = column.offset * np.dtype(kind).itemsize
        bounds[:] = np.frombuffer(offsets, kind, len(column) + 1, at)
    size = int(bounds[-1] - bounds[0])
    spare = np.zeros(size + 8, np.uint8)
    if size:
        spare[:size] = np.frombuffer(data, np.uint8, size, int(bounds[0]))
    bounds -= bounds[0]
    return spare, bounds


def _string_words(column: pa.Array, seed: int) -> Words:
    data, bounds = bytes_of(column)
    lengths = np.diff(bounds)
    counts = (lengths + 7) >> 3
    ends = np.zeros(len(column) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    total = int(ends[-1])
    starts = np.arange(total, dtype=np.int64) << 3
    starts += np.repeat(bounds[:-1] - (ends[:-1] << 3), counts)
    # The word at every byte; reading it where it is not aligned is fine.
    words = np.ndarray((len(data) - 7,), "<u8", data, 0, (1,))[starts].astype(np.uint64)
    left = (lengths & 7).astype(np.uint64)
    cut = np.flatnonzero(left)
    words[ends[1:][cut] - 1] &= (_ONE << (left[cut] << np.uint64(3))) - _ONE
    folded = _fold(words, ends, seed)
    folded ^= lengths.astype(np.uint64)  # "a" and "a\0" have equal words
    return folded


# --- the order -------------------------------------------------------------------------------


def order64(column: pa.Array) -> tuple[Words, bool]:
    """Give each row's word in Spark's order of the column, and whether equal words are equal rows.

    Null is 0 and nothing else is. False (a prefix: ties are possible, the order is still right) for
    strings, bytes, structs (their first field), lists (all alike), decimals above 18 digits and
    integers and times of 64 bits: there the smallest integer shares a word with its neighbour.
    """
    kind = column.type
    if pt.is_dictionary(kind):
        return order64(column.dictionary_decode())
    if pt.is_null(kind):
        return np.zeros(len(column), np.uint64), True
    words, exact = _order(column)
    np.maximum(words, _ONE, out=words)
    if column.null_count:
        words[~valid_of(column)] = 0
    return words, exact


def _order(column: pa.Array) -> tuple[Words, bool]:
    kind = column.type
    if is_bytes(kind):
        return _prefix(column), False
    if pt.is_boolean(kind):
        return _booleans(column).astype(np.uint64) + _ONE, True
    if pt.is_floating(kind):
        return order_of_floats(_float_bits(column)), True
    if pt.is_decimal(kind):
        return _order_of_decimals(column)
    if pt.is_struct(kind):
        fields = column.flatten()
        return (order64(fields[0])[0] if fields else np.ones(len(column), np.uint64)), False
    if pt.is_nested(kind) or kind.bit_width > 64:
        return np.ones(len(column), np.uint64), False
    width = kind.bit_width >> 3
    return fixed(column, f"<i{width}").astype(np.int64).view(np.uint64) ^ _TOP, width < 8


def order_of_floats(bits: Words) -> Words:
    """Words in the order of the doubles with these bits."""
    negative = (bits >> np.uint64(63)).astype(bool)
    ordered: Words = np.where(negative, ~bits, bits | _TOP)
    return ordered


def _order_of_decimals(column: pa.Array) -> tuple[Words, bool]:
    if column.type.bit_width <= 64 or column.type.precision <= 18:
        width = column.type.bit_width >> 3
        if width <= 8:
            low = fixed(column, f"<i{width}").astype(np.int64).view(np.uint64)
        else:
            low = fixed(column, f"V{width}").view("<u8").reshape(-1, width >> 3)[:, 0]
        return low ^ _TOP, True
    if column.type.bit_width > 128:
        return np.ones(len(column), np.uint64), False
    halves = fixed(column, "V16").view("<u8").reshape(-1, 2)
    low, high = halves[:, 0], halves[:, 1]
    negative = (high >> np.uint64(63)).astype(bool)
    low, high = np.where(negative, ~low + _ONE, low), np.where(negative, ~high, high)
    high += (negative & (low == 0)).astype(np.uint64)
    # Rounded to 53 bits, away from no order: both conversions and the sum are monotonous.
    values = high.astype(np.float64) * 2.0**64 + low.astype(np.float64)
    values[negative] *= -1.0
    values += 0.0
    return order_of_floats(values.view(np.uint64)), False


def _prefix(column: pa.Array) -> Words:
    """The first eight bytes, padded with zeros, as a number."""
    data, bounds = bytes_of(column)
    words = np.ndarray((len(data) - 7,), ">u8", data, 0, (1,))[bounds[:-1]].astype(np.uint64)
    lengths = np.minimum(np.diff(bounds), 8)
    short = np.flatnonzero(lengths < 8)
    spare = (np.uint64(64) - (lengths[short].astype(np.uint64) << np.uint64(3))) % np.uint64(64)
    words[short] = (words[short] >> spare) << spare
    words[lengths == 0] = 0
    return words
