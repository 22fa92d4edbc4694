"""The loop: woken by the log, whole entries, all views of a pipeline in one entry.

::

    woken -> entries (after, through] -> changes per input -> algebra -> changes per view -> commit
                                                                                  |
              packs written and synced (new runs, manifest)  <--------------------+
              one log entry: rows of every view + Status (through, manifest) + require(epoch)

**Exactly once.** What a batch adds to the state is written under names that no other attempt has,
and synced, before the entry; it counts only because the entry names its manifest. So a crash at any
instant means: the last entry's manifest is the state, its `through` is the place to go on from. The
entry requires the epoch that this driver claimed when it started: a second driver claims another,
and whatever the first one still tries is refused whole (`Fenced`). There is no other memory of
progress.

**A new view** is *built*: its operators are fed the log from the start, in chunks, with nothing
published; the views that are there already go on between two chunks. Subtrees whose state the last
commit has are not fed again: what they give is known from their state. When the build has caught up
with the others it joins them in one entry, which holds all its rows (less what an older definition
of that name had given). A build that is interrupted starts again.

**Garbage** is a pack that neither of the two newest manifests names, of an older batch than they.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace import errors
from headrace.log.embedded.reader import Reading
from headrace.pipelines.pipeline import Input, Pipeline
from headrace.pipelines.views.aside import Evaluator
from headrace.pipelines.views.changes import (
    change,
    consolidated,
    joined,
    kept_columns,
    keyed,
    nothing,
)
from headrace.pipelines.views.define import Defined, define_views
from headrace.pipelines.views.engine import Batch, Engine
from headrace.pipelines.views.executors import Executors
from headrace.pipelines.views.reading import (
    aside_topic,
    own_columns,
    rows_of,
    status_of,
    topic_of,
    writer_name,
)
from headrace.tables.collection import Collection
from headrace.tables.packs import Attempt, Packs, Ref
from headrace.tables.runs import state_schema, weights

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.log.embedded.log import EmbeddedLog

BATCH_ROWS = 100_000
"""A batch ends at the first whole entry after so many rows."""
BUILD_ROWS = 500_000
"""So does a chunk of a build, of which there are many, one after the other."""
SWEEP_EVERY = 64
"""Garbage is looked for every so many commits."""


@dataclass(frozen=True)
class Progress:
    """How far a first build is."""

    views: tuple[str, ...]
    rows: int
    of: int
    seconds: float

    @property
    def rate(self) -> float:
        """Rows a second."""
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float:
        """At this rate."""
        return (self.of - self.rows) / self.rate if self.rate else 0.0


Report = Callable[[Progress], None]
Changes = dict[str, pa.RecordBatch]


class Source:
    """The changes of the inputs after a position, in whole entries.

    With `through` it ends there, exactly; without, it goes on as the log does.
    """

    def __init__(
        self,
        log: EmbeddedLog,
        inputs: Mapping[str, Input],
        after: int,
        rows: int,
        through: int | None = None,
    ) -> None:
        """Nothing is read yet."""
        self._rows = rows
        self._goal = through
        self._of_topic: dict[str, list[str]] = {}
        for one in inputs.values():
            self._of_topic.setdefault(one.topic, []).append(one.name)
        self._schemas = {name: input_schema(log, one) for name, one in inputs.items()}
        self._log = log
        self.taken = Counter(dict.fromkeys(self._of_topic, 0))
        """Topic -> rows taken so far."""
        self._reading: Reading = log.read(
            list(self._of_topic), after=after, through=through, follow=through is None
        )
        self.through = after

    def take(self) -> tuple[dict[str, pa.RecordBatch], int]:
        """The changes of the next entries, and how many rows; none if there is nothing new."""
        visible = self._log.position
        found: dict[str, list[pa.RecordBatch]] = {}
        rows = 0
        while True:
            batch = self._reading.poll() if self._goal is None else next(self._reading, None)
            if batch is None:
                self.through = max(self.through, visible) if self._goal is None else self._goal
                break
            for name in self._of_topic[batch.topic]:
                found.setdefault(name, []).append(as_change(batch.data, self._schemas[name]))
            rows += len(batch)
            self.taken[batch.topic] += len(batch)
            if batch.last:  # it may have come after `visible` was asked for
                self.through = max(self.through, batch.position)
                if rows >= self._rows:
                    break
        return {name: joined(parts, self._schemas[name]) for name, parts in found.items()}, rows

    def entries(self) -> Iterator[tuple[int, dict[str, pa.RecordBatch]]]:
        """The changes of each entry by itself, with its position (only with `through`)."""
        waiting: dict[int, dict[str, list[pa.RecordBatch]]] = {}
        for batch in self._reading:
            positions = batch.positions.to_numpy()
            for position in np.unique(positions).tolist():
                rows = batch.data.filter(pa.array(positions == position))
                found = waiting.setdefault(position, {})
                for name in self._of_topic[batch.topic]:
                    found.setdefault(name, []).append(as_change(rows, self._schemas[name]))
            if not batch.last:
                continue
            for position in sorted(waiting):
                parts = waiting[position]
                yield position, {name: joined(p, self._schemas[name]) for name, p in parts.items()}
            waiting = {}

    def close(self) -> None:
        """End the reading."""
        self._reading.close()


def input_schema(log: EmbeddedLog, one: Input) -> pa.Schema:
    """The columns of an input, under the user's names."""
    topic = log.topic(one.topic)
    wanted = {"table": "changes", "stream": "events"}[one.kind]
    if topic.kind != wanted or topic.value != "columns":
        right = {"changes": "table", "events": "stream"}[topic.kind]
        raise errors.BadPipeline(
            f"'{one.name}' is a {one.kind}, and topic '{topic.name}' holds {topic.kind}"
            + ("" if topic.value == "columns" else f" of {topic.value}"),
            place=one.name,
            fix=f"declare it with .{right}(...)" if topic.value == "columns" else "",
        )
    schema = topic.schema.arrow
    return pa.schema([schema.field(i).with_nullable(True) for i in own_columns(schema)])


def as_change(data: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Rows of a topic as a change."""
    columns = [data.column(name) for name in schema.names]
    at = data.schema.get_field_index("_weight")
    weight = data.column(at).to_numpy() if at >= 0 else np.ones(data.num_rows, np.int64)
    named = pa.schema([field.with_name(f"c{i}") for i, field in enumerate(schema)])
    return change(columns, weight, named)


class Runner:
    """One driver of a pipeline."""

    def __init__(
        self,
        pipeline: Pipeline,
        log: EmbeddedLog,
        spark: SparkSession | None = None,
        *,
        batch_rows: int | None = None,
        executor_rows: int | None = None,
        report: Report | None = None,
    ) -> None:
        """Read the definitions, claim the pipeline, take the state of its last commit."""
        self.pipeline = pipeline
        self.log = log
        self._batch_rows = batch_rows or BATCH_ROWS
        self._build_rows = batch_rows or BUILD_ROWS
        self._report = report
        self.defined = define_views(pipeline, log, spark)
        self.executors: Executors | None = None
        if self.defined.spark is not None:
            self.executors = Executors(self.defined.spark, rows=executor_rows)
        self.packs = Packs(f"{log.path}/pipelines/{pipeline.name}", log.journal.system)
        self.writer = log.writer(writer_name(pipeline.name))
        self.status = status_of(log, pipeline.name)
        if not self.status.seed:
            seed = int.from_bytes(self.packs.system.random(7), "little") | 1
            self.status = replace(self.status, seed=seed << 3)
        self._manifests: list[set[str]] = []
        self.commits = 0
        self.committed = 0
        """The position of the last commit."""
        everything = self._engine(self.defined.nodes)
        identities = {name: everything.identity(node) for name, node in self.defined.nodes.items()}
        live = [name for name, of in identities.items() if self.status.views.get(name) == of]
        self.live = self._engine(live)
        self.identities = identities
        self.stored_taken = self.status.taken
        self.stored = everything
        """What the last commit keeps of the operators that are still there."""
        if self.status.manifest:
            manifest = self.packs.json(Ref(*self.status.manifest))
            self.live.load(manifest)
            self.stored.load(manifest)
        self._source: Source | None = None
        self._base: Counter[str] = Counter()
        """Topic -> rows taken before the source began."""
        new = [name for name in self.defined.nodes if name not in live]
        self.build = Build(self, new) if new else None

    def _engine(self, views: Iterable[str]) -> Engine:
        # A view that a live one reads is live too: its identity is part of the reader's.
        named = {name: self.defined.nodes[name] for name in views}
        return Engine(
            named,
            self.defined.input_identities,
            self.packs,
            self.status.seed,
            Evaluator(self.pipeline.views),
            self.executors,
        )

    def __enter__(self) -> Runner:
        """For `with`."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Let the readings go."""
        if self._source is not None:
            self._source.close()
        if self.build is not None:
            self.build.close()

    # -- the loop ---------------------------------------------------------------------------

    def run(self, until: str | int | None) -> int:
        """See `Pipeline.run`."""
        if not (until is None or isinstance(until, int) or until == "caught up"):
            raise errors.BadPipeline(
                f"until={until!r} is not 'caught up', a position or None", place="run"
            )
        if not self.defined.nodes:
            raise errors.BadPipeline(
                f"pipeline '{self.pipeline.name}' has no view", place=self.pipeline.name
            )
        target = self.log.position if isinstance(until, str) else until
        if target is not None:
            self.log.wait(target)
        pool = pa.default_memory_pool()
        # Arrow's own pool gives large buffers back to the kernel and gets them again as new pages:
        # a sixth of the CPU of a first build.
        pa.set_memory_pool(pa.system_memory_pool())
        try:
            while True:
                busy = self._one_round(target)
                if target is not None and self.build is None and self._reached() >= target:
                    return self._reached()
                if not busy and self.build is None:
                    self.log.wait(self._reached() + 1)
        finally:
            pa.set_memory_pool(pool)

    def _reached(self) -> int:
        return self._source.through if self._source is not None else self.status.through

    def _one_round(self, target: int | None) -> bool:
        """One batch of the live views and one chunk of a build; whether there was work."""
        busy = bool(self.live.views) and self._live_batch()
        if self.build is None:
            return busy
        if self.live.views:
            goal = self.status.through
        else:
            goal = self.log.position if target is None else target
        if self.build.chunk(goal):
            self._join()
        return True

    def _live_batch(self) -> bool:
        if self._source is None:
            self._base = Counter(self.status.taken)
            self._source = Source(
                self.log, self.pipeline.inputs, self.status.through, self._batch_rows
            )
        changes, rows = self._source.take()
        if not rows:
            return False
        attempt = self._attempt()
        try:
            batch = self.live.step(changes, attempt)
            taken = {topic: self._base[topic] + n for topic, n in self._source.taken.items()}
            self._commit(batch, self._source.through, taken, attempt, self.live)
        except errors.ViewStopped as error:
            self.blame(error, self.live, self.status.through, self._source.through)
            raise
        finally:
            attempt.forget()
        return True

    def blame(self, error: errors.ViewStopped, engine: Engine, after: int, through: int) -> None:
        """Say in the error which entry it is that a view cannot take: try them one by one."""
        engine = engine.again()
        attempt = self._attempt()
        source = Source(self.log, self.pipeline.inputs, after, 1, through)
        try:
            for position, changes in source.entries():
                try:
                    engine.keep(engine.step(changes, attempt))
                except errors.ViewStopped:
                    error.why = f"the entry at position {position} makes it fail"
                    error.details["position"] = position
                    return
        finally:
            source.close()
            attempt.forget()

    def _attempt(self) -> Attempt:
        return self.packs.attempt(self.status.batch + 1, self.writer.epoch)

    def _commit(
        self,
        batch: Batch,
        through: int,
        taken: dict[str, int],
        attempt: Attempt,
        engine: Engine,
    ) -> None:
        """The state to the disk, then the entry that names it."""
        manifest = engine.manifest(batch, attempt)
        ref = attempt.add_json(manifest)
        attempt.finish()
        status = replace(
            self.status,
            through=through,
            taken=taken,
            batch=self.status.batch + 1,
            manifest=tuple(ref),
            views={
                **dict.fromkeys(self.status.views, ""),
                **{name: self.identities[name] for name in engine.views},
            },
        )
        with self.writer.transaction(state=status.to_json()) as transaction:
            if batch.aside:
                transaction.append(aside_topic(self.log, self.pipeline.name), batch.aside)
            for name, rows in batch.views.items():
                if rows.num_rows:
                    view = self.defined.by_name[name]
                    topic = topic_of(self.pipeline.name, name)
                    transaction.append(topic, self._as_rows(view, rows))
        assert transaction.receipt is not None
        self.committed = transaction.receipt.position
        engine.keep(batch)
        self.status = status
        self._sweep({ref.pack} | engine.pack_names(manifest))

    def _as_rows(self, view: Defined, rows: pa.RecordBatch) -> pa.RecordBatch:
        """A view's change as rows of its topic: single weights, equal keys side by side."""
        found = keyed(rows, view.key, self.status.seed)
        weight = weights(found)
        order = np.lexsort((weight, found.column("_k").to_numpy()))
        copies = pa.array(np.repeat(order, np.abs(weight[order])))
        sign = np.sign(weight)[copies.to_numpy()]
        columns = [column.take(copies) for column in kept_columns(found)]
        return pa.RecordBatch.from_arrays(
            [*columns, pa.array(sign, pa.int64())], names=[*view.names, "_weight"]
        )

    def _sweep(self, names: set[str]) -> None:
        """Remove what neither this manifest nor the one before names."""
        self._manifests = [*self._manifests[-1:], names]
        self.commits += 1
        if self.commits % SWEEP_EVERY == 0 and self.build is None:
            self.packs.drop_except(set().union(*self._manifests), self.status.batch - 1)

    # -- a build joins ----------------------------------------------------------------------

    def _join(self) -> None:
        """The views of a finished build join the others in one entry."""
        build = self.build
        assert build is not None
        attempt = self._attempt()
        try:
            build.engine.settle(attempt)
            joined_engine = self._engine(self.defined.nodes)
            joined_engine.kept = {**build.engine.kept, **self.live.kept}
            batch = Batch({}, {}, aside=build.aside)
            self.status = replace(self.status, rate=build.rate)
            for name in build.views:
                batch.views[name] = self._replacing(name, build.results[name])
            self._commit(batch, build.through, build.taken(), attempt, joined_engine)
        finally:
            attempt.forget()
        self.build, self.live = None, joined_engine

    def _replacing(self, name: str, result: Collection) -> pa.RecordBatch:
        """All rows of a built view, less what an older definition of that name has given."""
        view = self.defined.by_name[name]
        parts = [
            change(kept_columns(chunk), weights(chunk), view.node.columns)
            for chunk in result.scan()
        ]
        if name in self.status.views:
            old = rows_of(self.log, self.pipeline.name, name, None)
            for part in old.to_batches():
                columns = [part.column(column) for column in view.names]
                parts.append(change(columns, np.full(part.num_rows, -1), view.node.columns))
        return consolidated(joined(parts, view.node.columns), self.status.seed)


class Build:
    """New views on their way, with nothing published.

    What the last commit has kept for a subtree that did not change is taken over: the subtree's
    output is then known from its state, and only what is above it is computed, from that output.
    All else is fed the log from its start. Then both go on to where the live views are.
    """

    def __init__(self, runner: Runner, views: list[str]) -> None:
        """`views` and everything they read that is not live."""
        self.views = views
        self._runner = runner
        self.engine = runner._engine(runner.defined.needed(views))
        # Executors see only what is stored.
        self.engine.loading = runner.executors is None or not runner.executors.used
        self.reused = self.engine.take_over(runner.stored)
        """The topmost operators whose state was taken over, by identity."""
        self.through = 0
        self._goal = 0
        self._source: Source | None = None
        self._taken: Counter[str] = Counter()
        self._steps = self._feed(runner.status.through)
        self.results = {
            name: Collection(runner.packs, state_schema(runner.defined.by_name[name].node.columns))
            for name in views
        }
        self.aside: list[dict[str, Any]] = []
        self._started = time.monotonic()
        self._rows = 0
        self._total = sum(
            sum(runner.log.ends(one.topic)) for one in runner.pipeline.inputs.values()
        )

    def _feed(self, kept_through: int) -> Iterator[tuple[Changes, Changes, int]]:
        """What to feed, step by step: changes of inputs, of operators taken over, and rows."""
        if self.reused:
            silent = {identity: nothing(node.columns) for identity, node in self.reused.items()}
            for identity, node in self.reused.items():
                for chunk in self.engine.snapshot(node):
                    yield {}, {**silent, identity: chunk}, chunk.num_rows
            if self.engine.reads_inputs(self.reused):
                for changes, rows in self._read(kept_through):
                    yield changes, silent, rows
            else:
                yield {}, silent, 0
                self._taken.update(self._runner.stored_taken)
            self.through = kept_through
        while True:
            yield from ((changes, {}, rows) for changes, rows in self._read(self._goal))

    def _read(self, goal: int) -> Iterator[tuple[Changes, int]]:
        """The log up to a goal, and not beyond it."""
        runner = self._runner
        self._source = Source(
            runner.log, runner.pipeline.inputs, self.through, runner._build_rows, goal
        )
        while self._source is not None:
            source = self._source
            taken = source.take()
            self.through = source.through
            if source.through >= goal:
                self._taken.update(source.taken)
                self.close()
            yield taken

    def chunk(self, goal: int) -> bool:
        """Feed one step; whether it has come to `goal`, where the live views are.

        When it comes to the goal of a moment ago and the live views have moved on meanwhile, it
        reads the rest. The rest gets shorter each time.
        """
        runner = self._runner
        self._goal, before = goal, self.through
        changes, given, rows = next(self._steps)
        attempt = runner._attempt()
        try:
            batch = self.engine.step(changes, attempt, given)
            self.results = {
                name: self.results[name].loaded(
                    keyed(batch.views[name], runner.defined.by_name[name].key, runner.status.seed),
                    attempt,
                )
                for name in self.views
            }
            attempt.finish()
        except errors.ViewStopped as error:
            if not given:
                runner.blame(error, self.engine, before, self.through)
            raise
        finally:
            attempt.forget()
        self.engine.keep(batch)
        self.aside += batch.aside
        self._rows += rows
        if runner._report is not None:
            seconds = time.monotonic() - self._started
            runner._report(Progress(tuple(self.views), self._rows, self._total, seconds))
        return self.through == goal and not given and self._source is None

    def taken(self) -> dict[str, int]:
        """Topic -> rows of it that are taken in."""
        topics = {one.topic for one in self._runner.pipeline.inputs.values()}
        return {topic: self._taken[topic] for topic in topics}

    @property
    def rate(self) -> float:
        """Rows a second so far."""
        return self._rows / max(time.monotonic() - self._started, 1e-3)

    def close(self) -> None:
        """Let the reading go."""
        if self._source is not None:
            self._source.close()
            self._source = None
