"""The benchmark of views runs; how fast it is says only `./run bench views`, on a quiet machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.timeout(400)
@pytest.mark.parametrize("part", ["cost of", "recompute"])
def test_the_benchmark_runs(part: str) -> None:
    """`./run bench views --quick` prints the JSON of the design, with a result for each measure."""
    only = {"recompute": "CPU against"}.get(part, part)
    command = [sys.executable, "-m", "benchmarks.views", "--quick", "--json", "--only", only]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=380)
    found = json.loads(done.stdout)
    assert found["benchmark"] == "views"
    assert len(found["results"]) >= 2
