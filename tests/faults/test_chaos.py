"""The chaos, once and short: real processes, everything done to them, and a history judged.

Can and cannot catch: see `headrace.testing.chaos`. Longer: `./run faults chaos --minutes 10`.
"""

from __future__ import annotations

import pytest

from headrace.testing.chaos import case
from headrace.testing.chaos_alone import alone
from headrace.testing.chaos_history import ACKED


@pytest.mark.timeout(600)
def test_nothing_is_lost_doubled_torn_or_out_of_order() -> None:
    found = case("tests", seconds=25)
    assert not found.wrong, "\n".join(found.wrong[:5])
    counts = found.counts
    assert counts[ACKED] > 50, counts
    assert min(counts["rows_read"], counts["tables"]) > 0, counts
    assert min(counts["kills"], counts["stops"], counts["sealed"]) > 0, counts
    if found.skipped:
        pytest.skip(f"passed, without {'; '.join(found.skipped)}")


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_roles_one_after_the_other(seed: int) -> None:
    assert alone(seed) == []
