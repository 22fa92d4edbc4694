"""The keys that a thorough snapshot has read, as hashes: in memory up to a bound, then in a file.

In the end each row of the topic is asked for. If there are more keys than the bound, that is done
in several passes over the topic's table, each with a part of the keys: those of one remainder.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Sequence
from typing import IO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.model.hashing import hash64

Words = npt.NDArray[np.uint64]
KEYS_MAX = 4 << 20
"""So many keys are held in memory, of 16 bytes each."""
BLOCK = 1 << 16


class Seen:
    """A set of keys, each as two hashes."""

    def __init__(self, folder: str) -> None:
        """Where there is room for a file, which has no name there and goes when we do."""
        self._folder = folder
        self._held: list[Words] = []
        self._file: IO[bytes] | None = None
        self._count = 0
        self._in_file = 0

    def add(self, first: Words, second: Words) -> None:
        """Hashes of keys, by the seeds 1 and 2."""
        self._held.append(np.stack([first, second], axis=1))
        self._count += len(first)
        if self._count - self._in_file > KEYS_MAX:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            self._file.seek(0, 2)
            for one in self._held:
                self._file.write(one.tobytes())
            self._held, self._in_file = [], self._count

    def _blocks(self) -> Iterator[Words]:
        yield from self._held
        if self._file is not None:
            self._file.seek(0)
            while data := self._file.read(16 * BLOCK):
                yield np.frombuffer(data, np.uint64).reshape(-1, 2)

    def passes(self) -> Iterator[Pass]:
        """Parts of the keys, for one pass over all rows each."""
        of = self._count // KEYS_MAX + 1
        for number in range(of):
            parts = [one[one[:, 0] % np.uint64(of) == number] for one in self._blocks()]
            parts.append(np.empty((0, 2), np.uint64))
            both = np.concatenate(parts)
            yield Pass(number, of, np.sort(both[:, 0]), np.sort(both[:, 1]))


class Pass:
    """The keys of one remainder."""

    def __init__(self, number: int, of: int, first: Words, second: Words) -> None:
        """Both sorted."""
        self._number, self._of = number, of
        self._sorted = first, second

    def missing(self, rows: pa.RecordBatch, key: Sequence[str]) -> pa.RecordBatch:
        """The rows of this pass whose keys were not seen."""
        keys = [rows.column(name) for name in key]
        hashes = hash64(keys, 1), hash64(keys, 2)
        there = hashes[0] % np.uint64(self._of) != self._number
        there |= among(hashes[0], self._sorted[0]) & among(hashes[1], self._sorted[1])
        return rows.filter(pa.array(~there))


def among(words: Words, ordered: Words) -> npt.NDArray[np.bool_]:
    """Which of the words are among these, which are sorted."""
    if not len(ordered):
        return np.zeros(len(words), bool)
    at = np.minimum(np.searchsorted(ordered, words), len(ordered) - 1)
    found: npt.NDArray[np.bool_] = ordered[at] == words
    return found
