"""Bugs on purpose in what the keeper does: see `bugs`, of which these are more.

`kept` is the chaos in one process (`chaos_alone`), judged by the checker of histories.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from headrace.log.embedded import archive, compaction, journal, keeper, orphans, reader
from headrace.log.embedded.holds import FOREVER
from headrace.log.embedded.keeper import Keeper, Sealing
from headrace.log.embedded.orphans import Orphans
from headrace.log.embedded.sealed import SealWriter, filtered
from headrace.testing.bugs import lacking
from headrace.testing.seeded import Bug, Patch, instead, nothing, seeding

KEEPER_BUGS: list[Bug] = []
_bug = seeding(KEEPER_BUGS)


# --- orphans --------------------------------------------------------------------------------------


@_bug("pieces of those who live are taken for orphans", "kept_meanwhile uncut")
def _() -> list[Patch]:
    return [
        instead(orphans, "_living", lambda _: ()),
        mock.patch.object(orphans, "PATIENCE_SECONDS", 0.0),
    ]


@_bug("an entry names a piece without a look whether it is there", "hands_over uncut")
def _() -> list[Patch]:
    return [instead(journal, "must_be_there", lambda *_: 0)]


@_bug("an orphan is looked for before everybody else has to wait", "hands_over uncut")
def _() -> list[Patch]:
    """Names that come between the look and the removal are not seen."""
    original = Orphans._look

    def look(self: Any, log: Any, end: int) -> None:
        if not log.append_lock._owner:
            original(self, log, end)

    return [instead(Orphans, "_look", look)]


@_bug("pieces that are named are taken for orphans", "large")
def _() -> list[Patch]:
    return [instead(Orphans, "_names", lambda *_: iter(()))]


# --- sealing --------------------------------------------------------------------------------------


@_bug("a sealed file is not synced before it is named", "keeps")
def _() -> list[Patch]:
    return [lacking(SealWriter, "_open", "_system", "fdatasync")]


@_bug("the name of a sealed file is not synced before it is named", "keeps")
def _() -> list[Patch]:
    def finish(self: Any) -> Any:
        return [writer.finish() for writer in [*self._written, *self._open.values()]]

    return [instead(Sealing, "finish", finish)]


@_bug("a seal forgets the numbers of entries", "keeps")
def _() -> list[Patch]:
    original = SealWriter.add

    def add(self: Any, rows: Any) -> None:
        first = self._first or rows
        original(self, rows._replace(position=first.position))

    return [instead(SealWriter, "add", add)]


@_bug("a seal says that it has one entry more", "keeps", "kept")
def _() -> list[Patch]:
    original = Keeper._say

    def say(self: Any, control: Any, number: int) -> None:
        if "through" in control:
            control = {**control, "through": control["through"] + 2}
        original(self, control, number)

    return [instead(Keeper, "_say", say)]


@_bug("two keepers", "kept_meanwhile uncut")
def _() -> list[Patch]:
    """Nobody asks for the lock, nor whether somebody else has said something meanwhile."""

    def say(self: Any, control: Any, _: int) -> None:
        self._log.append_entry([], {"sealed": control}, expect={}, require={})

    return [instead(Keeper, "_take", lambda _: True), instead(Keeper, "_say", say)]


# --- deleting -------------------------------------------------------------------------------------


@_bug("a journal file is deleted before a later checkpoint is synced", "keeps")
def _() -> list[Patch]:
    original = Keeper._collect

    def collect(self: Any, done: Any) -> None:
        journal = self._log.journal
        for file in journal.closed_files:
            if file.through <= journal.control.sealed.through:
                journal.system.unlink(journal.files.path(file.number))
        original(self, done)

    return [instead(Keeper, "_collect", collect)]


@_bug("a sealed file is deleted that is still named", "kept")
def _() -> list[Patch]:
    original = Keeper._retain

    def retain(self: Any, done: Any) -> None:
        original(self, done)
        journal = self._log.journal
        for name in done.dropped:
            rest = journal.control.sealed.of(int(name.partition("-")[0]))
            for file in [file for file in rest if file.name not in done.dropped][:1]:
                journal.system.unlink(archive.local_path(journal.folder, file.name))

    return [instead(Keeper, "_retain", retain)]


@_bug("a hold is ignored", "kept")
def _() -> list[Patch]:
    return [instead(keeper, "held", lambda *_: FOREVER)]


@_bug("retention does not say from where on a topic is held", "kept")
def _() -> list[Patch]:
    original = Keeper._trimmed

    def trimmed(self: Any, topic: Any, *given: Any) -> Any:
        return {**original(self, topic, *given), "starts": [0] * topic.partitions}

    return [instead(Keeper, "_trimmed", trimmed)]


@_bug("a reader is not told what is gone", "kept")
def _() -> list[Patch]:
    return [instead(reader.Reading, "_refuse_if_gone", nothing)]


@_bug("the archive forgets a file", "kept")
def _() -> list[Patch]:
    return [instead(archive, "store", nothing)]


# --- compaction -----------------------------------------------------------------------------------


@_bug("compaction drops the newest", "kept")
def _() -> list[Patch]:
    original = compaction._kept

    def kept(*given: Any) -> Any:
        keep = original(*given)
        keep[np.flatnonzero(keep)[-1:]] = False
        return keep

    return [instead(compaction, "_kept", kept)]


@_bug("compaction keeps the oldest of each key", "kept")
def _() -> list[Patch]:
    original = compaction._known

    def known(*given: Any) -> Any:
        for one in original(*given):
            yield one._replace(row=one.row[::-1].copy())

    return [instead(compaction, "_known", known)]


@_bug("what says that a key is gone goes before its grace", "kept")
def _() -> list[Patch]:
    original = compaction.compacted

    def compacted(of: Any, topic: Any, files: Any, now: int, go_on: Any) -> Any:
        return original(of, topic, files, now + (1 << 55), go_on)

    return [instead(keeper, "compacted", compacted)]


@_bug("what says that a key is gone is not read as that", "kept")
def _() -> list[Patch]:
    """Of a key that is gone, the row before stays instead."""
    original = compaction._kept

    def kept(of: Any, topic: Any, *given: Any) -> Any:
        later = replace(topic, policy=replace(topic.policy, grace_seconds=-1e9))
        keep, older = original(of, topic, *given), original(of, later, *given)
        gone = np.flatnonzero(keep & ~older)
        keep[gone] = False
        keep[np.maximum(gone - 1, 0)] = True
        return keep

    return [instead(compaction, "_kept", kept)]


@_bug("compaction numbers rows anew", "kept")
def _() -> list[Patch]:
    def anew(group: Any, keep: Any) -> Any:
        found = filtered(group, keep)
        runs = found.runs.copy()
        for partition in np.unique(runs["partition"]):
            mine = runs["partition"] == partition
            counts = runs["rows"][mine]
            runs["base"][mine] = runs["base"][mine][0] + np.cumsum(counts) - counts
        return found._replace(runs=runs)

    return [instead(compaction, "filtered", anew)]
