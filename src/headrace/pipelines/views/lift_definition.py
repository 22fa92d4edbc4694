"""Reading a definition: called with empty, typed, real frames, it tells what it computes.

Real frames, so that everything a user may write works, and Spark's own analysis says what is wrong
with it. The frames are empty RDDs: Spark never folds these away, and an RDD has a number by which
the input is recognised in the plan, whatever it was renamed to. Every column is declared nullable,
so that no rule makes use of a promise that a later schema may break.

What must not happen while a definition is called is a job: the answer would come from empty
frames. ``pivot`` without values and ``crosstab`` run one, unseen. So the call has a job group of
its own, and Spark is asked afterwards whether there was anything in it.
"""

from __future__ import annotations

import functools
import inspect
import traceback
import types
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import pyarrow as pa

from headrace.errors import (
    ActionInDefinition,
    BadDefinition,
    HeadraceError,
    PlanReaderFailed,
    UnknownInput,
    nearest,
)
from headrace.pipelines.views import algebra
from headrace.pipelines.views.catalyst import Catalyst, Java, items
from headrace.pipelines.views.catalyst_rules import rewrite
from headrace.pipelines.views.evaluate_rows import shaped, tried, whole
from headrace.pipelines.views.lift import Lifter
from headrace.pipelines.views.lift_fingerprint import code_of
from headrace.pipelines.views.refusals import refuse_chance, refuse_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")
Definition = Callable[..., "DataFrame"] | str
"""A function of frames, by parameter name, or a query in SQL over tables of these names."""
Refresh = Literal["changes", "full"]


def bridge_of(session: SparkSession) -> Catalyst:
    """Give the bridge of a session, with its caches."""
    bridge = getattr(session, "_headrace", None)
    if not isinstance(bridge, Catalyst):
        bridge = Catalyst(session)
        session._headrace = bridge  # type: ignore[attr-defined]
    return bridge


def read_definition(
    session: SparkSession,
    definition: Definition,
    inputs: Mapping[str, pa.Schema],
    *,
    name: str = "view",
    refresh: Refresh = "changes",
) -> algebra.Node:
    """Read a definition into the algebra; ``inputs`` are the schemas of inputs and other views."""
    from pyspark.errors import PySparkException

    bridge = bridge_of(session)
    chosen = choose_inputs(definition, inputs, name)
    frames, scans = {}, {}
    for key, schema in chosen.items():
        frames[key] = session.createDataFrame([], spark_schema(schema))
        scans[frames[key]._jdf.queryExecution().analyzed().rdd().id()] = key
    try:
        with _jobs(session) as has_run:
            used = has_run if refresh == "changes" else lambda: False
            frame = _call(session, definition, frames, name, used)
        asked = frame._jdf.queryExecution()
        plan = asked.analyzed()
        refuse_chance(plan, bridge)
        if plan.containsPattern(bridge.pattern("PYTHON_UDF")):
            asked.executedPlan()  # where Spark allows no Python function it says so only now
        if refresh == "full":
            return _full(session, definition, chosen, scans, plan, name)
        refuse_files(plan)
        if has_run():
            raise ActionInDefinition("the definition ran a Spark job")
        lifter = Lifter(bridge, scans)
        return lifter.node(lifter.lift(rewrite(plan, bridge)))
    except PySparkException as error:  # a constant that cannot be computed
        raise _refused(error, place_of(definition, name)) from error
    except HeadraceError as error:
        error.place = error.place or place_of(definition, name)
        raise


def batch_reading(
    session: SparkSession,
    definition: Definition,
    tables: Mapping[str, pa.Table],
    *,
    name: str = "view",
) -> pa.Table:
    """Call the definition with whole tables: what a view must be equal to."""
    chosen = choose_inputs(definition, tables, name)
    frames = {
        key: session.createDataFrame(table, spark_schema(table.schema))
        for key, table in chosen.items()
    }
    frame = _call(session, definition, frames, name)
    return tried(place_of(definition, name), frame.toArrow)


def spark_schema(schema: pa.Schema) -> Any:
    """Give Spark's schema for rows of an Arrow schema, all columns nullable."""
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StructType

    made = StructType()
    for column in schema:
        made.add(column.name, from_arrow_type(column.type, prefer_timestamp_ntz=True), True)
    return made


# --- the call -------------------------------------------------------------------------------------


def choose_inputs(definition: Definition, inputs: Mapping[str, T], name: str) -> dict[str, T]:
    """Give the inputs that a definition asks for: its parameters; for SQL, all there are."""
    if isinstance(definition, str):
        return dict(inputs)
    parameters = inspect.signature(definition).parameters.values()
    asked = [p.name for p in parameters if p.default is p.empty or p.name in inputs]
    for key in asked:
        if key not in inputs:
            known = ", ".join(sorted(inputs)) or "there are none"
            raise UnknownInput(
                f"the view {name} asks for '{key}', which is no input",
                place=place_of(definition, name),
                fix=nearest(key, inputs) or f"the inputs are: {known}",
            )
    return {key: inputs[key] for key in asked}


def place_of(definition: Definition, name: str) -> str:
    """Say where a view is defined."""
    code = None if isinstance(definition, str) else _code(definition)
    return f"view {name}, {code.co_filename}:{code.co_firstlineno}" if code else f"view {name}"


def _code(definition: Callable[..., Any]) -> types.CodeType | None:
    return getattr(inspect.unwrap(definition), "__code__", None)


def _call(
    session: SparkSession,
    definition: Definition,
    frames: Mapping[str, DataFrame],
    name: str,
    has_run: Callable[[], bool] = lambda: False,
) -> DataFrame:
    """Call a definition; what is said against it is passed on with the line that did it."""
    from pyspark.errors import PySparkException
    from pyspark.sql import DataFrame

    try:
        made = (
            _sql(session, definition, frames)
            if isinstance(definition, str)
            else definition(**frames)
        )
    except HeadraceError:
        raise
    except Exception as error:
        place = _line(definition, name, error)
        if has_run():  # it made something of the answer, which is empty
            raise ActionInDefinition("the definition ran a Spark job", place=place) from error
        if isinstance(error, PySparkException):
            raise _refused(error, place) from error
        raise BadDefinition(
            f"the definition raised {type(error).__name__}: {error}",
            place=place,
            why="it is called with frames of its inputs, which may be empty, and returns a frame",
            fix="correct the definition",
        ) from error
    if not isinstance(made, DataFrame):
        raise BadDefinition(
            f"the definition gave {_kind(made)}, not a DataFrame of Spark",
            why="a view is what its function returns",
            fix="return the frame",
        )
    return made


def _kind(made: object) -> str:
    if made is None:
        return "nothing"
    module = type(made).__module__.partition(".")[0]
    name = type(made).__name__
    return name if module == "builtins" else f"a {name} of {module}"


def _refused(error: Exception, place: str) -> BadDefinition:
    """Pass on what Spark says, without the plan it prints after it."""
    return BadDefinition(str(error).strip().split("\n", 1)[0].rstrip("."), place=place)


def _line(definition: Definition, name: str, error: Exception) -> str:
    """Find the line of the user's file that Spark complained about."""
    code = None if isinstance(definition, str) else _code(definition)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if code and frame.filename == code.co_filename]
    return f"view {name}, {code.co_filename}:{lines[-1]}" if code and lines else ""


def _sql(session: SparkSession, text: str, frames: Mapping[str, DataFrame]) -> DataFrame:
    """Run SQL over these frames as tables, and leave the session's own tables as they were."""
    _refuse_command(session, text)
    before = {key: session.table(key) for key in frames if session.catalog.tableExists(key)}
    for key, frame in frames.items():
        frame.createOrReplaceTempView(key)
    try:
        return session.sql(text)
    finally:
        for key in frames:
            session.catalog.dropTempView(key)
        for key, frame in before.items():
            frame.createOrReplaceTempView(key)


def _refuse_command(session: SparkSession, text: str) -> None:
    """Refuse what does something: Spark would do it as soon as it is given the text."""
    bridge = bridge_of(session)
    kinds = [bridge.plan_class(name) for name in ("Command", "ParsedStatement")]

    def visit(plan: Java) -> None:
        if any(kind.isInstance(plan) for kind in kinds):
            raise ActionInDefinition(
                f"the definition is a command, {plan.nodeName()}, and not a query",
                why="a view is what a query answers; a command changes something, once",
                fix="give a query: select ...",
            )
        for below in items(plan.children()):
            visit(below)

    visit(session._jsparkSession.sessionState().sqlParser().parsePlan(text))


@contextmanager
def _jobs(session: SparkSession) -> Iterator[Callable[[], bool]]:
    """Give a function that says whether a job was run meanwhile."""
    context = session.sparkContext
    names = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
    before = {name: context.getLocalProperty(name) for name in names}
    group = f"headrace-{uuid.uuid4()}"
    context.setLocalProperty(names[0], group)
    try:
        yield lambda: len(context.statusTracker().getJobIdsForGroup(group)) > 0
    finally:
        for name, value in before.items():
            context.setLocalProperty(name, value)  # type: ignore[arg-type]


# --- refresh="full" -------------------------------------------------------------------------------


@dataclass
class _Whole:
    """The batch reading as a template: whole inputs in, the whole answer out."""

    session: SparkSession
    definition: Definition
    view: str
    names: tuple[str, ...]
    inputs: tuple[pa.Schema, ...]
    output: pa.Schema

    def __call__(self, *batches: pa.RecordBatch) -> pa.RecordBatch:
        tables = {
            name: pa.Table.from_batches([batch]).rename_columns(schema.names)
            for name, schema, batch in zip(self.names, self.inputs, batches, strict=True)
        }
        result = batch_reading(self.session, self.definition, tables, name=self.view)
        if len(result.schema) != len(self.output):
            raise BadDefinition(
                f"the definition gives {len(result.schema)} columns with rows in its inputs, "
                f"and {len(self.output)} without",
                place=place_of(self.definition, self.view),
                why="the columns of a view must not depend on its rows",
                fix="name the columns: a pivot needs its values listed",
            )
        return shaped(whole(result), self.output)


def _full(
    session: SparkSession,
    definition: Definition,
    inputs: Mapping[str, pa.Schema],
    scans: Mapping[int, str],
    plan: Java,
    name: str,
) -> algebra.Node:
    lifter = Lifter(bridge_of(session), dict(scans))
    frames = {
        key: session.createDataFrame([], spark_schema(schema)) for key, schema in inputs.items()
    }
    over = tuple(
        lifter.scan(key, lifter.bridge.attributes(frame._jdf.queryExecution().analyzed().output()))
        for key, frame in frames.items()
    )
    output = lifter.bridge.attributes(plan.output())
    code = definition if isinstance(definition, str) else code_of(inspect.unwrap(definition))
    about = lifter.about(
        output, ("full", code, [node.fingerprint for node in over]), "refresh=full"
    )
    schemas = tuple(
        pa.schema([field.with_name(name) for field, name in zip(n.columns, n.names, strict=True)])
        for n in over
    )
    compute = _Whole(session, definition, name, tuple(inputs), schemas, about["columns"])
    return algebra.Full(over=over, compute=compute, **about)


# --- the self-test --------------------------------------------------------------------------------

PROBED = pa.schema([("k", pa.int64()), ("x", pa.decimal128(9, 2)), ("s", pa.string())])
PROBES = {
    "select k, upper(s) from a where x > 1": "Scan Stateless",
    "select a.k, b.s from a left join a b on a.k = b.k and a.x < b.x": "Scan Stateless Join",
    "select s, sum(x), avg(x) from a group by s": "Scan Stateless Aggregate",
    "select k from a where x > (select avg(x) from a) and k in (select k from a where s = 'x')": (
        "Scan Stateless Join Aggregate"
    ),
    "select distinct s from a union all select s from a except select s from a": (
        "Scan Stateless Distinct Join"
    ),
}


@functools.cache
def check_reader(session: SparkSession) -> None:
    """Read a few known queries; raises `PlanReaderFailed` if they do not come out as they must."""
    for text, expected in PROBES.items():
        try:
            node = read_definition(session, text, {"a": PROBED}, name="self-test")
            got = {type(each).__name__ for each in node.walk()}
        except Exception as error:
            raise PlanReaderFailed(
                f"Spark {session.version} gives a plan that could not be read", place=text
            ) from error
        if got != set(expected.split()):
            raise PlanReaderFailed(
                f"Spark {session.version} gives a plan that was read differently",
                place=text,
                got=sorted(got),
            )


def rehearse(session: SparkSession) -> None:
    """Do a little of everything, so that the JVM has seen the classes it will need."""
    rows = pa.RecordBatch.from_pylist([{"k": 1, "x": Decimal("2.50"), "s": "x"}], PROBED)
    change = pa.RecordBatch.from_arrays(
        [*rows.columns, pa.array([1], pa.int64())], schema=PROBED.append(algebra.WEIGHT)
    )
    for text in PROBES:
        root = read_definition(session, text, {"a": PROBED})
        for node in root.walk():
            if isinstance(node, algebra.Stateless) and isinstance(node.over[0], algebra.Scan):
                node.template(change)
        batch_reading(session, text, {"a": pa.Table.from_batches([rows])})
