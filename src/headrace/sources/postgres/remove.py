"""The end of a capture: its slot and publication are dropped, its topics and their rows stay.

The order is such that a failure in the middle can be tried again. First the capture is paused, so
that a running one lets go of the slot; then the server is tidied; only then is the name free again
in the log, in one entry that also fences a capture that did not hear of it. What is left there of
its state says which topics its tables have: added again, they are read anew and compared.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from headrace import errors
from headrace.sources.postgres import catalog
from headrace.sources.postgres import settings as asked
from headrace.sources.postgres.state import State, settings_name, writer_name

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog

WAIT_SECONDS = 15.0
"""How long a running capture may take to let go of its slot."""


def publication_name(name: str) -> str:
    """The publication of a capture that has not run yet."""
    return f"headrace_{name}"


def remove(
    log: EmbeddedLog, name: str, connection: psycopg.Connection[Any] | None
) -> tuple[list[str], list[str]]:
    """Remove a capture; what was dropped at the server, and what was left as somebody else's.

    `connection`: None for a server that is gone for good.
    """
    asked.update(log, name, paused=True)
    state = asked.saved_state(log, name)
    done = ([], []) if connection is None else _tidy(log, name, state, connection)
    writer = log.writer(writer_name(name))
    left = State.load(log, name)
    with writer.transaction(state=None if left is None else fresh(left, log).to_json()) as entry:
        for table, one in {} if left is None else left.unsaved(name).items():
            entry.put_own(table, one)
        entry.expect(settings_name(name), log.counter(settings_name(name)))
        gone = asked.Settings(asked.get(log, name).dsn, removed=True)
        entry.put(settings_name(name), gone.to_json())
    return done


def fresh(state: State, log: EmbeddedLog) -> State:
    """A state from which a capture begins anew, with the topics that its tables have."""
    there = {topic.name for topic in log.topics()}
    state.tables = {table: one for table, one in state.tables.items() if one.topic in there}
    for one in state.tables.values():
        one.read_again()
        one.fence = -1
        one.member = one.asked = one.oid = 0
    state.lsn, state.failed, state.ended = 0, "", ""
    return state


def _tidy(
    log: EmbeddedLog, name: str, state: State | None, connection: psycopg.Connection[Any]
) -> tuple[list[str], list[str]]:
    dropped, left = [], []
    if state is not None and _drop_slot(connection, name, state.slot):
        dropped.append(f"replication slot {state.slot}")
    publication = publication_name(name) if state is None else state.publication
    note = catalog.note(connection, publication)
    another = note is not None and note.log != log.journal.log_id.hex()
    if catalog.publication(connection, publication) is not None and not another:
        drop = sql.SQL("DROP PUBLICATION {}").format(sql.Identifier(publication))
        try:
            connection.execute(drop)
            dropped.append(f"publication {publication}")
        except psycopg.errors.InsufficientPrivilege:  # somebody else has made it for us
            left.append(f"publication {publication}")
    return dropped, left


def _drop_slot(connection: psycopg.Connection[Any], name: str, slot: str) -> bool:
    """Drop a slot when nobody reads from it any more; whether it was there."""
    until = time.monotonic() + WAIT_SECONDS
    while True:
        found = catalog.slot(connection, slot)
        if found is None:
            return False
        if not found.active:
            try:
                connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
            except psycopg.errors.ObjectInUse:
                continue
            return True
        if time.monotonic() > until:
            raise errors.SlotInUse(
                f"slot {slot} is in use by process {found.active_pid} of the server",
                place=f"capture '{name}', which is paused now",
                fix="stop the capture that runs, then remove it again",
            )
        time.sleep(0.1)
