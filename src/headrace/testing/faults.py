"""`./run faults`: break things for as long as you like, and say what was tried and found.

./run faults log --seed 7 --minutes 5       many rounds of the crash enumerator
./run faults log --workload plain --seed 7 --at 120:4      one violation again
./run faults log --all --seed 7             every crash point and every disk, each workload once
./run faults kills --count 1000             real processes killed; `cuts`, `damage`: `log_faults`
./run faults chaos --seed 7 --minutes 5     real processes, everything done to them; see `chaos`
./run faults bugs                           every seeded bug, and what catches it
./run faults views --seed 7 --cases 10000   random views against references; see `views_faults`
./run faults capture --seed 7 --minutes 5   captures of PostgreSQL, killed; see `capture_faults`
./run faults slice --seed 7 --minutes 5     PostgreSQL to PostgreSQL, all killed; see `slice_faults`
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from headrace.testing import capture_faults, chaos, log_faults, slice_faults, views_faults
from headrace.testing.crashes import Round, one_round, replay
from headrace.testing.explore import Limits, Tally
from headrace.testing.jobs import EVERY_PROCESSOR, say
from headrace.testing.powercut import EVERY
from headrace.testing.workloads import WORKLOADS

ALL_AGAIN = 0.005
"""The share of openings within which `--all` cuts the power again: they are very many."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 0 when nothing was found."""
    parser = argparse.ArgumentParser(prog="./run faults", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    log = commands.add_parser("log", help="power cuts, kills, failed syncs, full disks: simulated")
    log.add_argument("--seed", type=int, default=1, help="the first seed (default 1)")
    log.add_argument("--minutes", type=float, default=1.0, help="how long (default 1)")
    log.add_argument("--workload", choices=sorted(WORKLOADS), help="only this one")
    log.add_argument("--bound", type=int, default=24, help="disks per crash point (default 24)")
    log.add_argument(
        "--all", action="store_true", help="every crash point and disk of every workload, once"
    )
    log.add_argument("--at", help="OPERATION:STATE[,OPERATION:STATE]: this path only, once")
    log.add_argument("--json", action="store_true", help="a summary as one JSON object")
    log.set_defaults(run=_log)
    log_faults.add_commands(commands)
    together = commands.add_parser("chaos", help="many real processes, everything at once")
    chaos.add_arguments(together)
    bugs = commands.add_parser("bugs", help="switch on each seeded bug; each must be caught")
    bugs.add_argument("--only", help="the bugs whose name contains this")
    bugs.add_argument(
        "--write", metavar="FILE", help="put the table into this file (docs/faults.md)"
    )
    bugs.add_argument("--json", action="store_true", help="the table as one JSON object")
    bugs.set_defaults(run=_bugs)
    for parallel in (log, bugs):
        parallel.add_argument(
            "--jobs", type=int, default=EVERY_PROCESSOR, help="processes (default: one a processor)"
        )
    for name, what, module in (
        ("views", "random views, crashes of drivers, the bank", views_faults),
        ("capture", "captures of PostgreSQL, and what kills them", capture_faults),
        ("slice", "from PostgreSQL to PostgreSQL, everything killed", slice_faults),
    ):
        more = commands.add_parser(name, help=what)
        module.add_arguments(more)
        more.set_defaults(run=module.main)
    chosen = parser.parse_args(arguments)
    return int(chosen.run(chosen))


def _log(chosen: argparse.Namespace) -> int:
    if chosen.at:
        path = [
            (int(a), int(s)) for a, _, s in (one.partition(":") for one in chosen.at.split(","))
        ]
        rounds = [replay(chosen.workload or "plain", chosen.seed, path, chosen.bound)]
    else:
        rounds = _rounds(chosen)
    total = Tally()
    for one in rounds:
        total.add(one.tally)
    reports = [text for one in rounds for text in one.reports()]
    if chosen.json:
        print(json.dumps(_summary(rounds, total, reports), indent=2))
    else:
        for text in reports:
            print(f"\nVIOLATION {text}")
        print(
            f"\n{len(rounds)} rounds, {total.points} crash points, {total.states} disks, "
            f"{total.openings} different ones opened, {total.second} of a second crash: "
            f"{len(reports)} violations"
        )
    return 1 if reports else 0


def _rounds(chosen: argparse.Namespace) -> list[Round]:
    """Rounds until the time is up: all workloads of a seed, then the next seed."""
    deadline = time.monotonic() + 60 * chosen.minutes
    names = [chosen.workload] if chosen.workload else list(WORKLOADS)
    if chosen.all:
        every = Limits(bound=EVERY, violations=3, again=ALL_AGAIN)
        return [
            _progress(one_round(name, chosen.seed, every, jobs=chosen.jobs), 0.0) for name in names
        ]
    limits = Limits(bound=chosen.bound, points=24, violations=3)
    rounds: list[Round] = []
    seed = chosen.seed
    while not rounds or time.monotonic() < deadline:
        for name in names:
            one = one_round(
                name, seed, limits, lambda: time.monotonic() > deadline, jobs=chosen.jobs
            )
            rounds.append(_progress(one, deadline))
            if time.monotonic() > deadline:
                break
        seed += 1
    return rounds


def _progress(one: Round, deadline: float) -> Round:
    left = max(0.0, deadline - time.monotonic())
    print(
        f"{one.workload:22} seed {one.seed:<6} {one.operations:5} operations "
        f"{one.tally.points:4} points {one.tally.states:6} disks {one.tally.openings:6} opened "
        f"{len(one.tally.violations)} violations, {left:.0f} s left",
        *one.reports(),
        sep="\n",
        file=sys.stderr,
        flush=True,
    )
    return one


def _summary(rounds: list[Round], total: Tally, reports: list[str]) -> dict[str, object]:
    return {
        "rounds": [
            {"workload": r.workload, "seed": r.seed, "operations": r.operations}
            | {name: value for name, value in asdict(r.tally).items() if name != "violations"}
            for r in rounds
        ],
        "points": total.points,
        "states": total.states,
        "openings": total.openings,
        "second": total.second,
        "violations": reports,
    }


def _bugs(chosen: argparse.Namespace) -> int:
    from headrace.testing.hunt import hunt, tell

    return tell(hunt(chosen.only or "", say, chosen.jobs), "bugs", chosen)


if __name__ == "__main__":
    sys.exit(main())
