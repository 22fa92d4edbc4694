"""Steps on Spark's executors give what steps in the driver give: the same output, the same state.

Can catch: a part that misses rows or state, a key cut in two, an operator that cannot travel, an
error that does not come back, a task that leaves something behind when it runs twice or is killed.
Cannot catch: a cluster whose workers do not see the packs, and Spark's own choice of which answer
counts (it is one process here, so there is no real speculation).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from headrace import errors
from headrace.pipelines.views import executors as module
from headrace.pipelines.views.algebra import Aggregate, Call, Distinct, Join, Node
from headrace.pipelines.views.engine import Engine
from headrace.pipelines.views.executors import Executors, run_part
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
    executors = Executors(spark, rows=1, parts=3)
    both_ways(tmp_path, name, executors)
    assert executors.steps


def both_ways(tmp_path: Path, name: str, executors: Executors) -> None:
    """Compare outputs and states over a history, batch by batch."""
    node = nodes()[name]
    inputs = {"a": "a", "b": "b"}
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


class Speculating:
    """Spark's context, and every task runs twice at the same time, one of the two slowly."""

    def __init__(self, context: Any, chance: random.Random) -> None:
        self.context = context
        self.chance = chance
        self.tasks = 0

    def parallelize(self, tasks: list[Any], parts: int) -> Speculating:
        self.given, self.parts = tasks, parts
        return self

    def map(self, run: Callable[[Any], Any]) -> Speculating:
        self.run = run
        return self

    def collect(self) -> list[Any]:
        run = self.run

        def delayed(pair: tuple[Any, float]) -> Any:
            time.sleep(pair[1])
            return run(pair[0])

        twice = [(task, seconds) for task in self.given for seconds in (0.0, 0.05)]
        found = self.context.parallelize(twice, len(twice)).map(delayed).collect()
        pairs = list(zip(found[::2], found[1::2], strict=True))
        assert all(fast == slow for fast, slow in pairs)
        self.tasks += len(pairs)
        return [self.chance.choice(pair) for pair in pairs]


@pytest.mark.parametrize("name", ["full join", "aggregate"])
def test_a_slow_duplicate_of_a_task_changes_nothing(tmp_path: Path, spark: Any, name: str) -> None:
    executors = Executors(spark, rows=0, parts=2)
    twice = Speculating(spark.sparkContext, random.Random(name))
    executors._context = twice  # type: ignore[assignment]
    both_ways(tmp_path, name, executors)
    assert twice.tasks == 8


def killing(folder: Path, times: int) -> Callable[[Any], Any]:
    """Run a part; the first workers that try it die just after they have computed it."""

    def run(task: Any) -> Any:
        done = run_part(task)
        died = [folder / str(number) for number in range(times)]
        for path in died:
            if not path.exists():
                path.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return done

    return run


@pytest.mark.parametrize("name", ["full join", "aggregate"])
def test_a_task_whose_worker_is_killed_runs_again(
    tmp_path: Path, spark: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    monkeypatch.setattr(module, "run_part", killing(marks, 2))
    both_ways(tmp_path, name, Executors(spark, rows=0, parts=2))
    assert len(list(marks.iterdir())) == 2


def test_workers_that_are_killed_again_and_again_stop_the_step_with_a_name(
    tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    monkeypatch.setattr(module, "run_part", killing(marks, 100))
    engine = Engine(
        {"v": nodes()["distinct"]},
        {"a": "a"},
        Packs(str(tmp_path / "packs")),
        SEED,
        executors=Executors(spark, rows=0, parts=2),
    )
    attempt = engine.packs.attempt(0)
    with pytest.raises(errors.SparkFailed, match="worker"):
        engine.step({"a": as_change(A, Counter({(1, "x"): 1}))}, attempt)
    attempt.forget()
    assert not engine.kept
    assert not [path for path in (tmp_path / "packs").rglob("*") if path.is_file()]


def test_an_error_comes_back(tmp_path: Any, spark: Any) -> None:
    node = Unique(over=A, keys=(0,), view="v", columns=A.columns, **{**PLAIN, "names": ("k", "x")})
    engine = Engine(
        {"v": node}, {"a": "a"}, Packs(str(tmp_path)), SEED, executors=Executors(spark, rows=1)
    )
    rows = as_change(A, Counter({(1, "x"): 1, (1, "y"): 1}))
    with pytest.raises(errors.ViewStopped, match="not unique"):
        engine.step({"a": rows}, engine.packs.attempt(0))


ON_A_CLUSTER = """
import json, sys, tempfile
import headrace as hr
from headrace.pipelines.spark import session
from headrace.pipelines.views.run import Runner
settings = {
    "spark.executor.memory": "512m",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "200s",
    "spark.cores.max": "2",
}
spark = session(master="local-cluster[2,1,512]", settings=settings)
spark.sparkContext.parallelize([1]).count()  # waits for both executors
pipeline = hr.Pipeline("p")
pipeline.table("a")
pipeline.view("sums", sql="select k, sum(n) as s from a group by k")
with tempfile.TemporaryDirectory() as folder, hr.connect(folder + "/log") as log:
    log.create_topic("a", "k int, n bigint", kind="changes")
    log.append("a", [{"k": n % 3, "n": n} for n in range(30)])
    with Runner(pipeline, log, spark, executor_rows=10) as runner:
        runner.run("caught up")
        steps = runner.executors.steps
    rows = sorted(row["s"] for row in pipeline.rows("sums", log=log).to_pylist())
sys.stdout.write(json.dumps([steps, rows]))
"""


@pytest.mark.timeout(300)
def test_executors_of_another_process_take_steps() -> None:
    """A master with executors of their own: as many parts as they have cores."""
    done = subprocess.run(
        [sys.executable, "-c", ON_A_CLUSTER], capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr
    assert json.loads(done.stdout) == [1, [135, 145, 155]]


@pytest.mark.parametrize(
    ("master", "used"),
    [("local", False), ("local[4,2]", False), ("local-cluster[2,1,1024]", True), ("k8s://x", True)],
)
def test_only_a_cluster_uses_its_executors_by_itself(master: str, used: bool) -> None:
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(master=master))
    assert Executors(spark).used == used
