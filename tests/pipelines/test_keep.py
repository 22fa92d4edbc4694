"""A real pipeline kept in a target: what Spark commits is what a follower finds (R-B6, C14).

Can catch: commits that do not say through which position which views are right, views that are
built or changed and shown too early. Cannot catch: crashes (tests/derived, the slice).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

import headrace as hr
from headrace import errors
from headrace.derived.follower import Follower
from headrace.derived.rows import kept_tables


def rows(pipeline: hr.Pipeline, log: Any, table: str) -> list[tuple[Any, ...]]:
    kept = pipeline.kept["main"]
    target = kept.target.open(kept.follower)
    (of,) = [one for one in kept_tables(log, kept) if one.name == table]
    found = pa.Table.from_batches(target.read(of)[1], of.schema).to_pylist()
    target.close()
    return sorted(tuple(one.values()) for one in found)


@pytest.mark.timeout(400)
def test_views_and_tables_move_together(spark: Any, tmp_path: Path) -> None:
    target = hr.SQLite(str(tmp_path / "target.db"))

    def pipeline(least: int) -> hr.Pipeline:
        made = hr.Pipeline("shop")
        made.table("orders", of="db.public.orders")

        @made.view(key="country")
        def revenue(orders: Any) -> Any:
            large = orders.where(F.col("amount") >= least)
            return large.groupBy("country").agg(F.sum("amount").alias("total"))

        @made.view()
        def amounts(orders: Any) -> Any:
            return orders.select("amount")

        made.keep("orders", "revenue", "amounts", in_=target)
        return made

    with hr.connect(tmp_path / "log") as log:
        schema = "id bigint, country string, amount bigint"
        log.create_topic("db.public.orders", schema, key="id", kind="changes")
        first = [(1, "de", 5), (2, None, 7), (3, "de", 7)]
        as_rows = [dict(zip(("id", "country", "amount"), row, strict=True)) for row in first]
        log.append("db.public.orders", as_rows)
        shop = pipeline(0)
        with Follower(log, shop.kept["main"]) as follower:
            assert follower.run("caught up") is None
            shop.run(log, until="caught up", spark=spark)
            follower.run("caught up")
            assert rows(shop, log, "amounts") == [(5,), (7,), (7,)]
            target_ = target.open("shop/main")
            tables = {one.name: one for one in kept_tables(log, shop.kept["main"])}
            _, batches = target_.read(tables["revenue"])
            found = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
            assert found == [(None, 7), ("de", 12)]
            target_.close()
            token = log.append("db.public.orders", [{**as_rows[0], "_weight": -1}]).position
            follower.run("caught up")
            assert len(rows(shop, log, "orders")) == 3  # the views have not seen it
            shop.run(log, until="caught up", spark=spark)
            cut = follower.run(token)
            assert cut is not None
            assert cut.through >= token
            assert len(rows(shop, log, "orders")) == len(rows(shop, log, "amounts")) == 2
            changed = pipeline(100)
            changed.run(log, until="caught up", spark=spark)
            follower.run("caught up")
            assert rows(shop, log, "revenue") == []
            assert len(rows(shop, log, "orders")) == 2


def test_what_is_kept_is_named_and_there() -> None:
    shop = hr.Pipeline("shop")
    shop.table("orders", of="db.public.orders")
    target = hr.SQLite("x")
    shop.keep("orders", in_=target)
    shop.keep("orders", in_=target, name="other")
    assert shop.kept["main"].topics == {"orders": "db.public.orders"}
    assert shop.kept["other"].follower == "shop/other"
    with pytest.raises(errors.BadPipeline, match="no input and no view"):
        shop.keep("order", in_=target)
    with pytest.raises(errors.BadPipeline, match="kept already"):
        shop.keep("orders", in_=target, name="main")
    with pytest.raises(errors.BadPipeline, match="nothing"):
        shop.keep(in_=target)
