"""The door for rows: whatever a caller has, one record batch of the topic's exact schema comes out.

Taken are a dict (one row), a list or any iterable of dicts, record batches and tables of Arrow,
DataFrames of pandas and Polars, readers, and everything else with ``__arrow_c_stream__`` or
``__arrow_c_array__``. Columns may come in any order; a nullable column may be missing, unless it is
part of the key (a key that is null is said so); an unknown column is an error, not dropped. Values
are converted only where nothing is lost (`values` says how for Python's, `casts` for Arrow's). All
rows are taken, or none: the first problem is raised with its column, its row (counted from 0 in
what was given) and its value.

Arrow in memory is believed to be valid, as everywhere: call ``validate(full=True)`` first on what
was read from a file or a socket (`headrace topic append` does).

In what comes from pandas, NaN, NaT, NA and None all mean null, also in columns of floats, because
pandas itself does not tell them apart; a named index is a column, an unnamed one is left out. In
dicts and Arrow, NaN is a value.

Topics of opaque values have the columns ``key`` and ``value``: see `opaque_rows`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import BadRows, BadSchema, MissingKey, WrongColumn, nearest
from headrace.model.casts import cast, has_required_inside, refuse_nulls_inside, value_text
from headrace.model.values import ARROW_ERRORS, Refusal, from_values, shown

_NO_DEFAULTS: Mapping[str, object] = {}
_ACCEPTED = "give dicts, a pyarrow RecordBatch or Table, or a pandas or Polars DataFrame"


class ArrowStream(Protocol):
    """Anything that gives Arrow data through the C stream interface."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Give a capsule with an ArrowArrayStream."""


class ArrowArray(Protocol):
    """Anything that gives Arrow data through the C array interface."""

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        """Give capsules with an ArrowSchema and an ArrowArray."""


Rows = Mapping[str, object] | Iterable[Mapping[str, object]] | ArrowStream | ArrowArray
"""What can be appended to a typed topic."""


class Intake:
    """The way into one schema, prepared once; call it with rows, get a record batch.

    ``place`` stands in errors, e.g. ``"topic 'clicks'"``. ``defaults`` has values for columns that
    are missing (not for values that are null), e.g. ``{"_weight": 1}``; ``key`` names columns that
    no row may leave out. A record batch that has
    the schema already is given back itself. Raises `WrongColumn`, `WrongType`, `MissingKey` or
    `BadRows`.
    """

    __slots__ = ("_defaults", "_fields", "_key", "_names", "deep", "place", "required", "schema")

    def __init__(
        self,
        schema: pa.Schema,
        *,
        place: str,
        defaults: Mapping[str, object] = _NO_DEFAULTS,
        key: Sequence[str] = (),
    ) -> None:
        self.schema = schema
        self.place = place
        self._fields = [(field.name, field.type, field.nullable) for field in schema]
        self._names = frozenset(schema.names)
        self.required = tuple(i for i, field in enumerate(self._fields) if not field[2])
        self.deep = tuple(i for i, f in enumerate(self._fields) if has_required_inside(f[1]))
        self._defaults = defaults
        self._key = frozenset(key)

    def __call__(self, rows: Rows) -> pa.RecordBatch:
        """Take rows in; all or none."""
        if isinstance(rows, pa.RecordBatch):
            if rows.schema.equals(self.schema, check_metadata=True):
                self._check_nulls(rows)
                return rows
            return self._from_arrow(rows)
        if isinstance(rows, list):
            return self._from_dicts(rows)
        if isinstance(rows, Mapping):
            return self._from_dicts([rows])
        if isinstance(rows, pa.Table):
            return self._from_arrow(rows)
        pandas = sys.modules.get("pandas")
        if pandas is not None and isinstance(rows, pandas.DataFrame):
            return self._from_pandas(rows)
        arrow = _imported(rows, self.place)
        if arrow is not None:
            return self._from_arrow(arrow)
        if isinstance(rows, str | bytes | bytearray) or not isinstance(rows, Iterable):
            fix = _ACCEPTED
            if type(rows).__name__ == "LazyFrame":
                fix = "call .collect() first"
            fact = f"{type(rows).__name__} is not rows"
            raise BadRows(fact, place=self.place, fix=fix)
        return self._from_dicts(list(rows))

    # --- dicts ------------------------------------------------------------------------------------

    def _from_dicts(self, rows: Sequence[Any]) -> pa.RecordBatch:
        names = self._names
        for index, row in enumerate(rows):
            if type(row) is not dict and not isinstance(row, Mapping):
                fact = f"row {index} is a {type(row).__name__}, not a dict"
                place = f"{self.place}, row {index}"
                raise BadRows(fact, place=place, fix=_ACCEPTED, row=index)
            if not names.issuperset(row):
                self._unknown(next(name for name in row if name not in names), index)
        arrays = []
        for name, arrow, _ in self._fields:
            default = self._defaults.get(name)
            column = self._from_values(name, [row.get(name, default) for row in rows], arrow)
            if column.null_count and name in self._key:
                for index, row in enumerate(rows):
                    if name not in row:
                        self._no_key(name, index)
            arrays.append(column)
        return self._batch(arrays)

    def _from_values(self, name: str, values: list[Any], arrow: pa.DataType) -> pa.Array:
        try:
            return from_values(values, arrow)
        except Refusal as refusal:
            value = values[refusal.index] if refusal.index is not None else None
            self._refuse(name, refusal, shown(value))

    # --- Arrow ------------------------------------------------------------------------------------

    def _from_arrow(self, rows: pa.RecordBatch | pa.Table) -> pa.RecordBatch:
        names = rows.schema.names
        return self._from_columns(dict(zip(names, rows.columns, strict=True)), names, rows.num_rows)

    def _from_columns(
        self, columns: Mapping[str, Any], names: Sequence[str], count: int, *, pandas: bool = False
    ) -> pa.RecordBatch:
        if len(columns) != len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise BadRows(f"column '{twice}' comes twice", place=self.place, fix="rename one")
        for name in names:
            if name not in self._names:
                self._unknown(name, None)
        arrays = []
        for name, arrow, _ in self._fields:
            column = columns.get(name)
            if column is None:
                arrays.append(self._missing(name, arrow, count))
            elif isinstance(column, list):  # Python objects, out of pandas
                arrays.append(self._from_values(name, column, arrow))
            else:
                arrays.append(self._cast(name, column, arrow, pandas))
        return self._batch(arrays)

    def _missing(self, name: str, arrow: pa.DataType, count: int) -> pa.Array:
        """Fill a column that is not there; `_batch` refuses the nulls where none may be."""
        if name in self._defaults:
            return pa.repeat(pa.scalar(self._defaults[name], arrow), count)
        if name in self._key and count:
            self._no_key(name, None)
        if self.schema.field(name).nullable:
            return pa.nulls(count, arrow)
        raise MissingKey(
            f"column '{name}' is missing, and may not be null",
            place=f"{self.place}, column '{name}'",
            fix="add the column to the rows",
            column=name,
        )

    def _cast(self, name: str, column: Any, arrow: pa.DataType, pandas: bool) -> pa.Array:
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
            if isinstance(column, pa.ChunkedArray):
                fact = f"column '{name}' does not fit one batch"
                raise BadRows(fact, place=self.place, fix="append fewer rows at a time")
        if pandas and column.null_count == len(column):  # floats, whatever was meant to come
            return pa.nulls(len(column), arrow)
        try:
            return cast(column, arrow, floats_to_integers=pandas)
        except Refusal as refusal:
            index = refusal.index
            self._refuse(name, refusal, "" if index is None else value_text(column, index))

    # --- pandas -----------------------------------------------------------------------------------

    def _from_pandas(self, frame: Any) -> pa.RecordBatch:
        """Take a DataFrame column by column; columns of objects as if they came in dicts."""
        if any(name is not None for name in frame.index.names):
            unnamed = [i for i, name in enumerate(frame.index.names) if name is None]
            if unnamed:
                frame = frame.droplevel(unnamed)
            try:
                frame = frame.reset_index()
            except ValueError as error:
                fix = "call .reset_index(drop=True) first"
                raise BadRows(f"index and columns: {error}", place=self.place, fix=fix) from error
        names = [str(name) for name in frame.columns]
        columns: dict[str, Any] = {}
        for position, name in enumerate(names):
            series = frame.iloc[:, position]
            if series.dtype == object:
                missing = series.isna()
                columns[name] = [
                    None if gone else value
                    for value, gone in zip(series.tolist(), missing.tolist(), strict=True)
                ]
                continue
            try:
                columns[name] = pa.array(series, from_pandas=True)
            except ARROW_ERRORS as error:
                fact = f"column '{name}' of {series.dtype} does not convert to Arrow"
                raise BadRows(fact, place=self.place, why=str(error), column=name) from error
        return self._from_columns(columns, names, len(frame), pandas=True)

    # --- the end of all ways ----------------------------------------------------------------------

    def _batch(self, arrays: list[pa.Array]) -> pa.RecordBatch:
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        self._check_nulls(batch)
        return batch

    def _check_nulls(self, batch: pa.RecordBatch) -> None:
        for position in self.required:
            column = batch.column(position)
            if column.null_count:
                name = self._fields[position][0]
                row = pc.index(column.is_null(), True).as_py()
                raise MissingKey(
                    f"column '{name}' is null in row {row}, and may not be",
                    place=f"{self.place}, column '{name}', row {row}",
                    column=name,
                    row=row,
                )
        for position in self.deep:
            try:
                refuse_nulls_inside(batch.column(position))
            except Refusal as refusal:
                self._refuse(self._fields[position][0], refusal, "null")

    def _refuse(self, name: str, refusal: Refusal, value: str) -> NoReturn:
        where = f"column '{name}'"
        if refusal.path:
            where += f" ({f'{name}.{refusal.path}'.replace('.[', '[')})"
        if refusal.index is not None:
            where += f", row {refusal.index}"
        raise refusal.kind(
            f"{refusal.fact}",
            place=f"{self.place}, {where}",
            why=refusal.why,
            fix=refusal.fix,
            column=name,
            row=refusal.index,
            value=value,
        ) from refusal.__cause__

    def _no_key(self, name: str, row: int | None) -> NoReturn:
        where = f"column '{name}'" if row is None else f"column '{name}', row {row}"
        raise MissingKey(
            f"column '{name}' is missing, and is part of the key",
            place=f"{self.place}, {where}",
            fix="fill it in; a key that is null is said as null",
            column=name,
            row=row,
            absent=True,
        )

    def _unknown(self, name: object, row: int | None) -> NoReturn:
        where = f"column '{name}'" if row is None else f"column '{name}', row {row}"
        columns = ", ".join(self.schema.names)
        raise WrongColumn(
            f"there is no column '{name}'",
            place=f"{self.place}, {where}",
            fix=nearest(str(name), self._names) or f"the columns are {columns}",
            column=str(name),
            row=row,
        )


def _imported(rows: Any, place: str) -> pa.RecordBatch | pa.Table | None:
    """Take what offers itself through the Arrow C interfaces; None if it does not."""
    try:
        if hasattr(rows, "__arrow_c_stream__"):
            return pa.RecordBatchReader.from_stream(rows).read_all()
        if hasattr(rows, "__arrow_c_array__"):
            return pa.record_batch(rows)
    except ARROW_ERRORS as error:
        fact = f"{type(rows).__name__} does not give rows"
        raise BadRows(fact, place=place, why=str(error), fix=_ACCEPTED) from error
    return None


# --- opaque values --------------------------------------------------------------------------------

_OPAQUE: dict[str, tuple[pa.DataType, type]] = {
    "bytes": (pa.binary(), bytes),
    "json": (pa.string(), str),
    "text": (pa.string(), str),
}


def opaque_schema(kind: str) -> pa.Schema:
    """Give the columns of a topic of ``bytes``, ``json`` or ``text``: ``key`` and ``value``."""
    if kind not in _OPAQUE:
        fix = nearest(kind, _OPAQUE) or "use 'bytes', 'json' or 'text'"
        raise BadSchema(f"there are no opaque values of kind '{kind}'", fix=fix)
    arrow = _OPAQUE[kind][0]
    return pa.schema([("key", arrow), ("value", arrow)])


def opaque_rows(kind: str, rows: Any, *, place: str = "") -> pa.RecordBatch:
    """Make a batch of opaque values, with the columns of `opaque_schema`.

    A tuple ``(key, value)`` is a row with a key; anything else is a value without one. Lists and
    other iterables hold many rows; a single value or tuple is one. Arrow and DataFrames with the
    columns ``key`` and ``value`` are taken as they are.

    For ``json`` a Python value is encoded (a str becomes a JSON string); bytes, and text in Arrow
    or a DataFrame, are JSON already and must be valid. None is no value: null, not ``null``.
    """
    schema = opaque_schema(kind)
    intake = Intake(schema, place=place or f"{kind} values")
    if is_columnar(rows):
        batch = intake(rows)
        if kind == "json":
            _check_json(batch.column(1), intake)
        return batch
    keys: list[Any] = []
    values: list[Any] = []
    for row in [rows] if is_one(rows) else rows:
        keyed = isinstance(row, tuple)
        if keyed and len(row) != 2:
            fact = f"row {len(keys)} is a tuple of {len(row)}, not (key, value)"
            raise BadRows(
                fact, place=intake.place, fix="use a list for a JSON array", row=len(keys)
            )
        keys.append(row[0] if keyed else None)
        values.append(row[1] if keyed else row)
    if kind == "json":
        values = [_encoded(value, row, intake) for row, value in enumerate(values)]
    arrow = schema.field(0).type
    arrays = [intake._from_values("key", keys, arrow), intake._from_values("value", values, arrow)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def is_columnar(rows: Any) -> bool:
    """Whether rows come in columns: Arrow, or a DataFrame."""
    pandas = sys.modules.get("pandas")
    return (
        hasattr(rows, "__arrow_c_stream__")
        or hasattr(rows, "__arrow_c_array__")
        or (pandas is not None and isinstance(rows, pandas.DataFrame))
    )


def is_one(rows: Any) -> bool:
    """Whether this is one row, of columns or opaque, and not a list or another iterable of them."""
    single = (str, bytes, bytearray, memoryview, tuple, Mapping)
    return isinstance(rows, single) or not isinstance(rows, Iterable)


def _refused_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_decode = json.JSONDecoder(parse_constant=_refused_constant, parse_int=str, parse_float=str).decode
_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode


def _encoded(value: Any, row: int, intake: Intake) -> str | None:
    if value is None:
        return None
    try:
        if isinstance(value, bytes):
            text = value.decode()
            _decode(text)
            return text
        return _encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        fact = f"{shown(value)} is not JSON"
        refusal = Refusal(fact, index=row, why=str(error), fix="give a value that JSON can hold")
        intake._refuse("value", refusal, shown(value))


def _check_json(column: pa.Array, intake: Intake) -> None:
    for row, text in enumerate(column.to_pylist()):
        if text is None:
            continue
        try:
            _decode(text)
        except (ValueError, RecursionError) as error:
            refusal = Refusal(f"{shown(text)} is not JSON", index=row, why=str(error))
            intake._refuse("value", refusal, shown(text))
