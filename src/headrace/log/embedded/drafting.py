"""Drafting an entry: parts of rows become sections, large ones are staged, the rest is control."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa

from headrace import errors
from headrace.interfaces import Part
from headrace.log.embedded.format import CHANGES_CONTROL, HAS_CONDITIONS, Draft, SectionDraft
from headrace.log.embedded.packing import Packer
from headrace.log.embedded.pieces import Pieces, chunked
from headrace.log.embedded.system import System
from headrace.model.fold import CONTROL_KEYS
from headrace.model.records import Piece, microseconds_of
from headrace.settings import LogSettings

META_BYTES_MAX = 16 << 20


class Drafter:
    """Makes drafts for one handle."""

    def __init__(
        self,
        system: System,
        settings: LogSettings,
        pieces: Pieces,
        packer_of: Callable[[str], Packer],
    ) -> None:
        """`packer_of` gives the packer of a topic at its newest version."""
        self._system = system
        self.settings = settings
        self._pieces = pieces
        self._packer = packer_of

    def draft(
        self,
        parts: Sequence[Part],
        control: Mapping[str, Any],
        expect: Mapping[str, int],
        require: Mapping[str, int],
    ) -> Draft | None:
        """A sealed draft; None when there is nothing to append."""
        sections: list[SectionDraft] = []
        pieces: list[str] = []
        inline = flags = 0
        for part in parts:
            packer = self._packer(part.topic)
            found = self._packed(packer, part, inline)
            if isinstance(found, SectionDraft):
                inline += len(found.body) if found.body is not None else 0
                sections.append(found)
                continue
            for piece in found:
                pieces.append(piece.name)
                sections.extend(self._pieces.sections(packer.topic, piece, len(pieces)))
        if control or expect or require or pieces:
            flags = CHANGES_CONTROL if not CONTROL_KEYS.isdisjoint(control) else 0
            flags |= HAS_CONDITIONS if expect or require else 0
            more = {"expect": dict(expect), "require": dict(require), "pieces": pieces}
            control = {**control, **{kind: named for kind, named in more.items() if named}}
        elif not sections:
            return None
        draft = Draft(sections, control, flags).seal()
        if draft.meta_length > META_BYTES_MAX:
            raise errors.BatchTooLarge(
                f"the entry's control part has {draft.meta_length} bytes",
                place="one entry",
                fix="put fewer topics, pieces, counters or values into one entry",
            )
        return draft

    def _packed(self, packer: Packer, part: Part, inline: int) -> SectionDraft | Sequence[Piece]:
        """A part as a section, or as pieces when it is large or was staged before."""
        rows = [part.rows] if isinstance(part.rows, Piece) else part.rows
        if isinstance(rows, list) and rows and isinstance(rows[0], Piece):
            given = (part.headers, part.transactions, part.partition, part.sent_time)
            if not part.staged and any(one is not None for one in given):
                raise errors.BadRows(
                    "staged rows have their headers, partitions and time already",
                    place=packer.place,
                    fix="give headers to log.stage, and nothing else with a piece",
                )
            if not all(isinstance(one, Piece) for one in rows):
                raise errors.BadRows(
                    "staged pieces and rows in one list",
                    place=packer.place,
                    fix="append them one after the other in a transaction: log.transaction()",
                )
            return rows
        sent = self._system.now_us() if part.sent_time is None else _microseconds(packer, part)
        most, settings = self.settings.inline_bytes_max - inline, self.settings
        ready = packer.ready(part)
        if ready is not None and len(ready.body) <= min(most, settings.append_bytes_max):
            return packer.section(ready.rows, sent, ready.body)
        batch = part.batch(packer.arrow, packer.batch)
        if not batch.num_rows:
            return ()
        headers = transactions = None
        if part.headers is not None:
            headers = packer.headers(part.headers, batch.num_rows)
        if part.transactions is not None:
            transactions = packer.transactions(part.transactions, batch.num_rows)
        # One row cannot be cut. The size is quick, and wrong where arrays share memory.
        if batch.num_rows == 1 or batch.get_total_buffer_size() <= most:
            packed = packer.pack(batch, sent, headers, transactions, part.partition)
            size = len(packed.body) if packed.body is not None else 0
            if size <= most and size <= settings.append_bytes_max:
                return packed
        size = pa.ipc.get_record_batch_size(batch)
        if size > settings.append_bytes_max:
            raise errors.BatchTooLarge(
                f"{size} bytes in one append, above {settings.append_bytes_max}",
                place=packer.place,
                fix="stage the rows in several pieces (log.stage) and append these as one entry",
            )
        if size <= most:
            return packer.pack(batch, sent, headers, transactions, part.partition)
        drafts = chunked(
            packer, [batch], settings.chunk_bytes, sent, headers, transactions, part.partition
        )
        piece = self._pieces.write(packer.topic, drafts, sent)
        part.rows = part.staged = [piece]  # a second try must not stage it again
        return [piece]


def _microseconds(packer: Packer, part: Part) -> int:
    if not isinstance(part.sent_time, datetime):
        raise errors.BadRows(
            f"sent_time is {part.sent_time!r}, not a datetime",
            place=packer.place,
            fix="give a datetime, or leave it out for now",
        )
    return microseconds_of(part.sent_time)
