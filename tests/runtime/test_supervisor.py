"""A project under `headrace run`: real processes, a real database, killed and stopped.

Caught: a part that is not started again or does not go on where it was; one that is started again
although its error stays; a process that outlives the supervisor, however that ended; two
supervisors of one project; a stop that hangs; an error that nobody sees. Not caught: what views and
followers do with it (test_run.py); a supervisor that is stopped (SIGSTOP) rather than killed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import headrace as hr
from headrace import errors
from headrace.clock import HandClock
from headrace.runtime import streams, supervisor
from headrace.runtime.control import ask, short
from headrace.runtime.project import find_project
from headrace.runtime.status import project_status
from headrace.testing.postgres import Server, fresh_database
from tests.runtime.kit import Running, alive, commands, family, until


@dataclass
class Shop:
    """A project with one capture, and its database."""

    running: Running
    server: Server
    database: str

    def insert(self) -> int:
        """A row; how many there are."""
        with self.server.connect(self.database) as connection:
            connection.execute("insert into orders (amount) values (1)")
            row = connection.execute("select count(*) from orders").fetchone()
            assert row is not None
            return int(row[0])

    def comes(self, rows: int) -> None:
        """Wait until the log has so many rows, each once."""

        def there() -> bool:
            topics = {one["name"]: one["rows"] for one in self.status()["topics"]}
            return bool(topics.get("shop.public.orders", 0) >= rows)

        until(there, f"row {rows}")
        with hr.connect(self.running.project.log, create=False) as log:
            assert sum(log.ends("shop.public.orders")) == rows

    def kill(self) -> None:
        """kill -9 of the capture, as soon as there is one; return when the supervisor saw it."""
        pid = until(lambda: self.running.part("capture/shop")["pid"], "its process")
        os.kill(pid, signal.SIGKILL)
        until(lambda: self.running.part("capture/shop")["pid"] != pid, "that it was seen")

    def status(self) -> dict[str, Any]:
        return project_status(self.running.project)


def project(folder: Path, dsn: str) -> Path:
    (folder / "headrace.toml").write_text(
        f'[capture.shop]\ndsn = "{dsn}"\ntables = ["public.orders"]\n[page]\nport = false\n'
    )
    return folder


@pytest.fixture(scope="module")
def shop(
    postgres: Server,
    running: Callable[[Path], Running],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Shop]:
    with fresh_database(postgres, "runtime_shop") as database:
        with postgres.connect(database) as connection:
            connection.execute("create table orders (id serial primary key, amount int)")
        folder = project(tmp_path_factory.mktemp("shop"), postgres.dsn(database))
        made = Shop(running(folder), postgres, database)
        yield made
        made.running.stop()


def test_a_part_says_when_it_is_ready_and_the_status_shows_it(shop: Shop) -> None:
    part = shop.running.comes("capture/shop", "running")
    shop.comes(shop.insert())

    def live() -> dict[str, Any] | None:
        status = shop.status()
        tables = status["captures"][0]["tables"]
        return status if tables.get("public.orders", {}).get("status") == "live" else None

    status = until(live, "that the table is live")
    assert status["supervisor"]["pid"] == shop.running.pid
    assert status["parts"][0]["pid"] == part["pid"]
    published = json.loads(shop.running.project.parts_file.read_text())
    assert published["parts"][0]["pid"] == part["pid"]


@pytest.mark.parametrize(
    ("by", "fact"),
    [
        (signal.SIGKILL, "it was killed by SIGKILL"),
        (signal.SIGTERM, "it has ended, and nobody here had asked it to"),
        (signal.SIGSTOP, "it hung: nothing was heard of it for 15 s"),
    ],
)
def test_a_killed_part_is_started_again_and_goes_on(shop: Shop, by: int, fact: str) -> None:
    """Also when somebody else asked it to end: whoever guards the memory of a machine does.

    Or when it is there, and does nothing.
    """
    before = shop.running.comes("capture/shop", "running")
    os.kill(before["pid"], by)
    rows = shop.insert()
    after = shop.running.comes("capture/shop", "running", restarts=before["restarts"] + 1)
    assert after["pid"] != before["pid"]
    assert after["error"]["fact"] == fact
    shop.comes(rows)


def test_the_kill_button_and_restart_work_over_the_socket(shop: Shop) -> None:
    before = shop.running.comes("capture/shop", "running")
    assert ask(shop.running.project, "kill", "capture/shop")["pid"] == before["pid"]
    killed = shop.running.comes("capture/shop", "running", restarts=before["restarts"] + 1)
    ask(shop.running.project, "restart", "capture/shop")
    again = shop.running.comes("capture/shop", "running", restarts=before["restarts"] + 2)
    assert len({before["pid"], killed["pid"], again["pid"]}) == 3
    with pytest.raises(errors.UnknownPart, match=r"did you mean 'capture/shop'"):
        ask(shop.running.project, "kill", "capture/shopp")
    shop.comes(shop.insert())


def test_a_second_supervisor_is_refused_with_the_number_of_the_first(shop: Shop) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "run", "--project", str(shop.running.folder)],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "HR-PROJECT-003" in done.stderr
    assert f"process {shop.running.pid}" in done.stderr
    shop.comes(shop.insert())


def test_a_killed_supervisor_leaves_nobody_and_the_next_goes_on(shop: Shop) -> None:
    shop.running.comes("capture/shop", "running")
    processes = family(shop.running.pid)
    assert len(processes) == 3  # with the keeper
    shop.running.kill()
    until(lambda: not alive(processes), f"the end of {commands(processes)}", 10)
    status = shop.status()
    assert status["supervisor"] is None
    assert status["parts"][0]["state"] == "stopped"
    with pytest.raises(errors.NotRunning):
        ask(shop.running.project, "list")
    rows = shop.insert()
    shop.running.start()
    shop.running.comes("capture/shop", "running")
    shop.comes(rows)


def test_a_part_that_dies_again_and_again_is_failing_and_tried_more_slowly(shop: Shop) -> None:
    shop.running.comes("capture/shop", "running")
    for _ in range(supervisor.BUDGET + 1):
        shop.kill()
    part = shop.running.part("capture/shop")
    assert part["state"] == "failing"
    assert part["next_try"] is not None
    ask(shop.running.project, "restart", "capture/shop")  # a person is quicker
    shop.running.comes("capture/shop", "running")
    shop.comes(shop.insert())


def test_an_error_that_stays_stops_its_part_until_somebody_restarts_it(shop: Shop) -> None:
    """The slot is dropped while nobody looks: going on would miss changes."""
    shop.running.comes("capture/shop", "running")
    assert shop.running.stop(signal.SIGINT) == 0
    with shop.server.connect(shop.database) as connection:
        connection.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots"
                           " where database = current_database()")  # fmt: skip
    shop.running.start()
    stopped = shop.running.comes("capture/shop", "stopped")
    assert stopped["error"]["code"] == "HR-CAPTURE-004"
    assert stopped["pid"] is None
    assert stopped["next_try"] is None
    assert "HR-CAPTURE-004" in (shop.running.folder / stopped["output"]).read_text()
    ask(shop.running.project, "restart", "capture/shop")
    until(lambda: shop.running.part("capture/shop")["pid"] is not None, "the restart")
    shop.running.comes("capture/shop", "stopped")


def test_a_database_that_is_away_is_waited_for(
    running: Callable[[Path], Running], tmp_path: Path
) -> None:
    with Server() as server:
        with server.connect() as connection:
            connection.execute("create table orders (id serial primary key, amount int)")
        made = running(project(tmp_path, server.dsn()))
        made.comes("capture/shop", "running")
        server.stop("immediate")
        made.comes("capture/shop", "running", ready=True)
        until(lambda: "waiting" in made.part("capture/shop")["note"], "the note that it waits")
        server.start()
        until(lambda: made.part("capture/shop")["note"] == "", "the end of the note")
        server.stop("immediate")
        ask(made.project, "kill", "capture/shop")
        until(lambda: "waiting" in made.part("capture/shop")["note"], "the note that it waits")
        assert made.stop() == 0


def test_a_database_that_is_not_ready_is_refused_with_the_statement(
    running: Callable[[Path], Running], tmp_path: Path
) -> None:
    with Server(wal_level="replica") as server:
        with server.connect() as connection:
            connection.execute("create table orders (id serial primary key, amount int)")
        made = running(project(tmp_path, server.dsn()))
        stopped = made.comes("capture/shop", "stopped")
        assert stopped["error"]["code"] == "HR-CAPTURE-028"
        assert "ALTER SYSTEM SET wal_level = logical" in stopped["error"]["fix"]
        assert made.stop() == 0


def test_the_output_of_a_part_is_kept_and_rotated(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text("")
    from headrace.runtime.project import find_project

    output = streams.Output(find_project(tmp_path), "capture/shop")
    line = b"x" * 1023 + b"\n"
    for _ in range(5 * streams.LOG_BYTES // len(line)):
        output.write(line)
    output.close()
    files = sorted(output.path.parent.iterdir())
    assert len(files) == streams.LOG_FILES
    assert all(file.stat().st_size <= streams.LOG_BYTES + len(line) for file in files)


def test_a_supervisor_that_was_away_itself_takes_nobody_for_hung(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text("[page]\nport = 0\n")
    clock = HandClock()
    made = supervisor.Supervisor(find_project(tmp_path))
    made._clock = clock  # type: ignore[assignment]
    made._selector = mock.Mock(select=lambda wait: [])
    made._add("page", "")
    part = made.parts["page"]
    process = part.process = mock.Mock(pid=1)
    part.try_at = None
    for seconds, killed in ((0, 0), (100, 0), (1, 0), (1, 0)):  # stopped, and let go on
        clock.advance(seconds)
        made._turn()
        assert process.kill.call_count == killed
    for _ in range(int(supervisor.HUNG_SECONDS)):
        clock.advance(1)
        made._turn()
    assert process.kill.call_count == 1
    assert part.asked == "hung"


def test_a_supervisor_that_does_not_answer_is_not_said_to_be_away(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text("")
    project = find_project(tmp_path)
    project.run_folder.mkdir()
    with socket.socket(socket.AF_UNIX) as silent, short(project.socket) as name:
        silent.bind(name)
        silent.listen()
        with pytest.raises(errors.NotRunning, match=r"does not answer within 0\.1 s"):
            ask(project, "list", timeout=0.1)


def test_delays_grow_and_have_an_end() -> None:
    crashes = [supervisor.crash_delay(n) for n in range(1, 30)]
    passing = [supervisor.passing_delay(n) for n in range(1, 30)]
    assert crashes == sorted(crashes)
    assert passing == sorted(passing)
    assert sum(crashes[: supervisor.BUDGET]) < 5 <= crashes[supervisor.BUDGET]
    assert (crashes[-1], passing[-1]) == (60.0, 30.0)
