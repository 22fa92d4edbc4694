"""The processes of ``headrace demo``: ``python -m headrace.cli.demo_worker produce|follow FOLDER``.

They say what they do on stdout, a line each, and end when stdin does: so none is left behind,
however the demo itself ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque

import numpy as np
import pyarrow as pa

import headrace
from headrace.clock import SystemClock
from headrace.model.ddl import TIMESTAMP

TOPIC = "orders"
SCHEMA = "shop string not null, number bigint not null, amount double, at timestamp"
ROWS = 100
"""In each entry; so the number of entries a writer has stored says where to go on."""
SAY_SECONDS = 0.1
WAITS_KEPT = 5_000


def say(*words: object) -> None:
    """Tell the demo; one write, so that a line is whole or not there."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def ending() -> threading.Event:
    """Give an event that is set when stdin ends."""
    event = threading.Event()

    def wait() -> None:
        while os.read(0, 4096):
            pass
        event.set()

    threading.Thread(target=wait, daemon=True).start()
    return event


def rows(shop: str, first: int) -> pa.RecordBatch:
    """Make the orders `first` and following of a shop."""
    numbers = np.arange(first, first + ROWS)
    now = SystemClock().now_us()
    columns = [
        pa.repeat(pa.scalar(shop), ROWS),
        pa.array(numbers),
        pa.array(numbers % 997 / 4),
        pa.repeat(pa.scalar(now, pa.int64()), ROWS).cast(TIMESTAMP),
    ]
    return pa.RecordBatch.from_arrays(columns, ["shop", "number", "amount", "at"])


def produce(folder: str, shop: str) -> None:
    """Append orders, entry after entry, from where the log says this shop's writer is."""
    over = ending()
    rows(shop, 0)  # what is imported on first use takes its time before the clock runs
    with headrace.connect(folder, create=False) as log:
        writer = log.writer(f"demo/{shop}")
        say("stored", writer.version)
        while not over.is_set():
            receipt = writer.append(TOPIC, rows(shop, writer.version * ROWS))
            say("ack", receipt.position, writer.version, log.journal.syncs)


def follow(folder: str) -> None:
    """Follow the topic, and say how far it is and how long rows took to become visible."""
    over = ending()
    rows("", 0)
    position = seen = 0
    waits: deque[int] = deque(maxlen=WAITS_KEPT)
    said = 0.0
    with headrace.connect(folder, create=False) as log:
        say("follows")
        while not over.is_set() or position < log.position:
            for batch in log.read(TOPIC, after=position, follow=True, timeout=SAY_SECONDS):
                now = SystemClock().now_us()
                position, seen = batch.position, seen + len(batch)
                sent = batch.sent_time.cast(pa.int64()).to_numpy()[::ROWS]
                waits.extend((now - sent).tolist())
                if time.monotonic() - said >= SAY_SECONDS:
                    _said(seen, position, waits)
                    said = time.monotonic()
            position = max(position, log.position) if over.is_set() else position
            _said(seen, position, waits)


def _said(seen: int, position: int, waits: deque[int]) -> None:
    if waits:
        half, most = np.percentile(waits, [50, 99]) / 1000
        say("seen", seen, position, f"{half:.3f}", f"{most:.3f}")


if __name__ == "__main__":
    (produce if sys.argv[1] == "produce" else follow)(*sys.argv[2:])
