"""What the log knows of its sealed files (`log.embedded.sealed`), and of what is gone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SealedFile:
    """Rows of one topic in an immutable file: all that the topic has in a range of positions."""

    name: str
    topic: int
    schema: int
    """The schema version under which all of its rows were written."""
    first: int
    """The position of its first row."""
    through: int
    """The position of its last row."""
    rows: int
    bytes: int
    checksum: int
    """Of the footer, which holds the checksums of all else."""
    time_first: int
    time_last: int
    starts: tuple[int, ...]
    """Of each partition the offset before which all rows are in earlier files, or gone."""
    compacted: bool = False
    archive: str = ""
    """Where it is, if not below the log's folder."""

    def to_json(self) -> dict[str, Any]:
        """As it stands in control records."""
        return {**asdict(self), "starts": list(self.starts)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SealedFile:
        """The inverse."""
        return cls(**{**data, "starts": tuple(data["starts"])})


@dataclass(frozen=True, slots=True)
class Trim:
    """What a topic no longer has."""

    since: int
    """The oldest position at which it is whole."""
    gone: int
    """All rows up to this position are gone."""
    starts: tuple[int, ...]
    """Of each partition the first offset that retention has left; compaction leaves gaps behind."""

    def to_json(self) -> dict[str, Any]:
        """As it stands in control records."""
        return {"since": self.since, "gone": self.gone, "starts": list(self.starts)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trim:
        """The inverse."""
        return cls(data["since"], data["gone"], tuple(data["starts"]))


@dataclass(slots=True)
class Sealed:
    """All sealed files of a log, folded from the entries that name them."""

    through: int = 0
    """Every row up to this position is in a sealed file, or gone; what comes after: the journal."""
    files: Mapping[str, SealedFile] = field(default_factory=dict)
    trims: Mapping[int, Trim] = field(default_factory=dict)

    def apply(self, control: Mapping[str, Any]) -> None:
        """Fold what one entry says; absolute, so twice is once."""
        files, trims = dict(self.files), dict(self.trims)
        for name in control.get("drop", ()):
            files.pop(name, None)
        for data in control.get("add", ()):
            files[data["name"]] = SealedFile.from_json(data)
        for topic, data in control.get("trim", {}).items():
            trims[int(topic)] = Trim.from_json(data)
        self.files, self.trims = files, trims
        self.through = max(self.through, control.get("through", 0))

    def of(self, topic: int) -> list[SealedFile]:
        """The files of a topic, in the order of their rows."""
        found = [one for one in self.files.values() if one.topic == topic]
        return sorted(found, key=lambda one: (one.first, one.through, one.name))

    def trim(self, topic: int) -> Trim | None:
        """What is gone of a topic, if anything."""
        return self.trims.get(topic)

    def copy(self) -> Sealed:
        """Another that can be folded on: what it holds is never changed in place."""
        return Sealed(self.through, self.files, self.trims)

    def to_json(self) -> dict[str, Any]:
        """As one control record that rebuilds it from nothing."""
        return {
            "through": self.through,
            "add": [one.to_json() for one in self.files.values()],
            "trim": {str(topic): trim.to_json() for topic, trim in self.trims.items()},
        }
