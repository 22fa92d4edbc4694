"""A capture in a process of its own, killed at random; its server killed too, its connections cut.

Writers in threads write all the time. First with everything that may happen: other columns,
snapshots asked for again, tables that are new; then, when all tables are live, with kills only, so
that the sums of every transaction are known (see `capture_case`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psycopg

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.sources.postgres import catalog
from headrace.sources.postgres.capture import Capture
from headrace.sources.postgres.state import State
from headrace.testing.capture_case import (
    NAME,
    SETTINGS,
    Audit,
    Writer,
    all_live,
    ask_snapshot,
    audit,
    differences,
    make_table,
    make_tables,
    messages,
    stopped,
)
from headrace.testing.postgres import Server, fresh_database

CHILD = """
import json, sys, headrace as hr
from headrace.sources.postgres.capture import Capture
with hr.connect(sys.argv[1]) as log:
    Capture(log, "shop", sys.argv[2], heartbeat_seconds=0.2, **json.loads(sys.argv[3])).run()
"""
QUIET_SECONDS = 10.0
LOST = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.Rollback)


@dataclass
class Case:
    """What was done and found."""

    events: Counter[str] = field(default_factory=Counter)
    audit: Audit = field(default_factory=Audit)
    wrong: list[str] = field(default_factory=list)


class Writers:
    """Threads that write; a connection that is lost is made again."""

    def __init__(self, server: Server, database: str, tables: list[str], seed: str) -> None:
        self.server, self.database = server, database
        self.stop = threading.Event()
        self.quiet = threading.Event()
        """Set: nobody writes."""
        self.writers = [
            Writer(server.connect(database), tables, f"{seed} {n}", n, messages=True)
            for n in range(3)
        ]
        self.failed: list[str] = []
        self.threads = [threading.Thread(target=self._write, args=(one,)) for one in self.writers]

    def _write(self, writer: Writer) -> None:
        while not self.stop.wait(0.05):
            if self.quiet.is_set():
                continue
            try:
                if writer.connection.closed:
                    writer.connection = self.server.connect(self.database)
                writer.transaction()
            except LOST:
                writer.connection.close()
                time.sleep(0.05)
            except Exception as error:  # noqa: BLE001 - shown by the case
                self.failed.append(f"a writer failed: {type(error).__name__}: {error}")
                return

    def __enter__(self) -> Writers:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        """No more."""
        self.stop.set()
        for thread in self.threads:
            thread.join()
        for writer in self.writers:
            writer.connection.close()


class Child:
    """The capture in its process."""

    def __init__(self, folder: Path, dsn: str, **options: Any) -> None:
        self.folder, self.dsn = folder, dsn
        self.options: dict[str, Any] = {"chunk_rows": 200} | options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin; what it says goes to a file."""
        with open(self.folder / "said", "wb") as said:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", CHILD, str(self.folder / "log")),
                    *(self.dsn, json.dumps(self.options)),
                ],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            )  # fmt: skip

    def ended(self) -> str:
        """What it said when it ended by itself; nothing while it runs."""
        if self._process is None or self._process.poll() is None:
            return ""
        return self.kill()

    def kill(self) -> str:
        """End it at once; what it said if it had ended by itself."""
        process, self._process = self._process, None
        if process is None:
            return ""
        ended = process.poll() is not None
        if not ended:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        said = (self.folder / "said").read_text(errors="replace").strip()
        return f"the capture ended: {said[-1500:]}" if ended else ""


def case(seed: str, seconds: float = 20.0, *, alters: bool = True) -> Case:
    """One case of about so many seconds (and some more to catch up)."""
    with (
        tempfile.TemporaryDirectory(prefix="headrace-") as folder,
        Server(**SETTINGS) as server,
        fresh_database(server, "shop") as database,
        hr.connect(Path(folder) / "log") as log,
    ):
        return _case(server, database, Path(folder), log, seed, seconds, alters=alters)


def _case(
    server: Server,
    database: str,
    folder: Path,
    log: EmbeddedLog,
    seed: str,
    seconds: float,
    *,
    alters: bool,
) -> Case:
    """Half of the time everything happens, then only kills."""
    found = Case()
    chance = Random(f"process {seed}")
    tables = ["a", "b", "c"]
    with server.connect(database) as connection:
        make_tables(connection, tables, "c")
    child = Child(folder, server.dsn(database))
    writers = Writers(server, database, tables, seed)
    with writers, ended(child):
        middle = time.monotonic() + seconds / 2
        child.start()
        for writer in writers.writers:
            writer.alters = alters
        while time.monotonic() < middle and not found.wrong:
            _event(server, database, log, child, chance, found, writers, tables)
        for writer in writers.writers:
            writer.alters = False
        lsn = _show(server, database, tables)
        begin = _wait_until_live(log, child, writers, tables, lsn, found)
        end = time.monotonic() + seconds / 2
        while time.monotonic() < end and not found.wrong:
            _event(server, database, log, child, chance, found, None, tables)
        said = child.kill()
        found.wrong += [said] if said else []
    found.wrong += writers.failed
    if found.wrong:
        return found
    if not caught_up(server, database, log, [*tables, "history"], found):
        return found
    found.audit = audit(log, [(begin, log.position)])
    found.wrong += found.audit.wrong
    came = {text for writer in writers.writers for text in writer.sent}
    found.wrong += [one for one in messages(log, came) if "times" in one]
    return found


def caught_up(
    server: Server, database: str, log: EmbeddedLog, tables: list[str], found: Case
) -> bool:
    """Let a capture catch up, unless it stops, and compare these tables."""
    try:
        Capture(log, NAME, server.dsn(database)).run("caught up")
    except errors.HeadraceError as error:
        found.wrong.append(f"stopped: {type(error).__name__}: {error.fact}")
        return False
    found.wrong += stopped(log)
    with server.connect(database) as connection:
        found.wrong += differences(log, connection, tables)
    return True


@contextlib.contextmanager
def ended(child: Child) -> Iterator[None]:
    """In the end it is killed, if it still runs."""
    try:
        yield
    finally:
        child.kill()


def _event(
    server: Server,
    database: str,
    log: EmbeddedLog,
    child: Child,
    chance: Random,
    found: Case,
    writers: Writers | None,
    tables: list[str],
) -> None:
    """Wait a while, and do something to the capture or its server."""
    time.sleep(chance.choice([0.1, 0.5, 1.0, 2.5]))
    kind = chance.choice(["kill", "kill", "server", "cut", "cut", "snapshot", "table"])
    if kind in ("snapshot", "table") and writers is None:
        return
    found.events[kind] += 1
    if kind == "kill":
        said = child.kill()
        found.wrong += [said] if said else []
        time.sleep(chance.choice([0, 0, 0.5]))  # what happens while it is away
        child.start()
    elif kind == "server":
        crash(server, chance)
    elif kind == "cut":
        cut(server, database)
    elif kind == "snapshot":
        ask_snapshot(log, f"public.{chance.choice(tables)}")
    elif writers is not None and len(tables) < 5:
        table = f"more{len(tables)}"
        with server.connect(database) as connection:
            make_table(connection, table)
        tables.append(table)
        for writer in writers.writers:
            writer.tables.append(table)
        said = child.kill()  # a new table is looked for when a capture starts
        found.wrong += [said] if said else []
        child.start()


def crash(server: Server, chance: Random) -> None:
    """Kill the server, or have it end at once; it comes back."""
    if chance.random() < 0.5:
        server.kill()
        server.start()
    else:
        server.restart("immediate")


def cut(server: Server, database: str) -> None:
    """End half of the connections."""
    with contextlib.suppress(*LOST), server.connect(database) as connection:
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
            " and random() < 0.5"
        )


def _show(server: Server, database: str, tables: list[str]) -> int:
    """A row in each table, with which the stream shows its columns; the LSN behind them."""
    with server.connect(database) as connection:
        for table in tables:
            connection.execute(f"insert into {table} (id, part, amount) values (-1, 'z', 1)")
        return catalog.lsn(connection)


def _wait_until_live(
    log: EmbeddedLog, child: Child, writers: Writers, tables: list[str], lsn: int, found: Case
) -> int:
    """The position at which no table is being read.

    A capture that does not get there while all write has it quiet then; if that does not help, it
    is an error. Counted in looks, of a tenth of a second each: when all of this was stopped, that
    is nobody's fault.
    """
    waited = 0.0
    while not found.wrong and not all_live(log, tables, lsn):
        said = child.ended()
        found.wrong += [*stopped(log), *([said] if said else [])]
        waited += 0.1
        if waited > QUIET_SECONDS and not writers.quiet.is_set():
            writers.quiet.set()
            found.events["quiet"] += 1
        if waited > 6 * QUIET_SECONDS:
            state = State.load(log, NAME)
            found.wrong.append(f"stopped: the snapshots do not end; at {lsn}: {state}")
        time.sleep(0.1)
    writers.quiet.clear()
    return log.position
