"""A pipeline: inputs and views, as a file of plain Python defines them. Nothing runs here.

    import headrace as hr
    from pyspark.sql import functions as F

    shop = hr.Pipeline("shop")
    shop.table("orders", of="shop.public.orders")

    @shop.view(key="country")
    def revenue(orders):
        return orders.groupBy("country").agg(F.sum("amount").alias("revenue"))

    shop.run(log, until="caught up")
    shop.rows("revenue")

Parameters of a view are inputs or other views, by name. Definitions register; `run` reads them,
keeps them right, and returns when it is told to.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from headrace import errors
from headrace.interfaces import Kept, TargetDescriptor

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from headrace.log.embedded.log import EmbeddedLog

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
WORD = re.compile(r"[A-Za-z0-9_]+")
REFRESH = ("incremental", "full")
ON_ERROR = ("stop", "set_aside")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Input:
    """A topic under the name by which views know it."""

    name: str
    topic: str
    kind: str
    """`table` (a changelog) or `stream` (append-only)."""


@dataclass(frozen=True)
class View:
    """A definition, as it was registered."""

    name: str
    definition: Callable[..., Any] | str
    """A function of frames, or SQL."""
    reads: tuple[str, ...] | None
    """The inputs and views it names; None: SQL, which may read everything before it."""
    key: tuple[str, ...]
    refresh: str
    on_error: str
    place: str
    """File and line."""

    def among(self, known: Iterable[str]) -> list[str]:
        """What it reads of all that is there: of SQL, what its text names in whatever case."""
        if self.reads is not None:
            return list(self.reads)
        words = {word.lower() for word in WORD.findall(str(self.definition))}
        return [name for name in known if name.lower() in words]

    @property
    def said(self) -> str:
        """Its name in messages about its definition; SQL has no lines of its own to be found by."""
        return f"{self.name}, {self.place}" if isinstance(self.definition, str) else self.name


class Pipeline:
    """Inputs and views that are kept together: all of them are always through one position."""

    def __init__(self, name: str, *, memory_bytes: int | None = None) -> None:
        """`name` is the first part of the names of its topics.

        `memory_bytes` bounds what a driver of it holds, however it is run (None: 512 MB).
        """
        self.name = _checked(name, "a pipeline")
        self.memory_bytes = memory_bytes
        self.inputs: dict[str, Input] = {}
        self.views: dict[str, View] = {}
        self.kept: dict[str, Kept] = {}
        self._log: EmbeddedLog | None = None

    def __repr__(self) -> str:
        """What it has."""
        return f"<pipeline {self.name}: {len(self.inputs)} inputs, {len(self.views)} views>"

    # -- definitions ------------------------------------------------------------------------

    def table(self, name: str, *, of: str | None = None) -> None:
        """An input that follows a `changes` topic row by row: `of`, else the topic of that name."""
        self._new(name, "an input")
        self.inputs[name] = Input(name, of or name, "table")

    def stream(self, name: str, *, of: str | None = None, **later: Any) -> None:
        """An input that only gains rows: an `events` topic."""
        self._new(name, "an input")
        if later:
            raise errors.NotKept(
                f"{', '.join(sorted(later))} of a stream is not kept yet",
                place=f"stream '{name}'",
                why="lateness, and state that is dropped by time, are not built",
                fix="leave it out: the view then keeps all of its state, and no row is late",
            )
        self.inputs[name] = Input(name, of or name, "stream")

    def view(
        self,
        name: str | None = None,
        *,
        key: str | Sequence[str] = (),
        sql: str | None = None,
        refresh: str = "incremental",
        on_error: str = "stop",
    ) -> Callable[[Function], Function]:
        """Register a view: as a decorator of a function of frames, or at once with `sql`.

        `key`: columns that are unique; without, the whole row is the key. `refresh="full"` computes
        the view anew in every batch, for what cannot be kept. `on_error="set_aside"` puts rows that
        make the definition fail aside, with the reason, instead of stopping.
        """
        keys = (key,) if isinstance(key, str) else tuple(key)
        _among(refresh, REFRESH, "refresh")
        _among(on_error, ON_ERROR, "on_error")

        def register(function: Function) -> Function:
            own = name or str(getattr(function, "__name__", ""))
            self._new(own, "a view")
            code = getattr(inspect.unwrap(function), "__code__", None)
            known = {*self.inputs, *self.views}
            asked = inspect.signature(function).parameters.values()
            self.views[own] = View(
                own,
                function,
                tuple(p.name for p in asked if p.default is p.empty or p.name in known),
                keys,
                refresh,
                on_error,
                f"{code.co_filename}:{code.co_firstlineno}" if code else own,
            )
            return function

        if sql is None:
            return register
        if name is None:
            raise errors.BadPipeline("a view by sql= needs a name", place=self.name)
        self._new(name, "a view")
        frame = inspect.stack()[1]
        place = f"{frame.filename}:{frame.lineno}"
        self.views[name] = View(name, sql, None, keys, refresh, on_error, place)
        return register

    def keep(self, *names: str, in_: TargetDescriptor, name: str | None = None) -> None:
        """Have inputs and views kept in a target: one follower, all of them move together.

        A table is named as the last part of its topic. `name` is the follower's; the first one of
        a pipeline is `main`. They are defined before they are kept.
        """
        own = name or ("main" if not self.kept else f"kept{len(self.kept) + 1}")
        _checked(own, "what is kept")
        if not hasattr(in_, "open"):
            raise errors.BadPipeline(
                f"in_={in_!r} is not a target",
                place=self.name,
                fix='in_=hr.Table("postgresql://...") or in_=hr.SQLite("file.db")',
            )
        if own in self.kept:
            raise errors.BadPipeline(
                f"'{own}' is kept already", place=self.name, fix="give this one another name="
            )
        topics: dict[str, str] = {}
        views: set[str] = set()
        for one in names:
            if one not in self.inputs and one not in self.views:
                known = [*self.inputs, *self.views]
                raise errors.BadPipeline(
                    f"'{one}' cannot be kept: it is no input and no view",
                    place=self.name,
                    why=f"inputs and views are {', '.join(known) or 'none'}",
                    fix=errors.nearest(one, known) or "define it before it is kept",
                )
            topic = self.inputs[one].topic if one in self.inputs else f"{self.name}.{one}"
            table = topic.rpartition(".")[2]
            if table in topics:
                raise errors.BadPipeline(
                    f"table '{table}' would be kept twice, of {topics[table]} and {topic}",
                    place=self.name,
                    fix="keep one of them by another keep(..., name=...), in another schema=",
                )
            topics[table] = topic
            if one in self.views:
                views.add(topic)
        if not topics:
            raise errors.BadPipeline("nothing to keep is named", place=self.name)
        self.kept[own] = Kept(self.name, own, topics, frozenset(views), in_)

    def _new(self, name: str, what: str) -> None:
        _checked(name, what)
        same = [one for one in (*self.inputs, *self.views) if one.lower() == name.lower()]
        if same:  # SQL takes them for one, whatever their case
            raise errors.BadPipeline(f"'{same[0]}' is there already", place=self.name)

    def in_order(self) -> Iterator[View]:
        """The views, each after those it reads."""
        done: list[str] = []

        def visit(view: View, path: tuple[str, ...]) -> Iterator[View]:
            if view.name in done:
                return
            if view.name in path:
                circle = " -> ".join([*path[path.index(view.name) :], view.name])
                raise errors.BadPipeline(f"views read each other: {circle}", place=view.place)
            for name in view.reads or ():
                if name in self.views:
                    yield from visit(self.views[name], (*path, view.name))
                elif name not in self.inputs:
                    known = [*self.inputs, *self.views]
                    raise errors.BadPipeline(
                        f"view '{view.name}' reads '{name}', which is not there",
                        place=view.place,
                        why=f"inputs and views are {', '.join(known) or 'none'}",
                        fix=errors.nearest(name, known) or f"declare it: .table('{name}', of=...)",
                    )
            done.append(view.name)
            yield view

        for view in self.views.values():
            yield from visit(view, ())

    # -- running ----------------------------------------------------------------------------

    def run(
        self,
        log: EmbeddedLog,
        *,
        until: str | int | None = None,
        spark: SparkSession | None = None,
        **options: Any,
    ) -> int:
        """Keep the views right; the position they are through when it returns.

        `until`: "caught up" (everything that is in the log now), a position, or None: for ever,
        woken by each append. `spark`: a session of your own; otherwise one is started. Two runs of
        one pipeline at once: the later one fences the earlier one.
        """
        from headrace.pipelines.views.run import Runner

        self._log = log
        while True:
            with Runner(self, log, spark, **options) as runner:
                try:
                    return runner.run(until)
                except errors.InputChanged:  # once more, with the columns that it has now
                    options.pop("defined", None)

    def _of(self, log: EmbeddedLog | None) -> EmbeddedLog:
        found = log or self._log
        if found is None:
            raise errors.BadPipeline(
                "the pipeline has not run", place=self.name, fix="give log=, or call run first"
            )
        return found

    def rows(self, name: str, *, at: int | None = None, log: EmbeddedLog | None = None) -> pa.Table:
        """The rows of a view as visible at a position of the log, waiting for it (None: now)."""
        from headrace.pipelines.views.reading import rows_of

        return rows_of(self._of(log), self.name, name, at)

    @property
    def through(self) -> int:
        """The input position that the views are right for; 0 before the first commit."""
        from headrace.pipelines.views.reading import status_of

        return status_of(self._of(None), self.name).through


def _checked(name: str, what: str) -> str:
    if not NAME.fullmatch(name):
        raise errors.BadPipeline(
            f"{name!r} cannot be the name of {what}",
            place=name,
            fix="letters, digits and _, not a digit first, at most 64",
        )
    return name


def _among(value: str, allowed: tuple[str, ...], what: str) -> None:
    if value not in allowed:
        raise errors.BadPipeline(f"{what}={value!r} is not one of {', '.join(allowed)}", place=what)
