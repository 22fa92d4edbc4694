"""The long runs of the log: so many kills, so many power cuts, so many damages.

./run faults kills --count 1000 --seed 7         real processes, `kill -9`
./run faults cuts --count 1000 --seed 7          copies of a mounted image under load
./run faults damage --count 100000 --seed 7      the corruptor, log after log

Each prints one JSON object; 0 when nothing was found. What they can and cannot catch is said where
the parts are: `real`, `image`, `decay`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from headrace.testing.image import make_image, mounted, run, why_not
from headrace.testing.nursery import Nursery
from headrace.testing.promises import TAKEN, History
from headrace.testing.real import SMALL, Rebooted, account, history_from, prepare

ROUND = 25
"""Kills or cuts until a new log is begun: judging reads all of it."""


def add_commands(commands: Any) -> None:
    """The commands of this module."""
    for name, text, count in (
        ("kills", "real processes killed in mid-append", 1000),
        ("cuts", "real power cuts: copies of a mounted image under load", 1000),
        ("damage", "files of a log at rest spoilt, each in many ways", 100_000),
    ):
        parser = commands.add_parser(name, help=text)
        parser.add_argument("--seed", type=int, default=1, help="the first seed (default 1)")
        parser.add_argument("--count", type=int, default=count, help=f"(default {count})")
        parser.set_defaults(run=main)


def main(chosen: argparse.Namespace) -> int:
    """Run one of them."""
    started = time.monotonic()
    found = {"kills": kills, "cuts": cuts, "damage": decay}[chosen.command](
        chosen.count, chosen.seed, lambda text: print(text, file=sys.stderr, flush=True)
    )
    if isinstance(found, str):
        print(f"skipped: {found}", file=sys.stderr)
        return 2
    print(json.dumps({**found, "seconds": round(time.monotonic() - started)}))
    return 1 if found["wrong"] else 0


Say = Callable[[str], None]


class _Crowd:
    """Writers, a follower and a keeper on one folder, and what they have said."""

    def __init__(self, nursery: Nursery, folder: str, out: Path) -> None:
        self._nursery, self._folder, self._out = nursery, folder, out
        self._number = 0
        self.others: dict[int, Path] = {}
        """Followers and keepers."""
        self.writers: dict[int, Path] = {}
        self.files: list[Path] = []

    def start(self, task: str, **settings: Any) -> int:
        self._number += 1
        out = self._out / f"{self._number}.txt"
        first = ["--first", str(self._number * 1_000_000), "--pause", "0.005"]
        arguments = [self._folder, task, *(first if task == "append" else ())]
        arguments += ["--settings", json.dumps({**SMALL, **settings})]
        pid = self._nursery.fork("headrace.testing.worker", arguments, str(out))
        (self.writers if task == "append" else self.others)[pid] = out
        self.files.append(out)
        return pid

    def send(self, number: int) -> None:
        for pid in (*self.writers, *self.others):
            self._nursery.send(pid, number)

    def kill(self, pid: int) -> None:
        self._nursery.send(pid, signal.SIGKILL)
        self.writers.pop(pid, None)
        self.others.pop(pid, None)
        while self._nursery.alive(pid):
            time.sleep(0.001)

    def __enter__(self) -> _Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill them all."""
        for pid in (*self.writers, *self.others):
            self.kill(pid)

    def history(self, *, durable: bool = True) -> History:
        lines = [file.read_text().splitlines() if file.exists() else [] for file in self.files]
        return history_from(lines, durable=durable)

    def taking(self, *pids: int) -> None:
        """Wait until these writers, or all, have had a receipt."""
        deadline = time.monotonic() + 60
        for out in (self.writers[pid] for pid in pids or self.writers):
            while not (out.exists() and "taken" in out.read_text()):
                if time.monotonic() > deadline:
                    raise AssertionError(f"no receipt within 60 s: {out.read_text()[-500:]}")
                time.sleep(0.005)


def _rounds(count: int) -> Iterator[int]:
    for first in range(0, count, ROUND):
        yield min(ROUND, count - first)


def kills(count: int, seed: int, say: Say) -> dict[str, Any]:
    """Kill writers, followers and keepers at random; every log is judged at the end of its time."""
    rng = Random(f"kills/{seed}")
    total: Counter[str] = Counter()
    wrong: list[str] = []
    with (
        Nursery("headrace.testing.worker", "pandas") as nursery,
        tempfile.TemporaryDirectory() as place,
    ):
        for number, mine in enumerate(_rounds(count)):
            folder, out = Path(place, f"log{number}"), Path(place, f"out{number}")
            out.mkdir()
            prepare(str(folder))
            durability = rng.choice(("fsync", "fsync", "os"))
            with _Crowd(nursery, str(folder), out) as crowd:
                tasks = {crowd.start(task): task for task in ("follow", "keep")}
                for _ in range(3):
                    crowd.start("append", durability=durability)
                for _ in range(mine):
                    time.sleep(rng.random() * 0.15)
                    if rng.random() < 0.2:
                        other = rng.choice(list(crowd.others))
                        crowd.kill(other)
                        tasks[crowd.start(tasks[other])] = tasks[other]
                    else:
                        victim = rng.choice(list(crowd.writers))
                        if rng.random() < 0.8:  # the others die while they open the log
                            crowd.taking(victim)
                        crowd.kill(victim)
                        crowd.start("append", durability=durability)
                crowd.taking()
            history = crowd.history(durable=durability == "fsync")
            wrong += [f"round {number}: {text}" for text in account(str(folder), history)]
            total.update(kills=mine, logs=1)
            _count(total, history)
            shutil.rmtree(folder)
            say(f"{total['kills']} kills, {total['acknowledged']} acknowledged, {len(wrong)} wrong")
    return {**total, "seed": seed, "wrong": wrong[:20]}


def cuts(count: int, seed: int, say: Say) -> dict[str, Any] | str:
    """Cut the power again and again: what is on the image then is what would be left."""
    if why_not():
        return why_not()
    rng = Random(f"cuts/{seed}")
    total: Counter[str] = Counter()
    wrong: list[str] = []
    with (
        Nursery("headrace.testing.worker", "pandas") as nursery,
        tempfile.TemporaryDirectory() as place,
    ):
        for number, mine in enumerate(_rounds(count)):
            image, out = make_image(Path(place, "disk.img")), Path(place, f"out{number}")
            out.mkdir()
            durability = rng.choice(("fsync", "fsync", "os"))
            with mounted(image, Path(place, "disk")) as disk:
                folder = disk / "data"
                prepare(str(folder))
                subprocess.run(["sync", "-f", str(folder)], check=True)  # the folder itself, once
                with _Crowd(nursery, str(folder), out) as crowd:
                    crowd.start("follow", durability=durability)
                    crowd.start("keep")
                    for _ in range(2):
                        crowd.start("append", durability=durability)
                    crowd.taking()
                    for _ in range(mine):
                        time.sleep(rng.random() * 0.1)
                        crowd.send(signal.SIGSTOP)
                        time.sleep(0.02)  # whoever is inside a system call finishes it
                        history = crowd.history(durable=durability == "fsync")
                        run("cp", "--sparse=always", str(image), str(Path(place, "copy.img")))
                        with mounted(Path(place, "copy.img"), Path(place, "after")) as after:
                            found = account(str(after / "data"), history, system=Rebooted())
                        wrong += [f"round {number}: {text}" for text in found]
                        total.update(cuts=1)
                        crowd.send(signal.SIGCONT)
            total.update(logs=1)
            _count(total, history)
            say(f"{total['cuts']} cuts, {total['acknowledged']} acknowledged, {len(wrong)} wrong")
    return {**total, "seed": seed, "wrong": wrong[:20]}


def _count(total: Counter[str], history: History) -> None:
    taken = sum(attempt.outcome == TAKEN for attempt in history.attempts)
    total.update(
        appends=len(history.attempts), acknowledged=taken,
        rows_read=sum(len(shown.rows) for shown in history.shown),
    )  # fmt: skip


def decay(count: int, seed: int, say: Say) -> dict[str, Any]:
    """Spoil log after log, each file of each in every way, until there were so many damages."""
    from headrace.testing.decay import aged, examine

    noticed: Counter[str] = Counter()
    files: Counter[str] = Counter()
    wrong: list[str] = []
    tried = logs = 0
    while tried < count:
        log = aged(seed + logs, (1, 2))
        for damage in log.damages(Random(seed + logs), 4):
            how, what = examine(log, damage)
            tried += 1
            noticed[how or "silent"] += 1
            files[damage.file.partition("/")[0]] += 1
            if what:
                wrong.append(f"seed {seed + logs}: {damage}: {how or 'SILENT'}: {what}")
            if tried == count:
                break
        logs += 1
        say(f"{tried} damages to {logs} logs, {dict(noticed)}, {len(wrong)} wrong")
    return {
        "damages": tried, "logs": logs, "noticed": noticed, "files": files, "seed": seed,
        "wrong": wrong[:20],
    }  # fmt: skip
