"""Sums that can be taken back: exact for integers, decimals and floats, whatever the order.

A sum is kept so that adding and removing rows in any order gives what the rows that are left would
give. So nothing may be rounded on the way:

* **integers and decimals** are sums of 32-bit limbs, each in an int64: w * limb adds up without
  overflow for 2^31 rows, then carries are moved up. Two limbs for integers, four for decimals.
* **floats**: each double is a whole number of 2^-1074, so their sum is a (big) whole number. Rows
  are added up in numpy by group and by digit, and only these few partial sums become Python
  integers. What is kept is that integer, without its zero bytes at the end: 10 to 20 bytes for
  values of ordinary size. NaN and the infinities are counted beside it: a deleted infinity leaves
  no trace. The result is the exact sum, rounded once; Spark's own, in whatever order its tasks ran,
  differs from it in the last digits.

Rejected: floats as double-double with recomputation on cancellation: it needs a bound, the rows of
the group to recompute from, and a second path; this is one path and needs no bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Numbers = npt.NDArray[np.int64]
_MASK = 0xFFFF_FFFF
_LEAST = 1074
"""The smallest double is 2 to the power of minus this."""
_HUGE = 2.0**960
_MANY = 1 << 16
"""Values and weights beyond are added up one by one."""


def limbs_of(column: pa.Array) -> list[Numbers]:
    """The 32-bit limbs of integers (2) or decimals (4), lowest first; nulls are anything."""
    if pa.types.is_decimal(column.type):
        words = np.frombuffer(column.buffers()[1], np.uint64)
        words = words[2 * column.offset : 2 * (column.offset + len(column))].reshape(-1, 2)
        low, high = words[:, 0], words[:, 1].view(np.int64)
        return [
            (low & _MASK).astype(np.int64),
            (low >> np.uint64(32)).astype(np.int64),
            high & _MASK,
            high >> 32,
        ]
    values = column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    return [values & _MASK, values >> 32]


def carried(limbs: Sequence[Numbers]) -> list[Numbers]:
    """The same number with every limb but the highest between 0 and 2^32."""
    done: list[Numbers] = []
    carry: Numbers = np.zeros(len(limbs[0]), np.int64)
    for limb in limbs[:-1]:
        total = limb + carry
        done.append(total & _MASK)
        carry = total >> 32
    return [*done, limbs[-1] + carry]


def integers(limbs: Sequence[Numbers]) -> tuple[Numbers, npt.NDArray[np.bool_]]:
    """Two carried limbs as int64, and which of them do not fit (these wrap around)."""
    low, high = limbs
    fits = (high >= -(1 << 31)) & (high < 1 << 31)
    return (high << 32) | low, ~fits


def decimals(limbs: Sequence[Numbers], kind: pa.DataType) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    """Four carried limbs as decimals, and which of them do not fit (these become null)."""
    parts = [limb.tolist() for limb in limbs]
    most = 10**kind.precision
    totals = [a | b << 32 | c << 64 | (d << 96) for a, b, c, d in zip(*parts, strict=True)]
    over = np.array([not -most < total < most for total in totals], bool)
    words = np.array(
        [(total & ((1 << 64) - 1), total >> 64 & ((1 << 64) - 1)) for total in totals], np.uint64
    ).reshape(-1)
    valid = None
    if over.any():
        valid = pa.array(~over).buffers()[1]
    buffer = pa.py_buffer(words.tobytes())
    return pa.Array.from_buffers(kind, len(totals), [valid, buffer]), over


def added_up(groups: Numbers, numbers: Numbers, count: int) -> Numbers:
    """The sum of the numbers of each group."""
    if np.abs(numbers).sum(dtype=np.float64) < 1 << 52:  # doubles hold them exactly, and are faster
        return np.bincount(groups, numbers, count).astype(np.int64)
    found = np.zeros(count, np.int64)
    np.add.at(found, groups, numbers)
    return found


def exact_float_sums(
    groups: Numbers, values: npt.NDArray[np.float64], weight: Numbers, count: int
) -> list[int]:
    """For each group the sum of weight * value in units of 2^-1074, exactly (finite values).

    Each value is cut into digits, from the top: ``(value + c) - c`` is the multiple of 2^grid that
    is nearest, if c is 1.5 * 2^(grid + 52), and what is left is exact too. A digit has so few bits
    that doubles add up those of all rows exactly. Values that have few bits have one digit.
    """
    totals = [0] * count
    odd = (np.abs(values) > _HUGE) | (np.abs(weight) > _MANY)
    if odd.any():
        rows = (groups[odd].tolist(), values[odd].tolist(), weight[odd].tolist())
        for group, value, times in zip(*rows, strict=True):
            above, below = value.as_integer_ratio()
            totals[group] += times * above * ((1 << _LEAST) // below)
        groups, values, weight = groups[~odd], values[~odd], weight[~odd]
    bits = 50 - int(np.abs(weight).sum()).bit_length()
    while largest := float(np.abs(values).max(initial=0.0)):
        grid = max(math.frexp(largest)[1] - bits, -_LEAST)
        c = math.ldexp(1.5, grid + 52)
        digit = values + c
        digit -= c
        sums = np.bincount(groups, digit * weight, count)
        found = np.flatnonzero(sums)
        units = np.ldexp(sums[found], -grid).astype(np.int64)
        for group, unit in zip(found.tolist(), units.tolist(), strict=True):
            totals[group] += unit << (grid + _LEAST)
        values = values - digit
    return totals


def packed(total: int) -> bytes:
    """An exact float sum as bytes: how many zero bytes to put below, then the rest."""
    if not total:
        return b""
    zeros = ((total & -total).bit_length() - 1) // 8
    rest = total >> (8 * zeros)
    size = rest.bit_length() // 8 + 1
    return zeros.to_bytes(2, "little") + rest.to_bytes(size, "little", signed=True)


def unpacked(data: bytes) -> int:
    """The inverse of `packed`."""
    if not data:
        return 0
    zeros = int.from_bytes(data[:2], "little")
    return int.from_bytes(data[2:], "little", signed=True) << (8 * zeros)


def rounded(total: int) -> float:
    """The double nearest to an exact sum; infinite beyond the largest."""
    try:
        return total / (1 << _LEAST)
    except OverflowError:
        return float("inf") if total > 0 else float("-inf")
