"""What is found before a capture is made: everything that stands in its way, with what helps.

Each fault is made on a real server, found, and where a statement says that it helps, it is run and
the fault must be gone. This can catch: a fault that is not found, a statement that is refused or
does not help, a finding where all is well, a need for rights that managed servers do not give. It
cannot catch what real poolers and managed servers do otherwise: the pooler is played by a proxy
that announces another process, as PgBouncer does. R-B1
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from headrace.sources.postgres import catalog
from headrace.sources.postgres.preflight import Finding, Wanted, findings, fix
from headrace.sources.postgres.prepare import patient, prepared, wanted
from headrace.testing.postgres import Server
from tests.capture.conftest import Database

WANTED = Wanted("hr_flight", "hr_flight", ("public.*",))


@pytest.fixture
def connection(database: Database) -> Iterator[psycopg.Connection[Any]]:
    with database.connect() as connection:
        connection.execute("create table orders (id int primary key, what text)")
        yield connection


def bad(connection: psycopg.Connection[Any], level: str = "error") -> dict[str, Finding]:
    """What is not well, by where it is."""
    found = findings(connection, WANTED)
    assert all(finding.why for finding in found if finding.level != "ok")
    return {finding.where: finding for finding in found if finding.level == level}


def repaired(connection: psycopg.Connection[Any]) -> None:
    """Run what is said to help; then all must be well."""
    for finding, refused in fix(connection, bad(connection).values()):
        assert not refused, finding
    assert bad(connection) == {}


def test_a_good_database_needs_its_publication_only(connection: psycopg.Connection[Any]) -> None:
    found = bad(connection)
    assert list(found) == ["publication hr_flight"]
    assert found["publication hr_flight"].statement == (
        'CREATE PUBLICATION "hr_flight" FOR TABLE ONLY "public"."orders" '
        "WITH (publish_via_partition_root = true)"
    )
    repaired(connection)
    shown = {finding.where: finding.what for finding in findings(connection, WANTED)}
    assert shown["wal_level"] == "logical"
    assert shown["server"] == "timeline 1"
    assert shown["max_replication_slots"] == "20 of 20 free"
    assert shown["table public.orders"] == "known by id"
    assert shown["publication hr_flight"] == "1 tables"
    assert bad(connection, "warning").keys() == {"max_slot_wal_keep_size"}


def test_the_server_s_settings() -> None:
    little = {
        "wal_level": "replica",
        "max_replication_slots": "1",
        "max_wal_senders": "0",
        "max_slot_wal_keep_size": "100MB",
        "idle_replication_slot_timeout": "1h",
        "wal_sender_timeout": "1s",
    }
    with Server(**little) as server:
        with server.connect() as connection:
            connection.execute("create table orders (id int primary key)")
            found = bad(connection)
            assert {where: one.restart for where, one in found.items()} == {
                "wal_level": True,
                "max_wal_senders": True,
                f"127.0.0.1:{server.port}": False,
                "publication hr_flight": False,
            }
            warned = bad(connection, "warning")
            assert {where: one.what for where, one in warned.items()} == {
                "max_slot_wal_keep_size": "100 MB",
                "idle_replication_slot_timeout": "3600 s",
                "wal_sender_timeout": "1000 ms",
            }
            for one in (*found.values(), *warned.values()):
                for statement in one.statements:
                    connection.execute(statement.encode())
        server.restart()
        with server.connect() as connection:
            assert bad(connection) == {}
            assert bad(connection, "warning").keys() == {"max_slot_wal_keep_size"}
            connection.execute("select pg_create_logical_replication_slot('taken', 'pgoutput')")
            assert bad(connection).keys() == {"max_replication_slots"}
            connection.execute("select pg_drop_replication_slot('taken')")
            connection.execute("select pg_create_logical_replication_slot('hr_flight', 'pgoutput')")
            assert bad(connection) == {}, "the capture's own slot takes no other one"


def test_a_standby() -> None:
    with Server() as server:
        server.stop()
        (server.data / "standby.signal").touch()
        server.start()
        with server.connect() as connection:
            assert bad(connection).keys() == {"server"}


def test_a_role_with_few_rights(connection: psycopg.Connection[Any], database: Database) -> None:
    connection.execute("create role few login")
    connection.execute("create schema hidden")
    connection.execute("create table hidden.t (id int primary key)")
    connection.execute("alter table orders enable row level security")
    wanted = Wanted("hr_flight", "hr_flight", ("*.*",))
    try:
        with database.connect(user="few") as few:
            found = [one for one in findings(few, wanted) if one.level == "error"]
            assert [(one.what, one.where) for one in found] == [
                ("may not replicate", "role few"),
                ("may not create", f"database {database.name}"),
                ("not there", "publication hr_flight"),
                ("role few may not read it", "table hidden.t"),
                ("role few may not read it", "table public.orders"),
                ("not all rows are seen", "table public.orders"),
            ]
            done = fix(few, found)
            assert [one for one, refused in done if refused] == found, "it cannot help itself"
            done = fix(connection, found)
            assert [one for one, refused in done if not refused] == found
        with database.connect(user="few") as few:
            found = [one for one in findings(few, wanted) if one.level == "error"]
            assert found == []
            found = [one for one in findings(few, wanted) if one.level == "warning"]
            assert [one.what for one in found] == ["no limit", "belongs to postgres"]
    finally:
        connection.execute("drop owned by few")
        connection.execute("drop role few")


@pytest.mark.parametrize(
    ("statements", "where"),
    [
        ("create publication hr_flight", "publication hr_flight"),
        (
            "create publication hr_flight for table orders with (publish = 'insert')",
            "publication hr_flight",
        ),
        (
            "create table parts (id int primary key) partition by hash (id);"
            "create table parts_0 partition of parts for values with (modulus 1, remainder 0);"
            "create publication hr_flight for table orders, parts",
            "publication hr_flight",
        ),
        (
            "create publication hr_flight for all tables;"
            "alter table orders replica identity nothing",
            "table public.orders",
        ),
        (
            "create publication hr_flight for all tables; create table plain (a int, b int)",
            "table public.plain",
        ),
        (
            "create publication hr_flight for all tables;"
            "create table late (a int primary key deferrable)",
            "table public.late",
        ),
        ("create publication hr_flight for table orders where (id > 3)", "table public.orders"),
        ("create publication hr_flight for table orders (id)", "table public.orders"),
        (
            "create table parts (id int) partition by hash (id);"
            "create table parts_0 partition of parts for values with (modulus 1, remainder 0);"
            "create publication hr_flight for all tables with (publish_via_partition_root = true)",
            "table public.parts",
        ),
        (
            "create table parts (id int primary key) partition by hash (id);"
            "create table parts_0 partition of parts for values with (modulus 1, remainder 0);"
            "alter table parts_0 replica identity nothing;"
            "create publication hr_flight for all tables with (publish_via_partition_root = true)",
            "table public.parts",
        ),
    ],
)
def test_tables_and_publications_are_put_right(
    statements: str, where: str, connection: psycopg.Connection[Any]
) -> None:
    for statement in statements.split(";"):
        connection.execute(statement.encode())
    assert bad(connection).keys() == {where}
    repaired(connection)


def test_a_unique_index_is_better_than_full_rows(connection: psycopg.Connection[Any]) -> None:
    connection.execute("create publication hr_flight for all tables")
    connection.execute("create table plain (a int not null, b int not null, c int)")
    connection.execute("create unique index wide on plain (a, b) include (c)")
    connection.execute("create unique index nullable on plain (c)")
    connection.execute("create unique index part on plain (a) where b > 0")
    found = bad(connection)["table public.plain"]
    assert found.statement == 'ALTER TABLE "public"."plain" REPLICA IDENTITY USING INDEX "wide"'
    repaired(connection)
    assert catalog.tables(connection, ["plain"])[0].identity == ("a", "b")
    assert "table public.plain" not in bad(connection, "warning")
    connection.execute("alter table plain replica identity full")
    warned = bad(connection, "warning")["table public.plain"]
    assert warned.what == "has no primary key"


def test_an_encoding_that_checks_nothing_is_told(postgres: Server) -> None:
    with postgres.connect() as control:
        control.execute("create database loose encoding 'SQL_ASCII' locale 'C' template template0")
        try:
            with psycopg.connect(patient(postgres.dsn("loose")), autocommit=True) as connection:
                warned = bad(connection, "warning")["encoding of the database"]
                assert warned.what == "SQL_ASCII"
        finally:
            control.execute("drop database loose with (force)")


@pytest.mark.parametrize(
    ("statements", "where", "what"),
    [
        ("create unlogged table u (id int primary key)", "table public.u", "is unlogged"),
        (
            "create foreign data wrapper w; create server s foreign data wrapper w;"
            "create table u (id int) partition by list (id); alter table u replica identity full;"
            "create foreign table u1 partition of u for values in (1) server s",
            "table public.u",
            "has a partition that is unlogged or foreign",
        ),
        (
            "select pg_create_physical_replication_slot('hr_flight')",
            "replication slot hr_flight",
            "is of physical replication, database any",
        ),
    ],
)
def test_what_no_statement_puts_right(
    statements: str, where: str, what: str, connection: psycopg.Connection[Any]
) -> None:
    connection.execute("create publication hr_flight for table orders")
    connection.execute(statements.encode())
    try:
        found = bad(connection)
        assert found[where].what == what
        assert found[where].statement is None
    finally:
        connection.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots "
            "where slot_type = 'physical'"
        )


def test_types_that_are_not_carried(connection: psycopg.Connection[Any]) -> None:
    connection.execute("create type pair as (a int, b int)")
    connection.execute("alter table orders add column two pair")
    assert bad(connection, "warning")["table public.orders"].what == (
        'column "two" is of type pair'
    )


def test_columns_that_differ_by_case_only(connection: psycopg.Connection[Any]) -> None:
    connection.execute('alter table orders add column "ID" int')
    assert bad(connection, "warning")["table public.orders"].what == 'column "ID" is there twice'


def test_tables_that_no_statement_helps(connection: psycopg.Connection[Any]) -> None:
    connection.execute("create table arrays(id int[] primary key); create table nothing()")
    found = bad(connection, "warning")["table public.arrays"]
    assert found.what == 'column "id" of its key is an array'
    found = bad(connection)["table public.nothing"]
    assert (found.what, found.statements) == ("has no columns", ())


def test_a_pattern_that_chooses_nothing(connection: psycopg.Connection[Any]) -> None:
    wanted = Wanted("s", "p", ("public.ordesr", "orders", "!public.x"))
    found = [one.where for one in findings(connection, wanted) if one.what == "chooses nothing"]
    assert found == ["pattern public.ordesr"]


def test_a_pooler_in_between(connection: psycopg.Connection[Any], database: Database) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=pool, args=(listener, database.server.port))
        thread.start()
        with database.connect(port=str(port), sslmode="disable", gssencmode="disable") as pooled:
            assert bad(pooled)[f"127.0.0.1:{port}"].what == "a pooler is in between"
        thread.join(20)


def pool(listener: socket.socket, port: int) -> None:
    """Pass one connection on, and announce another process than the server's."""
    client, _ = listener.accept()
    with client, socket.create_connection(("127.0.0.1", port)) as server:
        back = threading.Thread(target=copy, args=(client, server))
        back.start()
        start = b""
        while (at := start.find(b"K\0\0\0\x0c")) < 0 or len(start) < at + 13:
            start += server.recv(65536)
        client.sendall(start[: at + 5] + struct.pack(">i", 4711) + start[at + 9 :])
        copy(server, client)
        back.join(20)


def copy(source: socket.socket, target: socket.socket) -> None:
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


def test_each_refusal_belongs_to_its_finding(database: Database) -> None:
    """A table with two faults, and a role that may mend neither."""
    role = f"poor_{database.name}"
    with database.connect() as connection:
        connection.execute(f"create role {role} login; create table t(id int)")
        try:
            with database.connect(user=role) as poor:
                found, refused = prepared(poor, wanted("shop", ("t",)), fix=True)
            assert {one.what for one in found if one.where == "table public.t"} == {
                f"role {role} may not read it", "has no replica identity"
            }  # fmt: skip
            assert "permission denied" in refused[f"table public.t: role {role} may not read it"]
            assert "must be owner" in refused["table public.t: has no replica identity"]
        finally:
            connection.execute(f"drop role {role}")


def test_what_a_generated_column_forbids(connection: psycopg.Connection[Any]) -> None:
    """Statements that would make updates fail are not proposed."""
    connection.execute("create table g(a int, k int generated always as (a) stored primary key)")
    connection.execute("create table f(a int primary key, k int generated always as (a) stored)")
    connection.execute("alter table f replica identity full")
    found = bad(connection)
    newer = connection.info.server_version >= 180000
    full = 'ALTER TABLE "public"."g" REPLICA IDENTITY FULL'
    assert found["table public.g"].statement == (None if newer else full)
    if newer:
        default = 'ALTER TABLE "public"."f" REPLICA IDENTITY DEFAULT'
        assert found["table public.f"].statement == default
