"""A change feed: first the rows as they are, then every change; a token after each event.

    event    snapshot   snapshot   live     changes     changes     through
    token    T-120s500  T-120s900  T-120    T-120.500   T-135       T-160
             '- rows at position 120 -'     '--- entry 135 ---'     nothing came up to 160

*The token is exactly what its reader has.* `T` names the log and the topic. `120s900`: the first
900 rows of the topic as it is at position 120, in the order of keys. `120.500`: everything through
120, and the first 500 rows that came after it. `135`: everything through 135. What is visible at a
position never changes, and neither does the order in which it is read, so a count of rows is enough
to go on from: whoever holds a token, in this process or the next one, is handed the rest, and
nothing else.

*A cut anywhere loses nothing and repeats nothing.* A reader takes an event whole or not at all (an
event of SSE counts once its empty line is there), and with it the token; every row is in one event,
and the event's token covers exactly the rows up to its end. A row is in the snapshot at P if its
entry is at or below P, else it is a change: both are cut at P, which stands in the token.

*Bounded.* An event has at most `ROWS_MAX` rows and about `BYTES_MAX` bytes. `take` makes a few of
them, when the reader has room for them and not before: a slow reader costs one window of the log
and one chunk of text, however far it is behind.

The current rows of a topic with a key are its table; of `changes` without a key they are the
changes added up, which reads the topic once and holds its rows in memory; `events` without a key
have none. Rejected: a snapshot that moves while it is read, to be mended by the changes (half of
the readers would show a table that never was); tokens kept by the server (it may forget).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace import errors
from headrace.model.json_values import json_values

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog
    from headrace.model.records import Batch
    from headrace.model.topic import Topic

ROWS_MAX = 500
BYTES_MAX = 256 << 10
STARTS = ("rows", "now", "earliest")
"""What comes first: the current rows, only what is new, or everything that ever came."""
TOKEN = re.compile(r"([0-9a-f]{8})\.(\d{1,9})-(\d{1,19})(?:([s.])(\d{1,19}))?(?:g(\d{1,9}))?")
_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Token:
    """What a reader has."""

    of: str
    """Which topic of which log."""
    position: int
    rows: int = 0
    """Of the snapshot at the position, or of what came after it."""
    snapshot: bool = False
    generation: int = 1
    """Of the schema; 0: all of them were wanted."""

    def __str__(self) -> str:
        """As it travels; safe in an address and in a header."""
        more = f"{'s' if self.snapshot else '.'}{self.rows}" if self.snapshot or self.rows else ""
        generation = f"g{self.generation}" if self.generation != 1 else ""
        return f"{self.of}-{self.position}{more}{generation}"

    @classmethod
    def read(cls, text: str, log: EmbeddedLog, topic: Topic) -> Token:
        """Understand a token of this topic; one of another topic would leave out rows of this."""
        found = TOKEN.fullmatch(text)
        of = begin_of(log, topic)
        if found is None or f"{found[1]}.{found[2]}" != of:
            what = "is not a token"
            if found is not None:
                same = of.startswith(found[1])
                what = f"is not of topic '{topic.name}'" if same else "is a token of another log"
            raise errors.BadFeedToken(f"'{text[:60]}' {what}", place=log.path)
        generation = int(found[6] or 1)
        return cls(of, int(found[3]), int(found[5] or 0), found[4] == "s", generation)


def begin_of(log: EmbeddedLog, topic: Topic) -> str:
    """What a token begins with: tells one log from another, and a topic from one of its name."""
    return f"{log.history[:8]}.{topic.id}"


class Feed:
    """The feed of one topic for one reader. Not for several threads at once."""

    def __init__(
        self, log: EmbeddedLog, topic: str, token: str | None = None, start: str = "rows"
    ) -> None:
        """Begin after `token`; without one as `start` says. Nothing is read yet."""
        self.topic = log.topic(topic)
        self._log = log
        if start not in STARTS:
            raise errors.BadParameter(
                f"start={start} is not one of {', '.join(STARTS)}", place="start"
            )
        if token is not None:
            self.token = Token.read(token, log, self.topic)
        else:
            has_rows = bool(self.topic.key) or self.topic.kind == "changes"
            position = 0 if start == "earliest" else log.position
            rows_first = has_rows and start == "rows"
            generation = self.topic.schema.generation if has_rows and start != "earliest" else 0
            self.token = Token(begin_of(log, self.topic), position, 0, rows_first, generation)
        self._generation = self.token.generation
        self._check(self.topic.schema.generation)
        if self.token.position > log.position:
            raise errors.BadFeedToken(
                f"'{self.token}' is ahead of the log, which is at {log.position}", place=log.path
            )
        since = log.since_of(topic)
        if token is not None and self.token.position < since:
            raise errors.BadFeedToken(
                f"'{token}' is too old: topic '{topic}' is whole from position {since} on",
                place=log.path,
                why="retention or compaction has let go rows behind it",
            )
        self._seen = self.token.position
        self._texts = self._run()

    def _check(self, generation: int) -> None:
        """Rows of older generations count no more, and nobody says so of each of them."""
        if self._generation not in (0, generation):
            raise errors.BadFeedToken(
                f"topic '{self.topic.name}' was begun anew, as generation {generation}",
                place=self._log.path,
                why="a column got a type that does not hold its old values",
            )

    def take(self) -> bytes:
        """The next events that are there, as SSE; empty: there are none now."""
        parts: list[bytes] = []
        size = 0
        for text in self._texts:
            if text is None:
                break
            parts.append(text)
            size += len(text)
            if size >= BYTES_MAX:
                break
        return b"".join(parts)

    def beat(self) -> bytes:
        """Something to send when nothing comes: through where nothing came, if that is news."""
        if self.token.rows or self.token.snapshot or self._seen <= self.token.position:
            return b": still here\n\n"
        return self._event("through", Token(self.token.of, self._seen), {"position": self._seen})

    def close(self) -> None:
        """Let go of the reading."""
        self._texts.close()

    # -- events -----------------------------------------------------------------------------

    def _event(self, name: str, token: Token, data: dict[str, Any]) -> bytes:
        self.token = replace(token, generation=self._generation)
        return sse(name, data, str(self.token))

    def _run(self) -> Any:
        """Events, and None whenever there is no more for now."""
        if self.token.snapshot:
            yield from self._snapshot()
        yield from self._changes()

    def _snapshot(self) -> Iterator[bytes]:
        of, position, sent = self.token.of, self.token.position, self.token.rows
        for rows in pieces(current_rows(self._log, self.topic.name, position), sent):
            sent += rows.num_rows
            data = {"position": position, "rows": row_objects(rows)}
            yield self._event("snapshot", Token(of, position, sent, snapshot=True), data)
        yield self._event("live", Token(of, position), {"position": position, "rows": sent})

    def _changes(self) -> Iterator[bytes | None]:
        of, done, sent = self.token.of, self.token.position, self.token.rows
        reading = self._log.read(self.topic.name, after=done, follow=True)
        skip = sent
        try:
            while True:
                seen = self._log.position
                batch = reading.poll()
                topic = self._log.topic(self.topic.name)
                if topic.id != self.topic.id:
                    raise errors.BadFeedToken(
                        f"topic '{topic.name}' was deleted and made anew", place=self._log.path
                    )
                if batch is None:
                    self._seen = seen
                    yield None
                    continue
                self._check(topic.schemas[batch.schema_version - 1].generation)
                for rows, position, received, ends in entries_of(batch):
                    skipped = min(skip, rows.num_rows)
                    skip -= skipped
                    for piece in pieces([rows], skipped):
                        sent += piece.num_rows
                        skipped += piece.num_rows
                        last = ends and skipped == rows.num_rows
                        token = Token(of, position) if last else Token(of, done, sent)
                        data = {"position": position, "received": received, "last": last}
                        yield self._event("changes", token, data | {"changes": changes(piece)})
                    if ends:
                        done, sent = position, 0
        finally:
            reading.close()


def sse(name: str, data: dict[str, Any], token: str = "") -> bytes:
    """One event as it travels."""
    mark = f"id: {token}\n" if token else ""
    return f"{mark}event: {name}\ndata: {_dumps(data)}\n\n".encode()


def current_rows(log: EmbeddedLog, name: str, at: int) -> Iterable[pa.RecordBatch]:
    """The rows of a topic at a position: by key, or added up where there is none."""
    if log.topic(name).key:
        scan = log.table(name).scan(at=at)
        return (batch.drop_columns(["_position"]) for batch in scan)
    from headrace.pipelines.views.reading import added_up

    batches: list[pa.RecordBatch] = added_up(log, name, at).to_batches()
    return batches


def pieces(batches: Iterable[pa.RecordBatch], skip: int) -> Iterator[pa.RecordBatch]:
    """The rows after the first `skip`, in pieces for one event each."""
    for batch in batches:
        left = batch.slice(min(skip, batch.num_rows))
        skip -= batch.num_rows - left.num_rows
        most = BYTES_MAX * left.num_rows // max(1, left.nbytes)
        step = max(1, min(ROWS_MAX, most))
        for start in range(0, left.num_rows, step):
            yield left.slice(start, step)


def entries_of(batch: Batch) -> Iterator[tuple[pa.RecordBatch, int, str, bool]]:
    """The rows of each entry of a batch: its position, when it came, whether these are its last."""
    positions = batch.positions.to_numpy()
    times = json_values(batch.received_time)
    starts = [0, *(np.flatnonzero(np.diff(positions)) + 1).tolist(), len(positions)]
    for start, stop in pairwise(starts):
        if stop > start:
            ends = stop < len(positions) or batch.last
            rows = batch.data.slice(start, stop - start)
            yield rows, int(positions[start]), times[start], ends


def row_objects(rows: pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows as JSON objects."""
    names = rows.schema.names
    columns = [json_values(column) for column in rows.columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def changes(rows: pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows of a topic with weight and operation beside them; +1 where the topic has no weights."""
    names = set(rows.schema.names)
    own = {"_weight": "weight", "_op": "op"}
    beside = {own[name]: json_values(rows.column(name)) for name in own if name in names}
    weights = beside.get("weight") or [1] * rows.num_rows
    ops = beside.get("op") or [None] * rows.num_rows
    objects = row_objects(rows.drop_columns([name for name in own if name in names]))
    if not objects:  # a topic without columns of its own
        objects = [{} for _ in weights]
    return [
        {"weight": weight, "op": op, "row": row}
        for weight, op, row in zip(weights, ops, objects, strict=True)
    ]
