"""Bugs of the slice on purpose: mutants of production code, as in `seeded`.

Two hunters:

- `stepped`: capture, driver with Spark, and follower in one thread, each a new object after each
  kill; at chosen instants (before and after an entry is committed, before each statement to the
  target, after a cut was applied) the shop goes on (and beside the driver the capture does), a
  reader asks the target, or whoever is at work dies. Now and then two followers are at it. In the
  end everything is compared by SQL; and the views must agree with each other at every position of
  the log, for whoever reads them there: a follower shows cuts only.
- `project`: a supervisor in a process of its own, with the parts of an empty project; one part is
  killed, then the supervisor. A bug is switched on in that process and its children by
  `sitecustomize`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import headrace as hr
from headrace import errors
from headrace.derived import cuts
from headrace.derived.follower import Follower
from headrace.derived.postgres import PostgresTarget
from headrace.log.writer import WriterTransaction
from headrace.pipelines.views.run import Runner
from headrace.runtime import processes
from headrace.runtime.processes import end_marked, mark, marked
from headrace.runtime.project import find_project
from headrace.runtime.status import parts_of
from headrace.runtime.supervisor import Supervisor
from headrace.sources.postgres.capture import Capture
from headrace.sources.postgres.stream import Stream
from headrace.testing import shop
from headrace.testing.follower_bugs import LONG_WAY
from headrace.testing.hunt import Catch, each, look_for
from headrace.testing.postgres import Server, fresh_database
from headrace.testing.seeded import Bug, mutant
from headrace.testing.verdicts import CRASH, verdict_on

COMMITTED = 'self._run("commit"); self._run("begin")'
COMMITS = 'transaction.append(self._commits, [{"through": through, "views": list(engine.views)}])'

BUGS = [
    mutant("captured tables run ahead of the views beside them", "stepped", (
        (cuts.Between, "_rows", "(self._inputs, cut.through)", "(self._inputs, cut.position)"),)),
    mutant("what is beyond a cut is dropped", "stepped", (
        (cuts.Feed, "through", "self._held.extendleft(reversed(later))", "pass"),)),
    mutant("of several entries the oldest row of a key is taken", "stepped", (
        (cuts, "added_up", "newest[code] = np.arange(rows.num_rows)",
         "newest[code[::-1]] = np.arange(rows.num_rows)[::-1]"),)),
    mutant("the cut is committed before its rows", "stepped", (
        (PostgresTarget, "apply", "refused = self._merged(changes)",
         f"self._now_at(cut, list(tables.values())); {COMMITTED}; refused = self._merged(changes)"),
        LONG_WAY)),
    mutant("the cut is committed before its rows, on the quick way", "stepped", (
        (PostgresTarget, "_quick", "            for one in changes:\n",
         f"            {COMMITTED}\n            for one in changes:\n"),)),
    mutant("each table of a cut is committed by itself", "stepped", (
        (PostgresTarget, "_merged", "self._merge(one.table, one.table.name, chunk)\n",
         f"self._merge(one.table, one.table.name, chunk); {COMMITTED};"
         " self._run('savepoint fast')\n"), LONG_WAY)),
    mutant("the cut stays where it was", "stepped", (
        (PostgresTarget, "apply", "self._now_at(cut, list(tables.values()))",
         "self._now_at(mark.cut or cut, list(tables.values()))"), LONG_WAY)),
    mutant("an older follower goes on", "stepped", (
        (PostgresTarget, "_locked", "if mark.epoch != epoch:", "if False:"),
        (PostgresTarget, "apply", "cut < mark.cut", "False"), LONG_WAY)),
    mutant("a deleted row stays in the target", "stepped", (
        (PostgresTarget, "_merge_keyed", "when matched and d._weight < 0{written} then delete ",
         ""),)),
    mutant("a commit says that it is through more than it has taken", "stepped", (
        (Runner, "_commit", COMMITS, COMMITS.replace('"through": through',
         '"through": max(through, self.log.position)')),)),
    mutant("a commit is told before its rows are there", "stepped", (
        (Runner, "_commit", COMMITS, COMMITS.replace("transaction.append", "self.log.append")),)),
    mutant("the views of a commit are in several entries", "stepped", (
        (Runner, "_commit", "transaction.append(topic, self._as_rows(view, rows))",
         "self.log.append(topic, self._as_rows(view, rows))"),
        (Runner, "_commit", "transaction.append(topic_of(self.pipeline.name, name), given)",
         "self.log.append(topic_of(self.pipeline.name, name), given)"),)),
    mutant("a driver that was killed leaves a batch out", "stepped", (
        (Runner, "_commit", "with self.writer.transaction(state=status.to_json()) as transaction:",
         "with self.writer.transaction(state=status.to_json()):\n        pass\n"
         "    with self.writer.transaction(state=status.to_json()) as transaction:"),)),
    mutant("the source is told before the log has it", "stepped", (
        (Capture, "_stream", "self._take(group, control)",
         "stream.confirm(stream.received); self._take(group, control)"),)),
    mutant("a part that was killed stays away", "project", (
        (Supervisor, "_again", "crashes = len(part.crashes)",
         "part.state = 'done'; return\n    crashes = len(part.crashes)"),)),
    mutant("parts outlive their supervisor", "project", (
        (processes, "die_with_parent", "parent = os.getppid()", "return\n    parent = 0"),)),
]  # fmt: skip


# --- the slice in one thread ----------------------------------------------------------------------


class Killed(BaseException):
    """Whoever is at work ends here, as if it had been killed."""


class Stepped:
    """The whole slice in one thread."""

    def __init__(self, server: Server, source: str, target: str, folder: Path, seed: str) -> None:
        """Everything follows from the seed, but for when the server sends what."""
        from headrace.pipelines.files import load_pipeline

        self.chance = Random(f"slice stepped {seed}")
        self._stack = contextlib.ExitStack()
        connect = self._stack.enter_context
        self.source = connect(server.connect(source))
        self.target = connect(server.connect(target))
        shop.make_shop(self.source, 30)
        self.dsn = server.dsn(source)
        shop.write_project(folder, self.dsn, server.dsn(target), port="false", more=True)
        self.pipeline = load_pipeline(str(folder / "pipeline.py"))
        self.log = connect(hr.connect(folder / "data"))
        self.writer = shop.Writer(lambda: server.connect(source), 1, seed)
        self._stack.callback(self.writer.close)
        hasty = "-c lock_timeout=20"  # who holds a lock waits for us
        self.reader = shop.Reader(
            lambda: server.connect(target, options=hasty), 1, shop.MORE_CHECKS
        )
        self._stack.callback(self.reader.close)
        self.wrong: list[str] = []
        self.kills = self._pauses = 0
        self._at_work: Callable[[], None] = self._capture
        self._following: Follower | None = None
        self._stack.callback(self._end_follower)
        self._defined: Any = None

    def __enter__(self) -> Stepped:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def write(self, count: int) -> None:
        """Transactions of the shop."""
        for _ in range(count):
            self.writer.transaction()

    def look(self) -> None:
        """A reader of the target."""
        found = self.reader.look()
        self.wrong += [f"a reader saw: {one}" for one in (found.wrong if found else ())]

    def _pause(self) -> None:
        if self._pauses <= 0:
            return
        self._pauses -= 1
        which = self.chance.random()
        if which < (0.35 if self._at_work == self._follow else 0.1):
            self.look()
        elif which < 0.45:
            self.write(self.chance.choice([1, 1, 4]))
            if self._at_work == self._views:  # what comes between a batch and its commit
                left, self._pauses = self._pauses, 0
                self._capture()
                self._pauses = left
        elif which < (0.7 if self._at_work == self._views else 0.51):  # it commits rarely
            self.kills += 1
            raise Killed

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        commit, confirm = WriterTransaction.commit, Stream.confirm
        run, apply, say = PostgresTarget._run, PostgresTarget.apply, Runner._commit

        def around_commit(transaction: WriterTransaction) -> Any:
            self._pause()
            made = commit(transaction)
            self._pause()
            return made

        def before_say(runner: Runner, *given: Any) -> None:
            self._pause()
            say(runner, *given)

        def after_confirm(stream: Stream, position: int) -> None:
            confirm(stream, position)
            self._pause()

        def before_run(target: PostgresTarget, text: Any, *values: Any, **parts: Any) -> Any:
            if text != "rollback":
                self._pause()
            return run(target, text, *values, **parts)

        def after_apply(target: PostgresTarget, *given: Any) -> None:
            apply(target, *given)
            self._pause()

        with (
            mock.patch.object(WriterTransaction, "commit", around_commit),
            mock.patch.object(Runner, "_commit", before_say),
            mock.patch.object(Stream, "confirm", after_confirm),
            mock.patch.object(PostgresTarget, "_run", before_run),
            mock.patch.object(PostgresTarget, "apply", after_apply),
        ):
            yield

    def turn(self, pauses: int) -> None:
        """Let each part catch up, with so many pauses each; then look."""
        with self._watched():
            for part in (self._capture, self._views, self._follow):
                self._at_work, self._pauses = part, 0
                if part == self._follow and self.chance.random() < 0.5:
                    self._news()
                self._pauses = pauses
                while True:
                    try:
                        part()
                    except Killed:
                        continue
                    break
            self.look()

    def _news(self) -> None:
        """A follower that is at rest meets more, which it may apply on its quick way."""
        self._follow()
        self.write(5)
        self._capture()
        self._views()

    def _capture(self) -> None:
        Capture(self.log, "shop", self.dsn, heartbeat_seconds=0.05, group_rows=20).run("caught up")

    def _views(self) -> None:
        from headrace.pipelines.views.define import define_views

        if self._defined is None:
            self._defined = define_views(self.pipeline, self.log, None)
        rows = self.chance.choice([30, None])  # in several steps, or in one
        with Runner(self.pipeline, self.log, defined=self._defined, batch_rows=rows) as runner:
            runner.run("caught up")

    def _follower(self) -> Follower:
        return Follower(self.log, self.pipeline.kept["main"], patience=5.0)

    def _follow(self) -> None:
        """Go on with the one that is there, unless it was killed."""
        if self._following is None:
            self._following = self._follower()
        try:
            self._following.run("caught up")
        except BaseException:
            self._following.close()
            self._following = None
            raise

    def _end_follower(self) -> None:
        if self._following is not None:
            self._following.close()
            self._following = None

    def two_followers(self) -> None:
        """A second one comes; the first goes on as soon as there is something to do."""
        self._pauses = 0
        self._end_follower()
        with self._follower() as old, self._follower() as new:
            old.run("caught up")
            self.write(3)
            self._capture()
            self._views()
            new.run("caught up")
            self.look()
            self.write(3)
            self._capture()
            self._views()
            with contextlib.suppress(errors.Fenced):
                old.run("caught up")
                self.look()
            new.run("caught up")
            self.look()

    def finish(self) -> None:
        """All of it, compared by SQL."""
        self.turn(0)
        views = [*shop.VIEWS, *shop.MORE_VIEWS]
        self.wrong += shop.tables_differ(self.source, self.target, views)
        self.wrong += shop.views_disagree(self.log)


def stepped(server: Server, seed: str, rounds: int = 4, pauses: int = 50) -> list[str]:
    """One case; what is wrong, the first first."""
    names = [f"slice_{side}_{time.monotonic_ns()}" for side in ("source", "target")]
    with (
        tempfile.TemporaryDirectory(prefix="headrace-") as folder,
        fresh_database(server, names[0]) as source,
        fresh_database(server, names[1]) as target,
        Stepped(server, source, target, Path(folder), seed) as case,
    ):
        try:
            for number in range(rounds):
                case.write(case.chance.choice([3, 10, 30]))
                case.turn(pauses if number else 0)
                if number % 2:
                    case.two_followers()
                if case.wrong:
                    return case.wrong
            case.finish()
        except Exception as error:  # noqa: BLE001 - what was seen before counts too
            case.wrong.append(verdict_on(error, "stopped: "))
        return case.wrong


# --- a project in processes -----------------------------------------------------------------------


_for_good = contextlib.ExitStack()


def switch_on(name: str) -> None:
    """Have a bug in this process for good; `sitecustomize` of a hunted project calls it."""
    (bug,) = [one for one in BUGS if one.name == name]
    _for_good.enter_context(bug.on())


def project(bug: Bug | None, patience: float = 60.0) -> str:
    """A supervisor and its part, killed one after the other; what is wrong."""
    with tempfile.TemporaryDirectory(prefix="headrace-") as name:
        folder, code = Path(name, "project"), Path(name, "code")
        folder.mkdir()
        code.mkdir()
        (folder / "headrace.toml").write_text("[page]\nport = 0\n")
        environment = dict(os.environ)
        if bug is not None:
            called = (
                f"from headrace.testing import slice_bugs\nslice_bugs.switch_on({bug.name!r})\n"
            )
            (code / "sitecustomize.py").write_text(called)
            environment["PYTHONPATH"] = str(code)
        running = subprocess.Popen(
            [sys.executable, "-m", "headrace", "run", "--project", str(folder)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=environment,
        )  # fmt: skip
        try:
            return _killed(folder, running, patience)
        finally:
            running.kill()
            running.wait()
            end_marked(mark(folder))
            shutil.rmtree(folder, ignore_errors=True)


def _killed(folder: Path, running: subprocess.Popen[bytes], patience: float) -> str:
    of = find_project(folder)

    def ready(name: str | None = None, but: int | None = None) -> tuple[str, int] | None:
        for part in parts_of(of)["parts"]:
            if part["ready"] and name in (None, part["name"]) and part["pid"] != but:
                return part["name"], part["pid"]
        return None

    first = _comes(ready, patience)
    if not first:
        return f"{CRASH}the part never came"
    os.kill(first[1], signal.SIGKILL)
    if not _comes(lambda: ready(*first), patience / 4):
        ended = f"{CRASH}the supervisor ended: " if running.poll() is not None else ""
        return f"{ended}the part did not come back"
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    if not _comes(lambda: not marked(mark(folder)), patience / 12):
        return f"{len(marked(mark(folder)))} processes outlived the supervisor"
    return ""


def _comes(true: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


# --- the hunt -------------------------------------------------------------------------------------

TRIES = 8


def catch(bug: Bug, server: Server) -> Catch:
    """Look for a bug where it should show."""
    if "project" in bug.where:  # it is switched on in the processes of the project
        return look_for(
            bug.name, "a project, killed", TRIES,
            lambda _: (project(bug), 1), lambda _: (_project(), 1),
        )  # fmt: skip

    def buggy(number: int) -> tuple[str, int]:
        with bug.on():
            return _stepped(server, number), 1

    return look_for(
        bug.name, "stepped slice", TRIES, buggy, lambda number: (_sound(server, number), 1)
    )


def _stepped(server: Server, number: int) -> str:
    return "".join(stepped(server, f"hunt{number}")[:1])


_project = cache(lambda: project(None))
_sound = cache(_stepped)
"""What the same case says without any bug; looked for once."""


def hunt(only: str, say: Callable[[str], None]) -> list[Catch]:
    """Look for all bugs whose name contains `only`."""
    with Server(wal_writer_delay="10ms") as server:
        return each(BUGS, only, lambda bug: catch(bug, server), say)
