"""Drafting an entry: parts of rows become sections, large ones are staged, the rest is control."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        control: dict[str, Any],
        expect: Mapping[str, int],
        require: Mapping[str, int],
    ) -> tuple[Draft | None, dict[int, str]]:
        """A sealed draft (None when there is nothing to append) and the names of its topics."""
        sections: list[SectionDraft] = []
        pieces: list[str] = []
        topics: dict[int, str] = {}
        inline = 0
        for part in parts:
            packer = self._packer(part.topic)
            topics[packer.topic.id] = part.topic
            for staged in self._staged(packer, part, inline):
                if isinstance(staged, Piece):
                    pieces.append(staged.name)
                    sections.extend(self._pieces.sections(packer.topic, staged, len(pieces)))
                elif staged.rows:
                    assert staged.body is not None
                    inline += staged.body.size
                    sections.append(staged)
        flags = CHANGES_CONTROL if not CONTROL_KEYS.isdisjoint(control) else 0
        if expect or require:
            flags |= HAS_CONDITIONS
            conditions = {"expect": dict(expect), "require": dict(require)}
            control = {**control, **{kind: named for kind, named in conditions.items() if named}}
        if pieces:
            control = {**control, "pieces": pieces}
        if not sections and not control:
            return None, topics
        draft = Draft(sections=sections, control=control, flags=flags).seal()
        self._check_size(draft)
        return draft, topics

    def _staged(self, packer: Packer, part: Part, inline: int) -> Sequence[SectionDraft | Piece]:
        """A part as a section, or as pieces when it is large or was staged before."""
        rows = part.rows
        if isinstance(rows, Piece):
            rows = [rows]
        if isinstance(rows, list) and rows and isinstance(rows[0], Piece):
            return rows
        batch = part.batch(packer.arrow, packer.batch)
        if not batch.num_rows:
            return []
        sent = microseconds_of(part.sent_time) if part.sent_time else self._system.now_us()
        packing: dict[str, Any] = {"sent_time": sent, "partition": part.partition}
        if part.headers is not None:
            packing["headers"] = packer.headers(part.headers, batch.num_rows)
        if part.transactions is not None:
            packing["transactions"] = packer.transactions(part.transactions, batch.num_rows)
        size = batch.get_total_buffer_size()  # quick, and wrong where arrays share memory
        if inline + size <= self.settings.inline_bytes_max:
            packed = packer.pack(batch, **packing)
            assert packed.body is not None
            fits = packed.body.size <= self.settings.append_bytes_max
            if fits and inline + packed.body.size <= self.settings.inline_bytes_max:
                return [packed]
        size = pa.ipc.get_record_batch_size(batch)
        if size > self.settings.append_bytes_max:
            raise errors.BatchTooLarge(
                f"{size} bytes in one append, above {self.settings.append_bytes_max}",
                place=packer.place,
                fix="stage the rows in several pieces (log.stage) and append these as one entry",
            )
        if inline + size > self.settings.inline_bytes_max:
            drafts = chunked(packer, [batch], self.settings.chunk_bytes, **packing)
            piece = self._pieces.write(packer.topic, drafts, sent)
            part.rows = part.staged = [piece]  # a second try must not stage it again
            return [piece]
        return [packer.pack(batch, **packing)]

    def _check_size(self, draft: Draft) -> None:
        if draft.meta_length > META_BYTES_MAX:
            raise errors.BatchTooLarge(
                f"the entry's control part has {draft.meta_length} bytes",
                place="one entry",
                fix="put fewer topics, pieces, counters or values into one entry",
            )
