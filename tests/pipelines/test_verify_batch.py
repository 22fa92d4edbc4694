"""A view against its batch reading, and tokens of views, with real Spark (R-B7, B12).

Caught: a view that is not what its definition gives (its topic is made wrong by hand), tables and
view taken at different positions, views over views and without a key, sums of floats that differ in
their last digits only; a view that is said to have a token before it has. Not caught: a definition
that Spark itself computes differently each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

import headrace as hr
from headrace import errors
from headrace.interfaces import Cut
from headrace.log.embedded.log import EmbeddedLog
from headrace.runtime import tokens
from headrace.runtime.verify import Known, newest_cut, verify


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EmbeddedLog]:
    with hr.connect(tmp_path / "log") as log:
        log.create_topic("orders", "id bigint, country string, amount double", key="id",
                         kind="changes")  # fmt: skip
        log.create_topic("clicks", "country string")
        yield log


def shop() -> hr.Pipeline:
    made = hr.Pipeline("shop")
    made.table("orders")
    made.stream("clicks")

    @made.view(key="country")
    def revenue(orders: Any) -> Any:
        return orders.groupBy("country").agg(F.sum("amount").alias("revenue"))

    @made.view()
    def seen(revenue: Any, clicks: Any) -> Any:
        return clicks.join(revenue, "country", "left").select("country", "revenue")

    return made


def order(number: int, country: str | None, amount: float, weight: int = 1) -> dict[str, Any]:
    return {"id": number, "country": country, "amount": amount, "_weight": weight}


def test_a_view_equals_its_batch_reading_or_says_where_not(log: EmbeddedLog, spark: Any) -> None:
    pipeline = shop()
    known = Known(pipeline=lambda name: pipeline)
    orders = [order(n, ["at", "ch", "de", None][n % 4], n / 7 * 10 ** (n % 5)) for n in range(40)]
    log.append("orders", orders)
    log.append("clicks", [{"country": c} for c in ("at", "at", "it", None)])
    pipeline.run(log, until="caught up")
    token = log.append("orders", [order(99, "at", 1.0)])  # not taken in
    for name, rows in (("shop.revenue", 4), ("shop.seen", 4)):
        (result,) = verify(log, name, known)
        assert (result.differing, result.rows) == (0, rows)
        assert result.through == pipeline.through < token.position
    # Read your own writes: not yet, with figures; then it is.
    with pytest.raises(errors.NotYetThere, match="rows 1; ") as caught:
        hr.rows(log, "shop.revenue", after=token.position, timeout=0.05)
    assert caught.value.details["rows"] == 1
    before = hr.rows(log, "shop.revenue").to_pylist()
    pipeline.run(log, until="caught up")
    after = hr.rows(log, "shop.revenue", after=token.position, timeout=0.05).to_pylist()
    assert after != before
    # An entry that no view reads: nothing is left to wait for.
    log.create_topic("other", "a bigint")
    other = log.append("other", [{"a": 1}])
    assert tokens.wait_view(log, "shop", other.position, 0.05) >= other.position

    wrong = [row for row in after if row["country"] == "ch"]
    log.append(
        "shop.revenue",
        [{**wrong[0], "_weight": -1}, {**wrong[0], "revenue": 7.0, "_weight": 1},
         {"country": "fr", "revenue": 1.0, "_weight": 1}],
    )  # fmt: skip
    log.append("shop.seen", [{"country": "at", "revenue": None, "_weight": 1}])
    pipeline.run(log, until=log.append("orders", [order(100, "de", 1.0)]).position)
    (result,) = verify(log, "shop.revenue", known)
    assert {(one.key["country"], one.kind) for one in result.differences} == {
        ("ch", "changed"),
        ("fr", "extra"),
    }
    assert all(one.positions for one in result.differences)
    (result,) = verify(log, "shop.seen", known)
    assert [(one.kind, one.key) for one in result.differences] == [
        ("extra", {"country": "at", "revenue": None})
    ]
    with pytest.raises(errors.CannotVerify, match="definition of view"):
        verify(log, "shop.revenue", Known())
    with pytest.raises(errors.CannotVerify, match="not been built"):
        newest_cut(log, "shop", "later")
    assert newest_cut(log, "shop", "seen") > Cut(0, 0)
