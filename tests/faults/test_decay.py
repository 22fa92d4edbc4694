"""Damage to a log at rest: noticed with its place, or harmless; what is intact stays readable.

Caught: what `headrace.testing.decay` says it can catch, on simulated disks, and a part of it again
on a real folder. Not caught: damage that agrees with itself (a whole folder of yesterday), and
damage to the very end of a log that nobody closed or marked.
"""

from __future__ import annotations

import functools
import shutil
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

import headrace as hr
from headrace.log.embedded.check import check
from headrace.log.embedded.log import EmbeddedLog
from headrace.settings import LogSettings
from headrace.testing.damage import Damage, damages
from headrace.testing.decay import Aged, Unread, aged, examine
from headrace.testing.promises import Content
from headrace.testing.real import Rebooted
from headrace.testing.simulation import SCHEMA, TOPICS, content_of, rows_to_write


@functools.cache
def log(seed: int) -> Aged:
    return aged(seed)


@pytest.mark.parametrize(
    ("part", "seed"),
    [("journal", 1), ("journal", 2), ("pieces", 1), ("archive", 1), ("rest", 1)],
)
def test_nothing_is_silent(part: str, seed: int) -> None:
    found: Counter[str] = Counter()
    wrong = []
    for damage in log(seed).damages(Random(seed), 2 if part in ("journal", "archive") else 1):
        kind = damage.file.partition("/")[0]
        if (kind if kind in ("journal", "pieces", "archive") else "rest") == part:
            how, what = examine(log(seed), damage)
            found[how] += 1
            if what:
                wrong.append(f"{damage}: {how or 'SILENT'}: {what}")
    assert wrong == []
    assert sum(found.values()) > 60
    assert found["harmless"] < sum(found.values()) or part == "rest"


def test_what_nobody_reads_is_harmless() -> None:
    """Damage that need not be examined comes to nothing when it is."""
    unread, rng = Unread(log(1)), Random(1)
    every = list(log(1).damages(rng, 2))
    covered = [damage for damage in every if unread.covers(damage)]
    assert 20 < len(covered) < len(every) / 2
    assert {examine(log(1), one) for one in rng.sample(covered, 20)} == {("harmless", "")}


def real_log(folder: Path) -> Content:
    """A real log with closed and current journal files, pieces and counter runs."""
    small: dict[str, Any] = {"journal_bytes_first": 16 << 10, "journal_bytes_max": 32 << 10}
    with hr.connect(folder, inline_bytes_max=3000, **small) as real:
        for name, partitions in TOPICS.items():
            real.create_topic(name, SCHEMA, key="k", partitions=partitions)
        for number in range(1, 25):
            with real.transaction() as transaction:
                transaction.append("orders", rows_to_write(number, 3, 40 if number % 4 else 1500))
                transaction.append("audit", rows_to_write(number, 1, 300))
                transaction.expect("c0", number - 1)
        return content_of(real)


def noticed(folder: Path, original: Content, damage: Damage, boot: int) -> str:
    """How damage to a real folder was noticed, as in `headrace.testing.decay`, in short."""
    system = Rebooted(boot)
    try:
        real = EmbeddedLog(folder, LogSettings(), system=system)
    except hr.errors.HeadraceError as error:
        return "open" if named(error, damage) else f"open, but: {error}"
    try:
        found = Content([], {}, 0)
        content_of(real, found)
    except hr.errors.HeadraceError as error:
        assert set(found.rows) <= set(original.rows)
        return "read" if named(error, damage) else f"read, but: {error}"
    finally:
        real.close()
    if (found.rows, found.counters) == (original.rows, original.counters):
        return "harmless"
    problems = check(system, str(folder)).problems
    return "check" if problems and named(problems[0], damage) else "SILENT"


def named(error: hr.errors.HeadraceError, damage: Damage) -> bool:
    return damage.file.rpartition("/")[2] in str(error) or isinstance(error, hr.errors.NotALog)


def test_a_real_folder(tmp_path: Path) -> None:
    original = real_log(tmp_path / "data")
    found: Counter[str] = Counter()
    every_path = (tmp_path / "data").rglob("*")
    paths = {str(p.relative_to(tmp_path / "data")): p for p in every_path if p.is_file()}
    files = {name: paths[name].read_bytes() for name in sorted(paths)}
    every = list(damages(files, Random(1), each=1))
    for number, damage in enumerate(Random(2).sample(every, 60)):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tmp_path / "data", copy)
        new = damage.change(files[damage.file])
        if new is None:
            (copy / damage.file).unlink()
        else:
            (copy / damage.file).write_bytes(new)
        if new != files[damage.file]:
            how = noticed(copy, original, damage, number + 1)
            assert how in ("open", "read", "check", "harmless"), f"{damage}: {how}"
            found[how] += 1
    assert found["read"] > 5
