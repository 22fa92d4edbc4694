"""A plain PySpark query, kept right while rows come, change and go. Run it with `./run python`."""

import tempfile

from pyspark.sql import functions as F

import headrace as hr

log = hr.connect(tempfile.mkdtemp() + "/data")
log.create_topic("orders", "id bigint, customer bigint, amount bigint", key="id", kind="changes")
log.create_topic("customers", "customer bigint, country string", kind="changes")

shop = hr.Pipeline("shop")
shop.table("orders")
shop.table("customers")


@shop.view(key="country")
def revenue(orders, customers):
    by_country = orders.join(customers, "customer").groupBy("country")
    return by_country.agg(F.sum("amount").alias("revenue"), F.max("amount").alias("largest"))


shop.view("total", sql="SELECT sum(revenue) AS total FROM revenue")


def show(what):
    through = shop.run(log, until="caught up")
    rows = sorted(shop.rows("revenue").to_pylist(), key=lambda row: row["country"])
    print(f"{what}: through {through}", shop.rows("total")["total"].to_pylist())
    for row in rows:
        print("  ", row)


log.append("customers", [{"customer": 1, "country": "at"}, {"customer": 2, "country": "ch"}])
log.append("orders", [{"id": 1, "customer": 1, "amount": 40}])
log.append("orders", [{"id": 2, "customer": 2, "amount": 7}])
show("two orders")

# A change is the old row with weight -1 and the new one with +1, in one entry.
old, new = {"id": 1, "customer": 1, "amount": 40}, {"id": 1, "customer": 2, "amount": 50}
log.append("orders", [{**old, "_weight": -1}, {**new, "_weight": 1}])
show("order 1 moves to another customer and grows")

log.append("customers", [{"customer": 2, "country": "ch", "_weight": -1}])
show("a customer is gone")

log.close()
