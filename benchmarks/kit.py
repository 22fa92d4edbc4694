"""The benchmark kit: two arms, interleaved, and an honest verdict.

A time on a shared machine is noise around a truth. So every measure is a comparison of two arms in
the same run: pairs in the order A B, B A, A B, ..., so that drift hits both alike; the ratio of the
medians, and a bootstrap interval over the pairs. The ratio always says how many times better we are
(rates: ours / other; times and sizes: other / ours), so a goal is met when ratio >= goal, and it is
missed only if the whole interval misses. What can be counted (fsyncs, bytes, system calls) is exact
and needs no interval: `Bench.count`.

    bench = Bench("log")
    bench.compare("append, 1,000 rows", ours=append, other=floor, other_name="write + fdatasync",
                  unit="rows/s", better="higher", goal=0.6)
    bench.limit("open 10 GB", times, limit=1.0, unit="s", better="lower")
    bench.count("fsyncs per 1,000 appends", 1000, other=1000, other_name="one each", goal=1)
    bench.finish()
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Better = Literal["higher", "lower"]
Interval = tuple[float, float]

PAIRS = 7
RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Result:
    """One line of the report; ratio is how many times better we are."""

    measure: str
    ours: float
    other: float
    other_name: str
    unit: str
    ratio: float
    interval: Interval
    goal: float | None
    met: bool | None


@dataclass
class Bench:
    """Collects the results of one benchmark and reports them."""

    name: str
    results: list[Result] = field(default_factory=list)

    def compare(
        self,
        measure: str,
        *,
        ours: Callable[[], float],
        other: Callable[[], float],
        other_name: str,
        unit: str,
        better: Better,
        goal: float | None = None,
        pairs: int = PAIRS,
    ) -> Result:
        """Call both arms in turn; each call measures once and gives a number in `unit`."""
        if pairs < PAIRS:
            raise ValueError(f"{pairs} pairs say too little: at least {PAIRS}")
        mine: list[float] = []
        theirs: list[float] = []
        for number in range(pairs):
            progress(f"{self.name}: {measure}: pair {number + 1} of {pairs}")
            arms = [(ours, mine), (other, theirs)]
            for arm, values in arms if number % 2 == 0 else reversed(arms):
                values.append(arm())
        progress("")
        return self.add(measure, mine, theirs, other_name, unit, better, goal)

    def limit(
        self,
        measure: str,
        values: float | Sequence[float],
        *,
        limit: float,
        unit: str,
        better: Better,
    ) -> Result:
        """Hold values against a fixed limit: "lower" means at most, "higher" at least."""
        mine = [float(values)] if isinstance(values, int | float) else list(values)
        return self.add(measure, mine, [limit] * len(mine), "limit", unit, better, 1.0)

    def count(
        self,
        measure: str,
        ours: float,
        *,
        other: float,
        other_name: str,
        unit: str = "",
        better: Better = "lower",
        goal: float | None = None,
    ) -> Result:
        """Add exact numbers, such as fsyncs or bytes: the interval is the ratio itself."""
        return self.add(measure, [ours], [other], other_name, unit, better, goal)

    def add(
        self,
        measure: str,
        ours: Sequence[float],
        other: Sequence[float],
        other_name: str,
        unit: str,
        better: Better,
        goal: float | None = None,
    ) -> Result:
        """Add a measure from values taken pair by pair."""
        low, high = interval(ours, other, better)
        result = Result(
            measure=measure,
            ours=statistics.median(ours),
            other=statistics.median(other),
            other_name=other_name,
            unit=unit,
            ratio=ratio(statistics.median(ours), statistics.median(other), better),
            interval=(low, high),
            goal=goal,
            met=None if goal is None else high >= goal,
        )
        self.results.append(result)
        return result

    def report(self, *, as_json: bool = False) -> str:
        """Give the JSON object of the design, or a table to read."""
        if as_json:
            results = [asdict(result) for result in self.results]
            whole = {"benchmark": self.name, "machine": machine(), "results": results}
            return json.dumps(finite(whole), allow_nan=False)
        return table(self.name, self.results)

    def finish(self, *, as_json: bool = False) -> int:
        """Print the report; the exit code is 1 if a goal was missed."""
        print(self.report(as_json=as_json))
        return 1 if any(result.met is False for result in self.results) else 0


def arguments(name: str) -> argparse.ArgumentParser:
    """Give a parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(prog=f"./run bench {name}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"pairs a measure, >= {PAIRS}")
    return parser


def ratio(ours: float, other: float, better: Better) -> float:
    """How many times better we are; infinite when the worse number is 0 on their side only."""
    above, below = (ours, other) if better == "higher" else (other, ours)
    if below == 0:
        return 1.0 if above == 0 else float("inf")
    return above / below


def interval(
    ours: Sequence[float], other: Sequence[float], better: Better, *, seed: int = 0
) -> Interval:
    """Bootstrap the ratio of the medians over whole pairs; seeded, so it can be repeated."""
    pairs = list(zip(ours, other, strict=True))
    if len(pairs) == 1:
        exact = ratio(*pairs[0], better)
        return exact, exact
    chance = random.Random(seed)
    ratios = []
    for _ in range(RESAMPLES):
        mine, theirs = zip(*chance.choices(pairs, k=len(pairs)), strict=True)
        ratios.append(ratio(statistics.median(mine), statistics.median(theirs), better))
    ratios.sort()
    cut = round((1 - CONFIDENCE) / 2 * RESAMPLES)
    return ratios[cut], ratios[-cut - 1]


def finite(value: object) -> object:
    """Replace infinite ratios (ours is 0, theirs is not) by null: JSON has no infinity."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if value == float("inf") else value


def machine() -> dict[str, object]:
    """Say on what the numbers were taken, without naming the machine."""
    cpu = platform.machine()
    memory = 0.0
    try:
        info = Path("/proc/cpuinfo").read_text()
        cpu = next(
            (line.split(":")[1].strip() for line in info.splitlines() if "model name" in line), cpu
        )
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (OSError, ValueError):
        pass  # not Linux: the name of the architecture has to do
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": round(memory, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def table(name: str, results: Sequence[Result]) -> str:
    """Lay the results out for people."""
    head = ("measure", "ours", "other", "unit", "times better", "interval", "goal", "")
    rows = [head, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if column in {0, 3} else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    notes = "\n".join(f"  {one.measure}: other = {one.other_name}" for one in results)
    return f"{name}\n\n" + "\n".join(lines) + f"\n\n{notes}"


def _row(result: Result) -> tuple[str, ...]:
    low, high = result.interval
    verdict = {None: "", True: "met", False: "MISSED"}[result.met]
    return (
        result.measure,
        short(result.ours),
        short(result.other),
        result.unit,
        f"{result.ratio:.2f}",
        f"{low:.2f}-{high:.2f}",
        "" if result.goal is None else f"{result.goal:g}",
        verdict,
    )


def short(number: float) -> str:
    """Write a number with three or four digits that matter."""
    if abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:.4g}"


def progress(text: str) -> None:
    """Show where the benchmark is, on a terminal only; empty text wipes it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()
