"""A weighted set of rows in a folder of its own, for as long as somebody needs it."""

from __future__ import annotations

import itertools
import shutil
import weakref

import pyarrow as pa

from headrace.tables.collection import Collection
from headrace.tables.packs import Packs

WRITTEN_BYTES = 1 << 20
"""So much is written at once, and stays in memory until then."""
_numbers = itertools.count()


class Scratch:
    """A collection that does not outlive its process; most of it is in files."""

    def __init__(self, folder: str, schema: pa.Schema) -> None:
        """The folder of which it makes one, when there is much to keep; that goes when it does."""
        own = f"{folder}/{next(_numbers)}"
        self._packs = Packs(own, cached=16, may_hold=WRITTEN_BYTES)
        self.collection = Collection(self._packs, schema)
        self._turn = 1
        self._attempt = self._packs.attempt(self._turn)
        weakref.finalize(self, shutil.rmtree, own, ignore_errors=True)

    def add(self, rows: pa.RecordBatch) -> None:
        """Take rows in, by their weights."""
        self.collection = self.collection.loaded(rows, self._attempt)
        self._turn += 1
        if self._attempt.bytes > WRITTEN_BYTES:
            self._attempt.finish()
            self._packs.drop_except(self.collection.pack_names(), older_than=self._turn)
            self._attempt = self._packs.attempt(self._turn)
