"""Steps on Spark's executors give what steps in the driver give: the same output, the same state.

Can catch: a part that misses rows or state, a key cut in two, an operator that cannot travel, an
error that does not come back. Cannot catch: a cluster whose workers do not see the packs.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from headrace import errors
from headrace.pipelines.views.algebra import Aggregate, Call, Distinct, Join, Node
from headrace.pipelines.views.engine import Engine
from headrace.pipelines.views.executors import Executors
from headrace.pipelines.views.groups import Unique
from headrace.tables.packs import Packs
from tests.pipelines.test_steps import PLAIN, SEED, Row, as_change, history, rows_of, scan, total

A, B = scan("a", pa.int64(), pa.string()), scan("b", pa.int64(), pa.string())


def schema(*types: pa.DataType) -> pa.Schema:
    return pa.schema([(f"c{i}", kind) for i, kind in enumerate(types)])


def nodes() -> dict[str, Node]:
    pair = schema(pa.int64(), pa.string(), pa.int64(), pa.string())
    keys: dict[str, Any] = {"left_keys": (0,), "right_keys": (0,), "null_safe": (False,)}
    calls = (
        Call("count", None, None, pa.int64()),
        Call("max", 0, None, pa.int64()),
        Call("count_distinct", 0, None, pa.int64()),
    )
    return {
        "full join": Join(
            kind="full", left=A, right=B, residual=None, columns=pair, **keys, **PLAIN
        ),
        "anti join": Join(
            kind="anti", left=A, right=B, residual=None, columns=A.columns, **keys, **PLAIN
        ),
        "aggregate": Aggregate(
            over=A,
            keys=(1,),
            calls=calls,
            columns=schema(pa.string(), pa.int64(), pa.int64(), pa.int64()),
            **PLAIN,
        ),
        "distinct": Distinct(over=A, columns=A.columns, **PLAIN),
    }


@pytest.mark.parametrize("name", nodes())
def test_both_ways_are_equal(tmp_path: Any, spark: Any, name: str) -> None:
    node = nodes()[name]
    inputs = {"a": "a", "b": "b"}
    executors = Executors(spark, rows=1, parts=3)
    engines = [
        Engine({"v": node}, inputs, Packs(str(tmp_path / way)), SEED, executors=how)
        for way, how in (("driver", None), ("executors", executors))
    ]
    chance = random.Random(name)

    def make() -> Row:
        return chance.choice([None, *range(6)]), chance.choice(["x", "y", "z", None])

    whole: dict[str, Counter[Row]] = {"a": Counter(), "b": Counter()}
    for number in range(4):
        changes = {key: history(chance, make, held, 12) for key, held in whole.items()}
        for key, bag in changes.items():
            whole[key].update(bag)
        given = {one.name: as_change(one, changes[one.name]) for one in (A, B)}
        outputs = []
        for engine in engines:
            attempt = engine.packs.attempt(number)
            batch = engine.step(given, attempt)
            attempt.finish()
            engine.keep(batch)
            outputs.append(+total(rows_of(batch.views["v"])))
        assert outputs[0] == outputs[1]
        states = [
            {
                kept: total(
                    (tuple(row.values()), weight)
                    for chunk in one.scan()
                    for row, weight in zip(
                        chunk.drop_columns("_w").to_pylist(),
                        chunk.column("_w").to_pylist(),
                        strict=True,
                    )
                )
                for kept, one in engine.kept[engine.identity(node)].items()
            }
            for engine in engines
        ]
        assert states[0] == states[1]
    assert executors.steps


def test_an_error_comes_back(tmp_path: Any, spark: Any) -> None:
    node = Unique(over=A, keys=(0,), view="v", columns=A.columns, **{**PLAIN, "names": ("k", "x")})
    engine = Engine(
        {"v": node}, {"a": "a"}, Packs(str(tmp_path)), SEED, executors=Executors(spark, rows=1)
    )
    rows = as_change(A, Counter({(1, "x"): 1, (1, "y"): 1}))
    with pytest.raises(errors.ViewStopped, match="not unique"):
        engine.step({"a": rows}, engine.packs.attempt(0))
