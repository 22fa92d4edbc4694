"""The benchmark kit: its statistics, with numbers that are known."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from benchmarks.kit import Bench, interval, ratio


def arm(name: str, value: float, calls: list[str]) -> Callable[[], float]:
    def measure() -> float:
        calls.append(name)
        return value

    return measure


def test_the_arms_are_interleaved_so_that_drift_hits_both() -> None:
    calls: list[str] = []
    Bench("x").compare(
        "m", ours=arm("A", 1, calls), other=arm("B", 1, calls), other_name="b", unit="s",
        better="lower",
    )  # fmt: skip
    assert "".join(calls) == "ABBAABBAABBAAB"


def test_fewer_than_seven_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 7"):
        Bench("x").compare(
            "m", ours=lambda: 1, other=lambda: 1, other_name="b", unit="s", better="lower", pairs=6
        )


def test_the_ratio_says_how_many_times_better_we_are() -> None:
    assert ratio(300, 100, "higher") == 3
    assert ratio(2, 6, "lower") == 3
    assert ratio(0, 0, "lower") == 1
    assert ratio(0, 5, "lower") == float("inf")


def test_equal_pairs_have_an_interval_without_width() -> None:
    assert interval([2.0] * 7, [4.0] * 7, "lower") == (2, 2)


def test_the_interval_holds_the_ratio_and_lies_within_the_values() -> None:
    ours = [90, 95, 100, 105, 110, 98, 102]
    other = [50.0] * 7
    low, high = interval(ours, other, "higher")
    assert 90 / 50 <= low < 100 / 50 < high <= 110 / 50
    assert interval(ours, other, "higher") == (low, high), "it can be repeated"


def test_a_single_odd_pair_does_not_move_the_ratio() -> None:
    bench = Bench("x")
    result = bench.add("m", [10.0] * 6 + [1000.0], [20.0] * 7, "b", "s", "lower")
    assert result.ratio == 2
    assert result.met is None


@pytest.mark.parametrize(
    ("ours", "met"),
    [
        ([10.0] * 7, True),
        ([21.0] * 7, False),
        ([19.0, 25.0, 19.0, 25.0, 19.0, 25.0, 25.0], True),
    ],
    ids=["met", "the whole interval misses", "only a part of the interval misses"],
)
def test_a_goal_is_missed_only_if_the_whole_interval_misses(ours: list[float], met: bool) -> None:
    bench = Bench("x")
    assert bench.add("m", ours, [20.0] * 7, "b", "s", "lower", goal=1).met is met


def test_limits_become_ratios() -> None:
    bench = Bench("x")
    fast = bench.limit("open", [0.4, 0.5, 0.6], limit=1, unit="s", better="lower")
    assert (fast.ratio, fast.met, fast.other_name) == (2, True, "limit")
    assert bench.limit("open", 4, limit=1, unit="s", better="lower").met is False
    assert bench.limit("rate", 4, limit=1, unit="rows/s", better="higher").met is True


def test_the_report_is_the_json_object_of_the_design(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench("log")
    bench.count("fsyncs", 10, other=20, other_name="one each", goal=1.5)
    assert bench.finish(as_json=True) == 0
    made = json.loads(capsys.readouterr().out)
    assert list(made) == ["benchmark", "machine", "results"]
    assert made["benchmark"] == "log"
    assert made["machine"]["cores"] >= 1
    assert made["results"] == [
        {
            "measure": "fsyncs", "ours": 10, "other": 20, "other_name": "one each", "unit": "",
            "ratio": 2, "interval": [2, 2], "goal": 1.5, "met": True,
        }
    ]  # fmt: skip


def test_a_count_of_zero_is_infinitely_better_and_still_json() -> None:
    bench = Bench("log")
    assert bench.count("wake-ups", 0, other=5, other_name="polling", goal=1).met
    made = json.loads(bench.report(as_json=True))
    assert made["results"][0]["interval"] == [None, None]


def test_a_missed_goal_is_seen_in_the_table_and_the_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = Bench("log")
    bench.count("bytes", 2_000_000, other=1_000_000, other_name="plain Arrow", unit="B", goal=0.8)
    assert bench.finish() == 1
    shown = capsys.readouterr().out
    assert "2,000,000" in shown
    assert "MISSED" in shown
    assert "bytes: other = plain Arrow" in shown
