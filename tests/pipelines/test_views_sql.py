"""Random queries, read and evaluated by Spark, kept by the real loop, compared at every commit.

Can catch: what `headrace.testing.views_sql` says. Cannot catch: queries that the grammar does not
have (tests/pipelines has TPC-H and many by hand). `./run faults views --only sql` tries more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from pyspark.sql import functions as F

from headrace import errors
from headrace.testing.views_bugs import BUGS, catch
from headrace.testing.views_case import random_case
from headrace.testing.views_query import Query, Rel, random_queries
from headrace.testing.views_sql import Trial, moved_zone, read

QUERIES, EACH, HISTORIES = 12, 3, 5


@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, QUERIES, EACH))
def test_random_queries_are_right_at_every_commit(spark: Any, first: int) -> None:
    trial = Trial(spark, seconds=60)
    for seed in range(first, first + EACH):
        trial.query(f"test{seed}", range(HISTORIES))
    assert trial.tally.wrong == []
    assert trial.tally.cases >= HISTORIES, trial.tally.refusals


def test_the_grammar_has_everything() -> None:
    """Of a few hundred queries, every construct that must be kept comes several times."""
    text = " ".join(rel.sql for seed in range(400) for rel in random_queries(Random(seed)).values())
    for word in (
        "case when", "explode(", "outer explode(", "union all", " union select", "intersect",
        "except", "select distinct", "inner join", "left join", "right join", "full join",
        "left semi join", "left anti join", " <=> ", " in (select", "not in (select", "exists (",
        "(select count(*) from", "(select max(", "sum(", "avg(", "min(", "count(distinct",
        "filter (where", "having", "rollup(", "cube(", "window(", "stddev(", "from v0",
    ):  # fmt: skip
        assert text.count(word) > 3, word


def test_there_are_functions_failing_rows_and_views_computed_anew() -> None:
    views = [rel for seed in range(400) for rel in random_queries(Random(seed)).values()]
    functions = sum(rel.frame is not None for rel in views)
    assert 0.15 < functions / len(views) < 0.6
    assert sum(bool(rel.without_failing) for rel in views) > 20
    assert sum(rel.full for rel in views) > 20
    special = " ".join(rel.sql for rel in views if rel.without_failing or rel.full)
    for word in ("12 div", "7 %", "element_at(", " as int)", "limit", "row_number()", "lag("):
        assert special.count(word) > 1, word


@pytest.mark.timeout(600)
def test_what_is_computed_anew_is_refused_otherwise(spark: Any) -> None:
    for seed in range(12):
        rel = Query(Random(seed)).whole(1)
        with pytest.raises(errors.NotKept):
            read(spark, {"v": replace(rel, full=False, frame=None)})


@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", ["failing", "whole", "grouped", "joined", "combined", "exploded"])
def test_each_kind_by_itself(spark: Any, make: str) -> None:
    """Rows that fail are left out; functions of frames give what the SQL gives."""
    for seed in range(3):
        rel: Rel = getattr(Query(Random(f"{make}/{seed}")), make)(1)
        views = {"v0": replace(rel, frame=None) if rel.full else rel}
        how = "set_aside" if rel.without_failing else "stop"
        case = random_case(Random(seed), f"{make} {seed}", read(spark, views), on_error=how)
        wrong = Trial(spark).attempt(case, views)
        assert wrong is None, f"{wrong}\n{rel.sql}"


@pytest.mark.timeout(600)
def test_a_session_in_another_time_zone_builds_the_view_anew(spark: Any) -> None:
    assert moved_zone(spark) == ""


@pytest.mark.timeout(600)
def test_a_fingerprint_without_the_time_zone_would_be_noticed(spark: Any) -> None:
    (bug,) = (bug for bug in BUGS if "zones" in bug.where)
    assert catch(bug, spark).caught_by


@pytest.mark.timeout(600)
def test_windows_and_other_nested_values_can_be_keys(spark: Any) -> None:
    texts = [
        "select window(at, '1 hour').start as c1, count(*) as c2 from t group by"
        " window(at, '1 hour')",
        "select tags as c1, sum(n) as c2 from t group by tags",
        "select a.id as c1, b.id as c2 from t a left join t b on a.tags = b.tags and a.k < b.k",
    ]
    _must_be_kept(spark, texts)


@pytest.mark.timeout(600)
def test_constants_where_columns_are_expected(spark: Any) -> None:
    texts = [
        "select k as c1, z.e as c2 from u lateral view explode(array('a', null, 'b')) z as e"
        " union all select k, g from s",
        "select var_pop(3L) as c1, bit_xor(1L) as c2, count(*) as c3 from t",
        "select max('a') as c1, sum(distinct 2) as c2 from u",
        "select count(*) as c1 from t where exists (select 1 from u where 1 = 1)",
    ]
    _must_be_kept(spark, texts)


@pytest.mark.timeout(600)
def test_subqueries_beside_the_functions_of_an_aggregate(spark: Any) -> None:
    texts = [
        "select upper(g) as c1, sum(n) + (select count(*) from u) as c2,"
        " max(n + (select max(k) from u)) as c3, exists (select 1 from s) as c4"
        " from t group by upper(g)",
        "select sum(n) + (select count(*) from u) as c1, (select max(k) from u) as c2 from t",
    ]
    _must_be_kept(spark, texts)


@pytest.mark.timeout(600)
def test_expressions_that_only_the_optimizer_can_evaluate(spark: Any) -> None:
    def changed(frames: Any) -> Any:
        pair = F.struct("k", "n").withField("z", F.col("id") + 1).dropFields("n")
        return frames["t"].select("id", pair.alias("c2"))

    sql = "select id, named_struct('k', k, 'z', id + 1) as c2 from t"
    _must_be_kept(spark, [Rel(sql, (), frame=changed)])


def _must_be_kept(spark: Any, texts: Sequence[str | Rel]) -> None:
    rels = [Rel(text, ()) if isinstance(text, str) else text for text in texts]
    views = {f"v{number}": rel for number, rel in enumerate(rels)}
    nodes = read(spark, views)
    for seed in range(3):
        case = random_case(Random(seed), f"by hand {seed}", nodes)
        assert Trial(spark).attempt(case, views) is None
