"""Which history a log's positions are of: its own, or, once restored, that of a backup first.

A log that was restored at position P shares its past with the log that the backup was made of, and
with nobody what comes after P: there the same positions mean other entries. Both have one log id,
which stands in every record. So a restore writes the file `restored.json` before the log exists: a
new name for what comes after P. Whoever keeps a position elsewhere (a follower in its target, a
client of a feed) keeps the name of the history with it, and `knows` tells whether the position is
in the past of this log.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from headrace import errors
from headrace.log.embedded.format import checksum
from headrace.log.embedded.system import System, os_errors

NAME = "restored.json"


@dataclass(frozen=True, slots=True)
class Histories:
    """Of one log: where each history ended, and the one that goes on."""

    ended: tuple[tuple[str, int], ...]
    """Name, and the last position that is of it; oldest first."""
    current: str

    def knows(self, history: str, position: int) -> bool:
        """Whether a position of a history is in the past of this log, if it is there at all."""
        return history == self.current or any(
            history == name and position <= through for name, through in self.ended
        )

    def restored(self, name: str, through: int) -> Histories:
        """After a restore at this position."""
        return Histories((*self.ended, (self.current, through)), name)

    def encode(self) -> bytes:
        """As `restored.json`."""
        content = {"ended": [list(one) for one in self.ended], "history": self.current}
        text = json.dumps(content)
        return json.dumps({**content, "checksum": f"{checksum(text.encode()):016x}"}).encode()


def histories(system: System, folder: str, log_id: bytes) -> Histories:
    """Those of a log; a log that was never restored has one, by the name of its id."""
    path = f"{folder}/{NAME}"
    with os_errors("reading the history", path):
        try:
            file = system.open(path)
        except FileNotFoundError:
            return Histories((), log_id.hex())
        data = file.pread(1 << 20, 0)
        file.close()
    try:
        content = json.loads(data)
        ended = tuple((str(name), int(through)) for name, through in content["ended"])
        found = Histories(ended, str(content["history"]))
    except (ValueError, KeyError, TypeError):
        found = Histories((), "")
    if found.encode() != data:
        raise errors.LogDamaged(
            f"{NAME} does not match its checksum",
            place=path,
            fix="put the file back from a backup, or restore the log again",
            file=path,
            offset=0,
            expected="the histories of the log and their checksum",
            found=data[:80].decode(errors="replace"),
        )
    return found
