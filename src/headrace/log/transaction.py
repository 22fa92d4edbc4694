"""A transaction: rows of several topics, committed offsets, counters, values; one entry."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from headrace import errors
from headrace.interfaces import EntryLog, Part
from headrace.model.fold import COUNTER_MAX, OWN_COUNTERS, check_counter, is_name
from headrace.model.records import Batch, Receipt

_JSON = json.JSONEncoder(allow_nan=False)


class Transaction:
    """Collects what belongs together; `with` commits it when its block ends without an error.

    Nothing is visible, and nothing is checked against the log, before the commit.
    """

    def __init__(self, log: EntryLog, *, durability: str | None = None) -> None:
        """Made by `log.transaction()`."""
        self._log = log
        self._durability = durability
        self._parts: list[Part] = []
        self._offsets: dict[str, dict[str, dict[int, int]]] = {}
        self._values: dict[str, Any] = {}
        self._expect: dict[str, int] = {}
        self._require: dict[str, int] = {}
        self._guards: dict[str, Callable[[errors.Conflict], errors.HeadraceError]] = {}
        self._over = False
        self.receipt: Receipt | None = None
        """Set by the commit."""

    def append(
        self,
        topic: str,
        rows: Any,
        *,
        headers: Any = None,
        transactions: Sequence[int] | None = None,
        partition: int | None = None,
        sent_time: datetime | None = None,
    ) -> None:
        """Add rows, or staged pieces; bad rows are refused here, and none of them is added."""
        self._refuse_if_over()
        part = Part(topic, rows, headers, transactions, partition, sent_time)
        self._log.check_part(part)
        self._parts.append(part)

    def commit_offsets(self, group: str, offsets: Batch | Mapping[str, Mapping[int, int]]) -> None:
        """Note how far a group has read: a batch read to its end, or topic -> partition -> next."""
        self._refuse_if_over()
        if not is_name(group):
            raise errors.BadSetting(f"{group!r} is not a group's name", place="group")
        if isinstance(offsets, Batch):
            offsets = {offsets.topic: offsets.ends}
        given: Any = offsets
        if not isinstance(given, Mapping) or not all(
            isinstance(of_topic, Mapping) for of_topic in given.values()
        ):
            raise errors.BadPosition(
                f"{offsets!r} are no offsets to commit",
                place=f"group '{group}'",
                fix="give a batch, or {'topic': {partition: offset}}",
            )
        committed = self._offsets.setdefault(group, {})
        for topic, of_topic in offsets.items():
            self._check_offsets(topic, of_topic)
            committed.setdefault(topic, {}).update(of_topic)

    def _check_offsets(self, topic: str, offsets: Mapping[int, int]) -> None:
        partitions = self._log.topic(topic).partitions
        for partition, offset in offsets.items():
            whole = type(partition) is int and type(offset) is int
            if not (whole and 0 <= partition < partitions and 0 <= offset < COUNTER_MAX):
                raise errors.BadPosition(
                    f"offset {offset!r} of partition {partition!r} cannot be committed",
                    place=f"topic '{topic}'",
                    why=f"its partitions are 0 to {partitions - 1}, and offsets begin at 0",
                    fix="commit the offset of the next row to read, e.g. batch.ends",
                )

    def put(self, name: str, value: Any) -> None:
        """Set a named value (JSON): a resume point, a manifest."""
        if str(name).startswith(OWN_COUNTERS):
            raise errors.ReservedName(
                f"value {name!r} belongs to Headrace",
                place="put",
                why=f"values that start with '{OWN_COUNTERS}' carry groups, writers and holds",
                fix="choose another name",
            )
        self.put_own(name, value)

    def put_own(self, name: str, value: Any) -> None:
        """Set a value, also one of Headrace's own: for those who know what it means."""
        self._refuse_if_over()
        if not is_name(name):
            fix = "give it a name that is text"
            raise errors.BadRows(f"{name!r} is not the name of a value", place="put", fix=fix)
        try:
            _JSON.encode(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise errors.BadRows(
                f"the value of '{name}' is not JSON: {error}",
                place=name,
                fix="give dicts, lists, text, finite numbers, booleans and None",
            ) from None
        self._values[name] = value

    def expect(self, name: str, value: int) -> None:
        """Commit only if the counter is `value`, and move it to `value + 1`."""
        self._refuse_if_over()
        check_counter(name, value)
        if name in self._expect:
            raise errors.BadRows(
                f"counter '{name}' is expected twice in one transaction", place=name
            )
        self._expect[name] = value

    def require(self, name: str, value: int) -> None:
        """Commit only if the counter is `value`; it stays."""
        self._refuse_if_over()
        check_counter(name, value)
        if self._require.setdefault(name, value) != value:
            raise errors.BadRows(
                f"counter '{name}' is required to be {self._require[name]} and {value}", place=name
            )

    def guard(
        self,
        counter: str,
        value: int,
        refused: Callable[[errors.Conflict], errors.HeadraceError],
    ) -> None:
        """Require a counter of Headrace's own; `refused` makes the error if it has moved."""
        self._refuse_if_over()
        self._require[counter] = value
        self._guards[counter] = refused

    @property
    def over(self) -> bool:
        """Whether it was committed, or will never be."""
        return self._over

    def commit(self) -> Receipt:
        """Append the entry; see `log.append` for how it can end."""
        self._refuse_if_over()
        self._over = True
        control: dict[str, Any] = {}
        if self._offsets:
            control["offsets"] = {
                group: {
                    topic: {str(partition): offset for partition, offset in offsets.items()}
                    for topic, offsets in topics.items()
                }
                for group, topics in self._offsets.items()
            }
        if self._values:
            control["values"] = self._values
        try:
            self.receipt = self._log.append_entry(
                self._parts,
                control,
                expect=self._expect,
                require=self._require,
                durability=self._durability,
            )
        except errors.Conflict as conflict:
            refused = self._guards.get(str(conflict.details.get("counter")))
            if refused is None:
                raise
            raise refused(conflict) from conflict
        return self.receipt

    def _refuse_if_over(self) -> None:
        """What is added after the end would be in no entry, and nobody would notice."""
        if self._over:
            raise errors.BadRows(
                "the transaction is over: it was committed, its commit failed, or its block did",
                place="transaction",
                why="a transaction is one entry, and is tried once",
                fix="begin another with log.transaction()",
            )

    def __enter__(self) -> Transaction:
        """For `with`."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Commit, unless the block raised or committed already."""
        if kind is None and not self._over and self.receipt is None:
            self.commit()
        self._over = True
