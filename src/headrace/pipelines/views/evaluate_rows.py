"""Rows on their way between Python and the JVM, as Arrow, through files in memory.

Files, because py4j carries bytes as text, and because its answers above 8 KB wait 40 ms for the
kernel's delayed acknowledgement (measured: 48 ms a call instead of 3). They have no name and no
place: whatever happens to this process, nothing is left behind.

**One call.** Each call over py4j is two changes of thread, and where all processors are busy each
of these waits its turn: for six rows 13 calls take 1.4 ms, beside two busy processes 3.2 (mean),
one call 0.7 and 1.9. So what is done with a batch is a method in Java, which the JVM compiles from
its text when it is first needed, with the compiler that Spark has for its own generated code.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import pyarrow as pa

from headrace.errors import ExpressionFailed, SparkFailed
from headrace.pipelines.views.catalyst import Catalyst, Java

T = TypeVar("T")
ROWS_A_BATCH = 1 << 20
ARROW = "org.apache.spark.sql.execution.arrow."


MAPPER = """
import java.io.FileInputStream;
import java.io.FileOutputStream;
import org.apache.spark.sql.execution.arrow.ArrowBatchStreamWriter;
import org.apache.spark.sql.execution.arrow.ArrowConverters$;
import org.apache.spark.sql.types.StructType;
import scala.Function1;
import scala.collection.Iterator;

public class Mapper {
    public static void map(ArrowConverters$ arrow, String given, StructType read,
            java.util.List steps, StructType written, String got) throws Throwable {
        FileInputStream source = new FileInputStream(given);
        FileOutputStream target = new FileOutputStream(got);
        try {
            Iterator first = arrow.fromBatchIterator(
                arrow.getBatchesFromStream(source.getChannel()), read, "UTC", false, false, null);
            Iterator rows = first;
            for (int i = 0; i < steps.size(); i++) rows = rows.map((Function1) steps.get(i));
            AutoCloseable out = (AutoCloseable) arrow.toBatchIterator(
                rows, written, ROWS_A_BATCHL, "UTC", false, false, null);
            try {
                ArrowBatchStreamWriter writer =
                    new ArrowBatchStreamWriter(written, target, "UTC", false, false);
                writer.writeBatches((Iterator) out);
                writer.end();
            } catch (Throwable failed) {
                out.close();
                first.size();  // reads to the end, which gives the memory back
                throw failed;
            }
        } finally {
            target.close();
            source.close();
        }
    }
}
""".replace("ROWS_A_BATCH", str(ROWS_A_BATCH))
"""Sends rows through projections, one after the other; lazily, row by row."""


class _Memory:
    """A file in memory without a name, which the JVM opens through this process's descriptors."""

    def __init__(self, name: str) -> None:
        self._descriptor = os.memfd_create(name)
        self._close = os.close  # still there when the interpreter ends

    @property
    def path(self) -> str:
        """Where this user's processes find it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def clear(self) -> None:
        """Give the memory back."""
        os.ftruncate(self._descriptor, 0)

    def __del__(self) -> None:
        self._close(self._descriptor)


class _Channel(threading.local):
    """What goes to the JVM and what comes back, for each thread."""

    def __init__(self) -> None:
        self.given, self.got = _Memory("headrace-given"), _Memory("headrace-got")


_channel = _Channel()


class Converter:
    """Moves rows between Python and the JVM, as Arrow, through files."""

    def __init__(self, bridge: Catalyst) -> None:
        self._arrow = bridge.scala_object(ARROW + "ArrowConverters")
        self._input = bridge.java_class("java.io.FileInputStream")
        self._bridge = bridge
        self._session = bridge.session._jsparkSession

    def map(self, batch: pa.RecordBatch, struct: Java, steps: Java, result: Java) -> pa.RecordBatch:
        """Send rows through these projections (a list in the JVM), one after the other."""
        given, got = self._write(batch), _channel.got
        try:
            self._bridge.compiled("Mapper", MAPPER).map(
                self._arrow, given, struct, steps, result, got.path
            )
            with open(got.path, "rb") as source:
                content = source.read()
        finally:
            _channel.given.clear()
            got.clear()
        return whole(pa.ipc.open_stream(content).read_all())

    def relation(self, batch: pa.RecordBatch, struct: Java) -> Java:
        """Give these rows as a plan: local data, or above Spark's threshold an RDD."""
        source = self._input(self._write(batch))
        try:
            batches = self._arrow.getBatchesFromStream(source.getChannel())
            frame = self._arrow.toDataFrame(batches, struct, self._session, "UTC", False, False)
            return frame.queryExecution().analyzed()
        finally:
            source.close()
            _channel.given.clear()

    def _write(self, batch: pa.RecordBatch) -> str:
        path = _channel.given.path
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return path


def whole(table: pa.Table) -> pa.RecordBatch:
    """Make one batch of a table."""
    batches = table.combine_chunks().to_batches()
    if len(batches) == 1:
        return batches[0]
    columns = [pa.array([], column.type) for column in table.columns]
    if batches:
        columns = [pa.concat_arrays(column.chunks) for column in table.columns]
    return pa.RecordBatch.from_arrays(columns, schema=table.schema)


def batch_without_rows(schema: pa.Schema) -> pa.RecordBatch:
    """Make a batch of no rows."""
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)


def shaped(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Give a batch exactly this schema; types that differ in names or nullability only are cast."""
    if batch.schema.equals(schema):
        return batch
    columns = [
        column if column.type.equals(wanted.type) else column.cast(wanted.type)
        for column, wanted in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


STATE = re.compile(r"SQLSTATE: (?!XX)")
"""XX is Spark's own class for what is nobody's fault but its own."""
RAISED = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)*(\S.*(?:\n\S.*)*)")
"""What a Python function raised, with the name of its class, whatever that is."""
TRIES = 4
"""Of what fails by no row's fault. Spark would try a task whose row fails as often, each time in a
new Python worker (measured: 10 s instead of 2 to name a row)."""


def tried(place: str, action: Callable[[], T]) -> T:
    """Do this, and again if Spark has lost a worker over it."""
    for _ in range(TRIES - 1):
        with suppress(SparkFailed), failing(place):
            return action()
    with failing(place):
        return action()


@contextmanager
def failing(place: str) -> Iterator[None]:
    """Turn what Spark says of a row into `ExpressionFailed`, with Spark's message.

    Only that: a JVM without memory, a lost worker or a full disk say nothing about rows, which must
    not be set aside for it; these become `SparkFailed`.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        java = getattr(error, "java_exception", None)
        message = str(error) if java is None else str(java)
        if "Traceback (most recent call last)" in message or STATE.search(message):
            raise _failed(message, place) from error
        raise spark_failed(error, place) from error


def spark_failed(error: Exception, place: str) -> SparkFailed:
    """Name an error of Spark's that is no row's fault; the innermost of several says most."""
    from py4j.protocol import Py4JError

    said, java = str(error), getattr(error, "java_exception", None)
    try:
        while java is not None:
            said, java = str(java.getMessage() or said), java.getCause()
    except Py4JError:  # the JVM is gone
        pass
    return SparkFailed(" ".join(said.split())[:300].rstrip("."), place=place)


def _failed(message: str, place: str) -> ExpressionFailed:
    """Make the error; of a Python function's traceback what it raised is the fact."""
    first = message.strip().partition("\n")[0]
    raised = RAISED.findall(message)
    fact = " ".join(raised[-1].split()) if raised else first
    return ExpressionFailed(fact.rstrip("."), place=place, message=message)
