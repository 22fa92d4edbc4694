"""Record batches on the straight way: from `append` to the short cut, with nothing between.

In processes that sleep and wake, where no code is in the caches, every function of Python on the
way costs a microsecond, and an append of one row went through fifteen of them. So what can be known
before is known before: the section's bytes, the schema, the catalog of topics that it was made for,
which the short cut compares under the append lock. Whatever is out of the ordinary, or wrong, is
for the long way, which says so.
"""

from __future__ import annotations

from typing import Any, cast

import pyarrow as pa

from headrace.log.embedded.format import OFFSET_BITS, checksum
from headrace.log.embedded.housekeeping import Housekeeper
from headrace.log.embedded.journal import Journal, Taken
from headrace.log.embedded.packing import Packer
from headrace.model.records import Receipt

FEW_ROWS = 64
SMALL_BYTES = 4096
"""The checksum of larger rows is not for the short cut: xxhash knows the processor."""
_new: Any = tuple.__new__  # what a NamedTuple does, without its signature


class Straight:
    """Appends to one topic; made when one went the long way, good until a topic changes."""

    __slots__ = (
        "_append", "_bytes_max", "_clock", "_keeper", "_many", "_name", "_packer",
        "catalog", "journal", "newest",
    )  # fmt: skip

    def __init__(
        self, journal: Journal, packer: Packer, keeper: Housekeeper, catalog: int, newest: int
    ) -> None:
        """For topics whose record batches are `packer.plain`, in this catalog or an older one."""
        assert journal.short is not None
        self._append = journal.short.append_batch
        self._bytes_max = journal.settings.inline_bytes_max
        self.catalog = catalog
        self._clock = journal.system.monotonic
        self.journal = journal
        self._keeper = keeper
        self._many = packer.topic.partitions > 1
        self._name = packer.topic.name
        self._packer = packer
        self.newest = newest
        """The journal file in which the handle that appends has been."""

    def __call__(self, rows: pa.RecordBatch, *, durable: bool) -> Receipt | Taken | None:
        """A receipt; or where the entry went, if there is more to do; None: the long way."""
        packer = self._packer
        if self.journal.refused is not None or not rows.schema.equals(packer.arrow, True):
            return None
        for position in packer.required:
            if rows.column(position).null_count:
                return None
        count, runs = rows.num_rows, None
        if count > FEW_ROWS and rows.nbytes > self._bytes_max:
            return None  # before all of them are laid out and serialized
        if self._many:
            rows, runs = packer.spread(rows)
        body = rows.serialize()
        known = checksum(body) if body.size > SMALL_BYTES else None
        found = self._append(packer.plain, runs, body, count, known, self.catalog, durable)
        if type(found) is not tuple:
            return self.journal.taken(found)
        position, received, end, runs, synced = found
        keeper = self._keeper
        keeper.last = self._clock()
        if synced or keeper.asleep or end >> OFFSET_BITS != self.newest:
            return cast("Taken", _new(Taken, found))
        one = (position, count, received, ((self._name, runs),), False, 0)
        return cast("Receipt", _new(Receipt, one))
