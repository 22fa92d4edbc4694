"""The order of the tests, a failure told when it happens, and Ctrl-C for programs under test."""

from __future__ import annotations

import signal
import sys

import pytest

FIRST = (
    "test_slice.py",
    "test_views_bank",
    "test_demo",
    "test_run.py",
    "test_views_sql",
    "test_lift",
)


if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # As a shell leaves it to what it runs in the background; programs under test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long first: else one worker is still at them when the other is done."""

    def late(item: pytest.Item) -> int:
        file = item.nodeid.partition("::")[0]
        long = [number for number, name in enumerate(FIRST) if name in file]
        return long[0] if long else len(FIRST) + ("/pipelines/" not in file)

    items.sort(key=late)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Whoever watches a run of twenty minutes need not wait for its end."""
    if report.failed:
        sys.stdout.write(f"\nfailed: {report.nodeid}\n")
