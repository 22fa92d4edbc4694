"""The benchmark of views runs; how fast it is says only `./run bench views`, on a quiet machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.timeout(400)
def test_the_benchmark_runs() -> None:
    """`./run bench views --quick` prints the JSON of the design, with a result for each measure."""
    command = [sys.executable, "-m", "benchmarks.views", "--quick", "--json", "--only", "cost of"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=380)
    found = json.loads(done.stdout)
    assert found["benchmark"] == "views"
    assert len(found["results"]) >= 2
