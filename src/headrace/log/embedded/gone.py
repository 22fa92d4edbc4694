"""Where rows stood that retention took, so that a reader is told exactly what it has missed.

Who goes on behind position P has read everything up to it. Which offsets it has missed follows from
what P was in offsets, and the rows that say so are gone. So the keeper writes it down when it lets
files go: a file a topic, `gone/ID`, with position, partition and next offset of each run of rows,
the newest `RUNS_KEPT` of them. Nothing but the words of an error depends on it: where the file is
missing, damaged, or has forgotten P, that is said, and the range begins where the topic did.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace import errors
from headrace.log.embedded.archive import open_sealed
from headrace.log.embedded.format import checksum
from headrace.log.embedded.journal import Journal
from headrace.model.sealed import SealedFile, Trim
from headrace.model.topic import Topic

FOLDER = "gone"
RUNS_KEPT = 250_000
"""Some 5 MB in memory, less than 1 MB on the disk."""
PLACES = np.dtype([("position", "<u8"), ("next", "<u8"), ("partition", "<u4")])
_codec = pa.Codec("zstd")


@dataclass(frozen=True, slots=True)
class Gone:
    """What is known of the rows of a topic that went."""

    after: int
    """From here on; before it is forgotten."""
    starts: tuple[int, ...]
    """The next offset of each partition there."""
    places: npt.NDArray[Any]

    @property
    def through(self) -> int:
        """The last position that is known."""
        return int(self.places["position"][-1]) if len(self.places) else self.after

    def offsets(self, position: int) -> list[int]:
        """The next offset of each partition after a position, not before `after`."""
        found = np.array(self.starts, np.uint64)
        past = self.places[: np.searchsorted(self.places["position"], position, "right")]
        found[past["partition"]] = past["next"]
        return [int(offset) for offset in found]

    def only_newest(self, count: int) -> Gone:
        """Without the oldest places, but with all of each position."""
        if len(self.places) <= count:
            return self
        after = int(self.places["position"][-count - 1])
        left = self.places[np.searchsorted(self.places["position"], after, "right") :]
        return Gone(after, tuple(self.offsets(after)), left)

    def encode(self) -> bytes:
        """As it is kept: a checksum, the length of what tells how to read the rest, and that."""
        data = self.places.tobytes()
        told = {"after": self.after, "starts": self.starts, "bytes": len(data)}
        head = json.dumps(told).encode()
        body: bytes = len(head).to_bytes(4, "little") + head + _codec.compress(data, asbytes=True)
        return checksum(body).to_bytes(8, "little") + body

    @classmethod
    def decode(cls, content: bytes) -> Gone | None:
        """The inverse; None if it is not what was written."""
        body = content[8:]
        if len(content) < 12 or checksum(body).to_bytes(8, "little") != content[:8]:
            return None
        end = 4 + int.from_bytes(body[:4], "little")
        told = json.loads(body[4:end])
        data = _codec.decompress(body[end:], told["bytes"], asbytes=True)
        return cls(told["after"], tuple(told["starts"]), np.frombuffer(data, PLACES))


def of(journal: Journal, topic: Topic, trim: Trim) -> Gone:
    """What is known of the rows of a topic that are gone; at least where what is held begins."""
    found = None
    with contextlib.suppress(OSError):
        file = journal.system.open(_path(journal, topic))
        found = Gone.decode(file.pread(file.size(), 0))
        file.close()
    whole = found is not None and found.through >= trim.gone
    return found if found and whole else Gone(trim.gone, trim.starts, _none())


def remember(
    journal: Journal,
    topic: Topic,
    going: Sequence[SealedFile],
    ends: Sequence[Sequence[int]],
    old: Trim | None,
) -> None:
    """Write down where the rows of files stood that are about to go.

    `ends`: of each file, where each partition goes on behind it. `old`: what was gone before.
    """
    found = of(journal, topic, old or Trim(0, 0, (0,) * topic.partitions))
    for file, end in zip(going, ends, strict=True):
        try:
            reader = open_sealed(journal.system, journal.folder, file)
        except (errors.LogDamaged, errors.IoFailed):  # damaged: what comes behind it is known
            found = Gone(file.through, tuple(end), _none())
            continue
        places = [_places(group.spans, group.runs) for group in reader.groups()]
        reader.close()
        new = np.concatenate([_none(), *places])
        joined = np.concatenate([found.places, new[new["position"] > found.through]])
        found = Gone(found.after, found.starts, joined).only_newest(RUNS_KEPT)
    path = _path(journal, topic)
    with contextlib.suppress(OSError):  # a full disk: that rows go matters more than this
        journal.system.mkdir(f"{journal.folder}/{FOLDER}")
        target = journal.system.create(f"{path}.new", 0)
        try:
            target.pwritev([found.encode()], 0)
        finally:
            target.close()
        journal.system.rename(f"{path}.new", path)


def forget(journal: Journal, topic: Topic) -> None:
    """Remove what was written down of a topic that is deleted."""
    journal.system.unlink(_path(journal, topic))


def _places(spans: npt.NDArray[Any], runs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    found = np.zeros(len(runs), PLACES)
    found["position"] = np.repeat(spans["position"], spans["runs"])
    found["partition"] = runs["partition"]
    found["next"] = runs["base"] + runs["rows"]
    return found


def _none() -> npt.NDArray[Any]:
    return np.zeros(0, PLACES)


def _path(journal: Journal, topic: Topic) -> str:
    return f"{journal.folder}/{FOLDER}/{topic.id}"
