"""``./run test``: format, lint, types, layers, all tests; then what was skipped and why.

Every step runs, also after one failed; the exit code is 1 if any did. Arguments go to pytest.

Two workers share two cores with servers, a JVM and processes that are killed. A few tests that
failed there are run again, alone: one that passes then is named in the summary as unsteady, with
what it printed above, and does not fail the run. It is a bug all the same, of the test or of the
product; more than a few failures, or one that fails twice, fail the run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tools import system

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [
    name
    for name in ("src", "tests", "benchmarks", "tools", "examples", "hatch_build.py")
    if (ROOT / name).exists()
]

SECOND_LOOKS = 3
"""So many failed tests are run again; more are no accident."""

RECORD = [
    *(sys.executable, "-c"),
    "from headrace.pipelines import spark; spark.find_archive().exists() or spark.record()",
]
KAFKA = [sys.executable, "-m", "headrace.testing.kafka"]
"""Fetches the jars of a broker, once on a machine."""


@dataclass(frozen=True)
class Step:
    """One check: its name, the command, and whether its output is worth seeing when it passes."""

    name: str
    command: list[str]
    talks: bool = False


AGAIN = Step(
    "what failed, again and alone",
    ["pytest", "-q", "-n", "0", "--last-failed", "--last-failed-no-failures", "none"],
    talks=True,
)


def steps(report: Path, pytest_arguments: list[str]) -> list[Step]:
    # loadfile: the tests of a file share a server, a project or a session, in one worker.
    pytest = ["pytest", "-q", "-n", "2", "--dist", "loadfile"]
    pytest += [f"--junit-xml={report}", *pytest_arguments]
    return [
        Step("format", ["ruff", "format", "--check", *FOLDERS]),
        Step("lint", ["ruff", "check", "--quiet", *FOLDERS]),
        Step("types", ["mypy", *FOLDERS]),
        Step("layers", ["lint-imports"]),
        Step("tests", pytest, talks=True),
    ]


def main(arguments: list[str]) -> int:
    if arguments in (["-h"], ["--help"]):
        print(f"{__doc__}\nwhich arguments pytest takes: ./run pytest --help")
        return 0
    unavailable = system.provide()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        # Spark is started some thirty times: with its class archive each start costs half.
        recorder = subprocess.Popen(RECORD, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        fetcher = subprocess.Popen(
            KAFKA, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        *before, tests = steps(report, arguments)
        failed = [step.name for step in before if not passes(step)]
        recorder.wait()
        said = fetcher.communicate()[1].splitlines()
        unavailable += said[-1:] if fetcher.returncode else []
        tests_pass = passes(tests)
        counts, skipped, fallen = read_report(report)
        unsteady: list[str] = []
        if not tests_pass and 0 < len(fallen) <= SECOND_LOOKS and passes(AGAIN):
            unsteady, tests_pass = fallen, True
            counts["passed"] += counts["failed"]
            counts["failed"] = 0
        failed += [] if tests_pass else [tests.name]
    summarise(failed, unavailable, skipped, unsteady)
    print(", ".join(f"{number} {what}" for what, number in counts.items()))
    return 1 if failed else 0


def passes(step: Step) -> bool:
    """Run one step and say how it went."""
    if step.talks:
        print(f"---- {step.name}", flush=True)
    started = time.monotonic()
    done = subprocess.run(
        step.command, cwd=ROOT, check=False, text=True, capture_output=not step.talks
    )
    verdict = "ok" if done.returncode == 0 else "FAILED"
    print(f"---- {step.name}: {verdict} ({time.monotonic() - started:.1f} s)", flush=True)
    if done.returncode != 0 and not step.talks:
        print(f"{done.stdout}{done.stderr}".rstrip(), flush=True)
    return done.returncode == 0


def read_report(report: Path) -> tuple[dict[str, int], Counter[str], list[str]]:
    """Read how many tests passed, failed and were skipped, why skipped, and which failed."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    skipped: Counter[str] = Counter()
    fallen: list[str] = []
    cases = ET.parse(report).getroot().iter("testcase") if report.exists() else iter(())
    for case in cases:
        skip = case.find("skipped")
        if skip is not None:
            counts["skipped"] += 1
            where = f"{case.get('classname')}::{case.get('name', '').partition('[')[0]}"
            skipped[f"{where}: {skip.get('message') or 'no reason given'}"] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            fallen.append(f"{case.get('classname')}::{case.get('name')}")
        else:
            counts["passed"] += 1
    return counts, skipped, fallen


def summarise(
    failed: list[str], unavailable: list[str], skipped: Counter[str], unsteady: list[str]
) -> None:
    print("\n==== summary")
    for line in unavailable:
        print(f"not available: {line}")
    for reason, times in sorted(skipped.items()):
        print(f"skipped: {reason}{f' ({times} times)' if times > 1 else ''}")
    if not unavailable and not skipped:
        print("nothing was skipped")
    for name in unsteady:
        print(f"UNSTEADY: {name} failed beside others and passed alone (its failure is above)")
    print(f"failed: {', '.join(failed)}" if failed else "all steps passed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
