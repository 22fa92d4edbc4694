"""The order of the tests, and a failure told when it happens."""

from __future__ import annotations

import pytest

FIRST = ("test_views_bank", "test_slice.py", "test_demo", "test_run.py")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest first: else one worker is still at it when the other has nothing left."""

    def late(item: pytest.Item) -> int:
        groups = [mark.args[0] for mark in item.iter_markers("xdist_group")]
        return 0 if "spark" in groups else 1 if any(one in item.nodeid for one in FIRST) else 2

    items.sort(key=late)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Whoever watches a run of twenty minutes need not wait for its end."""
    if report.failed:
        print(f"\nfailed: {report.nodeid}", flush=True)
