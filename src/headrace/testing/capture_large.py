"""Transactions larger than memory, captured by a process whose memory is measured.

One after the other, each one transaction: rows are inserted, some of them are updated (default
replica identity: old rows are looked up), all kinds of changes with savepoints that are taken back
while the server streams them, the table is truncated and filled again. The process may be killed at
random instants meanwhile. Then each transaction is one entry, and the rows add up to the table.

Memory is what Linux says of the process: the most that was resident (`VmHWM`), and the most of it
that was its own (`RssAnon`: not files that it has mapped, which the system takes back when it needs
memory). That it does take them back shows a **limit**: a control group whose processes get so much
memory for all that they do, pages of files that they map, read or write included, and are killed if
they need more at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
import pyarrow.compute as pc

import headrace as hr
from headrace.log.embedded.log import EmbeddedLog
from headrace.sources.postgres import catalog
from headrace.sources.postgres.capture import Capture
from headrace.sources.postgres.large import PART_BYTES
from headrace.testing.postgres import Server, fresh_database

NAME = "shop"
OWN_MAX = 256
"""Megabytes that a capture may take, whatever the size of a transaction (issue 5)."""
TABLES = """
    create table bulk(id bigint primary key, a int, b bigint, c numeric(12, 2), t text,
        at timestamptz, flag boolean);
    create table other(id bigint primary key, v int, big text);
    alter table other alter big set storage external;
"""
INSERT = """
    insert into bulk select g, g % 1000, g * 7, (g % 100000) / 100.0, 'row ' || g, now(), g % 2 = 0
    from generate_series({}, {}) g
"""
CHILD = """
import json, sys, threading, time
import headrace as hr
from headrace.sources.postgres.capture import Capture

def status():
    lines = open("/proc/self/status").read().splitlines()
    return {k: int(v.split()[0]) >> 10 for k, _, v in (one.partition(":") for one in lines)
            if k in ("VmHWM", "RssAnon")}

own, last = 0, 0
def watch():
    global own
    while True:
        own = max(own, status()["RssAnon"])
        time.sleep(0.01)

folder, dsn, part_bytes, upto = sys.argv[1:]
with hr.connect(folder) as log:
    shop = Capture(log, "shop", dsn, part_bytes=int(part_bytes), heartbeat_seconds=1.0)
    threading.Thread(target=watch, daemon=True).start()
    begun = status()
    shop.run(int(upto))
    print(json.dumps({"begun": begun["RssAnon"], "resident": status()["VmHWM"], "own": own}))
"""


@dataclass
class Step:
    """One transaction, and what capturing it took."""

    name: str
    rows: int
    seconds: float
    resident: int
    """The most that was resident."""
    own: int
    """The most that was the process's own."""
    begun: int
    """What was its own before it began."""
    kills: int


@dataclass
class Bulk:
    """What was done and found."""

    steps: list[Step] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)


def bulk(
    rows: int = 10_000_000,
    *,
    part_bytes: int = PART_BYTES,
    kills: int = 0,
    seed: int = 1,
    only: str = "",
    limit: int = 0,
) -> Bulk:
    """Run the steps (those whose name contains `only`), each killed so many times.

    `limit`: megabytes that the capture gets; 0: as much as it wants.
    """
    found, chance = Bulk(), Random(f"large {seed}")
    some, few = rows // 5, rows // 250
    steps = {
        "insert": [INSERT.format(1, rows)],
        "update": [f"update bulk set a = a + 1, t = t || '!' where id <= {some}"],
        "savepoints": [
            INSERT.format(rows + 1, rows + some),
            f"insert into other select g, g, repeat('x', 3000) from generate_series(1, {few}) g",
            "savepoint one",
            INSERT.format(rows + some + 1, rows + 2 * some),
            f"update bulk set b = -1 where id <= {some}",
            "rollback to one",
            f"update bulk set id = -id, a = 5 where id > {rows} and id % 3 = 0",
            "update other set v = v + 1",
            "savepoint two",
            "delete from other",
            "rollback to two",
            f"delete from bulk where id between {some // 2} and {some}",
            f"update bulk set c = 1 where id < {-rows} or id < {some // 4}",
        ],
        "truncate": [
            f"update bulk set c = 2 where id < {some}",
            "truncate bulk",
            INSERT.format(1, some),
            "update bulk set c = 3 where id % 2 = 0",
        ],
    }
    with (
        TemporaryDirectory(prefix="headrace-") as folder,
        limited(limit) as group,
        Server(max_wal_size="4GB") as server,
        fresh_database(server, "shop") as database,
        server.connect(database) as connection,
        hr.connect(Path(folder) / "log") as log,
    ):
        connection.execute(TABLES)
        dsn = server.dsn(database)
        Capture(log, NAME, dsn).run("caught up")
        for name, statements in steps.items():
            if only not in name and name != "insert":
                continue
            begin = log.position
            with connection.transaction():
                changed = sum(connection.execute(one).rowcount for one in statements if " " in one)
            upto = catalog.lsn(connection)
            child = [str(Path(folder) / "log"), dsn, str(part_bytes), str(upto)]
            started = time.monotonic()
            done, said = _captured(child, kills, chance, found, group)
            if not done:
                found.wrong.append(f"{name}: the capture ended: {said[-1500:]}")
                break
            memory = json.loads(said.splitlines()[-1])
            seconds = time.monotonic() - started
            found.steps.append(Step(name, changed, seconds, kills=kills, **memory))
            found.wrong += [f"{name}: {one}" for one in _differ(log, connection, begin)]
    return found


@contextlib.contextmanager
def limited(megabytes: int) -> Iterator[Path | None]:
    """A control group of Linux with so much memory for its processes; 0: none.

    Of the second version where memory is in it, else of the first.
    """
    if not megabytes:
        yield None
        return
    first = Path("/sys/fs/cgroup/memory")
    file = "memory.limit_in_bytes" if first.is_dir() else "memory.max"
    group = (first if first.is_dir() else first.parent) / f"headrace-{os.getpid()}"
    group.mkdir()
    try:
        (group / file).write_text(str(megabytes << 20))
        yield group
    finally:
        group.rmdir()


def _captured(
    child: list[str], kills: int, chance: Random, found: Bulk, group: Path | None
) -> tuple[bool, str]:
    """Capture in a process, killed so many times before it may end; what it said."""
    longest = 1.0
    while True:
        begun = time.monotonic()
        joins = (
            [] if group is None else ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', ""]
        )
        process = subprocess.Popen(
            [*joins, sys.executable, "-c", CHILD, *child],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if kills > 0:
            kills -= 1
            try:
                process.wait(chance.uniform(0.3, 2 * longest))
            except subprocess.TimeoutExpired:
                found.events["kills"] += 1
                os.kill(process.pid, signal.SIGKILL)
                process.communicate()
                longest = max(longest, 2 * (time.monotonic() - begun))
                continue
        said, _ = process.communicate()
        return process.returncode == 0, said


def _differ(log: EmbeddedLog, connection: psycopg.Connection[Any], begin: int) -> list[str]:
    """What is wrong after one transaction: sums of the topics, and entries."""
    wrong = []
    columns = {"bulk": ("id", "a", "b", "c", "t"), "other": ("id", "v", "big")}
    for table, names in columns.items():
        sums = ", ".join(
            {"c": "sum(c * 100)::bigint", "t": "sum(length(t))", "big": "sum(length(big))"}.get(
                one, f"sum({one})"
            )
            for one in names
        )
        there = connection.execute(f"select count(*), {sums} from {table}").fetchone()
        assert there is not None
        told = [int(one or 0) for one in there]
        total = [0] * len(told)
        for batch in log.read(f"{NAME}.public.{table}"):
            weight = batch.data["_weight"].to_numpy().astype(np.int64)
            total[0] += int(weight.sum())
            for at, name in enumerate(names, 1):
                total[at] += int((weight * _numbers(batch.data[name])).sum())
        if total != told:
            wrong.append(f"{table} has {told}, the log {total}")
        scanned = sum(part.num_rows for part in log.table(f"{NAME}.public.{table}").scan())
        if scanned != told[0]:
            wrong.append(f"{table} has {told[0]} rows, the topic's table {scanned}")
    positions = {
        position
        for table in columns
        for batch in log.read(f"{NAME}.public.{table}", after=begin)
        for position in np.unique(batch.positions.to_numpy()).tolist()
    }
    if len(positions) != 1:
        wrong.append(f"the transaction is {len(positions)} entries")
    return wrong


def _numbers(column: pa.Array) -> npt.NDArray[np.int64]:
    """Whole numbers to add up: hundredths, lengths."""
    if pa.types.is_string(column.type):
        column = pc.utf8_length(column)
    elif pa.types.is_decimal(column.type):
        column = pc.multiply(column, pa.scalar(100, pa.int64())).cast(pa.int64())
    found: npt.NDArray[np.int64] = column.cast(pa.int64()).fill_null(0).to_numpy()
    return found
