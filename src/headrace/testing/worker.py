"""A process to be killed: appends to a real log and says, line by line, what it was told.

    python -m headrace.testing.worker FOLDER append --first 1000 --count 50
    python -m headrace.testing.worker FOLDER follow
    python -m headrace.testing.worker FOLDER hold append
    python -m headrace.testing.worker FOLDER keep

Each line is written with one system call, so a kill never leaves half of what was acknowledged:
`start NUMBER ROWS COUNTER VALUE` before an append, `taken NUMBER POSITION`, `refused NUMBER WHY` or
`unknown NUMBER WHY` after it, `saw THROUGH JSON` for what a follower was shown, `ready` at the
start, `holds` when a lock is held.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from random import Random
from typing import Any

from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.settings import LogSettings
from headrace.testing.simulation import TOPICS, rows_of, rows_to_write


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says until it is done, or somebody ends it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("task", choices=("append", "follow", "hold", "keep"))
    parser.add_argument("lock", nargs="?", default="append")
    parser.add_argument("--first", type=int, default=0, help="attempts are numbered after this")
    parser.add_argument("--count", type=int, default=1 << 40)
    parser.add_argument("--pad", type=int, default=200)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--settings", default="{}", help="of the log, as JSON")
    chosen = parser.parse_args(arguments)
    try:
        log = EmbeddedLog(chosen.folder, LogSettings(**json.loads(chosen.settings)))
    except errors.HeadraceError as error:
        say(f"refused 0 opening: {error.code} {error.fact}")
        return 1
    say("ready")
    if chosen.task == "append":
        append(log, chosen)
    elif chosen.task == "follow":
        follow(log)
    elif chosen.task == "keep":
        keep(log)
    else:
        lock = getattr(log.journal, f"{chosen.lock}_lock")
        lock.acquire(30.0)
        say("holds")
        time.sleep(3600)
    try:
        log.close()
    except errors.HeadraceError as error:
        say(f"refused 0 closing: {error.code} {error.fact}")
    return 0


def say(line: str) -> None:
    """One line, one system call."""
    os.write(sys.stdout.fileno(), line.encode() + b"\n")


def append(log: EmbeddedLog, chosen: argparse.Namespace) -> None:
    """Append entries of one or two topics, every third with a condition."""
    rng = Random(chosen.first)
    for number in range(chosen.first + 1, chosen.first + 1 + chosen.count):
        rows = {"orders": rng.randrange(1, 5)} | ({"audit": 1} if rng.random() < 0.4 else {})
        counter = f"c{rng.randrange(3)}" if number % 3 == 0 else ""
        pad = chosen.pad * rng.choice((1, 1, 1, 8))
        try:
            value = log.counter(counter) if counter else 0
            say(f"start {number} {json.dumps(rows)} {counter or '-'} {value}")
            with log.transaction() as transaction:
                for topic, count in rows.items():
                    transaction.append(topic, rows_to_write(number, count, pad))
                if counter:
                    transaction.expect(counter, value)
        except errors.Unknown as error:
            say(f"unknown {number} {error.fact}")
        except errors.HeadraceError as error:
            say(f"refused {number} {error.code} {error.fact}")
            time.sleep(0.0 if isinstance(error, errors.Conflict) else 0.01)
        else:
            receipt: Any = transaction.receipt
            say(f"taken {number} {receipt.position}")
        if chosen.pause:
            time.sleep(chosen.pause)


def follow(log: EmbeddedLog) -> None:
    """Read for ever, and say what was shown."""
    through = 0
    for batch in log.read(list(TOPICS), follow=True):
        if batch.last:
            through = batch.position
        rows = rows_of(batch)[0]
        fields = [[r.topic, r.partition, r.offset, r.attempt, r.index, r.value] for r in rows]
        say(f"saw {through} {json.dumps(fields, separators=(',', ':'))}")


def keep(log: EmbeddedLog) -> None:
    """Seal and delete for ever, whenever nobody else does."""
    keeper = log.keeper()
    while True:
        time.sleep(0.05)
        try:
            keeper.turn(close=True)
        except errors.HeadraceError as error:
            say(f"kept {error.code} {error.fact}")
        else:
            say("kept")


if __name__ == "__main__":
    sys.exit(main())
