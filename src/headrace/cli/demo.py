"""``headrace demo``: the log alive, with real processes, one of which is killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import IO, Any

import click

from headrace.cli.options import (
    Command,
    counted,
    json_option,
    lasting,
    sized,
)
from headrace.errors import BadUsage, IoFailed

SHOPS = ("north", "south")
PATIENCE_SECONDS = 10.0


@click.command(cls=Command, example="headrace demo --keep ./demo")
@click.option(
    "--seconds",
    metavar="N",
    type=click.FloatRange(1, 600),
    default=8.0,
    help="How long the producers run; by default 8.",
)
@click.option("--keep", metavar="DIR", help="Make the log in DIR and keep it; by default it goes.")
@json_option
@click.pass_context
def demo(ctx: click.Context, seconds: float, keep: str | None, as_json: bool) -> None:
    """Show the log alive: two producers and a follower; one is killed, and nothing is lost."""
    if keep is not None and os.path.exists(keep) and (not os.path.isdir(keep) or os.listdir(keep)):
        raise BadUsage(f"--keep {keep} is there already", fix="name a folder that is not there")
    screen = _Screen(sys.stderr if as_json else sys.stdout)
    with _folder(keep) as folder, _ended_by_signals():
        with _Demo(folder, seconds, screen) as show:
            summary = show.run()
        if keep is not None:
            screen.line("")
            screen.line(f"The log is kept in {keep}. Try:")
            for command in _next(keep):
                screen.line(f"  {command}")
    if keep is None:
        screen.line("")
        screen.line(
            f"Next: {_program()} demo --keep ./demo keeps the log and says what to try on it."
        )
    if as_json:
        click.echo(json.dumps(summary))
    if not summary["ok"]:
        ctx.exit(1)


def _next(folder: str) -> Iterator[str]:
    program = _program()
    where = f"--log {folder}"
    yield f"{program} topic show orders {where}"
    yield f"{program} topic tail orders -n 5 {where}"
    yield f"{program} topic read orders --limit 3 --with-position {where}"
    yield f"{program} log stats {where}"
    row = '{"shop": "west", "number": 1, "amount": 9.5}'
    yield f"echo '{row}' | {program} topic append orders {where}"


def _program() -> str:
    """How the user calls headrace: through ./run, or by its name."""
    by_module = os.path.basename(sys.argv[0]) == "__main__.py"
    return "./run headrace" if by_module and os.path.isfile("run") else "headrace"


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[str]:
    if keep is not None:
        yield keep
        return
    folder = tempfile.mkdtemp(prefix="headrace-demo-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM end the demo as Ctrl-C does: with everything cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:  # noqa: ARG001
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Screen:
    """Lines that stay, and on a terminal a few below them that move."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.moves = stream.isatty()
        self._drawn = 0

    def line(self, text: str, *, bold: bool = False) -> None:
        """Print a line that stays."""
        self._erase()
        self._print(click.style(text, bold=True) if bold and self.moves else text)

    def draw(self, lines: list[str]) -> None:
        """Show these below, in place of those before; on a terminal only."""
        if self.moves:
            self._erase()
            width = shutil.get_terminal_size().columns - 1
            for line in lines:
                self._print(line[:width])
            self._drawn = len(lines)

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def keep(self) -> None:
        """Let what is drawn stand."""
        self._drawn = 0

    def _print(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class _Worker:
    """A process of the demo, and what it has said."""

    def __init__(self, *arguments: str, hears: Callable[[list[str]], None]) -> None:
        command = [sys.executable, "-m", "headrace.cli.demo_worker", *arguments]
        pipe = subprocess.PIPE
        # Its own session: Ctrl-C reaches the demo, which ends the others in order.
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        self._hears = hears
        self._ear = threading.Thread(target=self._listen, daemon=True)
        self._ear.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith(b"\n"):  # not one that a kill cut off
                self._hears(line.decode().split())

    def stop(self) -> None:
        """Let it finish what it does, then end."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def kill(self) -> None:
        """End it as `kill -9` does, and hear what it had said before."""
        self.process.kill()
        self.wait()

    def wait(self) -> None:
        """Wait for its end; one that does not end in time is killed."""
        try:
            self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._ear.join(PATIENCE_SECONDS)

    def close(self) -> None:
        """Leave nothing behind."""
        self.stop()
        self.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def check(self) -> None:
        """Raise what ended it, if something did."""
        code = self.process.poll()
        if code not in (None, 0, -signal.SIGKILL):
            assert self.process.stderr is not None
            said = self.process.stderr.read().decode(errors="replace").strip().splitlines()
            raise IoFailed(
                f"a process of the demo ended with {code}",
                why=said[-1] if said else "it said nothing",
            )


class _Shop:
    """What is known of one producer, over its lives."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.worker: _Worker | None = None
        self.acknowledged = 0
        """Entries, by receipts."""
        self.stored: int | None = None
        """Entries, by the log, when the producer last claimed its name."""
        self.syncs = self.syncs_before = 0
        self.position = 0

    def hear(self, words: list[str]) -> None:
        if words[0] == "stored":
            self.stored = int(words[1])
        else:
            self.position, self.acknowledged, self.syncs = (int(word) for word in words[1:])

    def start(self, folder: str) -> None:
        self.stored = None
        self.syncs_before += self.syncs
        self.syncs = 0
        self.worker = _Worker("produce", folder, self.name, hears=self.hear)


class _Follower:
    """What the follower has said."""

    def __init__(self, folder: str) -> None:
        self.ready = False
        self.rows = self.position = 0
        self.waits = (0.0, 0.0)
        """Milliseconds from append to visible: half of the entries, and 99 of 100, within."""
        self.worker = _Worker("follow", folder, hears=self.hear)

    def hear(self, words: list[str]) -> None:
        if words[0] == "follows":
            self.ready = True
            return
        self.rows, self.position = int(words[1]), int(words[2])
        self.waits = (float(words[3]), float(words[4]))


class _Demo:
    def __init__(self, folder: str, seconds: float, screen: _Screen) -> None:
        self.folder = folder
        self.seconds = seconds
        self.screen = screen
        self.shops = [_Shop(name) for name in SHOPS]
        self.follower: _Follower | None = None
        self.began = self.ran = 0.0
        self.killed: dict[str, Any] = {}

    def __enter__(self) -> _Demo:
        return self

    def __exit__(self, *exception: object) -> None:
        workers = [shop.worker for shop in self.shops if shop.worker is not None]
        if self.follower is not None:
            workers.append(self.follower.worker)
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.close()

    def run(self) -> dict[str, Any]:
        self._prepare()
        self.began = time.monotonic()
        self._show(self.seconds / 2)
        self._kill(self.shops[0])
        self._show(self.seconds / 2)
        self._stop()
        return self._verify()

    # -- acts -------------------------------------------------------------------------------

    def _prepare(self) -> None:
        import headrace
        from headrace.cli.demo_worker import ROWS, SCHEMA, TOPIC
        from headrace.log.embedded.system import filesystem_of

        kind = filesystem_of(self.folder)
        note = ": in memory, so fsync costs nothing here" if kind in ("tmpfs", "ramfs") else ""
        self.rows_of_entry = ROWS
        with headrace.connect(self.folder) as log:
            log.create_topic(TOPIC, SCHEMA, key="number", partitions=4)
        self.screen.line(
            "Headrace demo: a log in a folder, shared by processes, without a server", bold=True
        )
        self.screen.line(f"  folder    {self.folder} ({kind}{note})")
        self.follower = _Follower(self.folder)
        for shop in self.shops:
            shop.start(self.folder)
        self._wait_for(
            lambda: self._follower.ready and all(shop.stored is not None for shop in self.shops)
        )
        pids = ", ".join(str(shop.worker.pid) for shop in self.shops if shop.worker is not None)
        self.screen.line(
            f"  processes 2 producers ({pids}) append entries of {ROWS} rows,"
            f" 1 follower ({self._follower.worker.pid}) reads them"
        )
        self.screen.line(
            "  promise   an entry is acknowledged, and visible, once it is on the disk"
        )
        self.screen.line("")

    @property
    def _follower(self) -> _Follower:
        assert self.follower is not None
        return self.follower

    def _wait_for(self, there: Callable[[], bool]) -> float:
        """Wait for something to be said; the seconds it took."""
        began = time.monotonic()
        while not there():
            self._check()
            if time.monotonic() - began > PATIENCE_SECONDS:
                raise IoFailed(
                    f"a process of the demo was silent for {PATIENCE_SECONDS:g} s",
                    fix="the machine may be very busy: try again",
                )
            time.sleep(0.01)
        return time.monotonic() - began

    def _check(self) -> None:
        for worker in (*(shop.worker for shop in self.shops), self._follower.worker):
            if worker is not None:
                worker.check()

    def _show(self, seconds: float) -> None:
        """Let it run, with live numbers: on a terminal in place, else a line a second."""
        end = time.monotonic() + seconds
        step = 0.1 if self.screen.moves else min(1.0, seconds)
        samples = deque([(time.monotonic(), self.rows)], maxlen=max(2, round(1 / step)))
        while (left := end - time.monotonic()) > 0.01:
            time.sleep(min(step, left))
            self._check()
            now, rows = time.monotonic(), self.rows
            rate = (rows - samples[0][1]) / (now - samples[0][0])
            samples.append((now, rows))
            if self.screen.moves:
                self.screen.draw(self._numbers(rate))
            else:
                samples.popleft()
                self.screen.line(f"  {self._in_short(rate)}")
        self.screen.keep()

    def _kill(self, shop: _Shop) -> None:
        assert shop.worker is not None
        pid = shop.worker.pid
        shop.worker.kill()
        heard = shop.acknowledged
        shop.worker.close()
        self.screen.line("")
        self.screen.line(
            f"kill -9   producer '{shop.name}' ({pid}) was killed while it appended,"
            f" {counted(heard * self.rows_of_entry, 'row')} acknowledged"
        )
        shop.start(self.folder)
        seconds = self._wait_for(lambda: shop.stored is not None)
        stored = shop.stored or 0
        shop.acknowledged = max(shop.acknowledged, stored)
        unheard = (stored - heard) * self.rows_of_entry
        self.killed = {
            "pid": pid,
            "acknowledged": heard * self.rows_of_entry,
            "stored": stored * self.rows_of_entry,
            "restart_seconds": round(seconds, 3),
        }
        found = "just these"
        if unheard:
            found = (
                f"these and {unheard:,} more, whose answer the kill cut off; it sends none again"
            )
        self.screen.line(
            f"restart   it is back after {seconds:.1f} s, and the log tells it"
            f" what it had stored: {found}"
        )
        self.screen.line("")

    def _stop(self) -> None:
        for shop in self.shops:
            assert shop.worker is not None
            shop.worker.stop()
        for shop in self.shops:
            assert shop.worker is not None
            shop.worker.wait()
        self._check()
        self.ran = time.monotonic() - self.began
        end = max(shop.position for shop in self.shops)
        self._follower.worker.stop()
        self._wait_for(lambda: self._follower.position >= end)
        self._follower.worker.wait()

    def _verify(self) -> dict[str, Any]:
        from headrace.log.embedded.check import check
        from headrace.log.embedded.system import OsSystem

        began = time.monotonic()
        report = check(OsSystem(), os.path.abspath(self.folder))
        seconds = time.monotonic() - began
        self.screen.line("")
        self.screen.line(
            f"check     {'sound' if report.ok else 'DAMAGED'}:"
            f" {counted(report.entries, 'entry', 'entries')}, {counted(report.rows, 'row')},"
            f" {sized(report.bytes)} read and verified in {lasting(seconds)}"
        )
        read, lost, twice = self._recount()
        follower = self._follower
        self.screen.line(
            f"recount   {self.rows:,} acknowledged, {read:,} read, {lost:,} lost, {twice:,} twice;"
            f" the follower saw {follower.rows:,}",
            bold=True,
        )
        ok = report.ok and not lost and not twice and read == self.rows == follower.rows
        half, most = follower.waits
        return {
            "ok": ok,
            "seconds": round(self.ran, 3),
            "rows_per_second": round(self.rows / self.ran),
            "entries": self.entries,
            "fsyncs": self.syncs,
            "entries_per_fsync": round(self.shared, 2),
            "visible_ms": {"p50": half, "p99": most},
            "killed": self.killed,
            "check": report.to_json() | {"seconds": round(seconds, 3)},
            "acknowledged": self.rows,
            "read": read,
            "lost": lost,
            "twice": twice,
            "followed": follower.rows,
        }

    def _recount(self) -> tuple[int, int, int]:
        """Read all rows: how many, which acknowledged ones are missing, which come again."""
        import numpy as np
        import pyarrow.compute as pc

        import headrace
        from headrace.cli.demo_worker import TOPIC

        read = lost = twice = 0
        counts = {shop.name: np.zeros(0, np.int64) for shop in self.shops}
        with headrace.connect(self.folder, create=False) as log:
            for batch in log.read(TOPIC, columns=["shop", "number"]):
                read += len(batch)
                for name, known in counts.items():
                    mine = batch.data.filter(pc.equal(batch.data.column("shop"), name))
                    found = np.bincount(mine.column("number").to_numpy(), minlength=len(known))
                    found[: len(known)] += known
                    counts[name] = found
        for shop in self.shops:
            wanted = shop.acknowledged * self.rows_of_entry
            found = counts[shop.name]
            lost += int(np.count_nonzero(found[:wanted] == 0)) + max(0, wanted - len(found))
            twice += int(np.count_nonzero(found > 1))
        return read, lost, twice

    # -- numbers ----------------------------------------------------------------------------

    @property
    def entries(self) -> int:
        return sum(shop.acknowledged for shop in self.shops)

    @property
    def rows(self) -> int:
        return self.entries * self.rows_of_entry

    @property
    def syncs(self) -> int:
        return sum(shop.syncs + shop.syncs_before for shop in self.shops)

    @property
    def shared(self) -> float:
        return self.entries / self.syncs if self.syncs else 0.0

    def _in_short(self, rate: float) -> str:
        half, _ = self._follower.waits
        return (
            f"{self.rows:,} rows acknowledged ({rate:,.0f}/s) in {self.entries:,} entries,"
            f" {self.shared:.1f} to an fsync; visible after {half:.1f} ms"
        )

    def _numbers(self, rate: float) -> list[str]:
        half, most = self._follower.waits
        return [
            f"  acknowledged {self.rows:>11,} rows  {rate:,.0f} rows/s, all on the disk",
            f"  entries      {self.entries:>11,}       {self.shared:.1f} share an fsync,"
            f" {self.syncs:,} fsyncs",
            f"  followed     {self._follower.rows:>11,} rows  visible after {half:.1f} ms,"
            f" 99 of 100 within {most:.1f} ms",
        ]
