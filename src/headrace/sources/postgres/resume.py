"""Whether a capture may go on where its log ends: what was saved against what is there. Pure.

R-B3 asks for a refusal with a name wherever changes could be lost. PostgreSQL does not help here:
asked for an older position than the slot's, it silently begins at the slot's (since version 15);
without its publication it sends nothing, with a warning in its own log (since version 18). So at
each start everything is compared, and what differs has its own error; the publication is looked at
while the capture runs too.

**The rule of positions.** A capture confirms to the slot only what its log has on disk. So the
slot's confirmed position is never after the log's. (It may be before: the server writes it down
lazily, and goes back when it crashes.) This holds also for the positions of keepalives: a capture
must save them in the log before it confirms them. A slot that is after the log has lost changes for
us, and there are three ways to get there:

- *The log is older than it was* (`LogRestored`). The log cannot know: a restored log is sound and
  whole, only old. But the capture's note in the database knows (`catalog`): the note is written
  after the log has synced what it says, so a note that counts more starts than the log, or names a
  later position, proves that this log once was further. It is written once a minute: a backup made
  after the last note is not recognised, and is then taken for one of the others.
- *The slot was dropped and made again* (`SlotRecreated`). Nothing in a slot tells its birth. But a
  new slot keeps no WAL from before it, so its `restart` is not before the log's position, and the
  server's statistics have no transaction that was streamed from it. (A slot that somebody has moved
  on that far looks the same if the server has crashed since: then its statistics are lost.)
- *Somebody has moved the slot* (`SlotAhead`): everything else.

All three mean the same for the data, so a confusion of them harms the advice, not the refusal.

**Two captures on one slot** at the same time are refused by the server; we say it before it does.
Two that take turns are seen by the note, which then has the id of another log. A new capture of a
name that another log has in this database is refused before it makes anything (`check_new`).

**Gone and back again.** What was not published when it was written never comes. A publication, or
the entry of a table in it, that was dropped and made again is known by its oid. A table that is
published by its schema, or with all others, has the entry of those.

A table that is no longer there at all is a change of the schema, and not judged here. One that has
lost its replica identity is refused, so that somebody hears of it; one that was stopped for that by
a running capture, or for anything else, is not: the others go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace import errors
from headrace.sources.postgres.catalog import (
    Identity,
    Note,
    Publication,
    SlotState,
    TableInfo,
    TableName,
    identifier,
    lsn_text,
    quoted,
)

PLUGIN = "pgoutput"


@dataclass(frozen=True)
class Saved:
    """What the log knows of the server, saved with the data."""

    log: str
    """The log's id."""
    starts: int
    """How often this capture was started, the coming start not counted."""
    system_id: str
    timeline: int
    database: str
    database_oid: int
    slot: str
    publication: str
    publication_oid: int
    tables: Mapping[TableName, int]
    """Those captured, with their entries as in `Publication.members`."""
    stopped: frozenset[TableName]
    """Those of them that are stopped, and have said why."""
    confirmed: int
    """The end of the last transaction, or a later position without one, that the log has."""


def check(
    saved: Saved,
    identity: Identity,
    position: int,
    slot: SlotState | None,
    publication: Publication | None,
    tables: Iterable[TableInfo],
    note: Note | None,
) -> None:
    """Raise the error that says why the capture may not go on; `position` is the server's WAL."""
    _check_server(saved, identity, position)
    _check_slot(saved, identity, slot, note)
    tables = list(tables)
    check_publication(saved, publication, tables)
    for table in tables:
        name = (table.schema, table.name)
        if name in saved.tables and name not in saved.stopped:
            _check_identity(table)


def check_new(publication: str, log: str, note: Note | None, slots: Iterable[str]) -> None:
    """Raise that the publication of a new capture serves another log's, which has one of the slots.

    They would write each other's notes, and who is removed first takes it away from the other.
    """
    slots = list(slots)
    if note and note.log != log and slots:
        drop = "; ".join(f"SELECT pg_drop_replication_slot('{slot}')" for slot in slots)
        raise errors.SlotInUse(
            f"publication '{publication}' serves a capture of log {note.log}, this is log {log}",
            place=f"replication slot {', '.join(slots)}",
            why="a capture has a slot and a publication of its own, named after it",
            fix="give this capture another name; if that log is gone for good, drop what it has "
            f"left: {drop}; DROP PUBLICATION {identifier(publication)}",
        )


def _check_server(saved: Saved, identity: Identity, position: int) -> None:
    place = f"database {identity.database}"
    if identity.system_id != saved.system_id:
        raise errors.OtherCluster(
            f"the server is {identity.system_id}, the log has captured {saved.system_id}",
            place=place,
        )
    if identity.database_oid != saved.database_oid:
        raise errors.OtherDatabase(
            f"the database is '{identity.database}' (oid {identity.database_oid}), "
            f"the log has captured '{saved.database}' (oid {saved.database_oid})",
            place=place,
        )
    if identity.timeline != saved.timeline:
        raise errors.OtherTimeline(
            f"the server is on timeline {identity.timeline}, the log on {saved.timeline}",
            place=place,
        )
    if position < saved.confirmed:
        raise errors.OtherTimeline(
            f"the server has written up to {lsn_text(position)} only, "
            f"the log has changes up to {lsn_text(saved.confirmed)}",
            place=place,
            why="the server's files were put back to an earlier state",
        )


def _check_slot(
    saved: Saved, identity: Identity, slot: SlotState | None, note: Note | None
) -> None:
    place = f"replication slot {saved.slot}"
    if slot is None:
        raise errors.SlotMissing(f"replication slot '{saved.slot}' is gone", place=place)
    if slot.plugin != PLUGIN or slot.database != identity.database:
        kind = f"for {slot.plugin} in database '{slot.database}'" if slot.plugin else "physical"
        raise errors.SlotRecreated(
            f"replication slot '{slot.name}' is now {kind}",
            place=place,
            why=f"the capture's slot was for {PLUGIN} in database '{identity.database}'",
        )
    if slot.invalidation_reason or slot.confirmed_flush is None:
        raise errors.SlotInvalidated(
            f"the server has given up replication slot '{slot.name}': "
            f"{slot.invalidation_reason or 'it has no position'}",
            place=place,
        )
    if slot.active:
        raise errors.SlotInUse(
            f"replication slot '{slot.name}' is used by process {slot.active_pid} of the server",
            place=place,
            pid=slot.active_pid,
        )
    if note and note.log != saved.log:
        raise errors.SlotInUse(
            f"publication '{saved.publication}' was last used by log {note.log}, "
            f"this is log {saved.log}",
            place=place,
            why="two logs that take turns with one slot each get a part of the changes",
            fix="give each capture a slot and a publication of its own",
        )
    if slot.confirmed_flush > saved.confirmed:
        _say_why_ahead(saved, slot, slot.confirmed_flush, note)


def _say_why_ahead(saved: Saved, slot: SlotState, at: int, note: Note | None) -> None:
    place = f"replication slot {saved.slot}"
    log = lsn_text(saved.confirmed)
    if note and (note.starts > saved.starts or note.confirmed > saved.confirmed):
        raise errors.LogRestored(
            f"the log ends at {log} after {saved.starts} starts, but once had "
            f"{lsn_text(note.confirmed)} after {note.starts}; the slot is at {lsn_text(at)}",
            place=place,
        )
    if slot.restart is not None and slot.restart >= saved.confirmed and not slot.decoded:
        raise errors.SlotRecreated(
            f"replication slot '{slot.name}' keeps the WAL from {lsn_text(slot.restart)} on, "
            f"the log ends at {log}",
            place=place,
        )
    raise errors.SlotAhead(
        f"replication slot '{slot.name}' is at {lsn_text(at)}, the log ends at {log}", place=place
    )


def check_publication(
    saved: Saved, publication: Publication | None, tables: Iterable[TableInfo]
) -> None:
    """The part of it that can happen at any time, and is looked for while a capture runs too."""
    place = f"publication {saved.publication}"
    if publication is None:
        raise errors.PublicationDropped(f"publication '{saved.publication}' is gone", place=place)
    if saved.tables and publication.oid != saved.publication_oid:
        raise errors.PublicationDropped(
            f"publication '{saved.publication}' was dropped and made again", place=place
        )
    unpublished = [
        name
        for name in ("insert", "update", "delete", "truncate")
        if not getattr(publication, name)
    ]
    if unpublished:
        raise errors.TableLeftPublication(
            f"publication '{saved.publication}' does not publish {', '.join(unpublished)}",
            place=place,
            fix=f"ALTER PUBLICATION {identifier(saved.publication)} SET (publish = "
            "'insert, update, delete, truncate'), then read the tables anew",
        )
    for table in tables:
        name = (table.schema, table.name)
        _check_root(table, publication)
        _check_whole(table, publication)
        if name in saved.tables and name not in saved.stopped:  # it is read anew, if ever
            _check_table(table, publication, saved.tables[name])


def _check_table(table: TableInfo, publication: Publication, member: int) -> None:
    name = (table.schema, table.name)
    place = f"table {table.schema}.{table.name}"
    if name not in publication.tables:
        raise errors.TableLeftPublication(
            f"publication '{publication.name}' does not have table {table.schema}.{table.name}",
            place=place,
        )
    if publication.members[name] != member:
        raise errors.TableLeftPublication(
            f"table {table.schema}.{table.name} was taken out of publication "
            f"'{publication.name}' and put back",
            place=place,
            fix="read the table anew: headrace capture snapshot NAME TABLE",
        )


def _check_root(table: TableInfo, publication: Publication) -> None:
    """The changes of a partitioned table come under its name, or under those of its partitions."""
    if table.partitioned and not publication.via_root:
        raise errors.TableLeftPublication(
            f"publication '{publication.name}' has the partitions of {table.schema}.{table.name}, "
            "not the table",
            place=f"table {table.schema}.{table.name}",
            fix=f"ALTER PUBLICATION {identifier(publication.name)} SET "
            "(publish_via_partition_root = true), then read the table anew: "
            "headrace capture snapshot NAME TABLE",
        )


def _check_whole(table: TableInfo, publication: Publication) -> None:
    """Whatever was before: what a filter or a list of columns holds back would be missing."""
    name = (table.schema, table.name)
    if name in publication.filtered:
        alter = f"ALTER PUBLICATION {identifier(publication.name)}"
        raise errors.TableLeftPublication(
            f"publication '{publication.name}' has a row filter or a list of columns on "
            f"{table.schema}.{table.name}",
            place=f"table {table.schema}.{table.name}",
            fix=f"{alter} DROP TABLE ONLY {quoted(name)}; {alter} ADD TABLE ONLY {quoted(name)}; "
            "then read the table anew: headrace capture snapshot NAME TABLE",
        )


def _check_identity(table: TableInfo) -> None:
    name = (table.schema, table.name)
    if not table.identity:
        fix = f"ALTER TABLE {quoted(name)} REPLICA IDENTITY "
        fix += "DEFAULT" if table.key else "FULL, or give it a primary key"
        if table.replica_identity == "f" and not table.key:  # its columns do not allow that
            fix = f"give table {quoted(name)} a primary key"
        raise errors.NoReplicaIdentity(
            f"table {table.schema}.{table.name} has no replica identity",
            place=f"table {table.schema}.{table.name}",
            fix=fix,
        )
