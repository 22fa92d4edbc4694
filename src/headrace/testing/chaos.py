"""Chaos: many real processes on one log, everything done to them at once, and a history judged.

The **director** keeps a number of workers of each role (`chaos_worker`) alive and, from a seed,
kills them (`kill -9`), stops and continues them, starts some with few descriptors or little memory,
fills the disk for a while (a loop-mounted image, where root allows it), and lets the clock of some
of them jump by hours (libfaketime, where it is installed). Everything is recorded by the workers,
outside of that disk. In the end all are gone, the log is opened, checked and read, and
`chaos_history.judge` says what is wrong: that is nothing, or a bug.

What it can catch: whatever the simulated machine has wrong about Linux, and what nobody thought of
putting together. What it cannot: instants that did not happen; power cuts (`./run faults cuts`).
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from headrace.clock import SystemClock
from headrace.log.embedded.check import check
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.system import OsSystem
from headrace.settings import LogSettings
from headrace.testing import image
from headrace.testing.chaos_history import (
    Final,
    History,
    Kept,
    Place,
    counted,
    first_of_each,
    judge,
    take_lines,
)
from headrace.testing.chaos_worker import (
    COPIED,
    GROUPS,
    SCHEMA,
    TOPICS,
    TWINS,
    rows_of,
    tables_of,
)
from headrace.testing.jobs import say, seeds
from headrace.testing.nursery import Nursery

SETTINGS: dict[str, Any] = {
    "journal_bytes_first": 64 << 10, "journal_bytes_max": 1 << 20, "inline_bytes_max": 48 << 10,
    "chunk_bytes": 32 << 10, "quiet_seconds": 0.1, "lock_timeout_seconds": 4.0,
}  # fmt: skip
"""Files are small, so that every second brings several of all kinds."""
CROWD = {
    "producer": 3, "writer": 2, "follower": 2, "rover": 1, "table reader": 1, "keeper": 2,
    "holder": 1, "member": 3, "copier": 2,
}  # fmt: skip
ON_TIME = ("keeper", "holder")
"""Their clocks do not jump: a hold counts until a time."""
RETENTION = 10_000
DAYS = 10 * 86_400.0
"""The grace of what says that a key is gone: further than clocks jump."""
FAULTS = {"kill": 10, "stop": 5, "jump": 2, "fill": 1}
"""How often each is done, among each other."""
MODULE = "headrace.testing.chaos_worker"
MODULES = (MODULE, "pandas", "headrace.tables.table")
"""What a worker imports sooner or later: once, before it is forked."""
DISK_MB = 512
NEVER_WELL = ("LogDamaged", "PackDamaged", "NotALog", "NewerFormat", "BadRows", "UnknownTopic")
"""Errors that no fault of these excuses."""


@dataclass(slots=True)
class Found:
    """What a case came to."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Hand:
    """A worker that is alive."""

    pid: int
    role: str
    nursery: Nursery
    limited: bool
    stopped_until: float = 0.0


def faketime() -> str:
    """Where libfaketime is; empty: nowhere."""
    return next(iter(glob.glob("/usr/lib/*/faketime/libfaketime.so.1")), "")


class Director:
    """Starts workers, and does things to them."""

    def __init__(self, folder: Path, records: Path, seed: str, found: Found) -> None:
        """Nothing runs yet."""
        self._folder, self._records = folder, records
        self._rng = Random(f"director/{seed}")
        self._found = found
        self._started = 0
        self._hands: list[_Hand] = []
        self._clock = records / "clock"
        self._set_clock("+0")
        self._true = Nursery(*MODULES)
        self._false = self._true
        if faketime():
            jumping = {
                "LD_PRELOAD": faketime(), "FAKETIME_TIMESTAMP_FILE": str(self._clock),
                "FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "DONT_FAKE_MONOTONIC": "1",
            }  # fmt: skip
            self._false = Nursery(*MODULES, environment=jumping)
        else:
            found.skipped.append("clock jumps: libfaketime is not installed")
        self.limited: set[str] = set()
        """Names of the workers that were given less than they need."""

    def _set_clock(self, offset: str) -> None:
        """Replaced in one step: a worker reads it at any time."""
        new = self._clock.with_suffix(".new")
        new.write_text(f"{offset}\n")
        new.replace(self._clock)

    def run(self, seconds: float, crowd: Mapping[str, int]) -> None:
        """Break things for a while, then end everybody."""
        deadline = time.monotonic() + seconds
        faults = [name for name, often in FAULTS.items() for _ in range(often)]
        try:
            while time.monotonic() < deadline:
                self._fill_up(crowd)
                time.sleep(self._rng.uniform(0.02, 0.4))
                self._wake()
                fault = self._rng.choice(faults)
                if getattr(self, f"_{fault}")() is not False:
                    self._found.counts[f"{fault}s"] += 1
            self._end()
        finally:
            self._true.close()
            if self._false is not self._true:
                self._false.close()

    # --- the crowd ---

    def _fill_up(self, crowd: Mapping[str, int]) -> None:
        for hand in list(self._hands):
            if not hand.nursery.alive(hand.pid):
                self._hands.remove(hand)  # ended by itself, under its limits
        for role, wanted in crowd.items():
            for _ in range(wanted - sum(hand.role == role for hand in self._hands)):
                self._start(role)

    def _start(self, role: str) -> None:
        self._started += 1
        name = f"{self._started}-{role.replace(' ', '-')}"
        limits: dict[str, int] = {}
        if self._rng.random() < 0.15:
            if self._rng.random() < 0.5:
                limits["files"] = self._rng.randint(12, 60)
            else:
                limits["memory"] = self._rng.randint(20, 300) << 20
            self.limited.add(name)
            self._found.counts["limited"] += 1
        jumps = self._rng.random() < 0.3 and role not in ON_TIME
        nursery = self._false if jumps else self._true
        record = self._records / f"{name}.ndjson"
        arguments = [str(self._folder), role, str(self._started), str(record)]
        arguments += ["--settings", json.dumps(SETTINGS)]
        pid = nursery.fork(MODULE, arguments, os.devnull, limits)
        self._hands.append(_Hand(pid, role, nursery, bool(limits)))

    def _wake(self) -> None:
        for hand in self._hands:
            if hand.stopped_until and hand.stopped_until < time.monotonic():
                hand.nursery.send(hand.pid, signal.SIGCONT)
                hand.stopped_until = 0.0

    # --- faults ---

    def _kill(self) -> None:
        for hand in self._rng.sample(self._hands, 1 if self._rng.random() < 0.9 else 3):
            hand.nursery.send(hand.pid, signal.SIGKILL)
            self._hands.remove(hand)

    def _stop(self) -> None:
        hand = self._rng.choice(self._hands)
        hand.nursery.send(hand.pid, signal.SIGSTOP)
        hand.stopped_until = time.monotonic() + self._rng.choice((0.05, 0.3, 1.5))

    def _jump(self) -> bool:
        self._set_clock(f"{self._rng.randint(-90_000, 90_000):+d}")
        return self._false is not self._true

    def _fill(self) -> bool:
        if image.why_not() or self._rng.random() < 0.5:
            return False
        filler = self._folder.parent / "filler"
        left = os.statvfs(filler.parent)
        with open(filler, "wb") as file, contextlib.suppress(OSError):
            keep = self._rng.choice((0, 0, 64 << 10))
            os.posix_fallocate(file.fileno(), 0, max(1, left.f_bavail * left.f_frsize - keep))
        time.sleep(self._rng.uniform(0.2, 1.5))
        filler.unlink()
        return True

    def _end(self) -> None:
        for hand in self._hands:
            hand.nursery.send(hand.pid, signal.SIGCONT)
            hand.nursery.send(hand.pid, signal.SIGTERM)
        looks = 3000  # not a time: where this process gets no processor, nor do they
        for hand in self._hands:
            while hand.nursery.alive(hand.pid):
                looks -= 1
                if looks < 0:
                    self._found.counts["hung"] += 1
                    hand.nursery.send(hand.pid, signal.SIGUSR1)  # it says where, to stderr
                    if not hand.limited:
                        self._found.wrong.append(f"hangs: a {hand.role} did not end within 30 s")
                    break
                time.sleep(0.01)


def case(seed: str, seconds: float, crowd: Mapping[str, int] = CROWD) -> Found:
    """One log, from its making to the judgement."""
    found = Found()
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        records = Path(place, "records")
        records.mkdir()
        disk = Path(place)
        if image.why_not():
            found.skipped.append(f"a full disk: {image.why_not()}")
        else:
            disk = stack.enter_context(_disk(Path(place), Random(f"disk/{seed}")))
        folder = disk / "log"
        prepare(folder, Path(place, "archive"))
        director = Director(folder, records, seed, found)
        director.run(seconds, crowd)
        history = gather(sorted(records.glob("*.ndjson")), director.limited, found)
        try:
            final = final_of(folder)
            problems = [problem.render() for problem in check(OsSystem(), str(folder)).problems]
        except Exception as error:  # noqa: BLE001 - whatever it is, the log cannot be read
            found.wrong.append(f"in the end: {type(error).__name__}: {error}")
            _keep(place, seed)
            return found
        found.wrong += [f"check: {text}" for text in problems]
        anomalies = judge(history, final)
        found.counts.update(counted(history), anomalies=len(anomalies))
        found.wrong += first_of_each(anomalies)
        _keep(place, seed)
    return found


def _keep(place: str, seed: str) -> None:
    """Keep what was recorded, and the log, where HEADRACE_CHAOS_KEEP says, to look into it."""
    if to := os.environ.get("HEADRACE_CHAOS_KEEP"):
        for name in ("records", "archive", "log", "disk/log"):
            if Path(place, name).exists():
                shutil.copytree(Path(place, name), Path(to, seed, name), dirs_exist_ok=True)


def _disk(place: Path, rng: Random) -> contextlib.AbstractContextManager[Path]:
    """A disk that can be filled: a real one is slow to sync, so that less happens."""
    if rng.random() < 0.3:
        made = image.make_image(place / "disk.img", DISK_MB)
        return image.mounted(made, place / "disk")
    return image.in_memory(place / "disk", DISK_MB)


def prepare(folder: Path, archive: Path) -> None:
    """Make the log and its topics."""
    with EmbeddedLog(folder, LogSettings(**SETTINGS)) as log:
        for topic, partitions in TOPICS.items():
            log.create_topic(topic, SCHEMA, key="key", partitions=partitions)
        log.set_topic("short", retention_bytes=RETENTION)
        log.set_topic("filed", retention_bytes=RETENTION, archive=str(archive))
        for topic in TWINS:
            log.set_topic(topic, compact=True, grace_seconds=DAYS)


def gather(files: list[Path], limited: set[str], found: Found) -> History:
    """The history of all workers; what went wrong in them besides is found."""
    history = History()
    for file in files:
        text = file.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]  # the last line of a killed process may be a part
        lines = [json.loads(line) for line in whole.splitlines()]
        take_lines(history, file.stem, lines)
        for line in lines:
            if "error" in line:
                found.counts[f"error {line['error']}"] += 1
                if line["error"] in NEVER_WELL:
                    found.wrong.append(f"{file.stem}: {line['text']}")
            elif "surprise" in line:
                found.counts["surprises"] += 1
                if file.stem not in limited:
                    found.wrong.append(f"{file.stem}: surprise: {line['surprise']}")
            elif "turn" in line:
                found.counts["turns"] += 1
                found.counts.update(line["turn"])
    return history


def final_of(folder: Path) -> Final:
    """What the log holds now that nobody uses it."""
    final = Final(copies=COPIED, twins=tuple(TWINS), now=SystemClock().now_us())
    with EmbeddedLog(folder, LogSettings(**SETTINGS), create=False) as log:
        for topic in TOPICS:
            policy = log.topic(topic).policy
            goes = policy.retention_bytes is not None and policy.archive is None
            final.kept[topic] = Kept(goes, policy.compact, int(policy.grace_seconds * 1e6))
            final.starts[topic] = log.starts(topic)
            final.ends[topic] = log.ends(topic)
        for batch in log.read(list(TOPICS)):
            received = batch.received_time.cast("int64").to_pylist()
            for row, at in zip(rows_of(batch), received, strict=True):
                final.rows.append((Place(batch.topic, *row), at))
        final.committed = {group: log.offsets(group) for group in GROUPS}
        for topic, rows in tables_of(log, log.position).items():
            final.tables[topic] = {key: row for key, row, _ in rows}
    return final


# --- the command ----------------------------------------------------------------------------------


def add_arguments(parser: Any) -> None:
    """The options of `./run faults chaos`."""
    parser.add_argument("--seed", type=int, default=1, help="the first seed (default 1)")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (default 1)")
    parser.add_argument("--seconds", type=float, default=40.0, help="of one log (default 40)")
    parser.set_defaults(run=main)


def main(chosen: Any) -> int:
    """Case after case; one JSON object in the end, 0 when nothing is wrong."""
    started = time.monotonic()
    total = Found()
    for seed in seeds(chosen.seed, started + 60 * chosen.minutes):
        found = case(str(seed), chosen.seconds)
        total.counts.update(found.counts, cases=1)
        total.skipped = found.skipped
        again = f"again: ./run faults chaos --seed {seed} --minutes 0"
        total.wrong += [f"seed {seed}: {text}" for text in found.wrong]
        total.wrong += [again] if found.wrong else []
        far = f"seed {seed}: {dict(total.counts)}, {len(found.wrong)} wrong"
        say(f"{far}, {time.monotonic() - started:.0f} s")
    print(json.dumps({**total.counts, "skipped": total.skipped, "wrong": total.wrong[:40]}))
    return 1 if total.wrong else 0
