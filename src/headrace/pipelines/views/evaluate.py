"""Templates: what the user computes row by row, evaluated by Spark without a Spark job.

Analysing, optimising and planning a query costs Spark 20 ms, a job 30 ms more, however few rows it
reads. A change has few rows and always the same query, so a template does all of that once: each
projection is compiled by Catalyst into an object that maps a row to a row (``UnsafeProjection``,
generated code, what Spark itself runs inside a task), and stays in the JVM. A call then is

    Arrow rows -> a file in memory -> iterator of rows -> map(projection) ... -> file -> Arrow rows

in the driver's JVM, in one call over py4j: 0.7 ms for few rows, 1.5 µs for each further row. Files,
because py4j carries bytes as text, and because its answers above 8 KB wait 40 ms for the kernel's
delayed acknowledgement (measured). Scala's iterators are lazy: each row goes all the way before
the next, so it does no harm that projections give the same row object again and again.

*Filters.* An iterator of rows needs a function of Scala's to be filtered by, and a predicate is
not one. So a filter becomes a column: ``kept``, null or false for the rows that are out, and they
leave at the end. Expressions above a filter must not see the rows it has dropped (``where b <> 0``
below ``a / b``), so they are wrapped: ``if(kept, e, null)``, which does not evaluate ``e`` for
others.

*Without the JVM*: columns that are only selected, renamed or constant; exploding an array or a map
once it is a column; unions; an Expand whose projections are selections. *With a job*: Python
functions and whatever else has no compiled form, by building the plan over the given rows.

The rider: all batches end in the weight ``_w``, which is appended to every projection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.pipelines.views.algebra import WEIGHT
from headrace.pipelines.views.catalyst import Attribute, Catalyst, Java, items, kind_of
from headrace.pipelines.views.evaluate_job import Job
from headrace.pipelines.views.evaluate_plan import (
    Expanded,
    Filtered,
    Generated,
    Leaf,
    Plan,
    Projected,
    United,
)
from headrace.pipelines.views.evaluate_rows import (
    Converter,
    batch_without_rows,
    shaped,
    tried,
    whole,
)

# --- columns that need no JVM ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Constant:
    """A literal; its value is asked of the JVM once."""

    java: Java


def simple(expression: Java, positions: dict[int, int]) -> int | _Constant | None:
    """Give the position of a column that is only selected, or a constant; None: compute it."""
    kind = kind_of(expression)
    if kind == "Alias":
        return simple(expression.child(), positions)
    if kind == "AttributeReference":
        return positions[expression.exprId().id()]
    return _Constant(expression) if kind == "Literal" else None


Step = Callable[[Sequence[pa.RecordBatch]], pa.RecordBatch]


class _Compiler:
    """Turns a plan into nested Python functions over batches."""

    def __init__(self, bridge: Catalyst, converter: Converter, *, rider: bool) -> None:
        self.bridge = bridge
        self.converter = converter
        long_type = bridge.datatype('"long"')
        self.rider = (bridge.new_attribute(WEIGHT.name, long_type),) if rider else ()
        self.kept = bridge.new_attribute("kept", bridge.datatype('"boolean"'))

    def compile(self, plan: Plan) -> Step:
        if isinstance(plan, Leaf):
            index = plan.index
            return lambda batches: batches[index]
        if isinstance(plan, United):
            parts = [self.compile(part) for part in plan.parts]
            schema = self._schema(plan.output)

            def unite(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
                tables = [pa.Table.from_batches([shaped(p(batches), schema)]) for p in parts]
                return whole(pa.concat_tables(tables))

            return unite
        if isinstance(plan, Expanded):
            below = self.compile(plan.below)
            schema = self._schema(plan.output)
            steps = [
                self._chain([_named(self, p, plan)], plan.below.output) for p in plan.projections
            ]

            def expand(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
                rows = below(batches)
                tables = [pa.Table.from_batches([shaped(step(rows), schema)]) for step in steps]
                return whole(pa.concat_tables(tables))

            return expand
        if isinstance(plan, Generated):
            return self._generate(plan)
        assert isinstance(plan, Projected | Filtered)
        chain: list[Projected | Filtered] = []
        bottom: Plan = plan
        while isinstance(bottom, Projected | Filtered):
            chain.insert(0, bottom)
            bottom = bottom.below
        under, over = self.compile(bottom), self._chain(chain, bottom.output)
        return lambda batches: over(under(batches))

    def _schema(self, attributes: tuple[Attribute, ...]) -> pa.Schema:
        schema = self.bridge.schema(attributes)
        return schema.append(WEIGHT) if self.rider else schema

    def _chain(
        self, chain: Sequence[Projected | Filtered], source: tuple[Attribute, ...]
    ) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
        """Compile projections and filters, the lowest first, into one way through the JVM."""
        selection = self._selection(chain, source)
        return selection or _Mapped(self, tuple(chain), source)

    def _selection(
        self, chain: Sequence[Projected | Filtered], source: tuple[Attribute, ...]
    ) -> Callable[[pa.RecordBatch], pa.RecordBatch] | None:
        """Compile it without the JVM, if all of it is selections and constants."""
        columns: list[int | _Constant] = list(range(len(source)))
        attributes = source
        for link in chain:
            if not isinstance(link, Projected):
                return None
            positions = {attribute.id: index for index, attribute in enumerate(attributes)}
            chosen: list[int | _Constant] = []
            for expression in link.expressions:
                found = simple(expression, positions)
                if found is None:
                    return None
                chosen.append(columns[found] if isinstance(found, int) else found)
            columns, attributes = chosen, link.output
        schema = self._schema(attributes)
        values = [
            c if isinstance(c, int) else self._value(c, a)
            for c, a in zip(columns, attributes, strict=True)
        ]
        if self.rider:
            values.append(len(source))

        def select(batch: pa.RecordBatch) -> pa.RecordBatch:
            arrays = [
                batch.column(value) if isinstance(value, int) else _repeated(value, len(batch))
                for value in values
            ]
            return pa.RecordBatch.from_arrays(arrays, schema=schema)

        return select

    def _value(self, constant: _Constant, attribute: Attribute) -> pa.Scalar:
        """Ask the JVM for the value of a literal."""
        one = pa.RecordBatch.from_arrays([pa.array([1])], names=["_w"])
        carrier = self.bridge.new_attribute("one", self.bridge.datatype('"long"'))
        named = self.bridge.alias(constant.java, "c")
        projection = self.projection([named], [carrier])
        result = self.bridge.struct((attribute,))
        rows = self.converter.map(
            one, self.bridge.struct((carrier,)), self.bridge.java_list([projection]), result
        )
        return rows.column(0).cast(self.bridge.arrow_type(attribute.type))[0]

    def projection(self, expressions: Sequence[Java], source: Sequence[Attribute]) -> Java:
        """Let Catalyst compile a projection."""
        bridge = self.bridge
        # Whatever comes in may be null: a join above may have made it so, or a filter. And
        # initialize() is for nondeterministic expressions only, and must not be called by py4j,
        # which takes all generated classes for one, since they have the same name.
        nullable = [attribute.java.withNullability(True) for attribute in source]
        return bridge.expression("UnsafeProjection").create(
            bridge.seq(list(expressions)), bridge.seq(nullable)
        )

    def _generate(self, plan: Generated) -> Step:
        """Let Spark compute the array, and Arrow take it apart."""
        bridge, generator = self.bridge, plan.java.generator()
        kind, outer = kind_of(generator), plan.java.outer()
        children = items(generator.children())
        made = [bridge.alias(child, f"g{index}") for index, child in enumerate(children)]
        kept = [plan.below.output[position] for position in plan.required]
        output = (*kept, *(bridge.attribute(alias.toAttribute()) for alias in made))
        below = Projected(plan.below, (*(a.java for a in kept), *made), output)
        step, schema, width = self.compile(below), self._schema(plan.output), len(kept)
        count = len(children)

        def generate(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
            rows = step(batches)
            arguments = rows.columns[width : width + count]
            parents, columns = _explode(kind, arguments, outer=outer)
            others = [*rows.columns[:width], *rows.columns[width + count :]]
            taken = [column.take(parents) for column in others]
            arrays = [*taken[:width], *columns, *taken[width:]]
            return shaped(pa.RecordBatch.from_arrays(arrays, names=schema.names), schema)

        return generate


GENERATORS = frozenset({"Explode", "PosExplode", "Inline", "ReplicateRows"})


def _explode(
    kind: str, arguments: Sequence[pa.Array], *, outer: bool
) -> tuple[pa.Array, list[pa.Array]]:
    """Give, for each row made, the row it was made from and the columns of the generator."""
    first = arguments[0]
    if kind == "ReplicateRows":
        times = np.maximum(first.fill_null(0).to_numpy(zero_copy_only=False), 0)
        parents = pa.array(np.repeat(np.arange(len(first)), times), pa.int64())
        return parents, [column.take(parents) for column in arguments[1:]]
    if pa.types.is_map(first.type):
        entries = pa.struct([("key", first.type.key_type), ("value", first.type.item_type)])
        first = first.cast(pa.list_(entries))
        kind = "Inline" if kind == "Explode" else "PosInline"
    lengths = pc.fill_null(pc.list_value_length(first), 0).to_numpy(zero_copy_only=False)
    made = np.maximum(lengths, 1) if outer else lengths
    parents = np.repeat(np.arange(len(first)), made)
    starts = np.cumsum(made) - made
    within = np.arange(len(parents)) - np.repeat(starts, made)
    empty = np.repeat(lengths == 0, made)
    flat_starts = np.cumsum(lengths) - lengths
    chosen = pa.array(np.repeat(flat_starts, made) + within, mask=empty)
    elements = first.flatten().take(chosen)
    columns = [elements]
    if kind in {"Inline", "PosInline"}:
        columns = elements.flatten()
    if kind in {"PosExplode", "PosInline"}:
        columns = [pa.array(within.astype(np.int32), mask=empty), *columns]
    return pa.array(parents), columns


def _named(compiler: _Compiler, expressions: Sequence[Java], plan: Expanded) -> Projected:
    """Make a projection of one list of an Expand."""
    aliased = tuple(
        compiler.bridge.alias(expression, attribute.name, attribute.java.exprId())
        for expression, attribute in zip(expressions, plan.output, strict=True)
    )
    return Projected(plan.below, aliased, plan.output)


class _Mapped:
    """Projections and filters in one way through the JVM; compiled when first called."""

    def __init__(
        self,
        compiler: _Compiler,
        chain: tuple[Projected | Filtered, ...],
        source: tuple[Attribute, ...],
    ) -> None:
        self._compiler, self._chain, self._source = compiler, chain, source
        self._lock = threading.Lock()
        self._schema = compiler._schema(chain[-1].output)

    @cached_property
    def _steps(self) -> tuple[Java, Java, Java, bool]:
        """Give the schema read, the projections, the schema written, and whether rows leave."""
        compiler, bridge = self._compiler, self._compiler.bridge
        live = (*self._source, *compiler.rider)
        read, projections, filtered = bridge.struct(live), [], False
        if any('"array"' in column.type or '"map"' in column.type for column in live):
            # Functions with lambdas take Spark's own arrays for granted: a null in one of Arrow's
            # is an error to them.
            projections.append(compiler.projection([column.java for column in live], live))
        for link in self._chain:
            kept = [compiler.kept.java] if filtered else []
            rider = [attribute.java for attribute in compiler.rider]
            if isinstance(link, Filtered):
                condition = self._only_kept(link.condition, filtered=filtered)
                columns = [attribute.java for attribute in link.output]
                kept = [bridge.alias(condition, "kept", compiler.kept.java.exprId())]
            else:
                columns = [self._only_kept(e, filtered=filtered) for e in link.expressions]
            projections.append(compiler.projection([*columns, *rider, *kept], live))
            filtered = bool(kept)
            live = (*link.output, *compiler.rider, *([compiler.kept] * filtered))
        return read, bridge.java_list(projections), bridge.struct(live), filtered

    def _only_kept(self, expression: Java, *, filtered: bool) -> Java:
        """Make an expression null for rows that are out already."""
        if not filtered or kind_of(expression) in {"AttributeReference", "Literal"}:
            return expression
        bridge = self._compiler.bridge
        if kind_of(expression) == "Alias":
            inner = self._only_kept(expression.child(), filtered=True)
            return bridge.alias(inner, expression.name(), expression.exprId())
        nothing = bridge.null(expression.dataType())
        return bridge.expression("If")(self._compiler.kept.java, expression, nothing)

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        with self._lock:
            read, projections, written, filtered = self._steps
            if not batch.num_rows:
                return batch_without_rows(self._schema)
            rows = self._compiler.converter.map(batch, read, projections, written)
        if filtered:
            *columns, kept = rows.columns
            rows = pa.RecordBatch.from_arrays(columns, names=self._schema.names).filter(kept)
        return shaped(rows, self._schema)


# --- templates ------------------------------------------------------------------------------------


@dataclass
class SparkTemplate:
    """A plan over leaves, compiled at its first call."""

    bridge: Catalyst
    plan: Plan
    leaves: tuple[tuple[Attribute, ...], ...]
    compiled: bool
    """Whether all its expressions have a compiled form; else each call is a job."""
    origin: str = ""
    """Where to say that a failure was."""
    rider: bool = True
    inputs: tuple[pa.Schema, ...] = field(init=False)
    output: pa.Schema = field(init=False)

    def __post_init__(self) -> None:
        self.inputs = tuple(map(self.bridge.schema, self.leaves))
        self.output = self.bridge.schema(self.plan.output)
        riding = [WEIGHT] if self.rider else []
        self._given = [pa.schema([*schema, *riding]) for schema in self.inputs]
        self._converter = Converter(self.bridge)

    @cached_property
    def _step(self) -> Step:
        if self.compiled:
            return _Compiler(self.bridge, self._converter, rider=self.rider).compile(self.plan)
        return self._job

    @cached_property
    def _job(self) -> Job:
        return Job(self.bridge, self._converter, self.plan, self.leaves, rider=self.rider)

    def __call__(self, *batches: pa.RecordBatch) -> pa.RecordBatch:
        """Evaluate on these rows."""
        given = [shaped(b, schema) for b, schema in zip(batches, self._given, strict=True)]
        if self.rider and not any(batch.num_rows for batch in given):
            return batch_without_rows(self.output.append(WEIGHT))
        return tried(self.origin.replace("\n", ", then "), lambda: self._step(given))


def _repeated(value: pa.Scalar, rows: int) -> pa.Array:
    """A column of one value; Arrow cannot repeat a nested one zero times."""
    return pa.repeat(value, rows) if rows else pa.array([], value.type)
