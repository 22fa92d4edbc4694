"""What DuckDB scans: readings of the log at one position, opened when a query gets to them.

A source declares its columns, and gives a stream of those that a query needs, each time anew: a
query may name a table twice. Batches are read as DuckDB asks for them, so memory is bounded by one
batch, and a query that stops early (`limit 5`) reads no further. Two conditions are not only
DuckDB's: a key that is compared with values is looked up in the index (`where id = 7` reads one
row), and a range of `_position` is read from there, to there.

An error of the log on the way would reach the caller as text inside an error of DuckDB; so it is
kept here, and raised instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import BadPosition, HeadraceError
from headrace.log.embedded.log import EmbeddedLog
from headrace.model.casts import cast
from headrace.model.records import PLACE_FIELDS
from headrace.model.schema import RESERVED
from headrace.model.topic import Topic

Predicate = Any
"""A node of `duckdb._sources.nodes`: `Binary`, `In` over `Col` and `Lit`."""
LOOKED_UP = {"TINYINT", "SMALLINT", "INTEGER", "BIGINT", "VARCHAR", "DATE", "BOOLEAN"}
"""Types of keys whose equality is the same for DuckDB and for the index."""


def outer_type(kind: pa.DataType) -> pa.DataType:
    """A type of the log as DuckDB shall get it: durations as days and the rest.

    DuckDB takes durations too, but gives them back as nanoseconds, which end after 292 years.
    """
    if pa.types.is_duration(kind):
        return pa.month_day_nano_interval()
    if pa.types.is_list(kind):
        return pa.list_(outer_type(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(outer_type(kind.key_type), outer_type(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(outer_type(field.type)) for field in kind])
    return kind


class Source:
    """A reading that can be scanned, any number of times."""

    def __init__(self, fields: Sequence[pa.Field]) -> None:
        """`fields`: the columns, in the types of the log."""
        self.schema = pa.schema([one.with_type(outer_type(one.type)) for one in fields])
        self.opened = False
        self.failed: HeadraceError | None = None

    def batches(self, names: list[str], filters: Sequence[Predicate]) -> Iterator[pa.RecordBatch]:
        """Rows for which all `filters` hold, with at least the columns `names`."""
        raise NotImplementedError

    def accepts(self, predicate: Predicate) -> bool:
        """Whether `batches` gives only rows for which it holds."""
        del predicate
        return False

    def reader(
        self, names: list[str] | None = None, filters: Sequence[Predicate] = ()
    ) -> pa.RecordBatchReader:
        """The rows, these columns only."""
        names = self.schema.names if names is None else names
        schema = pa.schema([self.schema.field(name) for name in names])
        return pa.RecordBatchReader.from_batches(schema, self._cast(schema, filters))

    def _cast(self, schema: pa.Schema, filters: Sequence[Predicate]) -> Iterator[pa.RecordBatch]:
        self.opened = True
        try:
            for batch in self.batches(schema.names, filters):
                arrays = [cast(batch.column(one.name), one.type) for one in schema]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        except HeadraceError as error:
            self.failed = error
            raise

    def __arrow_c_schema__(self) -> object:
        """For whoever scans it: the columns, without reading."""
        return self.schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """For whoever scans it: all rows and columns."""
        return self.reader().__arrow_c_stream__(requested_schema)


class Rows(Source):
    """The rows of a topic through a position; those of older schema generations do not count."""

    def __init__(self, log: EmbeddedLog, topic: Topic, at: int, *, places: bool) -> None:
        """`places`: with `_position`, `_offset` and so on."""
        super().__init__([*topic.schema.arrow, *(PLACE_FIELDS if places else [])])
        self._log, self._topic, self._at = log, topic, at

    def batches(self, names: list[str], filters: Sequence[Predicate]) -> Iterator[pa.RecordBatch]:
        """Read them."""
        topic, places = self._topic, {one.name for one in PLACE_FIELDS}
        since = self._log.since_of(topic.name)
        if self._at < since:
            raise BadPosition(
                f"topic '{topic.name}' cannot be read at {self._at}",
                place=f"topic '{topic.name}'",
                why=f"it is whole from position {since} to {self._log.position}",
            )
        after, through = 0, self._at
        for one in _each(filters):
            low, high = _bounds(one)
            after, through = max(after, low), min(through, high)
        if after >= through:
            return
        own = [name for name in names if name not in places]
        begin = after if after >= since else 0  # before it rows are gone: with what there is
        reading = self._log.read(topic.name, after=begin or None, through=through, columns=own)
        versions = topic.schemas
        for batch in reading:
            if batch.schema_version > len(versions):  # altered since the query began
                versions = self._log.topic(topic.name).schemas
            if versions[batch.schema_version - 1].generation != topic.schema.generation:
                continue
            arrays = [
                batch.place(name) if name in places else batch.data.column(name) for name in names
            ]
            made = pa.RecordBatch.from_arrays(arrays, names)
            yield made if begin == after else made.filter(pc.greater(batch.positions, after))

    def accepts(self, predicate: Predicate) -> bool:
        """Comparisons of `_position` with numbers."""
        return all(
            getattr(getattr(one, "left", None), "parts", ()) == ("_position",)
            and one.op in ("=", "<", "<=", ">", ">=")
            and isinstance(getattr(one.right, "value", None), int)
            for one in _each([predicate])
        )


def _each(predicates: Sequence[Predicate]) -> Iterator[Predicate]:
    """All that must hold, one by one."""
    for one in predicates:
        if getattr(one, "op", "") == "AND":
            yield from _each([one.left, one.right])
        else:
            yield one


def _bounds(predicate: Predicate) -> tuple[int, int]:
    """The positions p that satisfy it, as after < p <= through."""
    value, last = predicate.right.value, (1 << 63) - 1
    bounds = {
        "=": (value - 1, value),
        "<": (0, value - 1),
        "<=": (0, value),
        ">": (value, last),
        ">=": (value - 1, last),
    }
    return bounds[predicate.op]


class Keyed(Source):
    """The rows of a topic by key, at a position."""

    def __init__(self, log: EmbeddedLog, topic: Topic, at: int) -> None:
        """Nothing is read yet."""
        super().__init__([one for one in topic.schema.arrow if one.name not in RESERVED])
        self._log, self._topic, self._at = log, topic, at

    def batches(self, names: list[str], filters: Sequence[Predicate]) -> Iterator[pa.RecordBatch]:
        """Scan the table, or look keys up."""
        table = self._log.table(self._topic.name)
        if not filters:
            yield from table.scan(at=self._at, columns=names)
            return
        keys = set.intersection(*(set(_values(one) or ()) for one in filters))
        found = table.get(sorted(keys), at=self._at, columns=names)
        yield from found.to_batches()

    def accepts(self, predicate: Predicate) -> bool:
        """`key = value` and `key in (values)`."""
        column = getattr(predicate, "left", None) or getattr(predicate, "operand", None)
        parts = getattr(column, "parts", ())
        return len(self._topic.key) == 1 and parts == self._topic.key and bool(_values(predicate))


def _values(predicate: Predicate) -> list[Any] | None:
    """The values that a column is said to have; None if it is said in another way."""
    values = getattr(predicate, "values", None)
    if values is None and getattr(predicate, "op", "") == "=":
        values = [predicate.right]
    if values is None or any(getattr(one, "type", "") not in LOOKED_UP for one in values):
        return None
    return [one.value for one in values]


def register(connection: Any, name: str, source: Source) -> None:
    """Make a source a table of a DuckDB connection.

    DuckDB's public way takes any object that exports an Arrow stream, but asks it for all columns.
    The way by which it reads its own sources says which columns and conditions are wanted; it is
    not public yet, so where a version does not have it, the public one does.
    """
    try:
        from duckdb._sources import ArrowScanSource
    except ImportError:
        connection.register(name, source)
        return
    connection._register_arrow_source(name, _pushing(ArrowScanSource)(source))


def _pushing(base: Any) -> Callable[[Source], Any]:
    class Pushing(base):  # type: ignore[misc]
        """A source whose columns and conditions are chosen by the query."""

        schema_is_stable = True

        def accepts(self, predicate: Predicate) -> bool:
            accepted: bool = self.obj.accepts(predicate)
            return accepted

        def stream(
            self, columns: Sequence[int] | None, filters: Sequence[Predicate]
        ) -> tuple[object, bool]:
            names = None if columns is None else [self.obj.schema.names[i] for i in columns]
            return self.obj.reader(names, filters).__arrow_c_stream__(), names is not None

        def __arrow_c_schema__(self) -> object:
            return self.obj.__arrow_c_schema__()

    made: Callable[[Source], Any] = Pushing
    return made
