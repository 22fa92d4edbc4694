"""The long runs of the log: so many kills, so many power cuts, so many damages.

./run faults kills --count 1000 --seed 7         real processes, `kill -9`
./run faults cuts --count 1000 --seed 7          copies of a mounted image under load
./run faults damage --count 100000 --seed 7      the corruptor, log after log

Each prints one JSON object; 0 when nothing was found. Rounds, of a log each, run beside each other
(`--jobs`). What they can and cannot catch is said where the parts are: `real`, `image`, `decay`.
"""

from __future__ import annotations

import argparse
import functools
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from headrace.testing.image import in_memory, make_image, mounted, run, why_not
from headrace.testing.jobs import EVERY_PROCESSOR, say, spread
from headrace.testing.nursery import Nursery
from headrace.testing.promises import TAKEN, History
from headrace.testing.real import SMALL, Rebooted, account, history_from, prepare

ROUND = {"kills": 25, "cuts": 25, "damage": 1000}
"""Faults until a new log is begun: judging reads all of it."""


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
        parser.add_argument(
            "--jobs",
            type=int,
            default=EVERY_PROCESSOR,
            help="processes (default: one a processor)",
        )
        parser.set_defaults(run=main)


def main(chosen: argparse.Namespace) -> int:
    """Run one of them: rounds, spread over processes."""
    if chosen.command == "cuts" and why_not():
        print(f"skipped: {why_not()}", file=sys.stderr)
        return 2
    started = time.monotonic()
    work = {"kills": kills, "cuts": cuts, "damage": decay}[chosen.command]
    rounds = [
        Round(chosen.seed, number, min(ROUND[chosen.command], chosen.count - first))
        for number, first in enumerate(range(0, chosen.count, ROUND[chosen.command]))
    ]
    total: Counter[str] = Counter()
    wrong: list[str] = []
    for counted, found in spread(work, rounds, chosen.jobs):
        total.update(counted)
        wrong += found
        say(f"{dict(total)}, {len(wrong)} wrong")
    seconds = round(time.monotonic() - started)
    told = {**total, "seed": chosen.seed, "seconds": seconds, "wrong": wrong[:20]}
    print(json.dumps(told))
    return 1 if wrong else 0


class Round(NamedTuple):
    """So many faults to one log; seed and number say which."""

    seed: int
    number: int
    faults: int

    def rng(self, kind: str) -> Random:
        """The dice of a round."""
        return Random(f"{kind}/{self.seed}/{self.number}")


Found = tuple[Counter[str], list[str]]
"""What was done, counted, and what was wrong."""


@functools.cache
def _nursery() -> Nursery:
    """One a process; its children end with it."""
    return Nursery("headrace.testing.worker", "pandas")


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

    def stop(self) -> None:
        """Stop them all; who is inside a system call finishes it first."""
        self.send(signal.SIGSTOP)
        for pid in (*self.writers, *self.others):
            while self._nursery.alive(pid) and not _stopped(pid):
                time.sleep(0.001)

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
        looks = 12_000  # a minute, if this process gets the processor as often as they do
        for out in (self.writers[pid] for pid in pids or self.writers):
            while not (out.exists() and "taken" in out.read_text()):
                looks -= 1
                if looks < 0:
                    raise AssertionError(f"no receipt within a minute: {out.read_text()[-500:]}")
                time.sleep(0.005)


def _stopped(pid: int) -> bool:
    """Whether all threads of a process stand still, as the kernel says."""
    states = (file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/stat"))
    return all(text.rpartition(")")[2].split()[0] == "T" for text in states)


def kills(one: Round) -> Found:
    """Kill writers, followers and keepers at random; the log is judged at the end of its time."""
    rng = one.rng("kills")
    with tempfile.TemporaryDirectory() as place:
        folder, out = Path(place, "log"), Path(place, "out")
        out.mkdir()
        prepare(str(folder))
        durability = rng.choice(("fsync", "fsync", "os"))
        with _Crowd(_nursery(), str(folder), out) as crowd:
            tasks = {crowd.start(task): task for task in ("follow", "keep")}
            for _ in range(3):
                crowd.start("append", durability=durability)
            for _ in range(one.faults):
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
        wrong = [f"round {one.number}: {text}" for text in account(str(folder), history)]
        return _counted(history, kills=one.faults), wrong


def cuts(one: Round) -> Found:
    """Cut the power again and again: what is on the image then is what would be left.

    The image is in memory: what of it a disk would have is not changed by that, for a sync of the
    mounted filesystem writes to the image, and nothing else does.
    """
    rng = one.rng("cuts")
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as place, in_memory(Path(place, "memory"), 256) as memory:
        image, copy = make_image(memory / "disk.img", 32), memory / "copy.img"
        out = Path(place, "out")
        out.mkdir()
        durability = rng.choice(("fsync", "fsync", "os"))
        with mounted(image, Path(place, "disk")) as disk:
            folder = disk / "data"
            prepare(str(folder))
            subprocess.run(["sync", "-f", str(folder)], check=True)  # the folder itself, once
            with _Crowd(_nursery(), str(folder), out) as crowd:
                crowd.start("follow", durability=durability)
                crowd.start("keep")
                for _ in range(2):
                    crowd.start("append", durability=durability)
                crowd.taking()
                for _ in range(one.faults):
                    time.sleep(rng.random() * 0.1)
                    crowd.stop()
                    history = crowd.history(durable=durability == "fsync")
                    run("cp", "--sparse=always", str(image), str(copy))
                    crowd.send(signal.SIGCONT)
                    with mounted(copy, Path(place, "after")) as after:
                        found = account(str(after / "data"), history, system=Rebooted())
                    wrong += [f"round {one.number}: {text}" for text in found]
    return _counted(history, cuts=one.faults), wrong


def _counted(history: History, **faults: int) -> Counter[str]:
    return Counter(
        logs=1,
        appends=len(history.attempts),
        acknowledged=sum(attempt.outcome == TAKEN for attempt in history.attempts),
        rows_read=sum(len(shown.rows) for shown in history.shown),
        **faults,
    )


def decay(one: Round) -> Found:
    """Spoil a log, a choice of all ways to spoil each of its files."""
    from headrace.testing.decay import HARMLESS, Unread, aged, examine

    counted: Counter[str] = Counter()
    wrong: list[str] = []
    rng = one.rng("damage")
    while counted["damages"] < one.faults:
        seed = rng.randrange(1, 1 << 30)
        log = aged(seed, (1, 2))
        unread, every = Unread(log), list(log.damages(rng, 4))
        counted["logs"] += 1
        for damage in rng.sample(every, min(len(every), one.faults - counted["damages"])):
            if unread.covers(damage):
                how, what = f"{HARMLESS}, not read", ""
            else:
                how, what = examine(log, damage)
            counted["damages"] += 1
            counted[f"noticed: {how}" if how else "silent"] += 1
            counted[f"of {damage.file.partition('/')[0]}"] += 1
            if what:
                wrong.append(f"log {seed}: {damage}: {how or 'SILENT'}: {what}")
    return counted, wrong
