"""A state that does not fit into memory, in a process that gets no more (R-C9).

The system holds the limit (RLIMIT_DATA: all that is allocated; files that are mapped do not count),
so this can catch memory that nobody counts. Cannot catch: Spark's, which has a limit of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHILD = """
import pathlib, resource, sys
import numpy as np, pyarrow as pa, pyarrow.compute as pc
import headrace as hr
from headrace.pipelines.views import run as loop
from headrace.pipelines.views.algebra import Aggregate, Call, Join, Scan
from headrace.testing import views_case
from headrace.testing.views_plain import make_node

folder, memory, spare = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ROWS, STEP, WIDTH = 400_000, 10_000, 600
types = [pa.int64(), pa.int64(), pa.string()]
left, right = (make_node(Scan, (name,), types, name=name) for name in ("l", "r"))
join = make_node(
    Join, ("all",), types * 2, kind="inner", left=left, right=right,
    left_keys=(0,), right_keys=(0,), null_safe=(False,), residual=None,
)
calls = (Call("count", None, None, pa.int64()), Call("sum", 0, None, pa.int64()))
view = make_node(Aggregate, ("n",), [pa.int64()] * 3, over=join, keys=(1,), calls=calls)

def rows(first):
    numbers = pa.array(np.arange(first, first + STEP))
    names = pc.utf8_lpad(numbers.cast(pa.string()), WIDTH, "0")
    return pa.record_batch({"id": numbers, "g": pc.bit_wise_and(numbers, 1), "name": names})

small = dict.fromkeys(("inline_bytes_max", "chunk_bytes", "read_bytes_max"), 1 << 20)
with hr.connect(folder, **small) as log:
    pipeline = views_case.pipeline_of(["v"], [])
    for name in ("l", "r"):
        pipeline.table(name)
        log.create_topic(name, "id bigint, g bigint, name string", key="id", kind="changes")
    for first in range(0, ROWS, STEP):
        log.append("l" if first % (2 * STEP) else "r", rows(first))
    with views_case.defined_as({"v": view}):
        driver = loop.Runner(pipeline, log, memory_bytes=memory)
    held = pathlib.Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]
    resource.setrlimit(resource.RLIMIT_DATA, ((int(held) << 10) + spare,) * 2)
    with driver as runner:
        runner.run("caught up")
        log.append("r", rows(STEP))  # partners of rows that are kept: these are read again
        runner.run("caught up")
    found = pipeline.rows("v", log=log).to_pylist()
    print(sorted(tuple(row.values()) for row in found))
"""
SPARE = 112 << 20
"""What a build may allocate: less than half of the 240 MB that the state has."""


def built(folder: Path, memory: int, spare: int = SPARE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, str(folder), str(memory), str(spare)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_state_larger_than_the_memory_is_built_and_read(tmp_path: Path) -> None:
    done = built(tmp_path / "log", 8 << 20)
    assert done.returncode == 0, done.stderr
    odd, even = sum(range(10_001, 20_000, 2)), sum(range(10_000, 20_000, 2))
    assert done.stdout.strip() == str([(0, 5_000, even), (1, 5_000, odd)])


def test_without_a_bound_the_same_does_not_fit(tmp_path: Path) -> None:
    done = built(tmp_path / "log", 1 << 40)
    assert "MemoryError" in done.stderr
