"""The slice: PostgreSQL -> log -> views -> PostgreSQL, with every part of it killed at random.

::

    writers -> source -> capture -> log -> Spark -> log -> follower -> target <- readers
                 9          9                9                9          9
       the supervisor of all these: 9               9: kill -9, at random instants

A shop and a bank (`shop`) under writers; the project runs under `headrace run`, in real processes.
Killed are: the capture, the driver of the pipelines, its JVM, the JVM's Python workers, the
follower, both servers (all their processes at once), and the supervisor, which is then started
again as an operator would. All the while readers ask the target, each time in one REPEATABLE READ
transaction, whether the money adds up, and views, tables and transactions agree.

In the end everything is compared thrice: by SQL (target with source, and views with their meaning
in SQL), by `verify` (target with log, log with source, views with Spark's batch reading), and by
numbers (each transaction once). And at every position of the log the views must agree with each
other.

Can catch: whatever shows in the target, at any instant that happened. Cannot catch: instants that
did not happen; power failures (the servers do not sync, and a killed process loses nothing it has
written).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psycopg

import headrace as hr
from headrace import errors
from headrace.runtime.processes import mark, marked
from headrace.runtime.project import Project, find_project
from headrace.runtime.status import parts_of
from headrace.testing import shop
from headrace.testing.postgres import Server
from headrace.testing.views_bank import until
from headrace.testing.watched import children_of

WRITERS, RATE = 3, 60.0
READERS = 2
ORDERS = 3000
"""So many are there at the beginning."""
PATIENCE = 600.0
"""Seconds that anything may take, on a machine with other things to do."""
KILLS = (
    "capture", "jvm", "worker", "pipelines", "follower", "keeper", "target", "source", "supervisor",
)  # fmt: skip


@dataclass
class Case:
    """What was done and found."""

    transactions: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    reads: int = 0
    cuts: int = 0
    """Different cuts that the readers saw."""
    verified: Counter[str] = field(default_factory=Counter)
    """Rows, by what they were verified against."""
    wrong: list[str] = field(default_factory=list)


class Slice:
    """A running slice; a context manager that leaves nothing behind."""

    def __init__(self, folder: Path, seed: str) -> None:
        """Make servers, tables and project; nothing runs yet."""
        self.seed, self.folder = seed, folder
        self.chance = Random(f"slice {seed}")
        self.found = Case()
        self._stack = contextlib.ExitStack()
        self._reading = threading.Event()
        self._cuts: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Slice:
        try:
            self.source = self._stack.enter_context(Server())
            self.target = self._stack.enter_context(Server())
            self._stack.callback(self._end)
            with self.source.connect() as connection:
                shop.make_shop(connection, ORDERS)
            here, there = self.source.dsn(), self.target.dsn()
            shop.write_project(self.folder, here, there, port="false", more=True)
            self.project: Project = find_project(self.folder)
            self.writers = shop.Writers(lambda: _connect(self.source), WRITERS, RATE, self.seed)
            self._stack.callback(self.writers.stop)
            self._readers = [threading.Thread(target=self._read) for _ in range(READERS)]
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    # -- processes --------------------------------------------------------------------------

    def start(self) -> None:
        """`headrace run`."""
        with open(self.folder / "said", "ab") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace", "run", "--project", str(self.folder)],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
                env={k: v for k, v in os.environ.items() if k != "HEADRACE_LOG"},
            )  # fmt: skip

    def _end(self) -> None:
        """No more readers, no more processes."""
        self._reading.clear()
        for thread in self._readers:
            if thread.ident is not None:
                thread.join()
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
        until(lambda: not marked(mark(self.folder)), "the end of all parts", PATIENCE)

    def stop(self) -> None:
        """Stop in order, as Ctrl-C does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        if self._process.wait(PATIENCE):
            self.found.wrong.append(f"headrace run ended with {self._process.returncode}")
        left = marked(mark(self.folder))
        if left:
            self.found.wrong.append(f"{len(left)} processes were left behind")

    def pid(self, kind: str) -> int | None:
        """The process of a part, while it runs."""
        parts = parts_of(self.project)["parts"]
        return next((part["pid"] for part in parts if part["kind"] == kind), None)

    def _pids(self, kind: str) -> list[int]:
        """What is to be killed; nothing if it is not there just now."""
        own = self.pid("pipelines" if kind in ("jvm", "worker") else kind)
        if own is None or kind not in ("jvm", "worker"):
            return [own] if own else []
        jvms = children_of(own)
        if kind == "jvm":
            return jvms
        return [worker for jvm in jvms for one in children_of(jvm) for worker in children_of(one)]

    def kill(self, kind: str) -> None:
        """`kill -9`."""
        count = 1
        if kind in ("source", "target"):
            server = self.source if kind == "source" else self.target
            server.kill()
            time.sleep(self.chance.choice([0.0, 0.5, 2.0]))
            server.start()
        elif kind == "supervisor":
            assert self._process is not None
            self._process.kill()
            self._process.wait()
            time.sleep(self.chance.choice([0.0, 0.3]))
            self.start()
        else:
            self.wait(lambda: bool(self._pids(kind)), f"a process of {kind}")
            pids = self._pids(kind)
            count = len(pids)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.found.kills[kind] += count

    def running(self) -> None:
        """Nobody may have given up."""
        assert self._process is not None
        if self._process.poll() is not None:
            self.found.wrong.append(f"headrace run ended: {self._said()}")
        parts = parts_of(self.project)
        for part in parts["parts"] if parts["supervisor"] else ():
            if part["state"] == "stopped":
                self.found.wrong.append(f"{part['name']} stopped: {part['error']}")
        self.found.wrong += self.writers.failed

    def _said(self) -> str:
        return (self.folder / "said").read_text(errors="replace")[-800:]

    # -- readers ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Writers, readers and the project."""
        self.writers.start()
        self._reading.set()
        for thread in self._readers:
            thread.start()
        self.start()

    def _read(self) -> None:
        reader = shop.Reader(lambda: _connect(self.target), WRITERS, shop.MORE_CHECKS)
        while self._reading.is_set():
            began = time.monotonic()
            look = reader.look()
            if look is not None:
                self.found.reads += 1
                self._cuts.add(look.through)
                self.found.wrong += [f"a reader saw at {look.through}: {one}" for one in look.wrong]
            time.sleep(max(0.02, 2 * (time.monotonic() - began)))  # others need the processor too
        reader.close()

    def shows(self, transactions: int) -> bool:
        """Whether the target has so many transactions."""
        try:
            with _connect(self.target) as connection:
                return shop.count_transactions(connection) >= transactions
        except (*shop.LOST, psycopg.errors.UndefinedTable):
            return False

    def written(self) -> int:
        """How many transactions the source has."""
        with _connect(self.source) as connection:
            return shop.count_transactions(connection)

    def wait(self, true: Callable[[], bool], what: str) -> None:
        """Wait for something, unless something is wrong before."""
        try:
            until(lambda: true() or self._unwell(), what, PATIENCE)
        except AssertionError as error:
            parts = [(p["name"], p["state"], p["note"]) for p in parts_of(self.project)["parts"]]
            self.found.wrong.append(f"{error}: {parts}; {self._said()}")

    def _unwell(self) -> bool:
        self.running()
        return bool(self.found.wrong)

    # -- the end ----------------------------------------------------------------------------

    def finish(self) -> Case:
        """No more transactions; all that is there must come, and be right."""
        found = self.found
        self.writers.stop()
        if not self.source.running:
            self.source.start()
        found.transactions = self.written()
        self.wait(lambda: self.shows(found.transactions), "the last transaction")
        if found.wrong:
            return self._done()
        with _connect(self.source) as source, _connect(self.target) as target:
            found.wrong += shop.tables_differ(source, target, [*shop.VIEWS, *shop.MORE_VIEWS])
        try:
            for result in self._verify():
                found.verified[result.against] += result.rows
                if result.differing:
                    found.wrong.append(
                        f"{result.table} against {result.against}: {result.differing} differ,"
                        f" {[vars(one) for one in result.differences[:2]]}"
                    )
            with hr.connect(self.project.log, create=False) as log:
                found.wrong += shop.views_disagree(log)
        except errors.HeadraceError as error:
            found.wrong.append(f"verify: {error}")
        self.stop()
        return self._done()

    def _done(self) -> Case:
        self.found.cuts = len(self._cuts)
        self.found.wrong = list(dict.fromkeys(self.found.wrong))
        return self.found

    def _verify(self) -> Iterator[Any]:
        from headrace.pipelines.files import load_pipeline
        from headrace.runtime.verify import verify_batch, verify_kept, verify_source

        pipeline = load_pipeline(str(self.project.pipelines[0]))
        with hr.connect(self.project.log, create=False) as log:
            for follower in self.project.followers().values():
                yield from verify_kept(log, follower.to_kept())
            for table in shop.TABLES:
                yield verify_source(log, "shop", f"public.{table}")
            for view in pipeline.views:
                yield verify_batch(log, pipeline, view)


def case(seed: str, seconds: float, kills: tuple[str, ...] = KILLS) -> Case:
    """So many seconds of kills (and the time to start and to catch up); each kind at least once."""
    with (
        tempfile.TemporaryDirectory(prefix="headrace-slice-") as folder,
        Slice(Path(folder), seed) as one,
    ):
        one.begin()
        one.wait(lambda: one.shows(1), "the first rows")
        chance, deadline = one.chance, time.monotonic() + seconds
        left: list[str] = []
        while not one.found.wrong and (
            time.monotonic() < deadline or any(not one.found.kills[kind] for kind in kills)
        ):
            left = left or chance.sample(kills, len(kills))
            one.kill(left.pop())
            time.sleep(chance.choice([0.1, 0.5, 1.0, 3.0]))
            if chance.random() < 0.3:  # let everybody come back
                goal = one.written()
                one.wait(lambda goal=goal: one.shows(goal), "transactions after kills")  # type: ignore[misc]
            one.running()
        return one.finish()


def _connect(server: Server) -> Any:
    """A connection to a server that may just be killed."""
    return server.connect(connect_timeout="5")
