"""The promises between the parts. Each has a conformance suite in `headrace.testing`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from headrace.model.records import Piece, Receipt


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
        self.headers = headers
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

    def check_part(self, part: Part) -> None:
        """Take the rows of a part in, raising what is wrong with them; nothing is written."""

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
