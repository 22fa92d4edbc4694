"""The loop: woken by the log, whole entries, all views of a pipeline in one entry.

::

    woken -> entries (after, through] -> changes per input -> algebra -> changes per view -> commit
                                                                                  |
              packs written and synced (new runs, manifest)  <--------------------+
              one log entry: rows of every view + `_commits` (through, the views that are right)
                             + Status (through, manifest) + require(epoch)

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

**Memory** is bounded by `memory_bytes` (runs that wait for the disk have it; a step, and a piece of
state, an eighth of it at most), not by what an entry has: an entry of more is taken in several
steps, with nothing published in between, and what many steps have given is added up on the disk and
staged (`Outputs`). Half an entry may break a view that the whole does not (two rows with one key,
for a moment): then the entry is taken again, in one step.

**Garbage** is a pack that neither of the two newest manifests names, of an older batch than they.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace import errors
from headrace.log.embedded.holds import HOLD_SECONDS
from headrace.model.records import Piece
from headrace.pipelines.pipeline import Pipeline
from headrace.pipelines.views.aside import Evaluator
from headrace.pipelines.views.changes import (
    change,
    kept_columns,
    keyed,
    nothing,
)
from headrace.pipelines.views.define import Defined, Views, define_views, ensure_topic
from headrace.pipelines.views.engine import Batch, Engine
from headrace.pipelines.views.executors import Executors
from headrace.pipelines.views.reading import (
    aside_topic,
    commits_topic,
    newest_generation,
    status_of,
    topic_of,
    writer_name,
)
from headrace.pipelines.views.source import STEP_BYTES, Changes, Source
from headrace.tables.collection import Collection
from headrace.tables.packs import HELD_BYTES, Attempt, Packs, Ref
from headrace.tables.runs import state_schema, weights

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.log.embedded.log import EmbeddedLog

BATCH_ROWS = 100_000
"""A batch ends at the first whole entry after so many rows."""
BUILD_ROWS = 250_000
"""So does a chunk of a build, of which there are many, one after the other."""
ASIDE = "_aside"
ASIDE_COLUMNS = pa.schema([(name, pa.string()) for name in ("view", "reason", "row")])
"""What is noted of a row that made a view fail."""
MEMORY_MIN = 8 << 20
"""Steps are made for at least so much memory."""
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
        memory_bytes: int | None = None,
        report: Report | None = None,
        defined: Views | None = None,
    ) -> None:
        """Read the definitions (or take those that were read), claim the pipeline, take its state.

        The state is that of its last commit.
        """
        self.pipeline = pipeline
        self.log = log
        self._batch_rows = batch_rows or BATCH_ROWS
        self._build_rows = batch_rows or BUILD_ROWS
        self._report = report
        self.defined = defined or define_views(pipeline, log, spark)
        self.executors: Executors | None = None
        if self.defined.spark is not None:
            self.executors = Executors(self.defined.spark, rows=executor_rows)
        folder = f"{log.path}/pipelines/{pipeline.name}"
        if memory_bytes is None:
            memory_bytes = pipeline.memory_bytes or HELD_BYTES
        self.packs = Packs(folder, log.journal.system, may_hold=memory_bytes)
        self.writer = log.writer(writer_name(pipeline.name))
        self.status = status_of(log, pipeline.name)
        if not self.status.seed:
            seed = int.from_bytes(self.packs.system.random(7), "little") | 1
            self.status = replace(self.status, seed=seed << 3)
        self._commits = commits_topic(log, pipeline.name)
        self._manifests: list[set[str]] = []
        self.commits = 0
        self.committed = 0
        self._held = -HOLD_SECONDS
        """The position of the last commit."""
        everything = self._engine(self.defined.nodes)
        self.published = {
            name: everything.published(node, log.topic(topic_of(pipeline.name, name)).id)
            for name, node in self.defined.nodes.items()
        }
        lost = bool(self.status.manifest) and not self.packs.names()
        """All state is gone, as in a restored log: all views are built anew."""
        live = [] if lost else self.defined.unchanged(self.published, self.status.views)
        self.live = self._engine(live)
        self.stored_taken = self.status.taken
        self.stored = everything
        """What the last commit keeps of the operators that are still there."""
        if self.status.manifest and not lost:
            manifest = self.packs.json(Ref(*self.status.manifest))
            self.live.load(manifest)
            self.stored.load(manifest)
        self._source: Source | None = None
        self._base: Counter[str] = Counter()
        """Topic -> rows taken before the source began."""
        new = [name for name in self.defined.nodes if name not in live]
        self._began = log.position
        """Whatever is new may be half there before."""
        self.build = Build(self, new) if new else None
        self._cuts = True

    def source(self, after: int, rows: int, through: int | None = None) -> Source:
        """The changes of the inputs, with the columns that the views were read with."""
        step = min(STEP_BYTES, max(MEMORY_MIN, self.packs.may_hold) // 8)
        return Source(self.log, self.pipeline.inputs, self.defined, after, rows, through, step)

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

    def turn(self) -> tuple[bool, int]:
        """One round of a run without end: whether there was work, and how far it is now.

        For whoever runs several pipelines in turn, and waits for the log by itself.
        """
        return self._one_round(None) or self.build is not None, self._reached()

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
        try:
            done = self.build.chunk(goal)
        except errors.ViewStopped:
            if not self.build.has_cut:
                raise
            self.build.close()
            self.build = Build(self, self.build.views, cuts=False)
        else:
            if done and (not self.live.views or self._reached() >= self._began):
                self._join()
        return True

    def _live_batch(self) -> bool:
        if self._source is None:
            self._base = self._counted()
            self._source = self.source(self.status.through, self._batch_rows)
            self._source.cuts = self._cuts
        changes, rows = self._source.take()
        if not rows:
            return False
        if not self._source.whole:
            return self._large_entry(self._source, changes)
        source, self._cuts = self._source, True
        while True:
            attempt = self._attempt()
            try:
                batch = self.live.step(changes, attempt)
                taken = {topic: self._base[topic] + n for topic, n in source.taken.items()}
                self._commit(batch, source.through, taken, attempt, self.live)
            except errors.ViewStopped as error:
                source.cuts = False
                later = self.twice(changes, lambda: source.take()[0])
                if later is None:
                    self.blame(error, self.live, self.status.through, source.through)
                    raise
                changes = later
            else:
                source.cuts = True
                return True
            finally:
                attempt.forget()

    def twice(self, changes: Changes, take: Callable[[], Changes]) -> Changes | None:
        """These changes and about as many later ones, in one step; None if there are none.

        A row that makes a view fail stops it only if it is still there at the end, or where more
        would have to be held than may be: mended at its source, it fails no view.
        """
        parts = [changes]
        wanted = sum(rows.num_rows for rows in changes.values())
        may_hold = self.packs.may_hold - sum(rows.nbytes for rows in changes.values())
        while wanted > 0 and may_hold > 0 and (later := take()):
            parts.append(later)
            wanted -= sum(rows.num_rows for rows in later.values())
            may_hold -= sum(rows.nbytes for rows in later.values())
        if len(parts) == 1:
            return None
        return {
            name: pa.concat_batches([part[name] for part in parts if name in part])
            for name in dict.fromkeys(name for part in parts for name in part)
        }

    def _counted(self) -> Counter[str]:
        """Topic -> rows up to the last commit; those of an input that is new are counted."""
        found = Counter(self.status.taken)
        for topic in {one.topic for one in self.pipeline.inputs.values()} - found.keys():
            with closing(self.log.read(topic, through=self.status.through)) as reading:
                found[topic] = sum(len(batch) for batch in reading)
        return found

    def _large_entry(self, source: Source, changes: Changes) -> bool:
        """An entry in several steps, and one commit."""
        engine = self.live.again()
        outputs = Outputs(self, self.live.views)
        try:
            outputs.add(engine, changes, {})
            while not source.whole:
                outputs.add(engine, source.take()[0], {})
        except errors.ViewStopped:
            source.close()
            self._source, self._cuts = None, False
            return True
        taken = {topic: self._base[topic] + n for topic, n in source.taken.items()}
        self._publish(engine, outputs, source.through, taken)
        return True

    def blame(self, error: errors.ViewStopped, engine: Engine, after: int, through: int) -> None:
        """Say in the error which entry it is that a view cannot take: try them one by one."""
        engine = engine.again()
        attempt = self._attempt()
        source = self.source(after, 1, through)
        try:
            for position, changes in source.entries():
                try:
                    engine.keep(engine.step(changes, attempt))
                except errors.ViewStopped as found:
                    if found.details.get("row") != error.details.get("row"):
                        continue  # a row that a later entry has mended
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
        told: Mapping[str, pa.RecordBatch | Piece] | None = None,
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
                **{name: self.published[name] for name in engine.views},
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
            transaction.append(self._commits, [{"through": through, "views": list(engine.views)}])
            for name, given in (told or {}).items():
                transaction.append(topic_of(self.pipeline.name, name), given)
        assert transaction.receipt is not None
        self.committed = transaction.receipt.position
        self._hold(through)
        engine.keep(batch)
        self.status = status
        self._sweep({ref.pack} | engine.pack_names(manifest))

    def _hold(self, through: int) -> None:
        """Now and then: what comes next is not to be compacted before it was read."""
        if time.monotonic() - self._held > HOLD_SECONDS:
            self._held = time.monotonic()
            topics = [one.topic for one in self.pipeline.inputs.values()]
            self.log.hold_if_needed(f"view/{self.pipeline.name}", through, topics)

    def _as_rows(self, view: Defined, rows: pa.RecordBatch) -> pa.RecordBatch:
        """A view's change as rows of its topic: single weights, equal keys side by side."""
        return _in_order(view.names, keyed(rows, view.key, self.status.seed))

    def _publish(
        self, engine: Engine, outputs: Outputs, through: int, taken: dict[str, int]
    ) -> None:
        """Commit what several steps have given."""
        attempt = self._attempt()
        try:
            engine.settle(attempt)
            told: dict[str, pa.RecordBatch | Piece] = {}
            for name, result in outputs.results.items():
                names, _ = outputs.columns[name]
                chunks = (_in_order(names, chunk) for chunk in whole_keys(result.scan()))
                some = list(islice(chunks, 2))
                if some and name == ASIDE:
                    aside_topic(self.log, self.pipeline.name)
                if len(some) > 1:
                    reader = pa.RecordBatchReader.from_batches(some[0].schema, chain(some, chunks))
                    told[name] = self.log.stage(topic_of(self.pipeline.name, name), reader)
                elif some:
                    told[name] = some[0]
            self._commit(Batch({}, {}), through, taken, attempt, engine, told)
        finally:
            attempt.forget()
        self.live = engine

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
        for name in build.views:
            topic, view = topic_of(self.pipeline.name, name), self.defined.by_name[name]
            ensure_topic(self.log, topic, view, alter=True)
            if name in self.status.views:
                build.outputs.subtract(name)
        joined_engine = self._engine(self.defined.nodes)
        joined_engine.kept = {**build.engine.kept, **self.live.kept}
        self.status = replace(self.status, rate=build.rate)
        self.build = None
        self._publish(joined_engine, build.outputs, build.through, build.taken())


class Outputs:
    """What views give in many steps, added up, with nothing published."""

    def __init__(self, runner: Runner, views: Iterable[str]) -> None:
        """Nothing yet."""
        self._runner = runner
        defined = {name: runner.defined.by_name[name] for name in views}
        self.results = {
            name: Collection(runner.packs, state_schema(one.node.columns))
            for name, one in defined.items()
        }
        self.results[ASIDE] = Collection(runner.packs, state_schema(ASIDE_COLUMNS))
        self.columns: dict[str, tuple[Sequence[str], Sequence[int]]] = {
            name: (one.names, one.key) for name, one in defined.items()
        }
        """The names of what is given, and the places of its key."""
        self.columns[ASIDE] = ASIDE_COLUMNS.names, range(len(ASIDE_COLUMNS))

    def add(self, engine: Engine, changes: Changes, given: Changes) -> None:
        """Let the engine take a step, and keep it."""
        attempt = self._runner._attempt()
        try:
            batch = engine.step(changes, attempt, given)
            found = dict(batch.views)
            # What is only read for them is live, and has noted its rows.
            aside = [row for row in batch.aside if row["view"] in self.results]
            if aside:
                columns = [pa.array([row[n] for row in aside]) for n in ASIDE_COLUMNS.names]
                found[ASIDE] = change(columns, [row["_weight"] for row in aside], ASIDE_COLUMNS)
            for name in self.results.keys() & found.keys():
                self._load(name, found[name], attempt)
            attempt.finish()
        finally:
            attempt.forget()
        engine.keep(batch)

    def subtract(self, name: str) -> None:
        """Less what an older definition of a view has given, and what it has set aside."""
        runner = self._runner
        log, pipeline = runner.log, runner.pipeline.name
        view = runner.defined.by_name[name]
        there = {topic.name for topic in log.topics()}
        attempt = runner._attempt()
        try:
            for given, schema in ((name, view.node.columns), (ASIDE, ASIDE_COLUMNS)):
                topic = topic_of(pipeline, given)
                for batch in newest_generation(log, topic) if topic in there else ():
                    rows = batch.data
                    if given == ASIDE:
                        rows = rows.filter(pc.equal(rows.column("view"), name))
                    columns = [rows.column(column) for column in self.columns[given][0]]
                    taken_back = -rows.column("_weight").to_numpy()
                    self._load(given, change(columns, taken_back, schema), attempt)
            attempt.finish()
        finally:
            attempt.forget()

    def _load(self, name: str, rows: pa.RecordBatch, attempt: Attempt) -> None:
        _, key = self.columns[name]
        found = keyed(rows, key, self._runner.status.seed)
        self.results[name] = self.results[name].loaded(found, attempt)


def whole_keys(chunks: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Sorted rows in other cuts: never between two rows of one key."""
    held: pa.RecordBatch | None = None
    for chunk in chunks:
        rows = chunk if held is None else pa.concat_batches([held, chunk])
        keys = rows.column("_k").to_numpy()
        cut = int(np.searchsorted(keys, keys[-1]))
        if cut:
            yield rows.slice(0, cut)
        held = rows.slice(cut)
    if held is not None:
        yield held


def _in_order(names: Sequence[str], found: pa.RecordBatch) -> pa.RecordBatch:
    """Keyed rows as rows of a topic."""
    weight = weights(found)
    order = np.lexsort((weight, found.column("_k").to_numpy()))
    copies = pa.array(np.repeat(order, np.abs(weight[order])))
    sign = np.sign(weight)[copies.to_numpy()]
    columns = [column.take(copies) for column in kept_columns(found)]
    return pa.RecordBatch.from_arrays(
        [*columns, pa.array(sign, pa.int64())], names=[*names, "_weight"]
    )


class Build:
    """New views on their way, with nothing published.

    What the last commit has kept for a subtree that did not change is taken over: the subtree's
    output is then known from its state, and only what is above it is computed, from that output.
    All else is fed the log from its start. Then both go on to where the live views are.
    """

    def __init__(self, runner: Runner, views: list[str], *, cuts: bool = True) -> None:
        """`views` and everything they read that is not live."""
        self.views = views
        self._cuts = cuts
        self.has_cut = False
        """Whether an entry was taken in several steps."""
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
        self.outputs = Outputs(runner, views)
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
        self._source = runner.source(self.through, runner._build_rows, goal)
        self._source.cuts = self._cuts
        while self._source is not None:
            source = self._source
            taken = source.take()
            self.has_cut |= not source.whole
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
        while True:
            try:
                self.outputs.add(self.engine, changes, given)
                break
            except errors.ViewStopped as error:
                later = runner.twice(changes, self._later)
                if later is None:
                    if not (given or self.has_cut):
                        runner.blame(error, self.engine, before, self.through)
                    raise
                changes, rows = later, sum(one.num_rows for one in later.values())
        self._rows += rows
        if runner._report is not None:
            seconds = time.monotonic() - self._started
            runner._report(Progress(tuple(self.views), self._rows, self._total, seconds))
        return self.through == goal and not given and self._source is None

    def _later(self) -> Changes:
        """What the reading that is under way gives next."""
        return {} if self._source is None or self.has_cut else next(self._steps)[0]

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
