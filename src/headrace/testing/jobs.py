"""What long runs share: tasks for all processors, seeds until the time is up, what is said.

Tasks are for forked processes, answers come as they are there.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")
EVERY_PROCESSOR = os.cpu_count() or 1
_work: list[Callable[[Any], Any]] = []


def spread(work: Callable[[T], R], tasks: Iterable[T], jobs: int) -> Iterator[R]:
    """`work` of each task, in any order, in so many processes; with one job in this process.

    They are forks: `work` may be any function, with all that is in memory now. Tasks and answers
    travel, and must be plain. A process that dies is an error.
    """
    if jobs < 2:
        yield from map(work, tasks)
        return
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, fork, initializer=_begin, initargs=(work,)) as pool:
        for answer in as_completed([pool.submit(_do, task) for task in tasks]):
            yield answer.result()


def seeds(first: int, deadline: float) -> Iterator[int]:
    """Seeds from the first on, until the time is up; one at least."""
    yield first
    while time.monotonic() < deadline:
        first += 1
        yield first


def say(text: str) -> None:
    """Talk to whoever waits."""
    print(text, file=sys.stderr, flush=True)


def _begin(work: Callable[[Any], Any]) -> None:
    _work[:] = [work]


def _do(task: Any) -> Any:
    return _work[0](task)
