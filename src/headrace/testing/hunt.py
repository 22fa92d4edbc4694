"""Switch every seeded bug of the log on and look for it: what catches it, after how many tries.

A try is one disk judged by the crash enumerator, one damage examined, or one case of the chaos in
one process. What counts is a verdict (`verdicts`); a crash says nothing about the bug.

For whoever has bugs and cases: `look_for` looks for one bug in numbered cases, `each` for several,
and `tell` says what caught them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from headrace.testing.bugs import BUGS
from headrace.testing.chaos_alone import alone
from headrace.testing.crashes import one_round
from headrace.testing.decay import Aged, aged, examine
from headrace.testing.explore import Limits
from headrace.testing.jobs import spread
from headrace.testing.keeper_bugs import KEEPER_BUGS
from headrace.testing.seeded import Bug
from headrace.testing.shortcut_bugs import SHORTCUT_BUGS
from headrace.testing.verdicts import is_verdict, verdict_on
from headrace.testing.workloads import WORKLOADS

SEEDS = range(1, 9)
LIMITS = Limits(bound=16, points=40, depth=2, again=0.02)
EVERY_BUG = [*BUGS, *KEEPER_BUGS, *SHORTCUT_BUGS]
APART = {"damage": "corruptor", "kept": "chaos in one process"}
"""Places that are no workloads of the enumerator."""
OFTEN = {"uncut": Limits(points=0), "shown": Limits(bound=1, depth=1, shown=True)}
"""Words behind a workload that leave out most crashes, so that many more seeds can be tried: none
at all, for races; or only the barest disk, and only where a reader was just shown something."""


@dataclass(frozen=True, slots=True)
class Catch:
    """A bug, and what caught it."""

    bug: str
    caught_by: str
    """Empty: nothing did."""
    tries: int
    seconds: float
    says: str
    """The verdict; if there was none, the first crash."""

    def row(self) -> str:
        """A row of the table."""
        return f"| {self.bug} | {self.caught_by or '**nothing**'} | {self.tries} | {self.says} |"

    def line(self) -> str:
        """A line for whoever waits."""
        by = self.caught_by or "NOT CAUGHT"
        return f"{self.seconds:6.1f} s  {self.bug}: {by}, {self.tries} tries: {self.says}"


Look = Callable[[int], tuple[str, int]]
"""Tries the case of a number: what is wrong, or nothing, and how many tries that was."""


def look_for(name: str, title: str, most: int, buggy: Look, sound: Look) -> Catch:
    """Look for a bug in the cases 1 to `most`: `buggy` has it, `sound` does not.

    A case counts if it ends with a verdict, be it by an error, and is right without the bug.
    """
    started = time.monotonic()
    tries, crash = 0, ""
    for number in range(1, most + 1):
        says, tried = _tried(buggy, number)
        tries += tried
        if not is_verdict(says):
            crash = crash or says
            continue
        without, _ = _tried(sound, number)
        if without:
            title, says = "", f"it is wrong without the bug too: {without}"
        return Catch(name, title, tries, time.monotonic() - started, _short(says))
    return Catch(name, "", tries, time.monotonic() - started, _short(crash))


def look_with(bug: Bug, title: str, most: int, look: Look) -> Catch:
    """Look for a bug in cases that are tried with it and without it in the same way."""

    def buggy(number: int) -> tuple[str, int]:
        with bug.on():
            return look(number)

    return look_for(bug.name, title, most, buggy, look)


def each(
    bugs: Iterable[Bug], only: str, catch: Callable[[Bug], Catch], say: Callable[[str], None]
) -> list[Catch]:
    """Look for all bugs whose name contains `only`, one after the other."""
    found = []
    for bug in bugs:
        if only in bug.name:
            found.append(catch(bug))
            say(found[-1].line())
    return found


def _tried(look: Look, number: int) -> tuple[str, int]:
    try:
        return look(number)
    except Exception as error:  # noqa: BLE001 - a case ends well, or something is wrong
        return verdict_on(error, "stopped: "), 1


def catch(bug: Bug, *, everywhere: bool = False) -> Catch:
    """Look for one bug where it should show; `everywhere` then goes on to all other workloads."""
    started = time.monotonic()
    places = list(bug.where)
    if everywhere:
        places += [name for name in (*WORKLOADS, *APART) if name not in places]
    tries = 0
    for place in places:
        for seed in range(1, 100) if " " in place else SEEDS:
            found, tried = _look(bug, place, seed)
            tries += tried
            if is_verdict(found):
                seconds = time.monotonic() - started
                name = APART.get(place, f"enumerator, workload `{place}`")
                return Catch(bug.name, name, tries, seconds, _short(found))
    return Catch(bug.name, "", tries, time.monotonic() - started, "")


def _look(bug: Bug, place: str, seed: int) -> tuple[str, int]:
    if place == "damage":
        return _spoil(bug, aged(seed, sealed=False), seed)  # these are bugs of the journal
    if place == "kept":
        with bug.on():
            return next(iter(alone(seed)), ""), 1
    with bug.on():
        workload, _, how = place.partition(" ")
        one = one_round(workload, seed, OFTEN[how] if how else LIMITS)
    found = one.tally.violations
    return (found[0].verdicts[0] if found else ""), max(1, one.tally.states)


def _spoil(bug: Bug, log: Aged, seed: int) -> tuple[str, int]:
    tries = 0
    with bug.on():
        for damage in log.damages(Random(seed), 2):
            tries += 1
            how, wrong = examine(log, damage)
            if not how and is_verdict(wrong):
                return f"{damage.title}: {wrong}", tries
    return "", tries


def _short(text: str) -> str:
    line = text.replace("\n", " ").replace("|", "/")
    return line if len(line) <= 100 else f"{line[:97]}..."


def hunt(only: str, say: Callable[[str], None], jobs: int = 1) -> list[Catch]:
    """Look for all bugs whose name contains `only`, in so many processes."""
    bugs = [bug for bug in EVERY_BUG if only in bug.name]
    found: dict[int, Catch] = {}

    def look(number: int) -> tuple[int, Catch]:
        return number, catch(bugs[number], everywhere=True)

    for number, one in spread(look, range(len(bugs)), jobs):
        say(one.line())
        found[number] = one
    return [found[number] for number in sorted(found)]


def table(found: list[Catch]) -> str:
    """The table of bugs, as Markdown."""
    head = ["| bug | caught by | tries | it says |", "|---|---|---|---|"]
    return "\n".join([*head, *(one.row() for one in found)])


def tell(found: list[Catch], kind: str, chosen: argparse.Namespace) -> int:
    """Print the table, or JSON, and put it into a page, as was asked for; 0 if all were caught."""
    if chosen.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    else:
        print(table(found))
    if chosen.write:
        write_table(chosen.write, kind, found)
    return 0 if all(one.caught_by for one in found) else 1


def write_table(path: str, kind: str, found: list[Catch]) -> None:
    """Put the table where a page has its place for it, such as `bugs of views`."""
    begin, end = f"<!-- {kind}: begin -->", f"<!-- {kind}: end -->"
    text = Path(path).read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    _, _, behind = rest.partition(end)
    Path(path).write_text(f"{before}{begin}\n{table(found)}\n{end}{behind}", encoding="utf-8")
