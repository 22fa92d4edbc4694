"""What cannot be kept is refused by name, with the reason and the way out."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace import errors
from headrace.pipelines.views import algebra
from headrace.pipelines.views.lift_definition import Refresh, read_definition
from tests.pipelines.queries import SCHEMAS

NOT_KEPT = {
    "a window function": "select row_number() over (partition by qty order by id) from orders",
    "limit without orderBy": "select * from orders limit 3",
    "orderBy with limit": "select id from orders order by id limit 3",
    "a session window": "select session_window(at, '5 minutes'), 1 from orders group by 1",
    "first (also": "select any_value(id) from orders",
    "last (also": "select last(id) from orders",
    "collect_list": "select status, collect_list(id) from orders group by status",
    "collect_set": "select stddev(id), collect_set(id) from orders",
    "max_by": "select max_by(id, qty) from orders",
    "mode": "select mode(qty) from orders",
    "listagg": "select listagg(status) from orders",
    "a KLL sketch": "select kll_sketch_agg_bigint(id) from orders",
    "approx_top_k_accumulate": "select approx_top_k_accumulate(id) from orders",
    "sample": "select * from orders tablesample (10 percent)",
    "grouping by a map": "select prefs, count(*) from customers group by prefs",
    "grouping by a map, or": "select count(distinct struct(prefs, 1)) from customers",
    "a recursive query": """with recursive n(i) as (
        select 1 union all select i + 1 from n where i < 3) select * from n""",
}
CHANCE = {
    "rand()": "select rand() from orders",
    "uuid()": "select uuid() from orders",
    "now()": "select now() from orders",
    "current_timestamp()": "select id from orders where at > (select current_timestamp())",
    "current_date()": "select current_date() from orders",
    "current_user()": "select current_user() from orders",
    "monotonically_increasing_id()": "select monotonically_increasing_id() from orders",
}


@pytest.mark.parametrize("construct", NOT_KEPT)
def test_what_is_not_kept_is_refused_by_name(spark: Any, construct: str) -> None:
    with pytest.raises(errors.NotKept) as caught:
        read_definition(spark, NOT_KEPT[construct], SCHEMAS, name="v")
    assert caught.value.fact.startswith(construct)
    assert "refresh='full'" in caught.value.fix
    assert caught.value.place == "view v"


@pytest.mark.parametrize("construct", CHANCE)
def test_chance_and_the_clock_are_refused_even_with_a_full_refresh(
    spark: Any, construct: str
) -> None:
    for refresh in get_args(Refresh):
        with pytest.raises(errors.NondeterministicView) as caught:
            read_definition(spark, CHANCE[construct], SCHEMAS, refresh=refresh)
        assert construct in caught.value.fact


def test_a_table_function_is_told_how_to_say_that_it_can_be_kept(spark: Any) -> None:
    class Twice:
        def eval(self, n: int) -> Any:
            yield n, n

    made: Any = F.udtf(Twice, returnType="a bigint, b bigint")
    with pytest.raises(errors.NondeterministicView) as caught:
        read_definition(
            spark, lambda orders: orders.lateralJoin(made(F.col("id").outer())), SCHEMAS
        )
    assert "asDeterministic" in caught.value.fix
    sure = made.asDeterministic()
    read_definition(spark, lambda orders: orders.lateralJoin(sure(F.col("id").outer())), SCHEMAS)


def subset(orders: DataFrame) -> DataFrame:
    return orders.dropDuplicates(["id"])


def map_batches(orders: DataFrame) -> DataFrame:
    return orders.mapInPandas(lambda batches: batches, orders.schema)


def apply_groups(orders: DataFrame) -> DataFrame:
    return orders.groupBy("qty").applyInPandas(lambda group: group, orders.schema)


def own_rows(orders: DataFrame) -> DataFrame:
    own = orders.sparkSession.createDataFrame([(1,)], "a int")
    return own.join(orders, own.a == orders.id)


def of_an_rdd(orders: DataFrame) -> DataFrame:
    return orders.sparkSession.createDataFrame(orders.rdd, orders.schema)


@pytest.mark.parametrize(
    ("definition", "construct"),
    [
        (subset, "dropDuplicates with a subset"),
        (map_batches, "mapInPandas"),
        (apply_groups, "applyInPandas"),
        (own_rows, "a frame made inside"),
        (of_an_rdd, "a frame made inside"),
    ],
)
def test_what_a_function_does_is_refused_with_its_line(
    spark: Any, definition: Any, construct: str
) -> None:
    with pytest.raises(errors.NotKept) as caught:
        read_definition(spark, definition, SCHEMAS, name="v")
    assert caught.value.fact.startswith(construct)
    line = definition.__code__.co_firstlineno
    assert caught.value.place == f"view v, {__file__}:{line}"


def test_types_that_cannot_travel_are_refused(spark: Any) -> None:
    for text in (
        "select make_interval(1, 2, 3) i from orders",
        "select collate(status, 'UTF8_LCASE') s, count(*) from orders group by 1",
        "select parse_json('[1]') v from orders",
        "select map() m from orders",
    ):
        for _ in range(2):  # whoever tries again hears it again
            with pytest.raises(errors.NotKept, match="a column of the type"):
                read_definition(spark, text, SCHEMAS)


def counts(orders: DataFrame) -> DataFrame:
    return orders if orders.count() else orders.limit(1)


def pivots(orders: DataFrame) -> DataFrame:
    return orders.groupBy("status").pivot("qty").sum("id")


@pytest.mark.parametrize("definition", [counts, pivots])
def test_an_action_inside_a_definition_is_refused(spark: Any, definition: Any) -> None:
    with pytest.raises(errors.ActionInDefinition):
        read_definition(spark, definition, SCHEMAS)
    node = read_definition(spark, definition, SCHEMAS, refresh="full")
    assert isinstance(node, algebra.Full)


@pytest.mark.parametrize(
    "text",
    [
        "create temporary view made as select 1",
        "set spark.sql.shuffle.partitions = 3",
        "with a as (select 1) insert into orders select * from a",
    ],
)
@pytest.mark.parametrize("refresh", ["changes", "full"])
def test_a_command_is_no_definition_and_is_not_carried_out(
    spark: Any, text: str, refresh: Any
) -> None:
    with pytest.raises(errors.ActionInDefinition, match="a command"):
        read_definition(spark, text, SCHEMAS, refresh=refresh)
    assert not spark.catalog.tableExists("made")
    assert spark.conf.get("spark.sql.shuffle.partitions") != "3"


def misspelt(orders: DataFrame) -> DataFrame:
    chosen = orders.select("id")
    return chosen.where("idd > 3")


def test_what_spark_says_against_a_definition_comes_with_the_line_that_did_it(spark: Any) -> None:
    with pytest.raises(errors.BadDefinition, match="UNRESOLVED_COLUMN") as caught:
        read_definition(spark, misspelt, SCHEMAS, name="v")
    assert caught.value.place == f"view v, {__file__}:{misspelt.__code__.co_firstlineno + 2}"
    with pytest.raises(errors.BadDefinition, match="PARSE_SYNTAX_ERROR"):
        read_definition(spark, "selec id from orders", SCHEMAS)
    with pytest.raises(errors.BadDefinition, match="CAST_INVALID_INPUT"):
        read_definition(spark, "select to_timestamp('x') from orders", SCHEMAS)


def test_a_definition_that_returns_no_frame_is_refused(spark: Any) -> None:
    forgetful: Any = lambda orders: None  # noqa: E731
    with pytest.raises(errors.BadDefinition, match="gave nothing, not a DataFrame"):
        read_definition(spark, forgetful, SCHEMAS)
    hasty: Any = lambda orders: orders.toPandas()  # noqa: E731
    with pytest.raises(errors.BadDefinition, match="a DataFrame of pandas, not a DataFrame of Spa"):
        read_definition(spark, hasty, SCHEMAS)


def test_frequent_items_depend_on_the_order_of_rows(spark: Any) -> None:
    common: Any = lambda orders: orders.freqItems(["status"])  # noqa: E731
    with pytest.raises(errors.NotKept, match="freqItems"):
        read_definition(spark, common, SCHEMAS)


def test_a_parameter_that_is_no_input_is_refused_with_the_nearest_name(spark: Any) -> None:
    with pytest.raises(errors.UnknownInput) as caught:
        read_definition(spark, lambda order: order, SCHEMAS)
    assert "did you mean 'orders'?" in caught.value.fix


def test_a_parameter_with_a_default_need_not_be_an_input(spark: Any) -> None:
    def above(orders: DataFrame, least: int = 3) -> DataFrame:
        return orders.where(orders.qty > least)

    assert read_definition(spark, above, SCHEMAS).inputs[0].names[0] == "id"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("sort_array(collect_list(id))", True),
        ("array_sort(collect_set(id))", True),
        ("array_sort(collect_list(id), (x, y) -> int(abs(x) - abs(y)))", False),
        ("listagg(status, ',') within group (order by status desc)", True),
        ("listagg(status, ',') within group (order by id)", False),
    ],
)
def test_a_list_is_kept_when_no_order_of_the_rows_can_change_it(
    spark: Any, text: str, kept: bool
) -> None:
    sql = f"select qty, {text} l from orders group by qty"
    if kept:
        kinds = [type(node).__name__ for node in read_definition(spark, sql, SCHEMAS).walk()]
        assert "Regroup" in kinds
    else:
        with pytest.raises(errors.NotKept):
            read_definition(spark, sql, SCHEMAS)
