"""Memory: a reading stays below 256 MB, whatever the log holds.

Each test reads a log of several hundred megabytes in a child process and compares its peak before
and after. Caught: batches or buffers that are kept, entries or pieces read whole. Not caught:
growth that needs more than these logs have; what the caller keeps itself.
"""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from tests.log.kit import Child

LIMIT_MB = 256
MEASURE = """
    import resource, pyarrow
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    log = hr.connect(folder)
    for batch in log.read("warm"):
        batch.to_pylist()
    before = peak()
    rows = size = 0
    for batch in log.read(sys.argv[2].split(",")):
        rows += len(batch)
        size += batch.data.nbytes
        del batch
    say(rows, size >> 20, peak() - before)
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A log of about 400 MB: single rows between large entries, inline and staged."""
    folder = str(tmp_path_factory.mktemp("memory") / "log")
    block = os.urandom(1 << 20)
    with hr.connect(folder, durability="os", background=False) as log:
        log.create_topic("warm", "a binary")
        log.append("warm", [{"a": b"x"}])
        for name in ("inline", "staged", "sparse"):
            log.create_topic(name, "a binary")
        for i in range(160):
            log.append("inline", [{"a": block}])
            log.append("sparse", [{"a": b"x"}])
            if i % 80 == 0:
                parts = [pa.record_batch({"a": pa.array([block] * 8)})] * 15
                log.append("staged", pa.Table.from_batches(parts))
    return folder


@pytest.mark.parametrize(
    ("topics", "rows", "megabytes"),
    [
        ("inline", 160, 160),
        ("staged", 240, 240),
        ("sparse", 160, 0),
        ("staged,inline,sparse", 560, 400),
    ],
)
def test_a_reading_has_bounded_memory(big: str, topics: str, rows: int, megabytes: int) -> None:
    """Reading several hundred megabytes grows a process by less than 256 MB. R-A9"""
    with Child(big, MEASURE, topics) as child:
        found: tuple[Any, ...] = tuple(map(int, child.wait().split()))
    assert found[:2] == (rows, megabytes)
    assert found[2] < (LIMIT_MB if megabytes else 100), f"grew by {found[2]} MB"
