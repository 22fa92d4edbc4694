"""Queries of all kinds over a small set of tables: each must be lifted and give Spark's answer."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas import functions as pandas_functions

SCHEMAS = {
    "orders": pa.schema(
        [
            ("id", pa.int64()),
            ("customer_id", pa.int64()),
            ("amount", pa.decimal128(12, 2)),
            ("qty", pa.int32()),
            ("status", pa.string()),
            ("at", pa.timestamp("us", "UTC")),
            ("tags", pa.list_(pa.string())),
            ("weight", pa.float64()),
        ]
    ),
    "customers": pa.schema(
        [
            ("customer_id", pa.int64()),
            ("country", pa.string()),
            ("name", pa.string()),
            ("address", pa.struct([("city", pa.string()), ("zip", pa.int32())])),
            ("prefs", pa.map_(pa.string(), pa.int32())),
        ]
    ),
    "returns": pa.schema([("order_id", pa.int64()), ("reason", pa.string()), ("day", pa.date32())]),
}


def tables(seed: int = 1, rows: int = 40) -> dict[str, pa.Table]:
    """Make random rows with nulls, duplicates, NaN and empty lists."""
    rng = random.Random(seed)

    def maybe(value: Any, share: float = 0.15) -> Any:
        return None if rng.random() < share else value

    def order(index: int) -> dict[str, Any]:
        start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        return {
            "id": index,
            "customer_id": maybe(rng.randrange(8)),
            "amount": maybe(Decimal(rng.randrange(-500, 5000)) / 100),
            "qty": maybe(rng.randrange(5)),
            "status": maybe(rng.choice(["paid", "open", "lost"])),
            "at": maybe(start + datetime.timedelta(minutes=rng.randrange(3000))),
            "tags": maybe([rng.choice("abc") for _ in range(rng.randrange(3))]),
            "weight": maybe(rng.choice([0.5, 1.25, -0.0, 0.0, float("nan"), 1e10])),
        }

    def customer(index: int) -> dict[str, Any]:
        return {
            "customer_id": maybe(index % 10, 0.1),
            "country": maybe(rng.choice(["de", "fr", "it"])),
            "name": maybe(f"n{rng.randrange(6)}"),
            "address": maybe({"city": maybe("x"), "zip": rng.randrange(3)}),
            "prefs": maybe([("a", rng.randrange(3)), ("b", None)][: rng.randrange(3)]),
        }

    def back(index: int) -> dict[str, Any]:
        return {
            "order_id": maybe(rng.randrange(rows)),
            "reason": maybe(rng.choice(["late", "broken"])),
            "day": maybe(datetime.date(2026, 1, 1 + rng.randrange(5))),
        }

    made = {
        "orders": [order(index) for index in range(rows)],
        "customers": [customer(index) for index in range(12)],
        "returns": [back(index) for index in range(rows // 2)],
    }
    made["orders"] += made["orders"][:2]
    return {name: pa.Table.from_pylist(made[name], SCHEMAS[name]) for name in SCHEMAS}


SQL = """
-- projection
select id + 1 as x, upper(status) s, id, id from orders
-- selection
select status, id from orders
-- division_after_filter
select id / qty r, id % qty m from orders where qty <> 0 and id > 3
-- filters_twice
select x from (select id * 2 x, qty from orders where qty > 1) where x > 10
-- nested_types
select address.city, struct(address, name) s, map_keys(prefs) k from customers
-- lambdas
select transform(tags, x -> concat(x, '!')) t, filter(tags, x -> x > 'a') f from orders
-- lambdas_and_nulls
select transform(array(qty, null), x -> x + 1) t, filter(array(qty), x -> x is null) f,
aggregate(xs, 0, (a, x) -> a + coalesce(x, 0)) a, transform(xs, x -> x * 2) x, map_filter(prefs, (k,
v) -> v > 0) m, transform_values(prefs, (k, v) -> v) v from (select array(qty, null, cast(id as
int)) xs, qty, prefs from orders o left join customers c on o.customer_id = c.customer_id)
-- explode
select id, tag from orders lateral view explode(tags) t as tag where tag <> 'b'
-- explode_outer
select id, tag from orders lateral view outer explode(tags) t as tag
-- posexplode
select id, p, tag from orders lateral view outer posexplode(tags) t as p, tag
-- explode_map
select customer_id, k, v from customers lateral view explode(prefs) t as k, v
-- inline
select id, a, b from orders lateral view inline(array(struct(id as i, 'x'), struct(id + 1 as i,
'y'))) t as a, b
-- stack
select id, a, b from orders lateral view stack(2, id, status, id + 1, 'y') t as a, b
-- union_all
select id, status from orders union all select order_id, reason from returns where day is not
null
-- union
select status from orders union select reason from returns
-- distinct
select distinct status, qty from orders
-- intersect
select status from orders intersect select status from orders where qty > 2
-- intersect_all
select qty from orders intersect all select qty from orders where id > 20
-- except_
select customer_id from orders except select customer_id from customers
-- except_all
select customer_id from orders except all select customer_id from customers
-- left_join
select o.id, c.name from orders o left join customers c on o.customer_id = c.customer_id and
o.qty > c.address.zip
-- right_join
select o.id, c.name from orders o right join customers c on o.customer_id = c.customer_id and
o.qty > 1
-- full_join
select o.id, c.name from orders o full join customers c on o.customer_id = c.customer_id and
o.amount > 10
-- key_expressions
select o.id, r.reason from orders o join returns r on o.id + 1 = r.order_id and o.qty <
length(r.reason)
-- null_safe
select o.id, c.name from orders o join customers c on o.customer_id <=> c.customer_id and o.qty
= c.address.zip
-- cross_join
select o.id, c.name from orders o, customers c where o.qty > c.customer_id
-- self_join
select a.id, b.id from orders a join orders b on a.customer_id = b.customer_id and a.id < b.id
-- semi
select id from orders o where exists (select 1 from returns r where r.order_id = o.id and
r.reason <> o.status)
-- anti
select id from orders o where not exists (select 1 from returns r where r.order_id = o.id and
r.day > date'2026-01-02')
-- in_
select id from orders where customer_id in (select customer_id from customers where country =
'de')
-- not_in
select id from orders where customer_id not in (select customer_id from customers where country
= 'de')
-- not_in_without_nulls
select id from orders where qty not in (select address.zip from customers where address.zip > 1)
-- existence
select id, customer_id in (select customer_id from customers) or qty = 1 x from orders where qty
= 3 or exists (select 1 from returns where order_id = id)
-- scalar_subquery
select id, amount - (select avg(amount) from orders) d from orders where amount > (select
min(amount) + 1 from orders)
-- scalar_subquery_no_row
select id, (select name from customers where customer_id = 99) n from orders
-- correlated_scalar
select id, (select count(*) from returns r where r.order_id = o.id) n, (select max(day) from
returns r where r.order_id = o.id) d from orders o
-- subquery_in_argument
select status, sum(amount - (select min(amount) from orders)) s from orders group by status
-- subquery_in_join
select o.id, c.name from orders o left join customers c on o.customer_id = c.customer_id and
o.amount > (select avg(amount) from orders)
-- uncorrelated_exists
select id from orders where exists (select 1 from returns where reason = 'late')
-- uncorrelated_not_exists
select id from orders where not exists (select 1 from returns where reason = 'never')
-- global_aggregate
select count(*), sum(amount), max(at), min(status), avg(qty) from orders
-- global_aggregate_of_nothing
select count(*), sum(amount), max(at), count(distinct qty) from orders where id < 0
-- averages
select status, avg(amount) a, avg(qty) b, avg(weight) c, sum(qty) / count(qty) + 1 d from orders
group by status
-- filter_clause
select status, sum(amount) filter (where qty > 1) s, count(*) filter (where qty > 1) c from
orders group by status
-- having
select customer_id, count(*) c from orders group by customer_id having sum(amount) > 10 and
count(*) > 2
-- count_distinct
select status, count(distinct qty) a, count(distinct qty, customer_id) b, sum(distinct qty) c,
avg(distinct qty) d from orders group by status
-- arguments_that_differ_in_a_mode
select customer_id, count_if(concat(status, '/a') like '%/_') a, count_if(concat(status, '/a') like
'%/_' escape '/') b, max(from_csv(concat(status, ';p'), 'a string').a) c,
max(from_csv(concat(status, ';p'), 'a string', map('sep', ';')).a) d from orders group by 1
-- counts
select count(qty), count(qty, customer_id), count_if(qty > 1), bool_and(qty > 1), every(id > 0)
from orders
-- group_by_expression
select date_trunc('hour', at) h, qty % 2 q, count(*) from orders group by 1, 2
-- group_by_nothing_else
select status, qty from orders group by status, qty
-- float_keys
select weight, count(*) from orders group by weight
-- min_max
select customer_id, min(status), max(weight), min(amount), max(at), max(qty) from orders group
by customer_id
-- rollup
select status, qty, sum(amount), grouping(status) g from orders group by rollup(status, qty)
-- cube
select status, qty, count(*) from orders group by cube(status, qty)
-- hopping
select window(at, '1 hour', '30 minutes') w, count(*) from orders group by 1
-- tumbling
select window(at, '1 hour').start w, sum(amount) from orders group by window(at, '1 hour')
-- unpivot
select * from (select id, qty, customer_id from orders) unpivot (v for n in (qty, customer_id))
-- stddev
select status, stddev(amount) s, sum(qty) t, percentile(qty, 0.5) p from orders group by status
-- sorted_list
select customer_id, sort_array(collect_list(qty)) l, sort_array(collect_set(status)) s from
orders group by customer_id
-- modes
select status, mode(qty, true) a, mode() within group (order by qty desc) b from orders group by 1
-- collation_by_bytes
select status collate utf8_binary s, count(*) from orders group by 1
-- global_regroup
select var_pop(qty) from orders where id < 0
-- cte
with big as (select * from orders where amount > 10) select a.id from big a join big b on a.qty
= b.qty
-- values
select o.id, v.n from orders o join (values (1, 'one'), (2, 'two')) v(q, n) on o.qty = v.q
-- group_by_twice
select status a, status b, qty from orders group by status, status, qty
-- not_in_several_columns
select id from orders where (customer_id, qty) not in (
select customer_id, address.zip from customers)
-- not_in_with_null
select id from orders where qty not in (select cast(null as int))
-- not_in_nothing
select id from orders where qty not in (select address.zip from customers where false)
-- in_several_columns
select id from orders where (customer_id, qty) in (select customer_id, address.zip from customers)
-- exists_in_exists
select id from orders o where exists (select 1 from customers c where c.customer_id = o.customer_id
and exists (select 1 from returns r where r.order_id = c.customer_id))
-- pipes
from orders |> where qty > 1 |> aggregate sum(amount) as s group by status
-- lateral
select o.id, l.m from orders o,
lateral (select max(r.day) m from returns r where r.order_id = o.id) l
-- join_of_aggregates
select coalesce(a.k, b.k) k, a.c, b.s
from (select customer_id k, count(*) c from orders group by 1) a
full join (select customer_id k, sum(address.zip) s from customers group by 1) b on a.k = b.k
-- having_exists
select country from customers group by country having exists (select 1 from orders where qty = 1)
-- max_of_structs
select status, max(struct(qty, id)).id from orders group by status
-- nested_keys
select address, count(*) from customers group by address
-- nan_keys
select a.id, b.id from orders a join orders b on a.weight = b.weight where a.id < 5
-- one_row
select 1 as a, 'x' as b
-- sort_dropped
select id from orders order by id desc
-- pivot
select * from (select status, customer_id, amount from orders) pivot (sum(amount) for status in
('paid', 'open'))
-- nested_subqueries
select name from customers where customer_id in (select customer_id from orders where id in
(select order_id from returns where reason = 'late') and amount > (select 0.5 * avg(amount) from
orders))
"""

pandas_udf: Any = pandas_functions.pandas_udf  # its types are too many for mypy
Definition = Callable[..., Any] | str
QUERIES: dict[str, Definition] = {
    name.strip(): text.strip()
    for part in SQL.split("\n-- ")[1:]
    for name, _, text in [part.partition("\n")]
}


def query(function: Callable[..., Any]) -> Callable[..., Any]:
    QUERIES[function.__name__] = function
    return function


@query
def revenue(orders: DataFrame, customers: DataFrame) -> DataFrame:
    return (
        orders.where(F.col("status") == "paid")
        .join(customers, "customer_id")
        .groupBy("country")
        .agg(F.sum("amount").alias("revenue"), F.count("*").alias("orders"))
    )


@query
def python_functions(orders: DataFrame) -> DataFrame:
    shout = F.udf(lambda text: None if text is None else text.upper() + "!", "string")

    @pandas_udf("double")  # type: ignore[untyped-decorator]
    def double(values: pd.Series) -> pd.Series:
        return values * 2.0

    chosen = orders.select("id", shout("status").alias("s"), double("weight").alias("w"))
    return chosen.where("s is not null").groupBy("s").agg(F.count("w"), F.max("id"))


@query
def python_function_over_a_union(orders: DataFrame) -> DataFrame:
    both = orders.select("id", "status").union(orders.select("id", "status")).where("id > 3")
    shout = F.udf(lambda text: f"{text}!", "string")
    return both.withColumn("status", shout("status")).where(shout("status") != "x")


@query
def python_function_in_a_join(orders: DataFrame, customers: DataFrame) -> DataFrame:
    third = F.udf(lambda x: None if x is None else x % 3, "bigint")
    same = third(orders.customer_id) == customers.customer_id
    return orders.join(customers, same, "left").select("id", "name")


@query
def pandas_aggregate(orders: DataFrame) -> DataFrame:
    @pandas_udf("double")  # type: ignore[untyped-decorator]
    def spread(values: pd.Series) -> float:
        return float(values.max() - values.min())

    return orders.groupBy("status").agg(spread(F.col("id")).alias("spread"))


@query
def frames(orders: DataFrame, customers: DataFrame, returns: DataFrame) -> DataFrame:
    both = orders.select("id", "status").unionByName(
        returns.select(F.col("reason").alias("status"), F.col("order_id").alias("id"))
    )
    named = both.fillna("none", ["status"]).replace("late", "LATE", ["status"])
    other = named.dropDuplicates().withColumn("n", F.length("status"))
    same = other.id == customers.customer_id
    return other.join(F.broadcast(customers), same, "left_anti").drop("n")
