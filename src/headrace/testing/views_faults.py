"""`./run faults views`: random queries, crashes and the bank, for as long as you like.

./run faults views                               10,000 cases of plain, sql, crash and race
./run faults views --seed 7 --cases 500          so many, others
./run faults views --minutes 30                  the same, by the clock
./run faults views --jobs 2                      in two processes, which share the seeds
./run faults views --only sql --seed 7 --cases 1 --history 3      one case again
./run faults views --only bank --minutes 5       the bank: drivers, JVMs, Python workers killed
./run faults views --only tpch --seed 3          all 22 TPC-H queries, rows coming and going
./run faults views --only bugs                   every seeded bug of views, and what catches it
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from headrace.testing.jobs import say, seeds

PARTS = ("plain", "crash", "race", "sql", "bank", "bugs", "tpch")
CASES = 10_000
HISTORIES = 6
"""Histories for each random query: reading a definition costs more than a history."""
PLAIN = 20
"""Cases without Spark for each of them: they cost a fraction."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `./run faults views`."""
    parser.add_argument("--seed", type=int, default=1, help="the first seed (default 1)")
    parser.add_argument("--cases", type=int, help=f"how many cases (default {CASES})")
    parser.add_argument("--minutes", type=float, help="how long, instead of --cases")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side (default 1)")
    parser.add_argument("--step", type=int, default=1, help="every so many seeds (default 1)")
    parser.add_argument("--only", choices=PARTS, help="only this part")
    parser.add_argument("--history", type=int, help="only this history of each query")
    parser.add_argument("--write", metavar="FILE", help="put the table of bugs into this file")
    parser.add_argument("--json", action="store_true", help="a summary as one JSON object")


@dataclass
class Tally:
    """What was tried."""

    cases: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS[:4], 0))
    queries: int = 0
    refused: int = 0
    disks: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """All cases."""
        return sum(self.cases.values())


def main(chosen: argparse.Namespace) -> int:
    """Run what was asked for; 0 when nothing was found."""
    if chosen.only == "bugs":
        return _bugs(chosen)
    if chosen.only == "bank":
        return _bank(chosen)
    if chosen.only == "tpch":
        return _tpch(chosen)
    return _cases(chosen)


def _tpch(chosen: argparse.Namespace) -> int:
    """All queries of TPC-H; `--cases` rounds of transactions (default 10)."""
    from headrace.testing.tpch import QUERIES
    from headrace.testing.views_tpch import differences

    rounds = chosen.cases or 10
    wrong: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        for when, found in differences(
            QUERIES, spark=_session(), folder=Path(folder), seed=chosen.seed, rounds=rounds
        ):
            if not chosen.json:
                print(f"{when}: {len(QUERIES)} queries, {len(found)} wrong", *found, flush=True)
            if found:
                wrong[when] = found
    if chosen.json:
        print(json.dumps({"queries": len(QUERIES), "rounds": rounds, "wrong": wrong}))
    return 1 if wrong else 0


# --- cases --------------------------------------------------------------------------------


def _cases(chosen: argparse.Namespace) -> int:
    """Rounds of all parts: of four cases about one is Spark's, three are without it."""
    started = time.monotonic()
    tally = _shared(chosen) if chosen.jobs > 1 else _alone(chosen, started)
    seconds = time.monotonic() - started
    if chosen.json:
        found = asdict(tally) | {"total": tally.total, "seconds": seconds}
        print(json.dumps(found, indent=2))
    else:
        for text in tally.wrong:
            print(f"\nWRONG {text}")
        print(f"\n{_summary(tally)}, {seconds:.0f} s")
    return 1 if tally.wrong else 0


def _shared(chosen: argparse.Namespace) -> Tally:
    """The same by several processes, each with every so manieth seed."""
    named = {name: getattr(chosen, name) for name in ("only", "minutes", "history")}
    given = [f"--{name}={value}" for name, value in named.items() if value is not None]
    if chosen.minutes is None:
        given.append(f"--cases={-(-(chosen.cases or CASES) // chosen.jobs)}")
    command = [sys.executable, "-m", "headrace.testing.faults", "views", "--json", *given]
    commands = [
        [*command, f"--step={chosen.jobs}", f"--seed={chosen.seed + number}"]
        for number in range(chosen.jobs)
    ]
    # By files and not by pipes: one that has much to say would wait for the others.
    with contextlib.ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile()) for _ in commands]
        processes = [
            subprocess.Popen(one, stdout=file) for one, file in zip(commands, outputs, strict=True)
        ]
        ended = [one.wait() for one in processes]
        texts = [(file.seek(0), file.read())[1] for file in outputs]
    tally = Tally()
    for spelled, code, said in zip(commands, ended, texts, strict=True):
        if not said:
            tally.wrong.append(f"{' '.join(spelled)} ended with {code}")
            continue
        found = json.loads(said)
        tally.cases = {name: n + found["cases"][name] for name, n in tally.cases.items()}
        tally.wrong += found["wrong"]
        for name in ("queries", "refused", "disks"):
            setattr(tally, name, getattr(tally, name) + found[name])
    return tally


def _alone(chosen: argparse.Namespace, started: float) -> Tally:
    tally = Tally()
    spark: Any = None
    if chosen.only in (None, "sql"):
        spark = _session(quick=True)
    deadline = started + 60 * chosen.minutes if chosen.minutes is not None else None
    goal = chosen.cases if chosen.cases is not None else CASES if deadline is None else 1 << 62

    def done() -> bool:
        return tally.total >= goal or (deadline is not None and time.monotonic() > deadline)

    seed, said = chosen.seed, 0.0
    while not done():
        known = len(tally.wrong)
        _round(chosen, tally, seed, spark, done)
        for text in tally.wrong[known:]:
            say(f"WRONG {text}")
        seed += chosen.step
        if time.monotonic() - said > 10:
            said = time.monotonic()
            say(f"seed {seed}: {_summary(tally)}, {said - started:.0f} s")
    return tally


def _round(chosen: argparse.Namespace, tally: Tally, seed: int, spark: Any, done: Any) -> None:
    from headrace.testing import views_crash, views_plain

    again = f"again: ./run faults views --seed {seed} --cases 1 --only"
    if chosen.only in (None, "sql"):
        _sql(chosen, tally, seed, spark, again)
    if chosen.only in (None, "plain"):
        for number in [seed] if chosen.only else range(seed * PLAIN, (seed + 1) * PLAIN):
            tally.cases["plain"] += 1
            wrong = views_plain.counter_example(str(number))
            if wrong:
                once = f"--seed {number} --cases 1 --only plain"
                tally.wrong.append(f"{wrong}\nagain: ./run faults views {once}")
    if chosen.only in (None, "crash") and (chosen.only or seed % 32 == 0):
        tally.cases["crash"] += 1
        case = views_plain.plain_case(f"crash{seed}")
        found = views_crash.explore(case, points=40, bound=8, again=0.05, done=done)
        tally.disks += found.opened + found.second
        tally.wrong += [f"{text}\n{again} crash" for text in found.wrong]
    if chosen.only in (None, "race") and (chosen.only or seed % 4 == 0):
        tally.cases["race"] += 1
        wrong = views_crash.raced(views_plain.plain_case(f"race{seed}"), str(seed))
        if wrong:
            tally.wrong.append(f"{wrong}\n{again} race")


def _sql(chosen: argparse.Namespace, tally: Tally, seed: int, spark: Any, again: str) -> None:
    from headrace.testing.views_sql import Trial

    trial = Trial(spark)
    numbers = range(HISTORIES) if chosen.history is None else [chosen.history]
    trial.query(str(seed), numbers)
    tally.queries += trial.tally.queries
    tally.refused += trial.tally.refused
    tally.cases["sql"] += trial.tally.cases
    tally.wrong += [f"{text}\n{again} sql" for text in trial.tally.wrong]
    if seed % 50 == 0:
        spark.catalog.clearCache()


def _summary(tally: Tally) -> str:
    parts = ", ".join(f"{count} {name}" for name, count in tally.cases.items() if count)
    return (
        f"{tally.total} cases ({parts or 'none'}; {tally.queries} queries, {tally.refused} refused,"
        f" {tally.disks} disks): {len(tally.wrong)} wrong"
    )


def _session(*, quick: bool = False) -> Any:
    from headrace.pipelines.spark import session

    return session(quick=quick)


# --- the bank, the bugs -------------------------------------------------------------------


def _bank(chosen: argparse.Namespace) -> int:
    from headrace.testing.views_bank import Day, day

    deadline = time.monotonic() + 60 * (chosen.minutes if chosen.minutes is not None else 2.0)
    days: list[Day] = []
    for seed in seeds(chosen.seed, deadline):
        chance = Random(f"days/{seed}")
        kinds = ("driver", "jvm", "worker")
        events = [*kinds, "two drivers", *chance.choices(kinds, k=4)]
        chance.shuffle(events)
        with tempfile.TemporaryDirectory(prefix="headrace-bank-") as folder:
            days.append(day(folder, str(seed), events))
        one = days[-1]
        say(
            f"seed {seed}: {one.audit.entries} transfers, {one.audit.commits} commits,"
            f" {one.reads} reads, {dict(one.kills)}: {len(one.wrong)} wrong"
        )
    wrong = [text for one in days for text in one.wrong]
    summary = {
        "days": len(days),
        "transfers": sum(one.audit.entries for one in days),
        "commits": sum(one.audit.commits for one in days),
        "reads": sum(one.reads for one in days),
        "kills": dict(sum((one.kills for one in days), Counter[str]())),
        "wrong": wrong,
    }
    if chosen.json:
        print(json.dumps(summary, indent=2))
    else:
        for text in wrong:
            print(f"WRONG {text}")
        counts = ", ".join(f"{key} {value}" for key, value in summary.items() if key != "wrong")
        print(f"{counts}: {len(wrong)} wrong totals")
    return 1 if wrong else 0


def _bugs(chosen: argparse.Namespace) -> int:
    from headrace.testing.hunt import tell
    from headrace.testing.views_bugs import hunt

    return tell(hunt("", say, _session), "bugs of views", chosen)
