"""Large batches: the same pure steps, on Spark's executors, each with a range of the keys.

A step looks at the rows of a key and at nothing else, so it can be cut by key: every part gets the
changes whose key hashes lie in its range, and reads the state it needs from the packs, which any
process can map. What the parts give is laid end to end; the driver adds it to the collections, as
it does for a step of its own. State has no buckets, so each batch may have its own number of parts.

Cut are joins with equality keys and without a residual condition, aggregates with keys, distinct,
and unique keys. What needs Spark inside the step (residuals, regroup) and what has one key only
stays in the driver. A step goes to the executors from `rows` changed rows on. On one machine that
does not pay at any size measured (two cores; a join of 100,000, 400,000, 1,600,000 rows: 0.26, 0.39
and 0.56 of the speed in the driver), since rows are carried to the workers and back
(`./run bench views --only switch`). So by default only a session on a cluster does it.

A task that is repeated, or runs twice, gives the same again and writes nothing: nobody but the
driver writes packs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace.errors import HeadraceError
from headrace.pipelines.views import aggregate, groups, join
from headrace.pipelines.views.algebra import Aggregate, Distinct, Join, Node, Scan
from headrace.pipelines.views.changes import Failed, Step, joined, key_hashes, row_columns
from headrace.tables.collection import Collection
from headrace.tables.packs import Packs

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

ROWS = 1_000_000
"""On a cluster, steps with so many changed rows go to the executors."""
NEVER = 1 << 62

RUN: dict[type[Node], Any] = {
    Join: join.step,
    Aggregate: aggregate.step,
    Distinct: groups.distinct_step,
    groups.Unique: groups.unique_step,
}


class Executors:
    """Runs steps in parts."""

    def __init__(
        self, spark: SparkSession, *, rows: int | None = None, parts: int | None = None
    ) -> None:
        """`parts`: as many as there are cores, unless it is given."""
        self._context = spark.sparkContext
        local = re.match(r"local(\[|$)", spark.sparkContext.master or "")
        self._rows = rows if rows is not None else NEVER if local else ROWS
        self._given = parts
        self.used = self._rows < NEVER
        """Whether any step may go there."""
        self.steps = 0
        """How many steps were run here."""

    @property
    def _parts(self) -> int:
        return self._given or _cores(self._context)

    def takes(self, node: Node, inputs: Sequence[pa.RecordBatch]) -> bool:
        """Whether a step is large enough, and can be cut."""
        return (
            sum(batch.num_rows for batch in inputs) >= self._rows
            and self._parts > 1
            and split_keys(node) is not None
        )

    def step(
        self,
        node: Node,
        kept: Mapping[str, Collection],
        inputs: Sequence[pa.RecordBatch],
        seed: int,
    ) -> Step:
        """The same as the step in the driver."""
        self.steps += 1
        keys, count = split_keys(node), self._parts
        assert keys is not None
        cut = [_cut(batch, of, count, seed) for batch, of in zip(inputs, keys, strict=True)]
        state = {name: (one.schema, one._levels) for name, one in kept.items()}
        folder = next(iter(kept.values())).packs.folder
        bare = _bare(node)
        tasks = [
            (bare, state, folder, seed, [_ipc(parts[number]) for parts in cut])
            for number in range(count)
        ]
        done = self._run(tasks, node.origin)
        outputs: list[pa.RecordBatch] = []
        added: dict[str, list[pa.RecordBatch]] = {}
        failed: list[Failed] = []
        for answer in done:
            if isinstance(answer, HeadraceError):
                raise answer
            output, more, left_out = answer
            outputs.append(_batch(output))
            for name, data in more.items():
                added.setdefault(name, []).append(_batch(data))
            failed += [Failed(names, _batch(rows), reason) for names, rows, reason in left_out]
        merged = {name: pa.concat_batches(parts) for name, parts in added.items()}
        return Step(joined(outputs, node.columns), merged, failed)

    def _run(self, tasks: list[tuple[Any, ...]], place: str) -> list[Any]:
        """The answers of the tasks, in their order; asked again where a worker was lost."""
        from py4j.protocol import Py4JError

        from headrace.pipelines.views.evaluate_rows import TRIES, spark_failed

        for left in reversed(range(TRIES)):
            try:
                return self._context.parallelize(tasks, len(tasks)).map(run_part).collect()
            except Py4JError as error:
                if not left:
                    raise spark_failed(error, place) from error
        raise AssertionError


def split_keys(node: Node) -> list[Sequence[int]] | None:
    """For each input the columns by which a step can be cut; None if it cannot be."""
    if isinstance(node, Join) and node.left_keys and node.residual is None:
        return [node.left_keys, node.right_keys]
    if isinstance(node, Aggregate | groups.Unique) and node.keys:
        return [node.keys]
    if isinstance(node, Distinct):
        return [range(len(node.columns))]
    return None


def _cores(context: SparkContext) -> int:
    """The cores of a local master, or of the executors that are there now."""
    inside = re.match(r"local\[(\d+)", context.master or "")
    if inside:
        return int(inside[1])
    java: Any = context._jsc
    executors = int(java.sc().getExecutorMemoryStatus().size()) - 1  # less the driver
    each = int(context.getConf().get("spark.executor.cores", "1") or 1)
    return max(executors * each, int(context.defaultParallelism))


def _bare(node: Node) -> Node:
    """The operator without what is below it: templates hold on to the JVM and cannot travel."""
    stubs = [
        Scan(name="", columns=one.columns, names=one.names, fingerprint="", origin="")
        for one in node.inputs
    ]
    if isinstance(node, Join):
        return replace(node, left=stubs[0], right=stubs[1])
    assert isinstance(node, Aggregate | Distinct | groups.Unique)
    return replace(node, over=stubs[0])


def _cut(batch: pa.RecordBatch, keys: Sequence[int], parts: int, seed: int) -> list[pa.RecordBatch]:
    """The rows of each range of key hashes."""
    columns = row_columns(batch)
    hashes = key_hashes([columns[i] for i in keys], batch.num_rows, seed)
    of_row = (hashes >> np.uint64(32)) * np.uint64(parts) >> np.uint64(32)
    return [batch.filter(pa.array(of_row == part)) for part in range(parts)]


def _ipc(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _batch(data: bytes) -> pa.RecordBatch:
    with pa.ipc.open_stream(data) as stream:
        return stream.read_next_batch()


@lru_cache(maxsize=8)
def _packs(folder: str) -> Packs:
    """One for each process: what it has mapped stays mapped."""
    return Packs(folder)


def run_part(task: tuple[Any, ...]) -> Any:
    """In a worker: one part of a step, or the error it ends with."""
    node, state, folder, seed, inputs = task
    packs = _packs(folder)
    kept = {name: Collection(packs, schema, levels) for name, (schema, levels) in state.items()}
    try:
        done = RUN[type(node)](node, kept, [_batch(data) for data in inputs], seed)
    except HeadraceError as error:
        return error
    left_out = [(names, _ipc(rows), reason) for names, rows, reason in done.failed]
    return _ipc(done.output), {name: _ipc(one) for name, one in done.state.items()}, left_out
