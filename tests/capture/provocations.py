"""The errors of a capture that is started again, provoked on a real server.

`tests/test_provoke_errors.py` walks through them with the others, `test_resume.py` one by one. Each
function is given a server and an empty database in it, and ends in the error of its code.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

import headrace as hr
from headrace.sources.postgres import catalog, resume
from headrace.sources.postgres.capture import Capture
from headrace.sources.postgres.remove import remove
from headrace.testing.postgres import Server, fresh_database

Provocation = Callable[[Server, str], None]
PUBLICATION = "hr_shop"
TABLE = ("public", "orders")


@dataclasses.dataclass
class Captured:
    """A database as a capture leaves it: a table, a publication, a slot, and what the log saved."""

    server: Server
    connection: psycopg.Connection[Any]
    saved: resume.Saved

    def __enter__(self) -> Captured:
        return self

    def __exit__(self, *exception: object) -> None:
        self.connection.close()

    def do(self, statement: str) -> None:
        self.connection.execute(statement.encode())

    def write(self) -> None:
        """Commit a change that the slot has to deliver."""
        self.do("insert into orders select coalesce(max(id), 0) + 1 from orders")

    def save(self, **changes: Any) -> None:
        """Let the log have everything up to now, and start as often as told."""
        confirmed = catalog.lsn(self.connection)
        self.saved = dataclasses.replace(self.saved, **({"confirmed": confirmed} | changes))

    def advance(self) -> None:
        """Move the slot to the end of the WAL."""
        self.do(f"select pg_replication_slot_advance('{self.saved.slot}', pg_current_wal_lsn())")

    @contextmanager
    def open_transaction(self) -> Iterator[None]:
        """Keep a transaction open, begun before now: the slot must keep the WAL from there on."""
        with self.server.connect(self.saved.database, autocommit=False) as writer:
            writer.execute("insert into other values (1)")
            self.save()
            yield

    def note(self) -> None:
        note = catalog.Note(self.saved.log, self.saved.starts, self.saved.confirmed)
        assert catalog.write_note(self.connection, PUBLICATION, note)

    def resume(self) -> None:
        check(self.connection, self.saved)


def check(connection: psycopg.Connection[Any], saved: resume.Saved) -> None:
    """Compare what was saved with the database of a connection."""
    resume.check(
        saved,
        catalog.identity(connection),
        catalog.lsn(connection),
        catalog.slot(connection, saved.slot),
        catalog.publication(connection, PUBLICATION),
        catalog.tables(connection, ["public.*"]),
        catalog.note(connection, PUBLICATION),
    )


def capture(server: Server, database: str) -> Captured:
    """Make what a capture makes, in an empty database, and look whether it could go on."""
    connection = server.connect(database)
    slot = f"hr_{database}"
    connection.execute("create table orders (id int primary key, what text)")
    connection.execute("create table other (id int primary key)")
    connection.execute("create publication hr_shop for table orders, other")
    connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    identity = catalog.identity(connection)
    publication = catalog.publication(connection, PUBLICATION)
    assert publication is not None
    saved = resume.Saved(
        log="6f1d",
        starts=1,
        system_id=identity.system_id,
        timeline=identity.timeline,
        database=identity.database,
        database_oid=identity.database_oid,
        slot=slot,
        publication=PUBLICATION,
        publication_oid=publication.oid,
        tables=publication.members,
        stopped=frozenset(),
        confirmed=catalog.lsn(connection),
    )
    captured = Captured(server, connection, saved)
    captured.resume()
    captured.write()
    captured.save()
    captured.note()
    captured.resume()
    return captured


def other_cluster(server: Server, database: str) -> None:
    with capture(server, database) as captured, Server() as other, other.connect() as connection:
        check(connection, captured.saved)


def other_database(server: Server, database: str) -> None:
    with capture(server, database) as captured, server.connect() as connection:
        check(connection, captured.saved)


def database_made_again(server: Server, database: str) -> None:
    with capture(server, database) as captured:
        server.drop_database(database)
        server.create_database(database)
        with server.connect(database) as connection:
            check(connection, captured.saved)


def other_timeline(server: Server, database: str) -> None:
    with Server() as own, fresh_database(own, database):
        with capture(own, database) as captured:
            saved = captured.saved
        own.stop()
        (own.data / "standby.signal").touch()
        own.start()
        with own.connect(database) as connection:
            connection.execute("select pg_promote()")
            check(connection, saved)


def server_put_back(server: Server, database: str) -> None:
    """The files of a stopped server are put back: same timeline, and the log is further."""
    with Server() as own, fresh_database(own, database):
        with capture(own, database) as captured:
            saved = captured.saved
        own.stop()
        backup = own.back_up("backup")
        own.start()
        with own.connect(database) as connection:
            for _ in range(3):
                connection.execute("insert into orders select max(id) + 1 from orders")
            connection.execute("select pg_switch_wal()")
            saved = dataclasses.replace(saved, confirmed=catalog.lsn(connection))
        own.kill()
        own.put_back(backup)
        own.start()
        with own.connect(database) as connection:
            check(connection, saved)


def slot_missing(server: Server, database: str) -> None:
    with capture(server, database) as captured:
        captured.do(f"select pg_drop_replication_slot('{captured.saved.slot}')")
        captured.resume()


def slot_made_again(server: Server, database: str) -> None:
    """At once, on a server that does nothing else: the smallest step there can be."""
    with capture(server, database) as captured:
        slot = captured.saved.slot
        captured.save()
        captured.do(f"select pg_drop_replication_slot('{slot}')")
        captured.do(f"select pg_create_logical_replication_slot('{slot}', 'pgoutput')")
        captured.resume()


def slot_made_again_elsewhere(server: Server, database: str) -> None:
    with capture(server, database) as captured, server.connect() as elsewhere:
        slot = captured.saved.slot
        captured.do(f"select pg_drop_replication_slot('{slot}')")
        elsewhere.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        try:
            captured.resume()
        finally:
            elsewhere.execute("select pg_drop_replication_slot(%s)", [slot])


def slot_of_another_kind(server: Server, database: str) -> None:
    with capture(server, database) as captured:
        slot = captured.saved.slot
        captured.do(f"select pg_drop_replication_slot('{slot}')")
        captured.do(f"select pg_create_physical_replication_slot('{slot}')")
        try:
            captured.resume()
        finally:
            captured.do(f"select pg_drop_replication_slot('{slot}')")


def slot_invalidated(server: Server, database: str) -> None:
    with capture(server, database) as captured:
        captured.do("alter system set max_slot_wal_keep_size = '1MB'")
        captured.do("select pg_reload_conf()")
        try:
            for _ in range(3):
                captured.write()
                captured.do("select pg_switch_wal()")
            captured.do("checkpoint")
            captured.resume()
        finally:
            captured.do("alter system reset max_slot_wal_keep_size")
            captured.do("select pg_reload_conf()")


def slot_in_use(server: Server, database: str) -> None:
    with (
        capture(server, database) as captured,
        server.connect(database, replication="database") as reader,
    ):
        start = f"START_REPLICATION SLOT {captured.saved.slot} LOGICAL 0/0 (proto_version '1', "
        reader.pgconn.exec_(f"{start} publication_names '{PUBLICATION}')".encode())
        captured.resume()


def slot_used_by_another_log(server: Server, database: str) -> None:
    with capture(server, database) as captured:
        catalog.write_note(captured.connection, PUBLICATION, catalog.Note("8aa0", 1, 0))
        captured.resume()


def name_of_another_log(server: Server, database: str) -> None:
    """Refused at its first start, and what it leaves behind when it is removed harms nobody."""
    with (
        server.connect(database) as connection,
        tempfile.TemporaryDirectory() as folder,
        hr.connect(f"{folder}/one") as one,
        hr.connect(f"{folder}/other") as other,
    ):
        connection.execute("create table orders (id int primary key)")
        Capture(one, "shop", server.dsn(database)).run("caught up")
        late = hr.capture(other, "shop", server.dsn(database))
        try:
            late.run("caught up")
        finally:
            assert remove(other, "shop", connection) == ([], [])
            connection.execute("insert into orders values (1)")
            Capture(one, "shop", server.dsn(database)).run("caught up")
            assert one.table("shop.public.orders").scan().read_all()["id"].to_pylist() == [1]


def log_restored_from_before_the_last_start(server: Server, database: str) -> None:
    with capture(server, database) as captured:
        backup = captured.saved
        captured.save(starts=2)
        captured.note()
        captured.write()
        captured.advance()
        captured.saved = backup
        captured.resume()


def log_restored_from_before_the_last_note(server: Server, database: str) -> None:
    with capture(server, database) as captured:
        backup = captured.saved
        captured.write()
        captured.save()
        captured.advance()
        captured.note()
        captured.saved = backup
        captured.resume()


def slot_advanced(server: Server, database: str) -> None:
    with capture(server, database) as captured, captured.open_transaction():
        captured.write()
        captured.advance()
        captured.resume()


def slot_read_by_another(server: Server, database: str) -> None:
    with capture(server, database) as captured, captured.open_transaction():
        captured.write()
        captured.do(
            f"select count(*) from pg_logical_slot_get_binary_changes('{captured.saved.slot}', "
            f"null, null, 'proto_version', '1', 'publication_names', '{PUBLICATION}')"
        )
        captured.resume()


def publication_dropped(server: Server, database: str) -> None:
    with capture(server, database) as captured:
        captured.do("drop publication hr_shop")
        captured.resume()


def publication_made_again(server: Server, database: str) -> None:
    with capture(server, database) as captured:
        captured.do("drop publication hr_shop")
        captured.write()
        captured.do("create publication hr_shop for table orders, other")
        captured.resume()


def table_left(server: Server, database: str) -> None:
    with capture(server, database) as captured:
        captured.do("alter publication hr_shop drop table orders")
        captured.resume()


def table_left_and_put_back(server: Server, database: str) -> None:
    with capture(server, database) as captured:
        captured.do("alter publication hr_shop drop table orders")
        captured.write()
        captured.do("alter publication hr_shop add table orders")
        captured.resume()


def table_filtered(server: Server, database: str) -> None:
    with capture(server, database) as captured:
        captured.do("alter publication hr_shop set table orders where (id > 5), other")
        members = catalog.publication(captured.connection, PUBLICATION)
        assert members is not None
        captured.save(tables=members.members)
        captured.resume()


def deletes_not_published(server: Server, database: str) -> None:
    with capture(server, database) as captured:
        captured.do("alter publication hr_shop set (publish = 'insert, update')")
        captured.resume()


def no_identity(server: Server, database: str) -> None:
    with capture(server, database) as captured:
        captured.do("alter table orders replica identity nothing")
        captured.resume()


def no_key_any_more(server: Server, database: str) -> None:
    with capture(server, database) as captured:
        captured.do("alter table orders drop constraint orders_pkey")
        captured.resume()


PROVOCATIONS: dict[str, list[Provocation]] = {
    "HR-CAPTURE-001": [other_cluster],
    "HR-CAPTURE-002": [other_database, database_made_again],
    "HR-CAPTURE-003": [other_timeline, server_put_back],
    "HR-CAPTURE-004": [slot_missing],
    "HR-CAPTURE-005": [slot_made_again, slot_made_again_elsewhere, slot_of_another_kind],
    "HR-CAPTURE-006": [slot_invalidated],
    "HR-CAPTURE-007": [slot_in_use, slot_used_by_another_log, name_of_another_log],
    "HR-CAPTURE-008": [
        log_restored_from_before_the_last_start,
        log_restored_from_before_the_last_note,
    ],
    "HR-CAPTURE-009": [slot_advanced, slot_read_by_another],
    "HR-CAPTURE-010": [publication_dropped, publication_made_again],
    "HR-CAPTURE-011": [
        *(table_left, table_left_and_put_back, table_filtered, deletes_not_published),
    ],
    "HR-CAPTURE-012": [no_identity, no_key_any_more],
}
