"""Verify: prove that two things are equal, name the keys that are not; repair only these (R-B7).

======== =========================================== =============================================
against  what is checked                             what it must equal, and when
======== =========================================== =============================================
log      a table that a follower keeps in a target   the log's table at the target's own cut
source   the topic of a captured table               the table in the database at a known LSN
batch    the topic of a view                         its definition run by Spark, on the tables at
                                                     the position that the view is through
======== =========================================== =============================================

Nothing is stopped for it. A target is read in one snapshot together with its cut, and what the log
holds at a cut never changes; the database is read in chunks (`verify_source`); of a view the newest
commit is taken. What was found goes to the topic `_verified`: verified through P, at T, N rows.

**Repair** writes the right rows of the keys that differ, by the target's own `apply` at the cut
that it is at: the epoch and the cut are checked under the lock under which a follower works, so it
goes on undisturbed, and when it was quicker the values are taken from the log anew. Before a row is
changed, key, old and new row are in the topic `_repairs`. If a repair dies in between, the topic
tells of a repair that did not happen, never the other way round, and the next one does it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace import errors
from headrace.clock import SystemClock
from headrace.derived import aside
from headrace.derived.rows import MANY, WEIGHT, current, expected, row_ids
from headrace.derived.verify import COPIES, MISSING, MULTISET, Comparison, Found, as_multiset
from headrace.interfaces import Changes, Cut, Kept, KeptTable, Refused, Target
from headrace.log.tail import last_rows
from headrace.model.hashing import hash64
from headrace.model.json_values import json_values
from headrace.tables.keyed import key_words
from headrace.tables.runs import sorted_order, take_rows

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog
    from headrace.pipelines.pipeline import Pipeline

LIMIT = 100
"""So many keys are named; all are counted."""
HISTORY = 5
"""So many positions that touched a key are named, the newest."""
BATCH_DIGITS = 1e-9
"""Spark's sums of floats depend on the order in which its tasks ran: they may differ by so much."""
REPAIR_ROWS = 5000
TRIES = 200
"""So often a follower may be quicker than a repair."""
VERIFIED = "_verified"
VERIFIED_COLUMNS = (
    "name string, table string, against string, through bigint, position bigint, rows bigint,"
    " differing bigint, aside bigint, repaired bigint, seconds double"
)
REMEMBERED = 1000
"""So many verifications are looked at for the last of each."""
REPAIRS = "_repairs"
REPAIRS_COLUMNS = (
    "name string, table string, key string, before string, after string, through bigint"
)


@dataclass(frozen=True)
class Difference:
    """A key that differs."""

    table: str
    kind: str
    """`changed`, `missing` (it should be there) or `extra` (it should not)."""
    key: dict[str, Any]
    expected: dict[str, Any] | None
    """The row as it should be, as JSON."""
    found: dict[str, Any] | None
    """The row as it is."""
    positions: list[int] = field(default_factory=list)
    """Entries of the log that touched the key, the newest last."""


@dataclass
class Result:
    """What one verification found."""

    name: str
    table: str
    against: str
    through: int = 0
    position: int = 0
    rows: int = 0
    differing: int = 0
    aside: int = 0
    """Rows that are missing since the target refused them: `headrace aside ls`."""
    repaired: int = 0
    seconds: float = 0.0
    at: str = ""
    differences: list[Difference] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return asdict(self)


@dataclass(frozen=True)
class Progress:
    """How far a verification is."""

    table: str
    rows: int
    of: int
    """About how many there are; 0: not known."""
    seconds: float


@dataclass(frozen=True)
class Options:
    """How a verification goes about it."""

    limit: int = LIMIT
    rows_per_second: float | None = None
    """At most so many rows of each side; None: as fast as it goes."""
    report: Callable[[Progress], None] | None = None
    done: Callable[[Result], None] = lambda result: None
    """Called with each result as soon as it is there."""


@dataclass(frozen=True)
class Known:
    """What there is beside the log: a project says it, or a pipeline file."""

    kept: Mapping[str, Kept] = field(default_factory=dict)
    """By the follower's name."""
    pipeline: Callable[[str], Pipeline | None] = lambda name: None
    """A pipeline by its name; reading its file starts Spark."""
    dsns: Mapping[str, str] = field(default_factory=dict)
    """The addresses of captures, with passwords."""


def verify(
    log: EmbeddedLog,
    name: str,
    known: Known,
    *,
    against: str | None = None,
    table: str | None = None,
    repair: bool = False,
    options: Options | None = None,
) -> list[Result]:
    """Verify a follower (`shop/main`), a captured table's topic or a view's (`shop.revenue`).

    `against`: log, source, batch or all; by default log for a follower, source for a captured
    table, batch for a view. With `source` or `batch` a follower stands for the topics it keeps.
    """
    from headrace.pipelines.views.reading import pipelines
    from headrace.runtime.verify_source import topic_of_capture

    kept = known.kept.get(name)
    if kept is None and "/" in name:
        raise errors.CannotVerify(
            f"there is no follower '{name}'",
            place=log.path,
            fix=errors.nearest(name, known.kept) or f"there are {', '.join(known.kept) or 'none'}",
        )
    topics = [name] if kept is None else [t for n, t in kept.topics.items() if table in (None, n)]
    results: list[Result] = []
    done = (options or Options()).done

    def add(result: Result) -> None:
        results.append(result)
        done(result)

    if kept is not None and against in (None, "log", "all"):
        results += verify_kept(log, kept, table=table, repair=repair, options=options)
    for topic in topics:
        log.topic(topic)
        captured = topic_of_capture(log, topic)
        if captured and (against in ("source", "all") or (kept is None and against is None)):
            dsn = known.dsns.get(captured[0])
            add(verify_source(log, *captured, dsn, options=options))
        pipeline, _, view = topic.partition(".")
        status = pipelines(log).get(pipeline)
        is_view = status is not None and bool(status.views.get(view))
        if is_view and (against in ("batch", "all") or (kept is None and against is None)):
            found = known.pipeline(pipeline)
            if found is None:
                raise errors.CannotVerify(
                    f"the definition of view '{topic}' is not known",
                    place=topic,
                    why="a batch reading runs the definition, and that is in a pipeline file",
                    fix="name the file with --file, or do it in the folder of the project",
                )
            add(verify_batch(log, found, view, options=options))
    if not results:
        raise errors.CannotVerify(
            f"'{name}' cannot be held against {against or 'anything'}", place=name
        )
    return results


# --- the three ways -------------------------------------------------------------------------------


def verify_kept(
    log: EmbeddedLog,
    kept: Kept,
    *,
    table: str | None = None,
    repair: bool = False,
    options: Options | None = None,
) -> list[Result]:
    """The tables of a follower against the log; with `repair`, they are put right, and read again.

    After a repair the result is that of the second reading, with how many keys were `repaired`.
    """
    target = kept.target.open(kept.follower)
    results = []
    try:
        for one in _tables(log, kept, target, table):
            differing: list[Found] = []
            held = differing if repair else None
            result = _read_target(log, kept, target, one, options or Options(), held)
            if repair and result.differing:
                count = _repair(log, kept, target, one, differing)
                named = result.differences
                result = _read_target(log, kept, target, one, options or Options(), None, count)
                result.differences = result.differences or named
            results.append(result)
            (options or Options()).done(result)
    finally:
        target.close()
    return results


def verify_source(
    log: EmbeddedLog,
    capture: str,
    table: str,
    dsn: str | None = None,
    *,
    options: Options | None = None,
) -> Result:
    """A captured table's topic against the database."""
    from headrace.runtime.verify_source import SourceComparison

    options = options or Options()
    comparison = SourceComparison(log, capture, table, dsn)
    result = Result(comparison.topic, table, "source")
    running = _Running(result, comparison.key, options)
    comparison.report = lambda: running.pace(comparison.rows, comparison.of)
    for found in comparison:
        running.add(found)
    result.through = result.position = comparison.position
    result.rows = comparison.rows
    return running.done(log, comparison.topic)


def verify_batch(
    log: EmbeddedLog, pipeline: Pipeline, view: str, *, options: Options | None = None
) -> Result:
    """A view against its definition, run as a batch job at the position it is through."""
    from headrace.pipelines.views.batch import batch_rows
    from headrace.pipelines.views.reading import added_up, topic_of

    name = topic_of(pipeline.name, view)
    if view not in pipeline.views:
        raise errors.CannotVerify(
            f"pipeline '{pipeline.name}' has no view '{view}'",
            place=pipeline.name,
            fix=errors.nearest(view, pipeline.views),
        )
    cut = newest_cut(log, pipeline.name, view)
    result = Result(name, view, "batch", cut.through, cut.position)
    topic = log.topic(name)
    running = _Running(result, topic.key, options or Options())
    theirs = added_up(log, name, cut.position)
    ours = batch_rows(pipeline, log, view, cut.through).cast(theirs.schema)
    one, other = (_in_order(side, topic.key) for side in (ours, theirs))
    comparison = Comparison(one, other, topic.key or MULTISET, tolerance=BATCH_DIGITS)
    for found in comparison:
        running.add(found)
    result.rows = max(ours.num_rows, theirs.num_rows)
    return running.done(log, name)


def newest_cut(log: EmbeddedLog, pipeline: str, view: str) -> Cut:
    """The newest commit of a pipeline at which a view is right, and through what."""
    from headrace.pipelines.views.reading import commits_topic

    (end,) = log.ends(commits_topic(log, pipeline))
    for start in range(end - 1, -1, -1):
        for batch in log.read(f"{pipeline}._commits", start):
            row = batch.data.slice(0, 1).to_pylist()[0]
            if view in row["views"]:
                return Cut(row["through"], batch.positions[0].as_py())
            break
    raise errors.CannotVerify(
        f"view '{view}' has not been built yet",
        place=f"{pipeline}.{view}",
        fix="run the pipeline first",
    )


# --- a target -------------------------------------------------------------------------------------


def _tables(log: EmbeddedLog, kept: Kept, target: Target, only: str | None) -> Iterator[KeptTable]:
    """The tables of a follower as the target has them: its columns may be those of an older cut."""
    mark = target.mark()
    if mark.cut is None:
        raise errors.CannotVerify(
            f"'{kept.follower}' has loaded nothing yet", place=kept.follower, fix="run the follower"
        )
    if not log.knows(mark.log, max(mark.cut.through, mark.cut.position)):
        raise errors.OtherLog(f"'{kept.follower}' follows another log", place=kept.follower)
    there = {one.name: one for one in mark.tables}
    if only is not None and only not in kept.topics:
        raise errors.CannotVerify(
            f"'{kept.follower}' keeps no table '{only}'",
            place=kept.follower,
            why=f"it keeps {', '.join(kept.topics)}",
            fix=errors.nearest(only, kept.topics) or "name one of these",
        )
    for name in kept.topics if only is None else [only]:
        if name not in there:
            raise errors.CannotVerify(
                f"'{kept.follower}' has no table '{name}' in its target",
                place=kept.follower,
                why=f"it keeps {', '.join(kept.topics)}, and there are {', '.join(there)}",
                fix="run the follower: it loads what is missing",
            )
        yield there[name]


def _read_target(
    log: EmbeddedLog,
    kept: Kept,
    target: Target,
    table: KeptTable,
    options: Options,
    held: list[Found] | None,
    repaired: int = 0,
) -> Result:
    """Both sides of a table, merged; all that differs is held for a repair."""
    result = Result(kept.follower, table.name, "log", repaired=repaired)
    running = _Running(result, table.key, options)
    mark, theirs = target.read(table)
    assert mark.cut is not None
    result.through, result.position = mark.cut.through, mark.cut.position
    sides: list[Iterable[pa.RecordBatch]] = [expected(log, table, mark.cut), theirs]
    if not table.key:  # a row that was changed by hand is not where it should stand
        sides = [as_multiset(side, table.schema) for side in sides]
    about = last(log).get((kept.follower, table.name, "log"), {}).get("rows", 0)
    comparison = Comparison(sides[0], running.paced(sides[1], about), table.key or MULTISET)
    refused = _refused(log, kept, table)
    for some in comparison:
        found = some
        lacking = _lacking(found)
        if lacking.any():
            refused |= _refused(log, kept, table)
            keys = _key_texts(table, found.rows)
            left = [at for at, key in enumerate(keys) if not (lacking[at] and key in refused)]
            result.aside += len(found) - len(left)
            places = np.array(left, np.int64)
            ours, other = (
                None if one is None else take_rows(one, places)
                for one in (found.ours, found.theirs)
            )
            found = Found(found.kind, ours, other)
        running.add(found)
        if held is not None:
            held.append(found)
    result.rows = max(comparison.rows)
    return running.done(log, table.topic)


def _lacking(found: Found) -> npt.NDArray[np.bool_]:
    """Which of these the target has not, or not as often as it should."""
    if found.ours is None or found.theirs is None:
        return np.full(len(found), found.kind == MISSING)
    if COPIES not in found.ours.schema.names:
        return np.zeros(len(found), bool)
    ours, theirs = (one.column(COPIES).to_numpy() for one in (found.ours, found.theirs))
    less: npt.NDArray[np.bool_] = theirs < ours
    return less


def _key_texts(table: KeptTable, rows: pa.RecordBatch) -> list[str | None]:
    """Keys as they are written where rows are set aside."""
    if table.key:
        return [_text(one) for one in _json_rows(rows.select(list(table.key)))]
    ids = row_ids(rows.select(table.schema.names)).to_pylist()
    return [_text({"_row": one.hex()}) for one in ids]


def _refused(log: EmbeddedLog, kept: Kept, table: KeptTable) -> set[str | None]:
    """Keys of a table that its follower has set aside, as JSON."""
    rows = aside.rows(log, kept.follower)
    return {_text(json.loads(one["key"])) for one in rows if one["table"] == table.name}


def _repair(
    log: EmbeddedLog, kept: Kept, target: Target, table: KeptTable, differing: Sequence[Found]
) -> int:
    """Write what the log has of these keys; how many were taken."""
    log.create_topic(REPAIRS, REPAIRS_COLUMNS, exist_ok=True)
    count = 0
    for found in differing:
        for at in range(0, len(found), REPAIR_ROWS):
            sides = [
                None if side is None else side.slice(at, REPAIR_ROWS)
                for side in (found.ours, found.theirs)
            ]
            some = Found(found.kind, *sides)
            count += len(some) - _repair_rows(log, kept, target, table, some)
    return count


def _repair_rows(
    log: EmbeddedLog, kept: Kept, target: Target, table: KeptTable, found: Found
) -> int:
    """Write what the log has of these keys; how many the target refuses: they are set aside."""
    for number in range(TRIES):
        mark = target.mark()
        assert mark.cut is not None
        if table not in mark.tables:  # `apply` would give it its old columns again
            raise errors.CannotVerify(
                f"table '{table.name}' has got other columns meanwhile",
                place=kept.follower,
                fix="do it again",
            )
        made: list[pa.RecordBatch] = []
        refused: list[Refused] = []

        def refuse(
            found: list[Refused], cut: Cut = mark.cut, refused: list[Refused] = refused
        ) -> None:
            refused += found
            _set_aside(log, kept, found, cut)

        def chunks(
            cut: Cut = mark.cut, made: list[pa.RecordBatch] = made
        ) -> Iterator[pa.RecordBatch]:
            if not made:  # under the target's lock, when it is found to be at this cut
                made += _right(log, table, found, cut)
                log.append(REPAIRS, _trail(kept, table, found, made[-1], cut))
            yield from made

        try:
            target.apply(mark.epoch, mark.cut, [Changes(table, chunks)], refuse)
        except errors.CutPassed:
            time.sleep(0.001 * (number % 7))  # another place in the follower's round each time
            continue
        return len(refused)
    raise errors.CannotVerify(
        f"'{kept.follower}' was quicker than the repair {TRIES} times", place=kept.follower
    )


def _right(log: EmbeddedLog, table: KeptTable, found: Found, cut: Cut) -> list[pa.RecordBatch]:
    """The changes that put these keys right at a cut."""
    rows = found.rows
    if table.key:
        return [current(log, table, pa.Table.from_batches([rows.select(list(table.key))]), cut)]
    own = rows.select(table.schema.names)
    gone = own.append_column(WEIGHT, pa.array(np.full(own.num_rows, -MANY), pa.int64()))
    return [gone, current(log, table, pa.table({"_row": row_ids(own)}), cut)]


def _set_aside(log: EmbeddedLog, kept: Kept, refused: list[Refused], cut: Cut) -> None:
    """As the follower does it, which cannot do so now: the target is locked."""
    new = aside.noted(refused, cut)
    if new:
        topic = aside.ensure(log, kept.follower)
        old = [one for one in aside.rows(log, kept.follower) if (one["table"], one["key"]) in new]
        taken_back = [{**one, "_weight": -1} for one in old]
        log.append(topic, [*taken_back, *({**one, "_weight": 1} for one in new.values())])


def _trail(
    kept: Kept, table: KeptTable, found: Found, change: pa.RecordBatch, cut: Cut
) -> list[dict[str, Any]]:
    """A line for each key: as it was found, and as it is from now on."""
    key = list(table.key) or table.schema.names
    keys = _json_rows(found.rows.select(key))
    before = [None] * len(keys) if found.theirs is None else _json_rows(found.theirs)
    there = change.filter(pa.array(change.column(WEIGHT).to_numpy() > 0))
    rows = _json_rows(there.select(table.schema.names))
    words = (hash64([side.column(k) for k in key], 1).tolist() for side in (there, found.rows))
    of_word = dict(zip(next(words), rows, strict=True))
    after = [of_word.get(word) for word in next(words)]
    common = {"name": kept.follower, "table": table.name, "through": cut.through}
    return [
        common | {"key": _text(one), "before": _text(old), "after": _text(new)}
        for one, old, new in zip(keys, before, after, strict=True)
    ]


def _text(row: dict[str, Any] | None) -> str | None:
    own = {name: value for name, value in (row or {}).items() if name not in MULTISET}
    return None if row is None else json.dumps(own, ensure_ascii=False)


# --- what was found -------------------------------------------------------------------------------


class _Running:
    """A verification under way: counts all differences, and names the first."""

    def __init__(self, result: Result, key: Sequence[str], options: Options) -> None:
        self._result, self._options = result, options
        self._key = list(key)
        self._began = time.monotonic()
        self._named: list[pa.RecordBatch] = []

    def add(self, found: Found) -> None:
        """Count, and name."""
        result = self._result
        result.differing += len(found)
        room = self._options.limit - len(result.differences)
        if room <= 0 or not len(found):
            return
        sides = [None if s is None else s.slice(0, room) for s in (found.ours, found.theirs)]
        some = found.rows.slice(0, room)
        own = [name for name in some.schema.names if name not in MULTISET]
        keys = self._key or [name for name in own if name != COPIES]
        self._named.append(some.select(keys))
        rows = [None if side is None else _json_rows(side.select(own)) for side in sides]
        for at, key in enumerate(_json_rows(some.select(keys))):
            ours, theirs = (None if side is None else side[at] for side in rows)
            result.differences.append(Difference(result.table, found.kind, key, ours, theirs))

    def pace(self, rows: int, of: int) -> None:
        """Say how far it is, and be no faster than is allowed."""
        seconds, most = time.monotonic() - self._began, self._options.rows_per_second
        if self._options.report is not None:
            self._options.report(Progress(self._result.table, rows, max(of, 0), seconds))
        if most:
            time.sleep(max(0.0, rows / most - seconds))

    def paced(self, batches: Iterable[pa.RecordBatch], of: int) -> Iterator[pa.RecordBatch]:
        """Batches on their way."""
        rows = 0
        for batch in batches:
            yield batch
            rows += batch.num_rows
            self.pace(rows, of)

    def done(self, log: EmbeddedLog, topic: str) -> Result:
        """The result, with the history of the keys that are named."""
        result = self._result
        if self._named and self._key:
            keys = pa.Table.from_batches(self._named).combine_chunks().to_batches()[0]
            touched = history(log, topic, self._key, keys, max(result.through, result.position))
            for one, positions in zip(result.differences, touched, strict=True):
                one.positions.extend(positions)
        result.seconds = round(time.monotonic() - self._began, 3)
        now = SystemClock().now_us()
        result.at = datetime.fromtimestamp(now / 1e6, UTC).isoformat(timespec="milliseconds")
        _note(log, result)
        return result


def history(
    log: EmbeddedLog, topic: str, key: Sequence[str], keys: pa.RecordBatch, through: int
) -> list[list[int]]:
    """For each key the newest positions that touched it; the topic is read once for all."""
    wanted = hash64([keys.column(name) for name in key], 1)
    touched: dict[int, list[int]] = {word: [] for word in wanted.tolist()}
    for batch in log.read(topic, through=through, columns=list(key)):
        words = hash64([batch.data.column(name) for name in key], 1)
        places = np.flatnonzero(np.isin(words, wanted))
        positions = batch.positions.to_numpy()[places].tolist()
        for word, position in zip(words[places].tolist(), positions, strict=True):
            if position not in touched[word][-1:]:
                touched[word] = [*touched[word], position][-HISTORY:]
    return [touched[word] for word in wanted.tolist()]


def _in_order(table: pa.Table, key: Sequence[str]) -> list[pa.RecordBatch]:
    """A table that is held whole, as a side of a comparison."""
    if not key:
        return as_multiset(table.to_batches(), table.schema)
    rows = table.combine_chunks().to_batches()
    if not rows:
        return []
    order = sorted_order(key_words([rows[0].column(name) for name in key], 0))
    return rows if order is None else [take_rows(rows[0], order)]


def _json_rows(rows: pa.RecordBatch) -> list[dict[str, Any]]:
    columns = [json_values(column) for column in rows.columns]
    return [dict(zip(rows.schema.names, one, strict=True)) for one in zip(*columns, strict=True)]


def _note(log: EmbeddedLog, result: Result) -> None:
    """Verified through P, at T, N rows."""
    log.create_topic(VERIFIED, VERIFIED_COLUMNS, exist_ok=True)
    names = [one.split()[0] for one in VERIFIED_COLUMNS.split(", ")]
    log.append(VERIFIED, [{name: getattr(result, name) for name in names}])


def last(log: EmbeddedLog) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The last verification of each (name, table, against), with its time `at`."""
    rows = last_rows(log, VERIFIED, REMEMBERED)
    found = {}
    for row in [] if rows is None else rows.drop_columns(["_position"]).to_pylist():
        row["at"] = row.pop("_received_time").isoformat(timespec="milliseconds")
        found[row["name"], row["table"], row["against"]] = row
    return found
