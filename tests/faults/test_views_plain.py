"""Random views without Spark through the real loop, compared at every commit.

Can catch: a wrong delta rule, wrong state, wrong order of commits, restarts and builds that lose or
double something. Cannot catch: what Spark reads and evaluates (tests/pipelines/test_views_sql.py),
crashes (test_views_crashes.py). `./run faults views --only plain` tries more seeds.
"""

from __future__ import annotations

from random import Random

import pytest

from headrace.testing.views_bugs import BUGS
from headrace.testing.views_history import TABLES, is_sound, random_history, smaller
from headrace.testing.views_plain import attempt, counter_example, plain_case, smaller_views

EACH = 25


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, 8 * EACH, EACH))
def test_views_are_right_at_every_commit(first: int) -> None:
    for seed in range(first, first + EACH):
        assert counter_example(f"test{seed}") == ""


def test_the_same_seed_gives_the_same_case() -> None:
    one, two = plain_case("7"), plain_case("7")
    assert repr(one.history) == repr(two.history)
    assert one.text == two.text
    assert [n.fingerprint for n in one.views.values()] == [
        n.fingerprint for n in two.views.values()
    ]


def test_histories_retract_only_what_is_there() -> None:
    history = random_history(Random(3), list(TABLES.values()), 6, 6)
    assert is_sound(history)
    assert not is_sound([[{"u": [((1,), -1)]}]])
    assert all(sum(map(len, less)) <= sum(map(len, history)) for less in smaller(history))


@pytest.mark.timeout(600)
def test_counter_examples_shrink() -> None:
    (bug,) = (bug for bug in BUGS if bug.name == "dA x dB is forgotten")
    seed = next(f"hunt{n}" for n in range(1, 400) if _is_wrong(f"hunt{n}", bug))
    with bug.on():
        text = counter_example(seed, seconds=60)
    assert "Join[" in text
    assert f"seed {seed}" in text
    rows = [line for line in text.splitlines() if line.startswith("      ")]
    case = plain_case(seed)
    before = sum(len(r) for b in case.history for e in b for r in e.values())
    assert len(rows) < before
    assert len(list(smaller_views(case))) > 0


def _is_wrong(seed: str, bug: object) -> bool:
    with bug.on():  # type: ignore[attr-defined]
        return attempt(plain_case(seed)) is not None
