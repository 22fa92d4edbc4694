"""The last rows of a topic, for those who ask again and again.

The journal has no index: to find the last rows of a topic its newest file is walked, which may hold
50,000 entries. A status that does so every second would need more than a second for it. So the
reading is kept beside the log handle: the first call walks, each later one reads what is new.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import pyarrow as pa

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog

_tails: WeakKeyDictionary[EmbeddedLog, dict[tuple[str, int], _Tail]] = WeakKeyDictionary()
_turn = threading.Lock()


class _Tail:
    def __init__(self, log: EmbeddedLog, topic: str, count: int) -> None:
        starts = {p: max(0, end - count) for p, end in enumerate(log.ends(topic))}
        self.reading = log.read(topic, starts, follow=True)
        self.count = count
        self.rows: pa.Table | None = None

    def look(self) -> pa.Table | None:
        parts = [] if self.rows is None else [self.rows]
        while (batch := self.reading.poll()) is not None:
            columns: dict[str, Any] = dict(
                zip(batch.data.schema.names, batch.data.columns, strict=True)
            )
            columns |= {"_position": batch.positions, "_received_time": batch.received_time}
            parts.append(pa.table(columns))
        if len(parts) > 1 or (self.rows is None and parts):
            rows = pa.concat_tables(parts, promote_options="default")
            kept = range(max(0, rows.num_rows - self.count), rows.num_rows)
            self.rows = rows.take(pa.array(kept, pa.int64()))  # copied: nothing else is kept
        return self.rows


def last_rows(log: EmbeddedLog, topic: str, count: int) -> pa.Table | None:
    """The last `count` rows of a topic, with `_position` and `_received_time`; None: no rows."""
    with _turn:
        tails = _tails.setdefault(log, {})
        tail = tails.get((topic, count))
        if tail is None:
            if topic not in {one.name for one in log.topics()}:
                return None
            tail = tails[topic, count] = _Tail(log, topic, count)
        return tail.look()
