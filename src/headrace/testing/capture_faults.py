"""`./run faults capture`: a PostgreSQL under writers, captured, and everything killed at random.

./run faults capture --seed 7 --minutes 10        all parts, seed after seed
./run faults capture --only case --seed 7         captures in processes: kill -9, servers killed
./run faults capture --only storm --seed 7        tables come, go, are renamed and altered
./run faults capture --only pgbench --seed 7      a bank by pgbench; with --server debian: Debian's
./run faults capture --only stepped --seed 7      one thread, killed at chosen instants
./run faults capture --only pure --minutes 1      random operations against a dict
./run faults capture --only large --rows 10000000  transactions larger than memory, and its peak
./run faults capture --only large --limit 256     the same where the system gives no more (as root)
./run faults capture --only bugs                  every seeded bug of captures, and what catches it
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from headrace.testing.jobs import say, seeds

PARTS = ("case", "storm", "pgbench", "stepped", "pure", "large", "bugs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `./run faults capture`."""
    parser.add_argument("--seed", type=int, default=1, help="the first seed (default 1)")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (default 1)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a case (default 20)")
    parser.add_argument("--only", choices=PARTS, help="only this part")
    parser.add_argument("--server", choices=["embedded", "debian"], default="embedded")
    parser.add_argument("--rows", type=int, default=10_000_000, help="of a large transaction")
    parser.add_argument("--limit", type=int, default=0, help="megabytes for a large one's capture")
    parser.add_argument("--kills", type=int, default=0, help="of the capture of each large one")
    parser.add_argument("--name", default="", help="only bugs whose name contains this")
    parser.add_argument("--plain", action="store_true", help="the columns of tables stay")
    parser.add_argument("--write", metavar="FILE", help="put the table of bugs into this file")
    parser.add_argument("--json", action="store_true", help="a summary as one JSON object")


@dataclass
class Tally:
    """What was tried."""

    cases: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    entries: int = 0
    transactions: int = 0
    summed: int = 0
    rows: int = 0
    wrong: list[str] = field(default_factory=list)


def main(chosen: argparse.Namespace) -> int:
    """Run what was asked for; 0 when nothing was found."""
    if chosen.only == "bugs":
        return _bugs(chosen)
    if chosen.only == "large":
        return _large(chosen)
    started = time.monotonic()
    tally = Tally()
    for seed in seeds(chosen.seed, started + 60 * chosen.minutes):
        for part in PARTS[:-2]:
            if chosen.only in (None, part):
                _part(part, seed, chosen, tally)
        say(f"seed {seed}: {_summary(tally)}, {time.monotonic() - started:.0f} s")
    if chosen.json:
        print(json.dumps(vars(tally) | {"seconds": time.monotonic() - started}, indent=2))
    else:
        for text in tally.wrong:
            print(f"\nWRONG {text}")
        print(f"\n{_summary(tally)}, {time.monotonic() - started:.0f} s")
    return 1 if tally.wrong else 0


def _part(part: str, seed: int, chosen: argparse.Namespace, tally: Tally) -> None:
    from headrace.testing import (
        capture_case,
        capture_pgbench,
        capture_process,
        capture_pure,
        capture_storm,
    )
    from headrace.testing.postgres import Server, debian

    wrong: list[str] = []
    found = capture_case.Audit()
    if part == "pure":
        tally.cases[part] += 100
        for number in range(100):
            said = capture_pure.counter_example(f"{seed} {number}")
            wrong += [said] if said else []
    elif part == "stepped":
        tally.cases[part] += 1
        with (
            Server(**capture_case.SETTINGS) as server,
            tempfile.TemporaryDirectory(prefix="headrace-") as folder,
        ):
            wrong, found = capture_case.stepped(
                server, Path(folder), str(seed), alters=not chosen.plain
            )
    else:
        tally.cases[part] += 1
        if part == "pgbench":
            binaries = debian() if chosen.server == "debian" else None
            assert binaries or chosen.server == "embedded", "Debian's PostgreSQL is not installed"
            case = capture_pgbench.case(str(seed), chosen.seconds, binaries=binaries)
        elif part == "storm":
            case = capture_storm.case(str(seed), chosen.seconds)
        else:
            case = capture_process.case(str(seed), chosen.seconds, alters=not chosen.plain)
        wrong, found = case.wrong, case.audit
        tally.events.update(case.events)
    tally.entries += found.entries
    tally.transactions += found.transactions
    tally.summed += found.summed
    tally.rows += found.rows
    if wrong:
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        again = f"again: ./run faults capture --seed {seed} --minutes 0 --only {part}"
        tally.wrong.append("\n".join([*wrong[:5], f"{again}{more}"]))
        say(f"WRONG {tally.wrong[-1]}")


def _summary(tally: Tally) -> str:
    parts = ", ".join(f"{count} {name}" for name, count in tally.cases.items())
    events = ", ".join(f"{count} {name}" for name, count in sorted(tally.events.items()))
    audited = (
        f" {tally.entries} entries, {tally.transactions} transactions ({tally.summed} summed),"
        f" {tally.rows} rows"
    )
    return (
        f"cases: {parts} ({events or 'no events'});{audited if tally.entries else ''}"
        f" {len(tally.wrong)} wrong"
    )


def _large(chosen: argparse.Namespace) -> int:
    """The whole process stays below 256 MB; files that it has mapped are the system's."""
    from headrace.testing.capture_large import OWN_MAX, bulk

    found = bulk(
        chosen.rows, kills=chosen.kills, seed=chosen.seed, only=chosen.name, limit=chosen.limit
    )
    steps = [asdict(step) for step in found.steps]
    for step in found.steps:
        say(
            f"{step.name}: {step.rows} rows, {step.seconds:.0f} s, at most {step.own} MB of its own"
            f" ({step.begun} before), {step.resident} MB with mapped files"
        )
        if step.own > OWN_MAX:
            found.wrong.append(f"memory: {step.name} took {step.own} MB")
    print(json.dumps({"steps": steps, "wrong": found.wrong, "events": found.events}, indent=2))
    return 1 if found.wrong else 0


def _bugs(chosen: argparse.Namespace) -> int:
    from headrace.testing.capture_bugs import hunt
    from headrace.testing.hunt import tell

    return tell(hunt(chosen.name, say), "bugs of captures", chosen)
