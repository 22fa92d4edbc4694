"""A pipeline file with functions, classes and modules of its own, as a user writes it (R-C1).

Can catch: what the file has, and modules beside it, not found by Python workers; a file that is
read from another folder. Cannot catch: modules that are installed on the driver only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import headrace as hr
from headrace.pipelines.files import load_pipeline

FILE = """
import headrace as hr
from pyspark.sql import functions as F
from beside import twice
from folder.inner import plus

shop = hr.Pipeline("shop")
shop.table("orders")

class Rate:
    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return plus(twice(x) * self.by)

rate = Rate(3)

@F.udf("bigint")
def rated(x):
    return rate(x)

@shop.view()
def all_rated(orders):
    return orders.select(rated("id").alias("r"))
"""


def test_python_workers_have_what_a_file_defines_and_the_modules_beside_it(
    spark: Any, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(FILE)
    (tmp_path / "beside.py").write_text("def twice(x):\n    return 2 * x\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/inner.py").write_text("ONE = 1\ndef plus(x):\n    return x + ONE\n")
    with hr.connect(tmp_path / "log") as log:
        log.create_topic("orders", "id bigint", kind="changes")
        log.append("orders", [{"id": 5}])
        pipeline = load_pipeline(str(tmp_path / "shop.py"))
        pipeline.run(log, until="caught up")
        assert pipeline.rows("all_rated").to_pylist() == [{"r": 31}]
