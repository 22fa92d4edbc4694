"""What the server is asked about itself, against a real one.

This can catch: a query that is wrong for partitions, quoted names, dropped columns, domains, fast
defaults, or for a role with few rights. It cannot catch what older versions answer: the package has
one version only.
"""

from __future__ import annotations

import dataclasses

import pytest

from headrace.sources.postgres import catalog
from headrace.testing.postgres import Server
from tests.capture.conftest import Database


def test_positions_are_read_and_written() -> None:
    assert catalog.lsn_number("16/B374D848") == 0x16B374D848
    assert catalog.lsn_text(0x16B374D848) == "16/B374D848"
    assert catalog.lsn_text(0x1500000001) == "15/1"


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["public.*"], "orders tmp_1 Odd a[1] a1"),
        (["orders"], "orders"),
        (["public.*", "!public.tmp_*"], "orders Odd a[1] a1"),
        (["!public.tmp_*", "*.*"], "orders Odd a[1] a1 shop"),
        (["shop.orders"], "shop"),
        (["*.orders"], "orders shop"),
        (["!public.*"], ""),
        (["public.odd"], ""),
        (["public.a[1]", "[Oo]dd"], "a[1]"),  # brackets are part of a name
    ],
)
def test_patterns_choose_tables(patterns: list[str], names: str) -> None:
    tables = {
        "orders": ("public", "orders"),
        "tmp_1": ("public", "tmp_1"),
        "Odd": ("public", "Odd"),
        "a[1]": ("public", "a[1]"),
        "a1": ("public", "a1"),
        "shop": ("shop", "orders"),
    }
    assert {n for n, table in tables.items() if catalog.chosen(table, patterns)} == set(
        names.split()
    )


def test_names_are_quoted() -> None:
    assert catalog.quoted(("public", "user")) == '"public"."user"'
    assert catalog.quoted(("Shop", 'a"b')) == '"Shop"."a""b"'


def test_identity_and_position(database: Database) -> None:
    with database.connect() as connection:
        found = catalog.identity(connection)
        assert int(found.system_id) > 0
        assert (found.timeline, found.database) == (1, database.name)
        assert found.database_oid > 0
        assert found.version >= 180000
        before = catalog.lsn(connection)
        connection.execute("select pg_logical_emit_message(true, 'a', 'b')")
        assert catalog.lsn(connection) > before
        assert catalog.identity(connection) == found


def test_the_timeline_is_the_new_one_at_once_after_a_promotion() -> None:
    with Server() as server:
        server.stop()
        (server.data / "standby.signal").touch()
        server.start()
        with server.connect() as connection:
            assert catalog.identity(connection).timeline == 1
            assert catalog.lsn(connection) > 0
            connection.execute("select pg_promote()")
            assert catalog.identity(connection).timeline == 2


def test_a_slot(database: Database) -> None:
    with database.connect() as connection:
        assert catalog.slot(connection, "cat") is None
        connection.execute("select pg_create_logical_replication_slot('cat', 'pgoutput')")
        found = catalog.slot(connection, "cat")
        assert found is not None
        assert dataclasses.replace(found, confirmed_flush=None, restart=None) == catalog.SlotState(
            name="cat",
            plugin="pgoutput",
            database=database.name,
            active=False,
            active_pid=None,
            confirmed_flush=None,
            restart=None,
            wal_status="reserved",
            invalidation_reason=None,
            two_phase=False,
            failover=False,
        )
        assert found.restart is not None
        assert found.confirmed_flush is not None
        assert found.restart <= found.confirmed_flush <= catalog.lsn(connection)


def test_a_publication(database: Database) -> None:
    with database.connect() as connection:
        assert catalog.publication(connection, "p") is None
        connection.execute("create table a (id int primary key, b int)")
        connection.execute('create table "B" (id int primary key)')
        connection.execute(
            'create publication p for table a where (id > 0), "B" with (publish = insert)'
        )
        found = catalog.publication(connection, "p")
        assert found is not None
        assert set(found.members) == {("public", "a"), ("public", "B")}
        assert min(found.members.values()) > 0
        a = catalog.table(connection, ("public", "a"))
        assert a is not None
        assert found.member(a) == found.members["public", "a"]
        assert found.member(dataclasses.replace(a, oid=1)) == 0  # another table of the name
        assert dataclasses.replace(found, oid=0, members={}, oids={}) == catalog.Publication(
            name="p",
            oid=0,
            owner="postgres",
            tables=frozenset([("public", "a"), ("public", "B")]),
            members={},
            all_tables=False,
            via_root=False,
            insert=True,
            update=False,
            delete=False,
            truncate=False,
            filtered=frozenset([("public", "a")]),
        )


def test_all_tables_are_those_there_are_now(database: Database) -> None:
    with database.connect() as connection:
        connection.execute(
            "create publication p for all tables with (publish_via_partition_root = true)"
        )
        connection.execute("create table part (id int primary key) partition by hash (id)")
        connection.execute(
            "create table part_0 partition of part for values with (modulus 1, remainder 0)"
        )
        found = catalog.publication(connection, "p")
        assert found is not None
        assert found.all_tables
        assert found.tables == {("public", "part")}
        assert found.members == {("public", "part"): found.oid}


def test_the_note_is_left_and_read_and_never_in_place_of_a_persons_words(
    database: Database,
) -> None:
    note = catalog.Note("log-7", 3, 0x16B374D848)
    with database.connect() as connection:
        assert not catalog.write_note(connection, "p", note)
        connection.execute('create publication "P p"')
        assert catalog.note(connection, "P p") is None
        assert catalog.write_note(connection, "P p", note)
        assert catalog.note(connection, "P p") == note
        newer = dataclasses.replace(note, starts=4)
        assert catalog.write_note(connection, "P p", newer)
        assert catalog.note(connection, "P p") == newer
        connection.execute("""comment on publication "P p" is 'headrace is used here'""")
        assert not catalog.write_note(connection, "P p", note)
        assert catalog.note(connection, "P p") is None
        connection.execute('comment on publication "P p" is null')
        connection.execute("create role reader login")
        try:
            with database.connect(user="reader") as reader:
                assert not catalog.write_note(reader, "P p", note)
        finally:
            connection.execute("drop role reader")


def test_a_table_with_its_columns(database: Database) -> None:
    with database.connect() as connection:
        connection.execute("create domain amount as numeric(12, 2)")
        connection.execute(
            "create table t (b text, gone int, a int not null default 7, "
            "g int generated always as (a + 1) stored, c amount, d varchar(9)[], "
            "primary key (a, b))"
        )
        connection.execute("insert into t values ('x')")
        connection.execute("alter table t drop column gone")
        connection.execute("""alter table t add column e text default 'a,"{b'""")
        connection.execute("alter table t add column f int[] default '{1,null}'")
        (table,) = catalog.tables(connection, ["public.t"])
    assert (table.schema, table.name, table.key) == ("public", "t", ("a", "b"))
    assert table.identity == ("a", "b")
    assert table.replica_identity == "d"
    assert table.rows == -1
    assert table.selectable
    assert not table.partitioned
    assert not table.unlogged
    shown = [
        (
            one.name,
            one.number,
            one.type.name,
            one.not_null,
            one.has_default,
            one.missing,
            one.generated,
        )
        for one in table.columns
    ]
    assert shown == [
        ("b", 1, "text", True, False, None, ""),
        ("a", 3, "int4", True, True, None, ""),
        ("g", 4, "int4", False, False, None, "s"),
        ("c", 5, "amount", False, False, None, ""),
        ("d", 6, "_varchar", False, False, None, ""),
        ("e", 7, "text", False, True, 'a,"{b', ""),
        ("f", 8, "_int4", False, True, "{1,NULL}", ""),
    ]
    by_name = {one.name: one for one in table.columns}
    domain = by_name["c"].type
    assert domain.kind == "d"
    assert domain.base is not None
    assert domain.base.name == "numeric"
    assert domain.base_modifier == (12 << 16 | 2) + 4
    array = by_name["d"]
    assert array.type.element is not None
    assert array.type.element.name == "varchar"
    assert array.modifier == 9 + 4


@pytest.mark.parametrize(
    ("statement", "kind", "columns"),
    [
        ("alter table t replica identity full", "f", ("a", "b")),
        ("alter table t replica identity nothing", "n", ()),
        ("alter table t replica identity using index other", "i", ("b",)),
        ("alter table t drop constraint t_pkey", "d", ()),
        (
            "alter table t drop constraint t_pkey, add primary key (a) include (b)",
            "d",
            ("a",),
        ),
        (
            "drop index other; create unique index other on t (b) include (a);"
            "alter table t replica identity using index other",
            "i",
            ("b",),
        ),
    ],
)
def test_what_names_a_row_in_the_stream(
    statement: str, kind: str, columns: tuple[str, ...], database: Database
) -> None:
    with database.connect() as connection:
        connection.execute("create table t (a int primary key, b int not null)")
        connection.execute("create unique index other on t (b)")
        connection.execute(statement)
        (table,) = catalog.tables(connection, ["*.*"])
    assert (table.replica_identity, table.identity) == (kind, columns)


def test_a_partitioned_table_is_one_as_poor_as_its_poorest_partition(database: Database) -> None:
    with database.connect() as connection:
        connection.execute("create table t (a int primary key) partition by range (a)")
        (table,) = catalog.tables(connection, ["*.*"])
        assert table.partitioned
        connection.execute(
            "create table t1 partition of t for values from (0) to (10) partition by range (a)"
        )
        connection.execute("create table t11 partition of t1 for values from (0) to (5)")
        connection.execute("insert into t values (1)")
        connection.execute("analyze t11")
        (table,) = catalog.tables(connection, ["*.*"])
        assert (table.name, table.rows, table.identity) == ("t", 1, ("a",))
        connection.execute("alter table t11 replica identity nothing")
        (table,) = catalog.tables(connection, ["*.*"])
        assert (table.replica_identity, table.identity) == ("n", ())
        connection.execute("alter table t11 replica identity default")
        connection.execute("create table t2 (b int not null unique, a int not null)")
        connection.execute("alter table t add b int not null default 0")
        connection.execute("alter table t2 replica identity using index t2_b_key")
        connection.execute("alter table t attach partition t2 for values from (10) to (20)")
        (table,) = catalog.tables(connection, ["*.*"])
        assert (table.replica_identity, table.identity) == ("n", ()), "t2 says b, not a"
        connection.execute("alter table t2 replica identity using index t2_pkey")
        (table,) = catalog.tables(connection, ["*.*"])
        assert (table.replica_identity, table.identity) == ("d", ("a",))


def test_a_role_with_few_rights_sees_what_it_may_read(database: Database) -> None:
    with database.connect() as connection:
        connection.execute("create table readable (a int primary key)")
        connection.execute("create table hidden (a int primary key, b int)")
        connection.execute("create role few login")
        connection.execute("grant select on readable to few")
        connection.execute("grant select (a) on hidden to few")
        try:
            with database.connect(user="few") as few:
                found = {one.name: one.selectable for one in catalog.tables(few, ["public.*"])}
                assert found == {"readable": True, "hidden": False}
                connection.execute("grant select (b) on hidden to few")
                found = {one.name: one.selectable for one in catalog.tables(few, ["public.*"])}
                assert found == {"readable": True, "hidden": False}, "it cannot be locked"
                assert catalog.identity(few) == catalog.identity(connection)
        finally:
            connection.execute("drop owned by few")
            connection.execute("drop role few")


def test_temporary_and_system_tables_are_never_chosen(database: Database) -> None:
    with database.connect() as connection:
        connection.execute("create temporary table t (a int)")
        connection.execute("create unlogged table u (a int)")
        connection.execute("create view v as select 1")
        (table,) = catalog.tables(connection, ["*.*"])
        assert (table.name, table.unlogged) == ("u", True)


def test_types_by_oid(database: Database) -> None:
    with database.connect() as connection:
        connection.execute("create type mood as enum ('sad', 'ok')")
        known = catalog.types(connection)
    by_name = {one.name: one for one in known.values()}
    assert by_name["mood"].kind == "e"
    assert by_name["_mood"].element == by_name["mood"]
    assert by_name["int2vector"].element is None
    assert by_name["point"].element is None
    assert by_name["box"].delimiter == ";"
    assert by_name["int4multirange"].kind == "m"
