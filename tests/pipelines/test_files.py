"""A pipeline file with functions, classes and modules of its own, as a user writes it (R-C1).

Can catch: what the file has, and modules beside it, not found by Python workers; a file that is
read from another folder; an error of the file without its line. Cannot catch: modules that are
installed on the driver only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace import errors
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


@pytest.mark.parametrize(
    ("text", "said", "line"),
    [
        ("x = 1\ndef broken(:\n", "SyntaxError: invalid syntax", 2),
        ("x = 1\x00\n", "null bytes", 1),
        ("import headrace as hr\n\nhr.Pipeline('a b')\n", "cannot be the name", 3),
        ("import headrace as hr\nhr.Pipeline()\n", "TypeError: ", 2),
        ("import json\n\njson.loads('{')\n", "JSONDecodeError: ", 3),
        ("raise SystemExit(3)\n", "SystemExit: 3", 1),
        ("import headrace as hr\np = hr.Pipeline('p')\np.keep(in_='x')\n", "not a target", 3),
        ("import headrace as hr\np = hr.Pipeline('p')\np.table('a b')\n", "cannot be the", 3),
    ],
)
def test_a_file_that_is_wrong_is_named_with_its_line(
    text: str, said: str, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.pipelines.spark.session", lambda: None)
    file = tmp_path / "wrong.py"
    file.write_text(text)
    with pytest.raises(errors.BadPipeline) as caught:
        load_pipeline(str(file))
    assert said in caught.value.fact
    if "null" not in said:
        assert caught.value.place.endswith(f"{file}:{line}")


def test_a_file_that_python_cannot_read_starts_no_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never() -> None:
        raise AssertionError

    monkeypatch.setattr("headrace.pipelines.spark.session", never)
    (tmp_path / "wrong.py").write_text("def broken(:\n")
    with pytest.raises(errors.BadPipeline):
        load_pipeline(str(tmp_path / "wrong.py"))
