"""One Spark session in a worker, for all tests that ask for it."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def spark() -> Any:
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    from headrace.pipelines.spark import session

    # Generated code for whole stages takes longer to compile than these tables take to read.
    return session(settings={"spark.sql.codegen.wholeStage": "false"}, quick=True)
