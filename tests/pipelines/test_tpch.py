"""Some of the TPC-H queries as views, kept right while rows change; all: `./run faults views`.

What it can and cannot catch is on top of `headrace.testing.views_tpch`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.testing.tpch import QUERIES
from headrace.testing.views_tpch import differences

SOME = ("q4", "q11", "q13", "q16", "q22")
"""Semi join; scalar subquery; left join with a residual; NOT IN; anti join."""


@pytest.mark.timeout(900)
def test_tpch_queries_are_kept(tmp_path: Path, spark: Any) -> None:
    chosen = {name: QUERIES[name] for name in SOME}
    for when, wrong in differences(chosen, spark=spark, folder=tmp_path, seed=1, rounds=2):
        assert not wrong, when
