"""`./run faults slice`: from PostgreSQL to PostgreSQL, and everything on the way killed at random.

./run faults slice --minutes 10 --seed 7       cases of 60 s, seed after seed
./run faults slice --only bugs                 every seeded bug of the slice, and what catches it
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter

from headrace.testing.jobs import say, seeds
from headrace.testing.slice_case import KILLS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `./run faults slice`."""
    parser.add_argument("--seed", type=int, default=1, help="the first seed (default 1)")
    parser.add_argument("--minutes", type=float, default=3.0, help="how long (default 3)")
    parser.add_argument("--seconds", type=float, default=60.0, help="kills in a case (default 60)")
    parser.add_argument("--kills", help=f"only these: {','.join(KILLS)}")
    parser.add_argument("--only", choices=("bugs",), help="only this part")
    parser.add_argument("--name", default="", help="only bugs whose name contains this")
    parser.add_argument("--write", metavar="FILE", help="put the table of bugs into this file")
    parser.add_argument("--json", action="store_true", help="a summary as one JSON object")


def main(chosen: argparse.Namespace) -> int:
    """Run what was asked for; 0 when nothing was found."""
    if chosen.only == "bugs":
        return _bugs(chosen)
    from headrace.testing.slice_case import case

    started = time.monotonic()
    counts: Counter[str] = Counter()
    kills: Counter[str] = Counter()
    wrong: list[str] = []
    deadline = started + 60 * chosen.minutes
    kinds = tuple(chosen.kills.split(",")) if chosen.kills else KILLS
    for seed in seeds(chosen.seed, deadline):
        left = deadline - time.monotonic()
        found = case(str(seed), max(5.0, min(chosen.seconds, left)), kinds)
        kills.update(found.kills)
        counts.update(
            cases=1, transactions=found.transactions, reads=found.reads, cuts=found.cuts,
            rows_verified=sum(found.verified.values()),
        )  # fmt: skip
        if found.wrong:
            again = f"again: ./run faults slice --seed {seed} --minutes 0"
            wrong.append("\n".join([*found.wrong[:5], again]))
        say(f"seed {seed}: {_summary(counts, kills, wrong)}, {time.monotonic() - started:.0f} s")
    if chosen.json:
        print(json.dumps({**counts, "kills": kills, "wrong": wrong}, indent=2))
    else:
        for text in wrong:
            print(f"\nWRONG {text}")
        print(f"\n{_summary(counts, kills, wrong)}, {time.monotonic() - started:.0f} s")
    return 1 if wrong else 0


def _summary(counts: Counter[str], kills: Counter[str], wrong: list[str]) -> str:
    killed = ", ".join(f"{count} {kind}" for kind, count in sorted(kills.items()))
    return (
        f"{counts['cases']} cases, {counts['transactions']:,} transactions,"
        f" {kills.total()} kills ({killed}), {counts['reads']:,} reads of {counts['cuts']:,} cuts,"
        f" {counts['rows_verified']:,} rows verified in the end: {len(wrong)} wrong"
    )


def _bugs(chosen: argparse.Namespace) -> int:
    from headrace.testing.hunt import tell
    from headrace.testing.slice_bugs import hunt

    return tell(hunt(chosen.name, say), "bugs of the slice", chosen)
