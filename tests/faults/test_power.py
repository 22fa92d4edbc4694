"""Real power cuts and a really full disk: a loop-mounted ext4 image, copied under load.

The copy of an image is what a disk would hold had the power failed at that instant: what the kernel
had not written is not in it. Caught: promises of the simulated disk that ext4 does not keep, in
either direction. Not caught: disks that lie about flushes, and instants nobody hits (the writers
are stopped while the image is copied, so that the copy is of one instant).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

import headrace as hr
from headrace.log.embedded.log import EmbeddedLog
from headrace.testing.image import make_image, mounted, run, why_not
from headrace.testing.real import Rebooted, Worker, account, history_of, prepare
from headrace.testing.simulation import SCHEMA, rows_to_write


@pytest.fixture
def image(tmp_path: Path) -> Path:
    if why_not():
        pytest.skip(why_not())
    return make_image(tmp_path / "disk.img")


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_power_cuts_under_load(image: Path, tmp_path: Path, durability: str) -> None:
    rng = Random(durability)
    cuts = int(os.environ.get("HEADRACE_POWER_CUTS", "10"))
    with mounted(image, tmp_path / "disk") as disk:
        folder = str(disk / "data")
        prepare(folder)
        subprocess.run(["sync", "-f", folder], check=True)  # the folder itself, once
        workers = [Worker(folder, "follow", durability=durability)]
        for number in (1, 2):
            arguments = ("append", "--first", str(number * 1_000_000), "--pause", "0.002")
            workers.append(Worker(folder, *arguments, durability=durability))
        try:
            for worker in workers[1:]:
                worker.wait_for("taken")
            lost = 0
            for _ in range(cuts):
                time.sleep(rng.random() * 0.25)
                lost += cut(image, tmp_path, workers, durable=durability == "fsync")
            assert bool(lost) == (durability == "os"), "the cut itself takes what is not synced"
        finally:
            for worker in workers:
                worker.end(signal.SIGKILL)


def cut(image: Path, tmp_path: Path, workers: list[Worker], *, durable: bool) -> bool:
    """Cut the power, look, and say whether anything with a receipt was lost."""
    copy = tmp_path / "copy.img"
    for worker in workers:
        worker.send(signal.SIGSTOP)
    time.sleep(0.02)  # whoever is inside a system call finishes it
    promised, told = history_of(workers, durable=durable), history_of(workers)
    run("cp", "--sparse=always", str(image), str(copy))
    for worker in workers:
        worker.send(signal.SIGCONT)
    with mounted(copy, tmp_path / "after") as after:
        assert account(str(after / "data"), promised, system=Rebooted(1)) == []
        return account(str(after / "data"), told, system=Rebooted(2)) != []


def test_a_full_disk_takes_nothing_and_loses_nothing(image: Path, tmp_path: Path) -> None:
    with mounted(image, tmp_path / "disk") as disk:
        filler = disk / "filler"
        filler.write_bytes(bytes(20 << 20))
        taken = fill(disk / "data", filler)
        reopened(disk / "data", taken)


def fill(folder: Path, filler: Path) -> list[int]:
    sizes: dict[str, Any] = {"journal_bytes_first": 1 << 20, "journal_bytes_max": 8 << 20}
    with hr.connect(folder, **sizes) as log:
        log.create_topic("orders", SCHEMA, key="k", partitions=3)
        taken = []
        with pytest.raises(hr.errors.DiskFull, match="No space left"):
            for number in range(1, 2000):
                log.append("orders", rows_to_write(number, 20, 2000))
                taken.append(number)
        assert len(taken) > 50
        for _ in range(3):
            with pytest.raises(hr.errors.DiskFull):
                log.append("orders", rows_to_write(0, 2000, 2000))
        assert attempts_in(log) == taken, "readers go on"
        filler.unlink()
        log.append("orders", rows_to_write(5000, 20, 2000))
        taken.append(5000)
        assert attempts_in(log) == taken
    return taken


def reopened(folder: Path, taken: list[int]) -> None:
    with hr.connect(folder) as log:
        assert attempts_in(log) == taken


def attempts_in(log: EmbeddedLog) -> list[int]:
    found: dict[int, int] = {}
    for batch in log.read("orders"):
        for number in batch.data.column("attempt").to_pylist():
            found[number] = found.get(number, 0) + 1
    assert set(found.values()) <= {20}, "entries are whole"
    return list(found)
