"""One Spark session for all tests that ask for it: these run in one worker."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(scope="session")
def spark() -> Any:
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    from headrace.pipelines.spark import session

    # Generated code for whole stages takes longer to compile than these tables take to read.
    return session(settings={"spark.sql.codegen.wholeStage": "false"}, quick=True)
