"""`headrace capture`, as somebody would type it, and `hr.capture`; on a real server.

Caught: commands that do not find, name or print what they should; a password that is kept or
printed; a capture that is not heard, or not removed. Not caught: whether the rows are right
(tests/capture), what a terminal shows while a snapshot runs, servers on other machines.
"""

from __future__ import annotations

import builtins
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import headrace as hr
from headrace import errors
from headrace.sources.postgres.state import State
from tests.capture.conftest import Database, database, postgres
from tests.cli.conftest import Headrace, started

__all__ = ["database", "postgres"]

TABLES = """
    create table orders (id int primary key, what text, amount numeric(10, 2));
    create table tmp_orders (id int primary key);
    insert into orders select g, 'thing ' || g, g from generate_series(1, 5) g;
"""


@pytest.fixture
def shop(database: Database) -> Iterator[psycopg.Connection[Any]]:
    """A database with two tables."""
    with database.connect() as connection:
        connection.execute(TABLES)
        yield connection


@pytest.fixture
def added(headrace: Headrace, database: Database, shop: psycopg.Connection[Any]) -> Headrace:
    """As `headrace`, with a capture 'shop' of one table, which has not run yet."""
    done = headrace("capture", "add", "shop", database.dsn(), "--tables", "orders")
    assert done.code == 0, done.err
    return headrace


def caught_up(headrace: Headrace) -> Any:
    done = headrace("capture", "run", "shop", "--until-caught-up", "--json")
    assert done.code == 0, done.err
    return done.json


def slots(connection: psycopg.Connection[Any]) -> list[str]:
    query = "select slot_name from pg_replication_slots where database = current_database()"
    return [name for (name,) in connection.execute(query).fetchall()]


def publications(connection: psycopg.Connection[Any]) -> list[str]:
    return [name for (name,) in connection.execute("select pubname from pg_publication").fetchall()]


def eventually(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if true():
            return True
        time.sleep(0.05)
    return False


# --- from the first command to the last -----------------------------------------------------------


def test_from_add_to_rows(
    headrace: Headrace, database: Database, shop: psycopg.Connection[Any]
) -> None:
    done = headrace("capture", "add", "shop", database.dsn(), "--tables", "public.*, !*.tmp_*")
    assert done.code == 0, done.err
    assert "'shop' captures 1 table" in done.err
    assert "headrace capture run shop" in done.err
    assert publications(shop) == ["headrace_shop"]
    assert "shop: new" in headrace("capture", "status").out
    done = headrace("capture", "run", "shop", "--until-caught-up")
    assert done.code == 0, done.err
    assert "public.orders: 5 rows read" in done.err
    assert "tables: 1 live" in done.err
    assert len(headrace("table", "scan", "shop.public.orders").rows) == 5
    shop.execute("update orders set amount = 7.5 where id = 1")
    caught_up(headrace)
    (row,) = headrace("table", "get", "shop.public.orders", "1").rows
    assert row["amount"] == "7.50"


def test_everything_as_json(
    headrace: Headrace, database: Database, shop: psycopg.Connection[Any]
) -> None:
    made = headrace("capture", "add", "shop", database.dsn(), "--tables", "orders", "--json").json
    assert (made["capture"], made["tables"]) == ("shop", ["orders"])
    assert "error" not in {one["level"] for one in made["findings"]}
    ran = caught_up(headrace)
    assert (ran["capture"], ran["tables"]) == ("shop", {"live": 1})
    checked = headrace("capture", "check", "shop", "--json")
    assert checked.code == 0, checked.out
    assert {"where": "wal_level", "level": "ok"}.items() <= checked.json[1 + 1].items()
    asked = headrace("capture", "snapshot", "shop", "orders", "--json").json
    assert asked == {"capture": "shop", "table": "public.orders"}
    assert headrace("capture", "pause", "shop", "--json").json["paused"] is True
    assert headrace("capture", "resume", "shop", "--json").json["paused"] is False
    removed = headrace("capture", "remove", "shop", "--yes", "--json").json
    assert [one.split()[0] for one in removed["dropped"]] == ["replication", "publication"]
    assert headrace("capture", "status", "--json").json == []


def test_status_says_how_far_it_is(added: Headrace, shop: psycopg.Connection[Any]) -> None:
    caught_up(added)
    shop.execute("update orders set what = 'x'")
    caught_up(added)
    shop.execute("insert into orders select g, repeat('x', 1000) from generate_series(10, 500) g")
    (one,) = added("capture", "status", "shop", "--json").json
    assert (one["capture"], one["state"], one["away"]) == ("shop", "stopped", "")
    assert one["lag_bytes"] > 400_000
    assert one["held_bytes"] >= one["lag_bytes"]
    assert one["growth_bytes_per_second"] is not None
    assert 0 <= one["last_commit_age_seconds"] < 60
    assert one["tables"]["public.orders"]["status"] == "live"
    assert one["tables"]["public.orders"]["rows_read"] == 5
    text = added("capture", "status").out
    assert "shop: stopped" in text
    assert "KiB of WAL at the server" in text
    assert "public.orders  live" in text


def test_status_without_the_server(added: Headrace, folder: str) -> None:
    caught_up(added)
    with hr.connect(folder) as log:
        from headrace.sources.postgres import settings

        settings.update(log, "shop", dsn="host=127.0.0.1 port=1 dbname=shop")
    done = added("capture", "status")
    assert done.code == 0
    assert "shop: away" in done.out
    assert "Connection refused" in done.out
    assert "public.orders  live" in done.out


def test_status_says_with_which_error_it_ended(
    added: Headrace, shop: psycopg.Connection[Any]
) -> None:
    caught_up(added)
    shop.execute("alter publication headrace_shop drop table orders")
    done = added("capture", "run", "shop", "--until-caught-up")
    assert "HR-CAPTURE-011" in done.err
    (one,) = added("capture", "status", "--json").json
    assert one["state"] == "stopped"
    assert "does not have table public.orders (HR-CAPTURE-011)" in one["ended"]
    assert one["ended"] in added("capture", "status").out
    assert added("capture", "snapshot", "shop", "orders").code == 0
    caught_up(added)
    assert added("capture", "status", "--json").json[0]["ended"] == ""


def test_status_says_that_the_slot_is_lost(added: Headrace, shop: psycopg.Connection[Any]) -> None:
    """And before, that there is no room any more: not less than none."""
    caught_up(added)
    shop.execute("alter system set max_slot_wal_keep_size = '1MB'")
    shop.execute("select pg_reload_conf()")
    try:
        for _ in range(3):
            shop.execute("insert into orders select max(id) + 1, 'x' from orders")
            shop.execute("select pg_switch_wal()")
        assert added("capture", "status", "--json").json[0]["room_bytes"] == 0
        shop.execute("checkpoint")
        (one,) = added("capture", "status", "--json").json
    finally:
        shop.execute("alter system reset max_slot_wal_keep_size")
        shop.execute("select pg_reload_conf()")
    assert (one["state"], one["held_bytes"], one["room_bytes"]) == ("slot lost", None, None)
    assert "HR-CAPTURE-006" in added("capture", "run", "shop", "--until-caught-up").err


def test_a_table_that_is_stopped_says_why(added: Headrace, shop: psycopg.Connection[Any]) -> None:
    caught_up(added)
    shop.execute("insert into orders values (6, 'odd', 'NaN')")
    done = added("capture", "run", "shop", "--until-caught-up")
    assert "public.orders is stopped: " in done.err
    (one,) = added("capture", "status", "--json").json
    assert one["tables"]["public.orders"]["status"] == "stopped"
    assert "NaN" in one["tables"]["public.orders"]["reason"]
    shop.execute("delete from orders where id = 6")
    assert added("capture", "snapshot", "shop", "public.orders").code == 0
    assert caught_up(added)["tables"] == {"live": 1}


def test_a_snapshot_is_read_anew(
    added: Headrace, shop: psycopg.Connection[Any], folder: str
) -> None:
    caught_up(added)
    assert "read anew" in added("capture", "snapshot", "shop", "orders").err
    caught_up(added)
    caught_up(added)
    with hr.connect(folder) as log:
        assert sum(log.ends("shop._snapshots")) == 2  # one proof for each reading, and no third
        assert sum(log.ends("shop.public.orders")) == 5  # nothing had changed
    done = added("capture", "snapshot", "shop", "public.order", "--json")
    assert done.error["code"] == "HR-LOG-010"
    assert "public.orders" in done.error["fix"]


# --- a capture that runs --------------------------------------------------------------------------


def test_a_running_capture_hears_and_ends(
    added: Headrace, shop: psycopg.Connection[Any], folder: str, tmp_path: Path
) -> None:
    """Pause, resume and Ctrl-C, from another process."""

    def state() -> str:
        found: str = added("capture", "status", "--json").json[0]["state"]
        return found

    def rows() -> int:
        return len(added("table", "scan", "shop.public.orders").rows)

    with open(tmp_path / "err", "wb") as err:
        child = started(
            folder, "capture", "run", "shop", "--json", stdout=subprocess.PIPE, stderr=err
        )
    try:
        assert eventually(lambda: state() == "running"), (tmp_path / "err").read_text()
        shop.execute("insert into orders values (6, 'six')")
        assert eventually(lambda: rows() == 6)
        added("capture", "pause", "shop")
        active = "select active from pg_replication_slots where database = current_database()"
        assert eventually(lambda: shop.execute(active).fetchone() == (False,))
        assert state() == "paused"
        refused = added("capture", "run", "shop", "--until-caught-up")
        assert "headrace capture resume shop" in refused.err
        shop.execute("insert into orders values (7, 'seven')")
        added("capture", "resume", "shop")
        assert eventually(lambda: rows() == 7)
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=30)
        assert child.returncode == 0, (tmp_path / "err").read_text()
        assert b'"capture": "shop"' in out
        assert (tmp_path / "err").read_text() == ""
    finally:
        child.kill()
        child.wait()


def test_a_connection_that_is_cut_is_said_and_made_again(
    added: Headrace, shop: psycopg.Connection[Any], folder: str
) -> None:
    child = started(folder, "capture", "run", "shop", stderr=subprocess.PIPE)
    try:
        cut = """
            select pg_terminate_backend(active_pid) from pg_replication_slots
            where database = current_database() and active
        """
        assert eventually(lambda: bool(shop.execute(cut).fetchall()))
        shop.execute("insert into orders values (6, 'six')")
        table = ("table", "scan", "shop.public.orders")
        assert eventually(lambda: added(*table).code == 0 and len(added(*table).rows) == 6)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=30)
        assert child.returncode == 0
        assert err.count(b"waiting: ") == 1
        assert b"tables: 1 live" in err
    finally:
        child.kill()
        child.wait()


def test_status_says_how_far_a_snapshot_is(added: Headrace, folder: str) -> None:
    caught_up(added)
    with hr.connect(folder) as log:
        state = State.load(log, "shop")
        assert state is not None
        orders = state.tables["public.orders"]
        orders.status, orders.rows, orders.of, orders.rate = "snapshotting", 1000, 5000, 200.0
        with log.transaction() as transaction:
            for name, value in state.unsaved("shop").items():
                transaction.put_own(name, value)
    (one,) = added("capture", "status", "shop", "--json").json
    table = one["tables"]["public.orders"]
    assert (table["rows_read"], table["rows_estimated"]) == (1000, 5000)
    assert (table["rows_per_second"], table["seconds_left"]) == (200.0, 20.0)
    assert "of about 5,000 rows, 200 a second, 20.0 s left" in added("capture", "status").out


def test_progress_on_a_terminal(
    added: Headrace,
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from headrace.cli.capture import Said, progress_line
    from headrace.sources.postgres.snapshots import Progress

    far = Progress("public.orders", 50_000, 200_000, 25_000)
    assert progress_line(far) == (
        "public.orders: 50,000 of about 200,000 rows, 25,000 a second, 6.0 s left"
    )
    assert progress_line(Progress("public.orders", 7, -1, 7.0)) == (
        "public.orders: 7 rows, 7 a second"
    )
    caught_up(added)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    with hr.connect(folder) as log:
        said = Said(quiet=False)
        said.capture = hr.capture(log, "shop")
        assert said.capture.state is not None
        said.capture.state.tables["public.orders"].status = "snapshotting"
        said.capture.state.tables["public.customers"] = said.capture.state.tables["public.orders"]
        said.progress(far)
        said.progress(Progress("public.customers", 3, -1, 0.0))
        said.line("done")
    shown = capsys.readouterr().err
    assert "50,000 of about" in shown
    assert "customers: 3 rows" in shown
    assert shown.endswith("done\n")


def test_a_running_capture_is_removed(
    added: Headrace, shop: psycopg.Connection[Any], folder: str
) -> None:
    child = started(folder, "capture", "run", "shop", stderr=subprocess.PIPE)
    try:
        assert eventually(
            lambda: added("capture", "status", "--json").json[0]["state"] == "running"
        )
        done = added("capture", "remove", "shop", "--yes")
        assert done.code == 0, done.err
        assert (slots(shop), publications(shop)) == ([], [])
        _, err = child.communicate(timeout=30)
        assert b"'shop' was removed" in err
    finally:
        child.kill()
        child.wait()


def test_remove_asks_first(added: Headrace, shop: psycopg.Connection[Any]) -> None:
    caught_up(added)
    assert len(slots(shop)) == 1
    assert added("capture", "remove", "shop", stdin="n\n").code == 130
    assert "--yes" in added("capture", "remove", "shop", "--json").error["fix"]
    assert len(slots(shop)) == 1
    done = added("capture", "remove", "shop", stdin="y\n")
    assert done.code == 0, done.err
    assert "dropped replication slot headrace_shop_" in done.err
    assert (slots(shop), publications(shop)) == ([], [])
    assert len(added("table", "scan", "shop.public.orders").rows) == 5
    assert added("capture", "run", "shop").code == 1


def test_a_publication_of_somebody_else_is_left(
    headrace: Headrace, database: Database, shop: psycopg.Connection[Any]
) -> None:
    """The capture of a role that may only replicate and read can be removed."""
    shop.execute("create role few login replication")
    try:
        shop.execute("grant select on orders to few")
        shop.execute("create publication headrace_shop for table orders")
        assert (
            headrace("capture", "add", "shop", database.dsn(user="few"), "--tables", "orders").code
            == 0
        )
        caught_up(headrace)
        done = headrace("capture", "remove", "shop", "--yes", "--json")
        assert done.json["left"] == ["publication headrace_shop"]
        assert (slots(shop), publications(shop)) == ([], ["headrace_shop"])
        assert headrace("capture", "status", "--json").json == []
    finally:
        shop.execute("drop owned by few; drop role few")


def test_removed_and_added_again(
    added: Headrace, database: Database, shop: psycopg.Connection[Any], folder: str
) -> None:
    """The tables are read anew and compared with their topics: only what differs comes."""
    caught_up(added)
    assert added("capture", "remove", "shop", "--yes").code == 0
    shop.execute("update orders set what = 'other' where id = 2")
    shop.execute("insert into orders values (6, 'six')")
    assert added("capture", "add", "shop", database.dsn(), "--tables", "orders").code == 0
    caught_up(added)
    rows = added("table", "scan", "shop.public.orders").rows
    assert [row["what"] for row in rows if row["id"] in (2, 6)] == ["other", "six"]
    with hr.connect(folder) as log:
        assert sum(log.ends("shop.public.orders")) == 5 + 3
    shop.execute("delete from orders where id = 1")
    caught_up(added)
    caught_up(added)
    assert len(added("table", "scan", "shop.public.orders").rows) == 5


def test_rows_that_went_while_it_was_removed(
    added: Headrace, database: Database, shop: psycopg.Connection[Any]
) -> None:
    caught_up(added)
    assert added("capture", "remove", "shop", "--yes").code == 0
    shop.execute("delete from orders where id = 3")
    assert added("capture", "add", "shop", database.dsn(), "--tables", "orders").code == 0
    caught_up(added)
    rows = added("table", "scan", "shop.public.orders").rows
    assert [row["id"] for row in rows] == [1, 2, 4, 5]


def test_the_publication_of_another_log_is_left_alone(
    added: Headrace, database: Database, shop: psycopg.Connection[Any], tmp_path: Path
) -> None:
    other = ("--log", str(tmp_path / "other"))
    caught_up(added)
    error = added("capture", "add", "shop", database.dsn(), "--json", *other).error
    assert (error["code"], "another name" in error["fix"]) == ("HR-CAPTURE-007", True)
    with hr.connect(tmp_path / "other") as log:  # which does not look at the server
        hr.capture(log, "shop", database.dsn())
    done = added("capture", "remove", "shop", "--yes", "--json", *other)
    assert done.json["dropped"] == []
    assert publications(shop) == ["headrace_shop"]


def test_a_server_that_is_gone(added: Headrace, folder: str) -> None:
    caught_up(added)
    with hr.connect(folder) as log:
        from headrace.sources.postgres import settings

        settings.update(log, "shop", dsn="host=127.0.0.1 port=1 dbname=shop")
    done = added("capture", "remove", "shop", "--yes")
    assert (done.code, "--gone" in done.err) == (1, True)
    assert added("capture", "remove", "shop", "--yes", "--gone").code == 0
    assert added("capture", "status", "--json").json == []


# --- what is refused ------------------------------------------------------------------------------


def test_errors_have_names(added: Headrace, database: Database) -> None:
    error = added("capture", "add", "shop", database.dsn(), "--json").error
    assert error["code"] == "HR-CAPTURE-027"
    for command in ("run", "pause", "resume", "remove", "check"):
        error = added(
            "capture", command, "shap", "--json", *["--yes"] * (command == "remove")
        ).error
        assert error["code"] == "HR-CAPTURE-026", command
        assert "shop" in error["fix"]
    assert added("capture", "status", "shap", "--json").error["code"] == "HR-CAPTURE-026"
    assert added("capture", "snapshot", "shap", "t", "--json").error["code"] == "HR-CAPTURE-026"
    assert "HR-LOG-030" in added("capture", "add", "My Shop", database.dsn()).err
    away = added("capture", "add", "b", "host=127.0.0.1 port=1 dbname=x", "--json").error
    assert away["code"] == "HR-CAPTURE-024"
    assert "HR-CAPTURE-024" in added("capture", "add", "b", database.server.dsn("nowhere")).err
    assert "HR-LOG-001" in added("capture", "status", "--log", "nowhere").err


def test_a_pattern_that_chooses_nothing(headrace: Headrace, database: Database) -> None:
    done = headrace("capture", "add", "shop", database.dsn(), "--tables", "shop.*")
    assert done.code == 1
    assert "pattern shop.*" in done.err
    assert "chooses nothing" in done.err
    assert headrace("capture", "status", "--json").json == []


def test_no_rights(headrace: Headrace, database: Database, shop: psycopg.Connection[Any]) -> None:
    """A role that may do nothing is told the statements, for a person who may."""
    role = f"reader_{database.name}"
    shop.execute(f"create role {role} login")
    try:
        address = database.dsn(user=role)
        done = headrace("capture", "add", "shop", address, "--tables", "orders")
        assert done.code == 1
        assert "HR-CAPTURE-028" in done.err
        for statement in (
            f'ALTER ROLE "{role}" REPLICATION;',
            f'GRANT SELECT ON "public"."orders" TO "{role}";',
        ):
            assert statement in done.err
        error = headrace("capture", "add", "shop", address, "--fix", "--json").error
        assert "permission denied" in " ".join(error["details"]["refused"].values())
        assert headrace("capture", "check", address, "--tables", "orders").code == 1
        assert publications(shop) == []
    finally:
        shop.execute(f"drop owned by {role}")
        shop.execute(f"drop role {role}")


def test_a_right_that_was_taken_away(
    headrace: Headrace, database: Database, shop: psycopg.Connection[Any], tmp_path: Path
) -> None:
    """It is not that the server is away; and in Python it is an error with a name too."""
    role = f"reader_{database.name}"
    shop.execute(f"create role {role} login replication in role pg_read_all_data")
    try:
        address = database.dsn(user=role)
        with hr.connect(tmp_path / "other") as log:
            unready = hr.capture(log, "shop", address)
            with pytest.raises(errors.SourceNotReady, match="permission denied"):
                unready.run("caught up")
        shop.execute(f"grant create on database {database.name} to {role}")
        shop.execute(f"alter table orders owner to {role}")
        assert headrace("capture", "add", "shop", address, "--tables", "orders").code == 0
        shop.execute(f"alter role {role} noreplication")
        for _ in range(2):  # before there is a slot, and then
            error = headrace("capture", "run", "shop", "--until-caught-up", "--json").error
            assert error["code"] == "HR-CAPTURE-028"
            assert error["fix"] == f'ALTER ROLE "{role}" REPLICATION'
            shop.execute(f"alter role {role} replication")
            caught_up(headrace)
            shop.execute(f"alter role {role} noreplication")
    finally:
        shop.execute(f"drop owned by {role}")
        shop.execute(f"drop role {role}")


def test_fix_runs_what_helps(
    headrace: Headrace, database: Database, shop: psycopg.Connection[Any]
) -> None:
    shop.execute("create table bare (id int not null, unique (id))")
    done = headrace("capture", "add", "shop", database.dsn(), "--tables", "public.*")
    assert done.code == 1
    assert 'ALTER TABLE "public"."bare" REPLICA IDENTITY USING INDEX' in done.err
    assert publications(shop) == []
    shop.execute("insert into bare values (1)")
    done = headrace("capture", "add", "shop", database.dsn(), "--tables", "public.*", "--fix")
    assert done.code == 0, done.err
    assert "captures 3 tables" in done.err
    caught_up(headrace)
    assert [row["id"] for row in headrace("table", "scan", "shop.public.bare").rows] == [1]


def test_check_only_looks(
    headrace: Headrace, database: Database, shop: psycopg.Connection[Any]
) -> None:
    done = headrace("capture", "check", database.dsn())
    assert done.code == 0, done.out
    assert "known by id" in done.out
    assert "max_slot_wal_keep_size" in done.out
    assert (slots(shop), publications(shop)) == ([], [])


def test_a_password_is_neither_kept_nor_printed(
    headrace: Headrace, database: Database, shop: psycopg.Connection[Any], folder: str
) -> None:
    secret = "very-secret-7"
    done = headrace("capture", "add", "shop", database.dsn(password=secret), "--tables", "orders")
    assert done.code == 0
    assert "PGPASSWORD or ~/.pgpass" in done.err
    said = done.err + done.out
    told = (f"{secret}@127.0.0.1:1", f"{secret} x@h", f"a@{secret}@127.0.0.1:1", f"12/{secret}@h")
    for rest in told:
        done = headrace("capture", "add", "b", f"postgresql://u:{rest}/x")
        assert done.code == 1
        said += done.err + done.out
    with hr.connect(folder) as log:
        hr.capture(log, "other", f"postgresql://u:{secret}@127.0.0.1:1/x")
    said += headrace("capture", "status").out
    assert secret not in said
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_numerics_as_text(
    headrace: Headrace, database: Database, shop: psycopg.Connection[Any]
) -> None:
    shop.execute("insert into orders values (6, 'odd', 'NaN')")
    options = ("--tables", "orders", "--numeric-as-text")
    assert headrace("capture", "add", "shop", database.dsn(), *options).code == 0
    assert caught_up(headrace)["tables"] == {"live": 1}
    (row,) = headrace("table", "get", "shop.public.orders", "6").rows
    assert row["amount"] == "NaN"


# --- Python ---------------------------------------------------------------------------------------


def test_hr_capture(
    folder: str, database: Database, shop: psycopg.Connection[Any], headrace: Headrace
) -> None:
    with hr.connect(folder) as log:
        capture = hr.capture(log, "shop", database.dsn(), tables=["orders"], chunk_rows=2)
        capture.run("caught up")
        assert log.table("shop.public.orders").scan().read_all().num_rows == 5
        again = hr.capture(log, "shop")
        assert (again.dsn, again.patterns) == (capture.dsn, ("orders",))
        with pytest.raises(errors.UnknownCapture):
            hr.capture(log, "other")
        with pytest.raises(errors.BadSetting):
            hr.capture(log, "shop", colour="red")
        assert hr.capture(log, "shop", tables="orders").patterns == ("orders",)
        assert hr.capture(log, "shop", tables=["!orders"]).patterns == ("public.*", "!orders")
    assert headrace("capture", "status", "--json").json[0]["capture"] == "shop"


def test_an_address_can_be_corrected_as_the_errors_say(
    folder: str, database: Database, shop: psycopg.Connection[Any], headrace: Headrace
) -> None:
    with hr.connect(folder) as log:
        hr.capture(log, "shop", f"host=127.0.0.1 port=1 dbname={database.name}", tables="orders")
    again = headrace("capture", "add", "shop", database.dsn(), "--json")
    for done in (headrace("capture", "run", "shop", "--json"), again):
        assert "headrace.capture(log, NAME, ADDRESS)" in done.error["fix"]
    with hr.connect(folder) as log:
        hr.capture(log, "shop", database.dsn())
    assert caught_up(headrace)["tables"] == {"live": 1}


def test_without_the_client_library(
    folder: str, headrace: Headrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def no_psycopg(name: str, *rest: Any, **more: Any) -> Any:
        if name == "psycopg":
            raise ImportError("No module named 'psycopg'")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", no_psycopg)
    done = headrace("capture", "status", "--json")
    assert done.error["code"] == "HR-CAPTURE-025"
    assert "headrace[postgres]" in done.error["fix"]
    assert headrace("capture", "status", "--help").code == 0
    with hr.connect(folder) as log, pytest.raises(errors.NoPsycopg):
        hr.capture(log, "shop", "host=x")
