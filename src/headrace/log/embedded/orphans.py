"""Pieces that were staged and will never be published: found, and removed by the keeper.

A piece is named by an entry after it was written, perhaps much later, and perhaps by somebody to
whom it was handed. So that no entry names it yet says little. It is an **orphan** when

* the handle that staged it is gone: its name holds the boot and a token of that handle, which has a
  lock of its own (`locks/staging-TOKEN`) for as long as it lives. The kernel gives the lock back
  when the process dies, and not while it is slow or stopped; and
* the boot was another, so that everybody is gone to whom it might have been handed, or it was seen
  in this state for `PATIENCE_SECONDS`; and
* no entry names it.

**Why nothing is lost.** The last look for a name, and the removal, are made under the append lock,
with all folded that a dead writer left; and an entry that names a piece is written under this lock
too, after a look whether the piece is still there (`Journal.append`). So an entry never names what
was removed: who comes too late with a piece is told so (`PieceInvalid`), and nothing is taken. An
entry that is in the journal and not synced counts as a name. What a power cut takes back is only
the removal: then it is an orphan again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from headrace.log.embedded.checkpoint import Checkpoint
from headrace.log.embedded.format import ENTRY, address_of, place_of
from headrace.log.embedded.journal import Journal
from headrace.log.embedded.pieces import STAGING, boot_mark, owner_of, staging_lock

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog

PATIENCE_SECONDS = 3600.0
"""So long somebody else may still publish what a dead process of this boot staged."""


class Orphans:
    """Remembers which pieces were named, and since when nobody was there who had staged one."""

    def __init__(self, log: EmbeddedLog, go_on: Callable[[], None]) -> None:
        """`go_on` raises to end a search that takes long."""
        self._log = log
        self._go_on = go_on
        self._named: set[str] = set()
        self._through = 0
        self._alone_since: dict[str, float] = {}

    def remove(self) -> list[str]:
        """Remove the orphans; their names."""
        journal, pieces = self._log.journal, self._log.pieces
        there = set(journal.system.listdir(pieces.folder))
        self._named &= there
        orphans = self._left_alone(journal, there - self._named)
        if orphans:
            self._look(journal, journal.live.tail().end)  # most of it, while others append
        if orphans <= self._named:
            return []
        with journal.appending() as tail:
            self._look(journal, tail.end)
            orphans -= self._named
            for name in orphans:
                journal.system.unlink(pieces.path(name))
        return sorted(orphans)

    def _left_alone(self, journal: Journal, names: set[str]) -> set[str]:
        """Those whose stager is gone, and for long enough."""
        boot, now = boot_mark(journal.system), journal.system.monotonic()
        living = set(_living(journal))
        alone = {name: owner_of(name) for name in names if owner_of(name) not in ("", *living)}
        self._alone_since = {name: self._alone_since.get(name, now) for name in alone}
        return {
            name
            for name, owner in alone.items()
            if now - self._alone_since[name] >= PATIENCE_SECONDS or not owner.startswith(boot)
        }

    def _look(self, journal: Journal, end: int) -> None:
        """Take in the names in the journal up to `end`; damage on the way is an error."""
        newest, _ = place_of(end)
        first, _ = place_of(self._through)
        for number in journal.files.numbers():
            if first <= number <= newest:
                start = max(self._through, address_of(number, 0))
                stop = end if number == newest else _end_of(journal, number)
                for name in self._names(journal, start, stop):
                    self._named.add(name)
        self._through = end

    def _names(self, journal: Journal, start: int, end: int) -> Iterator[str]:
        for record, _, _ in journal.files.walk(start, end):
            self._go_on()
            if record.kind == ENTRY and any(section.piece for section in record.sections()):
                yield from record.control()["pieces"]


def _living(journal: Journal) -> Iterator[str]:
    """The handles that stage and are open somewhere; what is left of the others' locks goes."""
    system = journal.system
    for name in system.listdir(f"{journal.folder}/locks"):
        if not name.startswith(STAGING):
            continue
        owner = name.removeprefix(STAGING)
        path = staging_lock(journal.folder, owner)
        try:
            file = system.open(path)
        except FileNotFoundError:
            continue
        if file.try_lock():
            system.unlink(path)
        else:
            yield owner
        file.close()


def _end_of(journal: Journal, number: int) -> int:
    """Where a closed journal file ends, as the file behind it says."""
    following = journal.files.record(address_of(number + 1, 0))
    if following is not None:
        for file in Checkpoint.from_json(following.control()).files:
            if file.number == number:
                return address_of(number, file.end)
    raise journal.files.damage(address_of(number + 1, 0))
