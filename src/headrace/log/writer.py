"""A writer: a name that one process holds at a time, and that knows what it has stored.

Two counters carry it. `headrace/epoch/NAME` moves when somebody claims the name; every entry of the
writer *requires* the epoch it was given, so an older holder is fenced from its first entry on.
`headrace/writer/NAME` counts the entries stored; every entry *expects* the next number, so a retry
of what was stored is recognised, and nothing is stored twice. After a crash or an `Unknown` the
successor claims, and the claim itself, being an entry, comes after everything the dead holder got
in: what the counter says then is final.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from headrace import errors
from headrace.interfaces import EntryLog
from headrace.log.transaction import Transaction
from headrace.model.fold import OWN_COUNTERS, is_name
from headrace.model.records import Receipt


def state_counter(name: str) -> str:
    """The counter of a writer, under which its state is kept too (`log.value`)."""
    return f"{OWN_COUNTERS}writer/{name}"


class Writer:
    """Stores each of its entries once, however often it is retried."""

    def __init__(self, log: EntryLog, name: str) -> None:
        """Claim the name; made by `log.writer(name)`."""
        if not is_name(name):
            raise errors.BadSetting(f"{name!r} is not a writer's name", place="writer")
        self._log = log
        self.name = name
        self.counter = state_counter(name)
        self.epoch_counter = f"{OWN_COUNTERS}epoch/{name}"
        self.epoch = self._claim()
        self.version = log.counter(self.counter)
        """How many entries this name has stored: the version of the next one."""

    def _claim(self) -> int:
        while True:
            epoch = self._log.counter(self.epoch_counter)
            try:
                self._log.append_entry([], {}, expect={self.epoch_counter: epoch}, require={})
            except errors.Conflict:
                continue  # somebody else claims at the same time; the later claim holds
            return epoch + 1

    @property
    def state(self) -> Any:
        """What the last entry stored with `state=`: the resume point, part of the result."""
        return self._log.value(self.counter)

    def append(
        self,
        topic: str,
        rows: Any,
        *,
        version: int | None = None,
        state: Any = None,
        **options: Any,
    ) -> Receipt:
        """Append rows as the writer's next entry.

        `version`, if given, is the caller's own number of this entry: one below `writer.version`
        was stored before, and nothing is written (the receipt says `duplicate`). `state` is kept
        with the entry. Raises `Fenced` when a newer holder has claimed the name.
        """
        with self.transaction(version=version, state=state) as transaction:
            if transaction.receipt is None:
                transaction.append(topic, rows, **options)
        assert transaction.receipt is not None
        return transaction.receipt

    def taken_in(self, topic: str, rows: Any, headers: Any = None) -> pa.RecordBatch:
        """The rows as one batch of the topic's schema; raises what is wrong with them."""
        return self._log.taken_in(topic, rows, headers)

    def transaction(self, *, version: int | None = None, state: Any = None) -> Transaction:
        """A transaction that is the writer's next entry."""
        return WriterTransaction(self, self._log, version, state)


class WriterTransaction(Transaction):
    """A transaction whose commit moves its writer on."""

    def __init__(self, writer: Writer, log: EntryLog, version: int | None, state: Any) -> None:
        """Made by `writer.transaction()`."""
        super().__init__(log)
        self._writer = writer
        if version is not None and (type(version) is not int or version < 0):
            raise errors.BadSetting(
                f"{version!r} is not the version of an entry",
                place=f"writer '{writer.name}'",
                fix="number the entries from 0 on, or leave the version out",
            )
        if version is not None and version < writer.version:
            self.receipt = Receipt(log.position, 0, 0, duplicate=True)
            return
        if version is not None and version > writer.version:
            raise errors.Conflict(
                f"version {version} is not the next of writer '{writer.name}'",
                place=f"writer '{writer.name}'",
                counter=writer.counter,
                expected=version,
                found=writer.version,
            )
        self._require[writer.epoch_counter] = writer.epoch
        self._expect[writer.counter] = writer.version
        if state is not None:
            self.put_own(writer.counter, state)

    def commit(self) -> Receipt:
        """Append the entry, or say that a newer holder has the name."""
        writer = self._writer
        if self.receipt is not None and not self._over:  # it was stored before
            self._over = True
            return self.receipt
        try:
            receipt = super().commit()
        except errors.Conflict as conflict:
            if conflict.details.get("counter") != writer.epoch_counter:
                raise
            raise errors.Fenced(
                f"writer '{writer.name}' was claimed anew: this holder has epoch {writer.epoch},"
                f" the log {conflict.details.get('found')}",
                place=f"writer '{writer.name}'",
                counter=writer.epoch_counter,
                found=conflict.details.get("found"),
            ) from conflict
        writer.version += 1
        return receipt
