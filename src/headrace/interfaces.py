"""The promises between the parts, with their conformance suites: `headrace.testing`'s `*_suite`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import pyarrow as pa

from headrace.model.records import Piece, Receipt
from headrace.model.schema import Column, Schema
from headrace.model.topic import Topic


class Part:
    """Rows for one topic in an entry that is being made."""

    __slots__ = (
        "_taken_in",
        "headers",
        "partition",
        "rows",
        "sent_time",
        "staged",
        "topic",
        "transactions",
    )

    def __init__(
        self,
        topic: str,
        rows: Any,
        headers: Any = None,
        transactions: Sequence[int] | None = None,
        partition: int | None = None,
        sent_time: datetime | None = None,
    ) -> None:
        """`rows` may be an iterator: it is taken in once, by the log that the entry goes to."""
        self.topic = topic
        self.rows = rows
        self.headers = list(headers) if isinstance(headers, Iterator) else headers
        self.transactions = transactions
        self.partition = partition
        self.sent_time = sent_time
        self.staged: list[Piece] = []
        """Pieces that the log made of `rows` by itself: garbage unless the entry is taken."""
        self._taken_in: tuple[object, Any] | None = None

    def batch(self, schema: object, take_in: Any) -> Any:
        """The rows as `take_in` makes them for `schema`; once, and again for another schema."""
        if self._taken_in is None or self._taken_in[0] is not schema:
            rows = self.rows if self._taken_in is None else self._taken_in[1]
            self._taken_in = (schema, take_in(rows))
        return self._taken_in[1]


class EntryLog(Protocol):
    """What transactions, writers and producers ask of a log: entries, with three ways to end.

    `append_entry` returns a receipt; or raises `Conflict`: a condition failed, nothing was taken;
    or `Unknown`: it may have been taken or not; or any other error: it was not taken. Positions
    increase and are not promised dense.
    """

    @property
    def position(self) -> int:
        """The newest position that readers see."""

    def append_entry(
        self,
        parts: Sequence[Part],
        control: Mapping[str, Any],
        *,
        expect: Mapping[str, int],
        require: Mapping[str, int],
        durability: str | None = None,
    ) -> Receipt:
        """Append one entry: rows of any topics, control records, conditions; all or nothing."""

    def topic(self, name: str) -> Topic:
        """A topic by its name; `UnknownTopic` if there is none."""

    def check_part(self, part: Part) -> None:
        """Take the rows of a part in, raising what is wrong with them; nothing is written."""

    def taken_in(self, topic: str, rows: Any, headers: Any = None) -> pa.RecordBatch:
        """The rows as one batch of the topic's schema, raising what is wrong with them, too."""

    def counter(self, name: str) -> int:
        """The value of a counter; 0 if nobody moved it."""

    def value(self, name: str) -> Any:
        """A named value that an entry set; None if there is none."""


class KeyedTable(Protocol):
    """A topic read by key, at any position from the log's `since` on."""

    def get(
        self,
        keys: Any,
        *,
        at: int | None = None,
        columns: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """An Arrow table of the rows of these keys, with `_position` and `_index` on top."""

    def scan(
        self,
        *,
        at: int | None = None,
        columns: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """An Arrow reader of all rows in the order of their keys, with `_position` on top."""


# --- derived systems ------------------------------------------------------------------------------


@dataclass(frozen=True, order=True, slots=True)
class Cut:
    """What a follower shows: never anything between two cuts."""

    through: int
    """Captured tables and other inputs are as of this position; a token is compared with it."""
    position: int
    """Views are as of this position: a commit that says `through`. Without views, the same."""


@dataclass(frozen=True, slots=True)
class KeptTable:
    """A table of a target as it must be."""

    name: str
    topic: str
    columns: tuple[Column, ...]
    """Those of the topic that are not Headrace's own."""
    key: tuple[str, ...]
    """Empty: a multiset, since the topic has no key."""
    generation: int
    view: bool
    """A view of the follower's pipeline: as of the position of a cut, not of its `through`."""
    opaque: bool = False
    """Of a topic of keys and values without columns: a value that is null takes its key away."""

    @property
    def schema(self) -> pa.Schema:
        """The columns in Arrow's words."""
        return pa.schema([pa.field(column.name, column.type) for column in self.columns])

    def at(self, cut: Cut) -> int:
        """The position of the log that shows what the table holds at a cut."""
        return cut.position if self.view else cut.through

    def to_json(self) -> dict[str, Any]:
        """As a target keeps it beside the cut."""
        columns = Schema(1, self.generation, self.columns).to_json()["columns"]
        own = {"name": self.name, "topic": self.topic, "key": list(self.key), "view": self.view}
        more = {"opaque": True} if self.opaque else {}
        return {**own, "generation": self.generation, "columns": columns, **more}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KeptTable:
        """The inverse."""
        columns = Schema.from_json({"version": 1, **data}).columns
        key = tuple(data["key"])
        return cls(
            data["name"],
            data["topic"],
            columns,
            key,
            data["generation"],
            data["view"],
            data.get("opaque", False),
        )


@dataclass(frozen=True, slots=True)
class Mark:
    """What a target says of a follower; read together with rows it is of the same moment."""

    epoch: int
    cut: Cut | None
    """None: nothing is loaded yet."""
    log: str
    """The history (`EmbeddedLog.history`) that the cut is of; empty if there is no cut."""
    tables: tuple[KeptTable, ...]
    """As the target has them."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a cut does to one table."""

    table: KeptTable
    chunks: Callable[[], Iterator[pa.RecordBatch]]
    """The table's columns and `_weight`, in chunks; a later one counts over an earlier one. With a
    key: at most one row a key in each chunk, +1 it is this now, -1 it is gone. Without: rows that
    differ, and how many copies more or less. May be called again."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that a target does not take."""

    table: KeptTable
    row: dict[str, Any]
    weight: int
    reason: str
    code: str
    """As the target calls the reason, e.g. an SQLSTATE."""


Refuse = Callable[[list[Refused]], None]
Key = tuple[Any, ...]


class Target(Protocol):
    """A derived system, opened for one follower: five things it must do, each all or nothing.

    Whoever calls with an epoch that is not the last one claimed gets `Fenced`, and nothing happens.
    A target that cannot be reached raises `TargetAway`; then nothing is known of the call but what
    `mark` says after it. `refuse` is called once, before the call takes effect, with the rows that
    the target does not take (none, as a rule): what it raises ends the call with nothing done.
    """

    def mark(self, epoch: int | None = None, log: str = "") -> Mark:
        """How far it is. With an epoch above all before, and the log it is of: claim it first."""

    def apply(
        self, epoch: int, cut: Cut | None, changes: Sequence[Changes], refuse: Refuse
    ) -> None:
        """Make these changes and be at this cut; tables get the columns that changes come with.

        Without a cut: into what `wipe` has begun, seen by nobody; there a key comes once. What a
        schema change asks for and cannot be done is `TargetStopped`, with the statement to run.
        A cut that the target has passed is `CutPassed`; the cut that it is at is a repair. `chunks`
        are asked for when both were found right and nobody can change them until the end.
        """

    def read(
        self, table: KeptTable, *, after: Key | None = None, through: Key | None = None
    ) -> tuple[Mark, Iterator[pa.RecordBatch]]:
        """Rows with after < key <= through in the order of keys, and the mark of that moment.

        A multiset is in the order of `derived.rows.row_ids`, each copy a row, and these are its
        keys.
        """

    def wipe(self, epoch: int, tables: Sequence[KeptTable]) -> None:
        """Begin these tables anew, empty; what is visible stays until `swap`."""

    def swap(self, epoch: int, cut: Cut, changes: Sequence[Changes], refuse: Refuse) -> None:
        """Show what was loaded since `wipe` instead of what was there, and be at this cut.

        `changes` name the tables that stay, and are made to them as by `apply`. A table that is in
        neither is left alone from here on, and is no longer in the mark.
        """

    def close(self) -> None:
        """Let it go."""


class TargetDescriptor(Protocol):
    """Where a target is, as a pipeline file says it."""

    def open(self, follower: str) -> Target:
        """The target, for a follower of this name; `TargetAway` if it cannot be reached."""

    def describe(self) -> str:
        """For people: where it is, without secrets."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What one follower keeps: topics of a pipeline, all in one target."""

    pipeline: str
    name: str
    topics: Mapping[str, str]
    """Name of the table -> topic."""
    views: frozenset[str]
    """The topics that are views of the pipeline."""
    target: TargetDescriptor

    @property
    def follower(self) -> str:
        """The name of the follower."""
        return f"{self.pipeline}/{self.name}"
