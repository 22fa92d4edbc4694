"""The slice, once: PostgreSQL to PostgreSQL while each part, each server and the supervisor die.

Can and cannot catch: see `headrace.testing.slice_case`. Longer: `./run faults slice --minutes 10`.
"""

from __future__ import annotations

import pytest

from headrace.testing.slice_case import KILLS, case


@pytest.mark.timeout(1500)
def test_nothing_wrong_is_ever_seen() -> None:
    found = case("tests", seconds=20)
    assert not found.wrong, "\n".join(found.wrong[:5])
    assert set(found.kills) == set(KILLS)
    assert all(found.kills.values()), found.kills
    assert min(found.transactions, found.reads, found.cuts) > 0, found
    assert set(found.verified) == {"log", "source", "batch"}
