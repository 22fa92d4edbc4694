"""The crash enumerator for the embedded log: a workload, every crash point, every disk, a verdict.

One round records a workload from a seed and explores it. A violation names workload, seed and the
path of power cuts; `./run faults log --workload W --seed S --at OPERATION:STATE` shows it again.

What it can catch: anything acknowledged or shown that a power cut, the death of processes, a failed
sync or a full disk takes away, doubles, tears or reorders, within the model of
`headrace.testing.powercut`. What it cannot: disks that lie about syncs, races of processors,
threads of one process, and states that a bounded choice left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.testing.explore import Explorer, Limits, Tally, Violation
from headrace.testing.promises import judge
from headrace.testing.simulation import Run, content_of, new_machine, probe
from headrace.testing.verdicts import verdict_on
from headrace.testing.workloads import WORKLOADS


@dataclass(slots=True)
class Round:
    """What one workload with one seed came to."""

    workload: str
    seed: int
    bound: int
    operations: int = 0
    attempts: int = 0
    tally: Tally = field(default_factory=Tally)

    def reports(self) -> list[str]:
        """Its violations, each with the command that shows it again."""
        return [self._report(violation) for violation in self.tally.violations]

    def _report(self, violation: Violation) -> str:
        path = ",".join(f"{at}:{number}" for at, number in violation.path)
        command = f"./run faults log --workload {self.workload} --seed {self.seed}"
        command += f" --bound {self.bound} --at {path}" if path else " --minutes 0"
        return f"{self.workload}, seed {self.seed}, {violation}\n  again: {command}"


def record(workload: str, seed: int) -> Run:
    """Run a workload; nothing is cut yet."""
    run = Run(new_machine(), f"{workload}/{seed}")
    try:
        WORKLOADS[workload](run)
        run.machine.note_stores()
    finally:
        run.end()
    return run


def one_round(
    workload: str, seed: int, limits: Limits, done: Callable[[], bool] = lambda: False,
    jobs: int = 1,
) -> Round:  # fmt: skip
    """Record a workload and explore its crash points, in so many processes."""
    try:
        run = record(workload, seed)
    except Exception as error:  # noqa: BLE001 - a workload ends well, or something is wrong
        found = Violation((), "while the workload ran", (verdict_on(error),), "")
        return Round(workload, seed, limits.bound, tally=Tally(violations=[found]))
    sizes = len(run.machine.ops), len(run.history.attempts)
    result = Round(workload, seed, limits.bound, *sizes)
    try:
        verdicts = standing(run)
    except Exception as error:  # noqa: BLE001 - whatever it is, the log cannot be read
        verdicts = [verdict_on(error)]
    if verdicts:
        result.tally.violations.append(Violation((), "with nothing cut", tuple(verdicts), ""))
        return result
    explorer = Explorer(probe, f"{workload}/{seed}", limits)
    explorer.done = done
    result.tally = explorer.explore(run.machine, run.history, jobs)
    return result


def standing(run: Run) -> list[str]:
    """What is wrong with the log as the workload left it."""
    ops = len(run.machine.ops)
    look = Run(run.machine, "look")
    content = content_of(look.open())
    look.end()
    del run.machine.ops[ops:]
    return judge(run.history, content, killed=True)


def replay(workload: str, seed: int, path: Sequence[tuple[int, int]], bound: int) -> Round:
    """Show one violation again."""
    limits = Limits(bound=bound, only=tuple(path), depth=max(2, len(path)), again=1.0)
    return one_round(workload, seed, limits)
